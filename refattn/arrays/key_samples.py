"""Checks of indices of keys, and of how often each is expected in a sample."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import checks
from .checks import shape_of
from .heads import grouped_lead, head_counts
from .library import Array, array_namespace, device, host_values, is_numpy_array


def check_indices(indices: Any, q: Array, k: Array, v: Array, *, of_queries: bool = False) -> Array:
    """Check indices of keys, and bring them to `k`.

    Of shape (..., S), of query heads or of key heads, or `of_queries`, which may have an axis of
    theirs: then (..., n or 1, S).
    """
    checks.whole("indices", indices)
    xp, m, outer = array_namespace(k), k.shape[-2], grouped_lead(q, k, v)
    at = checks.as_array("indices", indices, "(..., S)")
    if not checks.is_of(at, "integral"):
        raise TypeError(
            f"`indices` must hold integers, got {checks.describe(indices)} of {at.dtype}."
        )
    shape, rule = shape_of(at), "(..., S)"
    if not shape or shape[-1] < 1:
        raise ValueError(f"`indices` must have shape (..., S) with S >= 1, got {shape}.")
    core: tuple[int, ...] = shape[-1:]
    if of_queries and len(shape) > len(outer) + 1:
        core, rule = (q.shape[-2], *core), "(..., n, S)"
    elif (groups := head_counts(q, k, v)[1]) > 1 and shape[-2:-1] == (groups,):
        outer = (*outer[:-1], groups)  # of each key head
    checks.broadcasts("indices", at, (*outer, *core), rule)
    if not is_numpy_array(at):
        checks.same_home("indices", at, "k", k)
    values = host_values(at)
    if values is not None and values.size and (values.min() < 0 or values.max() >= m):
        raise ValueError(
            f"`indices` must be from 0 to {m - 1}, got {values.min()} to {values.max()}."
        )
    if is_numpy_array(at):
        at = xp.asarray(at, dtype=xp.int32, device=device(k))
    else:
        at = xp.astype(at, xp.int32)  # shorter integers may not count all keys
    return at[..., None, :] if of_queries and len(core) == 1 else at


def check_samples(
    indices: Any, log_probability: Any, q: Array, k: Array, v: Array
) -> tuple[Array, Array]:
    """Check the sample of each query, (..., n or 1, S), and the log of how often each is in one."""
    at, log_p = check_indices(indices, q, k, v, of_queries=True), log_probability
    log_p = checks.floats("log_probability", np.zeros(1) if log_p is None else log_p, q)
    shape = shape_of(at)
    if log_p.ndim > 1 and len(np.shape(indices)) < len(shape):
        log_p = log_p[..., None, :]
    checks.broadcasts("log_probability", log_p, shape, "the shape of `indices`")
    return at, array_namespace(log_p).broadcast_to(log_p, shape)
