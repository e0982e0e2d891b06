r"""How many digits of float64 attention functions are right on the hard golden vectors.

The log relative error is :math:`-\log_{10} |x - e| / |e|` of a result x and the exact e, of 34
digits, and so with the sum of absolute terms, :math:`\sum |p v|`, in place of :math:`|e|`. It is
computed of fractions, and is at least 0 and at most 16 (of float64) or 30 (of pairs).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from functools import cache
from importlib import import_module, metadata
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import refattn
from refattn import certified
from refattn.judge.vectors import hard, solving
from refattn.judge.vectors.hard import Hard

from ..results import Section
from . import search

_Array = npt.NDArray[Any]
_Attention = Callable[[_Array, _Array, _Array], Any]

MOST = {"float64": 16.0, "pairs": 30.0}


class Library(NamedTuple):
    """An attention function."""

    name: str  # of its column
    package: str  # whose version is stated
    load: Callable[[], _Attention]  # of one head: gives an array of float64, or a pair of them
    kind: str = "float64"  # a key of `MOST`


class Row(NamedTuple):
    """What one library gets right on the vectors of one family and level: log relative errors."""

    library: str
    version: str
    family: str
    level: int
    least: float  # of the entries of outputs
    median: float
    least_of_terms: float  # relative to sum |p v|
    median_of_terms: float


class Skipped(NamedTuple):
    """A library that was not measured, and why."""

    library: str
    reason: str


class Digits(NamedTuple):
    """Log relative errors of the entries of an output, and relative to sum |p v|."""

    output: list[float]
    terms: list[float]


def _formula() -> _Attention:
    return search.plain


def _package() -> _Attention:
    return refattn.softmax_attention


def _certified() -> _Attention:
    return lambda q, k, v: certified.softmax_attention(q, k, v).out


def _torch(backend: str = "") -> _Attention:
    torch = import_module("torch")
    attend = torch.nn.functional.scaled_dot_product_attention

    def run(q: _Array, k: _Array, v: _Array) -> Any:
        batch = [torch.asarray(x)[None, None] for x in (q, k, _padded(v, q))]
        if not backend:
            return attend(*batch)[0, 0].numpy()[:, : v.shape[-1]]
        kernels = import_module("torch.nn.attention")
        with kernels.sdpa_kernel(getattr(kernels.SDPBackend, backend)):
            return attend(*batch)[0, 0].numpy()[:, : v.shape[-1]]

    return run


def _jax() -> _Attention:
    jax = import_module("jax")

    def run(q: _Array, k: _Array, v: _Array) -> Any:
        with jax.enable_x64(True):
            batch = [jax.numpy.asarray(x)[None, :, None] for x in (q, k, _padded(v, q))]
            return np.asarray(jax.nn.dot_product_attention(*batch))[0, :, 0, : v.shape[-1]]

    return run


def _onnxruntime() -> _Attention:
    onnx, runtime = import_module("onnx"), import_module("onnxruntime")
    helper, names = onnx.helper, ("Q", "K", "V")

    def value(name: str) -> Any:
        return helper.make_tensor_value_info(name, onnx.TensorProto.DOUBLE, None)

    node = helper.make_node("Attention", names, ["Y"])
    graph = helper.make_graph([node], "attention", [value(x) for x in names], [value("Y")])
    opset = helper.make_opsetid("", 23)  # the first with Attention
    model = helper.make_model(graph, opset_imports=[opset], ir_version=11)
    session = runtime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )

    def run(q: _Array, k: _Array, v: _Array) -> Any:
        batch = (x[None, None] for x in (q, k, v))
        return session.run(None, dict(zip(names, batch, strict=True)))[0][0, 0]

    return run


def _padded(v: _Array, q: _Array) -> _Array:
    """Values as wide as queries: some functions take no others, or another path with them."""
    return np.concatenate([v, np.zeros((len(v), q.shape[-1] - v.shape[-1]))], -1)


LIBRARIES: tuple[Library, ...] = (
    Library("formula, NumPy", "numpy", _formula),
    Library("refattn", "refattn", _package),
    Library("torch", "torch", _torch),
    Library("torch, MATH", "torch", lambda: _torch("MATH")),
    Library("onnxruntime", "onnxruntime", _onnxruntime),
    Library("jax", "jax", _jax),
    Library("refattn.certified", "refattn", _certified, "pairs"),
)


@cache
def _exact(case: Hard) -> tuple[tuple[Fraction, ...], tuple[Fraction, ...]]:
    """The entries of the output, and of the sum of absolute terms."""
    recipe = hard.recipe(case)
    q, k, v = (recipe.inputs[name] for name in "qkv")
    terms = certified.softmax_attention(q, k, abs(v)).out.hi
    data = solving.solved(recipe)["expected"]["out"]["data"]
    return tuple(map(Fraction, data)), tuple(map(Fraction, terms.ravel().tolist()))


def digits(found: Any, case: Hard, kind: str = "float64") -> Digits:
    """Log relative errors of an output of a case, at most `MOST` of the kind."""
    parts = found if isinstance(found, tuple) else (found,)
    entries = list(zip(*(np.ravel(part).tolist() for part in parts), strict=True))
    lost: list[list[float]] = []
    for sizes in _exact(case):
        each = zip(entries, _exact(case)[0], sizes, strict=True)
        lost.append([_digits(x, exact, size, MOST[kind]) for x, exact, size in each])
    return Digits(*lost)


def _digits(parts: Iterable[float], exact: Fraction, size: Fraction, most: float) -> float:
    parts = tuple(parts)
    if not all(map(math.isfinite, parts)):
        return 0.0
    error = float(abs(sum(map(Fraction, parts)) - exact) / abs(size))
    return min(max(-math.log10(error), 0.0), most) if error else most


def measure(
    cases: Sequence[Hard] = hard.HARD_CASES, libraries: Sequence[Library] = LIBRARIES
) -> tuple[list[Row], list[Skipped]]:
    """Digits of each library in each family, at each level; those not installed are skipped."""
    rows: list[Row] = []
    skipped: list[Skipped] = []
    for library in libraries:
        try:
            rows += _rows(library, cases)
        except ModuleNotFoundError as error:
            skipped.append(Skipped(library.name, f"{error.name} is not installed"))
        except (
            Exception
        ) as error:  # it does not take float64, say; libraries have classes of theirs
            skipped.append(Skipped(library.name, repr(error).splitlines()[0]))
    return rows, skipped


def _rows(library: Library, cases: Sequence[Hard]) -> list[Row]:
    run, of_level = library.load(), dict[tuple[str, int], Digits]()
    for case in cases:
        q, k, v = (hard.recipe(case).inputs[name] for name in "qkv")
        found = digits(run(q, k, v), case, library.kind)
        known = of_level.setdefault((case.family, case.level), Digits([], []))
        known.output.extend(found.output)
        known.terms.extend(found.terms)
    version = metadata.version(library.package)
    return [
        Row(
            library.name,
            version,
            *of,
            *(round(float(f(x)), 2) for x in found for f in (np.min, np.median)),
        )
        for of, found in of_level.items()
    ]


def table(
    cases: Sequence[Hard] = hard.HARD_CASES, libraries: Sequence[Library] = LIBRARIES
) -> tuple[list[Section], Any]:
    """Digits relative to the output and to sum |p v|: least and median."""
    rows, skipped = measure(cases, libraries)
    versions = {row.library: row.version for row in rows}
    of = {(row.family, row.level, row.library): row for row in rows}
    columns = ["family", "level", *(f"{name} {version}" for name, version in versions.items())]
    sections = []
    for title, least in (("the output", "least"), ("sum |p v|", "least_of_terms")):
        median = least.replace("least", "median")
        cells = []
        for place in dict.fromkeys((row.family, row.level) for row in rows):
            found = (of[*place, name] for name in versions)
            shown = (f"{getattr(x, least):.1f} / {getattr(x, median):.1f}" for x in found)
            cells.append([*place, *shown])
        sections.append(Section(f"digits relative to {title}, least / median", columns, cells))
    if skipped:
        sections.append(Section("skipped", Skipped._fields, skipped, left=2))
    return sections, {"rows": rows, "skipped": skipped}
