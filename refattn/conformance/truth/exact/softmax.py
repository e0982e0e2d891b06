"""Softmax attention with its options, head by head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ....arrays.library import Floats
from .digits import context, map_numbers, numbers

Scale = float | None  # None for 1/sqrt(d)


def causal_keys(n: int, m: int) -> Floats:
    """Let query i see key j where j <= i + m - n: the last query sees every key.

    Examples
    --------
    >>> causal_keys(2, 3).astype(int)
    array([[1, 1, 0],
           [1, 1, 1]])
    """
    return np.tri(n, m, m - n, dtype=bool)


def softmax_mean(
    scores: Floats,
    v: Floats,
    visible: Any = True,
    sink: Any = None,
    dropout: Any = None,
    *,
    dps: int = 50,
) -> tuple[Floats, Floats]:
    """Average v_j with weights exp(scores_ij), and return their log sum: reference 003.

    A sink is the score of one more value, 0. Factors of dropout are on the weights above, not on
    those in the sum below. A query that sees nothing has mean 0 and log -inf.
    """
    mp, (n, m) = context(dps), scores.shape
    visible = np.broadcast_to(visible, (n, m))
    factor = None if dropout is None else numbers(np.broadcast_to(dropout, (n, m)), dps=dps)
    out = np.full((n, v.shape[-1]), mp.mpf(0), dtype=object)
    lse = np.full(n, -mp.inf, dtype=object)
    for i in range(n):
        seen = [j for j in range(m) if visible[i, j]]
        weights = [mp.exp(scores[i, j]) for j in seen]
        total = sum(weights) + (0 if sink is None else mp.exp(sink))
        if factor is not None:
            weights = [w * factor[i, j] for w, j in zip(weights, seen, strict=True)]
        if seen or sink is not None:
            # Arrays first: a number would take the text of an array before it gives way to it.
            out[i] = out[i] + sum(v[j] * w for w, j in zip(weights, seen, strict=True)) / total
            lse[i] = mp.log(total)
    return out, lse


def attend(
    q: Any,
    k: Any,
    v: Any,
    bias: Any = 0.0,
    visible: Any = True,
    scale: Any = 1,
    *,
    softcap: float | None = None,
    sink: Any = None,
    dropout: Any = None,
    dps: int = 50,
) -> tuple[Floats, Floats]:
    """Return softmax attention and its log normaliser: reference 003.

    With a bias, a cap, a sink and factors of dropout.
    """
    scores = (numbers(q, dps=dps) * scale) @ numbers(k, dps=dps).T
    scores = cap_scores(scores, softcap, dps=dps) + numbers(bias, dps=dps)
    sink = None if sink is None else numbers(sink, dps=dps)[()]
    return softmax_mean(scores, numbers(v, dps=dps), visible, sink, dropout, dps=dps)


def cap_scores(scores: Floats, softcap: float | None, *, dps: int = 50) -> Floats:
    """Evaluate c tanh(s / c), or s itself without a cap c.

    Examples
    --------
    >>> [float(x) for x in cap_scores(numbers([0.0, 1e9]), 2.0)]
    [0.0, 2.0]
    """
    if softcap is None:
        return scores
    mp, (most,) = context(dps), numbers(np.atleast_1d(softcap), dps=dps)
    if not most > 0:
        raise ValueError(f"`softcap` must be positive, got {softcap!r}.")
    return map_numbers(lambda s: most * mp.tanh(s / most), scores)


def root(scale: Scale, d: int, *, dps: int = 50) -> Any:
    """Return the square root of the scale, 1/sqrt(d) by default: for kernel coordinates."""
    mp = context(dps)
    return mp.sqrt(1 / mp.sqrt(d) if scale is None else mp.mpf(scale))


def softmax_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    bias: Any = 0.0,
    sink: Any = None,
    scale: Scale = None,
    softcap: float | None = None,
    dropout: Any = None,
    visible: Any = True,
    dps: int = 50,
) -> Floats:
    """Attend by softmax: reference 000, Attention; reference 003, softmax attention.

    Examples
    --------
    >>> q, k, v = np.array([[1.0]]), np.array([[0.0], [1.0]]), np.array([[0.0], [1.0]])
    >>> float(softmax_attention(q, k, v)[0, 0])  # e / (1 + e)
    0.7310585786300049
    """
    options = {"softcap": softcap, "sink": sink, "dropout": dropout, "dps": dps}
    factor = root(scale, q.shape[-1], dps=dps) ** 2
    return attend(q, k, v, bias, visible, factor, **options)[0]


def heads_of(ndims: dict[str, int], **arrays: Any) -> list[dict[str, Any]]:
    """Return the arrays of each head, as `each_head` takes them.

    Examples
    --------
    >>> [x["k"].tolist() for x in heads_of({"q": 1, "k": 1}, q=np.ones((2, 1)), k=np.ones(1))]
    [[1.0], [1.0]]
    """
    batched = {name for name, x in arrays.items() if np.ndim(x) > ndims.get(name, np.inf)}
    count = max((len(arrays[name]) for name in batched), default=1)
    return [
        {name: x[h // (count // len(x))] if name in batched else x for name, x in arrays.items()}
        for h in range(count)
    ]


def each_head(function: Callable[..., Floats], ndims: dict[str, int], **arrays: Any) -> Floats:
    """Apply `function` to each head and stack: of H heads, h uses slice h // (H / G) of G.

    `ndims` says how many axes an array of one head has; an array may have one more, of length H
    or a divisor.

    Examples
    --------
    >>> q, k = np.zeros((4, 1)), np.array([[5], [7]])
    >>> each_head(lambda q, k: q + k, {"q": 1, "k": 1}, q=q, k=k)[:, 0]
    array([5., 5., 7., 7.])
    """
    results = [function(**arguments) for arguments in heads_of(ndims, **arrays)]
    stacked = any(np.ndim(x) > ndims.get(name, np.inf) for name, x in arrays.items())
    return np.stack(results) if stacked else results[0]
