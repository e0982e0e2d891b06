"""Studies whose results are kept: ``python -m validation.studies NAME`` runs and writes one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

try:
    import click
    import matplotlib.figure  # noqa: F401  # figures come last, after minutes
    from rich.console import Console
    from rich.progress import track as progress
except ModuleNotFoundError as error:
    sys.stderr.write(f"studies: error: {error}; needs `pip install 'refattn[validation]'`\n")
    sys.exit(2)

from refattn.compare import names as estimator_names

from . import bugs, digits, results, suite
from .benchmarks import environment
from .bugs import runner
from .digits import libraries, precision
from .model import measure, minilm, report

_LEAST = click.IntRange(min=1)
DIGITS: dict[str, Callable[[], tuple[list[results.Section], Any]]] = {
    "libraries": libraries.table,
    "certified": precision.certificates_table,
    "refattn": precision.functions_table,
    "cost": precision.costs_table,
}


@click.group()
def main() -> None:
    """Run a study and write its results."""


def _out(default: Path) -> Callable[[Any], Any]:
    return click.option(
        "--out",
        type=click.Path(file_okay=False, path_type=Path),
        default=default,
        show_default=True,
        help="Where tables, numbers and figures go.",
    )


def _write(out: Path, contents: Mapping[str, Any]) -> None:
    for path in results.write(out, contents):
        click.echo(f"wrote {path}", err=True)


@main.command("digits", help=digits.__doc__)
@click.option("--only", type=click.Choice(list(DIGITS)), multiple=True, help="Sections.")
@_out(Path("build/digits"))
def digits_command(only: tuple[str, ...], out: Path) -> None:
    sections: list[results.Section] = []
    data: dict[str, Any] = {"environment": environment.describe()}
    for name in only or DIGITS:
        found, data[name] = DIGITS[name]()
        click.echo("\n".join(x.markdown() for x in found))
        sections += found
    _write(out, {"digits.md": sections, "digits.json": data})


@main.command("bugs", help=bugs.__doc__)
@click.argument("entries", nargs=-1, metavar="[ENTRY]...")
@click.option("--render", is_flag=True, help="Write the page from bugs.json, and run nothing.")
@click.option("--list", "listing", is_flag=True, help="Print the entries and stop.")
@_out(Path(bugs.__file__).parent)
def bugs_command(entries: tuple[str, ...], render: bool, listing: bool, out: Path) -> None:
    known = [x.name for x in runner.ENTRIES]
    if listing:
        click.echo("\n".join(known))
        return
    for name in entries:
        if name not in known:
            raise click.UsageError(f"no entry is called {name!r}; --list prints them.")
    found = results.read(out / "bugs.json")
    if not render:
        found = runner.run(runner.ENTRIES, found, only=entries, say=click.echo)
    _write(out, {"bugs.json": found, "README.md": runner.render(found, runner.ENTRIES)})


@main.command("model", help="Replace the attention of a sentence encoder by estimators.")
@click.option("--estimators", default="all", show_default=True, metavar="NAME,NAME,...")
@click.option("--features", default="8,32,128", show_default=True, metavar="S,S,...")
@click.option(
    "--layers",
    default="all,5",
    show_default=True,
    metavar="LAYER,LAYER,...",
    help="Layers to replace: all at once, or one, counted from 0.",
)
@click.option(
    "--texts", type=click.IntRange(2, 4), default=4, show_default=True, help="Texts per topic."
)
@click.option("--draws", type=_LEAST, default=2, show_default=True)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@_out(Path("build/model"))
def model_command(
    estimators: str, features: str, layers: str, texts: int, draws: int, seed: int, out: Path
) -> None:
    chosen = estimator_names() if estimators == "all" else estimators.split(",")
    for name in chosen:
        if name not in estimator_names():
            known = ", ".join(estimator_names())
            raise click.UsageError(f"--estimators must be all or of {known}: {name}.")
    sizes = features.split(",")
    if not all(x.isdecimal() and int(x) for x in sizes):
        raise click.UsageError(f"--features must be positive integers, got {features!r}.")
    if missing := suite.missing(minilm.MODULES):
        click.echo(f"not installed: {', '.join(missing)}; {minilm.INSTALL}", err=True)
        sys.exit(2)
    study, about = measure.study_texts(texts)
    where = layers.split(",")
    for layer in where:
        if layer not in ("all", *map(str, range(study.encoder.depth))):
            last = study.encoder.depth - 1
            raise click.UsageError(f"--layers must be one of all, 0, ..., {last}, got {layer!r}.")
    options: dict[str, Any] = {
        "sizes": [*map(int, sizes)],
        "layers": where,
        "draws": draws,
        "seed": seed,
    }
    rows, skipped = measure.measure(study, estimators=chosen, track=_bar("Measuring"), **options)
    found = {
        "settings": about | options,
        "environment": environment.describe(),
        "rows": [row._asdict() for row in rows],
        "skipped": skipped,
        "tolerated": measure.describe_tolerated(study, rows, seed, _bar("What is tolerated")),
    }
    overview = report.overview(found)
    click.echo(overview.markdown())
    for entry in skipped:
        click.echo(f"skipped: {entry.label}: {entry.reason}")
    figure = report.TITLE, report.figure(found)
    _write(out, {"results.json": found, "results.md": [overview], "model.svg": figure})


def _bar(description: str) -> Any:
    """Iterate with a progress bar."""

    def track(items: Sequence[Any]) -> Iterable[Any]:
        return progress(items, description, console=Console(stderr=True), transient=True)

    return track


if __name__ == "__main__":
    main(prog_name="python -m validation.studies")
