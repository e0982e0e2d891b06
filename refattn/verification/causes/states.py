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
from ..findings import Finding, Numbers, Suspect
from .output import as_suspect
from .sampled import Alternative

_CHUNK_SIZES = (64, 16, 32, 128)  # of chunks
_CLIPS = (4, 5, 8, 10, 15, 16, 20, 30, 32, 40, 50, 60, 64, 80, 88)  # of exponents
_WORST_HEADS = 4  # that are looked at, those with the largest errors
_MOST_HEADS, _MOST_TOKENS = 16, 1024  # of which every pair is tried, and of states by token
_FAR_LEFT = 0.25  # of the squared error, at most, for a cause to be judged by the law, or in part
_NEAR = 2.0**-20  # relative distance of exact numbers and those of a narrow type
_SQUARE = 4.0  # mean square of z, at most, where a cause holds


def _move(x: TokenArrays, by: int) -> dict[str, Any]:
    """Take the decays of other tokens."""
    g = x["log_decay"]
    none = 0 * g[:1]
    return {"log_decay": np.concatenate([g[1:], none] if by > 0 else [none, g[:-1]])}


def _scale_keys(x: TokenArrays, factor: Any) -> dict[str, Any]:
    """Multiply all that is written, also where it takes away."""
    return {name: factor * x[name] for name in ("k", "a") if name in x}


def _leave_out(x: TokenArrays, size: int) -> dict[str, Any]:
    """Leave out the tokens of the last chunk."""
    n = len(x["q"])
    kept = (np.arange(n) < (n - 1) // size * size)[:, None]
    names = ("q", "k", "v", "a", "b", "d_out", "log_decay")
    return {name: np.where(kept, x[name], 0.0) for name in names if name in x}


def _clip(x: TokenArrays, size: int, most: float) -> dict[str, Any]:
    """Divide keys by decays from the start of a chunk, of which none is below e^-most."""
    g = x["log_decay"]
    parts = [np.cumsum(g[i : i + size], 0) for i in range(0, len(g), size)]
    return _scale_keys(x, np.exp(np.minimum(np.concatenate(parts) + most, 0.0)))


def _hand_nothing_on(x: TokenArrays, size: int) -> dict[str, Any]:
    """Begin each chunk with nothing."""
    first = np.arange(len(x["q"]))[:, None] % size == 0
    removed = {"b": np.where(first, 0.0, x["b"])} if "b" in x else {}
    return {"log_decay": np.where(first, -math.inf, x["log_decay"])} | removed


def _decay(x: TokenArrays) -> Any:
    return np.exp(x["log_decay"])


_CAUSES: tuple[tuple[str, str, Callable[[TokenArrays], Mapping[str, Any]]], ...] = (
    # What there must be; what is wrong; and what that makes of the arrays.
    ("", "a query reads the state before the write of its token", lambda x: {"before": True}),
    *(
        ("", f"the last chunk of {c} is left out", partial(_leave_out, size=c))
        for c in _CHUNK_SIZES
    ),
    *(
        ("", f"no state is handed on between chunks of {c}", partial(_hand_nothing_on, size=c))
        for c in _CHUNK_SIZES
    ),
    ("state", "the initial state is ignored", lambda x: {"initial_state": 0 * x["initial_state"]}),
    (
        "square",
        "the initial state is transposed",
        lambda x: {"initial_state": x["initial_state"].T},
    ),
    ("decay", "the decay of a token is that of the next", partial(_move, by=1)),
    ("decay", "the decay of a token is that before it", partial(_move, by=-1)),
    (
        *("decay", "the decay of a token applies to its own write, too"),
        lambda x: _scale_keys(x, _decay(x)),
    ),
    (
        *("late", "the decay applies to the state after the write"),
        lambda x: _scale_keys(x, _decay(x)) | {"late": False},
    ),
    (
        *("decay", "the decay of a token applies to its own value, too"),
        lambda x: {"k": _decay(x) * x["k"]},
    ),
    ("decay", "nothing decays", lambda x: {"log_decay": 0 * x["log_decay"]}),
    (
        *("decay", "log decays are taken for those to base 2"),
        lambda x: {"log_decay": math.log(2) * x["log_decay"]},
    ),
    ("late", "the decay is applied after the error is taken", lambda x: {"late": False}),
    ("removal", "nothing is removed", lambda x: {"a": 0 * x["a"]}),
    ("removal", "what is removed has the other sign", lambda x: {"a": -x["a"]}),
    ("removal", "the pair of the removal is exchanged", lambda x: {"a": x["b"], "b": x["a"]}),
    (
        *("delta", "beta also multiplies the state that the error is taken of"),
        lambda x: {"a": x["write"] * x["a"]},
    ),
    ("delta", "beta is missing on what is removed", lambda x: {"a": -x["k"]}),
    ("delta", "beta is missing", lambda x: {"a": -x["k"], "write": 1 + 0 * x["write"]}),
    (
        *("delta", "beta is squared"),
        lambda x: {"a": x["write"] * x["a"], "write": np.square(x["write"])},
    ),
    ("write", "the factor on v is missing", lambda x: {"write": 1 + 0 * x["write"]}),
    ("write", "the factor on v is used twice", lambda x: {"write": np.square(x["write"])}),
    *(
        (
            *("decay", f"e^-(sum of log decays in a chunk of {c}) is clipped at e^{most}"),
            partial(_clip, size=c, most=most),
        )
        for c in (*_CHUNK_SIZES, 256)
        for most in _CLIPS
    ),
)


def list_states(problem: Problem) -> Iterator[Alternative]:
    """List recurrences that this one may be taken for, the plainest first."""
    x = problem.first
    d, d_v = x["k"].shape[-1], x["v"].shape[-1]
    decays, starts = np.any(x["log_decay"]), np.any(x["initial_state"])
    there = {"": True, "decay": decays, "late": decays and x.get("late"), "removal": "a" in x}
    there |= {"state": starts, "square": starts and d == d_v}
    there |= {"delta": is_delta(x), "write": np.any(x["write"] != 1)}
    for needed, text, change in _CAUSES:
        if there[needed]:
            yield Alternative(text, _change(problem, change))
    for words, scale in (("1", 1.0), (f"1 / sqrt({d})", d**-0.5), (f"1 / {d}", 1 / d)):
        if not math.isclose(scale, problem.scale):
            yield Alternative(f"the scale is {words}", problem._replace(scale=scale))


def _change(problem: Problem, change: Callable[[TokenArrays], Mapping[str, Any]]) -> Problem:
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


def find_coarse(problem: Problem, numbers: Numbers) -> Finding | None:
    """Test whether a last state holds numbers of a narrower type only, as no wide sums do.

    Each number that the exact state is not near to is one of them with probability 1/2 at most.
    """
    if problem.of != "state" or 0 in (*problem.lead, *problem.shape):
        return None
    heads, digits = [*np.ndindex(problem.lead)], FORMATS[numbers.out_dtype].digits
    got = np.stack([numbers.out(x) for x in heads])
    for form in ("bfloat16", "float16"):
        to = FORMATS[form]
        if to.digits < digits and np.all(to.holds(got)):
            exact = np.stack([give(problem.read, x, problem.scale, problem.of) for x in heads])
            count = len(np.unique(got[np.abs(to.round(exact) - exact) > _NEAR * np.abs(exact)]))
            words = f"all numbers are {form}, in an array of {numbers.out_dtype}"
            return Finding("digits of the state", 2.0**-count, 2.0**-count, count, words)
    return None


def explain_states(
    problem: Problem, numbers: Numbers, kernel: Roundings, square: float
) -> Iterator[Suspect]:
    """Name what explains nearly all of the errors of some heads, the nearest first."""
    if coarse := find_coarse(problem, numbers):
        yield as_suspect(f"agrees if the last state is rounded: {coarse.where}")
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
