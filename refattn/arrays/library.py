"""The array library behind the arguments: the only module that imports array_api_compat."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from contextvars import copy_context
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar, cast

import array_api_compat
import numpy as np
from array_api_compat import numpy as _NUMPY_NAMESPACE

from .words import with_known_keywords

# Lent to the package, of which no other module imports array_api_compat.
device, to_device = array_api_compat.device, array_api_compat.to_device
is_array_api_obj, is_jax_array = array_api_compat.is_array_api_obj, array_api_compat.is_jax_array
is_cupy_array, is_dask_array = array_api_compat.is_cupy_array, array_api_compat.is_dask_array
is_torch_array = array_api_compat.is_torch_array

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")
Array = Any  # any array of a library that array_api_compat knows; shapes are in the docstrings
Floats = np.ndarray[tuple[Any, ...], np.dtype[Any]]  # numbers on the host
Doubles = np.ndarray[tuple[Any, ...], np.dtype[np.float64]]


_AS_IT_IS = nullcontext()


def as_written(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Decorate a function to compute what is written, whatever the caller has set.

    Overflow is an answer, of which NumPy does not warn. Products have the precision of the arrays,
    also under torch.autocast, and in JAX, whose default on GPUs and TPUs has fewer digits. CuPy
    computes on the device of the first array, and Dask's arrays lose chunks of length 0.
    """

    function = with_known_keywords(function)

    @wraps(function)
    def run(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        given = _drop_empty_chunks((args, kwargs)) if "dask" in sys.modules else (args, kwargs)
        # What is set in a context of its own is gone with it, even after an interrupt.
        result: _Result = copy_context().run(_compute, function, *given)
        return result

    return run


def _compute(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with np.errstate(all="ignore"), _full_precision(), _device_of((*args, *kwargs.values())):
        return function(*args, **kwargs)


def _drop_empty_chunks(x: Any) -> Any:
    """Leave out chunks of length 0 of Dask's arrays: some reductions of these have no answer."""
    if isinstance(x, tuple):
        parts = [_drop_empty_chunks(y) for y in x]
        if all(part is y for part, y in zip(parts, x, strict=True)):
            return x
        return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
    if type(x) is dict:
        return {name: _drop_empty_chunks(y) for name, y in x.items()}
    if not is_dask_array(x):
        return x
    chunks = tuple(tuple(filter(None, of_axis)) or (0,) for of_axis in x.chunks)
    if 0 in x.shape:  # Dask cannot reshape it if it is in several chunks
        chunks = tuple((size,) for size in x.shape)
    return x if chunks == x.chunks else x.rechunk(chunks)


def split_rows(x: Array, sizes: Iterable[int], xp: Any) -> Array:
    """View rows, (..., parts size, d), as parts of so many: (..., parts, size, d)."""
    shape = (*x.shape[:-2], *sizes, x.shape[-1])
    if 0 in shape and is_dask_array(untraced(x)):
        return cast(Array, xp.zeros(shape, dtype=x.dtype, device=device(x)))
    return cast(Array, xp.reshape(x, shape))


def _full_precision() -> AbstractContextManager[Any]:
    """Switch off torch.autocast where it is on, and the short products of JAX (TF32 on GPUs)."""
    torch: Any = sys.modules.get("torch")
    jax: Any = sys.modules.get("jax")
    stack = ExitStack()
    for kind in ("cpu", "cuda", "mps", "xpu") if hasattr(torch, "autocast") else ():
        if torch.is_autocast_enabled(kind):
            stack.enter_context(torch.autocast(kind, enabled=False))
    if hasattr(jax, "default_matmul_precision"):
        stack.enter_context(jax.default_matmul_precision("highest"))
    return stack


def _device_of(args: tuple[Any, ...]) -> Any:
    """Make the device of the first CuPy array, in tuples too, the current one."""
    for x in args if "cupy" in sys.modules else ():
        if is_cupy_array(x):
            return x.device
        found = _device_of(x) if isinstance(x, tuple) else _AS_IT_IS
        if found is not _AS_IT_IS:
            return found
    return _AS_IT_IS


def fused(step: Callable[..., _Result]) -> Callable[..., _Result]:
    """Decorate a step of an evaluation to be one kernel of CuPy; elsewhere it runs as it is.

    A step is a pure function of arrays and numbers by position, and at last of their namespace. It
    has elementwise functions only and asks for no value and no shape: then results have the shape
    that its arguments broadcast to. Or it has one reduction, after which it uses only what that
    returned. It calls no other step. For CuPy alone it may write to an argument, whole. What a tape
    traces is recorded function by function. A version of CuPy that makes no kernel of a step is
    warned of, and runs it as it is, too.
    """
    refused = False

    @wraps(step)
    def run(*arguments: Any) -> _Result:
        nonlocal refused
        if refused or arguments[-1] is not sys.modules.get("array_api_compat.cupy"):
            return step(*arguments)
        try:
            result: _Result = _kernel_of_step(step, arguments[-1])(*arguments[:-1])
        except (AttributeError, NotImplementedError, TypeError, ValueError) as error:
            result = step(*arguments)  # of which what is no fault of CuPy raises again
            refused = True
            warnings.warn(
                f"CuPy makes no kernel of {step.__name__}: {error}", RuntimeWarning, stacklevel=2
            )
        return result

    return run


@cache
def _kernel_of_step(step: Callable[..., Any], xp: Any) -> Any:
    """Have CuPy make a kernel of a step."""
    make = sys.modules["cupy"].fuse(kernel_name=f"refattn_{step.__name__}")
    return make(lambda *arguments: step(*arguments, xp))


def array_namespace(*arrays: Array | None) -> Any:
    """Return the array API namespace of the arrays, at once where they are NumPy's."""
    if all(type(x) is np.ndarray for x in arrays):
        return _NUMPY_NAMESPACE
    return array_api_compat.array_namespace(*arrays)


def is_numpy_array(x: Any) -> bool:
    """Say whether an array is NumPy's, at once where it is."""
    return type(x) is np.ndarray or bool(array_api_compat.is_numpy_array(x))


def constant(value: Any, like: Array) -> Array:
    """Move host data (a number or a NumPy array) to the dtype and device of `like`."""
    xp = array_namespace(like)
    if is_array_api_obj(value) and not is_numpy_array(untraced(value)):
        return xp.astype(value, like.dtype)
    return xp.asarray(value, dtype=like.dtype, device=device(like))


def own_copy(x: Array, xp: Any) -> Array:
    """Copy an array, on its device."""
    return xp.asarray(x, copy=True, device=device(x))


def device_memory(x: Array) -> int:
    """Say how many bytes the device of an array of CuPy has."""
    return _memory_of(x.device)


@cache
def _memory_of(device: Any) -> int:
    return int(device.mem_info[1])


def untraced(x: Any) -> Any:
    """Return what a tape traces, an array or a namespace; anything else is returned as it is."""
    return getattr(x, "untraced", x)


def to_host(x: Array, dtype: Any = np.float64) -> Any:
    """Bring an array of any library, on any device, to NumPy; Dask computes it."""
    x = untraced(x)
    if is_torch_array(x):
        x = x.detach()  # the result is no part of a graph of derivatives
    if is_torch_array(x) or is_cupy_array(x):
        x = to_device(x, "cpu")
    elif not (is_numpy_array(x) or is_jax_array(x) or is_dask_array(x)):
        x = np.from_dlpack(x, device="cpu")
    try:
        return np.asarray(x, dtype=dtype)
    except TypeError:
        if not is_jax_array(x):
            raise
        raise TypeError(
            "numbers that JAX traces are not known yet, and NumPy computes with them on the host "
            "here: call this outside of jit, vmap and grad, and pass its result."
        ) from None


def host_values(x: Array) -> Any:
    """Bring values to NumPy; None where there are none yet, of Dask or while JAX traces."""
    if is_dask_array(untraced(x)):
        return None
    try:
        return to_host(x, dtype=None)
    except (TypeError, RuntimeError):  # traced by JAX; mapped over, or without values, in torch
        return None


def host_dtype(like: Array) -> Any:
    """Return the dtype in which constants for `like` are computed on the host."""
    like = untraced(like)
    return np.result_type(like, np.float64) if is_numpy_array(like) else np.float64


def has_float64(like: Array, xp: Any) -> bool:
    """Say whether there is float64 on the device: JAX has it on demand, some devices never."""
    info = xp.__array_namespace_info__()
    return "float64" in info.dtypes(device=device(like), kind="real floating")


def has_fft(x: Array, xp: Any) -> bool:
    """Say whether the library has Fourier transforms; those of Dask are of whole axes only."""
    try:
        return not is_dask_array(x) and hasattr(xp, "fft")
    except RuntimeError:  # of a library whose extensions are switched off
        return False


def widest(x: Array, xp: Any) -> Any:
    """Return float64 for an array of float32 where the device has it, or the array's dtype."""
    return xp.float64 if x.dtype == xp.float32 and has_float64(x, xp) else x.dtype


def centred(k: Array, mask: Array | None, xp: Any) -> Array:
    """Subtract the mean of the keys that are seen, of mask (..., 1, m); others become 0."""
    if mask is None:
        return _less_mean(k, xp.sum(k, axis=-2, keepdims=True), max(1, k.shape[-2]), xp)
    seen = xp.matrix_transpose(mask)
    size = xp.sum(xp.astype(seen, k.dtype), axis=-2, keepdims=True)
    total = xp.sum(xp.where(seen, k, 0.0), axis=-2, keepdims=True)
    return xp.where(seen, k - total / xp.where(size > 0, size, 1.0), 0.0)


@fused
def _less_mean(x: Array, total: Array, count: int, xp: Any) -> Array:
    return x - total / count


def reverse(x: Array, axis: int) -> Array:
    """Reverse the order along an axis."""
    xp = array_namespace(x)
    if is_jax_array(untraced(x)):  # whose compiler may abort on a reversal of booleans
        back = xp.arange(x.shape[axis] - 1, -1, -1, device=device(x))
        return xp.take(x, back, axis=axis)
    return xp.flip(x, axis=axis)


def take_rows(x: Array, indices: Array, xp: Any) -> Array:
    """Take the rows of x, (..., m, d), at indices (..., S): (..., S, d)."""
    lead = np.broadcast_shapes(tuple(x.shape[:-2]), tuple(indices.shape[:-1]))
    shape = (*lead, indices.shape[-1], x.shape[-1])
    if 0 in shape:  # which Dask does not reshape
        return xp.zeros(shape, dtype=x.dtype, device=device(x))
    return xp.reshape(take_flat(x, first_rows(x, xp) + indices, xp), shape)


def first_rows(x: Array, xp: Any) -> Array:
    """Number the rows of x, (..., m, d), one head after the other: the first of each, (..., 1)."""
    heads = tuple(x.shape[:-2])
    rows = max(1, x.shape[-2])
    return xp.reshape(xp.arange(0, rows * math.prod(heads), rows, device=device(x)), (*heads, 1))


def take_flat(x: Array, places: Array, xp: Any) -> Array:
    """Take rows of x, (..., d), by their numbers over all axes before the last."""
    rows = xp.reshape(x, (math.prod(x.shape[:-1]), x.shape[-1]))
    return xp.take(rows, xp.reshape(places, (-1,)), axis=0)


def add_rows(x: Array, indices: Array, count: int, xp: Any) -> Array:
    """Sum the rows of x, (..., S, d), that have one index, (..., S): (..., count, d).

    It is the pullback of `take_rows`. Rows are sorted by their indices, and those that are 1, 2,
    4, ... places apart are added where they have the same: in the same order at every call.
    """
    home, (*lead, size, d) = device(x), x.shape
    if is_dask_array(x):
        each = indices[..., None] == xp.arange(count, device=home)
        return xp.sum(xp.where(each[..., None], x[..., None, :], 0.0), axis=-3)
    heads = math.prod(lead)
    wanted = xp.arange(heads * count, device=home)
    of_head = xp.astype(xp.broadcast_to(indices, (*lead, size)), wanted.dtype)
    first = xp.reshape(count * xp.arange(heads, device=home), (*lead, 1))
    place = xp.reshape(of_head + first, (-1,))
    order = xp.argsort(place)
    place, rows = xp.take(place, order), xp.take(xp.reshape(x, (heads * size, d)), order, axis=0)
    apart = 1
    while apart < heads * size:
        same = place[apart:] == place[:-apart]
        if is_numpy_array(x) and not same.any():
            break
        more = xp.where(same[:, None], rows[:-apart, :], 0.0)
        rows = xp.concat([rows[:apart, :], rows[apart:, :] + more], axis=0)
        apart *= 2
    if not heads * size:
        return xp.zeros((*lead, count, d), dtype=x.dtype, device=home)
    last = xp.searchsorted(place, wanted, side="right") - 1
    last = xp.where(last < 0, 0, last)
    some = (xp.take(place, last) == wanted)[:, None]
    return xp.reshape(xp.where(some, xp.take(rows, last, axis=0), 0.0), (*lead, count, d))


def root_scale(scale: float | None, q: Array) -> Array:
    """Take the square root of the scale, the factor to kernel coordinates, in the dtype of `q`."""
    return constant(q.shape[-1], q) ** -0.25 if scale is None else constant(scale, q) ** 0.5


def on_whole_rows(
    function: Callable[..., Any], arrays: list[Array], results: list[tuple[int, int]], xp: Any
) -> Any:
    """Call a function of NumPy arrays on Dask's, lazily, each whole along its last two axes.

    A result has the rows of one array and the columns of another, whose numbers are given.
    """
    whole = [x.rechunk({-2: -1, -1: -1}) for x in arrays]
    axes = [(*range(-x.ndim, -2), f"r{i}", f"c{i}") for i, x in enumerate(whole)]
    _, whole = xp.unify_chunks(*(y for pair in zip(whole, axes, strict=True) for y in pair))
    cores = [f"(r{i},c{i})" for i in range(len(whole))], [f"(r{i},c{j})" for i, j in results]
    signature, types = "->".join(map(",".join, cores)), (whole[0].dtype,) * len(results)
    return xp.apply_gufunc(function, signature, *whole, output_dtypes=types)


def traced_once(x: Array) -> bool:
    """Say whether loops are better in the library's own control flow: JAX compiles each round."""
    return is_jax_array(x)


def loop(step: Callable[[Any, Any], tuple[Any, Any]], state: Any, items: Any) -> Any:
    """Call `step(state, item)`, which returns the next state and a result; stack the results.

    Items are along the first axis of each array, of a library whose loops are `traced_once`.
    """
    jax: Any = sys.modules["jax"]
    first = jax.tree.map(lambda x: x[0], items)
    after, _ = jax.eval_shape(step, state, first)  # axes that broadcast are there in later rounds
    state = jax.tree.map(lambda x, y: jax.numpy.broadcast_to(x, y.shape), state, after)
    return jax.lax.scan(step, state, items)[1]
