r"""Compute the recurrence of linear attention token by token, with proven error bounds.

With :math:`M_t = \mathrm{Diag}(e^{g_t}) + a_t b_t^\top`, the error E of the state that was computed
is multiplied by the matrix of the token, and the roundings R of one step are added:

.. math::
    E_t = M_t E_{t-1} + R_t, \qquad
    |R_t| \le 2^{-69} |e^{g_t} S_{t-1}| + (d + 10) 2^{-103}
    \bigl( |e^{g_t} S_{t-1}| + |a_t| (|b_t| \cdot |S_{t-1}|) + |k_t| |w_t v_t|^\top \bigr)

The first term is the error of :math:`e^g`, which is 0 if g is 0. Without removal, each element of E
is bounded by itself. With removal, the norms of the columns of E are bounded, with the spectral
norm of M: bounds of elements by those of M would grow with any removal.

No step solves anything: errors are multiplied by more than 1 only where a norm is above 1. It is
at most 1 if g <= 0, :math:`a = -\beta k`, :math:`b = e^g k` and :math:`\beta |k|^2 \le 2`. An
output adds its own roundings to :math:`c |q_t| \cdot |E_t|`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from ..arrays import tokens
from ..arrays.heads import group_with_lead
from ..arrays.library import Array, as_written, device
from ..engine.recurrent import Tokens, recur
from ..typing import Recurrent
from .assumptions import require
from .forward import SAFE, UNDERFLOW
from .inputs import as_arrays, check_double, number_in_pairs, power_in_pairs, widen
from .pairs import EXP_ROUNDING, Pair, add_pairs, dot_pairs, exp_pair, multiply_pairs
from .results import Bound
from .slices import higham_gamma


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
    given = tokens.RecurrenceOptions(log_decay, removal, write, initial_state, scale, read)
    q, k, gates, _, xp = tokens.check(q, k, v, given)
    check_double(q)
    require(q, xp)
    arrays, lead, join = group_with_lead(q, k, v, *gates)
    pairs: list[Any] = [None if x is None else widen(x, xp) for x in arrays]
    rows, *others, start = pairs
    factor = number_in_pairs(scale) or power_in_pairs(q.shape[-1], "-0.5")
    rows = multiply_pairs(rows, as_arrays(factor, rows.hi))
    x, before = _Tokens(*others), read == "before"
    whole = _map(lambda y: xp.broadcast_to(y, (*lead, *y.shape[-2:])), start)
    out, last = _go_through(x, rows, Bound(whole, xp.zeros_like(whole.hi)), before, xp)

    k, v, g, a, b, w = (y if y is None else y.hi for y in x)
    steps = Tokens(rows.hi, k, v if w is None else w * v, g, a, b)
    near_out, near_last = recur(steps, whole.hi, before, xp)
    first = tokens.one_of_each(start.hi, whole.hi.ndim)
    last = _map(lambda y: y[first], _proven(last, near_last, xp))
    last = last if rows.hi.ndim == q.ndim else _map(lambda y: y[..., 0, :, :], last)
    return Recurrent(_map(join, _proven(out, near_out, xp)), last)


class _Tokens(NamedTuple):
    """What tokens do, (..., n, .)."""

    k: Pair
    v: Pair
    log_decay: Pair
    a: Any  # a pair, or None
    b: Any
    write: Any


def _go_through(x: _Tokens, q: Pair, state: Bound, before: bool, xp: Any) -> tuple[Bound, Bound]:
    """Change the state by each token, and read it: the outputs and the last state."""
    outs = [_rows(state, slice(0))]
    for t in range(q.hi.shape[-2]):
        token = slice(t, t + 1)
        old, state = state, _change(_rows(x, token), state, xp)
        outs.append(_read_token(_rows(q, token), old if before else state, xp))
    parts = zip(*((*y.value, y.error) for y in outs), strict=True)
    hi, lo, error = (xp.concat(y, axis=-2) for y in parts)
    return Bound(Pair(hi, lo), error), state


def _rows(x: Any, i: slice) -> Any:
    return _map(lambda y: y[..., i, :], x)


def _change(token: _Tokens, state: Bound, xp: Any) -> Bound:
    """Change the state, and the bound of its error, as one token does."""
    (k, v, g, a, b, w), columns = token, xp.matrix_transpose
    size, decay = xp.abs(state.value.hi), exp_pair(g, xp)
    decay = _map(columns, Pair(xp.where(g.hi <= 1, decay.hi, math.nan), decay.lo))
    kept, written = multiply_pairs(decay, state.value), multiply_pairs(_map(columns, k), v)
    written = written if w is None else multiply_pairs(w, written)
    value, terms = add_pairs(kept, written), xp.abs(kept.hi) + xp.abs(written.hi)
    if a is not None:
        taken = multiply_pairs(_map(columns, a), _product(b, state.value, xp))
        value = add_pairs(value, taken)
        terms = terms + columns(xp.abs(a.hi)) * (xp.abs(b.hi) @ size)
    inexact = EXP_ROUNDING * xp.astype(columns(g.hi) != 0, size.dtype)
    floor = _floor(size + state.error, xp) * (1 + xp.abs(v.hi))
    for x in (y for y in (k, a, b, w) if y is not None):
        floor = floor * (1 + xp.max(xp.abs(x.hi), axis=-1, keepdims=True))
    wrong = inexact * xp.abs(kept.hi) + _rounding(size) * terms + floor
    if a is None:
        return Bound(value, (decay.hi * state.error + wrong) * SAFE)
    norm = _bound_norm(columns(decay.hi), a.hi, b.hi, xp)
    return Bound(value, (norm * state.error + xp.sum(wrong, axis=-2, keepdims=True)) * SAFE)


def _read_token(q: Pair, state: Bound, xp: Any) -> Bound:
    """Multiply a row by the state, (..., 1, d_v)."""
    rows, size = xp.abs(q.hi), xp.abs(state.value.hi)
    floor = _floor(size, xp) * (1 + xp.max(rows, axis=-1, keepdims=True))
    wrong = rows @ (state.error + _rounding(size) * size) + floor
    return Bound(_product(q, state.value, xp), wrong * SAFE)


def _product(row: Pair, state: Pair, xp: Any) -> Pair:
    """Multiply a row (..., 1, d) by the state, to (d + 8) 2^-103 of the sum of absolute terms."""
    hi, lo = dot_pairs(_map(xp.matrix_transpose, state), row, xp)
    return Pair(hi[..., None, :], lo[..., None, :])


def _rounding(state: Array) -> float:
    """Bound roundings of a step or of a product with the state, relative to absolute terms."""
    return float(state.shape[-2] + 10) * 2.0**-103


def _floor(state: Array, xp: Any) -> Array:
    """Bound what is lost where products are so small that they count as 0."""
    return UNDERFLOW * (state.shape[-2] + 8) * (1 + xp.max(state, axis=-2, keepdims=True))


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
    return xp.where(finite, most + rest + UNDERFLOW, math.inf)


def _proven(found: Bound, near: Array, xp: Any) -> Bound:
    """Take what is proven, and the numbers of float64 elsewhere."""
    (hi, lo), error = found
    holds = xp.isfinite(hi) & (error < math.inf)
    value = Pair(xp.where(holds, hi, near), xp.where(holds, lo, 0.0))
    return Bound(value, xp.where(holds, error, math.inf))


def _map(function: Callable[[Array], Array], x: Any) -> Any:
    """Apply a function to an array, or to all arrays of a named tuple."""
    if isinstance(x, tuple):
        return type(x)(*(_map(function, y) for y in x))
    return x if x is None else function(x)
