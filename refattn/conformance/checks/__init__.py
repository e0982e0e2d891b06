"""What is checked; each module registers its own."""

from __future__ import annotations

# In this order they run, and reports list them.
from . import contract, values, means, visible, features, bits, combined, dropouts  # isort: skip
from . import given_keys, uses, gradients, laws, normalisers, options, roundings, targets  # isort: skip

__all__ = [
    "bits",
    "combined",
    "contract",
    "dropouts",
    "features",
    "given_keys",
    "gradients",
    "laws",
    "means",
    "normalisers",
    "options",
    "roundings",
    "targets",
    "uses",
    "values",
    "visible",
]


def __dir__() -> list[str]:
    return __all__
