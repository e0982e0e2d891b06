"""The errors of a kernel by one profile: what is tried of them, and what is found."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .. import stats
from ..arrays.library import Doubles
from ..arrays.threads import for_each
from ..rounding import problems
from ..rounding.backward import list_directions, variance_along
from ..rounding.formats import FORMATS
from ..rounding.head import SoftmaxHead, Tile, scan_tiles
from ..rounding.problems import Problem
from ..rounding.profiles import Profile
from ..rounding.roundings import WORST, Roundings, RowErrors
from .evidence import Evidence, Known, Moments, Sums, chernoff

__all__ = ["Finding", "Numbers", "Suspect", "Trial", "Z", "attempt", "place", "row_weights"]


_SMALLEST_TILE = 16
_ONE_PERCENT = 0.01


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
        Ratio to the bound, largest |z| or mean square of z, each at its least (see `Z`), or a sum
        over its root mean square.
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
    """Errors over their standard deviations, where these are known.

    Tests take each at its least: without what rounding the exact number gives, and over the
    standard deviation for the least favourable leading digits.
    """

    rms: float
    largest: float
    where: tuple[int, ...]


for _type in (Finding, Suspect):
    _type.__module__ = "refattn.verification"  # where users find them, and so do pickles

# Defects that change scores: derivative of the score, and what a size means.
_CHANGES: Mapping[str, Callable[[SoftmaxHead, Tile, slice], Any]] = {
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
    "lost sink": lambda x, e: f"the sink counts {_pm(1 - x, e)} times in the sum of the weights",
    "delta": lambda x, e: f"the part of sum d_out * out counts {_pm(1 + x, e)} times",
    "cap": lambda x, e: f"tanh^2 counts {_pm(1 - x, e)} times in the slope of the cap, 1 - tanh^2",
    "edge+1": lambda x, e: f"a query sees one key more, the next: {_pm(x, e)} of its weight",
    "edge-1": lambda x, e: f"a query does not see its last key: {_pm(x, e)} of its weight",
}


def _sentence(problem: Problem, name: str) -> Callable[[float, float], str]:
    """What a size of a defect means, for the output or a gradient."""
    return lambda x, e: _SENTENCES[name](x, e).replace("the output", problem.result)


def _pm(x: float, error: float) -> str:
    return f"{x:.4g} ± {error:.1g}"


def _near_one(x: float, error: float) -> str:
    """A factor 1 + x with the digits that are known."""
    digits = min(max(2, 1 - math.floor(math.log10(error))), 15) if 0 < error < 1 else 6
    return f"{1 + x:.{digits}f} ± {error:.1g}"


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

    out: Callable[[tuple[int, ...]], Doubles]
    out_dtype: str
    lse: Callable[[tuple[int, ...]], Doubles] | None = None
    lse_dtype: str = "float32"


Numbers.__module__ = "refattn.verification"


class _Found:
    """What the sweep over the heads collects for one profile."""

    def __init__(
        self,
        problem: Problem,
        names: Sequence[str],
        numbers: Numbers,
        weights: Doubles,
        rows_apart: bool,
    ) -> None:
        (n, m, d_v), heads = problem.shape, math.prod(problem.lead)
        self.rows_apart = rows_apart
        m = m + problem.has_sinks if problem.is_mean else 0
        self.along: dict[str, Doubles] = {}  # the weights of errors in sums along a direction
        self.alone: dict[str, Doubles] = {}  # the variance of such a sum by what is in no other
        self.known: dict[str, Known] = {}  # those sums, over all heads
        if problem.gradient is not None and not rows_apart:
            self.along = {x: np.zeros((heads, n, d_v)) for x in names}
            self.alone = {x: np.zeros((heads, n)) for x in names}
        self.weights = weights  # of rows, (heads, n)
        self.problem, self.numbers = problem, numbers
        self.sums = {x: Sums(*(np.zeros((heads, n)) for _ in Sums._fields)) for x in names}
        best, even = (Moments(*(np.zeros((heads, m)) for _ in Moments._fields)) for _ in range(2))
        self.keys = Evidence(best, even)
        self.square, self.counted = np.zeros((heads, n)), np.zeros((heads, n))
        self.column, self.column_rows = np.zeros(d_v), np.zeros(d_v)
        self.strength = 0.0  # sum of squares of outputs over their standard deviations
        self.plain = 0.0  # sum of squares of errors over standard deviations
        self.elements = 0  # that have a law
        self.farthest: tuple[float, tuple[int, ...]] = (0.0, ())  # error over standard deviation
        self.largest: tuple[float, tuple[int, ...]] = (0.0, ())  # of what tests take for z
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

    def add(self, index: tuple[int, ...], i: slice, rows: RowErrors) -> Callable[[], None]:
        """Write what belongs to a block of queries; returned is what adds its part of the sums."""
        at = self.problem.number(index)
        error, own = rows.errors(self.numbers.out(index)[i]), rows.errors(rows.nearest)
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
            if self.rows_apart
            else self.weights[at, 0] / (self.weights.shape[1])
        )
        errors, owns, slacks = (x / rows.std for x in (error, own, rows.slack))
        for name, change in _directions(self.problem, index, i, rows):
            steep, sums = np.where(known, change / rows.std, 0.0), self.sums[name]
            sums.errors[at, i] = np.sum(steep * errors, -1)
            sums.own[at, i] = np.sum(steep * owns, -1)
            sums.size[at, i] = np.sum(steep * steep, -1)
            sums.slack[at, i] = np.sum(np.abs(steep) * slacks, -1)
            if name in self.along:
                assert rows.apart is not None
                self.along[name][at, i] = w = steep / rows.std
                self.alone[name][at, i] = np.sum(w * w * rows.apart, -1)
        strength = float(np.sum(np.square(np.where(known, rows.out / rows.worst, 0.0))))
        plain, elements = float(np.sum(np.square(errors))), int(np.sum(known))
        column, column_rows = np.sum(of_row * z * z, 0), np.sum(of_row * known, 0)
        far, largest, beyond = (_largest(x, index, i) for x in (np.abs(errors), np.abs(z), ratio))
        more = []
        if self.problem.is_mean:
            more.append(self._keys(at, index, i, rows, errors / rows.std, owns / rows.std))
        if self.numbers.lse is not None:
            more.append(self._lse(at, i, self.numbers.lse(index)[i], rows))

        def sums_of_all() -> None:
            self.strength += strength
            self.plain += plain
            self.elements += elements
            self.column += column
            self.column_rows += column_rows
            self.farthest = max(self.farthest, far, key=lambda x: x[0])
            self.largest = max(self.largest, largest, key=lambda x: x[0])
            self.beyond = max(self.beyond, beyond, key=lambda x: x[0])
            for add in more:
                add()

        return sums_of_all

    def _lse(self, at: int, i: slice, got: Doubles, rows: RowErrors) -> Callable[[], None]:
        """The errors of the log normalisers."""
        to = FORMATS[self.numbers.lse_dtype]
        spacing = to.spacing(rows.lse)
        empty = np.isneginf(rows.lse)
        with np.errstate(invalid="ignore"):
            error = np.where(
                empty, np.where(got == rows.lse, 0.0, math.inf), got - rows.lse - rows.lse_rest
            )
        ratio = _beyond(error, rows.lse_bound + np.where(empty, 0.0, spacing / 2))
        variance = np.square(rows.lse_std) + np.where(empty, 0.0, spacing * spacing / 12)
        known = np.isfinite(error) & ~empty
        weight = np.where(known, 1 / variance, 0.0)
        error, exact = np.where(known, error, 0.0), np.where(known, rows.lse, 0.0)
        own = to.round(exact) - exact - np.where(known, rows.lse_rest, 0.0)
        slack = rows.lse_slack + to.spacing(exact) / 2
        sums = self.sums["lse"]
        sums.errors[at, i], sums.size[at, i] = weight * error, weight
        sums.own[at, i], sums.slack[at, i] = weight * own, weight * slack
        apart = self.weights[at, i]
        beyond = np.maximum(np.abs(error) - slack, 0.0)
        largest = float(np.max(ratio, initial=0.0))
        square = float(np.sum(apart * weight * beyond * beyond)) / WORST**2
        count = float(np.sum(apart * known))

        def sums_of_all() -> None:
            self.lse_beyond = max(self.lse_beyond, largest)
            self.lse_square += square
            self.lse_rows += count

        return sums_of_all

    def _keys(
        self,
        at: int,
        index: tuple[int, ...],
        i: slice,
        rows: RowErrors,
        errors: Doubles,
        own: Doubles,
    ) -> Callable[[], None]:
        """The loss of each key, and sink: the derivative to its weight, p (v - out) / (1 - p)."""
        head = self.problem.head(index)
        lse = np.where(np.isfinite(rows.lse), rows.lse, math.inf)[:, None]
        inverse = 1 / np.square(rows.std)
        slack = inverse * rows.slack  # times |v - out|, by Cauchy and Schwarz
        far, about = _length(slack)[:, None], np.sum(slack * np.abs(rows.out), -1)[:, None]
        parts: list[tuple[slice, Evidence]] = []
        for tile in scan_tiles(head, i, 512):
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
            size = np.maximum(size, 0.0)
            new = Evidence.of(e, d, size, common, self.weights[at, i, None], 0)
            parts.append((tile.keys, new))

        def sums_of_all() -> None:
            for keys, new in parts:
                self.keys.add(new, (at, keys))

        return sums_of_all


_ALL = 1 - 2.0**-20


def row_weights(problem: Problem, kernel: Roundings) -> Doubles:
    """1 / g for g rows with one query, or one exact result; for heads of one key if rows depend."""
    heads, n = math.prod(problem.lead), problem.shape[0]
    if not heads * n:
        return np.ones((heads, n))
    if not problem.rows_apart(kernel):
        keys = [problem.read(index)["k"] for index in np.ndindex(problem.lead)]
        marks = np.concatenate([_marks(x.reshape(1, -1)) for x in keys])
        return np.repeat(_shares(marks)[:, None], n, 1)
    apart = np.arange(heads * n).reshape(1, heads, n)
    equal = np.repeat(apart, 3, 0)  # numbers that are equal where rows are

    def mark(item: tuple[tuple[int, ...], slice]) -> None:
        index, i = item
        at: Any = (problem.number(index), i)
        with np.errstate(all="ignore"):
            exact = problem.exact(index, kernel, i).astype(np.float32)
        rows: list[Any] = [exact, *problem.list_sources(index, kernel, i)]
        for number, x in enumerate(rows):
            equal[(number, *at)] = _marks(x)

    for_each(lambda: mark, problem.items(), most=heads + n)
    return np.asarray(np.min([_shares(x) for x in equal], 0))


def _marks(rows: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Numbers that are equal where rows are."""
    return np.array([hash((x + 0).tobytes()) for x in rows], np.int64)


def _shares(marks: npt.NDArray[np.int64]) -> Doubles:
    """1 / g for g equal marks."""
    _, which, counts = np.unique(marks.ravel(), return_inverse=True, return_counts=True)
    found: Doubles = 1 / counts[which]
    return found.reshape(marks.shape)


def _beyond(error: Doubles, bound: Doubles) -> Doubles:
    """Errors over their bounds; where a profile overflows, anything may come out."""
    found = np.abs(error) / np.where(bound > 0, bound, 1e-300)
    found = np.where(np.isnan(error), math.inf, np.where(error == 0, 0.0, found))
    return np.where(np.isinf(bound), 0.0, found)


def _length(x: Doubles) -> Doubles:
    """Norms of rows."""
    return np.asarray(np.sqrt(np.sum(x * x, -1)))


def _largest(x: Doubles, index: tuple[int, ...], i: slice) -> tuple[float, tuple[int, ...]]:
    """The largest of an array, with its place."""
    if not x.size or not np.max(x) > 0:
        return 0.0, ()
    row, column = np.unravel_index(int(np.argmax(x)), x.shape)
    return float(x[row, column]), (*index, i.start + int(row), int(column))


def _directions(
    problem: Problem, index: tuple[int, ...], i: slice, rows: RowErrors
) -> Iterator[tuple[str, Doubles]]:
    """Derivatives of the output to the sizes of defects."""
    yield from rows.tangents.items()
    yield "factor", rows.out
    yield "truncated", -np.sign(rows.out) * rows.spacing / 2
    if not problem.is_mean:
        return
    with np.errstate(all="ignore"):
        yield "epsilon", np.nan_to_num(-rows.out * np.exp(rows.top - rows.lse)[:, None])
        yield "sink", np.nan_to_num(-rows.out * np.exp(-rows.lse)[:, None], posinf=0.0, neginf=0.0)
    if problem.causal and problem.shape[1]:
        head = problem.head(index)
        yield "edge+1", _edge(head, i, rows, 1)
        yield "edge-1", _edge(head, i, rows, 0)


def _edge(head: SoftmaxHead, i: slice, rows: RowErrors, ahead: int) -> Doubles:
    """Change of the output where queries see the key next to the last, or lose the last."""
    n, m = head.q.shape[0], head.keys
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
    found: Doubles = part[:, None] * (head.v[j] - rows.out)
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
    weights: Doubles,
) -> Trial:
    """Try whether the numbers can be those of a correct kernel of a profile.

    The weights are those of `row_weights`, for queries, keys and values as the profile reads them.
    """
    changes, names = {}, ["factor", "truncated"]
    kernel = profile.kernel(dtype)
    rows_apart = problem.rows_apart(kernel)
    if problem.gradient is not None:
        has_cap = problem.softcap is not None
        names += list_directions(problem.gradient.of, has_cap, problem.has_sinks)
    if problem.is_mean:
        changes = {x: f for x, f in _CHANGES.items() if x != "softcap" or problem.softcap is None}
        names = [*changes, *names, "epsilon", "sink", *["edge+1", "edge-1"] * problem.causal]
    if numbers.lse is not None:
        names.append("lse")
    found = _Found(problem, names, numbers, weights, rows_apart)
    problems.sweep(problem, dtype, profile, found.add, changes)
    if not rows_apart:
        found.of_heads()
    elements = float(found.elements)
    raw = [*_of_bound(found), *_of_sizes(found, elements)]
    raw += _of_lse(found) if numbers.lse is not None else []
    if found.along:
        directions = list(_of_gradients(found, problem.read_by(profile), kernel))
    else:
        directions = list(_of_directions(found))
    if problem.is_mean:
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
        if np.sum(sums.size) > 0 and usable > 2 * threshold**2 and not found.along
    }
    detectable |= {
        x: float((threshold * math.sqrt(known.variance) + known.slack) / known.g)
        for x, known in found.known.items()
        if known.g > 0
    }
    square = _ONE_PERCENT**2 * found.strength / max(elements, 1.0)
    powered = bool(chernoff(square, usable) <= math.log(alpha / len(tests)))
    powered = powered or detectable.get("factor", 1.0) <= _ONE_PERCENT
    total = math.prod(problem.lead) * problem.shape[0] * problem.shape[2]
    return Trial(
        name,
        tests,
        suspects,
        Z(rms, *found.farthest),
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
    yield _Outcome("bound", log_p, ratio, f"at {place(where)}" if where else "")


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
    yield _Outcome("largest z", _many(math.log(2) - z * z / 2, elements), z, f"at {place(where)}")
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
        rest = f"{found.problem.rows} {tile * size} to {min(n, (tile + 1) * size) - 1}"
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
        yield from _grouped(found, name, rows, _sentence(found.problem, name))


def _of_gradients(found: _Found, problem: Problem, kernel: Roundings) -> Iterator[_Outcome]:
    """Directions of which the sums have a known variance, over all heads and in the surest."""
    gradient = problem.gradient
    assert gradient is not None
    for name, along in found.along.items():
        variance = np.sum(found.alone[name], -1)
        for number, index in enumerate(np.ndindex(problem.lead)):
            saved = gradient.saved(index, kernel)
            with np.errstate(all="ignore"):
                variance[number] += variance_along(saved, kernel, gradient.of, along[number])
        sums = (*(x[:, 0] for x in found.sums[name]), WORST**2 * variance)
        rows = Known(*(found.weights[:, 0] * x for x in sums))
        found.known[name] = rows.over(0)
        yield from _grouped(found, name, rows, _sentence(found.problem, name))


def _of_tiles(found: _Found) -> Iterator[_Outcome]:
    """The tile of queries of one head of which a factor on the output explains most."""
    sums, (heads, n) = found.sums["factor"], found.square.shape
    tried: list[_Outcome] = []
    count = 0
    for size in _powers(n):
        if size == n or not heads:
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
        where = f"{found.problem.rows} {tile * size} to {min(n, (tile + 1) * size) - 1}"
        words = (
            _sentence(found.problem, "factor")(value, error),
            _head(found.problem, head),
            where,
        )
        text = ", ".join(x for x in words if x)
        tried.append(_Outcome("factor of a tile", log_p, statistic, text, value, error, most))
    if tried:
        best = max(tried, key=lambda x: x.explained)
        yield best._replace(log_p=_many(best.log_p, count))


def _cut(x: Doubles, size: int) -> Doubles:
    """Rows (heads, n) as tiles (heads, tiles, size), with zeros at the end."""
    heads, n = x.shape
    return np.pad(x, ((0, 0), (0, -n % size))).reshape(heads, -1, size)


def _grouped(
    found: _Found, name: str, rows: Evidence | Known, sentence: Callable[[float, float], str]
) -> Iterator[_Outcome]:
    """One direction over all heads and, where there are several, in the head where it is surest."""
    for of_head in (False, True)[: 1 + (len(rows.size) > 1)]:
        total = rows if of_head else rows.over(0)
        tried = total.test()
        log_p = np.atleast_1d(tried.log_p)
        at = int(np.argmin(log_p))
        value, error, statistic = (
            float(np.atleast_1d(x)[at]) for x in (tried.value, tried.error, tried.statistic)
        )
        size = float(np.atleast_1d(total.size)[at])
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
    """The key whose loss, or second use, explains most; a sink is the last."""
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
        called = "the sink" if key == found.problem.shape[1] else f"key {key}"
        words = (
            f"{called} is missing: {_pm(value, error)} of its weight"
            if value > 0
            else f"{called} counts {_pm(1 - value, error)} times"
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
    return f"head {place(tuple(map(int, np.unravel_index(number, problem.lead))))}"


def place(index: tuple[int, ...]) -> str:
    return f"({', '.join(map(str, index))})" if len(index) != 1 else str(index[0])
