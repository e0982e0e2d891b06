r"""Keys that queries chose: attention to them, and whether rounded scores allow the choice.

With a choice a query sees no other key, so that `indices` are one more mask. The choice itself is
judged if there are vectors whose products rank the keys. A kernel computes a score
:math:`\hat s_j` with :math:`|\hat s_j - s_j| \le b_j`, whatever the roundings are, and may choose
the keys C of those that it sees if no other key is surely better,

.. math:: \max_{u \notin C} (s_u - b_u) \le \min_{c \in C} (s_c + b_c) .
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...arrays import checks
from ...arrays.library import Doubles
from ...arrays.words import name_row
from ..rounding.formats import widen
from ..rounding.problems import Index, Problem, take_head
from ..rounding.roundings import Roundings, sum_error
from ..verification.choice import Request, choose_profiles
from ..verification.findings import Finding, Suspect, Z
from ..verification.verdict import Verdict

CHOSEN = ("indices", "index_q", "index_k")  # arrays
_KeyNumbers = npt.NDArray[np.int64]
_HEADS_KEPT = 4  # whose masks are kept


def choose_keys(problem: Problem, given: Mapping[str, Any]) -> Problem:
    """Let queries see only the keys that they chose, (..., n or blocks of queries, S); -1 is none.

    Each row of `indices` is the choice of a block of equally many queries. A block may choose keys
    that any of its queries sees. `index_q`, with a row for each block, and `index_k` may be given,
    too: their products rank the keys, or blocks of equally many keys, each a row of `index_k`.
    """
    n, m, _ = problem.shape
    rule = "(..., n or blocks, S)"
    chosen = checks.as_array("indices", given["indices"], rule)
    chosen = checks.host_integers("indices", chosen, rule, chosen.ndim)
    if chosen.ndim < 2 or not chosen.shape[-2] or n % chosen.shape[-2]:
        raise ValueError(
            f"`indices` must have axes (..., rows, S), where the number of rows divides that of "
            f"queries, {n}, got shape {chosen.shape}."
        )
    _check_lead("indices", chosen.shape, problem.lead)
    ranked, of_each = _read_ranked(problem, given, chosen.shape[-2]), n // chosen.shape[-2]
    count = ranked["index_k"].shape[-2] if ranked else m
    if np.any((chosen < -1) | (chosen >= count)):
        what = "keys" if count == m else f"blocks of {m // count} keys"
        raise ValueError(f"`indices` must be {what} of 0 to {count - 1}, or -1 for none.")

    @lru_cache(maxsize=_HEADS_KEPT)
    def read(index: Index) -> Mapping[str, Any]:
        arrays = problem.read(index)
        rows = np.repeat(take_head(chosen, index, problem.lead), of_each, 0)
        shown = problem.head(index).visible(slice(0, n), slice(0, m))
        shown = np.ones((n, m), bool) if shown is None else shown
        more = {name: take_head(x, index, problem.lead) for name, x in ranked.items()}
        if ranked:
            more["index_q"] = np.repeat(more["index_q"], of_each, 0)
            by_any = np.any(shown.reshape(n // of_each, of_each, count, -1), (1, 3))
            more |= {"chosen": rows, "shown": np.repeat(by_any, of_each, 0)}
        more["indices"] = _list_block_keys(rows, m // count)
        mask = show_chosen(more["indices"], m) & arrays.get("mask", np.True_)
        return {**arrays, **more, "mask": mask}

    return problem._replace(read=read)


def _list_block_keys(rows: _KeyNumbers, size: int) -> _KeyNumbers:
    """List the keys of blocks of one size; -1 for those of none."""
    keys = np.where(rows < 0, -size, rows * size)[..., None] + np.arange(size)
    return np.maximum(keys, -1).reshape(len(rows), -1)


def _read_ranked(problem: Problem, given: Mapping[str, Any], rows: int) -> dict[str, Doubles]:
    """Check the vectors whose products rank the keys, if they are given."""
    names = [x for x in CHOSEN[1:] if given.get(x) is not None]
    if len(names) == 1:
        raise ValueError("`index_q` and `index_k` must be given together.")
    found = {x: widen(x, given[x]) for x in names}
    for (name, x), size in zip(found.items(), (rows, problem.shape[1]), strict=False):
        of_blocks = name == "index_k" and x.ndim > 1 and x.shape[-2] and not size % x.shape[-2]
        if x.ndim < 2 or not (of_blocks or x.shape[-2] == size) or not np.all(np.isfinite(x)):
            many = f"{size}{' or blocks' * (name == 'index_k')}"
            raise ValueError(
                f"`{name}` must be finite, of shape (..., {many}, size), got shape {x.shape}."
            )
        _check_lead(name, x.shape, problem.lead)
    if len({x.shape[-1] for x in found.values()}) > 1:
        shapes = " and ".join(str(x.shape) for x in found.values())
        raise ValueError(f"`index_q` and `index_k` must have one size, got shapes {shapes}.")
    return found


def _check_lead(name: str, shape: tuple[int, ...], lead: tuple[int, ...]) -> None:
    """Check that the axes before the last two are those of heads, or of groups of heads."""
    own = shape[:-2]
    divides = (x and not y % x for x, y in zip(own[::-1], lead[::-1], strict=False))
    if len(own) > len(lead) or not all(divides):
        raise ValueError(f"`{name}` must have leading axes that divide {lead}, got {shape}.")


def show_chosen(rows: _KeyNumbers, keys: int) -> npt.NDArray[np.bool_]:
    """Return which of so many keys each row chose."""
    seen = np.zeros((len(rows), keys + 1), bool)  # the last for none
    np.put_along_axis(seen, rows, True, -1)
    return seen[:, :keys]


class _ChosenRows(NamedTuple):
    """What was chosen by the rows of a head."""

    over: Doubles  # how far another key is better, over the bound of both scores
    pair: _KeyNumbers  # the worst key chosen and the best other key, (rows, 2)
    scores: Doubles  # of both, (rows, 2)
    hidden: npt.NDArray[np.bool_]  # whether a row chose a key that it does not see,
    twice: npt.NDArray[np.bool_]  # one key twice,
    few: npt.NDArray[np.bool_]  # or fewer keys than it sees, with room for more
    free: npt.NDArray[np.bool_]  # whether the second best choice would not be noticed

    @property
    def wrong(self) -> npt.NDArray[np.bool_]:
        """Whether rounding does not allow the choice."""
        return (self.over > 1) | self.hidden | self.twice | self.few


_ChosenHeads = Sequence[tuple[Index, _ChosenRows]]


def judge_choice(
    problem: Problem, asked: Request, rankings: Iterable[tuple[str, Problem]]
) -> Verdict:
    """Judge whether queries chose the best of the keys that they see.

    Scores are those of the profiles, by default in float32 and then rounded to the storage type.
    The cause is the first of some wrong rankings by which the choice would be right.
    """
    dtype, profile = asked.dtype, asked.profile
    if profile is None or isinstance(profile, list | tuple):
        profile = {"float64": ["math64"], "float32": ["math"]}.get(dtype, ["math", "eager"])
    roundings = {x: y.roundings(dtype) for x, y in choose_profiles(dtype, dtype, profile).items()}
    found = dict[str, _ChosenHeads]()
    for name, tried in roundings.items():
        found[name] = _judge_heads(problem, tried)
        if not any(np.any(x.over > 1) for _, x in found[name]):
            break
    by, heads = [*found.items()][-1]
    rows = [(*index, int(i)) for index, x in heads for i in np.flatnonzero(x.wrong)]
    faults = [*_list_faults(heads)]
    if rows and asked.explain:
        tightest = next(iter(roundings.values()))  # by others a choice may mean little
        others = ((text, _judge_heads(x, tightest)) for text, x in rankings)
        causes = (text for text, other in others if not any(x.wrong.any() for _, x in other))
        faults = [*islice(causes, 1), *faults]
    free = all(x.free.all() for _, x in heads)
    over = np.concatenate([x.over for _, x in heads] or [np.zeros(0)])
    largest, p = float(np.max(over, initial=0.0)), 0.0 if rows else 1.0
    first = name_row(rows[0]) if rows else ""
    nan, (n, _, _) = math.nan, problem.shape
    return Verdict(
        verdict="FAIL" if rows else "UNDERPOWERED" if free else "PASS",
        profile=None if rows else by,
        z=Z(math.sqrt(np.mean(np.maximum(over, 0.0) ** 2)) if over.size else 0.0, largest, ()),
        tests=[Finding("bound of scores", p, p, largest, first)],
        suspects=[Suspect("choice", nan, nan, nan, nan, x) for x in faults],
        remarks=["no query had a choice that rounding does not allow"] * (free and not rows),
        dtype=dtype,
        out_dtype=dtype,
        shape=(*problem.lead, n, problem.first["chosen"].shape[-1]),
        known=0.0,
        detectable={},
        alpha=asked.alpha,
        trials={},
        seconds=0.0,
        by=by,
        of="indices",
        place=f"{len(rows)} of {over.size} rows" if rows else "",
        rows=tuple((x, 0.0) for x in rows),
    )


def _judge_heads(problem: Problem, roundings: Roundings) -> _ChosenHeads:
    return [(x, _judge_head(problem.read(x), roundings)) for x in np.ndindex(problem.lead)]


def _judge_head(arrays: Mapping[str, Any], roundings: Roundings) -> _ChosenRows:
    """Compare the scores of the keys that the rows of a head chose with those of all others."""
    q, k, seen, rows = (arrays[x] for x in ("index_q", "index_k", "shown", "chosen"))
    scores, sizes = q @ k.T, np.abs(q) @ np.abs(k).T
    bound = sum_error(roundings, q.shape[-1], 0) * sizes
    if roundings.scores is not None:
        bound = bound + roundings.scores.spacing(np.abs(scores) + bound) / 2
    chosen = show_chosen(rows, len(k))
    worst = np.where(chosen & seen, scores + bound, math.inf)
    best = np.where(~chosen & seen, scores - bound, -math.inf)
    pair = np.stack([np.argmin(worst, -1), np.argmax(best, -1)], -1)
    of_pair, bounds = (np.take_along_axis(x, pair, -1) for x in (scores, bound))
    both = np.any(chosen & seen, -1) & np.any(~chosen & seen, -1)
    least = np.maximum(np.sum(bounds, -1), 1e-300)
    over = np.where(both, (of_pair[:, 1] - of_pair[:, 0]) / least, -math.inf)
    count = np.sum(rows >= 0, -1)
    few = np.sum(chosen & seen, -1) < np.minimum(np.sum(seen, -1), rows.shape[-1])
    # In the second best choice the best of the other keys replaces the best one chosen.
    top = np.max(np.where(chosen & seen, scores - bound, -math.inf), -1)
    free = ~both | (of_pair[:, 1] + bounds[:, 1] >= top)
    twice = count > np.sum(chosen, -1)
    return _ChosenRows(over, pair, of_pair, np.any(chosen & ~seen, -1), twice, few, free)


def _list_faults(heads: _ChosenHeads) -> Iterator[str]:
    """Describe what is wrong with a choice, by its first row."""
    texts = {
        "hidden": "a key is chosen that the query does not see",
        "twice": "a key is chosen twice",
        "few": "fewer keys are chosen than the query sees, though there is room",
    }
    for index, x in heads:
        at = int(np.argmax(x.over)) if len(x.over) else 0
        if len(x.over) and x.over[at] > 1:
            (chosen, other), (low, high) = x.pair[at].tolist(), x.scores[at].tolist()
            yield (
                f"key {other} has a larger score than key {chosen} that was chosen, {high:.6g} and "
                f"{low:.6g}, {x.over[at]:.3g} times as far apart as rounding allows: "
                f"{name_row((*index, at))}"
            )
            break
    for name, text in texts.items():
        rows = [(*index, int(i)) for index, x in heads for i in np.flatnonzero(getattr(x, name))]
        if rows:
            yield f"{text}: {len(rows)} rows, the first is {name_row(rows[0])}"
