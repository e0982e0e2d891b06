"""Keys, or channels of scores, that have factors of their own: by derivatives to these."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ....arrays.library import Doubles
from ...rounding.head import SoftmaxHead
from ...rounding.problems import Problem
from ...verification.findings import name_first, name_span
from ..causes.sampled import Alternative, Result, Rows, take_rows
from ..causes.slips import TILE_SIZES, attend_by, score_all
from ..causes.wrong_rows import Sampled, finite, row_sizes, thin
from .classes import KeyClass
from .intervals import Edges, choose_edges
from .seen_keys import describe_counts
from .sums import describe_keys

_FACTOR_HEADS, _MOST_TERMS = 4, 2**20  # that are looked at; terms of keys, that are kept
_MOST_FACTORS, _FACTOR_PERIODS = 64, (2, 3, 4, 8)
_FACTOR_TURNS, _MOST_FACTOR, _LARGEST_LEFT = (3, 9), 1e3, 1e100
_LEFT_AT_FIRST = 0.5, 0.9  # of the square of errors by derivatives: as they are, of scores
_LEFT_BY_FACTORS, _LEFT_AT_LEAST = 4.0, 0.25  # mean square of z, at most; as if it were so much
_FEW_FACTORED, _LEFT_BY_KEY = 8, 0.95  # keys, at most; of squares, by each
_SURE_FACTOR = 5.0  # standard errors from 1
_SURE_OF_FACTORS = 30.0  # log of a ratio of likelihoods, at least
_CHANNEL_HEADS, _CHANNEL_ROWS, _CHANNEL_NUMBERS = 8, 128, 8  # at most; numbers of each factor
_CHANNEL_TURNS, _MOST_CHANNEL_TERMS = (6, 30), 2**28
_KNOWN_FACTOR, _LEAST_APART = 0.1, 0.03  # error of a factor, at most; from another, or 0 and 1
_LIKE_FITTED = 1.5  # times the mean square of z that is left, at most, with whole factors

_FactorWay = Callable[[Doubles, Doubles, Doubles], tuple[Doubles, Doubles]]
# What factors c change of scores s and values v, and whether derivatives to c have s as a factor.
_FACTORED: Mapping[str, tuple[_FactorWay, bool]] = {
    "values": (lambda s, v, c: (s, c[:, None] * v), False),
    "scores": (lambda s, v, c: (np.where(np.isneginf(s), s, c * s), v), True),
    "weights": (lambda s, v, c: (s + np.log(c), v), False),
}


class _FactoredRows(NamedTuple):
    """Some wrong rows of a head: scores, (rows, keys and sinks), values, the rows, their unit."""

    s: Doubles
    v: Doubles
    got: Doubles
    size: Doubles


class _FactoredKeys(NamedTuple):
    """Factors of the values, scores or weights of keys, and how well they explain wrong rows."""

    cost: float  # less log likelihood
    way: str
    of_keys: Doubles
    changed: npt.NDArray[np.bool_]
    error: float  # of the factor, if there is one


def list_factored_keys(
    problem: Problem, wrong: Sequence[Sampled], unit: float
) -> Iterator[Alternative]:
    """List the kernel that multiplies values, scores or weights of some keys.

    These are keys one after another, tiles or remainder classes, each with its factor: found by
    Gauss-Newton, from running sums of derivatives to the factors of all keys.
    """
    _, m, d = problem.shape
    some = thin(wrong, max(1, min(_FACTOR_HEADS, _MOST_TERMS // max(m * d, 1))))
    count = max(1, _MOST_TERMS // max(m * d * len(some), 1))
    rows = []
    for x in (x.few(count) for x in some):
        head = take_rows(problem, x.rows)
        rows.append(_FactoredRows(score_all(head), head.v, x.got, unit * row_sizes(x.got)))
        if head.keys != m:  # keys of a sequence, of which others have no part
            return
    if not rows or not all(np.all(np.isfinite(x.got)) for x in rows):
        return
    shifted = problem.softcap is not None or "bias" in problem.first
    ways = [x for x in _FACTORED if not (shifted and x == "scores")]
    j = np.arange(m)
    groups = [j // x for x in TILE_SIZES if x < m <= x * _MOST_FACTORS]
    groups += [j % x for x in _FACTOR_PERIODS if x < m]
    found = list[_FactoredKeys]()
    error = np.concatenate([_errors_left(x, "values", np.ones(m)).ravel() for x in rows])
    whole = np.concatenate([(x.got / x.size).ravel() for x in rows]) - error
    rest = error - float(whole @ error) / max(float(whole @ whole), 1e-300) * whole
    # As plain: no factor, or one of the output.
    plain = min(_cost(float(x @ x), len(x), y) for y, x in enumerate((error, rest)))
    # Of groups which are others is chosen, of keys one after another the edges.
    chosen = [2 * math.log(m), *((np.max(x) + 1) * math.log(2) for x in groups)]
    for way in ways:
        terms, most = _stack_terms(rows, way, np.ones(m)), _LEFT_AT_FIRST[_FACTORED[way][1]]
        sums = np.pad(np.cumsum(terms, -1), ((0, 0), (1, 0)))
        span = np.where(_find_factored_span(sums, error), 0, -1)
        for group, cost in zip([span, *groups], chosen, strict=True):
            columns = terms @ _mark_groups(group)
            left = error - columns @ np.linalg.lstsq(columns, error, rcond=None)[0]
            if left @ left < max(most * (rest @ rest), _LEFT_BY_FACTORS * len(left)):
                found += _fit_factors_of(rows, way, group, cost)
        # Weights of few keys are counts, which are found elsewhere, of hidden keys as well.
        if way != "weights" and (few := _find_factored_keys(rows, way, m)).any():
            found += _fit_factors_of(rows, way, np.cumsum(few) * few - 1, np.sum(few) * math.log(m))
    best = min(found, key=lambda x: x.cost, default=None)
    if best is None or plain - best.cost < _SURE_OF_FACTORS:
        return
    answer = partial(_attend_factored, problem, best.way, best.of_keys)
    yield Alternative(_describe_factors(best), problem, answer=answer, fitted=True)


def list_channel_factors(
    problem: Problem, wrong: Sequence[Sampled], unit: float
) -> Iterator[Alternative]:
    """List the kernel whose scores lack channels, or multiply them by factors of their own.

    These are found by Gauss-Newton, from rows that see few keys: what hides more is another cause.
    """
    from scipy import optimize  # here, as most files need none

    (_, m, columns), d, rows, numbers = problem.shape, problem.first["q"].shape[1], [], 0
    every = [x.take(slice(_CHANNEL_ROWS)) for x in thin(wrong, _CHANNEL_HEADS)]
    for x in every:
        mask = take_rows(problem, x.rows).mask
        seen = np.full(len(x.got), m) if mask is None else np.sum(mask, -1)
        told = np.cumsum(np.clip(seen - 1, 0, columns))
        some = told < told[0] + _CHANNEL_NUMBERS * d // len(every)
        numbers += np.max(told[some])
        rows.append((take_rows(problem, x.take(some).rows), x.got[some]))
    terms = sum(len(y) for _, y in rows) * m * columns * d
    known = all(np.all(np.isfinite(y)) for _, y in rows) and numbers >= 2 * d
    if problem.softcap is not None or not known or terms > _MOST_CHANNEL_TERMS:
        return

    def leave(x: SoftmaxHead, got: Doubles, c: Doubles) -> Doubles:
        out = attend_by(score_all(x._replace(q=x.q * c)), x.v).out
        return np.clip(finite((got - out) / unit / row_sizes(got)), -_LARGEST_LEFT, _LARGEST_LEFT)

    def derive(x: SoftmaxHead, got: Doubles, c: Doubles) -> Doubles:
        """Return derivatives of what is left to factors, (rows, columns, channels)."""
        s, j = score_all(x._replace(q=x.q * c)), slice(x.keys)
        found = attend_by(s, x.v)
        p = np.exp(s - found.lse[:, None])[:, j, None]
        by_key = (p * (found.out[:, None] - x.v[j])).mT @ x.k[j]
        return finite(by_key * (x.scale * x.q / unit / row_sizes(got))[:, None])

    def of_rows(part: Callable[..., Doubles], *shape: int) -> Callable[[Doubles], Doubles]:
        return lambda c: np.concatenate([part(*x, c).reshape(-1, *shape) for x in rows])

    errors, slopes = of_rows(leave), of_rows(derive, d)
    c, left = np.ones(d), float(np.mean(np.square(errors(np.ones(d)))))
    for turns in _CHANNEL_TURNS:  # of which the first must help
        fit = optimize.least_squares(errors, c, slopes, max_nfev=turns)
        before, c, left = left, fit.x, float(np.mean(np.square(fit.fun)))
        if left > max(_LEFT_BY_FACTORS, before / 2):
            return
    error = np.sqrt(np.diagonal(np.linalg.pinv(fit.jac.T @ fit.jac)) * max(left, 1.0))
    whole = np.where(np.abs(c - np.rint(c)) < _LEAST_APART, np.rint(c) + 0.0, c)
    c = whole if np.mean(np.square(errors(whole))) < _LIKE_FITTED * left else c
    if left > _LEFT_BY_FACTORS or np.max(error) > _KNOWN_FACTOR or np.ptp(c) < _LEAST_APART:
        return
    text = f"{describe_keys(c == 0, 'channels')} of q, or of k, do not enter the scores"
    if not np.isin(c, [0, 1]).all():
        digits = max(1, math.floor(-math.log10(_SURE_FACTOR * np.max(error))))
        each = [f"{round(y, digits):g} (channel {x})" for x, y in enumerate(c) if y != 1]
        text = f"channels of q, or of k, have factors in the scores: {name_first(each)}"
    moved = problem.replaced("q", lambda _, q: q * c)
    yield Alternative(text, moved, fitted=bool(np.any(c % 1)))


def _multiply(s: Doubles, v: Doubles, way: str, c: Doubles) -> tuple[Doubles, Doubles]:
    """Multiply what has factors; a sink has none."""
    change, _ = _FACTORED[way]
    with np.errstate(all="ignore"):
        return change(s, v, np.pad(c, (0, len(v) - len(c)), constant_values=1.0))


def _errors_left(x: _FactoredRows, way: str, c: Doubles) -> Doubles:
    """Return the errors that factors leave, over their unit."""
    return np.asarray((x.got - attend_by(*_multiply(x.s, x.v, way, c)).out) / x.size)


def _derive_factors(x: _FactoredRows, way: str, c: Doubles) -> Doubles:
    """Return derivatives of rows to factors, (rows, keys, columns)."""
    s, v = _multiply(x.s, x.v, way, c)
    found, m = attend_by(s, v), len(c)
    with np.errstate(all="ignore"):
        p = np.exp(s - found.lse[:, None])[:, :m]
    if _FACTORED[way][1]:
        p = p * np.where(p > 0, x.s[:, :m], 0.0)
    elif way == "weights":
        p = p / np.where(c > 0, c, 1.0)
    terms = x.v[:m] if way == "values" else x.v[:m] - found.out[:, None]
    return np.asarray(p[..., None] * terms / x.size[:, None])


def _stack_terms(rows: Sequence[_FactoredRows], way: str, c: Doubles) -> Doubles:
    """Return what factors of keys move, by derivatives, (numbers, keys)."""
    terms = (np.moveaxis(finite(_derive_factors(x, way, c)), 1, -1) for x in rows)
    return np.concatenate([x.reshape(-1, len(c)) for x in terms])


def _mark_groups(group: npt.NDArray[np.int64]) -> Doubles:
    return np.asarray(group[:, None] == np.arange(np.max(group) + 1), float)


def _find_factored_span(every: Doubles, error: Doubles) -> KeyClass:
    """Find the keys one after another that one factor of explains most, by running sums."""
    m = every.shape[1] - 1
    square, along = np.einsum("ij,ij->j", every, every), error @ every

    def rate(starts: Edges, stops: Edges) -> Doubles:
        """Return what the factor of the keys between edges explains of the errors, negative."""
        size = square[stops, None] + square[starts] - 2 * every[:, stops].T @ every[:, starts]
        least = 1e-12 * square[-1] + 1e-300
        explained = (along[stops, None] - along[starts]) ** 2 / np.maximum(size, least)
        return np.where(stops[:, None] > starts, -explained, math.inf)

    start, stop = choose_edges(rate, m)
    return np.asarray((np.arange(m) >= start) & (np.arange(m) < stop))


def _find_factored_keys(rows: Sequence[_FactoredRows], way: str, m: int) -> KeyClass:
    """Find few keys with a factor each, the one that explains most of what is left first."""
    c, few, left = np.ones(m), np.zeros(m, bool), math.inf
    for _ in range(_FEW_FACTORED + 1):
        error = np.concatenate([finite(_errors_left(x, way, c)).ravel() for x in rows])
        before, left = left, float(error @ error)
        if left < _LEFT_BY_FACTORS * len(error):
            return few
        if not left < _LEFT_BY_KEY * before:
            break
        terms = _stack_terms(rows, way, c)
        size = np.where(few, math.inf, np.einsum("ij,ij->j", terms, terms) + 1e-300)
        few[np.argmax(np.square(error @ terms) / size)] = True
        c[few] += np.linalg.lstsq(terms[:, few], error, rcond=None)[0]
        c = np.clip(c, -_MOST_FACTOR, _MOST_FACTOR)
    return np.zeros(m, bool)


def _fit_factors_of(
    rows: Sequence[_FactoredRows], way: str, group: npt.NDArray[np.int64], chosen: float
) -> Iterator[_FactoredKeys]:
    """Fit a factor of each group of keys, but -1; then, if those that are not 1 are alike, one."""
    from scipy import optimize  # here, as most files need none

    of_group = _mark_groups(group)
    count = of_group.shape[1]

    def spread(times: Doubles) -> Doubles:
        return np.where(group < 0, 1.0, times[group])

    def leave(times: Doubles) -> Doubles:
        found = [_errors_left(x, way, spread(times)).ravel() for x in rows]
        return np.clip(finite(np.concatenate(found)), -_LARGEST_LEFT, _LARGEST_LEFT)

    def derive(times: Doubles) -> Doubles:
        return -_stack_terms(rows, way, spread(times)) @ of_group

    least = 0.0 if way == "weights" else -_MOST_FACTOR
    times, left = np.ones(count), float(np.mean(np.square(leave(np.ones(count)))))
    for turns in _FACTOR_TURNS:  # of which the first must help
        fit = optimize.least_squares(leave, times, derive, (least, _MOST_FACTOR), max_nfev=turns)
        before, times, left = left, fit.x, float(np.mean(np.square(fit.fun)))
        if left > max(_LEFT_BY_FACTORS, before / 2):
            return
    if left > _LEFT_BY_FACTORS:
        return
    normal = fit.jac.T @ fit.jac
    normal += (1e-12 * np.trace(normal) + 1e-300) * np.eye(count)
    error = np.sqrt(np.diagonal(np.linalg.inv(normal)) * max(left, 1.0))
    off = np.abs(times - 1) > _SURE_FACTOR * error
    changed = np.isin(group, np.flatnonzero(off))
    seen = np.any([np.any(np.isfinite(x.s[:, : len(group)]), 0) for x in rows], 0)
    every = changed[seen].all()
    if not off.any() or (every and np.ptp(times[off]) < _SURE_FACTOR * np.max(error[off])):
        return  # the whole output may have a factor
    if count > 1 and not every:  # fewer numbers, if one explains as much
        yield from _fit_factors_of(rows, way, np.where(changed, 0, -1), chosen)
    found = np.where(group < 0, 1.0, times[group])
    cost = _cost(float(fit.fun @ fit.fun), len(fit.fun), count) + chosen
    yield _FactoredKeys(cost, way, found, changed, float(error[0]) if count == 1 else math.nan)


def _cost(square: float, numbers: int, fitted: int) -> float:
    """Return the log likelihood that so many numbers lose, with a price for each that is fitted."""
    left = max(square / numbers, _LEFT_AT_LEAST)
    return numbers / 2 * math.log(left) + fitted / 2 * math.log(numbers)


def _describe_factors(found: _FactoredKeys) -> str:
    """Say which keys have which factor, of many the first."""
    keys = np.flatnonzero(found.changed)
    if math.isfinite(found.error):
        c = float(found.of_keys[keys[0]])
        if found.way == "weights" and abs(c - round(c)) < _SURE_FACTOR * found.error:
            return describe_counts(dict.fromkeys(keys.tolist(), float(round(c))))
        digits = max(1, math.floor(-math.log10(_SURE_FACTOR * max(found.error, 1e-9))))
        size = f"{c:.{digits}f}".rstrip("0").rstrip(".")
        return f"{found.way} of {describe_keys(found.changed)} are {size} times what they should be"
    runs = np.split(
        keys, np.flatnonzero((np.diff(keys) != 1) | (np.diff(found.of_keys[keys]) != 0)) + 1
    )
    said = [f"{name_span('keys', x)} {found.of_keys[x[0]]:.3g}" for x in runs]
    return f"{found.way} of some keys have factors: {name_first(said)}"


def _attend_factored(problem: Problem, way: str, c: Doubles, rows: Rows) -> Result:
    head = take_rows(problem, rows)
    return attend_by(*_multiply(score_all(head), head.v, way, c))
