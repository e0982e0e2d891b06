"""Golden vectors: inputs with exact bits and outputs to thirty digits, for any language.

`write` puts one file an estimator into a directory, `load` reads them back and `lint` says what
is wrong with them. A case is named after the mistakes that it catches (its flags).

Inputs come from a raw PCG64 stream, seeded with the CRC-32 of their name and rounded to few bits,
or are small integers. Outputs come from `refattn.conformance.exact` with 50 and with 80 digits,
which must agree. Nothing depends on the time or the machine: two runs give identical bytes. A
manifest has the checksum of every file and the names of its cases. The layout of the files follows
that of Project Wycheproof.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .._safetensors import read as _read_safetensors

__all__ = ["ESTIMATORS", "FLAGS", "FORMATS", "Case", "lint", "load", "write"]

_Array = npt.NDArray[Any]

ESTIMATORS = ("kernel", "lara", "linear", "moments", "ra", "rfa", "softmax")
FORMATS = ("json", "npz", "safetensors")

# Significand bits, unit of the last place of 1, smallest normal and largest number.
_DTYPES = {
    "bfloat16": (8, 2.0**-7, 2.0**-126, 2.0**127 * (2 - 2.0**-7)),
    "float16": (11, 2.0**-10, 2.0**-14, 65504.0),
    "float32": (24, 2.0**-23, 2.0**-126, 2.0**127 * (2 - 2.0**-23)),
    "float64": (53, 2.0**-52, 2.0**-1022, float(np.finfo(np.float64).max)),
}
_CONTRACT = 16  # the constant C of the accuracy contract
_DIGITS = 34  # stored; 30 are asserted
_PRECISIONS = (50, 80)
_SCHEMA = Path(__file__).with_name("vectors.schema.json")
_INSTALL = "needs `pip install 'refattn[vectors]'`"

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
}


class Case(NamedTuple):
    """One golden vector.

    Attributes
    ----------
    id : str
        Stable name, unique over all files.
    estimator : str
        One of `ESTIMATORS`, as in `refattn.conformance.check`.
    comment : str
        What is special about it.
    flags : tuple of str
        Keys of `FLAGS`.
    arguments : dict
        Keyword arguments: scale (None for 1/sqrt(d)), causal, features, weighting, ...
    dtype : str
        The narrowest of float64, float32, float16, bfloat16 that the inputs were made for.
    inputs : dict of ndarray
        float64, or bool for masks.
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
    """

    id: str
    estimator: str
    comment: str
    flags: tuple[str, ...]
    arguments: dict[str, Any]
    dtype: str
    inputs: dict[str, _Array]
    expected: dict[str, _Array]
    expected_low: dict[str, _Array]
    size: dict[str, _Array]
    cond: float
    tolerance: dict[str, float]
    result: str


# --- the inputs ----------------------------------------------------------------------------------


class _Recipe(NamedTuple):
    """A case without its outputs."""

    id: str
    estimator: str
    comment: str
    flags: tuple[str, ...]
    arguments: dict[str, Any]
    dtype: str
    inputs: dict[str, _Array]


def _draw(name: str, shape: tuple[int, ...], dtype: str, size: float) -> _Array:
    """Uniform on a grid of [-size, size) with as many bits as the dtype has; size a power of 2."""
    bits = _DTYPES[dtype][0]
    raw = np.random.PCG64(zlib.crc32(name.encode())).random_raw(math.prod(shape))
    steps = (raw >> np.uint64(64 - bits)).astype(np.int64) - 2 ** (bits - 1)
    return np.asarray(steps.reshape(shape) * (size * 2.0 ** (1 - bits)))


def _probes(d: int) -> _Array:
    """Plus and minus e_i and (1, ..., 1)."""
    rows = np.concatenate([np.eye(d), np.ones((1, d))])
    return np.concatenate([rows, -rows])


def _both_signs(omega: _Array) -> _Array:
    """Make the first entries of rows of alternating sign, so that a lost sign shows."""
    signs = np.where(np.arange(omega.shape[-2]) % 2, 1.0, -1.0)
    return np.concatenate([abs(omega[..., :1]) * signs[:, None], omega[..., 1:]], axis=-1)


def _attention(
    kind: str,
    name: str,
    flags: str,
    comment: str,
    edit: Callable[[dict[str, _Array]], dict[str, Any]] = lambda x: {},
    *,
    dtype: str = "float32",
    n: int = 4,
    m: int = 6,
    d: int = 4,
    d_v: int = 3,
    heads: tuple[int, ...] = (),
    key_heads: tuple[int, ...] = (),
    omega_heads: tuple[int, ...] = (),
    count: int = 5,
    size: float | None = None,
    **arguments: Any,
) -> _Recipe:
    """Draw q, k, v and what the estimator takes besides; `edit` replaces some of it."""
    estimator, _, features = kind.partition("-")
    label = f"{kind}-{name}-{dtype}"
    size = (1.0 if dtype.endswith("16") else 2.0) if size is None else size
    shapes = {"q": (*heads, n, d), "k": (*key_heads, m, d), "v": (*key_heads, m, d_v)}
    if estimator == "rfa":
        shapes["omega"] = (*omega_heads, count, d)
        arguments["features"] = features
    if estimator == "ra":
        shapes["omega"] = (n, count, d)
    if estimator == "lara":
        shapes |= {"omega": (count, d), "centres": (count, d)}
        arguments["weighting"] = "balance"
    if estimator == "linear":
        arguments["feature_map"] = "elu"
    else:
        arguments.setdefault("scale", None)
    if estimator not in ("ra", "lara"):
        arguments.setdefault("causal", False)
    plain = 1.0 if dtype.endswith("16") else 2.0
    x = {
        key: _draw(f"{label}/{key}", shape, dtype, size if key in "qk" else plain)
        for key, shape in shapes.items()
    }
    for key, value in edit(x).items():
        fitted = np.float64 if dtype == "float64" else np.float32
        x[key] = value if value.dtype == bool else value.astype(fitted).astype(np.float64)
    return _Recipe(label, estimator, comment, tuple(flags.split()), arguments, dtype, x)


def _mask(*shape: int) -> _Array:
    """A mask that hides every third and every fifth key, differently for each query."""
    index = np.arange(math.prod(shape)).reshape(shape)
    return np.asarray((index % 3 != 1) & (index % 5 != 3))


def _hide_huge(x: dict[str, _Array]) -> dict[str, Any]:
    mask = np.arange(x["k"].shape[-2]) % 3 != 1
    huge = np.where(mask[:, None], 1.0, 2.0**40)
    return {"mask": mask, "k": x["k"] * huge, "v": x["v"] * huge}


def _empty_row(x: dict[str, _Array]) -> dict[str, Any]:
    mask = _mask(x["q"].shape[-2], x["k"].shape[-2])
    mask[1] = False
    return {"mask": mask}


def _constant(masked: bool, x: dict[str, _Array]) -> dict[str, Any]:
    mask = {"mask": _mask(x["q"].shape[-2], x["k"].shape[-2])} if masked else {}
    return {"v": np.ones_like(x["v"]), **mask}


def _common(kind: str) -> Iterator[_Recipe]:
    """Cases for every kind of attention."""
    case, masked = partial(_attention, kind), kind in ("softmax", "linear", "rfa-positive")
    for dtype in ("float64", "float32", "bfloat16"):
        yield case("basic", "BASIC", "Plain inputs of order one.", dtype=dtype)
    if kind != "linear":
        yield case("scale", "SCALING", "The scale is given.", scale=0.75)
        yield case("d9", "SCALING DIMENSION", "Default scale 1/3, not a power of 2.", d=9, size=1.0)
    yield case("cross", "CROSS", "2 queries, 9 keys.", n=2, m=9)
    yield case("one-key", "DEGENERATE", "The output is the only value.", m=1, n=3)
    yield case(
        "equal-keys",
        "DEGENERATE",
        "The output is the mean of the values.",
        lambda x: {"k": np.repeat(x["k"][:1], 6, 0)},
    )
    yield case("d1", "DIMENSION DEGENERATE", "Head size 1, one query.", d=1, n=1, d_v=2)
    yield case("d64", "DIMENSION", "Head size 64.", d=64, n=2, m=5, d_v=2, count=3, size=0.5)
    yield case(
        "constant", "NORMALISATION", "All values are 1, and so is the output.",
        partial(_constant, masked), dtype="float64",
    )  # fmt: skip
    yield case("eps", "EPS", "Seen if a constant of 1e-6 is added.", size=4.0, dtype="float64")


def _masked(kind: str) -> Iterator[_Recipe]:
    """Cases for kinds with masks, causal form and grouped heads."""
    case = partial(_attention, kind)
    yield case("mask", "MASK", "A mask of its own for each query.", lambda x: {"mask": _mask(4, 6)})
    yield case(
        "key-mask", "MASK", "The same keys are hidden from all queries.",
        lambda x: {"mask": _mask(6)}, dtype="bfloat16",
    )  # fmt: skip
    yield case("hidden-huge", "MASK", "Hidden keys and values have entries near 2^40.", _hide_huge)
    yield case("empty-row", "EMPTY_ROW MASK", "Query 1 sees no key.", _empty_row, dtype="float64")
    yield case("causal", "CAUSAL", "As many queries as keys.", n=6, causal=True)
    yield case("causal-half", "CAUSAL", "The same, for half precision.", n=5, m=5, causal=True,
               dtype="bfloat16")  # fmt: skip
    yield case("causal-cross", "CAUSAL CROSS", "The last query sees every key.", causal=True)
    yield case(
        "causal-empty", "CAUSAL CROSS EMPTY_ROW", "The first 3 queries see no key.",
        n=6, m=3, causal=True,
    )  # fmt: skip
    yield case(
        "causal-mask", "CAUSAL MASK", "Causal, with a mask.",
        lambda x: {"mask": _mask(6, 6)}, n=6, causal=True, dtype="float64",
    )  # fmt: skip
    yield case("gqa", "GQA", "4 query heads, 2 key heads.", heads=(4,), key_heads=(2,), n=2, m=4)
    yield case(
        "gqa-causal", "GQA CAUSAL", "6 query heads, 3 key heads, causal.",
        heads=(6,), key_heads=(3,), n=2, m=2, d=2, d_v=2, count=3, causal=True,
    )  # fmt: skip


def _softmax() -> Iterator[_Recipe]:
    case = partial(_attention, "softmax")
    yield from _common("softmax")
    yield from _masked("softmax")
    for dtype in ("float64", "float32"):
        yield case(
            "extreme", "EXTREME OVERFLOW", "Scores to 1e4 of both signs.", size=64.0, dtype=dtype
        )
        yield case(
            "overflow", "OVERFLOW", "All scores near 1800.",
            lambda x: {"q": x["q"] + 30, "k": x["k"] + 30}, size=0.25, dtype=dtype,
        )  # fmt: skip
        yield case(
            "underflow", "UNDERFLOW", "All scores near -1800.",
            lambda x: {"q": x["q"] + 30, "k": x["k"] - 30}, size=0.25, dtype=dtype,
        )  # fmt: skip


def _lengths(x: dict[str, _Array]) -> dict[str, Any]:
    """Keys in nearly one direction, of lengths from 1/4 to 4."""
    lengths = 2.0 ** (np.arange(x["k"].shape[-2]) % 5 - 2)
    return {"k": (np.ones_like(x["k"]) + x["k"] / 16) * lengths[:, None] / 2}


def _random(kind: str, dtypes: tuple[str, ...] = ("float64", "float32")) -> Iterator[_Recipe]:
    """Cases for estimators with frequencies."""
    case = partial(_attention, kind)
    for dtype in dtypes:
        yield case("lengths", "MISSING_NORM", "Keys of very different length.", _lengths,
                   dtype=dtype)  # fmt: skip
        yield case(
            "long", "OVERFLOW UNDERFLOW EXTREME", "Exponents to thousands of both signs.",
            size=64.0 if kind != "rfa-trigonometric" else 32.0, dtype=dtype,
        )  # fmt: skip
    yield case("one-sample", "DEGENERATE", "One frequency.", count=1)


def _haar(kind: str) -> Iterator[_Recipe]:
    yield _attention(
        kind, "probes", "HAAR", "Queries and keys at the probes, as many frequencies as d.",
        lambda x: {"q": _probes(4), "k": _probes(4), "omega": _both_signs(x["omega"])},
        n=10, m=10, count=4, d_v=2,
    )  # fmt: skip


def _rfa() -> Iterator[_Recipe]:
    case = partial(_attention, "rfa-positive")
    yield from _common("rfa-positive")
    yield from _masked("rfa-positive")
    yield from _random("rfa-positive")
    yield from _haar("rfa-positive")
    yield case(
        "weights", "BASIC", "Frequencies with log weights.",
        lambda x: {"log_weight": x["omega"][:, 0] * 2},
    )  # fmt: skip
    yield case("heads", "SHARED_RANDOMNESS", "Frequencies of its own for each head.",
               heads=(3,), key_heads=(3,), omega_heads=(3,), n=2, m=4)  # fmt: skip
    for kind in ("rfa-hyperbolic", "rfa-trigonometric"):
        case = partial(_attention, kind)
        for dtype in ("float64", "float32", "bfloat16"):
            yield case("basic", "BASIC", "Plain inputs of order one.", dtype=dtype)
        yield case("scale", "SCALING", "The scale is given.", scale=0.75)
        yield case("mask", "MASK", "A mask.", lambda x: {"mask": _mask(4, 6)})
        yield case("causal", "CAUSAL", "As many queries as keys.", n=6, causal=True)
        yield from _random(kind, ("float64",))
        yield from _haar(kind)
    yield case(
        "signed", "CANCELLATION", "Terms of both signs nearly cancel in the normaliser.",
        lambda x: {"k": -x["q"][[0, 1, 2, 3, 0, 1]]}, dtype="float64",
    )  # fmt: skip


def _ra() -> Iterator[_Recipe]:
    yield from _common("ra")
    yield from _random("ra")
    yield _attention("ra", "queries", "SHARED_RANDOMNESS",
                     "Frequencies of its own for each query.", n=6, count=2)  # fmt: skip
    yield _attention(
        "ra", "probes", "HAAR", "Keys at the probes, as many frequencies as d.",
        lambda x: {"k": _probes(4), "omega": _both_signs(x["omega"])}, n=2, m=10, count=4, d_v=2,
    )  # fmt: skip


def _lara() -> Iterator[_Recipe]:
    yield from _common("lara")
    yield from _random("lara")
    yield from _haar("lara")
    yield _attention(
        "lara", "pairs", "BASIC", "Two frequencies for each of three centres.",
        lambda x: {"centres": x["centres"][:3]}, count=6,
    )  # fmt: skip


def _linear() -> Iterator[_Recipe]:
    yield from _common("linear")
    yield from _masked("linear")
    for dtype in ("float64", "float32"):
        yield _attention(
            "linear", "negative", "CANCELLATION", "Entries near -20: elu + 1 is e^x.",
            lambda x: {"q": x["q"] / 2 - 20, "k": x["k"] / 2 - 20}, dtype=dtype,
        )  # fmt: skip


def _kernel() -> Iterator[_Recipe]:
    def case(
        features: str,
        name: str,
        flags: str,
        comment: str,
        edit: Callable[[dict[str, _Array]], dict[str, Any]] = lambda x: {},
        *,
        dtype: str = "float32",
        d: int = 4,
        count: int = 5,
        rows: int = 4,
        size: float = 1.0,
    ) -> _Recipe:
        label = f"kernel-{features}-{name}-{dtype}"
        x = {
            key: _draw(f"{label}/{key}", (length, d), dtype, width)
            for key, length, width in (("x", rows, size), ("y", rows, size), ("omega", count, 2.0))
        }
        x |= {key: value.astype(np.float32).astype(float) for key, value in edit(x).items()}
        return _Recipe(
            label, "kernel", comment, tuple(flags.split()), {"features": features}, dtype, x
        )

    for features in ("positive", "hyperbolic", "trigonometric"):
        for dtype in ("float64", "float32", "bfloat16"):
            yield case(features, "basic", "BASIC", "Plain inputs of order one.", dtype=dtype,
                       size=1.0 if dtype != "bfloat16" else 0.5)  # fmt: skip
        yield case(
            features, "probes", "HAAR", "Both vectors at the probes, as many frequencies as d.",
            lambda x: {"x": _probes(4), "y": np.roll(_probes(4), 1, 0),
                       "omega": _both_signs(x["omega"])}, count=4,
        )  # fmt: skip
        yield case(
            features, "zero", "NORMALISATION", "exp(0) is estimated without error.",
            lambda x: {"x": 0 * x["x"], "y": 0 * x["y"]},
        )  # fmt: skip
        yield case(features, "one", "DEGENERATE", "One pair, one frequency, head size 1.",
                   d=1, count=1, rows=1)  # fmt: skip
    yield case("positive", "lengths", "MISSING_NORM", "Vectors of lengths from 1/4 to 4.",
               lambda x: {"y": x["y"] * 2.0 ** np.arange(-2, 2)[:, None]}, size=2.0)  # fmt: skip
    yield case("positive", "d64", "DIMENSION", "Head size 64.", d=64, size=0.25)
    yield case(
        "positive", "far", "OVERFLOW UNDERFLOW EXTREME",
        "Each factor over- or underflows and their product does not: y is close to -x.",
        lambda x: {"omega": x["omega"] * 512, "y": x["y"] / 1024 - x["x"]}, size=2.0,
    )  # fmt: skip
    yield case(
        "trigonometric", "far", "OVERFLOW EXTREME", "The factor exp(|x|^2/2) is beyond float32.",
        lambda x: {"x": x["x"] / 8 + 8, "y": x["y"] / 8 + 8}, size=2.0, dtype="float64",
    )  # fmt: skip
    yield case(
        "positive", "weights", "BASIC", "Frequencies with log weights.",
        lambda x: {"log_weight": x["omega"][:, 0]},
    )  # fmt: skip


def _moments() -> Iterator[_Recipe]:
    def case(
        name: str,
        flags: str,
        comment: str,
        edit: Callable[[_Array], _Array] = lambda x: x,
        *,
        dtype: str = "float32",
        rows: int = 9,
        d: int = 3,
    ) -> _Recipe:
        label = f"moments-{name}-{dtype}"
        x = edit(_draw(f"{label}/x", (rows, d), dtype, 2.0))
        x = x if dtype == "float64" else x.astype(np.float32).astype(np.float64)
        return _Recipe(
            label, "moments", comment, tuple(flags.split()), {"ddof": 1}, dtype, {"x": x}
        )

    for dtype in ("float64", "float32", "bfloat16"):
        yield case("basic", "BASIC", "Plain rows.", dtype=dtype)
    yield case("offset", "CANCELLATION", "Four leading digits are shared.", lambda x: x + 4096)
    yield case(
        "offset", "CANCELLATION", "Nine leading digits are shared.",
        lambda x: x + 2.0**30, dtype="float64",
    )  # fmt: skip
    yield case("three", "NORMALISATION", "Three rows: N - 1 and N differ clearly.", rows=3)
    yield case("two", "DEGENERATE", "Two rows, covariance of rank 1.", rows=2)
    yield case(
        "equal", "DEGENERATE", "Rows all equal: covariance exactly 0.",
        lambda x: np.repeat(x[:1], 8, 0), dtype="bfloat16",
    )  # fmt: skip
    yield case("d1", "DIMENSION DEGENERATE", "One feature.", d=1)
    yield case("wide", "DIMENSION", "More features than rows.", rows=4, d=12)
    yield case(
        "scales", "EXTREME SCALING", "Features of sizes from 2^-30 to 2^30.",
        lambda x: x * np.array([2.0**-30, 1.0, 2.0**30]),
    )  # fmt: skip


@cache
def _recipes() -> tuple[_Recipe, ...]:
    parts = (_kernel(), _lara(), _linear(), _moments(), _ra(), _rfa(), _softmax())
    return tuple(recipe for part in parts for recipe in part)


# --- the outputs ---------------------------------------------------------------------------------

_NDIMS = {"q": 2, "k": 2, "v": 2, "visible": 2, "omega": 2, "centres": 2, "log_weight": 1}


def _exact() -> Any:
    return import_module("refattn.conformance.exact")


def _per_head(estimator: str, x: dict[str, _Array], causal: bool) -> tuple[Any, dict[str, _Array]]:
    """Axes of one head, and the arrays with the mask and the causal form as `visible`."""
    n, m = x["q"].shape[-2], x["k"].shape[-2]
    visible = np.ones((n, m), bool)
    if "mask" in x:
        visible = visible & x["mask"]
    if causal:
        visible = visible & _exact().causal(n, m)
    arrays = {name: value for name, value in x.items() if name != "mask"}
    return {**_NDIMS, "omega": 3 if estimator == "ra" else 2}, {**arrays, "visible": visible}


def _solve(recipe: Any, dps: int) -> dict[str, _Array]:
    """Evaluate a case with so many digits."""
    exact, x = _exact(), recipe.inputs
    options = {
        name: value
        for name, value in recipe.arguments.items()
        if name not in ("causal", "weighting", "feature_map")
    }
    if recipe.estimator == "moments":
        mean, cov = exact.mean(x["x"], dps=dps), exact.covariance(x["x"], **options, dps=dps)
        return {"mean": mean, "cov": cov}
    if recipe.estimator == "kernel":
        return {"out": exact.kernel_estimate(**x, **options, dps=dps)}
    function = {
        "lara": exact.linear_randomized_attention,
        "linear": exact.linear_attention,
        "ra": exact.randomized_attention,
        "rfa": exact.random_feature_attention,
        "softmax": exact.softmax_attention,
    }[recipe.estimator]
    ndims, x = _per_head(recipe.estimator, x, recipe.arguments.get("causal", False))
    return {"out": exact.each_head(partial(function, **options, dps=dps), ndims, **x)}


def _bounds(recipe: Any) -> tuple[float, dict[str, _Array]]:
    """Largest exponent and what errors are relative to: the accuracy contract."""
    exact, x, features = _exact(), recipe.inputs, recipe.arguments.get("features")
    if recipe.estimator == "moments":
        mp, rows = exact.context(), exact.numbers(x["x"])
        mean, cov = (_solve(recipe, _PRECISIONS[0])[name] for name in ("mean", "cov"))
        sd = np.array([mp.sqrt(cov[i, i]) for i in range(len(mean))], dtype=object)
        z = abs(rows[0] - mean) / np.where(sd == 0, 1, sd)
        return _up(max(z)), {"mean": _ups(abs(mean) + sd), "cov": _ups(np.outer(sd, sd))}
    if recipe.estimator == "kernel":
        mp, want = exact.context(), abs(_solve(recipe, _PRECISIONS[0])["out"])
        long_x, long_y, long_omega = (_longest(x[name]) for name in ("x", "y", "omega"))
        cond = long_omega * (long_x + long_y) + (long_x**2 + long_y**2) / 2
        if features == "trigonometric":
            squares = sum((exact.numbers(x[name]) ** 2).sum(-1) for name in "xy")
            want = np.array([mp.exp(s / 2) for s in squares], dtype=object)
        if "log_weight" in x:
            cond += max(abs(exact.numbers(x["log_weight"])))
        return _up(cond), {"out": _ups(want)}
    ndims, x = _per_head(recipe.estimator, x, recipe.arguments.get("causal", False))
    bound = partial(_bound, recipe.estimator, recipe.arguments.get("scale"), features)
    both = exact.each_head(bound, ndims, **x)
    size = both[..., 1:]
    if features != "trigonometric":
        size = np.array(np.max(size), dtype=object)
    return _up(np.max(both[..., 0])), {"out": _ups(size)}


def _bound(
    estimator: str,
    scale: float | None,
    features: str | None,
    q: _Array,
    k: _Array,
    v: _Array,
    visible: _Array,
    omega: _Array | None = None,
    log_weight: Any = 0.0,
    centres: _Array | None = None,
) -> _Array:
    """Largest exponent and size of each row of one head, (n, 2), over keys that are seen."""
    exact = _exact()
    seen = visible.any(0)
    k, v, visible = k[seen], v[seen], visible[:, seen]
    root = exact.root(scale, q.shape[-1])
    a, b, size = _longest(q) * root, _longest(k) * root, _longest(v)
    cond, rows = a * b, [size] * len(q)
    if estimator == "linear":
        cond = max(_longest(q), _longest(k))
    elif omega is not None:
        w = _longest(omega)
        cond = max(w * a, w * b + b**2 / 2) + np.max(abs(exact.numbers(log_weight)))
        if centres is not None:
            cond += _longest(centres) * w + _longest(centres) ** 2
        if features == "trigonometric":
            cond = w * (a + b) + (a**2 + b**2) / 2
            phi = [exact.feature_map(exact.numbers(x) * root, exact.numbers(omega), features)
                   for x in (q, k)]  # fmt: skip
            terms, kernel = abs(phi[0]) @ abs(phi[1]).T, phi[0] @ phi[1].T
            rows = [
                size * terms[i, see].sum() / abs(kernel[i, see].sum()) if see.any() else size
                for i, see in enumerate(visible)
            ]
    return np.array([[cond, row] for row in rows], dtype=object)


def _longest(x: _Array) -> Any:
    """Largest length of a row."""
    exact = _exact()
    squares = (exact.numbers(x) ** 2).sum(-1).ravel()
    return exact.context().sqrt(max(squares, default=0))


def _up(x: Any) -> float:
    """Round up to three digits."""
    return float(f"{float(x) * 1.01:.3g}")


def _ups(x: _Array) -> _Array:
    return np.array([_up(e) for e in x.ravel()]).reshape(x.shape)


def _decimals(recipe: Any) -> dict[str, tuple[tuple[int, ...], list[str]]]:
    """Shapes and digits of the outputs, evaluated twice."""
    low, high = (_solve(recipe, dps) for dps in _PRECISIONS)
    mp = _exact().context(_PRECISIONS[-1])
    found = {}
    for name, values in high.items():
        for a, b in zip(low[name].ravel(), values.ravel(), strict=True):
            if not mp.isfinite(b) or abs(mp.mpf(a) - b) > mp.mpf(10) ** -30 * abs(b):
                raise ValueError(f"{recipe.id}: {name} is not determined to 30 digits, {a}, {b}.")
        digits = [
            "0.0" if x == 0 else mp.nstr(x, _DIGITS, strip_zeros=False, min_fixed=0, max_fixed=0)
            for x in values.ravel()
        ]
        found[name] = (values.shape, digits)
    return found


def _is_exact(x: _Array, dtype: str) -> bool:
    """Whether every number is one of the dtype."""
    if x.dtype == bool or dtype == "float64":
        return True
    with np.errstate(over="ignore"):
        cast = x.astype(np.float16 if dtype == "float16" else np.float32)
    if not np.array_equal(cast.astype(np.float64), x):
        return False
    return dtype != "bfloat16" or not np.any(cast.view(np.uint32) & 0xFFFF)


def _tolerances(
    inputs: dict[str, _Array], expected: Iterable[_Array], size: Iterable[_Array], cond: float
) -> dict[str, float]:
    """Tolerances for the dtypes that hold inputs and outputs and in which they say something."""
    sizes = np.concatenate([x.ravel() for x in size])
    largest = max(float(np.max(np.abs(x), initial=0)) for x in expected)
    smallest = float(np.min(sizes[sizes > 0], initial=math.inf))
    found = {}
    for dtype, (_, eps, tiny, huge) in _DTYPES.items():
        tolerance = _CONTRACT * eps * (1 + cond)
        fits = all(_is_exact(x, dtype) for x in inputs.values())
        if fits and tolerance < 1 and largest < huge and smallest >= 1e4 * tiny:
            found[dtype] = tolerance
    return found


def _test(recipe: Any) -> dict[str, Any]:
    """Solve a case: its entry in a file."""
    decimals, (cond, size) = _decimals(recipe), _bounds(recipe)
    values = [np.array([float(x) for x in digits]) for _, digits in decimals.values()]
    for name, (_, digits) in decimals.items():
        if any(x != "0.0" and s == 0 for x, s in zip(digits, size[name].ravel(), strict=False)):
            raise ValueError(f"{recipe.id}: {name} is too small to be a float64.")
    arguments = dict(recipe.arguments)
    if arguments.get("scale") is not None:
        arguments["scale"] = float(arguments["scale"]).hex()
    return {
        "id": recipe.id,
        "comment": recipe.comment,
        "flags": list(recipe.flags),
        "arguments": arguments,
        "dtype": recipe.dtype,
        "inputs": {name: _tensor(x) for name, x in recipe.inputs.items()},
        "expected": {
            name: {"shape": list(shape), "data": digits, "size": _tensor(size[name], hexed=False)}
            for name, (shape, digits) in decimals.items()
        },
        "cond": cond,
        "tolerance": _tolerances(recipe.inputs, values, size.values(), cond),
        "result": "acceptable" if "EPS" in recipe.flags else "valid",
    }


def _tensor(x: _Array, hexed: bool = True) -> dict[str, Any]:
    data = x.ravel().tolist()
    if hexed and x.dtype != bool:
        data = [value.hex() for value in data]
    return {"shape": list(x.shape), "data": data}


@cache
def _documents() -> dict[str, Any]:
    """The content of every file by estimator."""
    from .. import __version__

    documents = {}
    for estimator in ESTIMATORS:
        tests = [_test(recipe) for recipe in _recipes() if recipe.estimator == estimator]
        used = sorted({flag for test in tests for flag in test["flags"]})
        kinds = sorted({test["arguments"].get("features", "") for test in tests})
        documents[estimator] = {
            "estimator": estimator,
            "generator": "refattn.conformance.vectors",
            "header": [
                f"Golden vectors for the estimator {estimator}.",
                "Inputs are exact; |output - expected| <= tolerance * size must hold.",
            ],
            "notes": {
                flag: dict(zip(("bugType", "description", "effect"), FLAGS[flag], strict=True))
                for flag in used
            },
            "numberOfTests": len(tests),
            "package": "refattn",
            "packageVersion": __version__,
            "schema": _SCHEMA.name,
            "schemaVersion": 1,
            "testGroups": [
                {
                    "type": f"{estimator}-{kind}".strip("-"),
                    "tests": [t for t in tests if t["arguments"].get("features", "") == kind],
                }
                for kind in kinds
            ],
        }
    return documents


# --- files ---------------------------------------------------------------------------------------


def write(directory: str | os.PathLike[str], *, format: str = "json") -> list[Path]:
    """Write the golden vectors, one file an estimator, with schema, README and manifest.

    Parameters
    ----------
    directory : path
        Made if it is not there. Files of the same name are replaced, others left alone.
    format : {"json", "npz", "safetensors"}
        "json" has inputs as C99 hexadecimal floats and outputs as 34 digits; the others have
        float64 arrays, outputs as two of them whose sum has about 32 digits.

    Returns
    -------
    list of Path
        The files written.

    Raises
    ------
    ValueError
        If the format is unknown.
    ModuleNotFoundError
        If mpmath is not installed.

    Examples
    --------
    >>> import tempfile
    >>> from refattn.conformance import vectors
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     paths = vectors.write(folder, format="npz")
    >>> [path.name for path in paths][:3]
    ['README.md', 'kernel.npz', 'lara.npz']
    """
    _check_format(format)
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    encode = {"json": _to_json, "npz": _to_npz, "safetensors": _to_safetensors}[format]
    content = {f"{name}.{format}": encode(doc) for name, doc in _documents().items()}
    content["README.md"] = _readme().encode()
    content[_SCHEMA.name] = _SCHEMA.read_bytes()
    content[_manifest_name(format)] = _manifest(content)
    paths = [folder / name for name in sorted(content)]
    for path in paths:
        draft = path.with_name(f".{path.name}.part")
        draft.write_bytes(content[path.name])
        os.replace(draft, path)
    return paths


def _manifest_name(format: str) -> str:
    return f"manifest-{format}.json"


def _manifest(content: dict[str, bytes]) -> bytes:
    """Checksums of files by name, and the names of the cases in those of an estimator."""
    tests = {name: [test["id"] for test in _tests(doc)] for name, doc in _documents().items()}
    files = {}
    for name, data in content.items():
        files[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        if (estimator := name.partition(".")[0]) in tests:
            files[name] |= {"numberOfTests": len(tests[estimator]), "tests": tests[estimator]}
    version = next(iter(_documents().values()))["packageVersion"]
    return _sealed({"files": files, "package": "refattn", "packageVersion": version,
                    "schema": _SCHEMA.name, "schemaVersion": 1})  # fmt: skip


def _sealed(manifest: dict[str, Any]) -> bytes:
    """The file of a manifest, with the checksum of all else in it."""
    body = {key: value for key, value in manifest.items() if key != "sha256"}
    return _to_json(body | {"sha256": hashlib.sha256(_to_json(body)).hexdigest()})


def _check_format(format: Any) -> None:
    if format not in FORMATS:
        raise ValueError(f"`format` must be one of {', '.join(FORMATS)}, got {format!r}.")


def _to_json(document: dict[str, Any]) -> bytes:
    """Write arrays of numbers and strings on one line each."""
    text = json.dumps(document, sort_keys=True, indent=1, allow_nan=False)
    text = re.sub(r"\[\n[^\[\]{}]*\]", lambda match: " ".join(match.group().split()), text)
    return (text + "\n").encode("ascii")


def _arrays(document: dict[str, Any]) -> tuple[bytes, dict[str, _Array]]:
    """Take the arrays out of a document: what is left, as JSON, and the arrays by name."""
    arrays: dict[str, _Array] = {}
    document = json.loads(json.dumps(document))
    for test in _tests(document):
        case = _case(document["estimator"], test)
        parts = {"expected": case.expected, "expected_low": case.expected_low, "size": case.size}
        arrays |= {f"{case.id}.{name}": x for name, x in case.inputs.items()}
        for part, named in parts.items():
            arrays |= {f"{case.id}.{name}.{part}": x for name, x in named.items()}
        for tensor in (*test["inputs"].values(), *test["expected"].values()):
            del tensor["data"]
            tensor.pop("size", None)
    return json.dumps(document, sort_keys=True).encode("ascii"), dict(sorted(arrays.items()))


def _to_npz(document: dict[str, Any]) -> bytes:
    metadata, arrays = _arrays(document)
    arrays["metadata"] = np.frombuffer(metadata, np.uint8)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(arrays):
            info = zipfile.ZipInfo(f"{name}.npy", (1980, 1, 1, 0, 0, 0))
            info.create_system = 3  # the default depends on the machine
            member = io.BytesIO()
            np.lib.format.write_array(member, arrays[name], (1, 0), allow_pickle=False)
            archive.writestr(info, member.getvalue())
    return file.getvalue()


def _to_safetensors(document: dict[str, Any]) -> bytes:
    metadata, arrays = _arrays(document)
    header: dict[str, Any] = {"__metadata__": {"refattn": metadata.decode()}}
    body = b""
    for name in sorted(arrays, key=lambda name: (arrays[name].dtype == bool, name)):
        x = arrays[name]
        data = x.astype(bool if x.dtype == bool else "<f8").tobytes()
        header[name] = {
            "dtype": "BOOL" if x.dtype == bool else "F64",
            "shape": list(x.shape),
            "data_offsets": [len(body), len(body) + len(data)],
        }
        body += data
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + body


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
    >>> from refattn.conformance import vectors
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = vectors.write(folder)
    ...     cases = vectors.load(folder)
    >>> cases[0].id
    'kernel-hyperbolic-basic-float64'
    """
    if format is not None:
        _check_format(format)
    found = [(kind, path) for kind, path in _files(directory) if format in (None, kind)]
    kinds = sorted({kind for kind, _ in found})
    if len(kinds) != 1:
        raise ValueError(
            f"`directory` must hold vectors of one format, or `format` be given: {str(directory)!r}"
            f" has {', '.join(kinds) or 'none'}."
        )
    cases = []
    for kind, path in found:
        try:
            document, arrays = _read(kind, path)
            tests = _tests(document)
            cases += [_case(document["estimator"], test, arrays) for test in tests]
        except ModuleNotFoundError:
            raise
        except Exception as error:  # parsers of foreign bytes raise all kinds
            raise ValueError(f"cannot read {str(path)!r}: {error!r}") from None
    return cases


def _files(directory: str | os.PathLike[str]) -> list[tuple[str, Path]]:
    """Find the files of vectors, with their formats."""
    paths = ((kind, Path(directory) / f"{e}.{kind}") for kind in FORMATS for e in ESTIMATORS)
    return [(kind, path) for kind, path in paths if path.is_file()]


def _read(kind: str, path: Path) -> tuple[Any, dict[str, _Array] | None]:
    """The document of a file and, if they are not in it, its arrays."""
    if kind == "json":
        return _parse(path.read_text("utf-8")), None
    if kind == "npz":
        # Of its own, NumPy leaves damaged files open.
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        return _parse(bytes(arrays.pop("metadata")).decode()), arrays
    try:
        arrays, metadata = _read_safetensors(path)
    except ModuleNotFoundError as error:
        message = f"reading .safetensors {_INSTALL}"
        raise ModuleNotFoundError(message, name=error.name) from None
    return _parse(metadata["refattn"]), arrays


def _parse(text: str) -> Any:
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


def _tests(document: Any) -> list[Any]:
    return [test for group in document["testGroups"] for test in group["tests"]]


def _case(estimator: str, test: dict[str, Any], arrays: dict[str, _Array] | None = None) -> Case:
    """Turn an entry of a file, and the arrays that are not in it, into a case."""
    arguments = dict(test["arguments"])
    if arguments.get("scale") is not None:
        arguments["scale"] = float.fromhex(arguments["scale"])
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
        exact = {name: [Fraction(x) for x in values[name]["data"]] for name in names}
        high = {name: [float(x) for x in values[name]["data"]] for name in names}
        low = {
            name: [float(x - Fraction(y)) for x, y in zip(exact[name], high[name], strict=True)]
            for name in names
        }
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
    )


def _from_tensor(x: dict[str, Any]) -> _Array:
    data = [value if isinstance(value, bool) else float.fromhex(value) for value in x["data"]]
    return np.array(data).reshape(x["shape"])


# --- what may be wrong with files ----------------------------------------------------------------


def lint(directory: str | os.PathLike[str], *, fraction: float = 1.0, rng: Any = None) -> list[str]:
    """Say what is wrong with the vectors of a directory.

    The directory must hold the files of its manifests as they were written, and no others. They
    must satisfy the schema and more: unique ids and keys, no case twice, flags described
    and used, inputs that are numbers of the stated dtype, shapes that agree, finite outputs,
    tolerances as the accuracy contract has them. All cases, or a random part, are evaluated again,
    and must give the same digits.

    Parameters
    ----------
    directory : path
        What `write` was given.
    fraction : float, default 1
        Part of the cases that is evaluated again; all of them take a few seconds.
    rng : None, int, numpy.random.Generator or anything numpy.random.default_rng takes
        Chooses them.

    Returns
    -------
    list of str
        One line for each problem; empty if all is well.

    Raises
    ------
    ModuleNotFoundError
        If jsonschema, mpmath or, for its files, safetensors is not installed.

    Examples
    --------
    >>> import tempfile
    >>> from refattn.conformance import vectors
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = vectors.write(folder)
    ...     vectors.lint(folder, fraction=0.01)
    []
    """
    try:
        from jsonschema import Draft202012Validator
    except ModuleNotFoundError as error:
        message = f"checking vectors {_INSTALL}"
        raise ModuleNotFoundError(message, name=error.name) from None
    schema = json.loads(_SCHEMA.read_text("utf-8"))
    of_manifests = {"$ref": "#/$defs/manifest", "$defs": schema["$defs"]}
    folder, found = Path(directory), _files(directory)
    kinds = {kind for kind in FORMATS if (folder / _manifest_name(kind)).is_file()}
    if not found and not kinds:
        return [f"{os.fspath(directory)}: no vectors"]
    generator, problems = np.random.default_rng(rng), []
    manifests: dict[str, Any] = {}
    for kind in sorted(kinds | {kind for kind, _ in found}):
        name = _manifest_name(kind)
        if kind not in kinds:
            problems.append(f"{name}: is missing; vectors without one must be written again")
            continue
        manifest, wrong = _lint_manifest(folder / name, Draft202012Validator(of_manifests))
        problems += [f"{name}: {problem}" for problem in wrong]
        manifests |= {} if manifest is None else {name: manifest}
    problems += _lint_files(folder, manifests)
    if len(manifests) == len(kinds) > 0:
        listed = {name for manifest in manifests.values() for name in manifest["files"]}
        there = {path.name for path in folder.iterdir()}
        problems += [f"{name}: is in no manifest" for name in sorted(there - listed - {*manifests})]
    seen: dict[str, Counter[Any]] = {kind: Counter() for kind in FORMATS}
    for kind, path in found:
        try:
            document, arrays = _read(kind, path)
            wrong = _schema_errors(Draft202012Validator(schema), document)
        except ModuleNotFoundError:
            raise
        except Exception as error:  # parsers of foreign bytes raise all kinds
            problems.append(f"{path.name}: cannot be read: {error}")
            continue
        if not wrong:
            entry = manifests.get(_manifest_name(kind), {"files": {}})["files"].get(path.name)
            wrong = [] if entry is None else list(_lint_ids(document, entry.get("tests", [])))
            wrong += _lint_file(
                path, document, arrays, seen[kind], lambda: generator.random() < fraction
            )
        problems += [f"{path.name}: {problem}" for problem in wrong]
    return problems


def _schema_errors(schema: Any, document: Any) -> list[str]:
    return [
        f"{'/'.join(map(str, error.absolute_path))}: {error.message[:200]}"
        for error in schema.iter_errors(document)
    ]


def _lint_manifest(path: Path, schema: Any) -> tuple[Any, list[str]]:
    """A manifest, or None if it is of no use, and what is wrong with it."""
    try:
        data = path.read_bytes()
        manifest = _parse(data.decode("ascii"))
        wrong = _schema_errors(schema, manifest)
    except Exception as error:
        return None, [f"cannot be read: {error}"]
    if wrong:
        return None, wrong
    return manifest, [] if data == _sealed(manifest) else ["is not as it was written"]


def _lint_files(folder: Path, manifests: dict[str, Any]) -> Iterator[str]:
    """Compare files with their checksums."""
    for manifest_name, manifest in manifests.items():
        for name, entry in manifest["files"].items():
            path = folder / name
            if not path.is_file():
                yield f"{name}: is missing"
                continue
            data = path.read_bytes()
            if len(data) != entry["bytes"]:
                yield f"{name}: has {len(data)} bytes, not the {entry['bytes']} of {manifest_name}"
            elif hashlib.sha256(data).hexdigest() != entry["sha256"]:
                yield f"{name}: does not have the SHA-256 of {manifest_name}"


def _lint_ids(document: Any, ids: list[str]) -> Iterator[str]:
    """Compare the cases of a file with those of its manifest."""
    there = {test["id"] for test in _tests(document)}
    yield from (f"{name}: is missing" for name in ids if name not in there)
    yield from (f"{name}: is not in the manifest" for name in sorted(there - set(ids)))


def _lint_file(
    path: Path,
    document: Any,
    arrays: dict[str, _Array] | None,
    seen: Counter[Any],
    again: Callable[[], bool],
) -> Iterator[str]:
    tests = _tests(document)
    if document["estimator"] != path.stem:
        yield f"estimator is {document['estimator']!r}"
    if document["numberOfTests"] != len(tests):
        yield f"numberOfTests is {document['numberOfTests']}, but there are {len(tests)}"
    used, described = {flag for test in tests for flag in test["flags"]}, set(document["notes"])
    for flag in sorted(used ^ described):
        yield f"flag {flag} is {'not described' if flag in used else 'described but not used'}"
    known = set()
    for test in tests:
        seen[test["id"]] += 1
        if seen[test["id"]] > 1:
            yield f"{test['id']}: id is used twice"
        try:
            case = _case(document["estimator"], test, arrays)
            if arrays is not None:
                known |= {f"{case.id}.{name}" for name in case.inputs}
                known |= {f"{case.id}.{name}.{part}" for name in case.expected
                          for part in ("expected", "expected_low", "size")}  # fmt: skip
            problems = list(_lint_case(case, test, arrays is None))
            content = _fingerprint(case)
            seen[content] += 1
            if seen[content] > 1:
                problems.append("the same inputs and arguments as another case")
            if not problems and again():
                problems = list(_lint_again(case, test, arrays is None))
        except Exception as error:  # the numbers may be anything that the schema allows
            problems = [f"{type(error).__name__}: {error}"]
        yield from (f"{test['id']}: {problem}" for problem in problems)
    if arrays is not None:
        yield from (f"array {name} belongs to no case" for name in sorted(set(arrays) - known))


def _fingerprint(case: Case) -> tuple[Any, ...]:
    inputs = ((name, x.shape, x.tobytes()) for name, x in sorted(case.inputs.items()))
    return (case.estimator, json.dumps(case.arguments, sort_keys=True), *inputs)


def _lint_case(case: Case, test: dict[str, Any], with_data: bool) -> Iterator[str]:
    """Check what can be checked without evaluating."""
    for part in ("inputs", "expected"):
        for name, tensor in test[part].items():
            if with_data != ("data" in tensor):
                yield f"{name}: data must be {'here' if with_data else 'in the arrays'}"
            if tuple(tensor["shape"]) != getattr(case, part)[name].shape:
                yield f"{name}: has shape {getattr(case, part)[name].shape}, not the stated one"
    for name, x in case.inputs.items():
        if x.dtype not in (np.float64, np.bool_):
            yield f"{name}: has dtype {x.dtype}"
        elif not np.all(np.isfinite(x)) or not _is_exact(x, case.dtype):
            yield f"{name}: is not exact in {case.dtype}"
    for name, x in case.expected.items():
        if not np.all(np.isfinite(x)) or not np.all(np.isfinite(case.expected_low[name])):
            yield f"{name}: expected values are not finite"
        try:
            fits = np.broadcast_shapes(x.shape, case.size[name].shape) == x.shape
        except ValueError:
            fits = False
        if not fits or case.expected_low[name].shape != x.shape:
            yield f"{name}: shapes of expected values and sizes do not agree"
    shapes = {name: x.shape for name, x in case.expected.items()}
    if (wanted := _shapes(case)) != shapes:
        yield f"shapes {shapes} do not follow from the inputs, {wanted}"
    for dtype, tolerance in case.tolerance.items():
        if tolerance != _CONTRACT * _DTYPES[dtype][1] * (1 + case.cond):
            yield f"tolerance for {dtype} is not 16 eps (1 + cond)"
    if (case.result == "acceptable") != ("EPS" in case.flags):
        yield f"result {case.result!r} does not go with the flags"


def _shapes(case: Case) -> dict[str, tuple[int, ...]]:
    """Shapes of the outputs; raises where those of the inputs do not agree."""
    x = {name: value.shape for name, value in case.inputs.items()}
    sizes = {shape[-1] for name, shape in x.items() if name not in ("v", "mask", "log_weight")}
    if len(sizes) != 1:
        raise ValueError(f"head sizes {sorted(sizes)} differ")
    if case.estimator == "moments":
        d = x["x"][-1]
        return {"mean": (d,), "cov": (d, d)}
    if case.estimator == "kernel":
        if x["x"] != x["y"]:
            raise ValueError(f"shapes {x['x']} and {x['y']} of pairs differ")
        return {"out": x["x"][:1]}
    if x["k"][:-1] != x["v"][:-1]:
        raise ValueError(f"shapes {x['k']} and {x['v']} of keys and values do not agree")
    np.broadcast_shapes(x.get("mask", ()), (*x["q"][:-1], x["k"][-2]))
    return {"out": (*x["q"][:-1], x["v"][-1])}


def _lint_again(case: Case, test: dict[str, Any], with_data: bool) -> Iterator[str]:
    """Evaluate the case from the inputs in the file."""
    fresh = _test(case)
    again = _case(case.estimator, fresh)
    for name in case.expected:
        same = all(
            np.array_equal(getattr(case, part)[name], getattr(again, part)[name])
            for part in ("expected", "expected_low", "size")
        )
        if not same or (with_data and test["expected"][name] != fresh["expected"][name]):
            yield f"{name}: evaluated again gives other digits or sizes"
    if (case.cond, case.tolerance) != (again.cond, again.tolerance):
        yield "cond or tolerance is not what the inputs give"


# --- the README of the directory -----------------------------------------------------------------

_NUMPY_READER = '''\
import json
import numpy as np

def failures(path, run, dtype="float32"):
    """Ids of the vectors that `run(**inputs, **arguments)` misses; outputs by name or one array."""
    with np.load(path) as file:
        tests = [t for g in json.loads(bytes(file["metadata"]))["testGroups"] for t in g["tests"]]
        for test in (t for t in tests if dtype in t["tolerance"]):
            inputs = {name: file[f"{test['id']}.{name}"] for name in test["inputs"]}
            inputs = {n: x if x.dtype == bool else x.astype(dtype) for n, x in inputs.items()}
            got = run(**inputs, **test["arguments"])
            for name in test["expected"]:
                want, size = (file[f"{test['id']}.{name}.{x}"] for x in ("expected", "size"))
                value = got[name] if isinstance(got, dict) else got
                bound = test["tolerance"][dtype] * size
                if value.shape != want.shape or not np.all(np.abs(value - want) <= bound):
                    yield test["id"]  # nan fails too
'''

_CPP_READER = """\
// The float64 tensor `name` of a file of vectors, row after row, on a little-endian machine.
std::vector<double> read(const std::string& path, const std::string& name) {
    std::ifstream file(path, std::ios::binary);
    std::uint64_t length = 0, begin = 0, end = 0;
    file.read(reinterpret_cast<char*>(&length), 8);
    std::string header(length, ' ');
    file.read(&header[0], length);
    const auto entry = header.find("\\"" + name + "\\":{\\"data_offsets\\":[");
    if (!file || entry == std::string::npos) throw std::runtime_error("no tensor " + name);
    std::istringstream numbers(header.substr(header.find('[', entry) + 1));
    numbers >> begin, numbers.ignore(1), numbers >> end;
    std::vector<double> x((end - begin) / sizeof(double));
    file.seekg(8 + length + begin).read(reinterpret_cast<char*>(x.data()), end - begin);
    if (!file) throw std::runtime_error("the file ends within " + name);
    return x;
}
"""


def _readme() -> str:
    rows = (
        " | ".join(cell.replace("|", "\\|") for cell in (name, *FLAGS[name]))
        for name in sorted(FLAGS)
    )
    flags = "\n".join(f"| {row} |" for row in rows)
    return f"""\
# Golden vectors for random-feature attention

One file an estimator: {", ".join(ESTIMATORS)}. Written by `refattn vectors`; `refattn vectors
--check` says whether they are intact: it compares files with their manifest, and evaluates every
vector again. Inputs are exact in the stated dtype; outputs were
evaluated with 80 digits.

An output is right if, everywhere, `|output - expected| <= tolerance[dtype] * size`, where the
tolerance is 16 eps (1 + cond), cond the largest |exponent|, and size the largest length of a
row of v (for trigonometric features times the sum of absolute terms over the normaliser; for
moments and kernels the size of the output itself). nan is never right. dtypes without a
tolerance cannot hold the case or would accept anything. The tolerance of float16 and bfloat16
is for arithmetic in them throughout; kernels that accumulate in float32 and round the output
once meet that of float32 plus one rounding. `result` is "valid", or "acceptable" where an
implementation that declares an eps in its formula may miss.

Arguments: `scale` null means 1/sqrt(d), otherwise a C99 hexadecimal float; `causal`: query i sees
key j only if j <= i + m - n; masks are true where a query attends; H query heads share G key
heads, h using h // (H // G). Frequencies are given, in the coordinates sqrt(scale) q.

| format | inputs | outputs |
|---|---|---|
| json | C99 hexadecimal floats | {_DIGITS} digits |
| npz, safetensors | float64 arrays `ID.NAME` | `ID.NAME.expected` + `ID.NAME.expected_low` |

`manifest-json.json`, `manifest-npz.json` or `manifest-safetensors.json` has the size and SHA-256 of
every file of its format, of the schema and of this file, the number and the ids of the tests, and
as `sha256` the checksum of its own other entries, written in the same way.

Sizes are beside the outputs, `ID.NAME.size`. In npz files the array `metadata` holds the rest as
JSON, in safetensors files the metadata `refattn`. No file needs pickle.

## Reading npz with NumPy

```python
{_NUMPY_READER}```

## Reading safetensors with C++

With `<cstdint>`, `<fstream>`, `<sstream>`, `<stdexcept>`, `<string>` and `<vector>`:

```cpp
{_CPP_READER}```

## Flags

| flag | kind | what | effect of the mistake |
|---|---|---|---|
{flags}
"""
