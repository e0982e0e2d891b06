"""The command `refattn same`: judge two outputs of a kernel for the same inputs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..arrays.tables import Column, Table
from .options import Answer, examples, file_option, one_line, publish
from .progress import Work
from .verify import judging_options

if TYPE_CHECKING:
    from ..files.tensors import Tensors
    from ..judge.rounding.problems import Problem
    from ..judge.runs import Same
    from .show.page import Page

_PATH = click.Path(exists=True, dir_okay=False, readable=True, path_type=Path)


@click.command(
    "same",
    epilog=examples(
        "refattn same dump.safetensors again.safetensors",
        "refattn same dump.safetensors again.safetensors --causal --bitwise",
    ),
)
@click.argument("a", metavar="A", type=_PATH)
@click.argument("b", metavar="B", type=_PATH)
@judging_options
@click.option("--bitwise", is_flag=True, help="Fail if any bit differs.")
@file_option("json", "Write the verdict.")
@click.pass_context
def same_command(
    context: click.Context, /, a: Path, b: Path, kind: str, json_path: Path | None, **options: Any
) -> None:
    """Judge whether two outputs are two runs of one right kernel.

    A and B (.safetensors or .npz) hold q, k, v and out, as for `refattn verify`; without q, B takes
    its inputs from A. Rows with the same query that see the same keys and values are compared, so
    one file may have more rows or batch members: do rows change when others are added? If bits
    differ, each output is verified, and the difference is tested, which two right kernels may have
    that cut keys elsewhere, sum in another order or run on another device. The exit status is 0 for
    PASS, 1 for FAIL, 3 for UNDERPOWERED, and 2 after an error.
    """
    with one_line(False):
        opened, found = _compare_files(a, b, **options)
    publish(
        Answer(partial(_print_same, opened, found), lambda: [_table_of_rows(found)], found.to_json),
        kind,
        json_path,
    )
    context.exit({"PASS": 0, "FAIL": 1, "UNDERPOWERED": 3}[found.verdict])


def _compare_files(
    a: Path,
    b: Path,
    *,
    dtype: Any,
    layout: str,
    profile: str | None,
    empty_rows: str,
    alpha: float,
    **options: Any,
) -> tuple[list[tuple[Tensors, Problem]], Same]:
    from ..files.tensors import open_tensors
    from ..judge.kinds.parts import PART_ARRAYS
    from ..judge.runs.comparing import KernelRun, compare_runs
    from ..judge.verification.door import check_alpha
    from ..judge.verification.empty_rows import settle
    from ..judge.verification.inputs import name_profiles
    from ..judge.verification.reading import list_gates, pose_tensors, read_parts

    bitwise = options.pop("bitwise")
    asked = options.pop("everything"), options.pop("hardware"), not options.pop("no_cause")
    also = {*list_gates(options["estimator"])} - {*PART_ARRAYS}
    opened, runs = [], []
    for path, inputs in ((a, None), (b, a)):
        x = open_tensors(
            path, dtype=dtype, layout=layout, required=("out",), also=also, inputs=inputs
        )
        problem = pose_tensors(x, **options)
        parts = settle({"out": read_parts(x, problem)["out"]}, empty_rows)
        opened.append((x, problem))
        kinds = profile, problem.kind, x.dtypes, x.dtype
        names = name_profiles(*kinds, bool(x.scales), parts)
        runs.append(KernelRun(parts["out"], x.dtype, names))
    with Work("Comparing"):
        found = compare_runs((runs[0], runs[1]), check_alpha(alpha), bitwise, asked)
    return opened, found


def _print_same(opened: list[tuple[Tensors, Problem]], found: Same, page: Page) -> None:
    from ..arrays.words import printable
    from .show.source import introduction

    for name, (x, problem) in zip("AB", opened, strict=True):
        page.say(f"{name}: {introduction(x, problem, x.dtype)}")
    page.report(printable(str(found)))


def _table_of_rows(found: Same) -> Table:
    """Put the rows that are too far apart below each other, or the verdict alone."""
    about = {"verdict": found.verdict, "equal": found.equal, "wrong": found.wrong}
    about |= {"compared": found.compared, "differing": found.differing, "p": found.p_value}
    rows = [about | {"row": {"where": list(x), "p": p}} for x, p in found.rows]
    columns = [Column(x, None) for x in (*about, "row.where", "row.p")]
    return Table("same", rows or [about], columns)
