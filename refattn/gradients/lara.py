r"""Gradients of linear randomized attention, through proposals, frequencies and weights.

Weights are made of the densities :math:`B_{cs} = \omega_s \cdot \mu_c - |\mu_c|^2 / 2` of the
proposals, log over N(0, I): of the own proposal of each frequency, and of the mixture of all, their
log-sum-exp. Frequencies drawn around proposals move with these, and these with the chunks of
queries and keys that they are means of.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..arrays.arithmetic import multiply, square_norm, sum_of_products
from ..arrays.blocks import WHOLE, add_part, block_shape, blocks, part, some_heads, sum_to, tiles
from ..arrays.library import Array, as_written, constant, device
from ..engine import attend_back, hops_back
from ..engine.attend import Attended
from ..engine.attend_back import zeros_of
from ..engine.hops import Samples, sample
from ..engine.positive_back import PositiveBack
from ..engine.scores import Scores
from ..engine.signed_back import pull_linear
from ..estimators import lara
from ..estimators.inputs import Options
from ..estimators.lara import LaraOptions
from ..estimators.token_chunks import chunk_of, chunk_of_keys, members
from .rules import sources_of, with_pullback

_OF_QUERY = ("query", "query-over-queries")  # weightings


# Cotangents of q, k, v in groups of heads, and of frequencies only if they were given.
_Cotangents = tuple[Array, Array, Array, Array | None]


class _Densities(NamedTuple):
    """Cotangents of frequencies, of log densities of proposals at these, and of mean queries."""

    omega: Array  # (..., S, d)
    log_own: Array | None  # (..., S)
    mixture: Array | None  # (..., S)
    q_mean: Array | None = None  # (..., C, d)


def vjp_lara(q: Array, k: Array, v: Array, **options: Any) -> Any:
    """Pull `linear_randomized_attention` back, through proposals that are made of q and k."""
    own = LaraOptions(**{x: options.pop(x) for x in LaraOptions._fields if x in options})
    shared = Options(**options)
    inputs, causal = lara.prepare_lara(q, k, v, shared, own), shared.causal
    sources = sources_of(q, k, v, shared, inputs.xp)
    if sources.omega is not None and inputs.log_own is not None:
        sources = sources._replace(omega=None)
    done, pull = lara.attend_prepared(inputs, causal), _pull_lara
    if causal:
        pull = _pull_causal
    elif inputs.options.weighting in _OF_QUERY:
        pull = _pull_query_weighted
    return with_pullback(done.out, inputs.ungroup, sources, partial(pull, inputs, done))


@as_written
def _pull_lara(inputs: lara.LaraInputs, done: Attended, d_out: Array) -> _Cotangents:
    """Pull cotangents of LARA with weights of the proposals alone back."""
    made, weighting, root = lara.make_proposals(inputs), inputs.options.weighting, inputs.root
    log_weight = lara.proposal_weights(made, weighting)[..., None, :]
    samples = Samples(root * made.omega, log_weight)
    pulled = hops_back.pull_two_hops(inputs.q, samples, inputs.keys, False, done, d_out)
    d_own, d_mixture = -pulled.log_weight[..., 0, :], None
    if weighting != "own":
        d_own, d_mixture = None, d_own
    densities = _Densities(root * pulled.omega, d_own, d_mixture)
    return _through_proposals(inputs, made, densities, *pulled[:3])


def _through_proposals(
    inputs: lara.LaraInputs, made: lara.Proposals, taken: _Densities, q: Array, k: Array, v: Array
) -> _Cotangents:
    """Go on to frequencies, centres, and the tokens that these are means of."""
    xp, count, repeats = inputs.xp, inputs.options.num_proposals, inputs.options.repeats
    d_omega, d_q_mean = taken.omega, taken.q_mean
    if made.centres is not None:
        d_centres = xp.zeros_like(made.centres)
        if taken.log_own is not None:
            centre, some = xp.repeat(made.centres, repeats, axis=-2), taken.log_own[..., None]
            d_omega = _plus(d_omega, some * centre)
            d_centres = _plus(d_centres, _sum_of_each(some * (made.omega - centre), count, xp))
        if taken.mixture is not None:
            done = lara.log_mixture(made.omega, made.centres)
            half, none = constant(0.5, made.omega), made.omega[..., :0]
            arrays = (made.omega, made.centres, made.centres[..., :0])
            mixture = attend_back.pull_attend(*arrays, done, none, taken.mixture, half=half)
            d_omega, d_centres = _plus(d_omega, mixture.q), _plus(d_centres, mixture.k)
        if inputs.omega is None:
            d_centres = _plus(d_centres, _sum_of_each(d_omega, count, xp))
        if inputs.centres is None:
            d_q_mean = d_centres if d_q_mean is None else _plus(d_q_mean, d_centres)
            chunk = chunk_of_keys(inputs.keys, count, xp)
            k = k + inputs.root * _of_chunks(d_centres, chunk, inputs.keys.k, xp)
    if d_q_mean is not None:
        chunk = xp.asarray(chunk_of(inputs.q.shape[-2], count), device=device(q))
        q = q + inputs.root * _of_chunks(d_q_mean, chunk, inputs.q, xp)
    return q, k, v, None if inputs.omega is None else d_omega


def _plus(x: Array, y: Array) -> Array:
    """Add to a cotangent, summed over heads that share it."""
    return x + sum_to(y, x.shape)


def _sum_of_each(x: Array, count: int, xp: Any) -> Array:
    """Sum over the samples of each proposal."""
    *lead, size, d = x.shape
    return xp.sum(xp.reshape(x, (*lead, count, size // count, d)), axis=-2)


def _of_chunks(d_means: Array, chunk: Array, x: Array, xp: Any) -> Array:
    """Pull means of chunks back to tokens, given which chunk each is in, if any."""
    count, total = d_means.shape[-2], zeros_of(x)
    columns = list(blocks(0, x.shape[-2], block_shape(x)[1]))

    def inside(j: slice) -> Array:
        return members(chunk[..., j], slice(0, count), x, xp)

    sizes: Any = sum(xp.sum(inside(j), axis=-1, keepdims=True) for j in columns)
    share = d_means / xp.where(sizes == 0, 1.0, sizes)
    for j in columns:
        total = add_part(total, (j, WHOLE), multiply(xp.matrix_transpose(inside(j)), share))
    return total


@as_written
def _pull_query_weighted(inputs: lara.LaraInputs, done: Attended, d_out: Array) -> _Cotangents:
    """Pull LARA back where weights depend on the query, and move with it and with mean queries."""
    q, keys, root, lead, xp, *_ = inputs
    made = lara.make_proposals(inputs)
    weights, omega = lara.query_weights(inputs, made), root * made.omega
    states = None if keys.differ else sample(omega, keys)
    norm = weights.norm(q, root)
    total = _SumOverTiles(
        *map(zeros_of, (q, keys.k, keys.v, omega, made.q_mean, made.log_own, made.log_own))
    )
    d_norm = None if norm is None else zeros_of(norm)
    d_states: Any = None if states is None else Attended(*map(zeros_of, states))
    for *head, i in tiles((*lead, q.shape[-2]), math.prod(block_shape(q)) // omega.shape[-2]):
        heads, rows = (*head, WHOLE), (*head, i, WHOLE)
        box, q_i = (*heads, WHOLE), part(q, rows)
        weights_h = weights.part(tuple(head))
        t = weights_h.softmax(root * q_i, None if norm is None else part(norm, box))
        samples = Samples(part(omega, box), weights_h.log(weights_h.of(t)))
        g, done_i = part(d_out, rows), Attended(part(done.out, rows), part(done.lse, (*head, i)))
        if states is None:
            keys_h = keys.part(tuple(head))._replace(mask=part(keys.mask, rows))
            pulled = hops_back.pull_two_hops(q_i, samples, keys_h, False, done_i, g)
            d_q, d_omega, d_log = pulled.q, pulled.omega, pulled.log_weight
            total = total.add("k", box, pulled.k).add("v", box, pulled.v)
        else:
            f = Attended(part(states.out, box), part(states.lse, heads))
            second = hops_back.pull_read(q_i, samples, f, done_i, g)
            d_q, d_omega, d_log = second.q, second.k, second.bias
            d_states = Attended(
                add_part(d_states.out, box, second.v),
                add_part(d_states.lse, heads, xp.sum(d_log, axis=-2)),
            )
        moved = _of_weights(weights_h, root * q_i, t, d_log)
        total = total.add("q", rows, d_q).add("q", rows, root * moved.q).add("omega", box, d_omega)
        total = total.add("q_mean", box, moved.q_mean).add("log_own", heads, moved.log_own)
        total = total.add("balance", heads, moved.balance)
        if d_norm is not None:
            d_norm = add_part(d_norm, box, moved.norm)
    if states is not None:
        first = hops_back.pull_sample(omega, keys, states, d_states.out, d_states.lse)
        total = total._replace(k=first.k, v=first.v, omega=total.omega + first.q)
    if d_norm is not None:  # of the softmax over queries
        none = q[..., :0]
        over = weights.over_queries(q, root)
        more = attend_back.pull_attend(
            made.q_mean, q, none, over, zeros_of(over.out), d_norm[..., 0, :], Scores(root)
        )
        total = total._replace(q=total.q + more.k, q_mean=total.q_mean + more.q)
    d_own, d_mixture = total.log_own + total.balance, -total.balance
    densities = _Densities(root * total.omega, d_own, d_mixture, total.q_mean)
    return _through_proposals(inputs, made, densities, *total[:3])


class _Moved(NamedTuple):
    """Cotangents of what the weights of some queries are made of."""

    q: Array
    q_mean: Array
    log_own: Array
    balance: Array  # of log B
    norm: Array | None


def _of_weights(weights: lara.QueryWeights, q: Array, t: Array, d_log: Array) -> _Moved:
    """Pull log weights of queries (..., c, S) back; those that are dropped do not move."""
    xp, alpha = weights.xp, weights.of(t)
    d_alpha = xp.where(alpha > 0, d_log / xp.where(alpha > 0, alpha, 1.0), 0.0)
    d_t = weights.beta * _sum_of_each(d_alpha[..., None], t.shape[-1], xp)[..., 0]
    d_t = t * (d_t - xp.mean(d_t, axis=-1, keepdims=True))  # of t, times t
    total, norm = xp.sum(d_t, axis=-1, keepdims=True), None
    if weights.over == -1:
        d_t = d_t - t * total
    else:
        norm = -xp.sum(d_t, axis=-2, keepdims=True)
    d_balance = xp.sum(d_alpha, axis=-2) * weights.balance
    turned = xp.matrix_transpose(d_t)
    d_own = -xp.sum(d_log, axis=-2)
    return _Moved(multiply(d_t, weights.q_mean), sum_of_products(turned, q), d_own, d_balance, norm)


class _SumOverTiles(NamedTuple):
    """Cotangents, summed over tiles of queries."""

    q: Array
    k: Array
    v: Array
    omega: Array
    q_mean: Array
    log_own: Array
    balance: Array  # of log B

    def add(self, name: str, box: tuple[slice, ...], x: Array) -> _SumOverTiles:
        """Add to a part of one of them."""
        return self._replace(**{name: add_part(getattr(self, name), box, x)})


@as_written
def _pull_causal(inputs: lara.LaraInputs, done: Attended, d_out: Array) -> _Cotangents:
    """Pull causal LARA back, where queries know the samples of chunks before their own."""
    xp, (count, _, weighting, _, _, repeats) = inputs.xp, inputs.options
    q, keys, root = inputs.q, inputs.keys, inputs.root
    centres, omega = lara.past_proposals(inputs)
    ratio = multiply(centres, xp.matrix_transpose(omega)) - square_norm(centres)[..., None] / 2
    chunk, proposal = np.arange(count)[:, None], np.arange(count * repeats) // repeats
    known, newest = (
        xp.asarray(x, device=device(q)) for x in (chunk >= proposal, chunk == proposal)
    )
    if weighting == "balance":
        mixture = lara.running_log_sum(ratio, xp)
        log_weight = -mixture
    else:
        log_weight = -xp.sum(xp.where(newest, ratio, 0.0), axis=-2, keepdims=True)
    log_weight = xp.where(known, log_weight, -math.inf)
    arithmetic = _KnownSamples(inputs, root * omega, log_weight, done.lse, keys.half)
    pulled = pull_linear(q, keys, arithmetic, done.out, d_out, causal=True)
    d_omega, d_log = pulled.parameters
    if weighting == "balance":
        d_ratio = _of_running(-d_log, ratio, mixture, xp)
    else:
        d_ratio = xp.where(newest, -xp.sum(d_log, axis=-2, keepdims=True), 0.0)
    d_omega = _plus(root * d_omega, multiply(xp.matrix_transpose(d_ratio), centres))
    d_centres = multiply(d_ratio, omega) - xp.sum(d_ratio, axis=-1, keepdims=True) * centres
    if inputs.omega is None:
        d_centres = d_centres + _sum_of_each(d_omega, count, xp)
    d_means = d_centres[..., 1:, :]  # the first is 0, each other the mean of the chunk before
    d_q, d_k = (root * _of_chunks(d_means, *pair, xp) for pair in lara.past_chunks(inputs))
    d_omega = None if inputs.omega is None else d_omega
    return pulled.q + d_q, pulled.k + d_k, pulled.v, d_omega


def _of_running(d_sums: Array, x: Array, sums: Array, xp: Any) -> Array:
    """Pull log sums of e^x over the rows up to each back, from the last row to the first."""
    rows = []
    later = xp.zeros_like(x[..., 0, :])
    for c in reversed(range(x.shape[-2])):
        here = sums[..., c, :]
        if c + 1 < x.shape[-2]:
            later = later * xp.exp(here - sums[..., c + 1, :])
        later = later + d_sums[..., c, :]
        rows.append(later * xp.exp(x[..., c, :] - here))
    return xp.stack(rows[::-1], axis=-2)


class _KnownSamples(PositiveBack):
    """Features of queries, which know the samples of their chunk: weights (..., C, S)."""

    def __init__(self, inputs: lara.LaraInputs, *arrays: Any) -> None:
        super().__init__(*arrays)
        self.xp = inputs.xp
        self.chunk = chunk_of(inputs.q.shape[-2], inputs.options.num_proposals)

    def weights(self, head: tuple[slice, ...], i: slice) -> Array:
        """Log weights of the samples for some queries."""
        rows = some_heads(self.log_weight, head)
        return self.xp.take(rows, self.xp.asarray(self.chunk[i], device=device(rows)), axis=-2)

    def taken(self, i: slice, cotangent: Array) -> list[Any]:
        """What these take, chunk by chunk."""
        chunk, addends = self.chunk[i], []
        for c in np.unique(chunk).tolist():
            start, stop = np.searchsorted(chunk, [c, c + 1]).tolist()
            total = self.xp.sum(cotangent[..., start:stop, :], axis=-2, keepdims=True)
            addends.append((1, slice(c, c + 1), total))
        return addends
