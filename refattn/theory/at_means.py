"""Errors of estimators whose frequencies are the means of their distributions: biases alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from scipy.spatial.distance import cdist

from ..arrays import checks, frequencies
from ..arrays.library import Doubles
from ..arrays.words import with_known_keywords
from ..sampling import Gaussian
from .attention import Law
from .second_moments import KernelAttention, scaled_exp


@with_known_keywords
def target_mean_law(
    q: Any, k: Any, v: Any, *, scale: float | None = None, mask: Any = None, causal: bool = False
) -> Law:
    r"""Bias of randomized attention (RA) at the means of its distributions, ``omega="mean"``.

    .. math::
        \mathrm{out}_i = \sum_j \rho_{ij} \, v_j, \qquad
        \rho_{ij} \propto \pi_{ij} \, e^{-|k_j - \bar k_i|^2 / 2}, \qquad
        \bar k_i = \sum_j \pi_{ij} \, k_j

    with pi_ij = softmax_j(q_i . k_j): xi(k_j, q_i + kbar_i) is e^(q_i . k_j - |k_j - kbar_i|^2/2)
    times what does not depend on j. So the bias is Cov(e^(-D), v) / E[e^(-D)] under pi_i, with D
    half the squared distance of a key from the mean key. It is 0 if all keys have one distance, and
    -Cov(D, v) to first order in D.

    Parameters
    ----------
    q, k, v, scale, mask, causal
        As in `attention_law`.

    Returns
    -------
    Law
        Exact bias; the variance is 0 and ess inf, since nothing is drawn. Takes time O(n m d).

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import theory
    >>> q, k = np.zeros((1, 1)), np.array([[-1.0], [-1.0], [2.0]])
    >>> theory.target_mean_law(q, k, k + 1, scale=1.0).bias.round(4)  # 3 / (1 + 2 e^(3/2)) - 1
    array([[-0.6989]])
    """
    problem = KernelAttention(q, k, v, scale=scale, mask=mask, causal=causal)

    def loss(share: Doubles, q_i: Doubles, k_h: Doubles, index: Any) -> Doubles:
        return np.asarray(cdist(share @ k_h, k_h, "sqeuclidean") / 2)

    return _bias_of(problem, loss)


@with_known_keywords
def proposal_means_law(
    q: Any,
    k: Any,
    v: Any,
    *,
    means: Gaussian,
    weighting: Literal["balance", "own"] = "balance",
    scale: float | None = None,
    mask: Any = None,
) -> Law:
    r"""Bias to which LARA at the means of its proposals tends with their number C.

    .. math::
        \mathrm{out}_i \to \sum_j \rho_{ij} \, v_j, \qquad
        \log \rho_{ij} = q_i \cdot k_j - (q_i - \mu)^T R \, k_j - \tfrac12 k_j^T R \, k_j + a_i,
        \qquad R = (I + \Sigma + \Sigma^2)^{-1}

    if the means mu_c of the proposals N(mu_c, I) are independent draws from N(mu, Sigma), and
    omega_c = mu_c. With the weighting ``"own"``, R = (I + Sigma)^{-1}. The weights of the samples
    assume omega_c = mu_c + z, and so density N(mu, Sigma + I): the limit is an integral over a
    density that is too narrow. So the error does not vanish with C, however large, but with Sigma:
    R is 0 for means that are far apart, and I for equal ones, whose result is the same for all
    queries.

    Parameters
    ----------
    q, k, v, scale, mask
        As in `attention_law`.
    means : sampling.Gaussian
        Distribution N(mu, Sigma) of the means of proposals, in kernel coordinates. If it has a
        gauge, that is applied to q and k first.
    weighting : {"balance", "own"}
        As in `linear_randomized_attention`.

    Returns
    -------
    Law
        The limit of the bias; the variance is 0 and ess inf. **Asymptotic** in C.

    Raises
    ------
    TypeError, ValueError
        As in `attention_law`; if `means` is no Gaussian over vectors of length d.

    Notes
    -----
    By the law of large numbers sum_c F(mu_c) / C tends to the integral of F N(mu, Sigma), for
    the sums over proposals in numerator, normaliser and mixture. With N(mu, Sigma + I) for the
    mixture the integrand over omega is Gaussian, of precision Sigma^-1 - (Sigma + I)^-1 + I =
    (I - R)^-1.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import sampling, theory
    >>> q, k, v = np.ones((1, 1)), np.array([[0.0], [1.0]]), np.array([[0.0], [1.0]])
    >>> for variance in (1e-9, 1.0, 1e9):
    ...     means = sampling.Gaussian(np.zeros(1), np.full((1, 1), variance))
    ...     print(theory.proposal_means_law(q, k, v, means=means, scale=1.0).bias.round(4))
    [[-0.3535]]
    [[-0.1086]]
    [[0.]]
    """
    checks.choice("weighting", weighting, ("balance", "own"))
    if not isinstance(means, Gaussian):
        raise TypeError(f"`means` must be a Gaussian, got {checks.describe(means)}.")
    frequencies.over("means", means, checks.host("q", q, "(..., n, d)", 2).shape[-1])
    problem = KernelAttention(q, k, v, scale=scale, mask=mask, proposal=means)
    spread, ways = means.eigen
    spread = 1 + spread + (spread**2 if weighting == "balance" else 0.0)
    lost = (ways / spread[..., None, :]) @ np.swapaxes(ways, -1, -2)
    mu, lost = (
        np.broadcast_to(x, (*problem.lead, *x.shape[x.ndim - axes :]))
        for x, axes in ((means.mean, 1), (lost, 2))
    )

    def loss(share: Doubles, q_i: Doubles, k_h: Doubles, index: Any) -> Doubles:
        head = problem.query_head(index[:-1])
        turned = k_h @ lost[head]
        return np.asarray((q_i - mu[head]) @ turned.T + np.sum(turned * k_h, axis=-1) / 2)

    return _bias_of(problem, loss)


def _bias_of(problem: KernelAttention, loss: Callable[..., Doubles]) -> Law:
    """Return the bias where scores are less by what is lost of each, (r, m)."""
    bias = np.zeros(problem.shape)
    for index, scores, values, q_i, k_h in problem.blocks(centred=True):
        weights, _ = scaled_exp(scores - loss(np.exp(scores), q_i, k_h, index))
        total = np.sum(weights, axis=-1, keepdims=True)
        share = weights / np.where(total == 0, 1.0, total)
        bias[index] = np.sum(values * share[:, None, :], axis=-1)
    bias = problem.ungroup(bias)
    law = Law(bias, np.zeros_like(bias), np.full(bias.shape[:-1], math.inf))
    return law.in_units(problem.unit)
