"""Formulas of recurrences with the conventions that are declared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ... import naive
from ...arrays.library import Floats
from ...estimators.recurrent import recurrent_attention
from ..candidate.adapter import Adapter
from ..candidate.gates import LOGS, token_axes
from ..candidate.tags import DEFAULTS, OF_RECURRENCES


def declared_formula(adapter: Adapter, chunks: bool = False) -> Callable[..., Any]:
    """Return what a call gives, by the formula or in chunks: (out, state) if a state is passed."""
    plain = all(adapter[tag] == DEFAULTS[tag] for tag in (*OF_RECURRENCES,) if tag != "decay")

    def evaluate(q: Floats, k: Floats, v: Floats, **options: Any) -> Any:
        fn = adapter.record.fn if chunks else adapter.record.naive
        if not plain:
            fn = recurrent_attention if chunks else naive.recurrent_attention
            k, options = _arguments(adapter, k, options)
        result = fn(q, k, v, **options)
        return tuple(result) if "initial_state" in options else result.out

    return evaluate


def _arguments(
    adapter: Adapter, k: Floats, options: dict[str, Any]
) -> tuple[Floats, dict[str, Any]]:
    """Return the keys, and what else the recurrence takes, for conventions that are declared."""
    if adapter["keys"] != "given":
        added = float(adapter["keys"].partition("+ ")[2] or 0.0)
        k = k / np.sqrt(np.sum(k * k, -1, keepdims=True) + added)
    gates = {name: options.pop(name) for name in adapter.record.gates}
    g, write, removal = (gates.get(name) for name in ("log_decay", "write", "removal"))
    if "decay" in gates:
        g = np.broadcast_to(np.log(gates["decay"])[..., None], k.shape[:-1])
    decays: Any = 1.0 if g is None else np.exp(g if g.ndim == k.ndim else g[..., None])
    if "beta" in gates:
        write = gates["beta"]
        taken = -k if adapter["beta"] == "written" else -write[..., None] * k
        removal = taken, k if adapter["error"] == "before-decay" else decays * k
    written = decays * k if adapter["own_write"] == "decayed" else k
    more = {"log_decay": g, "write": write, "removal": removal, "read": adapter["read"]}
    return written, options | more


def sum_of_logs(adapter: Adapter, n: int, options: dict[str, Any]) -> float:
    """Return the largest sum of |g| over n tokens: exponents may be differences of such sums."""
    words = adapter.record.gates
    logs = [
        np.sum(np.abs(options[x]), axis)
        for x, axis in token_axes(adapter.record).items()
        if words[x] in LOGS
    ]
    logs += [-n * np.log(options[x]) for x, word in words.items() if word == "head"]
    return max((float(np.max(x)) for x in logs), default=0.0)
