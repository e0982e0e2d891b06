"""Backward passes step by step, and the mistakes that they have been seen to make.

The forward pass is right. With weights p, cotangents g of the output, t = g . v and
delta = g . out, pairs take p (t - delta); of these come the cotangents of queries and keys, and of
p those of values. Functions take `d_out` and then return (out, dq, dk, dv).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import linear, rfa, softmax
from .attention import Attention, Draws, log_sum_exp
from .catalogue import Catalogue

Array = Any


def turned(x: Array) -> Array:
    """The last two axes exchanged."""
    return x.swapaxes(-1, -2)


class Backward(Attention):
    """Attention whose weights come from the logarithms of a kernel, forth and back."""

    def __call__(self, q: Array, k: Array, v: Array, *, d_out: Array = None, **options: Any) -> Any:
        out = super().__call__(q, k, v, **options)
        if d_out is None:
            return out
        mask, causal = options.get("mask"), options.get("causal", False)
        draws = Draws(options.get("omega"), None, None, None)
        with np.errstate(all="ignore"):
            found = self.pull(q, k, v, d_out, out, self.behind(q, k, mask, causal), draws)
        return (out, *(x.astype(q.dtype) for x in found))

    def behind(self, q: Array, k: Array, mask: Array | None, causal: bool) -> Array:
        """Which query sees which key, on the way back."""
        return self.visible(q.shape[-2], k.shape[-2], mask, causal)

    def pull(
        self, q: Array, k: Array, v: Array, d_out: Array, out: Array, visible: Array, draws: Draws
    ) -> tuple[Array, Array, Array]:
        """Cotangents of queries, keys and values."""
        held = visible.any(-2)[..., None]  # by some query: what others hold may be anything
        keys, values = (np.where(held, self.share(q, x), 0.0) for x in (k, v))
        p = self.shares(self.log_pairs(q, keys, draws), visible)
        t = self.products(d_out, values)
        pairs = self.pairs(p, t, self.delta(d_out, out, p, t))
        return (
            self.to_queries(pairs, q, keys, draws),
            self.gathered(self.to_keys(pairs, q, keys, draws), k),
            self.gathered(self.to_values(p, d_out), v),
        )

    def log_pairs(self, q: Array, k: Array, draws: Draws) -> Array:
        """Logarithm of the kernel of each pair, shape (..., n, m)."""
        raise NotImplementedError

    def shares(self, log_kernel: Array, visible: Array) -> Array:
        """Weights that sum to 1, 0 where hidden."""
        scores = np.where(visible, log_kernel, -np.inf)
        top = scores.max(-1, keepdims=True, initial=-np.inf)
        weights = np.exp(scores - np.where(np.isfinite(top), top, 0.0))
        total = weights.sum(-1, keepdims=True)
        return weights / np.where(total == 0, 1.0, total)

    def products(self, d_out: Array, v: Array) -> Array:
        """g . v of each pair."""
        return d_out @ turned(v)

    def delta(self, d_out: Array, out: Array, p: Array, t: Array) -> Array:
        """g . out of each query, shape (..., n, 1)."""
        return (d_out * out).sum(-1, keepdims=True)

    def pairs(self, p: Array, t: Array, delta: Array) -> Array:
        """Cotangents of the logarithms of the kernel."""
        return p * (t - delta)

    def to_queries(self, pairs: Array, q: Array, k: Array, draws: Draws) -> Array:
        """Cotangents of queries."""
        raise NotImplementedError

    def to_keys(self, pairs: Array, q: Array, k: Array, draws: Draws) -> Array:
        """Cotangents of keys, for each head of queries."""
        raise NotImplementedError

    def to_values(self, p: Array, d_out: Array) -> Array:
        """Cotangents of values, for each head of queries."""
        return turned(p) @ d_out

    def gathered(self, x: Array, like: Array) -> Array:
        """Sum over the query heads that share a head of keys or values."""
        if x.shape == like.shape:
            return x
        groups = like.shape[-3]
        return x.reshape(*x.shape[:-3], groups, x.shape[-3] // groups, *x.shape[-2:]).sum(-3)


class Softmax(Backward, softmax.Softmax):
    """Exact attention."""

    def log_pairs(self, q: Array, k: Array, draws: Draws) -> Array:
        return self.scale(q.shape[-1]) * (q @ turned(k))

    def to_queries(self, pairs: Array, q: Array, k: Array, draws: Draws) -> Array:
        return self.scale(q.shape[-1]) * (pairs @ k)

    def to_keys(self, pairs: Array, q: Array, k: Array, draws: Draws) -> Array:
        return self.scale(q.shape[-1]) * (turned(pairs) @ q)


class RandomFeatures(Backward, rfa.RFA):
    """Attention from positive random features, at given frequencies."""

    norm = 1.0  # of |k|^2 / 2 in the gradient

    def log_pairs(self, q: Array, k: Array, draws: Draws) -> Array:
        return log_sum_exp(self.exponents(q, k, draws))

    def exponents(self, q: Array, k: Array, draws: Draws) -> Array:
        """Of features of pairs, shape (..., n, m, S)."""
        root = q.shape[-1] ** -0.25
        x, y = (root * (z @ turned(draws.omega)) for z in (q, k))
        y = y - root * root * (k * k).sum(-1, keepdims=True) / 2
        return x[..., :, None, :] + y[..., None, :, :]

    def features(self, pairs: Array, q: Array, k: Array, draws: Draws) -> Array:
        """Cotangents of exponents, shape (..., n, m, S)."""
        x = self.exponents(q, k, draws)
        return pairs[..., None] * np.exp(x - log_sum_exp(x)[..., None])

    def to_queries(self, pairs: Array, q: Array, k: Array, draws: Draws) -> Array:
        moved = self.features(pairs, q, k, draws).sum(-2)
        return q.shape[-1] ** -0.25 * (moved @ draws.omega)

    def to_keys(self, pairs: Array, q: Array, k: Array, draws: Draws) -> Array:
        moved, root = self.features(pairs, q, k, draws).sum(-3), q.shape[-1] ** -0.25
        return root * (moved @ draws.omega) - self.norm * root**2 * moved.sum(-1, keepdims=True) * k


class Linear(Backward, linear.Linear):
    """Linear attention with features elu + 1."""

    def log_pairs(self, q: Array, k: Array, draws: Draws) -> Array:
        return np.log(self.kernel(q, k))

    def kernel(self, q: Array, k: Array) -> Array:
        """phi(q) . phi(k)."""
        return self.phi(q) @ turned(self.phi_k(k))

    def slope(self, x: Array) -> Array:
        """Derivative of the features."""
        return np.where(x > 0, 1.0, np.exp(np.minimum(x, 0)))

    def to_queries(self, pairs: Array, q: Array, k: Array, draws: Draws) -> Array:
        return self.slope(q) * ((pairs / self.kernel(q, k)) @ self.phi_k(k))

    def to_keys(self, pairs: Array, q: Array, k: Array, draws: Draws) -> Array:
        return self.slope(k) * (turned(pairs / self.kernel(q, k)) @ self.phi(q))


_SEES = ("mask", "causal", "gqa", "vjp")
CATALOGUES = {
    "softmax": Catalogue("softmax", Softmax, _SEES, name="softmax-backward"),
    "rfa": Catalogue("rfa", RandomFeatures, ("omega_only", *_SEES), name="rfa-backward"),
    "linear": Catalogue("linear", Linear, _SEES, {"feature_map": "elu"}, name="linear-backward"),
}
_ALL = tuple(CATALOGUES)
Kind = type[Backward]


def _entered(kind: str, name: str, estimators: tuple[str, ...], *words: str) -> Any:
    def enter(made: Kind) -> Kind:
        for estimator in estimators:
            catalogue = CATALOGUES[estimator]
            own = type(f"{estimator}{made.__name__}", (made, catalogue.definition), {})
            getattr(catalogue, kind)(f"{estimator}-backward-{name}", *words)(own)
        return made

    return enter


def variant(name: str, estimators: tuple[str, ...], effect: str) -> Callable[[Kind], Kind]:
    """Enter estimators with a step that is right."""
    entered: Callable[[Kind], Kind] = _entered("variant", name, estimators, effect)
    return entered


def defect(
    name: str, estimators: tuple[str, ...], effect: str, seen: str = ""
) -> Callable[[Kind], Kind]:
    """Enter estimators with a step that is wrong."""
    entered: Callable[[Kind], Kind] = _entered("defect", name, estimators, effect, seen)
    return entered


# Right.


@variant("of-weights", _ALL, "delta from weights and products.")
class DeltaOfWeights(Backward):
    """Correct: delta is the mean of t, which out need not be kept for."""

    def delta(self, d_out: Array, out: Array, p: Array, t: Array) -> Array:
        return (p * t).sum(-1, keepdims=True)


@variant("by-blocks", _ALL, "Values' cotangents from blocks of 32 queries.")
class ByBlocks(Backward):
    """Correct: the sum over queries is made in blocks."""

    def to_values(self, p: Array, d_out: Array) -> Array:
        n, total = p.shape[-2], 0.0
        for i in range(0, n, 32):
            total = total + turned(p[..., i : i + 32, :]) @ d_out[..., i : i + 32, :]
        return total


# The normaliser.


@defect("delta-dropped", _ALL, "Weights move as if the normaliser did not.", "public code")
class DeltaDropped(Backward):
    """delta is left out."""

    def delta(self, d_out: Array, out: Array, p: Array, t: Array) -> Array:
        return np.zeros_like(t[..., :1])


@defect("delta-of-rounded-output", _ALL, "Three digits of dq and dk.", "public code")
class DeltaOfRoundedOutput(Backward):
    """delta is made of an output that was rounded to half precision."""

    def delta(self, d_out: Array, out: Array, p: Array, t: Array) -> Array:
        return super().delta(d_out, out.astype(np.float16).astype(out.dtype), p, t)


@defect("delta-unweighted", _ALL, "delta is the plain mean of products.")
class DeltaUnweighted(Backward):
    """The mean over keys forgets the weights."""

    def delta(self, d_out: Array, out: Array, p: Array, t: Array) -> Array:
        return t.mean(-1, keepdims=True)


@defect("delta-of-the-first-query", _ALL, "One delta for all queries.")
class DeltaOfTheFirstQuery(Backward):
    """delta is read without the offset of its row."""

    def delta(self, d_out: Array, out: Array, p: Array, t: Array) -> Array:
        return super().delta(d_out, out, p, t)[..., :1, :]


@defect("delta-sign", _ALL, "delta is added.")
class DeltaSign(Backward):
    """delta has the wrong sign."""

    def pairs(self, p: Array, t: Array, delta: Array) -> Array:
        return p * (t + delta)


@defect(
    "normaliser-constant-for-keys",
    _ALL,
    "dk as if the normaliser were constant; dq and dv are right.",
    "normalised linear attention",
)
class NormaliserConstantForKeys(Backward):
    """dk of what is not normalised."""

    def to_keys(self, pairs: Array, q: Array, k: Array, draws: Draws) -> Array:
        return super().to_keys(self.without, q, k, draws)

    def pairs(self, p: Array, t: Array, delta: Array) -> Array:
        self.without = p * t
        return super().pairs(p, t, delta)


@defect("normaliser-constant-for-queries", _ALL, "The same of dq.")
class NormaliserConstantForQueries(NormaliserConstantForKeys):
    """dq of what is not normalised."""

    def to_keys(self, pairs: Array, q: Array, k: Array, draws: Draws) -> Array:
        return super(NormaliserConstantForKeys, self).to_keys(pairs, q, k, draws)

    def to_queries(self, pairs: Array, q: Array, k: Array, draws: Draws) -> Array:
        return super().to_queries(self.without, q, k, draws)


@defect("weights-not-normalised", _ALL, "dv is larger than it should be.")
class WeightsNotNormalised(Backward):
    """dv takes exponentials over the largest, not weights."""

    def to_values(self, p: Array, d_out: Array) -> Array:
        top = p.max(-1, keepdims=True)
        return super().to_values(p / np.where(top == 0, 1.0, top), d_out)


@defect("epsilon", _ALL, "Weights of the way back are smaller by up to 1e-3.")
class Epsilon(Backward):
    """1e-3 is added to the normaliser on the way back only."""

    def shares(self, log_kernel: Array, visible: Array) -> Array:
        return super().shares(log_kernel, visible) / (1 + 1e-3)


@defect("weights-in-half-precision", _ALL, "Three digits.")
class WeightsInHalfPrecision(Backward):
    """Weights were kept in half precision."""

    def shares(self, log_kernel: Array, visible: Array) -> Array:
        p = super().shares(log_kernel, visible)
        return p.astype(np.float16).astype(p.dtype)


@defect("products-in-half-precision", _ALL, "Three digits of dq and dk.")
class ProductsInHalfPrecision(Backward):
    """Products of cotangents and values are rounded to half precision."""

    def products(self, d_out: Array, v: Array) -> Array:
        t = super().products(d_out, v)
        return t.astype(np.float16).astype(t.dtype)


@defect("dropout-of-its-own", _ALL, "Every tenth weight is dropped on the way back only.")
class DropoutOfItsOwn(Backward):
    """The mask of the way back is not that of the way forth."""

    def shares(self, log_kernel: Array, visible: Array) -> Array:
        p = super().shares(log_kernel, visible)
        kept = (np.arange(p.shape[-2])[:, None] + np.arange(p.shape[-1])) % 10 > 0
        return p * kept / 0.9


@defect("not-stabilised", ("softmax", "rfa"), "NaN where scores are large.")
class NotStabilised(Backward):
    """Weights are computed again without a maximum."""

    def shares(self, log_kernel: Array, visible: Array) -> Array:
        weights = np.where(visible, np.exp(log_kernel), 0.0)
        total = weights.sum(-1, keepdims=True)
        return weights / np.where(total == 0, 1.0, total)


@defect("clamped", ("softmax", "rfa"), "No gradient where scores are beyond 20.")
class Clamped(Backward):
    """The gradient goes through a clamp that never acts on the way forth."""

    def pull(
        self, q: Array, k: Array, v: Array, d_out: Array, out: Array, visible: Array, draws: Draws
    ) -> tuple[Array, Array, Array]:
        self.inside = np.abs(self.log_pairs(q, self.share(q, k), draws)) < 20
        return super().pull(q, k, v, d_out, out, visible, draws)

    def pairs(self, p: Array, t: Array, delta: Array) -> Array:
        return super().pairs(p, t, delta) * self.inside


@defect("short-log2e", ("softmax",), "A temperature off by three millionths, on the way back.")
class ShortLog2E(Backward):
    """Powers of 2 with log2(e) taken for 1.4427 on the way back only."""

    def shares(self, log_kernel: Array, visible: Array) -> Array:
        return super().shares(log_kernel * (1.4427 * np.log(2.0)), visible)


# What is seen.


class Edge(Backward):
    """Causal attention whose edge is elsewhere on the way back."""

    def behind(self, q: Array, k: Array, mask: Array | None, causal: bool) -> Array:
        n, m = q.shape[-2], k.shape[-2]
        seen = self.visible(n, m, mask, False)
        return seen & np.tri(n, m, self.edge(m - n), dtype=bool) if causal else seen

    def edge(self, shift: int) -> int:
        """How far the first query sees; `shift` is where it should be."""
        return shift


@defect("causal-ahead", _ALL, "The way back sees one key more.", "public code")
class CausalAhead(Edge):
    """The edge is one to the right on the way back only."""

    def edge(self, shift: int) -> int:
        return shift + 1


@defect("causal-strict", _ALL, "The way back does not see a query's own key.")
class CausalStrict(Edge):
    """The edge is one to the left on the way back only."""

    def edge(self, shift: int) -> int:
        return shift - 1


@defect("causal-ignored", _ALL, "The way back sees the future.")
class CausalIgnored(Backward):
    """Nothing is causal on the way back."""

    def behind(self, q: Array, k: Array, mask: Array | None, causal: bool) -> Array:
        return super().behind(q, k, mask, False)


@defect("causal-top-left", _ALL, "With more keys than queries the way back sees others.")
class CausalTopLeft(Edge):
    """The way back is aligned at the first token."""

    def edge(self, shift: int) -> int:
        return 0


@defect("mask-ignored", _ALL, "Padding takes gradients.")
class MaskIgnored(Backward):
    """There is no mask on the way back."""

    def behind(self, q: Array, k: Array, mask: Array | None, causal: bool) -> Array:
        return super().behind(q, k, None, causal)


@defect("mask-of-first-query", _ALL, "All queries have the mask of the first on the way back.")
class MaskOfFirstQuery(Backward):
    """A mask of each query is read as one of keys."""

    def behind(self, q: Array, k: Array, mask: Array | None, causal: bool) -> Array:
        own = mask[..., :1, :] if mask is not None and mask.ndim > 1 else mask
        return super().behind(q, k, own, causal)


@defect("mask-dropped-when-causal", _ALL, "With both, padding takes gradients.")
class MaskDroppedWhenCausal(Backward):
    """Causal attention forgets the mask on the way back."""

    def behind(self, q: Array, k: Array, mask: Array | None, causal: bool) -> Array:
        return super().behind(q, k, None if causal else mask, causal)


@defect("one-query-unmasked", _ALL, "Decoding takes gradients of padding.")
class OneQueryUnmasked(Backward):
    """A path of its own for one query forgets the mask on the way back."""

    def behind(self, q: Array, k: Array, mask: Array | None, causal: bool) -> Array:
        return super().behind(q, k, None if q.shape[-2] == 1 else mask, causal)


# Heads.


@defect("group-not-summed", _ALL, "dk and dv of the first query head of a group.", "public code")
class GroupNotSummed(Backward):
    """Query heads that share a key head are not summed."""

    def gathered(self, x: Array, like: Array) -> Array:
        if x.shape == like.shape:
            return x
        return x[..., :: x.shape[-3] // like.shape[-3], :, :]


@defect("group-averaged", _ALL, "dk and dv too small by the number of heads in a group.")
class GroupAveraged(Backward):
    """The mean over a group, not the sum."""

    def gathered(self, x: Array, like: Array) -> Array:
        return super().gathered(x, like) * (like.shape[-3] / x.shape[-3] if x.ndim > 2 else 1)


@defect("group-interleaved", _ALL, "dk and dv of other heads.")
class GroupInterleaved(Backward):
    """Heads h, h + G, ... are summed."""

    def gathered(self, x: Array, like: Array) -> Array:
        if x.shape == like.shape:
            return x
        groups = like.shape[-3]
        return x.reshape(*x.shape[:-3], x.shape[-3] // groups, groups, *x.shape[-2:]).sum(-4)


@defect("first-of-batch", _ALL, "Every member of a batch gets dk of the first.")
class FirstOfBatch(Backward):
    """The batch has no stride in dk."""

    def gathered(self, x: Array, like: Array) -> Array:
        x = super().gathered(x, like)
        return np.broadcast_to(x[:1], x.shape) if x.ndim > 3 else x


# Blocks.


@defect("last-block-of-queries-lost", _ALL, "dk and dv lack queries past the last whole block.")
class LastBlockOfQueriesLost(Backward):
    """Queries past the last multiple of 64 add nothing to keys and values."""

    def to_keys(self, pairs: Array, q: Array, k: Array, draws: Draws) -> Array:
        return super().to_keys(self.whole(pairs), q, k, draws)

    def to_values(self, p: Array, d_out: Array) -> Array:
        return super().to_values(self.whole(p), d_out)

    def whole(self, pairs: Array) -> Array:
        """Zeros for what is left over."""
        n = pairs.shape[-2]
        kept = np.arange(n)[:, None] < (n - n % 64 if n > 64 else n)
        return pairs * kept


@defect("last-block-of-keys-lost", _ALL, "dq lacks keys past the last whole block.", "public code")
class LastBlockOfKeysLost(Backward):
    """Keys past the last multiple of 64 add nothing to queries."""

    def to_queries(self, pairs: Array, q: Array, k: Array, draws: Draws) -> Array:
        m = pairs.shape[-1]
        kept = np.arange(m) < (m - m % 64 if m > 64 else m)
        return super().to_queries(pairs * kept, q, k, draws)


@defect("blocks-overwrite", _ALL, "dv has the last block of queries only.", "lost atomics")
class BlocksOverwrite(Backward):
    """Blocks of 128 queries overwrite dv, where they should be added."""

    def to_values(self, p: Array, d_out: Array) -> Array:
        first = (p.shape[-2] - 1) // 128 * 128
        return super().to_values(p[..., first:, :], d_out[..., first:, :])


@defect("diagonal-twice", _ALL, "dv counts the first 16 queries of a long sequence twice.")
class DiagonalTwice(Backward):
    """The first tile is added by two programs."""

    def to_values(self, p: Array, d_out: Array) -> Array:
        total = super().to_values(p, d_out)
        if p.shape[-2] > 100:
            total = total + turned(p[..., :16, :]) @ d_out[..., :16, :]
        return total


@defect("last-query-lost", _ALL, "dq of the last query is 0.")
class LastQueryLost(Backward):
    """The last row of dq is not written."""

    def to_queries(self, pairs: Array, q: Array, k: Array, draws: Draws) -> Array:
        found = super().to_queries(pairs, q, k, draws).copy()
        found[..., -1, :] = 0.0
        return found


# Cotangents.


@defect("cotangents-of-first-column", _ALL, "Values of one column only.")
class CotangentsOfFirstColumn(Backward):
    """The cotangent of the first column stands for all in products."""

    def products(self, d_out: Array, v: Array) -> Array:
        return super().products(np.broadcast_to(d_out[..., :1], d_out.shape), v)


@defect("cotangents-are-ones", _ALL, "The gradient of the sum, whatever the loss.")
class CotangentsAreOnes(Backward):
    """Cotangents are taken for 1."""

    def pull(
        self, q: Array, k: Array, v: Array, d_out: Array, out: Array, visible: Array, draws: Draws
    ) -> tuple[Array, Array, Array]:
        return super().pull(q, k, v, np.ones_like(d_out), out, visible, draws)


@defect("values-keep-cotangents", _ALL, "dv is normalised over queries.")
class ValuesKeepCotangents(Backward):
    """Weights are normalised again over queries for dv."""

    def to_values(self, p: Array, d_out: Array) -> Array:
        total = p.sum(-2, keepdims=True)
        return super().to_values(p / np.where(total == 0, 1.0, total), d_out)


# Scores of exact attention.


@defect("scale-missing-in-dq", ("softmax",), "dq is too large by the root of d.")
class ScaleMissingInDq(Softmax):
    """dq lacks the scale."""

    def to_queries(self, pairs: Array, q: Array, k: Array, draws: Draws) -> Array:
        return pairs @ k


@defect("scale-missing-in-dk", ("softmax",), "dk is too large by the root of d.")
class ScaleMissingInDk(Softmax):
    """dk lacks the scale."""

    def to_keys(self, pairs: Array, q: Array, k: Array, draws: Draws) -> Array:
        return turned(pairs) @ q


@defect("scale-twice-in-dk", ("softmax",), "dk is too small by the root of d.", "public code")
class ScaleTwiceInDk(Softmax):
    """dk is made of queries that have the scale, and has it again."""

    def to_keys(self, pairs: Array, q: Array, k: Array, draws: Draws) -> Array:
        return self.scale(q.shape[-1]) * super().to_keys(pairs, q, k, draws)


@defect("scale-of-dq-off", ("softmax",), "dq is 0.2 % too large.")
class ScaleOfDqOff(Softmax):
    """The scale of dq is 1.002 times what it should be."""

    def to_queries(self, pairs: Array, q: Array, k: Array, draws: Draws) -> Array:
        return 1.002 * super().to_queries(pairs, q, k, draws)


@defect("exchanged", ("softmax",), "dk is made of weights that are not turned.")
class Exchanged(Softmax):
    """Of as many queries as keys, rows and columns are exchanged in dk."""

    def to_keys(self, pairs: Array, q: Array, k: Array, draws: Draws) -> Array:
        square = pairs.shape[-1] == pairs.shape[-2]
        return super().to_keys(turned(pairs) if square else pairs, q, k, draws)


# Random features.


@defect("norm-forgotten", ("rfa",), "dk lacks -|k|^2/2.", "public code")
class NormForgotten(RandomFeatures):
    """The norms of keys count as constant."""

    norm = 0.0


@defect("norm-halved", ("rfa",), "dk has half of -|k|^2/2.")
class NormHalved(RandomFeatures):
    """The derivative of |k|^2/2 is taken for k/2."""

    norm = 0.5


@defect("norm-sign", ("rfa",), "dk has +|k|^2/2.")
class NormSign(RandomFeatures):
    """The norm of keys pulls the wrong way."""

    norm = -1.0


@defect("norm-of-queries", ("rfa",), "dq has a norm that cancels.")
class NormOfQueries(RandomFeatures):
    """Each query is pulled by its own norm, as if weights did not sum to 1."""

    def to_queries(self, pairs: Array, q: Array, k: Array, draws: Draws) -> Array:
        own = np.abs(pairs).sum(-1, keepdims=True)
        return super().to_queries(pairs, q, k, draws) - 1e-2 * own * q


@defect("root-missing", ("rfa",), "dq is too large by d^(1/4).")
class RootMissing(RandomFeatures):
    """dq is left in kernel coordinates."""

    def to_queries(self, pairs: Array, q: Array, k: Array, draws: Draws) -> Array:
        return q.shape[-1] ** 0.25 * super().to_queries(pairs, q, k, draws)


@defect("last-state", ("rfa", "linear"), "Causal dv reads sums over all queries.")
class LastState(Backward):
    """Causal sums over later queries are taken over all."""

    def to_values(self, p: Array, d_out: Array) -> Array:
        total = super().to_values(p, d_out)
        causal = p.shape[-2] > 1 and not p[..., 0, -1:].any()
        return np.broadcast_to(total[..., :1, :], total.shape) if causal else total


@defect("stabiliser", ("rfa",), "The maximum that is subtracted takes gradients.")
class Stabiliser(RandomFeatures):
    """The largest exponent of a key is subtracted, and pulls at it."""

    def to_keys(self, pairs: Array, q: Array, k: Array, draws: Draws) -> Array:
        found = super().to_keys(pairs, q, k, draws)
        best = np.argmax(k @ turned(draws.omega), -1)
        omega = np.asarray(draws.omega)
        omega = np.broadcast_to(omega, (*k.shape[:-2], *omega.shape[-2:]))
        way = np.take_along_axis(omega, best[..., None], -2)
        return found - 1e-2 * np.abs(pairs).sum(-2)[..., None] * way


# Linear attention.


@defect("slope-of-elu", ("linear",), "Features below 0 have slope 1.")
class SlopeOfElu(Linear):
    """The slope of elu is 1 everywhere."""

    def slope(self, x: Array) -> Array:
        return np.ones_like(x)


@defect("slope-of-relu", ("linear",), "Features below 0 have slope 0.")
class SlopeOfRelu(Linear):
    """The slope of elu is that of ReLU."""

    def slope(self, x: Array) -> Array:
        return (x > 0).astype(x.dtype)


@defect("slope-of-keys-forgotten", ("linear",), "dk is of features, not of keys.")
class SlopeOfKeysForgotten(Linear):
    """dk lacks the slope."""

    def to_keys(self, pairs: Array, q: Array, k: Array, draws: Draws) -> Array:
        return turned(pairs / self.kernel(q, k)) @ self.phi(q)
