"""Slow and independent formulations: 50-digit arithmetic and textbook NumPy."""

from __future__ import annotations

from typing import Any

import mpmath
import numpy as np

CONTRACT = 16  # the constant C of the accuracy contract

mp = mpmath.mp.clone()
mp.dps = 50


def exact(x: Any) -> np.ndarray:
    """Turn floats into 50-digit numbers with the same value."""
    x = np.asarray(x)
    return np.array([mp.mpf(float(e)) for e in x.ravel()], dtype=object).reshape(x.shape)


def attend(
    q: Any, k: Any, v: Any, bias: Any = 0.0, visible: Any = True, scale: Any = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Softmax attention and log normaliser in 50 digits, for (n, d), (m, d), (m, d_v) arrays."""
    n, m = q.shape[0], k.shape[0]
    scores = (exact(q) @ exact(k).T) * scale + exact(np.broadcast_to(bias, (n, m)))
    return _softmax_mean(scores, exact(v), np.broadcast_to(visible, (n, m)))


def _softmax_mean(scores: np.ndarray, v: np.ndarray, visible: np.ndarray) -> Any:
    n, m = scores.shape
    out = np.full((n, v.shape[-1]), mp.mpf(0), dtype=object)
    lse = np.full(n, -mp.inf, dtype=object)
    for i in range(n):
        seen = [j for j in range(m) if visible[i, j]]
        if seen:
            weights = [mp.exp(scores[i, j]) for j in seen]
            out[i] = sum(w * v[j] for w, j in zip(weights, seen, strict=True)) / sum(weights)
            lse[i] = mp.log(sum(weights))
    return out, lse


def root(scale: float | None, d: int) -> Any:
    """Square root of the scale, in 50 digits."""
    return mp.sqrt(1 / mp.sqrt(d) if scale is None else mp.mpf(scale))


def log_kernel_estimate(q: Any, k: Any, omega: Any, log_weight: Any = 0.0) -> np.ndarray:
    """Log of sum_s w_s xi(q_i, omega_s) xi(k_j, omega_s) in 50 digits, without exp(-|q|^2/2)."""
    log_weight = exact(np.broadcast_to(log_weight, omega.shape[:1]))
    omega = exact(omega)
    a, b = q @ omega.T + log_weight, k @ omega.T - (k * k).sum(-1)[:, None] / 2
    return np.array(
        [[mp.log(sum(mp.exp(x) for x in a_i + b_j)) for b_j in b] for a_i in a], dtype=object
    )


def random_feature_attention(
    q: Any,
    k: Any,
    v: Any,
    omega: Any,
    log_weight: Any = 0.0,
    visible: Any = True,
    scale: float | None = None,
) -> np.ndarray:
    """Reference 002, eq. (10), in 50 digits."""
    r = root(scale, q.shape[-1])
    scores = log_kernel_estimate(exact(q) * r, exact(k) * r, omega, log_weight)
    return _softmax_mean(scores, exact(v), np.broadcast_to(visible, scores.shape))[0]


def slow_random_feature_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    omega: np.ndarray,
    visible: Any = True,
) -> np.ndarray:
    """Reference 002, eq. (10), term by term in O(n m S): heads last to first, no second hop."""
    r = q.shape[-1] ** -0.25
    log_q = np.einsum("...nd,...sd->...ns", q * r, omega)
    log_k = (
        np.einsum("...md,...sd->...ms", k * r, omega) - 0.5 * np.sum((k * r) ** 2, -1)[..., None]
    )
    terms = log_q[..., :, None, :] + log_k[..., None, :, :]  # (..., n, m, S)
    terms = np.where(np.asarray(visible)[..., None], terms, -np.inf)
    terms = np.exp(terms - terms.max(axis=(-1, -2), keepdims=True))
    numerator = np.einsum("...nms,...me->...ne", terms, v)
    return numerator / terms.sum(axis=(-1, -2))[..., None]


def softmax_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, visible: Any = True) -> Any:
    """Textbook attention with the whole score matrix."""
    scores = np.einsum("...nd,...md->...nm", q, k) / np.sqrt(q.shape[-1])
    scores = np.where(visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("...nm,...me->...ne", weights / weights.sum(-1, keepdims=True), v)


def error(got: np.ndarray, want: np.ndarray, size: Any, exponent: Any) -> float:
    """Largest |got - want| / size in units of eps (1 + exponent); infinite for nan."""
    eps = mp.mpf(float(np.finfo(got.dtype).eps))
    if not np.all(np.isfinite(got)):
        return np.inf
    worst = max(
        (abs(a - b) for a, b in zip(exact(got).ravel(), want.ravel(), strict=True)), default=0
    )
    return float(worst / (size * eps * (1 + exponent)))


def norm(x: np.ndarray) -> float:
    """Largest length of a row."""
    return float(np.max(np.sqrt(np.sum(np.asarray(x, np.longdouble) ** 2, -1))))
