"""One registry of every test: its null, how far it sees, and defects that must be seen."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from refattn import stats

LEVEL = 1e-6  # of all decisions by simulation together, by Bonferroni
DECISIONS = 200
ROOT = np.array([[2.0, 0.0], [1.0, 0.5]])


def uniform(x):
    return np.clip(x, 0, 1)


def draws(seed, *size):
    return np.random.default_rng(seed).standard_normal(size)


class Case(NamedTuple):
    """A p-value, or several, of a draw at a distance from the null, which is at 0.

    With a sample size `n` it is a design of `min_discrepancy`, with these parameters.
    """

    draw: Callable[[np.random.Generator, float], Any]
    n: int | None = None
    parameters: dict[str, Any] = {}  # noqa: RUF012
    exact: bool = False
    runs: int = 2000


def coin(rng, mean, n=200):
    return (rng.random(n) < mean).astype(float)


def rounded(rng):
    return np.round(8 * rng.random(500)) / 8


def rows(rng, delta):
    return (rng.standard_normal((12, 2)) + np.array([delta, 0.0])) @ ROOT.T + 1


def cov_of(x, ddof=1):
    y = x - x.mean(1, keepdims=True)
    return np.swapaxes(y, 1, 2) @ y / (x.shape[1] - ddof)


def estimates(rng, ddof=1, count=5):
    x = rng.standard_normal((40, count, 2)) @ ROOT.T + 1
    return stats.gaussian_estimates(
        x.mean(1), cov_of(x, ddof), count=count, mean=np.ones(2), cov=ROOT @ ROOT.T
    )


def lognormals(rng, s, n):
    return np.exp(s * rng.standard_normal((n, 2)) - s * s / 2).mean(1)


# The first word of a name is the test.
CASES = {
    "ks": Case(lambda rng, d: stats.ks(rng.random(100) + d, uniform), 100, exact=True),
    "ks, rounded": Case(
        lambda rng, d: stats.ks(rounded(rng) + d, uniform, error=1 / 16), 500, {"error": 1 / 16}
    ),
    "dkwm": Case(lambda rng, d: stats.dkwm(rng.random(100) + d, uniform), 100),
    "dkwm_two_sample": Case(
        lambda rng, d: stats.dkwm_two_sample(rng.random(100) + d, rng.random(150)),
        100,
        {"reference": 150},
    ),
    "normal_mean": Case(lambda rng, d: stats.normal_mean(rng.normal(d, 1, 9)), 9, exact=True),
    "normal_scale": Case(
        lambda rng, d: stats.normal_scale(rng.normal(0, math.exp(d), 9)), 9, exact=True
    ),
    "normal_variance": Case(
        lambda rng, d: stats.normal_variance(rng.normal(7, math.exp(d), 9)), 9, exact=True
    ),
    "chi2": Case(
        lambda rng, d: stats.chi2(math.exp(d) * rng.chisquare(1.5, 6), 1.5), 6, {"df": 1.5}, True
    ),
    "binomial": Case(
        lambda rng, d: stats.binomial(int(rng.binomial(80, 0.4 + d)), 80, 0.4), 80, {"p": 0.4}
    ),
    "hotelling": Case(
        lambda rng, d: stats.hotelling(rows(rng, d), [1.0, 1.0]), 12, {"dimension": 2}, True
    ),
    "hoeffding": Case(lambda rng, d: stats.hoeffding(coin(rng, 0.4 + d), 0.4), 200),
    "dkwm_mean": Case(lambda rng, d: stats.dkwm_mean(coin(rng, 0.4 + d), 0.4), 200),
    "chernoff": Case(lambda rng, d: stats.chernoff(coin(rng, 0.2 + d), 0.2), 200, {"mean": 0.2}),
    "bernstein": Case(
        lambda rng, d: stats.bernstein(coin(rng, 0.4 + d), 0.4, 0.25), 200, {"variance": 0.25}
    ),
    "empirical_bernstein": Case(
        lambda rng, d: stats.empirical_bernstein(coin(rng, 0.4 + d), 0.4), 200, {"variance": 0.25}
    ),
    "catoni": Case(
        lambda rng, d: stats.catoni(rng.standard_t(3, 200) + d, 0.0, 3.0, level=0.05),
        200,
        {"variance": 3.0, "level": 0.05},
    ),
    "lognormal_pair, any law": Case(
        lambda rng, d: stats.ks(rng.random(60) + d, uniform, error=1e-12), 60
    ),
    "lognormal_pair": Case(
        lambda rng, _: stats.lognormal_pair(lognormals(rng, 1, 12), 1), exact=True
    ),
    "hoeffding, even": Case(lambda rng, _: stats.hoeffding(coin(rng, 0.5, 60), 0.5)),
    "dkwm_mean, rare": Case(lambda rng, _: stats.dkwm_mean(coin(rng, 0.05, 60), 0.05)),
    "chernoff, rare": Case(lambda rng, _: stats.chernoff(coin(rng, 0.05, 60), 0.05)),
    "bernstein, rare": Case(lambda rng, _: stats.bernstein(coin(rng, 0.05, 60), 0.05, 0.0475)),
    "empirical_bernstein, rare": Case(
        lambda rng, _: stats.empirical_bernstein(coin(rng, 0.05, 60), 0.05)
    ),
    "betting, rare": Case(lambda rng, _: stats.betting(coin(rng, 0.05, 60), 0.05, level=0.05)),
    "betting, uniform": Case(lambda rng, _: stats.betting(rng.random(60), 0.5, level=0.05)),
    "catoni, lognormal": Case(
        lambda rng, _: stats.catoni(lognormals(rng, 1.5, 60), 1.0, 4.25, level=0.05)
    ),
    "gaussian_estimates, each": Case(lambda rng, _: estimates(rng).each, runs=500),
    "gaussian_estimates": Case(lambda rng, _: estimates(rng)[1:], exact=True, runs=1000),
    "suite_p": Case(lambda rng, _: stats.suite_p(rng.random(40))),
    "holm": Case(lambda rng, _: float(np.min(stats.holm(np.repeat(rng.random(4), 5))))),
}
DESIGNS = [name for name, case in CASES.items() if case.n]


def centred(rng):
    z = rng.standard_normal(5)
    return z - z.mean()


def studentised(rng):
    z = rng.standard_normal(5)
    return z / z.std(ddof=1)


def taken_for_the_law(rng):
    y = np.sort(rng.random(20))
    return stats.dkwm(rng.random(50), lambda x: np.searchsorted(y, x) / 20)


def foresight(x, m):
    """Betting on what is about to come."""
    return float(1 / max(1, np.exp(np.max(np.cumsum(np.log1p(0.5 * abs(x - m)))))))


DEFECTS = {
    "two-sided without the factor 2": Case(
        lambda rng, _: stats.normal_scale(rng.standard_normal(5)) / 2, exact=True
    ),
    "ks without the rounding": Case(lambda rng, _: stats.ks(rounded(rng), uniform)),
    "one-sided constant of dkwm": Case(
        lambda rng, _: min(1.0, stats.dkwm(rng.random(50), uniform) / 2)
    ),
    "a second sample taken for the law": Case(lambda rng, _: taken_for_the_law(rng)),
    "chi2 of n about the mean": Case(lambda rng, _: stats.normal_scale(centred(rng)), exact=True),
    "normal law for student": Case(lambda rng, _: stats.normal_mean(studentised(rng)), exact=True),
    "a mean that shifted": Case(
        lambda rng, _: stats.normal_mean(rng.normal(0.1, 1, 100)), exact=True
    ),
    "ddof 0 for 1": Case(lambda rng, _: estimates(rng, ddof=0).trace, exact=True, runs=300),
    "ddof 0 for 1, pooled": Case(
        lambda rng, _: estimates(rng, ddof=0).pooled, exact=True, runs=300
    ),
    "one lognormal for the mean of two": Case(
        lambda rng, _: stats.lognormal_pair(rng.lognormal(-0.5, 1.0, 60), 1.0), runs=300
    ),
    "hoeffding, range halved": Case(
        lambda rng, _: min(1.0, 2 * (stats.hoeffding(coin(rng, 0.5, 60), 0.5) / 2) ** 4)
    ),
    "bernstein with no variance": Case(
        lambda rng, _: stats.bernstein(coin(rng, 0.05, 60), 0.05, 0.0)
    ),
    "betting with foresight": Case(lambda rng, _: foresight(coin(rng, 0.5, 60), 0.5)),
    "catoni with a cap too low": Case(
        lambda rng, _: stats.catoni(lognormals(rng, 1.0, 200), 1.0, 0.05, level=0.05)
    ),
    "smallest p unadjusted": Case(lambda rng, _: float(np.min(rng.random(40)))),
}
