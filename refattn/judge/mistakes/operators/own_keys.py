"""Keys that are wrong: one in each row, few in all, or many that have a factor of their own."""

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
from ..causes.slips import TILE_SIZES, attend_by, score_all, weigh_with_hidden
from ..causes.wrong_rows import Sampled, finite, row_sizes, thin
from .intervals import Edges
from .tiles import describe_keys

_LARGEST_WEIGHTS = 8  # of a row, whose values may be those of other keys
_OF_ERROR = 1 / 4  # of the square of an error, that a key leaves at most
_BY_CHANCE = 1e-3  # that one of the keys leaves so little, at most
_FIRST_NAMED = 3
_MOST_KEYS, _MOST_NUMBERS = 6, 2**22  # that count otherwise; of the terms of keys, that are kept
_LEFT_BY_FEW, _CHANCE_OF_FEW = 4.0, 1e-6  # mean square of z, and chance of as little, at most
_VALUE_HEADS, _ROWS_OF_VALUE = 8, 4  # that are looked at; rows for each key whose value is found
_FAR_VALUE = 0.05  # of the largest change of a value, that is named
_NEAR_COUNT = 0.05  # how near to a whole number a count is that is said as that number
_FACTOR_HEADS, _MOST_TERMS = 4, 2**20  # that are looked at; terms of keys, that are kept
_MOST_FACTORS, _FACTOR_PERIODS, _FACTOR_EDGES = 64, (2, 3, 4, 8), 256
_FACTOR_TURNS, _MOST_FACTOR, _LARGEST_LEFT = 12, 1e3, 1e100
_LEFT_AT_FIRST = 0.5, 0.9  # of the square of errors by derivatives: as they are, of scores
_SURE_FACTOR = 5.0  # standard errors from 1
_SURE_OF_FACTORS = 30.0  # log of a ratio of likelihoods, at least


KeyMask = npt.NDArray[np.bool_]


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


_FactorWay = Callable[[Doubles, Doubles, Doubles], tuple[Doubles, Doubles]]
# What may have a factor, of scores s and values v, and what of s the derivative of weights is.
_FACTORED: Mapping[str, tuple[_FactorWay, bool]] = {
    "values": (lambda s, v, c: (s, c[:, None] * v), False),
    "scores": (lambda s, v, c: (np.where(np.isneginf(s), s, c * s), v), True),
    "weights": (lambda s, v, c: (s + np.log(c), v), False),
}


class _FactoredRows(NamedTuple):
    """Some wrong rows of a head: scores, (rows, keys and sinks), values, the rows, their unit."""

    s: Doubles
    v: Doubles
    got: Doubles
    size: Doubles


class _Factors(NamedTuple):
    """Factors of the values, scores or weights of keys, and how well they explain wrong rows."""

    cost: float  # less log likelihood
    way: str
    of_keys: Doubles
    changed: npt.NDArray[np.bool_]
    error: float  # of the factor, if there is one


def list_factored_keys(
    problem: Problem, wrong: Sequence[Sampled], unit: float
) -> Iterator[Alternative]:
    """List the kernel that multiplies values, scores or weights of some keys.

    These are keys one after another, tiles or remainder classes, each with its factor: found by
    Gauss-Newton, from running sums of derivatives to the factors of all keys.
    """
    _, m, d = problem.shape
    some = thin(wrong, _FACTOR_HEADS)
    count = _MOST_TERMS // max(m * d * max(len(some), 1), 1)
    rows = []
    for x in (x.take(thin(np.arange(len(x.got)), count)) for x in some):
        head = take_rows(problem, x.rows)
        rows.append(_FactoredRows(score_all(head), head.v, x.got, unit * row_sizes(x.got)))
        if head.keys != m:  # keys of a sequence, of which others have no part
            return
    if not count or not rows or not all(np.all(np.isfinite(x.got)) for x in rows):
        return
    shifted = problem.softcap is not None or "bias" in problem.first
    ways = [x for x in _FACTORED if not (shifted and x == "scores")]
    j = np.arange(m)
    groups = [j // x for x in TILE_SIZES if x < m <= x * _MOST_FACTORS]
    groups += [j % x for x in _FACTOR_PERIODS if x < m]
    found, before, numbers = list[_Factors](), 0.0, 0
    for way in ways:
        sums, error = _sum_terms(rows, way, m)
        span = _find_factored_span(sums, error)
        before, numbers, terms = float(error @ error), len(error), np.diff(sums)
        # Of groups which are others is chosen, of keys one after another the edges.
        chosen = [2 * math.log(m), *((np.max(x) + 1) * math.log(2) for x in groups)]
        for group, cost in zip([np.where(span, 0, -1), *groups], chosen, strict=True):
            columns = terms @ _mark_groups(group)
            rest = error - columns @ np.linalg.lstsq(columns, error, rcond=None)[0]
            if rest @ rest < _LEFT_AT_FIRST[_FACTORED[way][1]] * before:
                found += _fit_factors_of(rows, way, group, cost)
    best = min(found, key=lambda x: x.cost, default=None)
    if best is None or numbers / 2 * math.log(before / numbers) - best.cost < _SURE_OF_FACTORS:
        return
    answer = partial(_attend_factored, problem, best.way, best.of_keys)
    yield Alternative(_describe_factors(best), problem, answer=answer, fitted=True)


def _leave_rows(x: _FactoredRows, way: str, c: Doubles) -> Doubles:
    """Return the errors that factors leave, over their unit."""
    return np.asarray((x.got - _attend_with(x.s, x.v, way, c).out) / x.size)


def _attend_with(s: Doubles, v: Doubles, way: str, c: Doubles) -> Result:
    change, _ = _FACTORED[way]
    with np.errstate(all="ignore"):
        return attend_by(*change(s, v, np.pad(c, (0, len(v) - len(c)), constant_values=1.0)))


def _derive_factors(x: _FactoredRows, way: str, c: Doubles, out: Doubles) -> Doubles:
    """Return derivatives of rows to the factors of keys, (rows, keys, columns), over their unit."""
    change, of_scores = _FACTORED[way]
    m = len(c)
    with np.errstate(all="ignore"):
        s, _ = change(x.s, x.v, np.pad(c, (0, len(x.v) - m), constant_values=1.0))
        p = np.exp(s - np.logaddexp.reduce(s, -1, keepdims=True))[:, :m]
    if of_scores:
        p = p * np.where(p > 0, x.s[:, :m], 0.0)
    elif way == "weights":
        p = p / np.where(c > 0, c, 1.0)
    terms = x.v[:m] if way == "values" else x.v[:m] - out[:, None]
    return np.asarray(p[..., None] * terms / x.size[:, None])


def _sum_terms(rows: Sequence[_FactoredRows], way: str, m: int) -> tuple[Doubles, Doubles]:
    """Return running sums over keys of what their factors move, (numbers, m + 1), and errors."""
    sums, errors = [], []
    for x in rows:
        terms = np.cumsum(_derive_factors(x, way, np.ones(m), x.got), 1)
        sums.append(np.moveaxis(np.pad(terms, ((0, 0), (1, 0), (0, 0))), 1, -1).reshape(-1, m + 1))
        errors.append(_leave_rows(x, way, np.ones(m)).ravel())
    return np.concatenate(sums), np.concatenate(errors)


def _mark_groups(group: npt.NDArray[np.int64]) -> Doubles:
    return np.asarray(group[:, None] == np.arange(np.max(group) + 1), float)


def _find_factored_span(every: Doubles, error: Doubles) -> KeyMask:
    """Find the keys one after another that one factor of explains most, by running sums."""
    m = every.shape[1] - 1
    square, along = np.einsum("ij,ij->j", every, every), error @ every

    def gain(starts: Edges, stops: Edges) -> Doubles:
        """Return what the factor of the keys between two edges explains of the errors."""
        size = square[stops, None] + square[starts] - 2 * every[:, stops].T @ every[:, starts]
        least = 1e-12 * square[-1] + 1e-300
        explained = (along[stops, None] - along[starts]) ** 2 / np.maximum(size, least)
        return np.where(stops[:, None] > starts, explained, -1.0)

    edges = np.unique(np.append(np.arange(0, m, -(-m // _FACTOR_EDGES)), m))
    explained = gain(edges, edges)
    stop, start = (edges[[x]] for x in np.unravel_index(np.argmax(explained), explained.shape))
    for _ in range(_FACTOR_TURNS if len(edges) <= m else 0):
        before = start[0], stop[0]
        stop = np.argmax(gain(start, np.arange(m + 1)), 0)
        start = np.argmax(gain(np.arange(m + 1), stop), 1)
        if (start[0], stop[0]) == before:
            break
    keys = np.arange(m)
    return np.asarray((keys >= start[0]) & (keys < stop[0]))


def _fit_factors_of(
    rows: Sequence[_FactoredRows], way: str, group: npt.NDArray[np.int64], chosen: float
) -> Iterator[_Factors]:
    """Fit a factor of each group of keys, but -1; then, if those that are not 1 are alike, one."""
    from scipy import optimize  # here, as most files need none

    of_group = _mark_groups(group)
    count = of_group.shape[1]

    def spread(times: Doubles) -> Doubles:
        return np.where(group < 0, 1.0, times[group])

    def leave(times: Doubles) -> Doubles:
        found = [_leave_rows(x, way, spread(times)).ravel() for x in rows]
        return np.clip(finite(np.concatenate(found)), -_LARGEST_LEFT, _LARGEST_LEFT)

    def derive(times: Doubles) -> Doubles:
        c, found = spread(times), []
        for x in rows:
            terms = _derive_factors(x, way, c, _attend_with(x.s, x.v, way, c).out)
            found.append(np.einsum("rmd,mg->rdg", terms, of_group, optimize=True))
        return -np.concatenate([x.reshape(-1, count) for x in found])

    least = 0.0 if way == "weights" else -_MOST_FACTOR
    fit = optimize.least_squares(
        leave, np.ones(count), derive, (least, _MOST_FACTOR), max_nfev=_FACTOR_TURNS
    )
    times, left = fit.x, float(np.mean(np.square(fit.fun)))
    if left > _LEFT_BY_FEW:
        return
    normal = fit.jac.T @ fit.jac
    normal += (1e-12 * np.trace(normal) + 1e-300) * np.eye(count)
    error = np.sqrt(np.diagonal(np.linalg.inv(normal)) * max(left, 1.0))
    off = np.abs(times - 1) > _SURE_FACTOR * error
    changed = np.isin(group, np.flatnonzero(off))
    if not off.any() or (changed.all() and np.ptp(times) < _SURE_FACTOR * np.max(error)):
        return  # the whole output may have a factor
    if count > 1 and not changed.all():  # fewer numbers, if one explains as much
        yield from _fit_factors_of(rows, way, np.where(changed, 0, -1), chosen)
    found = np.where(group < 0, 1.0, times[group])
    cost = (
        len(fit.fun) / 2 * math.log(max(left, 0.25)) + count / 2 * math.log(len(fit.fun)) + chosen
    )
    yield _Factors(cost, way, found, changed, float(error[0]) if count == 1 else math.nan)


def _describe_factors(found: _Factors) -> str:
    """Say which keys have which factor, of many the first."""
    keys = np.flatnonzero(found.changed)
    if math.isfinite(found.error):
        c = found.of_keys[keys[0]]
        size = f"{c:.3g}" if found.error > 1e-3 * abs(c) else f"{c:.5g}"
        return f"{found.way} of {describe_keys(found.changed)} are {size} times what they should be"
    runs = np.split(
        keys, np.flatnonzero((np.diff(keys) != 1) | (np.diff(found.of_keys[keys]) != 0)) + 1
    )
    more = f" and so on ({len(runs) - _FIRST_NAMED} more)" if len(runs) > _FIRST_NAMED else ""
    said = (f"{name_span('keys', x)} {found.of_keys[x[0]]:.3g}" for x in runs[:_FIRST_NAMED])
    return f"{found.way} of some keys have factors: {', '.join(said)}{more}"


def _attend_factored(problem: Problem, way: str, c: Doubles, rows: Rows) -> Result:
    head = take_rows(problem, rows)
    return _attend_with(score_all(head), head.v, way, c)


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
