r"""Exact softmax attention with all of its options, as its formula."""

from __future__ import annotations

from ..arrays.heads import Alibi
from ..arrays.library import Array
from ..typing import ArrayT
from .doors import any_scale, formula, score_options
from .terms import hide, products, softmax, visible, weighted_sum, xp


@formula(any_scale, score_options)
def softmax_attention(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    *,
    scale: float | None = None,
    bias: Array | Alibi | None = None,
    mask: Array | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    dropout: Array | None = None,
) -> ArrayT:
    r"""Compute exact softmax attention.

    .. math::
        \mathrm{out}_i = \frac{\sum_j e^{s_{ij}} \, r_{ij} \, v_j}
                              {e^{\mathrm{sink}} + \sum_j e^{s_{ij}}}, \qquad
        s_{ij} = \mathrm{cap}(\mathrm{scale}\; q_i \cdot k_j) + \mathrm{bias}_{ij}

    over the keys j that query i sees. Vaswani et al., arXiv:1706.03762; Random features post,
    Attention(Q, K, V); Ye 2023, eq. (3); Zheng 2022, SoftmaxAttn: these have no sink, cap,
    bias or factor r.

    Parameters
    ----------
    q : array, shape (..., n, d), float32 or float64
        Queries. On NumPy, longdouble too. Leading axes of all arguments broadcast.
    k : array, shape (..., m, d), dtype of `q`
        Keys. With fewer heads than `q` has, each is shared by consecutive query heads, as in
        `attend`.
    v : array, shape (..., m, d_v), dtype of `q`
        Values.
    scale : float, optional
        Factor on q . k, 1 / sqrt(d) by default.
    bias : array, broadcasting to (..., n, m), dtype of `q`, or Alibi, optional
        Added to the scores. `refattn.attention.alibi` makes one.
    mask : array of bool, broadcasting to (..., n, m), optional
        True where the query attends to the key.
    causal : bool, default False
        Query i sees key j only if j <= i + m - n.
    window : pair of int or None, optional
        (left, right): query i sees key j only if i + m - n - left <= j <= i + m - n + right. None
        is no limit on that side.
    softcap : float, optional
        Cap c > 0: each score s becomes c tanh(s / c).
    sinks : array, shape (..., heads), optional
        Score of one more key for each head, that all its queries see and whose value is 0. Without
        them e^sink is 0.
    dropout : array, broadcasting to (..., n, m), dtype of `q`, optional
        Factors r of the weights, 1 by default.

    Returns
    -------
    array, shape (..., n, d_v)
        Same namespace, dtype and device as `q`. Rows that see no key are 0.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import naive
    >>> q, k, v = np.zeros((2, 1)), np.zeros((2, 1)), np.array([[4.0], [2.0]])
    >>> naive.softmax_attention(q, k, v)
    array([[3.],
           [3.]])
    >>> naive.softmax_attention(q, k, v, window=(0, None))
    array([[3.],
           [2.]])
    >>> naive.softmax_attention(q, k, v, sinks=np.array(0.0))
    array([[2.],
           [2.]])
    """
    seen = visible(q, k, mask=mask, causal=causal, window=window)
    s = scale * products(q, k)
    if softcap is not None:
        s = softcap * xp.tanh(s / softcap)
    if bias is not None:
        s = s + bias
    weights = softmax(hide(s, seen), sinks)
    return weighted_sum(weights if dropout is None else weights * dropout, v, seen)
