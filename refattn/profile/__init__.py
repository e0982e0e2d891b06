"""What to use for given queries, keys and values: what laws promise, and what is measured.

What `refattn profile` prints, as functions that return it: `study` tells what the moments of
queries and keys promise, and `search` measures how many features or samples a target takes.
"""

from __future__ import annotations

from ..compare import QUADRATIC_QUERIES
from .advice import (
    EXACT,
    LAW_QUERIES,
    LAWS,
    PARTS,
    QUANTILE_ROWS,
    QUANTILES,
    Advice,
    Choice,
    foreseen,
    study,
)
from .plans import PAIRS, Candidate, Plan, Search, plan, search

__all__ = [
    "EXACT",
    "LAWS",
    "LAW_QUERIES",
    "PAIRS",
    "PARTS",
    "QUADRATIC_QUERIES",
    "QUANTILES",
    "QUANTILE_ROWS",
    "Advice",
    "Candidate",
    "Choice",
    "Plan",
    "Search",
    "foreseen",
    "plan",
    "search",
    "study",
]


def __dir__() -> list[str]:
    return __all__
