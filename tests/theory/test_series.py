"""The series of dependent frequencies, against the functions that they are series of."""

import math

import numpy as np
import pytest

from refattn.theory import series
from tests.theory.formulas import fixed_norm, mp

DIMENSIONS = (2, 3, 8, 65)


def close(got, want, rtol=1e-12, atol=0.0):
    np.testing.assert_allclose(got, np.array(want, dtype=float), rtol=rtol, atol=atol)


@pytest.mark.parametrize("d", DIMENSIONS)
@pytest.mark.parametrize("cosines", [[0.0], [-1.0], [1.0, -1.0]])
def test_missing_angles_and_norms(d, cosines):
    """E (1 + c sin)^k by beta functions, c the cosine over d - 1 for a simplex."""
    order = 9
    cosines = [c / max(d - 1, 1) for c in cosines]
    sine = [mp.beta(mp.mpf(d + j) / 2, 0.5) / mp.beta(mp.mpf(d) / 2, 0.5) for j in range(order)]
    want = []
    for k in range(order):
        rho = mp.rf(d, k) / mp.rf(mp.mpf(d) / 2, k) / 2**k
        power = [sum(mp.binomial(k, j) * c**j * sine[j] for j in range(k + 1)) for c in cosines]
        want.append(1 - rho * sum(power) / len(cosines))
    close(series.missing_angles(d, cosines, order), want, atol=1e-15)
    norms = [1 - mp.mpf(d) ** k / 2**k / mp.rf(mp.mpf(d) / 2, k) for k in range(order)]
    close(series.missing_norms(d, order), norms, atol=1e-16)


@pytest.mark.parametrize("d", DIMENSIONS)
def test_means_of_missing_terms(d):
    square = np.array([0.0, 0.3, 5.0])
    want = [
        1 - mp.exp(-u) * mp.hyp1f1(d, mp.mpf(d) / 2, u / 2) if u else 0
        for u in map(mp.mpf, square.tolist())
    ]
    got = series.missing(d, square, lambda order: series.missing_angles(d, [0.0], order))
    # E rho_K = e^-u 1F1(d; d/2; u/2) e^0 with rho_k = (d)_k / (2^k (d/2)_k).
    close(got, want, atol=1e-16)


@pytest.mark.parametrize("d", DIMENSIONS)
@pytest.mark.parametrize("cosine", [0.0, -0.9])
def test_cosine_covariance(d, cosine):
    norm = mp.beta(mp.mpf(d) / 2, 0.5)
    t, want = (0.3, 0.999, 1.001, 7.0), []
    with mp.workdps(20):
        for x in map(mp.mpf, t):

            def term(phi, x=x):
                z = -x * (1 + cosine * mp.sin(phi)) / 2
                return mp.sin(phi) ** (d - 1) * mp.hyp1f1(d, mp.mpf(d) / 2, z)

            want.append(2 * mp.quad(term, [0, mp.pi / 2]) / norm - mp.exp(-x))
    close(series.cosine_covariance(d, np.array(t), [cosine]), want, rtol=1e-10, atol=1e-16)


@pytest.mark.parametrize("d", DIMENSIONS)
def test_fixed_norms(d):
    t = np.array([0.0, 1e-3, 0.9, 1.99, 2.01, 5.0, 20.0])
    one, two, four = (
        [fixed_norm(d, -mp.mpf(x) * d * c / 4) for x in t.tolist()] for c in (1, 2, 4)
    )
    close(series.mean_cosine(d, t), one, atol=1e-14)
    centred = [m - mp.exp(-mp.mpf(x) / 2) for m, x in zip(one, t.tolist(), strict=True)]
    close(series.mean_cosine(d, t, centred=True), centred, atol=1e-14)
    variance = [(1 + b) / 2 - a**2 for a, b in zip(one, four, strict=True)]
    close(series.fixed_norm_variance(d, t), variance)
    block = [v + (d - 1) * (b - a**2) for v, a, b in zip(variance, one, two, strict=True)]
    close(series.fixed_norm_block(d, t), block, rtol=1e-9 * d, atol=1e-14 * d)


@pytest.mark.parametrize("d", DIMENSIONS)
def test_series_of_fixed_norms(d):
    s = np.array([0.01, 0.7, 30.0])
    for i, x in enumerate(map(mp.mpf, s.tolist())):
        one, two, four = (fixed_norm(d, d * x * c / 4) for c in (1, 2, 4))
        wanted = {
            series.unit: four,
            series.second_less_square: four - one**2,
            series.even_less_square: (1 + four) / 2 - one**2,
            series.block: four - one**2 + (d - 1) * (two - one**2),
            series.even_block: (1 + four) / 2 - one**2 + (d - 1) * (two - one**2),
        }
        for factors, want in wanted.items():
            got = series.log_series(d, s, factors)[i]
            assert got == pytest.approx(float(mp.log(want)), rel=1e-12, abs=1e-12), factors.__name__
    assert series.log_series(d, np.zeros(1), series.second_less_square)[0] == -math.inf
