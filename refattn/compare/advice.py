"""What laws promise for given queries, keys and values: moments, predicted errors, a choice."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from .. import adapt, moments, theory
from ..arrays import checks, qkv
from ..arrays.heads import group_with_lead, grouped_lead
from ..arrays.library import Floats, to_host
from ..arrays.shown import held
from ..arrays.tables import Column, Table, count, digits, write_head
from ..arrays.words import with_known_keywords
from ..attention import softmax_attention
from ..registry import ESTIMATORS
from ..sampling import Gaussian
from ..theory.attention import features_to_hold, features_to_reach
from .measured import exact_and_size, places

PARTS = ("mean_norm", "trace", "condition", "effective_rank")  # of moments.Summary
QUANTILES = {"quantile_5": 0.05, "quantile_50": 0.5, "quantile_95": 0.95}
QUANTILE_ROWS = 2048  # at most so many queries, and keys, make the pairs of the quantiles
LAWS = ("rfa", "rfa-adapted", "is", "ra")  # estimators whose law is known
LAW_QUERIES = 128  # laws are evaluated for at most so many queries of a head
EXACT = "exact attention"
# Columns that narrow pages leave out, the first of them first.
_DROPPED = {"quantile_5": 1, "quantile_95": 1, "effective_rank_q": 2, "effective_rank_k": 2,
            "condition_q": 3, "condition_k": 3, "SDERF": 4, "OPRF": 5}  # fmt: skip


class Choice(NamedTuple):
    """The cheapest estimator that reaches the target."""

    estimator: str
    num_features: float | None  # S, if it has one
    cost_ratio: float  # relative to exact attention


@held()
class Advice(NamedTuple):
    """The result of `study`; arrays have leading axes as stated, then (...) over the heads.

    Attributes
    ----------
    scale, target, shrink, sizes
        The arguments of `study`; `scale` is the number that was used.
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
        Expected log of the second moment of a kernel estimate over the squared kernel, by proposal;
        0 is best.
    queries : int
        Number of evenly spaced queries of each head for which the formulas were evaluated.
    error : dict of arrays, shape (len(sizes), ...)
        Predicted relative error of an estimator; empty without values.
    inside : dict of arrays, shape (len(sizes), ...)
        Share of the queries for which the formula is valid.
    by_law : dict of arrays
        S that the formula gives for the target, whether or not it is valid there.
    holds_from : dict of arrays
        S from which the formula is valid for all queries.
    spread : dict of arrays
        Relative standard error of `by_law`, from using only some queries; that of `error` is half
        of it.
    error_of_mean : array, shape (...)
        Relative error of the mean of the values, as a stand-in for attention; nan without values.
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
    error_of_mean: Floats

    @property
    def heads(self) -> list[tuple[int, ...]]:
        """Indices of the heads."""
        return list(np.ndindex(self.lead))

    def predictions(self, name: str) -> list[float]:
        """Average the error over heads for each S; nan if the formula is invalid for any query."""
        pairs = zip(self.error[name], self.inside[name], strict=True)
        return [float(np.mean(e)) if np.all(share == 1) else math.nan for e, share in pairs]

    def standard_errors(self, name: str) -> list[float]:
        """Return standard errors of `predictions`, from using only some queries."""
        heads = math.prod(self.lead)
        with np.errstate(all="ignore"):  # of errors that are not finite
            return [
                float(np.linalg.norm(e * self.spread[name]) / (2 * heads)) for e in self.error[name]
            ]

    def promised(self, name: str) -> Floats:
        """Return the S that the formula gives for the target, where it is valid."""
        return np.maximum(self.by_law[name], self.holds_from[name])

    def recommended(self, head: tuple[int, ...]) -> Choice:
        """Choose the estimator with the fewest multiply-adds for the target, by valid formulas."""
        options = [Choice(EXACT, None, 1.0)]
        for name in self.by_law:
            samples = float(self.promised(name)[head])
            options.append(Choice(name, samples, self.cost(name, samples)))
        return min(options, key=lambda option: option.cost_ratio)

    def cost(self, estimator: str, samples: float) -> float:
        """Count multiply-adds of an estimator for a head, relative to exact attention."""
        n, m = self.rows
        quadratic = ESTIMATORS[estimator].has("quadratic")
        return samples * (n * m if quadratic else n + m) / (n * m)

    def tables(self) -> tuple[Table, Table]:
        """Return a table with a row for each head, and a table of predictions for each S.

        heads: the index `head`; `moments` in kernel coordinates (the fields of `moments.Summary`,
        and quantiles of |q_i + k_j|^2); the `eigenvalues` of the covariances of q and k,
        largest first; `log_excess` by proposal. With values also, by estimator:
        `num_features_by_law` for the target and its `relative_standard_error`, from using only some
        queries; `law_holds_from`, the S from which the formula is valid; and the `recommended`
        estimator.

        predictions: by estimator and S, the `error_mean` over heads (nan where the formula is not
        valid) and its `standard_error`; `error_per_head` (also where the formula is not valid); and
        the share of the queries for which the formula is valid, over all heads (`share_in_regime`)
        and for each (`share_in_regime_per_head`).
        """
        parts = {"moments": self.table, "log_excess": self.excess}
        if self.error:
            parts["num_features_by_law"] = self.by_law
            parts["law_holds_from"] = self.holds_from
            parts["relative_standard_error"] = self.spread
        columns = [Column("head", write_head)]
        for part, found in parts.items():
            show = digits if part in ("moments", "log_excess") else count
            columns += [Column(f"{part}.{x}", show, drop=_DROPPED.get(x, 0)) for x in found]
        columns += [Column(f"recommended.{x}", None) for x in Choice._fields if self.error]
        rows = []
        for index in self.heads:
            row: dict[str, Any] = {"head": list(index)}
            row |= {part: {x: float(y[index]) for x, y in parts[part].items()} for part in parts}
            row["eigenvalues"] = {x: y[index].tolist() for x, y in self.eigenvalues.items()}
            if self.error:
                row["recommended"] = self.recommended(index)._asdict()
            rows.append(row)
        predicted = [
            {
                "estimator": name,
                "samples": samples,
                "error_mean": self.predictions(name)[i],
                "standard_error": self.standard_errors(name)[i],
                "share_in_regime": float(np.mean(self.inside[name][i])),
                "error_per_head": error[i].tolist(),
                "share_in_regime_per_head": self.inside[name][i].tolist(),
            }
            for name, error in self.error.items()
            for i, samples in enumerate(self.sizes)
        ]
        names = ("estimator", "samples", "error_mean", "standard_error", "share_in_regime")
        predictions = Table("predictions", predicted, [Column(x) for x in names])
        return Table("heads", rows, columns), predictions


class _Question(NamedTuple):
    """What is asked of each head."""

    scale: float
    target: float
    sizes: list[int]
    estimate: Callable[[Floats], moments.Moments]


@with_known_keywords
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
) -> Advice:
    """Estimate moments, adapt to them, and predict errors; all in float64, head by head.

    No random numbers are used. With values it takes time proportional to m^2 for m keys: formulas
    are evaluated for at most `LAW_QUERIES` queries of a head, evenly spaced.

    Parameters
    ----------
    q, k, scale, track
        As in `compare.measure`; `track` wraps the sequence of heads.
    v : array, shape (..., m, d_v), dtype of `q`, optional
        Values, from which errors and the S for the target are predicted.
    sizes : sequence of int
        Numbers S of features or samples.
    target : float
        Relative error to be reached.
    shrink : bool, default False
        Shrink the covariances, for fewer rows than d^2.

    Returns
    -------
    Advice
        Moments, spectra, predicted errors and numbers of features.

    Raises
    ------
    TypeError, ValueError
        If an argument is unusable, if there is no head or no row, or if exact attention is not
        finite or is 0 in some head.

    Examples
    --------
    >>> import refattn
    >>> from refattn import compare
    >>> q, k, _ = refattn.load_sample()
    >>> found = compare.study(q, k)
    >>> found.heads[0], found.rows, found.advised
    ((0, 0), (128, 128), 1024)
    >>> bool(found.table["trace_q"][0, 0] > 0)
    True
    """
    qkv.check(q, k, k if v is None else v)
    scale = qkv.scale_or_default(scale, q.shape[-1], positive=True)
    target = checks.real("target", target, positive=True)
    sizes = checks.positive_integers("sizes", sizes)
    checks.flag("shrink", shrink)
    n, m, d = q.shape[-2], *k.shape[-2:]
    q, k, *values = (to_host(x) for x in (q, k, v) if x is not None)
    lead, heads = split_heads(q, k, values[0] if values else k)
    error_of_mean = np.full(lead, math.nan)
    if values:
        exact, size = exact_and_size(q, k, values[0], scale=scale)
        mean_of_v = softmax_attention(0 * q[..., :1, :], k, values[0])
        error_of_mean = np.linalg.norm(mean_of_v - exact, axis=(-2, -1)) / size

    def estimate(x: Floats) -> moments.Moments:
        estimated = moments.estimate(x)
        return moments.shrink(estimated) if shrink else estimated

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
    return Advice(
        scale=scale,
        target=target,
        shrink=shrink,
        sizes=list(sizes),
        rows=(n, m),
        lead=lead,
        advised=d * d,
        queries=min(n, LAW_QUERIES),
        error_of_mean=error_of_mean,
        **{part: stacked(part) for part in parts},
    )


def split_heads(
    q: Floats, k: Floats, v: Floats
) -> tuple[tuple[int, ...], list[tuple[tuple[int, ...], Floats, Floats, Floats]]]:
    """Return the shape of the heads, and views (index, q, k, v) of each, even of shared keys."""
    lead = grouped_lead(q, k, v)
    grouped, inner, _ = group_with_lead(q, k, v)
    if 0 in (*lead, q.shape[-2], k.shape[-2]):
        raise ValueError(
            f"`q` and `k` must have at least one head and one row, got shapes {q.shape} and "
            f"{k.shape}."
        )
    q, k, v = (np.broadcast_to(x, (*inner, *x.shape[-2:])) for x in grouped)
    pairs = zip(np.ndindex(lead), np.ndindex(inner), strict=True)
    return lead, [(head, q[i], k[i], v[i]) for head, i in pairs]


def _spaced(x: Floats, most: int) -> Floats:
    """Take at most so many rows, evenly spaced from the first to the last."""
    if len(x) <= most:
        return x
    return np.asarray(x[places(len(x), most)])


def _study_head(
    q: Floats, k: Floats, v: Floats | None, question: _Question, fitted: Gaussian
) -> dict[str, dict[str, Any]]:
    from scipy.spatial.distance import cdist

    root, estimate = math.sqrt(question.scale), question.estimate
    of_q, of_k = estimate(root * q), estimate(root * k)
    both = {"q": moments.summary(of_q), "k": moments.summary(of_k)}
    rows = [_spaced(root * x, QUANTILE_ROWS) for x in (q, k)]
    quantiles = np.quantile(cdist(rows[0], -rows[1], "sqeuclidean"), list(QUANTILES.values()))
    proposals = {
        "N(0, I)": None,
        "OPRF": adapt.oprf(of_q, of_k, scale=1.0),
        "SDERF": adapt.sderf(of_q, of_k, scale=1.0),
        "Gaussian": adapt.optimal_gaussian(of_q, of_k, scale=1.0),
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
            name: adapt.expected_log_excess(of_q, of_k, proposal, scale=1.0)
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
    """Evaluate the laws of a head, for evenly spaced queries."""
    few = _spaced(q, LAW_QUERIES)
    exact = softmax_attention(few, k, v, scale=question.scale)
    answers = {}
    for name, law in _list_laws(few, k, v, exact, question.scale, fitted).items():
        # The law of one sample, turned into that of several.
        laws = [type(law)(law.bias / s, law.variance / s, law.ess * s) for s in question.sizes]
        answers[name] = {
            "error": [theory.relative_error(law, exact) for law in laws],
            "inside": [np.mean(law.in_regime) for law in laws],
            "by_law": features_to_reach(question.target, law, exact),
            "holds_from": features_to_hold(law),
            "spread": _spread_of_queries(law, exact, len(q)),
        }
    return answers


def _list_laws(
    q: Floats, k: Floats, v: Floats, exact: Floats, scale: float, fitted: Gaussian
) -> dict[str, theory.Law]:
    """Compute the laws of one feature or sample."""
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


def _spread_of_queries(law: theory.Law, exact: Floats, count: int) -> float:
    """Return the relative standard error of the sum of variances over that of squares.

    That of a ratio of means, to first order, for queries taken at random without replacement.
    """
    taken = len(exact)
    if taken == count or taken < 2:
        return 0.0 if taken == count else math.inf
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        sums = [np.sum(x, axis=-1) for x in (law.variance, exact**2)]
        shares = [x / np.mean(x) for x in sums]
        return float(np.std(shares[0] - shares[1], ddof=1) * math.sqrt(1 / taken - 1 / count))
