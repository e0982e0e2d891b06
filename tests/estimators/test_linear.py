"""Linear attention with feature maps of any kind, past blocks and at extreme sizes."""

from functools import partial

import numpy as np
import pytest

from refattn import features, linear_attention, naive, random_feature_attention
from tests.problems import draw

MAPS = {
    "elu": features.elu_features,
    "elu 0.1": lambda x: features.elu_features(x, 0.1),
    "relu": lambda x: features.relu_features(x) + 0.1,
    "taylor": lambda x: features.taylor_features(x, degree=2),
    "trigonometric": lambda x: features.trigonometric_features(
        0.1 * x, np.linspace(-1, 1, 6).reshape(2, 3)
    ),
}


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", [None, (2, 1, 310), (300, 310)])
def test_past_blocks_it_is_the_dense_form(name, mask, causal):
    rng, (n, m) = np.random.default_rng(0), (300, 310)
    q, k, v = draw(rng, 2, n, 3), draw(rng, 2, m, 3), draw(rng, 2, m, 4)
    options = {"feature_map": MAPS[name], "causal": causal}
    if mask is not None:
        options["mask"] = rng.random(mask) < 0.7
    got, want = (f(q, k, v, **options) for f in (linear_attention, naive.linear_attention))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-10)


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


@pytest.mark.long("jax", "dask")
def test_backends_agree_on_features_of_either_sign(backend, dtype):
    q, k, v = (draw(np.random.default_rng(i), 2, 6, 3, dtype=dtype) for i in range(3))
    fn = partial(linear_attention, feature_map=MAPS["trigonometric"])
    for options in ({}, {"causal": True}, {"mask": np.arange(6) != 2}):
        got, want = backend.call(fn, q, k, v, **options), fn(q, k, v, **options)
        np.testing.assert_allclose(got, want, atol=1e-4 if dtype == np.float32 else 1e-12)
