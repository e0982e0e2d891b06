"""Evaluate the formula of a case, with a given number of digits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from ... import registry
from ...arrays.library import Floats
from ..mistakes.text import Edit
from .cases import GRADIENTS, Case
from .drawing import Recipe

# Axes of one head.
NDIMS = {"q": 2, "k": 2, "v": 2, "visible": 2, "omega": 2, "centres": 2, "log_weight": 1}
NDIMS |= {"bias": 2, "sinks": 0, "dropout": 2, "indices": 2, "log_probability": 2}


class HeadArrays(NamedTuple):
    """The arrays of one head."""

    q: Floats
    k: Floats
    v: Floats
    visible: Floats
    omega: Floats | None = None
    log_weight: Any = 0.0
    centres: Floats | None = None
    bias: Any = 0.0
    sinks: Any = None
    dropout: Any = None
    indices: Any = None
    log_probability: Any = 0.0


def truth() -> Any:
    """Import arithmetic with any number of digits, which needs mpmath, when it is used."""
    return import_module("refattn.judge.conformance.truth.digits")


def value_of(case: Recipe | Case, option: str) -> str:
    """Return the value of an option in the case's convention, nothing if it is the package's."""
    convention = case.convention
    return convention.value if convention is not None and convention.option == option else ""


def visible(case: Recipe | Case) -> Floats:
    """Return the mask, the causal form and the window in one."""
    x, past = case.inputs, case.inputs.get("past_k", np.empty((0, 1))).shape[-2]
    n, m = x["q"].shape[-2], past + x["k"].shape[-2]
    mask = x.get("mask", np.array(True))
    seen = np.ones((n, m), bool) & (~mask if value_of(case, "mask") == "hidden" else mask)
    of_past = value_of(case, "past")
    if case.arguments.get("causal"):
        corner = {"top-left": 0, "behind": past}.get(value_of(case, "causal") or of_past, m - n)
        seen &= _ahead(n, m, corner) <= 0
    if "window" in case.arguments and registry.ESTIMATORS[case.estimator].takes("window"):
        convention = value_of(case, "window")
        ahead = _ahead(n, m, 0 if convention.endswith("top-left") else m - n)
        left, right = case.arguments["window"]
        if left is not None:
            seen &= ahead >= convention.startswith("exclusive") - left
        seen &= True if right is None else ahead <= right
    return np.asarray(seen)


def _ahead(n: int, m: int, corner: int) -> Floats:
    """Count how far key j is ahead of that of query i, i + corner."""
    return np.asarray(np.arange(m) - np.arange(n)[:, None] - corner)


def arranged(case: Recipe | Case, dps: int = 50, **replaced: Any) -> dict[str, Any]:
    """Arrange the arrays as formulas take them: one mask, slopes as a bias, and so on."""
    x = {**case.inputs, **replaced, "visible": visible(case)}
    for name in ("k", "v"):
        if f"past_{name}" in x:
            x[name] = np.concatenate([x[f"past_{name}"], x[name]], axis=-2)
        if value_of(case, "groups") == "interleaved":
            x[name] = x[name][np.arange(len(x["q"])) % len(x[name])]
    n, m = x["visible"].shape[-2:]
    if "slopes" in x:
        slopes = truth().numbers(x["slopes"], dps=dps)[..., None, None]
        x["bias"] = -slopes * abs(_ahead(n, m, m - n))
    if "keep" in x:
        kept, p = truth().numbers(x["keep"], dps=dps), case.arguments["dropout_p"]
        x["dropout"] = kept / (1 - p) if value_of(case, "dropout") == "1/(1-p)" else kept
    others = {"mask", "past_k", "past_v", "slopes", "keep", "d_out", "d_lse"}
    return {name: value for name, value in x.items() if name not in others}


def heads_of_case(case: Recipe | Case) -> list[HeadArrays]:
    """Return the arrays of each head: of H heads, h has slice h // (H / G) of G."""
    arrays = arranged(case)
    per_query = registry.ESTIMATORS[case.estimator].has("per-query")
    ndims = {**NDIMS, "omega": 3 if per_query else 2}
    batched = {name for name, x in arrays.items() if np.ndim(x) > ndims[name]}
    count = max((len(arrays[name]) for name in batched), default=1)
    return [
        HeadArrays(**{
            name: x[h // (count // len(x))] if name in batched else x for name, x in arrays.items()
        })
        for h in range(count)
    ]  # fmt: skip


def formula_of(case: Recipe | Case, dps: int = 50, *changes: Edit) -> Callable[..., Floats]:
    """Return the output; of exact attention its log normaliser as one more column."""
    record = registry.ESTIMATORS[case.estimator]
    # The same formula has the same name there.
    name = (record.naive.func if isinstance(record.naive, partial) else record.naive).__name__
    # What is seen is in the mask.
    others = {"weighting", "feature_map", "return_lse", "dropout_p"}
    others |= set() if has_chunks(case) else {"causal"}
    others |= {"window"} if record.takes("window") else set()
    known = {option: x for option, x in case.arguments.items() if option not in others}
    if record.has("exact"):
        return partial(_attend_exactly_by_case, case, dps, **known)
    function = partial(getattr(truth().formulas(dps, *changes), name), **known)
    # Weights of keys that are made for all queries know one row of what is hidden.
    coreset = "indices" in case.inputs and "log_probability" not in case.inputs
    rows = -1 if coreset or has_chunks(case) else slice(None)  # the last sees all others
    return lambda visible, **arrays: function(**arrays, mask=visible[rows])


def has_chunks(case: Recipe | Case) -> bool:
    """Return whether keys are in chunks: the size of the estimator is that of a chunk."""
    return registry.ESTIMATORS[case.estimator].size == "window"


def with_lse(case: Recipe | Case) -> bool:
    """Return whether the log normaliser is expected too."""
    return bool("d_lse" in case.inputs or case.arguments.get("return_lse"))


def solve(case: Recipe | Case, dps: int) -> dict[str, Floats]:
    """Evaluate a case with so many digits."""
    x, record = case.inputs, registry.ESTIMATORS[case.estimator]
    formulas = truth().formulas(dps)
    if record.has("rows"):
        mean, cov = formulas.mean_and_covariance(x["x"], **case.arguments)
        return {"mean": mean, "cov": cov}
    if record.has("pairs"):
        return {"out": formulas.kernel_estimate(**x, **case.arguments)}
    d_v, lse = x["v"].shape[-1], with_lse(case)
    out, cotangents = case_pullback(case, dps)
    lses = {"lse": out[..., d_v]} if lse else {}
    return {"out": out[..., :d_v]} | lses | cotangents


def case_pullback(
    case: Recipe | Case, dps: int, *, absolute: bool = False
) -> tuple[Floats, dict[str, Floats]]:
    """Return the output and its log normaliser in one, and cotangents, or their absolute terms."""
    x, features = case.inputs, case.arguments.get("features") if absolute else ""
    changes = [_BY_FEATURES] if features == "trigonometric" else []
    columns = x["v"].shape[-1] + with_lse(case)

    def outputs(**sloped: Any) -> Floats:
        formula = formula_of(case, dps, *changes)
        return np.asarray(formula(**arranged(case, dps, **sloped))[..., :columns])

    if "d_out" not in x:
        return outputs(), {}
    cotangent = [x["d_out"], *(x[name][..., None] for name in x if name == "d_lse")]
    sloped = {name: x[name] for name in GRADIENTS if name in x}
    out, found = truth().pull_back(
        outputs, np.concatenate(cotangent, -1), dps=dps, absolute=absolute, **sloped
    )
    return out, {GRADIENTS[name]: g for name, g in found.items()}


# Kernels are products of features in most programs: their terms are larger.
_BY_FEATURES = Edit(
    "random_feature_attention",
    "xp.cos(z_q - z_k)",
    "(xp.cos(z_q) * xp.cos(z_k) + xp.sin(z_q) * xp.sin(z_k))",
)
_BLOCK = 8  # queries that are computed at once
# Scores and bias are capped together.
_CAPPED_LAST = Edit(
    "softmax_attention",
    "    s = scale * products(q, k)\n",
    "    s, bias = scale * products(q, k) + bias, None\n",
)


def _attend_exactly_by_case(
    case: Recipe | Case, dps: int, *, visible: Floats, **arrays: Any
) -> Floats:
    """Attend exactly under the convention of the case: Zheng 2022."""
    e, mp, d = truth(), truth().context(dps), arrays["q"].shape[-1]
    changes = [e.WITH_LSE] if with_lse(case) else []
    changes += [_CAPPED_LAST] if value_of(case, "softcap") == "after-bias" else []
    if arrays["scale"] is None and (default := value_of(case, "default_scale")) in ("1", "1/d"):
        arrays["scale"] = mp.mpf(1) / (d if default == "1/d" else 1)
    attend = e.formulas(dps, *changes).softmax_attention
    if not {"bias", "dropout"} & arrays.keys():
        attend = partial(_attend_by_blocks, attend)
    columns = attend(**arrays, mask=visible)
    empty = ~visible.any(-1)
    if (rows := value_of(case, "empty_rows")) in ("mean", "nan"):
        mean = e.formulas(dps).mean_and_covariance(arrays["v"])[0]
        columns[empty] = mean if rows == "mean" else mp.nan
    if value_of(case, "lse_empty") == "inf":
        columns[empty, -1] = mp.inf
    if value_of(case, "lse") == "2":
        columns[..., -1] = columns[..., -1] / mp.log(2)
    return np.asarray(columns)


def _attend_by_blocks(
    attend: Callable[..., Floats], *, q: Floats, k: Floats, v: Floats, mask: Floats, **options: Any
) -> Floats:
    """Attend with a few queries after another, to the keys that one of them sees."""
    blocks = []
    for start in range(0, len(mask), _BLOCK):
        rows = slice(start, start + _BLOCK)
        seen = np.asarray(mask[rows].any(0))
        seen[0] |= not seen.any()  # a block that sees no key has one, which is hidden
        keys, values, few = k[..., seen, :], v[..., seen, :], mask[rows, seen]
        blocks.append(attend(q=q[..., rows, :], k=keys, v=values, mask=few, **options))
    return np.concatenate(blocks, axis=-2)
