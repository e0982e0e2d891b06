"""What heads take from other heads, and numbers that each head has of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ...arrays.library import Doubles
from ...rounding.problems import Index, Problem
from ..findings import place
from .sampled import Alternative
from .wrong_rows import Sample, differ, divide

_HEADS, _ROWS = 32, 8  # that are compared with those of a wrong head, at most
_NEUTRAL = {"mask": True, "bias": 0.0, "sinks": -math.inf}  # values that change nothing
_COMPARED_PAIRS = 2**22  # of queries and keys, at most, of masks and biases that are compared


def list_exchanged(
    problem: Problem, sample: Sample, sizes: Sequence[Doubles]
) -> Iterator[Alternative]:
    """List kernels that take an array of other heads: for each wrong head, of the nearest."""
    others = [*np.ndindex(problem.lead)]
    if not 1 < len(others) <= _HEADS:
        return
    for words, take in _list_arrays(problem):
        nearest: dict[Index, Index | None] = {}
        for x, size in zip(sample.heads, sizes, strict=True):
            i = np.flatnonzero(x.wrong)[:_ROWS]
            rows = x.rows._replace(queries=x.rows.queries[i])
            far: dict[Index | None, float] = {}
            none = [None] if words.split()[-1] in _NEUTRAL else []  # as if it were not given
            same = sorted(others, key=lambda y: y[-1] != x.rows.at[-1])  # first, of equal ones
            for other in [*same, *none] if len(i) else ():
                out = take({x.rows.at: other}).result(rows).out
                far[other] = float(np.sum(np.square(divide(differ(x.got[i], out), size[i]))))
            nearest[x.rows.at] = min(far, key=far.__getitem__) if far else x.rows.at
        moved = {x: y for x, y in nearest.items() if x != y}
        if moved:
            called = (
                f"head {place(x)} has {'none' if y is None else f'that of head {place(y)}'}"
                for x, y in moved.items()
            )
            yield take(moved)._replace(text=f"heads have {words} of others: {', '.join(called)}")


def _list_arrays(
    problem: Problem,
) -> Iterator[tuple[str, Callable[[Mapping[Index, Any]], Alternative]]]:
    """List what may be of another head, and how the kernel computes that takes it so."""

    def moved(to: Mapping[Index, Any]) -> Alternative:
        return Alternative("", problem, move=lambda x: x._replace(at=to.get(x.at, x.at)))

    def taken(to: Mapping[Index, Any], names: Iterable[str]) -> Alternative:
        return Alternative("", problem.with_arrays_of(names, lambda x: to.get(x, x)))

    def taken_or_none(to: Mapping[Index, Any], name: str) -> Alternative:
        def change(at: Index, x: Any) -> Any:
            other = to.get(at, at)
            return np.full_like(x, _NEUTRAL[name]) if other is None else problem.read(other)[name]

        return Alternative("", problem.replaced(name, change))

    yield "the output", moved
    for names, words in (("kv", "the keys and values"), ("v", "the values"), ("k", "the keys")):
        yield words, partial(taken, names=names)
    n, m, _ = problem.shape
    for name in ("mask", "bias", "sinks"):
        if name in problem.first and (name == "sinks" or n * m <= _COMPARED_PAIRS):
            yield f"the {name}", partial(taken_or_none, name=name)


def list_of_heads(
    problem: Problem,
) -> Iterator[tuple[str, Callable[[Mapping[Index, float]], Alternative], tuple[float, ...]]]:
    """List kernels with a number for each head that is fitted, and where fits start."""
    n, m, _ = problem.shape
    has_bias, few = "bias" in problem.first, n * m <= _COMPARED_PAIRS

    def count_sink(c: Mapping[Index, float]) -> Alternative:
        def change(at: Index, x: Any) -> Any:
            return x + math.log(max(c.get(at, 1.0), 1e-300))

        return Alternative("", problem.replaced("sinks", change))

    def count_bias(c: Mapping[Index, float]) -> Alternative:
        return Alternative("", problem, bias=lambda _, at, x: c.get(at, 1.0) * np.asarray(x))

    def add_slope(c: Mapping[Index, float]) -> Alternative:
        return Alternative("", problem, bias=lambda x, at, _: -c.get(at, 0.0) * np.abs(x.ahead))

    if problem.has_sinks:
        yield "e^sink counts {} times", count_sink, (0.1, 0.5, 1.0, 2.0, 10.0)
    if has_bias and few:
        yield "the bias is multiplied by {}", count_bias, (-1.0, 0.1, 0.5, 1.0, 2.0, 8.0)
    elif few:
        yield "scores fall by {} for each key of distance", add_slope, (0.01, 0.1, 0.5, -0.1)


def describe_numbers(text: str, numbers: Mapping[Index, float]) -> str:
    """Write the number of each head into a sentence."""
    words = [f"{x:.4g} (head {place(at)})" for at, x in numbers.items()]
    return text.format(", ".join(words))
