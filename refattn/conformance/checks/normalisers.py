"""Checks of log normalisers, by which results over parts of the keys are merged."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...engine.kernel import Attended, merge
from ..candidate.adapter import Adapter
from ..candidate.failures import Failure
from ..truth.reference import tolerance
from .combined import compare_normalisers
from .gradients import compare_gradients
from .trials import CheckRun, add_check, attends


def _normalised(adapter: Adapter) -> bool:
    return attends(adapter) and adapter.can("lse")


@add_check("exact", claim="lse is the log of the sum of e^score", needs=_normalised)
def log_normalisers(t: CheckRun) -> None:
    """Without and with leading axes, of what is seen only, and at large scores."""
    uses: list[dict[str, Any]] = [{}]
    n, m, d = t.fit(5, 8, 4)
    if t.adapter.can("mask"):
        near = np.arange(m) - np.arange(n)[:, None]
        uses.append({"mask": (near % 3 > 0) | (near == 0)})
    if t.adapter.can("causal"):
        uses.append({"causal": True})
    options = {"window": (2, 1), "softcap": 1.0, "bias": t.normal(n, m)}
    uses += [{name: x} for name, x in options.items() if t.adapter.can(name)]
    for use in uses:
        for lead in ((), t.adapter.lead(2, 3)):
            compare_normalisers(t, t.problem(n, m, d, lead=lead)[0], **use)
    for size in (4.0, 10.0) if t.adapter.half else (4.0, 40.0):
        compare_normalisers(t, t.problem(n, m, d, size=size)[0])
    if t.adapter.grouped:
        compare_normalisers(t, t.problem(n, m, d, lead=t.adapter.lead(2, 4), groups=2)[0])
    for n, m in ((1, 9), (1, 300), (65, 300)):
        for lead in ((), t.adapter.lead(2, 3)):
            compare_normalisers(t, t.problem(*t.fit(n, m, 8), lead=lead)[0])


@add_check(
    "exact",
    claim="lse of a query that sees no key is -inf",
    needs=lambda adapter: (
        _normalised(adapter)
        and any(adapter.can(name) for name in ("mask", "causal", "window"))
        and adapter["empty_rows"] == "zero"
    ),
)
def normaliser_without_keys(t: CheckRun) -> None:
    """So that what it is merged with stays as it is: masked, and before all keys."""
    ways: dict[str, Any] = {"mask": True, "causal": True, "window": (1, 0)}
    for name, way in ways.items():
        n, m, d = t.fit(4, 6, 4) if name == "mask" else t.fit(6, 3, 4)
        if not t.adapter.can(name) or (name != "mask" and n <= m):
            continue
        way = np.arange(n)[:, None] != np.ones(m) if name == "mask" else way
        arrays, _ = t.problem(n, m, d, lead=t.adapter.lead(2, 3))
        hiding = t.adapter.settled | {name: way}
        _, lse = t.call(*arrays, return_lse=True, **hiding)
        empty = np.broadcast_to(~np.any(t.adapter.visible(n, m, hiding), -1), lse.shape)
        if np.any(lse[empty] != -math.inf):
            raise Failure("an lse of -inf", f"{lse[empty][0]}")
    t.error = 0.0


def _parted(adapter: Adapter) -> bool:
    alone = not (adapter["causal_only"] or adapter["self_attention"])
    return _normalised(adapter) and alone


@add_check("exact", claim="results over parts of the keys merge", needs=_parted)
def merged_parts(t: CheckRun) -> None:
    """Two parts and three, of sizes that differ, with scores far apart."""
    unit = t.adapter["multiple_of"] * (1 if t.adapter["multiple_of"] > 2 else 3)
    for n, size in ((5, 1.0), (5, 4.0), (1, 1.0)):
        n, m, d = t.fit(n, 4 * unit, 4)
        (q, k, v), _ = t.problem(n, m, d, size=size)
        whole = t.call(q, k, v, return_lse=True)
        for cuts in ((unit,), (unit, 2 * unit)):
            parts = [
                Attended(*t.call(q, *part, return_lse=True))
                for part in zip(np.split(k, cuts, -2), np.split(v, cuts, -2), strict=True)
            ]
            merged = parts[0]
            for part in parts[1:]:
                merged = merge(merged, part)
            allowed = (1 + len(parts)) * tolerance(t.adapter, (q, k, v), {}, whole[0])
            t.equal(merged.out, whole[0], allowed)


@add_check(
    "exact",
    claim="gradients of lse are the weights",
    needs=lambda adapter: _normalised(adapter) and adapter.can("vjp", "d_lse"),
)
def gradients_of_normalisers(t: CheckRun) -> None:
    """Of a cotangent of lse beside that of the output."""
    for lead in ((), t.adapter.lead(2, 3)):
        for n, m in ((4, 6), (1, 6), (70, 70)):
            arrays, _ = t.problem(*t.fit(n, m, 4), lead=lead)
            compare_gradients(t, arrays, d_lse=t.normal(*arrays[0].shape[:-1]), return_lse=True)
