"""Classes of keys, by remainder or tile, whose weights are lost in a sum, or are others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from ....arrays.library import Doubles
from ....arrays.words import place
from ...rounding.problems import Index, Problem
from ...verification.findings import Numbers, name_span
from ..causes.sampled import Alternative, Result, Rows, attend, take_rows
from ..causes.slips import TILE_SIZES, score_all, weigh_keys
from ..causes.wrong_rows import Sampled, finite, row_sizes, thin
from .tiles import choose_columns, describe_keys

_CLASS_PERIODS = (2, 4, 8, 16, 32, 64, 48, 24, 96, 128)  # of keys of which some are a class
_ROWS_OF_CLASS, _HEADS_OF_CLASS = 32, 4
_FEWEST_ROWS, _MOST_HEADS = 2, 64  # the same of many heads
_LEFT_BY_CLASSES = 4.0  # mean square of z, at most
_NO_SUM = 1e-9  # of the weights
_LEAST_SHARE, _FEWEST_MERGED = 1e-3, 6  # of all weights that a part has, and rows that tell it

KeyClass = npt.NDArray[np.bool_]


def list_partial_sums(
    problem: Problem, wrong: Sequence[Sampled], unit: float
) -> Iterator[Alternative]:
    """List kernels whose sum of the weights lacks keys of a class.

    They are the same in all columns, others in each batch member, or others in some columns.
    """
    rows = max(_FEWEST_ROWS, _ROWS_OF_CLASS // max(len(wrong) // _HEADS_OF_CLASS, 1))
    some = [x.take(thin(np.arange(len(x.got)), rows)) for x in thin(wrong, _MOST_HEADS)]
    of_head: list[tuple[Index, Doubles, Doubles, Doubles]] = []
    for x in some:
        head = take_rows(problem, x.rows)
        exact = attend(head)
        scale = unit * row_sizes(exact.out)
        of_head.append((x.rows.at, weigh_keys(head, exact.lse), x.got / scale, exact.out / scale))
    _, m, d = problem.shape
    every, last = slice(None), max(len(problem.lead) - 1, 0)
    members = {at[:last]: every for at, *_ in of_head}
    # Heads of which batch members, and columns, have a sum of their own.
    cells: list[list[tuple[Index, slice]]] = [[((), every)], [*members.items()] if last else []]
    cells.append([((), slice(c, c + 1)) for c in range(d)])
    groups = {f" of each {p}": np.arange(m) % p for p in _CLASS_PERIODS if p < m}
    groups[""] = np.arange(m) // TILE_SIZES[0]
    for (words, group), apart in product(groups.items(), filter(None, cells)):
        kept: dict[tuple[Index, bytes], list[int]] = {}  # columns that have the sum of some classes
        for at, columns in apart:
            chosen = _choose_classes([x for x in of_head if x[0][: len(at)] == at], group, columns)
            if chosen is None:
                break
            kept.setdefault((at, chosen.tobytes()), []).extend(np.arange(d)[columns].tolist())
        else:
            lost: dict[Index, Doubles] = {}
            texts = []
            for (at, which), of_columns in kept.items():
                classes: KeyClass = np.frombuffer(which, np.bool_)
                lost.setdefault(at, np.zeros((m, d)))[np.ix_(~classes[group], of_columns)] = 1.0
                keys = name_span("keys", np.flatnonzero(classes if words else classes[group]))
                where = f" in batch member {place(at)}" * bool(at)
                first = f"in {name_span('columns', np.array(of_columns))}, " * (len(of_columns) < d)
                texts.append(f"{first}the sum of the weights has {keys}{words} only{where}")
            answer = partial(_divide_by_some, problem, lost)
            yield Alternative(" and ".join(texts), problem, answer=answer)
            break


def _choose_classes(
    rows: Sequence[tuple[Index, Doubles, Doubles, Doubles]], group: Any, columns: slice
) -> KeyClass | None:
    """Choose the classes whose sum the exact numbers of some rows would have to be divided by."""
    found: list[tuple[Doubles, Doubles]] = []
    for _, w, got, exact in rows:
        sums = np.stack([np.sum(w[:, group == x], -1) for x in range(group.max() + 1)])
        of_sums = sums[..., None] * got[:, columns]
        found.append((of_sums.reshape(len(sums), -1), exact[:, columns].ravel()))
    sums, whole = (np.concatenate(x, -1) for x in zip(*found, strict=True))
    chosen = choose_columns(sums, whole)
    return None if chosen is None else np.isin(np.arange(group.max() + 1), chosen)


def _divide_by_some(problem: Problem, lost: Mapping[Index, Doubles], rows: Rows) -> Result:
    head = take_rows(problem, rows)
    exact = attend(head)
    of_head = [x for at, x in lost.items() if at == rows.at[: len(at)]]
    if not of_head:
        return exact
    kept = 1 - weigh_keys(head, exact.lse) @ of_head[0]
    return exact._replace(out=exact.out / np.where(kept > _NO_SUM, kept, np.nan))


def list_stale_weights(
    problem: Problem, wrong: Sequence[Sampled], unit: float
) -> Iterator[Alternative]:
    """List kernels that multiply values of some tiles by the weights of the tile before."""
    m = problem.shape[1]
    for size in (x for x in TILE_SIZES if 2 * x <= m):
        columns, rest = [], []
        for x in wrong:
            scale = unit * row_sizes(x.got)
            exact, added = _add_stale(problem, size, x.rows)
            columns.append((added / scale).reshape(len(added), -1))
            rest.append(((x.got - exact.out) / scale).ravel())
        chosen = choose_columns(np.concatenate(columns, -1), np.concatenate(rest), False)
        if chosen is not None:
            keys = describe_keys(np.isin(np.arange(m) // size, chosen))
            text = f"values of {keys} meet the weights of the {size} keys before, not rescaled"
            yield Alternative(text, problem, answer=partial(_attend_stale, problem, size, chosen))


def _add_stale(problem: Problem, size: int, rows: Rows) -> tuple[Result, Doubles]:
    """Return what each tile adds to a result with the weights of the tile before, over its own."""
    head = take_rows(problem, rows)
    exact, s, m = attend(head), score_all(head), head.keys
    starts = np.arange(0, m, size)
    tops = finite(np.maximum.accumulate(np.maximum.reduceat(s[:, :m], starts, -1), -1))
    added = [0 * exact.out]
    for t, j in enumerate(starts[1:].tolist(), 1):
        v = head.v[j : min(j + size, m)]
        before, own = s[:, j - size :][:, : len(v)], s[:, j : j + len(v)]
        moved = before + (tops[:, t] - tops[:, t - 1])[:, None]
        added.append((np.exp(moved - exact.lse[:, None]) - np.exp(own - exact.lse[:, None])) @ v)
    return exact, np.stack(added)


def _attend_stale(problem: Problem, size: int, tiles: npt.NDArray[np.int64], rows: Rows) -> Result:
    exact, added = _add_stale(problem, size, rows)
    return exact._replace(out=exact.out + np.sum(added[tiles], 0))


def list_weighted_classes(
    problem: Problem, wrong: Sequence[Sampled], unit: float, numbers: Numbers
) -> Iterator[Alternative]:
    """List kernels whose weights of keys of a class have a factor of their own in each row."""
    m, heads = problem.shape[1], [x.rows.at for x in wrong]
    some = [x.take(thin(np.arange(len(x.got)), _ROWS_OF_CLASS)) for x in wrong[:_HEADS_OF_CLASS]]
    best: list[tuple[float, str, KeyClass]] = []
    for period in (x for x in _CLASS_PERIODS if 2 < x < 2 * m):
        for first in (0, period // 2):
            residues = np.arange(first, first + period // 2)
            keys = np.isin(np.arange(m) % period, residues)
            called = name_span("keys", residues) + f" of each {period}" * (period < m)
            text = f"weights of {called} have a factor of their own in each row"
            off = number = 0.0
            for x in some:
                _, out, _ = _fit_factors(problem, keys, x.rows, x.got)
                off += float(np.sum(np.square((x.got - out) / (unit * row_sizes(x.got)))))
                number += x.got.size
            if keys.any() and not keys.all() and off < _LEFT_BY_CLASSES * number:
                best.append((off, text, keys))
    for _, text, keys in sorted(best, key=lambda x: x[0])[:1]:
        factors = np.concatenate([_fit_factors(problem, keys, x.rows, x.got)[2] for x in some])
        answer = partial(_attend_by_factors, problem, keys, heads, numbers)
        text += f", {np.min(factors):.3g} to {np.max(factors):.3g}"
        yield Alternative(text, problem, answer=answer)


def _fit_factors(
    problem: Problem, keys: KeyClass, rows: Rows, got: Doubles
) -> tuple[Result, Doubles, Doubles]:
    """Fit the number that weights of some keys are multiplied by in each row."""
    head = take_rows(problem, rows)
    exact, v = attend(head), head.v[: head.keys]
    w = weigh_keys(head, exact.lse)
    part, share = w[:, keys] @ v[keys], np.sum(w[:, keys], -1, keepdims=True)
    moved, rest = part - share * got, exact.out - part - (1 - share) * got
    c = -np.sum(moved * rest, -1, keepdims=True) / np.sum(moved * moved, -1, keepdims=True)
    c = np.maximum(finite(c), 0.0)
    return exact, (exact.out + (c - 1) * part) / (1 + (c - 1) * share), c


def _attend_by_factors(
    problem: Problem, keys: KeyClass, heads: Sequence[object], numbers: Numbers, rows: Rows
) -> Result:
    got = numbers.out(rows.at)[rows.queries]
    exact, out, _ = _fit_factors(problem, keys, rows, got)
    return exact._replace(out=out) if rows.at in heads else exact


def list_other_weights(
    problem: Problem, wrong: Sequence[Sampled], unit: float, numbers: Numbers
) -> Iterator[Alternative]:
    """List the kernel that has other weights for keys one after another, in each wrong row."""
    (_, m, d), heads = problem.shape, [x.rows.at for x in wrong]
    some = [x.take(thin(np.arange(len(x.got)), _FEWEST_ROWS)) for x in thin(wrong, _HEADS_OF_CLASS)]
    for size in (x for x in TILE_SIZES[::-1] if 2 * x <= d and x < m) if some else ():
        for first in range(0, m, size):
            keys = slice(first, min(first + size, m))
            if not any(_rate_weights(problem, keys, x, unit) > _LEFT_BY_CLASSES for x in some):
                text = (
                    f"weights of keys {keys.start} to {keys.stop - 1} are others in each wrong row"
                )
                answer = partial(_attend_by_weights, problem, keys, heads, numbers)
                yield Alternative(text, problem, answer=answer)


def _rate_weights(problem: Problem, keys: slice, x: Sampled, unit: float) -> float:
    """Return the mean square of z that is left by weights of some keys, over the rest of a row."""
    _, out = _fit_other_weights(problem, keys, x.rows, x.got)
    free = 1 - (keys.stop - keys.start) / x.got.shape[1]
    return float(np.mean(np.square((x.got - out) / (unit * row_sizes(x.got)))) / free)


def _fit_other_weights(
    problem: Problem, keys: slice, rows: Rows, got: Doubles
) -> tuple[Result, Doubles]:
    """Fit weights of some keys to each row, which is 0 times their sum, and no less than 0."""
    head = take_rows(problem, rows)
    exact, v = attend(head), head.v[keys]
    w = weigh_keys(head, exact.lse)[:, keys]
    rest, out = exact.out - w @ v, exact.out.copy()
    left = 1 - np.sum(w, -1)
    for r in range(len(got)):
        off = left[r] * got[r] - rest[r]
        c = np.maximum(np.linalg.lstsq((v - got[r]).T, off, rcond=1e-9)[0], 0.0)
        out[r] = (rest[r] + c @ v) / max(left[r] + np.sum(c), _NO_SUM)
    return exact, out


def _attend_by_weights(
    problem: Problem, keys: slice, heads: Sequence[object], numbers: Numbers, rows: Rows
) -> Result:
    exact, out = _fit_other_weights(problem, keys, rows, numbers.out(rows.at)[rows.queries])
    return exact._replace(out=out) if rows.at in heads else exact


def list_merged_more(
    problem: Problem, wrong: Sequence[Sampled], numbers: Numbers
) -> Iterator[Alternative]:
    """List the kernel that merges one more part, as out and lse tell it: it is like values are."""
    shares, strange, given = list[Doubles](), True, Alternative("", problem).result
    for x in wrong:
        exact, values = given(x.rows), problem.read(x.rows.at)["v"]
        if x.lse is None:
            return
        share = -np.expm1(exact.lse - x.lse)
        part = (x.got - (1 - share)[:, None] * exact.out) / share[:, None]
        most = np.max(np.abs(values), initial=0.0)
        if not (np.all(share > _LEAST_SHARE) and np.all(np.abs(part) < most)):
            return
        shares.append(share)
        seen = values[_list_seen(problem, x.rows)]
        rest = part.T - seen.T @ np.linalg.lstsq(seen.T, part.T, rcond=None)[0]
        strange &= bool(np.all(np.linalg.norm(rest, axis=0) > np.linalg.norm(part, axis=1) / 10))
    if sum(map(len, shares)) >= _FEWEST_MERGED:
        least, most = (f(np.concatenate(shares)) for f in (np.min, np.max))
        text = f"another part, with {least:.2g} to {most:.2g} of the sum of all weights, is merged"
        text += ": its numbers are not from the keys" if strange else ", or some keys weigh more"
        yield Alternative(text, problem, answer=partial(_take_given, problem, wrong, numbers))


def _list_seen(problem: Problem, rows: Rows) -> Any:
    mask = take_rows(problem, rows).mask
    return slice(None) if mask is None else mask.any(0)


def _take_given(problem: Problem, wrong: Sequence[Sampled], numbers: Numbers, rows: Rows) -> Result:
    exact, lse = attend(take_rows(problem, rows)), numbers.lse
    of_head = [x.rows.queries for x in wrong if x.rows.at == rows.at]
    some = np.isin(rows.queries, np.concatenate([*of_head, np.zeros(0, int)]))
    assert lse is not None
    got, sums = numbers.out(rows.at)[rows.queries], lse(rows.at)[rows.queries]
    out = np.where(some[:, None], got, exact.out)
    return exact._replace(out=out, lse=np.where(some, sums, exact.lse))
