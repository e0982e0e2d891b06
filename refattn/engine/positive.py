r"""Attention by positive random features, exponentials of any size, causal or not."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from copy import copy
from typing import Any, NamedTuple

import numpy as np

from ..arrays.arithmetic import (
    Workspace,
    add,
    exp,
    finite,
    flush_small,
    multiply,
    sum_of_products,
    times,
    with_ones,
)
from ..arrays.blocks import WHOLE, block_shape, blocks, part, some_heads
from ..arrays.library import Array, as_written, device, fused, is_numpy_array
from ..numbers.primitives import primitive
from .attend import (
    Attended,
    Sums,
    base_of,
    log_sum_exp,
    merge,
    normalise,
    split_ones,
    sum_scores,
)
from .causal import Arithmetic, causal_attention, whole_leaves
from .halves import log_kernel
from .hops import Keys, Samples, concatenate, per_query, read, sample

_STEP = 128  # tokens of a step on NumPy, one leaf: twice what one sum of products adds


@as_written
def two_hops(q: Array, samples: Samples, keys: Keys, causal: bool, xp: Any) -> Attended:
    """Let queries attend to samples that attend to the keys they see; `lse` lacks -|q|^2/2."""
    if keys.differ:
        omega = samples.omega[..., None, :, :]
        return per_query(_read_own, q, Samples(omega, samples.log_weight), keys, causal, xp)
    if causal:
        return attend_causally(q, samples, keys, xp)
    return read(q, samples, sample(samples.omega, keys))


def _read_own(q: Array, samples: Samples, states: Attended) -> Attended:
    """Let queries that share no state attend alone, as one row each."""
    weights = samples.log_weight[..., None, :]
    out, lse = read(q[..., None, :], Samples(samples.omega, weights), states)
    return Attended(out[..., 0, :], lse[..., 0])


@primitive
def attend_causally(q: Array, samples: Samples, keys: Keys, xp: Any) -> Attended:
    """Make two hops over the keys that each query sees by its place, in one step of a tape."""
    return causal_attention(q, keys, Positive(samples, xp))


class _Exponents(NamedTuple):
    """Features e^x of tokens. On NumPy they are bounded where plain arithmetic loses nothing.

    Elsewhere there are x, known and v only: what is bounded would be a branch on values.
    """

    x: Array  # (..., c, S)
    known: Array = None  # which samples there are for a query, (c, S); all if None
    values: Array = None  # e^(x - base)
    base: Array = None  # (..., c, 1), 0 for rows that are bounded
    bounded: Array = None  # (..., c, 1)
    v: Array = None  # (..., c, d_v), of keys
    ones: Array = None  # (..., c, d_v + 1), of keys: values [v_j, 1] where these are bounded
    plain: bool = False  # whether all rows are bounded

    def map(self, function: Callable[[Array], Array]) -> _Exponents:
        """Apply a function to what there is in libraries other than NumPy."""
        known, v = (x if x is None else function(x) for x in (self.known, self.v))
        return _Exponents(function(self.x), known, v=v)


class _State(NamedTuple):
    """What samples have seen: sums over terms that are bounded, and the mean of others."""

    bounded: Array = None  # (..., S, d_v + 1), sums of e^y_js [v_j, 1]; on NumPy
    rest: Attended | None = None


class Positive(Arithmetic):
    r"""Positive features of queries and keys, e^x_is and e^y_js, of any size.

    Where exponents and values are bounded, sums are of plain numbers, as in `Signed`: products of
    such features with each other, with values and with the number of terms neither overflow nor
    underflow. All else is in the log domain: a pair is the log of a product of rows, each less
    its own maximum, or where that may have lost digits a log-sum-exp. What is bounded is decided
    for each term alone, so that a result does not depend on what its query does not see.
    Other libraries than NumPy do not branch on values: nothing is bounded there, and pairs are
    those of `halves`.
    """

    splits = True

    def __init__(self, samples: Samples, xp: Any) -> None:
        self.samples, self.xp = samples, xp
        self.alike = samples.log_weight.shape[-2] == 1  # whether steps differ in their tokens only
        self.width = samples.omega.shape[-2]
        self.arrays: tuple[Array, ...] = samples

    def part(self, head: tuple[slice, ...]) -> Positive:
        """Take some heads."""
        some = copy(self)
        some.samples = some.arrays = Samples(*(some_heads(x, head) for x in self.samples))
        return some

    def step(self, q: Array, lead: tuple[int, ...]) -> tuple[int, int]:
        """Say how many leaves a step has, and tokens a leaf."""
        return (1, _STEP) if is_numpy_array(q) else whole_leaves(q.shape[-2], q)

    def in_leaves(self, like: Array) -> bool:
        """Say whether a step is cut into leaves."""
        return not is_numpy_array(like)

    def start(self, keys: Keys, size: int) -> _State:
        """Let samples attend to the keys before the first query, in one call of any length."""
        return self.remember(sample(self.samples.omega, keys))

    def remember(self, states: Attended) -> _State:
        """Take over what samples have seen, as sums that are bounded and others."""
        f, lse = states
        if not is_numpy_array(f):
            return _State(rest=states)
        # Each sample is either in `sums` or in `rest`; where it is in `sums`, `rest` holds -inf.
        bounded = (np.abs(lse) <= _limits(f)[1])[..., None] & _bounded_rows(f)
        mass = np.where(bounded, np.exp(np.where(bounded, lse[..., None], 0.0)), 0.0)
        sums = mass * with_ones(np.where(bounded, f, 0.0), np)
        rest = np.where(bounded[..., 0], -math.inf, lse)
        return _State(sums, None if (rest == -math.inf).all() else Attended(f, rest))

    def queries(self, q: Array, i: slice) -> _Exponents:
        """Make features of queries, with the weights of the samples."""
        omega, memory = self.xp.matrix_transpose(self.samples.omega), self.memory.queries
        x = multiply(q, omega, memory, "exponents")
        return exponents(add(x, part(self.samples.log_weight, (i, WHOLE))), memory=memory)

    def keys(self, keys: Keys) -> _Exponents:
        """Make features of keys."""
        omega, memory = self.xp.matrix_transpose(self.samples.omega), self.memory.keys
        y = multiply(keys.k, omega, memory, "exponents")
        if keys.half is not None:
            y = add(y, keys.bias(keys.k)[..., None])
        return exponents(y, keys.v, memory=memory)

    def accumulate(self, keys: _Exponents, mask: Array | None) -> _State:
        """Sum what samples see of a leaf, `mask` being (..., 1, c)."""
        xp, y, v = self.xp, keys.x, keys.v
        size = y.shape[-2]
        if not is_numpy_array(y):
            return _State(rest=normalise(sum_scores(xp.matrix_transpose(y), v, mask, size, xp), xp))
        if keys.plain and mask is None:
            return _State(sum_of_products(keys.values.mT, keys.ones, self.memory.keys))
        # Term by term, (..., c, S): a large feature of one sample leaves the others in plain sums.
        seen, (low, high) = np.True_ if mask is None else mask.mT, _limits(y)
        bounded_rows = _bounded_rows(v)
        bounded = (y >= low) & (y <= high) & bounded_rows & seen
        ones = with_ones(np.where(bounded_rows, v, 0.0), np)
        sums = sum_of_products(np.exp(np.where(bounded, y, -math.inf)).mT, ones)
        rest = (seen & ~bounded).mT
        if not rest.any():
            return _State(sums)
        return _State(sums, normalise(sum_scores(y.mT, v, rest, size, np), np))

    def join(self, a: _State, b: _State) -> _State:
        """Add what was seen of other keys."""
        bounded = None if a.bounded is None else a.bounded + b.bounded
        rest = a.rest or b.rest
        return _State(bounded, merge(a.rest, b.rest) if a.rest and b.rest else rest)

    def pairs(self, queries: _Exponents, keys: _Exponents, visible: Array) -> Iterator[Sums]:
        """Read the visible keys of a leaf one by one."""
        v, xp = keys.v, self.xp
        most = 2 * v.shape[-2]  # large values are averaged with those of the past
        if not is_numpy_array(v):
            # A key that no query sees could bring a nan, which `visible` is too late to hide.
            seen = xp.matrix_transpose(visible[..., -1:, :])  # by the last query
            y = xp.where(seen, keys.x, -math.inf)
            scores = log_kernel(queries.x, y, queries.known, xp)
            yield sum_scores(scores, v, visible, most, xp)
            return
        keys = _of_known(keys, queries.x.shape[-1])
        products = sum_of_products(queries.values, keys.values.mT, self.memory.keys)
        if queries.plain and keys.plain:  # finite, all of them
            weights = times(products, visible)  # in less time than `where` takes
            yield _plain_sums(sum_of_products(weights, keys.ones, self.memory.keys))
            return
        bounded = queries.bounded & keys.bounded.mT & visible
        # Each pair is in one of two sums, whose bases differ: plain numbers, or the log domain.
        if bounded.any():
            yield _plain_sums(sum_of_products(np.where(bounded, products, 0.0), keys.ones))
        rest = visible & ~bounded
        if rest.any():
            yield sum_scores(_log_products(queries, keys, products, rest), v, rest, most, np)

    def read(self, queries: _Exponents, state: _State) -> Iterator[Sums]:
        """Read what samples have seen."""
        x = queries.x
        size = x.shape[-1]
        if state.bounded is not None:
            bounded, values = state.bounded[..., :size, :], queries.values
            if not queries.plain:  # the other queries read the same sums in the log domain
                values = np.where(queries.bounded, values, 0.0)
                f, lse = normalise(_plain_sums(bounded), np)
                scores = np.where(queries.bounded, -math.inf, x + lse[..., None, :])
                yield sum_scores(scores, f, None, size, np)
            yield _plain_sums(sum_of_products(values, bounded, self.memory.queries))
        if state.rest is not None:
            f, lse = state.rest.out[..., :size, :], state.rest.lse[..., None, :size]
            # Twice as many, as for pairs: large values are averaged with those of single keys.
            yield sum_scores(x + lse, f, queries.known, 2 * size, self.xp)

    def before(self, state: _State, leaves: _State) -> tuple[_State, _State]:
        """Find the states before each of many leaves, and that of these leaves alone."""
        assert state.rest is not None
        assert leaves.rest is not None
        before, after = _running_mean(state.rest, leaves.rest, self.xp)
        return _State(rest=before), _State(rest=after)

    def finish(self, sums: Sums) -> Attended:
        """Return the mean and the log normaliser."""
        return normalise(sums, self.xp)


def _running_mean(first: Attended, states: Attended, xp: Any) -> tuple[Attended, Attended]:
    """Do as `running` for T states (..., T, S, d_v): samples attend once more, to states.

    This is one product with triangular weights, where `running` needs log2(T) joins.
    """
    (f, lse), count = states, states.lse.shape[-2] + 1
    f = concatenate(first.out[..., None, :, :], f, -3, xp)
    lse = concatenate(first.lse[..., None, :], lse, -2, xp)
    f, lse = xp.moveaxis(f, -3, -2), xp.matrix_transpose(lse)  # of samples, (..., S, T + 1, d_v)
    place = xp.arange(count, device=device(f))
    visible = _seen_by_state(place, place[:, None], count - 1, xp)
    f, lse = normalise(sum_scores(lse[..., None, :], f, visible, count, xp), xp)
    f, lse = xp.moveaxis(f, -2, -3), xp.matrix_transpose(lse)
    before = Attended(f[..., :-1, :, :], lse[..., :-1, :])
    return before, Attended(f[..., -1, :, :], lse[..., -1, :])


@fused
def _seen_by_state(place: Array, reader: Array, last: int, xp: Any) -> Array:
    """Say which states a state reads: those up to itself, but the last the T alone."""
    return (reader >= place) & ((place > 0) | (reader < last))


def _limits(x: Array) -> tuple[float, float]:
    """Say between which limits exponents are bounded.

    A product of two features, a value up to e^high or down to e^-high, and the sum of e^high such
    terms are between the smallest normal and the largest number.
    """
    # Twice high for two features, high for the value and high for the number of terms: 4 high.
    # Below, a term is at least twice low less high, which is above -largest.
    largest = float(np.log(np.finfo(x.dtype).max))
    return -largest / 3, largest / 4


def _bounded_rows(v: Array) -> Array:
    """Say whether values (..., c, d_v) of a row are 0 or neither large nor small, (..., c, 1)."""
    if not v.size:
        return np.ones((*v.shape[:-1], 1), dtype=bool)
    high = np.exp(v.dtype.type(_limits(v)[1]))
    size = np.abs(v)
    if np.max(size) <= high and np.min(size) >= 1 / high:
        return np.ones((*v.shape[:-1], 1), dtype=bool)
    np.copyto(size, 1.0, where=size == 0)  # a 0 has no digits to lose
    largest, least = (f(size, axis=-1, keepdims=True) for f in (np.max, np.min))
    return (largest <= high) & (least >= 1 / high)


def exponents(
    x: Array, v: Array | None = None, known: Array | None = None, memory: Workspace | None = None
) -> _Exponents:
    """Evaluate e^x of tokens, with values if they are keys; large values are not bounded."""
    if not is_numpy_array(x):
        return _Exponents(x, known, v=v)
    low, high = _limits(x)
    bounded = np.ones((*x.shape[:-1], 1), dtype=bool) if v is None else _bounded_rows(v)
    # One look at all is faster than a look at each row. A nan is not bounded: hence `not`.
    if not (np.max(x) <= high and np.min(x) >= low):
        largest, least = (f(x, axis=-1, keepdims=True) for f in (np.max, np.min))
        bounded = bounded & (largest <= high) & (least >= low)
    plain, ones = bool(bounded.all()), None
    if v is not None:
        ones = with_ones(v if plain else np.where(bounded, v, 0.0), np, memory)
    if plain:
        out = None if memory is None else memory.room("features", x.shape, x.dtype)
        values, base = np.exp(x, out=out), np.zeros_like(x[..., :1])
        return _Exponents(x, None, values, base, bounded, v, ones, True)
    base = np.where(bounded, 0.0, finite(np.max(x, axis=-1, keepdims=True), np))
    values = exp(flush_small(x - base, np), np)  # x itself stays: lost pairs are evaluated from it
    return _Exponents(x, None, values, base, bounded, v, ones)


def _of_known(keys: _Exponents, known: int) -> _Exponents:
    """Keep the features of keys for the first samples, all that the queries of a step know."""
    if known == keys.x.shape[-1]:
        return keys
    x = keys.x[..., :known]
    if keys.plain:
        return keys._replace(x=x, values=keys.values[..., :known])
    return exponents(x, keys.v)  # the maximum of a row may have been of a later sample


def _plain_sums(totals: Array) -> Sums:
    """Split sums (..., d_v + 1) that need no base; of no key where the mass is 0."""
    return split_ones(totals, base_of(totals[..., -1:] != 0, totals))


def _log_products(queries: _Exponents, keys: _Exponents, products: Array, rest: Array) -> Array:
    """Evaluate log sum_s e^(x_is + y_js) of some pairs from products of rows less their bases.

    Where all terms of a product are so small that they may have lost digits, it is evaluated anew.
    """
    limits, size = np.finfo(products.dtype), queries.x.shape[-1]
    # A product with a bounded row loses nothing: its exponents are above log(tiny) / 3.
    lost = (products < size * (limits.smallest_normal / limits.eps)) & rest
    scores = np.log(products)
    scores += queries.base
    scores += keys.base.mT
    if lost.any():
        lead = scores.shape[:-2]
        x, y = (np.broadcast_to(z.x, (*lead, *z.x.shape[-2:])) for z in (queries, keys))
        *head, i, j = np.nonzero(lost)
        for some in blocks(0, len(i), max(1, math.prod(block_shape(x)) // size)):
            at = [index[some] for index in (*head, i, j)]
            scores[tuple(at)] = log_sum_exp(x[(*at[:-2], at[-2])] + y[(*at[:-2], at[-1])], np)
    return scores
