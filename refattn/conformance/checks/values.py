"""Checks number by number against the reference: ordinary, large and extreme inputs."""

from __future__ import annotations

import math

import numpy as np

from .trials import CheckRun, add_check, evaluated, evaluates_with, stabilised

_SHAPES = (  # n, m, d, samples, leading axes
    (1, 1, 1, 1, ()),
    (2, 2, 2, 2, ()),
    (3, 5, 4, 3, ()),
    (7, 4, 3, 16, (2,)),
    (5, 6, 8, 5, (2, 3)),
    (33, 33, 16, 65, ()),
    (2, 1100, 8, 130, ()),
    (300, 257, 4, 9, ()),
    (1, 5, 64, 7, (2, 3)),
    (4, 6, 128, 3, ()),
    (3, 4, 4, 3, (2, 1, 3)),
)


@add_check(claim="agrees with the reference on ordinary numbers", needs=evaluated)
def reference_values(t: CheckRun) -> None:
    """Cases of many shapes, then keys off the origin, and unequal frequencies."""
    for n, m, d, samples, lead in _SHAPES:
        rows = max(n, 2) if t.adapter.has("rows") else n
        rows, m, d = t.fit(rows, m, d)
        if t.adapter["causal_only"]:  # of which queries are asked one by one
            rows = min(rows, 2 if m > 100 else 8)
        arrays, options = t.problem(rows, m, d, samples, lead=t.adapter.lead(*lead))
        if m <= 100 or t.adapter.eps < 1e-4:
            t.compare(*arrays, **options)
    for size, shift in ((0.3, 1.0), (1.5, 0.0), (1.0, -1.0)):
        arrays, options = t.problem(6, 9, 5, 7, size=size, shift=shift)
        if "omega" in options:
            options["omega"] = t.adapter.exact(options["omega"] * np.linspace(0, 2, 5))
        t.compare(*arrays, **options)
    if t.adapter.has("rows") and t.adapter.eps < 1e-4:
        t.compare(t.normal(3000, 20))
        t.compare(t.normal(40, 193))
    if t.adapter["feature_map"] == "relu":
        signs = np.array([1.0, -1.0, 1.0])
        (q, k, v), _ = t.problem(6, 9, 3)
        t.compare(q * signs, k * signs[::-1], v)


@add_check(
    claim="values may have another length than keys",
    needs=lambda adapter: evaluates_with()(adapter) and not adapter["same_value_size"],
)
def value_length(t: CheckRun) -> None:
    """d_v of 1 and of more than d."""
    for d_v in (1, 7, 20):
        arrays, options = t.problem(4, 5, 3, 4, d_v=d_v)
        t.compare(*arrays, **options)


@add_check(
    "exponential", claim="right where unstabilised exponentials lose digits", needs=evaluated
)
def large_logits(t: CheckRun) -> None:
    """Exponents of some tens."""
    for size in (2.0, 4.0):
        arrays, options = t.problem(6, 8, 4, 5, size=size)
        t.compare(*arrays, **options)


@add_check(
    "exponential",
    "normalised",
    claim="right where exponentials overflow or underflow, in whatever order they are taken",
    needs=lambda adapter: evaluated(adapter) and stabilised(adapter),
)
def extreme_logits(t: CheckRun) -> None:
    """Exponents of thousands of either sign, and rows in which all of them are very negative."""
    for size in (10.0, 16.0) if t.adapter.half else (10.0, 25.0, 70.0):
        arrays, options = t.problem(5, 6, 2, 4, size=size)
        t.compare(*arrays, **options)
        q, k, v = arrays
        q = -np.abs(q)
        k = np.abs(k)
        t.compare(q, k, v, **options)
        t.compare(-q, k, v, **options)


@add_check(
    "feature-map", claim="right where features are tiny or large: the ratio does not see their size"
)
def extreme_features(t: CheckRun) -> None:
    """Entries from -8 to -60 make elu + 1 features down to 1e-26; those above 709 overflow exp."""
    low = t.adapter.half
    (q, k, v), _ = t.problem(4, 5, 3)
    if t.adapter["feature_map"] == "relu":
        t.compare(np.abs(q) * 2.0**-6, np.abs(k) * 2.0**-6, v)
        return
    for shift in (-2.0,) if low else (-4.0, -8.0, -16.0, -30.0):
        tiny_q, tiny_k = (t.adapter.exact(shift - np.abs(x)) for x in (q, k))
        t.compare(tiny_q, tiny_k, v)
        t.compare(np.abs(q), tiny_k, v)
    large = 20.0 if low else 800.0
    t.compare(q + large, t.adapter.exact(k * large), v)


@add_check("rows", claim="mean and covariance do not lose digits to a large mean")
def large_mean(t: CheckRun) -> None:
    """Data whose mean is many times their spread, constant columns, two rows, N below d."""
    offset = {"float64": 1e8, "float32": 1e4}.get(t.adapter["dtype"], 16.0)
    for n, d in ((2, 1), (2, 3), (5, 2), (50, 3), (1000, 4)):
        steps = t.rng.integers(-8, 9, (n, d)) * 1.0
        t.compare(t.adapter.exact(offset + steps))
        steps[:, 0] = 0.0
        t.compare(t.adapter.exact(offset + steps))


@add_check("rows", claim="each member of a batch has its own moments")
def batches_of_rows(t: CheckRun) -> None:
    """Leading axes."""
    for lead in t.adapter.lead(3), t.adapter.lead(2, 3):
        x = t.normal(*lead, 7, 3)
        t.compare(t.adapter.exact(x + np.arange(math.prod(lead)).reshape(*lead, 1, 1)))
