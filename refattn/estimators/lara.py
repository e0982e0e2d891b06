"""Linear randomized attention (LARA): proposals and their weights, then two hops."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from functools import reduce
from itertools import pairwise
from typing import Any, NamedTuple, get_args

import numpy as np

from .. import sampling
from ..arrays import checks, frequencies, qkv
from ..arrays.blocks import WHOLE, block_shape, blocks, most_threads, part, put, tiles
from ..arrays.heads import broadcast_lead, group_heads
from ..arrays.library import (
    Array,
    array_namespace,
    as_written,
    constant,
    device,
    is_numpy_array,
    root_scale,
    square_norm,
)
from ..arrays.products import multiply, sum_of_products
from ..arrays.threads import for_each
from ..engine.causal import causal_attention
from ..engine.hops import Keys, Samples, concatenate, read, sample
from ..engine.kernel import Attended, attend, buffers, log_sum_exp
from ..engine.positive import Positive, exponents, two_hops
from ..typing import ArrayT, Weighting
from .inputs import change_gauge, check

__all__ = ["WEIGHTINGS", "linear_randomized_attention"]


def __dir__() -> list[str]:
    return __all__


WEIGHTINGS: tuple[Weighting, ...] = get_args(Weighting)


def linear_randomized_attention(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    *,
    num_proposals: int | None = None,
    centres: Array | Sequence[sampling.Gaussian] | None = None,
    omega: Array | None = None,
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
    inputs = prepare(locals())
    return inputs.ungroup(attend_prepared(inputs, causal).out)


def attend_prepared(found: Inputs, causal: bool) -> Attended:
    """Return LARA and its log normaliser."""
    q, keys, root, weighting = found.q, found.keys, found.root, found.options.weighting
    if causal:
        return causal_attention(q, keys, _Growing(found))
    made = proposals(found)
    if weighting not in ("own", "balance"):
        return query_weighted(q, made.omega, keys, root, query_weights(found, made))
    samples = Samples(root * made.omega, log_weights(made, weighting)[..., None, :])
    return two_hops(q, samples, keys, False)


class Inputs(NamedTuple):
    """Arguments of LARA: checked, in groups of heads, and what is drawn."""

    q: Array
    keys: Keys
    root: Array
    ungroup: Callable[..., Array]
    options: Options
    omega: Array | None  # (..., S, d), if given
    centres: Array | None  # (..., C, d), if given
    noise: Array | None  # (..., C, d), if frequencies are drawn around the centres
    own: Array | None  # (..., S), of proposals that are given
    mixture: Array | None


class Options(NamedTuple):
    """How many proposals and samples of each there are, and how they are weighted."""

    proposals: int
    repeats: int
    weighting: Weighting
    beta: float


def prepare(given: dict[str, Any]) -> Inputs:
    """Check arguments of `linear_randomized_attention`, draw noise, and group heads."""
    q, k, v, scale, mask = check(given)
    centres, omega, weighting, antithetic, proposal, causal = (
        given[name]
        for name in ("centres", "omega", "weighting", "antithetic", "proposal", "causal")
    )
    checks.choice("weighting", weighting, WEIGHTINGS)
    beta = checks.real("beta", given["beta"], like=q)
    checks.flag("antithetic", antithetic)
    count, repeats = _count_proposals(q, k, given["num_proposals"], centres, omega, antithetic)
    if proposal is not None:
        sampling.check_gaussians("proposal", [proposal])
    q, k = change_gauge(q, k, v, proposal)
    if causal:
        frequencies.causal_proposals(centres, weighting, mask)
    lead, d = qkv.lead(q, k, v), q.shape[-1]
    z = None
    if omega is None:
        z = checks.generator(given["rng"]).standard_normal((*lead, count, d))
    own = mixture = None
    if isinstance(centres, Sequence):
        omega, own, mixture = _from_sequence(centres, omega, z, repeats, lead, d)
        own, mixture = (constant(x, q)[..., None, :] for x in (own, mixture))
        centres = None
    if omega is not None:
        omega, _ = frequencies.shared(omega, None, q, lead)
    if centres is not None:
        centres, _ = frequencies.shared(centres, None, q, lead, name="centres")
    if z is not None:
        z = constant(z, q)
    (q, k, v, mask, centres, omega, own, mixture, z), ungroup = group_heads(
        q, k, v, mask, centres, omega, own, mixture, z
    )
    if own is not None:
        own, mixture = own[..., 0, :], mixture[..., 0, :]
    root = root_scale(scale, q)
    options = Options(count, repeats, weighting, beta)
    keys = Keys(k, v, mask, root * root / 2)
    return Inputs(q, keys, root, ungroup, options, omega, centres, z, own, mixture)


class Proposals(NamedTuple):
    """Proposals, their frequencies, and densities at these, log over N(0, I)."""

    q_mean: Array  # (..., C, d), mean query of each chunk
    centres: Array | None  # (..., C, d); None where densities are given
    omega: Array  # (..., S, d)
    own: Array  # (..., S), of the own proposal of each
    mixture: Array  # (..., S), of the sum of all


def proposals(found: Inputs) -> Proposals:
    """Make the proposals of chunks, and draw around them, where they are not given."""
    (count, repeats, *_), centres, omega = found.options, found.centres, found.omega
    q_mean = found.root * chunk_means(found.q, count, None)
    if found.own is not None:
        return Proposals(q_mean, None, omega, found.own, found.mixture)
    if centres is None:
        centres = q_mean + found.root * chunk_means(found.keys.k, count, seen_keys(found.keys))
    if omega is None:
        omega = _around(centres, found.noise, repeats)
    own, mixture = _log_own(omega, centres, repeats), log_mixture(omega, centres).lse
    return Proposals(q_mean, centres, omega, own, mixture)


def seen_keys(keys: Keys) -> Array | None:
    """Which keys some query sees, (..., m)."""
    return None if keys.mask is None else array_namespace(keys.mask).any(keys.mask, axis=-2)


def chunk_of_keys(keys: Keys, count: int) -> Array:
    """Which of the chunks each key is in, -1 if it is masked."""
    seen, xp = seen_keys(keys), array_namespace(keys.k)
    if seen is not None:
        return chunk_of_seen(seen, count)
    return xp.asarray(chunk_of(keys.k.shape[-2], count), device=device(keys.k))


def past_proposals(found: Inputs) -> tuple[Array, Array]:
    """Means of the proposals of causal chunks (..., C, d), and their frequencies (..., S, d)."""
    count, repeats, *_ = found.options
    keys, omega = found.keys, found.omega
    centres = _past_centres(found.q, keys.k, keys.mask, count, found.root)
    return centres, _around(centres, found.noise, repeats) if omega is None else omega


def past_chunks(found: Inputs) -> Iterator[tuple[Array, Array]]:
    """Which of the chunks that make proposals each query and each key is in, or -1; and these."""
    n, count, xp = found.q.shape[-2], found.options.proposals, array_namespace(found.q)
    chunk = chunk_of(n, count)
    chunk[chunk == count - 1] = -1  # the last makes none
    yield xp.asarray(chunk, device=device(found.q)), found.q
    (k, _, mask, _), place = found.keys, np.arange(found.keys.k.shape[-2])
    query = place - len(place) + n
    own = xp.asarray(np.where(query < 0, -1, chunk[query.clip(0)]), device=device(k))
    yield own if mask is None else xp.where(mask[..., 0, :], own, -1), k


def log_weights(made: Proposals, weighting: Weighting) -> Array:
    """Log weights of samples that do not depend on the query, (..., S)."""
    if weighting == "own":
        return -made.own
    return math.log(made.q_mean.shape[-2]) - made.mixture


def query_weights(found: Inputs, made: Proposals) -> QueryWeights:
    """What the weights of samples are made of where they depend on the query."""
    balance = array_namespace(made.omega).exp(made.own - made.mixture)
    over = -1 if found.options.weighting == "query" else -2
    options = (over, found.options.beta, found.options.repeats)
    return QueryWeights(made.q_mean, balance, made.own, *options)


@as_written
def _log_own(omega: Array, centres: Array, repeats: int = 1) -> Array:
    """log N(omega_s; mu_s, I) - log N(omega_s; 0, I) for the own proposal of each, (..., S)."""
    xp = array_namespace(omega)
    own = xp.repeat(centres, repeats, axis=-2)
    return xp.sum(omega * own, axis=-1) - square_norm(own) / 2


def log_mixture(omega: Array, centres: Array) -> Attended:
    """log sum_c N(omega_s; mu_c, I) - log N(omega_s; 0, I), (..., S), the `lse` of attention."""
    return attend(
        omega, centres, centres[..., :0], key_bias=lambda centre: -square_norm(centre) / 2
    )


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
    own = [
        -p.log_ratio(omega[..., c * repeats : (c + 1) * repeats, :])
        for c, p in enumerate(proposals)
    ]
    mixture = reduce(np.logaddexp, (-p.log_ratio(omega) for p in proposals))
    return omega, np.concatenate(np.broadcast_arrays(*own), axis=-1), mixture


@as_written
def chunk_means(x: Array, count: int, seen: Array | None) -> Array:
    """Means of `count` contiguous chunks with equal numbers of seen rows: (..., count, d)."""
    xp, n, size = array_namespace(x), x.shape[-2], block_shape(x)[1]
    few, lead, home = max(1, size // 2 * count // max(n, 1)), broadcast_lead(x), device(x)
    if seen is None:
        chunk = xp.asarray(chunk_of(n, count), device=home)
    else:  # any row may be in any chunk
        few, chunk, lead = count, chunk_of_seen(seen, count), broadcast_lead(x, seen[..., None])
    means = xp.empty((*lead, count, x.shape[-1]), dtype=x.dtype, device=home)

    def average(c: slice) -> None:
        nonlocal means
        sums = sizes = xp.zeros((1, 1), dtype=x.dtype, device=home)
        for j in blocks(-(-c.start * n // count), -(-c.stop * n // count), size):
            member, x_j = members(chunk[..., j], c, x), x[..., j, :]
            if seen is not None:
                x_j = xp.where(seen[..., j][..., None], x_j, 0.0)
            sums = sums + sum_of_products(member, x_j)
            sizes = sizes + xp.sum(member, axis=-1, keepdims=True)
        whole = tuple(slice(0, length) for length in lead)
        mean = sums / xp.where(sizes == 0, 1.0, sizes)
        means = put(means, (*whole, c, slice(0, x.shape[-1])), mean)

    most = most_threads(x, math.prod(x.shape))
    for_each(lambda: average, blocks(0, count, few), most=most)
    return means


def chunk_of(n: int, count: int) -> Any:
    """Which of the chunks each of n tokens is in."""
    return np.arange(n) * count // max(n, 1)


def chunk_of_seen(seen: Array, count: int) -> Array:
    """Which of chunks of equally many seen tokens each is in, (..., m), and -1 if it is not."""
    xp, home = array_namespace(seen), device(seen)
    visible = xp.astype(seen, xp.arange(0, device=home).dtype)  # JAX may have no int64
    rank = xp.cumulative_sum(visible, axis=-1) - 1
    total = xp.maximum(xp.sum(visible, axis=-1, keepdims=True), xp.asarray(1, device=home))
    return xp.where(seen, rank * count // total, -1)


def members(chunk: Array, c: slice, like: Array) -> Array:
    """1 where a token is in a chunk, else 0, (..., chunks, tokens)."""
    xp = array_namespace(like)
    chunks = xp.arange(c.start, c.stop, device=device(like))[:, None]
    return xp.astype(chunk[..., None, :] == chunks, like.dtype)


class QueryWeights(NamedTuple):
    """What weights alpha_ic = B_c + beta (t_ic - mean_c t_ic) of a query are made of."""

    q_mean: Array  # (..., C, d), mean query of each chunk
    balance: Array  # (..., S), B_c
    own: Array  # (..., S), log of the own proposal over N(0, I)
    over: int  # axis of the softmax t: -1 the proposals, -2 the queries
    beta: float
    repeats: int

    def norm(self, q: Array, root: Array) -> Array | None:
        """Log normaliser of the softmax over queries; that over proposals is of each alone."""
        return self.over_queries(q, root).lse[..., None, :] if self.over == -2 else None

    def over_queries(self, q: Array, root: Array) -> Attended:
        """Mean queries attend to queries."""
        return attend(self.q_mean, q, q[..., :0], scale=root)

    def softmax(self, q: Array, norm: Array | None) -> Array:
        """t_ic, (..., n, C)."""
        xp = array_namespace(q)
        t = multiply(q, xp.matrix_transpose(self.q_mean))
        return xp.exp(t - (log_sum_exp(t, xp)[..., None] if norm is None else norm))

    def of(self, t: Array) -> Array:
        """alpha, (..., n, S)."""
        xp = array_namespace(t)
        t = xp.repeat(t - xp.mean(t, axis=-1, keepdims=True), self.repeats, axis=-1)
        return self.balance[..., None, :] + self.beta * t

    def log(self, alpha: Array) -> Array:
        """Log of alpha over the own proposal, (..., n, S): negative weights are dropped."""
        xp = array_namespace(alpha)
        log_alpha = xp.where(alpha > 0, xp.log(xp.where(alpha > 0, alpha, 1.0)), -math.inf)
        return log_alpha - self.own[..., None, :]

    def part(self, head: tuple[slice, ...]) -> QueryWeights:
        """Take some heads."""
        balance, own = (part(x, (*head, WHOLE)) for x in (self.balance, self.own))
        q_mean = part(self.q_mean, (*head, WHOLE, WHOLE))
        return self._replace(q_mean=q_mean, balance=balance, own=own)


@as_written
def query_weighted(
    q: Array, omega: Array, keys: Keys, root: Array, weights: QueryWeights
) -> Attended:
    """LARA with weights that depend on the query."""
    omega = root * omega
    states = None if keys.differ else sample(omega, keys)
    norm = weights.norm(q, root)
    lead, n = broadcast_lead(q, keys.k, keys.v, omega, keys.mask), q.shape[-2]
    out, lse = buffers(q, keys.v, lead, array_namespace(q))
    for *head, i in tiles((*lead, n), math.prod(block_shape(q)) // omega.shape[-2]):
        box, q_i = (*head, WHOLE, WHOLE), part(q, (*head, i, WHOLE))
        own = weights.part(tuple(head))
        t = own.softmax(root * q_i, None if norm is None else part(norm, box))
        log_weight = own.log(own.of(t))
        samples = Samples(part(omega, box), log_weight)
        if states is None:
            seen = keys.part(tuple(head))._replace(mask=part(keys.mask, (*head, i, WHOLE)))
            done = two_hops(q_i, samples, seen, False)
        else:
            f = Attended(part(states.out, box), part(states.lse, (*head, WHOLE)))
            done = read(q_i, samples, f)
        out = put(out, (*head, i, WHOLE), done.out)
        lse = put(lse, (*head, i), done.lse)
    return Attended(out, lse)


class _Growing(Positive):
    """Samples of causal LARA, of which a query knows those of the chunks before its own.

    What is past of a chunk's first token makes its proposal, whose samples join the others. All
    samples attend to all keys.
    """

    centres: Array  # of some heads, (..., C, d)
    omega: Array  # (..., S, d)
    mixture: Array  # of the proposals so far at each of omega, log over N(0, I), (..., 1, S)

    def __init__(self, found: Inputs) -> None:
        self.found, self.options, self.alike = found, found.options, False
        self.xp = array_namespace(found.q)
        noise = found.noise if found.omega is None else found.omega
        self.width, self.arrays = self.options.proposals * self.options.repeats, (noise,)
        self.chunk = chunk_of(found.q.shape[-2], self.options.proposals)

    def part(self, head: tuple[slice, ...]) -> _Growing:
        """Take some heads, and draw their samples."""
        own, found, box = copy(self), self.found, (*head, WHOLE, WHOLE)
        omega, noise = (None if x is None else part(x, box) for x in (found.omega, found.noise))
        own.found = found._replace(
            q=part(found.q, box), keys=found.keys.part(head), omega=omega, noise=noise
        )
        own.centres, own.omega = past_proposals(own.found)
        log_weight = -_log_own(own.omega, own.centres, self.options.repeats)[..., None, :]
        own.samples = Samples(found.root * own.omega, log_weight)
        own.mixture = array_namespace(log_weight).full_like(log_weight, -math.inf)
        return own

    def chunks(self, q: Array, size: int) -> Iterator[slice]:
        """Cut the queries into steps: on NumPy those of a step know the same samples."""
        if not is_numpy_array(q):
            yield from blocks(0, q.shape[-2], size)
            return
        edges = self._first(np.arange(self.options.proposals + 1))
        for start, stop in pairwise(edges):
            yield from blocks(int(start), int(stop), size)

    def _first(self, chunk: Any) -> Any:
        """First query of a chunk."""
        return -(-chunk * len(self.chunk) // self.options.proposals)

    def queries(self, q: Array, i: slice) -> Any:
        """Features of queries, for the samples that they know."""
        xp, home, chunk = array_namespace(q), device(q), self.chunk[i]
        proposal = np.arange(self.width) // self.options.repeats
        weight = (
            self._weights(i) if self.options.weighting == "balance" else self.samples.log_weight
        )
        if is_numpy_array(q):
            known = proposal <= chunk[0]
            omega, weight = self.samples.omega[..., known, :], weight[..., known]
            return exponents(multiply(q, omega.mT) + weight)
        x = multiply(q, xp.matrix_transpose(self.samples.omega)) + weight
        return exponents(x, known=xp.asarray(proposal <= chunk[:, None], device=home))

    def _weights(self, i: slice) -> Array:
        """Weights of the balance heuristic over the proposals that there are, (..., c or 1, S)."""
        xp, home, (count, n) = (
            array_namespace(self.omega),
            device(self.omega),
            (self.options.proposals, len(self.chunk)),
        )
        first, last = (-(-j * count // n) for j in (i.start, i.stop))
        most = -(-(i.stop - i.start) * count // n)  # chunks that start in one step
        rows = np.arange(first, first + most)
        centre = xp.take(
            self.centres, xp.asarray(np.minimum(rows, count - 1), device=home), axis=-2
        )
        ratio = (
            multiply(centre, xp.matrix_transpose(self.omega)) - square_norm(centre)[..., None] / 2
        )
        started = xp.asarray((rows < last)[:, None], device=home)
        ratio = xp.where(started, ratio, -math.inf)
        mixture = running_log_sum(concatenate(self.mixture, ratio, -2, xp))
        self.mixture = mixture[..., -1:, :]
        which = self.chunk[i] - first + 1
        which = which[:1] if is_numpy_array(self.omega) else which
        return -xp.take(mixture, xp.asarray(which, device=home), axis=-2)


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


def running_log_sum(x: Array) -> Array:
    """log(e^x_0 + ... + e^x_t) along the axis before the last, of 2, 4, 8, ... rows."""
    xp, step = array_namespace(x), 1
    while step < x.shape[-2]:
        none = xp.full_like(x[..., :step, :], -math.inf)
        x = xp.logaddexp(x, concatenate(none, x[..., :-step, :], -2, xp))
        step *= 2
    return x


def _count_proposals(
    q: Array, k: Array, num_proposals: Any, centres: Any, omega: Any, antithetic: bool
) -> tuple[int, int]:
    """Number of proposals C, and of samples for each."""
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
        given = len(centres) if isinstance(centres, Sequence) else centres.shape[-2]
        if count not in (None, given):
            raise ValueError(
                f"`num_proposals` must be the number of `centres`, {given}, got {count}."
            )
        count = given
    repeats = 2 if antithetic else 1
    if omega is not None:
        checks.is_array("omega", omega)
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
