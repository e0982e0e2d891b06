"""Results that are kept, written in one way: tables in Markdown, numbers as JSON, figures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from refattn.arrays.tables import markdown
from refattn.arrays.words import portable

from . import svg


class Section(NamedTuple):
    """A part of what a study found: a table under a title, and the numbers it is made of."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    left: int = 1  # columns that are set left

    @classmethod
    def of(cls, title: str, found: Sequence[Any]) -> Section:
        """Make a table of named tuples, under the names of their fields."""
        rows = [[f"{y:.3g}" if isinstance(y, float) else y for y in x] for x in found]
        return cls(title, found[0]._fields, rows)

    def markdown(self) -> str:
        left = [i < self.left for i in range(len(self.columns))]
        return f"## {self.title}\n\n{markdown(self.columns, self.rows, left)}"


def show(console: Console, section: Section) -> None:
    """Print a table; what is wrong is in red."""
    grid = Table(title=section.title, title_justify="left", box=box.SIMPLE_HEAD)
    for i, column in enumerate(section.columns):
        grid.add_column(column, justify="left" if i < section.left else "right")
    for row in section.rows:
        cells = [str(x) for x in row]
        grid.add_row(*cells, style="bold red" if cells[-1].endswith("WRONG") else None)
    console.print(grid, markup=False)


def to_json(content: Mapping[str, Any]) -> str:
    """Write JSON with a line for each key; null stands for a number that is not finite."""
    lines = (
        f"{json.dumps(key)}: {json.dumps(portable(value), allow_nan=False, ensure_ascii=False)}"
        for key, value in content.items()
    )
    return "{\n" + ",\n".join(lines) + "\n}\n"


def read(path: Path) -> dict[str, Any]:
    """Read numbers; none where there is no file."""
    return dict(json.loads(path.read_text("utf-8"))) if path.exists() else {}


def write(out: Path, contents: Mapping[str, Any]) -> list[Path]:
    """Write files into a folder: by name text, sections, numbers, or a title with a figure."""
    for name, x in contents.items():
        if isinstance(x, Mapping):
            text = to_json(x)
        elif isinstance(x, tuple):
            title, figure = x
            text = svg.for_file(svg.draw(figure, Path(name).stem), title)
        else:
            text = x if isinstance(x, str) else "\n".join(y.markdown() for y in x)
        replace(out / name, text)
    return [out / name for name in contents]


def replace(path: Path, text: str) -> None:
    """Replace a file at once: a reader sees the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".new")
    try:
        new.write_text(text, encoding="utf-8", newline="\n")
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
