"""Which keys each wrong row sees: found row by row, and then described.

A row times the sum of its weights is the sum of the weighted values, linear in which keys
are seen. A row of d numbers tells fewer than d keys, or blocks of keys, in a few places.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ....arrays.library import Doubles
from ....arrays.words import place
from ...rounding.problems import Index, Problem
from ...verification.findings import Numbers, name_span
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
from .tiles import describe_keys

_KEY_SIZES = (128, 64, 32, 16, 8, 4)  # of keys that count alike
_SINGLE_KEYS = 128  # at most, of which any few may be seen or not
_NEAR, _WINDOW = (8, 16), 16  # keys on each side of the own one, and one after another
_COLUMNS = 0.75  # counts of a row over its numbers, at most
_ROWS, _HEADS, _NAMED_ROWS = 8, 4, 64  # by which counts are known, and that are described
_SURE = math.log(1e5)  # of how likely counts are, at least, beside so many others
_LEFT_BY_KEYS = 9.0  # mean square of z, at most
_BETTER, _LEAST_SUM = 20.0, 1e-6  # sum of squares of z that a count is worth; of the weights
_SPANS = 3  # that are named

Counts = npt.NDArray[np.int64]  # of each key
Count = Callable[[Rows, Doubles], Counts]  # of some rows, (rows, keys)
Groups = Callable[[int], Counts]  # the group of each key, by query: -1 for one that is as it was


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
    some = [x.take(thin(np.arange(len(x.got)), _ROWS)) for x in thin(wrong, _HEADS)]
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
            changes = _find_changes(problem, thin(wrong, _HEADS), count, len(problem.lead))
            yield Alternative(_describe_seen(changes, " of head {}"), problem, answer=answer)
            return


def _list_counted(
    problem: Problem, wrong: Sequence[Sampled], count: Count
) -> Iterator[Alternative]:
    """List kernels of which the same is so in all heads, or in all of a batch member."""
    if len(problem.lead) < 1 or max(len(x.got) for x in wrong) > _NAMED_ROWS:
        return
    for axes, called in ((0, ""), (len(problem.lead) - 1, " of batch member {}")):
        changes = _find_changes(problem, thin(wrong, 2 * _HEADS), count, axes)
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
        x = x.take(thin(np.arange(len(x.got)), _NAMED_ROWS))
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
    more = f" and so on ({len(words) - _SPANS} more)" if len(words) > _SPANS else ""
    return f"queries see other keys: {'; '.join(words[:_SPANS])}{more}"


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
