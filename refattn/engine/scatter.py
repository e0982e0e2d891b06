"""Compute the mean and the covariance of rows, block by block, merged in a binary tree."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from ..arrays import checks, rows
from ..arrays.arithmetic import add, pairwise, sum_of_products
from ..arrays.blocks import WHOLE, block_shape, part, tiles
from ..arrays.library import Array, array_namespace, as_written, constant, device


class Scatter(NamedTuple):
    """Moments with divisor N, so that sums never overflow where the covariance does not."""

    size: int
    mean: Array  # (..., d)
    cov: Array  # (..., d, d)


def fold_rows(named: Iterable[tuple[str, Array]], axis: Any) -> Scatter:
    """Fold the rows of arrays, which come with the names that messages call them."""
    blocks = _blocks_of_rows(named, axis)
    empty = next(blocks, None)
    if empty is None:
        raise ValueError("`chunks` must yield at least one array, got none.")
    return _fold_blocks(empty, blocks)


@as_written
def _fold_blocks(empty: Array, blocks: Iterator[Array]) -> Scatter:
    """Fold blocks of rows into one result; `empty` is a block without rows."""
    # Relative to the first row, squares keep their digits where rows are far from 0.
    xp, origin = array_namespace(empty), empty

    def scatters() -> Iterator[Scatter]:
        nonlocal origin
        for i, block in enumerate(blocks):
            if i == 0:
                origin = block[..., :1, :] + 0.0  # a copy: the caller may overwrite its array
            yield _scatter_of_block(block - origin, xp)

    zeros = xp.sum(empty, axis=-2)
    total: Scatter = pairwise(join_scatters, scatters(), Scatter(0, zeros, _outer(zeros)))
    return total._replace(mean=total.mean + xp.sum(origin, axis=-2))


@as_written
def _no_rows(x: Array, lead: tuple[int, ...]) -> Array:
    shape = (*lead, 0, x.shape[-1])
    return array_namespace(x).zeros(shape, dtype=x.dtype, device=device(x))


def _blocks_of_rows(named: Iterable[tuple[str, Array]], axis: Any) -> Iterator[Array]:
    """Check arrays and cut their rows into blocks (..., b, d), after one that is empty."""
    first, head = "", None
    for name, x in named:
        checks.arrays(2, **{name: x})
        pooled = rows.axes_of_rows(name, x, axis)
        kept = tuple(i for i in range(x.ndim - 1) if i not in pooled)
        xp, lead, d = array_namespace(x), tuple(x.shape[i] for i in kept), x.shape[-1]
        if head is None:
            first, head = name, _no_rows(x, lead)
            yield head
        # Which leaves out empty chunks of arrays that came one by one.
        x = as_written(xp.permute_dims)(x, (*kept, *pooled, x.ndim - 1))
        rows.joining_rows(name, x, len(pooled), first, head)
        # d rows take the room of the result; with less, small products would dominate.
        size = max(d, math.prod(block_shape(x)) // max(1, math.prod(lead) * d))
        for box in tiles(x.shape[len(lead) : -1], size):
            block = part(x, (*box, WHOLE))
            yield xp.reshape(block, (*lead, math.prod(block.shape[len(lead) : -1]), d))


@as_written
def _scatter_of_block(y: Array, xp: Any) -> Scatter:
    """Compute the moments of one block of our own temporary rows (..., b, d)."""
    n = y.shape[-2]
    ones = xp.ones((1, n), dtype=y.dtype, device=device(y))
    mean = sum_of_products(ones, y) / n  # sums are pairwise
    # A power of 2, exact, that keeps the sum of b squares finite where their mean is.
    small = 2.0 ** -((n.bit_length() + 1) // 2)
    y = add(y, -mean) * small
    cov = sum_of_products(xp.matrix_transpose(y), y) / (2 * n * small * small)
    # Products of some libraries are symmetric but for rounding.
    return Scatter(n, mean[..., 0, :], cov + xp.matrix_transpose(cov))


@as_written
def join_scatters(a: Scatter, b: Scatter) -> Scatter:
    """Merge the moments of two sets of rows."""
    if a.size == 0 or b.size == 0:
        return a if a.size else b
    n = a.size + b.size
    # Shares, not sums: no count times a large value, which might overflow.
    share_a, share_b = (constant(x.size, x.mean) / n for x in (a, b))
    delta = b.mean - a.mean
    between = _outer(delta * (share_a * share_b) ** 0.5)
    return Scatter(n, a.mean + share_b * delta, share_a * a.cov + share_b * b.cov + between)


def _outer(x: Array) -> Array:
    """Multiply vectors (..., d) with themselves: (..., d, d)."""
    return x[..., :, None] * x[..., None, :]
