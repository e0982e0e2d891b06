"""A problem of few tokens, and errors in units of rounding."""

import numpy as np


def problem(seed, n, m, d=3, d_v=2, size=1.0):
    rng = np.random.default_rng(seed)
    q, k = (size * rng.standard_normal((rows, d)) for rows in (n, m))
    return q, k + 0.5, rng.standard_normal((m, d_v)), rng


def units(got, want, q, k, v, dtype=np.float64):
    """Error in units of eps (1 + largest exponent) of the largest value."""
    exponent = (np.linalg.norm(q, axis=-1).max() + np.linalg.norm(k, axis=-1).max()) ** 2
    unit = float(np.finfo(dtype).eps) * (1 + exponent) * np.abs(v).max()
    return float(np.max(np.abs(np.asarray(got - want, float)), initial=0.0)) / unit
