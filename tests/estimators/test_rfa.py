"""Random-feature attention and importance sampling: digits at extremes, and identities."""

import numpy as np
import pytest
from hypothesis import given

import refattn
from refattn import diagnostics, importance_sampled_attention, random_feature_attention, sampling
from tests import reference
from tests.problems import draw, exponent, seeds, sizes
from tests.problems import rfa_tolerance as tolerance
from tests.reference import CONTRACT


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.long("256", "4096")
@pytest.mark.parametrize("d", [160, 256, 1024, 4096])
def test_products_of_nearly_equal_terms(d, causal, dtype, record_accuracy):
    # Nearly equal terms in every product: all rounding errors of a long sum have one sign.
    q = k = np.full((3, d), 0.2 * d**0.25 * (64 / d) ** 0.5, dtype)
    omega = np.full((2, d), 0.9, dtype)
    v = draw(np.random.default_rng(0), 3, 2, dtype=dtype)
    got = random_feature_attention(q, k, v, omega=omega, causal=causal)
    formula = reference.formulas().random_feature_attention
    want = formula(q, k, v, omega=omega, causal=causal)
    units = reference.error(got, want, np.abs(v).max(), exponent(q, k, omega))
    record_accuracy(f"RFA, d = {d}, equal terms", dtype, units)
    assert units <= CONTRACT


@pytest.mark.parametrize("coupling", sampling.COUPLINGS)
def test_drawing_is_evaluating_at_drawn_frequencies(coupling):
    rng = np.random.default_rng(0)
    q, k, v = draw(rng, 4, 3), draw(rng, 5, 3), draw(rng, 5, 2)
    got = random_feature_attention(q, k, v, num_features=7, coupling=coupling, rng=42)
    omega = sampling.draw(7, 3, coupling=coupling, rng=42).omega
    np.testing.assert_array_equal(got, random_feature_attention(q, k, v, omega=omega))
    assert np.any(got != random_feature_attention(q, k, v, num_features=7, rng=43))


def test_frequencies_of_batches_and_heads():
    rng = np.random.default_rng(0)
    q, k, v = draw(rng, 2, 6, 40, 3), draw(rng, 2, 2, 40, 3), draw(rng, 2, 2, 40, 2)
    omega, mask = draw(rng, 2, 1, 5, 3), rng.random((6, 40, 40)) < 0.7
    for options in ({}, {"causal": True}, {"mask": mask}):
        got = random_feature_attention(q, k, v, omega=omega, **options)
        want = [
            random_feature_attention(q[i], k[i], v[i], omega=omega[i], **options) for i in (0, 1)
        ]
        np.testing.assert_allclose(got, want, atol=1e-13)


@pytest.mark.parametrize(
    "function", [random_feature_attention, refattn.naive.random_feature_attention]
)
def test_overflowing_keys_are_not_hidden(function):
    x, v = np.full((4, 4), 1e30, np.float32), np.ones((4, 1), np.float32)
    x[1:] = 0
    for causal in (False, True):
        with np.errstate(all="ignore"):
            out = function(x, x, v, omega=np.ones((2, 4)), causal=causal)
        assert np.all(np.isnan(out))


@pytest.mark.sweep(3)
@pytest.mark.long("jax", "dask")
def test_same_seed_same_frequencies_everywhere(backend, dtype):
    rng = np.random.default_rng(0)
    q, k, v = (draw(rng, 5, 3, dtype=dtype) for _ in range(3))
    for name, record in refattn.registry.ESTIMATORS.items():
        fitted = name.endswith(("-adapted", "-saderf", "-cexp"))
        if fitted or not (record.approximates and record.has("random")):
            continue  # those fitted read values: see test_adapt.py
        options = {**record.sized(4), "rng": 7}
        want = record.fn(*(x.astype(np.float64) for x in (q, k, v)), **options)
        got = backend.call(record.fn, q, k, v, **options)
        omega = sampling.draw(4, 3, rng=7).omega
        np.testing.assert_allclose(got, want, rtol=0, atol=4 * tolerance(q, k, omega), err_msg=name)


# --- as self-normalised importance sampling -------------------------------------------------------


@given(sizes, sizes, sizes, sizes, seeds)
def test_rfa_is_self_normalised_importance_sampling(n, m, d, count, seed):
    rng = np.random.default_rng(seed)
    q, k, v, omega = draw(rng, n, d), draw(rng, m, d), draw(rng, m, 2), draw(rng, count, d)
    root = d**-0.25
    # p_i(omega) / N(omega; 0, I) from the mixture density itself.
    log_pi = (q * root) @ (k * root).T
    log_pi -= np.logaddexp.reduce(log_pi, -1)[:, None]
    means = root * (q[:, None] + k[None])  # (n, m, d)
    log_ratio = omega @ np.swapaxes(means, -1, -2) - np.sum(means**2, -1)[:, None] / 2
    log_ratio = np.logaddexp.reduce(log_pi[:, None, :] + log_ratio, -1)  # (n, S)
    f = [refattn.randomized_attention(q, k, v, omega=np.broadcast_to(w, (n, 1, d))) for w in omega]
    f = np.stack(f, axis=1)  # (n, S, d_v)
    weight = np.exp(log_ratio - log_ratio.max(-1, keepdims=True))
    snis = np.sum(weight[..., None] * f, 1) / weight.sum(-1)[:, None]
    atol = tolerance(q, k, omega) * np.abs(v).max()
    rfa = random_feature_attention(q, k, v, omega=omega)
    np.testing.assert_allclose(rfa, snis, rtol=0, atol=atol)
    is_ = np.mean(np.exp(log_ratio)[..., None] * f, 1)
    got = importance_sampled_attention(q, k, v, omega=omega)
    np.testing.assert_allclose(got, is_, rtol=100 * atol, atol=100 * atol)
    log_w = diagnostics.log_weights(q, k, omega=omega)
    np.testing.assert_allclose(
        log_w,
        log_ratio - np.logaddexp.reduce(log_ratio, -1)[:, None],
        rtol=0,
        atol=10 * atol + 1e-12,
    )


def test_large_values_do_not_overflow():
    one, v = np.ones((3, 1)), np.full((3, 1), 1.5e308)
    for out in (
        refattn.linear_randomized_attention(one, one, v, num_proposals=2, rng=0),
        random_feature_attention(one, one, v, num_features=3, rng=0),
    ):
        np.testing.assert_allclose(out, v, rtol=1e-13)
    zero = np.zeros((1, 1))
    got = importance_sampled_attention(
        zero, zero, np.array([[1e-200]]), omega=zero, log_weight=np.array([750.0])
    )
    np.testing.assert_allclose(np.log(got), 750 - 200 * np.log(10), rtol=1e-13)
    got = importance_sampled_attention(zero, zero, zero, omega=zero, log_weight=np.array([750.0]))
    np.testing.assert_array_equal(got, zero)
