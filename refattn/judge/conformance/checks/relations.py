"""Checks of relations between results, which hold whatever the reference gives.

Weighted means and their sums, orders, queries and heads apart, and what is not seen has no effect.
"""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np

from ..candidate.failures import Failure
from ..candidate.limits import for_heads
from ..candidate.samples import options_of_one_key
from ..truth.allowed import allowed_error, reference
from .trials import (
    CheckRun,
    add_check,
    again,
    comparable_ways,
    compare_known,
    results_of,
    same_within,
    stabilised,
    ways_to_call,
)
from .uses import random_mask


@add_check
def weighted_mean(t: CheckRun) -> None:
    """Try constant values, one key, and equal keys (values are averaged); test linearity in v."""
    low = t.adapter.half
    positive = t.adapter.has("nonnegative") and not t.adapter.waves
    for size in (0.5, 2.0, 8.0 if low else 30.0) if stabilised(t.adapter) else (0.5,):
        (q, k, v), frequencies = t.problem(5, 7, 4, 4, size=size)
        for options in ways_to_call(t, frequencies):
            allowed = same_within(t, (q, k, v), options)
            out = t.call(q, k, v, **options)
            # A mean with positive weights lies between the least and the largest value.
            if positive:
                lowest, highest = (np.broadcast_to(f(v, -2), out.shape) for f in (np.min, np.max))
                t.equal(out, np.clip(out, lowest, highest), allowed)
            t.equal(t.call(q, k, np.ones_like(v), **options), np.ones(q.shape), allowed)
            # Powers of 2, so that only an added constant or a lost range makes a difference.
            small = 2.0**-10 if low else 2.0**-40
            for factor in (small,) if low else (small, 2.0**20):
                scaled = t.call(q, k, factor * v, **options)
                t.equal(scaled, factor * out, factor * allowed)
            t.equal(t.call(q, k, v[..., ::-1], **options), out[..., ::-1], allowed)
            if t.adapter.has("unordered-keys"):
                same, mean = np.broadcast_to(k[:1], k.shape), np.mean(v, -2)
                compare_known(t, np.broadcast_to(mean, out.shape), 0.0, q, same, v, **options)
            options = options | options_of_one_key(t.adapter, options)
            compare_known(t, np.broadcast_to(v[0], out.shape), 0.0, q, k[:1], v[:1], **options)
    adapter = t.adapter
    if adapter.waves and adapter["dtype"] == "float64" and not adapter["epsilon"]:
        _small_normalisers(t)


def _small_normalisers(t: CheckRun) -> None:
    """Ask many queries for one key, whose weight is one cosine: near 0 for some, or below.

    To be off by 1e-4 a cosine must be below 1e-11, which has probability 1e-8 for all.
    """
    d = 4
    (_, _, v), frequencies = t.problem(5, 1, d, 1)
    n, m, _ = t.fit(2000, 1, d)
    unit, normal = 1 / t.adapter.root(d), t.rng.standard_normal
    sizes = np.linspace(0.2, 1.2, n)[:, None]  # features may have factors e^(|x|^2 / 2)
    q, k = (
        t.adapter.exact(sizes * unit * normal((n, d))),
        t.adapter.exact(unit * normal((m, d)) / 3),
    )
    for options in ways_to_call(t, frequencies, 1):
        out = t.call(q, k[:1], v[:1], **options)
        t.equal(out, np.broadcast_to(v[0], out.shape), 1e-4 * float(np.max(np.abs(v[0]))))


@add_check
def order_of_keys(t: CheckRun) -> None:
    """Permute keys and values."""
    (q, k, v), options = t.problem(4, 9, 4, 5)
    order = t.rng.permutation(9)
    for _, out, allowed in results_of(t, (q, k, v), [options]):
        t.equal(t.call(q, k[order], v[order], **options), out, allowed)


@add_check
def queries_apart(t: CheckRun) -> None:
    """Change other queries, a little and a lot; the result of a query must not change."""
    (q, k, v), frequencies = t.problem(4, 6, 4, 4)
    ways = comparable_ways(t, frequencies)
    # Proposals depend on all queries, unless they are given.
    ways = ways[:1] if t.adapter.has("proposals") else ways
    for options, out, allowed in results_of(t, (q, k, v), ways):
        # A large query may change a maximum that is shared by mistake.
        for size in (1.0, 8.0):
            edited = np.concatenate([q[:1], t.normal(3, 4, size=size)])
            t.equal(t.call(edited, k, v, **options)[:1], out[:1], allowed)


@add_check
def heads_apart(t: CheckRun) -> None:
    """Change one head; others must not change. At given frequencies, also call each head alone."""
    lead = t.adapter.lead(2, 3)
    (q, k, v), frequencies = t.problem(5, 6, 4, 4, lead=lead)
    ways = comparable_ways(t, frequencies)
    for options, out, allowed in results_of(t, (q, k, v), ways):
        # With a seed a head that is called alone draws other numbers.
        for index in np.ndindex(*lead):
            if "seed" not in options:
                alone = options | for_heads(t.adapter, options, index)
                compare_known(t, out[index], allowed, q[index], k[index], v[index], **alone)
            others = np.ones((*lead, 1, 1))
            others[index] = 0
            edited = (t.adapter.exact(x + others * t.normal(*x.shape)) for x in (q, k, v))
            t.equal(t.call(*edited, **options)[index], out[index], allowed)


@add_check
def one_frequency(t: CheckRun) -> None:
    """Compare the results of all queries at S = 1."""
    (q, k, v), frequencies = t.problem(6, 7, 4, 1)
    for _, out, allowed in results_of(t, (q, k, v), ways_to_call(t, frequencies, 1)):
        t.equal(out, np.broadcast_to(out[:1], out.shape), allowed)


@add_check
def mean_over_frequencies(t: CheckRun) -> None:
    """Reorder the frequencies, and repeat each of them; the result must not change."""
    arrays, options = t.problem(4, 6, 4, 6)
    omega = options["omega"]
    for _, out, allowed in results_of(t, arrays, [{"omega": omega}]):
        t.equal(t.call(*arrays, omega=np.flip(omega, -2).copy()), out, allowed)
        # A mean over each frequency twice is the same mean.
        t.equal(t.call(*arrays, omega=np.concatenate([omega, omega], -2)), out, allowed)


@add_check
def feature_products(t: CheckRun) -> None:
    """Take dot products of the features that the function returns for x and for y."""
    for d, samples in ((1, 1), (3, 4), (8, 33)):
        (x, y), options = t.problem(5, 5, d, samples)
        want, allowed = reference(t.adapter, (x, y), options)
        a, b = (t.call(z, **options) for z in (x, y))
        if a.shape != b.shape or a.shape[:-1] != x.shape[:-1]:
            raise Failure("features of shape (5, F)", f"shape {a.shape}")
        t.equal(np.sum(a * b, -1), want, allowed)


@add_check
def masked_keys_unseen(t: CheckRun) -> None:
    """Change masked keys and values; the result must not change."""
    seen = np.broadcast_to(np.arange(6) < 4, (5, 6)).copy()
    for size, edits in _sizes_of_keys(t):
        (q, k, v), frequencies = t.problem(5, 6, 4, 4, size=size)
        ways = comparable_ways(t, frequencies)
        for options, out, allowed in results_of(t, (q, k, v), ways, mask=seen):
            for edit in edits:
                edited = (np.concatenate([x[:4], t.normal(2, 4, size=edit)]) for x in (k, v))
                t.equal(t.call(q, *edited, **options), out, allowed + t.declared(options))


def _sizes_of_keys(t: CheckRun) -> list[tuple[float, tuple[float, ...]]]:
    """Return sizes of visible keys, and of hidden ones that may not matter."""
    if not stabilised(t.adapter):
        return [(1.0, (0.0, 1.0, 10.0))]
    return (
        [(1.0, (0.0, 1.0, 10.0)), (8.0, (0.0, 1.0))]
        if t.adapter.half
        else [(1.0, (0.0, 1.0, 3000.0)), (40.0, (0.0, 1.0, 300.0))]
    )


@add_check
def outside_of_windows(t: CheckRun) -> None:
    """Change keys long before the last query, also to huge numbers."""
    for n, m in ((6, 9), (130, 130)):
        n, m, d = t.fit(n, m, 4)
        (q, k, v), _ = t.problem(n, m, d)
        sides, plain = (2, 0), t.adapter.settled
        seen = t.adapter.visible(n, m, plain | {"window": sides})[-1]
        if np.all(seen):
            continue
        out = t.call(q, k, v, **plain, window=sides)[-1]
        allowed = 2 * allowed_error(t.adapter, (q, k, v), plain, out)
        k, v = k.copy(), v.copy()
        # Values so large that any weight on them shows.
        k[~seen], v[~seen] = 8 * k[~seen], 1e3
        t.equal(t.call(q, k, v, **plain, window=sides)[-1], out, allowed)


@add_check
def hidden_nonsense(t: CheckRun) -> None:
    """Put NaN, infinity and huge numbers into masked keys and values."""
    seen = np.broadcast_to(np.arange(6) < 4, (5, 6)).copy()
    (q, k, v), frequencies = t.problem(5, 6, 4, 4)
    # So large that its square overflows.
    huge = {"float64": 1e300, "float16": 6e4}.get(t.adapter["dtype"], 1e37)
    places = (1,) if t.adapter["hidden"] == "finite-values" else (1, 2)
    for options in comparable_ways(t, frequencies):
        out = t.call(q, k, v, **options, mask=seen)
        allowed = again(t, (q, k, v), options)
        for nonsense, which in product((huge, math.inf, math.nan), places):
            edited = [x.copy() for x in (q, k, v)]
            edited[which][4:] = nonsense
            got = t.call(*edited, **options, mask=seen)
            t.equal(got, out, allowed + t.declared(options | {"mask": seen}))


@add_check
def future_unseen(t: CheckRun) -> None:
    """Change later keys and values, then also later queries; earlier results must not change."""
    for size, edits in _sizes_of_keys(t):
        (q, k, v), frequencies = t.problem(9, 9, 4, 3, size=size)
        ways = comparable_ways(t, frequencies, 3)
        ways = ways[-1:] if t.adapter.has("proposals") else ways
        if t.adapter["feature_map"] == "relu":  # of queries that are 0 nothing is defined
            edits = tuple(edit for edit in edits if edit)
        for options, out, allowed in results_of(t, (q, k, v), ways, causal=True):
            for edit, first in product(edits, (8, 4)):
                later = (9 - first, 4)
                edited = (
                    np.concatenate([x[:first], t.normal(*later, size=edit)]) for x in (q, k, v)
                )
                got = t.call(*edited, **options)
                t.equal(got[:first], out[:first], allowed + t.declared(options))


@add_check
def visible_part(t: CheckRun) -> None:
    """Compare a query's result with plain attention to the keys that it sees, at the same seed."""
    (q, k, v), _ = t.problem(6, 6, 4, size=t.near if t.adapter.can("omega") else 1.0)
    for samples in (1, 5):
        options = t.options(samples)
        ways: list[dict[str, Any]] = [{"causal": True}] if t.adapter.can("causal") else []
        if t.adapter.can("mask"):
            ways.append({"mask": random_mask(t, 6, 6)})
        for way in ways:
            out = t.call(q, k, v, **options, **way)
            allowed = allowed_error(t.adapter, (q, k, v), options | way, out)
            # The same seed must give the same frequencies for any number of keys.
            for i, seen in enumerate(way.get("mask", np.tri(6, dtype=bool))):
                some = k[seen], v[seen]
                alone = allowed_error(t.adapter, (q[i : i + 1], *some), options, out[i])
                t.equal(t.call(q, *some, **options)[i], out[i], allowed + alone)
