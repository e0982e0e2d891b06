"""What candidates are given of what they would draw: frequencies, and a few of the keys."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ....arrays.library import Floats
from .adapter import Adapter
from .limits import Arrays, Keywords, shrink

# What the keys chosen before must leave of the diagonal of a key's kernel. The allowed error
# follows from the keys whatever this is: here it stays far below the values in single precision.
_LEFT = 0.1


def draw_key_indices(
    adapter: Adapter,
    rng: np.random.Generator,
    k: Floats,
    lead: tuple[int, ...],
    n: int,
    samples: int,
    each: bool = False,
) -> dict[str, Any]:
    """Draw options that name a few keys for queries (*lead, n), alike for heads or of `each`.

    In any order; a sample may hold a key several times, and the keys of a coreset are apart.
    """
    head_axes = lead if each else ()
    if not adapter.record.takes("log_probability"):
        return {"indices": _draw_coreset(adapter, rng, k, head_axes, samples)}
    shape = (*head_axes, samples)
    if adapter.has("per-query"):
        # Each query has a sample of its own.
        shape = (*lead, n, samples)
    indices = rng.integers(k.shape[-2], size=shape)
    # Wherever a query has a key, it has the same probability.
    of_key, factor = np.log(rng.uniform(0.05, 1.0, k.shape[-2])), rng.uniform(0.5, 1.0, shape[:-1])
    log_p = adapter.exact(of_key[indices] * factor[..., None])
    return {"indices": indices, "log_probability": log_p}


def draw_frequencies(
    adapter: Adapter, normal: Callable[..., Floats], arrays: Arrays, samples: int, size: float
) -> dict[str, Any]:
    """Return options that give frequencies for these queries and keys, by normal numbers.

    With what has to be given beside them; queries and keys have a size in kernel coordinates.
    """
    q, k = arrays
    (*lead, n, d), m = q.shape, k.shape[-2]
    if adapter.has("chunked"):
        window = min(samples, n, m)
        omega = normal(-(-m // window), d, size=math.hypot(1.0, size))
        return adapter.record.sized(window) | {"omega": omega}
    if adapter.has("per-query"):
        noise = normal(*lead, n, samples, d, size=size / adapter.root(d))
        # About where the targets of queries lie, which are centred at q + k.
        centres = q[..., :, None, :] + np.mean(k) + noise
        noise = normal(*lead, n, samples, d)
        return {"omega": adapter.exact(adapter.root(d) * centres + noise)}
    omega = normal(samples, d)
    if not adapter.has("proposals"):
        return {"omega": omega}
    # A frequency is drawn near the centre of its proposal.
    centres = adapter.exact(omega + normal(samples, d, size=0.5))
    root = adapter.root(d)
    less = shrink(adapter, omega / root, centres / root)  # the exponents of their densities too
    return {"omega": adapter.exact(less * omega), "centres": adapter.exact(less * centres)}


def options_of_one_key(adapter: Adapter, options: Keywords) -> dict[str, Any]:
    """Return what the options must be where there is only one key.

    A sample holds it as often as others before; a chunk is one key, and there is one chunk.
    """
    if "indices" in options:
        indices = 0 * options["indices"]
        return {"indices": indices if adapter.record.takes("log_probability") else indices[..., :1]}
    if adapter.record.size not in options or adapter.has("unlimited-size"):
        return {}
    omega = {name: x[..., :1, :] for name, x in options.items() if name == "omega"}
    return adapter.record.sized(1) | omega


def _draw_coreset(
    adapter: Adapter, rng: np.random.Generator, k: Floats, head_axes: tuple[int, ...], samples: int
) -> npt.NDArray[np.int_]:
    """Return keys that are apart, in any order; of each head some of such."""
    wanted = min(samples, k.shape[-2])
    # With twice as many, each head can be given others.
    apart = _keys_apart(adapter.root(k.shape[-1]) * k, 2 * wanted if head_axes else wanted)
    count = min(wanted, max(1, len(apart) - 1)) if head_axes else len(apart)
    rows = [rng.permutation(apart)[:count] for _ in np.ndindex(*head_axes)]
    return np.reshape(rows, (*head_axes, count))


def _keys_apart(k: Floats, most: int) -> npt.NDArray[np.int_]:
    """Return keys of which each is far from those before, in all heads, until none is.

    Those of a pivoted Cholesky factor of the Gaussian kernel: the next is the one of which the
    least that is left in any head is largest.
    """
    k = np.reshape(k, (-1, *k.shape[-2:]))
    left, rows, pivots = np.ones(k.shape[:-1]), list[Floats](), list[int]()
    while len(pivots) < min(most, k.shape[-2]):
        least = np.min(left, 0)
        pivot = int(np.argmax(least))
        if pivots and least[pivot] < _LEFT:
            break
        row = np.exp(-np.sum((k - k[:, pivot : pivot + 1]) ** 2, -1) / 2)
        for before in rows:
            row -= before * before[:, pivot : pivot + 1]
        row /= np.sqrt(left[:, pivot : pivot + 1])
        left = left - row * row
        # By rounding a little may be left, and the key would be taken again.
        left[:, pivot] = 0.0
        pivots.append(pivot)
        rows.append(row)
    return np.array(pivots)
