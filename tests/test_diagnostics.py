"""Effective sample sizes and Pareto tails of importance weights."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from conftest import Backend, Host
from test_attention import draw

from refattn import diagnostics, random_feature_attention, randomized_attention


def test_log_weights_are_those_of_the_estimator() -> None:
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


def test_effective_sample_size() -> None:
    rng = np.random.default_rng(0)
    logs = draw(rng, 3, 50, size=3.0)
    w = np.exp(logs)
    want = w.sum(-1) ** 2 / (w**2).sum(-1)
    np.testing.assert_allclose(diagnostics.effective_sample_size(logs), want)
    np.testing.assert_allclose(diagnostics.effective_sample_size(logs + 1e4), want, rtol=1e-10)
    np.testing.assert_allclose(diagnostics.effective_sample_size(np.zeros((2, 8))), 8.0)


def test_pareto_k_recovers_the_shape() -> None:
    # Weights u^-k with u uniform have a Pareto tail of shape k exactly. Four standard errors of
    # the tail fit with M = min(S/5, 3 sqrt(S)) points are (1 + k) / sqrt(M) each.
    pytest.importorskip("arviz_stats")
    rng = np.random.default_rng(0)
    size = 20_000
    error = 4 * 2 / np.sqrt(3 * np.sqrt(size))
    for k in (0.2, 0.5, 0.9):
        logs = -k * np.log(rng.random((2, size)))
        np.testing.assert_allclose(diagnostics.pareto_k(logs), k, atol=error)


def test_backends(backend: Backend, dtype: np.dtype) -> None:
    rng = np.random.default_rng(0)
    q, k, omega = draw(rng, 2, 5, 3, dtype=dtype), draw(rng, 2, 7, 3, dtype=dtype), draw(rng, 6, 3)
    atol = 1e-4 if dtype == np.float32 else 1e-12
    want = diagnostics.log_weights(q, k, omega=omega)
    got = backend.call(diagnostics.log_weights, q, k, omega=Host(omega))
    np.testing.assert_allclose(got, want, atol=atol)
    got = backend.call(diagnostics.effective_sample_size, want.astype(dtype))
    np.testing.assert_allclose(got, diagnostics.effective_sample_size(want), rtol=atol)


def test_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    q: Any = np.ones((4, 3))
    with pytest.raises(ValueError, match=r"`mask` must broadcast to \(\.\.\., 1, m\) = \(1, 4\)"):
        diagnostics.log_weights(q, q, omega=q, mask=np.ones((4, 4), bool))
    with pytest.raises(TypeError, match="`log_weights` must be an array"):
        diagnostics.effective_sample_size([0.0])
    with pytest.raises(
        ValueError, match="`log_weights` must hold at least 25 weights a row, got 3"
    ):
        diagnostics.pareto_k(q)
    strict = pytest.importorskip("array_api_strict")
    with pytest.raises(TypeError, match="`log_weights` must be a NumPy array, got Array"):
        diagnostics.pareto_k(strict.zeros(30))
    monkeypatch.setitem(sys.modules, "arviz_stats.base", None)
    with pytest.raises(ImportError, match=r"pip install 'refattn\[diagnostics\]'"):
        diagnostics.pareto_k(np.zeros(30))


def test_queries_that_see_no_key() -> None:
    q = np.ones((4, 3))
    logs = diagnostics.log_weights(q, q, omega=q, mask=np.zeros(4, bool))
    np.testing.assert_array_equal(logs, np.full((4, 4), -np.inf))
    np.testing.assert_array_equal(diagnostics.effective_sample_size(logs), np.zeros(4))
