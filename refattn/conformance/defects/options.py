"""What exact attention takes besides masks, step by step, and mistakes in it."""

from __future__ import annotations

from typing import Any

import numpy as np

from .attention import Attention
from .catalogue import Catalogue

Array = Any
Window = tuple[int | None, int | None]


class Options(Attention):
    """Softmax attention with windows, soft caps, sinks and biases."""

    def __call__(self, q: Array, k: Array, v: Array, **given: Any) -> Array:
        keys, values = self.share(q, k), self.share(q, v)
        (n, m), causal = (q.shape[-2], k.shape[-2]), given.get("causal", False)
        seen = self.visible(n, m, given.get("mask"), causal)
        if given.get("window") is not None:
            ahead = np.arange(m) - np.arange(n)[:, None] - self.shift(n, m)
            seen = seen & self.inside(ahead, given["window"], causal)
        sinks = given.get("sinks")
        with np.errstate(all="ignore"):
            bias = self.bias(given.get("bias"), q, k)
            scores = self.scores(self.product(q, keys), given.get("softcap"), bias, seen)
            logits = None if sinks is None else self.logits(sinks, q, k)[..., None, None]
            out = self.mean(scores, logits, values, seen)
        return out.astype(q.dtype)

    def product(self, q: Array, k: Array) -> Array:
        """Scores, (..., n, m)."""
        return q.shape[-1] ** -0.5 * (q @ k.swapaxes(-1, -2))

    def shift(self, n: int, m: int) -> int:
        """Where the first query is among the keys."""
        return m - n

    def inside(self, ahead: Array, window: Window, causal: bool) -> Array:
        """Which keys the window holds, of those that are so far ahead."""
        left, right = window
        seen = np.ones(ahead.shape, bool)
        if left is not None:
            seen &= ahead >= -left
        if right is not None:
            seen &= ahead <= right
        return seen

    def scores(self, scores: Array, softcap: float | None, bias: Array, seen: Array) -> Array:
        """Capped, then biased, then masked."""
        return np.where(seen, self.cap(scores, softcap) + bias, -np.inf)

    def cap(self, scores: Array, softcap: float | None) -> Array:
        """c tanh(s / c)."""
        return scores if softcap is None else softcap * np.tanh(scores / softcap)

    def bias(self, bias: Array | None, q: Array, k: Array) -> Array:
        """What is added to scores."""
        return np.zeros((), q.dtype) if bias is None else bias

    def logits(self, sinks: Array, q: Array, k: Array) -> Array:
        """The scores of sinks."""
        return sinks

    def mean(self, scores: Array, logits: Array | None, v: Array, seen: Array) -> Array:
        """The weighted mean of values and, for the sink, 0."""
        top = self.top(scores, logits)
        top = np.where(np.isfinite(top), top, 0.0).astype(scores.dtype)
        weights = np.exp(scores - top)
        total = weights.sum(-1, keepdims=True)
        if logits is not None:
            total = total + self.sink(np.exp(logits - top), weights)
        total = np.where(total == 0, 1.0, total).astype(v.dtype)
        return self.sum(weights, v, np.broadcast_to(seen, weights.shape)) / total

    def top(self, scores: Array, logits: Array | None) -> Array:
        """The largest score of each query."""
        top = scores.max(-1, keepdims=True, initial=-np.inf)
        return top if logits is None else np.maximum(top, logits)

    def sink(self, weight: Array, weights: Array) -> Array:
        """What a sink adds to the normaliser."""
        return weight


CATALOGUE = Catalogue(
    "softmax",
    Options,
    ("mask", "causal", "gqa", "window", "softcap", "sinks", "bias"),
    name="softmax-options",
)


@CATALOGUE.variant("softmax-sink-as-key", "A column of scores for the sink, cut off again.")
class SinkAsKey(Options):
    """Correct: the sink is one more key."""

    def mean(self, scores: Array, logits: Array | None, v: Array, seen: Array) -> Array:
        if logits is not None:
            column = np.broadcast_to(logits, (*scores.shape[:-1], 1))
            scores = np.concatenate([scores, column], -1)
            v = np.concatenate([v, np.zeros_like(v[..., :1, :])], -2)
            whole = np.broadcast_to(seen, (*scores.shape[:-1], scores.shape[-1] - 1))
            seen = np.concatenate([whole, np.ones((*whole.shape[:-1], 1), bool)], -1)
        return super().mean(scores, None, v, seen)


# Windows.


@CATALOGUE.defect(
    "softmax-window-one-short", "The farthest key of a window is lost.", "public code"
)
class WindowOneShort(Options):
    """The left side counts the query's own key."""

    def inside(self, ahead: Array, window: Window, causal: bool) -> Array:
        left, right = window
        return super().inside(ahead, (None if left is None else left - 1, right), causal)


@CATALOGUE.defect("softmax-window-one-long", "A window holds one key more.")
class WindowOneLong(Options):
    """The left side has one key more."""

    def inside(self, ahead: Array, window: Window, causal: bool) -> Array:
        left, right = window
        return super().inside(ahead, (None if left is None else left + 1, right), causal)


@CATALOGUE.defect("softmax-window-right-one-short", "The last key ahead is lost.")
class WindowRightOneShort(Options):
    """The right side counts the query's own key."""

    def inside(self, ahead: Array, window: Window, causal: bool) -> Array:
        left, right = window
        return super().inside(ahead, (left, right - 1 if right else right), causal)


@CATALOGUE.defect(
    "softmax-window-top-left", "With more keys than queries other keys.", "torch, jax"
)
class WindowTopLeft(Options):
    """The window of the first query is at the first key."""

    def shift(self, n: int, m: int) -> int:
        return 0


@CATALOGUE.defect("softmax-window-exchanged", "Keys behind for keys ahead.")
class WindowExchanged(Options):
    """Left and right are exchanged."""

    def inside(self, ahead: Array, window: Window, causal: bool) -> Array:
        return super().inside(ahead, window[::-1], causal)


@CATALOGUE.defect("softmax-window-ignored-when-causal", "Causal attention sees all of the past.")
class WindowIgnoredWhenCausal(Options):
    """Causal attention has a path of its own."""

    def inside(self, ahead: Array, window: Window, causal: bool) -> Array:
        return super().inside(ahead, (None, None) if causal else window, causal)


@CATALOGUE.defect("softmax-window-ignored-in-decoding", "One query sees all keys.", "public code")
class WindowIgnoredInDecoding(Options):
    """A path for one query has no window."""

    def inside(self, ahead: Array, window: Window, causal: bool) -> Array:
        return super().inside(ahead, (None, None) if len(ahead) == 1 else window, causal)


@CATALOGUE.defect("softmax-window-zero-is-none", "A window of the query's own key is none.")
class WindowZeroIsNone(Options):
    """0 is read as no limit."""

    def inside(self, ahead: Array, window: Window, causal: bool) -> Array:
        return super().inside(ahead, (window[0] or None, window[1] or None), causal)


@CATALOGUE.defect(
    "softmax-window-of-whole-blocks", "Long sequences see the rest of a block of 64 keys."
)
class WindowOfWholeBlocks(Options):
    """Blocks are skipped, and what is left of the first is not masked."""

    def inside(self, ahead: Array, window: Window, causal: bool) -> Array:
        left, right = window
        n, m = ahead.shape
        if left is None or m <= 64:
            return super().inside(ahead, window, causal)
        first = np.arange(n)[:, None] + self.shift(n, m) - left
        near = np.arange(m) >= first // 64 * 64
        return near & super().inside(ahead, (None, right), causal)


@CATALOGUE.defect("softmax-window-skips-a-block", "Long sequences lose keys of the first block.")
class WindowSkipsABlock(Options):
    """Blocks of 64 that a window only enters are skipped."""

    def inside(self, ahead: Array, window: Window, causal: bool) -> Array:
        left, _ = window
        n, m = ahead.shape
        seen = super().inside(ahead, window, causal)
        if left is None or m <= 64:
            return seen
        first = (np.arange(n)[:, None] // 64 * 64 + self.shift(n, m) - left + 63) // 64 * 64
        return seen & ((np.arange(m) >= first) | (ahead == 0))


# Soft caps.


@CATALOGUE.defect("softmax-softcap-ignored", "Scores are not capped.")
class SoftcapIgnored(Options):
    """No cap."""

    def cap(self, scores: Array, softcap: float | None) -> Array:
        return scores


@CATALOGUE.defect("softmax-softcap-after-bias", "A bias is capped too.", "public code")
class SoftcapAfterBias(Options):
    """The bias is added first."""

    def scores(self, scores: Array, softcap: float | None, bias: Array, seen: Array) -> Array:
        return np.where(seen, self.cap(scores + bias, softcap), -np.inf)


@CATALOGUE.defect("softmax-softcap-after-mask", "Hidden keys have a score of -c.", "public code")
class SoftcapAfterMask(Options):
    """Minus infinity is capped."""

    def scores(self, scores: Array, softcap: float | None, bias: Array, seen: Array) -> Array:
        return self.cap(np.where(seen, scores + bias, -np.inf), softcap)

    def mean(self, scores: Array, logits: Array | None, v: Array, seen: Array) -> Array:
        return super().mean(scores, logits, v, np.isfinite(scores))


@CATALOGUE.defect("softmax-softcap-before-scale", "Scores are capped sqrt(d) too early.")
class SoftcapBeforeScale(Options):
    """The cap is of q . k."""

    def product(self, q: Array, k: Array) -> Array:
        self.size = q.shape[-1] ** 0.5
        return super().product(q, k)

    def cap(self, scores: Array, softcap: float | None) -> Array:
        return super().cap(scores * self.size, softcap) / self.size


@CATALOGUE.defect("softmax-softcap-without-factor", "Scores are at most 1.")
class SoftcapWithoutFactor(Options):
    """tanh(s / c)."""

    def cap(self, scores: Array, softcap: float | None) -> Array:
        return scores if softcap is None else np.tanh(scores / softcap)


@CATALOGUE.defect("softmax-softcap-without-quotient", "Small scores are c times as large.")
class SoftcapWithoutQuotient(Options):
    """c tanh(s)."""

    def cap(self, scores: Array, softcap: float | None) -> Array:
        return scores if softcap is None else softcap * np.tanh(scores)


@CATALOGUE.defect("softmax-softcap-hard", "Scores are clipped.")
class SoftcapHard(Options):
    """A clip in place of tanh."""

    def cap(self, scores: Array, softcap: float | None) -> Array:
        return scores if softcap is None else np.clip(scores, -softcap, softcap)


@CATALOGUE.defect(
    "softmax-softcap-approximate-tanh", "Four digits of scores.", "tanh.approx of GPUs"
)
class SoftcapApproximateTanh(Options):
    """tanh has eleven bits."""

    def cap(self, scores: Array, softcap: float | None) -> Array:
        if softcap is None:
            return scores
        ratio = np.tanh(scores / softcap)
        return softcap * (np.round(ratio * 2048) / 2048).astype(scores.dtype)


# Sinks.


@CATALOGUE.defect("softmax-sinks-ignored", "Weights sum to 1.")
class SinksIgnored(Options):
    """There is no sink."""

    def sink(self, weight: Array, weights: Array) -> Array:
        return 0 * weight


@CATALOGUE.defect("softmax-sink-of-first-head", "All heads have the sink of the first.")
class SinkOfFirstHead(Options):
    """The sinks have no stride."""

    def logits(self, sinks: Array, q: Array, k: Array) -> Array:
        return sinks[..., :1] if sinks.ndim else sinks


@CATALOGUE.defect("softmax-sink-of-key-head", "Grouped heads have the sinks of others.")
class SinkOfKeyHead(Options):
    """Query head h has the sink of its key head."""

    def logits(self, sinks: Array, q: Array, k: Array) -> Array:
        if q.ndim < 3 or k.shape[-3] == q.shape[-3] or sinks.size == 1:
            return sinks
        return sinks[np.arange(q.shape[-3]) // (q.shape[-3] // k.shape[-3])]


@CATALOGUE.defect("softmax-sink-scaled", "Sinks are divided by sqrt(d).")
class SinkScaled(Options):
    """The sink is scaled like q . k."""

    def logits(self, sinks: Array, q: Array, k: Array) -> Array:
        return sinks * q.dtype.type(q.shape[-1] ** -0.5)


@CATALOGUE.defect("softmax-sink-capped", "Large sinks are capped like scores.")
class SinkCapped(Options):
    """The cap comes after the sink is put beside the scores."""

    def scores(self, scores: Array, softcap: float | None, bias: Array, seen: Array) -> Array:
        self.most = softcap
        return super().scores(scores, softcap, bias, seen)

    def mean(self, scores: Array, logits: Array | None, v: Array, seen: Array) -> Array:
        capped = None if logits is None else self.cap(logits, self.most)
        return super().mean(scores, capped, v, seen)


@CATALOGUE.defect("softmax-sink-for-each-key", "The sink weighs m times as much.")
class SinkForEachKey(Options):
    """The sink is added with every block of one key."""

    def sink(self, weight: Array, weights: Array) -> Array:
        return weight * weights.shape[-1]


@CATALOGUE.defect(
    "softmax-sink-for-each-block", "In long sequences the sink counts in each block of 64."
)
class SinkForEachBlock(Options):
    """Each block begins with the sink."""

    def sink(self, weight: Array, weights: Array) -> Array:
        return weight * -(-weights.shape[-1] // 64)


@CATALOGUE.defect("softmax-sink-not-shifted", "The sink weighs too little where scores are large.")
class SinkNotShifted(Options):
    """e^sink is added to weights relative to the largest score."""

    def mean(self, scores: Array, logits: Array | None, v: Array, seen: Array) -> Array:
        moved = None if logits is None else logits + self.top(scores, None)
        return super().mean(scores, moved, v, seen)


@CATALOGUE.defect("softmax-sink-adds-one", "Softmax off by one, whatever the sink is.", "softmax1")
class SinkAddsOne(Options):
    """The sink is taken for 0."""

    def logits(self, sinks: Array, q: Array, k: Array) -> Array:
        return 0 * np.nan_to_num(sinks)


# Biases.


@CATALOGUE.defect("softmax-bias-scaled", "A bias is divided by sqrt(d).", "public code")
class BiasScaled(Options):
    """The bias is added before the scale."""

    def bias(self, bias: Array | None, q: Array, k: Array) -> Array:
        return super().bias(bias, q, k) * q.dtype.type(q.shape[-1] ** -0.5)


@CATALOGUE.defect("softmax-bias-of-first-head", "All heads have the bias of the first.")
class BiasOfFirstHead(Options):
    """The bias has no stride of heads."""

    def bias(self, bias: Array | None, q: Array, k: Array) -> Array:
        bias = super().bias(bias, q, k)
        return bias[..., :1, :, :] if bias.ndim > 2 else bias


@CATALOGUE.defect("softmax-bias-of-first-batch", "All of a batch have the bias of the first.")
class BiasOfFirstBatch(Options):
    """The bias has no stride of the batch."""

    def bias(self, bias: Array | None, q: Array, k: Array) -> Array:
        bias = super().bias(bias, q, k)
        return bias[:1] if bias.ndim > 3 else bias


@CATALOGUE.defect("softmax-bias-of-first-query", "All queries have the bias of the first.")
class BiasOfFirstQuery(Options):
    """The bias is read as one of keys."""

    def bias(self, bias: Array | None, q: Array, k: Array) -> Array:
        bias = super().bias(bias, q, k)
        return bias[..., :1, :] if bias.ndim > 1 else bias


@CATALOGUE.defect("softmax-bias-of-key-head", "Grouped heads have the biases of others.")
class BiasOfKeyHead(Options):
    """Query head h has the bias of its key head."""

    def bias(self, bias: Array | None, q: Array, k: Array) -> Array:
        bias = super().bias(bias, q, k)
        if bias.ndim < 3 or k.shape[-3] == q.shape[-3] or bias.shape[-3] == 1:
            return bias
        groups = q.shape[-3] // k.shape[-3]
        return bias[..., np.arange(q.shape[-3]) // groups, :, :]


@CATALOGUE.defect("softmax-bias-in-half-precision", "Three digits of a bias.")
class BiasInHalfPrecision(Options):
    """The bias was kept in half precision."""

    def bias(self, bias: Array | None, q: Array, k: Array) -> Array:
        return super().bias(bias, q, k).astype(np.float16).astype(q.dtype)


@CATALOGUE.defect("softmax-bias-dropped-in-masks", "With a mask a bias is not added.")
class BiasDroppedInMasks(Options):
    """The mask takes the place of the bias."""

    def scores(self, scores: Array, softcap: float | None, bias: Array, seen: Array) -> Array:
        bias = bias if np.all(seen) else 0 * np.nan_to_num(bias)
        return super().scores(scores, softcap, bias, seen)


class Dropping(Attention):
    """Softmax attention with dropout, forth and back."""

    def __call__(self, q: Array, k: Array, v: Array, **given: Any) -> Any:
        n, m = q.shape[-2], k.shape[-2]
        rate, d_out = given.get("dropout", 0.0), given.get("d_out")
        seen = self.visible(n, m, given.get("mask"), given.get("causal", False))
        held = seen.any(-2)[..., None]  # by some query: what others hold may be anything
        (keys, values), k, v = (k, v), self.share(q, k), self.share(q, v)
        k, v = np.where(held, k, 0.0), np.where(held, v, 0.0)
        scale = q.shape[-1] ** -0.5
        scores = np.where(seen, scale * (q @ k.swapaxes(-1, -2)), -np.inf)
        top = scores.max(-1, keepdims=True)
        weights = np.exp(scores - np.where(np.isfinite(top), top, 0.0))
        rng = np.random.default_rng(given.get("seed", 0))
        factors = self.factors(self.uniform(rng, weights.shape), rate).astype(q.dtype)
        out, weights = self.dropped(weights, factors, v, seen)
        if d_out is None:
            return out
        factors = self.back(factors, rng, rate).astype(q.dtype)
        d_weights = factors * (d_out @ v.swapaxes(-1, -2))
        delta = (d_out * out).sum(-1, keepdims=True)
        pairs = scale * weights * (d_weights - delta)
        d_k = pairs.swapaxes(-1, -2) @ q
        d_v = (weights * factors).swapaxes(-1, -2) @ d_out
        return (out, pairs @ k, self.gathered(d_k, keys), self.gathered(d_v, values))

    def gathered(self, x: Array, like: Array) -> Array:
        """Summed over the query heads that share a key head."""
        if x.shape == like.shape:
            return x
        return x.reshape(*like.shape[:-2], -1, *like.shape[-2:]).sum(-3)

    def uniform(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        """A number in [0, 1) for each weight."""
        return rng.random(shape)

    def factors(self, u: Array, rate: float) -> Array:
        """0 where a weight is dropped, 1 / (1 - p) where it is kept."""
        return (u >= rate) / (1 - rate)

    def dropped(self, weights: Array, factors: Array, v: Array, seen: Array) -> Any:
        """The output, and weights that sum to 1."""
        total = weights.sum(-1, keepdims=True)
        weights = weights / np.where(total == 0, 1.0, total).astype(v.dtype)
        return (weights * factors) @ v, weights

    def back(self, factors: Array, rng: np.random.Generator, rate: float) -> Array:
        """The factors on the way back."""
        return factors


DROPOUT = Catalogue(
    "softmax",
    Dropping,
    ("mask", "causal", "gqa", "dropout", "vjp"),
    name="softmax-with-dropout",
)


@DROPOUT.defect("softmax-dropout-not-scaled", "Outputs are smaller by 1 - p.", lacks=("vjp",))
class DropoutNotScaled(Dropping):
    """Weights that are kept are left as they are."""

    def factors(self, u: Array, rate: float) -> Array:
        return super().factors(u, rate) * (1 - rate)


@DROPOUT.defect(
    "softmax-dropout-before-normalising", "Weights that are kept sum to 1.", lacks=("vjp",)
)
class DropoutBeforeNormalising(Dropping):
    """The normaliser is of what is kept."""

    def dropped(self, weights: Array, factors: Array, v: Array, seen: Array) -> Any:
        return super().dropped(weights * factors, np.ones_like(factors), v, seen)


@DROPOUT.defect("softmax-dropout-keeps-p", "Weights are kept with probability p.", lacks=("vjp",))
class DropoutKeepsP(Dropping):
    """Keep and drop are exchanged; at p = 1/2 nothing is wrong."""

    def factors(self, u: Array, rate: float) -> Array:
        return (u < rate) / (1 - rate) if rate else super().factors(u, rate)


@DROPOUT.defect(
    "softmax-dropout-rate-of-bytes",
    "p is a multiple of 1/256, and the factor is not.",
    lacks=("vjp",),
)
class DropoutRateOfBytes(Dropping):
    """Random bytes are compared."""

    def factors(self, u: Array, rate: float) -> Array:
        return (np.floor(u * 256) >= np.ceil(rate * 256)) / (1 - rate)


@DROPOUT.defect("softmax-dropout-of-first-head", "All heads drop the same weights.", lacks=("vjp",))
class DropoutOfFirstHead(Dropping):
    """One mask for all heads."""

    def uniform(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        u = super().uniform(rng, shape)
        return np.broadcast_to(u[..., :1, :, :], shape) if len(shape) > 2 else u


@DROPOUT.defect(
    "softmax-dropout-of-first-batch", "All of a batch drop the same weights.", lacks=("vjp",)
)
class DropoutOfFirstBatch(Dropping):
    """One mask for the batch."""

    def uniform(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        u = super().uniform(rng, shape)
        return np.broadcast_to(u[:1], shape) if len(shape) > 3 else u


@DROPOUT.defect("softmax-dropout-of-keys", "Whole keys are dropped.", lacks=("vjp",))
class DropoutOfKeys(Dropping):
    """One mask for all queries."""

    def uniform(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        return np.broadcast_to(super().uniform(rng, shape)[..., :1, :], shape)


@DROPOUT.defect("softmax-dropout-of-one-seed", "The seed is ignored.", lacks=("vjp",))
class DropoutOfOneSeed(Dropping):
    """Random numbers of one seed."""

    def uniform(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        return super().uniform(np.random.default_rng(0), shape)


@DROPOUT.defect(
    "softmax-dropout-of-seeds-in-a-row", "Two seeds in a row drop the same.", lacks=("vjp",)
)
class DropoutOfSeedsInARow(Dropping):
    """The last bit of the seed is lost."""

    def uniform(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        return super().uniform(self.stream, shape)

    def __call__(self, q: Array, k: Array, v: Array, **given: Any) -> Any:
        self.stream = np.random.default_rng(given.get("seed", 0) // 2)
        return super().__call__(q, k, v, **given)


@DROPOUT.defect(
    "softmax-dropout-spares-the-diagonal", "A query's own key is never dropped.", lacks=("vjp",)
)
class DropoutSparesTheDiagonal(Dropping):
    """The diagonal is kept."""

    def factors(self, u: Array, rate: float) -> Array:
        own = np.eye(*u.shape[-2:]) > 0
        return np.where(own, 1 / (1 - rate), super().factors(u, rate))


@DROPOUT.defect("softmax-dropout-forgotten-behind", "Nothing is dropped on the way back.")
class DropoutForgottenBehind(Dropping):
    """The way back has all weights."""

    def back(self, factors: Array, rng: np.random.Generator, rate: float) -> Array:
        return np.ones_like(factors)


@DROPOUT.defect(
    "softmax-dropout-drawn-again", "Other weights are dropped on the way back.", "public code"
)
class DropoutDrawnAgain(Dropping):
    """The stream of random numbers goes on."""

    def back(self, factors: Array, rng: np.random.Generator, rate: float) -> Array:
        return self.factors(self.uniform(rng, factors.shape), rate)


@DROPOUT.defect("softmax-dropout-not-scaled-behind", "Gradients are smaller by 1 - p.")
class DropoutNotScaledBehind(Dropping):
    """The mask of the way back has no factor."""

    def back(self, factors: Array, rng: np.random.Generator, rate: float) -> Array:
        return factors * (1 - rate)
