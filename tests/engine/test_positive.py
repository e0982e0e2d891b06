"""Sums of positive features: exponents far apart, products that underflow, pairs evaluated anew."""

import numpy as np
import pytest

from refattn import naive, random_feature_attention
from refattn.engine import positive
from tests import reference
from tests.problems import draw, exponent
from tests.reference import CONTRACT


@pytest.mark.parametrize("share", [0.5, 0.7, 0.9, 1.0, 1.1, 1.5, 8.0])
@pytest.mark.parametrize("weighted", [False, True])
def test_where_products_of_features_underflow(share, weighted, dtype, record_accuracy):
    # The sample at which a query's feature is largest is one at which those of the keys are least:
    # e^-reach of the largest terms is left in a pair, near the underflow threshold and beyond.
    rng = np.random.default_rng(int(10 * share))
    n = m = 9
    reach = -share * float(np.log(np.finfo(dtype).smallest_normal))
    omega = np.array([[4.0, 0.1], [-4.0, 0.2], [0.0, 1.0]], dtype)
    sign = np.where(np.arange(m) % 3 == 1, 1, -1)[:, None]  # some pairs agree, some are opposite
    size = reach / 8
    q = (np.array([[size, 0.3]]) * sign + 0.01 * draw(rng, n, 2)).astype(dtype)
    k = (np.array([[-size, 0.2]]) * np.roll(sign, 1) + 0.01 * draw(rng, m, 2)).astype(dtype)
    v, log_weight = draw(rng, m, 2, dtype=dtype), np.array([0.0, -1.0, -400.0 * weighted], dtype)
    options = {"omega": omega, "log_weight": log_weight, "scale": 1.0, "causal": True}
    got = random_feature_attention(q, k, v, **options)
    want = reference.formulas().random_feature_attention(q, k, v, **options)
    largest = exponent(q, k, omega, 1.0) + float(np.abs(log_weight).max())
    worst = reference.error(got, want, np.abs(v).max(), largest)
    record_accuracy(f"rfa, causal, opposite peaks, {share} of the range", dtype, worst)
    assert worst <= CONTRACT


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0, 1e3, 1e4])
@pytest.mark.parametrize("spread", [0.0, 25.0, 60.0])
def test_digits_of_near_and_far(dtype, scale, spread):
    """Exponents on both sides of what is near, and values of e^+-spread in columns of their own."""
    rng = np.random.default_rng(0)
    n, d, num_features = 130, 3, 5
    norms = np.exp(rng.uniform(-3, 1, (2, n, 1)))
    q, k = (norms * rng.standard_normal((2, n, d))).astype(dtype)
    size = np.exp(spread * np.array([-1.0, 0.0, 1.0])).astype(dtype)
    v = rng.standard_normal((n, 3)).astype(dtype) * size
    v[::7] = 0
    omega = rng.standard_normal((num_features, d)).astype(dtype)
    got = random_feature_attention(q, k, v, omega=omega, scale=scale, causal=True)
    wide = [x.astype(np.longdouble) for x in (q, k, v)]
    want = naive.random_feature_attention(*wide, omega=omega, scale=scale, causal=True)
    root = scale**0.5
    norm = root * float(np.max(np.linalg.norm(omega, axis=-1)))
    key = float(np.max(np.linalg.norm(k, axis=-1)))
    exponent = norm * float(np.max(np.linalg.norm(q, axis=-1))) + norm * key + scale * key**2 / 2
    unit = float(np.finfo(dtype).eps) * (1 + exponent)
    error = np.max(np.abs(got - want), axis=0) / np.max(np.abs(v), axis=0)
    assert np.all(error <= reference.CONTRACT * unit)


def test_pairs_that_lose_digits_are_evaluated_anew(monkeypatch):
    """Features of a query and of a key that are large in different places, against 50 digits."""
    anew = []
    log_sum_exp = positive.log_sum_exp
    monkeypatch.setattr(
        positive, "log_sum_exp", lambda x, xp: anew.append(len(x)) or log_sum_exp(x, xp)
    )
    for reach in (30.0, 300.0, 360.0, 700.0):
        q, k = np.array([[reach], [-reach], [1.0]]), np.array([[-reach], [reach], [reach]])
        v, omega = np.array([[1.0], [-2.0], [3.0]]), np.array([[1.0], [-1.0], [0.5]])
        got = random_feature_attention(q, k, v, omega=omega, scale=1.0, causal=True)
        want = reference.formulas().random_feature_attention(q, k, v, omega=omega, causal=True)
        assert reference.error(got, want, 3, 3 * reach + reach**2 / 2) <= reference.CONTRACT
    assert anew


def test_longdouble_near_and_far():
    """Values that only longdouble holds are neither near nor lost."""
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 130, 2)).astype(np.longdouble) * np.array([1, 60])[:, None, None]
    for power in ("1e1200", "1e4900", "1e-4900"):
        v = rng.standard_normal((130, 2)).astype(np.longdouble) * np.longdouble(power)
        omega = np.array([[300.0, 0.0], [0.0, -1.0]])
        got = random_feature_attention(q, k, v, omega=omega, scale=1.0, causal=True)
        want = naive.random_feature_attention(q, k, v, omega=omega, scale=1.0, causal=True)
        size, exponent = np.max(np.abs(v)), 300 * (np.max(np.abs(q)) + np.max(np.abs(k))) * 2
        bound = reference.CONTRACT * np.finfo(np.longdouble).eps * (1 + exponent)
        assert np.max(np.abs(got - want)) / size <= bound


def test_exponents_that_are_near_on_one_side_only():
    """Products of two features, each of which is a number, underflow."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((60, 1)) + shift for shift in (-30.0, -20.0, 0.0))
    options = {"omega": np.array([[13.0], [12.5]]), "scale": 1.0, "causal": True}
    got = random_feature_attention(q, k, v, **options)
    want = naive.random_feature_attention(*(x.astype(np.longdouble) for x in (q, k, v)), **options)
    bound = reference.CONTRACT * np.finfo(float).eps * (1 + 13 * 60 + 300)
    assert np.max(np.abs(got - want)) / np.max(np.abs(v)) <= bound


def test_a_pair_of_two_halves_of_the_range_keeps_its_value():
    """Features of e^-340 each, and a value of 1e-60: the product of the three is a number."""
    n = 60
    q, k = np.zeros((n, 1)), np.full((n, 1), 680.0**0.5)
    v = np.tile([1e-60, 1.0], (n, 1))
    log_weight = np.full(2, -340.0)
    options = {"omega": np.zeros((2, 1)), "log_weight": log_weight, "scale": 1.0}
    got = random_feature_attention(q, k, v, causal=True, **options)
    np.testing.assert_allclose(got, v, rtol=1e-12)


def test_products_of_terms_that_are_subnormal_are_evaluated_anew():
    """Each sum over features is of one term that may have lost digits, and of others near it."""
    q = np.tile([0.0, -706.5, -709.0, -709.0, -709.0], (6, 1))
    k = np.array([[-800.0, 0, 0, 0, 0], [-800.0, 0, -300, -300, -300]] * 3)
    v = np.random.default_rng(0).standard_normal((6, 1))
    options = {"omega": np.eye(5), "square_norms": (0.0, 0.0), "scale": 1.0}
    got = random_feature_attention(q, k, v, causal=True, **options)
    scores = np.logaddexp.reduce(q[:, None] + k, axis=-1)
    weights = np.where(np.tri(6, dtype=bool), np.exp(scores - scores.max()), 0.0)
    np.testing.assert_allclose(got, weights @ v / weights.sum(-1, keepdims=True), rtol=1e-9)
