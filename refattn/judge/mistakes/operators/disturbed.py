r"""Where the state of a recurrence goes wrong, by errors of rows, which are linear in its change.

From a token on rows read :math:`A (S + \Delta)` in place of :math:`A S`, if the state before it is
wrong and nothing else: the matrix A is known, and fewer numbers :math:`\Delta` than errors are
fitted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from ....arrays.library import Doubles
from ....arrays.words import place
from ....engine.recurrent import carry, solve_leaves
from ...rounding.problems import Index, Problem
from ...rounding.roundings import Roundings
from ...rounding.states import steps_of
from ...verification.findings import name_span
from ..causes.wrong_rows import FAR, row_sizes
from .handed_on import CHUNK_SIZES, Added

_SQUARE = 4.0  # mean square of z, at most, that is left
_ROWS_OF_STATE = 1.5  # times its size, that more rows tell it
_AS_OFTEN = 0.02  # by which a chunk counts once


def list_wrong_states(
    problem: Problem, got: Mapping[Index, Doubles], roundings: Roundings
) -> Iterator[tuple[str, Added]]:
    """List what is added to results if the states before some tokens are others: fitted ones."""
    added, words = dict[Index, Doubles](), dict[Index, str]()
    for index, out in got.items() if problem.of == "out" else ():
        left, std = _find_errors(problem, index, out, roundings)
        added[index], n, d = np.zeros_like(out), len(out), problem.read(index)["k"].shape[-1]
        done = 0
        while np.max(np.abs(left / std)) > FAR:
            seen = int(np.argmax(np.max(np.abs(left / std), -1) > FAR))
            for i in _list_spans(seen, done, n, _ROWS_OF_STATE * d):
                reads = _find_reads(problem, index, i.start, i.stop)
                weight = 1 / np.linalg.norm(std[i], axis=-1, keepdims=True)
                change = np.linalg.lstsq(weight * reads, weight * left[i], rcond=None)[0]
                z = (left[i] - reads @ change) / std[i]
                if np.mean(np.square(z)) < _SQUARE:
                    break
            else:
                if not done or n - seen > _ROWS_OF_STATE * d:
                    return
                added[index][seen:] = left[seen:]  # too few rows to tell more by
                break
            left[i], added[index][i], done = 0.0, reads @ change, i.stop
            about = i, change, reads / np.median(std[i], -1, keepdims=True)
            words.setdefault(index, _describe_state(problem, index, *about))
    if words:
        index, first = next(iter(words.items()))
        more = f" (head {place(index)}{f' and {len(words) - 1} more' * (len(words) > 1)})"
        yield first + more, partial(_take_added, added)


def _list_spans(first: int, start: int, n: int, fewest: float) -> Iterator[slice]:
    """List tokens that may read one wrong state, of which the first is seen: whole chunks first."""
    sizes = sorted(CHUNK_SIZES, reverse=True)
    for at in dict.fromkeys((*(first - first % x for x in sizes), first)):
        ends = dict.fromkeys(min(at + size, n) for size in (n, *sizes))
        yield from (
            slice(at, end) for end in ends if at >= start and end > first and end - at > fewest
        )


def _find_errors(
    problem: Problem, index: Index, out: Doubles, roundings: Roundings
) -> tuple[Doubles, Doubles]:
    """Find errors and their standard deviations: wrong numbers are larger, and so are theirs."""
    rows = problem.recurrence(index, roundings).rows
    unit = np.median(rows.std / np.maximum(row_sizes(rows.out), 1e-300))
    return rows.errors(out), np.maximum(rows.std, unit * row_sizes(out))


def _take_added(added: Mapping[Index, Doubles], index: Index) -> Any:
    return added.get(index, 0.0)


def _find_reads(problem: Problem, index: Index, start: int, end: int) -> Doubles:
    """Find by what rows multiply the state before a token, (rows, d)."""
    x = problem.read(index)
    size = 2 ** (end - start - 1).bit_length()
    tokens = steps_of(x, problem.scale).rows(slice(start, end)).cut(size, np)
    leaf = solve_leaves(tokens, bool(x.get("before")), np)
    return np.asarray(leaf.reads[0, : end - start])


def _describe_state(problem: Problem, index: Index, i: slice, change: Any, seen: Doubles) -> str:
    """Say which state it is: of another token, or in which chunks count otherwise.

    Rows multiply it by what is `seen`, in units of their errors.
    """
    x, at = problem.read(index), i.start
    text = f"tokens {at} to {i.stop - 1} read another state before token {at}"
    steps, before = steps_of(x, problem.scale), bool(x.get("before"))
    for size in (y for y in sorted(CHUNK_SIZES, reverse=True) if at and at % y == 0):
        leaves, first = (
            solve_leaves(steps.rows(slice(0, at)).cut(size, np), before, np),
            range(0, at, size),
        )
        states, last = carry(leaves, x["initial_state"], np)
        wrong = last + change
        every = {"0": 0 * last} | {
            f"that before token {y}": z for y, z in zip(first, states, strict=True)
        }
        for words, state in every.items():
            if np.mean(np.square(seen @ (wrong - state))) < _SQUARE:
                return f"{text}: {words}"
        # What the initial state and each chunk alone would leave.
        parts = {"the initial state": carry(leaves._replace(add=0 * leaves.add), states[0], np)[1]}
        for y in first:
            own = (np.array(first) == y)[:, None, None]
            left = carry(leaves._replace(add=own * leaves.add), 0 * last, np)[1]
            parts[f"tokens {y} to {y + size - 1}"] = left
        decayed = leaves.keep[-1] * states[-1]
        of_last = {f"the state before token {first[-1]}, as it decays": decayed}
        of_last[f"what tokens {first[-1]} to {at - 1} write and remove"] = last - decayed
        for some in (parts, of_last):
            # In all columns, or in each: a column of v has its own state.
            for columns in (np.zeros(wrong.shape[1], int), np.arange(wrong.shape[1])):
                times = _mix_states(np.stack([*some.values()], -1), wrong, columns)
                left = wrong - np.einsum("dcp,cp->dc", np.stack([*some.values()], -1), times)
                if np.mean(np.square(seen @ left)) < _SQUARE:
                    off = [
                        _say_times(c, y)
                        for (y, z), c in zip(some.items(), times.T, strict=True)
                        if np.any(z) and np.any(np.abs(c - 1) > _AS_OFTEN)
                    ]
                    return f"{text}: in it is {' and '.join(off)}" if off else text
    return text


def _mix_states(parts: Doubles, state: Doubles, columns: Any) -> Doubles:
    """Fit how often parts, (d, columns, parts), are in a state, alike in columns of a group."""
    times = np.zeros(parts.shape[1:])
    for group in np.unique(columns):
        some = columns == group
        every = parts[:, some].reshape(-1, parts.shape[-1])
        times[some] = np.linalg.lstsq(every, state[:, some].ravel(), rcond=None)[0]
    return times


def _say_times(c: Doubles, what: str) -> str:
    """Say how often something counts in columns, if it is not the same in all of them."""
    low, high = (f"{round(y, 2) + 0:g}" for y in (np.min(c), np.max(c)))
    if low == high:
        return f"{low} times that of {what}"
    columns = name_span("columns", np.flatnonzero(np.abs(c - 1) > _AS_OFTEN))
    return f"{low} to {high} times that of {what}, by column ({columns})"
