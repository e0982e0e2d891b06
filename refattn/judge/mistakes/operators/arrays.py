"""Arrays that are read at other places, by a rule of the place of a key or a query, or column."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ....arrays.library import Doubles
from ....arrays.words import place
from ...rounding.problems import Index, Problem
from ...verification.findings import name_first
from ..causes.sampled import (
    Alternative,
    Place,
    Result,
    Rows,
    attend,
    pad_sum,
    show_band,
    take_rows,
)
from ..causes.slips import TILE_SIZES, attend_by, score_all, weigh_keys
from ..causes.wrong_rows import Sampled, differ, divide, finite, row_sizes, thin
from .maps import Map, Places, list_maps, list_paddings, write_shift
from .strides import PADDED_TO, PLURALS, read_strided

_RATED_ROWS = 4  # by which rules are rated
_NEAREST = 2  # rules that are tried, of each array
_SHIFTS = (1, -1, 2, -2, *TILE_SIZES[:-1], *(-x for x in TILE_SIZES[:-1]))
_MOST_SHIFTED = 128  # keys of a mask, at most, for it to be tried moved by any number of keys
_MOST_READ = 2**24  # numbers of a mask, in all rows by which it is tried to be read
NOWHERE = -1  # the place of a row of zeros
# What is read where there is none: of these places, those of the readers, and how many there are.
_ENDS: Mapping[str, Callable[[Places, Places, int], Any]] = {
    "": lambda at, own, count: np.clip(at, 0, count - 1),
    " (cyclically)": lambda at, own, count: at % count,
    " (its own if there is none)": lambda at, own, count: own,
    " (0 if there is none)": lambda at, own, count: NOWHERE,
}
_OF_KEYS = {"k": "key", "v": "value", "kv": "key and value"}
Sources = npt.NDArray[np.int64]
_ROWS, _FEWEST_ROWS, _HEADS = 8, 4, 32  # by which columns are known; and heads, at most
_MOST_OFF = 4.0  # mean square of z of a column
_NO_COLUMN = 0.01  # factors that are 0 or 1


def list_reads(problem: Problem, x: Sampled, sizes: Doubles) -> Iterator[Alternative]:
    """List arrays read at other places, by the rules that come nearest to some rows."""
    some = thin(np.arange(len(x.got)), _RATED_ROWS)
    x, sizes = x.take(some), sizes[some]
    n, m, _ = problem.shape
    maps = [*product(list_maps(max(n, m)), [""])]
    # What begins at the first query may be read as if it began at the first key, and back.
    usual = dict.fromkeys((*_SHIFTS, m - n, n - m))
    every = sorted(range(1 - m, m), key=abs)[1:] if m <= _MOST_SHIFTED else usual
    for array in _list_placed(problem, x):
        one, called, count = ("key", "j", m) if array.keys else ("query", "i", n)
        places = np.arange(m) if array.keys else x.rows.queries
        ways, off = [], []
        steps = every if array.called == "mask" else usual
        shifts = [Map(write_shift("@", by), partial(np.add, by)) for by in steps]
        paddings = product(list_paddings(count), [" (0 if there is none)"])
        rules = [*maps, *product(shifts, _ENDS), *paddings]
        for (rule, ends), past in product(rules, (False, True) if array.next_heads else (False,)):
            read = _stay_within(rule.of, ends, 2 * m if past else count, places)
            if np.array_equal(read, places) or (past and (ends or not np.any(read >= count))):
                continue
            if np.all(read == NOWHERE):  # nothing but zeros: other causes name that
                continue
            if np.all(read == read[0]):  # whatever the rule, it is one place
                rule = Map(str(read[0]), rule.of)
            with np.errstate(all="ignore"):
                z = divide(differ(x.got, array.apply(read)), sizes)
            ways.append((rule, ends, past))
            off.append(np.sum(z * z))
        for rule, ends, past in (ways[at] for at in np.argsort(off, kind="stable")[:_NEAREST]):
            text = f"{one} {called} has the {array.called} of {one} {rule.named(called)}{ends}"
            moved = array.change(partial(_stay_within, rule.of, ends, count))
            for name in array.next_heads if past else "":
                moved = moved.replaced(name, partial(_read_past, problem, name, rule.of))
            yield Alternative(f"{text}{', past the end in the next head' * past}", moved)


def _stay_within(of: Callable[[Places], Places], ends: str, count: int, x: Places) -> Places:
    at = of(x)
    return np.where((at >= 0) & (at < count), at, _ENDS[ends](at, x, count))


def take_or_zero(x: Doubles, at: Places, axis: int = 0) -> Doubles:
    """Take rows or columns, zeros from nowhere."""
    kept = np.expand_dims(at != NOWHERE, 1 - axis) if x.ndim > 1 else at != NOWHERE
    return np.where(kept, np.take(x, at, axis), 0.0)


def _read_past(
    problem: Problem, name: str, of: Callable[[Places], Places], index: Index, _: Doubles
) -> Doubles:
    """Read rows of a head and the one after it at other places."""
    own, other = (problem.read(y)[name] for y in (index, _find_next(problem, index)))
    return take_or_zero(
        np.concatenate([own, other]), _stay_within(of, "", 2 * len(own), np.arange(len(own)))
    )


def _find_next(problem: Problem, index: Index) -> Index:
    """Find the head whose keys lie after those of this one; the first after the last."""
    shared = problem.lead[-1] // problem.key_heads if problem.key_heads else 1
    start = problem.number(index) // shared * shared + shared
    return problem.index_of(start % math.prod(problem.lead))


class Placed(NamedTuple):
    """An array that may be read at other places."""

    called: str
    keys: bool  # whether it is of keys, not of queries
    apply: Callable[[Places], Doubles]  # some rows, if their keys or they read these places
    change: Callable[[Callable[[Places], Places]], Problem]  # to other places, by a map
    next_heads: str = ""  # the names of what may be read in the next head, too


def _list_placed(problem: Problem, x: Sampled) -> Iterator[Placed]:
    """List the arrays of a problem; some rows are computed again from scores that are known."""
    head, arrays = take_rows(problem, x.rows), problem.read(x.rows.at)
    m = head.keys
    free, v = score_all(head._replace(mask=None)), head.v[:m]
    bias: Any = np.zeros((len(x.got), m)) if head.bias is None else head.bias
    bare, rest = free[:, :m] - bias, (free[:, m:], head.v[m:])
    seen = True if head.mask is None else head.mask
    # Keys past the end are those of the next head.
    after = problem.read(_find_next(problem, x.rows.at))
    both = np.concatenate([v, after["v"]])
    of_next = score_all(head._replace(k=after["k"], mask=None, bias=None, sink=None))
    wide = np.concatenate([bare, of_next], -1)

    def attend(scores: Doubles, bias: Doubles, v: Doubles) -> Doubles:
        every = np.concatenate([np.where(seen, scores + bias, -np.inf), rest[0]], -1)
        return attend_by(every, np.concatenate([v, rest[1]])).out

    def read(names: str, j: Places) -> Doubles:
        scores = take_or_zero(wide, j, 1) if "k" in names else bare
        return attend(scores, bias, take_or_zero(both, j) if "v" in names else v)

    def rescale(scales: Mapping[str, Doubles], j: Places) -> Doubles:
        by = {name: take_or_zero(x, j) / x for name, x in scales.items()}
        values = v * by.get("v", 1.0)
        return (
            of_scores(head.q, head.k[:m] * by["k"], values)
            if "k" in by
            else attend(bare, bias, values)
        )

    def of_scores(q: Doubles, k: Doubles, values: Doubles = v) -> Doubles:
        other = head._replace(q=q, k=k, mask=None, bias=None, sink=None)
        return attend(score_all(other), bias, values)

    for names, called in _OF_KEYS.items():
        change = partial(read_rows_at, problem, names)
        next_heads = names * (math.prod(problem.lead) > 1)
        yield Placed(called, True, partial(read, names), change, next_heads)
    of_queries = partial(read_rows_at, problem, "q")
    yield Placed(
        "query", False, lambda i: of_scores(take_or_zero(arrays["q"], i), head.k[:m]), of_queries
    )
    if "bias" in arrays:
        whole, change = arrays["bias"], partial(read_rows_at, problem, "bias")
        yield Placed(
            "bias",
            True,
            lambda j: attend(bare, take_or_zero(bias, j, 1), v),
            partial(change, axis=1),
        )
        yield Placed("bias", False, lambda i: attend(bare, take_or_zero(whole, i), v), change)
    if "mask" in arrays and problem.packed is None:
        mask, change = arrays["mask"], partial(read_rows_at, problem, "mask")
        band = show_band(problem)(
            Place(x.rows.queries[:, None], np.arange(m), *problem.shape[:2], None)
        )

        def see(shown: Doubles) -> Doubles:
            every = np.where(band & (shown > 0), bare + bias, -np.inf)
            return attend_by(np.concatenate([every, rest[0]], -1), np.concatenate([v, rest[1]])).out

        of_rows = mask[x.rows.queries]
        yield Placed(
            "mask", True, lambda j: see(take_or_zero(of_rows, j, 1)), partial(change, axis=1)
        )
        yield Placed("mask", False, lambda i: see(take_or_zero(mask, i)), change)
    # One scale for the whole array has no token that it could be read from instead.
    scaled = [x for x in "kv" if len(arrays.get(f"{x}_scale", ())) == m]
    for names in dict.fromkeys(("".join(scaled), *scaled)) if scaled else ():
        scales = {x: arrays[f"{x}_scale"] for x in names}
        change = partial(_move_scales, problem, names)
        yield Placed(
            " and ".join(f"{x}_scale" for x in names), True, partial(rescale, scales), change
        )


def read_rows_at(
    problem: Problem, names: str, of: Callable[[Places], Places], axis: int = 0
) -> Problem:
    """Read the rows of some arrays, or the columns of a bias, at other places."""
    for name in (names,) if len(names) > 2 else names:
        problem = problem.replaced(
            name,
            lambda _, y: take_or_zero(y, of(np.arange(y.shape[axis])), axis).astype(y.dtype),
        )
    return problem


def _move_scales(problem: Problem, names: str, of: Callable[[Places], Places]) -> Problem:
    for name in names:
        problem = problem.replaced(name, partial(_move_scale, problem, f"{name}_scale", of))
    return problem


def _move_scale(
    problem: Problem, called: str, of: Callable[[Places], Places], index: Index, y: Doubles
) -> Doubles:
    scale = problem.read(index)[called]
    return np.asarray(y / scale * take_or_zero(scale, of(np.arange(len(y)))))


def list_rings(problem: Problem) -> Iterator[Alternative]:
    """List caches of which later tokens overwrite the first, and slots are seen up to the query."""
    (n, m, _), (left, _) = problem.shape, problem.window
    if problem.packed is not None or not (problem.causal or left) or min(n, m) < 2:
        return
    for size in sorted({*range(8, m, 8), *([] if left is None else [left + 1])} - {m}):
        last = np.arange(m)
        last[:size] += (m - 1 - last[:size]) // size * size
        for names, called in {"kv": "keys and values", "k": "keys", "v": "values"}.items():
            ring = read_rows_at(problem, names, last.__getitem__)
            text = f"{called} are kept in a ring of {size} slots, and causal attention goes by the "
            text += f"slot: slot j, seen by queries from {write_shift('j', n - m)} on, holds the "
            text += f"last token t with t % {size} = j"
            yield Alternative(text, ring, partial(_show_slots, size))


def list_linear(problem: Problem) -> Iterator[Alternative]:
    """List masks and biases whose linear index wraps, or has rows of any other length."""
    n, m, _ = problem.shape
    for name in ("mask", "bias") if problem.packed is None and n > 1 else ():
        if name not in problem.first:
            continue
        for bits in range((m - 1).bit_length(), (n * m - 1).bit_length()):
            text = f"the {name} is read at a linear index, {m} i + j, that wraps at {2**bits}"
            yield Alternative(text, problem.replaced(name, partial(_read_wrapped, 2**bits)))
        step = 1 if m <= _MOST_SHIFTED else 8
        lengths = [x for x in range(step, 2 * m, step) if x != m]
        for row in lengths if len(lengths) * n * m <= _MOST_READ else ():
            text = f"the {name} is read with rows of {row} numbers, not {m}"
            read = partial(read_strided, start=0, row=row, tile=m)
            yield Alternative(text, problem.replaced(name, read))
            if row > m:
                text = (
                    f"the {name} is read with rows of {m} numbers, where they are padded to {row}"
                )
                read = partial(read_strided, start=0, row=m, tile=m, padded=row)
                yield Alternative(text, problem.replaced(name, read))


def _read_wrapped(size: int, _: Index, x: Any) -> Any:
    return np.resize(x.ravel()[:size], x.shape)


def _show_slots(size: int, x: Place) -> Any:
    return (x.ahead <= 0) & (x.j < size)


def list_row_strides(problem: Problem) -> Iterator[Alternative]:
    """List rows of q, k or v that begin as far apart as those of another array, or as if padded."""
    widths = {x: problem.first[x].shape[1] for x in "qkv"}
    for name, width in widths.items() if problem.packed is None else ():
        padded = (width + -width % x for x in (8, *PADDED_TO))
        for apart in sorted({*widths.values(), *padded} - {width}):
            if apart < 2 * width:
                strided = problem.replaced(name, partial(_read_rows_apart, apart))
                text = f"rows of {name} begin {apart} numbers apart, not {width}"
                yield Alternative(text, strided)


def _read_rows_apart(apart: int, _: Index, x: Any) -> Any:
    at = apart * np.arange(len(x))[:, None] + np.arange(x.shape[1])
    return np.take(x.ravel(), at, mode="clip")


def list_sinks(problem: Problem) -> Iterator[Alternative]:
    """List kernels that take the number of a row for that of the head whose sink it has.

    Rows of all heads, or of those that share a key head, lie one after another, query by query or
    head by head.
    """
    if not problem.has_sinks:
        return
    heads, n = problem.lead[-1] if problem.lead else 1, problem.shape[0]
    for size in sorted({heads, heads // (problem.key_heads or heads)} - {1}):
        orders = {f"{size} i + g": (1, size), f"{n} g + i": (n, 1)}
        steps = sorted({size, n})
        for (name, (of_head, of_query)), step in product(orders.items(), steps):
            if step < size * n and not (step == n and of_head == n and n >= size):  # its own
                place = f"({name}) // {step} % {size}"
                place = f"i % {size}" if step == of_query == size else place
                text = f"in query i, head g of each {size} has the sink that is number {place}"
                order = partial(_number_row, size, of_head, of_query, step)
                answer = partial(_take_sinks_of_rows, problem, order)
                yield Alternative(text, problem, answer=answer)


def _number_row(size: int, of_head: int, of_query: int, step: int, head: int, i: Any) -> Any:
    """Return the head that has the number of a row over a step, of the same group."""
    g = head % size
    return head - g + (of_head * g + of_query * i) // step % size


def _take_sinks_of_rows(problem: Problem, order: Callable[[int, Any], Any], rows: Rows) -> Result:
    """Take for each query the sink of another head."""
    heads = range(problem.lead[-1] if problem.lead else 1)
    every = [problem.read((*rows.at[:-1], h)[: len(rows.at)])["sinks"] for h in heads]
    sinks = np.ravel(every)[order(rows.at[-1] if rows.at else 0, rows.queries)]
    return pad_sum(attend(take_rows(problem.without("sinks"), rows)), sinks, sinks)


# --- columns of others ----------------------------------------------------------------------------


def list_columns(problem: Problem, wrong: Sequence[Sampled], unit: float) -> Iterator[Alternative]:
    """List the kernel whose values have columns of others: those by which each output is right."""
    heads = [*np.ndindex(problem.lead)]
    if not 0 < len(wrong) <= len(heads) <= _HEADS:
        return
    read: dict[Index, Sources] = {}
    d = problem.shape[-1]
    for x in wrong:
        x = x.few(_ROWS)
        head = take_rows(problem, x.rows)
        weights = weigh_keys(head)
        # Those of the head itself come first, of equal ones.
        order = sorted(heads, key=lambda y: y != x.rows.at)
        outs = weights @ np.concatenate([_take_values(problem, y, x.rows.at) for y in order], -1)
        size = unit * row_sizes(x.got)
        far = [divide(differ(x.got[:, [c]], outs), size[:, [c]]) for c in range(d)]
        off = np.mean(np.square(far), 1)
        best = np.where(np.diag(off[:, :d]) < _MOST_OFF, np.arange(d), np.argmin(off, -1))
        if len(x.got) < _FEWEST_ROWS or not np.max(np.min(off, -1)) < _MOST_OFF:
            return
        at, columns = np.divmod(best, d)
        read[x.rows.at] = np.array([heads.index(order[h]) for h in at]) * d + columns
    if words := _name_columns(problem, read, heads):
        moved = problem.replaced("v", partial(_take_columns, problem, read, heads))
        yield Alternative(f"values have the columns of others: {words}", moved)


def list_column_factors(
    problem: Problem, wrong: Sequence[Sampled], unit: float
) -> Iterator[Alternative]:
    """List the kernel that multiplies columns of the output by factors, of all heads or of each."""
    rows, d = max(_ROWS // max(len(wrong), 1), 2 * _FEWEST_ROWS), problem.shape[-1]
    some = [x.few(rows) for x in wrong]
    exact = {x.rows.at: Alternative("", problem).result(x.rows).out for x in some}
    for axes in (0, len(problem.lead)):
        found: dict[Index, Doubles] = {}
        for at in dict.fromkeys(x.rows.at[:axes] for x in some):
            heads = [x for x in some if x.rows.at[:axes] == at]
            got = np.concatenate([x.got for x in heads])
            own = np.concatenate([exact[x.rows.at] for x in heads])
            size = unit * row_sizes(got)
            slope = finite(own / size)
            found[at] = np.sum(finite(got / size) * slope, 0) / np.sum(slope**2, 0)
            off = np.mean(np.square(divide(differ(got, found[at] * own), size)), 0)
            if len(got) < 2 * _FEWEST_ROWS or not np.max(off) < _MOST_OFF:
                break
        else:
            at, by = next(iter(found.items()), ((), np.ones(d)))
            # Columns of 0 were never written, and one factor is none of columns.
            if np.any(np.abs(by) < _NO_COLUMN) or np.ptp(by) < _NO_COLUMN * np.max(np.abs(by)):
                return
            each = [f"{c:.3g} (column {x})" for x, c in enumerate(by) if abs(c - 1) > _NO_COLUMN]
            text = "columns of values, or of the output, have factors of their own: "
            text += name_first(each)
            text += f" in head {place(at)}" * bool(at)
            scale = partial(_scale_columns, found, axes)
            yield Alternative(text, problem.replaced("v", scale), named=axes > 0)
            return


def _scale_columns(factors: Mapping[Index, Doubles], axes: int, at: Index, x: Doubles) -> Doubles:
    return np.asarray(x * factors.get(at[:axes], 1.0))


def _take_values(problem: Problem, of: Index, at: Index) -> Doubles:
    """Take the values of a head, with the scales of the one that reads them."""
    arrays, own = problem.read(of), problem.read(at)
    values: Doubles = arrays["v"]
    return values / arrays["v_scale"] * own["v_scale"] if "v_scale" in own else values


def _take_columns(
    problem: Problem, read: Mapping[Index, Sources], heads: Sequence[Index], at: Index, x: Doubles
) -> Doubles:
    if at not in read:
        return x
    every = {h: _take_values(problem, heads[h], at) for h in np.unique(read[at] // x.shape[1])}
    columns = [every[c // x.shape[1]][:, c % x.shape[1]] for c in read[at].tolist()]
    return np.stack(columns, -1)


def _name_columns(problem: Problem, read: Mapping[Index, Sources], heads: Sequence[Index]) -> str:
    """Name spans of columns that are one after another there, too."""
    words, d = [], problem.shape[-1]
    for at, columns in read.items():
        for span in np.split(np.arange(d), np.flatnonzero(np.diff(columns) != 1) + 1):
            source, first = divmod(int(columns[span[0]]), d)
            if (heads[source], first) != (at, span[0]):
                here, there = (f"{x} to {x + len(span) - 1}" for x in (span[0], first))
                words.append(f"{here} of head {place(at)} are {there} of {place(heads[source])}")
    return name_first(words)


def list_widths(problem: Problem) -> Iterator[Alternative]:
    """List keys and values of a head that lie in rows of one width, and are read in others.

    Rows are padded, and are those of tokens or, if columns lie one after another, of channels.
    """
    (m, d), others = problem.first["v"].shape, (*PADDED_TO, *(2 * x for x in PADDED_TO))
    if problem.packed is not None or problem.first["k"].shape[1] != d:
        return
    for names, by_channel in product(("v", "k", "kv"), (True, False)):
        called, what = " and ".join(PLURALS[x] for x in names), ("tokens", "channels")[by_channel]
        width = m if by_channel else d
        wider = {width + x for x in (1, 2, 4)} | {width + -width % x for x in others}
        for more, to in product(sorted(wider - {width}), (True, False)):
            stored, read = (more, width) if to else (width, more)
            change = partial(_reread, by_channel, stored, read)
            text = (
                f"{called} lie in rows of {stored} numbers ({what}), and are read in rows of {read}"
            )
            wrong = problem
            for x in names:
                wrong = wrong.replaced(x, change)
            yield Alternative(text, wrong)


def _reread(by_channel: bool, stored: int, read: int, _: Index, x: Doubles) -> Doubles:
    """Read rows that are padded to one width as if it were another; zeros after the last."""
    rows = x.T if by_channel else x
    count, width = rows.shape
    flat = np.zeros(count * max(stored, read))
    flat[: count * stored] = np.pad(rows, ((0, 0), (0, stored - width))).ravel()
    found = flat[: count * read].reshape(count, read)[:, :width]
    return np.asarray(found.T if by_channel else found)
