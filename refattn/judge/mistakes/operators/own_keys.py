"""One key of each wrong row that is wrong: another in each row."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ....arrays.library import Doubles
from ...rounding.problems import Index, Problem
from ..causes.sampled import Alternative, Result, Rows
from ..causes.slips import weigh_keys
from ..causes.wrong_rows import Sampled, row_sizes

_LARGEST_WEIGHTS = 8  # of a row, whose values may be those of other keys
_OF_ERROR = 1 / 4  # of the square of an error, that a key leaves at most
_BY_CHANCE = 1e-3  # that one of the keys leaves so little, at most
_FIRST_NAMED = 3


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
    given = Alternative("", problem)
    free = Alternative("", problem, lambda x: np.ones_like(x.ahead, bool), among=False)
    ways: dict[str, dict[tuple[Index, int], _OwnKey]] = {}
    for x in wrong:
        exact, head = given.result(x.rows), given.head(x.rows)
        p = weigh_keys(free.head(x.rows), exact.lse)
        mask = np.ones(p.shape, bool) if head.mask is None else head.mask[:, : head.keys]
        size, v = unit * row_sizes(exact.out), head.v[: head.keys]
        for r, query in enumerate(x.rows.queries.tolist()):
            rate = partial(_rate, x.got[r], size[r])
            before = max(float(rate(exact.out[r])), 1e-300)
            for words, tries, keys in _list_ways(rate, exact.out[r], p[r], v, mask[r]):
                best = min(keys, key=lambda x: x.off, default=None)
                # As small a share of an error in any direction is left by chance with this power.
                if best is None or not best.off < _OF_ERROR * before:
                    continue
                if tries * (best.off / before) ** (v.shape[1] / 2) < _BY_CHANCE:
                    ways.setdefault(words, {})[x.rows.at, query] = best
    rows = sum(len(x.got) for x in wrong)
    for words, found in ways.items():
        if len(found) == rows:
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
