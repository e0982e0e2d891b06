"""The kernel: estimates of exp(x . y)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .attention import TRIGONOMETRIC, as_it_lies, log_sum_exp, square
from .catalogue import Catalogue
from .frequencies import ORTHOGONAL, SIMPLEX, Sampler, haar, simplex, wrong_laws, wrong_seeds

Array = Any


class Kernel(Sampler):
    """Mean over the frequencies of the product of two positive features."""

    def __call__(
        self,
        x: Array,
        y: Array,
        *,
        omega: Array | None = None,
        num_features: int | None = None,
        seed: int | None = None,
    ) -> Array:
        if omega is None:
            assert num_features is not None
            omega = self.draw(num_features, x.shape[-1], self.generator(seed))
        omega = omega.astype(x.dtype)
        with np.errstate(over="ignore", invalid="ignore"):
            estimate = self.combine(self.log_x(x, omega), self.log_y(y, omega))
        return np.asarray(estimate).astype(x.dtype)

    def log_x(self, x: Array, omega: Array) -> Array:
        """log xi(x, omega_s), shape (..., S)."""
        return _project(x, omega) - square(x)[..., None] / 2

    def log_y(self, y: Array, omega: Array) -> Array:
        """log xi(y, omega_s), shape (..., S)."""
        return self.log_x(y, omega)

    def combine(self, a: Array, b: Array) -> Array:
        """The mean of the products of the features."""
        return np.exp(a + b).mean(-1)


def _project(x: Array, omega: Array) -> Array:
    return np.einsum("...d,...sd->...s", x, omega)


CATALOGUE = Catalogue("kernel", Kernel, ("omega",))
CATALOGUE.variant("kernel-orthogonal", "Orthogonal frequencies.", tags=ORTHOGONAL)(Kernel(haar))
CATALOGUE.variant("kernel-simplex", "Simplex frequencies.", tags=SIMPLEX)(Kernel(simplex))
wrong_laws(CATALOGUE)
wrong_seeds(CATALOGUE)


@CATALOGUE.variant("kernel-log-sum-exp", "The mean taken in the log domain.")
class KernelLogSumExp(Kernel):
    """Correct: the mean is taken in the log domain."""

    def combine(self, a: Array, b: Array) -> Array:
        return np.exp(log_sum_exp(a + b) - math.log(a.shape[-1]))


@CATALOGUE.variant("kernel-reversed", "A running mean in another order.")
class KernelReversed(Kernel):
    """Correct: the frequencies are taken in another order, a running mean over them."""

    def combine(self, a: Array, b: Array) -> Array:
        mean = np.zeros(np.broadcast_shapes(a.shape, b.shape)[:-1], a.dtype)
        for count, s in enumerate(reversed(range(a.shape[-1])), 1):
            mean = mean + (np.exp(a[..., s] + b[..., s]) - mean) / count
        return mean


@CATALOGUE.variant("kernel-trigonometric", "Trigonometric features.", tags=TRIGONOMETRIC)
class KernelTrigonometric(Kernel):
    """Correct: cosines and sines, the real part of complex exponentials."""

    def log_x(self, x: Array, omega: Array) -> Array:
        return 1j * _project(x, omega) + square(x)[..., None] / 2

    def log_y(self, y: Array, omega: Array) -> Array:
        return self.log_x(y, omega).conj()

    def combine(self, a: Array, b: Array) -> Array:
        return super().combine(a, b).real


@CATALOGUE.defect(
    "kernel-independent-frequencies",
    "Estimates 1 and not exp(x . y).",
    "xformers",
    lacks=("omega",),
)
class KernelIndependent(Kernel):
    """The frequencies of y are drawn anew."""

    def log_y(self, y: Array, omega: Array) -> Array:
        rng = np.random.default_rng(abs(int(1e6 * omega[0, 0])))
        return self.log_x(y, rng.standard_normal(omega.shape))


@CATALOGUE.defect(
    "kernel-two-pi", "Estimates exp(19.7 |x + y|^2 - (|x|^2 + |y|^2)/2).", "teddykoker"
)
class KernelTwoPi(Kernel):
    """2 pi multiplies the frequencies."""

    factor = 2 * np.pi

    def log_x(self, x: Array, omega: Array) -> Array:
        return super().log_x(x, self.factor * omega)


@CATALOGUE.defect("kernel-over-two-pi", "Estimates exp(.013 |x + y|^2 - (|x|^2 + |y|^2)/2).")
class KernelOverTwoPi(KernelTwoPi):
    """The frequencies are divided by 2 pi."""

    factor = 1 / (2 * np.pi)


@CATALOGUE.defect(
    "kernel-trigonometric-two-pi",
    "Estimates exp((|x|^2 + |y|^2)/2 - 19.7 |x - y|^2).",
    tags=TRIGONOMETRIC,
)
class KernelTrigonometricTwoPi(KernelTwoPi, KernelTrigonometric):
    """cos(2 pi omega . x) with frequencies of N(0, I)."""


@CATALOGUE.defect(
    "kernel-trigonometric-over-two-pi",
    "Estimates exp((|x|^2 + |y|^2)/2 - .013 |x - y|^2).",
    tags=TRIGONOMETRIC,
)
class KernelTrigonometricOverTwoPi(KernelOverTwoPi, KernelTrigonometric):
    """cos(omega . x / (2 pi)) with frequencies of N(0, I)."""


@CATALOGUE.defect("kernel-whole-norm", "Too small by e^(-(|x|^2 + |y|^2)/2).")
class KernelWholeNorm(Kernel):
    """|x|^2 where |x|^2 / 2 is meant."""

    def log_x(self, x: Array, omega: Array) -> Array:
        return _project(x, omega) - square(x)[..., None]


@CATALOGUE.defect("kernel-norm-of-y-dropped", "Too large by e^(|y|^2/2).")
class KernelNormOfYDropped(Kernel):
    """The feature of y has no norm."""

    def log_y(self, y: Array, omega: Array) -> Array:
        return _project(y, omega)


@CATALOGUE.defect("kernel-norm-unsquared", "Right only for unit vectors.")
class KernelNormUnsquared(Kernel):
    """|x| / 2 where |x|^2 / 2 is meant."""

    def log_x(self, x: Array, omega: Array) -> Array:
        return _project(x, omega) - np.sqrt(square(x))[..., None] / 2


@CATALOGUE.defect("kernel-median", "Too small by e^(-|x + y|^2/2) for many features.")
class KernelMedian(Kernel):
    """The median of the products for their mean."""

    def combine(self, a: Array, b: Array) -> Array:
        return np.median(np.exp(a + b), axis=-1)


@CATALOGUE.defect("kernel-trimmed", "Too small: the largest product is left out.")
class KernelTrimmed(Kernel):
    """The largest product is left out where there are at least three."""

    def combine(self, a: Array, b: Array) -> Array:
        product = np.sort(np.exp(a + b), axis=-1)
        return (product if product.shape[-1] < 3 else product[..., :-1]).mean(-1)


@CATALOGUE.defect("kernel-geometric", "Too small by e^(-|x + y|^2/2) for many features.")
class KernelGeometric(Kernel):
    """The mean is taken of the logarithms."""

    def combine(self, a: Array, b: Array) -> Array:
        return np.exp((a + b).mean(-1))


@CATALOGUE.defect("kernel-epsilon", "Off by .2 % at the origin, more where small.")
class KernelEpsilon(Kernel):
    """1e-3 is added to each feature."""

    epsilon = 1e-3

    def combine(self, a: Array, b: Array) -> Array:
        return ((np.exp(a) + self.epsilon) * (np.exp(b) + self.epsilon)).mean(-1)


@CATALOGUE.defect("kernel-small-epsilon", "Off by 2e-6 at the origin, more where small.")
class KernelSmallEpsilon(KernelEpsilon):
    """1e-6 is added to each feature."""

    epsilon = 1e-6


@CATALOGUE.defect("kernel-sum", "S times too large.")
class KernelSum(Kernel):
    """1/S is missing."""

    def combine(self, a: Array, b: Array) -> Array:
        return np.exp(a + b).sum(-1)


@CATALOGUE.defect("kernel-bessel", "Too large by S/(S - 1).")
class KernelBessel(Kernel):
    """The sum is divided by S - 1."""

    def combine(self, a: Array, b: Array) -> Array:
        return np.exp(a + b).sum(-1) / max(1, a.shape[-1] - 1)


@CATALOGUE.defect("kernel-means-of-features", "Estimates 1 and not exp(x . y).")
class KernelMeansOfFeatures(Kernel):
    """The product of the means for the mean of the products."""

    def combine(self, a: Array, b: Array) -> Array:
        return np.exp(a).mean(-1) * np.exp(b).mean(-1)


@CATALOGUE.defect("kernel-maximum-kept", "Never above 1.")
class KernelMaximumKept(Kernel):
    """The largest exponent is taken out and not put back."""

    def combine(self, a: Array, b: Array) -> Array:
        return np.exp(a + b - (a + b).max(-1, keepdims=True)).mean(-1)


@CATALOGUE.defect("kernel-clipped", "Too small for long vectors.")
class KernelClipped(Kernel):
    """Exponents are clipped at 1 so that nothing overflows."""

    def combine(self, a: Array, b: Array) -> Array:
        return np.exp(np.minimum(a, 1) + np.minimum(b, 1)).mean(-1)


@CATALOGUE.defect("kernel-exponents-clipped", "Too small for long vectors.")
class KernelExponentsClipped(Kernel):
    """Exponents are clipped to [-10, 10]."""

    def log_x(self, x: Array, omega: Array) -> Array:
        return np.clip(super().log_x(x, omega), -10, 10)


@CATALOGUE.defect("kernel-norm-clamped", "Too large where |x|^2 or |y|^2 is above 10.")
class KernelNormClamped(Kernel):
    """|x|^2 / 2 is at most 5."""

    def log_x(self, x: Array, omega: Array) -> Array:
        return _project(x, omega) - np.minimum(square(x)[..., None] / 2, 5)


@CATALOGUE.defect("kernel-relu", "Another kernel.", "Performer-ReLU")
class KernelRelu(Kernel):
    """max(omega . x, 0) + 1e-3 for the exponential."""

    def log_x(self, x: Array, omega: Array) -> Array:
        return np.log(np.maximum(_project(x, omega), 0) + 1e-3)


@CATALOGUE.defect("kernel-cosines", "A kernel of |cos|, not exp(x . y).")
class KernelCosines(Kernel):
    """Cosines without their sines."""

    def log_x(self, x: Array, omega: Array) -> Array:
        return np.log(np.abs(np.cos(_project(x, omega)))) + square(x)[..., None] / 2


@CATALOGUE.defect("kernel-scaled", "Estimates exp(x . y / sqrt(d)).")
class KernelScaled(Kernel):
    """x and y are divided by d^(1/4), the scale of attention."""

    def log_x(self, x: Array, omega: Array) -> Array:
        return super().log_x(x * x.shape[-1] ** -0.25, omega)


@CATALOGUE.defect("kernel-odd-feature", "An odd number of features counts as one less.")
class KernelOddFeature(Kernel):
    """The last of an odd number of features is lost, as where they are split in two."""

    def combine(self, a: Array, b: Array) -> Array:
        even = max(2, a.shape[-1] // 2 * 2)
        return super().combine(a[..., :even], b[..., :even])


@CATALOGUE.defect("kernel-one-sample-used", "The number of features makes no difference.")
class KernelOneSampleUsed(Kernel):
    """The first of the frequencies is used, however many there are."""

    def combine(self, a: Array, b: Array) -> Array:
        return super().combine(a[..., :1], b[..., :1])


@CATALOGUE.defect("kernel-head-size-64", "Entries from the 64th on are not read.")
class KernelHeadSize64(Kernel):
    """Entries from the 64th on are not read."""

    def log_x(self, x: Array, omega: Array) -> Array:
        return super().log_x(x[..., :64], omega[..., :64])


@CATALOGUE.defect("kernel-head-size-128", "Entries from the 128th on are not read.")
class KernelHeadSize128(Kernel):
    """Entries from the 128th on are not read."""

    def log_x(self, x: Array, omega: Array) -> Array:
        return super().log_x(x[..., :128], omega[..., :128])


@CATALOGUE.defect("kernel-first-256", "Features after the 256th are not read.")
class KernelFirst256(Kernel):
    """Features after the 256th are not used."""

    def combine(self, a: Array, b: Array) -> Array:
        return super().combine(a[..., :256], b[..., :256])


@CATALOGUE.defect(
    "kernel-as-it-lies", "Vectors that are not contiguous are read in the wrong order."
)
class KernelAsItLies(Kernel):
    """Vectors are read as they lie in memory, as if they were contiguous."""

    def log_y(self, y: Array, omega: Array) -> Array:
        return super().log_y(as_it_lies(y), omega)


@CATALOGUE.defect(
    "kernel-single-precision-constants", "Seven digits in float64 unless S is a power of 4."
)
class KernelSinglePrecisionConstants(Kernel):
    """1/sqrt(S) of the features is rounded to float32."""

    def combine(self, a: Array, b: Array) -> Array:
        scale = a.dtype.type(np.float32(a.shape[-1] ** -0.5))
        return ((scale * np.exp(a)) * (scale * np.exp(b))).sum(-1)


@CATALOGUE.defect("kernel-half-precision-features", "Three digits, and overflow at 65504.")
class KernelHalfPrecision(Kernel):
    """Features are stored in float16."""

    def combine(self, a: Array, b: Array) -> Array:
        return (np.exp(a).astype(np.float16) * np.exp(b).astype(np.float16)).astype(float).mean(-1)


@CATALOGUE.defect(
    "kernel-exposed-features-unscaled",
    "Products of the exposed features are S times the kernel.",
    only=("omega", "feature_map"),
)
def exposed_unscaled(
    x: Array,
    y: Array | None = None,
    *,
    omega: Array | None = None,
    num_features: int | None = None,
    seed: int | None = None,
) -> Array:
    """The features of one vector without 1 / sqrt(S), or the kernel estimate, which is right."""
    kernel = Kernel()
    if y is None:
        assert omega is not None
        return np.exp(kernel.log_x(x, omega))
    return kernel(x, y, omega=omega, num_features=num_features, seed=seed)
