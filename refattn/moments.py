r"""Mean and covariance of queries or keys, computed in one pass and mergeable.

`estimate` reads an array (or a file mapped into memory) and `estimate_chunks` a stream, block by
block; `merge` joins results of different machines, and `draw` makes synthetic rows. `shrink` and
`summary` estimate how reliable a covariance of few rows is, and `mean_only` and `mean_plus_trace`
approximate squared norms.

    Chan, Golub and LeVeque, Algorithms for computing the sample variance, The American
    Statistician 37(3), 1983: shifting, merging, and pairwise merging.
    Chen, Wiesel, Eldar and Hero, Shrinkage algorithms for MMSE covariance estimation, IEEE
    Transactions on Signal Processing 58(10), 2010, arXiv:0907.4698.
    Roy and Vetterli, The effective rank, EUSIPCO 2007.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from scipy.special import entr

from .arrays import checks, rows
from .arrays.arithmetic import square_norm
from .arrays.library import Array, array_namespace, as_written, constant, device, to_host
from .arrays.shown import held
from .engine.attend import nonzero
from .engine.scatter import Scatter, fold_rows, join_scatters

__all__ = [
    "Moments",
    "Summary",
    "draw",
    "estimate",
    "estimate_chunks",
    "mean_only",
    "mean_plus_trace",
    "merge",
    "shrink",
    "shrinkage_intensity",
    "summary",
]
__dir__ = __all__.copy


@held()
class Moments(NamedTuple):
    """Mean and covariance of some rows, and the count and divisor that merging needs.

    Attributes
    ----------
    count : int
        Number of rows, N; the same for every head, and a Python int also under tracing.
    mean : array, shape (..., d)
        Mean of the rows; nan for no rows.
    cov : array, shape (..., d, d)
        Covariance with divisor N - ddof; nan where N <= ddof. Symmetric bit for bit, but for
        JAX under jit, which may fuse operations.
    ddof : int, default 1
        1 for the unbiased covariance, 0 for that of the rows as a population.
    """

    count: int  # type: ignore[assignment]  # it hides tuple.count
    mean: Array
    cov: Array
    ddof: int = 1


@held()
class Summary(NamedTuple):
    """How far a covariance can be trusted, on the host and in float64.

    Attributes
    ----------
    count : int
        Number of rows, N.
    advised_count : int
        d^2: Ye 2023 (see `refattn.naive`) advises N > d^2.
    enough : bool
        Whether N > d^2.
    eigenvalues : ndarray, shape (..., d)
        Eigenvalues of the covariance, largest first.
    condition : ndarray, shape (...)
        Largest eigenvalue over the smallest; inf for a singular covariance, nan for 0.
    effective_rank : ndarray, shape (...)
        exp of the entropy of eigenvalues / trace, from 1 to d; nan for a covariance of 0.
    mean_norm : ndarray, shape (...)
        Length of the mean.
    trace : ndarray, shape (...)
        Trace of the covariance.
    """

    count: int  # type: ignore[assignment]  # it hides tuple.count
    advised_count: int
    enough: bool
    eigenvalues: Any
    condition: Any
    effective_rank: Any
    mean_norm: Any
    trace: Any


@as_written
def estimate(x: Array, *, axis: int | tuple[int, ...] = -2, ddof: int = 1) -> Moments:
    r"""Estimate the mean and the covariance of rows.

    .. math::
        \hat\mu = \frac{1}{N} \sum_{i=1}^N x_i, \qquad
        \hat\Sigma = \frac{1}{N - \mathrm{ddof}} \sum_{i=1}^N
                     (x_i - \hat\mu)(x_i - \hat\mu)^\top

    Ye 2023 (see `refattn.naive`), eqs. (1) and (2).

    Parameters
    ----------
    x : array, shape (..., N, d), float32 or float64
        Queries or keys. On NumPy, longdouble too, and an `np.memmap` larger than memory.
    axis : int or tuple of int, default -2
        Where the rows are: any axes but the last, which holds the features. With (0, -2), an
        array (texts, heads, tokens, d) gives the moments of each head over texts and tokens.
    ddof : int, default 1
        1 for the unbiased estimate of Ye 2023, 0 for the maximum-likelihood one.

    Returns
    -------
    Moments
        `mean`, shape (..., d), and `cov`, shape (..., d, d), over the axes not in `axis`, with
        the namespace, dtype and device of `x`. No rows: both nan. One row and ddof 1: `cov` nan.

    Raises
    ------
    TypeError
        If `x` is not an array or has a dtype other than those above, or if `axis` or `ddof` are
        not integers.
    ValueError
        If `axis` is not an axis of rows, rows have length 0, or `ddof` is neither 0 nor 1.

    Notes
    -----
    Rows are read once, in blocks, as differences from the first row, which are exact where rows
    share their leading digits. Sums within a block are pairwise, and blocks are joined in a binary
    tree. The memory used besides the argument is a few blocks and one covariance for each doubling
    of their number; `x` is never copied as a whole.

    Against exact arithmetic on the same floats, with s_i the exact standard deviation of feature i
    and z_i = |x_0i - mean_i| / s_i the distance of the first row from the mean, the error of cov_ij
    is at most C eps (1 + max(z_i, z_j)) s_i s_j and that of mean_i at most C eps (|mean_i| + (1 +
    z_i) s_i). The tests assert C = 16, and far less was measured. The bounds do not depend on N,
    and that of the covariance does not depend on the mean. Rows that are all equal have a
    covariance of exactly 0. Covariances within a factor 1e4 of the smallest normal number may lose
    digits. They may overflow where the square of a difference from the first row does.

    NaN or infinity in a feature makes its mean nan or infinite and its row and column of the
    covariance nan, in its own head only.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import moments
    >>> m = moments.estimate(np.array([[1e8, 3.0], [1e8 + 2.0, 5.0]]))
    >>> m.count, m.mean
    (2, array([1.00000001e+08, 4.00000000e+00]))
    >>> m.cov
    array([[2., 2.],
           [2., 2.]])
    """
    return _fold([("x", x)], axis, ddof)


@as_written
def estimate_chunks(
    chunks: Iterable[Array], *, axis: int | tuple[int, ...] = -2, ddof: int = 1
) -> Moments:
    r"""Estimate the mean and the covariance of rows that come in several arrays.

    The formula of `estimate` over the rows of all arrays. They are read one at a time, and each is
    released when the next arrives: so data may be larger than memory, and an iterator may reuse one
    buffer for all arrays.

    Parameters
    ----------
    chunks : iterable of arrays, each of shape (..., n_i, d), float32 or float64
        All of one library, dtype and device, and of one shape but for the lengths along `axis`,
        which may differ and be 0.
    axis, ddof
        As in `estimate`.

    Returns
    -------
    Moments
        As from `estimate` of the concatenation along `axis`.

    Raises
    ------
    TypeError, ValueError
        As in `estimate`; also if `chunks` is not iterable, yields nothing, or yields arrays that
        do not match the first.

    Notes
    -----
    The accuracy is that of `estimate`: differences are computed from the first row of all.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import moments
    >>> chunks = (np.full((1, 1), 2.0 * i) for i in range(2))
    >>> moments.estimate_chunks(chunks)
    Moments(count=2, mean=array([1.]), cov=array([[2.]]), ddof=1)
    """
    rows.iterable("chunks", chunks)
    return _fold(((f"chunks[{i}]", x) for i, x in enumerate(chunks)), axis, ddof)


@as_written
def merge(a: Moments, b: Moments) -> Moments:
    r"""Combine the moments of two disjoint sets of rows.

    .. math::
        N = N_a + N_b, \qquad \delta = \mu_b - \mu_a, \qquad
        \mu = \mu_a + \frac{N_b}{N} \delta, \qquad
        M = M_a + M_b + \frac{N_a N_b}{N} \delta \delta^\top

    with M = (N - ddof) cov the scatter: Chan, Golub and LeVeque. Associative and commutative,
    with any Moments of count 0 as identity.

    Parameters
    ----------
    a, b : Moments
        With the same shape, namespace, dtype, device and ddof. The covariance of a single row, nan
        with ddof 1, counts as 0: the row has no scatter.

    Returns
    -------
    Moments
        As if estimated from both sets at once.

    Raises
    ------
    TypeError
        If `a` or `b` is not a Moments of arrays of one library and one dtype.
    ValueError
        If shapes, devices or `ddof` differ.

    Notes
    -----
    The means are known to their own rounding only, which adds an error of eps |mean_i| / s_i to
    that of `estimate`. Where rows share many leading digits, prefer `estimate_chunks`.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import moments
    >>> x = np.array([[1.0], [3.0]])
    >>> moments.merge(moments.estimate(x[:1]), moments.estimate(x[1:]))
    Moments(count=2, mean=array([2.]), cov=array([[2.]]), ddof=1)
    """
    xp = check_moments(a=a, b=b)
    return _from_scatter(join_scatters(_to_scatter(a, xp), _to_scatter(b, xp)), a.ddof)


@as_written
def shrink(m: Moments) -> Moments:
    r"""Shrink the covariance towards a multiple of the identity.

    .. math:: \tilde\Sigma = (1 - \rho) \hat\Sigma + \rho \, \frac{\mathrm{tr}\,\hat\Sigma}{d} I

    Chen, Wiesel, Eldar and Hero, eq. (4), with the intensity of `shrinkage_intensity`.

    Parameters
    ----------
    m : Moments
        Of at least 2 rows; with fewer the covariance is unchanged.

    Returns
    -------
    Moments
        With the shrunk covariance and all else unchanged; the trace is kept. Positive definite
        also for N <= d, unless all rows are equal: then it is 0. Merge first and shrink last: the
        covariance of the rows cannot be recovered from the result.

    Raises
    ------
    TypeError, ValueError
        If `m` is not a Moments, or its fields do not match.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import moments
    >>> moments.shrink(moments.estimate(np.array([[1.0, 1.0], [3.0, 3.0]]))).cov
    array([[2., 0.],
           [0., 2.]])
    """
    xp, d = check_moments(m=m), m.cov.shape[-1]
    rho = _intensity(m, xp)[..., None, None]
    sphere = (_trace(m.cov, xp) / d)[..., None, None] * _eye(m.cov, xp)
    return m._replace(cov=xp.where(rho == 1, sphere, m.cov + rho * (sphere - m.cov)))


@as_written
def shrinkage_intensity(m: Moments) -> Array:
    r"""Compute the intensity of Oracle Approximating Shrinkage.

    .. math::
        \rho = \min\Bigl(1, \frac{(1 - 2/d)\, \mathrm{tr}(\Sigma^2) + \mathrm{tr}^2(\Sigma)}
               {(n + 1 - 2/d) (\mathrm{tr}(\Sigma^2) - \mathrm{tr}^2(\Sigma) / d)}\Bigr),
        \qquad n = N - 1

    Chen, Wiesel, Eldar and Hero, eq. (23). They assume that the mean is known. Here it is estimated
    from the N rows, which leaves N - 1 degrees of freedom. The intensity does not depend on the
    scale of the covariance, hence not on ddof.

    Parameters
    ----------
    m : Moments
        Of at least 2 rows; with fewer the intensity is 0.

    Returns
    -------
    array, shape (...)
        From 0 to 1; 1 where the covariance is 0 or another multiple of the identity, and nan where
        it is nan.

    Raises
    ------
    TypeError, ValueError
        If `m` is not a Moments, or its fields do not match.

    Notes
    -----
    This intensity needs only the covariance and the count, so it works on merged moments, and when
    the rows are no longer stored. The intensity of Ledoit and Wolf (2004) needs fourth moments of
    the rows. This one is derived for Gaussian rows, and lowers the mean squared error of the
    covariance. If one direction dominates, that mean falls little, and the error rises for about
    half of the sets of rows or more.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import moments
    >>> moments.shrinkage_intensity(moments.Moments(11, np.zeros(2), np.diag([1.0, 3.0])))
    array(0.8)
    """
    return _intensity(m, check_moments(m=m))


@as_written
def summary(m: Moments) -> Summary:
    r"""Summarise the moments: number of rows, eigenvalues, condition, effective rank.

    .. math:: \mathrm{erank} = \exp\Bigl(-\sum_i p_i \log p_i\Bigr),
              \qquad p_i = \lambda_i / \textstyle\sum_j \lambda_j

    Roy and Vetterli, The effective rank, EUSIPCO 2007, definition 1. Ye 2023 (see `refattn.naive`),
    section I, advises N > d^2 rows.

    Parameters
    ----------
    m : Moments
        Of any library; Dask arrays are computed.

    Returns
    -------
    Summary
        NumPy arrays in float64, whatever the library and dtype of `m`; nan for heads whose
        covariance is not finite.

    Raises
    ------
    TypeError, ValueError
        If `m` is not a Moments, or its fields do not match.

    Notes
    -----
    A covariance has no negative eigenvalues: negative ones from rounding are returned as 0. The
    error of each eigenvalue is about eps times the largest one. So a condition above 1 / eps only
    tells that the true condition is large, not how large.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import moments
    >>> s = moments.summary(moments.Moments(11, np.array([3.0, 4.0]), np.diag([1.0, 4.0])))
    >>> s.advised_count, s.enough, s.eigenvalues
    (4, True, array([4., 1.]))
    >>> float(s.condition), round(float(s.effective_rank), 4), float(s.mean_norm), float(s.trace)
    (4.0, 1.6494, 5.0, 5.0)
    """
    check_moments(m=m)
    mean, cov = to_host(m.mean), to_host(m.cov)
    d = mean.shape[-1]
    finite = np.all(np.isfinite(cov), axis=(-2, -1), keepdims=True)
    values = np.maximum(np.linalg.eigvalsh(np.where(finite, cov, 0.0))[..., ::-1], 0.0)
    values = np.where(finite[..., 0], values, math.nan)
    with np.errstate(divide="ignore", invalid="ignore"):  # singular: inf, and 0: nan
        condition = values[..., 0] / values[..., -1]
        shares = values / np.sum(values, axis=-1, keepdims=True)
    return Summary(
        count=m.count,
        advised_count=d * d,
        enough=m.count > d * d,
        eigenvalues=values,
        condition=condition,
        effective_rank=np.exp(np.sum(entr(shares), axis=-1)),
        mean_norm=np.hypot.reduce(mean, axis=-1),  # squares may overflow
        trace=np.trace(cov, axis1=-2, axis2=-1),
    )


@as_written
def draw(m: Moments, count: int, *, rng: Any = None) -> Array:
    r"""Draw synthetic queries or keys: normal rows with given moments.

    .. math:: x_i \sim N(\hat\mu, \hat\Sigma)

    Parameters
    ----------
    m : Moments
        Of queries or keys; the covariance may be singular.
    count : int
        Number of rows for each head, at least 1.
    rng
        As in `sampling.draw`: the same seed gives the same rows in every library, to rounding.

    Returns
    -------
    array, shape (..., count, d)
        Namespace, dtype and device of `m.mean`; nan for heads whose covariance is not finite.

    Raises
    ------
    TypeError, ValueError
        If `m` is not a Moments, its fields do not match, or `count` is not a positive integer.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import moments
    >>> m = moments.Moments(9, np.array([1.0, 2.0]), np.array([[4.0, 0.0], [0.0, 0.0]]))
    >>> x = moments.draw(m, 10_000, rng=0)
    >>> x.shape, x.mean(0).round(1), x.std(0).round(1)
    ((10000, 2), array([1., 2.]), array([2., 0.]))
    """
    check_moments(m=m)
    mean, cov = to_host(m.mean), to_host(m.cov)
    checks.length("count", count, mean.size)
    finite = np.all(np.isfinite(cov), axis=(-2, -1), keepdims=True)
    values, vectors = np.linalg.eigh(np.where(finite, cov, 0.0))
    root = np.where(finite, np.sqrt(np.maximum(values, 0.0))[..., None, :] * vectors, math.nan)
    z = checks.generator(rng).standard_normal((*mean.shape[:-1], count, mean.shape[-1]))
    return constant(mean[..., None, :] + z @ np.swapaxes(root, -1, -2), m.mean)


@as_written
def mean_only(m: Moments) -> Array:
    r"""Approximate the squared norm of a row by that of the mean.

    .. math:: q' = |\hat\mu|^2

    Ye 2023 (see `refattn.naive`), eqs. (14) and (15), and the text between (13) and (14). Its eq.
    (13) differs: see `mean_plus_trace`.

    Parameters
    ----------
    m : Moments
        Of queries or keys.

    Returns
    -------
    array, shape (...)
        With the namespace, dtype and device of `m.mean`.

    Raises
    ------
    TypeError, ValueError
        If `m` is not a Moments, or its fields do not match.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import moments
    >>> m = moments.Moments(11, np.array([3.0, 4.0]), np.eye(2))
    >>> float(moments.mean_only(m)), float(moments.mean_plus_trace(m))
    (25.0, 27.0)
    """
    check_moments(m=m)
    return square_norm(m.mean)


@as_written
def mean_plus_trace(m: Moments) -> Array:
    r"""Approximate the squared norm of a row by its expectation.

    .. math:: E|x|^2 = |\hat\mu|^2 + \mathrm{tr}\,\hat\Sigma

    Ye 2023 (see `refattn.naive`), eq. (13). With ddof 0 this is the average squared norm of the
    rows. Its eqs. (14) and (15) leave the trace out: see `mean_only`.

    Parameters
    ----------
    m : Moments
        Of queries or keys.

    Returns
    -------
    array, shape (...)
        With the namespace, dtype and device of `m.mean`; nan where the covariance is.

    Raises
    ------
    TypeError, ValueError
        If `m` is not a Moments, or its fields do not match.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import moments
    >>> x = np.array([[1.0, 0.0], [3.0, 2.0]])
    >>> moments.mean_plus_trace(moments.estimate(x, ddof=0)), np.mean(np.sum(x * x, axis=-1))
    (np.float64(7.0), np.float64(7.0))
    """
    xp = check_moments(m=m)
    return square_norm(m.mean) + _trace(m.cov, xp)


def _fold(named: Iterable[tuple[str, Array]], axis: Any, ddof: int) -> Moments:
    """Fold the rows of arrays, which come with the names that messages call them."""
    rows.ddof("ddof", ddof)
    return _from_scatter(fold_rows(named, axis), ddof)


@as_written
def _from_scatter(s: Scatter, ddof: int) -> Moments:
    """Divide by N - ddof instead of N; nan where that is not positive."""
    mean = s.mean if s.size > 0 else s.mean + math.nan
    unbiased = constant(s.size, s.cov) / (s.size - ddof) if s.size > ddof else math.nan
    return Moments(s.size, mean, s.cov * unbiased, ddof)


def _to_scatter(m: Moments, xp: Any) -> Scatter:
    """Undo `_from_scatter`: a single row has no scatter, whatever its covariance."""
    if m.count <= m.ddof:
        return Scatter(m.count, m.mean, xp.zeros_like(m.cov))
    return Scatter(m.count, m.mean, m.cov * (constant(m.count - m.ddof, m.cov) / m.count))


def _intensity(m: Moments, xp: Any) -> Array:
    """Compute `shrinkage_intensity` of checked moments."""
    d = m.cov.shape[-1]
    if m.count < 2:
        return xp.zeros_like(m.mean[..., 0])
    # Divided by its trace, the covariance has squares that neither overflow nor vanish.
    p = m.cov / nonzero(_trace(m.cov, xp), xp)[..., None, None]
    trace, two = _trace(p, xp), constant(2, p)
    squares = xp.sum(p * p, axis=(-2, -1))
    # tr(p^2) - tr(p)^2 / d, without the cancellation
    off = p - (trace / d)[..., None, None] * _eye(p, xp)
    spread = xp.sum(off * off, axis=(-2, -1))
    below = (m.count - two / d) * spread
    rho = ((1 - two / d) * squares + trace**2) / nonzero(below, xp)
    return xp.where((below == 0) | (rho > 1), 1.0, rho)


def _trace(cov: Array, xp: Any) -> Array:
    """Sum the diagonals of matrices (..., d, d)."""
    return xp.sum(cov * _eye(cov, xp), axis=(-2, -1))


def _eye(cov: Array, xp: Any) -> Array:
    """Return the identity matrix of the size of `cov`."""
    return xp.eye(cov.shape[-1], dtype=cov.dtype, device=device(cov))


def check_moments(**named: Any) -> Any:
    """Check results of `estimate`; of several, that they may be merged. Return the namespace."""
    for name, m in named.items():
        if not isinstance(m, Moments):
            raise TypeError(f"`{name}` must be a Moments, got {checks.describe(m)}.")
        checks.non_negative_integer(f"{name}.count", m.count)
        rows.ddof(f"{name}.ddof", m.ddof)
        checks.arrays(1, **{f"{name}.mean": m.mean, f"{name}.cov": m.cov})
        shape = tuple(m.mean.shape)
        if shape[-1] == 0 or tuple(m.cov.shape) != (*shape, shape[-1]):
            raise ValueError(
                f"`{name}.mean` and `{name}.cov` must have shapes (..., d) and (..., d, d) with "
                f"d >= 1, got {shape} and {tuple(m.cov.shape)}."
            )
    (first, head), *rest = named.items()
    for name, m in rest:
        checks.arrays(1, **{f"{first}.mean": head.mean, f"{name}.mean": m.mean})
        if m.ddof != head.ddof:
            raise ValueError(f"`{name}.ddof` must equal `{first}.ddof`, {head.ddof}, got {m.ddof}.")
        if tuple(m.mean.shape) != tuple(head.mean.shape):
            raise ValueError(
                f"`{name}.mean` must have the shape of `{first}.mean`, {tuple(head.mean.shape)}, "
                f"got {tuple(m.mean.shape)}."
            )
    return array_namespace(head.cov)
