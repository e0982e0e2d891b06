"""Random features beyond a window, in which the kernel is exact."""

from __future__ import annotations

from typing import Any

import numpy as np

from .attention import Draws, square
from .catalogue import Catalogue
from .frequencies import constant_seed, fresh_entropy
from .rfa import RFA, KeyNormDropped, RootTwice

Array = Any


class LocalRFA(RFA):
    """The kernel itself in a window of eight keys on each side, estimates beyond."""

    sides = (8, 8)

    def weights(self, q: Array, k: Array, visible: Array, draws: Draws) -> Array:
        return self.exponentiate(self.scores(q, k, visible, draws), visible)

    def scores(self, q: Array, k: Array, visible: Array, draws: Draws) -> Array:
        log_q, log_k = self.log_features(q, k, visible, draws)
        far = self.log_kernel(log_q, log_k) + self.of_query(q, log_q.shape[-1]).astype(q.dtype)
        exact = self.exact(q * self.root(q.shape[-1]), k * self.root(k.shape[-1]))
        return self.choose(self.near(*visible.shape[-2:]), exact, far)

    def of_query(self, q: Array, count: int) -> Array:
        """What is left of the log estimate, which does not cancel here: -|q|^2/2 - log S."""
        return self.half_norm(q * self.root(q.shape[-1])) - np.log(count)

    def half_norm(self, q: Array) -> Array:
        """-|q|^2/2, shape (..., n, 1)."""
        return -square(q)[..., None] / 2

    def exact(self, q: Array, k: Array) -> Array:
        """Logarithms of the kernel itself."""
        return q @ k.swapaxes(-1, -2)

    def ahead(self, n: int, m: int) -> Array:
        """How far key j is ahead of that of query i, with which the last is level."""
        return np.arange(m) - np.arange(n)[:, None] - (m - n)

    def near(self, n: int, m: int) -> Array:
        """Which keys are in the window, shape (n, m)."""
        left, right = self.sides
        ahead = self.ahead(n, m)
        return (-left <= ahead) & (ahead <= right)

    def choose(self, near: Array, exact: Array, far: Array) -> Array:
        """The kernel itself where a key is near, and an estimate where it is not."""
        return np.where(near, exact, far)


CATALOGUE = Catalogue("rfa-local", LocalRFA, ("omega", "omega_per_head", "mask", "causal", "gqa"))


CATALOGUE.defect("rfa-local-seed-ignored", "The same seed gives different results.")(
    LocalRFA(generator=fresh_entropy)
)
CATALOGUE.defect("rfa-local-seed-constant", "Different seeds give the same result.")(
    LocalRFA(generator=constant_seed)
)


@CATALOGUE.variant("rfa-local-parts", "Near and far keys by themselves, and merged.")
class Parts(LocalRFA):
    """Correct: each part relative to its own largest score, and then to the larger of the two."""

    def exponentiate(self, scores: Array, visible: Array) -> Array:
        near = self.near(*scores.shape[-2:])
        parts = [np.where(visible & some, scores, -np.inf) for some in (near, ~near)]
        tops = [x.max(-1, keepdims=True, initial=-np.inf).astype(x.dtype) for x in parts]
        finite = [np.where(top == -np.inf, 0, top).astype(scores.dtype) for top in tops]
        both = np.where(visible.any(-1, keepdims=True), np.maximum(*tops), 0).astype(scores.dtype)
        return sum(
            np.exp(x - own) * np.exp(top - both)
            for x, own, top in zip(parts, finite, tops, strict=True)
        )


@CATALOGUE.defect("rfa-local-window-one-short", "The last keys of the window are estimated.")
class WindowOneShort(LocalRFA):
    """Seven keys on each side."""

    sides = (7, 7)


@CATALOGUE.defect("rfa-local-window-one-long", "One key more on each side is not estimated.")
class WindowOneLong(LocalRFA):
    """Nine keys on each side."""

    sides = (9, 9)


@CATALOGUE.defect("rfa-local-window-exclusive", "The first key of the window is estimated.")
class WindowExclusive(LocalRFA):
    """Eight keys before and including the own."""

    sides = (7, 8)


@CATALOGUE.defect("rfa-local-window-before-only", "Keys after the own are all estimated.")
class WindowBeforeOnly(LocalRFA):
    """The window holds keys before the own only."""

    sides = (8, 0)


@CATALOGUE.defect("rfa-local-window-top-left", "The wrong keys are near if n and m differ.")
class WindowTopLeft(LocalRFA):
    """The first query is level with the first key."""

    def ahead(self, n: int, m: int) -> Array:
        return np.arange(m) - np.arange(n)[:, None]


@CATALOGUE.defect("rfa-local-window-in-blocks", "Keys across the edge of a block are estimated.")
class WindowInBlocks(LocalRFA):
    """Near are the keys of the own block of eight and of its neighbours."""

    def near(self, n: int, m: int) -> Array:
        own = (np.arange(n)[:, None] + m - n) // 8
        return abs(np.arange(m) // 8 - own) <= 1


@CATALOGUE.defect("rfa-local-near-estimated-too", "Near keys count twice.")
class NearEstimatedToo(LocalRFA):
    """The sum over features is over all keys, near ones included."""

    def choose(self, near: Array, exact: Array, far: Array) -> Array:
        return np.where(near, np.logaddexp(exact, far), far)


@CATALOGUE.defect("rfa-local-edge-twice", "The first key of the window counts twice.")
class EdgeTwice(LocalRFA):
    """The sum over features goes up to the first key of the window."""

    def choose(self, near: Array, exact: Array, far: Array) -> Array:
        n, m = near.shape
        edge = self.ahead(n, m) == -self.sides[0]
        return np.where(edge, np.logaddexp(exact, far), super().choose(near, exact, far))


@CATALOGUE.defect("rfa-local-edge-lost", "The key just before the window is not read.")
class EdgeLost(LocalRFA):
    """The sum over features ends one key early."""

    def choose(self, near: Array, exact: Array, far: Array) -> Array:
        edge = self.ahead(*near.shape) == -self.sides[0] - 1
        return np.where(edge, -np.inf, super().choose(near, exact, far))


@CATALOGUE.defect("rfa-local-far-unseen", "Attention in a window: no other key is read.")
class FarKeysUnseen(LocalRFA):
    """Keys of the window only."""

    def choose(self, near: Array, exact: Array, far: Array) -> Array:
        return np.where(near, exact, -np.inf)


@CATALOGUE.defect("rfa-local-after-unseen", "Keys after the window are not read, causal or not.")
class AfterUnseen(LocalRFA):
    """The sum over features is over keys before the window."""

    def choose(self, near: Array, exact: Array, far: Array) -> Array:
        before = self.ahead(*near.shape) < 0
        return np.where(near, exact, np.where(before, far, -np.inf))


@CATALOGUE.defect("rfa-local-near-estimated", "Near keys are estimated, far ones are not.")
class NearEstimated(LocalRFA):
    """The wrong way round."""

    def choose(self, near: Array, exact: Array, far: Array) -> Array:
        return super().choose(~near, exact, far)


@CATALOGUE.defect(
    "rfa-local-query-norm-dropped",
    "Far keys weigh e^(|q|^2/2) too much.",
    "features without the factor that cancels from the ratio",
)
class QueryNormDropped(LocalRFA):
    """The features of queries have no norm, as may be where all keys are estimated."""

    def half_norm(self, q: Array) -> Array:
        return 0 * super().half_norm(q)


@CATALOGUE.defect("rfa-local-query-norm-unscaled", "Far keys weigh too little.")
class QueryNormUnscaled(LocalRFA):
    """The norm of queries is that before the scale."""

    def half_norm(self, q: Array) -> Array:
        return super().half_norm(q) / q.dtype.type(self.root(q.shape[-1]) ** 2)


@CATALOGUE.defect("rfa-local-sum-over-features", "Far keys weigh S times too much.")
class SumOverFeatures(LocalRFA):
    """The sum over frequencies in place of their mean."""

    def of_query(self, q: Array, count: int) -> Array:
        return super().of_query(q, 1)


@CATALOGUE.defect("rfa-local-root-of-count", "Far keys weigh sqrt(S) too much.")
class RootOfCount(LocalRFA):
    """1 / sqrt(S) is on the features of one side only."""

    def of_query(self, q: Array, count: int) -> Array:
        return super().of_query(q, 1) - np.log(count) / 2


@CATALOGUE.defect(
    "rfa-local-stabiliser-kept",
    "Far keys weigh as if the largest feature of a query were 1.",
    "stabilised features, merged with exact scores",
)
class StabiliserKept(LocalRFA):
    """Each query's features are stabilised by their largest, which is not put back."""

    def log_features(self, q: Array, k: Array, visible: Array, draws: Draws) -> tuple[Array, Array]:
        log_q, log_k = super().log_features(q, k, visible, draws)
        return log_q - log_q.max(-1, keepdims=True), log_k


@CATALOGUE.defect("rfa-local-normalisers-apart", "Far keys weigh as much as near ones.")
class FieldsApart(LocalRFA):
    """Near and far keys have a mean each, and the mean of the two is taken."""

    def exponentiate(self, scores: Array, visible: Array) -> Array:
        near, total = self.near(*scores.shape[-2:]), 0
        for part in (visible & near, visible & ~near):
            weights = super().exponentiate(scores, part)
            mass = weights.sum(-1, keepdims=True)
            total = total + weights / np.where(mass == 0, 1, mass).astype(scores.dtype)
        return total


@CATALOGUE.defect("rfa-local-key-norm-dropped", "Long keys weigh e^(|k|^2/2) too much where far.")
class LocalKeyNormDropped(KeyNormDropped, LocalRFA):
    """Features of keys have no norm."""


@CATALOGUE.defect("rfa-local-root-twice", "Attention of exp(q . k / d).")
class LocalRootTwice(RootTwice, LocalRFA):
    """d^(-1/4) is applied twice."""


@CATALOGUE.defect("rfa-local-exact-unscaled", "Near keys have scores sqrt(d) too large.")
class ExactUnscaled(LocalRFA):
    """Near scores are q . k."""

    def exact(self, q: Array, k: Array) -> Array:
        return super().exact(q, k) / self.root(q.shape[-1]) ** 2


@CATALOGUE.defect("rfa-local-mask-of-near-only", "Far keys are read though they are masked.")
class MaskOfNearOnly(LocalRFA):
    """The mask hides near keys only."""

    def visible(self, n: int, m: int, mask: Array | None, causal: bool) -> Array:
        far = ~self.near(n, m) & super().visible(n, m, None, causal)
        return super().visible(n, m, mask, causal) | far


@CATALOGUE.defect("rfa-local-mask-of-far-only", "Near keys are read though they are masked.")
class MaskOfFarOnly(LocalRFA):
    """The mask hides far keys only."""

    def visible(self, n: int, m: int, mask: Array | None, causal: bool) -> Array:
        near = self.near(n, m) & super().visible(n, m, None, causal)
        return super().visible(n, m, mask, causal) | near


@CATALOGUE.defect("rfa-local-causal-of-near-only", "Causal outputs read the far future.")
class CausalOfNearOnly(LocalRFA):
    """Causal in the window only."""

    def visible(self, n: int, m: int, mask: Array | None, causal: bool) -> Array:
        far = ~self.near(n, m) & super().visible(n, m, mask, False)
        return super().visible(n, m, mask, causal) | far


@CATALOGUE.defect("rfa-local-causal-of-far-only", "Causal outputs read the next eight tokens.")
class CausalOfFarOnly(LocalRFA):
    """The window looks both ways, causal or not."""

    def visible(self, n: int, m: int, mask: Array | None, causal: bool) -> Array:
        near = self.near(n, m) & super().visible(n, m, mask, False)
        return super().visible(n, m, mask, causal) | near


@CATALOGUE.defect("rfa-local-unstabilised", "NaN where exponents pass 709.")
class LocalUnstabilised(LocalRFA):
    """Exponentials as they are."""

    def exponentiate(self, scores: Array, visible: Array) -> Array:
        return np.exp(np.where(visible, scores, -np.inf))


@CATALOGUE.defect("rfa-local-one-maximum", "NaN for heads and queries of low scores.")
class OneMaximum(LocalRFA):
    """One maximum for all scores of a call."""

    def exponentiate(self, scores: Array, visible: Array) -> Array:
        scores = np.where(visible, scores, -np.inf)
        top = scores.max(initial=-np.inf)
        return np.exp(scores - (0 if top == -np.inf else top))


@CATALOGUE.defect("rfa-local-frequencies-scaled", "Frequencies d^(1/4) too short.")
class FrequenciesScaled(LocalRFA):
    """Frequencies are scaled like queries and keys."""

    def frequencies(self, q: Array, k: Array, visible: Array, draws: Draws) -> Array:
        return super().frequencies(q, k, visible, draws) * self.root(q.shape[-1])


@CATALOGUE.defect("rfa-local-gqa-interleaved", "Grouped heads read keys of head h mod G.")
class LocalInterleaved(LocalRFA):
    """Query head h reads key head h mod G."""

    def repeat(self, x: Array, times: int) -> Array:
        return np.concatenate([x] * times, axis=-3)
