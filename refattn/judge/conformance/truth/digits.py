"""The formulas of `naive` in any number of digits: the printed text, run on numbers of mpmath.

Every argument is taken as the number it is, digit for digit, and every operation is carried out
with so many digits, by numbers whose exponents do not overflow. Slow: for tens of tokens.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache, wraps
from types import SimpleNamespace
from typing import Any

import numpy as np

from ....arrays.library import Floats
from ...mistakes.text import Edit, edited, run, statements

try:
    import mpmath
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "refattn.judge.conformance.truth.digits needs `pip install 'refattn[vectors]'`",
        name=error.name,
    ) from None

# A change of a function of the text: exact attention gives its log normaliser as one more column.
WITH_LSE = Edit(
    "softmax_attention",
    "    return weighted_sum(weights if dropout is None else weights * dropout, v, seen)",
    "    lse = log_sum_exp(hide(s, seen))\n"
    "    lse = lse if sinks is None else xp.logaddexp(lse, sinks)\n"
    "    out = weighted_sum(weights if dropout is None else weights * dropout, v, seen)\n"
    "    return beside(out, lse)",
)


@cache
def context(dps: int = 50) -> Any:
    """Return the mpmath context of `dps` decimal digits; its numbers keep to it.

    Examples
    --------
    >>> print(context(30).exp(1))
    2.71828182845904523536028747135
    """
    # The context that users have keeps its digits.
    mp = mpmath.mp.clone()
    mp.dps = dps
    of_scalar = mp.npconvert

    def convert(x: Any) -> Any:
        if isinstance(x, np.ndarray):
            raise TypeError("arrays are left to NumPy")  # not with their text, which takes long
        return of_scalar(x)

    mp.npconvert = convert
    return mp


def numbers(x: Any, *, dps: int = 50) -> Floats:
    """Turn floats, of longdouble too, into numbers of `dps` digits with the same value.

    Examples
    --------
    >>> float(numbers([0.1])[0])
    0.1
    """
    return np.asarray(formulas(dps).xp.asarray(x))


def _of_numbers(rule: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Leave arrays to NumPy, which comes back with each of their elements."""
    return lambda x, y: NotImplemented if isinstance(y, np.ndarray) else rule(x, y)


class _Traced:
    """A number that knows of which numbers it was made, and its derivatives with respect to them.

    What is made of numbers, in turn, is on one tape: pairs of a place there and a derivative.
    """

    def __init__(self, value: Any, tape: list[Any], *made_of: tuple[int, Any]) -> None:
        self.value, self.tape, self.at = value, tape, len(tape)
        tape.append(made_of)

    def _then(self, value: Any, slope: Any, other: Any = None, other_slope: Any = None) -> _Traced:
        """Return a function of this number, or of this and another."""
        if isinstance(other, _Traced):
            return _Traced(value, self.tape, (self.at, slope), (other.at, other_slope))
        return _Traced(value, self.tape, (self.at, slope))

    @_of_numbers
    def __add__(self, other: Any) -> Any:
        return self._then(self.value + _value(other), 1, other, 1)

    @_of_numbers
    def __mul__(self, other: Any) -> Any:
        return self._then(self.value * (y := _value(other)), y, other, self.value)

    @_of_numbers
    def __truediv__(self, other: Any) -> Any:
        ratio = self.value / (y := _value(other))
        return self._then(ratio, type(ratio)(1) / y, other, -ratio / y)

    def __rtruediv__(self, other: Any) -> Any:
        ratio = other / self.value
        return self._then(ratio, -ratio / self.value)

    def __neg__(self) -> _Traced:
        return self._then(-self.value, -1)

    @_of_numbers
    def __sub__(self, other: Any) -> Any:
        return self + -other

    def __rsub__(self, other: Any) -> Any:
        return -self + other

    __radd__, __rmul__ = __add__, __mul__


def _value(x: Any) -> Any:
    return x.value if isinstance(x, _Traced) else x


for _name in ("eq", "ge", "gt", "le", "lt", "ne"):
    _compare = getattr(operator, _name)
    setattr(_Traced, f"__{_name}__", lambda x, y, of=_compare: of(x.value, _value(y)))


class _Multiprecision:
    """An array library as the formulas use one: arrays are NumPy's, of numbers of mpmath."""

    # Formulas ask for either of these: both are numbers of mpmath here.
    float32 = float64 = np.dtype(object)

    def __init__(self, mp: Any) -> None:
        self.mp = mp
        slopes = {
            "exp": lambda x, y: y,
            "log": lambda x, y: 1 / x,
            "cos": lambda x, y: -mp.sin(x),
            "sin": lambda x, y: mp.cos(x),
            "tanh": lambda x, y: mp.cosh(x) ** -2,  # 1 - y^2 has no digits left where y is near 1
        }
        for name, slope in slopes.items():
            setattr(self, name, np.frompyfunc(_of_both(getattr(mp, name), slope), 1, 1))

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def asarray(self, x: Any, dtype: Any = None, device: Any = None) -> Floats:
        """Make numbers of the same value, or an array of another dtype if asked."""
        if dtype not in (None, object):
            return np.asarray(x, dtype)
        return np.asarray(np.frompyfunc(self._number, 1, 1)(x), object)

    def _number(self, x: Any) -> Any:
        return x if isinstance(x, _Traced) else self.mp.convert(x)

    def astype(self, x: Any, dtype: Any) -> Floats:
        return self.asarray(x, dtype)

    def isdtype(self, dtype: Any, kind: Any) -> bool:
        return kind == "real floating" if dtype.kind == "O" else np.isdtype(dtype, kind)

    def finfo(self, dtype: Any) -> Any:
        # Exponents of these numbers have no end that a formula comes near.
        return SimpleNamespace(eps=self.mp.eps, smallest_normal=self.mp.mpf(10) ** -(10**6))

    def sum(self, x: Any, axis: int, keepdims: bool = False, dtype: Any = None) -> Floats:
        # Counts of a mask are plain numbers.
        if x.dtype != object:
            return np.asarray(np.sum(x, axis=axis, keepdims=keepdims, dtype=dtype))
        rows = np.moveaxis(x, axis, -1)
        out = np.empty(rows.shape[:-1], object)
        for i in np.ndindex(out.shape):
            # One rounding for the whole sum.
            out[i] = self.mp.fsum(map(_value, rows[i]))
            if traced := [e for e in rows[i] if isinstance(e, _Traced)]:
                out[i] = _Traced(out[i], traced[0].tape, *((e.at, 1) for e in traced))
        return np.expand_dims(out, axis) if keepdims else out

    def max(self, x: Any, **axes: Any) -> Floats:
        # Formulas take a largest exponent off all, which cancels: it needs no derivative.
        return np.asarray(np.max(np.frompyfunc(_value, 1, 1)(x), **axes))

    def where(self, condition: Any, x: Any, y: Any) -> Floats:
        # NumPy would mix floats into an array of objects.
        x, y = (self.asarray(e) if isinstance(e, float) else e for e in (x, y))
        return np.asarray(np.where(condition, x, y))

    def maximum(self, x: Any, y: float) -> Any:
        return np.maximum(x, self.asarray(y))  # not the float itself, which has few digits

    def logaddexp(self, x: Any, y: Any) -> Any:
        # Without a largest exponent no maximum has to be taken off first.
        return self.log(self.exp(x) + self.exp(y))


def _of_both(function: Callable[[Any], Any], slope: Callable[[Any, Any], Any]) -> Any:
    """Make a function of numbers one of traced numbers too."""

    def of_either(x: Any) -> Any:
        if not isinstance(x, _Traced):
            return function(x)
        value = function(x.value)
        return x._then(value, slope(x.value, value))

    return of_either


@cache
def formulas(dps: int = 50, *changes: Edit) -> SimpleNamespace:
    """Run the text of `naive` in `dps` digits, perhaps with functions where one text is another.

    Returns its functions, which take arrays of floats or of numbers and give arrays of numbers.

    Examples
    --------
    >>> q, k, v = np.array([[1.0]]), np.array([[0.0], [1.0]]), np.array([[0.0], [1.0]])
    >>> print(formulas(30).softmax_attention(q, k, v)[0, 0])  # e / (1 + e)
    0.731058578630004879251159241822
    """
    xp = _Multiprecision(context(dps))
    space = run(statements(), edited(statements(), changes))
    # By these names the printed file finds its array library.
    space |= {"xp": xp, "array_namespace": lambda *arrays: xp}
    check = space["check_real"]  # which returns a float
    space["check_real"] = lambda name, value, **rules: (check(name, value, **rules), value)[1]
    return SimpleNamespace(
        **space | {name: _taking_floats(space[name], xp) for name in space["__all__"]}
    )


def _taking_floats(function: Callable[..., Any], xp: Any) -> Callable[..., Any]:
    def precise(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(map(precise, x))
        return xp.asarray(x) if isinstance(x, np.ndarray) and x.dtype.kind in "fO" else x

    @wraps(function)
    def on_numbers(*arrays: Any, **options: Any) -> Any:
        options = {name: precise(x) for name, x in options.items()}
        found = function(*map(precise, arrays), **options)
        return precise(found)

    return on_numbers


def attend(*arrays: Any, dps: int = 50, **options: Any) -> tuple[Floats, Floats]:
    """Evaluate softmax attention and its log normaliser."""
    columns = formulas(dps, WITH_LSE).softmax_attention(*arrays, **options)
    return columns[..., :-1], columns[..., -1]


def pull_back(
    function: Callable[..., Floats],
    cotangent: Any,
    *,
    dps: int = 50,
    absolute: bool = False,
    **arrays: Any,
) -> tuple[Floats, dict[str, Floats]]:
    r"""Evaluate a function of these arrays, and pull a cotangent back to each of them.

    .. math:: \bar x = \sum_i \bar g_i \, \partial f_i / \partial x

    From the end to the beginning of what the function computes, by the rules for sums, products,
    quotients and elementary functions: no formula of a pullback is used. If it is `absolute`, all
    derivatives and cotangents are taken at their sizes, so that no terms cancel: what roundings are
    relative to.

    Examples
    --------
    >>> q, k, v = np.array([[1.0]]), np.array([[0.0], [0.0]]), np.array([[0.0], [4.0]])
    >>> _, found = pull_back(formulas().softmax_attention, np.ones((1, 1)), q=q, k=k, v=v)
    >>> {name: [float(e) for e in x.ravel()] for name, x in found.items()}
    {'q': [0.0], 'k': [-1.0, 1.0], 'v': [0.5, 0.5]}
    """
    xp, tape = formulas(dps).xp, list[Any]()
    trace = np.frompyfunc(lambda e: _Traced(e, tape), 1, 1)
    traced = {name: np.asarray(trace(xp.asarray(x)), object) for name, x in arrays.items()}
    out = function(**traced)
    found, size = [xp.mp.mpf(0)] * len(tape), abs if absolute else operator.pos
    for y, g in zip(out.ravel(), numbers(cotangent, dps=dps).ravel(), strict=True):
        if isinstance(y, _Traced):
            found[y.at] += size(g)
    # A number is made of earlier ones: its own derivative is complete when its turn comes.
    for at in range(len(tape) - 1, -1, -1):
        # Numbers of which the result is not made have no derivative to hand on.
        if found[at]:
            for origin, slope in tape[at]:
                found[origin] += found[at] * size(slope)
    pulled = np.frompyfunc(lambda e: found[e.at], 1, 1)
    value = np.frompyfunc(_value, 1, 1)
    return value(out), {name: np.asarray(pulled(x), object) for name, x in traced.items()}
