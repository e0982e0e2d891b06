"""The decoding state of exact attention: a key-value cache."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..arrays import checks, qkv
from ..arrays.library import Array, as_written
from ..arrays.shown import held
from ..attention import softmax_attention
from .state import KeysAndValues, check_keys, check_same, copy_array


@held()
@dataclass(frozen=True, eq=False)
class SoftmaxState(KeysAndValues):
    """The keys and values so far, for exact attention: a key-value cache.

    Its size grows with the number of tokens, unless a window limits it to the last tokens. The
    sizes of `PositiveState` and `LinearState` do not grow.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn.streaming import SoftmaxState
    >>> k, v = np.eye(2), np.array([[1.0], [3.0]])
    >>> state = SoftmaxState.init(k[:1], v[:1]).update(k[1:], v[1:])
    >>> state.read(np.zeros((1, 2)))
    array([[2.]])
    >>> state = SoftmaxState.init(k, v, window=0)  # the last key only
    >>> state.read(np.zeros((1, 2)))
    array([[3.]])
    """

    k: Array
    v: Array
    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: Array | None = None

    @classmethod
    @as_written
    def init(
        cls,
        k: Array,
        v: Array,
        *,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Array | None = None,
    ) -> SoftmaxState:
        """Make a state of the first keys (..., m, d) and values (..., m, d_v); m may be 0.

        With a `window` only the last key and that many keys before it are stored, as for
        ``window=(window, 0)`` in `softmax_attention`; `softcap` and `sinks` are as there.
        """
        qkv.keys_and_values(k, v)
        scale = checks.real("scale", scale, optional=True, like=k)
        if window is not None:
            checks.non_negative_integer("window", window)
        softcap = checks.real("softcap", softcap, positive=True, optional=True)
        if sinks is not None:  # of as many heads as queries will have
            checks.arrays(0, k=k, sinks=sinks)
            sinks = copy_array(sinks)
        return cls(copy_array(k), copy_array(v), scale, window, softcap, sinks)._last()

    def _last(self) -> SoftmaxState:
        """Drop the keys and values that leave the window."""
        m = self.k.shape[-2]
        if self.window is None or m <= self.window + 1:
            return self
        k, v = (x[..., m - self.window - 1 :, :] for x in (self.k, self.v))
        return replace(self, k=copy_array(k), v=copy_array(v))

    @as_written
    def update(self, k: Array, v: Array) -> SoftmaxState:
        """Add keys (..., m, d) and values (..., m, d_v), with the same leading axes."""
        check_keys(self, k, v)
        return self.merge(replace(self, k=k, v=v))

    @as_written
    def read(self, q: Array) -> Array:
        """Attend from queries (..., n, d) to every key so far: (..., n, d_v)."""
        return softmax_attention(
            q, self.k, self.v, scale=self.scale, softcap=self.softcap, sinks=self.sinks
        )

    def merge(self, other: SoftmaxState) -> SoftmaxState:
        """Add the keys of another state, with the same options."""
        check_same(self, other, "scale", "window", "softcap", "sinks")
        return self._joined(other)._last()

    def _joined(self, other: SoftmaxState) -> SoftmaxState:
        """Append the keys of another state, of which some may leave the window."""
        k, v = self._followed_by(other.k, other.v)
        return replace(self, k=k, v=v)


SoftmaxState.__module__ = "refattn.streaming"  # where users find it, and so do pickles
