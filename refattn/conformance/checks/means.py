"""Checks of what every mean of values does: its weights, orders, queries and heads apart."""

from __future__ import annotations

import numpy as np

from ..candidate.limits import for_heads
from ..candidate.samples import options_of_one_key
from .trials import (
    CheckRun,
    add_check,
    comparable,
    comparable_ways,
    compare_known,
    evaluated,
    same_within,
    stabilised,
    ways_to_call,
)


@add_check(
    "normalised", claim="a weighted mean of values: weights sum to 1, positive ones stay inside"
)
def weighted_mean(t: CheckRun) -> None:
    """Constant values come back, one key returns its value, equal keys their mean; linear in v."""
    low = t.adapter.half
    positive = t.adapter.has("nonnegative") and not t.adapter.waves
    for size in (0.5, 2.0, 8.0 if low else 30.0) if stabilised(t.adapter) else (0.5,):
        (q, k, v), frequencies = t.problem(5, 7, 4, 4, size=size)
        for options in ways_to_call(t, frequencies):
            allowed = same_within(t, (q, k, v), options)
            out = t.call(q, k, v, **options)
            if positive:
                lowest, highest = (np.broadcast_to(f(v, -2), out.shape) for f in (np.min, np.max))
                t.equal(out, np.clip(out, lowest, highest), allowed)
            t.equal(t.call(q, k, np.ones_like(v), **options), np.ones(q.shape), allowed)
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


@add_check("unordered-keys", claim="the order of keys does not matter", needs=evaluated)
def order_of_keys(t: CheckRun) -> None:
    """A permutation of keys and values."""
    (q, k, v), options = t.problem(4, 9, 4, 5)
    order = t.rng.permutation(9)
    out = t.call(q, k, v, **options)
    t.equal(t.call(q, k[order], v[order], **options), out, same_within(t, (q, k, v), options))


@add_check(
    "queries-apart",
    claim="each query has a result of its own",
    needs=lambda adapter: (
        comparable(adapter)
        and (
            not adapter.has("proposals")
            or (adapter.can("omega") and adapter["weighting"] in ("balance", "own"))
        )
    ),
)
def queries_apart(t: CheckRun) -> None:
    """Editing other queries, far away too, leaves a query's result."""
    (q, k, v), frequencies = t.problem(4, 6, 4, 4)
    ways = comparable_ways(t, frequencies)
    for options in ways[:1] if t.adapter.has("proposals") else ways:
        out = t.call(q, k, v, **options)
        allowed = same_within(t, (q, k, v), options)
        for size in (1.0, 8.0):
            edited = np.concatenate([q[:1], t.normal(3, 4, size=size)])
            t.equal(t.call(edited, k, v, **options)[:1], out[:1], allowed)


@add_check(
    claim="heads and members of a batch do not mix",
    needs=lambda adapter: comparable(adapter) and adapter.lead(2, 3) != (),
)
def heads_apart(t: CheckRun) -> None:
    """Editing one head leaves the others; with given frequencies each equals itself alone."""
    lead = t.adapter.lead(2, 3)
    (q, k, v), frequencies = t.problem(5, 6, 4, 4, lead=lead)
    for options in comparable_ways(t, frequencies):
        out = t.call(q, k, v, **options)
        allowed = same_within(t, (q, k, v), options)
        for index in np.ndindex(*lead):
            if "seed" not in options:
                alone = options | for_heads(t.adapter, options, index)
                compare_known(t, out[index], allowed, q[index], k[index], v[index], **alone)
            others = np.ones((*lead, 1, 1))
            others[index] = 0
            edited = (t.adapter.exact(x + others * t.normal(*x.shape)) for x in (q, k, v))
            t.equal(t.call(*edited, **options)[index], out[index], allowed)


@add_check(claim="each head uses the frequencies given for it", needs="omega omega_per_head")
def frequencies_of_heads(t: CheckRun) -> None:
    """Frequencies with the leading axes of queries."""
    arrays, options = t.problem(5, 6, 4, 4, lead=t.adapter.lead(2, 3))
    t.compare(*arrays, **options | t.of_heads(arrays, options))
