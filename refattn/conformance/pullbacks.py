"""Checks of gradients: pullbacks of queries, keys and values, by cotangents of the output.

What comes is compared with the package's own pullback in extended precision, where the candidate
can be compared number by number, and with difference quotients of its own results where it draws.
"""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from .adapter import Adapter
from .checks import Trial, attends, check, evaluated, stabilised
from .combined import case_of, covering, levels
from .failures import Failure, Refusal
from .reference import log_slopes, pulled, pulled_rounding, tolerance
from .uses import indices

__all__: list[str] = []

Floats = npt.NDArray[Any]

NAMES = ("out", "dq", "dk", "dv")
_SECONDS = {"quick": 6.0, "full": 40.0, "soak": 160.0}


def _differentiated(adapter: Adapter) -> bool:
    return attends(adapter) and adapter.can("vjp")


def _compared(adapter: Adapter) -> bool:
    return _differentiated(adapter) and evaluated(adapter)


def _averaged(adapter: Adapter) -> bool:
    """Whether its weights are known, or known to be positive."""
    return _differentiated(adapter) and (evaluated(adapter) or not adapter.waves)


def _settled(adapter: Adapter) -> dict[str, Any]:
    """Options of every call: what is causal without being asked has to be told so."""
    return {"causal": True} if adapter["causal_only"] else {}


def _cotangent(t: Trial, arrays: tuple[Floats, ...]) -> Floats:
    """Of the output: as many heads as queries have."""
    q, _, v = arrays
    return t.normal(*q.shape[:-1], v.shape[-1])


def _compare(t: Trial, arrays: tuple[Floats, ...], **options: Any) -> None:
    """Compare output and gradients with the reference, and say where they are wrong."""
    options = _settled(t.adapter) | options
    options.setdefault("d_out", _cotangent(t, arrays))
    got = t.call(*arrays, **options)
    want, allowed = pulled(t.adapter, arrays, options)
    for t.part, (name, x, y, most) in enumerate(zip(NAMES, got, want, allowed, strict=True)):
        try:
            t.equal(x, y, most)
        except Failure as failure:
            wrong = np.abs(np.asarray(x, np.longdouble) - y) > most
            axes = ((-2, "token"), (-3, "head"), (-1, "column"))
            where = ", ".join(w for axis, of in axes if (w := indices(wrong, axis, of)))
            n, m = (z.shape[-2] for z in arrays[:2])
            raise Failure(
                f"{name} {failure.expected}", f"{failure.got}; n = {n}, m = {m}: {where}"
            ) from None


@check(claim="gradients are those of the formula", needs=_compared)
def gradients(t: Trial) -> None:
    """Without and with leading axes, of values of another length, and of no cotangent."""
    for lead in ((), t.adapter.lead(2, 3)):
        n, m, d = t.fit(4, 6, 4)
        arrays, options = t.problem(n, m, d, 4, lead=lead)
        _compare(t, arrays, **options)
    if not t.adapter["same_value_size"]:
        arrays, options = t.problem(n, m, d, 4, d_v=7)
        _compare(t, arrays, **options)
    nothing = 0 * _cotangent(t, arrays)
    for x in t.call(*arrays, d_out=nothing, **_settled(t.adapter), **options)[1:]:
        t.equal(x, np.zeros(x.shape), 0.0)


@check(claim="gradients are right in every use", needs=_compared)
def gradients_together(t: Trial) -> None:
    """Any two of: masks of every shape, causal, one query or many, grouped heads, more keys."""
    end, refused = time.monotonic() + _SECONDS[t.level], 0
    cases = list(covering(levels(t.adapter), t.rng, 2))
    for i, case in enumerate(cases):
        if time.monotonic() > end:
            t.untried.append(f"{len(cases) - i} of {len(cases)} uses, for want of time")
            break
        arrays, options = case_of(t, **case)
        try:
            _compare(t, arrays, **options)
        except Refusal:
            if case["mask"] is None or not case["causal"]:
                raise
            t.since, refused = None, refused + 1
    if refused:
        t.untried.append("a mask and causal together, which it refuses")


@check(
    "exponential",
    claim="gradients are right at large logits",
    needs=lambda adapter: _compared(adapter) and stabilised(adapter),
)
def gradients_of_large_logits(t: Trial) -> None:
    """Exponents of tens and of thousands, where most weights vanish."""
    low = t.adapter["dtype"] in ("float16", "bfloat16")
    for size in (4.0, 10.0) if low else (4.0, 10.0, 40.0, 200.0):
        arrays, options = t.problem(*t.fit(5, 6, 4), 4, size=size)
        _compare(t, arrays, **options)


@check(claim="gradients are right at ragged ends of blocks", needs=_compared)
def gradients_of_many_tokens(t: Trial) -> None:
    """Past powers of two by one, causal too, as far as time allows."""
    end, rate = time.monotonic() + _SECONDS[t.level], 0.0
    plain = not t.adapter["causal_only"]
    causal = t.adapter.can("causal") and not t.adapter.has("proposals")
    ways: list[dict[str, Any]] = [{}] * plain + [{"causal": True}] * causal
    for n, m in ((17, 33), (65, 65), (129, 130), (257, 257), (513, 1025), (1025, 1025)):
        for options in ways:
            began = time.monotonic()
            if began + rate * n * m > end:
                t.untried.append(f"{n} queries and more, for want of time")
                return
            rows, columns, d = t.fit(n, m, 8)
            arrays, given = t.problem(rows, columns, d, 9)
            _compare(t, arrays, **given, **options)
            rate = (time.monotonic() - began) / (n * m)


@check(claim="what a query does not see takes no gradient", needs=_differentiated)
def gradients_of_hidden(t: Trial) -> None:
    """Masked keys, future keys, and queries whose output has no cotangent."""
    n, m, d = t.fit(5, 7, 4)
    arrays, given = t.problem(n, m, d, 4)
    ways = [given] if evaluated(t.adapter) else [t.options(4)]
    for options in ways:
        options = _settled(t.adapter) | options
        d_out = _cotangent(t, arrays)
        if t.adapter.can("mask"):
            mask = np.ones((n, m), dtype=bool)
            mask[:, 2] = False
            found = t.call(*arrays, d_out=d_out, mask=mask, **options)
            for x in found[2:]:
                t.equal(x[2], np.zeros(x.shape[-1]), 0.0)
        if t.adapter.can("causal") and not t.adapter.has("proposals"):
            first = d_out.copy()
            first[1:] = 0.0  # the first query sees the keys up to m - n, or one
            seen = 1 if t.adapter["causal"] == "top-left" else m - n + 1
            found = t.call(*arrays, d_out=first, **options | {"causal": True})
            for x in found[2:]:
                t.equal(x[seen:], np.zeros(x[seen:].shape), 0.0)
        if t.adapter.has("separate") and not t.adapter.has("proposals"):
            one = d_out.copy()
            one[[0, -1]] = 0.0
            found = t.call(*arrays, d_out=one, **options)
            t.equal(found[1][[0, -1]], np.zeros((2, d)), 0.0)


@check("mean", "positive", claim="gradients are those of a mean", needs=_averaged)
def gradients_of_means(t: Trial) -> None:
    """Of equal values queries and keys take none, and values take all that the output gives.

    In exact attention, which does not change when all keys move alike or queries grow as keys
    shrink, cotangents of keys sum to 0, and q . dq and k . dk to the same.
    """
    n, m, d = t.fit(5, 7, 4)
    arrays, given = t.problem(n, m, d, 4)
    options = _settled(t.adapter) | (given if evaluated(t.adapter) else t.options(4))
    d_out = _cotangent(t, arrays)
    named = options | {"d_out": d_out}
    q, k = (np.asarray(x, np.longdouble) for x in arrays[:2])
    most = pulled_rounding(t.adapter, arrays, options, d_out)
    _, dq, dk, dv = t.call(*arrays, **named)
    t.part = None  # sums, of which none is what came
    _named("a sum of dv", t, dv.sum(-2), d_out.sum(-2), m * most[3])
    if t.adapter.has("exact"):
        _named("a sum of dk", t, dk.sum(-2), np.zeros(d), m * most[2])
        both = n * d * most[1] * np.max(np.abs(q)) + m * d * most[2] * np.max(np.abs(k))
        _named("k . dk, in all,", t, np.sum(k * dk), np.sum(q * dq), both)
    same = (*arrays[:2], np.repeat(arrays[2][:1], m, 0))
    found = t.call(*same, **named)
    for t.part in (1, 2):
        _named(NAMES[t.part], t, found[t.part], np.zeros_like(found[t.part]), most[t.part])


def _named(name: str, t: Trial, got: Floats, want: Floats, allowed: float) -> None:
    """Compare, and say of what."""
    try:
        t.equal(got, want, allowed)
    except Failure as failure:
        raise Failure(f"{name} {failure.expected}", failure.got) from None


@check(claim="gradients are linear in the cotangent", needs=_differentiated)
def gradients_are_linear(t: Trial) -> None:
    """Twice a cotangent takes twice as much, and exactly so."""
    arrays, given = t.problem(*t.fit(4, 6, 4), 4)
    options = _settled(t.adapter) | (given if evaluated(t.adapter) else t.options(4))
    d_out = _cotangent(t, arrays)
    once, twice, least = (
        t.call(*arrays, d_out=factor * d_out, **options) for factor in (1.0, 4.0, 2.0**-6)
    )
    for name, x, y, z in zip(NAMES[1:], once[1:], twice[1:], least[1:], strict=True):
        allowed = 8 * t.adapter.eps * float(np.max(np.abs(x), initial=0.0))
        for factor, other in ((4.0, y), (2.0**-6, z)):
            _named(name, t, other / factor, x, allowed)


def _sloped(adapter: Adapter) -> bool:
    """Whether its weights are smooth, and what is drawn at one seed does not move with q and k."""
    fixed = adapter.has("common") and not adapter.has("proposals")
    able = _differentiated(adapter) and (evaluated(adapter) or fixed)
    return able and not adapter.waves and adapter.eps < 1e-4


@check("mean", "positive", claim="gradients are the slopes of its own results", needs=_sloped)
def gradients_are_slopes(t: Trial) -> None:
    """Difference quotients along random ways, of what it computes at one seed, in each use."""
    n, m, d = t.fit(4, 6, 4)
    seen = np.ones((n, m), dtype=bool)
    seen[0, 1:] = seen[-1, :-1] = False
    plain = _settled(t.adapter)
    uses: list[tuple[dict[str, Any], dict[str, Any]]] = [({}, plain)]
    if t.adapter.can("causal") and not t.adapter.has("proposals"):
        uses.append(({}, {"causal": True}))
    if t.adapter.can("mask"):
        uses.append(({}, plain | {"mask": seen}))
    if t.adapter.can("gqa"):
        uses.append(({"lead": t.adapter.lead(4), "groups": 2}, plain))
    for shape, use in uses:
        (q, k, v), given = t.problem(n, m, d, 4, size=0.5, **shape)
        if t.adapter.has("feature-map"):  # whose slopes are not continuous at 0
            q, k = (t.adapter.exact(x + np.where(x < 0, -0.25, 0.25)) for x in (q, k))
        _slopes(t, (q, k, v), use | (given if evaluated(t.adapter) else t.options(4)))


def _slopes(t: Trial, arrays: tuple[Floats, ...], options: dict[str, Any]) -> None:
    r"""Compare gradients with quotients of the fourth order, along one way of q, k and v each.

    Where log weights move by at most L to a unit of the way, a mean f of values is analytic where
    :math:`|L \Im t| < \pi/2`, and there at most 1 / cos(L Im t) of the largest value, so that
    :math:`|f^{(5)}| \le 120 L^5 / \cos 1` of it. With steps h the error is h^4 / 30 of this, and
    3/2 of that of results over h.
    """
    d_out, root = _cotangent(t, arrays), arrays[0].shape[-1] ** 0.5
    found = t.call(*arrays, d_out=d_out, **options)
    rounding, size = tolerance(t.adapter, arrays, options), float(np.max(np.abs(arrays[2])))
    steepest = root * (1 / root + sum(log_slopes(t.adapter, arrays, options)))
    step = 2.0 ** math.floor(math.log2((rounding / size / 20) ** 0.2 / steepest))
    off = 1.5 * rounding / step + 4 / math.cos(1) * step**4 * steepest**5 * size
    for i, name in enumerate("qkv"):
        way = t.rng.choice([-1.0, 1.0], arrays[i].shape)
        total = 0.0
        for far, weight in ((1, 8.0), (-1, -8.0), (2, -1.0), (-2, 1.0)):
            moved = list(arrays)
            moved[i] = t.adapter.exact(arrays[i] + far * step * way)
            total += weight * float(np.sum(t.call(*moved, **options) * d_out))
        want = np.asarray(total / (12 * step))
        t.got = got = np.asarray(np.sum(found[i + 1] * way))
        _named(f"a slope along {name} of", t, got, want, off * float(np.sum(np.abs(d_out))))
