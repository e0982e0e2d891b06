"""Golden vectors in forms that other test suites take: a header for C, test data of ONNX."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from ...arrays.library import Floats
from ...arrays.words import with_known_keywords
from ...registry import ESTIMATORS
from ..conformance.conventions import CONVENTIONS, Library
from .cases import INSTALL_VECTORS, Case, read_text
from .reading import cases_of
from .recipes import estimators
from .solving import documents, write_hex

EXPORTS = ("c", "onnx")

_OPSETS = (23, 25)  # the first with Attention, and the first with windows


@with_known_keywords
def export(
    directory: str | os.PathLike[str], *, format: str, estimator: str | None = None
) -> list[Path]:
    """Write the golden vectors for other test suites.

    Parameters
    ----------
    directory : path
        Made if it is not there. Files of the same name are replaced, others left alone.
    format : {"c", "onnx"}
        "c" is one header of C99 with a table of all cases, numbers as hexadecimal floats. "onnx"
        has a folder for each case that the operator Attention of opset 23 can express, or of
        opset 25, which has windows: exact attention without gradients, where every query sees a
        key, windows and causal attention with as many queries as keys, and the conventions that it
        has: `model.onnx`, and in `test_data_set_0` the inputs and the output, as ONNX's own tests
        of operators have them.
    estimator : str, optional
        As for `write`.

    Returns
    -------
    list of Path
        The files written.

    Raises
    ------
    ValueError
        If the format is unknown, or has no case of the estimator.
    ModuleNotFoundError
        If mpmath, or for its format onnx, is not installed.

    Examples
    --------
    >>> import tempfile
    >>> from refattn.judge import vectors
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     [path.name for path in vectors.export(folder, format="c")]
    ['refattn_vectors.h']
    """
    if format not in EXPORTS:
        raise ValueError(f"`format` must be one of {', '.join(EXPORTS)}, got {format!r}.")
    cases = [case for document in documents(estimator).values() for case in cases_of(document)]
    content = [*(_c_header(cases) if format == "c" else _onnx_models(cases))]
    if not content:
        exact = " or ".join(name for name in estimators() if ESTIMATORS[name].has("exact"))
        raise ValueError(
            f"`estimator` must be {exact} for format {format}, got {estimator!r}, which it cannot "
            "express."
        )
    paths = []
    for name, data in content:
        path = Path(directory, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        paths.append(path)
    return paths


# --- C --------------------------------------------------------------------------------------------


def _c_header(cases: list[Case]) -> Iterator[tuple[str, bytes]]:
    arrays, rows = [], []
    for i, case in enumerate(cases):
        tables: dict[str, list[str]] = {"in": [], "out": []}
        for name, x in case.inputs.items():
            at = f"refattn_{i}_{name}"
            arrays.append(_c_numbers(at, x))
            tables["in"].append(_c_tensor(name, x, at, "0"))
        for name, x in case.expected.items():
            at = f"refattn_{i}_{name}_out"
            size = np.broadcast_to(case.size[name], x.shape)
            arrays += [_c_numbers(at, x), _c_numbers(f"{at}_size", size)]
            tables["out"].append(_c_tensor(name, x, at, f"{at}_size"))
        for side, table in tables.items():
            arrays.append(
                f"static const refattn_tensor refattn_{i}_{side}puts[] = {{\n    "
                + ",\n    ".join(table)
                + "};\n"
            )
        rows.append(_c_row(i, case))
    text = read_text("refattn_vectors.h") + "\n".join(arrays)
    text += (
        "\nstatic const refattn_case refattn_cases[] = {\n    " + ",\n    ".join(rows) + "};\n\n"
    )
    text += f"enum {{ REFATTN_CASES = {len(cases)} }};\n\n#endif\n"
    yield "refattn_vectors.h", text.encode("ascii")


def _c_row(i: int, case: Case) -> str:
    arguments, convention = case.arguments, case.convention or ("", "")
    words = (case.id, case.estimator, case.group, arguments.get("features", ""), case.comment)
    reals = (arguments.get("scale"), *(arguments.get(x, 0.0) for x in ("softcap", "dropout_p")))
    window = arguments.get("window", (None, None))
    sides, chunk = ((None, None), window) if isinstance(window, int) else (window, 0)
    numbers = (
        *(_c_number(math.nan if x is None else x) for x in reals),
        str(int(arguments.get("causal", False))),
        *(str(-1 if keys is None else keys) for keys in sides),
        str(chunk),
        str(int(arguments.get("log_size", False))),
        *(_c_number(case.tolerance.get(dtype, 0.0)) for dtype in ("float64", "float32")),
        str(len(case.inputs)),
        str(len(case.expected)),
        f"refattn_{i}_inputs",
        f"refattn_{i}_outputs",
    )
    return "{" + ", ".join((*(f'"{x}"' for x in (*words, *convention)), *numbers)) + "}"


def _c_number(x: float) -> str:
    if math.isfinite(x):
        return write_hex(x)
    return "NAN" if math.isnan(x) else "-INFINITY" if x < 0 else "INFINITY"


def _c_numbers(name: str, x: Floats) -> str:
    data = ", ".join(_c_number(value) for value in x.ravel())
    return f"static const double {name}[] = {{{data}}};\n"


def _c_tensor(name: str, x: Floats, data: str, size: str) -> str:
    shape = ", ".join(str(length) for length in x.shape or (1,))
    return f'{{"{name}", {x.ndim}, {{{shape}}}, {data}, {size}}}'


# --- ONNX -----------------------------------------------------------------------------------------


def _onnx_models(cases: list[Case]) -> Iterator[tuple[str, bytes]]:
    """Yield models of one node, with inputs and expected outputs."""
    try:
        helper, numpy_helper = (
            import_module(f"onnx.{name}") for name in ("helper", "numpy_helper")
        )
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"vectors for ONNX {INSTALL_VECTORS} and onnx", name=error.name
        ) from None
    for case, version in ((case, _opset(case)) for case in cases):
        if version is None:
            continue
        arrays = {**_onnx_inputs(case), "out": _four_axes(case.expected["out"])}
        dtype = np.float32 if "float32" in case.tolerance else np.float64
        named = {
            name: numpy_helper.from_array(
                np.ascontiguousarray(x if x.dtype == bool else x.astype(dtype)), name
            )
            for name, x in arrays.items()
        }
        values = {
            name: helper.make_tensor_value_info(name, x.data_type, list(x.dims))
            for name, x in named.items()
        }
        inputs = [name for name in named if name != "out"]
        slots = _slots(inputs)
        outputs = ["out", "present_k", "present_v"][: 3 if "past_k" in inputs else 1]
        node = helper.make_node("Attention", slots, outputs, **_attributes(case))
        graph = helper.make_graph([node], case.id, [values[x] for x in inputs], [values["out"]])
        opset = [helper.make_opsetid("", version)]
        model = helper.make_model(graph, opset_imports=opset, ir_version=11)
        yield f"{case.id}/model.onnx", model.SerializeToString(deterministic=True)
        for i, name in enumerate(inputs):
            data = named[name].SerializeToString(deterministic=True)
            yield f"{case.id}/test_data_set_0/input_{i}.pb", data
        data = named["out"].SerializeToString(deterministic=True)
        yield f"{case.id}/test_data_set_0/output_0.pb", data


def _onnx_inputs(case: Case) -> dict[str, Floats]:
    """Return the inputs as the operator takes them."""
    n, m = case.inputs["q"].shape[-2], case.inputs["k"].shape[-2]
    arrays = {name: _four_axes(x) for name, x in case.inputs.items() if name != "mask"}
    if "mask" in case.inputs:
        arrays["mask"] = np.broadcast_to(case.inputs["mask"], (n, m))
    order = ("q", "k", "v", "mask", "bias", "past_k", "past_v")
    return {name: arrays[name] for name in order if name in arrays}


def _slots(inputs: list[str]) -> list[str]:
    """Return the inputs in their places; mask or bias have the fourth."""
    fourth = next((name for name in ("mask", "bias") if name in inputs), "")
    slots = [*inputs[:3], fourth, *(name for name in inputs if name.startswith("past_"))]
    return slots if len(slots) > 4 or fourth else slots[:3]


def _attributes(case: Case) -> dict[str, Any]:
    """Return the arguments as attributes of the operator."""
    attributes: dict[str, Any] = {"is_causal": int(case.arguments["causal"])}
    attributes |= {x: case.arguments[x] for x in ("scale", "softcap") if case.arguments.get(x)}
    if "window" in case.arguments:
        sides = zip(("left", "right"), case.arguments["window"], strict=True)
        attributes |= {f"{side}_window_size": -1 if keys is None else keys for side, keys in sides}
    return attributes


def _opset(case: Case) -> int | None:
    """Find the first opset whose operator has the case, by the table of conventions."""
    exact = ESTIMATORS[case.estimator].has("exact")
    if not (exact and {"float32", "float64"} & set(case.tolerance)):
        return None
    return next((x for x in _OPSETS if _expressible(case, CONVENTIONS[f"onnx-{x}"])), None)


def _expressible(case: Case, row: Library) -> bool:
    """Return whether a version of the operator has the case: no gradients, no empty row."""
    x, arguments = case.inputs, case.arguments
    others = x.keys() - {"q", "k", "v", "mask", "bias", "past_k", "past_v"}
    if others or {"mask", "bias"} <= x.keys() or arguments.get("return_lse"):
        return False
    if case.convention is not None:
        option, value = case.convention
        return option in row.cells and row.cells[option].value == value
    diagonals = [name for name in ("causal", "window") if arguments.get(name)]
    known = all(row.cells[name].value != "none" for name in diagonals)
    square = x["q"].shape[-2] == x["k"].shape[-2] or not diagonals  # they start at the first query
    return known and square and "EMPTY_ROW" not in case.flags


def _four_axes(x: Floats) -> Floats:
    """Reshape to batch, heads, tokens, numbers."""
    return x.reshape((1,) * (4 - x.ndim) + x.shape)
