r"""P-values from bounds that hold at every sample size: valid for any distribution, never exact.

The null allows many distributions, and under each P(p <= a) <= a for every a. All are two-sided.
What they raise is told by `refattn.judge.stats`, and what a test detects by
`refattn.judge.stats.min_discrepancy`.

    Hoeffding, Probability inequalities for sums of bounded random variables, Journal of the
    American Statistical Association 58(301), 1963.
    Boucheron, Lugosi and Massart, Concentration Inequalities, 2013.
    Maurer and Pontil, Empirical Bernstein bounds and sample variance penalization, COLT 2009,
    arXiv:0907.3740.
    Waudby-Smith and Ramdas, Estimating means of bounded random variables by betting, Journal of
    the Royal Statistical Society B 86(1), 2024, arXiv:2010.09686.
    Catoni, Challenging the empirical mean and empirical variance: a deviation study, Annales de
    l'Institut Henri Poincare 48(4), 2012, arXiv:1009.2048.
    Massart, The tight constant in the Dvoretzky-Kiefer-Wolfowitz inequality, The Annals of
    Probability 18(3), 1990.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...arrays import checks
from ...arrays.words import with_known_keywords
from . import check

__all__ = ["bernstein", "betting", "catoni", "dkwm_two_sample", "empirical_bernstein", "hoeffding"]


@with_known_keywords
def hoeffding(x: Any, mean: float, low: float = 0.0, high: float = 1.0) -> float:
    r"""Test the mean of a bounded sample, by Hoeffding.

    .. math:: p = 2 \exp\Big( -\frac{2 n (\bar x - \mu)^2}{(high - low)^2} \Big)

    Parameters
    ----------
    x : array_like, shape (n,)
        Independent draws, in [low, high].
    mean : float
        The mean under the null, in [low, high].
    low, high : float, default 0 and 1
        Where the distribution lies, low < high.

    Returns
    -------
    float
        The p-value.

    References
    ----------
    Hoeffding (1963), Theorem 2.

    Examples
    --------
    >>> from refattn.judge import stats
    >>> round(stats.hoeffding([1.0] * 20, 0.5), 6)  # 2 exp(-10)
    9.1e-05
    """
    x, mean, _ = check.bounded(x, mean, low, high)
    return _two_sided(2 * len(x) * (np.mean(x) - mean) ** 2)


@with_known_keywords
def bernstein(x: Any, mean: float, variance: float, low: float = 0.0, high: float = 1.0) -> float:
    r"""Test the mean of a bounded sample with a cap on its variance, by Bernstein.

    .. math:: p = 2 \exp\Big( -\frac{n t^2}{2 (v + b t / 3)} \Big), \qquad t = |\bar x - \mu|,
              \quad b = high - low

    Parameters
    ----------
    x, mean, low, high
        As in `hoeffding`.
    variance : float
        Upper bound on the variance v under the null, at least 0.

    Returns
    -------
    float
        The p-value. It is small if the mean differs, or if the variance exceeds the cap.

    References
    ----------
    Bernstein; Boucheron, Lugosi and Massart (2013), Corollary 2.11.

    Examples
    --------
    >>> from refattn.judge import stats
    >>> round(stats.bernstein([1.0] * 20, 0.5, 1 / 12), 6)  # 2 exp(-10)
    9.1e-05
    """
    x, mean, length = check.bounded(x, mean, low, high)
    v = check.non_negative("variance", variance) / length / length
    t = abs(float(np.mean(x)) - mean)
    return _two_sided(len(x) * t * t / (2 * (v + t / 3)) if t > 0 else 0.0)


@with_known_keywords
def empirical_bernstein(x: Any, mean: float, low: float = 0.0, high: float = 1.0) -> float:
    r"""Test the mean of a bounded sample with its own variance, by Maurer and Pontil.

    .. math:: p = 4 e^{-l}, \qquad
              \sqrt{\frac{2 V_n l}{n}} + \frac{7 b l}{3 (n - 1)} = |\bar x - \mu|,
              \quad b = high - low

    with V_n the sample variance, divisor n - 1; solved for the root of l, a quadratic equation.

    Parameters
    ----------
    x, mean, low, high
        As in `hoeffding`, of n >= 2 draws from one distribution.

    Returns
    -------
    float
        The p-value.

    References
    ----------
    Maurer and Pontil (2009), Theorem 4, in both directions.

    Examples
    --------
    >>> from refattn.judge import stats
    >>> round(stats.empirical_bernstein([0.6] * 421, 0.5), 9)  # 4 exp(-18)
    6.1e-08
    """
    x, mean, _ = check.bounded(x, mean, low, high, 2)
    n, t = len(x), abs(float(np.mean(x)) - mean)
    a, b = 7 / (3 * (n - 1)), math.sqrt(2 * float(np.var(x, ddof=1)) / n)
    root = 2 * t / (b + math.sqrt(b * b + 4 * a * t)) if t > 0 else 0.0
    return _two_sided(root * root, 4)


@with_known_keywords
def betting(x: Any, mean: float, *, level: float = 1e-6) -> float:
    r"""Test the mean of a sample in [0, 1] by betting against it, in the order given.

    .. math::
        p = 1 / \max_{0 \le t \le n} \tfrac12 (K_t^+ + K_t^-), \qquad
        K_t^\pm = \prod_{i \le t} (1 \pm \lambda_i (x_i - \mu)), \\
        \lambda_i = \min\Big( \sqrt{\frac{2 \log(2 / a)}{n \hat\sigma^2_{i-1}}}, \frac 1{2 \mu},
                              \frac 1{2 (1 - \mu)} \Big), \qquad
        \hat\sigma^2_i = \frac{1/4 + \sum_{j \le i} (x_j - \hat\mu_j)^2}{i + 1}, \quad
        \hat\mu_i = \frac{1/2 + \sum_{j \le i} x_j}{i + 1}

    Each K is a martingale under the null, because lambda_i depends only on the past, and lambda_i
    is so small that K is never negative. So Ville's inequality bounds the maximum of the mean of
    both. The p-value is usually far smaller than that of any other test of means here. How often
    it detects an error is not proven.

    Parameters
    ----------
    x : array_like, shape (n,)
        Independent draws, in [0, 1], or a martingale difference sequence about the mean.
    mean : float
        The mean under the null, strictly between 0 and 1.
    level : float, default 1e-6
        The level a for which bets are sized, strictly between 0 and 1. The p-value is valid at any
        level.

    Returns
    -------
    float
        The p-value.

    References
    ----------
    Waudby-Smith and Ramdas (2024), the hedged capital process; Ville (1939).

    Examples
    --------
    >>> from refattn.judge import stats
    >>> stats.betting([0.6, 0.4] * 500, 0.5) > 0.9
    True
    >>> stats.betting([0.6, 0.4] * 500, 0.55) < 1e-15  # Hoeffding: 0.013
    True
    """
    x, mean, _ = check.bounded(x, check.fraction("mean", mean), 0, 1)
    bets = np.minimum(_bets(x, check.fraction("level", level)), 0.5 / max(mean, 1 - mean))
    up, down = np.cumsum(np.log1p(bets * (x - mean))), np.cumsum(np.log1p(-bets * (x - mean)))
    wealth = float(np.max(np.logaddexp(up, down))) - math.log(2)
    return math.exp(-max(0.0, wealth))


@with_known_keywords
def catoni(x: Any, mean: float, variance: float, *, level: float = 1e-6) -> float:
    r"""Test the mean of a sample of finite variance, heavy tails allowed, by Catoni's bound.

    .. math::
        p = 2 \min_\pm \exp\Big( \mp \sum_i \phi(\lambda (x_i - \mu)) + \frac{n \lambda^2 v}{2}
            \Big), \qquad
        \phi(y) = \operatorname{sign}(y) \log(1 + |y| + y^2 / 2), \quad
        \lambda = \sqrt{\frac{2 \log(2 / a)}{n v}}

    E exp(phi(y)) <= 1 + E y + E y^2 / 2, so the bound holds at every n.

    Parameters
    ----------
    x : array_like, shape (n,)
        Independent draws.
    mean : float
        The mean under the null.
    variance : float
        Upper bound on the variance v under the null, positive.
    level : float, default 1e-6
        The level a for which lambda is best, strictly between 0 and 1. The p-value is valid at any
        level.

    Returns
    -------
    float
        The p-value. It is small if the mean differs, or if the variance exceeds v.

    References
    ----------
    Catoni (2012), section 2.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn.judge import stats
    >>> x = np.random.default_rng(0).standard_t(3, size=20000)  # variance 3
    >>> stats.catoni(x, 0.0, 3.0) > 0.01 > 1e-6 > stats.catoni(x, 0.1, 3.0)
    True
    """
    x = check.read_sample("x", x)
    mean = checks.real("mean", mean)
    variance = checks.real("variance", variance, positive=True)
    scale = catoni_scale(len(x), variance, check.fraction("level", level))
    with np.errstate(over="ignore"):
        y = np.clip(scale * (x - mean), -1e300, 1e300)
    # 1 + |y| + y^2 / 2 = (1 + (1 + |y|)^2) / 2, whose hypot overflows for no y.
    phi = np.sign(y) * (2 * np.log(np.hypot(1, 1 + np.abs(y))) - math.log(2))
    return _two_sided(abs(float(np.sum(phi))) - len(x) * scale * scale * variance / 2)


@with_known_keywords
def dkwm_two_sample(x: Any, y: Any, *, error: float = 0.0) -> float:
    r"""Test that two samples have the same distribution, by Dvoretzky, Kiefer and Wolfowitz.

    .. math:: p = 4 \exp\Big( -\Big(
              \frac{D}{1 / \sqrt{2 n} + 1 / \sqrt{2 N}} \Big)^2 \Big), \qquad
              D = \sup_t |F_n(t) - G_N(t)|

    D is at most the sum of the distances of the two samples from the common distribution, each of
    which exceeds eps with probability at most 2 exp(-2 n eps^2). So D is split in the ratio of the
    standard deviations: one distance is at least its part.

    Parameters
    ----------
    x : array_like, shape (n,)
        Independent draws from any distribution, atoms allowed.
    y : array_like, shape (N,)
        Independent draws, independent of `x`.
    error : float, default 0.0
        How far each of `x` may be from a draw of the distribution of `y`. Then D is the larger of
        two distances: by how much the distribution function of x + error exceeds that of y, and by
        how much that of x - error falls below it.

    Returns
    -------
    float
        The p-value.

    References
    ----------
    Massart (1990), Corollary 1, and a union bound.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn.judge import stats
    >>> round(stats.dkwm_two_sample(np.zeros(50), np.ones(50)), 10)  # 4 exp(-25)
    1e-10
    """
    x, y = np.sort(check.read_sample("x", x)), np.sort(check.read_sample("y", y))
    error = check.non_negative("error", error)
    gap = 0.0
    for sign in (1, -1):
        moved = x + sign * error
        at = np.concatenate([moved, y])
        share = np.searchsorted(moved, at, "right") / len(x)
        excess = share - np.searchsorted(y, at, "right") / len(y)
        gap = max(gap, float(np.max(sign * excess)))
    return _two_sided((gap / two_sample_unit(len(x), len(y))) ** 2, 4)


def _two_sided(exponent: float, factor: float = 2) -> float:
    return min(1.0, factor * math.exp(-max(0.0, float(exponent))))


def two_sample_unit(n: int, m: int) -> float:
    """Return the sum of 1 / sqrt(2 n) over the sizes n of both samples."""
    return float(1 / math.sqrt(2 * n) + 1 / math.sqrt(2 * m))


def catoni_scale(n: int, variance: float, level: float) -> float:
    """Return the lambda of `catoni` that is best at the level."""
    return math.sqrt(2 * math.log(2 / level) / n / variance)


def _bets(x: Any, level: float) -> Any:
    """Return the lambda of `betting` before it is capped, from the past of each draw."""
    n = len(x)
    i = np.arange(2, n + 2)
    centre = (0.5 + np.cumsum(x)) / i
    variance = (0.25 + np.cumsum((x - centre) ** 2)) / i
    past = np.concatenate([[0.25], variance[:-1]])
    return np.sqrt(2 * math.log(2 / level) / (n * past))
