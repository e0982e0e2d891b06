"""Find the rows of two results that have equal inputs, and those of them that differ."""

from __future__ import annotations

import math
from collections import defaultdict
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..rounding.problems import Index, Problem
from ..verification.findings import Part

_HEADS_READ = 4  # that are kept

_Marks = npt.NDArray[np.int64]


class Match(NamedTuple):
    """Rows of two results A and B with equal inputs, (heads, n) of A or of B."""

    partner: _Marks  # number of the row of B that a row of A is compared with; -1 for none
    differs: npt.NDArray[np.bool_]  # whether bits of the two rows do
    only_b: npt.NDArray[np.bool_]  # rows of B with other inputs than all rows of A

    def place_in_b(self, problem: Problem, head: int, row: int) -> tuple[Index, int]:
        """Return the head and the row of B, whose problem this is, for a row of A."""
        other, at = divmod(int(self.partner[head, row]), problem.shape[0])
        return problem.index_of(other), at


def match_rows(a: Part, b: Part) -> Match:
    """Match the rows that have the same query and see the same keys and values."""
    of_a, of_b = (mark_inputs(x.problem) for x in (a, b))
    places: dict[int, list[int]] = defaultdict(list)
    for number, mark in enumerate(of_b.ravel().tolist()):
        places[mark].append(number)
    met: dict[int, int] = defaultdict(int)
    partner, differs = np.full(of_a.shape, -1), np.zeros(of_a.shape, bool)
    for (head, row), mark in zip(np.ndindex(of_a.shape), of_a.ravel().tolist(), strict=True):
        if there := places.get(mark):
            # Rows with equal inputs in one file are compared in turn.
            partner[head, row] = there[min(met[mark], len(there) - 1)]
            met[mark] += 1
    match = Match(partner, differs, ~np.isin(of_b, of_a))
    read = lru_cache(maxsize=_HEADS_READ)(b.numbers.out)
    for head in range(len(partner)):
        got = a.numbers.out(a.problem.index_of(head))
        for row in np.flatnonzero(partner[head] >= 0).tolist():
            index, at = match.place_in_b(b.problem, head, row)
            differs[head, row] = got[row].tobytes() != read(index)[at].tobytes()
    return match


def mark_inputs(problem: Problem) -> _Marks:
    """Return numbers of rows, (heads, n), that are equal if all that a row is computed of is."""
    n = problem.shape[0]
    marks = np.zeros((math.prod(problem.lead), n), np.int64)
    for head in range(len(marks)):
        index = problem.index_of(head)
        if problem.kind != "scores":  # a row is computed of all tokens, or by its place
            arrays = (np.asarray(x).tobytes() for _, x in sorted(problem.read(index).items()))
            whole = hash(tuple(arrays))
            marks[head] = [hash((whole, i)) for i in range(n)]
            continue
        one = problem.head(index)
        tokens = zip(one.k[: one.keys], one.v[: one.keys], strict=True)
        keys = np.array([hash((k.tobytes(), v.tobytes())) for k, v in tokens], np.int64)
        for i in range(n):
            seen = one.visible(slice(i, i + 1), slice(0, one.keys))
            found = slice(None) if seen is None else seen[0]
            bias = b"" if one.bias is None else one.bias[i][found].tobytes()
            marks[head, i] = hash((one.q[i].tobytes(), keys[found].tobytes(), bias, one.sink))
    return marks
