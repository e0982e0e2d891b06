"""Pullbacks of linear attention through feature maps of any kind."""

from functools import partial

import numpy as np
import pytest

from refattn import features
from refattn.gradients import vjp
from tests.gradients.cases import D_V, LINEAR, LONG, D, M, agrees, linear, problem, pulled

ELU = linear(features.elu_features)


def square(x):
    return x * x


square.vjp = lambda x: (square(x), lambda cotangent: 2 * x * cotangent)


def scaled(x):
    """Features with a scale."""
    return features.Features(x * x, np.log(1 + np.sum(x * x, -1)))


def scaled_vjp(x):
    def pull(d_values, d_log):
        own = 2 * x * d_values
        if d_log is None:
            return own
        return own + (d_log / (1 + np.sum(x * x, -1)))[..., None] * 2 * x

    return scaled(x), pull


scaled.vjp = scaled_vjp


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("feature_map", [square, scaled])
def test_maps_with_a_pullback_of_their_own(feature_map, causal):
    rng = np.random.default_rng(0)
    arrays, options = problem(linear(feature_map), rng, heads=None)
    agrees(LINEAR, LINEAR, arrays, options | {"causal": causal}, rng)


def mixed(x):
    return np.exp(x + 0.3 * np.roll(x, 1, axis=-3))


def mixed_vjp(x):
    def back(c):
        c = c * mixed(x)
        return c + 0.3 * np.roll(c, -1, axis=-3)

    return mixed(x), back


mixed.vjp = mixed_vjp


def test_maps_that_mix_heads_see_what_is_masked():
    rng = np.random.default_rng(0)
    arrays, options = problem(linear(mixed), rng, heads=(3, 3))
    options["mask"] = rng.random((3, 1, M)) < 0.7
    agrees(LINEAR, LINEAR, arrays, options, rng)


@pytest.mark.parametrize("causal", [False, True])
def test_memory_of_maps_may_be_written_to(causal):
    """What the pullback needs it keeps for itself."""
    rng, held = np.random.default_rng(0), np.empty((300, D))

    def into_memory(x):
        return np.exp(x, out=held[: x.shape[-2]])

    into_memory.vjp = lambda x: (into_memory(x), lambda c: np.exp(x) * c)
    arrays, _ = problem(ELU, rng, 300, 300, heads=None)
    d_out = rng.standard_normal((300, D_V))
    out, pullback = vjp(LINEAR, **arrays, feature_map=into_memory, causal=causal)
    found = pulled(LINEAR, arrays, d_out, feature_map=into_memory, causal=causal)
    out += 1.0
    for x, y in zip(pullback(d_out)[:3], found.values(), strict=True):
        np.testing.assert_array_equal(x, y)
    exponential = partial(features.positive_features, omega=np.eye(D), square_norm=0.0)
    want = pulled(LINEAR, arrays, d_out, feature_map=exponential, causal=causal)
    for x, y in found.items():
        np.testing.assert_allclose(y, want[x], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("dtype", "low"), [("float32", -95.0), ("float64", -720.0)])
def test_features_that_nearly_underflow(dtype, low):
    """Of elu below where its exponential is normal: finite, and right to what it holds."""
    arrays, _ = problem(ELU, np.random.default_rng(0), 4, 5, heads=None, dtype=dtype)
    arrays["q"][1], arrays["k"][2] = low, low
    d_out = np.ones((4, D_V), dtype)
    found = pulled(LINEAR, arrays, d_out)
    want = pulled(LINEAR, {x: y.astype(LONG) for x, y in arrays.items()}, d_out.astype(LONG))
    for x, y in found.items():
        np.testing.assert_allclose(y, want[x].astype(float), rtol=1e-2, atol=1e-5)
