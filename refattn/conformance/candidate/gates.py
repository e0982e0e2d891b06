"""What tokens do to a state beside keys and values: gates, by the words of `registry.record.GATES`.

A pair is two arrays here, such as `removal_a` and `removal_b`, until the function is called.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...registry import Estimator

_TOKEN_AXES = {"log": -1, "rate": -1, "factor": -1, "logs": -2, "pair": -2}  # of tokens
LOGS = ("log", "logs")


def gate_words(record: Estimator) -> dict[str, str]:
    """Return what each array is."""
    found: dict[str, str] = {}
    for name, word in record.gates.items():
        found |= dict.fromkeys(_names_of_pair(name), word) if word == "pair" else {name: word}
    return found


def token_axes(record: Estimator) -> dict[str, int]:
    """Return the axis of tokens of each array that has one."""
    return {
        name: _TOKEN_AXES[word] for name, word in gate_words(record).items() if word in _TOKEN_AXES
    }


def with_pairs(record: Estimator, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a call, with pairs."""
    pairs = [name for name, word in record.gates.items() if word == "pair"]
    pairs = [name for name in pairs if _names_of_pair(name)[0] in options]
    held = {half for name in pairs for half in _names_of_pair(name)}
    together = {name: tuple(options[half] for half in _names_of_pair(name)) for name in pairs}
    return {name: x for name, x in options.items() if name not in held} | together


def at_tokens(record: Estimator, options: Mapping[str, Any], tokens: Any) -> dict[str, Any]:
    """Return the options with the gates of some tokens only."""
    axes = token_axes(record).items()
    return {**options, **{name: np.take(options[name], tokens, axis) for name, axis in axes}}


def of_head(
    record: Estimator, options: Mapping[str, Any], index: tuple[int, ...]
) -> dict[str, Any]:
    """Return the gates of one head; a number is that of all heads."""
    words = gate_words(record).items()
    places = {name: index[-1:] if word == "head" else index for name, word in words}
    return {x: np.asarray(options[x][at if options[x].ndim else ()]) for x, at in places.items()}


def cotangent_of(found: Any, name: str) -> Any:
    """Return the cotangent of an array, which may be one of a pair."""
    pair, _, half = name.rpartition("_")
    return getattr(found, pair)["ab".index(half)] if half in ("a", "b") else getattr(found, name)


def draw_gates(adapter: Any, rng: np.random.Generator, k: Any) -> dict[str, Any]:
    """Draw gates of keys (..., n, d) for which states stay bounded, in numbers of the dtype."""
    lead = k.shape[:-2]
    found: dict[str, Any] = {}
    for name, word in adapter.record.gates.items():
        if word == "head":
            heads = lead[-1:] if "h" in (adapter["layout"] or "h") else ()
            found[name] = rng.uniform(0.5, 1.0, heads)
        elif word in LOGS:
            shape = k.shape if word == "logs" else k.shape[:-1]
            found[name] = np.where(rng.random(shape) < 1 / 8, 0.0, -rng.exponential(0.5, shape))
        elif word == "pair":  # a removal after the decay, of keys of length 1
            unit, decay = rng.standard_normal(k.shape), np.exp(found.get("log_decay", 0.0))
            unit /= np.linalg.norm(unit, axis=-1, keepdims=True)
            pair = (-rng.random(k.shape[:-1])[..., None] * unit, decay * unit)
            found |= zip(_names_of_pair(name), pair, strict=True)
        else:
            most = np.maximum(1.0, np.sum(k * k, -1)) if word == "rate" else 1.0
            found[name] = rng.random(k.shape[:-1]) / most
    return {name: adapter.exact(x) for name, x in found.items()}


def _names_of_pair(name: str) -> tuple[str, str]:
    return f"{name}_a", f"{name}_b"
