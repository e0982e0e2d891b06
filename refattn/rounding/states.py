"""Recurrences as what their tokens do: layers in general terms, exact results, and gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..arrays import qkv, tokens
from ..arrays.library import Doubles
from ..engine.recurrent import Steps, recur
from .formats import widen

TokenArrays = Mapping[
    str, Any
]  # of a head: q, k, v, log_decay, write, initial_state, and a, b, late
ReadHead = Callable[[Any], TokenArrays]


def read_tokens(
    q: Any, k: Any, v: Any, gates: Mapping[str, Any], scale: Any, d_out: Any
) -> tuple[dict[str, Any], float]:
    """Read arrays and the gates of a layer by their names, as `recurrent_attention` has them.

    Those of a delta rule are late: they remove from the state that decayed.
    """
    q, k, v = (widen(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    given = {name: _widen(name, x) for name, x in gates.items() if x is not None}
    options = _general(q, k, v, given) | {"scale": scale}
    k, (g, a, b, write, state), scale, _ = tokens.check(q, k, v, options)
    numbers = {"q": q, "k": k, "v": v, "log_decay": g, "initial_state": state}
    numbers["write"] = np.ones((*k.shape[:-1], 1)) if write is None else write
    numbers |= {} if a is None else {"a": a, "b": b, "late": np.array(["beta" in given])}
    numbers |= {} if d_out is None else {"d_out": widen("d_out", d_out)}
    for name, x in numbers.items():
        if not np.all(np.isfinite(x) | (name == "log_decay") & np.isneginf(x)):
            raise ValueError(f"`{name}` must be finite, got NaN or inf.")
    return numbers, float(scale)


def _widen(name: str, x: Any) -> Any:
    if isinstance(x, tuple | list):
        return tuple(widen(name, y) for y in x)
    return np.float64(x) if isinstance(x, float | int) else widen(name, x)


def _general(q: Doubles, k: Doubles, v: Doubles, gates: Mapping[str, Any]) -> dict[str, Any]:
    """Write the gates of a layer as those of `recurrent_attention`."""
    rest = {name: x for name, x in gates.items() if name not in ("beta", "decay")}
    if "decay" in gates:
        with np.errstate(divide="ignore"):
            logs = np.log(qkv.per_head("decay", gates["decay"], k))
        rest["log_decay"] = logs.reshape((1,) * (q.ndim - logs.ndim - 2) + (*logs.shape, 1))
    if "beta" in gates:
        rate = tokens.of_tokens("beta", gates["beta"], (q, k, v))
        rest |= {"removal": (-rate * k, k), "write": gates["beta"]}
    return rest


def steps_of(x: TokenArrays, scale: float) -> Steps:
    """Take what the tokens of a head do; with `late` they remove from the state that decayed."""
    values, g, b = x["write"] * x["v"], x["log_decay"], x.get("b")
    b = np.exp(g) * b if x.get("late") else b
    return Steps(scale * x["q"], x["k"], values, g, x.get("a"), b)


def give(read: ReadHead, index: Any, scale: float, of: str) -> Doubles:
    """Compute the exact result of a head."""
    x = PULLED.get(of, dict)(read(index))
    found = recur(steps_of(x, scale), x["initial_state"], bool(x.get("before")), np)[of == "state"]
    return found[::-1] if "back" in x else np.asarray(found)


def is_delta(x: TokenArrays) -> bool:
    """Tell whether tokens take away along their keys what they write there."""
    return "a" in x and np.array_equal(x["a"], -x["write"] * x["k"])


def _backward(x: TokenArrays, q: Doubles, k: Doubles, v: Doubles) -> dict[str, Any]:
    """Go back in time: a token has the decay of the next, and what that takes away, transposed."""
    *_, g, a, b = steps_of(x, 1.0)
    later = {"log_decay": g} if a is None or b is None else {"log_decay": g, "a": b, "b": a}
    later = {name: np.concatenate([y[1:], 0 * y[:1]]) for name, y in later.items()}
    arrays = {"q": q, "k": k, "v": v, "write": np.ones_like(q[:, :1]), **later}
    state = np.zeros((k.shape[-1], v.shape[-1]))
    return {**{name: y[::-1] for name, y in arrays.items()}, "initial_state": state, "back": True}


# Gradients that are recurrences themselves: that of values; and, with a decay of the whole state
# and without removal, those of queries and keys.
PULLED: Mapping[str, Callable[[TokenArrays], TokenArrays]] = {
    "dq": lambda x: {
        **x,
        "q": x["d_out"],
        "k": x["v"],
        "v": x["k"],
        "initial_state": x["initial_state"].T,
    },
    "dk": lambda x: _backward(x, x["write"] * x["v"], x["d_out"], x["q"]),
    "dv": lambda x: _backward(x, x["write"] * x["k"], x["q"], x["d_out"]),
}
