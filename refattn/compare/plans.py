"""What is measured: the smallest S at which the error of each estimator reaches a target."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..arrays import checks, qkv
from ..arrays.library import Floats
from ..arrays.shown import held
from ..arrays.tables import Column, Table, digits, two_digits
from ..arrays.words import with_known_keywords
from ..registry import ESTIMATORS, Estimator
from .advice import EXACT, Choice, split_heads
from .measured import (
    QUADRATIC_QUERIES,
    REFUSALS,
    Inputs,
    Row,
    names,
    on_part,
    on_some,
    places,
    pose,
    record_of,
)

PAIRS = 2**21  # estimators are measured on heads with at most so many pairs of query and key


class Candidate(NamedTuple):
    """The measurements of one estimator.

    Attributes
    ----------
    estimator : str
        Its name.
    steps : list of compare.Row
        Errors and time at each S tried; if `reached`, the last is the first to reach the target.
    exact : compare.Row
        Exact attention on the same queries, in the dtype of the arrays, timed right after.
    reached : bool
        Whether the mean error of the last step is at most the target.
    reason : str
        The error message that a larger S raised; empty if a larger S was not needed or not allowed.
    """

    estimator: str
    steps: list[Row]
    exact: Row
    reached: bool
    reason: str

    @property
    def choice(self) -> Choice:
        """The last S tried, and its time relative to exact attention."""
        last = self.steps[-1]
        assert last.seconds is not None
        assert self.exact.seconds is not None
        return Choice(self.estimator, last.samples, last.seconds / self.exact.seconds)


@held()
class Plan(NamedTuple):
    """The estimators, arrays and sizes to measure: see `plan`.

    Attributes
    ----------
    heads : list of tuples
        Indices of the heads that are measured, evenly spaced.
    lead : tuple of int
        Shape of all heads.
    queries : int
        Number of queries of each head for estimators whose time grows with n m S.
    target, draws, seed, most
        The arguments of `plan`; `most` is the number that is used.
    problems : dict
        By estimator, the arrays on which it is measured.
    """

    heads: list[tuple[int, ...]]
    lead: tuple[int, ...]
    queries: int
    target: float
    draws: int
    seed: int
    most: int
    problems: dict[str, Inputs]


@held()
class Search(NamedTuple):
    """The result of `search`: the plan, and the candidates in its order."""

    plan: Plan
    candidates: list[Candidate]

    def standard_error(self, row: Row) -> float:
        """Return the standard error of a mean error, over draws and sampled heads."""
        heads, every = row.per_head.size, math.prod(self.plan.lead)
        over_draws = 0.0 if len(row.errors) == 1 else row.standard_error
        if heads == every:
            return over_draws
        spread = float(np.std(row.per_head, ddof=1)) if heads > 1 else math.nan
        return math.hypot(over_draws, spread * math.sqrt(1 / heads - 1 / every))

    @property
    def ranking(self) -> list[Choice]:
        """The estimators that reach the target and exact attention, the fastest first."""
        reached = [x.choice for x in self.candidates if x.reached]
        return sorted([Choice(EXACT, None, 1.0), *reached], key=lambda choice: choice.cost_ratio)

    def tables(self) -> tuple[Table]:
        """Return the measurements as rows: one for each estimator and S that was tried."""
        rows = [
            {
                "estimator": candidate.estimator,
                "samples": row.samples,
                "error_mean": float(np.mean(row.errors)),
                "standard_error": self.standard_error(row),
                "error_worst": float(np.max(row.per_head)),
                "error_per_head": row.per_head.tolist(),
                "seconds": row.seconds,
                "cost_ratio": candidate._replace(steps=[row]).choice.cost_ratio,
            }
            for candidate in self.candidates
            for row in candidate.steps
        ]
        columns = (
            *(Column("estimator"), Column("samples"), Column("error_mean", digits)),
            Column("standard_error", two_digits, self.chance),
            *(Column("error_worst", digits, drop=1), Column("seconds", two_digits, drop=2)),
            Column(
                "cost_ratio",
                digits,
                "seconds divided by those of exact attention (same queries, NumPy)",
            ),
        )
        return (Table("measured", rows, columns, keys=2),)

    @property
    def chance(self) -> str:
        """Describe what the standard errors cover."""
        some = len(self.plan.heads) < math.prod(self.plan.lead)
        return "over draws" + (", and of the choice of heads" if some else "")

    def content(self) -> dict[str, Any]:
        """Return the plan and the results, the rows of `tables` by estimator."""
        rows = self.tables()[0].rows
        return {
            **{x: getattr(self.plan, x) for x in ("heads", "draws", "seed", "most")},
            "recommended": self.ranking[0],
            "estimators": [
                {
                    "estimator": x.estimator,
                    "queries": self.plan.problems[x.estimator].q.shape[-2],
                    "reached": x.reached,
                    "refused": x.reason or None,
                    "steps": [row for row in rows if row["estimator"] == x.estimator],
                    "cost_ratio": x.choice.cost_ratio if x.steps else None,
                }
                for x in self.candidates
            ],
        }


@with_known_keywords
def plan(
    q: Floats,
    k: Floats,
    v: Floats,
    *,
    estimators: Iterable[str] | None = None,
    target: float = 0.1,
    most: int | None = None,
    draws: int = 4,
    seed: int = 0,
    scale: float | None = None,
) -> Plan:
    """Choose what `search` measures estimators on.

    At least one head is used, and more up to a total of `PAIRS` pairs of query and key. An
    estimator whose time grows with n m S, and whose queries are independent of each other, is
    measured on `QUADRATIC_QUERIES` queries of each head. Heads and queries are evenly spaced.

    Parameters
    ----------
    q, k, v, seed, scale
        As in `compare.measure`.
    estimators : iterable of str, optional
        Names as in `compare.measure`; all by default.
    target : float
        Relative error to be reached.
    most : int, optional
        No larger S is tried; 4 max(n, m) by default.
    draws : int
        Independent draws of random numbers at each S, at least 2.

    Returns
    -------
    Plan
        For `search`.

    Raises
    ------
    TypeError, ValueError
        If an argument is unusable, if a name is unknown, or if exact attention is not finite or is
        0 in some head.

    Examples
    --------
    >>> import refattn
    >>> from refattn import compare
    >>> planned = compare.plan(*refattn.load_sample(), estimators=["rfa", "ra"])
    >>> len(planned.heads), planned.queries, planned.most
    (8, 32, 512)
    """
    qkv.check(q, k, v)
    target = checks.real("target", target, positive=True)
    checks.positive_integer("draws", draws)
    if draws < 2:
        raise ValueError(f"`draws` must be at least 2, for a standard error, got {draws}.")
    if most is not None:
        checks.positive_integer("most", most)
    records = [
        record_of(x)
        for x in checks.list_names("estimators", names() if estimators is None else estimators)
    ]
    n, m = q.shape[-2], k.shape[-2]
    most = 4 * max(n, m) if most is None else most
    lead, heads = split_heads(q, k, v)
    taken = places(len(heads), max(1, PAIRS // max(1, n * m)))
    heads = [heads[i] for i in taken]
    q, k, v = (np.stack([head[i] for head in heads]) for i in (1, 2, 3))
    queries = min(n, QUADRATIC_QUERIES)
    whole = pose(q, k, v, scale=scale, seed=seed)
    part = on_some(whole, queries)
    problems = {x.name: part if on_part(x) else whole for x in records}
    taken_heads = [head[0] for head in heads]
    return Plan(taken_heads, lead, queries, target, draws, seed, most, problems)


def _list_sizes(planned: Plan, record: Estimator) -> list[int | None]:
    """List the powers of 2 that an estimator is tried at, or None if it has no size.

    Windows of chunks are in the order of the terms that a query has, the own keys and the other
    chunks; one key to a chunk, which is exact attention and no cheaper, is left out, and so are
    windows of more than half of the keys.
    """
    if record.size is None:
        return [None]
    (n, m), most = (x.shape[-2] for x in planned.problems[record.name][:2]), planned.most
    if record.has("chunked"):
        windows = [2**i for i in range(1, min(most, m // 2).bit_length())]
        return sorted(windows, key=lambda x: (x + m / x, -x)) or [1]
    if not record.has("unlimited-size"):  # proposals have queries of their own, other samples keys
        most = min(most, m, n if record.has("proposals") else m)
    return [2**i for i in range(most.bit_length())]


def _count_draws(planned: Plan, record: Estimator) -> int:
    return planned.draws if record.has("random") else 1


@with_known_keywords
def search(planned: Plan, *, track: Callable[[Sequence[Any]], Iterable[Any]] = iter) -> Search:
    """Find the smallest power of 2 at which the error of each estimator reaches the target.

    Chunk sizes start near the square root of the number of keys, where time is least.

    The error is that of `compare.measure`, averaged over draws and heads.

    Parameters
    ----------
    planned : Plan
        What `plan` returns.
    track : callable
        Wraps the sequence of estimators, for example to show progress.

    Returns
    -------
    Search
        Errors with standard errors, and times, at each S tried.

    Raises
    ------
    ValueError
        If no estimator can be measured.

    Examples
    --------
    >>> import refattn
    >>> from refattn import compare
    >>> planned = compare.plan(*refattn.load_sample(), estimators=["ra"], target=0.3)
    >>> [(row.samples, row.per_head.shape) for row in compare.search(planned).candidates[0].steps]
    [(1, (8,)), (2, (8,)), (4, (8,)), (8, (8,)), (16, (8,)), (32, (8,))]
    """
    candidates = [_search_one(planned, ESTIMATORS[name]) for name in track(list(planned.problems))]
    if candidates and not any(candidate.steps for candidate in candidates):
        raise ValueError(f"{candidates[0].estimator}: {candidates[0].reason}")
    return Search(planned, candidates)


def _search_one(planned: Plan, record: Estimator) -> Candidate:
    """Double S, or take chunks of more terms, until the mean error reaches the target."""
    name, steps, reached, reason = record.name, list[Row](), False, ""
    for samples in _list_sizes(planned, record):
        try:
            row = planned.problems[name].row(
                record, samples, _count_draws(planned, record), warm=bool(steps)
            )
        except REFUSALS as refusal:
            reason = str(refusal)
            break
        steps.append(row)
        reached = bool(np.mean(row.errors) <= planned.target)
        if reached:
            break
    exact = planned.problems[name].row_of_exact(planned.draws)
    return Candidate(name, steps, exact, reached, reason)
