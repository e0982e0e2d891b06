"""Backward passes that are wrong in places: limits, tiles, query heads, key heads, and terms."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, product
from typing import Any, NamedTuple

import numpy as np

from ....arrays.library import Doubles
from ....arrays.words import place
from ...rounding.problems import Index, Problem
from ...rounding.saved import BackwardHead
from ...verification.findings import name_first, name_span
from ..causes.backward import (
    Backward,
    Candidate,
    HeadPass,
    Kept,
    Lookup,
    compute_gradient,
    list_candidates,
)
from ..causes.places import list_places
from ..causes.sampled import Alternative, Numbers1D, Rows, Seen
from ..causes.slips import TILE_SIZES, score_all
from ..causes.wrong_rows import Sampled, differ, divide, row_sizes, thin
from .limits import list_own_limits, list_reaches
from .maps import write_shift
from .strides import TURNED
from .sums import PartTerms, choose_columns, describe_keys, fit_counts, stack_terms

FITTED_ROWS = 16  # of a head, to which times are fitted
_SQUARE = 9.0  # mean square of z, at most, that is left
GROUPED_PAIRS = 2**22  # of queries and keys of all heads, at most, that are read otherwise
_MOVED_HEADS, _MOVED_TILES = 4, 8  # at most
_MOVED_ROWS, _MOVED_COLUMNS = (1, 8, 16, 32, 64, 128), 8  # how far away terms may be, and in steps
_PAIRS = 2**21  # of queries and keys of a head, at most
_ROWS, _HEADS, _MOST_TILES = 8, 3, 32  # by which tiles are chosen
_HEADS_READ, _COLUMNS_OF_D = 16, 8  # among which numbers are found, and by which
_MOVED, _NEAR_MOVED = 0.9, 6.0  # share of rows that read others, and how near
_MOST_STRETCHES, _CHANCE_OF_READS = 16, -20.0  # of a head; log of the chance that numbers are near
_ANY, _ONE_KEY = "another number", 0.8  # weight of a key, at least, whose errors are those of D


def list_limited(back: Backward) -> Iterator[Candidate]:
    """List backward passes whose queries see keys up to others, or from others on: by dq."""
    forward, wrong = back.first.forward, back.list_wrong("dq") if "dq" in back.failed else []
    if not wrong or np.prod(forward.shape[:2]) > _PAIRS:
        return
    rate = partial(_rate_limits, back)
    few = wrong[0].few(_ROWS)
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
        some = [x.few(_ROWS) for x in back.list_wrong(of)[:_HEADS]]
        for one in list_candidates(back.first, False) if some and size < count else ():
            if one.of:
                continue
            add = partial(_add_beside, back, one, of, size)
            terms = stack_terms(some, back.samples[of].unit, add)
            if (chosen := choose_columns(*terms)) is not None:
                here = chosen[np.arange(count) // size] > 0
                where = describe_keys(here, called)
                answer = partial(_mix_ways, back, one, called, here)
                yield Candidate(f"{one.text}, but only for {where}", answer=answer)


def _add_beside(back: Backward, one: Candidate, of: str, size: int, x: Sampled) -> PartTerms:
    """Return what a candidate adds to rows in each tile beside what it should; NaN if none."""
    other, right = (back.sum_tiles(of, x, size, one=y) for y in (one, Candidate("")))
    more = other - right if other.shape == right.shape else math.nan * right
    return more, x.got - np.sum(right, 0)


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


class _Moved(NamedTuple):
    """How often tiles of keys, or of queries, add to wrong rows what is theirs, and what is not."""

    of: str
    size: int
    by: tuple[int, int, int]  # how many rows, columns and tiles later that is which is not theirs
    own: Doubles
    other: Doubles

    def list_others(self, back: Backward, x: Sampled, terms: Doubles) -> Doubles:
        """Take the terms (tiles, rows, columns) of others for some rows; 0 beyond the last."""
        if self.by[2]:
            return back.sum_tiles(self.of, x, self.size, self.by[2])
        at, n = x.rows.queries + self.by[0], terms.shape[1]
        within = ((at >= 0) & (at < n))[:, None]
        return np.where(within, np.roll(terms, -self.by[1], 2)[:, at % n], 0.0)

    def list_terms(
        self, back: Backward, terms: Mapping[Index, Doubles], some: Seen, x: Sampled
    ) -> PartTerms:
        """Take the terms of wrong rows, and of others, in the wrong columns."""
        own = terms[x.rows.at]
        both = np.concatenate([own[:, x.rows.queries], self.list_others(back, x, own)])
        return both[..., some], x.got


def list_moved_terms(back: Backward) -> Iterator[Candidate]:
    """List gradients to whose wrong rows tiles add what they should not.

    It is what they should add to other rows or columns, or their weights times rows of another
    tile. Which tiles do, and which add what is theirs, is one linear fit.
    """
    n, m, _ = back.first.forward.shape
    few = math.prod(back.first.forward.lead) * n * m <= GROUPED_PAIRS
    shown = [x for x in back.failed if few and back.samples[x].wrong.any()]
    for of in sorted(shown, key=lambda x: x != "dq"):
        (length, _, width), some = back.parts[of].problem.shape, _find_columns(back, of)
        tiled = m if of == "dq" else n
        moves = [(x, 0, 0) for y in _MOVED_ROWS if y < length for x in (y, -y)]
        if not some.all():
            columns = np.flatnonzero(some)
            first = range(-columns[0], width - columns[-1], _MOVED_COLUMNS)
            moves += [(0, x, 0) for x in first if x]
        for size in (x for x in TILE_SIZES[::-1] if 2 <= -(-tiled // x) <= _MOVED_TILES):
            heads = [*_take_wrong_heads(back, of)]
            terms = {x.rows.at: back.sum_tiles(of, x, size) for x in heads}
            tiles = range(1, -(-tiled // size))
            for by in (*moves, *((0, 0, x) for y in tiles for x in (y, -y))):
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
    wrong = (
        x.take(thin(np.flatnonzero(x.wrong), FITTED_ROWS))
        for x in _take_wrong_heads(back, moved.of)
    )
    cut = [x._replace(got=x.got[:, some]) for x in wrong]
    add, unit = partial(moved.list_terms, back, terms, some), back.samples[moved.of].unit
    counts = fit_counts(
        *stack_terms(cut, unit, add), np.repeat([1.0, 0.0], len(terms[cut[0].rows.at])), 1
    )
    own, other = (np.zeros(0),) * 2 if counts is None else np.split(counts, 2)
    return moved._replace(own=own, other=other) if other.any() and own.any() else None


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
    others = moved.list_others(back, every, terms)
    added = np.tensordot(moved.own, terms, 1) + np.tensordot(moved.other, others, 1)
    return np.where(wrong[:, None] & _find_columns(back, of), added, right)


def _describe_moved(back: Backward, x: _Moved, tiled: int) -> str:
    """Say which tiles add nothing, and which add the terms of other rows or columns."""
    rows, called = ("queries", "keys") if x.of == "dq" else ("keys", "queries")
    by, kind = (x.by[0], rows) if x.by[0] else (x.by[1], "columns")
    theirs = f"add what they should add to the {kind} {abs(by)} {'later' if by > 0 else 'earlier'}"
    if by := x.by[2] * x.size:
        array = {"dq": "k", "dk": "q", "dv": "d_out"}[x.of]
        theirs = f"add their weights times the rows of {array} {abs(by)} "
        theirs += f"{'later' if by > 0 else 'earlier'}"
    said = {"are left out": (x.own == 0) & (x.other == 0), theirs: (x.own == 0) & (x.other > 0)}
    said[f"also {theirs}"] = (x.own > 0) & (x.other > 0)
    each = np.arange(tiled) // x.size
    words = [f"{describe_keys(y[each], called)} {z}" for z, y in said.items() if y.any()]
    where = ", ".join(list_places(back.parts[x.of].problem, back.samples[x.of])) or f"all {rows}"
    return f"in {x.of}, in the sums of {where}, {' and '.join(words)}"


_Solved = tuple[Numbers1D, Doubles, Doubles]  # queries, and numbers with errors, (names, queries)
_Stretch = tuple[int, int, int | None]  # first and last query, place that query 0 reads; None for 0


class _QueryRead(NamedTuple):
    """Numbers of queries that may be read at other places of memory, or made of others there."""

    text: str
    names: tuple[str, ...]  # of "lse" and "delta", which rows of dq tell
    stored: Sequence[Doubles]  # of each name what lies in memory, (places, columns)
    times: Callable[[Index], Sequence[Doubles]]  # what queries multiply that by, (n, columns)

    def values(self, at: Index, i: Numbers1D, places: Numbers1D) -> list[Doubles]:
        """Return the numbers that queries read at places; 0 beyond the ends."""
        inside = (places >= 0) & (places < len(self.stored[0]))
        places = np.where(inside, places, 0)
        each = zip(self.stored, self.times(at), strict=True)
        return [np.where(inside, np.sum(x[places] * y[i], -1), 0.0) for x, y in each]

    def find_places(self, at: Index, solved: _Solved) -> Seen:
        """Tell at which places the numbers of queries are: (queries, places), the last for 0."""
        i, numbers, errors = solved
        near = np.ones((len(i), len(self.stored[0]) + 1), bool)
        for x, y, value, error in zip(self.stored, self.times(at), numbers, errors, strict=True):
            with np.errstate(invalid="ignore"):
                every = np.pad(y[i] @ x.T, ((0, 0), (0, 1)))
                near &= np.abs(every - value[:, None]) < _NEAR_MOVED * error[:, None]
        return near


def _solve_rows(back: Backward, names: Sequence[str], x: Sampled) -> _Solved:
    """Compute lse, D or both from rows of dq; NaN where no numbers explain a row."""
    held, kept = back.keep("dq", x.rows.at)
    i, keys = x.rows.queries, np.arange(held.head.keys)
    head = Alternative("", back.gradients["dq"].forward).head(x.rows._replace(keys=keys))

    def compute(delta: float) -> Doubles:
        some = Kept(kept.lse[i], np.full(len(i), delta), kept.top[i])
        return compute_gradient(BackwardHead(head, held.d_out[i], None), some, "dq")

    # With c = e^(right lse - lse) a row is c (what it is without D) + c D (its slope).
    without, delta = compute(0.0), kept.delta[i, None]
    slope, std = compute(1.0) - without, back.samples["dq"].unit * row_sizes(x.got[:, None])[:, 0]
    terms = {"delta": [slope], "lse": [without + delta * slope], "lse delta": [without, slope]}
    a = np.stack(terms[" ".join(names)], -1) / std[..., None]
    b = (x.got - without * ("lse" not in names)) / std
    normal = np.einsum("nca,ncb->nab", a, a)
    # Numbers that a row does not tell have large errors.
    floor = 1e-12 * np.trace(normal, axis1=1, axis2=2) + 1e-300
    covariance = np.linalg.inv(normal + floor[:, None, None] * np.eye(len(names)))
    times = np.einsum("nab,ncb,nc->na", covariance, a, b)
    known = np.mean(np.square(b - np.einsum("nca,na->nc", a, times)), -1) < _SQUARE
    with np.errstate(all="ignore"):
        c = times[:, 0] if "lse" in names else np.ones(len(i))
        found = {"lse": kept.lse[i] - np.log(c), "delta": times[:, -1] / c}
        one, zero = np.ones(len(i)), np.zeros(len(i))
        slopes = {"lse": [one, zero], "delta": [-found["delta"], one]}
        slopes = {y: z if len(names) > 1 else [one] for y, z in slopes.items()}
        errors = [
            np.sqrt(np.einsum("an,nab,bn->n", slopes[y], covariance, slopes[y])) / np.abs(c)
            for y in names
        ]
    return i, np.where(known, np.stack([found[y] for y in names]), np.nan), np.stack(errors)


def list_read_elsewhere(back: Backward) -> Iterator[Candidate]:
    """List backward passes that read lse, D or what D is made of elsewhere, by wrong rows of dq."""
    forward = back.first.forward
    (n, m, _), heads = forward.shape, math.prod(forward.lead)
    wrong = back.list_wrong("dq") if "dq" in back.failed else []
    if not wrong or heads > _HEADS_READ or heads * n * max(n, m) > GROUPED_PAIRS:
        return
    solved: dict[tuple[str, ...], list[_Solved]] = {}
    steps = dict.fromkeys((1, forward.lead[-1])) if heads > 1 else [1]
    for by_token, step in product((False, True), steps):
        for read in _list_reads(back, by_token):
            if read.names not in solved:
                solved[read.names] = [_solve_rows(back, read.names, x) for x in wrong]
            lost = np.concatenate([np.isnan(y).any(0) for _, y, _ in solved[read.names]])
            found: dict[Index, list[_Stretch]] = {}
            for x, y in zip(wrong, solved[read.names], strict=True):
                if np.mean(lost) > 1 - _MOVED:
                    break
                own = forward.number(x.rows.at) * n * (not by_token)
                near = read.find_places(x.rows.at, y)
                if not (stretches := _find_stretches(x.rows.queries, near, step, own)):
                    break
                found[x.rows.at] = stretches
            else:
                if read.names == ("delta",) and all(
                    z is None for y in found.values() for *_, z in y
                ):
                    continue  # D is left out
                be = "are" if read.names[1:] else "is"
                text = f"{read.text} {be} read {_describe_read(forward, by_token, step, found)}"
                yield Candidate(text, read=partial(_take_read, read, step, found))
                return


def _list_reads(back: Backward, by_token: bool) -> Iterator[_QueryRead]:
    """List what may be read elsewhere: numbers of queries, or rows of d_out or out, to make D."""
    n, lead = back.first.forward.shape[0], back.first.forward.lead
    held = {x: back.keep("dq", x) for x in np.ndindex(lead)}

    def lay(of: Callable[[HeadPass], Any]) -> Doubles:
        """Lay rows of all heads one after another."""
        every = np.stack([of(x).reshape(n, -1) for x in held.values()]).reshape(*lead, n, -1)
        every = np.swapaxes(every, -3, -2) if by_token and every.ndim > 2 else every
        return np.asarray(every.reshape(-1, every.shape[-1]))

    one, d = np.ones((n, 1)), "D = d_out . out"
    lse, delta = lay(lambda x: x[1].lse), lay(lambda x: x[1].delta)
    yield _QueryRead(d, ("delta",), [delta], lambda at: [one])
    yield _QueryRead("lse", ("lse",), [lse], lambda at: [one])
    yield _QueryRead(f"lse and {d}", ("lse", "delta"), [lse, delta], lambda at: [one, one])
    of_d_out, of_out = lay(lambda x: x[0].d_out), lay(_take_out)
    yield _QueryRead(f"d_out in {d}", ("delta",), [of_d_out], lambda at: [_take_out(held[at])])
    yield _QueryRead(f"out in {d}", ("delta",), [of_out], lambda at: [held[at][0].d_out])


def _take_out(x: HeadPass) -> Doubles:
    assert x[0].out is not None
    return x[0].out


def _find_stretches(queries: Numbers1D, near: Seen, step: int, own: int) -> list[_Stretch]:
    """Find the longest stretches of queries, each of which reads one place after another.

    None are found if numbers may be near to so many by chance.
    """
    known, size = np.flatnonzero(near.any(1)), near.shape[1] - 1
    if len(known) < _MOVED * len(queries):
        return []
    most, found, chance = step * int(queries[-1]), list[_Stretch](), 0.0
    alive = np.zeros(size + most + 1, bool)

    def place_row(row: int) -> Seen:
        hits, at = np.zeros_like(alive), most - step * int(queries[row])
        hits[at : at + size], hits[-1] = near[row, :-1], near[row, -1]
        return hits

    for row in range(known[0], len(queries)):
        i, hits = int(queries[row]), place_row(row)
        later = known[known > row][:2]
        if np.any(alive & hits):
            alive &= hits
        elif found and (not hits.any() or all(np.any(alive & place_row(x)) for x in later)):
            hits = alive  # the error of the row is larger than errors of others
        else:
            chance, alive = chance + math.log(size + most), hits.copy()
            found.append((i, i, 0))
        chance += math.log(np.mean(near[row])) if hits is not alive else 0.0
        starts = np.flatnonzero(alive[:-1]) - most
        # Of several places the nearest; 0 before all.
        start = None if alive[-1] else int(starts[np.argmin(np.abs(starts - own))])
        found[-1] = found[-1][0], i, start
        if len(found) > _MOST_STRETCHES:
            return []
    return found if chance < _CHANCE_OF_READS else []


def _take_read(
    read: _QueryRead, step: int, found: Mapping[Index, Sequence[_Stretch]], look: Lookup, at: Index
) -> HeadPass:
    """Take the numbers that queries of a head read elsewhere."""
    back, kept = look(at)
    numbers = {x: getattr(kept, x).copy() for x in read.names}
    for first, last, start in found.get(at, ()):
        i = np.arange(first, last + 1)
        places = np.full(len(i), -1) if start is None else start + step * i
        for x, values in zip(numbers.values(), read.values(at, i, places), strict=True):
            x[i] = values
    return back, kept._replace(**numbers)


def _describe_read(
    forward: Problem, by_token: bool, step: int, found: Mapping[Index, Sequence[_Stretch]]
) -> str:
    """Say what queries read, once for all heads that read the same."""
    n, heads = forward.shape[0], forward.lead[-1] if forward.lead else 1
    said, strides = dict[str, list[Index]](), True
    for at, stretches in found.items():
        member, head = divmod(forward.number(at), heads)
        # As if memory had the other order.
        turned = member * heads * n + head * (n if by_token else 1)
        strides &= by_token != (step > 1) and [x for *_, x in stretches] == [turned]
        words = []
        long = [x for x in stretches if x[1] > x[0]]  # one row may be near to many
        for first, last, start in long or stretches:
            mine = name_span("queries", np.arange(first, last + 1))
            if start is None:
                words.append(f"{mine} read 0")
                continue
            batch, rest = divmod(start + step * first, heads * n)
            of_head, i = divmod(rest, heads)[::-1] if by_token else divmod(rest, n)
            whose = forward.index_of(min(batch * heads + of_head, math.prod(forward.lead) - 1))
            of, along = f" of head {place(whose)}" * (whose != at), step == 1 and not by_token
            if not along or i + last - first >= n:
                words.append(f"{mine} read every {step} numbers from query {i}{of} on")
            elif len(long) <= 1 and 2 * (last - first) > n:
                words.append(f"query i reads that of query {write_shift('i', i - first)}{of}")
            else:
                theirs = name_span("queries", np.arange(i, i + last - first + 1))
                words.append(f"{mine} read those of {theirs}{of}")
        said.setdefault(", ".join(words), []).append(at)
    if strides:
        return f"with the strides of {[*TURNED][not by_token]}"
    named = [f"{x}{_say_heads(y)}" for x, y in said.items()] if len(said) > 1 else [*said]
    return f"elsewhere: {name_first(named)}"


def _say_heads(heads: Sequence[Index]) -> str:
    return f" in head {place(heads[0])}{f' and {len(heads) - 1} more' * (len(heads) > 1)}"


def list_other_numbers(back: Backward, related: bool) -> Iterator[Candidate]:
    """List the backward pass with another D in some rows, those of dq that one number explains.

    It is `related` to the right one, or any number.
    """
    (n, m, _), of_dq = back.first.forward.shape, "dq" in back.failed
    wrong = back.list_wrong("dq") if of_dq and n * m <= _PAIRS else []
    if not wrong or wrong[0].got.shape[1] < _COLUMNS_OF_D:
        return
    solved, about = {}, []
    for x in wrong:
        i, values, errors = _solve_rows(back, ("delta",), x)
        held, kept = back.keep("dq", x.rows.at)
        solved[x.rows.at] = i, values[0]
        top, made = np.exp(kept.top - kept.lse)[i], [held.d_out[i], _take_out((held, kept))[i]]
        about.append([values[0], errors[0], kept.delta[i], top, *made])
    every = [np.concatenate(x) for x in zip(*about, strict=True)]
    values, errors, right, top, *made = every
    if not np.all(np.isfinite(values)):
        return
    # A kernel may take D from an output that was rounded.
    of_out = back.samples["dq"].unit * np.linalg.norm(made[0] * row_sizes(made[1]), axis=-1)
    errors = np.hypot(errors, of_out)
    size = max(float(np.sum(np.square(right / errors))), 1e-300)
    factor = float(np.sum(right * values / np.square(errors))) / size
    others = [(_list_deltas(factor, back.keep("dq", at)), i) for at, (i, _) in solved.items()]
    known = {x: np.concatenate([y[x][i] for y, i in others]) for x in others[0][0]}
    named = _relate(values, errors, known, made)
    # Where one key has nearly all of the weight, any error of it is as of another D.
    if related == (named == _ANY) or (not related and np.median(top) > _ONE_KEY):
        return
    if named in known:
        read = partial(_take_related, named, factor)
        yield Candidate(f"D = d_out . out is {named}", read=read)
    columns = back.samples["dq"]._replace(columns=np.ones(0, bool))  # D is of whole rows
    where = ", ".join(list_places(back.parts["dq"].problem, columns)) or "all rows"
    read = partial(_take_solved, solved)
    yield Candidate(f"D = d_out . out is {named} in {where}", read=read)


def _list_deltas(factor: float, made: HeadPass) -> Mapping[str, Doubles]:
    """List what D may be, by words: from the right one, weights of keys, or other products."""
    held, kept = made
    out, sinks = (
        _take_out(made),
        np.exp(score_all(held.head)[:, held.head.keys :] - kept.lse[:, None]),
    )
    of_keys = 1 - np.sum(sinks, -1)
    return {
        "left out": 0 * kept.delta,
        f"multiplied by {factor:.3g}": factor * kept.delta,
        "divided by 1 - the weight of the sink": kept.delta / of_keys,
        "multiplied by 1 - the weight of the sink": kept.delta * of_keys,
        "the sum of out": np.sum(out, -1),
        "the sum of d_out": np.sum(held.d_out, -1),
        "out . out": np.sum(out * out, -1),
        "d_out . d_out": np.sum(held.d_out * held.d_out, -1),
    }


def _take_related(named: str, factor: float, look: Lookup, at: Index) -> HeadPass:
    back, kept = look(at)
    return back, kept._replace(delta=_list_deltas(factor, (back, kept))[named])


def _relate(
    values: Doubles, errors: Doubles, known: Mapping[str, Doubles], made: Sequence[Doubles]
) -> str:
    """Say which of known numbers, or of sums of products of some columns, numbers are."""
    (d_out, out), related = made, {**known}
    if len(values) > 2 * out.shape[1]:
        sums = d_out * out / errors[:, None]
        kept = np.linalg.lstsq(sums, values / errors, rcond=None)[0] > 0.5
        if kept.any() and not kept.all():
            few = np.mean(kept) <= 1 / 2
            span = name_span("columns", np.flatnonzero(kept if few else ~kept))
            name = f"the sum over {span} alone" if few else f"the sum without {span}"
            related[name] = np.sum(d_out * out * kept, -1)
    left = {x: float(np.mean(np.square((values - y) / errors))) for x, y in related.items()}
    near = [x for x, y in left.items() if y < min(_SQUARE, 2 * min(left.values()) + 1)]
    for name in near:
        if name != "multiplied by 1":
            return name
    return _ANY


def _take_solved(solved: Mapping[Index, tuple[Any, Doubles]], look: Lookup, at: Index) -> HeadPass:
    """Take numbers D that were found for some rows."""
    back, kept = look(at)
    delta = kept.delta.copy()
    rows, values = solved.get(at, ([], 0.0))
    delta[rows] = values
    return back, kept._replace(delta=delta)
