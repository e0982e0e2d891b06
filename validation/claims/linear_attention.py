r"""Attention linear in features, and the map elu + 1: reference 004.

As printed elu is mask x + (1 - mask) alpha (e^x - 1), which for large x is x + 0 inf, not a number;
and adding 1 to alpha (e^x - 1) loses e^x below eps, which matters for alpha = 1, where nothing else
is left, and not for the printed alpha = 0.1.
"""

from __future__ import annotations

from decimal import Decimal, localcontext
from typing import Any

import numpy as np

from refattn import features, linear_attention
from refattn.judge.conformance.truth.digits import formulas
from refattn.streaming import LinearState
from validation import plotting, suite

TOKENS, D = {"tiny": (12, 40), "quick": (40, 400), "full": (100, 3000)}, 8  # exact, dense
PRINTED_ALPHA, ALPHAS = 0.1, (0.1, 1.0)
LARGE = (88.0, 100.0, 709.0, 710.0, 1e4)
GRID = np.linspace(-60, 5, 131)


def tasks(level: str) -> suite.Tasks:
    """The identities at two sizes, and the map itself."""
    few, many = TOKENS[level]
    return [{"tokens": few, "digits": True}, {"tokens": many, "digits": False}, {"tokens": 0}]


def printed_elu_plus_one(x: Any, alpha: float) -> Any:
    """The map as reference 004 prints it."""
    mask = (x > 0).astype(x.dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        return mask * x + (1 - mask) * alpha * (np.exp(x) - 1) + 1


def elu_plus_one(x: float, alpha: float) -> float:
    """The map in exact arithmetic, by 50 digits."""
    with localcontext() as context:
        context.prec = 50
        number, a = Decimal(float(x)), Decimal(alpha)
        return float(number + 1 if x > 0 else a * number.exp() + (1 - a))


def run(rng: np.random.Generator, tokens: int, digits: bool = False) -> dict[str, Any]:
    """Errors of attention in units of eps, or what the map does."""
    if not tokens:
        return {"map": of_the_map()}
    q, k, v = rng.standard_normal((3, tokens, D))
    # Values are averaged with weights that sum to 1; errors are relative to the largest.
    unit = float(np.finfo(float).eps * np.max(np.abs(v)))
    recurrent = np.empty_like(v)
    state = LinearState.init(k[:0], v[:0])
    for i in range(tokens):
        state = state.update(k[i : i + 1], v[i : i + 1])
        recurrent[i] = state.read(q[i : i + 1])[0]
    errors = {}
    for causal, other in ((False, state.read(q)), (True, recurrent)):
        out = linear_attention(q, k, v, causal=causal)
        if digits:
            reference = formulas().linear_attention(q, k, v, causal=causal).astype(float)
        else:
            visible = np.tri(tokens) if causal else 1.0
            kernel = features.elu_features(q) @ features.elu_features(k).T * visible
            reference = (kernel @ v) / np.sum(kernel, axis=-1, keepdims=True)
        name = "causal" if causal else "all"
        errors[name] = float(np.max(np.abs(out - reference))) / unit
        errors[f"{name}, recurrent"] = float(np.max(np.abs(other - reference))) / unit
    return {"tokens": tokens, "digits": digits, "errors": errors}


def of_the_map() -> dict[str, Any]:
    """Values that are not finite, lost digits, and how much features vary."""
    eps = float(np.finfo(float).eps)
    large = {dtype: np.array(LARGE, dtype=dtype) for dtype in ("float32", "float64")}
    lost = {}
    for alpha in ALPHAS:
        truth = np.array([elu_plus_one(x, alpha) for x in GRID])
        for name, values in (
            ("printed", printed_elu_plus_one(GRID, alpha)),
            ("refattn", features.elu_features(GRID, alpha)),
        ):
            lost[f"{name}, alpha = {alpha:g}"] = (np.abs(values - truth) / truth).tolist()
    x = np.random.default_rng(4).standard_normal((500, D))
    maps = {f"{alpha:g}": features.elu_features(x, alpha) for alpha in ALPHAS}
    weights = {name: phi @ phi.T for name, phi in maps.items()}
    weights["softmax"] = np.exp(x @ x.T / np.sqrt(D))
    spread = {}
    for name, kernel in weights.items():
        share = kernel / np.mean(kernel, axis=-1, keepdims=True)
        least = float(np.min(maps.get(name, 0.0)))
        spread[name] = [least, float(np.std(share)), float(np.max(share))]
    printed = {d: ~np.isfinite(printed_elu_plus_one(x, PRINTED_ALPHA)) for d, x in large.items()}
    values_of = [features.elu_features(x, alpha) for x in large.values() for alpha in ALPHAS]
    return {
        "printed not finite": {dtype: float(np.sum(x)) for dtype, x in printed.items()},
        "not finite": sum(float(np.sum(~np.isfinite(values))) for values in values_of),
        "lost": lost,
        "worst": {name: max(values) / eps for name, values in lost.items()},
        "spread": spread,
    }


def judge(results: suite.Results) -> suite.Findings:
    """Identities by rounding, and counter-examples."""
    found = next(r["map"] for r in results if "map" in r)
    evidence: suite.Evidence = {"linear": [], "recurrent": []}
    rows = []
    for r in (r for r in results if "errors" in r):
        # Features are positive: products and sums of n terms, three roundings each at most.
        bound = 3.0 * (r["tokens"] + D)
        against = "exact" if r["digits"] else "dense"
        for name, error in r["errors"].items():
            row = suite.Compared(f"{name}, {r['tokens']} tokens, {against}", error, bound, "eps")
            evidence["recurrent" if "recurrent" in name else "linear"].append(row)
        rows.append({"tokens": r["tokens"], "against": against, **r["errors"]})
    spread, single = found["spread"], found["printed not finite"]["float32"]
    worst = found["worst"]
    count = float(len(LARGE))
    evidence["finite"] = [
        suite.Compared(f"values not finite, of {count:g} large x, {dtype}", number, 0.0)
        for dtype, number in found["printed not finite"].items()
    ]
    evidence["finite, rewritten"] = [suite.Compared("values not finite", found["not finite"], 0.0)]
    digits = {
        name: suite.Compared(f"relative error, x from -60, {name}", error, 8.0, "eps")
        for name, error in worst.items()
    }
    evidence["digits"] = [digits[f"printed, alpha = {PRINTED_ALPHA:g}"]]
    evidence["digits, alpha = 1"] = [digits["printed, alpha = 1"]]
    evidence["digits, rewritten"] = [digits[f"refattn, alpha = {alpha:g}"] for alpha in ALPHAS]
    remark = (
        "The rearrangement is exact, also for causal attention, which the post calls not trivial "
        f"to do fast. As printed elu is not a number at {single:g} of {count:g} large x in single "
        "precision (beyond 88.7). With the post's alpha = 0.1 features are at least "
        f"{spread['0.1'][0]:.2f}, and weights of normal queries and keys deviate from uniform by "
        f"{spread['0.1'][1]:.0%}, with alpha = 1 by {spread['1'][1]:.0%}, with softmax by "
        f"{spread['softmax'][1]:.0%}."
    )
    data = {"errors": rows, "x": GRID.tolist(), "lost": found["lost"], "spread": spread}
    return suite.Findings(evidence, data, remark)


def plot(data: dict[str, Any]) -> Any:
    """Digits that the composed map loses, and how much weights vary."""
    figure, ((left, right),) = plotting.panels(1, 2, size=(8.4, 3.4))
    for name, label in (
        ("printed, alpha = 1", "as composed, alpha = 1"),
        ("printed, alpha = 0.1", "as composed, alpha = 0.1"),
        ("refattn, alpha = 1", "as e^x, alpha = 1"),
    ):
        error = np.maximum(data["lost"][name], 1e-17)
        left.plot(data["x"], error, ".", markersize=3, label=label)
    left.set(yscale="log", xlabel="x", ylabel="relative error of elu(x) + 1")
    left.legend(loc="upper right")
    names = list(data["spread"])
    values = [data["spread"][name][1] for name in names]
    labels = [name if name == "softmax" else f"elu + 1,\nalpha = {name}" for name in names]
    right.bar(labels, values, color=plotting.COLOURS[: len(names)])
    right.set(ylabel="deviation of weights / their mean")
    return figure


def plot_finite(data: dict[str, Any]) -> Any:
    """elu + 1 in float32."""
    figure, axes = plotting.small()
    x = np.linspace(0, 120, 1201, dtype=np.float32)
    y = printed_elu_plus_one(x, PRINTED_ALPHA)
    lost = float(x[~np.isfinite(y)].min())
    axes.plot(x, features.elu_features(x, PRINTED_ALPHA), "--", label="rewritten")
    axes.plot(x, y, color=plotting.COLOURS[1], linewidth=2.5, label="as printed")
    axes.axvspan(lost, float(x[-1]), color=plotting.COLOURS[1], alpha=0.15, linewidth=0)
    axes.annotate("NaN", ((lost + x[-1]) / 2, 15), ha="center")
    axes.set(xlabel="x", ylabel="elu(x) + 1", xlim=(0, 120), ylim=(0, None))
    plotting.key(axes)
    return figure
