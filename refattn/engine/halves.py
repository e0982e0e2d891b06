r"""Pairs of a query and the keys up to its own, for exponents of any size and no branch on them.

The tokens of a leaf, whose number is a power of two, are cut into halves, and these again, down to
one. The queries of a later half see all keys of the earlier one. So each sample has one base for
all of these pairs, the largest exponent of such a key, and their kernels are one product of
matrices of numbers up to 1: what underflows is less than the smallest number relative to what the
query sees. All halves of one size are taken at once, of T leaves: arrays are (..., T, c, w).
"""

from __future__ import annotations

import math
from typing import Any

from ..arrays.library import Array, device, times, traced_once
from ..arrays.products import multiply, sum_of_products
from .kernel import finite, log_sum_exp


def log_kernel(x: Array, y: Array, known: Array | None, xp: Any) -> Array:
    """Evaluate log sum_s e^(x_is + y_js) where j <= i, (..., T, c, c); not elsewhere.

    Exponents x of queries and y of keys are (..., T, c, S), as is `known`, the samples of a query.
    """
    if traced_once(x):  # each size of halves would be compiled by itself
        return _log_pairs(x, y, known, xp)
    same = _same_halves(x, xp)

    def of_leaves(x: Array, y: Array, known: Array | None) -> Array:
        if x.shape[-2] == 1:
            return _log_pairs(x, y, known, xp)
        late, early = _relative_to(x, y, known, xp)
        base = xp.max(late, axis=-1, keepdims=True)
        late = xp.exp(late - finite(base, xp))
        far = sum_of_products(late, xp.matrix_transpose(xp.exp(early)))
        own = of_leaves(*(z if z is None else _halved(z, xp) for z in (x, y, known)))
        some = xp.maximum(far, xp.finfo(far.dtype).smallest_normal)  # nothing beside the base
        return _joined(own, base + xp.log(some), same, xp)

    return of_leaves(x, y, known)


def _log_pairs(x: Array, y: Array, known: Array | None, xp: Any) -> Array:
    """Do as `log_kernel`, pair by pair and everywhere."""
    known = None if known is None else known[..., :, None, :]
    return log_sum_exp(_from_known(x[..., :, None, :] + y[..., None, :, :], known, xp), xp)


def to_queries(x: Array, y: Array, products: Array, xp: Any) -> Array:
    """Sum products (..., T, c, c) with the weights e^(x_is + y_js) over the keys, (..., T, c, S).

    The weights of a query sum to 1 at most.
    """
    if x.shape[-2] == 1:
        return xp.exp(x + y) * products
    late, early = map(xp.exp, _relative_to(x, y, None, xp))
    far, own = _cut_halves(products, xp)
    moved = _of_pairs(to_queries(_halved(x, xp), _halved(y, xp), own, xp), xp)
    more = times(multiply(far, early), late)
    return xp.concat([moved[..., 0, :, :], moved[..., 1, :, :] + more], axis=-2)


def to_keys(x: Array, y: Array, products: Array, xp: Any) -> tuple[Array, Array]:
    """Sum the same over the queries; return also the kernels of pairs, as of `log_kernel`."""
    same = _same_halves(x, xp)

    def of_leaves(x: Array, y: Array, products: Array) -> tuple[Array, Array]:
        if x.shape[-2] == 1:
            weights = xp.exp(x + y)
            return weights * products, xp.sum(weights, axis=-1, keepdims=True)
        late, early = map(xp.exp, _relative_to(x, y, None, xp))
        far, own = _cut_halves(products, xp)
        moved, kernel = of_leaves(_halved(x, xp), _halved(y, xp), own)
        moved, more = _of_pairs(moved, xp), times(multiply(xp.matrix_transpose(far), late), early)
        moved = xp.concat([moved[..., 0, :, :] + more, moved[..., 1, :, :]], axis=-2)
        return moved, _joined(kernel, multiply(late, xp.matrix_transpose(early)), same, xp)

    return of_leaves(x, y, products)


def _relative_to(x: Array, y: Array, known: Array | None, xp: Any) -> tuple[Array, Array]:
    """Exponents of queries of the later half, and of keys of the earlier, from a common base."""
    late, early = _half(x, 1, xp), _half(y, 0, xp)
    base = xp.max(early, axis=-2, keepdims=True)
    late, early = late + base, early - finite(base, xp)
    if known is None:
        return late, early
    # Where a sample has a nan, it is in `late` of those that know the sample.
    early = xp.where(xp.isnan(early), -math.inf, early)
    return _from_known(late, _half(known, 1, xp), xp), early


def _from_known(x: Array, known: Array | None, xp: Any) -> Array:
    return x if known is None else xp.where(known, x, -math.inf)


def _halved(x: Array, xp: Any) -> Array:
    """Cut leaves (..., T, c, w) into halves, (..., 2 T, c / 2, w)."""
    *lead, count, c, w = x.shape
    x = xp.reshape(x, (*lead, count, 2, c // 2, w))  # Dask cuts an axis, and joins two, in turn
    return xp.reshape(x, (*lead, 2 * count, c // 2, w))


def _half(x: Array, which: int, xp: Any) -> Array:
    return _of_pairs(_halved(x, xp), xp)[..., which, :, :]


def _of_pairs(x: Array, xp: Any) -> Array:
    """Put halves (..., 2 T, h, w) side by side, (..., T, 2, h, w)."""
    *lead, count, h, w = x.shape
    return xp.reshape(x, (*lead, count // 2, 2, h, w))


def _cut_halves(pairs: Array, xp: Any) -> tuple[Array, Array]:
    """Take pairs of the later with the earlier half, (..., T, h, h), and of each half."""
    *lead, count, c, _ = pairs.shape
    h = c // 2
    own = xp.stack([pairs[..., :h, :h], pairs[..., h:, h:]], axis=-3)
    return pairs[..., h:, :h], xp.reshape(own, (*lead, 2 * count, h, h))


def _same_halves(x: Array, xp: Any) -> Array:
    """Say of pairs (2, h, 2, h) whether both are in one half."""
    return xp.eye(2, dtype=xp.bool, device=device(x))[:, None, :, None]


def _joined(own: Array, far: Array, same: Array, xp: Any) -> Array:
    """Join the pairs inside each half with those between the halves, to (..., T, c, c)."""
    pairs = xp.where(same, _of_pairs(own, xp)[..., :, :, None, :], far[..., None, :, None, :])
    return xp.reshape(pairs, (*pairs.shape[:-4], 2 * far.shape[-2], 2 * far.shape[-1]))
