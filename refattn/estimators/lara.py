"""Linear randomized attention (LARA): proposals and their weights, then two hops."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from functools import reduce
from itertools import pairwise
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from .. import sampling
from ..arrays import checks, frequencies
from ..arrays.arithmetic import multiply, square_norm
from ..arrays.blocks import WHOLE, block_shape, blocks, buffers, part, put, some_heads, tiles
from ..arrays.heads import group_with_lead
from ..arrays.library import (
    Array,
    as_written,
    constant,
    device,
    is_numpy_array,
    root_scale,
    split_rows,
    untraced,
)
from ..engine.attend import Attended, attend, log_sum_exp
from ..engine.causal import causal_attention
from ..engine.hops import Keys, Samples, concatenate, read, sample
from ..engine.positive import Positive, exponents, two_hops
from ..engine.scores import Scores
from ..numbers.primitives import primitive, retraced
from ..typing import ArrayT, Weighting
from .inputs import Options, change_gauge, check_call
from .token_chunks import chunk_of, mean_of_chunks, seen_keys

WEIGHTINGS: tuple[Weighting, ...] = get_args(Weighting)


@as_written
def linear_randomized_attention(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    *,
    num_proposals: int | None = None,
    centres: Array | Sequence[sampling.Gaussian] | None = None,
    omega: Array | Literal["mean"] | None = None,
    weighting: Weighting = "balance",
    beta: float = 1.0,
    antithetic: bool = False,
    proposal: sampling.Gaussian | None = None,
    rng: Any = None,
    scale: float | None = None,
    mask: Array | None = None,
    causal: bool = False,
) -> ArrayT:
    r"""Estimate softmax attention from several data-dependent proposals (LARA).

    .. math::
        \mathrm{out}_i =
        \frac{\sum_c \alpha'_{ic} \, \xi(q_i, \omega_c) \sum_j \xi(k_j, \omega_c) \, v_j}
             {\sum_c \alpha'_{ic} \, \xi(q_i, \omega_c) \sum_j \xi(k_j, \omega_c)}, \qquad
        \alpha'_{ic} = \alpha_{ic} \frac{N(\omega_c; 0, I)}{q_c(\omega_c)}, \qquad
        \omega_c \sim q_c

    with xi(x, omega) = exp(omega . x - |x|^2/2). Zheng 2022, LARA (see `refattn.naive`). By default
    q_c = N(mu_c, I) with mu_c the sum of the mean query and the mean key of the c-th of C
    contiguous chunks. Linear in n and m; biased, consistent.

    With ``omega="mean"``, as the authors' code computes at inference, each omega_c is the mean of
    q_c, and nothing is random. That lowers the error if there are few proposals, but it does not
    vanish as C grows: `theory.proposal_means_law`.

    Parameters
    ----------
    q, k, v, rng, scale
        As in `random_feature_attention`.
    num_proposals : int, optional
        Number C of chunks, at most n and m. Pass it or `centres`; with an array `omega`
        alone, C = S.
    centres : array, shape (..., C, d), or a sequence of C sampling.Gaussian, optional
        Means mu_c of the proposals N(mu_c, I), in kernel coordinates, or the proposals.
    omega : array, shape (..., S, d), or "mean", optional
        Frequencies, in kernel coordinates, S a multiple of C: each S/C consecutive ones belong to
        one proposal; or ``"mean"``: the mean of each proposal. Drawn by default, one for each
        proposal, independently for each head. With Gaussian proposals given as a sequence, an array
        `omega` must be of NumPy.
    weighting : {"balance", "own", "query", "query-over-queries"}
        The weights alpha, with B_c = q_c(omega_c) / sum_c' q_c'(omega_c):

        * ``"balance"``: alpha_c = B_c, the balance heuristic;
        * ``"own"``: alpha constant;
        * ``"query"``: alpha_ic = B_c + beta (t_ic - mean_c t_ic), t_i = softmax_c(qbar_c . q_i)
          with qbar_c the mean query of chunk c;
        * ``"query-over-queries"``: the same with the softmax taken over i, as in the authors'
          code.

        With the last two some alpha may be negative. Negative alpha are replaced by 0, which drops
        their proposals for that query. At least one remains, since the sum is positive, and the
        result is a mean of values. But the remaining weights no longer sum to 1 at every omega, as
        consistency requires. If negative alpha were kept, the estimated normaliser would be 0 for
        some queries.
    beta : float, default 1.0
        Strength of the dependence on the query.
    antithetic : bool, default False
        Draw omega_c = mu_c + z and mu_c - z for each proposal: S = 2 C.
    proposal : sampling.Gaussian, optional
        Result of `adapt.fit`: queries and keys are first put into its gauge; `centres`, `omega` and
        chunk means are in this gauge. Its mean and covariance are not used.
    mask : array of bool, broadcasting to (..., n, m), optional
        As in `random_feature_attention`. Chunks have equal numbers of unmasked keys (keys that some
        query sees), so that masking a key equals deleting it.
    causal : bool, default False
        Query i sees key j only if j <= i + m - n, and only proposals of earlier chunks: queries of
        chunk t use N(0, I) and the chunks before t ("balance" and "own" only). So there are again C
        proposals: N(0, I) and all chunks but the last. The cost stays linear. Zheng 2022 does not
        define causal LARA.

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
    options = Options(scale, mask, causal, omega, proposal=proposal, rng=rng)
    own = LaraOptions(num_proposals, centres, weighting, beta, antithetic)
    inputs = prepare_lara(q, k, v, options, own)
    return inputs.ungroup(attend_prepared(inputs, causal).out)


def attend_prepared(inputs: LaraInputs, causal: bool) -> Attended:
    """Return LARA and its log normaliser."""
    weighting = inputs.options.weighting
    if causal:
        return attend_growing(inputs, *past_proposals(inputs))
    made = make_proposals(inputs)
    if weighting not in ("own", "balance"):
        return query_weighted(inputs, made.omega, query_weights(inputs, made))
    samples = Samples(inputs.root * made.omega, proposal_weights(made, weighting)[..., None, :])
    return two_hops(inputs.q, samples, inputs.keys, False, inputs.xp)


@primitive
def attend_growing(inputs: LaraInputs, centres: Array, omega: Array) -> Attended:
    """Attend where queries know the samples of chunks before their own, in one step of a tape."""
    arithmetic = _GrowingSamples(inputs, centres, omega)
    return causal_attention(inputs.q, inputs.keys, arithmetic)


class LaraInputs(NamedTuple):
    """Arguments of LARA: checked, in groups of heads, and what is drawn."""

    q: Array
    keys: Keys
    root: Array
    lead: tuple[int, ...]  # that q, keys and values broadcast to
    xp: Any  # the array namespace
    ungroup: Callable[..., Array]
    options: LaraOptions
    omega: Array | None  # (..., S, d), if given
    centres: Array | None  # (..., C, d), if given
    noise: Array | None  # (..., C, d), if frequencies are drawn around the centres
    log_own: Array | None  # (..., S), of proposals that are given
    mixture: Array | None


class LaraOptions(NamedTuple):
    """What only LARA takes: its proposals and samples, and how they are weighted."""

    num_proposals: Any  # once checked, how many there are
    centres: Any
    weighting: Weighting
    beta: float
    antithetic: bool
    repeats: int = 1  # samples of each proposal


def prepare_lara(q: Array, k: Array, v: Array, options: Options, own: LaraOptions) -> LaraInputs:
    """Check arguments of `linear_randomized_attention`, draw noise, and group heads."""
    scale, mask, lead, xp = check_call(q, k, v, options)
    d, omega, proposal, centres = q.shape[-1], options.omega, options.proposal, own.centres
    checks.choice("weighting", own.weighting, WEIGHTINGS)
    beta = checks.real("beta", own.beta, like=q)
    checks.flag("antithetic", own.antithetic)
    means = frequencies.at_means(omega, options.rng)
    count, repeats = _count_proposals(q.shape[-2], k.shape[-2], omega, own)
    omega = None if means else omega
    if proposal is not None:
        sampling.check_gaussians("proposal", [proposal])
    q, k = change_gauge(q, k, proposal, lead)
    if options.causal:
        frequencies.causal_proposals(centres, own.weighting, mask)
    z = log_own = mixture = None
    if means:
        z = np.zeros((*lead, count, d))
    elif omega is None:
        z = checks.generator(options.rng).standard_normal((*lead, count, d))
    if isinstance(centres, Sequence):
        omega = untraced(omega)  # computed in NumPy, and not differentiated
        omega, log_own, mixture = _from_sequence(centres, omega, z, repeats, lead, d)
        log_own, mixture = (constant(x, q)[..., None, :] for x in (log_own, mixture))
        centres = None
    if omega is not None:
        omega, _ = frequencies.shared(omega, None, q, lead)
    if centres is not None:
        centres, _ = frequencies.shared(centres, None, q, lead, name="centres")
    if z is not None:
        z = constant(z, q)
    (q, k, v, mask, centres, omega, log_own, mixture, z), lead, ungroup = group_with_lead(
        q, k, v, mask, centres, omega, log_own, mixture, z
    )
    if log_own is not None:
        log_own, mixture = log_own[..., 0, :], mixture[..., 0, :]
    own = own._replace(num_proposals=count, beta=beta, repeats=repeats)
    root = root_scale(scale, q)
    keys = Keys(k, v, mask, root * root / 2)
    return LaraInputs(q, keys, root, lead, xp, ungroup, own, omega, centres, z, log_own, mixture)


class Proposals(NamedTuple):
    """Proposals, their frequencies, and densities at these, log over N(0, I)."""

    q_mean: Array  # (..., C, d), mean query of each chunk
    omega: Array  # (..., S, d)
    log_own: Array  # (..., S), of the own proposal of each
    mixture: Array  # (..., S), of the sum of all


def make_proposals(inputs: LaraInputs) -> Proposals:
    """Make the proposals of chunks, and draw around them, where they are not given."""
    options, centres, omega = inputs.options, inputs.centres, inputs.omega
    count, repeats = options.num_proposals, options.repeats
    keys, root, xp = inputs.keys, inputs.root, inputs.xp
    q_mean = root * mean_of_chunks(inputs.q, count, None, xp)
    if inputs.log_own is not None:
        return Proposals(q_mean, omega, inputs.log_own, inputs.mixture)
    if centres is None:
        centres = q_mean + root * mean_of_chunks(keys.k, count, seen_keys(keys, xp), xp)
    if omega is None:
        omega = _draw_around(centres, inputs.noise, repeats, xp)
    log_own = _log_own(omega, centres, repeats, xp)
    return Proposals(q_mean, omega, log_own, log_mixture(omega, centres).lse)


def past_proposals(inputs: LaraInputs) -> tuple[Array, Array]:
    """Return means of the proposals of causal chunks (..., C, d), and frequencies (..., S, d)."""
    centres, omega = past_centres(inputs), inputs.omega
    if omega is None:
        omega = _draw_around(centres, inputs.noise, inputs.options.repeats, inputs.xp)
    return centres, omega


def past_chunks(inputs: LaraInputs) -> Iterator[tuple[Array, Array]]:
    """Yield which of the chunks that make proposals each query and key is in, or -1; and these."""
    q, (k, _, mask, _), xp = inputs.q, inputs.keys, inputs.xp
    (n, m), count = (q.shape[-2], k.shape[-2]), inputs.options.num_proposals
    chunk = chunk_of(n, count)
    chunk[chunk == count - 1] = -1  # the last makes none
    yield xp.asarray(chunk, device=device(q)), q
    query = np.arange(m) - m + n
    of_keys = xp.asarray(np.where(query < 0, -1, chunk[query.clip(0)]), device=device(k))
    yield of_keys if mask is None else xp.where(mask[..., 0, :], of_keys, -1), k


def proposal_weights(made: Proposals, weighting: Weighting) -> Array:
    """Return log weights of samples that do not depend on the query, (..., S)."""
    if weighting == "own":
        return -made.log_own
    return math.log(made.q_mean.shape[-2]) - made.mixture


def query_weights(inputs: LaraInputs, made: Proposals) -> QueryWeights:
    """Return what the weights of samples are made of where they depend on the query."""
    (_, _, weighting, beta, _, repeats), xp = inputs.options, inputs.xp
    balance, over = xp.exp(made.log_own - made.mixture), -1 if weighting == "query" else -2
    return QueryWeights(made.q_mean, balance, made.log_own, over, beta, repeats, xp)


@as_written
def _log_own(omega: Array, centres: Array, repeats: int, xp: Any) -> Array:
    """log N(omega_s; mu_s, I) - log N(omega_s; 0, I) for the own proposal of each, (..., S)."""
    centres = xp.repeat(centres, repeats, axis=-2)
    return xp.sum(omega * centres, axis=-1) - square_norm(centres) / 2


def log_mixture(omega: Array, centres: Array) -> Attended:
    """log sum_c N(omega_s; mu_c, I) - log N(omega_s; 0, I), (..., S), the `lse` of attention."""
    return attend(
        omega, centres, centres[..., :0], key_bias=lambda centre: -square_norm(centre) / 2
    )


def _draw_around(centres: Array, z: Array, repeats: int, xp: Any) -> Array:
    """Return frequencies mu_c + z_c, or pairs mu_c + z_c, mu_c - z_c, shape (..., repeats C, d)."""
    if repeats == 1:
        return centres + z
    pairs = xp.stack([centres + z, centres - z], axis=-2)
    *lead, count, _, d = pairs.shape
    return xp.reshape(pairs, (*lead, repeats * count, d))


def _from_sequence(
    proposals: Sequence[Any], omega: Any, z: Any, repeats: int, lead: tuple[int, ...], d: int
) -> tuple[Any, Any, Any]:
    """Frequencies from a list of Gaussians, with the logs of `_log_own` and `_log_mixture`."""
    sampling.check_gaussians("centres", proposals)
    for p in proposals:
        checks.broadcasts("centres", p.mean, (*lead, d), "(..., d)")
        checks.broadcasts("centres", np.empty((*p.lead, 1)), (*lead, 1), "(..., 1)")
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
    log_own = [
        -p.log_ratio(omega[..., c * repeats : (c + 1) * repeats, :])
        for c, p in enumerate(proposals)
    ]
    mixture = reduce(np.logaddexp, (-p.log_ratio(omega) for p in proposals))
    return omega, np.concatenate(np.broadcast_arrays(*log_own), axis=-1), mixture


class QueryWeights(NamedTuple):
    """What weights alpha_ic = B_c + beta (t_ic - mean_c t_ic) of a query are made of."""

    q_mean: Array  # (..., C, d), mean query of each chunk
    balance: Array  # (..., S), B_c
    log_own: Array  # (..., S), log of the own proposal over N(0, I)
    over: int  # axis of the softmax t: -1 the proposals, -2 the queries
    beta: float
    repeats: int
    xp: Any  # the array namespace

    def norm(self, q: Array, root: Array) -> Array | None:
        """Log normaliser of the softmax over queries; that over proposals is of each alone."""
        return self.over_queries(q, root).lse[..., None, :] if self.over == -2 else None

    def over_queries(self, q: Array, root: Array) -> Attended:
        """Mean queries attend to queries."""
        return attend(self.q_mean, q, q[..., :0], Scores(root))

    def softmax(self, q: Array, norm: Array | None) -> Array:
        """t_ic, (..., n, C)."""
        t = multiply(q, self.xp.matrix_transpose(self.q_mean))
        return self.xp.exp(t - (log_sum_exp(t, self.xp)[..., None] if norm is None else norm))

    def of(self, t: Array) -> Array:
        """alpha, (..., n, S)."""
        xp = self.xp
        t = xp.repeat(t - xp.mean(t, axis=-1, keepdims=True), self.repeats, axis=-1)
        return self.balance[..., None, :] + self.beta * t

    def log(self, alpha: Array) -> Array:
        """Log of alpha over the own proposal, (..., n, S): negative weights are dropped."""
        xp = self.xp
        log_alpha = xp.where(alpha > 0, xp.log(xp.where(alpha > 0, alpha, 1.0)), -math.inf)
        return log_alpha - self.log_own[..., None, :]

    def part(self, head: tuple[slice, ...]) -> QueryWeights:
        """Take some heads."""
        balance, log_own = (part(x, (*head, WHOLE)) for x in (self.balance, self.log_own))
        q_mean = some_heads(self.q_mean, head)
        return self._replace(q_mean=q_mean, balance=balance, log_own=log_own)


@as_written
def query_weighted(inputs: LaraInputs, omega: Array, weights: QueryWeights) -> Attended:
    """Attend with weights that depend on the query."""
    q, keys, root = inputs.q, inputs.keys, inputs.root
    omega = root * omega
    states = None if keys.differ else sample(omega, keys)
    norm = weights.norm(q, root)
    out, lse = buffers(q, keys.v, inputs.lead, inputs.xp)
    most = math.prod(block_shape(q)) // omega.shape[-2]
    for *head, i in tiles((*inputs.lead, q.shape[-2]), most):
        q_i = part(q, (*head, i, WHOLE))
        weights_h = weights.part(tuple(head))
        seen: Any = None
        if states is None:
            seen = keys.part(tuple(head))._replace(mask=part(keys.mask, (*head, i, WHOLE)))
        else:
            seen = Attended(some_heads(states.out, head), part(states.lse, (*head, WHOLE)))
        more = some_heads(omega, head), root, some_heads(norm, head)
        done = _attend_weighted(q_i, weights_h, seen, *more)
        out = put(out, (*head, i, WHOLE), done.out)
        lse = put(lse, (*head, i), done.lse)
    return Attended(out, lse)


@retraced
def _attend_weighted(
    q: Array,
    weights: QueryWeights,
    seen: Keys | Attended,
    omega: Array,
    root: Array,
    norm: Array | None,
) -> Attended:
    """Let some queries attend to keys, or to what samples have seen of these."""
    t = weights.softmax(root * q, norm)
    samples = Samples(omega, weights.log(weights.of(t)))
    if isinstance(seen, Keys):
        return two_hops(q, samples, seen, False, weights.xp)
    return read(q, samples, seen)


class _GrowingSamples(Positive):
    """Samples of causal LARA, of which a query knows those of the chunks before its own.

    What is past of a chunk's first token makes its proposal, whose samples join the others. All
    samples attend to all keys.
    """

    centres: Array  # of some heads, (..., C, d)
    omega: Array  # (..., S, d)
    mixture: Array  # of the proposals so far at each of omega, log over N(0, I), (..., 1, S)

    def __init__(self, inputs: LaraInputs, centres: Array, omega: Array) -> None:
        self.inputs, self.options, self.alike = inputs, inputs.options, False
        self.xp, self.width, self.arrays = inputs.xp, omega.shape[-2], (centres, omega)
        self.chunk = chunk_of(inputs.q.shape[-2], self.options.num_proposals)

    def part(self, head: tuple[slice, ...]) -> _GrowingSamples:
        """Take some heads."""
        some, inputs = copy(self), self.inputs
        some.centres, some.omega = (some_heads(x, head) for x in self.arrays)
        log_own = _log_own(some.omega, some.centres, self.options.repeats, inputs.xp)
        log_weight = -log_own[..., None, :]
        some.samples = Samples(inputs.root * some.omega, log_weight)
        some.mixture = inputs.xp.full_like(log_weight, -math.inf)
        return some

    def steps(self, q: Array, size: int) -> Iterator[slice]:
        """Cut the queries into steps: on NumPy those of a step know the same samples."""
        if not is_numpy_array(q):
            yield from blocks(0, q.shape[-2], size)
            return
        count = self.options.num_proposals
        for start, stop in pairwise(-(-np.arange(count + 1) * len(self.chunk) // count)):
            yield from blocks(int(start), int(stop), size)

    def queries(self, q: Array, i: slice) -> Any:
        """Features of queries, for the samples that they know."""
        xp, chunk = self.inputs.xp, self.chunk[i]
        proposal = np.arange(self.width) // self.options.repeats
        weight = (
            self._weights(i) if self.options.weighting == "balance" else self.samples.log_weight
        )
        if is_numpy_array(q):
            known = proposal <= chunk[0]
            omega, weight = self.samples.omega[..., known, :], weight[..., known]
            return exponents(multiply(q, omega.mT) + weight)
        x = multiply(q, xp.matrix_transpose(self.samples.omega)) + weight
        return exponents(x, known=xp.asarray(proposal <= chunk[:, None], device=device(q)))

    def _weights(self, i: slice) -> Array:
        """Weights of the balance heuristic over the proposals that there are, (..., c or 1, S)."""
        xp, omega, home = self.inputs.xp, self.omega, device(self.omega)
        count, n = self.options.num_proposals, len(self.chunk)
        first, last = (-(-j * count // n) for j in (i.start, i.stop))
        most = -(-(i.stop - i.start) * count // n)  # chunks that start in one step
        rows = np.arange(first, first + most)
        at = xp.asarray(np.minimum(rows, count - 1), device=home)
        centre = xp.take(self.centres, at, axis=-2)
        ratio = multiply(centre, xp.matrix_transpose(omega)) - square_norm(centre)[..., None] / 2
        started = xp.asarray((rows < last)[:, None], device=home)
        ratio = xp.where(started, ratio, -math.inf)
        mixture = running_log_sum(concatenate(self.mixture, ratio, -2, xp), xp)
        self.mixture = mixture[..., -1:, :]
        which = self.chunk[i] - first + 1
        which = which[:1] if is_numpy_array(omega) else which
        return -xp.take(mixture, xp.asarray(which, device=home), axis=-2)


@primitive
def past_centres(inputs: LaraInputs) -> Array:
    """Means of the proposals of causal chunks (..., C, d), each of the chunk before; 0 at first."""
    q, (k, _, mask, _), xp, home = inputs.q, inputs.keys, inputs.xp, device(inputs.q)
    (n, d), count = q.shape[-2:], inputs.options.num_proposals
    edges = -(-np.arange(count + 1) * n // count)
    length = -(-n // count)

    def mean(x: Array, seen: Array | None, chunks: slice, shift: int) -> Array:
        tokens = edges[:-1][chunks, None] + np.arange(length)
        inside = (tokens < edges[1:][chunks, None]) & (tokens + shift >= 0)
        rows = xp.asarray((tokens + shift).clip(0, x.shape[-2] - 1).ravel(), device=home)
        visible = xp.asarray(inside[..., None], device=home)
        if seen is not None:
            some = xp.take(xp.matrix_transpose(seen), rows, axis=-2)
            visible = visible & split_rows(some, inside.shape, xp)
        values = split_rows(xp.take(x, rows, axis=-2), inside.shape, xp)
        sums = xp.sum(xp.where(visible, values, 0.0), axis=-2)
        sizes = xp.sum(xp.astype(visible, x.dtype), axis=-2)
        return sums / xp.where(sizes == 0, 1.0, sizes)

    heads = max(1, *(math.prod(x.shape[:-2]) for x in (q, k)))
    few = max(1, math.prod(block_shape(q)) // (length * d * heads))
    centres = [
        inputs.root * (mean(q, None, chunks, 0) + mean(k, mask, chunks, k.shape[-2] - n))
        for chunks in list(blocks(0, count - 1, few)) or [slice(0, 0)]
    ]
    first = xp.zeros((*centres[0].shape[:-2], 1, d), dtype=q.dtype, device=home)
    return xp.concat([first, *centres], axis=-2)


def running_log_sum(x: Array, xp: Any) -> Array:
    """log(e^x_0 + ... + e^x_t) along the axis before the last, of 2, 4, 8, ... rows."""
    step = 1
    while step < x.shape[-2]:
        none = xp.full_like(x[..., :step, :], -math.inf)
        x = xp.logaddexp(x, concatenate(none, x[..., :-step, :], -2, xp))
        step *= 2
    return x


def _count_proposals(n: int, m: int, omega: Any, own: LaraOptions) -> tuple[int, int]:
    """Return the number of proposals C, and of samples for each."""
    num_proposals, centres, _, _, antithetic, _ = own
    if num_proposals is not None:
        checks.positive_integer("num_proposals", num_proposals)
    count = num_proposals
    if centres is not None:
        if not isinstance(centres, Sequence):
            checks.is_array("centres", centres)
            if centres.ndim < 2:
                raise ValueError(
                    f"`centres` must have shape (..., C, d), got {tuple(centres.shape)}."
                )
        size = len(centres) if isinstance(centres, Sequence) else centres.shape[-2]
        if count not in (None, size):
            raise ValueError(
                f"`num_proposals` must be the number of `centres`, {size}, got {count}."
            )
        count = size
    repeats = 2 if antithetic else 1
    if omega is not None and antithetic:
        raise ValueError("`antithetic` must be False when `omega` is given.")
    if omega is not None and not isinstance(omega, str):
        checks.is_array("omega", omega)
        samples = omega.shape[-2] if omega.ndim > 1 else 0
        count = samples if count is None else count
        repeats = frequencies.samples_of_each(samples, count)
    if count is None:
        raise ValueError(
            "One of `num_proposals`, `centres` and an array `omega` must be given, got none."
        )
    if count < 1 or (centres is None and count > min(n, m)):
        raise ValueError(
            "The number of proposals, `num_proposals` or that of `omega`, must be at least 1 and "
            f"at most the numbers of queries and keys, {n} and {m}, so that no chunk is empty, "
            f"got {count}."
        )
    return int(count), repeats
