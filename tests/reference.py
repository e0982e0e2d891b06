"""50-digit arithmetic, that of `refattn.conformance.truth.exact`, and errors measured by it."""

import numpy as np

from refattn.conformance.truth.exact import (
    attend,
    context,
    covariance_of_rows,
    log_kernel_estimate,
    mean_of_rows,
    random_feature_attention,
    randomized_attention,
    root,
    softmax_mean,
)
from refattn.conformance.truth.exact import numbers as exact

__all__ = [
    "CONTRACT",
    "attend",
    "covariance_of_rows",
    "error",
    "exact",
    "log_kernel_estimate",
    "mean_of_rows",
    "mp",
    "norm",
    "random_feature_attention",
    "randomized_attention",
    "root",
    "softmax_mean",
]

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
