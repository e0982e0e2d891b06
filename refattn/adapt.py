r"""Fit the distribution of frequencies to queries and keys, in closed form from their moments.

Ye 2023 (see `refattn.naive`) estimates the means and covariances of queries and keys; these four
moments determine

* a gauge A: softmax attention is the same for A q and A^{-T} k, but its estimates change;
* a Gaussian proposal N(mu, Sigma) for the frequencies: `oprf`, `sderf` and `optimal_gaussian`
  minimise the expected logarithm of the second moment of a kernel estimate, each over a larger
  family than the one before.

`fit` composes the two. All results are host arrays in kernel coordinates: sqrt(scale) times the
queries and keys.
"""

from __future__ import annotations

import math
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

from . import moments
from .arrays import checks, matrices, qkv
from .arrays.heads import group_heads, head_counts
from .arrays.library import (
    Array,
    Doubles,
    array_namespace,
    as_written,
    constant,
    host_dtype,
    to_host,
)
from .arrays.words import with_known_keywords
from .moments import Moments
from .sampling import Gaussian
from .theory.gaussian import best_covariance, best_gauge, best_variance
from .theory.proposal import SquaredWeights

__all__ = [
    "Centred",
    "centre",
    "expected_log_excess",
    "fit",
    "gauge",
    "oprf",
    "optimal_gaussian",
    "saderf",
    "sderf",
]
__dir__ = __all__.copy


class Centred(NamedTuple):
    """Queries and keys minus constants a and b, with a bias that keeps exact attention the same.

    Attributes
    ----------
    q, k : array, shape (..., n, d) and (..., m, d)
        Queries and keys minus a and b.
    bias : array, shape (..., 1, m)
        scale times a . k_j, for `attend`, of every query head.
    """

    q: Array
    k: Array
    bias: Array


@with_known_keywords
def fit(
    q: Array | Moments, k: Array | Moments, *, scale: float | None = None, floor: float = 1e-3
) -> Gaussian:
    r"""Fit a gauge to queries and keys, and the optimal Gaussian proposal in this gauge.

    .. math::
        A = (\Sigma_q^{-1} \# \Sigma_k)^{1/2}, \qquad
        \omega \sim N(A \mu_q + A^{-T} \mu_k,\; \Sigma^*)

    the composition of `gauge` and `optimal_gaussian`. The result is a proposal for
    `random_feature_attention`, `linear_randomized_attention` and `theory.attention_law`, on the
    data it was fitted to or on others. The mean contains the effect of centring (`centre`). Source:
    Ye 2023 (see `refattn.naive`), estimating the distribution of queries and keys.

    Parameters
    ----------
    q, k : array, shape (..., n, d) and (..., m, d), or moments.Moments
        Queries and keys, or their moments over any number of texts. One proposal for each head;
        where query heads share key heads, one for each query head.
    scale : float, optional
        Factor on q . k, 1 / sqrt(d) by default, positive.
    floor : float, default 1e-3
        As in `gauge`.

    Returns
    -------
    sampling.Gaussian
        Proposal with mean (..., d), cov (..., d, d) and gauge (..., d, d).

    Raises
    ------
    TypeError
        If `q` or `k` is neither an array of floats nor Moments.
    ValueError
        If shapes do not match, there are no rows, or a moment is not finite.

    Notes
    -----
    Moments of a single row whose covariance is nan count as having covariance 0. For data other
    than those fitted to, covariances of N < d^2 rows must be shrunk
    (``moments.shrink(moments.estimate(q))``) and a larger `floor` helps: on other tokens of the
    same text, a fit to 64 rows of length 32 without shrinkage made errors larger.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import adapt, random_feature_attention, softmax_attention
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 200, 4)) + 1.0
    >>> exact = softmax_attention(q, k, v)
    >>> for proposal in (None, adapt.fit(q, k)):
    ...     approx = random_feature_attention(q, k, v, num_features=256, proposal=proposal, rng=0)
    ...     print(round(float(np.linalg.norm(approx - exact) / np.linalg.norm(exact)), 2))
    0.2
    0.07
    """
    of_q, of_k = _kernel_moments(q, k, scale)
    a = gauge(of_q.cov, of_k.cov, floor=floor)
    inverse = np.swapaxes(np.linalg.inv(a), -1, -2)
    best = optimal_gaussian(_map_moments(of_q, a), _map_moments(of_k, inverse), scale=1.0)
    return Gaussian(best.mean, best.cov, gauge=a)


@with_known_keywords
def gauge(q_cov: Any, k_cov: Any, *, floor: float = 1e-3) -> Doubles:
    r"""Find the gauge in which queries and keys vary least.

    .. math::
        A^T A = \Sigma_q^{-1} \# \Sigma_k
              = \Sigma_q^{-1/2} (\Sigma_q^{1/2} \Sigma_k \Sigma_q^{1/2})^{1/2} \Sigma_q^{-1/2}

    the geometric mean of Sigma_q^{-1} and Sigma_k. The symmetric root A minimises
    tr(A Sigma_q A^T) + tr(A^{-T} Sigma_k A^{-1}) over all invertible A, and makes the covariances
    of A q and A^{-T} k equal.

    Parameters
    ----------
    q_cov, k_cov : array_like, shape (..., d, d)
        Covariances of queries and keys, symmetric positive semidefinite.
    floor : float, default 1e-3
        Covariances of data are often nearly singular, and directions in which queries hardly vary
        would be stretched without bound: eigenvalues of a covariance below `floor` times their mean
        are replaced by it. Where a covariance is 0, A = I.

    Returns
    -------
    numpy.ndarray, shape (..., d, d), float64
        Symmetric positive definite matrices A.

    Raises
    ------
    TypeError
        If an argument does not hold real numbers.
    ValueError
        If shapes do not match, or a value is not finite, or `floor` is not positive.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import adapt
    >>> adapt.gauge(np.diag([1.0, 4.0]), np.diag([1.0, 0.25])).round(6)
    array([[1. , 0. ],
           [0. , 0.5]])
    """
    q_cov, k_cov = (
        checks.host(name, x, "(..., d, d)", 2) for name, x in (("q_cov", q_cov), ("k_cov", k_cov))
    )
    matrices.semidefinite("q_cov", q_cov, q_cov.shape[-1])
    matrices.semidefinite("k_cov", k_cov, k_cov.shape[-1])
    checks.compatible("q_cov", q_cov, "k_cov", k_cov)
    floor = checks.real("floor", floor, positive=True)
    return best_gauge(q_cov, k_cov, floor)


@with_known_keywords
def oprf(q: Array | Moments, k: Array | Moments, *, scale: float | None = None) -> Gaussian:
    r"""Find the optimal isotropic Gaussian proposal with mean 0 (OPRF).

    .. math::
        \omega \sim N(0, \sigma^2 I), \quad \sigma^2 = \frac{1 + u}2, \quad
        u = \frac{(1 + 2\lambda) + \sqrt{(1 + 2\lambda)^2 + 8\lambda}}2, \quad
        \lambda = \frac{E|q + k|^2}d

    with independent q and k in kernel coordinates. Likhosherstov et al., arXiv:2205.15317.

    Parameters
    ----------
    q, k, scale
        As in `fit`.

    Returns
    -------
    sampling.Gaussian
        Proposal with mean 0 (..., d) and cov (..., d, d).

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import adapt
    >>> from refattn.moments import Moments
    >>> of_q = of_k = Moments(10, np.zeros(2), np.eye(2) / 2)
    >>> adapt.oprf(of_q, of_k, scale=1.0).cov.round(4)  # lambda = 1: (1 + (3 + sqrt(17)) / 2) / 2
    array([[2.2808, 0.    ],
           [0.    , 2.2808]])
    """
    mean, second = _second_moment(q, k, scale)
    d = mean.shape[-1]
    spread = best_variance(np.trace(second, axis1=-2, axis2=-1) / d)
    return Gaussian(np.zeros_like(mean), spread[..., None, None] * np.eye(d))


@with_known_keywords
def sderf(q: Array | Moments, k: Array | Moments, *, scale: float | None = None) -> Gaussian:
    r"""Find the optimal Gaussian proposal with mean 0 (SDERF).

    .. math::
        \omega \sim N(0, Q \, \mathrm{diag}(\sigma_i) \, Q^T), \qquad
        \sigma_i = \frac{1 + u_i}2, \quad
        u_i = \frac{(1 + 2\lambda_i) + \sqrt{(1 + 2\lambda_i)^2 + 8\lambda_i}}2

    with (lambda, Q) the eigenpairs of E[(q + k)(q + k)^T]. Likhosherstov et al., arXiv:2302.00787.

    Parameters
    ----------
    q, k, scale
        As in `fit`.

    Returns
    -------
    sampling.Gaussian
        Proposal with mean 0 (..., d) and cov (..., d, d).

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import adapt
    >>> from refattn.moments import Moments
    >>> of_q = of_k = Moments(10, np.zeros(2), np.diag([0.5, 0.0]))
    >>> adapt.sderf(of_q, of_k, scale=1.0).cov.round(4)
    array([[2.2808, 0.    ],
           [0.    , 1.    ]])
    """
    mean, second = _second_moment(q, k, scale)
    return Gaussian(np.zeros_like(mean), best_covariance(second))


@with_known_keywords
def saderf(q: Array | Moments, k: Array | Moments, *, scale: float | None = None) -> Gaussian:
    r"""Fit a diagonal gauge to queries and keys, and an isotropic proposal in this gauge (SADERF).

    .. math:: A = \mathrm{diag}(\Psi), \qquad \Psi_l = \left(E k_l^2 / E q_l^2\right)^{1/4}

    Among diagonal gauges, this one minimises E|A q + A^{-1} k|^2 if queries or keys have mean 0. In
    this gauge the proposal is that of `oprf`. Likhosherstov et al., arXiv:2302.00787. The
    gauge with N(0, I) gives complex exponentials of a real diagonal matrix, arXiv:2110.04367.

    Parameters
    ----------
    q, k, scale
        As in `fit`.

    Returns
    -------
    sampling.Gaussian
        Proposal with mean 0 (..., d), cov and gauge (..., d, d).

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import adapt
    >>> proposal = adapt.saderf(np.eye(2), 4 * np.eye(2), scale=1.0)
    >>> np.diag(proposal.gauge)
    array([2., 2.])
    """
    of_q, of_k = _kernel_moments(q, k, scale)
    square_q, square_k = (np.diagonal(x.cov, axis1=-2, axis2=-1) + x.mean**2 for x in (of_q, of_k))
    some = (square_q > 0) & (square_k > 0)
    psi = np.where(some, square_k / np.where(some, square_q, 1.0), 1.0) ** 0.25
    a, inverse = (x[..., None] * np.eye(psi.shape[-1]) for x in (psi, 1 / psi))
    best = oprf(_map_moments(of_q, a), _map_moments(of_k, inverse), scale=1.0)
    return Gaussian(best.mean, best.cov, gauge=a)


@with_known_keywords
def optimal_gaussian(
    q: Array | Moments, k: Array | Moments, *, scale: float | None = None
) -> Gaussian:
    r"""Find the optimal Gaussian proposal.

    .. math::
        \omega \sim N(\mu_q + \mu_k, \; Q \, \mathrm{diag}(\sigma_i) \, Q^T)

    with sigma_i as in `sderf`, from the eigenpairs of Sigma_q + Sigma_k. It minimises
    `expected_log_excess` over all Gaussians: its mean is not 0, so its covariance need not cover
    the means of queries and keys.

    Parameters
    ----------
    q, k, scale
        As in `fit`.

    Returns
    -------
    sampling.Gaussian
        Proposal with mean (..., d) and cov (..., d, d).

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import adapt
    >>> from refattn.moments import Moments
    >>> of_q, of_k = Moments(9, np.ones(1), np.eye(1)), Moments(9, np.ones(1), np.zeros((1, 1)))
    >>> best = adapt.optimal_gaussian(of_q, of_k, scale=1.0)
    >>> best.mean, best.cov.round(4)
    (array([2.]), array([[2.2808]]))
    """
    of_q, of_k = _kernel_moments(q, k, scale)
    return Gaussian(of_q.mean + of_k.mean, best_covariance(of_q.cov + of_k.cov))


@with_known_keywords
def expected_log_excess(
    q: Array | Moments,
    k: Array | Moments,
    proposal: Gaussian | None = None,
    *,
    scale: float | None = None,
) -> Doubles:
    r"""Expected log of the second moment of a kernel estimate, relative to the squared kernel.

    .. math::
        E \log \frac{E_\omega (w \, \xi(q) \xi(k))^2}{\kappa(q, k)^2}
        = \sum_i \Bigl(\log \frac{s_i}{\sqrt{2 s_i - 1}} +
          \frac{u_i^T (\Sigma_q + \Sigma_k) u_i + (u_i \cdot (\mu_q + \mu_k - \mu))^2}{2 s_i - 1}
          \Bigr)

    for independent q and k, kappa = exp(q . k), xi(x, omega) = exp(omega . x - |x|^2/2), and
    frequencies from N(mu, Sigma) with importance weights w, where Sigma has eigenpairs (s_i, u_i).
    `oprf`, `sderf` and `optimal_gaussian` minimise this excess. It is never negative.

    Parameters
    ----------
    q, k, scale
        As in `fit`.
    proposal : sampling.Gaussian, optional
        N(0, I) by default. Its gauge applies.

    Returns
    -------
    numpy.ndarray, shape (...), float64
        inf where the second moment is infinite.

    Raises
    ------
    TypeError, ValueError
        As in `fit`, and if `proposal` is not a Gaussian over vectors of length d.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import adapt
    >>> from refattn.moments import Moments
    >>> of_q = of_k = Moments(10, np.zeros(2), np.eye(2) / 2)
    >>> for p in (None, adapt.optimal_gaussian(of_q, of_k, scale=1.0)):
    ...     print(adapt.expected_log_excess(of_q, of_k, p, scale=1.0).round(4))
    2.0
    0.9404
    """
    of_q, of_k = _kernel_moments(q, k, scale)
    law = SquaredWeights(proposal, of_q.mean.shape[-1])
    if proposal is not None and proposal.gauge is not None:
        of_q = _map_moments(of_q, proposal.gauge)
        of_k = _map_moments(of_k, np.swapaxes(np.linalg.inv(proposal.gauge), -1, -2))
    t = law.rotate(of_q.mean + of_k.mean) - law.mean
    vectors = law.vectors if law.rotated else np.eye(t.shape[-1])
    spread = np.sum(vectors * ((of_q.cov + of_k.cov) @ vectors), axis=-2)
    return np.asarray(law.offset + law.quadratic(t) + np.sum(spread * law.curvature, axis=-1))


@as_written
def centre(q: Array, k: Array, a: Any, b: Any, *, scale: float | None = None) -> Centred:
    r"""Subtract constants from queries and keys; exact attention stays the same.

    .. math::
        e^{q \cdot k} = e^{(q - a) \cdot (k - b)} \; e^{a \cdot k} \; e^{q \cdot b - a \cdot b}

    The second factor becomes a bias of the keys, the third cancels. A proposal's mean has the same
    effect on random features (`optimal_gaussian`), so `fit` does not centre.

    Parameters
    ----------
    q, k : array, shape (..., n, d) and (..., m, d), float32 or float64
        Queries and keys.
    a, b : array_like, shape (..., d)
        Constants to subtract from queries and keys, for example their means, in their coordinates.
        Leading axes broadcast to those of `q` and of `k`: where query heads share a key head, `a`
        may still differ between them.
    scale
        As in `fit`.

    Returns
    -------
    Centred
        Namespace, dtype and device of `q`.

    Raises
    ------
    TypeError, ValueError
        If arrays do not match, or `a` or `b` is not of shape (..., d) and finite.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import adapt, attend
    >>> q, k, v = np.array([[1.0]]), np.array([[0.0], [1.0]]), np.array([[0.0], [1.0]])
    >>> centred = adapt.centre(q, k, [1.0], [0.5], scale=2.0)
    >>> attend(q, k, v, scale=2.0).out, attend(*centred[:2], v, bias=centred.bias, scale=2.0).out
    (array([[0.88079708]]), array([[0.88079708]]))
    """
    qkv.check(q, k, k)
    scale = checks.real("scale", scale, positive=True, optional=True, like=q)
    wide = host_dtype(q)
    a, b = (checks.host(name, x, "(..., d)", 1, wide) for name, x in (("a", a), ("b", b)))
    for name, constants, x in (("a", a, q), ("b", b, k)):
        checks.broadcasts(name, constants, (*x.shape[:-2], x.shape[-1]), "(..., d)")
    xp = array_namespace(q, k)
    a, b = (constant(x, q)[..., None, :] for x in (a, b))
    factor = constant(q.shape[-1], q) ** -0.5 if scale is None else scale
    row = xp.broadcast_to(factor * a, (*q.shape[:-2], 1, q.shape[-1]))
    (row, keys, _), ungroup = group_heads(row, k, k)
    return Centred(q - a, k - b, ungroup(row @ xp.matrix_transpose(keys)))


def _second_moment(q: Any, k: Any, scale: float | None) -> tuple[Doubles, Doubles]:
    """Return the mean and the second moment of q + k, in kernel coordinates."""
    of_q, of_k = _kernel_moments(q, k, scale)
    mean = of_q.mean + of_k.mean
    return mean, of_q.cov + of_k.cov + mean[..., :, None] * mean[..., None, :]


def _host_moments(name: str, m: Any) -> Moments:
    """Check moments and bring them to the host, the covariance of a single row 0 if it is nan."""
    moments.check_moments(**{name: m})
    if m.count == 0:
        raise ValueError(f"`{name}` has no rows: it must have at least one.")
    mean, cov = to_host(m.mean), to_host(m.cov)
    if m.count == 1:  # nan, or known otherwise
        cov = np.where(np.all(np.isnan(cov), axis=(-2, -1), keepdims=True), 0.0, cov)
    mean = checks.host(f"{name}.mean", mean, "(..., d)", 1)
    cov = checks.host(f"{name}.cov", cov, "(..., d, d)", 2)
    matrices.semidefinite(f"{name}.cov", cov, mean.shape[-1])
    return Moments(m.count, mean, cov, m.ddof)


def _kernel_moments(q: Any, k: Any, scale: float | None) -> tuple[Moments, Moments]:
    """Bring arrays or moments to moments in kernel coordinates, one for each query head."""
    scale = checks.real("scale", scale, positive=True, optional=True)
    arrays = {name: x for name, x in {"q": q, "k": k}.items() if not isinstance(x, Moments)}
    if len(arrays) == 2:
        qkv.check(q, k, k)
    elif arrays:
        checks.arrays(2, **arrays)
    of_q, of_k = (
        _host_moments(name, x if isinstance(x, Moments) else moments.estimate(x))
        for name, x in (("q", q), ("k", k))
    )
    heads, groups = head_counts(of_q.cov, of_k.cov, of_k.cov)
    share = 1
    if 1 not in (heads, groups) and groups and heads % groups == 0:
        share = heads // groups
        of_q = reduce(
            moments.merge,
            (
                of_q._replace(mean=of_q.mean[..., i::share, :], cov=of_q.cov[..., i::share, :, :])
                for i in range(share)
            ),
        )
    checks.compatible("q", of_q.mean, "k", of_k.mean)
    root = math.sqrt(of_q.mean.shape[-1] ** -0.5 if scale is None else scale)
    return _scale_moments(of_q, root, share), _scale_moments(of_k, root, share)


def _scale_moments(m: Moments, root: float, copies: int) -> Moments:
    """Return moments of root x, repeated for the query heads that share a key head."""
    mean, cov = root * m.mean, root**2 * m.cov
    if copies > 1:
        mean, cov = np.repeat(mean, copies, axis=-2), np.repeat(cov, copies, axis=-3)
    return m._replace(mean=mean, cov=cov)


def _map_moments(m: Moments, a: Doubles) -> Moments:
    """Return moments of A x."""
    mean = (a @ m.mean[..., None])[..., 0]
    return m._replace(mean=mean, cov=a @ m.cov @ np.swapaxes(a, -1, -2))
