"""What is checked: each module says how, and `claims` has the table of what and of whom."""

from __future__ import annotations

# ruff: noqa: F401
from . import contract, dropouts, given_keys, gradients, laws, relations, sizes, targets, uses

from . import recurrences  # isort: skip
from . import values  # isort: skip
from . import claims  # isort: skip  # which names all of them

__all__: list[str] = []
__dir__ = __all__.copy
