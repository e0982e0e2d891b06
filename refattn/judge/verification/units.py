"""Find the matrix units whose truncated sums explain errors, where rounded sums do not."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import islice
from typing import NamedTuple

import numpy as np

from ...arrays.library import Doubles
from ..rounding.hardware import IEEE, SLACK, UNITS, Unit, allow, name_units
from ..rounding.problems import Index, Problem, sweep
from ..rounding.profiles import Profile, profile_of
from ..rounding.roundings import RowErrors
from .evidence import log_chernoff
from .findings import Numbers
from .looks import choose_compared
from .z_scores import subtract_rounding

_BLOCKS, _FEW_ROWS, _ROWS = 4, 32, 128  # blocks that shifts are compared on, and rows of each
_SURE = 6.0  # standard errors
_NEAR_ENOUGH = 0.5  # of a shift on some rows, for all to be tried
_UNKNOWN = 2.0  # standard error of the part of a shift from which on some more rows tell nothing
_PASSED_OVER = 1e-9  # of a right profile to be passed over


class ShiftFit(NamedTuple):
    """How the errors of some rows compare with the shift that a unit predicts."""

    share: float  # the part of the shift that errors show, 1 for the right unit
    error: float  # its standard error
    least: float  # the standard error that all rows would leave
    possible: bool  # whether the profile may have the mean square of the rest of the errors
    measured: float  # by what part of itself the result is too large
    predicted: float
    allowed: float = SLACK  # the part of the shift by which it may be off
    apart: float = 0.0  # by how much more than by chance the share of a head is another

    @property
    def agrees(self) -> bool:
        """Whether the shift may be that of the errors, and all rows would show it."""
        off = max(self.allowed, _NEAR_ENOUGH) + _SURE * self.error
        return self.least < 1 and abs(self.share - 1) < off and self.apart < _NEAR_ENOUGH


def compare_shift(
    problem: Problem, numbers: Numbers, dtype: str, profile: Profile, rows_of_block: int = _ROWS
) -> ShiftFit | None:
    """Compare the errors of some rows with the shift of a profile; None if there is none."""
    roundings = profile.roundings(dtype)
    sums: dict[Index, Doubles] = defaultdict(lambda: np.zeros(8))  # by head
    some = choose_compared(problem).items()  # of gradients, in the heads that are known best
    rows_of = problem.few_items(_BLOCKS) if problem.gradient is None else some
    cut = ((index, slice(i.start, min(i.stop, i.start + rows_of_block))) for index, i in rows_of)

    def add(index: Index, i: slice, x: RowErrors) -> Callable[[], None]:
        errors = x.errors(numbers.out(index)[i])
        known = np.isfinite(x.std) & np.isfinite(errors)
        e, s, out = (np.where(known, y / x.std, 0.0) for y in (errors, x.shift, x.out))
        z = np.where(known, subtract_rounding(errors, x) / x.worst, 0.0)
        products = (e * s, s * s, e * e, e * out, s * out, out * out, z * z)
        found = np.array([*map(np.sum, products), len(out)])

        def add_head() -> None:
            sums[index] += found

        return add_head

    sweep(problem._replace(blocks=tuple(cut)), dtype, profile, add)

    def share(of: Doubles) -> tuple[float, float]:
        """Return the part of the shift, and its standard error."""
        both, shifts, square, *_, rows = of.tolist()
        return 1 + both / shifts, math.sqrt(square / (rows * problem.shape[2]) / shifts)

    whole = sum(sums.values(), np.zeros(8))
    _, shifts, _, of_out, shift_of_out, outs, least, rows = whole.tolist()
    if not shifts or not outs:
        return None
    part, error = share(whole)
    of_heads = [share(x) for x in sums.values() if x[1]]
    count, every = rows * problem.shape[2], math.prod(problem.lead) * problem.shape[0]
    independent = rows if problem.rows_apart(roundings) else 0
    return ShiftFit(
        part,
        error,
        math.sqrt(rows / every / shifts),
        bool(log_chernoff(least / count, independent) > math.log(_PASSED_OVER)),
        (of_out + shift_of_out) / outs,
        shift_of_out / outs,
        float(allow(roundings.unit, 1.0)),
        max(abs(x - part) - _SURE * y for x, y in of_heads),
    )


def list_units(
    problem: Problem, numbers: Numbers, dtype: str, profiles: Mapping[str, Profile]
) -> list[str]:
    """Name profiles with units whose shifts agree with the errors, the best first.

    For each unit those are the two tightest profiles that may explain the rest of the errors.
    """
    if problem.kind != "scores":
        return []
    alike: dict[tuple[str | None, ...], list[str]] = {}  # profiles, by what their units multiply
    for name, profile in profiles.items():
        if profile.accumulator is None and _list_units(profile, dtype):
            alike.setdefault((profile.weights, profile.inputs), []).append(name)
    # What a unit cuts depends on what it multiplies: one profile of a kind compares units for all.
    found = (_list_fits(problem, numbers, dtype, profiles, x) for x in alike.values())
    return [name for names in found for name in names]


def _list_fits(
    problem: Problem,
    numbers: Numbers,
    dtype: str,
    profiles: Mapping[str, Profile],
    names: Sequence[str],
) -> Iterator[str]:
    """Name profiles of one kind with units whose shifts agree with the errors."""

    @cache
    def compare(name: str, hardware: str, rows: int = _ROWS) -> ShiftFit | None:
        profile = profiles[name]._replace(accumulator=hardware)
        return compare_shift(problem, numbers, dtype, profile, rows)

    fits: dict[str, ShiftFit] = {}
    for hardware in _list_units(profiles[names[0]], dtype).values():
        fit = compare(names[0], hardware, _FEW_ROWS)
        if fit is not None and fit.agrees and fit.error < _UNKNOWN:  # more rows say more
            fit = compare(names[0], hardware)
        if fit is not None and fit.agrees:
            fits[hardware] = fit
    # The likeliest first: a unit that loses more is known with a smaller standard error.
    for hardware in sorted(fits, key=lambda x: abs(fits[x].share - 1) / fits[x].error):
        rows = _ROWS if fits[hardware].error < _UNKNOWN else _FEW_ROWS
        possible = (x for x in names if (fit := compare(x, hardware, rows)) and fit.possible)
        yield from (f"{x}@{hardware}" for x in islice(possible, 2))


def _list_units(profile: Profile, dtype: str) -> dict[Unit, str]:
    """List the units that a profile may have, with one of the names of each."""
    units = {x: profile._replace(accumulator=x).roundings(dtype).unit for x in UNITS}
    return {unit: name for name, unit in reversed(units.items()) if unit is not None}


def add_unit(profiles: dict[str, Profile], name: str) -> None:
    """Add the profile with a unit of a name such as "flash@hopper"."""
    base, _, hardware = name.partition("@")
    profiles[name] = profiles[base]._replace(accumulator=hardware)


def on_hardware(profiles: dict[str, Profile], hardware: str | None) -> dict[str, Profile]:
    """Give the hardware to all profiles, and its name to their names."""
    if hardware in (None, IEEE):
        return profiles
    return {f"{x}@{hardware}": y._replace(accumulator=hardware) for x, y in profiles.items()}


def name_on_hardware(name: str, dtype: str, hardware: str | None) -> str:
    """Add the name of hardware to that of a profile which multiplies weights in its units."""
    profile = profile_of(name)._replace(accumulator=hardware)
    return name if "@" in name or profile.roundings(dtype).unit is None else f"{name}@{hardware}"


def describe_unit(problem: Problem, numbers: Numbers, dtype: str, name: str) -> Iterator[str]:
    """Say what the unit of a profile of this name makes of the result, if it has one."""
    profile = profile_of(name)._replace(out=numbers.out_dtype)
    unit, fit = profile.roundings(dtype).unit, compare_shift(problem, numbers, dtype, profile)
    if unit is not None and fit is not None and fit.agrees:
        what = "float32 products are split in three" if unit.split else "sums are truncated"
        seen, predicted = (f"{-100 * x:.2g} %" for x in (fit.measured, fit.predicted))
        where = f"tensor cores of {name_units(unit)}"
        yield f"{what} by {where}: results are {seen} too small, predicted {predicted}"
