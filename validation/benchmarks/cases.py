"""Forms that compute the same, checked and timed together.

`measure` makes a record, the unit of ``benchmarks.json``: an object with ``"case"``, ``"dtype"``,
``"sizes"`` and ``"forms"``. Each form has ``"name"``, whether it is ``"ours"``, and

- ``"missing"``: why it was not measured; or
- ``"error"``: the largest error of the checked rows relative to the largest value, of several
  arrays the largest such error, null if it is not finite, with its ``"bound"`` and whether the form
  is ``"wrong"`` by it; and, unless it is, ``"seconds"`` of each round.

A form without an oracle has only the latter. The others are compared with the first form. A case
that compares other pairs has ``"ratios"``: of each, ``"form"``, ``"to"``, the ratio ``"measured"``
(null if it was not) and its ``"range"`` (quartiles).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import peers
from .timing import PAUSE, Quartiles, Timer, alternate, ratio, wall

BOUND = 1000  # units of the rounding error of the dtype that a right form may be off by

Record = dict[str, Any]


@dataclass(frozen=True)
class Form:
    """One way to compute something.

    `make` prepares what takes no part in the time and returns the call; it may raise
    `peers.Missing`. `oracle` returns what is checked of the result, of one array or of a tuple:
    what `look` makes of it, the rows of the case unless it is given.
    """

    name: str
    make: Callable[[], Callable[[], Any]]
    oracle: Callable[[], np.ndarray | tuple[np.ndarray, ...]] | None = None
    ours: bool = False
    look: Callable[[Any], tuple[np.ndarray, ...]] | None = None


@dataclass(frozen=True)
class Case:
    """Forms to be compared with the first of them; `rows` are the queries that are checked.

    `ratios` are pairs of names of forms, to be compared too.
    """

    name: str
    dtype: str
    sizes: Mapping[str, int]
    forms: Sequence[Form]
    rows: Any = field(default_factory=lambda: slice(None))
    ratios: Sequence[tuple[str, str]] = ()


def measure(case: Case, repeats: int, *, pause: float = PAUSE, timer: Timer = wall) -> Record:
    """Check the forms of a case and time those that are right, in turn."""
    calls: dict[str, Callable[[], Any]] = {}
    entries: list[Record] = []
    for form in case.forms:
        entry: Record = {"name": form.name, "ours": form.ours}
        try:
            call = form.make()
            entry |= _checked(form, call, case)
        except peers.Missing as missing:
            entry["missing"] = str(missing)
        except Exception as error:
            if form.ours:
                raise
            entry["missing"] = f"fails: {error}"  # a package that does not suit this torch
        else:
            if not entry.get("wrong"):
                calls[form.name] = call
        entries.append(entry)
    seconds = alternate(calls, repeats, pause=pause, timer=timer)
    for entry in entries:
        if entry["name"] in seconds:
            entry["seconds"] = seconds[entry["name"]]
    record = {"case": case.name, "dtype": case.dtype, "sizes": dict(case.sizes), "forms": entries}
    if case.ratios:
        record["ratios"] = [_ratio(record, form, to) for form, to in case.ratios]
    return record


def compare(record: Record, name: str, to: str | None = None) -> Quartiles | None:
    """Divide the time of a form by that of another, the first by default, if both were timed."""
    timed = {form["name"]: form["seconds"] for form in record["forms"] if "seconds" in form}
    to = record["forms"][0]["name"] if to is None else to
    if name not in timed or to not in timed:
        return None
    return ratio(timed[name], timed[to])


def relative_error(got: Any, want: np.ndarray) -> float:
    """Largest difference over the largest magnitude; infinite for NaN."""
    got = np.asarray(got, dtype=np.float64)
    if got.shape != want.shape or not np.all(np.isfinite(got)):
        return math.inf
    return float(np.max(np.abs(got - want)) / np.max(np.abs(want)))


def _ratio(record: Record, form: str, to: str) -> Record:
    found = compare(record, form, to)
    measured, spread = (found.median, [found.lower, found.upper]) if found else (None, None)
    return {"form": form, "to": to, "measured": measured, "range": spread}


def _checked(form: Form, call: Callable[[], Any], case: Case) -> Record:
    if form.oracle is None:
        return {}
    found, wanted = (x if isinstance(x, tuple) else (x,) for x in (call(), form.oracle()))
    if form.look is None:
        found = tuple(np.asarray(got)[..., case.rows, :] for got in found)
    else:
        found = form.look(found)
    error = max(map(relative_error, found, wanted))
    bound = BOUND * float(np.finfo(case.dtype).eps)
    return {
        "error": error if math.isfinite(error) else None,
        "bound": bound,
        "wrong": not error <= bound,
    }
