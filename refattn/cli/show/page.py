"""Pages of text and tables: for a terminal of any width, for Markdown, and as CSV."""

from __future__ import annotations

import csv
import io
import os
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

from ...arrays.words import printable

STATUS_COLOURS = {
    "PASS": "green",
    "FAIL": "red",
    "UNDERPOWERED": "yellow",
    "EXPECTED FAILURE": "yellow",
    "STALE": "red",
    "passes": "green",
    "fails": "red",
}
_STATUS = re.compile(rf"^(  )?({'|'.join(filter(str.isupper, STATUS_COLOURS))})\b", re.MULTILINE)
# A shape with its name, or a sum in brackets: stays in one line.
_SHAPE = re.compile(r"(\b\w+ )?\([\d, ]+\)|\(\w+ \+ \w+\)|\|\w+ \+ \w+\|")
_Columns = str | tuple[str, ...]
_GAP = 3  # characters between columns
_NARROWEST = 16  # of the first column, where it is broken


def width() -> int:
    """Return the width of the page: $COLUMNS, else that of the terminal, else 80."""
    return shutil.get_terminal_size((80, 24)).columns


def limit() -> int | None:
    """Return the columns of a terminal, or $COLUMNS; None for a pipe or a file."""
    asked = os.environ.get("COLUMNS", "").isdigit()
    return width() if asked or (sys.stdout is not None and sys.stdout.isatty()) else None


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
    keys : int
        How many columns at the start name a row, and are in each part of a table that is split.
    """

    def __init__(
        self, *names: str, drop: Sequence[_Columns] = (), left: Sequence[str] = (), keys: int = 1
    ) -> None:
        self.names, self.drop, self.keys = names, drop, keys
        self.left = {names[0], *left}
        self.rows: list[tuple[str, ...]] = []

    def add_row(self, *cells: str) -> None:
        self.rows.append(cells)

    def widths(self) -> list[int]:
        """Return characters of each column."""
        rows = [self.names, *self.rows]
        return [max(cell_len(row[i]) for row in rows) for i in range(len(self.names))]

    def fitting(self, most: int) -> tuple[list[int], list[str]]:
        """Return columns that fit on a page, and names of those left out."""
        widths, kept, out = self.widths(), list(range(len(self.names))), list[str]()
        for item in self.drop:
            names = {item} if isinstance(item, str) else {*item} & {*self.names}
            if _line_length(widths, kept) <= most:
                break
            kept = [i for i in kept if self.names[i] not in names]
            out += dict.fromkeys(name for name in self.names if name in names)
        return kept, out

    def parts(self, most: int, kept: Sequence[int] | None = None) -> list[list[int]]:
        """Return columns of several tables that fit on a page, each with the keys.

        What has no name belongs to the column before it. The first is broken between words if all
        others are beside it then.
        """
        kept = [*range(len(self.names))] if kept is None else kept
        widths, groups = self.widths(), list[list[int]]()
        if _line_length([self.least(), *widths[1:]], kept) <= most:
            return [[*kept]]
        for i in kept[self.keys :]:
            if groups and groups[-1][-1] == i - 1 and not self.names[i].strip():
                groups[-1].append(i)
            else:
                groups.append([i])
        keys = [*range(self.keys)]
        parts = [[*keys]]
        for group in groups:
            if len(parts[-1]) > len(keys) and _line_length(widths, [*parts[-1], *group]) > most:
                parts.append([*keys])
            parts[-1] += group
        return parts

    def least(self) -> int:
        """Return the characters of the first column's longest word, and some more."""
        words = [word for row in (self.names, *self.rows) for word in row[0].split()]
        return min(self.widths()[0], max(_NARROWEST, *map(cell_len, words), 0))

    def name(self, i: int, kept: Sequence[int]) -> str:
        """Return the name of a column, or of the one before if it has none and that is out."""
        return self.names[i] if self.names[i].strip() or i - 1 in kept else self.names[i - 1]


def _line_length(widths: Sequence[int], kept: Sequence[int]) -> int:
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
            _echo("\n".join(_wrap_line(line, width())))

    def table(self, table: Table, *, split: bool = False) -> None:
        """Print a table; where it is too wide some columns are left out, and others follow below.

        With `split` none is left out.
        """
        if self.markdown:
            _echo(_to_markdown(table))
            return
        kept, out = (None, []) if split else table.fitting(width())
        for number, part in enumerate(table.parts(width(), kept)):
            _echo("\n" * (number > 0) + _draw_columns(table, part, width()))
        if out:
            names = ", ".join(dict.fromkeys(out))
            self.say(f"left out at this width: {names} (--format csv has all)")

    def report(self, text: str) -> None:
        """Print lines with verdicts in colour where there is any, broken on a terminal."""
        if self.markdown:
            self.block(text)
            return
        text = hanging(text, limit())
        self.block(_STATUS.sub(lambda match: click.style(match[0], STATUS_COLOURS[match[2]]), text))

    def block(self, text: str) -> None:
        """Print lines as they are."""
        if self.markdown:
            _echo(f"```\n{text}\n```\n")
            return
        console = Console()
        _echo(text, color=console.color_system is not None and not console.no_color)


def _echo(text: str, **options: Any) -> None:
    """Print to the stream as it is: Click would take another where its characters are few."""
    click.echo(text, file=sys.stdout, **options)


def hanging(text: str, most: int | None) -> str:
    """Break lines between words where they are too long; what follows is indented by 4 more.

    >>> print(hanging("a verdict:\\n  of many words", 10))
    a verdict:
      of many
          words
    """
    if most is None:
        return text
    lines: list[str] = []
    for line in text.split("\n"):
        indent = len(line) - len(line.lstrip()) + 4
        lines += [line] if cell_len(line) <= most else _wrap_line(line, most, indent)
    return "\n".join(lines)


def _wrap_line(line: str, most: int, indent: int = 0) -> list[str]:
    """Return lines no longer than the page, as far as words are not."""
    whole = _SHAPE.sub(lambda match: match[0].replace(" ", "\xa0"), line)
    lines = textwrap.wrap(
        *(whole, most),
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [x.replace("\xa0", " ") for x in lines] or [""]


def _first_width(table: Table, kept: Sequence[int], most: int) -> int:
    """Return characters of the first column: as many as the others leave, but no word is broken."""
    widths = table.widths()
    rest = _line_length(widths, kept) - widths[0]
    return min(widths[0], max(most - rest, table.least()))


def _draw_columns(table: Table, kept: Sequence[int], most: int = 10_000) -> str:
    """Return lines of some columns, without spaces at their ends."""
    console = Console(width=10_000, highlight=False, markup=False, emoji=False)
    drawn = Drawn(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for i in kept:
        name = table.names[i]
        drawn.add_column(
            table.name(i, kept),
            justify="left" if name in table.left else "right",
            no_wrap=i > 0,
            width=None if i else _first_width(table, kept, most),
        )
    for row in table.rows:
        drawn.add_row(*(Text(row[i], style=STATUS_COLOURS.get(row[i], "")) for i in kept))
    with console.capture() as printed:
        console.print(drawn)
    return "\n".join(line.rstrip() for line in printed.get().splitlines())


def _to_markdown(table: Table) -> str:
    def line(cells: Iterable[str]) -> str:
        return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"

    rule = ("---" if name in table.left else "---:" for name in table.names)
    return "\n".join([line(table.names), line(rule), *map(line, table.rows)]) + "\n"


def to_csv(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Write one flat table; cells without a value are empty."""
    file = io.StringIO()
    writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({x: printable(y) if isinstance(y, str) else y for x, y in row.items()})
    return file.getvalue()
