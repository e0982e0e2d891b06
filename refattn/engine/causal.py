r"""Causal attention in linear time: each query reads what the keys up to its own add up to."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from copy import copy
from functools import partial, reduce
from typing import Any, NamedTuple

import numpy as np

from ..arrays.arithmetic import Workspace, workspace
from ..arrays.blocks import WHOLE, blocks, buffers, most_threads, part, put, room, tiles
from ..arrays.library import Array, as_written, device, is_numpy_array, loop, traced_once
from ..arrays.threads import available, for_each
from .attend import Attended, Sums, combine
from .hops import Keys, concatenate, joined
from .scores import causal_mask

_STEP_BYTES = 2**20  # of the features of a step, of as many heads: they stay in the cache

_FEWEST_SHARES = 2  # shares, at least, that heads are cut into for threads

# Elsewhere a step is of so many leaves at once, of so many tokens: each call costs a launch.
_LEAVES, _LEAF = 32, 256
_TRACED_LEAVES = 64, 16  # short ones, as each size of halves would be compiled by itself


class Workspaces(NamedTuple):
    """Memory of a thread for what it makes of some queries, and of some keys, on NumPy."""

    queries: Workspace | None
    keys: Workspace | None


NO_WORKSPACES = Workspaces(None, None)


class Arithmetic:
    r"""How `causal_attention` computes with features: the interface of `Positive` and `Signed`.

    With S features, the kernel of query i and key j is
    :math:`\kappa_{ij} = \sum_s \phi_s(q_i) \, \phi_s(k_j)`. `causal_attention` cuts the tokens and
    never looks into features or states, which are of three types that an arithmetic chooses:

    * `Queries`, a named tuple: features of c queries, of which the first field is (..., c, S).
    * `Fresh`, a named tuple: features of c keys, with their values.
    * `State`, a named tuple of arrays: :math:`\sum_j \phi_s(k_j) \, [v_j, 1]` over some keys,
      S (d_v + 1) numbers for each head, in any scale.

    Sums are returned as `Sums`, whose scale is carried as a log, `base`: only exponents need be
    representable, and -inf is that of no keys. Any factor on a query's features cancels. Features
    may lie in `memory`, where the next call of the same method overwrites them. Where a step has T
    leaves, all axes (..., c, .) below are (..., T, c, .).

    Attributes of an arithmetic:

    xp
        Namespace of the arrays.
    memory
        Workspaces of the thread, on NumPy.
    width
        The number S of features.
    arrays
        Arrays of the estimator, such as frequencies; their leading axes broadcast with those of q.
    splits
        Whether `part` can take some heads, so that threads can share them.
    alike
        Whether steps differ in their tokens only, so that one can be traced for all.

    Methods, of which `alone` and `steps` are here:

    alone(like, memory=None) -> Arithmetic
        A copy for one thread. It has its own two workspaces, or uses `memory` as both.
    part(head) -> Arithmetic
        A copy for some heads.
    step(q, lead) -> (T, c)
        How many leaves a step has, and tokens a leaf; not by the number of threads, on which no
        rounding may depend.
    in_leaves(like) -> bool
        Whether a step is cut into leaves; otherwise it is one leaf, of as many tokens as there are.
    steps(q, size) -> iterator of slices
        The queries of each step, in order, at most `size`.
    start(keys, size) -> State
        Of keys before the first query; of none it is the identity of `join`.
    remember(attended) -> State
        Of keys that samples have attended to elsewhere; needed only with `past`.
    queries(q, i) -> Queries
        Features of q (..., c, d); i is the slice of all queries that q was taken from.
    keys(keys) -> Fresh
        Features of keys (..., c, d), hidden ones included.
    Queries.map(function), Fresh.map(function)
        The same with a function applied to each array, to cut it into leaves.
    accumulate(fresh, mask) -> State
        Of the keys that the mask (..., 1, c) lets through; hidden ones add nothing, not even nan.
    join(a, b) -> State
        State of two sets of keys together. Up to rounding, associative and commutative.
    before(state, leaves) -> (states, state)
        From a state, and those of T leaves along a new axis: the states before each leaf, and the
        state of the T leaves alone. As T calls of `join`, but with few roundings in turn.
    read(queries, state) -> iterator of Sums
        What queries read of a state.
    pairs(queries, fresh, visible) -> iterator of Sums
        What they read of single keys, where `visible` (..., c, c). A hidden pair enters no sum and
        no maximum, or a later key would change earlier results.
    finish(sums) -> Attended
        Output and normaliser from the sum over all that was read; 0 where no key was seen.
    """

    memory = NO_WORKSPACES
    xp: Any

    def alone(self, like: Array, memory: Workspace | None = None) -> Any:
        """Return a copy for one thread, which has its own workspaces, or one for both."""
        mine = copy(self)
        mine.memory = Workspaces(memory or workspace(like), memory or workspace(like))
        return mine

    def steps(self, q: Array, size: int) -> Iterator[slice]:
        """Cut the queries into steps."""
        return blocks(0, q.shape[-2], size)


@as_written
def causal_attention(
    q: Array, keys: Keys, arithmetic: Any, past: Attended | None = None
) -> Attended:
    """Attend to the keys that each query sees, step after step, and to what is in `past`.

    Later keys enter no sum and no maximum: editing them leaves earlier results as they are, bit
    for bit.
    """
    n, shift = q.shape[-2], keys.k.shape[-2] - q.shape[-2]  # the last query sees the last key
    lead = keys.lead(q, *arithmetic.arrays)
    out, lse = buffers(q, keys.v, lead, arithmetic.xp)
    shape = arithmetic.step(q, lead)
    size = math.prod(shape)

    def attend_head(mine: Any, head: tuple[slice, ...]) -> None:
        nonlocal out, lse
        features, q_h, keys_h = mine.part(head), part(q, (*head, WHOLE, WHOLE)), keys.part(head)
        # Every query sees the first keys, if there are more keys than queries.
        seen = Seen(features.start(keys_h.tokens(0, shift), size), features.join)
        if past is not None:
            f, log_z = part(past.out, (*head, WHOLE, WHOLE)), part(past.lse, (*head, WHOLE))
            seen.add(features.remember(Attended(f, log_z)))
        if traced_once(q) and n > size and features.alike:  # each step would be compiled again
            done = _attend_in_loop(features, q_h, keys_h, seen, shape)
            out = put(out, (*head, WHOLE, WHOLE), done.out)
            lse = put(lse, (*head, WHOLE), done.lse)
            return
        for i in features.steps(q_h, size):
            rows = features.queries(q_h[..., i, :], i)
            fresh = keys_h.tokens(i.start + shift, i.stop + shift)
            done = _attend_step(features, rows, fresh, seen, shape)
            out = put(out, (*head, i, WHOLE), done.out)
            lse = put(lse, (*head, i), done.lse)

    most = most_threads(q, math.prod(lead) * n * (arithmetic.width + shape[1]))
    heads = heads_at_once(lead, q, shape, arithmetic)
    for_each(lambda: partial(attend_head, arithmetic.alone(q)), heads, most=most)
    return Attended(out, lse)


class Seen:
    """The state of keys so far, as sums of 1, 2, 4, ... steps, each with the sum of all before.

    As many are added in turn as the number of steps has binary digits, and so many rounding
    errors add up.
    """

    def __init__(self, start: Any, join: Callable[[Any, Any], Any]) -> None:
        # Level, sum of 2^level steps, and sum of all up to these. No step has level -1: the start
        # stays at the bottom, and is never merged.
        self.join, self.waiting, self.fresh = join, [(-1, start, start)], None

    @property
    def state(self) -> Any:
        """Return the state of all keys so far."""
        if self.fresh is not None:  # added now that it is read: the last step's never is
            more, self.fresh = self.fresh, None
            level = 0
            while self.waiting[-1][0] == level:  # as a carry goes through a binary number
                more, level = self.join(self.waiting.pop()[1], more), level + 1
            self.waiting.append((level, more, self.join(self.waiting[-1][2], more)))
        return self.waiting[-1][2]

    def add(self, more: Any) -> None:
        """Add the state of later keys."""
        _, self.fresh = self.state, more  # the one that waits is added first


def _attend_in_loop(
    features: Any, q: Array, keys: Keys, seen: Seen, shape: tuple[int, int]
) -> Attended:
    """Make all steps, of which one is traced: tokens are filled up to steps of one shape."""
    xp, n, size = features.xp, q.shape[-2], math.prod(shape)
    shift, count = keys.k.shape[-2] - n, -(-n // size)

    def steps(x: Array, missing: int = 0) -> Array:
        return xp.moveaxis(leaves(x, (count, size), xp, missing), -3, 0)

    def step(state: Any, item: Any) -> tuple[Any, Attended]:
        q_i, k_i, v_i, mask_i = item
        # A loop carries arrays of one shape only, not the sums that wait in `Seen`.
        mask_i = None if mask_i is None else xp.matrix_transpose(mask_i)
        so_far = Seen(state, features.join)
        rows = features.queries(q_i, slice(0, size))
        done = _attend_step(features, rows, Keys(k_i, v_i, mask_i, keys.half), so_far, shape)
        return so_far.state, done

    missing, (k, v, mask, _) = max(0, -shift), keys.tokens(shift, n + shift)
    if missing and mask is None:  # the first queries have no keys: zeros, which are hidden
        mask = xp.ones((1, n - missing), dtype=xp.bool, device=device(q))
    if mask is not None:
        mask = steps(xp.matrix_transpose(mask), missing)
    done = loop(step, seen.state, (steps(q), steps(k, missing), steps(v, missing), mask))
    out, lse = xp.moveaxis(done.out, 0, -3), xp.moveaxis(done.lse, 0, -2)
    out = xp.reshape(out, (*out.shape[:-3], count * size, out.shape[-1]))
    return Attended(out[..., :n, :], xp.reshape(lse, (*lse.shape[:-2], count * size))[..., :n])


def heads_at_once(
    lead: tuple[int, ...], q: Array, shape: tuple[int, int], arithmetic: Any
) -> Iterator[tuple[slice, ...]]:
    """Cut heads: as many at once as a step's features fill the cache, with shares for threads."""
    count, row = math.prod(lead), math.prod(shape) * arithmetic.width
    if not arithmetic.splits:
        return tiles(lead, count)
    if is_numpy_array(q):  # heads do not touch each other: shares change no bit
        return tiles(lead, min(count // max(_FEWEST_SHARES, available()), step_size(q) // row))
    row = max(row, math.prod(shape) * shape[1])  # pairs may be more
    return tiles(lead, room(q) // row)


def step_size(like: Array) -> int:
    """Say how many numbers the features of a step are, on NumPy."""
    return int(_STEP_BYTES // like.dtype.itemsize)


def leaf_shape(n: int, leaf: int, most: int) -> tuple[int, int]:
    """Say how many leaves a step has, and tokens a leaf: n tokens are cut into equal steps.

    Equal ones fill up the fewest tokens: 65 of at most 64 become two steps of 33.
    """
    steps = -(-max(n, 1) // (most * leaf))
    count = -(-max(n, 1) // (steps * leaf))
    return count, -(-max(n, 1) // (steps * count))


def whole_leaves(n: int, like: Array) -> tuple[int, int]:
    """Say the same in libraries other than NumPy; leaves can be cut into halves, down to one."""
    most, leaf = _TRACED_LEAVES if traced_once(like) else (_LEAVES, _LEAF)
    count, size = leaf_shape(n, leaf, most)
    return count, 1 << (size - 1).bit_length()  # the next power of two


def _attend_step(
    features: Any, rows: Any, fresh: Keys, seen: Seen, shape: tuple[int, int]
) -> Attended:
    """Read the past and, pair by pair, the keys of the last queries; add these to the past.

    Where a step is cut into leaves, all of these at once.
    """
    n, m, join = rows[0].shape[-2], fresh.k.shape[-2], partial(combine, xp=features.xp)
    if m == 0:  # the queries are before the first key
        alone: Attended = features.finish(reduce(join, features.read(rows, seen.state)))
        return alone
    if features.in_leaves(fresh.k):
        return _attend_leaves(features, rows, fresh, seen, shape)
    keys = features.keys(fresh)
    # Only on NumPy is a step one leaf. At the first keys it may have fewer of these than queries.
    visible = causal_mask(slice(0, n), slice(0, m), m - n, None, np)
    if fresh.mask is not None:
        visible = visible & fresh.mask
    sums = [*features.read(rows, seen.state), *features.pairs(rows, keys, visible)]
    total = reduce(join, sums)
    seen.add(features.accumulate(keys, fresh.mask))
    done: Attended = features.finish(total)
    return done


def _attend_leaves(
    features: Any, rows: Any, fresh: Keys, seen: Seen, shape: tuple[int, int]
) -> Attended:
    """Do the same for all leaves (T, c) of a step at once, each with its own past."""
    n, missing, c = rows[0].shape[-2], rows[0].shape[-2] - fresh.k.shape[-2], shape[1]
    xp, mask, home = features.xp, fresh.mask, device(fresh.k)
    # Queries are filled up at the end, keys also in front, where the first have no queries' own.
    rows = rows.map(lambda x: leaves(x, shape, xp))
    keys = features.keys(fresh).map(lambda x: leaves(x, shape, xp, missing))
    visible = causal_mask(slice(0, c), slice(0, c), 0, home, xp)
    if mask is not None:  # (..., T, 1, c)
        mask = xp.matrix_transpose(leaves(xp.matrix_transpose(mask), shape, xp, missing))
    elif missing:
        mask = xp.reshape(xp.arange(math.prod(shape), device=home) >= missing, (shape[0], 1, c))
    visible = visible if mask is None else visible & mask
    before, after = features.before(seen.state, features.accumulate(keys, mask))
    seen.add(after)
    sums = [*features.read(rows, before), *features.pairs(rows, keys, visible)]
    total = reduce(partial(combine, xp=xp), sums)

    def of_rows(x: Array) -> Array:
        x = xp.broadcast_to(x, (*total.total.shape[:-1], x.shape[-1]))
        return joined(x, xp)[..., :n, :]

    # Without rows that only fill a leaf: where these are 0 / 0, derivatives are nan in all.
    done: Attended = features.finish(Sums(*map(of_rows, total)))
    return done


def leaves(x: Array, shape: tuple[int, int], xp: Any, missing: int = 0) -> Array:
    """Cut rows (..., n, w) into leaves (..., T, c, w), with zeros where rows are missing."""
    *lead, n, w = x.shape
    rows = [x]
    for where, count in ((0, missing), (2, math.prod(shape) - n - missing)):  # in front, at the end
        if count:
            rows.insert(where, xp.zeros((*lead, count, w), dtype=x.dtype, device=device(x)))
    x = xp.concat(rows, axis=-2) if len(rows) > 1 else x
    return xp.reshape(x, (*lead, *shape, w))


def running(
    join: Callable[[Any, Any], Any], first: Any, states: Any, axes: tuple[int, ...], xp: Any
) -> tuple[Any, Any]:
    """Join what is before each of T states along an axis, and the T alone: 1, 2, 4, ... T.

    A scan in log2(T) joins of whole arrays (Hillis and Steele), not T joins in turn.
    """
    kind, count, joined_so_far = type(states), states[0].shape[axes[0]], 1

    def some(start: int, stop: int) -> Any:
        return at(states, slice(start, stop), axes)

    def followed(early: Any, late: Any) -> Any:
        pairs = zip(early, late, axes, strict=True)
        return kind(*(concatenate(x, y, i, xp) for x, y, i in pairs))

    while joined_so_far < count:  # each state holds so many, or all that are before it
        later = join(some(0, count - joined_so_far), some(joined_so_far, count))
        states, joined_so_far = followed(some(0, joined_so_far), later), 2 * joined_so_far
    first, last = at(first, None, axes), at(states, -1, axes)
    return (followed(first, join(first, some(0, count - 1))) if count > 1 else first), last


def at(state: Any, i: Any, axes: tuple[int, ...]) -> Any:
    """Take one of many states, or with None make it the only one along a new axis."""
    index = ((..., i, *(WHOLE,) * (-axis - 1)) for axis in axes)
    return type(state)(*(x[j] for x, j in zip(state, index, strict=True)))
