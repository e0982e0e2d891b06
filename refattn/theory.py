r"""Closed-form laws: the mean, variance and bias that random-feature estimates should have.

All in kernel coordinates unless a function takes `scale`, on the host, in float64. With z = x + y,
D = x - y and kappa = exp(x . y), each law is a power of kappa times a function of z or D, and is
evaluated as a logarithm: a variance may overflow, its logarithm does not.

The laws of one frequency and of pairs of frequencies in a block are exact for any number of
frequencies. Those of attention are of first order in 1/S where they say so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from copy import copy
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from . import _validate
from ._array import block_shape, blocks, broadcast_lead, group_heads, head_counts
from .attention import _past, attend
from .kernels import FEATURES
from .sampling import Gaussian

__all__ = [
    "ExactLaw",
    "Law",
    "attention_law",
    "importance_sampling_law",
    "kernel_mean",
    "kernel_mse",
    "kernel_variance",
    "log_kernel_mean",
    "log_kernel_mse",
    "log_kernel_variance",
    "log_norm_approximation_bias",
    "log_second_moment",
    "num_features_for",
    "num_features_for_kernel",
    "randomized_attention_law",
    "relative_error",
]

Floats = npt.NDArray[np.float64]

# The couplings whose laws are known; quasi-random points have none in closed form.
COUPLINGS = ("antithetic", "iid", "orthogonal", "regularised", "simplex")


# One estimate of the kernel


def log_kernel_mean(
    x: Any,
    y: Any,
    *,
    features: str = "positive",
    coupling: str = "iid",
    proposal: Gaussian | None = None,
) -> Floats:
    r"""Log of the mean of the kernel estimate.

    .. math:: \log E\,\hat\kappa = x \cdot y

    for every coupling but ``"regularised"``, whose norms sqrt(d) bias the estimate to

    .. math:: E\,\hat\kappa = e^{-|x|^2/2 - |y|^2/2} \; {}_0F_1(; d/2; d |x+y|^2 / 4) \le \kappa

    for positive and hyperbolic features. Reference 000, Proposition 1.

    Parameters
    ----------
    x, y : array_like, shape (..., d)
        Vectors in kernel coordinates; leading axes broadcast.
    features : {"positive", "hyperbolic", "trigonometric"}
        See `kernels.estimate`.
    coupling : {"iid", "orthogonal", "simplex", "antithetic", "regularised"}
        See `sampling.draw`.
    proposal : sampling.Gaussian, optional
        Law of the frequencies, N(0, I) by default.

    Returns
    -------
    numpy.ndarray, shape (...), float64
        Log of the mean; nan where the mean of regularised trigonometric features is negative,
        which is known to rounding of e^{(|x|^2 + |y|^2)/2} only.

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
    pair = _Pair(x, y, features, coupling, proposal)
    sign, log_ratio = pair.mean()
    return np.where(sign > 0, pair.log_kappa + log_ratio, math.nan)


def log_kernel_variance(
    x: Any,
    y: Any,
    *,
    features: str = "positive",
    coupling: str = "iid",
    num_features: int = 1,
    proposal: Gaussian | None = None,
) -> Floats:
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

    which is 0 at mu = z, Sigma = I, and infinite if some s_i <= 1/2. Reference 000,
    Proposition 2, corrected (see `log_second_moment`); Reid et al., arXiv:2301.13856, for simplex.

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
    b, V + (b - 1) C may be as small as V / b. A covariance is known by its eigenvalues s_i, to eps
    times the largest, which the smallest 2 s_i - 1 magnifies. Regularised laws take a number of
    terms that grows as sqrt(d) times |z|.

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
    pair = _Pair(x, y, features, coupling, proposal)
    _validate.positive_integer("num_features", num_features)
    return 2 * pair.log_kappa + pair.log_variance(num_features)


def log_kernel_mse(
    x: Any,
    y: Any,
    *,
    features: str = "positive",
    coupling: str = "iid",
    num_features: int = 1,
    proposal: Gaussian | None = None,
) -> Floats:
    r"""Log of the mean squared error of the kernel estimate from S frequencies.

    .. math:: \log (\mathrm{Var}\,\hat\kappa + (E\,\hat\kappa - \kappa)^2)

    The variance, but for the biased ``"regularised"`` coupling.

    Parameters
    ----------
    x, y, features, coupling, num_features, proposal
        As in `log_kernel_variance`.

    Returns
    -------
    numpy.ndarray, shape (...), float64
        Log of the mean squared error, -inf where it is 0.

    Raises
    ------
    TypeError, ValueError
        As in `log_kernel_variance`.

    Examples
    --------
    >>> from refattn import theory
    >>> theory.log_kernel_mse([1.0, 2.0], [-1.0, -2.0])
    array(-inf)
    """
    pair = _Pair(x, y, features, coupling, proposal)
    _validate.positive_integer("num_features", num_features)
    log_mse = np.logaddexp(pair.log_variance(num_features), 2 * pair.log_bias())
    return np.asarray(2 * pair.log_kappa + log_mse)


def kernel_mean(
    x: Any,
    y: Any,
    *,
    features: str = "positive",
    coupling: str = "iid",
    proposal: Gaussian | None = None,
) -> Floats:
    r"""Mean of the kernel estimate: exp of `log_kernel_mean`, with its sign.

    Parameters
    ----------
    x, y, features, coupling, proposal
        As in `log_kernel_mean`.

    Returns
    -------
    numpy.ndarray, shape (...), float64
        Mean, inf where it overflows.

    Raises
    ------
    TypeError, ValueError
        As in `log_kernel_mean`.

    Examples
    --------
    >>> from refattn import theory
    >>> float(theory.kernel_mean([1.0], [1.0], coupling="regularised").round(4))  # cosh(2) / e
    1.384
    """
    pair = _Pair(x, y, features, coupling, proposal)
    sign, log_ratio = pair.mean()
    with np.errstate(over="ignore"):
        return np.asarray(sign * np.exp(pair.log_kappa + log_ratio))


def kernel_variance(
    x: Any,
    y: Any,
    *,
    features: str = "positive",
    coupling: str = "iid",
    num_features: int = 1,
    proposal: Gaussian | None = None,
) -> Floats:
    r"""Variance of the kernel estimate: exp of `log_kernel_variance`.

    Parameters
    ----------
    x, y, features, coupling, num_features, proposal
        As in `log_kernel_variance`.

    Returns
    -------
    numpy.ndarray, shape (...), float64
        Variance, inf where it overflows.

    Raises
    ------
    TypeError, ValueError
        As in `log_kernel_variance`.

    Examples
    --------
    >>> from refattn import theory
    >>> value = theory.kernel_variance([1.0], [0.0], num_features=4)
    >>> float(value.round(4))  # (e - 1) / 4
    0.4296
    """
    with np.errstate(over="ignore"):
        return np.exp(
            log_kernel_variance(
                x,
                y,
                features=features,
                coupling=coupling,
                num_features=num_features,
                proposal=proposal,
            )
        )


def kernel_mse(
    x: Any,
    y: Any,
    *,
    features: str = "positive",
    coupling: str = "iid",
    num_features: int = 1,
    proposal: Gaussian | None = None,
) -> Floats:
    r"""Mean squared error of the kernel estimate: exp of `log_kernel_mse`.

    Parameters
    ----------
    x, y, features, coupling, num_features, proposal
        As in `log_kernel_variance`.

    Returns
    -------
    numpy.ndarray, shape (...), float64
        Mean squared error, inf where it overflows.

    Raises
    ------
    TypeError, ValueError
        As in `log_kernel_variance`.

    Examples
    --------
    >>> from refattn import theory
    >>> value = theory.kernel_mse([1.0], [0.0], features="trigonometric")
    >>> float(value.round(4))  # e (1 - 1/e)^2 / 2
    0.5431
    """
    with np.errstate(over="ignore"):
        return np.exp(
            log_kernel_mse(
                x,
                y,
                features=features,
                coupling=coupling,
                num_features=num_features,
                proposal=proposal,
            )
        )


def log_second_moment(x: Any, y: Any) -> Floats:
    r"""Log of the second moment of one positive-feature estimate: the exponent of Proposition 2.

    .. math::
        \log E\,(\xi(x, \omega) \xi(y, \omega))^2 = |x|^2 + |y|^2 + 4 x \cdot y, \qquad
        S \cdot \mathrm{MSE} = e^{|x|^2 + |y|^2 + 4 x \cdot y} (1 - e^{-|x + y|^2})

    Reference 000, Proposition 2, says that the mean squared error vanishes as the kernel does. It
    vanishes if and only if this exponent tends to -inf, or x + y to 0 faster than it grows: for
    x = (1, 0), y = (-9, 0) the kernel is 1e-4 and S MSE = 1e20. With |x| = |y| the exponent is
    negative where the cosine of the angle is below -1/2.

    Parameters
    ----------
    x, y : array_like, shape (..., d)
        Vectors in kernel coordinates; leading axes broadcast.

    Returns
    -------
    numpy.ndarray, shape (...), float64

    Raises
    ------
    TypeError, ValueError
        As in `log_kernel_mean`.

    Examples
    --------
    >>> from refattn import theory
    >>> theory.log_second_moment([1.0, 0.0], [-9.0, 0.0])
    array(46.)
    """
    x, y = _vectors(x, y)
    return np.asarray(_dot(x, x) + _dot(y, y) + 4 * _dot(x, y))


def log_norm_approximation_bias(
    x: Any, y: Any, square_x: Any, square_y: Any, *, features: str = "positive"
) -> Floats:
    r"""Log of the factor by which constants in place of squared norms change the mean estimate.

    .. math:: \log (E\,\hat\kappa / \kappa) = (|x|^2 - x')/2 + (|y|^2 - y')/2

    Reference 002, eqs. (13) to (15), puts constants x', y' from `moments.mean_plus_trace` or
    `moments.mean_only` for the squared norms in the features. In attention the constants cancel,
    and what is estimated is not softmax_j(q . k_j) but softmax_j(q . k_j + |k_j|^2 / 2). With
    trigonometric features the sign of the right side is the opposite. Where frequencies come from
    a proposal with a gauge A, `x` and `y` are A q and A^{-T} k, and the constants those of them.

    Parameters
    ----------
    x, y : array_like, shape (..., d)
        Vectors in kernel coordinates; leading axes broadcast.
    square_x, square_y : array_like, shape (...)
        What takes the place of their squared norms.
    features : {"positive", "hyperbolic", "trigonometric"}
        See `kernels.estimate`.

    Returns
    -------
    numpy.ndarray, shape (...), float64

    Raises
    ------
    TypeError, ValueError
        As in `log_kernel_mean`.

    Examples
    --------
    >>> from refattn import theory
    >>> theory.log_norm_approximation_bias([2.0], [1.0], 3.0, 1.0)
    array(0.5)
    """
    x, y = _vectors(x, y)
    square_x = _validate.host("square_x", square_x, "(...)", 0)
    square_y = _validate.host("square_y", square_y, "(...)", 0)
    _validate.choice("features", features, FEATURES)
    lead = np.broadcast_shapes(x.shape, y.shape)[:-1]
    try:
        np.broadcast_shapes(lead, square_x.shape, square_y.shape)
    except ValueError:
        raise ValueError(
            "`square_x` and `square_y` must have shapes that broadcast with the leading axes of "
            f"`x` and `y`, {lead}, got shapes {square_x.shape} and {square_y.shape}."
        ) from None
    sign = -1 if features == "trigonometric" else 1
    return np.asarray(sign * ((_dot(x, x) - square_x) / 2 + (_dot(y, y) - square_y) / 2))


def num_features_for_kernel(
    target_error: float,
    x: Any,
    y: Any,
    *,
    features: str = "positive",
    coupling: str = "iid",
    proposal: Gaussian | None = None,
) -> Floats:
    r"""Find how many frequencies bring the root mean squared error of the kernel to a target.

    .. math::
        S = b \left\lceil \frac{V + (b - 1) C}
            {b \, ((\mathrm{target} \cdot \kappa)^2 - \mathrm{bias}^2)} \right\rceil

    The inverse of `log_kernel_mse` for whole blocks of b frequencies, with V and C as in
    `log_kernel_variance`.

    Parameters
    ----------
    target_error : float
        Error relative to the kernel, positive.
    x, y, features, coupling, proposal
        As in `log_kernel_variance`.

    Returns
    -------
    numpy.ndarray, shape (...), float64
        Whole numbers; inf where no number reaches the target, below the bias of a
        biased coupling.

    Raises
    ------
    TypeError, ValueError
        As in `log_kernel_variance`, and if the target is not positive.

    Examples
    --------
    >>> from refattn import theory
    >>> theory.num_features_for_kernel(0.1, [1.0], [0.0])  # (e - 1) / 0.01
    array(172.)
    """
    target = 2 * math.log(_validate.real("target_error", target_error, positive=True))
    pair = _Pair(x, y, features, coupling, proposal)
    size, bias = pair.block, 2 * pair.log_bias()
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        room = np.where(bias < target, target + np.log(-np.expm1(bias - target)), -math.inf)
        count = size * np.ceil(np.exp(pair.log_variance(size) - room))
    return np.where(np.isnan(count), math.inf, np.maximum(count, size))


# Attention


class Law(NamedTuple):
    """What to expect of estimated attention.

    Attributes
    ----------
    bias : numpy.ndarray, shape (..., n, d_v)
        Mean of the output minus exact attention.
    variance : numpy.ndarray, shape (..., n, d_v)
        Variance of the output.
    ess : numpy.ndarray, shape (..., n)
        Effective sample size S / E[w^2] of the importance weights w, normalised to mean 1.
    """

    bias: Floats
    variance: Floats
    ess: Floats

    @property
    def in_regime(self) -> Any:
        """Whether errors will look like those of the law: ess >= 10, shape (..., n)."""
        return self.ess >= _LARGE_SAMPLE

    def _in_units(self, unit: Floats) -> Self:
        """Turn the law for values v into that for unit v."""
        with np.errstate(over="ignore"):
            return self._replace(bias=self.bias * unit, variance=self.variance * unit * unit)


class ExactLaw(Law):
    """A law whose weights are all equal: it holds for every number of samples."""

    @property
    def in_regime(self) -> Any:
        """True, shape (..., n)."""
        return np.ones(self.ess.shape, dtype=bool)


_LARGE_SAMPLE = 10.0  # effective samples from which terms of order 1/S^2 matter little


def attention_law(
    q: Any,
    k: Any,
    v: Any,
    *,
    num_features: int,
    proposal: Gaussian | None = None,
    scale: float | None = None,
    mask: Any = None,
    causal: bool = False,
) -> Law:
    r"""Bias and variance of self-normalised attention estimates (RFA, SNIS), to first order in 1/S.

    .. math::
        \mathrm{Var}[\mathrm{out}_i] \approx \frac1S
            \sum_{jj'} (v_j - \mu_i)(v_{j'} - \mu_i) \frac{E_{ijj'}}{Z_i^2}, \qquad
        \mathrm{Bias}[\mathrm{out}_i] \approx -\frac1S
            \sum_{jj'} (v_j - \mu_i) \frac{E_{ijj'}}{Z_i^2}

    with mu_i the exact output, Z_i = sum_j exp(q_i . k_j) and E_ijj' the second moments
    E_q[w^2 xi(q_i)^2 xi(k_j) xi(k_j')] of iid positive features weighted by w = N(0, I) / q. For
    N(0, I) itself E_ijj' = exp(|q|^2 + 2 q.k_j + 2 q.k_j' + k_j.k_j').

    **Asymptotic**: holds once the effective sample size S Z_i^2 / sum_jj' E_ijj' is large
    (`Law.in_regime`); it is part of the result. Real queries and keys may need more samples than
    can be drawn, and then the law says no more than that. v_j - mu_i is known to eps |v|: a share
    pi_ij of attention that is closer to 1 counts as 1.

    Parameters
    ----------
    q, k, v : array_like, shape (..., n, d), (..., m, d), (..., m, d_v)
        Queries, keys and values; see `attend` for broadcasting and grouped heads.
    num_features : int
        Number S of independent frequencies.
    proposal : sampling.Gaussian, optional
        Law of the frequencies, N(0, I) by default.
    scale : float, optional
        Factor on q . k, 1 / sqrt(d) by default, positive.
    mask : array_like of bool, broadcasting to (..., n, m), optional
        True where the query attends to the key.
    causal : bool, default False
        Query i sees key j only if j <= i + m - n.

    Returns
    -------
    Law
        float64 NumPy arrays; inf where a moment overflows or is infinite. Takes time
        O(n m^2 d_v) and memory O(m^2), for the pairs of keys of one head at a time. A query that
        sees no key has bias and variance 0 and ess S.

    Raises
    ------
    TypeError, ValueError
        As in `random_feature_attention`; if a value is not finite or `proposal` is a mixture.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import theory
    >>> q, k, v = np.zeros((1, 1)), np.array([[-0.5], [0.5]]), np.array([[-1.0], [1.0]])
    >>> law = theory.attention_law(q, k, v, num_features=100, scale=1.0)
    >>> law.variance.round(5), law.ess.round(1)  # sinh(1/4) / 100, 100 / cosh(1/4)
    (array([[0.00253]]), array([97.]))
    """
    _validate.positive_integer("num_features", num_features)
    moments = _second_moments(q, k, v, proposal, scale, mask, causal, centred=True)
    return _first_order(moments, num_features)._in_units(moments.unit)


def importance_sampling_law(
    q: Any,
    k: Any,
    v: Any,
    *,
    num_features: int,
    proposal: Gaussian | None = None,
    scale: float | None = None,
    mask: Any = None,
    causal: bool = False,
) -> Law:
    r"""Variance of importance-sampled attention with the exact normaliser (IS), exact for every S.

    .. math::
        \mathrm{Var}[\mathrm{out}_i] = \frac1S
            \Bigl(\sum_{jj'} v_j v_{j'} \frac{E_{ijj'}}{Z_i^2} - \mu_i^2\Bigr)

    with E_ijj' and mu_i as in `attention_law`. The bias is 0. Outside the regime of large effective
    sample sizes (`Law.in_regime`) the variance is still right, but comes from errors too rare to
    be seen. It is a difference, known to rounding errors of order eps (S Var + mu_i^2) / S: where
    outputs are large against their spread it may be all rounding.

    Parameters
    ----------
    q, k, v, num_features, proposal, scale, mask, causal
        As in `attention_law`.

    Returns
    -------
    Law
        As in `attention_law`.

    Raises
    ------
    TypeError, ValueError
        As in `attention_law`.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import theory
    >>> q, k, v = np.zeros((1, 1)), np.array([[-0.5], [0.5]]), np.array([[1.0], [1.0]])
    >>> law = theory.importance_sampling_law(q, k, v, num_features=1, scale=1.0)
    >>> law.variance.round(5)  # cosh(1/4) - 1
    array([[0.03141]])
    """
    _validate.positive_integer("num_features", num_features)
    moments = _second_moments(q, k, v, proposal, scale, mask, causal, centred=False)
    variance = np.maximum(moments.square - moments.mean**2, 0.0) / num_features
    law = Law(np.zeros_like(variance), variance, num_features / moments.weight)
    return law._in_units(moments.unit)


def randomized_attention_law(
    q: Any,
    k: Any,
    v: Any,
    *,
    num_samples: int,
    scale: float | None = None,
    mask: Any = None,
    causal: bool = False,
) -> ExactLaw:
    r"""Bias of randomized attention (RA), and a bound on its variance, for every S.

    .. math::
        \mathrm{Bias}[\mathrm{out}_i] = 0, \qquad
        \mathrm{Var}[\mathrm{out}_i] = \frac1S \mathrm{Var}_{p_i}(f_i)
            \le \frac1S \mathrm{Var}_{\pi_i}(v) = \frac1S \sum_j \pi_{ij} (v_j - \mu_i)^2

    f_i is the mean of v given omega when a key is drawn from pi_i and omega from its component of
    p_i, so that its variance is at most that of v. `variance` holds the bound; it is reached in
    the limit of keys that are far apart.

    Parameters
    ----------
    q, k, v, scale, mask, causal
        As in `attention_law`.
    num_samples : int
        Number S of samples for each query.

    Returns
    -------
    ExactLaw
        As in `attention_law`, but in time O(n m (d + d_v)) and without the memory for pairs of
        keys; ess is S, since all weights are equal.

    Raises
    ------
    TypeError, ValueError
        As in `attention_law`.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import theory
    >>> q, k, v = np.zeros((1, 1)), np.array([[-0.5], [0.5]]), np.array([[-1.0], [1.0]])
    >>> theory.randomized_attention_law(q, k, v, num_samples=4).variance
    array([[0.25]])
    """
    _validate.positive_integer("num_samples", num_samples)
    problem = _Problem(q, k, v, scale, mask, causal)
    variance = np.zeros(problem.shape)
    for index, scores, values, _, _ in problem.blocks(centred=True):
        share = np.exp(scores)[..., None, :]
        variance[index] = np.sum(share * values**2, axis=-1)
    variance = problem.ungroup(variance) / num_samples
    law = ExactLaw(
        np.zeros_like(variance), variance, np.full(variance.shape[:-1], float(num_samples))
    )
    return law._in_units(problem.unit)


def num_features_for(
    target_error: float,
    q: Any,
    k: Any,
    v: Any,
    *,
    proposal: Gaussian | None = None,
    scale: float | None = None,
    mask: Any = None,
    causal: bool = False,
) -> Floats:
    r"""Find how many frequencies bring the relative error of RFA or SNIS to a target.

    .. math::
        S = \left\lceil \frac{V + \sqrt{V^2 + 4 T B}}{2 T} \right\rceil, \qquad
        T = \mathrm{target}^2 \sum_{ic} \mu_{ic}^2

    with V/S the sum over queries and columns of the variances of `attention_law` and B/S^2 that
    of the squared biases: the inverse of `relative_error`.

    **Asymptotic**, as `attention_law`: where the number found leaves the law outside its regime
    it is raised until ess >= 10 for the mean weight of the queries.

    Parameters
    ----------
    target_error : float
        Relative error of each head: root mean squared error over root mean square of the exact
        output, positive.
    q, k, v, proposal, scale, mask, causal
        As in `attention_law`.

    Returns
    -------
    numpy.ndarray, shape (...), float64
        Whole numbers, one for each head; inf where the law is infinite.

    Raises
    ------
    TypeError, ValueError
        As in `attention_law`, and if the target is not positive.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import theory
    >>> q, k, v = np.zeros((1, 1)), np.array([[-0.5], [0.5]]), np.array([[1.0], [3.0]])
    >>> theory.num_features_for(0.01, q, k, v, scale=1.0)  # sinh(1/4) / 0.02^2
    array(632.)
    """
    target = _validate.real("target_error", target_error, positive=True)
    moments = _second_moments(q, k, v, proposal, scale, mask, causal, centred=True)
    return _features_to_reach(target, _first_order(moments, 1), moments.mean)


def _features_to_reach(target: float, law: Law, exact: Floats) -> Floats:
    """Invert `relative_error`, from the law of one frequency: see `num_features_for`."""
    unit = _size(exact)
    law, exact = law._in_units(1 / unit), exact / unit
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        total = np.sum(law.variance, axis=(-2, -1))
        squared_bias = np.sum(law.bias**2, axis=(-2, -1))
        room = target * np.sqrt(np.sum(exact**2, axis=(-2, -1)))  # the root of T
        variance, bias = _share(_share(total, room), room), _share(np.sqrt(squared_bias), room)
        count = (variance + np.hypot(variance, 2 * bias)) / 2
        count = np.maximum(count, _LARGE_SAMPLE * np.mean(1 / law.ess, axis=-1))
        # A whole number that rounding has raised must not become the next one.
        count = np.ceil(count * (1 - 1e-12))
    return np.where(np.isfinite(count), np.maximum(count, 1.0), math.inf)


def relative_error(law: Law, exact: Any) -> Floats:
    r"""Turn the law of attention into the relative error to expect of each head.

    .. math::
        \sqrt{\sum_{ic} (\mathrm{variance}_{ic} + \mathrm{bias}_{ic}^2) / \sum_{ic} \mu_{ic}^2}

    Parameters
    ----------
    law : Law
        Law of the estimate.
    exact : array_like, shape (..., n, d_v)
        Exact attention mu.

    Returns
    -------
    numpy.ndarray, shape (...), float64
        Root mean squared error relative to the exact output; 0 where both are 0.

    Raises
    ------
    TypeError
        If `law` is not a Law or `exact` does not hold real numbers.
    ValueError
        If `exact` is not finite or not of the shape of the law.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import theory
    >>> law = theory.Law(np.zeros((1, 1)), np.full((1, 1), 0.04), np.full(1, 100.0))
    >>> theory.relative_error(law, [[2.0]])
    array(0.1)
    """
    if not isinstance(law, Law):
        raise TypeError(f"`law` must be a Law, got {type(law).__name__}.")
    exact = _validate.host("exact", exact, "(..., n, d_v)", 2)
    if exact.shape != law.variance.shape:
        raise ValueError(
            f"`exact` must have the shape of `law.variance`, {law.variance.shape}, "
            f"got {exact.shape}."
        )
    unit = _size(exact)
    law, exact = law._in_units(1 / unit), exact / unit
    with np.errstate(over="ignore"):
        squares = np.sum(law.variance + law.bias**2, axis=(-2, -1))
    with np.errstate(divide="ignore"):
        return np.asarray(np.sqrt(_share(squares, np.sum(exact**2, axis=(-2, -1)))))


# Sums over pairs of keys


class _Moments(NamedTuple):
    """Sums over pairs of keys of E_ijj' / Z_i^2 times u u', u and 1 for values u of the keys.

    All in units of the size of the values, whose squares may overflow.
    """

    square: Floats  # (..., n, d_v)
    cross: Floats  # (..., n, d_v)
    weight: Floats  # (..., n)
    mean: Floats  # (..., n, d_v)
    unit: Floats  # (..., 1, 1)


def _first_order(moments: _Moments, num_features: int) -> Law:
    """The law of `attention_law`, in units of the size of the values."""
    bias, variance = -moments.cross / num_features, moments.square / num_features
    return Law(bias, variance, num_features / moments.weight)


def _second_moments(
    q: Any,
    k: Any,
    v: Any,
    proposal: Gaussian | None,
    scale: float | None,
    mask: Any,
    causal: bool,
    *,
    centred: bool,
) -> _Moments:
    r"""Second moments of weighted features over all pairs of keys.

    The integral of `log_kernel_variance` with 2z = 2 q + k + k' factors into
    E_jj' / Z^2 = e^{h} b_j b_j' G_jj', G a Gaussian kernel of the keys: no exponent is positive
    but h and the largest log b, which are carried apart, for all keys and for those whose value
    is not 0: the key that takes all attention has a centred value of 0.
    """
    problem = _Problem(q, k, v, scale, mask, causal, proposal)
    law = _Gauss(proposal, problem.d)
    square, cross = np.zeros(problem.shape), np.zeros(problem.shape)
    weight = np.ones(problem.shape[:-1])
    of = None  # the head that `head`, `key` and `gram` are of
    for index, scores, values, q_i, k_h in problem.blocks(centred=centred):
        if index[:-1] != of:
            of, head = index[:-1], law.at(problem.query_head(index[:-1]))
            key = head.rotate(k_h)
            gram = _gaussian_gram(key * np.sqrt((1 + head.curvature) / 4))
        t = head.rotate(q_i) - head.mean
        slope = key * head.curvature
        log_b = scores + t @ slope.T + np.sum(key * slope, axis=-1) / 2
        b, peak = _scaled_exp(log_b)
        b_u, peak_u = _scaled_exp(np.where(np.any(values != 0, axis=1), log_b, -math.inf))
        u, pairs = values * b_u[:, None, :], (b @ gram)[:, None, :]
        height = head.offset + head.quadratic(t)
        square[index] = _times(height + 2 * peak_u, np.sum((u @ gram) * u, axis=-1))
        cross[index] = _times(height + peak + peak_u, np.sum(pairs * u, axis=-1))
        total = _times(height + 2 * peak, np.sum(pairs * b[:, None, :], axis=-1))[:, 0]
        weight[index] = np.where(np.any(np.isfinite(scores), axis=-1), total, 1.0)
    ungroup = problem.ungroup
    sums = ungroup(square), ungroup(cross), ungroup(weight, core=1)
    return _Moments(*sums, problem.mean, problem.unit)


def _size(x: Floats) -> Floats:
    """Power of 2 near the largest entry of each head (..., n, d_v), with a reciprocal."""
    _, exponent = np.frexp(np.max(np.abs(x), axis=(-2, -1), keepdims=True))
    return np.asarray(np.ldexp(1.0, np.clip(exponent, -1022, 1022)))


def _scaled_exp(x: Floats) -> tuple[Floats, Floats]:
    """e^(x - peak) and the peak of each row; 0 where all of a row is -inf."""
    peak = np.max(x, axis=-1)
    peak = np.where(np.isfinite(peak), peak, 0.0)
    return np.exp(x - peak[:, None]), peak


def _times(log_size: Floats, sums: Floats) -> Floats:
    """Scale rows; what is 0 stays 0 where the scale overflows."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(np.where(sums == 0, 0.0, np.exp(log_size)[:, None] * sums))


def _gaussian_gram(x: Floats) -> Floats:
    """exp(-|x_j - x_j'|^2), shape (m, m)."""
    from scipy.spatial.distance import cdist

    return np.asarray(np.exp(-cdist(x, x, "sqeuclidean")))


class _Problem:
    """Attention in kernel coordinates, in float64 on the host, one block of queries at a time.

    Values are in units of `unit`.
    """

    def __init__(
        self,
        q: Any,
        k: Any,
        v: Any,
        scale: float | None,
        mask: Any,
        causal: bool,
        proposal: Any = None,
    ) -> None:
        q, k, v = (
            _validate.host(name, x, f"(..., {rows}, {columns})", 2)
            for name, x, rows, columns in (
                ("q", q, "n", "d"),
                ("k", k, "m", "d"),
                ("v", v, "m", "d_v"),
            )
        )
        _validate.whole("mask", mask)
        mask = None if mask is None else np.asarray(mask)
        _validate.attention(q, k, v, mask=mask, causal=causal)
        scale = _validate.real("scale", scale, positive=True, optional=True)
        root = q.shape[-1] ** -0.25 if scale is None else math.sqrt(scale)
        if isinstance(proposal, Gaussian):
            _validate.batch("proposal", proposal.lead, _validate.lead(q, k, v))
            q, k = proposal.change_gauge(q, k)
        q, k = q * root, k * root
        _validate.squares("q", q)  # then scores are finite, and those of -inf hidden keys
        _validate.squares("k", k)
        heads, groups = head_counts(q, k, v)
        self.share = 1 if 1 in (heads, groups) else heads // max(groups, 1)
        unit = _size(v)
        (q, k, v, mask, unit), self.ungroup = group_heads(q, k, v / unit, mask, unit)
        self.q, self.k, self.v, self.mask, self.causal = q, k, v, mask, causal
        self.d = q.shape[-1]
        self.shape = (*broadcast_lead(q, k, v, mask), q.shape[-2], v.shape[-1])
        self.attended = attend(q, k, v, mask=mask, causal=causal)
        self.mean = self.ungroup(np.broadcast_to(self.attended.out, self.shape))
        self.unit = self.ungroup(np.broadcast_to(unit, (*self.shape[:-2], 1, 1)))

    def query_head(self, index: tuple[int, ...]) -> tuple[int, ...]:
        """Index among the heads of q of a head among groups of them."""
        if self.share == 1:
            return index
        return (*index[:-2], index[-2] * self.share + index[-1])

    def blocks(self, *, centred: bool) -> Iterator[tuple[Any, Floats, Floats, Floats, Floats]]:
        """Yield (index, log pi, values less their mean if `centred`, queries, keys).

        Shapes (r, m), (r, d_v, m), (r, d) and (m, d) for r queries of a head.
        """
        *lead, n, d_v = self.shape
        m = self.k.shape[-2]
        visible = np.broadcast_to(True if self.mask is None else self.mask, (*lead, n, m))
        out, lse = np.broadcast_to(self.attended.out, self.shape), self.attended.lse
        q, k, v = (np.broadcast_to(x, (*lead, *x.shape[-2:])) for x in (self.q, self.k, self.v))
        lse = np.broadcast_to(lse, (*lead, n))
        rows = max(1, math.prod(block_shape(q)) // (m * (d_v + 1) or 1))
        for head in np.ndindex(*lead):
            for i in blocks(0, n, rows):
                seen = visible[(*head, i)]
                if self.causal:
                    seen = seen & _past(i, slice(0, m), m - n, None, np)
                total = np.where(np.isfinite(lse[(*head, i)]), lse[(*head, i)], 0.0)
                scores = np.where(seen, q[(*head, i)] @ k[head].T - total[:, None], -math.inf)
                values = np.broadcast_to(v[head].T, (i.stop - i.start, d_v, m))
                if centred:
                    values = values - out[(*head, i)][..., None]
                yield (*head, i), scores, values, q[(*head, i)], k[head]


# One pair of vectors


class _Gauss:
    """The squared-weight integral of a Gaussian proposal, along its eigenvectors.

    With t = z - mean, E_q[(w xi(x) xi(y))^2] / kappa^2 = exp(offset + quadratic(t)).
    """

    def __init__(self, proposal: Any, d: int) -> None:
        if proposal is not None and not isinstance(proposal, Gaussian):
            raise TypeError(
                "`proposal` must be a Gaussian or None: no other law is known in closed form, got "
                f"{type(proposal).__name__}."
            )
        if proposal is not None:
            _validate.over("proposal", proposal, d)
        self.rotated = proposal is not None and proposal.cov is not None
        self.standard = proposal is None or not (
            np.any(proposal.mean) or (self.rotated and np.any(proposal.cov != np.eye(d)))
        )
        self.eigenvalues = np.ones(d)
        mean = np.zeros(d) if proposal is None else proposal.mean
        if proposal is not None and proposal.cov is not None:
            self.eigenvalues, self.vectors = proposal._eigen
        self.mean = self.rotate(mean)

    def at(self, index: Any) -> _Gauss:
        """Take one member of a batch, whose axes broadcast."""
        one = copy(self)
        one.mean = _member(self.mean, index, 1)
        one.eigenvalues = _member(self.eigenvalues, index, 1)
        if self.rotated:
            one.vectors = _member(self.vectors, index, 2)
        return one

    def rotate(self, x: Floats) -> Floats:
        """Coordinates along the eigenvectors."""
        if not self.rotated:
            return x
        return np.asarray((x[..., None, :] @ self.vectors)[..., 0, :])

    @property
    def curvature(self) -> Floats:
        """1 / (2 s - 1) for each eigenvalue s; 0 where the variance is infinite anyway."""
        return np.where(
            self.eigenvalues > 0.5,
            1 / np.where(self.eigenvalues > 0.5, 2 * self.eigenvalues - 1, 1.0),
            0.0,
        )

    @property
    def offset(self) -> Floats:
        """Log of the squared weights' mean at t = 0; inf where it is infinite."""
        logs = np.log1p((self.eigenvalues - 1) ** 2 * self.curvature)
        finite = np.all(self.eigenvalues > 0.5, axis=-1)
        return np.where(finite, np.sum(logs, axis=-1) / 2, math.inf)

    def quadratic(self, t: Floats) -> Floats:
        """Sum of t_i^2 / (2 s_i - 1), t along the eigenvectors."""
        return np.asarray(np.sum(t * t * self.curvature, axis=-1))


def _member(x: Floats, index: Any, core: int) -> Floats:
    """Index the batch axes of x, the axes before the last `core`, as if they were broadcast."""
    lead = x.shape[: x.ndim - core]
    index = index[len(index) - len(lead) :]
    return np.asarray(x[tuple(0 if n == 1 else i for n, i in zip(lead, index, strict=True))])


class _Pair:
    """The laws of one pair of vectors, relative to the kernel, for a coupling of frequencies."""

    def __init__(self, x: Any, y: Any, features: str, coupling: str, proposal: Any) -> None:
        x, y = _vectors(x, y)
        _validate.choice("features", features, FEATURES)
        _validate.choice("coupling", coupling, COUPLINGS)
        self.features, self.coupling, self.d = features, coupling, x.shape[-1]
        self.law = _Gauss(proposal, self.d)
        _check_known(features, coupling, self.law)
        _validate.compatible("proposal", self.law.mean, "x + y", x + y)
        if proposal is not None and proposal.gauge is not None:
            gauge = proposal.gauge[..., 0]
            _validate.compatible("proposal", gauge, "x + y", x + y)
            shape = np.broadcast_shapes(x.shape, y.shape, gauge.shape)
            x, y = (np.broadcast_to(u, shape)[..., None, :] for u in (x, y))
            x, y = (u[..., 0, :] for u in proposal.change_gauge(x, y))
        shape = np.broadcast_shapes((x + y).shape, self.law.mean.shape)[:-1]
        self.log_kappa = np.broadcast_to(_dot(x, y), shape)
        self.sum, self.difference = self.law.rotate(x + y), self.law.rotate(x - y)
        # What estimates with several frequencies depend on: |x + y - mean|^2, or |x - y|^2.
        t = self.difference if features == "trigonometric" else self.sum - self.law.mean
        self.square = _dot(t, t)

    @property
    def block(self) -> int:
        """How many frequencies depend on each other."""
        sizes = {"iid": 1, "antithetic": 2}
        return sizes.get(self.coupling, int(self.d))

    def mean(self) -> tuple[Floats, Floats]:
        """Sign and log of E estimate / kappa."""
        if self.coupling != "regularised":
            return np.ones_like(self.log_kappa), np.zeros_like(self.log_kappa)
        if self.features == "trigonometric":
            value = _mean_cosine(self.d, self.square)
            return np.sign(value), self.square / 2 + _log(np.abs(value))
        log_mean = _log_series(self.d, self.square / 4, _unit) - self.square / 2
        return np.ones_like(self.square), np.minimum(log_mean, 0.0)

    def log_bias(self) -> Floats:
        """Log of |E estimate - kappa| / kappa."""
        if self.coupling != "regularised":
            return np.full_like(self.log_kappa, -math.inf)
        if self.features != "trigonometric":
            return _log(_missing(self.d, self.square / 2, partial(_missing_norms, self.d)))
        bias = _mean_cosine(self.d, self.square, centred=True)
        return self.square / 2 + _log(np.abs(bias))

    def log_variance(self, count: int) -> Floats:
        """Log of Var / kappa^2 for a number of frequencies."""
        one = self.log_variance_of_one()
        full, rest = divmod(count, self.block)
        pairs = full * self.block * (self.block - 1) + rest * (rest - 1)
        if pairs == 0:
            return one - math.log(count)
        # V/S + pairs C / S^2 as a sum of terms >= 0: V + (b - 1) C may be far below V.
        most = count * (self.block - 1)
        ratio = np.where(one == math.inf, 1.0, self.block_ratio(one))  # infinite for any number
        return one + _log((most - pairs) / most + pairs / most * ratio) - math.log(count)

    def log_variance_of_one(self) -> Floats:
        """Log of V / kappa^2."""
        law, square = self.law, self.square
        if self.coupling == "regularised":
            if self.features == "trigonometric":
                return square + _log(_fixed_norm_variance(self.d, square))
            terms = _second_less_square if self.features == "positive" else _even_less_square
            return _log_series(self.d, square, terms) - square
        if self.features == "positive":
            return _log_expm1(law.offset + law.quadratic(self.sum - law.mean))
        base = law.offset + law.quadratic(law.mean)
        if self.features == "hyperbolic":
            tilt = _log_cosh(2 * _dot(self.sum * law.curvature, law.mean))
            return _log_expm1(
                base + _log_mean_exp(law.quadratic(self.sum) + tilt, -_dot(self.sum, self.sum))
            )
        angle = _dot(self.difference * law.curvature, law.mean)
        quadratic = law.quadratic(self.difference)
        most = _log_expm1(base + _log_mean_exp(square, -quadratic))
        finite = np.where(np.isfinite(base), base, 0.0)
        less = finite - quadratic + 2 * _log(np.abs(np.sin(angle)))
        return most + _log(np.maximum(1 - _ratio_of_exp(less, most), 0.0))

    def block_ratio(self, one: Floats) -> Floats:
        """(V + (b - 1) C) / V in a block of b; any number where V, whose log is `one`, is 0."""
        square, d = self.square, self.d
        if self.coupling == "antithetic":
            if self.features != "positive":
                return np.full_like(square, 2.0)  # features of omega and -omega are the same
            log_pair = math.log(2) + _log_expm1(
                self.law.offset
                + _log_mean_exp(self.law.quadratic(self.sum - self.law.mean), -square)
            )
            return _ratio_of_exp(log_pair, one)
        if self.coupling == "regularised":
            if self.features == "trigonometric":
                return _ratio(_fixed_norm_block(d, square), _fixed_norm_variance(d, square))
            terms = _block if self.features == "positive" else _even_block
            return _ratio_of_exp(_log_series(d, square, terms) - square, one)
        cosines = [0.0] if self.coupling == "orthogonal" else [-1 / (d - 1), 1 / (d - 1)]
        if self.features == "trigonometric":
            ratio = 2 * _ratio(_cosine_covariance(d, square, cosines), np.expm1(-square) ** 2)
        else:
            cosines = cosines[:1] if self.features == "positive" else cosines
            missing = _missing(d, square, partial(_missing_angles, d, cosines))
            ratio = -np.sign(missing) * _ratio_of_exp(_log(np.abs(missing)), one)
        return np.asarray(np.maximum(1 + (d - 1) * ratio, 0.0))


def _vectors(x: Any, y: Any) -> tuple[Floats, Floats]:
    x, y = (_validate.host(name, value, "(..., d)", 1) for name, value in (("x", x), ("y", y)))
    _validate.compatible("x", x, "y", y)
    _validate.squares("x", x)
    _validate.squares("y", y)
    return x, y


def _check_known(features: str, coupling: str, law: _Gauss) -> None:
    """Refuse what has no law in closed form."""
    if law.standard or coupling == "iid" or (features, coupling) == ("positive", "antithetic"):
        return
    s = law.eigenvalues
    isotropic = bool(np.all(np.abs(s - s[..., :1]) <= 1e-12 * s[..., :1]))
    fits = isotropic if coupling != "regularised" else bool(np.all(s == 1))
    if features != "positive" or not fits:
        raise ValueError(
            "`proposal` must be None, or for positive features have an isotropic covariance "
            f"(that of N(mean, I) if regularised): no closed form is known for {features} "
            f"features, coupling {coupling!r} and this proposal."
        )


# Functions of numbers


def _dot(x: Floats, y: Floats) -> Floats:
    return np.asarray(np.sum(x * y, axis=-1))


def _log(x: Floats) -> Floats:
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(x))


def _log_expm1(x: Floats) -> Floats:
    """log(e^x - 1) for x >= 0, to rounding."""
    return x + _log(-np.expm1(-x))


def _log_cosh(x: Floats) -> Floats:
    """log cosh x, to rounding near 0 too."""
    x = np.abs(x)
    return np.where(
        x < 1,
        np.log1p(2 * np.sinh(np.minimum(x, 1.0) / 2) ** 2),
        x + np.log1p(np.exp(-2 * x)) - math.log(2),
    )


def _log_mean_exp(a: Floats, b: Floats) -> Floats:
    """log of the mean of e^a and e^b, to rounding where a = -b is near 0."""
    return (a + b) / 2 + _log_cosh((a - b) / 2)


def _share(a: Floats, b: Floats) -> Floats:
    """a / b, or 0 where a is 0."""
    return np.asarray(a / np.where(a == 0, 1.0, b))


def _ratio(a: Floats, b: Floats) -> Floats:
    """a / b, or 0 where both are 0."""
    return np.where(b == 0, 0.0, a / np.where(b == 0, 1.0, b))


def _ratio_of_exp(a: Floats, b: Floats) -> Floats:
    """e^(a - b), or 0 where both are infinite."""
    finite = np.isfinite(a)
    return np.where(finite, np.exp(np.where(finite, a, 0.0) - np.where(finite, b, 0.0)), 0.0)


# Orthogonal and simplex blocks


def _missing_angles(d: int, cosines: list[float], order: int) -> Floats:
    """1 - rho_k, k < order, of `log_kernel_variance`, averaged over the cosines."""
    k = np.arange(order)[:, None]
    log_rho = -_sums(np.log1p(k[:, 0] / (d + k[:, 0])))[:, None]
    total = np.zeros(order)
    for excess, weight in (_angles(d, cosine) for cosine in cosines):
        total -= np.expm1(log_rho + k * np.log1p(excess)) @ weight
    if sum(cosines) == 0:
        total[1] = 0.0  # exactly: opposite cosines cancel
    return np.asarray(total / len(cosines))


def _missing_norms(d: int, order: int) -> Floats:
    """1 - prod_{i<k} d / (d + 2i), k < order, of the bias of norms sqrt(d)."""
    return -np.expm1(-_sums(np.log1p(2 * np.arange(order) / d)))


def _sums(x: Floats) -> Floats:
    """sum_{i<k} x_i for each k."""
    return np.concatenate([[0.0], np.cumsum(x)[:-1]])


def _angles(d: int, cosine: float) -> tuple[Floats, Floats]:
    """Nodes cosine sin(phi) and weights of quadrature for phi of density ~ sin^(d-1) on (0, pi)."""
    from scipy.special import roots_legendre

    if cosine == 0:
        return np.zeros(1), np.ones(1)
    x, weight = roots_legendre(256 + 8 * math.isqrt(d))
    log_sine = np.log(np.sin(np.pi * (x + 1) / 2))
    weight = weight * np.exp((d - 1) * log_sine)
    return np.maximum(cosine * np.exp(log_sine), -1 + 1e-16), weight / weight.sum()


def _missing(d: int, square: Floats, terms: Callable[[int], Floats]) -> Floats:
    """E(1 - rho_K) for K ~ Poisson(square): sums of positive terms but for rounding."""
    return _poisson_mean(np.minimum(square, 4.0 * d + 1000.0), terms)  # beyond, far below V


def _poisson_mean(u: Floats, terms: Callable[[int], Floats]) -> Floats:
    """Mean of term_K for K ~ Poisson(u)."""
    from scipy.special import gammaln, xlogy

    largest = float(np.max(u, initial=0.0))
    total = np.zeros_like(u)
    for k, term in enumerate(terms(int(largest + 12 * math.sqrt(largest)) + 64)):
        total += term * np.exp(xlogy(k, u) - u - gammaln(k + 1))
    return total


def _cosine_covariance(d: int, t: Floats, cosines: list[float]) -> Floats:
    """Mean of 1F1(d; d/2; -t (1 + c sin phi) / 2), less e^-t."""
    from scipy.special import hyp1f1

    near = np.minimum(t, 1.0)
    series, power = np.zeros_like(t), np.ones_like(t)
    for k, term in enumerate(_missing_angles(d, cosines, 40)):
        series -= term * power
        power = power * -near / (k + 1)
    far = np.maximum(t, 1.0)
    value = np.zeros_like(t)
    for excess, weight in (_angles(d, cosine) for cosine in cosines):
        for e, w in zip(excess, weight, strict=True):
            value += w / len(cosines) * hyp1f1(d, d / 2, -far * (1 + e) / 2)
    return np.where(t < 1, series, value - np.exp(-far))


# Norms sqrt(d): with F(x) = 0F1(; d/2; x), F(d s)^j is the power series whose terms are those of F,
# (d s)^k / (k! (d/2)_k), times factors; F(d s / 4)^2 has the factors tau_k, and F(d s / 2) has 2^-k


def _log_twice_tau(d: int, order: int) -> Floats:
    """log(2 tau_k) = sum_{0<i<k} log((d - 1 + 2i) / (2 (d - 1 + i))), for 0 < k < order."""
    i = np.arange(1, order)
    logs = np.log1p(-(d - 1) / (2 * (d - 1 + i)))
    return np.cumsum(logs) - logs


def _unit(d: int, order: int) -> Floats:
    """Factors of the mean, F itself."""
    return np.ones(order)


def _second_less_square(d: int, order: int) -> Floats:
    """1 - tau_k, of the variance of exp(omega . z)."""
    return np.concatenate([[0.0], 1 - np.exp(_log_twice_tau(d, order)) / 2])


def _even_less_square(d: int, order: int) -> Floats:
    """[k = 0 or 1/2] - tau_k, of the variance of cosh(omega . z)."""
    return np.concatenate([[0.0], -np.expm1(_log_twice_tau(d, order)) / 2])


def _even_block(d: int, order: int) -> Floats:
    """[k = 0 or 1/2] - tau_k - (d - 1) (tau_k - 2^-k), of V + (d - 1) C of cosh; 0 for k < 4."""
    i = np.arange(1, order)
    logs = np.log1p(i / (d - 1 + i))
    pairs = d * np.expm1(np.cumsum(logs) - logs)
    return np.concatenate([np.zeros(4), (0.5 - (1 + pairs) * 0.5**i)[3:]])


def _block(d: int, order: int) -> Floats:
    """[k > 0] - tau_k - (d - 1) (tau_k - 2^-k), of V + (d - 1) C of exp."""
    return np.asarray(_even_block(d, order) + np.append(0.0, np.full(order - 1, 0.5)))


def _log_terms(d: int, order: int) -> Floats:
    """log(d^k / (k! (d/2)_k)), k < order."""
    k = np.arange(1, order)
    return np.concatenate([[0.0], np.cumsum(np.log(d / (k * (d / 2 + k - 1))))])


def _log_series(d: int, s: Floats, factors: Callable[[int, int], Floats]) -> Floats:
    """log sum_k factor_k (d s)^k / (k! (d/2)_k), factors >= 0."""
    from scipy.special import xlogy

    order = int(math.sqrt(2 * d * float(np.max(s, initial=0.0)))) + 72
    total = np.full(np.shape(s), -math.inf)
    for k, log_term in enumerate(_log_terms(d, order) + _log(factors(d, order))):
        total = np.logaddexp(total, log_term + xlogy(k, s))
    return total


def _alternating(d: int, t: Floats, factors: Callable[[int, int], Floats]) -> Floats:
    """sum_k factor_k (-d t)^k / (k! (d/2)_k) for 0 <= t <= 2."""
    k = np.arange(40)
    terms = factors(d, 40) * np.exp(_log_terms(d, 40)) * (-1.0) ** k
    return np.asarray(np.sum(terms * t[..., None] ** k, axis=-1))


def _mean_cosine(d: int, t: Floats, *, centred: bool = False) -> Floats:
    """Mean of cos(omega . D) for |omega|^2 = d, |D|^2 = t: F(-d t / 4), less e^(-t/2) if centred.

    Up to t = 1 + d/4 the mean of 1F1(-K; d/2; d/2) over K ~ Poisson(t/2), beyond a Bessel function,
    which cannot underflow there.
    """
    from scipy.special import gammaln, jv

    def terms(order: int) -> Floats:
        values = [1.0, 0.0]
        for k in range(1, order - 1):
            values.append(k * (2 * values[k] - values[k - 1]) / (k + d / 2))
        return np.array([0.0 if centred else 1.0, *values[1:]])

    border = 1 + d / 4
    far = np.sqrt(d * np.maximum(t, border))
    bessel = np.exp(gammaln(d / 2) - (d / 2 - 1) * np.log(far / 2)) * jv(d / 2 - 1, far)
    if centred:
        bessel = bessel - np.exp(-t / 2)
    return np.where(t < border, _poisson_mean(np.minimum(t, border) / 2, terms), bessel)


def _fixed_norm_variance(d: int, t: Floats) -> Floats:
    """Variance of cos(omega . D)."""
    if d == 1:
        return np.zeros_like(t)
    series = _alternating(d, np.minimum(t, 2.0), _even_less_square)
    direct = (1 + _mean_cosine(d, 4 * t)) / 2 - _mean_cosine(d, t) ** 2
    return np.where(t < 2, series, direct)


def _fixed_norm_block(d: int, t: Floats) -> Floats:
    """The same, plus d - 1 times the covariance for two frequencies at right angles."""
    series = _alternating(d, np.minimum(t, 2.0), _even_block)
    mean_square = _mean_cosine(d, t) ** 2
    direct = (1 + _mean_cosine(d, 4 * t)) / 2 + (d - 1) * _mean_cosine(d, 2 * t) - d * mean_square
    return np.where(t < 2, series, np.maximum(direct, 0.0))
