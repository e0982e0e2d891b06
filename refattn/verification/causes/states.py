"""What goes wrong with a state that goes through the tokens: each a change of its arguments."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ...arrays.library import Doubles
from ...rounding.formats import FORMATS
from ...rounding.problems import Index, Problem
from ...rounding.roundings import Roundings
from ...rounding.states import TokenArrays, give, is_delta
from ..findings import Numbers, Suspect
from .output import as_suspect
from .sampled import Alternative

_CHUNK_SIZES = (64, 16, 32, 128)  # of chunks
_CLIPS = (4, 5, 8, 10, 15, 16, 20, 30, 32, 40, 50, 60, 64, 80, 88)  # of exponents
_WORST_HEADS = 4  # that are looked at, those with the largest errors
_MOST_HEADS, _MOST_TOKENS = 16, 1024  # of which every pair is tried, and of states by token
_FAR_LEFT = 0.25  # of the squared error, at most, for a cause to be judged by the law, or in part
_SQUARE = 4.0  # mean square of z, at most, where a cause holds


def _later(x: Doubles) -> Doubles:
    return np.concatenate([x[1:], 0 * x[:1]])


def _earlier(x: Doubles) -> Doubles:
    return np.concatenate([0 * x[:1], x[:-1]])


def _scale_keys(x: TokenArrays, factor: Any) -> dict[str, Any]:
    """Multiply all that is written, also where it takes away."""
    return {"k": factor * x["k"], **({"a": factor * x["a"]} if "a" in x else {})}


def _without(x: TokenArrays, size: int) -> dict[str, Any]:
    """Leave out the tokens of the last chunk."""
    n = len(x["q"])
    kept = (np.arange(n) < (n - 1) // size * size)[:, None]
    names = ("q", "k", "v", "d_out", *(("a", "b") if "a" in x else ()))
    cut = {name: np.where(kept, x[name], 0.0) for name in names if name in x}
    return cut | {"log_decay": np.where(kept, x["log_decay"], 0.0)}


def _clipped(x: TokenArrays, size: int, most: float) -> dict[str, Any]:
    """Divide keys by decays from the start of a chunk, of which none is below e^-most."""
    g = x["log_decay"]
    parts = [np.cumsum(g[i : i + size], 0) for i in range(0, len(g), size)]
    return _scale_keys(x, np.exp(np.minimum(np.concatenate(parts) + most, 0.0)))


def _apart(x: TokenArrays, size: int) -> dict[str, Any]:
    """Begin each chunk with nothing."""
    first = np.arange(len(x["q"]))[:, None] % size == 0
    return {"log_decay": np.where(first, -math.inf, x["log_decay"])} | (
        {"b": np.where(first, 0.0, x["b"])} if "b" in x else {}
    )


_DECAYS: Mapping[str, Callable[[TokenArrays], TokenArrays]] = {
    "the decay of a token is that of the next": lambda x: {"log_decay": _later(x["log_decay"])},
    "the decay of a token is that before it": lambda x: {"log_decay": _earlier(x["log_decay"])},
    "the decay of a token applies to its own write, too": (
        lambda x: _scale_keys(x, np.exp(x["log_decay"]))
    ),
    "the decay applies to the state after the write": (
        lambda x: _scale_keys(x, np.exp(x["log_decay"])) | {"late": False}
    ),
    "the decay of a token applies to its own value, too": (
        lambda x: {"k": np.exp(x["log_decay"]) * x["k"]}
    ),
    "nothing decays": lambda x: {"log_decay": 0 * x["log_decay"]},
    "log decays are taken for those to base 2": (
        lambda x: {"log_decay": math.log(2) * x["log_decay"]}
    ),
    "log decays are multiplied by log2(e) once more": (
        lambda x: {"log_decay": x["log_decay"] / math.log(2)}
    ),
}
_LATE: Mapping[str, Callable[[TokenArrays], TokenArrays]] = {
    "the decay is applied after the error is taken": lambda x: {"late": False},
}
_BETAS: Mapping[str, Callable[[TokenArrays], TokenArrays]] = {  # of delta rules
    "beta also multiplies the state that the error is taken of": (
        lambda x: {"a": x["write"] * x["a"]}
    ),
    "beta is missing on what is removed": lambda x: {"a": -x["k"]},
    "beta is missing on v": lambda x: {"write": 1 + 0 * x["write"]},
    "beta multiplies v twice": lambda x: {"write": np.square(x["write"])},
    "beta is squared": lambda x: {"a": x["write"] * x["a"], "write": np.square(x["write"])},
    "beta is missing": lambda x: {"a": -x["k"], "write": 1 + 0 * x["write"]},
}
_REMOVAL: Mapping[str, Callable[[TokenArrays], TokenArrays]] = {
    "nothing is removed": lambda x: {"a": 0 * x["a"]},
    "what is removed has the other sign": lambda x: {"a": -x["a"]},
    "the pair of the removal is exchanged": lambda x: {"a": x["b"], "b": x["a"]},
}
_WRITE: Mapping[str, Callable[[TokenArrays], TokenArrays]] = {
    "the factor on what is written is missing": lambda x: {"write": 1 + 0 * x["write"]},
    "the factor on what is written is squared": lambda x: {"write": np.square(x["write"])},
}
_ALWAYS: Mapping[str, Callable[[TokenArrays], TokenArrays]] = {
    "a query reads the state before the write of its token": lambda x: {"before": True},
    **{f"the last chunk of {c} is left out": partial(_without, size=c) for c in _CHUNK_SIZES},
    **{
        f"the state is not handed on between chunks of {c}": partial(_apart, size=c)
        for c in _CHUNK_SIZES
    },
}
_STATE: Mapping[str, Callable[[TokenArrays], TokenArrays]] = {
    "the initial state is ignored": lambda x: {"initial_state": 0 * x["initial_state"]},
    "the initial state is transposed": lambda x: {"initial_state": x["initial_state"].T},
}
_CLIPPED: Mapping[str, Callable[[TokenArrays], TokenArrays]] = {
    f"e^-(sum of log decays in a chunk of {c}) is clipped at e^{most}": partial(
        _clipped, size=c, most=most
    )
    for c in (*_CHUNK_SIZES, 256)
    for most in _CLIPS
}


def list_states(problem: Problem) -> Iterator[Alternative]:
    """List recurrences that this one may be taken for, the plainest first."""
    x = problem.first
    d, d_v = x["k"].shape[-1], x["v"].shape[-1]
    tables = [_ALWAYS]
    if np.any(x["initial_state"]):
        tables.append({y: z for y, z in _STATE.items() if d == d_v or "ignored" in y})
    tables += [_DECAYS] if np.any(x["log_decay"]) else []
    tables += [_LATE] if x.get("late") and np.any(x["log_decay"]) else []
    if "a" in x:
        tables += [_REMOVAL, *([_BETAS] if is_delta(x) else [])]
    elif np.any(x["write"] != 1):
        tables.append(_WRITE)
    tables += [_CLIPPED] if np.min(x["log_decay"]) < 0 else []
    for table in tables:
        for text, change in table.items():
            yield Alternative(text, _change(problem, change))
    for words, scale in (("1", 1.0), (f"1 / sqrt({d})", d**-0.5), (f"1 / {d}", 1 / d)):
        if not math.isclose(scale, problem.scale):
            yield Alternative(f"the scale is {words}", problem._replace(scale=scale))


def _change(problem: Problem, change: Callable[[TokenArrays], TokenArrays]) -> Problem:
    read = problem.read
    return problem._replace(read=lambda index: {**read(index), **change(read(index))})


def _list_exchanged(problem: Problem, got: Mapping[Index, Doubles]) -> Iterator[Alternative]:
    """List decays, and factors, that are those of other heads: of each head the nearest."""
    heads = problem.lead[-1] if problem.lead else 1
    if not 1 < heads <= _MOST_HEADS:
        return
    for names, words in ((["log_decay"], "decays"), (["write", "a"], "factors")):
        if not all(x in problem.first for x in names):
            continue
        nearest = {x: _find_head(problem, names, x, out) for x, out in got.items()}
        if any(x != y for x, y in nearest.items()):
            order = ", ".join(
                f"{y[-1]} in head {x[-1]}" for x, y in sorted(nearest.items()) if x != y
            )
            other = problem.with_arrays_of(names, nearest.__getitem__)
            yield Alternative(f"{words} are those of other heads: of {order}", other)


def _find_head(problem: Problem, names: Sequence[str], index: Index, got: Doubles) -> Index:
    """Find the head whose arrays bring the result of a head nearest to what was given."""
    others = [(*index[:-1], h) for h in range(problem.lead[-1])]
    return min(
        others, key=lambda at: _distance(problem.with_arrays_of(names, lambda _: at), index, got)
    )


def _distance(problem: Problem, index: Index, got: Doubles) -> float:
    with np.errstate(all="ignore"):
        off = got - give(problem.read, index, problem.scale, problem.of)
    return float(np.sum(off * off)) if np.all(np.isfinite(off)) else math.inf


def explain_states(
    problem: Problem, numbers: Numbers, kernel: Roundings, square: float
) -> Iterator[Suspect]:
    """Name what explains nearly all of the errors of some heads, the nearest first."""
    every = {x: numbers.out(x) for x in np.ndindex(problem.lead)}
    given = {x: _distance(problem, x, out) for x, out in every.items()}
    worst = sorted(every, key=lambda x: -given[x])[:_WORST_HEADS]
    got = {x: every[x] for x in worst}
    most, found, near = _FAR_LEFT * sum(given[x] for x in worst), [], []
    for one in (*list_states(problem), *_list_exchanged(problem, got)):
        off = 0.0
        for x in (y for y in worst if off < most):
            off += _distance(one.problem, x, got[x])
        if not off < most:
            continue
        near.append((off, one.text))
        left = _mean_square(one.problem, got, kernel)
        if left < min(_SQUARE, square / 4):
            found.append((left, one.text))
    coarse = [
        (_mean_square(problem, got, kernel._replace(states=FORMATS[form], run=size)), form, size)
        for form in ("bfloat16", "float16")
        for size in (64, 16, 1)
        if size > 1 or problem.shape[1] <= _MOST_TOKENS
    ]
    left, form, size = min(coarse, key=lambda x: abs(math.log(max(x[0], 1e-300))))
    if 1 / _SQUARE < left < min(_SQUARE, square / 2):
        where = f"chunks of about {size} tokens" if size > 1 else "tokens"
        found.append((left, f"the state is kept in {form} between {where}"))
    least = min(found, default=(0.0, ""))[0]
    for left, text in found:
        if left <= 1.5 * max(least, 1.0):
            yield as_suspect(f"agrees if {text}")
    if near and not found:
        off, text = min(near)
        share = 1 - _FAR_LEFT * off / most
        yield as_suspect(f"agrees in part if {text}", share, "convention in part")


def _mean_square(problem: Problem, got: Mapping[Index, Doubles], kernel: Roundings) -> float:
    squares = []
    for index, out in got.items():
        rows = problem.recurrence(index, kernel).rows
        squares.append(np.mean(np.square(rows.errors(out) / rows.std)))
    return float(np.mean(squares)) if np.all(np.isfinite(squares)) else math.inf
