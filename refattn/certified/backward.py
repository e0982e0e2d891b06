"""Compute gradients of attention in pairs, with an error bound for each.

The proof is that of `refattn.certified`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

from ..arrays.blocks import WHOLE, blocks, most_threads, part, put, tiles
from ..arrays.library import Array, as_written, device, is_numpy_array
from ..arrays.threads import for_each
from ..engine.attend import Attended
from .forward import (
    PAIR_ROUNDING,
    SAFE,
    SPAN,
    UNDERFLOW,
    Arguments,
    Bounded,
    ExactSums,
    KeySizes,
    QueryBlock,
    attend_with_bounds,
    error_of_slices,
    error_of_weights,
    largest,
    largest_finite,
)
from .pairs import Pair, add_pairs, dot_pairs, multiply_pairs
from .results import Bound
from .slices import (
    Slices,
    bits_of_slices,
    facing,
    power_of_two,
    side_by_side,
    sliced_error,
    sliced_product,
)

_NUMPY_BLOCK, _OTHER_BLOCK = (128, 256), (1024, 1024)
_LEVELS = 3  # slices of cotangents and values, and a rest


class _Pullback(NamedTuple):
    """What the backward pass needs of all queries and keys."""

    args: Arguments
    keys: KeySizes
    forward: Bounded
    d_out: Pair  # (..., n, d_v)
    delta: Pair  # (..., n, 1): sum of d_out * out
    delta_error: Array  # (..., n, 1)
    g_power: Array  # (..., n, 1): of two, at most the largest |d_out| of each query
    v_power: Array  # (..., 1, 1)
    bits: int  # of slices of cotangents and values

    @classmethod
    def of(cls, args: Arguments, forward: Bounded, d_out: Pair) -> _Pullback:
        """Multiply results and cotangents."""
        xp, d_v = args.xp, d_out.hi.shape[-1]
        delta = dot_pairs(d_out, forward.out, xp)
        size = xp.sum(xp.abs(d_out.hi) * xp.abs(forward.out.hi), axis=-1)
        wrong = xp.sum(xp.abs(d_out.hi) * forward.error, axis=-1) + (d_v + 8) * 2.0**-102 * size
        g_power = power_of_two(largest(d_out.hi, (-1,), xp), xp)
        v_power = power_of_two(largest_finite(args.v.hi, xp), xp)
        return cls(
            args,
            KeySizes.of(args),
            forward,
            d_out,
            Pair(delta.hi[..., None], delta.lo[..., None]),
            (wrong * SAFE + d_v * UNDERFLOW)[..., None],
            g_power,
            v_power,
            bits_of_slices(d_v, _LEVELS),
        )

    def tile(self, box: tuple[slice, ...], j: slice) -> _WeightTile:
        """Compute weights and derivatives to scores of some queries and keys."""
        head, at = box[:-1], (*box, WHOLE)
        near, xp = Attended(self.forward.out.hi, self.forward.lse.hi), self.args.xp
        rows = QueryBlock(self.args, self.keys, near, box)
        queries, power = rows.queries()
        lse = Pair(*(part(x[..., None], at) for x in self.forward.lse))
        lse = Pair(xp.where(lse.hi == -math.inf, 0.0, lse.hi), lse.lo)
        weights = rows.weights(queries, lse, j)
        wrong = rows.error_of_exponents(power, lse.hi)
        wrong = wrong + part(self.forward.lse_error[..., None], at)
        theta = xp.where(wrong < 0.5, error_of_weights(wrong, xp), math.inf)

        d_out = Pair(*(part(x, at) for x in self.d_out))
        g_power = part(self.g_power, at)
        v_power = part(self.v_power, (*head, WHOLE, WHOLE))
        v = rows.values(self.args.v, j)
        a, b = (
            Slices.of(x, f, self.bits, _LEVELS, xp) for x, f in ((d_out, g_power), (v, v_power))
        )
        d_weights = sliced_product(side_by_side(a, xp), facing(b, xp), _LEVELS, xp)
        d_v = d_out.hi.shape[-1]
        apart = (sliced_error(d_v, self.bits, _LEVELS) + d_v * PAIR_ROUNDING) * g_power * v_power
        delta = Pair(*(-part(x, at) for x in self.delta))
        d_scores = multiply_pairs(weights, add_pairs(d_weights, delta))
        apart = apart + part(self.delta_error, at) + 2.0**-100 * xp.abs(delta.hi)
        error = (
            xp.abs(weights.hi) * (1 + theta) * apart + (theta + PAIR_ROUNDING) * xp.abs(d_scores.hi)
        ) * SAFE
        return _WeightTile(weights, theta, d_scores, error + UNDERFLOW)


class _WeightTile(NamedTuple):
    weights: Pair  # (..., rows, columns)
    theta: Array  # (..., rows, 1): relative error of weights
    d_scores: Pair
    error: Array  # of d_scores


@as_written
def pull_back_with_bounds(args: Arguments, d_out: Pair) -> tuple[Bound, Bound, Bound]:
    """Pull a cotangent of the output back to q, k and v, for every head of the result."""
    forward, xp = attend_with_bounds(args), args.xp
    lead = forward.lse.hi.shape[:-1]
    d_out = Pair(*(xp.broadcast_to(x, forward.out.hi.shape) for x in d_out))
    back = _Pullback.of(args, forward, d_out)
    (n, d), (m, d_v) = args.q.hi.shape[-2:], args.v.hi.shape[-2:]
    sizes = _NUMPY_BLOCK if is_numpy_array(d_out.hi) else _OTHER_BLOCK
    power = 2.0 ** math.ceil(math.log2(8 * max(1, d_v)))  # of d_scores
    power = power * largest(back.g_power, (-2, -1), xp) * back.v_power
    q_power, k_power, g_power = (
        power_of_two(largest(xp.where(xp.isfinite(x), x, 0.0), (-2,), xp), xp)
        for x in (args.q.hi, args.k.hi, d_out.hi)
    )

    def of_queries(box: tuple[slice, ...]) -> list[_WeightedSum]:
        """Sum dq of a block of queries."""
        head = box[:-1]
        total = _WeightedSum(xp, m, *(part(x, (*head, WHOLE, WHOLE)) for x in (power, k_power)))
        for span in blocks(0, m, SPAN):
            for j in blocks(span.start, span.stop, sizes[1]):
                tile = back.tile(box, j)
                k = _finite_or_0(Pair(*(part(x, (*head, j, WHOLE)) for x in args.k)), xp)
                total.add(tile.d_scores, tile.error, k)
            total.close()
        return [total]

    def of_keys(box: tuple[slice, ...]) -> list[_WeightedSum]:
        """Sum dk and dv of a block of keys."""
        head, j = box[:-1], box[-1]
        d_k = _WeightedSum(xp, n, *(part(x, (*head, WHOLE, WHOLE)) for x in (power, q_power)))
        d_v = _WeightedSum(xp, n, 1.0, part(g_power, (*head, WHOLE, WHOLE)))
        for span in blocks(0, n, SPAN):
            for i in blocks(span.start, span.stop, sizes[0]):
                tile = back.tile((*head, i), j)
                q = _finite_or_0(Pair(*(part(x, (*head, i, WHOLE)) for x in args.q)), xp)
                g = Pair(*(part(x, (*head, i, WHOLE)) for x in d_out))
                scores, weights = (
                    Pair(*(xp.matrix_transpose(x) for x in y))
                    for y in (tile.d_scores, tile.weights)
                )
                d_k.add(scores, xp.matrix_transpose(tile.error), q)
                d_v.add(weights, xp.matrix_transpose(tile.theta * xp.abs(tile.weights.hi)), g)
            d_k.close()
            d_v.close()
        return [d_k, d_v]

    work = 32 * math.prod(lead) * n * m
    (dq,) = _gather(of_queries, (lead, n, sizes[0]), (d,), work, d_out.hi, xp)
    dk, dv = _gather(of_keys, (lead, m, sizes[1]), (d, d_v), work, d_out.hi, xp)
    scale = args.scores.scale
    if scale is not None:
        dq, dk = (
            Bound(
                multiply_pairs(x.value, scale),
                x.error * xp.abs(scale.hi) * SAFE
                + PAIR_ROUNDING * xp.abs(x.value.hi * scale.hi)
                + UNDERFLOW,
            )
            for x in (dq, dk)
        )
    return dq, dk, dv


def _gather(
    function: Callable[[tuple[slice, ...]], list[_WeightedSum]],
    axes: tuple[tuple[int, ...], int, int],
    widths: tuple[int, ...],
    work: int,
    like: Array,
    xp: Any,
) -> list[Bound]:
    """Put blocks of rows together, on threads."""
    lead, count, step = axes
    parts = [
        [xp.zeros((*lead, count, width), dtype=like.dtype, device=device(like)) for _ in range(3)]
        for width in widths
    ]

    def of_box(box: tuple[slice, ...]) -> None:
        for place, (total, width) in enumerate(zip(function(box), widths, strict=True)):
            index = (*box, slice(0, width))
            for k, x in enumerate((*total.value, total.bound())):
                parts[place][k] = put(parts[place][k], index, x)

    boxes = ((*head, i) for head in tiles(lead, 1) for i in blocks(0, count if work else 0, step))
    for_each(lambda: of_box, boxes, most=most_threads(like, work))
    return [Bound(Pair(hi, lo), error) for hi, lo, error in parts]


def _finite_or_0(x: Pair, xp: Any) -> Pair:
    """Replace numbers that are not finite by 0: they are hidden, or their weights are nan."""
    return Pair(*(xp.where(xp.isfinite(x.hi), y, 0.0) for y in x))


@as_written
def sum_bounds_to(x: Bound, shape: tuple[int, ...], final: tuple[int, ...], xp: Any) -> Bound:
    """Sum over the axes along which arrays of this shape were repeated, and reshape."""
    (value, error), extra = x, x.error.ndim - len(shape)
    for axis in reversed(range(error.ndim)):
        length = shape[axis - extra] if axis >= extra else 1
        if length == error.shape[axis]:
            continue
        count, size = error.shape[axis], xp.sum(xp.abs(value.hi), axis=axis, keepdims=True)
        error = xp.sum(error, axis=axis, keepdims=True) * SAFE + count * 2.0**-102 * size
        slabs = ((*(WHOLE,) * axis, slice(i, i + 1), ...) for i in range(count))
        value = reduce(add_pairs, [Pair(*(y[slab] for y in value)) for slab in slabs])
    known = xp.isfinite(value.hi) & xp.isfinite(value.lo) & xp.isfinite(error) & (error >= 0)
    error = xp.where(known, error, math.inf)
    reshaped = [xp.reshape(y, final) for y in (*value, error)]
    return Bound(Pair(*reshaped[:2]), reshaped[2])


class _WeightedSum:
    """A sum of products over many rows, with weights that have errors."""

    def __init__(self, xp: Any, count: int, *powers: Array | float) -> None:
        """Of so many rows, with powers of two of the weights and of columns of the rows."""
        self._xp, self._count, self._powers, self._open = xp, count, powers, ExactSums()
        self._value: Pair | None = None
        self._absolute: Array | float = 0.0
        self._inherited: Array | float = 0.0

    def add(self, weights: Pair, error: Array, rows: Pair) -> None:
        """Add weights (..., b, c) times rows (..., c, d)."""
        xp, bits = self._xp, bits_of_slices(SPAN, 3)
        a, b = (
            Slices.of(x, p, bits, 3, xp) for x, p in zip((weights, rows), self._powers, strict=True)
        )
        self._open.add_product(a, b)
        size = xp.abs(rows.hi)
        self._absolute = self._absolute + xp.abs(weights.hi) @ size
        self._inherited = self._inherited + error @ size

    def close(self) -> None:
        """End a span, of which sums of slices have no error."""
        span = self._open.sum()
        self._value = span if self._value is None else add_pairs(self._value, span)
        self._open = ExactSums()

    @property
    def value(self) -> Pair:
        assert self._value is not None
        return self._value

    def bound(self) -> Array:
        """Bound how far the sum may be from the exact one."""
        both = self._powers[0] * self._powers[1]
        error = self._inherited * (1 + self._count * 2.0**-50)
        error = error + error_of_slices(self._count) * both + PAIR_ROUNDING * self._absolute
        return error * SAFE + self._count * UNDERFLOW
