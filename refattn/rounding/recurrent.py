r"""The law and the bound of the rounding errors of a state that goes through the tokens in chunks.

A chunk writes rows y with keys z: the values with the keys and, where tokens remove, the solved
rows u with the vectors a; of a delta rule, whose a is -w k, both are one row, w (v - u). With
decays in the tildes, the state S before a chunk and S' after it,

.. math:: O = \tilde q S + P y = R S + \dots, \qquad
    S' = D S + \tilde z^\top y = (D + W) S + \dots

A kernel rounds P, y, the keys with their decays and the state that it multiplies to the type of
weights; sums and decays to that of sums; and the state that it keeps to a type of its own, or as
sums. To first order an error passes to later rows by products of these matrices, which are
computed, and the variances of all errors add up:

.. math:: \mathrm{Var}\,O_{ic} = \sum_s (\partial O_i / \partial s)^2 \, \mathrm{Var}\,s_c.

All rows of a head share the errors of its states: `Recurrence.dependence` says how much.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from ..arrays.library import Doubles
from ..engine.recurrent import Decays, Steps, carry, chunk, cut_rows, inverse, weights
from .roundings import RMS, WORST, Roundings, RowErrors, round_bound, walk
from .states import PULLED, ReadHead, TokenArrays, is_delta, step_by_step, steps_of

_ERASED = 1e-6  # of what rows read of a state, from which on decays have erased it
_STEPS, _ABOVE = 12, 1.25  # of a power iteration, and how far it may be below what it looks for
_FORGOTTEN = 1e3  # of a sum of log decays, from which on nothing is left
_BY_ITSELF = 24  # digits of sums above which float64 leaves errors of that size

Variances = tuple[Doubles, Doubles]
_MOST_KNOWN = 32  # heads, by profile
_KNOWN: WeakKeyDictionary[ReadHead, dict[Any, Recurrence]] = WeakKeyDictionary()


class Recurrence(NamedTuple):
    """What a kernel may give for a head, and how many of its rows may err as one, at most.

    That is the largest eigenvalue of the correlations of rows: a sum of their squares is not above
    that of so many fewer independent ones.
    """

    rows: RowErrors
    dependence: float


def look_at_recurrence(
    read: ReadHead, index: Any, scale: float, kernel: Roundings, of: str
) -> Recurrence:
    """Analyse a head once for all of its rows, and keep what was found last."""
    known, key = _KNOWN.setdefault(read, {}), (index, scale, kernel, of)
    found = known.get(key)
    if found is None:
        x = PULLED.get(of, dict)(read(index))
        found = known[key] = analyse_recurrent(x, scale, kernel, of)
        while len(known) > _MOST_KNOWN:
            known.pop(next(iter(known)), None)
    return found


def analyse_recurrent(x: TokenArrays, scale: float, kernel: Roundings, of: str) -> Recurrence:
    """Say what a kernel that rounds like this may give for a head: its output or last state."""
    (n, d), d_v, before = x["k"].shape, x["v"].shape[-1], bool(x.get("before"))
    size = 1 << (min(kernel.run, max(n, 1)) - 1).bit_length()  # of a chunk
    steps, state = steps_of(x, scale), x["initial_state"]
    tokens, rates = steps.cut(size, np), cut_rows(x["write"], size, np) if is_delta(x) else None
    chunks = chunk(tokens, before, np)
    states, last = carry(chunks, state, np)
    tied = bool(np.all(steps.log_decay == steps.log_decay[:1]))
    with np.errstate(all="ignore"):
        found = _Chunks(tokens, states, before, kernel, tied)
        found.write(rates)
        passing, terms = found.passing(chunks, np.concatenate([states[1:], last[None]]))
    out = np.concatenate([(chunks.reads @ states + chunks.out).reshape(-1, d_v), last])
    terms = np.concatenate([terms.reshape(-1, d_v), np.square(last)])
    some = slice(len(out) - d, None) if of == "state" else slice(n)
    variance = passing.variance()[some]
    rows = _write_rows(out[some], variance, terms[some], kernel, n * (d + 6) + d)
    if kernel.accumulate.digits > _BY_ITSELF:
        exact = step_by_step(steps, state, before)[of == "state"]
        rows = rows._replace(rest=np.asarray(exact - out[some], np.float64))
    last_rounding = np.mean(np.where(variance > 0, np.square(rows.std) - variance, 0.0), -1)
    dependence = _depend(passing, some, np.mean(variance, -1), last_rounding)
    return Recurrence(rows.take(slice(None, None, -1)) if "back" in x else rows, dependence)


class Passing(NamedTuple):
    """How errors of chunks (chunks, ...) pass to rows, and variances of what passes."""

    reads: Doubles  # R, (c, d)
    pairs: Doubles  # P, (c, rows y)
    written: Doubles  # z to the end, (rows y, d)
    turn: Doubles  # W, (d, d)
    step: Doubles  # D + W
    rows: Doubles  # variance of y, (rows y, d_v)
    after: Doubles  # of S'
    before: Doubles  # of S as it is multiplied
    own: Doubles  # of what no other token reads, (c, d_v)
    common: Doubles  # of what sums of log decays are off, one after the other

    def variance(self) -> Doubles:
        """Add up the variances of rows, of tokens and of the last state: (tokens + d, d_v)."""
        (count, c, d_v), d = self.own.shape, self.step.shape[-1]
        here = np.square(self.pairs) @ self.rows + np.square(self.reads) @ self.before
        here = here + self.own + self.common
        found = np.concatenate([here.reshape(-1, d_v), np.zeros((d, d_v))])
        later, most = np.eye(d), float(np.max(np.abs(self.reads), initial=1.0))
        for t in reversed(range(count)):
            far = found[(t + 1) * c :][: len(later)]
            far += np.square(later) @ self.after[t]
            far += np.square(later @ self.written[t].T) @ self.rows[t]
            far += np.square(later @ self.turn[t]) @ self.before[t]
            later = np.concatenate([self.reads[t], later @ self.step[t]])
            left = np.flatnonzero(np.max(np.abs(later), -1) > _ERASED * most)
            later = later[: left[-1] + 1 if len(left) else 0]
        return found

    def covary(self, x: Doubles) -> Doubles:
        """Multiply rows by their covariances, means over columns: through errors back and forth."""
        count, c, _ = self.own.shape
        rows, after, before, own, common = (np.mean(y, -1) for y in self[5:])
        root = np.sqrt(common)
        of_tokens, back, sources = x[: count * c].reshape(count, c), x[count * c :], []
        for t in reversed(range(count)):
            read, of_state = of_tokens[t] @ self.reads[t], back @ self.turn[t]
            of_rows = of_tokens[t] @ self.pairs[t] + self.written[t] @ back
            sources.append((rows[t] * of_rows, before[t] * (read + of_state), after[t] * back))
            back = read + back @ self.step[t]
        found, state = own * of_tokens, np.zeros_like(back)
        for t, (of_rows, of_state, added) in enumerate(reversed(sources)):
            found[t] += self.reads[t] @ (state + of_state) + self.pairs[t] @ of_rows
            found[t] += root[t] * (root[t] @ of_tokens[t])
            state = self.step[t] @ state + self.turn[t] @ of_state + added
            state += of_rows @ self.written[t]
        return np.concatenate([found.reshape(-1), state])


def _write_rows(
    out: Doubles, variance: Doubles, terms: Doubles, kernel: Roundings, roundings: int
) -> RowErrors:
    """Add the last rounding; by Cauchy, so many errors are off by what bounds them all together."""
    std, near, spacing = np.sqrt(variance), out, np.zeros_like(out)
    worst, bound = WORST * std, 2 * math.sqrt(roundings) / RMS * std
    if kernel.out is not None:
        spacing, near = kernel.out.spacing(out), kernel.out.round(out)
        std, worst = (np.sqrt(y * y + spacing * spacing / 12) for y in (std, worst))
    bound = round_bound(kernel.out, out, bound)
    std, worst = (np.where(std > 0, y, math.inf) for y in (std, worst))
    slack = (kernel.exp / 16 + 4) * kernel.accumulate.unit * np.sqrt(terms)
    none = np.zeros(len(out))
    return RowErrors(out, none, none, near, std, worst, bound, none, none, none, spacing, slack, {})


def _depend(passing: Passing, some: slice, variance: Doubles, own: Doubles) -> float:
    """Find the largest eigenvalue of the correlations of some rows, by powers."""
    share = (variance > 0) / np.sqrt(np.maximum(variance + own, 1e-300))
    x, most = np.random.default_rng(0).standard_normal(share.shape), 1.0
    whole = np.zeros(passing.own[..., 0].size + passing.step.shape[-1])
    for _ in range(_STEPS):
        whole[some] = x = share * x / max(float(np.linalg.norm(x)), 1e-300)
        x = share * (passing.covary(whole)[some] + own * x)
        most = float(np.linalg.norm(x))
    return min(max(1.0, _ABOVE * most), max(len(x), 1.0))


class _Chunks:
    """What a kernel computes of chunks (chunks, c, .) with the states before them."""

    def __init__(
        self, x: Steps, states: Doubles, before: bool, kernel: Roundings, tied: bool
    ) -> None:
        self.x, self.states, self.before, self.kernel = x, states, before, kernel
        self.sums = (RMS * kernel.accumulate.unit) ** 2
        self.narrow = 0.0 if kernel.weights is None else (RMS * kernel.weights.unit) ** 2
        self.decays, self.of_squares = Decays(x.log_decay, np), Decays(2 * x.log_decay, np)
        self.through, self.until = self.decays.from_start, self.decays.until
        self.to_end = self.decays.to_end
        squares = np.mean(np.square(np.maximum(np.cumsum(x.log_decay, -2), -_FORGOTTEN)), -1)
        self.more = 2 if np.any(x.log_decay) else 1  # roundings of a decay and a product with it
        self.alike = x.log_decay.shape[-1] == 1  # for all coordinates
        # Of sums of log decays, an error each: of the same sign where all decays are the same.
        self.power, self.lost = 1 + tied, np.cumsum(np.sqrt(squares) if tied else squares, -1)

    def read(self, x: Doubles, y: Doubles, before: bool) -> Doubles:
        """Weigh what tokens y write by what tokens x read."""
        found: Doubles = weights(self.decays, x, y, before)
        return found

    def vary(self, x: Doubles, y: Doubles, before: bool, narrow: bool = True) -> Variances:
        """Find the variance of weights, which are rounded, and that of their decays."""
        found = self.read(x, y, before)
        terms = weights(self.of_squares, x * x, y * y, before)
        between = np.maximum(self.lost[..., :, None] - self.lost[..., None, :], 0.0)
        moved = found * found if self.alike else terms
        walked = walk(0.0, found, terms, x.shape[-1], self.kernel.lanes) + self.more * moved
        rounded = self.sums * walked + self.narrow * narrow * found * found
        return rounded, self.sums * between**self.power * moved

    def rounded(self, x: Doubles) -> Doubles:
        """Find the variance of a rounding to the type of weights; what that holds is not moved."""
        if self.kernel.weights is None:
            return np.zeros_like(x)
        return np.where(self.kernel.weights.round(x) == x, 0.0, self.narrow * x * x)

    def read_state(self, x: Doubles) -> Variances:
        """Find the variance by sums, and by decays, of what rows x read of the state."""
        got, terms = x @ self.states, np.square(x) @ np.square(self.states)
        moved = got * got if self.alike else terms
        walked = walk(0.0, got, terms, x.shape[-1], self.kernel.lanes) + self.more * moved
        return self.sums * walked, self.sums * self.lost[..., None] ** self.power * moved

    def write(self, rates: Doubles | None) -> None:
        """Find the rows that are written, with their keys and variances."""
        _, k, v, _, a, b = self.x
        self.rows, self.vary_rows = [(k, v)], [self.rounded(v)]  # with their keys
        if a is None or b is None:
            return
        lower, of_values, reader = self.read(b, a, True), self.read(b, k, True), b * self.until
        c, stepwise = lower.shape[-1], self.kernel.scores is not None
        inverted = inverse(lower, np)
        right = reader @ self.states + of_values @ v
        solved = inverted @ right
        off = np.add(*self.read_state(reader)) + solved * solved * self.sums
        for z, y in ((a, solved), (k, v)):
            off += np.add(*self.vary(b, z, True, stepwise)) @ np.square(y)
        terms = np.square(lower) @ np.square(solved) + np.square(of_values) @ np.square(v)
        off += self.sums * walk(0.0, solved - right, terms, c, self.kernel.lanes)
        found = np.square(inverted) @ off
        found += self.narrow * np.square(inverted @ reader) @ np.square(self.states)
        if rates is None:
            self.rows.append((a, solved))
            self.vary_rows.append(found + self.rounded(solved))
            return
        found *= rates * rates
        if stepwise:  # the inverse, what it multiplies, and the products
            inverted = np.eye(c) - rates * (inverted @ of_values)
            terms = np.square(v) + np.square(rates * reader) @ np.square(self.states)
            squares = np.square(inverted) + np.square(inverted - np.eye(c))
            found += self.narrow * (squares @ terms + np.square(inverted @ v))
        rows = v - rates * solved
        self.rows, self.vary_rows = [(k, rows)], [found + self.rounded(rows)]

    def passing(self, chunks: Any, after: Doubles) -> tuple[Passing, Doubles]:
        """Find how errors pass to rows, with variances, and squares of the terms of the output."""
        q, lanes = self.x.q, self.kernel.lanes
        states, of_rows = np.square(self.states), [(z, y * y) for z, y in self.rows]
        pairs = [self.read(q, z, self.before) for z, _ in self.rows]
        reader = q * (self.until if self.before else self.through)
        own, common = self.read_state(reader)
        for z, y in of_rows:
            rounded, of_decays = self.vary(q, z, self.before)
            own, common = own + rounded @ y, common + of_decays @ y
        if not self.alike:
            own = own + self.rounded(reader) @ states
        first, out = reader @ self.states, chunks.reads @ self.states + chunks.out
        terms = sum(np.square(p) @ y for p, (_, y) in zip(pairs, of_rows, strict=True))
        c, d = q.shape[-2:]
        own = own + self.sums * (walk(0.0, out - first, terms, c, lanes) + out * out)
        # The state after the chunk.
        written, kept = [z * self.to_end for z, _ in self.rows], chunks.keep * self.states
        left = (self.lost[..., -1:] - self.lost)[..., None] ** self.power + self.more
        lost, added = self.sums * (after * after + kept * kept), np.zeros_like(after)
        lost += self.sums * self.lost[..., -1, None, None] ** self.power * kept * kept
        for z, (_, y) in zip(written, of_rows, strict=True):
            off = self.rounded(z) + self.sums * left * z * z
            lost, added = lost + off.mT @ y, added + (z * z).mT @ y
        lost += self.sums * walk(0.0, after - kept, added, c, lanes)
        if self.kernel.states is not None:
            lost += np.square(RMS * self.kernel.states.unit * after)
        turn = np.zeros((len(q), d, d)) if chunks.turn is None else chunks.turn
        step = chunks.keep * np.eye(d) + turn
        rows, passed = (np.concatenate(y, -2) for y in (self.vary_rows, written))
        how = chunks.reads, np.concatenate(pairs, -1), passed, turn, step
        found = Passing(*how, rows, lost, self.narrow * states, own, common)
        return found, terms + np.square(reader) @ states
