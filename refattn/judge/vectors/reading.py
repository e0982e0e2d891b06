"""Files of golden vectors, read back."""

from __future__ import annotations

import io
import json
import math
import os
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from ...arrays.library import Floats
from ...arrays.words import with_known_keywords
from ...files.safetensors import read_tensors
from .cases import FORMATS, INSTALL_VECTORS, REALS, Case, Convention, check_format
from .recipes import files


@with_known_keywords
def load(directory: str | os.PathLike[str], *, format: str | None = None) -> list[Case]:
    """Read the golden vectors of a directory.

    Parameters
    ----------
    directory : path
        What `write` was given.
    format : {"json", "npz", "safetensors"}, optional
        By default the one that is there.

    Returns
    -------
    list of Case
        Of all files, in the order of their names.

    Raises
    ------
    ValueError
        If there are no files, files of several formats and none was chosen, or a file that
        cannot be read.

    Examples
    --------
    >>> import tempfile
    >>> from refattn.judge import vectors
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = vectors.write(folder)
    ...     cases = vectors.load(folder)
    >>> cases[0].id
    'coreset-basic-float64'
    """
    if format is not None:
        check_format(format)
    files = [(kind, path) for kind, path in files_in(directory) if format in (None, kind)]
    kinds = sorted({kind for kind, _ in files})
    if len(kinds) != 1:
        raise ValueError(
            f"`directory` must hold vectors of one format, or pass `format`: {str(directory)!r}"
            f" has {', '.join(kinds) or 'none'}."
        )
    cases = []
    for kind, path in files:
        try:
            document, arrays = read_vectors(kind, path)
            cases += cases_of(document, arrays)
        except ModuleNotFoundError:
            raise
        except Exception as error:  # parsers of foreign bytes raise all kinds
            raise ValueError(f"cannot read {str(path)!r}: {error!r}") from None
    return cases


def files_in(directory: str | os.PathLike[str]) -> list[tuple[str, Path]]:
    """Find the files of vectors, with their formats."""
    paths = ((kind, Path(directory) / f"{e}.{kind}") for kind in FORMATS for e in files())
    return [(kind, path) for kind, path in paths if path.is_file()]


def read_vectors(kind: str, path: Path) -> tuple[Any, dict[str, Floats] | None]:
    """Return the document of a file and, if they are not in it, its arrays."""
    if kind == "json":
        return parse(path.read_text("utf-8")), None
    if kind == "npz":
        # Of its own, NumPy leaves damaged files open.
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        return parse(bytes(arrays.pop("metadata")).decode()), arrays
    try:
        arrays, metadata = read_tensors(path)
    except ModuleNotFoundError as error:
        message = f"reading .safetensors {INSTALL_VECTORS}"
        raise ModuleNotFoundError(message, name=error.name) from None
    return parse(metadata["refattn"]), arrays


def parse(text: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in pairs}) < len(pairs):
            raise ValueError("an object has a key twice.")
        return dict(pairs)

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not a number of JSON.")

    try:
        return json.loads(text, object_pairs_hook=unique, parse_constant=refuse)
    except RecursionError:
        raise ValueError("objects or arrays are nested too deeply.") from None


def tests_of(document: Any) -> list[Any]:
    return [test for group in document["testGroups"] for test in group["tests"]]


def cases_of(document: Any, arrays: dict[str, Floats] | None = None) -> list[Case]:
    """Return the cases of a document, group by group."""
    name = document["estimator"]
    return [
        case_of(name, group, test, arrays)
        for group in document["testGroups"]
        for test in group["tests"]
    ]


def case_of(
    estimator: str,
    group: dict[str, Any],
    test: dict[str, Any],
    arrays: dict[str, Floats] | None = None,
) -> Case:
    """Turn an entry of a file, and the arrays that are not in it, into a case."""
    arguments: dict[str, Any] = {
        name: float.fromhex(x) if name in REALS and x is not None else x
        for name, x in test["arguments"].items()
    }
    if isinstance(arguments.get("window"), list):
        arguments["window"] = tuple(arguments["window"])
    said = group.get("convention")
    names, label = tuple(test["expected"]), test["id"]
    if arrays is not None:
        inputs = {name: arrays[f"{label}.{name}"] for name in test["inputs"]}
        parts = [
            {name: arrays[f"{label}.{name}.{part}"] for name in names}
            for part in ("expected", "expected_low", "size")
        ]
    else:
        inputs = {name: _from_tensor(x) for name, x in test["inputs"].items()}
        values = test["expected"]
        high = {name: [float(x) for x in values[name]["data"]] for name in names}
        low = {name: [_rest(x) for x in values[name]["data"]] for name in names}
        parts = [
            {name: np.array(part[name]).reshape(values[name]["shape"]) for name in names}
            for part in (high, low)
        ]
        parts.append(
            {n: np.array(x["data"], float).reshape(x["shape"])
             for n, x in ((n, values[n]["size"]) for n in names)}
        )  # fmt: skip
    expected, expected_low, size = parts
    return Case(
        id=label,
        estimator=estimator,
        comment=test["comment"],
        flags=tuple(test["flags"]),
        arguments=arguments,
        dtype=test["dtype"],
        inputs=inputs,
        expected=expected,
        expected_low=expected_low,
        size=size,
        cond=test["cond"],
        tolerance=test["tolerance"],
        result=test["result"],
        group=group["type"],
        convention=None if said is None else Convention(said["option"], said["value"]),
    )


def _rest(digits: str) -> float:
    """Return what rounding to float64 leaves of a number, 0 if it is none."""
    x = float(digits)
    return float(Fraction(digits) - Fraction(x)) if math.isfinite(x) else 0.0


def _from_tensor(x: dict[str, Any]) -> Floats:
    data = [float.fromhex(value) if isinstance(value, str) else value for value in x["data"]]
    return np.array(data).reshape(x["shape"])
