"""Compute weights and derivatives to scores of some queries and keys, with their errors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ...arrays.library import Doubles
from .formats import Format
from .head import SoftmaxHead, Tile, scan_tile
from .roundings import RMS, WORST, Roundings, is_power_of_two
from .saved import (
    BLOCK_QUERIES,
    BackwardHead,
    Saved,
    move_weights,
    multiply_slope,
    multiply_values,
    share_tile,
    take_gaps,
)
from .shares import find_log_errors
from .weight_errors import cap_error, cap_variance

_MUCH = 2.0**8  # times the unit of sums


class PairErrors(NamedTuple):
    """Queries and keys, (queries, keys) each."""

    p: Doubles  # weights
    t: Doubles  # products of g and v
    s: Doubles  # derivatives to the scores before the cap
    slope: Doubles | float  # of the cap
    bent: Doubles | float  # what p times the slope changes by with the capped score, over p
    p_scale: Doubles  # what a change of the logarithm of the scale makes of p, by the scores
    s_scale: Doubles  # and of s
    log_variance: Doubles  # relative variance of a weight before it is rounded
    cap_variance: Doubles | None  # the part of it that bends the slope of a cap, if there is one
    p_variance: Doubles  # of the roundings of each
    t_variance: Doubles
    s_variance: Doubles
    near_p: Doubles  # as roundings to nearest make them
    near_s: Doubles
    p_bound: Doubles  # what errors do not exceed
    s_bound: Doubles
    p_flushed: Doubles  # what is lost where numbers below the smallest normal one are flushed to 0
    s_flushed: Doubles  # the same, and what errors of slopes may have in common

    def moves(self) -> Iterator[tuple[Doubles, Doubles | float]]:
        """List variances of weights before they are rounded, and what moves in place of slopes."""
        size = self.p * self.p
        if self.cap_variance is None:
            yield size * self.log_variance, self.slope
        else:
            yield size * (self.log_variance - self.cap_variance), self.slope
            yield size * self.cap_variance, self.bent

    def with_known_digits(self, roundings: Roundings) -> PairErrors:
        """Divide variances by what the least favourable digits add where digits are known.

        Those are of numbers that are rounded to a type which is much narrower than that of sums:
        the exact numbers are known far better than their spacings.
        """

        def by(to: Format | None) -> float:
            known = to is not None and to.unit > _MUCH * roundings.accumulate.unit
            return WORST**-2 if known else 1.0

        of_scores, cap = by(roundings.scores), self.cap_variance
        return self._replace(
            log_variance=of_scores * self.log_variance,
            cap_variance=None if cap is None else of_scores * cap,
            p_variance=by(roundings.weights) * self.p_variance,
            t_variance=by(roundings.d_weights) * self.t_variance,
            s_variance=by(roundings.d_scores) * self.s_variance,
        )


def scaled_spacing(to: Format, x: Doubles, scale: float) -> Doubles:
    """Return the distance of numbers near x that is rounded after a multiplication."""
    if scale == 0:
        return np.zeros_like(x)
    return to.spacing(x) if abs(scale) == 1 else to.spacing(scale * x) / abs(scale)


def round_scaled(to: Format, x: Doubles, scale: float) -> Doubles:
    """Round to nearest after a multiplication, which is undone."""
    if scale in (0, 1):
        return to.round(x) if scale else x
    return to.round(scale * x) / scale


_NONE = np.zeros((1, 1))  # what is not asked for


def _round_to_one(tile: Tile, to: Format, top: Doubles) -> Doubles:
    """Return how far weights move that are 1 after rounding, over a maximum that may have run.

    Their errors are what they lack of 1, of all keys and queries alike: no noise.
    """
    lacking = top[:, None] - tile.scores
    return np.where((lacking > 0) & (lacking < to.unit), lacking, 0.0)


def analyse_pairs(
    back: BackwardHead, saved: Saved, roundings: Roundings, i: slice, j: slice, of: str = ""
) -> PairErrors | None:
    """Analyse some queries and keys; None if no query sees one.

    For one gradient less is asked for: no derivatives to scores for dv, and roundings of weights
    only for this or where they are kept.
    """
    head = back.head
    tile = scan_tile(head, i, j)
    if tile is None:
        return None
    # Weights: exact, how far errors of their logs may move them, and rounded to nearest.
    p, logs = share_tile(tile, saved.lse[i])
    finite = take_gaps(tile, roundings, logs, saved.top[i])
    relative, epsilon = find_log_errors(head, saved.single, roundings, tile, i, finite)
    unit = roundings.accumulate.unit
    epsilon = epsilon + saved.lse_bound[i, None]
    p_bound = move_weights(p, logs, epsilon)
    nearest = saved.weights[i.start // BLOCK_QUERIES].part(i)
    raw = nearest.weights(tile, rounded=False) if nearest.moved else p
    near_p, p_variance, rounded_bound = raw, _NONE, p_bound
    if roundings.weights is not None and (roundings.kept or of in ("", "dv")):
        if roundings.maximum:  # weights over any maximum so far: the widest spacing is 2 u p
            near_p, p_variance = nearest.weights(tile), 2 * roundings.weights.unit * p
        else:
            near_p, p_variance = roundings.weights.round(raw), roundings.weights.spacing(p)
        p_variance *= p_variance
        p_variance /= 12
        rounded_bound = p + p_bound
        rounded_bound *= roundings.weights.unit
        rounded_bound += p_bound
        rounded_bound += roundings.weights.spacing(0.0)
    tiny, least = roundings.accumulate.tiny, np.min(p, initial=1.0)
    hidden = None if least > 0 else p == 0
    if hidden is not None:
        p_variance, near_p = (np.where(hidden, 0.0, x) for x in (p_variance, near_p))
    p_flushed = p_lost = _NONE if least >= tiny else p * (p < tiny)
    if roundings.maximum and roundings.weights is not None and of in ("", "dv"):
        p_lost = p_flushed + p * _round_to_one(tile, roundings.weights, saved.top[i])
    # d p / d log scale = p (s' - sum_j p s'), with s' = d s / d log scale.
    risen = multiply_slope(tile.logits, tile.slope)
    p_scale = p * (risen - saved.logit[i, None])
    if of == "dv":
        weights = p, _NONE, _NONE, tile.slope, tile.slope, p_scale, _NONE, relative, None
        bounds = rounded_bound + p_lost, _NONE, p_lost, _NONE
        return PairErrors(*weights, p_variance, _NONE, _NONE, near_p, _NONE, *bounds)
    t, t_variance, t_bound = multiply_values(back, roundings, i, j)
    apart = t - saved.delta[i, None]
    s = p * apart
    used_bound = rounded_bound if roundings.kept else p_bound
    near_t = t if roundings.d_weights is None else roundings.d_weights.round(t)
    near_s = (near_p if roundings.kept else raw) * (near_t - saved.near_delta[i, None])
    off = t_bound + np.abs(saved.delta_bound[i, None])
    distance, size = np.abs(apart), np.abs(s)
    # |p' d' - p d| <= p' |d' - d| + |p' - p| |d| for the product of a weight and d = t - D.
    s_bound = p + used_bound
    s_bound *= off
    s_bound += used_bound * distance
    s_bound *= 1 + 8 * unit
    s_bound += (8 * unit) * size
    # Of the product, and of the difference: where it cancels, nothing else is left.
    s_variance = np.square(t)
    s_variance += np.square(saved.delta[i, None])
    for _ in range(2):
        s_variance *= p
    s_variance *= (RMS * unit) ** 2
    gradient = _ScoreGradient(s, near_s, s_variance, s_bound)
    to, (before, after) = roundings.d_scores, _list_factors(head, roundings)
    if to is not None:
        for by in before:
            gradient = gradient.rounded(to, by)
    if head.softcap is not None:
        most = cap_error(head, roundings, tile, i, finite)
        gradient = gradient.times(tile, nearest.slope(tile), most, unit)
    if to is not None:
        for by in after:
            gradient = gradient.rounded(to, by)
        if roundings.stepwise and is_power_of_two(head.scale):
            gradient = gradient.shrunk(to, abs(head.scale))
    if roundings.maximum:
        residuals = saved.residuals[i.start // BLOCK_QUERIES]
        assert residuals is not None
        left, most_left = residuals.part(i, j)
        # Twice what has a part in them, of which the rest of the law has one or, with D of the
        # output, all.
        left += (RMS * unit) ** 2 * p * p * (np.square(t) + np.square(saved.delta[i, None]))
        left += (1 if roundings.delta_of_out else 2) * p * p * t_variance
        gradient = gradient._replace(
            variance=gradient.variance + multiply_slope(left, np.square(tile.slope)),
            bound=gradient.bound + multiply_slope(most_left, tile.slope),
        )
    s = gradient.s
    size = np.abs(s)
    s_flushed = size * (size < tiny)
    s_flushed += (2 * back.d_out.shape[-1] * tiny) * p
    if p_flushed.any():
        s_flushed += p_flushed * distance
    if to is not None and to.truncated:
        # What is dropped is half a spacing on average, or less: a difference has few digits where
        # it cancels, and a weight may be a power of two.
        digits = roundings.accumulate.spacing(np.maximum(np.abs(t), np.abs(saved.delta[i, None])))
        s_flushed += np.minimum(to.spacing(size), p * digits) / 2
    if head.softcap is not None:
        # A tanh that is 1, its errors of one sign, and its square, which rounds down: u in common.
        s_flushed += unit * p * distance * np.square(tile.ratio)
    # An error of a capped score moves the slope 1 - tau^2, too: by -2 tau / cap.
    turned = 0.0 if head.softcap is None else 2 * tile.ratio / head.softcap
    s_scale = p_scale * apart
    s_scale -= p * saved.moved_logit[i, None]
    s_scale = multiply_slope(s_scale, tile.slope)
    if head.softcap is not None:
        s_scale -= p * apart * turned * risen
    variance, near_s = gradient.variance, gradient.near
    if hidden is not None:
        numbers = t_variance, variance, near_s
        t_variance, variance, near_s = (np.where(hidden, 0.0, x) for x in numbers)
    return PairErrors(
        p,
        t,
        s,
        tile.slope,
        tile.slope - turned,
        p_scale,
        s_scale,
        relative,
        None if head.softcap is None else cap_variance(head, roundings, tile, i),
        p_variance,
        t_variance,
        variance,
        near_p,
        near_s,
        rounded_bound + p_lost,
        gradient.bound + s_flushed,
        p_lost,
        s_flushed,
    )


class _ScoreGradient(NamedTuple):
    """Derivatives to scores: exact, as roundings to nearest make them, variance and bound."""

    s: Doubles
    near: Doubles
    variance: Doubles
    bound: Doubles

    def rounded(self, to: Format, by: float) -> _ScoreGradient:
        """Round after a multiplication, which is undone."""
        most = np.abs(self.s) + self.bound
        variance = np.square(scaled_spacing(to, self.s, by))
        variance /= 12
        variance *= self.s != 0
        bound = self.bound + scaled_spacing(to, most, by) / (1 if to.truncated else 2)
        if not abs(by) * np.max(most, initial=0.0) <= to.largest:
            bound = np.where(abs(by) * most > to.largest, math.inf, bound)
        return _ScoreGradient(
            self.s, round_scaled(to, self.near, by), self.variance + variance, bound
        )

    def shrunk(self, to: Format, by: float) -> _ScoreGradient:
        """Round once more, after a multiplication by a power of two, what is below 2^least."""
        size = by * np.abs(self.s)
        small, may_be_small = size < to.tiny, size - by * self.bound < to.tiny
        if by >= 1 or not may_be_small.any():
            return self
        of, again = (small, small, small, may_be_small), self.rounded(to, by)
        return _ScoreGradient(*map(np.where, of, again, self))

    def times(
        self, tile: Tile, near: Doubles | float, most: Doubles, unit: float
    ) -> _ScoreGradient:
        """Multiply by the slope of the cap, with its value to nearest and its largest error."""
        slope, ratio = tile.slope, np.square(tile.ratio)
        rounding = (RMS * unit) ** 2 * (9 * np.square(ratio) + 2 * np.square(slope))
        variance = self.variance * np.square(slope) + np.square(self.s) * rounding
        bound = (self.bound * (slope + most) + np.abs(self.s) * most) * (1 + 4 * unit)
        bound = np.where(self.bound < math.inf, bound + 4 * unit * np.abs(self.s * slope), math.inf)
        return _ScoreGradient(self.s * slope, self.near * near, variance, bound)


def _list_factors(head: SoftmaxHead, roundings: Roundings) -> tuple[list[float], list[float]]:
    """List factors of derivatives to scores when they are rounded, before the slope and after.

    Once, before a product with queries or keys. Step by step, arrays are multiplied by the cap, the
    slope, and the scale, and divided by the cap.
    """
    cap = head.softcap
    if not roundings.stepwise:
        by = [head.scale if roundings.scaled else 1.0]
        return ([], by) if cap is not None else (by, [])
    after = [] if is_power_of_two(head.scale) else [head.scale]
    if cap is None:
        return [1.0], after
    if is_power_of_two(cap):
        return [1.0], [1.0, *after]
    return [1.0, cap], [cap, 1.0, *after]
