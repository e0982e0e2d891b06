"""Mistakes in some tiles of keys: which tiles is found by one linear fit.

An output times the sum of the weights is the sum of the weighted values: linear in which tile of
keys is computed by which text, or read from which other tile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from ....arrays.library import Doubles
from ...rounding.head import SoftmaxHead
from ...rounding.problems import Index, Problem
from ...verification.findings import describe_span
from ..causes.sampled import Alternative, Result, Rows, attend, take_rows
from ..causes.slips import (
    MERGED_PARTS,
    TILE_SIZES,
    attend_by,
    list_parts,
    merge_parts,
    score_all,
)
from ..causes.wrong_rows import Sampled, finite, row_sizes

Scored = tuple[Doubles, Doubles]  # scores of some rows, -inf where a key is hidden, and values
ScoreText = Callable[[Rows], Scored]
Chosen = npt.NDArray[np.int64]
_MOVED_TILES, _SCOPED_TILES = 16, 32  # of which each may be another, and that may go wrong, at most
_SEEN_BY_FIT = 30.0  # root of the sum of squares of z by which a tile is known
_USUAL_OFF, _MOST_OFF = 0.1, 0.45  # how far shares are from 0 or 1: the median, and the most
_MOST_LEFT = 0.03  # of the square of errors, at most, that a choice leaves
_PARTS_OF_TILES, _LEFT_BY_PARTS = (2, 4, 8), 4.0  # mean square of z, at most
_IN_TURN = (2, 4, 8, 3)  # parts
_SPANS_NAMED = 3  # spans of keys that are named one by one


def list_interleaved(problem: Problem) -> Iterator[Alternative]:
    """List kernels that merge parts in a wrong way, to which blocks of keys go in turn."""
    m = problem.shape[1]
    for parts, block in product(_IN_TURN, (1, *TILE_SIZES)):
        if parts * block >= m:
            continue
        of_key = np.arange(m) // block % parts
        edges = np.searchsorted(np.sort(of_key), np.arange(parts)).tolist()
        called = "keys" if block == 1 else f"blocks of {block} keys"
        for words, weigh in MERGED_PARTS.items():
            merge = partial(
                _merge_in_turn,
                order=np.argsort(of_key, kind="stable"),
                merge=partial(merge_parts, edges=edges, weigh=weigh, is_mean=True),
            )
            text = f"{parts} parts of the keys, to which {called} go in turn, are merged {words}"
            yield Alternative(text, problem, compute=merge)


def _merge_in_turn(
    head: SoftmaxHead, order: Chosen, merge: Callable[[SoftmaxHead], Result]
) -> Result:
    every = np.append(order, np.arange(len(order), len(head.k)))
    of_pairs = {x: y[:, order] for x in ("mask", "bias") if (y := getattr(head, x)) is not None}
    return merge(head._replace(k=head.k[every], v=head.v[every], **of_pairs))


def list_moved_tiles(
    problem: Problem, wrong: Sequence[Sampled], unit: float
) -> Iterator[Alternative]:
    """List kernels that read keys or values of other tiles in the place of some."""
    m = problem.shape[1]
    elements = sum(x.got.size for x in wrong)
    sizes = [x for x in TILE_SIZES[::-1] if m % x == 0 and 2 <= m // x <= _MOVED_TILES]
    for names, size in product(("k", "v", "kv"), sizes):
        if 4 * (m // size) ** 2 > elements:
            continue
        pairs = [(t, u) for t, u in np.ndindex(m // size, m // size) if t != u]
        columns = [_sum_moved(problem, x, names, size, unit) for x in wrong]
        chosen = choose_columns(
            np.concatenate([[x[t, u] - x[t, t] for t, u in pairs] for x in columns], -1),
            -np.concatenate([np.einsum("tt...->...", x[:-1]) + x[-1, 0] for x in columns], -1),
        )
        if chosen is None:
            continue
        source = np.arange(m // size)
        for t, u in (pairs[x] for x in chosen):
            source[t] = u
        read = (source[:, None] * size + np.arange(size)).ravel()
        moved = problem
        for name in names:
            moved = moved.replaced(name, partial(_read_places, read))
        yield Alternative(_name_moved(names, source, size), moved)


def _read_places(read: Chosen, _: Index, x: Any) -> Any:
    return x[read]


def _name_moved(names: str, source: Chosen, size: int) -> str:
    called = " and ".join({"k": "keys", "v": "values"}[x] for x in names)
    moved = np.flatnonzero(source != np.arange(len(source)))
    spans = [f"{t * size} to {t * size + size - 1}" for t in range(len(source))]
    words = [
        f"{called} {spans[t]} are those of {spans[u]}"
        for t, u in zip(moved[:_SPANS_NAMED].tolist(), source[moved].tolist(), strict=False)
    ]
    more = f" and {len(moved) - _SPANS_NAMED} more tiles" if len(moved) > _SPANS_NAMED else ""
    return f"tiles are read from elsewhere: {', '.join(words)}{more}"


def _sum_moved(problem: Problem, x: Sampled, names: str, size: int, unit: float) -> Doubles:
    """Sum over tiles what each adds to errors if it is read from each: (tiles + 1, tiles, ...).

    What is in the sum beside the keys is the last.
    """
    head = take_rows(problem, x.rows)
    m = head.keys
    every = score_all(head._replace(mask=None))
    top = attend(head).lse[:, None]
    bias: Any = np.zeros((len(every), m)) if head.bias is None else head.bias
    bare, scale = every[:, :m] - bias, unit * row_sizes(x.got)
    count = m // size
    found = np.zeros((count + 1, count, x.got.size))
    sink = np.sum(np.exp(every[:, m:] - top), -1, keepdims=True)
    found[-1] = (-sink * x.got / scale).ravel()
    for t, u in np.ndindex(count, count):
        own, other = (slice(y * size, y * size + size) for y in (t, u))
        w = np.exp(bare[:, other if "k" in names else own] + bias[:, own] - top)
        w = w if head.mask is None else np.where(head.mask[:, own], w, 0.0)
        v = head.v[other if "v" in names else own]
        found[t, u] = ((w @ v - np.sum(w, -1, keepdims=True) * x.got) / scale).ravel()
    return found


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


def list_crossed_parts(
    problem: Problem, wrong: Sequence[Sampled], unit: float
) -> Iterator[Alternative]:
    """List kernels whose weights of a part of each tile meet values of other parts, or of none."""
    m, elements = problem.shape[1], sum(x.got.size for x in wrong)
    for size, count in product(TILE_SIZES, _PARTS_OF_TILES):
        if size > m or size < 8 * count or 4 * count**2 > elements:
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
        (x.text, partial(score_rows, x), next((y for y in TILE_SIZES if m <= y * _SCOPED_TILES), m))
        for x in alternatives
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
            scale = unit * row_sizes(x.got)
            columns.append(((theirs - mine) / scale).reshape(len(mine), -1)[:-1])
            rest.append(-(np.sum(mine, 0) / scale).ravel())
        else:
            chosen = choose_columns(np.concatenate(columns, -1), np.concatenate(rest))
            if chosen is not None:
                keys = np.isin(np.arange(m) // size, chosen)
                words = f"{text}, but only for {describe_keys(keys)}"
                answer = partial(_attend_mixed, right, other, keys)
                yield Alternative(words, problem, answer=answer)


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
    w = np.exp(s)
    starts = [*range(0, keys, size), keys]
    return np.stack(
        [
            w[:, a:b] @ v[a:b] - np.sum(w[:, a:b], -1, keepdims=True) * got
            for a, b in zip(starts, [*starts[1:], len(v)], strict=True)
        ]
    )


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
    more = f" and {len(spans) - _SPANS_NAMED} more spans" if len(spans) > _SPANS_NAMED else ""
    name = called if np.sum(keys) > 1 else {"keys": "key", "queries": "query"}[called]
    return f"{name} {', '.join(spans[:_SPANS_NAMED])}{more}"
