"""Mistakes with what is given in place of a draw: keys by their indices, a frequency of each chunk.

As black boxes these are right, or cannot be called.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import numpy as np

from .attention import Draws
from .catalogue import Catalogue
from .chunks import EVA
from .few_keys import Coreset, FromSoftmax, KeySample

Array = Any


class GivenEVA(EVA):
    """EVA at the frequencies of its chunks, shape (..., C, d)."""

    frequencies: Array = None

    def attend(self, q: Array, k: Array, v: Array, visible: Array, draws: Draws) -> Array:
        own = copy(self)
        own.frequencies = draws.omega
        return super(GivenEVA, own).attend(q, k, v, visible, draws)

    def omega(self, q: Array, k: Array, member: Array, queries: Array) -> Array:
        return self.frequencies


_INDICES = {"coreset": Coreset, "sampled-uniform": KeySample, "sampled-softmax": FromSoftmax}
CATALOGUES = {
    name: Catalogue(name, definition, ("gqa", "indices_only"), name=f"{name}-given")
    for name, definition in _INDICES.items()
} | {
    "eva-sampled": Catalogue(
        "eva-sampled", GivenEVA, ("causal", "gqa", "omega_only", "omega_per_head")
    )
}
_CORESET, _SAMPLE, _SOFTMAX, _EVA = CATALOGUES.values()


class OfFirstHead:
    """The indices of the first head are taken for all."""

    def of_place(self, x: Array, lead: tuple[int, ...], at: tuple[int, ...]) -> Array:
        return super().of_place(x, lead, tuple(0 * i for i in at))  # type: ignore[misc]


class InOrder:
    """The indices are put in order, and all else is left."""

    def of_place(self, x: Array, lead: tuple[int, ...], at: tuple[int, ...]) -> Array:
        given = super().of_place(x, lead, at)  # type: ignore[misc]
        return np.sort(given, -1) if given.dtype.kind == "i" else given


# Of coresets.


@_CORESET.variant("coreset-given-by-gaussians", "The Gaussian kernel, and a Cholesky factor.")
class ByGaussians(Coreset):
    """Correct: h = a g a', where g is of differences and a stays with queries and keys."""

    def of_head(
        self, q: Array, k: Array, v: Array, draws: Draws, rng: np.random.Generator
    ) -> Array:
        k, at = self.centred(k, draws.indices), draws.indices
        half = np.sum(k * k, -1) / 2
        gram = np.exp(k[at] @ k.T - half[at][:, None] - half)
        factor = np.linalg.cholesky(gram[:, at])
        a = np.exp(half - half.max())
        x = np.linalg.solve(factor.T, np.linalg.solve(factor, gram * a))
        scores = q @ k[at].T - half[at]
        return self.ratio(np.exp(scores - scores.max(-1, keepdims=True)), x, v, at)


_CORESET.defect("coreset-given-first-head", "Heads attend to keys of another.")(
    type("CoresetOfFirstHead", (OfFirstHead, Coreset), {})
)


@_CORESET.defect("coreset-given-ignored", "The first S keys, whatever is given.")
class FirstKeys(Coreset):
    """Indices are counted only."""

    def of_place(self, x: Array, lead: tuple[int, ...], at: tuple[int, ...]) -> Array:
        return None if x is None else np.arange(x.shape[-1])


@_CORESET.defect("coreset-given-means-of-chosen", "Moves with the choice of keys.")
class MeanOfChosen(Coreset):
    """The mean of the chosen keys is taken from all."""

    def centred(self, k: Array, chosen: Any) -> Array:
        return k - k[chosen].mean(-2, keepdims=True)


@_CORESET.defect("coreset-given-not-centred", "Far from the origin all keys look alike.")
class GivenNotCentred(Coreset):
    """Keys as they are."""

    def centred(self, k: Array, chosen: Any) -> Array:
        return k


@_CORESET.defect("coreset-given-norm-not-solved", "Weights do not sum to 1.")
class NormNotSolved(Coreset):
    """The normaliser is p h_JK 1: what is solved for is W v alone."""

    def of_head(
        self, q: Array, k: Array, v: Array, draws: Draws, rng: np.random.Generator
    ) -> Array:
        k, at = self.centred(k, draws.indices), draws.indices
        to_keys, scores = self.kernel(k[at], k), q @ k[at].T
        p = np.exp(scores - scores.max(-1, keepdims=True))
        weights = self.weights_of(self.kernel(k[at], k[at]), to_keys)
        return p @ weights @ v / (p @ to_keys).sum(-1, keepdims=True)


@_CORESET.defect("coreset-given-in-order", "Right where indices increase only.")
class SolvedInOrder(Coreset):
    """The kernel of the chosen keys is that of the same keys in order."""

    def of_head(
        self, q: Array, k: Array, v: Array, draws: Draws, rng: np.random.Generator
    ) -> Array:
        at: Array = draws.indices
        k = self.centred(k, at)
        chosen = k[np.sort(at)]
        weights = self.weights_of(self.kernel(chosen, chosen), self.kernel(k[at], k))
        scores = q @ k[at].T
        return self.ratio(np.exp(scores - scores.max(-1, keepdims=True)), weights, v, at)


@_CORESET.defect("coreset-given-negative-cut", "Weights below 0 are left out.", "clamps")
class NegativeCut(Coreset):
    """Weights of keys are positive."""

    def weights_of(self, chosen: Array, to_keys: Array) -> Array:
        return np.maximum(super().weights_of(chosen, to_keys), 0)


@_CORESET.defect("coreset-given-not-shifted", "Infinite where scores are large.")
class NotShifted(Coreset):
    """Exponentials of scores as they are."""

    def of_head(
        self, q: Array, k: Array, v: Array, draws: Draws, rng: np.random.Generator
    ) -> Array:
        k, at = self.centred(k, draws.indices), draws.indices
        weights = self.weights_of(self.kernel(k[at], k[at]), self.kernel(k[at], k))
        return self.ratio(np.exp(q @ k[at].T), weights, v, at)


@_CORESET.defect("coreset-given-norm-cut", "Wrong where the normaliser is negative.", "clamps")
class NormCut(Coreset):
    """The normaliser is at least 0.01 of the largest share."""

    def ratio(self, p: Array, weights: Array, v: Array, chosen: Array) -> Array:
        norm = np.sum(p @ weights, -1, keepdims=True)
        return p @ weights @ v / np.maximum(norm, np.asarray(0.01, norm.dtype))


# Of samples.


@_SAMPLE.variant("sampled-uniform-given-counts", "How often a key is given, and its probability.")
class Counts(KeySample):
    """Correct: each key once, with the sum over its places."""

    def given(self, indices: Array, log_p: Array) -> tuple[Array, Array]:
        kept, place, counts = np.unique(indices, return_index=True, return_counts=True)
        return kept[None], (log_p[place] - np.log(counts))[None]


for _name, _catalogue, _made in (
    ("sampled-uniform", _SAMPLE, KeySample),
    ("sampled-softmax", _SOFTMAX, FromSoftmax),
):
    _catalogue.defect(f"{_name}-given-first-head", "Heads attend to keys of another.")(
        type("SampleOfFirstHead", (OfFirstHead, _made), {})
    )
    _catalogue.defect(f"{_name}-given-in-order", "Keys have the probabilities of others.")(
        type("SampleInOrder", (InOrder, _made), {})
    )


@_SAMPLE.defect("sampled-uniform-given-probability-dropped", "Likely keys weigh too much.")
class ProbabilityDropped(KeySample):
    """Log probabilities are not read."""

    def divided(self, scores: Array, log_p: Array) -> Array:
        return scores + 0 * log_p


@_SAMPLE.defect("sampled-uniform-given-multiplied", "Likely keys weigh too much, twice over.")
class ProbabilityMultiplied(KeySample):
    """The wrong sign."""

    def divided(self, scores: Array, log_p: Array) -> Array:
        return scores + log_p


@_SAMPLE.defect("sampled-uniform-given-base-2", "Unlikely keys weigh too little.")
class BaseTwo(KeySample):
    """Logarithms are taken to be to base 2."""

    def divided(self, scores: Array, log_p: Array) -> Array:
        return scores - np.log(2).astype(scores.dtype) * log_p


@_SAMPLE.defect("sampled-uniform-given-once", "A key that comes twice counts once.")
class Once(KeySample):
    """Indices are made a set."""

    def given(self, indices: Array, log_p: Array) -> tuple[Array, Array]:
        kept, place = np.unique(indices, return_index=True)
        return kept[None], log_p[place][None]


@_SAMPLE.defect("sampled-uniform-given-exponentials", "Infinite where probabilities are tiny.")
class Exponentials(KeySample):
    """Weights are divided by probabilities, not by their logarithms."""

    def weights_of(self, scores: Array, log_p: Array) -> Array:
        return np.exp(scores - scores.max(-1, keepdims=True)) / np.exp(log_p)


@_SAMPLE.defect(
    "sampled-uniform-given-counts-cut", "Keys that are likely weigh too much.", "clamps"
)
class CountsCut(KeySample):
    """No key is expected more than once."""

    def divided(self, scores: Array, log_p: Array) -> Array:
        return scores - np.minimum(log_p, np.zeros((), log_p.dtype))


@_SAMPLE.defect("sampled-uniform-given-clamped", "Tiny probabilities are not so tiny.", "clamps")
class Clamped(KeySample):
    """Probabilities are at least 1e-9."""

    def divided(self, scores: Array, log_p: Array) -> Array:
        return scores - np.maximum(log_p, np.log(1e-9).astype(log_p.dtype))


@_SOFTMAX.defect("sampled-softmax-given-first-query", "Queries attend to keys of another.")
class OfFirstQuery(FromSoftmax):
    """One sample for all queries of a head."""

    def given(self, indices: Array, log_p: Array) -> tuple[Array, Array]:
        return indices[:1], log_p[:1]


@_SOFTMAX.defect("sampled-softmax-given-weighed-twice", "Keys of large scores count twice.")
class GivenWeighedTwice(FromSoftmax):
    """The probabilities are left out."""

    def divided(self, scores: Array, log_p: Array) -> Array:
        return scores + 0 * log_p


# Of frequencies of chunks.


@_EVA.defect("eva-sampled-given-ignored", "Every seed gives the same.")
class OmegaIgnored(GivenEVA):
    """The mean of the law in place of what is given."""

    def omega(self, q: Array, k: Array, member: Array, queries: Array) -> Array:
        return self.mean(q, queries) + self.mean(k, member)


@_EVA.defect("eva-sampled-given-as-noise", "Frequencies are too far out.")
class OmegaAsNoise(GivenEVA):
    """The mean of the law is added to what is given."""

    def omega(self, q: Array, k: Array, member: Array, queries: Array) -> Array:
        return self.frequencies + self.mean(q, queries) + self.mean(k, member)


@_EVA.defect("eva-sampled-given-next", "Chunks have the frequencies of others.")
class OmegaOfNext(GivenEVA):
    """Off by one chunk."""

    def omega(self, q: Array, k: Array, member: Array, queries: Array) -> Array:
        return np.roll(self.frequencies, 1, -2)


@_EVA.defect("eva-sampled-given-scaled", "Frequencies d^(1/4) too small.")
class OmegaScaled(GivenEVA):
    """What is given is scaled as queries and keys are."""

    def omega(self, q: Array, k: Array, member: Array, queries: Array) -> Array:
        return self.root(k.shape[-1]) * self.frequencies


@_EVA.defect("eva-sampled-given-first-head", "Heads share the frequencies of one.")
class OmegaOfFirstHead(GivenEVA):
    """Frequencies of the first head for all."""

    def omega(self, q: Array, k: Array, member: Array, queries: Array) -> Array:
        return self.frequencies.reshape(-1, *self.frequencies.shape[-2:])[0]
