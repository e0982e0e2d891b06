"""What to use for given queries, keys and values: what laws promise, and what is measured.

What `refattn profile` prints, as functions that return it: `study` tells what the moments of
queries and keys promise, and `search` measures how many features or samples a target takes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from . import adapt, moments, theory
from .arrays import checks, qkv
from .arrays.heads import broadcast_lead, group_heads
from .arrays.library import Floats
from .arrays.shown import held
from .attention import softmax_attention
from .compare import (
    QUADRATIC_QUERIES,
    REFUSALS,
    Problem,
    Row,
    exact_and_size,
    names,
    on_part,
    on_some,
    places,
    pose,
    record_of,
    seconds,
)
from .registry import ESTIMATORS, Estimator
from .sampling import Gaussian
from .theory.attention import features_to_hold, features_to_reach

__all__ = [
    "EXACT",
    "LAWS",
    "LAW_QUERIES",
    "PAIRS",
    "PARTS",
    "QUADRATIC_QUERIES",
    "QUANTILES",
    "QUANTILE_ROWS",
    "Candidate",
    "Choice",
    "Plan",
    "Profile",
    "Search",
    "foreseen",
    "plan",
    "search",
    "study",
]


def __dir__() -> list[str]:
    return __all__


PARTS = {  # of moments.Summary
    "mean_norm": "|mean {}|",
    "trace": "tr {}",
    "condition": "cond {}",
    "effective_rank": "rank {}",
}
QUANTILES = {"quantile_5": 0.05, "quantile_50": 0.5, "quantile_95": 0.95}
QUANTILE_ROWS = 2048  # at most so many queries, and keys, make the pairs of the quantiles
LAWS = ("rfa", "rfa-adapted", "is", "ra")  # estimators whose law is known
LAW_QUERIES = 128  # laws are evaluated for at most so many queries of a head
PAIRS = 2**21  # estimators are measured on heads with at most so many pairs of query and key
EXACT = "exact attention"
_LITTLE = 2**21  # pairs of query and key that take no time to speak of
_PART = 512  # rows that times are estimated by


class Choice(NamedTuple):
    """What reaches the target for least."""

    estimator: str
    num_features: float | None  # S, if it has one
    cost_ratio: float  # relative to exact attention


@held()
class Profile(NamedTuple):
    """What was found; arrays have shape (...) over the heads after what is stated.

    Attributes
    ----------
    scale, target, shrink, sizes
        As given; the scale is a number.
    rows : pair of int
        Numbers n of queries and m of keys in a head.
    lead : tuple of int
        Shape of the heads.
    advised : int
        d^2: with fewer rows covariances are rough.
    eigenvalues : dict of arrays, shape (..., d)
        Of the covariances of q and of k, largest first.
    table : dict of arrays
        Moments in kernel coordinates, and quantiles of |q_i + k_j|^2.
    excess : dict of arrays
        Expected log excess of the variance of a kernel estimate, by proposal; the least is 0.
    queries : int
        For how many evenly spaced queries of each head the laws were evaluated.
    error : dict of arrays, shape (S, ...)
        Relative error that the law of an estimator predicts; empty without values.
    inside : dict of arrays, shape (S, ...)
        Share of the queries that are in the regime of the law.
    by_law : dict of arrays
        S at which the law gives the target, whether or not it holds there.
    holds_from : dict of arrays
        S from which the law holds: all queries are in its regime.
    spread : dict of arrays
        Relative standard error of `by_law`, for not all queries were taken; that of `error` is
        half of it.
    """

    scale: float
    target: float
    shrink: bool
    sizes: list[int]
    rows: tuple[int, int]
    lead: tuple[int, ...]
    advised: int
    eigenvalues: dict[str, Floats]
    table: dict[str, Floats]
    excess: dict[str, Floats]
    queries: int
    error: dict[str, Floats]
    inside: dict[str, Floats]
    by_law: dict[str, Floats]
    holds_from: dict[str, Floats]
    spread: dict[str, Floats]

    @property
    def heads(self) -> list[tuple[int, ...]]:
        """Indices of the heads."""
        return list(np.ndindex(self.lead))

    def predictions(self, name: str) -> list[float]:
        """Mean error over heads for each S, nan if any query is outside the regime."""
        pairs = zip(self.error[name], self.inside[name], strict=True)
        return [float(np.mean(e)) if np.all(share == 1) else math.nan for e, share in pairs]

    def standard_errors(self, name: str) -> list[float]:
        """Of `predictions`, as not all queries were taken."""
        heads = math.prod(self.lead)
        with np.errstate(all="ignore"):  # of errors that are not finite
            return [
                float(np.linalg.norm(e * self.spread[name]) / (2 * heads)) for e in self.error[name]
            ]

    def promised(self, name: str) -> Floats:
        """S at which the law gives the target and holds."""
        return np.maximum(self.by_law[name], self.holds_from[name])

    def recommended(self, head: tuple[int, ...]) -> Choice:
        """What reaches the target for least by a law that holds, in multiply-adds."""
        options = [Choice(EXACT, None, 1.0)]
        for name in self.by_law:
            samples = float(self.promised(name)[head])
            options.append(Choice(name, samples, self.cost(name, samples)))
        return min(options, key=lambda option: option.cost_ratio)

    def cost(self, estimator: str, samples: float) -> float:
        """Multiply-adds of an estimator for a head, relative to exact attention."""
        n, m = self.rows
        quadratic = ESTIMATORS[estimator].has("quadratic")
        return samples * (n * m if quadratic else n + m) / (n * m)


class _Question(NamedTuple):
    """What is asked of each head."""

    scale: float
    target: float
    sizes: list[int]
    estimate: Callable[[Floats], moments.Moments]


def study(
    q: Floats,
    k: Floats,
    v: Floats | None = None,
    *,
    sizes: Sequence[int] = (8, 32, 128, 512),
    target: float = 0.1,
    scale: float | None = None,
    shrink: bool = False,
    track: Callable[[Sequence[Any]], Iterable[Any]] = iter,
) -> Profile:
    """Estimate moments, adapt to them, and predict errors; all in float64, head by head.

    No random numbers are used. With values it takes time proportional to m^2 for m keys: laws are
    evaluated for at most `LAW_QUERIES` queries of a head, evenly spaced.

    Parameters
    ----------
    q : NumPy array, shape (..., n, d), float32 or float64
        Queries.
    k : NumPy array, shape (..., m, d), dtype of `q`
        Keys.
    v : NumPy array, shape (..., m, d_v), dtype of `q`, optional
        Values, for the errors and what they say of S.
    sizes : sequence of int
        Numbers S of features or samples.
    target : float
        Relative error to be reached.
    scale : float, optional
        Factor on q . k, 1 / sqrt(d) by default.
    shrink : bool, default False
        Shrink the covariances, for fewer rows than d^2.
    track : callable
        Wraps the sequence of heads, for a bar of progress, say.

    Returns
    -------
    Profile
        Moments, spectra, errors, numbers of features by the laws.

    Raises
    ------
    TypeError, ValueError
        If an argument is unusable, if there is no head or no row, or if exact attention is not
        finite or is 0 in some head.

    Examples
    --------
    >>> import refattn
    >>> from refattn import profile
    >>> q, k, _ = refattn.load_sample()
    >>> found = profile.study(q, k)
    >>> found.heads[0], found.rows, found.advised
    ((0, 0), (128, 128), 1024)
    >>> bool(found.table["trace_q"][0, 0] > 0)
    True
    """
    qkv.check(q, k, k if v is None else v)
    found = checks.real("scale", scale, positive=True, optional=True)
    scale = q.shape[-1] ** -0.5 if found is None else found
    target = checks.real("target", target, positive=True)
    for size in sizes:
        checks.positive_integer("sizes", size)
    checks.flag("shrink", shrink)
    n, m, d = q.shape[-2], *k.shape[-2:]
    q, k, *values = (x.astype(np.float64) for x in (q, k, v) if x is not None)
    lead, heads = _each_head(q, k, values[0] if values else k)
    if values:
        exact_and_size(q, k, values[0], scale=scale)

    def estimate(x: Floats) -> moments.Moments:
        found = moments.estimate(x)
        return moments.shrink(found) if shrink else found

    fitted = adapt.fit(estimate(q), estimate(k), scale=scale)
    assert fitted.cov is not None
    assert fitted.gauge is not None
    mean = np.broadcast_to(fitted.mean, (*lead, d))
    cov, gauge = (np.broadcast_to(x, (*lead, d, d)) for x in (fitted.cov, fitted.gauge))
    question = _Question(scale, target, list(sizes), estimate)
    of_heads = [
        _study_head(
            *(q_h, k_h, v_h if values else None, question),
            Gaussian(mean[head], cov[head], gauge=gauge[head]),
        )
        for head, q_h, k_h, v_h in track(heads)
    ]

    def stacked(part: str) -> dict[str, Floats]:
        """Join the heads; what has an axis over S gets it first."""
        joined = {}
        for name in of_heads[0][part]:
            x = np.stack([head[part][name] for head in of_heads])
            x = x.reshape((*lead, *x.shape[1:]))
            joined[name] = np.moveaxis(x, -1, 0) if part in ("error", "inside") else x
        return joined

    parts = ("eigenvalues", "table", "excess", "error", "inside", "by_law", "holds_from", "spread")
    return Profile(
        scale=scale,
        target=target,
        shrink=shrink,
        sizes=list(sizes),
        rows=(n, m),
        lead=lead,
        advised=d * d,
        queries=min(n, LAW_QUERIES),
        **{part: stacked(part) for part in parts},
    )


def foreseen(q: Floats, k: Floats, v: Floats | None = None, *, scale: float | None = None) -> float:
    """About how many seconds `study` takes: a + b m^2 for each head, from two parts of one.

    Parameters
    ----------
    q, k, v, scale
        As in `study`.

    Returns
    -------
    float
        0 where there is little to do.

    Examples
    --------
    >>> import refattn
    >>> from refattn import profile
    >>> profile.foreseen(*refattn.load_sample())
    0.0
    """
    n, m = q.shape[-2], k.shape[-2]
    heads = math.prod(broadcast_lead(*group_heads(q, k, k)[0]))
    if heads * n * m <= _LITTLE:
        return 0.0
    head = [x[(0,) * (x.ndim - 2)] for x in (q, k, v) if x is not None]

    def timed(rows: int) -> float:
        start = time.perf_counter()
        with suppress(*REFUSALS):
            study(*(x[:rows] for x in head), scale=scale)
        return time.perf_counter() - start

    timed(2)  # what is imported first does not count
    most = min(m, _PART)
    found = timed(most)
    if m > most:
        half = most // 2
        slope = max(0.0, found - timed(half)) / (most**2 - half**2)
        found += slope * (m**2 - most**2)
    return float(heads * found)


def _each_head(
    q: Floats, k: Floats, v: Floats
) -> tuple[tuple[int, ...], list[tuple[tuple[int, ...], Floats, Floats, Floats]]]:
    """Shape of the heads, and views (index, q, k, v) of each, also where they share keys."""
    grouped, ungroup = group_heads(q, k, v)
    inner = broadcast_lead(*grouped)
    lead = ungroup(np.broadcast_to(0.0, (*inner, 1, 1))).shape[:-2]
    if 0 in (*lead, q.shape[-2], k.shape[-2]):
        raise ValueError(
            f"`q` and `k` must have at least one head and one row, got shapes {q.shape} and "
            f"{k.shape}."
        )
    q, k, v = (np.broadcast_to(x, (*inner, *x.shape[-2:])) for x in grouped)
    pairs = zip(np.ndindex(lead), np.ndindex(inner), strict=True)
    return lead, [(head, q[i], k[i], v[i]) for head, i in pairs]


def _spaced(x: Floats, most: int) -> Floats:
    """At most so many rows, evenly spaced from the first to the last."""
    if len(x) <= most:
        return x
    return np.asarray(x[places(len(x), most)])


def _study_head(
    q: Floats,
    k: Floats,
    v: Floats | None,
    question: _Question,
    fitted: Gaussian,
) -> dict[str, dict[str, Any]]:
    from scipy.spatial.distance import cdist

    root, estimate = math.sqrt(question.scale), question.estimate
    of_q, of_k = estimate(root * q), estimate(root * k)
    both = {"q": moments.summary(of_q), "k": moments.summary(of_k)}
    rows = [_spaced(root * x, QUANTILE_ROWS) for x in (q, k)]
    quantiles = np.quantile(cdist(rows[0], -rows[1], "sqeuclidean"), list(QUANTILES.values()))
    proposals = {
        "N(0, I)": None,
        "OPRF": adapt.oprf(of_q, of_k),
        "SDERF": adapt.sderf(of_q, of_k),
        "Gaussian": adapt.optimal_gaussian(of_q, of_k),
        "fit": fitted,
    }
    of_laws = {} if v is None else _study_laws(q, k, v, question, fitted)
    return {
        "eigenvalues": {name: x.eigenvalues for name, x in both.items()},
        "table": {
            **{f"{part}_{name}": getattr(x, part) for part in PARTS for name, x in both.items()},
            **dict(zip(QUANTILES, quantiles, strict=True)),
        },
        "excess": {
            name: adapt.expected_log_excess(of_q, of_k, proposal)
            for name, proposal in proposals.items()
        },
        **{
            part: {name: answer[part] for name, answer in of_laws.items()}
            for part in ("error", "inside", "by_law", "holds_from", "spread")
        },
    }


def _study_laws(
    q: Floats, k: Floats, v: Floats, question: _Question, fitted: Gaussian
) -> dict[str, dict[str, Any]]:
    """Ask the laws of a head, for evenly spaced queries."""
    few = _spaced(q, LAW_QUERIES)
    exact = softmax_attention(few, k, v, scale=question.scale)
    answers = {}
    for name, law in _laws(few, k, v, exact, question.scale, fitted).items():
        laws = [_rescaled(law, samples) for samples in question.sizes]
        answers[name] = {
            "error": [theory.relative_error(law, exact) for law in laws],
            "inside": [np.mean(law.in_regime) for law in laws],
            "by_law": features_to_reach(question.target, law, exact),
            "holds_from": features_to_hold(law),
            "spread": _spread(law, exact, len(q)),
        }
    return answers


def _laws(
    q: Floats, k: Floats, v: Floats, exact: Floats, scale: float, fitted: Gaussian
) -> dict[str, theory.Law]:
    """The laws of one feature or sample."""
    attention_law = partial(theory.attention_law, q, k, v, num_features=1, scale=scale)
    rfa = attention_law()
    return {
        "rfa": rfa,
        "rfa-adapted": attention_law(proposal=fitted),
        "is": _unnormalised(rfa, exact),
        "ra": theory.randomized_attention_law(q, k, v, num_samples=1, scale=scale),
    }


def _unnormalised(law: theory.Law, exact: Floats) -> theory.Law:
    """Turn the law of one frequency of RFA into that of IS: second moments not about the mean."""
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        weight = 1 / law.ess[..., None]
        variance = law.variance - 2 * law.bias * exact + (weight - 1) * exact**2
    variance = np.where(np.isnan(variance), math.inf, np.maximum(variance, 0.0))
    return theory.Law(np.zeros_like(variance), variance, law.ess)


def _spread(law: theory.Law, exact: Floats, count: int) -> float:
    """Relative standard error of the sum of variances over that of squares, of some of the queries.

    That of a ratio of means, to first order, for queries taken at random without replacement.
    """
    taken = len(exact)
    if taken == count or taken < 2:
        return 0.0 if taken == count else math.inf
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        sums = [np.sum(x, axis=-1) for x in (law.variance, exact**2)]
        shares = [x / np.mean(x) for x in sums]
        return float(np.std(shares[0] - shares[1], ddof=1) * math.sqrt(1 / taken - 1 / count))


def _rescaled(law: theory.Law, samples: int) -> theory.Law:
    """Turn the law of one sample into that of several."""
    count = float(samples)
    return type(law)(law.bias / count, law.variance / count, law.ess * count)


# Measured


class Candidate(NamedTuple):
    """What was measured of an estimator.

    Attributes
    ----------
    estimator : str
        Its name.
    steps : list of compare.Row
        Errors and time at each S tried, the last first to reach the target if `reached`.
    exact : compare.Row
        Of exact attention on the same queries, in the dtype of the arrays, timed right after.
    reached : bool
        Whether the mean error of the last step is at most the target.
    reason : str
        Why a larger S was not tried: what the estimator said; empty if it was not needed, or the
        largest allowed.
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
    """What is to be measured, on what, and about how long it takes: see `plan`.

    Attributes
    ----------
    heads : list of tuples
        Indices of the heads that are taken, evenly spaced.
    lead : tuple of int
        Shape of all heads.
    queries : int
        How many queries of each head are taken for estimators whose time grows with n m S.
    target, draws, seed, most
        As given; `most` is a number.
    seconds : float
        Estimated time, at most: for all S up to `most`.
    problems : dict
        By estimator, what it is measured on.
    """

    heads: list[tuple[int, ...]]
    lead: tuple[int, ...]
    queries: int
    target: float
    draws: int
    seed: int
    most: int
    seconds: float
    problems: dict[str, Problem]


@held()
class Search(NamedTuple):
    """What was measured: the plan, and the candidates in its order."""

    plan: Plan
    candidates: list[Candidate]

    def standard_error(self, row: Row) -> float:
        """Of a mean error: over draws, if there are any, and for not all heads were taken."""
        heads, every = row.per_head.size, math.prod(self.plan.lead)
        over_draws = 0.0 if len(row.errors) == 1 else row.standard_error
        if heads == every:
            return over_draws
        spread = float(np.std(row.per_head, ddof=1)) if heads > 1 else math.nan
        return math.hypot(over_draws, spread * math.sqrt(1 / heads - 1 / every))

    @property
    def ranking(self) -> list[Choice]:
        """What reaches the target, exact attention too, from what takes least time."""
        reached = [x.choice for x in self.candidates if x.reached]
        return sorted([Choice(EXACT, None, 1.0), *reached], key=lambda choice: choice.cost_ratio)


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
    """Choose what `search` measures estimators on, and estimate how long it will take.

    Heads are taken as far as they have `PAIRS` pairs of query and key, one at least. An estimator
    whose time grows with n m S, and whose queries have nothing to do with each other, is measured
    on `QUADRATIC_QUERIES` queries of each. Both are evenly spaced.

    Parameters
    ----------
    q : NumPy array, shape (..., n, d), float32 or float64
        Queries.
    k : NumPy array, shape (..., m, d), dtype of `q`
        Keys.
    v : NumPy array, shape (..., m, d_v), dtype of `q`
        Values.
    estimators : iterable of str, optional
        Names as in `compare.measure`; all by default.
    target : float
        Relative error to be reached.
    most : int, optional
        No larger S is tried; 4 max(n, m) by default.
    draws : int
        Independent draws of random numbers at each S, at least 2.
    seed : int
        Draws have seeds as in `compare.measure`.
    scale : float, optional
        Factor on q . k, 1 / sqrt(d) by default.

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
    >>> from refattn import profile
    >>> planned = profile.plan(*refattn.load_sample(), estimators=["rfa", "ra"])
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
    lead, heads = _each_head(q, k, v)
    taken = places(len(heads), max(1, PAIRS // max(1, n * m)))
    heads = [heads[i] for i in taken]
    q, k, v = (np.stack([head[i] for head in heads]) for i in (1, 2, 3))
    queries = min(n, QUADRATIC_QUERIES)
    whole = pose(q, k, v, scale=scale, seed=seed)
    part = on_some(whole, queries)
    problems = {x.name: part if on_part(x) else whole for x in records}
    planned = Plan(
        *([head[0] for head in heads], lead, queries, target, draws, seed, most, 0.0, problems)
    )
    return planned._replace(seconds=sum(_seconds(planned, record) for record in records))


def _sizes(planned: Plan, record: Estimator) -> list[int | None]:
    """Powers of 2 that an estimator is tried at, or one of no size.

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
    if not record.has("any-size"):  # proposals have queries of their own, other samples keys
        most = min(most, m, n if record.has("proposals") else m)
    return [2**i for i in range(most.bit_length())]


def _draws(planned: Plan, record: Estimator) -> int:
    return planned.draws if record.has("random") else 1


def _seconds(planned: Plan, record: Estimator) -> float:
    """Time at all S that may be tried."""
    problem, draws = planned.problems[record.name], _draws(planned, record)
    return seconds(problem, record, _sizes(planned, record), draws)


def search(planned: Plan, *, track: Callable[[Sequence[Any]], Iterable[Any]] = iter) -> Search:
    """Find the smallest power of 2 at which the error of each estimator reaches the target.

    Windows of chunks begin near the root of the number of keys, where time is least.

    The error is that of `compare.measure`, averaged over draws and heads.

    Parameters
    ----------
    planned : Plan
        What `plan` returns.
    track : callable
        Wraps the sequence of estimators, for a bar of progress, say.

    Returns
    -------
    Search
        Errors with standard errors, and times, at each S tried.

    Raises
    ------
    ValueError
        If every estimator refuses.

    Examples
    --------
    >>> import refattn
    >>> from refattn import profile
    >>> planned = profile.plan(*refattn.load_sample(), estimators=["ra"], target=0.3)
    >>> [(row.samples, row.per_head.shape) for row in profile.search(planned).candidates[0].steps]
    [(1, (8,)), (2, (8,)), (4, (8,)), (8, (8,)), (16, (8,)), (32, (8,))]
    """
    found = [_doubled(planned, ESTIMATORS[name]) for name in track(list(planned.problems))]
    if found and not any(candidate.steps for candidate in found):
        raise ValueError(f"{found[0].estimator}: {found[0].reason}")
    return Search(planned, found)


def _doubled(planned: Plan, record: Estimator) -> Candidate:
    """Double S, or take chunks of more terms, until the mean error reaches the target."""
    name, steps, reached, reason = record.name, list[Row](), False, ""
    for samples in _sizes(planned, record):
        try:
            row = planned.problems[name].row(
                record, samples, _draws(planned, record), warm=bool(steps)
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
