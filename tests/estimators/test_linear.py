"""Linear attention past blocks, and at extreme sizes."""

from functools import partial

import numpy as np
import pytest

from refattn import features, linear_attention, random_feature_attention, relu_feature_attention
from tests.cases import CASES, assert_close, prepared
from tests.problems import draw


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", [x for x in CASES if x.startswith("linear")])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", ["none", "heads", "rows"])
def test_past_blocks_it_is_the_dense_form(name, mask, causal):
    case, p, options = prepared(name, "keys", 300, 310, mask, causal)
    got, want = (f(*p.arrays, **options, **p.options) for f in (case.fn, case.formula))
    assert_close(got, want, case.atol(p, options))


def test_relu_features_at_all_angles_have_the_kernel_of_arc_cosines():
    r"""E max(w . x, 0) max(w . y, 0) = |x| |y| (sin t + (pi - t) cos t) / (2 pi), Cho and Saul.

    In two dimensions by the trapezoidal rule over the angle of w, with E |w|^2 = 2: to h^2.
    """
    rng, angle = np.random.default_rng(0), np.linspace(0, 2 * np.pi, 4096, endpoint=False)
    q, k, omega = draw(rng, 5, 2), draw(rng, 7, 2), np.stack([np.cos(angle), np.sin(angle)], -1)
    norms = [np.linalg.norm(x, axis=-1) for x in (q, k)]
    t = np.arccos(np.clip(q @ k.T / np.multiply.outer(*norms), -1, 1))
    kernel = np.multiply.outer(*norms) * (np.sin(t) + (np.pi - t) * np.cos(t))
    got = relu_feature_attention(q, k, np.eye(7), omega=2**0.5 * omega, kernel_epsilon=0.0)
    np.testing.assert_allclose(got, kernel / kernel.sum(-1, keepdims=True), atol=1e-5)


def test_scales_of_features_do_not_overflow():
    # |k|^2/2 = 5e5 in the exponent: only the largest keys count, and nothing overflows.
    rng = np.random.default_rng(0)
    q, k, v = draw(rng, 5, 3), draw(rng, 9, 3, size=1e3), draw(rng, 9, 2)
    omega = draw(rng, 4, 3)
    phi = partial(features.trigonometric_features, omega=omega)
    for kwargs in ({}, {"causal": True}, {"mask": np.ones((5, 9), bool)}):
        out = linear_attention(q, k, v, feature_map=phi, **kwargs)
        assert np.all(np.isfinite(out))
    largest = np.argmax(np.sum(k**2, -1))
    np.testing.assert_allclose(linear_attention(q, k, v, feature_map=phi), v[[largest] * 5])
    got = random_feature_attention(q, k, v, omega=omega, features="trigonometric", scale=1.0)
    np.testing.assert_allclose(got, v[[largest] * 5])


def test_small_and_large_features_do_not_underflow_or_overflow(dtype):
    v = np.arange(3, dtype=dtype)[:, None]
    for size in (-60.0, -400.0 if dtype == np.float64 else -80.0, 1e30):
        x = np.full((3, 2), size, dtype)
        np.testing.assert_allclose(linear_attention(x, x, v), np.ones((3, 1)), rtol=1e-6)


def test_infinities_of_negative_weights_change_their_sign(backend, dtype):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((6, 2)).astype(dtype) for _ in range(3))
    v[2] = np.inf, -np.inf
    given = {"causal": True, "mask": np.ones((1, 6), bool)}
    got = backend.call(partial(linear_attention, feature_map=lambda x: x), q, k, v, **given)
    weights = np.tril(q @ k.T)
    sides = np.sign(weights[:, 2] / np.sum(weights, axis=-1))[2:, None]
    np.testing.assert_array_equal(got[2:], sides * v[2])
    assert np.all(np.isfinite(got[:2]))
