"""A defect does what its entry says: each row is what it gives, and what that must be."""

import math

import numpy as np
import pytest

import refattn
from refattn.conformance.defects import MUTANTS
from tests.conformance.candidates import BY_NAME, rows
from tests.conformance.defects.probes import given, tokens

Q, K, V = tokens(6, 4), tokens(6, 4, seed=1), tokens(6, 3, seed=2)
ONES, EYE = np.ones((6, 1)), np.eye(6)
OMEGA = {"omega": tokens(5, 4, seed=3)}
EMPTY = {"mask": np.arange(6) < np.arange(6)[:, None]}  # the first query sees no key
HALF = {"mask": np.arange(6) < 3}
LARA = given("lara", 6)
ROOT = 4**-0.25
LOW = np.full((1, 4), -20.0)  # of tiny features
GROUPED = tokens(4, 5, 4), tokens(2, 5, 4, seed=1), tokens(2, 5, 3, seed=2)
# one large key far from a query, which alone is seen
FAR = (Q[:1], np.concatenate([K, -1e6 * Q[:1]]), np.append(0 * ONES, [[1.0]], axis=0))
ONLY = {"mask": np.arange(7) == 6}


def logits(out):
    """Log weights of keys over that of the first, where values are unit vectors."""
    return np.log(out[:, 1:] / out[:, :1])


def waves(factor):
    omega = factor * OMEGA["omega"]
    return refattn.random_feature_attention(Q, K, V, omega=omega, features="trigonometric")


@pytest.mark.parametrize(
    ("name", "got", "want"), [pytest.param(*x, id=x[0]) for x in rows("defects/effects.txt")]
)
def test_attention(name, got, want):
    names = {**globals(), "f": BY_NAME[name].fn, "g": BY_NAME[name.partition("-")[0]].fn}
    assert np.allclose(eval(got, names), eval(want, names), rtol=1e-7, atol=1e-12)


X, Y = np.array([0.6, 0.0, 0.3]), np.array([0.2, 0.7, 0.1])
SQUARES, S2, GAP = X @ X + Y @ Y, (X + Y) @ (X + Y), (X - Y) @ (X - Y)
MANY = 50_000


# What a defect of the kernel gives at X and Y for many frequencies; about 1.2 is right.
KERNEL = {
    "": math.exp(X @ Y),
    "whole-norm": math.exp(X @ Y - SQUARES / 2),
    "norm-of-y-dropped": math.exp(X @ Y + Y @ Y / 2),
    "norm-unsquared": math.exp(S2 / 2 - math.sqrt(X @ X) / 2 - math.sqrt(Y @ Y) / 2),
    "sum": math.exp(X @ Y) * MANY,
    "median": math.exp(X @ Y - S2 / 2),
    "geometric": math.exp(X @ Y - S2 / 2),
    "means-of-features": 1.0,
    "scaled": math.exp(X @ Y / math.sqrt(3)),
    "over-two-pi": math.exp(S2 / 2 / (2 * math.pi) ** 2 - SQUARES / 2),
    "trigonometric": math.exp(SQUARES / 2 - GAP / 2),
    "trigonometric-two-pi": math.exp(SQUARES / 2 - GAP / 2 * (2 * math.pi) ** 2),
    "trigonometric-over-two-pi": math.exp(SQUARES / 2 - GAP / 2 / (2 * math.pi) ** 2),
}


@pytest.mark.parametrize("name", KERNEL)
def test_kernel(name):
    entry = BY_NAME[f"kernel-{name}" if name else "kernel"]
    out = entry.fn(X, Y, omega=tokens(MANY, 3, seed=4))
    assert out == pytest.approx(KERNEL[name], rel=0.04, abs=0.02)


def test_other_defects_of_the_kernel():
    few, fn = tokens(5, 3, seed=4), {m.name: m.fn for m in MUTANTS}
    true = BY_NAME["kernel"].fn(X, Y, omega=few)
    assert fn["kernel-bessel"](X, Y, omega=few) == pytest.approx(true * 5 / 4)
    assert fn["kernel-epsilon"](0 * X, 0 * Y, omega=few) == pytest.approx(1.001**2, rel=1e-12)
    assert fn["kernel-maximum-kept"](X, Y, omega=few) < 1
    assert fn["kernel-two-pi"](X, Y, omega=tokens(MANY, 3, seed=4)) > 1e6
    apart = fn["kernel-independent-frequencies"](X, Y, num_features=MANY, seed=0)
    assert apart == pytest.approx(1, rel=0.03)
    exposed = fn["kernel-exposed-features-unscaled"]
    assert exposed(X, omega=few) @ exposed(Y, omega=few) == pytest.approx(5 * float(true))


ROWS = tokens(5, 3) + np.arange(3)
MEAN, COV = np.mean(ROWS, 0), np.cov(ROWS.T)
OFFSET = 1e8 + tokens(100, 3)
MOMENTS = {
    "ddof-0": lambda f: (f(ROWS)[1], 0.8 * COV),
    "uncentred": lambda f: (f(ROWS)[1], COV + 1.25 * np.outer(MEAN, MEAN)),
    "correlation": lambda f: (f(ROWS)[1], np.corrcoef(ROWS.T)),
    "shrunk": lambda f: (f(ROWS)[1], COV + 0.001 * np.eye(3)),
    "mean-over-n-minus-1": lambda f: (f(ROWS)[0], 1.25 * MEAN),
    "transposed": lambda f: (f(ROWS)[1], np.cov(ROWS)),
    "triangle": lambda f: (f(ROWS)[1], np.triu(f(ROWS)[1])),
    "one-pass": lambda f: (np.max(np.abs(f(OFFSET)[1] / np.cov(OFFSET.T) - 1)) > 0.5, True),
    "welford": lambda f: (np.allclose(f(OFFSET)[1], np.cov(OFFSET.T), atol=1e-5), True),
    "median": lambda f: (abs(f(tokens(2000, 101, 1))[0].var() * 202 / math.pi - 1) < 0.1, True),
}


@pytest.mark.parametrize("name", MOMENTS)
def test_moments(name):
    np.testing.assert_allclose(*MOMENTS[name](BY_NAME[f"moments-{name}"].fn))


# --- random frequencies ---------------------------------------------------------------------------


def test_moments_that_are_not_used_as_they_should():
    keys = np.concatenate([np.zeros((1, 3)), np.eye(3)]) * 3**0.25
    options = {"num_features": 1, "mean": np.full(3, 2.0), "cov": 4 * np.eye(3)}
    for name, location, scale in (
        ("rfa-moments-ignored", 0, 1),
        ("rfa-covariance-not-rooted", 2, 4),
    ):
        out = [BY_NAME[name].fn(keys[:1], keys, np.eye(4), seed=s, **options) for s in range(2000)]
        omega = logits(np.concatenate(out)) + 0.5
        np.testing.assert_allclose(omega.mean(0), location, atol=0.1 * scale)
        np.testing.assert_allclose(omega.std(0), scale, rtol=0.1)


# --- randomized attention -------------------------------------------------------------------------


# The logit of the weight of the first of two keys has a law with two normal components: their
# weight, their means less the right ones, and the standard deviation in units of the right one.
A, B, D = 1.0, 0.75, 16
PI = 1 / (1 + math.exp(-2 * A * B))
MEANS = (2 * A * B + 2 * A**2, 2 * A * B - 2 * A**2)
AVERAGE = PI * MEANS[0] + (1 - PI) * MEANS[1]
LOGITS = {
    "ra": (PI, MEANS, 1.0),
    "ra-gumbel-max": (PI, MEANS, 1.0),
    "ra-is-rfa": (1.0, (0.0, 0.0), 1.0),
    "ra-uniform-component": (0.5, MEANS, 1.0),
    "ra-temperature-1.2": (1 / (1 + math.exp(-2 * A * B / 1.2)), MEANS, 1.0),
    "ra-greedy": (1.0, MEANS, 1.0),
    "ra-query-dropped": (PI, (2 * A**2, -2 * A**2), 1.0),
    "ra-key-dropped": (1.0, (2 * A * B, 2 * A * B), 1.0),
    "ra-averaged-gaussian": (1.0, (AVERAGE, AVERAGE), 1.0),
    "ra-moment-matched": (1.0, (AVERAGE, AVERAGE), math.sqrt(1 + 4 * A**2 * PI * (1 - PI))),
    "ra-noise-dropped": (PI, MEANS, 0.0),
    "ra-noise-unscaled": (PI, MEANS, D**-0.25),
    "ra-noise-too-large": (PI, MEANS, 1.2),
}


@pytest.mark.parametrize("name", LOGITS)
def test_randomized_attention_has_the_law_its_entry_says(name):
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    share, means, deviation = LOGITS[name]
    p = [
        float(weights @ (1 / (1 + np.exp(-m - 2 * A * deviation * nodes)))) / weights.sum()
        for m in means
    ]
    want = share * p[0] + (1 - share) * p[1]
    e = np.eye(D)[:1] * D**0.25
    v = np.array([[1.0], [0.0]])
    out = BY_NAME[name].fn(B * e, A * np.concatenate([e, -e]), v, num_samples=40_000, seed=1)
    assert out[0, 0] == pytest.approx(want, abs=0.008)
    if name in ("ra", "ra-gumbel-max"):
        assert want == pytest.approx(PI, abs=1e-6)
    else:
        assert abs(want - PI) > 0.001
