"""Outputs of the cases to thirty digits, and what errors in them are relative to."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache, partial
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ... import registry
from .cases import CONTRACT, DIGITS, DTYPES, ESTIMATORS, FLAGS, SCHEMA, Case, is_exact
from .recipes import Recipe, all_recipes

__all__ = ["PRECISIONS", "documents", "solved"]

_Array = npt.NDArray[Any]

PRECISIONS = (50, 80)  # digits, which must agree on 30

_NDIMS = {"q": 2, "k": 2, "v": 2, "visible": 2, "omega": 2, "centres": 2, "log_weight": 1}


def _exact() -> Any:
    """Arithmetic with any number of digits, which needs mpmath: not imported before it is used."""
    return import_module("refattn.conformance.exact")


def _per_head(recipe: Recipe | Case) -> tuple[Any, dict[str, _Array]]:
    """Axes of one head, and the arrays with the mask and the causal form as `visible`."""
    record, x = registry.ESTIMATORS[recipe.estimator], recipe.inputs
    n, m = x["q"].shape[-2], x["k"].shape[-2]
    visible = np.ones((n, m), bool)
    if "mask" in x:
        visible = visible & x["mask"]
    if recipe.arguments.get("causal"):
        visible = visible & _exact().causal(n, m)
    arrays = {name: value for name, value in x.items() if name != "mask"}
    return {**_NDIMS, "omega": 3 if record.has("per-query") else 2}, {**arrays, "visible": visible}


def _solve(recipe: Recipe | Case, dps: int) -> dict[str, _Array]:
    """Evaluate a case with so many digits."""
    exact, x, record = _exact(), recipe.inputs, registry.ESTIMATORS[recipe.estimator]
    options = {
        name: value
        for name, value in recipe.arguments.items()
        if name not in ("causal", "weighting", "feature_map")
    }
    if record.has("rows"):
        mean, cov = exact.mean(x["x"], dps=dps), exact.covariance(x["x"], **options, dps=dps)
        return {"mean": mean, "cov": cov}
    if record.has("pairs"):
        return {"out": exact.kernel_estimate(**x, **options, dps=dps)}
    function = getattr(exact, record.naive.__name__)  # the same formula has the same name there
    ndims, x = _per_head(recipe)
    return {"out": exact.each_head(partial(function, **options, dps=dps), ndims, **x)}


def _bounds(recipe: Recipe | Case) -> tuple[float, dict[str, _Array]]:
    """Largest exponent and what errors are relative to: the accuracy contract."""
    exact, x, features = _exact(), recipe.inputs, recipe.arguments.get("features")
    record = registry.ESTIMATORS[recipe.estimator]
    if record.has("rows"):
        mp, rows = exact.context(), exact.numbers(x["x"])
        mean, cov = (_solve(recipe, PRECISIONS[0])[name] for name in ("mean", "cov"))
        sd = np.array([mp.sqrt(cov[i, i]) for i in range(len(mean))], dtype=object)
        z = abs(rows[0] - mean) / np.where(sd == 0, 1, sd)
        return _up(max(z)), {"mean": _ups(abs(mean) + sd), "cov": _ups(np.outer(sd, sd))}
    if record.has("pairs"):
        mp, want = exact.context(), abs(_solve(recipe, PRECISIONS[0])["out"])
        long_x, long_y, long_omega = (_longest(x[name]) for name in ("x", "y", "omega"))
        cond = long_omega * (long_x + long_y) + (long_x**2 + long_y**2) / 2
        if features == "trigonometric":
            squares = sum((exact.numbers(x[name]) ** 2).sum(-1) for name in "xy")
            want = np.array([mp.exp(s / 2) for s in squares], dtype=object)
        if "log_weight" in x:
            cond += max(abs(exact.numbers(x["log_weight"])))
        return _up(cond), {"out": _ups(want)}
    ndims, x = _per_head(recipe)
    both = exact.each_head(lambda **arrays: _bound(recipe, _Head(**arrays)), ndims, **x)
    size = both[..., 1:]
    if features != "trigonometric":
        size = np.array(np.max(size), dtype=object)
    return _up(np.max(both[..., 0])), {"out": _ups(size)}


class _Head(NamedTuple):
    """The arrays of one head."""

    q: _Array
    k: _Array
    v: _Array
    visible: _Array
    omega: _Array | None = None
    log_weight: Any = 0.0
    centres: _Array | None = None


def _bound(recipe: Recipe | Case, head: _Head) -> _Array:
    """Largest exponent and size of each row of one head, (n, 2), over keys that are seen."""
    exact = _exact()
    scale, features = recipe.arguments.get("scale"), recipe.arguments.get("features")
    seen = head.visible.any(0)
    q, k, v, visible = head.q, head.k[seen], head.v[seen], head.visible[:, seen]
    omega, centres = head.omega, head.centres
    root = exact.root(scale, q.shape[-1])
    a, b, size = _longest(q) * root, _longest(k) * root, _longest(v)
    cond, rows = a * b, [size] * len(q)
    if registry.ESTIMATORS[recipe.estimator].has("feature-map"):
        cond = max(_longest(q), _longest(k))
    elif omega is not None:
        w = _longest(omega)
        cond = max(w * a, w * b + b**2 / 2) + np.max(abs(exact.numbers(head.log_weight)))
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


def _decimals(recipe: Recipe | Case) -> dict[str, tuple[tuple[int, ...], list[str]]]:
    """Shapes and digits of the outputs, evaluated twice."""
    low, high = (_solve(recipe, dps) for dps in PRECISIONS)
    mp = _exact().context(PRECISIONS[-1])
    found = {}
    for name, values in high.items():
        for a, b in zip(low[name].ravel(), values.ravel(), strict=True):
            if not mp.isfinite(b) or abs(mp.mpf(a) - b) > mp.mpf(10) ** -30 * abs(b):
                raise ValueError(f"{recipe.id}: {name} is not determined to 30 digits, {a}, {b}.")
        digits = [
            "0.0" if x == 0 else mp.nstr(x, DIGITS, strip_zeros=False, min_fixed=0, max_fixed=0)
            for x in values.ravel()
        ]
        found[name] = (values.shape, digits)
    return found


def _tolerances(
    inputs: dict[str, _Array], expected: Iterable[_Array], size: Iterable[_Array], cond: float
) -> dict[str, float]:
    """Tolerances for the dtypes that hold inputs and outputs and in which they say something."""
    sizes = np.concatenate([x.ravel() for x in size])
    largest = max(float(np.max(np.abs(x), initial=0)) for x in expected)
    smallest = float(np.min(sizes[sizes > 0], initial=math.inf))
    found = {}
    for dtype, (_, eps, tiny, huge) in DTYPES.items():
        tolerance = CONTRACT * eps * (1 + cond)
        fits = all(is_exact(x, dtype) for x in inputs.values())
        if fits and tolerance < 1 and largest < huge and smallest >= 1e4 * tiny:
            found[dtype] = tolerance
    return found


def solved(recipe: Recipe | Case) -> dict[str, Any]:
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
def documents() -> dict[str, Any]:
    """The content of every file by estimator."""
    from ... import __version__

    documents = {}
    for estimator in ESTIMATORS:
        tests = [solved(recipe) for recipe in all_recipes() if recipe.estimator == estimator]
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
            "schema": SCHEMA.name,
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
