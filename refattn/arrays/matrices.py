"""Checks of matrices and vectors on the host."""

from __future__ import annotations

from typing import Any

import numpy as np


def square_shape(name: str, x: Any, d: int | None = None) -> None:
    """Check the shape of square matrices (..., d, d)."""
    d = x.shape[-1] if d is None else d
    if x.shape[-2:] != (d, d):
        raise ValueError(f"`{name}` must have shape (..., {d}, {d}), got {x.shape}.")


def squares(name: str, x: Any) -> None:
    """Check that the squared norms of host vectors (..., d) are representable."""
    with np.errstate(over="ignore"):
        largest = np.max(np.sum(x * x, axis=-1), initial=0.0)
    if not np.isfinite(largest):
        raise ValueError(
            f"`{name}` must have squared norms that float64 can hold, in kernel coordinates, got "
            f"an entry of size {np.max(np.abs(x)):.3g}."
        )


def symmetric(name: str, x: Any, d: int, tolerance: float = 1e-8) -> None:
    """Check symmetric matrices (..., d, d) on the host."""
    square_shape(name, x, d)
    apart = np.abs(x - np.swapaxes(x, -1, -2))
    largest = np.max(np.abs(x), axis=(-2, -1), keepdims=True)
    if np.any(apart > tolerance * largest):
        raise ValueError(
            f"`{name}` must be symmetric, got entries (i, j) and (j, i) that differ by "
            f"{np.max(apart):.3g}."
        )


def semidefinite(name: str, cov: Any, d: int) -> None:
    """Check covariances (..., d, d) of rows on the host, up to rounding in float32."""
    symmetric(name, cov, d, tolerance=1e-4)
    values = np.linalg.eigvalsh(cov)
    if np.any(values[..., 0] < -1e-4 * np.max(np.abs(values), axis=-1, initial=0.0)):
        raise ValueError(
            f"`{name}` must be positive semidefinite, got an eigenvalue {np.min(values):.3g}."
        )


def definite(name: str, cov: Any, d: int) -> None:
    """Check symmetric positive definite matrices (..., d, d) on the host."""
    symmetric(name, cov, d)
    smallest = np.linalg.eigvalsh(cov)[..., 0]
    if np.any(smallest <= 0):
        head = np.unravel_index(np.argmin(smallest), smallest.shape)
        where = f"head {tuple(int(i) for i in head)} has " if head else ""
        raise ValueError(
            f"`{name}` must be positive definite, got a matrix that is not: {where}smallest "
            f"eigenvalue {np.min(smallest):.3g}."
        )


def invertible(name: str, x: Any, d: int) -> None:
    """Check square matrices (..., d, d) that have an inverse, on the host."""
    square_shape(name, x, d)
    try:
        np.linalg.inv(x)  # a singular value of 0 may be rounded, on some machines
    except np.linalg.LinAlgError:
        raise ValueError(f"`{name}` must be invertible, got a singular matrix.") from None
