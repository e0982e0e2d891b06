"""Feature maps and linear attention."""

import math
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refattn import features, kernels
from tests import reference
from tests.conftest import Host
from tests.problems import draw, seeds, sizes
from tests.reference import CONTRACT, mp


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


@pytest.mark.parametrize("degree", [0, 1, 2, 5])
@pytest.mark.parametrize("size", [1e-3, 1.0, 30.0])
def test_taylor_features_against_mpmath(degree, size, dtype, record_accuracy):
    rng = np.random.default_rng(degree)
    x, y = draw(rng, 3, 4, dtype=dtype, size=size), draw(rng, 3, 4, dtype=dtype, size=size)
    a, b = (features.taylor_features(z, degree=degree) for z in (x, y))
    assert a.values.shape[-1] == math.comb(4 + degree, degree)
    assert np.all(np.linalg.norm(a.values, axis=-1) <= 1.001 * 2**degree * math.sqrt(degree + 1))
    got, x, y, *logs = map(reference.exact, (a.values @ b.values.T, x, y, a.log_scale, b.log_scale))
    got *= np.vectorize(mp.exp)(logs[0][:, None] + logs[1])
    want, bound = (
        sum(z**p / mp.factorial(p) for p in range(degree + 1)) for z in (x @ y.T, abs(x) @ abs(y).T)
    )
    exponent = 2 * degree + abs(logs[0])[:, None] + abs(logs[1])
    units = np.max(abs(got - want) / bound / float(np.finfo(dtype).eps) / (1 + exponent))
    record_accuracy(f"taylor_features, degree {degree}", dtype, units)
    assert units <= CONTRACT


@given(sizes, st.integers(0, 5), seeds)
def test_products_of_polynomial_features_are_the_polynomial_kernel(d, degree, seed):
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


def test_elu_features_keep_their_digits(dtype):
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


OMEGA = np.random.default_rng(1).standard_normal((4, 3))


@pytest.mark.long("jax", "dask")
@pytest.mark.parametrize("wrap", [Host, np.asarray])
def test_backends_agree(backend, dtype, wrap):
    x = draw(np.random.default_rng(0), 2, 5, 3, dtype=dtype)
    rtol = 1e-4 if dtype == np.float32 else 1e-12
    for fn, more in (
        (features.positive_features, (OMEGA,)),
        (features.hyperbolic_features, (OMEGA,)),
        (features.trigonometric_features, (OMEGA,)),
        (partial(features.taylor_features, degree=3), ()),
        (partial(features.polynomial_features, degree=3), ()),
        (features.elu_features, ()),
        (features.relu_features, ()),
    ):
        got, want = backend.call(fn, x, *map(wrap, more)), fn(x, *more)
        pairs = zip(got, want, strict=True) if isinstance(want, tuple) else [(got, want)]
        for a, b in pairs:
            np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol)


def test_features_of_high_degrees_stay_finite():
    # Coefficients exceed every float, and so may products of a few factors; the features do not.
    x = np.array([[0.6, 0.8]])
    norm = np.sum(features.polynomial_features(x, degree=1100) ** 2)
    assert abs(norm - np.sum(x * x) ** 1100) <= 16 * 1100 * np.finfo(float).eps
    with np.errstate(all="ignore"):  # other features do
        got = features.polynomial_features(np.array([[1e-3, 1e3]]), degree=220)[0, 110]
    want = float(mp.sqrt(mp.binomial(220, 110)))
    assert abs(got - want) <= 16 * 220 * np.finfo(float).eps * want


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
    number = mp.mpf(3) / 10 if isinstance(alpha, Fraction) else reference.exact([alpha])[0]
    got = reference.exact(features.elu_features(x, alpha))
    for t, value in zip(reference.exact(x), got, strict=True):
        units = float(abs(value - number * mp.exp(t) - 1 + number) / (eps * (1 + abs(t))))
        record_accuracy("elu_features", "longdouble", units)
        assert units <= CONTRACT


@pytest.mark.parametrize("degree", [1, 2, 5, 9])
def test_taylor_and_polynomial_features_in_longdouble(degree, record_accuracy):
    eps, rng = float(np.finfo(np.longdouble).eps), np.random.default_rng(degree)
    x = rng.standard_normal((4, 3)).astype(np.longdouble) / 3
    taylor, log_scale = features.taylor_features(x, degree=degree)
    polynomial = features.polynomial_features(x, degree=degree)
    squares = (reference.exact(x) ** 2).sum(-1)
    for name, got, want in (
        (
            "taylor_features",
            np.exp(2 * log_scale) * np.sum(taylor**2, -1),
            sum(squares**p / mp.factorial(p) for p in range(degree + 1)),
        ),
        ("polynomial_features", np.sum(polynomial**2, -1), squares**degree),
    ):
        exponents = 2 * degree + 2 * np.abs(log_scale.astype(float))
        units = abs(reference.exact(got) - want) / (eps * (1 + exponents) * want)
        record_accuracy(f"{name}, degree {degree}", "longdouble", max(units))
        assert max(units) <= CONTRACT


def test_nan_stays_nan():
    x = np.array([np.nan, 1.0])
    for fn in (features.relu_features, features.elu_features):
        np.testing.assert_array_equal(np.isnan(fn(x)), [True, False])
