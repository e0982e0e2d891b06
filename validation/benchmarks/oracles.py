"""What each form claims to compute, for some queries, written down directly in float64.

Arguments are `q` (..., r, d), the queries that are checked, and all keys `k` (..., m, d) and values
`v` (..., m, d_v). `visible`, shape (r, m), says which keys each query sees. The formulas are those
of `refattn.naive`; where these would hold all keys times all frequencies, products of matrices in
the log domain. Nothing is shared with the forms that are checked.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from refattn import naive

__all__ = [
    "chunk_centres",
    "importance_sampled",
    "linear",
    "linear_randomized",
    "mean_of_ratios",
    "performer",
    "positive",
    "randomized",
    "softmax",
    "trigonometric",
]


def softmax(q: Any, k: Any, v: Any, visible: Any = None) -> np.ndarray:
    """Exact softmax attention, one head after another."""
    heads = zip(*_double(q, k, v), strict=True)
    return np.stack([naive.softmax_attention(*head, mask=visible) for head in heads])


def positive(
    q: Any, k: Any, v: Any, omega: Any, visible: Any = True, log_weight: Any = 0.0
) -> np.ndarray:
    """Random-feature attention with positive features."""
    q, k, v, omega = _double(q, k, v, omega)
    kernel, _ = _positive(q, k, omega, log_weight)
    return _average(np.where(visible, kernel, 0), v)


def trigonometric(q: Any, k: Any, v: Any, omega: Any) -> np.ndarray:
    """Random-feature attention with trigonometric features."""
    q, k, v, omega = _double(q, k, v, omega)
    x, y = (_kernel_coordinates(z) @ _t(omega) for z in (q, k))
    half = _half_square_norm(_kernel_coordinates(k))
    weight = np.exp(half - np.max(half, axis=-1, keepdims=True))
    kernel = np.cos(x) @ _t(np.cos(y)) + np.sin(x) @ _t(np.sin(y))
    return _average(kernel * weight[..., None, :], v)


def performer(
    q: Any,
    k: Any,
    v: Any,
    omega: Any,
    visible: Any = True,
    *,
    epsilon: float = 1e-4,
    added: float = 0.0,
) -> np.ndarray:
    """Performer attention: `epsilon` added to each feature, `added` to each sum of key features."""
    q, k, v, omega = _double(q, k, v, omega)
    x, y = (_kernel_coordinates(z) for z in (q, k))
    log_q, log_k = (z @ _t(omega) - _half_square_norm(z)[..., None] for z in (x, y))
    base_q = np.max(x @ _t(omega), axis=-1, keepdims=True)
    base_k = np.max(y @ _t(omega), axis=(-1, -2), keepdims=True)
    size = math.sqrt(omega.shape[-2])
    phi_q, phi_k = (np.exp(log_q - base_q) + epsilon) / size, np.exp(log_k - base_k) + epsilon
    kernel = np.where(visible, phi_q @ _t(phi_k) / size, 0)
    return _average(kernel, v, added * np.sum(phi_q, axis=-1, keepdims=True))


def linear(q: Any, k: Any, v: Any, visible: Any = True, *, added: float = 0.0) -> np.ndarray:
    """Linear attention with elu + 1, `added` to the normaliser."""
    q, k, v = _double(q, k, v)
    phi_q, phi_k = (np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))) for x in (q, k))
    return _average(np.where(visible, phi_q @ _t(phi_k), 0), v, added)


def chunk_centres(q: Any, k: Any, count: int) -> np.ndarray:
    """Sums of the mean query and the mean key of each of `count` equal chunks."""
    q, k = (_kernel_coordinates(x) for x in _double(q, k))
    shape = (*q.shape[:-2], count, -1, q.shape[-1])
    return np.asarray(q.reshape(shape).mean(axis=-2) + k.reshape(shape).mean(axis=-2))


def linear_randomized(
    q: Any, k: Any, v: Any, omega: Any, centres: Any, visible: Any = True
) -> np.ndarray:
    """LARA with proposals N(centre, I) and the balance heuristic."""
    omega, centres = _double(omega, centres)
    log_ratio = omega @ _t(centres) - _half_square_norm(centres)[..., None, :]
    log_weight = -_log_sum_exp(log_ratio)[..., None, :]
    return positive(q, k, v, omega, visible, log_weight)


def randomized(q: Any, k: Any, v: Any, omega: Any) -> np.ndarray:
    """Randomized attention; `omega` (..., r, S, d) holds the frequencies of each query."""
    return np.asarray(naive.randomized_attention(*_double(q, k, v), omega=omega))


def mean_of_ratios(q: Any, k: Any, v: Any, omega: Any) -> np.ndarray:
    """Mean of the ratios of single features, the same for every query."""
    return np.asarray(naive.mean_of_ratios_attention(*_double(q, k, v), omega=omega))


def importance_sampled(q: Any, k: Any, v: Any, omega: Any) -> np.ndarray:
    """Importance sampling with the exact normaliser."""
    q, k, v, omega = _double(q, k, v, omega)
    kernel, log_scale = _positive(q, k, omega, 0.0)
    log_exact = _log_sum_exp(_scores(q, k))
    half = _half_square_norm(_kernel_coordinates(q))
    log_ratio = log_scale - half - math.log(omega.shape[-2]) - log_exact
    return np.asarray(kernel @ v * np.exp(log_ratio)[..., None])


def _positive(q: Any, k: Any, omega: Any, log_weight: Any) -> tuple[np.ndarray, np.ndarray]:
    """Sums over frequencies of products of positive features, and the log of a scale per row.

    The factor exp(-|q|^2/2) is left out.
    """
    q, k = _kernel_coordinates(q), _kernel_coordinates(k)
    log_k = k @ _t(omega) - _half_square_norm(k)[..., None]
    base = np.max(log_k, axis=-2, keepdims=True)
    log_q = q @ _t(omega) + log_weight + base
    log_scale = np.max(log_q, axis=-1, keepdims=True)
    return np.exp(log_q - log_scale) @ _t(np.exp(log_k - base)), log_scale[..., 0]


def _average(kernel: Any, v: Any, added: Any = 0.0) -> np.ndarray:
    return np.asarray(kernel @ v / (np.sum(kernel, axis=-1, keepdims=True) + added))


def _log_sum_exp(scores: Any) -> np.ndarray:
    base = np.max(scores, axis=-1, keepdims=True)
    return np.asarray(np.log(np.sum(np.exp(scores - base), axis=-1)) + base[..., 0])


def _scores(q: Any, k: Any) -> np.ndarray:
    return np.asarray(q @ _t(k) / math.sqrt(q.shape[-1]))


def _half_square_norm(x: Any) -> np.ndarray:
    return np.asarray(np.sum(x * x, axis=-1) / 2)


def _kernel_coordinates(x: Any) -> np.ndarray:
    return np.asarray(x / x.shape[-1] ** 0.25)


def _double(*arrays: Any) -> list[Any]:
    return [np.asarray(x, dtype=np.float64) for x in arrays]


def _t(x: Any) -> Any:
    return np.swapaxes(x, -1, -2)
