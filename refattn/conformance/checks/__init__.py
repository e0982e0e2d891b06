"""What is checked; each module registers its own."""

from __future__ import annotations

# Imported in this order, the checks run in it, and reports list them so.
# ruff: noqa: F401, I001
from . import contract, values, means, visible, features, bits, combined, dropouts, given_keys
from . import uses, gradients, laws, normalisers, options, roundings, targets

__all__: list[str] = []


def __dir__() -> list[str]:
    return __all__
