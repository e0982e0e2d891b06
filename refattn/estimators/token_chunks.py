"""Tokens in contiguous chunks, of equal numbers of those that are seen, and the means of chunks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..arrays.arithmetic import multiply, sum_of_products
from ..arrays.blocks import WHOLE, add_part, block_shape, blocks, most_threads, put
from ..arrays.library import Array, as_written, constant, device, is_numpy_array
from ..arrays.threads import for_each
from ..engine.hops import Keys
from ..numbers.primitives import primitive


@primitive
@as_written
def mean_of_chunks(x: Array, count: int, seen: Array | None, xp: Any) -> Array:
    """Average `count` contiguous chunks with equal numbers of seen rows: (..., count, d)."""
    (n, d), size, home = x.shape[-2:], block_shape(x)[1], device(x)
    if seen is None and n > 0 and not is_numpy_array(x):
        return _means_of_rows(x, count, xp)
    if seen is None:
        chunk = xp.asarray(chunk_of(n, count), device=home)
    else:
        chunk = _chunk_of_seen(seen, count, xp)

    def average(c: slice) -> Array:
        sums = sizes = xp.zeros((1, 1), dtype=x.dtype, device=home)
        for j in blocks(-(-c.start * n // count), -(-c.stop * n // count), size):
            member, x_j = members(chunk[..., j], c, x, xp), x[..., j, :]
            if seen is not None:
                x_j = xp.where(seen[..., j][..., None], x_j, 0.0)
            sums = sums + sum_of_products(member, x_j)
            sizes = sizes + xp.sum(member, axis=-1, keepdims=True)
        return sums / xp.where(sizes == 0, 1.0, sizes)

    if seen is not None:  # any row may be in any chunk
        return average(slice(0, count))
    means = xp.empty((*x.shape[:-2], count, d), dtype=x.dtype, device=home)

    def write(c: slice) -> None:
        nonlocal means
        whole = tuple(slice(0, length) for length in x.shape[:-2])
        means = put(means, (*whole, c, slice(0, d)), average(c))

    few = max(1, size // 2 * count // max(n, 1))
    for_each(lambda: write, blocks(0, count, few), most=most_threads(x, math.prod(x.shape)))
    return means


@mean_of_chunks.pullback
def _pull_means(
    means: Array, d_means: Array, x: Array, count: int, seen: Array | None, xp: Any
) -> dict[str, Array]:
    """Pull means of chunks back to their tokens."""
    chunk = xp.asarray(chunk_of(x.shape[-2], count), device=device(x))
    chunk = chunk if seen is None else _chunk_of_seen(seen, count, xp)
    return {"x": tokens_of_means(d_means, chunk, x, xp)}


def tokens_of_means(d_means: Array, chunk: Array, x: Array, xp: Any) -> Array:
    """Pull means of chunks back to tokens, given which chunk each is in, if any."""
    count, total = d_means.shape[-2], xp.zeros_like(x)
    columns = list(blocks(0, x.shape[-2], block_shape(x)[1]))

    def inside(j: slice) -> Array:
        return members(chunk[..., j], slice(0, count), x, xp)

    sizes: Any = sum(xp.sum(inside(j), axis=-1, keepdims=True) for j in columns)
    share = d_means / xp.where(sizes == 0, 1.0, sizes)
    for j in columns:
        total = add_part(total, (j, WHOLE), multiply(xp.matrix_transpose(inside(j)), share))
    return total


def _means_of_rows(x: Array, count: int, xp: Any) -> Array:
    """Do so in few products: shorter chunks are filled up with rows that have no share."""
    *lead, n, d = x.shape
    edges = -(-np.arange(count + 1) * n // count)
    size, length = np.diff(edges)[:, None], -(-n // count)
    if n % count == 0:
        share = xp.full((1, length), 1 / length, dtype=x.dtype, device=device(x))
        return sum_of_products(share, xp.reshape(x, (*lead, count, length, d)))[..., 0, :]
    place = edges[:-1, None] + np.minimum(np.arange(length), size - 1)
    place = xp.asarray(place, device=device(x))
    share = constant((np.arange(length) < size) / size, x)[:, None, :]
    few, means = max(1, math.prod(block_shape(x)) // max(1, math.prod(lead) * length * d)), []
    for c in blocks(0, count, few):
        rows = xp.take(x, xp.reshape(place[c, :], (-1,)), axis=-2)
        rows = xp.reshape(rows, (*lead, c.stop - c.start, length, d))
        means.append(sum_of_products(share[c, :, :], rows)[..., 0, :])
    return xp.concat(means, axis=-2)


def chunk_of(n: int, count: int) -> Any:
    """Return which of the chunks each of n tokens is in."""
    return np.arange(n) * count // max(n, 1)


def seen_keys(keys: Keys, xp: Any) -> Array | None:
    """Return which keys some query sees, (..., m)."""
    return None if keys.mask is None else xp.any(keys.mask, axis=-2)


def _chunk_of_seen(seen: Array, count: int, xp: Any) -> Array:
    """Return which of chunks of equally many seen tokens each is in, (..., m), -1 if unseen."""
    home = device(seen)
    visible = xp.astype(seen, xp.arange(0, device=home).dtype)  # JAX may have no int64
    rank = xp.cumulative_sum(visible, axis=-1) - 1
    total = xp.maximum(xp.sum(visible, axis=-1, keepdims=True), xp.asarray(1, device=home))
    return xp.where(seen, rank * count // total, -1)


def members(chunk: Array, c: slice, like: Array, xp: Any) -> Array:
    """Return 1 where a token is in a chunk, else 0, (..., chunks, tokens)."""
    chunks = xp.arange(c.start, c.stop, device=device(like))[:, None]
    return xp.astype(chunk[..., None, :] == chunks, like.dtype)
