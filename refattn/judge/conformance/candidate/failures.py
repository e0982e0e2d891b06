"""Exceptions that say how a call of a candidate may end without an answer."""

from __future__ import annotations

SEVERITIES = {
    "formula": "wrong at ordinary inputs",
    "law": "random draws have the wrong distribution",
    "contract": "wrong shape or dtype, an exception, or not reproducible",
    "range": "wrong at extreme inputs only",
    "masked": "wrong where masked keys or values hold NaN, infinity or huge numbers",
}


class Failure(Exception):
    """A mistake of a candidate: the expected result, and what it returned instead."""

    stops = ""  # why no other check can say more, if the first call ends so

    def __init__(self, expected: str, got: str) -> None:
        super().__init__(f"expected {expected}; got {got}")
        self.expected, self.got = expected, got


class Refusal(Failure):
    """A candidate that raised an exception."""

    stops = "every call raises"


class SeveralResults(Failure):
    """A candidate that returned more than the array that was expected."""

    stops = "every call returns several results"


class Unrepeatable(Failure):
    """A candidate whose results differ, of calls that are equal and need no seed."""

    stops = "two equal calls differ"


class WrongRecord(ValueError):
    """A function of the record itself failed, which says nothing of the candidate."""


class Beyond(Exception):
    """A problem beyond what a candidate is declared to take: no call was made."""

    def __init__(self, tag: str) -> None:
        super().__init__(f"beyond the declared `{tag}`")
