"""Attention to near keys exactly, and to what stands for far ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ....arrays.library import Floats
from .digits import context, map_numbers, numbers
from .features import divide_by_sum, estimate_matrix, log_positive_feature
from .softmax import Scale, root, softmax_mean


def eva_attention(
    q: Any,
    k: Any,
    v: Any,
    visible: Any = True,
    *,
    window: int,
    omega: Any = None,
    log_size: bool = True,
    causal: bool = False,
    scale: Scale = None,
    dps: int = 50,
) -> Floats:
    """Attend to the own chunk's keys and one summary of each other: arXiv:2302.04542.

    visible, (m,), is the same for all queries.

    Examples
    --------
    >>> q, k, v = np.zeros((3, 1)), np.zeros((3, 1)), np.array([[0.0], [1.0], [5.0]])
    >>> float(eva_attention(q, k, v, window=2)[0, 0])
    2.0
    """
    mp, r = context(dps), root(scale, q.shape[-1], dps=dps)
    queries, keys, values = numbers(q, dps=dps) * r, numbers(k, dps=dps) * r, numbers(v, dps=dps)

    def summary(c: int, i: int, members: list[int]) -> tuple[Any, Floats]:
        some = keys[members]
        mean, rows = some.sum(0) / len(members), _of_chunk(q, k, window, c)
        centre = mean + (queries[rows].sum(0) / len(rows) if rows else 0)
        at = centre if omega is None else numbers(omega, dps=dps)[c]
        scores = log_positive_feature(some, at[None]).T
        value = softmax_mean(scores, values[members], dps=dps)[0][0]
        size = mp.log(len(members)) if log_size else mp.mpf(0)
        return queries[i] @ mean + size, value

    return _attend_by_chunks(queries, keys, values, visible, window, causal, summary)


def second_order_attention(
    q: Any,
    k: Any,
    v: Any,
    visible: Any = True,
    *,
    window: int,
    causal: bool = False,
    scale: Scale = None,
    dps: int = 50,
) -> Floats:
    """Attend to the keys of the own chunk and to the moments of each other.

    visible, (m,), is the same for all queries.

    Examples
    --------
    >>> q, k, v = np.zeros((3, 1)), np.zeros((3, 1)), np.array([[0.0], [1.0], [5.0]])
    >>> float(second_order_attention(q, k, v, window=2)[0, 0])
    2.0
    """
    mp, r = context(dps), root(scale, q.shape[-1], dps=dps)
    queries, keys, values = numbers(q, dps=dps) * r, numbers(k, dps=dps) * r, numbers(v, dps=dps)

    def summary(c: int, i: int, members: list[int]) -> tuple[Any, Floats]:
        along, some, size = keys[members] @ queries[i], values[members], len(members)
        mean, value = along.sum() / size, some.sum(0) / size
        apart = along - mean
        score = mean + apart @ apart / (2 * size) + mp.log(size)
        return score, value + apart @ (some - value) / size

    return _attend_by_chunks(queries, keys, values, visible, window, causal, summary)


def _attend_by_chunks(
    q: Floats,
    k: Floats,
    v: Floats,
    visible: Any,
    window: int,
    causal: bool,
    summary: Callable[[int, int, list[int]], tuple[Any, Floats]],
) -> Floats:
    """Average the values of the own chunk and summaries of others, query by query."""
    (n, m), seen = (len(q), len(k)), np.broadcast_to(visible, (len(k),))
    rows = []
    for i in range(n):
        at = i + m - n
        chunk = at // window
        near = [j for j in range(m) if seen[j] and j // window == chunk and (j <= at or not causal)]
        pairs = [(q[i] @ k[j], v[j]) for j in near]
        for c in range(-(-m // window)):
            members = [j for j in range(m) if seen[j] and j // window == c]
            if members and (c < chunk or (c > chunk and not causal)):
                pairs.append(summary(c, i, members))
        if not pairs:
            rows.append(0 * v[:1].sum(0))
            continue
        scores, values = zip(*pairs, strict=True)
        rows.append(softmax_mean(np.array([scores], dtype=object), np.stack(values))[0][0])
    return np.stack(rows)


def _of_chunk(q: Any, k: Any, window: int, c: int) -> list[int]:
    """Return queries of a chunk: the last query is level with the last key."""
    n, m = len(q), len(k)
    return [i for i in range(n) if (i + m - n) // window == c]


def local_random_feature_attention(
    q: Any,
    k: Any,
    v: Any,
    omega: Any,
    visible: Any = True,
    scale: Scale = None,
    *,
    window: tuple[int | None, int | None],
    dps: int = 50,
) -> Floats:
    """Attend with the exact kernel in a window and the estimated one outside.

    Examples
    --------
    >>> q, k, v, omega = (np.array([[x]]) for x in (0.0, 0.0, 4.0, 1.0))
    >>> options = {"window": (None, None)}
    >>> float(local_random_feature_attention(q, k, v, omega, **options)[0, 0])
    4.0
    """
    mp, r = context(dps), root(scale, q.shape[-1], dps=dps)
    n, m = len(q), len(k)
    ahead = np.arange(m) - np.arange(n)[:, None] - (m - n)
    left, right = (m + n if side is None else side for side in window)
    near = (-left <= ahead) & (ahead <= right)
    estimate = estimate_matrix(q, k, omega, 0.0, "positive", r, dps)
    kernel = map_numbers(mp.exp, (numbers(q, dps=dps) * r) @ (numbers(k, dps=dps) * r).T)
    return divide_by_sum(np.where(near, kernel, estimate), v, visible, dps)
