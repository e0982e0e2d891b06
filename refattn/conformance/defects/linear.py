"""Linear attention."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...naive import elu_plus_one
from .attention import Attention, Draws
from .catalogue import Catalogue

Array = Any


class Linear(Attention):
    """Linear attention with features elu(x) + 1."""

    def phi(self, x: Array) -> Array:
        """1 + x for positive x, exp(x) for others."""
        return elu_plus_one(x)

    def phi_k(self, k: Array) -> Array:
        """Features of the keys."""
        return self.phi(k)

    def weights(self, q: Array, k: Array, visible: Array, draws: Draws) -> Array:
        return np.where(visible, self.phi(q) @ self.phi_k(k).swapaxes(-1, -2), 0)


CATALOGUE = Catalogue("linear", Linear, ("mask", "causal", "gqa"), {"feature_map": "elu"})


@CATALOGUE.variant("linear-recurrent", "A state updated key by key.")
class LinearRecurrent(Linear):
    """Correct: one key after the other is added to a state that each query reads."""

    def attend(self, q: Array, k: Array, v: Array, visible: Array, draws: Draws) -> Array:
        f, g = self.phi(q), self.phi_k(k)
        out = total = np.zeros((1, 1), q.dtype)
        for j in range(k.shape[-2]):
            seen = visible[..., j, None]
            w = np.where(seen, (f * g[..., None, j, :]).sum(-1, keepdims=True), 0)
            total, out = total + w, out + w * np.where(seen, v[..., None, j, :], 0)
        return out / np.where(visible.any(-1, keepdims=True), total, 1).astype(v.dtype)


@CATALOGUE.defect(
    "linear-elu-cancels",
    "Features of x lose digits below 0: none is left at -17 in float32, at -38 in float64.",
    "flash-linear-attention",
)
class Cancelling(Linear):
    """(exp(x) - 1) + 1."""

    def phi(self, x: Array) -> Array:
        return np.where(x > 0, x, np.expm1(np.minimum(x, 0))) + x.dtype.type(1)


@CATALOGUE.defect("linear-elu-without-one", "Weights of both signs.")
class EluWithoutOne(Linear):
    """elu(x), which has both signs."""

    def phi(self, x: Array) -> Array:
        return np.where(x > 0, x, np.expm1(np.minimum(x, 0)))


@CATALOGUE.defect("linear-elu-alpha-.1", "Features never below .9.", "a published notebook")
class EluTenth(Linear):
    """elu with alpha = .1, plus 1."""

    def phi(self, x: Array) -> Array:
        return 1 + np.where(x > 0, x, 0.1 * np.expm1(np.minimum(x, 0))).astype(x.dtype)


@CATALOGUE.defect("linear-elu-blended", "NaN for entries above 709.", "a published notebook")
class EluBlended(Linear):
    """Both branches times 0 or 1, and 0 times infinity is NaN."""

    def phi(self, x: Array) -> Array:
        return (x > 0) * (x + 1) + (x <= 0) * np.exp(x)


@CATALOGUE.defect("linear-relu", "Negative entries are ignored.")
class Relu(Linear):
    """max(x, 0) for elu(x) + 1."""

    def phi(self, x: Array) -> Array:
        return np.maximum(x, 0)


@CATALOGUE.defect("linear-exponential", "Another kernel.")
class Exponential(Linear):
    """exp(x) for elu(x) + 1."""

    def phi(self, x: Array) -> Array:
        return np.exp(x)


@CATALOGUE.defect("linear-features-clamped", "Features below 1e-4 all count alike.")
class FeaturesClamped(Linear):
    """Features are at least 1e-4."""

    def phi(self, x: Array) -> Array:
        return np.maximum(super().phi(x), x.dtype.type(1e-4))


@CATALOGUE.defect("linear-epsilon-in-both", "Tiny features all count alike, and outputs shrink.")
class LinearEpsilonInBoth(Linear):
    """1e-6 is added to each feature and to the normaliser."""

    def phi(self, x: Array) -> Array:
        return super().phi(x) + x.dtype.type(1e-6)

    def total(self, weights: Array, visible: Array) -> Array:
        return super().total(weights, visible) + 1e-6


@CATALOGUE.defect("linear-softplus", "Another kernel.")
class Softplus(Linear):
    """log(1 + e^x) for elu(x) + 1."""

    def phi(self, x: Array) -> Array:
        return np.logaddexp(x, x.dtype.type(0))


@CATALOGUE.defect("linear-scaled", "Features flatter than asked for.")
class LinearScaled(Linear):
    """The scale of softmax attention is applied to queries and keys."""

    def phi(self, x: Array) -> Array:
        return super().phi(x * x.dtype.type(x.shape[-1] ** -0.25))


@CATALOGUE.defect("linear-keys-without-map", "Weights of both signs.")
class KeysWithoutMap(Linear):
    """The map is applied to the queries only."""

    def phi_k(self, k: Array) -> Array:
        return k


@CATALOGUE.defect("linear-keys-normalised", "Keys of large features weigh too little.")
class KeysNormalised(Linear):
    """Features of keys are divided by their sum over the features."""

    def phi_k(self, k: Array) -> Array:
        phi = self.phi(k)
        return phi / phi.sum(-1, keepdims=True)


@CATALOGUE.defect("linear-not-normalised", "Outputs grow with the number of keys.")
class NotNormalised(Linear):
    """The normaliser is left out."""

    def total(self, weights: Array, visible: Array) -> Array:
        return np.ones_like(super().total(weights, visible))


@CATALOGUE.defect("linear-normaliser-clamped", "Outputs shrink where features are small.")
class LinearNormaliserClamped(Linear):
    """The normaliser is at least 1e-2."""

    def total(self, weights: Array, visible: Array) -> Array:
        return np.maximum(super().total(weights, visible), 1e-2)


@CATALOGUE.defect(
    "linear-normaliser-of-first-query", "All outputs but the first are off by a factor."
)
class NormaliserOfFirstQuery(Linear):
    """The normaliser of the first query serves for all."""

    def total(self, weights: Array, visible: Array) -> Array:
        return super().total(weights, visible)[..., :1, :]


@CATALOGUE.defect("linear-normaliser-over-queries", "Outputs about n times too small.")
class SumOverQueries(Linear):
    """The normaliser is summed over the queries of the block, not for each."""

    def total(self, weights: Array, visible: Array) -> Array:
        return weights.sum((-1, -2), keepdims=True)
