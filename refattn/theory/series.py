"""Series for the variance with dependent frequencies: fixed angles in blocks, fixed norms."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from ..arrays.library import Doubles
from .elementary import quiet_log

# Orthogonal and simplex blocks


def missing_angles(d: int, cosines: list[float], order: int) -> Doubles:
    """1 - rho_k, k < order, of `log_kernel_variance`, averaged over the cosines."""
    k = np.arange(order)[:, None]
    log_rho = -_sums_before(np.log1p(k[:, 0] / (d + k[:, 0])))[:, None]
    total = np.zeros(order)
    for excess, weight in (_angles(d, cosine) for cosine in cosines):
        total -= np.expm1(log_rho + k * np.log1p(excess)) @ weight
    if sum(cosines) == 0:
        total[1] = 0.0  # exactly: opposite cosines cancel
    return np.asarray(total / len(cosines))


def missing_norms(d: int, order: int) -> Doubles:
    """1 - prod_{i<k} d / (d + 2i), k < order, of the bias of norms sqrt(d)."""
    return -np.expm1(-_sums_before(np.log1p(2 * np.arange(order) / d)))


def _sums_before(x: Doubles) -> Doubles:
    """sum_{i<k} x_i for each k."""
    return np.concatenate([[0.0], np.cumsum(x)[:-1]])


def _angles(d: int, cosine: float) -> tuple[Doubles, Doubles]:
    """Nodes cosine sin(phi) and weights of quadrature for phi of density ~ sin^(d-1) on (0, pi)."""
    from scipy.special import roots_legendre

    if cosine == 0:
        return np.zeros(1), np.ones(1)
    x, weight = roots_legendre(256 + 8 * math.isqrt(d))  # the density's width is 1/sqrt(d)
    log_sine = np.log(np.sin(np.pi * (x + 1) / 2))
    weight = weight * np.exp((d - 1) * log_sine)
    # Nodes above -1, where d = 2 has one: the caller takes log1p.
    return np.maximum(cosine * np.exp(log_sine), -1 + 1e-16), weight / weight.sum()


def missing(d: int, square: Doubles, terms: Callable[[int], Doubles]) -> Doubles:
    """E(1 - rho_K) for K ~ Poisson(square): sums of positive terms but for rounding."""
    return _poisson_mean(np.minimum(square, 4.0 * d + 1000.0), terms)  # beyond, far below V


def _poisson_mean(u: Doubles, terms: Callable[[int], Doubles]) -> Doubles:
    """Mean of term_K for K ~ Poisson(u)."""
    from scipy.special import gammaln, xlogy

    largest = float(np.max(u, initial=0.0))
    total = np.zeros_like(u)
    # Up to 12 standard deviations above the mean, and 64 terms where that is small.
    for k, term in enumerate(terms(int(largest + 12 * math.sqrt(largest)) + 64)):
        total += term * np.exp(xlogy(k, u) - u - gammaln(k + 1))
    return total


def cosine_covariance(d: int, t: Doubles, cosines: list[float]) -> Doubles:
    """Mean of 1F1(d; d/2; -t (1 + c sin phi) / 2), less e^-t."""
    from scipy.special import hyp1f1

    near = np.minimum(t, 1.0)
    series, power = np.zeros_like(t), np.ones_like(t)
    for k, term in enumerate(missing_angles(d, cosines, 40)):
        series -= term * power
        power = power * -near / (k + 1)
    far = np.maximum(t, 1.0)
    value = np.zeros_like(t)
    for excess, weight in (_angles(d, cosine) for cosine in cosines):
        for e, w in zip(excess, weight, strict=True):
            value += w / len(cosines) * hyp1f1(d, d / 2, -far * (1 + e) / 2)
    return np.where(t < 1, series, value - np.exp(-far))


# Norms sqrt(d): with F(x) = 0F1(; d/2; x), F(d s)^j is the power series whose terms are those of F,
# (d s)^k / (k! (d/2)_k), times factors; F(d s / 4)^2 has the factors tau_k, and F(d s / 2) has 2^-k


def _log_twice_tau(d: int, order: int) -> Doubles:
    """log(2 tau_k) = sum_{0<i<k} log((d - 1 + 2i) / (2 (d - 1 + i))), for 0 < k < order."""
    i = np.arange(1, order)
    logs = np.log1p(-(d - 1) / (2 * (d - 1 + i)))
    return np.cumsum(logs) - logs


def unit(d: int, order: int) -> Doubles:
    """Factors of the mean, F itself."""
    return np.ones(order)


def second_less_square(d: int, order: int) -> Doubles:
    """1 - tau_k, of the variance of exp(omega . z)."""
    return np.concatenate([[0.0], 1 - np.exp(_log_twice_tau(d, order)) / 2])


def even_less_square(d: int, order: int) -> Doubles:
    """[k = 0 or 1/2] - tau_k, of the variance of cosh(omega . z)."""
    return np.concatenate([[0.0], -np.expm1(_log_twice_tau(d, order)) / 2])


def even_block(d: int, order: int) -> Doubles:
    """[k = 0 or 1/2] - tau_k - (d - 1) (tau_k - 2^-k), of V + (d - 1) C of cosh; 0 for k < 4."""
    i = np.arange(1, order)
    logs = np.log1p(i / (d - 1 + i))
    pairs = d * np.expm1(np.cumsum(logs) - logs)
    return np.concatenate([np.zeros(4), (0.5 - (1 + pairs) * 0.5**i)[3:]])


def block(d: int, order: int) -> Doubles:
    """[k > 0] - tau_k - (d - 1) (tau_k - 2^-k), of V + (d - 1) C of exp."""
    return np.asarray(even_block(d, order) + np.append(0.0, np.full(order - 1, 0.5)))


def _log_terms(d: int, order: int) -> Doubles:
    """log(d^k / (k! (d/2)_k)), k < order."""
    k = np.arange(1, order)
    return np.concatenate([[0.0], np.cumsum(np.log(d / (k * (d / 2 + k - 1))))])


def log_series(d: int, s: Doubles, factors: Callable[[int, int], Doubles]) -> Doubles:
    """log sum_k factor_k (d s)^k / (k! (d/2)_k), factors >= 0."""
    from scipy.special import xlogy

    order = int(math.sqrt(2 * d * float(np.max(s, initial=0.0)))) + 72
    total = np.full(np.shape(s), -math.inf)
    for k, log_term in enumerate(_log_terms(d, order) + quiet_log(factors(d, order))):
        total = np.logaddexp(total, log_term + xlogy(k, s))
    return total


def _alternating(d: int, t: Doubles, factors: Callable[[int, int], Doubles]) -> Doubles:
    """sum_k factor_k (-d t)^k / (k! (d/2)_k) for 0 <= t <= 2."""
    k = np.arange(40)
    terms = factors(d, 40) * np.exp(_log_terms(d, 40)) * (-1.0) ** k
    return np.asarray(np.sum(terms * t[..., None] ** k, axis=-1))


def mean_cosine(d: int, t: Doubles, *, centred: bool = False) -> Doubles:
    """Mean of cos(omega . D) for |omega|^2 = d, |D|^2 = t: F(-d t / 4), less e^(-t/2) if centred.

    Up to t = 1 + d/4 the mean of 1F1(-K; d/2; d/2) over K ~ Poisson(t/2), beyond a Bessel function,
    which cannot underflow there.
    """
    from scipy.special import gammaln, jv

    def terms(order: int) -> Doubles:
        values = [1.0, 0.0]
        for k in range(1, order - 1):
            values.append(k * (2 * values[k] - values[k - 1]) / (k + d / 2))
        return np.array([0.0 if centred else 1.0, *values[1:]])

    border = 1 + d / 4
    far = np.sqrt(d * np.maximum(t, border))
    bessel = np.exp(gammaln(d / 2) - (d / 2 - 1) * np.log(far / 2)) * jv(d / 2 - 1, far)
    if centred:
        bessel = bessel - np.exp(-t / 2)
    return np.where(t < border, _poisson_mean(np.minimum(t, border) / 2, terms), bessel)


def fixed_norm_variance(d: int, t: Doubles) -> Doubles:
    """Variance of cos(omega . D)."""
    if d == 1:
        return np.zeros_like(t)
    series = _alternating(d, np.minimum(t, 2.0), even_less_square)
    direct = (1 + mean_cosine(d, 4 * t)) / 2 - mean_cosine(d, t) ** 2
    return np.where(t < 2, series, direct)


def fixed_norm_block(d: int, t: Doubles) -> Doubles:
    """The same, plus d - 1 times the covariance for two frequencies at right angles."""
    series = _alternating(d, np.minimum(t, 2.0), even_block)
    mean_square = mean_cosine(d, t) ** 2
    direct = (1 + mean_cosine(d, 4 * t)) / 2 + (d - 1) * mean_cosine(d, 2 * t) - d * mean_square
    return np.where(t < 2, series, np.maximum(direct, 0.0))
