r"""Random-feature estimates of the softmax kernel, as their formula."""

from __future__ import annotations

from typing import get_args

from ..arrays import checks, frequencies
from ..arrays.library import Array
from ..typing import Features
from .terms import of_library, xp


@of_library
def kernel_estimate(
    x: Array,
    y: Array,
    omega: Array,
    *,
    features: Features = "positive",
    log_weight: Array | None = None,
) -> Array:
    r"""Estimate the softmax kernel e^(x . y) from random features.

    .. math:: \hat\kappa(x, y) = \frac1S \sum_s w_s \, \phi_s(x) \cdot \phi_s(y)

    where phi_s(x) . phi_s(y) is

    * ``"positive"``: exp(omega_s . (x + y) - |x|^2/2 - |y|^2/2);
    * ``"hyperbolic"``: cosh(omega_s . (x + y)) exp(-|x|^2/2 - |y|^2/2);
    * ``"trigonometric"``: cos(omega_s . (x - y)) exp(|x|^2/2 + |y|^2/2).

    Random features post, Proposition 1; Performers post, z_sin/cos; Ye 2023, eqs. (7) to (9).

    Parameters
    ----------
    x, y : array, shape (..., d), float32 or float64
        Vectors in kernel coordinates. Leading axes of all arguments broadcast.
    omega : array, shape (..., S, d)
        Frequencies: a NumPy array or one of the library of `x`.
    features : {"positive", "hyperbolic", "trigonometric"}
        The feature map.
    log_weight : array, shape (..., S), optional
        log w, 0 by default.

    Returns
    -------
    array, shape (...)
        Same namespace, dtype and device as `x`.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import naive
    >>> one = np.ones((1, 1))
    >>> naive.kernel_estimate(one, one, one)
    array([2.71828183])
    """
    checks.arrays(1, x=x, y=y)
    checks.choice("features", features, get_args(Features))
    omega, log_weight = frequencies.shared(omega, log_weight, x)
    half = xp.sum(x * x + y * y, axis=-1, keepdims=True) / 2
    sign = -1 if features == "trigonometric" else 1
    z = xp.sum(omega * (x + sign * y)[..., None, :], axis=-1)
    if features == "trigonometric":
        terms = xp.exp(log_weight + half) * xp.cos(z)
    elif features == "hyperbolic":
        terms = (xp.exp(log_weight + z - half) + xp.exp(log_weight - z - half)) / 2
    else:
        terms = xp.exp(log_weight + z - half)
    return xp.mean(terms, axis=-1)
