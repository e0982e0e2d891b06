"""Which keys wrong rows see: cuts that are fitted, one for all queries or one for each block."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ....arrays.blocks import blocks
from ....arrays.library import Doubles
from ...rounding.problems import Problem
from .sampled import Alternative, Place, Seen, show_band, take_rows
from .slips import hide_tile, score_all
from .wrong_rows import Sampled, differ, divide

_CUT_KEYS = 256  # that are summed at a time
_QUERY_BLOCKS = (4, 8, 16, 32, 64, 128, 256, 512)  # queries that may have a limit together
_MOST_LIMITS = 8  # that are tried
_WINDOW_ROWS, _TURNS = 4, 3  # by which windows are found, one limit and then the other
_TOLD_APART = 12.0  # sum of squares of z, by which fits cannot be told apart


def list_cuts(problem: Problem, x: Sampled, sizes: Doubles) -> Iterator[Alternative]:
    """List kernels that lose keys after one or before one, or mask none there: as fits some rows.

    It is the key by which these rows are nearest, in multiples of `sizes`.
    """
    m = problem.shape[1]
    head = take_rows(problem, x.rows)
    given, every = score_all(head), score_all(head._replace(mask=None))
    top = np.max(every, -1, keepdims=True)
    seen, opened = (np.exp(y - top) for y in (given, every))
    for turn in (1, -1):
        # Keys on the far side of the cut are lost, or all seen although a mask hides some.
        for rest in (0 * seen, opened) if head.mask is not None else (0 * seen,):
            far = np.sum(_rate_cuts(seen, rest, head.v, x, sizes, turn), 0)
            length = _choose_round(far, m if turn < 0 else 0)
            cut = slice(length, m) if turn > 0 else slice(0, m - length)
            if rest is opened and cut.start < cut.stop:
                yield _open_tile(problem, cut)
            elif length < m - 1:  # one that is missing is measured
                yield hide_tile(problem, cut)


def _rate_cuts(
    before: Doubles, after: Doubles, v: Doubles, x: Sampled, sizes: Doubles, turn: int = 1
) -> Doubles:
    """Rate each number of keys, 1 to all, that have some weights while the others have others.

    With `turn` -1 these are counted from the last key; what is beside the keys has its own weight.
    Return sums of squares of errors over `sizes`: (rows, numbers of keys).
    """
    keys = len(x.rows.keys)
    values, change = v[:keys][::turn], (before - after)[:, :keys][:, ::turn]
    rest = after.copy()
    # What is beside the keys is a sink, which no cut touches.
    rest[:, keys:] = before[:, keys:]
    total, out = np.sum(rest, -1, keepdims=True), (rest @ v)[:, None]
    found = []
    for j in blocks(0, keys, _CUT_KEYS):
        totals = total + np.cumsum(change[:, j], -1)
        outs = out + np.cumsum(change[:, j, None] * values[j], 1)
        with np.errstate(all="ignore"):
            z = divide(differ(outs / totals[..., None], x.got[:, None]), sizes[:, None])
        found.append(np.sum(z * z, -1))
        total, out = totals[:, -1:], outs[:, -1:]
    return np.concatenate(found, -1)


def _choose_round(far: Doubles, whole: int) -> int:
    """Choose the number of keys that fits: of those alike the one where the cut is roundest."""
    alike = np.flatnonzero(far <= np.min(far) + _TOLD_APART) + 1
    return int(max(alike, key=lambda x: math.gcd(int(abs(whole - x)), 2**20)))


def _open_tile(problem: Problem, j: slice) -> Alternative:
    """Show a tile of keys to all queries."""
    band = show_band(problem)

    def seen(x: Place) -> Seen:
        usual = band(x) if x.mask is None else band(x) & x.mask
        return np.asarray(usual | ((x.j >= j.start) & (x.j < j.stop)))

    text = f"keys {j.start} to {j.stop - 1} are not masked"
    return Alternative(text, problem, seen, among=False)


def list_windows(problem: Problem, x: Sampled, sizes: Doubles) -> Iterator[Alternative]:
    """List windows, where none is declared, whose limits fit a few rows: found one at a time."""
    n, m, _ = problem.shape
    if problem.packed is not None or problem.window != (None, None) or min(m - 1, len(x.got)) < 1:
        return
    some = np.unique(np.linspace(0, len(x.got) - 1, _WINDOW_ROWS).astype(int))
    x, sizes, widths = x.take(some), sizes[some], np.arange(m)
    head, level = take_rows(problem, x.rows), x.rows.queries[:, None] + m - n
    s = score_all(head)
    weights = np.exp(s - np.max(s, -1, keepdims=True))[..., None]
    terms = weights * np.pad(head.v, ((0, 0), (1, 0)), constant_values=1.0)
    # Sums over any window are a difference of two of these.
    sums = np.pad(np.cumsum(terms[:, :m], 1), ((0, 0), (1, 0), (0, 0)))

    def fit(left: Any, right: Any) -> int:
        """Find the width, of all in the place of one limit, by which the rows are nearest."""
        start, stop = (np.clip(y, 0, m)[..., None] for y in (level - left, level + right + 1))
        total = np.take_along_axis(sums, stop, 1) - np.take_along_axis(sums, start, 1)
        total += np.sum(terms[:, None, m:], 2)
        z = divide(differ(total[..., 1:] / total[..., :1], x.got[:, None]), sizes[:, None])
        far = np.sum(z * z, (0, 2))
        return int(np.argmin(np.where(np.isnan(far), math.inf, far)))

    # Each window with one limit has its own fit; with two they are fitted in turn.
    left = fit(widths, m)
    windows: dict[str, tuple[Any, Any]] = {f"{left} keys to the left": (left, None)}
    if not problem.causal:
        alone, right = fit(widths, 0), fit(m, widths)
        windows[f"{alone} keys to the left and 0 to the right"] = (alone, 0)
        windows[f"{right} keys to the right"] = (None, right)
        for _ in range(_TURNS):
            right = fit(left, widths)
            left = fit(widths, right)
        both = "both sides" if left == right else f"the left and {right} to the right"
        windows[f"{left} keys to {both}"] = (left, right)
    for words, window in windows.items():
        yield Alternative(f"there is a window of {words}", problem._replace(window=window))


class Limit(NamedTuple):
    """A last key that queries of a block see or, with `turn` -1, a first one."""

    turn: int
    own: int  # how far the limit that all queries should have is ahead of them
    size: int  # of a block of queries
    at: int | None  # query of the block whose limit it is; None for the a multiple of the size
    beyond: bool  # whether queries have it if it is above their own, and not if below

    def shows(self, x: Place) -> Seen:
        """Show the keys within the limits of queries."""
        level, limit = x.i + self.own, self.of(x.i)
        limit = np.maximum(level, limit) if self.beyond else np.minimum(level, limit)
        return np.asarray(x.j <= limit if self.turn > 0 else x.j >= limit)

    def of(self, i: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the limits of queries."""
        if self.at is None:
            sign = -1 if self.beyond else 1
            return np.asarray(sign * (sign * (i + self.own) // self.size * self.size))
        return np.asarray(i // self.size * self.size + self.own + self.at)

    def __str__(self) -> str:
        """Say what queries see."""
        if self.at is None:
            which = "next multiple" if self.beyond else "previous multiple"
            return f"windows start at the {which} of {self.size} keys, not at their own key"
        if self.turn < 0:
            start = "no earlier" if self.beyond else "no later"
            which = f"the window of query {self.at} of the block"
            return f"windows of a block of {self.size} queries start {start} than {which}"
        if self.at == self.size - 1:
            return f"queries of a block of {self.size} see all keys of the block"
        see = "also see the" if self.beyond else "see only"
        return f"queries of a block of {self.size} {see} keys up to query {self.at} of the block"


def list_reaches(
    problem: Problem, x: Sampled, sizes: Doubles, wrong: Callable[[Place], Seen] | None = None
) -> Iterator[Alternative]:
    """List kernels in which queries of a block see keys up to one, or from one on, as fits some.

    All queries do or, if `wrong` is given, those that it says are wrong.
    """
    n, m, _ = problem.shape
    (left, right), causal = problem.window, problem.causal or problem.window[1] == 0
    ends = []
    if causal and problem.packed is None:
        # The limit is taken off, and another for each block is fitted in its place.
        ends.append((1, m - n, problem._replace(causal=False, window=(left, None))))
    if left is not None and problem.packed is None:
        ends.append((-1, m - n - left, problem._replace(window=(None, right))))
    for turn, own, free in ends:
        head = take_rows(free, x.rows)
        s = score_all(head)
        w = np.exp(s - np.max(s, -1, keepdims=True))
        far = _rate_cuts(w, np.where(np.arange(w.shape[-1]) < m, 0.0, w), head.v, x, sizes, turn)
        # Numbers of keys that are counted from the end are turned, so that they are indices of
        # keys.
        limits = _fit_limits(far[:, ::turn], x.rows.queries, turn, own)
        shows = [partial(_show_both, show_band(free), y.shows) for y in limits]
        for limit, seen in zip(limits, shows, strict=True):
            if wrong is None:
                yield Alternative(str(limit), problem, seen)
            else:
                alone = partial(_show_where, wrong, seen, show_band(problem))
                yield Alternative(f"{limit}, but only in the wrong rows", problem, alone)


def _fit_limits(far: Doubles, queries: npt.NDArray[np.int64], turn: int, own: int) -> list[Limit]:
    """Find the limits that fit alike, those with the smallest blocks first: `far` is by the key."""
    found: list[tuple[float, Limit]] = []
    rows = np.arange(len(queries))
    for limit in _list_limits(queries, turn, own):
        keys = limit.of(queries)
        if np.all(keys >= 0 if turn > 0 else keys < far.shape[1]):
            off = np.sum(far[rows, np.clip(keys, 0, far.shape[1] - 1)])
            found.append((float(off), limit))
    least = min((off for off, _ in found), default=0.0)
    return [x for off, x in found if off <= least + _TOLD_APART][:_MOST_LIMITS]


def _list_limits(queries: npt.NDArray[np.int64], turn: int, own: int) -> Iterator[Limit]:
    """List limits that are above those of all queries, or below them."""
    for size in _QUERY_BLOCKS:
        for at in (*range(size), None) if turn < 0 else range(size):
            for beyond in (False, True):
                limit = Limit(turn, own, size, at, beyond)
                ahead = limit.of(queries) - queries - own
                # One on the other side would change nothing for some of these rows.
                if np.all(ahead > 0 if beyond else ahead < 0):
                    yield limit


def _show_both(band: Callable[[Place], Seen], rule: Callable[[Place], Seen], x: Place) -> Seen:
    return np.asarray(band(x) & rule(x))


def _show_where(
    where: Callable[[Place], Seen],
    rule: Callable[[Place], Seen],
    other: Callable[[Place], Seen],
    x: Place,
) -> Seen:
    return np.where(where(x), rule(x), other(x))
