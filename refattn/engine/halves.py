r"""Sums over causal pairs of a leaf, for exponents of any size and without a branch on values.

The tokens of a leaf, whose number is a power of two, are cut into halves, and these again, down to
one. The queries of a later half see all keys of the earlier one. So each sample has one base for
all of these pairs, the largest exponent of such a key, and their kernels are one product of
matrices of numbers up to 1: what underflows is less than the smallest number relative to what the
query sees. All halves of one size are taken at once, of T leaves: arrays are (..., T, c, w).
"""

from __future__ import annotations

import math
from typing import Any

from ..arrays.arithmetic import finite, multiply, sum_of_products
from ..arrays.library import Array, device, fused, is_cupy_array, is_numpy_array, traced_once
from ..numbers.tape import fixed

_QUARTERS = 4  # parts of a leaf for `log_kernel`: half as many rounds as with halves
_TOKENS_OF_TRIPLES = 16  # of a leaf that CuPy takes sample by sample, in one kernel


def log_kernel(x: Array, y: Array, known: Array | None, xp: Any) -> Array:
    """Evaluate log sum_s e^(x_is + y_js) where j <= i, (..., T, c, c); not elsewhere.

    Exponents x of queries and y of keys are (..., T, c, S), as is `known`, the samples of a query.
    Leaves are cut into quarters, which take fewer calls, each of which sees all keys before it.
    """

    def of_leaves(x: Array, y: Array, known: Array | None) -> Array:
        if traced_once(x) or x.shape[-2] <= _QUARTERS:  # JAX would compile each size by itself
            return _log_pairs(x, y, known, xp)
        # Pairs of different quarters by products; those of one quarter are those of a leaf again.
        x, known = (z if z is None else _in_parts(z, _QUARTERS, xp) for z in (x, known))
        far, y = _log_far(x, y, known, earlier, xp)
        own = of_leaves(*(z if z is None else _as_leaves(z, xp) for z in (x, y, known)))
        return _joined(own, far, place, xp)

    place = xp.arange(_QUARTERS, device=device(y))
    earlier = (place < place[:, None])[..., None]
    return of_leaves(x, xp.matrix_transpose(y), known)


def _log_far(
    x: Array, y: Array, known: Array | None, earlier: Array, xp: Any
) -> tuple[Array, Array]:
    """Do so for keys of earlier parts, (..., T, 4, h, 4, h); return the keys in parts.

    Queries are (..., T, 4, h, S), keys (..., T, S, c), and then (..., T, 4, S, h). A part has a
    base for each sample, of all keys before it; what comes of later keys may be anything.
    """
    *lead, c = y.shape
    parts = xp.moveaxis(xp.reshape(y, (*lead, _QUARTERS, c // _QUARTERS)), -2, -3)
    base = _largest_before(xp.max(parts, axis=-1)[..., None, :, :], earlier, xp)
    early = _exp_of_earlier(y[..., None, :, :], base[..., None], xp)
    x, base = _hide_unknown(x, base[..., None, :], known, xp)
    if known is not None:  # where a sample has a nan, it is in x of those that know the sample
        early = xp.where(xp.isnan(early), 0.0, early)
    largest = _largest_of_sum(x, base, xp)[..., None]
    late = _exp_of_sum_less(x, base, largest, xp)
    far = _add_log(largest, sum_of_products(late, early), xp)
    return xp.reshape(far, (*far.shape[:-1], _QUARTERS, c // _QUARTERS)), parts


def log_of_all(x: Array, y: Array, xp: Any) -> Array:
    """Evaluate log sum_s e^(x_is + y_js) of all pairs, for queries each of which sees all keys."""
    base = xp.max(fixed(y), axis=-2, keepdims=True)
    largest = _largest_of_sum(fixed(x), base, xp)[..., None]
    early, late = _exp_of_sum_less(y, 0.0, base, xp), _exp_of_sum_less(x, base, largest, xp)
    return _add_log(largest, multiply(late, xp.matrix_transpose(early)), xp)


@fused
def _largest_before(largest: Array, earlier: Array, xp: Any) -> Array:
    """Find the largest of the parts before each, -inf before the first."""
    return xp.max(xp.where(earlier, largest, -math.inf), axis=-2)


@fused
def _exp_of_earlier(y: Array, base: Array, xp: Any) -> Array:
    """Evaluate e^(y - base), at most 1: that of later keys is hidden, but must not overflow."""
    return xp.exp(xp.minimum(y - finite(base, xp), 0.0))


@fused
def _add_log(base: Array, mass: Array, xp: Any) -> Array:
    # What is below the smallest number is nothing beside the base.
    return base + xp.log(xp.maximum(mass, xp.finfo(mass.dtype).smallest_normal))


def _log_pairs(x: Array, y: Array, known: Array | None, xp: Any) -> Array:
    """Do as `log_kernel`, pair by pair and everywhere; y is (..., T, S, c)."""
    known = None if known is None else known[..., :, None, :]
    x, y = _hide_unknown(x[..., :, None, :], xp.matrix_transpose(y)[..., None, :, :], known, xp)
    largest = _largest_of_sum(x, y, xp)
    return _add_log(largest, _sum_of_exp(x, y, largest[..., None], xp), xp)


def _hide_unknown(x: Array, y: Array, known: Array | None, xp: Any) -> tuple[Array, Array | float]:
    """Give two logs with the same sum where a query knows the sample, and with -inf elsewhere."""
    return (x, y) if known is None else (xp.where(known, x + y, -math.inf), 0.0)


@fused
def _largest_of_sum(x: Array, y: Array | float, xp: Any) -> Array:
    return xp.max(x + y, axis=-1)


@fused
def _exp_of_sum_less(x: Array, y: Array | float, base: Array, xp: Any) -> Array:
    return xp.exp(x + y - finite(base, xp))


@fused
def _sum_of_exp(x: Array, y: Array | float, base: Array, xp: Any) -> Array:
    return xp.sum(xp.exp(x + y - finite(base, xp)), axis=-1)


def to_queries(x: Array, y: Array, products: Array, xp: Any) -> Array:
    """Sum products (..., T, c, c) with the weights e^(x_is + y_js) over the keys, (..., T, c, S).

    The weights of a query sum to 1 at most.
    """

    def of_leaves(x: Array, y: Array, products: Array) -> Array:
        if x.shape[-2] <= _tokens_of_triples(x):
            return _sum_over_keys(*_as_triples(x, y, xp), products[..., None], xp)
        # e^late is the weight of a pair, so at most 1; e^early is at most 1 by its base.
        late, early = _relative_to(x, y, xp)
        far, own = _cut_halves(products, half, xp)
        moved = of_leaves(_halved(x, xp), _halved(y, xp), own)
        # Only queries of the later half see the earlier one.
        return _add_in_half(moved, multiply(far, early), late, half, 1, xp)

    half = xp.arange(2, device=device(x))[:, None, None]
    return of_leaves(x, y, products)


def to_keys(x: Array, y: Array, products: Array, xp: Any) -> tuple[Array, Array]:
    """Sum the same over the queries; return also the kernels of pairs, as of `log_kernel`."""

    def of_leaves(x: Array, y: Array, products: Array) -> tuple[Array, Array]:
        if x.shape[-2] <= _tokens_of_triples(x):
            triples = _as_triples(x, y, xp)
            moved = _sum_over_queries(*triples, products[..., None], xp)
            return moved, _sum_over_samples(*triples, xp)
        late, early = _relative_to(x, y, xp)
        far, own = _cut_halves(products, half, xp)
        moved, kernel = of_leaves(_halved(x, xp), _halved(y, xp), own)
        more = multiply(xp.matrix_transpose(far), late)
        moved = _add_in_half(moved, more, early, half, 0, xp)
        far = multiply(late, xp.matrix_transpose(early))
        return moved, _joined(kernel, far[..., None, :, None, :], half[:, 0, 0], xp)

    half = xp.arange(2, device=device(x))[:, None, None]
    return of_leaves(x, y, products)


def _tokens_of_triples(x: Array) -> int:
    return _TOKENS_OF_TRIPLES if is_cupy_array(x) else 1


def _as_triples(x: Array, y: Array, xp: Any) -> tuple[Array, Array, Array]:
    """Give queries, keys and samples an axis each, (..., c, c, S); say which pairs are causal."""
    place = xp.arange(x.shape[-2], device=device(x))
    return x[..., :, None, :], y[..., None, :, :], (place[:, None] >= place)[..., None]


@fused
def _sum_over_keys(x: Array, y: Array, seen: Array, products: Array, xp: Any) -> Array:
    return xp.sum(xp.exp(xp.where(seen, x + y, -math.inf)) * products, axis=-2)


@fused
def _sum_over_queries(x: Array, y: Array, seen: Array, products: Array, xp: Any) -> Array:
    return xp.sum(xp.exp(xp.where(seen, x + y, -math.inf)) * products, axis=-3)


@fused
def _sum_over_samples(x: Array, y: Array, seen: Array, xp: Any) -> Array:
    return xp.sum(xp.exp(xp.where(seen, x + y, -math.inf)), axis=-1)


def _add_in_half(moved: Array, x: Array, y: Array, half: Array, which: int, xp: Any) -> Array:
    """Add x * y to one half of our own temporary (..., 2 T, h, w), and join halves, (..., T, c, w).

    `half` numbers the halves, 0 and 1, (2, 1, 1).
    """
    *lead, count, h, w = moved.shape
    moved = xp.reshape(moved, (*lead, count // 2, 2, h, w))
    if is_numpy_array(moved):
        moved[..., which, :, :] += x * y
    else:
        moved = _add_where_same(half, which, moved, x[..., None, :, :], y[..., None, :, :], xp)
    return xp.reshape(moved, (*lead, count // 2, 2 * h, w))


@fused
def _add_where_same(a: Array, b: int, to: Array, x: Array, y: Array, xp: Any) -> Array:
    return xp.where(a == b, to + x * y, to)


def _relative_to(x: Array, y: Array, xp: Any) -> tuple[Array, Array]:
    """Exponentials of queries of the later half, and of keys of the earlier, from a common base."""
    late, early = _in_parts(x, 2, xp)[..., 1, :, :], _in_parts(y, 2, xp)[..., 0, :, :]
    return _exp_of_both(late, early, xp.max(early, axis=-2, keepdims=True), xp)


@fused
def _exp_of_both(x: Array, y: Array, base: Array, xp: Any) -> tuple[Array, Array]:
    """Evaluate e^(x + base) and e^(y - base)."""
    return xp.exp(x + base), xp.exp(y - finite(base, xp))


def _in_parts(x: Array, parts: int, xp: Any) -> Array:
    """Cut leaves (..., T, c, w) into parts, (..., T, parts, c / parts, w)."""
    *lead, c, w = x.shape
    return xp.reshape(x, (*lead, parts, c // parts, w))


def _as_leaves(x: Array, xp: Any) -> Array:
    """Put parts (..., T, parts, h, w) one after the other, (..., parts T, h, w)."""
    *lead, count, parts, h, w = x.shape
    return xp.reshape(x, (*lead, parts * count, h, w))


def _halved(x: Array, xp: Any) -> Array:
    """Cut leaves (..., T, c, w) into halves, (..., 2 T, c / 2, w)."""
    return _as_leaves(_in_parts(x, 2, xp), xp)  # Dask cuts an axis, and joins two, in turn


def _cut_halves(pairs: Array, half: Array, xp: Any) -> tuple[Array, Array]:
    """Take pairs of the later with the earlier half, (..., T, h, h), and of each half."""
    *lead, count, c, _ = pairs.shape
    h = c // 2
    own = _where_same(half, 0, pairs[..., None, :h, :h], pairs[..., None, h:, h:], xp)
    return pairs[..., h:, :h], xp.reshape(own, (*lead, 2 * count, h, h))


def _joined(own: Array, far: Array, place: Array, xp: Any) -> Array:
    """Join pairs inside parts, (..., parts T, h, h), with those between them, to (..., T, c, c).

    The latter are (..., T, parts, h, parts, h), or with 1 for `parts` the same for all.
    """
    count, h = far.shape[-5], far.shape[-1]
    parts = own.shape[-3] // count
    own = xp.reshape(own, (*own.shape[:-3], count, parts, h, 1, h))
    pairs = _where_same(place[:, None, None, None], place[:, None], own, far, xp)
    return xp.reshape(pairs, (*pairs.shape[:-4], parts * h, parts * h))


@fused
def _where_same(a: Array, b: Array | int, same: Array, other: Array, xp: Any) -> Array:
    return xp.where(a == b, same, other)
