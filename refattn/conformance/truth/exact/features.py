"""Estimators by features: kernel estimates, RFA, RA, LARA and linear attention."""

from __future__ import annotations

from typing import Any

import numpy as np

from ....arrays.library import Floats
from .digits import context, map_numbers, numbers
from .softmax import Scale, root, softmax_mean


def log_positive_feature(x: Floats, omega: Floats) -> Floats:
    """Evaluate log xi(x_i, omega_s): reference 002, eq. (9), for exact numbers."""
    return np.asarray(x @ omega.T - (x * x).sum(-1)[:, None] / 2)


def log_kernel_estimate(
    q: Any, k: Any, omega: Any, log_weight: Any = 0.0, *, dps: int = 50
) -> Floats:
    """Evaluate log sum_s w_s xi(q_i, omega_s) xi(k_j, omega_s), but for exp(-|q_i|^2/2)."""
    mp, weight = context(dps), numbers(np.broadcast_to(log_weight, omega.shape[:1]), dps=dps)
    q, k, omega = (numbers(x, dps=dps) for x in (q, k, omega))
    a, b = q @ omega.T + weight, log_positive_feature(k, omega)
    return np.array(
        [[mp.log(sum(mp.exp(x) for x in a_i + b_j)) for b_j in b] for a_i in a], dtype=object
    )


def feature_map(x: Floats, omega: Floats, features: str, *, dps: int = 50) -> Floats:
    """Evaluate feature maps (n, F): reference 001; reference 002, (8) and (9)."""
    mp, half = context(dps), (x * x).sum(-1)[:, None] / 2
    product = x @ omega.T
    if features == "positive":
        return map_numbers(mp.exp, product - half)
    if features == "hyperbolic":
        both = np.concatenate([product, -product], axis=1)
        return np.asarray(map_numbers(mp.exp, both - half) / mp.sqrt(2))
    if features == "trigonometric":
        waves = np.concatenate([map_numbers(mp.cos, product), map_numbers(mp.sin, product)], axis=1)
        return np.asarray(map_numbers(mp.exp, half) * waves)
    raise ValueError(f"`features` must be positive, hyperbolic or trigonometric, got {features!r}.")


def estimate_matrix(
    x: Any, y: Any, omega: Any, log_weight: Any, features: str, root: Any, dps: int
) -> Floats:
    """Evaluate (1/S) sum_s w_s phi_s(x_i) . phi_s(y_j): reference 002, eq. (7)."""
    count, omega = len(omega), numbers(omega, dps=dps)
    weight = map_numbers(context(dps).exp, numbers(np.broadcast_to(log_weight, (count,)), dps=dps))
    a, b = (feature_map(numbers(z, dps=dps) * root, omega, features, dps=dps) for z in (x, y))
    return np.asarray((a * np.tile(weight, a.shape[1] // count)) @ b.T / count)


def kernel_estimate(
    x: Any, y: Any, omega: Any, *, features: str = "positive", log_weight: Any = 0.0, dps: int = 50
) -> Floats:
    """Estimate exp(x_i . y_i) from features, for each pair of rows: reference 002, eq. (7).

    Examples
    --------
    >>> one = np.ones((1, 1))
    >>> float(kernel_estimate(one, one, one)[0])  # e
    2.718281828459045
    """
    pairs = (
        estimate_matrix(x[i : i + 1], y[i : i + 1], omega, log_weight, features, 1, dps)[0]
        for i in range(len(x))
    )
    return np.concatenate(list(pairs))


def divide_by_sum(kernel: Floats, v: Any, visible: Any, dps: int) -> Floats:
    """Evaluate sum_j kernel_ij v_j / sum_j kernel_ij over visible keys: reference 000.

    0 for a query that sees no key.
    """
    visible = np.broadcast_to(visible, kernel.shape)
    out = np.full((len(kernel), v.shape[-1]), context(dps).mpf(0), dtype=object)
    for i, seen in enumerate(visible):
        if seen.any():
            out[i] = kernel[i, seen] @ numbers(v[seen], dps=dps) / kernel[i, seen].sum()
    return out


def random_feature_attention(
    q: Any,
    k: Any,
    v: Any,
    omega: Any,
    log_weight: Any = 0.0,
    visible: Any = True,
    scale: Scale = None,
    *,
    features: str = "positive",
    dps: int = 50,
) -> Floats:
    """Attend with the estimated kernel (RFA): reference 002, eq. (10); reference 003.

    Examples
    --------
    >>> q, k, v = np.array([[9.0]]), np.array([[0.0], [1.0]]), np.array([[0.0], [1.0]])
    >>> float(random_feature_attention(q, k, v, np.array([[0.5]]))[0, 0])
    0.5
    """
    r = root(scale, q.shape[-1], dps=dps)
    kernel = estimate_matrix(q, k, omega, log_weight, features, r, dps)
    return divide_by_sum(kernel, v, visible, dps)


def randomized_attention(
    q: Any, k: Any, v: Any, omega: Any, visible: Any = True, scale: Scale = None, *, dps: int = 50
) -> Floats:
    """Average sum_j xi(k_j) v_j / sum_j xi(k_j) over the samples: reference 003, RA.

    omega has shape (n, S, d).

    Examples
    --------
    >>> q, k, v = np.array([[9.0]]), np.array([[-1.0], [1.0]]), np.array([[0.0], [1.0]])
    >>> float(randomized_attention(q, k, v, np.array([[[0.5]]]))[0, 0])  # e / (1 + e)
    0.7310585786300049
    """
    keys = numbers(k, dps=dps) * root(scale, q.shape[-1], dps=dps)
    visible = np.broadcast_to(visible, (len(q), len(k)))
    rows = []
    for i in range(len(q)):
        scores = log_positive_feature(keys, numbers(omega[i], dps=dps)).T
        f = softmax_mean(scores, numbers(v, dps=dps), visible[i], dps=dps)[0]
        rows.append(f.sum(0) / len(f))
    return np.stack(rows)


def linear_randomized_attention(
    q: Any,
    k: Any,
    v: Any,
    omega: Any,
    centres: Any,
    visible: Any = True,
    scale: Scale = None,
    *,
    dps: int = 50,
) -> Floats:
    """Attend with weights N(omega; 0, I) / sum_c N(omega; mu_c, I): reference 003, LARA.

    Examples
    --------
    >>> q, k, v = np.array([[9.0]]), np.array([[-1.0], [1.0]]), np.array([[0.0], [1.0]])
    >>> omega, centres = np.array([[0.5]]), np.array([[2.0]])
    >>> float(linear_randomized_attention(q, k, v, omega, centres)[0, 0])
    0.7310585786300049
    """
    mp = context(dps)
    densities = log_positive_feature(numbers(centres, dps=dps), numbers(omega, dps=dps)).T
    log_weight = np.array([-mp.log(sum(map(mp.exp, row))) for row in densities], dtype=object)
    return random_feature_attention(q, k, v, omega, log_weight, visible, scale, dps=dps)


def elu_plus_one(x: Any, *, dps: int = 50) -> Floats:
    """Evaluate x + 1 for x > 0 and e^x otherwise: reference 004, phi, with alpha = 1.

    Examples
    --------
    >>> elu_plus_one(np.array([2.0, 0.0]))
    array([mpf('3.0'), mpf('1.0')], dtype=object)
    """
    mp = context(dps)
    return map_numbers(lambda e: e + 1 if e > 0 else mp.exp(e), numbers(x, dps=dps))


def linear_attention(q: Any, k: Any, v: Any, visible: Any = True, *, dps: int = 50) -> Floats:
    """Attend with the kernel phi(q) . phi(k), phi = elu + 1: reference 004.

    Examples
    --------
    >>> q, k, v = np.zeros((1, 2)), np.array([[0.0, 0.0], [2.0, 2.0]]), np.array([[0.0], [4.0]])
    >>> linear_attention(q, k, v)  # kernels 2 and 6
    array([[mpf('3.0')]], dtype=object)
    """
    return divide_by_sum(elu_plus_one(q, dps=dps) @ elu_plus_one(k, dps=dps).T, v, visible, dps)
