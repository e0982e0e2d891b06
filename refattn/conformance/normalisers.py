"""Checks of log normalisers, by which results over parts of the keys are merged."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from .._kernel import Attended, merge
from ..attention import attend
from ..gradients import vjp
from .adapter import Adapter
from .checks import Trial, attends, check
from .failures import Failure
from .reference import CONTRACT, largest_exponent, of_function, pulled_rounding, terms, tolerance

__all__: list[str] = []

Floats = npt.NDArray[Any]


def _normalised(adapter: Adapter) -> bool:
    return attends(adapter) and adapter.can("lse")


def _compare(t: Trial, arrays: tuple[Floats, ...], **options: Any) -> None:
    """Compare output and log normalisers with those of the formula."""
    options = t.adapter.settled | options
    out, lse = t.call(*arrays, **options, return_lse=True)
    want = of_function(t.adapter, attend, arrays, options)
    unit = CONTRACT[t.adapter["dtype"]] * t.adapter.eps
    t.equal(out, want.out, tolerance(t.adapter, arrays, options, want.out))
    size = 1 + float(np.max(np.abs(want.lse), where=np.isfinite(want.lse), initial=0.0))
    allowed = unit * (1 + largest_exponent(t.adapter, arrays, options))
    allowed += terms(t.adapter, arrays[1].shape[-2]) * size  # keys may be added one by one
    t.equal(lse, want.lse, allowed, "lse")


@check("exact", claim="lse is the log of the sum of e^score", needs=_normalised)
def log_normalisers(t: Trial) -> None:
    """Without and with leading axes, of what is seen only, and at large scores."""
    uses: list[dict[str, Any]] = [{}]
    n, m, d = t.fit(5, 8, 4)
    if t.adapter.can("mask"):
        uses.append({"mask": (np.arange(n)[:, None] + np.arange(m)) % 3 > 0})
    if t.adapter.can("causal"):
        uses.append({"causal": True})
    options = {"window": (2, 1), "softcap": 1.0, "bias": t.normal(n, m)}
    uses += [{name: x} for name, x in options.items() if t.adapter.can(name)]
    for use in uses:
        for lead in ((), t.adapter.lead(2, 3)):
            _compare(t, t.problem(n, m, d, lead=lead)[0], **use)
    low = t.adapter["dtype"] in ("float16", "bfloat16")
    for size in (4.0, 10.0) if low else (4.0, 40.0):
        _compare(t, t.problem(n, m, d, size=size)[0])
    if t.adapter.can("gqa"):
        _compare(t, t.problem(n, m, d, lead=t.adapter.lead(2, 4), groups=2)[0])
    n, m, d = t.fit(65, 300, 8)
    _compare(t, t.problem(n, m, d)[0])


@check(
    "exact",
    claim="lse of a query that sees no key is -inf",
    needs=lambda adapter: (
        _normalised(adapter) and adapter.can("mask") and adapter["empty_rows"] == "zero"
    ),
)
def normaliser_without_keys(t: Trial) -> None:
    """So that what it is merged with stays as it is."""
    n, m, d = t.fit(4, 6, 4)
    arrays, _ = t.problem(n, m, d)
    mask = np.ones((n, m), dtype=bool)
    mask[1] = False
    _, lse = t.adapter(*arrays, mask=mask, return_lse=True, **t.adapter.settled)
    if lse[1] != -math.inf:
        raise Failure("an lse of -inf", f"{lse[1]}")
    t.error = 0.0


@check("exact", claim="results over parts of the keys merge", needs=_normalised)
def merged_parts(t: Trial) -> None:
    """Two parts and three, of sizes that differ, with scores far apart."""
    if t.adapter["causal_only"]:
        t.untried.append("parts of keys, which are not causal")
        return
    for size in (1.0, 4.0):
        n, m, d = t.fit(5, 12, 4)
        (q, k, v), _ = t.problem(n, m, d, size=size)
        whole = t.call(q, k, v, return_lse=True)
        for cuts in ((m // 3,), (m // 4, m // 2)):
            parts = [
                Attended(*t.call(q, *part, return_lse=True))
                for part in zip(np.split(k, cuts, -2), np.split(v, cuts, -2), strict=True)
            ]
            found = parts[0]
            for part in parts[1:]:
                found = merge(found, part)
            allowed = (1 + len(parts)) * tolerance(t.adapter, (q, k, v), {}, whole[0])
            t.equal(found.out, whole[0], allowed)


@check(
    "exact",
    claim="gradients of lse are the weights",
    needs=lambda adapter: _normalised(adapter) and adapter.can("vjp", "d_lse"),
)
def gradients_of_normalisers(t: Trial) -> None:
    """Of a cotangent of lse beside that of the output."""
    adapter, (n, m, d) = t.adapter, t.fit(4, 6, 4)
    arrays, _ = t.problem(n, m, d)
    d_out, d_lse = t.normal(n, d), t.normal(n)
    options = adapter.settled
    both: dict[str, Any] = {"d_out": d_out, "d_lse": d_lse, "return_lse": True}
    found = t.call(*arrays, **options, **both)
    of_lse = d_lse / (math.log(2) if adapter["lse_base"] == "2" else 1.0)

    def pulled(q: Floats, k: Floats, v: Floats, **given: Any) -> Any:
        out, pullback = vjp(attend, q, k, v, **given)
        return (out.out, *pullback((np.asarray(d_out, q.dtype), np.asarray(of_lse, q.dtype)))[:3])

    want = of_function(adapter, pulled, arrays, options)
    most = pulled_rounding(adapter, arrays, options, np.abs(d_out) + np.abs(of_lse)[:, None])
    for name, x, y, allowed in zip(("out", "dq", "dk", "dv"), found, want, most, strict=True):
        t.equal(x, y, allowed * (1 + 1 / max(1e-3, float(np.max(np.abs(arrays[2]))))), name)
