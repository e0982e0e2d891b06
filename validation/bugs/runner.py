"""Running the entries: what still reproduces is kept, what does not is removed and named.

The results are an object with

- ``"version"``: 1.
- ``"found"`` and ``"tried"``: records of what was run, with the package's version and the date.
- ``"read"``: records of what was only read.

A package that is not installed, or does not run, leaves the record that an earlier run made.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module, metadata
from typing import Any

from refattn import conformance

from .record import Candidate, Finding, Number, Reading, Tried

__all__ = ["collect", "command", "run"]

Record = dict[str, Any]
Say = Callable[[str], None]


def collect(
    findings: Sequence[Finding],
    tried: Sequence[Tried],
    readings: Iterable[Reading],
    earlier: Mapping[str, Any],
    *,
    only: Iterable[str] = (),
    say: Say = print,
) -> Record:
    """Run entries, or those that are named, and put together what is written to ``bugs.json``."""
    return {
        "version": 1,
        "found": run(findings, earlier.get("found", ()), only=only, say=say),
        "tried": run(tried, earlier.get("tried", ()), only=only, say=say),
        "read": [reading._asdict() for reading in readings],
    }


def run(
    entries: Sequence[Finding] | Sequence[Tried],
    earlier: Iterable[Record],
    *,
    only: Iterable[str] = (),
    say: Say = print,
) -> list[Record]:
    """Run entries, and return the records of those that hold."""
    before, chosen, records = {r["name"]: r for r in earlier}, set(only), []
    for entry in entries:
        kept = before.get(entry.name)
        if chosen and entry.name not in chosen:
            records += [kept] if kept else []
            continue
        try:
            version = metadata.version(entry.package)
            numbers = entry.measure()
        except Exception as reason:
            if isinstance(reason, metadata.PackageNotFoundError):
                words = "is not installed"
            else:
                words = f"does not run: {type(reason).__name__}: {reason}"
            of = f"; the entry of version {kept['package_version']} is kept" if kept else ""
            say(f"skipped: {entry.name}: {entry.package} {words}{of}")
            records += [kept] if kept else []
            continue
        checked = _checked(entry.candidate)
        wrong = isinstance(entry, Finding)
        if not _holds(numbers, checked, wrong):
            said = "no longer reproduces" if wrong else "is no longer free of findings"
            say(f"removed: {entry.name}: {said} with {entry.package} {version}")
            for number in numbers:
                say(f"  {number.what}: {number.value:.3g}, bound {number.bound}")
            continue
        say(f"executed: {entry.name}: {entry.package} {version}")
        records.append(_record(entry, version, numbers, checked))
    return records


def command(candidate: Candidate) -> str:
    """The line that makes the checks of a candidate."""
    words = ["refattn check", candidate.source, f"--estimator {candidate.estimator}"]
    words += [f"--capability {name}" for name in candidate.capabilities]
    words += [f"--tag {name}={_word(value)}" for name, value in candidate.tags.items()]
    return " ".join([*words, *(f"--check {name}" for name in candidate.checks)])


def _word(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _holds(numbers: Iterable[Number], checked: Record | None, wrong: bool) -> bool:
    bounded = [(x.value, x.bound) for x in numbers if x.bound is not None]
    if checked and checked["verdict"] != ("FAIL" if wrong else "PASS"):
        return False
    # NaN is wrong, whatever the bound.
    return bool(bounded) and all(not value <= b if wrong else value <= b for value, b in bounded)


def _checked(candidate: Candidate | None) -> Record | None:
    if candidate is None:
        return None
    module, _, name = candidate.source.partition(":")
    report = conformance.check(
        getattr(import_module(module), name),
        estimator=candidate.estimator,
        capabilities=candidate.capabilities,
        tags=candidate.tags,
        checks=candidate.checks,
    )
    failed = [x for x in report.results if x.status != "PASS"]
    return {
        "command": command(candidate),
        "verdict": report.verdict,
        "lines": [f"{x.status} {x.check}: {x.summary}" for x in failed],
    }


def _record(
    entry: Finding | Tried, version: str, numbers: Iterable[Number], checked: Record | None
) -> Record:
    words = entry._asdict()
    for name in ("measure", "candidate"):
        del words[name]
    return words | {
        "package_version": version,
        "date": datetime.date.today().isoformat(),
        "numbers": [
            {
                "what": x.what,
                "value": _rounded(x.value),
                "right": x.right,
                "bound": x.bound and _rounded(x.bound),
            }
            for x in numbers
        ],
        "check": checked,
    }


def _rounded(value: float) -> float | None:
    """Three digits; none of what is not finite, which JSON does not have."""
    return float(f"{value:.3g}") if math.isfinite(value) else None
