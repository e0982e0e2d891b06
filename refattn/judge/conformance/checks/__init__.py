"""The checks: each module has those of one kind, and `claims` is the table of all."""

from __future__ import annotations

# ruff: noqa: F401
from . import contract, dropouts, given_keys, gradients, laws, relations, sizes, targets, uses

from . import recurrences  # isort: skip
from . import values  # isort: skip
from . import claims  # isort: skip  # which names all of them

__all__: list[str] = []
__dir__ = __all__.copy
