"""Linear attention: sums of products of features, which may be of either sign."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from copy import copy
from functools import reduce
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from ..arrays.blocks import (
    WHOLE,
    block_shape,
    blocks,
    most_threads,
    pairwise,
    part,
    put,
    put_quotient,
)
from ..arrays.heads import broadcast_lead
from ..arrays.library import (
    Array,
    Workspace,
    array_namespace,
    as_written,
    device,
    is_numpy_array,
    rescale,
)
from ..arrays.products import multiply, sum_of_products
from ..arrays.threads import for_each
from ..features import Features
from .causal import Arithmetic, at, causal_attention, chunk_size, heads_at_once, leaf_shape, running
from .hops import Keys
from .kernel import Attended, Sums, buffers, combine, finite, sum_of_visible
from .positive import base_of, hidden, split_ones, with_ones
from .scores import causal_mask

__all__ = ["Signed", "Totals", "linear_attention", "merge_totals"]

# Of tokens, which heads they are, and where features may be written on NumPy.
FeatureMap = Callable[[Array, tuple[slice, ...], Workspace | None], Features]

_LEAF = 48  # tokens of a leaf
_SHARES = 4  # of the heads, of one of which the features fill a step
_GROUP = 7  # states that are added in turn, before the sums of as many are, and so on


class Signed(Arithmetic):
    """Features of either sign, values times e^log_scale; `phi_q` and `phi_k` take tokens and heads.

    What these are made of beside tokens is in `arrays`; only if the map `splits` is it given some
    of the heads. The normaliser may vanish, so that all is in sums over a common base. Features of
    queries are read no more once those of other queries are asked for, nor are those of keys.
    """

    def __init__(
        self,
        phi_q: FeatureMap,
        phi_k: FeatureMap,
        width: int,
        *,
        arrays: tuple[Array, ...] = (),
        splits: bool = True,
    ) -> None:
        self.phi_q, self.phi_k, self.width = phi_q, phi_k, width
        self.arrays, self.splits, self.alike = arrays, splits, True
        self.head: tuple[slice, ...] = ()

    def part(self, head: tuple[slice, ...]) -> Signed:
        """Take some heads."""
        own = copy(self)
        own.head = head
        return own

    def step(self, q: Array, lead: tuple[int, ...]) -> tuple[int, int]:
        """Leaves of a step, and tokens of a leaf."""
        if not is_numpy_array(q):
            return leaf_shape(q.shape[-2], _LEAF)
        # Whatever threads there are: the order of sums depends on the size of a step.
        heads = max(1, math.prod(lead) // (_SHARES if self.splits else 1))
        return leaf_shape(q.shape[-2], _LEAF, max(1, chunk_size(q) // (heads * self.width * _LEAF)))

    def in_leaves(self, like: Array) -> bool:
        """Whether a step is cut into leaves."""
        return True

    def start(self, keys: Keys) -> Totals:
        """What features have seen of keys before the first query."""
        (k, v, *_), lead = keys, broadcast_lead(keys.k, keys.v)
        xp, options = array_namespace(k), {"dtype": k.dtype, "device": device(k)}
        nothing = Totals(
            xp.zeros((*lead, self.width, v.shape[-1] + 1), **options),
            xp.full((*lead, 1, 1), -math.inf, **options),
        )

        def states() -> Iterator[Totals]:
            for j in blocks(0, k.shape[-2], self.block(k, v)):
                some = keys.tokens(j.start, j.stop)
                yield self.accumulate(self.keys(some), some.mask)

        found: Totals = pairwise(self.join, states(), nothing)
        return found

    def block(self, k: Array, v: Array) -> int:
        """Tokens of a block, of which features are held."""
        row = max(1, math.prod(broadcast_lead(k, v)) * self.width)
        if is_numpy_array(k):
            return max(16, chunk_size(k) // row)
        return max(16, min(math.prod(block_shape(k)) // row, *block_shape(k)))

    def queries(self, q: Array, i: slice) -> _Scaled:
        """Features of queries."""
        found = self.phi_q(q, self.head, self.memory.queries)
        return _Scaled(self._checked(found.values))

    def keys(self, keys: Keys) -> _Scaled:
        """Features of keys."""
        values, log_scale = self.phi_k(keys.k, self.head, self.memory.keys)
        values = self._checked(values)
        # A sum that is finite has finite terms only: no nan of a hidden key meets a weight of 0.
        plain = is_numpy_array(values) and not log_scale.any() and bool(np.isfinite(values.sum()))
        return _Scaled(values, log_scale[..., None], with_ones(keys.v, self.memory.keys), plain)

    def _checked(self, values: Array) -> Array:
        if values.shape[-1] != self.width:
            raise ValueError(
                "`feature_map` must give all queries and keys equally many features, got "
                f"{values.shape[-1]} and {self.width}."
            )
        return values

    def accumulate(self, keys: _Scaled, mask: Array | None) -> Totals:
        """Sums over the keys of a chunk, `mask` being (..., 1, c)."""
        xp, (values, log_scale, v, plain) = array_namespace(keys.values), keys
        if plain and mask is None:
            found = sum_of_products(values.mT, v, self.memory.keys)
            return Totals(found, log_scale[..., :1, :])
        if mask is not None:
            seen = xp.matrix_transpose(mask)
            values, v = xp.where(seen, values, 0.0), xp.where(seen, v, 0.0)
            log_scale = xp.where(seen, log_scale, -math.inf)
        base = xp.max(log_scale, axis=-2, keepdims=True)
        values = rescale(values, xp.exp(log_scale - finite(base, xp)))
        return Totals(sum_of_products(xp.matrix_transpose(values), v), base)

    def join(self, a: Totals, b: Totals) -> Totals:
        """Add what was seen of other keys."""
        return merge_totals(a, b)

    def pairs(self, queries: _Scaled, keys: _Scaled, visible: Array) -> Iterator[Sums]:
        """Read the visible keys of a chunk one by one."""
        xp, (values, log_scale, v, plain) = array_namespace(keys.values), keys
        weights = multiply(queries.values, xp.matrix_transpose(values), self.memory.keys, "weights")
        if plain:  # and so finite
            weights = hidden(weights, visible)
            base = base_of(np.any(visible, axis=-1, keepdims=True), weights)
        else:
            weights = xp.where(visible, weights, 0.0)
            log_scale = xp.where(visible, xp.matrix_transpose(log_scale), -math.inf)
            base = xp.max(log_scale, axis=-1, keepdims=True)
            weights = weights * xp.exp(log_scale - finite(base, xp))
        yield split_ones(sum_of_visible(weights, v, visible, signed=True), base)

    def read(self, queries: _Scaled, state: Totals) -> Iterator[Sums]:
        """Read what features have seen."""
        yield split_ones(multiply(queries.values, state.total, self.memory.queries), state.base)

    def before(self, state: Totals, own: Totals) -> tuple[Totals, Totals]:
        """States before each of many leaves, and after all."""
        if not is_numpy_array(own.total):
            return running(self.join, state, own, (-3, -3))
        count = own.base.shape[-3]
        if not own.base.any() and np.all((state.base == 0) | (state.base == -math.inf)):
            memory = self.memory.queries or Workspace()
            before, after = _sums_in_groups(state.total, own.total, memory)
            base = np.repeat(state.base[..., None, :, :], count, axis=-3)
            base[..., 1:, :, :] = 0.0
            return Totals(before, base), Totals(after, own.base[..., 0, :, :])
        leaves = [at(own, t, (-3, -3)) for t in range(count)]
        states, last = _in_groups(self.join, state, leaves)
        return Totals(*map(_stacked, zip(*states, strict=True))), last

    def finish(self, found: Sums) -> Attended:
        """Divide by the normaliser, which is returned; 0 where no key was seen."""
        normaliser = self.normaliser(found)
        return Attended(found.total / normaliser, normaliser[..., 0])

    def normaliser(self, found: Sums) -> Array:
        """The sum of weights, 1 where no key was seen."""
        return array_namespace(*found).where(found.base == -math.inf, 1.0, found.mass)


class _Scaled(NamedTuple):
    """Features of tokens, values times e^log_scale; a factor on queries cancels."""

    values: Array  # (..., c, F)
    log_scale: Array = None  # (..., c, 1)
    ones: Array = None  # (..., c, d_v + 1), of keys: values [v_j, 1]
    plain: bool = False  # whether each scale is 1, on NumPy

    def map(self, function: Callable[[Array], Array]) -> _Scaled:
        """Apply a function to all arrays."""
        values, log_scale, ones = (x if x is None else function(x) for x in self[:-1])
        return _Scaled(values, log_scale, ones, self.plain)


class Totals(NamedTuple):
    """Sums over keys, e^base * total = sum_j phi(k_j) [v_j, 1]; base -inf before the first key."""

    total: Array  # (..., F, d_v + 1)
    base: Array  # (..., 1, 1)


def merge_totals(a: Totals, b: Totals) -> Totals:
    """Add the sums over two sets of keys."""
    xp = array_namespace(*a, *b)
    base = xp.maximum(a.base, b.base)
    scale_a, scale_b = (xp.exp(x.base - finite(base, xp)) for x in (a, b))
    return Totals(rescale(a.total, scale_a) + rescale(b.total, scale_b), base)


@as_written
def linear_attention(q: Array, keys: Keys, arithmetic: Signed, causal: bool) -> Array:
    """Attention from the sums of what keys have, for features of either sign."""
    if keys.differ:
        return _attend_in_pairs(q, keys, keys.mask, arithmetic, causal)
    if causal:
        return causal_attention(q, keys, arithmetic).out
    lead, n = broadcast_lead(q, keys.k, keys.v, keys.mask), q.shape[-2]
    out, _ = buffers(q, keys.v, lead)

    def worker() -> Callable[[tuple[slice, ...]], None]:
        mine = arithmetic.alone(q)

        def attend_head(head: tuple[slice, ...]) -> None:
            nonlocal out
            own, q_h, keys_h = mine.part(head), part(q, (*head, WHOLE, WHOLE)), keys.part(head)
            state = own.start(keys_h)
            for i in blocks(0, n, own.block(q_h, keys_h.v)):
                (found,) = own.read(own.queries(q_h[..., i, :], i), state)
                out = put_quotient(out, (*head, i, WHOLE), found.total, own.normaliser(found))

        return attend_head

    heads = list(heads_at_once(lead, q, (1, 1), arithmetic))
    work = math.prod(lead) * (n + keys.k.shape[-2]) * arithmetic.width
    most = most_threads(q, work) if len(heads) > 1 else 0
    for_each(worker, heads, most=most)
    return out


def _attend_in_pairs(q: Array, keys: Keys, mask: Array, arithmetic: Signed, causal: bool) -> Array:
    """The same where each query sees other keys: all pairs are evaluated."""
    xp, n, m = array_namespace(q), q.shape[-2], keys.k.shape[-2]
    lead = broadcast_lead(q, keys.k, keys.v, keys.mask)
    own, whole = arithmetic.part(tuple(slice(0, length) for length in lead)), (WHOLE,) * len(lead)
    out, _ = buffers(q, keys.v, lead)
    size = own.block(q, keys.v)
    nothing = own.start(keys.tokens(0, 0))
    for i in blocks(0, n, size):
        rows = own.queries(q[..., i, :], i)
        found = list(own.read(rows, nothing))
        for j in blocks(0, max(0, min(m, i.stop + m - n)) if causal else m, size):
            some, visible = keys.tokens(j.start, j.stop), mask[..., i, j]
            if causal:
                visible = visible & causal_mask(i, j, m - n, device(q), xp)
            found = [reduce(combine, [*found, *own.pairs(rows, own.keys(some), visible)])]
        out = put(out, (*whole, i, WHOLE), own.finish(found[0]).out)
    return out


def _in_groups(
    join: Callable[[Any, Any], Any], first: Any, own: list[Any]
) -> tuple[list[Any], Any]:
    """`running`, state by state: few are added in turn."""
    sums = _running_sums(join, own)
    return [first, *(join(first, x) for x in sums[:-1])], sums[-1]


def _running_sums(join: Callable[[Any, Any], Any], own: list[Any]) -> list[Any]:
    """Sums up to each state: in groups, after the running sums of whole groups."""
    groups = [list(accumulate(own[group], join)) for group in blocks(0, len(own), _GROUP)]
    if len(groups) > 1:
        before = _running_sums(join, [group[-1] for group in groups[:-1]])
        groups[1:] = [[join(a, x) for x in g] for a, g in zip(before, groups[1:], strict=True)]
    return [x for group in groups for x in group]


def _stacked(arrays: tuple[Array, ...]) -> Array:
    """Matrices along a new axis before the last two; those before it may be of some only."""
    shape = np.broadcast_shapes(*(x.shape for x in arrays))
    return np.stack([np.broadcast_to(x, shape) for x in arrays], axis=-3)


def _sums_in_groups(first: Array, own: Array, memory: Workspace) -> tuple[Array, Array]:
    """The same for sums (..., T, F, w) without a base, which are overwritten: to the bit."""
    lead, count = np.broadcast_shapes(own.shape[:-3], first.shape[:-2]), own.shape[-3]
    _add_up(own)
    before = memory.empty("before", (*lead, count, *own.shape[-2:]), own.dtype)
    before[..., 0, :, :] = first
    np.add(own[..., :-1, :, :], first[..., None, :, :], out=before[..., 1:, :, :])
    return before, own[..., -1, :, :].copy()


def _add_up(own: Array) -> None:
    """Replace arrays (..., T, F, w) by their running sums, as `_running_sums` does."""
    count = own.shape[-3]
    for group in blocks(0, count, _GROUP):
        for t in range(group.start + 1, group.stop):
            own[..., t, :, :] += own[..., t - 1, :, :]
    if count > _GROUP:
        before = own[..., _GROUP - 1 : count - 1 : _GROUP, :, :].copy()
        _add_up(before)
        for g, group in enumerate(blocks(_GROUP, count, _GROUP)):
            own[..., group, :, :] += before[..., g : g + 1, :, :]
