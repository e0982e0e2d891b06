"""Results that were quantised: numbers of a narrow type, or integers, times a step."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ....arrays.library import Doubles
from ...rounding.formats import FORMATS
from ...rounding.problems import Problem
from ...verification.findings import Numbers

_STEP_COUNTS = (127, 128, 127.5, 7, 8, 7.5, 31, 15)  # steps up to the largest number
_SCALED_TYPES = ("float8_e4m3fn", "float8_e5m2")
_NO_CHANCE = -40.0  # log of the probability, at most, that other numbers lie on a grid
_MOST, _GROUPS = 2**18, (16, 32, 64, 128)  # numbers that are tried; columns that share a step
_SLACK = 2.0  # times the unit of the type by which numbers are off


def _list_grids(x: Doubles, axes: tuple[int, ...]) -> Iterator[tuple[str, Doubles, Doubles]]:
    """List grids by the largest number along axes: in words, nearest points, and gaps of these."""
    most, spread = np.max(np.abs(x), axes, keepdims=True), np.ptp(x, axes, keepdims=True)
    steps = {f"{2 * count:g} of them": most / count for count in _STEP_COUNTS}
    steps["255 from the least to the largest"] = spread / 255
    for words, step in steps.items():
        step = np.where(step > 0, step, 1.0)
        text = f"is a whole number of steps ({words}), the first of {step.flat[0]:.4g}"
        yield text, np.rint(x / step) * step, step
    for name in _SCALED_TYPES:
        to = FORMATS[name]
        scale = np.where(most > 0, most / to.largest, 1.0)
        for words, by in (("", np.ones_like(scale)), (" times a scale", scale)):
            yield f"is a number of {name}{words}", to.round(x / by) * by, by * to.spacing(x / by)


def find_grid(problem: Problem, numbers: Numbers) -> tuple[str, float]:
    """Say on which grid all numbers of a result lie, if they could not by chance, and its gap.

    The largest number, or the largest of each row, lies on the grid that it makes.
    """
    heads = [*np.ndindex(problem.lead)]
    n, _, columns = problem.shape
    few = heads[: max(1, _MOST // max(n * columns, 1))]
    x = np.stack([numbers.out(index) for index in few])
    unit = _SLACK * FORMATS[numbers.out_dtype].unit
    if not x.size or not np.all(np.isfinite(x)) or not np.any(x):
        return "", 0.0
    kinds: dict[str, tuple[Doubles, tuple[int, ...]]] = {}
    if len(few) == len(heads):
        kinds[""] = x, (0, 1, 2)
    kinds |= {" in each head": (x, (1, 2)), " in each row": (x, (2,))}
    for size in (y for y in _GROUPS if y < columns and columns % y == 0):
        kinds[f" in each row and {size} columns"] = x.reshape(*x.shape[:2], -1, size), (3,)
    for where, (grouped, axes) in kinds.items():
        for words, points, gap in _list_grids(grouped, axes):
            slack = unit * np.abs(points)
            if np.any(np.abs(grouped - points) > slack):
                continue
            # Any other number is as near to a point with this probability; 0 may have a cause.
            sizes = np.abs(grouped)
            free = (sizes == 0) | (sizes == np.max(sizes, axes, keepdims=True))
            chance = np.where(free, 1.0, np.minimum(2 * (slack + unit * gap) / gap, 1.0))
            if np.sum(np.log(chance)) < _NO_CHANCE:
                return f"each number of the output {words}{where}", float(np.max(gap))
    return "", 0.0
