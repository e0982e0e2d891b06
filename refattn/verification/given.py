r"""What a file or a call gives to verify."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from ..arrays import checks, qkv
from ..engine.scores import Band
from ..features import elu_features
from ..files.tensors import Tensors
from ..registry import ESTIMATORS
from ..rounding.problems import (
    CALLED,
    Problem,
    count_key_heads,
    hide_unseen,
    read_frequencies,
    refuse,
    scale_or_default,
)

__all__ = ["kind_of", "of_tensors"]


def of_tensors(
    tensors: Tensors,
    *,
    estimator: str = "softmax",
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    features: str = "positive",
    feature_map: Callable[[Any], Any] | None = None,
) -> Problem:
    """The problem of a file, of which no more than some heads are in memory."""
    shapes = tensors.shapes
    used = {"scores": ("bias", "mask", "sinks"), "frequencies": ("omega", "mask"), "map": ("mask",)}
    kind = kind_of(estimator)
    if kind == "frequencies" and "omega" not in shapes:
        raise ValueError(
            f"`omega` must be in FILE for rfa: frequencies (..., S, d); "
            f"{str(tensors.path)!r} has none."
        )
    if kind != "scores":
        for name in ("bias", "sinks"):
            refuse(name, shapes.get(name), kind)
        refuse("window", window, kind)
        refuse("softcap", softcap, kind)
        rows = (1, 1, *shapes.get("mask", ()))[-2]
        if rows != 1:
            raise ValueError(
                f"`mask` must be of keys, (..., 1, m), for {CALLED[kind]}, "
                f"got shape {shapes['mask']}."
            )
    names = [x for x in ("q", "k", "v", *used[kind]) if x in shapes]
    n, m = shapes["q"][-2], shapes["k"][-2]
    window = qkv.window(window)
    band = Band.of(m - n, causal, window)

    @lru_cache(maxsize=4)  # every block of queries reads its head
    def read(index: tuple[int, ...]) -> Mapping[str, Any]:
        found: dict[str, Any] = {name: tensors.read(name, index) for name in names}
        if "omega" in found:
            found |= read_frequencies(found["omega"], None, features, found["q"])
        for name in {"bias", "mask"} & {*found}:
            found[name] = np.broadcast_to(found[name], (n, m))
        return hide_unseen(found, band)

    return Problem(
        tensors.lead,
        (n, m, shapes["v"][-1]),
        read,
        scale_or_default(shapes["q"][-1], scale),
        causal,
        window,
        checks.real("softcap", softcap, positive=True, optional=True),
        (feature_map or elu_features) if kind == "map" else None,
        kind,
        has_sinks="sinks" in names,
        key_heads=count_key_heads(shapes["k"], shapes["v"], tensors.lead),
    )


def kind_of(estimator: Any) -> str:
    """What the weights of an estimator are made of: scores, frequencies or a map of features."""
    record = ESTIMATORS.get(estimator) if isinstance(estimator, str) else None
    if record is not None and record.arrays == ("q", "k", "v"):
        for trait, kind in _KINDS.items():
            if record.has(trait):
                return kind
    known = ", ".join(CALLED.values())
    raise ValueError(f"`estimator` must be of {known}, got {estimator!r}.")


def judged() -> list[str]:
    """Names and other names of the estimators whose numbers can be judged."""
    return [
        name
        for name, record in ESTIMATORS.items()
        if record.arrays == ("q", "k", "v") and any(record.has(x) for x in _KINDS)
    ]


_KINDS = {"exact": "scores", "random-features": "frequencies", "feature-map": "map"}
