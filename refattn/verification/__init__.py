"""Judge whether a correct kernel can have produced given numbers: `verify`."""

from __future__ import annotations

from . import tolerance
from .door import verify
from .findings import Finding, Numbers, Suspect, Worst
from .judging import judge
from .verdict import Verdict

__all__ = ["Finding", "Numbers", "Suspect", "Verdict", "Worst", "judge", "tolerance", "verify"]


def __dir__() -> list[str]:
    return __all__
