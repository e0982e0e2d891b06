"""Attention in pairs with a bound of its error, of trusted arguments; the proof: `certified`."""

from __future__ import annotations

import math
from typing import NamedTuple

from ..arrays.blocks import WHOLE, blocks, most_threads, part, put, tiles
from ..arrays.heads import broadcast_lead
from ..arrays.library import Array, array_namespace, as_written, device, is_numpy_array
from ..arrays.threads import for_each
from ..engine import kernel
from ..engine.scores import NO_OPTIONS, Band, Options
from .pairs import (
    EXPONENTIAL,
    ROUNDING,
    Pair,
    Slices,
    add,
    bits_of_slices,
    divide,
    exponential,
    facing,
    fast_two_sum,
    gamma,
    multiply,
    pair,
    power_of_two,
    product,
    side_by_side,
    sliced_error,
    two_product,
    two_sum,
)

__all__ = [
    "PAIRS",
    "SAFE",
    "SPAN",
    "UNDERFLOW",
    "Bounded",
    "Exact",
    "Given",
    "Keys",
    "Rows",
    "attend",
    "error_of_slices",
    "error_of_weights",
    "largest",
    "largest_finite",
]

_ENOUGH = 2.0**-66  # error of a score that more slices would not mend
_MOST_LEVELS = 4  # more would be below what lower parts of pairs take
SPAN = 1024  # keys of which sums have no error
PAIRS = 2.0**-98  # of a few operations on pairs, relative
SAFE = 1 + 2.0**-30  # for roundings of a bound itself
UNDERFLOW = 2.0**-1000  # of a few operations, where subnormal numbers and such weights count as 0
_LOOK = 4096  # keys whose sizes are looked at together
_NUMPY_BLOCK, _OTHER_BLOCK = (128, 256), (2048, 1024)


class Given(NamedTuple):
    """Arguments in float64, in groups of heads."""

    q: Pair
    k: Pair
    v: Pair
    bias: Pair | None = None
    mask: Array | None = None
    causal: bool = False
    options: Options = NO_OPTIONS
    scale: Pair | None = None  # of numbers without axes
    v_error: Array | None = None  # (..., m, d_v): of the values
    bias_error: Array | None = None  # (..., 1, 1): the largest


class Bounded(NamedTuple):
    """A result with bounds of its error."""

    out: Pair  # (..., n, d_v)
    lse: Pair  # (..., n)
    error: Array  # (..., n, d_v)
    lse_error: Array  # (..., n)


@as_written
def attend(given: Given) -> Bounded:
    """`certified.attend` with trusted arguments."""
    q, k, v = given.q, given.k, given.v
    xp, home = array_namespace(q.hi), device(q.hi)
    lead = broadcast_lead(q.hi, k.hi, v.hi, given.mask, given.options.sinks, given.options.slopes)
    if given.bias is not None:
        lead = broadcast_lead(xp.empty((*lead, 1, 1)), given.bias.hi)
    n, m, d_v = q.hi.shape[-2], k.hi.shape[-2], v.hi.shape[-1]
    shape = (*lead, n)

    def room(*more: int) -> Array:
        return xp.empty((*shape, *more), dtype=q.hi.dtype, device=home)

    found = [room(d_v), room(d_v), room(), room(), room(d_v), room()]
    near = _near(given)
    keys = Keys.of(given)
    rows, columns = _NUMPY_BLOCK if is_numpy_array(q.hi) else _OTHER_BLOCK

    def attend_box(box: tuple[slice, ...]) -> None:
        result = Rows(given, keys, near, box).attend(columns)
        pieces = (*result.out, *result.lse, result.error, result.lse_error)
        for place, piece in enumerate(pieces):
            index = (*box, slice(0, d_v)) if found[place].ndim > len(box) else box
            found[place] = put(found[place], index, piece)

    boxes = ((*head, i) for head in tiles(lead, 1) for i in blocks(0, n, rows))
    for_each(lambda: attend_box, boxes, most=most_threads(q.hi, 16 * math.prod(lead) * n * m))
    return Bounded(Pair(*found[:2]), Pair(*found[2:4]), *found[4:])


def _near(given: Given) -> kernel.Attended:
    """The result in float64: its log normaliser is where weights are seen from."""
    scale = None if given.scale is None else given.scale.hi
    bias = None if given.bias is None else given.bias.hi
    return kernel.attend(
        given.q.hi, given.k.hi, given.v.hi,
        bias=bias, mask=given.mask, causal=given.causal, scale=scale, options=given.options,
    )  # fmt: skip


class Keys(NamedTuple):
    """What all queries need to know of the keys, values and biases of a head."""

    power: Array  # (..., 1, 1): of two, at most the largest |k|
    powers: Array  # (..., 1, d_v): of two, at most the largest |v| of each column
    bias: Array | None  # (..., 1, 1): the largest finite |bias|
    levels: int  # slices of queries and keys
    bits: int
    usable: Array | None  # (..., m): keys that are finite, and seen by some query
    finite: Array | None  # (..., m): keys that are finite; None if all are

    @classmethod
    def of(cls, given: Given) -> Keys:
        """Look at all of them, some at a time."""
        xp, m = array_namespace(given.q.hi), given.k.hi.shape[-2]
        power, column = (
            largest(x[..., :0, :], axes)
            for x, axes in ((given.k.hi, (-2, -1)), (given.v.hi, (-2,)))
        )
        all_usable, all_finite = [], []
        for j in blocks(0, m, _LOOK):
            k, v = (x.hi[..., j, :] for x in (given.k, given.v))
            finite = xp.all(xp.isfinite(k), axis=-1) & xp.all(xp.isfinite(v), axis=-1)
            usable = finite
            if given.mask is not None:
                usable = finite & xp.any(part(given.mask, (WHOLE, j)), axis=-2)
            power = xp.maximum(power, largest(_tidy(k, usable), (-2, -1)))
            column = xp.maximum(column, largest(_tidy(v, usable), (-2,)))
            all_usable.append(usable)
            all_finite.append(finite)
        whole = all(bool(xp.all(x)) for x in all_finite)
        tidy = m == 0 or (whole and given.mask is None)
        power, column = power_of_two(power), power_of_two(column)
        levels, bits = _levels(given, power)
        return cls(
            power,
            column,
            None if given.bias is None else largest_finite(given.bias.hi),
            levels,
            bits,
            None if tidy else xp.concat(all_usable, axis=-1),
            None if whole else xp.concat(all_finite, axis=-1),
        )


def largest_finite(x: Array) -> Array:
    """The largest finite magnitude of the last two axes, some rows at a time."""
    xp, found = array_namespace(x), largest(x[..., :0, :], (-2, -1))
    for i in blocks(0, x.shape[-2], max(1, _LOOK * 64 // max(1, x.shape[-1]))):
        own = xp.where(xp.isfinite(x[..., i, :]), x[..., i, :], 0.0)
        found = xp.maximum(found, largest(own, (-2, -1)))
    return found


def _levels(given: Given, power: Array) -> tuple[int, int]:
    """How many slices make errors of scores small, and how many bits they have."""
    xp, d = array_namespace(power), given.q.hi.shape[-1]
    most = power_of_two(largest_finite(given.q.hi))
    if given.scale is not None:
        most = most * 2 * xp.abs(given.scale.hi)
    product = (
        float(xp.max(most)) * float(xp.max(power)) if 0 not in (*most.shape, *power.shape) else 0.0
    )
    for levels in range(2, _MOST_LEVELS + 1):
        bits = bits_of_slices(d, levels)
        if sliced_error(d, bits, levels) * product <= _ENOUGH:
            break
    return levels, bits


def largest(x: Array, axes: tuple[int, ...]) -> Array:
    """The largest magnitude along some axes, which are kept; 0 of nothing."""
    xp = array_namespace(x)
    if 0 in (x.shape[axis] for axis in axes):
        shape = list(x.shape)
        for axis in axes:
            shape[axis] = 1
        return xp.zeros(tuple(shape), dtype=x.dtype, device=device(x))
    return xp.maximum(xp.max(x, axis=axes, keepdims=True), -xp.min(x, axis=axes, keepdims=True))


def _tidy(x: Array, usable: Array | None) -> Array:
    """Rows of keys or values, with 0 in place of those that are of no use."""
    if usable is None:
        return x
    return array_namespace(x).where(usable[..., None], x, 0.0)


class _Sums(NamedTuple):
    """Sums over the keys, with weights that are wrong by theta times themselves."""

    total: Pair  # (..., n, d_v)
    mass: Pair  # (..., n, 1)
    absolute: Array  # (..., n, d_v): of |values|
    inherited: Array | float  # (..., n, d_v): of errors of values


class Rows(NamedTuple):
    """Some queries of some heads."""

    given: Given
    keys: Keys
    near: kernel.Attended
    box: tuple[slice, ...]

    def attend(self, columns: int) -> Bounded:
        """Their results, of blocks of so many keys."""
        rows, power = self.queries()
        lse = part(self.near.lse[..., None], (*self.box, WHOLE))
        base = array_namespace(lse).where(lse == -math.inf, 0.0, lse)
        wrong = self.error_of_exponents(power, base)
        return self._means(self._sums(rows, base, columns), base, wrong, lse == -math.inf)

    def queries(self) -> tuple[Array, Array]:
        """The first factor of scores, and the power of two of each query."""
        given = self.given
        q = Pair(*(part(x, (*self.box, WHOLE)) for x in given.q))
        if given.scale is not None:
            q = multiply(q, given.scale)
        power = power_of_two(largest(q.hi, (-1,)))
        return side_by_side(Slices.of(q, power, self.keys.bits, self.keys.levels)), power

    @property
    def band(self) -> Band:
        """The keys that they see by their place."""
        given = self.given
        return given.options.band(given.q.hi.shape[-2], given.k.hi.shape[-2], given.causal)

    def of_heads(self, x: Array) -> Array:
        return part(x, (*self.box[:-1], WHOLE, WHOLE))

    def of_keys(self, x: Array, j: slice) -> Array:
        return part(x, (*self.box[:-1], j, WHOLE))

    def _of_pairs(self, x: Array, j: slice) -> Array:
        return part(x, (*self.box, j))

    def error_of_exponents(self, power: Array, base: Array) -> Array:
        """Steps 1 and 2 of the proof, (..., n, 1)."""
        xp, d = array_namespace(power), self.given.q.hi.shape[-1]
        k_power, options = self.of_heads(self.keys.power), self.given.options
        sliced = sliced_error(d, self.keys.bits, self.keys.levels) + d * PAIRS
        wrong = sliced * power * k_power + d * UNDERFLOW * (1 + power + k_power)
        added = xp.abs(base)
        if self.keys.bias is not None:
            added = added + self.of_heads(self.keys.bias)
        if options.sinks is not None:
            sinks = self.of_heads(options.sinks)
            added = added + xp.abs(xp.where(xp.isfinite(sinks), sinks, 0.0))
        if options.slopes is not None:
            reach = self.given.q.hi.shape[-2] + self.given.k.hi.shape[-2]
            added = added + reach * xp.abs(self.of_heads(options.slopes))
        wrong = wrong + 2.0**-100 * added
        if self.given.bias_error is not None:
            wrong = wrong + self.of_heads(self.given.bias_error)
        if options.softcap is not None:
            wrong = wrong + 2.0**-66 * options.softcap
        return wrong * SAFE

    def _sums(self, rows: Array, base: Array, columns: int) -> _Sums:
        """Steps 3 and 4 of the proof."""
        given, keys, options, band = self.given, self.keys, self.given.options, self.band
        xp, m, i = array_namespace(base), given.k.hi.shape[-2], self.box[-1]
        bits, v_power = bits_of_slices(SPAN, 3), self.of_heads(keys.powers)
        zero = xp.zeros((1, 1), dtype=base.dtype, device=device(base))
        total, mass, absolute, inherited = Pair(zero, zero), Pair(zero, zero), zero, zero
        for span in blocks(0, m, SPAN):
            seen, values, weight = band.keys(i, span), Exact(), Exact()
            for j in blocks(seen.start, seen.stop, columns):
                weights, v_j = self.weights(rows, Pair(base, zero), j), self.values(given.v, j)
                p, v = Slices.of(weights, 2.0, bits, 3), Slices.of(v_j, v_power, bits, 3)
                values.add_product(p, v)
                weight.add(*(xp.sum(x, axis=-1, keepdims=True) for x in (*p.parts, p.rests[-1])))
                absolute = absolute + weights.hi @ xp.abs(v_j.hi)
                if given.v_error is not None:
                    inherited = inherited + weights.hi @ self.of_keys(given.v_error, j)
            if seen.stop > seen.start:
                total, mass = add(total, values.sum()), add(mass, weight.sum())
        if options.sinks is not None:
            sink = self.of_heads(options.sinks)
            there = sink > -math.inf
            one = exponential(two_sum(xp.where(there, sink, 0.0), -base))
            mass = add(mass, Pair(*(xp.where(there, x, 0.0) for x in one)))
        return _Sums(total, mass, absolute, inherited)

    def values(self, x: Pair, j: slice) -> Pair:
        """Keys or values of a block, with 0 in place of what is of no use."""
        usable = self.keys.usable
        usable = None if usable is None else part(usable, (*self.box[:-1], j))
        return Pair(*(_tidy(self.of_keys(y, j), usable) for y in x))

    def _scores(self, rows: Array, j: slice) -> Pair:
        """Scores of a block in pairs."""
        given, levels = self.given, self.keys.levels
        k_power = self.of_heads(self.keys.power)
        faced = facing(Slices.of(self.values(given.k, j), k_power, self.keys.bits, levels))
        score = product(rows, faced, levels)
        xp = array_namespace(score.hi)
        if given.options.softcap is not None:
            score = _cap(score, given.options.softcap)
        if given.bias is not None:
            bias = Pair(*(self._of_pairs(x, j) for x in given.bias))
            shown = xp.isfinite(bias.hi)
            score = add(score, Pair(*(xp.where(shown, x, 0.0) for x in bias)))
        if given.options.slopes is not None:
            slopes = self.of_heads(given.options.slopes)
            distances = self.band.distances(self.box[-1], j, score.hi, xp)
            score = add(score, two_product(-slopes, distances))
        return score

    def weights(self, rows: Array, base: Pair, j: slice) -> Pair:
        """e^(score - base) in pairs: 0 where hidden, nan where a visible key is not finite."""
        xp, given, score = array_namespace(base.hi), self.given, self._scores(rows, j)
        hi, lo = two_sum(score.hi, -base.hi)
        high, low = exponential(two_sum(hi, lo + (score.lo - base.lo)))
        if self.keys.finite is not None:
            finite = part(self.keys.finite, (*self.box[:-1], j))[..., None, :]
            high = xp.where(finite, high, math.nan)
        mask = None if given.mask is None else self._of_pairs(given.mask, j)
        visible = self.band.visible(self.box[-1], j, device(base.hi), xp, mask)
        if given.bias is not None:
            bias = self._of_pairs(given.bias.hi, j)
            high = xp.where((bias == math.inf) | xp.isnan(bias), math.nan, high)
            shown = bias != -math.inf
            visible = shown if visible is None else visible & shown
        if visible is not None:
            high, low = xp.where(visible, high, 0.0), xp.where(visible, low, 0.0)
        return Pair(high, low)

    def _means(self, sums: _Sums, base: Array, wrong: Array, empty: Array) -> Bounded:
        """Steps 5 and 6 of the proof."""
        xp, m = array_namespace(base), self.given.k.hi.shape[-2]
        total, mass, absolute, inherited = sums
        bits, spans = bits_of_slices(SPAN, 3), -(-m // SPAN)
        powers, at = self.of_heads(self.keys.powers), (*self.box, WHOLE)
        theta = error_of_weights(wrong)
        size = (1 + theta) * absolute * (1 + gamma(m + SPAN)) + UNDERFLOW * m * powers
        rest = (mass.hi + 1 + 6 * m) * 2.0 ** (-2 * bits) * gamma(3 * SPAN + 16)
        added = (spans + 4) * 2.0**-102  # of what is added, slices above their numbers
        above = m * 2.0 ** (2 - bits)
        lost = rest + added * (mass.hi + above) + m * UNDERFLOW
        g = (rest + added * above) * powers + added * size
        least = mass.hi * (1 - theta) - lost
        there = mass.hi > 0
        out = divide(total, Pair(xp.where(there, mass.hi, 1.0), mass.lo))
        magnitude = xp.abs(out.hi)
        error = (theta * size + g + 2 * inherited + magnitude * (theta * mass.hi + lost)) / least
        error = (error + PAIRS * magnitude) * SAFE + (m + 64) * UNDERFLOW

        log, log_error = _log(mass)
        lse_hi, lse_lo = two_sum(base, log.hi)
        lse = fast_two_sum(lse_hi, lse_lo + log.lo)
        lse_error = (theta * mass.hi + lost) / least + log_error + 2.0**-102 * xp.abs(lse.hi)
        lse_error = lse_error * SAFE

        near_one = (wrong < 0.5) & (mass.hi >= 0.5) & (mass.hi <= 2.0)  # not of nan
        none = empty & (mass.hi == 0) & (wrong < 0.5)  # unless terms overflow to nothing
        finish = _Finish(near_one & (error < math.inf), none)
        finish_log = _Finish(near_one & (lse_error < math.inf), none)
        near = part(self.near.out, at), part(self.near.lse[..., None], at)
        return Bounded(
            Pair(finish(out.hi, near[0]), finish(out.lo, 0.0)),
            Pair(finish_log(lse.hi, near[1], -math.inf)[..., 0], finish_log(lse.lo, 0.0)[..., 0]),
            finish(error, math.inf),
            finish_log(lse_error, math.inf)[..., 0],
        )


class Exact:
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


def error_of_weights(wrong: Array) -> Array:
    """Theta, relative, where exponents have this error, which is below 1/2."""
    xp = array_namespace(wrong)
    return (xp.expm1(xp.minimum(wrong, 1.0)) + 2 * EXPONENTIAL) * SAFE


def error_of_slices(count: int) -> float:
    """Bound of the error of sums of so many products in `Exact`, span by span.

    In units of the powers of two of both factors: of the last of the three sums, of which the terms
    are at most 5 times 2^-2b, and of what is added in pairs.
    """
    bits, spans = bits_of_slices(SPAN, 3), -(-count // SPAN)
    return count * (5 * gamma(3 * SPAN + 16) * 2.0 ** (-2 * bits) + (spans + 4) * 2.0**-99)


class _Finish(NamedTuple):
    """Chooses what is proven, what is there of no key, or else another thing."""

    holds: Array
    none: Array

    def __call__(self, proven: Array, other: Array | float, nothing: float = 0.0) -> Array:
        xp = array_namespace(proven)
        return xp.where(self.none, nothing, xp.where(self.holds, proven, other))


def _cap(score: Pair, most: float) -> Pair:
    """c tanh(s / c) = c sign(s) (1 - e) / (1 + e) with e = exp(-2 |s| / c)."""
    xp = array_namespace(score.hi)
    one = xp.ones_like(score.hi)
    sign = xp.where(score.hi < 0, -one, one)
    c = pair(xp.full_like(score.hi, most))
    ratio = divide(Pair(score.hi * sign, score.lo * sign), c)
    fallen = exponential(Pair(-2.0 * ratio.hi, -2.0 * ratio.lo))
    less, more = add(pair(one), Pair(-fallen.hi, -fallen.lo)), add(pair(one), fallen)
    capped = multiply(divide(less, more), c)
    return Pair(capped.hi * sign, capped.lo * sign)


def _log(x: Pair) -> tuple[Pair, Array]:
    """Log of numbers near 1 by four terms of its series beyond the first, and its error."""
    xp = array_namespace(x.hi)
    hi, lo = two_sum(x.hi, xp.full_like(x.hi, -1.0))
    above = fast_two_sum(hi, lo + x.lo)
    size, tail = xp.abs(above.hi), xp.zeros_like(above.hi)
    for k in range(5, 1, -1):
        tail = above.hi * (tail + (-1.0) ** (k + 1) / k)
    left_out = xp.where(size < 0.5, 2 * size**6 / 6, math.inf)
    error = left_out + 8 * ROUNDING * size * size + 2.0**-102 * size
    return fast_two_sum(above.hi, above.lo + above.hi * tail), error
