"""Checks of what exact attention takes besides masks: windows, soft caps, sinks, biases."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..candidate.adapter import Adapter
from ..truth.reference import tolerance
from .combined import covering, in_time
from .trials import CheckRun, add_check, evaluates_with


def _key_heads(adapter: Adapter) -> tuple[int | None, ...]:
    """Return numbers of key heads: as many as query heads, or fewer."""
    return (None, 2) if adapter.grouped else (None,)


def _compare_sizes(t: CheckRun, sizes: tuple[int, int, int], **options: Any) -> None:
    """Compare one call with the reference."""
    arrays, _ = t.problem(*t.fit(*sizes))
    t.compare(*arrays, strict=True, **t.adapter.settled | options)


@add_check("exact", claim="a window holds the keys that it says", needs=evaluates_with("window"))
def windows(t: CheckRun) -> None:
    """One query's own key, one side, both, more than all keys; past blocks; with causal."""
    sizes = [(6, 6, 4), (5, 9, 4), (1, 6, 4), (70, 70, 4), (130, 300, 4)]
    if t.adapter["empty_rows"] != "undefined":
        sizes.insert(3, (9, 5, 4))  # whose first queries see no key
    sides = ((2, 0), (0, 0), (0, 1), (1, 2), (63, 64), (64, 0), (None, 1), (3, None))
    causal = [{}, {"causal": True}] if t.adapter.can("causal") else [{}]
    cases = covering({"size": (*sizes,), "window": sides, "way": (*causal,)}, t.rng, 2)
    for case in in_time(t, cases, "windows"):
        _compare_sizes(t, case["size"], **case["way"], window=case["window"])


@add_check("exact", claim="what is outside a window has no effect", needs=evaluates_with("window"))
def outside_of_windows(t: CheckRun) -> None:
    """However large it is: the last query does not see keys that come long before it."""
    for n, m in ((6, 9), (130, 130)):
        n, m, d = t.fit(n, m, 4)
        (q, k, v), _ = t.problem(n, m, d)
        sides, plain = (2, 0), t.adapter.settled
        seen = t.adapter.visible(n, m, plain | {"window": sides})[-1]
        if np.all(seen):
            continue
        out = t.call(q, k, v, **plain, window=sides)[-1]
        allowed = 2 * tolerance(t.adapter, (q, k, v), plain, out)
        k, v = k.copy(), v.copy()
        k[~seen], v[~seen] = 8 * k[~seen], 1e3
        t.equal(t.call(q, k, v, **plain, window=sides)[-1], out, allowed)


@add_check("exact", claim="scores are capped before bias and mask", needs=evaluates_with("softcap"))
def soft_caps(t: CheckRun) -> None:
    """Small and large caps of small and large scores, and what is hidden stays hidden."""
    for size in (1.0, 4.0, 20.0):
        arrays, _ = t.problem(*t.fit(5, 7, 4), size=size)
        for most in (0.5, 2.0, 30.0, 50.0):
            t.compare(*arrays, strict=True, **t.adapter.settled, softcap=most)
    n, m, d = t.fit(5, 7, 4)
    if t.adapter.can("mask"):
        mask = np.arange(n)[:, None] + np.arange(m) > 3
        _compare_sizes(t, (n, m, d), softcap=1.0, mask=mask | (np.arange(m) == 0))
    if t.adapter.can("causal"):
        arrays, _ = t.problem(n, m, d)
        t.compare(*arrays, strict=True, softcap=1.0, causal=True)
    if t.adapter.can("bias"):
        _compare_sizes(t, (n, m, d), softcap=1.0, bias=t.normal(n, m, size=4.0))
    _compare_sizes(t, (70, 130, 4), softcap=1.0)


@add_check("exact", claim="a sink is a key whose value is 0", needs=evaluates_with("sinks"))
def weights_of_sinks(t: CheckRun) -> None:
    """Of each query head, below and above all scores; where nothing else is seen, all weight."""
    adapter, (n, m, d) = t.adapter, t.fit(5, 7, 4)
    for logit in (0.0, -3.0, 3.0, -math.inf, -60.0, 60.0, 1000.0):
        _compare_sizes(t, (n, m, d), sinks=np.asarray(adapter.exact(logit)))
    lead = adapter.lead(2, 4)
    if "h" in (adapter["layout"] or "h"):
        for groups in _key_heads(adapter):
            arrays, _ = t.problem(n, m, d, lead=lead, groups=groups)
            sinks = t.normal(lead[-1], size=2.0)
            t.compare(*arrays, strict=True, **adapter.settled, sinks=sinks)
    if adapter.can("softcap"):
        _compare_sizes(t, (n, m, d), sinks=np.asarray(4.0), softcap=1.0)
    if adapter.can("mask"):
        mask = np.ones((n, m), dtype=bool)
        mask[:, 1:4] = mask[1] = False
        hiding = {"mask": mask} if adapter["empty_rows"] == "zero" else {"mask": mask[0]}
        _compare_sizes(t, (n, m, d), sinks=np.asarray(1.0), **hiding)
    if adapter.can("causal"):
        arrays, _ = t.problem(n, m, d)
        t.compare(*arrays, strict=True, causal=True, sinks=np.asarray(1.0))
    _compare_sizes(t, (70, 300, 4), sinks=np.asarray(3.0))


@add_check("exact", claim="a bias is added to the scores", needs=evaluates_with("bias"))
def biases(t: CheckRun) -> None:
    """Of pairs, keys, heads and batches; large ones; -infinity hides a key."""
    adapter, (n, m, d) = t.adapter, t.fit(5, 7, 4)
    lead = adapter.lead(2, 4)
    shapes = [(n, m), (1, m), *([(*lead[-1:], n, m), (*lead, n, m)] if lead else [])]
    shapes += [(lead[0], 1, n, m), (lead[-1], 1, m)] if len(lead) > 1 else []
    for groups in _key_heads(adapter):
        arrays, _ = t.problem(n, m, d, lead=lead, groups=groups)
        for shape in shapes:
            bias = t.normal(*shape, size=2.0)
            t.compare(*arrays, strict=True, **adapter.settled, bias=bias)
    for size in (20.0, 60.0):
        _compare_sizes(t, (n, m, d), bias=t.normal(n, m, size=size))
    bias = t.normal(n, m)
    bias[:, 1:4] = -math.inf
    _compare_sizes(t, (n, m, d), bias=bias)
    n, m, d = t.fit(70, 130, 4)
    _compare_sizes(t, (n, m, d), bias=t.normal(n, m))
