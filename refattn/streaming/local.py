"""The decoding state of local random-feature attention."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..arrays import qkv
from ..arrays.heads import group_heads
from ..arrays.library import Array, as_written, root_scale
from ..arrays.shown import held
from ..engine.attend import Attended, attend, merge
from ..engine.hops import Keys
from ..estimators.near_and_far import lacking, near_scores
from .positive import PositiveState
from .softmax import SoftmaxState
from .state import check_keys, check_queries, check_same


@held()
@dataclass(frozen=True, eq=False)
class LocalState:
    r"""The last keys, and random-feature sums over the keys before them.

    It decodes `refattn.local_random_feature_attention` with ``causal=True``. It stores the
    keys and values of the window, and S (d_v + 1) numbers for each head.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import local_random_feature_attention, sampling
    >>> from refattn.streaming import LocalState
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 6, 4))
    >>> omega = sampling.draw(8, 4, rng=1).omega
    >>> state = LocalState.init(k[:5], v[:5], window=2, omega=omega).update(k[5:], v[5:])
    >>> options = {"omega": omega, "window": (2, 0), "causal": True}
    >>> want = local_random_feature_attention(q, k, v, **options)
    >>> bool(np.allclose(state.read(q[5:]), want[5:]))
    True
    """

    near: SoftmaxState
    far: PositiveState

    @classmethod
    @as_written
    def init(
        cls,
        k: Array,
        v: Array,
        *,
        window: int | None,
        omega: Array,
        log_weight: Array | None = None,
        scale: float | None = None,
    ) -> LocalState:
        """Make a state of the first keys (..., m, d) and values (..., m, d_v); m may be 0.

        The last key and the `window` keys before it are near, as with ``window=(window, 0)``; with
        None all keys are near. The other arguments are as in `PositiveState.init`.
        """
        qkv.keys_and_values(k, v)
        empty = k[..., :0, :], v[..., :0, :]
        far = PositiveState.init(*empty, omega=omega, log_weight=log_weight, scale=scale)
        return cls(SoftmaxState.init(*empty, scale=scale, window=window), far).update(k, v)

    @property
    def lead(self) -> tuple[int, ...]:
        """Leading axes of the keys and values."""
        return self.near.lead

    @property
    def d(self) -> int:
        """Length of a key."""
        return self.near.d

    @as_written
    def update(self, k: Array, v: Array) -> LocalState:
        """Add keys (..., m, d) and values (..., m, d_v), with the same leading axes."""
        check_keys(self.near, k, v)
        return self._after(replace(self.near, k=k, v=v), self.far)

    def _after(self, near: SoftmaxState, far: PositiveState) -> LocalState:
        """Put later keys into the window, and into `far` those that leave it."""
        near, window = self.near._joined(near), self.near.window
        out = 0 if window is None else max(0, near.k.shape[-2] - window - 1)
        if out:
            far = far.update(near.k[..., :out, :], near.v[..., :out, :])
        return replace(self, near=near._last(), far=far)

    @as_written
    def read(self, q: Array) -> Array:
        """Attend from queries (..., n, d), all at the position of the last key: (..., n, d_v)."""
        qkv.check(q, self.near.k, self.near.v)
        near = self._near(q, self.near, causal=False)
        return merge(near, self._whole(q, self.far._read(q))).out

    @as_written
    def read_causal(self, q: Array, k: Array, v: Array) -> Array:
        """Attend from the queries of new tokens to every key so far and, causally, to their own.

        As `PositiveState.read_causal`, with at most as many queries as new keys.
        """
        check_queries(q, k, v)
        check_keys(self.near, k, v)
        near = self.near._joined(replace(self.near, k=k, v=v))
        done, window = self._near(q, near, causal=True), near.window
        out = -1 if window is None else near.k.shape[-2] - window - 1
        if out < 0:  # all are in the window of the last query, and nothing was before
            return done.out
        far = self.far._read_causal(q, near.k[..., :out, :], near.v[..., :out, :])
        return merge(done, self._whole(q, far)).out

    def _near(self, q: Array, near: SoftmaxState, causal: bool) -> Attended:
        """Attend to keys, in windows that end at the last or, causally, at the query."""
        (q, k, v), ungroup = group_heads(q, near.k, near.v)
        sides = (near.window if causal else None, None)
        scores = near_scores(Keys(k, v), root_scale(self.far.scale, q), sides, causal)
        out, lse = attend(q, k, v, scores)
        return Attended(ungroup(out), ungroup(lse, 1))

    def _whole(self, q: Array, far: Attended) -> Attended:
        """What features have seen, with normalisers beside those of keys."""
        root, count = root_scale(self.far.scale, q), self.far.omega.shape[-2]
        return Attended(far.out, far.lse - lacking(q, root, count, self.near._xp))

    def merge(self, other: LocalState) -> LocalState:
        """Add the state of later keys, with the same window, frequencies and log weights."""
        check_same(self, other)
        check_same(self.near, other.near, "scale", "window")
        both = self.far.merge(other.far)
        return self._after(other.near, both)


LocalState.__module__ = "refattn.streaming"  # where users find it, and so do pickles
