"""Cut index spaces into blocks, and read, write and add to parts of arrays."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from .library import (
    Array,
    array_namespace,
    device,
    device_memory,
    is_cupy_array,
    is_jax_array,
    is_numpy_array,
    untraced,
)
from .threads import architecture

WHOLE = slice(None)  # of an axis

# Scores of one block: sized for the cache of a core on NumPy, and for few large launches elsewhere.
_NUMPY_ROWS, _NUMPY_ROW_BYTES = 512, 8192
_NUMPY_WORK = 2**18  # scores that are worth a thread
_OTHER_BLOCK = (8192, 2048)
_SHARES_OF_DEVICE = 256  # of its memory, of which all blocks take one: a call holds a few arrays


class Sizes(NamedTuple):
    """What is fastest for products on NumPy, by the instructions that its BLAS uses."""

    columns: int  # of a block of scores, at most as many as _NUMPY_ROW_BYTES hold
    product: int  # multiplications of a product that is made without a copy of its matrices


_SIZES = dict.fromkeys(("SkylakeX", "Cooperlake", "SapphireRapids"), Sizes(512, 10**6))
_OTHER_SIZES = Sizes(2**62, 2**62)  # AVX2, and what is not known


@cache
def cache_sizes() -> Sizes:
    """Find the sizes for this machine."""
    return _SIZES.get(architecture(), _OTHER_SIZES)


def block_shape(x: Array, n: int | None = None, m: int | None = None) -> tuple[int, int]:
    """Return how many queries and how many keys one block of scores holds.

    Where there are only n queries or m keys, blocks are longer the other way.
    """
    x, (rows, columns) = untraced(x), _OTHER_BLOCK
    longest = 4 * columns
    if is_numpy_array(x):
        longest = 4 * _NUMPY_ROW_BYTES // x.dtype.itemsize
        rows, columns = _NUMPY_ROWS, min(cache_sizes().columns, longest // 4)
    if m is not None and m < columns:
        return rows * min(4, columns // max(m, 1)), columns
    if n is not None and n < rows:
        return rows, min(longest, columns * (rows // max(n, 1)))
    return rows, columns


def room(x: Array, n: int | None = None, m: int | None = None) -> int:
    """Say how many scores of several blocks are held at once: on a large device of CuPy, more.

    That depends on the device, not on what is free: so do rounding errors.
    """
    x, size = untraced(x), math.prod(block_shape(x, n, m))
    if not is_cupy_array(x):
        return size
    return size * max(1, device_memory(x) // int(_SHARES_OF_DEVICE * size * x.dtype.itemsize))


def most_threads(x: Array, work: int) -> int:
    """Say how many threads save time for so many scores; 0 but on NumPy."""
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


def part(x: Array, index: tuple[slice, ...]) -> Array:
    """Take `index` of the last axes of `x`, as if axes of length 1 were broadcast."""
    index = index[max(0, len(index) - x.ndim) :]
    shape = x.shape[x.ndim - len(index) :]
    if 1 not in shape:
        return x[(..., *index)]
    return x[(..., *(WHOLE if n == 1 else i for n, i in zip(shape, index, strict=True)))]


def some_heads(x: Array | None, head: Sequence[slice]) -> Any:
    """Take some heads of matrices, if there are any."""
    return None if x is None else part(x, (*head, WHOLE, WHOLE))


def buffers(q: Array, v: Array, lead: tuple[int, ...], xp: Any) -> tuple[Array, Array]:
    """Make room for the results of attention, (..., n, d_v) and (..., n)."""
    shape, d_v, options = (*lead, q.shape[-2]), v.shape[-1], {"dtype": q.dtype, "device": device(q)}
    if d_v == 0 and not is_numpy_array(q):  # Dask divides by the size of an empty array
        return xp.broadcast_to(q[..., :0], (*shape, 0)), xp.empty(shape, **options)
    return xp.empty((*shape, d_v), **options), xp.empty(shape, **options)


def put(out: Array, index: tuple[slice, ...], values: Array) -> Array:
    """Write `values`, broadcast, into our own buffer `out` and return it (JAX: a new array)."""
    if 0 in out.shape or 0 in values.shape:
        return out
    if is_jax_array(out):
        return out.at[index].set(values)
    out[index] = values
    return out


def add_part(out: Array, index: tuple[slice, ...], values: Array) -> Array:
    """Add `values` to `part(out, index)` in our own buffer, summed over axes that this repeats.

    It is the pullback of `part`.
    """
    index = index[max(0, len(index) - out.ndim) :]
    shape = out.shape[out.ndim - len(index) :]
    at = (..., *(WHOLE if n == 1 else i for n, i in zip(shape, index, strict=True)))
    if 0 in out.shape or 0 in values.shape:
        return out
    values = sum_to(values, (*out.shape[: out.ndim - len(index)], *shape))
    if is_jax_array(out):
        return out.at[at].add(values)
    out[at] += values
    return out


def sum_to(values: Array, shape: tuple[int, ...]) -> Array:
    """Sum over the axes along which arrays of this shape are repeated, whole or each head."""
    xp, extra = array_namespace(values), values.ndim - len(shape)
    if extra > 0:
        values = xp.sum(values, axis=tuple(range(extra)))
    pairs = zip(shape[len(shape) - values.ndim :], values.shape, strict=True)
    single = tuple(axis for axis, (n, length) in enumerate(pairs) if n == 1 and length != 1)
    values = xp.sum(values, axis=single, keepdims=True) if single else values
    if values.ndim > 2 and 1 < shape[-3] < values.shape[-3]:  # consecutive heads share one
        *lead, heads, n, d = values.shape
        groups = (*lead, shape[-3], heads // shape[-3], n, d)
        values = xp.sum(xp.reshape(values, groups), axis=-3)
    return values


def put_quotient(out: Array, index: tuple[slice, ...], x: Array, y: Array) -> Array:
    """Write x / y, as `put`; on NumPy without memory for it."""
    if not is_numpy_array(out):
        return put(out, index, x / y)
    np.divide(x, y, out=out[index])
    return out
