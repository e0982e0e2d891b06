"""The array library behind the arguments: the only module that imports array_api_compat."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from functools import reduce, wraps
from itertools import product
from typing import Any, ParamSpec, TypeVar

import array_api_compat
import numpy as np
from array_api_compat import (
    device,
    is_array_api_obj,
    is_cupy_array,
    is_dask_array,
    is_jax_array,
    is_numpy_array,
    is_torch_array,
    to_device,
)

_P = ParamSpec("_P")
_T = TypeVar("_T")
Array = Any  # any array of a library that array_api_compat knows; shapes are in the docstrings

__all__ = [
    "Array",
    "add",
    "array_namespace",
    "as_written",
    "block_shape",
    "blocks",
    "constant",
    "cut",
    "device",
    "exp",
    "has_float64",
    "host_dtype",
    "is_array_api_obj",
    "is_numpy_array",
    "loop",
    "most_threads",
    "multiply",
    "norm_bound",
    "pairwise",
    "part",
    "put",
    "rescale",
    "room",
    "root_scale",
    "square_norm",
    "sum_of_products",
    "tiles",
    "to_host",
    "traced_once",
]

_TERMS = 48  # that one matrix product may add
_WHOLE = 128  # terms of a product of queries and keys that is not cut, which would take time
_FEW = 7  # products that are added in turn, of the 21 or 42 of a block and others
_MOST = _FEW * _FEW * _TERMS  # terms of which all products are made at once
# Part of a sum of products on NumPy: at least so many rows, or so many bytes of products.
_CACHE_ROWS, _CACHE_COLUMNS, _CACHE_BYTES = 64, 256, 2**19
# Scores of one block: sized for the cache of a core on NumPy, and for few large launches elsewhere.
_NUMPY_ROWS, _NUMPY_ROW_BYTES = 512, 8192
_NUMPY_WORK = 2**18  # scores that are worth a thread
_OTHER_BLOCK = (8192, 2048)
_NUMPY = array_api_compat.array_namespace(np.empty(0))


def as_written(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorate a function to compute what is written, whatever the caller has set.

    Overflow is an answer, of which NumPy does not warn, and torch.autocast makes no products in
    another precision than that of the arrays.
    """

    @wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        with np.errstate(all="ignore"), _no_autocast():
            return function(*args, **kwargs)

    return run


def _no_autocast() -> AbstractContextManager[Any]:
    """Switch off torch.autocast where it is on."""
    torch: Any = sys.modules.get("torch")
    stack = ExitStack()
    for kind in ("cpu", "cuda", "mps", "xpu") if hasattr(torch, "autocast") else ():
        if torch.is_autocast_enabled(kind):
            stack.enter_context(torch.autocast(kind, enabled=False))
    return stack


def array_namespace(*arrays: Array | None) -> Any:
    """Return the array API namespace of the arrays, at once where they are NumPy's."""
    if all(type(x) is np.ndarray for x in arrays):
        return _NUMPY
    return array_api_compat.array_namespace(*arrays)


def constant(value: Any, like: Array) -> Array:
    """Move host data (a number or a NumPy array) to the dtype and device of `like`."""
    xp = array_namespace(like)
    if is_array_api_obj(value) and not is_numpy_array(value):
        return xp.astype(value, like.dtype)
    return xp.asarray(value, dtype=like.dtype, device=device(like))


def to_host(x: Array, dtype: Any = np.float64) -> Any:
    """Bring an array of any library, on any device, to NumPy; Dask computes it."""
    if is_torch_array(x):
        x = x.detach()  # the result is no part of a graph of derivatives
    if is_torch_array(x) or is_cupy_array(x):
        x = to_device(x, "cpu")
    elif not (is_numpy_array(x) or is_jax_array(x) or is_dask_array(x)):
        x = np.from_dlpack(x, device="cpu")
    return np.asarray(x, dtype=dtype)


def host_dtype(like: Array) -> Any:
    """Dtype in which constants for `like` are computed on the host."""
    return np.result_type(like, np.float64) if is_numpy_array(like) else np.float64


def has_float64(like: Array) -> bool:
    """Say whether there is float64 on the device: JAX has it on demand, some devices never."""
    info = array_namespace(like).__array_namespace_info__()
    return "float64" in info.dtypes(device=device(like), kind="real floating")


def square_norm(x: Array) -> Array:
    """|x|^2 along the last axis, or nan where it overflows: a bias of -inf would hide the key."""
    square = array_namespace(x).sum(x * x, axis=-1)
    return square + 0.0 * square


def norm_bound(x: Array) -> Array:
    """Bound |x| along the last axis, which is kept: squares may underflow to 0."""
    xp = array_namespace(x)
    lost = (x.shape[-1] * float(xp.finfo(x.dtype).smallest_normal)) ** 0.5
    return xp.sqrt(xp.vecdot(x, x))[..., None] + lost


def root_scale(scale: float | None, q: Array) -> Array:
    """Square root of the scale, the factor to kernel coordinates, in the dtype of `q`."""
    return constant(q.shape[-1], q) ** -0.25 if scale is None else constant(scale, q) ** 0.5


def block_shape(x: Array, n: int | None = None, m: int | None = None) -> tuple[int, int]:
    """Return how many queries and how many keys one block of scores holds.

    Where there are only n queries or m keys, blocks are longer the other way.
    """
    rows, columns = _OTHER_BLOCK
    if is_numpy_array(x):
        rows, columns = _NUMPY_ROWS, _NUMPY_ROW_BYTES // x.dtype.itemsize
    if m is not None and m < columns:
        return rows * min(4, columns // max(m, 1)), columns
    if n is not None and n < rows:
        return rows, columns * min(4, rows // max(n, 1))
    return rows, columns


def most_threads(x: Array, work: int) -> int:
    """Threads that save more time than they take for so many scores; 0 but on NumPy."""
    return max(1, work // _NUMPY_WORK) if is_numpy_array(x) else 0


def blocks(start: int, stop: int, size: int) -> Iterator[slice]:
    """Cut range(start, stop) into slices of at most `size`."""
    for i in range(start, stop, size):
        yield slice(i, min(i + size, stop))


def tiles(shape: tuple[int, ...], size: int) -> Iterator[tuple[slice, ...]]:
    """Cut an index space into boxes of at most max(size, 1) elements, last axes first."""
    steps = []
    for length in reversed(shape):
        steps.append(max(1, min(length, size)))
        size //= steps[-1]
    yield from product(*(blocks(0, n, s) for n, s in zip(shape, reversed(steps), strict=True)))


def pairwise(merge: Callable[[Any, Any], Any], parts: Iterable[Any], nothing: Any) -> Any:
    """Merge as a balanced tree: rounding errors grow with the log of the number of parts."""
    waiting: list[Any] = []
    for count, merged in enumerate(parts, 1):
        for _ in range((count & -count).bit_length() - 1):
            merged = merge(waiting.pop(), merged)
        waiting.append(merged)
    return reduce(lambda late, early: merge(early, late), reversed(waiting)) if waiting else nothing


def part(x: Array, index: tuple[slice, ...]) -> Array:
    """Take `index` of the last axes of `x`, as if axes of length 1 were broadcast."""
    index = index[max(0, len(index) - x.ndim) :]
    shape = x.shape[x.ndim - len(index) :]
    whole = slice(None)
    return x[(..., *(whole if n == 1 else i for n, i in zip(shape, index, strict=True)))]


def add(x: Array, y: Array) -> Array:
    """Add to our own temporary `x`; in place on NumPy, which saves the time of new memory."""
    if is_numpy_array(x) and np.broadcast_shapes(x.shape, y.shape) == x.shape:
        return np.add(x, y, out=x)
    return x + y


def rescale(x: Array, factor: Array) -> Array:
    """Multiply by factors most of which are 1: on NumPy, `x` itself where all are."""
    if is_numpy_array(x) and np.all(factor == 1):
        return x
    return x * factor


def exp(x: Array) -> Array:
    """Exponentiate our own temporary `x`; in place on NumPy."""
    return np.exp(x, out=x) if is_numpy_array(x) else array_namespace(x).exp(x)


def cut(x: Array, floor: float) -> Array:
    """Replace what is below `floor` in our own temporary `x` by -inf; in place on NumPy."""
    if is_numpy_array(x):
        if not x.min() >= floor:  # also where there is a nan
            np.copyto(x, -math.inf, where=x < floor)
        return x
    return array_namespace(x).where(x < floor, -math.inf, x)


def room(like: Array, size: int) -> Array | None:
    """Memory for one `multiply` after another: on NumPy, new memory takes time to be mapped."""
    return np.empty(size, dtype=like.dtype) if is_numpy_array(like) else None


def multiply(x: Array, y: Array, memory: Array | None = None) -> Array:
    """Multiply matrices, into memory that nothing else uses if there is any."""
    out = None
    if memory is not None:
        shape = (*broadcast_lead(x, y), x.shape[-2], y.shape[-1])
        out = memory[: math.prod(shape)].reshape(shape)
    if y.shape[-2] > _WHOLE:
        return sum_of_products(x, y, out)
    return x @ y if out is None else np.matmul(x, y, out=out)


def sum_of_products(x: Array, y: Array, out: Array | None = None) -> Array:
    """Multiply matrices in products of a few terms each, which are then added.

    A plain product may add N terms in turn. Where these are nearly equal, its rounding errors may
    all have one sign, and add up to 3 N / 16 eps.
    """
    xp, (terms, columns) = array_namespace(x, y), y.shape[-2:]
    if terms <= _TERMS:
        return x @ y
    if is_numpy_array(x):
        return _sum_in_cache(x, y, out)
    count, rest = divmod(terms, _TERMS)
    if rest:
        split = count * _TERMS
    elif count * columns > max(terms, columns):  # all at once would take more memory than `x`
        split = count // 2 * _TERMS
    else:
        x = xp.reshape(x, (*x.shape[:-1], count, _TERMS))
        y = xp.reshape(y, (*y.shape[:-2], count, _TERMS, columns))
        return xp.sum(xp.moveaxis(x, -2, -3) @ y, axis=-3)
    first = sum_of_products(x[..., :split], y[..., :split, :])
    return first + sum_of_products(x[..., split:], y[..., split:, :])


def _sum_in_cache(x: Array, y: Array, out: Array | None) -> Array:
    """`sum_of_products` on NumPy: of a part of the result at a time, in memory in the cache."""
    (n, terms), columns, lead = x.shape[-2:], y.shape[-1], broadcast_lead(x, y)
    if out is None:
        out = np.empty((*lead, n, columns), dtype=x.dtype)
    width = max(1, min(columns, _CACHE_COLUMNS))
    size = min(terms, _MOST) // _TERMS * width  # numbers of the products of a row
    fit = _CACHE_BYTES // (size * x.dtype.itemsize)
    rows = max(1, min(n, max(_CACHE_ROWS, fit)))
    heads = max(1, min(math.prod(lead), fit // rows))
    memory, whole = np.empty(heads * rows * size, dtype=x.dtype), slice(None)
    for head, i, j in product(tiles(lead, heads), blocks(0, n, rows), blocks(0, columns, width)):
        x_part, y_part = part(x, (*head, i, whole)), part(y, (*head, whole, j))
        _sum_of_part(x_part, y_part, out[(*head, i, j)], memory)
    return out


def _sum_of_part(x: Array, y: Array, out: Array, memory: Array) -> None:
    """Write a sum of products in few calls: between two of them threads wait for each other."""
    terms, columns = y.shape[-2:]
    if terms > _MOST:
        half, more = terms // 2, np.empty_like(out)
        _sum_of_part(x[..., :half], y[..., :half, :], out, memory)
        _sum_of_part(x[..., half:], y[..., half:, :], more, memory)
        out += more
        return
    few = _FEW if terms >= 2 * _FEW * _TERMS else 1
    grid = (terms // (few * _TERMS), few, _TERMS)  # a few products are added, and then their sums
    whole = math.prod(grid)
    x_grid = x[..., :whole].reshape((*x.shape[:-1], *grid)).swapaxes(-4, -3).swapaxes(-3, -2)
    y_grid = y[..., :whole, :].reshape((*y.shape[:-2], *grid, columns))
    products = multiply(x_grid, y_grid, memory)
    sums = np.add.reduce(products, axis=-3) if few > 1 else products[..., 0, :, :]
    np.add.reduce(sums, axis=-3, out=out)
    if whole < terms:
        out += sum_of_products(x[..., whole:], y[..., whole:, :])


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


def put(out: Array, index: tuple[slice, ...], values: Array) -> Array:
    """Write `values`, broadcast, into our own buffer `out` and return it (JAX: a new array)."""
    xp = array_namespace(out)
    shape = tuple(len(range(*i.indices(n))) for i, n in zip(index, out.shape, strict=True))
    if 0 in shape:
        return out
    values = xp.broadcast_to(values, shape)
    if is_jax_array(out):
        return out.at[index].set(values)
    out[index] = values
    return out


def broadcast_lead(*arrays: Array | None, core: int = 2) -> tuple[int, ...]:
    """Broadcast the axes before the last `core` of every array given."""
    return np.broadcast_shapes(
        *(tuple(x.shape[: max(0, x.ndim - core)]) for x in arrays if x is not None)
    )


def group_heads(q: Array, k: Array, v: Array, *more: Array | None) -> tuple[list[Array], Any]:
    """Give query heads that share a key head an axis of their own, so that they broadcast.

    With H query and G key heads, (..., H, n, d) becomes (..., G, H/G, n, d) and (..., G, m, d)
    becomes (..., G, 1, m, d). Returns the arrays and the function that undoes it on results whose
    last `core` axes follow the heads.
    """
    heads, groups = head_counts(q, k, v)
    if heads == groups or 1 in (heads, groups):
        return [q, k, v, *more], lambda x, core=2: x

    def split(x: Array | None) -> Array | None:
        if x is None or x.ndim < 3:
            return x
        inner = (groups, heads // groups) if x.shape[-3] == heads else (x.shape[-3], 1)
        return array_namespace(x).reshape(x, (*x.shape[:-3], *inner, *x.shape[-2:]))

    def join(x: Array, core: int = 2) -> Array:
        shape = (*x.shape[: x.ndim - core - 2], heads, *x.shape[x.ndim - core :])
        return array_namespace(x).reshape(x, shape)

    return [split(x) for x in (q, k, v, *more)], join


def head_counts(q: Array, k: Array, v: Array) -> tuple[int, int]:
    """Return the lengths of the head axis (the third from the end) of `q` and of `k` and `v`."""
    heads, *groups = (x.shape[-3] if x.ndim > 2 else 1 for x in (q, k, v))
    return heads, max(groups) if min(groups) else 0
