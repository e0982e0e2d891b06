"""Random features outside the log domain, stabilised by the maxima that most code takes."""

from __future__ import annotations

import numpy as np

from .....arrays.library import Array
from .....naive.terms import half_square_norm, products
from .stabilised import normalised


def log_kernel(q: Array, k: Array, omega: Array, log_weight: Array) -> Array:
    """Not a logarithm here: products of features, which `average` takes."""
    log_q = products(q, omega) + log_weight
    log_k = products(k, omega) - np.matrix_transpose(half_square_norm(k))
    phi_q = np.exp(log_q - np.max(log_q, axis=-1, keepdims=True))
    phi_k = np.exp(log_k - np.max(log_k, axis=(-1, -2), keepdims=True))
    return products(phi_q, phi_k) / omega.shape[-2]


def average(kernel: Array, v: Array, seen: Array) -> Array:
    """Mean of the values of the keys seen, with weights that are not logarithms."""
    weights = np.where(seen, kernel, 0.0)
    return normalised(weights, v, seen)
