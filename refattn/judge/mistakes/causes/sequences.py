"""What goes wrong with sequences that lie one after another: borders, offsets, and distances."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ....arrays.blocks import blocks
from ....arrays.library import Doubles
from ...rounding.problems import Index, Packed, Problem
from ...verification.findings import name_span
from .sampled import (
    Alternative,
    Numbers1D,
    Place,
    Result,
    Rows,
    Seen,
    attend,
    pad_sum,
    show_band,
    show_distances,
    take_rows,
)
from .slips import TILE_SIZES, hide_tile

_MOST_BORDERS = 16  # between sequences, at most, of which each may be wrong alone
_LOST_TILES = 8  # of a sequence, at most, of which each may be lost
_SAME_SLOPE = 1e-2  # of a bias over distances, how far it may differ


class Bounds(NamedTuple):
    """What each sequence sees: arrays (1, sequences), or (batch, 1) with keys in blocks."""

    rows: Numbers1D  # the first query of each
    begin: Numbers1D  # its first key
    end: Numbers1D  # the first key that is not its own
    level: Numbers1D  # how far the key level with a query is ahead of it, in places of the buffer

    @classmethod
    def of(cls, queries: Numbers1D, keys: Numbers1D) -> Bounds:
        """Let each sequence see itself; its last query is level with its last key."""
        queries, keys = np.atleast_2d(queries, keys)
        return cls(queries[:, :-1], keys[:, :-1], keys[:, 1:], keys[:, 1:] - queries[:, 1:])

    def ahead(self, x: Place) -> tuple[Any, Numbers1D]:
        """Return the sequence of each query, and how far keys are ahead of it."""
        member = x.at[0] if len(self.rows) > 1 else 0
        at = member, np.maximum(np.searchsorted(self.rows[member], x.i, "right") - 1, 0)
        return at, x.j - x.i - self.level[at]


def _show(bounds: Bounds, packed: Packed, x: Place) -> Seen:
    """Show the keys of each sequence, those that causal attention and windows show."""
    at, ahead = bounds.ahead(x)
    theirs = (x.j >= bounds.begin[at]) & (x.j < bounds.end[at])
    return np.asarray(theirs & show_distances(ahead, packed.causal, packed.window))


def _show_within(bounds: Bounds, rule: Callable[[Place], Seen], x: Place) -> Seen:
    """Show the keys of each sequence that a rule shows, by places in the sequence."""
    at, _ = bounds.ahead(x)
    rows, begin, end, level = (y[at] for y in bounds)
    j, m = x.j - begin, end - begin
    place = Place(x.i - rows, j, m - level - rows + begin, m, None, x.at)
    return np.asarray((j >= 0) & (j < m) & rule(place))


def within_sequences(problem: Problem, one: Alternative) -> Alternative:
    """Show what an alternative of one sequence shows, in each of several."""
    assert problem.packed is not None
    bounds = Bounds.of(problem.packed.queries, problem.packed.keys)
    seen = partial(_show_within, bounds, one.seen or show_band(one.problem))
    return Alternative(one.text, problem, seen, among=False)


def show_sequence(problem: Problem, rows: Rows) -> Seen:
    """Show all keys of the sequence of each query."""
    packed = problem.packed
    assert packed is not None
    whole = packed._replace(causal=False, window=(None, None))
    seen = partial(_show, Bounds.of(packed.queries, packed.keys), whole)
    return np.asarray(take_rows(problem, rows, seen, among=False).mask)


def list_later_queries(problem: Problem) -> Iterator[Alternative]:
    """List kernels in which keys are seen by queries after the end of their sequence, too."""
    packed = problem.packed
    if packed is None or packed.queries.ndim > 1:
        return
    right = Bounds.of(packed.queries, packed.keys)
    end = packed.queries[None, 1:]
    ends = {"the first query of the next sequence": end + 1}
    for size in TILE_SIZES:
        words = f"the next queries, up to a multiple of {size}"
        ends[f"{words} from its first one on"] = end + (right.rows - end) % size
        ends[f"{words} in the buffer"] = end + -end % size
    for words, last in ends.items():
        text = f"keys of a sequence are also seen by {words}"
        yield Alternative(text, problem, partial(_show_to, right, last, packed), among=False)


def _show_to(right: Bounds, last: Numbers1D, packed: Packed, x: Place) -> Seen:
    """Show keys to queries from the first of their sequence up to the last, by their distance."""
    at = np.maximum(np.searchsorted(right.begin[0], x.j, "right") - 1, 0)
    theirs = (x.i >= right.rows[0, at]) & (x.i < last[..., at])
    ahead = x.j - x.i - right.level[0, at]
    return np.asarray(theirs & show_distances(ahead, packed.causal, packed.window))


def one_sequence(problem: Problem) -> Problem:
    """Return a problem with the causal attention and windows of several sequences, but of one."""
    packed, (_, m, columns) = problem.packed, problem.shape
    assert packed is not None
    one = problem._replace(packed=None, shape=(m, m, columns))
    return one._replace(causal=packed.causal, window=packed.window)


def list_packed(problem: Problem) -> Iterator[Alternative]:
    """List kernels that mistake the borders of sequences, or count places from elsewhere."""
    packed = problem.packed
    if packed is None:
        return
    right = Bounds.of(packed.queries, packed.keys)
    banded = packed.causal or packed.window != (None, None)
    called = "the causal mask" if packed.causal else "the window"
    # Without causal attention and windows it does not matter where sequences are level.
    levels = [(f"{called} is {words}", x) for words, x in _list_levels(packed, right) if banded]
    # Keys in blocks of a cache, which have two axes here, do not lie one after another.
    borders = _list_borders(packed, right) if packed.queries.ndim == 1 else ()
    for text, bounds in (*levels, *borders, *_list_lengths(right, problem.shape[1])):
        yield Alternative(text, problem, partial(_show, bounds, packed), among=False)
    for text, others in (
        ("attention is not causal", {"causal": False}),
        ("attention is causal", {"causal": True}),
        ("there is no window", {"window": (None, None)}),
    ):
        seen = partial(_show, right, packed._replace(**others))
        yield Alternative(text, problem, seen, among=False)
    inner, longest = one_sequence(problem), int(np.max(right.end - right.begin))
    for size in (x for x in TILE_SIZES if x < longest):
        for j in (*[*blocks(0, longest, size)][:_LOST_TILES], slice(size, longest)):
            lost = within_sequences(problem, hide_tile(inner, j))
            text = f"keys {j.start} to {j.stop - 1} of each sequence are left out"
            yield lost._replace(text=text)
    if "bias" in problem.first:
        for words, bounds in _list_levels(packed, right):
            move = partial(_move_bias, right, bounds)
            yield Alternative(f"the bias is {words}", problem, bias=move)


def _list_borders(packed: Packed, right: Bounds) -> Iterator[tuple[str, Bounds]]:
    """List other borders of sequences one after another."""
    rows, begin, end, level = right
    start, stop = 0 * begin, 0 * end + packed.keys[-1]
    # The first sequence has none before it, and the last none after it.
    before, after = np.roll(begin, 1), np.roll(end, -1)
    before[:, 0], after[:, -1] = 0, packed.keys[-1]
    words = "cu_seqlens are ignored: all tokens are one sequence"
    yield words, Bounds(rows, start, stop, stop - packed.queries[-1])
    yield from _with_ends(
        right,
        ("also sees the last key of the sequence before it", begin - 1, end),
        ("also sees the first key of the next sequence", begin, end + 1),
        ("also sees the keys of the sequence before it", before, end),
        ("also sees the keys of the next sequence", begin, after),
        ("also sees the keys of all sequences before it", start, end),
        ("also sees the keys of all sequences after it", begin, stop),
        ("sees the keys of all sequences", start, stop),
    )
    yield (
        "k and v of each sequence are read from the start of the buffer",
        right._replace(begin=start, end=end - begin, level=level - begin),
    )
    yield from _list_offsets(packed)
    yield from _list_starts(right)


def _with_ends(right: Bounds, *ends: tuple[str, Any, Any]) -> Iterator[tuple[str, Bounds]]:
    """Move ends; where keys are level with queries stays, or goes with the last key."""
    rows, _, end, level = right
    for words, first, last in ends:
        yield f"a sequence {words}", Bounds(rows, first, last, level)
        text = f"a sequence {words} (the causal mask ends at the last key that it sees)"
        yield text, Bounds(rows, first, last, level + last - end)


def _list_lengths(right: Bounds, most: int) -> Iterator[tuple[str, Bounds]]:
    """List other lengths of sequences."""
    rows, begin, end, level = right
    yield from _with_ends(
        right,
        ("does not see its first key", begin + 1, end),
        ("does not see its last key", begin, end - 1),
    )
    if len(rows) > 1:
        n = int(np.max(end - level - rows))
        yield from _with_ends(
            right,
            ("is as long as its block table", begin, 0 * end + most),
            (f"has its {n} queries counted twice: it is {n} keys too long", begin, end + n),
            (f"lacks its {n} queries: it is {n} keys too short", begin, end - n),
            ("is one key too long", begin, end + 1),
            ("has the length of the next one", begin, np.roll(end, -1)),
            ("has the length of the one before", begin, np.roll(end, 1)),
        )
    longest = np.max(end - begin)
    for words, at in (("", level), (", also for the causal mask", _by_longest(right))):
        text = f"all sequences are as long as the longest, {longest} keys{words}"
        yield text, Bounds(rows, begin, begin + longest, at)
    for size in TILE_SIZES:
        more, less = (begin - end) % size, (end - begin) % size
        for words, last in (("up", end + more), ("down", end - less)):
            text = f"lengths of sequences are rounded {words} to multiples of {size} keys"
            yield text, Bounds(rows, begin, last, level)
            yield f"{text}, also for the causal mask", Bounds(rows, begin, last, level + last - end)


def _round_starts(begin: Numbers1D, end: Numbers1D) -> Iterator[tuple[str, Numbers1D]]:
    """List first keys that sequences may have in place of their own."""
    for size in (*TILE_SIZES[::-1], 8, 4, 2):
        yield f"are rounded down to multiples of {size}", begin // size * size
        yield f"are rounded up to multiples of {size}", -(-begin // size) * size
    most = end[:, -1:]
    for by in (2, 3, 4, 8):
        yield f"are multiplied by {by} (modulo the number of keys)", by * begin % most
        yield f"are divided by {by}", begin // by
    yield "are those of the sequence before", np.roll(begin, 1)
    yield "are those of the next sequence", np.roll(begin, -1)
    for by in (x * sign for x in (*range(1, 9), 16, 32) for sign in (1, -1)):
        yield f"are {abs(by)} too {'large' if by > 0 else 'small'}", begin + by


def _list_starts(right: Bounds) -> Iterator[tuple[str, Bounds]]:
    """List kernels that read the keys of sequences from other offsets on."""
    rows, begin, end, level = right
    for words, start in _round_starts(begin, end):
        start = np.where(begin > 0, start, begin)
        moved = start - begin
        if moved.any():
            yield f"offsets of k and v {words}", Bounds(rows, start, end + moved, level + moved)
            text = f"first keys of sequences {words}, with their own last keys"
            yield text, Bounds(rows, start, end, level)


def _list_offsets(packed: Packed) -> Iterator[tuple[str, Bounds]]:
    """List other offsets of queries, of keys, or of both."""
    queries, keys = packed.queries, packed.keys
    yield "cu_seqlens of q are used for k and v", Bounds.of(queries, queries)
    yield "cu_seqlens of k are used for q", Bounds.of(keys, keys)
    # The first offset is 0 and the last the length of the buffer: those between may be wrong.
    inner = np.ones_like(keys)
    inner[[0, -1]] = 0
    for by, words, kept in ((1, "large", "last"), (-1, "small", "first")):
        of_queries, of_keys = queries + by * inner, keys + by * inner
        for text, x, y in (
            ("", of_queries, of_keys),
            (" of q", of_queries, keys),
            (" of k and v", queries, of_keys),
        ):
            yield f"cu_seqlens{text} are 1 too {words}", Bounds.of(x, y)
        most = np.arange(len(keys)) != (len(keys) - 1 if by > 0 else 0)
        text = f"all entries of cu_seqlens but the {kept} are 1 too {words}"
        yield text, Bounds.of(queries + by * most, keys + by * most)
    yield from _list_moved(queries, keys)
    count = len(queries) - 1
    even = [np.arange(count + 1) * (x[-1] // count) for x in (queries, keys)]
    yield f"all {count} sequences have the same length", Bounds.of(*even)


def _list_moved(queries: Numbers1D, keys: Numbers1D) -> Iterator[tuple[str, Bounds]]:
    """List offsets of which one, between sequences, is off by one or left out."""
    inner = range(1, len(keys) - 1) if len(keys) > 3 else ()  # of one, all are wrong
    for at in inner[:_MOST_BORDERS]:
        border = f"entry {at} of cu_seqlens ({keys[at]})"
        yield f"{border} is left out", Bounds.of(*(np.delete(x, at) for x in (queries, keys)))
        step = np.eye(len(keys), dtype=keys.dtype)[at]
        for by, words in ((1, "large"), (-1, "small")):
            yield f"{border} is 1 too {words}", Bounds.of(queries + by * step, keys + by * step)


def _by_longest(right: Bounds) -> Numbers1D:
    """Return where keys are level if the longest lengths are those of all sequences."""
    rows, begin, end, level = right
    queries = end - level - rows
    return np.asarray(begin - rows + np.max(end - begin) - np.max(queries))


def _list_levels(packed: Packed, right: Bounds) -> Iterator[tuple[str, Bounds]]:
    """List other places from which causal attention, windows and biases may be counted."""
    start = right.begin - right.rows
    ends = packed.keys[..., -1:] - packed.queries[..., -1:]
    levels = {
        "to the first key of each sequence, not to the last": start,
        "to the start of the buffer, not of each sequence": 0 * start,
        "to the end of the buffer, not of each sequence": 0 * start + ends,
        "by the longest lengths of q and k, not by the lengths of each sequence": _by_longest(
            right
        ),
    }
    yield from ((f"aligned {words}", right._replace(level=x)) for words, x in levels.items())


def _move_bias(right: Bounds, other: Bounds, x: Place, _: Index, bias: Doubles | None) -> Doubles:
    """Count a bias that is a slope times distances by others; leave any other bias as it is."""
    mine, theirs = np.abs(right.ahead(x)[1]), np.abs(other.ahead(x)[1])
    given = np.zeros(mine.shape) if bias is None else np.asarray(bias)
    # Slopes are told by keys at a distance that the query sees.
    known = (mine > 0) & np.isfinite(given) & (True if x.mask is None else x.mask)
    slopes = given[known] / mine[known]
    if not slopes.size or np.ptp(slopes) > _SAME_SLOPE * np.max(np.abs(slopes)):
        return given
    return np.asarray(np.median(slopes) * theirs)


def list_padded(problem: Problem) -> Iterator[Alternative]:
    """List kernels in which zeros that fill the last tile of keys have part in the sum."""
    if problem.kind != "scores" or 0 in problem.lead:
        return
    whose = "" if problem.packed is None else " of each sequence"
    for size in TILE_SIZES:
        text = f"keys{whose} are padded to a multiple of {size} with scores of"
        yield Alternative(f"{text} 0", problem, answer=partial(_add_zeros, problem, size))
        if problem.softcap is not None:
            capped = partial(_add_zeros, problem, size, score=-problem.softcap)
            words = f"{text} -{problem.softcap:g}: the cap is applied after they are masked"
            yield Alternative(words, problem, answer=capped)
        rest = problem.shape[1] % size
        if problem.packed is None and 0 < rest < min(size, problem.shape[0]):
            shown = partial(_cut_last_tile, show_band(problem), size)
            text = f"the last tile of keys is cut by rows, not columns: queries i with i % {size} "
            text += f">= {rest} do not see the last {rest} keys"
            yield Alternative(text, problem, shown)
            padded = partial(_add_zeros, problem, size, seen=shown)
            text += f", others {size - rest} more with score 0"
            yield Alternative(text, problem, answer=padded)


def _cut_last_tile(band: Callable[[Place], Seen], size: int, x: Place) -> Seen:
    rest = x.m % size
    return np.asarray(band(x) & ((x.i % size < rest) | (x.j < x.m - rest)))


def _add_zeros(
    problem: Problem,
    size: int,
    rows: Rows,
    seen: Callable[[Place], Seen] | None = None,
    score: float = 0.0,
) -> Result:
    """Add keys with a score and value 0 to the end of what the mask shows of each query."""
    count = -_count_visible(problem, rows) % size
    if seen is not None:
        count = np.where(rows.queries % size < problem.shape[1] % size, count, 0)
    with np.errstate(divide="ignore"):
        # log 0 = -inf where the last tile is full: no key is added.
        return pad_sum(attend(take_rows(problem, rows, seen)), np.log(count) + score, score)


def _count_visible(problem: Problem, rows: Rows) -> Numbers1D:
    """Count the keys of the sequence of each query, or up to the end of what masks show."""
    n, m, _ = problem.shape
    if problem.packed is not None:
        bounds = Bounds.of(problem.packed.queries, problem.packed.keys)
        at, _ = bounds.ahead(Place(rows.queries[:, None], rows.keys, n, m, None, rows.at))
        return np.asarray((bounds.end - bounds.begin)[at][:, 0])
    mask = problem.read(rows.at).get("mask")
    if mask is None or np.any(mask != mask[:1]):
        return np.full(len(rows.queries), m)
    return np.full(len(rows.queries), np.max(np.flatnonzero(mask[0]), initial=-1) + 1)


def list_hidden(problem: Problem) -> Iterator[Alternative]:
    """List kernels with NaN in hidden keys or values, or that hide the wrong tokens."""
    for name, called in (("v", "values"), ("k", "keys")):
        lost = problem.first.get(f"{name}_lost")
        if lost is not None:
            keys = name_span("keys", np.flatnonzero(lost.any(-1)))
            what = "0 times NaN or infinity is NaN" if name == "v" else "NaN is not hidden"
            text = f"{called} of hidden {keys} are NaN or infinite, and {what}"
            yield Alternative(text, problem, answer=partial(_let_in, problem, name))
    if problem.packed is None and "mask" in problem.first:
        text = "keys or values that the mask hides are NaN, and 0 times NaN is NaN"
        yield Alternative(text, problem, answer=partial(_spoil, problem))
        text = "the mask of keys also hides queries, whose rows are 0"
        yield Alternative(text, problem, answer=partial(_hide_queries, problem))
        if not problem.causal:
            causal = problem.without("mask")._replace(causal=True)
            yield Alternative("the mask is ignored, and attention is causal", causal)
    if problem.causal and problem.packed is None:
        text = "a query sees its last key and those after it, not those before"
        yield Alternative(text, problem, lambda x: x.ahead >= 0)
    if problem.packed is not None and problem.packed.queries.ndim > 1:
        for size in TILE_SIZES:
            text = "unused slots of the last block of a sequence are NaN, and 0 times NaN is NaN"
            yield Alternative(text, problem, answer=partial(_spoil, problem, size=size))


def _let_in(problem: Problem, name: str, rows: Rows) -> Result:
    """Return NaN in the columns in which values of hidden keys are not finite, or everywhere."""
    x, lost = attend(take_rows(problem, rows)), problem.read(rows.at)[f"{name}_lost"]
    met = lost.any(0) if name == "v" else lost.any()
    return x._replace(out=np.where(met, np.nan, x.out))


def _spoil(problem: Problem, rows: Rows, size: int = 0) -> Result:
    """Return NaN for queries that do not see all keys by the mask, or of a last tile."""
    x = attend(take_rows(problem, rows))
    if size:
        # A last block that is full has no unused slots.
        lost = _count_visible(problem, rows) % size > 0
    else:
        lost = ~np.all(problem.read(rows.at)["mask"][rows.queries], -1)
    out, lse = np.where(lost[:, None], np.nan, x.out), np.where(lost, np.nan, x.lse)
    return x._replace(out=out, lse=lse)


def _hide_queries(problem: Problem, rows: Rows) -> Result:
    """Return 0 for queries whose own key is hidden by a mask that is the same for all queries."""
    x, mask = attend(take_rows(problem, rows)), problem.read(rows.at)["mask"]
    shown = np.flatnonzero(np.all(mask == mask[:1], 0) & mask[0])
    return x._replace(out=np.where(np.isin(rows.queries, shown)[:, None], x.out, 0.0))


def fill_tiles(_: Index, mask: Any, size: int, rows: int = 1, fill: Any = np.logical_or) -> Any:
    """Show each tile of keys, of so many queries, whole of which a mask shows some, or all."""
    n, keys = mask.shape
    tiles = fill.reduceat(fill.reduceat(mask, np.arange(0, keys, size), 1), np.arange(0, n, rows))
    return np.repeat(np.repeat(tiles, rows, 0)[:n], size, 1)[:, :keys]
