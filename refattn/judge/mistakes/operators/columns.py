"""Columns that are read from elsewhere: those of other heads, or of rows with another width."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product

import numpy as np
import numpy.typing as npt

from ....arrays.library import Doubles
from ....arrays.words import place
from ...rounding.problems import Index, Problem
from ..causes.sampled import Alternative, take_rows
from ..causes.slips import weigh_keys
from ..causes.wrong_rows import Sampled, differ, divide, finite, row_sizes, thin
from .strides import PADDED_TO, PLURALS

Sources = npt.NDArray[np.int64]
_ROWS, _FEWEST_ROWS, _HEADS = 8, 4, 32  # by which columns are known; and heads, at most
_MOST_OFF = 4.0  # mean square of z of a column
_COLUMNS_NAMED, _NO_COLUMN = 3, 0.01  # and factors that are 0 or 1


def list_columns(problem: Problem, wrong: Sequence[Sampled], unit: float) -> Iterator[Alternative]:
    """List the kernel whose values have columns of others: those by which each output is right."""
    heads = [*np.ndindex(problem.lead)]
    if not 0 < len(wrong) <= len(heads) <= _HEADS:
        return
    read: dict[Index, Sources] = {}
    d = problem.shape[-1]
    for x in wrong:
        x = x.take(thin(np.arange(len(x.got)), _ROWS))
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
    some = [x.take(thin(np.arange(len(x.got)), rows)) for x in wrong]
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
            text += ", ".join(each[:_COLUMNS_NAMED]) + " and so on" * (len(each) > _COLUMNS_NAMED)
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
    return ", ".join(words[:_COLUMNS_NAMED]) + " and so on" * (len(words) > _COLUMNS_NAMED)


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
