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

# What a flag says of the mistake that its cases catch.
FLAGS = {
    "BASIC": ("basic", "Plain inputs of order one.", "Nothing is wired correctly."),
    "EXTREME": (
        "range",
        "Exponents in the thousands, of both signs.",
        "Clamped or low-precision exponents give other weights.",
    ),
    "OVERFLOW": (
        "range",
        "The exponential of an exponent is not representable.",
        "Without subtraction of a maximum the output is infinite or nan.",
    ),
    "UNDERFLOW": (
        "range",
        "The exponentials of all exponents of a row are zero in floating point.",
        "The normaliser vanishes: the output is 0/0, or 0 where the denominator is clamped.",
    ),
    "MASK": (
        "masking",
        "Some keys are hidden, some of them with huge entries.",
        "Hidden keys keep a share of the weight, or only their values are dropped.",
    ),
    "EMPTY_ROW": (
        "masking",
        "A query sees no key: its output is 0.",
        "nan, or the mean of the values where masks are large negative numbers.",
    ),
    "CAUSAL": (
        "masking",
        "Query i sees key j only if j <= i + m - n.",
        "Queries see the next key, or not their own.",
    ),
    "CROSS": (
        "shape",
        "The numbers of queries and keys differ.",
        "The causal triangle starts in the wrong corner, or lengths are mixed up.",
    ),
    "GQA": (
        "shape",
        "Consecutive query heads share a key head: h uses h // (H // G).",
        "Heads are interleaved, h % G, and attend to the keys of others.",
    ),
    "EPS": (
        "stabiliser",
        "Right only if no small constant is added to features or normalisers.",
        "Outputs shrink or tend to the plain mean of the values. Acceptable if declared.",
    ),
    "CANCELLATION": (
        "rounding",
        "A difference of close numbers decides the result.",
        "Covariances in one pass, or elu(x) + 1 as written, lose all digits.",
    ),
    "HARD": (
        "rounding",
        "An input on which float64 loses digits: found by a search, of a family and a level.",
        "Weights or sums in a narrower dtype have no digit left.",
    ),
    "SCALING": (
        "scale",
        "The scale is given, or the head size is such that scales differ clearly.",
        "The scale is dropped, applied twice, or the root of the one meant.",
    ),
    "MISSING_NORM": (
        "formula",
        "The lengths of the vectors differ clearly.",
        "Without |k|^2/2 the features estimate another kernel.",
    ),
    "HAAR": (
        "frequencies",
        "Probes at plus and minus e_i and (1, ..., 1) show each entry of anisotropic frequencies.",
        "Frequencies are transposed, orthogonalised again or have lost their signs on the way.",
    ),
    "NORMALISATION": (
        "formula",
        "Constants are reproduced, 1/S and N - 1 are where they belong.",
        "Weights do not sum to 1: hidden keys or samples are counted wrongly.",
    ),
    "SHARED_RANDOMNESS": (
        "frequencies",
        "Each head or query comes with frequencies of its own.",
        "All of them use those of the first.",
    ),
    "DEGENERATE": (
        "shape",
        "One key, query or frequency, or keys that are all equal.",
        "Axes of length one are squeezed or broadcast; spreads of zero divide.",
    ),
    "DIMENSION": (
        "shape",
        "Head sizes 1, 9 and 64, none that of the values.",
        "Head sizes are hard-coded or taken from another argument.",
    ),
    "WINDOW": (
        "masking",
        "Query i sees key j only if i + m - n - left <= j <= i + m - n + right.",
        "Windows are one key short or long, or aligned with the first query and key.",
    ),
    "SOFTCAP": (
        "formula",
        "Scaled scores s become c tanh(s / c), before bias and mask.",
        "The cap is left out, is on scores with the bias, or before the scale.",
    ),
    "SINKS": (
        "formula",
        "Each head has the score of one more key, whose value is 0.",
        "The sink is left out, is that of another head, or is scaled or capped.",
    ),
    "BIAS": (
        "formula",
        "A bias is added to scaled scores.",
        "It is left out, is scaled, or is that of another head.",
    ),
    "ALIBI": (
        "formula",
        "The bias is -slope |i + m - n - j|, with a slope of its own for each head.",
        "Distances start at the first query, have a sign, or all heads have one slope.",
    ),
    "DROPOUT": (
        "formula",
        "Weights have given factors; their normaliser does not.",
        "The sum of the weights that are left is 1 again, or factors come before the softmax.",
    ),
    "LSE": (
        "formula",
        "The log normaliser is expected too, -inf for a query that sees no key.",
        "It is without the sink, without the largest score, or finite where nothing is seen.",
    ),
    "TILE": (
        "shape",
        "Numbers of queries and keys are a power of two, or one more or less.",
        "The last tile, the last row of one, or what is past the end is counted wrongly.",
    ),
    "CONVENTION": (
        "convention",
        "Right under the convention of its group; libraries differ in it.",
        "The kernel has another convention: `refattn check --list-specs` has those of libraries.",
    ),
    "CHUNK": (
        "shape",
        "Keys are in chunks of `window`, the last of them shorter, or all in one.",
        "Chunks are counted from the first query, or padding counts as keys.",
    ),
    "NEAR": (
        "masking",
        "Keys in a window about the query's own have the exact kernel, all others the estimate.",
        "Windows are one key short or long, near keys count twice, or far ones not.",
    ),
    "SAMPLE": (
        "formula",
        "Only keys at the given indices are seen: repeated, in any order, or all of them.",
        "A key that comes twice counts once, or all count as often, however likely they are.",
    ),
    "GRADIENT": (
        "gradient",
        "Cotangents are given, and gradients expected besides the output.",
        "The way back forgets the normaliser, the scale, what is hidden or that heads share keys.",
    ),
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
        One of `vectors.ESTIMATORS`, as in `refattn.conformance.check`.
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
        `refattn.conformance.CONVENTIONS`. All else is as in the package.
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


def read_text(name: str) -> str:
    """Return a text file of the package."""
    return resources.files(__package__).joinpath("text", name).read_text("utf-8")
