r"""Which profile fits numbers best, and how surely another than the best does not.

If a kernel has profile P, the densities of its errors are those of P, :math:`p`. Those of another
profile, :math:`p'`, are numbers that one may bet on: as :math:`E\, p'/p \le 1`, by Hölder

.. math:: E \exp\Big(\frac{1}{d}\sum_{c} \log \frac{p'_c}{p_c}\Big) \le 1

for the d columns of a row, which may depend on each other in any way. So is a mean of this and 1,
which a single wrong row cannot make small. Rows are independent, and by Markov the product over
them exceeds x with probability :math:`1/x` at most. Standard deviations of P are known but for a
factor between those of the least and the most favourable digits: the one is taken that speaks most
for P. So numbers that fit P far too well speak against it, if another profile says why.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..arrays.library import Doubles
from ..rounding.problems import Index, Problem, sweep
from ..rounding.profiles import Profile
from ..rounding.roundings import WORST, RowErrors
from .findings import Numbers
from .head_sums import row_weights

_FACTORS = np.geomspace(WORST / 2, WORST, 9)  # of standard deviations, by the leading digits
_ALIKE = 1.0  # of log likelihoods: nearer ones are alike, and the first is taken
_DOUBT = 0.01  # weight of 1 beside the ratio of a row: the most that one row may cost


class Fit(NamedTuple):
    """How well the numbers of some rows fit a profile.

    Attributes
    ----------
    within : bool
        Whether all of them are within its bound.
    against : float
        Log of the largest ratio of another likelihood to its own.
    likelier : str
        The profile with that.
    log_p : float
        Log of a bound on the probability of this, if the profile is that of the kernel.
    """

    within: bool
    against: float
    likelier: str
    log_p: float


class _Sample(NamedTuple):
    """Of some rows, (rows, columns): z^2 and the log of the standard deviation; and weights."""

    within: bool
    squares: Doubles
    logs: Doubles
    units: Doubles  # 1 for a row of its own, less for those that depend on others


def compare(
    problem: Problem, numbers: Numbers, dtype: str, profiles: Mapping[str, Profile]
) -> dict[str, Fit]:
    """Compare profiles on the rows of a problem, the best first."""
    if len(profiles) == 1 or not any(i.stop > i.start for _, i in problem.items()):
        return dict.fromkeys(profiles, Fit(True, 0.0, "", 0.0))
    samples = {x: _look(problem, numbers, dtype, y) for x, y in profiles.items()}
    sure = {x: _weigh_others(x, samples, np.ones(1)) for x in profiles}
    held = {x: _weigh_others(x, samples, _FACTORS) for x in profiles}
    others = math.log(len(profiles) - 1)
    fits = {
        x: Fit(y.within, sure[x][0], held[x][1], min(0.0, others - held[x][0]))
        for x, y in samples.items()
    }
    return dict(sorted(fits.items(), key=lambda x: max(_ALIKE, x[1].against)))


def _look(problem: Problem, numbers: Numbers, dtype: str, profile: Profile) -> _Sample:
    """Divide errors by their standard deviations."""
    parts: list[tuple[bool, Doubles, Doubles, Doubles]] = []
    kernel = profile.kernel(dtype)
    weights = row_weights(problem.read_by(profile), kernel)
    rows_of_head = np.zeros(len(weights))
    for index, i in problem.items():
        rows_of_head[problem.number(index)] += i.stop - i.start
    if not problem.rows_apart(kernel):
        weights = weights / np.maximum(rows_of_head, 1)[:, None]

    def use(index: Index, i: slice, rows: RowErrors) -> Callable[[], None]:
        error = rows.errors(numbers.out(index)[i])
        seen = ~np.isneginf(rows.lse) if problem.is_mean else np.ones(len(error), bool)
        within = bool(np.all((np.abs(error) <= rows.bound * (1 + 2.0**-20))[seen]))
        known = np.isfinite(rows.std) & np.isfinite(error) & seen[:, None]
        square = np.where(known, np.square(error / rows.std), math.nan)
        logs = np.log(np.where(known, rows.std, 1.0))
        part = within, square, logs, weights[problem.number(index), i]
        return lambda: parts.append(part)

    sweep(problem, dtype, profile, use)
    within, *arrays = zip(*parts, strict=True)
    return _Sample(all(within), *(np.concatenate(x) for x in arrays))


def _weigh_others(name: str, samples: Mapping[str, _Sample], factors: Doubles) -> tuple[float, str]:
    """Return the largest log ratio of another likelihood to one, with the best of its factors."""
    mine, found = samples[name], [(-math.inf, "")]
    for other, theirs in samples.items():
        if other == name:
            continue
        both = ~(np.isnan(mine.squares) | np.isnan(theirs.squares))
        count = np.maximum(np.sum(both, -1), 1)

        def mean(x: Doubles, both: Any = both, count: Doubles = count) -> Doubles:
            return np.asarray(np.sum(np.where(both, x, 0.0), -1) / count)

        bet = mean(-theirs.squares / 2 - theirs.logs + mine.logs)
        own, any_ = mean(mine.squares) / 2, np.any(both, -1)
        units = np.minimum(mine.units, theirs.units)
        ratios = []
        for factor in factors:
            ratio = np.where(any_, bet + own / factor**2 + math.log(factor), 0.0)
            ratio = np.logaddexp(math.log1p(-_DOUBT) + ratio, math.log(_DOUBT))
            ratios.append(float(np.sum(units * ratio)))
        found.append((min(ratios), other))
    return max(found)
