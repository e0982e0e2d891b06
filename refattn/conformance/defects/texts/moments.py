"""Mean and covariance of rows."""

from __future__ import annotations

from ....arrays.library import Array


def moments(x: Array) -> tuple[Array, Array]:
    """Mean and covariance of the rows, with N - 1."""
    count, mean = x.shape[-2], x.mean(-2)
    about = x - mean[..., None, :]
    cov = about.mT @ about / (count - 1)
    return mean, cov
