"""Check arguments: shapes and dtypes always, values only if they are known, as under tracing."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from numbers import Integral, Rational, Real
from typing import Any

import numpy as np

from .library import (
    Array,
    array_namespace,
    constant,
    device,
    is_array_api_obj,
    is_numpy_array,
    to_host,
    untraced,
)
from .words import close

_MANY = 10  # names that an error lists, if there are more and a command lists all


def arrays(min_ndim: int, **named: Array) -> Any:
    """Check that arrays share a library, a supported dtype and a device; return the library."""
    for name, x in named.items():
        is_array(name, x, 31)
        if x.ndim < min_ndim:
            axes = "1 axis" if min_ndim == 1 else f"{min_ndim} axes"
            raise ValueError(f"`{name}` must have at least {axes}, got shape {shape_of(x)}.")
    (first, head), *rest = named.items()
    xp = array_namespace(head)
    supported = [xp.float32, xp.float64]
    if is_numpy_array(untraced(head)):
        supported.append(np.dtype(np.longdouble))
    if head.dtype not in supported:
        cast = f"xp.astype({first}, xp.float32)"
        if is_numpy_array(untraced(head)):
            cast = f"{first}.astype(np.float32)"
        elif str(head.dtype).startswith("torch."):
            cast = f"{first}.to(torch.float32)"
        raise TypeError(
            f"`{first}` must have dtype float32 or float64, got {head.dtype}: cast it first, "
            f"for example with {cast}."
        )
    for name, x in rest:
        same_home(name, x, first, head)
        if x.dtype != head.dtype:
            raise TypeError(
                f"`{name}` must have the dtype of `{first}`, {head.dtype}, got {x.dtype}: "
                "cast one of them first."
            )
    return xp


def is_array(name: str, x: Any, most: int = 32) -> None:
    """Check that `x` is an array of some library, and its axes: NumPy broadcasts up to 32.

    Queries, keys and values have one fewer, as each query may have samples.
    """
    if not is_array_api_obj(x) or isinstance(x, np.ma.MaskedArray):
        several = isinstance(x, tuple | list) and any(map(is_array_api_obj, x))
        hint = ": pass each of its arrays by its own keyword" * several
        if not several and isinstance(x, tuple | list | float | int):
            hint = f": pass np.asarray({name})"
        raise TypeError(
            f"`{name}` must be an array of a library with the array API, got {describe(x)}{hint}."
        )
    if type(x) is not np.ndarray:
        _check_storage(name, untraced(x))
    if x.ndim > most:
        raise ValueError(f"`{name}` must have at most {most} axes, got {x.ndim}.")


def _check_storage(name: str, x: Any) -> None:
    """Check that a tensor of torch is dense: it has a number at every place."""
    layout = getattr(x, "layout", "torch.strided")
    of_torch = {
        "of device meta, without numbers": getattr(x, "is_meta", False),
        "that is nested": getattr(x, "is_nested", False),
        f"with layout {layout}": str(layout) != "torch.strided",
    }
    for kind in (kind for kind, holds in of_torch.items() if holds):
        raise TypeError(f"`{name}` must be a dense array, got a tensor {kind}.")


def same_home(name: str, x: Array, first: str, head: Array) -> None:
    """Check that two arrays live in one library and on one device."""
    try:
        array_namespace(untraced(head), untraced(x))
    except TypeError:
        raise TypeError(
            f"`{name}` must come from the same array library as `{first}`, "
            f"got {describe(x)} and {describe(head)}."
        ) from None
    homes = device(x), device(head)
    if None not in homes and homes[0] != homes[1]:  # JAX: an array being traced has no device
        raise ValueError(
            f"`{name}` must be on the device of `{first}`, {device(head)}, got {device(x)}."
        )


def is_of(x: Array, kind: str) -> bool:
    """Say whether an array has a dtype of some kind."""
    return bool(array_namespace(x).isdtype(x.dtype, kind))


def boolean(name: str, x: Any, first: str, head: Array) -> None:
    """Check a boolean array that goes with `head`."""
    is_array(name, x, 31)
    same_home(name, x, first, head)
    if not is_of(x, "bool"):
        raise TypeError(say_not_boolean(name, x.dtype))


def say_not_boolean(name: str, dtype: Any) -> str:
    """Say how a mask of numbers is made one of truths; what is added to scores is a bias."""
    hint = f"pass {name} != 0 if nonzero keeps a key"
    added = ", and what is added to scores as `bias`" * ("float" in str(dtype))
    return f"`{name}` must have dtype bool (True = attend), got {dtype}: {hint}{added}."


def broadcasts(name: str, x: Array, shape: tuple[int, ...], rule: str) -> None:
    """Check that `x` broadcasts to `shape` without enlarging it."""
    try:
        fits = np.broadcast_shapes(shape_of(x), shape) == shape
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(f"`{name}` must broadcast to {rule} = {shape}, got shape {shape_of(x)}.")


def leading(name: str, x: Array, other: str, y: Array) -> None:
    """Check that the axes before the last two broadcast."""
    try:
        np.broadcast_shapes(shape_of(x)[:-2], shape_of(y)[:-2])
    except ValueError:
        raise ValueError(
            f"`{name}` and `{other}` must have leading axes that broadcast, "
            f"got shapes {shape_of(x)} and {shape_of(y)}."
        ) from None


def compatible(name: str, x: Array, other: str, y: Array) -> None:
    """Check that vectors (..., d) have one length and leading axes that broadcast."""
    try:
        np.broadcast_shapes(shape_of(x), shape_of(y))
        fits = x.shape[-1] == y.shape[-1] > 0
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            f"`{name}` and `{other}` must have last axes of one length d >= 1 and leading axes "
            f"that broadcast, got shapes {shape_of(x)} and {shape_of(y)}."
        )


def floats(name: str, x: Any, like: Array) -> Array:
    """Check an array of real floats that is NumPy or of the library of `like`, and cast it."""
    is_array(name, x)
    if not is_numpy_array(untraced(x)):
        same_home(name, x, "q", like)
    if not is_of(x, "real floating"):
        raise TypeError(f"`{name}` must have a real floating dtype, got {x.dtype}.")
    return constant(x, like)


def host(name: str, x: Any, rule: str, min_ndim: int, dtype: Any = np.float64) -> Any:
    """Turn host data into an array of finite numbers with at least `min_ndim` axes."""
    whole(name, x)
    values = to_host(x, None) if is_array_api_obj(x) else np.asarray(x)
    is_array(name, values, 31)
    if values.dtype.kind not in "fiu":
        raise TypeError(f"`{name}` must hold real numbers, got {describe(x)} of {values.dtype}.")
    values = values.astype(dtype)
    if values.ndim < min_ndim or 0 in values.shape[-min_ndim:]:
        raise ValueError(f"`{name}` must have shape {rule}, got {values.shape}.")
    if not np.all(np.isfinite(values)):
        raise ValueError(f"`{name}` must be finite, got nan or inf.")
    return values


def host_integers(name: str, x: Any, rule: str, ndim: int) -> Any:
    """Turn host data, or an array of any library, into integers with so many axes."""
    whole(name, x)
    x = as_array(name, x, rule)
    values = x if is_numpy_array(x) else to_host(x, None)
    if values.size and values.dtype.kind not in "iu":
        raise TypeError(f"`{name}` must hold integers, got {describe(x)} of {values.dtype}.")
    if values.ndim != ndim:
        raise ValueError(f"`{name}` must have shape {rule}, got {values.shape}.")
    return values.astype(np.int64)


def as_array(name: str, x: Any, rule: str) -> Array:
    """Turn lists of numbers into an array of NumPy."""
    try:
        return x if is_array_api_obj(x) else np.asarray(x)
    except ValueError:
        raise ValueError(
            f"`{name}` must have shape {rule}, got lists of several lengths."
        ) from None


def whole(name: str, x: Any) -> None:
    """Check that nothing is hidden in host data: a conversion would drop the mask of numpy.ma."""
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"`{name}` must have no masked entries, got {describe(x)}.")


def real(
    name: str,
    value: Any,
    *,
    positive: bool = False,
    optional: bool = False,
    like: Array | None = None,
) -> Any:
    """Check a finite real number and return it as a float; None stays None if `optional`.

    A float means the number that it is, to the last bit. Where `like` is a longdouble array, the
    number stays one of that precision.
    """
    if value is None and optional:
        return None
    kind = "positive finite real number" if positive else "finite real number"
    kind += " or None" if optional else ""
    if isinstance(value, bool | np.bool_) or not isinstance(value, Real):
        raise TypeError(f"`{name}` must be a {kind}, got {describe(value)}.")
    like = untraced(like)
    wide = is_numpy_array(like) and getattr(like, "dtype", None) == np.longdouble
    try:
        result: Any = _longdouble(value) if wide else float(value)
    except (OverflowError, ValueError):  # of integers with too many digits
        result = math.inf
    if not np.isfinite(result) or (positive and result <= 0):
        raise ValueError(f"`{name}` must be a {kind}, got {show(value)}.")
    return result


def _longdouble(value: Any) -> Any:
    """Convert a number to longdouble; NumPy takes fractions through float64."""
    if isinstance(value, Rational):
        return np.longdouble(value.numerator) / np.longdouble(value.denominator)
    return np.longdouble(value)


def at_least_zero(name: str, value: Any, *, like: Array | None = None) -> Any:
    """Check a finite real number that is at least 0, as `real` does."""
    number = real(name, value, like=like)
    if number < 0:
        raise ValueError(f"`{name}` must be at least 0, got {show(value)}.")
    return number


def generator(rng: Any, name: str = "rng") -> np.random.Generator:
    """Check a source of randomness and return its generator."""
    try:
        return np.random.default_rng(rng)
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"`{name}` must be None, a non-negative integer, a Generator or anything that "
            f"numpy.random.default_rng takes, got {describe(rng)}."
        ) from None


def positive_integer(name: str, value: Any) -> None:
    """Check an integer of at least 1."""
    _integer(name, value, 1, "positive integer")


def positive_integers(name: str, values: Any) -> list[Any]:
    """Check integers of at least 1, and list them: an iterator gives them once."""
    if not isinstance(values, Iterable) or isinstance(values, str | bytes):
        raise TypeError(
            f"`{name}` must be a sequence of positive integers, got {describe(values)}."
        )
    listed = list(values)
    for i, value in enumerate(listed):
        positive_integer(f"{name}[{i}]", value)
    return listed


def length(name: str, value: Any, size: int = 1) -> None:
    """Check how many rows, each of `size` floats, an array is to have."""
    positive_integer(name, value)
    at_most(name, value, sys.maxsize // (8 * max(size, 1)), "the most that memory can address")


def at_most(name: str, value: Any, most: int, rule: str) -> None:
    """Check an upper limit, which `rule` explains."""
    if value > most:
        raise ValueError(f"`{name}` must be at most {show(most)}, {rule}, got {show(value)}.")


def non_negative_integer(name: str, value: Any) -> None:
    """Check an integer of at least 0."""
    _integer(name, value, 0, "non-negative integer")


def _integer(name: str, value: Any, least: int, kind: str) -> None:
    if isinstance(value, bool | np.bool_) or not isinstance(value, Integral):
        raise TypeError(f"`{name}` must be a {kind}, got {describe(value)}.")
    if value < least:
        raise ValueError(f"`{name}` must be a {kind}, got {show(value)}.")
    at_most(name, value, 10**308, "the largest power of 10 in float64")


def flag(name: str, value: Any) -> None:
    """Check a Python bool: it chooses between computations, so it must not be an array."""
    if not isinstance(value, bool):
        raise TypeError(f"`{name}` must be True or False, got {describe(value)}.")


def function(name: str, value: Any) -> None:
    """Check a function of an array."""
    if not callable(value):
        raise TypeError(f"`{name}` must be a function of an array, got {type(value).__name__}.")


def list_names(argument: str, value: Any) -> list[str]:
    """Check an iterable of names, or one name."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, Iterable):
        raise TypeError(f"`{argument}` must be an iterable of names, got {type(value).__name__}.")
    listed = list(value)
    for name in listed:
        if not isinstance(name, str):
            raise TypeError(f"`{argument}` must hold names only, got {type(name).__name__}.")
    return listed


def choice(
    name: str, value: Any, options: Iterable[str], *, some: Iterable[str] = (), listing: str = ""
) -> None:
    """Check a name against the names that exist; of many list `some`, or ten, and say where all."""
    options = sorted(options)
    if not isinstance(value, str):
        raise TypeError(f"`{name}` must be a string, got {describe(value)}.")
    if value not in options:
        shortened = listing and len(options) > _MANY
        some = (list(some) or options)[:_MANY] if shortened else options
        listed = ", ".join(f'"{option}"' for option in some)
        rest = f", ... (all: {listing})" if shortened else ""
        hint = close(value, options)
        raise ValueError(f"`{name}` must be one of {listed}{rest}, got {value!r}.{hint}")


def shape_of(x: Array) -> tuple[int, ...]:
    return tuple(x.shape)


def describe(x: Any) -> str:
    """Name the type of a value, with the value where it is short."""
    x = untraced(x)
    kind = type(x)
    if is_array_api_obj(x):
        return f"{kind.__module__}.{kind.__qualname__}"
    value = f"{show(x)} of type " if isinstance(x, str | int | float) else ""
    return value + kind.__qualname__


def show(x: Any, spec: str = "") -> str:
    """Show a value; of a long integer its size: Python refuses to print the longest."""
    whole = int(x.numerator) // int(x.denominator) if isinstance(x, Rational) else 0
    if abs(whole) < 10**20:
        return repr(x) if isinstance(x, str) else format(x, spec)
    return f"about {'-' if whole < 0 else ''}10**{math.log10(abs(whole)):.0f}"
