"""50-digit arithmetic, that of `conformance.truth.digits`, and errors measured by it."""

import numpy as np

from refattn.judge.conformance.truth.digits import attend, context, formulas
from refattn.judge.conformance.truth.digits import numbers as exact

__all__ = ["CONTRACT", "attend", "error", "exact", "formulas", "mp", "norm", "root"]

CONTRACT = 16  # the constant C of the accuracy contract

mp = context(50)


def error(got, want, size, exponent):
    """Largest |got - want| / size in units of eps (1 + exponent); infinite for nan."""
    eps = mp.mpf(float(np.finfo(got.dtype).eps))
    if not np.all(np.isfinite(got)):
        return np.inf
    worst = max(
        (abs(a - b) for a, b in zip(exact(got).ravel(), want.ravel(), strict=True)), default=0
    )
    return float(worst / (size * eps * (1 + exponent)))


def norm(x):
    """Largest length of a row."""
    return float(np.max(np.sqrt(np.sum(np.asarray(x, np.longdouble) ** 2, -1))))


def root(scale, d):
    """The root of a scale, 1 / sqrt(d) by default."""
    return d**-0.25 if scale is None else scale**0.5
