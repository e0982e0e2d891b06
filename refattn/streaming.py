r"""Decoding states: attention over keys that arrive over time.

Each state offers `init` (from the first keys, possibly none), `update` (with more keys), `read`
(attend to the keys so far) and `merge` (with the state of later keys). States are immutable:
`update` and `merge` return new ones. Reading token by token after each update is causal attention.

`write_random_feature_attention` does so for arrays that need not fit in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from . import _validate, features
from ._array import (
    Array,
    array_namespace,
    blocks,
    constant,
    group_heads,
    is_numpy_array,
    root_scale,
)
from .attention import Attended, _merge, softmax_attention
from .estimators import _causal, _read, _sample

__all__ = ["LinearState", "PositiveState", "SoftmaxState", "write_random_feature_attention"]


def _check_same(a: Any, b: Any, *fields: str) -> None:
    """Check that `b` is a state that merges with `a`."""
    if type(a) is not type(b):
        raise TypeError(f"`other` must be a {type(a).__name__}, got {type(b).__name__}.")
    for name in fields:
        x, y = getattr(a, name), getattr(b, name)
        if x is not y and x != y:
            raise ValueError(f"`other` must have the `{name}` of this state.")


@dataclass(frozen=True, eq=False)
class SoftmaxState:
    """The keys and values so far, for exact attention: a key-value cache.

    Its size grows with the number of tokens; that of `PositiveState` and `LinearState` does not.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn.streaming import SoftmaxState
    >>> k, v = np.eye(2), np.array([[1.0], [3.0]])
    >>> state = SoftmaxState.init(k[:1], v[:1]).update(k[1:], v[1:])
    >>> state.read(np.zeros((1, 2)))
    array([[2.]])
    """

    k: Array
    v: Array
    scale: float | None = None

    @classmethod
    def init(cls, k: Array, v: Array, *, scale: float | None = None) -> SoftmaxState:
        """Start from keys (..., m, d) and values (..., m, d_v); m may be 0."""
        _validate.attention(k, k, v)
        scale = _validate.real("scale", scale, optional=True, like=k)
        return cls(k, v, scale)

    def update(self, k: Array, v: Array) -> SoftmaxState:
        """Add keys (..., m, d) and values (..., m, d_v)."""
        return self.merge(SoftmaxState.init(k, v, scale=self.scale))

    def read(self, q: Array) -> Array:
        """Attend from queries (..., n, d) to every key so far: (..., n, d_v)."""
        return softmax_attention(q, self.k, self.v, scale=self.scale)

    def merge(self, other: SoftmaxState) -> SoftmaxState:
        """Add the keys of another state, of the same scale."""
        _check_same(self, other, "scale")
        _validate.states(k=(self.k, other.k), v=(self.v, other.v))
        xp = array_namespace(self.k, other.k)
        k, v = (xp.concat([a, b], axis=-2) for a, b in ((self.k, other.k), (self.v, other.v)))
        return replace(self, k=k, v=v)


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
        lead = _validate.lead(k, k, v)
        ours, log_weight = _validate.frequencies(omega, log_weight, k, lead)
        return cls(_sample(ours, k, v, None, root_scale(scale, k)), omega, log_weight, scale)

    def update(self, k: Array, v: Array) -> PositiveState:
        """Add keys (..., m, d) and values (..., m, d_v)."""
        _validate.attention(k, k, v)
        _validate.arrays(2, k=k, state=self.samples.out)
        omega, _ = _validate.frequencies(self.omega, None, k, _validate.lead(k, k, v))
        more = _sample(omega, k, v, None, root_scale(self.scale, k))
        _validate.attended(self.samples, more)
        return replace(self, samples=_merge(self.samples, more))

    def read(self, q: Array) -> Array:
        """Attend from queries (..., n, d) to the samples: (..., n, d_v)."""
        f, log_z = self.samples
        _validate.arrays(2, q=q, state=f)
        omega = constant(self.omega, q)
        _validate.attention(q, omega, f)
        (q, omega, f, log_z, log_weight), ungroup = group_heads(
            q, omega, f, log_z[..., None, :], self.log_weight[..., None, :]
        )
        states = Attended(f, log_z[..., 0, :])
        return ungroup(_read(q, omega, states, log_weight, root_scale(self.scale, q)).out)

    def read_causal(self, q: Array, k: Array, v: Array) -> Array:
        """Attend from the queries of new tokens to every key so far and, causally, to their own.

        q (..., n, d), k (..., m, d) and v (..., m, d_v) are as in causal attention; the state
        stays without the new keys. `read_causal`, then `update`, is one step over a long prompt.
        """
        _validate.attention(q, k, v, causal=True)
        f, log_z = self.samples
        _validate.arrays(2, q=q, state=f)
        omega = constant(self.omega, q)
        _validate.attention(q, omega, f)
        if v.shape[-1] != f.shape[-1]:
            raise ValueError(
                f"`v` must have the last axis of the state, {f.shape[-1]}, got {v.shape[-1]}."
            )
        (q, k, v, omega, f, log_z, log_weight), ungroup = group_heads(
            q, k, v, omega, f, log_z[..., None, :], self.log_weight[..., None, :]
        )
        past = Attended(f, log_z[..., 0, :])
        root = root_scale(self.scale, q)
        return ungroup(_causal(q, k, v, omega, log_weight, root, None, True, past).out)

    def merge(self, other: PositiveState) -> PositiveState:
        """Add what the same samples attended to elsewhere.

        Both states must have the same frequencies; this is checked if both were NumPy arrays.
        """
        _check_same(self, other, "scale")
        pair = self.omega, other.omega
        if all(is_numpy_array(x) for x in pair) and not np.array_equal(*pair):
            raise ValueError("`other` must have the `omega` of this state.")
        _validate.attended(self.samples, other.samples)
        return replace(self, samples=_merge(self.samples, other.samples))


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
    feature_map: Callable[[Array], Any] = features.elu_features

    @classmethod
    def init(
        cls, k: Array, v: Array, *, feature_map: Callable[[Array], Any] = features.elu_features
    ) -> LinearState:
        """Start from keys (..., m, d) and values (..., m, d_v), m possibly 0.

        `feature_map` is as in `refattn.linear_attention`.
        """
        _validate.attention(k, k, v)
        return cls(features._sum(k, v, feature_map), feature_map)

    def update(self, k: Array, v: Array) -> LinearState:
        """Add keys (..., m, d) and values (..., m, d_v)."""
        return self.merge(LinearState.init(k, v, feature_map=self.feature_map))

    def read(self, q: Array) -> Array:
        """Attend from queries (..., n, d) to every key so far: (..., n, d_v)."""
        return features._read(q, self.sums, self.feature_map)

    def merge(self, other: LinearState) -> LinearState:
        """Add the sums over other keys, of the same feature map."""
        _check_same(self, other, "feature_map")
        _validate.states(**{"the state": (self.sums.total, other.sums.total)})
        xp = array_namespace(self.sums.total, other.sums.total)
        return replace(self, sums=features._combine(self.sums, other.sums, xp))


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
