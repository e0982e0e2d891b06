"""Causes by heads: what they read from other heads, and a number that each has of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from ....arrays.library import Doubles
from ....arrays.words import place
from ...rounding.problems import Index, Problem
from ..operators.maps import (
    HeadRule,
    list_group_rules,
    list_head_rules,
    list_heads_read,
    write_shift,
)
from .sampled import Alternative, Result, Rows, attend, read_heads, show_band
from .slips import list_parts
from .wrong_rows import Sample, differ, divide, row_sizes

_HEADS, _ROWS = 32, 8  # that are compared with those of a wrong head, at most
_NEUTRAL = {"mask": True, "bias": 0.0, "sinks": -math.inf}  # values that change nothing
_COMPARED_PAIRS = 2**22  # of queries and keys, at most, of masks and biases that are compared
_MASKS = 64  # of heads, that are looked at
_LEFT_OF_SUM = 0.1  # of the squared error, at most, that sums of heads leave
_LEFT_OF_ROWS = 4.0  # mean square of z, at most
_NO_PART = 0.02  # of a sum of heads, at most
_MOST_FACTOR = 4.0  # of an output that is added: a larger one is another mistake


def list_exchanged(
    problem: Problem, sample: Sample, sizes: Sequence[Doubles]
) -> Iterator[Alternative]:
    """List kernels that take an array of other heads: by a rule, or for each of the nearest."""
    every = [*np.ndindex(problem.lead)]
    rules = (*list_head_rules(problem), *list_group_rules(problem))
    for words, take, may_lack in _list_arrays(problem) if len(every) > 1 else ():
        far: dict[Index, dict[Index | None, float]] = {}
        for x, size in zip(sample.heads, sizes, strict=True):
            at, i = x.rows.at, np.flatnonzero(x.wrong)[:_ROWS]
            rows = x.rows._replace(queries=x.rows.queries[i])
            near = every if len(every) <= _HEADS else [at, *(rule(at) for _, rule in rules)]
            same = sorted(near, key=lambda y, at=at: (y != at, y[-1] != at[-1]))  # of equal ones
            for other in (*dict.fromkeys(same), *[None] * may_lack) if len(i) else ():
                out = take({at: other}.get).result(rows).out
                z = divide(differ(x.got[i], out), size[i])
                far.setdefault(at, {})[other] = float(np.sum(np.square(z)))
        for whose, to, named in list_heads_read(problem, far):
            yield take(to)._replace(text=f"{words} {whose}", named=named)


def list_by_rules(problem: Problem) -> Iterator[Alternative]:
    """List kernels that read an array of other heads by a rule, the same in all of them."""
    for words, take, _ in _list_arrays(problem):
        for whose, rule in list_head_rules(problem):
            yield take(rule)._replace(text=f"{words} {whose}")
    for whose, rule in [*list_group_rules(problem)][:1]:
        dealt = problem.with_arrays_of("kv", rule)
        yield Alternative(f"keys and values are read from {whose}", dealt, dealt=True)


def _list_arrays(
    problem: Problem,
) -> Iterator[tuple[str, Callable[[HeadRule], Alternative], bool]]:
    """List what may be of another head, the kernel that takes it so, and if a head may lack it."""

    def take(names: str, to: HeadRule) -> Alternative:
        return Alternative("", problem.with_arrays_of(names, to))

    def take_or_lack(name: str, to: HeadRule) -> Alternative:
        def change(at: Index, x: Any) -> Any:
            other = to(at)
            return np.full_like(x, _NEUTRAL[name]) if other is None else problem.read(other)[name]

        # Fewer keys may be seen, or more, for a reason of their own.
        return Alternative("", problem.replaced(name, change), plain=name != "mask")

    def rescale(names: str, to: HeadRule) -> Alternative:
        def change(at: Index, x: Any, name: str) -> Any:
            own, other = (problem.read(y)[name] for y in (at, to(at)))
            return x / own * other

        scaled = problem
        for x in names:
            scaled = scaled.replaced(x, partial(change, name=f"{x}_scale"))
        return Alternative("", scaled)

    yield "each head holds the output of", partial(read_heads, problem), False
    for j in _list_empty_parts(problem):
        words = f"keys {j.start} to {j.stop - 1}, of which a head sees none, are merged as those of"
        yield words, partial(_merge_with, problem, j), False
    for names, words in (("kv", "keys and values"), ("v", "values"), ("k", "keys")):
        yield f"{words} are read from", partial(take, names), False
    given = "".join(x for x in "qkv" if f"{x}_scale" in problem.first)
    for names in dict.fromkeys(filter(None, (given, given.replace("q", ""), *given))):
        words = " and ".join(f"{x}_scale" for x in names)
        yield f"{words} {'are' if names[1:] else 'is'} read from", partial(rescale, names), False
    n, m, _ = problem.shape
    for name in ("mask", "bias", "sinks"):
        is_given = name in problem.first and (name != "mask" or problem.packed is None)
        if is_given and (name == "sinks" or n * m <= _COMPARED_PAIRS):
            words = f"the {name.replace('sinks', 'sink')} is read from"
            yield words, partial(take_or_lack, name), True


def _list_empty_parts(problem: Problem) -> Iterator[slice]:
    """List parts of the keys of which some heads see no key by the mask, and others some."""
    if "mask" not in problem.first or problem.packed is not None:
        return
    some = [np.any(problem.read(x)["mask"], 0) for x in np.ndindex(problem.lead)][:_MASKS]
    for _, edges in list_parts(problem):
        for j in map(slice, edges, [*edges[1:], problem.shape[1]]):
            if 0 < np.sum(np.any(np.stack(some)[:, j], -1)) < len(some):
                yield j


def _merge_with(problem: Problem, j: slice, to: HeadRule) -> Alternative:
    """Merge the result of heads that see no key of a part with that of the part in others."""
    given = Alternative("", problem)

    def answer(rows: Rows) -> Result:
        own, other = given.result(rows), to(rows.at)
        mask = given.head(rows._replace(keys=rows.keys[j])).mask
        if other == rows.at or mask is None or mask.any():
            return own
        part = given.result(rows._replace(at=other, keys=rows.keys[j]))
        lse = np.logaddexp(own.lse, part.lse)
        out, more = (np.exp(x.lse - lse)[:, None] * x.out for x in (own, part))
        return Result(out + more, lse, np.maximum(own.top, part.top))

    return Alternative("", problem, answer=answer)


def list_of_heads(
    problem: Problem,
) -> Iterator[tuple[str, Callable[[Mapping[Index, float]], Alternative], tuple[float, ...]]]:
    """List kernels with a number for each head that is fitted, and where fits start."""
    n, m, _ = problem.shape
    has_bias, few = "bias" in problem.first, n * m <= _COMPARED_PAIRS

    def count_sink(c: Mapping[Index, float]) -> Alternative:
        def change(at: Index, x: Any) -> Any:
            # c e^sink = e^(sink + log c).
            return x + math.log(max(c.get(at, 1.0), 1e-300))

        return Alternative("", problem.replaced("sinks", change))

    if problem.has_sinks:
        yield "e^sink counts {} times", count_sink, (0.1, 0.5, 1.0, 2.0, 10.0)
    if has_bias and few:
        yield (
            "the bias is multiplied by {}",
            lambda c: Alternative("", problem, bias=lambda _, at, x: c.get(at, 1) * np.asarray(x)),
            (-1.0, 0.1, 0.5, 1.0, 2.0, 8.0),
        )
    # Where a bias is given its multiples are fitted, and where none is one by distance.
    elif few:
        yield (
            "scores fall by {} for each key of distance",
            lambda c: Alternative(
                "", problem, bias=lambda x, at, _: np.abs(x.ahead) * -c.get(at, 0.0)
            ),
            (0.01, 0.1, 0.5, -0.1),
        )


def describe_numbers(text: str, numbers: Mapping[Index, float]) -> str:
    """Write the number of each head into a sentence."""
    words = [f"{x:.4g} (head {place(at)})" for at, x in numbers.items()]
    return text.format(", ".join(words))


def list_other_places(problem: Problem, sample: Sample) -> Iterator[Alternative]:
    """List kernels in which what wrong heads hold is from elsewhere, by what they hold."""
    yield from list_other_queries(problem, sample)
    yield from list_summed(problem, sample)
    yield from _list_mixed_rows(problem, sample)
    yield from list_spilled(problem, sample.wrong)


def list_other_queries(problem: Problem, sample: Sample) -> Iterator[Alternative]:
    """List the kernel that takes queries from elsewhere: of each wrong head, from one place on."""
    n, m, _ = problem.shape
    heads = sorted(np.ndindex(problem.lead), key=lambda x: x[::-1])  # members one after another
    if not problem.lead or len(heads) * n * m > _COMPARED_PAIRS:
        return
    every = np.concatenate([problem.read(x)["q"] for x in heads] + [0 * problem.first["q"][:1]])
    first: dict[Index, int] = {}  # place of the query in row 0, among all of them; zeros are last
    for x in (x.take(np.flatnonzero(x.wrong)[:_ROWS]) for x in sample.heads if x.wrong.any()):
        head = Alternative("", problem).head(x.rows)
        places = set()
        for row, (i, got) in enumerate(zip(x.rows.queries.tolist(), x.got, strict=True)):
            bias, mask = (y if y is None else y[row] for y in (head.bias, head.mask))
            of_row = [y if y is None else np.broadcast_to(y, (len(every), m)) for y in (bias, mask)]
            out = attend(head._replace(q=every, bias=of_row[0], mask=of_row[1])).out
            nearest = int(np.argmin(np.sum(np.square(out - got), -1)))
            places.add(nearest - i * (nearest < len(heads) * n))
        # One start must explain all the rows of a head.
        if len(places) > 1:
            return
        first[x.rows.at] = places.pop()
    words = []
    for at, start in first.items():
        source, by = divmod(max(start, 0), n)
        elsewhere, before = source < len(heads), f"{-start} rows before " * (start < 0)
        where = (
            f"from {before}query {by} of head {place(heads[source])} on"
            if elsewhere
            else "has zeros"
        )
        words.append(f"head {place(at)} {where}")

    def change(at: Index, q: Any) -> Any:
        start = first.get(at, heads.index(at) * n)
        return every[np.clip(start + np.arange(n), 0, len(every) - 1)]

    text = f"queries are read from elsewhere: {', '.join(words)}"
    yield Alternative(text, problem.replaced("q", change), named=True)


def list_summed(problem: Problem, sample: Sample) -> Iterator[Alternative]:
    """List the kernel whose heads hold sums of the outputs of several: those that fit."""
    heads, given = [*np.ndindex(problem.lead)], Alternative("", problem)
    found: dict[Index, dict[Index, float]] = {}
    for x in (x.take(np.flatnonzero(x.wrong)[:_ROWS]) for x in sample.heads if x.wrong.any()):
        # With as many heads as numbers any output could be such a sum.
        if not 1 < len(heads) <= min(_HEADS, x.got.size // 2) or not np.all(np.isfinite(x.got)):
            return
        outs = [given.result(x.rows._replace(at=y)).out.ravel() for y in heads]
        every, got = np.stack(outs, -1), x.got.ravel()
        fitted = np.linalg.lstsq(every, got)[0].tolist()
        # Small parts of many heads fit anything a little.
        if _sum_of_squares(got - every @ fitted) > _LEFT_OF_SUM * _sum_of_squares(
            got - outs[heads.index(x.rows.at)]
        ):
            return
        found[x.rows.at] = {y: c for y, c in zip(heads, fitted, strict=True) if abs(c) > _NO_PART}
    factors = [abs(c) for x in found.values() for c in x.values()]
    if max(map(len, found.values()), default=0) > 1 and max(factors) < _MOST_FACTOR:
        add_up = partial(_add_up, problem, found)
        sums = ([f"{c:.2g} times head {place(z)}" for z, c in y.items()] for y in found.values())
        words = (
            f"head {place(x)} is {' + '.join(y) or '0'}" for x, y in zip(found, sums, strict=True)
        )
        text = f"outputs are added: {', '.join(words)}"
        yield Alternative(text, problem, answer=add_up, plain=False, named=True)


def _list_mixed_rows(problem: Problem, sample: Sample) -> Iterator[Alternative]:
    """List the kernel whose rows are sums of their own and of one so many rows later."""
    given, n = Alternative("", problem).result, problem.shape[0]
    some = [x.take(np.flatnonzero(x.wrong)[:_ROWS]) for x in sample.heads if x.wrong.any()]
    if not some or n * problem.shape[1] > _COMPARED_PAIRS:
        return
    every = [given(Rows(x.rows.at, np.arange(n), x.rows.keys)).out for x in some]
    found = []
    for by in (x for x in range(1 - n, n) if x):
        kept = [((i := x.rows.queries + by) >= 0) & (i < n) for x in some]
        if not any(x.any() for x in kept):
            continue
        parts = [
            (e[x.rows.queries[i]], e[x.rows.queries[i] + by], x.got[i])
            for x, e, i in zip(some, every, kept, strict=True)
        ]
        own, other, got = (np.concatenate(x) for x in zip(*parts, strict=True))
        size = sample.unit * row_sizes(got)
        *terms, rest = ((x / size).ravel() for x in (own, other, got))
        columns = np.stack(terms, -1)
        c = np.linalg.lstsq(columns, rest, rcond=None)[0]
        off = float(np.mean(np.square(rest - columns @ c)))
        found.append((off, by, *c.tolist()))
    off, by, a, b = min(found, default=(math.inf, 0, 0.0, 0.0))
    if off < _LEFT_OF_ROWS and min(abs(a), abs(b)) > _NO_PART:
        text = f"row i is {a:.2g} times its own and {b:.2g} times row {write_shift('i', by)}"
        yield Alternative(text, problem, answer=partial(_mix_rows, problem, by, a, b))


def _mix_rows(problem: Problem, by: int, a: float, b: float, rows: Rows) -> Result:
    given = Alternative("", problem).result
    own, i = given(rows), rows.queries + by
    inside = (i >= 0) & (i < problem.shape[0])
    other = given(rows._replace(queries=np.where(inside, i, rows.queries)))
    return own._replace(out=np.where(inside[:, None], a * own.out + b * other.out, own.out))


def _sum_of_squares(x: Doubles) -> float:
    return float(np.sum(np.square(x)))


def _add_up(problem: Problem, parts: Mapping[Index, Mapping[Index, float]], rows: Rows) -> Result:
    """Sum the outputs of several heads, each times a factor."""
    given = Alternative("", problem).result
    some = parts.get(rows.at, {rows.at: 1.0}).items()
    own = given(rows)
    return own._replace(out=sum((c * given(rows._replace(at=y)).out for y, c in some), 0 * own.out))


def list_spilled(problem: Problem, wrong: npt.NDArray[np.bool_]) -> Iterator[Alternative]:
    """List kernels that write rows beyond the end of a head over the first of the next.

    Only if those are the wrong rows, (heads, rows).
    """
    n, count = problem.shape[0], int(np.sum(wrong.any(0)))
    if wrong[:, count:].any() or not (problem.lead and 0 < count < n):
        return
    # Rows past the end of a mask or a bias are not known.
    if not {"mask", "bias"}.isdisjoint(problem.first):
        return
    for step, factor in product(dict.fromkeys((1, problem.lead[-1])), (1.0, 0.0)):
        called = "head" if step == 1 else "batch member"
        source = f"read from the next {called}" if factor else "0"
        text = f"rows {n} to {n + count - 1} of a {called}, past its end, overwrite the first rows "
        text += f"of the next {called} (their q is {source})"
        # The first heads come after no other.
        if not wrong[:step].any():
            answer = partial(_spill, problem, count, step, factor)
            yield Alternative(text, problem, answer=answer)


def _spill(problem: Problem, count: int, step: int, factor: float, rows: Rows) -> Result:
    """Compute rows of which the first are beyond the end of a head before."""
    given, number, band = Alternative("", problem), problem.number(rows.at), show_band(problem)
    own = given.result(rows)
    if number < step:
        return own
    names = [x for x in ("k", "v", "sinks") if x in problem.first]
    taken = problem.with_arrays_of(names, lambda _: problem.index_of(number - step))
    taken = taken.replaced("q", lambda _, q: factor * q)
    # Rows past the end are queries after the last one, with the keys of the head before.
    late = Alternative("", taken, lambda x: band(x._replace(i=x.i + x.n))).result(rows)
    first = rows.queries < count
    return Result(*(np.where(first, y.T, x.T).T for x, y in zip(own, late, strict=True)))
