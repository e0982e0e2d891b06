r"""Compute what a test detects at a sample size, and the sample size to detect a discrepancy.

A discrepancy delta is detected if under every law that is delta or more away from the null,
P(p > alpha) <= beta. Each line below is such a statement, proven, in the metric that it names; l(a)
is log(1 / a). The parameters are those of the test, and what the metric needs.

============================ ============================ =====================================
test, parameters             metric, other laws           least discrepancy
============================ ============================ =====================================
`ks`: error                  sup of \|G - F\|, any law G  c(alpha) + c(beta) + 2 error, c the
                                                          quantile of D_n
`dkwm_two_sample`:           sup of \|F - G\|, any two    (sqrt l(alpha / 4) + sqrt l(beta / 4))
reference, the size of y     laws                         (1 / sqrt(2 n) + 1 / sqrt(2 N))
`normal_mean`                \|mean\| of N(mean, 1)       quantiles of N(0, 1)
`normal_scale`               \|log s\| of N(0, s^2)       quantiles of chi-square
`chi2`: df                   \|log s\| of s chi2_df       quantiles of chi-square
`binomial`: p                \|p' - p\| of Bin(n, p')     quantiles of beta laws
`hotelling`: dimension       Mahalanobis length of the    noncentral F
                             shift of normal rows
`hoeffding`: low, high       \|shift of the mean\|, laws  (high - low) (sqrt l(alpha / 2) +
                             on [low, high]               sqrt l(beta)) / sqrt(2 n)
`bernstein`: variance,       \|shift of the mean\|, laws  Bernstein's bound once more
low, high                    on [low, high] of variance
                             at most `variance`
`empirical_bernstein`:       the same                     Bernstein's bound, and that of Maurer
variance, low, high                                       and Pontil on V_n
`catoni`: variance, level    \|shift of the mean\|, laws  Catoni's bound once more
                             of variance at most
                             `variance`
============================ ============================ =====================================

Quantiles of the far tail alone make the normal lines a little larger than they need be, by less
than the chance of an alarm on the wrong side. `betting` has no line: its bets follow the data, and
no useful bound on its power is known to the authors; simulate it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from scipy import special

from ...arrays import checks
from ...arrays.words import check_keywords, keyword_names
from . import bounds, check, exact, gaussian

__all__ = ["min_discrepancy", "min_samples"]

_MOST_SAMPLES = 2**50


def min_discrepancy(
    test: Callable[..., float],
    n: int,
    *,
    alpha: float = 1e-6,
    beta: float = 1e-6,
    **parameters: Any,
) -> float:
    r"""Compute the least discrepancy that a test is proven to detect.

    .. math:: \delta: \quad P_\theta(p > \alpha) \le \beta \quad
              \text{for every distribution } \theta \text{ at least } \delta \text{ from the null}

    in the metric of the test, from the table in `refattn.judge.stats.power`.

    Parameters
    ----------
    test : callable
        A test of the table: all of `refattn.judge.stats` but `betting` and `gaussian_estimates`.
    n : int
        The sample size, at least 1.
    alpha : float, default 1e-6
        The level of the test: it rejects for p <= alpha.
    beta : float, default 1e-6
        The largest probability of missing the discrepancy, below 1 - alpha.
    **parameters
        As in the table.

    Returns
    -------
    float
        The discrepancy; inf if no discrepancy is proven to be detected.

    References
    ----------
    Those of the tests. For the empirical Bernstein bound, Maurer and Pontil (2009), Theorem 10.

    Examples
    --------
    >>> from refattn.judge import stats
    >>> round(stats.min_discrepancy(stats.normal_mean, 10_000), 3)
    0.096
    """
    checks.positive_integer("n", n)
    alpha, beta = check.fraction("alpha", alpha), check.fraction("beta", beta)
    if alpha + beta >= 1:
        raise ValueError(f"`beta` must be less than 1 - `alpha`, got {beta} and {alpha}.")
    if test not in _DETECTABLE:
        names = ", ".join(f"`{f.__name__}`" for f in _DETECTABLE)
        got = getattr(test, "__name__", type(test).__name__)
        raise ValueError(f"`test` must be one of {names}, got `{got}`.")
    detectable = _DETECTABLE[test]
    check_keywords("min_discrepancy", parameters, keyword_names(detectable) or [*parameters])
    return float(detectable(int(n), alpha, beta, **parameters))


def min_samples(
    test: Callable[..., float],
    discrepancy: float,
    *,
    alpha: float = 1e-6,
    beta: float = 1e-6,
    **parameters: Any,
) -> int:
    r"""Compute a sample size at which a test is proven to detect a discrepancy.

    .. math:: \min \{ n : \texttt{min\_discrepancy}(n) \le \delta \}

    by bisection. For `binomial`, which has jumps, n satisfies this but may not be the least.

    Parameters
    ----------
    test : callable
        As in `min_discrepancy`.
    discrepancy : float
        The discrepancy to detect, positive.
    alpha, beta, **parameters
        As in `min_discrepancy`.

    Returns
    -------
    int
        The sample size.

    Raises
    ------
    ValueError
        If no n up to 2^50 is enough.

    References
    ----------
    As in `min_discrepancy`.

    Examples
    --------
    >>> from refattn.judge import stats
    >>> stats.min_samples(stats.hoeffding, 0.1)
    2832
    """
    discrepancy = checks.real("discrepancy", discrepancy, positive=True)

    def enough(n: int) -> bool:
        return min_discrepancy(test, n, alpha=alpha, beta=beta, **parameters) <= discrepancy

    high = 1
    while not enough(high):
        high *= 2
        if high > _MOST_SAMPLES:
            raise ValueError(f"`discrepancy` {discrepancy} needs more than 2^50 samples.")
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _ks(n: int, alpha: float, beta: float, *, error: float = 0.0) -> float:
    from scipy import stats

    alpha, beta = 0.99 * alpha, 0.99 * beta  # covers the error of SciPy's quantiles
    quantiles = stats.kstwo.isf(alpha, n) + stats.kstwo.isf(beta, n)
    return float(quantiles + 2 * check.non_negative("error", error))


def _dkwm_two_sample(n: int, alpha: float, beta: float, *, reference: int) -> float:
    checks.positive_integer("reference", reference)
    roots = math.sqrt(math.log(4 / alpha)) + math.sqrt(math.log(4 / beta))
    return roots * bounds.two_sample_unit(n, int(reference))


def _normal_mean(n: int, alpha: float, beta: float) -> float:
    return float(-special.ndtri(alpha / 2) - special.ndtri(beta)) / math.sqrt(n)


def _log_scale(df: float, alpha: float, beta: float) -> float:
    """Return |log s| for s chi2_df: the upper limit over a lower quantile, or the reverse."""
    low, high = special.gammaincinv(df / 2, alpha / 2), special.gammainccinv(df / 2, alpha / 2)
    rise = math.log(high / special.gammaincinv(df / 2, beta))
    return max(rise, math.log(special.gammainccinv(df / 2, beta) / low))


def _normal_scale(n: int, alpha: float, beta: float) -> float:
    return _log_scale(n, alpha, beta) / 2


def _chi2(n: int, alpha: float, beta: float, *, df: float) -> float:
    return _log_scale(n * checks.real("df", df, positive=True), alpha, beta)


def _binomial(n: int, alpha: float, beta: float, *, p: float) -> float:
    from scipy import stats

    law = stats.binom(n, check.fraction("p", p))
    least, most = int(law.ppf(alpha / 2)), int(law.isf(alpha / 2))  # accepted counts
    if least == 0 or most == n:
        return math.inf
    up = special.betainccinv(most + 1, n - most, beta) - p
    return float(max(up, p - special.betaincinv(least, n - least + 1, beta)))


def _hotelling(n: int, alpha: float, beta: float, *, dimension: int) -> float:
    from scipy import stats
    from scipy.optimize import brentq

    checks.positive_integer("dimension", dimension)
    if n <= dimension:
        return math.inf
    df, limit = (dimension, n - dimension), stats.f.isf(alpha, dimension, n - dimension)

    def missed(length: float) -> float:
        return float(stats.ncf.cdf(limit, *df, n * length * length)) - beta

    high = 1 / math.sqrt(n)
    while missed(high) > 0:
        high *= 2
    if math.isnan(missed(high)):  # a limit so far out that SciPy has no noncentral F there
        return math.inf
    return float(brentq(missed, 0, high, xtol=1e-12 * high)) * (1 + 1e-8)


def _hoeffding(n: int, alpha: float, beta: float, *, low: float = 0.0, high: float = 1.0) -> float:
    low, high = check.support(low, high)
    roots = math.sqrt(math.log(2 / alpha)) + math.sqrt(math.log(1 / beta))
    return (high - low) * roots / math.sqrt(2 * n)


def _bernstein_shift(n: int, log: float, variance: float) -> float:
    """Return t with exp(-n t^2 / (2 (v + t / 3))) = exp(-log)."""
    return (log / 3 + math.sqrt(log * log / 9 + 2 * n * variance * log)) / n


def _bernstein(
    n: int, alpha: float, beta: float, *, variance: float, low: float = 0.0, high: float = 1.0
) -> float:
    low, high = check.support(low, high)
    v = check.non_negative("variance", variance) / (high - low) ** 2
    shifts = [_bernstein_shift(n, log, v) for log in (math.log(2 / alpha), math.log(1 / beta))]
    return (high - low) * sum(shifts)


def _empirical_bernstein(
    n: int, alpha: float, beta: float, *, variance: float, low: float = 0.0, high: float = 1.0
) -> float:
    low, high = check.support(low, high)
    v = check.non_negative("variance", variance) / (high - low) ** 2
    if n < 2:
        return math.inf
    log, miss = math.log(4 / alpha), math.log(2 / beta)
    spread = math.sqrt(v) + math.sqrt(2 * miss / (n - 1))
    limit = spread * math.sqrt(2 * log / n) + 7 * log / (3 * (n - 1))
    return (high - low) * (limit + _bernstein_shift(n, miss, v))


def _catoni(n: int, alpha: float, beta: float, *, variance: float, level: float = 1e-6) -> float:
    """Return delta, with y = lambda delta <= 1 the root of E exp(-phi)'s bound.

    (1 - y + y^2 / 2 + lambda^2 v / 2)^n <= alpha beta / 2 exp(-n lambda^2 v / 2). As phi
    increases, what holds for a shift holds for every greater one.
    """
    variance = checks.real("variance", variance, positive=True)
    scale = bounds.catoni_scale(n, variance, check.fraction("level", level))
    half = scale * scale * variance / 2
    rest = half - math.expm1(-half - math.log(2 / alpha / beta) / n)
    if rest > 0.5:
        return math.inf
    return 2 * rest / (1 + math.sqrt(1 - 2 * rest)) / scale


_DETECTABLE: dict[Callable[..., float], Callable[..., float]] = {
    exact.ks: _ks,
    exact.normal_mean: _normal_mean,
    exact.normal_scale: _normal_scale,
    exact.chi2: _chi2,
    exact.binomial: _binomial,
    gaussian.hotelling: _hotelling,
    bounds.hoeffding: _hoeffding,
    bounds.bernstein: _bernstein,
    bounds.empirical_bernstein: _empirical_bernstein,
    bounds.catoni: _catoni,
    bounds.dkwm_two_sample: _dkwm_two_sample,
}
