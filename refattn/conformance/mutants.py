"""A catalogue of wrong attention implementations, and of correct ones, to test a test kit with.

Everything here is dense, textbook NumPy, O(n m S) in time and memory, and independent of the
estimators of the package. Each class evaluates one estimator step by step; each mutant overrides
one step, and is the defect that its docstring names. Defects of the same step are shared between
estimators by composition. `MUTANTS` must all be rejected by the kit, `VARIANTS` all accepted.

Shapes: q (..., n, d), k (..., m, d), v (..., m, d_v), omega (..., S, d) in kernel coordinates,
which are d^(-1/4) times the arguments. Scores and weights have shape (..., n, m), log features
(..., n, S) and (..., m, S).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from scipy import special

__all__ = ["MUTANTS", "VARIANTS", "Mutant"]

Array = Any
Draw = Callable[[int, int, np.random.Generator], Array]


class Mutant(NamedTuple):
    """An implementation under test; `capabilities` are the optional keywords `fn` understands.

    `effect` is what a user sees, `seen` where the mistake has been met, `tags` what is claimed.
    """

    name: str
    estimator: str
    fn: Callable[..., Any]
    capabilities: tuple[str, ...]
    effect: str
    seen: str = ""
    tags: Mapping[str, Any] = MappingProxyType({})


# Frequencies


def normal(count: int, d: int, rng: np.random.Generator) -> Array:
    """Independent standard normal frequencies, shape (count, d): the correct law."""
    return rng.standard_normal((count, d))


def _orthonormal(
    count: int, d: int, rng: np.random.Generator, fix: Callable[[Array, Array], Array]
) -> Array:
    """Rows of blocks of d orthonormal vectors, Q and diag R being put together by `fix`."""
    blocks = []
    for _ in range(-(-count // d)):
        q, r = np.linalg.qr(rng.standard_normal((d, d)))
        blocks.append(fix(q, np.diagonal(r)).T)
    return np.concatenate(blocks)[:count]


def _chi(count: int, d: int, rng: np.random.Generator) -> Array:
    """Norms of standard normal vectors of length d, shape (count, 1)."""
    return np.sqrt(rng.chisquare(d, (count, 1)))


def haar(count: int, d: int, rng: np.random.Generator) -> Array:
    """Block-orthogonal frequencies, Haar directions with chi norms: correct as "orthogonal"."""
    rows = _orthonormal(count, d, rng, lambda q, r: q * np.sign(r))
    return rows * _chi(count, d, rng)


def qr_unsigned(count: int, d: int, rng: np.random.Generator) -> Array:
    """Directions from a bare QR, whose signs are LAPACK's convention and not random."""
    return _orthonormal(count, d, rng, lambda q, r: q) * _chi(count, d, rng)


def fixed_norms(count: int, d: int, rng: np.random.Generator) -> Array:
    """Haar directions, all of norm sqrt(d)."""
    return _orthonormal(count, d, rng, lambda q, r: q * np.sign(r)) * math.sqrt(d)


def normalised_rows(count: int, d: int, rng: np.random.Generator) -> Array:
    """Independent directions, all of norm sqrt(d)."""
    z = rng.standard_normal((count, d))
    return math.sqrt(d) * z / np.linalg.norm(z, axis=-1, keepdims=True)


def shrinking_norms(count: int, d: int, rng: np.random.Generator) -> Array:
    """Norms sqrt(d/S): the 1/sqrt(S) of the features has gone into the frequencies."""
    return normalised_rows(count, d, rng) / math.sqrt(count)


def norms_of_another_length(count: int, d: int, rng: np.random.Generator) -> Array:
    """Rows of length d whose norms are drawn for rows of half the length."""
    rows = _orthonormal(count, d, rng, lambda q, r: q * np.sign(r))
    return rows * _chi(count, (d + 1) // 2, rng)


def rademacher(count: int, d: int, rng: np.random.Generator) -> Array:
    """Entries +1 or -1."""
    return rng.integers(0, 2, (count, d)) * 2.0 - 1.0


def uniform(count: int, d: int, rng: np.random.Generator) -> Array:
    """Uniform entries of variance 1."""
    return rng.uniform(-math.sqrt(3), math.sqrt(3), (count, d))


def unit_uniform(count: int, d: int, rng: np.random.Generator) -> Array:
    """Uniform entries between 0 and 1: `random` for `standard_normal`."""
    return rng.random((count, d))


def laplace(count: int, d: int, rng: np.random.Generator) -> Array:
    """Laplace entries of variance 1."""
    return rng.laplace(scale=math.sqrt(0.5), size=(count, d))


def truncated(count: int, d: int, rng: np.random.Generator) -> Array:
    """Normal entries truncated at two standard deviations, as weight initialisers do."""
    low = special.ndtr(-2.0)
    return special.ndtri(rng.uniform(low, 1 - low, (count, d)))


def shared(count: int, d: int, rng: np.random.Generator) -> Array:
    """One frequency, repeated."""
    return np.tile(rng.standard_normal((1, d)), (count, 1))


def one_duplicate(count: int, d: int, rng: np.random.Generator) -> Array:
    """The last frequency repeats the first."""
    z = rng.standard_normal((count, d))
    z[-1] = z[0]
    return z


def repeated_halves(count: int, d: int, rng: np.random.Generator) -> Array:
    """Two halves, each drawn from a generator with the same seed."""
    half = rng.standard_normal((-(-count // 2), d))
    return np.concatenate([half, half])[:count]


def antithetic(count: int, d: int, rng: np.random.Generator) -> Array:
    """Pairs omega, -omega, not declared."""
    half = rng.standard_normal((-(-count // 2), d))
    return np.concatenate([half, -half])[:count]


def correlated(rho: float) -> Draw:
    """Frequencies with correlation rho between any two of a draw."""

    def draw(count: int, d: int, rng: np.random.Generator) -> Array:
        z = rng.standard_normal((count + 1, d))
        return math.sqrt(1 - rho) * z[1:] + math.sqrt(rho) * z[:1]

    return draw


def scaled(factor: float) -> Draw:
    """Frequencies multiplied by a factor."""

    def draw(count: int, d: int, rng: np.random.Generator) -> Array:
        return factor * rng.standard_normal((count, d))

    return draw


def mixed_entries(count: int, d: int, rng: np.random.Generator) -> Array:
    """Neighbouring entries of a frequency have correlation about .3."""
    z = rng.standard_normal((count, d + 1))
    return (z[:, :-1] + z[:, 1:] / 3) / math.sqrt(10 / 9)


def shifted(count: int, d: int, rng: np.random.Generator) -> Array:
    """Entries of mean .1."""
    return rng.standard_normal((count, d)) + 0.1


def positive_entries(count: int, d: int, rng: np.random.Generator) -> Array:
    """Absolute values of normal entries."""
    return np.abs(rng.standard_normal((count, d)))


def half_precision(count: int, d: int, rng: np.random.Generator) -> Array:
    """Frequencies rounded to float16."""
    return rng.standard_normal((count, d)).astype(np.float16).astype(np.float64)


def first_entry_zero(count: int, d: int, rng: np.random.Generator) -> Array:
    """A loop over the entries that starts at 1."""
    z = rng.standard_normal((count, d))
    z[:, 0] = 0.0
    return z


def box_muller_half(count: int, d: int, rng: np.random.Generator) -> Array:
    """Box-Muller with the angle in [0, pi) and so the sine never negative."""
    radius = np.sqrt(-2 * np.log1p(-rng.random((count, d))))
    angle = np.pi * rng.random((count, d))
    return radius * np.where(np.arange(d) % 2, np.sin(angle), np.cos(angle))


def fresh_entropy(seed: int | None) -> np.random.Generator:
    """The seed is dropped: every call differs."""
    return np.random.default_rng()


def constant_seed(seed: int | None) -> np.random.Generator:
    """The seed is dropped: every call is the same."""
    return np.random.default_rng(0)


def seed_mod_16(seed: int | None) -> np.random.Generator:
    """Four bits of the seed are used."""
    return np.random.default_rng(None if seed is None else seed % 16)


class Sampler:
    """How an implementation draws: a law of frequencies and a way to use the seed."""

    def __init__(
        self,
        draw: Draw = normal,
        generator: Callable[[int | None], np.random.Generator] = np.random.default_rng,
    ) -> None:
        self.draw, self.generator = draw, generator


# Kernel: an estimate of exp(x . y)


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
        return _project(x, omega) - _square(x)[..., None] / 2

    def log_y(self, y: Array, omega: Array) -> Array:
        """log xi(y, omega_s), shape (..., S)."""
        return self.log_x(y, omega)

    def combine(self, a: Array, b: Array) -> Array:
        """The mean of the products of the features."""
        return np.exp(a + b).mean(-1)


def _project(x: Array, omega: Array) -> Array:
    return np.einsum("...d,...sd->...s", x, omega)


def _square(x: Array) -> Array:
    return np.sum(x * x, axis=-1)


def _log_sum_exp(x: Array) -> Array:
    top = x.max(-1, keepdims=True)
    return top[..., 0] + np.log(np.exp(x - top).sum(-1))


class KernelLogSumExp(Kernel):
    """Correct: the mean is taken in the log domain."""

    def combine(self, a: Array, b: Array) -> Array:
        return np.exp(_log_sum_exp(a + b) - math.log(a.shape[-1]))


class KernelReversed(Kernel):
    """Correct: the frequencies are taken in another order, a running mean over them."""

    def combine(self, a: Array, b: Array) -> Array:
        mean = np.zeros(np.broadcast_shapes(a.shape, b.shape)[:-1], a.dtype)
        for count, s in enumerate(reversed(range(a.shape[-1])), 1):
            mean = mean + (np.exp(a[..., s] + b[..., s]) - mean) / count
        return mean


class KernelIndependent(Kernel):
    """The frequencies of y are drawn anew."""

    def log_y(self, y: Array, omega: Array) -> Array:
        rng = np.random.default_rng(abs(int(1e6 * omega[0, 0])))
        return self.log_x(y, rng.standard_normal(omega.shape))


class KernelTwoPi(Kernel):
    """2 pi multiplies the frequencies."""

    def log_x(self, x: Array, omega: Array) -> Array:
        return super().log_x(x, 2 * np.pi * omega)


class KernelWholeNorm(Kernel):
    """|x|^2 where |x|^2 / 2 is meant."""

    def log_x(self, x: Array, omega: Array) -> Array:
        return _project(x, omega) - _square(x)[..., None]


class KernelNormOfYDropped(Kernel):
    """The feature of y has no norm."""

    def log_y(self, y: Array, omega: Array) -> Array:
        return _project(y, omega)


class KernelNormUnsquared(Kernel):
    """|x| / 2 where |x|^2 / 2 is meant."""

    def log_x(self, x: Array, omega: Array) -> Array:
        return _project(x, omega) - np.sqrt(_square(x))[..., None] / 2


class KernelMedian(Kernel):
    """The median of the products for their mean."""

    def combine(self, a: Array, b: Array) -> Array:
        return np.median(np.exp(a + b), axis=-1)


class KernelTrimmed(Kernel):
    """The largest product is left out where there are at least three."""

    def combine(self, a: Array, b: Array) -> Array:
        product = np.sort(np.exp(a + b), axis=-1)
        return (product if product.shape[-1] < 3 else product[..., :-1]).mean(-1)


class KernelGeometric(Kernel):
    """The mean is taken of the logarithms."""

    def combine(self, a: Array, b: Array) -> Array:
        return np.exp((a + b).mean(-1))


class KernelEpsilon(Kernel):
    """1e-3 is added to each feature."""

    def combine(self, a: Array, b: Array) -> Array:
        return ((np.exp(a) + 1e-3) * (np.exp(b) + 1e-3)).mean(-1)


class KernelSum(Kernel):
    """1/S is missing."""

    def combine(self, a: Array, b: Array) -> Array:
        return np.exp(a + b).sum(-1)


class KernelBessel(Kernel):
    """The sum is divided by S - 1."""

    def combine(self, a: Array, b: Array) -> Array:
        return np.exp(a + b).sum(-1) / max(1, a.shape[-1] - 1)


class KernelMeansOfFeatures(Kernel):
    """The product of the means for the mean of the products."""

    def combine(self, a: Array, b: Array) -> Array:
        return np.exp(a).mean(-1) * np.exp(b).mean(-1)


class KernelMaximumKept(Kernel):
    """The largest exponent is taken out and not put back."""

    def combine(self, a: Array, b: Array) -> Array:
        return np.exp(a + b - (a + b).max(-1, keepdims=True)).mean(-1)


class KernelClipped(Kernel):
    """Exponents are clipped at 1 so that nothing overflows."""

    def combine(self, a: Array, b: Array) -> Array:
        return np.exp(np.minimum(a, 1) + np.minimum(b, 1)).mean(-1)


class KernelCosines(Kernel):
    """Cosines without their sines."""

    def log_x(self, x: Array, omega: Array) -> Array:
        return np.log(np.abs(np.cos(_project(x, omega)))) + _square(x)[..., None] / 2


class KernelScaled(Kernel):
    """x and y are divided by d^(1/4), the scale of attention."""

    def log_x(self, x: Array, omega: Array) -> Array:
        return super().log_x(x * x.shape[-1] ** -0.25, omega)


class KernelOddFeature(Kernel):
    """The last of an odd number of features is lost, as where they are split in two."""

    def combine(self, a: Array, b: Array) -> Array:
        even = max(2, a.shape[-1] // 2 * 2)
        return super().combine(a[..., :even], b[..., :even])


class KernelHalfPrecision(Kernel):
    """Features are stored in float16."""

    def combine(self, a: Array, b: Array) -> Array:
        return (np.exp(a).astype(np.float16) * np.exp(b).astype(np.float16)).astype(float).mean(-1)


# Attention: weights over the keys that a query sees


class Draws(NamedTuple):
    """What the caller says about frequencies: given ones, or how many and from which seed."""

    omega: Array | None
    centres: Array | None
    number: int | None
    seed: int | None


class Attention(Sampler):
    """Dense attention: weights over the visible keys, then the weighted mean of the values."""

    def __call__(
        self,
        q: Array,
        k: Array,
        v: Array,
        *,
        omega: Array | None = None,
        centres: Array | None = None,
        num_features: int | None = None,
        num_samples: int | None = None,
        num_proposals: int | None = None,
        seed: int | None = None,
        mask: Array | None = None,
        causal: bool = False,
    ) -> Array:
        k, v = self.share(q, k), self.share(q, v)
        visible = self.visible(q.shape[-2], k.shape[-2], mask, causal)
        draws = Draws(omega, centres, num_features or num_samples or num_proposals, seed)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            return self.attend(q, k, v, visible, draws).astype(q.dtype)

    def share(self, q: Array, x: Array) -> Array:
        """Repeat the G heads of keys or values for the H heads of queries."""
        if q.ndim < 3 or x.ndim < 3 or x.shape[-3] in (1, q.shape[-3]):
            return x
        return self.repeat(x, q.shape[-3] // x.shape[-3])

    def repeat(self, x: Array, times: int) -> Array:
        """Consecutive query heads share a key head."""
        return np.repeat(x, times, axis=-3)

    def visible(self, n: int, m: int, mask: Array | None, causal: bool) -> Array:
        """Which query sees which key, shape (..., n, m)."""
        seen = np.ones((n, m), bool) if mask is None else np.ones((n, m), bool) & self.mask(mask)
        return seen & self.past(np.arange(n)[:, None], np.arange(m), m - n) if causal else seen

    def mask(self, mask: Array) -> Array:
        """True where the query attends to the key."""
        return mask

    def past(self, i: Array, j: Array, shift: int) -> Array:
        """Keys up to the query; the last query sees the last key."""
        return j <= i + shift

    def attend(self, q: Array, k: Array, v: Array, visible: Array, draws: Draws) -> Array:
        """The output, shape (..., n, d_v)."""
        return self.average(self.weights(q, k, visible, draws), v, visible)

    def weights(self, q: Array, k: Array, visible: Array, draws: Draws) -> Array:
        """Weights up to a factor for each query, 0 where hidden."""
        raise NotImplementedError

    def average(self, weights: Array, v: Array, visible: Array) -> Array:
        """The weighted mean; 0 for queries that see no key."""
        total = np.where(visible.any(-1, keepdims=True), self.total(weights, visible), 1)
        return self.sum(weights, v, visible) / total.astype(v.dtype)

    def total(self, weights: Array, visible: Array) -> Array:
        """The normaliser, shape (..., n, 1)."""
        return weights.sum(-1, keepdims=True)

    def sum(self, weights: Array, v: Array, visible: Array) -> Array:
        """The weighted sum; what is in a hidden value does not matter."""
        return (weights[..., None] * np.where(visible[..., None], v[..., None, :, :], 0)).sum(-2)


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
        return k @ omega.swapaxes(-1, -2) - _square(k)[..., None] / 2

    def log_features(self, q: Array, k: Array, visible: Array, draws: Draws) -> tuple[Array, Array]:
        """Logarithms of the features of queries and keys."""
        q, k = q * self.root(q.shape[-1]), k * self.root(k.shape[-1])
        omega = self.frequencies(q, k, visible, draws).astype(q.dtype)
        return self.log_q(q, omega), self.log_k(k, omega)

    def scores(self, q: Array, k: Array, visible: Array, draws: Draws) -> Array:
        return self.log_kernel(*self.log_features(q, k, visible, draws))

    def log_kernel(self, log_q: Array, log_k: Array) -> Array:
        """Logarithm of the sum over frequencies of the products of features."""
        return _log_sum_exp(log_q[..., :, None, :] + log_k[..., None, :, :])

    def weights(self, q: Array, k: Array, visible: Array, draws: Draws) -> Array:
        return self.combine(*self.log_features(q, k, visible, draws), visible)

    def combine(self, log_q: Array, log_k: Array, visible: Array) -> Array:
        """Sums of products of features, up to a factor for each query, 0 where hidden."""
        return self.exponentiate(self.log_kernel(log_q, log_k), visible)


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
        return omega @ centres.swapaxes(-1, -2) - _square(centres)[..., None, :] / 2

    def log_weight(self, omega: Array, centres: Array) -> Array:
        """Importance weights against the mixture of all proposals, shape (..., S)."""
        return -_log_sum_exp(self.log_density(omega, centres))


class Linear(Attention):
    """Linear attention with features elu(x) + 1."""

    def phi(self, x: Array) -> Array:
        """1 + x for positive x, exp(x) for others."""
        return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))

    def phi_k(self, k: Array) -> Array:
        """Features of the keys."""
        return self.phi(k)

    def weights(self, q: Array, k: Array, visible: Array, draws: Draws) -> Array:
        return np.where(visible, self.phi(q) @ self.phi_k(k).swapaxes(-1, -2), 0)


# Correct in another way


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


class Upcast(Attention):
    """Correct: everything in float64, the result rounded to the dtype of the query."""

    def attend(self, q: Array, k: Array, v: Array, visible: Array, draws: Draws) -> Array:
        q, k, v = (x.astype(np.float64) for x in (q, k, v))
        return super().attend(q, k, v, visible, draws)


class FeaturesReversed(RFA):
    """Correct: the frequencies in another order."""

    def combine(self, log_q: Array, log_k: Array, visible: Array) -> Array:
        return super().combine(log_q[..., ::-1], log_k[..., ::-1], visible)


class StabilisedByQuery(RFA):
    """Correct: one maximum for each query, over visible keys and frequencies, then plain sums."""

    def combine(self, log_q: Array, log_k: Array, visible: Array) -> Array:
        terms = log_q[..., :, None, :] + log_k[..., None, :, :]
        terms = np.where(visible[..., None], terms, -np.inf)
        top = terms.max((-1, -2), keepdims=True, initial=-np.inf)
        top = np.where(top == -np.inf, 0.0, top).astype(terms.dtype)
        return np.exp(terms - top).sum(-1)


class GumbelMax(RA):
    """Correct: components drawn as the largest of the scores plus Gumbel noise."""

    def choose(self, share: Array, count: int, rng: np.random.Generator) -> Array:
        gumbel = rng.gumbel(size=(*share.shape[:-1], count, share.shape[-1]))
        with np.errstate(divide="ignore"):
            return (np.log(share)[..., None, :] + gumbel).argmax(-1)


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


# Defects of any attention: heads, masks, causality, normalisers


class Interleaved(Attention):
    """Query head h reads key head h mod G."""

    def repeat(self, x: Array, times: int) -> Array:
        return np.concatenate([x] * times, axis=-3)


class FirstHead(Attention):
    """All query heads read the first key head where heads are grouped."""

    def repeat(self, x: Array, times: int) -> Array:
        return np.repeat(x[..., :1, :, :], times * x.shape[-3], axis=-3)


class ValuesOfNextHead(Attention):
    """Values come from the next head."""

    def average(self, weights: Array, v: Array, visible: Array) -> Array:
        return super().average(weights, np.roll(v, -1, axis=-3) if v.ndim > 2 else v, visible)


class HeadsMixed(Attention):
    """Values laid out (heads, tokens) are read as (tokens, heads)."""

    def average(self, weights: Array, v: Array, visible: Array) -> Array:
        if v.ndim > 2:
            *lead, heads, m, size = v.shape
            v = v.reshape(*lead, m, heads, size).swapaxes(-2, -3)
        return super().average(weights, v, visible)


class MaskOffByOne(Attention):
    """The mask is shifted by one key."""

    def mask(self, mask: Array) -> Array:
        return np.roll(mask, 1, axis=-1)


class MaskInverted(Attention):
    """True hides the key."""

    def mask(self, mask: Array) -> Array:
        return ~mask


class MaskIgnored(Attention):
    """The mask is accepted and not used."""

    def mask(self, mask: Array) -> Array:
        return np.ones_like(mask)


class MaskOfFirstQuery(Attention):
    """The mask of the first query serves for all."""

    def mask(self, mask: Array) -> Array:
        return mask[..., :1, :] if mask.ndim > 1 else mask


class MaskDroppedWhenCausal(Attention):
    """The causal mask replaces the caller's."""

    def visible(self, n: int, m: int, mask: Array | None, causal: bool) -> Array:
        return super().visible(n, m, None if causal else mask, causal)


class MaskOnValues(Attention):
    """Hidden values are zeroed, but hidden keys still count in the normaliser."""

    def weights(self, q: Array, k: Array, visible: Array, draws: Draws) -> Array:
        return super().weights(q, k, np.ones_like(visible), draws)

    def sum(self, weights: Array, v: Array, visible: Array) -> Array:
        return super().sum(np.where(visible, weights, 0), v, visible)


class CausalStrict(Attention):
    """A query does not see its own key."""

    def past(self, i: Array, j: Array, shift: int) -> Array:
        return j < i + shift


class CausalAhead(Attention):
    """A query sees the key after its own."""

    def past(self, i: Array, j: Array, shift: int) -> Array:
        return j <= i + shift + 1


class CausalIgnored(Attention):
    """`causal` is accepted and not used."""

    def past(self, i: Array, j: Array, shift: int) -> Array:
        return j >= 0 * i


class CausalTopLeft(Attention):
    """The first query sees the first key only, also where there are more keys than queries."""

    def past(self, i: Array, j: Array, shift: int) -> Array:
        return j <= i


class CausalByBlocks(Attention):
    """Causal between blocks of eight only: a query sees all keys of its block."""

    def past(self, i: Array, j: Array, shift: int) -> Array:
        return j // 8 <= (i + shift) // 8


class CausalBucketExcluded(Attention):
    """A query sees the keys of earlier buckets of 64, not those of its own."""

    def past(self, i: Array, j: Array, shift: int) -> Array:
        return j // 64 < (i + shift) // 64


class CausalWindow(Attention):
    """A query sees the last eight keys only."""

    def past(self, i: Array, j: Array, shift: int) -> Array:
        return (j <= i + shift) & (j > i + shift - 8)


class CausalOverChannels(Attention):
    """The causal sum runs over the channels of the output."""

    def __call__(self, q: Array, k: Array, v: Array, **options: Any) -> Array:
        if not options.pop("causal", False):
            return super().__call__(q, k, v, **options)
        out = super().__call__(q, k, v, **options)
        return np.cumsum(out, axis=-1) / np.arange(1, v.shape[-1] + 1, dtype=out.dtype)


class TailDropped(Attention):
    """Keys after the last whole block of four are never read."""

    def visible(self, n: int, m: int, mask: Array | None, causal: bool) -> Array:
        read = np.arange(m) < (m // 4 * 4 or m)
        return super().visible(n, m, mask, causal) & read


class TailOfQueriesDropped(Attention):
    """Queries after the last whole block of four are never written."""

    def average(self, weights: Array, v: Array, visible: Array) -> Array:
        n = weights.shape[-2]
        written = np.arange(n)[:, None] < (n // 4 * 4 or n)
        return np.where(written, super().average(weights, v, visible), 0)


class AbsoluteEpsilon(Attention):
    """1e-6 is added to the normaliser."""

    def total(self, weights: Array, visible: Array) -> Array:
        return super().total(weights, visible) + 1e-6


class HalfPrecisionWeights(Attention):
    """Weights are stored in float16."""

    def average(self, weights: Array, v: Array, visible: Array) -> Array:
        return super().average(weights.astype(np.float16).astype(v.dtype), v, visible)


class SinglePrecision(Attention):
    """float64 arguments are computed with in float32."""

    def attend(self, q: Array, k: Array, v: Array, visible: Array, draws: Draws) -> Array:
        q, k, v = (x.astype(np.float32) for x in (q, k, v))
        return super().attend(q, k, v, visible, draws)


class Dropout(Attention):
    """Dropout of a tenth of the weights is left on."""

    def average(self, weights: Array, v: Array, visible: Array) -> Array:
        kept = np.random.default_rng().random(weights.shape) > 0.1
        return super().average(np.where(kept, weights, 0), v, visible)


# Softmax


class ScaleMissing(Softmax):
    """Scores are q . k."""

    def scale(self, d: int) -> float:
        return 1.0


class ScaleTwice(Softmax):
    """Scores are q . k / d."""

    def scale(self, d: int) -> float:
        return 1 / d


class ScaleFromNextPowerOfTwo(Softmax):
    """The scale is that of the padded head size."""

    def scale(self, d: int) -> float:
        return float((1 << (d - 1).bit_length()) ** -0.5)


class FiniteMask(Softmax):
    """Hidden scores are replaced by a large negative number."""

    hidden = -1e9

    def exponentiate(self, scores: Array, visible: Array) -> Array:
        scores = np.where(visible, scores, self.hidden)
        return np.exp(scores - scores.max(-1, keepdims=True))

    def average(self, weights: Array, v: Array, visible: Array) -> Array:
        return weights @ v / weights.sum(-1, keepdims=True)


class SmallFiniteMask(FiniteMask):
    """Hidden scores are replaced by -1e4, as float16 requires."""

    hidden = -1e4


class AddedMask(FiniteMask):
    """A finite number is added to hidden scores, and large scores outbid it."""

    def exponentiate(self, scores: Array, visible: Array) -> Array:
        scores = scores + np.where(visible, 0, -1e4).astype(scores.dtype)
        return np.exp(scores - scores.max(-1, keepdims=True))


class IntegerMask(FiniteMask):
    """The boolean mask is added to the scores as 0 and 1."""

    def exponentiate(self, scores: Array, visible: Array) -> Array:
        scores = scores + visible.astype(scores.dtype)
        return np.exp(scores - scores.max(-1, keepdims=True))


class MaximumOverHidden(Softmax):
    """The maximum that is subtracted ranges over hidden keys too."""

    def exponentiate(self, scores: Array, visible: Array) -> Array:
        return np.where(visible, np.exp(scores - scores.max(-1, keepdims=True)), 0)


class MaximumGlobal(Softmax):
    """One maximum for all queries is subtracted."""

    def exponentiate(self, scores: Array, visible: Array) -> Array:
        scores = np.where(visible, scores, -np.inf)
        return np.exp(scores - scores.max())


class Overflowing(Softmax):
    """Nothing is subtracted, and what overflows becomes 0."""

    def exponentiate(self, scores: Array, visible: Array) -> Array:
        return np.where(visible, np.exp(scores), 0)

    def average(self, weights: Array, v: Array, visible: Array) -> Array:
        return np.nan_to_num(super().average(weights, v, visible), posinf=0, neginf=0)


class Clipped(Softmax):
    """Scores are clipped to [-5, 5]."""

    def exponentiate(self, scores: Array, visible: Array) -> Array:
        return super().exponentiate(np.clip(scores, -5, 5), visible)


class SoftCapped(Softmax):
    """Scores pass through 30 tanh(s / 30)."""

    def exponentiate(self, scores: Array, visible: Array) -> Array:
        return super().exponentiate(30 * np.tanh(scores / 30), visible)


class BaseTwo(Softmax):
    """2^s where e^s is meant: log2(e) has not gone into the scale."""

    def exponentiate(self, scores: Array, visible: Array) -> Array:
        return super().exponentiate(scores * math.log(2), visible)


class OverQueries(Softmax):
    """The softmax is taken over the queries."""

    def exponentiate(self, scores: Array, visible: Array) -> Array:
        scores = np.where(visible, scores, -1e30)
        return np.where(visible, np.exp(scores - scores.max(-2, keepdims=True)), 0)

    def average(self, weights: Array, v: Array, visible: Array) -> Array:
        total = weights.sum(-2, keepdims=True)
        return self.sum(weights / np.where(total == 0, 1, total), v, visible)


class PlusOne(Softmax):
    """1 is added to the normaliser, relative to the maximum."""

    def total(self, weights: Array, visible: Array) -> Array:
        return super().total(weights, visible) + 1


class SmallPlus(Softmax):
    """1e-8 is added to the normaliser."""

    def total(self, weights: Array, visible: Array) -> Array:
        return super().total(weights, visible) + 1e-8


class EmptyRowNaN(Softmax):
    """Queries that see no key become 0 / 0."""

    def average(self, weights: Array, v: Array, visible: Array) -> Array:
        return self.sum(weights, v, visible) / weights.sum(-1, keepdims=True)


class TopFour(Softmax):
    """Only the four largest weights are kept."""

    def exponentiate(self, scores: Array, visible: Array) -> Array:
        weights = super().exponentiate(scores, visible)
        return np.where(weights >= np.sort(weights, axis=-1)[..., -4:][..., :1], weights, 0)


class Linearised(Softmax):
    """exp(s) by its series up to s^4."""

    def exponentiate(self, scores: Array, visible: Array) -> Array:
        return np.where(visible, sum(scores**p / math.factorial(p) for p in range(5)), 0)


class Normalised(Softmax):
    """Queries and keys are scaled to unit length first."""

    def scores(self, q: Array, k: Array, visible: Array, draws: Draws) -> Array:
        q, k = (x / np.maximum(np.sqrt(_square(x)), 1e-12)[..., None] for x in (q, k))
        return super().scores(q, k, visible, draws)


class SinglePrecisionScores(Softmax):
    """Scores are accumulated in float32 whatever the dtype."""

    def scores(self, q: Array, k: Array, visible: Array, draws: Draws) -> Array:
        return super().scores(q.astype(np.float32), k.astype(np.float32), visible, draws)


class HalfPrecisionValues(Softmax):
    """Values are stored in float16."""

    def average(self, weights: Array, v: Array, visible: Array) -> Array:
        return super().average(weights, v.astype(np.float16).astype(v.dtype), visible)


class NotRescaled(Online):
    """The sums so far are not rescaled when the maximum of a later block is larger."""

    def keep(self, top: Array, new: Array) -> Array:
        return np.where(top == -np.inf, 0.0, 1.0).astype(new.dtype)


class PaddedBlocks(Softmax):
    """The last block is padded to four with zero keys that count."""

    def total(self, weights: Array, visible: Array) -> Array:
        return super().total(weights, visible) + (-weights.shape[-1] % 4) / weights.shape[-1]


# Random feature attention


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


class FeatureEpsilon(Direct):
    """A constant is added to each stabilised feature."""

    epsilon = 1e-4

    def phi_q(self, log_q: Array) -> Array:
        return super().phi_q(log_q) + self.epsilon

    def phi_k(self, log_k: Array) -> Array:
        return super().phi_k(log_k) + self.epsilon


class SmallFeatureEpsilon(FeatureEpsilon):
    """1e-6 is added to each stabilised feature."""

    epsilon = 1e-6


class FeatureEpsilonAfterNorm(FeatureEpsilon):
    """1e-4 is added to features stabilised by the largest omega . x, without |x|^2 / 2."""

    def log_features(self, q: Array, k: Array, visible: Array, draws: Draws) -> tuple[Array, Array]:
        log_q, log_k = super().log_features(q, k, visible, draws)
        half_q, half_k = (_square(x * self.root(x.shape[-1]))[..., None] / 2 for x in (q, k))
        largest = (log_k + half_k).max((-1, -2), keepdims=True)
        return log_q - half_q - log_q.max(-1, keepdims=True), log_k - largest

    def phi_q(self, log_q: Array) -> Array:
        return np.exp(log_q) + self.epsilon

    def phi_k(self, log_k: Array) -> Array:
        return np.exp(log_k) + self.epsilon


class Plain(RFA):
    """Features as they are defined, without stabilisation."""

    def log_q(self, q: Array, omega: Array) -> Array:
        return super().log_q(q, omega) - _square(q)[..., None] / 2

    def combine(self, log_q: Array, log_k: Array, visible: Array) -> Array:
        return np.where(visible, np.exp(log_q) @ np.exp(log_k).swapaxes(-1, -2), 0)


class PlainFeatureEpsilon(Plain):
    """1e-3 is added to each feature, without stabilisation."""

    def combine(self, log_q: Array, log_k: Array, visible: Array) -> Array:
        return np.where(
            visible, (np.exp(log_q) + 1e-3) @ (np.exp(log_k) + 1e-3).swapaxes(-1, -2), 0
        )


class NormaliserClamped(Direct):
    """The normaliser is at least 1e-2 after stabilisation."""

    def total(self, weights: Array, visible: Array) -> Array:
        return np.maximum(super().total(weights, visible), 1e-2)


class NormaliserEpsilon(Direct):
    """1e-6 is added to the stabilised normaliser."""

    def total(self, weights: Array, visible: Array) -> Array:
        return super().total(weights, visible) + 1e-6


class MaximumOfKeyKept(Direct):
    """Each key is stabilised by its own maximum, which is not put back."""

    def phi_k(self, log_k: Array) -> Array:
        return np.exp(log_k - log_k.max(-1, keepdims=True))


class MaximumOfFeatureKept(Direct):
    """Each feature of the keys is stabilised by its own maximum, which is not put back."""

    def phi_k(self, log_k: Array) -> Array:
        return np.exp(log_k - log_k.max(-2, keepdims=True))


class SampleNormalisersDropped(Direct):
    """Features of keys are softmaxed over the keys, and their normalisers forgotten."""

    def phi_k(self, log_k: Array) -> Array:
        return special.softmax(log_k, axis=-2)


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


class RFAOverflowing(Plain):
    """Plain features, and what overflows becomes 0."""

    def average(self, weights: Array, v: Array, visible: Array) -> Array:
        return np.nan_to_num(super().average(weights, v, visible), posinf=0, neginf=0)


class RootTwice(RFA):
    """d^(-1/4) is applied twice."""

    def root(self, d: int) -> float:
        return float(d**-0.5)


class RootMissing(RFA):
    """No scale at all."""

    def root(self, d: int) -> float:
        return 1.0


class KeyNormDropped(RFA):
    """The features of keys have no norm."""

    def log_k(self, k: Array, omega: Array) -> Array:
        return k @ omega.swapaxes(-1, -2)


class KeyNormWhole(RFA):
    """|k|^2 where |k|^2 / 2 is meant."""

    def log_k(self, k: Array, omega: Array) -> Array:
        return super().log_k(k, omega) - _square(k)[..., None] / 2


class KeyNormUnscaled(RFA):
    """|k|^2 / 2 is taken before k is scaled."""

    def log_k(self, k: Array, omega: Array) -> Array:
        excess = _square(k) * (self.root(k.shape[-1]) ** -2 - 1) / 2
        return super().log_k(k, omega) - excess[..., None]


class KeyNormConstant(RFA):
    """The mean over keys of |k|^2 for each key's own."""

    def log_k(self, k: Array, omega: Array) -> Array:
        return k @ omega.swapaxes(-1, -2) - _square(k).mean(-1)[..., None, None] / 2


class OtherFrequenciesForKeys(RFA):
    """Queries and keys have different frequencies."""

    def log_k(self, k: Array, omega: Array) -> Array:
        return super().log_k(k, np.roll(omega, 1, axis=-1))


class FrequencyNegatedForKeys(RFA):
    """Keys have the frequencies of opposite sign."""

    def log_k(self, k: Array, omega: Array) -> Array:
        return super().log_k(k, -omega)


class TwoPi(RFA):
    """2 pi multiplies the frequencies of N(0, I)."""

    def log_q(self, q: Array, omega: Array) -> Array:
        return super().log_q(q, 2 * np.pi * omega)

    def log_k(self, k: Array, omega: Array) -> Array:
        return super().log_k(k, 2 * np.pi * omega)


class LastFeatureDropped(RFA):
    """The last of more than one frequency is not used."""

    def log_features(self, q: Array, k: Array, visible: Array, draws: Draws) -> tuple[Array, Array]:
        log_q, log_k = super().log_features(q, k, visible, draws)
        count = max(1, log_q.shape[-1] - 1)
        return log_q[..., :count], log_k[..., :count]


class FrequenciesPerHeadIgnored(RFA):
    """The frequencies of the first head serve for all."""

    def frequencies(self, q: Array, k: Array, visible: Array, draws: Draws) -> Array:
        omega = super().frequencies(q, k, visible, draws)
        return omega[..., :1, :, :] if omega.ndim > 2 else omega


class FrequenciesUnscaled(RFA):
    """Given or drawn frequencies are taken for those of unscaled arguments."""

    def frequencies(self, q: Array, k: Array, visible: Array, draws: Draws) -> Array:
        return super().frequencies(q, k, visible, draws) * self.root(q.shape[-1])


class SeedFromData(RFA):
    """The sum of the queries goes into the seed."""

    def frequencies(self, q: Array, k: Array, visible: Array, draws: Draws) -> Array:
        data = math.ceil(abs(float(q.sum())) * 1e6) % 2**32
        seed = None if draws.seed is None else draws.seed + data
        return super().frequencies(q, k, visible, draws._replace(seed=seed))


class ReluFeatures(RFA):
    """max(omega . x, 0) + 1e-3 for the exponential."""

    def log_q(self, q: Array, omega: Array) -> Array:
        return np.log(np.maximum(q @ omega.swapaxes(-1, -2), 0) + 1e-3)

    def log_k(self, k: Array, omega: Array) -> Array:
        return self.log_q(k, omega)


class CosinesOnly(RFA):
    """exp(|x|^2/2) |cos(omega . x)|, without sines."""

    def log_q(self, q: Array, omega: Array) -> Array:
        wave = np.abs(np.cos(q @ omega.swapaxes(-1, -2)))
        return np.log(np.maximum(wave, 1e-300)) + _square(q)[..., None] / 2

    def log_k(self, k: Array, omega: Array) -> Array:
        return self.log_q(k, omega)


class MaximumOverFrequencies(RFA):
    """The largest product of features for their sum."""

    def log_kernel(self, log_q: Array, log_k: Array) -> Array:
        return (log_q[..., :, None, :] + log_k[..., None, :, :]).max(-1)


class HalfPrecisionFeatures(Direct):
    """Stabilised features are stored in float16."""

    def phi_q(self, log_q: Array) -> Array:
        return super().phi_q(log_q).astype(np.float16).astype(log_q.dtype)

    def phi_k(self, log_k: Array) -> Array:
        return super().phi_k(log_k).astype(np.float16).astype(log_k.dtype)


class ExactInstead(RFA):
    """Exact attention, whatever the frequencies."""

    def weights(self, q: Array, k: Array, visible: Array, draws: Draws) -> Array:
        return Softmax.weights(self, q, k, visible, draws)

    def scores(self, q: Array, k: Array, visible: Array, draws: Draws) -> Array:
        return Softmax.scores(self, q, k, visible, draws)


class RandomizedInstead(RA):
    """Randomized attention under the name of random feature attention."""


# Randomized attention


class StandardNormal(RA):
    """Frequencies of N(0, I): random feature attention's."""

    def sample(
        self, q: Array, k: Array, visible: Array, count: int, rng: np.random.Generator
    ) -> Array:
        return self.noise((*visible.shape[:-2], q.shape[-2], count, q.shape[-1]), rng)


class UniformComponent(RA):
    """Components are drawn uniformly from the keys."""

    def temper(self, scores: Array) -> Array:
        return 0 * scores


class Tempered(RA):
    """Components are drawn at temperature 1.2."""

    def temper(self, scores: Array) -> Array:
        return scores / 1.2


class Greedy(RA):
    """The component is always the key of largest weight."""

    def choose(self, share: Array, count: int, rng: np.random.Generator) -> Array:
        return np.repeat(share.argmax(-1)[..., None], count, axis=-1)


class OneComponent(RA):
    """All samples of a query have the same component, with noises of their own."""

    def choose(self, share: Array, count: int, rng: np.random.Generator) -> Array:
        return np.repeat(super().choose(share, 1, rng), count, axis=-1)


class DrawIgnoresMask(RA):
    """Components are drawn from hidden keys too."""

    def sample(
        self, q: Array, k: Array, visible: Array, count: int, rng: np.random.Generator
    ) -> Array:
        return super().sample(q, k, np.ones_like(visible), count, rng)


class HalfPrecisionChoice(RA):
    """Inversion of a float16 cumulative sum, the rest falling to the last key."""

    def choose(self, share: Array, count: int, rng: np.random.Generator) -> Array:
        share = (share / share.sum(-1, keepdims=True)).astype(np.float16)
        up_to = np.cumsum(share, axis=-1, dtype=np.float16).astype(np.float64)
        u = rng.random((*share.shape[:-1], count))
        pick = (up_to[..., None, :] <= u[..., None]).sum(-1)
        return np.minimum(pick, share.shape[-1] - 1)


class QueryDropped(RA):
    """Frequencies k_J + noise."""

    def sample(
        self, q: Array, k: Array, visible: Array, count: int, rng: np.random.Generator
    ) -> Array:
        return super().sample(q, k, visible, count, rng) - q[..., None, :]


class KeyDropped(RA):
    """Frequencies q + noise."""

    def sample(
        self, q: Array, k: Array, visible: Array, count: int, rng: np.random.Generator
    ) -> Array:
        return q[..., None, :] + self.noise((*q.shape[:-1], count, q.shape[-1]), rng)


class AveragedGaussian(RA):
    """One Gaussian at q plus the mean key, N(q + sum_j pi_j k_j, I), for the mixture."""

    def sample(
        self, q: Array, k: Array, visible: Array, count: int, rng: np.random.Generator
    ) -> Array:
        share = self.exponentiate(q @ k.swapaxes(-1, -2), visible)
        centre = q + share / share.sum(-1, keepdims=True) @ k
        return centre[..., None, :] + self.noise((*q.shape[:-1], count, q.shape[-1]), rng)


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


class NoiseDropped(RA):
    """The frequencies are the centres of the components."""

    def noise(self, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
        return np.zeros(shape)


class NoiseOfUnscaledSpace(RA):
    """Unit noise before the scale, which is d^(-1/4) after it."""

    def noise(self, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
        return shape[-1] ** -0.25 * rng.standard_normal(shape)


class NoiseTooLarge(RA):
    """Noise of standard deviation 1.2."""

    def noise(self, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
        return 1.2 * rng.standard_normal(shape)


class NoiseShared(RA):
    """All samples of a query have the same noise."""

    def noise(self, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
        return np.broadcast_to(rng.standard_normal((*shape[:-2], 1, shape[-1])), shape)


class OneSampleUsed(RA):
    """The first of the samples is used, however many there are."""

    def frequencies(self, q: Array, k: Array, visible: Array, draws: Draws) -> Array:
        return super().frequencies(q, k, visible, draws)[..., :1, :]


class OneSampleRepeated(RA):
    """One sample is drawn and repeated."""

    def sample(
        self, q: Array, k: Array, visible: Array, count: int, rng: np.random.Generator
    ) -> Array:
        return np.repeat(super().sample(q, k, visible, 1, rng), count, axis=-2)


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


class QueriesShareFrequencies(RA):
    """All queries use the frequencies of the first."""

    def frequencies(self, q: Array, k: Array, visible: Array, draws: Draws) -> Array:
        return super().frequencies(q, k, visible, draws)[..., :1, :, :]


class RatioOfMeans(RA):
    """The ratio of the means over samples for the mean of the ratios."""

    def over_samples(self, weights: Array, log_k: Array, visible: Array) -> Array:
        top = log_k.max((-1, -2), keepdims=True)
        return np.where(visible[..., None, :], np.exp(log_k - top), 0).sum(-2)


# Linear randomized attention


class OwnWeights(LARA):
    """Each frequency is weighted against its own proposal only."""

    def log_weight(self, omega: Array, centres: Array) -> Array:
        return _square(centres) / 2 - np.sum(omega * centres, axis=-1)


class NoWeights(LARA):
    """Frequencies are weighted as if drawn from N(0, I)."""

    def log_weight(self, omega: Array, centres: Array) -> Array:
        return np.zeros(np.broadcast_shapes(omega.shape, centres.shape)[:-1], omega.dtype)


class WeightsInverted(LARA):
    """The importance weights have the wrong sign."""

    def log_weight(self, omega: Array, centres: Array) -> Array:
        return -super().log_weight(omega, centres)


class CentreNormDropped(LARA):
    """The densities of the proposals have no norm of the centre."""

    def log_density(self, omega: Array, centres: Array) -> Array:
        return omega @ centres.swapaxes(-1, -2)


class GeometricMixture(LARA):
    """The mean of the logarithms of the densities for the logarithm of their mean."""

    def log_weight(self, omega: Array, centres: Array) -> Array:
        return -self.log_density(omega, centres).mean(-1)


class BalanceOverFrequencies(LARA):
    """The balance heuristic sums over frequencies in place of proposals."""

    def log_weight(self, omega: Array, centres: Array) -> Array:
        return -_log_sum_exp(self.log_density(omega, centres).swapaxes(-1, -2))


class CentresWithoutKeys(LARA):
    """Proposals sit at the mean queries, and the weights say so: slower, and a law of its own."""

    def centres(self, q: Array, k: Array, visible: Array, count: int) -> Array:
        return self.chunk_means(q, np.ones(q.shape[-2], bool), count)


class LastProposalDropped(LARA):
    """The last of more than one frequency is not used."""

    def log_features(self, q: Array, k: Array, visible: Array, draws: Draws) -> tuple[Array, Array]:
        log_q, log_k = super().log_features(q, k, visible, draws)
        count = max(1, log_q.shape[-1] - 1)
        return log_q[..., :count], log_k[..., :count]


class LARANoiseDropped(LARA):
    """The frequencies are the centres."""

    def noise(self, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
        return np.zeros(shape)


class LARANoiseOfUnscaledSpace(LARA):
    """Unit noise before the scale, which is d^(-1/4) after it."""

    def noise(self, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
        return shape[-1] ** -0.25 * rng.standard_normal(shape)


class LARANoiseShared(LARA):
    """All proposals have the same noise."""

    def noise(self, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
        return np.broadcast_to(rng.standard_normal((*shape[:-2], 1, shape[-1])), shape)


class ClampedQueryWeights(LARA):
    """Weights that depend on the query, normalised over queries and clamped at 1e-8."""

    def log_features(self, q: Array, k: Array, visible: Array, draws: Draws) -> tuple[Array, Array]:
        log_q, log_k = super().log_features(q, k, visible, draws)
        q = q * self.root(q.shape[-1])
        means = self.chunk_means(q, np.ones(q.shape[-2], bool), log_q.shape[-1])
        t = special.softmax(q @ means.swapaxes(-1, -2), axis=-2)
        alpha = np.maximum(1 / t.shape[-1] + t - t.mean(-1, keepdims=True), 1e-8)
        return log_q + np.log(alpha), log_k


# Linear attention


class Cancelling(Linear):
    """(exp(x) - 1) + 1."""

    def phi(self, x: Array) -> Array:
        return np.where(x > 0, x, np.expm1(np.minimum(x, 0))) + x.dtype.type(1)


class EluWithoutOne(Linear):
    """elu(x), which has both signs."""

    def phi(self, x: Array) -> Array:
        return np.where(x > 0, x, np.expm1(np.minimum(x, 0)))


class EluTenth(Linear):
    """elu with alpha = .1, plus 1."""

    def phi(self, x: Array) -> Array:
        return 1 + np.where(x > 0, x, 0.1 * np.expm1(np.minimum(x, 0))).astype(x.dtype)


class EluBlended(Linear):
    """Both branches times 0 or 1, and 0 times infinity is NaN."""

    def phi(self, x: Array) -> Array:
        return (x > 0) * (x + 1) + (x <= 0) * np.exp(x)


class Relu(Linear):
    """max(x, 0) for elu(x) + 1."""

    def phi(self, x: Array) -> Array:
        return np.maximum(x, 0)


class Exponential(Linear):
    """exp(x) for elu(x) + 1."""

    def phi(self, x: Array) -> Array:
        return np.exp(x)


class Softplus(Linear):
    """log(1 + e^x) for elu(x) + 1."""

    def phi(self, x: Array) -> Array:
        return np.logaddexp(x, x.dtype.type(0))


class LinearScaled(Linear):
    """The scale of softmax attention is applied to queries and keys."""

    def phi(self, x: Array) -> Array:
        return super().phi(x * x.dtype.type(x.shape[-1] ** -0.25))


class KeysWithoutMap(Linear):
    """The map is applied to the queries only."""

    def phi_k(self, k: Array) -> Array:
        return k


class KeysNormalised(Linear):
    """Features of keys are divided by their sum over the features."""

    def phi_k(self, k: Array) -> Array:
        phi = self.phi(k)
        return phi / phi.sum(-1, keepdims=True)


class NotNormalised(Linear):
    """The normaliser is left out."""

    def total(self, weights: Array, visible: Array) -> Array:
        return np.ones_like(super().total(weights, visible))


class NormaliserOfFirstQuery(Linear):
    """The normaliser of the first query serves for all."""

    def total(self, weights: Array, visible: Array) -> Array:
        return super().total(weights, visible)[..., :1, :]


class SumOverQueries(Linear):
    """The normaliser is summed over the queries of the block, not for each."""

    def total(self, weights: Array, visible: Array) -> Array:
        return weights.sum((-1, -2), keepdims=True)


# Moments


def moments(x: Array) -> tuple[Array, Array]:
    """Mean and covariance of the rows, with N - 1."""
    mean = x.mean(-2)
    about = x - mean[..., None, :]
    return mean, about.swapaxes(-1, -2) @ about / (x.shape[-2] - 1)


def moments_welford(x: Array) -> tuple[Array, Array]:
    """Correct: row after row, by Welford's recurrence."""
    mean, scatter = np.zeros_like(x[..., 0, :]), 0.0
    for count in range(x.shape[-2]):
        before = x[..., count, :] - mean
        mean = mean + before / (count + 1)
        after = x[..., count, :] - mean
        scatter = scatter + before[..., :, None] * after[..., None, :]
    return mean, scatter / x.dtype.type(x.shape[-2] - 1)


def moments_merged(x: Array) -> tuple[Array, Array]:
    """Correct: two halves, merged."""
    return _merge(x, between=1.0)


def _merge(x: Array, between: float) -> tuple[Array, Array]:
    n, h = x.shape[-2], x.shape[-2] // 2
    (a, b) = (x[..., :h, :], x[..., h:, :])
    mean_a, mean_b = (y.sum(-2) / max(1, y.shape[-2]) for y in (a, b))
    scatter = sum(
        (y - m[..., None, :]).swapaxes(-1, -2) @ (y - m[..., None, :])
        for y, m in ((a, mean_a), (b, mean_b))
    )
    gap = mean_b - mean_a
    scatter = scatter + between * h * (n - h) / n * gap[..., :, None] * gap[..., None, :]
    return mean_a + gap * ((n - h) / n), scatter / (n - 1)


def moments_ddof_0(x: Array) -> tuple[Array, Array]:
    """The covariance is divided by N."""
    mean, covariance = moments(x)
    return mean, covariance * (x.shape[-2] - 1) / x.shape[-2]


def moments_uncentred(x: Array) -> tuple[Array, Array]:
    """The mean is not subtracted."""
    return x.mean(-2), x.swapaxes(-1, -2) @ x / (x.shape[-2] - 1)


def moments_centred_overall(x: Array) -> tuple[Array, Array]:
    """One mean over all entries is subtracted."""
    return x.mean(-2), moments_uncentred(x - x.mean((-1, -2), keepdims=True))[1]


def moments_median(x: Array) -> tuple[Array, Array]:
    """The median for the mean."""
    return np.median(x, axis=-2), moments(x)[1]


def moments_duplicate(x: Array) -> tuple[Array, Array]:
    """The last row is the first again."""
    return moments(np.concatenate([x[..., :-1, :], x[..., :1, :]], axis=-2))


def moments_last_row_dropped(x: Array) -> tuple[Array, Array]:
    """The last row is not read."""
    return moments(x[..., :-1, :])


def moments_one_pass(x: Array) -> tuple[Array, Array]:
    """E[x x^T] - E[x] E[x]^T, which cancels."""
    n, mean = x.shape[-2], x.mean(-2)
    second = x.swapaxes(-1, -2) @ x / n
    return mean, (second - mean[..., :, None] * mean[..., None, :]) * (n / (n - 1))


def moments_correlation(x: Array) -> tuple[Array, Array]:
    """The correlation for the covariance."""
    mean, covariance = moments(x)
    std = np.sqrt(np.diagonal(covariance, axis1=-2, axis2=-1))
    return mean, covariance / (std[..., :, None] * std[..., None, :])


def moments_transposed(x: Array) -> tuple[Array, Array]:
    """Columns are taken for rows, as by `numpy.cov` unless told otherwise."""
    return moments(x.swapaxes(-1, -2))


def moments_float32(x: Array) -> tuple[Array, Array]:
    """Everything in float32."""
    mean, covariance = moments(x.astype(np.float32))
    return mean.astype(x.dtype), covariance.astype(x.dtype)


def moments_float16_sum(x: Array) -> tuple[Array, Array]:
    """The mean is stored in float16 before it is subtracted."""
    mean = x.mean(-2).astype(np.float16).astype(x.dtype)
    return mean, moments_uncentred(x - mean[..., None, :])[1]


def moments_diagonal(x: Array) -> tuple[Array, Array]:
    """Variances only."""
    mean, covariance = moments(x)
    return mean, covariance * np.eye(x.shape[-1], dtype=x.dtype)


def moments_triangle(x: Array) -> tuple[Array, Array]:
    """The lower triangle is not filled."""
    mean, covariance = moments(x)
    return mean, np.triu(covariance)


def moments_shrunk(x: Array) -> tuple[Array, Array]:
    """1e-3 of the identity is added for safety."""
    mean, covariance = moments(x)
    return mean, covariance + 1e-3 * np.eye(x.shape[-1], dtype=x.dtype)


def moments_pooled(x: Array) -> tuple[Array, Array]:
    """The batch is pooled."""
    mean, covariance = moments(x.reshape(-1, x.shape[-1]))
    lead = x.shape[:-2]
    return np.broadcast_to(mean, (*lead, *mean.shape)), np.broadcast_to(
        covariance, (*lead, *covariance.shape)
    )


def moments_merge_without_gap(x: Array) -> tuple[Array, Array]:
    """Two halves are merged without the scatter of their means."""
    return _merge(x, between=0.0)


def moments_unweighted_merge(x: Array) -> tuple[Array, Array]:
    """The mean is that of the means of two parts of different size."""
    third = max(1, x.shape[-2] // 3)
    mean = (x[..., :third, :].mean(-2) + x[..., third:, :].mean(-2)) / 2
    return mean, moments(x)[1]


def moments_clipped(x: Array) -> tuple[Array, Array]:
    """Rows are winsorised at two standard deviations."""
    mean, std = x.mean(-2, keepdims=True), x.std(-2, keepdims=True)
    return moments(np.clip(x, mean - 2 * std, mean + 2 * std))


def moments_mean_over_n_minus_1(x: Array) -> tuple[Array, Array]:
    """The mean too is divided by N - 1."""
    mean, covariance = moments(x)
    return mean * x.shape[-2] / (x.shape[-2] - 1), covariance


# The catalogue

_ALL = ("omega", "mask", "causal", "gqa")
_EXACT = ("mask", "causal", "gqa")
_CAPABILITIES = {
    "softmax": _EXACT,
    "kernel": ("omega",),
    "rfa": _ALL,
    "ra": _ALL,
    "lara": ("omega", "mask", "gqa"),
    "linear": _EXACT,
    "moments": (),
}
_TAGS: dict[str, dict[str, Any]] = {
    "lara": {"weighting": "balance"},
    "linear": {"feature_map": "elu"},
}
_ORTHOGONAL = {"coupling": "orthogonal"}
_BASES: dict[str, type[Attention]] = {
    "softmax": Softmax,
    "rfa": RFA,
    "ra": RA,
    "lara": LARA,
    "linear": Linear,
}


def _exposed_unscaled(
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


def _moments_ignored(
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


def _covariance_not_rooted(
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


def _entry(
    name: str,
    fn: Callable[..., Any],
    effect: str,
    seen: str = "",
    *,
    only: tuple[str, ...] | None = None,
    lacks: tuple[str, ...] = (),
    tags: Mapping[str, Any] = MappingProxyType({}),
) -> Mutant:
    """An entry whose name begins with its estimator, with all its capabilities or as said."""
    estimator = name.split("-")[0]
    capabilities = _CAPABILITIES[estimator] if only is None else only
    kept = tuple(c for c in capabilities if c not in lacks)
    return Mutant(name, estimator, fn, kept, effect, seen, {**_TAGS.get(estimator, {}), **tags})


def _with(defect: type[Attention], estimator: str) -> Attention:
    """The estimator with a defect that any attention may have."""
    bases = (defect, _BASES[estimator])
    made: Attention = type(f"{estimator.upper()}{defect.__name__}", bases, {})()
    return made


VARIANTS: tuple[Mutant, ...] = (
    _entry("softmax", Softmax(), "The definition."),
    _entry("softmax-online", Online(), "Blocks over keys with a running maximum."),
    _entry("softmax-upcast", _with(Upcast, "softmax"), "Computed in float64 for float32."),
    _entry("kernel", Kernel(), "The definition."),
    _entry("kernel-log-sum-exp", KernelLogSumExp(), "The mean taken in the log domain."),
    _entry("kernel-reversed", KernelReversed(), "A running mean in another order."),
    _entry("kernel-orthogonal", Kernel(haar), "Orthogonal frequencies.", tags=_ORTHOGONAL),
    _entry("rfa", RFA(), "The definition."),
    _entry("rfa-reversed", FeaturesReversed(), "Features in another order."),
    _entry("rfa-online", _with(Online, "rfa"), "Blocks over keys with a running maximum."),
    _entry("rfa-stabilised-by-query", StabilisedByQuery(), "One maximum for each query."),
    _entry("rfa-upcast", _with(Upcast, "rfa"), "Computed in float64 for float32."),
    _entry("rfa-orthogonal", RFA(haar), "Orthogonal frequencies.", tags=_ORTHOGONAL),
    _entry("ra", RA(), "The definition."),
    _entry("ra-gumbel-max", GumbelMax(), "Components drawn by Gumbel-max."),
    _entry("lara", LARA(), "The definition."),
    _entry("lara-upcast", _with(Upcast, "lara"), "Computed in float64 for float32."),
    _entry("linear", Linear(), "The definition."),
    _entry("linear-recurrent", LinearRecurrent(), "A state updated key by key."),
    _entry("moments", moments, "The definition."),
    _entry("moments-welford", moments_welford, "Row by row."),
    _entry("moments-merged", moments_merged, "Two halves, merged."),
)

# name, law of the frequencies, effect, where seen, tags
_FREQUENCIES: tuple[tuple[str, Draw, str, str, dict[str, Any]], ...] = (
    (
        "qr-unsigned",
        qr_unsigned,
        "Kernel biased by 34 % at d = 2, up to 19 % at 4 and 7 % at 64, which no S removes.",
        "performer-pytorch, google-research performer, scenic, efficient-attention, PyG",
        _ORTHOGONAL,
    ),
    (
        "fixed-norms",
        fixed_norms,
        "Kernel too small: 5 % at d = 2 and |x + y| = 1, more for longer vectors.",
        "performer-pytorch with scaling 1",
        _ORTHOGONAL,
    ),
    ("normalised-rows", normalised_rows, "Kernel too small, as with fixed norms.", "", {}),
    (
        "shrinking-norms",
        shrinking_norms,
        "Features lose their frequencies as S grows: attention tends to the mean value.",
        "teddykoker",
        {},
    ),
    (
        "norms-of-another-length",
        norms_of_another_length,
        "Frequencies too short: at |x + y| = 1 the kernel is .79 of what it should be.",
        "xformers, SMReg",
        {},
    ),
    ("rademacher", rademacher, "The right covariance and the wrong law along an axis.", "", {}),
    ("uniform", uniform, "The right covariance and the wrong law along an axis.", "", {}),
    ("unit-uniform", unit_uniform, "Frequencies of mean .5 and variance 1/12.", "", {}),
    ("laplace", laplace, "Tails too heavy: the kernel is 21 % too large along an axis.", "", {}),
    (
        "truncated",
        truncated,
        "Frequencies of variance .77: kernel 12 % too small at |x + y| = 1.",
        "trunc_normal_ initialisers",
        {},
    ),
    ("shared", shared, "The variance does not fall with S.", "", {}),
    (
        "one-duplicate",
        one_duplicate,
        "The last feature adds nothing: S - 1 with uneven weights.",
        "",
        {},
    ),
    ("repeated-halves", repeated_halves, "Twice the variance.", "", {}),
    ("antithetic", antithetic, "Frequencies come in opposite pairs, called independent.", "", {}),
    (
        "correlated-.05",
        correlated(0.05),
        "A floor under the variance: at |x + y| = 1, 3 % of that of one feature.",
        "",
        {},
    ),
    ("correlated-.3", correlated(0.3), "A floor under the variance.", "", {}),
    ("scale-1.05", scaled(1.05), "Kernel 5 % too large at |x + y| = 1.", "", {}),
    ("scale-sqrt-2", scaled(math.sqrt(2)), "Kernel e^(1/2) too large at |x + y| = 1.", "", {}),
    ("mixed-entries", mixed_entries, "Entries of a frequency are correlated.", "", {}),
    ("shifted", shifted, "Frequencies of mean .1: attention as if queries were shifted.", "", {}),
    ("positive-entries", positive_entries, "All frequencies lie in one orthant.", "", {}),
    (
        "half-precision",
        half_precision,
        "Frequencies collide and carry 11 bits.",
        "fp16 buffers",
        {},
    ),
    ("first-entry-zero", first_entry_zero, "The first coordinate is ignored.", "", {}),
    ("box-muller-half", box_muller_half, "Odd entries of a frequency are never negative.", "", {}),
)

# name, use of the seed, effect
_SEEDS: tuple[tuple[str, Callable[[int | None], np.random.Generator], str, str], ...] = (
    (
        "seed-ignored",
        fresh_entropy,
        "The same seed gives different results.",
        "efficient-attention",
    ),
    ("seed-constant", constant_seed, "Different seeds give the same result.", ""),
    ("seed-mod-16", seed_mod_16, "Seeds 1 and 17 give the same result.", ""),
)

# name, defect, the only capabilities it claims beside omega (None: all), estimators, effect, seen
_SHARED: tuple[
    tuple[str, type[Attention], tuple[str, ...] | None, tuple[str, ...], str, str], ...
] = (
    (
        "gqa-interleaved",
        Interleaved,
        None,
        ("softmax", "rfa", "linear"),
        "With grouped heads query head h reads the keys of head h mod G.",
        "repeat for repeat_interleave",
    ),
    (
        "gqa-first-head",
        FirstHead,
        None,
        ("softmax", "rfa"),
        "With grouped heads only the first key head is read.",
        "",
    ),
    (
        "values-of-next-head",
        ValuesOfNextHead,
        None,
        ("softmax", "rfa", "lara"),
        "Each head attends to the values of the next.",
        "",
    ),
    (
        "heads-mixed",
        HeadsMixed,
        None,
        ("softmax", "rfa", "ra", "lara", "linear"),
        "Values of heads and tokens are shuffled among each other.",
        "reshape for transpose",
    ),
    (
        "mask-off-by-one",
        MaskOffByOne,
        None,
        ("softmax", "rfa", "ra", "linear"),
        "Each query sees the neighbours of the keys that it should see.",
        "",
    ),
    (
        "mask-inverted",
        MaskInverted,
        None,
        ("softmax", "rfa", "linear"),
        "True hides: what is left is the padding.",
        "torch key_padding_mask against attn_mask",
    ),
    ("mask-ignored", MaskIgnored, None, ("softmax", "rfa", "ra", "lara"), "Padding is read.", ""),
    (
        "mask-of-first-query",
        MaskOfFirstQuery,
        None,
        ("softmax", "rfa"),
        "Masks that differ between queries are not honoured.",
        "",
    ),
    (
        "mask-dropped-when-causal",
        MaskDroppedWhenCausal,
        None,
        ("softmax", "rfa", "linear"),
        "Padding is read as soon as `causal` is set.",
        "",
    ),
    (
        "mask-on-values",
        MaskOnValues,
        None,
        ("softmax", "rfa", "lara", "linear"),
        "The normaliser counts the padding: with half the keys masked, outputs about halve.",
        "performer-pytorch, google-research performer, flash-linear-attention, PyG",
    ),
    (
        "causal-strict",
        CausalStrict,
        None,
        ("softmax", "rfa", "ra", "linear"),
        "A token does not see itself, the first nothing at all.",
        "",
    ),
    (
        "causal-ahead",
        CausalAhead,
        None,
        ("softmax", "rfa", "ra", "linear"),
        "A token sees the next one.",
        "",
    ),
    ("causal-ignored", CausalIgnored, None, ("softmax", "rfa"), "Tokens see the future.", ""),
    (
        "causal-top-left",
        CausalTopLeft,
        None,
        ("softmax", "rfa"),
        "With more keys than queries the last query does not see the last keys.",
        "torch is_causal",
    ),
    (
        "causal-by-blocks",
        CausalByBlocks,
        None,
        ("softmax", "rfa", "linear"),
        "Tokens see the future of their block of eight.",
        "",
    ),
    (
        "causal-bucket-excluded",
        CausalBucketExcluded,
        None,
        ("softmax", "rfa", "linear"),
        "The first 64 outputs are 0, later ones lack the keys nearest to them.",
        "linear-attention-transformer",
    ),
    (
        "causal-window",
        CausalWindow,
        None,
        ("softmax", "rfa"),
        "Tokens see the last eight only.",
        "",
    ),
    (
        "causal-over-channels",
        CausalOverChannels,
        None,
        ("rfa", "linear"),
        "The causal output is the running mean, over channels, of the output that is not causal.",
        "xformers favor, flash-linear-attention",
    ),
    (
        "causal-normaliser-global",
        MaskOnValues,
        ("causal",),
        ("rfa", "linear"),
        "Early causal outputs are too small: the normaliser ranges over the future.",
        "performer-pytorch",
    ),
    (
        "tail-dropped",
        TailDropped,
        None,
        ("softmax", "rfa", "lara", "linear"),
        "Up to three keys at the end are not read unless m is a multiple of four.",
        "",
    ),
    (
        "tail-of-queries-dropped",
        TailOfQueriesDropped,
        None,
        ("softmax", "rfa"),
        "Up to three outputs at the end are 0 unless n is a multiple of four.",
        "",
    ),
    (
        "absolute-epsilon",
        AbsoluteEpsilon,
        None,
        ("linear",),
        "Outputs depend on the size of the features: shrunk wherever the normaliser is small.",
        "flash-linear-attention, fast-transformers",
    ),
    (
        "half-precision-weights",
        HalfPrecisionWeights,
        None,
        ("softmax", "rfa", "linear"),
        "Three digits, whatever the dtype.",
        "",
    ),
    (
        "single-precision",
        SinglePrecision,
        None,
        ("softmax", "rfa", "ra", "lara", "linear"),
        "Seven digits in float64.",
        "",
    ),
    ("dropout", Dropout, None, ("softmax", "rfa"), "Outputs differ from call to call.", ""),
)

_SOFTMAX = (
    _entry("softmax-scale-missing", ScaleMissing(), "Scores sqrt(d) too large."),
    _entry("softmax-scale-twice", ScaleTwice(), "Scores sqrt(d) too small: nearly uniform."),
    _entry(
        "softmax-scale-of-padded-size",
        ScaleFromNextPowerOfTwo(),
        "Scores too small unless d is a power of two.",
    ),
    _entry("softmax-mask-minus-1e9", FiniteMask(), "A query that sees no key gets the mean value."),
    _entry(
        "softmax-mask-minus-1e4",
        SmallFiniteMask(),
        "Padding is read by queries that see no key, or whose scores are below -1e4.",
        "fp16 code",
    ),
    _entry(
        "softmax-mask-added", AddedMask(), "Padding is read where its scores outbid the -1e4 added."
    ),
    _entry("softmax-mask-as-integer", IntegerMask(), "Padding has weight 1/e in place of 0."),
    _entry(
        "softmax-maximum-over-hidden",
        MaximumOverHidden(),
        "A large hidden score drives the visible weights to 0, and the output to NaN.",
    ),
    _entry(
        "softmax-maximum-global",
        MaximumGlobal(),
        "Queries whose scores are far below those of others get NaN.",
    ),
    _entry("softmax-overflow", Overflowing(), "Queries with scores above 709 get 0."),
    _entry("softmax-clipped", Clipped(), "Scores beyond 5 are flattened."),
    _entry(
        "softmax-soft-capped",
        SoftCapped(),
        "Scores are compressed: 10 becomes 9.6.",
        "soft-capping",
    ),
    _entry("softmax-base-two", BaseTwo(), "A temperature of 1.44.", "kernels that use exp2"),
    _entry("softmax-over-queries", OverQueries(), "Weights sum to 1 over queries, not over keys."),
    _entry("softmax-plus-one", PlusOne(), "Outputs shrink by up to a half."),
    _entry("softmax-epsilon", SmallPlus(), "Outputs shrink by up to 1e-8."),
    _entry(
        "softmax-empty-row-nan", EmptyRowNaN(), "A query that sees no key gets NaN.", "most code"
    ),
    _entry("softmax-top-four", TopFour(), "Keys after the fourth best are ignored."),
    _entry("softmax-series", Linearised(), "Right for small scores only."),
    _entry("softmax-cosine", Normalised(), "Lengths of queries and keys do not matter."),
    _entry(
        "softmax-single-precision-scores",
        SinglePrecisionScores(),
        "Seven digits of each score in float64, fewer of its exponential.",
    ),
    _entry("softmax-half-precision-values", HalfPrecisionValues(), "Three digits of the values."),
    _entry(
        "softmax-not-rescaled",
        NotRescaled(),
        "Blocks of keys before the running maximum rose weigh too much.",
    ),
    _entry("softmax-padded-blocks", PaddedBlocks(), "Outputs shrink unless 4 divides m."),
)

_KERNEL = (
    _entry(
        "kernel-independent-frequencies",
        KernelIndependent(),
        "Estimates 1 and not exp(x . y).",
        "xformers",
        lacks=("omega",),
    ),
    _entry(
        "kernel-two-pi",
        KernelTwoPi(),
        "Estimates exp(19.7 |x + y|^2 - (|x|^2 + |y|^2)/2).",
        "teddykoker",
    ),
    _entry("kernel-whole-norm", KernelWholeNorm(), "Too small by e^(-(|x|^2 + |y|^2)/2)."),
    _entry("kernel-norm-of-y-dropped", KernelNormOfYDropped(), "Too large by e^(|y|^2/2)."),
    _entry("kernel-norm-unsquared", KernelNormUnsquared(), "Right only for unit vectors."),
    _entry("kernel-median", KernelMedian(), "Too small by e^(-|x + y|^2/2) for many features."),
    _entry("kernel-trimmed", KernelTrimmed(), "Too small: the largest product is left out."),
    _entry(
        "kernel-geometric", KernelGeometric(), "Too small by e^(-|x + y|^2/2) for many features."
    ),
    _entry("kernel-epsilon", KernelEpsilon(), "Off by .2 % at the origin, more where small."),
    _entry("kernel-sum", KernelSum(), "S times too large."),
    _entry("kernel-bessel", KernelBessel(), "Too large by S/(S - 1)."),
    _entry("kernel-means-of-features", KernelMeansOfFeatures(), "Estimates 1 and not exp(x . y)."),
    _entry("kernel-maximum-kept", KernelMaximumKept(), "Never above 1."),
    _entry("kernel-clipped", KernelClipped(), "Too small for long vectors."),
    _entry("kernel-cosines", KernelCosines(), "A kernel of |cos|, not exp(x . y)."),
    _entry("kernel-scaled", KernelScaled(), "Estimates exp(x . y / sqrt(d))."),
    _entry(
        "kernel-odd-feature",
        KernelOddFeature(),
        "An odd number of features counts as one less.",
    ),
    _entry(
        "kernel-half-precision-features",
        KernelHalfPrecision(),
        "Three digits, and overflow at 65504.",
    ),
)

_RFA = (
    _entry(
        "rfa-feature-epsilon",
        FeatureEpsilon(),
        "d = 64, unit variance, 512 tokens: within 20 % of the plain mean of v. Editing the last "
        "key moves earlier causal outputs by over 10 %.",
        "performer-pytorch",
    ),
    _entry(
        "rfa-feature-epsilon-after-norm",
        FeatureEpsilonAfterNorm(),
        "The longer queries and keys are, the nearer the output is to the mean of the values.",
        "performer-pytorch",
    ),
    _entry(
        "rfa-small-feature-epsilon",
        SmallFeatureEpsilon(),
        "Keys far below the largest all count alike.",
        "google-research performer",
    ),
    _entry("rfa-plain-feature-epsilon", PlainFeatureEpsilon(), "Small features count too much."),
    _entry(
        "rfa-stabiliser-sees-future",
        Direct(),
        "A large last key takes earlier causal outputs, or padding all outputs, to 0 / 0.",
        "performer-pytorch, google-research performer",
    ),
    _entry(
        "rfa-normaliser-clamped",
        NormaliserClamped(),
        "d = 64, unit variance, 512 tokens, 256 features: most outputs shrink, the median to .3.",
        "efficient-attention",
    ),
    _entry("rfa-normaliser-epsilon", NormaliserEpsilon(), "Outputs shrink where keys are far."),
    _entry(
        "rfa-maximum-of-key-kept",
        MaximumOfKeyKept(),
        "Each key is weighted by the inverse of its largest feature.",
    ),
    _entry(
        "rfa-maximum-of-feature-kept",
        MaximumOfFeatureKept(),
        "Each frequency is weighted by the inverse of its largest feature.",
    ),
    _entry(
        "rfa-sample-normalisers-dropped",
        SampleNormalisersDropped(),
        "Every frequency counts alike, however much the keys favour it.",
    ),
    _entry(
        "rfa-mean-of-ratios",
        MeanOfRatios(),
        "The output does not depend on the query.",
        "eq. (12) of a published derivation",
    ),
    _entry("rfa-overflow", RFAOverflowing(), "0 where exponents pass 709 or all are below -745."),
    _entry(
        "rfa-root-twice", RootTwice(), "Attention of exp(q . k / d).", "Nystromformer's Performer"
    ),
    _entry("rfa-root-missing", RootMissing(), "Attention of exp(q . k)."),
    _entry("rfa-key-norm-dropped", KeyNormDropped(), "Long keys weigh e^(|k|^2/2) too much."),
    _entry("rfa-key-norm-whole", KeyNormWhole(), "Long keys weigh e^(|k|^2/2) too little."),
    _entry("rfa-key-norm-unscaled", KeyNormUnscaled(), "Long keys weigh far too little."),
    _entry("rfa-key-norm-constant", KeyNormConstant(), "Keys longer than others weigh too much."),
    _entry(
        "rfa-other-frequencies-for-keys",
        OtherFrequenciesForKeys(),
        "Attention of the query with its coordinates rotated by one.",
        "xformers",
    ),
    _entry("rfa-frequency-negated", FrequencyNegatedForKeys(), "Attention of the query -q."),
    _entry(
        "rfa-two-pi", TwoPi(), "Attention of 4 pi^2 q . k, and no bound on the error.", "teddykoker"
    ),
    _entry("rfa-last-feature-dropped", LastFeatureDropped(), "One feature less than asked for."),
    _entry(
        "rfa-frequencies-of-first-head",
        FrequenciesPerHeadIgnored(),
        "Frequencies given for each head are not used, apart from the first.",
    ),
    _entry(
        "rfa-frequencies-unscaled",
        FrequenciesUnscaled(),
        "Frequencies d^(1/4) too short: keys and queries lose contrast.",
    ),
    _entry(
        "rfa-seed-from-data",
        SeedFromData(),
        "Editing a later query changes all outputs, in causal attention too.",
        "google-research performer",
    ),
    _entry("rfa-relu", ReluFeatures(), "Another kernel.", "Performer-ReLU"),
    _entry("rfa-cosines", CosinesOnly(), "Another kernel."),
    _entry("rfa-maximum", MaximumOverFrequencies(), "One frequency decides for each pair."),
    _entry(
        "rfa-half-precision-features",
        HalfPrecisionFeatures(),
        "Three digits, and features below 6e-8 of the largest are 0.",
        "autocast",
    ),
    _entry("rfa-exact", ExactInstead(), "No error to speak of: not a random feature estimate."),
    _entry(
        "rfa-is-ra",
        RandomizedInstead(),
        "Unbiased, at quadratic cost: another estimator.",
        lacks=("omega",),
    ),
)

_RA = (
    _entry(
        "ra-is-rfa",
        StandardNormal(),
        "Frequencies that know neither query nor keys: biased.",
        lacks=("omega",),
    ),
    _entry("ra-uniform-component", UniformComponent(), "Biased towards the mean value."),
    _entry("ra-temperature-1.2", Tempered(), "Biased a little towards the mean value."),
    _entry("ra-greedy", Greedy(), "Biased towards the best key."),
    _entry("ra-one-component", OneComponent(), "The variance does not fall as 1/S."),
    _entry("ra-draw-ignores-mask", DrawIgnoresMask(), "Hidden keys shift the frequencies."),
    _entry(
        "ra-half-precision-choice",
        HalfPrecisionChoice(),
        "Keys of weight below 1/4096 are not drawn, the last one too often.",
    ),
    _entry("ra-query-dropped", QueryDropped(), "Biased: frequencies do not know the query."),
    _entry("ra-key-dropped", KeyDropped(), "Biased: frequencies do not know the keys."),
    _entry("ra-averaged-gaussian", AveragedGaussian(), "Biased where keys lie apart."),
    _entry("ra-moment-matched", MomentMatched(), "Biased a little where keys lie apart."),
    _entry(
        "ra-noise-dropped",
        NoiseDropped(),
        "Biased, the same component always giving the same output.",
        "efficient-attention in evaluation mode",
    ),
    _entry(
        "ra-noise-unscaled",
        NoiseOfUnscaledSpace(),
        "Noise d^(1/4) too small: at d = 16 most of the bias there is without noise.",
        "efficient-attention",
    ),
    _entry("ra-noise-too-large", NoiseTooLarge(), "Biased a little towards the mean value."),
    _entry("ra-noise-shared", NoiseShared(), "The variance does not fall as 1/S."),
    _entry(
        "ra-one-sample-used",
        OneSampleUsed(),
        "The number of samples makes no difference.",
        "efficient-attention",
    ),
    _entry("ra-one-sample-repeated", OneSampleRepeated(), "The variance does not fall with S."),
    _entry("ra-heads-share-seed", HeadsShareSeed(), "Equal heads give equal outputs."),
    _entry(
        "ra-queries-share-frequencies",
        QueriesShareFrequencies(),
        "Right for the first query, biased for others.",
    ),
    _entry("ra-ratio-of-means", RatioOfMeans(), "Biased for S > 1: frequencies are reweighted."),
    _entry(
        "ra-key-norm-dropped",
        type("RAKeyNormDropped", (KeyNormDropped, RA), {})(),
        "Long keys weigh e^(|k|^2/2) too much.",
    ),
    _entry(
        "ra-root-twice", type("RARootTwice", (RootTwice, RA), {})(), "Attention of exp(q . k / d)."
    ),
)

_LARA = (
    _entry("lara-own-weights", OwnWeights(), "Weights of the wrong scheme: a larger error."),
    _entry(
        "lara-no-weights", NoWeights(), "Does not converge: the proposals are not corrected for."
    ),
    _entry("lara-weights-inverted", WeightsInverted(), "Does not converge."),
    _entry("lara-centre-norm-dropped", CentreNormDropped(), "Far centres count too much."),
    _entry("lara-geometric-mixture", GeometricMixture(), "Weights against the wrong mixture."),
    _entry(
        "lara-balance-over-frequencies",
        BalanceOverFrequencies(),
        "Weights are sums over the wrong index.",
    ),
    _entry(
        "lara-centres-without-keys",
        CentresWithoutKeys(),
        "The default proposals are not at the documented centres: a larger error.",
    ),
    _entry("lara-last-proposal-dropped", LastProposalDropped(), "The last frequency is not used."),
    _entry(
        "lara-noise-dropped",
        LARANoiseDropped(),
        "The seed makes no difference, and the error does not vanish.",
        "efficient-attention in evaluation mode",
    ),
    _entry(
        "lara-noise-unscaled",
        LARANoiseOfUnscaledSpace(),
        "Noise d^(1/4) too small for the weights.",
        "efficient-attention",
    ),
    _entry("lara-noise-shared", LARANoiseShared(), "Proposals fail together."),
    _entry(
        "lara-clamped-query-weights",
        ClampedQueryWeights(),
        "Weights depend on the other queries and do not sum to 1.",
        "efficient-attention",
    ),
    _entry(
        "lara-root-twice",
        type("LARARootTwice", (RootTwice, LARA), {})(),
        "Attention of exp(q . k / d).",
    ),
    _entry(
        "lara-key-norm-dropped",
        type("LARAKeyNormDropped", (KeyNormDropped, LARA), {})(),
        "Long keys weigh e^(|k|^2/2) too much.",
    ),
)

_LINEAR = (
    _entry(
        "linear-elu-cancels",
        Cancelling(),
        "Features of x lose digits below 0: none is left at -17 in float32, at -38 in float64.",
        "flash-linear-attention",
    ),
    _entry("linear-elu-without-one", EluWithoutOne(), "Weights of both signs."),
    _entry("linear-elu-alpha-.1", EluTenth(), "Features never below .9.", "a published notebook"),
    _entry(
        "linear-elu-blended", EluBlended(), "NaN for entries above 709.", "a published notebook"
    ),
    _entry("linear-relu", Relu(), "Negative entries are ignored."),
    _entry("linear-exponential", Exponential(), "Another kernel."),
    _entry("linear-softplus", Softplus(), "Another kernel."),
    _entry("linear-scaled", LinearScaled(), "Features flatter than asked for."),
    _entry("linear-keys-without-map", KeysWithoutMap(), "Weights of both signs."),
    _entry("linear-keys-normalised", KeysNormalised(), "Keys of large features weigh too little."),
    _entry("linear-not-normalised", NotNormalised(), "Outputs grow with the number of keys."),
    _entry(
        "linear-normaliser-of-first-query",
        NormaliserOfFirstQuery(),
        "All outputs but the first are off by a factor.",
    ),
    _entry("linear-normaliser-over-queries", SumOverQueries(), "Outputs about n times too small."),
)

_MOMENTS = (
    _entry("moments-ddof-0", moments_ddof_0, "The covariance is (N - 1)/N of what it should be."),
    _entry("moments-uncentred", moments_uncentred, "The covariance contains the mean."),
    _entry(
        "moments-centred-overall",
        moments_centred_overall,
        "The covariance contains what the means of the columns differ by.",
    ),
    _entry("moments-median", moments_median, "The mean varies pi/2 times as much."),
    _entry("moments-duplicate-row", moments_duplicate, "One row counts twice, one not at all."),
    _entry("moments-last-row-dropped", moments_last_row_dropped, "One row does not count."),
    _entry(
        "moments-one-pass",
        moments_one_pass,
        "No digit of the covariance is left where the mean is 1e8 times the deviation.",
    ),
    _entry("moments-correlation", moments_correlation, "Unit variances."),
    _entry(
        "moments-transposed", moments_transposed, "The wrong shape, or the wrong axis.", "numpy.cov"
    ),
    _entry(
        "moments-single-precision",
        moments_float32,
        "Seven digits in float64, and few of the deviation.",
    ),
    _entry("moments-half-precision-mean", moments_float16_sum, "Three digits of the mean."),
    _entry("moments-diagonal", moments_diagonal, "No covariance between columns."),
    _entry("moments-triangle", moments_triangle, "Not symmetric."),
    _entry("moments-shrunk", moments_shrunk, "Variances .001 too large."),
    _entry("moments-pooled", moments_pooled, "All sets of a batch have the same moments."),
    _entry(
        "moments-merge-without-gap",
        moments_merge_without_gap,
        "The covariance lacks what halves differ by.",
    ),
    _entry(
        "moments-unweighted-merge", moments_unweighted_merge, "Rows of the first third weigh twice."
    ),
    _entry("moments-clipped", moments_clipped, "Variances too small."),
    _entry("moments-mean-over-n-minus-1", moments_mean_over_n_minus_1, "The mean is too large."),
)

_EXTRA = (
    Mutant(
        "kernel-exposed-features-unscaled",
        "kernel",
        _exposed_unscaled,
        ("omega", "feature_map"),
        "Products of the exposed features are S times the kernel.",
    ),
    Mutant(
        "rfa-moments-ignored",
        "rfa",
        _moments_ignored,
        ("moments",),
        "Frequencies are standard normal whatever moments are given.",
    ),
    Mutant(
        "rfa-covariance-not-rooted",
        "rfa",
        _covariance_not_rooted,
        ("moments",),
        "Frequencies have the square of the covariance given.",
    ),
)

MUTANTS: tuple[Mutant, ...] = (
    *_EXTRA,
    *_SOFTMAX,
    *_KERNEL,
    *_RFA,
    *_RA,
    *_LARA,
    *_LINEAR,
    *_MOMENTS,
    *(
        _entry(f"{estimator}-{name}", base(draw), effect, seen, tags=tags)
        for name, draw, effect, seen, tags in _FREQUENCIES
        for estimator, base in (("kernel", Kernel), ("rfa", RFA))
    ),
    *(
        _entry(f"{estimator}-{name}", base(generator=generator), effect, seen)
        for name, generator, effect, seen in _SEEDS
        for estimator, base in (("kernel", Kernel), ("rfa", RFA), ("ra", RA), ("lara", LARA))
    ),
    *(
        _entry(
            f"{estimator}-{name}",
            _with(defect, estimator),
            effect,
            seen,
            only=only and tuple(c for c in _CAPABILITIES[estimator] if c in ("omega", *only)),
        )
        for name, defect, only, estimators, effect, seen in _SHARED
        for estimator in estimators
    ),
)
