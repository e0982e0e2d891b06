r"""Rows that are wrong, by how the errors of their columns depend on each other.

The errors of a row are sums of independent roundings, :math:`e = b + A \xi`, each sub-Gaussian, and
:math:`C` bounds their covariance. The rest :math:`b`, of which nothing but an interval is known for
each column, is what rounding to nearest makes of the exact numbers, and what roundings may have in
common. So for r columns

.. math:: P\Big(\min_b (e - b)^T C^{-1} (e - b) > x r\Big) \le (x e^{1 - x})^{r / 2} ,

as :math:`E e^{u \cdot A\xi} \le e^{u^T C u / 2}` for all u, and so for a Gaussian u of covariance
:math:`t\, C^{-1}` too. If nothing were known of how the columns depend on each other, r would be 1.

The rounding of the output is a part of C, as noise of variance :math:`h^2 / 12` for a spacing h.
Where the noise before it is far below h that hides errors of most of a spacing. There it is a part
of b instead: what was rounded to an output o lies within h(o) / 2 of it, whatever o is, as the
numbers below a power of two are nearer than those above. With C and b of what is before the
rounding, and h(o) / 2 more on both sides of b, the same statement holds for each o. Which of both a
row is tested by is decided by its law, without its errors, so each row has one test. An error that
all columns have is seen by the mean square :math:`\delta^3 / 3 h s^2` then, for noise of standard
deviation s and :math:`\delta < h`, where an output that was moved by a spacing with probability
:math:`\delta / h` has :math:`12 (\delta / h) ((h + \delta) / 2h)^2`: the first exceeds 1 for
smaller :math:`\delta` if s is below about h / 16.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...arrays.blocks import blocks
from ...arrays.library import Doubles
from ..rounding.backward import analyse_gradient
from ..rounding.covariance import (
    covariance,
    distinct_columns,
    gradient_covariance,
    has_few_numbers,
)
from ..rounding.problems import Index, Problem
from ..rounding.roundings import WORST, Roundings, RowErrors
from ..rounding.softmax import analyse_softmax
from .directions import SCORE_CHANGES
from .evidence import log_chernoff, log_quadratic
from .findings import Find, Numbers, WrongRow
from .z_scores import subtract_rounding

MOST = 40  # rows of which it is computed at a time
DOUBT = 1.0  # mean square of z above which the law of a row is computed
ONE_OF_ROWS = 8  # of so many, one may be wrong, and the others tell what is right
_DOUBT_HIDDEN = 0.25  # likewise, beyond half a spacing and over the noise before it
_PRODUCTS, _SOLVING = 2**32, 50  # in which further rows are tested; of a row, columns times
_ONE_BY_ONE = 4  # times as long as all together
TILE = 16  # rows of the smallest tile that is tested
_BLOCKS_TAKEN, _ROWS_TAKEN = 4, 2  # of which the smallest errors that are seen are found
_BISECTIONS, _STEPS = 24, 4
_DESCENTS = 40  # to the least square, each of which gives a lower bound of it
_RANK = 1e-10  # of the largest eigenvalue, which smaller ones are raised to


class RowBox(NamedTuple):
    """Errors of rows, the box of what is no evidence, and the covariances of the rest."""

    known: npt.NDArray[np.bool_]  # (rows,)
    errors: Doubles  # (rows, columns)
    low: Doubles
    high: Doubles
    covariances: Doubles  # (rows, columns, columns)

    def less(self, other: RowBox) -> RowBox:
        """Subtract errors that have no rounding in common with these."""
        return RowBox(
            self.known & other.known,
            self.errors - other.errors,
            self.low - other.high,
            self.high - other.low,
            self.covariances + other.covariances,
        )

    def test(self) -> tuple[Doubles, Doubles]:
        """Return mean squares, and logs of p-values; where nothing is known of a row both are 0."""
        squares, columns = np.zeros(len(self.errors)), self.errors.shape[1]
        if self.known.any():
            some = (x[self.known] for x in (self.errors, self.low, self.high))
            squares[self.known] = Ellipsoids.of(self.covariances[self.known]).bound(*some) / columns
        return squares, np.asarray(log_chernoff(squares, columns))


def box_rows(
    problem: Problem,
    numbers: Numbers,
    roundings: Roundings,
    index: Index,
    rows: npt.NDArray[np.int64],
    columns: npt.NDArray[np.int64] | None = None,
) -> RowBox:
    """Find the errors of rows of a head, and the law of all of their columns, or of some.

    Where its spacings hide the noise of a row, the law is that of what was rounded to the output.
    """
    if columns is None:
        columns = distinct_columns(list_tokens(problem, index))
    law, covariances = find_laws(problem, roundings, index, rows, columns)
    got = numbers.out(index)[rows]
    errors, (low, high) = law.errors(got), law.span_rounding()
    hidden = law.hidden() & np.all(np.isfinite(law.bound), -1)  # an infinite one may be saturated
    if problem.is_mean and roundings.out is not None and hidden.any():
        about = roundings._replace(out=None), index, rows[hidden], columns
        before, covariances[hidden] = find_laws(problem, *about)
        half, (least, most) = roundings.out.spacing(got[hidden]) / 2, before.span_rounding()
        low[hidden], high[hidden] = least - half, most + half
    known = np.all(np.isfinite(law.worst) & np.isfinite(errors), -1)
    return RowBox(known, errors[:, columns], low[:, columns], high[:, columns], covariances)


def test_rows(
    problem: Problem,
    numbers: Numbers,
    roundings: Roundings,
    index: Index,
    rows: npt.NDArray[np.int64],
) -> tuple[Doubles, Doubles]:
    """Test rows of a head, each by the law of all of its columns, as `RowBox.test` does."""
    return box_rows(problem, numbers, roundings, index, rows).test()


def find_covariance(
    problem: Problem,
    index: Index,
    roundings: Roundings,
    i: slice,
    rows: RowErrors,
    directions: Doubles,
    worst: bool = False,
) -> tuple[Doubles, Doubles]:
    """Find covariances of rows along directions: of what they have in common, and of the rest."""
    if problem.derived is not None:
        shared = (WORST**2 if worst else 1.0) * problem.derived(problem, index, roundings, i)[1]
        along = np.swapaxes(directions, -1, -2) @ shared @ directions
        alone = np.diagonal(shared, axis1=1, axis2=2)
        return along, rows.own_covariance(alone, directions, worst)
    if problem.gradient is None:
        return covariance(problem.head(index), roundings, i, rows, directions, worst)
    of, law = problem.gradient.of, rows
    if worst or problem.gradient.along(index) is not directions:  # which a law was found with
        saved = problem.gradient.saved(index, roundings, i)
        law = analyse_gradient(saved, roundings, of, i, directions, worst)
    return gradient_covariance(law, directions, worst)


def knows_columns(problem: Problem) -> bool:
    """Tell whether it is known how the columns of a row depend on each other."""
    return problem.kind in ("scores", "text")


def bound_factor(
    problem: Problem, numbers: Numbers, roundings: Roundings
) -> tuple[Doubles, Doubles]:
    """Bound the variance and the slack of sums along the output, (heads, 1).

    Rows may share errors in any way: their standard deviations add up.
    """
    found = np.zeros((math.prod(problem.lead), 2))
    for index, i in problem.items():
        rows = problem.analyse(index, roundings, i)
        known = np.isfinite(rows.std) & np.isfinite(rows.errors(numbers.out(index)[i]))
        law = rows._replace(worst=np.where(known, rows.worst, 0.0))
        along = np.where(known, rows.out / np.square(rows.std), 0.0)
        parts = find_covariance(problem, index, roundings, i, law, along[..., None], worst=True)
        sizes = np.sqrt(np.sum(parts, 0)[:, 0, 0]), np.sum(np.abs(along) * rows.slack, -1)
        found[problem.number(index)] += np.sum(sizes, -1)
    return np.square(found[:, :1]), found[:, 1:]


def may_be_tied(problem: Problem, index: Index, roundings: Roundings) -> bool:
    """Tell whether roundings of a gradient may be one, or none.

    Those of equal tokens are, and numbers of few digits have scores that need no rounding.
    """
    assert problem.gradient is not None
    heads = problem.gradient.saved(index, roundings, slice(0))
    equal = any(np.any(y > 1) for _, x in heads for y in (x.copies, x.key_copies, x.products))
    return equal or any(has_few_numbers(x.head.k) for x, _ in heads)


def list_tokens(problem: Problem, index: Index) -> Doubles:
    """List what rows of a head are sums of: values, or what gradients are sums of."""
    if problem.gradient is None:
        return np.asarray(problem.read(index)["v"])
    gradient = problem.gradient
    return np.concatenate([x.terms(gradient.of) for x in gradient.backs(index)])


def find_laws(
    problem: Problem,
    roundings: Roundings,
    index: Index,
    rows: npt.NDArray[np.int64],
    columns: npt.NDArray[np.int64],
) -> tuple[RowErrors, Doubles]:
    """Return the laws of rows, and the covariances of some columns at the least favourable."""
    along = np.eye(problem.shape[2])[:, columns]
    if problem.gradient is None and problem.derived is None:
        head, i = problem.head(index).take_queries(rows), slice(0, len(rows))
        # A scale that is off by its rounding is a part of what errors have in common.
        law = analyse_softmax(head, roundings, i, {"scale": SCORE_CHANGES["scale"]})
        return law, np.add(*covariance(head, roundings, i, law, along))
    laws, covariances = [], []
    for run in np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1):
        i = slice(int(run[0]), int(run[-1]) + 1)
        laws.append(problem.analyse(index, roundings, i))
        found = find_covariance(problem, index, roundings, i, laws[-1], along, worst=True)
        covariances.append(np.add(*found))
    return RowErrors.join(laws), np.concatenate(covariances)


def test_each(
    problem: Problem, numbers: Numbers, roundings: Roundings, places: Sequence[Index]
) -> list[float]:
    """Return the logs of p-values of some rows, each by the law of all of its columns."""
    return [
        float(test_rows(problem, numbers, roundings, x[:-1], np.array(x[-1:]))[1][0])
        for x in places
    ]


class Ellipsoids(NamedTuple):
    """Covariances of rows, by their axes."""

    known: npt.NDArray[np.bool_]  # (rows,)
    size: Doubles  # the standard deviations of columns, (rows, columns)
    values: Doubles  # eigenvalues and vectors of the correlations
    vectors: Doubles

    @classmethod
    def of(cls, covariances: Doubles) -> Ellipsoids:
        """Find the axes of covariances (rows, columns, columns)."""
        size = np.sqrt(np.diagonal(covariances, axis1=1, axis2=2))
        known = np.all((size > 0) & np.isfinite(size), -1)
        size = np.where(known[:, None], size, 1.0)
        scaled = covariances / (size[:, :, None] * size[:, None, :])
        scaled[~known] = np.eye(size.shape[1])
        values, vectors = np.linalg.eigh(scaled)
        # A larger covariance is a bound, too.
        return cls(known, size, np.maximum(values, _RANK * values[:, -1:]), vectors)

    def bound(self, errors: Doubles, low: Doubles, high: Doubles) -> Doubles:
        r"""Bound :math:`\min_b (e - b)^T C^{-1} (e - b)` over a box from below, for each row.

        By duality any u gives such a bound, :math:`2 u^T e - u^T C u - \max_b 2 u^T b`; those tried
        are :math:`C^{-1} (e - b)` for the b of an accelerated projected gradient.
        """
        values, vectors = self.values, self.vectors
        errors, low, high = (x / self.size for x in (errors, low, high))
        b = last = np.clip(errors, low, high)
        best, pace = np.zeros(len(errors)), 1.0
        for _ in range(_DESCENTS):
            of_vectors = _times(np.swapaxes(vectors, 1, 2), errors - b)
            u = _times(vectors, of_vectors / values)
            # u^T C u by the eigenvalues of C.
            found = 2 * np.sum(u * errors, -1) - np.sum(of_vectors * of_vectors / values, -1)
            found -= 2 * np.sum(np.maximum(u * low, u * high), -1)
            best = np.fmax(best, found)
            step = np.clip(b + values[:, :1] * u, low, high)
            if np.array_equal(step, b) and np.array_equal(step, last):  # it stays there
                break
            following = (1 + math.sqrt(1 + 4 * pace * pace)) / 2
            b, last, pace = step + (pace - 1) / following * (step - last), step, following
        return np.where(self.known, best, 0.0)


def _times(matrices: Doubles, x: Doubles) -> Doubles:
    """Multiply a vector by a matrix in each row."""
    return np.asarray((matrices @ x[:, :, None])[:, :, 0])


def find_wrong(
    problem: Problem,
    test: Callable[[Index, npt.NDArray[np.int64]], tuple[Doubles, Doubles]],
    squares: Doubles,
    peaks: Doubles,
    beyond: npt.NDArray[np.bool_],
    hidden: Doubles,
    level: float = -math.inf,
    of_lse: Doubles | None = None,
) -> tuple[list[WrongRow], bool]:
    """Test rows by their largest |z|, by its mean square, and the doubtful by all columns jointly.

    `test` gives mean squares and logs of p-values of rows of a head, by all of their columns.
    Arrays are (heads, n): means of squares of z; the largest |z|, which stands for tests of as many
    columns as the output has; whether an error is beyond its bound; and the mean squares of what is
    left beyond half a spacing, where that is far above the noise; and the squares of z of log
    normalisers, if there are any: one more test. So many doubtful rows are
    tested at a time, as long as one of them has a log of a p-value below a level, and that costs
    little enough. Also return whether rows were left that may be wrong.
    """
    columns = problem.shape[2]
    if not columns:
        return [], False
    found = np.minimum(math.log(2 * columns) - peaks * peaks / 2, log_chernoff(squares, 1))
    tests_of_row = math.log(3 if of_lse is None else 4)  # of which the surest is taken
    if of_lse is not None:
        found = np.minimum(found, math.log(2) - of_lse / 2)
    found, means = np.where(beyond, -math.inf, np.minimum(found, 0.0)), peaks * peaks
    # Where these tests are enough, no other is needed.
    doubts = np.maximum(squares / DOUBT, hidden / _DOUBT_HIDDEN)
    doubtful = np.flatnonzero(
        knows_columns(problem) & (doubts > 1) & (found > level - tests_of_row)
    )
    doubtful = doubtful[np.argsort(-doubts.ravel()[doubtful], kind="stable")]
    most, together = _PRODUCTS // (columns**2 * (problem.shape[1] + _SOLVING * columns)), MOST
    if problem.gradient is not None:  # of which each row is analysed alone
        most, together = most // _ONE_BY_ONE, MOST // _ONE_BY_ONE
    count, doubtful = len(doubtful), doubtful[: max(1, -(-most // together)) * together]
    tested, goes_on, ahead = 0, True, together
    while goes_on and tested < len(doubtful):
        # The law of each costs less if it is of more: they are taken as if found batch by batch.
        heads, rows = np.divmod(doubtful[tested : tested + ahead], squares.shape[1])
        of_rows, log_p = np.zeros((2, len(rows)))
        for head in np.unique(heads).tolist():
            here = np.flatnonzero(heads == head)
            here = here[np.argsort(rows[here])]
            of_rows[here], log_p[here] = test(problem.index_of(head), rows[here])
        for x in blocks(0, len(rows), together):
            if goes_on:
                place = heads[x], rows[x]
                means[place] = np.where(log_p[x] < found[place], of_rows[x], means[place])
                found[place] = np.fmin(found[place], log_p[x])
                least = float(np.fmin.reduce(log_p[x], initial=0.0))
                tested, goes_on = tested + x.stop - x.start, least + tests_of_row <= level
        ahead *= 2
    indices, at = [*np.ndindex(problem.lead)], np.nonzero(found < 0)
    each = (x.tolist() for x in (*at, means[at], found[at] + tests_of_row))
    wrong = [WrongRow((*indices[h], i), *rest) for h, i, *rest in zip(*each, strict=True)]
    return sorted(wrong, key=lambda x: x.log_p), goes_on and tested < count


def name_wrong(find: Find, rows: int, alpha: float) -> tuple[tuple[tuple[Index, float], ...], bool]:
    """List the rows that are wrong at a level, by Holm's correction for all that were tried.

    Also tell whether there may be more.
    """
    found: list[tuple[Index, float]] = []
    wrong, more = find(math.log(alpha / max(rows, 1)))
    for row in wrong:
        p = math.exp(max(row.log_p, -700.0))
        if p * (rows - len(found)) > alpha:
            break
        found.append((row.at, p))
    return tuple(found), more


def list_few(rows: Sequence[tuple[Index, float]], more: bool, count: int) -> tuple[Index, ...]:
    """List the wrong rows of so many, if all are named, and few: others tell what is right."""
    return () if more or ONE_OF_ROWS * len(rows) > count else tuple(at for at, _ in rows)


def find_smallest(
    problem: Problem, roundings: Roundings, rows: int, level: float
) -> dict[str, float]:
    """Find about the smallest factors on one row, on one tile and on one head that are rejected.

    They are medians or means of some rows of those that are tested, by the tests of rows, tiles and
    heads, each of which rejects below a level, the log of a p-value.
    """
    alike = groupby(_take_laws(problem, roundings), lambda x: x.columns.tobytes())
    found = [_BlockLaw.join([*x]) for _, x in alike]
    if not found:
        return {}
    alone = np.concatenate([x.rows(level - math.log(3 * rows)) for x in found])
    z = [x.z for x in found]

    def mean(size: float) -> float:
        return float(np.mean(np.concatenate([np.mean(np.square(of(size)), -1) for of in z])))

    n, heads, many = problem.shape[0], math.prod(problem.lead), rows / TILE
    sizes = {"row": float(np.median(alone))}
    apart = problem.rows_apart(roundings)
    if n > TILE and apart:
        least = _reach(lambda x: -log_chernoff(x, TILE), math.log(many) - level)
        variances = [x.variances for x in found if x.variances is not None and problem.is_mean]
        if variances:
            few = np.concatenate(variances)
            few = np.tile(few, (-(-TILE // len(few)), 1))[:TILE]
            total = _reach(lambda x: -log_quadratic(x, few), math.log(2 * many) - level)
            least = min(least, total / few.size)
        sizes["tile"] = _reach(mean, least)
    if heads > 1 and n > 1 and apart:
        sizes["head"] = _reach(mean, _reach(lambda x: -log_chernoff(x, n), math.log(heads) - level))
    # Rows that are all wrong are seen where one of them is.
    return {x: min(y, sizes["row"]) for x, y in sizes.items() if min(y, sizes["row"]) < 1}


class _BlockLaw(NamedTuple):
    """The law of some rows: errors that are no evidence, and how columns depend on each other."""

    law: RowErrors
    columns: npt.NDArray[np.int64]
    covariances: Doubles | None

    @classmethod
    def join(cls, laws: Sequence[_BlockLaw]) -> _BlockLaw:
        """Join the rows of laws that have the same columns."""
        law, covariances = RowErrors.join([x.law for x in laws]), [x.covariances for x in laws]
        known = [x for x in covariances if x is not None]
        return cls(law, laws[0].columns, np.concatenate(known) if known else None)

    def z(self, size: Any) -> Doubles:
        """Return what tests take for z if rows, or each of them, are too large by 1 + size."""
        off = np.asarray(size)[..., None] * self.law.out
        return np.asarray(subtract_rounding(off, self.law) / self.law.worst)

    @property
    def variances(self) -> Doubles | None:
        """Return the variances of z along its axes, (rows, columns)."""
        if self.covariances is None or len(self.columns) < self.law.out.shape[1]:
            return None
        worst = self.law.worst
        return np.asarray(
            np.linalg.eigvalsh(self.covariances / (worst[:, :, None] * worst[:, None, :]))
        )

    def rows(self, level: float) -> Doubles:
        """Find the factors by which each row alone is rejected."""
        (count, d_v), r = self.law.out.shape, len(self.columns)
        peak = math.sqrt(2 * (math.log(2 * d_v) - level))
        sizes: Doubles = _reach(lambda x: np.max(np.abs(self.z(x)), -1), peak, count)
        if self.covariances is None:
            return sizes
        return np.minimum(sizes, self._solve_jointly(_reach(lambda x: -log_chernoff(x, r), -level)))

    def _solve_jointly(self, least: float) -> Doubles:
        """Find the factors from which the least square over the columns is so large."""
        assert self.covariances is not None
        out = self.law.out[:, self.columns]
        low, high = (x[:, self.columns] for x in self.law.span_rounding())
        none, least = np.zeros_like(out), least * out.shape[1]
        axes = Ellipsoids.of(self.covariances)
        alone = np.maximum(axes.bound(out, none, none), 1e-300)
        size = np.sqrt(least / alone)
        for _ in range(_STEPS):  # what is subtracted makes it larger
            square = axes.bound(size[:, None] * out, low, high)
            size = size * np.sqrt(np.clip(least / np.maximum(square, 1e-300), 0.25, 4.0))
        return np.asarray(size)


def _take_laws(problem: Problem, roundings: Roundings) -> Iterator[_BlockLaw]:
    """Take the laws of some rows that have one."""
    for index, i in problem.few_items(_BLOCKS_TAKEN):
        rows = np.unique(np.linspace(i.start, i.stop - 1, _ROWS_TAKEN).astype(int))
        if knows_columns(problem):
            columns = distinct_columns(list_tokens(problem, index))
            law, covariances = find_laws(problem, roundings, index, rows, columns)
        else:
            columns, covariances = np.arange(problem.shape[2]), None
            each = (problem.analyse(index, roundings, slice(x, x + 1)) for x in rows.tolist())
            law = RowErrors.join([*each])
        known = np.all(np.isfinite(law.worst), -1) & np.any(law.out, -1)
        if covariances is not None:
            known &= np.all(np.isfinite(covariances), (1, 2))
        if known.any():
            parts: list[Any] = [x[known] if isinstance(x, np.ndarray) else x for x in law]
            some = None if covariances is None else covariances[known]
            yield _BlockLaw(RowErrors(*parts), columns, some)


def _reach(f: Callable[[Any], Any], least: float, rows: int | None = None) -> Any:
    """Find where a function that rises with x > 0 is so large, or one of each row is."""
    low, high = (np.full(() if rows is None else rows, x) for x in (2.0**-60, 2.0**60))
    for _ in range(_BISECTIONS):
        middle = np.sqrt(low * high)
        above = f(middle) >= least
        low, high = np.where(above, low, middle), np.where(above, middle, high)
    return float(high) if rows is None else high
