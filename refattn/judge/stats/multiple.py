r"""Keep the rate of false alarms: many p-values, repeated runs and measured levels.

Holm, A simple sequentially rejective multiple test procedure, Scandinavian Journal of
Statistics 6(2), 1979.
Gandy and Scott, Unit testing for MCMC and other Monte Carlo methods, arXiv:2001.06465.
Clopper and Pearson, The use of confidence or fiducial limits, Biometrika 26(4), 1934.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ...arrays import checks
from ...arrays.words import with_known_keywords
from . import check

__all__ = ["Sequential", "clopper_pearson", "gandy_scott", "holm", "suite_p"]


class Sequential(NamedTuple):
    """Result of a sequential test; see `gandy_scott`.

    Attributes
    ----------
    rejected : bool
        Whether the null is rejected.
    p_values : tuple of float
        The p-value of each step.
    sizes : tuple of int
        The sample size of each step.
    seeds : tuple of numpy.random.SeedSequence
        The seed of each step: ``numpy.random.default_rng(seed)`` draws it again.
    """

    rejected: bool
    p_values: tuple[float, ...]
    sizes: tuple[int, ...]
    seeds: tuple[np.random.SeedSequence, ...]


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
def gandy_scott(
    pvalue: Callable[[int, np.random.Generator], float],
    *,
    alpha: float = 1e-5,
    steps: int = 7,
    size: int = 1000,
    growth: int = 4,
    rng: int | np.random.SeedSequence | np.random.Generator | None = None,
) -> Sequential:
    r"""Test with fresh samples until the p-value is clear, at most `steps` times.

    With beta_1 = alpha / k, gamma = beta_1^(1/k) and beta_j = beta_1 / gamma^(j - 1), step j

    .. math::
        \text{rejects if } p_j \le \beta_j, \qquad
        \text{accepts if } p_j > \gamma + \beta_j, \qquad \text{else goes on},

    and the last step accepts if it does not reject. The sample grows once, after the first step.
    Under the null, step j rejects with probability at most beta_j, and fails to accept with
    probability at most gamma + beta_j. By induction from the last step, the level is at most
    sum_j gamma^(j - 1) beta_j = alpha, which uniform p-values attain.

    Parameters
    ----------
    pvalue : callable
        ``pvalue(n, rng)`` draws a sample of size n and returns its p-value; for several p-values,
        return `suite_p` of them.
    alpha : float, default 1e-5
        The level, strictly between 0 and 1.
    steps : int, default 7
        Largest number of steps k.
    size : int, default 1000
        Sample size of the first step.
    growth : int, default 4
        Factor on the sample size of later steps.
    rng : int, SeedSequence, Generator or None, optional
        Spawns one seed for each step; with None, the result has the seeds that were drawn.

    Returns
    -------
    Sequential
        The decision, and the seeds from which the samples can be drawn again.

    Raises
    ------
    ValueError
        If `pvalue` returns nan or a number outside [0, 1].

    References
    ----------
    Gandy and Scott (2020).

    Examples
    --------
    >>> from refattn.judge import stats
    >>> result = stats.gandy_scott(lambda n, rng: stats.normal_mean(rng.normal(size=n)), rng=0)
    >>> result.rejected, result.sizes
    (False, (1000,))
    """
    if not callable(pvalue):
        raise TypeError(f"`pvalue` must be callable, got {type(pvalue).__name__}.")
    alpha = check.fraction("alpha", alpha)
    for name, value in (("steps", steps), ("size", size), ("growth", growth)):
        checks.positive_integer(name, value)
    root: Any = rng
    if not isinstance(rng, np.random.SeedSequence):
        root = checks.generator(rng).bit_generator.seed_seq
    beta = alpha / steps
    gamma = beta ** (1 / steps)
    p_values: list[float] = []
    sizes: list[int] = []
    seeds: list[np.random.SeedSequence] = []
    rejected = False
    while len(seeds) < steps and not rejected:
        sizes.append(size * growth if seeds else size)
        seeds += root.spawn(1)
        p = float(pvalue(sizes[-1], np.random.default_rng(seeds[-1])))
        if not 0 <= p <= 1:
            raise ValueError(f"`pvalue` must return a number in [0, 1], got {p}.")
        p_values.append(p)
        rejected = p <= beta
        if p > gamma + beta:
            break
        beta /= gamma
    return Sequential(rejected, tuple(p_values), tuple(sizes), tuple(seeds))


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
