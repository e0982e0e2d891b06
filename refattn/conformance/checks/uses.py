"""Checks of real sizes and real uses: long sequences, many heads, any memory layout, one call after
another.

References are evaluated for some of the queries, so that a large case costs little more than the
candidate's own call. Cases come in the order of their cost, until the time is over; what was not
reached is said.
"""

from __future__ import annotations

import math
import time
from typing import Any, NamedTuple

import numpy as np

from ...arrays.library import Floats
from ..candidate.adapter import Adapter
from ..candidate.failures import Failure
from ..candidate.limits import Arrays, Keywords, for_queries
from ..truth.reference import engine, in_pairs, reference, rounding, terms
from .trials import (
    CheckRun,
    add_check,
    again,
    attends,
    comparable,
    comparable_ways,
    evaluated,
    stabilised,
)

_LARGE_SECONDS = {"quick": 6.0, "full": 60.0, "soak": 600.0}  # that large cases may take
_ROWS_COMPARED = 24  # queries of a large case that are compared


class _LargeSize(NamedTuple):
    """A large case."""

    n: int
    m: int
    d: int
    samples: int = 9
    lead: tuple[int, ...] = ()
    causal: bool = False

    def __str__(self) -> str:
        words = f"n = {self.n}, m = {self.m}, d = {self.d}, S = {self.samples}"
        heads = f", leading axes {self.lead}" if self.lead else ""
        return words + heads + (", causal" if self.causal else "")


# Past every power of two up to 8,192 by one, in each of the lengths; the costliest last.
_LARGE = (
    *(_LargeSize(3, 2**p + 1, 4) for p in range(7, 12)),
    *(_LargeSize(2**p + 1, 3, 4) for p in range(7, 12)),
    *(_LargeSize(5, 6, 2**p + 1, 3) for p in range(4, 8)),
    _LargeSize(5, 7, 128),
    _LargeSize(5, 7, 256),
    *(_LargeSize(5, 6, 4, 2**p + 1) for p in range(5, 11)),
    _LargeSize(5, 6, 4, 2048),
    _LargeSize(9, 17, 8, 5, (5, 3)),
    _LargeSize(5, 6, 4, 5, (2, 13)),
    _LargeSize(5, 6, 4, 5, (33,)),
    _LargeSize(5, 5, 4, 1025, (), True),
    _LargeSize(5, 5, 257, 3, (), True),
    _LargeSize(70, 70, 64, 65, (5,)),
    *(_LargeSize(2**p + 1, 2**p + 1, 4, 5, (), True) for p in range(7, 11)),
    _LargeSize(700, 700, 64, 129, (2,)),
    _LargeSize(2049, 2049, 8, 17),
    _LargeSize(2049, 2049, 8, 17, (), True),
    _LargeSize(3, 8193, 4),
    _LargeSize(8193, 3, 4),
    _LargeSize(4097, 4097, 4, 5, (), True),
    _LargeSize(8192, 8192, 2, 3),
    _LargeSize(8192, 8192, 2, 3, (), True),
)


def _edge_rows(n: int) -> Floats:
    """Choose some queries: the first and last, and those about powers of two."""
    edges = {0, 1, n - 2, n - 1}
    for p in range(4, 14):
        edges |= {2**p - 1, 2**p, 2**p + 1}
    known = sorted(i for i in edges if 0 <= i < n)
    return np.array([*known[:: max(1, len(known) // _ROWS_COMPARED)], n - 1])


def _rows_alone(adapter: Adapter) -> bool:
    """Return whether some of the queries can be evaluated alone."""
    alone = not adapter.has("proposals") or adapter["weighting"] in ("balance", "own")
    return evaluated(adapter) and attends(adapter) and adapter.has("queries-apart") and alone


@add_check(
    claim="right at real sizes: long sequences, large heads, many features, many heads",
    needs=_rows_alone,
)
def large_sizes(t: CheckRun) -> None:
    """Lengths past every power of two by one, up to what the time allows."""
    end, rate = time.monotonic() + _LARGE_SECONDS[t.level], 0.0
    causal = t.adapter.masks_future
    plain = not t.adapter["causal_only"]
    cases = [size for size in _LARGE if (causal if size.causal else plain)]
    for i, size in enumerate(cases):
        pairs = size.n * size.m * math.prod(size.lead)
        began = time.monotonic()
        if began + rate * pairs > end:  # as if time grew with the number of pairs
            t.untried.append(f"{size} and {len(cases) - i - 1} larger ones, for want of time")
            break
        _compare_rows(t, size)
        if pairs > 2**16:
            rate = (time.monotonic() - began) / pairs


def _compare_rows(t: CheckRun, size: _LargeSize) -> None:
    """Compare some rows of a large case with the reference, and say which of all are wrong."""
    samples = min(size.samples, 65) if t.adapter.has("proposals") else size.samples
    if t.adapter.has("per-query"):
        samples = min(samples, max(2, 2**16 // size.n))
    lead = t.adapter.lead(*size.lead)
    n, m, d = t.fit(size.n, size.m, size.d)
    size = size._replace(n=n, m=m, d=d)
    arrays, options = t.problem(size.n, size.m, size.d, samples, lead=lead)
    asked = options | ({"causal": True} if size.causal else {})
    got = t.call(*arrays, **asked)
    rows = _edge_rows(size.n)
    some, chosen = _take_rows(t.adapter, arrays, options, rows)
    if size.causal:
        chosen["mask"] = np.tri(size.n, size.m, size.m - size.n, dtype=bool)[rows]
    want, allowed = reference(t.adapter, some, chosen)
    whole = in_pairs(t.adapter, arrays, asked)
    if whole is not None:
        want, rows = whole, np.arange(size.n)
    allowed += terms(t.adapter, max(size.m, samples, size.d)) * float(np.max(np.abs(arrays[2])))
    try:
        t.equal(got[..., rows, :], want, allowed)
    except Failure as failure:
        t.case = t.case._replace(want=None) if t.case is not None else None
        raise Failure(
            f"{failure.expected} (row {rows[_worst_row(got[..., rows, :], want)]}, {size})",
            f"{failure.got}; {_describe_wrong(t, got, arrays, asked, allowed)}",
        ) from None


def _take_rows(
    adapter: Adapter, arrays: Arrays, options: Keywords, rows: Floats
) -> tuple[Arrays, Keywords]:
    """Take the same problem for some of the queries."""
    q, *rest = arrays
    return (q[..., rows, :], *rest), options | for_queries(adapter, options, rows)


def _worst_row(got: Floats, want: Any) -> int:
    """Return the row that is furthest off."""
    error = np.abs(np.asarray(got, np.longdouble) - want)
    return int(np.unravel_index(int(np.argmax(error)), error.shape)[-2])


def _describe_wrong(
    t: CheckRun, got: Floats, arrays: Arrays, options: Keywords, allowed: float
) -> str:
    """Describe wrong tokens, heads and columns, by the package's evaluation in float64."""
    try:
        right = engine(t.adapter, arrays, options)
    except Exception:  # an estimator from elsewhere may not take all of this
        return "which rows are wrong is not known"
    return describe_places(np.abs(got - right) > 2 * allowed)


def describe_places(wrong: Any) -> str:
    """Describe which tokens, heads and columns are wrong."""
    axes = ((-2, "token"), (-3, "head"), (-1, "column"))
    return ", ".join(words for axis, name in axes if (words := _describe_axis(wrong, axis, name)))


def _describe_axis(wrong: Any, axis: int, name: str) -> str:
    """Return the first wrong index along an axis, how many there are, and their period."""
    if wrong.ndim < -axis:
        return ""
    others = tuple(i for i in range(wrong.ndim) if i != wrong.ndim + axis)
    index = np.flatnonzero(np.any(wrong, others))
    total = wrong.shape[axis]
    if not len(index):
        return ""
    if len(index) == total:
        return f"every {name}"
    steps = np.diff(index)
    words = f"{name}s from {index[0]}" if len(index) > 1 else f"{name} {index[0]}"
    period = steps[0] if len(steps) and np.all(steps == steps[0]) else 1
    if period > 1 and index[0] < period and index[-1] + period >= total:
        words += f", every {period}th"
    elif len(index) > 1:
        words += f" to {index[-1]}"
    return f"{words} ({len(index)} of {total})"


@add_check("pairs", claim="estimates of many features, and of long vectors", needs=evaluated)
def large_estimates(t: CheckRun) -> None:
    """d and S past powers of two by one."""
    for d, samples in ((129, 3), (256, 3), (257, 3), (4, 257), (4, 513), (4, 1025), (4, 2049)):
        arrays, options = t.problem(*t.fit(3, 3, d), samples)
        t.compare(*arrays, **options)
    arrays, options = t.problem(*t.fit(2049, 2049, 4), 3)
    t.compare(*arrays, **options)


@add_check(
    "rows",
    claim="moments of many rows are as right as those of few",
    needs=lambda adapter: adapter.eps < 1e-4,
)
def many_rows(t: CheckRun) -> None:
    """20,000 rows, and past powers of two by one."""
    for shape in ((4097, 3), (8193, 2), (20_000, 8), (*t.adapter.lead(2), 9000, 3)):
        t.compare(t.normal(*shape))


@add_check(
    "exponential",
    claim="heads of very different size do not share a maximum",
    needs=lambda x: evaluated(x) and attends(x) and stabilised(x) and x.lead(3) != (),
)
def heads_of_other_size(t: CheckRun) -> None:
    """Queries and keys of heads that differ by factors of thousands."""
    lead = t.adapter.lead(3)
    (q, k, v), options = t.problem(5, 6, 4, 5, lead=lead)
    for sizes in ((1.0, 2.0**-8, 8.0), (8.0 if t.adapter.half else 256.0, 1.0, 2.0**-8)):
        factor = np.array(sizes)[:, None, None]
        t.compare(t.adapter.exact(q * factor), t.adapter.exact(k * factor), v, **options)


@add_check(
    claim="the layout of arrays in memory does not matter",
    needs=lambda adapter: (
        (comparable(adapter) or not attends(adapter)) and adapter["library"] in ("numpy", "torch")
    ),
)
def memory_layouts(t: CheckRun) -> None:
    """Transposed, sliced and read-only arrays, with heads beside numbers, and backwards."""
    arrays, frequencies = t.problem(5, 6, 4, 4, lead=t.adapter.lead(2, 3))
    for options in comparable_ways(t, frequencies):
        if t.adapter.can("mask") and attends(t.adapter):
            options = options | {"mask": np.arange(5)[:, None] >= np.arange(6) - 2}
        out = t.call(*arrays, **options)
        allowed = again(t, arrays, options)
        given_arrays = [name for name, x in options.items() if isinstance(x, np.ndarray)]
        names = [*t.adapter.record.arrays, *given_arrays]
        backwards = ["reversed"] if t.adapter["library"] == "numpy" else []
        for layout in ("transposed", "sliced", "read-only", "heads inside", *backwards):
            for some in (names, *([name] for name in names)):  # all alike, and each alone
                got = t.call(*arrays, **options, memory=dict.fromkeys(some, layout))
                t.equal(got, out, (allowed, allowed) if isinstance(out, tuple) else allowed)


@add_check(claim="a result stays as it is when other calls are made", needs=comparable)
def calls_apart(t: CheckRun) -> None:
    """Calls of other sizes in between, and the first again."""
    for causal in (False, True) if t.adapter.can("causal") else (False,):
        seen: dict[str, Any] = {"causal": True} if causal else {}
        n, m, d = t.fit(6, 7, 4)
        first, frequencies = t.problem(n, m, d, 4)
        ways = comparable_ways(t, frequencies)
        for options in ways[-1:] if causal and t.adapter.has("proposals") else ways:
            kept = t.call(*first, **options, **seen)
            before, allowed = np.array(kept), again(t, first, options | seen)
            for n, m, d, samples in ((6, 7, 4, 4), (6, 9, 4, 3), (4, 9, 4, 7), (6, 6, 5, 4)):
                n, m, d = t.fit(n, m, d)
                count = samples if t.adapter.has("unlimited-size") else min(samples, n, m)
                other, more = t.problem(n, m, d, count)
                if "seed" in options:
                    more = options | t.adapter.record.sized(count)
                t.call(*other, **more, **seen)
            t.case = None
            t.equal(kept, before, 0.0)
            t.equal(t.call(*first, **options, **seen), before, allowed)


@add_check(
    claim="NaN, infinity and huge numbers in what is masked have no effect",
    needs=lambda adapter: (
        comparable(adapter) and adapter.can("mask") and adapter["hidden"] != "finite"
    ),
)
def hidden_nonsense(t: CheckRun) -> None:
    """In hidden keys and hidden values."""
    seen = np.broadcast_to(np.arange(6) < 4, (5, 6)).copy()
    (q, k, v), frequencies = t.problem(5, 6, 4, 4)
    huge = {"float64": 1e300, "float16": 6e4}.get(t.adapter["dtype"], 1e37)
    for options in comparable_ways(t, frequencies):
        out = t.call(q, k, v, **options, mask=seen)
        allowed = again(t, (q, k, v), options)
        for nonsense in (huge, math.inf, math.nan):
            for which in (1,) if t.adapter["hidden"] == "finite-values" else (1, 2):
                edited = [x.copy() for x in (q, k, v)]
                edited[which][4:] = nonsense
                got = t.call(*edited, **options, mask=seen)
                t.equal(got, out, allowed + t.declared(options | {"mask": seen}))


@add_check(
    claim="sums of thousands of terms are not added in half precision",
    needs=lambda x: (
        _rows_alone(x)
        and x.half
        and not x.has("per-query", "proposals")
        and x.drawn_keyword != "indices"  # of all keys only few are added
    ),
)
def long_half_sums(t: CheckRun) -> None:
    """8,192 equal keys, of which the values of the first half are 1 and the others 0."""
    (q, k, v), options = t.problem(2, 1, 4, 3, size=0.25)
    many = 8192
    keys = np.repeat(k, many, 0)
    values = np.repeat(np.ones_like(v), many, 0)
    values[many // 2 :] = 0.0
    got = t.call(q, keys, values, **options)
    allowed = 2 * rounding(t.adapter, (q, k, np.ones_like(v)), options, got) + terms(
        t.adapter, many
    )
    t.equal(got, np.full(got.shape, 0.5), allowed)
