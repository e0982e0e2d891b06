"""Effective sample sizes and Pareto tails of importance weights."""

import sys

import numpy as np
import pytest
from mpmath import mp

from refattn import diagnostics, random_feature_attention, randomized_attention
from tests.conftest import Host
from tests.problems import draw


def test_log_weights_are_those_of_the_estimator():
    # RFA is the mean of f(omega_s) under them.
    rng = np.random.default_rng(0)
    q, k, v = draw(rng, 4, 5, 3), draw(rng, 2, 7, 3), draw(rng, 2, 7, 2)
    omega, log_weight = draw(rng, 6, 3), draw(rng, 6)
    mask = rng.random((4, 1, 7)) < 0.7
    weights = np.exp(diagnostics.log_weights(q, k, omega=omega, log_weight=log_weight, mask=mask))
    np.testing.assert_allclose(weights.sum(-1), 1.0)
    f = np.stack(
        [
            randomized_attention(q, k, v, omega=np.broadcast_to(w, (5, 1, 3)), mask=mask)
            for w in omega
        ],
        axis=-2,
    )
    want = random_feature_attention(q, k, v, omega=omega, log_weight=log_weight, mask=mask)
    np.testing.assert_allclose(np.sum(weights[..., None] * f, -2), want, atol=1e-13)


def test_effective_sample_size():
    rng = np.random.default_rng(0)
    logs = draw(rng, 3, 50, size=3.0)
    w = np.exp(logs)
    want = w.sum(-1) ** 2 / (w**2).sum(-1)
    np.testing.assert_allclose(diagnostics.effective_sample_size(logs), want)
    np.testing.assert_allclose(diagnostics.effective_sample_size(logs + 1e4), want, rtol=1e-10)
    np.testing.assert_allclose(diagnostics.effective_sample_size(np.zeros((2, 8))), 8.0)


@pytest.mark.long("jax")
def test_effective_sample_size_does_not_depend_on_the_unit(backend, dtype):
    # Nor is it above S, beyond rounding: equal weights may be of any size.
    sizes = np.array([1e6, -1e6, 20.7, 1e30, 0.0])
    logs = np.repeat(sizes[:, None], 50, axis=-1).astype(dtype)
    got = backend.call(diagnostics.effective_sample_size, logs)
    np.testing.assert_allclose(got, 50.0, rtol=4 * np.finfo(dtype).eps)
    logs = draw(np.random.default_rng(0), 3, 50, size=3.0, dtype=dtype)
    logs = np.round(logs * 2**10) / 2**10  # sums with 2^10 are exact
    got, far = (backend.call(diagnostics.effective_sample_size, x) for x in (logs, logs + 2.0**10))
    np.testing.assert_allclose(far, got, rtol=4 * np.finfo(dtype).eps)


def pareto_shape(logs):
    """Fit by Zhang and Stephens (2009), with the prior of Vehtari et al., in 50 digits."""
    with mp.workdps(50):
        size = len(logs)
        length = size // 5 if size <= 225 else int(3 * np.sqrt(size))
        least, *tail = (mp.exp(mp.mpf(float(x))) for x in np.sort(logs)[-length - 1 :])
        tail = [x - least for x in tail]
        count, quartile = 30 + int(np.sqrt(length)), tail[int(length / 4 + 0.5) - 1]
        grid = [
            1 / tail[-1] + (1 - mp.sqrt(mp.mpf(2 * count) / (2 * j - 1))) / (3 * quartile)
            for j in range(1, count + 1)
        ]

        def shape(b):
            return mp.fsum(mp.log1p(-b * x) for x in tail) / length

        profile = [length * (mp.log(-b / shape(b)) - shape(b) - 1) for b in grid]
        weights = [mp.exp(x - max(profile)) for x in profile]
        b = mp.fsum(w * b for w, b in zip(weights, grid, strict=True)) / mp.fsum(weights)
        return float((length * shape(b) + 5) / (length + 10))


@pytest.mark.long("200", "1000")
@pytest.mark.parametrize("count", [25, 200, 1000])
def test_pareto_k_against_50_digits(count):
    # The weights of a row may span any range, and be nearly equal: the fit has no unit.
    pytest.importorskip("arviz_stats")
    z = np.random.default_rng(count).standard_normal(count)
    for spread in (1e-12, 1e-6, 0.1, 1.0, 10.0, 100.0):
        want = pareto_shape(spread * z)
        # A posterior mean whose smallest weights the package leaves out.
        np.testing.assert_allclose(diagnostics.pareto_k(spread * z), want, rtol=1e-9, atol=1e-9)


def test_pareto_k_decides_row_by_row():
    pytest.importorskip("arviz_stats")
    z = np.random.default_rng(0).standard_normal(1000)
    one = np.where(np.arange(1000) == 7, 0.0, -np.inf)
    few = np.where(np.arange(1000) < 12, 0.0, -np.inf)  # less than three quarters of a tail of 94
    capped = np.minimum(z, np.sort(z)[-200])
    rows = {
        "ordinary": (z, pareto_shape(z)),
        "one takes all": (1000 * z, np.inf),
        "all but one are 0": (one, np.inf),
        "all but some are 0": (few, np.inf),
        "all are 0": (np.full(1000, -np.inf), np.inf),
        "equal": (np.zeros(1000), -np.inf),
        "equal and large": (np.full(1000, 1e6), -np.inf),
        "capped": (capped, -np.inf),
        "nan": (np.where(np.arange(1000) == 3, np.nan, z), np.nan),
        "infinite": (np.where(np.arange(1000) == 3, np.inf, z), np.nan),
    }
    logs, want = (np.array(x) for x in zip(*rows.values(), strict=True))
    got = diagnostics.pareto_k(logs.reshape(2, 5, 1000))
    np.testing.assert_allclose(got, want.reshape(2, 5), rtol=1e-9)
    for x, k in zip(logs, want, strict=True):  # whatever the other rows are
        np.testing.assert_allclose(diagnostics.pareto_k(x), k, rtol=1e-9)
    assert diagnostics.pareto_k(np.zeros((2, 0, 30))).shape == (2, 0)
    logs = np.round(8 * z) / 8  # ties, at the cut-off too
    np.testing.assert_allclose(diagnostics.pareto_k(logs), pareto_shape(logs), rtol=1e-9)


@pytest.mark.long("jax")
def test_backends(backend, dtype):
    rng = np.random.default_rng(0)
    q, k, omega = draw(rng, 2, 5, 3, dtype=dtype), draw(rng, 2, 7, 3, dtype=dtype), draw(rng, 6, 3)
    atol = 1e-4 if dtype == np.float32 else 1e-12
    want = diagnostics.log_weights(q, k, omega=omega)
    got = backend.call(diagnostics.log_weights, q, k, omega=Host(omega))
    np.testing.assert_allclose(got, want, atol=atol)


def test_bad_input(monkeypatch):
    strict = pytest.importorskip("array_api_strict")
    with pytest.raises(TypeError, match="`log_weights` must be a NumPy array, got Array"):
        diagnostics.pareto_k(strict.zeros(30))
    monkeypatch.setitem(sys.modules, "arviz_stats.base", None)
    with pytest.raises(ImportError, match=r"pip install 'refattn\[diagnostics\]'"):
        diagnostics.pareto_k(np.zeros(30))


def test_queries_that_see_no_key():
    q = np.ones((4, 3))
    logs = diagnostics.log_weights(q, q, omega=q, mask=np.zeros(4, bool))
    np.testing.assert_array_equal(logs, np.full((4, 4), -np.inf))
    np.testing.assert_array_equal(diagnostics.effective_sample_size(logs), np.zeros(4))
