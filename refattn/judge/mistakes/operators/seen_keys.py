"""Which keys each wrong row sees, and how often: found row by row, or few keys of all rows.

A row times the sum of its weights is the sum of the weighted values, linear in which keys
are seen. A row of d numbers tells fewer than d keys, or blocks of keys, in a few places.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ....arrays.library import Doubles
from ....arrays.words import place
from ...rounding.problems import Index, Problem
from ...verification.findings import Numbers, describe_span, name_first, name_span
from ..causes.sampled import (
    Alternative,
    Place,
    Result,
    Rows,
    Seen,
    show_band,
    take_rows,
)
from ..causes.slips import weigh_with_hidden
from ..causes.wrong_rows import Sampled, row_sizes, thin
from .sums import describe_keys

_KEY_SIZES = (128, 64, 32, 16, 8, 4)  # of keys that count alike
_SINGLE_KEYS = 128  # at most, of which any few may be seen or not
_NEAR, _WINDOW = (8, 16), 16  # keys on each side of the own one, and one after another
_COLUMNS = 0.75  # counts of a row over its numbers, at most
_ROWS_SEEN, _HEADS_SEEN, _NAMED_ROWS = 8, 4, 64  # by which counts are known, and that are described
_SURE = math.log(1e5)  # of how likely counts are, at least, beside so many others
_LEFT_BY_KEYS = 9.0  # mean square of z, at most
_BETTER, _LEAST_SUM = 20.0, 1e-6  # sum of squares of z that a count is worth; of the weights

Counts = npt.NDArray[np.int64]  # of each key
Count = Callable[[Rows, Doubles], Counts]  # of some rows, (rows, keys)
Groups = Callable[[int], Counts]  # the group of each key, by query: -1 for one that is as it was
_LARGEST_WEIGHTS = 8  # of a row, whose values may be those of other keys
_OF_ERROR = 1 / 4  # of the square of an error, that a key leaves at most
_BY_CHANCE = 1e-3  # that one of the keys leaves so little, at most
_MOST_KEYS, _MOST_NUMBERS = 6, 2**22  # that count otherwise; of the terms of keys, that are kept
_LEFT_BY_FEW, _CHANCE_OF_FEW = 4.0, 1e-6  # mean square of z, and chance of as little, at most
_VALUE_HEADS, _ROWS_OF_VALUE = 8, 4  # that are looked at; rows for each key whose value is found
_FAR_VALUE = 0.05  # of the largest change of a value, that is named
_NEAR_COUNT = 0.05  # distance to a whole number within which a count is written as one


class _Row(NamedTuple):
    """A wrong row, and what keys add to its error and to the sum of its weights."""

    query: int
    level: int  # the key that is level with the query
    terms: Doubles  # (keys, columns + 1), the first in units of errors, the last of the sum
    rest: Doubles
    seen: npt.NDArray[np.bool_]


def list_seen_keys(
    problem: Problem, wrong: Sequence[Sampled], unit: float, numbers: Numbers
) -> Iterator[Alternative]:
    """List kernels whose wrong rows see other keys than they should."""
    some = [x.few(_ROWS_SEEN) for x in thin(wrong, _HEADS_SEEN)]
    few = [y for x in some for y in _list_rows(problem, x.rows, x.got, unit)]
    for groups in _list_groups(problem) if few else ():
        sure = -_SURE
        for x in few:
            _, more = _find_seen(x, groups(x.query))
            sure += more
            if more == -math.inf:
                break
        if sure > 0:
            count = partial(_count_keys, problem, groups, unit, [x.rows.at for x in wrong])
            yield from _list_counted(problem, wrong, count)
            answer = partial(_attend_counted, problem, count, numbers)
            changes = _find_changes(problem, thin(wrong, _HEADS_SEEN), count, len(problem.lead))
            yield Alternative(_describe_seen(changes, " of head {}"), problem, answer=answer)
            return


def _list_counted(
    problem: Problem, wrong: Sequence[Sampled], count: Count
) -> Iterator[Alternative]:
    """List kernels of which the same is so in all heads, or in all of a batch member."""
    if len(problem.lead) < 1 or max(len(x.got) for x in wrong) > _NAMED_ROWS:
        return
    for axes, called in ((0, ""), (len(problem.lead) - 1, " of batch member {}")):
        changes = _find_changes(problem, thin(wrong, 2 * _HEADS_SEEN), count, axes)
        seen = partial(_show_otherwise, show_band(problem), changes)
        text = "" if axes else _describe_tree(problem, changes)
        yield Alternative(text or _describe_seen(changes, called), problem, seen, among=False)


def _find_changes(
    problem: Problem, wrong: Sequence[Sampled], count: Count, axes: int
) -> dict[Index, Counts]:
    """Find which keys queries see more or less, (queries, keys), in heads that begin alike.

    One head is enough to say so: in others the key may have no weight.
    """
    found: dict[Index, Counts] = {}
    for x in wrong:
        x = x.few(_NAMED_ROWS)
        own = count(x.rows, x.got) - _show_declared(problem, x.rows)
        of_head = found.setdefault(x.rows.at[:axes], np.zeros(problem.shape[:2], int))
        of_head[x.rows.queries] += own
    return {at: np.sign(x) for at, x in found.items()}


def _show_otherwise(
    band: Callable[[Place], Seen], changes: Mapping[Index, Counts], x: Place
) -> Seen:
    usual = band(x) if x.mask is None else band(x) & x.mask
    of_head = [y for at, y in changes.items() if at == x.at[: len(at)]]
    return usual + of_head[0][x.i, x.j] > 0 if of_head else usual


def _list_groups(problem: Problem) -> Iterator[Groups]:
    """List groups of keys of which each may count otherwise, the fewest first."""
    n, m, d = problem.shape
    j, most = np.arange(m), _COLUMNS * d
    for size in (x for x in _KEY_SIZES if 2 * m < x * most):
        yield partial(_number_blocks, j // size)
    if n <= most:
        yield partial(_number_blocks, np.maximum(j - (m - n), -1))
    for size in (x for x in _NEAR if 2 * x < most):
        yield partial(_number_near, m, m - n, size)
    for start in range(0, m, _WINDOW) if most > _WINDOW else ():
        yield partial(_number_blocks, np.where(j // _WINDOW == start // _WINDOW, j - start, -1))
    if m <= _SINGLE_KEYS:
        yield partial(_number_blocks, j)


def _number_blocks(groups: Counts, _: int) -> Counts:
    return groups


def _number_near(m: int, ahead: int, size: int, query: int) -> Counts:
    far = np.arange(m) - (query + ahead)
    return np.where(np.abs(far) <= size, far + size, -1)


def _list_rows(problem: Problem, rows: Rows, got: Doubles, unit: float) -> Iterator[_Row]:
    head = take_rows(problem, rows)
    exact, p = weigh_with_hidden(head)
    lse, v, size = exact.lse, head.v[: head.keys], unit * row_sizes(got)
    mask = np.ones(p.shape, bool) if head.mask is None else head.mask
    sinks = 0 * lse if head.sink is None else np.exp(head.sink - lse)
    for row, query in enumerate(rows.queries.tolist()):
        both = np.append((v - got[row]) / size[row], np.ones((len(v), 1)), 1)
        terms = p[row][:, None] * both
        rest = sinks[row] * np.append(-got[row] / size[row], 1.0) + np.sum(terms[mask[row]], 0)
        level = query + problem.shape[1] - problem.shape[0]
        yield _Row(query, level, terms, rest, mask[row])


def _find_seen(x: _Row, groups: Counts) -> tuple[Counts, float]:
    """Count how often a row sees keys of each group, of those that it should see and others.

    With it is the log of how unlikely it is to be so near by chance, -inf if it is not near.
    """
    size, some = int(np.max(groups)) + 1, np.flatnonzero(groups >= 0)
    # Of hidden keys those after the own one of the query are apart.
    kind = np.where(x.seen[some], 0, np.where(some <= x.level, 1, 2))
    both = kind * size + groups[some]
    sums = np.zeros((3 * size, x.terms.shape[1]))
    np.add.at(sums, both, x.terms[some])
    fixed = x.rest - np.sum(sums[:size], 0)
    own, d = np.repeat([1, 0, 0], size), len(fixed) - 1
    if not (np.all(np.isfinite(sums)) and np.all(np.isfinite(fixed))):
        return x.seen.astype(int), -math.inf
    starts = [own]
    if np.sum(np.any(sums, -1)) <= _COLUMNS * d:  # a few keys of many are found one by one
        fitted = np.linalg.lstsq(sums[:, :-1].T, -fixed[:-1], rcond=1e-6)[0]
        starts.append((fitted > 0.5).astype(int))
    after, found = min((_improve(sums, fixed, own, y) for y in starts), key=lambda y: y[0])
    counts = x.seen.astype(int)
    counts[some] = found[both]
    after -= _BETTER * np.sum(found != own)
    if after > _LEFT_BY_KEYS * d:
        return x.seen.astype(int), -math.inf
    # So near by chance is one of all ways to change so many counts with this probability.
    before = float(_rate_seen(sums, fixed, own[None])[0])
    ways = np.sum(found != own) * math.log(2 * size)
    return counts, d / 2 * math.log(max(before, d) / max(after, d)) - ways


def _improve(sums: Doubles, fixed: Doubles, own: Counts, counts: Counts) -> tuple[float, Counts]:
    """See one group more or less after another, as long as a row comes nearer to what it is."""
    one, off = np.eye(len(counts), dtype=int), math.inf
    tried = counts[None]
    for _ in range(2 * len(counts)):
        far = _rate_seen(sums, fixed, tried) + _BETTER * np.sum(tried != own, -1)
        if not far.min() < off:
            break
        off, counts = float(far.min()), tried[far.argmin()]
        tried = np.abs(counts - one)
    return off, counts


def _rate_seen(sums: Doubles, fixed: Doubles, counts: Counts) -> Doubles:
    """Rate counts, (ways, groups), by the sum of squares of errors that they leave."""
    left = counts @ sums + fixed
    total = np.where(left[:, -1] > _LEAST_SUM, left[:, -1], np.nan)
    far = np.sum(np.square(left[:, :-1] / total[:, None]), -1)
    return np.where(np.isnan(far), math.inf, far)


def _count_keys(
    problem: Problem, groups: Groups, unit: float, heads: Sequence[Index], rows: Rows, got: Doubles
) -> Counts:
    """Count how often each key is seen in rows of wrong heads, (rows, keys)."""
    every = _list_rows(problem, rows, got, unit)
    counts = [_find_seen(x, groups(x.query))[0] if rows.at in heads else 1 * x.seen for x in every]
    return np.stack(counts)


def _attend_counted(problem: Problem, count: Count, numbers: Numbers, rows: Rows) -> Result:
    head = take_rows(problem, rows)
    exact, every = weigh_with_hidden(head)
    w = count(rows, numbers.out(rows.at)[rows.queries]) * every
    sinks = 0.0 if head.sink is None else np.exp(head.sink - exact.lse)
    total = np.sum(w, -1) + sinks
    out = w @ head.v[: head.keys] / np.where(total > 0, total, 1.0)[:, None]
    return exact._replace(out=out, lse=exact.lse + np.log(total))


def _show_declared(problem: Problem, rows: Rows) -> Counts:
    """Show the keys that queries should see, (queries, keys)."""
    mask = take_rows(problem, rows).mask
    return np.ones((len(rows.queries), len(rows.keys)), int) if mask is None else 1 * mask


def _describe_seen(changes: Mapping[Index, Counts], called: str) -> str:
    """Say which queries see which other keys, in heads that are called so."""
    words = []
    for at, of_query in changes.items():
        alike: dict[bytes, list[int]] = {}
        for i in np.flatnonzero(of_query.any(-1)).tolist():
            alike.setdefault(of_query[i].tobytes(), []).append(i)
        for queries in alike.values():
            row, which = of_query[queries[0]], name_span("queries", np.array(queries))
            kinds = {"not {}": row < 0, "also {}": row > 0}
            said = " and ".join(x.format(describe_keys(y)) for x, y in kinds.items() if y.any())
            words.append(f"{which}{called.format(place(at))} {said}")
    return f"queries see other keys: {name_first(words, between='; ')}"


def _describe_tree(problem: Problem, changes: Mapping[Index, Counts]) -> str:
    """Say of which token before each of the last tokens goes on, if they are seen as a tree."""
    (n, m, _), first = problem.shape, (0,) * len(problem.lead)
    of_last = np.arange(m) >= m - n
    if not 1 < n <= min(m, _WINDOW) or changes[()][:, ~of_last].any() or not changes[()].any():
        return ""  # other keys are wrong
    seen = _show_declared(problem, Rows(first, np.arange(n), np.arange(m))) + changes[()]
    last = seen[:, of_last] > 0
    before = last & ~np.eye(n, dtype=bool)
    parents = np.where(before.any(-1), n - 1 - np.argmax(before[:, ::-1], -1), -1)
    theirs = (parents[:, None] >= 0) & last[parents]
    good = last.diagonal().all() and np.all(parents < np.arange(n)) and np.any(parents >= 0)
    if np.any(before != theirs) or not good:
        return ""
    follow = ", ".join(map(str, parents[1:].tolist()))
    return f"the last {n} keys are seen as a tree of tokens, of which 1 to {n - 1} follow {follow}"


# --- single keys, of each row or of all -----------------------------------------------------------


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
        text = name_first(names if len(every) > 1 else [*every])
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
    for x in (x.few(size) for x in wrong):
        exact, p, v = _weigh_all(problem, x.rows)
        scale = unit * row_sizes(exact.out)
        terms.append(p[:, None] * ((v.T - x.got[..., None]) / scale[..., None]))
        errors.append(((x.got - exact.out) / scale).ravel())
    columns = np.concatenate([x.reshape(-1, x.shape[-1]) for x in terms])
    error = np.concatenate(errors)[:, None]
    if not error.size or (fitted := _find_few(columns, error)) is None:
        return
    keys, times = fitted
    left = float(np.mean(np.square(error - columns[:, keys] @ times)))
    before, free = float(np.mean(np.square(error))), (len(error) - len(keys)) / 2
    chance = len(keys) * math.log(len(columns.T)) + free * math.log(max(left, 1e-300) / before)
    told = np.all(np.abs(times) > _NEAR_COUNT)  # a key that counts once is right
    if told and chance < math.log(_CHANCE_OF_FEW):
        found = dict(sorted(zip(keys, times[:, 0].tolist(), strict=True)))
        yield Alternative(
            describe_counts({x: 1 + c for x, c in found.items()}),
            problem,
            answer=partial(_count_few, problem, found),
        )


def _find_few(
    columns: Doubles, errors: Doubles, most: int = _MOST_KEYS
) -> tuple[list[int], Doubles] | None:
    """Find few columns, (numbers, columns), and by what they add up to errors, (numbers, count).

    The one that leaves least is taken first, and then beside it the next.
    """
    rest, lengths, keys = errors, np.linalg.norm(columns, axis=0), list[int]()
    times: Any = np.zeros((0, errors.shape[1]))
    while not np.mean(np.square(rest)) <= _LEFT_BY_FEW:
        if len(keys) == min(most, _MOST_KEYS) or not np.all(np.isfinite(errors)):
            return None
        score = np.linalg.norm(rest.T @ columns, axis=0)
        keys.append(int(np.argmax(score / np.where(lengths > 0, lengths, math.inf))))
        times = np.linalg.lstsq(columns[:, keys], errors, rcond=None)[0]
        rest = errors - columns[:, keys] @ times
    return (keys, times) if keys else None


def list_other_values(
    problem: Problem, wrong: Sequence[Sampled], unit: float
) -> Iterator[Alternative]:
    """List the kernel in which few keys have other values: errors are sums of p_j times changes."""
    found: dict[Index, tuple[list[int], Doubles]] = {}
    for x in thin(wrong, _VALUE_HEADS):
        exact, p = _weigh_seen(problem, x.rows)
        scale = 1 / (unit * np.median(row_sizes(exact.out), -1, keepdims=True))
        weights, errors = p * scale, (x.got - exact.out) * scale
        fitted = _find_few(weights, errors, len(errors) // _ROWS_OF_VALUE)
        if fitted is None:
            return
        found[x.rows.at] = fitted
    if found:
        told = [_describe_values(problem, at, *x) for at, x in found.items()]
        answer = partial(_attend_to_values, problem, found)
        text = name_first(told, 1, " and so on ({} more heads)")
        yield Alternative(text, problem, answer=answer)


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
    return name_first([*map(describe_span, runs)], more=" and {} more spans")
