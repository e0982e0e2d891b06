r"""Compute the recurrence of linear attention token by token, with proven error bounds.

With :math:`M_t = \mathrm{Diag}(e^{g_t}) + a_t b_t^\top`, the error E of the state that was computed
is multiplied by the matrix of the token, and the roundings R of one step are added:

.. math::
    E_t = M_t E_{t-1} + R_t, \qquad
    |R_t| \le 2^{-69} |e^{g_t} S_{t-1}| + (d + 10) 2^{-103}
    \bigl( |e^{g_t} S_{t-1}| + |a_t| (|b_t| \cdot |S_{t-1}|) + |k_t| |w_t v_t|^\top \bigr)

The roundings R are those that `refattn.numbers.pairs` proves of the formula of one token, for a
state without error. The first term is the error of :math:`e^g`, which is 0 if g is 0. Without
removal, each element of E is bounded by itself. With removal, the norms of the columns of E are
bounded, with the spectral norm of M: bounds of elements by those of M would grow with any removal.

No step solves anything: errors are multiplied by more than 1 only where a norm is above 1. It is
at most 1 if g <= 0, :math:`a = -\beta k`, :math:`b = e^g k` and :math:`\beta |k|^2 \le 2`. An
output adds its own roundings to :math:`c |q_t| \cdot |E_t|`.
"""

from __future__ import annotations

import math
from functools import cache, partial
from typing import Any, Literal, NamedTuple

from ..arrays import tokens
from ..arrays.heads import group_with_lead
from ..arrays.library import Array, as_written, device
from ..engine.recurrent import Tokens, recur
from ..numbers.pairs import pair_space, to_pairs
from ..numbers.products import FLOOR, SAFE
from ..numbers.slices import higham_gamma
from ..typing import Recurrent
from .assumptions import require
from .blocks import bound_of, element, proven
from .inputs import as_number, check_double, number_in_pairs, power_in_pairs


@as_written
def recurrent_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    log_decay: Array | None = None,
    removal: tuple[Array, Array] | None = None,
    write: Array | None = None,
    initial_state: Array | None = None,
    scale: float | None = None,
    read: Literal["after", "before"] = "after",
) -> Recurrent:
    r"""Compute a gated recurrence and its last state in pairs of float64, with proven bounds.

    .. math::
        S_t = (\mathrm{Diag}(e^{g_t}) + a_t b_t^\top) S_{t-1} + w_t k_t v_t^\top, \qquad
        o_t = c \, S_t^\top q_t

    as `refattn.recurrent_attention` does, but token by token. The arguments count as exact numbers:
    the bound does not include the rounding of a removal that you computed.

    Parameters
    ----------
    q, k, v, log_decay, removal, write, initial_state, read
        As in `refattn.recurrent_attention`, float32 or float64.
    scale : float, optional
        The c above, 1 / sqrt(d) by default: the root in pairs, not in float64.

    Returns
    -------
    Recurrent
        `out` and `state`, each a `Bound`: `value`, a pair of float64, and `error`, no less than the
        distance to the exact number. With each token the error of the state grows by about 2^-69 of
        the state if `log_decay` is given, and by about (d + 10) 2^-103 otherwise, and it is
        multiplied by the spectral norm of the matrix in parentheses: the bound is useless if
        removals amplify the state. From the first token that is not finite or overflows, or whose
        `log_decay` is above 1, the bounds are infinity and the values those of
        `refattn.recurrent_attention`.

    Raises
    ------
    TypeError, ValueError
        As in `refattn.recurrent_attention`; also TypeError for longdouble.
    RuntimeError
        As in `attend`.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import certified
    >>> one, v = np.ones((2, 1)), np.array([[1.0], [3.0]])
    >>> out, state = certified.recurrent_attention(one, one, v, log_decay=np.array([0.0, -1.0]))
    >>> out.value.hi.T, bool(state.error[0, 0] < 2**-68)  # 3 + 1 / e = 3.36787944117144232159...
    (array([[1.        , 3.36787944]]), True)
    """
    options = tokens.RecurrenceOptions(log_decay, removal, write, initial_state, scale, read)
    q, k, gates, _, xp = tokens.check(q, k, v, options)
    check_double(q)
    require(q, xp)
    arrays, lead, join = group_with_lead(q, k, v, *gates)
    pairs: list[Any] = [None if x is None else to_pairs(x) for x in arrays]
    rows, *others, start = pairs
    factor = number_in_pairs(scale) or power_in_pairs(q.shape[-1], "-0.5")
    rows, x, before = rows * as_number(factor, rows), _Tokens(*others), read == "before"
    state = pair_space(xp).broadcast_to(start, (*lead, *start.shape[-2:]))
    k1, v1, *steps, w1 = (y if y is None else y.hi for y in x)
    written: Any = v1 if w1 is None else w1 * v1
    token, first = Tokens(rows.hi, k1, written, *steps), state.hi
    near = cache(lambda: recur(token, first, before, xp))

    outs = [rows[..., :0, :] @ state]
    for t in range(q.shape[-2]):
        at = (..., slice(t, t + 1), slice(None))
        old, state = state, _change(_Tokens(*(y if y is None else y[at] for y in x)), state, xp)
        outs.append(_read_row(rows[at], old if before else state, xp))
    out, last = (
        proven((*y.pair, y.e), partial(element, near, i), xp)
        for i, y in enumerate((pair_space(xp).concat(outs, axis=-2), state))
    )
    last = last[tokens.one_of_each(start.hi, last.ndim)]
    last = last if rows.ndim == q.ndim else last[..., 0, :, :]
    return Recurrent(bound_of(join(out)), bound_of(last))


class _Tokens(NamedTuple):
    """What tokens do, (..., n, .)."""

    k: Array
    v: Array
    log_decay: Array
    a: Array | None
    b: Any
    write: Array | None


def _change(token: _Tokens, state: Array, xp: Any) -> Array:
    """Change the state, and the bound of its error, as one token does."""
    (k, v, g, a, b, w), columns, exact = token, xp.matrix_transpose, to_pairs(state.pair)
    decay = pair_space(xp).where(g == 0.0, 1.0, pair_space(xp).exp(g))
    decay = pair_space(xp).where(g <= 1.0, decay, math.nan)
    turned = pair_space(xp).matrix_transpose
    value = turned(decay) * exact + turned(k) * (v if w is None else w * v)
    if a is None:
        error = columns(decay.hi + decay.e) * state.e + value.e
    else:
        value = value + turned(a) * _read_row(b, exact, xp)
        norm = _bound_norm(decay.hi, a.hi, b.hi, xp)
        error = norm * state.e + xp.sum(value.e, axis=-2, keepdims=True)
    return to_pairs(value.pair, error * SAFE + xp.where(state.e > 0, FLOOR, 0.0 * state.e))


def _read_row(row: Array, state: Array, xp: Any) -> Array:
    """Multiply a row (..., 1, d) by the state, term by term: slices would have larger errors."""
    return pair_space(xp).sum(pair_space(xp).matrix_transpose(row) * state, axis=-2, keepdims=True)


def _bound_norm(decay: Array, a: Array, b: Array, xp: Any) -> Array:
    r"""Bound the spectral norm of M = Diag(decay) + a b^T, (..., 1, 1).

    With any U, s and V, :math:`\|M\| \le \|U\| \max(s) \|V\| + \|M - U s V\|` and
    :math:`\|U\|^2 \le 1 + \|U^\top U - I\|`: the factorisation need not be accurate.
    Other norms are at most sums of magnitudes.
    """
    one = xp.eye(a.shape[-1], dtype=a.dtype, device=device(a))
    M = one * decay + xp.matrix_transpose(a) @ b
    finite = xp.all(xp.isfinite(M), axis=(-2, -1), keepdims=True)
    M = xp.where(finite, M, 0.0)
    u, s, v = xp.linalg.svd(M)
    us, gamma = u * s[..., None, :], higham_gamma(2 * a.shape[-1] + 8)

    def size(x: Array) -> Array:
        return xp.sum(xp.abs(x), axis=(-2, -1), keepdims=True)

    def squared(x: Array) -> Array:
        return 1 + size(xp.matrix_transpose(x) @ x - one) + gamma * size(x) ** 2

    rest = size(M - us @ v) + gamma * (size(us) * size(v) + size(decay) + size(a) * size(b))
    most = xp.max(s, axis=-1)[..., None, None] * squared(u) * squared(v)
    return xp.where(finite, most + rest + FLOOR, math.inf)
