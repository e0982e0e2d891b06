r"""Test the mean and the covariance of Gaussian rows, by exact distributions.

Anderson, An Introduction to Multivariate Statistical Analysis, 3rd ed., 2003: Theorem 5.2.2
(Hotelling), Theorem 7.2.1 (Bartlett).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from scipy import special

from ...arrays import checks, matrices
from ...arrays.words import with_known_keywords
from . import check
from .exact import chi2_two_sided, ks, square_sum
from .multiple import suite_p

__all__ = ["GaussianEstimates", "bartlett", "gaussian_estimates", "hotelling"]


class GaussianEstimates(NamedTuple):
    """P-values of estimated means and covariances of Gaussian rows; see `gaussian_estimates`.

    Attributes
    ----------
    each : float
        The smallest p-value of `ks` over the columns of `bartlett`, times their number.
    pooled : float
        The p-value of `ks` for all uniforms of `bartlett` together.
    location : float
        The average of the estimated means, against the mean.
    dispersion : float
        The spread of the estimated means about the mean, too large or too small.
    trace : float
        The traces of the estimated covariances, too large or too small.
    """

    each: float
    pooled: float
    location: float
    dispersion: float
    trace: float


def hotelling(x: Any, mean: Any) -> float:
    r"""Test the mean of Gaussian rows of unknown covariance.

    .. math:: T^2 = n (\bar x - \mu)^\top S^{-1} (\bar x - \mu), \qquad
              \frac{n - d}{d (n - 1)} T^2 \sim F_{d, n-d}, \qquad p = P(F \ge \cdot)

    Parameters
    ----------
    x : array_like, shape (n, d), n > d
        Independent rows.
    mean : array_like, shape (d,)
        Their mean under the null.

    Returns
    -------
    float
        The p-value; 0 for rows whose covariance is singular to working precision, which has
        probability 0.

    References
    ----------
    Hotelling (1931); Anderson (2003), Theorem 5.2.2.

    Examples
    --------
    >>> from refattn.judge import stats
    >>> round(stats.hotelling([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], [0.5, 0.5]), 3)
    1.0
    >>> stats.hotelling([[0.1], [0.1], [0.1]], [0.5])
    0.0
    """
    x = check.read_rows("x", x, 2, "(n, d) with n > d")
    n, d = x.shape
    mean = check.read_rows("mean", mean, 1, f"({d},)")
    if n <= d or mean.shape != (d,):
        raise ValueError(f"`x` must have shape (n, d), n > d, for `mean` (d,), got {x.shape}.")
    # Units of each feature and an origin among the rows: nothing overflows, equal rows give 0.
    unit = np.max(np.abs(np.vstack([x, mean])), axis=0)
    x, mean = x / np.where(unit > 0, unit, 1), mean / np.where(unit > 0, unit, 1)
    spread = x - x[0]
    shift = x[0] - mean + spread.mean(0)
    spread -= spread.mean(0)
    length = np.linalg.norm(spread, axis=0)
    if np.any(length == 0):
        return 0.0
    root: Any = np.linalg.qr(spread / length, mode="r")
    if np.linalg.matrix_rank(root) < d:
        return 0.0
    y = np.linalg.solve(root.T, shift / length)
    return float(special.fdtrc(d, n - d, n * (n - d) / d * float(y @ y)))


@with_known_keywords
def bartlett(
    means: Any, covs: Any, *, count: int, mean: Any, cov: Any, ddof: int = 1
) -> np.ndarray[Any, np.dtype[np.float64]]:
    r"""Turn estimated means and covariances of Gaussian rows into independent uniforms.

    With cov = L L^T and T lower triangular, T T^T = (N - ddof) L^-1 covs L^-T,

    .. math::
        \sqrt N L^{-1} (\hat\mu - \mu) \sim N(0, I), \qquad
        T_{ii}^2 \sim \chi^2_{N-i} \; (i = 1, \dots, d), \qquad
        T_{ij} \sim N(0, 1) \; (j < i),

    all independent. The distribution function of each maps it to a uniform.

    Parameters
    ----------
    means : array_like, shape (R, d)
        Means estimated from R independent sets of rows.
    covs : array_like, shape (R, d, d)
        Their covariances, symmetric.
    count : int
        Number N of rows of a set, greater than d.
    mean : array_like, shape (d,)
        Mean of the rows under the null.
    cov : array_like, shape (d, d)
        Covariance of the rows under the null, symmetric positive definite.
    ddof : int, default 1
        The divisor of `covs` is N - ddof; 0 or 1.

    Returns
    -------
    ndarray, shape (R, d + d(d+1)/2)
        Uniforms: of the mean, then of T row by row. All 0 where the estimated covariance is not
        positive definite, which has probability 0.

    References
    ----------
    Bartlett (1933); Anderson (2003), Theorems 3.3.2 and 7.2.1.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn.judge import stats
    >>> u = stats.bartlett([[0.0]], [[[1.0]]], count=2, mean=[0.0], cov=[[1.0]])
    >>> np.round(u, 3)  # N(0, 1) at 0, chi2_1 at 1
    array([[0.5  , 0.683]])
    """
    z, scatter = _whiten(means, covs, count, mean, cov, ddof)
    d = z.shape[-1]
    index = np.tril_indices(d)
    t = _factor_each(scatter)
    u = special.ndtr(t)
    diagonal = np.arange(d)
    u[:, diagonal, diagonal] = special.chdtr(count - 1.0 - diagonal, t[:, diagonal, diagonal] ** 2)
    out = np.concatenate([special.ndtr(z), u[:, *index]], axis=1)
    return np.where(np.isnan(t[:, :1, 0]), 0.0, out)


@with_known_keywords
def gaussian_estimates(
    means: Any, covs: Any, *, count: int, mean: Any, cov: Any, ddof: int = 1
) -> GaussianEstimates:
    r"""Test estimated means and covariances of Gaussian rows, by five exact distributions.

    With z_r = sqrt(N) L^-1 (means_r - mean) and A_r = (N - ddof) L^-1 covs_r L^-T,

    .. math::
        \frac 1R \Big| \sum_r z_r \Big|^2 \sim \chi^2_d, \qquad
        \sum_r |z_r|^2 \sim \chi^2_{Rd}, \qquad
        \sum_r \operatorname{tr} A_r \sim \chi^2_{Rd(N-1)},

    the first one-sided (upper tail) and the others two-sided, and `ks` of the uniforms of
    `bartlett`. Power is largest for small N and large R. The five p-values are dependent: combine
    them by `holm`.

    Parameters
    ----------
    means, covs, count, mean, cov, ddof
        As in `bartlett`.

    Returns
    -------
    GaussianEstimates
        Five p-values; all 0 if an estimated covariance is not positive definite. For the power of
        dispersion and trace, see `min_discrepancy` of `chi2`, with n = R and df = d, d(N - 1).

    References
    ----------
    Bartlett (1933); Anderson (2003), Theorems 3.3.2 and 7.2.1.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn.judge import stats
    >>> x = np.random.default_rng(0).standard_normal((2000, 5, 1))
    >>> covs = np.var(x, axis=1)[..., None]  # divisor 5, not 4
    >>> p = stats.gaussian_estimates(x.mean(1), covs, count=5, mean=[0.0], cov=[[1.0]])
    >>> p.trace < 1e-6 < p.location
    True
    """
    u = bartlett(means, covs, count=count, mean=mean, cov=cov, ddof=ddof)
    z, scatter = _whiten(means, covs, count, mean, cov, ddof)
    r, d = z.shape
    if not np.all(np.any(u > 0, axis=1)):
        return GaussianEstimates(0.0, 0.0, 0.0, 0.0, 0.0)
    total = np.sum(np.trace(scatter, axis1=-2, axis2=-1))
    return GaussianEstimates(
        each=suite_p([ks(column, lambda x: x) for column in u.T]),
        pooled=ks(u.ravel(), lambda x: x),
        location=float(special.chdtrc(d, square_sum(z.sum(0)) / r)),
        dispersion=chi2_two_sided(square_sum(z), r * d),
        trace=chi2_two_sided(float(total), r * d * (count - 1)),
    )


def _whiten(means: Any, covs: Any, count: int, mean: Any, cov: Any, ddof: int) -> tuple[Any, Any]:
    """Return sqrt(N) L^-1 (means - mean), (R, d), and (N - ddof) L^-1 covs L^-T, (R, d, d)."""
    means = check.read_rows("means", means, 2, "(R, d)")
    r, d = means.shape
    covs = check.read_rows("covs", covs, 3, f"({r}, {d}, {d})")
    mean = check.read_rows("mean", mean, 1, f"({d},)")
    cov = check.read_rows("cov", cov, 2, f"({d}, {d})")
    for name, x, shape in (("covs", covs, (r, d, d)), ("mean", mean, (d,)), ("cov", cov, (d, d))):
        if x.shape != shape:
            raise ValueError(f"`{name}` must have shape {shape}, got {x.shape}.")
    matrices.symmetric("covs", covs, d)
    matrices.definite("cov", cov, d)
    checks.positive_integer("count", count)
    if count <= d:
        raise ValueError(f"`count` must be greater than d = {d}, got {count}.")
    checks.non_negative_integer("ddof", ddof)
    check.within("ddof", ddof, 0, 1)
    inverse = np.linalg.inv(np.linalg.cholesky(cov))
    with np.errstate(over="ignore", invalid="ignore"):
        scatter = (count - ddof) * (inverse @ covs @ inverse.T)
        return math.sqrt(count) * ((means - mean) @ inverse.T), scatter


def _factor_each(x: Any) -> Any:
    """Return Cholesky factors (R, d, d), nan where there is none."""
    out = np.full(x.shape, np.nan)
    for i, matrix in enumerate(x):
        try:
            out[i] = np.linalg.cholesky(matrix)
        except np.linalg.LinAlgError:
            continue
    return out
