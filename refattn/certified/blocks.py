"""Run formulas over pairs: of softmax attention block by block of queries, of any other at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ..arrays.blocks import WHOLE, blocks, most_threads, part, put, tiles
from ..arrays.heads import broadcast_lead
from ..arrays.library import Array, array_namespace, as_written, constant, device, is_array_api_obj
from ..arrays.threads import for_each
from ..engine.attend import attend
from ..engine.scores import Scores
from ..naive.terms import finite, hide, log_sum_exp, of_library, products, weighted_sum, xp
from ..numbers.doubled import Pair
from ..numbers.paired import Paired
from ..numbers.pairs import given
from .assumptions import require
from .results import Bound

_PAIRS = 2**16  # of queries and keys in a block
_ROWS = (16, 128)  # the least and the most queries of a block


class Problem(NamedTuple):
    """Softmax attention in groups of heads; the scale is in the queries."""

    q: Paired
    k: Paired
    v: Paired
    scores: Scores

    def take(self, head: tuple[slice, ...]) -> Problem:
        """Take the arrays of some heads."""

        def taken(x: Any) -> Any:
            return x if x is None else _part(x, (*head, WHOLE, WHOLE))

        q, k, v, scores = self
        bias, mask, sinks, slopes = map(
            taken, (scores.bias, scores.mask, scores.sinks, scores.slopes)
        )
        own = scores._replace(bias=bias, mask=mask, sinks=sinks, slopes=slopes)
        return Problem(taken(q), taken(k), taken(v), own)

    def rows(self, i: slice) -> tuple[slice, dict[str, Any]]:
        """Return the keys that some queries see by their place, and arguments of a formula."""
        q, k, v, scores = self
        n, m, home = q.shape[-2], k.shape[-2], device(q.hi)
        band, library = scores.band(n, m), q.xp
        j = band.keys(i, slice(0, m))
        if j == slice(0, m):
            j = WHOLE
        else:
            k, v = k[..., j, :], v[..., j, :]
        at = slice(j.start or 0, m if j.stop is None else j.stop)

        def cut(x: Any) -> Any:
            return x if x is None else _part(x, (i, at))

        bias = cut(scores.bias)
        if scores.slopes is not None:
            bias = -scores.slopes * given(band.distances(i, at, q.hi, library))
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
def weigh(
    q: Paired, k: Paired, *, seen: Array, bias: Any, softcap: float | None, sinks: Any, **_: Any
) -> tuple[Paired, Paired]:
    """Compute the weights of softmax attention, as `naive.softmax_attention`, and their log sum."""
    s = products(q, k)
    if softcap is not None:
        s = softcap * xp.tanh(s / softcap)
    s = hide(s if bias is None else s + bias, seen)
    lse = log_sum_exp(s) if sinks is None else xp.logaddexp(log_sum_exp(s), sinks)
    return xp.exp(s - finite(lse)), lse


@of_library
def attend_to(q: Paired, v: Paired, *, seen: Array, **options: Any) -> tuple[Paired, Paired]:
    """Average values, and return the log normalisers."""
    weights, lse = weigh(q, seen=seen, **options)
    return weighted_sum(weights, v, seen), lse


@of_library
def pull_back(
    q: Paired, k: Paired, v: Paired, g: Paired, *, seen: Array, **options: Any
) -> tuple[Paired, Paired, Paired]:
    r"""Pull a cotangent g of the output back to q, k and v.

    .. math:: \bar s_{ij} = p_{ij} (\bar p_{ij} - \sum_l p_{il} \bar p_{il}), \qquad
              \bar p_{ij} = g_i \cdot v_j
    """
    p, _ = weigh(q, k, seen=seen, **options)
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
def attend_in_pairs(problem: Problem) -> tuple[Paired, Paired]:
    """Attend block by block, on threads: the outputs (..., n, d_v) and log normalisers (..., n, 1).

    Where nothing is proven, the numbers are those of `refattn.attend`.
    """
    q, k, v, scores = problem
    library, (lead, n, m) = q.xp, _sizes(problem)
    results = [
        [library.zeros((*lead, n, width), dtype=q.dtype, device=q.device) for _ in range(3)]
        for width in (v.shape[-1], 1)
    ]

    def attend_box(item: tuple[tuple[slice, ...], Problem, slice]) -> None:
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
    near = attend(q.hi, k.hi, v.hi, plain)
    out, lse = (
        proven(*result, x)
        for result, x in zip(results, (near.out, near.lse[..., None]), strict=True)
    )
    return out, lse


@as_written
def pull_back_in_pairs(problem: Problem, g: Paired) -> list[Paired]:
    """Pull a cotangent of the output back to q, k and v, for every head of the result."""
    library, (lead, n, m) = problem.q.xp, _sizes(problem)
    shapes = ((*lead, y, x.shape[-1]) for x, y in zip(problem[:3], (n, m, m), strict=True))
    results = [
        [library.zeros(shape, dtype=library.float64, device=problem.q.device) for _ in range(3)]
        for shape in shapes
    ]
    for head, own, i in _boxes(problem):
        at, arguments = own.rows(i)
        found = pull_back(g=_part(g, (*head, i, WHOLE)), **arguments)
        for result, x, rows in zip(results, found, (i, at, at), strict=True):
            index = (*head, rows, slice(0, result[0].shape[-1]))
            if rows is at:
                x = x + given(Pair(*(part(y, index) for y in result[:2])), part(result[2], index))
            for place, y in enumerate((x.hi, x.lo, x.e)):
                result[place] = put(result[place], index, y)
    return [given(Pair(hi, lo), e) for hi, lo, e in results]


def _sizes(problem: Problem) -> tuple[tuple[int, ...], int, int]:
    scores = problem.scores
    arrays = (*problem[:3], scores.bias, scores.mask, scores.sinks, scores.slopes)
    return broadcast_lead(*arrays), problem.q.shape[-2], problem.k.shape[-2]


def _boxes(problem: Problem) -> Iterator[tuple[tuple[slice, ...], Problem, slice]]:
    """Cut heads and queries into blocks; those of the same heads share slices of their keys."""
    lead, n, m = _sizes(problem)
    for head in tiles(lead, _PAIRS // max(1, n * m)):
        own = problem.take(head)
        for i in blocks(0, n, min(max(_PAIRS // max(1, m), _ROWS[0]), _ROWS[1])):
            yield head, own, i


def proven(hi: Array, lo: Array, error: Array, near: Array) -> Paired:
    """Take what is proven, and the numbers of float64 elsewhere."""
    library = array_namespace(hi)
    holds = (error < math.inf) & ~library.isnan(hi)
    parts = library.where(holds, hi, near), library.where(holds, lo, 0.0)
    return given(Pair(*parts), library.where(holds, error, math.inf))


def bound_of(x: Paired) -> Bound:
    """Return a pair and its bound."""
    return Bound(x.pair, x.e)


def sum_to(x: Paired, shape: tuple[int, ...], final: tuple[int, ...]) -> Paired:
    """Sum over the axes along which arrays of this shape were repeated, and reshape."""
    library, extra = array_namespace(x), x.ndim - len(shape)
    for axis in range(x.ndim):
        if x.shape[axis] != (shape[axis - extra] if axis >= extra else 1):
            x = library.sum(x, axis=axis, keepdims=True)
    return library.reshape(x, final)


@as_written
def evaluate(formula: Callable[..., Any], *arrays: Any, **options: Any) -> Any:
    """Evaluate a formula of `refattn.naive`, or any other of arrays, with a proven error bound.

    The formula runs on pairs of float64 with bounds, `refattn.numbers.pairs`, whose documentation
    says which functions it may use. Arguments count as exact numbers, and so do scales and other
    numbers. It takes the memory of the formula: use it for hundreds of tokens.

    Parameters
    ----------
    formula : function
        Such as `naive.randomized_attention`: the field `naive` of each estimator of
        `refattn.registry` is one.
    *arrays, **options
        What it takes. Arrays of floats, in tuples too, may be pairs.

    Returns
    -------
    Bound, or a tuple of them
        `value`, a pair of float64, and `error`, no less than the distance to the exact number.
        Where `error` is infinity, nothing is proven, and the value is that of the formula in
        float64.

    Raises
    ------
    TypeError
        If the formula uses a function without a proven bound; the message names it. Also for
        longdouble.
    RuntimeError
        As in `attend`.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import certified, naive
    >>> q, k, v = np.zeros((1, 2)), np.eye(2), np.array([[1.0], [3.0]])
    >>> found = certified.evaluate(naive.linear_attention, q, k, v)
    >>> found.value.hi, bool(found.error < 2.0**-80)
    (array([[2.]]), True)
    """
    like = next((x for x in (*arrays, *options.values()) if _is_floating(x)), None)
    if like is None:
        raise TypeError("`arrays` must hold an array of float32 or float64, got none.")
    like = like[0] if isinstance(like, Pair) else like
    require(like, array_namespace(like))

    def mapped(x: Any, change: Callable[[Any], Any]) -> Any:
        if _is_floating(x):
            return change(x)
        return tuple(mapped(y, change) for y in x) if isinstance(x, tuple) else x

    def run(change: Callable[[Any], Any]) -> Any:
        named = {name: mapped(x, change) for name, x in options.items()}
        return formula(*(mapped(x, change) for x in arrays), **named)

    def near(x: Any) -> Any:
        x = x[0] if isinstance(x, Pair) else x
        return constant(x, array_namespace(like).astype(like, array_namespace(like).float64))

    return _both(run(given), run(near))


def _both(found: Any, near: Any) -> Any:
    if isinstance(found, tuple):
        both = (_both(x, y) for x, y in zip(found, near, strict=True))
        return type(found)(*both) if hasattr(found, "_fields") else tuple(both)
    if not isinstance(found, Paired):
        return found
    return bound_of(proven(found.hi, found.lo, found.e, near))


def _is_floating(x: Any) -> bool:
    if isinstance(x, Pair):
        return True
    return is_array_api_obj(x) and bool(array_namespace(x).isdtype(x.dtype, "real floating"))
