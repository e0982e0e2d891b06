"""Write suspects: a cause in words, and the share of the error that it explains."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ....arrays.words import name_row
from ...rounding.problems import Index
from ...verification.findings import Suspect


def as_suspect(text: str, share: float = 1.0, name: str = "convention") -> Suspect:
    """Write a suspect that has no size."""
    return Suspect(name, math.nan, math.nan, math.nan, share, text)


def say_what_is_left(suspect: Suspect, left: Sequence[Index], count: int) -> Suspect:
    """Say which of so many wrong rows a cause leaves wrong; one that leaves most is no cause."""
    if not left:
        return suspect
    rows = f"{len(left)} of {count} wrong rows, the first is {name_row(left[0])}"
    text = f"{suspect.text.replace('agrees if', 'agrees in part if')}; it does not explain {rows}"
    name = suspect.name if 2 * len(left) < count else "convention in part"
    share = min(suspect.explained, 1 - len(left) / count)
    return suspect._replace(name=name, text=text, explained=share)
