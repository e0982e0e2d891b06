"""Attention in pairs with a bound of its error, of trusted arguments; the proof: `certified`."""

from __future__ import annotations

import math
from typing import NamedTuple

from . import _kernel
from ._array import Array, array_namespace, as_written, device, is_numpy_array
from ._blocks import blocks, most_threads, part, put, tiles
from ._heads import broadcast_lead
from ._pairs import (
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
    products,
    side_by_side,
    sliced_error,
    two_product,
    two_sum,
)
from ._scores import NO_OPTIONS, Band, Options
from ._threads import for_each

__all__ = ["PAIRS", "Bounded", "Given", "Keys", "attend", "largest"]

_ENOUGH = 2.0**-66  # error of a score that more slices would not mend
_MOST_LEVELS = 6
_SPAN = 1024  # keys of which sums have no error
PAIRS = 2.0**-98  # of a few operations on pairs, relative
_SAFE = 1 + 2.0**-30  # for roundings of a bound itself
_LOST = 2.0**-1000  # weights that are taken for 0
_UNDERFLOW = 2.0**-1060  # of a few operations
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
        result = _Rows(given, keys, near, box).attend(columns)
        pieces = (*result.out, *result.lse, result.error, result.lse_error)
        for place, piece in enumerate(pieces):
            index = (*box, slice(0, d_v)) if found[place].ndim > len(box) else box
            found[place] = put(found[place], index, piece)

    boxes = ((*head, i) for head in tiles(lead, 1) for i in blocks(0, n, rows))
    for_each(lambda: attend_box, boxes, most=most_threads(q.hi, 16 * math.prod(lead) * n * m))
    return Bounded(Pair(*found[:2]), Pair(*found[2:4]), *found[4:])


def _near(given: Given) -> _kernel.Attended:
    """The result in float64: its log normaliser is where weights are seen from."""
    scale = None if given.scale is None else given.scale.hi
    bias = None if given.bias is None else given.bias.hi
    return _kernel.attend(
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
        """Look at all of them."""
        xp = array_namespace(given.q.hi)
        finite = xp.all(xp.isfinite(given.k.hi), axis=-1) & xp.all(xp.isfinite(given.v.hi), axis=-1)
        whole = bool(xp.all(finite))
        usable = None if whole else finite
        if given.mask is not None:
            mask = given.mask if given.mask.ndim > 1 else given.mask[None, :]
            seen = xp.broadcast_to(mask, (*mask.shape[:-1], given.k.hi.shape[-2]))
            seen = xp.any(seen, axis=-2)
            usable = seen if usable is None else usable & seen
        k, v = (_tidy(x.hi, usable) for x in (given.k, given.v))
        power = power_of_two(largest(k, (-2, -1)))
        powers = power_of_two(largest(v, (-2,)))
        bias = None
        if given.bias is not None:
            known = xp.where(xp.isfinite(given.bias.hi), given.bias.hi, 0.0)
            bias = largest(known, (-2, -1))
        levels, bits = _levels(given, power)
        return cls(power, powers, bias, levels, bits, usable, None if whole else finite)


def _levels(given: Given, power: Array) -> tuple[int, int]:
    """How many slices make errors of scores small, and how many bits they have."""
    xp, d = array_namespace(power), given.q.hi.shape[-1]
    q = xp.where(xp.isfinite(given.q.hi), given.q.hi, 0.0)
    most = power_of_two(largest(q, (-2, -1)))
    if given.scale is not None:
        most = most * 2 * xp.abs(given.scale.hi)
    product = float(xp.max(most)) * float(xp.max(power)) if 0 not in most.shape else 0.0
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


class _Rows(NamedTuple):
    """Some queries of some heads."""

    given: Given
    keys: Keys
    near: _kernel.Attended
    box: tuple[slice, ...]

    def attend(self, columns: int) -> Bounded:
        """Their results, of blocks of so many keys."""
        given, at = self.given, (*self.box, slice(None))
        xp = array_namespace(given.q.hi)
        q = Pair(*(part(x, at) for x in given.q))
        if given.scale is not None:
            q = multiply(q, given.scale)
        power = power_of_two(largest(q.hi, (-1,)))
        lse = part(self.near.lse[..., None], at)
        base = xp.where(xp.isfinite(lse), lse, 0.0)
        wrong = self._error_of_exponents(power, base)
        rows = side_by_side(Slices.of(q, power, self.keys.bits, self.keys.levels))
        return self._means(self._sums(rows, base, columns), base, wrong, lse == -math.inf)

    def _of_heads(self, x: Array) -> Array:
        return part(x, (*self.box[:-1], slice(None), slice(None)))

    def _of_keys(self, x: Array, j: slice) -> Array:
        return part(x, (*self.box[:-1], j, slice(None)))

    def _of_pairs(self, x: Array, j: slice) -> Array:
        return part(x, (*self.box, j))

    def _error_of_exponents(self, power: Array, base: Array) -> Array:
        """Steps 1 and 2 of the proof, (..., n, 1)."""
        xp, d = array_namespace(power), self.given.q.hi.shape[-1]
        k_power, options = self._of_heads(self.keys.power), self.given.options
        sliced = sliced_error(d, self.keys.bits, self.keys.levels) + d * PAIRS
        wrong = sliced * power * k_power + d * _UNDERFLOW * (1 + power + k_power)
        added = xp.abs(base)
        if self.keys.bias is not None:
            added = added + self._of_heads(self.keys.bias)
        if options.sinks is not None:
            sinks = self._of_heads(options.sinks)
            added = added + xp.abs(xp.where(xp.isfinite(sinks), sinks, 0.0))
        if options.slopes is not None:
            reach = self.given.q.hi.shape[-2] + self.given.k.hi.shape[-2]
            added = added + reach * xp.abs(self._of_heads(options.slopes))
        wrong = wrong + 2.0**-100 * added
        if self.given.bias_error is not None:
            wrong = wrong + self._of_heads(self.given.bias_error)
        if options.softcap is not None:
            wrong = wrong + 2.0**-66 * options.softcap
        return wrong * _SAFE

    def _sums(self, rows: Array, base: Array, columns: int) -> _Sums:
        """Steps 3 and 4 of the proof."""
        given, keys, options = self.given, self.keys, self.given.options
        xp, m, i = array_namespace(base), given.k.hi.shape[-2], self.box[-1]
        band = options.band(given.q.hi.shape[-2], m, given.causal)
        bits, k_power, v_power = (
            bits_of_slices(_SPAN, 3), self._of_heads(keys.power), self._of_heads(keys.powers),
        )  # fmt: skip
        zero = xp.zeros((1, 1), dtype=base.dtype, device=device(base))
        total, mass, absolute, inherited = Pair(zero, zero), Pair(zero, zero), zero, zero
        for span in blocks(0, m, _SPAN):
            seen, values, weight = band.keys(i, span), _Exact(), _Exact()
            for j in blocks(seen.start, seen.stop, columns):
                usable = None if keys.usable is None else part(keys.usable, (*self.box[:-1], j))
                k_j, v_j = (
                    Pair(*(_tidy(self._of_keys(y, j), usable) for y in x))
                    for x in (given.k, given.v)
                )
                faced = facing(Slices.of(k_j, k_power, keys.bits, keys.levels))
                weights = self._weights(self._scores(rows, faced, j, band), base, j, band)
                (p0, p1), (p, _, p2) = Slices.of(weights, 2.0, bits, 3)
                (v0, v1), (v, rest1, rest2) = Slices.of(v_j, v_power, bits, 3)
                values.add(p0 @ v0, p0 @ v1 + p1 @ v0, p0 @ rest2 + p1 @ rest1 + p2 @ v)
                weight.add(*(xp.sum(x, axis=-1, keepdims=True) for x in (p0, p1, p2)))
                absolute = absolute + p @ xp.abs(v)
                if given.v_error is not None:
                    inherited = inherited + p @ self._of_keys(given.v_error, j)
            if seen.stop > seen.start:
                total, mass = add(total, values.sum()), add(mass, weight.sum())
        if options.sinks is not None:
            sink = self._of_heads(options.sinks)
            there = sink > -math.inf
            one = exponential(two_sum(xp.where(there, sink, 0.0), -base))
            mass = add(mass, Pair(*(xp.where(there, x, 0.0) for x in one)))
        return _Sums(total, mass, absolute, inherited)

    def _scores(self, rows: Array, faced: tuple[Array, Array], j: slice, band: Band) -> Pair:
        """Scores of a block in pairs."""
        given, levels = self.given, self.keys.levels
        matrices = products(rows, faced, levels)
        hi, lo = next(matrices), 0.0
        for r, matrix in enumerate(matrices, 2):
            if r < levels:
                hi, lost = two_sum(hi, matrix)
                lo = lo + lost
            else:
                lo = lo + matrix
        score, xp = fast_two_sum(hi, lo), array_namespace(hi)
        if given.options.softcap is not None:
            score = _cap(score, given.options.softcap)
        if given.bias is not None:
            bias = Pair(*(self._of_pairs(x, j) for x in given.bias))
            shown = xp.isfinite(bias.hi)
            score = add(score, Pair(*(xp.where(shown, x, 0.0) for x in bias)))
        if given.options.slopes is not None:
            slopes = self._of_heads(given.options.slopes)
            score = add(score, two_product(-slopes, band.distances(self.box[-1], j, hi)))
        return score

    def _weights(self, score: Pair, base: Array, j: slice, band: Band) -> Pair:
        """e^(score - base) in pairs: 0 where hidden, nan where a visible key is not finite."""
        xp, given = array_namespace(base), self.given
        hi, lo = two_sum(score.hi, -base)
        high, low = exponential(two_sum(hi, lo + score.lo))
        if self.keys.finite is not None:
            finite = part(self.keys.finite, (*self.box[:-1], j))[..., None, :]
            high = xp.where(finite, high, math.nan)
        mask = None if given.mask is None else self._of_pairs(given.mask, j)
        visible = band.visible(self.box[-1], j, device(base), xp, mask)
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
        bits, spans = bits_of_slices(_SPAN, 3), -(-m // _SPAN)
        powers, at = self._of_heads(self.keys.powers), (*self.box, slice(None))
        theta = (xp.expm1(xp.minimum(wrong, 1.0)) + 2 * EXPONENTIAL) * _SAFE

        size = (1 + theta) * absolute * (1 + gamma(m + _SPAN)) + _LOST * m * powers
        rest = (mass.hi + 1 + 6 * m) * 2.0 ** (-2 * bits) * gamma(3 * _SPAN + 16)
        added = (spans + 4) * 2.0**-102  # of what is added, slices above their numbers
        above = m * 2.0 ** (2 - bits)
        lost = rest + added * (mass.hi + above) + m * _LOST
        g = (rest + added * above) * powers + added * size
        least = mass.hi * (1 - theta) - lost
        there = mass.hi > 0
        out = divide(total, Pair(xp.where(there, mass.hi, 1.0), mass.lo))
        magnitude = xp.abs(out.hi)
        error = (theta * size + g + 2 * inherited + magnitude * (theta * mass.hi + lost)) / least
        error = (error + PAIRS * magnitude) * _SAFE + (m + 64) * _UNDERFLOW

        log, log_error = _log(mass)
        lse_hi, lse_lo = two_sum(base, log.hi)
        lse = fast_two_sum(lse_hi, lse_lo + log.lo)
        lse_error = (theta * mass.hi + lost) / least + log_error + 2.0**-102 * xp.abs(lse.hi)
        lse_error = lse_error * _SAFE

        near_one = (wrong < 0.5) & (mass.hi >= 0.5) & (mass.hi <= 2.0)  # not of nan
        none = empty & (mass.hi == 0)
        finish = _Finish(near_one & (error < math.inf), none)
        finish_log = _Finish(near_one & (lse_error < math.inf), none)
        near = part(self.near.out, at), part(self.near.lse[..., None], at)
        return Bounded(
            Pair(finish(out.hi, near[0]), finish(out.lo, 0.0)),
            Pair(finish_log(lse.hi, near[1], -math.inf)[..., 0], finish_log(lse.lo, 0.0)[..., 0]),
            finish(error, math.inf),
            finish_log(lse_error, math.inf)[..., 0],
        )


class _Exact:
    """Sums over a span of what is exact, twice, and of the rest."""

    def __init__(self) -> None:
        self._sums: tuple[Array, ...] = (0.0, 0.0, 0.0)

    def add(self, *more: Array) -> None:
        self._sums = tuple(x + y for x, y in zip(self._sums, more, strict=True))

    def sum(self) -> Pair:
        first, second, third = self._sums
        hi, lo = two_sum(first, second)
        return fast_two_sum(hi, lo + third)


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
    """Log of numbers near 1, and its error: five terms of the series."""
    xp = array_namespace(x.hi)
    hi, lo = two_sum(x.hi, xp.full_like(x.hi, -1.0))
    above = fast_two_sum(hi, lo + x.lo)
    size, tail = xp.abs(above.hi), xp.zeros_like(above.hi)
    for k in range(5, 1, -1):
        tail = above.hi * (tail + (-1.0) ** (k + 1) / k)
    left_out = xp.where(size < 0.5, 2 * size**6 / 6, math.inf)
    error = left_out + 8 * ROUNDING * size * size + 2.0**-102 * size
    return fast_two_sum(above.hi, above.lo + above.hi * tail), error
