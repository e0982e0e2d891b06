"""Cut tokens into the chunks of an estimator, and attend to the keys of a query's own chunk."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from ..arrays.blocks import WHOLE, part, some_heads
from ..arrays.library import (
    Array,
    array_namespace,
    device,
    fused,
    is_numpy_array,
    split_rows,
)
from ..numbers.primitives import primitive
from .attend import Attended, attend
from .scores import Scores

_SHORTEST = 128  # queries of a block that are worth a product of matrices


class Chunks(NamedTuple):
    """Queries, and the keys of their chunks; keys of all chunks."""

    q: Array  # (..., B, w, d)
    near_keys: tuple[Array, Array, Array | None]  # (..., B, w, d), (..., B, w, d_v), (..., B, 1, w)
    k: Array  # (..., C, w, d)
    v: Array  # (..., C, w, d_v)
    mask: Array | None  # (..., C, 1, w)
    size: Array  # keys that are seen in each chunk, (..., C, 1, 1)
    mean_query: Array  # (..., C, d), 0 of none
    first: int  # chunk of the first query, which may be before that of the first key
    ahead: int  # first query of a chunk of queries, in the chunk of its keys
    rows: slice  # of the chunks, where the queries are
    xp: Any  # namespace of the arrays

    @property
    def log_size(self) -> Array:
        """Log of the number of keys seen in each chunk, (..., C)."""
        xp, size = self.xp, self.size[..., 0, 0]
        return xp.where(size > 0, xp.log(xp.where(size > 0, size, 1.0)), -math.inf)

    @property
    def lead(self) -> tuple[int, ...]:
        """Leading axes of queries, keys and values."""
        arrays = (self.q, self.k, self.v, *(() if self.mask is None else (self.mask,)))
        return np.broadcast_shapes(*(tuple(x.shape[:-3]) for x in arrays))

    def part(self, head: tuple[slice, ...]) -> Chunks:
        """Take some heads."""

        def some(x: Array) -> Array:
            return None if x is None else part(x, (*head, WHOLE, WHOLE, WHOLE))

        (k, v, mask), names = self.near_keys, ("q", "k", "v", "mask", "size")
        parts = {name: some(getattr(self, name)) for name in names}
        parts["mean_query"] = some_heads(self.mean_query, head)
        return self._replace(near_keys=(some(k), some(v), some(mask)), **parts)

    def seen(self, x: Array) -> Array:
        """Keep rows (..., C, w, d) of keys that are seen, and put 0 in place of others."""
        xp = self.xp
        return x if self.mask is None else xp.where(xp.matrix_transpose(self.mask), x, 0.0)

    def mean(self, x: Array) -> Array:
        """Average over the keys that are seen in each chunk, (..., C, d); 0 of none."""
        xp = self.xp
        count = xp.maximum(self.size, xp.ones_like(self.size))
        return xp.sum(self.seen(x) / count, axis=-2)  # a sum of large values might overflow

    def near(self, scale: Array, causal: bool) -> Attended:
        """Attend to the keys of the own chunk."""
        k, v, mask = self.near_keys
        return attend(self.q, k, v, Scores(scale, mask=mask, causal=causal, shift=self.ahead))

    def others(self, some: slice, causal: bool) -> Array:
        """Say which chunks some of the chunks of queries see as a whole, (B, 1, C)."""
        xp, options = self.xp, {"dtype": self.xp.int32, "device": device(self.q)}
        here = xp.arange(self.first, self.first + self.q.shape[-3], **options)[some, None]
        chunk = xp.arange(self.k.shape[-3], **options)
        far = chunk < here if causal else chunk != here
        return far[:, None, :]

    def joined(self, out: Array) -> Array:
        """Join the results of the queries, (..., n, d_v)."""
        shape = (*out.shape[:-3], out.shape[-3] * out.shape[-2], out.shape[-1])
        return self.xp.reshape(out, shape)[..., self.rows, :]


@primitive
def attend_in_bands(q: Array, k: Array, v: Array, scores: Scores) -> Attended:
    """Attend as `attend` does; in libraries other than NumPy, narrow windows take one product.

    A block of queries is at least as long as the window on either side. So they see only the keys
    that are level with that block, with the one before it and with the one after it.
    """
    xp, n, m, mask = array_namespace(q), q.shape[-2], k.shape[-2], scores.mask
    band = scores.band(n, m)
    width = max(_SHORTEST, abs(band.left or 0), abs(band.right or 0))
    one_row = mask is None or mask.shape[-2] == 1
    # On NumPy `attend` skips hidden blocks at no cost. With few queries little would be hidden.
    if is_numpy_array(q) or None in (band.left, band.right) or 2 * width > n or not one_row:
        return attend(q, k, v, scores)
    count = -(-n // width)
    first = m - n - width  # key of the first block, which lies before that of the first queries

    def cut(x: Array, start: int, count: int) -> Array:
        x = slice_rows(x, start, start + count * width, xp)
        return xp.reshape(x, (*x.shape[:-2], count, width, x.shape[-1]))

    def beside(x: Array) -> Array:
        x = cut(x, first, count + 2)
        return xp.concat([x[..., i : i + count, :, :] for i in range(3)], axis=-2)

    # Rows beyond the first and the last key are zeros, which are hidden.
    if mask is None:
        start = xp.arange(first, first + count * width, width, device=device(k))
        there = _are_keys(start[:, None, None], xp.arange(3 * width, device=device(k)), m, xp)
    else:
        there = xp.matrix_transpose(beside(xp.matrix_transpose(mask)))
    # Query i of a block is level with key `width` + i of three blocks: one lies before its own.
    scores = scores._replace(mask=there, shift=width)
    out, lse = attend(cut(q, 0, count), beside(k), beside(v), scores)
    out = xp.reshape(out, (*out.shape[:-3], count * width, out.shape[-1]))
    lse = xp.reshape(lse, (*lse.shape[:-2], count * width))
    return Attended(out[..., :n, :], lse[..., :n])


@fused
def _are_keys(start: Array, more: Array, m: int, xp: Any) -> Array:
    """Say which places are those of one of m keys."""
    return (start + more >= 0) & (start + more < m)


def cut_chunks(q: Array, k: Array, v: Array, mask: Array | None, window: int) -> Chunks:
    """Cut tokens into chunks; the last query is level with the last key."""
    xp, n, m = array_namespace(q), q.shape[-2], k.shape[-2]
    # Chunks begin at the first key, so that they stay as they are when keys are added.
    shift, count = m - n, -(-m // window)
    first = shift // window
    start, stop, end = first * window, count * window, count * window - shift

    def cut(x: Array, start: int, stop: int) -> Array:
        return split_rows(slice_rows(x, start, stop, xp), ((stop - start) // window, window), xp)

    def keys(start: int) -> tuple[Array, Array, Array | None]:
        there = xp.ones((m, 1), dtype=xp.bool, device=device(k))
        there = there if mask is None else there & xp.matrix_transpose(mask)
        seen = None
        if mask is not None or start < 0 or stop > m:
            seen = xp.matrix_transpose(cut(there, start, stop))
        return cut(k, start, stop), cut(v, start, stop), seen

    all_keys = keys(0)  # from the first key; below, `keys(start)` gives those near the queries
    seen = all_keys[-1]
    size = xp.full((1, 1), window, dtype=q.dtype, device=device(q))
    size = xp.broadcast_to(size, (count, 1, 1))
    if seen is not None:
        size = xp.sum(xp.astype(seen, q.dtype), axis=-1, keepdims=True)
    # Queries of several chunks have places in them; those of one, which may be few, have none.
    few = count - first == 1
    of_queries = q[..., None, :, :] if few else cut(q, start - shift, end)
    places = slice(0, n) if few else slice(shift - start, shift - start + n)
    some = xp.ones((n, 1), dtype=q.dtype, device=device(q))
    some = some[None, :, :] if few else cut(some, start - shift, end)
    most = xp.sum(some, axis=-2)
    mean = xp.sum(of_queries, axis=-2) / xp.where(most > 0, most, 1.0)
    mean = slice_rows(mean, -first, count - first, xp)
    ahead = shift - start if few else 0
    seen_keys = (*all_keys, size)
    return Chunks(of_queries, keys(start), *seen_keys, mean, first, ahead, places, xp)


def slice_rows(x: Array, start: int, stop: int, xp: Any) -> Array:
    """Take rows from `start` to `stop` of x, (..., m, d), and zeros beyond those that there are."""
    m = x.shape[-2]
    inside = x[..., max(0, min(start, m)) : max(0, min(stop, m)), :]
    before, after = max(0, min(stop, 0) - start), max(0, stop - max(start, m))
    if not before and not after:
        return inside
    rows = [inside]
    for where, size in ((0, before), (2, after)):
        if size:
            shape = (*x.shape[:-2], size, x.shape[-1])
            rows.insert(where, xp.zeros(shape, dtype=x.dtype, device=device(x)))
    return xp.concat(rows, axis=-2)
