"""What the times should be, and what they are; nothing is asserted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from . import scaling
from .cases import Record, compare
from .estimators import (
    CAUSAL,
    CHUNKS,
    EXACT,
    LARA,
    LINEAR,
    PLAIN,
    RFA,
    SAME_SAMPLES,
    SDPA,
    TORCH,
    TORCH_LINEAR,
)
from .gradients import PULLBACK
from .roofline import IN_CACHE, WHOLE_ARRAYS
from .timing import Quartiles

Sections = Mapping[str, Sequence[Record]]

_CAUSAL_LINEAR = "causal linear: time over torch"

_EXACT_BACK, _RFA_BACK = (f"{name}: pullback over forward" for name in ("exact attention", "RFA"))

# Section, case, form timed against another of the case, what the ratio is, bound for each dtype.
_RATIOS = (
    ("estimators", RFA, TORCH, "refattn", "RFA: times as fast as torch Performer", (3.0, 3.5)),
    ("roofline", RFA, WHOLE_ARRAYS, "refattn", "RFA: share of the roofline", (0.75, 0.8)),
    ("roofline", EXACT, IN_CACHE, "refattn", "exact attention: share of its pieces", (0.85, 0.85)),
    ("estimators", EXACT, "refattn", SDPA, "exact attention: time over torch SDPA", (1.25, 1.0)),
    ("estimators", LARA, "refattn", SAME_SAMPLES, "LARA: time over RFA", (1.15, 1.15)),
    ("estimators", RFA + CAUSAL, "refattn", PLAIN, "causal RFA: time over not causal", (2.5, 2.5)),
    ("estimators", RFA + CAUSAL, "refattn", CHUNKS, "causal RFA: time over torch", (1.0, 1.0)),
    ("estimators", LINEAR, "refattn", TORCH_LINEAR, "linear: time over torch", (0.75, 0.75)),
    ("estimators", LINEAR + CAUSAL, "refattn", TORCH_LINEAR, _CAUSAL_LINEAR, (1.0, 1.0)),
    ("gradients", EXACT, "refattn" + PULLBACK, "refattn", _EXACT_BACK, (3.5, 3.5)),
    ("gradients", RFA, "refattn" + PULLBACK, "refattn", _RFA_BACK, (3.5, 3.5)),
)
_EXPONENT = 1.05


def judge(sections: Sections) -> list[Record]:
    """List the targets of the sections that were run.

    Each has ``"target"``, ``"dtype"``, a bound ``"at_least"`` or ``"at_most"``, ``"measured"``
    (null if it was not), ``"range"`` (quartiles, or a standard error to either side) and ``"met"``.
    """
    return [*_ratios(sections), *_exponents(sections)]


def _ratios(sections: Sections) -> Iterator[Record]:
    for section, case, form, to, target, bounds in _RATIOS:
        for dtype, bound in zip(("float32", "float64"), bounds, strict=True):
            side = "at_most" if form.startswith("refattn") else "at_least"
            for record in sections.get(section, ()):
                if (record["case"], record["dtype"]) == (case, dtype):
                    yield _target(target, dtype, side, bound, compare(record, form, to))


def _exponents(sections: Sections) -> Iterator[Record]:
    for record in sections.get("scaling", ()):
        for form in record["forms"]:
            if record["case"] == scaling.LENGTH and form["name"] == RFA:
                fit = form["exponent"]
                measured = fit and Quartiles(*(fit["value"] + i * fit["error"] for i in (-1, 0, 1)))
                name = "RFA: exponent of the number of tokens"
                yield _target(name, record["dtype"], "at_most", _EXPONENT, measured)


def _target(
    target: str, dtype: str, side: str, bound: float, measured: Quartiles | None
) -> dict[str, Any]:
    entry: dict[str, Any] = {"target": target, "dtype": dtype, side: bound}
    if measured is None:
        return entry | {"measured": None, "range": None, "met": None}
    value = measured.median
    met = value >= bound if side == "at_least" else value <= bound
    return entry | {"measured": value, "range": [measured.lower, measured.upper], "met": met}
