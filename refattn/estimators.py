r"""Random-feature estimators of softmax attention, a few lines each over `attend`.

The positive family is two hops of attention. Samples attend to keys,

.. math::
    (f_s, \log Z_s) = \mathrm{attend}(\omega_s, k, v, \mathrm{bias}_j = -|k_j|^2 / 2),

then queries attend to samples with the normalisers as a bias. The factor exp(-|q|^2/2) cancels.
Everything is in kernel coordinates, sqrt(scale) times the arguments, so that omega ~ N(0, I).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import numpy as np

from . import _validate, features, sampling
from ._array import (
    Array,
    array_namespace,
    as_written,
    block_shape,
    blocks,
    broadcast_lead,
    constant,
    device,
    group_heads,
    is_numpy_array,
    most_threads,
    multiply,
    part,
    put,
    root_scale,
    square_norm,
    sum_of_products,
    tiles,
)
from ._threads import for_each
from .attention import (
    Attended,
    _attend,
    _buffers,
    _combine,
    _finite,
    _log_sum_exp,
    _mean,
    _merge,
    _normalise,
    _past,
    _sums,
)
from .kernels import FEATURES, both_signs

__all__ = [
    "DEFAULT_ESTIMATORS",
    "ESTIMATORS",
    "FEATURES",
    "WEIGHTINGS",
    "importance_sampled_attention",
    "linear_randomized_attention",
    "mean_of_ratios_attention",
    "random_feature_attention",
    "randomized_attention",
]

WEIGHTINGS = ("balance", "own", "query", "query-over-queries")

# Tokens of a step of the causal form, on NumPy and elsewhere, and of the leaves of a step, in which
# pairs of tokens are evaluated one by one.
_CHUNK, _OTHER_CHUNK, _LEAF = 128, 512, 16


def random_feature_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    omega: Array | None = None,
    log_weight: Array | None = None,
    num_features: int | None = None,
    features: str = "positive",
    coupling: str = "iid",
    proposal: sampling.Gaussian | sampling.Mixture | None = None,
    square_norms: tuple[Any, Any] | None = None,
    rng: Any = None,
    scale: float | None = None,
    mask: Array | None = None,
    causal: bool = False,
) -> Array:
    r"""Estimate softmax attention from random features of the softmax kernel (RFA, Performer).

    .. math::
        \mathrm{out}_i =
        \frac{\sum_s w_s \, \xi(q_i, \omega_s) \cdot \sum_j \xi(k_j, \omega_s) \, v_j}
             {\sum_s w_s \, \xi(q_i, \omega_s) \cdot \sum_j \xi(k_j, \omega_s)}

    with the positive features xi(x, omega) = exp(omega . x - |x|^2/2) by default. Reference 000,
    KernelizedAttention; reference 001, attention_hat (without its factor 2 pi); reference 002,
    eq. (10); reference 003, RFA. Linear in n and m. Consistent as the number of features grows,
    and biased for any finite number: with positive features it is self-normalised importance
    sampling (SNIS, reference 003) of `randomized_attention`, with w the importance weights.

    Parameters
    ----------
    q : array, shape (..., n, d), float32 or float64
        Queries; see `attend` for broadcasting and grouped heads.
    k : array, shape (..., m, d), dtype of `q`
        Keys.
    v : array, shape (..., m, d_v), dtype of `q`
        Values.
    omega : array, shape (..., S, d), optional
        Frequencies, in kernel coordinates: a NumPy array or one of the library of `q`, cast to
        the dtype and device of `q`. With `omega` the result is deterministic.
    log_weight : array, shape (..., S), optional
        log N(omega; 0, I) - log q(omega) for frequencies drawn from another law q; 0 by default.
    num_features : int, optional
        Number S of frequencies to draw when `omega` is not given.
    features : {"positive", "hyperbolic", "trigonometric"}
        The feature map for each frequency: ``"positive"``; ``"hyperbolic"``, positive features
        of omega and -omega; ``"trigonometric"``, exp(|x|^2/2) [cos omega.x, sin omega.x], whose
        estimated normaliser may vanish or be negative.
    coupling : str, default "iid"
        How drawn frequencies depend on each other, and `proposal` the law they are drawn from,
        N(0, I) by default; see `sampling.draw`. Heads share frequencies unless the proposal is a
        batch.
    proposal : sampling.Gaussian or sampling.Mixture, optional
        See `coupling`. Queries and keys are put into its gauge, if it has one (`adapt.fit`).
    square_norms : pair of floats or arrays of shape (...), optional
        Finite constants for each head in place of |q|^2 and |k|^2 in the features, in kernel
        coordinates: reference 002, eqs. (13) to (15), see `moments.mean_plus_trace` and
        `moments.mean_only`. They cancel, and so does the true |q|^2, but |k|^2 does not: the
        estimate is then of softmax_j(q . k_j + |k_j|^2 / 2), or with trigonometric features of
        softmax_j(q . k_j - |k_j|^2 / 2), however many features there are. With a `proposal` that
        has a gauge A all of these are the norms of A q and A^{-T} k. What they are changes
        nothing, so that NaN in arrays other than NumPy's goes unnoticed.
    rng : None, int, numpy.random.Generator or anything numpy.random.default_rng takes
        Source of the drawn frequencies.
    scale : float, optional
        Factor on q . k, 1 / sqrt(d) by default, positive. `q` and `k` are multiplied by its
        square root first: kernel coordinates.
    mask : array of bool, broadcasting to (..., n, m), optional
        True where the query attends to the key. A mask that is the same for all queries,
        shape (..., 1, m) or (m,), keeps the cost linear; any other costs O(n m S).
    causal : bool, default False
        Query i sees key j only if j <= i + m - n. The cost stays linear.

    Returns
    -------
    array, shape (..., n, d_v)
        Same namespace, dtype and device as `q`. Rows that see no key are 0.

    Raises
    ------
    TypeError
        As in `attend`, and if `num_features` is not an integer or `scale` not a real number.
    ValueError
        As in `attend`; if not exactly one of `omega` and `num_features` is given, if
        `log_weight` is given without `omega`, if `square_norms` are not finite, or if an option
        is unknown.

    Notes
    -----
    Against exact arithmetic on the same floats the error relative to the largest value is at
    most C eps (1 + the largest of |omega| |q|, |omega| |k| + |k|^2/2), in kernel coordinates, with
    C as in `attend` (for trigonometric features, relative to the sum of the absolute terms).
    Nothing is added to denominators or clamped, and positive features never overflow or underflow
    as they would outside the log domain. |k|^2 must be representable, or the result is NaN.

    Causal attention cuts the tokens into leaves of a few. Queries attend to the samples, which have
    seen the leaves before, and to the keys of their own leaf one by one. Later keys enter no sum
    and no maximum, so editing them leaves earlier outputs unchanged bit for bit.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import random_feature_attention, softmax_attention
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 5, 4))
    >>> approx = random_feature_attention(q, k, v, num_features=4096, coupling="orthogonal", rng=1)
    >>> bool(np.max(np.abs(approx - softmax_attention(q, k, v))) < 0.1)
    True
    """
    scale, mask = _check(q, k, v, scale, mask, causal)
    _validate.choice("features", features, FEATURES)
    q, k = _change_gauge(q, k, v, proposal)
    omega, log_weight = _frequencies(
        q, k, v, omega, log_weight, num_features, "num_features", coupling, proposal, rng
    )
    norms = square_norms is None
    if not norms:
        _validate.pair("square_norms", square_norms, (q, k))
    if features == "trigonometric":
        return _trigonometric(q, k, v, omega, log_weight, norms, scale, mask, causal)
    if features == "hyperbolic":
        omega, log_weight = both_signs(omega, log_weight)
    (q, k, v, omega, log_weight, mask), ungroup = group_heads(
        q, k, v, omega, log_weight[..., None, :], mask
    )
    root = root_scale(scale, q)
    return ungroup(_two_hops(q, k, v, omega, log_weight, root, mask, causal, norms).out)


@as_written
def _trigonometric(
    q: Array,
    k: Array,
    v: Array,
    omega: Array,
    log_weight: Array,
    norms: bool,
    scale: float | None,
    mask: Array | None,
    causal: bool,
) -> Array:
    """Linear attention over the features themselves, the weights on the side of the queries.

    Without `norms` those of the keys count as equal, and cancel: any constant will do.
    """
    xp = array_namespace(q)
    (q, k, v, omega, log_weight, mask), ungroup = group_heads(
        q, k, v, omega, log_weight[..., None, :], mask
    )
    root = root_scale(scale, q)
    weight = xp.exp(log_weight - _finite(xp.max(log_weight, axis=-1, keepdims=True), xp))
    weight = xp.concat([weight, weight], axis=-1)

    def phi_q(x: Array) -> features.Features:
        values, log_scale = features.trigonometric_features(x * root, omega)
        return features.Features(values * weight, log_scale)

    def phi_k(x: Array) -> features.Features:
        square_norm = None if norms else 0.0
        return features.trigonometric_features(x * root, omega, square_norm=square_norm)

    return ungroup(features._linear_attention(q, k, v, phi_q, phi_k, mask, causal))


@as_written
def importance_sampled_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    omega: Array,
    log_weight: Array | None = None,
    scale: float | None = None,
    mask: Array | None = None,
    causal: bool = False,
) -> Array:
    r"""Estimate softmax attention by importance sampling with the exact normaliser (IS).

    .. math::
        \mathrm{out}_i = \frac1S \sum_s w_s \frac{p_i(\omega_s)}{N(\omega_s; 0, I)} f(\omega_s),
        \qquad \frac{p_i(\omega)}{N(\omega; 0, I)} = \xi(q_i, \omega) \sum_j \xi(k_j, \omega) / Z_i

    with f as in `randomized_attention` and Z_i = sum_j exp(q_i . k_j) computed exactly, in time
    O(n m). Unbiased. Reference 002, eq. (11); reference 003, importance sampling.

    Parameters
    ----------
    q, k, v, scale, mask, causal
        As in `random_feature_attention`.
    omega : array, shape (..., S, d)
        Frequencies drawn from some law q, in kernel coordinates.
    log_weight : array, shape (..., S), optional
        log w = log N(omega; 0, I) - log q(omega); 0 by default.

    Returns
    -------
    array, shape (..., n, d_v)
        Same namespace, dtype and device as `q`. Rows that see no key are 0. Values are not
        confined to the range of `v`, and overflow where the estimate itself does.

    Raises
    ------
    TypeError, ValueError
        As in `random_feature_attention`.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import importance_sampled_attention, sampling
    >>> q, k, v = np.zeros((1, 1)), np.array([[0.0], [0.5]]), np.array([[0.0], [1.0]])
    >>> omega, _ = sampling.draw(100_000, 1, rng=0)
    >>> np.round(importance_sampled_attention(q, k, v, omega=omega), 2)
    array([[0.5]])
    """
    scale, mask = _check(q, k, v, scale, mask, causal)
    omega, log_weight = _validate.frequencies(omega, log_weight, q, _validate.lead(q, k, v))
    (q, k, v, omega, log_weight, mask), ungroup = group_heads(
        q, k, v, omega, log_weight[..., None, :], mask
    )
    xp, root = array_namespace(q), root_scale(scale, q)
    out, log_estimate = _two_hops(q, k, v, omega, log_weight, root, mask, causal)
    exact = _attend(q, k, v[..., :0], mask=mask, causal=causal, scale=root * root).lse
    empty = exact == -math.inf
    exact, log_estimate = (xp.where(empty, 0.0, x) for x in (exact, log_estimate))
    log_size = xp.log(constant(omega.shape[-2], q))
    log_ratio = log_estimate - root * root * square_norm(q) / 2 - log_size - exact
    half = xp.where(empty, 0.0, xp.exp(log_ratio / 2))[..., None]
    return ungroup(half * out * half)  # the ratio alone may overflow


def randomized_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    omega: Array | None = None,
    num_samples: int | None = None,
    rng: Any = None,
    scale: float | None = None,
    mask: Array | None = None,
    causal: bool = False,
) -> Array:
    r"""Estimate softmax attention by randomized attention (RA).

    .. math::
        \mathrm{out}_i = \frac1S \sum_s f_i(\omega_{is}), \qquad
        f_i(\omega) = \frac{\sum_j \xi(k_j, \omega) \, v_j}{\sum_j \xi(k_j, \omega)}, \qquad
        \omega_{is} \sim p_i = \sum_j \pi_{ij} \, N(q_i + k_j, I)

    Reference 003, RA. Unbiased when the frequencies are drawn exactly from p_i, as
    `sampling.draw_target` does, with variance Var(f_i)/S, at most that of attending to one random
    key. Takes time O(n m S).

    Parameters
    ----------
    q, k, v, scale, mask, causal
        As in `random_feature_attention`. `f_i` and `p_i` range over the keys query i sees.
    omega : array, shape (..., n, S, d), optional
        Frequencies of each query, in kernel coordinates.
    num_samples : int, optional
        Number S of frequencies to draw for each query when `omega` is not given.
    rng : None, int, numpy.random.Generator or anything numpy.random.default_rng takes
        Source of the drawn frequencies.

    Returns
    -------
    array, shape (..., n, d_v)
        Same namespace, dtype and device as `q`. Rows that see no key are 0.

    Raises
    ------
    TypeError, ValueError
        As in `random_feature_attention`, with `num_samples` for `num_features`.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import randomized_attention, softmax_attention
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 5, 4))
    >>> approx = randomized_attention(q, k, v, num_samples=4096, rng=1)
    >>> bool(np.max(np.abs(approx - softmax_attention(q, k, v))) < 0.1)
    True
    """
    scale, mask = _check(q, k, v, scale, mask, causal)
    _exactly_one(omega=omega, num_samples=num_samples)
    if num_samples is not None:
        omega = sampling.draw_target(
            q, k, num_samples=num_samples, rng=rng, scale=scale, mask=mask, causal=causal
        )
    omega = _validate.query_frequencies(omega, q, _validate.lead(q, k, v))
    xp, tail = array_namespace(q), omega.shape[-2:]
    # With S and d as one axis, the heads are third from last, as group_heads expects.
    rows = xp.reshape(omega, (*omega.shape[:-2], tail[0] * tail[1]))
    (q, k, v, mask, rows), ungroup = group_heads(q, k, v, mask, rows)
    omega = xp.reshape(rows, (*rows.shape[:-1], *tail))
    return ungroup(_mean_of_states(q, k, v, omega, root_scale(scale, q), mask, causal))


def mean_of_ratios_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    omega: Array | None = None,
    num_samples: int | None = None,
    coupling: str = "iid",
    rng: Any = None,
    scale: float | None = None,
    mask: Array | None = None,
    causal: bool = False,
) -> Array:
    r"""Average the ratios of single random features drawn from N(0, I).

    .. math:: \mathrm{out}_i = \frac1S \sum_s f_i(\omega_s), \qquad \omega_s \sim N(0, I)

    with f_i as in `randomized_attention`. Reference 002, eq. (12), which calls it RA; it is not:
    the frequencies do not come from p_i, and xi(q_i, omega) cancels, so the result depends on the
    query only through the keys it sees. Biased, and inconsistent: it tends to E f(omega) under
    N(0, I), attention for the query q = -E k rather than q. Provided to show the difference.

    Parameters
    ----------
    q, k, v, omega, coupling, rng, scale, mask, causal
        As in `random_feature_attention`, omega of shape (..., S, d) shared by all queries.
    num_samples : int, optional
        Number S of frequencies to draw when `omega` is not given.

    Returns
    -------
    array, shape (..., n, d_v)
        Same namespace, dtype and device as `q`. Rows that see no key are 0.

    Raises
    ------
    TypeError, ValueError
        As in `random_feature_attention`, with `num_samples` for `num_features`.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import mean_of_ratios_attention
    >>> q, k, v = np.array([[-3.0], [3.0]]), np.array([[1.0], [1.0]]), np.array([[0.0], [1.0]])
    >>> mean_of_ratios_attention(q, k, v, num_samples=8, rng=0)
    array([[0.5],
           [0.5]])
    """
    scale, mask = _check(q, k, v, scale, mask, causal)
    omega, _ = _frequencies(q, k, v, omega, None, num_samples, "num_samples", coupling, None, rng)
    (q, k, v, omega, mask), ungroup = group_heads(q, k, v, omega, mask)
    omega = omega[..., None, :, :]
    return ungroup(_mean_of_states(q, k, v, omega, root_scale(scale, q), mask, causal))


def linear_randomized_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    num_proposals: int | None = None,
    centres: Array | Sequence[sampling.Gaussian] | None = None,
    omega: Array | None = None,
    weighting: str = "balance",
    beta: float = 1.0,
    antithetic: bool = False,
    proposal: sampling.Gaussian | None = None,
    rng: Any = None,
    scale: float | None = None,
    mask: Array | None = None,
    causal: bool = False,
) -> Array:
    r"""Estimate softmax attention from several data-dependent proposals (LARA).

    .. math::
        \mathrm{out}_i =
        \frac{\sum_c \alpha'_{ic} \, \xi(q_i, \omega_c) \sum_j \xi(k_j, \omega_c) \, v_j}
             {\sum_c \alpha'_{ic} \, \xi(q_i, \omega_c) \sum_j \xi(k_j, \omega_c)}, \qquad
        \alpha'_{ic} = \alpha_{ic} \frac{N(\omega_c; 0, I)}{q_c(\omega_c)}, \qquad
        \omega_c \sim q_c

    Reference 003, LARA. By default q_c = N(mu_c, I) with mu_c the sum of the mean query and the
    mean key of the c-th of C contiguous chunks. Linear in n and m; biased, consistent.

    Parameters
    ----------
    q, k, v, scale
        As in `random_feature_attention`.
    num_proposals : int, optional
        Number C of chunks, at most n and m. Give it or `centres`, or `omega` for C = S.
    centres : array, shape (..., C, d), or a sequence of C sampling.Gaussian, optional
        Means mu_c of the proposals N(mu_c, I), in kernel coordinates, or the proposals.
    omega : array, shape (..., S, d), optional
        Frequencies, in kernel coordinates, S a multiple of C: consecutive groups of S/C belong to
        one proposal. Drawn by default, one for each proposal, independently for each head. With
        Gaussian proposals given as a sequence, `omega` must be a NumPy array.
    weighting : {"balance", "own", "query", "query-over-queries"}
        The weights alpha, with B_c = q_c(omega_c) / sum_c' q_c'(omega_c):

        * ``"balance"``: alpha_c = B_c, the balance heuristic;
        * ``"own"``: alpha constant;
        * ``"query"``: alpha_ic = B_c + beta (t_ic - mean_c t_ic), t_i = softmax_c(qbar_c . q_i)
          with qbar_c the mean query of chunk c;
        * ``"query-over-queries"``: the same with the softmax taken over i, as in the authors'
          code.

        With the last two some alpha may be negative. Those proposals are dropped for that query:
        alpha is replaced by max(alpha, 0). At least one remains, since their sum is positive, and
        the result is a mean of values; but the weights kept no longer sum to 1 at every omega, on
        which consistency rests. With their sign the estimated normaliser vanishes for some
        queries.
    beta : float, default 1.0
        Strength of the dependence on the query.
    antithetic : bool, default False
        Draw omega_c = mu_c + z and mu_c - z for each proposal: S = 2 C.
    proposal : sampling.Gaussian, optional
        What `adapt.fit` returns: queries and keys are put into its gauge first, in which `centres`
        and `omega` are then given and chunk means taken. Its mean and covariance are not used.
    rng : None, int, numpy.random.Generator or anything numpy.random.default_rng takes
        Source of the drawn frequencies.
    mask : array of bool, broadcasting to (..., n, m), optional
        As in `random_feature_attention`. Chunks of keys are of equal numbers of unmasked keys
        (keys some query sees), so that masking a key equals deleting it.
    causal : bool, default False
        Query i sees key j only if j <= i + m - n, and only proposals made of earlier chunks: for
        queries of chunk t these are N(0, I) and the chunks before t, over which its weights run
        ("balance" and "own" only). The proposals are C as before: N(0, I) and all chunks but the
        last. The cost stays linear. Causal LARA is open in reference 003.

    Returns
    -------
    array, shape (..., n, d_v)
        Same namespace, dtype and device as `q`. Rows that see no key are 0.

    Raises
    ------
    TypeError
        As in `attend`, and if an option has the wrong type.
    ValueError
        As in `attend`; if the number of proposals is not determined, exceeds the number of
        queries or keys or does not divide that of `omega`, if `causal` comes with `centres`, a
        query weighting or a mask that differs between queries, or if an option is unknown.

    Notes
    -----
    With all centres 0 it is `random_feature_attention`: alpha' is constant. A chunk whose keys
    are all masked counts as having mean key 0.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import linear_randomized_attention, softmax_attention
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 64, 4))
    >>> approx = linear_randomized_attention(q, k, v, num_proposals=64, rng=1)
    >>> bool(np.max(np.abs(approx - softmax_attention(q, k, v))) < 0.6)
    True
    """
    scale, mask = _check(q, k, v, scale, mask, causal)
    _validate.choice("weighting", weighting, WEIGHTINGS)
    beta = _validate.real("beta", beta, like=q)
    _validate.flag("antithetic", antithetic)
    count, repeats = _count_proposals(q, k, num_proposals, centres, omega, antithetic)
    if proposal is not None:
        _validate.gaussians("proposal", [proposal])
    q, k = _change_gauge(q, k, v, proposal)
    if causal:
        _validate.causal_proposals(centres, weighting, mask)
    lead, d = _validate.lead(q, k, v), q.shape[-1]
    z = None
    if omega is None:
        z = _validate.generator(rng).standard_normal((*lead, count, d))
    own = mixture = None
    if isinstance(centres, Sequence):
        omega, own, mixture = _from_sequence(centres, omega, z, repeats, lead, d)
        own, mixture = (constant(x, q)[..., None, :] for x in (own, mixture))
        centres = None
    if omega is not None:
        omega, _ = _validate.frequencies(omega, None, q, lead)
    if centres is not None:
        centres, _ = _validate.frequencies(centres, None, q, lead, name="centres")
    if z is not None:
        z = constant(z, q)
    (q, k, v, mask, centres, omega, own, mixture, z), ungroup = group_heads(
        q, k, v, mask, centres, omega, own, mixture, z
    )
    xp, root = array_namespace(q), root_scale(scale, q)
    if causal:
        return ungroup(_causal_lara(q, k, v, omega, z, count, repeats, weighting, root, mask))
    q_mean = root * _chunk_means(q, count, None)
    if own is None:
        if centres is None:
            seen = None if mask is None else xp.any(mask, axis=-2)
            centres = q_mean + root * _chunk_means(k, count, seen)
        if omega is None:
            omega = _around(centres, z, repeats)
        own, mixture = _log_own(omega, centres, repeats), _log_mixture(omega, centres)
    else:
        own, mixture = own[..., 0, :], mixture[..., 0, :]
    if weighting == "own":
        log_weight = -own
    elif weighting == "balance":
        log_weight = math.log(count) - mixture
    else:
        balance = xp.exp(own - mixture)
        over = -1 if weighting == "query" else -2
        return ungroup(
            _query_weighted(q, k, v, omega, own, balance, q_mean, beta, over, repeats, root, mask)
        )
    return ungroup(_two_hops(q, k, v, omega, log_weight[..., None, :], root, mask, causal).out)


@as_written
def _log_own(omega: Array, centres: Array, repeats: int = 1) -> Array:
    """log N(omega_s; mu_s, I) - log N(omega_s; 0, I) for the own proposal of each, (..., S)."""
    xp = array_namespace(omega)
    own = xp.repeat(centres, repeats, axis=-2)
    return xp.sum(omega * own, axis=-1) - square_norm(own) / 2


def _log_mixture(omega: Array, centres: Array) -> Array:
    """log sum_c N(omega_s; mu_c, I) - log N(omega_s; 0, I), (..., S): samples attend to centres."""
    return _attend(
        omega, centres, centres[..., :1], key_bias=lambda centre: -square_norm(centre) / 2
    ).lse


def _around(centres: Array, z: Array, repeats: int) -> Array:
    """Frequencies mu_c + z_c, or pairs mu_c + z_c and mu_c - z_c, shape (..., repeats C, d)."""
    if repeats == 1:
        return centres + z
    xp = array_namespace(z)
    pairs = xp.stack([centres + z, centres - z], axis=-2)
    *lead, count, _, d = pairs.shape
    return xp.reshape(pairs, (*lead, repeats * count, d))


def _from_sequence(
    proposals: Sequence[Any],
    omega: Any,
    z: Any,
    repeats: int,
    lead: tuple[int, ...],
    d: int,
) -> tuple[Any, Any, Any]:
    """Frequencies from a list of Gaussians, with the logs of `_log_own` and `_log_mixture`."""
    _validate.gaussians("centres", proposals)
    for p in proposals:
        _validate.broadcasts("centres", p.mean, (*lead, d), "(..., d)")
        _validate.broadcasts("centres", np.empty((*p.lead, 1)), (*lead, 1), "(..., 1)")
    if omega is None:
        rng = np.random.default_rng(0)  # a Gaussian's transform draws nothing
        rows = [
            p.transform(sign * z[..., c : c + 1, :], rng)
            for c, p in enumerate(proposals)
            for sign in (1, -1)[:repeats]
        ]
        omega = np.concatenate(rows, axis=-2)
    elif not is_numpy_array(omega) or omega.ndim < 2 or omega.shape[-1] != d:
        raise ValueError(
            f"`omega` must be a NumPy array of shape (..., S, {d}) when `centres` is a sequence."
        )
    own = [
        -p.log_ratio(omega[..., c * repeats : (c + 1) * repeats, :])
        for c, p in enumerate(proposals)
    ]
    mixture = reduce(np.logaddexp, (-p.log_ratio(omega) for p in proposals))
    return omega, np.concatenate(np.broadcast_arrays(*own), axis=-1), mixture


@as_written
def _chunk_means(x: Array, count: int, seen: Array | None) -> Array:
    """Means of `count` contiguous chunks with equal numbers of seen rows: (..., count, d)."""
    xp, n, size = array_namespace(x), x.shape[-2], block_shape(x)[1]
    few, total, lead = max(1, size // 2 * count // max(n, 1)), n, broadcast_lead(x)
    if seen is not None:  # any row may be in any chunk
        integer = xp.arange(0, device=device(x)).dtype  # JAX may have no int64
        few, visible, lead = count, xp.astype(seen, integer), broadcast_lead(x, seen[..., None])
        rank = xp.cumulative_sum(visible, axis=-1) - 1
        total = xp.maximum(xp.sum(visible, axis=-1, keepdims=True), xp.asarray(1, device=device(x)))
    means = xp.empty((*lead, count, x.shape[-1]), dtype=x.dtype, device=device(x))

    def average(c: slice) -> None:
        nonlocal means
        chunks = xp.arange(c.start, c.stop, device=device(x))[:, None]
        sums = sizes = xp.zeros((1, 1), dtype=x.dtype, device=device(x))
        for j in blocks(-(-c.start * n // count), -(-c.stop * n // count), size):
            ranks = xp.arange(j.start, j.stop, device=device(x)) if seen is None else rank[..., j]
            member, x_j = (ranks * count // total)[..., None, :] == chunks, x[..., j, :]
            if seen is not None:
                member = member & seen[..., None, j]
                x_j = xp.where(seen[..., j][..., None], x_j, 0.0)
            member = xp.astype(member, x.dtype)
            sums = sums + sum_of_products(member, x_j)
            sizes = sizes + xp.sum(member, axis=-1, keepdims=True)
        whole = tuple(slice(0, length) for length in lead)
        mean = sums / xp.where(sizes == 0, 1.0, sizes)
        means = put(means, (*whole, c, slice(0, x.shape[-1])), mean)

    most = most_threads(x, math.prod(x.shape))
    for_each(lambda: average, blocks(0, count, few), most=most)
    return means


@as_written
def _query_weighted(
    q: Array,
    k: Array,
    v: Array,
    omega: Array,
    own: Array,
    balance: Array,
    q_mean: Array,
    beta: float,
    over: int,
    repeats: int,
    root: Array,
    mask: Array | None,
) -> Array:
    """LARA with weights alpha_ic that depend on the query; negative ones are dropped."""
    xp, whole = array_namespace(q), slice(None)
    general = mask is not None and mask.shape[-2] != 1
    states = Attended(q, q) if general else _sample(omega, k, v, mask, root)
    # The softmax over proposals is normalised below, that over queries by this.
    norm = _attend(q_mean, q, q[..., :1], scale=root).lse[..., None, :] if over == -2 else 0.0
    lead, n = broadcast_lead(q, k, v, omega, mask), q.shape[-2]
    out, _ = _buffers(q, v, lead)
    for *head, i in tiles((*lead, n), math.prod(block_shape(q)) // omega.shape[-2]):
        box = (*head, whole, whole)
        q_i = part(q, (*head, i, whole))
        t = multiply(root * q_i, xp.matrix_transpose(part(q_mean, box)))
        log_norm = part(norm, box) if over == -2 else _log_sum_exp(t)[..., None]
        t = xp.exp(t - log_norm)
        t = t - xp.mean(t, axis=-1, keepdims=True)
        t = xp.repeat(t, repeats, axis=-1)
        alpha = part(balance, (*head, whole))[..., None, :] + beta * t
        log_alpha = xp.where(alpha > 0, xp.log(xp.where(alpha > 0, alpha, 1.0)), -math.inf)
        weight = log_alpha - part(own, (*head, whole))[..., None, :]
        omega_h = part(omega, box)
        if general:
            mask_i = part(mask, (*head, i, whole))
            done = _two_hops(q_i, part(k, box), part(v, box), omega_h, weight, root, mask_i, False)
        else:
            f = Attended(part(states.out, box), part(states.lse, (*head, whole)))
            done = _read(q_i, omega_h, f, weight, root)
        out = put(out, (*head, i, whole), done.out)
    return out


@as_written
def _causal_lara(
    q: Array,
    k: Array,
    v: Array,
    omega: Array | None,
    z: Array | None,
    count: int,
    repeats: int,
    weighting: str,
    root: Array,
    mask: Array | None,
) -> Array:
    """What is past of a chunk's first token makes its proposal, whose samples join the others.

    All samples attend to all keys, and queries read those that they know of.
    """
    xp, whole, home = array_namespace(q), slice(None), device(q)
    n, shift = q.shape[-2], k.shape[-2] - q.shape[-2]
    noise = omega if z is None else z
    full = broadcast_lead(q, k, v, noise, mask)
    out, _ = _buffers(q, v, full)
    chunk, proposal = np.arange(n) * count // n, np.arange(count * repeats) // repeats
    shape = _leaf_shape(n, q)
    size = math.prod(shape)
    most = -(-size * count // n)  # chunks that start in one step

    def attend_head(head: tuple[slice, ...]) -> None:
        nonlocal out
        q_h, k_h, v_h, noise_h, mask_h = _parts((*head, whole, whole), q, k, v, noise, mask)
        centres = _past_centres(q_h, k_h, mask_h, count, root)
        samples = noise_h if z is None else _around(centres, noise_h, repeats)
        weight = -_log_own(samples, centres, repeats)[..., None, :]
        mixture = xp.full_like(weight, -math.inf)
        state = _sample(samples, *_keys(k_h, v_h, mask_h, 0, shift), root)
        for i in blocks(0, n, size):
            if weighting == "balance":
                first, last = (-(-j * count // n) for j in (i.start, i.stop))
                rows = np.minimum(np.arange(first, first + most), count - 1)
                centre = xp.take(centres, xp.asarray(rows, device=home), axis=-2)
                ratio = multiply(centre, xp.matrix_transpose(samples))
                ratio = ratio - square_norm(centre)[..., None] / 2
                started = xp.asarray((np.arange(first, first + most) < last)[:, None], device=home)
                mixture = _running_log_sum(_cat(mixture, xp.where(started, ratio, -math.inf), -2))
                which = xp.asarray(chunk[i] - first + 1, device=home)
                weight, mixture = -xp.take(mixture, which, axis=-2), mixture[..., -1:, :]
            known = xp.asarray(proposal <= chunk[i, None], device=home)
            fresh = _keys(k_h, v_h, mask_h, i.start + shift, i.stop + shift)
            done, state = _causal_step(
                q_h[..., i, :], *fresh, samples, weight, root, state, shape, known=known
            )
            out = put(out, (*head, i, whole), done.out)

    _for_heads(attend_head, full, q, shape, count * repeats)
    return out


def _past_centres(q: Array, k: Array, mask: Array | None, count: int, root: Array) -> Array:
    """Means of the proposals of causal chunks (..., C, d), each of the chunk before; 0 at first."""
    xp, n, d, home = array_namespace(q), q.shape[-2], q.shape[-1], device(q)
    lead = broadcast_lead(q, k, mask)
    edges = -(-np.arange(count + 1) * n // count)
    length = -(-n // count)

    def mean(x: Array, seen: Array | None, chunks: slice, shift: int) -> Array:
        tokens = edges[:-1][chunks, None] + np.arange(length)
        own = (tokens < edges[1:][chunks, None]) & (tokens + shift >= 0)
        rows = xp.asarray((tokens + shift).clip(0, x.shape[-2] - 1).ravel(), device=home)
        visible = xp.asarray(own[..., None], device=home)
        if seen is not None:
            some = xp.take(xp.matrix_transpose(seen), rows, axis=-2)
            visible = visible & xp.reshape(some, (*some.shape[:-2], *own.shape, 1))
        values = xp.take(x, rows, axis=-2)
        values = xp.reshape(values, (*values.shape[:-2], *own.shape, d))
        sums = xp.sum(xp.where(visible, values, 0.0), axis=-2)
        sizes = xp.sum(xp.astype(visible, x.dtype), axis=-2)
        return sums / xp.where(sizes == 0, 1.0, sizes)

    few = max(1, math.prod(block_shape(q)) // (length * d * math.prod(lead)))
    centres = [xp.zeros((*lead, 1, d), dtype=q.dtype, device=home)]
    for chunks in blocks(0, count - 1, few):
        centre = root * (mean(q, None, chunks, 0) + mean(k, mask, chunks, k.shape[-2] - n))
        centres.append(xp.broadcast_to(centre, (*lead, *centre.shape[-2:])))
    return xp.concat(centres, axis=-2)


def _running_log_sum(x: Array) -> Array:
    """log(e^x_0 + ... + e^x_t) along the axis before the last, of 2, 4, 8, ... rows."""
    xp, step = array_namespace(x), 1
    while step < x.shape[-2]:
        none = xp.full_like(x[..., :step, :], -math.inf)
        x = xp.logaddexp(x, _cat(none, x[..., :-step, :], -2))
        step *= 2
    return x


@as_written
def _two_hops(
    q: Array,
    k: Array,
    v: Array,
    omega: Array,
    log_weight: Array,
    root: Array,
    mask: Array | None,
    causal: bool,
    norms: bool = True,
) -> Attended:
    """Queries attend to samples that attend to the keys each query sees.

    `omega` has shape (..., S, d) and `log_weight` (..., n or 1, S). `lse` lacks -|q|^2/2, and
    without `norms` all is as if |k|^2 were 0.
    """
    if mask is not None and mask.shape[-2] != 1:

        def read(q: Array, omega: Array, states: Attended, log_weight: Array) -> Attended:
            q, log_weight = q[..., None, :], log_weight[..., None, :]
            out, lse = _read(q, omega, states, log_weight, root)
            return Attended(out[..., 0, :], lse[..., 0])

        omega = omega[..., None, :, :]
        return _per_query(read, q, k, v, omega, log_weight, root, mask, causal, norms)
    if causal:
        return _causal(q, k, v, omega, log_weight, root, mask, norms)
    return _read(q, omega, _sample(omega, k, v, mask, root, norms), log_weight, root)


@as_written
def _sample(
    omega: Array, k: Array, v: Array, mask: Array | None, root: Array, norms: bool = True
) -> Attended:
    """First hop, samples attend to keys: f_s and log Z_s."""
    if k.shape[-2] == 0:  # as `_attend` says, in far fewer operations
        return _nothing(omega, v, broadcast_lead(omega, k, v, mask))

    def bias(k: Array) -> Array:
        return -root * root / 2 * square_norm(k)

    return _attend(root * omega, k, v, mask=mask, key_bias=bias if norms else None)


def _nothing(omega: Array, v: Array, lead: tuple[int, ...]) -> Attended:
    """The state of samples that have seen no key."""
    xp, options = array_namespace(v), {"dtype": v.dtype, "device": device(v)}
    shape = (*lead, omega.shape[-2])
    return Attended(
        xp.zeros((*shape, v.shape[-1]), **options), xp.full(shape, -math.inf, **options)
    )


@as_written
def _read(q: Array, omega: Array, states: Attended, log_weight: Array, root: Array) -> Attended:
    """Second hop, queries attend to samples; `log_weight` has shape (..., n or 1, S)."""
    bias = states.lse[..., None, :] + log_weight
    return _attend(q, root * omega, states.out, bias=bias)


@as_written
def _causal(
    q: Array,
    k: Array,
    v: Array,
    omega: Array,
    log_weight: Array,
    root: Array,
    mask: Array | None,
    norms: bool,
    past: Attended | None = None,
) -> Attended:
    """Two hops over the keys that each query sees, step after step, and over those in `past`."""
    n, shift, whole = q.shape[-2], k.shape[-2] - q.shape[-2], slice(None)
    lead = broadcast_lead(q, k, v, omega, log_weight, mask)
    out, lse = _buffers(q, v, lead)
    shape = _leaf_shape(n, q)

    def attend_head(head: tuple[slice, ...]) -> None:
        nonlocal out, lse
        q_h, k_h, v_h, omega_h, weight_h, mask_h = _parts(
            (*head, whole, whole), q, k, v, omega, log_weight, mask
        )
        state = _sample(omega_h, *_keys(k_h, v_h, mask_h, 0, shift), root, norms)
        if past is not None:
            f, log_z = part(past.out, (*head, whole, whole)), part(past.lse, (*head, whole))
            state = _merge(Attended(f, log_z), state)
        for i in blocks(0, n, math.prod(shape)):
            fresh = _keys(k_h, v_h, mask_h, i.start + shift, i.stop + shift)
            weight_i = part(weight_h, (i, whole))
            q_i = q_h[..., i, :]
            done, state = _causal_step(q_i, *fresh, omega_h, weight_i, root, state, shape, norms)
            out = put(out, (*head, i, whole), done.out)
            lse = put(lse, (*head, i), done.lse)

    _for_heads(attend_head, lead, q, shape, omega.shape[-2])
    return Attended(out, lse)


def _leaf_shape(n: int, q: Array) -> tuple[int, int]:
    """Leaves of a step, and tokens of a leaf: n tokens are cut into steps of one shape."""
    steps = -(-max(n, 1) // (_CHUNK if is_numpy_array(q) else _OTHER_CHUNK))
    leaves = -(-max(n, 1) // (steps * _LEAF))
    return leaves, -(-max(n, 1) // (steps * leaves))


def _for_heads(
    attend_head: Callable[[tuple[slice, ...]], None],
    lead: tuple[int, ...],
    q: Array,
    shape: tuple[int, int],
    num_samples: int,
) -> None:
    """Take as many heads at once as the pairs of one step fill a block, on threads."""
    pairs = shape[1] * num_samples  # of a token
    heads = tiles(lead, math.prod(block_shape(q)) // (math.prod(shape) * pairs))
    for_each(
        lambda: attend_head, heads, most=most_threads(q, math.prod(lead) * q.shape[-2] * pairs)
    )


def _parts(index: tuple[slice, ...], *arrays: Array | None) -> list[Any]:
    """Take `index` of the last axes of each array."""
    return [None if x is None else part(x, index) for x in arrays]


def _keys(
    k: Array, v: Array, mask: Array | None, start: int, stop: int
) -> tuple[Array, Array, Array | None]:
    """Keys, values and mask (..., 1, m) of the tokens from `start` to `stop`, if not negative."""
    j = slice(max(0, start), max(0, stop))
    return k[..., j, :], v[..., j, :], None if mask is None else mask[..., j]


def _causal_step(
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None,
    omega: Array,
    log_weight: Array,
    root: Array,
    state: Attended,
    shape: tuple[int, int],
    norms: bool = True,
    known: Array | None = None,
) -> tuple[Attended, Attended]:
    """Attend to the state of the past and, causally, to the step; add the step to the state.

    The keys are those of the last queries. All `shape[0]` leaves are evaluated at once: queries
    attend to the samples, which have seen what is before the leaf, and to keys of their own leaf
    up to their own. `known`, (n, S), says which samples there are for a query.
    """
    xp, n, c = array_namespace(q), q.shape[-2], shape[1]
    missing = n - k.shape[-2]
    if missing and mask is None:
        mask = xp.ones((1, n - missing), dtype=xp.bool, device=device(q))
    q, k, v = (
        _leaves(q * root, shape),
        _leaves(k * root, shape, missing),
        _leaves(v, shape, missing),
    )
    if mask is not None:  # (..., leaves, 1, c)
        mask = xp.matrix_transpose(_leaves(xp.matrix_transpose(mask), shape, missing))
    if log_weight.shape[-2] == 1:
        log_weight = log_weight[..., None, :, :]
    else:
        log_weight = _leaves(log_weight, shape)
    frequencies = xp.matrix_transpose(omega)[..., None, :, :]
    x = multiply(q, frequencies) + log_weight
    y = multiply(k, frequencies)
    if norms:
        y = y - square_norm(k)[..., None] / 2
    pairs = x[..., :, None, :] + y[..., None, :, :]
    if known is not None:
        known = _leaves(known, shape)
        pairs = xp.where(known[..., None, :], pairs, -math.inf)
    pairs = _log_sum_exp(pairs)
    own = _normalise(_sums(xp.matrix_transpose(y), v, mask, c))
    before, state = _states_before(state, own)
    visible = _past(slice(0, c), slice(0, c), 0, device(q), xp)
    size = omega.shape[-2] + c
    past = _sums(x + before.lse[..., None, :], before.out, known, size)
    present = _sums(pairs, v, visible if mask is None else visible & mask, size)
    done = _normalise(_combine(past, present))
    out = xp.reshape(done.out, (*done.out.shape[:-3], math.prod(shape), v.shape[-1]))
    lse = xp.reshape(done.lse, (*done.lse.shape[:-2], math.prod(shape)))
    return Attended(out[..., :n, :], lse[..., :n]), state


def _leaves(x: Array, shape: tuple[int, int], missing: int = 0) -> Array:
    """Cut rows (..., n, w) into leaves (..., T, c, w), with zeros where rows are missing."""
    xp = array_namespace(x)
    *lead, n, w = x.shape
    rows = [x]
    for where, count in ((0, missing), (2, math.prod(shape) - n - missing)):
        if count:
            rows.insert(where, xp.zeros((*lead, count, w), dtype=x.dtype, device=device(x)))
    x = xp.concat(rows, axis=-2) if len(rows) > 1 else x
    return xp.reshape(x, (*lead, *shape, w))


def _states_before(state: Attended, own: Attended) -> tuple[Attended, Attended]:
    """States (..., T, S) before each of T leaves, and after all: samples attend to the leaves."""
    xp = array_namespace(*state)
    f = _cat(state.out[..., None, :, :], own.out, -3)
    log_z = _cat(state.lse[..., None, :], own.lse, -2)
    f, scores = xp.moveaxis(f, -3, -2), xp.matrix_transpose(log_z)[..., None, :]
    count = f.shape[-2]
    past = _past(slice(0, count), slice(0, count), 0, device(f), xp)
    found = _normalise(_sums(scores, f, past, count))
    f, log_z = xp.moveaxis(found.out, -2, -3), xp.matrix_transpose(found.lse)
    after = Attended(f[..., -1, :, :], log_z[..., -1, :])
    return Attended(f[..., :-1, :, :], log_z[..., :-1, :]), after


@as_written
def _mean_of_states(
    q: Array, k: Array, v: Array, omega: Array, root: Array, mask: Array | None, causal: bool
) -> Array:
    """Mean over samples of the first hop; `omega` has shape (..., n or 1, S, d)."""

    def read(q: Array, omega: Array, states: Attended, log_weight: Array) -> Attended:
        xp = array_namespace(q)
        share = states.out / states.out.shape[-2]  # the sum of large values may overflow
        largest = xp.max(xp.abs(share), axis=-2)
        return Attended(_mean(xp.sum(share, axis=-2), largest), states.lse[..., 0])

    if omega.shape[-3] == 1 and not causal and (mask is None or mask.shape[-2] == 1):
        # The same samples and keys for every query.
        n = q.shape[-2]
        out = _per_query(read, q[..., : min(1, n), :], k, v, omega, None, root, mask, causal).out
        return array_namespace(q).repeat(out, max(1, n), axis=-2)
    return _per_query(read, q, k, v, omega, None, root, mask, causal).out


def _per_query(
    read: Callable[..., Attended],
    q: Array,
    k: Array,
    v: Array,
    omega: Array,
    log_weight: Array | None,
    root: Array,
    mask: Array | None,
    causal: bool,
    norms: bool = True,
) -> Attended:
    """First hop with samples or keys of each query's own, (..., n or 1, S, d), then `read`."""
    xp, whole = array_namespace(q), slice(None)
    n, m, d_v = q.shape[-2], k.shape[-2], v.shape[-1]
    num_samples, d = omega.shape[-2:]
    lead = broadcast_lead(q, k, v, omega[..., 0, :], log_weight, mask)
    out, lse = _buffers(q, v, lead)
    width = max(1, d_v, m if causal or mask is not None else 1)
    for *head, i in tiles((*lead, n), math.prod(block_shape(q)) // (num_samples * width)):
        c = i.stop - i.start
        omega_i = part(omega, (*head, i, whole, whole))
        flat = xp.broadcast_to(omega_i, (*omega_i.shape[:-3], c, num_samples, d))
        flat = xp.reshape(flat, (*flat.shape[:-3], c * num_samples, d))
        seen = None if mask is None else part(mask, (*head, i, whole))
        if causal:
            past = _past(i, slice(0, m), m - n, device(q), xp)
            seen = past if seen is None else seen & past
        if seen is not None and c > 1:  # the rows of a query's samples
            seen = xp.broadcast_to(seen[..., None, :], (*seen.shape[:-2], c, num_samples, m))
            seen = xp.reshape(seen, (*seen.shape[:-3], c * num_samples, m))
        k_h, v_h = (part(x, (*head, whole, whole)) for x in (k, v))
        f, log_z = _sample(flat, k_h, v_h, seen, root, norms)
        f = xp.reshape(f, (*f.shape[:-2], c, num_samples, d_v))
        log_z = xp.reshape(log_z, (*log_z.shape[:-1], c, num_samples))
        weight_i = None if log_weight is None else part(log_weight, (*head, i, whole))
        done = read(part(q, (*head, i, whole)), omega_i, Attended(f, log_z), weight_i)
        out = put(out, (*head, i, whole), done.out)
        lse = put(lse, (*head, i), done.lse)
    return Attended(out, lse)


def _change_gauge(q: Array, k: Array, v: Array, proposal: Any) -> tuple[Array, Array]:
    """Queries and keys in the gauge of the proposal, if it has one; its batch must fit."""
    if isinstance(proposal, sampling.Gaussian | sampling.Mixture):
        _validate.batch("proposal", proposal.lead, _validate.lead(q, k, v))
    if not isinstance(proposal, sampling.Gaussian):
        return q, k
    return proposal.change_gauge(q, k)


def _cat(a: Array, b: Array, axis: int) -> Array:
    """Join arrays of which the axes before `axis` broadcast."""
    xp, lead = array_namespace(a, b), broadcast_lead(a, b, core=-axis)
    return xp.concat([xp.broadcast_to(x, (*lead, *x.shape[axis:])) for x in (a, b)], axis=axis)


def _check(
    q: Array, k: Array, v: Array, scale: Any, mask: Array | None, causal: Any
) -> tuple[float | None, Array | None]:
    """Check what every estimator takes; return the scale and the mask (..., n or 1, m)."""
    _validate.attention(q, k, v, mask=mask, causal=causal)
    scale = _validate.real("scale", scale, positive=True, optional=True, like=q)
    return scale, _validate.key_rows(mask, k)


def _exactly_one(**options: Any) -> None:
    (a, b), given = options, [x for x in options.values() if x is not None]
    if len(given) != 1:
        got = "both" if given else "neither"
        raise ValueError(f"Exactly one of `{a}` and `{b}` must be given, got {got}.")


def _frequencies(
    q: Array,
    k: Array,
    v: Array,
    omega: Any,
    log_weight: Any,
    count: Any,
    name: str,
    coupling: str,
    proposal: Any,
    rng: Any,
) -> tuple[Array, Array]:
    """Frequencies and log weights, given or drawn, as arrays of the library of `q`."""
    _validate.choice("coupling", coupling, sampling.COUPLINGS)
    _exactly_one(omega=omega, **{name: count})
    if log_weight is not None and omega is None:
        raise ValueError("`log_weight` must come with the `omega` it weighs, got no `omega`.")
    if omega is not None and proposal is not None:
        raise ValueError("`proposal` must not come with `omega`: give `log_weight` instead.")
    if count is not None:
        _validate.length(name, count, q.shape[-1])
        omega, log_weight = sampling.draw(
            count, q.shape[-1], coupling=coupling, proposal=proposal, rng=rng
        )
    return _validate.frequencies(omega, log_weight, q, _validate.lead(q, k, v))


def _count_proposals(
    q: Array, k: Array, num_proposals: Any, centres: Any, omega: Any, antithetic: bool
) -> tuple[int, int]:
    """Number of proposals C, and of samples for each."""
    if num_proposals is not None:
        _validate.positive_integer("num_proposals", num_proposals)
    count = num_proposals
    if centres is not None:
        if not isinstance(centres, Sequence):
            _validate.is_array("centres", centres)
            if centres.ndim < 2:
                raise ValueError(
                    f"`centres` must have shape (..., C, d), got {tuple(centres.shape)}."
                )
        given = len(centres) if isinstance(centres, Sequence) else centres.shape[-2]
        if count not in (None, given):
            raise ValueError(
                f"`num_proposals` must be the number of `centres`, {given}, got {count}."
            )
        count = given
    repeats = 2 if antithetic else 1
    if omega is not None:
        _validate.is_array("omega", omega)
        if antithetic:
            raise ValueError("`antithetic` must be False when `omega` is given.")
        samples = omega.shape[-2] if omega.ndim > 1 else 0
        count = samples if count is None else count
        if count == 0 or samples % count:
            raise ValueError(
                f"`omega` must hold a multiple of the number of proposals, {count}, "
                f"got {samples} frequencies."
            )
        repeats = samples // count
    if count is None:
        raise ValueError("One of `num_proposals`, `centres` and `omega` must be given, got none.")
    n, m = q.shape[-2], k.shape[-2]
    if count < 1 or (centres is None and count > min(n, m)):
        raise ValueError(
            "The number of proposals must be at least 1 and at most the numbers of queries and "
            f"keys, {n} and {m}, for chunks not to be empty, got {count}."
        )
    return int(count), repeats


def _lara(q: Array, k: Array, v: Array, *, num_samples: int, **options: Any) -> Array:
    return linear_randomized_attention(q, k, v, num_proposals=num_samples, **options)


def _rfa(q: Array, k: Array, v: Array, *, num_samples: int, **options: Any) -> Array:
    return random_feature_attention(q, k, v, num_features=num_samples, **options)


def _is(q: Array, k: Array, v: Array, *, num_samples: int, rng: Any, **options: Any) -> Array:
    omega, _ = sampling.draw(num_samples, q.shape[-1], rng=rng)
    return importance_sampled_attention(q, k, v, omega=omega, **options)


def _adapted(estimator: Callable[..., Array]) -> Callable[..., Array]:
    """Fit the proposal to the queries and keys first."""

    def run(q: Array, k: Array, v: Array, **options: Any) -> Array:
        from .adapt import fit  # it imports SciPy

        if options.get("causal") or options.get("mask") is not None:
            raise ValueError(
                "`mask` and `causal` must not be given: the moments are of all queries and keys."
            )
        proposal = fit(q, k, scale=options.get("scale"))
        return estimator(q, k, v, proposal=proposal, **options)

    return run


# Every estimator by name, called as fn(q, k, v, num_samples=, rng=, scale=, mask=, causal=).
ESTIMATORS: dict[str, Callable[..., Array]] = {
    **{f"rfa-{coupling}": partial(_rfa, coupling=coupling) for coupling in sampling.COUPLINGS},
    **{
        f"rfa-{features}": partial(_rfa, features=features)
        for features in FEATURES
        if features != "positive"
    },
    "rfa-adapted": _adapted(_rfa),
    "is": _is,
    "mean-of-ratios": mean_of_ratios_attention,
    "ra": randomized_attention,
    **{f"lara-{weighting}": partial(_lara, weighting=weighting) for weighting in WEIGHTINGS},
    "lara-adapted": _adapted(_lara),
}

# What a comparison shows unless told otherwise: one of each kind, and the best of its kind.
DEFAULT_ESTIMATORS = ("rfa-iid", "rfa-orthogonal", "lara-own", "lara-balance", "ra")
