"""Checks of real sizes: long sequences, many heads and features, many rows.

References are evaluated for some of the queries, so that a large case costs little more than the
candidate's own call. Cases come in the order of their cost, until the time is over; the report
names those that were not reached.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from ....arrays.library import Floats
from ..candidate.adapter import Adapter
from ..candidate.failures import Failure
from ..candidate.limits import Arrays, Keywords, for_queries
from ..truth.allowed import in_pairs, of_function, reference, rounding, terms
from .cases import growing
from .trials import CheckRun, add_check, add_condition

_LARGE_SECONDS = {"quick": 6.0, "full": 60.0}  # that large cases may take
_ROWS_COMPARED = 24  # queries of a large case that are compared


class _LargeSize(NamedTuple):
    n: int
    m: int
    d: int
    samples: int = 9
    lead: tuple[int, ...] = ()
    causal: bool = False
    groups: int | None = None

    @property
    def pairs(self) -> int:
        """How many pairs of queries and keys there are."""
        return self.n * self.m * math.prod(self.lead)

    def __str__(self) -> str:
        words = f"n = {self.n}, m = {self.m}, d = {self.d}"
        words += f", S = {self.samples}" if self.samples else ""
        heads = f", leading axes {self.lead}" if self.lead else ""
        heads += f", {self.groups} key heads" if self.groups else ""
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
    _LargeSize(5, 6, 4, 5, (67, 2)),
    _LargeSize(5, 5, 4, 5, (19, 2), True),
    _LargeSize(3, 4, 4, 5, (2, 67)),
    _LargeSize(3, 1100, 4, 5, (2, 6), groups=2),
    _LargeSize(3, 2100, 4, 5, (2, 4), groups=1),
    _LargeSize(5, 5, 4, 1025, (), True),
    _LargeSize(5, 5, 257, 3, (), True),
    _LargeSize(70, 70, 64, 65, (5,)),
    *(_LargeSize(2**p + 1, 2**p + 1, 4, 5, (), True) for p in range(7, 11)),
    _LargeSize(1100, 1100, 4, 5, (4,), True, groups=2),
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


@add_condition
def weighs_alone(adapter: Adapter) -> bool:
    """Return whether a query weighs keys whatever the other queries are."""
    return not adapter.has("proposals") or adapter["weighting"] in ("balance", "own")


@add_condition
def rows_alone(adapter: Adapter) -> bool:
    """Return whether some of the queries can be evaluated alone."""
    return adapter.has("queries-apart") and weighs_alone(adapter)


@add_check
def large_sizes(t: CheckRun) -> None:
    """Try lengths that are one more than a power of two, as far as time allows."""
    causal = t.adapter.masks_future
    plain = not t.adapter["causal_only"]
    cases = [
        size
        for size in _LARGE
        if (causal if size.causal else plain) and (t.adapter.grouped or not size.groups)
    ]
    for size in growing(t, cases, _LARGE_SECONDS, "{}{}", least=2**16):
        _compare_rows(t, size)


def _compare_rows(t: CheckRun, size: _LargeSize) -> None:
    """Compare some rows of a large case with the reference, and say which of all are wrong."""
    samples = min(size.samples, 65) if t.adapter.has("proposals") else size.samples
    if t.adapter.has("per-query"):
        # Each query has frequencies of its own: fewer of them for many queries.
        samples = min(samples, max(2, 2**16 // size.n))
    lead = t.adapter.lead(*size.lead)
    n, m, d = t.fit(size.n, size.m, size.d)
    size = size._replace(n=n, m=m, d=d, samples=samples if t.adapter.record.size else 0)
    # A layout without heads has no groups.
    groups = size.groups if len(lead) == len(size.lead) else None
    arrays, options = t.problem(n, m, d, samples, lead=lead, groups=groups)
    asked = options | ({"causal": True} if size.causal else {})
    got = t.call(*arrays, **asked)
    rows = _edge_rows(n)
    q, k, v = arrays
    chosen = options | for_queries(t.adapter, options, rows)
    if size.causal:
        # A few rows of causal attention are rows with a mask.
        chosen["mask"] = np.tri(n, m, m - n, dtype=bool)[rows]
    want, allowed = reference(t.adapter, (q[..., rows, :], k, v), chosen)
    # Where the package has proven digits at any size, all rows are compared.
    whole = in_pairs(t.adapter, arrays, asked)
    if whole is not None:
        want, rows = whole, np.arange(n)
    allowed += terms(t.adapter, max(m, samples, d)) * float(np.max(np.abs(v)))
    try:
        t.equal(got[..., rows, :], want, allowed)
    except Failure as failure:
        t.case = t.case._replace(want=None) if t.case is not None else None
        error = np.abs(np.asarray(got[..., rows, :], np.longdouble) - want)
        worst = rows[np.unravel_index(int(np.argmax(error)), error.shape)[-2]]
        raise Failure(
            f"{failure.expected} (row {worst}, {size})",
            f"{failure.got}; {_describe_wrong(t, got, arrays, asked, allowed)}",
        ) from None


def _describe_wrong(
    t: CheckRun, got: Floats, arrays: Arrays, options: Keywords, allowed: float
) -> str:
    """Describe wrong tokens, heads and columns, by the package's evaluation in float64."""
    try:
        # Fast, and near enough to see which rows are as wrong as that.
        right = of_function(t.adapter, t.adapter.record.fn, arrays, options, np.float64)
    except Exception:  # an estimator from elsewhere may not take all of this
        return "the wrong rows are not known"
    return describe_places(np.abs(got - right) > 2 * allowed)


def describe_places(wrong: Any, tokens: int = -2) -> str:
    """Describe which tokens, heads and columns are wrong, by the axis of tokens; 0 for none."""
    axes = ((tokens, "token"), (tokens - 1, "head"), (tokens + 1, "column"))
    return ", ".join(words for axis, name in axes if (words := _describe_axis(wrong, axis, name)))


def _describe_axis(wrong: Any, axis: int, name: str) -> str:
    """Return the first wrong index along an axis, how many there are, and their period."""
    if not 0 < -axis <= wrong.ndim:
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


@add_check
def large_estimates(t: CheckRun) -> None:
    """Try d and S that are one more than a power of two."""
    for d, samples in ((129, 3), (256, 3), (257, 3), (4, 257), (4, 513), (4, 1025), (4, 2049)):
        t.compare_problem(*t.fit(3, 3, d), samples)
    t.compare_problem(*t.fit(2049, 2049, 4), 3)


@add_check
def many_rows(t: CheckRun) -> None:
    """Try 20,000 rows, and numbers of rows that are one more than a power of two."""
    for shape in ((4097, 3), (8193, 2), (20_000, 8), (*t.adapter.lead(2), 9000, 3)):
        t.compare(t.normal(*shape))


@add_check
def long_half_sums(t: CheckRun) -> None:
    """Try 8,192 equal keys; the values are 1 in the first half and 0 in the second."""
    (q, k, v), options = t.problem(2, 1, 4, 3, size=0.25)
    many = 8192
    keys = np.repeat(k, many, 0)
    values = np.repeat(np.ones_like(v), many, 0)
    # A sum of ones stops at 2,048 in float16 and at 256 in bfloat16: then the mean is not 1/2.
    values[many // 2 :] = 0.0
    got = t.call(q, keys, values, **options)
    allowed = 2 * rounding(t.adapter, (q, k, np.ones_like(v)), options, got) + terms(
        t.adapter, many
    )
    t.equal(got, np.full(got.shape, 0.5), allowed)
