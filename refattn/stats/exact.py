r"""P-values from exact laws: where the null holds and the law is continuous, they are uniform.

Two-sided p-values are min(1, 2 min(lower tail, upper tail)). Samples are arrays of finite numbers,
never empty; anything else, nan included, raises ValueError rather than pass. What a test detects
is told by `refattn.stats.min_discrepancy`.

    Anderson, An Introduction to Multivariate Statistical Analysis, 3rd ed., 2003: Theorem 5.2.2
    (Hotelling), Theorem 7.2.1 (Bartlett).
    Simard and L'Ecuyer, Computing the two-sided Kolmogorov-Smirnov distribution, Journal of
    Statistical Software 39(11), 2011: the law that SciPy computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
from scipy import special

from ..arrays import checks, matrices
from . import check
from .multiple import suite_p

__all__ = [
    "GaussianEstimates",
    "bartlett",
    "binomial",
    "chi2",
    "gaussian_estimates",
    "hotelling",
    "kolmogorov_distance",
    "ks",
    "lognormal_pair",
    "lognormal_sum_cdf",
    "normal_mean",
    "normal_scale",
    "normal_variance",
]

# Error of `lognormal_sum_cdf`, asserted by the tests.
_CDF_ERROR = 1e-12


class GaussianEstimates(NamedTuple):
    """P-values of estimated means and covariances of Gaussian rows; see `gaussian_estimates`.

    Attributes
    ----------
    each : float
        The smallest KS p-value of the columns of `bartlett`, times their number.
    pooled : float
        KS of all uniforms of `bartlett` together.
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


def ks(x: Any, cdf: Callable[[Any], Any], *, error: float = 0.0) -> float:
    r"""Test that a sample has a continuous law, by Kolmogorov and Smirnov.

    .. math:: p = P(D_n \ge D - \mathrm{error}), \qquad D = \sup_t |F_n(t) - F(t)|

    The null is what `error` enlarges, never the level: p is exact at 0 and conservative above.

    Parameters
    ----------
    x : array_like, shape (n,)
        Independent draws.
    cdf : callable
        The distribution function F, continuous: takes an array (n,) and returns one.
    error : float, default 0
        A bound, at least 0, on the error of `cdf` plus that of rounding `x`, in units of
        probability: a relative error eps of a lognormal exp(s z) is eps / (s sqrt(2 pi)).

    Returns
    -------
    float
        The p-value.

    Raises
    ------
    TypeError
        If `x` does not hold real numbers, `cdf` is not callable or `error` is not a number.
    ValueError
        If `x` is empty, not finite or of another shape, `cdf` returns what are not n
        probabilities, or `error` is negative.

    References
    ----------
    Simard and L'Ecuyer (2011), by ``scipy.stats.kstwo``.

    Examples
    --------
    >>> from scipy.special import ndtr
    >>> from refattn import stats
    >>> round(stats.ks([-1.0, 0.1, 1.2], ndtr), 3)
    0.993
    """
    from scipy import stats as scipy_stats

    x = np.sort(check.sample("x", x))
    distance = kolmogorov_distance(check.probabilities(cdf, x))
    distance = max(0.0, distance - check.non_negative("error", error))
    return float(np.clip(scipy_stats.kstwo.sf(distance, len(x)), 0, 1))


def normal_mean(z: Any) -> float:
    r"""Test that a standard normal sample has mean 0.

    .. math:: n^{-1/2} \sum_i z_i \sim N(0, 1), \qquad \text{two-sided}

    Parameters
    ----------
    z : array_like, shape (n,)
        Independent draws.

    Returns
    -------
    float
        The p-value.

    Raises
    ------
    TypeError
        If `z` does not hold real numbers.
    ValueError
        If `z` is empty, not finite or of another shape.

    References
    ----------
    The sum of independent normals is normal.

    Examples
    --------
    >>> from refattn import stats
    >>> round(stats.normal_mean([1.96, 1.96, 1.96, 1.96]), 6)
    8.9e-05
    """
    z = check.sample("z", z)
    return float(2 * special.ndtr(-abs(_mean(z)) * math.sqrt(len(z))))


def normal_scale(z: Any) -> float:
    r"""Test that a standard normal sample has scale 1 about 0.

    .. math:: \sum_i z_i^2 \sim \chi^2_n, \qquad \text{two-sided}

    Parameters
    ----------
    z : array_like, shape (n,)
        Independent draws.

    Returns
    -------
    float
        The p-value.

    Raises
    ------
    TypeError
        If `z` does not hold real numbers.
    ValueError
        If `z` is empty, not finite or of another shape.

    References
    ----------
    The definition of chi-square.

    Examples
    --------
    >>> from refattn import stats
    >>> round(stats.normal_scale([1.0, -1.0]), 3)  # chi2_2 at 2: upper tail exp(-1)
    0.736
    """
    z = check.sample("z", z)
    return _chi2_two_sided(_square_sum(z), len(z))


def normal_variance(z: Any) -> float:
    r"""Test that a normal sample of unknown mean has variance 1.

    .. math:: \sum_i (z_i - \bar z)^2 \sim \chi^2_{n-1}, \qquad \text{two-sided}

    Parameters
    ----------
    z : array_like, shape (n,), n >= 2
        Independent draws.

    Returns
    -------
    float
        The p-value.

    Raises
    ------
    TypeError
        If `z` does not hold real numbers.
    ValueError
        If `z` is shorter than 2, not finite or of another shape.

    References
    ----------
    Fisher (1925): the sum of squares about the mean of normals.

    Examples
    --------
    >>> from refattn import stats
    >>> round(stats.normal_variance([5.0, 6.0, 7.0]), 3)
    0.736
    """
    z = check.sample("z", z, 2)
    with np.errstate(over="ignore"):
        return _chi2_two_sided(_square_sum(z - _mean(z)), len(z) - 1)


def chi2(x: Any, df: float) -> float:
    r"""Test the sum of a chi-square sample.

    .. math:: \sum_i x_i \sim \chi^2_{n\,\mathrm{df}}, \qquad \text{two-sided}

    Parameters
    ----------
    x : array_like, shape (n,)
        Independent draws, at least 0: a draw of chi-square is never negative.
    df : float
        Degrees of freedom of each, positive.

    Returns
    -------
    float
        The p-value.

    Raises
    ------
    TypeError
        If `x` does not hold real numbers or `df` is not a number.
    ValueError
        If `x` is empty, negative somewhere, not finite or of another shape, or `df` is not
        positive.

    References
    ----------
    Chi-squares add: Fisher (1925).

    Examples
    --------
    >>> from refattn import stats
    >>> round(stats.chi2([1.0, 2.0, 3.0], 2), 3)
    0.846
    """
    x = check.sample("x", x)
    df = checks.real("df", df, positive=True)
    check.within("x", x, 0, math.inf)
    with np.errstate(over="ignore"):
        return _chi2_two_sided(float(np.sum(x)), len(x) * df)


def binomial(successes: int, n: int, p: float) -> float:
    r"""Test a probability by the number of successes.

    .. math:: \min(1, 2 \min(P(K \le k), P(K \ge k))), \qquad K \sim \mathrm{Bin}(n, p)

    Parameters
    ----------
    successes : int
        Number of successes k, 0 to n.
    n : int
        Number of independent trials, at least 1.
    p : float
        Probability of success under the null, strictly between 0 and 1.

    Returns
    -------
    float
        The p-value; conservative, as the law is discrete.

    Raises
    ------
    TypeError
        If `successes` or `n` is not an integer or `p` is not a number.
    ValueError
        If one is out of range.

    References
    ----------
    Clopper and Pearson, Biometrika 26, 1934: the interval of the p that this does not reject.

    Examples
    --------
    >>> from refattn import stats
    >>> stats.binomial(0, 4, 0.5)
    0.125
    """
    from scipy import stats as scipy_stats

    p = check.fraction("p", p)
    checks.positive_integer("n", n)
    checks.non_negative_integer("successes", successes)
    check.within("successes", successes, 0, n)
    law = scipy_stats.binom(n, p)
    return float(min(1, 2 * min(law.cdf(successes), law.sf(successes - 1))))


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

    Raises
    ------
    TypeError
        If the arguments do not hold real numbers.
    ValueError
        If they are not finite or of other shapes, or n <= d.

    References
    ----------
    Hotelling (1931); Anderson (2003), Theorem 5.2.2.

    Examples
    --------
    >>> from refattn import stats
    >>> round(stats.hotelling([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], [0.5, 0.5]), 3)
    1.0
    >>> stats.hotelling([[0.1], [0.1], [0.1]], [0.5])
    0.0
    """
    x = check.rows("x", x, 2, "(n, d) with n > d")
    n, d = x.shape
    mean = check.rows("mean", mean, 1, f"({d},)")
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


def bartlett(
    means: Any, covs: Any, *, count: int, mean: Any, cov: Any, ddof: int = 1
) -> np.ndarray[Any, np.dtype[np.float64]]:
    r"""Turn estimated means and covariances of Gaussian rows into independent uniforms.

    With cov = L L^T and T lower triangular, T T^T = (N - ddof) L^-1 covs L^-T,

    .. math::
        \sqrt N L^{-1} (\hat\mu - \mu) \sim N(0, I), \qquad
        T_{ii}^2 \sim \chi^2_{N-i} \; (i = 1, \dots, d), \qquad
        T_{ij} \sim N(0, 1) \; (j < i),

    all independent, and each goes through its own distribution function.

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

    Raises
    ------
    TypeError
        If arrays do not hold real numbers, or `count` or `ddof` is not an integer.
    ValueError
        If arrays are not finite, of other shapes or not symmetric, `cov` is not positive
        definite, `count` is at most d, or `ddof` is neither 0 nor 1.

    References
    ----------
    Bartlett (1933); Anderson (2003), Theorems 3.3.2 and 7.2.1.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import stats
    >>> u = stats.bartlett([[0.0]], [[[1.0]]], count=2, mean=[0.0], cov=[[1.0]])
    >>> np.round(u, 3)  # N(0, 1) at 0, chi2_1 at 1
    array([[0.5  , 0.683]])
    """
    z, scatter = _whiten(means, covs, count, mean, cov, ddof)
    d = z.shape[-1]
    index = np.tril_indices(d)
    t = _cholesky(scatter)
    u = special.ndtr(t)
    diagonal = np.arange(d)
    u[:, diagonal, diagonal] = special.chdtr(count - 1.0 - diagonal, t[:, diagonal, diagonal] ** 2)
    out = np.concatenate([special.ndtr(z), u[:, *index]], axis=1)
    return np.where(np.isnan(t[:, :1, 0]), 0.0, out)


def gaussian_estimates(
    means: Any, covs: Any, *, count: int, mean: Any, cov: Any, ddof: int = 1
) -> GaussianEstimates:
    r"""Test estimated means and covariances of Gaussian rows, by five exact laws.

    With z_r = sqrt(N) L^-1 (means_r - mean) and A_r = (N - ddof) L^-1 covs_r L^-T,

    .. math::
        \frac 1R \Big| \sum_r z_r \Big|^2 \sim \chi^2_d, \qquad
        \sum_r |z_r|^2 \sim \chi^2_{Rd}, \qquad
        \sum_r \operatorname{tr} A_r \sim \chi^2_{Rd(N-1)},

    the first with its upper tail and the others two-sided, and KS of the uniforms of `bartlett`.
    Small N and large R tell most. The five are dependent: combine them by `holm`.

    Parameters
    ----------
    means, covs, count, mean, cov, ddof
        As in `bartlett`.

    Returns
    -------
    GaussianEstimates
        Five p-values; all 0 if an estimated covariance is not positive definite. What dispersion
        and trace detect is told by `min_discrepancy` of `chi2`, with n = R and df = d, d(N - 1).

    Raises
    ------
    TypeError, ValueError
        As in `bartlett`.

    References
    ----------
    Bartlett (1933); Anderson (2003), Theorems 3.3.2 and 7.2.1.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import stats
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
        each=suite_p([ks(column, _uniform) for column in u.T]),
        pooled=ks(u.ravel(), _uniform),
        location=float(special.chdtrc(d, _square_sum(z.sum(0)) / r)),
        dispersion=_chi2_two_sided(_square_sum(z), r * d),
        trace=_chi2_two_sided(float(total), r * d * (count - 1)),
    )


def lognormal_sum_cdf(t: Any, s: float) -> Any:
    r"""Compute the distribution function of the mean of two lognormals of mean 1.

    For X, Y independent, each exp(s z - s^2 / 2) with z standard normal, and
    a(t) = (log t + s^2 / 2) / s,

    .. math::
        P\Big(\frac{X + Y}{2} \le t\Big)
        = 2 \int_{-\infty}^{a(t)} \varphi(z) \, \Phi(a(2t - e^{sz - s^2/2})) \, dz
        - \Phi(a(t))^2 :

    one of them is at most t; both are, twice counted. This form has no singularity. By
    Gauss-Legendre with 100 nodes, from 9 standard deviations below.

    Parameters
    ----------
    t : array_like, shape (...)
        Where, any real numbers.
    s : float
        Standard deviation of the logarithms, from 0.01 to 10.

    Returns
    -------
    ndarray, shape (...)
        The probabilities, in [0, 1], with an absolute error below 1e-12.

    Raises
    ------
    TypeError
        If `t` does not hold real numbers or `s` is not a number.
    ValueError
        If `t` is not finite or `s` is out of range.

    References
    ----------
    The convolution of two laws, folded by symmetry.

    Examples
    --------
    >>> from refattn import stats
    >>> round(float(stats.lognormal_sum_cdf(1.0, 1.0)), 9)
    0.655094379
    """
    t = checks.host("t", t, "(...)", 0)
    s = checks.real("s", s)
    check.within("s", s, 0.01, 10)
    out = np.zeros(t.shape)
    at = t[t > 0]
    step = 1 << 14  # rows of nodes in memory at a time
    parts = [_lognormal_sum_cdf(at[i : i + step], s) for i in range(0, len(at), step)]
    out[t > 0] = np.concatenate([np.zeros(0), *parts])
    return np.clip(out, 0, 1)


def lognormal_pair(x: Any, s: float, *, error: float = 0.0) -> float:
    r"""Test that a sample has the law of the mean of two lognormals of mean 1.

    .. math:: p = P(D_n \ge D - \mathrm{error} - 10^{-12}), \qquad
              D = \sup_t |F_n(t) - F(t)|

    with F from `lognormal_sum_cdf`.

    Parameters
    ----------
    x : array_like, shape (n,)
        Independent draws.
    s : float
        Standard deviation of the logarithms, from 0.01 to 10.
    error : float, default 0
        Bound on the rounding of `x` in units of probability, as in `ks`.

    Returns
    -------
    float
        The p-value.

    Raises
    ------
    TypeError, ValueError
        As in `ks` and `lognormal_sum_cdf`.

    References
    ----------
    As in `ks`.

    Examples
    --------
    >>> from refattn import stats
    >>> round(stats.lognormal_pair([0.4, 0.8, 1.5], 1.0), 3)
    0.997
    """
    error = check.non_negative("error", error) + _CDF_ERROR
    return ks(x, partial(lognormal_sum_cdf, s=s), error=error)


def kolmogorov_distance(u: Any) -> float:
    """Return sup |F_n - F| for the values u of F at the sorted sample."""
    i = np.arange(len(u) + 1) / len(u)
    return float(max(np.max(i[1:] - u), np.max(u - i[:-1])))


def _mean(x: Any) -> float:
    """Return the mean, infinite only where it overflows itself."""
    unit = max(1.0, float(np.max(np.abs(x))))
    return float(np.mean(x / unit)) * unit


def _square_sum(x: Any) -> float:
    """Return the sum of squares, inf where it overflows: every p-value takes it."""
    with np.errstate(over="ignore"):
        return float(np.sum(x * x))


def _chi2_two_sided(x: float, df: float) -> float:
    return float(min(1, 2 * min(special.chdtr(df, x), special.chdtrc(df, x))))


def _uniform(u: Any) -> Any:
    return u


def _whiten(means: Any, covs: Any, count: int, mean: Any, cov: Any, ddof: int) -> tuple[Any, Any]:
    """Return sqrt(N) L^-1 (means - mean), (R, d), and (N - ddof) L^-1 covs L^-T, (R, d, d)."""
    means = check.rows("means", means, 2, "(R, d)")
    r, d = means.shape
    covs = check.rows("covs", covs, 3, f"({r}, {d}, {d})")
    mean = check.rows("mean", mean, 1, f"({d},)")
    cov = check.rows("cov", cov, 2, f"({d}, {d})")
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


def _cholesky(x: Any) -> Any:
    """Return Cholesky factors (R, d, d), nan where there is none."""
    out = np.full(x.shape, np.nan)
    for i, matrix in enumerate(x):
        try:
            out[i] = np.linalg.cholesky(matrix)
        except np.linalg.LinAlgError:
            continue
    return out


@cache
def _legendre() -> tuple[Any, Any]:
    return np.polynomial.legendre.leggauss(100)


def _lognormal_sum_cdf(t: Any, s: float) -> Any:
    """Return the integral of `lognormal_sum_cdf` for positive t (k,)."""
    nodes, weights = _legendre()
    log_t = np.log(t)
    a = (log_t + s * s / 2) / s
    # Beyond 9 standard deviations there is 1e-19 of the mass.
    high = np.clip(a, -9, 9)
    half = (high[:, None] + 9) / 2
    z = -9 + half * (1 + nodes)
    # log(2t - x) = log t + log(2 - x / t), so that no t overflows; x <= t but for rounding.
    y = a[:, None] + np.log(2 - np.exp(np.minimum(s * (z - a[:, None]), 0))) / s
    density = np.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    return 2 * np.sum(weights * half * density * special.ndtr(y), axis=1) - special.ndtr(a) ** 2
