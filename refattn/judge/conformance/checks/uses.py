"""Checks of what a candidate takes: masks, causal, groups, windows, caps, sinks, biases and lse.

Each by itself, number by number against the reference, and any three of them together.
"""

from __future__ import annotations

import math
from functools import partial, reduce
from typing import Any

import numpy as np

from ....engine.attend import Attended, merge
from ..candidate.adapter import Adapter
from ..candidate.failures import Failure, Refusal
from ..candidate.limits import Arrays, Keywords, nearest_head_size
from ..truth.allowed import allowed_error
from ..truth.normalisers import with_normalisers
from .cases import OPTIONS, Mask, covering, in_time, levels, problem_of, try_cases
from .trials import CheckRun, add_check, add_condition, attends, evaluated, stabilised


def random_mask(t: CheckRun, n: int, m: int, lead: tuple[int, ...] = ()) -> Mask:
    """Draw a mask: each query sees some key, and the first row the first key only."""
    mask: Mask = t.rng.random((*lead, n, m)) < 0.6
    mask[..., np.arange(n), np.arange(n) % m] = True
    mask[..., 0, 1:] = False
    mask[..., 0, 0] = True
    return mask


@add_check
def mask(t: CheckRun) -> None:
    """Compare with the reference, with a mask for each query and with padding."""
    sizes = [(2, 3, ()), (5, 5, ()), (6, 70, ()), (4, 5, t.adapter.lead(2, 3))]
    if t.adapter.eps < 1e-4:  # across the edges of blocks
        sizes += [(3, 129, ()), (2, 520, ()), (2, 1030, ())]
        sizes += [(130, 9, ()), (70, 140, t.adapter.lead(2, 3))]
    for n, m, lead in sizes:
        arrays, options = t.problem(n, m, nearest_head_size(t.adapter, 4), 5, lead=lead)
        t.compare(*arrays, **options, mask=random_mask(t, n, m, lead))
        padding = np.broadcast_to(np.arange(m) < max(1, m // 2), (*lead, n, m)).copy()
        # Padding: all queries see the same first keys.
        t.compare(*arrays, **options, mask=padding)
    if stabilised(t.adapter):
        arrays, options = t.problem(5, 6, 4, 5, size=4.0)
        t.compare(*arrays, **options, mask=random_mask(t, 5, 6))


@add_check
def mask_broadcasts(t: CheckRun) -> None:
    """Try masks of shape (n, m), (1, m) and (m,), and one for each batch member or each head."""
    arrays, options = t.problem(4, 5, 4, 5, lead=t.adapter.lead(2, 3))
    lead = arrays[0].shape[:-2]
    padding = np.array([[True, False, True, True, False]])
    masks = [random_mask(t, 4, 5), padding, padding[0]]
    each = random_mask(t, 1, 5, lead[:1] + (1,) * (len(lead) - 1)) if lead else padding
    each[..., 1] = True
    masks.append(each)
    if len(lead) == 2:
        # One for each head, alike in all batch members.
        masks += [random_mask(t, n, 5, (1, lead[1])) for n in (4, 1)]
    for each in masks:
        t.compare(*arrays, **options, mask=each)


@add_check
def query_without_keys(t: CheckRun) -> None:
    """Hide all keys from one query, from all queries, and from some in each batch member."""
    arrays, options = t.problem(4, 5, 4, 4)
    hidden = random_mask(t, 4, 5)
    hidden[2] = False
    t.compare(*arrays, **options, mask=hidden)
    t.equal(t.got[2], np.zeros(4), t.adapter.eps)
    t.compare(*arrays, **options, mask=np.zeros((4, 5), dtype=bool))
    lead = t.adapter.lead(2, 3)
    arrays, options = t.problem(4, 5, 4, 4, lead=lead)
    t.compare(*arrays, **options, mask=t.rng.random((*lead, 4, 5)) < 0.3)
    if t.adapter.masks_future:
        arrays, options = t.problem(4, 4, 4, 4)
        # Every other query sees keys by the mask, and by causal attention only some of them.
        hidden = np.arange(4)[:, None] * np.ones(4) % 2 == 1
        _compare_both(t, arrays, options | {"causal": True, "mask": hidden})


@add_check
def causal(t: CheckRun) -> None:
    """Compare with the reference, with as many queries as keys."""
    heads = [(6, (2, 3)), (130, (2, 3))]
    for n, lead in [*((n, ()) for n in (1, 2, 5, 17, 65, 130)), *heads]:
        t.compare_problem(n, n, 4, 5, lead=t.adapter.lead(*lead), causal=True)
    if t.adapter.eps < 1e-4:  # across the edges of blocks
        for n in (257, 513) if not t.adapter.has("per-query") else (257,):
            t.compare_problem(n, n, 2, 2, causal=True)
    size = 3.0 if t.adapter.has("exponential") else 1.0
    t.compare_problem(6, 6, 4, 5, size=size, causal=True)


@add_check
def mask_with_causal(t: CheckRun) -> None:
    """Compare with the reference; the function may raise an exception for the combination."""
    arrays, options = t.problem(6, 6, 4, 5)
    _compare_both(t, arrays, options | {"mask": random_mask(t, 6, 6), "causal": True})


def _compare_both(t: CheckRun, arrays: Arrays, options: Keywords) -> None:
    """Compare with a mask and causal at once, which a candidate may refuse."""
    try:
        t.adapter(*arrays, **options)
    # Refusing both at once is allowed: each alone must then work.
    except Refusal:
        for other in ("mask", "causal"):
            t.compare(*arrays, **{k: x for k, x in options.items() if k != other})
        return
    t.compare(*arrays, **options)


@add_check
def causal_cross(t: CheckRun) -> None:
    """Try fewer queries than keys, and more."""
    empty = t.adapter["causal"] == "bottom-right"  # whether some of 7 queries of 4 keys see none
    undefined = t.adapter["empty_rows"] == "undefined" or not t.adapter.can("mask")
    sizes = [(1, 4), (3, 5), (20, 70), (1, 200), (30, 200), (70, 333)]
    for n, m in sizes if empty and undefined else [*sizes, (7, 4)]:
        t.compare_problem(*t.fit(n, m, 4), 5, causal=True)


@add_check
def grouped_heads(t: CheckRun) -> None:
    """Try four query heads with two key heads and with one, and six with three."""
    for heads, groups in ((4, 2), (4, 1), (6, 3)):
        lead = t.adapter.lead(2, heads)
        arrays, options = t.problem(3, 5, 4, 5, lead=lead, groups=groups)
        t.compare(*arrays, **options)
        if t.adapter.can("mask"):
            t.compare(*arrays, **options, mask=random_mask(t, 3, 5, lead))
        if t.adapter.masks_future:
            t.compare_problem(5, 5, 4, 5, lead=lead, groups=groups, causal=True)


def _plain(t: CheckRun) -> dict[str, Any]:
    """Return the options of every comparison here, beside those that are tested."""
    return {"strict": True} | t.adapter.settled


def _key_heads(adapter: Adapter) -> tuple[int | None, ...]:
    """Return numbers of key heads: as many as query heads, or fewer."""
    return (None, 2) if adapter.grouped else (None,)


@add_check
def windows(t: CheckRun) -> None:
    """Try windows of the query's own key only, of one side, of both sides and of all keys."""
    sizes = [(6, 6, 4), (5, 9, 4), (1, 6, 4), (70, 70, 4), (130, 300, 4)]
    if t.adapter["empty_rows"] != "undefined":
        sizes.insert(3, (9, 5, 4))  # whose first queries see no key
    sides = ((2, 0), (0, 0), (0, 1), (1, 2), (63, 64), (64, 0), (None, 1), (3, None))
    causal = [{}, {"causal": True}] if t.adapter.can("causal") else [{}]
    cases = covering({"size": (*sizes,), "window": sides, "way": (*causal,)}, t.rng, 2)
    for case in in_time(t, cases, "windows"):
        asked = _plain(t) | case["way"]
        t.compare_problem(*t.fit(*case["size"]), **asked, window=case["window"])


@add_check
def soft_caps(t: CheckRun) -> None:
    """Try small and large caps of small and large scores; masked keys must stay masked."""
    few, plain = t.fit(5, 7, 4), _plain(t)
    n, m, _ = few
    for size in (1.0, 4.0, 20.0):
        arrays, _ = t.problem(*few, size=size)
        for most in (0.5, 2.0, 30.0, 50.0):
            t.compare(*arrays, **plain, softcap=most)
    plain["softcap"] = 1.0
    if t.adapter.can("mask"):
        mask = np.arange(n)[:, None] + np.arange(m) > 3
        t.compare_problem(*few, **plain, mask=mask | (np.arange(m) == 0))
    if t.adapter.can("causal"):
        t.compare_problem(*few, **plain | {"causal": True})
    if t.adapter.can("bias"):
        t.compare_problem(*few, **plain, bias=t.normal(n, m, size=4.0))
    t.compare_problem(*t.fit(70, 130, 4), **plain)


@add_check
def weights_of_sinks(t: CheckRun) -> None:
    """Try sinks below and above all scores, for each query head; some queries see only a sink."""
    adapter, few, plain = t.adapter, t.fit(5, 7, 4), _plain(t)
    # A sink of -inf has no weight, and one of 1000 has all.
    for logit in (0.0, -3.0, 3.0, -math.inf, -60.0, 60.0, 1000.0):
        t.compare_problem(*few, **plain, sinks=np.asarray(adapter.exact(logit)))
    lead = adapter.lead(2, 4)
    if "h" in (adapter["layout"] or "h"):
        for groups in _key_heads(adapter):
            arrays, _ = t.problem(*few, lead=lead, groups=groups)
            t.compare(*arrays, **plain, sinks=t.normal(lead[-1], size=2.0))
    # One sink that all heads share.
    one = plain | {"sinks": np.asarray(1.0)}
    if adapter.can("softcap"):
        t.compare_problem(*few, **plain, sinks=np.asarray(4.0), softcap=1.0)
    if adapter.can("mask"):
        mask = np.ones(few[:2], dtype=bool)
        mask[:, 1:4] = mask[1] = False
        t.compare_problem(*few, **one, mask=mask if adapter["empty_rows"] == "zero" else mask[0])
    if adapter.can("causal"):
        t.compare_problem(*few, **one | {"causal": True})
    t.compare_problem(*t.fit(70, 300, 4), **plain, sinks=np.asarray(3.0))


@add_check
def biases(t: CheckRun) -> None:
    """Try biases of pairs, keys, heads and batches, also large ones and -infinity, which masks."""
    adapter, plain = t.adapter, _plain(t)
    n, m, d = t.fit(5, 7, 4)
    lead = adapter.lead(2, 4)
    shapes = [(n, m), (1, m), *([(*lead[-1:], n, m), (*lead, n, m)] if lead else [])]
    shapes += [(lead[0], 1, n, m), (lead[-1], 1, m)] if len(lead) > 1 else []
    for groups in _key_heads(adapter):
        arrays, _ = t.problem(n, m, d, lead=lead, groups=groups)
        for shape in shapes:
            t.compare(*arrays, **plain, bias=t.normal(*shape, size=2.0))
    for size in (20.0, 60.0):
        t.compare_problem(n, m, d, **plain, bias=t.normal(n, m, size=size))
    bias = t.normal(n, m)
    # A bias of -inf is how some functions are given a mask.
    bias[:, 1:4] = -math.inf
    t.compare_problem(n, m, d, **plain, bias=bias)
    n, m, d = t.fit(70, 130, 4)
    t.compare_problem(n, m, d, **plain, bias=t.normal(n, m))


@add_condition
def has_uses(adapter: Adapter) -> bool:
    """Return whether there are uses to put together."""
    if not (attends(adapter) and evaluated(adapter)):
        return False
    if adapter["causal_only"] and not adapter.can("causal"):
        return False  # its calls are made one query at a time
    return sum(len(x) > 1 for x in levels(adapter).values()) > 1


@add_check
def uses_together(t: CheckRun) -> None:
    """Combine masks, causal attention, one query or many, grouped heads, frequencies for each head.

    The function may raise an exception for any two of a mask, a bias and causal=True.
    """
    factors = levels(t.adapter)
    # What is wrong by itself would fail in every combination.
    if len(factors["more"]) > 1 and True in factors["causal"] and not _is_aligned(t):
        factors["more"] = (0,)  # another check says so, once
    cases = covering(factors, t.rng, paired=OPTIONS if t.level == "quick" else ())
    try_cases(t, cases, partial(_compare_case, t))


def _is_aligned(t: CheckRun) -> bool:
    """Return whether causal attention with more keys than queries is right by itself."""
    plainest = {name: x[0] for name, x in levels(t.adapter).items()}
    arrays, options = problem_of(t, plainest | {"n": 3, "more": 2, "causal": True})
    try:
        _compare_case(t, arrays, **options)
    except Failure:
        t.error = t.since = t.case = None
        return False
    return True


def _compare_case(t: CheckRun, arrays: Arrays, **options: Any) -> None:
    """Compare one case with the reference; -infinity is the lse of a query that sees no key."""
    if "return_lse" in options:
        _compare_normalisers(t, arrays, **options)
    else:
        t.compare(*arrays, strict=True, **options)


def _compare_normalisers(t: CheckRun, arrays: Arrays, **options: Any) -> None:
    """Compare output and log normalisers with the formula, in rows that see a key."""
    options = t.adapter.settled | options | {"return_lse": True}
    out, lse = t.call(*arrays, **options)
    want, allowed = with_normalisers(t.adapter, arrays, options)
    t.equal(out, want[0], allowed[0])
    known = np.isfinite(want[1])
    if not np.all(np.isfinite(lse) | ~known):
        raise Failure("finite log normalisers of queries that see a key", "others")
    t.equal(lse, want[1], allowed[1], "lse")


@add_check
def log_normalisers(t: CheckRun) -> None:
    """Try inputs without and with leading axes, hidden keys, and large scores."""
    n, m, d = t.fit(5, 8, 4)
    near = np.arange(m) - np.arange(n)[:, None]
    options: dict[str, Any] = {
        "mask": (near % 3 > 0) | (near == 0),
        "causal": True,
        "window": (2, 1),
        "softcap": 1.0,
        "bias": t.normal(n, m),
    }
    uses = [{}, *({name: x} for name, x in options.items() if t.adapter.can(name))]
    leads = (), t.adapter.lead(2, 3)
    cases = [((n, m, d), {"lead": lead} | use) for use in uses for lead in leads]
    sizes = (4.0, 10.0) if t.adapter.half else (4.0, 40.0)
    cases += [((n, m, d), {"size": size}) for size in sizes]
    if t.adapter.grouped:
        cases.append(((n, m, d), {"lead": t.adapter.lead(2, 4), "groups": 2}))
    many = [(1, 9, 8), (1, 300, 8), (65, 300, 8)]
    cases += [(t.fit(*sizes_of), {"lead": lead}) for sizes_of in many for lead in leads]
    for each, named in cases:
        t.compare_problem(*each, by=_compare_normalisers, **named)


@add_check
def normaliser_without_keys(t: CheckRun) -> None:
    """Hide all keys by a mask or by causal=True; merging such a part must change nothing."""
    ways: dict[str, Any] = {"mask": True, "causal": True, "window": (1, 0)}
    for name, way in ways.items():
        n, m, d = t.fit(4, 6, 4) if name == "mask" else t.fit(6, 3, 4)
        if not t.adapter.can(name) or (name != "mask" and n <= m):
            continue
        # The second query sees no key.
        way = np.arange(n)[:, None] != np.ones(m) if name == "mask" else way
        arrays, _ = t.problem(n, m, d, lead=t.adapter.lead(2, 3))
        hiding = t.adapter.settled | {name: way}
        _, lse = t.call(*arrays, return_lse=True, **hiding)
        empty = np.broadcast_to(~np.any(t.adapter.visible(n, m, hiding), -1), lse.shape)
        if np.any(lse[empty] != -math.inf):
            raise Failure("an lse of -inf", f"{lse[empty][0]}")
    # -inf is -inf: there is no error to measure.
    t.error = 0.0


@add_check
def merged_parts(t: CheckRun) -> None:
    """Merge two parts and three, of different sizes, with scores far apart."""
    # Parts of whole multiples, which the candidate takes as they are.
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
            merged = reduce(merge, parts)
            # Each part is rounded, and so is the whole.
            allowed = (1 + len(parts)) * allowed_error(t.adapter, (q, k, v), {}, whole[0])
            t.equal(merged.out, whole[0], allowed)
