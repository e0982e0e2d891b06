"""Linear attention by features of any map, whose values may be of either sign, causal or not."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from ..arrays.arithmetic import (
    Workspace,
    add_weighted,
    finite,
    multiply,
    pairwise,
    rescale,
    sum_of_products,
    sum_of_visible,
    times,
    with_ones,
    workspace,
)
from ..arrays.blocks import (
    WHOLE,
    block_shape,
    blocks,
    buffers,
    most_threads,
    put,
    put_quotient,
    room,
    some_heads,
)
from ..arrays.library import (
    Array,
    array_namespace,
    as_written,
    device,
    fused,
    is_numpy_array,
    untraced,
)
from ..arrays.threads import for_each
from ..features import Features
from ..numbers.primitives import primitive
from .attend import Attended, Sums, base_of, combine, common_base, split_ones
from .causal import (
    Arithmetic,
    at,
    causal_attention,
    heads_at_once,
    leaf_shape,
    running,
    step_size,
    whole_leaves,
)
from .hops import Keys
from .scores import causal_mask

# Of tokens, the other arrays of their heads, and where features may be written on NumPy. A scale of
# None says that all are 1 and all features finite.
FeatureMap = Callable[[Array, tuple[Array, ...], Workspace | None], Features]

_LEAF = 48  # tokens of a leaf on NumPy: more take time for pairs, fewer for states
_SHARES_OF_STEPS = 4  # of the heads, of one of which the features fill a step
_GROUP = 7  # states that are added in turn, before the sums of as many are, and so on


@dataclass(eq=False)
class Signed(Arithmetic):
    """Features of either sign, values times e^log_scale, which `phi_q` and `phi_k` make of tokens.

    The maps also read `arrays`, (..., rows, columns) for each head; if the map `splits`, it is
    called with some of the heads. The normaliser may vanish, so that no log of it is taken: all is
    in sums over a common base. Features of queries may be overwritten by those of other queries,
    and features of keys likewise.
    """

    phi_q: FeatureMap
    phi_k: FeatureMap
    width: int
    xp: Any  # the array namespace
    arrays: tuple[Array, ...] = ()
    splits: bool = True

    alike = True  # steps differ in their tokens only

    def part(self, head: tuple[slice, ...]) -> Signed:
        """Take some heads."""
        some = copy(self)
        some.arrays = tuple(some_heads(x, head) for x in self.arrays)
        return some

    def step(self, q: Array, lead: tuple[int, ...]) -> tuple[int, int]:
        """Say how many leaves a step has, and tokens a leaf."""
        if not is_numpy_array(q):
            return whole_leaves(q.shape[-2], q)
        # Whatever threads there are: the order of sums depends on the size of a step.
        heads = max(1, math.prod(lead) // (_SHARES_OF_STEPS if self.splits else 1))
        return leaf_shape(q.shape[-2], _LEAF, max(1, step_size(q) // (heads * self.width * _LEAF)))

    def in_leaves(self, like: Array) -> bool:
        """Say whether a step is cut into leaves."""
        return True

    def nothing(self, v: Array, lead: tuple[int, ...]) -> Totals:
        """Sum over no keys, whose values would be like `v`."""
        options = {"dtype": v.dtype, "device": device(v)}
        total = self.xp.zeros((*lead, self.width, v.shape[-1] + 1), **options)
        return Totals(total, self.xp.full((*lead, 1, 1), -math.inf, **options))

    def start(self, keys: Keys, size: int) -> Totals:
        """Sum over keys before the first query, of so many tokens at once."""

        def states() -> Iterator[Totals]:
            for j in blocks(0, keys.k.shape[-2], size):
                some = keys.tokens(j.start, j.stop)
                yield self.accumulate(self.keys(some), some.mask)

        totals: Totals | None = pairwise(self.join, states(), None)
        # Only if there is no key: a sum of nothing takes as much memory as a state.
        return totals or self.nothing(keys.v, keys.lead())

    def block(self, x: Array, lead: tuple[int, ...]) -> int:
        """Say of how many tokens features of some heads are held at once."""
        row = max(1, math.prod(lead) * self.width)
        # Products of fewer than 16 rows would be slow, whatever the cache holds.
        if is_numpy_array(x):
            return max(16, step_size(x) // row)
        rows, _ = block_shape(x)
        return max(16, min(room(x) // row, rows))

    def queries(self, q: Array, i: slice) -> _Scaled:
        """Make features of queries."""
        return _Scaled(self._checked(self.phi_q(q, self.arrays, self.memory.queries).values))

    def keys(self, keys: Keys) -> _Scaled:
        """Make features of keys."""
        values, log_scale = self.phi_k(keys.k, self.arrays, self.memory.keys)
        values = self._checked(values)
        if plain := log_scale is None:
            log_scale = np.zeros_like(values[..., 0])
        elif is_numpy_array(values) and not log_scale.any():
            # A sum that is finite has finite terms only: no nan of a hidden key meets a weight of
            # 0. That of squares takes a quarter of the time.
            plain = bool(np.isfinite(np.vdot(values, values)))
        ones = with_ones(keys.v, self.xp, self.memory.keys)
        return _Scaled(values, log_scale[..., None], ones, plain)

    def _checked(self, values: Array) -> Array:
        if values.shape[-1] != self.width:
            raise ValueError(
                "`feature_map` must give all queries and keys equally many features, got "
                f"{values.shape[-1]} and {self.width}."
            )
        return values

    def accumulate(self, keys: _Scaled, mask: Array | None) -> Totals:
        """Sum over the keys of a leaf, `mask` being (..., 1, c)."""
        xp, (values, log_scale, v, plain) = self.xp, keys
        if plain and mask is None:
            total = sum_of_products(values.mT, v, self.memory.keys)
            return Totals(total, log_scale[..., :1, :])  # zeros
        if mask is not None:
            # Both, as 0 times the nan of the other would be nan.
            seen = xp.matrix_transpose(mask)
            values, v = xp.where(seen, values, 0.0), xp.where(seen, v, 0.0)
            log_scale = xp.where(seen, log_scale, -math.inf)
        base = xp.max(log_scale, axis=-2, keepdims=True)
        values = _at_base(values, log_scale, base, xp)
        return Totals(sum_of_products(xp.matrix_transpose(values), v), base)

    def join(self, a: Totals, b: Totals) -> Totals:
        """Add what was seen of other keys."""
        return merge_totals(a, b)

    def pairs(self, queries: _Scaled, keys: _Scaled, visible: Array) -> Iterator[Sums]:
        """Read the visible keys of a leaf one by one."""
        xp, (values, log_scale, v, plain) = self.xp, keys
        weights = multiply(queries.values, xp.matrix_transpose(values), self.memory.keys, "weights")
        if plain:  # and so finite
            weights = times(weights, visible)
            base = base_of(np.any(visible, axis=-1, keepdims=True), weights)
        else:
            log_scale = xp.where(visible, xp.matrix_transpose(log_scale), -math.inf)
            # A base for each query, of what it sees: one for all would let later keys round it.
            base = xp.max(log_scale, axis=-1, keepdims=True)
            weights = weights_at_base(weights, visible, log_scale, base, xp)
        yield split_ones(sum_of_visible(weights, v, visible, xp, signed=True), base)

    def read(self, queries: _Scaled, state: Totals) -> Iterator[Sums]:
        """Read what features have seen."""
        yield split_ones(multiply(queries.values, state.total, self.memory.queries), state.base)

    def before(self, state: Totals, leaves: Totals) -> tuple[Totals, Totals]:
        """Find the states before each of many leaves, and that of these leaves alone."""
        if not is_numpy_array(leaves.total):
            return running(self.join, state, leaves, (-3, -3), self.xp)
        count = leaves.base.shape[-3]
        if not leaves.base.any() and np.all((state.base == 0) | (state.base == -math.inf)):
            # All scales are 1: sums of plain numbers, in place.
            memory = self.memory.queries or Workspace()
            before, after = _sums_in_groups(state.total, leaves.total, memory)
            base = np.repeat(state.base[..., None, :, :], count, axis=-3)
            base[..., 1:, :, :] = 0.0
            return Totals(before, base), Totals(after, leaves.base[..., 0, :, :])
        states = [at(leaves, t, (-3, -3)) for t in range(count)]
        states, last = _in_groups(self.join, state, states)
        return Totals(*map(_stacked, zip(*states, strict=True))), last

    def finish(self, sums: Sums) -> Attended:
        """Divide by the normaliser, which is returned; 0 where no key was seen."""
        normaliser = self.normaliser(sums)
        return Attended(sums.total / normaliser, normaliser[..., 0])

    def normaliser(self, sums: Sums) -> Array:
        """Take the sum of weights, 1 where no key was seen."""
        return _normaliser(sums.mass, sums.base, self.xp)


@fused
def _at_base(values: Array, log_scale: Array, base: Array, xp: Any) -> Array:
    return rescale(values, xp.exp(log_scale - finite(base, xp)))


@fused
def weights_at_base(
    weights: Array, visible: Array, log_scale: Array, base: Array, xp: Any
) -> Array:
    """Multiply the weights of visible keys by e^(log_scale - base); others are 0."""
    return xp.where(visible, weights, 0.0) * xp.exp(log_scale - finite(base, xp))


@fused
def _normaliser(mass: Array, base: Array, xp: Any) -> Array:
    return xp.where(base == -math.inf, 1.0, mass)


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
    if is_numpy_array(a.base) and not (a.base.any() or b.base.any()):  # all scales are 1
        return Totals(a.total + b.total, np.maximum(a.base, b.base))
    base, scale_a, scale_b = common_base(a.base, b.base, xp)
    return Totals(add_weighted(a.total, scale_a, b.total, scale_b, xp), base)


@as_written
def linear_attention(q: Array, keys: Keys, arithmetic: Signed, causal: bool) -> Array:
    """Attend by the sums of what keys have, for features of either sign."""
    return attend_by_sums(q, keys, arithmetic.arrays, arithmetic, causal)


@primitive
def attend_by_sums(
    q: Array, keys: Keys, arrays: tuple[Array, ...], arithmetic: Signed, causal: bool
) -> Array:
    """Do so with the arrays of the features apart, in one step of a tape."""
    arithmetic = replace(arithmetic, arrays=arrays, xp=untraced(arithmetic.xp))
    if causal and not keys.differ:
        return causal_attention(q, keys, arithmetic).out
    lead, n = keys.lead(q), q.shape[-2]
    out, _ = buffers(q, keys.v, lead, arithmetic.xp)
    if keys.differ:
        return _attend_in_pairs(q, keys, arithmetic, causal, out)
    # On NumPy, whatever threads there are: a block is of one head, or holds all tokens of a few.
    alone = is_numpy_array(q) and arithmetic.splits
    size = arithmetic.block(q, () if alone else lead)
    tokens = min(size, max(1, n, keys.k.shape[-2])) if alone else 1

    def attend_head(mine: Signed, head: tuple[slice, ...]) -> None:
        nonlocal out
        features, keys_h = mine.part(head), keys.part(head)
        q_h, state = some_heads(q, head), features.start(keys_h, size)
        for i in blocks(0, n, size):
            (sums,) = features.read(features.queries(q_h[..., i, :], i), state)
            out = put_quotient(out, (*head, i, WHOLE), sums.total, features.normaliser(sums))

    heads = list(heads_at_once(lead, q, (tokens, 1), arithmetic))
    work = math.prod(lead) * (n + keys.k.shape[-2]) * arithmetic.width
    most = most_threads(q, work) if len(heads) > 1 else 0
    for_each(lambda: partial(attend_head, arithmetic.alone(q, workspace(q))), heads, most=most)
    return out


def _attend_in_pairs(q: Array, keys: Keys, arithmetic: Signed, causal: bool, out: Array) -> Array:
    """Evaluate all pairs, where each query sees other keys, and write what these give to `out`."""
    xp, n, m, lead = arithmetic.xp, q.shape[-2], keys.k.shape[-2], out.shape[:-2]
    mask: Array = keys.mask
    size = arithmetic.block(q, lead)
    # What features read of no keys: 0 with base -inf, which sums of pairs replace.
    join, nothing = partial(combine, xp=xp), arithmetic.nothing(keys.v, lead)
    for i in blocks(0, n, size):
        rows = arithmetic.queries(q[..., i, :], i)
        (sums,) = arithmetic.read(rows, nothing)
        # In causal attention, blocks of keys after the last query of the block are left out.
        for j in blocks(0, max(0, min(m, i.stop + m - n)) if causal else m, size):
            visible = mask[..., i, j]
            if causal:
                visible = visible & causal_mask(i, j, m - n, device(q), xp)
            some = arithmetic.keys(keys.tokens(j.start, j.stop))
            sums = reduce(join, [sums, *arithmetic.pairs(rows, some, visible)])
        out = put(out, (*(WHOLE,) * len(lead), i, WHOLE), arithmetic.finish(sums).out)
    return out


def _in_groups(
    join: Callable[[Any, Any], Any], first: Any, states: list[Any]
) -> tuple[list[Any], Any]:
    """Do as `running`, state by state: few are added in turn."""
    sums = _running_sums(join, states)
    return [first, *(join(first, x) for x in sums[:-1])], sums[-1]


def _running_sums(join: Callable[[Any, Any], Any], states: list[Any]) -> list[Any]:
    """Sum up to each state: in groups, after the running sums of whole groups."""
    groups = [list(accumulate(states[group], join)) for group in blocks(0, len(states), _GROUP)]
    if len(groups) > 1:
        before = _running_sums(join, [group[-1] for group in groups[:-1]])
        groups[1:] = [[join(a, x) for x in g] for a, g in zip(before, groups[1:], strict=True)]
    return [x for group in groups for x in group]


def _stacked(arrays: tuple[Array, ...]) -> Array:
    """Stack matrices along a new axis before the last two; axes before it broadcast."""
    shape = np.broadcast_shapes(*(x.shape for x in arrays))
    return np.stack([np.broadcast_to(x, shape) for x in arrays], axis=-3)


def _sums_in_groups(first: Array, sums: Array, memory: Workspace) -> tuple[Array, Array]:
    """Do the same for sums (..., T, F, w) without a base, which are overwritten: to the bit."""
    lead, count = np.broadcast_shapes(sums.shape[:-3], first.shape[:-2]), sums.shape[-3]
    _run_sums(sums)
    before = memory.room("before", (*lead, count, *sums.shape[-2:]), sums.dtype)
    before[..., 0, :, :] = first
    np.add(sums[..., :-1, :, :], first[..., None, :, :], out=before[..., 1:, :, :])
    return before, sums[..., -1, :, :].copy()


def _run_sums(sums: Array) -> None:
    """Replace arrays (..., T, F, w) by their running sums, as `_running_sums` does."""
    count = sums.shape[-3]
    for group in blocks(0, count, _GROUP):
        for t in range(group.start + 1, group.stop):
            sums[..., t, :, :] += sums[..., t - 1, :, :]
    if count > _GROUP:
        before = sums[..., _GROUP - 1 : count - 1 : _GROUP, :, :].copy()
        _run_sums(before)
        for g, group in enumerate(blocks(_GROUP, count, _GROUP)):
            sums[..., group, :, :] += before[..., g : g + 1, :, :]
