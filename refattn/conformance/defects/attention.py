"""Dense attention step by step, and what its steps share."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .frequencies import Sampler

Array = Any

TRIGONOMETRIC = {"features": "trigonometric"}


def square(x: Array) -> Array:
    """Squared lengths of the rows."""
    return np.sum(x * x, axis=-1)


def as_it_lies(x: Array) -> Array:
    """The array read as it lies in memory, as if it were contiguous."""
    held = x if x.base is None else x.base
    if x.flags.c_contiguous or not held.flags.c_contiguous or held.size < x.size:
        return x
    return held.reshape(-1)[: x.size].reshape(x.shape)


def log_sum_exp(x: Array) -> Array:
    """Logarithm of the sum of e^x over the last axis."""
    top = x.max(-1, keepdims=True)
    return top[..., 0] + np.log(np.exp(x - top).sum(-1))


class Draws(NamedTuple):
    """What the caller says about frequencies: given ones, or how many and from which seed.

    The number may be that of keys, and of chunks it is their length. Keys may be given by their
    indices.
    """

    omega: Array | None
    centres: Array | None
    number: int | None
    seed: int | None
    indices: Array | None = None
    log_probability: Array | None = None


class Attention(Sampler):
    """Dense attention: weights over the visible keys, then the weighted mean of the values."""

    def __call__(
        self,
        q: Array,
        k: Array,
        v: Array,
        *,
        omega: Array | None = None,
        centres: Array | None = None,
        num_features: int | None = None,
        num_samples: int | None = None,
        num_proposals: int | None = None,
        num_keys: int | None = None,
        window: int | None = None,
        seed: int | None = None,
        indices: Array | None = None,
        log_probability: Array | None = None,
        mask: Array | None = None,
        causal: bool = False,
    ) -> Array:
        k, v = self.share(q, k), self.share(q, v)
        visible = self.visible(q.shape[-2], k.shape[-2], mask, causal)
        number = num_features or num_samples or num_proposals or num_keys or window
        draws = Draws(omega, centres, number, seed, indices, log_probability)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            return self.attend(q, k, v, visible, draws).astype(q.dtype)

    def share(self, q: Array, x: Array) -> Array:
        """Repeat the G heads of keys or values for the H heads of queries."""
        if q.ndim < 3 or x.ndim < 3 or x.shape[-3] in (1, q.shape[-3]):
            return x
        return self.repeat(x, q.shape[-3] // x.shape[-3])

    def repeat(self, x: Array, times: int) -> Array:
        """Consecutive query heads share a key head."""
        return np.repeat(x, times, axis=-3)

    def visible(self, n: int, m: int, mask: Array | None, causal: bool) -> Array:
        """Which query sees which key, shape (..., n, m)."""
        seen = np.ones((n, m), bool) if mask is None else np.ones((n, m), bool) & self.mask(mask)
        return seen & self.past(np.arange(n)[:, None], np.arange(m), m - n) if causal else seen

    def mask(self, mask: Array) -> Array:
        """True where the query attends to the key."""
        return mask

    def past(self, i: Array, j: Array, shift: int) -> Array:
        """Keys up to the query; the last query sees the last key."""
        return j <= i + shift

    def attend(self, q: Array, k: Array, v: Array, visible: Array, draws: Draws) -> Array:
        """The output, shape (..., n, d_v)."""
        return self.average(self.weights(q, k, visible, draws), v, visible)

    def weights(self, q: Array, k: Array, visible: Array, draws: Draws) -> Array:
        """Weights up to a factor for each query, 0 where hidden."""
        raise NotImplementedError

    def average(self, weights: Array, v: Array, visible: Array) -> Array:
        """The weighted mean; 0 for queries that see no key."""
        total = np.where(visible.any(-1, keepdims=True), self.total(weights, visible), 1)
        return self.sum(weights, v, visible) / total.astype(v.dtype)

    def total(self, weights: Array, visible: Array) -> Array:
        """The normaliser, shape (..., n, 1)."""
        return weights.sum(-1, keepdims=True)

    def sum(self, weights: Array, v: Array, visible: Array) -> Array:
        """The weighted sum; what is in a hidden value does not matter."""
        return (weights[..., None] * np.where(visible[..., None], v[..., None, :, :], 0)).sum(-2)
