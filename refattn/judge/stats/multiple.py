r"""Keep the rate of false alarms: many p-values, and measured levels.

Holm, A simple sequentially rejective multiple test procedure, Scandinavian Journal of
Statistics 6(2), 1979.
Clopper and Pearson, The use of confidence or fiducial limits, Biometrika 26(4), 1934.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...arrays import checks
from ...arrays.words import with_known_keywords
from . import check

__all__ = ["clopper_pearson", "holm", "suite_p"]


def holm(p: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    r"""Adjust p-values so that rejecting those of at most alpha has family-wise error alpha.

    .. math:: \tilde p_{(i)} = \max_{j \le i} \min(1, (m - j + 1) \, p_{(j)})

    Under any dependence.

    Parameters
    ----------
    p : array_like, shape (m,)
        P-values, in [0, 1].

    Returns
    -------
    ndarray, shape (m,)
        The adjusted p-values, in the order of `p`.

    References
    ----------
    Holm (1979), Theorem 1.

    Examples
    --------
    >>> from refattn.judge import stats
    >>> stats.holm([0.04, 0.01, 0.03])
    array([0.06, 0.03, 0.06])
    """
    p = check.p_values(p)
    order = np.argsort(p, kind="stable")
    scaled = np.minimum(1, np.arange(len(p), 0, -1) * p[order])
    adjusted = np.empty(len(p))
    adjusted[order] = np.maximum.accumulate(scaled)
    return adjusted


def suite_p(p: Any) -> float:
    r"""Combine p-values into one.

    .. math:: \min(1, m \min_i p_i)

    Valid under any dependence; the smallest p-value that `holm` returns.

    Parameters
    ----------
    p : array_like, shape (m,)
        P-values, in [0, 1].

    Returns
    -------
    float
        The p-value of the hypothesis that all nulls hold.

    References
    ----------
    Bonferroni's inequality.

    Examples
    --------
    >>> from refattn.judge import stats
    >>> stats.suite_p([0.04, 0.01, 0.03])
    0.03
    """
    p = check.p_values(p)
    return float(min(1, len(p) * np.min(p)))


@with_known_keywords
def clopper_pearson(successes: int, n: int, confidence: float = 0.99) -> tuple[float, float]:
    r"""Compute an exact confidence interval of a probability.

    .. math:: \{ p : P(K \ge k) > (1 - c) / 2 \text{ and } P(K \le k) > (1 - c) / 2 \}, \qquad
              K \sim \mathrm{Bin}(n, p)

    Parameters
    ----------
    successes, n
        As in `exact.binomial`.
    confidence : float, default 0.99
        The confidence c, strictly between 0 and 1.

    Returns
    -------
    tuple of float
        The ends of the interval.

    References
    ----------
    Clopper and Pearson (1934), by ``scipy.stats.binomtest``.

    Examples
    --------
    >>> from refattn.judge import stats
    >>> low, high = stats.clopper_pearson(0, 4603)
    >>> low, round(high, 5)
    (0.0, 0.00115)
    """
    from scipy.stats import binomtest

    checks.positive_integer("n", n)
    checks.non_negative_integer("successes", successes)
    check.within("successes", successes, 0, n)
    confidence = check.fraction("confidence", confidence)
    interval = binomtest(int(successes), int(n)).proportion_ci(confidence)
    return float(interval.low), float(interval.high)
