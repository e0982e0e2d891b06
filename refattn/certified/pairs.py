r"""Pairs of floats, and operations on them of which the errors are known.

A pair (hi, lo) of float64 stands for the number hi + lo, which has some 106 bits. With
:math:`u = 2^{-53}`, and nothing but additions, subtractions and products that are rounded to the
nearest float64:

* `two_sum` and `two_product` give results without error;
* `Slices` cut vectors into slices of a few bits, of which inner products are exact, in any order of
  their sums and with any BLAS: `products` puts those together to a matrix product with a proven
  bound of its error;
* `exponential` is e^x to :math:`2^{-69}` of it.

A compiler that takes (a + b) - a for b, or an accelerator that rounds products more coarsely, would
undo all of this: `failures` tries it.

    Dekker, A floating-point technique for extending the available precision, Numerische Mathematik
    18, 1971. Ogita, Rump and Oishi, Accurate sum and dot product, SIAM Journal on Scientific
    Computing 26(6), 2005. Ozaki, Ogita, Oishi and Rump, Error-free transformations of matrix
    multiplication by using fast routines of matrix multiplication, Numerical Algorithms 59, 2012.
    Tang, Table-driven implementation of the exponential function in IEEE floating-point arithmetic,
    ACM Transactions on Mathematical Software 15(2), 1989.
"""

from __future__ import annotations

import decimal
import math
from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from operator import mul
from typing import Any, NamedTuple

import numpy as np

from ..arrays import checks
from ..arrays.library import Array, array_namespace, constant, device, is_numpy_array, to_host
from ..arrays.shown import held

__all__ = [
    "EXPONENTIAL",
    "ROUNDING",
    "Pair",
    "Slices",
    "add",
    "bits_of_slices",
    "divide",
    "dot",
    "exponential",
    "facing",
    "failures",
    "fast_two_sum",
    "gamma",
    "multiply",
    "pair",
    "power_of_two",
    "product",
    "products",
    "side_by_side",
    "sliced_error",
    "two_product",
    "two_sum",
]

ROUNDING = 2.0**-53  # u: of one operation, relative
EXPONENTIAL = 2.0**-69  # of `exponential`, relative
_TABLE = 256  # powers of 2 ** (1 / 256)
_LOWEST = -700.0  # below it, e^x is taken for 0


@held()
class Pair(NamedTuple):
    """A number to twice the digits of its type: hi + lo.

    Attributes
    ----------
    hi : array
        The number, rounded.
    lo : array, shape of `hi`
        What rounding left.
    """

    hi: Array
    lo: Array


Pair.__module__ = "refattn.certified"  # where users find it, and so do pickles


def pair(x: Array) -> Pair:
    """A pair of numbers that have one part."""
    return Pair(x, array_namespace(x).zeros_like(x))


def two_sum(a: Array, b: Array) -> Pair:
    """a + b = hi + lo, whichever is the larger (Knuth)."""
    hi = a + b
    other = hi - a
    return Pair(hi, (a - (hi - other)) + (b - other))


def fast_two_sum(a: Array, b: Array) -> Pair:
    """a + b = hi + lo, where |a| >= |b| or a = 0 (Dekker)."""
    hi = a + b
    return Pair(hi, b - (hi - a))


def two_product(a: Array, b: Array) -> Pair:
    """a b = hi + lo, unless parts of it are below 2^-1022 or a or b is above 2^995 (Dekker)."""
    hi = a * b
    (a1, a2), (b1, b2) = _halves(a), _halves(b)
    return Pair(hi, ((a1 * b1 - hi) + a1 * b2 + a2 * b1) + a2 * b2)


def _halves(a: Array) -> tuple[Array, Array]:
    """a = a1 + a2 with 26 bits each (Veltkamp)."""
    much = 134217729.0 * a  # 2^27 + 1
    high = much - (much - a)
    return high, a - high


def add(a: Pair, b: Pair) -> Pair:
    """a + b, to 3 u^2 (|a| + |b|)."""
    hi, lo = two_sum(a.hi, b.hi)
    return fast_two_sum(hi, lo + (a.lo + b.lo))


def multiply(a: Pair, b: Pair) -> Pair:
    """a b, to 7 u^2 |a b|."""
    hi, lo = two_product(a.hi, b.hi)
    return fast_two_sum(hi, lo + (a.hi * b.lo + a.lo * b.hi))


def divide(a: Pair, b: Pair) -> Pair:
    """a / b, to 16 u^2 |a / b|."""
    first = a.hi / b.hi
    hi, lo = two_product(first, b.hi)
    rest = ((a.hi - hi) - lo) + (a.lo - first * b.lo)
    return fast_two_sum(first, rest / b.hi)


def dot(a: Pair, b: Pair) -> Pair:
    """a . b along the last axis, to (d + 8) 2^-103 of |a| . |b|."""
    xp = array_namespace(a.hi)
    total = pair(xp.zeros(a.hi.shape[:-1], dtype=a.hi.dtype, device=device(a.hi)))
    for c in range(a.hi.shape[-1]):
        total = add(total, multiply(*(Pair(x.hi[..., c], x.lo[..., c]) for x in (a, b))))
    return total


def gamma(count: int) -> float:
    """Bound of the relative error of sums of so many products, whatever their order (Higham)."""
    return count * ROUNDING / (1 - count * ROUNDING)


def power_of_two(x: Array) -> Array:
    """The power of two at or below |x|, up to 2^970; 0 of 0 (Rump)."""
    xp = array_namespace(x)
    much = (2.0**52 + 1) * x
    return xp.abs(much - (1 - ROUNDING) * much)


def bits_of_slices(count: int, levels: int) -> int:
    """Bits of slices of which sums of so many products have no error.

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
    def of(cls, x: Pair, power: Array | float, bits: int, levels: int) -> Slices:
        """Cut numbers of at most 2 `power` each into `levels` - 1 slices and a rest."""
        parts, rests, rest = [], [x.hi], x.hi
        unit = power * 2.0 ** (1 - bits)
        for _ in range(levels - 1):
            sigma = 1.5 * 2.0**52 * unit
            parts.append((rest + sigma) - sigma)
            rest = rest - parts[-1]
            rests.append(rest + x.lo)
            unit = unit * 2.0**-bits
        rests[0] = array_namespace(x.hi).broadcast_to(x.hi, parts[0].shape)  # as the others
        return cls(parts, rests)


def products(a: Array, b: tuple[Array, Array], levels: int) -> Iterator[Array]:
    r"""Yield matrices of which the sum is a b^T: all without error but the last.

    With the parts :math:`a_t` and the rests :math:`\bar a_t` of both, the matrices are

    .. math::
        \sum_{t \le r} a_t b_{r-t}^\top, \quad r < \mathrm{levels} - 1, \qquad
        \sum_{t < \mathrm{levels} - 1} a_t \bar b_{\mathrm{levels} - 1 - t}^\top
        + \bar a_{\mathrm{levels} - 1} b^\top

    `a` is from `side_by_side` and `b` from `facing`, so that each of them is one matrix product.
    """
    xp = array_namespace(a)
    exact, last = (xp.matrix_transpose(x) for x in b)
    size = a.shape[-1] // levels
    for r in range(levels - 1):
        yield a[..., : (r + 1) * size] @ exact[..., (levels - 2 - r) * size :, :]
    yield a @ last


def product(a: Array, b: tuple[Array, Array], levels: int) -> Pair:
    """The sum of `products`, to `sliced_error`."""
    (hi, *exact, last), lo = products(a, b, levels), 0.0
    for matrix in exact:
        hi, lost = two_sum(hi, matrix)
        lo = lo + lost
    return fast_two_sum(hi, lo + last)


def side_by_side(a: Slices) -> Array:
    """The first factor of `products`: parts, and the last rest."""
    return array_namespace(a.rests[0]).concat([*a.parts, a.rests[-1]], axis=-1)


def facing(b: Slices) -> tuple[Array, Array]:
    """The second factor of `products`: parts and rests, the last ones first."""
    xp = array_namespace(b.rests[0])
    return xp.concat(b.parts[::-1], axis=-1), xp.concat(b.rests[::-1], axis=-1)


def sliced_error(count: int, bits: int, levels: int) -> float:
    r"""Bound of the error of `products` with inner products of `count` terms.

    In units of the product of the powers of two of both vectors. The last matrix has terms of at
    most :math:`2^{-\mathrm{bits} (\mathrm{levels} - 1)}` of it, times 2 where a whole vector or the
    first slice is a factor, in `levels` products of matrices. Rests hold the lower parts of pairs,
    too, so that they are not taken to be below 2^-51 of it, either.
    """
    terms = count * (levels + 2) * max(2.0 ** (-bits * (levels - 1)), 2.0**-51)
    return gamma(levels * count + 4) * terms


def exponential(x: Pair) -> Pair:
    r"""e^x, for x up to 1 with |lo| <= u |hi|, to 2^-69 of it; 0 below -699.

    .. math:: e^x = 2^{\lfloor c / 256 \rfloor} \; 2^{(c \bmod 256) / 256} \; e^r, \qquad
              c = \mathrm{round}(256 x / \ln 2), \quad r = x - c \ln 2 / 256

    The constant ln 2 / 256 has three parts, of which the first two have 34 bits, so that their
    products with c have no error, nor has the first difference. The power of the table has a part
    T of 26 bits, whose product with the first 27 bits of r is exact. Of the rest,
    :math:`r^2 (1/2 + r/6 + \ldots + r^4/720)` has a relative error of 4 u, hence
    :math:`2^{-71}` at most as :math:`|r| \le 2^{-9.5}`; what is left out is below :math:`2^{-78}`;
    and four roundings of numbers below :math:`2^{-19}`, in units of a power of two that is at most
    T, are :math:`2^{-70}` together.
    """
    xp = array_namespace(x.hi)
    of_two, lowest = _powers_of_two()
    first, second, powers = (constant(t, x.hi) for t in (*_powers(), of_two))
    (c1, c2, c3), inverse = _logarithm()
    top = xp.minimum(xp.where(x.hi > _LOWEST, x.hi, _LOWEST), 1.0)  # nan is not above either
    count = xp.round(top * inverse)
    r, rest = two_sum(top - count * c1, -(count * c2))
    rest = rest + (x.lo - count * c3)
    index = xp.astype(count, xp.int64)
    step, power = index & (_TABLE - 1), (index >> 8) - lowest
    t1, t2, scale = (_look_up(t, i) for t, i in ((first, step), (second, step), (powers, power)))
    short = (r + _LONG) - _LONG  # multiples of 2^-36
    tail = 1 / 720 * r + 1 / 120
    for factor in (1 / 24, 1 / 6, 0.5):
        tail = tail * r + factor
    square = r * r
    tail = tail * square + (rest + rest * (r + 0.5 * square))
    high, low = fast_two_sum(t1, t1 * short)
    low = low + (t2 + (t2 * (r + tail) + t1 * ((r - short) + tail)))
    high, low = fast_two_sum(high, low)
    return Pair(high * scale, low * scale)


_LONG = 1.5 * 2.0**52 * 2.0**-36


def _look_up(table: Array, index: Array) -> Array:
    if is_numpy_array(table):
        return table[index]
    xp = array_namespace(table)
    return xp.reshape(xp.take(table, xp.reshape(index, (-1,))), index.shape)


@cache
def _logarithm() -> tuple[tuple[float, float, float], float]:
    """ln 2 / 256 in three parts, of which two have 34 bits, and 256 / ln 2."""
    with decimal.localcontext(prec=80):
        rest, parts = decimal.Decimal(2).ln() / _TABLE, []
        for unit in (2.0**-42, 2.0**-76):
            parts.append(float(int(rest / decimal.Decimal(unit))) * unit)
            rest -= decimal.Decimal(parts[-1])
        return (parts[0], parts[1], float(rest)), float(_TABLE / decimal.Decimal(2).ln())


@cache
def _powers() -> tuple[Any, Any]:
    """2 ** (i / 256) in two parts, of which the first has 26 bits."""
    with decimal.localcontext(prec=50):
        exact = [decimal.Decimal(2) ** (decimal.Decimal(i) / _TABLE) for i in range(_TABLE)]
        first = [float(round(x * 2**25)) / 2**25 for x in exact]
        return np.asarray(first), np.asarray(
            [float(x - decimal.Decimal(y)) for x, y in zip(exact, first, strict=True)]
        )


@cache
def _powers_of_two() -> tuple[Any, int]:
    """Powers of two, the first three of which are taken for 0, and the lowest exponent."""
    lowest = math.floor(_LOWEST / math.log(2)) - 1
    return np.asarray([0.0] * 3 + [2.0**i for i in range(lowest + 3, 3)]), lowest


def failures(like: Array | None, compiled: Any) -> list[str]:
    """`certified.self_test`."""
    like = np.empty(0) if like is None else like
    compiled = (lambda function: function) if compiled is None else compiled
    rng, found = np.random.default_rng(0), []

    def run(function: Any, *arrays: Any) -> Any:
        xp = array_namespace(like)
        given = [xp.asarray(x, dtype=xp.float64, device=device(like)) for x in arrays]
        return [to_host(x) for x in compiled(function)(*given)]

    a, b = (rng.standard_normal(999) * 2.0 ** rng.integers(-40, 40, 999) for _ in range(2))
    exact = [(Fraction(x), Fraction(y)) for x, y in zip(a, b, strict=True)]
    for name, function, wanted in (
        ("sums in pairs", two_sum, [x + y for x, y in exact]),
        ("products in pairs", two_product, [x * y for x, y in exact]),
    ):
        hi, lo = run(function, a, b)
        got = [Fraction(x) + Fraction(y) for x, y in zip(hi, lo, strict=True)]
        if got != wanted:
            found.append(f"{name} have errors")

    d, size = 64, 33
    x, y = (rng.standard_normal((size, d)) for _ in range(2))
    bits, powers = bits_of_slices(d, 3), [np.full((size, 1), 2.0)] * 2

    def sliced(x: Array, y: Array, x_power: Array, y_power: Array) -> list[Array]:
        a, b = (Slices.of(pair(z), p, bits, 3) for z, p in ((x, x_power), (y, y_power)))
        return [*products(side_by_side(a), facing(b), 3), *a.parts]

    *matrices, first, second = run(sliced, x, y, *powers)
    for t, part in enumerate((first, second), 1):
        units = part / (2.0 * 2.0 ** (1 - bits * t))
        if not ((units == np.round(units)).all() and (abs(units) <= 2.0**bits).all()):
            found.append(f"slice {t} has more than its bits")
    inner = [[sum(map(mul, map(Fraction, u), map(Fraction, w))) for w in y] for u in x]
    most = Fraction(4 * sliced_error(d, bits, 3))
    if any(
        abs(sum(Fraction(m[i, j]) for m in matrices) - inner[i][j]) > most
        for i in range(size)
        for j in range(size)
    ):
        found.append("products of matrices have errors that they should not have")

    x = -np.concatenate([np.zeros(1), 2.0 ** rng.uniform(-30, 9, 200)])
    low = x * rng.uniform(-ROUNDING, ROUNDING, x.size)
    hi, lo = run(lambda x, y: exponential(Pair(x, y)), x, low)
    with decimal.localcontext(prec=60):
        decimals = zip(*(map(decimal.Decimal, y.tolist()) for y in (x, low, hi, lo)), strict=True)
        wrong = [abs((p + r) / (z + y).exp() - 1) for z, y, p, r in decimals]
    if not max(wrong) <= EXPONENTIAL:
        found.append(f"e^x is wrong by {float(max(wrong)):.1e} times itself")
    return found


def check_parts(name: str, x: Any) -> None:
    """Check a pair of arrays that stands for their sum."""
    if len(x) != 2:
        raise TypeError(f"`{name}` must be an array or a pair (hi, lo), got {checks.describe(x)}.")
    for part, y in zip(("hi", "lo"), x, strict=True):
        checks.is_array(f"{name}.{part}", y)
        if y.dtype != array_namespace(y).float64:
            raise TypeError(f"`{name}.{part}` must have dtype float64, got {y.dtype}.")
    checks.same_home(f"{name}.lo", x[1], f"{name}.hi", x[0])
    if tuple(x[0].shape) != tuple(x[1].shape):
        raise ValueError(
            f"`{name}.lo` must have the shape of `{name}.hi`, "
            f"got shapes {tuple(x[1].shape)} and {tuple(x[0].shape)}."
        )


def check_double(x: Array, name: str = "q") -> None:
    """Check that numbers fit into float64."""
    if is_numpy_array(x) and x.dtype.itemsize > 8:
        raise TypeError(f"`{name}` must have dtype float32 or float64, got {x.dtype}.")
