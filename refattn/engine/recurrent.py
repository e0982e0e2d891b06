r"""Linear attention whose state decays and from which tokens remove, by products of matrices.

A state S, (d, d_v) for each head, goes through the tokens:

.. math::
    S_t = (\mathrm{Diag}(e^{g_t}) + a_t b_t^\top) S_{t-1} + k_t v_t^\top, \qquad
    o_t = S_t^\top q_t

What a_t writes, u_t = S_{t-1}^T b_t, solves a triangular system in each leaf, so that

.. math:: O = R S_0 + W, \qquad S_c = T S_0 + C

with matrices of the leaf only: the states go from leaf to leaf by one product. A decay from
token j to token i is e to the sum of the g between them, never a ratio of decays from the start,
whose denominator may be 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..arrays.arithmetic import exp, flush_small
from ..arrays.blocks import WHOLE, blocks, most_threads, put, some_heads, tiles
from ..arrays.library import (
    Array,
    as_written,
    device,
    is_dask_array,
    is_numpy_array,
    loop,
    on_whole_rows,
    own_copy,
    reverse,
    traced_once,
)
from ..arrays.threads import for_each
from ..numbers.primitives import primitive

_LONGEST_LEAF = 64  # tokens: more take time for pairs, fewer for states
_LEAVES, _OTHER_LEAVES = 256, 64  # of a step, on NumPy times the bytes of a number
_NUMPY_NUMBERS = 2**17  # of tokens of some heads, which stay in the cache


class Tokens(NamedTuple):
    """What tokens do, arrays (..., n, d) but for values (..., n, d_v); without removal, no a, b."""

    q: Array
    k: Array
    v: Array
    log_decay: Array  # (..., n, d), or (..., n, 1) if all coordinates decay alike
    a: Array | None = None
    b: Array | None = None

    def map(self, function: Callable[[Array], Array]) -> Tokens:
        """Apply a function to all arrays."""
        return Tokens(*(x if x is None else function(x) for x in self))

    def rows(self, i: slice) -> Tokens:
        """Take some tokens."""
        return self.map(lambda x: x[..., i, :])

    def cut(self, size: int, xp: Any) -> Tokens:
        """Cut tokens into leaves (..., leaves, size, .), with tokens at the end that do nothing."""
        return self.map(lambda x: cut_rows(x, size, xp))


class Leaf(NamedTuple):
    """What leaves make of the state before them: out = reads S + out, S = (keep + turn) S + add."""

    reads: Array  # (..., c, d)
    out: Array  # (..., c, d_v)
    keep: Array  # (..., d or 1, 1), a diagonal
    turn: Array | None  # (..., d, d)
    add: Array  # (..., d, d_v)


class Decays:
    """Decays (..., c, d or 1) of a power of 2 of tokens, between any two of them.

    Between tokens in different halves they are products of two decays, from the early token to the
    end of its half and from there to the late one, of which none is above 1 if no token makes the
    state grow. So the pairs of halves are products of matrices; a token has no decay to itself.
    """

    def __init__(self, log_decay: Array, xp: Any) -> None:
        self.xp, self.halves, size = xp, list[tuple[Array, Array]](), 1
        # Sums of logs in each half, up to a token with it, and after it; halves double each turn.
        up_to, after, c = log_decay, xp.zeros_like(log_decay), log_decay.shape[-2]
        while size < c:
            (early, late), (early_after, late_after) = (_split(x, size, xp) for x in (up_to, after))
            self.halves.append((decay(early_after, xp), decay(late, xp)))
            up_to = _together(early, late + early[..., -1:, :], xp)
            after = _together(early_after + late[..., -1:, :], late_after, xp)
            size *= 2
        self.from_start, self.to_end = decay(up_to, xp), decay(after, xp)
        self.until = decay(shift(up_to, 1, xp), xp)  # the token before each
        self.between = None  # of one decay for all coordinates: a factor on each pair
        if log_decay.shape[-1] == 1:
            one = xp.ones_like(log_decay)
            self.between = self._of_coordinates(one, one)

    def pairs(self, x: Array, y: Array) -> Array:
        """Multiply x_i, y_j and the decay from j to i, for j <= i; 0 elsewhere."""
        if self.between is None:
            return self._of_coordinates(x, y)
        return (x @ self.xp.matrix_transpose(y)) * self.between

    def _of_coordinates(self, x: Array, y: Array) -> Array:
        xp, size = self.xp, 1
        own = xp.sum(x * y, axis=-1)[..., None, None]  # pairs in each half, (..., c, size, size)
        for to_end, from_start in self.halves:
            early, late = _split(y, size, xp)[0] * to_end, _split(x, size, xp)[1] * from_start
            cross = late @ xp.matrix_transpose(early)
            own = join_halves(own[..., ::2, :, :], cross, own[..., 1::2, :, :], xp)
            size *= 2
        return own[..., 0, :, :]

    def pull_pairs(self, x: Array, y: Array, d_pairs: Array) -> tuple[Array, Array, Array]:
        """Pull `pairs` back to x, y and log decays."""
        xp, turned = self.xp, self.xp.matrix_transpose
        if self.between is None:
            return self._pull_coordinates(x, y, d_pairs)
        one, weights = xp.ones_like(self.from_start), d_pairs * self.between
        _, _, d_log_decay = self._pull_coordinates(one, one, d_pairs * (x @ turned(y)))
        return weights @ y, turned(weights) @ x, d_log_decay

    def _pull_coordinates(self, x: Array, y: Array, d_pairs: Array) -> tuple[Array, Array, Array]:
        # The loop of `_of_coordinates` the other way, from the leaf down to single tokens.
        xp, size, own = self.xp, x.shape[-2], d_pairs[..., None, :, :]
        d_x = d_y = d_log_decay = 0.0
        for to_end, from_start in reversed(self.halves):
            size //= 2
            early, late = _split(y, size, xp)[0] * to_end, _split(x, size, xp)[1] * from_start
            cross = own[..., size:, :size]
            d_late, d_early = cross @ early, xp.matrix_transpose(cross) @ late
            # A token's log decay is in the decays of all pairs that it lies between.
            none, through = xp.zeros_like(d_late), sums_from(d_late * late, xp)
            d_x = d_x + _together(none, d_late * from_start, xp)
            d_y = d_y + _together(d_early * to_end, none, xp)
            d_log_decay = d_log_decay + _together(sums_before(d_early * early, xp), through, xp)
            own = cut_halves(own, size, xp)
        same = own[..., 0]  # a token and itself
        return d_x + same * y, d_y + same * x, d_log_decay + xp.zeros_like(same * x)


def _split(x: Array, size: int, xp: Any) -> tuple[Array, Array]:
    """Cut tokens (..., c, d) into early and late halves, (..., pairs of halves, size, d)."""
    *lead, c, d = x.shape
    x = xp.reshape(x, (*lead, c // (2 * size), 2, size, d))
    return x[..., 0, :, :], x[..., 1, :, :]


def _together(early: Array, late: Array, xp: Any) -> Array:
    """Put early and late halves together again."""
    return together(together(xp.stack([early, late], axis=-3), xp), xp)


def together(x: Array, xp: Any) -> Array:
    """Put rows (..., leaves, size, d) together, (..., leaves size, d)."""
    return xp.reshape(x, (*x.shape[:-3], x.shape[-3] * x.shape[-2], x.shape[-1]))


def decay(x: Array, xp: Any) -> Array:
    """Exponentiate, without subnormal results, with which products would be slow."""
    return exp(flush_small(own_copy(x, xp), xp), xp)


def sums_from(x: Array, xp: Any) -> Array:
    """Sum each row and those after it, (..., c, d)."""
    return reverse(xp.cumulative_sum(reverse(x, -2), axis=-2), -2)


def sums_before(x: Array, xp: Any) -> Array:
    """Sum the rows before each, (..., c, d)."""
    return shift(xp.cumulative_sum(x, axis=-2), 1, xp)


def shift(x: Array, by: int, xp: Any) -> Array:
    """Move rows (..., c, d) up or down by one, and fill up with 0."""
    none = xp.zeros_like(x[..., :1, :])
    return xp.concat([x[..., 1:, :], none] if by < 0 else [none, x[..., :-1, :]], axis=-2)


def inverse(lower: Array, xp: Any) -> Array:
    """Invert I - lower, for a strictly lower triangular matrix, by halves.

    The inverse of [[A, 0], [-C, B]] is [[a, 0], [b C a, b]] with those of A and B. There is no
    routine for triangular systems in the array API, and LU factors take ten times as long.
    """
    crosses, pairs = [], lower[..., None, :, :]
    while half := pairs.shape[-1] // 2:
        crosses.append(pairs[..., half:, :half])
        pairs = cut_halves(pairs, half, xp)
    inverses = xp.ones_like(pairs)  # of single tokens, whose diagonal is 1
    for cross in reversed(crosses):
        early, late = inverses[..., ::2, :, :], inverses[..., 1::2, :, :]
        inverses = join_halves(early, late @ cross @ early, late, xp)
    return inverses[..., 0, :, :]


def cut_halves(pairs: Array, half: int, xp: Any) -> Array:
    """Cut matrices of pairs (..., count, size, size) into those of halves, (..., 2 count, ., .)."""
    own = xp.stack([pairs[..., :half, :half], pairs[..., half:, half:]], axis=-3)
    return xp.reshape(own, (*pairs.shape[:-3], -1, half, half))


def join_halves(early: Array, cross: Array, late: Array, xp: Any) -> Array:
    """Make lower triangular matrices of those of two halves, and of what is between them."""
    rows = ([early, xp.zeros_like(cross)], [cross, late])
    return xp.concat([xp.concat(x, axis=-1) for x in rows], axis=-2)


def solve_leaves(x: Tokens, before: bool, xp: Any) -> Leaf:
    """Find what leaves (..., c, .) make of states, which queries may read before their token."""
    q, k, v, g, a, b = x
    decays = Decays(g, xp)
    read, to_end = partial(weights, decays), decays.to_end
    keep = xp.matrix_transpose(decays.from_start[..., -1:, :])
    reads = q * (decays.until if before else decays.from_start)
    out, add = read(q, k, before) @ v, xp.matrix_transpose(k * to_end) @ v
    if a is None:
        return Leaf(reads, out, keep, None, add)
    # u = (I - B A)^-1 (B S_0 + B K V) with decayed rows: both columns solved at once, then what
    # they write is read by later queries of the leaf, and by the state at its end.
    right = xp.concat([b * decays.until, read(b, k, True) @ v], axis=-1)
    solved = inverse(read(b, a, True), xp) @ right
    turned, written = read(q, a, before) @ solved, xp.matrix_transpose(a * to_end) @ solved
    (of_reads, of_out), (turn, of_add) = (
        (y[..., : k.shape[-1]], y[..., k.shape[-1] :]) for y in (turned, written)
    )
    return Leaf(reads + of_reads, out + of_out, keep, turn, add + of_add)


def weights(decays: Decays, x: Array, y: Array, before: bool) -> Array:
    """Weigh what tokens y write by what tokens x read, after or before their own write."""
    xp = decays.xp
    # To read before token i is to read after token i - 1: rows move up, pairs move back down.
    return shift(decays.pairs(shift(x, -1, xp), y), 1, xp) if before else decays.pairs(x, y)


def carry(leaves: Leaf, state: Array, xp: Any) -> tuple[Array, Array]:
    """Go through leaves (..., leaves, ., .): return the states before each, and the last."""

    def through(state: Array, one: Any) -> tuple[Array, Array]:
        keep, turn, add = one
        # A diagonal apart from the rest: where there is no removal, it is all.
        after = keep * state + add
        after = after if turn is None else after + turn @ state
        return after, after

    start, moves = state[..., None, :, :], (leaves.keep, leaves.turn, leaves.add)
    if traced_once(state):
        items = tuple(x if x is None else xp.moveaxis(x, -3, 0) for x in moves)
        after = xp.moveaxis(loop(through, state, items), 0, -3)
    else:
        states = []
        for t in range(leaves.add.shape[-3]):
            state, _ = through(state, [x if x is None else x[..., t, :, :] for x in moves])
            states.append(state)
        after = xp.stack(states, axis=-3)
    first = xp.broadcast_to(start, after[..., :1, :, :].shape)
    return xp.concat([first, after[..., :-1, :, :]], axis=-3), after[..., -1, :, :]


def cut_rows(x: Array, size: int, xp: Any) -> Array:
    """Cut rows (..., n, d) into leaves, filled up with 0: a log decay of 0 keeps the state."""
    *lead, n, d = x.shape
    if missing := -n % size:
        nothing = xp.zeros((*lead, missing, d), dtype=x.dtype, device=device(x))
        x = xp.concat([x, nothing], axis=-2)
    return xp.reshape(x, (*lead, -(-n // size), size, d))


def cut_steps(n: int, like: Array) -> tuple[int, list[slice]]:
    """Say how many tokens a leaf has, a power of 2, and which tokens each step has."""
    size = min(_LONGEST_LEAF, 1 << max(n - 1, 0).bit_length())
    count = _LEAVES // like.dtype.itemsize if is_numpy_array(like) else _OTHER_LEAVES
    count = -(-max(n, 1) // size) if traced_once(like) else count
    return size, list(blocks(0, n, size * count))


@primitive
@as_written
def recur(x: Tokens, state: Array, before: bool, xp: Any) -> tuple[Array, Array]:
    """Read and write the state, (..., d, d_v), token by token: out (..., n, d_v), and the last."""
    if is_dask_array(x.q):  # a graph of all that follows would be large: tokens in one call
        arrays = [y for y in (*x, state) if y is not None]
        ends = [(0, 2), (len(arrays) - 1, 2)]

        def of_numpy(*y: Array) -> tuple[Array, Array]:
            return recur(Tokens(*y[:-1]), y[-1], before, np)

        out, last = on_whole_rows(of_numpy, arrays, ends, xp)
        return out, last
    clean, bad = without_nan(x, xp)
    x = clean._replace(q=x.q)  # what a query holds goes into its own output only
    q, v, lead = x.q, x.v, tuple(state.shape[:-2])
    (n, d), d_v, options = q.shape[-2:], v.shape[-1], {"dtype": q.dtype, "device": device(q)}
    out, last = xp.empty((*lead, n, d_v), **options), xp.empty((*lead, d, d_v), **options)
    size, in_steps = cut_steps(n, q)

    def of_heads(head: tuple[slice, ...]) -> None:
        nonlocal out, last
        mine, now = x.map(lambda y: some_heads(y, head)), some_heads(state, head)
        for i in in_steps:
            leaves = solve_leaves(mine.rows(i).cut(size, xp), before, xp)
            states, now = carry(leaves, now, xp)
            rows = together(leaves.reads @ states + leaves.out, xp)
            out = put(out, (*head, i, WHOLE), rows[..., : i.stop - i.start, :])
        last = put(last, (*head, WHOLE, WHOLE), now)

    over_heads(of_heads, lead, q, d + d_v)
    if bad is None:
        return out, last
    spoilt = spoilt_states(bad, xp)
    everywhere = xp.any(spoilt, axis=-2, keepdims=True)
    read = shift(spoilt, 1, xp) if before else spoilt
    return xp.where(read, math.nan, out), xp.where(everywhere, math.nan, last)


def without_nan(x: Tokens, xp: Any, *more: Array) -> tuple[Tokens, Tokens | None]:
    """Replace by 0 what is not finite, and say where: which values, and which rows (..., n, 1).

    A product of matrices would bring it to tokens that it is not for, as 0 times nan. None says
    that all is finite, `more` too; only on NumPy is this seen.
    """
    if is_numpy_array(x.q) and all(y is None or np.isfinite(np.sum(y)) for y in (*x, *more)):
        return x, None
    fine = x.map(xp.isfinite)
    fine = fine._replace(log_decay=fine.log_decay | (x.log_decay == -math.inf))  # forgets all
    clean = (y if y is None else xp.where(f, y, 0.0) for f, y in zip(fine, x, strict=True))
    bad = fine.map(lambda y: ~xp.all(y, axis=-1, keepdims=True))
    return Tokens(*clean), bad._replace(v=~fine.v)


def spoilt_states(bad: Tokens, xp: Any) -> Array:
    """Say which states after a token have columns of nan, (..., n, d_v)."""
    some = bad.v
    for y in (z for z in (bad.k, *bad[3:]) if z is not None):
        some = some | y
    return xp.cumulative_sum(xp.astype(some, xp.int32), axis=-2) > 0


def over_heads(of_heads: Callable[..., None], lead: tuple[int, ...], q: Array, width: int) -> None:
    """Call a function for some heads at a time, on threads on NumPy."""
    count, n = math.prod(lead), q.shape[-2]
    most = count
    if is_numpy_array(q):
        tokens = min(n, _LONGEST_LEAF * _LEAVES // q.dtype.itemsize)  # of a step
        most = _NUMPY_NUMBERS // (max(1, tokens) * width)
    heads = list(tiles(lead, most))
    threads = most_threads(q, count * n * _LONGEST_LEAF) if len(heads) > 1 else 0
    for_each(lambda: of_heads, heads, most=threads)
