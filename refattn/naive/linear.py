r"""Linear attention with elu + 1, other features, and ReLU of a projection, as formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..arrays.library import Array
from ..typing import ArrayT
from .doors import (
    added_to_features,
    features_of_rows,
    formula,
    lags,
    positive_scale,
    shared_frequencies,
)
from .terms import kernel_coordinates, of_library, products, ratio, visible, xp


@of_library
def elu_plus_one(x: Array) -> Array:
    r"""Map vectors to elu(x) + 1, elementwise.

    .. math:: \phi(x) = x + 1 \;(x > 0), \qquad e^x \;(x \le 0)

    Katharopoulos et al., arXiv:2006.16236; Linear attention post, phi, but with alpha = 1, not 0.1.

    Parameters
    ----------
    x : array
        Values.

    Returns
    -------
    array, shape of `x`
        Namespace, dtype and device of `x`.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import naive
    >>> naive.elu_plus_one(np.array([2.0, 0.0, -np.inf]))
    array([3., 1., 0.])
    """
    return xp.where(x > 0, x + 1, xp.exp(xp.where(x > 0, 0.0, x)))


@formula(features_of_rows, lags)
def linear_attention(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    *,
    feature_map: Callable[[Array], Any] = elu_plus_one,
    bias: Array | None = None,
    mask: Array | None = None,
    causal: bool = False,
) -> ArrayT:
    r"""Compute attention whose kernel is the dot product of features (linear attention).

    .. math::
        \mathrm{out}_i = \frac{\sum_j w_{ij} \, v_j}{\sum_j w_{ij}}, \qquad
        w_{ij} = e^{\mathrm{bias}_{n-1+j-i}} \, \phi(q_i) \cdot \phi(k_j)

    over the keys j that query i sees. Katharopoulos et al., arXiv:2006.16236; Linear attention
    post, kernel_attn; Random features post, KernelizedAttention.

    Parameters
    ----------
    q, k, v, mask, causal
        As in `softmax_attention`; no scale is applied.
    feature_map : function, default elu_plus_one
        Maps vectors (..., n, d) to features (..., n, F), or to a pair: features and the logarithm
        of a factor on each row, (..., n), as `features.Features` is. Sums of products of features
        must be representable.
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
    >>> q, k, v = np.zeros((1, 2)), np.array([[0.0, 0.0], [2.0, 2.0]]), np.array([[0.0], [4.0]])
    >>> naive.linear_attention(q, k, v)  # kernels 2 and 6
    array([[3.]])
    """
    seen = visible(q, k, mask=mask, causal=causal)
    phi_q, _ = _with_scale(feature_map(q))  # the factor of a query cancels
    phi_k, log_scale = _with_scale(feature_map(k))
    return ratio(products(phi_q, phi_k), log_scale[..., None, :] + bias, v, seen)


@formula(shared_frequencies, positive_scale, added_to_features, lags)
def relu_feature_attention(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    *,
    omega: Array,
    kernel_epsilon: float = 1e-3,
    scale: float | None = None,
    bias: Array | None = None,
    mask: Array | None = None,
    causal: bool = False,
) -> ArrayT:
    r"""Compute linear attention with ReLU features of a projection (Performer-ReLU).

    .. math::
        \mathrm{out}_i = \frac{\sum_j w_{ij} \, v_j}{\sum_j w_{ij}}, \qquad
        w_{ij} = e^{\mathrm{bias}_{n-1+j-i}} \sum_s \phi_s(q_i) \, \phi_s(k_j), \qquad
        \phi_s(x) = \max(\omega_s \cdot x, 0) + \epsilon

    over the keys j that query i sees. Choromanski et al., arXiv:2009.14794, generalised attention
    with f = ReLU; epsilon, 0 there, is 0.001 in the authors' code.

    Parameters
    ----------
    q, k, v, omega, scale, bias, mask, causal
        As in `random_feature_attention`.
    kernel_epsilon : float, default 0.001
        What is added to each feature, at least 0.

    Returns
    -------
    array, shape (..., n, d_v)
        Same namespace, dtype and device as `q`. Rows that see no key are 0.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import naive
    >>> q, k, v = np.array([[1.0]]), np.array([[-1.0], [2.0]]), np.array([[0.0], [1.0]])
    >>> naive.relu_feature_attention(q, k, v, omega=np.ones((1, 1)), kernel_epsilon=1.0)
    array([[0.75]])
    """
    seen = visible(q, k, mask=mask, causal=causal)
    phi_q, phi_k = (
        xp.maximum(products(kernel_coordinates(x, scale), omega), 0.0) + kernel_epsilon
        for x in (q, k)
    )
    zeros = xp.zeros_like(phi_k[..., 0])[..., None, :]
    return ratio(products(phi_q, phi_k), zeros + bias, v, seen)


def _with_scale(phi: Any) -> tuple[Array, Array]:
    """Features, and the logarithm of the factor on each row: 0 if the map gives none."""
    if isinstance(phi, tuple):
        return phi
    return phi, xp.zeros_like(phi[..., 0])
