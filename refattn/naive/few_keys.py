r"""Attention to a few keys in place of all, each estimator as its formula."""

from __future__ import annotations

from typing import Any

from ..arrays.library import Array, constant
from ..typing import ArrayT
from .doors import any_scale, formula, key_indices, positive_scale, sampled_keys
from .terms import (
    average,
    beside,
    half_square_norm,
    hide,
    integers,
    kernel_coordinates,
    log_sum_exp,
    one_hot,
    present,
    products,
    softmax,
    visible,
    weighted_sum,
    xp,
)


@formula(key_indices, positive_scale)
def coreset_attention(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    *,
    indices: Any,
    scale: float | None = None,
    mask: Array | None = None,
) -> ArrayT:
    r"""Attend to a few keys that represent all keys (Nystrom approximation of their kernel).

    .. math::
        \mathrm{out}_i = \frac{\sum_{s \in J} e^{q_i \cdot k_s} (W v)_s}
                              {\sum_{s \in J} e^{q_i \cdot k_s} (W 1)_s}, \qquad
        W = h_{JJ}^{-1} h_{JK}, \quad h(k, k') = e^{k \cdot k'}

    after the mean of the visible keys is subtracted from the keys (WildCat, arXiv:2602.10056).
    If J is all keys, W is the identity. Otherwise its entries, and the denominator, may be
    negative.

    Parameters
    ----------
    q, k, v, scale
        As in `random_feature_attention`.
    indices : array of integers, shape (..., S)
        Keys J. A key that is hidden, or equals an earlier key, is ignored.
    mask : array of bool, broadcasting to (..., 1, m), optional
        True where the queries attend to the key.

    Returns
    -------
    array, shape (..., n, d_v)
        Same namespace, dtype and device as `q`. Rows that see no key of J are 0.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import naive
    >>> q, k = np.zeros((1, 1)), np.array([[-1.0], [1.0], [1.0]])
    >>> v = np.array([[0.0], [3.0], [6.0]])
    >>> naive.coreset_attention(q, k, v, indices=np.array([0, 1]))  # the third is the second
    array([[3.]])
    """
    seen = present(k, mask)
    q, k = kernel_coordinates(q, scale), kernel_coordinates(k, scale)
    one, some = xp.where(seen, constant(1.0, q), 0.0), xp.any(seen, axis=-1, keepdims=True)
    mean = weighted_sum(one, k, seen) / xp.where(some, xp.sum(one, axis=-1, keepdims=True), 1.0)
    k = xp.where(xp.matrix_transpose(seen), k - mean, 0.0)
    taken = xp.where(one_hot(indices, k) & seen, constant(1.0, q), 0.0)  # (..., S, m)
    chosen, there = taken @ k, xp.sum(taken, axis=-1, keepdims=True)
    # h_ij = a_i g_ij a_j with log a = |k|^2 / 2 and the Gaussian g_ij = e^{-|k_i - k_j|^2 / 2}.
    log_a, log_a_chosen = half_square_norm(k), half_square_norm(chosen)
    to_keys, to_chosen = (
        there * xp.exp(products(chosen, x) - y - xp.matrix_transpose(log_a_chosen))
        for x, y in ((k, log_a), (chosen, log_a_chosen))
    )
    a = xp.exp(log_a - xp.max(hide(log_a, seen), axis=-1, keepdims=True))
    carried = [weighted_sum(to_keys * a, x, seen) for x in (v, xp.ones_like(v[..., :1]))]
    weights = softmax(products(q, chosen) - log_a_chosen)
    out, norm = (weights @ _solve(to_chosen, x) for x in carried)
    some = xp.any(there > 0, axis=-2, keepdims=True)
    return xp.where(some, out / xp.where(some, norm, 1.0), 0.0)


@formula(sampled_keys, any_scale)
def sampled_key_attention(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    *,
    indices: Any,
    log_probability: Any = None,
    scale: float | None = None,
    mask: Array | None = None,
) -> ArrayT:
    r"""Attend to a sample of the keys, each weighted by the inverse of its sampling probability.

    .. math::
        \mathrm{out}_i = \frac{\sum_{j \in J_i} e^{q_i \cdot k_j} v_j / p_{ij}}
                              {\sum_{j \in J_i} e^{q_i \cdot k_j} / p_{ij}}

    Both sums are unbiased. Their ratio is not, unless p_ij is a multiple of e^(q_i . k_j). Chen et
    al., arXiv:2410.16179; each sum is a Horvitz-Thompson estimate.

    Parameters
    ----------
    q, k, v, scale, mask
        As in `softmax_attention`.
    indices : array of integers, shape (..., S) or (..., n, S)
        Which keys are in the sample: the same for all queries, or a sample for each query if there
        is one more axis. A key may appear several times.
    log_probability : array, shape of `indices`, optional
        log p, where p is the expected number of times that a key is in the sample: the inclusion
        probability if no key appears twice. By default p is the same for all keys.

    Returns
    -------
    array, shape (..., n, d_v)
        Same namespace, dtype and device as `q`. Rows that see no key of the sample are 0.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import naive
    >>> q, k, v = np.zeros((1, 1)), np.zeros((3, 1)), np.array([[0.0], [1.0], [5.0]])
    >>> naive.sampled_key_attention(
    ...     q, k, v, indices=np.array([0, 2]), log_probability=np.log([0.25, 1.0])
    ... )
    array([[1.]])
    """
    member = one_hot(indices[..., None], k)  # (..., n or 1, S, m)
    log_p = log_probability[..., None, :]
    log_count = log_sum_exp(hide(-log_p, xp.matrix_transpose(member)))[..., 0]
    seen = visible(q, k, mask=mask) & xp.any(member, axis=-2)
    return average(scale * products(q, k) + log_count, v, seen)


def _solve(a: Array, b: Array) -> Array:
    """Solve a x = b for a positive semidefinite `a` with ones on its diagonal.

    By elimination. An unknown is 0 if its row depends on those before it.
    """
    size = a.shape[-1]
    rows, at = beside(a, b), integers(0, size, a)[:, None]
    for s in range(size):
        row, pivot = rows[..., s : s + 1, :], rows[..., s : s + 1, s : s + 1]
        free = pivot > size * xp.finfo(a.dtype).eps
        row = xp.where(free, row / xp.where(free, pivot, 1.0), 0.0)
        rows = xp.where(at == s, row, rows - rows[..., :, s : s + 1] * row)
    return rows[..., size:]
