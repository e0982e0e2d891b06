"""Exact kernels and their estimates."""

import numpy as np
import pytest
from scipy import stats

from refattn import kernels
from tests import reference
from tests.conftest import Host
from tests.problems import draw
from tests.reference import CONTRACT, mp


@pytest.mark.parametrize(
    ("function", "exponents"),
    [
        (kernels.softmax_kernel, lambda x, y: (x * y).sum(-1)),
        (kernels.gaussian_kernel, lambda x, y: -((x - y) ** 2).sum(-1) / 2),
    ],
)
def test_kernels_against_mpmath(function, exponents, dtype, record_accuracy):
    """The Gram matrix of two sets of vectors."""
    rng = np.random.default_rng(0)
    x, y = draw(rng, 5, 1, 3, dtype=dtype, size=2.0), draw(rng, 4, 3, dtype=dtype, size=2.0)
    got = reference.exact(function(x, y))
    want = np.vectorize(mp.exp)(exponents(reference.exact(x), reference.exact(y)))
    assert got.shape == (5, 4)
    largest = float(np.max(np.sum(np.abs(x) + np.abs(y), -1)) ** 2) / 2
    units = np.max(abs(got - want) / want / float(np.finfo(dtype).eps)) / (1 + largest)
    record_accuracy(f"kernels.{function.__name__}", dtype, units)
    assert units <= CONTRACT


@pytest.mark.parametrize("size", [0.5, 5.0, 50.0])
def test_estimate_against_mpmath(size, dtype, record_accuracy):
    rng = np.random.default_rng(1)
    x, y = draw(rng, 4, 3, dtype=dtype, size=size), draw(rng, 4, 3, dtype=dtype, size=size)
    y = -x + y / size  # |x + y| of order 1: the value is representable, its factors may not be
    omega, log_weight = draw(rng, 6, 3, dtype=dtype), draw(rng, 6, dtype=dtype)
    got = kernels.estimate(x, y, omega, log_weight=log_weight)
    exact = reference.formulas().kernel_estimate(x, y, omega, log_weight=log_weight)
    exponent = (
        reference.norm(omega) * (reference.norm(x) + reference.norm(y)) + reference.norm(y) ** 2
    )
    for i, want in enumerate(exact):
        if want < float(np.finfo(dtype).smallest_normal):
            assert got[i] < 2 * float(np.finfo(dtype).smallest_normal)
            continue
        units = reference.error(got[i : i + 1], np.array([want]), want, exponent)
        record_accuracy(f"kernels.estimate, vectors of size {size:g}", dtype, units)
        assert units <= CONTRACT


def test_each_term_is_a_density_ratio():
    # Proposition 1 of reference 000 and 2 (the second moment), pointwise in omega:
    # Z(w) N(w; 0, I) = kappa N(w; x + y, I) and
    # Z(w)^2 N(w; 0, I) = kappa^2 e^{|x+y|^2} N(w; 2(x+y), I).
    rng = np.random.default_rng(2)
    for d in (1, 4, 32):
        x, y, omega = draw(rng, d), draw(rng, d), draw(rng, 50, d)
        log_z = np.log(kernels.estimate(x, y, omega[:, None, :]))
        normal = stats.multivariate_normal
        log_p = normal(np.zeros(d)).logpdf(omega)
        first = log_z + log_p - normal(x + y).logpdf(omega)
        np.testing.assert_allclose(first, x @ y, rtol=0, atol=1e-12)
        second = 2 * log_z + log_p - normal(2 * (x + y)).logpdf(omega)
        np.testing.assert_allclose(second, 2 * x @ y + np.sum((x + y) ** 2), rtol=0, atol=1e-12)


@pytest.mark.long("jax", "dask")
def test_backends_agree(backend, dtype):
    rng = np.random.default_rng(0)
    x, y = draw(rng, 5, 1, 3, dtype=dtype), draw(rng, 4, 3, dtype=dtype)
    omega, log_weight = draw(rng, 6, 3), draw(rng, 6)
    rtol = 2 * CONTRACT * float(np.finfo(dtype).eps) * 30
    for function in (kernels.softmax_kernel, kernels.gaussian_kernel):
        np.testing.assert_allclose(backend.call(function, x, y), function(x, y), rtol=rtol)
    want = kernels.estimate(x, y, omega, log_weight=log_weight)
    for kwargs in (
        {"omega": omega, "log_weight": log_weight},
        {"omega": Host(omega), "log_weight": Host(log_weight)},
    ):
        np.testing.assert_allclose(backend.call(kernels.estimate, x, y, **kwargs), want, rtol=rtol)


@pytest.mark.parametrize("weighted", [False, True])
def test_estimates_of_other_features(weighted):
    rng = np.random.default_rng(5)
    x, y, omega = draw(rng, 5, 1, 3), draw(rng, 4, 3), draw(rng, 6, 3)
    log_weight = draw(rng, 6) if weighted else None
    w = np.exp(log_weight) if weighted else np.ones(6)
    z = (x + y) @ omega.T
    squares = np.sum(x * x, -1) + np.sum(y * y, -1)
    want = {
        "hyperbolic": np.exp(-squares / 2) * np.mean(w * np.cosh(z), -1),
        "trigonometric": np.exp(squares / 2) * np.mean(w * np.cos((x - y) @ omega.T), -1),
    }
    for name, value in want.items():
        got = kernels.estimate(x, y, omega, features=name, log_weight=log_weight)
        np.testing.assert_allclose(got, value, rtol=1e-12, atol=1e-14)
