r"""The pullback of linear randomized attention, through proposals, frequencies and weights.

Weights are made of the densities :math:`B_{cs} = \omega_s \cdot \mu_c - |\mu_c|^2 / 2` of the
proposals, log over N(0, I): of the own proposal of each frequency, and of the mixture of all, their
log-sum-exp. Frequencies drawn around proposals move with these, and these with the chunks of
queries and keys that they are means of.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from ..arrays.blocks import WHOLE, add_part, block_shape, blocks, part, sum_to, tiles
from ..arrays.heads import broadcast_lead
from ..arrays.library import Array, array_namespace, as_written, constant, device, square_norm
from ..arrays.products import multiply, sum_of_products
from ..engine import hops_back, kernel_back
from ..engine.hops import Samples, sample
from ..engine.kernel import Attended
from ..engine.kernel_back import zeros_of
from ..engine.signed_back import PositiveBack, pull_linear
from ..estimators import lara

__all__ = ["Pulled", "pull", "pull_causal", "pull_query_weighted"]


class Pulled(NamedTuple):
    """Cotangents of arguments, in groups of heads; of frequencies only if they were given."""

    q: Array
    k: Array
    v: Array
    omega: Array | None


class _Densities(NamedTuple):
    """Cotangents of frequencies, of log densities of proposals at these, and of mean queries."""

    omega: Array  # (..., S, d)
    own: Array | None  # (..., S)
    mixture: Array | None  # (..., S)
    q_mean: Array | None = None  # (..., C, d)


@as_written
def pull(found: lara.Inputs, done: Attended, d_out: Array) -> Pulled:
    """Pull cotangents of LARA with weights of the proposals alone back."""
    made, own = lara.proposals(found), found.options.weighting == "own"
    log_weight = lara.log_weights(made, found.options.weighting)[..., None, :]
    samples = Samples(found.root * made.omega, log_weight)
    pulled = hops_back.pull_two_hops(found.q, samples, found.keys, False, done, d_out)
    d_own = -pulled.log_weight[..., 0, :]
    densities = _Densities(
        found.root * pulled.omega, d_own if own else None, None if own else d_own
    )
    return _through_proposals(found, made, densities, *pulled[:3])


def _through_proposals(
    found: lara.Inputs, made: lara.Proposals, taken: _Densities, q: Array, k: Array, v: Array
) -> Pulled:
    """Go on to frequencies, centres, and the tokens that these are means of."""
    xp, (count, repeats, *_) = array_namespace(found.q), found.options
    d_omega, d_q_mean = taken.omega, taken.q_mean
    if made.centres is not None:
        d_centres = xp.zeros_like(made.centres)
        if taken.own is not None:
            own, some = xp.repeat(made.centres, repeats, axis=-2), taken.own[..., None]
            d_omega = _plus(d_omega, some * own)
            d_centres = _plus(d_centres, _of_each(some * (made.omega - own), count))
        if taken.mixture is not None:
            done = lara.log_mixture(made.omega, made.centres)
            half, none = constant(0.5, made.omega), made.omega[..., :0]
            arrays = (made.omega, made.centres, made.centres[..., :0])
            mixture = kernel_back.pull_attend(*arrays, done, none, taken.mixture, half=half)
            d_omega, d_centres = _plus(d_omega, mixture.q), _plus(d_centres, mixture.k)
        if found.omega is None:
            d_centres = _plus(d_centres, _of_each(d_omega, count))
        if found.centres is None:
            d_q_mean = d_centres if d_q_mean is None else _plus(d_q_mean, d_centres)
            chunk = lara.chunk_of_keys(found.keys, count)
            k = k + found.root * _of_chunks(d_centres, chunk, found.keys.k)
    if d_q_mean is not None:
        chunk = xp.asarray(lara.chunk_of(found.q.shape[-2], count), device=device(q))
        q = q + found.root * _of_chunks(d_q_mean, chunk, found.q)
    return Pulled(q, k, v, None if found.omega is None else d_omega)


def _plus(x: Array, y: Array) -> Array:
    """Add to a cotangent, summed over heads that share it."""
    return x + sum_to(y, x.shape)


def _of_each(x: Array, count: int) -> Array:
    """Sums over the samples of each proposal."""
    *lead, size, d = x.shape
    xp = array_namespace(x)
    return xp.sum(xp.reshape(x, (*lead, count, size // count, d)), axis=-2)


def _of_chunks(d_means: Array, chunk: Array, x: Array) -> Array:
    """Pull means of chunks back to tokens, given which chunk each is in, if any."""
    xp, count, total = array_namespace(x), d_means.shape[-2], zeros_of(x)
    columns = list(blocks(0, x.shape[-2], block_shape(x)[1]))

    def members(j: slice) -> Array:
        return lara.members(chunk[..., j], slice(0, count), x)

    sizes: Any = sum(xp.sum(members(j), axis=-1, keepdims=True) for j in columns)
    share = d_means / xp.where(sizes == 0, 1.0, sizes)
    for j in columns:
        total = add_part(total, (j, WHOLE), multiply(xp.matrix_transpose(members(j)), share))
    return total


@as_written
def pull_query_weighted(found: lara.Inputs, done: Attended, d_out: Array) -> Pulled:
    """The same with weights that depend on the query, which move with it and with mean queries."""
    q, keys, root, xp = found.q, found.keys, found.root, array_namespace(found.q)
    made = lara.proposals(found)
    weights, omega = lara.query_weights(found, made), root * made.omega
    states = None if keys.differ else sample(omega, keys)
    norm = weights.norm(q, root)
    total = _Sums(*map(zeros_of, (q, keys.k, keys.v, omega, made.q_mean, made.own, made.own)))
    d_norm = None if norm is None else zeros_of(norm)
    d_states: Any = None if states is None else Attended(*map(zeros_of, states))
    lead, n = broadcast_lead(q, keys.k, keys.v, omega, keys.mask), q.shape[-2]
    for *head, i in tiles((*lead, n), math.prod(block_shape(q)) // omega.shape[-2]):
        heads, rows = (*head, WHOLE), (*head, i, WHOLE)
        box, q_i = (*heads, WHOLE), part(q, rows)
        own = weights.part(tuple(head))
        t = own.softmax(root * q_i, None if norm is None else part(norm, box))
        samples = Samples(part(omega, box), own.log(own.of(t)))
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
        moved = _of_weights(own, root * q_i, t, d_log)
        total = total.add("q", rows, d_q).add("q", rows, root * moved.q).add("omega", box, d_omega)
        total = total.add("q_mean", box, moved.q_mean).add("own", heads, moved.own)
        total = total.add("balance", heads, moved.balance)
        if d_norm is not None:
            d_norm = add_part(d_norm, box, moved.norm)
    if states is not None:
        first = hops_back.pull_sample(omega, keys, states, d_states.out, d_states.lse)
        total = total._replace(k=first.k, v=first.v, omega=total.omega + first.q)
    if d_norm is not None:  # of the softmax over queries
        none = q[..., :0]
        over = weights.over_queries(q, root)
        more = kernel_back.pull_attend(
            made.q_mean, q, none, over, zeros_of(over.out), d_norm[..., 0, :], scale=root
        )
        total = total._replace(q=total.q + more.k, q_mean=total.q_mean + more.q)
    d_own, d_mixture = total.own + total.balance, -total.balance
    densities = _Densities(root * total.omega, d_own, d_mixture, total.q_mean)
    return _through_proposals(found, made, densities, *total[:3])


class _Moved(NamedTuple):
    """Cotangents of what the weights of some queries are made of."""

    q: Array
    q_mean: Array
    own: Array
    balance: Array  # of log B
    norm: Array | None


def _of_weights(weights: lara.QueryWeights, q: Array, t: Array, d_log: Array) -> _Moved:
    """Pull log weights of queries (..., c, S) back; those that are dropped do not move."""
    xp, alpha = array_namespace(q), weights.of(t)
    d_alpha = xp.where(alpha > 0, d_log / xp.where(alpha > 0, alpha, 1.0), 0.0)
    d_t = weights.beta * _of_each(d_alpha[..., None], t.shape[-1])[..., 0]
    d_t = t * (d_t - xp.mean(d_t, axis=-1, keepdims=True))  # of t, times t
    total, norm = xp.sum(d_t, axis=-1, keepdims=True), None
    if weights.over == -1:
        d_t = d_t - t * total
    else:
        norm = -xp.sum(d_t, axis=-2, keepdims=True)
    d_balance = xp.sum(d_alpha, axis=-2) * weights.balance
    turned = xp.matrix_transpose(d_t)
    own = -xp.sum(d_log, axis=-2)
    return _Moved(multiply(d_t, weights.q_mean), sum_of_products(turned, q), own, d_balance, norm)


class _Sums(NamedTuple):
    """Cotangents, summed over tiles of queries."""

    q: Array
    k: Array
    v: Array
    omega: Array
    q_mean: Array
    own: Array
    balance: Array  # of log B

    def add(self, name: str, box: tuple[slice, ...], x: Array) -> _Sums:
        """Add to a part of one of them."""
        return self._replace(**{name: add_part(getattr(self, name), box, x)})


@as_written
def pull_causal(found: lara.Inputs, done: Attended, d_out: Array) -> Pulled:
    """Pull causal LARA back, where queries know the samples of chunks before their own."""
    xp, (count, repeats, weighting, _) = array_namespace(found.q), found.options
    q, keys, root = found.q, found.keys, found.root
    centres, omega = lara.past_proposals(found)
    ratio = multiply(centres, xp.matrix_transpose(omega)) - square_norm(centres)[..., None] / 2
    chunk, proposal = np.arange(count)[:, None], np.arange(count * repeats) // repeats
    known, own = (xp.asarray(x, device=device(q)) for x in (chunk >= proposal, chunk == proposal))
    if weighting == "balance":
        mixture = lara.running_log_sum(ratio)
        log_weight = -mixture
    else:
        log_weight = -xp.sum(xp.where(own, ratio, 0.0), axis=-2, keepdims=True)
    log_weight = xp.where(known, log_weight, -math.inf)
    arithmetic = _Growing(q.shape[-2], root * omega, log_weight, done.lse, keys.half)
    pulled = pull_linear(q, keys, arithmetic, done.out, d_out, causal=True)
    d_omega, d_log = pulled.parameters
    if weighting == "balance":
        d_ratio = _of_running(-d_log, ratio, mixture)
    else:
        d_ratio = xp.where(own, -xp.sum(d_log, axis=-2, keepdims=True), 0.0)
    d_omega = _plus(root * d_omega, multiply(xp.matrix_transpose(d_ratio), centres))
    d_centres = multiply(d_ratio, omega) - xp.sum(d_ratio, axis=-1, keepdims=True) * centres
    if found.omega is None:
        d_centres = d_centres + _of_each(d_omega, count)
    d_means = d_centres[..., 1:, :]  # the first is 0, each other the mean of the chunk before
    d_q, d_k = (root * _of_chunks(d_means, *pair) for pair in lara.past_chunks(found))
    d_omega = None if found.omega is None else d_omega
    return Pulled(pulled.q + d_q, pulled.k + d_k, pulled.v, d_omega)


def _of_running(d_sums: Array, x: Array, sums: Array) -> Array:
    """Pull log sums of e^x over the rows up to each back, from the last row to the first."""
    xp, rows = array_namespace(x), []
    later = xp.zeros_like(x[..., 0, :])
    for c in reversed(range(x.shape[-2])):
        here = sums[..., c, :]
        if c + 1 < x.shape[-2]:
            later = later * xp.exp(here - sums[..., c + 1, :])
        later = later + d_sums[..., c, :]
        rows.append(later * xp.exp(x[..., c, :] - here))
    return xp.stack(rows[::-1], axis=-2)


class _Growing(PositiveBack):
    """Features of queries, which know the samples of their chunk: weights (..., C, S)."""

    def __init__(self, n: int, *arrays: Any) -> None:
        super().__init__(*arrays)
        self.chunk = lara.chunk_of(n, self.log_weight.shape[-2])

    def weights(self, head: tuple[slice, ...], i: slice) -> Array:
        """Log weights of the samples for some queries."""
        xp, rows = array_namespace(self.omega), part(self.log_weight, (*head, WHOLE, WHOLE))
        return xp.take(rows, xp.asarray(self.chunk[i], device=device(rows)), axis=-2)

    def taken(self, i: slice, cotangent: Array) -> list[Any]:
        """What these take, chunk by chunk."""
        first, xp = self.chunk[i], array_namespace(cotangent)
        found = []
        for c in np.unique(first).tolist():
            start, stop = np.searchsorted(first, [c, c + 1]).tolist()
            total = xp.sum(cotangent[..., start:stop, :], axis=-2, keepdims=True)
            found.append((1, slice(c, c + 1), total))
        return found
