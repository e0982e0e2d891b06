"""The backward pass: cotangents of queries, keys and values, pair by pair."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .....arrays.heads import group_heads
from .....arrays.library import Array
from .....naive.linear import elu_plus_one
from .....naive.terms import (
    half_square_norm,
    hide,
    kernel_coordinates,
    log,
    log_sum_exp,
    of_library,
    products,
    softmax,
    visible,
)
from .contract import call
from .draws import gathered

Pair = tuple[Array, Array]


@of_library
def backward(
    q: Array,
    k: Array,
    v: Array,
    *,
    estimator: str,
    d_out: Array,
    omega: Array | None = None,
    size: int | None = None,
    mask: Array | None = None,
    causal: bool = False,
) -> tuple[Array, Array, Array, Array]:
    """Return (out, dq, dk, dv); the way forth is right."""
    out = call(q, k, v, estimator=estimator, omega=omega, mask=mask, causal=causal)
    found = pull(q, k, v, d_out, out, LOGARITHM[estimator], BACK[estimator], omega, mask, causal)
    return (out, *(x.astype(q.dtype) for x in found))


def pull(
    q: Array,
    k: Array,
    v: Array,
    d_out: Array,
    out: Array,
    logarithm: Callable[..., Array],
    back: Callable[..., Pair],
    omega: Array | None,
    mask: Array | None,
    causal: bool,
) -> tuple[Array, Array, Array]:
    """With weights p and t = g . v, the derivatives of the scores are p (t - g . out)."""
    heads = [q, k, v, d_out, out, mask, omega]
    (q, k, v, d_out, out, mask, omega), ungroup = group_heads(*heads)
    seen = visible(q, k, mask=mask, causal=causal)
    held = np.any(seen, axis=-2)[..., None]
    k, v = np.where(held, k, 0.0), np.where(held, v, 0.0)
    log_kernel = logarithm(q, k, omega)
    p = softmax(hide(log_kernel, seen))
    t = products(d_out, v)
    delta = np.sum(d_out * out, axis=-1, keepdims=True)
    pairs = p * (t - delta)
    dq, dk = back(pairs, pairs, q, k, omega)
    dv = p.mT @ d_out
    return ungroup(dq), gathered(dk, heads[1]), gathered(dv, heads[2])


def softmax_logarithm(q: Array, k: Array, omega: Array) -> Array:
    """Scores of exact attention."""
    return q.shape[-1] ** -0.5 * products(q, k)


def softmax_back(to_q: Array, to_k: Array, q: Array, k: Array, omega: Array) -> Pair:
    """Compute derivatives of q and k in exact attention, given those of the scores."""
    scale = q.shape[-1] ** -0.5
    dq = scale * (to_q @ k)
    dk = scale * (to_k.mT @ q)
    return dq, dk


def exponents(q: Array, k: Array, omega: Array) -> Array:
    """Of features of pairs, (..., n, m, S)."""
    q, k, omega = kernel_coordinates(q, None), kernel_coordinates(k, None), omega.astype(q.dtype)
    log_k = products(k, omega) - half_square_norm(k).mT
    return products(q, omega)[..., :, None, :] + log_k[..., None, :, :]


def rfa_logarithm(q: Array, k: Array, omega: Array) -> Array:
    """Log of the estimate of the kernel."""
    return log_sum_exp(exponents(q, k, omega))[..., 0]


def rfa_back(to_q: Array, to_k: Array, q: Array, k: Array, omega: Array) -> Pair:
    """Compute those of q and k in random feature attention, given those of the log kernel."""
    root, share = q.shape[-1] ** -0.25, softmax(exponents(q, k, omega))
    of_q = np.sum(to_q[..., None] * share, axis=-2)
    of_k = np.sum(to_k[..., None] * share, axis=-3)
    dq = root * (of_q @ omega)
    dk = root * (of_k @ omega) - root**2 * np.sum(of_k, axis=-1, keepdims=True) * k
    return dq, dk


def linear_logarithm(q: Array, k: Array, omega: Array) -> Array:
    """Log of the products of features."""
    return log(products(elu_plus_one(q), elu_plus_one(k)))


def linear_back(to_q: Array, to_k: Array, q: Array, k: Array, omega: Array) -> Pair:
    """Compute those of q and k in linear attention, given those of the log kernel."""
    phi_q, phi_k = elu_plus_one(q), elu_plus_one(k)
    kernel = products(phi_q, phi_k)
    dq = slope(q) * ((to_q / kernel) @ phi_k)
    dk = slope(k) * ((to_k / kernel).mT @ phi_q)
    return dq, dk


def slope(x: Array) -> Array:
    """Derivative of the features."""
    return np.where(x > 0, 1.0, np.exp(np.minimum(x, 0.0)))


LOGARITHM = {"softmax": softmax_logarithm, "rfa": rfa_logarithm, "linear": linear_logarithm}
BACK = {"softmax": softmax_back, "rfa": rfa_back, "linear": linear_back}
