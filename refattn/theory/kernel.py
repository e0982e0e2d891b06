"""Predicted mean, variance and bias of an estimate of the kernel from S frequencies."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..arrays import checks
from ..arrays.library import Doubles
from ..arrays.words import with_known_keywords
from ..kernels import FEATURES
from ..sampling import Gaussian
from ..typing import Features, KnownCoupling
from .elementary import inner_product
from .kernel_law import KernelLaw, check_vectors


@with_known_keywords
def log_kernel_mean(
    x: Any,
    y: Any,
    *,
    features: Features = "positive",
    coupling: KnownCoupling = "iid",
    proposal: Gaussian | None = None,
) -> Doubles:
    r"""Log of the mean of the kernel estimate.

    .. math:: \log E\,\hat\kappa = x \cdot y

    for every coupling but ``"regularised"``, whose norms sqrt(d) bias the estimate to

    .. math:: E\,\hat\kappa = e^{-|x|^2/2 - |y|^2/2} \; {}_0F_1(; d/2; d |x+y|^2 / 4) \le \kappa

    for positive and hyperbolic features. Random features post (see `refattn.naive`), Proposition 1.

    Parameters
    ----------
    x, y : array_like, shape (..., d)
        Vectors in kernel coordinates; leading axes broadcast.
    features : {"positive", "hyperbolic", "trigonometric"}
        See `kernels.estimate`.
    coupling : {"iid", "orthogonal", "simplex", "antithetic", "regularised"}
        See `sampling.draw`.
    proposal : sampling.Gaussian, optional
        Distribution of the frequencies, N(0, I) by default.

    Returns
    -------
    numpy.ndarray, shape (...), float64
        Log of the mean; nan where the mean of regularised trigonometric features is negative. That
        mean has a rounding error of about e^{(|x|^2 + |y|^2)/2} eps.

    Raises
    ------
    TypeError
        If an argument does not hold real numbers or `proposal` is not a Gaussian.
    ValueError
        If shapes do not match or no closed form is known: quasi-random couplings, a mixture, and
        the combinations listed in `log_kernel_variance`.

    Examples
    --------
    >>> from refattn import theory
    >>> theory.log_kernel_mean([1.0, 2.0], [0.5, 0.0], coupling="orthogonal")
    array(0.5)
    """
    pair = KernelLaw(x, y, features, coupling, proposal)
    sign, log_ratio = pair.mean()
    return np.where(sign > 0, pair.log_kappa + log_ratio, math.nan)


@with_known_keywords
def log_kernel_variance(
    x: Any,
    y: Any,
    *,
    features: Features = "positive",
    coupling: KnownCoupling = "iid",
    num_features: int = 1,
    proposal: Gaussian | None = None,
) -> Doubles:
    r"""Log of the variance of the kernel estimate from S frequencies.

    .. math::
        \mathrm{Var}\,\hat\kappa = \frac{V}{S} + \frac{\sum_b b(b-1)}{S^2} C

    with V the variance for one frequency, C the covariance of two estimates in a block and b the
    sizes of the blocks (d, or 2 for antithetic pairs; the last may be partial). For frequencies
    from N(0, I), where z = x + y, D = x - y,

    .. math::
        V = \kappa^2 (e^{|z|^2} - 1), \quad
        \tfrac12 (1 - e^{-|z|^2}) \kappa^2 (e^{|z|^2} - 1), \quad
        \tfrac12 e^{|x|^2 + |y|^2} (1 - e^{-|D|^2})^2

    for positive, hyperbolic and trigonometric features. For orthogonal blocks C is

    .. math::
        e^{-|x|^2-|y|^2} \; {}_1F_1(d; \tfrac d2; \tfrac{|z|^2}2) - \kappa^2, \qquad
        e^{|x|^2+|y|^2} \; {}_1F_1(d; \tfrac d2; -\tfrac{|D|^2}2) - \kappa^2

    for positive or hyperbolic, and trigonometric features; for simplex blocks see the Notes.
    Under a proposal N(mu, Sigma) with eigenvalues s_i along u_i, iid positive features have

    .. math::
        V = \kappa^2 \Bigl(\prod_i \frac{s_i}{\sqrt{2 s_i - 1}} \;
            \exp \sum_i \frac{(u_i \cdot (z - \mu))^2}{2 s_i - 1} - 1\Bigr)

    which is 0 at mu = z, Sigma = I, and infinite if some s_i <= 1/2. Random features post (see
    `refattn.naive`), Proposition 2, corrected in `log_second_moment`; Reid et al.,
    arXiv:2301.13856, for simplex.

    Parameters
    ----------
    x, y, features, coupling, proposal
        As in `log_kernel_mean`.
    num_features : int, default 1
        Number S of frequencies.

    Returns
    -------
    numpy.ndarray, shape (...), float64
        Log of the variance, -inf where it is 0. Exact for every S.

    Raises
    ------
    TypeError, ValueError
        As in `log_kernel_mean`. Closed forms are known for iid frequencies with any Gaussian; for
        positive features also for antithetic pairs with any Gaussian, for orthogonal and simplex
        blocks with an isotropic covariance, and for regularised ones with covariance I; for
        hyperbolic and trigonometric features in blocks with N(0, I) only.

    Notes
    -----
    Two frequencies of a block have independent chi_d norms and directions with cosine c (0, or
    -1/(d-1) for simplex). With K ~ Poisson(|z|^2),

    .. math::
        C = \kappa^2 (E \rho_K - 1), \qquad
        \rho_k = \prod_{i<k} \frac{d+i}{d+2i} \; E_\phi (1 + c \sin\phi)^k

    where phi has density proportional to sin^{d-1} on (0, pi). The sum has no cancellation and is
    used for positive and hyperbolic features; trigonometric ones use 1F1 averaged over phi.

    The logarithm is within 16 eps b (1 + its size + |x|^2 + |y|^2) of the exact one: in a block of
    b, V + (b - 1) C may be as small as V / b. The eigenvalues s_i of a covariance are known to eps
    times the largest, and the smallest 2 s_i - 1 magnifies that error. The formulas for regularised
    frequencies need a number of terms that grows as sqrt(d) times |z|.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import theory
    >>> x, y = np.array([0.5, 0.0]), np.array([0.5, 0.0])
    >>> for coupling in ("iid", "orthogonal", "simplex"):
    ...     log_variance = theory.log_kernel_variance(x, y, coupling=coupling, num_features=2)
    ...     print(f"{np.exp(log_variance):.3f}")
    1.416
    1.342
    0.973
    """
    pair = KernelLaw(x, y, features, coupling, proposal)
    checks.positive_integer("num_features", num_features)
    return 2 * pair.log_kappa + pair.log_variance(num_features)


@with_known_keywords
def log_kernel_mse(
    x: Any,
    y: Any,
    *,
    features: Features = "positive",
    coupling: KnownCoupling = "iid",
    num_features: int = 1,
    proposal: Gaussian | None = None,
) -> Doubles:
    r"""Log of the mean squared error of the kernel estimate from S frequencies.

    .. math:: \log (\mathrm{Var}\,\hat\kappa + (E\,\hat\kappa - \kappa)^2)

    The variance, except for the biased ``"regularised"`` coupling.

    Parameters
    ----------
    x, y, features, coupling, num_features, proposal
        As in `log_kernel_variance`.

    Returns
    -------
    numpy.ndarray, shape (...), float64
        Log of the mean squared error, -inf where it is 0.

    Examples
    --------
    >>> from refattn import theory
    >>> theory.log_kernel_mse([1.0, 2.0], [-1.0, -2.0])
    array(-inf)
    """
    pair = KernelLaw(x, y, features, coupling, proposal)
    checks.positive_integer("num_features", num_features)
    log_mse = np.logaddexp(pair.log_variance(num_features), 2 * pair.log_bias())
    return np.asarray(2 * pair.log_kappa + log_mse)


@with_known_keywords
def kernel_mean(
    x: Any,
    y: Any,
    *,
    features: Features = "positive",
    coupling: KnownCoupling = "iid",
    proposal: Gaussian | None = None,
) -> Doubles:
    r"""Mean of the kernel estimate: exp of `log_kernel_mean`, with its sign.

    Parameters
    ----------
    x, y, features, coupling, proposal
        As in `log_kernel_mean`.

    Returns
    -------
    numpy.ndarray, shape (...), float64
        Mean, inf where it overflows.

    Examples
    --------
    >>> from refattn import theory
    >>> float(theory.kernel_mean([1.0], [1.0], coupling="regularised").round(4))  # cosh(2) / e
    1.384
    """
    pair = KernelLaw(x, y, features, coupling, proposal)
    sign, log_ratio = pair.mean()
    with np.errstate(over="ignore"):
        return np.asarray(sign * np.exp(pair.log_kappa + log_ratio))


@with_known_keywords
def kernel_variance(
    x: Any,
    y: Any,
    *,
    features: Features = "positive",
    coupling: KnownCoupling = "iid",
    num_features: int = 1,
    proposal: Gaussian | None = None,
) -> Doubles:
    r"""Variance of the kernel estimate: exp of `log_kernel_variance`.

    Parameters
    ----------
    x, y, features, coupling, num_features, proposal
        As in `log_kernel_variance`.

    Returns
    -------
    numpy.ndarray, shape (...), float64
        Variance, inf where it overflows.

    Examples
    --------
    >>> from refattn import theory
    >>> value = theory.kernel_variance([1.0], [0.0], num_features=4)
    >>> float(value.round(4))  # (e - 1) / 4
    0.4296
    """
    log_variance = log_kernel_variance(
        x, y, features=features, coupling=coupling, num_features=num_features, proposal=proposal
    )
    with np.errstate(over="ignore"):
        variance: Doubles = np.exp(log_variance)
    return variance


@with_known_keywords
def kernel_mse(
    x: Any,
    y: Any,
    *,
    features: Features = "positive",
    coupling: KnownCoupling = "iid",
    num_features: int = 1,
    proposal: Gaussian | None = None,
) -> Doubles:
    r"""Mean squared error of the kernel estimate: exp of `log_kernel_mse`.

    Parameters
    ----------
    x, y, features, coupling, num_features, proposal
        As in `log_kernel_variance`.

    Returns
    -------
    numpy.ndarray, shape (...), float64
        Mean squared error, inf where it overflows.

    Examples
    --------
    >>> from refattn import theory
    >>> value = theory.kernel_mse([1.0], [0.0], features="trigonometric")
    >>> float(value.round(4))  # e (1 - 1/e)^2 / 2
    0.5431
    """
    log_mse = log_kernel_mse(
        x, y, features=features, coupling=coupling, num_features=num_features, proposal=proposal
    )
    with np.errstate(over="ignore"):
        mse: Doubles = np.exp(log_mse)
    return mse


def log_second_moment(x: Any, y: Any) -> Doubles:
    r"""Log of the second moment of one positive-feature estimate: the exponent of Proposition 2.

    .. math::
        \log E\,(\xi(x, \omega) \xi(y, \omega))^2 = |x|^2 + |y|^2 + 4 x \cdot y, \qquad
        S \cdot \mathrm{MSE} = e^{|x|^2 + |y|^2 + 4 x \cdot y} (1 - e^{-|x + y|^2})

    Random features post (see `refattn.naive`), Proposition 2, claims that the mean squared error
    vanishes as the kernel does. But it vanishes only if this exponent tends to -inf, or if x + y
    tends to 0 fast enough. For x = (1, 0), y = (-9, 0) the kernel is 1e-4 and S MSE = 1e20. With
    |x| = |y| the exponent is negative where the cosine of the angle is below -1/2.

    Parameters
    ----------
    x, y : array_like, shape (..., d)
        Vectors in kernel coordinates; leading axes broadcast.

    Returns
    -------
    numpy.ndarray, shape (...), float64

    Examples
    --------
    >>> from refattn import theory
    >>> theory.log_second_moment([1.0, 0.0], [-9.0, 0.0])
    array(46.)
    """
    x, y = check_vectors(x, y)
    return np.asarray(inner_product(x, x) + inner_product(y, y) + 4 * inner_product(x, y))


@with_known_keywords
def log_norm_approximation_bias(
    x: Any, y: Any, square_x: Any, square_y: Any, *, features: Features = "positive"
) -> Doubles:
    r"""Log of the factor by which constants in place of squared norms change the mean estimate.

    .. math:: \log (E\,\hat\kappa / \kappa) = (|x|^2 - x')/2 + (|y|^2 - y')/2

    Ye 2023 (see `refattn.naive`), eqs. (13) to (15), replaces the squared norms in the features by
    constants x', y' from `moments.mean_plus_trace` or `moments.mean_only`. In attention the
    constants cancel, and the estimate is of softmax_j(q . k_j + |k_j|^2 / 2), not of
    softmax_j(q . k_j). With trigonometric features the sign of the right side is the opposite.
    Where frequencies come from a proposal with a gauge A, `x` and `y` are A q and A^{-T} k, and the
    constants replace their squared norms.

    Parameters
    ----------
    x, y, features
        As in `log_kernel_mean`.
    square_x, square_y : array_like, shape (...)
        The constants that replace their squared norms.

    Returns
    -------
    numpy.ndarray, shape (...), float64

    Examples
    --------
    >>> from refattn import theory
    >>> theory.log_norm_approximation_bias([2.0], [1.0], 3.0, 1.0)
    array(0.5)
    """
    x, y = check_vectors(x, y)
    square_x = checks.host("square_x", square_x, "(...)", 0)
    square_y = checks.host("square_y", square_y, "(...)", 0)
    checks.choice("features", features, FEATURES)
    lead = np.broadcast_shapes(x.shape, y.shape)[:-1]
    try:
        np.broadcast_shapes(lead, square_x.shape, square_y.shape)
    except ValueError:
        raise ValueError(
            "`square_x` and `square_y` must have shapes that broadcast with the leading axes of "
            f"`x` and `y`, {lead}, got shapes {square_x.shape} and {square_y.shape}."
        ) from None
    sign = -1 if features == "trigonometric" else 1
    return np.asarray(
        sign * ((inner_product(x, x) - square_x) / 2 + (inner_product(y, y) - square_y) / 2)
    )
