"""Mistakes in some tiles of keys: which tiles is found by one linear fit.

An output times the sum of the weights is the sum of the weighted values: linear in which tile of
keys is computed by which text, or read from which other tile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, product
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ....arrays.library import Doubles
from ....arrays.words import place
from ...rounding.problems import Index, Problem
from ...verification.findings import describe_span
from ..causes.sampled import Alternative, Result, Rows, attend, take_rows
from ..causes.slips import (
    TILE_SIZES,
    attend_by,
    list_parts,
    score_all,
)
from ..causes.wrong_rows import Sampled, finite, row_sizes, thin
from .maps import write_shift

Scored = tuple[Doubles, Doubles]  # scores of some rows, -inf where a key is hidden, and values
ScoreText = Callable[[Rows], Scored]
Chosen = npt.NDArray[np.int64]
_MOVED_TILES, _SCOPED_TILES = 16, 32  # of which each may be another, and that may go wrong, at most
_HEADS_OF_TILES, _ROWS_OF_TILES, _SOURCES = 4, 16, 2**10  # that are looked at, and pairs of tiles
_STEP_OF_TILES = 0.95  # of the square of errors, at most, that one more tile leaves
_SEEN_BY_FIT = 30.0  # root of the sum of squares of z by which a tile is known
_USUAL_OFF, _MOST_OFF = 0.1, 0.45  # how far shares are from 0 or 1: the median, and the most
_MOST_LEFT = 0.03  # of the square of errors, at most, that a choice leaves
_PARTS_OF_TILES, _LEFT_BY_PARTS = (2, 4, 8), 4.0  # mean square of z, at most
_SPANS_NAMED = 3  # spans of keys that are named one by one


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
        """Find, one after another, the tile read in place of each: that which leaves least."""
        rows = -(-_ROWS_OF_TILES // len(some))
        each = [self._sum(x.take(thin(np.arange(len(x.got)), rows)), unit) for x in some]
        sums, rest = (np.concatenate(x, -1) for x in zip(*each, strict=True))
        every, squares = np.arange(len(sums)), np.einsum("tsx,tsx->ts", sums, sums)
        read, left = every.copy(), rest + np.einsum("ttx->x", sums[:, : len(sums)])
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
        return read if far < _MOST_LEFT * before and np.any(read == every) else None

    def _sum(self, x: Sampled, unit: float) -> tuple[Doubles, Doubles]:
        """Sum what each tile adds to errors if it is read from each, (tiles, sources, numbers).

        What is in the sum beside the keys is apart.
        """
        head, at = take_rows(self.problem, x.rows), x.rows.at
        top, m, scale = attend(head).lse[:, None], head.keys, unit * row_sizes(x.got)
        shown = np.ones((m, len(head.q)), bool) if head.mask is None else head.mask.T
        bias = np.zeros(shown.shape) if head.bias is None else head.bias.T
        keys, values = (self.lay_out(y, at) for y in "kv")
        rows = keys.reshape(-1, keys.shape[-1])
        bare = head._replace(k=rows, bias=None, mask=None, sink=None)
        scores = (score_all(bare) - top).T.reshape(*keys.shape[:2], -1)
        sink = 0.0 if head.sink is None else np.exp(head.sink - top)
        sums = []
        for own, (see, more) in enumerate(zip(self.cut(shown), self.cut(bias), strict=True)):
            s = scores if "k" in self.names else scores[own : own + 1]
            v = values if "v" in self.names else values[own : own + 1]
            w = np.swapaxes(np.where(see, np.exp(s + more), 0.0), 1, 2)
            off = (w @ v - np.sum(w, -1, keepdims=True) * x.got) / scale
            sums.append(np.broadcast_to(off, (len(keys), *off.shape[1:])).reshape(len(keys), -1))
        return np.stack(sums), (-sink * x.got / scale).ravel()

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
        more = f" and {len(words) - _SPANS_NAMED} more" if len(words) > _SPANS_NAMED else ""
        return ", ".join(words[:_SPANS_NAMED]) + more

    def _name_tiles(self, tiles: Chosen) -> str:
        last = min((tiles[-1] + 1) * self.size, self.problem.shape[1]) - 1
        return f"{tiles[0] * self.size} to {last}"


def choose_columns(columns: Doubles, rest: Doubles, but_all: bool = True) -> Chosen | None:
    """Choose columns, (columns, numbers), that add up to the rest: some, but not all."""
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
    return known[is_chosen] if left @ left < _MOST_LEFT * (rest @ rest) else None


def _choose_alone(columns: Doubles) -> Chosen | None:
    """Choose columns that add up to nothing, beside which all others are too small to be told."""
    if not np.all(np.isfinite(columns)) or len(columns) > columns.shape[1]:
        return None
    sums, sizes, _ = np.linalg.svd(columns, full_matrices=False)
    if not sizes[-1] ** 2 < _LEFT_BY_PARTS * columns.shape[1]:
        return None
    share = sums[:, -1] / sums[np.argmax(np.abs(sums[:, -1])), -1]
    off = np.abs(share - (share > 0.5))
    few = np.max(off) < _MOST_OFF and 0 < np.sum(share > 0.5) < len(share)
    return np.flatnonzero(share > 0.5) if few else None


def list_crossed_parts(
    problem: Problem, wrong: Sequence[Sampled], unit: float
) -> Iterator[Alternative]:
    """List kernels whose weights of a part of each tile meet values of other parts, or of none."""
    m, elements = problem.shape[1], sum(x.got.size for x in wrong)
    for size, count in product(TILE_SIZES, _PARTS_OF_TILES):
        if 2 * size > m or size < 8 * count or 4 * count**2 > elements:
            continue
        columns, rest = [], []
        for x in wrong:
            scale = unit * row_sizes(x.got)
            sums, beside = _cross(problem, size, count, x.rows)
            columns.append((sums / scale).reshape(count * count, -1))
            rest.append(((x.got - beside) / scale).ravel())
        a, b = np.concatenate(columns, -1), np.concatenate(rest)
        if not (np.all(np.isfinite(a)) and np.all(np.isfinite(b))):
            return
        own = np.eye(count).ravel()
        known = np.sqrt(np.sum(np.square(a), -1)) > _SEEN_BY_FIT
        share = np.linalg.lstsq(a[known].T, b - own[~known] @ a[~known], rcond=1e-9)[0]
        times = own.copy()
        times[known] = np.rint(share)
        left = b - times @ a
        alike = np.array_equal(times, times[0] * own)  # a factor of all
        if np.any(times < 0) or alike or np.mean(left * left) > _LEFT_BY_PARTS:
            continue
        cross = times.reshape(count, count)
        answer = partial(_attend_crossed, problem, size, cross)
        yield Alternative(_name_crossed(size, cross), problem, answer=answer)


def _cross(problem: Problem, size: int, count: int, rows: Rows) -> tuple[Doubles, Doubles]:
    """Sum weights of each part of all tiles times values of each part, and what is no key's."""
    head = take_rows(problem, rows)
    w, m = np.exp(score_all(head) - attend(head).lse[:, None]), head.keys
    more = -m % size
    parts = (-1, count, size // count)
    of_parts = np.pad(w[:, :m], ((0, 0), (0, more))).reshape(len(w), *parts).transpose(2, 0, 1, 3)
    v = np.pad(head.v[:m], ((0, more), (0, 0))).reshape(*parts, head.v.shape[1]).swapaxes(0, 1)
    sums = of_parts.reshape(count, 1, len(w), -1) @ v.reshape(count, -1, head.v.shape[1])
    return sums, w[:, m:] @ head.v[m:]


def _attend_crossed(problem: Problem, size: int, times: Doubles, rows: Rows) -> Result:
    sums, beside = _cross(problem, size, len(times), rows)
    exact = attend(take_rows(problem, rows))
    return exact._replace(out=np.einsum("st,strd->rd", times, sums) + beside)


def _name_crossed(size: int, times: Doubles) -> str:
    each = np.arange(size) // (size // len(times))
    words = []
    for part, row in enumerate(times):
        theirs = [describe_keys(each == x) for x in np.flatnonzero(row)]
        often = [f" {c:.0f} times" * (c > 1) for c in row[row > 0].tolist()]
        if theirs and not np.array_equal(row, np.eye(len(times))[part]):
            met = " and ".join(f"{x}{y}" for x, y in zip(theirs, often, strict=True))
            words.append(f"weights of {describe_keys(each == part)} meet the values of {met}")
    if lost := np.flatnonzero(~times.any(-1)).tolist():
        keys = describe_keys(np.isin(each, lost))
        words.append(f"weights of {keys} count in the sum of the weights only")
    return f"in each tile of {size} keys, {', and '.join(words)}"


def list_scoped(
    problem: Problem, alternatives: Iterable[Alternative], wrong: Sequence[Sampled], unit: float
) -> Iterator[Alternative]:
    """List kernels that are another for some tiles of keys alone: those of the nearest fit."""
    m = problem.shape[1]
    right = partial(score_rows, Alternative("", problem))
    texts: list[tuple[str, ScoreText, int]] = [
        (
            x.text,
            partial(score_rows, x),
            next((y for y in (8, *TILE_SIZES) if m <= y * _SCOPED_TILES), m),
        )
        for x in chain(alternatives, _list_shifted(problem))
        if x.compute is attend and x.answer is None and x.move is None
    ]
    for called, edges in list_parts(problem):
        text = f"weights of {called} are not rescaled from their own maximum to that of all"
        own = partial(_keep_own_maximum, problem, edges)
        texts.append((text, own, edges[1] - edges[0]))
    given = [right(x.rows) for x in wrong]
    for text, other, size in texts:
        if size >= m:
            continue
        columns, rest = [], []
        for x, (s, v) in zip(wrong, given, strict=True):
            t, u = other(x.rows)
            if s.shape != t.shape or v.shape != u.shape or np.any(np.isnan(t)):
                break
            lse = np.logaddexp.reduce(s, -1)[:, None]
            mine, theirs = (_sum_by(y - lse, z, x.got, size, m) for y, z in ((s, v), (t, u)))
            # Roundings of a row count as often as it is in the sum of all weights.
            scale = unit * row_sizes(x.got) * np.maximum(np.sum(np.exp(t - lse), -1), 1.0)[:, None]
            columns.append(((theirs - mine) / scale).reshape(len(mine), -1)[:-1])
            rest.append(-(np.sum(mine, 0) / scale).ravel())
        else:
            every = np.concatenate(columns, -1)
            chosen = choose_columns(every, np.concatenate(rest))
            chosen = _choose_alone(every) if chosen is None else chosen
            if chosen is not None:
                keys = np.isin(np.arange(m) // size, chosen)
                words = f"{text}, but only for {describe_keys(keys)}"
                answer = partial(_attend_mixed, right, other, keys)
                yield Alternative(words, problem, answer=answer)


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


def _sum_by(s: Doubles, v: Doubles, got: Doubles, size: int, keys: int) -> Doubles:
    """Sum over tiles of keys what each adds to an error; the last is what is beside the keys."""
    w, tiles = np.exp(s), -(-keys // size)
    more = (0, tiles * size - keys)
    of_tile = np.pad(w[:, :keys], ((0, 0), more)).reshape(-1, tiles, size).swapaxes(0, 1)
    values = np.pad(v[:keys], (more, (0, 0))).reshape(tiles, size, -1)
    parts = (of_tile, values), (w[None, :, keys:], v[None, keys:])
    return np.concatenate([x @ y - np.sum(x, -1, keepdims=True) * got for x, y in parts])


def mix_keys(right: ScoreText, other: ScoreText, keys: npt.NDArray[np.bool_], rows: Rows) -> Scored:
    """Score some keys by one text, and the others by the right one."""
    (s, v), (t, u) = right(rows), other(rows)
    here = np.pad(keys, (0, len(v) - len(keys)))
    return np.where(here, t, s), np.where(here[:, None], u, v)


def _attend_mixed(
    right: ScoreText, other: ScoreText, keys: npt.NDArray[np.bool_], rows: Rows
) -> Result:
    return attend_by(*mix_keys(right, other, keys, rows))


def describe_keys(keys: npt.NDArray[np.bool_], called: str = "keys") -> str:
    """Name some keys, or queries, by spans of them, of many the first."""
    edges = np.flatnonzero(np.diff(np.pad(keys.astype(int), 1)))
    spans = [describe_span(np.arange(*x)) for x in zip(edges[::2], edges[1::2], strict=True)]
    periods = (2, 3, 4, 8, *TILE_SIZES) if len(spans) > 1 else ()
    for period in (x for x in periods if 2 * x <= len(keys)):
        if np.array_equal(keys, np.resize(keys[:period], len(keys))):
            spans = [f"{describe_span(np.flatnonzero(keys[:period]))} of each {period}"]
            break
    more = f" and {len(spans) - _SPANS_NAMED} more spans" if len(spans) > _SPANS_NAMED else ""
    name = called if np.sum(keys) > 1 else {"keys": "key", "queries": "query"}[called]
    return f"{name} {', '.join(spans[:_SPANS_NAMED])}{more}"
