"""The formula of a case, and what it gives with so many digits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ... import registry
from .cases import GRADIENTS, Case
from .recipes import Recipe

__all__ = ["NDIMS", "Head", "exact", "formula", "heads", "solve"]

_Array = npt.NDArray[Any]

# Axes of one head.
NDIMS = {"q": 2, "k": 2, "v": 2, "visible": 2, "omega": 2, "centres": 2, "log_weight": 1}
NDIMS |= {"d_out": 2, "d_lse": 1}


class Head(NamedTuple):
    """The arrays of one head."""

    q: _Array
    k: _Array
    v: _Array
    visible: _Array
    omega: _Array | None = None
    log_weight: Any = 0.0
    centres: _Array | None = None
    d_out: _Array | None = None
    d_lse: Any = 0.0


def exact() -> Any:
    """Arithmetic with any number of digits, which needs mpmath: not imported before it is used."""
    return import_module("refattn.conformance.exact")


def _ndims(case: Recipe | Case) -> dict[str, int]:
    per_query = registry.ESTIMATORS[case.estimator].has("per-query")
    return {**NDIMS, "omega": 3 if per_query else 2}


def _visible(case: Recipe | Case) -> _Array:
    """The mask and the causal form in one."""
    n, m = case.inputs["q"].shape[-2], case.inputs["k"].shape[-2]
    seen = np.ones((n, m), bool) & case.inputs.get("mask", True)
    return seen & exact().causal(n, m) if case.arguments.get("causal") else seen


def heads(case: Recipe | Case) -> list[Head]:
    """The arrays of each head."""
    arrays = {name: x for name, x in case.inputs.items() if name != "mask"}
    return [Head(**x) for x in exact().heads(_ndims(case), **arrays, visible=_visible(case))]


def formula(case: Recipe | Case, dps: int = 50) -> Callable[..., _Array]:
    """The output of one head, and in one more column its log normaliser where that counts."""
    record = registry.ESTIMATORS[case.estimator]
    # The same formula has the same name there.
    function = _with_lse if "d_lse" in case.inputs else getattr(exact(), record.naive.__name__)
    return partial(function, **_options(case), dps=dps)


def _options(case: Recipe | Case) -> dict[str, Any]:
    """The arguments that formulas know by the same name."""
    others = ("causal", "weighting", "feature_map")
    return {name: value for name, value in case.arguments.items() if name not in others}


def solve(case: Recipe | Case, dps: int) -> dict[str, _Array]:
    """Evaluate a case with so many digits."""
    x, record, options = case.inputs, registry.ESTIMATORS[case.estimator], _options(case)
    if record.has("rows"):
        mean, cov = exact().mean(x["x"], dps=dps), exact().covariance(x["x"], **options, dps=dps)
        return {"mean": mean, "cov": cov}
    if record.has("pairs"):
        return {"out": exact().kernel_estimate(**x, **options, dps=dps)}
    of_heads = partial(exact().each_head, formula(case, dps), _ndims(case), visible=_visible(case))
    given, d_v = {name: x[name] for name in GRADIENTS if name in x}, x["v"].shape[-1]
    out = of_heads(**given)
    found = {"out": out[..., :d_v]} | ({"lse": out[..., d_v]} if "d_lse" in x else {})
    if "d_out" in x:
        cotangent = [x["d_out"], *(x[name][..., None] for name in x if name == "d_lse")]
        pulled = exact().gradients(of_heads, np.concatenate(cotangent, -1), dps=dps, **given)
        found |= {GRADIENTS[name]: value for name, value in pulled.items()}
    return found


def _with_lse(
    q: _Array, k: _Array, v: _Array, *, scale: float | None, visible: _Array, dps: int
) -> _Array:
    """Exact attention with its log normaliser as one more column: reference 003."""
    square = exact().root(scale, q.shape[-1], dps=dps) ** 2
    return np.column_stack(exact().attend(q, k, v, 0.0, visible, square, dps=dps))
