"""What log normalisers are, also those of other heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from ...arrays.library import Doubles
from ...arrays.words import place
from ...rounding.problems import Index, Problem
from ...rounding.profiles import Profile
from ..findings import Numbers
from .sampled import Alternative, Result, Rows
from .wrong_rows import FAR, Sample, Sampled, differ, divide, error_of_lse, thin

_HEADS, _ROWS_OF_EACH = 32, 8  # that are compared, at most
_SEVERAL = 2  # numbers, at least, that are those of other heads
_NAMED = 4  # heads, at most, that are named


class Normalisers(NamedTuple):
    """What log normalisers are: in words, "" for those of an alternative, and of which result."""

    words: str
    result: Callable[[Rows], Result] | None = None  # of another one
    change: Callable[[Result, float | None], Doubles] = lambda x, _: x.lse

    def far(
        self, x: Sampled, result: Result, problem: Problem, numbers: Numbers, profile: Profile
    ) -> Doubles:
        """Say by how many standard deviations those of some rows are off."""
        assert x.lse is not None
        result = result if self.result is None else self.result(x.rows)
        with np.errstate(all="ignore"):
            lse = np.asarray(self.change(result, problem.head(x.rows.at).sink))
        std = error_of_lse(result._replace(lse=lse), numbers, profile, problem.shape[1])
        return np.asarray(np.abs(divide(differ(x.lse, lse), std)))


def list_exchanged_normalisers(
    problem: Problem, numbers: Numbers, sample: Sample, profile: Profile
) -> Iterator[tuple[str, Alternative]]:
    """List, of all wrong heads, of which others they hold log normalisers, if each is of one."""
    heads, wrong = [*np.ndindex(problem.lead)], np.flatnonzero(sample.wrong.any(1))
    m = problem.shape[1]
    if numbers.lse is None or not len(wrong) or not 1 < len(heads) <= _HEADS:
        return
    i = thin(np.flatnonzero(sample.wrong.any(0)), _ROWS_OF_EACH)
    if len(wrong) * len(i) < _SEVERAL:
        return
    given, keys = Alternative("", problem), np.arange(m)
    exact = {x: given.result(Rows(x, i, keys)) for x in heads}
    moved: dict[Index, Index] = {}
    for at in map(problem.index_of, wrong.tolist()):
        got = numbers.lse(at)[i]
        far = {
            y: np.max(np.abs(divide(differ(got, x.lse), error_of_lse(x, numbers, profile, m))))
            for y, x in exact.items()
        }
        moved[at] = min(far, key=far.__getitem__)
        if far[moved[at]] > FAR:
            return
    text = f"that of other heads: {_describe_moved(moved, problem.lead)}"
    yield text, Alternative("", problem, move=lambda x: x._replace(at=moved.get(x.at, x.at)))


def _describe_moved(moved: Mapping[Index, Index], lead: Index) -> str:
    """Say which head has that of which other, once if it is so in each batch member."""
    last = {x[-1:]: y[-1:] for x, y in moved.items()}
    members = np.ndindex(lead[:-1])
    every = {(*at, *x): (*at, *y) for at in members for x, y in last.items()}
    named = last if every == moved else moved
    words = [f"head {place(x)} from head {place(y)}" for x, y in named.items()]
    more = f" and {len(words) - _NAMED} more" if len(words) > _NAMED else ""
    order = _find_order(last, lead[-1]) if named is last else ""
    return ", ".join(words[:_NAMED]) + more + order


def _find_order(last: Mapping[Index, Index], heads: int) -> str:
    """Say that heads are written group by group in another order, if they are."""
    for a in (x for x in range(2, heads) if heads % x == 0):
        order = np.arange(heads).reshape(a, -1).T.ravel()
        if all(last.get((h,), (h,)) == (y,) for h, y in enumerate(order.tolist())):
            return f", as if heads in order ({a}, {heads // a}) were written as ({heads // a}, {a})"
    return ""


def share_of_offset(problem: Problem, sample: Sample) -> float:
    """Return the share of the errors of log normalisers that one number explains."""
    given = Alternative("", problem)
    errors = np.concatenate(
        [differ(x.lse, given.result(x.rows).lse) for x in sample.heads if x.lse is not None]
    )
    square = float(np.mean(np.square(errors))) if np.all(np.isfinite(errors)) else 0.0
    return 1 - float(np.var(errors)) / square if square else 0.0
