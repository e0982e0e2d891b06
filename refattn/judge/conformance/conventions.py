"""Conventions of well-known attention functions: a table as data, with what each is known from.

`CONVENTIONS` has a row for each function, read from `conventions.toml`, and `OPTIONS` says what its
columns mean. A cell is either run, by a test that compares the installed library with every value
that the option may have, or read, in a file of a version. What is neither is not in the table.
`SPECS` are the same conventions as tags of an `Adapter`, for options that are tags.
"""

from __future__ import annotations

import textwrap
import tomllib
from collections.abc import Mapping
from importlib import resources
from types import MappingProxyType
from typing import Any, NamedTuple

from .candidate.tags import CHOICES, DEFAULTS, TAGS, write_tag

NONE = "none"


class Run(NamedTuple):
    """Known from running the library, of the version in its row, by a test."""

    test: str

    def __str__(self) -> str:
        return f"tests/judge/conformance/test_conventions.py::{self.test}"


class Read(NamedTuple):
    """Known from reading a file, not run."""

    repository: str
    path: str
    version: str  # the tag or release that was read

    def __str__(self) -> str:
        return f"{self.repository} {self.version}, {self.path}"


class Cell(NamedTuple):
    """What a library does for one option, and what that is known from."""

    value: Any  # one of the option's values
    source: Run | Read

    @property
    def words(self) -> str:
        """The value in text."""
        return "any" if self.value is None else write_tag(self.value)


class Option(NamedTuple):
    """A column of the table."""

    meaning: str
    values: Mapping[str, str] = MappingProxyType({})  # and their meanings; none where any may be


class Library(NamedTuple):
    """A row of the table.

    Examples
    --------
    >>> from refattn.judge.conformance import CONVENTIONS
    >>> CONVENTIONS["jax-dpa"].cells["causal"].value
    'top-left'
    """

    function: str
    version: str  # the release that was run or read
    arrays: Mapping[str, Any]  # tags that say which arrays it takes
    cells: Mapping[str, Cell]  # of each option that is known

    @property
    def tags(self) -> dict[str, Any]:
        """Its conventions as tags of an `Adapter`, those that are not the default."""
        known = {name: cell.value for name, cell in self.cells.items() if name in TAGS}
        tags = dict(self.arrays) | known
        # "none" says that a library lacks the option, which is no value of a tag.
        return {name: x for name, x in tags.items() if x not in (NONE, DEFAULTS[name])}

    def count(self, kind: type[Run] | type[Read]) -> int:
        """Count the cells that are run, or read."""
        return sum(isinstance(cell.source, kind) for cell in self.cells.values())


_ABSENT = {NONE: "no such argument"}


def _option(meaning: str, values: Mapping[str, str], absent: bool = True) -> Option:
    """Return an option of these values, that a library may be without where `absent` says so."""
    return Option(meaning, MappingProxyType({**values, **(_ABSENT if absent else {})}))


def _of_tag(name: str, absent: bool = False) -> Option:
    """Return an option whose meaning and values are those of a tag."""
    return _option(TAGS[name], dict.fromkeys(CHOICES.get(name, ()), ""), absent)


OPTIONS: Mapping[str, Option] = MappingProxyType(
    {
        "layout": _of_tag("layout"),
        "causal": _of_tag("causal", absent=True),
        "empty_rows": _of_tag("empty_rows"),
        "hidden": _of_tag("hidden"),
        "mask": _option(
            "what True means in a boolean mask",
            {"seen": "the query sees the key", "hidden": "the query does not see the key"},
        ),
        "float_mask": _option(
            "what a mask of floats does",
            {
                "added": "they are added to the scores",
                "as-bool": "every number but 0 is True, also -inf",
                "refused": "an error",
            },
        ),
        "default_scale": _option(
            "factor on q . k if none is given", {"1/sqrt(d)": "", "1/d": "", "1": ""}, absent=False
        ),
        "groups": _option(
            "which of G key heads query head h of H shares",
            {"contiguous": "h // (H / G)", "interleaved": "h % G"},
        ),
        "softcap": _option(
            "when scores are capped",
            {
                "before-bias": "then bias and mask are added",
                "after-bias": "with bias and mask",
                "refused": "an error on a CPU",
            },
        ),
        "window": _of_tag("window", absent=True),
        "lse": _option(
            "base of the log normaliser it returns, of scaled, biased scores", {"e": "", "2": ""}
        ),
        "lse_empty": _option(
            "log normaliser of a query that sees no key",
            {"-inf": "", "inf": "", "finite": "about the lowest float"},
        ),
        "dropout": _option("factor on weights that are kept", {"1/(1-p)": "", "1": ""}),
        "past": _option(
            "the last key that query i sees in causal attention with past keys",
            {"behind": "past + i", "bottom-right": "i + m - n", "top-left": "i"},
        ),
        "same_value_size": _of_tag("same_value_size"),
        "head_sizes": _of_tag("head_sizes"),
    }
)


def _values(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by option; any value is None."""
    found = dict.fromkeys(part.get("absent", ()), NONE) | dict(part)
    if sizes := part.get("head_sizes"):
        found["head_sizes"] = tuple(range(*sizes))
    return {name: None if x == "any" else x for name, x in found.items() if name in OPTIONS}


def _library(row: Mapping[str, Any], like: Mapping[str, Any]) -> Library:
    """Read a row, which differs from another in what it says."""
    # Functions of one library mostly agree: a row has only what differs.
    run = like.get("run", {}) | row.get("run", {})
    cells = {option: Cell(x, Run(f"test_{option}")) for option, x in _values(run).items()}
    for part in row.get("read", ()):
        source = Read(*part["source"])
        cells |= {option: Cell(x, source) for option, x in _values(part).items()}
    known = MappingProxyType({option: cells[option] for option in OPTIONS if option in cells})
    arrays = MappingProxyType(row.get("arrays") or like["arrays"])
    return Library(" ".join(row["function"].split()), row["version"], arrays, known)


_IN_FILE = tomllib.loads(
    resources.files(__package__).joinpath("conventions.toml").read_text("utf-8")
)
CONVENTIONS: Mapping[str, Library] = MappingProxyType(
    {name: _library(row, _IN_FILE.get(row.get("like"), {})) for name, row in _IN_FILE.items()}
)

# Tags that the glue around such a function then need not repeat.
SPECS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {name: MappingProxyType(library.tags) for name, library in CONVENTIONS.items()}
)


def listing(width: int = 98) -> str:
    """Return the table in text: for each option which library has which value, then the libraries.

    Examples
    --------
    >>> print(listing().splitlines()[0])
    layout: axes, one of nd, hnd, nhd, bnd, bhnd, bnhd; by default any leading axes, then n, d
    """
    lines = []
    for name, option in OPTIONS.items():
        libraries: dict[str, list[str]] = {}
        for library, row in CONVENTIONS.items():
            if name in row.cells:
                cell = row.cells[name]
                mark = "" if isinstance(cell.source, Run) else "*"
                libraries.setdefault(cell.words, []).append(library + mark)
        lines += _wrap(f"{name}: {option.meaning}", 0, width)
        # Libraries without the option come last.
        for value, names in sorted(libraries.items(), key=lambda pair: pair[0] == NONE):
            meaning = option.values.get(value, "")
            words = f"{value}{f' ({meaning})' if meaning else ''}: {', '.join(names)}"
            lines += _wrap(words, 2, width)
    for library, row in CONVENTIONS.items():
        lines += _wrap(f"{library}: {row.function} ({row.version})", 0, width)
        read = dict.fromkeys(
            str(x.source) for x in row.cells.values() if isinstance(x.source, Read)
        )
        lines += [f"  * read in {source}" for source in read]
    rows = CONVENTIONS.values()
    run, read_only = (sum(row.count(kind) for row in rows) for kind in (Run, Read))
    tested = f"{run} tested by tests/judge/conformance/test_conventions.py"
    lines.append(f"{run + read_only} conventions: {tested}, {read_only} read in source files (*)")
    return "\n".join(lines)


def _wrap(text: str, indent: int, width: int) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + 4),
        break_long_words=False,
        break_on_hyphens=False,
    )
