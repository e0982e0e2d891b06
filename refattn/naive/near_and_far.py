r"""Estimators that attend exactly to near keys and approximately to the others, as formulas."""

from __future__ import annotations

from typing import Literal

from ..arrays.library import Array, constant
from ..typing import ArrayT
from .doors import chunks, formula, near_keys, positive_scale, shared_frequencies
from .terms import (
    average,
    beside,
    chunk_means,
    chunk_sizes,
    half_square_norm,
    hide,
    integers,
    kernel_coordinates,
    log,
    log_kernel,
    present,
    products,
    softmax,
    visible,
    weighted_sum,
    xp,
)


@formula(chunks, positive_scale)
def eva_attention(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    *,
    window: int,
    omega: Array | Literal["mean"] = "mean",
    log_size: bool = True,
    scale: float | None = None,
    mask: Array | None = None,
    causal: bool = False,
) -> ArrayT:
    r"""Attend to the keys of the query's chunk, and to one summary of each other chunk (EVA).

    .. math::
        \mathrm{out}_i = \frac{\sum_{j \in E_i} e^{q_i \cdot k_j} v_j
                               + \sum_c |P_c| \, e^{q_i \cdot \bar k_c} f_c(\omega_c)}
                              {\sum_{j \in E_i} e^{q_i \cdot k_j}
                               + \sum_c |P_c| \, e^{q_i \cdot \bar k_c}}, \qquad
        f_c(\omega) = \frac{\sum_{j \in P_c} \xi(k_j, \omega) \, v_j}
                           {\sum_{j \in P_c} \xi(k_j, \omega)}

    with E_i the keys that query i sees in its own chunk, P_c those of another chunk c and kbar_c
    their mean. Zheng et al., arXiv:2302.04542, who leave out |P_c|.

    Parameters
    ----------
    q, k, v, scale
        As in `random_feature_attention`.
    window : int
        Number of keys of a chunk: key j is in chunk floor(j / window), and query i is in the chunk
        of key i + m - n.
    omega : array, shape (..., C, d), or "mean"
        A frequency for each chunk, in kernel coordinates; or, by default, the mean of its
        distribution: its mean query plus its mean key.
    log_size : bool, default True
        Whether a summary counts once for each visible key of its chunk, |P_c| times, or only once.
    mask : array of bool, broadcasting to (..., 1, m), optional
        True where the queries attend to the key.
    causal : bool, default False
        Query i sees key j only if j <= i + m - n, and summaries of the chunks before its own.

    Returns
    -------
    array, shape (..., n, d_v)
        Same namespace, dtype and device as `q`. Rows that see no key are 0.

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
    q, k = kernel_coordinates(q, scale), kernel_coordinates(k, scale)
    member, seen = chunks_seen(q, k, window, mask, causal)
    mean = chunk_means(k, member)
    omega = _query_means(q, k, window) + mean if isinstance(omega, str) else omega
    weights = softmax(hide(products(omega, k) - half_square_norm(k), member))
    scores = products(q, mean)
    if log_size:
        scores = scores + log(chunk_sizes(member, q))
    return _near_and_far(q, k, v, seen, scores, weighted_sum(weights, v, member))


@formula(chunks, positive_scale)
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
    r"""Attend to the keys of the query's chunk, and to the moments of each other chunk.

    .. math::
        \sum_{j \in P_c} e^{q \cdot k_j} v_j \approx
        |P_c| \, e^{q \cdot \bar k_c + q^T \Sigma_c q / 2}
        \bigl(\bar v_c + \mathrm{Cov}_c(v, k) \, q\bigr)

    with P_c the keys that the query sees in another chunk c, and the same without the last factor
    for the sum of e^(q . k_j). For keys and values with a joint normal distribution of these
    moments, it is the expected sum. The divisor of the covariances is |P_c|. Derived here, from the
    moment generating function of that distribution.

    Parameters
    ----------
    q, k, v, window, scale, mask, causal
        As in `eva_attention`.

    Returns
    -------
    array, shape (..., n, d_v)
        Same namespace, dtype and device as `q`. Rows that see no key are 0. Values are not
        confined to the range of `v`.

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
    q, k = kernel_coordinates(q, scale), kernel_coordinates(k, scale)
    member, seen = chunks_seen(q, k, window, mask, causal)
    d, mean, v_mean = q.shape[-1], chunk_means(k, member), chunk_means(v, member)
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
    return _near_and_far(q, k, v, seen, scores, v_mean, turned)


@formula(shared_frequencies, near_keys, positive_scale)
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
    r"""Attend to near keys exactly, and to all other keys through random features.

    .. math::
        \mathrm{out}_i = \frac{\sum_{j \in E_i} e^{q_i \cdot k_j} v_j
                               + \sum_{j \notin E_i} \hat\kappa_{ij} v_j}
                              {\sum_{j \in E_i} e^{q_i \cdot k_j}
                               + \sum_{j \notin E_i} \hat\kappa_{ij}}, \qquad
        \hat\kappa_{ij} = \frac1S \sum_s \xi(q_i, \omega_s) \, \xi(k_j, \omega_s)

    where E_i are the keys in the window of query i. Both sums are unbiased, but their ratio is not.
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
    seen, near = visible(q, k, mask=mask, causal=causal), visible(q, k, window=window)
    q, k = kernel_coordinates(q, scale), kernel_coordinates(k, scale)
    of_query = xp.matrix_transpose(half_square_norm(q)) + xp.log(constant(omega.shape[-2], q))
    log_estimate = log_kernel(q, k, omega, 0.0) - of_query
    return average(xp.where(near, products(q, k), log_estimate), v, seen)


def chunks_seen(
    q: Array, k: Array, window: int, mask: Array | None, causal: bool
) -> tuple[Array, tuple[Array, Array]]:
    """Return which keys are in each chunk, (..., C, m), and what each query sees.

    Which keys one by one, (..., n, m), and which chunks as a whole, (..., n, C). The last query is
    level with the last key.
    """
    chunk = integers(0, _number_of_chunks(k, window), q)
    own, of_key = _chunk_of_query(q, k, window)[:, None], integers(0, k.shape[-2], q) // window
    member = (of_key == chunk[:, None]) & present(k, mask)
    near = visible(q, k, mask=mask, causal=causal) & (of_key == own)
    far = chunk < own if causal else chunk != own
    return member, (near, far & xp.any(member, axis=-1)[..., None, :])


def _chunk_of_query(q: Array, k: Array, window: int) -> Array:
    n, m = q.shape[-2], k.shape[-2]
    return integers(m - n, m, q) // window


def _number_of_chunks(k: Array, window: int) -> int:
    return -(-k.shape[-2] // window)


def _query_means(q: Array, k: Array, window: int) -> Array:
    """Mean of the queries in each chunk."""
    chunk = integers(0, _number_of_chunks(k, window), q)
    return chunk_means(q, _chunk_of_query(q, k, window) == chunk[:, None])


def _near_and_far(
    q: Array,
    k: Array,
    v: Array,
    seen: tuple[Array, Array],
    scores: Array,
    values: Array,
    turned: Array | None = None,
) -> Array:
    """Average values of near keys and of far chunks, the latter with what each query adds to them.

    Scores of chunks are (..., n, C), their values (..., C, d_v) and these terms (..., C, n, d_v).
    """
    (near, far), m = seen, k.shape[-2]
    weights = softmax(beside(hide(products(q, k), near), hide(scores, far)))
    out = weighted_sum(weights[..., :m], v, near) + weighted_sum(weights[..., m:], values, far)
    if turned is None:
        return out
    return out + xp.sum(xp.matrix_transpose(weights[..., m:])[..., None] * turned, axis=-3)
