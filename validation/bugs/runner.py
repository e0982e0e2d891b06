"""Run the entries, and write the page of those that reproduce: README.md, from the results alone.

An entry that no longer reproduces is removed and named. The results hold, for the name of each
entry, the package's version, the date, the numbers and what the checks reported. If a package is
not installed or does not run, the record of an earlier run is kept.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from refattn import conformance
from refattn.arrays.tables import markdown

from .. import texts
from .record import Candidate, Finding, Number, Reading, Tried

Entry = Finding | Tried
Record = dict[str, Any]
Results = Mapping[str, Record]
Say = Callable[[str], None]


def _entries() -> Iterator[Entry]:
    """Read findings and what was tried; `measure` is a function of a module of this package."""
    for kind, of in (("findings", Finding), ("tried", Tried)):
        for entry in _TABLE[kind]:
            module, _, name = entry["measure"].partition(":")
            entry["measure"] = getattr(import_module(f"validation.bugs.{module}"), name)
            entry["candidate"] = Candidate(**entry["candidate"]) if "candidate" in entry else None
            yield of(**entry)


_TABLE = texts.read(Path(__file__).with_name("entries.toml"))
ENTRIES = tuple(_entries())
READINGS = tuple(Reading(**x) for x in _TABLE["readings"])


def run(
    entries: Sequence[Entry], earlier: Results, *, only: Iterable[str] = (), say: Say = print
) -> dict[str, Record]:
    """Run entries, or those that are named, and return the records of those that hold."""
    chosen, records = set(only), dict[str, Record]()
    for entry in entries:
        kept = {entry.name: earlier[entry.name]} if entry.name in earlier else {}
        if chosen and entry.name not in chosen:
            records |= kept
            continue
        try:
            version = metadata.version(entry.package)
            numbers = entry.measure()
        except Exception as reason:
            if isinstance(reason, metadata.PackageNotFoundError):
                words = "is not installed"
            else:
                words = f"does not run: {type(reason).__name__}: {reason}"
            of = [f"; the entry of version {x['version']} is kept" for x in kept.values()]
            say(f"skipped: {entry.name}: {entry.package} {words}{''.join(of)}")
            records |= kept
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
        records[entry.name] = {
            "version": version,
            "date": datetime.date.today().isoformat(),
            "numbers": [
                x._asdict() | {"value": _rounded(x.value), "bound": x.bound and _rounded(x.bound)}
                for x in numbers
            ],
            "check": checked,
        }
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


def _rounded(value: float) -> float | None:
    """Three digits; none of what is not finite, which JSON does not have."""
    return float(f"{value:.3g}") if math.isfinite(value) else None


_HEAD = """\
# Bugs in public implementations

`python -m validation.studies bugs` writes this page; do not edit it by hand. Every entry under
*Executed* was run with the version that it names, and its numbers were measured. The script removes
an entry that no longer reproduces. If a package is not installed, the script keeps its last entry,
with its version and date. Entries under *Read, not executed* were seen in source code only.

*Real tensors* are the queries, keys and values of a sentence encoder that come with the package
(`refattn.load_sample()`: all-MiniLM-L6-v2, 2 layers, 4 heads, 128 tokens, d = 32). An *error* is
relative, in the Frobenius norm, to the result of the same formula in double precision, unless the
entry says otherwise. If the authors document the behaviour, the entry says so: it may be right for
their purpose, but results differ from what the name of the function promises."""


def render(
    results: Results, entries: Sequence[Entry] = ENTRIES, readings: Sequence[Reading] = READINGS
) -> str:
    """Return the page in Markdown."""
    held = [(x, results[x.name]) for x in entries if x.name in results]
    found = [(x, record) for x, record in held if isinstance(x, Finding)]
    tried = [(x, record) for x, record in held if isinstance(x, Tried)]
    packages = len({x.package for x, _ in found})
    parts = [
        _HEAD,
        f"Executed: {len(found)} entries in {packages} packages. Nothing found: {len(tried)}. "
        f"Read, not executed: {len(readings)}.",
        _summary(found),
        "## Executed",
        *(_entry(*x) for x in found),
        "## Nothing found",
        "These were tested in the same way, and the tests found no bug.",
        *(_entry(*x) for x in tried),
        "## Read, not executed",
        *map(_reading, readings),
    ]
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def _summary(found: Iterable[tuple[Entry, Record]]) -> str:
    rows = []
    for x, record in found:
        first = next(n for n in record["numbers"] if n["bound"] is not None)
        value = f"{_value(first['value'])}; expected {first['right']}"
        rows.append([f"{x.package} {record['version']}", x.title, value])
    return markdown(["package", "bug", "first number that shows it"], rows, [True] * 3)


def _entry(x: Entry, record: Record) -> str:
    return "\n\n".join(part.strip() for part in _parts(x, record) if part)


def _parts(x: Entry, record: Record) -> Iterator[str]:
    yield f"### {x.package}: {x.title}"
    yield f"*{x.package} {record['version']}, executed {record['date']}.*"
    numbers = [[n["what"], _value(n["value"]), n["right"]] for n in record["numbers"]]
    yield markdown(["what was measured", "value", "expected"], numbers, [True] * 3)
    if isinstance(x, Finding):
        yield from _cure(x)
        yield f"**Note.** {x.note}" if x.note else ""
    if checked := record["check"]:
        words = [f"$ {checked['command']}", checked["verdict"]]
        lines = [*words, *(f"  {line}" for line in checked["lines"])]
        yield "\n".join(["```console", *lines, "```"])


def _cure(x: Finding | Reading) -> Iterator[str]:
    yield f"**Cause.** {x.cause}"
    yield f"**Fix.** {x.mend}"


def _reading(x: Reading) -> str:
    address = f"https://github.com/{x.repository}/blob/{x.commit}/{x.path}"
    said = f"*Not executed. Read in [{x.path}]({address}), commit {x.commit[:12]}.*"
    return "\n\n".join([f"### {x.repository}: {x.title}", said, *_cure(x)])


def _value(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.3g}"
