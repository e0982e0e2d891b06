"""The command line: ``python -m validation.benchmarks``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

try:
    import click
    import matplotlib.figure  # noqa: F401  # figures come last, after minutes
    from rich.console import Console

    from . import environment, estimators, gradients, imports, memory, report, roofline, scaling
    from . import settings as presets
    from .cases import Record
    from .settings import Settings
    from .timing import PAUSE
except ModuleNotFoundError as error:
    sys.stderr.write(f"benchmarks: error: {error}; needs `pip install 'refattn[benchmarks]'`\n")
    sys.exit(2)

SECTIONS: dict[str, Callable[[Settings], Iterator[Record]]] = {
    "estimators": estimators.run,
    "gradients": gradients.run,
    "roofline": roofline.run,
    "scaling": scaling.run,
    "memory": memory.run,
    "imports": imports.run,
}


@click.command()
@click.option("--quick", is_flag=True, help="Small sizes and few rounds, to try it out.")
@click.option(
    "--only", multiple=True, type=click.Choice(list(SECTIONS)), help="A section; may be repeated."
)
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("build/benchmarks"),
    show_default=True,
    help="Where tables, numbers and figures go.",
)
@click.option("--repeats", type=click.IntRange(min=1), help="Rounds; 11 by default, quick 3.")
@click.option("--pause", type=click.FloatRange(min=0), default=PAUSE, show_default=True)
@click.option("--threads", type=click.IntRange(min=1), help="All that BLAS has by default.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
def main(
    quick: bool,
    only: tuple[str, ...],
    output: Path,
    repeats: int | None,
    pause: float,
    threads: int | None,
    seed: int,
) -> None:
    """Measure the times of refattn and other libraries, gradients, memory and import time.

    The exit status is 1 if a result of refattn is wrong, and otherwise 0, whatever the times.
    """
    settings = Settings(
        sizes=presets.QUICK if quick else presets.FULL,
        repeats=repeats or (3 if quick else 11),
        pause=pause,
        threads=threads or presets.available_threads(),
        seed=seed,
        new_memory=environment.map_large_arrays(),
    )
    console, progress = Console(), Console(stderr=True)
    sections: dict[str, list[Record]] = {}
    with presets.limit_threads(settings.threads):
        for name in [name for name in SECTIONS if not only or name in only]:
            sections[name] = []
            for record in SECTIONS[name](settings):
                sections[name].append(record)
                label = (
                    f"{record['case']}, {record['dtype']}" if record["dtype"] else record["case"]
                )
                progress.print(f"{name}: {label}", highlight=False)
            report.show(console, name, sections[name])
            results = report.collect(settings, sections)
            paths = report.write(results, output)  # an interrupted run keeps what it has
    report.show_targets(console, results)
    for path in paths:
        progress.print(f"wrote {path}", highlight=False)
    for reason, names in report.not_measured(sections).items():
        click.echo(f"not measured, {reason}: {'; '.join(names)}", err=True)
    wrong = report.wrong(sections)
    for name in wrong:
        click.echo(f"wrong: {name}", err=True)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main(prog_name="python -m validation.benchmarks")
