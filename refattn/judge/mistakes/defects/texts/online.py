"""The mean from blocks of four keys, with a running maximum and rescaled sums."""

from __future__ import annotations

import numpy as np

from .....arrays.library import Array
from .....naive.terms import finite, hide, weighted_sum


def average(scores: Array, v: Array, seen: Array) -> Array:
    """Mean of the values of the keys seen, with weights e^score; 0 if there are none."""
    scores, top = hide(scores, seen), np.full((*scores.shape[:-1], 1), -np.inf, scores.dtype)
    total = out = np.zeros((1, 1), scores.dtype)
    for j in range(0, v.shape[-2], 4):
        s, part = scores[..., j : j + 4], v[..., j : j + 4, :]
        new = np.maximum(top, np.max(s, axis=-1, keepdims=True))
        w, keep = np.exp(s - finite(new)), np.exp(top - finite(new))
        total = total * keep + np.sum(w, axis=-1, keepdims=True)
        out = out * keep + weighted_sum(w, part, seen[..., j : j + 4])
        top = new
    return out / np.where(total == 0, 1.0, total)
