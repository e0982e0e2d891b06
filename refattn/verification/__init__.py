"""Are numbers right, to rounding? `verify` says."""

from __future__ import annotations

from . import tolerance
from .trial import Finding, Numbers, Suspect
from .verdict import Verdict, judge, verify

__all__ = ["Finding", "Numbers", "Suspect", "Verdict", "judge", "tolerance", "verify"]


def __dir__() -> list[str]:
    return __all__
