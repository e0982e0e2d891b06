"""The command line: ``python -m validation.digits``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

try:
    import click
except ModuleNotFoundError as error:
    sys.stderr.write(f"digits: error: {error}; needs `pip install 'refattn[validation]'`\n")
    sys.exit(2)

from ..benchmarks import environment
from . import libraries, precision

# Sections by name: each function returns text in markdown, and what JSON has of it.
SECTIONS: tuple[tuple[str, Callable[[], tuple[str, Any]]], ...] = (
    ("libraries", libraries.table),
    ("certified", precision.certificates_table),
    ("refattn", precision.functions_table),
    ("cost", precision.costs_table),
)


@click.command()
@click.option(
    "--only",
    type=click.Choice([name for name, _ in SECTIONS]),
    multiple=True,
    help="Sections, by default all.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("build/digits"),
    show_default=True,
    help="Where digits.md and digits.json go.",
)
def main(only: tuple[str, ...], out: Path) -> None:
    """Count the digits that are right."""
    texts, data = [], {"environment": environment.describe()}
    for name, section in SECTIONS:
        if name in (only or dict(SECTIONS)):
            text, data[name] = section()
            texts.append(f"## {name}\n\n{text}")
            click.echo(texts[-1])
    out.mkdir(parents=True, exist_ok=True)
    text = "\n".join(texts)
    for path, content in (
        (out / "digits.md", text),
        (out / "digits.json", json.dumps(data, indent=1, allow_nan=False) + "\n"),
    ):
        path.write_text(content, encoding="utf-8")
        click.echo(f"wrote {path}", err=True)


if __name__ == "__main__":
    main(prog_name="python -m validation.digits")
