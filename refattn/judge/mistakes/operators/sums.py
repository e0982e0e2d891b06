"""What parts add to wrong rows, and how often each counts there: one linear fit for all kinds.

An output times the sum of its weights is the sum of its weighted values: both are sums over parts,
such as tiles of keys that another text computes or that are read from elsewhere, or weights that
meet other values. A row of a gradient is a sum by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, product
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ....arrays.library import Doubles
from ....arrays.words import place
from ...rounding.problems import Index, Problem
from ...verification.findings import describe_span, name_first
from ..causes.sampled import Alternative, Result, Rows, attend, take_rows
from ..causes.slips import TILE_SIZES, list_parts, score_all
from ..causes.wrong_rows import Sampled, finite, row_sizes, thin
from .maps import write_shift

Scored = tuple[Doubles, Doubles]  # scores of some rows, -inf where a key is hidden, and values
ScoreText = Callable[[Rows], Scored]
# What parts add to rows, (parts, rows, columns), and what they should add.
PartTerms = tuple[Doubles, Doubles]
# The sums of weights and of weighted values that parts make, (parts, rows, 1 + columns), over that
# of all weights; and what is beside them.
AddSums = Callable[[Rows], PartTerms]
SumWay = tuple[AddSums, Callable[[Doubles], str]]  # and in words how often each part counts
_SEEN_BY_FIT = 30.0  # root of the sum of squares of z by which a part is known
_USUAL_OFF, _MOST_OFF = 0.1, 0.45  # how far shares are from 0 or 1: the median, and the most
_MOST_LEFT = 0.03  # of the square of errors, at most, that a choice leaves
_OFF_COUNTS, LEFT_BY_COUNTS = 0.05, 9.0  # how near a fit is to a count; mean square of z, at most
_LEFT_ALONE, LARGEST_LOG = 4.0, 300.0  # the same of a null vector; of weights, which stay finite
_SCOPED_TILES = 32  # of which some may go wrong, at most
_PARTS_OF_TILES = (2, 4, 8)
Chosen = npt.NDArray[np.int64]
_MOVED_TILES = 16  # of which each may be another, at most
_HEADS_OF_TILES, _ROWS_OF_TILES, _SOURCES = 4, 16, 2**10  # that are looked at, and pairs of tiles
_STEP_OF_TILES = 0.95  # of the square of errors, at most, that one more tile leaves
_LEFT_BY_TILES = 0.03  # of the square of errors, at most, that a choice leaves


def stack_terms(
    some: Iterable[Sampled], unit: float, list_terms: Callable[[Sampled], PartTerms]
) -> PartTerms:
    """Stack the terms of rows of heads in units of roundings: (parts, numbers), and numbers."""
    columns, rest = [], []
    for x in some:
        terms, total = list_terms(x)
        size = unit * row_sizes(x.got)
        columns.append((terms / size).reshape(*terms.shape[:-2], -1))
        rest.append((total / size).ravel())
    return np.concatenate(columns, -1), np.concatenate(rest)


def as_terms(add: AddSums, x: Sampled) -> PartTerms:
    """Write sums as terms of an error: weighted values less the output times the weights."""
    parts, beside = add(x.rows)
    of_parts, rest = (y[..., 1:] - y[..., :1] * x.got for y in (parts, beside))
    if parts.ndim > 3:  # of which some are others of the same part
        return of_parts, -rest
    # Roundings of a row count as often as it is in the sum of all weights.
    often = np.maximum(beside[:, :1] + np.sum(parts[..., :1], 0), 1.0)
    return of_parts / often, -rest / often


def fit_counts(terms: Doubles, rest: Doubles, usual: Any, most: float = math.inf) -> Any:
    """Fit how often terms, (terms, numbers), add up to the rest; None if they do not.

    Those that are too small to be told count as usual.
    """
    known = np.sqrt(np.sum(terms * terms, -1)) > _SEEN_BY_FIT
    if not (np.all(np.isfinite(terms)) and np.all(np.isfinite(rest))):
        return None
    if len(rest) < 2 * np.sum(known):
        return None
    counts = np.asarray(usual, float).copy()
    of_known = rest - counts[~known] @ terms[~known]
    fitted = np.linalg.lstsq(terms[known].T, of_known, rcond=None)[0]
    counts[known] = np.rint(fitted)
    left = rest - counts @ terms
    whole = np.max(np.abs(fitted - counts[known]), initial=0.0) < _OFF_COUNTS
    whole = whole and np.all((counts >= 0) & (counts <= most))
    return counts if whole and left @ left <= LEFT_BY_COUNTS * len(left) else None


def choose_columns(columns: Doubles, rest: Doubles, but_all: bool = True) -> Any:
    """Choose columns, (columns, numbers), that add up to the rest, by 1 and 0: some, but not all.

    None if no choice comes near.
    """
    if not (np.all(np.isfinite(columns)) and np.all(np.isfinite(rest))):
        return None
    known = np.flatnonzero(np.sqrt(np.sum(np.square(columns), -1)) > _SEEN_BY_FIT)
    if not len(known) or len(known) > len(rest):
        return None
    share = np.linalg.lstsq(columns[known].T, rest, rcond=1e-9)[0]
    is_chosen = share > 0.5
    off = np.abs(share - is_chosen)
    if not is_chosen.any() or (but_all and is_chosen.all()):
        return None
    if np.median(off) > _USUAL_OFF or np.max(off) > _MOST_OFF:
        return None
    left = rest - is_chosen @ columns[known]
    chosen = np.isin(np.arange(len(columns)), known[is_chosen]).astype(float)
    return chosen if left @ left < _MOST_LEFT * (rest @ rest) else None


def _choose_or_cancel(columns: Doubles, rest: Doubles) -> Any:
    """Choose columns, or those that add up to nothing beside which others are too small to tell."""
    chosen = choose_columns(columns, rest)
    if chosen is not None or not np.all(np.isfinite(columns)) or len(columns) > columns.shape[1]:
        return chosen
    sums, sizes, _ = np.linalg.svd(columns, full_matrices=False)
    if not 0 < sizes[-1] ** 2 < _LEFT_ALONE * columns.shape[1]:
        return None
    share = sums[:, -1] / sums[np.argmax(np.abs(sums[:, -1])), -1]
    few = np.max(np.abs(share - (share > 0.5))) < _MOST_OFF and 0 < np.sum(share > 0.5) < len(share)
    return (share > 0.5).astype(float) if few else None


def _list_by_sums(
    problem: Problem,
    wrong: Sequence[Sampled],
    unit: float,
    ways: Iterable[SumWay],
    fit: Callable[[Doubles, Doubles], Any],
) -> Iterator[Alternative]:
    """List kernels in whose rows parts count otherwise."""
    for add, say in ways:
        counts = fit(*stack_terms(wrong, unit, partial(as_terms, add)))
        if counts is not None:
            yield Alternative(
                say(counts), problem, answer=partial(_attend_sums, problem, add, counts)
            )


def _attend_sums(problem: Problem, add: AddSums, counts: Doubles, rows: Rows) -> Result:
    exact, (parts, beside) = attend(take_rows(problem, rows)), add(rows)
    total = beside + np.tensordot(counts, parts, 1)
    return exact._replace(out=total[:, 1:] / total[:, :1], lse=exact.lse + np.log(total[:, 0]))


def _beside_all_weights(values: Doubles, beside: Doubles) -> PartTerms:
    """Return sums of values alone, which leave that of the weights as it is."""
    return np.insert(values, 0, 0.0, -1), np.insert(beside, 0, 1.0, -1)


# --- weights that meet other values ---------------------------------------------------------------


def list_stale_weights(
    problem: Problem, wrong: Sequence[Sampled], unit: float
) -> Iterator[Alternative]:
    """List kernels that multiply values of some tiles by the weights of the tile before."""
    sizes = [x for x in TILE_SIZES if 2 * x <= problem.shape[1]]
    ways = [(partial(_add_stale, problem, x), partial(_say_stale, problem, x)) for x in sizes]
    yield from _list_by_sums(problem, wrong, unit, ways, partial(choose_columns, but_all=False))


def _say_stale(problem: Problem, size: int, tiles: Doubles) -> str:
    keys = describe_keys(tiles[np.arange(problem.shape[1]) // size] > 0)
    return f"values of {keys} meet the weights of the {size} keys before, not rescaled"


def _add_stale(problem: Problem, size: int, rows: Rows) -> PartTerms:
    """Return what each tile adds to a result with the weights of the tile before, over its own."""
    head = take_rows(problem, rows)
    exact, s, m = attend(head), score_all(head), head.keys
    starts = np.arange(0, m, size)
    tops = finite(np.maximum.accumulate(np.maximum.reduceat(s[:, :m], starts, -1), -1))
    added = [0 * exact.out]
    for t, j in enumerate(starts[1:].tolist(), 1):
        v = head.v[j : min(j + size, m)]
        before, own = s[:, j - size :][:, : len(v)], s[:, j : j + len(v)]
        moved = before + (tops[:, t] - tops[:, t - 1])[:, None]
        added.append((np.exp(moved - exact.lse[:, None]) - np.exp(own - exact.lse[:, None])) @ v)
    return _beside_all_weights(np.stack(added), exact.out)


def list_crossed_parts(
    problem: Problem, wrong: Sequence[Sampled], unit: float
) -> Iterator[Alternative]:
    """List kernels whose weights of a part of each tile meet values of other parts, or of none."""
    m, elements = problem.shape[1], sum(x.got.size for x in wrong)
    for size, count in product(TILE_SIZES, _PARTS_OF_TILES):
        if 2 * size <= m and size >= 8 * count and 4 * count**2 <= elements:
            way = partial(_cross, problem, size, count), partial(_say_crossed, size, count)
            yield from _list_by_sums(problem, wrong, unit, [way], partial(_fit_crossed, count))


def _fit_crossed(count: int, terms: Doubles, rest: Doubles) -> Any:
    own = np.eye(count).ravel()
    times = fit_counts(terms, rest, own)
    # That all parts count as often is a factor.
    return None if times is None or np.array_equal(times, times[0] * own) else times


def _cross(problem: Problem, size: int, count: int, rows: Rows) -> PartTerms:
    """Sum weights of each part of all tiles times values of each part, and what is no key's."""
    head = take_rows(problem, rows)
    w, m = np.exp(score_all(head) - attend(head).lse[:, None]), head.keys
    more = -m % size
    parts = (-1, count, size // count)
    of_parts = np.pad(w[:, :m], ((0, 0), (0, more))).reshape(len(w), *parts).transpose(2, 0, 1, 3)
    v = np.pad(head.v[:m], ((0, more), (0, 0))).reshape(*parts, head.v.shape[1]).swapaxes(0, 1)
    sums = of_parts.reshape(count, 1, len(w), -1) @ v.reshape(count, -1, head.v.shape[1])
    return _beside_all_weights(sums.reshape(count * count, *sums.shape[2:]), w[:, m:] @ head.v[m:])


def _say_crossed(size: int, count: int, counts: Doubles) -> str:
    each, times = np.arange(size) // (size // count), counts.reshape(count, count)
    words = []
    for part, row in enumerate(times):
        theirs = [describe_keys(each == x) for x in np.flatnonzero(row)]
        often = [f" {c:.0f} times" * (c > 1) for c in row[row > 0].tolist()]
        if theirs and not np.array_equal(row, np.eye(count)[part]):
            met = " and ".join(f"{x}{y}" for x, y in zip(theirs, often, strict=True))
            words.append(f"weights of {describe_keys(each == part)} meet the values of {met}")
    if lost := np.flatnonzero(~times.any(-1)).tolist():
        keys = describe_keys(np.isin(each, lost))
        words.append(f"weights of {keys} count in the sum of the weights only")
    return f"in each tile of {size} keys, {', and '.join(words)}"


# --- other texts for some tiles -------------------------------------------------------------------


def list_scoped(
    problem: Problem, alternatives: Iterable[Alternative], wrong: Sequence[Sampled], unit: float
) -> Iterator[Alternative]:
    """List kernels that do something else for some tiles of keys alone, which a fit chooses."""
    m = problem.shape[1]
    usual = next((y for y in (8, *TILE_SIZES) if m <= y * _SCOPED_TILES), m)
    texts: list[tuple[str, ScoreText, int]] = [
        (x.text, partial(score_rows, x), usual)
        for x in chain(alternatives, _list_shifted(problem))
        if x.compute is attend and x.answer is None and x.move is None
    ]
    for called, edges in list_parts(problem):
        text = f"weights of {called} are not rescaled from their own maximum to that of all"
        texts.append((text, partial(_keep_own_maximum, problem, edges), edges[1] - edges[0]))
    right = {x: _remember(partial(_sum_right, problem, x)) for *_, x in texts}
    ways = [
        (partial(_add_other, right[size], other, size), partial(_say_scoped, problem, text, size))
        for text, other, size in texts
        if size < m
    ]
    yield from _list_by_sums(problem, wrong, unit, ways, _choose_or_cancel)


def _list_shifted(problem: Problem) -> Iterator[Alternative]:
    """List causal masks that begin so many keys later or earlier, as those of other tiles do."""
    n, m, _ = problem.shape
    right = 0 if problem.causal else problem.window[1]
    if problem.packed is not None or right is None:
        return
    free, shifts = problem._replace(causal=False), (y for x in TILE_SIZES for y in (x - 1, x))
    for by in (sign * y for y in shifts if y < m for sign in (1, -1)):
        text = f"query i sees keys up to {write_shift('i', m - n + right + by)}"
        yield Alternative(text, free._replace(window=(problem.window[0], right + by)))


def _say_scoped(problem: Problem, text: str, size: int, tiles: Doubles) -> str:
    keys = describe_keys(tiles[np.arange(problem.shape[1]) // size] > 0)
    return f"{text}, but only for {keys}"


def score_rows(one: Alternative, rows: Rows) -> Scored:
    head = one.head(rows)
    return score_all(head), head.v


def _keep_own_maximum(problem: Problem, edges: Sequence[int], rows: Rows) -> Scored:
    """Score keys relative to the largest of their part, and that of all."""
    head = take_rows(problem, rows)
    s = score_all(head)
    tops = np.maximum.reduceat(s[:, : head.keys], edges, -1)
    lengths = np.diff([*edges, head.keys])
    own = np.repeat(finite(np.max(s, -1, keepdims=True) - tops), lengths, -1)
    return s + np.pad(own, ((0, 0), (0, s.shape[-1] - head.keys))), head.v


class _RightSums(NamedTuple):
    """What tiles of keys add to some rows, and the last of what is beside the keys."""

    shapes: tuple[tuple[int, ...], ...]  # of scores and of values
    lse: Doubles
    tiles: Doubles


def _sum_right(problem: Problem, size: int, rows: Rows) -> _RightSums:
    s, v = score_rows(Alternative("", problem), rows)
    lse = np.logaddexp.reduce(s, -1)[:, None]
    return _RightSums((s.shape, v.shape), lse, _sum_tiles(s - lse, v, size, problem.shape[1]))


def _remember(compute: Callable[[Rows], _RightSums]) -> Callable[[Rows], _RightSums]:
    """Keep results for rows that are asked for again."""
    known: dict[tuple[Index, bytes], _RightSums] = {}

    def look(rows: Rows) -> _RightSums:
        key = rows.at, rows.queries.tobytes()
        return known[key] if key in known else known.setdefault(key, compute(rows))

    return look


def _add_other(
    right: Callable[[Rows], _RightSums], other: ScoreText, size: int, rows: Rows
) -> PartTerms:
    """Return what tiles add by another text, less what they should; NaN if that is no other."""
    (shapes, lse, mine), (t, u) = right(rows), other(rows)
    if shapes != (t.shape, u.shape):
        return math.nan * mine[:-1], np.sum(mine, 0)
    theirs = _sum_tiles(t - lse, u, size, len(rows.keys))
    return (theirs - mine)[:-1], np.sum(mine, 0)


def _sum_tiles(s: Doubles, v: Doubles, size: int, keys: int) -> Doubles:
    """Sum weights, and weighted values, over tiles of keys; the last is what is beside the keys."""
    w, tiles, v = np.exp(np.minimum(s, LARGEST_LOG)), -(-keys // size), np.insert(v, 0, 1.0, -1)
    more = (0, tiles * size - keys)
    of_tile = np.pad(w[:, :keys], ((0, 0), more)).reshape(-1, tiles, size).swapaxes(0, 1)
    values = np.pad(v[:keys], (more, (0, 0))).reshape(tiles, size, -1)
    return np.concatenate([of_tile @ values, (w[:, keys:] @ v[keys:])[None]])


def mix_keys(right: ScoreText, other: ScoreText, keys: npt.NDArray[np.bool_], rows: Rows) -> Scored:
    """Score some keys by one text, and the others by the right one."""
    (s, v), (t, u) = right(rows), other(rows)
    here = np.pad(keys, (0, len(v) - len(keys)))
    return np.where(here, t, s), np.where(here[:, None], u, v)


# --- words ---------------------------------------------------------------------------------------


def describe_keys(keys: npt.NDArray[np.bool_], called: str = "keys") -> str:
    """Name some keys, or queries, by spans of them, of many the first."""
    edges = np.flatnonzero(np.diff(np.pad(keys.astype(int), 1)))
    spans = [describe_span(np.arange(*x)) for x in zip(edges[::2], edges[1::2], strict=True)]
    for period in range(2, len(keys) // 2 + 1) if len(spans) > 1 else ():
        if np.array_equal(keys, np.resize(keys[:period], len(keys))):
            spans = [f"{describe_span(np.flatnonzero(keys[:period]))} of each {period}"]
            break
    name = called if np.sum(keys) > 1 else {"queries": "query"}.get(called, called[:-1])
    return f"{name} {name_first(spans, more=' and {} more spans')}"


# --- tiles that are read from elsewhere -----------------------------------------------------------


def list_moved_tiles(
    problem: Problem, wrong: Sequence[Sampled], unit: float
) -> Iterator[Alternative]:
    """List kernels that read tiles of keys or values from other places or heads, or zeros."""
    m, share = problem.shape[1], problem.lead[-1] // (problem.key_heads or problem.lead[-1] or 1)
    heads = [x for x in np.ndindex(problem.lead) if not x or x[-1] % share == 0]
    sizes = [x for x in TILE_SIZES[::-1] if 1 < -(-m // x) <= _MOVED_TILES]
    for (names, size), alone in product(product(("k", "v", "kv"), sizes), (True, False)):
        # The same in all heads, from their own tiles, or of each of some its own.
        tiles = TilesOfHeads(problem, names, () if alone else heads, share, size)
        if (len(tiles.heads) + 1) * -((-m // size) ** 2) > _SOURCES:
            continue
        groups = [thin(wrong, _ROWS_OF_TILES)] if alone else [[x] for x in wrong[:_HEADS_OF_TILES]]
        found: dict[Index, Chosen] = {}
        for x in groups:
            if (read := tiles.find(x, unit)) is None:
                break
            found[x[0].rows.at] = read
        else:
            if found:
                yield _name_moved(problem, tiles, found)


def _name_moved(
    problem: Problem, tiles: TilesOfHeads, found: Mapping[Index, Chosen]
) -> Alternative:
    words = {at: tiles.name(at, y) for at, y in found.items()}
    same = set(words.values())
    # What is the same in the heads that were looked at, and of these alone, is so in all.
    every = len(same) == 1 and "head" not in min(same)
    moved, own = problem, next(iter(found.values()))
    for name in tiles.names:
        moved = moved.replaced(name, partial(tiles.change, name, found, own if every else None))
    text = min(same) if every else ", ".join(f"in head {place(x)} {y}" for x, y in words.items())
    return Alternative(f"tiles are read from elsewhere: {text}", moved, named=not every)


class TilesOfHeads(NamedTuple):
    """Tiles of keys, or values, of all heads, one after another: first the own, zeros at last."""

    problem: Problem
    names: str  # "k", "v" or "kv"
    heads: Sequence[Index]  # that have keys of their own
    share: int  # query heads of each
    size: int

    def order(self, at: Index) -> list[Index]:
        """List the heads that have keys, that of a query head first."""
        own = (*at[:-1], at[-1] // self.share * self.share) if at else at
        return [own, *(x for x in self.heads if x != own)]

    def cut(self, x: Any, value: Any = 0) -> Any:
        """Cut keys, the first axis, into tiles (tiles, size, ...)."""
        more = ((0, -len(x) % self.size), *((0, 0),) * (x.ndim - 1))
        return np.pad(x, more, constant_values=value).reshape(-1, self.size, *x.shape[1:])

    def lay_out(self, name: str, at: Index) -> Doubles:
        """Lay out the tiles of an array of all heads, and one of zeros."""
        every = [self.cut(self.problem.read(x)[name]) for x in self.order(at)]
        return np.concatenate([*every, 0 * every[0][:1]])

    def change(
        self, name: str, found: Mapping[Index, Chosen], rest: Chosen | None, at: Index, x: Any
    ) -> Any:
        """Read an array in the tiles that were found for its head, or for all other heads."""
        read = found.get(at, rest)
        if read is None:
            return x
        return self.lay_out(name, at)[read].reshape(-1, x.shape[-1])[: len(x)]

    def find(self, some: Sequence[Sampled], unit: float) -> Chosen | None:
        """Find for one tile after another which is read in its place: the one that leaves least."""
        rows = -(-_ROWS_OF_TILES // len(some))
        few = (x.few(rows) for x in some)
        sums, rest = stack_terms(few, unit, partial(as_terms, self._add))
        every, squares = np.arange(len(sums)), np.einsum("tsx,tsx->ts", sums, sums)
        read, left = every.copy(), np.einsum("ttx->x", sums[:, : len(sums)]) - rest
        before = far = float(left @ left)
        for _ in range(2 * len(sums)):
            now = sums[every, read]
            # The square of what is left with one tile read from another source.
            more = 2 * (sums @ left) + squares - 2 * (sums @ now[..., None])[..., 0]
            more += np.sum(now * now - 2 * now * left, -1, keepdims=True)
            tile, source = np.unravel_index(np.argmin(more), more.shape)
            if not more[tile, source] < (_STEP_OF_TILES - 1) * far:
                break
            left, read[tile] = left + sums[tile, source] - now[tile], source
            far = float(left @ left)
        return read if far < _LEFT_BY_TILES * before and np.any(read == every) else None

    def _add(self, rows: Rows) -> PartTerms:
        """Sum what each tile adds if it is read from each, (tiles, sources, rows, 1 + columns)."""
        head, at = take_rows(self.problem, rows), rows.at
        top, m = attend(head).lse[:, None], head.keys
        shown = np.ones((m, len(head.q)), bool) if head.mask is None else head.mask.T
        bias = np.zeros(shown.shape) if head.bias is None else head.bias.T
        keys, values = (self.lay_out(y, at) for y in "kv")
        bare = head._replace(k=keys.reshape(-1, keys.shape[-1]), bias=None, mask=None, sink=None)
        scores = (score_all(bare) - top).T.reshape(*keys.shape[:2], -1)
        values, sums = np.insert(values, 0, 1.0, -1), []
        for own, (see, more) in enumerate(zip(self.cut(shown), self.cut(bias), strict=True)):
            s = scores if "k" in self.names else scores[own : own + 1]
            v = values if "v" in self.names else values[own : own + 1]
            of_tile = np.swapaxes(np.where(see, np.exp(s + more), 0.0), 1, 2) @ v
            sums.append(np.broadcast_to(of_tile, (len(keys), *of_tile.shape[1:])))
        sink = np.zeros(top.shape) if head.sink is None else np.exp(head.sink - top)
        return np.stack(sums), np.pad(sink, ((0, 0), (0, values.shape[-1] - 1)))

    def name(self, at: Index, read: Chosen) -> str:
        """Say from where the tiles of a head are read."""
        called = {"k": "keys", "v": "values"}.get(self.names, "keys and values")
        by, words, count = read - np.arange(len(read)), list[str](), len(read)
        others = max(len(self.heads), 1)
        by[read // count == others] = -read.size  # zeros
        for t in np.split(np.arange(count), np.flatnonzero(np.diff(by)) + 1):
            head = int(read[t[0]]) // count
            here, there = (self._name_tiles(x % count) for x in (t, read[t]))
            of = f" of head {place(self.order(at)[head % others])}" if head else ""
            if head == others:
                words.append(f"{called} {here} are 0")
            elif by[t[0]]:
                words.append(f"{called} {here} are those of {there}{of}")
        return name_first(words, more=" and {} more")

    def _name_tiles(self, tiles: Chosen) -> str:
        last = min((tiles[-1] + 1) * self.size, self.problem.shape[1]) - 1
        return f"{tiles[0] * self.size} to {last}"
