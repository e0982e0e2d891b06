"""The command line: ``python -m validation.bugs``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

try:
    import click
except ModuleNotFoundError:
    sys.stderr.write("bugs: error: needs `pip install 'refattn[validation]'`\n")
    sys.exit(2)

from . import exact, landmarks, linear, performers, readings, report, runner, samplers

FAMILIES = (performers, landmarks, linear, exact, samplers)
FINDINGS = tuple(x for family in FAMILIES for x in family.FINDINGS)
TRIED = tuple(x for family in FAMILIES for x in family.TRIED)


@click.command()
@click.argument("entries", nargs=-1, metavar="[ENTRY]...")
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(__file__).parent,
    help="Where README.md and bugs.json are read and written; by default beside this script.",
)
@click.option("--render", is_flag=True, help="Write the page from bugs.json, and run nothing.")
@click.option("--list", "listing", is_flag=True, help="Print the entries and stop.")
def main(entries: tuple[str, ...], output: Path, render: bool, listing: bool) -> None:
    """Run every ENTRY, or those named, and write the page.

    An entry whose package is not installed is skipped; one that no longer reproduces is removed.
    """
    known = [x.name for x in (*FINDINGS, *TRIED)]
    if listing:
        click.echo("\n".join(known))
        return
    for name in entries:
        if name not in known:
            raise click.UsageError(f"no entry is called {name!r}; --list prints them.")
    file = output / "bugs.json"
    results = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if not render:
        results = runner.collect(
            FINDINGS, TRIED, readings.READINGS, results, only=entries, say=click.echo
        )
        output.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(results, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    (output / "README.md").write_text(report.render(results), encoding="utf-8")


if __name__ == "__main__":
    main(prog_name="python -m validation.bugs")
