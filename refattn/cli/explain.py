"""The command `refattn explain`: what a name in a report means."""

from __future__ import annotations

import click

from .options import Unusable, examples, needed, words_of
from .show.page import hanging, limit
from .streams import unread

_EXPLANATIONS = "judge.conformance.report.explanations"


@click.command(
    epilog=examples("refattn explain frequency_law", "refattn explain softmax-scale-missing")
)
@click.argument("name", shell_complete=words_of(lambda: needed(_EXPLANATIONS).names()))
def explain(name: str) -> None:
    """Explain a name in a report: a check, a known bug, an estimator, a capability, a tag, ...

    For a check, print what it tests and how, known bugs that it detects, and what to look at first.
    For a known bug, print what it does, the lines that it changes, and the checks that detect it.
    Reports print these names; `refattn check --list` prints the names of checks and options.
    """
    try:
        lines: list[str] = needed(_EXPLANATIONS).explain(name)
    except ValueError as error:
        raise Unusable(str(error)) from None
    with unread():
        click.echo("\n".join(hanging(line, min(limit() or 100, 100)) for line in lines))
