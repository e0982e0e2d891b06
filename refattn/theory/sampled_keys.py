"""Predicted bias and variance of attention to a sample of keys."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays import checks, qkv
from ..arrays.library import Doubles
from ..arrays.words import with_known_keywords
from ..typing import KEY_LAWS, KeyLaw
from .attention import ExactLaw, Law
from .second_moments import KernelAttention


@with_known_keywords
def sampled_keys_law(
    q: Any,
    k: Any,
    v: Any,
    *,
    num_samples: int,
    draws: KeyLaw = "softmax",
    scale: float | None = None,
    mask: Any = None,
) -> Law:
    r"""Bias and variance of attention to S keys, each drawn independently from all keys.

    .. math::
        \mathrm{Var}[\mathrm{out}_i] \approx \frac1S
            \sum_j \frac{\pi_{ij}^2}{r_{ij}} (v_j - \mu_i)^2, \qquad
        \mathrm{Bias}[\mathrm{out}_i] \approx -\frac1S
            \sum_j \frac{\pi_{ij}^2}{r_{ij}} (v_j - \mu_i)

    with pi_i the softmax of query i, mu_i = sum_j pi_ij v_j the exact output, and r_ij the
    probability of key j in each draw: `sampled_key_attention` with p_ij = S r_ij. The covariance of
    two columns has the product of their v_j - mu_i in place of the square.

    For keys from the softmax itself, r = pi, weights are all equal and the formulas are exact for
    every S: no bias, and the covariance Cov_pi(v) / S. For other draws they are of first order in
    1/S, as for self-normalised importance sampling, and hold once the effective sample size
    S / sum_j pi_ij^2 / r_ij is large (`Law.in_regime`). They do not hold for
    `key_sampling.draw_keys`, which draws such keys without replacement.

    Parameters
    ----------
    q, k, v, scale
        As in `attention_law`: shapes (..., n, d), (..., m, d), (..., m, d_v).
    num_samples : int
        Number S of keys in a sample, counting repetitions.
    draws : {"softmax", "uniform", "norms"}
        Each key is drawn with probability

        * ``"softmax"``: pi_ij, which differs between queries;
        * ``"uniform"``: 1/m;
        * ``"norms"``: (abs(v_j)^2 / sum_l abs(v_l)^2 + 1/m) / 2.
    mask : array_like of bool, broadcasting to (..., n, m), optional
        True where the query attends to the key. The mask is the same for all queries, (..., 1, m),
        unless keys are drawn from the softmax. No hidden key is drawn, and m counts visible keys.

    Returns
    -------
    Law
        float64 NumPy arrays, an `ExactLaw` if keys are drawn from the softmax. A query that sees no
        key has bias and variance 0 and ess S.

    Raises
    ------
    TypeError, ValueError
        As in `attention_law`, and if `draws` is unknown, or the mask differs between queries where
        it must not.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import theory
    >>> q, k, v = np.zeros((1, 1)), np.zeros((4, 1)), np.array([[0.0], [0.0], [0.0], [4.0]])
    >>> theory.sampled_keys_law(q, k, v, num_samples=3).variance  # (3 + 9) / 4 / 3
    array([[1.]])
    >>> law = theory.sampled_keys_law(q, k, v, num_samples=30, draws="norms")
    >>> law.bias.round(6), law.ess.round(6)
    (array([[0.04]]), array([18.75]))
    """
    checks.positive_integer("num_samples", num_samples)
    checks.choice("draws", draws, KEY_LAWS)
    problem = KernelAttention(q, k, v, scale=scale, mask=mask)
    exact = draws == "softmax"
    rate = None if exact else _rates(problem, draws)
    bias, variance = np.zeros(problem.shape), np.zeros(problem.shape)
    weight = np.ones(problem.shape[:-1])
    for index, scores, values, _, _ in problem.blocks(centred=True):
        share = np.exp(scores)
        if rate is not None:
            # No rate is below 1 / 2m, so that nothing overflows.
            share = share * np.exp(scores - np.log(rate[index[:-1]]))
            seen = np.any(np.isfinite(scores), axis=-1)
            weight[index] = np.where(seen, share.sum(-1), 1.0)
            bias[index] = -np.sum(share[:, None, :] * values, axis=-1)
        variance[index] = np.sum(share[:, None, :] * values**2, axis=-1)
    bias, variance = (problem.ungroup(x) / num_samples for x in (bias, variance))
    ess = num_samples / problem.ungroup(weight, core=1)
    return (ExactLaw if exact else Law)(bias, variance, ess).in_units(problem.unit)


def _rates(problem: KernelAttention, draws: str) -> Doubles:
    """Probability of each key in a draw, (..., m), and 1 where it is hidden from all."""
    *lead, _, _ = problem.shape
    m = problem.k.shape[-2]
    mask = qkv.one_row(problem.mask, problem.k)
    seen = np.broadcast_to(True if mask is None else mask[..., 0, :], (*lead, m))
    share = 1 / np.maximum(np.sum(seen, axis=-1, keepdims=True), 1)
    if draws == "norms":
        norms = np.where(seen, np.sum(problem.v**2, axis=-1), 0.0)
        total = np.sum(norms, axis=-1, keepdims=True)
        some = total > 0
        share = np.where(some, (share + norms / np.where(some, total, 1.0)) / 2, share)
    return np.where(seen, share, 1.0)
