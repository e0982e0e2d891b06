r"""Linear randomized attention (LARA), as its formula."""

from __future__ import annotations

from typing import Any, Literal

from ..arrays.library import Array, device
from ..typing import ArrayT, Weighting
from .doors import formula, positive_scale, proposals
from .terms import (
    average,
    chunk_means,
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
    xp,
)


@formula(proposals, positive_scale)
def linear_randomized_attention(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    *,
    omega: Array | Literal["mean"],
    num_proposals: int | None = None,
    centres: Array | None = None,
    weighting: Weighting = "balance",
    beta: float = 1.0,
    scale: float | None = None,
    mask: Array | None = None,
    causal: bool = False,
) -> ArrayT:
    r"""Estimate softmax attention from several data-dependent proposals (LARA).

    .. math::
        \mathrm{out}_i =
        \frac{\sum_s \alpha'_{is} \, \xi(q_i, \omega_s) \sum_j \xi(k_j, \omega_s) \, v_j}
             {\sum_s \alpha'_{is} \, \xi(q_i, \omega_s) \sum_j \xi(k_j, \omega_s)}, \qquad
        \alpha'_{is} = \alpha_{is} \frac{N(\omega_s; 0, I)}{q_c(\omega_s)}

    with c = c(s) the proposal N(mu_c, I) of sample s, over the keys j that query i sees: RFA with
    weights. Zheng et al., arXiv:2204.04667; Zheng 2022, LARA.

    Parameters
    ----------
    q, k, v, scale
        As in `random_feature_attention`.
    omega : array, shape (..., S, d), or "mean"
        Frequencies, in kernel coordinates: each S / C consecutive ones belong to one proposal; or
        the means mu_c.
    num_proposals : int, optional
        Number C of proposals, S by default, or that of `centres`. With ``omega="mean"`` it is
        needed if there are no `centres`.
    centres : array, shape (..., C, d), optional
        Means mu_c of the proposals, in kernel coordinates. By default mu_c is the mean query plus
        the mean key of chunk c, of C contiguous chunks with equal numbers of tokens.
    weighting : {"balance", "own", "query", "query-over-queries"}
        The weights alpha, with B_s = q_c(omega_s) / sum_c' q_c'(omega_s):

        * ``"balance"``: alpha_s = B_s, the balance heuristic;
        * ``"own"``: alpha constant;
        * ``"query"``: alpha_is = max(0, B_s + beta (t_ic - mean_c t_ic)),
          t_i = softmax_c(qbar_c . q_i) with qbar_c the mean query of chunk c;
        * ``"query-over-queries"``: the same with the softmax taken over i.
    beta : float, default 1.0
        Strength of the dependence on the query.
    mask : array of bool, broadcasting to (..., n, m), optional
        As in `random_feature_attention`. Chunks of keys have equal numbers of keys that some
        query sees; the mean of none is 0.
    causal : bool, default False
        Query i sees key j only if j <= i + m - n. The first proposal is N(0, I); the others
        are those of all chunks of n / C queries but the last. Queries of chunk t use N(0, I) and
        the chunks before t. Chunks of keys are aligned with chunks of queries.

    Returns
    -------
    array, shape (..., n, d_v)
        Same namespace, dtype and device as `q`. Rows that see no key are 0.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import naive
    >>> q, k, v = np.array([[9.0]]), np.array([[-1.0], [1.0]]), np.array([[0.0], [1.0]])
    >>> naive.linear_randomized_attention(q, k, v, omega=np.array([[0.5]]))  # e / (1 + e)
    array([[0.73105858]])
    """
    seen = visible(q, k, mask=mask, causal=causal)
    q, k = kernel_coordinates(q, scale), kernel_coordinates(k, scale)
    q_mean, centres, there = means_of_proposals(q, k, centres, num_proposals, mask, causal)
    omega = centres if isinstance(omega, str) else omega
    log_weight = log_alpha(q, omega, q_mean, centres, there, weighting, beta)
    return average(log_kernel(q, k, omega, log_weight), v, seen)


def _members(chunk: Array, count: int, like: Array) -> Array:
    """Which rows are in each chunk, (..., C, n)."""
    return chunk[..., None, :] == integers(0, count, like)[:, None]


def log_alpha(
    q: Array,
    omega: Array,
    q_mean: Array,
    centres: Array,
    there: Array,
    weighting: Weighting,
    beta: float,
) -> Array:
    """Log of alpha'_is of LARA, (..., n or 1, S); -inf where query i does not have c(s) there."""
    samples, count = omega.shape[-2], centres.shape[-2]
    repeats = samples // count
    # log q_c(omega_s) - log N(omega_s; 0, I), shape (..., S, C); of the own c; of the sum over c.
    log_ratio = products(omega, centres) - half_square_norm(centres)
    is_own = integers(0, samples, q)[:, None] // repeats == integers(0, count, q)
    log_own = xp.sum(xp.where(is_own, log_ratio, 0.0), axis=-1)[..., None, :]
    log_sum = log_sum_exp(hide(log_ratio[..., None, :, :], there[..., None, :]))[..., 0]
    if weighting == "own":
        log_weight = -log_own
    elif weighting == "balance":
        log_weight = -log_sum
    else:
        t = products(q, q_mean)
        if weighting == "query":
            t = softmax(t)
        else:
            t = xp.matrix_transpose(softmax(xp.matrix_transpose(t)))
        t = xp.repeat(t - xp.mean(t, axis=-1, keepdims=True), repeats, axis=-1)
        log_weight = log(xp.maximum(xp.exp(log_own - log_sum) + beta * t, 0.0)) - log_own
    return hide(log_weight, xp.repeat(there, repeats, axis=-1))


def means_of_proposals(
    q: Array, k: Array, centres: Array | None, count: Any, mask: Array | None, causal: bool
) -> tuple[Array, Array, Array]:
    """Mean query of each chunk and mean of each proposal, (..., C, d), and who has it, (n or 1, C).

    Where attention is causal a query has N(0, I) and the proposals of the chunks before its own.
    """
    q_chunk, k_chunk = chunks_of_proposals(q, k, count, mask, causal)
    q_mean = chunk_means(q, _members(q_chunk, count, q))
    if centres is None:
        centres = q_mean + chunk_means(k, _members(k_chunk, count, k))
    if not causal:
        return q_mean, centres, xp.ones((1, count), dtype=xp.bool, device=device(q))
    centres = xp.concat([xp.zeros_like(centres[..., :1, :]), centres[..., :-1, :]], axis=-2)
    return q_mean, centres, q_chunk[:, None] >= integers(0, count, q)


def chunks_of_proposals(q: Array, k: Array, count: int, mask: Array | None, causal: bool) -> Any:
    """Chunk of each query, (n,), and of each key, (..., m), negative if it is in none.

    Chunks of keys have equal numbers of those that some query sees. Where attention is causal a
    key is in the chunk of the query that is level with it.
    """
    n, m = q.shape[-2], k.shape[-2]
    chunk = integers(0, n, q) * count // max(n, 1)
    some = xp.ones((1, m), dtype=xp.bool, device=device(q)) if mask is None else mask
    some = xp.any(some, axis=-2)
    if causal:
        return chunk, xp.where(some, integers(n - m, n, q) * count // max(n, 1), -1)
    one = xp.astype(some, xp.int32)
    total = xp.sum(one, axis=-1, keepdims=True, dtype=xp.int32)
    rank = xp.cumulative_sum(one, axis=-1, dtype=xp.int32) - 1
    return chunk, xp.where(some, rank * count // xp.where(total == 0, 1, total), -1)
