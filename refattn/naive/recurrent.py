r"""Recurrences of linear attention, token by token, each as its paper writes it.

Rows of a token are (..., 1, .), and T takes them to columns: k^T v is an outer product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..arrays.library import Array
from ..typing import ArrayT, Recurrent
from .doors import formula, gates
from .terms import xp


@formula(first=gates)
def recurrent_attention(
    q: ArrayT, k: ArrayT, v: ArrayT, *, log_decay: Any = None, removal: Any = None,
    write: Any = None, initial_state: Any = None, scale: Any = None, read: str = "after",
) -> Recurrent:  # fmt: skip
    r"""Compute linear attention whose state decays, token by token.

    .. math::
        S_t = (\mathrm{Diag}(e^{g_t}) + a_t b_t^\top) S_{t-1} + w_t k_t v_t^\top, \qquad
        o_t = c \, S_t^\top q_t

    Parameters and result are those of `refattn.recurrent_attention`, whose chunks are those of
    arXiv:2406.06484. `delta_rule` and the other layers have the conventions of
    `refattn.recurrences`.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import naive
    >>> one = np.ones((3, 1))
    >>> naive.recurrent_attention(one, one, one, log_decay=np.log([0.5, 0.5, 0.5])).out.T
    array([[1.  , 1.5 , 1.75]])
    """

    def step(S: Array, k: Array, v: Array, g: Array, ab: Array, w: Array) -> Array:
        a, b = ab[..., : k.shape[-1]], ab[..., k.shape[-1] :]
        return T(xp.exp(g)) * S + T(a) @ (b @ S) + w * T(k) @ v

    return go_through(step, q, initial_state, scale, k, v, log_decay, removal, write, read=read)


@formula(first=gates)
def retention(
    q: ArrayT, k: ArrayT, v: ArrayT, *, decay: Any, initial_state: Any = None, scale: Any = None
) -> Recurrent:
    r"""Compute RetNet: S_t = gamma S_{t-1} + k_t v_t^T (arXiv:2307.08621)."""

    def step(S: Array, k: Array, v: Array) -> Array:
        return decay * S + T(k) @ v

    return go_through(step, q, initial_state, scale, k, v)


@formula(first=gates)
def gated_linear_attention(
    q: ArrayT, k: ArrayT, v: ArrayT, *, log_decay: Any, initial_state: Any = None, scale: Any = None
) -> Recurrent:
    r"""Compute GLA: S_t = Diag(e^g_t) S_{t-1} + k_t v_t^T (arXiv:2312.06635)."""

    def step(S: Array, k: Array, v: Array, g: Array) -> Array:
        return T(xp.exp(g)) * S + T(k) @ v

    return go_through(step, q, initial_state, scale, k, v, log_decay)


@formula(first=gates)
def state_space_duality(
    q: ArrayT, k: ArrayT, v: ArrayT, *, log_decay: Any, write: Any = None,
    initial_state: Any = None, scale: Any = None,
) -> Recurrent:  # fmt: skip
    r"""Compute Mamba-2: S_t = e^g_t S_{t-1} + w_t k_t v_t^T (arXiv:2405.21060)."""

    def step(S: Array, k: Array, v: Array, g: Array, w: Array) -> Array:
        return xp.exp(g) * S + T(k) @ (w * v)

    return go_through(step, q, initial_state, scale, k, v, log_decay, write)


@formula(first=gates)
def delta_rule(
    q: ArrayT, k: ArrayT, v: ArrayT, *, beta: Any, initial_state: Any = None, scale: Any = None
) -> Recurrent:
    r"""Compute DeltaNet: S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T (arXiv:2406.06484)."""

    def step(S: Array, k: Array, v: Array, beta: Array) -> Array:
        return S + T(k) @ (beta * (v - k @ S))

    return go_through(step, q, initial_state, scale, k, v, beta)


@formula(first=gates)
def gated_delta_rule(
    q: ArrayT, k: ArrayT, v: ArrayT, *, beta: Any, log_decay: Any,
    initial_state: Any = None, scale: Any = None,
) -> Recurrent:  # fmt: skip
    r"""Compute Gated DeltaNet, the delta rule after a decay (arXiv:2412.06464)."""

    def step(S: Array, k: Array, v: Array, g: Array, beta: Array) -> Array:
        S = xp.exp(g) * S
        return S + T(k) @ (beta * (v - k @ S))

    return go_through(step, q, initial_state, scale, k, v, log_decay, beta)


@formula(first=gates)
def kimi_delta_attention(
    q: ArrayT, k: ArrayT, v: ArrayT, *, beta: Any, log_decay: Any,
    initial_state: Any = None, scale: Any = None,
) -> Recurrent:  # fmt: skip
    r"""Compute KDA, the delta rule after a decay by coordinate (arXiv:2510.26692)."""

    def step(S: Array, k: Array, v: Array, g: Array, beta: Array) -> Array:
        S = T(xp.exp(g)) * S
        return S + T(k) @ (beta * (v - k @ S))

    return go_through(step, q, initial_state, scale, k, v, log_decay, beta)


@formula(first=gates)
def rwkv7(
    q: ArrayT, k: ArrayT, v: ArrayT, *, log_decay: Any, removal: Any,
    initial_state: Any = None, scale: Any = None,
) -> Recurrent:  # fmt: skip
    r"""Compute RWKV-7: S_t = (Diag(e^g_t) + a_t b_t^T) S_{t-1} + k_t v_t^T (arXiv:2503.14456)."""

    def step(S: Array, k: Array, v: Array, g: Array, ab: Array) -> Array:
        a, b = ab[..., : k.shape[-1]], ab[..., k.shape[-1] :]
        return T(xp.exp(g)) * S + T(a) @ (b @ S) + T(k) @ v

    return go_through(step, q, initial_state, scale, k, v, log_decay, removal)


def go_through(
    step: Callable[..., Array], q: Array, state: Any, scale: Any, *rows: Any, read: str = "after"
) -> Recurrent:
    """Change the state by the rows of each token, and read it."""
    outs = [q[..., :0, :] @ state]
    for t in range(q.shape[-2]):
        before, state = state, step(state, *(x[..., t : t + 1, :] for x in rows))
        outs.append(q[..., t : t + 1, :] @ (state if read == "after" else before))
    return Recurrent(scale * xp.concat(outs, axis=-2), state)


def T(x: Array) -> Array:
    """Columns of rows."""
    return xp.matrix_transpose(x)
