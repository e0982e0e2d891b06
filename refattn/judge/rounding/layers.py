"""Pose the problems of recurrent layers: read their gates, and write them in general terms."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from ...arrays import tokens
from ...arrays.heads import grouped_lead
from ...arrays.library import Doubles
from .formats import widen
from .problems import Index, Problem, take_head
from .states import PULLED


def pose_recurrence(
    q: Any,
    k: Any,
    v: Any,
    gates: Mapping[str, Any],
    *,
    record: str,
    scale: float | None = None,
    d_out: Any = None,
) -> dict[str, Problem]:
    """Pose the problems of a recurrence by what is judged: output, last state and gradients."""
    numbers, scale = read_tokens(q, k, v, gates, scale, d_out)
    g, state, (n, d_v) = numbers["log_decay"], numbers["initial_state"], numbers["v"].shape[-2:]
    arrays, d = [numbers[name] for name in "qkv"], state.shape[-2]

    def pose(lead: tuple[int, ...], numbers: Mapping[str, Any]) -> Problem:
        @lru_cache(maxsize=4)
        def read(index: Index) -> Mapping[str, Any]:
            return {x: take_head(y, index, lead) for x, y in numbers.items()}

        rest = (scale, True, (None, None), None)
        return Problem(lead, (n, n, d_v), read, *rest, kind="recurrent", record=record)

    problem = pose(grouped_lead(*arrays), numbers)
    # Nothing reads the last state, and it has the heads of the keys: keys stand in for queries.
    of_state = pose(state.shape[:-2], numbers | {"q": arrays[1]})
    found = {"out": problem, "state": of_state._replace(of="state", shape=(d, n, d_v))}
    # What `PULLED` has as recurrences. A gradient of an array that heads share would be a sum.
    simple = "a" not in numbers and g.shape[-1] == 1
    for name, x in zip(PULLED, (q, k, v), strict=True) if d_out is not None else ():
        if (simple or name == "dv") and x.shape[:-2] == problem.lead:
            found[name] = problem._replace(of=name, shape=(n, n, d_v if name == "dv" else d))
    return found


def read_tokens(
    q: Any, k: Any, v: Any, gates: Mapping[str, Any], scale: Any, d_out: Any
) -> tuple[dict[str, Any], float]:
    """Read arrays and the gates of a layer by their names, as `recurrent_attention` has them.

    Those of a delta rule are late: they remove from the state that decayed.
    """
    q, k, v = (widen(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    given = {name: _widen(name, x) for name, x in gates.items() if x is not None}
    cotangents = {} if d_out is None else {"d_out": widen("d_out", d_out)}
    for name, x in ({"q": q, "k": k, "v": v} | given | cotangents).items():
        for y in x if isinstance(x, tuple) else (x,):
            # A log decay of -inf forgets the state.
            if not np.all(np.isfinite(y) | (name == "log_decay") & np.isneginf(y)):
                raise ValueError(f"`{name}` must be finite, got NaN or inf.")
    options = tokens.RecurrenceOptions(**_general(q, k, v, given), scale=scale)
    q, k, (g, a, b, write, state), scale, _ = tokens.check(q, k, v, options)
    numbers = {"q": q, "k": k, "v": v, "log_decay": g, "initial_state": state}
    numbers["write"] = np.ones((*k.shape[:-1], 1)) if write is None else write
    numbers |= {} if a is None else {"a": a, "b": b, "late": np.array(["beta" in given])}
    return numbers | cotangents, float(scale)


def _widen(name: str, x: Any) -> Any:
    if isinstance(x, tuple | list):
        return tuple(widen(name, y) for y in x)
    return np.float64(x) if isinstance(x, float | int) else widen(name, x)


def _general(q: Doubles, k: Doubles, v: Doubles, gates: Mapping[str, Any]) -> dict[str, Any]:
    """Write the gates of a layer as those of `recurrent_attention`."""
    # All layers are S_t = (Diag(e^g_t) + a_t b_t^T) S_(t-1) + w_t k_t v_t^T: their gates become g,
    # (a, b) and w.
    rest = {name: x for name, x in gates.items() if name not in ("beta", "decay")}
    if "decay" in gates:
        with np.errstate(divide="ignore"):  # of a decay of 0
            rest["log_decay"] = tokens.log_decay_of_heads(q, k, v, gates["decay"])
    if "beta" in gates:
        rest = tokens.delta_gates(q, k, v, gates["beta"]) | rest
    return rest
