"""Numbers of any number of digits, and their derivatives in dual numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from ....arrays.library import Floats

try:
    import mpmath
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "refattn.conformance.truth.exact needs `pip install 'refattn[vectors]'`", name=error.name
    ) from None


@cache
def context(dps: int = 50) -> Any:
    """Return the mpmath context of `dps` decimal digits; its numbers keep to it.

    Examples
    --------
    >>> print(context(30).exp(1))
    2.71828182845904523536028747135
    """
    mp = mpmath.mp.clone()
    mp.dps = dps
    slopes = {
        "exp": lambda x, y: y,
        "log": lambda x, y: 1 / x,
        "cos": lambda x, y: -mp.sin(x),
        "sin": lambda x, y: mp.cos(x),
        "tanh": lambda x, y: mp.cosh(x) ** -2,  # 1 - y^2 has no digits left where y is near 1
    }
    for name, slope in slopes.items():
        setattr(mp, name, _of_both(getattr(mp, name), slope))
    return mp


def _of_both(function: Callable[[Any], Any], slope: Callable[[Any, Any], Any]) -> Any:
    """Make a function of numbers one of dual numbers too."""

    def of_either(x: Any) -> Any:
        if not isinstance(x, _Dual):
            return function(x)
        value = function(x.value)
        return _Dual(value, _multiply(slope(x.value, value), x.slope))

    return of_either


class _Dual:
    """A number with its derivatives with respect to those that it depends on: rules of calculus."""

    def __init__(self, value: Any, slope: dict[int, Any]) -> None:
        self.value, self.slope = value, slope

    def __add__(self, other: Any) -> Any:
        if isinstance(other, np.ndarray):
            return NotImplemented  # which adds to each of its elements
        y, dy = _value_and_slope(other)
        return _Dual(self.value + y, _summed(self.slope, dy))

    def __mul__(self, other: Any) -> Any:
        if isinstance(other, np.ndarray):
            return NotImplemented
        y, dy = _value_and_slope(other)
        return _Dual(self.value * y, _summed(_multiply(y, self.slope), _multiply(self.value, dy)))

    def __truediv__(self, other: Any) -> Any:
        if isinstance(other, np.ndarray):
            return NotImplemented
        y, dy = _value_and_slope(other)
        ratio = self.value / y
        slope = _summed(self.slope, _multiply(-ratio, dy))
        return _Dual(ratio, {i: x / y for i, x in slope.items()})

    def __rtruediv__(self, other: Any) -> Any:
        ratio = other / self.value
        return _Dual(ratio, _multiply(-ratio / self.value, self.slope))

    def __neg__(self) -> _Dual:
        return _Dual(-self.value, _multiply(-1, self.slope))

    def __sub__(self, other: Any) -> Any:
        return NotImplemented if isinstance(other, np.ndarray) else self + -other

    def __rsub__(self, other: Any) -> Any:
        return -self + other

    def __gt__(self, other: Any) -> bool:
        return bool(self.value > _value_and_slope(other)[0])

    __radd__, __rmul__ = __add__, __mul__


def _value_and_slope(x: Any) -> tuple[Any, dict[int, Any]]:
    return (x.value, x.slope) if isinstance(x, _Dual) else (x, {})


def _multiply(factor: Any, slope: dict[int, Any]) -> dict[int, Any]:
    return {i: factor * x for i, x in slope.items()}


def _summed(x: dict[int, Any], y: dict[int, Any]) -> dict[int, Any]:
    return x | {i: x[i] + e if i in x else e for i, e in y.items()}


def pull_back(
    function: Callable[..., Floats], cotangent: Any, *, dps: int = 50, **arrays: Any
) -> dict[str, Floats]:
    r"""Pull a cotangent back through a function of this module, in dual numbers.

    .. math:: \bar x = \sum_i \bar g_i \, \partial f_i / \partial x

    for each of the arrays, which the function is called with. Each number is followed by its
    derivatives with respect to all others of all arrays, forth, by the rules for sums, products,
    quotients and elementary functions: no formula of a pullback is used.

    Examples
    --------
    >>> from refattn.conformance.truth.exact import softmax_attention
    >>> q, k, v = np.array([[1.0]]), np.array([[0.0], [0.0]]), np.array([[0.0], [4.0]])
    >>> found = pull_back(softmax_attention, np.ones((1, 1)), q=q, k=k, v=v)
    >>> {name: [float(e) for e in x.ravel()] for name, x in found.items()}
    {'q': [0.0], 'k': [-1.0, 1.0], 'v': [0.5, 0.5]}
    """
    exact, duals, first = {name: numbers(x, dps=dps) for name, x in arrays.items()}, {}, 0
    for name, x in exact.items():
        flat = np.empty(x.size, dtype=object)
        flat[:] = [_Dual(e, {i: 1}) for i, e in enumerate(x.ravel(), first)]
        duals[name], first = flat.reshape(x.shape), first + x.size
    pairs = zip(numbers(cotangent, dps=dps).ravel(), function(**duals).ravel(), strict=True)
    total: dict[int, Any] = {}
    zero = context(dps).mpf(0)
    for g, y in pairs:
        total = _summed(total, _multiply(g, _value_and_slope(y)[1]))
    return {
        name: map_numbers(lambda e: total.get(next(iter(e.slope)), zero), x)
        for name, x in duals.items()
    }


def numbers(x: Any, *, dps: int = 50) -> Floats:
    """Turn floats, of longdouble too, into numbers of `dps` digits with the same value.

    Examples
    --------
    >>> float(numbers([0.1])[0])
    0.1
    """
    mp, x = context(dps), np.asarray(x)
    if x.dtype == np.longdouble and x.dtype != np.float64:  # they are one on some machines
        high = x.astype(np.float64)
        # Where the value is infinite there is no rest.
        rest = np.where(np.isfinite(high), x - np.where(np.isfinite(high), high, 0), 0)
        return numbers(high, dps=dps) + numbers(rest.astype(np.float64), dps=dps)
    values = x.ravel() if x.dtype == object else x.ravel().astype(np.float64)
    converted = np.empty(x.size, dtype=object)
    converted[:] = [
        e if isinstance(e, _Dual) else mp.mpf(e if x.dtype == object else float(e)) for e in values
    ]
    return converted.reshape(x.shape)


def map_numbers(function: Callable[[Any], Any], x: Floats) -> Floats:
    out = np.empty(x.size, dtype=object)
    out[:] = [function(e) for e in x.ravel()]
    return out.reshape(x.shape)
