"""What a golden vector is: a case, its flags, its dtypes and the formats it is written in."""

from __future__ import annotations

from importlib import resources
from typing import Any, NamedTuple

import numpy as np

from ...arrays.library import Floats

FORMATS = ("json", "npz", "safetensors")

# Significand bits, unit of the last place of 1, smallest normal and largest number.
DTYPE_FACTS = {
    "bfloat16": (8, 2.0**-7, 2.0**-126, 2.0**127 * (2 - 2.0**-7)),
    "float16": (11, 2.0**-10, 2.0**-14, 65504.0),
    "float32": (24, 2.0**-23, 2.0**-126, 2.0**127 * (2 - 2.0**-23)),
    "float64": (53, 2.0**-52, 2.0**-1022, float(np.finfo(np.float64).max)),
}
CONTRACT_FACTOR = 16  # the constant C of the accuracy contract
DIGITS = 34  # stored; 30 are asserted
VERSION = 3  # of the schema
SCHEMA = resources.files(__package__).joinpath("vectors.schema.json")
INSTALL_VECTORS = "needs `pip install 'refattn[vectors]'`"

REALS = ("dropout_p", "scale", "softcap")  # arguments that are numbers

# Names of the gradients by those of the inputs that have one.
GRADIENTS = {
    "q": "dq",
    "k": "dk",
    "v": "dv",
    "omega": "d_omega",
    "log_weight": "d_log_weight",
    "centres": "d_centres",
    "bias": "d_bias",
    "sinks": "d_sinks",
}


def read_text(name: str) -> str:
    """Return a text file of the package."""
    return resources.files(__package__).joinpath("text", name).read_text("utf-8")


# What a flag says of the mistake that its cases catch: its type, description and effect.
FLAGS: dict[str, tuple[str, ...]] = {
    name: tuple(cells)
    for name, *cells in (x.split(" | ") for x in read_text("flags.txt").splitlines()[1:])
}


class Convention(NamedTuple):
    """What a group says that libraries disagree on: an option of `OPTIONS` and its value."""

    option: str
    value: str


class Case(NamedTuple):
    """One golden vector.

    Attributes
    ----------
    id : str
        Stable name, unique over all files.
    estimator : str
        One of `vectors.ESTIMATORS`, as in `refattn.check`.
    comment : str
        What is special about it.
    flags : tuple of str
        Keys of `FLAGS`.
    arguments : dict
        Keyword arguments: scale (None for 1/sqrt(d)), causal, window (a pair, or the keys of a
        chunk), softcap, features, ...
    dtype : str
        The narrowest of float64, float32, float16, bfloat16 that the inputs were made for.
    inputs : dict of ndarray
        float64, bool for masks, or int64 for indices.
    expected, expected_low : dict of ndarray
        Outputs by name, rounded to float64, and what the rounding left.
    size : dict of ndarray
        What errors are relative to, broadcasting to the outputs.
    cond : float
        Largest |exponent|, rounded up.
    tolerance : dict
        By dtype: an output is right if |output - expected| <= tolerance * size everywhere.
    result : str
        "valid", or "acceptable" where a declared eps may miss the expected value.
    group : str
        Type of the group that it is in.
    convention : Convention or None
        What the group is about, where libraries disagree: option and value as in
        `judge.conformance.CONVENTIONS`. All else is as in the package.
    """

    id: str
    estimator: str
    comment: str
    flags: tuple[str, ...]
    arguments: dict[str, Any]
    dtype: str
    inputs: dict[str, Floats]
    expected: dict[str, Floats]
    expected_low: dict[str, Floats]
    size: dict[str, Floats]
    cond: float
    tolerance: dict[str, float]
    result: str
    group: str
    convention: Convention | None


def is_exact(x: Floats, dtype: str) -> bool:
    """Return whether every number is one of the dtype; masks and indices always are."""
    if x.dtype.kind in "bi" or dtype == "float64":
        return True
    with np.errstate(over="ignore"):
        cast = x.astype(np.float16 if dtype == "float16" else np.float32)
    if not np.array_equal(cast.astype(np.float64), x):
        return False
    return dtype != "bfloat16" or not np.any(cast.view(np.uint32) & 0xFFFF)


def check_format(format: Any) -> None:
    if format not in FORMATS:
        raise ValueError(f"`format` must be one of {', '.join(FORMATS)}, got {format!r}.")
