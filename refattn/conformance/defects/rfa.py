"""Random feature attention."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy import special

from .attention import TRIGONOMETRIC, Draws, log_sum_exp, square
from .catalogue import Catalogue
from .frequencies import ORTHOGONAL, SIMPLEX, haar, simplex, wrong_laws, wrong_seeds
from .softmax import Online, Softmax

Array = Any


class RFA(Softmax):
    """Random feature attention with positive features."""

    def root(self, d: int) -> float:
        """The factor on queries and on keys that leads to kernel coordinates."""
        return float(d**-0.25)

    def frequencies(self, q: Array, k: Array, visible: Array, draws: Draws) -> Array:
        """The frequencies given, or drawn from the seed and shared by batch and heads."""
        if draws.omega is not None:
            return draws.omega
        assert draws.number is not None
        return self.draw(draws.number, q.shape[-1], self.generator(draws.seed))

    def log_q(self, q: Array, omega: Array) -> Array:
        """log xi(q_i, omega_s) without -|q_i|^2/2, which cancels, shape (..., n, S)."""
        return q @ omega.swapaxes(-1, -2)

    def log_k(self, k: Array, omega: Array) -> Array:
        """log xi(k_j, omega_s), shape (..., m, S)."""
        return k @ omega.swapaxes(-1, -2) - square(k)[..., None] / 2

    def log_features(self, q: Array, k: Array, visible: Array, draws: Draws) -> tuple[Array, Array]:
        """Logarithms of the features of queries and keys."""
        q, k = q * self.root(q.shape[-1]), k * self.root(k.shape[-1])
        omega = self.frequencies(q, k, visible, draws).astype(q.dtype)
        return self.log_q(q, omega), self.log_k(k, omega)

    def scores(self, q: Array, k: Array, visible: Array, draws: Draws) -> Array:
        return self.log_kernel(*self.log_features(q, k, visible, draws))

    def log_kernel(self, log_q: Array, log_k: Array) -> Array:
        """Logarithm of the sum over frequencies of the products of features."""
        return log_sum_exp(log_q[..., :, None, :] + log_k[..., None, :, :])

    def weights(self, q: Array, k: Array, visible: Array, draws: Draws) -> Array:
        return self.combine(*self.log_features(q, k, visible, draws), visible)

    def combine(self, log_q: Array, log_k: Array, visible: Array) -> Array:
        """Sums of products of features, up to a factor for each query, 0 where hidden."""
        return self.exponentiate(self.log_kernel(log_q, log_k), visible)


CATALOGUE = Catalogue("rfa", RFA, ("omega", "mask", "causal", "gqa"))
CATALOGUE.variant("rfa-orthogonal", "Orthogonal frequencies.", tags=ORTHOGONAL)(RFA(haar))
CATALOGUE.variant("rfa-simplex", "Simplex frequencies.", tags=SIMPLEX)(RFA(simplex))
wrong_laws(CATALOGUE)
wrong_seeds(CATALOGUE)


@CATALOGUE.variant("rfa-reversed", "Features in another order.")
class FeaturesReversed(RFA):
    """Correct: the frequencies in another order."""

    def combine(self, log_q: Array, log_k: Array, visible: Array) -> Array:
        return super().combine(log_q[..., ::-1], log_k[..., ::-1], visible)


@CATALOGUE.variant("rfa-online", "Blocks over keys with a running maximum.")
class OnlineRFA(Online, RFA):
    """Correct: blocks of four keys, a running maximum and rescaled sums."""


@CATALOGUE.variant("rfa-stabilised-by-query", "One maximum for each query.")
class StabilisedByQuery(RFA):
    """Correct: one maximum for each query, over visible keys and frequencies, then plain sums."""

    def combine(self, log_q: Array, log_k: Array, visible: Array) -> Array:
        terms = log_q[..., :, None, :] + log_k[..., None, :, :]
        terms = np.where(visible[..., None], terms, -np.inf)
        top = terms.max((-1, -2), keepdims=True, initial=-np.inf)
        top = np.where(top == -np.inf, 0.0, top).astype(terms.dtype)
        return np.exp(terms - top).sum(-1)


@CATALOGUE.variant("rfa-trigonometric", "Trigonometric features.", tags=TRIGONOMETRIC)
class Trigonometric(RFA):
    """Correct: cosines and sines, the real part of complex exponentials."""

    def log_q(self, q: Array, omega: Array) -> Array:
        return 1j * super().log_q(q, omega)

    def log_k(self, k: Array, omega: Array) -> Array:
        return square(k)[..., None] / 2 - self.log_q(k, omega)

    def combine(self, log_q: Array, log_k: Array, visible: Array) -> Array:
        return np.where(visible, (np.exp(log_q) @ np.exp(log_k).swapaxes(-1, -2)).real, 0)


@CATALOGUE.defect(
    "rfa-trigonometric-normaliser-clamped",
    "Queries whose normaliser is small or negative get outputs of the wrong size or sign.",
    tags=TRIGONOMETRIC,
)
class TrigonometricNormaliserClamped(Trigonometric):
    """The normaliser, which may have any sign, is at least 1e-2."""

    def total(self, weights: Array, visible: Array) -> Array:
        return np.maximum(super().total(weights, visible), 1e-2)


@CATALOGUE.defect(
    "rfa-stabiliser-sees-future",
    "A large last key takes earlier causal outputs, or padding all outputs, to 0 / 0.",
    "performer-pytorch, google-research performer",
)
class Direct(RFA):
    """Features outside the log domain, stabilised by the maxima that most code takes."""

    def phi_q(self, log_q: Array) -> Array:
        """Features of queries over their largest."""
        return np.exp(log_q - log_q.max(-1, keepdims=True))

    def phi_k(self, log_k: Array) -> Array:
        """Features of keys over the largest of all keys, seen or not."""
        return np.exp(log_k - log_k.max((-1, -2), keepdims=True))

    def combine(self, log_q: Array, log_k: Array, visible: Array) -> Array:
        weights = self.phi_q(log_q) @ self.phi_k(log_k).swapaxes(-1, -2) / log_q.shape[-1]
        return np.where(visible, weights, 0)


@CATALOGUE.defect(
    "rfa-feature-epsilon",
    "d = 64, unit variance, 512 tokens: within 20 % of the plain mean of v. Editing the last "
    "key moves earlier causal outputs by over 10 %.",
    "performer-pytorch",
)
class FeatureEpsilon(Direct):
    """A constant is added to each stabilised feature."""

    epsilon = 1e-4

    def phi_q(self, log_q: Array) -> Array:
        return super().phi_q(log_q) + self.epsilon

    def phi_k(self, log_k: Array) -> Array:
        return super().phi_k(log_k) + self.epsilon


@CATALOGUE.defect(
    "rfa-small-feature-epsilon",
    "Keys far below the largest all count alike.",
    "google-research performer",
)
class SmallFeatureEpsilon(FeatureEpsilon):
    """1e-6 is added to each stabilised feature."""

    epsilon = 1e-6


@CATALOGUE.defect(
    "rfa-feature-epsilon-after-norm",
    "The longer queries and keys are, the nearer the output is to the mean of the values.",
    "performer-pytorch",
)
class FeatureEpsilonAfterNorm(FeatureEpsilon):
    """1e-4 is added to features stabilised by the largest omega . x, without |x|^2 / 2."""

    def log_features(self, q: Array, k: Array, visible: Array, draws: Draws) -> tuple[Array, Array]:
        log_q, log_k = super().log_features(q, k, visible, draws)
        half_q, half_k = (square(x * self.root(x.shape[-1]))[..., None] / 2 for x in (q, k))
        largest = (log_k + half_k).max((-1, -2), keepdims=True)
        return log_q - half_q - log_q.max(-1, keepdims=True), log_k - largest

    def phi_q(self, log_q: Array) -> Array:
        return np.exp(log_q) + self.epsilon

    def phi_k(self, log_k: Array) -> Array:
        return np.exp(log_k) + self.epsilon


@CATALOGUE.defect(
    "rfa-epsilon-in-both",
    "Keys far below the largest all count alike, and outputs shrink where all are.",
)
class EpsilonInBoth(FeatureEpsilon):
    """1e-4 is added to each stabilised feature and to the normaliser."""

    def total(self, weights: Array, visible: Array) -> Array:
        return super().total(weights, visible) + self.epsilon


@CATALOGUE.defect(
    "rfa-small-epsilon-in-both",
    "Keys far below the largest all count alike, and outputs shrink where all are.",
)
class SmallEpsilonInBoth(SmallFeatureEpsilon, EpsilonInBoth):
    """1e-6 is added to each stabilised feature and to the normaliser."""


class Plain(RFA):
    """Features as they are defined, without stabilisation."""

    def log_q(self, q: Array, omega: Array) -> Array:
        return super().log_q(q, omega) - square(q)[..., None] / 2

    def combine(self, log_q: Array, log_k: Array, visible: Array) -> Array:
        return np.where(visible, np.exp(log_q) @ np.exp(log_k).swapaxes(-1, -2), 0)


@CATALOGUE.defect("rfa-plain-feature-epsilon", "Small features count too much.")
class PlainFeatureEpsilon(Plain):
    """1e-3 is added to each feature, without stabilisation."""

    def combine(self, log_q: Array, log_k: Array, visible: Array) -> Array:
        return np.where(
            visible, (np.exp(log_q) + 1e-3) @ (np.exp(log_k) + 1e-3).swapaxes(-1, -2), 0
        )


@CATALOGUE.defect(
    "rfa-normaliser-clamped",
    "d = 64, unit variance, 512 tokens, 256 features: most outputs shrink, the median to .3.",
    "efficient-attention",
)
class NormaliserClamped(Direct):
    """The normaliser is at least 1e-2 after stabilisation."""

    def total(self, weights: Array, visible: Array) -> Array:
        return np.maximum(super().total(weights, visible), 1e-2)


@CATALOGUE.defect("rfa-normaliser-epsilon", "Outputs shrink where keys are far.")
class NormaliserEpsilon(Direct):
    """1e-6 is added to the stabilised normaliser."""

    def total(self, weights: Array, visible: Array) -> Array:
        return super().total(weights, visible) + 1e-6


@CATALOGUE.defect(
    "rfa-maximum-of-key-kept", "Each key is weighted by the inverse of its largest feature."
)
class MaximumOfKeyKept(Direct):
    """Each key is stabilised by its own maximum, which is not put back."""

    def phi_k(self, log_k: Array) -> Array:
        return np.exp(log_k - log_k.max(-1, keepdims=True))


@CATALOGUE.defect(
    "rfa-maximum-of-feature-kept",
    "Each frequency is weighted by the inverse of its largest feature.",
)
class MaximumOfFeatureKept(Direct):
    """Each feature of the keys is stabilised by its own maximum, which is not put back."""

    def phi_k(self, log_k: Array) -> Array:
        return np.exp(log_k - log_k.max(-2, keepdims=True))


@CATALOGUE.defect(
    "rfa-sample-normalisers-dropped",
    "Every frequency counts alike, however much the keys favour it.",
)
class SampleNormalisersDropped(Direct):
    """Features of keys are softmaxed over the keys, and their normalisers forgotten."""

    def phi_k(self, log_k: Array) -> Array:
        return special.softmax(log_k, axis=-2)


@CATALOGUE.defect(
    "rfa-mean-of-ratios",
    "The output does not depend on the query.",
    "eq. (12) of a published derivation",
)
class MeanOfRatios(RFA):
    """The mean over frequencies of the ratios, in which the query cancels."""

    def combine(self, log_q: Array, log_k: Array, visible: Array) -> Array:
        samples = np.broadcast_to(
            log_k.swapaxes(-1, -2)[..., None, :, :],
            (*log_k.shape[:-2], log_q.shape[-2], log_k.shape[-1], log_k.shape[-2]),
        )
        return self.ratios(self.exponentiate(samples, visible[..., None, :]))

    def ratios(self, weights: Array) -> Array:
        """Normalise each frequency's weights (..., n, S, m), then average."""
        total = weights.sum(-1, keepdims=True)
        return (weights / np.where(total == 0, 1.0, total)).mean(-2)


@CATALOGUE.defect("rfa-overflow", "0 where exponents pass 709 or all are below -745.")
class RFAOverflowing(Plain):
    """Plain features, and what overflows becomes 0."""

    def average(self, weights: Array, v: Array, visible: Array) -> Array:
        return np.nan_to_num(super().average(weights, v, visible), posinf=0, neginf=0)


@CATALOGUE.defect("rfa-root-twice", "Attention of exp(q . k / d).", "Nystromformer's Performer")
class RootTwice(RFA):
    """d^(-1/4) is applied twice."""

    def root(self, d: int) -> float:
        return float(d**-0.5)


@CATALOGUE.defect("rfa-root-missing", "Attention of exp(q . k).")
class RootMissing(RFA):
    """No scale at all."""

    def root(self, d: int) -> float:
        return 1.0


@CATALOGUE.defect("rfa-key-norm-dropped", "Long keys weigh e^(|k|^2/2) too much.")
class KeyNormDropped(RFA):
    """The features of keys have no norm."""

    def log_k(self, k: Array, omega: Array) -> Array:
        return k @ omega.swapaxes(-1, -2)


@CATALOGUE.defect("rfa-key-norm-whole", "Long keys weigh e^(|k|^2/2) too little.")
class KeyNormWhole(RFA):
    """|k|^2 where |k|^2 / 2 is meant."""

    def log_k(self, k: Array, omega: Array) -> Array:
        return super().log_k(k, omega) - square(k)[..., None] / 2


@CATALOGUE.defect("rfa-key-norm-unscaled", "Long keys weigh far too little.")
class KeyNormUnscaled(RFA):
    """|k|^2 / 2 is taken before k is scaled."""

    def log_k(self, k: Array, omega: Array) -> Array:
        excess = square(k) * (self.root(k.shape[-1]) ** -2 - 1) / 2
        return super().log_k(k, omega) - excess[..., None]


@CATALOGUE.defect("rfa-key-norm-constant", "Keys longer than others weigh too much.")
class KeyNormConstant(RFA):
    """The mean over keys of |k|^2 for each key's own."""

    def log_k(self, k: Array, omega: Array) -> Array:
        return k @ omega.swapaxes(-1, -2) - square(k).mean(-1)[..., None, None] / 2


@CATALOGUE.defect(
    "rfa-other-frequencies-for-keys",
    "Attention of the query with its coordinates rotated by one.",
    "xformers",
)
class OtherFrequenciesForKeys(RFA):
    """Queries and keys have different frequencies."""

    def log_k(self, k: Array, omega: Array) -> Array:
        return super().log_k(k, np.roll(omega, 1, axis=-1))


@CATALOGUE.defect("rfa-frequency-negated", "Attention of the query -q.")
class FrequencyNegatedForKeys(RFA):
    """Keys have the frequencies of opposite sign."""

    def log_k(self, k: Array, omega: Array) -> Array:
        return super().log_k(k, -omega)


@CATALOGUE.defect(
    "rfa-two-pi", "Attention of 4 pi^2 q . k, and no bound on the error.", "teddykoker"
)
class TwoPi(RFA):
    """2 pi multiplies the frequencies of N(0, I)."""

    factor = 2 * np.pi

    def frequencies(self, q: Array, k: Array, visible: Array, draws: Draws) -> Array:
        return self.factor * super().frequencies(q, k, visible, draws)


@CATALOGUE.defect(
    "rfa-over-two-pi", "Attention of q . k / 40, in which long keys weigh too little."
)
class OverTwoPi(TwoPi):
    """The frequencies are divided by 2 pi."""

    factor = 1 / (2 * np.pi)


@CATALOGUE.defect(
    "rfa-trigonometric-two-pi", "Only keys next to the query count.", tags=TRIGONOMETRIC
)
class TrigonometricTwoPi(TwoPi, Trigonometric):
    """cos(2 pi omega . x) with frequencies of N(0, I)."""


@CATALOGUE.defect(
    "rfa-trigonometric-over-two-pi",
    "Attention of q . k / 40, in which long keys weigh too much.",
    tags=TRIGONOMETRIC,
)
class TrigonometricOverTwoPi(OverTwoPi, Trigonometric):
    """cos(omega . x / (2 pi)) with frequencies of N(0, I)."""


@CATALOGUE.defect("rfa-key-norm-clamped", "Keys with |k|^2 above 10 weigh too much.")
class KeyNormClamped(RFA):
    """|k|^2 / 2 is at most 5."""

    def log_k(self, k: Array, omega: Array) -> Array:
        excess = np.maximum(square(k) / 2 - 5, 0)
        return super().log_k(k, omega) + excess[..., None]


@CATALOGUE.defect("rfa-last-feature-dropped", "One feature less than asked for.")
class LastFeatureDropped(RFA):
    """The last of more than one frequency is not used."""

    def log_features(self, q: Array, k: Array, visible: Array, draws: Draws) -> tuple[Array, Array]:
        log_q, log_k = super().log_features(q, k, visible, draws)
        count = max(1, log_q.shape[-1] - 1)
        return log_q[..., :count], log_k[..., :count]


@CATALOGUE.defect(
    "rfa-frequencies-of-first-head",
    "Frequencies given for each head are not used, apart from the first.",
)
class FrequenciesPerHeadIgnored(RFA):
    """The frequencies of the first head serve for all."""

    def frequencies(self, q: Array, k: Array, visible: Array, draws: Draws) -> Array:
        omega = super().frequencies(q, k, visible, draws)
        return omega[..., :1, :, :] if omega.ndim > 2 else omega


@CATALOGUE.defect(
    "rfa-frequencies-unscaled", "Frequencies d^(1/4) too short: keys and queries lose contrast."
)
class FrequenciesUnscaled(RFA):
    """Given or drawn frequencies are taken for those of unscaled arguments."""

    def frequencies(self, q: Array, k: Array, visible: Array, draws: Draws) -> Array:
        return super().frequencies(q, k, visible, draws) * self.root(q.shape[-1])


@CATALOGUE.defect(
    "rfa-seed-from-data",
    "Editing a later query changes all outputs, in causal attention too.",
    "google-research performer",
)
class SeedFromData(RFA):
    """The sum of the queries goes into the seed."""

    def frequencies(self, q: Array, k: Array, visible: Array, draws: Draws) -> Array:
        data = math.ceil(abs(float(q.sum())) * 1e6) % 2**32
        seed = None if draws.seed is None else draws.seed + data
        return super().frequencies(q, k, visible, draws._replace(seed=seed))


@CATALOGUE.defect("rfa-relu", "Another kernel.", "Performer-ReLU")
class ReluFeatures(RFA):
    """max(omega . x, 0) + 1e-3 for the exponential."""

    def log_q(self, q: Array, omega: Array) -> Array:
        return np.log(np.maximum(q @ omega.swapaxes(-1, -2), 0) + 1e-3)

    def log_k(self, k: Array, omega: Array) -> Array:
        return self.log_q(k, omega)


@CATALOGUE.defect("rfa-cosines", "Another kernel.")
class CosinesOnly(RFA):
    """exp(|x|^2/2) |cos(omega . x)|, without sines."""

    def log_q(self, q: Array, omega: Array) -> Array:
        wave = np.abs(np.cos(q @ omega.swapaxes(-1, -2)))
        return np.log(np.maximum(wave, 1e-300)) + square(q)[..., None] / 2

    def log_k(self, k: Array, omega: Array) -> Array:
        return self.log_q(k, omega)


@CATALOGUE.defect("rfa-maximum", "One frequency decides for each pair.")
class MaximumOverFrequencies(RFA):
    """The largest product of features for their sum."""

    def log_kernel(self, log_q: Array, log_k: Array) -> Array:
        return (log_q[..., :, None, :] + log_k[..., None, :, :]).max(-1)


@CATALOGUE.defect(
    "rfa-half-precision-features",
    "Three digits, and features below 6e-8 of the largest are 0.",
    "autocast",
)
class HalfPrecisionFeatures(Direct):
    """Stabilised features are stored in float16."""

    def phi_q(self, log_q: Array) -> Array:
        return super().phi_q(log_q).astype(np.float16).astype(log_q.dtype)

    def phi_k(self, log_k: Array) -> Array:
        return super().phi_k(log_k).astype(np.float16).astype(log_k.dtype)


@CATALOGUE.defect("rfa-exact", "No error to speak of: not a random feature estimate.")
class ExactInstead(RFA):
    """Exact attention, whatever the frequencies."""

    def weights(self, q: Array, k: Array, visible: Array, draws: Draws) -> Array:
        return Softmax.weights(self, q, k, visible, draws)

    def scores(self, q: Array, k: Array, visible: Array, draws: Draws) -> Array:
        return Softmax.scores(self, q, k, visible, draws)


@CATALOGUE.defect(
    "rfa-moments-ignored",
    "Frequencies are standard normal whatever moments are given.",
    only=("moments",),
)
def moments_ignored(
    q: Array,
    k: Array,
    v: Array,
    *,
    mean: Array | None = None,
    cov: Array | None = None,
    **rest: Any,
) -> Array:
    """The moments given have no effect."""
    return RFA()(q, k, v, **rest)


@CATALOGUE.defect(
    "rfa-covariance-not-rooted",
    "Frequencies have the square of the covariance given.",
    only=("moments",),
)
def covariance_not_rooted(
    q: Array,
    k: Array,
    v: Array,
    *,
    mean: Array | None = None,
    cov: Array | None = None,
    **rest: Any,
) -> Array:
    """Normal numbers are multiplied by the covariance and not by its root."""
    if mean is None or cov is None:
        return RFA()(q, k, v, **rest)
    shape = (rest["num_features"], q.shape[-1])
    omega = np.random.default_rng(rest["seed"]).standard_normal(shape) @ cov + mean
    return RFA()(q, k, v, omega=omega)
