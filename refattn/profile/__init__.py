"""What to use for given queries, keys and values: what laws promise, and what is measured.

What `refattn profile` prints, as functions that return it: `study` tells what the moments of
queries and keys promise, and `search` measures how many features or samples a target takes.
"""

from __future__ import annotations

from .advice import Advice, Choice, study
from .plans import Candidate, Plan, Search, plan, search

__all__ = ["Advice", "Candidate", "Choice", "Plan", "Search", "plan", "search", "study"]


def __dir__() -> list[str]:
    return __all__
