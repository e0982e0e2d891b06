"""The command line: ``python -m validation.site``."""

from __future__ import annotations

import sys
from pathlib import Path

try:
    import click

    from . import builder
except ModuleNotFoundError as error:
    sys.stderr.write(f"validation.site: error: needs `pip install 'refattn[site]'` ({error})\n")
    sys.exit(2)


@click.command()
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default="build/site",
    show_default=True,
    help="Where the pages go.",
)
@click.option(
    "--report",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="The report of a run of `python -m validation`; without it, that of a few quick claims.",
)
def main(out: Path, report: Path | None) -> None:
    """Build the guide, the API, the report and the gallery as pages that need no server."""
    try:
        built = builder.build(out, report=report)
    except OSError as error:
        raise click.ClickException(f"cannot write to {out}: {error}") from None
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    click.echo(f"wrote {out / 'index.html'}: {built.pages} pages, {built.seconds:.1f} s")
    for problem in built.problems:
        click.echo(f"broken: {problem}", err=True)
    sys.exit(1 if built.problems else 0)


if __name__ == "__main__":
    main(prog_name="python -m validation.site")
