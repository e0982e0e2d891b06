r"""Products and sums of arrays of pairs, by exact products of slices, with proven error bounds.

Matrices are (..., n, K) and (..., c, K): the second is transposed. What is made of an array is
remembered in its `memo`, as it may be a factor of many products.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from ..arrays.blocks import blocks
from ..arrays.library import Array, device
from .doubled import Pair, two_sum
from .slices import (
    Slices,
    bits_of_slices,
    facing,
    power_of_two,
    side_by_side,
    sliced_error,
    sliced_product,
)

U2 = 2.0**-106  # u^2
SAFE = 1 + 2.0**-40  # for roundings of bounds
FLOOR = 2.0**-1000  # of what underflows
TINY = 2.0**-900  # of products and quotients that may underflow
_NORMAL = 2.0**-450  # of factors of which no product underflows
_SPAN = 1024  # numbers whose sum is one product of slices
_LEVELS = 3  # slices, the last with all that is left
_ENOUGH = 2.0**-66  # error of a product of matrices that more slices would not lessen
_APART = 2.0**6  # sizes of rows that sums of products balance

Bounded = tuple[Pair, Array]  # numbers and their bound
_Made = TypeVar("_Made")


def remembered(x: Any, name: Any, make: Callable[[], _Made]) -> _Made:
    """Return what was made of an array, or make it."""
    if name not in x.memo:
        x.memo[name] = make()
    found: _Made = x.memo[name]
    return found


def of_each_row(x: Any, name: Any, make: Callable[[Any], Any]) -> Any:
    """Return what is made of each row alone; of some rows, it is theirs of what is made of all."""
    if x.of[0] != "rows of":
        return remembered(x, name, lambda: make(x))
    _, every, rows = x.of
    found = of_each_row(every, name, make)
    parts = found if isinstance(found, tuple) else (found,)
    cut = tuple(y[..., rows, :] for y in parts)
    return cut if isinstance(found, tuple) else cut[0]


def is_something(x: Any) -> Array:
    """Say what may differ from 0: products of bounds may underflow, too."""
    return (x.hi != 0) | (x.e > 0) if x.inexact else x.hi != 0


def dot(a: Any, b: Any, xp: Any, *, more: bool = False, nothing: Any = None) -> list[Bounded]:
    """Multiply matrices, span by span of their last axes; all may need more slices to be small.

    Where there is `nothing`, factors are 0; if it is given, some others may have underflowed.
    """
    if 0 in (a.shape[-1], a.size, b.size):
        lead = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        shape = (*lead, a.shape[-2], b.shape[-2])
        hi = xp.zeros(shape, dtype=xp.float64, device=device(a.hi))
        return [(Pair(hi, hi), hi)]
    spans = list(blocks(0, a.shape[-1], _SPAN))
    return [_dot(_columns(a, j), _columns(b, j), xp, more, nothing) for j in spans]


def _dot(a: Any, b: Any, xp: Any, more: bool, nothing: Any) -> Bounded:
    r"""Multiply matrices cut into slices.

    With f the largest powers of two that are at most the largest magnitudes of the rows, L slices
    and K terms, the error is at most `sliced_error` in units of f(a) f(b),
    :math:`(L + 2) K \max(2^{-b (L - 1)}, 2^{-51}) \gamma_{L K + 4}`, and :math:`2^{-98} K` for low
    parts. L is 3, or 4 if `more` is needed to make all errors small. The errors of the matrices
    add :math:`e_a (|b| + e_b) + |a| e_b`; if they are below :math:`2^{-90}` of f, K times the
    largest of each row takes the place of the sum.
    """
    count, (f_a, f_b) = a.shape[-1], (_powers(x, xp) for x in (a, b))
    levels = _LEVELS
    if more:
        most = [float(xp.max(xp.where(xp.isfinite(f), f, 0.0))) for f in (f_a, f_b)]
        error = sliced_error(count, bits_of_slices(count, levels), levels)
        levels += error * most[0] * most[1] > _ENOUGH
    bits = bits_of_slices(count, levels)
    right = of_each_row(b, ("right", levels), lambda x: facing(_slices_of(x, levels, xp), xp))
    found = sliced_product(_left(a, levels, xp), right, levels, xp)
    turn = xp.matrix_transpose
    f_b = turn(f_b)
    error = (sliced_error(count, bits, levels) + count * 2.0**-98) * f_a * f_b
    if nothing is None and any(xp.any(~(f >= _NORMAL)) for f in (f_a, f_b)):
        some = [xp.any(is_something(x), axis=-1, keepdims=True) for x in (a, b)]
        nothing = ~(some[0] & turn(some[1]))
    if nothing is not None:
        error = xp.where(nothing, 0.0, error + count * FLOOR * (1 + f_a + f_b))
    if a.inexact:
        if not b.inexact and _are_small(a, f_a, xp):
            error = error + 2.1 * count * xp.max(a.e, axis=-1, keepdims=True) * f_b
        else:
            error = error + a.e @ turn(xp.abs(b.hi) + b.e)
    if b.inexact:
        if not a.inexact and _are_small(b, turn(f_b), xp):
            error = error + 2.1 * count * f_a * turn(xp.max(b.e, axis=-1, keepdims=True))
        else:
            error = error + xp.abs(a.hi) @ turn(b.e)
    return found, error * SAFE


def _are_small(x: Any, f: Array, xp: Any) -> bool:
    return not xp.any(xp.max(x.e, axis=-1, keepdims=True) > 2.0**-90 * f)  # nor of nan


def sum_rows(x: Any, xp: Any) -> list[Bounded]:
    """Sum rows, span by span: as `_dot` multiplies them by ones, which are slices themselves."""
    return [_sum_span(_columns(x, j), xp) for j in blocks(0, x.shape[-1], _SPAN)]


def _sum_span(x: Any, xp: Any) -> Bounded:
    count, f = x.shape[-1], _powers(x, xp)[..., 0]
    parts = xp.reshape(_left(x, _LEVELS, xp), (*x.shape[:-1], _LEVELS, count))
    first, second, last = xp.moveaxis(xp.sum(parts, axis=-1), -1, 0)
    hi, lo = two_sum(first, second)
    error = sliced_error(count, bits_of_slices(count, _LEVELS), _LEVELS) + count * 2.0**-98
    bound = error * f + xp.where((f > 0) & (f < TINY), count * FLOOR, 0.0 * f)
    bound = bound + xp.sum(x.e, axis=-1) if x.inexact else bound
    return two_sum(hi, lo + last), bound * SAFE


def tidy(b: Any, where: Callable[..., Any], xp: Any) -> tuple[Any, Any, Any, Any]:
    """Prepare rows (..., c, K) for sums of which parts are hidden.

    Return them, or None if they stay, with 0 for what is not finite; where that was; powers of two
    by which they were divided, along the last axis, if the rest is of different sizes: then what
    hides a number, a factor of 0, hides its size, too; and the rows of nothing but 0, (..., 1, c).
    """
    finite = xp.isfinite(b.hi) & (b.e < math.inf)
    if xp.all(finite):
        rows, spoilt = None, None
    else:
        rows, spoilt = where(finite, b, 0.0), xp.astype(~finite, xp.float64)
        b = rows
    if b.size == 0:
        return rows, spoilt, None, None
    most = xp.max(xp.abs(b.hi), axis=-2, keepdims=True)
    most = xp.where(most > TINY, most, TINY)
    if xp.max(most) <= _APART * xp.min(most):
        return rows, spoilt, None, None
    power = power_of_two(most * 2.0**-60, xp) * 2.0**60  # of numbers up to 2^1023
    nothing = xp.matrix_transpose(~xp.any(is_something(b), axis=-1, keepdims=True))
    return b.moved(lambda x: x / power), spoilt, power, nothing


def _powers(x: Any, xp: Any) -> Array:
    def make(x: Any) -> Array:
        return power_of_two(xp.max(xp.abs(x.hi), axis=-1, keepdims=True), xp)

    return of_each_row(x, "power", make)


def _slices_of(x: Any, levels: int, xp: Any) -> Slices:
    return Slices.of(x.pair, _powers(x, xp), bits_of_slices(x.shape[-1], levels), levels, xp)


def _left(x: Any, levels: int, xp: Any) -> Array:
    """Return the slices of rows, side by side."""
    return of_each_row(x, ("left", levels), lambda y: side_by_side(_slices_of(y, levels, xp), xp))


def _columns(x: Any, j: slice) -> Any:
    """Take a span of columns, once: it remembers its slices."""
    if j == slice(0, x.shape[-1]):
        return x
    if x.of[0] == "turned" and x.of[1].of[0] == "rows of":  # of all rows, where it is one of theirs
        _, every, rows = x.of[1].of
        span = slice(rows.start + j.start, rows.start + j.stop)
        if span in blocks(0, every.shape[-2], _SPAN):
            return _columns(x.space.matrix_transpose(every), span)
    return remembered(x, j.start, lambda: x[..., j])
