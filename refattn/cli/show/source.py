"""Where results come from, in words and as JSON: versions, the file and its arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import numpy as np

from ..._version import __version__
from ...arrays.library import Floats
from ...arrays.words import printable
from ...files.tensors import Tensors
from ...judge.rounding.problems import Problem


def heading(path: Path, arrays: dict[str, Floats]) -> str:
    """Write the name of the file, shapes and dtype."""
    shapes = ", ".join(f"{name} {x.shape}" for name, x in arrays.items())
    return f"{click.format_filename(path.name)}: {shapes}, {arrays['q'].dtype}"


def origin(path: Path, arrays: dict[str, Floats]) -> dict[str, Any]:
    """Return the versions, the name of the file, and shapes and dtype of its arrays."""
    shapes = {name: x.shape for name, x in arrays.items()}
    return _versions(path) | {"shapes": shapes, "dtype": str(arrays["q"].dtype)}


def _versions(path: Path) -> dict[str, Any]:
    return {"refattn": __version__, "numpy": np.__version__, "file": path.name}


def introduction(tensors: Tensors, problem: Problem, dtype: str) -> str:
    """Write the name of the file, shapes, dtype, and the conventions, in two lines."""
    differing = {name: f" {x}" * (x != tensors.dtype) for name, x in tensors.dtypes.items()}
    given = dict(tensors.shapes)
    if tensors.sequences is not None:
        del given["mask"]  # which is made of them
    shapes = ", ".join(f"{name} {x}{differing.get(name, '')}" for name, x in given.items())
    rounded = f" rounded to {dtype}" if tensors.dtype != dtype else ""
    if (stored := tensors.stored["q"]) != tensors.dtypes["q"]:
        rounded = f" ({stored} arrays that hold {tensors.dtypes['q']} numbers){rounded}"
    band = problem if problem.packed is None else problem.packed
    said = [problem.called]
    if problem.kind != "map":  # linear attention has no scale
        said.append(f"scale {problem.scale:.6g}")
    said.append("causal" if band.causal else "not causal")
    if band.window != (None, None):
        said.append(f"window {','.join('' if x is None else str(x) for x in band.window)}")
    options = getattr(problem.derived, "options", {}).items()
    said += [f"{x.replace('_', ' ')} {y}" for x, y in options if y is not None]
    if problem.softcap is not None:
        said.append(f"softcap {problem.softcap:g}")
    said += [f"with {x}" for x in ("mask", "bias", "sinks") if x in given]
    if problem.packed is not None:
        said.append(f"{np.diff(problem.packed.queries).size} sequences, each by itself")
        said.append("shapes with heads before tokens")
    name = click.format_filename(tensors.path.name)
    others = "others " * any(differing[x] for x in given if x in differing)
    return printable(f"{name}: {shapes}, {others}{tensors.dtype}{rounded}\n{', '.join(said)}")


def source_of(tensors: Tensors, problem: Problem) -> dict[str, Any]:
    """Return the versions, the file and its arrays, and the formula it was compared with."""
    read = {"shapes": tensors.shapes, "dtypes": tensors.dtypes, "estimator": problem.called}
    band = problem if problem.packed is None else problem.packed
    conventions = {"scale": problem.scale, "causal": band.causal, "window": band.window}
    return _versions(tensors.path) | read | conventions | {"softcap": problem.softcap}
