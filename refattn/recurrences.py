r"""RetNet, GLA, Mamba-2, delta rules and RWKV-7: special cases of `recurrent_attention`.

.. math::
    S_t = (\mathrm{Diag}(e^{g_t}) + a_t b_t^\top) S_{t-1} + w_t k_t v_t^\top, \qquad
    o_t = c \, S_t^\top q_t

========================  ==================  ========================  =====
function                  decay g             removal a, b              w
========================  ==================  ========================  =====
`retention`               of the head         none                      1
`gated_linear_attention`  of each coordinate  none                      1
`state_space_duality`     of the token        none                      write
`delta_rule`              none                -beta k, k                beta
`gated_delta_rule`        of the token        -beta k, e^g k            beta
`kimi_delta_attention`    of each coordinate  -beta k, e^g k            beta
`rwkv7`                   of each coordinate  `removal`                 1
========================  ==================  ========================  =====

The delta rules decay the state first, and then remove, write and read. `rwkv7` removes from the
state before its decay, because it uses b unchanged. Keys are not normalised: layers that normalise
them do so before. All functions take `q`, `k`, `v`, `initial_state` and `scale` as
`recurrent_attention` does, and return a `Recurrent`. `scale` is 1 / sqrt(d) by default, as in most
kernels of fla; its RWKV-7 kernel uses 1, and the equations of the papers mostly have no scale.
"""

from __future__ import annotations

from typing import Any

from .arrays import tokens
from .arrays.library import Array, as_written
from .estimators.recurrent import recurrent_attention
from .typing import ArrayT, Recurrent

__all__ = [
    "delta_rule",
    "gated_delta_rule",
    "gated_linear_attention",
    "kimi_delta_attention",
    "retention",
    "rwkv7",
    "state_space_duality",
]
__dir__ = __all__.copy


@as_written
def retention(
    q: ArrayT, k: ArrayT, v: ArrayT, *, decay: Any,
    initial_state: Array | None = None, scale: float | None = None,
) -> Recurrent:  # fmt: skip
    r"""Compute retention (RetNet), whose state decays at a fixed rate for each head.

    .. math:: S_t = \gamma S_{t-1} + k_t v_t^\top, \qquad o_t = c \, S_t^\top q_t

    RetNet: Sun et al., arXiv:2307.08621. Implementations differ in the scale, which some apply to
    keys.

    Parameters
    ----------
    q, k, v, initial_state, scale
        As in `recurrent_attention`, which returns the same.
    decay : float or array, shape (..., heads)
        The gamma of each head, 0 to 1; RetNet uses 1 - 2^(-5 - head).

    Examples
    --------
    >>> import numpy as np
    >>> from refattn.recurrences import retention
    >>> one = np.ones((1, 3, 1))
    >>> retention(one, one, one, decay=np.array([0.5])).out[0, :, 0]
    array([1.  , 1.5 , 1.75])
    """
    g = tokens.log_decay_of_heads(q, k, v, decay)
    return recurrent_attention(q, k, v, log_decay=g, initial_state=initial_state, scale=scale)


@as_written
def gated_linear_attention(
    q: ArrayT, k: ArrayT, v: ArrayT, *, log_decay: Array,
    initial_state: Array | None = None, scale: float | None = None,
) -> Recurrent:  # fmt: skip
    r"""Compute gated linear attention (GLA), whose decay depends on token and coordinate.

    .. math:: S_t = \mathrm{Diag}(e^{g_t}) S_{t-1} + k_t v_t^\top, \qquad o_t = c \, S_t^\top q_t

    GLA: Yang et al., arXiv:2312.06635. Implementations differ in whether the decay of a token
    applies to its own write (here it does not). Some divide by decays from the start of a chunk,
    which overflows.

    Parameters
    ----------
    q, k, v, initial_state, scale
        As in `recurrent_attention`, which returns the same.
    log_decay : array, shape (..., n, d)
        The g, 0 or less: the log of the paper's gate, not the gate.
    """
    return recurrent_attention(
        q, k, v, log_decay=log_decay, initial_state=initial_state, scale=scale
    )


@as_written
def state_space_duality(
    q: ArrayT, k: ArrayT, v: ArrayT, *, log_decay: Array, write: Array | None = None,
    initial_state: Array | None = None, scale: float | None = None,
) -> Recurrent:  # fmt: skip
    r"""Compute the recurrence of Mamba-2, whose decay depends on the token.

    .. math:: S_t = e^{g_t} S_{t-1} + w_t k_t v_t^\top, \qquad o_t = c \, S_t^\top q_t

    Mamba-2: Dao and Gu, arXiv:2405.21060, with C, B and x for q, k and v, g = dt A and w = dt, and
    without its term D x. Implementations differ in whether x is multiplied by dt before the kernel,
    and in dt, which some take before its softplus.

    Parameters
    ----------
    q, k, v, initial_state, scale
        As in `recurrent_attention`, which returns the same. The paper's scale is 1.
    log_decay, write : arrays, shape (..., n)
        The g, 0 or less, and the w, 1 by default.
    """
    return recurrent_attention(
        q, k, v, log_decay=log_decay, write=write, initial_state=initial_state, scale=scale
    )


@as_written
def delta_rule(
    q: ArrayT, k: ArrayT, v: ArrayT, *, beta: Array,
    initial_state: Array | None = None, scale: float | None = None,
) -> Recurrent:  # fmt: skip
    r"""Compute the delta rule (DeltaNet), which replaces part of the value stored for a key.

    .. math:: S_t = S_{t-1} + \beta_t k_t (v_t - S_{t-1}^\top k_t)^\top, \quad
              o_t = c \, S_t^\top q_t

    DeltaNet: Schlag et al., arXiv:2102.11174; Yang et al., arXiv:2406.06484. Implementations
    differ in whether they normalise keys, in the epsilon of that norm, and in whether `beta` also
    multiplies what is removed.

    Parameters
    ----------
    q, k, v, initial_state, scale
        As in `recurrent_attention`, which returns the same. States may grow exponentially if beta
        |k|^2 > 2.
    beta : array, shape (..., n)
        How much of the value is replaced: 0 to 1, or to 2 if the state may change sign along a key
        (negative eigenvalues).

    Examples
    --------
    >>> import numpy as np
    >>> from refattn.recurrences import delta_rule
    >>> one, v = np.ones((2, 1)), np.array([[4.0], [2.0]])
    >>> delta_rule(one, one, v, beta=np.array([1.0, 0.5])).out.T  # half of 4 is replaced by 2
    array([[4., 3.]])
    """
    gates = tokens.delta_gates(q, k, v, beta)
    return recurrent_attention(q, k, v, **gates, initial_state=initial_state, scale=scale)


@as_written
def gated_delta_rule(
    q: ArrayT, k: ArrayT, v: ArrayT, *, beta: Array, log_decay: Array,
    initial_state: Array | None = None, scale: float | None = None,
) -> Recurrent:  # fmt: skip
    r"""Compute the gated delta rule (Gated DeltaNet): a decay, then the delta rule.

    .. math:: S_t = e^{g_t} (I - \beta_t k_t k_t^\top) S_{t-1} + \beta_t k_t v_t^\top, \quad
              o_t = c \, S_t^\top q_t

    Gated DeltaNet: Yang et al., arXiv:2412.06464. Implementations differ in whether the error
    is computed before or after the decay of the state, which gives other results; here it is after.

    Parameters
    ----------
    q, k, v, initial_state, scale
        As in `recurrent_attention`, which returns the same.
    beta : array, shape (..., n)
        As in `delta_rule`.
    log_decay : array, shape (..., n)
        The g, 0 or less.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn.recurrences import gated_delta_rule
    >>> one, v, half = np.ones((2, 1)), np.array([[4.0], [2.0]]), np.array([0.5, 0.5])
    >>> gated_delta_rule(one, one, v, beta=half, log_decay=np.log(half)).out.T
    array([[2. , 1.5]])
    """
    gates = tokens.delta_gates(q, k, v, beta, log_decay)
    return recurrent_attention(q, k, v, **gates, initial_state=initial_state, scale=scale)


@as_written
def kimi_delta_attention(
    q: ArrayT, k: ArrayT, v: ArrayT, *, beta: Array, log_decay: Array,
    initial_state: Array | None = None, scale: float | None = None,
) -> Recurrent:  # fmt: skip
    r"""Compute Kimi Delta Attention (KDA): a decay of each coordinate, then the delta rule.

    .. math:: S_t = (I - \beta_t k_t k_t^\top) \mathrm{Diag}(e^{g_t}) S_{t-1}
              + \beta_t k_t v_t^\top, \quad o_t = c \, S_t^\top q_t

    KDA: Kimi Linear, arXiv:2510.26692. Implementations differ as for `gated_delta_rule`.

    Parameters
    ----------
    q, k, v, initial_state, scale
        As in `recurrent_attention`, which returns the same.
    beta : array, shape (..., n)
        As in `delta_rule`.
    log_decay : array, shape (..., n, d)
        The g, 0 or less.
    """
    gates = tokens.delta_gates(q, k, v, beta, log_decay)
    return recurrent_attention(q, k, v, **gates, initial_state=initial_state, scale=scale)


@as_written
def rwkv7(
    q: ArrayT, k: ArrayT, v: ArrayT, *, log_decay: Array, removal: tuple[Array, Array],
    initial_state: Array | None = None, scale: float | None = None,
) -> Recurrent:  # fmt: skip
    r"""Compute the recurrence of RWKV-7, whose removal is any pair of vectors.

    .. math:: S_t = (\mathrm{Diag}(e^{g_t}) + a_t b_t^\top) S_{t-1} + k_t v_t^\top, \quad
              o_t = c \, S_t^\top q_t

    RWKV-7: Peng et al., arXiv:2503.14456, with r for q, and without its bonus. The states here are
    the transposes of the paper's. Implementations differ in the order of the pair: what fla calls a
    and b are b and a here.

    Parameters
    ----------
    q, k, v, initial_state, scale
        As in `recurrent_attention`, which returns the same. The paper and fla use scale 1.
    log_decay : array, shape (..., n, d)
        The g, 0 or less.
    removal : pair of arrays (a, b), shape (..., n, d) each
        The vectors a and b above. In the paper b is minus the removal key, which has norm 1, and a
        is the learning rate times that key.
    """
    return recurrent_attention(
        q, k, v, log_decay=log_decay, removal=removal, initial_state=initial_state, scale=scale
    )
