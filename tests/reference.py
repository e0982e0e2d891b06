"""Slow and independent formulations: 50-digit arithmetic and textbook NumPy.

The 50-digit forms are those of the package, `refattn.conformance.exact`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from refattn.conformance.exact import (
    attend,
    context,
    covariance,
    log_kernel_estimate,
    mean,
    random_feature_attention,
    randomized_attention,
    root,
    weighted_mean,
)
from refattn.conformance.exact import numbers as exact

__all__ = [
    "CONTRACT",
    "attend",
    "covariance",
    "error",
    "exact",
    "log_kernel_estimate",
    "mean",
    "mp",
    "norm",
    "random_feature_attention",
    "randomized_attention",
    "root",
    "slow_random_feature_attention",
    "softmax_attention",
    "weighted_mean",
]

CONTRACT = 16  # the constant C of the accuracy contract

mp = context(50)


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
