"""What the claims of reference 001 share: the inputs and frequencies of its published code.

Its figures come from github.com/teddykoker/performer, which the post links.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

__all__ = ["published_frequencies", "published_inputs"]


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
