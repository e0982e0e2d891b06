r"""Decoding states: attention over keys that arrive over time.

Each state offers `init` (from the first keys, possibly none), `update` (with more keys), `read`
(attend to the keys so far) and `merge` (with the state of later keys). States are immutable:
`update` and `merge` return new ones. Reading token by token after each update is causal attention.
`EvaState` takes the queries of its tokens too. There is no state of `coreset_attention` or
`sampled_key_attention`: weights, or what is drawn, are of all keys.

`write_random_feature_attention` does so for arrays that need not fit in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .. import features
from ..arrays import checks, frequencies, qkv
from ..arrays.blocks import blocks
from ..arrays.heads import broadcast_lead, group_heads
from ..arrays.library import Array, array_namespace, constant, root_scale
from ..arrays.shown import held
from ..attention import softmax_attention
from ..engine.causal import causal_attention
from ..engine.hops import Keys, Samples, read, sample
from ..engine.kernel import Attended, attend, merge
from ..engine.positive import Positive
from ..engine.signed import merge_totals
from ..estimators import linear
from ..estimators.near_and_far import lacking, near_options
from .chunks import EvaState, SecondOrderState
from .state import check_keys, check_queries, check_same, check_states, own

__all__ = [
    "EvaState",
    "LinearState",
    "LocalState",
    "PositiveState",
    "SecondOrderState",
    "SoftmaxState",
    "write_random_feature_attention",
]


def __dir__() -> list[str]:
    return __all__


def _sample(omega: Array, k: Array, v: Array, scale: float | None) -> Attended:
    """What frequencies, in kernel coordinates, have seen of some keys."""
    root = root_scale(scale, k)
    return sample(root * omega, Keys(k, v, half=root * root / 2))


@held()
@dataclass(frozen=True, eq=False)
class SoftmaxState:
    """The keys and values so far, for exact attention: a key-value cache.

    Its size grows with the number of tokens, but for that of a window, which holds the last of
    them; that of `PositiveState` and `LinearState` does not.

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
        """Start from keys (..., m, d) and values (..., m, d_v); m may be 0.

        With a `window` the last key and as many before it are kept, as in `softmax_attention` with
        ``window=(window, 0)``; `softcap` and `sinks` are as there.
        """
        qkv.check(k, k, v)
        scale = checks.real("scale", scale, optional=True, like=k)
        if window is not None:
            checks.non_negative_integer("window", window)
        softcap = checks.real("softcap", softcap, positive=True, optional=True)
        if sinks is not None:  # of as many heads as queries will have
            checks.arrays(0, k=k, sinks=sinks)
            sinks = own(sinks)
        return cls(own(k), own(v), scale, window, softcap, sinks)._last()

    def _last(self) -> SoftmaxState:
        """What the window holds."""
        m = self.k.shape[-2]
        if self.window is None or m <= self.window + 1:
            return self
        first = m - self.window - 1
        return replace(self, k=own(self.k[..., first:, :]), v=own(self.v[..., first:, :]))

    @property
    def lead(self) -> tuple[int, ...]:
        """Leading axes of the keys and values."""
        return broadcast_lead(self.k, self.v)

    @property
    def d(self) -> int:
        """Length of a key."""
        return int(self.k.shape[-1])

    @property
    def _totals(self) -> Array:
        """What is kept of the values, (..., d_v)."""
        return self.v

    def update(self, k: Array, v: Array) -> SoftmaxState:
        """Add keys (..., m, d) and values (..., m, d_v), of the leading axes of the first."""
        check_keys(self, k, v)
        return self.merge(replace(self, k=k, v=v))

    def read(self, q: Array) -> Array:
        """Attend from queries (..., n, d) to every key so far: (..., n, d_v)."""
        return softmax_attention(
            q, self.k, self.v, scale=self.scale, softcap=self.softcap, sinks=self.sinks
        )

    def merge(self, other: SoftmaxState) -> SoftmaxState:
        """Add the keys of another state, of the same options."""
        check_same(self, other, "scale", "window", "softcap", "sinks")
        return self._joined(other)._last()

    def _joined(self, other: SoftmaxState) -> SoftmaxState:
        """The keys of both, of which some may leave the window."""
        check_states(k=(self.k, other.k), v=(self.v, other.v))
        xp = array_namespace(self.k, other.k)
        k, v = (xp.concat([a, b], axis=-2) for a, b in ((self.k, other.k), (self.v, other.v)))
        return replace(self, k=k, v=v)


@held()
@dataclass(frozen=True, eq=False)
class PositiveState:
    r"""What samples have attended to so far, for random-feature attention.

    For each frequency the mean value f_s and the log normaliser log Z_s: S (d_v + 1) numbers a
    head, whatever the number of tokens. Two states merge as `refattn.merge` says.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import random_feature_attention, sampling
    >>> from refattn.streaming import PositiveState
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 6, 4))
    >>> omega = sampling.draw(8, 4, rng=1).omega
    >>> state = PositiveState.init(k[:4], v[:4], omega=omega).update(k[4:], v[4:])
    >>> bool(np.allclose(state.read(q), random_feature_attention(q, k, v, omega=omega)))
    True
    """

    samples: Attended
    omega: Array
    log_weight: Array
    scale: float | None = None

    @classmethod
    def init(
        cls,
        k: Array,
        v: Array,
        *,
        omega: Array,
        log_weight: Array | None = None,
        scale: float | None = None,
    ) -> PositiveState:
        """Start from keys (..., m, d) and values (..., m, d_v), m possibly 0.

        `omega`, shape (..., S, d), `log_weight`, shape (..., S), and `scale` are as in
        `refattn.random_feature_attention`; leading axes are those of the keys.
        """
        qkv.check(k, k, v)
        scale = checks.real("scale", scale, positive=True, optional=True, like=k)
        ours, _ = frequencies.shared(omega, log_weight, k, qkv.lead(k, k, v))
        if log_weight is None:
            log_weight = np.zeros(omega.shape[-2])
        samples = _sample(ours, k, v, scale)
        return cls(samples, own(omega), own(log_weight), scale)

    @property
    def lead(self) -> tuple[int, ...]:
        """Leading axes of the keys and values."""
        return tuple(self.samples.lse.shape[:-1])

    @property
    def d(self) -> int:
        """Length of a key."""
        return int(self.omega.shape[-1])

    @property
    def _totals(self) -> Array:
        """What is kept of the values, (..., d_v)."""
        return self.samples.out

    def update(self, k: Array, v: Array) -> PositiveState:
        """Add keys (..., m, d) and values (..., m, d_v), of the leading axes of the first."""
        check_keys(self, k, v)
        more = _sample(constant(self.omega, k), k, v, self.scale)
        return replace(self, samples=merge(self.samples, more))

    def read(self, q: Array) -> Array:
        """Attend from queries (..., n, d) to the samples: (..., n, d_v)."""
        return self._read(q).out

    def _read(self, q: Array) -> Attended:
        """Attend to the samples; `lse` lacks what `near_and_far.lacking` says."""
        f, log_z = self.samples
        omega, log_weight = self._proposal(q)
        (q, omega, f, log_z, log_weight), ungroup = group_heads(
            q, omega, f, log_z[..., None, :], log_weight
        )
        states = Attended(f, log_z[..., 0, :])
        samples = Samples(root_scale(self.scale, q) * omega, log_weight)
        out, lse = read(q, samples, states)
        return Attended(ungroup(out), ungroup(lse, 1))

    def read_causal(self, q: Array, k: Array, v: Array) -> Array:
        """Attend from the queries of new tokens to every key so far and, causally, to their own.

        q (..., n, d), k (..., m, d) and v (..., m, d_v) are as in causal attention; the state
        stays without the new keys. `read_causal`, then `update`, is one step over a long prompt.
        """
        qkv.check(q, k, v, causal=True)
        check_keys(self, k, v)
        return self._read_causal(q, k, v).out

    def _read_causal(self, q: Array, k: Array, v: Array) -> Attended:
        f, log_z = self.samples
        omega, log_weight = self._proposal(q)
        (q, k, v, omega, f, log_z, log_weight), ungroup = group_heads(
            q, k, v, omega, f, log_z[..., None, :], log_weight
        )
        past = Attended(f, log_z[..., 0, :])
        root = root_scale(self.scale, q)
        features = Positive(Samples(root * omega, log_weight))
        keys = Keys(k, v, half=root * root / 2)
        out, lse = causal_attention(q, keys, features, past)
        return Attended(ungroup(out), ungroup(lse, 1))

    def _proposal(self, q: Array) -> tuple[Array, Array]:
        """Frequencies and log weights (..., 1, S) for queries, which are checked."""
        f = self.samples.out
        checks.arrays(2, q=q, state=f)
        omega, log_weight = (constant(x, q) for x in (self.omega, self.log_weight))
        qkv.check(q, omega, f)
        return omega, log_weight[..., None, :]

    def merge(self, other: PositiveState) -> PositiveState:
        """Add what the same samples attended to elsewhere, from keys of the same leading axes.

        Both states must have the same frequencies and log weights. Where these are not NumPy
        arrays, only their shapes and dtypes are compared.
        """
        check_same(self, other, "scale", "lead", "omega", "log_weight")
        qkv.attended(self.samples, other.samples)
        return replace(self, samples=merge(self.samples, other.samples))


@held()
@dataclass(frozen=True, eq=False)
class LinearState:
    r"""Sums of features times values so far, for linear attention.

    The numbers sum_j phi(k_j) [v_j, 1] over a common scale e^base: F (d_v + 1) a head, whatever
    the number of tokens. Reference 004; Katharopoulos et al., arXiv:2006.16236.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import linear_attention
    >>> from refattn.streaming import LinearState
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 6, 4))
    >>> state = LinearState.init(k[:4], v[:4]).update(k[4:], v[4:])
    >>> bool(np.allclose(state.read(q), linear_attention(q, k, v)))
    True
    """

    sums: Any
    d: int
    feature_map: Callable[[Array], Any] = features.elu_features

    @classmethod
    def init(
        cls, k: Array, v: Array, *, feature_map: Callable[[Array], Any] = features.elu_features
    ) -> LinearState:
        """Start from keys (..., m, d) and values (..., m, d_v), m possibly 0.

        `feature_map` is as in `refattn.linear_attention`.
        """
        qkv.check(k, k, v)
        return cls(linear.sum_keys(k, v, feature_map), int(k.shape[-1]), feature_map)

    @property
    def lead(self) -> tuple[int, ...]:
        """Leading axes of the keys and values."""
        return tuple(self.sums.total.shape[:-2])

    @property
    def _totals(self) -> Array:
        """What is kept of the values, (..., d_v)."""
        return self.sums.total[..., :-1]

    def update(self, k: Array, v: Array) -> LinearState:
        """Add keys (..., m, d) and values (..., m, d_v), of the leading axes of the first."""
        check_keys(self, k, v)
        return self.merge(LinearState.init(k, v, feature_map=self.feature_map))

    def read(self, q: Array) -> Array:
        """Attend from queries (..., n, d) to every key so far: (..., n, d_v)."""
        checks.arrays(2, q=q, state=self._totals)
        if q.shape[-1] != self.d:
            raise ValueError(
                f"`q` must have the last axis of the state, {self.d}, got {q.shape[-1]}."
            )
        return linear.read_sums(q, self.sums, self.feature_map)

    def merge(self, other: LinearState) -> LinearState:
        """Add the sums over other keys, of the same leading axes and the same feature map."""
        check_same(self, other, "d", "feature_map")
        check_states(**{"the state": (self.sums.total, other.sums.total)})
        return replace(self, sums=merge_totals(self.sums, other.sums))


@dataclass(frozen=True, eq=False)
class LocalState:
    r"""The last keys, and what samples have attended to of those before them.

    It decodes `refattn.local_random_feature_attention` with ``causal=True``. The window holds its
    keys and values, samples S (d_v + 1) numbers a head, whatever the number of tokens.

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
        """Start from keys (..., m, d) and values (..., m, d_v), m possibly 0.

        The last key and `window` before it are near, as with ``window=(window, 0)``; all are with
        None. The other arguments are as in `PositiveState.init`.
        """
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

    def update(self, k: Array, v: Array) -> LocalState:
        """Add keys (..., m, d) and values (..., m, d_v), of the leading axes of the first."""
        check_keys(self.near, k, v)
        return self._after(replace(self.near, k=k, v=v), self.far)

    def _after(self, near: SoftmaxState, far: PositiveState) -> LocalState:
        """Put later keys into the window, and into `far` those that leave it."""
        near, window = self.near._joined(near), self.near.window
        out = 0 if window is None else max(0, near.k.shape[-2] - window - 1)
        if out:
            far = far.update(near.k[..., :out, :], near.v[..., :out, :])
        return replace(self, near=near._last(), far=far)

    def read(self, q: Array) -> Array:
        """Attend from queries (..., n, d), all level with the last key: (..., n, d_v)."""
        qkv.check(q, self.near.k, self.near.v)
        near = self._near(q, self.near, causal=False)
        return merge(near, self._whole(q, self.far._read(q))).out

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
        options = near_options(Keys(k, v), root_scale(self.far.scale, q), sides, causal)
        out, lse = attend(q, k, v, **options)
        return Attended(ungroup(out), ungroup(lse, 1))

    def _whole(self, q: Array, far: Attended) -> Attended:
        """What features have seen, with normalisers beside those of keys."""
        root, count = root_scale(self.far.scale, q), self.far.omega.shape[-2]
        return Attended(far.out, far.lse - lacking(q, root, count, array_namespace(q)))

    def merge(self, other: LocalState) -> LocalState:
        """Add the state of later keys, of the same window, frequencies and log weights."""
        check_same(self, other)
        check_same(self.near, other.near, "scale", "window")
        both = self.far.merge(other.far)
        return self._after(other.near, both)


def write_random_feature_attention(
    out: Array,
    q: Array,
    k: Array,
    v: Array,
    *,
    omega: Array,
    log_weight: Array | None = None,
    scale: float | None = None,
    causal: bool = False,
    chunk: int = 65_536,
) -> Array:
    r"""Write random-feature attention of long arrays, read chunk by chunk, into another.

    The numbers are those of `refattn.random_feature_attention` with positive features, to rounding.
    Only `chunk` tokens are in memory at a time, if the arrays are memory maps, and the states of
    the samples.

    Parameters
    ----------
    out : NumPy array, shape (..., n, d_v), dtype of `q`
        Where the result goes; for instance `numpy.lib.format.open_memmap(..., mode="w+")`. It must
        not overlap the other arrays.
    q : NumPy array, shape (..., n, d), float32 or float64
        Queries; for instance `numpy.load(..., mmap_mode="r")`.
    k : NumPy array, shape (..., m, d), dtype of `q`
        Keys.
    v : NumPy array, shape (..., m, d_v), dtype of `q`
        Values.
    omega : array, shape (..., S, d)
        Frequencies in kernel coordinates.
    log_weight : array, shape (..., S), optional
        Log importance weights of `omega`.
    scale : float, optional
        Factor on q . k, 1 / sqrt(d) by default.
    causal : bool, default False
        Query i sees key j only if j <= i + m - n.
    chunk : int, default 65536
        Tokens read at a time.

    Returns
    -------
    array
        `out`.

    Raises
    ------
    TypeError
        If `out` is not a writable NumPy array of the dtype of `q`, or as in
        `refattn.random_feature_attention`.
    ValueError
        If shapes do not match, or `chunk` is not positive.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import random_feature_attention, sampling
    >>> from refattn.streaming import write_random_feature_attention
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 6, 4))
    >>> omega, out = sampling.draw(8, 4, rng=1).omega, np.empty((6, 4))
    >>> bool(write_random_feature_attention(out, q, k, v, omega=omega, chunk=2) is out)
    True
    >>> bool(np.allclose(out, random_feature_attention(q, k, v, omega=omega)))
    True
    """
    qkv.check(q, k, v, causal=causal)
    checks.positive_integer("chunk", chunk)
    n, shift = q.shape[-2], k.shape[-2] - q.shape[-2]
    shape = (*qkv.lead(q, k, v), n, v.shape[-1])
    if not (isinstance(out, np.ndarray) and out.dtype == q.dtype and out.flags.writeable):
        raise TypeError(f"`out` must be a writable NumPy array of {q.dtype}, got {_kind(out)}.")
    if out.shape != shape:
        raise ValueError(f"`out` must have shape {shape}, got {out.shape}.")

    def tokens(start: int, stop: int) -> tuple[Array, Array]:
        j = slice(max(start, 0), max(stop, 0))
        return k[..., j, :], v[..., j, :]

    state = PositiveState.init(*tokens(0, 0), omega=omega, log_weight=log_weight, scale=scale)
    for j in blocks(0, max(shift, 0) if causal else k.shape[-2], chunk):
        state = state.update(*tokens(j.start, j.stop))
    seen = min(max(-shift, 0), n) if causal else n  # queries before it read the state as it is
    for i in blocks(0, seen, chunk):
        out[..., i, :] = state.read(q[..., i, :])
    for i in blocks(seen, n, chunk):
        own = tokens(i.start + shift, i.stop + shift)
        out[..., i, :] = state.read_causal(q[..., i, :], *own)
        state = state.update(*own)
    return out


def _kind(x: Any) -> str:
    if not isinstance(x, np.ndarray):
        return type(x).__name__
    return f"{x.dtype}, {'' if x.flags.writeable else 'not '}writable"
