"""Alternating runs, and what follows from their times."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from scipy.stats import linregress

PAUSE = 0.15  # seconds; OpenBLAS keeps its threads spinning for about 0.1 s after a product

Name = TypeVar("Name", bound=Hashable)
Timer = Callable[[Callable[[], object]], float]


class Quartiles(NamedTuple):
    """Median and interquartile range of repeated measurements."""

    lower: float
    median: float
    upper: float


class Exponent(NamedTuple):
    """Exponent of a power law and its standard error."""

    value: float
    error: float


def wall(form: Callable[[], object]) -> float:
    """Seconds of one call by the clock; a device needs a timer that also waits for it."""
    start = time.perf_counter()
    form()
    return time.perf_counter() - start


def alternate(
    forms: Mapping[Name, Callable[[], object]],
    repeats: int,
    *,
    pause: float = PAUSE,
    timer: Timer = wall,
) -> dict[Name, list[float]]:
    """Seconds of each form in each round; in a round every form runs once, in turn.

    Each round starts with another form, so that none always follows the same one. A machine that is
    busy for a while slows all forms of a round alike. Each run starts after a pause, when the
    threads of the one before sleep. A first round warms up and is not kept.
    """
    seconds: dict[Name, list[float]] = {name: [] for name in forms}
    turns = deque(forms)
    for lap in range(repeats + 1):
        for name in turns:
            time.sleep(pause)
            elapsed = timer(forms[name])
            if lap > 0:
                seconds[name].append(elapsed)
        turns.rotate(-1)
    return seconds


def quartiles(values: Sequence[float]) -> Quartiles:
    """Lower quartile, median and upper quartile."""
    return Quartiles(*np.quantile(values, (0.25, 0.5, 0.75)).tolist())


def ratio(numerator: Sequence[float], denominator: Sequence[float]) -> Quartiles:
    """Quartiles of the ratios of times of the same round."""
    pairs = zip(numerator, denominator, strict=True)
    return quartiles([a / b for a, b in pairs])


def exponent(sizes: Sequence[float], seconds: Sequence[float]) -> Exponent:
    """Fit seconds proportional to a power of size, by least squares on logarithms."""
    fit = linregress(np.log(sizes), np.log(seconds))
    return Exponent(float(fit.slope), float(fit.stderr))
