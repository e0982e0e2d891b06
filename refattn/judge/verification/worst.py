"""Find the element that is farthest off, and how far it may be: the `worst` of a verdict."""

from __future__ import annotations

import math
import re

import numpy as np

from ..rounding.formats import FORMATS
from ..rounding.head import attend_rows
from ..rounding.problems import Index, Problem
from ..rounding.profiles import Profile
from ..rounding.roundings import RowErrors
from .findings import Numbers, Worst
from .verdict import Verdict


def find_worst(
    problem: Problem, numbers: Numbers, verdict: Verdict, profile: Profile
) -> Worst | None:
    """Find the element that is farthest off, of an output, gradient or log normaliser."""
    failed = [x for x in verdict.tests if x.adjusted <= verdict.alpha]
    of_lse = bool(failed) and all("lse" in x.name.split() for x in failed)
    where = _find_worst_normaliser(problem, numbers) if of_lse else _find_place(numbers, verdict)
    if not where:
        return None
    # One row is analysed again: arrays of errors of all rows are not kept.
    *head, row = where if of_lse else where[:-1]
    index = tuple(head)
    roundings = profile.roundings(verdict.dtype)
    with np.errstate(all="ignore"):
        rows = problem.read_by(profile).analyse(index, roundings, slice(row, row + 1))
    if of_lse:
        assert numbers.lse is not None
        got, exact = float(numbers.lse(index)[row]), float(rows.lse[0])
        spacing = float(FORMATS[numbers.lse_dtype].spacing(exact)) if math.isfinite(exact) else 0.0
        return Worst("lse", where, got, exact, float(rows.lse_bound[0]) + spacing / 2)
    column = where[-1]
    got = float(numbers.out(index)[row, column])
    allowed, exact = _allow(rows, column, verdict), float(rows.out[0, column])
    none = exact == 0 and allowed < FORMATS[numbers.out_dtype].spacing(0.0)  # no other number
    return Worst(verdict.of, where, got, exact, 0.0 if none else allowed)


def _allow(rows: RowErrors, column: int, verdict: Verdict) -> float:
    """Return how far an element may be off: by its bound, and by all tests of all elements."""
    # 2 e^(-t^2 / 2) for each element, times elements and tests, is alpha: Holm's first step.
    tries = 2 * max(len(verdict.tests), 1) * math.prod(verdict.shape) / verdict.alpha
    rounding = abs(float(rows.nearest[0, column] - rows.out[0, column]))
    most = math.sqrt(2 * math.log(tries)) * float(rows.worst[0, column]) + rounding
    return min(float(rows.bound[0, column]), most + float(rows.slack[0, column]))


def _find_place(numbers: Numbers, verdict: Verdict) -> Index:
    """Find the first element that is not finite, one beyond its bound, or the largest z."""
    if verdict.verdict == "FAIL":
        for index in np.ndindex(verdict.shape[:-2]):
            strange = np.argwhere(~np.isfinite(numbers.out(index)))
            if len(strange):
                return (*index, *map(int, strange[0]))
        for test in verdict.tests:
            if test.name == "bound" and test.adjusted <= verdict.alpha and test.where:
                return tuple(map(int, re.findall(r"\d+", test.where)))
    return verdict.z.where


def _find_worst_normaliser(problem: Problem, numbers: Numbers) -> Index:
    """Find the log normaliser that is farthest off, and not finite before all others."""
    assert numbers.lse is not None
    far = 0.0
    where: Index = ()
    for index, i in problem.items():
        with np.errstate(all="ignore"):
            exact, got = attend_rows(problem.head(index), i, None).lse, numbers.lse(index)[i]
            off = np.where(got == exact, 0.0, np.abs(got - exact))
        off = np.where(np.isnan(off), math.inf, off)
        row = int(np.argmax(off)) if len(off) else 0
        if len(off) and off[row] > far:
            far, where = float(off[row]), (*index, i.start + row)
    return where
