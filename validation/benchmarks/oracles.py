"""What each form claims to compute, for some queries, written down directly in float64.

Arguments are `q` (..., r, d), the queries that are checked, and all keys `k` (..., m, d) and values
`v` (..., m, d_v). `visible`, shape (r, m), says which keys each query sees. The formulas are those
of `refattn.naive`; where these would hold all keys times all frequencies, products of matrices in
the log domain. Nothing is shared with the forms that are checked.

Pullbacks take all queries and the cotangents `g` (..., n, d_v) of their results to the cotangents
of queries, keys and values. They follow by the chain rule from ``out = kernel @ v / total``, one
head after another: that of a value of the kernel is ``(g_i . v_j - g_i . out_i) / total_i``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from refattn import naive

__all__ = [
    "chunk_centres",
    "importance_sampled",
    "linear",
    "linear_pullback",
    "linear_randomized",
    "linear_randomized_pullback",
    "mean_of_ratios",
    "performer",
    "performer_pullback",
    "positive",
    "positive_pullback",
    "randomized",
    "softmax",
    "softmax_pullback",
    "trigonometric",
]

Arrays = tuple[np.ndarray, ...]


def softmax(q: Any, k: Any, v: Any, visible: Any = None) -> np.ndarray:
    """Exact softmax attention, one head after another."""
    heads = zip(*_double(q, k, v), strict=True)
    return np.stack([naive.softmax_attention(*head, mask=visible) for head in heads])


def positive(
    q: Any, k: Any, v: Any, omega: Any, visible: Any = True, log_weight: Any = 0.0
) -> np.ndarray:
    """Random-feature attention with positive features."""
    q, k, v, omega = _double(q, k, v, omega)
    phi_q, phi_k, _ = _positive(q, k, omega, log_weight)
    return _average(np.where(visible, phi_q @ _t(phi_k), 0), v)


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
    phi_q, phi_k = (x + epsilon / math.sqrt(omega.shape[-2]) for x in _performer(q, k, omega))
    kernel = np.where(visible, phi_q @ _t(phi_k), 0)
    return _average(kernel, v, added * np.sum(phi_q, axis=-1, keepdims=True))


def linear(q: Any, k: Any, v: Any, visible: Any = True, *, added: float = 0.0) -> np.ndarray:
    """Linear attention with elu + 1, `added` to the normaliser."""
    q, k, v = _double(q, k, v)
    return _average(np.where(visible, _elu(q) @ _t(_elu(k)), 0), v, added)


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
    log_weight = -_log_sum_exp(_log_ratio(omega, centres))[..., None, :]
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
    phi_q, phi_k, log_scale = _positive(q, k, omega, 0.0)
    log_exact = _log_sum_exp(_scores(q, k))
    half = _half_square_norm(_kernel_coordinates(q))
    log_ratio = log_scale - half - math.log(omega.shape[-2]) - log_exact
    return np.asarray(phi_q @ (_t(phi_k) @ v) * np.exp(log_ratio)[..., None])


def softmax_pullback(q: Any, k: Any, v: Any, g: Any) -> Arrays:
    """Of exact softmax attention."""

    def pull(q: Any, k: Any, v: Any, g: Any) -> Arrays:
        scores = _scores(q, k)
        kernel = np.exp(scores - np.max(scores, axis=-1, keepdims=True))
        d_kernel, d_v = _average_pullback(kernel, v, g)
        d_product = d_kernel * kernel / math.sqrt(q.shape[-1])
        return d_product @ k, _t(d_product) @ q, d_v

    return _by_head(pull, *_double(q, k, v, g))


def positive_pullback(q: Any, k: Any, v: Any, g: Any, omega: Any, visible: Any = True) -> Arrays:
    """Of random-feature attention with positive features."""
    q, k, v, g, omega = _double(q, k, v, g, omega)
    phi_q, phi_k, _ = _positive(q, k, omega, 0.0)
    d_q, d_k, d_v = _features_pullback(phi_q, phi_k, v, g, visible)
    return _log_pullback(q, omega, d_q * phi_q), _log_pullback(k, omega, d_k * phi_k), d_v


def performer_pullback(
    q: Any, k: Any, v: Any, g: Any, omega: Any, visible: Any = True, *, epsilon: float = 1e-4
) -> Arrays:
    """Of Performer attention, the maxima that it subtracts taken as constants."""
    q, k, v, g, omega = _double(q, k, v, g, omega)
    phi_q, phi_k = _performer(q, k, omega)
    constant = epsilon / math.sqrt(omega.shape[-2])
    d_q, d_k, d_v = _features_pullback(phi_q + constant, phi_k + constant, v, g, visible)
    return _log_pullback(q, omega, d_q * phi_q), _log_pullback(k, omega, d_k * phi_k), d_v


def linear_pullback(q: Any, k: Any, v: Any, g: Any) -> Arrays:
    """Of linear attention with elu + 1."""
    q, k, v, g = _double(q, k, v, g)
    d_q, d_k, d_v = _features_pullback(_elu(q), _elu(k), v, g, True)
    return d_q * np.minimum(_elu(q), 1), d_k * np.minimum(_elu(k), 1), d_v


def linear_randomized_pullback(q: Any, k: Any, v: Any, g: Any, omega: Any) -> Arrays:
    """Of LARA with as many chunks as frequencies, which are given; their centres move."""
    q, k, v, g, omega = _double(q, k, v, g, omega)
    centres = chunk_centres(q, k, omega.shape[-2])
    log_ratio = _log_ratio(omega, centres)
    log_sum = _log_sum_exp(log_ratio)
    phi_q, phi_k, _ = _positive(q, k, omega, -log_sum[..., None, :])
    d_q, d_k, d_v = _features_pullback(phi_q, phi_k, v, g, True)
    d_log_weight = np.sum(d_q * phi_q, axis=-2)
    d_log_ratio = -d_log_weight[..., None] * np.exp(log_ratio - log_sum[..., None])
    d_centres = _t(d_log_ratio) @ omega - np.sum(d_log_ratio, axis=-2)[..., None] * centres
    count = q.shape[-2] // centres.shape[-2]
    d_mean = _kernel_coordinates(np.repeat(d_centres / count, count, axis=-2))
    return (
        _log_pullback(q, omega, d_q * phi_q) + d_mean,
        _log_pullback(k, omega, d_k * phi_k) + d_mean,
        d_v,
    )


def _by_head(pull: Callable[..., Arrays], *arrays: np.ndarray) -> Arrays:
    """One head after another: the kernels of all would not fit."""
    heads = [pull(*head) for head in zip(*arrays, strict=True)]
    return tuple(map(np.stack, zip(*heads, strict=True)))


def _features_pullback(phi_q: Any, phi_k: Any, v: Any, g: Any, visible: Any) -> Arrays:
    """Cotangents of features, whose products are the kernel, and of values."""

    def pull(phi_q: Any, phi_k: Any, v: Any, g: Any) -> Arrays:
        kernel = np.where(visible, phi_q @ _t(phi_k), 0)
        d_kernel, d_v = _average_pullback(kernel, v, g)
        d_kernel = np.where(visible, d_kernel, 0)
        return d_kernel @ phi_k, _t(d_kernel) @ phi_q, d_v

    return _by_head(pull, phi_q, phi_k, v, g)


def _average_pullback(kernel: Any, v: Any, g: Any) -> Arrays:
    """Cotangents of the kernel and of the values of `_average`."""
    of_out = np.sum(g * _average(kernel, v), axis=-1, keepdims=True)
    g = g / np.sum(kernel, axis=-1, keepdims=True)
    return g @ _t(v) - of_out / np.sum(kernel, axis=-1, keepdims=True), _t(kernel) @ g


def _log_pullback(x: Any, omega: Any, d_log: Any) -> np.ndarray:
    """Cotangent of x from that of the log features ``omega . x - |x|^2 / 2``."""
    total = np.sum(d_log, axis=-1, keepdims=True)
    return _kernel_coordinates(d_log @ omega - total * _kernel_coordinates(x))


def _positive(q: Any, k: Any, omega: Any, log_weight: Any) -> Arrays:
    """Positive features of queries and of keys, and the log of a scale per query.

    The factor exp(-|q|^2/2) is left out.
    """
    q, k = _kernel_coordinates(q), _kernel_coordinates(k)
    log_k = k @ _t(omega) - _half_square_norm(k)[..., None]
    base = np.max(log_k, axis=-2, keepdims=True)
    log_q = q @ _t(omega) + log_weight + base
    log_scale = np.max(log_q, axis=-1, keepdims=True)
    return np.exp(log_q - log_scale), np.exp(log_k - base), log_scale[..., 0]


def _performer(q: Any, k: Any, omega: Any) -> Arrays:
    """Features of Performer below their maxima, without the constant."""
    x, y = (_kernel_coordinates(z) for z in (q, k))
    log_q, log_k = (z @ _t(omega) - _half_square_norm(z)[..., None] for z in (x, y))
    base_q = np.max(x @ _t(omega), axis=-1, keepdims=True)
    base_k = np.max(y @ _t(omega), axis=(-1, -2), keepdims=True)
    size = math.sqrt(omega.shape[-2])
    return np.exp(log_q - base_q) / size, np.exp(log_k - base_k) / size


def _elu(x: Any) -> np.ndarray:
    """Elu + 1."""
    return np.asarray(np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))))


def _log_ratio(omega: Any, centres: Any) -> np.ndarray:
    """Log of each proposal over N(0, I) at each frequency."""
    return np.asarray(omega @ _t(centres) - _half_square_norm(centres)[..., None, :])


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
