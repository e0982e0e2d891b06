"""Name the one thing to do about a run that lacks power."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from statistics import median
from typing import Any

from ..checks.trials import CheckRun
from .report import UNDERPOWERED, Result

_FEWEST_SHAPES, _COMPILED_LONGER = 3, 10  # shapes, and times that the first call of one takes
_UNSEEN_DRAWS = (
    "rounding or the declared epsilon hides the random draws: also check your function with "
    "float64 arrays and an epsilon of 0"
)


def advise(
    results: list[Result],
    trials: list[CheckRun],
    levels: Mapping[str, int],
    level: str,
    limit: float,
    spent: float,
) -> str:
    """Ask for more time if checks that lack power were cut short, or else for more seeds."""
    weak = [x for x in zip(results, trials, strict=True) if x[0].status == UNDERPOWERED]
    if not weak or any(t.interrupted for t in trials):
        return ""
    share, late = min(t.reached for _, t in weak), any(t.over for _, t in weak)
    if late or share < 1:
        seeds = f"{share * levels[level]:,.0f} of {levels[level]:,} seeds"
        done = seeds if share < 1 else "the checks did not end"
        # As much longer as seeds are missing, and twice as long where a check did not end.
        factor = max(1 / share, 2.0 if late else 1.0)
        longer = f"--time-limit {_round_to_digits(factor * limit)}"
        adapter, threads = trials[0].adapter, os.environ.get("OMP_NUM_THREADS")
        on_cpu = adapter["library"] == "torch" and adapter["device"] in (None, "cpu")
        if on_cpu and threads != "1":
            longer += ", or OMP_NUM_THREADS=1 before the command: threads slow small arrays down"
        compiled = _say_compiled(trials[0].times)
        return f"too slow: {done} in {spent:.3g} s{compiled}: {longer}"
    higher = [*levels][[*levels].index(level) + 1 :]
    # Checks with p-values lack seeds; without any, nothing could be tested.
    short = [bool(t.p) for result, t in weak if result.shortfalls]
    if any(short):
        return f"too few seeds: --level {higher[0]}" if higher else ""
    known = [t.advice for _, t in weak if t.advice]
    return known[0] if known else _UNSEEN_DRAWS if short else ""


def _say_compiled(times: Mapping[Any, list[float]]) -> str:
    """Say if most of the time went into the first calls with arrays of some shapes."""
    first = [x[0] for x in times.values()]
    later = [y for x in times.values() for y in x[1:]]
    if len(first) < _FEWEST_SHAPES or not later or sum(first) < sum(later):
        return ""
    once, again = median(first), median(later)
    if once < _COMPILED_LONGER * again:
        return ""
    return (
        f", {sum(first):.2g} s of it in the first call of each of {len(first)} shapes "
        f"({once:.2g} s, later calls {again:.2g} s: is the function compiled for each shape?)"
    )


def _round_to_digits(x: float) -> int:
    """Round up to two digits.

    >>> _round_to_digits(479.2), _round_to_digits(3.5)
    (480, 4)
    """
    unit: int = 10 ** max(math.floor(math.log10(x)) - 1, 0)
    return math.ceil(x / unit) * unit
