"""Records that the judge hands on: the numbers to be judged, tests, suspects and trials."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...arrays.library import Doubles
from ...arrays.words import place
from .. import stats
from ..rounding.problems import Index, Problem

WITHOUT_POWER = ("zeros", "mean of v")  # if one of these passes, a verdict means little
LOGARITHMS = {"ln(2)": math.log(2), "log2(e)": 1 / math.log(2)}  # factors that are forgotten
ONLY_IN = ", but only in "  # before the place of a cause
ALL_BUT = 0.95  # share of the mean square that a bug explains where there is no other
_LEFT_BY_KNOWN = 4.0  # mean square of z, at most, that it leaves
_NEAR_LOGARITHM = 0.02  # of a factor, how far it may be from one that is named
_NUMBERS_NAMED = 4  # numbers that are written one by one, at most
_PERIODS = (4, 8, 16, 32, 64, 128)  # of places that come again
IGNORES = "a kernel that ignores"  # an option: likewise
NOT_EXPLAINED = "causes were not searched for"
UNUSED_D_OUT = "d_out is not used: there is no dq, dk or dv"
SAME_KEYS = "(the right result here: all keys are the same)"
BEYOND = "squares of v or of its errors leave the range of float64: only bounds are tested"
SAME_VALUES = "v is the same for all keys: any weights give the same output"


class Finding(NamedTuple):
    """A test of a statement that holds for a correct kernel.

    Attributes
    ----------
    name : str
        Name of the test.
    p_value : float
        Largest probability that a correct kernel deviates so much.
    adjusted : float
        The p-value after Holm's correction for all tests.
    statistic : float
        What the test measures: ratio to the bound, largest |z|, mean square of z, a sum divided by
        its root mean square, log of a ratio of likelihoods, or a count; nan for several tests. Here
        z is as small as it may be: the rounding of the exact number is left out, and the standard
        deviation is the largest that any leading digits of the rounded numbers give.
    where : str
        Where the largest deviation is, or what was found, in words.
    """

    name: str
    p_value: float
    adjusted: float
    statistic: float
    where: str


class Suspect(NamedTuple):
    """A known bug, with its size.

    Attributes
    ----------
    name : str
        Name of the bug.
    estimate, error : float
        Its size (0 if it is absent), and the standard error of the size; nan for a bug without a
        size, for which it was only tested whether it explains the numbers. The error alone is nan
        where more than roundings is left.
    adjusted : float
        The corrected p-value of its absence; nan for a bug without a size.
    explained : float
        Share of the mean square of z that it explains.
    text : str
        The bug in a sentence.
    """

    name: str
    estimate: float
    error: float
    adjusted: float
    explained: float
    text: str


def as_cause(text: str) -> str:
    """Write the text of a suspect as a cause: without `agrees if`."""
    return text.removeprefix("agrees if ").replace("agrees in part if ", "in part, ", 1)


class Z(NamedTuple):
    """Errors over their standard deviations, where these are known.

    Tests use the smallest value of each: the rounding of the exact number is left out, and the
    standard deviation is the largest that any leading digits of the rounded numbers give.
    """

    rms: float
    largest: float
    where: tuple[int, ...]


class Worst(NamedTuple):
    """An element of a result, or a log normaliser.

    Attributes
    ----------
    name : str
        Name of the array.
    where : tuple of int
        Index of the element.
    got, exact : float
        The kernel's result, and the exact one.
    allowed : float
        Largest error allowed, given the number of tests and elements.
    """

    name: str
    where: tuple[int, ...]
    got: float
    exact: float
    allowed: float


class Numbers(NamedTuple):
    """The results of a kernel, read one head at a time.

    Attributes
    ----------
    out : callable
        Returns the output of a head, (n, d_v).
    out_dtype : str
        Its type.
    lse : callable or None
        Returns the log normalisers of a head, (n,).
    lse_dtype : str
        Their type.
    remark : str
        Which rows of the output hold numbers that its type does not have, if any do.
    """

    out: Callable[[Index], Doubles]
    out_dtype: str
    lse: Callable[[Index], Doubles] | None = None
    lse_dtype: str = "float32"
    remark: str = ""

    def are_finite(self, at: Index) -> bool:
        """Tell whether all numbers of a row are finite."""
        return bool(np.all(np.isfinite(self.out(at[:-1])[at[-1]])))


class Part(NamedTuple):
    """Numbers to be judged, and what they are to be."""

    problem: Problem
    numbers: Numbers


for _type in (Finding, Suspect, Numbers, Worst):
    _type.__module__ = "refattn.judge.verification"  # where users find them, and so do pickles


class WrongRow(NamedTuple):
    """A row, what was measured of it, and the log of its p-value."""

    at: Index
    square: float
    log_p: float


# Finds rows by their p-values, the smallest first, as long as logs of some are below a level; and
# tells whether there may be more.
Find = Callable[[float], tuple[Sequence[WrongRow], bool]]


class ProfileTrial(NamedTuple):
    """What the numbers say of one profile."""

    profile: str
    tests: list[Finding]
    suspects: list[Suspect]
    z: Z
    known: float  # share of the elements that have a law
    detectable: dict[str, float]
    powered: bool  # whether an output that is 1 % too large would have been rejected
    find: Find
    element: float = 0.0  # standard deviations by which any element is off to be rejected
    loud: tuple[tuple[Index, slice], ...] = ()  # rows with the largest z, if others are left out
    idle: Sequence[Index] = ()  # rows that may hold 0, or the mean of the values
    rows: int = 0  # that were tried

    def with_test(self, test: Finding) -> ProfileTrial:
        """Add a test, and correct for it, too."""
        tests = sorted([*self.tests, test], key=lambda x: x.p_value)
        adjusted = stats.holm([x.p_value for x in tests])
        return self._replace(
            tests=[x._replace(adjusted=float(p)) for x, p in zip(tests, adjusted, strict=True)]
        )

    def rejected(self, alpha: float) -> bool:
        """Tell whether such numbers have probability alpha at most for this profile."""
        return min((x.adjusted for x in self.tests), default=1.0) <= alpha

    def rank(self, alpha: float, rounded: bool) -> tuple[bool, bool, bool, float]:
        """Rank what explains the numbers before what does with a bug, and that before the nearest.

        Profiles whose inputs are rounded come last of those that are rejected alike.
        """
        most = max((x.explained for x in self.suspects), default=0.0)
        off = abs(math.log(self.z.rms or 1.0))
        known = most >= ALL_BUT and self.z.rms**2 * (1 - most) < _LEFT_BY_KNOWN
        return self.rejected(alpha), rounded, not known, off


def name_first(
    words: Sequence[str], most: int = 3, more: str = " and so on ({} more)", between: str = ", "
) -> str:
    """Write the first of some words, and how many more there are."""
    rest = len(words) - most
    return between.join(words[:most]) + more.format(rest) * (rest > 0)


def describe_span(numbers: npt.NDArray[Any]) -> str:
    """Write numbers as a range, or a few of them."""
    first, last = int(numbers[0]), int(numbers[-1])
    if len(numbers) == 1:
        return str(first)
    if last - first + 1 == len(numbers):
        return f"{first} to {last}"
    steps = np.unique(np.diff(numbers))
    if len(steps) == 1 and len(numbers) > 2:
        return f"{first} to {last} in steps of {int(steps[0])}"
    if len(numbers) <= _NUMBERS_NAMED:
        return f"{', '.join(map(str, numbers[:-1]))} and {last}"
    for size in _PERIODS:
        some, every = np.unique(numbers % size), np.arange(first, last + 1)
        regular = np.array_equal(numbers, every[np.isin(every % size, some)])
        if last - first > 2 * size and regular and (len(some) == 2 or np.all(np.diff(some) == 1)):
            residues = describe_span(some)
            return f"{first} to {last} whose index % {size} is {residues}"
    return f"between {first} and {last}"


def name_number(c: float, error: float, known: Mapping[str, float] = LOGARITHMS) -> str:
    """Name a factor that is known by its errors, or is near enough; "" if it is none."""
    near = min(max(4 * error, 1e-3 * abs(c)), _NEAR_LOGARITHM * abs(c))
    return next((x for x, y in known.items() if abs(y - c) < near and y != 1), "")


def name_factor(problem: Problem, c: float, error: float) -> str:
    """Say what a factor is that has a name: of the scale, of logarithms, or of head counts."""
    known = {**LOGARITHMS}
    if problem.gradient is not None and problem.gradient.of != "dv" and problem.scale:
        known["the scale is used twice"] = problem.scale
        known["the scale is left out"] = 1 / problem.scale
    # A sum over the query heads of a key head may be a mean, or be multiplied by their number.
    share = problem.lead[-1] // problem.key_heads if problem.key_heads and problem.lead else 1
    if share > 1:
        known["the number of query heads of a key head"] = share
        known["1 / the number of query heads of a key head"] = 1 / share
    words = name_number(c, error, known)
    return f": {words}" * bool(words)


def name_heads(problem: Problem, heads: npt.NDArray[np.int64]) -> str:
    """Name each of some heads, or of many the first or, if they are all of those, spans of axes."""
    names = ", ".join(place(problem.index_of(x)) for x in heads[:4])
    axes = [np.unique(x) for x in np.unravel_index(heads, problem.lead)]
    spans = ", ".join(map(describe_span, axes))
    if len(heads) > 4 and math.prod(map(len, axes)) == len(heads) and "between" not in spans:
        names = f"({spans})" if len(axes) > 1 else spans
    elif len(heads) > 4:
        names += f" and {len(heads) - 4} more"
    return f"head{'s' * (len(heads) > 1)} {names}"


def name_span(kind: str, numbers: npt.NDArray[Any]) -> str:
    """Name one or several of the `queries`, `keys` or `columns` of these numbers."""
    one = "query" if kind == "queries" else kind[:-1]
    return f"{one if len(numbers) == 1 else kind} {describe_span(numbers)}"


def weaken(blind: Sequence[str]) -> list[str]:
    """List what passes as well and must not."""
    return [x for x in blind if x in WITHOUT_POWER or x.startswith(IGNORES)]
