"""Single keys that are wrong: another in each row, or few that count otherwise in all."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ....arrays.library import Doubles
from ....arrays.words import place
from ...rounding.problems import Index, Problem
from ...verification.findings import describe_span, name_span
from ..causes.sampled import Alternative, Result, Rows, take_rows
from ..causes.slips import weigh_with_hidden
from ..causes.wrong_rows import Sampled, row_sizes, thin

_LARGEST_WEIGHTS = 8  # of a row, whose values may be those of other keys
_OF_ERROR = 1 / 4  # of the square of an error, that a key leaves at most
_BY_CHANCE = 1e-3  # that one of the keys leaves so little, at most
_FIRST_NAMED = 3
_MOST_KEYS, _MOST_NUMBERS = 6, 2**22  # that count otherwise; of the terms of keys, that are kept
_LEFT_BY_FEW, _CHANCE_OF_FEW = 4.0, 1e-6  # mean square of z, and chance of as little, at most
_VALUE_HEADS, _ROWS_OF_VALUE = 8, 4  # that are looked at; rows for each key whose value is found
_FAR_VALUE = 0.05  # of the largest change of a value, that is named
_NEAR_COUNT = 0.05  # how near to a whole number a count is that is said as that number


class _OwnKey(NamedTuple):
    """A key of a row that is wrong: how far the row is then from what was given, and what it is."""

    off: float  # mean square of z
    name: str
    out: Doubles  # (columns,)
    more: float = 0.0  # what is added to the log normaliser


def list_own_keys(problem: Problem, wrong: Sequence[Sampled], unit: float) -> Iterator[Alternative]:
    """List kernels that lose a key of each wrong row, count it twice, or have another value for it.

    Hidden keys may be seen, too.
    """
    ways: dict[str, dict[tuple[Index, int], _OwnKey]] = {}
    rows = 0
    for x in wrong:
        (exact, p, v), mask = _weigh_all(problem, x.rows), take_rows(problem, x.rows).mask
        mask = np.ones(p.shape, bool) if mask is None else mask
        size = unit * row_sizes(exact.out)
        for r, query in enumerate(x.rows.queries.tolist()):
            rows += 1
            rate = partial(_rate, x.got[r], size[r])
            before = max(float(rate(exact.out[r])), 1e-300)
            for words, tries, keys in _list_ways(rate, exact.out[r], p[r], v, mask[r]):
                best = min(keys, key=lambda x: x.off, default=None)
                # As small a share of an error in any direction is left by chance with this power.
                if best is None or not best.off < _OF_ERROR * before:
                    continue
                if tries * (best.off / before) ** (v.shape[1] / 2) < _BY_CHANCE:
                    ways.setdefault(words, {})[x.rows.at, query] = best
            ways = {words: found for words, found in ways.items() if len(found) == rows}
            if not ways:
                return
    for words, found in ways.items():
        names = [f"{x.name} in query {at[1]}" for at, x in found.items()]
        every = {x.name for x in found.values()}  # one key may be that of all
        text = ", ".join(names[:_FIRST_NAMED] if len(every) > 1 else every)
        text += " and so on" * (len(every) > 1 and rows > _FIRST_NAMED)
        answer = partial(_replace_rows, problem, found)
        yield Alternative(f"{words} each wrong row: {text}", problem, answer=answer)


def _rate(got: Doubles, size: Doubles, out: Doubles) -> Doubles:
    """Return mean squares of z of a row, for some outputs."""
    return np.asarray(np.mean(np.square((got - out) / size), -1))


def _list_ways(
    rate: Callable[[Doubles], Doubles],
    out: Doubles,
    p: Doubles,
    v: Doubles,
    seen: npt.NDArray[np.bool_],
) -> Iterator[tuple[str, int, list[_OwnKey]]]:
    """List what may be wrong, of how many keys, and the key of which it is nearest."""

    def weigh(
        c: Doubles, keys: npt.NDArray[np.bool_], of_sum: float = 1.0
    ) -> tuple[int, list[_OwnKey]]:
        """Add c to the weight of each key alone, and to the sum of the weights so often."""
        j = np.flatnonzero(keys & (c > -1))
        outs = (out + c[j, None] * v[j]) / (1 + of_sum * c[j, None])
        off = rate(outs)
        at = int(np.argmin(off)) if len(j) else 0
        return len(j), [
            _OwnKey(float(off[x]), f"key {j[x]}", outs[x], math.log1p(of_sum * c[j[x]]))
            for x in range(at, min(at + 1, len(j)))
        ]

    yield "a key is left out of", *weigh(-p, seen)
    yield "a key counts twice in", *weigh(p, seen)
    yield "a hidden key is seen in", *weigh(p, ~seen)
    yield "a key counts in the sum of the weights only in", *weigh(-p, seen, 0.0)
    off = rate(v)
    at = int(np.argmin(off))
    with np.errstate(divide="ignore"):
        alone = _OwnKey(float(off[at]), f"key {at}", v[at], float(np.log(p[at])))
    yield "one key has all the weight in", len(v), [alone]
    found = []
    largest = np.argsort(-np.where(seen, p, 0.0))[:_LARGEST_WEIGHTS]
    for j in largest.tolist():
        outs = out + p[j] * (v - v[j])
        off = np.where(np.arange(len(v)) == j, math.inf, rate(outs))
        at = int(np.argmin(off))
        found.append(_OwnKey(float(off[at]), f"key {j} that of key {at}", outs[at]))
    yield "a key has the value of another in", len(largest) * len(v), found


def _replace_rows(
    problem: Problem, found: Mapping[tuple[Index, int], _OwnKey], rows: Rows
) -> Result:
    out, lse, top = Alternative("", problem).result(rows)
    out, lse = out.copy(), lse.copy()
    for r, query in enumerate(rows.queries.tolist()):
        if own := found.get((rows.at, query)):
            out[r], lse[r] = own.out, lse[r] + own.more
    return Result(out, lse, top)


def list_few_keys(problem: Problem, wrong: Sequence[Sampled], unit: float) -> Iterator[Alternative]:
    """List kernels in which few keys count otherwise in all wrong rows.

    If key j counts c_j times more, rows are (out + sum c_j p_j v_j) / (1 + sum c_j p_j), so that
    errors are sum c_j p_j (v_j - row): linear in c. The key that leaves least is taken first.
    """
    terms, errors = [np.zeros((0, problem.shape[1]))], [np.zeros(0)]
    size = max(_MOST_NUMBERS // (problem.shape[1] * problem.shape[2] * max(len(wrong), 1)), 1)
    for x in (x.take(thin(np.arange(len(x.got)), size)) for x in wrong):
        exact, p, v = _weigh_all(problem, x.rows)
        scale = unit * row_sizes(exact.out)
        terms.append(p[:, None] * ((v.T - x.got[..., None]) / scale[..., None]))
        errors.append(((x.got - exact.out) / scale).ravel())
    columns = np.concatenate([x.reshape(-1, x.shape[-1]) for x in terms])
    error, times = np.concatenate(errors), np.zeros(0)
    keys: list[int] = []
    before = max(float(np.mean(np.square(error))), 1e-300) if error.size else math.inf
    if not math.isfinite(before):
        return
    lengths = np.linalg.norm(columns, axis=0)
    rest = error
    while len(keys) < _MOST_KEYS and np.mean(np.square(rest)) > _LEFT_BY_FEW:
        score = np.abs(rest @ columns) / np.where(lengths > 0, lengths, math.inf)
        keys.append(int(np.argmax(score)))
        times = np.linalg.lstsq(columns[:, keys], error, rcond=None)[0]
        rest = error - columns[:, keys] @ times
    left = float(np.mean(np.square(rest)))
    free = (len(error) - len(keys)) / 2
    chance = len(keys) * math.log(len(lengths)) + free * math.log(max(left, 1e-300) / before)
    told = np.all(np.abs(times) > _NEAR_COUNT)  # a key that counts once is right
    if keys and told and left <= _LEFT_BY_FEW and chance < math.log(_CHANCE_OF_FEW):
        found = dict(sorted(zip(keys, times.tolist(), strict=True)))
        yield Alternative(
            describe_counts({x: 1 + c for x, c in found.items()}),
            problem,
            answer=partial(_count_few, problem, found),
        )


def list_other_values(
    problem: Problem, wrong: Sequence[Sampled], unit: float
) -> Iterator[Alternative]:
    """List the kernel in which few keys have other values: errors are sums of p_j times changes."""
    found: dict[Index, tuple[list[int], Doubles]] = {}
    for x in thin(wrong, _VALUE_HEADS):
        exact, p = _weigh_seen(problem, x.rows)
        scale = 1 / (unit * np.median(row_sizes(exact.out), -1, keepdims=True))
        weights, errors = p * scale, (x.got - exact.out) * scale
        if not np.all(np.isfinite(errors)):
            return
        rest, lengths, keys = errors, np.linalg.norm(weights, axis=0), list[int]()
        changes = np.zeros((0, errors.shape[1]))
        while len(keys) < _MOST_KEYS and np.mean(np.square(rest)) > _LEFT_BY_FEW:
            if _ROWS_OF_VALUE * (len(keys) + 1) > len(errors):
                return
            score = np.linalg.norm(rest.T @ weights, axis=0)
            keys.append(int(np.argmax(score / np.where(lengths > 0, lengths, math.inf))))
            changes = np.linalg.lstsq(weights[:, keys], errors, rcond=None)[0]
            rest = errors - weights[:, keys] @ changes
        if not keys or np.mean(np.square(rest)) > _LEFT_BY_FEW:
            return
        found[x.rows.at] = keys, changes
    if found:
        told = [_describe_values(problem, at, *x) for at, x in found.items()]
        more = f" and so on ({len(told) - 1} more heads)" if len(told) > 1 else ""
        answer = partial(_attend_to_values, problem, found)
        yield Alternative(f"{told[0]}{more}", problem, answer=answer)


def _describe_values(problem: Problem, at: Index, keys: Sequence[int], changes: Doubles) -> str:
    """Say which values are others, in which columns."""
    key = keys[int(np.argmax(np.max(np.abs(changes), -1)))]
    of_key, v = changes[keys.index(key)], problem.read(at)["v"][key]
    columns = np.flatnonzero(np.abs(of_key) > _FAR_VALUE * np.max(np.abs(of_key)))
    c = int(np.argmax(np.abs(of_key)))
    where = f" in {name_span('columns', columns)}" if len(columns) < len(v) / 2 else ""
    example = f"column {c} of key {key} is as if {v[c] + of_key[c]:.4g}, not {v[c]:.4g}"
    called = name_span("keys", np.array(sorted(keys)))
    return f"values of {called} of head {place(at)} are other numbers{where}: {example}"


def _attend_to_values(
    problem: Problem, found: Mapping[Index, tuple[list[int], Doubles]], rows: Rows
) -> Result:
    exact, p = _weigh_seen(problem, rows)
    if rows.at not in found:
        return exact
    keys, changes = found[rows.at]
    return exact._replace(out=exact.out + p[:, keys] @ changes)


def _weigh_seen(problem: Problem, rows: Rows) -> tuple[Result, Doubles]:
    """Return the exact result, and the weights of all keys: 0 of those that are hidden."""
    (exact, p, _), mask = _weigh_all(problem, rows), take_rows(problem, rows).mask
    return exact, p if mask is None else p * mask


def _weigh_all(problem: Problem, rows: Rows) -> tuple[Result, Doubles, Doubles]:
    """Return the exact result, the weights of all keys, of hidden ones, too, and the values."""
    head = take_rows(problem, rows)
    return *weigh_with_hidden(head), head.v[: head.keys]


def _count_few(problem: Problem, found: Mapping[int, float], rows: Rows) -> Result:
    exact, p, v = _weigh_all(problem, rows)
    more = p[:, [*found]] * [*found.values()]
    total = 1 + np.sum(more, -1)
    out = (exact.out + more @ v[[*found]]) / total[:, None]
    return exact._replace(out=out, lse=exact.lse + np.log(total))


def describe_counts(
    times: Mapping[int, float], hidden: Collection[int] = (), where: str = ""
) -> str:
    """Say which keys do not count, how often others do, and which hidden ones are seen."""
    words: dict[str, list[int]] = {}
    for key, c in times.items():
        whole = round(c)
        near = abs(c - whole) < _NEAR_COUNT
        name = {0: "not", 2: "twice"}.get(whole, f"{whole} times") if near else f"{c:.2g} times"
        words.setdefault("seen" if near and whole == 1 and key in hidden else name, []).append(key)
    said = []
    for name, keys in words.items():
        s = "" if len(keys) > 1 else "s"
        verb = f"do{'es' * bool(s)} not count" if name == "not" else f"count{s} {name}"
        verb = ("is" if s else "are") + " seen" if name == "seen" else verb
        said.append(f"key{'s' * (not s)} {name_runs(np.array(keys))}{where} {verb}")
    return " and ".join(said)


def name_runs(numbers: npt.NDArray[np.int64]) -> str:
    """Name numbers by a rule or, if there is none, by spans of them, of many the first."""
    text = describe_span(numbers)
    if not text.startswith("between"):
        return text
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
    more = f" and {len(runs) - _FIRST_NAMED} more spans" if len(runs) > _FIRST_NAMED else ""
    return ", ".join(map(describe_span, runs[:_FIRST_NAMED])) + more
