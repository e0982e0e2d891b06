r"""Multiply matrices cut into slices of a few bits, with proven error bounds.

`Slices` cut vectors into slices of which inner products are exact, in any order of their sums and
with any BLAS; `sliced_products` puts them together to a matrix product.

    Ozaki, Ogita, Oishi and Rump, Error-free transformations of matrix multiplication by using fast
    routines of matrix multiplication, Numerical Algorithms 59, 2012.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from ..arrays.library import Array
from .doubled import ROUNDING, Pair, fast_two_sum, two_sum


def higham_gamma(count: int) -> float:
    """Bound the relative error of sums of so many products, whatever their order (Higham)."""
    return count * ROUNDING / (1 - count * ROUNDING)


def power_of_two(x: Array, xp: Any) -> Array:
    """Return the power of two at or below |x|, up to 2^970; 0 of 0 (Rump)."""
    much = (2.0**52 + 1) * x
    return xp.abs(much - (1 - ROUNDING) * much)


def bits_of_slices(count: int, levels: int) -> int:
    """Count the bits of slices of which sums of so many products have no error.

    Products of slices that share the unit are summed together: with those t of the first vector and
    r - t of the second, for each r below `levels` - 1, there are at most 1 + (r - 1) / 4 times as
    many units as with the first slices alone.
    """
    most = max(count, 1) * max(4, levels + 1) / 4
    return (53 - math.ceil(math.log2(most))) // 2


class Slices(NamedTuple):
    r"""Numbers x, cut into slices of `bits` bits.

    With f the power of two at or below the largest |x| of a vector, `parts[t]` is a multiple of
    :math:`2^{1 - \mathrm{bits} (t + 1)} f`, at most 2 f for t = 0 and
    :math:`2^{-\mathrm{bits}\, t} f` after, and `rests[t]` is what the first t parts leave, rounded:
    all for t = 0, and at most :math:`2^{-\mathrm{bits}\, t} f` after.
    """

    parts: list[Array]
    rests: list[Array]

    @classmethod
    def of(cls, x: Pair, power: Array | float, bits: int, levels: int, xp: Any) -> Slices:
        """Cut numbers of at most 2 `power` each into `levels` - 1 slices and a rest."""
        parts, rests, rest = [], [x.hi], x.hi
        unit = power * 2.0 ** (1 - bits)
        for _ in range(levels - 1):
            sigma = 1.5 * 2.0**52 * unit
            parts.append((rest + sigma) - sigma)
            rest = rest - parts[-1]
            rests.append(rest + x.lo)
            unit = unit * 2.0**-bits
        rests[0] = xp.broadcast_to(x.hi, parts[0].shape)  # as the others
        return cls(parts, rests)


def sliced_products(a: Array, b: tuple[Array, Array], levels: int, xp: Any) -> Iterator[Array]:
    r"""Yield matrices of which the sum is a b^T: all without error but the last.

    With the parts :math:`a_t` and the rests :math:`\bar a_t` of both, the matrices are

    .. math::
        \sum_{t \le r} a_t b_{r-t}^\top, \quad r < \mathrm{levels} - 1, \qquad
        \sum_{t < \mathrm{levels} - 1} a_t \bar b_{\mathrm{levels} - 1 - t}^\top
        + \bar a_{\mathrm{levels} - 1} b^\top

    `a` is from `side_by_side` and `b` from `facing`, so that each of them is one matrix product.
    """
    exact, last = (xp.matrix_transpose(x) for x in b)
    size = a.shape[-1] // levels
    for r in range(levels - 1):
        yield a[..., : (r + 1) * size] @ exact[..., (levels - 2 - r) * size :, :]
    yield a @ last


def sliced_product(a: Array, b: tuple[Array, Array], levels: int, xp: Any) -> Pair:
    """Sum `sliced_products`, to `sliced_error`."""
    (hi, *exact, last), lo = sliced_products(a, b, levels, xp), 0.0
    for matrix in exact:
        hi, lost = two_sum(hi, matrix)
        lo = lo + lost
    return fast_two_sum(hi, lo + last)


def side_by_side(a: Slices, xp: Any) -> Array:
    """Make the first factor of `sliced_products`: parts, and the last rest."""
    return xp.concat([*a.parts, a.rests[-1]], axis=-1)


def facing(b: Slices, xp: Any) -> tuple[Array, Array]:
    """Make the second factor of `sliced_products`: parts and rests, the last ones first."""
    return xp.concat(b.parts[::-1], axis=-1), xp.concat(b.rests[::-1], axis=-1)


def sliced_error(count: int, bits: int, levels: int) -> float:
    r"""Bound the error of `sliced_products` with inner products of `count` terms.

    In units of the product of the powers of two of both vectors. The last matrix has terms of at
    most :math:`2^{-\mathrm{bits} (\mathrm{levels} - 1)}` of it, times 2 where a whole vector or the
    first slice is a factor, in `levels` products of matrices. Rests hold the lower parts of pairs,
    too, so that they are not taken to be below 2^-51 of it, either.
    """
    terms = count * (levels + 2) * max(2.0 ** (-bits * (levels - 1)), 2.0**-51)
    return higham_gamma(levels * count + 4) * terms
