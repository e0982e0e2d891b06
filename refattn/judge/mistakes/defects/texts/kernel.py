"""The estimate of the kernel, of which attention is made."""

from __future__ import annotations

import numpy as np

from .....arrays.library import Array
from .....naive.terms import of_library
from .draws import generator, law


@of_library
def kernel(
    x: Array,
    y: Array = None,
    *,
    omega: Array | None = None,
    num_features: int = 0,
    seed: int | None = None,
    features: str = "positive",
) -> Array:
    """Estimate e^(x . y): the mean over frequencies of products of features."""
    if omega is None:
        omega = law(num_features, x.shape[-1], generator(seed))
    a, b = log_feature(x, omega, features), np.conj(log_feature(y, omega, features))
    return np.real(np.mean(np.exp(a + b), axis=-1)).astype(x.dtype)


def log_feature(x: Array, omega: Array, features: str) -> Array:
    """omega . x - |x|^2 / 2, or of waves i omega . x + |x|^2 / 2; omega in the dtype of x."""
    z, half = np.matvec(omega.astype(x.dtype), x), np.sum(x * x, axis=-1)[..., None] / 2
    return z - half if features == "positive" else 1j * z + half
