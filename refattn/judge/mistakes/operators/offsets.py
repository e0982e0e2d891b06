"""Log normalisers that are off by a number of each head, or one times a function of the place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ....arrays.library import Doubles
from ....arrays.words import place
from ...rounding.problems import Index, Problem
from ..causes.alternatives import SLOPES
from ..causes.sampled import Result, Rows
from ..causes.wrong_rows import FAR, Sampled

_FEWEST_OFF, _HEADS_NAMED = 4, 3  # rows of a head; heads that are named
_EQUAL = 1e-3  # relative distance of equal numbers
Lse = Callable[[Rows], Result]

_OFFSET_RULES: Mapping[str, Callable[[Problem, Rows, Result], Any]] = {
    "": lambda problem, rows, x: np.ones(len(x.lse)),
    " times the position i of the query": lambda problem, rows, x: rows.queries,
    " times the position of the query, from 1": lambda problem, rows, x: (
        rows.queries + problem.shape[1] - problem.shape[0] + 1
    ),
    " times log(i + 1) for query i": lambda problem, rows, x: np.log1p(rows.queries),
    " times the log of the position of the query, from 1": lambda problem, rows, x: np.log(
        np.maximum(rows.queries + problem.shape[1] - problem.shape[0] + 1, 1)
    ),
    " times the largest score": lambda problem, rows, x: x.top,
}


def list_offsets(
    problem: Problem, wrong: Sequence[Sampled], exact: Lse, std: Callable[[Result], Doubles]
) -> Iterator[tuple[str, Lse]]:
    """List log normalisers that are larger by a number of each head times a function of rows."""
    results = [exact(x.rows) for x in wrong]
    for text, rule in _OFFSET_RULES.items():
        found: dict[Index, float] = {}
        errors = []
        for x, result in zip(wrong, results, strict=True):
            assert x.lse is not None
            size, f = std(result), np.asarray(rule(problem, x.rows, result), float)
            slope, error = f / size, (x.lse - result.lse) / size
            known = np.isfinite(slope) & np.isfinite(error)
            square = float(np.sum(slope[known] ** 2))
            if np.sum(known) < _FEWEST_OFF or not square:
                break
            c = float(np.sum((slope * error)[known]) / square)
            errors.append(float(np.max(np.abs(error - c * slope)[known])))
            found[x.rows.at] = c
        else:
            # One number for all is said, with its error, where that is measured.
            if max(errors, default=np.inf) < FAR and (text or not _are_alike([*found.values()])):
                yield _say_how_large(problem, found, text), _Offset(problem, found, rule, exact)


class _Offset:
    """Results whose log normalisers are off."""

    def __init__(
        self, problem: Problem, found: Mapping[Index, float], rule: Any, exact: Lse
    ) -> None:
        self.about = problem, found, rule, exact

    def __call__(self, rows: Rows) -> Result:
        problem, found, rule, exact = self.about
        x = exact(rows)
        return x._replace(lse=x.lse + found.get(rows.at, 0.0) * rule(problem, rows, x))


def _are_alike(numbers: Sequence[float]) -> bool:
    return bool(np.ptp(numbers) < _EQUAL * np.max(np.abs(numbers)))


def _say_how_large(problem: Problem, found: Mapping[Index, float], text: str) -> str:
    """Say by how much log normalisers are too large in each head."""
    numbers = np.array([*found.values()])
    heads = problem.lead[-1] if problem.lead else 1
    alike = {"": np.ones(len(numbers))} | {
        f" times the slope of the head (2^{name})": np.exp2(
            [power(x[-1] if x else 0, heads) for x in found]
        )
        for name, power in SLOPES.items()
    }
    if any("sinks" in problem.read(x) for x in found):
        sinks = [problem.read(x)["sinks"].item() for x in found]
        alike[" times the sink of the head"] = np.array(sinks)
    for words, x in alike.items():
        c = float(numbers @ x / (x @ x)) if np.any(x) else 0.0
        if np.max(np.abs(numbers - c * x)) < _EQUAL * np.max(np.abs(numbers)):
            times = f"{c:.4g}{words}" if abs(c - 1) > _EQUAL or not words else words[7:]
            return f"larger by {times}{text}"
    each = [f"{c:.4g} in head {place(x)}" for x, c in found.items()]
    more = f" and so on in {len(each) - _HEADS_NAMED} more" if len(each) > _HEADS_NAMED else ""
    return f"larger by a number of each head{text}, {', '.join(each[:_HEADS_NAMED])}{more}"
