"""Verdicts of `refattn verify`: on a page, in rows, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ...arrays.tables import Column, Table
from ...arrays.words import name_some, portable, printable, to_json
from ...files.tensors import Tensors
from ...judge.rounding.formats import FORMATS
from ...judge.rounding.problems import Problem
from ...judge.verification.findings import UNUSED_D_OUT, Part
from ...judge.verification.verdict import Verdict
from .page import Page
from .source import introduction, source_of


class Verified(NamedTuple):
    """A file with its verdict."""

    tensors: Tensors
    problem: Problem
    parts: Mapping[str, Part]
    verdict: Verdict

    def unread(self) -> Iterator[str]:
        """Yield what the file holds that was not judged or not used, a line each."""
        shapes = self.tensors.shapes
        if "d_out" in shapes and not {"dq", "dk", "dv"} & {*shapes}:
            yield UNUSED_D_OUT
        if "omega" in shapes and self.problem.kind not in ("frequencies", "text"):
            yield "omega is not used: it is for --estimator rfa"
        if "lse" in shapes and "out" not in shapes:
            yield "lse is judged only with out"
        elif "lse" in shapes and self.parts["out"].numbers.lse is None:
            yield f"lse is not judged for {self.problem.called}"
        if self.tensors.others:
            yield f"not read: {name_some(self.tensors.others)}"

    def list_unscaled(self) -> list[str]:
        """List arrays of 8 bits without a scale."""
        dtypes = self.tensors.dtypes
        eight = (x for x in "qkv" if dtypes[x] in FORMATS and FORMATS[dtypes[x]].has_8_bits)
        return [x for x in eight if x not in self.tensors.scales]


def print_verdict(verified: Verified, after: bool, verbose: bool, page: Page) -> None:
    """Print the verdict on a file, after another or not."""
    if after:
        page.say()
    page.say(introduction(verified.tensors, verified.problem, verified.tensors.dtype))
    for line in verified.unread():
        page.say(printable(line))
    page.report(printable(verified.verdict.write(verbose)))
    if verified.verdict.verdict == "FAIL" and verified.tensors.others:
        others = name_some(verified.tensors.others)
        page.say(printable(f"  {others}: not read; if the kernel used it, that may be the cause"))
    bare = verified.list_unscaled()
    if verified.verdict.verdict == "FAIL" and bare:
        scales = ", ".join(f"{x}_scale" for x in bare)
        page.say(
            f"  {', '.join(bare)}: 8 bits without a scale; if the kernel uses scales, add {scales}"
        )


def verdicts_to_json(files: Sequence[Verified]) -> str:
    """Format verdicts as JSON: one object, or a list if there are several files.

    Beside what `Verdict.to_json` holds: versions, name of the `file`, `shapes` and `dtypes` of its
    arrays, and the conventions that the numbers were compared with.
    """
    reports = [source_of(x.tensors, x.problem) | portable(x.verdict) for x in files]
    return to_json(reports if len(reports) > 1 else reports[0])


def verdicts_to_html(files: Sequence[Verified], verbose: bool) -> str:
    """Format verdicts as a page that needs no other file."""
    from ... import __version__
    from ...judge.conformance.report.report import load_templates

    shown = [
        {
            "name": x.tensors.path.name,
            "verdict": x.verdict.verdict,
            "about": introduction(x.tensors, x.problem, x.tensors.dtype),
            "parts": {name: part.verdict for name, part in x.verdict.parts.items()},
            "text": "\n".join([*x.unread(), x.verdict.write(verbose)]),
        }
        for x in files
    ]
    page = load_templates().get_template("verdicts.html")
    return printable(page.render(files=shown, version=__version__))


def verdicts_table(files: Sequence[Verified]) -> Table:
    """Put the rows of files below each other."""
    tables = [table for x in files for table in x.verdict.tables()]
    rows = [
        {"file": file.tensors.path.name, **row}
        for file, table in zip(files, tables, strict=True)
        for row in table.rows
    ]
    return tables[0]._replace(rows=rows, columns=[Column("file", None), *tables[0].columns])
