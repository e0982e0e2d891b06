"""Which keys wrong rows see: limits that are functions of the place of a query, and windows."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, product
from typing import NamedTuple

import numpy as np

from ....arrays.blocks import blocks
from ....arrays.library import Doubles
from ....arrays.words import place
from ...rounding.problems import Index, Problem
from ...verification.findings import name_first
from ..causes.sampled import Alternative, Place, Seen, show_band, take_rows
from ..causes.slips import score_all
from ..causes.wrong_rows import Sampled, differ, divide, row_sizes, thin
from .intervals import find_interval
from .maps import Map, Places, list_maps, permute_blocks, write_shift

_CUT_KEYS = 256  # that are summed at a time
_QUERY_BLOCKS = (4, 8, 16, 32, 64, 128, 256, 512)  # queries that may have a limit together
_OWN_ROWS, _FEW_OWN = 64, 8  # rows of a head that are looked at
_OWN_HEADS, _WHOLE_HEADS = 16, 2  # that are looked at
_PERMUTED, _MOST_OFF = (8, 16, 32, 64), 4.0  # sizes of blocks; mean square of z, at most
_MOST_LIMITS, _BLOCK_SIZES = 8, 3  # that are tried; sizes of blocks that limits tell
_MEMBERS = 64  # of a batch, that are looked at
_WINDOW_ROWS = 4  # by which windows are found
_TOLD_APART = 12.0  # sum of squares of z, by which fits cannot be told apart


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


def list_windows(problem: Problem, x: Sampled, sizes: Doubles) -> Iterator[Alternative]:
    """List the window, or the gap, in the place of causal attention that fits a few rows.

    Keys are counted from the one that is level with a query: its window is then the interval by
    which all rows are nearest.
    """
    n, m, _ = problem.shape
    if problem.packed is not None or m < 2 or np.ptp(x.rows.queries) == 0:
        return
    some = np.unique(np.linspace(0, len(x.got) - 1, _WINDOW_ROWS).astype(int))
    x, sizes = x.take(some), sizes[some]
    free = problem._replace(causal=False, window=(None, None))
    head, level = take_rows(free, x.rows), x.rows.queries[:, None] + m - n
    s = score_all(head)
    weights = np.exp(s - np.max(s, -1, keepdims=True))[..., None]
    terms = weights * np.pad(head.v, ((0, 0), (1, 0)), constant_values=1.0)
    own = 2 ** (max(m, n) - 1).bit_length()  # the place of the key that is level
    placed = np.zeros((len(level), 2 * own, terms.shape[-1]))
    placed[np.arange(len(level))[:, None], own + np.arange(m) - level] = terms[:, :m]
    sums, beside = np.pad(np.cumsum(placed, 1), ((0, 0), (1, 0), (0, 0))), np.sum(terms[:, m:], 1)
    for words, last in {"": 2 * own, " up to its own": own + 1}.items():
        cut = np.minimum(np.arange(2 * own + 1), last)
        _, j = find_interval(beside + sums[:, last], -sums[:, cut], x.got, sizes)
        gap = j.start - own, j.stop - 1 - own
        text = f"query i sees all keys{words} but {write_shift('i', gap[0] + m - n)}"
        text += f" to {write_shift('i', gap[1] + m - n)}" * (gap[1] > gap[0])
        if 0 < j.start < j.stop < last:  # else it is no gap
            yield Alternative(text, problem, partial(_show_around, last - own, *gap))
    _, j = find_interval(beside, sums, x.got, sizes)
    left, right = (None if j.start == 0 else own - j.start), j.stop - 1 - own
    until = None if j.stop == 2 * own else right
    if (left, until) in ((None, None), problem.window):
        return
    if (left is not None and left < 0) or right < 0:
        spans = {" from {}": left and -left, " up to {}": until}
        each = (x.format(write_shift("i", c + m - n)) for x, c in spans.items() if c is not None)
        text = f"query i sees keys{''.join(each)}, and no others"
    elif left is None:
        text = f"there is a window of {right} keys to the right"
    elif until is None or (problem.causal and right == 0):
        text = f"there is a window of {left} keys to the left"
    else:
        both = "both sides" if left == right else f"the left and {right} to the right"
        text = f"there is a window of {left} keys to {both}"
    window = partial(_show_window, -math.inf if left is None else -left, until)
    yield Alternative(text, problem, window)


def _show_around(stop: int, first: int, last: int, x: Place) -> Seen:
    return np.asarray((x.ahead < stop) & ((x.ahead < first) | (x.ahead > last)))


def _show_window(first: float, last: float | None, x: Place) -> Seen:
    return np.asarray((x.ahead >= first) & (x.ahead <= (math.inf if last is None else last)))


class Limit(NamedTuple):
    """A last key that queries see or, with `turn` -1, a first one, by their place."""

    text: str
    turn: int
    own: int | None  # how far the limit that all queries should have is ahead of them, if any
    of: Callable[[Places], Places]  # by query
    beyond: bool | None = None  # whether it counts only above their own, or only below

    def shows(self, x: Place) -> Seen:
        """Show the keys within the limits of queries."""
        limit = self.of(x.i)
        if self.beyond is not None:
            limit = (np.maximum if self.beyond else np.minimum)(x.i + (self.own or 0), limit)
        return np.asarray(x.j <= limit if self.turn > 0 else x.j >= limit)


# How far rows are from what they would be with each key as the last or, turned, the first: of the
# problem without that limit, (rows, keys), sums of squares of z.
Rate = Callable[[Problem, Sampled, int], Doubles]


def list_reaches(
    problem: Problem, x: Sampled, rate: Rate, wrong: Callable[[Place], Seen] | None = None
) -> Iterator[Alternative]:
    """List kernels in which queries see keys up to one, or from one on, as fits some.

    All queries do or, if `wrong` is given, those that it says are wrong.
    """
    if np.ptp(x.rows.queries) == 0:
        return  # by one query alone, a limit is no other than any keys one after another
    for turn, own, other, free in _list_ends(problem):
        limits = _fit_limits(rate(free, x, turn), x.rows.queries, turn, (own, other))
        shows = [partial(_show_both, show_band(free), y.shows) for y in limits]
        for limit, seen in zip(limits, shows, strict=True):
            if wrong is None:
                yield Alternative(limit.text, problem, seen)
            else:
                alone = partial(_show_where, wrong, seen, show_band(problem))
                yield Alternative(f"{limit.text}, but only in the wrong rows", problem, alone)


def _list_ends(problem: Problem) -> Iterator[tuple[int, int | None, int | None, Problem]]:
    """List the limits of what is seen: the side, how far ahead it and the other are, and the rest.

    That is the problem without the limit.
    """
    (n, m, _), (left, right) = problem.shape, problem.window
    if problem.packed is None:
        last = 0 if problem.causal or right == 0 else right
        end = None if last is None else m - n + last
        start = None if left is None else m - n - left
        yield 1, end, start, problem._replace(causal=False, window=(left, None))
        yield -1, start, end, problem._replace(window=(None, right))


def rate_limits(unit: float, free: Problem, x: Sampled, turn: int) -> Doubles:
    """Rate each key as the last that rows of an output see, or with `turn` -1 as the first."""
    head, m = take_rows(free, x.rows), free.shape[1]
    s = score_all(head)
    w = np.exp(s - np.max(s, -1, keepdims=True))
    rest = np.where(np.arange(w.shape[-1]) < m, 0.0, w)
    return _rate_cuts(w, rest, head.v, x, unit * row_sizes(x.got), turn)[:, ::turn]


def list_own_limits(
    problem: Problem, wrong: Sequence[Sampled], rate: Rate
) -> Iterator[Alternative]:
    """List kernels whose limits are shifted by a number of each head, or permuted in blocks."""
    # All rows of blocks of the first heads, and a few of the others.
    heads = [
        x.take(slice(_OWN_ROWS) if at < _WHOLE_HEADS else thin(np.arange(len(x.got)), _FEW_OWN))
        for at, x in enumerate(wrong[:_OWN_HEADS])
    ]
    size_of = sum(x.got.size for x in heads)
    # Rows of query heads that share a key head may lie one after another, token by token.
    shares = problem.lead[-1] // (problem.key_heads or problem.lead[-1]) if problem.lead else 1
    for turn, own, free in ((x, y or 0, z) for x, y, _, z in _list_ends(problem)):
        far = [rate(free, x, turn) for x in heads]
        sees = "query i sees keys up to" if turn > 0 else "the window of query i starts at"
        pairs = [(x.rows.at, x.rows.queries, y) for x, y in zip(heads, far, strict=True)]
        for times in dict.fromkeys((1, shares)):
            shifts = {at: _choose_shift(y, times * i + own) for at, i, y in pairs}
            if not sum(x[1] for x in shifts.values()) < _MOST_OFF * size_of:
                continue
            by, row = {at: own + x[0] for at, x in shifts.items()}, f"{times} i".removeprefix("1 ")
            each = [f"{write_shift(row, c)} in head {place(at)}" for at, c in by.items()]
            text = f"{sees} {name_first(each)}"
            seen = partial(_show_by_head, turn, (own, times), by)
            shown = partial(_show_both, show_band(free), seen)
            yield Alternative(text, problem, shown, named=len(wrong) > len(heads))
        i, rated = np.concatenate([x[1] for x in pairs]), np.concatenate(far)
        for size in (x for x in _PERMUTED if 2 * x <= len(i)):
            moved, off = np.arange(size) + own, 0.0  # places without wrong rows are right
            for r in np.unique(i % size):
                at = i % size == r
                moved[r], rest = _choose_shift(rated[at], i[at] // size * size)
                off += rest
            if off < _MOST_OFF * size_of:
                text = f"in blocks of {size} limits are permuted: {sees} {size} (i // {size}) + "
                text += f"({', '.join(map(str, moved))})[i % {size}]"
                limit = Limit(text, turn, own, partial(permute_blocks, moved))
                yield Alternative(text, problem, partial(_show_both, show_band(free), limit.shows))
                break


def list_mask_ends(
    problem: Problem, wrong: Sequence[Sampled], unit: float
) -> Iterator[Alternative]:
    """List kernels whose masks end, or begin, elsewhere, by a number of keys in each batch member.

    They are so many later than they should be or, up to the last key, than level with queries.
    """
    if "mask" not in problem.first or problem.packed is not None or not wrong:
        return
    heads = {x.rows.at[:-1]: x for x in reversed(wrong)}  # the first of each batch member
    few = [x.few(_FEW_OWN) for x in thin([*heads.values()], _MEMBERS)]
    for words, (turn, level) in _MASK_ENDS.items():
        opened = problem.replaced("mask", partial(_open_end, turn))
        by, off, ends = dict[Index, int](), 0.0, set[int]()
        for x in few[::-1]:
            far = rate_limits(unit, opened, x, turn)
            places, last = _find_ends(problem.read(x.rows.at)["mask"], turn, level)
            own = places[x.rows.queries]
            by[x.rows.at[:-1]], rest = _choose_shift(far, own, last)
            off += rest
            ends.add(int(own[0]) + by[x.rows.at[:-1]] + 1)
        if off < _MOST_OFF * sum(x.got.size for x in few):
            text = words.format(_say_ends(by, level, math.prod(problem.lead[:-1])))
            late = [c for c in by.values() if c]
            if (
                turn > 0
                and min(map(len, (ends, late))) > 1
                and max(late) < (size := math.gcd(*ends))
            ):
                text += f": at the next multiple of {size} keys" * (min(late) > 0)
            moved = problem.replaced("mask", partial(_move_end, turn, level, by))
            yield Alternative(text, moved)
    for turn in (1, -1):
        opened = problem.replaced("mask", partial(_open_end, turn))
        rated = [rate_limits(unit, opened, x, turn) for x in few]
        i = np.concatenate([x.rows.queries for x in few])
        members = name_first([*map(place, sorted(x.rows.at[:-1] for x in few))], 4)
        for limit in _fit_limits(np.concatenate(rated), i, turn, (0, None)):
            text = f"{limit.text} in batch member{'s' * (len(few) > 1)} {members}"
            shown = partial(_end_at, turn, limit, {x.rows.at[:-1] for x in few})
            yield Alternative(text, problem.replaced("mask", shown))


_MASK_ENDS = {  # the side, and whether limits are level with queries
    "the mask ends {}": (1, False),
    "the mask begins {}": (-1, False),
    "query i sees keys up to {}, but none after the last of the mask": (1, True),
}


def _say_ends(by: Mapping[Index, int], level: bool, count: int) -> str:
    """Say how many keys too late ends of so many members are or, if level with queries, where."""

    def say(c: int) -> str:
        late = f"{abs(c)} key{'s' * (abs(c) > 1)} too {'late' if c > 0 else 'early'}"
        return write_shift("i", c) if level else late

    if (level or len(by) == count) and len({*by.values()}) == 1:
        return say(*{*by.values()})
    each = [f"{say(c)} in batch member {place(at)}" for at, c in by.items() if c or level]
    return name_first(each, 4)


def _find_ends(mask: Seen, turn: int, level: bool = False) -> tuple[Places, int]:
    """Find the last key that each query sees or, with `turn` -1, the first; else one outside.

    Or the queries themselves, if limits are level with them; and the last key that there may be.
    """
    m = mask.shape[1]
    at = np.where(mask.any(-1), np.argmax(mask[:, ::-turn], -1), m)
    ends = np.asarray(m - 1 - at if turn > 0 else at)
    return (np.arange(len(mask)), int(np.max(ends))) if level else (ends, m - 1)


def _find_past(mask: Seen, turn: int) -> Seen:
    """Find the keys after the last that a query sees or, with `turn` -1, before the first."""
    return np.asarray(turn * (np.arange(mask.shape[1]) - _find_ends(mask, turn)[0][:, None]) > 0)


def _open_end(turn: int, _: Index, mask: Seen) -> Seen:
    return mask | _find_past(mask, turn)


def _move_end(turn: int, level: bool, by: Mapping[Index, int], at: Index, mask: Seen) -> Seen:
    """Show keys up to so many past the last that each query sees, or past its own."""
    if (more := by.get(at[:-1])) is None:
        return mask
    places, last = _find_ends(mask, turn, level)
    limit = np.minimum(places + more, last if level else math.inf)[:, None]
    within = turn * (np.arange(mask.shape[1]) - limit) <= 0
    return np.asarray((mask | _find_past(mask, turn)) & within)


def _end_at(turn: int, limit: Limit, members: Collection[Index], at: Index, mask: Seen) -> Seen:
    """Show keys up to the limits of queries, or from them on, in some batch members."""
    n, m = mask.shape
    x = Place(np.arange(n)[:, None], np.arange(m), n, m, None)
    return (mask | _find_past(mask, turn)) & limit.shows(x) if at[:-1] in members else mask


def _choose_shift(far: Doubles, places: Places, last: int | None = None) -> tuple[int, float]:
    """Choose the number that, added to places, gives the keys by which rows are nearest."""
    rows, last = np.arange(len(far)), far.shape[1] - 1 if last is None else last
    by = np.unique(np.argmin(far, -1) - places)
    off = [float(np.sum(far[rows, np.clip(places + c, 0, last)])) for c in by]
    return int(by[np.argmin(off)]), min(off)


def _show_by_head(turn: int, own: tuple[int, int], by: Mapping[Index, int], x: Place) -> Seen:
    limit = own[1] * x.i + by[x.at] if x.at in by else x.i + own[0]
    return np.asarray(x.j <= limit if turn > 0 else x.j >= limit)


def _fit_limits(
    far: Doubles, queries: Places, turn: int, ends: tuple[int | None, int | None]
) -> list[Limit]:
    """Find the limits that fit alike, the plainest first: `far` is by the key."""
    found: list[tuple[float, Limit]] = []
    rows, m, (own, _) = np.arange(len(queries)), far.shape[1], ends
    usual = np.full(len(rows), m - 1 if turn > 0 else 0) if own is None else queries + own
    of_own: Iterator[Limit] = iter(())
    if own is not None:
        most = int(np.ptp(queries)) + 1  # of one block limits are no function of it
        of_own = chain(_list_from_key(far, turn, own), _list_blocks(turn, own, most))
    for limit in chain(of_own, _list_rules(far, queries, turn, ends)):
        keys = limit.of(queries)
        ahead = keys - usual
        # One on the other side would change nothing for some of these rows.
        one_side = limit.beyond is None or np.all(ahead > 0 if limit.beyond else ahead < 0)
        if one_side and np.all(keys >= 0 if turn > 0 else keys < m) and np.any(ahead):
            off = np.sum(far[rows, np.clip(keys, 0, m - 1)])
            found.append((float(off), limit))
    least = min((off for off, _ in found), default=0.0)
    return [x for off, x in found if off <= least + _TOLD_APART][:_MOST_LIMITS]


def _list_from_key(far: Doubles, turn: int, own: int) -> Iterator[Limit]:
    """List windows that hide no key from one on, the first that most rows see."""
    key = int(np.argmax(np.bincount(np.argmin(far, -1))))
    if turn < 0:
        text = f"the window is not applied to keys {key} and later"
        yield Limit(text, turn, own, partial(np.full_like, fill_value=key), beyond=False)


def _round_down(x: Places, size: int, own: int = 0, sign: int = 1, more: int = 0) -> Places:
    return np.asarray(sign * (sign * (x + own) // size * size) + more)


def _list_blocks(turn: int, own: int, most: int) -> Iterator[Limit]:
    """List limits that queries of a block, of fewer than so many, have together: that of one."""
    for size in (x for x in _QUERY_BLOCKS if x < most):
        if turn < 0:
            for beyond, which in ((True, "next"), (False, "previous")):
                sign = -1 if beyond else 1
                text = f"windows start at the {which} multiple of {size} keys, not at their own key"
                of = partial(_round_down, size=size, own=own, sign=sign)
                yield Limit(text, turn, own, of, beyond)
        for at, beyond in product(range(size), (False, True)):
            see = "also see the" if beyond else "see only"
            text = f"queries of a block of {size} {see} keys up to query {at} of the block"
            if at == size - 1:
                text = f"queries of a block of {size} see all keys of the block"
            if turn < 0:
                start = "no earlier" if beyond else "no later"
                which = f"the window of query {at} of the block"
                text = f"windows of a block of {size} queries start {start} than {which}"
            of = partial(_round_down, size=size, more=own + at)
            yield Limit(text, turn, own, of, beyond)


def _list_rules(
    far: Doubles, queries: Places, turn: int, ends: tuple[int | None, int | None]
) -> Iterator[Limit]:
    """List limits that are a map of a query's place, or of one of its limits, plus a number."""
    m, (own, other) = far.shape[1], ends
    sees = "query i sees keys up to" if turn > 0 else "the window of query i starts at"
    bases = {"i": 0} | ({f"({write_shift('i', own)})": own} if own else {})
    # Limits that many queries have in common may be the ends of blocks of any size.
    common, count = np.unique(np.argmin(far, -1), return_counts=True)
    sizes = {*np.diff(common[count > 1]).tolist()} - {0, 1}
    sizes = sizes if len(sizes) <= _BLOCK_SIZES else set()
    maps = Map("@", np.asarray), Map("0", np.zeros_like), *list_maps(m, sizes)
    for rule, (name, base) in product(maps, bases.items()):
        of = partial(_follow, rule=rule, base=base)
        more, _ = _choose_shift(far, of(queries))
        at = write_shift(rule.named(name), more).removeprefix("0 + ")
        text, of = f"{sees} {at}", partial(of, more=more)
        yield Limit(text, turn, own, of)
        for beyond, words in ((True, "later"), (False, "earlier")) if own is not None else ():
            yield Limit(f"{text} if that is {words} than its own", turn, own, of, beyond)
    for rule in maps if other is not None else ():
        of = partial(_follow_other, rule=rule, other=other or 0, last=m - 1)
        more, _ = _choose_shift(far, of(queries))
        end, where = ("first", "after") if turn > 0 else ("last", "before")
        text = f"{sees} {abs(more)} {where} the {end} key of query {rule.named('i')}"
        if more * turn > 0:
            yield Limit(text, turn, own, partial(of, more=more))


def _follow(x: Places, rule: Map, base: int, more: int = 0) -> Places:
    return rule.of(x + base) + more


def _follow_other(x: Places, rule: Map, other: int, last: int, more: int = 0) -> Places:
    return np.clip(rule.of(x) + other, 0, last) + more


def _show_both(band: Callable[[Place], Seen], rule: Callable[[Place], Seen], x: Place) -> Seen:
    return np.asarray(band(x) & rule(x))


def _show_where(
    where: Callable[[Place], Seen],
    rule: Callable[[Place], Seen],
    other: Callable[[Place], Seen],
    x: Place,
) -> Seen:
    return np.where(where(x), rule(x), other(x))
