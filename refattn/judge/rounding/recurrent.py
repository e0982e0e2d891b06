r"""Predict the rounding errors of recurrences: a state goes through the tokens in chunks.

A chunk writes rows y with keys z: the values with the keys and, if tokens remove, the solved rows u
with the vectors a. For a delta rule, with a = -w k, both are one row, w (v - u). With decays in the
tildes, the state S before a chunk and S' after it,

.. math:: O = \tilde q S + P y = R S + \dots, \qquad
    S' = D S + \tilde z^\top y = (D + W) S + \dots

A kernel rounds P, y, the decayed keys and the state that it multiplies to the type of weights; sums
and decays to the type of sums; and the state that it keeps to a type of its own, or as sums. To
first order an error reaches later rows through products of these matrices, which are computed, and
the variances of all errors add up:

.. math:: \mathrm{Var}\,O_{ic} = \sum_s (\partial O_i / \partial s)^2 \, \mathrm{Var}\,s_c.

All rows of a head share the errors of its states: `Recurrence.dependence` bounds how much.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, proxy

import numpy as np

from ...arrays.library import Doubles
from ...engine.recurrent import (
    Decays,
    Leaf,
    Tokens,
    carry,
    cut_rows,
    inverse,
    recur,
    solve_leaves,
    weights,
)
from .roundings import BIAS, RMS, WORST, Roundings, RowErrors, round_bound, walk
from .states import PULLED, ReadHead, TokenArrays, is_delta, steps_of

_ERASED = 1e-6  # share of what rows read of a state at which decays have erased it
_STEPS, _ABOVE = 12, 1.25  # of a power iteration, and a factor above what it finds
_NOTHING_LEFT = 1e3  # sum of log decays at which nothing is left
_BY_ITSELF = 24  # digits of sums above which the exact result needs more than float64
_SMALLEST = 1e-260  # square of a number below which squares of its errors are lost

_KNOWN: WeakKeyDictionary[ReadHead, Any] = WeakKeyDictionary()


class Recurrence(NamedTuple):
    """What a kernel may give for a head, and how many of its rows may err as one, at most.

    That is the largest eigenvalue of the correlations of rows: the sum of their squares is at most
    that of so many times fewer independent rows.
    """

    rows: RowErrors
    dependence: float


def look_at_recurrence(
    read: ReadHead, index: Any, scale: float, roundings: Roundings, of: str
) -> Recurrence:
    """Analyse all rows of a head, and keep the result as long as the arrays."""
    if read not in _KNOWN:
        _KNOWN[read] = lru_cache(maxsize=32)(partial(_analyse_head, proxy(read)))
    found: Recurrence = _KNOWN[read](index, scale, roundings, of)
    return found


def _analyse_head(
    read: ReadHead, index: Any, scale: float, roundings: Roundings, of: str
) -> Recurrence:
    """Say what a kernel that rounds like this may give for a head: its output or last state."""
    x = PULLED.get(of, dict)(read(index))
    (n, d), before = x["k"].shape, bool(x.get("before"))
    # Chunks of the engine have a power of 2 of tokens; a short sequence is one chunk.
    size = 1 << (min(roundings.run, max(n, 1)) - 1).bit_length()  # of a chunk
    steps, state = steps_of(x, scale), x["initial_state"]
    tokens, rates = steps.cut(size, np), cut_rows(x["write"], size, np) if is_delta(x) else None
    chunks = solve_leaves(tokens, before, np)
    states, last = carry(chunks, state, np)
    with np.errstate(all="ignore"):
        tied = bool(np.all(steps.log_decay == steps.log_decay[:1]))
        sums = _Sums(tokens.log_decay, _sum_decays(x, steps.log_decay, size), roundings, tied)
        rows = sums.write(tokens, states, rates)
        passing, terms = sums.find_passing(tokens, chunks, np.stack([*states, last]), rows, before)
    out = np.concatenate([*(chunks.reads @ states + chunks.out), last])
    some = slice(len(out) - d, None) if of == "state" else slice(n)
    variance = passing.variance()[some]
    terms = np.concatenate([*terms, np.square(last)])[some]
    found = _write_rows(out[some], variance, terms, roundings, n * (d + 6) + d)
    if roundings.accumulate.digits > _BY_ITSELF:  # float64 is no reference for itself
        wide = steps.map(np.longdouble), np.longdouble(state)
        exact = recur(*wide, before, np)[of == "state"]
        found = found._replace(rest=np.asarray(exact - out[some], np.float64))
    last_rounding = np.mean(np.where(variance > 0, np.square(found.std) - variance, 0.0), -1)
    dependence = _depend(passing, some, np.mean(variance, -1), last_rounding)
    return Recurrence(found.take(slice(None, None, -1)) if "back" in x else found, dependence)


def _sum_decays(x: TokenArrays, log_decay: Doubles, size: int) -> Doubles:
    """Sum log decays in chunks, (chunks, c, d or 1), as far as a kernel has when it adds each.

    A backward pass has the sums of the forward pass: they are largest at the end of a chunk.
    """
    forward = x["decays"][::-1] if "back" in x else log_decay
    sums = np.concatenate([*np.cumsum(cut_rows(forward, size, np), -2)])[: len(forward)]
    if "back" in x:  # where a token has the decay of the next
        sums = np.concatenate([sums[1:], 0 * sums[:1]])[::-1]
    return np.asarray(cut_rows(sums, size, np))


class Passing(NamedTuple):
    """How errors of chunks (chunks, ...) reach rows, and their variances."""

    reads: Doubles  # R, (c, d)
    pairs: Doubles  # P, (c, rows y)
    written: Doubles  # decayed z, (rows y, d)
    turn: Doubles  # W, (d, d)
    step: Doubles  # D + W
    rows: Doubles  # variance of y, (rows y, d_v)
    carried: Doubles  # of y in the state alone, by sums of log decays
    moved: Doubles  # how S' moves if these sums err alike for all tokens, (d, d_v)
    last: Doubles  # variance of the last S' by these sums
    after: Doubles  # of S'
    before: Doubles  # of S as it is multiplied
    own: Doubles  # of what no other token reads, (c, d_v)
    common: Doubles  # by sums of log decays, which the tokens of a chunk share

    def variance(self) -> Doubles:
        """Add up the variances of rows, of tokens and of the last state: (tokens + d, d_v)."""
        (count, c, d_v), d = self.own.shape, self.step.shape[-1]
        here = np.square(self.pairs) @ self.rows + np.square(self.reads) @ self.before
        found = np.concatenate([*(here + self.own + self.common), np.zeros((d, d_v))])
        # From the last chunk to the first: `later` is what later rows read of the state after it.
        later, most = np.eye(d), float(np.max(np.abs(self.reads), initial=1.0))
        for t in reversed(range(count)):
            far = found[(t + 1) * c :][: len(later)]
            far += np.square(later) @ self.after[t]
            reached = np.square(later @ self.written[t].T)
            far += reached @ self.rows[t]
            # As if tokens had errors of their own, or one error: terms of any and of one sign.
            alike = np.square(later @ self.moved[t])
            drifted = np.maximum(reached @ self.carried[t], alike)
            far += drifted if t < count - 1 else self.last  # of the last state
            far += np.square(later @ self.turn[t]) @ self.before[t]
            later = np.concatenate([self.reads[t], later @ self.step[t]])
            left = np.flatnonzero(np.max(np.abs(later), -1) > _ERASED * most)
            later = later[: left[-1] + 1 if len(left) else 0]
        return found

    def covary(self, x: Doubles) -> Doubles:
        """Multiply rows by their covariances, means over columns: through errors back and forth."""
        (count, c, _), back, sources = self.own.shape, x[len(x) - self.step.shape[-1] :], []
        rows, after, before, own, common = (
            np.mean(y, -1) for y in (self.rows, self.after, self.before, self.own, self.common)
        )
        # C x = sum over errors s of (dO/ds) Var(s) (dO/ds)^T x: first all (dO/ds)^T x, backwards,
        # then all products with dO/ds, forwards. The covariance itself is never formed.
        root, tokens = np.sqrt(common), x[: count * c].reshape(count, c)
        for t in reversed(range(count)):
            read = tokens[t] @ self.reads[t]
            of_rows = rows[t] * (tokens[t] @ self.pairs[t] + self.written[t] @ back)
            added = after[t] * back + self.moved[t] @ (back @ self.moved[t]) / self.moved.shape[-1]
            sources.append((of_rows, before[t] * (read + back @ self.turn[t]), added))
            back = read + back @ self.step[t]
        found, state = own * tokens, np.zeros_like(back)
        # Tokens of a chunk share errors of its sums of log decays: correlated as much as can be.
        found += root * np.sum(root * tokens, -1, keepdims=True)
        for t, (of_rows, of_state, added) in enumerate(reversed(sources)):
            found[t] += self.reads[t] @ (state + of_state) + self.pairs[t] @ of_rows
            state = self.step[t] @ state + self.turn[t] @ of_state + of_rows @ self.written[t]
            state += added
        return np.concatenate([*found, state])


def _write_rows(
    out: Doubles, variance: Doubles, terms: Doubles, roundings: Roundings, count: int
) -> RowErrors:
    """Add the last rounding; by Cauchy, so many errors are off by what bounds them all together."""
    std, near, spacing = np.sqrt(variance), out, np.zeros_like(out)
    worst, bound = WORST * std, 2 * math.sqrt(count) / RMS * std
    if roundings.out is not None:
        spacing, near = roundings.out.spacing(out), roundings.out.round(out)
        std, worst = (np.sqrt(y * y + spacing * spacing / 12) for y in (std, worst))
    bound = round_bound(roundings.out, out, bound)
    std, worst = (np.where(std > 0, y, math.inf) for y in (std, worst))
    lost = ~(np.isfinite(terms) & (terms > _SMALLEST)) & (out != 0)  # as are squares of errors
    std, worst, bound = (np.where(lost, math.inf, x) for x in (std, worst, bound))
    slack = (roundings.exp * BIAS + 4) * roundings.accumulate.unit * np.sqrt(terms)
    none = np.zeros(len(out))
    return RowErrors(out, none, none, near, std, worst, bound, none, none, none, spacing, slack, {})


def _depend(passing: Passing, some: slice, variance: Doubles, own: Doubles) -> float:
    """Find the largest eigenvalue of the correlations of some rows by power iteration."""
    # Of correlations, whose diagonal is 1: the largest eigenvalue is between 1 and the number of
    # rows. The iteration finds it from below, so more is taken than it finds.
    share = (variance > 0) / np.sqrt(np.maximum(variance + own, 1e-300))
    x, most = np.random.default_rng(0).standard_normal(share.shape), 1.0
    whole = np.zeros(passing.own[..., 0].size + passing.step.shape[-1])
    for _ in range(_STEPS):
        whole[some] = x = share * x / max(float(np.linalg.norm(x)), 1e-300)
        x = share * (passing.covary(whole)[some] + own * x)
        most = float(np.linalg.norm(x))
    return min(max(1.0, _ABOVE * most), max(len(x), 1.0))


Written = list[tuple[Doubles, Doubles, Doubles]]  # keys z, rows y and the variance of y


class _Sums:
    """Variances of what a kernel computes in chunks with these log decays (chunks, c, d or 1).

    With them are their running sums, as they are rounded.
    """

    def __init__(self, g: Doubles, running: Doubles, roundings: Roundings, tied: bool) -> None:
        self.roundings, self.decays, self.squares = roundings, Decays(g, np), Decays(2 * g, np)
        self.sums = (RMS * roundings.accumulate.unit) ** 2
        self.narrow = 0.0 if roundings.weights is None else (RMS * roundings.weights.unit) ** 2
        self.more = 2 if np.any(g) else 1  # roundings of a decay and a product with it
        self.alike = g.shape[-1] == 1  # for all coordinates
        # The errors of sums of log decays add up, and all have one sign if all decays are the same.
        off = np.mean(np.square(np.maximum(running, -_NOTHING_LEFT)) * (g != 0), -1)
        self.power, self.lost = 1 + tied, np.cumsum(np.sqrt(off) if tied else off, -1)
        self.off = np.sqrt(off)

    def add(self, got: Doubles, terms: Doubles, count: int, lost: Any) -> Doubles:
        """Find the variance of sums of decayed products, by roundings and by their decays."""
        moved = got * got if self.alike else terms
        walked = walk(0.0, got, terms, count, self.roundings.lanes) + self.more * moved
        return self.sums * np.stack([walked, lost**self.power * moved])

    def drift(self, start: Doubles, parts: Sequence[tuple[Doubles, Doubles]], ends: Any) -> Doubles:
        """Find the variance of sums of decayed rows by the sums of log decays, up to some tokens.

        The error of the sum at a token multiplies all that was there before it.
        """
        sums, square, line = start, np.zeros_like(start), np.zeros_like(start)
        for s in range(self.off.shape[-1]):
            moved = self.off[:, s, None, None] * (s <= ends)[:, None] * sums
            square, line = square + moved * moved, line + moved
            sums = sums + sum(x[..., s, None] * y[:, s, None, :] for x, y in parts)
        return self.sums * (square if self.power == 1 else line * line)

    def read(self, x: Doubles, y: Doubles, before: bool, narrow: bool = True) -> tuple[Any, Any]:
        """Find what tokens x read of the writes of tokens y, and both variances."""
        found = weights(self.decays, x, y, before)
        terms = weights(self.squares, x * x, y * y, before)
        between = np.maximum(self.lost[..., :, None] - self.lost[..., None, :], 0.0)
        varied = self.add(found, terms, x.shape[-1], between)
        varied[0] += self.narrow * narrow * found * found
        return found, varied

    def read_state(self, x: Doubles, states: Doubles) -> Doubles:
        """Find both variances of what rows read of states."""
        terms = np.square(x) @ np.square(states)
        return self.add(x @ states, terms, x.shape[-1], self.lost[..., None])

    def round(self, x: Doubles) -> Doubles:
        """Find the variance of a rounding to the type of weights, which may hold the numbers."""
        if self.roundings.weights is None:
            return np.zeros_like(x)
        return np.where(self.roundings.weights.round(x) == x, 0.0, self.narrow * x * x)

    def write(self, x: Tokens, states: Doubles, rates: Doubles | None) -> Written:
        """Find the rows that are written, with their keys and variances."""
        _, k, v, _, a, b = x
        if a is None or b is None:
            return [(k, v, self.round(v))]
        # Rows u solve (I - L) u = b S + (b . k) v. Errors of L, of the right side and of the sums
        # are multiplied by the inverse.
        stepwise, reader = self.roundings.scores is not None, b * self.decays.until
        (lower, of_a), (of_values, of_k) = (self.read(b, z, True, stepwise) for z in (a, k))
        c, inverted, right = lower.shape[-1], inverse(lower, np), reader @ states + of_values @ v
        solved = inverted @ right
        off = sum(self.read_state(reader, states)) + solved * solved * self.sums
        off += sum(of_a) @ np.square(solved) + sum(of_k) @ np.square(v)
        terms = np.square(lower) @ np.square(solved) + np.square(of_values) @ np.square(v)
        off += self.sums * walk(0.0, solved - right, terms, c, self.roundings.lanes)
        found = np.square(inverted) @ off
        found += self.narrow * np.square(inverted @ reader) @ np.square(states)
        # With a = -w k one row w (v - u) takes away and writes; else there are two, with two keys.
        if rates is None:
            return [(k, v, self.round(v)), (a, solved, found + self.round(solved))]
        found, rows = found * rates * rates, v - rates * solved
        if stepwise:  # the inverse, what it multiplies, and the products
            inverted = np.eye(c) - rates * (inverted @ of_values)
            terms = np.square(v) + np.square(rates * reader) @ np.square(states)
            squares = np.square(inverted) + np.square(inverted - np.eye(c))
            found += self.narrow * (squares @ terms + np.square(inverted @ v))
        return [(k, rows, found + self.round(rows))]

    def find_passing(
        self, x: Tokens, chunks: Leaf, states: Doubles, rows: Written, before: bool
    ) -> tuple[Passing, Doubles]:
        """Find how errors reach rows, with variances, and squares of the terms of the output."""
        (c, d), lanes, start, after = x.q.shape[-2:], self.roundings.lanes, states[:-1], states[1:]
        reader = x.q * (self.decays.until if before else self.decays.from_start)
        own, common = self.read_state(reader, start)
        stepwise = self.roundings.scores is not None
        if stepwise or not self.alike:
            own = own + self.round(reader) @ np.square(start)
        pairs, ends, terms, kept = [], [], np.zeros_like(own), chunks.keep * start
        # Tokens share the errors of sums of log decays, which move what each has left in the state.
        left = self.sums * (self.lost[..., -1:] - self.lost)[..., None] ** self.power
        whole = self.sums * self.lost[..., -1, None, None] ** self.power
        moved, carried = np.sqrt(whole) * kept, []
        lost, added = self.sums * (kept * kept + after * after), 0.0 * kept
        for z, y, _ in rows:
            squares, end = y * y, z * self.decays.to_end
            pair, (rounded, of_decays) = self.read(x.q, z, before)
            pairs.append(pair)
            ends.append(end)
            own, common = own + rounded @ squares, common + of_decays @ squares
            terms += np.square(pair) @ squares
            lost += (self.round(end) + self.sums * self.more * end * end).mT @ squares
            carried.append(left * squares)
            moved += end.mT @ (np.sqrt(left) * y)
            added += (end * end).mT @ squares
        of_state = whole * kept * kept + sum(
            np.square(z).mT @ y for z, y in zip(ends, carried, strict=True)
        )
        if self.alike:
            written = [y for _, y, _ in rows]
            common = self.drift(
                reader @ start, [*zip(pairs, written, strict=True)], np.arange(c) - before
            )
            of_state = self.drift(
                kept, [(z.mT, y) for z, y in zip(ends, written, strict=True)], np.full(d, c)
            )
        if stepwise:  # queries times the scale
            own += self._round_queries(x, rows)
        out = chunks.reads @ start + chunks.out
        own += self.sums * (walk(0.0, out - reader @ start, terms, c, lanes) + out * out)
        lost += self.sums * walk(0.0, after - kept, added, c, lanes)
        if self.roundings.states is not None:
            lost += np.square(RMS * self.roundings.states.unit * after)
        turn = np.zeros((len(start), d, d)) if chunks.turn is None else chunks.turn
        how = np.concatenate(ends, -2), turn, chunks.keep * np.eye(d) + turn
        varied = np.concatenate([x[2] for x in rows], -2)
        terms += np.square(reader) @ np.square(start)
        carries = np.concatenate(carried, -2), moved, of_state[-1]
        variances = varied, *carries, lost, self.narrow * np.square(start), own, common
        return Passing(chunks.reads, np.concatenate(pairs, -1), *how, *variances), terms

    def _round_queries(self, x: Tokens, rows: Written) -> Doubles:
        """Find the variance of what queries read of their chunk by rounding them."""
        read, found, decays = self.round(x.q), [], np.exp(x.log_decay)
        state: Any = 0.0
        for s in range(x.q.shape[-2]):
            added = sum(z[:, s, :, None] * y[:, s, None, :] for z, y, _ in rows)
            state = decays[:, s, :, None] * state + added
            found.append((read[:, s, None, :] @ np.square(state))[:, 0])
        return np.stack(found, -2)
