"""Divide errors by their standard deviations: z by row, by head and in a few blocks."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from ...arrays.library import Doubles
from ..rounding.formats import FORMATS
from ..rounding.problems import Index, Problem, sweep
from ..rounding.profiles import Profile
from ..rounding.roundings import WORST, Roundings, RowErrors
from .choice import choose_profiles
from .findings import Numbers

BEYOND = 1 + 2.0**-20  # times a bound, of which the rest is for roundings of the bound itself

_COMPARED_BLOCKS = 4  # blocks of queries that are looked at before all


class LseErrors(NamedTuple):
    """Errors of log normalisers, which are rounded once more; 0 where there is no law.

    Errors are infinite where what was given is not -inf for a query without keys.
    """

    errors: Doubles  # of what was given
    rounding: Doubles  # of the exact numbers rounded to nearest
    ratio: Doubles  # size over the bound
    weights: Doubles  # one over the variance, 0 where there is no law
    slack: Doubles  # how much may be the same for all, with half of the last rounding

    @classmethod
    def of(cls, got: Doubles, dtype: str, rows: RowErrors) -> LseErrors:
        """Compare log normalisers of a type with those of some rows."""
        to = FORMATS[dtype]
        empty = np.isneginf(rows.lse)
        spacing = np.where(empty, 0.0, to.spacing(rows.lse))
        with np.errstate(invalid="ignore"):
            error = np.where(
                empty, np.where(got == rows.lse, 0.0, math.inf), got - rows.lse - rows.lse_rest
            )
        ratio = over_bound(error, rows.lse_bound + spacing / 2)
        variance = np.square(rows.lse_std) + spacing * spacing / 12
        # A query without keys has a log normaliser of exactly -inf, or an infinite error.
        known = np.isfinite(error + variance + rows.lse_slack) & (variance > 0) & ~empty
        exact = np.where(known, rows.lse, 0.0)
        rest, slack = (np.where(known, x, 0.0) for x in (rows.lse_rest, rows.lse_slack))
        return cls(
            np.where(known, error, 0.0),
            to.round(exact) - exact - rest,
            ratio,
            np.where(known, 1 / np.where(known, variance, 1.0), 0.0),
            slack + to.spacing(exact) / 2,
        )

    @property
    def squares(self) -> Doubles:
        """Squares of what tests take for z: beyond the slack, at the least favourable digits."""
        beyond = np.maximum(np.abs(self.errors) - self.slack, 0.0)
        return np.asarray(self.weights * beyond * beyond / WORST**2)


def over_bound(error: Any, bound: Any) -> Doubles:
    """Divide errors by their bounds; if a profile overflows, anything may come out."""
    ratio = np.abs(error) / np.where(bound > 0, bound, 1e-300)
    ratio = np.where(np.isnan(error), math.inf, np.where(error == 0, 0.0, ratio))
    return np.where(np.isinf(bound), 0.0, ratio)


def mean_square(problem: Problem, numbers: Numbers, roundings: Roundings) -> float:
    """Return the mean square of z of a few blocks; infinite beyond a bound, or if none sees a key.

    Those that see none are left out: kernels give 0 for them, NaN or the mean of all values.
    """
    squares, count, compared = 0.0, 0, 0
    for index, i in problem.few_items(_COMPARED_BLOCKS):
        with np.errstate(all="ignore"):
            rows, got = problem.analyse(index, roundings, i), numbers.out(index)[i]
        seen = ~np.isneginf(rows.lse) if problem.is_mean else np.ones(len(got), bool)
        if not np.all((np.abs(rows.errors(got)) <= rows.bound)[seen]):
            return math.inf
        z = _divide_by_std(got, rows)[seen]
        squares, count = squares + float(np.nansum(z * z)), count + int(np.sum(~np.isnan(z)))
        compared += int(np.sum(seen))
    if not compared:
        return math.inf
    return squares / count if count else 0.0


def subtract_rounding(errors: Doubles, rows: RowErrors) -> Doubles:
    """Subtract what rounding to nearest gives, and what errors have in common, at their most."""
    # The interval is taken away that speaks most for the kernel.
    return np.asarray(errors - np.clip(errors, *rows.span_rounding()))


def z_by_row(
    problem: Problem, numbers: Numbers, dtype: str, profile: str | Profile
) -> tuple[Doubles, Doubles]:
    """Sum z^2 over the columns, (heads, n), and count the elements that have a law."""
    shape = math.prod(problem.lead), problem.shape[0]
    squares, counts = np.zeros(shape), np.zeros(shape)

    def add(index: Index, i: slice, rows: RowErrors) -> None:
        at = problem.number(index)
        z = _divide_by_std(numbers.out(index)[i], rows)
        squares[at, i], counts[at, i] = np.nansum(z * z, -1), np.sum(~np.isnan(z), -1)

    sweep(problem, dtype, _choose_profile(dtype, numbers.out_dtype, profile), add)
    return squares, counts


def z_of_head(
    problem: Problem, numbers: Numbers, dtype: str, profile: str | Profile, index: Index
) -> Doubles:
    """Divide errors of a head by their standard deviations, (n, d_v); nan where there is no law."""
    z = np.empty((problem.shape[0], problem.shape[2]))
    chosen, got = _choose_profile(dtype, numbers.out_dtype, profile), numbers.out(index)
    problem = problem.read_by(chosen)  # 8 bits have a scale for all heads

    def add(_: Index, i: slice, rows: RowErrors) -> None:
        z[i] = _divide_by_std(got[i], rows)

    sweep(problem.alone(index), dtype, chosen._replace(inputs=None), add)
    return z


def _divide_by_std(got: Doubles, rows: RowErrors) -> Doubles:
    error = rows.errors(got)
    z: Doubles = np.where(np.isfinite(rows.std) & np.isfinite(error), error / rows.std, np.nan)
    return z


def _choose_profile(dtype: str, out_dtype: str, profile: str | Profile) -> Profile:
    return next(iter(choose_profiles(dtype, out_dtype, profile).values()))
