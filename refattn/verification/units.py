"""Which units are tried where rounded sums explain nothing, and what a unit explains."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from ..rounding.hardware import IEEE, UNITS, describe_units
from ..rounding.problems import Problem
from ..rounding.profiles import Profile
from .findings import Numbers

_BLOCKS, _ROWS = 4, 128  # blocks of rows that shifts are compared on
_SURE = 6.0  # standard errors


class Fit(NamedTuple):
    """How errors compare with the shift that a unit predicts, on some rows.

    Attributes
    ----------
    share, error : float
        The part of the shift that the errors show, 1 for the right unit, and its standard error.
    known : float
        The least standard error that all rows would leave.
    measured, predicted : float
        By what part of itself the result is too large.
    """

    share: float
    error: float
    known: float
    measured: float
    predicted: float

    @property
    def agrees(self) -> bool:
        """Whether the shift may explain the errors, and is large enough to be seen in all rows."""
        return self.known < 1 and abs(self.share - 1) < 0.5 + _SURE * self.error


def compare_shift(problem: Problem, numbers: Numbers, dtype: str, profile: Profile) -> Fit:
    """Compare the errors of some rows with the shift of the unit of a profile."""
    kernel, problem = profile.kernel(dtype), problem.read_by(profile)
    items = list(problem.items())
    sums, rows = np.zeros(7), 0
    for index, i in items[:: max(1, len(items) // _BLOCKS)][:_BLOCKS]:
        i = slice(i.start, min(i.stop, i.start + _ROWS))
        with np.errstate(all="ignore"):
            x = problem.analyse(index, kernel, i)
            errors = x.errors(numbers.out(index)[i])
            known = np.isfinite(x.std) & np.isfinite(errors)
            errors, shift, out = (
                np.where(known, y / x.std, 0.0) for y in (errors, x.shift, x.out)
            )
        pairs = ((errors, shift), (shift, shift), (errors, errors), (errors, out), (shift, out))
        sums += [*(np.sum(a * b) for a, b in pairs), np.sum(out * out), np.sum(known)]
        rows += i.stop - i.start
    along, size, square, of_out, shift_of_out, out, count = sums.tolist()
    if not size or not out:
        return Fit(0.0, 0.0, math.inf, 0.0, 0.0)
    every = math.prod(problem.lead) * problem.shape[0]
    return Fit(
        1 + along / size,
        math.sqrt(square / max(count, 1.0) / size),
        math.sqrt(rows / every / size),
        (of_out + shift_of_out) / out,
        shift_of_out / out,
    )


def list_units(
    problem: Problem, numbers: Numbers, dtype: str, profiles: Mapping[str, Profile]
) -> Iterator[tuple[str, Profile]]:
    """List profiles with the units whose shifts agree with the errors, the best first."""
    if problem.kind != "scores":
        return
    fits: dict[tuple[str, str], Fit] = {}
    for name, profile in profiles.items():
        units = set()
        for hardware in UNITS if profile.accumulator is None else ():
            unit = profile._replace(accumulator=hardware).kernel(dtype).unit
            if unit is not None and unit not in units:
                units.add(unit)
                fits[name, hardware] = compare_shift(
                    problem, numbers, dtype, profile._replace(accumulator=hardware)
                )
    for name, hardware in sorted(fits, key=lambda x: abs(fits[x].share - 1)):
        if fits[name, hardware].agrees:
            yield f"{name}@{hardware}", profiles[name]._replace(accumulator=hardware)


def on_hardware(profiles: Mapping[str, Profile], hardware: str | None) -> dict[str, Profile]:
    """Give the hardware to all profiles, and its name to their names."""
    if hardware in (None, IEEE):
        return dict(profiles)
    return {f"{x}@{hardware}": y._replace(accumulator=hardware) for x, y in profiles.items()}


def describe_fit(problem: Problem, numbers: Numbers, dtype: str, profile: Profile) -> Iterator[str]:
    """Say what the unit of a profile makes of the result, if it has one."""
    unit = profile.kernel(dtype).unit
    if unit is not None:
        fit = compare_shift(problem, numbers, dtype, profile)
        yield (
            f"sums as tensor cores of {describe_units(unit)} cut them: "
            f"{_write(fit.measured)}, predicted {_write(fit.predicted)}"
        )


def _write(x: float) -> str:
    return f"{abs(x):.2g} too {'small' if x < 0 else 'large'}"
