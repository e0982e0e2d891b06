"""Gradients of the recurrence of `recurrent`, leaf after leaf backward in time.

The cotangent of the state goes through the leaves in reverse order. Each leaf multiplies it by the
transpose of its transition matrix, and adds the cotangents of what its queries read.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..arrays.blocks import WHOLE, put, some_heads, sum_to
from ..arrays.library import Array, as_written, device, is_dask_array, on_whole_rows, reverse
from .recurrent import (
    Decays,
    Leaf,
    Tokens,
    carry,
    cut_rows,
    cut_steps,
    inverse,
    over_heads,
    recur,
    shift,
    solve_leaves,
    spoilt_states,
    sums_before,
    sums_from,
    together,
    weights,
    without_nan,
)


@recur.pullback
def _pull_tokens(
    done: tuple[Array, Array], cotangents: Any, x: Tokens, state: Array, before: bool, xp: Any
) -> dict[str, Any]:
    """Pull `recur` back to its arguments."""
    d_out, d_last = (
        xp.zeros_like(y) if g is None else g for y, g in zip(done, cotangents, strict=True)
    )
    pulled, first = pull_recur(x, state, before, d_out, d_last, xp)
    pairs = zip(x, pulled, strict=True)
    return {
        "x": Tokens(*(None if y is None else sum_to(g, y.shape) for y, g in pairs)),
        "state": first,
    }


@as_written
def pull_recur(
    x: Tokens, state: Array, before: bool, d_out: Array, d_last: Array, xp: Any
) -> tuple[Tokens, Array]:
    """Pull `recur` back to its tokens and the first state, for all heads of the state."""
    if is_dask_array(x.q):
        arrays = [y for y in (*x, state, d_out, d_last) if y is not None]

        def of_numpy(*y: Array) -> Any:
            pulled, first = pull_recur(Tokens(*y[:-3]), y[-3], before, y[-2], y[-1], np)
            return *(z for z in pulled if z is not None), first

        ends = [(i, i) for i in range(len(arrays) - 2)]
        *pulled, first = on_whole_rows(of_numpy, arrays, ends, xp)
        return Tokens(*pulled), first
    clean, bad = without_nan(x, xp, d_out)
    if bad is None:
        return pull_finite(x, state, before, d_out, d_last, xp)
    fine = xp.isfinite(d_out)
    d_out = xp.where(fine, d_out, 0.0)
    pulled, first = pull_finite(clean, state, before, d_out, d_last, xp)
    # Computed without nan, which products of matrices would spread too far, and put back at last.
    spoilt, of_first = spoilt_cotangents(bad, before, ~fine, xp)
    pairs = zip(spoilt, pulled, strict=True)
    pulled = Tokens(*(y if y is None else xp.where(z, math.nan, y) for z, y in pairs))
    return pulled, xp.where(of_first, math.nan, first)


def spoilt_cotangents(bad: Tokens, before: bool, bad_out: Array, xp: Any) -> tuple[Tokens, Array]:
    """Say which cotangents are nan, of tokens, (..., n, 1 or d_v), and of the first state.

    Nan goes from a token to the cotangents of the states before it, as it goes to those after it.
    """
    q, k, v, g, a, b = bad
    reads, turns = bad_out | q, g if a is None or b is None else g | a | b
    after = spoilt_states(bad, xp)
    until = shift(after, 1, xp)
    back = (shift(reads, -1, xp) if before else reads) | shift(turns, -1, xp)
    back = sums_from(xp.astype(back, xp.int32), xp) > 0  # of states after each token

    def some(x: Array) -> Array:
        return xp.any(x, axis=-1, keepdims=True)

    both = some(back) | some(until)
    spoilt = Tokens(
        some(until if before else after) | some(bad_out),
        some(back) | some(v),
        back | k,
        both | g,
        None if b is None else both | b,
        None if a is None else both | a,
    )
    return spoilt, xp.any(reads | turns, axis=-2, keepdims=True)


def pull_finite(
    x: Tokens, state: Array, before: bool, d_out: Array, d_last: Array, xp: Any
) -> tuple[Tokens, Array]:
    """Pull `recur` back where all that tokens do is finite, and so are cotangents of results."""
    lead, n = tuple(state.shape[:-2]), x.q.shape[-2]
    options = {"dtype": x.q.dtype, "device": device(x.q)}
    pulled = x.map(lambda y: xp.empty((*lead, *y.shape[-2:]), **options))
    first = xp.empty((*lead, *state.shape[-2:]), **options)
    size, in_steps = cut_steps(n, x.q)

    def of_heads(head: tuple[slice, ...]) -> None:
        nonlocal pulled, first
        mine, now = x.map(lambda y: some_heads(y, head)), some_heads(state, head)

        def made(i: slice) -> tuple[Tokens, Leaf]:
            some = mine.rows(i).cut(size, xp)
            return some, solve_leaves(some, before, xp)

        # Only states at the starts of steps are kept; those inside are computed again.
        starts = [now]
        for i in in_steps[:-1]:
            starts.append(carry(made(i)[1], starts[-1], xp)[1])
        d_now = some_heads(d_last, head)
        for i, now in reversed(list(zip(in_steps, starts, strict=False))):  # no step of no token
            (some, leaves), d_rows = made(i), cut_rows(some_heads(d_out, head)[..., i, :], size, xp)
            taken, d_now = pull_step(some, leaves, before, now, d_rows, d_now, xp)
            for name, y in zip(Tokens._fields, taken, strict=True):
                if y is not None:
                    rows = together(y, xp)[..., : i.stop - i.start, :]
                    whole = put(getattr(pulled, name), (*head, i, WHOLE), rows)
                    pulled = pulled._replace(**{name: whole})
        first = put(first, (*head, WHOLE, WHOLE), d_now)

    over_heads(of_heads, lead, x.q, state.shape[-2] + state.shape[-1])
    return pulled, first


def pull_step(
    x: Tokens, leaves: Leaf, before: bool, state: Array, d_out: Array, d_state: Array, xp: Any
) -> tuple[Tokens, Array]:
    """Pull the leaves of a step, and the way of the state through them, back."""
    turned, (states, _) = xp.matrix_transpose, carry(leaves, state, xp)
    # The same recurrence from the last leaf to the first; its first two fields are not used.
    back = Leaf(
        *leaves[:2],
        reverse(leaves.keep, -3),
        None if leaves.turn is None else reverse(turned(leaves.turn), -3),
        reverse(turned(leaves.reads) @ d_out, -3),
    )
    d_after, d_state = carry(back, d_state, xp)
    d_after = reverse(d_after, -3)
    d_keep = xp.sum(d_after * states, axis=-1, keepdims=True)
    d_turn = None if leaves.turn is None else d_after @ turned(states)
    cotangents = Leaf(d_out @ turned(states), d_out, d_keep, d_turn, d_after)
    return pull_leaf(x, before, cotangents, xp), d_state


def pull_leaf(x: Tokens, before: bool, pulled: Leaf, xp: Any) -> Tokens:
    """Pull `solve_leaves` back."""
    q, k, v, g, a, b = x
    d_reads, d_out, d_keep, d_turn, d_add = pulled
    decay, turned, d = Decays(g, xp), xp.matrix_transpose, k.shape[-1]
    from_start, until, to_end = decay.from_start, decay.until, decay.to_end
    edge = until if before else from_start

    def pull_weights(
        x: Array, y: Array, before: bool, d_weights: Array
    ) -> tuple[Array, Array, Array]:
        if not before:
            return decay.pull_pairs(x, y, d_weights)
        d_x, d_y, d_decay = decay.pull_pairs(shift(x, -1, xp), y, shift(d_weights, -1, xp))
        return shift(d_x, 1, xp), d_y, d_decay

    def of_decay(x: Array) -> Array:
        return xp.sum(x, axis=-1, keepdims=True) if g.shape[-1] == 1 else x

    # out = W(q, k) v and add = (k to_end)^T v; then what is solved, in the order of `solve_leaves`.
    d_q, d_k, d_g = pull_weights(q, k, before, d_out @ turned(v))
    d_v = turned(weights(decay, q, k, before)) @ d_out + (k * to_end) @ d_add
    d_q, d_end = d_q + d_reads * edge, (v @ turned(d_add)) * to_end
    d_k, at_end, at_start = d_k + d_end, k * d_end, d_reads * edge * q
    at_until, d_a, d_b = 0.0 * at_start, None, None
    if a is not None:
        b_k, b_a = weights(decay, b, k, True), weights(decay, b, a, True)
        inverted = inverse(b_a, xp)
        solved = inverted @ xp.concat([b * until, b_k @ v], axis=-1)
        d_turned, d_written = (xp.concat(y, axis=-1) for y in ((d_reads, d_out), (d_turn, d_add)))
        d_solved = turned(weights(decay, q, a, before)) @ d_turned + (a * to_end) @ d_written
        d_right = turned(inverted) @ d_solved  # of the right sides; with `solved`, of the matrix
        d_until, d_read = d_right[..., :d] * until, d_right[..., d:]
        d_v = d_v + turned(b_k) @ d_read
        q_a = pull_weights(q, a, before, d_turned @ turned(solved))
        of_k = pull_weights(b, k, True, d_read @ turned(v))
        of_a = pull_weights(b, a, True, d_right @ turned(solved))
        d_end = (solved @ turned(d_written)) * to_end
        d_q, d_k, d_a = d_q + q_a[0], d_k + of_k[1], q_a[1] + of_a[1] + d_end
        d_b, d_g = d_until + of_k[0] + of_a[0], d_g + q_a[2] + of_k[2] + of_a[2]
        at_end, at_until = at_end + a * d_end, b * d_until
    if before:  # queries read at `until`
        at_start, at_until = 0.0 * at_start, at_start + at_until
    # The log decay of a token is in the decays from the start to it and to all tokens after it, and
    # in those to the end of all tokens before it.
    d_g = d_g + of_decay(
        sums_from(at_start, xp)
        + shift(sums_from(at_until, xp), -1, xp)
        + sums_before(at_end, xp)
        + turned(d_keep) * from_start[..., -1:, :]
    )
    return Tokens(d_q, d_k, d_v, d_g, d_a, d_b)
