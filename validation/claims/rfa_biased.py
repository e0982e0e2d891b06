r"""Reference 003, the biasedness of RFA: estimates of kernels are unbiased, their ratio is not.

The mean of the ratio follows from Laplace transforms for any number of features (see `_ratios`),
where queries, keys and values have length 1; to first order it is that of `theory.attention_law`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

import refattn
from refattn import estimators, kernels, theory
from refattn.judge import stats
from validation import plotting, suite
from validation.claims import _ratios

DRAWS = {"tiny": 300, "quick": 30_000, "full": 600_000}
COUNTS = (1, 4, 16, 64)
EXACT = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096, 16384, 65536)
PROBLEM = _ratios.Problem(0.5, np.array([-1.0, 0.0, 1.0]), np.array([0.0, 0.2, 1.0]))
D = 8
TARGET = 0.05  # of the largest value; biases shown are larger


def tasks(level: str) -> suite.Tasks:
    """One task for each length and number of features, one for the law and one for kernels."""
    return [
        {"kind": "law", "d": 1, "count": 0, "draws": 0},
        {"kind": "kernels", "d": D, "count": 1, "draws": DRAWS[level]},
        *(
            {"kind": "ratios", "d": d, "count": count, "draws": DRAWS[level]}
            for d in (1, D)
            for count in COUNTS
        ),
    ]


def problem(d: int) -> tuple[Any, Any, Any]:
    """Make a query, keys, and values in [0, 1]."""
    if d == 1:
        return np.full((1, 1), PROBLEM.q), PROBLEM.k[:, None], PROBLEM.v[:, None]
    rng = np.random.default_rng(3)
    q, k = 0.6 * rng.standard_normal((1, d)), 0.6 * rng.standard_normal((6, d))
    q, k = q * math.sqrt(2 / d), k * math.sqrt(1 / d)
    k[0] += q[0] / 2
    return q, k, np.eye(6)[:, :1]


def exact_means(counts: Sequence[int], step: float = 0.1) -> list[float]:
    """Means of RFA with so many features."""
    # Second moments of the weights have their mass near twice q + k, third near three times.
    omega = _ratios.points([0.0, 3 * (PROBLEM.q + PROBLEM.k.max())], step / 2)
    p = step / 2 * _ratios.density(omega, 0.0)
    group = _ratios.Group(p, np.exp(PROBLEM.log_weight(omega)), PROBLEM.value(omega))
    return [mean for mean, _ in _ratios.moments([group], counts, step)]


def run(rng: np.random.Generator, kind: str, d: int, count: int, draws: int) -> dict[str, Any]:
    """Outputs of RFA, kernel estimates, or the exact bias beside the law."""
    q, k, v = problem(d)
    exact = float(refattn.softmax_attention(q, k, v, scale=1.0)[0, 0])
    about = {"kind": kind, "d": d, "count": count, "exact": exact}
    if kind == "law":
        means = exact_means(EXACT)
        finer = exact_means(EXACT, 0.05)
        law = theory.attention_law(q, k, v, num_features=1, scale=1.0).bias[0, 0]
        bias = [mean - exact for mean in finer]
        gap = max(abs(a - b) for a, b in zip(means, finer, strict=True))
        return {**about, "bias": bias, "law": float(law), "gap": gap}
    if kind == "kernels":
        omega = rng.standard_normal((draws, 1, d))
        ratios = [kernels.estimate(q[0], key, omega) / np.exp(q[0] @ key) for key in k]
        lengths = [float(np.sum((q[0] + key) ** 2)) for key in k]
        return {**about, "ratios": ratios, "lengths": lengths}
    out = np.empty(draws)
    for i in range(0, draws, 10_000):
        omega = rng.standard_normal((min(10_000, draws - i), count, d))
        queries = np.broadcast_to(q, (len(omega), 1, d))
        some = estimators.random_feature_attention(queries, k, v, omega=omega, scale=1.0)
        out[i : i + 10_000] = some[:, 0, 0]
    return {**about, "out": np.clip(out, 0.0, 1.0)}  # a mean of values, to rounding


def judge(results: suite.Results) -> suite.Findings:
    """Bets against the mean, and the exact mean against the law."""
    evidence: suite.Evidence = defaultdict(list)
    means = []
    law, kernel, *ratios = results
    for i, (x, square) in enumerate(zip(kernel["ratios"], kernel["lengths"], strict=True)):
        of_one = (x, 1.0, math.expm1(square), 1.0, "of the kernel")
        evidence["kernels"].append(suite.catoni(f"kernel of key {i}", *of_one))
    for r in ratios:
        x, name, count = r["out"], f"d = {r['d']}, S = {r['count']}", r["count"]
        p = stats.betting(x, r["exact"])
        evidence["biased"].append(suite.Shown(name, p))
        evidence["expectation"].append(suite.Tested(name, p))
        bias, error = float(np.mean(x)) - r["exact"], float(np.std(x)) / math.sqrt(len(x))
        means.append({"d": r["d"], "count": count, "bias": bias, "error": error})
        if r["d"] == 1:
            of_one = (x, *exact_means([count]), 0.25, TARGET, "of the values")
            evidence["redraws"].append(suite.empirical_bernstein(f"mean, {name}", *of_one))
    counts, bias = np.array(EXACT), np.array(law["bias"])
    excess = np.abs(counts * bias / law["law"] - 1)
    slope = math.log(excess[-1] / excess[-3]) / math.log(counts[-1] / counts[-3])
    evidence["order"] += [
        suite.Compared("integrals of two steps", law["gap"], 1e-9),
        suite.Compared("S bias over the law at the largest S, less 1", float(excess[-1]), 1e-3),
        suite.Compared("exponent of S in that difference, from -1", abs(slope + 1), 0.05),
    ]
    remark = (
        "As the text says, kernels are unbiased and RFA is not: with one feature it is off by "
        f"{bias[0]:.2g} where the exact value is {law['exact']:.2g}. The bias vanishes as "
        f"{law['law']:.2g} / S, which the text does not say: at S = {counts[-1]} it is "
        f"{bias[-1]:.2g}."
    )
    exact = [float(b) for b in bias]
    data = {"counts": list(EXACT), "exact": exact, "law": law["law"], "means": means}
    return suite.Findings(evidence, data, remark)


def plot(data: dict[str, Any]) -> Any:
    """Size of the bias against the number of features."""
    figure, ((axes,),) = plotting.panels()
    counts = np.array(data["counts"])
    axes.loglog(counts, np.abs(data["exact"]), color=plotting.COLOURS[0], label="exact, d = 1")
    line = abs(data["law"]) / counts
    axes.loglog(counts[4:], line[4:], "--", color=plotting.INK, linewidth=0.9, label="law, 1/S")
    for i, d in enumerate((1, D)):
        rows = [m for m in data["means"] if m["d"] == d]
        count, bias, error = plotting.columns(rows, "count", "bias", "error")
        style = {"color": plotting.COLOURS[i], "label": f"simulated, d = {d}"}
        axes.errorbar(count, np.abs(bias), error, fmt="o", capsize=3, **style)
    axes.set(xlabel="number of features S", ylabel="|bias|, values in [0, 1]")
    axes.legend()
    return figure
