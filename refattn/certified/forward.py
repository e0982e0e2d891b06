"""Compute attention in pairs with an error bound; arguments are trusted.

The proof, whose steps are named here, is that of `refattn.certified`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from ..arrays.blocks import WHOLE, blocks, most_threads, part, put, tiles
from ..arrays.library import Array, array_namespace, as_written, device, is_numpy_array
from ..arrays.threads import for_each
from ..engine.attend import Attended, attend
from ..engine.scores import PLAIN, Band, Scores
from .pairs import (
    EXP_ROUNDING,
    ROUNDING,
    Pair,
    add_pairs,
    as_pair,
    divide_pairs,
    exp_pair,
    fast_two_sum,
    multiply_pairs,
    two_product,
    two_sum,
)
from .slices import (
    Slices,
    bits_of_slices,
    facing,
    higham_gamma,
    power_of_two,
    side_by_side,
    sliced_error,
    sliced_product,
)

_ENOUGH = 2.0**-66  # error of a score that more slices would not mend
_MOST_LEVELS = 4  # more would be below what lower parts of pairs take
SPAN = 1024  # keys of which sums have no error
PAIR_ROUNDING = 2.0**-98  # of a few operations on pairs, relative
SAFE = 1 + 2.0**-30  # for roundings of a bound itself
UNDERFLOW = 2.0**-1000  # of a few operations, where subnormal numbers and such weights count as 0
_LOOK = 4096  # keys whose sizes are looked at together
_NUMPY_BLOCK, _OTHER_BLOCK = (128, 256), (2048, 1024)


class Arguments(NamedTuple):
    """Arguments in float64, in groups of heads."""

    q: Pair
    k: Pair
    v: Pair
    xp: Any  # their namespace
    scores: Scores = PLAIN  # the bias in a pair, and the scale in one of numbers without axes
    v_error: Array | None = None  # (..., m, d_v): of the values
    bias_error: Array | None = None  # (..., 1, 1): the largest

    @classmethod
    def of_arrays(cls, q: Array, k: Array, v: Array, scores: Scores = PLAIN) -> Arguments:
        """Take arrays of float64, and numbers, for pairs."""
        xp, bias, scale = array_namespace(q), scores.bias, scores.scale
        q, k, v = (as_pair(x, xp) for x in (q, k, v))
        bias, scale = (None if x is None else as_pair(x, xp) for x in (bias, scale))
        return cls(q, k, v, xp, scores._replace(bias=bias, scale=scale))


class Bounded(NamedTuple):
    """A result with bounds of its error."""

    out: Pair  # (..., n, d_v)
    lse: Pair  # (..., n)
    error: Array  # (..., n, d_v)
    lse_error: Array  # (..., n)


@as_written
def attend_with_bounds(args: Arguments) -> Bounded:
    """Evaluate exact attention in pairs, block by block, on threads."""
    q, k, v, xp = args.q.hi, args.k.hi, args.v.hi, args.xp
    home = device(q)
    bias, scale = (None if x is None else x.hi for x in (args.scores.bias, args.scores.scale))
    near = attend(q, k, v, args.scores._replace(bias=bias, scale=scale))
    (*lead, n), m, d_v = near.lse.shape, k.shape[-2], v.shape[-1]

    def room(*more: int) -> Array:
        return xp.empty((*lead, n, *more), dtype=q.dtype, device=home)

    results = [room(d_v), room(d_v), room(), room(), room(d_v), room()]
    keys = KeySizes.of(args)
    rows, columns = _NUMPY_BLOCK if is_numpy_array(q) else _OTHER_BLOCK

    def attend_box(box: tuple[slice, ...]) -> None:
        block = QueryBlock(args, keys, near, box).attend(columns)
        pieces = (*block.out, *block.lse, block.error, block.lse_error)
        for place, piece in enumerate(pieces):
            index = (*box, slice(0, d_v)) if results[place].ndim > len(box) else box
            results[place] = put(results[place], index, piece)

    boxes = ((*head, i) for head in tiles(lead, 1) for i in blocks(0, n, rows))
    for_each(lambda: attend_box, boxes, most=most_threads(q, 16 * math.prod(lead) * n * m))
    return Bounded(Pair(*results[:2]), Pair(*results[2:4]), *results[4:])


class KeySizes(NamedTuple):
    """How large the keys, values and biases of a head are, and which keys count."""

    power: Array  # (..., 1, 1): of two, at most the largest |k|
    powers: Array  # (..., 1, d_v): of two, at most the largest |v| of each column
    bias: Array | None  # (..., 1, 1): the largest finite |bias|
    levels: int  # slices of queries and keys
    bits: int
    usable: Array | None  # (..., m): keys that are finite, and seen by some query
    finite: Array | None  # (..., m): keys that are finite; None if all are

    @classmethod
    def of(cls, args: Arguments) -> KeySizes:
        """Read all keys and values, some at a time."""
        xp, m = args.xp, args.k.hi.shape[-2]
        power, column = (
            largest(x[..., :0, :], axes, xp)
            for x, axes in ((args.k.hi, (-2, -1)), (args.v.hi, (-2,)))
        )
        all_usable, all_finite = [], []
        for j in blocks(0, m, _LOOK):
            k, v = (x.hi[..., j, :] for x in (args.k, args.v))
            finite = xp.all(xp.isfinite(k), axis=-1) & xp.all(xp.isfinite(v), axis=-1)
            usable = finite
            if args.scores.mask is not None:
                usable = finite & xp.any(part(args.scores.mask, (WHOLE, j)), axis=-2)
            power = xp.maximum(power, largest(_tidy(k, usable, xp), (-2, -1), xp))
            column = xp.maximum(column, largest(_tidy(v, usable, xp), (-2,), xp))
            all_usable.append(usable)
            all_finite.append(finite)
        whole = all(bool(xp.all(x)) for x in all_finite)
        tidy = m == 0 or (whole and args.scores.mask is None)
        power, column = power_of_two(power, xp), power_of_two(column, xp)
        levels, bits = _levels(args, power)
        return cls(
            power,
            column,
            None if args.scores.bias is None else largest_finite(args.scores.bias.hi, xp),
            levels,
            bits,
            None if tidy else xp.concat(all_usable, axis=-1),
            None if whole else xp.concat(all_finite, axis=-1),
        )


def largest_finite(x: Array, xp: Any) -> Array:
    """Return the largest finite magnitude of the last two axes, some rows at a time."""
    most = largest(x[..., :0, :], (-2, -1), xp)
    for i in blocks(0, x.shape[-2], max(1, _LOOK * 64 // max(1, x.shape[-1]))):
        numbers = xp.where(xp.isfinite(x[..., i, :]), x[..., i, :], 0.0)
        most = xp.maximum(most, largest(numbers, (-2, -1), xp))
    return most


def _levels(args: Arguments, power: Array) -> tuple[int, int]:
    """Count the slices that make errors of scores small, and their bits."""
    xp, d = args.xp, args.q.hi.shape[-1]
    most = power_of_two(largest_finite(args.q.hi, xp), xp)
    if args.scores.scale is not None:
        most = most * 2 * xp.abs(args.scores.scale.hi)
    product = (
        float(xp.max(most)) * float(xp.max(power)) if 0 not in (*most.shape, *power.shape) else 0.0
    )
    for levels in range(2, _MOST_LEVELS + 1):
        bits = bits_of_slices(d, levels)
        if sliced_error(d, bits, levels) * product <= _ENOUGH:
            break
    return levels, bits


def largest(x: Array, axes: tuple[int, ...], xp: Any) -> Array:
    """Return the largest magnitude along some axes, which are kept; 0 of nothing."""
    if 0 in (x.shape[axis] for axis in axes):
        shape = list(x.shape)
        for axis in axes:
            shape[axis] = 1
        return xp.zeros(tuple(shape), dtype=x.dtype, device=device(x))
    return xp.maximum(xp.max(x, axis=axes, keepdims=True), -xp.min(x, axis=axes, keepdims=True))


def _tidy(x: Array, usable: Array | None, xp: Any) -> Array:
    """Replace keys or values by 0 that are not finite or that no query sees."""
    return x if usable is None else xp.where(usable[..., None], x, 0.0)


class _KeySums(NamedTuple):
    """Sums over the keys, with weights that are wrong by theta times themselves."""

    total: Pair  # (..., n, d_v)
    mass: Pair  # (..., n, 1)
    absolute: Array  # (..., n, d_v): of |values|
    inherited: Array | float  # (..., n, d_v): of errors of values


class QueryBlock(NamedTuple):
    """Some queries of some heads."""

    args: Arguments
    keys: KeySizes
    near: Attended  # the result in float64: weights are relative to its log normaliser
    box: tuple[slice, ...]

    def attend(self, columns: int) -> Bounded:
        """Return their results, from blocks of so many keys."""
        rows, power = self.queries()
        lse = part(self.near.lse[..., None], (*self.box, WHOLE))
        base = self.args.xp.where(lse == -math.inf, 0.0, lse)
        wrong = self.error_of_exponents(power, base)
        return self._means(self._sums(rows, base, columns), base, wrong, lse == -math.inf)

    def queries(self) -> tuple[Array, Array]:
        """Return the first factor of scores, and the power of two of each query."""
        args, xp = self.args, self.args.xp
        q = Pair(*(part(x, (*self.box, WHOLE)) for x in args.q))
        if args.scores.scale is not None:
            q = multiply_pairs(q, args.scores.scale)
        power = power_of_two(largest(q.hi, (-1,), xp), xp)
        slices = Slices.of(q, power, self.keys.bits, self.keys.levels, xp)
        return side_by_side(slices, xp), power

    @property
    def band(self) -> Band:
        """The keys that they see by their place."""
        args = self.args
        return args.scores.band(args.q.hi.shape[-2], args.k.hi.shape[-2])

    def of_heads(self, x: Array) -> Array:
        return part(x, (*self.box[:-1], WHOLE, WHOLE))

    def of_keys(self, x: Array, j: slice) -> Array:
        return part(x, (*self.box[:-1], j, WHOLE))

    def _of_pairs(self, x: Array, j: slice) -> Array:
        return part(x, (*self.box, j))

    def error_of_exponents(self, power: Array, base: Array) -> Array:
        """Bound steps 1 and 2 of the proof, (..., n, 1)."""
        xp, d = self.args.xp, self.args.q.hi.shape[-1]
        k_power, scores = self.of_heads(self.keys.power), self.args.scores
        sliced = sliced_error(d, self.keys.bits, self.keys.levels) + d * PAIR_ROUNDING
        wrong = sliced * power * k_power + d * UNDERFLOW * (1 + power + k_power)
        added = xp.abs(base)
        if self.keys.bias is not None:
            added = added + self.of_heads(self.keys.bias)
        if scores.sinks is not None:
            sinks = self.of_heads(scores.sinks)
            added = added + xp.abs(xp.where(xp.isfinite(sinks), sinks, 0.0))
        if scores.slopes is not None:
            reach = self.args.q.hi.shape[-2] + self.args.k.hi.shape[-2]
            added = added + reach * xp.abs(self.of_heads(scores.slopes))
        wrong = wrong + 2.0**-100 * added
        if self.args.bias_error is not None:
            wrong = wrong + self.of_heads(self.args.bias_error)
        if scores.softcap is not None:
            wrong = wrong + 2.0**-66 * scores.softcap
        return wrong * SAFE

    def _sums(self, rows: Array, base: Array, columns: int) -> _KeySums:
        """Take steps 3 and 4 of the proof."""
        args, keys, scores, band = self.args, self.keys, self.args.scores, self.band
        xp, m, i = args.xp, args.k.hi.shape[-2], self.box[-1]
        bits, v_power = bits_of_slices(SPAN, 3), self.of_heads(keys.powers)
        zero = xp.zeros((1, 1), dtype=base.dtype, device=device(base))
        total, mass, absolute, inherited = Pair(zero, zero), Pair(zero, zero), zero, zero
        for span in blocks(0, m, SPAN):
            seen, values, weight = band.keys(i, span), ExactSums(), ExactSums()
            for j in blocks(seen.start, seen.stop, columns):
                weights, v_j = self.weights(rows, Pair(base, zero), j), self.values(args.v, j)
                p = Slices.of(weights, 2.0, bits, 3, xp)
                v = Slices.of(v_j, v_power, bits, 3, xp)
                values.add_product(p, v)
                weight.add(*(xp.sum(x, axis=-1, keepdims=True) for x in (*p.parts, p.rests[-1])))
                absolute = absolute + weights.hi @ xp.abs(v_j.hi)
                if args.v_error is not None:
                    inherited = inherited + weights.hi @ self.of_keys(args.v_error, j)
            if seen.stop > seen.start:
                total, mass = add_pairs(total, values.sum()), add_pairs(mass, weight.sum())
        if scores.sinks is not None:
            sink = self.of_heads(scores.sinks)
            there = sink > -math.inf
            one = exp_pair(two_sum(xp.where(there, sink, 0.0), -base), xp)
            mass = add_pairs(mass, Pair(*(xp.where(there, x, 0.0) for x in one)))
        return _KeySums(total, mass, absolute, inherited)

    def values(self, x: Pair, j: slice) -> Pair:
        """Take keys or values of a block, with 0 for those that are not usable."""
        usable, xp = self.keys.usable, self.args.xp
        usable = None if usable is None else part(usable, (*self.box[:-1], j))
        return Pair(*(_tidy(self.of_keys(y, j), usable, xp) for y in x))

    def _scores(self, rows: Array, j: slice) -> Pair:
        """Compute scores of a block in pairs."""
        args, keys, xp = self.args, self.keys, self.args.xp
        k_power = self.of_heads(keys.power)
        slices = Slices.of(self.values(args.k, j), k_power, keys.bits, keys.levels, xp)
        score = sliced_product(rows, facing(slices, xp), keys.levels, xp)
        if args.scores.softcap is not None:
            score = _cap(score, args.scores.softcap, xp)
        if args.scores.bias is not None:
            bias = Pair(*(self._of_pairs(x, j) for x in args.scores.bias))
            shown = xp.isfinite(bias.hi)
            score = add_pairs(score, Pair(*(xp.where(shown, x, 0.0) for x in bias)))
        if args.scores.slopes is not None:
            slopes = self.of_heads(args.scores.slopes)
            score = add_pairs(
                score, two_product(-slopes, self.band.distances(self.box[-1], j, score.hi, xp))
            )
        return score

    def weights(self, rows: Array, base: Pair, j: slice) -> Pair:
        """Return e^(score - base): 0 where hidden, nan where a visible key is not finite."""
        xp, args, score = self.args.xp, self.args, self._scores(rows, j)
        hi, lo = two_sum(score.hi, -base.hi)
        high, low = exp_pair(two_sum(hi, lo + (score.lo - base.lo)), xp)
        if self.keys.finite is not None:
            finite = part(self.keys.finite, (*self.box[:-1], j))[..., None, :]
            high = xp.where(finite, high, math.nan)
        mask = None if args.scores.mask is None else self._of_pairs(args.scores.mask, j)
        visible = self.band.visible(self.box[-1], j, device(base.hi), xp, mask)
        if args.scores.bias is not None:
            bias = self._of_pairs(args.scores.bias.hi, j)
            high = xp.where((bias == math.inf) | xp.isnan(bias), math.nan, high)
            shown = bias != -math.inf
            visible = shown if visible is None else visible & shown
        if visible is not None:
            high, low = xp.where(visible, high, 0.0), xp.where(visible, low, 0.0)
        return Pair(high, low)

    def _means(self, sums: _KeySums, base: Array, wrong: Array, empty: Array) -> Bounded:
        """Take steps 5 and 6 of the proof."""
        xp, m = self.args.xp, self.args.k.hi.shape[-2]
        total, mass, absolute, inherited = sums
        bits, spans = bits_of_slices(SPAN, 3), -(-m // SPAN)
        powers, at = self.of_heads(self.keys.powers), (*self.box, WHOLE)
        theta = error_of_weights(wrong, xp)
        size = (1 + theta) * absolute * (1 + higham_gamma(m + SPAN)) + UNDERFLOW * m * powers
        rest = (mass.hi + 1 + 6 * m) * 2.0 ** (-2 * bits) * higham_gamma(3 * SPAN + 16)
        added = (spans + 4) * 2.0**-102  # of what is added, slices above their numbers
        above = m * 2.0 ** (2 - bits)
        lost = rest + added * (mass.hi + above) + m * UNDERFLOW
        g = (rest + added * above) * powers + added * size
        least = mass.hi * (1 - theta) - lost
        there = mass.hi > 0
        out = divide_pairs(total, Pair(xp.where(there, mass.hi, 1.0), mass.lo))
        magnitude = xp.abs(out.hi)
        error = (theta * size + g + 2 * inherited + magnitude * (theta * mass.hi + lost)) / least
        error = (error + PAIR_ROUNDING * magnitude) * SAFE + (m + 64) * UNDERFLOW

        log, log_error = _log_near_one(mass, xp)
        lse_hi, lse_lo = two_sum(base, log.hi)
        lse = fast_two_sum(lse_hi, lse_lo + log.lo)
        lse_error = (theta * mass.hi + lost) / least + log_error + 2.0**-102 * xp.abs(lse.hi)
        lse_error = lse_error * SAFE

        near_one = (wrong < 0.5) & (mass.hi >= 0.5) & (mass.hi <= 2.0)  # not of nan
        none = empty & (mass.hi == 0) & (wrong < 0.5)  # unless terms overflow to nothing
        finish = _Finish(near_one & (error < math.inf), none, xp)
        finish_log = _Finish(near_one & (lse_error < math.inf), none, xp)
        near = part(self.near.out, at), part(self.near.lse[..., None], at)
        return Bounded(
            Pair(finish(out.hi, near[0]), finish(out.lo, 0.0)),
            Pair(finish_log(lse.hi, near[1], -math.inf)[..., 0], finish_log(lse.lo, 0.0)[..., 0]),
            finish(error, math.inf),
            finish_log(lse_error, math.inf)[..., 0],
        )


class ExactSums:
    """Sums over a span of what is exact, twice, and of the rest."""

    def __init__(self) -> None:
        self._sums: tuple[Array, ...] = (0.0, 0.0, 0.0)

    def add(self, *more: Array) -> None:
        self._sums = tuple(x + y for x, y in zip(self._sums, more, strict=True))

    def add_product(self, a: Slices, b: Slices) -> None:
        """Add the product of two matrices in three slices each."""
        (a0, a1), (b0, b1), (b, rest1, rest2) = a.parts, b.parts, b.rests
        self.add(a0 @ b0, a0 @ b1 + a1 @ b0, a0 @ rest2 + a1 @ rest1 + a.rests[-1] @ b)

    def sum(self) -> Pair:
        first, second, third = self._sums
        hi, lo = two_sum(first, second)
        return fast_two_sum(hi, lo + third)


def error_of_weights(wrong: Array, xp: Any) -> Array:
    """Bound theta, relative, where exponents have this error, which is below 1/2."""
    return (xp.expm1(xp.minimum(wrong, 1.0)) + 2 * EXP_ROUNDING) * SAFE


def error_of_slices(count: int) -> float:
    """Bound the error of sums of so many products in `ExactSums`, span by span.

    In units of the powers of two of both factors: of the last of the three sums, of which the terms
    are at most 5 times 2^-2b, and of what is added in pairs.
    """
    bits, spans = bits_of_slices(SPAN, 3), -(-count // SPAN)
    return count * (5 * higham_gamma(3 * SPAN + 16) * 2.0 ** (-2 * bits) + (spans + 4) * 2.0**-99)


class _Finish(NamedTuple):
    """Chooses what is proven, what no key gives, or else another number."""

    holds: Array
    none: Array
    xp: Any

    def __call__(self, proven: Array, other: Array | float, nothing: float = 0.0) -> Array:
        return self.xp.where(self.none, nothing, self.xp.where(self.holds, proven, other))


def _cap(score: Pair, most: float, xp: Any) -> Pair:
    """Return c tanh(s / c) = c sign(s) (1 - e) / (1 + e) with e = exp(-2 |s| / c)."""
    one = xp.ones_like(score.hi)
    sign = xp.where(score.hi < 0, -one, one)
    c = as_pair(xp.full_like(score.hi, most), xp)
    ratio = divide_pairs(Pair(score.hi * sign, score.lo * sign), c)
    fallen = exp_pair(Pair(-2.0 * ratio.hi, -2.0 * ratio.lo), xp)
    unit = as_pair(one, xp)
    less, more = add_pairs(unit, Pair(-fallen.hi, -fallen.lo)), add_pairs(unit, fallen)
    capped = multiply_pairs(divide_pairs(less, more), c)
    return Pair(capped.hi * sign, capped.lo * sign)


def _log_near_one(x: Pair, xp: Any) -> tuple[Pair, Array]:
    """Return log x by four terms of its series beyond the first, and the error of that."""
    hi, lo = two_sum(x.hi, xp.full_like(x.hi, -1.0))
    above = fast_two_sum(hi, lo + x.lo)
    size, tail = xp.abs(above.hi), xp.zeros_like(above.hi)
    for k in range(5, 1, -1):
        tail = above.hi * (tail + (-1.0) ** (k + 1) / k)
    left_out = xp.where(size < 0.5, 2 * size**6 / 6, math.inf)
    error = left_out + 8 * ROUNDING * size * size + 2.0**-102 * size
    return fast_two_sum(above.hi, above.lo + above.hi * tail), error
