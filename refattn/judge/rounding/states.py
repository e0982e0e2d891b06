"""The reference of recurrences: exact results, and the gradients that are recurrences, too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ...arrays.library import Doubles
from ...engine.recurrent import Tokens, recur

# Of a head: q, k, v, log_decay, write, initial_state, and a, b, late; back in time, also what the
# log decays of the tokens themselves are.
TokenArrays = Mapping[str, Any]
ReadHead = Callable[[Any], TokenArrays]


def steps_of(x: TokenArrays, scale: float) -> Tokens:
    """Take what the tokens of a head do; with `late` they remove from the state that decayed."""
    values, g, b = x["write"] * x["v"], x["log_decay"], x.get("b")
    b = np.exp(g) * b if x.get("late") else b  # b^T Diag(e^g) S: what the decayed state holds
    return Tokens(scale * x["q"], x["k"], values, g, x.get("a"), b)


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
    # The transpose of Diag(e^g) + a b^T swaps a and b. Nothing comes after the last token.
    later = {"log_decay": g} if a is None or b is None else {"log_decay": g, "a": b, "b": a}
    later = {name: np.concatenate([y[1:], 0 * y[:1]]) for name, y in later.items()}
    arrays = {"q": q, "k": k, "v": v, "write": np.ones_like(q[:, :1]), **later, "decays": g[::-1]}
    state = np.zeros((k.shape[-1], v.shape[-1]))
    return {**{name: y[::-1] for name, y in arrays.items()}, "initial_state": state, "back": True}


# Gradients that are recurrences themselves: that of values; and, with a decay of the whole state
# and without removal, those of queries and keys. As q^T S gives outputs, S d_out gives dq: it reads
# the transposed state, in which keys and values change places.
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
