r"""Pullbacks of near keys and the rest, that both attend and whose results merge.

With :math:`p_{ij}` the weight of a pair among all that a query sees, near or far,

.. math:: \bar s_{ij} = p_{ij} \, (\bar g_i \cdot v_j - \bar g_i \cdot \mathrm{out}_i)

so that each part is pulled back as it is, with the output and the normaliser of the whole.
"""

from __future__ import annotations

from . import _backward, _backward_hops
from ._array import Array, array_namespace, as_written, reverse
from ._backward import zeros_of
from ._backward_hops import Pulled
from ._blocks import sum_to
from ._chunks import Chunks, rows
from ._kernel import Attended, finite
from ._scores import Options
from .estimators import Arranged
from .near_and_far import Field, Local, Sides, Summaries, Summarised, near_options

__all__ = ["pull_chunks", "pull_local"]


@as_written
def pull_local(found: Arranged, sides: Sides, causal: bool, local: Local, d_out: Array) -> Pulled:
    """Pull `near_and_far.attend_locally`, which returned `local`, back."""
    (q, keys, samples, root, _), done = found, local.done
    xp = array_namespace(q)
    options = near_options(keys, root, sides, causal)
    near = _backward.attend(q, keys.k, keys.v, done, d_out, **options)
    total = Pulled(near.q, near.k, near.v, *map(zeros_of, samples))
    for field, part in local.far:
        whole = field.turn(Attended(done.out, done.lse + local.of_query))
        g = reverse(d_out, -2) if field.turned else d_out
        own = _backward_hops.two_hops(field.q, samples, field.keys, field.causal, whole, g)
        share = xp.exp(part.lse - finite(done.lse, xp))
        d_norm = share * xp.sum(d_out * (part.out - done.out), axis=-1)
        d_q = _turned(own.q, field) - sum_to(root * root * d_norm[..., None] * q, q.shape)
        d_k, d_v = (_turned(rows(x, 0, keys.k.shape[-2]), field) for x in (own.k, own.v))
        more = Pulled(d_q, d_k, d_v, own.omega, own.log_weight)
        total = Pulled(*(x + y for x, y in zip(total, more, strict=True)))
    return total


def _turned(x: Array, field: Field) -> Array:
    return reverse(x, -2) if field.turned else x


@as_written
def pull_chunks(
    found: Summarised, done: Summaries, d_out: Array, m: int
) -> tuple[Array, Array, Array, Array]:
    """Pull `near_and_far.attend_chunks`, which returned `done`, back: q, k, v, omega."""
    chunks, root, (states, whole) = found.chunks, found.root, done
    g, (own_k, own_v, mask) = _cut_as_queries(d_out, chunks), chunks.own
    options = {"mask": mask, "causal": found.causal, "scale": root * root}
    own_chunk = Options(shift=chunks.ahead)
    near = _backward.attend(chunks.q, own_k, own_v, whole, g, options=own_chunk, **options)
    (mean, f), options = found.far(states.out[..., 0, :])
    far = _backward.attend(chunks.q, mean, f, whole, g, **options)
    of_f = far.v[..., 0, :, :][..., None, :]
    first = _backward_hops.sampled(found.omega[..., None, :], found.keys, states, of_f, None)
    d_omega = root * first.q[..., 0, :]
    d_q, d_mean = near.q + far.q, far.k[..., 0, :, :]
    if found.moves:
        d_mean = d_mean + sum_to(root * d_omega, d_mean.shape)
        d_q = d_q + _of_mean_query(sum_to(root * d_omega, chunks.mean_query.shape), chunks)
    d_k, d_v = first.k + _of_mean(d_mean, chunks.k, chunks), first.v
    start = chunks.first * chunks.k.shape[-2]
    d_k, d_v = (
        rows(_flat(every), 0, m) + rows(_flat(own), -start, m - start)
        for every, own in ((d_k, near.k), (d_v, near.v))
    )
    return chunks.joined(d_q), d_k, d_v, d_omega


def _flat(x: Array) -> Array:
    """Rows (..., C, w, d) of chunks as (..., C w, d)."""
    return array_namespace(x).reshape(x, (*x.shape[:-3], x.shape[-3] * x.shape[-2], x.shape[-1]))


def _cut_as_queries(x: Array, chunks: Chunks) -> Array:
    """Cut rows of queries as these are: the pullback of `Chunks.joined`."""
    count, size = chunks.q.shape[-3:-1]
    start = chunks.rows.start
    x = rows(x, -start, count * size - start)
    return array_namespace(x).reshape(x, (*x.shape[:-2], count, size, x.shape[-1]))


def _of_mean(d_mean: Array, x: Array, chunks: Chunks) -> Array:
    """Pull `Chunks.mean` of x back: each key that is seen has its share."""
    xp = array_namespace(x)
    share = d_mean / xp.maximum(chunks.size, xp.ones_like(chunks.size))[..., 0]
    share = share[..., None, :]
    return sum_to(chunks.seen(xp.broadcast_to(share, (*share.shape[:-2], *x.shape[-2:]))), x.shape)


def _of_mean_query(d_mean: Array, chunks: Chunks) -> Array:
    """Pull the mean queries of chunks back."""
    xp, count = array_namespace(d_mean), chunks.num_queries
    share = rows(d_mean, chunks.first, chunks.first + chunks.q.shape[-3])
    share = share / xp.where(count > 0, count, 1.0)
    return xp.broadcast_to(share[..., None, :], chunks.q.shape)
