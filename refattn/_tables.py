"""Pages of text and tables: for a terminal of any width, for Markdown, and as CSV."""

from __future__ import annotations

import csv
import io
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import click
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as Drawn
from rich.text import Text

from ._text import printable

__all__ = ["COLOURS", "Page", "Table", "to_csv", "width"]

COLOURS = {
    "PASS": "green",
    "FAIL": "red",
    "UNDERPOWERED": "yellow",
    "EXPECTED FAILURE": "yellow",
    "STALE": "red",
    "passes": "green",
    "fails": "red",
}
# A shape with its name, or a sum in brackets: stays in one line.
_SHAPE = re.compile(r"(\b\w+ )?\([\d, ]+\)|\(\w+ \+ \w+\)|\|\w+ \+ \w+\|")
_Columns = str | tuple[str, ...]
_GAP = 3  # characters between columns


def width() -> int:
    """Columns of the page: $COLUMNS, or those of the terminal, or 80."""
    return shutil.get_terminal_size((80, 24)).columns


class Table:
    """Rows of cells under names.

    Parameters
    ----------
    *names : str
        Of the columns. The first is set left, the others right.
    drop : sequence of str or tuple of str
        Columns that a narrow page leaves out, the first of them first; those of a tuple together.
    left : sequence of str
        More columns that are set left.
    """

    def __init__(
        self, *names: str, drop: Sequence[_Columns] = (), left: Sequence[str] = ()
    ) -> None:
        self.names, self.drop = names, drop
        self.left = {names[0], *left}
        self.rows: list[tuple[str, ...]] = []

    def add_row(self, *cells: str) -> None:
        self.rows.append(cells)

    def widths(self) -> list[int]:
        """Characters of each column."""
        rows = [self.names, *self.rows]
        return [max(cell_len(row[i]) for row in rows) for i in range(len(self.names))]

    def fitting(self, most: int) -> tuple[list[int], list[str]]:
        """Columns that fit on a page, and names of those left out."""
        widths, kept, out = self.widths(), list(range(len(self.names))), list[str]()
        for item in self.drop:
            names = {item} if isinstance(item, str) else {*item} & {*self.names}
            if _length(widths, kept) <= most:
                break
            kept = [i for i in kept if self.names[i] not in names]
            out += dict.fromkeys(name for name in self.names if name in names)
        return kept, out

    def parts(self, most: int) -> list[list[int]]:
        """Columns of several tables that fit on a page, each with the first column."""
        widths, parts = self.widths(), [[0]]
        for i in range(1, len(self.names)):
            if len(parts[-1]) > 1 and _length(widths, [*parts[-1], i]) > most:
                parts.append([0])
            parts[-1].append(i)
        return parts


def _length(widths: Sequence[int], kept: Sequence[int]) -> int:
    return sum(widths[i] for i in kept) + _GAP * (len(kept) - 1)


class Page:
    """Where results are printed, as text or in Markdown."""

    def __init__(self, *, markdown: bool = False) -> None:
        self.markdown = markdown

    def say(self, text: str = "") -> None:
        """Print lines, broken between words where they are longer than the page."""
        if self.markdown:
            _echo(f"{text}\n" if text.strip() else "", nl=bool(text.strip()))
            return
        for line in text.split("\n"):
            _echo("\n".join(_wrapped(line)))

    def table(self, table: Table, *, split: bool = False) -> None:
        """Print a table; where it is too wide some columns are left out, or follow below."""
        if self.markdown:
            _echo(_to_markdown(table))
        elif split:
            for number, kept in enumerate(table.parts(width())):
                _echo("\n" * (number > 0) + _drawn(table, kept))
        else:
            kept, out = table.fitting(width())
            _echo(_drawn(table, kept))
            if out:
                names = ", ".join(dict.fromkeys(out))
                self.say(f"left out at this width: {names} (--format csv has all)")

    def block(self, text: str) -> None:
        """Print a report as it is, with verdicts in colour where there is any."""
        if self.markdown:
            _echo(f"```\n{text}\n```\n")
            return
        console = Console()
        _echo(text, color=console.color_system is not None and not console.no_color)


def _echo(text: str, **options: Any) -> None:
    """Print to the stream as it is: Click would take another where its characters are few."""
    click.echo(text, file=sys.stdout, **options)


def _wrapped(line: str) -> list[str]:
    """Lines no longer than the page, as far as words are not."""
    whole = _SHAPE.sub(lambda found: found[0].replace(" ", "\xa0"), line)
    lines = textwrap.wrap(whole, width(), break_long_words=False, break_on_hyphens=False)
    return [x.replace("\xa0", " ") for x in lines] or [""]


def _drawn(table: Table, kept: Sequence[int]) -> str:
    """Lines of some columns, without spaces at their ends."""
    console = Console(width=10_000, highlight=False, markup=False, emoji=False)
    drawn = Drawn(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for i in kept:
        name = table.names[i]
        drawn.add_column(name, justify="left" if name in table.left else "right", no_wrap=True)
    for row in table.rows:
        drawn.add_row(*(Text(row[i], style=COLOURS.get(row[i], "")) for i in kept))
    with console.capture() as printed:
        console.print(drawn)
    return "\n".join(line.rstrip() for line in printed.get().splitlines())


def _to_markdown(table: Table) -> str:
    def line(cells: Iterable[str]) -> str:
        return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"

    rule = ("---" if name in table.left else "---:" for name in table.names)
    return "\n".join([line(table.names), line(rule), *map(line, table.rows)]) + "\n"


def to_csv(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """One flat table; what a row has no word for is empty."""
    file = io.StringIO()
    writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({x: printable(y) if isinstance(y, str) else y for x, y in row.items()})
    return file.getvalue()
