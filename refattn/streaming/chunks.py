"""Decoding states that hold the keys of the last chunk and a summary of each earlier chunk."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from ..arrays import checks, frequencies, qkv
from ..arrays.blocks import block_shape, blocks
from ..arrays.heads import group_heads, grouped_lead
from ..arrays.library import Array, array_namespace, as_written, constant, device, root_scale
from ..arrays.shown import held
from ..engine.attend import Attended, attend, merge
from ..engine.chunks import Chunks, cut_chunks, slice_rows
from ..engine.scores import Scores
from ..estimators.near_and_far import (
    EvaInputs,
    attend_chunks,
    attend_moments,
    attend_squared,
    moments_of,
    squared,
    summaries_of,
)
from .state import KeysAndValues, check_keys, check_queries, check_same, check_states, copy_array


@dataclass(frozen=True, eq=False)
class _ChunkState(KeysAndValues):
    """Keys and values of the last chunk; those before it have summaries."""

    k: Array
    v: Array
    window: int
    scale: float | None

    def _joined(self, k: Array, v: Array) -> tuple[Array, Array]:
        """Append new keys and values to those of the last chunk."""
        check_keys(self, k, v)
        return self._followed_by(k, v)

    def _count(self, k: Array) -> int:
        """Count the chunks that keys from the first of the last chunk on are in."""
        return -(-int(k.shape[-2]) // self.window)

    def _cut(self, q: Array | None, k: Array, v: Array) -> Chunks:
        """Cut tokens into chunks, the first of which is the last of the state."""
        q = k[..., -1:, :] if q is None else q  # any row, where chunks are summed up only
        return cut_chunks(q, k, v, None, min(self.window, max(1, int(k.shape[-2]))))

    def _check_whole(self, other: _ChunkState) -> None:
        """Check that the chunks of later keys are those of all."""
        m = self.k.shape[-2]
        if m % self.window:
            raise ValueError(
                f"`other` must come after whole chunks of {self.window} keys each, but the last "
                f"chunk of this state has {m}."
            )
        check_states(k=(self.k, other.k), v=(self.v, other.v))


@held()
@dataclass(frozen=True, eq=False)
class SecondOrderState(_ChunkState):
    r"""The keys of the last chunk, and the moments of each chunk before it.

    It decodes `refattn.second_order_attention` with ``causal=True``. It stores (1 + d) (d + d_v)
    numbers for each earlier chunk.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import second_order_attention
    >>> from refattn.streaming import SecondOrderState
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 6, 4))
    >>> state = SecondOrderState.init(k[:5], v[:5], window=4).update(k[5:], v[5:])
    >>> want = second_order_attention(q, k, v, window=4, causal=True)
    >>> bool(np.allclose(state.read(q[5:]), want[5:]))
    True
    """

    far_k: Array  # means and half the covariances of keys, (..., C, d + d d)
    far_v: Array  # means of values and their covariances with keys, (..., C, d_v + d d_v)

    @classmethod
    @as_written
    def init(
        cls, k: Array, v: Array, *, window: int, scale: float | None = None
    ) -> SecondOrderState:
        """Make a state of the first keys (..., m, d) and values (..., m, d_v); m may be 0.

        The window and the scale are those of `refattn.second_order_attention`.
        """
        qkv.keys_and_values(k, v)
        checks.positive_integer("window", window)
        scale = checks.real("scale", scale, positive=True, optional=True, like=k)
        d, d_v = k.shape[-1], v.shape[-1]
        far_k = _zeros(k, tuple(k.shape[:-2]), d + d * d)
        far_v = _zeros(v, grouped_lead(k, k, v), d_v + d * d_v)
        empty = cls(k[..., :0, :], v[..., :0, :], int(window), scale, far_k, far_v)
        return empty.update(k, v)

    @as_written
    def update(self, k: Array, v: Array) -> SecondOrderState:
        """Add keys (..., m, d) and values (..., m, d_v), with the same leading axes."""
        k, v = self._joined(k, v)
        return self._summed(k, v, max(0, self._count(k) - 1))

    def _summed(self, k: Array, v: Array, count: int) -> SecondOrderState:
        """Replace the keys of `count` chunks, from the last of the state on, by their moments."""
        far_k, far_v, xp = self.far_k, self.far_v, self._xp
        if count:
            whole = slice(0, count * self.window)
            k_whole, v_whole = k[..., whole, :], v[..., whole, :]
            moments = moments_of(self._cut(None, k_whole, v_whole), root_scale(self.scale, k), xp)
            far_k = xp.concat([far_k, moments.far_k], axis=-2)
            far_v = xp.concat([far_v, moments.far_v], axis=-2)
            # Copied, lest the keys of whole chunks stay in memory.
            k, v = (copy_array(x[..., count * self.window :, :]) for x in (k, v))
        return replace(self, k=k, v=v, far_k=far_k, far_v=far_v)

    @as_written
    def read(self, q: Array) -> Array:
        """Attend from queries (..., n, d), all at the position of the last key: (..., n, d_v)."""
        _check_query(self, q)
        (q, k, v, *far), ungroup = group_heads(q, self.k, self.v, self.far_k, self.far_v)
        root = root_scale(self.scale, q)
        near = attend(q, k, v, Scores(root * root))
        return ungroup(self._with_far(near, root * root * q, *far).out)

    @as_written
    def read_causal(self, q: Array, k: Array, v: Array) -> Array:
        """Attend from the queries of new tokens to every key so far and, causally, to their own.

        As `PositiveState.read_causal`, with at most as many queries as new keys.
        """
        check_queries(q, k, v)
        k, v = self._joined(k, v)
        (q, k, v, *far), ungroup = group_heads(q, k, v, self.far_k, self.far_v)
        root = root_scale(self.scale, q)
        moments = moments_of(self._cut(q, k, v), root, self._xp)
        near = _rows_of(moments.chunks, attend_moments(moments))
        return ungroup(self._with_far(near, root * root * q, *far).out)

    def _with_far(self, near: Attended, x: Array, far_k: Array, far_v: Array) -> Attended:
        """Attend also from queries times the scale to moments of chunks, some at once."""
        if not far_k.shape[-2]:
            return merge(near, _of_no_key(near, self._xp))
        bias, done, xp = _full(math.log(self.window), x), [], self._xp
        size = max(1, math.prod(block_shape(x)) // int(x.shape[-1]) ** 2)
        for i in blocks(0, max(1, int(x.shape[-2])), size):
            queries, scores = squared(x[..., i, :], xp), Scores(bias=bias)
            done.append(attend_squared(*queries, far_k, far_v, scores, xp))
        out, lse = zip(*done, strict=True)
        far = Attended(xp.concat(list(out), axis=-2), xp.concat(list(lse), axis=-1))
        return merge(near, far)

    def merge(self, other: SecondOrderState) -> SecondOrderState:
        """Add the state of later keys; the keys of this one must fill whole chunks."""
        check_same(self, other, "scale", "window", "lead", "d")
        if not other.k.shape[-2]:
            return self
        self._check_whole(other)
        whole, xp = self._summed(self.k, self.v, self._count(self.k)), self._xp
        far_k = xp.concat([whole.far_k, other.far_k], axis=-2)
        far_v = xp.concat([whole.far_v, other.far_v], axis=-2)
        return replace(other, far_k=far_k, far_v=far_v)


@held()
@dataclass(frozen=True, eq=False)
class EvaState(_ChunkState):
    r"""The keys of the last chunk, and a summary of each chunk before it.

    It decodes `refattn.eva_attention` with ``causal=True``. It stores d + d_v numbers for each
    earlier chunk. Frequencies depend on the queries of their chunks, so `update` needs the queries
    of its tokens, unless you pass frequencies.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import eva_attention
    >>> from refattn.streaming import EvaState
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 6, 4))
    >>> state = EvaState.init(k[:5], v[:5], q=q[:5], window=4, rng=1)
    >>> state = state.update(k[5:], v[5:], q=q[5:])
    >>> want = eva_attention(q, k, v, window=4, rng=1, causal=True)
    >>> bool(np.allclose(state.read(q[5:]), want[5:]))
    True
    """

    mean: Array  # of the keys of each chunk before the last, (..., C, d)
    f: Array  # (..., C, d_v)
    omega: Array | None  # given frequencies of the last chunk and of those to come
    total_query: Array | None  # of the last chunk, (..., 1, d)
    num_queries: int
    rng: np.random.Generator | None  # never drawn from: copies are
    log_size: bool

    @classmethod
    @as_written
    def init(
        cls,
        k: Array,
        v: Array,
        *,
        window: int,
        q: Array | None = None,
        omega: Array | Literal["mean"] | None = None,
        rng: Any = None,
        log_size: bool = True,
        scale: float | None = None,
    ) -> EvaState:
        """Make a state of the first keys (..., m, d) and values (..., m, d_v); m may be 0.

        `q`, shape (..., n, d), has the queries of the last n of these tokens; n may be 0.
        An array `omega`, shape (..., C, d), may have more chunks than there are yet; with it `q`
        is not needed. The other options are as in `refattn.eva_attention`. A generator `rng` is
        copied, not advanced; the frequency of a chunk does not depend on the steps in which its
        tokens arrive.
        """
        qkv.keys_and_values(k, v)
        checks.positive_integer("window", window)
        checks.flag("log_size", log_size)
        scale = checks.real("scale", scale, positive=True, optional=True, like=k)
        total, lead, means = None, grouped_lead(k, k, v), frequencies.at_means(omega, rng)
        omega = None if means else omega
        if omega is not None:
            omega, _ = frequencies.shared(omega, None, k)
            lead, omega, rng = grouped_lead(omega, k, v), copy_array(omega), None
        else:
            if q is not None:
                check_queries(q, k, v)
                total = _zeros(q, tuple(q.shape[:-2]), q.shape[-1], 1)
                lead = grouped_lead(q, k, v)
            rng = None if means else copy.deepcopy(checks.generator(rng))
        mean, f = _zeros(k, tuple(k.shape[:-2]), k.shape[-1]), _zeros(v, lead, v.shape[-1])
        of_chunks = (mean, f, omega, total, 0, rng, log_size)
        return cls(k[..., :0, :], v[..., :0, :], int(window), scale, *of_chunks).update(k, v, q)

    @as_written
    def update(self, k: Array, v: Array, q: Array | None = None) -> EvaState:
        """Add keys (..., m, d) and values (..., m, d_v), with the same leading axes.

        `q`, shape (..., n, d), are the queries of the last n of these tokens; n may be 0. It is not
        needed if you passed an array `omega` to `init`.
        """
        self._check_new(q, k, v)
        k, v = self._joined(k, v)
        self._check_frequencies(k)
        totals, sizes = self._of_queries(q, k)
        return self._summed(k, v, totals, sizes, max(0, self._count(k) - 1))

    def _check_new(self, q: Array | None, k: Array, v: Array) -> None:
        """Check the queries of new tokens."""
        qkv.keys_and_values(k, v)
        if q is None and self.omega is None:
            raise ValueError(
                "`q` must be given, because frequencies are computed from queries. Tokens without "
                "a query have no row in it. With an array `omega`, it may be left out."
            )
        if q is not None:
            check_queries(q, k, v)
            self._check_heads(q)

    def _check_heads(self, q: Array) -> None:
        """Check that queries have the heads of the summaries."""
        if self.total_query is not None and q.shape[:-2] != self.total_query.shape[:-2]:
            raise ValueError(
                "`q` must have the leading axes of the first queries, "
                f"{tuple(self.total_query.shape[:-2])}, got shape {tuple(q.shape)}."
            )
        if self.omega is not None:
            outer = grouped_lead(q, self.k, self.v)
            shape = (*outer, *self.omega.shape[-2:])
            checks.broadcasts("omega", self.omega, shape, "(..., C, d)")

    def _check_frequencies(self, k: Array) -> None:
        """Check that there is a frequency for the chunk of each key."""
        if self.omega is not None and self.omega.shape[-2] < self._count(k):
            before = int(self.mean.shape[-2])
            raise ValueError(
                "`omega` must have a frequency for each chunk, "
                f"got {before + self.omega.shape[-2]} for {before + self._count(k)} chunks."
            )

    def _of_queries(self, q: Array | None, k: Array) -> tuple[Array | None, Any]:
        """Sum and count the queries of each chunk, of the last one and of new ones, (..., C, d)."""
        if self.omega is not None or q is None or self.total_query is None:
            return None, None
        count, new, d = max(1, self._count(k)), int(k.shape[-2]), q.shape[-1]
        size = min(self.window, max(1, new))
        first = int(q.shape[-2]) - new
        xp, totals = self._xp, slice_rows(q, first, first + count * size, self._xp)
        totals = xp.sum(xp.reshape(totals, (*q.shape[:-2], count, size, d)), axis=-2)
        totals = xp.concat([self.total_query + totals[..., :1, :], totals[..., 1:, :]], axis=-2)
        places = np.arange(count * size)
        there = ((places >= -first) & (places < new)).reshape(count, size)
        sizes = there.sum(1)
        sizes[0] += self.num_queries
        return totals, sizes

    def _summed(self, k: Array, v: Array, totals: Array | None, sizes: Any, count: int) -> EvaState:
        """Replace the keys of `count` chunks, from the last of the state on, by summaries."""
        mean, f, omega, rng = self.mean, self.f, self.omega, self.rng
        total, size = self.total_query, self.num_queries
        if count:
            xp, whole = self._xp, slice(0, count * self.window)
            noise, rng = self._noise(count)
            law = self._law(totals, sizes, count)
            (law, k_whole, v_whole), ungroup = group_heads(law, k[..., whole, :], v[..., whole, :])
            chunks = self._cut(None, k_whole, v_whole)
            summaries = self._summaries(chunks, law, noise)
            of_chunks = summaries.sampled().out[..., 0, :]
            mean_k = xp.reshape(summaries.mean, (*k.shape[:-2], count, self.d))
            mean = xp.concat([mean, mean_k], axis=-2)
            f = xp.concat([f, ungroup(of_chunks)], axis=-2)
            omega = None if omega is None else omega[..., count:, :]
            # Copied, lest the keys of whole chunks stay in memory.
            k, v = (copy_array(x[..., count * self.window :, :]) for x in (k, v))
        if totals is not None:
            total, size = totals[..., -1:, :], int(sizes[-1])
        grown = replace(self, k=k, v=v, mean=mean, f=f, omega=omega, rng=rng)
        return replace(grown, total_query=total, num_queries=size)

    def _law(self, totals: Array | None, sizes: Any, count: int) -> Array:
        """Return frequencies of the next chunks, or the mean queries that they are drawn about."""
        if self.omega is not None or totals is None:
            return constant(self.omega, self.k)[..., :count, :]
        some = np.maximum(sizes[:count], 1)[:, None]
        return totals[..., :count, :] / constant(some, totals)

    def _noise(self, count: int) -> tuple[Any, np.random.Generator | None]:
        """Draw noise for the next chunks, and return the generator of those after them."""
        if self.rng is None:
            return None, None
        rng = copy.deepcopy(self.rng)
        return rng.standard_normal((count, self.d)), rng

    def _summaries(self, chunks: Chunks, law: Array, noise: Any) -> EvaInputs:
        """Prepare summaries, at fixed frequencies or about mean queries."""
        root = root_scale(self.scale, chunks.k)
        if self.omega is not None:
            return summaries_of(chunks, root, law, None, self.log_size, self._xp)
        noise = None if noise is None else constant(noise, chunks.k)
        about = chunks._replace(mean_query=law)
        return summaries_of(about, root, None, noise, self.log_size, self._xp)

    @as_written
    def read(self, q: Array) -> Array:
        """Attend from queries (..., n, d), all at the position of the last key: (..., n, d_v)."""
        _check_query(self, q)
        self._check_heads(q)
        (q, k, v, *far), ungroup = group_heads(q, self.k, self.v, self.mean, self.f)
        root = root_scale(self.scale, q)
        near = attend(q, k, v, Scores(root * root))
        return ungroup(self._with_far(near, q, root, *far).out)

    @as_written
    def read_causal(self, q: Array, k: Array, v: Array) -> Array:
        """Attend from the queries of new tokens to every key so far and, causally, to their own.

        As `PositiveState.read_causal`, with at most as many queries as new keys.
        """
        self._check_new(q, k, v)
        k, v = self._joined(k, v)
        self._check_frequencies(k)
        count = self._count(k)
        totals, sizes = self._of_queries(q, k)
        law = self._law(totals, sizes, count)
        (q, k, v, law, *far), ungroup = group_heads(q, k, v, law, self.mean, self.f)
        summaries = self._summaries(self._cut(q, k, v), law, self._noise(count)[0])
        near = _rows_of(summaries.chunks, attend_chunks(summaries))
        return ungroup(self._with_far(near, q, summaries.root, *far).out)

    def _with_far(self, near: Attended, q: Array, root: Array, mean: Array, f: Array) -> Attended:
        """Attend also to summaries of the chunks before the last."""
        if not mean.shape[-2]:
            return merge(near, _of_no_key(near, self._xp))
        bias = _full(math.log(self.window) if self.log_size else 0.0, q)
        return merge(near, attend(q, mean, f, Scores(root * root, bias)))

    def merge(self, other: EvaState) -> EvaState:
        """Add the state of later keys; the keys of this one must fill whole chunks.

        Chunks that are not yet summarised get the frequencies of `other`.
        """
        check_same(self, other, "scale", "window", "log_size", "lead", "d")
        if (self.omega is None, self.rng is None) != (other.omega is None, other.rng is None):
            raise ValueError(
                "`other` must have frequencies that are passed, drawn or means, as this state has."
            )
        if not other.k.shape[-2]:
            return self
        self._check_whole(other)
        check_states(**{"the state": (self.f, other.f)})
        sizes = np.array([self.num_queries])
        count, xp = self._count(self.k), self._xp
        whole = self._summed(self.k, self.v, self.total_query, sizes, count)
        mean, f = (
            xp.concat([x, y], axis=-2) for x, y in ((whole.mean, other.mean), (whole.f, other.f))
        )
        return replace(other, mean=mean, f=f)


def _check_query(state: _ChunkState, q: Array) -> None:
    """Check queries that are all at the position of the last key."""
    checks.arrays(2, q=q, state=state.v)
    qkv.check(q, state.k, state.v)


@as_written
def _rows_of(chunks: Chunks, done: Attended) -> Attended:
    """Join results of chunks to those of the queries, (..., n, d_v)."""
    return Attended(chunks.joined(done.out), chunks.joined(done.lse[..., None])[..., 0])


def _of_no_key(like: Attended, xp: Any) -> Attended:
    """Return the result of queries that see no key."""
    return Attended(xp.zeros_like(like.out), xp.full_like(like.lse, -math.inf))


def _full(value: float, like: Array) -> Array:
    """Make a bias of all queries and keys."""
    return constant(np.full((1, 1), value), like)


def _zeros(like: Array, lead: tuple[int, ...], d: int, length: int = 0) -> Array:
    """Make zeros (..., length, d)."""
    xp, home = array_namespace(like), device(like)
    return xp.zeros((*lead, length, d), dtype=like.dtype, device=home)


EvaState.__module__ = SecondOrderState.__module__ = "refattn.streaming"  # where users find them
