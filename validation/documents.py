"""Every item of the five documents, and what here computes or tests it: ``documents.md``.

``python -m validation.documents`` writes the page from ``documents.toml``.
"""

from __future__ import annotations

import re
from collections import Counter
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import refattn
from refattn.arrays.tables import markdown

from . import results, suite, texts
from .report import mixed
from .sources import SOURCES

PAGE = Path(__file__).with_name("documents.md")
STATUSES = {
    "works": "computed or tested here",
    "wrong": "wrong in the document; the right form follows, and is what is computed here",
    "partly": "computed or tested in part; what is missing follows",
    "missing": "not here",
}


class Item(NamedTuple):
    """Where a document says what, the names of what here is about it, and its status.

    `here` has names of refattn, and statements of claims after the name of their claim. `note` is
    what is right, or what is missing. The erratum of a statement need not be repeated.
    """

    where: str
    says: str
    here: str
    status: str
    note: str = ""

    def row(self) -> list[str]:
        """Cells of the table; the first that is not found is an error."""
        pieces, notes = [], [self.note]
        for name in filter(None, self.here.split("; ")):
            claim, _, statement = name.partition(": ")
            if not statement:
                attrgetter(name)(refattn)
                pieces.append(f"`{name}`")
                continue
            known = suite.claims()[claim]
            _ = {**known.statements, "figure": known.plot}[statement]
            pieces.append(f"[{name}](claims/{claim}.py)")
            notes += [e.instead for e in known.errata if statement in e.statements]
        label = {"wrong": "**Right:** ", "works": ""}.get(self.status, "**Missing:** ")
        note = " ".join(dict.fromkeys(notes) if self.status == "wrong" else notes[:1]).strip()
        if bool(note) != bool(label):
            raise ValueError(f"{self.where}: {self.says}: {self.status} with the note {note!r}")
        says = _cell(self.says) + f"<br>{label}{_cell(note)}" * bool(note)
        return [self.where, says, ", ".join(pieces), self.status]


def _cell(text: str) -> str:
    """Text with formulas for a cell, in which a bar would end it."""
    return mixed(re.sub(r"\$[^$]+\$", lambda x: x[0].replace("|", r"\vert "), text))


def items() -> dict[str, list[Item]]:
    """Items by the id of their document."""
    found = texts.read(PAGE.with_suffix(".toml"))
    return {key: [Item(*x) for x in rows] for key, rows in found.items()}


def page() -> str:
    """The page: counts, and a table for each document."""
    every = items()
    counts = [
        [SOURCES[key].name, len(rows), *(Counter(x.status for x in rows)[s] for s in STATUSES)]
        for key, rows in every.items()
    ]
    numbers = [row[1:] for row in counts]
    counts.append(["all", *map(sum, zip(*numbers, strict=True))])
    left = [True] + [False] * (len(STATUSES) + 1)
    lines = [
        "# The five documents, item by item",
        "",
        "`python -m validation.documents` writes this page from [its data](documents.toml). Names "
        "in code are of refattn; links lead to the claims of which a statement is named.",
        "",
        *(f"- *{status}*: {text}." for status, text in STATUSES.items()),
        "",
        markdown(["document", "items", *STATUSES], counts, left),
    ]
    for key, rows in every.items():
        head = ["where", "what it says", "in refattn", "status"]
        source = SOURCES[key]
        lines += [f"## {source.name}", "", source.citation, ""]
        lines.append(markdown(head, [x.row() for x in rows], [True] * 4))
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    results.replace(PAGE, page())
