"""What the moments of queries and keys promise: adaptation, error, cost.

What `refattn moments` prints, as a function that returns it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from . import _validate, adapt, moments, theory
from ._heads import broadcast_lead, group_heads
from .attention import softmax_attention
from .compare import exact_and_size
from .registry import ESTIMATORS
from .sampling import Gaussian
from .theory.attention import features_to_reach

__all__ = [
    "LAWS",
    "LAW_KEYS",
    "LAW_QUERIES",
    "PARTS",
    "QUANTILES",
    "QUANTILE_ROWS",
    "Profile",
    "study",
]

_Array = npt.NDArray[Any]

PARTS = {  # of moments.Summary
    "mean_norm": "|mean {}|",
    "trace": "tr {}",
    "condition": "cond {}",
    "effective_rank": "rank {}",
}
QUANTILES = {"quantile_5": 0.05, "quantile_50": 0.5, "quantile_95": 0.95}
QUANTILE_ROWS = 2048  # at most so many queries, and keys, make the pairs of the quantiles
LAW_KEYS, LAW_QUERIES = 1024, 256  # with more keys, laws are evaluated for so many queries
LAWS = ("rfa", "rfa-adapted", "is", "ra")  # estimators whose law is known


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
    error : dict of arrays, shape (S, ...)
        Relative error that the law of an estimator predicts; empty without values.
    inside : dict of arrays, shape (S, ...)
        Share of the queries that are in the regime of the law.
    needed : dict of arrays
        S that reaches the target, by estimator.
    """

    scale: float
    target: float
    shrink: bool
    sizes: list[int]
    rows: tuple[int, int]
    lead: tuple[int, ...]
    advised: int
    eigenvalues: dict[str, _Array]
    table: dict[str, _Array]
    excess: dict[str, _Array]
    error: dict[str, _Array]
    inside: dict[str, _Array]
    needed: dict[str, _Array]

    @property
    def heads(self) -> list[tuple[int, ...]]:
        """Indices of the heads."""
        return list(np.ndindex(self.lead))

    def predictions(self, name: str) -> list[float]:
        """Mean error over heads for each S, nan if any query is outside the regime."""
        pairs = zip(self.error[name], self.inside[name], strict=True)
        return [float(np.mean(e)) if np.all(share == 1) else math.nan for e, share in pairs]

    def recommended(self, head: tuple[int, ...]) -> tuple[str, float | None, float]:
        """Name, S and cost relative to exact attention of what reaches the target for least."""
        options: list[tuple[str, float | None, float]] = [("exact attention", None, 1.0)]
        for name, needed in self.needed.items():
            samples = float(needed[head])
            options.append((name, samples, self.cost(name, samples)))
        return min(options, key=lambda option: option[2])

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
    estimate: Callable[[_Array], moments.Moments]


def study(
    q: _Array,
    k: _Array,
    v: _Array | None = None,
    *,
    sizes: Sequence[int] = (8, 32, 128, 512),
    target: float = 0.1,
    scale: float | None = None,
    shrink: bool = False,
    track: Callable[[Sequence[Any]], Iterable[Any]] = iter,
) -> Profile:
    """Estimate moments, adapt to them, and predict errors; all in float64, head by head.

    No random numbers are used. With values it takes time proportional to m^2 for m keys.

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
        Moments, spectra, errors, numbers of features.

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
    _validate.attention(q, k, k if v is None else v)
    found = _validate.real("scale", scale, positive=True, optional=True)
    scale = q.shape[-1] ** -0.5 if found is None else found
    target = _validate.real("target", target, positive=True)
    for size in sizes:
        _validate.positive_integer("sizes", size)
    _validate.flag("shrink", shrink)
    n, m, d = q.shape[-2], *k.shape[-2:]
    q, k, *values = (x.astype(np.float64) for x in (q, k, v) if x is not None)
    lead, heads = _each_head(q, k, values[0] if values else k)
    if not heads or 0 in (n, m):
        raise ValueError(
            f"`q` and `k` must have at least one head and one row, got shapes {q.shape} and "
            f"{k.shape}."
        )
    if values:
        exact_and_size(q, k, values[0], scale=scale)

    def estimate(x: _Array) -> moments.Moments:
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

    def stacked(part: str) -> dict[str, _Array]:
        """Join the heads; what has an axis over S gets it first."""
        joined = {}
        for name in of_heads[0][part]:
            x = np.stack([head[part][name] for head in of_heads])
            x = x.reshape((*lead, *x.shape[1:]))
            joined[name] = np.moveaxis(x, -1, 0) if part in ("error", "inside") else x
        return joined

    parts = ("eigenvalues", "table", "excess", "error", "inside", "needed")
    return Profile(
        *(scale, target, shrink, list(sizes), (n, m), lead, d * d),
        *(stacked(part) for part in parts),
    )


def _each_head(
    q: _Array, k: _Array, v: _Array
) -> tuple[tuple[int, ...], list[tuple[tuple[int, ...], _Array, _Array, _Array]]]:
    """Shape of the heads, and views (index, q, k, v) of each, also where they share keys."""
    grouped, ungroup = group_heads(q, k, v)
    inner = broadcast_lead(*grouped)
    lead = ungroup(np.broadcast_to(0.0, (*inner, 1, 1))).shape[:-2]
    q, k, v = (np.broadcast_to(x, (*inner, *x.shape[-2:])) for x in grouped)
    pairs = zip(np.ndindex(lead), np.ndindex(inner), strict=True)
    return lead, [(head, q[i], k[i], v[i]) for head, i in pairs]


def _spaced(x: _Array, most: int) -> _Array:
    """At most so many rows, evenly spaced from the first to the last."""
    if len(x) <= most:
        return x
    return np.asarray(x[np.linspace(0, len(x) - 1, most).round().astype(int)])


def _study_head(
    q: _Array,
    k: _Array,
    v: _Array | None,
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
    error, inside, needed = {}, {}, {}
    if v is not None:
        few = _spaced(q, LAW_QUERIES if len(k) > LAW_KEYS else len(q))
        exact = softmax_attention(few, k, v, scale=question.scale)
        for name, law in _laws(few, k, v, question.scale, fitted).items():
            laws = [_rescaled(law, samples) for samples in question.sizes]
            error[name] = [theory.relative_error(law, exact) for law in laws]
            inside[name] = [np.mean(law.in_regime) for law in laws]
            if name in _NEEDED:
                needed[name] = _NEEDED[name](question.target, law, exact)
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
        "error": error,
        "inside": inside,
        "needed": needed,
    }


def _laws(q: _Array, k: _Array, v: _Array, scale: float, fitted: Gaussian) -> dict[str, theory.Law]:
    """The laws of one feature or sample."""
    attention_law = partial(theory.attention_law, q, k, v, num_features=1, scale=scale)
    return {
        "rfa": attention_law(),
        "rfa-adapted": attention_law(proposal=fitted),
        "is": theory.importance_sampling_law(q, k, v, num_features=1, scale=scale),
        "ra": theory.randomized_attention_law(q, k, v, num_samples=1, scale=scale),
    }


def _rescaled(law: theory.Law, samples: int) -> theory.Law:
    """Turn the law of one sample into that of several."""
    count = float(samples)
    return type(law)(law.bias / count, law.variance / count, law.ess * count)


def _features_for(target: float, law: theory.Law, exact: _Array) -> _Array:
    """S for which a ratio of averages reaches the target."""
    return features_to_reach(target, law, exact)


def _samples_for(target: float, law: theory.Law, exact: _Array) -> _Array:
    """S for which the mean of independent unbiased samples reaches the target."""
    count = (theory.relative_error(law, exact) / target) ** 2
    return np.maximum(np.ceil(count * (1 - 1e-12)), 1.0)


# What may be recommended, and how S follows from the law of one sample.
_NEEDED = {"rfa": _features_for, "rfa-adapted": _features_for, "ra": _samples_for}
