"""Gates of recurrences (decays, rates, removals): their axes, their heads, and how they are drawn.

Their kinds are the words of `registry.record.GATES`. A pair is one array here, (..., n, 2 d), until
a function is called.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ....registry import Estimator

_TOKEN_AXES = {"log": -1, "rate": -1, "factor": -1, "logs": -2, "pair": -2}  # of tokens
LOGS = ("log", "logs")


def token_axes(record: Estimator) -> dict[str, int]:
    """Return the axis of tokens of each gate that has one."""
    return {x: _TOKEN_AXES[word] for x, word in record.gates.items() if word in _TOKEN_AXES}


def halves(x: Any) -> tuple[Any, Any]:
    """Split a pair."""
    d = x.shape[-1] // 2
    return x[..., :d], x[..., d:]


def with_pairs(record: Estimator, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a call, with pairs as they are passed."""
    return {x: halves(y) if record.gates.get(x) == "pair" else y for x, y in options.items()}


def at_tokens(record: Estimator, options: Mapping[str, Any], tokens: Any) -> dict[str, Any]:
    """Return the options with the gates of some tokens only."""
    axes = token_axes(record).items()
    return {**options, **{name: np.take(options[name], tokens, axis) for name, axis in axes}}


def of_head(
    record: Estimator, options: Mapping[str, Any], index: tuple[int, ...]
) -> dict[str, Any]:
    """Return the gates of one head; a number is that of all heads."""
    places = {name: index[-1:] if word == "head" else index for name, word in record.gates.items()}
    return {x: np.asarray(options[x][at if options[x].ndim else ()]) for x, at in places.items()}


def draw_gates(adapter: Any, rng: np.random.Generator, k: Any) -> dict[str, Any]:
    """Draw gates of keys (..., n, d) for which states stay bounded, in numbers of the dtype."""
    lead, found = k.shape[:-2], dict[str, Any]()
    for name, word in adapter.record.gates.items():
        if word == "head":
            heads = lead[-1:] if "h" in (adapter["layout"] or "h") else ()
            found[name] = rng.uniform(0.5, 1.0, heads)
        elif word in LOGS:
            shape = k.shape if word == "logs" else k.shape[:-1]
            # Some tokens do not decay at all.
            found[name] = np.where(rng.random(shape) < 1 / 8, 0.0, -rng.exponential(0.5, shape))
        elif word == "pair":  # a removal after the decay, of keys of length 1
            unit, decay = rng.standard_normal(k.shape), np.exp(found.get("log_decay", 0.0))
            unit /= np.linalg.norm(unit, axis=-1, keepdims=True)
            rate = rng.random(k.shape[:-1])[..., None]
            found[name] = np.concatenate([-rate * unit, decay * unit], -1)
        else:
            # A rate above 2 / |k|^2 makes states grow with every token.
            most = np.maximum(1.0, np.sum(k * k, -1)) if word == "rate" else 1.0
            found[name] = rng.random(k.shape[:-1]) / most
    return {name: adapter.exact(x) for name, x in found.items()}
