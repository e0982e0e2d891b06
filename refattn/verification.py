r"""Verdicts on numbers: whether an output can be that of a correct kernel, to rounding.

`verify` compares what a kernel gave with what `refattn.rounding` says of a correct one. With
:math:`e` the error, :math:`\sigma` its standard deviation and :math:`D` what rounding to nearest
alone makes of the exact result, four kinds of statements are tried, each of which a correct kernel
violates with a probability that is bounded:

* no error exceeds its proven bound, whatever the roundings are;
* roundings are independent of each other: then each error is sub-Gaussian about
  :math:`\kappa D` for a :math:`\kappa \in [0, 1]`, which is 0 where noise before a rounding hides
  what it does to the exact number, and :math:`P(|e - \kappa D| > t \sigma) \le 2 e^{-t^2/2}`;
* for the mean square of N rows, of which the columns may depend on each other in any way,
  :math:`P(\overline{z^2} > x) \le (x e^{1 - x})^{N/2}`, by Jensen and Chernoff;
* errors of rows are symmetric and independent: then a sum over the rows of any fixed combinations
  of them, over the root of the sum of their squares, exceeds t with probability at most
  :math:`e^{-t^2/2}` (Efron), whatever their variances are. With the derivative of the output to a
  defect as weights this is a test for it, and it measures its size.

Rows with the same query, or the same exact result, are rounded alike: g of them have weights 1 / g,
and count for one. By Jensen and Cauchy both statements about rows hold for that, too.

    Efron, Student's t-test under symmetry conditions, Journal of the American Statistical
    Association 64(328), 1969.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from . import _rounding, _validate, rounding, stats
from ._formats import FORMATS
from ._tensors import Tensors
from ._text import portable
from .features import elu_features
from .registry import ESTIMATORS
from .rounding import PROFILES, Problem, Profile

__all__ = ["Finding", "Suspect", "Verdict", "judge", "verify"]

_Floats = npt.NDArray[np.float64]

_SMALLEST_TILE = 16


class Finding(NamedTuple):
    """A statement about a correct kernel, and how surely the numbers violate it.

    Attributes
    ----------
    name : str
        What was tried.
    p_value : float
        At most this is the probability that a correct kernel deviates so much.
    adjusted : float
        After Holm's correction for all that was tried.
    statistic : float
        Ratio to the bound, largest |z|, mean square of z, or a sum over its root mean square.
    where : str
        Where, in words.
    """

    name: str
    p_value: float
    adjusted: float
    statistic: float
    where: str


class Suspect(NamedTuple):
    """A known defect, with its size.

    Attributes
    ----------
    name : str
        Of the defect.
    estimate, error : float
        Its size, 0 when absent, and the standard error of that.
    adjusted : float
        The corrected p-value of its absence; nan if it was only found to agree.
    explained : float
        Share of the mean square of z that it explains.
    text : str
        In a sentence.
    """

    name: str
    estimate: float
    error: float
    adjusted: float
    explained: float
    text: str


class Z(NamedTuple):
    """Errors over their standard deviations, where these are known."""

    rms: float
    largest: float
    where: tuple[int, ...]


# Defects that change scores: derivative of the score, and what a size means.
_CHANGES: Mapping[str, Callable[[_rounding.Head, _rounding.Tile, slice], Any]] = {
    "scale": lambda head, tile, i: tile.logits * tile.slope,
    "softcap": lambda head, tile, i: -(tile.logits**3) / 3,
    "slope": lambda head, tile, i: head.ahead(i, tile.keys),
}
_SENTENCES: Mapping[str, Callable[[float, float], str]] = {
    "scale": lambda x, e: f"the scale is {_near_one(x, e)} times what was said",
    "softcap": lambda x, e: f"scores are capped, softly: 1 / cap^2 is {_pm(x, e)}",
    "slope": lambda x, e: f"scores rise by {_pm(x, e)} with each key, as with ALiBi",
    "lse": lambda x, e: f"lse is {_pm(x, e)} too large",
    "factor": lambda x, e: f"the output is {_near_one(x, e)} times what it should be",
    "truncated": lambda x, e: f"the output is truncated, not rounded: {_pm(x, e)} times as far",
    "epsilon": lambda x, e: f"{_pm(x, e)} is added to the normaliser, of weights up to 1",
    "sink": lambda x, e: f"{_pm(x, e)} is added to the normaliser, of weights e^score",
    "edge+1": lambda x, e: f"a query sees one key more, the next: {_pm(x, e)} of its weight",
    "edge-1": lambda x, e: f"a query does not see its last key: {_pm(x, e)} of its weight",
}


def _pm(x: float, error: float) -> str:
    return f"{x:.4g} ± {error:.1g}"


def _near_one(x: float, error: float) -> str:
    """A factor 1 + x with the digits that are known."""
    digits = min(max(2, 1 - math.floor(math.log10(error))), 15) if 0 < error < 1 else 6
    return f"{1 + x:.{digits}f} ± {error:.1g}"


class Sums(NamedTuple):
    """Of each row (..., n), sums over its columns along one direction.

    Attributes
    ----------
    errors : array
        Of the errors.
    own : array
        Of what rounding to nearest makes of the exact numbers.
    size : array
        Of the direction itself: what the errors are if the defect has size 1.
    slack : array
        Of what errors of a correct kernel may have in common, at most.
    """

    errors: _Floats
    own: _Floats
    size: _Floats
    slack: _Floats


class Moments(NamedTuple):
    """Weighted sums over rows, of T, U, G and L of `Sums`, and of TT, TU, UU, TG, UG and GG."""

    t: Any
    u: Any
    g: Any
    slack: Any
    tt: Any
    tu: Any
    uu: Any
    tg: Any
    ug: Any
    gg: Any

    @classmethod
    def of(cls, t: Any, u: Any, g: Any, slack: Any, weights: Any, axis: int = -1) -> Moments:
        """Sums over an axis."""
        parts = (t, u, g, slack, t * t, t * u, u * u, t * g, u * g, g * g)
        return cls(*(np.sum(weights * x, axis=axis) for x in parts))

    def over(self, axis: int) -> Moments:
        """Sums over one more axis."""
        return Moments(*(np.sum(x, axis=axis) for x in self))


def evenly(t: Any, u: Any, g: Any, slack: Any) -> tuple[Any, Any, Any, Any]:
    """The rows of a direction over their standard deviations: none outweighs the others."""
    factor = np.where(g > 0, 1 / np.sqrt(np.where(g > 0, g, 1.0)), 0.0)
    return t * factor, u * factor, g * factor, slack * factor


class Evidence(NamedTuple):
    """Sums over rows with the weights that are best if errors are Gaussian, and evenly.

    Where few rows have nearly all of the weight they alone are no evidence of symmetric errors.
    """

    best: Moments
    even: Moments

    @classmethod
    def of(cls, t: Any, u: Any, g: Any, slack: Any, weights: Any, axis: int = -1) -> Evidence:
        """Sums over an axis of what `Sums` holds."""
        even = Moments.of(*evenly(t, u, g, slack), weights, axis=axis)
        return cls(Moments.of(t, u, g, slack, weights, axis), even)

    def over(self, axis: int) -> Evidence:
        """Sums over one more axis."""
        return Evidence(self.best.over(axis), self.even.over(axis))

    def add(self, other: Evidence, at: Any) -> None:
        """Add to some of the entries."""
        for mine, new in zip((*self.best, *self.even), (*other.best, *other.even), strict=True):
            mine[at] += new

    def test(self) -> Estimate:
        """The size by the best weights, and the surer of the two tests."""
        best, even = symmetric_test(self.best), symmetric_test(self.even)
        return Estimate(
            best.value,
            best.error,
            np.minimum(np.minimum(best.log_p, even.log_p) + math.log(2), 0.0),
            np.maximum(best.statistic, even.statistic),
        )


class Estimate(NamedTuple):
    """Size of a defect, its standard error, and the log of a bound on how likely 0 is."""

    value: Any
    error: Any
    log_p: Any
    statistic: Any


def symmetric_test(rows: Moments) -> Estimate:
    r"""Test that errors have no part in a direction, whatever their variances.

    .. math:: P\Big(\Big|\sum_i T_i\Big| > t \sqrt{\textstyle\sum_i T_i^2}\Big) \le 2 e^{-t^2 / 2}

    for independent symmetric T_i: the errors of rows but for the share, between 0 and 1, of what
    rounding the exact numbers gives that makes the sum least, and for what they may have in common.
    """
    t, u, g, slack, tt, tu, uu, tg, ug, gg = (np.asarray(x, np.float64) for x in rows)
    share = np.clip(np.where(u == 0, 0.0, t / np.where(u == 0, 1.0, u)), 0.0, 1.0)
    total = t - share * u
    root = np.sqrt(np.maximum(tt - 2 * share * tu + share * share * uu, 0.0))
    beyond = np.maximum(np.abs(total) - slack, 0.0)
    statistic = np.where(root > 0, beyond / np.where(root > 0, root, 1.0), 0.0)
    size = np.where(g > 0, g, 1.0)
    value = np.where(g > 0, total / size, 0.0)
    rest = root * root - 2 * value * (tg - share * ug) + value * value * gg
    error = np.where(g > 0, np.sqrt(np.maximum(rest, 0.0)) / size, math.inf)
    return Estimate(value, error, np.minimum(math.log(2) - statistic**2 / 2, 0.0), statistic)


def chernoff(square: Any, rows: Any) -> Any:
    r"""Log of the largest probability that the mean square of so many rows is so large.

    .. math:: P(\overline{z^2} > x) \le (x e^{1 - x})^{N / 2}

    for independent rows, each the mean of squares of sub-Gaussian numbers of variance 1; or for a
    weighted mean, of which no row has more than that share.
    """
    x = np.maximum(square, 1.0)
    return np.floor(rows + 2.0**-20) / 2 * (np.log(x) + 1 - x)


class Numbers(NamedTuple):
    """What a kernel gave, read by heads.

    Attributes
    ----------
    out : callable
        Gives the output of a head, (n, d_v).
    out_dtype : str
        Its type.
    lse : callable or None
        Gives the log normalisers of a head, (n,).
    lse_dtype : str
        Their type.
    """

    out: Callable[[tuple[int, ...]], _Floats]
    out_dtype: str
    lse: Callable[[tuple[int, ...]], _Floats] | None = None
    lse_dtype: str = "float32"


class _Found:
    """What the sweep over the heads collects for one profile."""

    def __init__(
        self, problem: Problem, names: Sequence[str], numbers: Numbers, weights: _Floats
    ) -> None:
        (n, m, d_v), heads = problem.shape, math.prod(problem.lead)
        self.weights = weights  # of rows, (heads, n)
        self.problem, self.numbers, self.lock = problem, numbers, Lock()
        self.sums = {x: Sums(*(np.zeros((heads, n)) for _ in Sums._fields)) for x in names}
        best, even = (Moments(*(np.zeros((heads, m)) for _ in Moments._fields)) for _ in range(2))
        self.keys = Evidence(best, even)
        self.square, self.counted = np.zeros((heads, n)), np.zeros((heads, n))
        self.column, self.column_rows = np.zeros(d_v), np.zeros(d_v)
        self.strength = 0.0  # sum of squares of outputs over their standard deviations
        self.plain = 0.0  # sum of squares of errors over standard deviations
        self.elements = 0  # that have a law
        self.largest: tuple[float, tuple[int, ...]] = (0.0, ())
        self.beyond: tuple[float, tuple[int, ...]] = (0.0, ())  # error over bound
        self.lse_beyond = self.lse_square = self.lse_rows = 0.0

    def of_heads(self) -> None:
        """Take heads for rows, where the rows of a head have roundings in common."""
        used = self.counted > 0
        rows = np.sum(used, -1, keepdims=True)
        self.square = np.sum(self.square * used, -1, keepdims=True) / np.maximum(rows, 1)
        self.counted = np.sum(self.counted, -1, keepdims=True)
        self.weights = np.max(self.weights, -1, keepdims=True, initial=0.0)
        self.sums = {
            name: Sums(*(np.sum(x, -1, keepdims=True) for x in sums))
            for name, sums in self.sums.items()
        }

    def add(self, index: tuple[int, ...], i: slice, rows: _rounding.Rows) -> None:
        """Add a block of queries."""
        at = int(np.ravel_multi_index(index, self.problem.lead)) if index else 0
        error, own = self.numbers.out(index)[i] - rows.out, rows.nearest - rows.out
        ratio = _beyond(error, rows.bound)
        known = np.isfinite(rows.std) & np.isfinite(error)
        error, own = (np.where(known, x, 0.0) for x in (error, own))
        near = np.minimum(own, 0.0) - rows.slack, np.maximum(own, 0.0) + rows.slack
        z = (error - np.clip(error, *near)) / rows.worst
        count = np.sum(known, -1)
        self.square[at, i] = np.sum(z * z, -1) / np.maximum(count, 1)
        self.counted[at, i] = count
        of_row = (
            self.weights[at, i, None]
            if self.problem.rows_apart
            else self.weights[at, 0] / (self.weights.shape[1])
        )
        weight = error / np.square(rows.std), own / np.square(rows.std)
        for name, change in _directions(self.problem, index, i, rows):
            if name in self.sums:
                steep = np.where(known, change / rows.std, 0.0)
                sums = self.sums[name]
                sums.errors[at, i] = np.sum(steep * (error / rows.std), -1)
                sums.own[at, i] = np.sum(steep * (own / rows.std), -1)
                sums.size[at, i] = np.sum(steep * steep, -1)
                sums.slack[at, i] = np.sum(np.abs(steep) * rows.slack / rows.std, -1)
        with self.lock:
            self.strength += float(np.sum(np.square(np.where(known, rows.out / rows.worst, 0.0))))
            self.plain += float(np.sum(np.square(error / rows.std)))
            self.elements += int(np.sum(known))
            self.column += np.sum(of_row * z * z, 0)
            self.column_rows += np.sum(of_row * known, 0)
            self.largest = _larger(self.largest, np.abs(z), index, i)
            self.beyond = _larger(self.beyond, ratio, index, i)
        if self.problem.rows_apart:
            self._keys(at, index, i, rows, *weight)
        if self.numbers.lse is not None:
            self._lse(at, i, self.numbers.lse(index)[i], rows)

    def _lse(self, at: int, i: slice, got: _Floats, rows: _rounding.Rows) -> None:
        """The errors of the log normalisers."""
        to = FORMATS[self.numbers.lse_dtype]
        spacing = to.spacing(rows.lse)
        empty = np.isneginf(rows.lse)
        with np.errstate(invalid="ignore"):
            error = np.where(empty, np.where(got == rows.lse, 0.0, math.inf), got - rows.lse)
        ratio = _beyond(error, rows.lse_bound + np.where(empty, 0.0, spacing / 2))
        variance = np.square(rows.lse_std) + np.where(empty, 0.0, spacing * spacing / 12)
        known = np.isfinite(error) & ~empty
        weight = np.where(known, 1 / variance, 0.0)
        error, exact = np.where(known, error, 0.0), np.where(known, rows.lse, 0.0)
        own, slack = to.round(exact) - exact, rows.lse_slack + to.spacing(exact) / 2
        sums = self.sums["lse"]
        sums.errors[at, i], sums.size[at, i] = weight * error, weight
        sums.own[at, i], sums.slack[at, i] = weight * own, weight * slack
        apart = self.weights[at, i]
        with self.lock:
            self.lse_beyond = max(self.lse_beyond, float(np.max(ratio, initial=0.0)))
            beyond = np.maximum(np.abs(error) - slack, 0.0)
            square = apart * weight * beyond * beyond
            self.lse_square += float(np.sum(square)) / _rounding.WORST**2
            self.lse_rows += float(np.sum(apart * known))

    def _keys(
        self,
        at: int,
        index: tuple[int, ...],
        i: slice,
        rows: _rounding.Rows,
        errors: _Floats,
        own: _Floats,
    ) -> None:
        """The loss of each key: the derivative to its weight, p (v - out) / (1 - p)."""
        head = self.problem.head(index)
        lse = np.where(np.isfinite(rows.lse), rows.lse, math.inf)[:, None]
        inverse = 1 / np.square(rows.std)
        slack = inverse * rows.slack  # times |v - out|, by Cauchy and Schwarz
        far, about = _length(slack)[:, None], np.sum(slack * np.abs(rows.out), -1)[:, None]
        for tile in _rounding.tiles(head, i, 512):
            share = np.exp(np.minimum(tile.scores - lse, 0.0))
            if tile.visible is not None:
                share = np.where(tile.visible, share, 0.0)
            share = np.where(share < _ALL, share / (1 - np.minimum(share, _ALL)), 0.0)
            v = head.v[tile.keys]
            e, d = (
                -share * (x @ v.T - np.sum(x * rows.out, -1, keepdims=True)) for x in (errors, own)
            )
            size = (
                share
                * share
                * (
                    inverse @ np.square(v).T
                    - 2 * (inverse * rows.out) @ v.T
                    + np.sum(inverse * np.square(rows.out), -1, keepdims=True)
                )
            )
            common = share * (far * _length(v) + about)
            new = Evidence.of(e, d, np.maximum(size, 0.0), common, self.weights[at, i, None], 0)
            with self.lock:
                self.keys.add(new, (at, tile.keys))


_ALL = 1 - 2.0**-20


def _row_weights(problem: Problem) -> _Floats:
    """1 / g for g rows with one query, or one exact result; where linear, for heads of one key."""
    heads, n = math.prod(problem.lead), problem.shape[0]
    if not heads * n:
        return np.ones((heads, n))
    if not problem.rows_apart:
        keys = [problem.read(index)["k"] for index in np.ndindex(problem.lead)]
        return np.repeat(_shares(_marks(x.reshape(1, -1)) for x in keys)[:, None], n, 1)
    found: list[tuple[_Floats, _Floats]] = []
    for index, i in problem.items():
        head = problem.head(index)
        with np.errstate(all="ignore"):
            found.append((head.q[i], _rounding.exact(head, i).astype(np.float32)))
    queries, results = (_shares(_marks(x) for x in rows) for rows in zip(*found, strict=True))
    return np.minimum(queries, results).reshape(heads, n)


def _marks(rows: npt.NDArray[Any]) -> list[int]:
    """Numbers that are equal where rows are."""
    return [hash((x + 0).tobytes()) for x in rows]


def _shares(marks: Iterable[list[int]]) -> _Floats:
    """1 / g for g equal marks."""
    every = np.array([x for part in marks for x in part], np.int64)
    _, which, counts = np.unique(every, return_inverse=True, return_counts=True)
    found: _Floats = 1 / counts[which]
    return found


def _beyond(error: _Floats, bound: _Floats) -> _Floats:
    """Errors over their bounds; where a profile overflows, anything may come out."""
    found = np.abs(error) / np.where(bound > 0, bound, 1e-300)
    found = np.where(np.isnan(error), math.inf, np.where(error == 0, 0.0, found))
    return np.where(np.isinf(bound), 0.0, found)


def _length(x: _Floats) -> _Floats:
    """Norms of rows."""
    return np.asarray(np.sqrt(np.sum(x * x, -1)))


def _larger(
    known: tuple[float, tuple[int, ...]], x: _Floats, index: tuple[int, ...], i: slice
) -> tuple[float, tuple[int, ...]]:
    """The larger of what is known and the largest of an array, with its place."""
    if not x.size or not np.max(x) > known[0]:
        return known
    row, column = np.unravel_index(int(np.argmax(x)), x.shape)
    return float(x[row, column]), (*index, i.start + int(row), int(column))


def _directions(
    problem: Problem, index: tuple[int, ...], i: slice, rows: _rounding.Rows
) -> Iterator[tuple[str, _Floats]]:
    """Derivatives of the output to the sizes of defects."""
    yield from rows.tangents.items()
    yield "factor", rows.out
    yield "truncated", -np.sign(rows.out) * rows.spacing / 2
    if not problem.rows_apart:
        return
    with np.errstate(all="ignore"):
        yield "epsilon", np.nan_to_num(-rows.out * np.exp(rows.top - rows.lse)[:, None])
        yield "sink", np.nan_to_num(-rows.out * np.exp(-rows.lse)[:, None], posinf=0.0, neginf=0.0)
    if problem.causal and problem.shape[1]:
        head = problem.head(index)
        yield "edge+1", _edge(head, i, rows, 1)
        yield "edge-1", _edge(head, i, rows, 0)


def _edge(head: _rounding.Head, i: slice, rows: _rounding.Rows, ahead: int) -> _Floats:
    """Change of the output where queries see the key next to the last, or lose the last."""
    n, m = head.q.shape[0], head.k.shape[0]
    keys = np.arange(i.start, i.stop) + m - n + ahead
    there = (keys >= 0) & (keys < m)
    j = np.clip(keys, 0, m - 1)
    scores = head.scale * np.sum(head.q[i] * head.k[j], -1)
    if head.softcap is not None:
        scores = head.softcap * np.tanh(scores / head.softcap)
    if head.bias is not None:
        scores = scores + head.bias[np.arange(i.start, i.stop), j]
    if head.mask is not None:
        there &= head.mask[np.arange(i.start, i.stop), j]
    with np.errstate(all="ignore"):
        share = np.where(there, np.exp(scores - rows.lse), 0.0)
        part = share / (1 + share) if ahead else -share / (1 - share)
    part = np.where(np.isfinite(part) & (np.abs(share) < (math.inf if ahead else _ALL)), part, 0.0)
    found: _Floats = part[:, None] * (head.v[j] - rows.out)
    return found


class Trial(NamedTuple):
    """What the numbers say of one profile."""

    profile: str
    tests: list[Finding]
    suspects: list[Suspect]
    z: Z
    known: float  # share of the elements that have a law
    detectable: dict[str, float]
    powered: bool  # whether an output that is 1 % too large would have been rejected

    def rejected(self, alpha: float) -> bool:
        """Whether a kernel of this profile gives such numbers with probability at most alpha."""
        return min((x.adjusted for x in self.tests), default=1.0) <= alpha


def attempt(
    problem: Problem,
    dtype: str,
    profile: Profile,
    name: str,
    numbers: Numbers,
    alpha: float,
) -> Trial:
    """Try whether the numbers can be those of a correct kernel of a profile."""
    changes, names = {}, ["factor", "truncated"]
    if problem.rows_apart:
        changes = {x: f for x, f in _CHANGES.items() if x != "softcap" or problem.softcap is None}
        names = [*changes, *names, "epsilon", "sink", *["edge+1", "edge-1"] * problem.causal]
    if numbers.lse is not None:
        names.append("lse")
    narrowed = problem if profile.inputs is None else problem.rounded(FORMATS[profile.inputs])
    found = _Found(problem, names, numbers, _row_weights(narrowed))
    rounding.sweep(problem, dtype, profile, found.add, changes)
    if not problem.rows_apart:
        found.of_heads()
    elements = float(found.elements)
    raw = [*_of_bound(found), *_of_sizes(found, elements)]
    raw += _of_lse(found) if numbers.lse is not None else []
    directions = list(_of_directions(found))
    if problem.rows_apart:
        directions += [*_of_keys(found), *_of_tiles(found)]
    adjusted = stats.holm([math.exp(max(x.log_p, -700.0)) for x in (*raw, *directions)])
    outcomes = sorted(zip((*raw, *directions), adjusted, strict=True), key=lambda x: x[0].log_p)
    tests = [
        Finding(x.name, math.exp(max(x.log_p, -700.0)), float(p), x.statistic, x.where)
        for x, p in outcomes
    ]
    suspects = [
        Suspect(x.name, x.value, x.error, float(p), x.explained / max(found.plain, 1e-300), x.where)
        for x, p in zip(directions, adjusted[len(raw) :], strict=True)
        if p <= alpha or (min(adjusted) <= alpha and x.explained > found.plain / 4)
    ]
    suspects = _telling(suspects)
    rms = math.sqrt(found.plain / elements) if elements else 0.0
    threshold = math.sqrt(2 * math.log(2 * len(tests) / alpha))
    usable = float(np.sum(found.weights * (found.counted > 0)))
    detectable = {
        x: float((threshold * np.sqrt(np.sum(sums.size)) + np.sum(sums.slack)) / np.sum(sums.size))
        for x, sums in found.sums.items()
        if np.sum(sums.size) > 0 and usable > 2 * threshold**2
    }
    rows = float(np.sum(found.counted > 0))
    seen = chernoff(_ONE_PERCENT**2 * found.strength / max(elements, 1.0), rows)
    powered = bool(seen <= math.log(alpha / len(tests)))
    powered = powered or detectable.get("factor", 1.0) <= _ONE_PERCENT
    total = math.prod(problem.lead) * problem.shape[0] * problem.shape[2]
    return Trial(
        name,
        tests,
        suspects,
        Z(rms, *found.largest),
        elements / max(total, 1),
        detectable,
        powered,
    )


def _telling(suspects: list[Suspect]) -> list[Suspect]:
    """Those that explain most; one head is named where it explains more than all together."""
    found: dict[str, Suspect] = {}
    for suspect in sorted(suspects, key=lambda x: -x.explained):
        found.setdefault(suspect.name.removesuffix(_OF_HEAD), suspect)
    most = max((x.explained for x in found.values()), default=0.0)
    return [x for x in found.values() if x.explained >= most / 2]


_OF_HEAD = " of a head"


class _Outcome(NamedTuple):
    """A test before the correction for many."""

    name: str
    log_p: float
    statistic: float
    where: str
    value: float = 0.0
    error: float = 0.0
    explained: float = 0.0


def _of_bound(found: _Found) -> Iterator[_Outcome]:
    ratio, where = found.beyond
    log_p = -math.inf if ratio > 1 + 2.0**-20 else 0.0
    yield _Outcome("bound", log_p, ratio, f"at {_at(where)}" if where else "")


def _of_lse(found: _Found) -> Iterator[_Outcome]:
    log_p = -math.inf if found.lse_beyond > 1 + 2.0**-20 else 0.0
    yield _Outcome("bound of lse", log_p, found.lse_beyond, "")
    if found.lse_rows:
        mean = found.lse_square / found.lse_rows
        yield _Outcome("mean square of lse", float(chernoff(mean, found.lse_rows)), mean, "all")


def _of_sizes(found: _Found, elements: float) -> Iterator[_Outcome]:
    """The largest |z|, and mean squares: of all, of heads, of tiles of rows and of columns."""
    if not elements:
        return
    z, where = found.largest
    yield _Outcome("largest z", _many(math.log(2) - z * z / 2, elements), z, f"at {_at(where)}")
    n = found.square.shape[1]
    used = found.counted > 0
    weights = found.weights * used
    rows, total = np.sum(weights), np.sum(found.square * weights)
    yield _Outcome("mean square", float(chernoff(total / rows, rows)), float(total / rows), "all")
    for size in _powers(n):
        cut = np.arange(0, n, size)
        counts = np.add.reduceat(weights, cut, axis=1)
        means = np.add.reduceat(found.square * weights, cut, axis=1)
        means = means / np.where(counts > 0, counts, 1.0)
        log_p = chernoff(means, counts)
        head, tile = (int(x) for x in np.unravel_index(int(np.argmin(log_p)), log_p.shape))
        index = _head(found.problem, int(head))
        rest = f"queries {tile * size} to {min(n, (tile + 1) * size) - 1}"
        yield _Outcome(
            f"mean square of tiles of {size}" if size < n else "mean square of heads",
            _many(float(log_p[head, tile]), log_p.size),
            float(means[head, tile]),
            ", ".join(x for x in (index, rest if size < n else "") if x) or "all",
        )
    means = found.column / np.where(found.column_rows > 0, found.column_rows, 1.0)
    log_p = chernoff(means, found.column_rows)
    column = int(np.argmin(log_p))
    yield _Outcome(
        "mean square of columns",
        _many(float(log_p[column]), log_p.size),
        float(means[column]),
        f"column {column}",
    )


def _powers(n: int) -> Iterator[int]:
    """Sizes of tiles: all rows of a head, and smaller powers of two."""
    yield n
    size = _SMALLEST_TILE
    while size < n:
        yield size
        size *= 2


def _of_directions(found: _Found) -> Iterator[_Outcome]:
    for name, sums in found.sums.items():
        rows = Evidence.of(*sums, found.weights)
        yield from _grouped(found, name, rows, _SENTENCES[name])


def _of_tiles(found: _Found) -> Iterator[_Outcome]:
    """The tile of queries of one head of which a factor on the output explains most."""
    sums, n = found.sums["factor"], found.square.shape[1]
    tried: list[_Outcome] = []
    count = 0
    for size in _powers(n):
        if size == n:
            continue
        t, u, g, slack, weights = (_cut(x, size) for x in (*sums, found.weights))
        tiles = Evidence.of(t, u, g, slack, weights)
        test = tiles.test()
        count += test.log_p.size
        explained = np.square(test.value) * tiles.best.g
        at = np.unravel_index(int(np.argmax(explained)), explained.shape)
        value, error, log_p, statistic, most = (
            float(x[at]) for x in (test.value, test.error, test.log_p, test.statistic, explained)
        )
        head, tile = map(int, at)
        where = f"queries {tile * size} to {min(n, (tile + 1) * size) - 1}"
        words = (_SENTENCES["factor"](value, error), _head(found.problem, head), where)
        text = ", ".join(x for x in words if x)
        tried.append(_Outcome("factor of a tile", log_p, statistic, text, value, error, most))
    if tried:
        best = max(tried, key=lambda x: x.explained)
        yield best._replace(log_p=_many(best.log_p, count))


def _cut(x: _Floats, size: int) -> _Floats:
    """Rows (heads, n) as tiles (heads, tiles, size), with zeros at the end."""
    heads, n = x.shape
    return np.pad(x, ((0, 0), (0, -n % size))).reshape(heads, -1, size)


def _grouped(
    found: _Found, name: str, rows: Evidence, sentence: Callable[[float, float], str]
) -> Iterator[_Outcome]:
    """One direction over all heads and, where there are several, in the head where it is surest."""
    for of_head in (False, True)[: 1 + (len(rows.best.t) > 1)]:
        total = rows if of_head else rows.over(0)
        tried = total.test()
        log_p = np.atleast_1d(tried.log_p)
        at = int(np.argmin(log_p))
        value, error, statistic = (
            float(np.atleast_1d(x)[at]) for x in (tried.value, tried.error, tried.statistic)
        )
        size = float(np.atleast_1d(total.best.g)[at])
        where = f", {_head(found.problem, at)}" if of_head else ""
        yield _Outcome(
            name + (_OF_HEAD if of_head else ""),
            _many(float(log_p[at]), log_p.size),
            statistic,
            sentence(value, error) + where if error < math.inf else "not to be told",
            value,
            error,
            value * value * size,
        )


def _of_keys(found: _Found) -> Iterator[_Outcome]:
    """The key whose loss, or second use, explains most."""
    heads, m = found.keys.best.t.shape
    if not m:
        return
    for name, rows in (("key", found.keys.over(0)), ("key" + _OF_HEAD, found.keys))[
        : 1 + (heads > 1)
    ]:
        tried = rows.test()
        log_p = np.atleast_2d(tried.log_p)
        explained = np.atleast_2d(np.square(tried.value) * rows.best.g)
        head, key = np.unravel_index(int(np.argmax(explained)), log_p.shape)
        value, error, statistic, size = (
            float(np.atleast_2d(x)[head, key])
            for x in (tried.value, tried.error, tried.statistic, rows.best.g)
        )
        words = (
            f"key {key} is missing: {_pm(value, error)} of its weight"
            if value > 0
            else f"key {key} counts {_pm(1 - value, error)} times"
        )
        where = f", {_head(found.problem, int(head))}" if name != "key" else ""
        yield _Outcome(
            name,
            _many(float(log_p[head, key]), log_p.size),
            statistic,
            words + where,
            value,
            error,
            value * value * size,
        )


def _many(log_p: float, tries: float) -> float:
    """Bonferroni's correction."""
    return min(log_p + math.log(max(tries, 1.0)), 0.0)


def _head(problem: Problem, number: int) -> str:
    if not problem.lead:
        return ""
    return f"head {_at(tuple(map(int, np.unravel_index(number, problem.lead))))}"


def _at(index: tuple[int, ...]) -> str:
    return f"({', '.join(map(str, index))})" if len(index) != 1 else str(index[0])


_NARROW = ("math", "flash", "upcast", "flash-fast", "eager", "eager-narrow")  # from the tightest
_ALL_BUT = 0.95  # share of the mean square that a defect explains where there is no other
_ONE_PERCENT = 0.01
_FEW = 4  # blocks of queries that are looked at before all
_LIKE_THE_NEXT = "upcast"  # neither is the tighter one: that whose rms is nearer to 1 is named
_WIDE = ("math", "serial", "tf32")


class Verdict(NamedTuple):
    """Whether numbers can be those of a correct kernel.

    Attributes
    ----------
    verdict : str
        ``"PASS"``; ``"FAIL"``, no profile that was tried explains the numbers; or
        ``"UNDERPOWERED"``, an output that is 1 % too large would not have been rejected.
    profile : str or None
        The tightest profile that explains the numbers.
    z : Z
        Errors over their standard deviations, by that profile or, of those rejected, by the one
        with which a known defect explains all, or else by the nearest: root mean square, largest,
        and where that is.
    tests : list of Finding
        What was tried, by that profile.
    suspects : list of Suspect
        Known defects that the numbers show, those that explain most first.
    remarks : list of str
        What else is to be seen.
    dtype, out_dtype : str
        The storage type, and that of the output.
    shape : tuple of int
        Of the output.
    known : float
        Share of the elements whose error has a law; for others there is the bound.
    detectable : dict
        Sizes of defects that would have been rejected.
    alpha : float
        At most this is the probability that a correct kernel fails.
    trials : dict of str to float
        Smallest corrected p-value of each profile that was tried.
    seconds : float
        Time taken.
    by : str
        Name of the profile that `z` and `tests` are by.
    """

    verdict: str
    profile: str | None
    z: Z
    tests: list[Finding]
    suspects: list[Suspect]
    remarks: list[str]
    dtype: str
    out_dtype: str
    shape: tuple[int, ...]
    known: float
    detectable: dict[str, float]
    alpha: float
    trials: dict[str, float]
    seconds: float
    by: str = ""

    def to_json(self) -> str:
        """The verdict as JSON."""
        found = self._asdict()
        found["z"] = self.z._asdict()
        found["tests"], found["suspects"] = (
            [x._asdict() for x in items] for items in (self.tests, self.suspects)
        )
        return json.dumps(portable(found), indent=1) + "\n"

    def __str__(self) -> str:
        """The verdict in words."""
        return "\n".join(_report(self))


def _report(found: Verdict) -> Iterator[str]:
    types = found.dtype if found.out_dtype == found.dtype else f"{found.dtype} to {found.out_dtype}"
    said = {
        "PASS": f"a correct kernel in {types} gives such numbers (profile {found.profile})",
        "FAIL": f"no correct kernel in {types} gives such numbers (profiles tried: "
        f"{', '.join(found.trials)})",
        "UNDERPOWERED": "an output that is 1 % too large would not have been rejected",
    }
    yield f"{found.verdict}: {said[found.verdict]}"
    rows = math.prod(found.shape[:-1])
    yield (
        f"  {rows} rows of {found.shape[-1]}, {found.known:.1%} of the elements have a law; "
        f"alpha {found.alpha:g}, {len(found.tests)} tests, {found.seconds:.1f} s"
    )
    place = f" at {_at(found.z.where)}" if found.z.where else ""
    yield (
        f"  z = error / standard deviation: rms {found.z.rms:.3f}, "
        f"largest {found.z.largest:.3g}{place}"
    )
    yield from (f"  {x}" for x in found.remarks)
    shown = [x for x in found.tests if x.adjusted <= found.alpha and x.name in _SHOWN]
    tiles = [x for x in found.tests if x.adjusted <= found.alpha and x.name.startswith(_PARTS)]
    for x in (*shown, *tiles[:1]):  # of tiles and heads where it is surest
        yield f"  {x.name}: {x.statistic:.3g}, p {_p(x.adjusted)}, {x.where}"
    if found.verdict == "FAIL":
        yield "  suspects, and the share of the mean square that each explains:"
        for suspect in found.suspects[:5]:
            yield f"    {suspect.explained:6.1%}  {suspect.text}"
        if not found.suspects:
            yield "    none of the known defects"
    rejected = [x for x, p in found.trials.items() if p <= found.alpha]
    if found.verdict != "FAIL" and rejected:
        yield f"  it is not what kernels of these profiles give: {', '.join(rejected)}"
    if found.verdict != "FAIL" and found.known:
        sizes = [
            f"{_DEFECTS[x]} {size:.2g}" for x, size in found.detectable.items() if x in _DEFECTS
        ]
        rows = math.prod(found.shape)
        most = _rounding.WORST * math.sqrt(2 * math.log(2 * len(found.tests) * rows / found.alpha))
        sizes.append(f"an element that is off by {most:.2g} standard deviations")
        yield f"  would have been rejected: {', '.join(sizes)}"
    yield "  proven: the bound. If roundings are independent and symmetric: the rest."


_SHOWN = ("bound", "largest z", "mean square", "mean square of columns")
_PARTS = ("mean square of tiles", "mean square of heads")
_DEFECTS = {
    "scale": "a scale wrong by",
    "factor": "an output wrong by a factor 1 +",
    "epsilon": "an epsilon in the normaliser of",
}


def _p(p: float) -> str:
    return f"{p:.1g}" if p > 1e-300 else "0"


def judge(
    problem: Problem,
    numbers: Numbers,
    dtype: str,
    profile: str | Profile | Sequence[str] | None = None,
    alpha: float = 1e-6,
) -> Verdict:
    """Say whether what a kernel gave for a problem can be that of a correct kernel."""
    start = time.perf_counter()
    trials: dict[str, Trial] = {}
    profiles = _profiles(dtype, numbers.out_dtype, profile)
    near = [x for x in profiles if _within(problem, numbers, profiles[x].kernel(dtype))]
    for name in (*near, *(x for x in profiles if x not in near)):
        trials[name] = attempt(problem, dtype, profiles[name], name, numbers, alpha)
        if name != _LIKE_THE_NEXT and _explained(trials, alpha):
            break
    best = min(trials.values(), key=lambda x: _rank(x, profiles[x.profile], alpha))
    failed = best.rejected(alpha)
    verdict = "FAIL" if failed else "PASS" if best.powered else "UNDERPOWERED"
    suspects = list(best.suspects)
    remarks = list(_remarks(problem, numbers.out))
    if failed:
        remarks += _narrower(problem, dtype)
        suspects[:0] = _alternatives(problem, numbers, dtype, PROFILES["eager"])
    return Verdict(
        verdict,
        None if failed else best.profile,
        best.z,
        best.tests,
        suspects,
        remarks,
        dtype,
        numbers.out_dtype,
        (*problem.lead, problem.shape[0], problem.shape[2]),
        best.known,
        best.detectable,
        alpha,
        {name: min((t.adjusted for t in x.tests), default=1.0) for name, x in trials.items()},
        time.perf_counter() - start,
        best.profile,
    )


def _explained(trials: Mapping[str, Trial], alpha: float) -> bool:
    """Whether one of the profiles explains the numbers."""
    return not all(x.rejected(alpha) for x in trials.values())


def _within(problem: Problem, numbers: Numbers, kernel: _rounding.Kernel) -> bool:
    """Whether a few blocks of queries are within their bounds."""
    items = list(problem.items())
    for index, i in items[:: max(1, len(items) // _FEW)][:_FEW]:
        with np.errstate(all="ignore"):
            rows = problem.analyse(index, kernel, i)
            if not np.all(np.abs(numbers.out(index)[i] - rows.out) <= rows.bound):
                return False
    return True


def _rank(trial: Trial, profile: Profile, alpha: float) -> tuple[bool, bool, bool, float]:
    """What explains the numbers is first, then what does with a known defect, then the nearest.

    Sizes of defects are right for the problem as it was given, with inputs as they are.
    """
    most = max((x.explained for x in trial.suspects), default=0.0)
    rounded = profile.inputs is not None
    return trial.rejected(alpha), rounded, most < _ALL_BUT, abs(math.log(trial.z.rms or 1.0))


def z_by_row(
    problem: Problem, numbers: Numbers, dtype: str, profile: str | Profile
) -> tuple[_Floats, _Floats]:
    """Sums of z^2 over the columns, (heads, n), and the numbers of elements that have a law."""
    shape = math.prod(problem.lead), problem.shape[0]
    squares, counts = np.zeros(shape), np.zeros(shape)

    def add(index: tuple[int, ...], i: slice, rows: _rounding.Rows) -> None:
        at = int(np.ravel_multi_index(index, problem.lead)) if index else 0
        z = _z(numbers.out(index)[i], rows)
        squares[at, i], counts[at, i] = np.nansum(z * z, -1), np.sum(~np.isnan(z), -1)

    rounding.sweep(problem, dtype, _chosen(dtype, numbers.out_dtype, profile), add)
    return squares, counts


def z_of_head(
    problem: Problem,
    numbers: Numbers,
    dtype: str,
    profile: str | Profile,
    index: tuple[int, ...],
) -> _Floats:
    """Errors of a head over their standard deviations, (n, d_v); nan where there is no law."""
    found = np.empty((problem.shape[0], problem.shape[2]))
    chosen, got = _chosen(dtype, numbers.out_dtype, profile), numbers.out(index)
    if chosen.inputs is not None:  # 8 bits have a scale for all heads
        problem = problem.rounded(FORMATS[chosen.inputs])

    def add(index: tuple[int, ...], i: slice, rows: _rounding.Rows) -> None:
        found[i] = _z(got[i], rows)

    one = problem._replace(lead=(), read=lambda _: problem.read(index))
    rounding.sweep(one, dtype, chosen._replace(inputs=None), add)
    return found


def _z(got: _Floats, rows: _rounding.Rows) -> _Floats:
    error = got - rows.out
    found: _Floats = np.where(np.isfinite(rows.std) & np.isfinite(error), error / rows.std, np.nan)
    return found


def _chosen(dtype: str, out_dtype: str, profile: str | Profile) -> Profile:
    return next(iter(_profiles(dtype, out_dtype, profile).values()))


def numbers_of(tensors: Tensors) -> Numbers:
    """The results in a file."""
    if "out" not in tensors.shapes:
        raise ValueError(
            f"`out` must be in FILE, for it to be judged: {str(tensors.path)!r} has none."
        )
    return Numbers(
        partial(tensors.read, "out"),
        _held(tensors, "out"),
        partial(tensors.read, "lse") if "lse" in tensors.shapes else None,
        _held(tensors, "lse") if "lse" in tensors.shapes else "float32",
    )


def _held(tensors: Tensors, name: str) -> str:
    """The type of the queries where it holds all numbers, their own type otherwise."""
    dtype, own = tensors.dtype, tensors.dtypes[name]
    if own == dtype or not math.prod(tensors.shapes[name]):
        return own
    all_held = all(np.all(FORMATS[dtype].holds(tensors.read(name, x))) for x in tensors.heads())
    return dtype if all_held else own


def usual_profiles(dtype: str) -> Sequence[str]:
    """Names of the profiles to try for a storage type, from the tightest."""
    return _NARROW if FORMATS[dtype].digits <= FORMATS["float16"].digits else _WIDE


def _profiles(
    dtype: str, out_dtype: str, profile: str | Profile | Sequence[str] | None
) -> dict[str, Profile]:
    """Those to try, from the tightest, with the type of the output."""
    if isinstance(profile, str | Profile):
        name = profile if isinstance(profile, str) else "given"
        chosen = {name: rounding.profile_of(profile)}
    else:
        names = profile or usual_profiles(dtype)
        chosen = {x: rounding.profile_of(x) for x in names}
    return {
        name: x._replace(out=out_dtype) if x.out == "storage" else x for name, x in chosen.items()
    }


def _remarks(problem: Problem, read: Callable[[tuple[int, ...]], _Floats]) -> Iterator[str]:
    """What is to be seen without any law."""
    zero, nan, rows, first = True, 0, 0, ""
    for index in np.ndindex(problem.lead):
        got = read(index)
        zero = zero and not np.any(got)
        strange = np.flatnonzero(~np.all(np.isfinite(got), -1))
        if strange.size and not first:
            first = _at((*index, int(strange[0])))
        nan, rows = nan + strange.size, rows + got.shape[0]
    if zero and rows:
        yield "the output is 0 everywhere"
    if nan:
        yield f"{nan} of {rows} rows hold NaN or infinity, the first is {first}"


def _narrower(problem: Problem, dtype: str) -> Iterator[str]:
    """Whether queries, keys and values look like those of a narrower type."""
    for name in ("bfloat16", "float16"):
        to = FORMATS[name]
        heads = (problem.read(index) for index in np.ndindex(problem.lead))
        if to.digits < FORMATS[dtype].digits and all(
            np.all(to.holds(x[y])) for x in heads for y in "qkv"
        ):
            yield f"q, k and v hold numbers of {name} only: is that the dtype of the kernel?"
            return


def _alternatives(
    problem: Problem, numbers: Numbers, dtype: str, profile: Profile
) -> Iterator[Suspect]:
    """Other conventions by which a part of the numbers is within its bound, where it was not."""
    kernel = profile.kernel(dtype)
    for text, other in _conventions(problem):
        if _within(other, numbers, kernel):
            yield Suspect("convention", math.nan, math.nan, math.nan, 1.0, f"agrees if {text}")


def _conventions(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """Problems that are often taken for each other."""
    first = problem.read((0,) * len(problem.lead))
    d = first["q"].shape[-1]
    n, m, _ = problem.shape
    for words, scale in ((f"1 / sqrt({d})", d**-0.5), ("1", 1.0), (f"1 / {d}", 1 / d)):
        if not math.isclose(scale, problem.scale):
            yield f"the scale is {words}", problem._replace(scale=scale)
    without = "causal" if not problem.causal else "not causal"
    yield f"attention is {without}", problem._replace(causal=not problem.causal)

    def with_mask(change: Callable[[Any], Any]) -> Callable[[tuple[int, ...]], Mapping[str, Any]]:
        def read(index: tuple[int, ...]) -> Mapping[str, Any]:
            found = dict(problem.read(index))
            return found | {"mask": change(found.get("mask"))}

        return read

    if n != m and problem.rows_apart:
        corner = np.tri(n, m, dtype=bool)
        top = with_mask(lambda mask: corner if mask is None else corner & mask)
        words = "attention is causal from the first key (query i sees key j if j <= i)"
        yield words, problem._replace(read=top, causal=False)
    if "mask" in first:
        yield "the mask is inverted", problem._replace(read=with_mask(np.logical_not))
        yield "the mask is ignored", problem._replace(read=with_mask(lambda mask: None))
    if "bias" in first:
        ignored = lambda index: {x: y for x, y in problem.read(index).items() if x != "bias"}  # noqa: E731
        yield "the bias is ignored", problem._replace(read=ignored)
    left, right = problem.window
    for side, words, change in (
        (left, "left", lambda x: (x, right)),
        (right, "right", lambda x: (left, x)),
    ):
        for by in (-1, 1):
            if side is not None and side + by >= 0:
                yield (
                    f"the window reaches {side + by} to the {words}, not {side}",
                    problem._replace(window=change(side + by)),
                )


def verify(
    *,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any = None,
    omega: Any = None,
    log_weight: Any = None,
    estimator: str = "softmax",
    dtype: str | None = None,
    profile: str | Profile | None = None,
    alpha: float = 1e-6,
    scale: float | None = None,
    bias: Any = None,
    mask: Any = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    features: str = "positive",
    feature_map: Callable[[Any], Any] | None = None,
) -> Verdict:
    """Say whether numbers can be those of a correct kernel, to rounding.

    They are compared with exact attention, by what `rounding.predict` says of errors; the tests,
    and what they assume, are those of `refattn.verification`. Profiles are tried from the tightest
    until one explains the numbers.

    Parameters
    ----------
    q, k, v : arrays, shapes (..., n, d), (..., m, d) and (..., m, d_v)
        What the kernel was given, of any floating-point dtype and library.
    out : array, shape (..., n, d_v)
        What it gave.
    lse : array, shape (..., n), optional
        The log normalisers that it gave, natural, of softmax attention.
    omega, log_weight : arrays, shapes (..., S, d) and (..., S), optional
        Frequencies of random feature attention, and their log weights.
    estimator : {"softmax", "rfa", "linear"}
        What the kernel computes.
    dtype : str, optional
        The storage type, by default that of `q`: what the numbers of `q`, `k` and `v` were rounded
        to, if they come in a wider type. So is that of `out`, if it holds all of its numbers.
    profile : str or Profile, optional
        What the kernel rounds, where that is known: no other is tried.
    alpha : float, default 1e-6
        Largest probability that a correct kernel fails.
    scale, bias, mask, causal, window, softcap, features, feature_map
        As in `rounding.predict`; for linear attention the map is `elu_features` by default.

    Returns
    -------
    Verdict
        PASS, FAIL or UNDERPOWERED, the profile that explains the numbers, and the suspects.

    Raises
    ------
    TypeError, ValueError
        As in `rounding.predict`; also if shapes of results do not match, or if an option is not
        one of the estimator.

    Examples
    --------
    >>> import numpy as np
    >>> import refattn
    >>> q, k, v = refattn.load_sample()
    >>> out = refattn.softmax_attention(q, k, v)
    >>> refattn.verify(q=q, k=k, v=v, out=out).profile
    'math'
    >>> off = refattn.softmax_attention(q, k, v, scale=32**-0.5 * 1.00001)
    >>> found = refattn.verify(q=q, k=k, v=v, out=off)
    >>> found.verdict, found.suspects[0].name
    ('FAIL', 'scale')
    """
    settings = {"bias": bias, "mask": mask, "causal": causal, "window": window, "softcap": softcap}
    problem = rounding.of_arrays(
        q,
        k,
        v,
        scale=scale,
        **settings,
        **_estimator(estimator, omega, log_weight, features, feature_map),
    )
    alpha = alpha_of(alpha)
    n, _, d_v = problem.shape
    given = {"out": (out, (*problem.lead, n, d_v)), "lse": (lse, (*problem.lead, n))}
    got: dict[str, _Floats] = {}
    for name, (x, shape) in given.items():
        if x is not None:
            got[name] = rounding.wide(name, x)
            if got[name].shape != shape:
                raise ValueError(
                    f"`{name}` must have the shape of the result, {shape}, got {got[name].shape}."
                )
    dtype = rounding.dtype_of(q) if dtype is None else dtype
    rounding.holds(problem, dtype)
    numbers = Numbers(
        lambda index: got["out"][index],
        narrowest(got["out"], dtype, rounding.dtype_of(out, "out")),
    )
    if lse is not None:
        if estimator != "softmax":
            raise ValueError(f"`lse` must not be given for {estimator}.")
        own = narrowest(got["lse"], dtype, rounding.dtype_of(lse, "lse"))
        numbers = numbers._replace(lse=lambda index: got["lse"][index], lse_dtype=own)
    return judge(problem, numbers, dtype, profile, alpha)


def narrowest(x: _Floats, dtype: str, own: str) -> str:
    """The storage type where it holds the numbers, their own type otherwise."""
    return dtype if x.size and np.all(FORMATS[dtype].holds(x)) else own


def alpha_of(alpha: Any) -> float:
    """Check a level."""
    found = float(_validate.real("alpha", alpha, positive=True))
    if found >= 1:
        raise ValueError(f"`alpha` must be between 0 and 1, got {found}.")
    return found


def _estimator(
    estimator: Any, omega: Any, log_weight: Any, features: str, feature_map: Any
) -> dict[str, Any]:
    """What the estimator takes beside queries, keys and values."""
    record = ESTIMATORS.get(estimator) if isinstance(estimator, str) else None
    name = record.name if record is not None else estimator
    if name == "softmax":
        given = {"omega": omega, "log_weight": log_weight, "feature_map": feature_map}
        for option, x in given.items():
            if x is not None:
                raise ValueError(f"`{option}` must not be given for softmax.")
        return {}
    if name == ESTIMATORS["rfa"].name:
        if omega is None:
            raise ValueError("`omega` must be given for rfa: frequencies (..., S, d), got None.")
        return {"omega": omega, "log_weight": log_weight, "features": features}
    if name == "linear":
        return {"feature_map": elu_features if feature_map is None else feature_map}
    raise ValueError(f"`estimator` must be softmax, rfa or linear, got {estimator!r}.")
