"""The decoding state of `recurrent_attention` and of its special cases."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..arrays import checks, qkv, tokens
from ..arrays.heads import group_heads
from ..arrays.library import Array, array_namespace, as_written, constant
from ..arrays.shown import held
from ..estimators.recurrent import recurrent_attention
from .state import check_keys, check_same, check_states


@held()
@dataclass(frozen=True, eq=False)
class RecurrentState:
    r"""The state of a recurrence after some tokens: d d_v numbers for each head.

    It decodes `refattn.recurrent_attention` and takes its gates. For a delta rule, call the
    function in `refattn.recurrences` with one token and the last state as `initial_state`.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import recurrences
    >>> from refattn.streaming import RecurrentState
    >>> (q, k, v), g = np.random.default_rng(0).standard_normal((3, 6, 4)), -np.ones(6)
    >>> state = RecurrentState.init(k[:5], v[:5], log_decay=g[:5])
    >>> state = state.update(k[5:], v[5:], log_decay=g[5:])
    >>> want = recurrences.state_space_duality(q, k, v, log_decay=g).out
    >>> bool(np.allclose(state.read(q[5:]), want[5:]))
    True
    """

    state: Array
    log_decay: Array | None  # of all tokens, (..., d or 1, 1); None after a removal
    scale: float | None = None

    @classmethod
    @as_written
    def init(
        cls, k: Array, v: Array, *, scale: float | None = None, log_decay: Array | None = None,
        removal: tuple[Array, Array] | None = None, write: Array | None = None,
        initial_state: Array | None = None,
    ) -> RecurrentState:  # fmt: skip
        """Make a state of the first keys (..., n, d) and values (..., n, d_v); n may be 0.

        All else is as in `recurrent_attention`.
        """
        checks.real("scale", scale, optional=True)
        gates = {"log_decay": log_decay, "removal": removal, "write": write}
        state, decay = _add(k, v, {**gates, "initial_state": initial_state})
        return cls(state, None if initial_state is not None else decay, scale)

    @property
    def lead(self) -> tuple[int, ...]:
        """Leading axes of the state."""
        return tuple(self.state.shape[:-2])

    @property
    def d(self) -> int:
        """Length of a key."""
        return int(self.state.shape[-2])

    @property
    def _totals(self) -> Array:
        """What is kept of the values, (..., d_v)."""
        return self.state

    @as_written
    def update(
        self, k: Array, v: Array, *, log_decay: Array | None = None,
        removal: tuple[Array, Array] | None = None, write: Array | None = None,
    ) -> RecurrentState:  # fmt: skip
        """Add tokens, with their gates."""
        _, k = tokens.share_heads(k, k, v)
        check_keys(self, k, v)
        gates = {"log_decay": log_decay, "removal": removal, "write": write}
        state, decay = _add(k, v, {**gates, "initial_state": self.state})
        check_states(**{"the state": (self.state, state)})
        known = self.log_decay
        total = None if known is None or decay is None else known + decay
        return replace(self, state=state, log_decay=total)

    @as_written
    def read(self, q: Array) -> Array:
        """Read the state by queries (..., n, d), all after the last token: (..., n, d_v)."""
        xp = checks.arrays(2, q=q, state=self.state)
        q, keys = tokens.share_heads(q, q, self.state)[0], xp.matrix_transpose(self.state)
        qkv.check(q, keys, keys)
        scale = constant(q.shape[-1], q) ** -0.5 if self.scale is None else self.scale
        (q, state, _), ungroup = group_heads(q, self.state, keys)
        return ungroup(scale * (q @ state))

    def merge(self, other: RecurrentState) -> RecurrentState:
        """Add the state of later tokens, which must start from 0 and have no removal.

        With a removal there is no merge: what a token removes depends on the state before it.
        """
        check_same(self, other, "scale")
        check_states(**{"the state": (self.state, other.state)})
        if other.log_decay is None:
            raise ValueError(
                "`other` must have no initial state and no removal: what a token removes depends "
                "on the state before it."
            )
        state, total = _join(self.state, self.log_decay, other.state, other.log_decay)
        return replace(self, state=state, log_decay=total)


def _add(k: Array, v: Array, gates: dict[str, Any]) -> tuple[Array, Array | None]:
    """Return the state after some tokens, and the sum of their log decays if none removes."""
    *_, given, _, xp = tokens.check(k, k, v, tokens.RecurrenceOptions(**gates))
    decay = xp.matrix_transpose(xp.sum(given.log_decay, axis=-2, keepdims=True))
    return recurrent_attention(k, k, v, **gates).state, decay if given.a is None else None


@as_written
def _join(
    state: Array, log_decay: Array | None, later: Array, decay: Array
) -> tuple[Array, Array | None]:
    """Add the state of later tokens and their log decays."""
    total = None if log_decay is None else log_decay + decay
    return array_namespace(state).exp(decay) * state + later, total


RecurrentState.__module__ = "refattn.streaming"  # where users find it, and so do pickles
