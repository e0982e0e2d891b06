"""Describe log normalisers that are wrong: in another form, of other heads, or off by a number."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ....arrays.library import Doubles
from ....arrays.words import place
from ...rounding.problems import Index, Problem
from ...rounding.profiles import Profile
from ...verification.findings import ONLY_IN, Numbers, Suspect, name_first
from ..operators.maps import Map, list_heads_read, list_maps, write_shift
from ..operators.strides import PADDED_TO, list_swaps
from .alternatives import SLOPES, list_alternatives
from .places import as_suspect, list_rows
from .sampled import Alternative, Result, Rows, answer_places, read_heads
from .slips import NORMALISERS, PARTS
from .wrong_rows import FAR, Sample, Sampled, differ, divide, error_of_lse, finite, thin

_HEADS, _ROWS_OF_EACH = 32, 8  # that are compared, at most
_SEVERAL = 2  # numbers, at least, that are those of other heads
_STEPS, _LEAST_STEP = 3, 1e-7  # of a number that follows log normalisers; of it, each at least
_MOST_ERRORS = 8.0  # how far it may move: those of a few rows alone are hardly known
_FEWEST_OFF = 4  # rows of a head
_EQUAL = 1e-3  # relative distance of equal numbers
Lse = Callable[[Rows], Result]

_OFFSET_RULES: Mapping[str, Callable[[Problem, Rows, Result], Any]] = {
    "": lambda problem, rows, x: np.ones(len(x.lse)),
    " times the position i of the query": lambda problem, rows, x: rows.queries,
    " times the position of the query, from 1": lambda problem, rows, x: (
        rows.queries + problem.shape[1] - problem.shape[0] + 1
    ),
    " times log(i + 1) for query i": lambda problem, rows, x: np.log1p(rows.queries),
    " times the log of the position of the query, from 1": lambda problem, rows, x: np.log(
        np.maximum(rows.queries + problem.shape[1] - problem.shape[0] + 1, 1)
    ),
    " times the largest score": lambda problem, rows, x: x.top,
}


class Normalisers(NamedTuple):
    """What log normalisers are: in words, "" for those of an alternative, and of which result."""

    words: str
    result: Callable[[Rows], Result] | None = None  # of another one
    change: Callable[[Result, float | None], Doubles] = lambda x, _: x.lse

    def compute(
        self, x: Sampled, result: Result, problem: Problem, numbers: Numbers, profile: Profile
    ) -> tuple[Doubles, Doubles]:
        """Compute those of some rows, with about their standard deviations."""
        result = result if self.result is None else self.result(x.rows)
        with np.errstate(all="ignore"):
            lse = np.asarray(self.change(result, problem.head(x.rows.at).sink))
        return lse, error_of_lse(result._replace(lse=lse), numbers, profile, problem.shape[1])

    def far(self, x: Sampled, result: Result, *about: Any) -> Doubles:
        """Say by how many standard deviations those of some rows are off."""
        assert x.lse is not None
        lse, std = self.compute(x, result, *about)
        return np.asarray(np.abs(divide(differ(x.lse, lse), std)))


def follow_normalisers(
    family: Callable[[float], Alternative],
    heads: Sequence[Sampled],
    fitted: tuple[float, float],
    *about: Any,
) -> tuple[float, float]:
    """Move a fitted number, by a few of its errors, to where log normalisers agree best.

    They are followed if they tell the number better than outputs do, in one of their forms.
    """
    c, error = fitted
    # Outputs hardly tell such a number from 0: there is no start to follow from.
    if not 2 * _MOST_ERRORS * error < abs(c):
        return fitted
    forms = [Normalisers(""), *(Normalisers("", change=x) for x in NORMALISERS.values())]
    for _ in range(_STEPS):
        step = max(error, _LEAST_STEP * abs(c))
        ends = [[family(y).result(x.rows) for y in (c - step, c + step)] for x in heads]
        estimates = (_estimate(form, heads, ends, about) for form in forms)
        by, error = min(estimates, key=lambda x: x[1])
        c, error = c + by * step, error * step
        if not (error < fitted[1] and abs(c - fitted[0]) < _MOST_ERRORS * fitted[1]):
            return fitted
    return c, error


def _estimate(
    form: Normalisers, heads: Sequence[Sampled], ends: Sequence[Sequence[Result]], about: Any
) -> tuple[float, float]:
    """Estimate by how many steps a number is off, of two results at a step on each side of it."""
    slopes, errors = [np.zeros(0)], [np.zeros(0)]
    for x, results in zip(heads, ends, strict=True):
        assert x.lse is not None
        (low, std), (high, _) = (form.compute(x, y, *about) for y in results)
        with np.errstate(invalid="ignore"):
            slopes.append(finite((high - low) / 2 / std))
            errors.append(finite((x.lse - (high + low) / 2) / std))
    slope, error = np.concatenate(slopes), np.concatenate(errors)
    if not (size := float(slope @ slope)) > 0:
        return 0.0, math.inf
    # A step by Gauss and Newton, with slopes from differences.
    by = float(slope @ error) / size
    # Errors that a step leaves make the number less sure, never surer than roundings do.
    square = float(np.mean(np.square(error - by * slope)))
    return by, math.sqrt(max(square, 1.0) / size)


def list_exchanged_normalisers(
    problem: Problem, numbers: Numbers, profile: Profile, sample: Sample
) -> Iterator[tuple[str, Alternative]]:
    """List, of all wrong heads, of which others they hold log normalisers, if each is of one."""
    heads, wrong = [*np.ndindex(problem.lead)], np.flatnonzero(sample.wrong.any(1))
    m = problem.shape[1]
    if numbers.lse is None or not len(wrong) or not 1 < len(heads) <= _HEADS:
        return
    i = thin(np.flatnonzero(sample.wrong.any(0)), _ROWS_OF_EACH)
    # One number may be near to that of some head by chance.
    if len(wrong) * len(i) < _SEVERAL:
        return
    given, keys = Alternative("", problem), np.arange(m)
    exact = {x: given.result(Rows(x, i, keys)) for x in heads}
    far: dict[Index, dict[Index | None, float]] = {}
    for at in map(problem.index_of, wrong.tolist()):
        got = numbers.lse(at)[i]
        far[at] = {
            y: np.max(np.abs(divide(differ(got, x.lse), error_of_lse(x, numbers, profile, m))))
            for y, x in exact.items()
        }
        if min(far[at].values()) > FAR:
            return
    for words, to, _ in list_heads_read(problem, far):
        yield f"that of {words}", read_heads(problem, to)


def list_moved_normalisers(
    problem: Problem,
) -> Iterator[tuple[str, Callable[[Rows], Result]]]:
    """List results that are written to other places, or are those of other kernels."""
    for words, swapped in list_swaps(problem):
        yield f"transposed, with the strides of {words}", swapped
    (n, keys, _), given = problem.shape, Alternative("", problem).result
    for size in PADDED_TO if math.prod(problem.lead) > 1 else ():
        if apart := -n % size:
            text = f"read {n} by {n} rows, but heads are written {n + apart} rows apart"
            yield text, partial(answer_places, problem, (n + apart).__rdivmod__)
    packed, heads = problem.packed, math.prod(problem.lead)
    if packed is not None and packed.queries.ndim == 1 and packed.queries[-1] == n:
        size = int(np.max(np.diff(packed.queries)))
        padded, flat = f"padded, (sequences, heads, {size})", f"packed, (heads, {n})"
        for x, y, of in ((padded, flat, _find_padded), (flat, padded, _find_packed)):
            find = partial(of, packed.queries, size, heads)
            yield f"{x}, and read as {y}", partial(answer_places, problem, find)
    turned = (Map(f"{write_shift('@', by)} (cyclically)", partial(np.add, by)) for by in (1, -1))
    ends: Any
    for ends, rules in {"clip": list_maps(n), "wrap": turned}.items():
        for rule in rules:
            text = f"that of query {rule.named('i')}"
            queries = np.take(np.arange(n), rule.of(np.arange(n)), mode=ends)
            yield text, partial(lambda i, x: given(x._replace(queries=i[x.queries])), queries)
    for parts in (x for x in PARTS if x < keys):
        size = -(-keys // parts)
        for words, j in (("first", slice(size)), ("last", slice((parts - 1) * size, keys))):
            text = f"computed from the {words} of {parts} parts of the keys"
            yield text, partial(lambda j, x: given(x._replace(keys=x.keys[j])), j)
    smooth = problem.replaced("k", lambda _, k: k - np.mean(k, 0))
    text = "computed from keys minus their mean: scale q . mean(k) is missing"
    yield text, Alternative("", smooth).result
    for alternative in list_alternatives(problem):
        if alternative.move is not None:
            yield f"that of {alternative.text.split(' the output of ')[-1]}", alternative.result
        else:
            yield f"computed as if {alternative.text}", alternative.result


def _find_padded(starts: Any, size: int, heads: int, place: int) -> tuple[int, int]:
    """Find the head and the query at a place of padded sequences; past the last in the padding."""
    (sequence, head), i = divmod(place // size, heads), place % size
    inside = i < starts[sequence + 1] - starts[sequence]
    return head, int(starts[sequence] + i) if inside else int(starts[-1])


def _find_packed(starts: Any, size: int, heads: int, place: int) -> tuple[int, int]:
    """Find the head and the query in packed rows at the place of one in padded sequences."""
    (head, i), n = divmod(place, starts[-1]), int(starts[-1])
    sequence = int(np.searchsorted(starts, i, "right")) - 1
    place = (sequence * heads + head) * size + i - int(starts[sequence])
    return divmod(place, n) if place < heads * n else (0, n)


def name_offset(
    problem: Problem, numbers: Numbers, profile: Profile, sample: Sample
) -> list[Suspect]:
    """Say by which number log normalisers of wrong rows are off, if they are by one."""
    given, errors, sizes = Alternative("", problem), [np.zeros(0)], [np.zeros(0)]
    for x in (x.take(x.wrong) for x in sample.heads if x.wrong.any()):
        exact = given.result(x.rows)
        assert x.lse is not None
        errors.append(differ(x.lse, exact.lse))
        sizes.append(error_of_lse(exact, numbers, profile, problem.shape[1]))
    error, std = np.concatenate(errors), np.concatenate(sizes)
    c = float(np.median(error)) if error.size else math.nan
    if not np.all(np.abs(error - c) < FAR * std):  # NaN is none
        return []
    where = ", ".join(list_rows(problem, sample.wrong))
    side, there = "large" if c > 0 else "small", f"{ONLY_IN}{where}" * bool(where)
    return [as_suspect(f"agrees if lse is too {side} by {abs(c):.4g}{there}")]


def share_of_offset(problem: Problem, sample: Sample) -> float:
    """Return the share of the errors of log normalisers that one number explains."""
    given = Alternative("", problem)
    errors = np.concatenate(
        [differ(x.lse, given.result(x.rows).lse) for x in sample.heads if x.lse is not None]
    )
    square = float(np.mean(np.square(errors))) if np.all(np.isfinite(errors)) else 0.0
    return 1 - float(np.var(errors)) / square if square else 0.0


def list_offsets(
    problem: Problem, wrong: Sequence[Sampled], exact: Lse, std: Callable[[Result], Doubles]
) -> Iterator[tuple[str, Lse]]:
    """List log normalisers that are larger by a number of each head times a function of rows."""
    results = [exact(x.rows) for x in wrong]
    for text, rule in _OFFSET_RULES.items():
        found: dict[Index, float] = {}
        errors = []
        for x, result in zip(wrong, results, strict=True):
            assert x.lse is not None
            size, f = std(result), np.asarray(rule(problem, x.rows, result), float)
            slope, error = f / size, (x.lse - result.lse) / size
            known = np.isfinite(slope) & np.isfinite(error)
            square = float(np.sum(slope[known] ** 2))
            if np.sum(known) < _FEWEST_OFF or not square:
                break
            c = float(np.sum((slope * error)[known]) / square)
            errors.append(float(np.max(np.abs(error - c * slope)[known])))
            found[x.rows.at] = c
        else:
            # `name_offset` says one number that is that of all heads.
            if max(errors, default=np.inf) < FAR and (text or not _are_alike([*found.values()])):
                yield (
                    _say_how_large(problem, found, text),
                    partial(_offset, problem, found, rule, exact),
                )


def _offset(
    problem: Problem, found: Mapping[Index, float], rule: Any, exact: Lse, rows: Rows
) -> Result:
    """Compute results whose log normalisers are off."""
    x = exact(rows)
    return x._replace(lse=x.lse + found.get(rows.at, 0.0) * rule(problem, rows, x))


def _are_alike(numbers: Sequence[float]) -> bool:
    return bool(np.ptp(numbers) < _EQUAL * np.max(np.abs(numbers)))


def _say_how_large(problem: Problem, found: Mapping[Index, float], text: str) -> str:
    """Say by how much log normalisers are too large in each head."""
    numbers = np.array([*found.values()])
    heads = problem.lead[-1] if problem.lead else 1
    alike = {"": np.ones(len(numbers))} | {
        f" times the slope of the head (2^{name})": np.exp2(
            [power(x[-1] if x else 0, heads) for x in found]
        )
        for name, power in SLOPES.items()
    }
    if any("sinks" in problem.read(x) for x in found):
        sinks = [problem.read(x)["sinks"].item() for x in found]
        alike[" times the sink of the head"] = np.array(sinks)
    for words, x in alike.items():
        c = float(numbers @ x / (x @ x)) if np.any(x) else 0.0
        if np.max(np.abs(numbers - c * x)) < _EQUAL * np.max(np.abs(numbers)):
            times = f"{c:.4g}{words}" if abs(c - 1) > _EQUAL or not words else words[7:]
            return f"larger by {times}{text}"
    each = [f"{c:.4g} in head {place(x)}" for x, c in found.items()]
    return f"larger by a number of each head{text}, {name_first(each)}"
