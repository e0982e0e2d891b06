"""Weights and values of a tile of keys, in the type in which variances and bounds are summed.

Where weights are rounded to a narrow type, that is most of the error, and all else of a tile may be
computed in float32. Its numbers are then off by 2^-14 of themselves at most, for which bounds are
made larger. What underflows is no loss: values are taken over the largest of their column in the
tile, whose key has a share of more than 2^-39, so that its rounding alone has a variance of more
than 2^-110 of the square of its value; and what is lost is less than 2^-126 of that square.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...arrays.blocks import WHOLE
from ...arrays.library import Doubles
from .formats import Format, leading_power
from .head import SoftmaxHead, Tile
from .roundings import BIAS, FINE, MAXIMUM_KEYS, Roundings
from .weight_errors import largest_error, relative_variance

_LEAST_WEIGHT, _LEAST_SHARE, _LARGEST = 2.0**-23, 2.0**-16, 2.0**30  # of float32
_DIGITS = 24
_SPREAD_OUT = 16.0  # over the variance of logs of weights that are within a power of 2
_FEW_PAIRS = 2**13  # of a tile, that take as long in float64
FLUSHED = 4  # spacings of the smallest numbers: weights below that are rounded with a bias
LEAST_SHARE = _LEAST_WEIGHT * _LEAST_SHARE
OFF = 2.0**-14  # by which sums in float32 may be off


class TileShares(NamedTuple):
    """Weights of a tile."""

    gap: Doubles  # differences to the largest score, 0 where hidden
    weights: Doubles  # e^gap, 0 where hidden
    tops: npt.NDArray[np.intp]  # the places of the largest, where these are 1, as numbers
    hidden: npt.NDArray[np.bool_] | None  # where keys are, if any are
    least: float  # the smallest weight
    shares: Any = None  # the weights over their sum
    positive: bool = True  # whether all of these are above 0
    step: Doubles | None = None  # where e^gap is rounded: distances of neighbouring numbers
    near: Any = None  # the nearest of them
    moved: Doubles | None = None  # and how far they are
    lagging: npt.NDArray[np.intp] | None = None  # the largest that need not be 1

    @classmethod
    def of(cls, tile: Tile, top: Doubles, lags: npt.NDArray[np.bool_] | None = None) -> TileShares:
        """Take the weights of the scores of a tile, and the largest score of all, which may lag."""
        gap = tile.scores - top
        np.minimum(gap, 0.0, out=gap)
        hidden = None if tile.visible is None else ~tile.visible
        if hidden is not None:
            gap[hidden] = -math.inf
        weights = np.exp(gap)
        tops = np.flatnonzero(gap == 0)
        lagging = None
        if lags is not None:
            late = lags[tops // gap.shape[-1], 0]
            tops, lagging = tops[~late], tops[late]
        if hidden is not None:
            gap[hidden] = 0.0
        least = float(np.min(weights, initial=1.0))
        return cls(gap, weights, tops, hidden, least, lagging=lagging)

    @classmethod
    def of_shares(cls, tile: Tile, shares: Doubles, gap: Doubles) -> TileShares:
        """Take weights over their sum, with their logs, 0 where hidden."""
        hidden, least = None if tile.visible is None else ~tile.visible, float(np.min(shares))
        return cls(gap, shares, np.zeros(0, np.intp), hidden, least, shares, least > 0)

    def over(self, whole: Doubles) -> TileShares:
        """Multiply the weights by the share of a weight of 1."""
        shares = self.weights * whole.astype(self.weights.dtype, copy=False)
        positive = self.least * float(np.min(whole, initial=1.0)) > 0
        return self._replace(shares=shares, positive=positive)

    def rounded(self, to: Format) -> TileShares:
        """Round the weights to nearest."""
        step = to.spacing(self.weights)
        near = self.weights / step
        to.to_integers(near, out=near)
        near *= step
        return self._replace(step=step, near=near, moved=near - self.weights)

    def find_largest(self) -> npt.NDArray[np.bool_]:
        """Tell which weights are the largest of their 16 keys: it was 1 with a running maximum.

        In tiles of any size and order, and in parts that are merged, the largest of all so far is
        the largest of its 16 keys, too.
        """
        cut = np.arange(0, self.weights.shape[-1], MAXIMUM_KEYS)
        largest = np.repeat(np.maximum.reduceat(self.weights, cut, -1), MAXIMUM_KEYS, -1)
        return np.asarray(self.weights == largest[:, : self.weights.shape[-1]])

    def keep_rounded(self, x: Doubles, of_lagging: float = 1.0) -> Doubles:
        """Put 0 where a weight is the largest, or is 0: it is not rounded.

        The largest that need not be 1 have any digits, which a factor stands for.
        """
        x.reshape(-1)[self.tops] = 0.0
        if self.lagging is not None:
            x.reshape(-1)[self.lagging] *= of_lagging
        if not self.positive:
            x[self.shares == 0] = 0.0
        return x

    def move(self, whole: Doubles | float, epsilon: Doubles) -> tuple[Doubles, Doubles]:
        """Return how far shares may move if their logs do by epsilon, and their sums at least."""
        shares = self.shares
        with np.errstate(over="ignore", invalid="ignore"):
            if np.max(epsilon, initial=0.0) < 2.0**-10:  # e^x - 1 <= x (1 + x) and e^-x >= 1 - x
                most = epsilon + 1
                most *= epsilon
                least = np.sum(shares, -1) - np.einsum("ij,ij->i", shares, epsilon)
            else:
                most = np.expm1(epsilon)
                least = np.sum(shares * np.exp(-epsilon), -1)
            most *= shares
            if not self.positive:
                gone = shares == 0
                most[gone] = (np.exp(self.gap + epsilon) * whole)[gone]
        if self.hidden is not None:
            most[self.hidden] = 0.0
        return most, least[:, None]


class TileValues(NamedTuple):
    """Values of a tile with their sizes and squares; in float32 over scales of the columns."""

    v: Doubles
    sizes: Doubles
    squares: Doubles
    scale: Doubles | float = 1.0
    off: float = 0.0  # by which sums may be off, of themselves

    @classmethod
    def of(cls, v: Doubles, like: Doubles) -> TileValues:
        """Take them in the type of an array that is multiplied by them."""
        if like.dtype == np.float64:
            return cls(v, np.abs(v), v * v)
        largest = leading_power(np.max(np.abs(v), 0))
        scale = np.where(largest > 0, largest, 1.0)
        scaled: Any = (v / scale).astype(like.dtype)
        return cls(scaled, np.abs(scaled), scaled * scaled, scale, OFF)

    def sum_squares(self, variances: Doubles, sums: Doubles) -> None:
        """Add sums of squares with variances (rows, keys)."""
        sums += self.scaled(variances @ self.squares, self.scale)

    def scaled(self, x: Doubles, factor: Doubles | float = 1.0) -> Doubles:
        """Multiply sums by what values were divided by, and by a factor in float32."""
        return x if isinstance(self.scale, float) else x * (self.scale * factor)


class WeighedTile(NamedTuple):
    """A tile of a head with its weights and values."""

    head: SoftmaxHead
    tile: Tile
    of: TileShares
    values: TileValues


class CommonErrors:
    """Sums over the keys of what errors of exponentials have in common, over their size.

    e^0 has no error, or always the same: the largest weights are summed apart. With coarse
    exponentials these are all that may have been the largest when they were computed.
    """

    def __init__(self, rows: int, d_v: int) -> None:
        self.top = np.zeros((rows, d_v + 1))  # p |v| and p of the largest weights
        self.gaps = np.zeros((rows, 2))  # p times gap and gap^2

    def add(self, roundings: Roundings, of: TileShares, values: TileValues) -> None:
        """Add the keys of a tile."""
        tops = of.tops
        if roundings.exp > FINE:
            moved, tops = of.shares * of.gap, np.flatnonzero(of.find_largest())
            self.gaps += np.stack([np.sum(moved, -1), np.einsum("ij,ij->i", moved, of.gap)], -1)
        if len(tops) > len(of.shares):  # some queries have several: all keys in one product
            top = np.zeros_like(of.shares)
            top.reshape(-1)[tops] = of.shares.reshape(-1)[tops]
            self.top[:, :-1] += values.scaled(top @ values.sizes)
            self.top[:, -1] += np.sum(top, -1)
            return
        row, key = np.divmod(tops, max(len(values.v), 1))
        share = of.shares[row, key, None]
        np.add.at(self.top[:, :-1], row, values.scaled(share * values.sizes[key]))
        np.add.at(self.top[:, -1], row, share[:, 0])

    def of_result(self, sizes: Doubles, out: Doubles) -> Doubles:
        """Return what errors of one sign add up to: of the largest, and `BIAS` of others."""
        others: Doubles = BIAS * (sizes + np.abs(out))
        return others + self.top[:, :-1] + np.abs(out) * self.top[:, -1:]

    def of_sum(self, roundings: Roundings) -> Doubles | float:
        """Return what they add up to in the normaliser, in units.

        With weights over several powers of 2 those of a polynomial average to twice `BIAS` at most.
        """
        if roundings.exp <= FINE:
            return roundings.exp
        mean, square = self.gaps.T
        near = np.exp(-_SPREAD_OUT * np.maximum(square - mean * mean, 0.0))
        top = self.top[:, -1]
        return np.asarray(roundings.exp * (top + (1 - top) * np.maximum(2 * BIAS, near)))


def weigh_tile(
    head: SoftmaxHead, single: SoftmaxHead | None, tile: Tile, of: TileShares, whole: Doubles
) -> WeighedTile:
    """Take a tile in float64, or in float32 if the head may be and weights are large enough."""
    v = head.v[tile.keys]
    if single is not None and of.least > _LEAST_WEIGHT and of.gap.size >= _FEW_PAIRS:
        tile, of = tile._replace(products=tile.logits), of._replace(near=None)  # not needed
        head, tile, of = single, in_single(tile), in_single(of)
    of = of.over(whole)
    return WeighedTile(head, tile, of, TileValues.of(v, of.shares))


def take_single(
    head: SoftmaxHead, roundings: Roundings, i: slice, whole: Doubles
) -> SoftmaxHead | None:
    """Convert queries and keys to float32; None where variances and bounds need float64."""
    least, most = np.min(whole, initial=1.0), np.max(whole, initial=0.0)
    return narrow_head(head, roundings, i) if _LEAST_SHARE < least <= most < 1 else None


def narrow_head(head: SoftmaxHead, roundings: Roundings, i: slice = WHOLE) -> SoftmaxHead | None:
    """Convert queries and keys to float32; None where errors of scores need float64."""
    reach = max(float(np.max(np.abs(x), initial=0.0)) for x in (head.q[i], head.k))
    few_digits = roundings.accumulate.digits <= _DIGITS and not roundings.scores_matter
    if not few_digits or not reach < _LARGEST or not abs(head.scale) < _LARGEST:
        return None
    return head._replace(q=in_single(head.q), k=in_single(head.k))


def find_log_errors(
    head: SoftmaxHead,
    single: SoftmaxHead | None,
    roundings: Roundings,
    tile: Tile,
    i: slice,
    gap: Doubles,
) -> tuple[Doubles, Doubles]:
    """Return variances of logs of weights, and bounds of their errors; in float32 if it may be."""
    is_single = single is not None and gap.size >= _FEW_PAIRS
    if is_single and single is not None:
        tile = in_single(tile._replace(products=tile.logits))
        head, gap = single, in_single(gap)
    variance = relative_variance(head, roundings, tile, i, gap)
    bound = largest_error(head, roundings, tile, i, gap)
    if is_single:
        bound *= 1 + OFF
    return variance, bound


def in_single(x: Any) -> Any:
    """Convert an array of float64, or those in a tuple, to float32."""
    if not isinstance(x, tuple):
        return x.astype(np.float32)
    found: dict[int, Any] = {
        id(y): y.astype(np.float32) for y in x if getattr(y, "dtype", None) == np.float64
    }
    parts: Any = [found.get(id(y), y) for y in x]
    return type(x)(*parts)


def sum_products(weights: Doubles, y: Doubles) -> Doubles:
    """Sum products of vectors y (r, keys), or others for each row, with weights: (rows, r, r)."""
    rows, r = len(weights), y.shape[-2]
    if y.ndim == 3 or rows < r:
        return np.asarray((weights[:, None, :] * y) @ np.swapaxes(y, -1, -2))
    a, b = np.triu_indices(r)  # one product for all rows
    products = np.empty((rows, r, r))
    products[:, a, b] = products[:, b, a] = weights @ (y[a] * y[b]).T
    return products


def bound_flushed(weights: Doubles, last: Any) -> Doubles:
    """Bound how far weights of few spacings of the smallest numbers move; 0 for larger ones."""
    return np.asarray((weights < FLUSHED * last) * np.minimum(weights, last / 2))


def sum_largest(of: TileShares, most: Doubles, v: Doubles) -> Doubles:
    """Sum |v| and 1 over keys whose weights may be the largest, if scores are so far off."""
    near = of.gap + most >= 0
    near = near if of.hidden is None else near & ~of.hidden
    return np.concatenate([near @ np.abs(v), np.sum(near, -1, keepdims=True)], -1)
