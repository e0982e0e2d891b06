"""What the claims of reference 001 share: the inputs and frequencies of its published code.

Its figures come from github.com/teddykoker/performer, which the post links.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from refattn import stats
from validation.suite import Shown

__all__ = ["more_often", "published_frequencies", "published_inputs"]


def published_inputs(rng: np.random.Generator, length: int, d: int, temperature: float) -> Any:
    """Queries, keys and values, all N(0, temperature^2)."""
    return temperature * rng.standard_normal((3, length, d))


def published_frequencies(count: int, d: int, rng: np.random.Generator) -> Any:
    """Orthogonal frequencies as in the published code: all of length sqrt(d / count).

    The law N(0, I) has lengths near sqrt(d). The factor is as if sums over frequencies were
    normalised here; phi does so already.
    """
    squares = [np.linalg.qr(rng.standard_normal((d, d)))[0].T for _ in range(-(-count // d))]
    return np.vstack(squares)[:count] / math.sqrt(count / d)


def more_often(name: str, wins: Any, share: float = 0.5) -> Shown:
    """Evidence that an event has a probability above `share`, from independent trials.

    The two-sided p-value at `share` bounds the tail for every probability on the other side of it.
    """
    n, count = len(wins), int(np.sum(wins))
    p = stats.binomial(count, n, share)
    above = count > n * share
    return Shown(f"{name}: {count} of {n}", p if above else 1.0, 1.0 if above else p)
