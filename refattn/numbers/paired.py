"""The array type of `pairs`: numbers hi + lo with bounds, and comparisons that these leave open."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

from ..arrays.library import Array, device
from .doubled import Pair

_OF_ROWS, _MATRIX = (..., None, slice(None)), (..., None, slice(None), slice(None))


class Paired:
    """An array of numbers hi + lo, each to within e.

    `of` says what it is made of, if that may be of use before its numbers are; `memo` holds what
    was made of it.
    """

    __slots__ = ("_make", "_parts", "memo", "of", "shape", "space")
    __array_ufunc__ = None  # NumPy leaves operators to this class

    def __init__(self, make: Callable[[], Any], shape: Any, space: Any, *of: Any) -> None:
        self._make, self.shape, self.space, self.of = make, tuple(shape), space, of or ("",)
        self._parts: Any = None
        self.memo: dict[Any, Any] = {}

    @property
    def parts(self) -> Any:
        """The arrays hi, lo and e; an e of None is 0."""
        if self._parts is None:
            self._parts = self._make()
        return self._parts

    @property
    def e(self) -> Array:
        """The bound on errors."""
        return self.parts[2] if self.parts[2] is not None else self.xp.zeros_like(self.hi)

    xp = property(lambda self: self.space.x)
    hi = property(lambda self: self.parts[0])
    lo = property(lambda self: self.parts[1])
    pair = property(lambda self: Pair(*self.parts[:2]))
    inexact = property(lambda self: self.parts[2] is not None)
    untraced = property(lambda self: self.hi)
    ndim = property(lambda self: len(self.shape))
    size = property(lambda self: math.prod(self.shape))
    dtype = property(lambda self: self.xp.float64)
    device = property(lambda self: device(self.hi) if self._parts else self.of[1].device)

    def __array_namespace__(self, api_version: str | None = None) -> Any:
        return self.space

    def moved(self, function: Callable[[Array], Array]) -> Paired:
        """Apply what only moves numbers."""
        return paired(*(x if x is None else function(x) for x in self.parts), space=self.space)

    def __getitem__(self, index: Any) -> Paired:
        def taken() -> Paired:
            return self.moved(lambda x: x[index])

        if index not in (_OF_ROWS, _MATRIX):
            return taken()
        cut = 1 if index == _OF_ROWS else 2
        shape = (*self.shape[:-cut], 1, *self.shape[-cut:])
        return Paired(
            lambda: taken().parts, shape, self.space, "rows" if cut == 1 else "matrix", self
        )

    def rows(self, j: slice) -> Paired:
        """Take rows (..., j, :); what was made of all rows one by one is cut, not made again."""
        j = slice(*j.indices(self.shape[-2])[:2])
        shape = (*self.shape[:-2], max(j.stop - j.start, 0), self.shape[-1])
        take = partial(self.moved, lambda x: x[..., j, :])
        return Paired(lambda: take().parts, shape, self.space, "rows of", self, j)

    def __repr__(self) -> str:
        return f"Paired({self.hi!r}, {self.lo!r}, {self.e!r})"

    __hash__ = object.__hash__


class Truth:
    """What a comparison says, and where errors leave it open."""

    __slots__ = ("doubt", "x")
    __array_ufunc__ = None

    def __init__(self, x: Array, doubt: Array) -> None:
        self.x, self.doubt = x, doubt

    def _with(self, other: Any, function: Callable[..., Array]) -> Truth:
        x, doubt = as_truth(other)
        return Truth(function(self.x, x), self.doubt if doubt is None else self.doubt | doubt)

    def __invert__(self) -> Truth:
        return Truth(~self.x, self.doubt)

    def __bool__(self) -> bool:
        if bool(self.doubt):
            raise ValueError(
                "Errors leave a comparison open, on which a branch of the formula depends: write "
                "both sides with `where`."
            )
        return bool(self.x)

    def __getitem__(self, index: Any) -> Truth:
        return Truth(self.x[index], self.doubt[index])

    __and__ = __rand__ = lambda self, other: self._with(other, operator.and_)
    __or__ = __ror__ = lambda self, other: self._with(other, operator.or_)


def as_truth(x: Any) -> tuple[Any, Any]:
    """Return what a comparison says, and where it is open, or None."""
    return (x.x, x.doubt) if isinstance(x, Truth) else (x, None)


def paired(hi: Array, lo: Any = None, e: Any = None, *of: Any, space: Any) -> Paired:
    """Make an array of parts that broadcast to `hi`."""
    shape, xp = tuple(hi.shape), space.x
    lo = xp.zeros_like(hi) if lo is None else lo
    lo, e = (
        x if x is None or tuple(x.shape) == shape else xp.broadcast_to(x, shape) for x in (lo, e)
    )
    made = Paired(tuple, shape, space, *of)
    made._parts = hi, lo, e
    return made


SIGNS = {
    "equal": "eq", "not_equal": "ne", "less": "lt", "less_equal": "le", "greater": "gt",
    "greater_equal": "ge",
}  # fmt: skip
_RULES = {
    "add": "add", "sub": "subtract", "mul": "multiply", "truediv": "divide", "pow": "pow",
    "matmul": "matmul", "neg": "negative", "abs": "abs",
} | {sign: name for name, sign in SIGNS.items()}  # fmt: skip


def _rule(name: str, *, turned: bool = False) -> Callable[..., Any]:
    def run(x: Paired, *other: Any) -> Any:
        function: Callable[..., Any] = getattr(x.space, name)
        return function(*other, x) if turned else function(x, *other)

    return run


for _sign, _name in _RULES.items():
    setattr(Paired, f"__{_sign}__", _rule(_name))
    if _sign in ("add", "sub", "mul", "truediv", "matmul"):
        setattr(Paired, f"__r{_sign}__", _rule(_name, turned=True))
