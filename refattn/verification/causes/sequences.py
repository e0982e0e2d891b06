"""What goes wrong with sequences that lie one after another: borders, offsets, and distances."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ...arrays.library import Doubles
from ...rounding.problems import Index, Packed, Problem
from .sampled import (
    Alternative,
    Numbers1D,
    Place,
    Result,
    Rows,
    Seen,
    attend,
    show_distances,
    take_rows,
)
from .slips import TILE_SIZES

_MOST_SKIPPED = 64  # sequences, at most, of which each may be skipped
_MOST_BORDERS = 16  # between sequences, at most, of which each may be wrong alone
_SAME_SLOPE = 1e-2  # of a bias over distances, how far it may differ


class Bounds(NamedTuple):
    """What each sequence sees."""

    rows: Numbers1D  # the first query of each
    begin: Numbers1D  # its first key
    end: Numbers1D  # the first key that is not its own
    level: Numbers1D  # how far the key level with a query is ahead of it, in places of the buffer

    @classmethod
    def of(cls, queries: Numbers1D, keys: Numbers1D) -> Bounds:
        """Let each sequence see itself; its last query is level with its last key."""
        return cls(queries[:-1], keys[:-1], keys[1:], keys[1:] - queries[1:])

    def ahead(self, x: Place) -> tuple[Numbers1D, Numbers1D]:
        """Return the sequence of each query, and how far keys are ahead of it."""
        at = np.maximum(np.searchsorted(self.rows, x.i, "right") - 1, 0)
        return at, x.j - x.i - self.level[at]


def _show(bounds: Bounds, packed: Packed, x: Place) -> Seen:
    """Show the keys of each sequence, those that causal attention and windows show."""
    at, ahead = bounds.ahead(x)
    theirs = (x.j >= bounds.begin[at]) & (x.j < bounds.end[at])
    return theirs & show_distances(ahead, packed.causal, packed.window)


def list_packed(problem: Problem) -> Iterator[Alternative]:
    """List kernels that mistake the borders of sequences, or count places from elsewhere."""
    packed = problem.packed
    if packed is None:
        return
    right = Bounds.of(packed.queries, packed.keys)
    banded = packed.causal or packed.window != (None, None)
    called = "causal attention" if packed.causal else "the window"
    levels = [(f"{called} is {words}", x) for words, x in _list_levels(packed, right) if banded]
    for text, bounds in (*levels, *_list_bounds(packed, right)):
        yield Alternative(text, problem, partial(_show, bounds, packed), among=False)
    if packed.causal:
        seen = partial(_show, right, packed._replace(causal=False))
        yield Alternative("attention is not causal", problem, seen, among=False)
    if "bias" in problem.first:
        for words, bounds in _list_levels(packed, right):
            move = partial(_move_bias, right, bounds)
            yield Alternative(f"the bias is {words}", problem, bias=move)


def _list_bounds(packed: Packed, right: Bounds) -> Iterator[tuple[str, Bounds]]:
    """List other borders; where keys are level with queries stays, or goes with the last key."""
    rows, begin, end, level = right
    start, stop = 0 * begin, 0 * end + packed.keys[-1]
    before, after = np.append(0, begin[:-1]), np.append(end[1:], stop[-1])
    words = "cu_seqlens are ignored: all tokens are one sequence"
    yield words, Bounds(rows, start, stop, stop - packed.queries[-1])
    for words, first, last in (
        ("sees the last key of the sequence before it, too", begin - 1, end),
        ("sees the first key of the next sequence, too", begin, end + 1),
        ("sees the keys of the sequence before it, too", before, end),
        ("sees the keys of the next sequence, too", begin, after),
        ("sees the keys of all sequences before it, too", start, end),
        ("sees the keys of all sequences after it, too", begin, stop),
        ("sees the keys of all sequences", start, stop),
        ("does not see its first key", begin + 1, end),
        ("does not see its last key", begin, end - 1),
    ):
        yield f"a sequence {words}", Bounds(rows, first, last, level)
        text = f"a sequence {words} (and is causal by the last that it sees)"
        yield text, Bounds(rows, first, last, level + last - end)
    yield (
        "k and v of each sequence are read from the first key",
        right._replace(begin=start, end=end - begin, level=level - begin),
    )
    for size in TILE_SIZES:
        more, less = (begin - end) % size, (end - begin) % size
        for words, last in (("up", end + more), ("down", end - less)):
            text = f"lengths of sequences are rounded {words} to multiples of {size} keys"
            yield text, Bounds(rows, begin, last, level)
    longest = np.max(end - begin)
    for words, at in (("", level), (", and causal by it", _by_longest(packed, right))):
        text = f"all sequences are as long as the longest, {longest} keys{words}"
        yield text, Bounds(rows, begin, begin + longest, at)
    yield from _list_offsets(packed)


def _list_offsets(packed: Packed) -> Iterator[tuple[str, Bounds]]:
    """List other offsets of queries, of keys, or of both."""
    queries, keys = packed.queries, packed.keys
    yield "cu_seqlens of q are used for k and v", Bounds.of(queries, queries)
    yield "cu_seqlens of k are used for q", Bounds.of(keys, keys)
    inner = np.ones_like(keys)
    inner[[0, -1]] = 0
    for by, words in ((1, "large"), (-1, "small")):
        of_queries, of_keys = queries + by * inner, keys + by * inner
        for text, x, y in (
            ("", of_queries, of_keys),
            (" of q", of_queries, keys),
            (" of k and v", queries, of_keys),
        ):
            yield f"cu_seqlens{text} are 1 too {words}", Bounds.of(x, y)
    yield from _list_borders(queries, keys)
    count = len(queries) - 1
    even = [np.arange(count + 1) * (x[-1] // count) for x in (queries, keys)]
    yield f"all {count} sequences are of one length", Bounds.of(*even)


def _list_borders(queries: Numbers1D, keys: Numbers1D) -> Iterator[tuple[str, Bounds]]:
    """List offsets of which one, between sequences, is off by one or left out."""
    inner = range(1, len(keys) - 1) if len(keys) > 3 else ()  # of one, all are wrong
    for at in inner[:_MOST_BORDERS]:
        border = f"entry {at} of cu_seqlens ({keys[at]})"
        yield f"{border} is left out", Bounds.of(*(np.delete(x, at) for x in (queries, keys)))
        step = np.eye(len(keys), dtype=keys.dtype)[at]
        for by, words in ((1, "large"), (-1, "small")):
            yield f"{border} is 1 too {words}", Bounds.of(queries + by * step, keys + by * step)


def _by_longest(packed: Packed, right: Bounds) -> Numbers1D:
    """Return where keys are level if the longest lengths are those of all sequences."""
    most_queries, most_keys = (np.max(np.diff(x)) for x in (packed.queries, packed.keys))
    return np.asarray(right.begin - right.rows + most_keys - most_queries)


def _list_levels(packed: Packed, right: Bounds) -> Iterator[tuple[str, Bounds]]:
    """List other places from which causal attention, windows and biases may be counted."""
    start = right.begin - right.rows
    levels = {
        "from the first key of each sequence, not from the last": start,
        "from the start of the buffer, not of each sequence": 0 * start,
        "from the end of the buffer, not of each sequence": (
            0 * start + packed.keys[-1] - packed.queries[-1]
        ),
        "by the longest lengths of q and k, not by those of each sequence": (
            _by_longest(packed, right)
        ),
    }
    yield from ((f"counted {words}", right._replace(level=x)) for words, x in levels.items())


def _move_bias(right: Bounds, other: Bounds, x: Place, _: Index, bias: Doubles | None) -> Doubles:
    """Count a bias that is a slope times distances by others; leave any other bias as it is."""
    mine, theirs = np.abs(right.ahead(x)[1]), np.abs(other.ahead(x)[1])
    given = np.zeros(mine.shape) if bias is None else np.asarray(bias)
    known = (mine > 0) & np.isfinite(given) & (True if x.mask is None else x.mask)
    slopes = given[known] / mine[known]
    if not slopes.size or np.ptp(slopes) > _SAME_SLOPE * np.max(np.abs(slopes)):
        return given
    return np.asarray(np.median(slopes) * theirs)


def list_skipped(problem: Problem) -> Iterator[Alternative]:
    """List kernels that leave rows of sequences at 0: of one, or of all that are short."""
    if problem.packed is None:
        return
    offsets = problem.packed.queries
    lengths = np.diff(offsets)
    alone = np.eye(len(lengths), dtype=bool)[:_MOST_SKIPPED]
    for number, skipped in enumerate(alone):
        last = ", the last," if number == len(lengths) - 1 else ""
        yield _skip(problem, f"sequence {number}{last} is skipped", skipped)
    for length in np.unique(lengths)[1:-1][:_MOST_SKIPPED]:
        text = f"sequences of up to {length} tokens are skipped"
        yield _skip(problem, text, lengths <= length)


def _skip(problem: Problem, text: str, skipped: Any) -> Alternative:
    assert problem.packed is not None
    at = np.repeat(skipped, np.diff(problem.packed.queries))

    def answer(rows: Rows) -> Result:
        x = attend(take_rows(problem, rows))
        lost = at[rows.queries]
        lse = np.where(lost, -np.inf, x.lse)
        return Result(np.where(lost[:, None], 0.0, x.out), lse, x.top)

    return Alternative(f"{text}: its rows are 0", problem, answer=answer)
