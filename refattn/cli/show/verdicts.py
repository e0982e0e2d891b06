"""Verdicts of `refattn verify`: on a page, in rows, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import click
import numpy as np

from ..._version import __version__
from ...arrays.words import printable
from ...files.tensors import Tensors
from ...rounding.problems import CALLED, Problem
from ...verification.findings import Part
from ...verification.verdict import Verdict
from .cells import dump, head_cell
from .page import Page


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
            yield "d_out is not used: there is no dq, dk or dv"
        if "omega" in shapes and self.problem.kind != "frequencies":
            yield "omega is not used: it is for --estimator rfa"
        if "lse" in shapes and ("out" not in shapes or self.parts["out"].numbers.lse is None):
            yield f"lse is not judged for {CALLED[self.problem.kind]}"
        if self.tensors.others:
            yield f"not read: {', '.join(self.tensors.others)}"


def print_verdict(verified: Verified, after: bool, page: Page) -> None:
    """Print the verdict on a file, after another or not."""
    if after:
        page.say()
    page.say(introduction(verified.tensors, verified.problem, verified.tensors.dtype))
    for line in verified.unread():
        page.say(printable(line))
    page.report(printable(str(verified.verdict)))


def introduction(tensors: Tensors, problem: Problem, dtype: str) -> str:
    """Write the name of the file, shapes, dtype, and the conventions, in two lines."""
    differing = {name: f" {x}" * (x != tensors.dtype) for name, x in tensors.dtypes.items()}
    shapes = ", ".join(f"{name} {x}{differing.get(name, '')}" for name, x in tensors.shapes.items())
    rounded = f" rounded to {dtype}" if tensors.dtype != dtype else ""
    said = [
        CALLED[problem.kind],
        f"scale {problem.scale:.6g}",
        "causal" if problem.causal else "not causal",
    ]
    if problem.window != (None, None):
        said.append(f"window {','.join('' if x is None else str(x) for x in problem.window)}")
    if problem.softcap is not None:
        said.append(f"softcap {problem.softcap:g}")
    said += [f"with {x}" for x in ("mask", "bias", "sinks") if x in tensors.shapes]
    name = click.format_filename(tensors.path.name)
    return printable(f"{name}: {shapes}, {tensors.dtype}{rounded}\n{', '.join(said)}")


def source_of(tensors: Tensors, problem: Problem) -> dict[str, Any]:
    """Return versions, what was read, and what it was compared with."""
    conventions = ("scale", "causal", "window", "softcap")
    return {
        "refattn": __version__,
        "numpy": np.__version__,
        "file": tensors.path.name,
        "shapes": {name: list(shape) for name, shape in tensors.shapes.items()},
        "dtypes": tensors.dtypes,
        "estimator": CALLED[problem.kind],
        **{name: getattr(problem, name) for name in conventions},
    }


def verdicts_to_json(files: Sequence[Verified]) -> str:
    """Format verdicts as JSON: one object, or a list if there are several files.

    Beside what `Verdict.to_json` holds: versions, name of the `file`, `shapes` and `dtypes` of its
    arrays, and the conventions that the numbers were compared with.
    """
    reports = [source_of(x.tensors, x.problem) | json.loads(x.verdict.to_json()) for x in files]
    return dump(reports if len(reports) > 1 else reports[0])


VERDICT_COLUMNS = (
    *("file", "part", "verdict", "profile", "dtype", "out_dtype", "alpha", "rms_z", "largest_z"),
    *("where", "known", "suspect", "estimate", "standard_error", "explained", "text", "seconds"),
)


def verdict_rows(
    files: Sequence[tuple[str, Verdict]],
) -> Iterator[dict[str, Any]]:
    """Yield a row for each suspect of each part of a file, or one for a part without any."""
    for file, whole in files:
        parts: Mapping[str, Verdict] = whole.parts or {whole.of: whole}
        for part, verdict in parts.items():
            said = {
                "file": file,
                "part": part,
                **{x: getattr(verdict, x) for x in ("verdict", "profile", "dtype", "out_dtype")},
                "alpha": verdict.alpha,
                "rms_z": verdict.z.rms,
                "largest_z": verdict.z.largest,
                "where": head_cell(verdict.z.where),
                "known": verdict.known,
                "seconds": verdict.seconds,
            }
            for suspect in verdict.suspects:
                yield said | {
                    "suspect": suspect.name,
                    "estimate": suspect.estimate,
                    "standard_error": suspect.error,
                    "explained": suspect.explained,
                    "text": suspect.text,
                }
            if not verdict.suspects:
                yield said
