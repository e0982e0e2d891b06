"""Check frequencies and their proposals, and bring them to the library of the queries."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import checks
from .checks import shape_of
from .library import Array, array_namespace


def shared(
    omega: Any,
    log_weight: Any,
    like: Array,
    outer: tuple[int, ...] | None = None,
    name: str = "omega",
) -> tuple[Array, Array]:
    """Check frequencies (..., S, d) and log weights (..., S), and bring them to `like`.

    Both may be NumPy arrays, whatever `like`, an array (..., d), is. Leading axes broadcast to
    `outer` if that is given.
    """
    d = like.shape[-1]
    omega = checks.floats(name, omega, like)
    log_weight = checks.floats(
        "log_weight", np.zeros(1) if log_weight is None else log_weight, like
    )
    if omega.ndim < 2 or omega.shape[-1] != d or omega.shape[-2] < 1:
        raise ValueError(
            f"`{name}` must have shape (..., S, {d}) with S >= 1, got {shape_of(omega)}."
        )
    samples = omega.shape[-2]
    if outer is None:
        outer = shape_of(omega)[:-2]
    checks.broadcasts(name, omega, (*outer, samples, d), "(..., S, d)")
    checks.broadcasts("log_weight", log_weight, (*outer, samples), "(..., S)")
    shape = (*shape_of(log_weight)[:-1], samples)
    return omega, array_namespace(omega).broadcast_to(log_weight, shape)


def at_means(omega: Any, rng: Any = None) -> bool:
    """Say whether frequencies are the means of their distributions: then nothing is drawn."""
    if not isinstance(omega, str):
        return False
    if omega != "mean":
        raise ValueError(f'`omega` must be an array or "mean", got {omega!r}.')
    if rng is not None:
        raise ValueError(
            '`rng` must be None with `omega="mean"`, with which nothing is drawn, '
            f"got {checks.describe(rng)}."
        )
    return True


def of_queries(omega: Any, q: Array, outer: tuple[int, ...]) -> Array:
    """Check frequencies (..., n, S, d) of each query, and bring them to `q`."""
    omega = checks.floats("omega", omega, q)
    n, d = q.shape[-2:]
    shape = shape_of(omega)
    if omega.ndim < 3 or shape[-1] != d or shape[-2] < 1 or shape[-3] != n:
        raise ValueError(
            f"`omega` must have shape (..., n, S, d) = (..., {n}, S, {d}) with S >= 1, got {shape}."
        )
    checks.broadcasts("omega", omega, (*outer, *shape[-3:]), "(..., n, S, d)")
    return omega


def of_chunks(omega: Any, count: int, like: Array, outer: tuple[int, ...]) -> Array:
    """Check frequencies (..., C, d), one of each chunk, and bring them to `like`."""
    omega = checks.floats("omega", omega, like)
    shape, d = shape_of(omega), like.shape[-1]
    if shape[-2:] != (count, d):
        raise ValueError(
            f"`omega` must have shape (..., C, d) = (..., {count}, {d}) with one frequency for "
            f"each chunk, got {shape}."
        )
    checks.broadcasts("omega", omega, (*outer, count, d), "(..., C, d)")
    return omega


def causal_proposals(centres: Any, weighting: str, mask: Array | None) -> None:
    """Check what causal LARA cannot combine."""
    if centres is not None:
        raise ValueError("`centres` must be None with `causal`: proposals are made of past chunks.")
    if weighting not in ("balance", "own"):
        raise ValueError(
            f'`weighting` must be "balance" or "own" with `causal`, got {weighting!r}.'
        )
    if mask is not None and mask.shape[-2] > 1:
        raise ValueError(
            "`mask` must be the same for all queries, of shape (..., 1, m), with `causal`, "
            f"got shape {shape_of(mask)}."
        )


def samples_of_each(samples: int, count: int) -> int:
    """Check that so many frequencies are a multiple of the proposals, and divide them."""
    if count < 1 or samples % count:
        raise ValueError(
            f"`omega` must hold a multiple of the number of proposals, {count}, "
            f"got {samples} frequencies."
        )
    return samples // count


def over(name: str, proposal: Any, d: int) -> None:
    """Check that a proposal is for frequencies of length d."""
    if proposal.d != d:
        raise ValueError(f"`{name}` must be over vectors of length d = {d}, got {proposal.d}.")


def batch(name: str, shape: tuple[int, ...], outer: tuple[int, ...]) -> None:
    """Check that a batch of proposals broadcasts to the leading axes of q, k and v."""
    try:
        fits = np.broadcast_shapes(shape, outer) == outer
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            f"`{name}` must broadcast to the leading axes of `q`, `k` and `v`, {outer}, "
            f"got a batch of shape {shape}."
        )
