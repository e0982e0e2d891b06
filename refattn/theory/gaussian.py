"""The best Gaussian proposal and the best gauge for known covariances of queries and keys."""

from __future__ import annotations

import numpy as np

from ..arrays.library import Doubles


def best_variance(excess: Doubles) -> Doubles:
    r"""Minimise log(s / sqrt(2 s - 1)) + excess / (2 s - 1) over s."""
    b = 1 + 2 * excess
    return (1 + (b + np.sqrt(b * b + 8 * excess)) / 2) / 2


def best_covariance(cov: Doubles) -> Doubles:
    """Return the best covariance for q + k of second moment `cov` about the proposal's mean."""
    values, vectors = np.linalg.eigh(cov)
    return _matrix_power((best_variance(np.maximum(values, 0.0)), vectors), 1.0)


def best_gauge(q_cov: Doubles, k_cov: Doubles, floor: float) -> Doubles:
    """Return the symmetric root of the geometric mean of the inverse of `q_cov` and of `k_cov`."""
    q_trace, k_trace = (np.trace(x, axis1=-2, axis2=-1) for x in (q_cov, k_cov))
    constant_rows = (q_trace <= 0) | (k_trace <= 0)
    of_q, of_k = (_eigh(x, floor) for x in (q_cov, k_cov))
    # Singular values of B are the roots of the eigenvalues of B^T B, and more accurate.
    values, vectors = _right_singular(_matrix_power(of_k, 0.5) @ _matrix_power(of_q, 0.5))
    root = np.sqrt(values)[..., :, None] * np.swapaxes(vectors, -1, -2)
    a = _matrix_power(_right_singular(root @ _matrix_power(of_q, -0.5)), 1.0)
    return np.where(constant_rows[..., None, None], np.eye(a.shape[-1]), a)


def _eigh(cov: Doubles, floor: float) -> tuple[Doubles, Doubles]:
    """Return eigenpairs, with eigenvalues raised to `floor` times their mean (1 if that is 0)."""
    values, vectors = np.linalg.eigh((cov + np.swapaxes(cov, -1, -2)) / 2)
    mean = np.mean(values, axis=-1, keepdims=True)
    mean = np.where(mean > 0, mean, 1.0)
    return np.maximum(values, floor * mean), vectors


def _right_singular(b: Doubles) -> tuple[Doubles, Doubles]:
    """Return the eigenpairs of (B^T B)^{1/2}."""
    _, values, rows = np.linalg.svd(b)
    return values, np.swapaxes(rows, -1, -2)


def _matrix_power(eigen: tuple[Doubles, Doubles], exponent: float) -> Doubles:
    """Raise a symmetric matrix to some power."""
    values, vectors = eigen
    return (vectors * values[..., None, :] ** exponent) @ np.swapaxes(vectors, -1, -2)
