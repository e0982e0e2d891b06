"""What numbers show without a law: remarks, and problems that are often taken for this one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from ..arrays.library import Doubles
from ..rounding.formats import FORMATS
from ..rounding.problems import Index, Problem
from ..rounding.profiles import Profile
from .findings import Numbers, Suspect, place
from .z_scores import mean_square


def list_remarks(problem: Problem, read: Callable[[Index], Doubles]) -> Iterator[str]:
    """List what the numbers show without a law."""
    zero, nan, rows, first = True, 0, 0, ""
    for index in np.ndindex(problem.lead):
        got = read(index)
        zero = zero and not np.any(got)
        strange = np.flatnonzero(~np.all(np.isfinite(got), -1))
        if strange.size and not first:
            first = place((*index, int(strange[0])))
        nan, rows = nan + strange.size, rows + got.shape[0]
    if zero and rows:
        yield f"{problem.result} is 0 everywhere"
    if nan:
        yield f"{nan} of {rows} rows hold NaN or infinity, the first is {first}"


def suspect_narrower(problem: Problem, dtype: str) -> Iterator[str]:
    """Say if queries, keys and values look like those of a narrower type."""
    for name in ("bfloat16", "float16"):
        to = FORMATS[name]
        heads = (problem.read(index) for index in np.ndindex(problem.lead))
        if to.digits < FORMATS[dtype].digits and all(
            np.all(to.holds(x[y])) for x in heads for y in "qkv"
        ):
            yield f"q, k and v hold numbers of {name} only: is that the dtype of the kernel?"
            return


def list_conventions(
    problem: Problem, numbers: Numbers, dtype: str, profile: Profile
) -> Iterator[Suspect]:
    """List conventions by which a part of the numbers is within its bound, the nearest first."""
    kernel = profile.kernel(dtype)
    squares = [
        (mean_square(x, numbers, kernel), f"agrees if {text}")
        for text, x in _list_problems(problem)
    ]
    for square, text in sorted(squares, key=lambda x: x[0]):
        if square < math.inf:
            yield Suspect("convention", math.nan, math.nan, math.nan, 1.0, text)


def _list_problems(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """List problems that are often taken for this one; for gradients, those of their output."""
    gradient = problem.gradient
    for text, other in _list_forward_problems(problem if gradient is None else gradient.forward):
        if gradient is not None:
            other = gradient._replace(forward=other).problem(problem.lead)
        yield text, other
    if gradient is None and problem.has_sinks:  # bounds of gradients do not tell these apart
        yield from _list_sinks(problem)
    if problem.key_heads is not None:
        yield f"query head h shares key head h % {problem.key_heads}", problem.dealt()


def _list_sinks(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """List problems with other sinks."""
    changes: Mapping[str, Callable[[Any, Any], Any]] = {
        "is multiplied by the scale, too": lambda index, x: problem.scale * x,
        "is multiplied by log2(e) once more": lambda index, x: math.log2(math.e) * x,
        "counts twice": lambda index, x: x + math.log(2),
    }
    for words, change in changes.items():
        yield f"the sink {words}", problem.replaced("sinks", change)


def _list_forward_problems(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """List problems that are often taken for this one."""
    first = problem.read((0,) * len(problem.lead))
    d = first["q"].shape[-1]
    n, m, _ = problem.shape
    for words, scale in ((f"1 / sqrt({d})", d**-0.5), ("1", 1.0), (f"1 / {d}", 1 / d)):
        if not math.isclose(scale, problem.scale):
            yield f"the scale is {words}", problem._replace(scale=scale)
    without = "causal" if not problem.causal else "not causal"
    yield f"attention is {without}", problem._replace(causal=not problem.causal)

    if problem.kind == "scores" and not problem.causal:
        for words, ahead in (("sees one key more, the next", 1), ("does not see its last key", -1)):
            seen = np.tri(n, m, m - n + ahead, dtype=bool)
            yield f"attention is causal, and a query {words}", problem.masked(seen)
    if problem.kind == "scores" and n != m:
        corner = np.tri(n, m, dtype=bool)
        words = "attention is causal from the first key (query i sees key j if j <= i)"
        yield words, problem.masked(corner)._replace(causal=False)
    if "mask" in first:
        yield "the mask is inverted", problem.replaced("mask", lambda index, x: np.logical_not(x))
    for name in ("mask", "bias"):
        if name in first:
            yield f"the {name} is ignored", problem.without(name)
    if problem.has_sinks:
        yield "there is no sink", problem.without("sinks")
    left, right = problem.window
    for side, words, change in (
        (left, "left", lambda x: (x, right)),
        (right, "right", lambda x: (left, x)),
    ):
        for by in (-1, 1):
            if side is not None and side + by >= 0:
                yield (
                    f"the window reaches {side + by} to the {words}, not {side}",
                    problem._replace(window=change(side + by)),
                )
