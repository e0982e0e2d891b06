"""Feature maps and linear attention."""

import math
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refattn import features, kernels, linear_attention, naive, random_feature_attention
from tests import reference
from tests.conftest import Host
from tests.reference import CONTRACT, mp
from tests.test_attention import draw, seeds, sizes


def gram(phi_x, phi_y):
    """Kernel matrix of two sets of features."""
    scale = phi_x.log_scale[..., :, None] + phi_y.log_scale[..., None, :]
    return np.exp(scale) * (phi_x.values @ np.swapaxes(phi_y.values, -1, -2))


@pytest.mark.parametrize("name", ["positive", "hyperbolic", "trigonometric"])
@given(sizes, sizes, sizes, seeds)
def test_products_of_features_are_the_kernel_estimate(name, n, d, count, seed):
    rng = np.random.default_rng(seed)
    x, y, omega = draw(rng, n, d), draw(rng, n + 1, d), draw(rng, count, d)
    phi = partial(getattr(features, f"{name}_features"), omega=omega)
    want = kernels.estimate(x[:, None], y, omega, features=name)
    size = kernels.estimate(x[:, None], y, omega, features="hyperbolic") + np.exp(
        (np.sum(x**2, -1)[:, None] + np.sum(y**2, -1)) / 2
    )
    np.testing.assert_array_less(np.abs(gram(phi(x), phi(y)) - want), 1e-12 * size)


def test_general_form_contains_the_others():
    # Theorem 1 of reference 000 with f = exp, (exp, exp(-u)) and (cos, sin).
    rng = np.random.default_rng(0)
    x, y, omega = draw(rng, 4, 3), draw(rng, 5, 3), draw(rng, 6, 3)

    def half(sign):
        return lambda x: sign * np.sum(x * x, -1) / 2

    cases = {
        "positive": ([np.exp], half(-1)),
        "hyperbolic": (
            [lambda u: np.exp(u) / math.sqrt(2), lambda u: np.exp(-u) / math.sqrt(2)],
            half(-1),
        ),
        "trigonometric": ([np.cos, np.sin], half(1)),
    }
    for name, (functions, log_h) in cases.items():
        a, b = (features.random_features(z, omega, functions, log_h=log_h) for z in (x, y))
        want = kernels.estimate(x[:, None], y, omega, features=name)
        np.testing.assert_allclose(gram(a, b), want, rtol=1e-12, atol=1e-13)
    # The spurious 2 pi of reference 001 estimates exp(a/2 - 2 pi^2 |x - y|^2) instead.
    omega = draw(rng, 200_000, 3)
    x = 0.1 * x
    twist = [lambda u: np.cos(2 * np.pi * u), lambda u: np.sin(2 * np.pi * u)]
    phi = features.random_features(x, omega, twist, log_h=half(1))
    squares = np.sum(x**2, -1)
    gaps = squares[:, None] + squares - 2 * x @ x.T
    wrong = np.exp((squares[:, None] + squares) / 2 - 2 * np.pi**2 * gaps)
    bound = 6 * np.exp(np.max(squares)) / math.sqrt(len(omega))  # six sigma of a mean of cosines
    np.testing.assert_allclose(gram(phi, phi), wrong, rtol=0, atol=bound)
    assert np.max(np.abs(wrong - np.exp(x @ x.T))) > 10 * bound


@pytest.mark.parametrize("degree", [0, 1, 2, 5])
@pytest.mark.parametrize("size", [1e-3, 1.0, 30.0])
def test_taylor_features_against_mpmath(degree, size, dtype, record_accuracy):
    rng = np.random.default_rng(degree)
    x, y = draw(rng, 3, 4, dtype=dtype, size=size), draw(rng, 3, 4, dtype=dtype, size=size)
    a, b = (features.taylor_features(z, degree=degree) for z in (x, y))
    assert a.values.shape[-1] == math.comb(4 + degree, degree)
    assert np.all(np.linalg.norm(a.values, axis=-1) <= 1.001 * 2**degree * math.sqrt(degree + 1))
    product = a.values @ b.values.T
    ex, ey = reference.exact(x), reference.exact(y)
    for i in range(3):
        for j in range(3):
            z, absolute = (ex[i] * ey[j]).sum(), (abs(ex[i]) * abs(ey[j])).sum()
            want = sum(z**p / mp.factorial(p) for p in range(degree + 1))
            bound = sum(absolute**p / mp.factorial(p) for p in range(degree + 1))
            scale = mp.exp(mp.mpf(float(a.log_scale[i])) + mp.mpf(float(b.log_scale[j])))
            got = mp.mpf(float(product[i, j])) * scale
            exponent = 2 * degree + abs(float(a.log_scale[i])) + abs(float(b.log_scale[j]))
            units = float(abs(got - want) / bound / float(np.finfo(dtype).eps) / (1 + exponent))
            record_accuracy(f"taylor_features, degree {degree}", dtype, units)
            assert units <= CONTRACT


@given(sizes, st.integers(0, 5), seeds)
def test_polynomial_features(d, degree, seed):
    rng = np.random.default_rng(seed)
    x, y = draw(rng, 3, d), draw(rng, 4, d)
    got = (
        features.polynomial_features(x, degree=degree)
        @ features.polynomial_features(y, degree=degree).T
    )
    want = kernels.polynomial_kernel(x[:, None], y, degree=degree)
    atol = 1e-12 * float(np.max(np.abs(x) @ np.abs(y).T)) ** degree
    np.testing.assert_allclose(got, want, rtol=0, atol=atol)
    # The features of reference 001, d = degree = 2, in another order.
    if d == degree == 2:
        want = np.stack([x[:, 0] ** 2, math.sqrt(2) * x[:, 0] * x[:, 1], x[:, 1] ** 2], -1)
        np.testing.assert_allclose(features.polynomial_features(x, degree=2), want)


def test_elu_features(dtype):
    x = np.array([-1e4, -100.0, -20.0, -8.0, -1e-8, 0.0, 1e-8, 2.0, 1e30], dtype)
    eps = float(np.finfo(dtype).eps)
    for alpha in (1.0, 0.1):
        got = features.elu_features(x, alpha)
        want = [
            float(z + 1 if z > 0 else alpha * mp.exp(z) + (1 - mp.mpf(alpha)))
            for z in reference.exact(x)
        ]
        tiny = float(np.finfo(dtype).smallest_normal)
        np.testing.assert_allclose(got, want, rtol=4 * eps, atol=tiny)
        assert got.dtype == dtype
    # What the elu of reference 004 gives: nan where 0 * inf, and 0 where cancellation eats e^x.
    with np.errstate(all="ignore"):
        naive = (x > 0) * x + (1 - (x > 0)) * (np.exp(x) - 1) + 1
    assert np.isnan(naive[-1])
    assert naive[1] == 0 < features.elu_features(x)[1] or dtype == np.float32


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
@pytest.mark.parametrize(("n", "m"), [(5, 7), (7, 5), (150, 150), (300, 310), (3, 0)])
def test_linear_attention_against_the_dense_form(name, n, m):
    rng = np.random.default_rng(n)
    q, k, v = draw(rng, 2, n, 3), draw(rng, 2, m, 3), draw(rng, 2, m, 4)
    key_mask, full = rng.random((2, 1, m)) < 0.7, rng.random((n, m)) < 0.7
    for kwargs in (
        {},
        {"causal": True},
        {"mask": key_mask},
        {"mask": key_mask, "causal": True},
        {"mask": full},
        {"mask": full, "causal": True},
    ):
        got, want = (
            f(q, k, v, feature_map=MAPS[name], **kwargs)
            for f in (linear_attention, naive.linear_attention)
        )
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-10)


def test_scales_do_not_overflow():
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


@given(st.integers(2, 300), st.integers(1, 299), seeds)
def test_editing_the_future_changes_nothing(n, t, seed):
    t = min(t, n - 1)
    rng = np.random.default_rng(seed)
    q, k, v = draw(rng, n, 3), draw(rng, n, 3), draw(rng, n, 2)
    before = linear_attention(q, k, v, causal=True)
    for x in (q, k, v):
        x[t:] = rng.choice([1e3, -1e3, np.nan, np.inf, 0.0], x[t:].shape)
    with np.errstate(all="ignore"):
        after = linear_attention(q, k, v, causal=True)
    np.testing.assert_array_equal(before[:t], after[:t])


@given(sizes, sizes, seeds)
def test_masking_equals_deleting(n, m, seed):
    rng = np.random.default_rng(seed)
    q, k, v = draw(rng, n, 3), draw(rng, m, 3), draw(rng, m, 2)
    kept = rng.random(m) < 0.6
    want = linear_attention(q, k[kept], v[kept])
    k[~kept], v[~kept] = np.nan, np.nan
    for mask in (kept, np.broadcast_to(kept, (n, m))):
        np.testing.assert_allclose(linear_attention(q, k, v, mask=mask), want, atol=1e-13)


def test_grouped_heads():
    rng = np.random.default_rng(0)
    q, k, v = draw(rng, 6, 9, 3), draw(rng, 2, 9, 3), draw(rng, 2, 9, 2)
    wide = linear_attention(q, np.repeat(k, 3, 0), np.repeat(v, 3, 0), causal=True)
    np.testing.assert_allclose(linear_attention(q, k, v, causal=True), wide, atol=1e-14)


@pytest.mark.long("jax", "dask")
@pytest.mark.parametrize("name", ["elu", "taylor", "trigonometric"])
def test_backends_agree(backend, dtype, name):
    rng = np.random.default_rng(0)
    q, k, v = (draw(rng, 2, 6, 3, dtype=dtype) for _ in range(3))
    atol = 1e-4 if dtype == np.float32 else 1e-12
    for kwargs in ({}, {"causal": True}, {"mask": np.arange(6) != 2}):
        want = linear_attention(q, k, v, feature_map=MAPS[name], **kwargs)
        got = backend.call(linear_attention, q, k, v, feature_map=MAPS[name], **kwargs)
        np.testing.assert_allclose(got, want, atol=atol)


@pytest.mark.long("jax", "dask")
def test_maps_on_backends(backend, dtype):
    rng = np.random.default_rng(0)
    x, omega = draw(rng, 2, 5, 3, dtype=dtype), draw(rng, 4, 3)
    rtol = 1e-4 if dtype == np.float32 else 1e-12
    for fn in (
        features.positive_features,
        features.hyperbolic_features,
        features.trigonometric_features,
    ):
        for wrap in (Host, lambda z: z):
            got, want = backend.call(fn, x, wrap(omega)), fn(x, omega)
            for a, b in zip(got, want, strict=True):
                np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol)
    got, want = (
        f(features.taylor_features, x, degree=3)
        for f in (backend.call, lambda g, *a, **b: g(*a, **b))
    )
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol)
    for fn in (features.elu_features, features.relu_features):
        np.testing.assert_allclose(backend.call(fn, x), fn(x), rtol=rtol)
    got = backend.call(features.polynomial_features, x, degree=3)
    np.testing.assert_allclose(got, features.polynomial_features(x, degree=3), rtol=rtol, atol=rtol)


X = np.ones((4, 3))


def test_high_degrees():
    # Coefficients exceed every float, and so may products of a few factors; the features do not.
    x = np.array([[0.6, 0.8]])
    norm = np.sum(features.polynomial_features(x, degree=1100) ** 2)
    assert abs(norm - np.sum(x * x) ** 1100) <= 16 * 1100 * np.finfo(float).eps
    with np.errstate(all="ignore"):  # other features do
        got = features.polynomial_features(np.array([[1e-3, 1e3]]), degree=220)[0, 110]
    want = float(mp.sqrt(mp.binomial(220, 110)))
    assert abs(got - want) <= 16 * 220 * np.finfo(float).eps * want


def as_mp(x):
    return mp.mpf(float(x)) + mp.mpf(float(x - np.longdouble(float(x))))


@pytest.mark.parametrize("name", ["elu_features", "relu_features"])
def test_elementwise_maps_of_one_number(name):
    x = np.array(2.5, np.float32)
    got = getattr(features, name)(x)
    assert isinstance(got, np.ndarray)
    assert got.shape == ()
    assert got.dtype == np.float32
    assert got == getattr(features, name)(x[None])[0]


@pytest.mark.parametrize("alpha", [0.3, np.longdouble(3) / 10, Fraction(3, 10)])
def test_elu_in_longdouble(alpha, record_accuracy):
    eps, x = float(np.finfo(np.longdouble).eps), np.array([-40.0, -0.5, -3.0], np.longdouble) / 3
    exact = mp.mpf(3) / 10 if isinstance(alpha, Fraction) else as_mp(alpha)
    for t, got in zip(x, features.elu_features(x, alpha), strict=True):
        want = exact * mp.exp(as_mp(t)) + 1 - exact
        units = float(abs(as_mp(got) - want) / (eps * (1 + abs(float(t)))))
        record_accuracy("elu_features", "longdouble", units)
        assert units <= CONTRACT


@pytest.mark.parametrize("degree", [1, 2, 5, 9])
def test_taylor_and_polynomial_features_in_longdouble(degree, record_accuracy):
    eps, rng = float(np.finfo(np.longdouble).eps), np.random.default_rng(degree)
    x = rng.standard_normal((4, 3)).astype(np.longdouble) / 3
    taylor, log_scale = features.taylor_features(x, degree=degree)
    polynomial = features.polynomial_features(x, degree=degree)
    for i in range(len(x)):
        square = mp.fsum(as_mp(t) ** 2 for t in x[i])
        series = mp.fsum(square**p / mp.factorial(p) for p in range(degree + 1))
        for name, got, want in (
            ("taylor_features", np.exp(2 * log_scale[i]) * np.sum(taylor[i] ** 2), series),
            ("polynomial_features", np.sum(polynomial[i] ** 2), square**degree),
        ):
            exponent = 2 * degree + 2 * abs(float(log_scale[i]))
            units = float(abs(as_mp(got) - want) / (eps * (1 + exponent) * want))
            record_accuracy(f"{name}, degree {degree}", "longdouble", units)
            assert units <= CONTRACT


def test_small_and_large_features_do_not_underflow_or_overflow(dtype):
    v = np.arange(3, dtype=dtype)[:, None]
    for size in (-60.0, -400.0 if dtype == np.float64 else -80.0, 1e30):
        x = np.full((3, 2), size, dtype)
        np.testing.assert_allclose(linear_attention(x, x, v), np.ones((3, 1)), rtol=1e-6)


def test_nan_stays_nan():
    x = np.array([np.nan, 1.0])
    for fn in (features.relu_features, features.elu_features):
        np.testing.assert_array_equal(np.isnan(fn(x)), [True, False])
