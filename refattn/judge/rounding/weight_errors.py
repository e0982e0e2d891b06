r"""Predict the error :math:`\delta_{ij}` of the log of a weight, from its score and exponential."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from ...arrays.library import Doubles
from .formats import Format
from .hardware import cut_error
from .head import SoftmaxHead, Tile
from .roundings import (
    MAXIMUM_KEYS,
    RMS,
    Roundings,
    is_power_of_two,
    sum_error,
    sum_running_products,
)

_KNOWN_WIDTH = 8  # coordinates between running sums of q . k that are known, if they matter
_GONE = -700.0  # difference to the largest score of weights that are 0 in any precision


def relative_variance(
    head: SoftmaxHead, roundings: Roundings, tile: Tile, i: slice, gap: Doubles
) -> Doubles:
    """Return the variance of delta, of the scores and of the exponential."""
    # Independent roundings: variances add up. What is rounded to a narrow type has known digits and
    # moves by h / sqrt(12); the digits of other numbers are unknown, and move by RMS units.
    unit, half = (RMS * roundings.accumulate.unit) ** 2, (RMS * roundings.softmax.unit) ** 2
    variance = cap_variance(head, roundings, tile, i)
    if head.bias is not None or tile.is_sink:  # which is multiplied by log2 e
        variance += _times_square(unit, tile.scores)
    # The difference to the maximum, that e^ is taken of.
    narrow = roundings.softmax.unit > roundings.accumulate.unit
    variance += (
        _times_square(1 / 12, roundings.softmax.spacing(gap))
        if narrow
        else _times_square(half, gap)
    )
    exponential = (roundings.exp * roundings.accumulate.unit / 2) ** 2
    # Where the gap is 0, e^0 is always the same: its error is slack, not noise.
    variance += np.multiply(gap < 0, exponential, dtype=gap.dtype)
    if head.softcap is not None:
        variance += _times_square(unit, tile.capped)
    if roundings.scores is not None:
        for number in _rounded_after_cap(head, tile):
            variance += _times_square(1 / 12, roundings.scores.spacing(number))
    if narrow:
        weight = np.exp(gap)
        step = roundings.softmax.spacing(weight) / np.where(weight > 0, weight, math.inf)
        # 1 is a number of every format, and what is rounded to 0 is off by itself, no more.
        variance += np.square(np.minimum(step, math.sqrt(12))) / 12 * (gap < 0)
    return np.asarray(variance)


def cap_variance(head: SoftmaxHead, roundings: Roundings, tile: Tile, i: slice) -> Doubles:
    r"""Return the variance of the capped score by errors of its tanh.

    They move the slope, too. For the capped score :math:`c\, \tau`, :math:`\tau = \tanh x`,

    .. math:: c^2 \operatorname{Var} \delta\tau
        = (1 - \tau^2)^2 \operatorname{Var} \delta(c x) + c^2 \sigma_\tau^2 .
    """
    unit = (RMS * roundings.accumulate.unit) ** 2
    variance = _sum_running_products(head, roundings, tile, i, unit * head.scale**2)
    variance += _times_square(unit * (1 if head.softcap is None else 2), tile.logits)  # by the cap
    if roundings.scores is not None:
        for number, factor in _rounded_before_cap(head, tile):
            variance += _times_square(factor**2 / 12, roundings.scores.spacing(number))
    if tile.is_sink or head.softcap is not None:
        variance *= np.square(tile.slope)
    if head.softcap is not None:
        variance += unit * np.square(tile.capped)  # of the tanh itself, after the slope
        if roundings.scores is not None:
            variance += (
                np.square(head.softcap * roundings.scores.spacing(np.asarray(tile.ratio))) / 12
            )
    return np.asarray(variance)


def _times_square(factor: float, x: Doubles) -> Doubles:
    """Multiply squares."""
    squares = np.square(x)
    squares *= factor
    return squares


def _rounded_before_cap(head: SoftmaxHead, tile: Tile) -> Iterator[tuple[Doubles, float]]:
    """List what is rounded before the cap, and the derivative of the logit to it."""
    if tile.is_sink:
        return
    if not is_power_of_two(head.scale):
        yield tile.products, head.scale
    yield tile.logits, 1.0
    if head.softcap is not None and not is_power_of_two(head.softcap):
        yield tile.logits / head.softcap, head.softcap


def _rounded_after_cap(head: SoftmaxHead, tile: Tile) -> Iterator[Doubles]:
    """List what is rounded after the tanh of the cap."""
    if tile.is_sink:
        return
    if head.softcap is not None and not is_power_of_two(head.softcap):
        yield tile.capped
    if head.bias is not None:
        yield tile.scores


def _sum_running_products(
    head: SoftmaxHead, roundings: Roundings, tile: Tile, i: slice, factor: float
) -> Doubles:
    """Sum the squares of the products in q . k, and of their running sums, times a factor."""
    (q, k), d = (head.q[i], head.k[tile.keys]), head.q.shape[-1]
    if not roundings.scores_matter:  # a cheap bound: no running sum is above |q| |k|, by Cauchy
        sizes, others = (np.einsum("ij,ij->i", x, x) for x in (q, k))
        return np.asarray(np.multiply.outer(d * factor * sizes, others))
    # Beside rounded scores or weights it is enough that the whole sum is known.
    width = _KNOWN_WIDTH if roundings.fine else d
    sums = sum_running_products(q, k, tile.products, width, roundings.lanes)
    sums *= factor
    return sums


def largest_error(
    head: SoftmaxHead, roundings: Roundings, tile: Tile, i: slice, gap: Doubles
) -> Doubles:
    """Bound |delta|: every rounding at its largest."""
    unit, half = roundings.accumulate.unit, roundings.softmax.unit
    bound = _logit_error(head, roundings, tile, i, gap)
    bound += (2 * unit) * np.abs(tile.scores)  # a bias is added, and log2 e multiplied
    if head.softcap is not None:
        bound += (6 * unit) * np.abs(tile.capped)
    if roundings.scores is not None:
        if head.softcap is not None:
            bound = bound + head.softcap * roundings.scores.spacing(np.asarray(tile.ratio)) / 2
        for number in _rounded_after_cap(head, tile):
            bound = _add_rounding(roundings.scores, bound, number, 1.0, gap)
    # Changes of a running maximum, each with an exponential.
    changes = head.k.shape[0] / MAXIMUM_KEYS
    bound *= 1 + 2 * half
    bound += (-2 * half) * gap
    bound += 3 * half + unit * roundings.exp + changes * (half * (roundings.exp + 1) + unit)
    return bound


def cap_error(
    head: SoftmaxHead, roundings: Roundings, tile: Tile, i: slice, gap: Doubles
) -> Doubles:
    r"""Bound the error of the slope :math:`1 - \tau^2` of the cap, :math:`\tau = \tanh x`.

    The derivative of its logarithm is :math:`2 |\tau| \le 2`, and the error :math:`\eta` of a tanh
    moves it by :math:`\eta (2 |\tau| + \eta)`:

    .. math:: |\delta(1 - \tau^2)| \le (1 - \tau^2) (e^{2 |\delta x|} - 1)
        + 2 \eta (1 + \eta) + 2 u .

    Kernels may take the tanh, or the capped score over the cap: :math:`\eta` has both.
    """
    if head.softcap is None or tile.is_sink:
        return np.zeros_like(tile.logits)
    unit = roundings.accumulate.unit
    moved = _logit_error(head, roundings, tile, i, gap) / head.softcap
    off = 6 * unit * np.abs(tile.ratio)
    if roundings.scores is not None:
        off = off + roundings.scores.spacing(np.asarray(tile.ratio)) / 2
        off = off + roundings.scores.spacing(tile.capped) / (2 * head.softcap)
    known = moved < 1
    bound = tile.slope * np.expm1(2 * np.where(known, moved, 0.0)) + 2 * off * (1 + off) + 2 * unit
    return np.where(known, np.minimum(bound, 1.0), 1.0)


def bound_products(
    roundings: Roundings, x: Doubles, y: Doubles, more: float, scale: float = 1.0
) -> Doubles:
    """Bound errors of products x . y, with so many roundings more, times a scale."""
    # Of the sizes of terms, whose sum is at most |x| |y|: Cauchy and Schwarz.
    terms = sum_error(roundings, x.shape[1], more) + cut_error(roundings.score_unit, x.shape[1])
    sizes, others = (np.sqrt(np.einsum("ij,ij->i", z, z)) for z in (x, y))
    bound: Doubles = np.multiply.outer(scale * terms * sizes, others)
    most = roundings.accumulate.largest
    if not np.max(sizes, initial=0.0) * np.max(others, initial=0.0) <= most:
        bound = np.where(np.multiply.outer(sizes, others) > most, math.inf, bound)
    return bound


def _logit_error(
    head: SoftmaxHead, roundings: Roundings, tile: Tile, i: slice, gap: Doubles
) -> Doubles:
    """Bound the error of the scores before the cap."""
    unit, d = roundings.accumulate.unit, head.q.shape[-1]
    # Half a spacing of subnormal numbers for each product that underflows.
    least = d * 2.0 ** (roundings.accumulate.least - roundings.accumulate.digits)
    bound = bound_products(roundings, head.q[i], head.k[tile.keys], 1, abs(head.scale))
    bound += abs(head.scale) * least
    bound += (2 * unit) * np.abs(tile.logits)
    if roundings.scores is not None:
        for number, factor in _rounded_before_cap(head, tile):
            bound = _add_rounding(roundings.scores, bound, number, factor, gap)
    return bound


def _add_rounding(
    to: Format, error: Doubles, number: Doubles, factor: float, gap: Doubles
) -> Doubles:
    """Add the rounding of a number to a bound, whose derivative to it is the factor."""
    reach = error / abs(factor)  # with the errors before
    reach += np.abs(number)
    bound = to.spacing(reach)
    bound *= abs(factor) / 2
    bound += error
    if np.max(reach, initial=0.0) <= to.largest:
        return bound
    # What overflows to -inf is a weight of 0, and right where the weight is 0 anyway.
    beyond = (reach > to.largest) & ((number > 0) | (gap > _GONE))
    return np.where(beyond, math.inf, bound)
