"""Checks of arguments that the tests share; what they let through is finite and not empty."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ...arrays import checks

__all__: list[str] = []


def read_sample(name: str, x: Any, least: int = 1) -> Any:
    """Return float64 numbers (n,), n >= `least`, all finite."""
    return read_rows(name, x, 1, f"(n,) with n >= {least}", least)


def read_rows(name: str, x: Any, ndim: int, rule: str, least: int = 1) -> Any:
    """Return a float64 array of exactly `ndim` axes, the first at least `least` long."""
    values = checks.host(name, x, rule, ndim)
    if values.ndim != ndim or len(values) < least:
        raise ValueError(f"`{name}` must have shape {rule}, got {values.shape}.")
    return values


def within(name: str, x: Any, low: float, high: float) -> None:
    """Check that numbers lie in [low, high]."""
    for value in (np.min(x), np.max(x)):
        if not low <= value <= high:
            raise ValueError(f"`{name}` must lie in [{low}, {high}], got {float(value)!r}.")


def support(low: Any, high: Any) -> tuple[float, float]:
    """Return the ends of an interval of positive length."""
    low, high = checks.real("low", low), checks.real("high", high)
    if not low < high:
        raise ValueError(f"`high` must be greater than `low`, got {high} and {low}.")
    return low, high


def bounded(x: Any, mean: Any, low: Any, high: Any, least: int = 1) -> tuple[Any, float, float]:
    """Return a sample as numbers in [0, 1], its mean under the null, and the length high - low."""
    x = read_sample("x", x, least)
    low, high = support(low, high)
    mean = checks.real("mean", mean)
    within("x", x, low, high)
    within("mean", mean, low, high)
    # Rounding of the division must not leave the interval.
    return np.clip((x - low) / (high - low), 0, 1), (mean - low) / (high - low), high - low


def fraction(name: str, value: Any) -> float:
    """Return a real number strictly between 0 and 1."""
    number: float = checks.real(name, value)
    if not 0 < number < 1:
        raise ValueError(f"`{name}` must lie strictly between 0 and 1, got {number}.")
    return number


def non_negative(name: str, value: Any) -> float:
    """Return a finite real number of at least 0."""
    number: float = checks.real(name, value)
    if number < 0:
        raise ValueError(f"`{name}` must be at least 0, got {number}.")
    return number


def p_values(p: Any) -> Any:
    """Return p-values (m,) in [0, 1]."""
    p = read_rows("p", p, 1, "(m,) with m >= 1")
    within("p", p, 0, 1)
    return p


def probabilities(cdf: Callable[[Any], Any], x: Any) -> Any:
    """Return cdf(x), a probability for each element of `x`."""
    if not callable(cdf):
        raise TypeError(f"`cdf` must be callable, got {type(cdf).__name__}.")
    u = np.asarray(cdf(x), np.float64)
    if u.shape != x.shape:
        raise ValueError(f"`cdf` must return an array of shape {x.shape}, got {u.shape}.")
    if not np.all((u >= 0) & (u <= 1)):
        raise ValueError("`cdf` must return probabilities, got nan or a number outside [0, 1].")
    return u
