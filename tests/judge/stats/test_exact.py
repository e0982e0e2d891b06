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


@pytest.mark.parametrize(
    ("t", "s", "want"),
    [
        (0.875, 0.3125, 0.313809202891394494),
        (2.0, 0.3125, 0.999301348776795384275297074147),
        (1.25, 1.0, 0.755918274202315963053308722337),
        (0.125, 3.0, 0.708777273051254336524778303512),
        (0.001, 3.0, 0.0659758723960607792560464995213),
        (40.0, 10.0, 0.999999946179264670994345185948),
    ],
)
def test_lognormal_sum_cdf_has_30_digits(t, s, want):
    """By quadrature of the plain convolution, as above."""
    assert float(stats.lognormal_sum_cdf(t, s)) == pytest.approx(want, rel=0, abs=1e-14)


@pytest.mark.long("40000")
@pytest.mark.parametrize("points", [1000, 40_000])
@pytest.mark.parametrize("s", [0.01, 0.3, 1.0, 3.0, 10.0])
def test_lognormal_sum_cdf_rises_from_0_to_1(s, points):
    grid = np.concatenate([[-1.0, 0.0], np.exp(np.linspace(-700, 700, points))])
    values = stats.lognormal_sum_cdf(grid, s)
    assert values[0] == values[1] == 0
    assert values[-1] == pytest.approx(1, abs=1e-12)
    assert np.all(np.diff(values) >= -1e-12)
    two = stats.lognormal_sum_cdf(grid.reshape(2, -1), s)
    np.testing.assert_array_equal(two, values.reshape(2, -1))
    x = grid[points // 2 :: 500]
    expected = stats.ks(x, lambda t: stats.lognormal_sum_cdf(t, s), error=1e-12)
    assert stats.lognormal_pair(x, s) == expected
