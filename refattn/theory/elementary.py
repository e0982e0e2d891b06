"""Elementary functions that do not cancel or overflow, and quotients in which 0 / 0 is defined."""

from __future__ import annotations

import math

import numpy as np

from ..arrays.library import Doubles


def inner_product(x: Doubles, y: Doubles) -> Doubles:
    """Sum of products over the last axis."""
    return np.asarray(np.sum(x * y, axis=-1))


def quiet_log(x: Doubles) -> Doubles:
    """log x, -inf at 0 without a warning."""
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(x))


def log_expm1(x: Doubles) -> Doubles:
    """log(e^x - 1) for x >= 0, to rounding."""
    return x + quiet_log(-np.expm1(-x))


def log_cosh(x: Doubles) -> Doubles:
    """log cosh x, to rounding near 0 too."""
    x = np.abs(x)
    return np.where(
        x < 1,
        np.log1p(2 * np.sinh(np.minimum(x, 1.0) / 2) ** 2),
        x + np.log1p(np.exp(-2 * x)) - math.log(2),
    )


def log_mean_exp(a: Doubles, b: Doubles) -> Doubles:
    """log of the mean of e^a and e^b, to rounding where a = -b is near 0."""
    return (a + b) / 2 + log_cosh((a - b) / 2)


def quotient(a: Doubles, b: Doubles) -> Doubles:
    """a / b, or 0 where a is 0."""
    return np.asarray(a / np.where(a == 0, 1.0, b))


def quotient_of_exp(a: Doubles, b: Doubles) -> Doubles:
    """e^(a - b), or 0 where both are infinite."""
    finite = np.isfinite(a)
    return np.where(finite, np.exp(np.where(finite, a, 0.0) - np.where(finite, b, 0.0)), 0.0)
