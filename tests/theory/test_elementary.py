"""Functions of numbers that keep their digits, against 120 digits."""

import math

import numpy as np
import pytest

from refattn.theory import elementary
from tests.theory.formulas import EPS, mp

SIZES = [0.0, 1e-300, 1e-12, 0.3, 0.999, 1.0, 1.001, 2.5, 40.0, 800.0, 1e300]


@pytest.mark.parametrize(
    ("got", "want"),
    [
        (elementary.log_expm1, lambda x: mp.log(mp.expm1(x)) if x < 1e3 else mp.mpf(x)),
        (elementary.log_cosh, lambda x: mp.log(mp.cosh(x)) if x < 1e3 else x - mp.log(2)),
    ],
)
def test_logarithms_are_right_to_rounding(got, want):
    found = got(np.array(SIZES))
    assert found[0] == (-math.inf if got is elementary.log_expm1 else 0)
    np.testing.assert_allclose(found[1:], [float(want(x)) for x in SIZES[1:]], rtol=8 * EPS)
    if got is elementary.log_cosh:
        np.testing.assert_array_equal(got(-np.array(SIZES)), found)


def test_log_mean_exp():
    a, b = np.array([3.0, 1e-9, -800.0, 5.0]), np.array([1.0, -1e-9, -801.0, -900.0])
    want = [mp.log((mp.exp(x) + mp.exp(y)) / 2) for x, y in zip(a, b, strict=True)]
    got = elementary.log_mean_exp(a, b)
    np.testing.assert_allclose(got, [float(x) for x in want], rtol=8 * EPS)
    np.testing.assert_array_equal(elementary.log_mean_exp(b, a), got)


def test_quotients_of_zeros_are_zero():
    a, b = np.array([0.0, 0.0, 3.0, 1.0]), np.array([0.0, 5.0, 2.0, np.inf])
    np.testing.assert_array_equal(elementary.quotient(a, b), [0.0, 0.0, 1.5, 0.0])
    a, b = np.array([-np.inf, -np.inf, 2.0, 0.0]), np.array([-np.inf, 1.0, 1.0, 0.0])
    np.testing.assert_array_equal(elementary.quotient_of_exp(a, b), [0.0, 0.0, math.e, 1.0])
    np.testing.assert_array_equal(elementary.quiet_log(np.array([0.0, 1.0])), [-np.inf, 0.0])
    np.testing.assert_array_equal(
        elementary.inner_product(np.arange(6.0).reshape(2, 3), np.ones(3)), [3, 12]
    )
