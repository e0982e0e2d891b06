"""Classes of keys, by remainder or tile, whose weights are lost in a sum, or are others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from ....arrays.library import Doubles
from ....arrays.words import place
from ...rounding.head import SoftmaxHead
from ...rounding.problems import Index, Problem
from ...verification.findings import LOGARITHMS, Numbers, name_first, name_number, name_span
from ..causes.places import by_row
from ..causes.sampled import Alternative, Result, Rows, attend, take_rows
from ..causes.slips import TILE_SIZES, list_parts, merge_parts, score_all, weigh_keys
from ..causes.wrong_rows import Sampled, finite, row_sizes, thin
from .seen_keys import describe_counts
from .sums import choose_columns

_CLASS_PERIODS = (2, 4, 8, 16, 32, 64, 48, 24, 96, 128)  # of keys of which some are a class
_ROWS_OF_CLASS, _HEADS_OF_CLASS = 32, 4
_PARTS_IN_TURN = (3, 4, 8)  # parts
_NEAR_COUNTED = 5e-3  # relative error of numbers of parts
_FEWEST_ROWS, _MOST_HEADS = 2, 64  # the same of many heads
_LEFT_BY_CLASSES = 4.0  # mean square of z, at most
_LEFT_OF_OTHERS = 1 / 16  # of the square of errors, at most
_COLUMNS_OF_CLASS = 4  # of a row, for each number of it that is found, at least
_BELOW_0, _MOST_TIMES = 0.05, 1e3  # of weights, over those that they should be
_OWN_WEIGHT = 0.05  # least distance to 1 of the factor of a key that is named
_NO_SUM, _OFF_WHOLE = 1e-9, 0.1  # of the weights; how far counts are from whole numbers
_LEAST_SHARE, _FEWEST_MERGED = 1e-3, 6  # of all weights that a part has, and rows that tell it

KeyClass = npt.NDArray[np.bool_]
ClassOf = npt.NDArray[np.int64]  # the class of each key


def list_partial_sums(
    problem: Problem, wrong: Sequence[Sampled], unit: float
) -> Iterator[Alternative]:
    """List kernels whose sum of the weights lacks keys of a class.

    They are the same in all columns, others in each batch member, or others in some columns.
    """
    rows = max(_FEWEST_ROWS, _ROWS_OF_CLASS // max(len(wrong) // _HEADS_OF_CLASS, 1))
    some = [x.few(rows) for x in thin(wrong, _MOST_HEADS)]
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
    return None if chosen is None else chosen > 0


def _divide_by_some(problem: Problem, lost: Mapping[Index, Doubles], rows: Rows) -> Result:
    head = take_rows(problem, rows)
    exact = attend(head)
    of_head = [x for at, x in lost.items() if at == rows.at[: len(at)]]
    if not of_head:
        return exact
    kept = 1 - weigh_keys(head, exact.lse) @ of_head[0]
    return exact._replace(out=exact.out / np.where(kept > _NO_SUM, kept, np.nan))


def list_reweighed(
    problem: Problem, wrong: Sequence[Sampled], unit: float, numbers: Numbers
) -> Iterator[Alternative]:
    """List kernels whose rows are sums of what classes of keys add, each times a number of the row.

    Classes are parts that are merged, keys by their remainder, or each key of a tile.
    """
    heads = [x.rows.at for x in wrong]
    some = [x.few(_ROWS_OF_CLASS) for x in thin(wrong, _HEADS_OF_CLASS)]
    found: list[tuple[float, tuple[str, str], ClassOf, list[Doubles]]] = []
    # Rows of 0 are explained by numbers that are 0.
    told = all(np.all(np.isfinite(x.got)) and np.all(np.any(x.got, -1)) for x in some)
    for words, group in _list_classes(problem) if some and told else ():
        off, before, times = 0.0, 0.0, list[Doubles]()
        for x in some:
            exact, out, each = _fit_factors(problem, group, x.rows, x.got)
            scale, columns = unit * row_sizes(x.got), x.got.shape[1]
            of_fit = np.sum(np.square((x.got - out) / scale))
            off += float(of_fit) * columns / (columns - each.shape[1])  # as many are fitted
            # Beside the exact row times a number, of which the sum of the weights alone is wrong.
            factor = by_row(x.got, exact.out)
            before += float(np.sum(np.square((x.got - factor[:, None] * exact.out) / scale)))
            times.append(each)
            most = _LEFT_BY_CLASSES * sum(y.got.size for y in some)
            if not off <= min(_LEFT_OF_OTHERS * before, most):  # nan, too
                break
        else:
            found.append((off, words, group, times))
    # Of groups that are as near the one with fewest classes, which has most numbers to spare.
    for _, (called, text), group, times in sorted(found, key=lambda x: x[3][0].shape[1])[:1]:
        yield from _list_merges(problem, called, group, some, times) if called else ()
        every = np.concatenate(times)
        by = every[:, 1:] / np.where(every[:, :1] == 0, np.nan, every[:, :1])
        sizes = by[np.isfinite(by)]
        if not len(sizes) or np.min(sizes) < -_BELOW_0 or np.max(np.abs(sizes)) > _MOST_TIMES:
            return  # no weights are so: any rows may be sums of so few vectors
        answer = partial(_attend_by_fit, problem, group, heads, numbers)
        if whole := _describe_whole(group, some, times):
            yield Alternative(whole, problem, answer=answer)
            return
        span = f"{np.min(sizes):.3g} to {np.max(sizes):.3g}"
        own = np.any(np.abs(by - 1) > _OWN_WEIGHT, 0) & (not called)
        named = name_span("keys", np.flatnonzero(group)[own]) if own.any() else ""
        yield Alternative(text.format(span, keys=named), problem, answer=answer)


def _describe_whole(group: ClassOf, some: Sequence[Sampled], times: Sequence[Doubles]) -> str:
    """Say which keys count how often in heads, if all that are seen do a whole number of times."""
    said = dict[str, list[str]]()
    for x, each in zip(some, times, strict=True):
        # Of a class that no row sees the number is 0, and that of a lost one nearly.
        seen, least = np.any(each, 0), _OFF_WHOLE * np.max(each, -1, keepdims=True)
        ratio = each / np.min(np.where(each > least, each, np.inf), -1, keepdims=True)
        counts = np.where(seen, np.rint(np.median(ratio, 0)), 1.0)
        if np.max(np.abs(ratio - counts)[:, seen]) > _OFF_WHOLE:
            return ""
        of_keys = {j: float(counts[c]) for j, c in enumerate(group.tolist()) if counts[c] != 1}
        said.setdefault(describe_counts(of_keys), []).append(place(x.rows.at))
    words = [f"{x} in head {' and '.join(y)}" for x, y in said.items() if x]
    return name_first(words) if len(said) > 1 else next(iter(said))


def _list_classes(problem: Problem) -> Iterator[tuple[tuple[str, str], ClassOf]]:
    """List the class of each key; in words parts that may be merged, and a place for numbers."""
    (_, m, d), j = problem.shape, np.arange(problem.shape[1])
    parts = {f"tiles of {x} keys": j // x for x in TILE_SIZES[::-1]}
    parts |= {x: np.searchsorted(y, j, "right") - 1 for x, y in list_parts(problem)}
    parts |= {_go_in_turn(x, y): j // y % x for x, y in product(_PARTS_IN_TURN, (1, *TILE_SIZES))}
    for called, group in parts.items():
        if 1 <= np.max(group) < d / _COLUMNS_OF_CLASS:
            text = f"{called} are added with other weights, in each row {{}} times as large"
            yield (called, text), group
    for size in (x // 2 for x in _CLASS_PERIODS if 2 < x < 2 * m):
        of_each = f" of each {2 * size}" * (2 * size < m)
        called = name_span("keys", np.arange(size, 2 * size)) + of_each
        text = f"weights of {called} have a factor of their own in each row, {{}}"
        if (group := j // size % 2).any():
            yield (_go_in_turn(2, size), text), group
    for size in (x for x in TILE_SIZES[::-1] if _COLUMNS_OF_CLASS * x <= d and x < m):
        for first in range(0, m, size):
            of_tile = np.where((j >= first) & (j < first + size), j - first + 1, 0)
            yield ("", "weights of {keys} are others in each wrong row"), of_tile


def _go_in_turn(parts: int, block: int) -> str:
    called = "keys" if block == 1 else f"blocks of {block} keys"
    return f"{parts} parts of the keys, to which {called} go in turn,"


def _fit_factors(
    problem: Problem, group: ClassOf, rows: Rows, got: Doubles
) -> tuple[Result, Doubles, Doubles]:
    """Fit the numbers that what each class adds to a row is multiplied by."""
    head = take_rows(problem, rows)
    exact, v = attend(head), head.v[: head.keys]
    w, classes = weigh_keys(head, exact.lse), np.arange(np.max(group) + 1)
    sums = np.stack([w[:, group == x] @ v[group == x] for x in classes], -1)
    times = np.linalg.pinv(sums, 1e-7) @ finite(got)[..., None]
    return exact, (sums @ times)[..., 0], times[..., 0]


def _list_merges(
    problem: Problem, called: str, group: ClassOf, some: Sequence[Sampled], times: Sequence[Doubles]
) -> Iterator[Alternative]:
    """List merges of parts by an lse in which the maximum, or the sum, counts otherwise."""
    order, parts = np.argsort(group, kind="stable"), np.arange(np.max(group) + 1)
    edges = np.searchsorted(group[order], parts)
    shares, tops = list[Doubles](), list[Doubles]()
    for x in some:
        s = score_all(take_rows(problem, x.rows))[:, order]
        shares.append(np.logaddexp.reduceat(s, edges, -1))
        tops.append(np.maximum.reduceat(s, edges, -1))
    lse, top, each = (np.concatenate(x) for x in (shares, tops, times))
    known = (each > 0) & np.isfinite(lse)
    log = np.log(np.where(known, each, 1.0))
    weight = np.where(known, each * np.exp(finite(lse - np.max(lse, -1, keepdims=True))), 0.0)
    for words, (of_top, of_sum, none) in _COUNTED.items():
        both = finite(of_top * top + of_sum * (lse - top)), log
        of_lse, of_log = (y - np.average(y, -1, weight + _NO_SUM)[:, None] for y in both)
        size = max(float(np.sum(weight * of_lse * of_lse)), 1e-300)
        c = 1 + float(np.sum(weight * of_lse * of_log)) / size
        by = partial(_count_in_lse, of_top * (c - 1) + 1, of_sum * (c - 1) + 1)
        name = name_number(c, _NEAR_COUNTED * abs(c), LOGARITHMS | {"the scale": problem.scale})
        said = f"with an lse in which the {words} counts {c:.3g} times" + f" ({name})" * bool(name)
        said = f"with {none}" if abs(c) < _NEAR_COUNTED else said
        merge = partial(merge_parts, edges=edges.tolist(), weigh=by, is_mean=True)
        compute = partial(_merge_in_turn, order=order, merge=merge)
        yield Alternative(f"{called} are merged {said}", problem, compute=compute)


_COUNTED = {  # of the largest score and of the log of the sum over it; what is left without them
    "largest score": (1, 0, "weights e^(lse - largest score), not e^lse"),
    "log of the sum over it": (0, 1, "weights e^(largest score), not e^lse"),
    "whole": (1, 1, "equal weights"),
}


def _merge_in_turn(
    head: SoftmaxHead, order: ClassOf, merge: Callable[[SoftmaxHead], Result]
) -> Result:
    every = np.append(order, np.arange(len(order), len(head.k)))
    of_pairs = {x: y[:, order] for x in ("mask", "bias") if (y := getattr(head, x)) is not None}
    return merge(head._replace(k=head.k[every], v=head.v[every], **of_pairs))


def _count_in_lse(of_top: float, of_sum: float, lse: Doubles, top: Doubles) -> Doubles:
    other = of_top * top + of_sum * finite(lse - top)
    return np.asarray(np.exp(other - np.max(other, 0)))


def _attend_by_fit(
    problem: Problem, group: ClassOf, heads: Sequence[Index], numbers: Numbers, rows: Rows
) -> Result:
    """Take what is fitted to each row of some heads; where keys are right, sums are known."""
    exact, out, times = _fit_factors(problem, group, rows, numbers.out(rows.at)[rows.queries])
    if rows.at not in heads:
        return exact
    return exact._replace(out=out, lse=exact.lse - np.log(np.maximum(times[:, 0], _NO_SUM)))


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
        text += (
            ": its numbers are not from the keys that are seen"
            if strange
            else ", or some keys weigh more"
        )
        heads = [x.rows.at for x in wrong]
        answer = partial(_take_given, problem, heads, numbers)
        yield Alternative(text, problem, answer=answer)


def _list_seen(problem: Problem, rows: Rows) -> Any:
    mask = take_rows(problem, rows).mask
    return slice(None) if mask is None else mask.any(0)


def _take_given(problem: Problem, heads: Sequence[object], numbers: Numbers, rows: Rows) -> Result:
    exact, lse = attend(take_rows(problem, rows)), numbers.lse
    if rows.at not in heads or lse is None:
        return exact
    return exact._replace(out=numbers.out(rows.at)[rows.queries], lse=lse(rows.at)[rows.queries])
