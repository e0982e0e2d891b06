"""Audits of tests: what would a comparison, or a whole test, let through?

A kernel in a test is replaced by each known bug of the catalogue, with the roundings of a correct
one, and the test is run again. What still passes is what the test does not see.
"""

from __future__ import annotations

from .study import Audit, Survivor, audit

__all__ = ["Audit", "Survivor", "audit"]


def __dir__() -> list[str]:
    return __all__
