"""Pullbacks of linear attention through feature maps of any kind."""

from functools import partial

import numpy as np
import pytest

from refattn import features
from refattn import linear_attention as fn
from refattn.gradients import vjp
from tests.cases import agrees, differentiable, pulled


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
    _, arrays, options, rng = differentiable("linear", n=11, m=13, causal=causal)
    agrees(fn, fn, arrays, options | {"feature_map": feature_map}, rng)


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
    arrays = {x: rng.standard_normal((3, n, 3)) for x, n in zip("qkv", (11, 13, 13), strict=True)}
    mask = rng.random((3, 1, 13)) < 0.7
    agrees(fn, fn, arrays, {"feature_map": mixed, "mask": mask}, rng)


@pytest.mark.parametrize("causal", [False, True])
def test_memory_of_maps_may_be_written_to(causal):
    """What the pullback needs it keeps for itself."""
    held = np.empty((300, 3))

    def into_memory(x):
        return np.exp(x, out=held[: x.shape[-2]])

    into_memory.vjp = lambda x: (into_memory(x), lambda c: np.exp(x) * c)
    _, arrays, options, rng = differentiable("linear", n=300, m=300, causal=causal)
    d_out = rng.standard_normal(arrays["v"].shape)
    out, pullback = vjp(fn, **arrays, feature_map=into_memory, **options)
    found = pulled(fn, arrays, d_out, feature_map=into_memory, **options)
    out += 1.0
    for x, y in zip(pullback(d_out)[:3], found.values(), strict=True):
        np.testing.assert_array_equal(x, y)
    exponential = partial(features.positive_features, omega=np.eye(3), square_norm=0.0)
    want = pulled(fn, arrays, d_out, feature_map=exponential, **options)
    for x, y in found.items():
        np.testing.assert_allclose(y, want[x], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("dtype", "low"), [("float32", -95.0), ("float64", -720.0)])
def test_features_that_nearly_underflow(dtype, low):
    """Of elu below where its exponential is normal: finite, and right to what it holds."""
    _, arrays, _, _ = differentiable("linear", n=4, m=5, dtype=dtype)
    arrays["q"][1], arrays["k"][2] = low, low
    d_out = np.ones((4, arrays["v"].shape[-1]), dtype)
    found = pulled(fn, arrays, d_out)
    wide = {x: y.astype(np.longdouble) for x, y in arrays.items()}
    want = pulled(fn, wide, d_out.astype(np.longdouble))
    for x, y in found.items():
        np.testing.assert_allclose(y, want[x].astype(float), rtol=1e-2, atol=1e-5)


def test_the_kink_of_relu_has_the_slope_from_the_left():
    """0: a query and a key at it have what those just below have."""
    q, k, v = np.array([[1.0, 0.0]]), np.array([[1.0, 0.0], [0.0, 2.0]]), np.array([[0.0], [1.0]])
    below = (np.where(x == 0, -1e-3, x) for x in (q, k))
    here, left = (
        pulled(fn, {"q": q, "k": k, "v": v}, np.ones((1, 1)), feature_map=features.relu_features)
        for q, k in ((q, k), below)
    )
    for x in "qk":
        np.testing.assert_array_equal(here[x], left[x])
