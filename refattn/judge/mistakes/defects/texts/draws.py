"""How an implementation draws: frequencies from their laws, and the seed."""

from __future__ import annotations

from typing import Any

import numpy as np

from .....arrays.library import Array
from .....arrays.qkv import key_rows as qkv_key_rows
from .....naive.lara import means_of_proposals
from .....naive.terms import hide, kernel_coordinates, products, softmax

Generator = np.random.Generator


def generator(seed: int | None) -> Generator:
    """Return the source of random numbers."""
    return np.random.default_rng(seed)


def shared(q: Array, k: Array) -> Array:
    """Keys of each query head."""
    times = q.shape[-3] // k.shape[-3] if q.ndim > 2 and k.shape[-3] > 1 else 1
    return np.repeat(k, times, axis=-3) if times > 1 else k


def gathered(x: Array, like: Array) -> Array:
    """Sum over the query heads that share a head of keys."""
    if x.shape == like.shape:
        return x
    heads = x.reshape(*like.shape[:-2], -1, *x.shape[-2:])
    return np.sum(heads, axis=-3)


def of_kernel(q: Array, k: Array, seen: Array, mask: Any, count: int, rng: Generator) -> Array:
    """Frequencies that all queries share."""
    return law(count, q.shape[-1], rng)


def of_target(q: Array, k: Array, seen: Array, mask: Any, count: int, rng: Generator) -> Array:
    """Draw from sum_j softmax_j(q_i . k_j) N(q_i + k_j, I), (..., n, S, d)."""
    q, k = kernel_coordinates(q, None), kernel_coordinates(k, None)
    share = softmax(hide(products(q, k), seen))
    key = np.take_along_axis(k[..., None, :, :], choose(share, count, rng)[..., None], axis=-2)
    centre = q[..., None, :] + key
    return centre + rng.standard_normal(centre.shape)


def choose(share: Array, count: int, rng: Generator) -> Array:
    """Indices in proportion to `share`, by inversion."""
    up_to = np.cumsum(share, axis=-1)
    u = rng.random((*share.shape[:-1], count)) * up_to[..., -1:]
    pick = np.sum(up_to[..., None, :] <= u[..., None], axis=-1)
    return np.minimum(pick, share.shape[-1] - 1)


def of_proposals(q: Array, k: Array, seen: Array, mask: Any, count: int, rng: Generator) -> Array:
    """One frequency of each proposal N(mu_c, I)."""
    q, k = kernel_coordinates(q, None), kernel_coordinates(k, None)
    centres = means_of_proposals(q, k, None, count, qkv_key_rows(mask, k), False)[1]
    return centres + rng.standard_normal(centres.shape)


# A function of its own, so that an edit of one word gives other frequencies.
def law(count: int, d: int, rng: Generator) -> Array:
    """The law of frequencies."""
    return normal(count, d, rng)


def normal(count: int, d: int, rng: Generator) -> Array:
    """N(0, I)."""
    return rng.standard_normal((count, d))


def orthogonal(count: int, d: int, rng: Generator) -> Array:
    """Haar directions, chi norms."""
    return directions(count, d, rng) * norms(count, d, rng)


# The signs of R make Q uniform; without them it is not.
def directions(count: int, d: int, rng: Generator) -> Array:
    """Rows of blocks of a Haar-distributed orthogonal matrix."""
    blocks = []
    for _ in range(-(-count // d)):
        q, r = np.linalg.qr(rng.standard_normal((d, d)))
        blocks.append((q * np.sign(np.diagonal(r))).T)
    return np.concatenate(blocks)[:count]


def norms(count: int, d: int, rng: Generator) -> Array:
    """Norms of standard normal vectors."""
    return np.sqrt(rng.chisquare(d, (count, 1)))


def simplex(count: int, d: int, rng: Generator) -> Array:
    """Corners of turned simplices, chi norms."""
    return corners(count, d, rng) * norms(count, d, rng)


def corners(count: int, d: int, rng: Generator) -> Array:
    """Corners of regular simplices about the origin, each turned by a Haar rotation."""
    z = np.eye(d) - (d > 1) / d
    z = z / np.linalg.norm(z, axis=-1, keepdims=True)
    return np.concatenate([z @ directions(d, d, rng) for _ in range(-(-count // d))])[:count]
