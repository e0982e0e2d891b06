r"""Randomized attention (RA), as its formula."""

from __future__ import annotations

from typing import Literal

from ..arrays.heads import broadcast_lead
from ..arrays.library import Array
from ..typing import ArrayT
from .doors import formula, positive_scale, query_frequencies, shared_frequencies
from .terms import (
    average,
    half_square_norm,
    hide,
    kernel_coordinates,
    products,
    softmax,
    visible,
    weighted_sum,
    xp,
)


@formula(query_frequencies, positive_scale)
def randomized_attention(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    *,
    omega: Array | Literal["mean"],
    scale: float | None = None,
    mask: Array | None = None,
    causal: bool = False,
) -> ArrayT:
    r"""Estimate softmax attention by randomized attention (RA).

    .. math::
        \mathrm{out}_i = \frac1S \sum_s f_i(\omega_{is}), \qquad
        f_i(\omega) = \frac{\sum_j \xi(k_j, \omega) \, v_j}{\sum_j \xi(k_j, \omega)}

    over the keys j that query i sees. Zheng et al., arXiv:2204.04667; Zheng 2022, RA, for
    omega_is drawn from p_i = sum_j softmax_j(q_i . k_j) N(q_i + k_j, I).

    Parameters
    ----------
    q, k, v, scale, mask, causal
        As in `random_feature_attention`.
    omega : array, shape (..., n, S, d), or "mean"
        Frequencies of each query, in kernel coordinates; or one, the mean of p_i, which is q_i plus
        the mean of the keys by softmax_j(q_i . k_j).

    Returns
    -------
    array, shape (..., n, d_v)
        Same namespace, dtype and device as `q`. Rows that see no key are 0.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import naive
    >>> q, k, v = np.array([[9.0]]), np.array([[-1.0], [1.0]]), np.array([[0.0], [1.0]])
    >>> naive.randomized_attention(q, k, v, omega=np.array([[[0.5]]]))  # e / (1 + e)
    array([[0.73105858]])
    """
    d, seen = q.shape[-1], visible(q, k, mask=mask, causal=causal)
    q, k = kernel_coordinates(q, scale), kernel_coordinates(k, scale)
    if isinstance(omega, str):
        omega = q + average(products(q, k), k, seen)
    omega = xp.reshape(omega, (*omega.shape[:-1], omega.shape[-1] // d, d))
    return _mean_of_ratios(q, k, v, omega, seen)


@formula(shared_frequencies, positive_scale)
def mean_of_ratios_attention(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    *,
    omega: Array,
    scale: float | None = None,
    mask: Array | None = None,
    causal: bool = False,
) -> ArrayT:
    r"""Average estimates from one random feature each, at frequencies that all queries share.

    .. math:: \mathrm{out}_i = \frac1S \sum_s f_i(\omega_s)

    with f_i as in `randomized_attention`. Ye 2023, eq. (12), for omega_s drawn from N(0, I).

    Parameters
    ----------
    q, k, v, omega, scale, mask, causal
        As in `random_feature_attention`.

    Returns
    -------
    array, shape (..., n, d_v)
        Same namespace, dtype and device as `q`. Rows that see no key are 0.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import naive
    >>> q, k, v = np.array([[9.0]]), np.array([[-1.0], [1.0]]), np.array([[0.0], [1.0]])
    >>> naive.mean_of_ratios_attention(q, k, v, omega=np.array([[0.5], [-0.5]]))
    array([[0.5]])
    """
    seen = visible(q, k, mask=mask, causal=causal)
    k, omega = kernel_coordinates(k, scale), omega[..., None, :, :]
    return _mean_of_ratios(q, k, v, omega, seen)


def _mean_of_ratios(q: Array, k: Array, v: Array, omega: Array, seen: Array) -> Array:
    """Mean over s of sum_j xi(k_j, omega_is) v_j / sum_j xi(k_j, omega_is), omega (..., n, S, d).

    The values are the same for each s, so that the mean may be that of the weights.
    """
    k = k[..., None, :, :]
    scores = products(omega, k) - half_square_norm(k)
    out = weighted_sum(xp.mean(softmax(hide(scores, seen[..., None, :])), axis=-2), v, seen)
    return xp.broadcast_to(out, (*broadcast_lead(q, out), *out.shape[-2:]))
