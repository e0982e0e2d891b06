"""Texts of estimators, of one query each: what its law is derived from, step by step.

The formulas of `naive` have the same value, and one order, that of "pairs" below: they divide
before they sum, which no fast kernel does, and evaluate all queries at once, which here would be
derived for each of them. So texts are written for one query, in the orders of kernels; what has no
order, which keys there are where and the weights of samples, is that of `naive`.

Arrays have one more axis, the first, of copies. Frequencies that are None are the means of their
distributions. Steps are in one of several orders:

* "samples": weights e^(score - maximum) are summed over the keys of each sample, and then over
  samples, and divided last;
* "pairs": as formulas are printed, each key has a weight e^(score - log normaliser);
* "features": products of features of the query and of keys, each over their largest, are weights;
* "states": features of keys are summed first, with the values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .... import naive
from ....arrays.library import untraced
from ....naive.lara import chunks_of_proposals, log_alpha
from ....naive.near_and_far import chunks_seen
from ....naive.terms import of_library

_Seen = npt.NDArray[np.bool_]
# Where kernels subtract another number than the row's largest score, its weight is no 1, which
# would be exact in any type: the digits are those for which a type is widest.
_OTHER_TOP = 2.0**-20


class Query(NamedTuple):
    """A query of a head, what it sees, and the options of the estimator."""

    at: int
    of: tuple[int, int]  # numbers of queries and keys
    seen: _Seen  # keys, (m,)
    there: _Seen  # keys that are not masked
    causal: bool
    options: Mapping[str, Any]
    order: str

    @property
    def logs(self) -> bool:
        """Tell whether weights are e^(score - log normaliser)."""
        return self.order == "pairs"

    def tell(self, question: Callable[..., Any], q: Any, k: Any, *args: Any, **options: Any) -> Any:
        """Ask a term of `naive` which keys there are, whatever numbers these are."""
        return of_library(question)(untraced(q)[0], untraced(k)[0], *args, **options)

    def take(self, q: Any) -> Any:
        """Take it of all queries."""
        return q[:, self.at : self.at + 1]

    def average(self, scores: Any, values: Any, seen: Any) -> Any:
        """Average values with weights e^score, which are divided by their sum last or first."""
        if self.logs:
            return _divide_weights(scores, seen)[0] @ values
        return _average(scores, values, seen)[0]


def write_randomized(query: Query, q: Any, k: Any, v: Any, omega: Any = None) -> Any:
    """Average over the samples of a query, (..., S, d), means of the values (RA)."""
    if omega is None:  # the mean of its distribution
        q = query.take(q)
        omega = q + query.average(q @ k.mT, k, query.seen)
    xp, scores = q.__array_namespace__(), omega @ k.mT - _half_squares(k)
    if query.logs:
        weights, _ = _divide_weights(scores, query.seen)
        return xp.mean(weights, axis=-2, keepdims=True) @ v
    return xp.mean(_average(scores, v, query.seen)[0], axis=-2, keepdims=True)


def write_proposals(
    query: Query, q: Any, k: Any, v: Any, omega: Any = None, centres: Any = None
) -> Any:
    """Average over samples of several proposals (LARA)."""
    xp, x = q.__array_namespace__(), query.options
    q_mean, centres, there = _mean_proposals(query, q, k, centres)
    omega = centres if omega is None else omega
    every = x["weighting"] == "query-over-queries"  # else a query has no need of others
    own, row = q if every else query.take(q), query.at if every else 0
    about = q_mean, centres, there, x["weighting"], x["beta"]
    log_weight = of_library(log_alpha)(own, omega, *about)
    row = min(row, log_weight.shape[-2] - 1)
    log_weight, q = log_weight[:, row : row + 1], query.take(q)
    some = untraced(log_weight)[0] > -math.inf
    log_weight = xp.where(some, log_weight, 0.0)
    if query.logs:
        return query.average(_estimate_logs(q, k, omega, log_weight, some), v, query.seen)
    if query.order != "samples":
        of_query = q @ omega.mT + log_weight
        total, _ = _sum_features(query, of_query, (k, v, omega), query.seen, some)
        return total[..., :-1] / total[..., -1:]
    means, log_size = _attend_samples(k, v, omega, query.seen)
    return query.average(q @ omega.mT + log_weight + log_size, means, some)


def write_near_and_features(query: Query, q: Any, k: Any, v: Any, omega: Any) -> Any:
    """Attend to near keys, and to others through random features."""
    xp = q.__array_namespace__()
    near = query.tell(naive.visible, q, k, window=query.options["window"])[query.at]
    q = query.take(q)
    of_query, size = _half_squares(q) + math.log(omega.shape[-2]), omega.shape[-2]
    shown = np.append(query.seen & near, True)
    if query.logs:
        estimates = _estimate_logs(q, k, omega, 0.0) - of_query
        return query.average(xp.where(near, q @ k.mT, estimates), v, query.seen)
    if query.order != "samples":
        far, top = _sum_features(query, q @ omega.mT - of_query, (k, v, omega), query.seen & ~near)
        scores, values = q @ k.mT, xp.concat([v, xp.ones_like(v[..., :1])], axis=-1)
        both = xp.concat([scores, 0.0 * scores[..., :1] + top], axis=-1)
        e, *_ = _raise(both, shown, _OTHER_TOP)
        total = e[..., :-1] @ values + far * e[..., -1:]
        return total[..., :-1] / total[..., -1:]
    means, log_size = _attend_samples(k, v, omega, query.seen & ~near)
    scores = xp.concat([q @ k.mT, q @ omega.mT - of_query + log_size], axis=-1)
    seen = np.append(query.seen & near, np.full(size, np.any(query.seen & ~near)))
    return _average(scores, xp.concat([v, means], axis=-2), seen, _OTHER_TOP)[0]


def write_projections(query: Query, q: Any, k: Any, v: Any, omega: Any) -> Any:
    """Average values with products of ReLU features as weights."""
    xp, epsilon = q.__array_namespace__(), query.options["kernel_epsilon"]
    phi, psi = (xp.maximum(x @ omega.mT, 0.0) + epsilon for x in (query.take(q), k))
    psi = xp.where(query.seen[:, None], psi, 0.0)
    values = xp.concat([v, xp.ones_like(v[..., :1])], axis=-1)
    if query.logs:
        weights = phi @ psi.mT
        return weights / xp.sum(weights, axis=-1, keepdims=True) @ v
    total = phi @ (psi.mT @ values) if query.order == "states" else phi @ psi.mT @ values
    return total[..., :-1] / total[..., -1:]


def write_importance(query: Query, q: Any, k: Any, v: Any, omega: Any, log_weight: Any) -> Any:
    """Sum over samples, over the exact normaliser."""
    xp, q = q.__array_namespace__(), query.take(q)
    of_query = _half_squares(q) + math.log(omega.shape[-2])
    _, lse = _divide_weights(q @ k.mT, query.seen)
    if query.logs:
        logs = _estimate_logs(q, k, omega, log_weight) - of_query - lse
        return xp.where(query.seen, xp.exp(logs), 0.0) @ v
    if query.order != "samples":
        logs = q @ omega.mT + log_weight - of_query
        total, top = _sum_features(query, logs, (k, v, omega), query.seen)
        return total[..., :-1] * xp.exp(top - lse)
    means, log_size = _attend_samples(k, v, omega, query.seen)
    return xp.exp(q @ omega.mT + log_weight - of_query + log_size - lse) @ means


def _mean_proposals(query: Query, q: Any, k: Any, centres: Any) -> tuple[Any, Any, Any]:
    """Return mean queries of chunks, means of proposals, and which of these the query has."""
    xp, count = q.__array_namespace__(), query.options["num_proposals"]
    about = count, query.there[None], query.causal
    of_queries, of_keys = query.tell(chunks_of_proposals, q, k, *about)
    q_mean = _average_by(of_queries, count, q)
    centres = q_mean + _average_by(of_keys, count, k) if centres is None else centres
    if not query.causal:
        return q_mean, centres, np.ones((1, count), bool)
    centres = xp.concat([0.0 * centres[..., :1, :], centres[..., :-1, :]], axis=-2)
    return q_mean, centres, (np.arange(count) <= of_queries[query.at])[None]


def _average_by(of: Any, count: int, x: Any) -> Any:
    """Average rows of each of so many chunks, which these are of."""
    members = 1.0 * (of == np.arange(count)[:, None])
    return members @ x / np.maximum(np.sum(members, -1, keepdims=True), 1)


class _Chunks:
    """Keys and values of a head in chunks, (..., C, w, d), and their means."""

    def __init__(self, query: Query, q: Any, k: Any, v: Any) -> None:
        about = query.options["window"], query.there[None], query.causal
        member, seen = query.tell(chunks_seen, q, k, *about)
        self.near, self.far = (x[query.at] for x in seen)
        self.more = len(member) * about[0] - query.of[1]
        padded = np.append(query.there, np.zeros(self.more, bool))
        self.there = padded.reshape(len(member), about[0], 1)
        self.size = np.sum(self.there, 1)
        self.keys, self.values = self._cut(k), self._cut(v)
        self.mean, self.mean_value = self.average(self.keys), self.average(self.values)

    def _cut(self, x: Any) -> Any:
        xp, none = x.__array_namespace__(), np.zeros((*x.shape[:-2], self.more, x.shape[-1]))
        whole = xp.concat([x, none], axis=-2) if self.more else x
        return xp.reshape(whole, (*x.shape[:-2], *self.there.shape[:2], x.shape[-1]))

    def average(self, x: Any) -> Any:
        """Average rows of each chunk."""
        xp = x.__array_namespace__()
        total = xp.sum(xp.where(self.there, x, 0.0), axis=-2, keepdims=True)[..., 0, :]
        return total / np.maximum(self.size, 1)

    def attend(self, query: Query, scores: Any, values: Any, arrays: tuple[Any, Any, Any]) -> Any:
        """Average values of near keys, and of other chunks."""
        q, k, v = arrays
        xp = q.__array_namespace__()
        scores = xp.concat([query.take(q) @ k.mT, scores], axis=-1)
        values, seen = xp.concat([v, values], axis=-2), np.append(self.near, self.far)
        return query.average(scores, values, seen)


def write_chunks(query: Query, q: Any, k: Any, v: Any, omega: Any = None) -> Any:
    """Attend to near keys, and to a summary of each other chunk (EVA)."""
    chunks, (n, m) = _Chunks(query, q, k, v), query.of
    if omega is None:
        own = (np.arange(n) + m - n) // query.options["window"]
        omega = _average_by(own, len(chunks.far), q) + chunks.mean
    scores = (chunks.keys @ omega[..., None]).mT - _half_squares(chunks.keys)
    there = np.swapaxes(chunks.there, 1, 2)
    values = _average(scores, chunks.values, there)[0][..., 0, :]
    scores = query.take(q) @ chunks.mean.mT
    if query.options["log_size"]:
        scores = scores + np.log(np.maximum(chunks.size, 1)).T
    return chunks.attend(query, scores, values, (q, k, v))


def write_moments(query: Query, q: Any, k: Any, v: Any) -> Any:
    """Attend to near keys, and to the moments of each other chunk."""
    chunks, xp = _Chunks(query, q, k, v), q.__array_namespace__()
    apart, v_apart = (
        xp.where(chunks.there, x - mean[..., None, :], 0.0)
        for x, mean in ((chunks.keys, chunks.mean), (chunks.values, chunks.mean_value))
    )
    count, of_query = np.maximum(chunks.size, 1)[:, :, None], query.take(q)[:, None]
    if query.logs:  # covariances first
        along = of_query @ (apart.mT @ apart / count)
        spread = xp.sum(along * of_query, axis=-1)
        turned = of_query @ (apart.mT @ v_apart / count)
    else:
        along = of_query @ apart.mT
        spread, turned = xp.sum(along * along, axis=-1) / count[..., 0], along @ v_apart / count
    scores = query.take(q) @ chunks.mean.mT + spread.mT / 2
    scores = scores + np.log(np.maximum(chunks.size, 1)).T
    return chunks.attend(query, scores, chunks.mean_value + turned[..., 0, :], (q, k, v))


def write_coreset(query: Query, q: Any, k: Any, v: Any, indices: Any) -> Any:
    """Attend to a few keys, with what they carry of all keys, or of the others."""
    xp, taken = q.__array_namespace__(), untraced(indices)[0, :, 0].astype(int)
    _, first = np.unique(untraced(k)[0][taken], axis=0, return_index=True)
    first = np.sort(first)
    taken = taken[first][query.there[taken[first]]]  # of equal keys the first counts
    mean = xp.sum(xp.where(query.there[:, None], k, 0.0), axis=-2, keepdims=True)
    k = xp.where(query.there[:, None], k - mean / max(np.sum(query.there), 1), 0.0)
    chosen, q = xp.take(k, taken, axis=-2), query.take(q)
    half, scores = _half_squares(chosen), chosen @ k.mT
    gram = xp.exp(chosen @ chosen.mT - half - half.mT)
    one = xp.ones_like(v[..., :1])
    values, seen = xp.concat([v, one], axis=-1), query.there.copy()
    if query.logs:
        of_keys = _half_squares(k)
        top = float(np.max(untraced(of_keys)[0][0, query.there], initial=0.0))
        kernel = xp.exp(scores - of_keys - half.mT) * xp.exp(of_keys - top)
        weights, _ = _divide_weights(q @ chosen.mT - half, np.ones(len(taken), bool))
        total = weights @ _eliminate(gram, xp.where(seen, kernel, 0.0) @ values)
        return total[..., :-1] / total[..., -1:]
    seen[taken] = False
    means, log_size = _average(scores, values, seen)
    log_size = log_size - half.mT
    top = np.max(untraced(log_size)[0])
    carried = _eliminate(gram, xp.exp(log_size - top) * means)
    both = xp.concat([xp.take(values, taken, axis=-2), carried], axis=-2)
    scores = xp.concat([q @ chosen.mT, q @ chosen.mT - half + top], axis=-1)
    e, *_ = _raise(scores, np.ones(2 * len(taken), bool))
    total = e @ both
    return total[..., :-1] / total[..., -1:]


def _eliminate(a: Any, b: Any) -> Any:
    """Solve a x = b for a positive definite matrix, by elimination."""
    xp, size = a.__array_namespace__(), a.shape[-1]
    rows = xp.concat([a, b], axis=-1)
    for s in range(size):
        row = rows[..., s : s + 1, :] / rows[..., s : s + 1, s : s + 1]
        rows = xp.where(np.arange(size)[:, None] == s, row, rows - rows[..., :, s : s + 1] * row)
    return rows[..., size:]


def _half_squares(x: Any) -> Any:
    """Return half the squares of rows as a row, (..., 1, m)."""
    return x.__array_namespace__().sum(x * x, axis=-1)[..., None, :] / 2


def _raise(scores: Any, seen: Any, below: float = 0.0) -> tuple[Any, Any, Any, Any]:
    """Return e^(score - top) of the keys seen, their sum, and the top and scores.

    The top is the largest score, or so far below it.
    """
    xp = scores.__array_namespace__()
    top = np.max(np.where(seen, untraced(scores), -math.inf), -1, keepdims=True)
    top = xp.where(top > -math.inf, np.where(top > -math.inf, top - below, 0.0), 0.0)
    scores = xp.where(seen, scores, top)
    e = xp.where(seen, xp.exp(scores - top), 0.0)
    mass = xp.sum(e, axis=-1, keepdims=True)
    return e, xp.where(mass == 0, 1.0, mass), top, scores


def _average(scores: Any, values: Any, seen: Any, below: float = 0.0) -> tuple[Any, Any]:
    """Average values with weights e^score; 0 of none. Also return the logs of the weights' sums."""
    e, mass, top, _ = _raise(scores, seen, below)
    return e @ values / mass, top + top.__array_namespace__().log(mass)


def _divide_weights(scores: Any, seen: Any) -> tuple[Any, Any]:
    """Return weights e^(score - log normaliser), and the log normaliser."""
    _, mass, top, scores = _raise(scores, seen)
    xp = scores.__array_namespace__()
    lse = top + xp.log(mass)
    return xp.where(seen, xp.exp(scores - lse), 0.0), lse


def _attend_samples(k: Any, v: Any, omega: Any, seen: _Seen) -> tuple[Any, Any]:
    """Average values for each sample; the logs of their weights are a row, (..., 1, S)."""
    means, lse = _average(omega @ k.mT - _half_squares(k), v, seen)
    return means, lse.mT


def _sum_features(
    query: Query, of_query: Any, arrays: Any, seen: Any, some: Any = True
) -> tuple[Any, Any]:
    """Sum values, and 1, with products of features as weights; also return the log of a factor."""
    k, v, omega = arrays
    xp, (phi, _, most, _) = k.__array_namespace__(), _raise(of_query, some)
    of_keys, seen = k @ omega.mT - _half_squares(k).mT, seen[:, None] & some
    top = np.max(untraced(of_keys)[0][query.there])  # of all keys, whichever this query sees
    psi = xp.where(seen, xp.exp(of_keys - top), 0.0)
    values = xp.concat([v, xp.ones_like(v[..., :1])], axis=-1)
    if query.order == "states":
        return phi @ (psi.mT @ values), most + top
    return phi @ psi.mT @ values, most + top


def _estimate_logs(q: Any, k: Any, omega: Any, log_weight: Any, there: Any = True) -> Any:
    """Estimate logs of the kernel of the query and each key, without |q|^2 / 2."""
    terms = k @ omega.mT + (q @ omega.mT + log_weight)  # (..., m, S)
    _, lse = _divide_weights(terms, there)
    return lse.mT - _half_squares(k)


_STEP_ORDERS = ("samples", "pairs")
_ALL_STEP_ORDERS = (*_STEP_ORDERS, "features", "states")

# By formula, of `naive`: the text, and the orders of steps that it has.
TEXTS: Mapping[Any, tuple[Callable[..., Any], tuple[str, ...]]] = {
    naive.randomized_attention: (write_randomized, _STEP_ORDERS),
    naive.mean_of_ratios_attention: (write_randomized, _STEP_ORDERS),
    naive.linear_randomized_attention: (write_proposals, _ALL_STEP_ORDERS),
    naive.local_random_feature_attention: (write_near_and_features, _ALL_STEP_ORDERS),
    naive.importance_sampled_attention: (write_importance, _ALL_STEP_ORDERS),
    naive.relu_feature_attention: (write_projections, ("pairs", "features", "states")),
    naive.eva_attention: (write_chunks, _STEP_ORDERS),
    naive.second_order_attention: (write_moments, _STEP_ORDERS),
    naive.coreset_attention: (write_coreset, _STEP_ORDERS),
}
