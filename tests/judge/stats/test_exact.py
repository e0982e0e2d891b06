"""P-values from exact laws: formulas against slow ones."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import scipy.stats

from refattn.judge import stats
from tests.judge.stats.cases import chi2_p, draws, mp, uniform


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
    assert stats.ks(x, uniform, error=1) == 1


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
