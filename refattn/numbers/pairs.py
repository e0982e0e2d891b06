r"""Proven digits of any formula: an array type with the array API, over any library with float64.

`Paired` holds numbers as pairs of float64, hi + lo, with a bound e on their errors: exact numbers
are no further than e from hi + lo. A formula that is called with such arrays returns such arrays.

A formula may use what the array API has of: operators, comparisons; the functions that `PairSpace`
defines; `_MOVERS`, which only move numbers; what creates arrays; indices. Arrays of integers and
booleans are those of the library, and any function of it takes them. Any other function of numbers
is an error that names it. A comparison that errors leave open is a `Truth`: what `where` chooses by
it has no bound.

With :math:`u = 2^{-53}`, an operation adds the bound that its docstring proves to what the errors
of its operands make, and multiplies by :math:`1 + 2^{-40}`, as bounds are computed in float64, by
fewer than :math:`2^{12}` roundings of numbers that are not negative. A result that is not finite
has the bound infinity, unless an operand was infinite without error. Where float64 underflows, the
floor :math:`2^{-1000}` is added, but not to what is exactly 0.

Three things wait until they are needed, so that they take no time:

* ``x[..., None, :] * y[..., None, :, :]``: its sum along the last axis, after a `where` or without,
  is a product of matrices (`products`);
* ``x - t`` with one t for each row: e^(x - t) is e^(x - s) e^(s - t) if e^(x - s) is known;
* that product with one number for each row, in a sum of products.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import cache, partial, reduce
from typing import Any

import numpy as np

from ..arrays.blocks import blocks
from ..arrays.library import Array, array_namespace, is_array_api_obj, is_numpy_array
from .doubled import (
    EXP_ROUNDING,
    FARTHEST,
    Pair,
    add_pairs,
    cos_pair,
    divide_pairs,
    exp_pair,
    log_pair,
    multiply_pairs,
    two_product,
    two_sum,
)
from .paired import SIGNS, Paired, Truth, as_truth, paired
from .products import FLOOR, SAFE, TINY, U2, Bounded, dot, is_something, remembered, sum_rows, tidy

_CACHED = 2**14  # numbers of an array that a cache holds with all that is made of it
_ADDED_IN_TURN = 16  # numbers that are added two by two
_MOVERS = (
    "reshape broadcast_to expand_dims squeeze permute_dims moveaxis swapaxes flip roll repeat tril "
    "triu take take_along_axis"
)
_CREATED = "zeros ones full empty eye zeros_like ones_like full_like empty_like"
_KEPT = (
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float32 float64 inf nan pi e newaxis "
    "isdtype finfo iinfo result_type can_cast __array_namespace_info__"
)


def to_pairs(x: Any, error: Array | None = None) -> Array:
    """Take an array, or a pair of arrays that stands for their sum, with a bound on its error.

    Examples
    --------
    >>> x = to_pairs(np.asarray([1.0, 2.0]))
    >>> bool((x / 3 * 3 - x).e.max() < 2.0**-90)
    True
    """
    parts = x if isinstance(x, tuple) else (x,)
    xp = array_namespace(*parts)
    hi, *lo = (xp.astype(y, xp.float64) for y in parts)
    if lo:
        hi, rest = two_sum(hi, lo[0])
        lo = [xp.where(xp.isfinite(hi), rest, 0.0)]
    unknown = xp.isnan(hi)
    if xp.any(unknown):
        error = xp.where(unknown, math.inf, xp.zeros_like(hi) if error is None else error)
    return paired(hi, *(lo or [None]), error, space=pair_space(xp))


@cache
def pair_space(xp: Any) -> PairSpace:
    """Return the namespace of pairs over one of arrays."""
    return PairSpace(xp)


def _refuse(name: str) -> str:
    return f"A formula in pairs must not use {name}: see refattn.numbers.pairs for what it may."


class PairSpace:
    """The functions of the array API for pairs."""

    def __init__(self, xp: Any) -> None:
        self.x = self.untraced = xp
        self.__name__ = f"pairs over {xp.__name__}"
        self._kept = frozenset(_KEPT.split())
        self._rules: dict[str, Callable[..., Any]] = {
            **dict.fromkeys(_MOVERS.split(), self._move),
            **dict.fromkeys(_CREATED.split(), self._create),
            **dict.fromkeys(SIGNS, self._compare),
        }

    def __getattr__(self, name: str) -> Any:
        if name in self._kept:
            return getattr(self.x, name)
        return partial(self._rules.get(name, self._plain), name)

    def _plain(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a function of integers and booleans."""
        if any(isinstance(x, Paired | Truth) for x in (*args, *kwargs.values())):
            raise TypeError(_refuse(f"`{name}` of numbers"))
        found = getattr(self.x, name)(*args, **kwargs)
        if self._is_floating(found):
            raise TypeError(_refuse(f"`{name}` of integers, whose result is rounded"))
        return found

    def _create(self, name: str, *args: Any, **kwargs: Any) -> Any:
        first = (args[0].hi if isinstance(args[0], Paired) else args[0], *args[1:])
        if any(isinstance(x, Paired) for x in first):
            raise TypeError(_refuse(f"`{name}` with an array for a number"))
        return self.asarray(getattr(self.x, name)(*first, **kwargs))

    def _is_floating(self, x: Any) -> bool:
        plain = is_array_api_obj(x) and not isinstance(x, Paired)
        return plain and bool(self.x.isdtype(x.dtype, "real floating"))

    def asarray(self, x: Any, dtype: Any = None, device: Any = None, copy: Any = None) -> Any:
        """Take numbers as they are, or arrays of integers and booleans."""
        if isinstance(x, Paired | Truth):
            return x
        found = self.x.asarray(x, dtype=dtype, device=device)
        return to_pairs(found) if self._is_floating(found) else found

    def astype(self, x: Any, dtype: Any, copy: bool = True, device: Any = None) -> Any:
        """Make numbers of integers and booleans."""
        floating = self.x.isdtype(dtype, "real floating")
        if not isinstance(x, Paired):
            return to_pairs(x) if floating else self.x.astype(x, dtype)
        if not floating:
            raise TypeError(_refuse(f"`astype` of numbers to {dtype}"))
        return x

    def _numbers(self, *operands: Any) -> list[Any]:
        """Return operands as numbers: those of Python and arrays of integers are exact."""
        home = next((x.device for x in operands if isinstance(x, Paired)), None)
        found = []
        for x in operands:
            if not isinstance(x, Paired):
                if self._is_floating(x) and not isinstance(x, np.generic):
                    raise TypeError(_refuse("an array of floats that is not its own"))
                array = is_array_api_obj(x) and not isinstance(x, np.generic)
                number = x if array else self.x.asarray(float(x), device=home)
                x = paired(self.x.astype(number, self.x.float64), space=self)
            found.append(x)
        return found

    def _move(self, name: str, x: Any, *args: Any, **kwargs: Any) -> Any:
        function: Any = getattr(self.x, name)
        if isinstance(x, Truth):
            return Truth(*(function(y, *args, **kwargs) for y in (x.x, x.doubt)))
        if not isinstance(x, Paired):
            return function(x, *args, **kwargs)
        return x.moved(lambda y: function(y, *args, **kwargs))

    def matrix_transpose(self, x: Any) -> Any:
        """Swap the last two axes; what was made of the numbers is kept."""
        if not isinstance(x, Paired):
            return self._move("matrix_transpose", x)
        if x.of[0] == "turned":
            return x.of[1]
        shape = (*x.shape[:-2], x.shape[-1], x.shape[-2])
        turn = partial(x.moved, self.x.matrix_transpose)
        turned = Paired(lambda: turn().parts, shape, self, "turned", x)
        turned.memo = x.memo.setdefault("turned", {})  # without a circle of references
        return turned

    def broadcast_arrays(self, *arrays: Any) -> list[Any]:
        """Broadcast arrays to one shape."""
        shape = np.broadcast_shapes(*(tuple(x.shape) for x in arrays))
        return [self.broadcast_to(x, shape) for x in arrays]

    def concat(self, arrays: Any, axis: int = 0) -> Any:
        """Join arrays along an axis."""
        if not any(isinstance(x, Paired) for x in arrays):
            return self.x.concat(list(arrays), axis=axis)
        whole = self._numbers(*arrays)
        exact = not any(x.inexact for x in whole)
        columns = zip(*((*x.pair,) if exact else (*x.pair, x.e) for x in whole), strict=True)
        return paired(*(self.x.concat(list(y), axis=axis) for y in columns), space=self)

    def _made(self, pair: Pair, e: Any, rule: Any = None, operands: Any = (), *of: Any) -> Paired:
        """Make a result: where it is not finite, by a rule for numbers that are infinite."""
        (hi, lo), xp = pair, self.x
        if not xp.isfinite(xp.sum(hi)):  # lower parts are finite where these are
            whole = xp.isfinite(hi)
            lo, e = xp.where(whole, lo, 0.0), xp.where(whole, e, math.inf)
            if rule is not None:
                hi = xp.where(whole, hi, rule(*(x.hi for x in operands)))
                infinite = reduce(operator.or_, (xp.isinf(x.hi) for x in operands))
                known = reduce(operator.and_, (x.e < math.inf for x in operands))
                e = xp.where(~whole & infinite & known & xp.isinf(hi), 0.0, e)
        return paired(hi, lo, e, *of, space=self)

    def _floored(self, e: Array, size: Array, there: Array, floor: Any = FLOOR) -> Array:
        """Add the floor where numbers may underflow, unless they are 0."""
        tiny = size < TINY
        return self.x.where(tiny & there, e + floor, e) if self.x.any(tiny) else e

    def negative(self, a: Any) -> Any:
        """Change signs."""
        hi, lo, e = a.parts
        return paired(-hi, -lo, e, space=self)

    def abs(self, a: Any) -> Any:
        """Return magnitudes: errors are at most those of the numbers."""
        return self._signed(a, a) if isinstance(a, Paired) else self.x.abs(a)

    def _signed(self, a: Any, by: Any) -> Any:
        """Change the signs of numbers where others are negative."""
        down, (hi, lo, e) = by.hi < 0, a.parts
        return paired(*(self.x.where(down, -x, x) for x in (hi, lo)), e, space=self)

    def add(self, a: Any, b: Any) -> Any:
        r"""Add, to :math:`5 u^2 (|a| + |b|)`.

        Of `add_pairs`: a.lo + b.lo is rounded by :math:`u^2 (|a| + |b|)`; its sum with what the
        first sum lost, which is at most :math:`2 u (|a| + |b|)`, by twice that; and if that is
        larger than the first sum, the last one, of two numbers below :math:`2 u (|a| + |b|)`, by
        :math:`2 u` of it at most.
        """
        a, b = self._numbers(a, b)
        for x, y in ((a, b), (b, a)):
            alike = np.broadcast_shapes(x.shape, y.shape) == x.shape
            if alike and not y.inexact and not self.x.any(y.hi != 0):
                return x
        e = 6 * U2 * (self.x.abs(a.hi) + self.x.abs(b.hi))
        for x in (a, b):
            e = e + x.e if x.inexact else e
        found = add_pairs(a.pair, b.pair)
        return self._made(found, e * SAFE, operator.add, (a, b), "sum", a, b)

    def subtract(self, a: Any, b: Any) -> Any:
        """Subtract, with the error of `add`; numbers for whole rows wait for what comes next."""
        a, b = self._numbers(a, b)
        of_rows = a.shape[-1:] > b.shape[-1:] == (1,)
        if of_rows and np.broadcast_shapes(a.shape, b.shape) == a.shape:
            whole = partial(self.add, a)
            return Paired(lambda: whole(self.negative(b)).parts, a.shape, self, "shifted", a, b)
        return self.add(a, self.negative(b))

    def multiply(self, a: Any, b: Any) -> Any:
        r"""Multiply, to :math:`9 u^2 |a b|`.

        Of `multiply_pairs`: a.lo b.lo, of at most :math:`u^2`, is left out; the products a.hi b.lo
        and a.lo b.hi are rounded by :math:`u^2` each, their sum by :math:`2 u^2`, and its sum with
        the low part of a.hi b.hi by :math:`3 u^2`. With errors, |x y - a b| is at most
        :math:`|a| e_b + |b| e_a + e_a e_b`.
        """
        a, b = self._numbers(a, b)
        for x, y in ((a, b), (b, a)):
            if x.of[0] == "rows" and y.of[0] == "matrix":
                return self._waiting(partial(self._product, a, b), x.of[1], y.of[1], None)
        return self._product(a, b)

    def _waiting(self, make: Callable[[], Paired], a: Paired, b: Paired, seen: Any) -> Paired:
        """Wait with products of rows by a matrix, of what is seen."""
        lead = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        shape = (*lead, a.shape[-2], b.shape[-2], a.shape[-1])
        return Paired(lambda: make().parts, shape, self, "products", a, b, seen)

    def _product(self, a: Any, b: Any) -> Any:
        xp, found = self.x, multiply_pairs(a.pair, b.pair)
        size = xp.abs(found.hi)
        e = 10 * U2 * size
        if a.inexact:
            e = e + a.e * xp.abs(b.hi)
        if b.inexact:
            e = e + b.e * (xp.abs(a.hi) + a.e)
        e = self._floored(e * SAFE, size, is_something(a) & is_something(b))
        return self._made(found, e, operator.mul, (a, b))

    def divide(self, a: Any, b: Any) -> Any:
        r"""Divide, to :math:`13 u^2 |a / b|`.

        Of `divide_pairs`: with the quotient c of the high parts, a.hi - c b.hi has no error, as for
        any division; a.lo - c b.lo is rounded by :math:`3 u^2 |a|`, and the sum of both by
        :math:`3 u^2 |a|`. It is below :math:`3 u |a|`, so that its division by b.hi, and b.hi
        instead of b, take :math:`3 u^2` each. With errors, |x / y - a / b| is at most
        :math:`(e_a + |a / b| e_b) / (|b| - e_b)`.
        """
        (a, b), xp = self._numbers(a, b), self.x
        found = divide_pairs(a.pair, b.pair)
        size, least = xp.abs(found.hi), xp.abs(b.hi) * (1 - 2.0**-50) - b.e
        some = xp.where(least > 0, least, 1.0)
        e = 14 * U2 * size + xp.where(least > 0, (a.e + size * b.e) / some, math.inf)
        smaller = xp.minimum(size, xp.abs(a.hi) + xp.zeros_like(size))
        e = self._floored(e * SAFE, smaller, is_something(a), FLOOR / some + FLOOR)
        return self._made(found, e)

    def pow(self, a: Any, p: Any) -> Any:
        """Raise to the power 2, 1/2, 1/4, -1/2 or -1/4, by roots and their inverses."""
        rules = {2: lambda x: self.multiply(x, x), 0.5: self.sqrt, -0.5: self.sqrt}
        rules |= dict.fromkeys((0.25, -0.25), lambda x: self.sqrt(self.sqrt(x)))
        if isinstance(p, Paired) or p not in rules:
            raise TypeError(_refuse(f"a power of {p}"))
        found = rules[p](a)
        return found if p > 0 else self.divide(1.0, found)

    def sqrt(self, a: Any) -> Any:
        r"""Take the root, to :math:`23 u^2` of it.

        With y the root in float64, of at most 4 u of relative error, and
        :math:`r = (a - y^2) / (2 y)`, it is y + r but for :math:`r^2 / (2 y) \le 8 u^2 y`. The
        difference is below 10 u a, and two sums round it by :math:`19 u^2 a`; r is divided once,
        by :math:`5 u^2 y`. With an error, :math:`|\sqrt x - \sqrt a|` is at most
        :math:`e / (\sqrt a + \sqrt{a - e})`, and :math:`\sqrt e` for a = 0.
        """
        (a,), xp = self._numbers(a), self.x
        y, there = xp.sqrt(a.hi), a.hi > 0
        hi, lo = two_product(y, y)
        found = two_sum(y, (((a.hi - hi) - lo) + a.lo) / (2 * xp.where(there, y, 1.0)))
        least = a.hi * (1 - 2.0**-50) - a.e
        both = (y + xp.sqrt(xp.where(least > 0, least, 0.0))) * (1 - 2.0**-50)
        e = 24 * U2 * y + xp.where(there, a.e / xp.where(there, both, 1.0), xp.sqrt(a.e))
        return self._made(found, self._floored(e * SAFE, a.hi, there, 2.0**-490))

    def exp(self, a: Any) -> Any:
        r"""Raise e to numbers, to :math:`2^{-69}` of it and :math:`\exp(e_a) - 1 \le e_a + e_a^2`.

        That holds for errors up to 1; larger ones have no bound.
        """
        (a,) = self._numbers(a)
        if a.of[0] != "shifted":
            return self._exp(a)
        _, x, t = a.of
        if "exp" not in x.memo:
            x.memo["exp"] = t, self._by_rows(lambda x, t: self._exp(self.subtract(x, t)), x, t)
        s, known = x.memo["exp"]
        if s is t:
            return known
        # s - t is -r, without the errors of both, if t was made as s + r.
        remembers = t.of[0] == "sum" and t.of[1] is s
        rest = self.negative(t.of[2]) if remembers else self.add(s, self.negative(t))
        if self.x.any(rest.hi > 1):
            return self._exp(a)
        factor = self._exp(rest)
        whole = partial(self._product, known, factor)
        return Paired(lambda: whole().parts, a.shape, self, "scaled", known, factor)

    def _by_rows(self, function: Callable[..., Any], *operands: Any) -> Any:
        """Call a function of rows, of NumPy some rows at a time: they stay in the cache."""
        first = operands[0]
        if not is_numpy_array(first.hi) or first.ndim < 2 or first.size <= _CACHED:
            return function(*operands)
        parts = [np.empty(first.shape) for _ in range(3)]
        for i in blocks(0, first.shape[-2], max(1, _CACHED * first.shape[-2] // first.size)):
            rows = (x[..., i, :] if x.shape[-2:-1] > (1,) else x for x in operands)
            found = function(*rows)
            for part, x in zip(parts, (*found.pair, found.e), strict=True):
                part[..., i, :] = x
        return paired(*parts, space=self)

    def _exp(self, a: Any) -> Any:
        xp, (high, low, wrong) = self.x, a.parts
        relative: Any
        within = a.size > 0 and xp.min(high) >= -600.0 and xp.max(high) <= 709.0  # not of nan
        found, relative = exp_pair(Pair(high, low), xp, within=bool(within)), EXP_ROUNDING
        if wrong is not None:
            relative = relative + wrong * (1 + wrong)
            if not (a.size > 0 and xp.max(wrong) < 1):
                relative = xp.where(wrong < 1, relative, math.inf)
        e = found.hi * (relative * SAFE)
        if within:
            return paired(*found, e, space=self)
        none, unknown = (high == -math.inf) & (a.e < math.inf), xp.isnan(high)
        e = xp.where(high < -600, xp.where(a.e < 1, e + FLOOR, math.inf), e)
        e = xp.where(unknown | (high > 709), math.inf, xp.where(none, 0.0, e))
        return paired(xp.where(unknown, math.nan, found.hi), found.lo, e, space=self)

    def log(self, a: Any) -> Any:
        """Take the logarithm, to the error of `log_pair` and e / (a - e); exactly of 0."""
        (a,), xp = self._numbers(a), self.x
        there, none = a.hi > 0, a.hi == 0
        found, e = log_pair(Pair(xp.where(there, a.hi, 1.0), xp.where(there, a.lo, 0.0)), xp)
        least = a.hi * (1 - 2.0**-50) - a.e
        e = e + xp.where(least > 0, a.e / xp.where(least > 0, least, 1.0), math.inf)
        e = xp.where(none & (a.e == 0), 0.0, e * SAFE)
        hi = xp.where(there, found.hi, xp.where(none, -math.inf, xp.full_like(e, math.nan)))
        return paired(hi, found.lo, e, space=self)

    def cos(self, a: Any) -> Any:
        """Take the cosine, to the error of `cos_pair` and that of the number, or 0 to 1."""
        (a,), xp = self._numbers(a), self.x
        (hi, lo), e = cos_pair(a.pair, xp), (2.0**-69 + a.e) * SAFE
        known = (xp.abs(a.hi) <= FARTHEST) & (e < 1)
        some = xp.isfinite(a.hi)
        hi, lo, e = (xp.where(known, x, y) for x, y in ((hi, 0.0), (lo, 0.0), (e, 1.0)))
        return paired(xp.where(some, hi, math.nan), lo, xp.where(some, e, math.inf), space=self)

    def sin(self, a: Any) -> Any:
        """Take the cosine of what is less by a quarter of a turn, of 106 bits."""
        (a,) = self._numbers(a)
        parts = (math.pi / 2, 6.123233995736766e-17, 2.0**-105)
        quarter = paired(*(self.x.asarray(x, device=a.device) for x in parts), space=self)
        return self.cos(self.add(a, self.negative(quarter)))

    def tanh(self, a: Any) -> Any:
        """Take (1 - e) / (1 + e) with e = exp(-2 |a|), and the sign."""
        (a,) = self._numbers(a)
        fallen = self._exp(self.multiply(self.abs(a), -2.0))
        found = self.divide(self.add(1.0, self.negative(fallen)), self.add(1.0, fallen))
        return self._signed(found, a)

    def maximum(self, a: Any, b: Any) -> Any:
        r"""Take the larger: what may be the larger has part in the bound.

        The difference of two numbers is rounded by :math:`4 u^2` of the larger.
        """
        (a, b), xp = self._numbers(a, b), self.x
        apart, margin = self._apart(a, b)
        first, mine, other = apart >= 0, (*a.pair, a.e), (*b.pair, b.e)
        hi, lo, e = (xp.where(first, x, y) for x, y in zip(mine, other, strict=True))
        either = xp.maximum(e, xp.where(first, b.e, a.e)) + margin
        e = xp.where(xp.abs(apart) * (1 - 2.0**-50) > a.e + b.e + margin, e, either)
        unknown = xp.isnan(apart)
        hi = xp.where(unknown, math.nan, hi)
        return paired(hi, lo, xp.where(unknown, math.inf, e), space=self)

    def _apart(self, a: Any, b: Any) -> tuple[Array, Array]:
        """Return a difference in float64, and a bound on what low parts make it wrong by."""
        xp = self.x
        apart = xp.where(a.hi == b.hi, a.lo - b.lo, (a.hi - b.hi) + (a.lo - b.lo))
        low = (a.lo != 0) | (b.lo != 0)
        return apart, xp.where(low, 8 * U2 * (xp.abs(a.hi) + xp.abs(b.hi)), 0.0 * a.lo)

    def minimum(self, a: Any, b: Any) -> Any:
        """Take the smaller."""
        return self.negative(self.maximum(*map(self.negative, self._numbers(a, b))))

    def logaddexp(self, a: Any, b: Any) -> Any:
        """Take t + log(e^(a - t) + e^(b - t)), for t in float64 near the larger."""
        (a, b), xp = self._numbers(a, b), self.x
        top = xp.where(a.hi < b.hi, b.hi, a.hi)
        t = paired(xp.where(xp.isfinite(top), top, 0.0), space=self)
        terms = (self._exp(self.add(x, self.negative(t))) for x in (a, b))
        return self.add(t, self.log(self.add(*terms)))

    def max(self, x: Any, axis: Any = None, keepdims: bool = False) -> Any:
        r"""Take the largest along an axis: all that may be the largest have part in the bound.

        Differences to it are rounded by :math:`4 u^2` of it at most.
        """
        if not isinstance(x, Paired):
            return self.x.max(x, axis=axis, keepdims=keepdims)
        _check_axis("max", axis)
        xp, (hi, lo, e) = self.x, x.parts
        most = xp.max(hi, axis=axis, keepdims=True)
        below = (hi - xp.where(xp.isfinite(most), most, 0.0)) + lo
        at = xp.argmax(below, axis=axis, keepdims=True)
        own, high, low = (xp.take_along_axis(y, at, axis=axis) for y in (below, hi, lo))
        above = own if e is None else xp.max(below + e, axis=axis, keepdims=True)
        wrong = (above - own) * SAFE + 8 * U2 * xp.abs(most)
        wrong = xp.where(xp.isinf(most) & (wrong != math.inf), 0.0, wrong)
        if not xp.all(xp.isfinite(most)):  # then the first of what is not
            infinite = xp.isinf(most)
            worst = xp.max(x.e, axis=axis, keepdims=True)
            wrong = xp.where(infinite, xp.where(worst < math.inf, 0.0, worst), wrong)
            high, low = xp.where(infinite, most, high), xp.where(infinite, 0.0, low)
            unknown = xp.isnan(most)
            high = xp.where(unknown, math.nan, high)
            wrong = xp.where(unknown, math.inf, wrong)
        found = paired(high, low, wrong, space=self)
        return found if keepdims else self.squeeze(found, axis=axis)

    def mean(self, x: Any, axis: Any = None, keepdims: bool = False) -> Any:
        """Average along an axis."""
        return self.divide(self.sum(x, axis=axis, keepdims=keepdims), float(x.shape[axis]))

    def sum(self, x: Any, axis: Any = None, dtype: Any = None, keepdims: bool = False) -> Any:
        """Add along an axis: by exact sums of slices (`products`), or two by two."""
        if not isinstance(x, Paired):
            return self._plain("sum", x, axis=axis, dtype=dtype, keepdims=keepdims)
        _check_axis("sum", axis)
        axis %= x.ndim
        if axis < x.ndim - 1 or (x.shape[-1] <= _ADDED_IN_TURN and x.of[0] != "products"):
            total = self._add_in_turn(x, axis)
        elif x.of[0] == "products":
            total = self._sum_of_products(*x.of[1:])
        else:
            total = self._total(sum_rows(x, self.x))
        return self.expand_dims(total, axis=axis) if keepdims else total

    def _total(self, terms: list[Bounded]) -> Any:
        return reduce(self.add, [self._made(pair, error) for pair, error in terms])

    def _add_in_turn(self, x: Any, axis: int) -> Any:
        def at(i: slice) -> Any:
            return x[(slice(None),) * axis + (i, ...)]

        if x.shape[axis] == 0:
            shape = x.shape[:axis] + x.shape[axis + 1 :]
            return self.zeros(shape, dtype=self.x.float64, device=x.device)
        while (count := x.shape[axis]) > 1:
            half = count // 2
            both = self.add(at(slice(half)), at(slice(half, 2 * half)))
            x = both if count % 2 == 0 else self.concat([both, at(slice(2 * half, None))], axis)
        return self.squeeze(x, axis=axis)

    def matmul(self, a: Any, b: Any) -> Any:
        """Multiply matrices, by exact products of slices (`products`)."""
        a, b = self._numbers(a, b)
        if min(a.ndim, b.ndim) < 2:
            raise TypeError(_refuse("`matmul` of vectors"))
        if a.shape[-1] == 1:
            return self.multiply(a, b)
        return self._total(dot(a, self.matrix_transpose(b), self.x, more=True))

    def _sum_of_products(self, a: Any, b: Any, seen: Any) -> Any:
        """Sum a_ij b_cj over the j that i sees: what is hidden has no part, nor in the bound."""
        if a.of[0] == "scaled":
            return self.multiply(a.of[2], self._sum_of_products(a.of[1], b, seen))
        xp, a = self.x, a if seen is None else self.where(seen, a, 0.0)
        rows, spoilt, power, nothing = remembered(b, "tidy", lambda: tidy(b, self.where, xp))
        rows = b if rows is None else rows
        if power is not None:
            nothing = nothing | ~xp.any(is_something(a), axis=-1, keepdims=True)
            a = a.moved(lambda x: x * power)
        found = self._total(dot(a, rows, xp, nothing=nothing))
        if spoilt is None:
            return found
        weight = xp.ones_like(a.hi) if seen is None else xp.astype(seen, xp.float64)
        reached = weight @ xp.matrix_transpose(spoilt) > 0
        return self.where(Truth(reached, reached), math.nan, found)

    def where(self, some: Any, a: Any, b: Any) -> Any:
        """Choose between two arrays; without a bound where errors leave open which."""
        (some, doubt), xp = as_truth(some), self.x
        if not any(isinstance(x, Paired | float) for x in (a, b)):
            if doubt is not None:
                raise TypeError(_refuse("`where` to choose integers by numbers"))
            return xp.where(some, a, b)
        if doubt is None and isinstance(a, Paired) and a.of[0] == "products":
            fresh = a.of[3] is None and some.shape[-2:-1] == (1,)
            if fresh and isinstance(b, float) and b == 0:
                whole = partial(self._chosen, some, None, a, b)
                return self._waiting(whole, a.of[1], a.of[2], some[..., 0, :])
        return self._chosen(some, doubt, a, b)

    def _chosen(self, some: Any, doubt: Any, a: Any, b: Any) -> Any:
        xp = self.x
        for x, y, other in ((a, b, ~some), (b, a, some)):
            if doubt is None and isinstance(x, Paired) and not xp.any(other):
                shapes = some.shape, x.shape, getattr(y, "shape", ())
                if np.broadcast_shapes(*shapes) == x.shape:
                    return x  # and what it remembers
        a, b = self._numbers(a, b)
        hi, lo = (xp.where(some, x, y) for x, y in zip(a.pair, b.pair, strict=True))
        if doubt is None:
            e = xp.where(some, a.e, b.e) if a.inexact or b.inexact else None
        else:
            e = xp.where(doubt, math.inf, xp.where(some, a.e, b.e))
            hi = xp.where(doubt, math.nan, hi)
        return paired(hi, lo, e, space=self)

    def _compare(self, name: str, a: Any, b: Any) -> Any:
        """Compare: it is open where the difference is not larger than the errors."""
        function: Any = getattr(operator, SIGNS[name])
        if not (isinstance(a, Paired) or isinstance(b, Paired)):
            return function(a, b)
        (x, y), xp = self._numbers(a, b), self.x
        if isinstance(b, float) and math.isinf(b):
            found, doubt = function(x.hi, b), xp.isnan(x.hi) | ~(x.e < math.inf)
        else:
            apart, margin = self._apart(x, y)
            most = (x.e + y.e) * SAFE + margin
            found = function(apart, 0.0)
            doubt = ~((xp.abs(apart) > most) | (most == 0)) | xp.isnan(apart)
        return Truth(found, doubt) if xp.any(doubt) else found


def _check_axis(name: str, axis: Any) -> None:
    if not isinstance(axis, int):
        raise TypeError(_refuse(f"`{name}` but along one axis"))
