"""The reference: exact softmax attention of some queries, and its weights rounded to nearest."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...arrays.arithmetic import finite, flush_small
from ...arrays.blocks import blocks
from ...arrays.library import Array, Doubles
from ...certified.blocks import PairedAttention, attend_in_pairs
from ...engine.attend import Sums, combine, normalise, sum_values
from ...engine.scores import Band, Scores
from ...numbers.pairs import to_pairs
from .roundings import Roundings

TILE_KEYS = 64  # of a tile: as far apart are the running sums that are known
CACHED_PAIRS = 2**16  # of queries and keys, at a time, whose arrays are held in the cache


class SoftmaxHead(NamedTuple):
    """Softmax attention of one head, in float64; a sink is a key of 0 at the end, with value 0."""

    q: Doubles
    k: Doubles
    v: Doubles
    scale: float
    bias: Doubles | None
    mask: npt.NDArray[np.bool_] | None
    causal: bool
    window: tuple[int | None, int | None]
    softcap: float | None
    sink: float | None = None

    def with_sink(self, sink: float) -> SoftmaxHead:
        """Add a sink; one of -inf is none."""
        if sink == -math.inf:
            return self
        k, v = (np.concatenate([x, np.zeros((1, x.shape[-1]))]) for x in (self.k, self.v))
        return self._replace(k=k, v=v, sink=sink)

    def take_queries(self, rows: npt.NDArray[np.int64]) -> SoftmaxHead:
        """Take some queries, which see the keys that they saw."""
        mask = np.ones((len(rows), self.keys), bool)
        for at, i in enumerate(rows.tolist()):
            seen = self.visible(slice(i, i + 1), slice(0, self.keys))
            mask[at] = True if seen is None else seen[0]  # None for a query that sees all keys
        bias = None if self.bias is None else self.bias[rows]
        taken = self._replace(q=self.q[rows], bias=bias, mask=mask)
        return taken._replace(causal=False, window=(None, None))

    @property
    def keys(self) -> int:
        """The number of keys without the sink."""
        return len(self.k) - (self.sink is not None)

    def blocks(self, size: int) -> Iterator[slice]:
        """Cut the keys into blocks; the sink is alone, and the last."""
        yield from blocks(0, self.keys, size)
        yield from blocks(self.keys, self.k.shape[0], 1)

    def is_sink(self, j: slice) -> bool:
        """Tell whether a block of keys is the sink."""
        return self.sink is not None and j.start >= self.keys

    def visible(self, i: slice, j: slice) -> npt.NDArray[np.bool_] | None:
        """Return which keys the queries see; None for all."""
        if self.is_sink(j):
            return None  # all do, whatever the mask and the window
        mask = None if self.mask is None else np.asarray(self.mask[i, j])
        band = Band.of(self.keys - self.q.shape[0], self.causal, self.window)
        seen: npt.NDArray[np.bool_] | None = band.visible(i, j, None, np, mask)
        return seen

    def ahead(self, i: slice, j: slice) -> npt.NDArray[np.int64]:
        """Return how far keys are ahead of queries, j - (i + m - n)."""
        if self.is_sink(j):
            return np.zeros((i.stop - i.start, 1), np.int64)
        shift = self.keys - self.q.shape[0]
        distance: npt.NDArray[np.int64] = (
            np.arange(j.start, j.stop) - np.arange(i.start + shift, i.stop + shift)[:, None]
        )
        return distance


class Tile(NamedTuple):
    """Scores of some queries and keys, with what they are made of."""

    keys: slice
    visible: npt.NDArray[np.bool_] | None
    products: Doubles  # q . k
    logits: Doubles  # times the scale
    ratio: Doubles | float  # capped scores over the cap; 0 if there is none
    capped: Doubles
    scores: Doubles
    slope: Doubles | float  # of the cap
    is_sink: bool = False


def count_tile_keys(rows: int) -> int:
    """Return the keys of a tile for so many queries: few enough that its arrays stay in cache."""
    return max(2 * TILE_KEYS, CACHED_PAIRS // max(rows, 1))


def scan_tiles(head: SoftmaxHead, i: slice, size: int = TILE_KEYS) -> Iterator[Tile]:
    """Compute scores of the queries i with all keys."""
    for j in head.blocks(size):
        tile = scan_tile(head, i, j)
        if tile is not None:
            yield tile


def scan_tile(head: SoftmaxHead, i: slice, j: slice) -> Tile | None:
    """Compute scores of the queries i with the keys j; None if no query sees one."""
    visible = head.visible(i, j)
    if visible is not None and not visible.any():
        return None
    return score_tile(head, i, j, visible, head.q[i] @ head.k[j].T)


def keep_unrounded(x: Doubles) -> Doubles:
    """Round nothing."""
    return x


def score_tile(
    head: SoftmaxHead,
    i: slice,
    j: slice,
    visible: npt.NDArray[np.bool_] | None,
    products: Doubles,
    to: Callable[[Doubles], Doubles] = keep_unrounded,
) -> Tile:
    """Take the steps from q . k to scores, each result passed through `to`."""
    if head.is_sink(j):
        assert head.sink is not None
        return Tile(j, None, products, products, 0.0, products, products + head.sink, 0.0, True)
    products = to(products)
    logits = to(head.scale * products)
    capped: Doubles = logits
    ratio: Doubles | float = 0.0
    slope: Doubles | float = 1.0
    if head.softcap is not None:
        # A kernel that rounds its tanh has the slope of the rounded one.
        x = to(logits / head.softcap)
        ratio = to(np.tanh(x))
        capped, slope = (
            to(head.softcap * ratio),
            _slope(x) if to is keep_unrounded else 1 - ratio * ratio,
        )
    scores = capped if head.bias is None else to(capped + head.bias[i, j])
    return Tile(j, visible, products, logits, ratio, capped, scores, slope)


def _slope(x: Doubles) -> Doubles:
    """Return 1 - tanh(x)^2, also where that cancels."""
    e = np.exp(-2 * np.abs(x))  # which is small, where tanh is nearly 1
    return np.asarray(4 * e / np.square(1 + e))


class ScoredRows(NamedTuple):
    """Sums over the keys of a profile's own weights, and the largest score, with the sink's."""

    out: Doubles
    lse: Doubles
    top: Doubles


def finite_logs(rows: Any) -> list[Doubles]:
    """Return the largest scores and the log normalisers, (rows, 1); 0 where no key is seen."""
    return [np.where(np.isfinite(x), x, 0.0)[:, None] for x in (rows.top, rows.lse)]


ExactRows = Mapping[Any, ScoredRows]  # by head, and first and last row of a block


def attend_rows(
    head: SoftmaxHead, i: slice, to: Callable[[Doubles], Doubles] | None, size: int = 4 * TILE_KEYS
) -> ScoredRows:
    """Attend with scores that are exact, or rounded by `to`, to so many keys at a time."""
    m, rows = head.k.shape[0], i.stop - i.start
    zero = np.zeros((1, 1))
    total = Sums(zero, zero, zero - math.inf)
    top = np.full(rows, -math.inf)
    for tile in scan_tiles(head, i, size):
        if to is not None:
            tile = score_tile(head, i, tile.keys, tile.visible, tile.products, to)
        scores = np.broadcast_to(tile.scores, (rows, tile.scores.shape[-1]))
        seen = scores if tile.visible is None else np.where(tile.visible, scores, -math.inf)
        largest = np.max(seen, -1, keepdims=True)
        top = np.maximum(top, largest[:, 0])
        # Only the scores are rounded by `to`: the softmax of these is exact.
        base = largest + math.log(2 * m)  # so that sums of the largest finite values are finite
        weights = np.subtract(seen, finite(base, np))
        np.exp(flush_small(weights, np), out=weights)
        sums = sum_values(weights, base, head.v[tile.keys], tile.visible, np)
        total = combine(total, sums, np)
    out, lse = normalise(total, np)
    shape = (rows, head.v.shape[-1])
    return ScoredRows(np.broadcast_to(out, shape), np.broadcast_to(lse, rows), top)


def exact_rows(head: SoftmaxHead, i: slice) -> Doubles:
    """Compute the exact result for the queries i, rounded to float64."""
    return attend_rows(head, i, None).out


def certify_rows(head: SoftmaxHead, i: slice) -> tuple[Array, Array]:
    """Compute exact results and log normalisers of the queries i in pairs, with proven bounds."""
    keys = slice(0, head.keys)
    # What is the same for all queries has one row, or no axis for them.
    bias, mask = (None if x is None else np.atleast_2d(x) for x in (head.bias, head.mask))
    bias, mask = (x if x is None or len(x) == 1 else x[i] for x in (bias, mask))
    shift = head.keys - len(head.q) + i.start  # of these queries
    sink = None if head.sink is None else to_pairs(np.full((1, 1), head.sink))
    bias, scale = None if bias is None else to_pairs(bias), to_pairs(np.asarray(head.scale))
    scores = Scores(None, bias, mask, head.causal, head.window, head.softcap, sink, shift=shift)
    q, k, v = map(to_pairs, (head.q[i], head.k[keys], head.v[keys]))
    out, lse = attend_in_pairs(PairedAttention(q * scale, k, v, scores))
    return out, lse[..., 0]


class NearestWeights:
    """Weights over their sum, with the roundings of the profile to nearest."""

    def __init__(
        self, head: SoftmaxHead, roundings: Roundings, i: slice, exact: ScoredRows
    ) -> None:
        self.head, self.roundings, self.i = head, roundings, i
        to = roundings.scores
        self.first = exact if to is None else attend_rows(head, i, to.round)
        self.top, lse = finite_logs(self.first)
        self.narrow = roundings.softmax.unit > roundings.accumulate.unit
        # Then a tile has these weights already, over the largest, and they are rounded there.
        plain = roundings.weights is not None and not roundings.normalised
        self.moved = to is not None or self.narrow  # before the weights are rounded themselves
        self.of_largest = plain and not self.moved  # rounded over the largest
        total = np.exp(lse - self.top)
        if self.narrow:  # the sum is of narrow exponentials, and narrow itself
            total = np.zeros_like(total)
            for tile in scan_tiles(head, i, count_tile_keys(len(total))):
                total += np.sum(self._of_largest(tile), -1, keepdims=True)
            total = roundings.softmax.round(total)
        self.total = np.where(total > 0, total, 1.0)

    def part(self, i: slice) -> NearestWeights:
        """Take some of the queries."""
        at = slice(i.start - self.i.start, i.stop - self.i.start)
        weights = object.__new__(NearestWeights)  # `copy` takes longer than a tile's smaller steps
        vars(weights).update(vars(self), i=i, top=self.top[at], total=self.total[at])
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

    def _of_largest(self, tile: Tile) -> Doubles:
        """Return the weights over the largest, as the exponential gives them."""
        tile = self._tile(tile)
        gap = np.minimum(tile.scores - self.top, 0.0)
        if self.narrow:
            to = self.roundings.softmax.round
            weights = to(np.exp(to(gap)))  # the difference is rounded, then e^ of it
        else:
            weights = np.exp(gap)
        return weights if tile.visible is None else np.where(tile.visible, weights, 0.0)

    def weights(self, tile: Tile, rounded: bool = True) -> Doubles:
        """Return the weights of a tile, rounded if the profile does."""
        if self.roundings.weights is None or not rounded:
            return np.asarray(self._of_largest(tile) / self.total)
        return np.asarray(self.stored(tile) / self.divisor)

    def stored(self, tile: Tile) -> Doubles:
        """Return the rounded weights of a tile as they are multiplied by values."""
        weights, to = self._of_largest(tile), self.roundings.weights
        assert to is not None
        return to.round(weights / self.total if self.roundings.normalised else weights)

    @property
    def divisor(self) -> Doubles | float:
        """What sums of rounded weights times values are divided by."""
        return 1.0 if self.roundings.normalised else self.total
