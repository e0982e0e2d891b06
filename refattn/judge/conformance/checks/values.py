"""Checks number by number against the reference: ordinary, large and extreme inputs."""

from __future__ import annotations

import math

import numpy as np

from ...rounding.problems import pose_arrays
from ...verification.findings import Numbers, as_cause
from ...verification.judging import judge
from ..candidate.adapter import Adapter
from ..candidate.failures import Failure
from ..candidate.limits import Keywords
from ..truth.allowed import FEATURE_MAPS
from .trials import CheckRun, add_check, add_condition

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


@add_check
def reference_values(t: CheckRun) -> None:
    """Try many shapes, keys far from the origin, and frequencies of unequal lengths."""
    for n, m, d, samples, lead in _SHAPES:
        rows = max(n, 2) if t.adapter.has("rows") else n
        rows, m, d = t.fit(rows, m, d)
        if t.adapter["causal_only"]:  # of which queries are asked one by one
            rows = min(rows, 2 if m > 100 else 8)
        arrays, options = t.problem(rows, m, d, samples, lead=t.adapter.lead(*lead))
        # Long sums are not compared in 16 bits: see `CONTRACT`.
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
        # Features of one coordinate are 0 in queries and keys, those of the others are not.
        signs = np.array([1.0, -1.0, 1.0])
        (q, k, v), _ = t.problem(6, 9, 3)
        t.compare(q * signs, k * signs[::-1], v)


@add_check
def value_length(t: CheckRun) -> None:
    """Try d_v = 1, and d_v larger than d."""
    for d_v in (1, 7, 20):
        t.compare_problem(4, 5, 3, 4, d_v=d_v)


@add_check
def large_logits(t: CheckRun) -> None:
    """Try exponents of several tens."""
    for size in (2.0, 4.0):
        t.compare_problem(6, 8, 4, 5, size=size)


@add_check
def extreme_logits(t: CheckRun) -> None:
    """Try exponents of thousands, positive and negative, and rows that have only negative ones.

    For exact attention in float32 and float64, exponents go down to -3e5.
    """
    for size in (10.0, 16.0) if t.adapter.half else (10.0, 25.0, 70.0):
        (q, k, v), options = t.problem(5, 6, 2, 4, size=size)
        t.compare(q, k, v, **options)
        # All scores negative: a maximum that starts at 0 is wrong here.
        q, k = -np.abs(q), np.abs(k)
        t.compare(q, k, v, **options)
        t.compare(-q, k, v, **options)
    if t.adapter.has("exact") and not t.adapter.half:
        # All scores far below numbers that stand for minus infinity in halves.
        for size in (7e4, 3e5):
            (q, k, v), _ = t.problem(5, 6, 2)
            far = math.sqrt(size / 2) / t.adapter.root(2)
            t.compare(t.adapter.exact(q - far), t.adapter.exact(k + far), v)


@add_check
def heads_of_other_size(t: CheckRun) -> None:
    """Try heads whose queries and keys differ by factors of thousands."""
    (q, k, v), options = t.problem(5, 6, 4, 5, lead=t.adapter.lead(3))
    for sizes in ((1.0, 2.0**-8, 8.0), (8.0 if t.adapter.half else 256.0, 1.0, 2.0**-8)):
        factor = np.array(sizes)[:, None, None]
        t.compare(t.adapter.exact(q * factor), t.adapter.exact(k * factor), v, **options)


@add_check
def extreme_features(t: CheckRun) -> None:
    """Try entries of -8 to -60 (elu + 1 falls to 1e-26), and above 709, where exp overflows."""
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


@add_check
def frequencies_of_heads(t: CheckRun) -> None:
    """Pass frequencies with the leading axes of the queries."""
    t.compare_problem(5, 6, 4, 4, lead=t.adapter.lead(2, 3), own=True)


@add_check
def large_mean(t: CheckRun) -> None:
    """Try a mean of many times the spread, constant columns, and few rows: two, or fewer than d."""
    offset = {"float64": 1e8, "float32": 1e4}.get(t.adapter["dtype"], 16.0)
    for n, d in ((2, 1), (2, 3), (5, 2), (50, 3), (1000, 4)):
        # Whole numbers: exact beside so large a mean.
        steps = t.rng.integers(-8, 9, (n, d)) * 1.0
        t.compare(t.adapter.exact(offset + steps))
        steps[:, 0] = 0.0
        t.compare(t.adapter.exact(offset + steps))


@add_check
def batches_of_rows(t: CheckRun) -> None:
    """Try rows with leading axes."""
    for lead in t.adapter.lead(3), t.adapter.lead(2, 3):
        x = t.normal(*lead, 7, 3)
        t.compare(t.adapter.exact(x + np.arange(math.prod(lead)).reshape(*lead, 1, 1)))


_ORDINARY_SIZES = (191, 191, 32)  # queries and keys, a prime: multiples of no tile, and coordinates
_ALPHA = 1e-9  # of any statement: nothing beside the level of a run
_EXACT_PROFILES = ("math", "serial")
_LARGE_Z = 8.0  # |z| that no correct kernel has among so many elements


@add_condition
def errors_have_law(adapter: Adapter) -> bool:
    """Return whether errors have a law: no epsilon, features that are not signed.

    In half precision features are rounded in more ways than profiles have.
    """
    of_features = adapter.has("random-features") and not adapter.waves
    return (
        adapter["dtype"] != "float64"
        and not adapter["epsilon"]
        and not adapter["causal_only"]
        and (
            adapter.has("exact")
            or (adapter["dtype"] == "float32" and (adapter.has("feature-map") or of_features))
        )
    )


@add_check
def rounding_errors(t: CheckRun) -> None:
    """Test errors divided by their standard deviations, and whether they look like known bugs."""
    dtype = t.adapter["dtype"]
    n, m, d = t.fit(*_ORDINARY_SIZES)
    arrays, options = t.problem(n, m, d, 32, lead=t.adapter.lead(3))
    for causal in (False, True) if t.adapter.can("causal") else (False,):
        conventions: Keywords = {"causal": causal, "scale": t.adapter.root(d) ** 2}
        if t.adapter.has("feature-map"):
            conventions = {"causal": causal, "feature_map": FEATURE_MAPS[t.adapter["feature_map"]]}
        elif t.adapter.has("random-features"):
            conventions["features"] = t.adapter["features"]
        q, k, v = arrays
        problem = pose_arrays(q, k, v, **conventions, **options)
        asked: Keywords = options | ({"causal": True} if causal else {})
        got = t.call(*arrays, **asked)
        numbers = Numbers(got.__getitem__, dtype)
        profiles = None if dtype in ("float16", "bfloat16") else _EXACT_PROFILES
        judged = judge(problem, numbers, dtype, profiles, _ALPHA)
        t.error = max(t.error or 0.0, min(1.0, judged.z.largest / _LARGE_Z))
        if judged.verdict == "FAIL":
            causes = [x._replace(text=as_cause(x.text)) for x in judged.suspects[:1]]
            # Without a cause the test that failed is named.
            words = [x.text for x in causes] or [
                f"{x.name} {x.statistic:.3g}, {x.where}" for x in judged.tests[:1]
            ]
            raise Failure(
                f"errors of a correct kernel in {dtype} that adds in float32",
                f"z of root mean square {judged.z.rms:.3g}, largest {judged.z.largest:.3g}; "
                f"{words[0]}",
            )
