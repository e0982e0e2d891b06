"""Products of matrices, of which no rounding error grows with the number of terms."""

from __future__ import annotations

import math
import operator
from functools import cache
from itertools import product
from typing import Any

import numpy as np

from .blocks import WHOLE, blocks, cache_sizes, pairwise, part, tiles
from .library import (
    Array,
    Workspace,
    array_namespace,
    broadcast_shapes,
    exp_less,
    is_cupy_array,
    is_numpy_array,
    sum_pieces,
)

_TERMS = 64  # that one matrix product may add
UNCUT = 128  # terms of a product of queries and keys that is not cut, which would take time
_FEW_PRODUCTS = 8  # products that are added in turn, of the 16 or 32 of a block and others
_MOST_TERMS = _FEW_PRODUCTS * _FEW_PRODUCTS * _TERMS  # terms of which all products are made at once
# Part of a sum of products on NumPy: at least so many rows, or so many bytes of products.
_CACHE_ROWS, _CACHE_COLUMNS, _CACHE_BYTES = 64, 256, 2**21
# Columns of a tile of a product, and rows for which it pays to copy the other matrix for tiles. In
# float64 these take longer than the whole.
_TILE_COLUMNS, _TILED_ROWS = 128, 256


def multiply(x: Array, y: Array, memory: Workspace | None = None, name: str = "product") -> Array:
    """Multiply matrices, in a workspace in the memory of that name."""
    out = None if memory is None else memory.room(name, _product_shape(x, y), x.dtype)
    if y.shape[-2] > UNCUT:
        return sum_of_products(x, y, memory, out)
    if out is None:
        if not is_cupy_array(x) or y.ndim > 2:
            return x @ y
        # The rows of all heads at once: a batch would copy the one matrix for each.
        rows = x.reshape((math.prod(x.shape[:-1]), x.shape[-1]))
        return (rows @ y).reshape((*x.shape[:-1], y.shape[-1]))
    n, columns = out.shape[-2:]
    in_rows = y.strides[-1] == y.itemsize
    tiled = x.dtype == np.float32 and n >= _TILED_ROWS and columns % _CACHE_ROWS == 0
    width = math.gcd(columns, _TILE_COLUMNS) if tiled else columns
    rows = _rows_of_product(n, width, y.shape[-2]) if tiled or in_rows else n
    if rows == n:
        return np.matmul(x, y, out=out)
    if memory is not None and not in_rows:
        copied = memory.room("tiles", y.shape, y.dtype)
        np.copyto(copied, y)
        y = copied
    x = x.reshape((*x.shape[:-2], n // rows, 1, rows, x.shape[-1]))
    y = y.reshape((*y.shape[:-2], 1, y.shape[-2], columns // width, width)).swapaxes(-3, -2)
    tiles = out.reshape((*out.shape[:-2], n // rows, rows, columns // width, width))
    np.matmul(x, y, out=tiles.swapaxes(-3, -2))
    return out


def _product_shape(x: Array, y: Array) -> tuple[int, ...]:
    """Return the shape of a product of matrices."""
    lead = broadcast_shapes(x.shape[:-2], y.shape[:-2])
    return (*lead, x.shape[-2], y.shape[-1])


def sum_of_products(
    x: Array, y: Array, memory: Workspace | None = None, out: Array | None = None
) -> Array:
    """Multiply matrices in products of a few terms each, which are then added.

    A plain product may add N terms in turn. Where these are nearly equal, its rounding errors may
    all have one sign, and add up to 3 N / 16 eps.
    """
    terms = y.shape[-2]
    if terms <= _TERMS:
        return x @ y if out is None else np.matmul(x, y, out=out)
    if is_numpy_array(x):
        out = np.empty(_product_shape(x, y), dtype=x.dtype) if out is None else out
        _sum_in_cache(x, y, out, memory or Workspace())
        return out
    xp, whole = array_namespace(x, y), terms // _TERMS * _TERMS
    if whole < terms:
        first = sum_of_products(x[..., :whole], y[..., :whole, :])
        return first + x[..., whole:] @ y[..., whole:, :]
    # Columns that follow each other in memory CuPy copies in a batch.
    if is_cupy_array(x) and x.strides[-2] < x.strides[-1] and x.size > y.size:
        return xp.matrix_transpose(sum_of_products(xp.matrix_transpose(y), xp.matrix_transpose(x)))
    return _sum_of_cut(_cut_terms(x, xp), _cut_rows(y, xp), xp)


def _cut_terms(x: Array, xp: Any) -> Array:
    """View x, (..., n, terms), as what products of a few terms take, (..., count, n, few)."""
    return xp.moveaxis(xp.reshape(x, (*x.shape[:-1], x.shape[-1] // _TERMS, _TERMS)), -2, -3)


def _cut_rows(y: Array, xp: Any) -> Array:
    return xp.reshape(y, (*y.shape[:-2], y.shape[-2] // _TERMS, _TERMS, y.shape[-1]))


def _sum_of_cut(x: Array, y: Array, xp: Any) -> Array:
    """Add products (..., count, n, few) @ (..., count, few, columns), held in as much memory."""
    count, least = x.shape[-3], min(x.shape[-2], y.shape[-1])
    step = max(1, count * _TERMS // max(_TERMS, least))
    some = (WHOLE, WHOLE)
    parts = (
        sum_pieces(x[(..., i, *some)] @ y[(..., i, *some)], xp) for i in blocks(0, count, step)
    )
    return pairwise(operator.add, parts, None)


def sums_of_exponentials(scores: Array, base: Array, v: Array, xp: Any) -> tuple[Array, Array]:
    """Sum values with weights e^(score - base), and the weights, in libraries other than NumPy.

    The weights are written as products of a few terms take them, which saves a copy.
    """
    terms, cut = v.shape[-2], v.shape[-2] // _TERMS * _TERMS
    if cut < terms and terms > _TERMS:
        some = ((scores[..., j], v[..., j, :]) for j in (slice(0, cut), slice(cut, terms)))
        first, last = (sums_of_exponentials(x, base, y, xp) for x, y in some)
        return first[0] + last[0], first[1] + last[1]
    if terms <= _TERMS:
        weights = exp_less(scores, base, xp, flush=True)
        return weights @ v, xp.sum(weights, axis=-1, keepdims=True)
    weights = exp_less(_cut_terms(scores, xp), base[..., None, :, :], xp, flush=True)
    mass = xp.sum(xp.sum(weights, axis=-1, keepdims=True), axis=-3)
    return _sum_of_cut(weights, _cut_rows(v, xp), xp), mass


def sum_of_rows(x: Array, xp: Any) -> Array:
    """Sum along the last axis, which is kept: on NumPy in products with ones, as fast as BLAS.

    These add several terms of a row at once, so that few are added in turn.
    """
    by_blas = is_numpy_array(x) and x.dtype.itemsize <= 8  # not longdouble
    if x.shape[-1] % _TERMS or not by_blas:
        return xp.sum(x, axis=-1, keepdims=True)
    few = x.reshape((*x.shape[:-1], x.shape[-1] // _TERMS, _TERMS)).swapaxes(-3, -2)
    return np.add.reduce(np.matmul(few, _ones(x.dtype)), axis=-3)


@cache
def _ones(dtype: Any) -> Array:
    return np.ones((_TERMS, 1), dtype=dtype)


def _sum_in_cache(x: Array, y: Array, out: Array, memory: Workspace) -> None:
    """Write a sum of products on NumPy, a part at a time, with the products of it in the cache."""
    terms, lead, (n, columns) = x.shape[-1], out.shape[:-2], out.shape[-2:]
    width = max(1, min(columns, _CACHE_COLUMNS))
    size = min(terms, _MOST_TERMS) // _TERMS * width  # numbers of the products of a row
    fit = 2 ** math.floor(math.log2(max(1, _CACHE_BYTES // (size * x.dtype.itemsize))))
    rows = max(1, min(n, max(_CACHE_ROWS, fit)))
    heads = max(1, min(math.prod(lead), fit // rows))
    products = memory.room("products", (heads * rows * size,), x.dtype)
    if rows == n and heads == math.prod(lead) and width == columns:
        return _sum_of_part(x, y, out, products)
    for head, i, j in product(tiles(lead, heads), blocks(0, n, rows), blocks(0, columns, width)):
        x_part, y_part = part(x, (*head, i, WHOLE)), part(y, (*head, WHOLE, j))
        _sum_of_part(x_part, y_part, out[(*head, i, j)], products)


def _sum_of_part(x: Array, y: Array, out: Array, memory: Array) -> None:
    """Write a sum of products in few calls: between two of them threads wait for each other."""
    (n, terms), columns = x.shape[-2:], y.shape[-1]
    if terms > _MOST_TERMS:
        half, more = terms // 2, np.empty_like(out)
        _sum_of_part(x[..., :half], y[..., :half, :], out, memory)
        _sum_of_part(x[..., half:], y[..., half:, :], more, memory)
        out += more
        return
    rows = _rows_of_product(n, columns, _TERMS)
    few = _FEW_PRODUCTS if terms >= 2 * _FEW_PRODUCTS * _TERMS else 1
    grid = (terms // (few * _TERMS), few, _TERMS)  # a few products are added, and then their sums
    whole = math.prod(grid)
    x_grid = x[..., :whole].reshape((*x.shape[:-2], n // rows, rows, *grid))
    x_grid = x_grid.swapaxes(-4, -3).swapaxes(-3, -2)
    y_grid = y[..., None, :whole, :].reshape((*y.shape[:-2], 1, *grid, columns))
    shape = (*out.shape[:-2], n // rows, *grid[:2], rows, columns)
    products = np.matmul(x_grid, y_grid, out=memory[: math.prod(shape)].reshape(shape))
    sums = np.add.reduce(products, axis=-3) if few > 1 else products[..., 0, :, :]
    np.add.reduce(sums, axis=-3, out=out.reshape((*out.shape[:-2], n // rows, rows, columns)))
    if whole < terms:
        out += sum_of_products(x[..., whole:], y[..., whole:, :])


def _rows_of_product(n: int, columns: int, terms: int) -> int:
    """Say of how many of n rows a product is made at once.

    Some libraries multiply small matrices as they are, and copy large ones first.
    """
    most, rows = cache_sizes().product // max(1, terms * columns), n
    while rows > most and rows % 2 == 0:
        rows //= 2
    return rows if _CACHE_ROWS <= rows <= most else n
