"""Frequencies of coupling "simplex" in place of independent ones."""

from __future__ import annotations

from ....arrays.library import Array
from .draws import Generator, simplex


def law(count: int, d: int, rng: Generator) -> Array:
    """The law of frequencies."""
    return simplex(count, d, rng)
