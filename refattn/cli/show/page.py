"""Text and tables of results: for a terminal of any width, in Markdown, and as CSV."""

from __future__ import annotations

import csv
import io
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

import click
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as Drawn
from rich.text import Text

from ...arrays.tables import Table, markdown
from ...arrays.words import portable

FIGURE_FORMATS = (".png", ".svg", ".pdf")
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
_GAP = 3  # characters between columns
_NARROWEST = 16  # of the first column, where it is broken


def width() -> int:
    """Return the width of the page: $COLUMNS, else that of the terminal, else 80."""
    return shutil.get_terminal_size((80, 24)).columns


def limit() -> int | None:
    """Return the columns of a terminal, or $COLUMNS; None for a pipe or a file."""
    asked = os.environ.get("COLUMNS", "").isdigit()
    return width() if asked or (sys.stdout is not None and sys.stdout.isatty()) else None


class Grid:
    """The cells of a table as a page has them, with names broken at underscores if asked."""

    def __init__(self, table: Table, *, broken: bool = False) -> None:
        self.columns = [x for x in table.columns if x.show is not None]
        self.keys = table.keys
        names = [x.name.replace("_", "_\n") if broken else x.name for x in self.columns]
        tallest = max((x.count("\n") for x in names), default=0)
        self.names = ["\n" * (tallest - x.count("\n")) + x for x in names]
        self.rows = [[x.cell(row) for x in self.columns] for row in table.rows]
        values = [[x.value(row) for row in table.rows] for x in self.columns]
        texts = [all(isinstance(x, str | None) for x in column) for column in values]
        self.left = [i == 0 or text for i, text in enumerate(texts)]
        self.widths = [
            max(cell_len(line) for row in (self.names, *self.rows) for line in row[i].split("\n"))
            for i in range(len(names))
        ]

    def length(self, kept: Sequence[int], first: int) -> int:
        """Return characters of a line, `first` of these in the first column."""
        return first + sum(self.widths[i] for i in kept if i) + _GAP * (len(kept) - 1)

    def fitting(self, most: int) -> list[int]:
        """Return columns that fit on a page."""
        kept = list(range(len(self.columns)))
        for drop in sorted({x.drop for x in self.columns} - {0}):
            if self.length(kept, self.widths[0]) <= most:
                break
            kept = [i for i in kept if self.columns[i].drop != drop]
        return kept

    def parts(self, most: int, kept: Sequence[int]) -> list[list[int]]:
        """Return columns of several tables that fit on a page, each with the keys.

        The first is broken between words if all others are beside it then.
        """
        if self.length(kept, self.least()) <= most:
            return [[*kept]]
        keys = [*range(self.keys)]
        parts = [[*keys]]
        for i in kept[self.keys :]:
            wide = self.length([*parts[-1], i], self.widths[0]) > most
            if len(parts[-1]) > len(keys) and wide:
                parts.append([*keys])
            parts[-1].append(i)
        return parts

    def least(self) -> int:
        """Return the characters of the first column's longest word, and some more."""
        words = [word for row in (self.names, *self.rows) for word in row[0].split()]
        return min(self.widths[0], max(_NARROWEST, *map(cell_len, words), 0))

    def drawn(self, kept: Sequence[int], most: int = 10_000) -> str:
        """Return lines of some columns, without spaces at their ends."""
        console = Console(width=10_000, highlight=False, markup=False, emoji=False)
        drawn = Drawn(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
        first = min(self.widths[0], max(most - self.length(kept, 0), self.least()))
        for i in kept:
            drawn.add_column(
                self.names[i],
                justify="left" if self.left[i] else "right",
                no_wrap=i > 0,
                width=None if i else first,
            )
        for row in self.rows:
            styles = [STATUS_COLOURS.get(x.rpartition(" ")[2], "") for x in row]
            drawn.add_row(*(Text(row[i], styles[i]) for i in kept))
        with console.capture() as printed:
            console.print(drawn)
        return "\n".join(line.rstrip() for line in printed.get().splitlines())

    def markdown(self) -> str:
        return markdown(self.names, self.rows, self.left)


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
        """Print a table, and the units of its columns.

        Where it is too wide names are broken, some columns are left out, and others follow below.
        With `split` none is left out.
        """
        grid = Grid(table)
        every, most = [*range(len(grid.columns))], width()
        if self.markdown:
            _echo(grid.markdown())
        else:
            if grid.length(every, grid.widths[0]) > most:
                grid = Grid(table, broken=True)
            kept = every if split else grid.fitting(most)
            for number, part in enumerate(grid.parts(most, kept)):
                _echo("\n" * (number > 0) + grid.drawn(part, most))
            if out := [grid.columns[i].name for i in every if i not in kept]:
                self.say(f"left out at this width: {', '.join(out)} (--format csv has all)")
        if units := [f"{x.name}: {x.unit}" for x in grid.columns if x.unit]:
            self.say("; ".join(units))

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


def to_csv(tables: Sequence[Table]) -> str:
    """Write tables as one, which says of a row where it belongs if several have a name."""
    file, several = io.StringIO(), sum(bool(table.name) for table in tables) > 1
    names = dict.fromkeys(["table"] * several + [x.name for y in tables for x in y.columns])
    writer = csv.DictWriter(file, names, restval="", lineterminator="\n")
    writer.writeheader()
    for table in tables:
        for row in table.rows:
            cells = {x.name: _flat(portable(x.value(row))) for x in table.columns}
            writer.writerow(cells | {"table": table.name} if several else cells)
    return file.getvalue()


def _flat(value: Any) -> Any:
    """Write a list in a cell: words, or the index of a head."""
    if not isinstance(value, list):
        return value
    words = isinstance(value[0], str) if value else False
    return ("; " if words else ",").join(map(str, value))
