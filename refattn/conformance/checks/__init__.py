"""What is checked; each module registers its own."""

from __future__ import annotations

from . import (
    bits,
    combined,
    dropouts,
    given_keys,
    gradients,
    identities,
    laws,
    normalisers,
    options,
    recovery,
    roundings,
    targets,
    uses,
)

__all__ = [
    "bits",
    "combined",
    "dropouts",
    "given_keys",
    "gradients",
    "identities",
    "laws",
    "normalisers",
    "options",
    "recovery",
    "roundings",
    "targets",
    "uses",
]


def __dir__() -> list[str]:
    return __all__
