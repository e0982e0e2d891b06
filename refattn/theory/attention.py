"""Predicted bias, variance and effective sample size of each output of estimated attention."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Self

import numpy as np

from ..arrays import checks
from ..arrays.library import Doubles
from ..arrays.shown import held
from ..arrays.words import with_known_keywords
from ..sampling import Gaussian
from .elementary import quotient
from .second_moments import KernelAttention, PairSums, sum_pairs, unit_of

LARGE_SAMPLE = 10.0  # effective samples from which terms of order 1/S^2 matter little


@held()
class Law(NamedTuple):
    """The predicted bias and variance of estimated attention.

    Attributes
    ----------
    bias : numpy.ndarray, shape (..., n, d_v)
        Mean of the output minus exact attention.
    variance : numpy.ndarray, shape (..., n, d_v)
        Variance of the output.
    ess : numpy.ndarray, shape (..., n)
        Effective sample size S / E[w^2] of the importance weights w, normalised to mean 1.
    """

    bias: Doubles
    variance: Doubles
    ess: Doubles

    @property
    def in_regime(self) -> Any:
        """Whether the formulas are reliable: ess >= 10, shape (..., n)."""
        return self.ess >= LARGE_SAMPLE

    def in_units(self, unit: Doubles) -> Self:
        """Return the prediction for values that are multiplied by `unit`."""
        with np.errstate(over="ignore"):
            return self._replace(bias=self.bias * unit, variance=self.variance * unit * unit)


class ExactLaw(Law):
    """Predicted bias and variance that hold for every number of samples: all weights are equal."""

    @property
    def in_regime(self) -> Any:
        """True, shape (..., n)."""
        return np.ones(self.ess.shape, dtype=bool)


class VarianceBound(Law):
    """The bias, and an upper bound on the variance, for every number of samples."""

    @property
    def in_regime(self) -> Any:
        """True, shape (..., n)."""
        return np.ones(self.ess.shape, dtype=bool)


@with_known_keywords
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

    with mu_i the exact output, Z_i = sum_j exp(q_i . k_j) and E_ijj' the second moments E_q[w^2
    xi(q_i)^2 xi(k_j) xi(k_j')] of iid positive features xi(x, omega) = exp(omega . x - |x|^2/2),
    weighted by w = N(0, I) / q. For N(0, I) itself E_ijj' = exp(|q|^2 + 2 q.k_j + 2 q.k_j' +
    k_j.k_j').

    **Asymptotic**: holds once the effective sample size S Z_i^2 / sum_jj' E_ijj' is large
    (`Law.in_regime`); the result includes this size. Real queries and keys may need more samples
    than can be drawn; then the result shows only that. v_j - mu_i is known to eps |v|: a weight
    softmax_j(q_i . k_j) within eps of 1 counts as 1.

    Parameters
    ----------
    q, k, v : array_like, shape (..., n, d), (..., m, d), (..., m, d_v)
        Queries, keys and values; see `attend` for broadcasting and grouped heads.
    num_features : int
        Number S of independent frequencies.
    proposal : sampling.Gaussian, optional
        Distribution of the frequencies, N(0, I) by default.
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
    checks.positive_integer("num_features", num_features)
    problem = KernelAttention(q, k, v, scale=scale, mask=mask, causal=causal, proposal=proposal)
    sums = sum_pairs(problem, centred=True)
    return first_order(sums, num_features).in_units(sums.unit)


def first_order(sums: PairSums, num_features: int) -> Law:
    """Return the law of `attention_law`, in units of the size of the values."""
    bias, variance = -sums.cross / num_features, sums.square / num_features
    return Law(bias, variance, num_features / sums.weight)


@with_known_keywords
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
    be observed. It is a difference, with rounding errors of order eps (S Var + mu_i^2) / S: if
    outputs are large compared with their spread, it may be nothing but rounding.

    Parameters
    ----------
    q, k, v, num_features, proposal, scale, mask, causal
        As in `attention_law`.

    Returns
    -------
    Law
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
    checks.positive_integer("num_features", num_features)
    problem = KernelAttention(q, k, v, scale=scale, mask=mask, causal=causal, proposal=proposal)
    sums = sum_pairs(problem, centred=False)
    variance = np.maximum(sums.square - sums.mean**2, 0.0) / num_features
    law = Law(np.zeros_like(variance), variance, num_features / sums.weight)
    return law.in_units(sums.unit)


@with_known_keywords
def randomized_attention_law(
    q: Any,
    k: Any,
    v: Any,
    *,
    num_samples: int,
    scale: float | None = None,
    mask: Any = None,
    causal: bool = False,
) -> VarianceBound:
    r"""Bias of randomized attention (RA), and a bound on its variance, for every S.

    .. math::
        \mathrm{Bias}[\mathrm{out}_i] = 0, \qquad
        \mathrm{Var}[\mathrm{out}_i] = \frac1S \mathrm{Var}_{p_i}(f_i)
            \le \frac1S \mathrm{Var}_{\pi_i}(v) = \frac1S \sum_j \pi_{ij} (v_j - \mu_i)^2

    f_i is the mean of v given omega, if a key is drawn from pi_i and omega from the component of
    that key in p_i; so its variance is at most that of v. `variance` is the bound, which is reached
    in the limit of keys that are far apart.

    Parameters
    ----------
    q, k, v, scale, mask, causal
        As in `attention_law`.
    num_samples : int
        Number S of samples for each query.

    Returns
    -------
    VarianceBound
        As in `attention_law`, but in time O(n m (d + d_v)) and without the memory for pairs of
        keys; ess is S, since all weights are equal. The variance itself is less: on
        `load_sample`, in sums over queries and columns, a quarter to a half of the bound.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import theory
    >>> q, k, v = np.zeros((1, 1)), np.array([[-0.5], [0.5]]), np.array([[-1.0], [1.0]])
    >>> theory.randomized_attention_law(q, k, v, num_samples=4).variance
    array([[0.25]])
    """
    checks.positive_integer("num_samples", num_samples)
    problem = KernelAttention(q, k, v, scale=scale, mask=mask, causal=causal)
    variance = np.zeros(problem.shape)
    for index, scores, values, _, _ in problem.blocks(centred=True):
        share = np.exp(scores)[..., None, :]
        variance[index] = np.sum(share * values**2, axis=-1)
    variance = problem.ungroup(variance) / num_samples
    law = VarianceBound(
        np.zeros_like(variance), variance, np.full(variance.shape[:-1], float(num_samples))
    )
    return law.in_units(problem.unit)


@with_known_keywords
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
) -> Doubles:
    r"""Find how many frequencies bring the relative error of RFA or SNIS to a target.

    .. math::
        S = \left\lceil \frac{V + \sqrt{V^2 + 4 T B}}{2 T} \right\rceil, \qquad
        T = \mathrm{target}^2 \sum_{ic} \mu_{ic}^2

    with V/S the sum over queries and columns of the variances of `attention_law` and B/S^2 that
    of the squared biases: the inverse of `relative_error`.

    **Asymptotic**, as `attention_law`. If the formula is not valid at this number, the number is
    raised until the harmonic mean of the queries' effective sample sizes is at least 10. This may
    be far more than a measured error needs.

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
        Whole numbers, one for each head; inf if the predicted error is infinite.

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
    target = checks.real("target_error", target_error, positive=True)
    problem = KernelAttention(q, k, v, scale=scale, mask=mask, causal=causal, proposal=proposal)
    sums = sum_pairs(problem, centred=True)
    law = first_order(sums, 1)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        regime = LARGE_SAMPLE * np.mean(1 / law.ess, axis=-1)
    return np.asarray(np.maximum(features_to_reach(target, law, sums.mean), _whole(regime)))


def features_to_reach(target: float, law: Law, exact: Doubles) -> Doubles:
    """Find the S at which the law of one sample gives the target, even if it does not hold there.

    The inverse of `relative_error`, see `num_features_for`.
    """
    unit = unit_of(exact)
    law, exact = law.in_units(1 / unit), exact / unit
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        total = np.sum(law.variance, axis=(-2, -1))
        squared_bias = np.sum(law.bias**2, axis=(-2, -1))
        room = target * np.sqrt(np.sum(exact**2, axis=(-2, -1)))  # the root of T
        variance, bias = (
            quotient(quotient(total, room), room),
            quotient(np.sqrt(squared_bias), room),
        )
        count = (variance + np.hypot(variance, 2 * bias)) / 2
    return _whole(count)


def features_to_hold(law: Law) -> Doubles:
    """Find the S from which the law of one sample holds for every query: `Law.in_regime`."""
    with np.errstate(over="ignore", divide="ignore"):
        count = np.where(law.in_regime, 1.0, LARGE_SAMPLE / law.ess)
    return _whole(np.max(count, axis=-1, initial=1.0))


def _whole(count: Doubles) -> Doubles:
    """Round up; a whole number that rounding has raised does not become the next one."""
    with np.errstate(invalid="ignore"):
        count = np.ceil(count * (1 - 1e-12))
    return np.where(np.isfinite(count), np.maximum(count, 1.0), math.inf)


def relative_error(law: Law, exact: Any) -> Doubles:
    r"""Compute the relative error to expect of each head, from predicted bias and variance.

    .. math::
        \sqrt{\sum_{ic} (\mathrm{variance}_{ic} + \mathrm{bias}_{ic}^2) / \sum_{ic} \mu_{ic}^2}

    Parameters
    ----------
    law : Law
        Predicted bias and variance of the estimate.
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
        If `exact` is not finite, or does not have the shape of `law`.

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
    exact = checks.host("exact", exact, "(..., n, d_v)", 2)
    if exact.shape != law.variance.shape:
        raise ValueError(
            f"`exact` must have the shape of `law.variance`, {law.variance.shape}, "
            f"got {exact.shape}."
        )
    unit = unit_of(exact)
    law, exact = law.in_units(1 / unit), exact / unit
    with np.errstate(over="ignore"):
        squares = np.sum(law.variance + law.bias**2, axis=(-2, -1))
    with np.errstate(divide="ignore"):
        return np.asarray(np.sqrt(quotient(squares, np.sum(exact**2, axis=(-2, -1)))))
