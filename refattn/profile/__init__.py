"""Recommend an estimator for queries, keys and values, as `refattn compare --target` does.

`study` predicts errors from the moments of queries and keys, and `search` measures how many
features or samples a target error needs.
"""

from __future__ import annotations

from .advice import Advice, Choice, study
from .plans import Candidate, Plan, Search, plan, search

__all__ = ["Advice", "Candidate", "Choice", "Plan", "Search", "plan", "search", "study"]


def __dir__() -> list[str]:
    return __all__
