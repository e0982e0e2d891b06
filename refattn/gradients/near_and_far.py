r"""Gradients of the estimators that attend exactly to near keys and approximately to the others.

With :math:`p_{ij}` the weight of a pair among all that a query sees, near or far,

.. math:: \bar s_{ij} = p_{ij} \, (\bar g_i \cdot v_j - \bar g_i \cdot \mathrm{out}_i)

so that each part is pulled back as it is, with the output and the normaliser of the whole.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from ..arrays import qkv
from ..arrays.blocks import sum_to
from ..arrays.library import Array, as_written, reverse
from ..engine import attend_back, hops_back
from ..engine.attend import Attended, attend, finite
from ..engine.attend_back import zeros_of
from ..engine.chunks import Chunks, slice_rows
from ..engine.hops_back import PulledHops
from ..engine.scores import Scores
from ..estimators.inputs import Options
from ..estimators.near_and_far import (
    ChunkMoments,
    EvaInputs,
    Field,
    Local,
    Sides,
    attend_chunks,
    attend_locally,
    attend_moments,
    near_scores,
    prepare_chunks,
    prepare_moments,
)
from ..estimators.rfa import RfaInputs, prepare_random_features
from .rules import Sources, sources_of, with_pullback


def vjp_local(q: Array, k: Array, v: Array, *, window: Any, **shared: Any) -> Any:
    """Pull `local_random_feature_attention` back, part by part."""
    sides, options = qkv.window(window), Options(**shared)
    inputs, causal = prepare_random_features(q, k, v, options), options.causal
    sources = sources_of(q, k, v, options, inputs.xp)
    local = attend_locally(inputs, sides, causal)

    def pull(d_out: Array) -> Any:
        pulled = _pull_local(inputs, sides, causal, local, d_out)
        return *pulled[:3], inputs.root * pulled.omega

    return with_pullback(local.done.out, inputs.ungroup, sources, pull)


def vjp_eva(
    q: Array, k: Array, v: Array, *, window: int, sampled: bool, log_size: bool, **shared: Any
) -> Any:
    """Pull `eva_attention` back, through the means that summaries are made of."""
    options = Options(**shared)
    inputs = prepare_chunks(q, k, v, options, window, sampled, log_size)
    sources, (states, done) = sources_of(q, k, v, options, inputs.xp), attend_chunks(inputs)
    pull = partial(_pull_chunks, inputs, states, done, k.shape[-2])
    return with_pullback(inputs.chunks.joined(done.out), inputs.ungroup, sources, pull)


def vjp_second_order(q: Array, k: Array, v: Array, *, window: int, **shared: Any) -> Any:
    """Pull `second_order_attention` back, through the moments."""
    inputs = prepare_moments(q, k, v, Options(**shared), window).moments()
    sources, done = Sources(q, k, v, inputs.xp), attend_moments(inputs)
    pull = partial(_pull_moments, inputs, done, k.shape[-2])
    return with_pullback(inputs.chunks.joined(done.out), inputs.ungroup, sources, pull)


@as_written
def _pull_local(
    inputs: RfaInputs, sides: Sides, causal: bool, local: Local, d_out: Array
) -> PulledHops:
    """Pull `near_and_far.attend_locally`, which returned `local`, back."""
    (q, keys, samples, root, xp, _), done = inputs, local.done
    scores = near_scores(keys, root, sides, causal)
    near = attend_back.pull_attend(q, keys.k, keys.v, done, d_out, scores=scores)
    total = PulledHops(near.q, near.k, near.v, *map(zeros_of, samples))
    for field, part in local.far:
        whole = field.turn(Attended(done.out, done.lse + local.of_query))
        g = reverse(d_out, -2) if field.turned else d_out
        pulled = hops_back.pull_two_hops(field.q, samples, field.keys, field.causal, whole, g)
        share = xp.exp(part.lse - finite(done.lse, xp))
        d_norm = share * xp.sum(d_out * (part.out - done.out), axis=-1)
        d_q = _turn_back(pulled.q, field) - sum_to(root * root * d_norm[..., None] * q, q.shape)
        d_k, d_v = (_turn_back(slice_rows(x, 0, keys.k.shape[-2], xp), field) for x in pulled[1:3])
        more = PulledHops(d_q, d_k, d_v, pulled.omega, pulled.log_weight)
        total = PulledHops(*(x + y for x, y in zip(total, more, strict=True)))
    return total


def _turn_back(x: Array, field: Field) -> Array:
    return reverse(x, -2) if field.turned else x


@as_written
def _pull_chunks(
    inputs: EvaInputs, states: Attended, whole: Attended, m: int, d_out: Array
) -> tuple[Array, Array, Array, Array]:
    """Pull `near_and_far.attend_chunks` back, from what it returned: q, k, v, omega."""
    chunks, root, xp = inputs.chunks, inputs.root, inputs.xp
    g = _cut_as_queries(d_out, chunks, xp)
    near = _pull_near(chunks, root, inputs.causal, whole, g)
    mean, f, scores = inputs.far(states.out[..., 0, :])
    far = attend_back.pull_attend(chunks.q, mean, f, whole, g, scores=scores)
    of_f = far.v[..., 0, :, :][..., None, :]
    first = hops_back.pull_sample(inputs.omega[..., None, :], inputs.keys, states, of_f, None)
    d_omega = root * first.q[..., 0, :]
    d_q, d_mean = near.q + far.q, far.k[..., 0, :, :]
    if inputs.moves:
        d_mean = d_mean + sum_to(root * d_omega, d_mean.shape)
        d_q = d_q + _of_mean_query(sum_to(root * d_omega, chunks.mean_query.shape), chunks, xp)
    d_k = first.k + _of_mean(d_mean, chunks.k, chunks, xp)
    of_keys = (_rows_of_keys(*x, chunks, m, xp) for x in ((d_k, near.k), (first.v, near.v)))
    return chunks.joined(d_q), *of_keys, d_omega


@as_written
def _pull_moments(
    moments: ChunkMoments, done: Attended, m: int, d_out: Array
) -> tuple[Array, Array, Array]:
    """Pull `near_and_far.attend_moments`, which returned `done`, back: q, k, v."""
    chunks, root, xp = moments.chunks, moments.root, moments.xp
    g = _cut_as_queries(d_out, chunks, xp)
    near = _pull_near(chunks, root, moments.causal, done, g)
    far_k, far_v, of_queries = zeros_of(moments.far_k), zeros_of(moments.far_v), []
    for some in moments.blocks():
        x, features = moments.queries(some)
        k, v, scores = moments.far(some)
        out, d_some = (y[..., some, :, :] for y in (done.out, g))
        lse = done.lse[..., some, :]
        far = attend(features, k, v, scores)
        _, turned = moments.turned(far.out)
        # Values are read twice: as they are, and turned by the query.
        by_query = x[..., :, None] * d_some[..., None, :]
        by_query = xp.reshape(by_query, (*by_query.shape[:-2], x.shape[-1] * d_some.shape[-1]))
        d_both = xp.concat([d_some, by_query], axis=-1)
        both = xp.concat([out, xp.zeros_like(by_query)], axis=-1)
        whole = Attended(both, lse)
        pulled = attend_back.pull_attend(features, k, v, whole, d_both, scores=scores)
        far_k = far_k + pulled.k[..., 0, :, :]
        far_v = far_v + pulled.v[..., 0, :, :]
        d = x.shape[-1]
        steep = xp.reshape(pulled.q[..., d:], (*pulled.q.shape[:-1], d, d))
        steep = steep + xp.matrix_transpose(steep)
        share = xp.exp(far.lse - finite(lse, xp))[..., None]
        d_x = pulled.q[..., :d] + xp.sum(steep * x[..., None, :], axis=-1)
        d_turn = share * xp.sum(turned * d_some[..., None, :], axis=-1)
        of_queries.append(root * root * (d_x + sum_to(d_turn, d_x.shape)))
    d_q = near.q + xp.concat(of_queries, axis=-3) if of_queries else near.q
    d_k, d_v = _of_moments(moments, far_k, far_v)
    of_keys = (_rows_of_keys(*x, chunks, m, xp) for x in ((d_k, near.k), (d_v, near.v)))
    return chunks.joined(d_q), *of_keys


def _of_moments(moments: ChunkMoments, far_k: Array, far_v: Array) -> tuple[Array, Array]:
    """Return cotangents of keys and values from those of means and covariances.

    Vectors less their mean add up to 0, so that the mean takes nothing of covariances.
    """
    (chunks, apart, v_apart, *_), xp = moments, moments.xp
    d, d_v = apart.shape[-1], v_apart.shape[-1]
    size = xp.maximum(chunks.size, xp.ones_like(chunks.size))
    cov = xp.reshape(far_k[..., d:], (*far_k.shape[:-1], d, d)) / 2
    cross = xp.reshape(far_v[..., d_v:], (*far_v.shape[:-1], d, d_v))

    def seen(x: Array, shape: tuple[int, ...]) -> Array:
        return sum_to(chunks.seen(x / size), shape)

    d_k = seen(apart @ (cov + xp.matrix_transpose(cov)), chunks.k.shape)
    d_k = d_k + seen(v_apart @ xp.matrix_transpose(cross), chunks.k.shape)
    d_v_apart = seen(apart @ cross, chunks.v.shape)
    d_k = d_k + _of_mean(far_k[..., :d], chunks.k, chunks, xp)
    return d_k, d_v_apart + _of_mean(far_v[..., :d_v], chunks.v, chunks, xp)


def _pull_near(
    chunks: Chunks, root: Array, causal: bool, whole: Attended, g: Array
) -> attend_back.Cotangents:
    """Pull `Chunks.near` back, whose part `whole` has, with cotangents g cut as queries."""
    k, v, mask = chunks.near_keys
    scores = Scores(root * root, mask=mask, causal=causal, shift=chunks.ahead)
    return attend_back.pull_attend(chunks.q, k, v, whole, g, scores=scores)


def _rows_of_keys(every: Array, near: Array, chunks: Chunks, m: int, xp: Any) -> Array:
    """Join rows of keys, from those of all chunks and of the chunks of queries."""
    start = chunks.first * chunks.k.shape[-2]
    return slice_rows(_as_rows(every, xp), 0, m, xp) + slice_rows(
        _as_rows(near, xp), -start, m - start, xp
    )


def _as_rows(x: Array, xp: Any) -> Array:
    """Reshape rows (..., C, w, d) of chunks to (..., C w, d)."""
    return xp.reshape(x, (*x.shape[:-3], x.shape[-3] * x.shape[-2], x.shape[-1]))


def _cut_as_queries(x: Array, chunks: Chunks, xp: Any) -> Array:
    """Cut rows of queries as these are: the pullback of `Chunks.joined`."""
    count, size = chunks.q.shape[-3:-1]
    start = chunks.rows.start
    x = slice_rows(x, -start, count * size - start, xp)
    return xp.reshape(x, (*x.shape[:-2], count, size, x.shape[-1]))


def _of_mean(d_mean: Array, x: Array, chunks: Chunks, xp: Any) -> Array:
    """Pull `Chunks.mean` of x back: each key that is seen has its share."""
    share = d_mean / xp.maximum(chunks.size, xp.ones_like(chunks.size))[..., 0]
    share = share[..., None, :]
    return sum_to(chunks.seen(xp.broadcast_to(share, (*share.shape[:-2], *x.shape[-2:]))), x.shape)


def _of_mean_query(d_mean: Array, chunks: Chunks, xp: Any) -> Array:
    """Pull the mean queries of chunks back."""
    count = chunks.num_queries
    share = slice_rows(d_mean, chunks.first, chunks.first + chunks.q.shape[-3], xp)
    share = share / xp.where(count > 0, count, 1.0)
    return xp.broadcast_to(share[..., None, :], chunks.q.shape)
