r"""Proven digits of any formula: an array type with the array API, over any library with float64.

`Paired` holds numbers as pairs of float64, hi + lo, with a bound e on their errors: the exact number
is no further than e from hi + lo. A formula that is called with such arrays returns such arrays.

A formula may use what the array API has of: operators and comparisons; the functions in `_ONE` and
`_TWO`, and powers of 2, 1/2, -1/2, 1/4 and -1/4; `_MOVES`, which only move numbers; `matmul`, `sum`,
`mean`, `max`, `where`, `concat`, `astype`; what creates arrays; indices of integers, slices, `None`
and `...`. Arrays of integers and booleans are those of the library, and any function of it takes
them. Any other function of numbers is an error that names it. A comparison that errors leave open
is a `Truth`: what `where` chooses by it has no bound.

Errors. With :math:`u = 2^{-53}`, an operation adds the bound that its docstring proves to what the
errors of its operands make, and the sum is multiplied by :math:`1 + 2^{-40}`, as it is computed in
float64 of numbers that are not negative, by fewer than :math:`2^{12}` roundings. Where a result is
not finite, e is infinity, unless an operand was infinite itself and without error. Where numbers of
float64 underflow, the floor :math:`2^{-1000}` is added; numbers of which the exact value is known
to be 0 have no error, and zeros hide what they are multiplied with in `sum` of a product.

Three things are not computed before they are needed, so that they take no time:

* products ``x[..., None, :] * y[..., None, :, :]``, whose sum along the last axis, after a `where`
  or without, is a product of matrices, of exact products of slices (`slices`);
* ``x - t`` with one t for each row: e^(x - t) is e^(x - s) e^(s - t) if e^(x - s) is known;
* that product with one number for each row, in sums along rows.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import cache, partial, reduce
from typing import Any

import numpy as np

from ..arrays.blocks import blocks
from ..arrays.library import Array, array_namespace, device, is_array_api_obj, is_numpy_array
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
from .slices import (
    Slices,
    bits_of_slices,
    facing,
    power_of_two,
    side_by_side,
    sliced_error,
    sliced_product,
)

U2 = 2.0**-106  # u^2
SAFE = 1 + 2.0**-40  # for roundings of bounds
FLOOR = 2.0**-1000  # of what underflows
SPAN = 1024  # numbers whose sum is one product of slices
_TINY = 2.0**-900  # products and quotients below it may underflow
_ENOUGH = 2.0**-66  # error of a product of matrices that more slices would not lessen
_APART = 2.0**6  # sizes of rows that sums of products balance
_CACHED = 2**14  # numbers of arrays that a cache holds, and all that they are made of
_FEW = 16  # numbers that are added in turn, not by a product of slices


class Paired:
    """An array of numbers hi + lo, each to within e; an e of None is 0."""

    __slots__ = ("_make", "_parts", "memo", "of", "shape", "xp")
    __array_ufunc__ = None  # NumPy leaves operators to this class

    def __init__(
        self, make: Callable[[], tuple[Any, Any, Any]], shape: Any, xp: Any, of: Any = ("",)
    ) -> None:
        self._make, self._parts, self.shape, self.xp = make, None, tuple(shape), xp
        self.of, self.memo = of, dict[Any, Any]()

    @property
    def parts(self) -> tuple[Any, Any, Any]:
        """hi, lo and e, once they are needed."""
        if self._parts is None:
            self._parts = self._make()
        return self._parts

    hi = property(lambda self: self.parts[0])
    lo = property(lambda self: self.parts[1])
    pair = property(lambda self: Pair(*self.parts[:2]))
    untraced = property(lambda self: self.hi)
    ndim = property(lambda self: len(self.shape))
    size = property(lambda self: math.prod(self.shape))
    dtype = property(lambda self: self.xp.float64)

    @property
    def device(self) -> Any:
        """Where the numbers are, or will be."""
        return device(self.hi) if self._parts is not None else self.of[1].device

    @property
    def e(self) -> Any:
        """The bound on errors, an array."""
        return self.parts[2] if self.parts[2] is not None else self.xp.zeros_like(self.hi)

    def __array_namespace__(self, api_version: str | None = None) -> Space:
        return space(self.xp)

    def __getitem__(self, index: Any) -> Paired:
        if index == (..., None, slice(None)):
            shape, of = (*self.shape[:-1], 1, *self.shape[-1:]), ("rows", self)
        elif index == (..., None, slice(None), slice(None)):
            shape, of = (*self.shape[:-2], 1, *self.shape[-2:]), ("matrix", self)
        else:
            return _paired(*(x if x is None else x[index] for x in self.parts), self.xp)
        taken = lambda: tuple(x if x is None else x[index] for x in self.parts)
        return Paired(taken, shape, self.xp, of)

    def __len__(self) -> int:
        return int(self.shape[0])

    def __repr__(self) -> str:
        return f"Paired({self.hi!r}, {self.lo!r}, {self.e!r})"

    __hash__ = object.__hash__


class Truth:
    """What a comparison says, and where errors leave it open."""

    __slots__ = ("doubt", "x")
    __array_ufunc__ = None

    def __init__(self, x: Array, doubt: Array) -> None:
        self.x, self.doubt = x, doubt

    def _with(self, function: Callable[..., Array], other: Any) -> Truth:
        x, doubt = _truth(other)
        return Truth(function(self.x, x), self.doubt | doubt)

    def __and__(self, other: Any) -> Truth:
        return self._with(operator.and_, other)

    def __or__(self, other: Any) -> Truth:
        return self._with(operator.or_, other)

    def __invert__(self) -> Truth:
        return Truth(~self.x, self.doubt)

    def __getitem__(self, index: Any) -> Truth:
        return Truth(self.x[index], self.doubt[index])

    __rand__, __ror__ = __and__, __or__


def _truth(x: Any) -> tuple[Any, Any]:
    return (x.x, x.doubt) if isinstance(x, Truth) else (x, False)


def _paired(hi: Array, lo: Any, e: Any, xp: Any, of: Any = ("",)) -> Paired:
    """Make an array of parts that broadcast to `hi`."""
    shape = tuple(hi.shape)
    if lo is None:
        lo = xp.zeros_like(hi)
    lo, e = (
        x if x is None or tuple(x.shape) == shape else xp.broadcast_to(x, shape) for x in (lo, e)
    )
    made = Paired(lambda: (hi, lo, e), shape, xp, of)
    made._parts = hi, lo, e
    return made


def given(x: Any, error: Array | None = None) -> Paired:
    """Take an array, or a pair of arrays that stands for their sum, with a bound on its error.

    Examples
    --------
    >>> x = given(np.asarray([1.0, 2.0]))
    >>> bool((x / 3 * 3 - x).e.max() < 2.0**-100)
    True
    """
    whole = x if isinstance(x, tuple) else (x,)
    xp = array_namespace(*whole)
    parts = [xp.astype(y, xp.float64) for y in whole]
    hi, lo = two_sum(*parts) if len(parts) == 2 else (parts[0], None)
    if lo is not None:
        lo = xp.where(xp.isfinite(hi), lo, 0.0)
    unknown = xp.isnan(hi)
    if xp.any(unknown):
        error = xp.where(unknown, math.inf, 0.0 if error is None else error)
    return _paired(hi, lo, error, xp)


@cache
def space(xp: Any) -> Space:
    """Return the namespace of pairs over one of arrays."""
    return Space(xp)


# Functions of one number and of two, by methods of `Space`.
_ONE = "negative positive abs square sqrt exp log cos sin tanh"
_TWO = "add subtract multiply divide pow maximum minimum logaddexp"
_COMPARED = "equal not_equal less less_equal greater greater_equal"
_MOVES = (
    "reshape broadcast_to expand_dims squeeze permute_dims moveaxis swapaxes flip roll repeat tril "
    "triu take take_along_axis"
)
_CREATED = "zeros ones full empty eye arange linspace"
_LIKE = "zeros_like ones_like full_like empty_like"
_SAME = (
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float32 float64 inf nan pi e newaxis "
    "isdtype finfo iinfo result_type can_cast __array_namespace_info__"
)


def _say(name: str) -> str:
    return f"A formula in pairs must not use {name}: see refattn.numbers.pairs for what it may."


class Space:
    """The functions of the array API for pairs."""

    def __init__(self, xp: Any) -> None:
        self.x = self.untraced = xp
        self.__name__ = f"pairs over {xp.__name__}"

    def __getattr__(self, name: str) -> Any:
        if name in _SAME.split():
            return getattr(self.x, name)
        if name in _MOVES.split():
            found = partial(self._move, name)
        elif name in _COMPARED.split():
            found = partial(self._compare, name)
        elif name in (*_CREATED.split(), *_LIKE.split()):
            found = partial(self._create, name)
        else:
            found = partial(self._plain, name)
        setattr(self, name, found)
        return found

    def _plain(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a function of integers and booleans."""
        if any(isinstance(x, Paired | Truth) for x in (*args, *kwargs.values())):
            raise TypeError(_say(f"`{name}` of numbers"))
        found = getattr(self.x, name)(*args, **kwargs)
        if is_array_api_obj(found) and self.x.isdtype(found.dtype, "real floating"):
            raise TypeError(_say(f"`{name}` of integers, whose result is rounded"))
        return found

    def _create(self, name: str, *args: Any, **kwargs: Any) -> Any:
        args = tuple(x.hi if isinstance(x, Paired) else x for x in args)
        found = getattr(self.x, name)(*args, **kwargs)
        return self.asarray(found)

    def asarray(self, x: Any, dtype: Any = None, device: Any = None, copy: Any = None) -> Any:
        """Take numbers as they are, or arrays of integers and booleans."""
        if isinstance(x, Paired | Truth):
            return x
        found = self.x.asarray(x, dtype=dtype, device=device)
        if self.x.isdtype(found.dtype, "real floating"):
            return _paired(self.x.astype(found, self.x.float64), None, None, self.x)
        return found

    def astype(self, x: Any, dtype: Any, copy: bool = True, device: Any = None) -> Any:
        """Make numbers of integers and booleans."""
        if isinstance(x, Truth):
            x = self.where(x, self.ones(()), 0.0)
        if isinstance(x, Paired):
            if not self.isdtype(dtype, "real floating"):
                raise TypeError(_say(f"`astype` of numbers to {dtype}"))
            return x
        if self.isdtype(dtype, "real floating"):
            return _paired(self.x.astype(x, self.x.float64), None, None, self.x)
        return self.x.astype(x, dtype)

    def number(self, x: Any, device: Any = None) -> Paired:
        """Return an operand as numbers: those of Python and arrays of integers are exact."""
        if isinstance(x, Paired):
            return x
        if is_array_api_obj(x) and not isinstance(x, np.generic):
            if self.isdtype(x.dtype, "real floating"):
                raise TypeError(_say("an array of floats that is not its own"))
            return _paired(self.x.astype(x, self.x.float64), None, None, self.x)
        number = self.x.asarray(float(x), dtype=self.x.float64, device=device)
        return _paired(number, None, None, self.x)

    def _numbers(self, *operands: Any) -> list[Paired]:
        """Return operands on the device of the first array."""
        home = next((x.device for x in operands if isinstance(x, Paired)), None)
        return [x if isinstance(x, Paired) else self.number(x, home) for x in operands]

    def _move(self, name: str, x: Any, *args: Any, **kwargs: Any) -> Any:
        function: Any = getattr(self.x, name)
        if isinstance(x, Truth):
            return Truth(*(function(y, *args, **kwargs) for y in (x.x, x.doubt)))
        if not isinstance(x, Paired):
            return function(x, *args, **kwargs)
        return _paired(*(y if y is None else function(y, *args, **kwargs) for y in x.parts), self.x)

    def matrix_transpose(self, x: Any) -> Any:
        """Swap the last two axes."""
        if not isinstance(x, Paired):
            return self._move("matrix_transpose", x)

        if x.of[0] == "turned":
            return x.of[1]
        return self._remembered(x, "turned", self._turn)

    def _turn(self, x: Paired) -> Paired:
        def turned() -> tuple[Any, ...]:
            return tuple(y if y is None else self.x.matrix_transpose(y) for y in x.parts)

        shape = (*x.shape[:-2], x.shape[-1], x.shape[-2])
        return Paired(turned, shape, self.x, ("turned", x))

    def broadcast_arrays(self, *arrays: Any) -> list[Any]:
        """Broadcast arrays to one shape."""
        shape = np.broadcast_shapes(*(tuple(x.shape) for x in arrays))
        return [self.broadcast_to(x, shape) for x in arrays]

    def concat(self, arrays: Any, axis: int = 0) -> Any:
        """Join arrays along an axis."""
        if not any(isinstance(x, Paired) for x in arrays):
            return self.x.concat(list(arrays), axis=axis)
        whole = [x.parts for x in map(self.number, arrays)]
        if all(x[2] is None for x in whole):
            whole = [x[:2] for x in whole]
        else:
            whole = [x if x[2] is not None else (*x[:2], self.x.zeros_like(x[0])) for x in whole]
        parts = [self.x.concat(list(y), axis=axis) for y in zip(*whole, strict=True)]
        return _paired(*parts[:2], parts[2] if len(parts) > 2 else None, self.x)

    def stack(self, arrays: Any, axis: int = 0) -> Any:
        """Join arrays along a new axis."""
        return self.concat([self.expand_dims(x, axis=axis) for x in arrays], axis=axis)

    def _made(
        self, pair: Pair, e: Any, rule: Any = None, *operands: Paired, of: Any = ("",)
    ) -> Paired:
        """Make a result: where it is not finite, by a rule for numbers that are infinite."""
        (hi, lo), xp = pair, self.x
        if not xp.isfinite(xp.sum(hi)):  # lower parts are finite where these are
            whole = xp.isfinite(hi)
            lo = xp.where(whole, lo, 0.0)
            e = xp.where(whole, xp.zeros_like(hi) if e is None else e, math.inf)
            if rule is not None:
                hi = xp.where(whole, hi, rule(*(x.hi for x in operands)))
                infinite = reduce(operator.or_, (xp.isinf(x.hi) for x in operands))
                known = reduce(operator.and_, (x.e < math.inf for x in operands))
                e = xp.where(~whole & infinite & known & xp.isinf(hi), 0.0, e)
        return _paired(hi, lo, e, xp, of)

    def negative(self, a: Any) -> Any:
        """Change signs."""
        hi, lo, e = self.number(a).parts
        return _paired(-hi, -lo, e, self.x)

    def positive(self, a: Any) -> Any:
        """Return the numbers."""
        return a

    def abs(self, a: Any) -> Any:
        """Return magnitudes: errors are at most those of the numbers."""
        if not isinstance(a, Paired):
            return self.x.abs(a)
        hi, lo, e = a.parts
        down = hi < 0
        return _paired(self.x.where(down, -hi, hi), self.x.where(down, -lo, lo), e, self.x)

    def add(self, a: Any, b: Any) -> Any:
        r"""Add, to :math:`5 u^2 (|a| + |b|)`.

        Of `add_pairs`: a.lo + b.lo is rounded by :math:`u^2 (|a| + |b|)`; its sum with what the
        first sum lost, which is at most :math:`2 u (|a| + |b|)`, by twice that; and if that is
        larger than the first sum, the last one, of two numbers below :math:`2 u (|a| + |b|)`, by
        :math:`2 u` of it at most. What was added to a number for each row is remembered.
        """
        a, b = self._numbers(a, b)
        for x, y in ((a, b), (b, a)):
            if y.parts[2] is None and np.broadcast_shapes(x.shape, y.shape) == x.shape:
                if not self.x.any(y.hi != 0):
                    return x
        found = add_pairs(a.pair, b.pair)
        e = 6 * U2 * (self.x.abs(a.hi) + self.x.abs(b.hi))
        return self._made(found, _plus(e, a, b), operator.add, a, b, of=("sum", a, b))

    def subtract(self, a: Any, b: Any) -> Any:
        """Subtract, with the error of `add`; numbers for whole rows wait for what comes next."""
        a, b = self._numbers(a, b)
        shape = np.broadcast_shapes(a.shape, b.shape)
        if shape == a.shape and b.shape[-1:] == (1,) != a.shape[-1:]:
            return Paired(
                lambda: self.add(a, self.negative(b)).parts, shape, self.x, ("shifted", a, b)
            )
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
                shape = np.broadcast_shapes(x.shape, y.shape)
                whole = partial(self._product, a, b)
                return Paired(
                    lambda: whole().parts, shape, self.x, ("outer", x.of[1], y.of[1], None)
                )
        return self._product(a, b)

    def _product(self, a: Paired, b: Paired) -> Paired:
        xp = self.x
        found = multiply_pairs(a.pair, b.pair)
        size = xp.abs(found.hi)
        e = 10 * U2 * size
        if a.parts[2] is not None:
            e = e + a.e * xp.abs(b.hi)
        if b.parts[2] is not None:
            e = e + b.e * (xp.abs(a.hi) + a.e)
        e = self._floored(e * SAFE, size, (a.hi != 0) & (b.hi != 0))
        return self._made(found, e, operator.mul, a, b)

    def _floored(self, e: Array, size: Array, there: Array, floor: Any = FLOOR) -> Array:
        """Add the floor where numbers may underflow, unless they are 0."""
        tiny = size < _TINY
        return self.x.where(tiny & there, e + floor, e) if self.x.any(tiny) else e

    def square(self, a: Any) -> Any:
        """Multiply by itself."""
        return self.multiply(a, a)

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
        size, least = xp.abs(found.hi), xp.abs(b.hi) * (1 - 2.0**-50)
        e = 14 * U2 * size
        if a.parts[2] is not None or b.parts[2] is not None:
            least = least - b.e
            inherited = (a.e + size * b.e) / xp.where(least > 0, least, 1.0)
            e = e + xp.where(least > 0, inherited, math.inf)
        some = xp.where(least > 0, least, 1.0)
        e = self._floored(e * SAFE, xp.minimum(size, xp.abs(a.hi)), a.hi != 0, FLOOR / some + FLOOR)
        return self._made(found, e)

    def pow(self, a: Any, p: Any) -> Any:
        """Raise to the power 2, 1/2, 1/4, -1/2 or -1/4, by roots and their inverses."""
        known = {2: self.square, 0.5: self.sqrt, 0.25: lambda x: self.sqrt(self.sqrt(x))}
        if isinstance(p, Paired) or abs(p) not in known or p == -2:
            raise TypeError(_say(f"a power of {p}"))
        found = known[abs(p)](a)
        return found if p > 0 else self.divide(1.0, found)

    def sqrt(self, a: Any) -> Any:
        r"""Take the root, to :math:`16 u^2` of it.

        With y the root in float64, of at most 4 u of relative error, and
        :math:`r = (a - y^2) / (2 y)`, it is y + r but for :math:`r^2 / (2 y)`, of at most
        :math:`8 u^2 y`; r is below :math:`4 u y` and is rounded twice, after a difference to
        :math:`3 u^2 y`. With an error, :math:`|\sqrt x - \sqrt a|` is at most
        :math:`e / \sqrt{a - e}`.
        """
        (a,), xp = self._numbers(a), self.x
        y = xp.sqrt(a.hi)
        hi, lo = two_product(y, y)
        there = a.hi > 0
        some = xp.where(there, y, 1.0)
        found = two_sum(y, (((a.hi - hi) - lo) + a.lo) / (2 * some))
        least = a.hi * (1 - 2.0**-50) - a.e
        e = 24 * U2 * y + xp.where(a.e > 0, a.e / xp.sqrt(xp.where(least > 0, least, 0.0)), 0.0)
        e = self._floored(e * SAFE, a.hi, there, 2.0**-490)
        return self._made(found, xp.where(a.hi < 0, math.inf, e))

    def exp(self, a: Any) -> Any:
        r"""Raise e to numbers, to :math:`2^{-69}` of it and e^e - 1 <= e + e^2 for e up to 1."""
        (a,) = self._numbers(a)
        if a.of[0] != "shifted":
            return self._exp(a)
        x, t = a.of[1:]
        if "exp" not in x.memo:
            x.memo["exp"] = t, self._by_rows(lambda x, t: self._exp(self.subtract(x, t)), x, t)
        s, known = x.memo["exp"]
        if s is t:
            return known
        # s - t = -r without an error if t was made as s + r.
        remembered = t.of[0] == "sum" and t.of[1] is s
        rest = self.negative(t.of[2]) if remembered else self.add(s, self.negative(t))
        if self.x.any(rest.hi > 1):
            return self._exp(a)
        factor = self._exp(rest)
        return Paired(
            lambda: self._product(known, factor).parts, a.shape, self.x, ("scaled", known, factor)
        )

    def _by_rows(self, function: Callable[..., Paired], *operands: Paired) -> Paired:
        """Call a function of rows, of NumPy some rows at a time: they stay in the cache."""
        first = operands[0]
        if not is_numpy_array(first.hi) or first.ndim < 2 or first.size <= _CACHED:
            return function(*operands)
        parts = [np.empty(first.shape) for _ in range(3)]
        for i in blocks(0, first.shape[-2], max(1, _CACHED * first.shape[-2] // first.size)):
            rows = (x[..., i, :] if x.shape[-2:-1] > (1,) else x for x in operands)
            found = function(*rows)
            for part, x in zip(parts, (found.hi, found.lo, found.e), strict=True):
                part[..., i, :] = x
        return _paired(*parts, self.x)

    def _exp(self, a: Paired) -> Paired:
        xp = self.x
        high, low, wrong = a.parts
        found = exp_pair(Pair(high, low), xp)
        relative = EXP_ROUNDING * SAFE
        if wrong is not None:
            relative = relative + wrong * (1 + wrong)
            if not xp.all(wrong < 1):
                relative = xp.where(wrong < 1, relative, math.inf)
        e = found.hi * (relative * SAFE)
        if high.size == 0 or (xp.min(high) >= -600.0 and xp.max(high) <= 709.0):  # not of nan
            return _paired(*found, e, xp)
        none, unknown = high == -math.inf, xp.isnan(high)
        e = xp.where(high < -600, e + FLOOR, e)
        if wrong is not None:
            e = xp.where((high < -600) & ~(wrong < 1), math.inf, e)
        e = xp.where(none & (a.e < math.inf), 0.0, e)
        e = xp.where(unknown | (high > 709), math.inf, e)
        found = Pair(xp.where(unknown, math.nan, found.hi), xp.where(unknown, 0.0, found.lo))
        return _paired(*found, e, xp)

    def log(self, a: Any) -> Any:
        """Take the logarithm, to the error of `log_pair` and e / (a - e); exactly of 0."""
        (a,), xp = self._numbers(a), self.x
        high, low, wrong = a.parts
        there = high > 0
        some = Pair(xp.where(there, high, 1.0), xp.where(there, low, 0.0))
        found, e = log_pair(some, xp)
        if wrong is not None:
            least = high * (1 - 2.0**-50) - wrong
            e = e + xp.where(least > 0, wrong / xp.where(least > 0, least, 1.0), math.inf)
        if xp.all(there):
            return self._made(found, e * SAFE)
        none = (high == 0) & (a.e == 0)
        hi = xp.where(there, found.hi, xp.where(high == 0, -math.inf, math.nan))
        return _paired(hi, found.lo, xp.where(none, 0.0, xp.where(there, e, math.inf)), xp)

    def cos(self, a: Any) -> Any:
        """Take the cosine, to the error of `cos_pair` and that of the number, and 2 at most."""
        (a,), xp = self._numbers(a), self.x
        e = 2.0**-69 + a.e
        e = xp.where((xp.abs(a.hi) <= FARTHEST) & (e < 2), e * SAFE, 2.0)
        found = cos_pair(a.pair, xp)
        unknown = ~xp.isfinite(a.hi)
        hi = xp.where(unknown, math.nan, found.hi)
        return _paired(hi, found.lo, xp.where(unknown, math.inf, e), xp)

    def sin(self, a: Any) -> Any:
        """Take the sine: the cosine of what is less by a quarter of a turn, of 106 bits."""
        (a,), xp = self._numbers(a), self.x
        quarter = _paired(
            *(xp.asarray(x, device=a.device) for x in (math.pi / 2, 6.123233995736766e-17, 2e-33)),
            xp,
        )
        return self.cos(self.add(a, self.negative(quarter)))

    def tanh(self, a: Any) -> Any:
        """Take (1 - e) / (1 + e) with e = exp(-2 |a|), and the sign."""
        (a,), xp = self._numbers(a), self.x
        fallen = self._exp(self.multiply(self.abs(a), -2.0))
        found = self.divide(self.subtract(1.0, fallen), self.add(1.0, fallen))
        hi, lo, e = found.parts
        down = a.hi < 0
        return _paired(xp.where(down, -hi, hi), xp.where(down, -lo, lo), e, xp)

    def maximum(self, a: Any, b: Any) -> Any:
        """Take the larger: what may be the larger has part in the bound."""
        (a, b), xp = self._numbers(a, b), self.x
        apart = (a.hi - b.hi) + (a.lo - b.lo)
        apart = xp.where(a.hi == b.hi, a.lo - b.lo, apart)  # of infinities too
        first = apart >= 0
        hi, lo, e = (xp.where(first, x, y) for x, y in ((a.hi, b.hi), (a.lo, b.lo), (a.e, b.e)))
        other = xp.where(first, b.e, a.e)
        sure = xp.abs(apart) * (1 - 2.0**-50) > a.e + b.e
        hi = xp.where(xp.isnan(apart), math.nan, hi)
        e = xp.where(sure, e, xp.maximum(e, other))
        return _paired(hi, lo, xp.where(xp.isnan(hi), math.inf, e), xp)

    def minimum(self, a: Any, b: Any) -> Any:
        """Take the smaller."""
        return self.negative(self.maximum(*map(self.negative, self._numbers(a, b))))

    def logaddexp(self, a: Any, b: Any) -> Any:
        """Take log(e^a + e^b) = t + log(e^(a - t) + e^(b - t)), for t in float64 near the larger."""
        (a, b), xp = self._numbers(a, b), self.x
        top = xp.maximum(a.hi, b.hi)
        t = _paired(xp.where(xp.isfinite(top), top, 0.0), None, None, xp)
        less = self.negative(t)
        terms = self.add(self._exp(self.add(a, less)), self._exp(self.add(b, less)))
        return self.add(t, self.log(terms))

    def max(self, x: Any, axis: Any = None, keepdims: bool = False) -> Any:
        """Take the largest along an axis: all that may be the largest have part in the bound."""
        if not isinstance(x, Paired):
            return self.x.max(x, axis=axis, keepdims=keepdims)
        if not isinstance(axis, int):
            raise TypeError(_say("`max` but along one axis"))
        xp, (hi, lo, e) = self.x, x.parts
        most = xp.max(hi, axis=axis, keepdims=True)
        base = xp.where(xp.isfinite(most), most, 0.0)
        below = (hi - base) + lo
        at = xp.argmax(below, axis=axis, keepdims=True)
        own = xp.take_along_axis(below, at, axis=axis)
        largest = own if e is None else xp.max(below + e, axis=axis, keepdims=True)
        low = xp.take_along_axis(lo, at, axis=axis)
        above = (largest - own) * SAFE + 2 * U2 * xp.abs(base)
        finite = xp.isfinite(most)
        wrong = xp.where(finite, above, xp.where(xp.isnan(most), math.inf, xp.zeros_like(most)))
        found = _paired(most, xp.where(finite, low, 0.0), wrong, xp)
        return found if keepdims else self.squeeze(found, axis=axis)

    def mean(self, x: Any, axis: Any = None, keepdims: bool = False) -> Any:
        """Average along an axis."""
        return self.divide(self.sum(x, axis=axis, keepdims=keepdims), float(x.shape[axis]))

    def sum(self, x: Any, axis: Any = None, dtype: Any = None, keepdims: bool = False) -> Any:
        """Add along an axis: by `matmul`, or two by two."""
        if not isinstance(x, Paired):
            return self.asarray(self.x.sum(x, axis=axis, dtype=dtype, keepdims=keepdims))
        if not isinstance(axis, int):
            raise TypeError(_say("`sum` but along one axis"))
        axis %= x.ndim
        last = axis == x.ndim - 1
        spans = blocks(0, x.shape[-1], SPAN)
        if x.of[0] == "outer" and last:
            total = self._sum_of_products(*x.of[1:])
        elif last and x.ndim > 1 and x.shape[-1] > _FEW:
            total = reduce(self.add, [self._sum_of_span(_columns(x, j)) for j in spans])
        else:
            total = self._add_in_turn(x, axis)
        return self.expand_dims(total, axis=axis) if keepdims else total

    def _add_in_turn(self, x: Paired, axis: int) -> Paired:
        def at(i: slice) -> Paired:
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
        """Multiply matrices, by exact products of slices, as `_span` proves."""
        a, b = self._numbers(a, b)
        if min(a.ndim, b.ndim) < 2:
            raise TypeError(_say("`matmul` of vectors"))
        if a.shape[-1] == 1:
            return self.multiply(a, b)
        return self._dot(a, self.matrix_transpose(b), more=True)

    def _sum_of_products(self, a: Paired, b: Paired, seen: Any) -> Paired:
        r"""Sum a_ij b_cj over the j that i sees, (..., n, c).

        As `matmul`, but what is hidden has no part in it, be it nan, nor in its bound: if the rows j
        of b are of different sizes, each is divided by a power of two, which a is multiplied by.
        """
        if a.of[0] == "scaled":
            return self.multiply(a.of[2], self._sum_of_products(a.of[1], b, seen))
        xp = self.x
        a = a if seen is None else self.where(seen, a, 0.0)
        if "tidy" not in b.memo:
            finite = xp.isfinite(b.hi) & (b.e < math.inf)
            spoilt = None if xp.all(finite) else xp.astype(~finite, xp.float64)
            tidy = b if spoilt is None else self.where(finite, b, 0.0)
            power = None
            if tidy.size:
                most = xp.max(xp.abs(tidy.hi), axis=-2, keepdims=True)
                most = xp.where(most > _TINY, most, _TINY)
                if xp.max(most) > _APART * xp.min(most):
                    power = power_of_two(most * 2.0**-60, xp) * 2.0**60  # of numbers up to 2^1023
                    tidy = self._rescaled(tidy, 1 / power)
            b.memo["tidy"] = tidy, spoilt, power
        tidy, spoilt, power = b.memo["tidy"]
        found = self._dot(a if power is None else self._rescaled(a, power), tidy)
        if spoilt is None:
            return found
        weight = xp.ones_like(a.hi) if seen is None else xp.astype(_truth(seen)[0], xp.float64)
        reached = weight @ xp.matrix_transpose(spoilt) > 0
        return self.where(Truth(reached, reached), math.nan, found)

    def _rescaled(self, x: Paired, power: Array) -> Paired:
        """Multiply by powers of two, exactly unless numbers underflow below the floor."""
        return _paired(*(y if y is None else y * power for y in x.parts), self.x)

    def _dot(self, a: Paired, b: Paired, *, more: bool = False) -> Paired:
        """Multiply (..., n, K) by the transpose of (..., c, K), span by span."""
        count = a.shape[-1]
        spans = blocks(0, max(count, 1), SPAN)
        return reduce(self.add, [self._span(_columns(a, j), _columns(b, j), more) for j in spans])

    def _span(self, a: Paired, b: Paired, more: bool) -> Paired:
        r"""Multiply by the transpose of another matrix, both cut into slices.

        With f the largest powers of two that are at most the largest magnitudes of the rows, L
        slices and K terms, the error is at most `sliced_error`, in units of f(a) f(b):
        :math:`(L + 2) K \max(2^{-b (L - 1)}, 2^{-51}) \gamma_{L K + 4}`; and :math:`2^{-98} K` for
        low parts. L is 3, or 4 if `more` is needed to make all errors small. The errors of the
        matrices add :math:`e_a (|b| + e_b) + |a| e_b`; if they are below :math:`2^{-90}` of f,
        K times the largest of each row takes the place of the sum.
        """
        xp, count = self.x, a.shape[-1]
        if 0 in (count, a.size, b.size):
            shape = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
            shape = (*shape, a.shape[-2], b.shape[-2])
            return self.zeros(shape, dtype=xp.float64, device=a.device)
        f_a, f_b = (self._remembered(x, "power", self._powers) for x in (a, b))
        levels = 3
        if more:
            most = [float(xp.max(xp.where(xp.isfinite(f), f, 0.0))) for f in (f_a, f_b)]
            if sliced_error(count, bits_of_slices(count, 3), 3) * most[0] * most[1] > _ENOUGH:
                levels = 4
        bits = bits_of_slices(count, levels)

        def face(x: Paired) -> tuple[Array, Array]:
            return facing(Slices.of(x.pair, f_b, bits, levels, xp), xp)

        _, left = self._sliced(a, levels)
        right = self._remembered(b, ("right", levels), face)
        found = sliced_product(left, right, levels, xp)
        f_b = xp.matrix_transpose(f_b)
        error = (sliced_error(count, bits, levels) + count * 2.0**-98) * f_a * f_b
        some = (f_a != 0) & (f_b != 0)  # not of nan either
        if xp.any(f_a < _TINY) or xp.any(f_b < _TINY):
            error = error + count * FLOOR * (1 + f_a + f_b)
            error = xp.where(some, error, 0.0)
        for x, y, f, f_y, turn in (
            (a, b, f_a, f_b, lambda z: z),
            (b, a, f_b, f_a, xp.matrix_transpose),
        ):
            if x.parts[2] is None:
                continue
            worst = turn(xp.max(x.e, axis=-1, keepdims=True))
            if y.parts[2] is None and not xp.any(worst > 2.0**-90 * f):  # nor of nan
                error = error + 2.1 * count * worst * f_y
            else:
                size = xp.abs(y.hi) if y is a else xp.abs(y.hi) + y.e
                error = error + turn(x.e @ xp.matrix_transpose(size))
        return self._made(found, error * SAFE)

    def _sum_of_span(self, x: Paired) -> Paired:
        """Sum rows as `_span` multiplies them by ones, which are slices themselves."""
        xp, count, levels = self.x, x.shape[-1], 3
        f, left = self._sliced(x, levels)
        shape = (*x.shape[:-1], levels, count)
        hi, second, last = xp.moveaxis(xp.sum(xp.reshape(left, shape), axis=-1), -1, 0)
        hi, lo = two_sum(hi, second)
        error = (sliced_error(count, bits_of_slices(count, levels), levels) + count * U2) * f[
            ..., 0
        ]
        error = self._floored(error, f[..., 0], f[..., 0] > 0, count * FLOOR)
        if x.parts[2] is not None:
            error = error + xp.sum(x.e, axis=-1)
        return self._made(two_sum(hi, lo + last), error * SAFE)

    def _sliced(self, x: Paired, levels: int) -> tuple[Array, Array]:
        """Return powers of two of rows, and their slices side by side, which are remembered."""

        def cut(x: Paired) -> Array:
            bits = bits_of_slices(x.shape[-1], levels)
            return side_by_side(Slices.of(x.pair, f, bits, levels, self.x), self.x)

        f = self._remembered(x, "power", self._powers)
        return f, self._remembered(x, ("left", levels), cut)

    def _powers(self, x: Paired) -> Array:
        return power_of_two(self.x.max(self.x.abs(x.hi), axis=-1, keepdims=True), self.x)

    def _remembered(self, x: Paired, name: Any, make: Callable[[Paired], Any]) -> Any:
        if name not in x.memo:
            x.memo[name] = make(x)
        return x.memo[name]

    def where(self, some: Any, a: Any, b: Any) -> Any:
        """Choose between two arrays; without a bound where errors leave open which."""
        some, doubt = _truth(some)
        if not any(isinstance(x, Paired | float) for x in (a, b)):
            if doubt is not False:
                raise TypeError(_say("`where` to choose integers by numbers"))
            return self.x.where(some, a, b)
        lazy = isinstance(a, Paired) and a.of[0] == "outer" and some.shape[-2:-1] == (1,)
        if lazy and isinstance(b, float) and b == 0:
            _, x, y, seen = a.of
            if seen is None and doubt is False:
                mask = some[..., 0, :]
                whole = partial(self._chosen, some, False, a, b)
                return Paired(lambda: whole().parts, a.shape, self.x, ("outer", x, y, mask))
        return self._chosen(some, doubt, a, b)

    def _chosen(self, some: Any, doubt: Any, a: Any, b: Any) -> Paired:
        xp = self.x
        if doubt is False:  # what is chosen as a whole remains what it was
            for x, y, other in ((a, b, ~some), (b, a, some)):
                if isinstance(x, Paired) and not xp.any(other):
                    if np.broadcast_shapes(some.shape, x.shape, getattr(y, "shape", ())) == x.shape:
                        return x
        a, b = self._numbers(a, b)
        hi, lo = (xp.where(some, x, y) for x, y in zip(a.pair, b.pair, strict=True))
        e = None
        if a.parts[2] is not None or b.parts[2] is not None or doubt is not False:
            e = xp.where(some, a.e, b.e)
        if doubt is not False:
            e = xp.where(doubt, math.inf, e)
            hi = xp.where(doubt, math.nan, hi)
        return _paired(hi, lo, e, xp)

    def _compare(self, name: str, a: Any, b: Any) -> Any:
        """Compare: it is open where the difference is not larger than the errors."""
        function: Any = getattr(operator, _SIGN_OF[name])
        if not (isinstance(a, Paired) or isinstance(b, Paired)):
            return function(a, b)
        (x, y), xp = self._numbers(a, b), self.x
        if isinstance(b, float) and math.isinf(b):
            return self._decided(function(x.hi, b), xp.isnan(x.hi) | ~(x.e < math.inf))
        apart = xp.where(x.hi == y.hi, x.lo - y.lo, (x.hi - y.hi) + (x.lo - y.lo))
        most = (x.e + y.e) * SAFE
        doubt = (xp.abs(apart) <= most) & (most > 0)
        unknown = xp.isnan(apart) | ~(most < math.inf)
        return self._decided(function(apart, 0.0), doubt | unknown)

    def _decided(self, x: Array, doubt: Array) -> Any:
        return Truth(x, doubt) if self.x.any(doubt) else x


def _columns(x: Paired, j: slice) -> Paired:
    """Take a span of columns, once: it remembers its slices."""
    if j == slice(0, x.shape[-1]):
        return x
    if j.start not in x.memo:
        x.memo[j.start] = x[..., j]
    found: Paired = x.memo[j.start]
    return found


def _plus(e: Any, *operands: Paired) -> Any:
    """Add the errors of operands."""
    for x in operands:
        if x.parts[2] is not None:
            e = e + x.e
    return e * SAFE


_SIGN_OF = {
    "equal": "eq", "not_equal": "ne", "less": "lt", "less_equal": "le", "greater": "gt",
    "greater_equal": "ge",
}  # fmt: skip
_OPERATORS = {
    "add": "add", "sub": "subtract", "mul": "multiply", "truediv": "divide", "pow": "pow",
    "matmul": "matmul", "neg": "negative", "pos": "positive", "abs": "abs",
    **{sign: name for name, sign in _SIGN_OF.items()},
}  # fmt: skip


def _operator(name: str, *, turned: bool = False) -> Callable[..., Any]:
    def run(x: Paired, *other: Any) -> Any:
        function: Callable[..., Any] = getattr(space(x.xp), name)
        return function(*other, x) if turned else function(x, *other)

    return run


for _sign, _name in _OPERATORS.items():
    setattr(Paired, f"__{_sign}__", _operator(_name))
    if _sign in ("add", "sub", "mul", "truediv", "matmul"):
        setattr(Paired, f"__r{_sign}__", _operator(_name, turned=True))
