"""Randomized attention."""

from __future__ import annotations

from typing import Any

import numpy as np

from .attention import Draws
from .catalogue import Catalogue
from .frequencies import wrong_seeds
from .rfa import CATALOGUE as RFA_CATALOGUE
from .rfa import RFA, KeyNormDropped, RootTwice

Array = Any


class RA(RFA):
    """Randomized attention: each query has frequencies from its own law."""

    def frequencies(self, q: Array, k: Array, visible: Array, draws: Draws) -> Array:
        """q_i + k_J + noise, J drawn by the attention weights of query i, shape (..., n, S, d)."""
        if draws.omega is not None:
            return draws.omega
        assert draws.number is not None
        return self.sample(q, k, visible, draws.number, self.generator(draws.seed))

    def sample(
        self, q: Array, k: Array, visible: Array, count: int, rng: np.random.Generator
    ) -> Array:
        """Draw from the mixture over keys."""
        share = self.exponentiate(self.temper(q @ k.swapaxes(-1, -2)), visible)
        pick = self.choose(share, count, rng)
        key = np.take_along_axis(k[..., None, :, :], pick[..., None], axis=-2)
        centre = q[..., None, :] + key
        return centre + self.noise(centre.shape, rng)

    def temper(self, scores: Array) -> Array:
        """Scores from which components are drawn."""
        return scores

    def choose(self, share: Array, count: int, rng: np.random.Generator) -> Array:
        """Draw indices in proportion to `share` (..., n, m) by inversion, shape (..., n, S)."""
        up_to = np.cumsum(share.astype(np.float64), axis=-1)
        u = rng.random((*share.shape[:-1], count)) * up_to[..., -1:]
        pick = (up_to[..., None, :] <= u[..., None]).sum(-1)
        return np.minimum(pick, share.shape[-1] - 1)

    def noise(self, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
        """Standard normal."""
        return rng.standard_normal(shape)

    def weights(self, q: Array, k: Array, visible: Array, draws: Draws) -> Array:
        q, k = q * self.root(q.shape[-1]), k * self.root(k.shape[-1])
        omega = self.frequencies(q, k, visible, draws).astype(q.dtype)
        log_k = self.log_k(k[..., None, :, :], omega).swapaxes(-1, -2)  # (..., n, S, m)
        return self.over_samples(self.exponentiate(log_k, visible[..., None, :]), log_k, visible)

    def over_samples(self, weights: Array, log_k: Array, visible: Array) -> Array:
        """The mean over samples of their normalised weights."""
        total = weights.sum(-1, keepdims=True)
        return (weights / np.where(total == 0, 1.0, total).astype(weights.dtype)).mean(-2)


CATALOGUE = Catalogue("ra", RA, ("omega", "mask", "causal", "gqa"))
wrong_seeds(CATALOGUE)


@CATALOGUE.variant("ra-gumbel-max", "Components drawn by Gumbel-max.")
class GumbelMax(RA):
    """Correct: components drawn as the largest of the scores plus Gumbel noise."""

    def choose(self, share: Array, count: int, rng: np.random.Generator) -> Array:
        gumbel = rng.gumbel(size=(*share.shape[:-1], count, share.shape[-1]))
        with np.errstate(divide="ignore"):
            return (np.log(share)[..., None, :] + gumbel).argmax(-1)


@RFA_CATALOGUE.defect(
    "rfa-is-ra", "Unbiased, at quadratic cost: another estimator.", lacks=("omega",)
)
class RandomizedInstead(RA):
    """Randomized attention under the name of random feature attention."""


@CATALOGUE.defect(
    "ra-is-rfa", "Frequencies that know neither query nor keys: biased.", lacks=("omega",)
)
class StandardNormal(RA):
    """Frequencies of N(0, I): random feature attention's."""

    def sample(
        self, q: Array, k: Array, visible: Array, count: int, rng: np.random.Generator
    ) -> Array:
        return self.noise((*visible.shape[:-2], q.shape[-2], count, q.shape[-1]), rng)


@CATALOGUE.defect("ra-uniform-component", "Biased towards the mean value.")
class UniformComponent(RA):
    """Components are drawn uniformly from the keys."""

    def temper(self, scores: Array) -> Array:
        return 0 * scores


@CATALOGUE.defect("ra-temperature-1.2", "Biased a little towards the mean value.")
class Tempered(RA):
    """Components are drawn at temperature 1.2."""

    def temper(self, scores: Array) -> Array:
        return scores / 1.2


@CATALOGUE.defect("ra-greedy", "Biased towards the best key.")
class Greedy(RA):
    """The component is always the key of largest weight."""

    def choose(self, share: Array, count: int, rng: np.random.Generator) -> Array:
        return np.repeat(share.argmax(-1)[..., None], count, axis=-1)


@CATALOGUE.defect("ra-one-component", "The variance does not fall as 1/S.")
class OneComponent(RA):
    """All samples of a query have the same component, with noises of their own."""

    def choose(self, share: Array, count: int, rng: np.random.Generator) -> Array:
        return np.repeat(super().choose(share, 1, rng), count, axis=-1)


@CATALOGUE.defect("ra-draw-ignores-mask", "Hidden keys shift the frequencies.")
class DrawIgnoresMask(RA):
    """Components are drawn from hidden keys too."""

    def sample(
        self, q: Array, k: Array, visible: Array, count: int, rng: np.random.Generator
    ) -> Array:
        return super().sample(q, k, np.ones_like(visible), count, rng)


@CATALOGUE.defect(
    "ra-half-precision-choice", "Keys of weight below 1/4096 are not drawn, the last one too often."
)
class HalfPrecisionChoice(RA):
    """Inversion of a float16 cumulative sum, the rest falling to the last key."""

    def choose(self, share: Array, count: int, rng: np.random.Generator) -> Array:
        share = (share / share.sum(-1, keepdims=True)).astype(np.float16)
        up_to = np.cumsum(share, axis=-1, dtype=np.float16).astype(np.float64)
        u = rng.random((*share.shape[:-1], count))
        pick = (up_to[..., None, :] <= u[..., None]).sum(-1)
        return np.minimum(pick, share.shape[-1] - 1)


@CATALOGUE.defect("ra-query-dropped", "Biased: frequencies do not know the query.")
class QueryDropped(RA):
    """Frequencies k_J + noise."""

    def sample(
        self, q: Array, k: Array, visible: Array, count: int, rng: np.random.Generator
    ) -> Array:
        return super().sample(q, k, visible, count, rng) - q[..., None, :]


@CATALOGUE.defect("ra-key-dropped", "Biased: frequencies do not know the keys.")
class KeyDropped(RA):
    """Frequencies q + noise."""

    def sample(
        self, q: Array, k: Array, visible: Array, count: int, rng: np.random.Generator
    ) -> Array:
        return q[..., None, :] + self.noise((*q.shape[:-1], count, q.shape[-1]), rng)


@CATALOGUE.defect("ra-averaged-gaussian", "Biased where keys lie apart.")
class AveragedGaussian(RA):
    """One Gaussian at q plus the mean key, N(q + sum_j pi_j k_j, I), for the mixture."""

    def sample(
        self, q: Array, k: Array, visible: Array, count: int, rng: np.random.Generator
    ) -> Array:
        share = self.exponentiate(q @ k.swapaxes(-1, -2), visible)
        centre = q + share / share.sum(-1, keepdims=True) @ k
        return centre[..., None, :] + self.noise((*q.shape[:-1], count, q.shape[-1]), rng)


@CATALOGUE.defect("ra-moment-matched", "Biased a little where keys lie apart.")
class MomentMatched(RA):
    """One Gaussian with the mean and the covariance of the mixture."""

    def sample(
        self, q: Array, k: Array, visible: Array, count: int, rng: np.random.Generator
    ) -> Array:
        share = self.exponentiate(q @ k.swapaxes(-1, -2), visible)
        share = (share / share.sum(-1, keepdims=True))[..., None]
        mean = (share * k[..., None, :, :]).sum(-2)
        about = k[..., None, :, :] - mean[..., None, :]
        covariance = (share * about).swapaxes(-1, -2) @ about + np.eye(q.shape[-1])
        z = self.noise((*q.shape[:-1], count, q.shape[-1]), rng)
        return (q + mean)[..., None, :] + z @ np.linalg.cholesky(covariance).swapaxes(-1, -2)


@CATALOGUE.defect(
    "ra-noise-dropped",
    "Biased, the same component always giving the same output.",
    "efficient-attention in evaluation mode",
)
class NoiseDropped(RA):
    """The frequencies are the centres of the components."""

    def noise(self, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
        return np.zeros(shape)


@CATALOGUE.defect(
    "ra-noise-unscaled",
    "Noise d^(1/4) too small: at d = 16 most of the bias there is without noise.",
    "efficient-attention",
)
class NoiseOfUnscaledSpace(RA):
    """Unit noise before the scale, which is d^(-1/4) after it."""

    def noise(self, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
        return shape[-1] ** -0.25 * rng.standard_normal(shape)


@CATALOGUE.defect("ra-noise-too-large", "Biased a little towards the mean value.")
class NoiseTooLarge(RA):
    """Noise of standard deviation 1.2."""

    def noise(self, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
        return 1.2 * rng.standard_normal(shape)


@CATALOGUE.defect("ra-noise-shared", "The variance does not fall as 1/S.")
class NoiseShared(RA):
    """All samples of a query have the same noise."""

    def noise(self, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
        return np.broadcast_to(rng.standard_normal((*shape[:-2], 1, shape[-1])), shape)


@CATALOGUE.defect("ra-noise-of-all-queries", "Queries of one component are not independent.")
class NoiseOfAllQueries(RA):
    """All queries have the same noise; their components are drawn apart."""

    def noise(self, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
        return np.broadcast_to(rng.standard_normal((*shape[:-3], 1, *shape[-2:])), shape)


@CATALOGUE.defect(
    "ra-one-sample-used", "The number of samples makes no difference.", "efficient-attention"
)
class OneSampleUsed(RA):
    """The first of the samples is used, however many there are."""

    def frequencies(self, q: Array, k: Array, visible: Array, draws: Draws) -> Array:
        return super().frequencies(q, k, visible, draws)[..., :1, :]


@CATALOGUE.defect("ra-one-sample-repeated", "The variance does not fall with S.")
class OneSampleRepeated(RA):
    """One sample is drawn and repeated."""

    def sample(
        self, q: Array, k: Array, visible: Array, count: int, rng: np.random.Generator
    ) -> Array:
        return np.repeat(super().sample(q, k, visible, 1, rng), count, axis=-2)


@CATALOGUE.defect("ra-heads-share-seed", "Equal heads give equal outputs.")
class HeadsShareSeed(RA):
    """Each head draws from a generator with the same seed."""

    def frequencies(self, q: Array, k: Array, visible: Array, draws: Draws) -> Array:
        if draws.omega is not None or q.ndim < 3:
            return super().frequencies(q, k, visible, draws)
        heads = range(q.shape[-3])
        k = np.broadcast_to(k, (*k.shape[:-3], len(heads), *k.shape[-2:]))
        seen = np.broadcast_to(visible, (*visible.shape[:-3], len(heads), *visible.shape[-2:]))
        of_head = [
            super(HeadsShareSeed, self).frequencies(
                q[..., h, :, :], k[..., h, :, :], seen[..., h, :, :], draws
            )
            for h in heads
        ]
        return np.stack(of_head, axis=-4)


@CATALOGUE.defect("ra-queries-share-frequencies", "Right for the first query, biased for others.")
class QueriesShareFrequencies(RA):
    """All queries use the frequencies of the first."""

    def frequencies(self, q: Array, k: Array, visible: Array, draws: Draws) -> Array:
        return super().frequencies(q, k, visible, draws)[..., :1, :, :]


@CATALOGUE.defect("ra-ratio-of-means", "Biased for S > 1: frequencies are reweighted.")
class RatioOfMeans(RA):
    """The ratio of the means over samples for the mean of the ratios."""

    def over_samples(self, weights: Array, log_k: Array, visible: Array) -> Array:
        top = log_k.max((-1, -2), keepdims=True)
        return np.where(visible[..., None, :], np.exp(log_k - top), 0).sum(-2)


@CATALOGUE.defect("ra-key-norm-dropped", "Long keys weigh e^(|k|^2/2) too much.")
class RAKeyNormDropped(KeyNormDropped, RA):
    """The features of keys have no norm."""


@CATALOGUE.defect("ra-root-twice", "Attention of exp(q . k / d).")
class RARootTwice(RootTwice, RA):
    """d^(-1/4) is applied twice."""
