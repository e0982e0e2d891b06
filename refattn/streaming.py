r"""Decoding states: attention over keys that arrive over time.

Each state offers `init` (from the first keys, possibly none), `update` (with more keys), `read`
(attend to the keys so far) and `merge` (with the state of later keys). States are immutable:
`update` and `merge` return new ones. Reading token by token after each update is causal attention.

`write_random_feature_attention` does so for arrays that need not fit in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from . import _validate, features, linear
from ._array import Array, array_namespace, constant, is_array_api_obj, is_numpy_array, root_scale
from ._blocks import blocks
from ._heads import broadcast_lead, group_heads
from ._held import held
from ._hops import Exponential, Keys, Samples, causal_attention, read, sample
from ._kernel import Attended, merge
from ._signed import merge_totals
from .attention import softmax_attention

__all__ = ["LinearState", "PositiveState", "SoftmaxState", "write_random_feature_attention"]


def __dir__() -> list[str]:
    return __all__


def _check_same(a: Any, b: Any, *fields: str) -> None:
    """Check that `b` is a state that merges with `a`."""
    if type(a) is not type(b):
        raise TypeError(f"`other` must be a {type(a).__name__}, got {type(b).__name__}.")
    for name in fields:
        if not _same(getattr(a, name), getattr(b, name)):
            raise ValueError(f"`other` must have the `{name}` of this state.")


def _same(a: Any, b: Any) -> bool:
    """Whether two options agree; of arrays other than NumPy's only shapes and dtypes can be seen.

    A `functools.partial` that was pickled equals no other, so that its parts are compared.
    """
    if a is b:
        return True
    if isinstance(a, partial) and isinstance(b, partial):
        return _same((a.func, a.args, a.keywords), (b.func, b.args, b.keywords))
    if isinstance(a, tuple | list) and type(a) is type(b):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[name], b[name]) for name in a)
    if is_array_api_obj(a) and is_array_api_obj(b):
        if is_numpy_array(a) and is_numpy_array(b):
            return np.array_equal(a, b)
        kinds = {is_numpy_array(x) or x.dtype for x in (a, b)}  # one library has its own dtypes
        return tuple(a.shape) == tuple(b.shape) and (True in kinds or len(kinds) == 1)
    equal = a == b
    return isinstance(equal, bool | np.bool_) and bool(equal)


def _check_keys(state: Any, k: Array, v: Array) -> None:
    """Check more keys and values of a state: a token axis left out would read heads as tokens."""
    _validate.attention(k, k, v)
    _validate.arrays(2, k=k, state=state._totals)
    if broadcast_lead(k, v) != state.lead:
        raise ValueError(
            f"`k` and `v` must have the leading axes of the state, {state.lead}, "
            f"got shapes {tuple(k.shape)} and {tuple(v.shape)}."
        )
    for name, x, size in (("k", k, state.d), ("v", v, state._totals.shape[-1])):
        if x.shape[-1] != size:
            raise ValueError(
                f"`{name}` must have the last axis of the state, {size}, got {x.shape[-1]}."
            )


def _sample(omega: Array, k: Array, v: Array, scale: float | None) -> Attended:
    """What frequencies, in kernel coordinates, have seen of some keys."""
    root = root_scale(scale, k)
    return sample(root * omega, Keys(k, v, half=root * root / 2))


def _own(x: Array) -> Array:
    """Copy an array of the caller's: a state does not change when the caller writes to it."""
    return array_namespace(x).astype(x, x.dtype, copy=True)


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
        _validate.attention(k, k, v)
        scale = _validate.real("scale", scale, optional=True, like=k)
        if window is not None:
            _validate.non_negative_integer("window", window)
        softcap = _validate.real("softcap", softcap, positive=True, optional=True)
        if sinks is not None:  # of as many heads as queries will have
            _validate.arrays(0, k=k, sinks=sinks)
            sinks = _own(sinks)
        return cls(_own(k), _own(v), scale, window, softcap, sinks)._last()

    def _last(self) -> SoftmaxState:
        """What the window holds."""
        m = self.k.shape[-2]
        if self.window is None or m <= self.window + 1:
            return self
        first = m - self.window - 1
        return replace(self, k=_own(self.k[..., first:, :]), v=_own(self.v[..., first:, :]))

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
        _check_keys(self, k, v)
        return self.merge(replace(self, k=k, v=v))

    def read(self, q: Array) -> Array:
        """Attend from queries (..., n, d) to every key so far: (..., n, d_v)."""
        return softmax_attention(
            q, self.k, self.v, scale=self.scale, softcap=self.softcap, sinks=self.sinks
        )

    def merge(self, other: SoftmaxState) -> SoftmaxState:
        """Add the keys of another state, of the same options."""
        _check_same(self, other, "scale", "window", "softcap", "sinks")
        _validate.states(k=(self.k, other.k), v=(self.v, other.v))
        xp = array_namespace(self.k, other.k)
        k, v = (xp.concat([a, b], axis=-2) for a, b in ((self.k, other.k), (self.v, other.v)))
        return replace(self, k=k, v=v)._last()


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
        _validate.attention(k, k, v)
        scale = _validate.real("scale", scale, positive=True, optional=True, like=k)
        ours, _ = _validate.frequencies(omega, log_weight, k, _validate.lead(k, k, v))
        if log_weight is None:
            log_weight = np.zeros(omega.shape[-2])
        samples = _sample(ours, k, v, scale)
        return cls(samples, _own(omega), _own(log_weight), scale)

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
        _check_keys(self, k, v)
        more = _sample(constant(self.omega, k), k, v, self.scale)
        return replace(self, samples=merge(self.samples, more))

    def read(self, q: Array) -> Array:
        """Attend from queries (..., n, d) to the samples: (..., n, d_v)."""
        f, log_z = self.samples
        omega, log_weight = self._proposal(q)
        (q, omega, f, log_z, log_weight), ungroup = group_heads(
            q, omega, f, log_z[..., None, :], log_weight
        )
        states = Attended(f, log_z[..., 0, :])
        samples = Samples(root_scale(self.scale, q) * omega, log_weight)
        return ungroup(read(q, samples, states).out)

    def read_causal(self, q: Array, k: Array, v: Array) -> Array:
        """Attend from the queries of new tokens to every key so far and, causally, to their own.

        q (..., n, d), k (..., m, d) and v (..., m, d_v) are as in causal attention; the state
        stays without the new keys. `read_causal`, then `update`, is one step over a long prompt.
        """
        _validate.attention(q, k, v, causal=True)
        f, log_z = self.samples
        omega, log_weight = self._proposal(q)
        _check_keys(self, k, v)
        (q, k, v, omega, f, log_z, log_weight), ungroup = group_heads(
            q, k, v, omega, f, log_z[..., None, :], log_weight
        )
        past = Attended(f, log_z[..., 0, :])
        root = root_scale(self.scale, q)
        features = Exponential(Samples(root * omega, log_weight))
        keys = Keys(k, v, half=root * root / 2)
        return ungroup(causal_attention(q, keys, features, past).out)

    def _proposal(self, q: Array) -> tuple[Array, Array]:
        """Frequencies and log weights (..., 1, S) for queries, which are checked."""
        f = self.samples.out
        _validate.arrays(2, q=q, state=f)
        omega, log_weight = (constant(x, q) for x in (self.omega, self.log_weight))
        _validate.attention(q, omega, f)
        return omega, log_weight[..., None, :]

    def merge(self, other: PositiveState) -> PositiveState:
        """Add what the same samples attended to elsewhere, from keys of the same leading axes.

        Both states must have the same frequencies and log weights. Where these are not NumPy
        arrays, only their shapes and dtypes are compared.
        """
        _check_same(self, other, "scale", "lead", "omega", "log_weight")
        _validate.attended(self.samples, other.samples)
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
        _validate.attention(k, k, v)
        return cls(linear.sums(k, v, feature_map), int(k.shape[-1]), feature_map)

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
        _check_keys(self, k, v)
        return self.merge(LinearState.init(k, v, feature_map=self.feature_map))

    def read(self, q: Array) -> Array:
        """Attend from queries (..., n, d) to every key so far: (..., n, d_v)."""
        _validate.arrays(2, q=q, state=self._totals)
        if q.shape[-1] != self.d:
            raise ValueError(
                f"`q` must have the last axis of the state, {self.d}, got {q.shape[-1]}."
            )
        return linear.read(q, self.sums, self.feature_map)

    def merge(self, other: LinearState) -> LinearState:
        """Add the sums over other keys, of the same leading axes and the same feature map."""
        _check_same(self, other, "d", "feature_map")
        _validate.states(**{"the state": (self.sums.total, other.sums.total)})
        return replace(self, sums=merge_totals(self.sums, other.sums))


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
    _validate.attention(q, k, v, causal=causal)
    _validate.positive_integer("chunk", chunk)
    n, shift = q.shape[-2], k.shape[-2] - q.shape[-2]
    shape = (*_validate.lead(q, k, v), n, v.shape[-1])
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
