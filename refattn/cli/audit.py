"""The command `refattn audit`: which known bugs a test lets through."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .options import (
    Answer,
    causal_option,
    examples,
    file_option,
    format_option,
    one_line,
    publish,
    scale_option,
)
from .progress import Work

if TYPE_CHECKING:
    from ..judge.audits import Audit
    from .show.page import Page


@click.command(
    "audit",
    epilog=examples(
        "refattn audit tests/test_attn.py::test_forward --kernel mykernels:flash",
        "refattn audit check_attn.py --kernel mykernels:flash --json audit.json",
    ),
)
@click.argument("test", metavar="TEST")
@click.option("--kernel", metavar="MODULE:FUNCTION", help="The kernel that TEST calls.")
@click.option(
    "--layout",
    type=click.Choice(["bhnd", "bnhd"]),
    help="Order of the axes of the kernel's arrays.  [default: inferred from its output]",
)
@causal_option
@scale_option
@click.option("--strict", is_flag=True, help="Exit with status 1 if any known bug passes.")
@click.option(
    "--verbose", is_flag=True, help="Also name bugs that were not tried or cannot be detected."
)
@format_option
@file_option("json", "Write the result for every bug.")
def audit_command(
    test: str,
    kernel: str | None,
    layout: str | None,
    causal: bool,
    scale: float | None,
    strict: bool,
    verbose: bool,
    kind: str,
    json_path: Path | None,
) -> None:
    """List the known bugs that a test of a kernel does not notice.

    TEST is a pytest test (FILE.py::TEST), a script, or MODULE:FUNCTION. It runs unchanged, and then
    again for each known bug, with the output of --kernel replaced by that of a kernel with this
    bug. All cases of a parametrized test run for each bug; 'FILE.py::TEST[CASE]' is one case. Each
    bug that passes is listed with its largest error: an atol below it, with rtol 0, would reject
    the bug. Other results of the kernel stay as they are. Without --kernel, TEST is a
    function that returns (inputs, compare), as for refattn.audit. Exit status 1 means that
    the test accepts a trivial output, such as zeros. Control-C prints what was found so far.
    """
    from ..arrays.threads import Interrupted
    from ..judge.audits.runs import audit_test

    options = {"layout": layout, "causal": causal or None, "scale": scale}
    declared = {name: x for name, x in options.items() if x is not None}
    interruption = None
    with one_line(False), Work("Trying") as work:
        try:
            found = audit_test(test, kernel, declared, work.track)
        except Interrupted as error:
            interruption, found = error, error.found
    publish(
        Answer(partial(_print, test, found, verbose), found.tables, found.to_json), kind, json_path
    )
    if interruption is not None:
        raise interruption
    sys.exit(1 if found.blind or (strict and found.survivors) else 0)


def _print(test: str, found: Audit, verbose: bool, page: Page) -> None:
    shapes = ", ".join(f"{name} {shape}" for name, shape in found.shapes.items())
    page.say(f"{test}: {found.estimator} ({found.conventions}), {shapes}, {found.dtype}")
    first, *rest = found.lines(verbose)
    page.report(first)
    for line in rest:
        page.say(line)
    if found.survivors:
        page.say("\nbugs that pass, the largest error first")
        page.table(found.tables()[0])
        page.say("refattn explain NAME describes a bug")
