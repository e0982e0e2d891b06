"""The command line: ``python -m validation.model``."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

try:
    import click
    import matplotlib.figure  # noqa: F401  # the figure comes last, after minutes
    from rich.console import Console
    from rich.progress import track as progress
except ModuleNotFoundError as error:
    sys.stderr.write(f"model: error: {error}; needs `pip install 'refattn[model]'`\n")
    sys.exit(2)

from refattn.compare import names

from .. import suite
from ..benchmarks import environment
from . import measure, minilm, report

THRESHOLD = 0.99


@click.command()
@click.option("--estimators", default="all", show_default=True, metavar="NAME,NAME,...")
@click.option("--features", default="8,32,128", show_default=True, metavar="S,S,...")
@click.option(
    "--layers",
    default="all,5",
    show_default=True,
    metavar="LAYER,LAYER,...",
    help="What is replaced at once: all layers, or the one of this number, from 0.",
)
@click.option(
    "--texts",
    "each",
    type=click.IntRange(2, 4),
    default=4,
    show_default=True,
    help="Of each topic.",
)
@click.option("--draws", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("build/model"),
    show_default=True,
    help="Where tables, numbers and the figure go.",
)
def main(
    estimators: str, features: str, layers: str, each: int, draws: int, seed: int, out: Path
) -> None:
    """Replace the attention of a sentence encoder by estimators, and see what becomes of it."""
    chosen = names() if estimators == "all" else estimators.split(",")
    for name in chosen:
        if name not in names():
            raise click.UsageError(f"--estimators must be all or of {', '.join(names())}: {name}.")
    sizes = _sizes(features)
    if missing := suite.missing(minilm.MODULES):
        click.echo(f"not installed: {', '.join(missing)}; {minilm.INSTALL}", err=True)
        sys.exit(2)
    topics = [topic[:each] for topic in minilm.texts()]
    texts = [text for topic in topics for text in topic]
    ids = minilm.tokens(texts)
    study = measure.Study(minilm.load(), ids, [i for i, topic in enumerate(topics) for _ in topic])
    where = _layers(layers, study.encoder.depth)
    rows, skipped = measure.measure(
        study,
        estimators=chosen,
        sizes=sizes,
        layers=where,
        draws=draws,
        seed=seed,
        track=_bar("Measuring"),
    )
    errors = measure.tolerated(
        study, rows, threshold=THRESHOLD, seed=seed, track=_bar("What is tolerated")
    )
    results = {
        "settings": {
            "model": minilm.NAME,
            "package": minilm.PACKAGE,
            "texts": len(texts),
            "tokens": int(sum(map(len, ids))),
            "sizes": sizes,
            "layers": where,
            "draws": draws,
            "seed": seed,
        },
        "environment": environment.describe(),
        "rows": [row._asdict() for row in rows],
        "skipped": [entry._asdict() for entry in skipped],
        "tolerated": {
            "model": minilm.NAME,
            "measure": "mean cosine of its embeddings to the exact ones",
            "threshold": THRESHOLD,
            "errors": {name: float(f"{error:.3g}") for name, error in errors.items()},
        },
    }
    click.echo(report.overview(results))
    for entry in skipped:
        click.echo(f"skipped: {entry.label}: {entry.reason}")
    for path in report.write(results, out):
        click.echo(f"wrote {path}", err=True)


def _bar(description: str) -> Any:
    """Iterate with a progress bar."""

    def track(items: Sequence[Any]) -> Iterable[Any]:
        return progress(items, description, console=Console(stderr=True), transient=True)

    return track


def _sizes(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise click.UsageError(f"--features must be positive integers, got {text!r}.")
    return [int(part) for part in parts]


def _layers(text: str, depth: int) -> list[str]:
    layers = text.split(",")
    for layer in layers:
        if layer not in ("all", *map(str, range(depth))):
            raise click.UsageError(f"--layers must be of all, 0, ..., {depth - 1}, got {layer!r}.")
    return layers


if __name__ == "__main__":
    main(prog_name="python -m validation.model")
