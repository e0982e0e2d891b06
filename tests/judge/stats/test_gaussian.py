"""Tests of means and covariances of Gaussian rows: formulas and laws."""

import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import ndtr

from refattn.judge import stats
from tests.judge.stats.cases import LEVEL, chi2_p, cov_of, draws


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


@given(st.integers(1, 4), st.integers(0, 3), st.floats(-1e300, 1e300))
@settings(deadline=None, max_examples=40)
def test_hotelling_extremes(d, more, shift):
    x = draws(d, d + 1 + more, d)
    assert 0 <= stats.hotelling(x + shift, np.zeros(d)) <= 1
    x[:, 0] = shift
    expected = stats.hotelling(x, np.zeros(d))
    assert expected == 0


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
