"""Add up the errors of a kernel over rows and keys, head by head, as the tests need them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ...arrays.library import Doubles
from ...arrays.threads import Sequencer, available, for_each
from ..rounding.backward import analyse_gradients
from ..rounding.head import CACHED_PAIRS, TILE_KEYS, ScoredRows, Tile, attend_rows, scan_tiles
from ..rounding.problems import Index, Problem
from ..rounding.profiles import Profile
from ..rounding.roundings import Roundings, RowErrors
from ..rounding.saved import share_tile
from ..rounding.ties import count_equal, mark_equal
from .directions import NEARLY_ONE, PLAIN_DIRECTIONS, list_tangents
from .evidence import DirectionSums, Evidence, Known, Tally
from .findings import Numbers
from .z_scores import LseErrors, over_bound

ONE_PERCENT = 0.01  # of a result, an error that is to be seen
_TILE_KEYS = 128  # that are looked at along the loss of each
_FAR = 8.0  # standard deviations at which one of a million elements is surely rejected
_THIN = 16  # of so many tokens one is enough to tell rows of gradients apart
_SHARED_PAIRS = 2**24  # of a head, at most, whose gradients are analysed together
_ANOTHER = 16.0  # units in the last place of a result, from which on it is another


class HeadSums:
    """What the sweep over the heads collects for one profile."""

    def __init__(
        self,
        problem: Problem,
        names: Sequence[str],
        numbers: Numbers,
        weights: Doubles,
        rows_apart: bool,
    ) -> None:
        (n, m, d_v), heads = problem.shape, math.prod(problem.lead)
        self.rows_apart = rows_apart
        m = m + problem.has_sinks if problem.is_mean else 0
        self.along: dict[str, Doubles] = {}  # the weights of errors in sums along a direction
        self.alone: dict[str, Doubles] = {}  # the variance of such a sum by what is in no other
        self.known: dict[str, Known] = {}  # those sums with a variance that is known, by head
        if problem.is_mean:  # it is found where it is wanted
            self.known = {x: Known(*np.zeros((5, heads))) for x in names if x in PLAIN_DIRECTIONS}
        if problem.gradient is not None and not rows_apart:
            self.along = {x: np.zeros((heads, n, d_v)) for x in names}
            self.alone = {x: np.zeros((heads, n)) for x in names}
        self.weights = weights  # of rows, (heads, n)
        self.problem, self.numbers = problem, numbers
        self.looked = np.zeros(heads)  # rows of each head that are looked at
        for index, i in problem.items():
            self.looked[problem.number(index)] += i.stop - i.start
        self.sums = {
            x: DirectionSums(*(np.zeros((heads, n)) for _ in DirectionSums._fields)) for x in names
        }
        best, even = (Tally(*(np.zeros((heads, m)) for _ in Tally._fields)) for _ in range(2))
        self.keys = Evidence(best, even)
        self.square, self.counted = np.zeros((heads, n)), np.zeros((heads, n))
        self.peak = np.zeros((heads, n))  # largest |z| of each row
        self.hidden = np.zeros((heads, n))  # mean square beyond half a spacing, where that hides it
        self.lse_squares = None if numbers.lse is None else np.zeros((heads, n))
        self.over = np.zeros((heads, n))  # largest error over its bound, with log normalisers
        self.column, self.column_rows = np.zeros(d_v), np.zeros(d_v)
        self.strength = 0.0  # sum of squares of what tests take for z if results are 1 % too large
        self.furthest = 0.0  # the largest error that is no evidence, in standard deviations
        self.widest = 0.0  # the largest of these for the least favourable digits, over the usual
        self.idle: list[Index] = []  # rows that may hold 0, or the mean of the values
        self.plain = 0.0  # sum of squares of errors over standard deviations
        self.weighted = 0.0  # the same with the weights of rows, as sums along directions have them
        self.elements = 0  # that have a law
        self.farthest: tuple[float, Index] = (0.0, ())  # error over standard deviation
        self.largest: tuple[float, Index] = (0.0, ())  # of what tests take for z
        self.beyond: tuple[float, Index] = (0.0, ())  # error over bound
        self.lse_beyond = self.lse_square = self.lse_rows = 0.0

    @property
    def rows(self) -> int:
        """Number of rows that have a law."""
        return int(np.sum(self.counted > 0))

    def merge_rows(self) -> None:
        """Merge the rows of each head into one, as they have roundings in common."""
        used = self.counted > 0
        rows = np.sum(used, -1, keepdims=True)
        self.square = np.sum(self.square * used, -1, keepdims=True) / np.maximum(rows, 1)
        self.counted = np.sum(self.counted, -1, keepdims=True)
        self.weights = np.max(self.weights, -1, keepdims=True, initial=0.0)
        self.sums = {
            name: DirectionSums(*(np.sum(x, -1, keepdims=True) for x in sums))
            for name, sums in self.sums.items()
        }

    def add_laws(self, laws: Mapping[str, tuple[Doubles, Doubles]]) -> None:
        """Add the variances and slacks of the sums of rows along some directions."""
        for name, (variance, slack) in laws.items():
            sums = self.sums[name]
            self.sums[name] = sums = sums._replace(slack=np.minimum(slack, sums.slack))
            self.known[name] = Known(*(np.sum(self.weights * x, -1) for x in (*sums, variance)))

    def add_few(self, index: Index, i: slice, rows: RowErrors) -> Callable[[], None]:
        """Write rows as `add` does, but for the sums along keys."""
        return self.add(index, i, rows, keys=False)

    def add(self, index: Index, i: slice, rows: RowErrors, keys: bool = True) -> Callable[[], None]:
        """Write the rows of a block of queries; return what adds its part of the sums."""
        at = self.problem.number(index)
        error, rounding = rows.errors(self.numbers.out(index)[i]), rows.errors(rows.nearest)
        ratio = over_bound(error, rows.bound)
        known = np.isfinite(rows.std) & np.isfinite(error)
        error, rounding = (np.where(known, x, 0.0) for x in (error, rounding))
        near = np.minimum(rounding, 0.0) - rows.slack, np.maximum(rounding, 0.0) + rows.slack

        # About any share of the rounding of the exact result, and beyond what may be in common.
        def least(x: Doubles) -> Doubles:
            """Take what is left of an error without what is no evidence."""
            return np.asarray((x - np.clip(x, *near)) / rows.worst)

        z = least(error)
        count = np.sum(known, -1)
        self.square[at, i] = np.sum(z * z, -1) / np.maximum(count, 1)
        self.counted[at, i] = count
        self.peak[at, i] = np.max(np.abs(z), -1, initial=0.0)
        if self.problem.is_mean:
            past = np.maximum(np.abs(error) - rows.slack - rows.spacing / 2, 0.0)
            past = np.where(known, np.square(past) / rows.before_rounding(), 0.0)
            self.hidden[at, i] = np.sum(past, -1) / np.maximum(count, 1) * rows.hidden()
        self.over[at, i] = np.max(ratio, -1, initial=0.0)
        of_row = (
            self.weights[at, i, None] if self.rows_apart else self.weights[at, 0] / self.looked[at]
        )
        # Along a direction f: T = sum f e / std^2, the best weights for Gaussian errors.
        errors, roundings, slacks = (x / rows.std for x in (error, rounding, rows.slack))
        for name, change in list_tangents(self.problem, index, i, rows):
            steep, sums = np.where(known, change / rows.std, 0.0), self.sums[name]
            sums.errors[at, i] = np.sum(steep * errors, -1)
            sums.nearest[at, i] = np.sum(steep * roundings, -1)
            sums.size[at, i] = np.sum(steep * steep, -1)
            sums.slack[at, i] = np.sum(np.abs(steep) * slacks, -1)
            if name in self.along:
                assert rows.apart is not None
                self.along[name][at, i] = w = steep / rows.std
                self.alone[name][at, i] = np.sum(w * w * rows.apart, -1)
        # What would be seen of a result 1 % too large, and how large an unseen error may be.
        strength = float(np.sum(np.square(least(np.where(known, ONE_PERCENT * rows.out, 0.0)))))
        furthest, widest = (
            float(np.max(np.where(known, x / rows.std, 0.0), initial=0.0))
            for x in (np.maximum(-near[0], near[1]), rows.worst)
        )
        idle = self._find_idle(index, i, rows, near) if self.problem.is_mean else []
        plain, elements = float(np.sum(np.square(errors))), int(np.sum(known))
        heavy = self.weights[at, i, None] if self.rows_apart else self.weights[at, 0]
        weighted = float(np.sum(heavy * np.square(errors)))
        column, column_rows = np.sum(of_row * z * z, 0), np.sum(of_row * known, 0)
        far, largest, beyond = (
            _find_largest(x, index, i) for x in (np.abs(errors), np.abs(z), ratio)
        )
        more = []
        if self.problem.is_mean and keys:
            more.append(self._add_keys(at, index, i, rows, errors / rows.std, roundings / rows.std))
        if self.numbers.lse is not None:
            more.append(self._add_lse(at, i, self.numbers.lse(index)[i], rows))

        # Called in the order of blocks, whatever thread was first: sums are the same in every run.
        def sums_of_all() -> None:
            self.strength += strength
            self.furthest = max(self.furthest, furthest)
            self.widest = max(self.widest, widest)
            self.idle.extend(idle)
            self.plain += plain
            self.weighted += weighted
            self.elements += elements
            self.column += column
            self.column_rows += column_rows
            self.farthest = max(self.farthest, far, key=lambda x: x[0])
            self.largest = max(self.largest, largest, key=lambda x: x[0])
            self.beyond = max(self.beyond, beyond, key=lambda x: x[0])
            for add in more:
                add()

        return sums_of_all

    def _find_idle(
        self, index: Index, i: slice, rows: RowErrors, near: tuple[Doubles, Doubles]
    ) -> list[Index]:
        """Find rows where 0, or the mean of all values, is another result, and within reach."""
        v = self.problem.read(index)["v"]
        far = _FAR * rows.worst
        low, high = np.maximum(near[0] - far, -rows.bound), np.minimum(near[1] + far, rows.bound)
        free = np.zeros(len(rows.out), bool)
        # Nothing but the bound is known there: a kernel that wrote 0 would pass.
        for trivial in (0.0, np.mean(v, 0)) if v.size else ():
            off = trivial - rows.out
            another = _row_norms(off) > _ANOTHER * _row_norms(rows.spacing)
            free |= another & np.all((low <= off) & (off <= high), -1)
        return [(*index, int(x)) for x in np.flatnonzero(free & np.any(v)) + i.start]

    def _add_lse(self, at: int, i: slice, got: Doubles, rows: RowErrors) -> Callable[[], None]:
        """Write the errors of the log normalisers; return what adds their part of the sums."""
        of = LseErrors.of(got, self.numbers.lse_dtype, rows)
        sums, apart = self.sums["lse"], self.weights[at, i]
        sums.errors[at, i], sums.size[at, i] = of.weights * of.errors, of.weights
        sums.nearest[at, i], sums.slack[at, i] = of.weights * of.rounding, of.weights * of.slack
        largest = float(np.max(of.ratio, initial=0.0))
        self.over[at, i] = np.maximum(self.over[at, i], of.ratio)
        assert self.lse_squares is not None
        self.lse_squares[at, i] = of.squares
        square = float(np.sum(apart * of.squares))
        count = float(np.sum(apart * (of.weights > 0)))

        def sums_of_all() -> None:
            self.lse_beyond = max(self.lse_beyond, largest)
            self.lse_square += square
            self.lse_rows += count

        return sums_of_all

    def _add_keys(
        self, at: int, index: Index, i: slice, rows: RowErrors, errors: Doubles, roundings: Doubles
    ) -> Callable[[], None]:
        """Sum errors along the loss of each key, and sink: the derivative p (v - out) / (1 - p)."""
        head = self.problem.head(index)
        inverse = 1 / np.square(rows.std)
        slack = inverse * rows.slack  # times |v - out|, by Cauchy and Schwarz
        far, about = _row_norms(slack)[:, None], np.sum(slack * np.abs(rows.out), -1)[:, None]
        moved = inverse * rows.out
        less = [np.sum(x * rows.out, -1, keepdims=True) for x in (errors, roundings, moved)]
        parts: list[tuple[slice, Evidence]] = []
        for tile in scan_tiles(head, i, max(_TILE_KEYS, CACHED_PAIRS // max(len(errors), 1))):
            # The same with f = share (out - v) for each key, multiplied out: these are products of
            # matrices with v, and with v^2 for the size.
            share = _lose_shares(tile, rows.lse)
            v = head.v[tile.keys]
            e, d = (share * (y - x @ v.T) for x, y in zip((errors, roundings), less, strict=False))
            size = inverse @ np.square(v).T
            size -= 2 * (moved @ v.T)
            size += less[-1]
            size *= share
            size *= share
            common = far * _row_norms(v) + about
            common *= share
            np.maximum(size, 0.0, out=size)  # it cancels where v is near out
            new = Evidence.of(e, d, size, common, self.weights[at, i, None], 0)
            parts.append((tile.keys, new))

        def sums_of_all() -> None:
            for keys, new in parts:
                self.keys.add(new, (at, keys))

        return sums_of_all


def sweep_pairs(sums: Sequence[HeadSums], dtype: str, profile: Profile) -> bool:
    """Add up the errors of gradients of a backward pass, and analyse each pair of tokens once.

    Return whether that is done. All rows must be looked at, by heads that are the same or share
    keys, and no running sum be rounded on the way. There must be heads for all threads, and few
    pairs in each: what is kept of the head of a thread are some 30 numbers for an element.
    """
    roundings, order = profile.roundings(dtype), Sequencer()
    of = {x.problem.result: x for x in sums}
    (read, *more) = (x.problem.read_by(profile) for x in sums if x.problem.result != "dq")
    gradient, (n, m, _) = read.gradient, read.shape
    assert gradient is not None
    alike = all(x.lead == read.lead for x in more)
    alike &= "dq" not in of or of["dq"].problem.lead == gradient.forward.lead
    whole = all(np.sum(x.looked) == np.size(x.weights) for x in sums)
    few = 0 < n * m <= _SHARED_PAIRS and available() <= 2 * len(gradient.heads)
    if roundings.parts is not None or not (alike and whole and few):
        return False

    def work(item: tuple[int, tuple[Index, Sequence[Index]]]) -> None:
        place, (index, heads) = item
        with np.errstate(all="ignore"):
            saved = gradient.saved(index, roundings)
            laws = analyse_gradients(saved, roundings, [*of])
            rest = [of[x].add(heads[h] if x == "dq" else index, i, law) for x, h, i, law in laws]

        def sums_of_all() -> None:
            for add in rest:
                add()

        order.add(place, sums_of_all)

    for_each(lambda: work, enumerate(gradient.heads.items()), most=len(gradient.heads))
    return True


class RowWeights:
    """The weights of rows by `row_weights`, once for all profiles that have the same.

    What is exact of the rows of scores is kept, by what profiles round queries, keys and values to.
    """

    def __init__(self, problem: Problem, dtype: str) -> None:
        self.problem, self.dtype = problem, dtype
        self.known: dict[Any, Doubles] = {}
        self.exact: dict[Any, dict[Any, ScoredRows]] = defaultdict(dict)

    def of_rows(self, problem: Problem) -> RowWeights:
        """Return those of a problem with fewer rows."""
        some = RowWeights(problem, self.dtype)
        some.exact = self.exact
        return some

    def of(self, profile: Profile) -> Doubles:
        """Return them for queries, keys and values as a profile reads them."""
        roundings, problem = profile.roundings(self.dtype), self.problem.read_by(profile)
        products = problem.gradient is not None and roundings.products_matter
        key: Any = (profile.reading, problem.rows_apart(roundings), products)
        key = (*key, roundings) if problem.kind == "recurrent" else key
        if key not in self.known:
            self.known[key] = row_weights(problem, roundings, self.exact[profile.reading])
        return self.known[key]


def row_weights(
    problem: Problem, roundings: Roundings, known: dict[Any, ScoredRows] | None = None
) -> Doubles:
    """Return 1 / g for g rows with one query or result; for heads of one key if rows depend.

    What is exact of rows of scores is taken from what is known, or added.
    """
    heads, n = math.prod(problem.lead), problem.shape[0]
    if not heads * n:
        return np.ones((heads, n))
    # Equal rows have equal errors, and are one witness: g of them weigh 1 / g each. Rows of a
    # recurrence depend on each other by its states, and count for fewer.
    if problem.kind == "recurrent":
        found = [problem.recurrence(index, roundings) for index in np.ndindex(problem.lead)]
        same = [mark_equal(_shorten(x.rows.out)) for x in found]
        states = [mark_equal(problem.read(x)["k"].reshape(1, -1)) for x in np.ndindex(problem.lead)]
        of_heads = 1 / count_equal(np.stack(states)) / [[x.dependence] for x in found]
        return np.asarray(np.minimum(1 / count_equal(np.stack(same)), of_heads))
    # Rows of dk that share a query's errors are one for each head; heads with equal keys are one.
    if not problem.rows_apart(roundings):
        keys = [problem.read(index)["k"] for index in np.ndindex(problem.lead)]
        marks = np.concatenate([mark_equal(x.reshape(1, -1)) for x in keys])
        return np.repeat(1 / count_equal(marks)[:, None], n, 1)
    apart = np.arange(heads * n).reshape(1, heads, n)
    equal = np.repeat(apart, 3, 0)  # numbers that are equal where rows are

    def mark(item: tuple[int, tuple[Index, slice]]) -> None:
        _, (index, i) = item
        at: Any = (problem.number(index), i)
        with np.errstate(all="ignore"):
            exact = _find_exact(problem, index, roundings, i, {} if known is None else known)
        rows: list[Any] = [_shorten(exact), *problem.list_sources(index, roundings, i)]
        for number, x in enumerate(rows):
            equal[(number, *at)] = mark_equal(x)

    for_each(lambda: mark, problem.list_in_turn(), most=heads + n)
    # Rows may be equal in their result or in what makes them: the smallest weight is safe.
    return np.asarray(np.min([1 / count_equal(x) for x in equal], 0))


def _find_exact(
    problem: Problem, index: Index, roundings: Roundings, i: slice, known: dict[Any, ScoredRows]
) -> Doubles:
    """Compute the exact result for some rows, unless it is known.

    Equal rows of a gradient have equal sums over a part of the tokens; only rows with such a sum of
    0 need all tokens.
    """
    if problem.gradient is not None:
        some = problem.exact(index, roundings, i, _THIN)
        return some if np.all(np.any(some, -1)) else problem.exact(index, roundings, i)
    if problem.kind != "scores":
        return problem.exact(index, roundings, i)
    at = index, i.start, i.stop
    if at not in known:
        size = max(4 * TILE_KEYS, 4 * CACHED_PAIRS // max(i.stop - i.start, 1))
        known[at] = attend_rows(problem.head(index), i, None, size)
    return known[at].out


def _shorten(x: Doubles) -> Doubles:
    """Round to float32 what is in its range."""
    with np.errstate(over="ignore"):
        short = x.astype(np.float32)
    return np.where(np.isfinite(short), short, x)


def _lose_shares(tile: Tile, lse: Doubles) -> Doubles:
    """Return p / (1 - p): what the loss of a key with the share p adds to those of others."""
    share, _ = share_tile(tile, lse)
    if np.max(share, initial=0.0) >= NEARLY_ONE:
        share[share >= NEARLY_ONE] = 0.0
    share /= 1 - share
    return share


def _row_norms(x: Doubles) -> Doubles:
    """Return the norms of rows."""
    return np.asarray(np.sqrt(np.sum(x * x, -1)))


def _find_largest(x: Doubles, index: Index, i: slice) -> tuple[float, Index]:
    """Find the largest number of an array, and its place."""
    if not x.size or not np.max(x) > 0:
        return 0.0, ()
    row, column = np.unravel_index(int(np.argmax(x)), x.shape)
    return float(x[row, column]), (*index, i.start + int(row), int(column))
