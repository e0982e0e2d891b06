"""Checks of rows of vectors, and of the axes that they lie along."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral
from typing import Any

import numpy as np

from . import checks
from .checks import describe, shape_of
from .library import Array


def axes_of_rows(name: str, x: Array, axis: Any) -> tuple[int, ...]:
    """Check the axes of the rows of `x`, an array (..., d), and return them in ascending order."""
    axes = axis if isinstance(axis, tuple) else (axis,)
    for i in axes:
        if isinstance(i, bool | np.bool_) or not isinstance(i, Integral):
            raise TypeError(f"`axis` must be an integer or a tuple of integers, got {describe(i)}.")
    places = sorted({int(i) + x.ndim if i < 0 else int(i) for i in axes})
    if not axes or len(places) < len(axes) or places[0] < 0 or places[-1] >= x.ndim - 1:
        raise ValueError(
            f"`axis` must name one or more axes of `{name}`, each once and never the last, "
            f"got {axis} for shape {shape_of(x)}."
        )
    if x.shape[-1] == 0:
        raise ValueError(f"`{name}` must have rows of length d >= 1, got shape {shape_of(x)}.")
    return tuple(places)


def joining_rows(name: str, x: Array, pooled: int, first: str, head: Array) -> None:
    """Check that rows (..., *pooled, d) may join those of `head`, an array (..., 0, d)."""
    checks.arrays(2, **{first: head, name: x})
    axes, got = ((*shape_of(y)[: -1 - n], y.shape[-1]) for y, n in ((head, 1), (x, pooled)))
    if got != axes:
        raise ValueError(
            f"`{name}` must have the axes of `{first}` beside those in `axis`, {axes}, got {got}."
        )


def iterable(name: str, values: Any) -> None:
    """Check an iterable of arrays."""
    if not isinstance(values, Iterable):
        raise TypeError(f"`{name}` must be an iterable of arrays, got {describe(values)}.")


def ddof(name: str, value: Any) -> None:
    """Check what is subtracted from the count."""
    checks.non_negative_integer(name, value)
    if value > 1:
        raise ValueError(f"`{name}` must be 0 or 1, got {value}.")
