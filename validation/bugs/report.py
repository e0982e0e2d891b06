"""The page: README.md, made of the results and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["render"]

Record = Mapping[str, Any]

_HEAD = """\
# What was found in public implementations

Written by `python -m validation.bugs` from `bugs.json`; not edited by hand. Every entry under
*Executed* was run with the version that it names: its numbers are measured, and an entry that no
longer reproduces is removed when the script is run. A package that was not installed in a run keeps
the entry of an earlier one, with its version and date. Entries under *Read, not executed* were seen
in source only. Causes are in our own words.

*Real tensors* are the queries, keys and values of a sentence encoder that come with the package
(`refattn.load_sample()`: all-MiniLM-L6-v2, 2 layers, 4 heads, 128 tokens, d = 32). An *error* is
relative, in the Frobenius norm, against the result that the same formula gives in double precision,
unless it says otherwise. Where authors document what they do, the entry says so: it may be right
for their purpose, and is listed because results differ from what its name promises."""


def render(results: Record) -> str:
    """Return the page in Markdown."""
    found, tried, read = (results[name] for name in ("found", "tried", "read"))
    packages = len({x["package"] for x in found})
    parts = [
        _HEAD,
        f"Executed: {len(found)} entries in {packages} packages. Nothing found: {len(tried)}. "
        f"Read, not executed: {len(read)}.",
        _summary(found),
        "## Executed",
        *(_finding(x) for x in found),
        "## Nothing found",
        "What was tried in the same way, and is right as far as that goes.",
        *(_tried(x) for x in tried),
        "## Read, not executed",
        *(_reading(x) for x in read),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _summary(found: Iterable[Record]) -> str:
    lines = ["| package | what | first number that shows it |", "|---|---|---|"]
    for x in found:
        first = next(n for n in x["numbers"] if n["bound"] is not None)
        value = f"{_value(first['value'])} (right: {first['right']})"
        lines.append(f"| {_named(x)} | {_cell(x['title'])} | {_cell(value)} |")
    return "\n".join(lines)


def _finding(x: Record) -> str:
    parts = [
        f"### {x['package']}: {x['title']}",
        f"*{_named(x)}, executed {x['date']}.*",
        _numbers(x),
        f"**Cause.** {x['cause']}",
        f"**What mends it.** {x['mend']}",
        f"**Note.** {x['note']}" if x["note"] else "",
        _check(x["check"]),
    ]
    return "\n\n".join(part for part in parts if part)


def _tried(x: Record) -> str:
    head = f"### {x['package']}: {x['title']}"
    parts = [head, f"*{_named(x)}, executed {x['date']}.*", _numbers(x), _check(x["check"])]
    return "\n\n".join(part for part in parts if part)


def _reading(x: Record) -> str:
    address = f"https://github.com/{x['repository']}/blob/{x['commit']}/{x['path']}"
    return "\n\n".join(
        [
            f"### {x['repository']}: {x['title']}",
            f"*Not executed. Read in [{x['path']}]({address}), commit {x['commit'][:12]}.*",
            f"**Cause.** {x['cause']}",
            f"**What mends it.** {x['mend']}",
        ]
    )


def _numbers(x: Record) -> str:
    lines = ["| measured | is | right |", "|---|---|---|"]
    for n in x["numbers"]:
        lines.append(f"| {_cell(n['what'])} | {_value(n['value'])} | {_cell(n['right'])} |")
    return "\n".join(lines)


def _check(checked: Record | None) -> str:
    if checked is None:
        return ""
    words = [f"$ {checked['command']}", checked["verdict"], *(f"  {x}" for x in checked["lines"])]
    return "\n".join(["```console", *words, "```"])


def _named(x: Record) -> str:
    return f"{x['package']} {x['package_version']}"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", r"\|").split())


def _value(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.3g}"
