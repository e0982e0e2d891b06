"""Storage types of arrays, such as bfloat16, and the scales of arrays in 8 bits."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np

from . import checks
from .library import Doubles

INTEGER = "int8"
SCALES = {name: f"{name}_scale" for name in "qkv"}  # of the array, in files and calls
TYPED = ("q", "k", "v", "out", "weights")  # what a type may be given of
EIGHT_BITS = (INTEGER, "float8_e4m3fn", "float8_e5m2")
NARROW = ("bfloat16", "float16")  # of which wider arrays may hold the numbers
ONE_STRAY = 8  # one of so many rows, at most, is of another type than the others


def list_types(dtype: Any, known: Collection[str]) -> dict[str, str]:
    """Check types: one of those that are known for q, k and v, or one for each array by name."""
    if not isinstance(dtype, Mapping):
        if dtype is not None:
            checks.choice("dtype", dtype, known)
        return {} if dtype is None else dict.fromkeys("qkv", dtype)
    for name, of_array in dtype.items():
        if name not in TYPED:
            raise ValueError(f"`dtype` must name arrays of {', '.join(TYPED)}, got {name!r}.")
        checks.choice(f"dtype of {name}", of_array, [*known, *[INTEGER] * (name in SCALES)])
    return dict(dtype)


def storage_type(types: Mapping[str, str]) -> str:
    """Return what kernels round weights to: the type of these or, by default, that of queries.

    Nothing is rounded to integers: then it is the type of the values, or that of the output.
    """
    names = ("weights", "q", "v", "out")
    return next((types[x] for x in names if types.get(x, INTEGER) != INTEGER), "float32")


def expand_scale(
    name: str, scale: Doubles, shape: tuple[int, ...], layout: str = "bhnd"
) -> Doubles:
    """Expand the scale of an array to its axes: one number, or one for each head, token or block.

    It broadcasts against the array as a whole, or without its last axis, or has the axes of heads
    only. With all axes of one of these, a token axis or the last may be cut into equal blocks. What
    has each axis of the array, whole or of length 1, is read so.
    """
    if scale.size == 1:
        return scale.reshape((1,) * len(shape))
    whole = scale.ndim == len(shape)
    if whole and all(x in (1, y) for x, y in zip(scale.shape, shape, strict=True)):
        return scale
    found: dict[str, Doubles] = {}
    for words, axes in _list_layouts(len(shape), layout):
        expanded = _expand(scale, shape, axes, layout)
        if expanded is not None and not any(_same(expanded, x, shape) for x in found.values()):
            found[words] = expanded
    if len(found) == 1:
        return next(iter(found.values()))
    full = f"write it with all {len(shape)} axes of `{name}`, of length 1 where a number is shared"
    if found:
        raise ValueError(
            f"`{name}_scale` of shape {scale.shape} may hold {' or '.join(found)}: {full}."
        )
    raise ValueError(
        f"`{name}_scale` must hold one number, or one for each head, token or block of equal size, "
        f"for `{name}` of shape {shape}, got shape {scale.shape}: {full}."
    )


def _list_layouts(ndim: int, layout: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """List what a scale may have, and for each of its axes which one of the array that is."""
    every = tuple(range(ndim))
    yield "one for each number", every
    yield "one for each token", every[:-1]
    if ndim > 2:
        swapped = (*every[:-3], ndim - 2, ndim - 3)
        if layout == "bnhd":
            yield "one for each token, heads first", swapped
            yield "one for each number, heads first", (*swapped, ndim - 1)
        yield "one for each head", swapped[:-1] if layout == "bnhd" else every[:-2]


def _expand(
    scale: Doubles, shape: tuple[int, ...], axes: tuple[int, ...], layout: str
) -> Doubles | None:
    """Put the axes of a scale, aligned at the end, where they belong; None if they do not fit."""
    if scale.ndim > len(axes):
        return None
    tokens = len(shape) - (3 if layout == "bnhd" and len(shape) > 2 else 2)
    place = axes[len(axes) - scale.ndim :]
    for at, axis in enumerate(place):
        size, whole = scale.shape[at], shape[axis]
        if size in (1, whole):
            continue
        if scale.ndim < len(axes) or axis not in (tokens, len(shape) - 1) or not size:
            return None
        if whole % size:
            return None
        scale = np.repeat(scale, whole // size, at)
    order = np.argsort(place)
    ordered = np.transpose(scale, order)
    lengths = dict(zip(sorted(place), ordered.shape, strict=True))
    return ordered.reshape([lengths.get(axis, 1) for axis in range(len(shape))])


def _same(x: Doubles, y: Doubles, shape: tuple[int, ...]) -> bool:
    return np.array_equal(np.broadcast_to(x, shape), np.broadcast_to(y, shape))


def mask_of_members(mask: Any, q: Any, k: Any, v: Any) -> Any:
    """Give a mask (batch, m), of the keys of each member of a batch, axes of heads and queries."""
    batch = max(x.shape[0] for x in (q, k, v))
    if q.ndim != 4 or mask.ndim != 2 or tuple(mask.shape) != (batch, k.shape[-2]) or batch == 1:
        return mask
    if batch == q.shape[-2]:
        raise ValueError(
            f"`mask` of shape {tuple(mask.shape)} may have axes (n, m) or (batch, m): write "
            "(1, 1, n, m) or (batch, 1, 1, m)."
        )
    return mask[:, None, None, :]


def holds_nearly_all(held: Any) -> bool:
    """Tell whether all numbers of nearly all rows are held, of (..., rows, columns)."""
    stray = ~held.all(-1)
    return bool(ONE_STRAY * stray.sum() <= stray.size)
