"""Wrong readings of the keys that queries chose."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from ...rounding.problems import Index, Problem
from ..operators.maps import list_head_rules
from .sampled import Alternative, Seen


def _set_column(at: int, x: Any, _: int) -> Any:
    return np.where(np.arange(x.shape[1]) == at % x.shape[1], np.minimum(x, 0), x)


_TWICE = "a key that is chosen twice counts twice"
# What kernels may read in place of the keys that queries chose, (queries, S), of so many keys.
_CHOICES: Mapping[str, Callable[[Any, int], Any]] = {
    _TWICE: lambda x, _: x,
    "-1 in the indices is read as the last key": lambda x, m: np.where(x < 0, m - 1, x),
    "-1 in the indices is read as key 0": lambda x, _: np.where(x < 0, 0, x),
    "each query has the keys that the query before it chose": lambda x, _: np.roll(x, 1, 0),
    "each query has the keys that the next query chose": lambda x, _: np.roll(x, -1, 0),
    "all queries have the keys that the first query chose": lambda x, _: 0 * x + x[:1],
    "the last key of each choice is left out": lambda x, _: x[:, :-1],
    "the first key of each choice is left out": lambda x, _: x[:, 1:],
    "key 0 is read in place of the first key of each choice": partial(_set_column, 0),
    "key 0 is read in place of the last key of each choice": partial(_set_column, -1),
}


def list_choices(problem: Problem) -> Iterator[Alternative]:
    """List wrong readings of the keys that queries chose, which no other mask hides."""
    alone = problem._replace(causal=False, window=(None, None))
    every, m = [problem.read(x)["indices"] for x in np.ndindex(problem.lead)], problem.shape[1]
    changes: dict[str, Callable[[Index], Any]] = {
        text: partial(_change_choices, problem, change) for text, change in _CHOICES.items()
    }
    for words, at in list_head_rules(problem):
        text = f"each query uses as many of its choices as the same query of {words} has"
        changes[text] = partial(_cut_choices, problem, at)
    for text, change in changes.items():
        if text != _TWICE and all(
            np.array_equal(change(at), x)
            for at, x in zip(np.ndindex(problem.lead), every, strict=True)
        ):
            continue  # it would be the cause of what happens to keys that are chosen twice
        count = partial(_count_chosen, change, m)
        seen = alone.replaced("mask", partial(_show_counted, count))
        yield Alternative(text, seen.replaced("bias", partial(_add_counted, count)))


def _change_choices(problem: Problem, change: Callable[[Any, int], Any], index: Index) -> Any:
    return change(problem.read(index)["indices"], problem.shape[1])


def _cut_choices(problem: Problem, at: Callable[[Index], Index], index: Index) -> Any:
    """Leave out choices past as many as another head has."""
    own, other = (problem.read(x)["indices"] for x in (index, at(index)))
    count = np.sum(other >= 0, -1, keepdims=True)
    return np.where(np.arange(own.shape[1]) < count, own, -1)


def _count_chosen(change: Callable[[Index], Any], m: int, index: Index) -> Any:
    """Count how often each query reads each key, (queries, keys)."""
    return np.stack([np.bincount(x[x >= 0], minlength=m) for x in change(index)])


def _show_counted(count: Callable[[Index], Any], index: Index, _: Any) -> Seen:
    return np.asarray(count(index) > 0)


def _add_counted(count: Callable[[Index], Any], index: Index, bias: Any) -> Any:
    """Add logs of counts to the bias, as the weights of keys count so often."""
    return np.log(np.maximum(count(index), 1)) + (0.0 if bias is None else bias)
