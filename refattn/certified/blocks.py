"""Run softmax attention and its gradients over pairs, block by block of queries."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

from ..arrays.blocks import WHOLE, blocks, most_threads, part, put, tiles
from ..arrays.heads import broadcast_lead
from ..arrays.library import Array, as_written, device
from ..arrays.threads import for_each
from ..engine.attend import attend
from ..engine.scores import Scores
from ..naive.terms import finite, hide, log_sum_exp, of_library, products, weighted_sum, xp
from ..numbers.doubled import Pair
from ..numbers.paired import Paired
from ..numbers.pairs import to_pairs
from .results import Bound

_SCORES = 2**18  # of queries and keys in a block, at most, unless queries are few
_PAIRS_OF_HEADS = 2**16  # likewise of heads in one block
_QUERIES = 16, 256  # of a block, at least and at most


class PairedAttention(NamedTuple):
    """Softmax attention in groups of heads; the scale is in the queries."""

    q: Array
    k: Array
    v: Array
    scores: Scores

    def take(self, head: tuple[slice, ...]) -> PairedAttention:
        """Take the arrays of some heads."""

        def taken(x: Any) -> Any:
            return x if x is None else _part(x, (*head, WHOLE, WHOLE))

        q, k, v, scores = self
        bias, mask, sinks, slopes = map(
            taken, (scores.bias, scores.mask, scores.sinks, scores.slopes)
        )
        own = scores._replace(bias=bias, mask=mask, sinks=sinks, slopes=slopes)
        return PairedAttention(taken(q), taken(k), taken(v), own)

    def rows(self, i: slice) -> tuple[slice, dict[str, Any]]:
        """Return the keys that some queries see by their place, and arguments of a formula."""
        q, k, v, scores = self
        n, m, home = q.shape[-2], k.shape[-2], device(q.hi)
        band, library = scores.band(n, m), q.xp
        j = band.keys(i, slice(0, m))
        if j == slice(0, m):
            j = WHOLE
        else:
            k, v = k.rows(j), v.rows(j)
        at = slice(j.start or 0, m if j.stop is None else j.stop)

        def cut(x: Any) -> Any:
            return x if x is None else _part(x, (i, at))

        bias = cut(scores.bias)
        if scores.slopes is not None:
            bias = -scores.slopes * to_pairs(band.distances(i, at, q.hi, library))
        seen = band.visible(i, at, home, library, cut(scores.mask))
        if seen is None:
            seen = library.ones((1, at.stop - at.start), dtype=library.bool, device=home)
        return at, {
            "q": q[..., i, :], "k": k, "v": v, "seen": seen, "bias": bias,
            "softcap": scores.softcap, "sinks": scores.sinks,
        }  # fmt: skip


def _part(x: Any, index: tuple[slice, ...]) -> Any:
    if not isinstance(x, Paired):
        return part(x, index)
    if all(i == WHOLE or s == 1 for i, s in zip(index[::-1], x.shape[::-1], strict=False)):
        return x  # and what it remembers
    return x.moved(lambda y: part(y, index))


@of_library
def make_weights(
    q: Array, k: Array, *, seen: Array, bias: Any, softcap: float | None, sinks: Any, **_: Any
) -> tuple[Array, Array]:
    """Compute the weights of softmax attention, as `naive.softmax_attention`, and their log sum."""
    s = products(q, k)
    if softcap is not None:
        s = softcap * xp.tanh(s / softcap)
    s = hide(s if bias is None else s + bias, seen)
    lse = log_sum_exp(s) if sinks is None else xp.logaddexp(log_sum_exp(s), sinks)
    return xp.exp(s - finite(lse)), lse


@of_library
def attend_to(q: Array, v: Array, *, seen: Array, **options: Any) -> tuple[Array, Array]:
    """Average values, and return the log normalisers."""
    weights, lse = make_weights(q, seen=seen, **options)
    return weighted_sum(weights, v, seen), lse


@of_library
def pull_rows(
    q: Array, k: Array, v: Array, g: Array, *, seen: Array, **options: Any
) -> tuple[Array, Array, Array]:
    r"""Pull a cotangent g of the output back to q, k and v.

    .. math:: \bar s_{ij} = p_{ij} (\bar p_{ij} - \sum_l p_{il} \bar p_{il}), \qquad
              \bar p_{ij} = g_i \cdot v_j
    """
    p, _ = make_weights(q, k, seen=seen, **options)
    d_p = xp.where(seen, products(g, v), 0.0)
    d_s = p * (d_p - xp.sum(p * d_p, axis=-1, keepdims=True))
    seen = xp.broadcast_to(seen, d_s.shape)
    turned = [xp.matrix_transpose(x) for x in (d_s, p, seen)]
    return (
        weighted_sum(d_s, k, seen),
        weighted_sum(turned[0], q, turned[2]),
        weighted_sum(turned[1], g, turned[2]),
    )


@as_written
def attend_in_pairs(problem: PairedAttention) -> tuple[Array, Array]:
    """Attend block by block, on threads: the outputs (..., n, d_v) and log normalisers (..., n, 1).

    Where nothing is proven, the numbers are those of `refattn.attend`.
    """
    q, k, v, scores = problem
    library, (lead, n, m) = q.xp, _sizes(problem)
    results = [
        [library.zeros((*lead, n, width), dtype=q.dtype, device=q.device) for _ in range(3)]
        for width in (v.shape[-1], 1)
    ]

    def attend_box(item: tuple[tuple[slice, ...], PairedAttention, slice]) -> None:
        head, own, i = item
        _, arguments = own.rows(i)
        for result, found in zip(results, attend_to(**arguments), strict=True):
            index = (*head, i, slice(0, result[0].shape[-1]))
            for at, x in enumerate((found.hi, found.lo, found.e)):
                result[at] = put(result[at], index, x)

    for_each(
        lambda: attend_box,
        _boxes(problem),
        most=most_threads(q.hi, 16 * math.prod(lead) * n * m),
    )
    bias, sinks, slopes = (
        x if x is None else x.hi for x in (scores.bias, scores.sinks, scores.slopes)
    )
    plain = scores._replace(bias=bias, sinks=sinks, slopes=slopes)
    near = cache(lambda: attend(q.hi, k.hi, v.hi, plain))
    out, lse = results
    return (
        proven(out, lambda: near().out, library),
        proven(lse, lambda: near().lse[..., None], library),
    )


@as_written
def pull_back_in_pairs(problem: PairedAttention, g: Array) -> list[Array]:
    """Pull a cotangent of the output back to q, k and v, for every head of the result."""
    library, (lead, n, m) = problem.q.xp, _sizes(problem)
    shapes = ((*lead, y, x.shape[-1]) for x, y in zip(problem[:3], (n, m, m), strict=True))
    results = [
        [library.zeros(shape, dtype=library.float64, device=problem.q.device) for _ in range(3)]
        for shape in shapes
    ]
    for head, own, i in _boxes(problem):
        at, arguments = own.rows(i)
        found = pull_rows(g=_part(g, (*head, i, WHOLE)), **arguments)
        for result, x, rows in zip(results, found, (i, at, at), strict=True):
            index = (*head, rows, slice(0, result[0].shape[-1]))
            if rows is at:
                x = x + to_pairs(
                    Pair(*(part(y, index) for y in result[:2])), part(result[2], index)
                )
            for place, y in enumerate((x.hi, x.lo, x.e)):
                result[place] = put(result[place], index, y)
    return [to_pairs(Pair(hi, lo), e) for hi, lo, e in results]


def _sizes(problem: PairedAttention) -> tuple[tuple[int, ...], int, int]:
    scores = problem.scores
    arrays = (*problem[:3], scores.bias, scores.mask, scores.sinks, scores.slopes)
    return broadcast_lead(*arrays), problem.q.shape[-2], problem.k.shape[-2]


def _boxes(problem: PairedAttention) -> Iterator[tuple[tuple[slice, ...], PairedAttention, slice]]:
    """Cut heads and queries into blocks; blocks of the same heads share the slices of keys."""
    lead, n, m = _sizes(problem)
    for head in tiles(lead, _PAIRS_OF_HEADS // max(1, n * m)):
        own = problem.take(head)
        for i in blocks(0, n, min(max(_SCORES // max(1, m), _QUERIES[0]), _QUERIES[1])):
            yield head, own, i


def proven(parts: Sequence[Array], near: Callable[[], Array], library: Any) -> Array:
    """Take the hi, lo and e that are proven, and the numbers of float64 elsewhere, if need be."""
    hi, lo, error = parts
    holds = (error < math.inf) & ~library.isnan(hi)
    if library.all(holds):
        return to_pairs(Pair(hi, lo), error)
    pair = Pair(library.where(holds, hi, near()), library.where(holds, lo, 0.0))
    return to_pairs(pair, library.where(holds, error, math.inf))


def element(many: Callable[[], Any], i: int) -> Any:
    """Return one of the results of a function."""
    return many()[i]


def bound_of(x: Array) -> Bound:
    """Return a pair and its bound."""
    return Bound(x.pair, x.e)


def sum_repeated(x: Array, shape: tuple[int, ...], final: tuple[int, ...]) -> Array:
    """Sum over the axes along which arrays of this shape were repeated, and reshape."""
    extra = x.ndim - len(shape)
    for axis in range(x.ndim):
        if x.shape[axis] != (shape[axis - extra] if axis >= extra else 1):
            x = x.space.sum(x, axis=axis, keepdims=True)
    return x.space.reshape(x, final)
