"""Exact attention with dropout, forward and backward."""

from __future__ import annotations

from typing import Any

import numpy as np

from .....arrays.heads import group_heads, grouped_lead
from .....arrays.library import Array
from .....naive.softmax import softmax_attention
from .....naive.terms import hide, of_library, products, softmax, visible
from .draws import gathered

Generator = np.random.Generator


@of_library
def call(
    q: Array,
    k: Array,
    v: Array,
    *,
    estimator: str,
    d_out: Array | None = None,
    dropout: float = 0.0,
    seed: int = 0,
    size: int | None = None,
    mask: Array | None = None,
    causal: bool = False,
) -> Any:
    """Return (out, dq, dk, dv), or out alone."""
    rng, shape = np.random.default_rng(seed), (*grouped_lead(q, k, v), q.shape[-2], k.shape[-2])
    r = factors(uniform(rng, shape), dropout).astype(q.dtype)
    if d_out is None:
        return softmax_attention(q, k, v, mask=mask, causal=causal, dropout=r)
    return pull(q, k, v, d_out, r, back(r, rng, dropout).astype(q.dtype), mask, causal)


def uniform(rng: Generator, shape: tuple[int, ...]) -> Array:
    """A number in [0, 1) for each weight."""
    return rng.random(shape)


def factors(u: Array, rate: float) -> Array:
    """0 where a weight is dropped, 1 / (1 - p) where it is kept."""
    return (u >= rate) / (1 - rate)


def back(r: Array, rng: Generator, rate: float) -> Array:
    """The factors in the backward pass."""
    return r


def pull(
    q: Array,
    k: Array,
    v: Array,
    d_out: Array,
    r: Array,
    r_back: Array,
    mask: Array | None,
    causal: bool,
) -> tuple[Array, Array, Array, Array]:
    """With weights p, the derivatives of the scores are p (r g . v - g . out)."""
    out = softmax_attention(q, k, v, mask=mask, causal=causal, dropout=r)
    given = [q, k, v, d_out, out, r_back, mask]
    (q, k, v, d_out, o, r, mask), ungroup = group_heads(*given)
    seen, scale = visible(q, k, mask=mask, causal=causal), q.shape[-1] ** -0.5
    held = np.any(seen, axis=-2)[..., None]
    k, v = np.where(held, k, 0.0), np.where(held, v, 0.0)
    p = softmax(hide(scale * products(q, k), seen))
    pairs = scale * p * (r * products(d_out, v) - np.sum(d_out * o, axis=-1, keepdims=True))
    dk, dv = pairs.mT @ q, (p * r).mT @ d_out
    return out, ungroup(pairs @ k), gathered(dk, given[1]), gathered(dv, given[2])
