r"""Pairs of floats hi + lo, and operations on them with known rounding errors.

A pair (hi, lo) of float64 stands for the number hi + lo, which has some 106 bits. With
:math:`u = 2^{-53}`, and nothing but additions, subtractions and products that are rounded to the
nearest float64, `two_sum` and `two_product` give results without error, `exp_pair` gives e^x to
:math:`2^{-69}` of it, and `log_pair` and `cos_pair` are right to about :math:`2^{-69}`.
`refattn.certified.self_test` tests that a library and a device compute this as written.

    Dekker, A floating-point technique for extending the available precision, Numerische Mathematik
    18, 1971. Ogita, Rump and Oishi, Accurate sum and dot product, SIAM Journal on Scientific
    Computing 26(6), 2005. Tang, Table-driven implementation of the exponential function in IEEE
    floating-point arithmetic, ACM Transactions on Mathematical Software 15(2), 1989.
"""

from __future__ import annotations

import decimal
import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ..arrays.library import Array, constant, is_numpy_array
from ..arrays.shown import held

ROUNDING = 2.0**-53  # u: of one operation, relative
EXP_ROUNDING = 2.0**-69  # of `exp_pair`, relative
_TABLE = 256  # powers of 2 ** (1 / 256)
_LOWEST, _HIGHEST = -700.0, 709.0  # below, e^x is taken for 0, and above, for e^709
_CIRCLE = 256  # steps of the table of cosines
_PI = "3.14159265358979323846264338327950288419716939937510582097494459230781640628620899862803"
FARTHEST = 8192.0  # of the arguments of `cos_pair`


@held()
class Pair(NamedTuple):
    """A number with twice the precision of its type (double-double for float64): hi + lo.

    Attributes
    ----------
    hi : array
        The number, rounded.
    lo : array, shape of `hi`
        What is left after that rounding.
    """

    hi: Array
    lo: Array


Pair.__module__ = "refattn.certified"  # where users find it, and so do pickles


def as_pair(x: Array, xp: Any) -> Pair:
    """Give numbers of float64 a second part, 0."""
    return Pair(x, xp.zeros_like(x))


def two_sum(a: Array, b: Array) -> Pair:
    """Return a + b = hi + lo, whichever is the larger (Knuth)."""
    hi = a + b
    other = hi - a
    return Pair(hi, (a - (hi - other)) + (b - other))


def fast_two_sum(a: Array, b: Array) -> Pair:
    """Return a + b = hi + lo, where |a| >= |b| or a = 0 (Dekker)."""
    hi = a + b
    return Pair(hi, b - (hi - a))


def two_product(a: Array, b: Array) -> Pair:
    """Return a b = hi + lo, unless parts are below 2^-1022 or a or b is above 2^995 (Dekker)."""
    hi = a * b
    (a1, a2), (b1, b2) = _halves(a), _halves(b)
    return Pair(hi, ((a1 * b1 - hi) + a1 * b2 + a2 * b1) + a2 * b2)


def _halves(a: Array) -> tuple[Array, Array]:
    """Split a = a1 + a2 into 26 bits each (Veltkamp)."""
    much = 134217729.0 * a  # 2^27 + 1
    high = much - (much - a)
    return high, a - high


def add_pairs(a: Pair, b: Pair) -> Pair:
    """Return a + b, to 3 u^2 (|a| + |b|)."""
    hi, lo = two_sum(a.hi, b.hi)
    return fast_two_sum(hi, lo + (a.lo + b.lo))


def multiply_pairs(a: Pair, b: Pair) -> Pair:
    """Return a b, to 7 u^2 |a b|."""
    hi, lo = two_product(a.hi, b.hi)
    return fast_two_sum(hi, lo + (a.hi * b.lo + a.lo * b.hi))


def divide_pairs(a: Pair, b: Pair) -> Pair:
    """Return a / b, to 16 u^2 |a / b|."""
    first = a.hi / b.hi
    hi, lo = two_product(first, b.hi)
    rest = ((a.hi - hi) - lo) + (a.lo - first * b.lo)
    return fast_two_sum(first, rest / b.hi)


def exp_pair(x: Pair, xp: Any, *, within: bool = False) -> Pair:
    r"""Return e^x, for x up to 709 with |lo| <= u |hi|, to 2^-69 of it; 0 below -699.

    If all x are `within` -699 and 709, nothing is replaced.

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
    of_two, lowest = _powers_of_two()
    first, second, powers = (constant(t, x.hi) for t in (*_powers_of_step(), of_two))
    (c1, c2, c3), inverse = _log_of_step()
    top = x.hi
    if not within:
        top = xp.where(x.hi > _LOWEST, x.hi, _LOWEST)  # nan is not above either
        top = xp.where(top < _HIGHEST, top, _HIGHEST)
    count = xp.round(top * inverse)
    r, rest = two_sum(top - count * c1, -(count * c2))
    rest = rest + (x.lo - count * c3)
    index = xp.astype(count, xp.int64)
    step, power = index & (_TABLE - 1), (index >> 8) - lowest
    t1, t2, scale = (
        _look_up(t, i, xp) for t, i in ((first, step), (second, step), (powers, power))
    )
    short = (r + _TO_2_36) - _TO_2_36  # multiples of 2^-36
    tail = 1 / 720 * r + 1 / 120
    for factor in (1 / 24, 1 / 6, 0.5):
        tail = tail * r + factor
    square = r * r
    tail = tail * square + (rest + rest * (r + 0.5 * square))
    high, low = fast_two_sum(t1, t1 * short)
    low = low + (t2 + (t2 * (r + tail) + t1 * ((r - short) + tail)))
    high, low = fast_two_sum(high, low)
    return Pair(high * scale, low * scale)


_TO_2_36 = 1.5 * 2.0**52 * 2.0**-36  # added and subtracted, it rounds to multiples of 2^-36


def _look_up(table: Array, index: Array, xp: Any) -> Array:
    if is_numpy_array(table):
        return table[index]
    return xp.reshape(xp.take(table, xp.reshape(index, (-1,))), index.shape)


@cache
def _log_of_step() -> tuple[tuple[float, float, float], float]:
    """Return ln 2 / 256 in three parts, and 256 / ln 2."""
    with decimal.localcontext(prec=80):
        step = decimal.Decimal(2).ln() / _TABLE
        return _in_three_parts(step, -42), float(1 / step)


def _in_three_parts(step: decimal.Decimal, unit: int) -> tuple[float, float, float]:
    """Cut a step into two parts of 34 bits, the first in units of 2^unit, and a rest."""
    rest, parts = step, []
    for bits in (unit, unit - 34):
        parts.append(float(int(rest / decimal.Decimal(2.0**bits))) * 2.0**bits)
        rest -= decimal.Decimal(parts[-1])
    return parts[0], parts[1], float(rest)


@cache
def _powers_of_step() -> tuple[Any, Any]:
    """Return 2 ** (i / 256) in two parts, of which the first has 26 bits."""
    with decimal.localcontext(prec=50):
        exact = [decimal.Decimal(2) ** (decimal.Decimal(i) / _TABLE) for i in range(_TABLE)]
        first = [float(round(x * 2**25)) / 2**25 for x in exact]
        return np.asarray(first), np.asarray(
            [float(x - decimal.Decimal(y)) for x, y in zip(exact, first, strict=True)]
        )


@cache
def _powers_of_two() -> tuple[Any, int]:
    """Return a table of powers of two, whose first three are 0, and its lowest exponent."""
    lowest = math.floor(_LOWEST / math.log(2)) - 1
    return np.asarray([0.0] * 3 + [2.0**i for i in range(lowest + 3, 1024)]), lowest


def log_pair(x: Pair, xp: Any) -> tuple[Pair, Array]:
    r"""Return log x, for x in [2^-1000, 2^1000], and a bound on its error.

    With y = log x in float64, whatever its error, and :math:`r = x e^{-y} - 1`,

    .. math:: \log x = y + \log(1 + r) = y + r - r^2 / 2 + \ldots

    The relative error of :math:`e^{-y}` is below :math:`2^{-69}`, as is then the error of r but for
    the :math:`9 u^2` of the product; what is left out is below :math:`|r|^3 / 2` for |r| < 1/2;
    r^2 / 2 is rounded three times; and y is added with :math:`3 u^2 (|y| + |r|)`.
    """
    y = xp.log(x.hi)
    product = multiply_pairs(x, exp_pair(as_pair(-y, xp), xp))
    hi, lo = two_sum(product.hi, xp.full_like(y, -1.0))
    hi, lo = two_sum(hi, lo + product.lo)
    size = xp.abs(hi)
    found = add_pairs(as_pair(y, xp), Pair(hi, lo - 0.5 * hi * hi))
    error = 2.0**-68.9 + size * size * (size + 4 * ROUNDING) + 2.0**-104 * (1 + xp.abs(y))
    return found, xp.where((size < 0.5) & (xp.abs(y) < 690), error, math.inf)


def cos_pair(x: Pair, xp: Any) -> Pair:
    r"""Return cos x, for |x| up to `FARTHEST` with |lo| <= u |hi|, to 2^-69.

    .. math:: \cos x = \cos a + (\cos a \, (\cos r - 1) - \sin a \, \sin r), \qquad
              a = c \pi / 128, \quad r = x - a

    with c a whole number, so that :math:`|r| \le 2^{-6.3}`. As in `exp_pair`, the step has three
    parts, and :math:`|c| < 2^{19}`. Of sin r, the part :math:`-r^3/6 + r^5/120 - r^7/5040` is
    below :math:`2^{-21}` and rounded at most 8 times, hence :math:`2^{-71}`, and what is left out
    is below :math:`2^{-75}`; of cos r, :math:`r^4/24 - \ldots` is below :math:`2^{-29}`. Products
    and sums of pairs add less than :math:`2^{-100}`.
    """
    (c1, c2, c3), inverse, *tables = _circle()
    count = xp.round(xp.where(xp.abs(x.hi) <= FARTHEST, x.hi, 0.0) * inverse)
    r, rest = two_sum(x.hi - count * c1, -(count * c2))
    r, rest = two_sum(r, rest + (x.lo - count * c3))
    index = xp.astype(count, xp.int64) & (_CIRCLE - 1)
    cos1, cos2, sin1, sin2 = (_look_up(constant(t, x.hi), index, xp) for t in tables)
    square, lost = two_product(r, r)
    tail = square * r * (square * (1 / 120 - square / 5040) - 1 / 6)
    sine = fast_two_sum(r, tail + (rest - 0.5 * rest * square))
    tail = square * square * (1 / 24 - square * (1 / 720 - square / 40320))
    less = fast_two_sum(-0.5 * square, tail - (0.5 * lost + r * rest))
    cos, sin = Pair(cos1, cos2), Pair(sin1, sin2)
    fallen = multiply_pairs(sin, sine)
    turned = add_pairs(multiply_pairs(cos, less), Pair(-fallen.hi, -fallen.lo))
    return add_pairs(cos, turned)


@cache
def _circle() -> tuple[Any, ...]:
    """Return pi / 128 in three parts, 128 / pi, and pairs of cosines and sines of its multiples."""
    with decimal.localcontext(prec=80):
        step = decimal.Decimal(_PI) / (_CIRCLE // 2)
        of_step, term = [decimal.Decimal(0)] * 2, decimal.Decimal(1)
        for k in range(60):  # the series of cosine and sine
            of_step[k % 2] += term if k % 4 < 2 else -term
            term = term * step / (k + 1)
        exact, (c, s) = [(decimal.Decimal(1), decimal.Decimal(0))], of_step
        for _ in range(_CIRCLE - 1):
            cos, sin = exact[-1]
            exact.append((cos * c - sin * s, sin * c + cos * s))
        parts = [(float(x), float(x - decimal.Decimal(float(x)))) for y in exact for x in y]
        tables = np.asarray(parts).reshape(_CIRCLE, 4).T
        return _in_three_parts(step, -39), float(1 / step), *np.ascontiguousarray(tables)
