"""Estimators beyond the references: a few keys for all, summaries of chunks, near keys exact."""

from __future__ import annotations

from typing import Any

from .. import _validate
from .._array import Array, array_namespace, as_written, constant, device
from .._heads import broadcast_lead, group_heads
from ..typing import ArrayT
from ._terms import (
    average,
    chunk_means,
    chunk_sizes,
    half_square_norm,
    hide,
    integers,
    kernel_coordinates,
    log,
    log_kernel,
    log_sum_exp,
    products,
    softmax,
    visible,
    weighted_sum,
)

__all__ = [
    "coreset_attention",
    "eva_attention",
    "local_random_feature_attention",
    "sampled_key_attention",
    "second_order_attention",
]


@as_written
def coreset_attention(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    *,
    indices: Any,
    scale: float | None = None,
    mask: Array | None = None,
) -> ArrayT:
    r"""Attend to a few keys that stand for all (Nystrom approximation of the kernel of the keys).

    .. math::
        \mathrm{out}_i = \frac{\sum_{s \in J} e^{q_i \cdot k_s} (W v)_s}
                              {\sum_{s \in J} e^{q_i \cdot k_s} (W 1)_s}, \qquad
        W = h_{JJ}^{-1} h_{JK}, \quad h(k, k') = e^{k \cdot k'}

    with keys less the mean of those seen, a shift that no softmax notices. Where J is all keys, W
    is the identity. Otherwise its entries may be negative, and so may the denominator.
    arXiv:2602.10056.

    Parameters
    ----------
    q, k, v
        As in `softmax_attention`.
    indices : array of integers, shape (..., S)
        Keys J. One that is hidden, or equals one before it, counts as not there.
    scale : float, optional
        Factor on q . k, 1 / sqrt(d) by default, positive.
    mask : array of bool, broadcasting to (..., 1, m), optional
        True where the queries attend to the key.

    Returns
    -------
    array, shape (..., n, d_v)
        Same namespace, dtype and device as `q`. Rows that see no key of J are 0.

    Raises
    ------
    TypeError, ValueError
        As in `refattn.coreset_attention`.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import naive
    >>> q, k = np.zeros((1, 1)), np.array([[-1.0], [1.0], [1.0]])
    >>> v = np.array([[0.0], [3.0], [6.0]])
    >>> naive.coreset_attention(q, k, v, indices=np.array([0, 1]))  # the third is the second
    array([[3.]])
    """
    _validate.attention(q, k, v, mask=mask)
    indices, mask = _validate.key_indices(indices, q, k, v), _validate.one_row(mask, k)
    (q, k, v, mask, indices), ungroup = group_heads(q, k, v, mask, indices[..., None])
    xp, seen = array_namespace(q), _there(k, mask)
    q, k = kernel_coordinates(q, scale), kernel_coordinates(k, scale)
    one, some = xp.where(seen, constant(1.0, q), 0.0), xp.any(seen, axis=-1, keepdims=True)
    mean = weighted_sum(one, k, seen) / xp.where(some, xp.sum(one, axis=-1, keepdims=True), 1.0)
    k = xp.where(xp.matrix_transpose(seen), k - mean, 0.0)
    taken = xp.where(_is(indices, k) & seen, constant(1.0, q), 0.0)  # (..., S, m)
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
    return ungroup(xp.where(some, out / xp.where(some, norm, 1.0), 0.0))


@as_written
def eva_attention(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    *,
    window: int,
    omega: Array | None = None,
    log_size: bool = True,
    scale: float | None = None,
    mask: Array | None = None,
    causal: bool = False,
) -> ArrayT:
    r"""Attend to the keys of the own chunk, and to one summary of each other chunk (EVA).

    .. math::
        \mathrm{out}_i = \frac{\sum_{j \in E_i} e^{q_i \cdot k_j} v_j
                               + \sum_c |P_c| \, e^{q_i \cdot \bar k_c} f_c(\omega_c)}
                              {\sum_{j \in E_i} e^{q_i \cdot k_j}
                               + \sum_c |P_c| \, e^{q_i \cdot \bar k_c}}, \qquad
        f_c(\omega) = \frac{\sum_{j \in P_c} \xi(k_j, \omega) \, v_j}
                           {\sum_{j \in P_c} \xi(k_j, \omega)}

    with the mean key of each chunk. Zheng et al., arXiv:2302.04542, who leave out |P_c|.

    Parameters
    ----------
    q, k, v
        As in `softmax_attention`.
    window : int
        Keys of a chunk: key j is in chunk floor(j / window), and query i in that of the key which
        is level with it, j = i + m - n.
    omega : array, shape (..., C, d), optional
        A frequency for each chunk, in kernel coordinates; by default its mean query plus its mean
        key.
    log_size : bool, default True
        Whether a summary counts |P_c| times, as many as there are keys seen in its chunk, or once.
    scale : float, optional
        Factor on q . k, 1 / sqrt(d) by default, positive.
    mask : array of bool, broadcasting to (..., 1, m), optional
        True where the queries attend to the key.
    causal : bool, default False
        Query i sees key j only if j <= i + m - n, and summaries of the chunks before its own.

    Returns
    -------
    array, shape (..., n, d_v)
        Same namespace, dtype and device as `q`. Rows that see no key are 0.

    Raises
    ------
    TypeError, ValueError
        As in `refattn.eva_attention`.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import naive
    >>> q, k, v = np.zeros((3, 1)), np.zeros((3, 1)), np.array([[0.0], [1.0], [5.0]])
    >>> naive.eva_attention(q, k, v, window=2)
    array([[2.],
           [2.],
           [2.]])
    """
    _validate.attention(q, k, v, mask=mask, causal=causal)
    mask, (window, count) = _validate.one_row(mask, k), _validate.chunks("window", window, q, k)
    if omega is not None:
        omega = _validate.chunk_frequencies(omega, count, q, _validate.lead(q, k, v))
    (q, k, v, mask, omega), ungroup = group_heads(q, k, v, mask, omega)
    q, k = kernel_coordinates(q, scale), kernel_coordinates(k, scale)
    member, near, far = _chunks(q, k, window, count, mask, causal)
    mean = chunk_means(k, member)
    omega = _query_means(q, k, window, count) + mean if omega is None else omega
    weights = softmax(hide(products(omega, k) - half_square_norm(k), member))
    scores = products(q, mean)
    if log_size:
        scores = scores + log(chunk_sizes(member, q))
    return ungroup(_near_and_far(q, k, v, near, far, scores, weighted_sum(weights, v, member)))


@as_written
def second_order_attention(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    *,
    window: int,
    scale: float | None = None,
    mask: Array | None = None,
    causal: bool = False,
) -> ArrayT:
    r"""Attend to the keys of the own chunk, and to the moments of each other chunk.

    .. math::
        \sum_{j \in P_c} e^{q \cdot k_j} v_j \approx
        |P_c| \, e^{q \cdot \bar k_c + q^T \Sigma_c q / 2}
        \bigl(\bar v_c + \mathrm{Cov}_c(v, k) \, q\bigr)

    and so for the sum of e^(q . k_j) without the last factor: what keys and values with a joint
    normal law of these moments give. The divisor of the covariances is |P_c|.

    Parameters
    ----------
    q, k, v, window, scale, mask, causal
        As in `eva_attention`.

    Returns
    -------
    array, shape (..., n, d_v)
        Same namespace, dtype and device as `q`. Rows that see no key are 0. Values are not
        confined to the range of `v`.

    Raises
    ------
    TypeError, ValueError
        As in `refattn.second_order_attention`.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import naive
    >>> q, k, v = np.zeros((3, 1)), np.zeros((3, 1)), np.array([[0.0], [1.0], [5.0]])
    >>> naive.second_order_attention(q, k, v, window=2)
    array([[2.],
           [2.],
           [2.]])
    """
    _validate.attention(q, k, v, mask=mask, causal=causal)
    mask, (window, count) = _validate.one_row(mask, k), _validate.chunks("window", window, q, k)
    (q, k, v, mask), ungroup = group_heads(q, k, v, mask)
    q, k = kernel_coordinates(q, scale), kernel_coordinates(k, scale)
    member, near, far = _chunks(q, k, window, count, mask, causal)
    xp, d = array_namespace(q), q.shape[-1]
    mean, v_mean = chunk_means(k, member), chunk_means(v, member)
    one = xp.matrix_transpose(xp.astype(member, q.dtype))  # (..., m, C)
    apart, v_apart = (
        xp.where(xp.any(member, axis=-2)[..., None], x - one @ y, 0.0)
        for x, y in ((k, mean), (v, v_mean))
    )
    pairs = (apart[..., :, None] * x[..., None, :] for x in (apart, v_apart))
    cov, cross = (
        chunk_means(xp.reshape(x, (*x.shape[:-2], x.shape[-2] * x.shape[-1])), member)
        for x in pairs
    )
    cov, cross = (xp.reshape(x, (*x.shape[:-1], d, x.shape[-1] // d)) for x in (cov, cross))
    along = q[..., None, :, :] @ cov  # q^T Sigma_c, (..., C, n, d)
    spread = xp.matrix_transpose(xp.sum(along * q[..., None, :, :], axis=-1))
    scores = products(q, mean) + spread / 2 + log(chunk_sizes(member, q))
    turned = q[..., None, :, :] @ cross  # Cov_c(v, k) q, (..., C, n, d_v)
    return ungroup(_near_and_far(q, k, v, near, far, scores, v_mean, turned))


@as_written
def local_random_feature_attention(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    *,
    window: tuple[int | None, int | None],
    omega: Array,
    scale: float | None = None,
    mask: Array | None = None,
    causal: bool = False,
) -> ArrayT:
    r"""Attend to near keys exactly, and to all others through random features.

    .. math::
        \mathrm{out}_i = \frac{\sum_{j \in E_i} e^{q_i \cdot k_j} v_j
                               + \sum_{j \notin E_i} \hat\kappa_{ij} v_j}
                              {\sum_{j \in E_i} e^{q_i \cdot k_j}
                               + \sum_{j \notin E_i} \hat\kappa_{ij}}, \qquad
        \hat\kappa_{ij} = \frac1S \sum_s \xi(q_i, \omega_s) \, \xi(k_j, \omega_s)

    where E_i are the keys in the window of query i. Both sums are unbiased, their ratio is not.
    Near and far fields: Chen et al., arXiv:2110.15343; Zhang et al., arXiv:2410.10254.

    Parameters
    ----------
    q, k, v, omega, scale, mask, causal
        As in `random_feature_attention`.
    window : pair of int or None
        (left, right): key j is in E_i if i + m - n - left <= j <= i + m - n + right. None is no
        limit on that side.

    Returns
    -------
    array, shape (..., n, d_v)
        Same namespace, dtype and device as `q`. Rows that see no key are 0.

    Raises
    ------
    TypeError, ValueError
        As in `refattn.local_random_feature_attention`.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import naive
    >>> q, k, v = np.ones((2, 1)), np.array([[0.0], [1.0]]), np.array([[0.0], [1.0]])
    >>> omega = np.array([[1.5]])
    >>> naive.local_random_feature_attention(q, k, v, omega=omega, window=(None, 0))
    array([[0.88079708],
           [0.73105858]])
    """
    _validate.attention(q, k, v, mask=mask, causal=causal)
    omega, log_weight = _validate.frequencies(omega, None, q, _validate.lead(q, k, v))
    (q, k, v, omega, log_weight, mask), ungroup = group_heads(
        q, k, v, omega, log_weight[..., None, :], mask
    )
    xp, seen = array_namespace(q), visible(q, k, mask=mask, causal=causal)
    near = visible(q, k, window=window)
    q, k = kernel_coordinates(q, scale), kernel_coordinates(k, scale)
    of_query = xp.matrix_transpose(half_square_norm(q)) + xp.log(constant(omega.shape[-2], q))
    log_estimate = log_kernel(q, k, omega, log_weight) - of_query
    return ungroup(average(xp.where(near, products(q, k), log_estimate), v, seen))


@as_written
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
    r"""Attend to a sample of the keys, each divided by how often it is expected in one.

    .. math::
        \mathrm{out}_i = \frac{\sum_{j \in J_i} e^{q_i \cdot k_j} v_j / p_{ij}}
                              {\sum_{j \in J_i} e^{q_i \cdot k_j} / p_{ij}}

    Both sums are unbiased, their ratio is not, unless p_ij is a multiple of e^(q_i . k_j).

    Parameters
    ----------
    q, k, v
        As in `softmax_attention`.
    indices : array of integers, shape (..., S) or (..., n, S)
        Which keys are in the sample, the same for all queries or one for each: of each query if
        there is an axis more than the heads and S. A key may come several times.
    log_probability : array, shape of `indices`, optional
        log p: the expected number of times that a key is in the sample, which is its inclusion
        probability where none comes twice. The same for all by default.
    scale : float, optional
        Factor on q . k, 1 / sqrt(d) by default.
    mask : array of bool, broadcasting to (..., n, m), optional
        True where the query attends to the key.

    Returns
    -------
    array, shape (..., n, d_v)
        Same namespace, dtype and device as `q`. Rows that see no key of the sample are 0.

    Raises
    ------
    TypeError, ValueError
        As in `refattn.sampled_key_attention`.

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
    _validate.attention(q, k, v, mask=mask)
    indices, log_p = _validate.sample_of_keys(indices, log_probability, q, k, v)
    scale = _validate.real("scale", scale, optional=True, like=q)
    (q, k, v, mask, indices, log_p), ungroup = group_heads(q, k, v, mask, indices, log_p)
    factor = constant(q.shape[-1], q) ** -0.5 if scale is None else scale
    xp, member = array_namespace(q), _is(indices[..., None], k)  # (..., n or 1, S, m)
    log_count = log_sum_exp(hide(-log_p[..., None, :], xp.matrix_transpose(member)))[..., 0]
    seen = visible(q, k, mask=mask) & xp.any(member, axis=-2)
    return ungroup(average(factor * products(q, k) + log_count, v, seen))


def _there(k: Array, mask: Array | None) -> Array:
    """Keys that all queries see, (..., 1, m)."""
    xp = array_namespace(k)
    seen = xp.ones((1, k.shape[-2]), dtype=xp.bool, device=device(k))
    return seen if mask is None else seen & mask


def _is(indices: Array, k: Array) -> Array:
    """Whether key j is the one of an index, (..., 1) to (..., m)."""
    return indices == integers(0, k.shape[-2], k)


def _solve(a: Array, b: Array) -> Array:
    """Solve a x = b for a positive semidefinite `a` with ones on its diagonal.

    By elimination. An unknown is 0 if its row depends on those before it.
    """
    xp, size = array_namespace(a), a.shape[-1]
    rows, at = _beside(a, b), integers(0, size, a)[:, None]
    for s in range(size):
        row, pivot = rows[..., s : s + 1, :], rows[..., s : s + 1, s : s + 1]
        free = pivot > size * xp.finfo(a.dtype).eps
        row = xp.where(free, row / xp.where(free, pivot, 1.0), 0.0)
        rows = xp.where(at == s, row, rows - rows[..., :, s : s + 1] * row)
    return rows[..., size:]


def _beside(a: Array, b: Array) -> Array:
    """Join along the last axis what has other leading axes."""
    xp, lead = array_namespace(a), broadcast_lead(a, b)
    return xp.concat([xp.broadcast_to(x, (*lead, *x.shape[-2:])) for x in (a, b)], axis=-1)


def _chunks(
    q: Array, k: Array, window: int, count: int, mask: Array | None, causal: bool
) -> tuple[Array, Array, Array]:
    """Members of each chunk, (..., C, m); keys a query sees one by one; chunks it sees as a whole.

    The last query is level with the last key. These are (..., n, m) and (..., n, C).
    """
    xp, chunk = array_namespace(q), integers(0, count, q)
    own, of_key = _chunk_of_query(q, k, window)[:, None], integers(0, k.shape[-2], q) // window
    member = (of_key == chunk[:, None]) & _there(k, mask)
    near = visible(q, k, mask=mask, causal=causal) & (of_key == own)
    far = chunk < own if causal else chunk != own
    return member, near, far & xp.any(member, axis=-1)[..., None, :]


def _chunk_of_query(q: Array, k: Array, window: int) -> Array:
    n, m = q.shape[-2], k.shape[-2]
    return integers(m - n, m, q) // window


def _query_means(q: Array, k: Array, window: int, count: int) -> Array:
    """Mean of the queries in each chunk."""
    return chunk_means(q, _chunk_of_query(q, k, window) == integers(0, count, q)[:, None])


def _near_and_far(
    q: Array,
    k: Array,
    v: Array,
    near: Array,
    far: Array,
    scores: Array,
    values: Array,
    turned: Array | None = None,
) -> Array:
    """Average values of near keys and of far chunks, the latter with what each query adds to them.

    Scores of chunks are (..., n, C), their values (..., C, d_v) and these terms (..., C, n, d_v).
    """
    xp, m = array_namespace(q), k.shape[-2]
    weights = softmax(_beside(hide(products(q, k), near), hide(scores, far)))
    out = weighted_sum(weights[..., :m], v, near) + weighted_sum(weights[..., m:], values, far)
    if turned is None:
        return out
    return out + xp.sum(xp.matrix_transpose(weights[..., m:])[..., None] * turned, axis=-3)
