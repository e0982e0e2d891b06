r"""The law and the bound of the rounding errors of softmax attention, for some queries of a head.

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
from collections.abc import Callable, Mapping
from copy import copy
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..arrays.library import Doubles
from ..certified.pairs import Pair
from .hardware import SLACK, CutSum, allow, cut_error, split_error
from .head import (
    TILE_KEYS,
    ScoredRows,
    SoftmaxHead,
    Tile,
    attend_rows,
    certify_rows,
    scan_tiles,
    score_tile,
)
from .roundings import (
    BIAS,
    CONSTANTS,
    MAXIMUM_KEYS,
    RMS,
    SURE,
    WORST,
    Roundings,
    RowErrors,
    expect_loss,
    round_bound,
    sum_error,
    walk,
)
from .weight_errors import largest_error, relative_variance

_DOUBLE = 2.0**-53  # unit of float64, in which results are computed here
_TIED_UNITS = 4  # units: weights nearer than that to each other, or to 1, are rounded together
CACHED_PAIRS = 2**15  # of queries and keys, at a time, whose arrays are held in the cache
_ALIKE = 16  # roundings that may be the same before they are taken for tied
_FLUSHED = 4  # spacings of the smallest numbers: weights below that are rounded with a bias


def analyse_softmax(
    head: SoftmaxHead,
    kernel: Roundings,
    i: slice,
    changes: Mapping[str, Callable[[SoftmaxHead, Tile, slice], Any]] = MappingProxyType({}),
    exact: ScoredRows | None = None,
) -> RowErrors:
    """Say what a kernel that rounds like this may give for the queries i, and what is exact."""
    exact = exact or attend_rows(head, i, None)
    rounded = NearestWeights(head, kernel, i, exact)
    rows, d_v = exact.out.shape
    law = _ErrorSums(rows, d_v, head.k.shape[0], kernel)
    top, log = law.share(exact)
    steep = {name: np.zeros((rows, d_v + 1)) for name in changes}
    nearest, lost = np.zeros((2, rows, d_v))
    cuts = None if kernel.unit is None else CutSum(kernel.unit, rows, d_v)
    for tile in scan_tiles(head, i, _tile_keys(kernel, rows)):
        v = head.v[tile.keys]
        of = _Shares.of(tile, top, law.whole)
        if rounded.of_largest:  # the same weights, rounded
            assert kernel.weights is not None
            step = kernel.weights.spacing(of.weights)
            near = of.weights / step
            kernel.weights.to_integers(near, out=near)
            near *= step
            of = of._replace(step=step, near=near)
            nearest += near @ v
        else:
            nearest += rounded.weights(tile) @ v
        law.add(head, kernel, tile, i, of, v)
        if kernel.weights is not None and kernel.weights.truncated:  # the mean of what is dropped
            lost += expect_loss(kernel.weights, of.shares if kernel.normalised else of.weights) @ v
        if cuts is not None:
            cuts.add(rounded.stored(tile) if of.near is None else of.near, v)
        for name, change in changes.items():
            steep[name] += (of.shares * change(head, tile, i)) @ _add_ones(v)
    if rounded.of_largest:
        nearest /= rounded.total
    variance, least_favourable, bound = law.bound_result(head, kernel, exact.out)
    shift: Doubles | float = 0.0
    if cuts is not None:
        shift, noise = cuts.shift / rounded.divisor, cuts.variance / rounded.divisor**2
        variance, least_favourable = variance + noise, least_favourable + noise
        nearest, bound = nearest + shift, bound + np.abs(shift)
    rest = -lost / rounded.divisor
    slack = allow(kernel.unit, shift) + SLACK * np.abs(rest)  # a running maximum loses nothing
    if kernel.of_log:
        relative = kernel.accumulate.unit * size_of_log(exact.lse, head.k.shape[0])[:, None]
        of_log = relative * np.abs(exact.out)  # the same for all columns: slack, too
        variance, least_favourable = (x + (RMS * of_log) ** 2 for x in (variance, least_favourable))
        slack, bound = slack + of_log, bound + np.expm1(4 * relative) * (np.abs(exact.out) + bound)
    std, worst = np.sqrt(variance), np.sqrt(least_favourable)
    tangents = {name: x[:, :-1] - x[:, -1:] * exact.out for name, x in steep.items()}
    loose = (np.abs(nearest - exact.out - shift - rest) > SURE * std) | law.tied(kernel)[:, None]
    loose |= law.lost(kernel)
    spacing = np.zeros_like(exact.out)
    if kernel.out is not None:
        spacing = kernel.out.spacing(exact.out)
        rounding = np.square(spacing) / 12
        std, worst = np.sqrt(variance + rounding), np.sqrt(least_favourable + rounding)
        bound = round_bound(kernel.out, exact.out, bound)
        nearest = kernel.out.round(nearest)
    free = ~loose & (std > 0)
    std, worst = (np.where(free, x, math.inf) for x in (std, worst))
    lse_std, lse_bound = law.bound_lse(head, kernel, exact.lse)
    drift = CONSTANTS * np.abs(steep.get("scale", np.zeros((rows, d_v + 1))))
    unit = kernel.accumulate.unit
    slack = slack + unit * kernel.exp * law.common(exact.out)
    if "scale" in tangents:
        constants = CONSTANTS * unit + split_error(kernel.score_unit)
        slack = slack + constants * np.abs(tangents["scale"])
    flushed = law.flushed[:, :-1] + law.flushed[:, -1:] * np.abs(exact.out)
    lse_slack = kernel.exp + drift[:, -1] + 2 * np.abs(log[:, 0])
    out, lse = Pair(exact.out, 0.0), Pair(exact.lse, 0.0)
    if kernel.accumulate.unit <= _DOUBLE:
        out, lse, *_ = certify_rows(head, i)
        nearest = out.hi if kernel.out is None else kernel.out.round(out.hi)
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
        kernel.accumulate.unit * lse_slack,
        spacing,
        slack + flushed,
        tangents,
        rest=out.lo + rest,
        lse_rest=lse.lo,
        shift=shift,
    )


def bound_softmax(
    head: SoftmaxHead, kernel: Roundings, i: slice, exact: ScoredRows
) -> tuple[Doubles, Doubles]:
    """Return the result and the bound of `analyse_softmax` alone."""
    if kernel.unit is not None or kernel.accumulate.unit <= _DOUBLE:
        found = analyse_softmax(head, kernel, i)  # what is cut depends on the rounded weights
        return found.out, found.bound
    rows, d_v = exact.out.shape
    law = _ErrorSums(rows, d_v, head.k.shape[0], kernel)
    top, _ = law.share(exact)
    for tile in scan_tiles(head, i, max(2 * TILE_KEYS, CACHED_PAIRS // max(rows, 1))):
        of = _Shares.of(tile, top, law.whole)
        sizes = np.abs(head.v[tile.keys])
        law.move(kernel, of, largest_error(head, kernel, tile, i, of.gap), sizes)
    return exact.out, round_bound(kernel.out, exact.out, law.bound(head, kernel, exact.out))


def variance_of_maxima(head: SoftmaxHead, kernel: Roundings, i: slice, rows: RowErrors) -> Doubles:
    r"""Return the part of the variance that a running maximum may spare a fused kernel, (b, d_v).

    A weight that is the largest when it is rounded is 1, and stays as it is. In tiles of any size
    and order, and in parts that are merged, it is the largest of its 16 keys, too:

    .. math:: \sum_{j\ \text{largest of its 16 keys}} h_{ij}^2 v_{jc}^2 / 12

    with the distance :math:`h_{ij}` of the numbers near the weight, over the sum of the weights.
    """
    spared, to = np.zeros_like(rows.out), kernel.weights
    assert to is not None
    top, lse = (np.where(np.isfinite(x), x, 0.0)[:, None] for x in (rows.top, rows.lse))
    for tile in scan_tiles(head, i):
        of = _Shares.of(tile, top, np.exp(top - lse))
        cut = np.arange(0, of.weights.shape[-1], MAXIMUM_KEYS)
        largest = np.repeat(np.maximum.reduceat(of.weights, cut, -1), MAXIMUM_KEYS, -1)
        largest = largest[:, : of.weights.shape[-1]]
        step = to.spacing(of.weights) * np.exp(top - lse) * (of.weights == largest)
        spared += of.keep_rounded(np.square(step) / 12) @ np.square(head.v[tile.keys])
    return spared


class NearestWeights:
    """Weights over their sum, with the roundings of the profile to nearest."""

    def __init__(self, head: SoftmaxHead, kernel: Roundings, i: slice, exact: ScoredRows) -> None:
        self.head, self.kernel, self.i = head, kernel, i
        to = kernel.scores
        self.first = exact if to is None else attend_rows(head, i, to.round)
        self.top = np.where(np.isfinite(self.first.top), self.first.top, 0.0)[:, None]
        self.narrow = kernel.softmax.unit > kernel.accumulate.unit
        plain = kernel.weights is not None and not kernel.normalised
        self.moved = to is not None or self.narrow  # before the weights are rounded themselves
        self.of_largest = plain and not self.moved  # rounded over the largest
        lse = np.where(np.isfinite(self.first.lse), self.first.lse, 0.0)[:, None]
        total = np.exp(lse - self.top)
        if self.narrow:
            total = np.zeros_like(total)
            for tile in scan_tiles(head, i):
                total += np.sum(np.exp(self._logs(tile)), -1, keepdims=True)
            total = kernel.softmax.round(total)
        self.total = np.where(total > 0, total, 1.0)

    def part(self, i: slice) -> NearestWeights:
        """Take some of the queries."""
        weights, at = copy(self), slice(i.start - self.i.start, i.stop - self.i.start)
        weights.i, weights.top, weights.total = i, self.top[at], self.total[at]
        return weights

    def _tile(self, tile: Tile) -> Tile:
        """Round the scores."""
        if self.kernel.scores is None:
            return tile
        to = self.kernel.scores.round
        return score_tile(self.head, self.i, tile.keys, tile.visible, tile.products, to)

    def slope(self, tile: Tile) -> Doubles | float:
        """Return the slope of the cap, of a tanh that was rounded."""
        return self._tile(tile).slope

    def _logs(self, tile: Tile) -> Doubles:
        """Return logs of the weights over the largest."""
        tile = self._tile(tile)
        gap = np.minimum(tile.scores - self.top, 0.0)
        if self.narrow:
            with np.errstate(divide="ignore"):
                to = self.kernel.softmax.round
                gap = np.log(to(np.exp(to(gap))))
        return gap if tile.visible is None else np.where(tile.visible, gap, -math.inf)

    def weights(self, tile: Tile, rounded: bool = True) -> Doubles:
        """Return the weights of a tile, rounded if the profile does."""
        if self.kernel.weights is None or not rounded:
            return np.asarray(np.exp(self._logs(tile)) / self.total)
        return np.asarray(self.stored(tile) / self.divisor)

    def stored(self, tile: Tile) -> Doubles:
        """Return the rounded weights of a tile as they are multiplied by values."""
        weights, to = np.exp(self._logs(tile)), self.kernel.weights
        assert to is not None
        return to.round(weights / self.total if self.kernel.normalised else weights)

    @property
    def divisor(self) -> Doubles | float:
        """What sums of rounded weights times values are divided by."""
        return 1.0 if self.kernel.normalised else self.total


class _Shares(NamedTuple):
    """Weights of a tile."""

    gap: Doubles  # differences to the largest score, 0 where hidden
    weights: Doubles  # e^gap, 0 where hidden
    shares: Doubles  # these over their sum
    tops: npt.NDArray[np.intp]  # the places of the largest scores, as numbers
    hidden: npt.NDArray[np.bool_] | None  # where keys are, if any are
    positive: bool  # whether all shares are above 0
    step: Doubles | None = None  # where e^gap is rounded: distances of neighbouring numbers
    near: Doubles | None = None  # and the nearest of them

    @classmethod
    def of(cls, tile: Tile, top: Doubles, whole: Doubles) -> _Shares:
        """Take them of the scores of a tile, the largest of all, and the share of a weight of 1."""
        gap = tile.scores - top
        np.minimum(gap, 0.0, out=gap)
        hidden = None if tile.visible is None else ~tile.visible
        if hidden is not None:
            gap[hidden] = -math.inf
        weights = np.exp(gap)
        tops = np.flatnonzero(gap == 0)
        if hidden is not None:
            gap[hidden] = 0.0
        shares = weights * whole
        return cls(gap, weights, shares, tops, hidden, bool(np.min(shares, initial=1.0) > 0))

    def keep_rounded(self, x: Doubles) -> Doubles:
        """Put 0 where a weight is the largest, or is 0: it is not rounded."""
        x.reshape(-1)[self.tops] = 0.0
        if not self.positive:
            x[self.shares == 0] = 0.0
        return x


class _ErrorSums:
    """Sums over the keys that the variance and the bound are made of."""

    def __init__(self, rows: int, d_v: int, m: int, kernel: Roundings) -> None:
        self.scores = np.zeros((rows, 2 * d_v + 1))  # p^2 var(delta) times v^2, v and 1
        self.weights = np.zeros((rows, d_v))  # var(eta) v^2
        self.wider = np.zeros((rows, d_v))  # how much more at the least favourable digits
        self.near = np.zeros((rows, 4))  # p^2 times 1, gap and gap^2, and p^4
        self.keys = 0
        self.together = self.alone = 0.0  # squares of roundings, summed over rows first or not
        self.lattice = False
        self.running = np.zeros((rows, d_v))  # squares of p v and of their running sums
        self.run, self.runs, self.steps = np.zeros((rows, d_v)), np.zeros((rows, d_v)), 0
        self.relative = np.zeros(rows)  # p^2 var(delta)
        self.moved = np.zeros((rows, d_v))  # the largest errors of p, and of their sum, times |v|
        self.shift = np.zeros((rows, 1))  # p (e^epsilon - 1)
        self.least = np.zeros((rows, 1))  # the sum of the weights, at least
        self.whole = np.full((rows, 1), 1e-300)  # the share of a weight of 1
        self.flushed = np.zeros((rows, d_v + 1))  # half the last spacing times |v| and 1
        self.sizes = np.zeros((rows, d_v))  # p |v|
        self.top = np.zeros((rows, d_v + 1))  # p |v| and p of the largest weights
        # With changes of a running maximum.
        self.gamma = sum_error(kernel, m, 2 + 2 * m / MAXIMUM_KEYS)

    def share(self, exact: ScoredRows) -> list[Doubles]:
        """Find the share of a weight of 1; return the largest scores and the log normalisers."""
        top, log = (np.where(np.isfinite(x), x, 0.0)[:, None] for x in (exact.top, exact.lse))
        self.whole = np.where(np.isfinite(exact.top)[:, None], np.exp(top - log), 1e-300)
        return [top, log]

    def add(
        self, head: SoftmaxHead, kernel: Roundings, tile: Tile, i: slice, of: _Shares, v: Doubles
    ) -> None:
        """Add the keys of a tile."""
        shares, squares, sizes = of.shares, v * v, np.abs(v)
        size = shares * shares
        noise = relative_variance(head, kernel, tile, i, of.gap)
        noise *= size
        self.relative += np.sum(noise, -1)
        self.move(kernel, of, largest_error(head, kernel, tile, i, of.gap), sizes)
        if kernel.scores_matter:
            self.scores += noise @ _add_ones(np.concatenate([squares, v], -1))
            self._run(kernel, shares @ v, size @ squares, v.shape[0])
        if kernel.weights is not None:
            variance = self._weights(kernel, of, size, squares)
            if not kernel.scores_matter:
                variance += noise
            self.weights += variance @ squares
        else:
            self._spread(of.keep_rounded(size), of.gap)
        self.keys += v.shape[0]

    def move(self, kernel: Roundings, of: _Shares, epsilon: Doubles, sizes: Doubles) -> None:
        """Add what bounds are made of, if logs of weights move by epsilon at most."""
        most, least = _move_shares(of, self.whole, epsilon)
        self.least += least
        self.shift += np.sum(most, -1, keepdims=True)
        whole, moved = of.shares @ sizes, most @ sizes
        self.sizes += whole
        self.moved += moved
        row, key = np.divmod(of.tops, max(len(sizes), 1))
        top = of.shares[row, key, None]
        np.add.at(self.top, row, np.concatenate([top * sizes[key], top], -1))
        if kernel.weights is None:
            return
        # Of shares with their errors, and over any maximum that was before.
        smallest: Any = kernel.weights.unit * kernel.weights.tiny
        if not kernel.normalised:  # in shares, the largest of which is not 1
            smallest = smallest * self.whole
        if of.hidden is None and np.max(self.whole, initial=0.0) < 1:
            self.moved += kernel.weights.unit * (whole + moved) + smallest * np.sum(sizes, 0)
            return
        rounding = kernel.weights.unit * (of.shares + most) + smallest
        rounding[of.shares >= 1] = 0.0
        if of.hidden is not None:
            rounding[of.hidden] = 0.0
        self.moved += rounding @ sizes

    def _run(self, kernel: Roundings, rise: Doubles, terms: Doubles, steps: int) -> None:
        """Add so many terms to the running sums."""
        last = self.run + rise
        self.running += walk(self.run, last, terms, steps, kernel.lanes) + terms
        self.run, self.steps = last, self.steps + steps
        if self.steps >= kernel.run:
            self.close()

    def _weights(self, kernel: Roundings, of: _Shares, size: Doubles, squares: Doubles) -> Doubles:
        """Return the variance of rounding the weights: over their sum, or over the largest, 1.

        A running maximum may be another than the last when a weight is rounded, and digits, too.
        """
        to, weights, shares = kernel.weights, of.weights, of.shares
        assert to is not None
        if kernel.normalised:
            narrow = to.spacing(shares)
            narrow *= narrow
            narrow /= 12
            return narrow if of.positive else np.where(shares > 0, narrow, 0.0)
        narrow = np.square(to.spacing(weights) if of.step is None else of.step)
        narrow *= np.square(self.whole) / 12
        narrow, size = of.keep_rounded(narrow), of.keep_rounded(size)
        widest = size * (4.0**-to.digits / 3)
        least, last = np.min(weights), to.spacing(0.0)
        if least < to.tiny:
            np.maximum(widest, narrow, out=widest)
        widest -= narrow
        self.wider += widest @ squares
        if least < _FLUSHED * last:
            flushed = of.keep_rounded((weights < _FLUSHED * last) * (self.whole * last / 2))
            self.flushed += flushed @ _add_ones(np.sqrt(squares))
        residual = (to.round(weights) if of.near is None else of.near) - weights
        if to.truncated:
            residual += of.keep_rounded(to.spacing(weights) / 2)
        self.together += np.sum(np.square(self.whole.T @ residual))
        alone = np.einsum("ij,ij->i", residual, residual)
        self.alone += np.vdot(alone, np.square(self.whole))
        if self.keys == 0:
            first, kept = of.gap[:, :TILE_KEYS], (shares > 0) & (weights > last)
            self.lattice = _has_few_values(first[(first < 0) & kept[:, :TILE_KEYS]])
        self._spread(size, of.gap)
        return narrow

    def _spread(self, size: Doubles, gap: Doubles) -> None:
        """Add how far weights are from each other and from the largest."""
        moved = size * gap
        sums = ((moved, gap), (size, size))
        second, fourth = (np.einsum("ij,ij->i", x, y) for x, y in sums)
        self.near += np.stack([np.sum(size, -1), np.sum(moved, -1), second, fourth], -1)

    def lost(self, kernel: Roundings) -> npt.NDArray[np.bool_]:
        """Tell whether products are as small as the smallest numbers of the sums."""
        smallest = kernel.accumulate.spacing(0.0) * (1.0 if kernel.normalised else self.whole)
        small: npt.NDArray[np.bool_] = self.sizes < 8 * max(self.keys, 1) * smallest
        return small & (self.sizes > 0)

    def tied(self, kernel: Roundings) -> npt.NDArray[np.bool_]:
        """Tell whether weights are rounded alike, or their sums.

        They are where they are near to each other or to the largest, where they take few values, or
        where queries are nearly the same.
        """
        zeroth, first, second, fourth = self.near.T
        total = np.where(zeroth > 0, zeroth, 1.0)
        unit = (kernel.weights or kernel.accumulate).unit  # of sums, where weights are as they are
        square, mean = second / total, first / total
        limit = (_TIED_UNITS * unit) ** 2
        many = zeroth * zeroth > 8 * fourth
        near: npt.NDArray[np.bool_] = (zeroth > 0) & (
            (square < limit) | (many & (square - mean * mean < limit))
        )
        return near | (self.together > _ALIKE * self.alone) | self.lattice

    def close(self) -> None:
        """End a run of the sum over the keys: it is added to those before."""
        self.runs += self.run
        self.running += np.square(self.runs)
        self.run, self.steps = np.zeros_like(self.run), 0

    def common(self, out: Doubles) -> Doubles:
        """Return what errors of exponentials of one sign add up to, over their size.

        That of e^0 is always the same, and of others it averages to `BIAS` at most.
        """
        sizes: Doubles = BIAS * (self.sizes + np.abs(out))
        return sizes + self.top[:, :-1] + np.abs(out) * self.top[:, -1:]

    def bound_lse(
        self, head: SoftmaxHead, kernel: Roundings, lse: Doubles
    ) -> tuple[Doubles, Doubles]:
        """Return standard deviation and bound of the log normaliser."""
        m, unit = head.k.shape[0], kernel.accumulate.unit
        size = size_of_log(lse, m)
        std = np.sqrt(self.relative + (RMS * unit) ** 2 * (m / 3 + 2 * size * size))
        spread = self.shift[:, 0] / np.where(self.least > 0, self.least, 1.0)[:, 0]
        return std, np.log1p(spread) + (m + 4) * unit + 4 * unit * size

    def bound_result(
        self, head: SoftmaxHead, kernel: Roundings, out: Doubles
    ) -> tuple[Doubles, Doubles, Doubles]:
        """Return variance, the same at the least favourable digits, and bound, before rounding."""
        if self.steps:
            self.close()
        unit, half, d_v = kernel.accumulate.unit, kernel.softmax.unit, out.shape[-1]
        squares, first, zeroth = np.split(self.scores, [d_v, 2 * d_v], -1)
        scores = np.maximum(squares - 2 * out * first + out * out * zeroth, 0.0)
        running = self.running if kernel.scores_matter else out * out * head.k.shape[0]
        sums = (RMS * unit) ** 2 * (running + out * out) + (RMS * half * out) ** 2
        variance = scores + self.weights + sums
        # Sums in the range of subnormal numbers, and beyond the largest.
        m, last = head.k.shape[0], self._lose(head, kernel)
        variance = variance + np.where(np.abs(out) * unit < last, last * last / (12 * m), 0.0)
        known = self.weights if kernel.scores is None else scores + self.weights
        worst = known + WORST**2 * (variance - known) + self.wider
        return variance, worst, self.bound(head, kernel, out)

    def _lose(self, head: SoftmaxHead, kernel: Roundings) -> Doubles | float:
        """Return what sums in the range of subnormal numbers may lose."""
        whole = 1.0 if kernel.normalised or kernel.of_log else self.whole
        return len(head.k) * kernel.accumulate.spacing(0.0) * whole

    def bound(self, head: SoftmaxHead, kernel: Roundings, out: Doubles) -> Doubles:
        """Return the bound of the result before it is rounded."""
        half, accumulate, last = kernel.softmax.unit, kernel.accumulate, self._lose(head, kernel)
        whole = 1.0 if kernel.normalised else self.whole
        least = np.where(self.least > 0, self.least, 1.0)
        gamma = self.gamma + cut_error(kernel.unit, len(head.k))
        error = self.moved + gamma * (self.sizes + self.moved) + last / 2
        bound = (error + np.abs(out) * self.shift) / least
        bound += (2 * self.gamma + 4 * half) * (np.abs(out) + bound)
        reach = (self.sizes + self.moved) * (1 + self.gamma) / whole
        return np.where(reach > accumulate.largest, math.inf, bound)


def size_of_log(lse: Doubles, m: int) -> Doubles:
    """Bound the rounding error of a log normaliser of m keys, in units, without that of its sum."""
    return np.where(np.isfinite(lse), np.abs(lse), 0.0) + 1 + math.log(max(m, 1))


def _tile_keys(kernel: Roundings, rows: int) -> int:
    """Return the keys of a tile: more at a time where no running sum needs to be known."""
    if kernel.scores_matter or kernel.unit:
        return TILE_KEYS
    return max(2 * TILE_KEYS, CACHED_PAIRS // max(rows, 1))


def _has_few_values(x: Doubles) -> bool:
    """Tell whether many numbers have few values."""
    return x.size > TILE_KEYS * _ALIKE and np.unique(np.round(x * 2.0**20)).size * _ALIKE < x.size


def _move_shares(of: _Shares, whole: Doubles, epsilon: Doubles) -> tuple[Doubles, Doubles]:
    """Return how far shares may move if their logs do by epsilon, and their sums at the least."""
    with np.errstate(over="ignore", invalid="ignore"):
        if np.max(epsilon, initial=0.0) < 2.0**-10:  # e^x - 1 <= x (1 + x) and e^-x >= 1 - x
            most = epsilon + 1
            most *= epsilon
            least = np.sum(of.shares, -1) - np.einsum("ij,ij->i", of.shares, epsilon)
        else:
            most = np.expm1(epsilon)
            least = np.sum(of.shares * np.exp(-epsilon), -1)
        most *= of.shares
        if not of.positive:
            gone = of.shares == 0
            most[gone] = (np.exp(of.gap + epsilon) * whole)[gone]
    if of.hidden is not None:
        most[of.hidden] = 0.0
    return most, least[:, None]


def _add_ones(x: Doubles) -> Doubles:
    """Add a column of ones."""
    return np.concatenate([x, np.ones((len(x), 1))], -1)
