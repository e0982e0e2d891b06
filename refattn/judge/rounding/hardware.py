r"""Predict what matrix units that cut sums take from a sum of products; the units by name.

A unit adds a group of exact products to an accumulator C: it aligns all of them to the largest,
cuts each towards zero so many binary digits below the leading one of that, adds without a rounding,
and cuts the sum towards zero (MMA-Sim, arXiv 2511.10909). So sums are too small, by more the more
groups there are. With the unit in the last place of the aligned numbers and of the sum,

.. math:: u = 2^{\lfloor \log_2 \max(|C|, \max_j |x_j|) \rfloor - a}, \qquad
    w = \max(u, 2^{\lfloor \log_2 |C + \sum_j x_j| \rfloor - b}),

a group takes :math:`\sum_j \operatorname{sign}(x_j) (|x_j| \bmod u)` from the sum, and then what
its cut terms leave above a multiple of w. `CutSum` computes both for some products of a tile of
keys, as the profile rounds them: the others of the tile lose as much on average, and their signs
are known. The accumulator carries what was lost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ...arrays.library import Doubles
from .formats import FORMATS, Format, leading_power

# The share of a shift by which it may be off for all elements alike, which every test allows. In a
# tile u is that of its middle. A tile is at most an eighth of the products before it, so that a sum
# of terms of one sign is off by a factor of 2 in at most half of one tile of the eight or more in
# which it doubles: by 1/16 of the loss, up or down. Terms that are not looked at are as large as
# others, unless keys are in an order, and other maxima cut other digits: both average out over
# tiles, and are in the variance. A third of the slack is for u, the rest for what is not known: the
# order of keys in groups, and sums that are rescaled when a maximum grows.
SLACK = 0.2
# By what part of itself a product that is split is too small: the product of what is after the
# leading 11 digits of both factors is left out, at most 2^-20 of the whole, and of either factor
# the digits after 22, at most 3/8 of that; sums of few products, which are cut, lose as much again.
# On an H100 0.86 to 1.02 times 2^-21 were measured, of values with a mean and without.
_SPLIT = 2.0**-21
_TILE = 64  # products of a tile, at the most
_SOME = 8  # products of a tile whose losses are computed, at the least
_NEARLY_ZERO = 2.0**-100  # smaller numbers count as 0
_FOUR_DIGITS = Format(4, -1000, math.inf)


class Unit(NamedTuple):
    """A matrix unit for factors of a type.

    If it splits, a product of float32 is three products of TF32, of the leading digits of the
    factors and of those after them, which are added in float32.
    """

    group: int  # products that are added at a time
    aligned: int  # binary digits after the leading one of the largest, when products are aligned
    kept: int  # and of sums
    run: int | None = None  # products after which a sum is added to another in float32
    split: bool = False

    @property
    def narrow(self) -> bool:
        """Whether what is cut is more than a trifle beside the roundings of weights."""
        return self.kept < 20

    def bound(self, terms: int) -> float:
        """Bound what is lost of so many products, over the sum of their sizes.

        Each cut takes less than a unit in the last place: of a group, from its products, from the
        accumulator and from the sum. Cut numbers are no larger than uncut ones, so that no leading
        digit is above that of the sum of all sizes.
        """
        if self.split:
            return 16 * _SPLIT
        groups = -(-min(terms, self.run or terms) // self.group)
        lost = groups * ((self.group + 1) * 2.0**-self.aligned + 2.0**-self.kept)
        return min(lost, 2.0)  # the sum is at most as large, and the exact one, too


_AMPERE, _HOPPER, _EIGHT = Unit(8, 24, 23), Unit(16, 25, 23), Unit(32, 13, 13)
_AMPERE_32, _HOPPER_32 = Unit(4, 24, 23), Unit(8, 25, 23)  # of TF32
_THREE = Unit(8, 25, 23, 32, split=True)  # products of TF32 for one of float32

# For factors of 16 bits, of 8, and in TF32; None where sums are rounded, or where there is no such
# unit. Those of Hopper were measured on an H100.
UNITS: Mapping[str, tuple[Unit | None, Unit | None, Unit | None]] = {
    "hopper": (_HOPPER, _EIGHT, _HOPPER_32),
    # Sums that are added in float32: of 128 products in kernels, of 512 where cuBLAS splits a sum.
    "hopper-promoted": (_HOPPER, _EIGHT._replace(run=128), _HOPPER_32._replace(run=512)),
    "blackwell": (_HOPPER, None, _HOPPER_32),
    "ampere": (_AMPERE, None, _AMPERE_32),
    "turing": (_AMPERE, None, None),
    "ada": (_AMPERE, _EIGHT, _AMPERE_32),
    "volta": (Unit(4, 23, 23), None, None),
}

IEEE = "ieee"  # hardware that rounds sums


def unit_for(name: Any, to: Format | None) -> Unit | None:
    """Look up the unit of this name for factors of a type; None where sums are rounded."""
    if name in (None, IEEE) or to is None or to == FORMATS["float64"]:
        return None
    narrow, eight, wide = UNITS[name]
    if to == FORMATS["float32"]:
        return None if wide is None else _THREE
    if to in (FORMATS["tfloat32"], FORMATS["tfloat32-truncated"]):
        return wide
    return eight if to.has_8_bits else narrow


def name_units(unit: Unit) -> str:
    """Name all hardware that has a unit."""
    if unit.split:
        return "Ampere and later"
    names = [x for x, units in UNITS.items() if unit in units and ("-" in x) == bool(unit.run)]
    return " or ".join(x.replace("-", " ").capitalize() for x in names)


def allow(unit: Unit | None, shift: Doubles | float) -> Doubles | float:
    """Say by how much a shift may be off for all elements alike."""
    return (1.0 if unit is not None and unit.split else SLACK) * np.abs(shift)


def split_error(unit: Unit | None) -> float:
    """Say by what part of themselves products may be too small, all alike."""
    return 0.0 if unit is None or not unit.split else 2 * _SPLIT


def cut_error(unit: Unit | None, terms: int) -> float:
    """Bound what a unit loses of so many products, over the sum of their sizes."""
    return 0.0 if unit is None else unit.bound(terms)


class CutSum:
    """A sum of products x @ y over tiles, as a unit cuts it.

    The shift is the expected loss, negative where sums are positive, and has a variance.
    """

    def __init__(self, unit: Unit, rows: int, columns: int) -> None:
        self.unit = unit
        self.total, self.shift, self.variance = np.zeros((3, rows, columns))
        self.terms = 0  # of the accumulator

    def add(self, x: Doubles, y: Doubles) -> None:
        """Add the products of x (rows, b) with y (b, columns), in tiles that grow with the sum."""
        at = 0
        while at < len(y):
            tile = slice(at, at + max(self.unit.group, min(_TILE, self.terms // 8)))
            self._add_tile(x[:, tile], y[tile])
            at = tile.stop

    def restart(self) -> None:
        """Begin with an accumulator of 0."""
        self.total, self.terms = np.zeros_like(self.total), 0

    def _add_tile(self, x: Doubles, y: Doubles) -> None:
        if self.unit.split:
            self.shift -= _SPLIT * (x @ y)
            return
        count, group = len(y), self.unit.group
        scale = find_scale(y) if self.unit.narrow else 1.0  # which is not in the unit
        y, total = y / scale, self.total / scale
        some = count if self.unit.narrow else min(count, max(group, _SOME))
        groups = count / group
        more = x @ y
        before = total + more * max(groups - 1, 0) / (2 * groups)  # of a group, on average
        after = before + more / groups
        terms = x[:, :some, None].astype(np.float32) * y[:some].astype(np.float32)
        largest = np.maximum(np.abs(before), np.max(np.abs(terms), 1))
        unit = np.maximum(leading_power(largest), _NEARLY_ZERO) * 2.0**-self.unit.aligned
        terms *= (1 / unit).astype(np.float32)[:, None]
        cut = np.trunc(terms)
        lost = terms - cut
        # Of the products that were not looked at signs are known; of those that were, losses, too.
        rest = np.sign(x[:, some:]) @ np.sign(y[some:])
        seen = some / count * np.maximum(np.count_nonzero(x, 1), 1)[:, None]
        loss = np.sum(lost, 1) + rest * (np.sum(np.abs(lost), 1) / seen)
        sign = np.sign(after)
        last = np.maximum(leading_power(after) * 2.0**-self.unit.kept / unit, 1.0)
        above = np.mod(sign * np.sum(cut[:, :group], 1), last)
        shift = -unit * (loss + groups * sign * above)
        # Of losses that are uniform, of as many terms and again of those that stand for others.
        others = count - some
        squares = np.sum(lost * lost, 1) * (count + others * others / some) / some
        squares = squares + np.square(groups * above)
        self.variance += np.square(scale * unit) * squares / 2
        self.shift += scale * shift
        self.total = scale * (total + more + shift)
        self.terms += count
        if self.unit.run is not None and self.terms >= self.unit.run:
            self.restart()


def find_scale(x: Doubles) -> float:
    """Find a scale that leaves numbers of 4 binary digits; return 1 if there is none."""
    largest = float(np.max(np.abs(x), initial=0.0))
    for digits in range(8, 16):
        scale = largest / digits if largest else 1.0
        if scale > 0 and np.allclose(_FOUR_DIGITS.round(x / scale), x / scale, 2.0**-40, 0.0):
            return scale
    return 1.0
