"""How columns of a row depend on each other: the roundings of weights, drawn, by the values."""

import math

import numpy as np
import pytest
from scipy import stats

from refattn.judge.rounding import PROFILES
from refattn.judge.rounding.covariance import bound_covariance, covariance
from refattn.judge.rounding.problems import pose_arrays
from refattn.judge.verification.evidence import log_quadratic
from tests.judge.rounding.rounded import BF16


def posed(**options):
    rng = np.random.default_rng(0)
    q, k, v = (BF16(rng.standard_normal((x, 8))) for x in (6, 40, 40))
    return v, pose_arrays(q, k, v, **options)


@pytest.mark.parametrize("name", ["flash", "upcast", "eager", "math"])
@pytest.mark.parametrize("causal", [False, True])
def test_its_diagonal_is_the_variance_or_more(name, causal):
    """What may depend in any way is taken as many times as there are columns."""
    _, problem = posed(causal=causal)
    roundings = PROFILES[name].roundings("bfloat16")
    rows = problem.analyse((), roundings, slice(0, 6))
    found = bound_covariance(problem.head(()), roundings, slice(0, 6), rows)
    diagonal = np.diagonal(found, axis1=1, axis2=2)
    assert np.all(diagonal >= np.square(rows.worst) * (1 - 1e-9))
    if name in ("flash", "upcast"):
        np.testing.assert_allclose(diagonal, np.square(rows.worst), rtol=1e-3)


@pytest.mark.parametrize("name", ["flash", "upcast"])
def test_errors_of_scores_are_not_of_each_column_alone(name):
    """Beside rounded weights they are a trifle, but sums of products have less, and no more."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.integers(-9, 10, (x, 8)) * 1.0 for x in (6, 40, 40))
    roundings = PROFILES[name]._replace(out=None).roundings("bfloat16")
    problem = pose_arrays(8 * q, k, v)
    rows = problem.analyse((), roundings, slice(0, 6))
    with np.errstate(invalid="ignore"):  # of some rows the bound alone is known
        _, own = covariance(problem.head(()), roundings, slice(0, 6), rows, np.eye(8), False)
    of_sums = np.square(4 * roundings.accumulate.unit * np.max(np.abs(v))) + 1.01e-6 * rows.std**2
    known = np.all(np.isfinite(rows.std), -1)
    assert known.any()
    assert np.all(np.diagonal(own, axis1=1, axis2=2)[known] <= of_sums[known])


def test_it_is_that_of_weights_that_are_rounded():
    """Over the largest weight, at the least favourable digits: errors of p are u p / sqrt(3)."""
    v, problem = posed()
    roundings = PROFILES["flash"]._replace(out=None).roundings("bfloat16")
    rows = problem.analyse((), roundings, slice(0, 6))
    found = bound_covariance(problem.head(()), roundings, slice(0, 6), rows)
    arrays = problem.read(())
    s = 8**-0.5 * arrays["q"] @ arrays["k"].T
    p = np.exp(s - s.max(-1, keepdims=True))
    moved = (p < 1) * p / p.sum(-1, keepdims=True) * 2.0**-8 / math.sqrt(3)
    for row, size in zip(found, moved, strict=True):
        expected = (v * size[:, None] ** 2).T @ v
        np.testing.assert_allclose(row, expected, atol=1e-3 * np.max(expected))


@pytest.mark.parametrize("variances", [np.ones(7), np.array([4.0, 1, 1, 0.5, 0.1])])
@pytest.mark.parametrize("p", [0.1, 1e-6, 1e-30])
def test_a_sum_of_squares_is_bounded_by_more_than_its_probability(variances, p):
    """Exact for equal variances by chi-square; for others the largest alone is less."""
    least, most = float(np.max(variances)), variances.size
    x = least * stats.chi2.isf(p, most if np.ptp(variances) == 0 else 1)
    bound = log_quadratic(float(x), variances)
    assert math.log(p) <= bound <= 0
    if np.ptp(variances) == 0:
        assert bound < math.log(p) / 2 + 1


def test_no_variance_says_nothing():
    assert log_quadratic(3.0, np.zeros(3)) == 0
    assert log_quadratic(3.0, np.array([math.inf])) == 0
