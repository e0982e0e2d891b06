"""How an implementation draws keys: pivots of a coreset, and samples with their probabilities."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .....arrays.library import Array
from .....naive.terms import kernel_coordinates
from .draws import Generator


def of_heads(
    draw: Callable[..., dict[str, Array]], q: Array, k: Array, v: Array, count: int, rng: Generator
) -> dict[str, Array]:
    """Draw for one head of queries after the other."""
    lead = np.broadcast_shapes(q.shape[:-2], k.shape[:-2])
    q, k, v = (
        np.broadcast_to(x, (*lead, *x.shape[-2:]))
        for x in (kernel_coordinates(q, None), kernel_coordinates(k, None), v)
    )
    found = [draw(q[at], k[at], v[at], count, rng) for at in np.ndindex(*lead)]
    stacked = {name: np.stack([x[name] for x in found]) for name in found[0]}
    return {name: x.reshape(*lead, *x.shape[1:]) for name, x in stacked.items()}


def pivots(q: Array, k: Array, v: Array, count: int, rng: Generator) -> dict[str, Array]:
    """Keys in turn, each by what those before leave of the diagonal of their kernel."""
    gram, chosen = np.exp(-np.sum((k[:, None] - k) ** 2, axis=-1) / 2), list[int]()
    for _ in range(count):
        left = residual(gram, chosen)
        left[chosen] = 0
        chosen.append(int(rng.choice(len(k), p=left / np.sum(left))))
    return {"indices": np.array(chosen)}


def residual(gram: Array, chosen: list[int]) -> Array:
    """What the chosen keys leave of the diagonal."""
    some = gram[chosen]
    known = np.linalg.solve(some[:, chosen], some) if chosen else some
    return np.maximum(np.diagonal(gram) - np.sum(some * known, axis=0), 1e-300)


def by_probability(p: Array, count: int, rng: Generator) -> dict[str, Array]:
    """A systematic sample, in which key j is expected p_j times."""
    at = np.minimum(np.searchsorted(np.cumsum(p), points(count, rng), "right"), len(p) - 1)
    return {"indices": at, "log_probability": np.log(p[at])}


def points(count: int, rng: Generator) -> Array:
    """Where the cumulative probabilities are met."""
    return rng.random() + np.arange(count)


def uniform_keys(q: Array, k: Array, v: Array, count: int, rng: Generator) -> dict[str, Array]:
    """Keys alike."""
    return by_probability(np.full(len(k), count / len(k)), count, rng)


def keys_by_norms(q: Array, k: Array, v: Array, count: int, rng: Generator) -> dict[str, Array]:
    """Half uniform, half by the squared norms of values; none is expected more than once."""
    square = np.sum(v * v, axis=-1)
    share, full = 1 / len(v) + square / np.sum(square), np.zeros(len(v), bool)
    while True:  # shares that are cut at 1 leave more to the others
        rest = np.maximum(np.sum(share[~full]), 1e-300)
        p = np.where(full, 1, share * (count - np.sum(full)) / rest)
        if not np.any(more := (p > 1) & ~full):
            return by_probability(p, count, rng)
        full |= more


def keys_by_softmax(q: Array, k: Array, v: Array, count: int, rng: Generator) -> dict[str, Array]:
    """Independent keys of each query from its softmax."""
    scores = q @ k.T
    log_p = scores - np.max(scores, axis=-1, keepdims=True)
    log_p = log_p - np.log(np.sum(np.exp(log_p), axis=-1, keepdims=True))
    u, up_to = rng.random((len(q), count)), np.cumsum(np.exp(log_p), axis=-1)
    at = np.minimum(np.sum(up_to[:, None, :] <= u[..., None], axis=-1), len(k) - 1)
    return {"indices": at, "log_probability": np.log(count) + np.take_along_axis(log_p, at, -1)}


KEYS: dict[str, Any] = {
    "coreset": pivots,
    "sampled-uniform": uniform_keys,
    "sampled-norms": keys_by_norms,
    "sampled-softmax": keys_by_softmax,
}
