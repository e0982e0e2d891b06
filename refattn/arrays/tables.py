"""Tables of results, with names and units of columns, written as pages, CSV and JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from .words import head_number


class Column(NamedTuple):
    """A name, and how what is under it is written."""

    name: str  # the key of a value in a row; a.b is the key b of what is under a
    show: Callable[[Any], str] | None = str  # on a page; None for a column that pages leave out
    unit: str = ""  # what it is measured in or relative to, where its name does not say so
    drop: int = 0  # too narrow pages leave out columns of 1 first, then of 2, ...; none of 0

    def value(self, row: Any) -> Any:
        """Return what a row has under the name; None where it has nothing."""
        for key in self.name.split("."):
            row = row.get(key) if isinstance(row, Mapping) else None
        return row

    def cell(self, row: Mapping[str, Any]) -> str:
        """Write the value of a row: nothing for None, - for what is not known."""
        value = self.value(row)
        if value is None or self.show is None:
            return ""
        return "-" if isinstance(value, float) and math.isnan(value) else self.show(value)


class Table(NamedTuple):
    """Rows under columns."""

    name: str  # the key of the rows in JSON
    rows: Sequence[Mapping[str, Any]]  # JSON has all values, pages and CSV those under a column
    columns: Sequence[Column]
    keys: int = 1  # how many columns at the start say which row it is

    def part(self, name: str) -> Table:
        """Take what the rows have under one name, beside their first column.

        >>> rows = [{"head": 0, "law": {"ra": 2}}]
        >>> table = Table("heads", rows, [Column("head"), Column("law.ra")]).part("law")
        >>> [column.name for column in table.columns], table.rows
        (['head', 'ra'], [{'head': 0, 'ra': 2}])
        """
        first, *others = self.columns
        inside = [x for x in others if x.name.startswith(f"{name}.")]
        columns = [first, *(x._replace(name=x.name.removeprefix(f"{name}.")) for x in inside)]
        rows = [{first.name: row[first.name], **row[name]} for row in self.rows]
        return Table(name, rows, columns)

    def pivot(self, index: str, across: Sequence[str], show: Callable[[Any], str]) -> Table:
        """Make a row of all rows with the same value of one column, side by side.

        Those are named by their values of `across`; `show` writes a cell from a row.

        >>> table = Table("", [{"S": 1, "of": "a"}, {"S": 1, "of": "b"}], [Column("S")])
        >>> [column.name for column in table.pivot("S", ["of"], str).columns]
        ['S', 'a', 'b']
        """
        column = next(x for x in self.columns if x.name == index)
        found: dict[str, dict[str, Any]] = {}
        for row in self.rows:
            label = "@".join(str(row[x]) for x in across if row[x] is not None)
            found.setdefault(column.cell(row), {index: row[index]})[label] = row
        names = dict.fromkeys(x for row in found.values() for x in row if x != index)
        columns = [column, *(Column(name, show) for name in names)]
        return Table(self.name, list(found.values()), columns)


def markdown(names: Sequence[str], rows: Iterable[Sequence[Any]], left: Sequence[bool]) -> str:
    r"""Write a table in Markdown; numbers stand to the right.

    >>> print(markdown(["a", "b"], [["x | y", 1]], [True, False]), end="")
    | a | b |
    | --- | ---: |
    | x \| y | 1 |
    """
    lines = [[" ".join(str(x).replace("|", r"\|").split()) for x in row] for row in (names, *rows)]
    lines.insert(1, ["---" if x else "---:" for x in left])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def digits(value: Any) -> str:
    """Write a number with three digits.

    >>> digits(0.1), digits(1234.0)
    ('0.100', '1.23e+03')
    """
    return f"{value:#.3g}".rstrip(".")


def two_digits(value: float) -> str:
    """Write a number with two digits; nothing for 0, where there is no chance."""
    return f"{value:.2g}" if value else ""


def count(value: float) -> str:
    """Write a number of features; - if there is none."""
    if not math.isfinite(value):
        return "-"
    return f"{value:g}" if value < 1e6 else f"{value:.2e}"


def write_head(index: Any) -> str:
    """Write where a head is, or what stands in its place."""
    return index if isinstance(index, str) else head_number(index)
