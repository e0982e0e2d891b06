r"""Exact kernels and their random-feature estimates, for pairs of vectors.

A kernel takes vectors along the last axis; leading axes broadcast, so that the Gram matrix of
two sets is ``kernel(x[..., :, None, :], y[..., None, :, :])``. An argument that is not an
array, or has another library or dtype, raises TypeError; shapes that do not match raise ValueError.
"""

from __future__ import annotations

from typing import Any, get_args

from .arrays import checks, frequencies
from .arrays.arithmetic import finite, multiply, square_norm
from .arrays.library import Array, as_written, constant
from .engine.attend import attend
from .engine.scores import Scores
from .typing import Features

__all__ = ["estimate", "gaussian_kernel", "polynomial_kernel", "softmax_kernel"]
__dir__ = __all__.copy


FEATURES: tuple[Features, ...] = get_args(Features)


@as_written
def softmax_kernel(x: Array, y: Array) -> Array:
    r"""Evaluate the softmax kernel.

    .. math:: \kappa(x, y) = \exp(x \cdot y)

    Random features post, kappa_SM; Ye 2023, eq. (4) (see `refattn.naive`).

    Parameters
    ----------
    x, y : array, shape (..., d), float32 or float64
        Vectors in kernel coordinates (no factor 1 / sqrt(d) is applied); leading axes broadcast.

    Returns
    -------
    array, shape (...)
        Namespace, dtype and device of `x`; inf where the value exceeds the dtype.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import kernels
    >>> kernels.softmax_kernel(np.array([1.0, 2.0]), np.array([[3.0, -1.0], [2.0, -1.0]]))
    array([2.71828183, 1.        ])
    """
    xp = _check_vectors(x, y)
    return xp.exp(xp.sum(x * y, axis=-1))


@as_written
def gaussian_kernel(x: Array, y: Array) -> Array:
    r"""Evaluate the Gaussian kernel of unit width.

    .. math:: \exp(-|x - y|^2 / 2) = e^{-|x|^2/2} \, \kappa(x, y) \, e^{-|y|^2/2}

    Performers post (see `refattn.naive`), K_gauss with gamma = 1/2 (its appendix); for another
    gamma multiply `x` and `y` by sqrt(2 gamma).

    Parameters
    ----------
    x, y : array, shape (..., d), float32 or float64
        Vectors; leading axes broadcast.

    Returns
    -------
    array, shape (...)
        Namespace, dtype and device of `x`.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import kernels
    >>> kernels.gaussian_kernel(np.zeros(2), np.array([[0.0, 0.0], [1.0, 1.0]]))
    array([1.        , 0.36787944])
    """
    xp = _check_vectors(x, y)
    return xp.exp(-xp.sum((x - y) * (x - y), axis=-1) / 2)


@as_written
def polynomial_kernel(x: Array, y: Array, *, degree: int) -> Array:
    r"""Evaluate the homogeneous polynomial kernel.

    .. math:: (x \cdot y)^p

    Performers post (see `refattn.naive`), The Kernel Trick; its features are
    `features.polynomial_features`.

    Parameters
    ----------
    x, y : array, shape (..., d), float32 or float64
        Vectors; leading axes broadcast.
    degree : int
        Degree p, from 0 to 1 / eps; above that, no digit of a power is known.

    Returns
    -------
    array, shape (...)
        Namespace, dtype and device of `x`.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import kernels
    >>> kernels.polynomial_kernel(np.array([[1.0, 2.0]]), np.array([[3.0, 1.0]]), degree=2)
    array([25.])
    """
    xp = _check_vectors(x, y)
    checks.non_negative_integer("degree", degree)
    checks.at_most("degree", degree, int(1 / float(xp.finfo(x.dtype).eps)), "1 / eps")
    return xp.sum(x * y, axis=-1) ** degree


@as_written
def estimate(
    x: Array,
    y: Array,
    omega: Array,
    *,
    features: Features = "positive",
    log_weight: Array | None = None,
) -> Array:
    r"""Estimate the softmax kernel from random features at given frequencies.

    .. math::
        \hat\kappa(x, y) = \frac1S \sum_s w_s \, \xi(x, \omega_s) \, \xi(y, \omega_s), \qquad
        \xi(x, \omega) = \exp(\omega \cdot x - |x|^2 / 2)

    Unbiased for frequencies drawn from N(0, I) with w = 1, or from any q with w = N(omega; 0, I) /
    q(omega). Evaluated as a logarithm. Sources (see `refattn.naive`): Random features post,
    Proposition 1; Ye 2023, eqs. (7) and (9); Zheng 2022, positive random features.

    Parameters
    ----------
    x, y : array, shape (..., d), float32 or float64
        Vectors in kernel coordinates; leading axes broadcast.
    omega : array, shape (..., S, d)
        Frequencies, one a row: a NumPy array, or an array of the library of `x`; cast to its
        dtype and device. Leading axes broadcast with those of `x` and `y`.
    features : {"positive", "hyperbolic", "trigonometric"}
        The feature map: ``"positive"`` as above; ``"hyperbolic"``, the mean over omega and
        -omega; ``"trigonometric"``, exp(|x|^2/2 + |y|^2/2) cos(omega . (x - y)) for each
        frequency (Performers post, z_sin/cos; Ye 2023, eq. (8)).
    log_weight : array, shape (..., S), optional
        log w, 0 by default; as `omega`.

    Returns
    -------
    array, shape (...)
        Namespace, dtype and device of `x`.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import kernels, sampling
    >>> omega, _ = sampling.draw(100_000, 2, rng=0)
    >>> x, y = np.array([0.3, 0.4]), np.array([0.5, -0.1])
    >>> [round(float(value), 2) for value in
    ...     (kernels.estimate(x, y, omega), kernels.softmax_kernel(x, y))]
    [1.12, 1.12]
    """
    xp = _check_vectors(x, y)
    checks.choice("features", features, FEATURES)
    omega, log_weight = frequencies.shared(omega, log_weight, x)
    checks.compatible("x", x, "omega", omega[..., 0, :])
    checks.compatible("y", y, "omega", omega[..., 0, :])
    if features == "trigonometric":
        return _average_waves(x, y, omega, log_weight, xp)
    if features == "hyperbolic":
        omega, log_weight = both_signs(omega, log_weight, xp)
    # The estimate is the normaliser of the query x attending to the frequencies.
    bias = _project_vectors(y, omega, xp) - square_norm(y)[..., None] / 2 + log_weight
    unit = xp.ones_like(omega[..., :1])
    lse = attend(x[..., None, :], omega, unit, Scores(bias=bias[..., None, :])).lse[..., 0]
    return xp.exp(lse - square_norm(x) / 2 - xp.log(constant(omega.shape[-2], x)))


def _average_waves(x: Array, y: Array, omega: Array, log_weight: Array, xp: Any) -> Array:
    """Average e^(|x|^2/2 + |y|^2/2) cos(omega . (x - y)) over frequencies."""
    product = _project_vectors(x - y, omega, xp)
    peak = finite(xp.max(log_weight, axis=-1, keepdims=True), xp)
    mean = xp.mean(xp.exp(log_weight - peak) * xp.cos(product), axis=-1)
    size = xp.where(mean == 0, 1.0, xp.abs(mean))
    log_size = xp.log(size) + peak[..., 0] + (square_norm(x) + square_norm(y)) / 2
    return mean / size * xp.exp(log_size)  # of which the first is the sign


def both_signs(omega: Array, log_weight: Array, xp: Any) -> tuple[Array, Array]:
    """Add the frequencies -omega: hyperbolic features are the positive ones of both."""
    return xp.concat([omega, -omega], axis=-2), xp.concat([log_weight, log_weight], axis=-1)


@as_written
def _project_vectors(x: Array, omega: Array, xp: Any) -> Array:
    """Multiply to omega_s . x, shape (..., S)."""
    return multiply(x[..., None, :], xp.matrix_transpose(omega))[..., 0, :]


def _check_vectors(x: Array, y: Array) -> Any:
    """Check the arguments of a kernel; return their namespace."""
    xp = checks.arrays(1, x=x, y=y)
    checks.compatible("x", x, "y", y)
    return xp
