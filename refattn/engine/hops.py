r"""The engine of every linear estimator: hops of one kernel, and one causal machine.

Samples attend to keys, then queries attend to samples (`sample`, `read`). Causal attention goes
over the tokens in chunks (`causal_attention`): queries read a state of the past, and the keys of
their own chunk pair by pair, in matrix products. These are of the kernel of query i and key j

.. math:: \kappa_{ij} = \sum_s \phi_s(q_i) \, \phi_s(k_j)

in one of two arithmetics: `Positive` for positive features e^x, of which only exponents need
be representable, and `Signed` for those of any feature map.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from ..arrays.arithmetic import square_norm
from ..arrays.blocks import WHOLE, part
from ..arrays.heads import broadcast_lead
from ..arrays.library import Array, array_namespace, as_written, device
from .kernel import Attended, attend


class Keys(NamedTuple):
    """Keys and what travels with them. Frequencies have the root of the scale in their place."""

    k: Array  # (..., m, d)
    v: Array  # (..., m, d_v)
    mask: Array | None = None  # (..., n or 1, m)
    half: Array = None  # half the scale, factor of |k|^2; None where norms cancel

    def part(self, head: tuple[slice, ...]) -> Keys:
        """Take some heads."""
        box = (*head, WHOLE, WHOLE)
        mask = None if self.mask is None else part(self.mask, box)
        return Keys(part(self.k, box), part(self.v, box), mask, self.half)

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
    if keys.k.shape[-2] == 0:  # as `attend` says, in far fewer operations
        xp, options = array_namespace(omega), {"dtype": omega.dtype, "device": device(omega)}
        shape = (*keys.lead(omega), omega.shape[-2])
        out = xp.zeros((*shape, keys.v.shape[-1]), **options)
        return Attended(out, xp.full(shape, -math.inf, **options))
    bias = None if keys.half is None else keys.bias
    return attend(omega, keys.k, keys.v, mask=keys.mask, key_bias=bias)


@as_written
def read(q: Array, samples: Samples, states: Attended) -> Attended:
    """Let queries attend to samples, the second hop."""
    bias = states.lse[..., None, :] + samples.log_weight
    return attend(q, samples.omega, states.out, bias=bias)


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
