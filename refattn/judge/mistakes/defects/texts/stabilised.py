"""The mean as most code takes it: exponentials less the largest, then a quotient."""

from __future__ import annotations

import numpy as np

from .....arrays.library import Array
from .....naive.doors import any_scale, formula
from .....naive.terms import finite, hide, products, visible, weighted_sum


def average(scores: Array, v: Array, seen: Array) -> Array:
    """Mean of the values of the keys seen, with weights e^score; 0 if there are none."""
    top = finite(np.max(hide(scores, seen), axis=-1, keepdims=True, initial=-np.inf))
    weights = np.where(seen, np.exp(scores - top), 0.0)
    return normalised(weights, v, seen)


@formula(any_scale)
def softmax_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float | None = None,
    mask: Array | None = None,
    causal: bool = False,
) -> Array:
    """Exact attention without options."""
    seen = visible(q, k, mask=mask, causal=causal)
    return average(scale * products(q, k), v, seen)


def ratio(kernel: Array, log_scale: Array, v: Array, seen: Array) -> Array:
    """Mean of the values of the keys seen, with weights kernel e^log_scale of either sign."""
    weights = np.where(seen, kernel * np.exp(log_scale), 0.0)
    return normalised(weights, v, seen)


def normalised(weights: Array, v: Array, seen: Array) -> Array:
    """Divide the sum of the values by that of the weights."""
    total = np.sum(weights, axis=-1, keepdims=True)
    some = np.any(seen, axis=-1, keepdims=True)
    return weighted_sum(weights, v, seen) / np.where(some, total, 1.0)
