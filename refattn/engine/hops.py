r"""The two hops of every linear estimator: samples attend to keys, then queries to samples.

These are `sample` and `read`. Causal attention goes over the tokens in steps
(`causal_attention`): queries read a state of the past, and the keys of their own leaf pair by pair,
in matrix products. These are of the kernel of query i and key j

.. math:: \kappa_{ij} = \sum_s \phi_s(q_i) \, \phi_s(k_j)

in one of two arithmetics: `Positive` for positive features e^x, of which only exponents need
be representable, and `Signed` for those of any feature map.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..arrays.arithmetic import square_norm
from ..arrays.blocks import WHOLE, buffers, part, put, room, some_heads, tiles
from ..arrays.heads import broadcast_lead
from ..arrays.library import Array, as_written, device
from ..numbers.primitives import retraced
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
    (n, m), d_v, num_samples = (
        (q.shape[-2], keys.k.shape[-2]),
        keys.v.shape[-1],
        samples[0].shape[-2],
    )
    lead = keys.lead(q, samples.omega[..., 0, :], samples.log_weight)
    out, lse = buffers(q, keys.v, lead, xp)
    # A tile holds frequencies, their values and, where it is needed, a mask of rows.
    width = max(1, d_v, m if causal or keys.mask is not None else 1)
    for *head, i in tiles((*lead, n), room(q) // (num_samples * width)):
        rows = (*head, i, WHOLE)
        some = Samples(part(samples.omega, (*rows, WHOLE)), part(samples.log_weight, rows))
        seen = keys.part(tuple(head))
        if keys.mask is not None:
            seen = seen._replace(mask=part(keys.mask, rows))
        past = i.start + m - n if causal else None
        done = _attend_each(read, part(q, rows), some, seen, past, xp)
        out = put(out, rows, done.out)
        lse = put(lse, (*head, i), done.lse)
    return Attended(out, lse)


@retraced
def _attend_each(
    read: Callable[[Array, Samples, Attended], Attended],
    q: Array,
    samples: Samples,
    keys: Keys,
    past: int | None,
    xp: Any,
) -> Attended:
    """Let the samples of each of some queries attend to keys: as far as `past` the first sees."""
    k, v, seen, half = keys
    c, m, (num_samples, d) = q.shape[-2], k.shape[-2], samples.omega.shape[-2:]
    if past is not None:
        early = causal_mask(slice(0, c), slice(0, m), past, device(q), xp)
        seen = early if seen is None else seen & early
    if seen is not None and c > 1:  # the rows of a query's samples
        seen = xp.broadcast_to(seen[..., None, :], (*seen.shape[:-2], c, num_samples, m))
        seen = joined(seen, xp)
    # All frequencies in one row.
    of_each = xp.broadcast_to(samples.omega, (*samples.omega.shape[:-3], c, num_samples, d))
    f, log_z = sample(joined(of_each, xp), Keys(k, v, seen, half))
    f = xp.reshape(f, (*f.shape[:-2], c, num_samples, f.shape[-1]))
    log_z = xp.reshape(log_z, (*log_z.shape[:-1], c, num_samples))
    return read(q, samples, Attended(f, log_z))


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
