r"""Derivatives of any formula by one tape: an array type with the array API over any library.

`Traced` holds an array of NumPy, CuPy, PyTorch, JAX, ... and the step that it came from. A formula
that is called with traced arrays records a graph of steps. Each has a name, a value and operands.
`pull_to_steps` takes the cotangents of the results back to every step.

A formula may use what the array API has of: operators and comparisons; the functions in `_SMOOTH`
(with slopes), `_MOVES` (which only move numbers) and `_FLAT` (which have no derivative); `matmul`,
`sum`, `mean`, `max`, `min`, `sort`, `where`, `clip`, `concat`, `stack`, `take`, `take_along_axis`,
`cumulative_sum`, `vecdot`; what creates arrays; indices of integers, slices, `None` and `...`, also
to write to a buffer of its own. It may call these by NumPy's functions too, `np.exp(x)`. Any other
function is an error that names it. A formula must not branch on values that move.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from typing import Any

import numpy as np

from ..arrays.arithmetic import multiply
from ..arrays.blocks import sum_to
from ..arrays.library import (
    Array,
    add_rows,
    array_namespace,
    device,
    is_array_api_obj,
    is_jax_array,
    is_numpy_array,
    own_copy,
    untraced,
)
from .steps import Back, Slot, Step, mapped, pairs, pull_steps


class Traced:
    """An array that remembers the step it came from; without one, a constant."""

    __slots__ = ("step", "x")
    __array_priority__ = 1000

    def __init__(self, x: Any, step: Step | None = None) -> None:
        self.x, self.step = x, step or Step("constant", x)

    def __array_namespace__(self, api_version: str | None = None) -> Any:
        return space(array_namespace(self.x))

    def __array_ufunc__(self, ufunc: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        if method != "__call__":
            raise TypeError(_say(f"{ufunc.__name__}.{method}"))
        return self.__array_function__(ufunc, (), args, kwargs)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        name = _OF_NUMPY.get(function.__name__, function.__name__)
        if name in ("shape", "ndim", "size"):
            return getattr(args[0], name)
        known = getattr(self.__array_namespace__(), name, None)
        if known is None:
            raise TypeError(_say(f"`{name}`"))
        return known(*args, **kwargs)

    def __getitem__(self, index: Any) -> Traced:
        index = _index(index)
        if any(is_array_api_obj(i) and i.ndim for i in index):
            raise TypeError(_say("an index that is an array (use `take`)"))
        places = tuple(i for i in index if i is not None)
        places = places if any(i is ... for i in places) else (*places, ...)

        def pull(g: Array) -> tuple[Slot]:
            return (Slot(places, g),)

        return record("getitem", self.x[index], (self,), pull)

    def __setitem__(self, index: Any, values: Any) -> None:
        """Write into a buffer; what was read of it before stays as it was."""
        index, old, value = _index(index), self.step, _operand(values)
        writes, first, x = [(index, value.step)], old, self.x
        if isinstance(old, _Written) and not old.read:
            writes, first = [*old.writes, *writes], old.first
        else:
            x = own_copy(x, self.__array_namespace__().x)
        if is_jax_array(x):
            x = x.at[index].set(value.x)
        else:
            x[index] = value.x
        self.x, self.step = x, _Written(x, self.__array_namespace__().x, first, writes)

    def __len__(self) -> int:
        return int(self.shape[0])

    def __iter__(self) -> Iterator[Traced]:
        return (self[i] for i in range(len(self)))

    def __bool__(self) -> bool:
        return bool(self.x)

    def __int__(self) -> int:
        return int(self.x)

    def __index__(self) -> int:
        return operator.index(self.x)

    def __float__(self) -> float:
        return float(self.x)

    def __repr__(self) -> str:
        return f"Traced({self.x!r}, {self.step!r})"

    __hash__ = object.__hash__
    untraced = property(lambda self: self.x)
    shape = property(lambda self: tuple(self.x.shape))
    ndim = property(lambda self: self.x.ndim)
    dtype = property(lambda self: self.x.dtype)
    size = property(lambda self: math.prod(self.x.shape))
    device = property(lambda self: device(self.x))
    mT = property(lambda self: self.__array_namespace__().matrix_transpose(self))
    T = property(lambda self: self.__array_namespace__().transpose(self))


def given(x: Array, *, light: bool = False) -> Traced:
    """Trace an array, with respect to which cotangents are wanted.

    If it is `light`, the steps that depend on it do not hold their values: these take memory.
    """
    return Traced(x, Step("given", x, light=light))


def fixed(x: Any) -> Any:
    """Return a traced array as a constant, which takes no cotangent; anything else as it is."""
    return Traced(x.x) if isinstance(x, Traced) else x


def record(name: str, x: Any, args: tuple[Traced, ...], pull: Back) -> Traced:
    """Return the value of a step, which `pull` takes from its cotangent to those of the operands.

    A cotangent of None is 0.
    """
    steps = tuple(y.step for y in args)
    return Traced(x, Step(name, x, steps, pull) if any(y.moves for y in steps) else None)


def pull_to_steps(
    out: Any, cotangents: Any, wanted: Iterable[Traced] | None = None
) -> dict[Step, Any]:
    """Return the cotangents of all steps that results depend on, from those of the results.

    Results are a traced array or tuples of them; cotangents have their form, with None for 0. If
    only some are `wanted`, the others are dropped on the way.

    Examples
    --------
    >>> import numpy as np
    >>> x = given(np.asarray([1.0, 2.0]))
    >>> found = pull_to_steps(np.exp(x) * x, np.ones(2))
    >>> np.round(found[x.step] / np.exp(x.x), 12)
    array([2., 3.])
    """
    last = ((x.step, g) for x, g in pairs(out, cotangents) if isinstance(x, Traced))
    return pull_steps(last, None if wanted is None else {x.step for x in wanted})


class _Written(Step):
    """A buffer that was written to, part after part: made of what it was, and of the parts."""

    __slots__ = ("first", "writes", "xp")

    def __init__(self, x: Array, xp: Any, first: Step, writes: list[tuple[Any, Step]]) -> None:
        steps = (first, *(step for _, step in writes))
        moves = any(step.moves for step in steps)
        super().__init__("setitem", x, steps if moves else (), self._pull if moves else None)
        self.xp, self.first, self.writes = xp, first, writes

    def _pull(self, g: Array) -> tuple[Any, ...]:
        xp, found = self.xp, []
        g = own_copy(g, xp)
        for index, step in reversed(self.writes):
            found.append(sum_to(own_copy(g[index], xp), step.shape))
            if is_jax_array(g):
                g = g.at[index].set(0.0)
            else:
                g[index] = 0.0
        return (g, *reversed(found))


def _index(index: Any) -> tuple[Any, ...]:
    return tuple(untraced(i) for i in (index if isinstance(index, tuple) else (index,)))


def _operand(x: Any) -> Traced:
    """Return an operand, a number or an array, as a constant if it is not traced."""
    return x if isinstance(x, Traced) else Traced(x)


# Functions that operators are, which take numbers too, and their signs; some may be turned round.
_SIGNS = (
    "add add", "sub subtract", "mul multiply", "truediv divide", "pow pow", "matmul matmul",
    "floordiv floor_divide", "mod remainder", "and bitwise_and", "or bitwise_or", "xor bitwise_xor",
    "eq equal", "ne not_equal", "lt less", "le less_equal", "gt greater", "ge greater_equal",
    "neg negative", "abs abs", "invert bitwise_invert",
)  # fmt: skip
_OPERATORS = {name: getattr(operator, f"__{sign}__") for sign, name in map(str.split, _SIGNS)}

# Smooth functions, with their slopes by each operand: numbers, or functions of what they need of
# the operands x and y, the value f and the namespace. One that takes the cotangent g as well
# returns what that is pulled back to.
_SMOOTH: dict[str, tuple[Any, ...]] = {
    "add": (1.0, 1.0),
    "subtract": (1.0, -1.0),
    "multiply": (lambda y: y, lambda x: x),
    "divide": (lambda g, y: g / y, lambda y, f: -f / y),
    "pow": (lambda x, y: y * x ** (y - 1), lambda xp, x, f: f * xp.log(x)),
    "maximum": (lambda x, y: x > y, lambda x, y: ~(x > y)),
    "minimum": (lambda x, y: x < y, lambda x, y: ~(x < y)),
    "logaddexp": (lambda xp, x, f: xp.exp(x - f), lambda xp, y, f: xp.exp(y - f)),
    "negative": (-1.0,),
    "positive": (1.0,),
    "abs": (lambda xp, x: xp.sign(x),),
    "square": (lambda x: 2 * x,),
    "sqrt": (lambda f: 0.5 / f,),
    "exp": (lambda f: f,),
    "expm1": (lambda f: f + 1,),
    "log": (lambda g, x: g / x,),
    "log1p": (lambda g, x: g / (1 + x),),
    "log2": (lambda x: 1 / (math.log(2) * x),),
    "sin": (lambda xp, x: xp.cos(x),),
    "cos": (lambda xp, x: -xp.sin(x),),
    "sinh": (lambda xp, x: xp.cosh(x),),
    "cosh": (lambda xp, x: xp.sinh(x),),
    "tanh": (lambda f: 1 - f * f,),
}


def _smooth(xp: Any, name: str) -> Callable[..., Traced]:
    function: Any = _OPERATORS.get(name) or getattr(xp, name)
    slopes = _SMOOTH[name]

    def run(*args: Any) -> Traced:
        operands = tuple(map(_operand, args))
        xs = [x.x for x in operands]
        f = function(*xs)
        if not _is_floating(f, xp):
            return Traced(f)
        known = {"xp": xp, "f": f, **dict(zip("xy", xs, strict=False))}
        pulls = [
            _by_slope(slope, known, xp, tuple(np.shape(x.x))) if x.step.moves else None
            for slope, x in zip(slopes, operands, strict=True)
        ]
        return record(name, f, operands, lambda g: tuple(pull and pull(g) for pull in pulls))

    return run


def _by_slope(slope: Any, known: dict[str, Any], xp: Any, shape: tuple[int, ...]) -> Any:
    """Return what multiplies by a slope, and holds only what that needs."""
    if not callable(slope):
        return lambda g: sum_to(g if slope == 1.0 else -g, shape)
    needed = {name: known[name] for name in _names(slope) if name != "g"}
    whole = "g" in _names(slope)

    def pull(g: Array) -> Array:
        if whole:
            moved = slope(g=g, **needed)
            return sum_to(moved if _are_finite(moved) else xp.where(g == 0, 0.0, moved), shape)
        factor = slope(**needed)
        if is_array_api_obj(factor) and xp.isdtype(factor.dtype, "bool"):
            return sum_to(xp.where(factor, g, 0.0), shape)
        return sum_to(_times_slope(g, factor, xp), shape)

    return pull


def _names(function: Any) -> tuple[str, ...]:
    names: tuple[str, ...] = function.__code__.co_varnames
    return names


def _times_slope(g: Array, factor: Any, xp: Any) -> Array:
    """Multiply; what no cotangent reaches takes none, whatever the slope is: 0 times inf."""
    moved = g * factor
    if not is_array_api_obj(factor) or _are_finite(factor):
        return moved
    return xp.where(g == 0, 0.0, moved)


def _are_finite(x: Array) -> bool:
    """Say whether all numbers are finite, on NumPy: if their sum is."""
    return is_numpy_array(x) and bool(np.isfinite(np.sum(x)))


def _is_floating(x: Array, xp: Any) -> bool:
    return bool(xp.isdtype(x.dtype, "real floating"))


# What moves numbers: how cotangents are moved back, of the namespace, the cotangent, the operand
# and the other arguments.
_MOVES: dict[str, Callable[..., Array]] = {
    "matrix_transpose": lambda xp, g, x: xp.matrix_transpose(g),
    "reshape": lambda xp, g, x, shape: xp.reshape(g, x.shape),
    "broadcast_to": lambda xp, g, x, shape: sum_to(g, tuple(x.shape)),
    "expand_dims": lambda xp, g, x, axis=0: xp.reshape(g, x.shape),
    "squeeze": lambda xp, g, x, axis=None: xp.reshape(g, x.shape),
    "permute_dims": lambda xp, g, x, axes: xp.permute_dims(
        g, tuple(sorted(range(x.ndim), key=lambda i: axes[i] % x.ndim))
    ),
    "moveaxis": lambda xp, g, x, source, destination: xp.moveaxis(g, destination, source),
    "swapaxes": lambda xp, g, x, a, b: xp.swapaxes(g, a, b),
    "flip": lambda xp, g, x, axis=None: xp.flip(g, axis=axis),
    "roll": lambda xp, g, x, shift, axis=None: xp.roll(
        g, tuple(-s for s in shift) if isinstance(shift, tuple) else -shift, axis=axis
    ),
    "repeat": lambda xp, g, x, repeats, axis: xp.sum(
        xp.reshape(g, (*x.shape[: axis % x.ndim + 1], repeats, *x.shape[axis % x.ndim + 1 :])),
        axis=axis % x.ndim + 1,
    ),
    "tril": lambda xp, g, x, k=0: xp.tril(g, k=k),
    "triu": lambda xp, g, x, k=0: xp.triu(g, k=k),
    "astype": lambda xp, g, x, dtype, copy=True: xp.astype(g, x.dtype),
    "asarray": lambda xp, g, x, dtype=None, copy=None: g,  # of the library that it came to
}


def _mover(xp: Any, name: str) -> Callable[..., Traced]:
    there, back = getattr(xp, name), _MOVES[name]

    def run(x: Any, *args: Any, **kwargs: Any) -> Traced:
        f = there(untraced(x), *args, **kwargs)
        kwargs.pop("device", None)
        if not _is_floating(f, xp):
            return Traced(f)
        x = _operand(x)
        value = x.x
        return record(name, f, (x,), lambda g: (back(xp, g, value, *args, **kwargs),))

    return run


# Without a derivative, or with one of 0.
_FLAT = (
    "equal not_equal less less_equal greater greater_equal logical_and logical_or logical_not "
    "logical_xor isfinite isinf isnan signbit sign floor ceil round trunc floor_divide remainder "
    "bitwise_and bitwise_or bitwise_xor bitwise_invert any all argmax argmin argsort searchsorted "
    "count_nonzero nonzero ones zeros full empty arange eye linspace ones_like zeros_like "
    "full_like empty_like"
)
# What is passed on as it is: dtypes, numbers and questions about them.
_SAME = (
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float32 float64 inf nan pi e newaxis "
    "isdtype finfo iinfo result_type can_cast __array_namespace_info__ __name__"
)
_OF_NUMPY = {
    "power": "pow",
    "true_divide": "divide",
    "absolute": "abs",
    "invert": "bitwise_invert",
    "amax": "max",
    "amin": "min",
    "cumsum": "cumulative_sum",
    "concatenate": "concat",
}


def _say(name: str) -> str:
    return f"A formula on the tape must not use {name}: see refattn.numbers.tape for what it may."


@cache
def space(xp: Any) -> Space:
    """Return the namespace of traced arrays over one of arrays."""
    return Space(xp)


class Space:
    """The functions of the array API for traced arrays."""

    def __init__(self, xp: Any) -> None:
        self.x = self.untraced = xp

    def __repr__(self) -> str:
        return f"<tape over {self.x.__name__}>"

    def __getattr__(self, name: str) -> Any:
        xp = self.x
        if name in _SAME.split():
            found = getattr(xp, name)
        elif name in _SMOOTH:
            found = _smooth(xp, name)
        elif name in _MOVES:
            found = _mover(xp, name)
        elif name in _FLAT.split():
            function: Any = _OPERATORS.get(name) or getattr(xp, name)
            found = partial(_run_plain, function)
        else:
            raise AttributeError(_say(f"`{name}`"))
        setattr(self, name, found)
        return found

    def matmul(self, a: Any, b: Any) -> Traced:
        """Multiply matrices, of two axes or more."""
        a, b = _operand(a), _operand(b)
        (x, y), (a_moves, b_moves) = (a.x, b.x), (a.step.moves, b.step.moves)
        if min(x.ndim, y.ndim) < 2:
            raise TypeError(_say("`matmul` of vectors"))
        turned = self.x.matrix_transpose

        def pull(g: Array) -> tuple[Any, ...]:
            return (
                sum_to(multiply(g, turned(y)), tuple(x.shape)) if a_moves else None,
                sum_to(multiply(turned(x), g), tuple(y.shape)) if b_moves else None,
            )

        return record("matmul", x @ y, (a, b), pull)

    def vecdot(self, a: Any, b: Any, axis: int = -1) -> Traced:
        """Sum products along an axis."""
        (a, b), xp = map(_operand, (a, b)), self.x
        x, y = a.x, b.x

        moves, twice = [a.step.moves, b.step.moves and a.step is not b.step], a.step is b.step

        def pull(g: Array) -> tuple[Any, ...]:
            g = xp.expand_dims(2 * g if twice else g, axis=axis)
            both = zip(moves, (y, x), (x, y), strict=True)
            return tuple(
                sum_to(_times_slope(g, z, xp), tuple(o.shape)) if some else None
                for some, z, o in both
            )

        return record("vecdot", xp.vecdot(x, y, axis=axis), (a, b), pull)

    def sum(self, x: Any, axis: Any = None, dtype: Any = None, keepdims: bool = False) -> Traced:
        """Sum along axes, all by default."""
        return self._total("sum", x, axis, keepdims, {} if dtype is None else {"dtype": dtype})

    def mean(self, x: Any, axis: Any = None, keepdims: bool = False) -> Traced:
        """Average along axes, all by default."""
        return self._total("mean", x, axis, keepdims, {})

    def _total(self, name: str, x: Any, axis: Any, keepdims: bool, more: dict[str, Any]) -> Traced:
        x, xp = _operand(x), self.x
        f = getattr(xp, name)(x.x, axis=axis, keepdims=keepdims, **more)
        if not _is_floating(f, xp):
            return Traced(f)
        kept, shape = _kept(x.shape, axis), x.shape
        share = math.prod(kept) / max(1, math.prod(shape)) if name == "mean" else 1.0

        def pull(g: Array) -> tuple[Any, ...]:
            return (xp.broadcast_to(xp.reshape(g if share == 1.0 else g * share, kept), shape),)

        return record(name, f, (x,), pull)

    def max(self, x: Any, axis: Any = None, keepdims: bool = False) -> Traced:
        """Take the largest along axes, all by default; those that tie share the cotangent."""
        return self._extreme("max", x, axis, keepdims)

    def min(self, x: Any, axis: Any = None, keepdims: bool = False) -> Traced:
        """Take the smallest along axes, all by default; those that tie share the cotangent."""
        return self._extreme("min", x, axis, keepdims)

    def _extreme(self, name: str, x: Any, axis: Any, keepdims: bool) -> Traced:
        x, xp = _operand(x), self.x
        f = getattr(xp, name)(x.x, axis=axis, keepdims=keepdims)
        kept, value = _kept(x.shape, axis), x.x

        def pull(g: Array) -> tuple[Any, ...]:
            ties = xp.astype(value == xp.reshape(f, kept), g.dtype)
            number = xp.sum(ties, axis=axis, keepdims=True)
            share = xp.reshape(g, kept) / xp.where(number == 0, 1.0, number)  # 0 where one is nan
            return (xp.where(ties == 0, 0.0, share),)

        return record(name, f, (x,), pull)

    def where(self, some: Any, a: Any, b: Any) -> Traced:
        """Choose between two arrays."""
        some, a, b, xp = untraced(some), _operand(a), _operand(b), self.x
        shapes = [tuple(np.shape(x.x)) for x in (a, b)]

        def pull(g: Array) -> tuple[Any, ...]:
            of_a = sum_to(xp.where(some, g, 0.0), shapes[0])
            return of_a, sum_to(xp.where(some, 0.0, g), shapes[1])

        return record("where", xp.where(some, a.x, b.x), (a, b), pull)

    def clip(self, x: Any, min: Any = None, max: Any = None) -> Traced:
        """Bound from below and from above."""
        x = x if min is None else self.where(x < min, min, x)
        return x if max is None else self.where(x > max, max, x)

    def concat(self, arrays: Any, axis: int = 0) -> Traced:
        """Join arrays along an axis."""
        traced = tuple(map(_operand, arrays))
        along, stop = axis % traced[0].ndim, np.cumsum([x.shape[axis] for x in traced]).tolist()

        def pull(g: Array) -> tuple[Any, ...]:
            parts = (slice(i, j) for i, j in zip([0, *stop], stop, strict=False))
            return tuple(g[(slice(None),) * along + (part, ...)] for part in parts)

        return record("concat", self.x.concat([x.x for x in traced], axis=axis), traced, pull)

    def stack(self, arrays: Any, axis: int = 0) -> Traced:
        """Join arrays along a new axis."""
        return self.concat([self.expand_dims(x, axis=axis) for x in arrays], axis=axis)

    def take(self, x: Any, indices: Any, axis: int = 0) -> Traced:
        """Take what has these indices, of one axis, along an axis."""
        x, at, xp = _operand(x), untraced(indices), self.x
        shape = x.shape

        def pull(g: Array) -> tuple[Any, ...]:
            rows = xp.moveaxis(g, axis, 0)
            rest = tuple(rows.shape[1:])
            rows = xp.reshape(rows, (rows.shape[0], math.prod(rest)))
            rows = xp.reshape(add_rows(rows, at, shape[axis], xp), (shape[axis], *rest))
            return (xp.moveaxis(rows, 0, axis),)

        return record("take", xp.take(x.x, at, axis=axis), (x,), pull)

    def take_along_axis(self, x: Any, indices: Any, axis: int = -1) -> Traced:
        """Take what has these indices, an array of as many axes, along an axis."""
        x, at, xp = _operand(x), untraced(indices), self.x
        length = x.shape[axis]

        def pull(g: Array) -> tuple[Any, ...]:
            rows, places = (xp.moveaxis(y, axis, -1) for y in (g, at))
            return (xp.moveaxis(add_rows(rows[..., None], places, length, xp)[..., 0], -1, axis),)

        return record("take_along_axis", xp.take_along_axis(x.x, at, axis=axis), (x,), pull)

    def sort(self, x: Any, axis: int = -1, **options: Any) -> Traced:
        """Sort along an axis."""
        return self.take_along_axis(x, self.argsort(x, axis=axis, **options), axis=axis)

    def cumulative_sum(
        self, x: Any, axis: Any = None, dtype: Any = None, include_initial: bool = False
    ) -> Traced:
        """Sum up to each place along an axis."""
        x, xp = _operand(x), self.x
        axis = 0 if axis is None else axis
        f = xp.cumulative_sum(x.x, axis=axis, dtype=dtype, include_initial=include_initial)
        if not _is_floating(f, xp):
            return Traced(f)

        def pull(g: Array) -> tuple[Any, ...]:
            sums = xp.flip(xp.cumulative_sum(xp.flip(g, axis=axis), axis=axis), axis=axis)
            later = (slice(None),) * (axis % sums.ndim) + (slice(1, None), ...)
            return (sums[later] if include_initial else sums,)

        return record("cumulative_sum", f, (x,), pull)

    def broadcast_arrays(self, *arrays: Any) -> list[Traced]:
        """Broadcast arrays to one shape."""
        shape = np.broadcast_shapes(*(tuple(x.shape) for x in arrays))
        return [self.broadcast_to(x, shape) for x in arrays]

    def transpose(self, x: Any, axes: Any = None) -> Traced:
        """Reverse the axes, as NumPy does, or put them in another order."""
        turned: Traced = self.permute_dims(x, tuple(range(x.ndim))[::-1] if axes is None else axes)
        return turned


def _kept(shape: tuple[int, ...], axis: Any) -> tuple[int, ...]:
    """Put 1 for the axes over which an array is reduced."""
    axes = range(len(shape)) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    over = {i % len(shape) for i in axes}
    return tuple(1 if i in over else length for i, length in enumerate(shape))


def _run_plain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    result = function(*map(untraced, args), **{x: untraced(y) for x, y in kwargs.items()})
    return mapped(Traced, result)


def _operator(name: str, *, turned: bool = False) -> Callable[..., Traced]:
    def run(x: Traced, *other: Any) -> Traced:
        function: Callable[..., Traced] = getattr(x.__array_namespace__(), name)
        return function(*other, x) if turned else function(x, *other)

    return run


for _sign, _name in map(str.split, _SIGNS):
    setattr(Traced, f"__{_sign}__", _operator(_name))
    if hasattr(int, f"__r{_sign}__") or _name == "matmul":
        setattr(Traced, f"__r{_sign}__", _operator(_name, turned=True))
