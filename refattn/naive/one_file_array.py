"""Stands in for `arrays.library` in the file of formulas for others: see `naive.one_file`.

Arrays of NumPy 2 and of libraries that have `__array_namespace__` need nothing else; those of
others, such as torch and Dask, need array-api-compat.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any

import numpy as np

Array = Any  # any array of a library with the array API; shapes are in the docstrings


def as_written(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function to compute what is written.

    Overflow is an answer, of which NumPy does not warn, and JAX makes products in full precision.
    """

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        jax = sys.modules.get("jax")
        full = jax.default_matmul_precision("highest") if jax else nullcontext()
        with np.errstate(all="ignore"), full:
            return function(*args, **kwargs)

    return run


def array_namespace(*arrays: Array | None) -> Any:
    """Return the array API namespace of the arrays, which is one."""
    given = [x for x in arrays if x is not None]
    if not all(hasattr(x, "__array_namespace__") for x in given):
        import array_api_compat

        return array_api_compat.array_namespace(*given)
    first, *rest = (x.__array_namespace__() for x in given)
    if any(xp is not first for xp in rest):
        raise TypeError(f"Arrays must come from one library, got {first} and {rest}.")
    return first


def constant(value: Any, like: Array) -> Array:
    """Move host data (a number or a NumPy array) to the dtype and device of `like`."""
    xp = array_namespace(like)
    if is_array_api_obj(value) and not is_numpy_array(value):
        return xp.astype(value, like.dtype)
    return xp.asarray(value, dtype=like.dtype, device=device(like))


def device(x: Array) -> Any:
    """Return the device of an array; that of one that JAX traces is None."""
    return x.device if hasattr(x, "device") else None


def untraced(x: Any) -> Any:
    """Return what a tape of refattn traces, an array or a namespace; anything else as it is."""
    return getattr(x, "untraced", x)


def is_numpy_array(x: Any) -> bool:
    """Say whether `x` is of NumPy."""
    return isinstance(x, np.ndarray | np.generic)


def is_array_api_obj(x: Any) -> bool:
    """Say whether `x` is an array of some library."""
    if hasattr(x, "__array_namespace__"):
        return True
    try:
        import array_api_compat
    except ImportError:
        return False
    return bool(array_api_compat.is_array_api_obj(x))


def host_values(x: Array) -> Any:
    """Values as a NumPy array; None where there are none yet, or on another device."""
    try:
        return np.from_dlpack(x)
    except (AttributeError, BufferError, RuntimeError, TypeError, ValueError):
        return None
