"""Softmax attention."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .attention import Attention, Draws, square
from .catalogue import Catalogue

Array = Any


class Softmax(Attention):
    """Softmax attention."""

    def scale(self, d: int) -> float:
        """The factor on q . k."""
        return float(d**-0.5)

    def scores(self, q: Array, k: Array, visible: Array, draws: Draws) -> Array:
        """Logarithms of the kernel, shape (..., n, m)."""
        return self.scale(q.shape[-1]) * (q @ k.swapaxes(-1, -2))

    def weights(self, q: Array, k: Array, visible: Array, draws: Draws) -> Array:
        return self.exponentiate(self.scores(q, k, visible, draws), visible)

    def exponentiate(self, scores: Array, visible: Array) -> Array:
        """Exponentials relative to the largest visible score of each query."""
        scores = np.where(visible, scores, -np.inf)
        top = scores.max(-1, keepdims=True, initial=-np.inf)
        return np.exp(scores - np.where(top == -np.inf, 0.0, top).astype(scores.dtype))


CATALOGUE = Catalogue("softmax", Softmax, ("mask", "causal", "gqa"))


@CATALOGUE.variant("softmax-online", "Blocks over keys with a running maximum.")
class Online(Softmax):
    """Correct: blocks of four keys, a running maximum and rescaled sums."""

    block = 4

    def attend(self, q: Array, k: Array, v: Array, visible: Array, draws: Draws) -> Array:
        scores = np.where(visible, self.scores(q, k, visible, draws), -np.inf)
        top = np.full((*scores.shape[:-1], 1), -np.inf, scores.dtype)
        total = out = np.zeros((1, 1), scores.dtype)
        for j in range(0, k.shape[-2], self.block):
            s = scores[..., j : j + self.block]
            new = np.maximum(top, s.max(-1, keepdims=True))
            finite = np.where(new == -np.inf, 0.0, new).astype(scores.dtype)
            w, keep = np.exp(s - finite), self.keep(top, finite)
            seen = visible[..., j : j + self.block]
            total = total * keep + w.sum(-1, keepdims=True)
            out = out * keep + self.sum(w, v[..., j : j + self.block, :], seen)
            top = new
        return out / np.where(total == 0, 1.0, total).astype(v.dtype)

    def keep(self, top: Array, new: Array) -> Array:
        """By how much sums relative to the old maximum shrink."""
        return np.exp(top - new)


@CATALOGUE.defect("softmax-scale-missing", "Scores sqrt(d) too large.")
class ScaleMissing(Softmax):
    """Scores are q . k."""

    def scale(self, d: int) -> float:
        return 1.0


@CATALOGUE.defect("softmax-scale-twice", "Scores sqrt(d) too small: nearly uniform.")
class ScaleTwice(Softmax):
    """Scores are q . k / d."""

    def scale(self, d: int) -> float:
        return 1 / d


@CATALOGUE.defect("softmax-scale-of-padded-size", "Scores too small unless d is a power of two.")
class ScaleFromNextPowerOfTwo(Softmax):
    """The scale is that of the padded head size."""

    def scale(self, d: int) -> float:
        return float((1 << (d - 1).bit_length()) ** -0.5)


@CATALOGUE.defect(
    "softmax-scale-in-single-precision", "Seven digits in float64 unless d is a power of 4."
)
class ScaleInSinglePrecision(Softmax):
    """1/sqrt(d) is rounded to float32."""

    def scale(self, d: int) -> float:
        return float(np.float32(super().scale(d)))


@CATALOGUE.defect("softmax-mask-minus-1e9", "A query that sees no key gets the mean value.")
class FiniteMask(Softmax):
    """Hidden scores are replaced by a large negative number."""

    hidden = -1e9

    def exponentiate(self, scores: Array, visible: Array) -> Array:
        scores = np.where(visible, scores, self.hidden)
        return np.exp(scores - scores.max(-1, keepdims=True))

    def average(self, weights: Array, v: Array, visible: Array) -> Array:
        return weights @ v / weights.sum(-1, keepdims=True)


@CATALOGUE.defect(
    "softmax-mask-minus-1e4",
    "Padding is read by queries that see no key, or whose scores are below -1e4.",
    "fp16 code",
)
class SmallFiniteMask(FiniteMask):
    """Hidden scores are replaced by -1e4, as float16 requires."""

    hidden = -1e4


@CATALOGUE.defect("softmax-mask-added", "Padding is read where its scores outbid the -1e4 added.")
class AddedMask(FiniteMask):
    """A finite number is added to hidden scores, and large scores outbid it."""

    def exponentiate(self, scores: Array, visible: Array) -> Array:
        scores = scores + np.where(visible, 0, -1e4).astype(scores.dtype)
        return np.exp(scores - scores.max(-1, keepdims=True))


@CATALOGUE.defect("softmax-mask-as-integer", "Padding has weight 1/e in place of 0.")
class IntegerMask(FiniteMask):
    """The boolean mask is added to the scores as 0 and 1."""

    def exponentiate(self, scores: Array, visible: Array) -> Array:
        scores = scores + visible.astype(scores.dtype)
        return np.exp(scores - scores.max(-1, keepdims=True))


@CATALOGUE.defect(
    "softmax-maximum-over-hidden",
    "A large hidden score drives the visible weights to 0, and the output to NaN.",
)
class MaximumOverHidden(Softmax):
    """The maximum that is subtracted ranges over hidden keys too."""

    def exponentiate(self, scores: Array, visible: Array) -> Array:
        return np.where(visible, np.exp(scores - scores.max(-1, keepdims=True)), 0)


@CATALOGUE.defect(
    "softmax-maximum-global", "Queries whose scores are far below those of others get NaN."
)
class MaximumGlobal(Softmax):
    """One maximum for all queries is subtracted."""

    def exponentiate(self, scores: Array, visible: Array) -> Array:
        scores = np.where(visible, scores, -np.inf)
        return np.exp(scores - scores.max())


@CATALOGUE.defect("softmax-overflow", "Queries with scores above 709 get 0.")
class Overflowing(Softmax):
    """Nothing is subtracted, and what overflows becomes 0."""

    def exponentiate(self, scores: Array, visible: Array) -> Array:
        return np.where(visible, np.exp(scores), 0)

    def average(self, weights: Array, v: Array, visible: Array) -> Array:
        return np.nan_to_num(super().average(weights, v, visible), posinf=0, neginf=0)


@CATALOGUE.defect("softmax-clipped", "Scores beyond 5 are flattened.")
class Clipped(Softmax):
    """Scores are clipped to [-5, 5]."""

    def exponentiate(self, scores: Array, visible: Array) -> Array:
        return super().exponentiate(np.clip(scores, -5, 5), visible)


@CATALOGUE.defect("softmax-soft-capped", "Scores are compressed: 10 becomes 9.6.", "soft-capping")
class SoftCapped(Softmax):
    """Scores pass through 30 tanh(s / 30)."""

    def exponentiate(self, scores: Array, visible: Array) -> Array:
        return super().exponentiate(30 * np.tanh(scores / 30), visible)


@CATALOGUE.defect("softmax-base-two", "A temperature of 1.44.", "kernels that use exp2")
class BaseTwo(Softmax):
    """2^s where e^s is meant: log2(e) has not gone into the scale."""

    def exponentiate(self, scores: Array, visible: Array) -> Array:
        return super().exponentiate(scores * math.log(2), visible)


@CATALOGUE.defect("softmax-over-queries", "Weights sum to 1 over queries, not over keys.")
class OverQueries(Softmax):
    """The softmax is taken over the queries."""

    def exponentiate(self, scores: Array, visible: Array) -> Array:
        scores = np.where(visible, scores, -1e30)
        return np.where(visible, np.exp(scores - scores.max(-2, keepdims=True)), 0)

    def average(self, weights: Array, v: Array, visible: Array) -> Array:
        total = weights.sum(-2, keepdims=True)
        return self.sum(weights / np.where(total == 0, 1, total), v, visible)


@CATALOGUE.defect("softmax-plus-one", "Outputs shrink by up to a half.")
class PlusOne(Softmax):
    """1 is added to the normaliser, relative to the maximum."""

    def total(self, weights: Array, visible: Array) -> Array:
        return super().total(weights, visible) + 1


@CATALOGUE.defect("softmax-epsilon", "Outputs shrink by up to 1e-8.")
class SmallPlus(Softmax):
    """1e-8 is added to the normaliser."""

    def total(self, weights: Array, visible: Array) -> Array:
        return super().total(weights, visible) + 1e-8


@CATALOGUE.defect("softmax-empty-row-nan", "A query that sees no key gets NaN.", "most code")
class EmptyRowNaN(Softmax):
    """Queries that see no key become 0 / 0."""

    def average(self, weights: Array, v: Array, visible: Array) -> Array:
        return self.sum(weights, v, visible) / weights.sum(-1, keepdims=True)


@CATALOGUE.defect("softmax-top-four", "Keys after the fourth best are ignored.")
class TopFour(Softmax):
    """Only the four largest weights are kept."""

    def exponentiate(self, scores: Array, visible: Array) -> Array:
        weights = super().exponentiate(scores, visible)
        return np.where(weights >= np.sort(weights, axis=-1)[..., -4:][..., :1], weights, 0)


@CATALOGUE.defect("softmax-series", "Right for small scores only.")
class Linearised(Softmax):
    """exp(s) by its series up to s^4."""

    def exponentiate(self, scores: Array, visible: Array) -> Array:
        return np.where(visible, sum(scores**p / math.factorial(p) for p in range(5)), 0)


@CATALOGUE.defect("softmax-cosine", "Lengths of queries and keys do not matter.")
class Normalised(Softmax):
    """Queries and keys are scaled to unit length first."""

    def scores(self, q: Array, k: Array, visible: Array, draws: Draws) -> Array:
        q, k = (x / np.maximum(np.sqrt(square(x)), 1e-12)[..., None] for x in (q, k))
        return super().scores(q, k, visible, draws)


@CATALOGUE.defect(
    "softmax-single-precision-scores",
    "Seven digits of each score in float64, fewer of its exponential.",
)
class SinglePrecisionScores(Softmax):
    """Scores are accumulated in float32 whatever the dtype."""

    def scores(self, q: Array, k: Array, visible: Array, draws: Draws) -> Array:
        return super().scores(q.astype(np.float32), k.astype(np.float32), visible, draws)


@CATALOGUE.defect("softmax-half-precision-values", "Three digits of the values.")
class HalfPrecisionValues(Softmax):
    """Values are stored in float16."""

    def average(self, weights: Array, v: Array, visible: Array) -> Array:
        return super().average(weights, v.astype(np.float16).astype(v.dtype), visible)


@CATALOGUE.defect(
    "softmax-not-rescaled", "Blocks of keys before the running maximum rose weigh too much."
)
class NotRescaled(Online):
    """The sums so far are not rescaled when the maximum of a later block is larger."""

    def keep(self, top: Array, new: Array) -> Array:
        return np.where(top == -np.inf, 0.0, 1.0).astype(new.dtype)


@CATALOGUE.defect("softmax-padded-blocks", "Outputs shrink unless 4 divides m.")
class PaddedBlocks(Softmax):
    """The last block is padded to four with zero keys that count."""

    def total(self, weights: Array, visible: Array) -> Array:
        return super().total(weights, visible) + (-weights.shape[-1] % 4) / weights.shape[-1]


HALF = {"dtype": "float16"}


class Fused(Softmax):
    """Half precision in, float32 within, half precision out."""

    def attend(self, q: Array, k: Array, v: Array, visible: Array, draws: Draws) -> Array:
        q, k, v = (x.astype(np.float32) for x in (q, k, v))
        return super().attend(q, k, v, visible, draws)


@CATALOGUE.defect(
    "softmax-scale-nearly", "Scores a thousandth too large, in half precision.", tags=HALF
)
class ScaleNearly(Fused):
    """The scale is 1.001 / sqrt(d)."""

    def scale(self, d: int) -> float:
        return 1.001 * super().scale(d)


@CATALOGUE.defect("softmax-result-truncated", "Half a unit in the last place towards 0.", tags=HALF)
class ResultTruncated(Fused):
    """The result is cut off to half precision, not rounded."""

    def attend(self, q: Array, k: Array, v: Array, visible: Array, draws: Draws) -> Array:
        out = super().attend(q, k, v, visible, draws)
        rounded = out.astype(np.float16)
        beyond = np.abs(rounded.astype(np.float32)) > np.abs(out)
        return np.where(beyond, np.nextafter(rounded, np.float16(0)), rounded)


@CATALOGUE.defect(
    "softmax-short-log2e",
    "A temperature off by three millionths.",
    "kernels that use exp2",
    tags={"dtype": "float32"},
)
class ShortLog2E(Softmax):
    """Powers of 2 with log2(e) taken for 1.4427."""

    def exponentiate(self, scores: Array, visible: Array) -> Array:
        return super().exponentiate(scores * np.float32(1.4427 * math.log(2)), visible)


@CATALOGUE.defect("softmax-tile-off", "A tile of 32 queries is 1 % too large.", tags=HALF)
class TileOff(Fused):
    """Queries 32 to 63 are multiplied by 1.01."""

    def attend(self, q: Array, k: Array, v: Array, visible: Array, draws: Draws) -> Array:
        out = super().attend(q, k, v, visible, draws)
        factor = np.ones((out.shape[-2], 1), np.float32)
        factor[32:64] = 1.01
        return out * factor
