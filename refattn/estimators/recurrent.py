"""Linear attention without a normaliser, whose state decays, and from which tokens remove."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from ..arrays import tokens
from ..arrays.heads import group_with_lead
from ..arrays.library import Array, as_written
from ..arrays.tokens import RecurrenceOptions
from ..engine.recurrent import Tokens, recur
from ..typing import ArrayT, Recurrent


@as_written
def recurrent_attention(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    *,
    log_decay: Array | None = None,
    removal: tuple[Array, Array] | None = None,
    write: Array | None = None,
    initial_state: Array | None = None,
    scale: float | None = None,
    read: Literal["after", "before"] = "after",
) -> Recurrent:
    r"""Compute linear attention whose state decays: RetNet, Mamba-2, delta rules, RWKV-7, ...

    .. math::
        S_t = (\mathrm{Diag}(e^{g_t}) + a_t b_t^\top) S_{t-1} + w_t k_t v_t^\top, \qquad
        o_t = c \, S_t^\top q_t

    S is the state, to which tokens write and from which they remove. `refattn.recurrences` has a
    function for each layer that is a special case. Linear in n.

    Parameters
    ----------
    q, k, v : arrays, shapes (..., n, d), (..., n, d) and (..., n, d_v)
        Queries, keys and values, float32 or float64. There may be more query heads than key heads,
        as in `attend`, or more heads of values: then consecutive ones share a head of `k`, and
        of `q` if `q` has as many heads as `k`. All other arrays must broadcast with the values.
    log_decay : array, shape (..., n) or (..., n, d), optional
        The g of each token, or of each coordinate of its key: 0 or less, -inf to forget all. It has
        as many leading axes as `q`, `k` and `v`; axes of length 1 broadcast. No decay by default.
    removal : pair of arrays (a, b), shape (..., n, d) each, optional
        a b^T S is added to the state, where S is the state before the token and its decay. Delta
        rules pass a = -beta k, which subtracts.
    write : array, shape (..., n), optional
        Factors on k v^T, 1 by default.
    initial_state : array, shape (..., d, d_v), optional
        The state before the first token, 0 by default.
    scale : float, optional
        The c above, 1 / sqrt(d) by default.
    read : {"after", "before"}
        The query of token t reads S_t or, with "before", S_{t-1}: the state before token t decays
        it and writes to it.

    Returns
    -------
    Recurrent
        `out`, (..., n, d_v), and the last `state`, (..., d, d_v), with the leading axes of keys,
        values, gates and initial state. Same namespace, dtype and device as `q`.

    Raises
    ------
    TypeError
        If an argument is not an array, has another dtype or library than `q`, or `removal` is not
        a pair.
    ValueError
        If shapes do not match, or `read` is unknown.

    Notes
    -----
    Tokens are processed in chunks of 64, by products of matrices. The error is at most C eps (1 + G
    + h) relative to the same recurrence of absolute values. G is the largest sum of |g| in a chunk,
    but no more than the G at which e^-G underflows. h is the number of chunks on which the state
    depends. With removal, the error is also multiplied by the condition number of a triangular
    system for each chunk. This number is bounded if a = -beta k, b = k, |k| = 1 and beta <= 2.

    Sources: Yang et al., arXiv:2406.06484 (chunks); Yang et al., arXiv:2412.06464.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import recurrent_attention
    >>> one, v = np.ones((3, 1)), np.array([[1.0], [1.0], [4.0]])
    >>> out, state = recurrent_attention(one, one, v, log_decay=np.log([0.5, 0.5, 0.5]))
    >>> out.T, state
    (array([[1.  , 1.5 , 4.75]]), array([[4.75]]))
    """
    given = RecurrenceOptions(log_decay, removal, write, initial_state, scale, read)
    inputs = prepare_recurrence(q, k, v, given)
    return inputs.ungroup(*recur(*inputs[:4]))


class RecurrenceInputs(NamedTuple):
    """What the engine takes, in groups of heads, and what it was made of."""

    steps: Tokens
    state: Array
    before: bool
    xp: Any
    scale: Any
    write: Array | None
    v: Array
    first: tuple[Any, ...]  # where the state of queries is that share one
    ungroup: Callable[[Array, Array], Recurrent]


def prepare_recurrence(q: Array, k: Array, v: Array, given: RecurrenceOptions) -> RecurrenceInputs:
    """Check arguments of `recurrent_attention`, and multiply q and v by their factors."""
    q, k, gates, scale, xp = tokens.check(q, k, v, given)
    axes, before = q.ndim, given.read == "before"
    (q, k, v, log_decay, a, b, write, state), lead, join = group_with_lead(q, k, v, *gates)
    steps = Tokens(scale * q, k, v if write is None else write * v, log_decay, a, b)
    whole = xp.broadcast_to(state, (*lead, *state.shape[-2:]))
    first = tokens.one_of_each(state, whole.ndim)

    def ungroup(out: Array, last: Array) -> Recurrent:
        last = last[first]
        return Recurrent(join(out), last[..., 0, :, :] if q.ndim > axes else last)

    return RecurrenceInputs(steps, whole, before, xp, scale, write, v, first, ungroup)
