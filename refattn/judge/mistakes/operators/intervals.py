"""Keys one after another that count or are read otherwise: which ones is found by running sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ....arrays.library import Doubles
from ....arrays.words import place
from ...rounding.problems import Index, Problem
from ...verification.findings import name_span
from ..causes.changed_inputs import list_scales
from ..causes.sampled import Alternative, Place, Result, Rows, Seen, attend, show_band, take_rows
from ..causes.slips import (
    LOSSES,
    TILE_SIZES,
    attend_by,
    hide_tile,
    leave_without_tile,
    name_keys,
    weigh_with_hidden,
    weigh_with_zeros,
)
from ..causes.wrong_rows import Sampled, row_sizes
from .arrays import NOWHERE, take_or_zero
from .maps import list_head_rules
from .strides import PLURALS
from .sums import LARGEST_LOG, ScoreText, mix_keys, score_rows

_EDGES = 128  # of intervals, at most, that are tried in pairs before they are made exact
_TURNS = 4  # in which an edge is made exact, and then the other
_ALIKE_EDGES = 12.0  # sum of squares of z, by which fits cannot be told apart
_LEAST_SUM = 1e-9  # of the weights, over what it was
_PLACES_LATER = [  # of keys that are read instead
    x * y for x in (1, 2, 3, 4, 8, 16, 32, 64) for y in (1, -1)
]
_SPANS_OF_EACH, _TURNS_OF_SPANS = 2, 3  # of a batch member or head, and turns to find them
_ROWS_OF_SPAN, _HEADS_OF_SPAN = 3, 3  # that are looked at
_NUMBERS_OF_SPAN = 2**22  # of sums of keys, at most
_LEFT_BY_A_SPAN = 0.6  # of the square of errors, at most
_LEFT_BY_SPANS = 9.0  # mean square of z, at most

Edges = npt.NDArray[np.int64]


def list_lost_parts(problem: Problem) -> Iterator[Alternative]:
    """List kernels that skip a part of each tile of keys: its first or last half, or the rest.

    Of each block of a cache they may skip what is no whole tile, or more than one.
    """
    m, band, packed = problem.shape[1], show_band(problem), problem.packed
    sizes = [2 * x for x in TILE_SIZES if 2 * x < m] if packed is None else []
    parts = [(x, *y) for x in sizes for y in ((x // 2, x), (0, x // 2), (x // 4, x))]
    if packed is not None and packed.blocks is not None:
        size = packed.blocks((0,) * len(problem.lead))[0].shape[1]
        kept = {y for x in TILE_SIZES for y in (x, size // x * x, size - 1) if 0 < y < size}
        parts = [(size, *y) for x in sorted(kept) for y in ((x, size), (0, size - x))]
    for size, start, stop in parts:
        seen = partial(_hide_part, band, size, start, stop)
        yield Alternative(f"keys {start} to {stop - 1} of each {size} are left out", problem, seen)


def _hide_part(band: Callable[[Place], Seen], size: int, start: int, stop: int, x: Place) -> Seen:
    at = x.j % size
    return np.asarray(band(x) & ((at < start) | (at >= stop)))


def list_intervals(problem: Problem, x: Sampled, sizes: Doubles) -> Iterator[Alternative]:
    """List kernels in which keys one after another are lost, or seen, or count otherwise.

    For each kind of mistake it is the interval by which some rows are nearest, in `sizes`.
    """
    m = problem.shape[1]
    head = take_rows(problem, x.rows)
    exact = attend(head)
    values = np.concatenate([np.ones((head.keys, 1)), head.v[: head.keys]], -1)
    w, zero, top = weigh_with_zeros(head)
    # Weights over the sum of all that are seen.
    share = np.exp(np.where(np.isfinite(top), top - exact.lse, 0.0))[:, None]
    w, zero = ((share * y)[:, : head.keys] for y in (w, zero))
    changes = {}
    for words, (of_sum, of_out, of_zero) in LOSSES.items():
        changes[words] = of_out * w[..., None] * values
        changes[words][..., 0] = of_sum * w + of_zero * zero
    if head.mask is not None:
        _, opened = weigh_with_hidden(head)
        changes[""] = np.where(head.mask, 0.0, opened)[..., None] * values
    right = np.concatenate([np.ones((len(w), 1)), exact.out], -1)
    shown = _list_sequences_seen(problem, head.mask)
    for words, change in changes.items():
        sums = np.pad(np.cumsum(change, 1), ((0, 0), (1, 0), (0, 0)))
        _, j = find_interval(right, sums, x.got, sizes)
        mine = shown[(shown >= j.start) & (shown < j.stop)]
        if words and len(mine):  # others do not count anyhow
            j = slice(int(mine[0]), int(mine[-1]) + 1)
        if head.mask is not None and not words:
            hidden = np.flatnonzero(~head.mask[:, j].all(0)) + j.start  # from some row
            if len(hidden):
                yield show_tile(problem, slice(int(hidden[0]), int(hidden[-1]) + 1))
        elif words == "are left out" and 0 < j.stop - j.start < m:
            yield hide_tile(problem, j)  # hiding keys loses no digits; sums less a tile may cancel
        elif 0 < j.stop - j.start < m:
            text = name_keys(j, words)
            lose = partial(leave_without_tile, j=j, loss=LOSSES[words])
            yield Alternative(text, problem, compute=lose)


def _list_sequences_seen(problem: Problem, mask: Seen | None) -> npt.NDArray[np.int64]:
    """List the keys of all sequences of which some rows see keys."""
    every, packed = np.arange(problem.shape[1]), problem.packed
    if mask is None or packed is None or packed.keys.ndim > 1:
        return every
    of = np.searchsorted(packed.keys, every, "right")
    return np.flatnonzero(np.isin(of, of[mask[:, : len(every)].any(0)]))


def find_interval(
    right: Doubles, sums: Doubles, got: Doubles, sizes: Doubles
) -> tuple[float, slice]:
    """Find the keys whose change brings some rows nearest to what they are, and how near."""
    m, mass = sums.shape[1] - 1, sums[..., 0]
    error = (right[:, 1:] - right[:, :1] * got) / sizes
    added = (sums[..., 1:] - mass[..., None] * got[:, None]) / sizes[:, None]
    size, along = np.sum(added * added, -1), (added @ error[..., None])[..., 0]
    later = size + 2 * along + np.sum(error * error, -1)[:, None]
    earlier = size - 2 * along

    def rate(starts: Edges, stops: Edges) -> Doubles:
        """Rate pairs of edges by products of what they add to errors: sums of squares of z."""
        with np.errstate(all="ignore"):
            squares = later[:, stops, None] + earlier[:, None, starts]
            squares -= 2 * added[:, stops] @ np.swapaxes(added[:, starts], 1, 2)
            total = right[:, :1, None] + mass[:, stops, None] - mass[:, None, starts]
            far = np.sum(np.where(total > _LEAST_SUM, squares / (total * total), math.inf), 0)
        return np.where(np.isnan(far) | (stops[:, None] <= starts), math.inf, far)

    start, stop = choose_edges(rate, m, _ALIKE_EDGES)
    off = error + added[:, stop] - added[:, start]
    total = right[:, :1] + (mass[:, stop] - mass[:, start])[:, None]
    known = np.all(total > _LEAST_SUM)
    return float(np.sum(np.square(off / total))) if known else math.inf, slice(start, stop)


def choose_edges(
    rate: Callable[[Edges, Edges], Doubles], m: int, alike: float = 0.0
) -> tuple[int, int]:
    """Choose the start and stop of the lowest rate, or of those that are alike the roundest.

    Rates are (stops, starts). First pairs of multiples of a step are rated, then each edge exactly.
    """
    edges, every = np.unique(np.append(np.arange(0, m, -(-m // _EDGES)), m)), np.arange(m + 1)
    far = rate(edges, edges)
    stop, start = (int(edges[x]) for x in np.unravel_index(np.argmin(far), far.shape))
    for _ in range(_TURNS):
        before = start, stop
        far = rate(np.array([start]), every[start + 1 :])[:, 0]
        stop = _choose_round(far, start + 1, m, alike)
        start = _choose_round(rate(every[:stop], np.array([stop]))[0], 0, m, alike)
        if (start, stop) == before:
            break
    return start, stop


def _choose_round(far: Doubles, first: int, last: int, alike: float) -> int:
    """Choose an edge: of those that fit alike the roundest."""
    fit = np.flatnonzero(far <= np.min(far) + alike) + first
    return int(max(fit, key=lambda x: math.inf if x == last else math.gcd(int(x), 2**20)))


def show_tile(problem: Problem, j: slice) -> Alternative:
    """Show a tile of keys to all queries."""
    band = show_band(problem)

    def seen(x: Place) -> Seen:
        usual = band(x) if x.mask is None else band(x) & x.mask
        return np.asarray(usual | ((x.j >= j.start) & (x.j < j.stop)))

    return Alternative(name_keys(j, "are not masked"), problem, seen, among=False)


# --- other ways to read some keys ----------------------------------------------------------------


class _Span(NamedTuple):
    """Keys that are read in another way."""

    words: str
    score: ScoreText
    keys: slice


def _list_versions(problem: Problem) -> Iterator[Alternative]:
    """List what a kernel may have in the place of some keys."""
    yield Alternative("keys are left out", problem, lambda x: np.zeros(x.ahead.shape, bool))
    yield Alternative(
        "hidden keys are seen", problem, lambda x: np.ones(x.ahead.shape, bool), among=False
    )
    for words, names in {"keys and values": "kv", "keys": "k", "values": "v"}.items():
        zero = problem
        for name in names:
            zero = zero.replaced(name, lambda _, x: 0 * x)
        yield Alternative(f"{words} are read as 0", zero)
        for other, at in list_head_rules(problem):
            text = f"{words} are those of {other}"
            yield Alternative(text, problem.with_arrays_of(names, at))
    yield Alternative("scores are not scaled", problem._replace(scale=1.0))
    yield from list_scales(problem)


def _list_moved_keys(problem: Problem) -> Iterator[Alternative]:
    """List keys and values that are read in the place of others; zeros past the end."""
    for names, by in product(("kv", "k", "v"), (0, *_PLACES_LATER)):
        moved, called = problem, " and ".join(PLURALS[x] for x in names)
        for name in names:
            moved = moved.replaced(name, partial(_read_later, problem, by))
        other = f"key {abs(by)} places {'later' if by > 0 else 'before'}"
        named = {0: "other key of each pair", 1: "next key", -1: "key before"}.get(by, other)
        yield Alternative(f"{called} are those of the {named}", moved)


def _read_later(problem: Problem, by: int, at: Index, x: Doubles) -> Doubles:
    j, packed, end = np.arange(len(x)), problem.packed, len(x)
    if packed is not None and packed.table is not None:
        end = int(packed.keys[at[0], 1])
    to = j + by if by else j ^ 1
    return take_or_zero(x, np.where((to >= 0) & (to < end), to, NOWHERE))


def list_spans(problem: Problem, wrong: Sequence[Sampled], unit: float) -> Iterator[Alternative]:
    """List kernels that read keys one after another in another way, in each batch member or head.

    What is read, and where, is what leaves the least of the errors.
    """
    right = partial(score_rows, Alternative("", problem))
    # Batch members of which some heads are right are taken head by head.
    members = {x.rows.at[:-1] for x in wrong}
    whole = len(wrong) == len(members) * problem.lead[-1] if problem.lead else True
    axes = max(len(problem.lead) - 1, 0) if whole else len(problem.lead)
    groups: dict[Index, list[Sampled]] = {}
    for x in wrong:
        groups.setdefault(x.rows.at[:axes], []).append(x)
    for versions in (_list_versions, _list_moved_keys):
        ways = [(x.text, partial(score_rows, x)) for x in versions(problem)]
        found: dict[Index, list[_Span]] = {}
        for at, some in groups.items():
            found[at] = _find_spans(right, ways, some, unit)
            if not found[at]:
                break
        else:
            if found:
                answer = partial(_read_spans, right, found)
                yield Alternative(_name_spans(problem, found), problem, answer=answer)
                return


def _find_spans(
    right: ScoreText,
    ways: Sequence[tuple[str, ScoreText]],
    wrong: Sequence[Sampled],
    unit: float,
) -> list[_Span]:
    """Find spans of keys and ways to read them by which some rows are near; none if none are."""
    some = [x.few(_ROWS_OF_SPAN) for x in wrong[:_HEADS_OF_SPAN]]
    given = [right(x.rows) for x in some]
    lse = [np.logaddexp.reduce(s, -1)[:, None] for s, _ in given]
    got = np.concatenate([x.got for x in some])
    sizes = unit * np.concatenate([row_sizes(x.got) for x in some])
    m = len(some[0].rows.keys)
    if got.size * m > _NUMBERS_OF_SPAN or not all(np.all(np.isfinite(x)) for x in (got, *lse)):
        return []
    if not np.any(got):  # rows were never written, whatever keys are
        return []

    def weigh(score: ScoreText) -> Doubles:
        every = []
        for x, of_row in zip(some, lse, strict=True):
            s, v = score(x.rows)
            of_keys = np.exp(np.minimum(s - of_row, LARGEST_LOG))[..., None]
            every.append(of_keys * np.pad(v, ((0, 0), (1, 0)), constant_values=1.0))
        return np.concatenate(every)

    own = weigh(right)

    def change(score: ScoreText) -> Doubles:
        """Sum what keys before each would change."""
        sums = np.zeros((len(got), m + 1, own.shape[-1]))
        np.cumsum((weigh(score) - own)[:, :m], 1, out=sums[:, 1:])
        return sums

    total, spans = np.sum(own, 1), list[tuple[str, ScoreText, Doubles, slice]]()
    before = float(np.sum(np.square((total[:, 1:] - got) / sizes)))
    for _ in range(_TURNS_OF_SPANS):
        if len(spans) == _SPANS_OF_EACH:  # the first was found beside what the second explains
            *_, sums, keys = spans.pop(0)
            total = total - sums[:, keys.stop] + sums[:, keys.start]
        fits = ((*find_interval(total, change(x), got, sizes), y, x) for y, x in ways)
        off, keys, words, way = min(
            fits, key=lambda x: x[0], default=(math.inf, slice(0), "", right)
        )
        if not off < _LEFT_BY_A_SPAN * before:
            break
        before, sums = off, change(way)
        total = total + sums[:, keys.stop] - sums[:, keys.start]
        spans.append((words, way, sums, keys))
        if off < _LEFT_BY_SPANS * got.size:
            return [_Span(x, y, _trim_span(sums, keys)) for x, y, sums, keys in spans]
    return []


def _trim_span(sums: Doubles, keys: slice) -> slice:
    """Leave out keys at the ends that change nothing."""
    moved = np.flatnonzero(np.any(np.diff(sums[:, keys.start : keys.stop + 1], axis=1), (0, 2)))
    return (
        slice(keys.start + int(moved[0]), keys.start + int(moved[-1]) + 1) if moved.size else keys
    )


def _read_spans(right: ScoreText, found: Mapping[Index, Sequence[_Span]], rows: Rows) -> Result:
    """Read some keys in the ways of the batch member, or head, of some rows."""
    text = right
    for axes in range(len(rows.at) + 1):
        for one in found.get(rows.at[:axes], ()):
            here = np.isin(rows.keys, np.arange(one.keys.start, one.keys.stop))
            text = partial(mix_keys, text, one.score, here)
    return attend_by(*text(rows))


def _name_spans(problem: Problem, found: Mapping[Index, Sequence[_Span]]) -> str:
    """Say for each way which keys of which batch members or heads are read so."""
    each: dict[str, dict[str, list[Index]]] = {}
    for at, spans in found.items():
        for one in spans:
            keys = name_span("keys", np.arange(one.keys.start, one.keys.stop))
            each.setdefault(one.words, {}).setdefault(keys, []).append(at)
    axes = len(next(iter(found)))
    called = "head" if axes == len(problem.lead) else "batch member"
    many = math.prod(problem.lead[:axes])

    def name(keys: str, places: Sequence[Index]) -> str:
        where = f" of {called}{'s' * (len(places) > 1)} {' and '.join(map(place, places))}"
        return f"{keys}{where * (len(places) < many)}"

    return ", and ".join(
        f"{words}: {', '.join(name(*x) for x in y.items())}" for words, y in each.items()
    )
