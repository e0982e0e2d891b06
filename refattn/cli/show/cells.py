"""What tables, rows and JSON of all commands write alike: numbers, heads, the name of the file."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from ..._version import __version__
from ...arrays.library import Floats
from ...arrays.words import head_number, portable
from ...compare import Row
from ...registry import ESTIMATORS


def digits(value: Any) -> str:
    return f"{value:#.3g}".rstrip(".")


def uncertainty(value: float) -> str:
    """Return a standard error; nothing where there is no chance, - where it is not known."""
    return "-" if math.isnan(value) else f"{value:.2g}" if value else ""


def count(value: float) -> str:
    if not math.isfinite(value):
        return "-"
    return f"{value:g}" if value < 1e6 else f"{value:.2e}"


def digits_or_dash(value: Any) -> str:
    return "-" if math.isnan(value) else digits(value)


def heading(path: Path, arrays: dict[str, Floats]) -> str:
    """Write the name of the file, shapes and dtype."""
    shapes = ", ".join(f"{name} {x.shape}" for name, x in arrays.items())
    return f"{click.format_filename(path.name)}: {shapes}, {arrays['q'].dtype}"


def origin(path: Path, arrays: dict[str, Floats]) -> dict[str, Any]:
    """Return versions, and what was read."""
    return {
        "refattn": __version__,
        "numpy": np.__version__,
        "file": path.name,
        "shapes": {name: list(x.shape) for name, x in arrays.items()},
        "dtype": str(arrays["q"].dtype),
    }


def dump(report: Any) -> str:
    return json.dumps(portable(report), indent=2, allow_nan=False) + "\n"


def head_cell(index: Sequence[int] | None) -> str:
    return "" if index is None else head_number(index)


def name_of(row: Row) -> dict[str, Any]:
    return {"estimator": row.estimator, "samples": row.samples}


def has_draws(row: Row) -> bool:
    return row.estimator in ESTIMATORS and ESTIMATORS[row.estimator].has("random")
