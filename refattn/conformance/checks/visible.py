"""Checks of what a query sees: masks, causal attention, and grouped heads."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..candidate.failures import Refusal
from ..candidate.limits import Arrays, Keywords, nearest_head_size
from ..truth.reference import tolerance
from .trials import (
    CheckRun,
    add_check,
    comparable,
    comparable_ways,
    evaluates_with,
    is_causal,
    same_within,
    stabilised,
)


def _random_mask(t: CheckRun, n: int, m: int, lead: tuple[int, ...] = ()) -> npt.NDArray[Any]:
    """Draw a mask: each query sees some key, and the first row the first key only."""
    mask = t.rng.random((*lead, n, m)) < 0.6
    mask[..., np.arange(n), np.arange(n) % m] = True
    mask[..., 0, 1:] = False
    mask[..., 0, 0] = True
    return mask


@add_check(claim="a masked key is as if it were not there", needs=evaluates_with("mask"))
def mask(t: CheckRun) -> None:
    """Agreement with the reference under masks of each query, and of padding."""
    sizes = [(2, 3, ()), (5, 5, ()), (6, 70, ()), (4, 5, t.adapter.lead(2, 3))]
    if t.adapter.eps < 1e-4:  # across the edges of blocks
        sizes += [(3, 129, ()), (2, 520, ()), (2, 1030, ())]
        sizes += [(130, 9, ()), (70, 140, t.adapter.lead(2, 3))]
    for n, m, lead in sizes:
        arrays, options = t.problem(n, m, nearest_head_size(t.adapter, 4), 5, lead=lead)
        t.compare(*arrays, **options, mask=_random_mask(t, n, m, lead))
        padding = np.broadcast_to(np.arange(m) < max(1, m // 2), (*lead, n, m)).copy()
        t.compare(*arrays, **options, mask=padding)
    if stabilised(t.adapter):
        arrays, options = t.problem(5, 6, 4, 5, size=4.0)
        t.compare(*arrays, **options, mask=_random_mask(t, 5, 6))


@add_check(claim="a mask broadcasts over heads and queries", needs=evaluates_with("mask"))
def mask_broadcasts(t: CheckRun) -> None:
    """Masks of shape (n, m), (1, m) and (m,), and one for each of a batch or for each head."""
    arrays, options = t.problem(4, 5, 4, 5, lead=t.adapter.lead(2, 3))
    t.compare(*arrays, **options, mask=_random_mask(t, 4, 5))
    padding = np.array([[True, False, True, True, False]])
    t.compare(*arrays, **options, mask=padding)
    t.compare(*arrays, **options, mask=padding[0])
    lead = arrays[0].shape[:-2]
    each = _random_mask(t, 1, 5, lead[:1] + (1,) * (len(lead) - 1)) if lead else padding
    each[..., 1] = True
    t.compare(*arrays, **options, mask=each)
    if len(lead) == 2:
        t.compare(*arrays, **options, mask=_random_mask(t, 4, 5, (1, lead[1])))
        t.compare(*arrays, **options, mask=_random_mask(t, 1, 5, (1, lead[1])))


@add_check(
    claim="what is masked has no effect, however large",
    needs=lambda adapter: comparable(adapter) and adapter.can("mask"),
)
def masked_keys_unseen(t: CheckRun) -> None:
    """Editing masked keys and values changes nothing."""
    seen = np.broadcast_to(np.arange(6) < 4, (5, 6)).copy()
    for size, edits in _edits(t):
        (q, k, v), frequencies = t.problem(5, 6, 4, 4, size=size)
        for options in comparable_ways(t, frequencies):
            out = t.call(q, k, v, **options, mask=seen)
            allowed = same_within(t, (q, k, v), options | {"mask": seen})
            for edit in edits:
                hidden, values = (
                    np.concatenate([x[:4], t.normal(2, 4, size=edit)]) for x in (k, v)
                )
                masked = options | {"mask": seen}
                t.equal(t.call(q, hidden, values, **masked), out, allowed + t.declared(masked))


def _edits(t: CheckRun) -> list[tuple[float, tuple[float, ...]]]:
    """Return sizes of visible keys, and of hidden ones that may not matter."""
    if not stabilised(t.adapter):
        return [(1.0, (0.0, 1.0, 10.0))]
    return (
        [(1.0, (0.0, 1.0, 10.0)), (8.0, (0.0, 1.0))]
        if t.adapter.half
        else [(1.0, (0.0, 1.0, 3000.0)), (40.0, (0.0, 1.0, 300.0))]
    )


@add_check(
    claim="a query that sees no key gets 0, or what is declared",
    needs=lambda adapter: evaluates_with("mask")(adapter) and adapter["empty_rows"] != "undefined",
)
def query_without_keys(t: CheckRun) -> None:
    """A masked row, all of them, and some in each member of a batch."""
    arrays, options = t.problem(4, 5, 4, 4)
    hidden = _random_mask(t, 4, 5)
    hidden[2] = False
    t.compare(*arrays, **options, mask=hidden)
    t.equal(t.got[2], np.zeros(4), t.adapter.eps)
    t.compare(*arrays, **options, mask=np.zeros((4, 5), dtype=bool))
    lead = t.adapter.lead(2, 3)
    arrays, options = t.problem(4, 5, 4, 4, lead=lead)
    t.compare(*arrays, **options, mask=t.rng.random((*lead, 4, 5)) < 0.3)
    if is_causal(t.adapter):
        arrays, options = t.problem(4, 4, 4, 4)
        hidden = np.arange(4)[:, None] * np.ones(4) % 2 == 1
        _compare_both(t, arrays, options | {"causal": True, "mask": hidden})


@add_check(claim="query i sees keys 0 to i", needs=is_causal)
def causal(t: CheckRun) -> None:
    """Agreement with the reference, with as many queries as keys."""
    heads = [(6, (2, 3)), (130, (2, 3))]
    for n, lead in [*((n, ()) for n in (1, 2, 5, 17, 65, 130)), *heads]:
        arrays, options = t.problem(n, n, 4, 5, lead=t.adapter.lead(*lead))
        t.compare(*arrays, **options, causal=True)
    if t.adapter.eps < 1e-4:  # across the edges of blocks
        for n in (257, 513) if not t.adapter.has("per-query") else (257,):
            arrays, options = t.problem(n, n, 2, 2)
            t.compare(*arrays, **options, causal=True)
    arrays, options = t.problem(6, 6, 4, 5, size=3.0 if t.adapter.has("exponential") else 1.0)
    t.compare(*arrays, **options, causal=True)


@add_check(
    claim="with a mask and causal both hide keys",
    needs=lambda adapter: is_causal(adapter) and adapter.can("mask"),
)
def mask_with_causal(t: CheckRun) -> None:
    """Agreement with the reference; a candidate may refuse both at once, by an exception."""
    arrays, options = t.problem(6, 6, 4, 5)
    _compare_both(t, arrays, options | {"mask": _random_mask(t, 6, 6), "causal": True})


def _compare_both(t: CheckRun, arrays: Arrays, options: Keywords) -> None:
    """Compare with a mask and causal at once, which a candidate may refuse."""
    try:
        t.adapter(*arrays, **options)
    except Refusal:
        for other in ("mask", "causal"):
            t.compare(*arrays, **{k: x for k, x in options.items() if k != other})
        return
    t.compare(*arrays, **options)


@add_check(
    claim="with fewer queries than keys, or more, they are aligned as declared",
    needs=lambda adapter: is_causal(adapter) and not adapter["self_attention"],
)
def causal_cross(t: CheckRun) -> None:
    """n below m, and above."""
    empty = t.adapter["causal"] == "bottom-right"  # whether some of 7 queries of 4 keys see none
    undefined = t.adapter["empty_rows"] == "undefined" or not t.adapter.can("mask")
    sizes = [(1, 4), (3, 5), (20, 70), (1, 200), (30, 200), (70, 333)]
    for n, m in sizes if empty and undefined else [*sizes, (7, 4)]:
        arrays, options = t.problem(*t.fit(n, m, 4), 5)
        t.compare(*arrays, **options, causal=True)


@add_check(
    claim="the future has no effect, however large",
    needs=lambda adapter: comparable(adapter) and adapter.can("causal"),
)
def future_unseen(t: CheckRun) -> None:
    """Editing later keys and values, and then later queries too, leaves earlier results."""
    for size, edits in _edits(t):
        (q, k, v), frequencies = t.problem(9, 9, 4, 3, size=size)
        ways = comparable_ways(t, frequencies, 3)
        for options in ways[-1:] if t.adapter.has("proposals") else ways:
            out = t.call(q, k, v, **options, causal=True)
            allowed = same_within(t, (q, k, v), options | {"causal": True})
            if t.adapter["feature_map"] == "relu":  # of queries that are 0 nothing is defined
                edits = tuple(edit for edit in edits if edit)
            for edit in edits:
                for first in (8, 4):
                    edited = [
                        np.concatenate([x[:first], t.normal(9 - first, 4, size=edit)])
                        for x in (q, k, v)
                    ]
                    asked = options | {"causal": True}
                    later = t.call(*edited, **asked)
                    t.equal(later[:first], out[:first], allowed + t.declared(asked))


@add_check(
    "random-features",
    "normalised",
    claim="causal and masked attention use the keys and frequencies that plain attention does",
    needs=lambda adapter: (adapter.can("causal") or adapter.can("mask")) and adapter.black_box,
)
def visible_part(t: CheckRun) -> None:
    """At one seed a query's result is that of plain attention to the keys it sees."""
    (q, k, v), _ = t.problem(6, 6, 4, size=t.near if t.adapter.can("omega") else 1.0)
    for samples in (1, 5):
        options = t.options(samples)
        ways: list[tuple[str, Any, Any]] = (
            [("causal", True, np.tri(6, dtype=bool))] if t.adapter.can("causal") else []
        )
        if t.adapter.can("mask"):
            ways.append(("mask", seen := _random_mask(t, 6, 6), seen))
        for name, value, seen in ways:
            out = t.call(q, k, v, **options, **{name: value})
            allowed = tolerance(t.adapter, (q, k, v), options | {name: value}, out)
            for i in range(6):
                alone = tolerance(
                    t.adapter, (q[i : i + 1], k[seen[i]], v[seen[i]]), options, out[i]
                )
                t.equal(t.call(q, k[seen[i]], v[seen[i]], **options)[i], out[i], allowed + alone)


@add_check(
    claim="consecutive query heads share a key head",
    needs=lambda adapter: evaluates_with("gqa")(adapter) and "h" in (adapter["layout"] or "h"),
)
def grouped_heads(t: CheckRun) -> None:
    """Four query heads over two and one key heads, six over three."""
    for heads, groups in ((4, 2), (4, 1), (6, 3)):
        lead = t.adapter.lead(2, heads)
        arrays, options = t.problem(3, 5, 4, 5, lead=lead, groups=groups)
        t.compare(*arrays, **options)
        if t.adapter.can("mask"):
            t.compare(*arrays, **options, mask=_random_mask(t, 3, 5, lead))
        if is_causal(t.adapter):
            arrays, options = t.problem(5, 5, 4, 5, lead=lead, groups=groups)
            t.compare(*arrays, **options, causal=True)
