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


def qr_row_signs(count: int, d: int, rng: np.random.Generator) -> Array:
    """The signs of diag R multiply the rows of Q, which are its columns' business."""
    rows = _orthonormal(count, d, rng, lambda q, r: q * np.sign(r)[:, None])
    return rows * _chi(count, d, rng)


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


def one_norm(count: int, d: int, rng: np.random.Generator) -> Array:
    """One norm for all frequencies of a draw."""
    return _orthonormal(count, d, rng, lambda q, r: q * np.sign(r)) * _chi(1, d, rng)


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


def twelve_uniforms(count: int, d: int, rng: np.random.Generator) -> Array:
    """A sum of twelve uniforms less 6, which is only nearly normal."""
    return rng.random((12, count, d)).sum(0) - 6


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
    count: int | None
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
        with np.errstate(over="ignore", invalid="ignore"):
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
        total = self.total(weights, visible)
        return self.sum(weights, v, visible) / np.where(total == 0, 1.0, total).astype(v.dtype)

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
        assert draws.count is not None
        return self.draw(draws.count, q.shape[-1], self.generator(draws.seed))

    def log_q(self, q: Array, omega: Array) -> Array:
        """log xi(q_i, omega_s), shape (..., n, S)."""
        return q @ omega.swapaxes(-1, -2) - _square(q)[..., None] / 2

    def log_k(self, k: Array, omega: Array) -> Array:
        """log xi(k_j, omega_s), shape (..., m, S)."""
        return k @ omega.swapaxes(-1, -2) - _square(k)[..., None] / 2

    def weights(self, q: Array, k: Array, visible: Array, draws: Draws) -> Array:
        q, k = q * self.root(q.shape[-1]), k * self.root(k.shape[-1])
        omega = self.frequencies(q, k, visible, draws).astype(q.dtype)
        return self.combine(self.log_q(q, omega), self.log_k(k, omega), visible)

    def combine(self, log_q: Array, log_k: Array, visible: Array) -> Array:
        """Sum the products of features over the frequencies."""
        scores = _log_sum_exp(log_q[..., :, None, :] + log_k[..., None, :, :])
        return self.exponentiate(scores, visible)


class RA(RFA):
    """Randomized attention: each query has frequencies from its own law."""

    def frequencies(self, q: Array, k: Array, visible: Array, draws: Draws) -> Array:
        """q_i + k_J + noise, J drawn by the attention weights of query i, shape (..., n, S, d)."""
        if draws.omega is not None:
            return draws.omega
        assert draws.count is not None
        return self.sample(q, k, visible, draws.count, self.generator(draws.seed))

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

    def weights(self, q: Array, k: Array, visible: Array, draws: Draws) -> Array:
        q, k = q * self.root(q.shape[-1]), k * self.root(k.shape[-1])
        centres = draws.centres
        if centres is None:
            count = draws.count or np.shape(draws.omega)[-2]
            centres = self.centres(q, k, visible, count)
        omega = draws.omega
        if omega is None:
            lead = np.broadcast_shapes(q.shape[:-2], k.shape[:-2])
            omega = centres + self.noise(
                (*lead, *centres.shape[-2:]), self.generator(draws.seed)
            )
        omega, centres = omega.astype(q.dtype), centres.astype(q.dtype)
        log_q = self.log_q(q, omega) + self.log_weight(omega, centres)[..., None, :]
        return self.combine(log_q, self.log_k(k, omega), visible)

    def centres(self, q: Array, k: Array, visible: Array, count: int) -> Array:
        """Sums of mean query and mean key of contiguous chunks, shape (..., C, d)."""
        everywhere = np.ones(q.shape[-2], bool)
        return self.chunk_means(q, everywhere, count) + self.chunk_means(
            k, visible.any(-2), count
        )

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
        weights = self.logits(q, k, visible, draws)
        scores = np.where(visible, weights, -np.inf)
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

    def logits(self, q: Array, k: Array, visible: Array, draws: Draws) -> Array:
        """Scores, for an estimator that has weights only their logarithms."""
        with np.errstate(divide="ignore"):
            return np.log(self.weights(q, k, visible, draws))

    def keep(self, top: Array, new: Array) -> Array:
        """By how much sums relative to the old maximum shrink."""
        return np.exp(top - new)


class SoftmaxOnline(Online):
    """Correct: softmax attention by `Online`."""

    def logits(self, q: Array, k: Array, visible: Array, draws: Draws) -> Array:
        return self.scores(q, k, visible, draws)


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
        return out / np.where(total == 0, 1.0, total).astype(v.dtype)
