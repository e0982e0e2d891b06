"""Backward passes that are wrong in places: limits, tiles, query heads, key heads, and terms."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

import numpy as np

from ....arrays.library import Doubles
from ....arrays.words import place
from ...rounding.head import Tile, scan_tile
from ...rounding.problems import Index, Problem
from ...rounding.saved import BackwardHead
from ...verification.findings import describe_span, name_span
from ..causes.backward import (
    Backward,
    Candidate,
    Shares,
    compute_gradient,
    count_once,
    list_candidates,
)
from ..causes.places import list_places
from ..causes.sampled import Alternative, Rows, Seen
from ..causes.slips import TILE_SIZES
from ..causes.wrong_rows import Sampled, differ, divide, row_sizes, thin
from .limits import list_own_limits, list_reaches
from .tiles import choose_columns, describe_keys

_FITTED_ROWS, _ROWS_OF_DQ = 16, 8  # of a head: to which times are fitted, and of dq
_MOST_QUERY_HEADS = 16  # of a key head
_OFTENEST, _OFF_COUNTS = 4, 0.05  # times that one counts, at most, and how near a fit is to it
_SQUARE = 9.0  # mean square of z, at most, that is left
_GROUPED_PAIRS = 2**22  # of queries and keys of all heads, at most, that are read otherwise
_MOVED_HEADS, _MOVED_TILES, _SEEN_IN_SUM = 4, 8, 30.0  # at most; and root of a sum of squares of z
_MOVED_ROWS, _MOVED_COLUMNS = (1, 8, 16, 32, 64, 128), 8  # how far away terms may be, and in steps
_COUNT_AS = {0: "are left out", 2: "count twice", 3: "count 3 times", 4: "count 4 times"}
_PAIRS = 2**21  # of queries and keys of a head, at most
_ROWS, _HEADS, _MOST_TILES = 8, 3, 32  # by which tiles are chosen


def list_limited(back: Backward) -> Iterator[Candidate]:
    """List backward passes whose queries see keys up to others, or from others on: by dq."""
    forward, wrong = back.first.forward, back.list_wrong("dq") if "dq" in back.failed else []
    if not wrong or np.prod(forward.shape[:2]) > _PAIRS:
        return
    rate = partial(_rate_limits, back)
    few = wrong[0].take(thin(np.arange(len(wrong[0].got)), _ROWS))
    for one in chain(list_reaches(forward, few, rate), list_own_limits(forward, wrong, rate)):
        back.forward.append(one)
        text = f"in the backward pass {one.text} (lse and out are right)"
        yield Candidate(text, len(back.forward) - 1)


def _rate_limits(back: Backward, free: Problem, x: Sampled, turn: int) -> Doubles:
    """Rate each key as the last of the sums of some rows of dq, or with `turn` -1 as the first."""
    back.forward.append(Alternative("", free))
    one = Candidate("", len(back.forward) - 1)
    ((weights, rows),) = back.list_factors(one, "dq", x.rows.at, x.rows.queries)
    sums = np.cumsum((weights[..., None] * rows)[:, ::turn], 1)[:, ::turn]
    size = back.samples["dq"].unit * row_sizes(x.got)
    return np.asarray(np.sum(np.square(divide(differ(x.got[:, None], sums), size[:, None])), -1))


def list_of_tiles(back: Backward) -> Iterator[Candidate]:
    """List backward passes that are others for some tiles of keys, or of queries, alone.

    Which tiles is told by dq, which sums over keys, or by dk and dv.
    """
    n, m, _ = back.first.forward.shape
    for of in back.failed:
        called, count = ("keys", m) if of == "dq" else ("queries", n)
        size = next((x for x in TILE_SIZES if count <= x * _MOST_TILES), count)
        some = [x.take(thin(np.arange(len(x.got)), _ROWS)) for x in back.list_wrong(of)[:_HEADS]]
        for one in list_candidates(back.first, False) if size < count else ():
            fitted = [_sum_tiles_of(back, one, of, x, size) for x in some if not one.of]
            if not fitted or any(x is None for x in fitted):
                continue
            columns, rest = (np.concatenate(x, -1) for x in zip(*fitted, strict=True))
            if (chosen := choose_columns(columns, rest)) is not None:
                here = np.isin(np.arange(count) // size, chosen)
                where = describe_keys(here, called)
                answer = partial(_mix_ways, back, one, called, here)
                yield Candidate(f"{one.text}, but only for {where}", answer=answer)


def _sum_tiles_of(
    back: Backward, one: Candidate, of: str, x: Sampled, size: int
) -> tuple[Doubles, Doubles] | None:
    """Return what a candidate adds to some rows in each tile, and what is to be added."""
    sums = []
    for way in (one, Candidate("")):
        every = [*back.list_factors(way, of, x.rows.at, x.rows.queries)]
        starts = np.arange(0, every[0][0].shape[1], size) if every else [0]
        terms = (
            [weights[:, j : j + size] @ rows[j : j + size] for j in starts]
            for weights, rows in every
        )
        sums.append(sum(map(np.stack, terms)))
    if np.shape(sums[0]) != np.shape(sums[1]):
        return None
    unit = back.samples[of].unit * row_sizes(x.got)
    other, right = (y / unit for y in sums)
    return (other - right).reshape(len(right), -1), (x.got / unit - np.sum(right, 0)).ravel()


def _mix_ways(
    back: Backward,
    one: Candidate,
    called: str,
    here: Seen,
    of: str,
    index: Index,
    heads: object,
) -> Doubles:
    """Compute a gradient by a candidate for some keys, or queries, and rightly for the others."""
    rows = np.arange(back.parts[of].problem.shape[0])
    if called == back.parts[of].problem.rows:  # each row is of one of them
        other, right = (back.predict(x, of, index, rows) for x in (one, Candidate("")))
        return np.where(here[:, None], other, right)
    total = np.zeros(())
    for way, kept in ((one, here), (Candidate(""), ~here)):
        for weights, values in back.list_factors(way, of, index, rows):
            total = total + (weights * kept) @ values
    return np.asarray(total)


def list_weighed(back: Backward) -> Iterator[Candidate]:
    """List gradients in which other query heads than those of a key head count, and how often."""
    for of in (x for x in ("dv", "dk") if x in back.failed):
        heads = back.gradients[of].heads
        if max(map(len, heads.values()), default=1) == 1:
            return
        some = [x.take(thin(np.arange(len(x.got)), _FITTED_ROWS)) for x in back.list_wrong(of)]
        fitted = {x.rows.at: _fit_times(back, of, x) for x in some}
        counts = {at: x for at, x in fitted.items() if x is not None}
        if len(counts) < len(fitted):
            return
        if counts:
            by_first = {heads[at][0]: [*x.items()] for at, x in counts.items()}
            share_by = partial(_share_by, by_first)
            yield Candidate(_describe_weights(heads, counts), share=share_by)
            return


class _Moved(NamedTuple):
    """How often tiles of keys, or of queries, add to wrong rows what is theirs, and what is not."""

    of: str
    size: int
    by: tuple[int, int]  # how many rows later, and columns, that is which is not theirs
    own: Doubles
    other: Doubles

    def move(self, terms: Doubles) -> Doubles:
        """Take the terms (rows, columns, tiles) of other rows and columns; 0 beyond the last."""
        at = np.arange(len(terms)) + self.by[0]
        within = (at >= 0) & (at < len(terms))
        return np.where(within[:, None, None], np.roll(terms, np.negative(self.by), (0, 1)), 0.0)


def list_moved_terms(back: Backward) -> Iterator[Candidate]:
    """List gradients to whose wrong rows tiles add what they should add to other rows or columns.

    Which tiles do, and which add what is theirs, is one linear fit.
    """
    n, m, _ = back.first.forward.shape
    few = math.prod(back.first.forward.lead) * n * m <= _GROUPED_PAIRS
    shown = [x for x in back.failed if few and back.samples[x].wrong.any()]
    for of in sorted(shown, key=lambda x: x != "dq"):
        (length, _, width), some = back.parts[of].problem.shape, _find_columns(back, of)
        tiled = m if of == "dq" else n
        moves = [(x, 0) for y in _MOVED_ROWS if y < length for x in (y, -y)]
        if not some.all():
            columns = np.flatnonzero(some)
            first = range(-columns[0], width - columns[-1], _MOVED_COLUMNS)
            moves += [(0, x) for x in first if x]
        for size in (x for x in TILE_SIZES[::-1] if 2 <= -(-tiled // x) <= _MOVED_TILES):
            terms = {x.rows.at: back.sum_tiles(of, x, size) for x in _take_wrong_heads(back, of)}
            for by in moves:
                moved = _Moved(of, size, by, np.zeros(0), np.zeros(0))
                if (found := _fit_moved(back, moved, terms, some)) is not None:
                    answer = partial(_answer_moved, back, found)
                    yield Candidate(_describe_moved(back, found, tiled), answer=answer)
                    return


def _find_columns(back: Backward, of: str) -> Seen:
    columns = back.samples[of].columns
    return columns if columns.any() else np.ones_like(columns)


def _take_wrong_heads(back: Backward, of: str) -> Iterator[Sampled]:
    """Take all rows of some heads with wrong ones, which are marked."""
    part, wrong = back.parts[of], back.samples[of].wrong
    for number in np.flatnonzero(wrong.any(1))[:_MOVED_HEADS]:
        at, i = part.problem.index_of(number), np.arange(wrong.shape[1])
        yield Sampled(Rows(at, i, i), part.numbers.out(at), None, wrong[number], wrong[number])


def _fit_moved(
    back: Backward, moved: _Moved, terms: Mapping[Index, Doubles], some: Seen
) -> _Moved | None:
    """Fit how often tiles add their own terms to wrong rows, and those of others."""
    columns, rest = [], []
    for x in _take_wrong_heads(back, moved.of):
        i = thin(np.flatnonzero(x.wrong), _FITTED_ROWS)
        got, own = x.got[i][:, some], terms[x.rows.at]
        size = back.samples[moved.of].unit * row_sizes(got)
        both = np.concatenate([y[i][:, some] for y in (own, moved.move(own))], -1)
        columns.append((both / size[..., None]).reshape(-1, both.shape[-1]))
        rest.append((got / size).ravel())
    a, b = np.concatenate(columns), np.concatenate(rest)
    if not (np.all(np.isfinite(a)) and np.all(np.isfinite(b))) or len(b) < 4 * a.shape[1]:
        return None
    counts = np.repeat([1.0, 0.0], a.shape[1] // 2)
    known = np.linalg.norm(a, axis=0) > _SEEN_IN_SUM
    fitted = np.linalg.lstsq(a[:, known], b - a[:, ~known] @ counts[~known], rcond=None)[0]
    counts[known] = np.rint(fitted)
    own, other = np.split(counts, 2)
    whole = np.max(np.abs(fitted - counts[known]), initial=0.0) < _OFF_COUNTS
    right = whole and np.all((counts >= 0) & (counts <= 1)) and other.any() and own.any()
    left = b - a @ counts
    return (
        moved._replace(own=own, other=other) if right and left @ left < _SQUARE * len(b) else None
    )


def _answer_moved(
    back: Backward, moved: _Moved, of: str, index: Index, _: Sequence[Index]
) -> Doubles:
    """Compute a gradient some rows of which have terms of others."""
    rows = np.arange(back.parts[of].problem.shape[0])
    right = back.predict(Candidate(""), of, index, rows)
    wrong = back.samples[of].wrong[back.parts[of].problem.number(index)]
    if of != moved.of or not wrong.any():
        return right
    every = Sampled(Rows(index, rows, rows), right, None, wrong, wrong)
    terms = back.sum_tiles(of, every, moved.size)
    added = terms @ moved.own + moved.move(terms) @ moved.other
    return np.where(wrong[:, None] & _find_columns(back, of), added, right)


def _describe_moved(back: Backward, x: _Moved, tiled: int) -> str:
    """Say which tiles add nothing, and which add the terms of other rows or columns."""
    rows, called = ("queries", "keys") if x.of == "dq" else ("keys", "queries")
    by, kind = (x.by[0], rows) if x.by[0] else (x.by[1], "columns")
    theirs = f"add what they should add to the {kind} {abs(by)} {'later' if by > 0 else 'earlier'}"
    said = {"are left out": (x.own == 0) & (x.other == 0), theirs: (x.own == 0) & (x.other > 0)}
    said[f"also {theirs}"] = (x.own > 0) & (x.other > 0)
    each = np.arange(tiled) // x.size
    words = [f"{describe_keys(y[each], called)} {z}" for z, y in said.items() if y.any()]
    where = ", ".join(list_places(back.parts[x.of].problem, back.samples[x.of])) or f"all {rows}"
    return f"in {x.of}, in the sums of {where}, {' and '.join(words)}"


def _share_by(weights: Mapping[Index, Shares], heads: Sequence[Index]) -> Shares:
    return weights.get(heads[0], count_once(heads))


def _fit_times(back: Backward, of: str, x: Sampled) -> dict[Index, int] | None:
    """Fit how often each query head of a batch member counts in a sum over some; 0 is left out."""
    own = back.gradients[of].heads[x.rows.at]
    forward = back.gradients[of].forward
    heads, (n, m, _) = forward.lead[-1], forward.shape
    few = heads <= _MOST_QUERY_HEADS and heads * n * m <= _GROUPED_PAIRS
    every = [(*own[0][:-1], h) for h in range(heads)] if few else own

    def alone(head: Index) -> Doubles:
        one = Candidate("", share=lambda _: [(head, 1.0)])
        return back.predict(one, of, x.rows.at, x.rows.queries)

    size = back.samples[of].unit * row_sizes(x.got)
    # What each head would give alone, in units of roundings.
    columns = np.stack([(alone(y) / size).ravel() for y in every], -1)
    with np.errstate(all="ignore"):
        got = (x.got / size).ravel()
    if not np.all(np.isfinite(columns)) or not np.all(np.isfinite(got)):
        return None
    fitted = np.linalg.lstsq(columns, got, rcond=None)[0]
    # Heads count a whole number of times.
    counts = np.rint(fitted)
    left = got - columns @ counts
    if np.max(np.abs(fitted - counts)) > _OFF_COUNTS or np.mean(left * left) > _SQUARE:
        return None
    if np.any((counts < 0) | (counts > _OFTENEST)):
        return None
    return {y: int(c) for y, c in zip(every, counts, strict=True) if c}


def _describe_weights(
    heads: Mapping[Index, Sequence[Index]], counts: Mapping[Index, Mapping[Index, int]]
) -> str:
    """Say which query heads count, by their place in each group if that is the same in all."""
    within = [[x.get(y, 0) for y in heads[at]] for at, x in counts.items()]
    alone = all({*x} <= {*heads[at]} for at, x in counts.items())
    if alone and len(counts) == len(heads) and all(x == within[0] for x in within):
        count = len(within[0])
        places = {c: np.flatnonzero(np.equal(within[0], c)) for c in _COUNT_AS}
        words = []
        for c, these in places.items():
            if 0 < len(these) < count:
                which = describe_span(these).replace(" and ", " or ")
                words.append(f"query heads h with h % {count} = {which} {_COUNT_AS[c]}")
            elif len(these):
                words.append(f"all query heads {_COUNT_AS[c]}")
        return " and ".join(words)
    at, first = next(iter(counts.items()))
    more = f" (and {len(counts) - 1} more key heads are wrong)" if len(counts) > 1 else ""
    which = ", ".join(place(x) + f" ({c} times)" * (c > 1) for x, c in first.items()) or "none"
    return f"the gradient of key head {place(at)} sums query heads {which}{more}"


def list_regrouped(back: Backward) -> Iterator[Candidate]:
    """List the backward pass whose query heads use other key heads, or none, by rows of dq."""
    forward = back.first.forward
    keys, count = forward.key_heads, forward.lead[-1] if forward.lead else 1
    if "dq" not in back.failed or not keys or keys == count:
        return
    wrong = [x.take(slice(_ROWS_OF_DQ)) for x in back.list_wrong("dq")]
    for words, saved in (("", False), (", with the weights of the forward pass", True)):
        used: dict[int, int | None] = {h: h * keys // count for h in range(count)}
        for x in wrong:
            (*_, h), off = x.rows.at, [math.inf] * keys
            for g in range(keys) if np.any(x.got) else ():
                out = _regroup(back, {h: g}, saved, "dq", x.rows.at, [x.rows.at])
                z = divide(differ(x.got, out[x.rows.queries]), row_sizes(x.got))
                off[g] = float(np.sum(np.square(z)))
            used[h] = int(np.argmin(off)) if min(off) < math.inf else None
        said = []
        for to in {*used.values()}:
            moved = [h for h, g in used.items() if g == to != h * keys // count]
            name = "no key head" if to is None else f"key head {to}"
            said += [f"{name} by {name_span('query heads', np.array(moved))}"] if moved else []
        if said:
            text = f"in the backward pass a wrong key head is used: {', '.join(said)}{words}"
            yield Candidate(text, answer=partial(_regroup, back, used, saved))


def _regroup(
    back: Backward,
    used: Mapping[int, int | None],
    saved: bool,
    of: str,
    index: Index,
    heads: Sequence[Index],
) -> Doubles:
    """Compute a gradient whose query heads use key heads, with weights of these or `saved` ones."""
    share = back.first.forward.lead[-1] // (back.first.forward.key_heads or 1)
    *member, first = heads[0]
    total = np.zeros(back.parts[of].problem.shape[::2])
    for h, g in used.items():
        if g is None or (h != first if of == "dq" else g != first // share):
            continue
        (held, kept), (other, _) = (back.keep(of, (*member, x)) for x in (h, g * share))
        own = scan_tile(held.head, slice(0, len(held.head.q)), slice(0, held.head.keys))
        head = held.head._replace(k=other.head.k, v=other.head.v)
        again = BackwardHead(head, held.d_out, None)
        total += compute_gradient(again, kept, of, partial(_put_scores, own if saved else None))
    return total


def _put_scores(saved: Tile | None, tile: Tile) -> Tile:
    return tile if saved is None else tile._replace(scores=saved.scores)
