r"""Mean and covariance of rows, as their formulas."""

from __future__ import annotations

from ..arrays import checks
from ..typing import ArrayT
from .terms import of_library, products, xp


@of_library
def mean_and_covariance(x: ArrayT, *, ddof: int = 1) -> tuple[ArrayT, ArrayT]:
    r"""Estimate the mean and the covariance of rows.

    .. math::
        \hat\mu = \frac{1}{N} \sum_i x_i, \qquad
        \hat\Sigma = \frac{1}{N - \mathrm{ddof}} \sum_i (x_i - \hat\mu)(x_i - \hat\mu)^\top

    Ye 2023, eqs. (1) and (2).

    Parameters
    ----------
    x : array, shape (..., N, d), float32 or float64
        Rows.
    ddof : int, default 1
        1 for the unbiased estimate, 0 for that of maximum likelihood.

    Returns
    -------
    array, shape (..., d), and array, shape (..., d, d)
        Same namespace, dtype and device as `x`.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import naive
    >>> naive.mean_and_covariance(np.array([[1.0], [2.0]]))
    (array([1.5]), array([[0.5]]))
    """
    checks.arrays(2, x=x)
    count, mean = x.shape[-2], xp.mean(x, axis=-2)
    about = xp.matrix_transpose(x - mean[..., None, :])
    cov = products(about, about) / (count - ddof)
    return mean, cov
