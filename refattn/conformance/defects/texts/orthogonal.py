"""Frequencies of coupling "orthogonal" in place of independent ones."""

from __future__ import annotations

from ....arrays.library import Array
from .draws import Generator, orthogonal


def law(count: int, d: int, rng: Generator) -> Array:
    """The law of frequencies."""
    return orthogonal(count, d, rng)
