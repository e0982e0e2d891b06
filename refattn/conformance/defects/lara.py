"""Linear randomized attention."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import special

from .attention import Draws, log_sum_exp, square
from .catalogue import Catalogue
from .frequencies import wrong_seeds
from .rfa import RFA, KeyNormDropped, MaximumOfFeatureKept, MaximumOfKeyKept, RootTwice

Array = Any


class LARA(RFA):
    """Linear randomized attention with unit Gaussians at chunk means and balance weights."""

    def log_features(self, q: Array, k: Array, visible: Array, draws: Draws) -> tuple[Array, Array]:
        q, k = q * self.root(q.shape[-1]), k * self.root(k.shape[-1])
        centres = draws.centres
        if centres is None:
            count = draws.number or np.asarray(draws.omega).shape[-2]
            centres = self.centres(q, k, visible, count)
        omega = draws.omega
        if omega is None:
            lead = np.broadcast_shapes(q.shape[:-2], k.shape[:-2])
            omega = centres + self.noise((*lead, *centres.shape[-2:]), self.generator(draws.seed))
        omega, centres = omega.astype(q.dtype), centres.astype(q.dtype)
        log_q = self.log_q(q, omega) + self.log_weight(omega, centres)[..., None, :]
        return log_q, self.log_k(k, omega)

    def centres(self, q: Array, k: Array, visible: Array, count: int) -> Array:
        """Sums of mean query and mean key of contiguous chunks, shape (..., C, d)."""
        everywhere = np.ones(q.shape[-2], bool)
        return self.chunk_means(q, everywhere, count) + self.chunk_means(k, visible.any(-2), count)

    def chunk_means(self, x: Array, seen: Array, count: int) -> Array:
        """Means of chunks with equal numbers of rows that are seen."""
        rank = seen.cumsum(-1) - 1
        chunk = rank * count // np.maximum(seen.sum(-1, keepdims=True), 1)
        member = (chunk[..., None, :] == np.arange(count)[:, None]) & seen[..., None, :]
        sums = member.astype(x.dtype) @ np.where(seen[..., None], x, 0)
        return sums / np.maximum(member.sum(-1, keepdims=True), 1).astype(x.dtype)

    def noise(self, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
        """Standard normal, one for each proposal and head."""
        return rng.standard_normal(shape)

    def log_density(self, omega: Array, centres: Array) -> Array:
        """log N(omega_s; mu_c, I) - log N(omega_s; 0, I), shape (..., S, C)."""
        return omega @ centres.swapaxes(-1, -2) - square(centres)[..., None, :] / 2

    def log_weight(self, omega: Array, centres: Array) -> Array:
        """Importance weights against the mixture of all proposals, shape (..., S)."""
        return -log_sum_exp(self.log_density(omega, centres))


CATALOGUE = Catalogue("lara", LARA, ("omega", "mask", "gqa"), {"weighting": "balance"})
wrong_seeds(CATALOGUE)


@CATALOGUE.defect("lara-own-weights", "Weights of the wrong scheme: a larger error.")
class OwnWeights(LARA):
    """Each frequency is weighted against its own proposal only."""

    def log_weight(self, omega: Array, centres: Array) -> Array:
        return square(centres) / 2 - np.sum(omega * centres, axis=-1)


@CATALOGUE.defect("lara-no-weights", "Does not converge: the proposals are not corrected for.")
class NoWeights(LARA):
    """Frequencies are weighted as if drawn from N(0, I)."""

    def log_weight(self, omega: Array, centres: Array) -> Array:
        return np.zeros(np.broadcast_shapes(omega.shape, centres.shape)[:-1], omega.dtype)


@CATALOGUE.defect("lara-weights-inverted", "Does not converge.")
class WeightsInverted(LARA):
    """The importance weights have the wrong sign."""

    def log_weight(self, omega: Array, centres: Array) -> Array:
        return -super().log_weight(omega, centres)


@CATALOGUE.defect("lara-centre-norm-dropped", "Far centres count too much.")
class CentreNormDropped(LARA):
    """The densities of the proposals have no norm of the centre."""

    def log_density(self, omega: Array, centres: Array) -> Array:
        return omega @ centres.swapaxes(-1, -2)


@CATALOGUE.defect("lara-geometric-mixture", "Weights against the wrong mixture.")
class GeometricMixture(LARA):
    """The mean of the logarithms of the densities for the logarithm of their mean."""

    def log_weight(self, omega: Array, centres: Array) -> Array:
        return -self.log_density(omega, centres).mean(-1)


@CATALOGUE.defect("lara-balance-over-frequencies", "Weights are sums over the wrong index.")
class BalanceOverFrequencies(LARA):
    """The balance heuristic sums over frequencies in place of proposals."""

    def log_weight(self, omega: Array, centres: Array) -> Array:
        return -log_sum_exp(self.log_density(omega, centres).swapaxes(-1, -2))


@CATALOGUE.defect(
    "lara-centres-without-keys",
    "The default proposals are not at the documented centres: a larger error.",
)
class CentresWithoutKeys(LARA):
    """Proposals sit at the mean queries, and the weights say so: slower, and a law of its own."""

    def centres(self, q: Array, k: Array, visible: Array, count: int) -> Array:
        return self.chunk_means(q, np.ones(q.shape[-2], bool), count)


@CATALOGUE.defect("lara-last-proposal-dropped", "The last frequency is not used.")
class LastProposalDropped(LARA):
    """The last of more than one frequency is not used."""

    def log_features(self, q: Array, k: Array, visible: Array, draws: Draws) -> tuple[Array, Array]:
        log_q, log_k = super().log_features(q, k, visible, draws)
        count = max(1, log_q.shape[-1] - 1)
        return log_q[..., :count], log_k[..., :count]


@CATALOGUE.defect(
    "lara-noise-dropped",
    "The seed makes no difference, and the error does not vanish.",
    "efficient-attention in evaluation mode",
)
class LARANoiseDropped(LARA):
    """The frequencies are the centres."""

    def noise(self, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
        return np.zeros(shape)


@CATALOGUE.defect(
    "lara-noise-unscaled", "Noise d^(1/4) too small for the weights.", "efficient-attention"
)
class LARANoiseOfUnscaledSpace(LARA):
    """Unit noise before the scale, which is d^(-1/4) after it."""

    def noise(self, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
        return shape[-1] ** -0.25 * rng.standard_normal(shape)


@CATALOGUE.defect("lara-noise-shared", "Proposals fail together.")
class LARANoiseShared(LARA):
    """All proposals have the same noise."""

    def noise(self, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
        return np.broadcast_to(rng.standard_normal((*shape[:-2], 1, shape[-1])), shape)


@CATALOGUE.defect(
    "lara-clamped-query-weights",
    "Weights depend on the other queries and do not sum to 1.",
    "efficient-attention",
)
class ClampedQueryWeights(LARA):
    """Weights that depend on the query, normalised over queries and clamped at 1e-8."""

    def log_features(self, q: Array, k: Array, visible: Array, draws: Draws) -> tuple[Array, Array]:
        log_q, log_k = super().log_features(q, k, visible, draws)
        q = q * self.root(q.shape[-1])
        means = self.chunk_means(q, np.ones(q.shape[-2], bool), log_q.shape[-1])
        t = special.softmax(q @ means.swapaxes(-1, -2), axis=-2)
        alpha = np.maximum(1 / t.shape[-1] + t - t.mean(-1, keepdims=True), 1e-8)
        return log_q + np.log(alpha), log_k


@CATALOGUE.defect("lara-root-twice", "Attention of exp(q . k / d).")
class LARARootTwice(RootTwice, LARA):
    """d^(-1/4) is applied twice."""


@CATALOGUE.defect("lara-key-norm-dropped", "Long keys weigh e^(|k|^2/2) too much.")
class LARAKeyNormDropped(KeyNormDropped, LARA):
    """The features of keys have no norm."""


@CATALOGUE.defect(
    "lara-maximum-of-key-kept", "Each key is weighted by the inverse of its largest feature."
)
class LARAMaximumOfKeyKept(MaximumOfKeyKept, LARA):
    """Each key is stabilised by its own maximum, which is not put back."""


@CATALOGUE.defect(
    "lara-maximum-of-feature-kept",
    "Each frequency is weighted by the inverse of its largest feature.",
)
class LARAMaximumOfFeatureKept(MaximumOfFeatureKept, LARA):
    """Each feature of the keys is stabilised by its own maximum, which is not put back."""
