"""The estimators of the references, each as its formula is written."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, get_args

from .. import _validate
from .._array import Array, array_namespace, as_written, constant, device
from .._heads import Alibi, broadcast_lead, group_heads
from ..typing import ArrayT, Features, Weighting
from ._terms import (
    average,
    chunk_means,
    finite,
    half_square_norm,
    hide,
    integers,
    kernel_coordinates,
    log,
    log_kernel,
    log_sum_exp,
    offsets,
    products,
    softmax,
    visible,
    weighted_sum,
)

__all__ = [
    "elu_plus_one",
    "importance_sampled_attention",
    "linear_attention",
    "linear_randomized_attention",
    "mean_of_ratios_attention",
    "random_feature_attention",
    "randomized_attention",
    "softmax_attention",
]


@as_written
def softmax_attention(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    *,
    scale: float | None = None,
    bias: Array | Alibi | None = None,
    mask: Array | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    dropout: Array | None = None,
) -> ArrayT:
    r"""Compute exact softmax attention.

    .. math::
        \mathrm{out}_i = \frac{\sum_j e^{s_{ij}} \, r_{ij} \, v_j}
                              {e^{\mathrm{sink}} + \sum_j e^{s_{ij}}}, \qquad
        s_{ij} = \mathrm{cap}(\mathrm{scale}\; q_i \cdot k_j) + \mathrm{bias}_{ij}

    over the keys j that query i sees. Reference 000, Attention(Q, K, V); reference 002, eq. (3);
    reference 003, SoftmaxAttn: these have no sink, cap, bias or factor r.

    Parameters
    ----------
    q : array, shape (..., n, d), float32 or float64
        Queries. On NumPy, longdouble too. Leading axes of all arguments broadcast.
    k : array, shape (..., m, d), dtype of `q`
        Keys. With fewer heads than `q` has, each is shared by consecutive query heads, as in
        `attend`.
    v : array, shape (..., m, d_v), dtype of `q`
        Values.
    scale : float, optional
        Factor on q . k, 1 / sqrt(d) by default.
    bias : array, broadcasting to (..., n, m), dtype of `q`, or Alibi, optional
        Added to the scores. `refattn.attention.alibi` makes one.
    mask : array of bool, broadcasting to (..., n, m), optional
        True where the query attends to the key.
    causal : bool, default False
        Query i sees key j only if j <= i + m - n.
    window : pair of int or None, optional
        (left, right): query i sees key j only if i + m - n - left <= j <= i + m - n + right. None
        is no limit on that side.
    softcap : float, optional
        Positive c: cap(s) = c tanh(s / c) in place of cap(s) = s.
    sinks : array, shape (..., heads), optional
        Score of one more key for each head, that all its queries see and whose value is 0. Without
        them e^sink is 0.
    dropout : array, broadcasting to (..., n, m), dtype of `q`, optional
        Factors r of the weights, 1 by default.

    Returns
    -------
    array, shape (..., n, d_v)
        Same namespace, dtype and device as `q`. Rows that see no key are 0.

    Raises
    ------
    TypeError, ValueError
        As in `attend`.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import naive
    >>> q, k, v = np.zeros((2, 1)), np.zeros((2, 1)), np.array([[4.0], [2.0]])
    >>> naive.softmax_attention(q, k, v)
    array([[3.],
           [3.]])
    >>> naive.softmax_attention(q, k, v, window=(0, None))
    array([[3.],
           [2.]])
    >>> naive.softmax_attention(q, k, v, sinks=np.array(0.0))
    array([[2.],
           [2.]])
    """
    slopes = bias.slopes if isinstance(bias, Alibi) else None
    bias = None if isinstance(bias, Alibi) else bias
    _validate.attention(q, k, v, bias=bias, mask=mask, causal=causal, dropout=dropout)
    if slopes is not None:
        slopes = _validate.of_heads("slopes", constant(slopes, q), q, k, v)
        bias = -slopes * _distances(q, k)
    scale = _validate.real("scale", scale, optional=True, like=q)
    factor = constant(q.shape[-1], q) ** -0.5 if scale is None else scale
    sink = None if sinks is None else _validate.of_heads("sinks", constant(sinks, q), q, k, v)
    softcap = _validate.softcap(softcap, q)
    (q, k, v, bias, mask, sink, dropout), ungroup = group_heads(q, k, v, bias, mask, sink, dropout)
    xp, seen = array_namespace(q), visible(q, k, mask=mask, causal=causal, window=window)
    scores = factor * products(q, k)
    if softcap is not None:
        scores = softcap * xp.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    weights = softmax(hide(scores, seen), sink)
    return ungroup(weighted_sum(weights if dropout is None else weights * dropout, v, seen))


@as_written
def random_feature_attention(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    *,
    omega: Array,
    log_weight: Array | None = None,
    features: Features = "positive",
    scale: float | None = None,
    mask: Array | None = None,
    causal: bool = False,
) -> ArrayT:
    r"""Estimate softmax attention from random features of the softmax kernel (RFA, Performer).

    .. math::
        \mathrm{out}_i = \frac{\sum_j \hat\kappa_{ij} \, v_j}{\sum_j \hat\kappa_{ij}}, \qquad
        \hat\kappa_{ij} = \sum_s w_s \, \phi_s(q_i) \cdot \phi_s(k_j)

    over the keys j that query i sees. Up to factors of the query alone, which cancel,
    phi_s(q) . phi_s(k) is

    * ``"positive"``: exp(omega_s . (q + k) - |k|^2/2);
    * ``"hyperbolic"``: cosh(omega_s . (q + k)) exp(-|k|^2/2);
    * ``"trigonometric"``: cos(omega_s . (q - k)) exp(|k|^2/2).

    Reference 000, KernelizedAttention; reference 001, attention_hat; reference 002, eqs. (7) to
    (10); reference 003, RFA. Hyperbolic features: Choromanski et al., arXiv:2009.14794.

    Parameters
    ----------
    q, k, v, mask, causal
        As in `softmax_attention`.
    omega : array, shape (..., S, d)
        Frequencies, in kernel coordinates: a NumPy array or one of the library of `q`.
    log_weight : array, shape (..., S), optional
        log w, 0 by default.
    features : {"positive", "hyperbolic", "trigonometric"}
        The feature map.
    scale : float, optional
        Factor on q . k, 1 / sqrt(d) by default, positive.

    Returns
    -------
    array, shape (..., n, d_v)
        Same namespace, dtype and device as `q`. Rows that see no key are 0.

    Raises
    ------
    TypeError, ValueError
        As in `refattn.random_feature_attention`.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import naive
    >>> q, k, v = np.array([[9.0]]), np.array([[0.0], [1.0]]), np.array([[0.0], [1.0]])
    >>> naive.random_feature_attention(q, k, v, omega=np.array([[0.5]]))
    array([[0.5]])
    """
    _validate.attention(q, k, v, mask=mask, causal=causal)
    _validate.choice("features", features, get_args(Features))
    omega, log_weight = _validate.frequencies(omega, log_weight, q, _validate.lead(q, k, v))
    (q, k, v, omega, log_weight, mask), ungroup = group_heads(
        q, k, v, omega, log_weight[..., None, :], mask
    )
    seen = visible(q, k, mask=mask, causal=causal)
    q, k = kernel_coordinates(q, scale), kernel_coordinates(k, scale)
    if features == "positive":
        return ungroup(average(log_kernel(q, k, omega, log_weight), v, seen))
    xp, half, log_weight = array_namespace(q), half_square_norm(k), log_weight[..., None, :]
    if features == "hyperbolic":
        z = products(q, omega)[..., :, None, :] + products(k, omega)[..., None, :, :]
        estimate = log_sum_exp(log_weight + xp.logaddexp(z, -z))[..., 0] - half
        return ungroup(average(estimate, v, seen))
    z = products(q, omega)[..., :, None, :] - products(k, omega)[..., None, :, :]
    weight = xp.exp(log_weight - xp.max(log_weight, axis=-1, keepdims=True))
    return ungroup(_ratio(xp.sum(weight * xp.cos(z), axis=-1), half, v, seen))


@as_written
def importance_sampled_attention(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    *,
    omega: Array,
    log_weight: Array | None = None,
    scale: float | None = None,
    mask: Array | None = None,
    causal: bool = False,
) -> ArrayT:
    r"""Estimate softmax attention by importance sampling with the exact normaliser (IS).

    .. math::
        \mathrm{out}_i = \frac{\sum_j \hat\kappa_{ij} \, v_j}{\sum_j e^{q_i \cdot k_j}}, \qquad
        \hat\kappa_{ij} = \frac1S \sum_s w_s \, \xi(q_i, \omega_s) \, \xi(k_j, \omega_s)

    over the keys j that query i sees. Reference 002, eq. (11); reference 003, importance sampling,
    where the ratio p_i / N(0, I) at omega is xi(q_i, omega) sum_j xi(k_j, omega) over the
    normaliser above.

    Parameters
    ----------
    q, k, v, omega, log_weight, scale, mask, causal
        As in `random_feature_attention`.

    Returns
    -------
    array, shape (..., n, d_v)
        Same namespace, dtype and device as `q`. Rows that see no key are 0.

    Raises
    ------
    TypeError, ValueError
        As in `refattn.importance_sampled_attention`.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import naive
    >>> zero, v = np.zeros((1, 1)), np.array([[3.0]])
    >>> naive.importance_sampled_attention(zero, zero, v, omega=np.ones((4, 1)))
    array([[3.]])
    """
    _validate.attention(q, k, v, mask=mask, causal=causal)
    omega, log_weight = _validate.frequencies(omega, log_weight, q, _validate.lead(q, k, v))
    (q, k, v, omega, log_weight, mask), ungroup = group_heads(
        q, k, v, omega, log_weight[..., None, :], mask
    )
    xp, seen = array_namespace(q), visible(q, k, mask=mask, causal=causal)
    q, k = kernel_coordinates(q, scale), kernel_coordinates(k, scale)
    log_size = xp.log(constant(omega.shape[-2], q))
    log_factor = xp.matrix_transpose(half_square_norm(q)) + log_size
    log_ratio = log_kernel(q, k, omega, log_weight) - log_factor
    log_exact = log_sum_exp(hide(products(q, k), seen))
    return ungroup(weighted_sum(xp.exp(log_ratio - finite(log_exact)), v, seen))


@as_written
def randomized_attention(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    *,
    omega: Array,
    scale: float | None = None,
    mask: Array | None = None,
    causal: bool = False,
) -> ArrayT:
    r"""Estimate softmax attention by randomized attention (RA).

    .. math::
        \mathrm{out}_i = \frac1S \sum_s f_i(\omega_{is}), \qquad
        f_i(\omega) = \frac{\sum_j \xi(k_j, \omega) \, v_j}{\sum_j \xi(k_j, \omega)}

    over the keys j that query i sees. Reference 003, RA, for omega_is drawn from
    p_i = sum_j softmax_j(q_i . k_j) N(q_i + k_j, I).

    Parameters
    ----------
    q, k, v, scale, mask, causal
        As in `random_feature_attention`.
    omega : array, shape (..., n, S, d)
        Frequencies of each query, in kernel coordinates.

    Returns
    -------
    array, shape (..., n, d_v)
        Same namespace, dtype and device as `q`. Rows that see no key are 0.

    Raises
    ------
    TypeError, ValueError
        As in `refattn.randomized_attention`.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import naive
    >>> q, k, v = np.array([[9.0]]), np.array([[-1.0], [1.0]]), np.array([[0.0], [1.0]])
    >>> naive.randomized_attention(q, k, v, omega=np.array([[[0.5]]]))  # e / (1 + e)
    array([[0.73105858]])
    """
    _validate.attention(q, k, v, mask=mask, causal=causal)
    omega = _validate.query_frequencies(omega, q, _validate.lead(q, k, v))
    xp, samples = array_namespace(q), omega.shape[-2:]
    # group_heads expects the heads third from last: S and d as one axis.
    rows = xp.reshape(omega, (*omega.shape[:-2], math.prod(samples)))
    (q, k, v, rows, mask), ungroup = group_heads(q, k, v, rows, mask)
    omega = xp.reshape(rows, (*rows.shape[:-1], *samples))
    seen = visible(q, k, mask=mask, causal=causal)
    return ungroup(_mean_of_ratios(q, kernel_coordinates(k, scale), v, omega, seen))


@as_written
def mean_of_ratios_attention(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    *,
    omega: Array,
    scale: float | None = None,
    mask: Array | None = None,
    causal: bool = False,
) -> ArrayT:
    r"""Average the ratios of single random features at frequencies that all queries share.

    .. math:: \mathrm{out}_i = \frac1S \sum_s f_i(\omega_s)

    with f_i as in `randomized_attention`. Reference 002, eq. (12), for omega_s drawn from N(0, I).

    Parameters
    ----------
    q, k, v, omega, scale, mask, causal
        As in `random_feature_attention`.

    Returns
    -------
    array, shape (..., n, d_v)
        Same namespace, dtype and device as `q`. Rows that see no key are 0.

    Raises
    ------
    TypeError, ValueError
        As in `refattn.mean_of_ratios_attention`.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import naive
    >>> q, k, v = np.array([[9.0]]), np.array([[-1.0], [1.0]]), np.array([[0.0], [1.0]])
    >>> naive.mean_of_ratios_attention(q, k, v, omega=np.array([[0.5], [-0.5]]))
    array([[0.5]])
    """
    _validate.attention(q, k, v, mask=mask, causal=causal)
    omega, _ = _validate.frequencies(omega, None, q, _validate.lead(q, k, v))
    (q, k, v, omega, mask), ungroup = group_heads(q, k, v, omega, mask)
    seen = visible(q, k, mask=mask, causal=causal)
    k, omega = kernel_coordinates(k, scale), omega[..., None, :, :]
    return ungroup(_mean_of_ratios(q, k, v, omega, seen))


@as_written
def linear_randomized_attention(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    *,
    omega: Array,
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
    weights. Reference 003, LARA.

    Parameters
    ----------
    q, k, v, scale
        As in `random_feature_attention`.
    omega : array, shape (..., S, d)
        Frequencies, in kernel coordinates: consecutive groups of S / C belong to one proposal.
    num_proposals : int, optional
        Number C of proposals, S by default, or that of `centres`.
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
        Query i sees key j only if j <= i + m - n, and the first proposal is N(0, I), the others
        those of all chunks of n / C queries but the last: of these, queries of chunk t use the
        first t, and chunks of keys are where the queries' are.

    Returns
    -------
    array, shape (..., n, d_v)
        Same namespace, dtype and device as `q`. Rows that see no key are 0.

    Raises
    ------
    TypeError, ValueError
        As in `refattn.linear_randomized_attention`.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import naive
    >>> q, k, v = np.array([[9.0]]), np.array([[-1.0], [1.0]]), np.array([[0.0], [1.0]])
    >>> naive.linear_randomized_attention(q, k, v, omega=np.array([[0.5]]))  # e / (1 + e)
    array([[0.73105858]])
    """
    _validate.attention(q, k, v, mask=mask, causal=causal)
    _validate.choice("weighting", weighting, get_args(Weighting))
    beta = _validate.real("beta", beta, like=q)
    outer, mask = _validate.lead(q, k, v), _validate.key_rows(mask, k)
    omega, _ = _validate.frequencies(omega, None, q, outer)
    if causal:
        _validate.causal_proposals(centres, weighting, mask)
    if centres is not None:
        centres, _ = _validate.frequencies(centres, None, q, outer, name="centres")
        num_proposals = centres.shape[-2]
    samples = omega.shape[-2]
    count = samples if num_proposals is None else num_proposals
    if count < 1 or samples % count:
        raise ValueError(
            f"`omega` must hold a multiple of the number of proposals, {count}, "
            f"got {samples} frequencies."
        )
    (q, k, v, omega, centres, mask), ungroup = group_heads(q, k, v, omega, centres, mask)
    seen = visible(q, k, mask=mask, causal=causal)
    q, k = kernel_coordinates(q, scale), kernel_coordinates(k, scale)
    q_mean, centres, there = _proposals(q, k, centres, count, mask, causal)
    log_weight = _log_alpha(q, omega, q_mean, centres, there, weighting, beta)
    return ungroup(average(log_kernel(q, k, omega, log_weight), v, seen))


def elu_plus_one(x: Array) -> Array:
    r"""Map vectors to elu(x) + 1, elementwise.

    .. math:: \phi(x) = x + 1 \;(x > 0), \qquad e^x \;(x \le 0)

    Reference 004, phi, with alpha = 1.

    Parameters
    ----------
    x : array
        Values.

    Returns
    -------
    array, shape of `x`
        Namespace, dtype and device of `x`.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import naive
    >>> naive.elu_plus_one(np.array([2.0, 0.0, -np.inf]))
    array([3., 1., 0.])
    """
    xp = array_namespace(x)
    return xp.where(x > 0, x + 1, xp.exp(xp.where(x > 0, 0.0, x)))


@as_written
def linear_attention(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    *,
    feature_map: Callable[[Array], Any] = elu_plus_one,
    mask: Array | None = None,
    causal: bool = False,
) -> ArrayT:
    r"""Compute attention whose kernel is the product of features.

    .. math::
        \mathrm{out}_i = \frac{\sum_j \phi(q_i) \cdot \phi(k_j) \, v_j}
                              {\sum_j \phi(q_i) \cdot \phi(k_j)}

    over the keys j that query i sees. Reference 004, kernel_attn; reference 000,
    KernelizedAttention.

    Parameters
    ----------
    q, k, v, mask, causal
        As in `softmax_attention`; no scale is applied.
    feature_map : function, default elu_plus_one
        Maps vectors (..., n, d) to features (..., n, F), or to a pair: features and the logarithm
        of a factor on each row, (..., n), as `features.Features` is. Sums of products of features
        must be representable.

    Returns
    -------
    array, shape (..., n, d_v)
        Same namespace, dtype and device as `q`. Rows that see no key are 0.

    Raises
    ------
    TypeError, ValueError
        As in `attend`.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import naive
    >>> q, k, v = np.zeros((1, 2)), np.array([[0.0, 0.0], [2.0, 2.0]]), np.array([[0.0], [4.0]])
    >>> naive.linear_attention(q, k, v)  # kernels 2 and 6
    array([[3.]])
    """
    _validate.attention(q, k, v, mask=mask, causal=causal)
    (q, k, v, mask), ungroup = group_heads(q, k, v, mask)
    seen = visible(q, k, mask=mask, causal=causal)
    phi_q, _ = _with_scale(feature_map(q))  # the factor of a query cancels
    phi_k, log_scale = _with_scale(feature_map(k))
    return ungroup(_ratio(products(phi_q, phi_k), log_scale[..., None, :], v, seen))


def _ratio(kernel: Array, log_scale: Array, v: Array, seen: Array) -> Array:
    """Mean of the values of the keys seen, with weights kernel e^log_scale of either sign."""
    xp = array_namespace(v)
    weights = kernel * softmax(hide(log_scale, seen))
    total = xp.sum(xp.where(seen, weights, 0.0), axis=-1, keepdims=True)
    some = xp.any(seen, axis=-1, keepdims=True)
    return weighted_sum(weights, v, seen) / xp.where(some, total, 1.0)


def _members(chunk: Array, count: int, like: Array) -> Array:
    """Which rows are in each chunk, (..., C, n)."""
    return chunk[..., None, :] == integers(0, count, like)[:, None]


def _distances(q: Array, k: Array) -> Array:
    """|i + m - n - j|, in the dtype of the queries."""
    xp = array_namespace(q)
    return xp.astype(xp.abs(offsets(q, k)), q.dtype)


def _mean_of_ratios(q: Array, k: Array, v: Array, omega: Array, seen: Array) -> Array:
    """Mean over s of sum_j xi(k_j, omega_is) v_j / sum_j xi(k_j, omega_is), omega (..., n, S, d).

    The values are the same for each s, so that the mean may be that of the weights.
    """
    xp, k = array_namespace(q), k[..., None, :, :]
    scores = products(omega, k) - half_square_norm(k)
    out = weighted_sum(xp.mean(softmax(hide(scores, seen[..., None, :])), axis=-2), v, seen)
    return xp.broadcast_to(out, (*broadcast_lead(q, out), *out.shape[-2:]))


def _log_alpha(
    q: Array,
    omega: Array,
    q_mean: Array,
    centres: Array,
    there: Array,
    weighting: Weighting,
    beta: float,
) -> Array:
    """Log of alpha'_is of LARA, (..., n or 1, S); -inf where query i does not have c(s) there."""
    xp, (samples, count) = array_namespace(q), (omega.shape[-2], centres.shape[-2])
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


def _proposals(
    q: Array, k: Array, centres: Array | None, count: int, mask: Array | None, causal: bool
) -> tuple[Array, Array, Array]:
    """Mean query of each chunk and mean of each proposal, (..., C, d), and who has it, (n or 1, C).

    Where attention is causal a query has N(0, I) and the proposals of the chunks before its own.
    """
    xp = array_namespace(q)
    q_chunk, k_chunk = _chunks(q, k, count, mask, causal)
    q_mean = chunk_means(q, _members(q_chunk, count, q))
    if centres is None:
        centres = q_mean + chunk_means(k, _members(k_chunk, count, k))
    if not causal:
        return q_mean, centres, xp.ones((1, count), dtype=xp.bool, device=device(q))
    centres = xp.concat([xp.zeros_like(centres[..., :1, :]), centres[..., :-1, :]], axis=-2)
    return q_mean, centres, q_chunk[:, None] >= integers(0, count, q)


def _chunks(q: Array, k: Array, count: int, mask: Array | None, causal: bool) -> Any:
    """Chunk of each query, (n,), and of each key, (..., m), negative if it is in none.

    Chunks of keys have equal numbers of those that some query sees. Where attention is causal a
    key is in the chunk of the query that is level with it.
    """
    xp, n, m = array_namespace(q), q.shape[-2], k.shape[-2]
    chunk = integers(0, n, q) * count // max(n, 1)
    some = xp.ones((1, m), dtype=xp.bool, device=device(q)) if mask is None else mask
    some = xp.any(some, axis=-2)
    if causal:
        return chunk, xp.where(some, integers(n - m, n, q) * count // max(n, 1), -1)
    one = xp.astype(some, xp.int32)
    total = xp.sum(one, axis=-1, keepdims=True, dtype=xp.int32)
    rank = xp.cumulative_sum(one, axis=-1, dtype=xp.int32) - 1
    return chunk, xp.where(some, rank * count // xp.where(total == 0, 1, total), -1)


def _with_scale(phi: Any) -> tuple[Array, Array]:
    """Features, and the logarithm of the factor on each row: 0 if the map gives none."""
    if isinstance(phi, tuple):
        return phi
    return phi, array_namespace(phi).zeros_like(phi[..., 0])
