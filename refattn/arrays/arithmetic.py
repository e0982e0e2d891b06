"""Products and sums of blocks, in reused memory and with rounding errors that stay small."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Iterable
from functools import cache, reduce
from itertools import product
from typing import Any

import numpy as np

from .blocks import WHOLE, blocks, cache_sizes, part, tiles
from .library import Array, array_namespace, device, fused, is_cupy_array, is_numpy_array, untraced

_TERMS = 64  # that one matrix product may add
UNCUT = 128  # terms of a product of queries and keys that is not cut, which would take time
_FEW_PRODUCTS = 8  # products that are added in turn, of the 16 or 32 of a block and others
_MOST_TERMS = _FEW_PRODUCTS * _FEW_PRODUCTS * _TERMS  # terms of which all products are made at once
# Part of a sum of products on NumPy: at least so many rows, or so many bytes of products.
_CACHE_ROWS, _CACHE_COLUMNS, _CACHE_BYTES = 64, 256, 2**21
# Columns of a tile of a product, and rows for which it pays to copy the other matrix for tiles. In
# float64 these take longer than the whole.
_TILE_COLUMNS, _TILED_ROWS = 128, 256
_FEW_TERMS = 128  # of which BLAS adds so few in turn that errors stay small
_MOST_PIECES = 512  # which are added in eights, as are these sums, and theirs


class Workspace:
    """Memory that is written again and again, for NumPy: new memory takes time to be mapped."""

    def __init__(self) -> None:
        self._held: dict[str, Array] = {}

    def room(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return an array in the memory of that name; the next call with the name overwrites it."""
        size = math.prod(shape)
        held = self._held.get(name)
        if held is None or held.size < size or held.dtype != dtype:
            held = self._held[name] = np.empty(size, dtype=dtype)
        return held[:size].reshape(shape)


def workspace(like: Array, product: int = 0) -> Workspace | None:
    """A workspace, where there is use for it, with room for a product of so many numbers."""
    if not is_numpy_array(like):
        return None
    memory = Workspace()
    if product:
        memory.room("product", (product,), like.dtype)
    return memory


def join_column(x: Array, column: Any, memory: Workspace, name: str) -> Array:
    """Write rows with one more number each, on NumPy, in the memory of that name."""
    rows = broadcast_shapes(x.shape[:-1], np.shape(column))
    joined = memory.room(name, (*rows, x.shape[-1] + 1), x.dtype)
    joined[..., :-1], joined[..., -1] = x, column
    return joined


def with_ones(v: Array, xp: Any, memory: Workspace | None = None) -> Array:
    """Join values and ones to [v_j, 1], whose sums hold the mass."""
    if memory is not None:
        return join_column(v, 1.0, memory, "ones")
    like = v[..., :1] if v.shape[-1] else xp.sum(v, axis=-1, keepdims=True)
    return xp.concat([v, xp.ones_like(like)], axis=-1)


def add(x: Array, y: Array) -> Array:
    """Add to our own temporary `x`."""
    return _in_place(operator.add, np.add, x, y)


def less(x: Array, y: Array) -> Array:
    """Subtract from our own temporary `x`."""
    return _in_place(operator.sub, np.subtract, x, y)


def times(x: Array, y: Array) -> Array:
    """Multiply our own temporary `x`."""
    return _in_place(operator.mul, np.multiply, x, y)


def _in_place(compute: Callable[[Any, Any], Any], of_numpy: Any, x: Array, y: Array) -> Array:
    """Compute in place on NumPy, which saves the time of new memory."""
    if is_numpy_array(x) and broadcast_shapes(x.shape, y.shape) == x.shape:
        return of_numpy(x, y, out=x)
    return compute(x, y)


def clip(x: Array, low: float, high: float, xp: Any, out: Array | None = None) -> Array:
    """Bound numbers, in memory that nothing else uses if there is any."""
    if is_numpy_array(x):
        out = np.empty_like(x) if out is None else out
        if low != -math.inf and high != math.inf:
            return np.clip(x, low, high, out=out)
        # With a bound for each number, half the time of one for all.
        out.fill(low if high == math.inf else high)
        return (np.maximum if high == math.inf else np.minimum)(x, out, out=out)
    x = x if low == -math.inf else xp.maximum(x, low)
    return x if high == math.inf else xp.minimum(x, high)


def rescale(x: Array, factor: Array) -> Array:
    """Multiply by factors most of which are 1: on NumPy, `x` itself where all are."""
    if is_numpy_array(x) and np.all(factor == 1):
        return x
    return x * factor


def exp(x: Array, xp: Any) -> Array:
    """Exponentiate our own temporary `x`; in place on NumPy."""
    return np.exp(x, out=x) if is_numpy_array(x) else xp.exp(x)


def exp_less(x: Array, base: Array, xp: Any, flush: bool = False) -> Array:
    """Evaluate e^(x - base) of our own temporary `x`: in place on NumPy, at once on CuPy.

    What is small may be flushed, as `flush_small` does. Of no number, whose base is -inf, it is 0.
    """
    if is_cupy_array(x):
        return exp_from(x, base, xp)
    x = less(x, finite(base, xp))
    return exp(flush_small(x, xp) if flush else x, xp)


@fused
def exp_from(x: Array, base: Array, xp: Any) -> Array:
    """Evaluate the same of numbers that stay."""
    return xp.exp(x - finite(base, xp))


@fused
def exp_of_sum(x: Array, y: Array, xp: Any) -> Array:
    """Evaluate e^(x + y)."""
    return xp.exp(x + y)


@fused
def exp_of_visible(x: Array, visible: Array, base: Array, xp: Any) -> Array:
    """Evaluate e^(x - base), 0 where hidden."""
    return xp.exp(xp.where(visible, x, -math.inf) - finite(base, xp))


@fused
def largest_visible(x: Array, visible: Array, more: float, xp: Any) -> Array:
    """Find the largest number along the last axis plus one, -inf where all are hidden."""
    return xp.max(xp.where(visible, x + more, -math.inf), axis=-1)


@fused
def add_weighted(a: Array, weight_a: Array, b: Array, weight_b: Array, xp: Any) -> Array:
    """Add two arrays with weights, most of which are 1."""
    return rescale(a, weight_a) + rescale(b, weight_b)


def finite(base: Array, xp: Any) -> Array:
    """Replace -inf, the base of an empty set, by a number: -inf - (-inf) would be nan."""
    return xp.maximum(base, xp.finfo(base.dtype).min)


def flush_small(x: Array, xp: Any) -> Array:
    """Replace logs of subnormal numbers by -inf in our own temporary `x`; in place on NumPy.

    Products with subnormal numbers take up to a hundred times as long. In longdouble they stay, and
    on GPUs, where they cost nothing.
    """
    tiny = float(xp.finfo(x.dtype).smallest_normal)
    if tiny == 0 or is_cupy_array(x):  # 0 of longdouble, as a float
        return x
    floor = math.log(tiny)
    if is_numpy_array(x):
        if not x.min() >= floor:  # also where there is a nan
            np.copyto(x, -math.inf, where=x < floor)
        return x
    return xp.where(x < floor, -math.inf, x)


def square_norm(x: Array) -> Array:
    """|x|^2 along the last axis, or nan where it overflows: a bias of -inf would hide the key."""
    if is_numpy_array(untraced(x)) and x.shape[-1] <= _FEW_TERMS:
        square = np.vecdot(x, x)
        return square + 0.0 * square
    return _square_norm_of_rows(x, array_namespace(x))


@fused
def _square_norm_of_rows(x: Array, xp: Any) -> Array:
    square = xp.sum(x * x, axis=-1)
    return square + 0.0 * square


def pairwise(merge: Callable[[Any, Any], Any], parts: Iterable[Any], nothing: Any) -> Any:
    """Merge as a balanced tree: rounding errors grow with the log of the number of parts."""
    waiting: list[Any] = []
    for count, merged in enumerate(parts, 1):
        for _ in range((count & -count).bit_length() - 1):
            merged = merge(waiting.pop(), merged)
        waiting.append(merged)
    return reduce(lambda late, early: merge(early, late), reversed(waiting)) if waiting else nothing


class Tree:
    """Merge the values of places 0 ... count - 1 as a balanced tree, whichever threads bring them.

    What is merged with what, and in which order, does not depend on threads.
    """

    def __init__(self, merge: Callable[[Any, Any], Any], count: int) -> None:
        self._merge, self._count = merge, count
        self._waiting: dict[tuple[int, int], tuple[int, Any]] = {}

    def add(self, place: int, value: Any) -> Any:
        """Merge with neighbours that are there; return the value of all, or None if some are not.

        No thread waits: of two neighbours, the one that comes first is left for the other.
        """
        count = self._count
        while count > 1:
            if place + 1 < count or place % 2:  # not the last of an odd number
                pair, mine = (count, place // 2), (place, value)
                other = self._waiting.setdefault(pair, mine)  # one step, whatever threads do
                if other is mine:
                    return None
                del self._waiting[pair]
                early, late = sorted((mine, other), key=lambda x: x[0])
                value = self._merge(early[1], late[1])
            place, count = place // 2, -(-count // 2)
        return value


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


def sum_pieces(x: Array, xp: Any) -> Array:
    """Sum (..., count, n, w) over `count`, in eights: libraries may add all in turn.

    CuPy would take twice the time of one pass.
    """
    *lead, count, n, w = x.shape
    if count == 1:
        return x[..., 0, :, :]
    kernel = _cupy_kernel("sum_pieces") if is_cupy_array(x) and count <= _MOST_PIECES else None
    if kernel is not None:
        return kernel(x, count, n * w, xp.empty((*lead, n, w), dtype=x.dtype, device=device(x)))
    if count <= 8:
        return xp.sum(x, axis=-3)
    if rest := count % 8:
        last = xp.sum(x[..., count - rest :, :, :], axis=-3)
        return sum_pieces(x[..., : count - rest, :, :], xp) + last
    return sum_pieces(xp.sum(xp.reshape(x, (*lead, count // 8, 8, n, w)), axis=-3), xp)


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


def sum_of_visible(
    weights: Array,
    v: Array,
    visible: Array | None,
    xp: Any,
    memory: Workspace | None = None,
    *,
    signed: bool = False,
) -> Array:
    """Sum weights, 0 where hidden, times values: neither 0 * inf nor 0 * nan hidden reach it.

    All are visible if that is None. No weight is negative unless `signed`.
    """
    if visible is None or not v.shape[-1] or (is_numpy_array(v) and xp.isfinite(v).all()):
        return sum_of_products(weights, v, memory)
    total = sum_of_products(weights, _known_or_0(v, xp))
    # Visible infinities and nan, which add 0, inf, -inf or nan to it, are counted in products of
    # matrices: a nan as both infinities, any with weight 0 as very many.
    many, d_v = 2.0 * v.shape[-2], v.shape[-1]
    side = xp.arange(2, dtype=v.dtype, device=device(v))[:, None]
    infinite = _reaches_infinity(v[..., None, :], side, xp)
    infinite = xp.reshape(infinite, (*v.shape[:-1], 2 * d_v))
    if signed:
        counts = _count_negative(weights, xp) @ infinite
        total = _add_infinite(total, counts[..., d_v:], counts[..., :d_v], many, xp)
    counts = _count_seen(weights, visible, many, xp) @ infinite
    return _add_infinite(total, counts[..., :d_v], counts[..., d_v:], many, xp)


@fused
def _known_or_0(v: Array, xp: Any) -> Array:
    return xp.where(xp.isfinite(v), v, 0.0)


@fused
def _reaches_infinity(v: Array, side: Array, xp: Any) -> Array:
    """1 for infinities, of side 1 the negative one, and for nan; else 0."""
    return xp.astype(~((1 - 2 * side) * v < math.inf), v.dtype)


@fused
def _count_negative(weights: Array, xp: Any) -> Array:
    return xp.astype(weights < 0, weights.dtype)


@fused
def _count_seen(weights: Array, visible: Array, many: float, xp: Any) -> Array:
    """1 for weights above 0, and `many` for those that are 0 and visible."""
    none = visible & (weights == 0)
    return xp.astype(weights > 0, weights.dtype) + many * xp.astype(none, weights.dtype)


@fused
def _add_infinite(total: Array, up: Array, down: Array, many: float, xp: Any) -> Array:
    """Add inf, -inf or nan to finite sums where so many terms are."""
    more = xp.where(up > 0, math.inf, xp.where(down > 0, -math.inf, 0.0 * up))
    spoilt = ((up > 0) & (down > 0)) | (up >= many) | (down >= many)
    return total + xp.where(spoilt, math.nan, more)


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


_CUPY_KERNELS = {  # parameters, results, and what is done for each number i of these
    "sum_pieces": (
        "raw T x, int64 count, int64 size",
        "T z",
        """
        const long long first = i / size * size * count + i % size;
        T sum = 0, more = 0, few = 0;
        for (long long piece = 0; piece < count; ++piece) {
            few += x[first + piece * size];
            if (piece % 8 == 7) { more += few; few = 0; }
            if (piece % 64 == 63) { sum += more; more = 0; }
        }
        z = sum + (more + few);
        """,
    )
}


@cache
def _cupy_kernel(name: str) -> Any:
    """Make a kernel of CuPy; None of a stand-in for it that compiles nothing."""
    make = getattr(sys.modules["cupy"], "ElementwiseKernel", None)
    return make and make(*_CUPY_KERNELS[name], "refattn_" + name)


def broadcast_shapes(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """Broadcast two shapes, as NumPy does, at once where one ends with the other."""
    if a[max(0, len(a) - len(b)) :] == b:
        return a
    return b if b[max(0, len(b) - len(a)) :] == a else np.broadcast_shapes(a, b)
