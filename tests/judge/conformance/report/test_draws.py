"""What is said of frequencies that were recovered, and of estimates of a kernel."""

import math

import numpy as np
import pytest

from refattn import sampling
from refattn.judge.conformance.checks.trials import CheckRun
from refattn.judge.conformance.report.draws import name_factor_of_kernel, name_frequencies
from tests.judge.conformance.candidates import of


def kernel(x, y, *, num_features, seed, factor=lambda x, y, n: 1.0, sign=1):
    omega = np.random.default_rng(seed).standard_normal((num_features, x.shape[-1]))
    z, half = (x + sign * y) @ omega.T, np.sum(x * x + y * y, -1)[..., None] / 2
    terms = np.exp(z - half) if sign > 0 else np.cos(z) * np.exp(half)
    return np.mean(terms, -1) * factor(x, y, num_features)


def run(fn=kernel, omega=None, **tags):
    return CheckRun(of(fn, "kernel", **tags), "diagnosis", 0, omega=omega)


@pytest.mark.parametrize(("size", "words"), [(8**0.5, "regularised"), (1.0, "norm 1:")])
def test_norms_that_are_all_the_same_are_named(size, words):
    omega = sampling.draw(40, 8, coupling="regularised", rng=0).omega / 8**0.5 * size
    (found,) = name_frequencies([run(), run(omega=omega)])
    assert "coupling is " in found
    assert words in found


def test_frequencies_that_are_right_or_the_same_for_all_seeds_say_nothing():
    omega = sampling.draw(40, 8, rng=0).omega
    signs = np.where(np.arange(40) % 3, 1.0, -1.0)[:, None]
    for right in (omega, signs * omega[:1]):  # cosines tell no sign
        assert name_frequencies([run(omega=right)]) == []


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (lambda d: d**0.25, "near d^(1/4)"),
        (lambda d: 0.5**0.5, "near 1/sqrt(2)"),
        (lambda d: 1.2, "N(0, I) times 1.2"),
    ],
)
def test_frequencies_that_are_too_large_are_named(factor, words):
    rng = np.random.default_rng(0)
    trials = [run(omega=factor(d) * rng.standard_normal((2000, d))) for d in (8, 3)]
    (found,) = name_frequencies(trials)
    assert words in found
    other = rng.standard_t(3, (2000, 8))  # of another shape, not of another size
    assert name_frequencies([run(omega=other)]) == []


def square(x):
    return np.sum(x * x, -1)


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (lambda x, y, n: 2.0, "has a factor of 2 that"),
        (lambda x, y, n: np.exp(square(x) / 2), "(d = 3) has a factor of e^(+0.5 |x|^2)"),
        (lambda x, y, n: 3 * np.exp(np.sum(x * y, -1)), "3 times e^(+1 x . y)"),
        (lambda x, y, n: 1 / n, "they are 1 / 0.5 / 0.25: they are divided by the number"),
        (lambda x, y, n: float(n == 1), "they are 1 / 0 / 0"),
        (lambda x, y, n: 1.0, ""),
        (lambda x, y, n: 1 + 0.1 * np.sin(3 * square(x)), ""),  # no such factor
        (lambda x, y, n: 1 + 1e-4 * np.cos(3 * square(x)), ""),
    ],
)
def test_a_factor_of_all_estimates_is_named(factor, words):
    def fn(x, y, **options):
        return kernel(x, y, factor=factor, **options)

    found = [*name_factor_of_kernel(run(fn))]
    assert len(found) == bool(words)
    assert words in " ".join(found)


def test_a_factor_of_waves_is_named_where_x_is_y():
    def fn(x, y, **options):
        return kernel(x, y, factor=lambda x, y, n: np.exp(square(x) / 2), sign=-1, **options)

    (found,) = name_factor_of_kernel(run(fn, features="trigonometric"))
    assert "at x = y (d = 3) has a factor of e^(+0.5 |x|^2)" in found
    assert math.isfinite(len(found))
