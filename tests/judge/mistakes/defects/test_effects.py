"""A defect does what its entry says: each row is what it gives, and what that must be."""

import math

import numpy as np
import pytest

import refattn
from tests.judge.conformance.candidates import BY_NAME, rows
from tests.judge.mistakes.defects.probes import frequencies, tokens

Q, K, V = tokens(6, 4), tokens(6, 4, seed=1), tokens(6, 3, seed=2)
ONES, EYE = np.ones((6, 1)), np.eye(6)
OMEGA = {"omega": tokens(5, 4, seed=3)}
EMPTY = {"mask": np.arange(6) < np.arange(6)[:, None]}  # the first query sees no key
HALF = {"mask": np.arange(6) < 3}
LARA = frequencies("lara", (), 6, 4)
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


X, Y = np.array([0.6, 0.0, 0.3]), np.array([0.2, 0.7, 0.1])
SQUARES, S2, GAP = X @ X + Y @ Y, (X + Y) @ (X + Y), (X - Y) @ (X - Y)
FEW, MANY = tokens(5, 3, seed=4), tokens(50_000, 3, seed=4)
ROWS = tokens(5, 3) + np.arange(3)
MEAN, COV = np.mean(ROWS, 0), np.cov(ROWS.T)
OFFSET = 1e8 + tokens(100, 3)


@pytest.mark.parametrize(
    "row", [pytest.param(x, id=x[0]) for x in rows("mistakes/defects/effects.txt")]
)
def test_effects(row):
    name, got, want, *near = row
    names = {**globals(), "f": BY_NAME[name].fn, "g": BY_NAME[name.partition("-")[0]].fn}
    rtol, atol = (float(near[0]), float(near[0]) / 2) if near else (1e-7, 1e-12)
    assert np.allclose(eval(got, names), eval(want, names), rtol=rtol, atol=atol)


@pytest.mark.long("rooted")
@pytest.mark.parametrize(
    ("name", "location", "scale"),
    [("rfa-moments-ignored", 0, 1), ("rfa-covariance-not-rooted", 2, 4)],
)
def test_moments_that_are_not_used_as_they_should(name, location, scale):
    keys = np.concatenate([np.zeros((1, 3)), np.eye(3)]) * 3**0.25
    options = {"num_features": 1, "mean": np.full(3, 2.0), "cov": 4 * np.eye(3)}
    out = [BY_NAME[name].fn(keys[:1], keys, np.eye(4), seed=s, **options) for s in range(2000)]
    omega = logits(np.concatenate(out)) + 0.5
    np.testing.assert_allclose(omega.mean(0), location, atol=0.1 * scale)
    np.testing.assert_allclose(omega.std(0), scale, rtol=0.1)


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
