"""Formulas of recurrences with the conventions that are declared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .... import naive
from ....arrays.library import Floats
from ....arrays.tokens import share_heads
from ....estimators.recurrent import recurrent_attention
from ..candidate.adapter import Adapter
from ..candidate.gates import LOGS, token_axes
from ..candidate.tags import DEFAULTS, OF_RECURRENCES


def declared_formula(adapter: Adapter, chunks: bool = False) -> Callable[..., Any]:
    """Return what a call gives, by the formula or in chunks: (out, state) if a state is passed."""
    plain = all(adapter[tag] == DEFAULTS[tag] for tag in (*OF_RECURRENCES,) if tag != "decay")

    def evaluate(q: Floats, k: Floats, v: Floats, **options: Any) -> Any:
        fn = adapter.record.fn if chunks else adapter.record.naive
        # The function of the record has no other conventions: the general recurrence has.
        if not plain:
            fn = recurrent_attention if chunks else naive.recurrent_attention
            q, k = share_heads(q, k, v)
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
    gates: dict[str, Any] = {name: options.pop(name) for name in adapter.record.gates}
    if "decay" in gates:
        log_decay = np.log(gates.pop("decay"))[..., None]
        gates["log_decay"] = np.broadcast_to(log_decay, k.shape[:-1])
    g = gates.get("log_decay", np.zeros(()))
    # A gate is one number for each coordinate of a key, or one for all of them.
    decays = np.exp(g if g.ndim == k.ndim else g[..., None])
    if "beta" in gates:
        gates["write"] = beta = gates.pop("beta")
        # Removed is a b^T of the state. Without beta in a, beta multiplies only what is written.
        taken = -k if adapter["beta"] == "written" else -beta[..., None] * k
        # The error of the decayed state is read by decayed keys.
        later = k if adapter["error"] == "before-decay" else decays * k
        gates["removal"] = taken, later
    k = decays * k if adapter["own_write"] == "decayed" else k
    return k, {**options, **gates, "read": adapter["read"]}


def sum_of_logs(adapter: Adapter, n: int, options: dict[str, Any]) -> float:
    """Return the largest sum of |g| over n tokens: exponents may be differences of such sums."""
    logs = [-n * np.log(options[x]) for x, word in adapter.record.gates.items() if word == "head"]
    for name, axis in token_axes(adapter.record).items():
        if adapter.record.gates[name] in LOGS:
            logs.append(np.sum(np.abs(options[name]), axis))
    return max((float(np.max(x)) for x in logs), default=0.0)
