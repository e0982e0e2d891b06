r"""The two hops of every linear estimator: samples attend to keys, then queries to samples.

These are `sample` and `read`. Causal attention goes over the tokens in steps
(`causal_attention`): queries read a state of the past, and the keys of their own leaf pair by pair,
in matrix products. These are of the kernel of query i and key j

.. math:: \kappa_{ij} = \sum_s \phi_s(q_i) \, \phi_s(k_j)

in one of two arithmetics: `Positive` for positive features e^x, of which only exponents need
be representable, and `Signed` for those of any feature map.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from ..arrays.arithmetic import square_norm
from ..arrays.blocks import WHOLE, block_shape, buffers, part, put, some_heads, tiles
from ..arrays.heads import broadcast_lead
from ..arrays.library import Array, as_written, device
from .attend import Attended, attend
from .scores import Scores, causal_mask


class Keys(NamedTuple):
    """Keys and what travels with them. Frequencies have the root of the scale in their place."""

    k: Array  # (..., m, d)
    v: Array  # (..., m, d_v)
    mask: Array | None = None  # (..., n or 1, m)
    half: Array = None  # a number, half the scale: factor of |k|^2; None where norms cancel

    def part(self, head: tuple[slice, ...]) -> Keys:
        """Take some heads."""
        k, v, mask = (some_heads(x, head) for x in self[:3])
        return Keys(k, v, mask, self.half)

    def tokens(self, start: int, stop: int) -> Keys:
        """Take the tokens from `start` to `stop`, as far as these are not negative."""
        j = slice(max(0, start), max(0, stop))
        mask = None if self.mask is None else self.mask[..., j]
        return Keys(self.k[..., j, :], self.v[..., j, :], mask, self.half)

    def lead(self, *arrays: Array) -> tuple[int, ...]:
        """Broadcast the leading axes of the keys and of other arrays."""
        return broadcast_lead(self.k, self.v, self.mask, *arrays)

    @property
    def differ(self) -> bool:
        """Say whether the mask differs from query to query."""
        return self.mask is not None and self.mask.shape[-2] != 1

    def bias(self, k: Array) -> Array:
        """Compute -scale |k|^2 / 2 of some of the keys."""
        return -self.half * square_norm(k)


class Samples(NamedTuple):
    """Frequencies with their log weights, times the root of the scale: q . omega is as given."""

    omega: Array  # (..., S, d), or (..., n or 1, S, d) where each query has its own
    log_weight: Array  # (..., n or 1, S)


@as_written
def sample(omega: Array, keys: Keys) -> Attended:
    """Let samples attend to keys, the first hop: f_s and log Z_s."""
    bias = None if keys.half is None else keys.bias
    return attend(omega, keys.k, keys.v, Scores(mask=keys.mask), key_bias=bias)


@as_written
def read(q: Array, samples: Samples, states: Attended) -> Attended:
    """Let queries attend to samples, the second hop."""
    # A sample weighs w_s Z_s: weights e^(q . omega_s) of keys are summed in Z_s already.
    bias = states.lse[..., None, :] + samples.log_weight
    return attend(q, samples.omega, states.out, Scores(bias=bias))


def per_query(
    read: Callable[[Array, Samples, Attended], Attended],
    q: Array,
    samples: Samples,
    keys: Keys,
    causal: bool,
    xp: Any,
) -> Attended:
    """Make the first hop with samples or keys of each query's own, then `read`."""
    # No state is shared: S rows for each query attend to all keys, which takes time O(n m S).
    lead, num_samples = lead_of_each(q, samples, keys), samples.omega.shape[-2]
    out, lse = buffers(q, keys.v, lead, xp)
    for box, some, flat, seen in tiles_of_queries(q, samples, keys, causal, lead, xp):
        f, log_z = sample(flat, seen)
        shape = (box[-1].stop - box[-1].start, num_samples)
        f = xp.reshape(f, (*f.shape[:-2], *shape, f.shape[-1]))
        log_z = xp.reshape(log_z, (*log_z.shape[:-1], *shape))
        done = read(part(q, (*box, WHOLE)), some, Attended(f, log_z))
        out = put(out, (*box, WHOLE), done.out)
        lse = put(lse, box, done.lse)
    return Attended(out, lse)


def lead_of_each(q: Array, samples: Samples, keys: Keys) -> tuple[int, ...]:
    """Broadcast the leading axes of queries with samples of their own."""
    return keys.lead(q, samples.omega[..., 0, :], samples.log_weight)


def tiles_of_queries(
    q: Array, samples: Samples, keys: Keys, causal: bool, lead: tuple[int, ...], xp: Any
) -> Iterator[tuple[tuple[slice, ...], Samples, Array, Keys]]:
    """Cut queries with samples or keys of their own into tiles.

    Yields which queries, their samples, the frequencies of all of these in one row, and the keys
    that each of the row sees.
    """
    omega, log_weight = samples
    n, m, d_v = q.shape[-2], keys.k.shape[-2], keys.v.shape[-1]
    num_samples, d = omega.shape[-2:]
    # A tile holds frequencies, their values and, where it is needed, a mask of rows.
    width = max(1, d_v, m if causal or keys.mask is not None else 1)
    for *head, i in tiles((*lead, n), math.prod(block_shape(q)) // (num_samples * width)):
        c, box = i.stop - i.start, (*head, i)
        some = Samples(part(omega, (*box, WHOLE, WHOLE)), part(log_weight, (*box, WHOLE)))
        k, v, _, half = keys.part(tuple(head))
        seen = None if keys.mask is None else part(keys.mask, (*box, WHOLE))
        if causal:
            past = causal_mask(i, slice(0, m), m - n, device(q), xp)
            seen = past if seen is None else seen & past
        if seen is not None and c > 1:  # the rows of a query's samples
            seen = xp.broadcast_to(seen[..., None, :], (*seen.shape[:-2], c, num_samples, m))
            seen = joined(seen, xp)
        of_each = xp.broadcast_to(some.omega, (*some.omega.shape[:-3], c, num_samples, d))
        yield box, some, joined(of_each, xp), Keys(k, v, seen, half)


def joined(x: Array, xp: Any) -> Array:
    """Join rows (..., T, c, w) of leaves, or of samples, to (..., T c, w) again."""
    *lead, count, c, w = x.shape
    return xp.reshape(x, (*lead, count * c, w))


def concatenate(a: Array, b: Array, axis: int, xp: Any) -> Array:
    """Join arrays of which the axes before `axis` broadcast."""
    lead = np.broadcast_shapes(*(tuple(x.shape[:axis]) for x in (a, b)))
    shapes = ((*lead, *x.shape[axis:]) for x in (a, b))
    pairs = zip((a, b), shapes, strict=True)
    return xp.concat([x if x.shape == s else xp.broadcast_to(x, s) for x, s in pairs], axis=axis)
