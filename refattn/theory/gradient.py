"""Predicted noise that random features add to the gradients of training."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..arrays import checks
from ..arrays.library import Doubles
from ..arrays.words import with_known_keywords
from ..sampling import Gaussian
from .attention import Law
from .second_moments import KernelAttention, PairWeights, factor_pairs, scaled_exp, times_exp


@with_known_keywords
def gradient_law(
    q: Any,
    k: Any,
    v: Any,
    d_out: Any,
    *,
    num_features: int,
    proposal: Gaussian | None = None,
    scale: float | None = None,
    mask: Any = None,
    causal: bool = False,
) -> Law:
    r"""Bias and variance of gradients of RFA and SNIS in queries, to first order in 1/S.

    The derivative of the estimate is a covariance of frequencies and values, under weights that
    estimate p_i / q and sum to 1; the gradient of exact attention is this covariance under p_i.
    With :math:`\bar g` the cotangent of the output, :math:`u_j = \bar g_i \cdot (v_j - \mu_i)`
    and :math:`\bar q_i = \sum_j \pi_{ij} u_j k_j` the exact gradient,

    .. math::
        \mathrm{Var}[\hat q_{ic}] \approx \frac1S \sum_{jj'} \frac{E_{ijj'}}{Z_i^2}
            \bigl((\Delta_c^2 + C_{cc}) u_j u_{j'} - \bar q_{ic} \Delta_c (u_j + u_{j'})
                  + \bar q_{ic}^2\bigr), \qquad
        \mathrm{Bias}[\hat q_{ic}] \approx \frac1S \sum_{jj'} \frac{E_{ijj'}}{Z_i^2}
            \bigl(\bar q_{ic} - \Delta_c (u_j + u_{j'})\bigr)

    with E_ijj' and Z_i as in `attention_law`. Under the squared weights of a pair of keys omega is
    Gaussian with mean :math:`m_{ijj'}` and covariance C, and
    :math:`\Delta = m_{ijj'} - q_i - \sum_j \pi_{ij} k_j`; for N(0, I) the mean is 2 q + k + k' and
    C the identity.

    Derived by the delta method from the formula of SNIS in Zheng 2022 (see `refattn.naive`).
    **Asymptotic**, and slower to converge than `attention_law`, because squares of frequencies
    matter: at 200 effective samples the variance may still be half of this, and at 4,000 nine
    tenths.

    Parameters
    ----------
    q, k, v, num_features, proposal, scale, mask, causal
        As in `attention_law`.
    d_out : array_like, shape (..., n, d_v)
        Cotangent of the output.

    Returns
    -------
    Law
        `bias` and `variance` have the shape of the gradient, (..., n, d), for queries as they are
        given, not in kernel coordinates; leading axes are those of the output. Takes time
        O(n m^2 d). A query that sees no key has bias and variance 0.

    Raises
    ------
    TypeError, ValueError
        As in `attention_law`, and if `d_out` does not have the shape of the output.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import theory
    >>> q, k, v = np.zeros((1, 1)), np.array([[-0.5], [0.5]]), np.array([[-1.0], [1.0]])
    >>> law = theory.gradient_law(q, k, v, np.ones((1, 1)), num_features=100, scale=1.0)
    >>> law.variance.round(4)
    array([[0.0051]])
    """
    checks.positive_integer("num_features", num_features)
    problem = KernelAttention(q, k, v, scale=scale, mask=mask, causal=causal, proposal=proposal)
    d_out = checks.host("d_out", d_out, "(..., n, d_v)", 2)
    if d_out.shape != problem.mean.shape:
        raise ValueError(
            f"`d_out` must have the shape of the output, {problem.mean.shape}, got {d_out.shape}."
        )
    shape = (*problem.shape[:-1], problem.d)
    bias, variance, weight = np.zeros(shape), np.zeros(shape), np.ones(shape[:-1])
    cotangent = d_out.reshape(problem.shape)
    for some in factor_pairs(problem, centred=True):
        g = cotangent[some.index]
        u = np.sum(some.values * g[..., None], axis=1)
        ways = some.head.rotate(problem.ways(some.index[:-1]).T).T  # (d, d), in columns
        *head, queries = some.index
        for row, i in enumerate(range(queries.start, queries.stop)):
            at = (*head, i)
            if np.any(np.isfinite(some.scores[row])):
                bias[at], variance[at], weight[at] = _sum_query(some, ways, row, u[row])
    bias, variance = (problem.ungroup(x) / num_features for x in (bias, variance))
    law = Law(bias, variance, num_features / problem.ungroup(weight, core=1))
    return law.in_units(problem.unit)


def _sum_query(some: PairWeights, ways: Doubles, row: int, u: Doubles) -> tuple[Any, Any, Any]:
    """Sum bias, variance (d,) and mean square of the weights of one query, for one frequency."""
    share = np.exp(some.scores[row])
    key_mean = share @ some.key
    apart = some.key - key_mean
    spread = some.head.spread
    q_bar = (share * u) @ (apart @ ways)
    # Delta of a pair is near + off_j + off_j'.
    middle = spread * (2 * (some.q[row] + key_mean) - some.head.mean / some.head.eigenvalues)
    near = (middle - some.q[row] - key_mean) @ ways
    off = (apart * spread) @ ways
    cov = np.sum(ways * ways * spread[:, None], axis=0)
    b, peak = scaled_exp(some.log_b[row])
    x, peak_u = scaled_exp(np.where(u != 0, some.log_b[row], -math.inf))
    x = x * u
    x_off, b_off, gram_x, gram_b = x[:, None] * off, b[:, None] * off, some.gram @ x, some.gram @ b
    both = x @ gram_x
    square = (near * near + cov) * both + 4 * near * (gram_x @ x_off)
    square += 2 * (gram_x @ (x_off * off)) + 2 * np.sum(x_off * (some.gram @ x_off), axis=0)
    cross = 2 * (near * (x @ gram_b) + gram_b @ x_off + gram_x @ b_off)
    height = some.height[row]
    square, cross = times_exp(height + 2 * peak_u, square), times_exp(height + peak + peak_u, cross)
    weight = times_exp(height + 2 * peak, np.atleast_1d(b @ gram_b))[0]
    variance = np.maximum(square - q_bar * cross + q_bar * q_bar * weight, 0.0)
    return q_bar * weight - cross, variance, weight
