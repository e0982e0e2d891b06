"""Some queries and keys of a head under another problem, and what that problem gives for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ....arrays.blocks import WHOLE
from ....arrays.library import Doubles
from ....engine.scores import Band, Reach
from ...rounding.head import TILE_KEYS, ScoredRows, SoftmaxHead, attend_rows
from ...rounding.problems import Index, Problem
from ..operators.maps import HeadRule

Numbers1D = npt.NDArray[np.int64]
Seen = npt.NDArray[np.bool_]
Result = ScoredRows  # what some queries of a head get
_PAIRS = 2**16  # of queries and keys, of which scores are made at a time


class Rows(NamedTuple):
    """Some queries of the head at an index, and the keys that are looked at."""

    at: Index
    queries: Numbers1D
    keys: Numbers1D


class Place(NamedTuple):
    """Where queries and keys of a head are: what a rule of visibility knows."""

    i: Numbers1D  # positions of queries, (queries, 1)
    j: Numbers1D  # and of keys, (keys,)
    n: Any  # how many queries the head has, or the sequence of each query
    m: Any  # and keys
    mask: Seen | None  # (queries, keys)
    at: Index = ()  # index of the head

    @property
    def ahead(self) -> Numbers1D:
        """How far keys are ahead of queries, if the last query is level with the last key."""
        return np.asarray(self.j - self.i - (self.m - self.n))


Bias = Callable[[Place, Index, Doubles | None], Doubles]


def attend(head: SoftmaxHead) -> Result:
    """Compute exact attention of all queries of a head."""
    size = max(4 * TILE_KEYS, _PAIRS // max(len(head.q), 1))
    return attend_rows(head, slice(0, len(head.q)), None, size)


def pad_sum(x: Result, more: Doubles, score: Any = 0.0) -> Result:
    """Add keys of a score, with value 0, by the logarithm of the sum of their weights."""
    lse = np.logaddexp(x.lse, more)
    share = np.exp(x.lse - np.where(np.isfinite(lse), lse, 0.0))
    top = np.where(np.isfinite(more), np.maximum(x.top, score), x.top)
    return Result(share[:, None] * x.out, lse, top)


class Alternative(NamedTuple):
    """Another problem, or another way to compute, that may be what a kernel did."""

    text: str  # what is so, after "agrees if"
    problem: Problem  # with the options of the alternative
    seen: Callable[[Place], Seen] | None = None  # replaces causal attention and windows
    among: bool = True  # whether the mask of the problem hides keys as well
    bias: Bias | None = None  # added to scores, by place, head and the bias of the problem
    move: Callable[[Rows], Rows] | None = None  # to the queries that are answered, from the written
    compute: Callable[[SoftmaxHead], Result] = attend
    answer: Callable[[Rows], Result] | None = None  # the result for rows not all of one head
    dealt: bool = False  # whether query heads are dealt to key heads in turn
    plain: bool = True  # whether it comes before what says the same in other words
    named: bool = False  # whether it is known of the wrong heads that were taken alone
    fitted: bool = False  # whether it has numbers that are fitted

    def head(self, rows: Rows) -> SoftmaxHead:
        """Take the queries and keys of a head; what is hidden is in the mask."""
        if self.move is not None:
            rows = self.move(rows)
        return take_rows(self.problem, rows, self.seen, self.among, self.bias)

    def result(self, rows: Rows) -> Result:
        """Compute the result for some queries."""
        with np.errstate(all="ignore"):
            return self.compute(self.head(rows)) if self.answer is None else self.answer(rows)


def read_heads(problem: Problem, to: HeadRule, text: str = "") -> Alternative:
    """Return the kernel whose heads hold the output of others, those that a rule says."""
    return Alternative(text, problem, move=lambda x: x._replace(at=to(x.at)))


def answer_places(problem: Problem, to: Callable[[int], tuple[int, int]], rows: Rows) -> Result:
    """Compute the rows of the heads and queries that a rule finds; zeros past the last query.

    The rule is of the place of a row among those of all heads, one head after another.
    """
    n, given, results = problem.shape[0], Alternative("", problem), []
    for place in (problem.number(rows.at) * n + rows.queries).tolist():
        head, i = to(place)
        at = Rows(problem.index_of(head), np.array([min(i, n - 1)]), rows.keys)
        x = given.result(at)
        results.append(x if i < n else Result(*(0 * y for y in x)))
    return Result(*(np.concatenate(x) for x in zip(*results, strict=True)))


def take_rows(
    problem: Problem,
    rows: Rows,
    seen: Callable[[Place], Seen] | None = None,
    among: bool = True,
    bias: Bias | None = None,
) -> SoftmaxHead:
    """Take some queries and keys of a head, and a sink if all keys are taken."""
    arrays, (at, i, j) = problem.read(rows.at), rows
    n, m = len(arrays["q"]), len(arrays["k"])
    # A sink belongs to the whole row: a part of the keys is taken without it.
    every = len(j) == m
    some = problem if every else problem._replace(has_sinks=False)
    head = some.head(at, i, WHOLE if every else j)
    place = Place(i[:, None], j, n, m, head.mask, at)
    visible = show_band(problem)(place) if seen is None else seen(place)
    if head.mask is not None and among:
        visible = visible & head.mask
    return head._replace(
        bias=head.bias if bias is None else bias(place, at, head.bias),
        mask=None if visible.all() else np.broadcast_to(visible, (len(i), len(j))),
        causal=False,
        window=(None, None),
    )


def show_band(problem: Problem) -> Callable[[Place], Seen]:
    """Return what causal attention and windows show."""
    return lambda x: show_distances(x.ahead, problem.causal, problem.window)


def show_distances(ahead: Numbers1D, causal: bool, window: Reach) -> Seen:
    """Tell how far ahead causal attention and windows let a query see."""
    _, left, right = Band.of(0, causal, window)
    visible: Any = np.ones(ahead.shape, bool)
    visible &= True if left is None else ahead >= -left
    return np.asarray(visible & (True if right is None else ahead <= right))
