"""Tests of tests: formulas against slow ones, levels and powers against exact binomial laws.

Monte Carlo here has fixed seeds, and one error rate for all that it decides: the p-values of all
levels and powers go through Bonferroni at 1e-6 (`LEVEL`). A planted defect of every kind must fail.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import mpmath
import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq, minimize_scalar
from scipy.special import betainc, ndtr

from refattn import stats

LEVEL = 1e-6
RUNS = 2000
Rng = np.random.Generator
mp = mpmath.mp.clone()
mp.dps = 40


def uniform(x):
    return np.clip(x, 0, 1)


def draws(seed, *size):
    return np.random.default_rng(seed).standard_normal(size)


# --- formulas -----------------------------------------------------------------------------------


def kolmogorov(n, d):
    """P(D_n >= d), exactly: Marsaglia, Tsang and Wang, 2003."""
    k = math.floor(n * d) + 1
    h = k - n * d
    m = 2 * k - 1
    a = [[Fraction(int(i - j + 1 >= 0)) for j in range(m)] for i in range(m)]
    for i in range(m):
        a[i][0] -= h ** (i + 1)
        a[m - 1][i] -= h ** (m - i)
    a[m - 1][0] += max(2 * h - 1, Fraction(0)) ** m
    for i, j in itertools.product(range(m), repeat=2):
        if i - j + 1 > 0:
            a[i][j] /= math.factorial(i - j + 1)
    row = [Fraction(int(i == k - 1)) for i in range(m)]
    for _ in range(n):
        row = [sum((row[i] * a[i][j] for i in range(m)), Fraction(0)) for j in range(m)]
    return 1 - row[k - 1] * math.factorial(n) / Fraction(n) ** n


@pytest.mark.parametrize("n", [1, 4, 9, 15])
def test_ks_is_exact(n):
    x = np.random.default_rng(n).random(n)
    exact = sorted(Fraction(float(v)) for v in x)
    d = max(max(Fraction(i + 1, n) - v, v - Fraction(i, n)) for i, v in enumerate(exact))
    assert stats.ks(x, uniform) == pytest.approx(float(kolmogorov(n, d)), rel=1e-10)
    smaller = float(kolmogorov(n, d - Fraction(1, 64)))
    assert stats.ks(x, uniform, error=1 / 64) == pytest.approx(smaller, rel=1e-10)
    assert stats.dkwm(x, uniform) == pytest.approx(min(1, 2 * math.exp(-2 * n * d * d)))
    assert stats.ks(x, uniform, error=1) == stats.dkwm(x, uniform, error=1) == 1


@pytest.mark.long("100000")
@pytest.mark.parametrize("n", [100, 1000, 100_000])
@pytest.mark.parametrize("root", [2.0, 3.0, 5.0])
def test_the_far_tail_of_ks_lies_between_its_bounds(n, root):
    """The two one-sided events are nearly exclusive: 2 P(D+ >= d) - P(D+ >= d)^2 and 2 P."""
    d = root / math.sqrt(n)
    x = np.minimum(np.arange(1, n + 1) / n + d, 1)  # d above the steps: D- = d + 1 / n
    assert stats.ks(x, uniform) == pytest.approx(scipy.stats.kstwo.sf(d + 1 / n, n), rel=1e-9)
    one = scipy.stats.ksone.sf(d, n)
    p = scipy.stats.kstwo.sf(d, n)
    assert 2 * one * (1 - 1e-4) <= p <= 2 * one * (1 + 1e-9)
    assert p <= 2 * math.exp(-2 * root**2)


def chi2_p(x, df):
    lower = mp.gammainc(mp.mpf(df) / 2, 0, mp.mpf(x) / 2, regularized=True)
    return float(min(1, 2 * min(lower, 1 - lower)))


@pytest.mark.parametrize("n", [2, 5, 60])
@pytest.mark.parametrize("scale", [0.5, 1.0, 1.7])
def test_normal_and_chi2_formulas(n, scale):
    z = scale * draws(n, n) + 0.3
    exact = [mp.mpf(float(v)) for v in z]
    mean = sum(exact) / n
    assert stats.normal_mean(z) == pytest.approx(
        float(mp.erfc(abs(mean) * mp.sqrt(n) / mp.sqrt(2))), rel=1e-10
    )
    assert stats.normal_scale(z) == pytest.approx(chi2_p(sum(v * v for v in exact), n), rel=1e-9)
    about = sum((v - mean) ** 2 for v in exact)
    assert stats.normal_variance(z) == pytest.approx(chi2_p(about, n - 1), rel=1e-9)
    assert stats.chi2(z**2, 2.5) == pytest.approx(
        chi2_p(sum(v * v for v in exact), 2.5 * n), rel=1e-9
    )


@pytest.mark.parametrize(("n", "p"), [(1, 0.5), (7, 0.25), (30, 0.125)])
def test_binomial_is_exact(n, p):
    q = Fraction(p)
    mass = [math.comb(n, k) * q**k * (1 - q) ** (n - k) for k in range(n + 1)]
    for k in range(n + 1):
        exact = min(1, 2 * min(sum(mass[: k + 1]), sum(mass[k:])))
        assert stats.binomial(k, n, p) == pytest.approx(float(exact), rel=1e-10)


@pytest.mark.parametrize("d", [1, 2, 4])
def test_hotelling_formula(d):
    x = draws(d, 12, d) @ draws(7, d, d) + 3.0
    mean = np.full(d, 2.5)
    gap = x.mean(0) - mean
    t2 = 12 * gap @ np.linalg.inv(np.cov(x.T).reshape(d, d)) @ gap
    expected = scipy.stats.f.sf(t2 * (12 - d) / d / 11, d, 12 - d)
    assert stats.hotelling(x, mean) == pytest.approx(expected, rel=1e-9)
    assert stats.hotelling(1e200 * x, 1e200 * mean) == pytest.approx(expected, rel=1e-9)
    if d == 1:
        student = scipy.stats.ttest_1samp(x[:, 0], 2.5).pvalue
        assert stats.hotelling(x, mean) == pytest.approx(student, rel=1e-9)


@pytest.mark.parametrize("ddof", [0, 1])
def test_bartlett_by_qr_of_the_rows(ddof):
    """A = Z'Z = R'R for the whitened centred rows Z = QR: T is R' with positive diagonal."""
    r, n, d = 3, 6, 3
    root = np.tril(draws(1, d, d)) + 3 * np.eye(d)
    mean, cov = np.array([1.0, -2.0, 0.5]), root @ root.T
    x = draws(2, r, n, d) @ root.T + mean
    covs = np.stack([np.cov(rows.T, ddof=ddof) for rows in x])
    u = stats.bartlett(x.mean(1), covs, count=n, mean=mean, cov=cov, ddof=ddof)
    chol = np.linalg.cholesky(cov)
    for i in range(r):
        z = np.linalg.solve(chol, (x[i] - x[i].mean(0)).T).T
        t = np.linalg.qr(z)[1].T
        t = t * np.sign(np.diag(t))
        expected = list(ndtr(math.sqrt(n) * np.linalg.solve(chol, x[i].mean(0) - mean)))
        for j in range(d):
            expected += [*ndtr(t[j, :j]), scipy.stats.chi2.cdf(t[j, j] ** 2, n - 1 - j)]
        np.testing.assert_allclose(u[i], expected, rtol=1e-9)
    got = stats.gaussian_estimates(x.mean(1), covs, count=n, mean=mean, cov=cov, ddof=ddof)
    z = np.linalg.solve(chol, (x - mean).reshape(-1, d).T).T.reshape(x.shape)
    centre = math.sqrt(n) * z.mean(1)
    within = np.sum((z - z.mean(1, keepdims=True)) ** 2)
    location = scipy.stats.chi2.sf(np.sum(centre.sum(0) ** 2) / r, d)
    columns = [scipy.stats.kstest(column, "uniform", method="exact").pvalue for column in u.T]
    expected_p = [
        min(1, len(columns) * min(columns)),
        scipy.stats.kstest(u.ravel(), "uniform", method="exact").pvalue,
        location,
        chi2_p(np.sum(centre**2), r * d),
        chi2_p(within, r * d * (n - 1)),
    ]
    np.testing.assert_allclose(got, expected_p, rtol=1e-9)


def test_bartlett_of_singular_covariances_is_zero():
    covs = np.array([np.eye(2), np.ones((2, 2)), -np.eye(2)])
    settings_ = {"count": 5, "mean": np.zeros(2), "cov": np.eye(2)}
    u = stats.bartlett(np.zeros((3, 2)), covs, **settings_)
    np.testing.assert_array_equal(np.all(u == 0, axis=1), [False, True, True])
    assert set(stats.gaussian_estimates(np.zeros((3, 2)), covs, **settings_)) == {0.0}


@pytest.mark.long
@pytest.mark.parametrize("s", [0.01, 0.3, 1.0, 3.0, 10.0])
def test_lognormal_sum_cdf_by_quadrature(s):
    """The plain convolution, in 30 digits."""
    with mp.workdps(30):
        for u in (-5.0, -1.0, 0.0, 1.5, 5.0):
            t = math.exp(s * u - s * s / 2)
            end = (mp.log(2 * mp.mpf(t)) + mp.mpf(s) ** 2 / 2) / s

            def integrand(z, t=t):
                rest = 2 * mp.mpf(t) - mp.exp(s * z - mp.mpf(s) ** 2 / 2)
                y = (mp.log(rest) + mp.mpf(s) ** 2 / 2) / s if rest > 0 else -mp.inf
                return mp.npdf(z) * mp.ncdf(y) if rest > 0 else mp.mpf(0)

            low, high = min(mp.mpf(-13), end - 13), min(end, mp.mpf(13))
            exact = mp.quad(integrand, mp.linspace(low, high, 9))
            assert abs(float(stats.lognormal_sum_cdf(t, s) - exact)) < 1e-12
    grid = np.concatenate([[-1.0, 0.0], np.exp(np.linspace(-700, 700, 40000))])
    values = stats.lognormal_sum_cdf(grid, s)
    assert values[0] == values[1] == 0
    assert values[-1] == pytest.approx(1, abs=1e-12)
    assert np.all(np.diff(values) >= -1e-12)
    assert stats.lognormal_sum_cdf(grid.reshape(2, -1), s).shape == (2, 20001)
    x = grid[20000::500]
    expected = stats.ks(x, lambda t: stats.lognormal_sum_cdf(t, s), error=1e-12)
    assert stats.lognormal_pair(x, s) == expected


BOUNDED = [
    (np.random.default_rng(1).random(40) ** 2, 0.45),
    (np.random.default_rng(2).random(40) ** 2, 0.2),
    ((np.random.default_rng(3).random(25) < 0.9).astype(float), 0.6),
    (np.array([0.5, 0.75, 1.0]), 1 / 16),
]


def log_betting(x, m, level):
    """The wealth, draw by draw."""
    up = down = best = 1.0
    for i, value in enumerate(x):
        past = x[:i]
        centres = [(0.5 + past[: j + 1].sum()) / (j + 2) for j in range(i)]
        variance = (0.25 + sum((v - c) ** 2 for v, c in zip(past, centres, strict=True))) / (i + 1)
        bet = min(math.sqrt(2 * math.log(2 / level) / len(x) / variance), 0.5 / m, 0.5 / (1 - m))
        up, down = up * (1 + bet * (value - m)), down * (1 - bet * (value - m))
        best = max(best, (up + down) / 2)
    return 1 / best


def shifted_mean(x, eps):
    """The largest mean in [0, 1] of laws within eps of the sample, as a mass at a time."""
    x, out, left = np.sort(x), x.mean(), eps
    for value in x:
        moved = min(left, 1 / len(x))
        out, left = out + moved * (1 - value), left - moved
    return float(out)


@pytest.mark.parametrize(("x", "m"), BOUNDED)
def test_bounds_on_bounded_means(x, m):
    n, t = len(x), abs(x.mean() - m)
    assert stats.hoeffding(x, m) == pytest.approx(min(1, 2 * math.exp(-2 * n * t * t)))
    sign = 1 if x.mean() > m else -1
    best = minimize_scalar(
        lambda a: math.log1p(m * math.expm1(sign * a)) - sign * a * x.mean(),
        bounds=(0, 60),
        method="bounded",
        options={"xatol": 1e-10},
    )
    assert stats.chernoff(x, m) == pytest.approx(min(1, 2 * math.exp(n * best.fun)), rel=1e-6)
    v = 0.07
    log = brentq(lambda a: a / 3 + math.sqrt(a * a / 9 + 2 * n * v * a) - n * t, 0, 1e4)
    assert stats.bernstein(x, m, v) == pytest.approx(min(1, 2 * math.exp(-log)))
    log = brentq(lambda a: math.sqrt(2 * x.var(ddof=1) * a / n) + 7 * a / (3 * (n - 1)) - t, 0, 1e4)
    assert stats.empirical_bernstein(x, m) == pytest.approx(min(1, 4 * math.exp(-log)))
    for level in (1e-6, 0.05):
        expected = log_betting(x, m, level)
        assert stats.betting(x, m, level=level) == pytest.approx(expected, rel=1e-10)
    y, goal = (x, m) if m > x.mean() else (1 - x, 1 - m)
    eps = brentq(lambda a: shifted_mean(y, a) - goal, 0, 1, xtol=1e-14)
    assert stats.dkwm_mean(x, m) == pytest.approx(min(1, 2 * math.exp(-2 * n * eps**2)))
    assert stats.chernoff(x, m) <= stats.hoeffding(x, m) * (1 + 1e-12)
    assert stats.dkwm_mean(x, m) <= stats.hoeffding(x, m) * (1 + 1e-12)
    # Units of the interval do not matter.
    for test, more in (
        (stats.hoeffding, ()),
        (stats.bernstein, (v,)),
        (stats.empirical_bernstein, ()),
        (stats.dkwm_mean, ()),
    ):
        scaled = test(8 * x - 4, 8 * m - 4, *(64 * a for a in more), -4.0, 4.0)
        assert scaled == pytest.approx(test(x, m, *more), rel=1e-9)


def test_catoni_and_two_samples():
    x = np.random.default_rng(0).standard_t(3, 50) + 0.5
    for level in (1e-6, 0.05):
        a = mp.sqrt(2 * mp.log(2 / mp.mpf(level)) / (50 * 3))
        y = [a * (mp.mpf(float(v)) - mp.mpf(0.125)) for v in x]
        total = sum(mp.sign(v) * mp.log(1 + abs(v) + v * v / 2) for v in y)
        expected = float(min(1, 2 * mp.exp(-abs(total) + 50 * a * a * 3 / 2)))
        assert stats.catoni(x, 0.125, 3.0, level=level) == pytest.approx(expected, rel=1e-9)
    for size in (1, 7, 300):
        y = np.round(draws(size, size), 1)
        d = scipy.stats.ks_2samp(x, y).statistic
        exact = 4 * math.exp(-((d / (1 / math.sqrt(100) + 1 / math.sqrt(2 * size))) ** 2))
        assert stats.dkwm_two_sample(x, y) == pytest.approx(min(1, exact))
        assert stats.dkwm_two_sample(y, x) == stats.dkwm_two_sample(x, y)


# --- levels -------------------------------------------------------------------------------------


class Null(NamedTuple):
    """How to draw a p-value, or several, under the null."""

    draw: Callable[[Rng], Any]
    exact: bool = False
    runs: int = RUNS


def bernoulli(p, n=60):
    return lambda rng: (rng.random(n) < p).astype(float)


def cov_of(x, ddof=1):
    y = x - x.mean(1, keepdims=True)
    return np.swapaxes(y, 1, 2) @ y / (x.shape[1] - ddof)


def estimates(rng, ddof=1, count=5):
    x = rng.standard_normal((40, count, 2)) @ ROOT.T + 1
    return stats.gaussian_estimates(
        x.mean(1), cov_of(x, ddof), count=count, mean=np.ones(2), cov=ROOT @ ROOT.T
    )


ROOT = np.array([[2.0, 0.0], [1.0, 0.5]])


def lognormals(rng, s, n):
    return np.exp(s * rng.standard_normal((n, 2)) - s * s / 2).mean(1)


NULLS = {
    "ks": Null(lambda rng: stats.ks(rng.random(50), uniform), True),
    "ks, rounded": Null(
        lambda rng: stats.ks(np.round(rng.random(500) * 8) / 8, uniform, error=1 / 16)
    ),
    "normal_mean": Null(lambda rng: stats.normal_mean(rng.standard_normal(20)), True),
    "normal_scale": Null(lambda rng: stats.normal_scale(rng.standard_normal(5)), True),
    "normal_variance": Null(lambda rng: stats.normal_variance(3 + rng.standard_normal(5)), True),
    "chi2": Null(lambda rng: stats.chi2(rng.chisquare(1.5, 6), 1.5), True),
    "binomial": Null(lambda rng: stats.binomial(int(rng.binomial(50, 0.3)), 50, 0.3)),
    "hotelling": Null(
        lambda rng: stats.hotelling(rng.standard_normal((9, 2)) @ ROOT.T + 1, [1.0, 1.0]), True
    ),
    "each": Null(lambda rng: estimates(rng).each, runs=500),
    "estimates": Null(lambda rng: estimates(rng)[1:], True, 1000),
    "lognormal_pair": Null(lambda rng: stats.lognormal_pair(lognormals(rng, 1.0, 12), 1.0), True),
    "hoeffding": Null(lambda rng: stats.hoeffding(bernoulli(0.5)(rng), 0.5)),
    "chernoff": Null(lambda rng: stats.chernoff(bernoulli(0.05)(rng), 0.05)),
    "bernstein": Null(lambda rng: stats.bernstein(bernoulli(0.05)(rng), 0.05, 0.0475)),
    "empirical_bernstein": Null(lambda rng: stats.empirical_bernstein(bernoulli(0.05)(rng), 0.05)),
    "betting": Null(lambda rng: stats.betting(bernoulli(0.05)(rng), 0.05, level=0.05)),
    "betting, uniform": Null(lambda rng: stats.betting(rng.random(60), 0.5, level=0.05)),
    "catoni": Null(lambda rng: stats.catoni(lognormals(rng, 1.5, 60), 1.0, 4.25, level=0.05)),
    "dkwm": Null(lambda rng: stats.dkwm(rng.random(50), uniform)),
    "dkwm_two_sample": Null(lambda rng: stats.dkwm_two_sample(rng.random(50), rng.random(20))),
    "dkwm_mean": Null(lambda rng: stats.dkwm_mean(bernoulli(0.05)(rng), 0.05)),
    "suite_p": Null(lambda rng: stats.suite_p(rng.random(40))),
    "holm": Null(lambda rng: float(np.min(stats.holm(np.repeat(rng.random(4), 5))))),
}


def too_many(seed, null):
    """P-values of super-uniformity at three levels, and of uniformity where p is exact."""
    rng = np.random.default_rng(seed)
    p = np.array([null.draw(rng) for _ in range(null.runs)]).reshape(null.runs, -1)
    assert np.all((p >= 0) & (p <= 1))
    out = []
    for column in p.T:
        for a in (0.05, 0.01, 0.001):
            count = np.sum(column <= a)
            out.append(float(scipy.stats.binom.sf(count - 1, null.runs, a)))
        if null.exact:
            out.append(float(scipy.stats.kstest(column, "uniform").pvalue))
    return out


# Levels, powers and the sequential test below share the error rate.
DECISIONS = 200


@pytest.mark.long
@pytest.mark.parametrize(("seed", "name"), list(enumerate(NULLS)))
def test_p_values_are_sound(seed, name):
    assert min(too_many(seed, NULLS[name])) > LEVEL / DECISIONS


def one_tail(z):
    x = float(np.sum(z * z))
    return float(min(scipy.stats.chi2.cdf(x, len(z)), scipy.stats.chi2.sf(x, len(z))))


def taken_for_the_law(rng):
    y = np.sort(rng.random(20))
    return stats.dkwm(rng.random(50), lambda x: np.searchsorted(y, x) / 20)


def foresight(x, m):
    """Betting on what is about to come."""
    return float(1 / max(1, np.exp(np.max(np.cumsum(np.log1p(0.5 * abs(x - m)))))))


DEFECTS = {
    "two-sided without the factor 2": Null(lambda rng: one_tail(rng.standard_normal(5)), True),
    "ks without the rounding": Null(
        lambda rng: stats.ks(np.round(rng.random(500) * 8) / 8, uniform)
    ),
    "one-sided constant of dkwm": Null(
        lambda rng: min(1.0, stats.dkwm(rng.random(50), uniform) / 2)
    ),
    "a second sample taken for the law": Null(lambda rng: taken_for_the_law(rng)),
    "chi2 of n about the mean": Null(
        lambda rng: stats.normal_scale((lambda z: z - z.mean())(rng.standard_normal(5))), True
    ),
    "normal law for student": Null(
        lambda rng: stats.normal_mean((lambda z: z / z.std(ddof=1))(rng.standard_normal(5))), True
    ),
    "a mean that shifted": Null(lambda rng: stats.normal_mean(rng.normal(0.1, 1, 100)), True),
    "ddof 0 for 1": Null(lambda rng: estimates(rng, ddof=0).trace, True, 300),
    "ddof 0 for 1, pooled": Null(lambda rng: estimates(rng, ddof=0).pooled, True, 300),
    "one lognormal for the mean of two": Null(
        lambda rng: stats.lognormal_pair(rng.lognormal(-0.5, 1.0, 60), 1.0), runs=300
    ),
    "hoeffding, range halved": Null(
        lambda rng: min(1.0, 2 * (stats.hoeffding(bernoulli(0.5)(rng), 0.5) / 2) ** 4)
    ),
    "bernstein with no variance": Null(
        lambda rng: stats.bernstein(bernoulli(0.05)(rng), 0.05, 0.0)
    ),
    "betting with foresight": Null(lambda rng: foresight(bernoulli(0.5)(rng), 0.5)),
    "catoni with a cap too low": Null(
        lambda rng: stats.catoni(lognormals(rng, 1.0, 200), 1.0, 0.05, level=0.05)
    ),
    "smallest p unadjusted": Null(lambda rng: float(np.min(rng.random(40)))),
}


@pytest.mark.long("one lognormal for the mean of two", "ks without the rounding", "ddof 0 for 1, pooled", "ddof 0 for 1")
@pytest.mark.parametrize(("seed", "name"), list(enumerate(DEFECTS, 100)))
def test_planted_defects_are_unsound(seed, name):
    assert min(too_many(seed, DEFECTS[name])) < LEVEL / DECISIONS


@pytest.mark.parametrize("count", [5, 8])
def test_estimates_know_their_defects(count):
    """The median for the mean has the right centre and the wrong spread."""
    x = np.random.default_rng(5).standard_normal((8000, count, 1))
    p = stats.gaussian_estimates(
        np.median(x, axis=1), cov_of(x), count=count, mean=[0.0], cov=[[1.0]]
    )
    assert p.dispersion < LEVEL < p.location
    p = stats.gaussian_estimates(x.mean(1), cov_of(x, 0), count=count, mean=[0.0], cov=[[1.0]])
    assert p.trace < LEVEL < min(p.location, p.dispersion)


# --- power --------------------------------------------------------------------------------------


class Power(NamedTuple):
    """A test, its parameters for the design, its sample size, and a p-value a distance away."""

    test: Callable[..., float]
    n: int
    draw: Callable[[Rng, float], float]
    parameters: dict[str, Any] = {}  # noqa: RUF012


def ramp(rng, delta):
    return rng.random(100) + delta


def coin(mean):
    return lambda rng, delta: bernoulli(mean + delta, 200)(rng)


def heavy(rng, delta):
    return rng.standard_t(3, 200) + delta


def on_the_mean(rng, delta):
    x = rng.standard_normal((12, 2)) + np.array([delta, 0.0])
    return stats.hotelling(x @ ROOT.T, [0.0, 0.0])


POWERS = [
    Power(stats.ks, 100, lambda rng, d: stats.ks(ramp(rng, d), uniform)),
    Power(
        stats.ks,
        500,
        lambda rng, d: stats.ks(np.round(8 * rng.random(500)) / 8 + d, uniform, error=1 / 16),
        {"error": 1 / 16},
    ),
    Power(stats.dkwm, 100, lambda rng, d: stats.dkwm(ramp(rng, d), uniform)),
    Power(
        stats.dkwm_two_sample,
        100,
        lambda rng, d: stats.dkwm_two_sample(ramp(rng, d), rng.random(150)),
        {"reference": 150},
    ),
    Power(stats.normal_mean, 9, lambda rng, d: stats.normal_mean(rng.normal(d, 1, 9))),
    Power(stats.normal_scale, 9, lambda rng, d: stats.normal_scale(rng.normal(0, math.exp(d), 9))),
    Power(
        stats.normal_variance,
        9,
        lambda rng, d: stats.normal_variance(rng.normal(7, math.exp(d), 9)),
    ),
    Power(
        stats.chi2,
        6,
        lambda rng, d: stats.chi2(math.exp(d) * rng.chisquare(1.5, 6), 1.5),
        {"df": 1.5},
    ),
    Power(
        stats.binomial,
        80,
        lambda rng, d: stats.binomial(int(rng.binomial(80, 0.4 + d)), 80, 0.4),
        {"p": 0.4},
    ),
    Power(stats.hotelling, 12, on_the_mean, {"dimension": 2}),
    Power(stats.hoeffding, 200, lambda rng, d: stats.hoeffding(coin(0.4)(rng, d), 0.4)),
    Power(stats.dkwm_mean, 200, lambda rng, d: stats.dkwm_mean(coin(0.4)(rng, d), 0.4)),
    Power(
        stats.chernoff, 200, lambda rng, d: stats.chernoff(coin(0.2)(rng, d), 0.2), {"mean": 0.2}
    ),
    Power(
        stats.bernstein,
        200,
        lambda rng, d: stats.bernstein(coin(0.4)(rng, d), 0.4, 0.25),
        {"variance": 0.25},
    ),
    Power(
        stats.empirical_bernstein,
        200,
        lambda rng, d: stats.empirical_bernstein(coin(0.4)(rng, d), 0.4),
        {"variance": 0.25},
    ),
    Power(
        stats.catoni,
        200,
        lambda rng, d: stats.catoni(heavy(rng, d), 0.0, 3.0, level=0.05),
        {"variance": 3.0, "level": 0.05},
    ),
    Power(
        stats.lognormal_pair, 60, lambda rng, d: stats.ks(ramp(rng, d)[:60], uniform, error=1e-12)
    ),
]
IDS = [f"{power.test.__name__}-{power.n}" for power in POWERS]


def missed(seed, power, delta, runs=RUNS):
    rng = np.random.default_rng(seed)
    return sum(power.draw(rng, delta) > 0.05 for _ in range(runs))


@pytest.mark.long
@pytest.mark.parametrize(("seed", "power"), list(enumerate(POWERS, 200)), ids=IDS)
def test_what_is_said_to_be_detected_is(seed, power):
    delta = stats.min_discrepancy(power.test, power.n, alpha=0.05, beta=0.1, **power.parameters)
    for sign in (1, -1):
        if sign < 0 and power.test in (stats.chernoff, stats.empirical_bernstein):
            continue  # no law on [0, 1] is that far below
        misses = missed(seed, power, sign * delta)
        assert scipy.stats.binom.sf(misses - 1, RUNS, 0.1) > LEVEL / DECISIONS
    rest = missed(seed, power, delta / 8)
    assert scipy.stats.binom.sf(rest - 1, RUNS, 0.1) < LEVEL / DECISIONS  # the defect


@pytest.mark.parametrize("power", POWERS, ids=IDS)
@pytest.mark.parametrize(("alpha", "beta"), [(0.05, 0.1), (1e-6, 1e-6)])
def test_sample_sizes_are_the_least(power, alpha, beta):
    rates = {"alpha": alpha, "beta": beta}

    def detected(n):
        return stats.min_discrepancy(power.test, n, **rates, **power.parameters)

    target = 0.2 + 2 * power.parameters.get("error", 0)
    if power.test is stats.dkwm_two_sample:
        target += detected(2**50)
    n = stats.min_samples(power.test, target, **rates, **power.parameters)
    assert detected(n) <= target
    if power.test is not stats.binomial:
        assert n == 1 or detected(n - 1) > target
        assert stats.min_samples(power.test, detected(n), **rates, **power.parameters) == n


def test_powers_by_exact_laws():
    """P(p > alpha) at the discrepancy, from the law of the statistic: at most beta, and close."""
    a, b, n = 1e-3, 1e-2, 20
    rates = {"alpha": a, "beta": b}
    shift = stats.min_discrepancy(stats.normal_mean, n, **rates) * math.sqrt(n)
    limit = scipy.stats.norm.isf(a / 2)
    assert 0.999 * b < scipy.stats.ncx2.cdf(limit**2, 1, shift**2) <= b * (1 + 1e-9)
    for test, df, half, more in (
        (stats.normal_scale, n, 2, {}),
        (stats.normal_variance, n - 1, 2, {}),
        (stats.chi2, 3 * n, 1, {"df": 3}),
    ):
        law = scipy.stats.chi2(df)
        s = math.exp(half * stats.min_discrepancy(test, n, **rates, **more))
        low, high = law.ppf(a / 2), law.isf(a / 2)
        miss = [law.cdf(high / c) - law.cdf(low / c) for c in (s, 1 / s)]
        assert 0.99 * b < max(miss) <= b * (1 + 1e-9)
    delta = stats.min_discrepancy(stats.binomial, 200, p=0.3, **rates)
    accepted = [k for k in range(201) if stats.binomial(k, 200, 0.3) > a]
    miss = [scipy.stats.binom.pmf(accepted, 200, 0.3 + c).sum() for c in (delta, -delta)]
    assert 0.99 * b < max(miss) <= b * (1 + 1e-9)
    delta = stats.min_discrepancy(stats.hotelling, n, dimension=3, **rates)
    limit = scipy.stats.f.isf(a, 3, n - 3)
    terms = np.arange(1000)  # noncentral F as a mixture over a Poisson number
    weights = scipy.stats.poisson.pmf(terms, n * delta**2 / 2)
    y = 3 * limit / (3 * limit + n - 3)
    assert weights @ betainc(1.5 + terms, (n - 3) / 2, y) == pytest.approx(b, rel=1e-6)


def test_discrepancies_out_of_reach():
    infinite = [
        (stats.normal_variance, 1, {}),
        (stats.empirical_bernstein, 1, {"variance": 0.1}),
        (stats.hotelling, 3, {"dimension": 3}),
        (stats.hotelling, 4, {"dimension": 3}),
        (stats.binomial, 5, {"p": 0.5}),
        (stats.chernoff, 5, {"mean": 0.5}),
        (stats.catoni, 10, {"variance": 1.0}),
    ]
    for test, n, more in infinite:
        assert stats.min_discrepancy(test, n, **more) == math.inf
    with pytest.raises(ValueError, match=r"needs more than 2\^50 samples"):
        stats.min_samples(stats.dkwm_two_sample, 0.1, reference=10)
    with pytest.raises(ValueError, match=r"`test` must be one of .*, got `betting`"):
        stats.min_discrepancy(stats.betting, 10)
    with pytest.raises(ValueError, match="got `int`"):
        stats.min_discrepancy(3, 10)
    with pytest.raises(TypeError, match="variance"):
        stats.min_discrepancy(stats.catoni, 10)


# --- error control ------------------------------------------------------------------------------


@given(st.lists(st.floats(0, 1) | st.sampled_from([0.0, 0.01, 0.5, 1.0]), min_size=1, max_size=6))
def test_holm_by_closed_testing(p):
    """A null is rejected if Bonferroni rejects every set of nulls that holds it."""
    sets = [c for r in range(len(p)) for c in itertools.combinations(range(len(p)), r + 1)]
    expected = [
        max(min(1.0, len(c) * min(p[j] for j in c)) for c in sets if i in c) for i in range(len(p))
    ]
    np.testing.assert_allclose(stats.holm(p), expected, rtol=1e-12)
    assert stats.suite_p(p) == pytest.approx(np.min(stats.holm(p)))


@pytest.mark.long("301")
@pytest.mark.parametrize(("planted", "seed"), [(1.0, 300), (0.5, 301)])
def test_level_of_the_sequential_test(planted, seed):
    """Uniform p-values reject with probability alpha exactly; halved ones do more often."""
    runs, alpha = 5000, 0.05
    root = np.random.SeedSequence(seed)
    rejected = sum(
        stats.gandy_scott(lambda n, rng: planted * rng.random(), alpha=alpha, rng=root).rejected
        for _ in range(runs)
    )
    low, high = stats.clopper_pearson(rejected, runs, 1 - LEVEL / DECISIONS)
    assert (low <= alpha <= high) == (planted == 1)


def test_the_sequential_test_is_logged():
    scripted = iter([0.2, 0.3, 0.001])
    beta = 0.05 / 3
    gamma = beta ** (1 / 3)
    result = stats.gandy_scott(lambda n, rng: next(scripted), alpha=0.05, steps=3, size=10, rng=1)
    assert beta < 0.2 <= gamma + beta
    assert result.rejected
    assert result.p_values == (0.2, 0.3, 0.001)
    assert result.sizes == (10, 40, 40)
    assert len({seed.spawn_key for seed in result.seeds}) == 3

    def pvalue(n, rng):
        return 0.5 * stats.normal_mean(rng.standard_normal(n))

    result = stats.gandy_scott(pvalue, alpha=0.5, rng=np.random.default_rng(3))
    for p, n, seed in zip(result.p_values, result.sizes, result.seeds, strict=True):
        assert pvalue(n, np.random.default_rng(seed)) == p
        again = np.random.SeedSequence(seed.entropy, spawn_key=seed.spawn_key)
        assert pvalue(n, np.random.default_rng(again)) == p
    assert not stats.gandy_scott(lambda n, rng: 1.0).rejected
    last = stats.gandy_scott(lambda n, rng: 0.3, alpha=0.01, steps=1, rng=0)
    assert not last.rejected
    assert len(last.p_values) == 1
    with pytest.raises(ValueError, match="`pvalue` must return a number in"):
        stats.gandy_scott(lambda n, rng: math.nan)


def test_clopper_pearson():
    for k, n in ((0, 10), (3, 10), (10, 10), (7, 2000)):
        low, high = stats.clopper_pearson(k, n, 0.95)
        tails = scipy.stats.binom.sf(k - 1, n, low), scipy.stats.binom.cdf(k, n, high)
        assert tails[0] == (pytest.approx(0.025) if k > 0 else 1)
        assert tails[1] == (pytest.approx(0.025) if k < n else 1)


# --- arguments ----------------------------------------------------------------------------------

ONE_SAMPLE = {
    "ks": lambda x: stats.ks(x, uniform),
    "normal_mean": stats.normal_mean,
    "normal_scale": stats.normal_scale,
    "normal_variance": stats.normal_variance,
    "chi2": lambda x: stats.chi2(x, 2),
    "lognormal_pair": lambda x: stats.lognormal_pair(x, 1.0),
    "hoeffding": lambda x: stats.hoeffding(x, 0.5),
    "chernoff": lambda x: stats.chernoff(x, 0.5),
    "bernstein": lambda x: stats.bernstein(x, 0.5, 0.1),
    "empirical_bernstein": lambda x: stats.empirical_bernstein(x, 0.5),
    "betting": lambda x: stats.betting(x, 0.5),
    "catoni": lambda x: stats.catoni(x, 0.5, 0.1),
    "dkwm": lambda x: stats.dkwm(x, uniform),
    "dkwm_two_sample": lambda x: stats.dkwm_two_sample(x, [0.5] * 100_000),
    "dkwm_mean": lambda x: stats.dkwm_mean(x, 0.5),
}
ANY_SIZE = ("normal_mean", "normal_scale", "normal_variance", "catoni", "ks", "dkwm")


@pytest.mark.parametrize("name", ONE_SAMPLE)
def test_bad_samples(name):
    for x in ([0.1, math.nan, 0.2], [0.1, math.inf], [], [[0.1, 0.2]], 0.3):
        with pytest.raises(ValueError, match=r"`[xz]` must"):
            ONE_SAMPLE[name](x)
    for x in (["a", "b"], [1j, 0j], None):
        with pytest.raises(TypeError, match=r"`[xz]` must"):
            ONE_SAMPLE[name](x)


@pytest.mark.parametrize("name", ONE_SAMPLE)
@pytest.mark.parametrize("value", [0.0, 0.9, 1.0])
def test_a_million_equal_values_are_rejected(name, value):
    n = 50_000 if name == "lognormal_pair" else 1_000_000  # a quadrature for each
    p = ONE_SAMPLE[name](np.full(n, value))
    assert 0 <= p < 1e-100 or (name, value) in {("normal_mean", 0.0), ("normal_scale", 1.0)}


@given(st.lists(st.floats(0, 1), min_size=2, max_size=30), st.sampled_from(sorted(ONE_SAMPLE)))
@settings(deadline=None)
def test_p_values_are_probabilities(x, name):
    p = ONE_SAMPLE[name](x)
    assert isinstance(p, float)
    assert 0 <= p <= 1


@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=2, max_size=30),
    st.sampled_from(ANY_SIZE),
)
@settings(deadline=None)
def test_extremes_are_probabilities(x, name):
    assert 0 <= ONE_SAMPLE[name](x) <= 1


@pytest.mark.parametrize("name", ["normal_mean", "normal_scale", "normal_variance", "catoni"])
def test_huge_samples_have_tiny_p(name):
    assert ONE_SAMPLE[name]([1.7e308] * 30 + [-1e308] * 10) < 1e-6


@given(st.integers(1, 4), st.integers(0, 3), st.floats(-1e300, 1e300))
@settings(deadline=None, max_examples=40)
def test_hotelling_extremes(d, more, shift):
    x = draws(d, d + 1 + more, d)
    assert 0 <= stats.hotelling(x + shift, np.zeros(d)) <= 1
    x[:, 0] = shift
    expected = stats.hotelling(x, np.zeros(d))
    assert expected == 0


def test_means_at_the_ends():
    ones = np.ones(30)
    for m, p in ((1.0, 1.0), (0.0, 0.0)):
        assert stats.chernoff(ones, m) == p
        assert stats.dkwm_mean(ones, m) == pytest.approx(p, abs=1e-20)
        assert stats.bernstein(ones, m, 0.0) == pytest.approx(p, abs=1e-18)
        assert stats.empirical_bernstein(ones, m) == pytest.approx(p, abs=1e-4)
    constant = np.full(1000, 0.1)
    for test in (stats.hoeffding, stats.chernoff, stats.dkwm_mean, stats.empirical_bernstein):
        assert test(constant, 0.1) == pytest.approx(1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"means": np.zeros(2)}, "`means` must have shape"),
        ({"covs": np.ones((3, 2, 3))}, r"`covs` must have shape \(3, 2, 2\)"),
        ({"covs": np.triu(np.ones((3, 2, 2)))}, "`covs` must be symmetric"),
        ({"mean": np.zeros(3)}, r"`mean` must have shape \(2,\)"),
        ({"cov": -np.eye(2)}, "`cov` must be positive definite"),
        ({"count": 2}, "`count` must be greater than d = 2, got 2"),
        ({"ddof": 2}, r"`ddof` must lie in \[0, 1\]"),
        ({"means": np.full((3, 2), np.nan)}, "`means` must be finite"),
    ],
)
def test_messages_of_estimates(change, message):
    arguments = {
        "means": np.zeros((3, 2)),
        "covs": np.stack([np.eye(2)] * 3),
        "count": 5,
        "mean": np.zeros(2),
        "cov": np.eye(2),
    }
    for test in (stats.bartlett, stats.gaussian_estimates):
        with pytest.raises(ValueError, match=message):
            test(**(arguments | change))


def test_public_functions_document_themselves():
    for name in stats.__all__:
        value = getattr(stats, name)
        if not isinstance(value, type):
            for section in ("Parameters", "Returns", "Raises", "References", "Examples", ">>>"):
                assert section in (value.__doc__ or ""), f"{name} has no {section}"
