"""Leading axes: broadcasting, groups of query heads that share a key head, and slopes of heads."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from . import checks
from .checks import shape_of
from .library import Array, array_namespace


class Alibi(NamedTuple):
    """A bias of -slope |i + m - n - j|, which is never stored for all pairs.

    Attributes
    ----------
    slopes : array, shape (..., heads)
        How fast the scores of each head fall with the distance.
    """

    slopes: Array


Alibi.__module__ = "refattn.attention"  # where users find it, and so do pickles


def broadcast_lead(*arrays: Array | None, core: int = 2) -> tuple[int, ...]:
    """Broadcast the axes before the last `core` of every array given."""
    shapes = {tuple(x.shape[: max(0, x.ndim - core)]) for x in arrays if x is not None}
    return shapes.pop() if len(shapes) == 1 else np.broadcast_shapes(*shapes)


def grouped_lead(q: Array, k: Array, v: Array) -> tuple[int, ...]:
    """Check the leading axes of q, k and v, and broadcast them, grouped heads included."""
    heads, groups = head_counts(q, k, v)
    shared = heads != groups and 1 not in (heads, groups)
    one = all(x.ndim < 3 or x.shape[-3] in (1, groups) for x in (k, v))
    fits = not shared or (one and groups > 0 and heads % groups == 0)
    try:
        lead = broadcast_lead(q, k, v, core=3 if shared else 2)
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            "`q`, `k` and `v` must have leading axes that broadcast, or a head axis (the third "
            "from the end) whose length in `k` and `v` divides that in `q`, "
            f"got shapes {shape_of(q)}, {shape_of(k)} and {shape_of(v)}."
        )
    if not shared:
        return lead
    for name, x in (("q", q), ("k", k), ("v", v)):
        checks.is_array(name, x, 30)  # shared keys take an axis of their own
    return (*lead, heads)


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


def group_with_lead(
    q: Array, k: Array, v: Array, *more: Array | None
) -> tuple[list[Array], tuple[int, ...], Any]:
    """Group heads as `group_heads`, and return the leading shape that all arrays then have."""
    arrays, ungroup = group_heads(q, k, v, *more)
    return arrays, broadcast_lead(*arrays[:3]), ungroup


def head_counts(q: Array, k: Array, v: Array) -> tuple[int, int]:
    """Return the lengths of the head axis (the third from the end) of `q` and of `k` and `v`."""
    heads, *groups = (x.shape[-3] if x.ndim > 2 else 1 for x in (q, k, v))
    return heads, max(groups) if min(groups) else 0
