r"""RFA and LARA chunk by chunk: what the engine does, without what makes it fast.

Samples attend to the keys: f_s is the mean of the values with weights xi(k_j, omega_s), and log Z_s
the log of their sum. Queries attend to the samples. As both of these merge, causal queries may read
the state (f, log Z) of the keys before their chunk, and the keys of their own chunk pair by pair.
The time is linear in the tokens, and a later key enters nothing that an earlier query reads.
"""

from __future__ import annotations

from typing import Literal

from ..arrays.library import Array, device
from ..typing import ArrayT, Weighting
from .doors import chunk_of_tokens, formula, positive_scale, proposals, shared_frequencies
from .lara import log_alpha, means_of_proposals
from .terms import (
    average,
    finite,
    half_square_norm,
    hide,
    kernel_coordinates,
    log_kernel,
    log_sum_exp,
    present,
    products,
    visible,
    xp,
)


@formula(shared_frequencies, positive_scale, chunk_of_tokens)
def chunked_random_feature_attention(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    *,
    omega: Array,
    log_weight: Array | None = None,
    chunk: int = 64,
    scale: float | None = None,
    mask: Array | None = None,
) -> ArrayT:
    r"""Compute causal `random_feature_attention` with positive features, chunk by chunk.

    .. math::
        \mathrm{out}_i =
        \frac{\sum_s w_s \, \xi(q_i, \omega_s) \, Z_s \, f_s
              + \sum_{j \le i} \hat\kappa_{ij} \, v_j}
             {\sum_s w_s \, \xi(q_i, \omega_s) \, Z_s + \sum_{j \le i} \hat\kappa_{ij}}, \qquad
        Z_s = \sum_j \xi(k_j, \omega_s), \qquad
        f_s = \frac{1}{Z_s} \sum_j \xi(k_j, \omega_s) \, v_j

    with Z and f over the keys before the chunk of query i, and the other sums over keys of the
    chunk. Choromanski et al., arXiv:2009.14794 (prefix sums); Hua et al., arXiv:2202.10447
    (chunks).

    Parameters
    ----------
    q, k, v, omega, log_weight, scale
        As in `random_feature_attention`.
    chunk : int, default 64
        Number of tokens of a chunk, which `refattn.engine` calls a leaf. The result depends on it
        by rounding only.
    mask : array of bool, broadcasting to (..., 1, m), optional
        Keys that queries may see. Query i sees key j only if j <= i + m - n.

    Returns
    -------
    array, shape (..., n, d_v)
        Same namespace, dtype and device as `q`. Rows that see no key are 0.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import naive
    >>> x, v = np.zeros((4, 1)), np.array([[0.0], [2.0], [4.0], [6.0]])
    >>> naive.chunked_random_feature_attention(x, x, v, omega=np.ones((1, 1)), chunk=3).T
    array([[0., 1., 2., 3.]])
    """
    q, k = kernel_coordinates(q, scale), kernel_coordinates(k, scale)
    return _in_chunks(q, (k, v, present(k, mask)), omega, log_weight, chunk, True)


@formula(proposals, positive_scale, chunk_of_tokens)
def chunked_linear_randomized_attention(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    *,
    omega: Array | Literal["mean"],
    num_proposals: int | None = None,
    centres: Array | None = None,
    weighting: Weighting = "balance",
    beta: float = 1.0,
    chunk: int = 64,
    scale: float | None = None,
    mask: Array | None = None,
    causal: bool = False,
) -> ArrayT:
    r"""Compute `linear_randomized_attention`, causal or not, chunk by chunk.

    .. math::
        \mathrm{out}_i =
        \frac{\sum_s \alpha'_{is} \, \xi(q_i, \omega_s) \, Z_s \, f_s}
             {\sum_s \alpha'_{is} \, \xi(q_i, \omega_s) \, Z_s}, \qquad
        Z_s = \sum_j \xi(k_j, \omega_s), \qquad
        f_s = \frac{1}{Z_s} \sum_j \xi(k_j, \omega_s) \, v_j

    over all keys j. Where attention is causal, these are the keys before the chunk of query i, and
    the keys of the chunk add kappa_ij = sum_s alpha'_is xi(q_i, omega_s) xi(k_j, omega_s), as in
    `chunked_random_feature_attention`. All samples attend to all keys; alpha'_is is 0 where query
    i does not have the proposal of sample s. Zheng et al., arXiv:2204.04667; Zheng 2022, LARA.

    Parameters
    ----------
    q, k, v, omega, num_proposals, centres, weighting, beta, scale, causal
        As in `linear_randomized_attention`.
    chunk : int, default 64
        Number of tokens that are taken at once, whatever the chunks of proposals. The result
        depends on it by rounding only.
    mask : array of bool, broadcasting to (..., 1, m), optional
        Keys that queries may see.

    Returns
    -------
    array, shape (..., n, d_v)
        Same namespace, dtype and device as `q`. Rows that see no key are 0.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import naive
    >>> q, k, v = np.array([[9.0]]), np.array([[-1.0], [1.0]]), np.array([[0.0], [1.0]])
    >>> naive.chunked_linear_randomized_attention(q, k, v, omega=np.array([[0.5]]), chunk=1)
    array([[0.73105858]])
    """
    q, k = kernel_coordinates(q, scale), kernel_coordinates(k, scale)
    q_mean, centres, there = means_of_proposals(q, k, centres, num_proposals, mask, causal)
    omega = centres if isinstance(omega, str) else omega
    log_weight = log_alpha(q, omega, q_mean, centres, there, weighting, beta)
    return _in_chunks(q, (k, v, present(k, mask)), omega, log_weight, chunk, causal)


def _in_chunks(
    q: Array,
    keys: tuple[Array, Array, Array],
    omega: Array,
    log_weight: Array,
    chunk: int,
    causal: bool,
) -> Array:
    """Let samples attend to keys, and queries to samples, for log weights (..., n or 1, S)."""
    (k, v, mask), n = keys, q.shape[-2]
    ahead = k.shape[-2] - n  # query i is level with key i + ahead
    log_weight = log_weight + xp.zeros_like(q[..., :1])  # (..., n, S)
    state = _attend(products(omega, k[..., :0, :]), v[..., :0, :], mask[..., :0])  # of no keys

    def tokens(start: int, stop: int) -> tuple[Array, Array, Array]:
        j = slice(max(0, start), max(0, stop))
        return k[..., j, :], v[..., j, :], mask[..., j]

    def extended(state: tuple[Array, Array], start: int, stop: int) -> tuple[Array, Array]:
        k_j, v_j, mask_j = tokens(start, stop)
        return _merge(state, _attend(products(omega, k_j) - half_square_norm(k_j), v_j, mask_j))

    past = max(0, ahead) if causal else k.shape[-2]  # keys that all queries see
    for start in range(0, past, chunk):
        state = extended(state, start, min(start + chunk, past))
    rows = []
    for start in range(0, max(n, 1), chunk):
        stop, (f, log_z) = min(start + chunk, n), state
        q_i, weight_i = q[..., start:stop, :], log_weight[..., start:stop, :]
        done = _attend(products(q_i, omega) + weight_i + xp.matrix_transpose(log_z), f)
        if causal:  # and the keys of the own chunk, pair by pair
            k_j, v_j, mask_j = tokens(start + ahead, stop + ahead)
            seen = visible(q_i, k_j, mask=mask_j, causal=True)
            done = _merge(done, _attend(log_kernel(q_i, k_j, omega, weight_i), v_j, seen))
            state = extended(state, start + ahead, stop + ahead)
        rows.append(done[0])
    return xp.concat(rows, axis=-2)


def _attend(scores: Array, v: Array, seen: Array | None = None) -> tuple[Array, Array]:
    """Mean of the values that are seen with weights e^score, and the log of the sum of these."""
    if seen is None:
        seen = xp.ones((1, 1), dtype=xp.bool, device=device(v))
    return average(scores, v, seen), log_sum_exp(hide(scores, seen))


def _merge(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
    """Join two means, each with its log weight (..., 1): -inf, of nothing, changes nothing."""
    log_total = xp.logaddexp(a[1], b[1])
    share_a, share_b = (xp.exp(x[1] - finite(log_total)) for x in (a, b))
    return share_a * a[0] + share_b * b[0], log_total
