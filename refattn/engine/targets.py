"""Draw frequencies of randomized attention: normal about a query plus one of the keys it sees."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any, NamedTuple, cast

import numpy as np

from ..arrays.arithmetic import multiply
from ..arrays.blocks import WHOLE, block_shape, blocks, part, put, room, some_heads, tiles
from ..arrays.library import (
    Array,
    Doubles,
    array_namespace,
    as_written,
    constant,
    device,
    has_float64,
    host_dtype,
    is_numpy_array,
    root_scale,
    to_host,
    widest,
)
from .attend import attend
from .scores import Scores, causal_mask


class Targets(NamedTuple):
    """What frequencies of queries are drawn by: uniform numbers of all, and a source of noise.

    Heads are in groups. What is drawn of some depends on how many were drawn before them.
    """

    q: Array
    k: Array
    mask: Array | None
    u: Doubles  # (..., n, S)
    rng: np.random.Generator
    scale: float | None
    causal: bool

    @property
    def lead(self) -> tuple[int, ...]:
        """Leading axes of the frequencies, before those of queries."""
        return self.u.shape[:-2]

    def part(self, head: tuple[slice, ...]) -> Targets:
        """Take some heads."""
        q, k, mask = (some_heads(x, head) for x in self[:3])
        return self._replace(q=q, k=k, mask=mask, u=self.u[head])

    def draw(self) -> Array:
        """Draw frequencies, (..., n, S, d), on the host where the device has no float64."""
        q, k, mask = self[:3]
        if not has_float64(q, array_namespace(q)):
            with suppress(TypeError):  # the values of traced arrays are not known yet
                q, k, mask = (None if x is None else to_host(x, None) for x in (q, k, mask))
        out = draw_from_targets(self._replace(q=q, k=k, mask=mask), array_namespace(q, k))
        return constant(out, self.q) if is_numpy_array(out) else out


@as_written
def draw_from_targets(targets: Targets, xp: Any) -> Array:
    """Add to noise the query and the key whose share of the distribution function holds u."""
    q, k, mask, u, rng, scale, causal = targets
    (*lead, n, num_samples), (m, d) = u.shape, k.shape[-2:]
    wide = widest(q, xp)
    # A cumulative sum of many shares in float32 would miss keys: it is in the widest type.
    root, columns = root_scale(scale, q), block_shape(q)[1]
    wide_root = root_scale(scale, np.empty((0, d), dtype=host_dtype(q))).item()
    # Below 1, and so below the total: some key is chosen, though u rounds to 1 in float32.
    u = np.minimum(u, 1 - float(xp.finfo(wide).eps))
    out = xp.empty((*u.shape, d), dtype=q.dtype, device=device(q))
    boxes, z = list(tiles((*lead, n), max(1, room(q) // (columns * num_samples)))), None
    if not is_numpy_array(q):  # one copy to the device, of what is drawn box by box
        noise = np.empty(out.shape)
        for box in boxes:
            noise[box] = rng.standard_normal(noise[box].shape)
        z, u = constant(noise, q), xp.asarray(u, dtype=wide, device=device(q))
    for box in boxes:
        (*head, i), at = box, cast(Any, (*box, ...))
        stop = max(0, min(m, i.stop + m - n)) if causal else m  # keys that some of the rows see
        q_i = part(q, (*head, i, WHOLE))
        k_h = part(k, (*head, slice(0, stop), WHOLE))
        seen = None if mask is None else part(mask, (*head, i, slice(0, stop)))
        # Only the normaliser is used: one column of the keys stands for values.
        scores = Scores(root * root, mask=seen, causal=causal)
        lse = attend(q_i, k_h, k_h[..., :1], scores).lse
        lse = xp.where(lse == -math.inf, 0.0, xp.astype(lse, wide))[..., None]
        scaled = xp.astype(q_i, wide) * (wide_root * wide_root)
        shift = stop - (i.stop - i.start) if causal else None
        # Shares are computed twice: for their total, which rounding leaves off 1, and to choose.
        shares = _KeyShares(scaled, k_h, lse, seen, shift, list(blocks(0, stop, columns)), xp)
        total = shares.total()
        key = shares.key_at(total * constant(u[at], total))
        key = key + xp.astype(0.0 * total, q.dtype)[..., None]  # a nan that was seen
        z_i = constant(rng.standard_normal((*u[at].shape, d)), q) if z is None else z[at]
        omega = z_i + root * (q_i[..., None, :] + key)
        out = put(out, (*head, i, slice(0, num_samples), slice(0, d)), omega)
    return out


class _KeyShares(NamedTuple):
    """The shares of keys in the attention of some queries."""

    q: Array  # times the scale
    k: Array
    lse: Array
    mask: Array | None
    shift: int | None  # in causal attention query i sees the keys up to i + shift
    blocks: list[slice]  # of keys
    xp: Any

    def total(self) -> Array:
        """Sum the shares of all keys."""
        total = self._zero()
        for j in self.blocks:
            total = self.cumulative(j, total)[..., -1:]
        return total

    def key_at(self, u: Array) -> Array:
        """Take the keys at which the cumulative shares pass the numbers u."""
        xp, k, before = self.xp, self.k, self._zero()
        key = xp.zeros((1, 1, 1), dtype=k.dtype, device=device(k))
        for j in self.blocks:
            upper = self.cumulative(j, before)
            before = xp.broadcast_to(before, (*upper.shape[:-1], 1))
            lower = xp.concat([before, upper[..., :-1]], axis=-1)
            chosen = (lower[..., None, :] <= u[..., None]) & (u[..., None] < upper[..., None, :])
            k_j = k[..., j, :]
            if (
                self.shift is not None or self.mask is not None
            ):  # 0 times inf of a hidden key is nan
                k_j = xp.where(xp.isfinite(k_j), k_j, 0.0)
            # A product with one 1 in a row picks a key: `take` would need indices of each head.
            key = key + xp.astype(chosen, k.dtype) @ k_j[..., None, :, :]
            before = upper[..., -1:]
        return key

    def _zero(self) -> Array:
        return self.xp.zeros((1, 1), dtype=self.q.dtype, device=device(self.q))

    def cumulative(self, j: slice, before: Array) -> Array:
        """Sum the shares over the keys j, from the sum of those before them."""
        xp, k_j = self.xp, self.k[..., j, :]
        scores = multiply(self.q, xp.matrix_transpose(xp.astype(k_j, self.q.dtype)))
        share = xp.exp(scores - self.lse)
        if self.mask is not None:
            share = xp.where(self.mask[..., j], share, 0.0)
        if self.shift is not None:
            past = causal_mask(slice(0, self.q.shape[-2]), j, self.shift, device(self.q), xp)
            share = xp.where(past, share, 0.0)
        return before + xp.cumulative_sum(share, axis=-1)
