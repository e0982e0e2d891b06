"""Weights as a kernel multiplies them if all that its profile rounds is rounded to nearest."""

from __future__ import annotations

import math
from copy import copy

import numpy as np

from ...arrays.library import Doubles
from .head import (
    ScoredRows,
    SoftmaxHead,
    Tile,
    attend_rows,
    count_tile_keys,
    scan_tiles,
    score_tile,
)
from .roundings import Roundings


class NearestWeights:
    """Weights over their sum, with the roundings of the profile to nearest."""

    def __init__(
        self, head: SoftmaxHead, roundings: Roundings, i: slice, exact: ScoredRows
    ) -> None:
        self.head, self.roundings, self.i = head, roundings, i
        to = roundings.scores
        self.first = exact if to is None else attend_rows(head, i, to.round)
        self.top = np.where(np.isfinite(self.first.top), self.first.top, 0.0)[:, None]
        self.narrow = roundings.softmax.unit > roundings.accumulate.unit
        # Then a tile has these weights already, over the largest, and they are rounded there.
        plain = roundings.weights is not None and not roundings.normalised
        self.moved = to is not None or self.narrow  # before the weights are rounded themselves
        self.of_largest = plain and not self.moved  # rounded over the largest
        lse = np.where(np.isfinite(self.first.lse), self.first.lse, 0.0)[:, None]
        total = np.exp(lse - self.top)
        if self.narrow:  # the sum is of narrow exponentials, and narrow itself
            total = np.zeros_like(total)
            for tile in scan_tiles(head, i, count_tile_keys(len(total))):
                total += np.sum(np.exp(self._logs(tile)), -1, keepdims=True)
            total = roundings.softmax.round(total)
        self.total = np.where(total > 0, total, 1.0)

    def part(self, i: slice) -> NearestWeights:
        """Take some of the queries."""
        weights, at = copy(self), slice(i.start - self.i.start, i.stop - self.i.start)
        weights.i, weights.top, weights.total = i, self.top[at], self.total[at]
        return weights

    def _tile(self, tile: Tile) -> Tile:
        """Round the scores."""
        if self.roundings.scores is None:
            return tile
        to = self.roundings.scores.round
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
                to = self.roundings.softmax.round
                gap = np.log(to(np.exp(to(gap))))  # the difference is rounded, then e^ of it
        return gap if tile.visible is None else np.where(tile.visible, gap, -math.inf)

    def weights(self, tile: Tile, rounded: bool = True) -> Doubles:
        """Return the weights of a tile, rounded if the profile does."""
        if self.roundings.weights is None or not rounded:
            return np.asarray(np.exp(self._logs(tile)) / self.total)
        return np.asarray(self.stored(tile) / self.divisor)

    def stored(self, tile: Tile) -> Doubles:
        """Return the rounded weights of a tile as they are multiplied by values."""
        weights, to = np.exp(self._logs(tile)), self.roundings.weights
        assert to is not None
        return to.round(weights / self.total if self.roundings.normalised else weights)

    @property
    def divisor(self) -> Doubles | float:
        """What sums of rounded weights times values are divided by."""
        return 1.0 if self.roundings.normalised else self.total
