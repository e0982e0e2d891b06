"""What chunks of a recurrence read and pass on: the state of another chunk, or other decays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from ....arrays.library import Doubles
from ....engine.recurrent import Tokens, carry, recur, solve_leaves
from ...rounding.problems import Index, Problem
from ...rounding.states import give, is_delta, steps_of

CHUNK_SIZES = (64, 16, 32, 128)
_MOST_TOKENS = 1024  # that go chunk by chunk

Added = Callable[[Index], Doubles]  # to the exact result of a head
# Sums of log decays in a chunk and in the one before, (c, d or 1), and the columns of keys and of
# values, to what the state, keys and values are multiplied by.
Pass = Callable[[Doubles, Doubles, int, int], tuple[Any, Any, Any]]


def _decay_over(g: Doubles) -> Doubles:
    """Return the decay over a whole chunk, (d or 1, 1)."""
    return np.exp(g[-1:]).T


_TO_END = "the decay from a token to the end of its chunk"
_PASSED: Mapping[str, Pass] = {
    f"{_TO_END} is left out": lambda g, h, d, c: (_decay_over(g), 1.0, 1.0),
    f"{_TO_END} is that from its start": lambda g, h, d, c: (_decay_over(g), np.exp(g), 1.0),
    "the decay of the state over the chunk is left out": lambda g, h, d, c: (
        1.0,
        np.exp(g[-1:] - g),
        1.0,
    ),
    "the decay of the state over the chunk is that of the chunk before": lambda g, h, d, c: (
        _decay_over(h),
        np.exp(g[-1:] - g),
        1.0,
    ),
    f"{_TO_END} is that in the chunk before": lambda g, h, d, c: (
        _decay_over(g),
        np.exp(h[-1:] - h),
        1.0,
    ),
    "the sum of log decays over the chunk counts as 0": lambda g, h, d, c: (1.0, np.exp(-g), 1.0),
}
_BY_COLUMN: Mapping[str, Pass] = {
    f"{_TO_END} is read by the column of v, not by the token": lambda g, h, d, c: (
        _decay_over(g),
        1.0,
        np.exp(g[-1:] - g[:c]).T,
    ),
    f"{_TO_END} is read by the column of k, not by the token": lambda g, h, d, c: (
        _decay_over(g),
        np.exp(g[-1:] - g[:d]).T,
        1.0,
    ),
}
_READ_OF = {
    "after its chunk of {}, not before it: tokens of the chunk count once more": 1,
    "one chunk of {} too early": -1,
}


def _sum_from_key(g: Doubles) -> Doubles:
    return g[:, :, None] - g[:, None]


# By sums of log decays from the start of a chunk: what its queries multiply the state before it by.
_READ_WITH: Mapping[str, Callable[[Doubles], Doubles]] = {
    "that of its first token": lambda g: g[:, :1],
    "that of the whole chunk": lambda g: g[:, -1:],
    "that of the token before": lambda g: np.pad(g, ((0, 0), (1, 0), (0, 0)))[:, :-1],
    "left out": lambda g: 0 * g,
}
# By sums of log decays from the start of chunks, (chunks, c, d or 1): the exponents of what pairs
# of tokens are multiplied by, (chunks, queries, keys, d or 1), and whether later keys count, too.
_WITHIN_CHUNKS: Mapping[str, tuple[Callable[[Doubles], Any], bool]] = {
    "without decay": (lambda g: 0.0, False),
    "with twice the decay": (lambda g: 2 * _sum_from_key(g), False),
    "with the decay up to the token before the query": (
        lambda g: _sum_from_key(g) - np.diff(g, axis=1, prepend=0)[:, :, None],
        False,
    ),
    "and later ones without decay": (lambda g: np.minimum(_sum_from_key(g), 0.0), True),
    "and later ones with decay^(i - j)": (_sum_from_key, True),
}


def list_handed_on(problem: Problem) -> Iterator[tuple[str, Added]]:
    """List what is added to a result if chunks read other states, or pass on others."""
    n, (d, d_v) = len(problem.first["q"]), problem.first["initial_state"].shape
    if problem.of not in ("out", "state") or n > _MOST_TOKENS:
        return
    decays = [problem.read(x)["log_decay"] for x in np.ndindex(problem.lead)]
    if is_delta(problem.read((0,) * len(problem.lead))):
        for text, update in _UPDATES.items():
            yield text, partial(_update_otherwise, problem, update)
    starts = {n}
    for size in (x for x in CHUNK_SIZES if x < n):
        for words, by in _READ_OF.items() if problem.of == "out" else ():
            text = f"a query reads the state {words.format(size)}"
            yield text, partial(_read_late, problem, size, by, lambda g: g)
        if problem.of == "out" and d == d_v:
            text = f"a query reads the transposed state before its chunk of {size}"
            yield text, partial(_read_late, problem, size, 0, lambda g: g, turned=True)
        reads = _READ_WITH if problem.of == "out" and np.any(decays) else {}
        for words, decay in reads.items():
            text = f"a query reads the state before its chunk of {size}, but its decay is {words}"
            yield text, partial(_read_late, problem, size, 0, decay)
        for words, way in _WITHIN_CHUNKS.items() if reads else ():
            text = f"a query reads tokens of its chunk of {size} {words}"
            yield text, partial(_read_chunk_within, problem, size, *way)
        by_column = decays[0].shape[-1] == 1 and size >= max(d, d_v)
        wrong = {**_PASSED, **(_BY_COLUMN if by_column else {})} if np.any(decays) else {}
        if n <= 2 * size:  # before the first chunk there is none
            wrong = {x: y for x, y in wrong.items() if "chunk before" not in x}
        for text, change in wrong.items():
            words = f"in the state that chunks of {size} pass on, {text}"
            yield words, partial(_pass_on, problem, size, change, 0)
        last = n // size * size
        for text, change in wrong.items() if problem.of == "state" and last not in starts else ():
            words = f"in the last chunk, tokens {last} to {n - 1} of chunks of {size}, {text}"
            yield words, partial(_pass_on, problem, size, change, last)
        starts.add(last)


# By the state, the key, the value, the query and the factor of a token: what it adds to the state.
_UPDATES: Mapping[str, Callable[..., Doubles]] = {
    "k and v are exchanged in the update: a token adds (k - S v) v^T, not k (v - S^T k)^T": (
        lambda s, k, v, q, c: c * np.outer(k - s @ v, v)
    ),
    "what a token removes is read by its query: v - S^T q, not v - S^T k": (
        lambda s, k, v, q, c: c * np.outer(k, v - q @ s)
    ),
    "a token writes to its query: q (v - S^T k)^T, not k (v - S^T k)^T": (
        lambda s, k, v, q, c: c * np.outer(q, v - k @ s)
    ),
    "what a token holds is added, not removed: v + S^T k": (
        lambda s, k, v, q, c: c * np.outer(k, v + k @ s)
    ),
    "what is removed is not multiplied by the factor of the token: beta v - S^T k": (
        lambda s, k, v, q, c: np.outer(k, c * v - k @ s)
    ),
}


def _update_otherwise(problem: Problem, update: Callable[..., Doubles], index: Index) -> Doubles:
    """Compute token by token with another update of the state, after its decay."""
    x = problem.read(index)
    state, rows = x["initial_state"], []
    with np.errstate(all="ignore"):
        for g, *token, c in zip(*(x[y] for y in ("log_decay", *"kvq", "write")), strict=True):
            state = np.exp(g)[:, None] * state
            state = state + update(state, *token, c)
            rows.append(problem.scale * token[-1] @ state)
    wrong = state if problem.of == "state" else np.stack(rows)
    return np.asarray(wrong - give(problem.read, index, problem.scale, problem.of))


def _read_late(
    problem: Problem,
    size: int,
    by: int,
    change: Callable[[Doubles], Doubles],
    index: Index,
    turned: bool = False,
) -> Doubles:
    """Let queries read the state of another chunk, or with other decays, or transposed."""
    x = problem.read(index)
    tokens = steps_of(x, problem.scale).cut(size, np)
    states, last = carry(solve_leaves(tokens, False, np), x["initial_state"], np)
    every = np.stack([states[0], *states, last, last])[1:]
    moved = np.clip(np.arange(len(states)) + by, 0, len(states))
    sums = np.cumsum(tokens.log_decay, -2)
    right, other = (tokens.q * np.exp(g) for g in (sums, change(sums)))
    read = np.swapaxes(every[moved], -1, -2) if turned else every[moved]
    return np.concatenate([*(other @ read - right @ every[:-2])])[: len(x["q"])]


def _read_chunk_within(
    problem: Problem, size: int, exponents: Callable[[Doubles], Any], later: bool, index: Index
) -> Doubles:
    """Let queries read what tokens of their chunk write with other decays; states are right."""
    x = problem.read(index)
    steps = steps_of(x, problem.scale)
    cut = steps.cut(size, np)
    written = [(cut.k, cut.v)]
    if steps.a is not None:
        removed = recur(steps._replace(q=steps.b), x["initial_state"], True, np)[0]
        written.append((cut.a, steps._replace(v=removed).cut(size, np).v))
    g, seen = np.cumsum(cut.log_decay, -2), np.tri(size, dtype=bool)[:, :, None]
    right, other = np.where(seen, _sum_from_key(g), -np.inf), exponents(g) + 0 * _sum_from_key(g)
    with np.errstate(over="ignore"):
        factors = np.exp(other if later else np.where(seen, other, -np.inf)) - np.exp(right)
    total: Any = 0.0
    for k, v in written:
        if factors.shape[-1] == 1:
            pairs = cut.q @ np.swapaxes(k, -1, -2) * factors[..., 0]
        else:
            pairs = np.einsum("nid,njd,nijd->nij", cut.q, k, factors, optimize=True)
        total = total + pairs @ v
    return np.concatenate([*total])[: len(x["q"])]


def _pass_on(problem: Problem, size: int, change: Pass, first: int, index: Index) -> Doubles:
    """Compute chunk by chunk; from a token on, states that are passed on have other decays."""
    x = problem.read(index)
    cut, state, rows = steps_of(x, problem.scale).cut(size, np), x["initial_state"], []
    for at in range(len(cut.q)):
        tokens = Tokens(*(None if y is None else y[at] for y in cut))
        out, right = recur(tokens, state, bool(x.get("before")), np)
        rows.append(out)
        if at * size < first:
            state = right
            continue
        state = _pass_state(tokens, state, change, cut.log_decay[at - 1] * (at > 0))
    wrong = state if problem.of == "state" else np.concatenate(rows)[: len(x["q"])]
    return np.asarray(wrong - give(problem.read, index, problem.scale, problem.of))


def _pass_state(tokens: Tokens, state: Doubles, change: Pass, before: Doubles) -> Doubles:
    """Pass a state on through a chunk with other decays, perhaps those of the chunk before."""
    g, h = (np.cumsum(x, 0) for x in (tokens.log_decay, before))
    kept, of_keys, of_rows = change(g, h, *state.shape)
    passed = kept * state + (of_keys * tokens.k).T @ (of_rows * tokens.v)
    if tokens.a is not None:
        removed = recur(tokens._replace(q=tokens.b), state, True, np)[0]
        passed = passed + (of_keys * tokens.a).T @ (of_rows * removed)
    return np.asarray(passed)


def list_passed(tokens: Tokens, state: Doubles) -> Iterator[tuple[str, Doubles]]:
    """List the states that a chunk of these tokens passes on with other decays."""
    for words, change in _PASSED.items():
        yield words, _pass_state(tokens, state, change, tokens.log_decay)
