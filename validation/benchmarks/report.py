"""The report of a run: tables, numbers and figures.

`write` makes ``benchmarks.json``, ``benchmarks.md`` and ``figures/*.svg``. The first is an object
with

- ``"version"``: 1; a change that breaks readers adds 1.
- ``"environment"``: processor, versions, BLAS.
- ``"settings"``: sizes, repeats, pause, threads and seed.
- ``"sections"``: for each section its records. Those of `cases.measure` and `imports.run` hold
  times of forms; `scaling.run` and `memory.run` say what theirs hold. Sections of other names may
  be added: their records are shown by what they hold.
- ``"targets"``: see `targets.judge`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from .. import results as kept
from ..results import Section
from . import environment
from .cases import Record, compare
from .figures import figures
from .settings import FULL, Settings
from .targets import judge
from .timing import Quartiles, quartiles

_NONE = "\N{EN DASH}"


def collect(settings: Settings, sections: dict[str, list[Record]]) -> dict[str, Any]:
    """Put together what is written to ``benchmarks.json``."""
    return {
        "version": 1,
        "environment": environment.describe(),
        "settings": asdict(settings),
        "sections": sections,
        "targets": judge(sections),
    }


def write(results: Mapping[str, Any], directory: Path) -> list[Path]:
    """Write results as `collect` makes them, and return the paths."""
    contents: dict[str, Any] = {"benchmarks.json": results, "benchmarks.md": _markdown(results)}
    for name, title, figure in figures(results["sections"]):
        contents[f"figures/{name}.svg"] = title, figure
    return kept.write(directory, contents)


def show(console: Console, section: str, records: Sequence[Record]) -> None:
    """Print the tables of a section."""
    for table in _tables(section, records):
        kept.show(console, table)


def show_targets(console: Console, results: Mapping[str, Any]) -> None:
    """Print each target next to the measured value."""
    if results["targets"]:
        kept.show(console, _targets(results))


def wrong(sections: Mapping[str, Iterable[Record]]) -> list[str]:
    """Name the forms of refattn whose results are wrong."""
    return [
        f"{record['case']}, {record['dtype']}: {form['name']}"
        for records in sections.values()
        for record in records
        for form in record.get("forms", ())
        if form.get("ours") and form.get("wrong")
    ]


def not_measured(sections: Mapping[str, Iterable[Record]]) -> dict[str, list[str]]:
    """Forms that were not measured, and cases whose memory was not, by reason."""
    found: dict[str, list[str]] = {}
    for record in (record for records in sections.values() for record in records):
        if record.get("bytes", 0) is None:
            found.setdefault(record["kind"], []).append(record["case"])
        for form in record.get("forms", ()):
            if "missing" in form:
                found.setdefault(form["missing"], []).append(f"{record['case']}: {form['name']}")
    return {reason: list(dict.fromkeys(names)) for reason, names in found.items()}


def _tables(section: str, records: Sequence[Record]) -> Iterator[Section]:
    """Tables by what the records hold."""
    held = [record for record in records if "bytes" in record]
    if held:
        yield _memory(section, held)
    curves = [r for r in records if "forms" in r and any("at" in form for form in r["forms"])]
    for record in curves:
        yield _curves(record)
    timed = [record for record in records if record not in held and record not in curves]
    for dtype in dict.fromkeys(record["dtype"] for record in timed):
        of_dtype = [record for record in timed if record["dtype"] == dtype]
        yield _timed(section, dtype, of_dtype)
        if any(record.get("ratios") for record in of_dtype):
            yield _ratios(section, dtype, of_dtype)


def _timed(section: str, dtype: str | None, records: Iterable[Record]) -> Section:
    columns = ["case", "form", "seconds", "quartiles", "ratio", "quartiles of it", "error"]
    rows = []
    for record in records:
        label = ", ".join([record["case"], *(f"{k} {n}" for k, n in record["sizes"].items())])
        for i, form in enumerate(record["forms"]):
            rows.append([label if i == 0 else "", form["name"], *_timed_cells(record, form)])
    return Section(f"{section}, {dtype}" if dtype else section, columns, rows)


def _ratios(section: str, dtype: str | None, records: Iterable[Record]) -> Section:
    rows = [
        [record["case"], one["form"], one["to"], _number(one["measured"]), _range(one["range"])]
        for record in records
        for one in record.get("ratios", ())
    ]
    title = ", ".join(filter(None, [f"{section}: time over that of another form", dtype]))
    return Section(title, ["case", "form", "to", "measured", "range"], rows)


def _timed_cells(record: Record, form: Record) -> list[str]:
    if "missing" in form:
        return [_NONE, _NONE, _NONE, _NONE, form["missing"]]
    error = ""
    if "error" in form:
        value = "not finite" if form["error"] is None else f"{form['error']:.1e}"
        error = f"{value} WRONG" if form["wrong"] else value
    if "seconds" not in form:
        return [_NONE, _NONE, _NONE, _NONE, error]
    first = form is record["forms"][0]
    ratio = ("1", "") if first else _spread(compare(record, form["name"]))
    return [*_spread(quartiles(form["seconds"])), *ratio, error]


def _curves(record: Record) -> Section:
    """Median seconds by size, and the exponents."""
    forms = record["forms"]
    medians = [
        {n: _number(quartiles(s).median) for n, s in zip(form["at"], form["seconds"], strict=True)}
        for form in forms
    ]
    sizes = sorted({n for form in forms for n in form["at"]})
    rows = [[str(n), *(median.get(n, _NONE) for median in medians)] for n in sizes]
    rows.append([f"exponent from {record['fitted_from']}", *map(_exponent, forms)])
    label = ", ".join(f"{k} {n}" for k, n in record["sizes"].items())
    title = f"{record['case']}, seconds, {record['dtype']}, {label}"
    return Section(title, ["size", *(form["name"] for form in forms)], rows)


def _exponent(form: Record) -> str:
    fit = form["exponent"]
    return _NONE if fit is None else f"{fit['value']:.3f} ± {fit['error']:.3f}"


def _memory(section: str, records: Sequence[Record]) -> Section:
    sizes = list(dict.fromkeys(name for record in records for name in record["sizes"]))
    rows = [
        [
            record["case"],
            *(str(record["sizes"].get(name, _NONE)) for name in sizes),
            record["kind"],
            _NONE if record["bytes"] is None else f"{record['bytes'] / 2**20:.1f}",
        ]
        for record in records
    ]
    title = f"{section}: peak beside arguments and result"
    return Section(title, ["case", *sizes, "kind", "MiB"], rows)


def _targets(results: Mapping[str, Any]) -> Section:
    rows = [
        [
            target["target"],
            target["dtype"],
            f"at least {target['at_least']}"
            if "at_least" in target
            else f"at most {target['at_most']}",
            _number(target["measured"]),
            _range(target["range"]),
            {True: "met", False: "not met", None: "not measured"}[target["met"]],
        ]
        for target in results["targets"]
    ]
    full = results["settings"]["sizes"] == asdict(FULL)
    title = "targets" if full else "targets, which are meant for the full sizes"
    return Section(title, ["target", "dtype", "goal", "measured", "range", "met"], rows)


def _spread(values: Quartiles | None) -> tuple[str, str]:
    """Median, and quartiles."""
    if values is None:
        return _NONE, _NONE
    return _number(values.median), _range((values.lower, values.upper))


def _range(ends: Sequence[float] | None) -> str:
    return _NONE if ends is None else " to ".join(map(_number, ends))


def _number(x: float | None) -> str:
    return _NONE if x is None else f"{x:.3g}"


def _markdown(results: Mapping[str, Any]) -> str:
    setting, machine = results["settings"], results["environment"]
    versions = ", ".join(f"{name} {x}" for name, x in machine["versions"].items() if x)
    blas = {f"{x['internal_api']} {x['version']} for {x['architecture']}" for x in machine["blas"]}
    parts = [
        "# Benchmarks",
        f"{machine['cpu']}, {machine['cores']} cores, {machine['system']}, "
        f"Python {machine['python']}, {versions}. BLAS: {', '.join(sorted(blas))}. "
        f"{setting['threads']} threads, {setting['repeats']} rounds, seed {setting['seed']}"
        f"{', large arrays in new memory' if setting['new_memory'] else ''}.",
    ]
    tables = [_targets(results)] if results["targets"] else []
    for section, records in results["sections"].items():
        tables += _tables(section, records)
    parts += [table.markdown().rstrip() for table in tables]
    return "\n\n".join(parts) + "\n"
