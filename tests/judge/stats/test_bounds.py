"""P-values from inequalities: formulas against slow ones."""

import math

import numpy as np
import pytest
import scipy.stats
from scipy.optimize import brentq

from refattn.judge import stats
from tests.judge.stats.cases import draws
from tests.reference import mp

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


@pytest.mark.parametrize(("x", "m"), BOUNDED)
def test_bounds_on_bounded_means(x, m):
    n, t = len(x), abs(x.mean() - m)
    assert stats.hoeffding(x, m) == pytest.approx(min(1, 2 * math.exp(-2 * n * t * t)))
    v = 0.07
    log = brentq(lambda a: a / 3 + math.sqrt(a * a / 9 + 2 * n * v * a) - n * t, 0, 1e4)
    assert stats.bernstein(x, m, v) == pytest.approx(min(1, 2 * math.exp(-log)))
    log = brentq(lambda a: math.sqrt(2 * x.var(ddof=1) * a / n) + 7 * a / (3 * (n - 1)) - t, 0, 1e4)
    assert stats.empirical_bernstein(x, m) == pytest.approx(min(1, 4 * math.exp(-log)))
    for level in (1e-6, 0.05):
        expected = log_betting(x, m, level)
        assert stats.betting(x, m, level=level) == pytest.approx(expected, rel=1e-10)
    # Units of the interval do not matter.
    for test, more in (
        (stats.hoeffding, ()),
        (stats.bernstein, (v,)),
        (stats.empirical_bernstein, ()),
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


def test_means_at_the_ends():
    ones = np.ones(30)
    for m, p in ((1.0, 1.0), (0.0, 0.0)):
        assert stats.bernstein(ones, m, 0.0) == pytest.approx(p, abs=1e-18)
        assert stats.empirical_bernstein(ones, m) == pytest.approx(p, abs=1e-4)
    constant = np.full(1000, 0.1)
    for test in (stats.hoeffding, stats.empirical_bernstein):
        assert test(constant, 0.1) == pytest.approx(1)
