"""Golden vectors in forms that other test suites take: a header for C, test data of ONNX."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...registry import ESTIMATORS
from .cases import INSTALL, Case
from .reading import case_of, tests_of
from .solving import documents

__all__ = ["EXPORTS", "export"]

EXPORTS = ("c", "onnx")

_Array = npt.NDArray[Any]
_OPSET = 23  # the first with Attention


def export(directory: str | os.PathLike[str], *, format: str) -> list[Path]:
    """Write the golden vectors for other test suites.

    Parameters
    ----------
    directory : path
        Made if it is not there. Files of the same name are replaced, others left alone.
    format : {"c", "onnx"}
        "c" is one header of C99 with a table of all cases, numbers as hexadecimal floats. "onnx"
        has a folder for each case that the operator Attention of opset 23 can express: exact
        attention without gradients, where every query sees a key, causal with as many queries as
        keys: `model.onnx`, and in `test_data_set_0` the inputs and the output, as ONNX's own tests
        of operators have them.

    Returns
    -------
    list of Path
        The files written.

    Raises
    ------
    ValueError
        If the format is unknown.
    ModuleNotFoundError
        If mpmath, or for its format onnx, is not installed.

    Examples
    --------
    >>> import tempfile
    >>> from refattn.conformance import vectors
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     [path.name for path in vectors.export(folder, format="c")]
    ['refattn_vectors.h']
    """
    if format not in EXPORTS:
        raise ValueError(f"`format` must be one of {', '.join(EXPORTS)}, got {format!r}.")
    cases = [case_of(name, test) for name, doc in documents().items() for test in tests_of(doc)]
    content = _header(cases) if format == "c" else _models(cases)
    paths = []
    for name, data in content:
        path = Path(directory, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        paths.append(path)
    return paths


# --- C --------------------------------------------------------------------------------------------

_STRUCTS = """/* Golden vectors of refattn: |output - data| <= tolerance * size must hold. */
#ifndef REFATTN_VECTORS_H
#define REFATTN_VECTORS_H

#include <math.h>

typedef struct { /* row-major; of masks 1 where a query sees a key; size is of outputs */
    const char *name;
    int axes, shape[4];
    const double *data, *size;
} refattn_tensor;

typedef struct {
    const char *id, *estimator, *features, *comment;
    double scale; /* NAN means 1 / sqrt(d) */
    int causal;
    double tolerance_float64, tolerance_float32; /* 0 if it says nothing in this type */
    int inputs, outputs;
    const refattn_tensor *input, *output;
} refattn_case;

"""


def _header(cases: list[Case]) -> Iterator[tuple[str, bytes]]:
    """One header with all cases."""
    arrays, rows = [], []
    for i, case in enumerate(cases):
        tables: dict[str, list[str]] = {"in": [], "out": []}
        for name, x in case.inputs.items():
            at = f"refattn_{i}_{name}"
            arrays.append(_numbers(at, x))
            tables["in"].append(_tensor(name, x, at, "0"))
        for name, x in case.expected.items():
            at = f"refattn_{i}_{name}_out"
            size = np.broadcast_to(case.size[name], x.shape)
            arrays += [_numbers(at, x), _numbers(f"{at}_size", size)]
            tables["out"].append(_tensor(name, x, at, f"{at}_size"))
        for side, table in tables.items():
            arrays.append(
                f"static const refattn_tensor refattn_{i}_{side}puts[] = {{\n    "
                + ",\n    ".join(table)
                + "};\n"
            )
        rows.append(_row(i, case))
    text = _STRUCTS + "\n".join(arrays)
    text += (
        "\nstatic const refattn_case refattn_cases[] = {\n    " + ",\n    ".join(rows) + "};\n\n"
    )
    text += f"enum {{ REFATTN_CASES = {len(cases)} }};\n\n#endif\n"
    yield "refattn_vectors.h", text.encode("ascii")


def _row(i: int, case: Case) -> str:
    scale = case.arguments.get("scale")
    words = (case.id, case.estimator, case.arguments.get("features", ""), case.comment)
    numbers = (
        "NAN" if scale is None else float(scale).hex(),
        str(int(case.arguments.get("causal", False))),
        *(float(case.tolerance.get(dtype, 0.0)).hex() for dtype in ("float64", "float32")),
        str(len(case.inputs)),
        str(len(case.expected)),
        f"refattn_{i}_inputs",
        f"refattn_{i}_outputs",
    )
    return "{" + ", ".join((*(f'"{x}"' for x in words), *numbers)) + "}"


def _numbers(name: str, x: _Array) -> str:
    data = ", ".join(float(value).hex() for value in x.ravel())
    return f"static const double {name}[] = {{{data}}};\n"


def _tensor(name: str, x: _Array, data: str, size: str) -> str:
    shape = ", ".join(str(length) for length in x.shape)
    return f'{{"{name}", {x.ndim}, {{{shape}}}, {data}, {size}}}'


# --- ONNX -----------------------------------------------------------------------------------------


def _models(cases: list[Case]) -> Iterator[tuple[str, bytes]]:
    """Models of one node, with what goes in and what must come out."""
    try:
        helper, numpy_helper = (
            import_module(f"onnx.{name}") for name in ("helper", "numpy_helper")
        )
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"vectors for ONNX {INSTALL} and onnx", name=error.name) from None
    for case in filter(_expressible, cases):
        dtype = np.float32 if "float32" in case.tolerance else np.float64
        arrays = {name: _four_axes(x).astype(dtype) for name, x in case.inputs.items()
                  if name != "mask"}  # fmt: skip
        if "mask" in case.inputs:
            n, m = arrays["q"].shape[-2], arrays["k"].shape[-2]
            arrays["mask"] = np.broadcast_to(case.inputs["mask"], (n, m))
        arrays["out"] = _four_axes(case.expected["out"]).astype(dtype)
        named = {
            name: numpy_helper.from_array(np.ascontiguousarray(x), name)
            for name, x in arrays.items()
        }
        values = {
            name: helper.make_tensor_value_info(name, x.data_type, list(x.dims))
            for name, x in named.items()
        }
        options: dict[str, Any] = {"is_causal": int(case.arguments["causal"])}
        if case.arguments.get("scale") is not None:
            options["scale"] = float(case.arguments["scale"])
        inputs = [name for name in named if name != "out"]
        node = helper.make_node("Attention", inputs, ["out"], **options)
        graph = helper.make_graph([node], case.id, [values[x] for x in inputs], [values["out"]])
        opset = [helper.make_opsetid("", _OPSET)]
        model = helper.make_model(graph, opset_imports=opset, ir_version=11)
        yield f"{case.id}/model.onnx", model.SerializeToString(deterministic=True)
        for i, name in enumerate(inputs):
            data = named[name].SerializeToString(deterministic=True)
            yield f"{case.id}/test_data_set_0/input_{i}.pb", data
        data = named["out"].SerializeToString(deterministic=True)
        yield f"{case.id}/test_data_set_0/output_0.pb", data


def _expressible(case: Case) -> bool:
    """Whether the operator has the case: no gradients, no query without keys, one diagonal."""
    record = ESTIMATORS[case.estimator]
    if not record.has("exact") or "d_out" in case.inputs:
        return False
    n, m = case.inputs["q"].shape[-2], case.inputs["k"].shape[-2]
    square = n == m or not case.arguments["causal"]
    plain = {"float32", "float64"} & set(case.tolerance)
    return square and bool(plain) and "EMPTY_ROW" not in case.flags


def _four_axes(x: _Array) -> _Array:
    """Batch, heads, tokens, numbers."""
    return x.reshape((1,) * (4 - x.ndim) + x.shape)
