r"""Compare profiles by likelihood: which fits numbers best, and how surely another does not.

If a kernel has profile P, the densities of its errors are those of P, :math:`p`. Those of another
profile, :math:`p'`, are numbers that one may bet on: as :math:`E\, p'/p \le 1`, by Hölder

.. math:: E \exp\Big(\frac{1}{d}\sum_{c} \log \frac{p'_c}{p_c}\Big) \le 1

for the d columns of a row, which may depend on each other in any way. So is a mean of this and 1,
which a single wrong row cannot make small. Rows are independent, and by Markov the product over
them exceeds x with probability :math:`1/x` at most. Standard deviations of P are known but for a
factor: at most that of the least favourable digits. At least it is half of that, or less in a row
where the roundings of P to nearest, which are known, leave less: scores that are small integers are
not moved. With a running maximum the weight of each key that was the largest so far is 1, and is
not rounded: which those were depends on tiles and their order, so that in any row without these
roundings the factor may be that of the rest. Where the type holds all scores of a row, rounding
them moves nothing, in no column, and the law without it may be that of the row. Of each row the
factor is taken that speaks most for P. In softmax attention, errors of a row have a known
covariance (`rounding.covariance`), and so the densities are of all columns together, along few
directions: the sum of independent logarithms instead of the mean of d. There the share of the
variance that roundings of weights have may be less, too, by those of weights that were the largest.
So numbers that fit P far too well speak against it, if its own roundings do not say why, and
another profile does: that must explain nearly all rows. Between two profiles, or beside a sharper
one that fails in many rows, numbers are those of a kernel that is not listed, and no evidence
against the looser.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from functools import cache, partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...arrays.library import Doubles
from ...arrays.threads import for_each
from ..rounding.covariance import distinct_columns, spared_variance
from ..rounding.formats import Format
from ..rounding.hardware import allow
from ..rounding.head import CACHED_PAIRS, SoftmaxHead, scan_tiles, score_tile
from ..rounding.problems import Index, Problem, sweep
from ..rounding.profiles import Profile
from ..rounding.roundings import WORST, Roundings, RowErrors
from .evidence import log_chernoff
from .findings import Numbers
from .head_sums import RowWeights
from .joint import find_covariance, list_tokens, may_be_tied
from .z_scores import BEYOND, LseErrors, subtract_rounding

_LEAST = WORST / 2  # factor of standard deviations, for the most favourable leading digits
ALIKE = 1.0  # of log likelihoods: nearer ones are alike, and the first is taken
_ALIKE_STATES, _DOUBT_STATES = 0.1, 1e-9  # of rows that share states, which count for less
_DOUBT = 0.01  # weight of 1 beside the ratio of a row: the most that one row may cost
_UNEXPLAINED = 1 / 8  # share of rows that a profile which explains the others need not
_UNLIKE_HEADS = 1 / 4  # likewise, of heads of which it does not explain so many rows
_TINY = 1e-12  # mean square of z where roundings to nearest leave nothing
_FLOOR = 1e-9  # of variances of directions, that is added to them
_MUCH_LARGER = 2.0**16  # times, of which roundings are below the floor
_ALONG = 16  # of a row, along which errors are compared
_TRIED_SHARES = 0.7, 0.5, 0.35, 0.25, 0.12, 0.06, 0.03, 0.01, 0.0  # of weights, that are tried
_VANISHES = 1e-2  # of the standard deviation, below which a gradient is 0
_TWO_KEYS = 4.0  # unit roundoffs of what two keys have of all weight, less 1
_HARDLY = 2.0**-10  # of a row: keys of such weights in all may be moved, or columns
_CHANCE = 1e-2  # of a right profile to be taken for one that does not explain them


class Fit(NamedTuple):
    """How well the numbers of some rows fit a profile.

    Log ratios in `surely` are to the likelihoods of the others, with the factors that speak most
    for this one.
    """

    within: bool  # whether all of them are within its bound
    against: float  # log of the largest ratio of another likelihood to its own
    likelier: str  # the profile with that
    log_p: float  # log of a bound on the probability of this, if the profile is that of the kernel
    explains: bool = False  # whether it is known that the profile may be that of nearly all rows
    surely: Mapping[str, float] = MappingProxyType({})

    def beside(self, others: Collection[str]) -> Fit:
        """Take only some others for evidence."""
        held = {x: y for x, y in self.surely.items() if x in others}
        if not held:
            return self._replace(log_p=0.0)
        best = max(held, key=lambda x: held[x])
        log_p = min(0.0, math.log(len(self.surely)) - held[best])
        return self._replace(likelier=best, log_p=log_p)


UNCOMPARED = Fit(True, 0.0, "", 0.0)  # with no other profile


class _Law(NamedTuple):
    """The law of some rows along r directions, (rows, r), in a basis of each where all is apart.

    The unit of variance is that of what columns have of their own, beside which weights have so
    many times that. What is not known is nan.
    """

    squares: Doubles  # of errors
    weights: Doubles  # variance
    logs: Doubles  # of the unit, all directions together

    @classmethod
    def of(
        cls,
        rows: RowErrors,
        errors: Doubles,
        directions: Doubles,
        find: Callable[[], tuple[Doubles, Doubles]],
        apart: bool,
        common: Doubles | float = 0.0,
    ) -> _Law:
        """Find the law of the errors of rows, with what finds their covariances along directions.

        These are in two parts, of which the second is what columns have of their own. They are
        taken apart only if asked for: else both are the unit, and weights have no variance beside
        it. Of each row the part of what errors may have in common, at most 1, is subtracted that is
        nearest.
        """
        known = np.all(np.isfinite(rows.std) & np.isfinite(errors), -1)
        squares, weights = np.full((2, len(errors), directions.shape[1]), math.nan)
        logs = np.full(len(errors), math.nan)
        if known.any():
            together, own = find()
            known &= np.all(np.isfinite(together) & np.isfinite(own), (1, 2))
            known &= np.all(np.diagonal(own, axis1=1, axis2=2) > 0, -1)
        if known.any():
            together, own = together[known], own[known]
            size = np.sqrt(np.diagonal(own, axis1=1, axis2=2))
            both = size[:, :, None] * size[:, None, :]
            own, together = own / both + _FLOOR * np.eye(size.shape[1]), together / both
            # Beside much larger weights what columns have of their own is lost in a sum.
            apart |= bool(np.max(together) > _MUCH_LARGER)
            root = np.linalg.cholesky(own if apart else own + together)
            axes, values = np.linalg.inv(root), np.zeros_like(size)
            if apart:
                values, vectors = np.linalg.eigh(axes @ together @ np.swapaxes(axes, -1, -2))
                axes = np.swapaxes(vectors, -1, -2) @ axes
            weights[known] = values = np.maximum(values, 0.0)
            both = np.stack(np.broadcast_arrays(errors, common), -1)[known]
            moved = axes @ (directions.T @ both / size[:, :, None])
            off, shared = np.moveaxis(moved, -1, 0)
            part, whole = (np.sum(shared * x / (1 + values), -1) for x in (off, shared))
            part = np.clip(part / np.where(whole > 0, whole, 1.0), -1.0, 1.0)
            squares[known] = np.square(off - part[:, None] * shared)
            of_roots = np.log(np.diagonal(root, axis1=1, axis2=2))
            logs[known] = np.sum(of_roots + np.log(size), -1)
        return cls(squares, weights, logs)

    def where(self, rows: npt.NDArray[np.bool_], other: _Law) -> _Law:
        """Take the law of some rows of another."""
        parts = zip(self, other, strict=True)
        return _Law(*(np.where(rows if x.ndim == 1 else rows[:, None], y, x) for x, y in parts))

    def log_likelihood(self, share: float, least: Any, most: Any) -> Doubles:
        """Return that of each row, for such a share of weights and the best factor of all."""
        sizes, r = 1 + share * self.weights, self.squares.shape[1]
        total = np.sum(self.squares / sizes, -1)
        factor = np.maximum(np.clip(total / r, least, most), _TINY)
        of_sizes = np.sum(np.log(sizes), -1) + r * np.log(factor)
        return np.asarray(-(total / factor + of_sizes) / 2 - self.logs)

    def best(self, shares: Doubles, least: Doubles, most: Doubles) -> Doubles:
        """Return that of each row, for the best share of weights, no less than these."""
        found = self.log_likelihood(1.0, least, most)
        for share in (x for x in _TRIED_SHARES if np.any(shares <= x)):
            other = self.log_likelihood(share, least, most)
            found = np.where(share >= shares, np.fmax(found, other), found)
        return found


class ProfileSample(NamedTuple):
    """Of some rows, (rows, columns): z^2 and the log of the standard deviation; and of each row.

    The least is of roundings to nearest, or at the most favourable digits without those of weights
    that were the largest when they were rounded.
    """

    within: bool
    usual: Doubles  # log likelihoods of all columns of each row; none if they are not known
    best: Doubles  # the same for the best of the factors of the law
    squares: Doubles
    logs: Doubles
    units: Doubles  # 1 for an independent row, less for rows that depend on others
    least: Doubles  # mean square of z at the least
    most: Doubles  # and at the most: at the least favourable digits
    still_squares: Doubles  # without roundings of scores, in rows where these move nothing
    still_logs: Doubles
    still_least: Doubles
    shares: Doubles  # of the variance of weights, that may be left: others are not rounded
    tested: Doubles  # as tests take z, of the row or its log normaliser; infinite beyond the bound
    tells: npt.NDArray[np.bool_]  # which rows may speak against the profile
    heads: npt.NDArray[np.int64]

    @property
    def explains(self) -> bool:
        """Whether the profile may be that of nearly all rows, or of those of nearly all heads."""
        if self._explains(np.ones(len(self.heads), bool)):
            return True
        told = [self._explains(self.heads == x) for x in np.unique(self.heads)]
        return sum(told) >= (1 - _UNLIKE_HEADS) * len(told)

    def _explains(self, rows: npt.NDArray[np.bool_]) -> bool:
        tested, units = self.tested[rows], self.units[rows]
        kept = np.argsort(tested)[: math.ceil(len(tested) * (1 - _UNEXPLAINED))]
        units = units[kept]
        if np.any(np.isinf(tested[kept])):
            return False
        mean = np.sum(units * tested[kept]) / max(float(np.sum(units)), 1e-300)
        return bool(log_chernoff(mean, np.sum(units)) > math.log(_CHANCE))


def compare(
    problem: Problem,
    numbers: Numbers,
    dtype: str,
    profiles: Mapping[str, Profile],
    weights: RowWeights | None = None,
    looks: dict[Profile, ProfileSample] | None = None,
) -> dict[str, Fit]:
    """Compare profiles on the rows of a problem, the best first; what is found is kept in looks."""
    if len(profiles) == 1 or not any(i.stop > i.start for _, i in problem.items()):
        return dict.fromkeys(profiles, UNCOMPARED)
    known = weights or RowWeights(problem, dtype)
    found = {} if looks is None else looks
    missing = [x for x in dict.fromkeys(profiles.values()) if x not in found]

    def look(profile: Profile) -> None:
        found[profile] = _look(known, numbers, dtype, profile)

    for_each(lambda: look, missing, most=max(len(missing), 1))
    samples = {x: found[y] for x, y in profiles.items()}
    fits: dict[str, Fit] = {}
    alike, doubt = ALIKE, _DOUBT
    if problem.kind == "recurrent":
        alike, doubt = _ALIKE_STATES, _DOUBT_STATES
    heard = _hear(samples)
    for name, x in samples.items():
        others = [y for y in samples if y != name]
        likelier = {y: _weigh(heard[name], heard[y], doubt=doubt) for y in others}
        surely = {y: _weigh(x, samples[y], True) for y in others}
        best = max(likelier, key=lambda y: likelier[y])
        fits[name] = Fit(x.within, likelier[best], best, 0.0, x.explains, surely)
    explained = {x for x, y in fits.items() if y.explains}
    fits = {x: y.beside(explained) for x, y in fits.items()}
    return dict(sorted(fits.items(), key=lambda x: max(alike, x[1].against)))


def _look(known: RowWeights, numbers: Numbers, dtype: str, profile: Profile) -> ProfileSample:
    """Divide errors by their standard deviations."""
    parts: list[tuple[Any, ...]] = []
    problem, weights, roundings = known.problem, known.of(profile), profile.roundings(dtype)
    joint = problem.kind == "scores" and problem.shape[2] > 0
    directions = cache(partial(_draw_directions, problem.read_by(profile)))
    if joint and problem.gradient is not None:
        problem = problem._replace(gradient=problem.gradient._replace(along=directions))
    read = problem.read_by(profile)
    rows_of_head = np.zeros(len(weights))
    for index, i in problem.items():
        rows_of_head[problem.number(index)] += i.stop - i.start
    if not problem.rows_apart(roundings):
        weights = weights / np.maximum(rows_of_head, 1)[:, None]

    def use(index: Index, i: slice, rows: RowErrors) -> Callable[[], None]:
        error = rows.errors(numbers.out(index)[i])
        seen = ~np.isneginf(rows.lse) if problem.is_mean else np.ones(len(error), bool)
        within = np.all(np.abs(error) <= rows.bound * BEYOND, -1) | ~seen
        known = np.isfinite(rows.std) & np.isfinite(error) & seen[:, None]

        def fit(std: Doubles) -> tuple[Doubles, Doubles, Doubles]:
            sure = np.where(known & np.isfinite(std), std, math.nan)
            square, near = (np.square(x / sure) for x in (error, rows.errors(rows.nearest)))
            return square, np.log(np.where(np.isnan(sure), 1.0, std)), near

        square, logs, near = fit(rows.std)
        kept = _leave(near, rows.std)
        least, shares = np.minimum(kept, _LEAST**2), np.ones(len(error))
        if problem.is_mean:
            spared, whole = spared_variance(read.head(index), roundings, i, rows)
            rest = _LEAST**2 * np.maximum(1 - spared / np.square(rows.std), 0.0)
            least = np.minimum(least, _mean(np.minimum(near, rest)))
            if roundings.knows_digits(False) and not whole.any():
                least = _find_known_factors(kept, seen)
            left = np.where(whole > 0, 1 - spared / np.where(whole > 0, whole, 1.0), 1.0)
            shares = np.min(np.maximum(left, 0.0), -1, initial=1.0)
        elif joint and (roundings.maximum or may_be_tied(problem, index, roundings)):
            shares *= 0.0
        elif joint and roundings.knows_digits(True):
            least = _find_known_factors(kept, seen)
        tells = np.ones(len(error), bool)
        if joint and not problem.is_mean:
            # If terms cancel, as with equal values, so may roundings: these tell of no profile.
            tells = np.max(np.abs(rows.out), -1) >= _VANISHES * np.max(rows.std, -1)
            if roundings.stepwise and problem.result == "dq":
                tells &= ~_find_pairs_of_keys(problem, index, roundings, i)
        still: tuple[Any, ...] = square, logs, least
        if joint:
            along, apart = directions(index), bool(np.any(shares < 1))
            find = cache(partial(find_covariance, read, index, roundings, i, rows, along))
            law = still_law = _Law.of(rows, error, along, find, apart)
            # A largest weight that is rounded to 1 leaves the error of e^0 to the normaliser alone.
            of_largest = roundings.exp * roundings.accumulate.unit * rows.out
            if problem.is_mean and np.any(np.abs(of_largest) > rows.std):
                still_law = _Law.of(rows, error, along, find, apart, of_largest)
            if roundings.unit is not None:  # its shift is known up to a factor
                shift = allow(roundings.unit, np.broadcast_to(rows.shift, error.shape))
                still_law = _Law.of(rows, error, along, find, apart, shift)

        def take_other(by: Roundings) -> tuple[RowErrors, _Law]:
            others = read.analyse(index, by, i)
            find = partial(find_covariance, read, index, by, i, others, along)
            return others, _Law.of(others, error, along, find, apart)

        if joint and problem.is_mean and roundings.scores is not None:
            unmoved = _find_unmoved(read.head(index), i, roundings.scores, rows.lse)[:, None]
            if unmoved.any():
                others, other = take_other(roundings._replace(scores=None))
                square_of, logs_of, near_of = fit(np.where(unmoved, others.std, rows.std))
                least_of = np.minimum(_mean(near_of), _LEAST**2)
                still = square_of, logs_of, np.where(unmoved[:, 0], least_of, least)
                still_law = still_law.where(unmoved[:, 0], other)
        # Of the derivative of a maximum less may be left, as if D cancelled it.
        if joint and roundings.maximum and np.all(within):
            _, still_law = take_other(roundings._replace(maximum=False, delta_of_out=False))
        tested = np.square(np.where(known, subtract_rounding(error, rows) / rows.worst, math.nan))
        tested = np.where(within, _mean(tested), math.inf)
        if numbers.lse is not None and problem.is_mean:
            of_lse = LseErrors.of(numbers.lse(index)[i], numbers.lse_dtype, rows)
            tested = np.maximum(tested, of_lse.squares)
        most = np.maximum(_mean(np.where(known, np.square(rows.worst / rows.std), 0.0)), WORST**2)
        usual = best = np.zeros(0)
        if joint:
            usual = law.log_likelihood(1.0, 1.0, 1.0)
            best = np.fmax(law.best(shares, least, most), still_law.best(shares, still[2], most))
        part = (
            bool(np.all(within)),
            usual,
            best,
            square,
            logs,
            weights[problem.number(index), i],
            least,
            most,
            *still,
            shares,
            tested,
            tells,
            np.full(len(error), problem.number(index)),
        )
        return lambda: parts.append(part)

    sweep(problem, dtype, profile, use, exact=known.exact[profile.reading])
    within, *arrays = zip(*parts, strict=True)
    return ProfileSample(all(within), *(np.concatenate(x) for x in arrays))


def _hear(samples: Mapping[str, ProfileSample]) -> Mapping[str, ProfileSample]:
    """Leave rows that no profile explains, if there are others, without a say: they are wrong."""
    some = [log_chernoff(x.tested, 1) > math.log(_CHANCE) for x in samples.values()]
    told = np.any(some, 0)
    if not told.any():
        return samples
    return {x: y._replace(units=np.where(told, y.units, 0.0)) for x, y in samples.items()}


def _draw_directions(problem: Problem, index: Index) -> Doubles:
    """Draw directions at random, among columns that differ, in which all of these count alike."""
    tokens = list_tokens(problem, index)
    columns = distinct_columns(tokens)
    count = min(_ALONG, len(columns))
    directions = np.zeros((problem.shape[2], count))
    drawn = np.random.default_rng(0).standard_normal((len(columns), count))
    sizes = np.max(np.abs(tokens[:, columns]), 0, initial=0.0)
    directions[columns] = np.linalg.qr(drawn)[0] / np.where(sizes > 0, sizes, 1.0)[:, None]
    return directions


def _mean(x: Doubles) -> Doubles:
    """Average what is known of each row; 0 where nothing is."""
    known = ~np.isnan(x)
    means: Doubles = np.sum(np.where(known, x, 0.0), -1) / np.maximum(np.sum(known, -1), 1)
    return means


def _leave(near: Doubles, std: Doubles) -> Doubles:
    """Average what roundings to nearest leave of rows, in columns that roundings move."""
    moved = std > _HARDLY * np.max(np.where(np.isnan(near), 0.0, std), -1, keepdims=True)
    return _mean(np.where(moved, near, math.nan))


def _weigh(
    mine: ProfileSample, theirs: ProfileSample, surely: bool = False, doubt: float = _DOUBT
) -> float:
    """Return the log ratio of another likelihood to one, surely for the best of its factors."""
    one = np.ones(len(mine.least))
    if mine.usual.size and theirs.usual.size:
        ratio = theirs.usual - (mine.best if surely else mine.usual)
        return _sum_ratios(np.where(np.isnan(ratio), 0.0, ratio), mine, theirs, doubt, surely)
    ratio = _log_ratios(
        theirs, mine.squares, mine.logs, *((mine.least, mine.most) if surely else (one, one))
    )
    if surely:
        still = mine.still_squares, mine.still_logs, mine.still_least, mine.most
        ratio = np.minimum(ratio, _log_ratios(theirs, *still))
    return _sum_ratios(ratio, mine, theirs, doubt, surely)


def _sum_ratios(
    ratio: Doubles, mine: ProfileSample, theirs: ProfileSample, doubt: float, surely: bool
) -> float:
    """Sum over rows, of which each may be wrong: it speaks for a profile as little as against it.

    A test must count all that speaks against a profile; what is likeliest is told without.
    """
    ratio = np.logaddexp(math.log1p(-doubt) + ratio, math.log(doubt))
    ratio = ratio if surely else np.minimum(ratio, -math.log(doubt))
    ratio = np.where(mine.tells, ratio, np.minimum(ratio, 0.0))
    return float(np.sum(np.minimum(mine.units, theirs.units) * ratio))


def _log_ratios(
    theirs: ProfileSample, squares: Doubles, logs: Doubles, least: Doubles, most: Doubles
) -> Doubles:
    """Return the log ratio of another likelihood to one, by row, for the best of its factors."""
    both = ~(np.isnan(squares) | np.isnan(theirs.squares))
    own = _mean(np.where(both, squares, math.nan))
    bet = _mean(np.where(both, -theirs.squares / 2 - theirs.logs + logs, math.nan))
    square = np.maximum(np.clip(own, least, most), _TINY)
    return np.where(np.any(both, -1), bet + (own / square + np.log(square)) / 2, 0.0)


def _find_known_factors(near: Doubles, seen: npt.NDArray[np.bool_]) -> Doubles:
    """Find the least factors of rows of which the spacings of all that is rounded are known.

    What roundings to nearest leave is 1 on average, where digits are as random as they seem; in
    rows where they leave less than the most favourable digits the factor is less.
    """
    usual = min(float(np.mean(near[seen])), 1.0) if seen.any() else 0.0
    return usual * np.minimum(near / _LEAST**2, 1.0)


def _find_pairs_of_keys(
    problem: Problem, index: Index, roundings: Roundings, i: slice
) -> npt.NDArray[np.bool_]:
    """Find queries with nearly all weight on two keys: derivatives to scores, of sum 0, are one."""
    assert problem.gradient is not None
    assert roundings.d_scores is not None
    ((back, saved),) = problem.gradient.saved(index, roundings, i)
    largest = np.full((i.stop - i.start, 2), -math.inf)
    for tile in scan_tiles(back.head, i, CACHED_PAIRS // max(len(largest), 1)):
        seen = True if tile.visible is None else tile.visible
        both = np.concatenate([largest, np.where(seen, tile.scores, -math.inf)], -1)
        largest = np.partition(both, -2)[:, -2:]
    weight = np.sum(np.exp(largest - saved.lse[i, None]), -1)
    return np.asarray(weight > 1 - _TWO_KEYS * roundings.d_scores.unit)


def _find_unmoved(head: SoftmaxHead, i: slice, to: Format, lse: Doubles) -> npt.NDArray[np.bool_]:
    """Find queries of which roundings move no score, but those of keys that hardly count."""
    moved = np.zeros(i.stop - i.start)
    base = np.where(np.isfinite(lse), lse, 0.0)[:, None]
    for tile in scan_tiles(head, i, CACHED_PAIRS // max(len(moved), 1)):
        rounded = score_tile(head, i, tile.keys, tile.visible, tile.products, to.round)
        counts = rounded.scores != tile.scores
        counts = counts if tile.visible is None else counts & tile.visible
        moved += np.sum(np.where(counts, np.exp(np.minimum(tile.scores - base, 0.0)), 0.0), -1)
    return moved <= _HARDLY
