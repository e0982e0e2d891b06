r"""What weights count by: their rank, their size or their place, as all wrong rows together tell.

Which are cut off is told by running sums of the largest. If the weight :math:`p_{ij}` counts
:math:`c_g` times where query and key are of group g, wrong rows obey :math:`\sum_g c_g \sum_{j \in
g} p_{ij} (v_j - \mathrm{out}_i) = 0`: many equations in few numbers, whose errors are as large as
:math:`\sum_g c_g \sum_{j \in g} p_{ij}`. The least of their ratio is an eigenvalue.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.linalg import eigh
from scipy.optimize import minimize_scalar

from ....arrays.library import Doubles
from ....arrays.words import place
from ...rounding.head import SoftmaxHead
from ...rounding.problems import Index, Problem
from ...verification.findings import Numbers, name_first, name_span
from ..causes.sampled import Alternative, Place, Result, Rows, Seen, attend, take_rows
from ..causes.slips import weigh_keys
from ..causes.wrong_rows import Sampled, row_sizes, thin
from .seen_keys import describe_counts, name_runs

_HEADS, _ROWS, _NUMBERS = 8, 128, 2**20  # that are looked at, and terms of a head
_LEFT_BY_PATTERN = 4.0  # mean square of z, at most
_EQUATIONS = 4  # of each number that is found, at least
_KNOTS, _FEWEST_KNOTS = 64, 12  # of a function of what is no whole number
_NUMBERS_OF_KNOT = 4  # that differ, at least, for each
_LEAST_MASS = 1e-9  # of the weights, below which a group may count anyhow
_SURELY_OFF = 6.0  # standard deviations by which a group counts otherwise
_NO_COUNT = 0.02  # of the largest factor, below which there is none
_MOST_LOG = 300.0  # of a factor
_NEAR_USUAL = 0.05  # how far from what it should be a factor may be, besides
_NAMED, _FEWEST = 3, 4  # spans, or heads, that are named; groups of a line
_FEWEST_COLUMNS, _ALIKE = 8, 0.02  # that tell a factor; how far equal factors are apart
_FIRST_SCALES = (0.0, 0.25, 0.5, 0.7, 1.0, 1.4, 2.0, 4.0)  # of scores, where fits begin
_SCALE_STEPS, _SCALE_STEP = 6, 1e-3  # of a fit, and by which slopes are found
_ALL_OVER = 0.8  # of the numbers, at least, of which none is named
_STRAIGHT = 1e-3  # of the squares of logarithms of factors, that a line leaves at most


def _take_some(problem: Problem, wrong: Sequence[Sampled]) -> list[Sampled]:
    rows = min(_ROWS, max(_NUMBERS // (problem.shape[1] * problem.shape[2]), 1))
    return [x.few(rows) for x in thin(wrong, _HEADS)]


# --- small weights that are left out --------------------------------------------------------------

_Feature = Callable[[Doubles, Result], Doubles]  # rises as weights fall; kept are those below a cut
_CUT_OFF: tuple[tuple[str, _Feature, Callable[[float], float]], ...] = (
    (
        "only the {:.0f} largest scores of each row count",
        lambda p, _: np.arange(p.shape[-1]) + 1.0 + 0 * p,
        lambda cut: math.ceil(cut) - 1,
    ),
    (
        "weights below {:.3g} of their sum are left out",
        lambda p, _: -np.log(p),
        lambda cut: math.exp(-cut),
    ),
    (
        "scores below {:.3g} are left out",
        lambda p, x: -np.log(p) - x.lse[:, None],
        lambda cut: -cut,
    ),
    (
        "scores more than {:.3g} below the largest are left out",
        lambda p, _: np.log(p[:, :1] / p),
        float,
    ),
)


def list_cuts(problem: Problem, wrong: Sequence[Sampled], unit: float) -> Iterator[Alternative]:
    """List kernels that leave out small weights: all but so many, or those below a number."""
    ways: dict[bool, list[Doubles]] = {False: [], True: []}
    weights: list[tuple[Doubles, Result]] = []
    for x in _take_some(problem, wrong):
        exact, p, v = _sort_weights(problem, x.rows)
        weights.append((p, exact))
        for in_sum in [*ways]:
            far = _rate_kept(x, exact, p, v, unit, in_sum)
            if np.sum(np.min(far, -1)) < _LEFT_BY_PATTERN * x.got.size:
                ways[in_sum].append(far)
            else:
                del ways[in_sum]  # no cut explains these rows
        if not ways:
            return
    for (in_sum, rated), (text, feature, say) in product(ways.items(), _CUT_OFF if weights else ()):
        far = np.concatenate(rated)
        with np.errstate(all="ignore"):
            cut, off = _find_cut(far, np.concatenate([feature(*x) for x in weights]))
        if off < _LEFT_BY_PATTERN * len(far) * problem.shape[2]:
            more = ", but count in the sum" * in_sum
            answer = partial(_attend_cut, problem, feature, cut, in_sum)
            yield Alternative(text.format(say(cut)) + more, problem, answer=answer)


def _sort_weights(problem: Problem, rows: Rows) -> tuple[Result, Doubles, Doubles]:
    """Return the exact result, its weights, the largest first, and their values."""
    head = take_rows(problem, rows)
    exact = attend(head)
    p = weigh_keys(head, exact.lse)
    order = np.argsort(-p, -1)
    return exact, np.take_along_axis(p, order, -1), head.v[order]


def _rate_kept(
    x: Sampled, exact: Result, p: Doubles, v: Doubles, unit: float, in_sum: bool
) -> Doubles:
    """Rate numbers of the largest weights, 1 to all, by sums of squares of z: (rows, numbers)."""
    kept = np.cumsum(p, -1)
    left = (kept[:, -1:] - kept) * (not in_sum)
    outs = np.cumsum(p[..., None] * v, 1) / (1 - left)[..., None]
    z = (outs - x.got[:, None]) / (unit * row_sizes(x.got))[:, None]
    return np.asarray(np.sum(z * z, -1))


def _find_cut(far: Doubles, places: Doubles) -> tuple[float, float]:
    """Find the number below which the places are of weights that are kept, and how far rows are."""
    rows, best = np.arange(len(far)), np.argmin(far, -1)
    ends = places[rows, best], places[rows, np.minimum(best + 1, far.shape[1] - 1)]
    tried = np.unique(np.concatenate([*ends, (ends[0] + ends[1]) / 2]))
    tried = tried[np.isfinite(tried)]
    kept = [np.maximum(np.sum(places < cut, -1) - 1, 0) for cut in tried.tolist()]
    off = np.array([np.sum(far[rows, x]) for x in kept])
    near = np.flatnonzero(off <= np.min(off, initial=math.inf) + 1)
    return (float(tried[near[len(near) // 2]]), float(np.min(off))) if len(near) else (0, math.inf)


def _attend_cut(
    problem: Problem, feature: _Feature, cut: float, in_sum: bool, rows: Rows
) -> Result:
    exact, p, v = _sort_weights(problem, rows)
    kept = np.where(feature(p, exact) < cut, p, 0.0)
    total = 1 - np.sum(p - kept, -1)
    out = (kept[:, None] @ v)[:, 0]
    if in_sum:
        return exact._replace(out=out)
    return exact._replace(out=out / total[:, None], lse=exact.lse + np.log(total))


# --- groups of queries and keys that count otherwise ----------------------------------------------


Scale = Callable[[Doubles], Doubles]  # of a number


class _Kind(NamedTuple):
    """A number of each query and key by which weights may count."""

    name: str
    of: Callable[[SoftmaxHead, Doubles, Doubles], Doubles]  # of level keys, and of scores
    whole: bool = False  # whether it is a whole number, that of a group
    of_scores: bool = False
    only_line: bool = False  # whether it says nothing but that its multiple is added to scores
    free: bool = False  # whether causal attention and windows are part of it


_PATTERN_KINDS = (
    _Kind("|k|^2", lambda head, *_: np.sum(np.square(head.k[: head.keys]), -1), only_line=True),
    _Kind("j", lambda head, *_: np.arange(head.keys), True),
    _Kind("(i - j)", lambda head, level, _: level - np.arange(head.keys), True, free=True),
    _Kind("the score", lambda _, __, s: s, of_scores=True),
    _Kind(
        "the score less the largest",
        lambda _, __, s: s - np.max(s, -1, keepdims=True),
        of_scores=True,
    ),
)


class _Terms(NamedTuple):
    """What weights add to some rows, and what they may count by."""

    exact: Result
    p: Doubles  # (queries, keys)
    v: Doubles
    number: Doubles
    seen: npt.NDArray[np.bool_]

    @classmethod
    def take(cls, problem: Problem, kind: _Kind, rows: Rows) -> _Terms:
        head = take_rows(problem, rows)
        exact = attend(head)
        p = usual = weigh_keys(head, exact.lse)
        if kind.free:
            p = weigh_keys(take_rows(problem, rows, _show_all), exact.lse)
        level = np.asarray(rows.queries[:, None] + float(problem.shape[1] - problem.shape[0]))
        with np.errstate(all="ignore"):
            number = kind.of(head, level, np.log(p) + exact.lse[:, None])
        return cls(exact, p, head.v[: head.keys], np.where(p > 0, number, 0.0), usual > 0)

    def attend(self, scale: Scale) -> Result:
        """Compute the mean of the values if weights have a factor."""
        w = self.p * scale(self.number)
        total = np.sum(w, -1) + 1 - np.sum(self.p * self.seen, -1)  # with a sink
        out = w @ self.v / total[:, None]
        return self.exact._replace(out=out, lse=self.exact.lse + np.log(total))


def _show_all(x: Place) -> Seen:
    return np.ones(np.broadcast_shapes(x.i.shape, x.j.shape), bool)


class _Pattern(NamedTuple):
    """Factors of weights at some numbers; their logarithms are linear between these."""

    at: Doubles
    times: Doubles
    errors: Doubles
    usual: Doubles  # what they should be

    def of(self, x: Doubles, groups: bool) -> Doubles:
        """Find the factors at other numbers: 1 for another group."""
        logs = np.log(np.maximum(self.times, _LEAST_MASS))
        times = np.exp(np.interp(x, self.at, logs))
        return np.where(np.isin(x, self.at), times, 1.0) if groups else times

    @property
    def is_off(self) -> npt.NDArray[np.bool_]:
        """Where factors are surely others than they should be."""
        off = np.abs(self.times - self.usual)
        return np.asarray(off > _SURELY_OFF * self.errors + _NEAR_USUAL)

    def find_line(self) -> float:
        """Find the slope of the logarithms of the factors; 0 where they are on no line."""
        some = (self.usual > 0) & (self.times > _SURELY_OFF * self.errors)
        x, logs, w = self.at[some], np.log(self.times[some]), (self.times / self.errors)[some]
        if len(x) < max(_FEWEST, len(self.at) / 2):
            return 0.0
        slope, start = np.polyfit(x, logs, 1, w=w)
        rest = np.sum(np.square((logs - start - slope * x) * w))
        return float(slope) if rest < _STRAIGHT * np.sum(np.square((logs - start) * w)) else 0.0


def list_patterns(problem: Problem, wrong: Sequence[Sampled], unit: float) -> Iterator[Alternative]:
    """List kernels whose weights have a factor by a number of the query and the key.

    It is the same in all heads, or each has its own.
    """
    some = _take_some(problem, wrong)
    for kind in _PATTERN_KINDS if some else ():
        of_first = [(some[0], _Terms.take(problem, kind, some[0].rows))]
        first = _fit_pattern(of_first, kind, unit)
        if first is None:
            continue
        pairs = of_first + [(x, _Terms.take(problem, kind, x.rows)) for x in some[1:]]
        found: dict[Index, _Pattern | None] = {(): _fit_pattern(pairs, kind, unit)}
        if found[()] is None:
            rest = {x.rows.at: _fit_pattern([(x, y)], kind, unit) for x, y in pairs[1:]}
            found = {some[0].rows.at: first, **rest}
        known = {at: x for at, x in found.items() if x is not None}
        for text, scales in _list_scales(kind, known, pairs) if len(known) == len(found) else ():
            answer = partial(_attend_by, problem, kind, scales)
            yield Alternative(text, problem, answer=answer, named=len(some) < len(wrong))


def _list_scales(
    kind: _Kind, found: Mapping[Index, _Pattern], pairs: Sequence[tuple[Sampled, _Terms]]
) -> Iterator[tuple[str, Mapping[Index, Scale]]]:
    """List what weights are multiplied by in some heads: powers of e, if they are, and as found."""
    slopes = {at: x.find_line() for at, x in found.items()}
    straight = all(slopes.values())
    if straight and kind.of_scores:
        return  # a temperature, which is fitted elsewhere
    if straight:
        for at, x in slopes.items():
            some = [y for y in pairs if y[0].rows.at[: len(at)] == at]
            slopes[at] = minimize_scalar(partial(_rate_slope, some), (0.9 * x, x)).x
        words = {
            at: f"{x:.3g} times {kind.name} is added to the scores" for at, x in slopes.items()
        }
        yield _name_heads(words), {at: partial(_to_power, x) for at, x in slopes.items()}
    if kind.only_line:
        return
    ways = [(_describe_function, found)]
    if kind.whole:
        named = {
            at: x._replace(times=np.where(x.is_off, x.times, x.usual)) for at, x in found.items()
        }
        ways = [(_describe_groups, named), (_describe_bias, found)]
    for say, patterns in ways:
        texts = {at: say(kind, x) for at, x in patterns.items()}
        if any(texts.values()):
            scales = {at: partial(x.of, groups=kind.whole) for at, x in patterns.items()}
            yield _name_heads(texts), scales


def _rate_slope(pairs: Sequence[tuple[Sampled, _Terms]], slope: float) -> float:
    off = 0.0
    for x, terms in pairs:
        out = terms.attend(partial(_to_power, slope)).out
        off += float(np.sum(np.square((x.got - out) / row_sizes(out))))
    return off


def _name_heads(texts: Mapping[Index, str]) -> str:
    """Say something of each head, of many the first."""
    every = {*texts.values()}
    if len(every) == 1:
        return every.pop()
    words = [f"{text} in head {place(at)}" for at, text in texts.items() if text]
    return name_first(words, between="; ")


def _choose_places(x: Doubles, weights: Doubles, kind: _Kind) -> Doubles:
    """Choose the numbers at which factors are found: all whole ones, or evenly by weight."""
    x, weights = x[weights > 0], weights[weights > 0]
    if kind.whole or not len(x):
        return np.unique(x)
    # A function of so few numbers is any number of each, but a line.
    most = len(np.unique(x)) // (1 if kind.only_line else _NUMBERS_OF_KNOT)
    order, count = np.argsort(x), min(_KNOTS, most)
    if count < _FEWEST_KNOTS:
        return np.zeros(0)
    share = np.cumsum(weights[order])
    inner = np.interp(np.linspace(0, share[-1], count - 2), share, x[order])
    return np.unique([np.min(x), *inner, np.max(x)])


def _fit_pattern(
    pairs: Sequence[tuple[Sampled, _Terms]], kind: _Kind, unit: float
) -> _Pattern | None:
    """Find the factors that leave roundings of all these rows, if there are."""
    number = np.concatenate([y.number.ravel() for _, y in pairs])
    p = np.concatenate([y.p.ravel() for _, y in pairs])
    at = _choose_places(number, p, kind)
    size = len(at)
    if not 2 < size * _EQUATIONS <= sum(x.got.size for x, _ in pairs):
        return None
    square, noise = np.zeros((2, size, size))
    mass, usual = np.zeros((2, size))
    for x, (_, p, v, number, seen) in pairs:
        near, scale = np.interp(number, at, np.arange(size)), 1 / (unit * row_sizes(x.got))
        for r in range(len(p)):
            groups = _spread(p[r], near[r], size)
            sums = groups @ np.ones(len(v))
            errors = (groups @ v - sums[:, None] * x.got[r]) * scale[r]
            square += errors @ errors.T
            noise += np.outer(sums, sums) * v.shape[1]
            mass += sums
            usual += groups @ seen[r]
    ridge = _LEAST_MASS * np.trace(noise) / size
    if not (ridge > 0 and np.all(np.isfinite(square))):
        return None
    noise += ridge * np.eye(size)
    (least,), factors = eigh(square, noise, subset_by_index=[0, 0])
    if not least < _LEFT_BY_PATTERN:
        return None
    # The usual factor is 1: the median by weight of those that count at all.
    times, usual = factors[:, 0], np.round(usual / np.maximum(mass, 1e-300))
    times = times * np.sign(np.sum(times * mass))
    order = np.argsort(times)
    counts = times[order] > _NO_COUNT * np.max(times)
    share = np.cumsum((mass * usual)[order] * counts)
    times = times / times[order][np.searchsorted(share, share[-1] / 2)]
    return _Pattern(at, times, np.sqrt(np.diag(np.linalg.inv(square + noise))), usual)


def _spread(p: Doubles, near: Doubles, size: int) -> Doubles:
    """Divide weights of keys between the numbers that are next to their own, (numbers, keys)."""
    low, groups = near.astype(int), np.zeros((size, len(p)))
    ends, part = np.stack([low, np.minimum(low + 1, size - 1)]), near - low
    np.add.at(groups, (ends, np.arange(len(p))), p * np.stack([1 - part, part]))
    return groups


def _attend_by(problem: Problem, kind: _Kind, scales: Mapping[Index, Scale], rows: Rows) -> Result:
    terms = _Terms.take(problem, kind, rows)
    scale = next((x for at, x in scales.items() if at == rows.at[: len(at)]), None)
    return terms.exact if scale is None else terms.attend(scale)


def _to_power(slope: float, x: Doubles) -> Doubles:
    return np.exp(np.clip(slope * x, -_MOST_LOG, _MOST_LOG))


def _describe_groups(kind: _Kind, found: _Pattern) -> str:
    """Say how often each group counts, if these are few numbers."""
    times = found.times[found.is_off]
    if len(np.unique(np.round(times, 2))) > _NAMED:
        return ""
    counts = dict(zip(found.at[found.is_off].astype(int).tolist(), times.tolist(), strict=True))
    hidden = {*found.at[found.usual == 0].astype(int).tolist()}
    return describe_counts(counts, hidden, " before the query" * kind.free) if counts else ""


def _describe_bias(kind: _Kind, found: _Pattern) -> str:
    off = found.is_off
    numbers = found.at[off].astype(int)
    few = _NAMED < len(numbers) <= _ALL_OVER * len(off)
    times = found.times[off if few else found.times > found.errors]
    if not len(numbers) or not len(times):
        return ""
    least, most = (math.log(max(f(times), _LEAST_MASS)) for f in (np.min, np.max))
    where = f", where that is {name_runs(numbers)}" if few else ""
    return f"a bias by {kind.name} is added to the scores, {least:.2g} to {most:.2g}{where}"


def _describe_function(kind: _Kind, found: _Pattern) -> str:
    some = thin(np.arange(len(found.at)), _NAMED + 1)
    each = (f"{found.times[x]:.2g} at {found.at[x]:.3g}" for x in some)
    return f"weights have a factor by {kind.name}: {', '.join(each)}"


# --- rows whose scores have a factor --------------------------------------------------------------


def list_row_scales(
    problem: Problem, wrong: Sequence[Sampled], unit: float, numbers: Numbers
) -> Iterator[Alternative]:
    """List the kernel that multiplies the scores of each wrong row by a number of its own."""
    some = _take_some(problem, wrong)
    if problem.shape[2] < _FEWEST_COLUMNS or not some:
        return
    found: dict[int, list[float]] = {}
    for x in some:
        factors, out = _fit_scales(problem, x.rows, x.got)
        if not np.mean(np.square((x.got - out) / (unit * row_sizes(x.got)))) < _LEFT_BY_PATTERN:
            return
        for query, c in zip(x.rows.queries.tolist(), factors.tolist(), strict=True):
            found.setdefault(query, []).append(c)
    heads = [x.rows.at for x in wrong]
    answer = partial(_attend_scaled, problem, heads, numbers)
    yield Alternative(_describe_scales(found), problem, answer=answer)


def _fit_scales(problem: Problem, rows: Rows, got: Doubles) -> tuple[Doubles, Doubles]:
    """Fit the factor of the scores of each row by Gauss and Newton, from the best of some."""
    head = take_rows(problem, rows)

    def outs(c: Doubles) -> Doubles:
        return attend(head._replace(q=c[:, None] * head.q)).out

    tried = [np.full(len(got), c) for c in _FIRST_SCALES]
    off = [np.sum(np.square(outs(c) - got), -1) for c in tried]
    c = np.stack(tried)[np.argmin(off, 0), np.arange(len(got))]
    for _ in range(_SCALE_STEPS):
        out, step = outs(c), _SCALE_STEP * np.maximum(np.abs(c), _SCALE_STEP)
        slope = (outs(c + step) - out) / step[:, None]
        size = np.maximum(np.sum(slope * slope, -1), _LEAST_MASS)
        most = np.maximum(np.abs(c), _FIRST_SCALES[1]) / 2
        c = c + np.clip(np.sum(slope * (got - out), -1) / size, -most, most)
    return c, outs(c)


def _attend_scaled(
    problem: Problem, heads: Sequence[Index], numbers: Numbers, rows: Rows
) -> Result:
    head = take_rows(problem, rows)
    if rows.at not in heads:
        return attend(head)
    c, _ = _fit_scales(problem, rows, numbers.out(rows.at)[rows.queries])
    return attend(head._replace(q=c[:, None] * head.q))


def _describe_scales(found: Mapping[int, Sequence[float]]) -> str:
    """Say by which factors, of few by which rows, and by which function of the row."""
    queries = np.array(sorted(found))
    each = np.array([np.median(found[i]) for i in queries.tolist()])
    alike = all(np.ptp(x) <= _ALIKE * abs(np.median(x)) for x in found.values())
    order = np.sort(each)
    ends = np.append(np.flatnonzero(np.diff(order) > _ALIKE * np.abs(order[1:])), len(order) - 1)
    groups = [(each > x, each <= y) for x, y in pairwise([-math.inf, *order[ends]])]
    kinds = [(each[x & y], queries[x & y]) for x, y in groups]
    if alike and len(kinds) <= _NAMED and all(np.ptp(x) <= _ALIKE * abs(x[0]) for x, _ in kinds):
        said = [f"{np.median(x):.3g} times in {name_span('queries', y)}" for x, y in kinds]
        return f"scores are multiplied: {', '.join(said)}"
    for power, text in ((1, "{:.3g} + {:.3g} i"), (-1, "1 / ({:.3g} + {:.3g} i)")):
        if alike and len(each) >= _FEWEST and np.all(each):
            slope, start = np.polyfit(queries, each**power, 1)
            if np.all(np.abs(start + slope * queries - each**power) < _ALIKE * each**power):
                return f"scores of query i are {text.format(start, slope)} times as large"
    low, high = (f([f(x) for x in found.values()]) for f in (min, max))
    return f"scores have a factor of their own in each wrong row, {low:.3g} to {high:.3g}"
