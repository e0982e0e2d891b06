"""Attention to few of the keys: coresets and samples."""

from __future__ import annotations

from typing import Any

import numpy as np

from ....arrays.library import Floats
from .digits import context, map_numbers, numbers
from .features import divide_by_sum
from .softmax import Scale, root, softmax_mean


def coreset(
    k: Any, indices: Any, visible: Any = True, scale: Scale = None, *, dps: int = 50
) -> tuple[Floats, Floats]:
    """Return centred keys J, times the root of the scale, and W = h_JJ^-1 h_JK.

    Examples
    --------
    >>> chosen, weights = coreset(np.array([[-1.0], [1.0]]), [1, 0])
    >>> np.abs(weights.astype(float)).round(6)
    array([[0., 1.],
           [1., 0.]])
    """
    mp, seen = context(dps), np.broadcast_to(visible, (len(k),))
    keys = numbers(k, dps=dps) * root(scale, k.shape[-1], dps=dps)
    keys = keys - keys[seen].sum(0) / int(seen.sum())
    chosen = keys[[j for j in indices if seen[j]]]
    to_keys, to_chosen = (map_numbers(mp.exp, chosen @ x.T) for x in (keys[seen], chosen))
    weights = mp.inverse(mp.matrix(to_chosen.tolist())) * mp.matrix(to_keys.tolist())
    return chosen, np.array(weights.tolist(), dtype=object)


def coreset_attention(
    q: Any, k: Any, v: Any, indices: Any, visible: Any = True, scale: Scale = None, *, dps: int = 50
) -> Floats:
    """Attend with the kernel h_qJ h_JJ^-1 h_JK of centred keys: arXiv:2602.10056.

    Keys J are distinct, and visible, (m,), is the same for all queries.

    Examples
    --------
    >>> q, k, v = np.array([[0.0]]), np.array([[-1.0], [1.0]]), np.array([[0.0], [3.0]])
    >>> float(coreset_attention(q, k, v, np.array([1, 0]))[0, 0])
    1.5
    """
    chosen, weights = coreset(k, indices, visible, scale, dps=dps)
    queries = numbers(q, dps=dps) * root(scale, q.shape[-1], dps=dps)
    kernel = map_numbers(context(dps).exp, queries @ chosen.T) @ weights
    return divide_by_sum(kernel, v[np.broadcast_to(visible, (len(k),))], True, dps)


def sampled_key_attention(
    q: Any,
    k: Any,
    v: Any,
    indices: Any,
    log_probability: Any = 0.0,
    visible: Any = True,
    scale: Scale = None,
    *,
    dps: int = 50,
) -> Floats:
    """Attend to the keys of each query's sample, (n or 1, S), over their probabilities.

    Examples
    --------
    >>> q, k, v = np.zeros((1, 1)), np.zeros((3, 1)), np.array([[0.0], [1.0], [5.0]])
    >>> float(sampled_key_attention(q, k, v, np.array([[0, 2]]))[0, 0])
    2.5
    """
    n, m = len(q), len(k)
    scores = (numbers(q, dps=dps) @ numbers(k, dps=dps).T) * root(scale, q.shape[-1], dps=dps) ** 2
    indices = np.broadcast_to(indices, (n, np.shape(indices)[-1]))
    log_p = numbers(np.broadcast_to(log_probability, indices.shape), dps=dps)
    visible, values, rows = np.broadcast_to(visible, (n, m)), numbers(v, dps=dps), []
    for i, at in enumerate(indices):
        row = (scores[i, at] - log_p[i])[None]
        rows.append(softmax_mean(row, values[at], visible[i, at], dps=dps)[0][0])
    return np.stack(rows)
