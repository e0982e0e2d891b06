"""Which estimator, on these queries, keys and values: measured, or predicted from their moments.

`measure` returns what `refattn compare` prints: errors and times of estimators against exact
softmax attention. `study` predicts errors from the moments of queries and keys, and `search`
measures how many features or samples a target error needs, as `refattn compare --target` does.
"""

from ..files.tolerated import Tolerated, tolerated
from .advice import Advice, Choice, study
from .measured import Comparison, Inputs, Row, Skipped, measure, names
from .plans import Candidate, Plan, Search, plan, search

__all__ = [
    "Advice",
    "Candidate",
    "Choice",
    "Comparison",
    "Inputs",
    "Plan",
    "Row",
    "Search",
    "Skipped",
    "Tolerated",
    "measure",
    "names",
    "plan",
    "search",
    "study",
    "tolerated",
]
__dir__ = __all__.copy
