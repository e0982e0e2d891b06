r"""Random-feature attention (RFA) and importance-sampled attention, as their formulas."""

from __future__ import annotations

from ..arrays.library import Array, constant
from ..typing import ArrayT, Features
from .doors import formula, lags, named_features, positive_scale, shared_frequencies
from .terms import (
    average,
    finite,
    half_square_norm,
    hide,
    kernel_coordinates,
    log_kernel,
    log_sum_exp,
    products,
    ratio,
    visible,
    weighted_sum,
    xp,
)


@formula(named_features, shared_frequencies, positive_scale, lags)
def random_feature_attention(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    *,
    omega: Array,
    log_weight: Array | None = None,
    features: Features = "positive",
    scale: float | None = None,
    bias: Array | None = None,
    mask: Array | None = None,
    causal: bool = False,
) -> ArrayT:
    r"""Estimate softmax attention from random features of the softmax kernel (RFA, Performer).

    .. math::
        \mathrm{out}_i = \frac{\sum_j \hat\kappa_{ij} \, v_j}{\sum_j \hat\kappa_{ij}}, \qquad
        \hat\kappa_{ij} = e^{\mathrm{bias}_{n-1+j-i}} \sum_s w_s \, \phi_s(q_i) \cdot \phi_s(k_j)

    over the keys j that query i sees. Up to factors of the query alone, which cancel,
    phi_s(q) . phi_s(k) is

    * ``"positive"``: exp(omega_s . (q + k) - |k|^2/2);
    * ``"hyperbolic"``: cosh(omega_s . (q + k)) exp(-|k|^2/2);
    * ``"trigonometric"``: cos(omega_s . (q - k)) exp(|k|^2/2).

    Peng et al., arXiv:2103.02143 (RFA, trigonometric); Choromanski et al., arXiv:2009.14794
    (Performer, positive and hyperbolic). Random features post, KernelizedAttention; Performers
    post, attention_hat; Ye 2023, eqs. (7) to (10); Zheng 2022, RFA.

    Parameters
    ----------
    q, k, v, mask, causal
        As in `softmax_attention`.
    omega : array, shape (..., S, d)
        Frequencies, in kernel coordinates: a NumPy array or one of the library of `q`.
    log_weight : array, shape (..., S), optional
        log w, 0 by default.
    features : {"positive", "hyperbolic", "trigonometric"}
        The feature map.
    scale : float, optional
        Factor on q . k, 1 / sqrt(d) by default, positive.
    bias : array, shape (..., n + m - 1), dtype of `q`, optional
        Bias by lag, 0 by default.

    Returns
    -------
    array, shape (..., n, d_v)
        Same namespace, dtype and device as `q`. Rows that see no key are 0.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import naive
    >>> q, k, v = np.array([[9.0]]), np.array([[0.0], [1.0]]), np.array([[0.0], [1.0]])
    >>> naive.random_feature_attention(q, k, v, omega=np.array([[0.5]]))
    array([[0.5]])
    """
    seen = visible(q, k, mask=mask, causal=causal)
    q, k = kernel_coordinates(q, scale), kernel_coordinates(k, scale)
    if features == "positive":
        return average(log_kernel(q, k, omega, log_weight) + bias, v, seen)
    half, log_weight = half_square_norm(k), xp.expand_dims(log_weight, axis=-2)
    z_q, z_k = products(q, omega)[..., :, None, :], products(k, omega)[..., None, :, :]
    if features == "hyperbolic":
        log_terms = log_weight + xp.logaddexp(z_q + z_k, -(z_q + z_k))
        return average(log_sum_exp(log_terms)[..., 0] - half + bias, v, seen)
    weight = xp.exp(log_weight - xp.max(log_weight, axis=-1, keepdims=True))
    return ratio(xp.sum(weight * xp.cos(z_q - z_k), axis=-1), half + bias, v, seen)


@formula(shared_frequencies, positive_scale)
def importance_sampled_attention(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    *,
    omega: Array,
    log_weight: Array | None = None,
    scale: float | None = None,
    mask: Array | None = None,
    causal: bool = False,
) -> ArrayT:
    r"""Estimate softmax attention by importance sampling with the exact normaliser (IS).

    .. math::
        \mathrm{out}_i = \frac{\sum_j \hat\kappa_{ij} \, v_j}{\sum_j e^{q_i \cdot k_j}}, \qquad
        \hat\kappa_{ij} = \frac1S \sum_s w_s \, \xi(q_i, \omega_s) \, \xi(k_j, \omega_s)

    over the keys j that query i sees. Zheng et al., arXiv:2204.04667; Ye 2023, eq. (11);
    Zheng 2022, importance sampling, where the ratio p_i / N(0, I) at omega is
    xi(q_i, omega) sum_j xi(k_j, omega) over the normaliser above.

    Parameters
    ----------
    q, k, v, omega, log_weight, scale, mask, causal
        As in `random_feature_attention`.

    Returns
    -------
    array, shape (..., n, d_v)
        Same namespace, dtype and device as `q`. Rows that see no key are 0.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import naive
    >>> zero, v = np.zeros((1, 1)), np.array([[3.0]])
    >>> naive.importance_sampled_attention(zero, zero, v, omega=np.ones((4, 1)))
    array([[3.]])
    """
    seen = visible(q, k, mask=mask, causal=causal)
    q, k = kernel_coordinates(q, scale), kernel_coordinates(k, scale)
    log_size = xp.log(constant(omega.shape[-2], q))
    log_factor = xp.matrix_transpose(half_square_norm(q)) + log_size
    log_ratio = log_kernel(q, k, omega, log_weight) - log_factor
    log_exact = log_sum_exp(hide(products(q, k), seen))
    return weighted_sum(xp.exp(log_ratio - finite(log_exact)), v, seen)
