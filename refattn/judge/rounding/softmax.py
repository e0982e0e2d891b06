r"""Predict the rounding errors of softmax attention for some queries of a head, and bound them.

A kernel multiplies each weight :math:`e_{ij}` by :math:`e^{\delta_{ij}}`, with the errors of the
score and of the exponential, and adds :math:`\eta_{ij}` where it rounds the weight to a narrow
type before the second product. With :math:`p_{ij} = e_{ij} / \sum_j e_{ij}`, to first order,

.. math:: \delta \mathrm{out}_{ic} = \sum_j p_{ij} \, \delta_{ij} (v_{jc} - \mathrm{out}_{ic})
    + \sum_j \eta_{ij} v_{jc} + \text{sums} + \text{the rounding of the result}.

A sink is one more key, that every query sees and whose value is 0: it has part in the sum and in
the maximum, and its score is a number that the kernel was given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from ...arrays.blocks import blocks
from ...arrays.library import Doubles
from ...numbers.doubled import Pair
from .hardware import SLACK, CutSum, allow, cut_error, split_error
from .head import (
    TILE_KEYS,
    NearestWeights,
    ScoredRows,
    SoftmaxHead,
    Tile,
    attend_rows,
    certify_rows,
    count_tile_keys,
    finite_logs,
    scan_tiles,
)
from .roundings import (
    CONSTANTS,
    MAXIMUM_KEYS,
    RMS,
    SURE,
    WORST,
    Roundings,
    RowErrors,
    expect_loss,
    round_bound,
    running_squares,
    sum_error,
    walk,
)
from .shares import (
    FLUSHED,
    LEAST_SHARE,
    OFF,
    CommonErrors,
    TileShares,
    TileValues,
    WeighedTile,
    bound_flushed,
    in_single,
    sum_largest,
    take_single,
    weigh_tile,
)
from .ties import Ties, find_ties
from .weight_errors import largest_error, relative_variance

_DOUBLE = 2.0**-53  # unit of float64, in which results are computed here
_TIED_UNITS = 4  # units: weights nearer than that to each other, or to 1, are rounded together
_ALIKE = 16  # roundings that may be the same before they are taken for tied


def analyse_softmax(
    head: SoftmaxHead,
    roundings: Roundings,
    i: slice,
    changes: Mapping[str, Callable[[SoftmaxHead, Tile, slice], Any]] = MappingProxyType({}),
    exact: ScoredRows | None = None,
    may_be_single: bool = True,
) -> RowErrors:
    """Say what a kernel that rounds like this may give for the queries i, and what is exact."""
    exact = exact or attend_rows(head, i, None)
    rounded = NearestWeights(head, roundings, i, exact)
    rows, d_v = exact.out.shape
    sums = ErrorSums(rows, d_v, head.k.shape[0], roundings)
    sums.ties = find_ties(head, i)
    top, log = sums.share(exact)
    if may_be_single:
        sums.single = take_single(head, roundings, i, sums.whole)
    steep = {name: np.zeros((rows, d_v + 1)) for name in changes}
    nearest, lost = np.zeros((2, rows, d_v))
    level = np.zeros((rows, d_v + 1))  # weights that may be the largest, times |v| and 1
    cuts = None if roundings.unit is None else CutSum(roundings.unit, rows, d_v)
    for tile in scan_tiles(head, i, count_tile_keys(rows)):
        v = head.v[tile.keys]
        of = TileShares.of(tile, top, roundings.find_lagging(sums.whole))
        if rounded.of_largest:  # the same weights, rounded
            assert roundings.weights is not None
            of = of.rounded(roundings.weights)
            nearest += of.near @ v
        else:
            nearest += rounded.weights(tile) @ v
        part = sums.add(roundings, head, tile, i, of)
        if roundings.weights is not None and roundings.weights.truncated:
            # Dropped digits have one sign: their mean moves the result, and is no noise.
            weights = of.over(sums.whole).shares if roundings.normalised else of.weights
            lost += expect_loss(roundings.weights, weights) @ v
            level += sum_largest(of, 2 * largest_error(head, roundings, tile, i, of.gap), v)
        if cuts is not None:
            # What a unit cuts depends on the digits of the very numbers that it multiplies.
            stored = rounded.stored(tile) if of.near is None else of.near
            for j in _list_runs(of, len(v)):
                cuts.add(stored[:, j], v[j])
        for name, change in changes.items():
            # d out / d theta = sum_j p_j s'_j (v_j - out), with s' = d s / d theta; out is last.
            moved = part.of.shares * change(part.head, part.tile, i)
            steep[name][:, :-1] += part.values.scaled(moved @ part.values.v)
            steep[name][:, -1] += np.sum(moved, -1)
    if sums.is_doubtful(roundings):  # sums in float32 do not tell whether roundings are tied
        return analyse_softmax(head, roundings, i, changes, exact, may_be_single=False)
    if rounded.of_largest:
        nearest /= rounded.total
    variance, least_favourable, bound = sums.bound_result(head, roundings, exact.out)
    # Truncated sums: the accumulator is cut before it is divided by the normaliser. The shift is
    # expected, and subtracted from errors; tests allow for a share of it (`SLACK`).
    shift: Doubles | float = 0.0
    if cuts is not None:
        shift, noise = cuts.shift / rounded.divisor, cuts.variance / rounded.divisor**2
        variance, least_favourable = variance + noise, least_favourable + noise
        nearest, bound = nearest + shift, bound + np.abs(shift)
    rest = -lost / rounded.divisor
    slack = allow(roundings.unit, shift) + SLACK * np.abs(rest)  # a running maximum loses nothing
    # Of several that are 1 all but one may be just below it, and lose a whole step if truncated.
    step = sums.whole * (0.0 if roundings.weights is None else roundings.weights.unit / 2)
    slack = slack + np.where(level[:, -1:] > 1, step * level[:, :-1], 0.0)
    # Weights e^(s - lse): an error of lse multiplies all weights of a row, and so its output.
    if roundings.of_log:
        relative = roundings.accumulate.unit * size_of_log(exact.lse, head.k.shape[0])[:, None]
        of_log = relative * np.abs(exact.out)  # the same for all columns: slack, too
        variance, least_favourable = (x + (RMS * of_log) ** 2 for x in (variance, least_favourable))
        slack, bound = slack + of_log, bound + np.expm1(4 * relative) * (np.abs(exact.out) + bound)
    std, worst = np.sqrt(variance), np.sqrt(least_favourable)
    tangents = {name: x[:, :-1] - x[:, -1:] * exact.out for name, x in steep.items()}
    # Independent roundings seldom add up to so much. Where those to nearest do, they are tied, and
    # where weights are, too: no standard deviation is claimed there, and only the bound remains.
    loose = np.abs(nearest - exact.out - shift - rest) > SURE * std
    loose |= sums.tied(roundings)[:, None] | sums.lost(roundings)
    spacing = np.zeros_like(exact.out)
    if roundings.out is not None:  # last: independent for each element, h^2 / 12
        spacing = roundings.out.spacing(exact.out)
        rounding = np.square(spacing) / 12
        std, worst = np.sqrt(variance + rounding), np.sqrt(least_favourable + rounding)
        bound = round_bound(roundings.out, exact.out, bound)
        nearest = roundings.out.round(nearest)
    free = ~loose & (std > 0)
    std, worst = (np.where(free, x, math.inf) for x in (std, worst))
    lse_std, lse_bound = sums.bound_lse(head, roundings, exact.lse)
    # What all elements may have in common is no noise: constants such as scale * log2 e, that were
    # rounded once, move scores along their scale; so does what a split product loses.
    drift = CONSTANTS * np.abs(steep.get("scale", np.zeros((rows, d_v + 1))))
    unit = roundings.accumulate.unit
    of_weights = unit * roundings.exp * sums.common.of_result(sums.sizes, exact.out)
    if "scale" in tangents:
        constants = CONSTANTS * unit + split_error(roundings.score_unit)
        slack = slack + constants * np.abs(tangents["scale"])
    flushed = sums.flushed[:, :-1] + sums.flushed[:, -1:] * np.abs(exact.out)
    # The sums of weights and of their products with values lose the same keys.
    of_weights = of_weights + flushed
    slack = slack + of_weights + np.abs(sums.absorbed[:, :-1] - sums.absorbed[:, -1:] * exact.out)
    lse_slack = unit * (sums.common.of_sum(roundings) + drift[:, -1] + 2 * np.abs(log[:, 0]))
    # Beside a kernel in float64, float64 is no reference: results in pairs are.
    out, lse = Pair(exact.out, 0.0), Pair(exact.lse, 0.0)
    if roundings.accumulate.unit <= _DOUBLE:
        out, lse, *_ = certify_rows(head, i)
        nearest = out.hi if roundings.out is None else roundings.out.round(out.hi)
    return RowErrors(
        out.hi,
        lse.hi,
        exact.top,
        nearest,
        std,
        worst,
        bound,
        lse_std,
        lse_bound,
        lse_slack + sums.absorbed[:, -1],
        spacing,
        slack,
        tangents,
        rest=out.lo + rest,
        lse_rest=lse.lo,
        shift=shift,
        normaliser=sums.sum_variance(roundings),
        of_weights=of_weights,
    )


def begin_bound(
    head: SoftmaxHead, roundings: Roundings, i: slice, exact: ScoredRows
) -> ErrorSums | None:
    """Begin sums for the bound of `analyse_softmax` alone; None if it has parts of another kind."""
    if roundings.unit is not None or roundings.accumulate.unit <= _DOUBLE:
        return None  # what is cut depends on the rounded weights
    rows, d_v = exact.out.shape
    sums = ErrorSums(rows, d_v, head.k.shape[0], roundings)
    sums.share(exact)
    sums.single = take_single(head, roundings, i, sums.whole)
    return sums


class ErrorSums:
    """Sums over the keys that the variance and the bound are made of."""

    single: SoftmaxHead | None = None  # the head in float32, if that is enough
    ties: Ties | None = None  # what equal keys have in common

    def __init__(self, rows: int, d_v: int, m: int, roundings: Roundings) -> None:
        self.scores = np.zeros((rows, 2 * d_v + 1))  # p^2 var(delta) times v^2, v and 1
        self.weights = np.zeros((rows, d_v))  # var(eta) v^2
        self.wider = np.zeros((rows, d_v))  # how much more at the least favourable digits
        self.near = np.zeros((rows, 4))  # p^2 times 1, gap and gap^2, and p^4
        self.keys = 0
        self.together = self.alone = 0.0  # squares of roundings, summed over rows first or not
        self.lattice = False
        # Squares of p v, and of running sums of p v and p, as far as these may round.
        self.running, self.run, self.runs = np.zeros((3, rows, d_v + 1))
        self.low, self.high = np.zeros((2, rows, d_v + 1))  # of all sums so far, if terms are equal
        self.steps, self.usual = 0, RMS * roundings.accumulate.unit  # error of a sum, over it
        self.absorbed = np.zeros((rows, d_v + 1))  # p v and p too small to change their sums
        self.relative = np.zeros(rows)  # p^2 var(delta)
        self.moved = np.zeros((rows, d_v))  # the largest errors of p, and of their sum, times |v|
        self.shift = np.zeros((rows, 1))  # p (e^epsilon - 1)
        self.least = np.zeros((rows, 1))  # the sum of the weights, at least
        self.whole = np.full((rows, 1), 1e-300)  # the share of a weight of 1
        self.flushed = np.zeros((rows, d_v + 1))  # half the last spacing times |v| and 1
        self.sizes = np.zeros((rows, d_v))  # p |v|
        self.common = CommonErrors(rows, d_v)
        self.rounded = np.zeros(d_v)  # |v| of tiles in which all weights are rounded
        # With changes of a running maximum.
        self.gamma = sum_error(roundings, m, 2 + 2 * m / MAXIMUM_KEYS)

    def share(self, exact: ScoredRows) -> list[Doubles]:
        """Find the share of a weight of 1; return the largest scores and the log normalisers."""
        top, log = finite_logs(exact)
        # Not 0 for a query that sees no key: it divides.
        self.whole = np.where(np.isfinite(exact.top)[:, None], np.exp(top - log), 1e-300)
        return [top, log]

    def add(
        self, roundings: Roundings, head: SoftmaxHead, tile: Tile, i: slice, of: TileShares
    ) -> WeighedTile:
        """Add the keys of a tile; return what is added."""
        ties = None if self.ties is None else self.ties.take(tile.keys)
        if roundings.weights is not None and not roundings.normalised and self.keys == 0:
            # Scores of small integers are a lattice: equal weights, and equal roundings.
            seen = (of.weights > roundings.weights.spacing(0.0)) & (of.gap < 0)
            new = True if ties is None else ties.new  # of equal keys the first
            some = np.flatnonzero(seen.any(0) & new)[:TILE_KEYS]
            self.lattice = _has_few_values(of.gap[:, some][seen[:, some]])
        part = self.add_bound(roundings, head, tile, i, of)
        head, tile, of, values = part
        size = of.shares * of.shares
        noise = relative_variance(head, roundings, tile, i, of.gap)
        noise *= size
        if ties is not None:
            noise *= ties.weights
        self.relative += np.sum(noise, -1)
        if roundings.scores_matter:  # about v - out, which is known only when all keys were added
            columns = np.concatenate([values.squares, values.v], -1)
            self.scores += noise @ _add_ones(columns)
            for j in _list_runs(of, len(values.v)):
                alike = None if ties is None else ties.take(j).count_alike(values.v.shape[1])
                self._run(roundings, of.shares[:, j], size[:, j], values.v[j], alike)
        if roundings.weights is not None:
            variance = self._weights(roundings, of, size, values, ties)
            if not roundings.scores_matter:  # a trifle: about v is enough
                variance += noise
            values.sum_squares(variance, self.weights)
        else:
            self._spread(of.keep_rounded(size), of.gap)
        self.keys += len(values.v)
        return part

    def add_bound(
        self, roundings: Roundings, head: SoftmaxHead, tile: Tile, i: slice, of: TileShares
    ) -> WeighedTile:
        """Add what bounds are made of."""
        part = weigh_tile(head, self.single, tile, of, self.whole)
        head, tile, of, values = part
        most = largest_error(head, roundings, tile, i, of.gap)
        self._move(roundings, of, values, *of.move(self.whole, most))
        self.common.add(roundings, of, values)
        return part

    def add_shares(
        self, roundings: Roundings, v: Doubles, of: TileShares, epsilon: Doubles
    ) -> None:
        """Add what the bound of the result alone is made of, where bounds of logs are known."""
        if self.single is not None and epsilon.dtype == np.float32 and of.least > LEAST_SHARE:
            of = in_single(of)
        self._move(roundings, of, TileValues.of(v, of.shares), *of.move(1.0, epsilon))

    def _move(
        self,
        roundings: Roundings,
        of: TileShares,
        values: TileValues,
        most: Doubles,
        least: Doubles,
    ) -> None:
        """Add shares that move so far at most."""
        self.least += least * (1 - values.off)
        self.shift += np.sum(most, -1, keepdims=True) * (1 + values.off)
        whole, moved = of.shares @ values.sizes, most @ values.sizes
        self.sizes += values.scaled(whole)
        if roundings.weights is not None:
            moved += self._round_shares(roundings, of, most, values, whole + moved)
        self.moved += values.scaled(moved, 1 + values.off)

    def _smallest(self, roundings: Roundings) -> Doubles | float:
        """Return half the distance of the smallest numbers, of shares."""
        assert roundings.weights is not None
        smallest = roundings.weights.unit * roundings.weights.tiny
        return smallest if roundings.normalised else smallest * self.whole  # whose largest is not 1

    def _round_shares(
        self,
        roundings: Roundings,
        of: TileShares,
        most: Doubles,
        values: TileValues,
        moved: Doubles,
    ) -> Doubles:
        """Return how far rounding moves sums at most: of shares with their errors.

        The maximum may be any that was before.
        """
        assert roundings.weights is not None
        # Every weight is rounded: by u of itself, and half the last spacing, which is added later.
        if of.hidden is None and np.max(self.whole, initial=0.0) < 1:
            self.rounded += values.scaled(np.sum(values.sizes, 0))
            moved *= roundings.weights.unit
            return moved
        smallest = self._smallest(roundings)
        rounding = roundings.weights.unit * (of.shares + most) + smallest
        rounding[of.shares >= 1] = 0.0  # the only key
        if of.hidden is not None:
            rounding[of.hidden] = 0.0
        return np.asarray(rounding @ values.sizes)

    def _run(
        self,
        roundings: Roundings,
        shares: Doubles,
        size: Doubles,
        v: Doubles,
        alike: Doubles | None,
    ) -> None:
        """Add some keys to the running sums, of values and of ones; so many terms are alike.

        No sum moves by more than what is added to it: what is below its last digit is lost.
        """
        columns = _add_ones(v)
        last, terms = self.run + shares @ columns, size @ np.square(columns)
        walked = walk(self.run, last, terms, len(v), roundings.lanes)
        self.running += np.minimum(walked, terms / self.usual**2)
        self.running[:, :-1] += terms[:, :-1]  # the products with values
        if alike is not None:  # terms of which all are rounded alike, in runs that begin anywhere
            whole = self.runs + last
            self.low, self.high = np.minimum(self.low, whole), np.maximum(self.high, whole)
            largest = np.square((self.high - self.low) / roundings.lanes)
            self.running += (alike - 1) * (len(v) * largest + terms)
        small = np.where(shares < roundings.accumulate.unit * last[:, -1:], shares, 0.0)
        if small.any():
            self.absorbed += small @ columns
        self.run, self.steps = last, self.steps + len(v)
        if self.steps >= roundings.run:
            self.close()

    def _weights(
        self,
        roundings: Roundings,
        of: TileShares,
        size: Doubles,
        values: TileValues,
        ties: Ties | None,
    ) -> Doubles:
        """Return the variance of rounding the weights: over their sum, or over the largest, 1.

        A running maximum may be another than the last when a weight is rounded, and digits, too.
        """
        to, weights, shares = roundings.weights, of.weights, of.shares
        assert to is not None
        if roundings.normalised:
            narrow = to.spacing(shares).astype(shares.dtype, copy=False)
            narrow *= narrow
            narrow /= 12
            if ties is not None:
                narrow *= ties.weights
            return narrow if of.positive else np.where(shares > 0, narrow, 0.0)
        narrow = np.square(to.spacing(weights) if of.step is None else of.step)
        narrow *= (np.square(self.whole) / 12).astype(narrow.dtype, copy=False)
        narrow, size = of.keep_rounded(narrow, WORST**-2), of.keep_rounded(size)
        # Over any maximum h is 2 u p at the widest, and h^2 / 12 is u^2 p^2 / 3.
        widest = size * (4.0**-to.digits / 3)
        last = to.spacing(0.0)
        if of.least < to.tiny:
            np.maximum(widest, narrow, out=widest)
        widest -= narrow
        if ties is not None:
            widest *= ties.weights
            narrow *= ties.weights
        values.sum_squares(widest, self.wider)
        if of.least < FLUSHED * last:  # many become 0 or the last number: half of it, as slack
            flushed = of.keep_rounded(bound_flushed(weights, last) * self.whole)
            self.flushed[:, :-1] += values.scaled(flushed @ values.sizes)
            self.flushed[:, -1] += np.sum(flushed, -1)
        self._tie(roundings, of)
        self._spread(size * (of.gap < 0), of.gap)
        return narrow

    def _tie(self, roundings: Roundings, of: TileShares) -> None:
        """Add what tells whether weights are rounded alike."""
        to, weights = roundings.weights, of.weights
        assert to is not None
        # Roundings r_ij of queries i: sum_j (sum_i r_ij)^2 is near sum_ij r_ij^2 if queries differ,
        # and larger by the number of queries that are rounded alike.
        residual = to.round(weights) - weights if of.moved is None else of.moved
        if to.truncated:  # about their mean
            residual += of.keep_rounded(to.spacing(weights) / 2)
        self.together += np.sum(np.square(self.whole.T.astype(residual.dtype) @ residual))
        alone = np.einsum("ij,ij->i", residual, residual)
        self.alone += np.vdot(alone, np.square(self.whole))

    def _spread(self, size: Doubles, gap: Doubles) -> None:
        """Add how far weights are from each other and from the largest."""
        moved = size * gap
        sums = ((moved, gap), (size, size))
        second, fourth = (np.einsum("ij,ij->i", x, y) for x, y in sums)
        self.near += np.stack([np.sum(size, -1), np.sum(moved, -1), second, fourth], -1)

    def lost(self, roundings: Roundings) -> npt.NDArray[np.bool_]:
        """Tell whether products are as small as the smallest numbers of the sums."""
        smallest = roundings.accumulate.spacing(0.0) * (1.0 if roundings.normalised else self.whole)
        small: npt.NDArray[np.bool_] = self.sizes < 8 * max(self.keys, 1) * smallest
        return small & (self.sizes > 0)

    def tied(self, roundings: Roundings) -> npt.NDArray[np.bool_]:
        """Tell whether weights are rounded alike, or their sums.

        They are where they are near to each other or to the largest, where they take few values, or
        where queries are nearly the same.
        """
        square, distance = self._measure_spread()
        unit = (
            roundings.weights or roundings.accumulate
        ).unit  # of sums, where weights are as they are
        limit = (_TIED_UNITS * unit) ** 2
        near: npt.NDArray[np.bool_] = (square < limit) | (distance < limit)
        return near | (self.together > _ALIKE * self.alone) | self.lattice

    def is_doubtful(self, roundings: Roundings) -> bool:
        """Tell whether float64 is needed to say which weights are near to each other."""
        if self.single is None or roundings.weights is None or roundings.normalised:
            return False
        square, distance = self._measure_spread()
        limit = (2 * _TIED_UNITS * roundings.weights.unit) ** 2
        return bool(np.any(np.minimum(square, distance - OFF * square) < limit))

    def _measure_spread(self) -> tuple[Doubles, Doubles]:
        """Return mean squares of distances to the largest, and to each other where many are."""
        zeroth, first, second, fourth = self.near.T
        total = np.where(zeroth > 0, zeroth, 1.0)
        square, mean = second / total, first / total
        # (sum p^2)^2 / sum p^4 is how many weights the sum has, of those that matter.
        many = zeroth * zeroth > 8 * fourth
        distance = np.where(many, square - mean * mean, math.inf)
        return np.where(zeroth > 0, square, math.inf), distance

    def close(self) -> None:
        """End a run of the sum over the keys: it is added to those before."""
        self.runs += self.run
        self.running += np.minimum(np.square(self.runs), np.square(self.run / self.usual))
        self.run, self.steps = np.zeros_like(self.run), 0

    def sum_variance(self, roundings: Roundings) -> Doubles:
        """Return the variance of the sum of the weights, of which the roundings move whole rows."""
        steps = self.running[:, -1]
        if not roundings.scores_matter:  # equal weights, whose partial sums rise along lines
            steps = np.full_like(steps, running_squares(roundings, self.keys))
            steps = steps if self.ties is None else steps * self.ties.most
        return self.usual**2 * steps

    def bound_lse(
        self, head: SoftmaxHead, roundings: Roundings, lse: Doubles
    ) -> tuple[Doubles, Doubles]:
        """Return standard deviation and bound of the log normaliser."""
        m, unit = head.k.shape[0], roundings.accumulate.unit
        size = size_of_log(lse, m)
        # Kernels may sum weights in other runs than products: the larger is taken of their sums and
        # of those of m equal terms, sum (t / m)^2 = m / 3. Then the log and the maximum.
        steps = m / 3 if self.ties is None else m / 3 * self.ties.most
        steps = np.maximum(self.usual**2 * steps, self.sum_variance(roundings))
        std = np.sqrt(self.relative + steps + self.usual**2 * 2 * size * size)
        spread = self.shift[:, 0] / np.where(self.least > 0, self.least, 1.0)[:, 0]
        return std, np.log1p(spread) + (m + 4) * unit + 4 * unit * size

    def bound_result(
        self, head: SoftmaxHead, roundings: Roundings, out: Doubles
    ) -> tuple[Doubles, Doubles, Doubles]:
        """Return variance, the same at the least favourable digits, and bound, before rounding."""
        if self.steps:
            self.close()
        unit, half, d_v = roundings.accumulate.unit, roundings.softmax.unit, out.shape[-1]
        # sum_j p^2 var(delta) (v - out)^2, multiplied out: below 0 only by roundings here.
        squares, first, zeroth = np.split(self.scores, [d_v, 2 * d_v], -1)
        scores = np.maximum(squares - 2 * out * first + out * out * zeroth, 0.0)
        # If sums are a trifle, all running sums are taken for as large as the last.
        running = self.running[:, :-1]
        if not roundings.scores_matter:
            running = out * out * head.k.shape[0]
            running = running if self.ties is None else running * self.ties.most[:, None]
        sums = self.usual**2 * (running + out * out) + (RMS * half * out) ** 2
        sums += self.sum_variance(roundings)[:, None] * out * out
        variance = scores + self.weights + sums
        # Sums in the range of subnormal numbers: m roundings of h^2 / 12, where `last` is m h.
        m, last = head.k.shape[0], self._lose(head, roundings)
        variance = variance + np.where(np.abs(out) * unit < last, last * last / (12 * m), 0.0)
        # Spacings of rounded weights and scores are known. The rest is by RMS, of usual digits.
        known = self.weights if roundings.scores is None else scores + self.weights
        worst = known + WORST**2 * (variance - known) + self.wider
        return variance, worst, self.bound(head, roundings, out)

    def _lose(self, head: SoftmaxHead, roundings: Roundings) -> Doubles | float:
        """Return what sums in the range of subnormal numbers may lose."""
        whole = 1.0 if roundings.normalised or roundings.of_log else self.whole
        return len(head.k) * roundings.accumulate.spacing(0.0) * whole

    def bound(self, head: SoftmaxHead, roundings: Roundings, out: Doubles) -> Doubles:
        """Return the bound of the result before it is rounded."""
        half, accumulate, last = (
            roundings.softmax.unit,
            roundings.accumulate,
            self._lose(head, roundings),
        )
        whole = 1.0 if roundings.normalised else self.whole
        least = np.where(self.least > 0, self.least, 1.0)
        gamma = self.gamma + cut_error(roundings.unit, len(head.k))
        moved = self.moved
        if roundings.weights is not None:
            moved = moved + self._smallest(roundings) * self.rounded
        # |N' / L' - N / L| <= (|N' - N| + |out| |L' - L|) / L', with L = 1 and L' the least sum.
        error = moved + gamma * (self.sizes + moved) + last / 2
        bound = (error + np.abs(out) * self.shift) / least
        bound += (2 * self.gamma + 4 * half) * (np.abs(out) + bound)
        # Sums of weights over the largest are larger by 1 / whole: where they overflow is no bound.
        reach = (self.sizes + moved) * (1 + self.gamma) / whole
        return np.where(reach > accumulate.largest, math.inf, bound)


def size_of_log(lse: Doubles, m: int) -> Doubles:
    """Bound the rounding error of a log normaliser of m keys, in units, without that of its sum."""
    return np.where(np.isfinite(lse), np.abs(lse), 0.0) + 1 + math.log(max(m, 1))


def _list_runs(of: TileShares, keys: int) -> Iterator[slice]:
    """List keys of a tile between running sums that are known; some query sees one of them."""
    for j in blocks(0, keys, TILE_KEYS):
        if of.hidden is None or not of.hidden[:, j].all():
            yield j


def _has_few_values(x: Doubles) -> bool:
    """Tell whether many numbers have few values."""
    return x.size > TILE_KEYS * _ALIKE and np.unique(np.round(x * 2.0**20)).size * _ALIKE < x.size


def _add_ones(x: Doubles) -> Doubles:
    """Add a column of ones."""
    return np.concatenate([x, np.ones((len(x), 1))], -1)
