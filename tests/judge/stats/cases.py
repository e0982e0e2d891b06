"""One registry of every test: its null, how far it sees, and defects that must be seen."""

import math
from functools import partial

import mpmath
import numpy as np

from refattn.judge import stats

LEVEL = 1e-6  # of all decisions by simulation together, by Bonferroni
DECISIONS = 200
ROOT = np.array([[2.0, 0.0], [1.0, 0.5]])


def uniform(x):
    return np.clip(x, 0, 1)


def draws(seed, *size):
    return np.random.default_rng(seed).standard_normal(size)


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


def centred(rng):
    z = rng.standard_normal(5)
    return z - z.mean()


def studentised(rng):
    z = rng.standard_normal(5)
    return z / z.std(ddof=1)


def taken_for_the_law(rng):
    y = np.sort(rng.random(20))
    return stats.ks(rng.random(50), lambda x: np.searchsorted(y, x) / 20)


def foresight(x, m):
    """Betting on what is about to come."""
    return float(1 / max(1, np.exp(np.max(np.cumsum(np.log1p(0.5 * abs(x - m)))))))


# A p-value of a sample at a distance from the null, its size and the parameters of
# `min_discrepancy`. The first word of a name is the test.
DESIGNS = {
    "ks": (lambda rng, d: stats.ks(rng.random(100) + d, uniform), 100, {}),
    "ks, rounded": (
        lambda rng, d: stats.ks(rounded(rng) + d, uniform, error=1 / 16), 500, {"error": 1 / 16}
    ),
    "dkwm_two_sample": (
        lambda rng, d: stats.dkwm_two_sample(rng.random(100) + d, rng.random(150)),
        100,
        {"reference": 150},
    ),
    "normal_mean": (lambda rng, d: stats.normal_mean(rng.normal(d, 1, 9)), 9, {}),
    "normal_scale": (lambda rng, d: stats.normal_scale(rng.normal(0, math.exp(d), 9)), 9, {}),
    "chi2": (lambda rng, d: stats.chi2(math.exp(d) * rng.chisquare(1.5, 6), 1.5), 6, {"df": 1.5}),
    "binomial": (
        lambda rng, d: stats.binomial(int(rng.binomial(80, 0.4 + d)), 80, 0.4), 80, {"p": 0.4}
    ),
    "hotelling": (lambda rng, d: stats.hotelling(rows(rng, d), [1, 1]), 12, {"dimension": 2}),
    "hoeffding": (lambda rng, d: stats.hoeffding(coin(rng, 0.4 + d), 0.4), 200, {}),
    "bernstein": (
        lambda rng, d: stats.bernstein(coin(rng, 0.4 + d), 0.4, 0.25), 200, {"variance": 0.25}
    ),
    "empirical_bernstein": (
        lambda rng, d: stats.empirical_bernstein(coin(rng, 0.4 + d), 0.4), 200, {"variance": 0.25}
    ),
    "catoni": (
        lambda rng, d: stats.catoni(rng.standard_t(3, 200) + d, 0.0, 3.0, level=0.05),
        200,
        {"variance": 3.0, "level": 0.05},
    ),
}  # fmt: skip
NULLS = {name: partial(p, d=0.0) for name, (p, *_) in DESIGNS.items()} | {
    "hoeffding, even": lambda rng: stats.hoeffding(coin(rng, 0.5, 60), 0.5),
    "bernstein, rare": lambda rng: stats.bernstein(coin(rng, 0.05, 60), 0.05, 0.0475),
    "empirical_bernstein, rare": lambda rng: stats.empirical_bernstein(coin(rng, 0.05, 60), 0.05),
    "betting, rare": lambda rng: stats.betting(coin(rng, 0.05, 60), 0.05, level=0.05),
    "betting, uniform": lambda rng: stats.betting(rng.random(60), 0.5, level=0.05),
    "catoni, wide": lambda rng: stats.catoni(lognormals(rng, 1.5, 60), 1.0, 4.25, level=0.05),
    "gaussian_estimates, each": lambda rng: estimates(rng).each,
    "gaussian_estimates": lambda rng: estimates(rng)[1:],
    "suite_p": lambda rng: stats.suite_p(rng.random(40)),
    "holm": lambda rng: float(np.min(stats.holm(np.repeat(rng.random(4), 5)))),
}
DEFECTS = {
    "two-sided without the factor 2": lambda rng: stats.normal_scale(rng.standard_normal(5)) / 2,
    "ks without the rounding": lambda rng: stats.ks(rounded(rng), uniform),
    "a second sample taken for the law": taken_for_the_law,
    "chi2 of n about the mean": lambda rng: stats.normal_scale(centred(rng)),
    "normal law for student": lambda rng: stats.normal_mean(studentised(rng)),
    "a mean that shifted": lambda rng: stats.normal_mean(rng.normal(0.1, 1, 100)),
    "ddof 0 for 1": lambda rng: estimates(rng, ddof=0).trace,
    "ddof 0 for 1, pooled": lambda rng: estimates(rng, ddof=0).pooled,
    "hoeffding, range halved": (
        lambda rng: min(1.0, 2 * (stats.hoeffding(coin(rng, 0.5, 60), 0.5) / 2) ** 4)
    ),
    "bernstein with no variance": lambda rng: stats.bernstein(coin(rng, 0.05, 60), 0.05, 0.0),
    "betting with foresight": lambda rng: foresight(coin(rng, 0.5, 60), 0.5),
    "catoni with a cap too low": (
        lambda rng: stats.catoni(lognormals(rng, 1.0, 200), 1.0, 0.05, level=0.05)
    ),
    "smallest p unadjusted": lambda rng: float(np.min(rng.random(40))),
}
# P-values that are uniform under the null, or should be.
EXACT = {
    *("ks", "normal_mean", "normal_scale", "chi2", "hotelling"),
    *("gaussian_estimates", "two-sided without the factor 2"),
    *("chi2 of n about the mean", "normal law for student", "a mean that shifted"),
    *("ddof 0 for 1", "ddof 0 for 1, pooled"),
}
RUNS = {"gaussian_estimates, each": 500, "gaussian_estimates": 1000, "ddof 0 for 1": 300}
RUNS |= {"ddof 0 for 1, pooled": 300}


mp = mpmath.mp.clone()
mp.dps = 40


def chi2_p(x, df):
    """The two-sided p-value of a chi-square, to 40 digits."""
    lower = mp.gammainc(mp.mpf(df) / 2, 0, mp.mpf(x) / 2, regularized=True)
    return float(min(1, 2 * min(lower, 1 - lower)))
