r"""Reference 003, randomized attention (RA): an unbiased estimator for softmax attention.

Means alone show little of noise that is a little off, so that the law of the draws is tested too:
Rosenblatt's transform makes them normal, and keys that are far apart show how often each is chosen.
The variance has its bound since f_n is the mean of v_m given omega, if m is drawn from pi_n and
omega from its component.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import special
from scipy import stats as laws

import refattn
from refattn import estimators, sampling, theory
from refattn.judge import stats
from refattn.judge.conformance.checks.targets import _rosenblatt
from validation import plotting, suite

DRAWS = {"tiny": 300, "quick": 30_000, "full": 400_000}
COUNTS = (1, 4, 16)
SIZES = (2, 4, 16)
KEYS = 6
ROWS = 4000  # queries at once
# Standard deviations of the noise of frequencies that are given; 0.5 is d^(-1/4) for d = 16.
CONTROLS = {"unbiased": 1.0, "no noise": 0.0, "small noise": 0.5}
CONTROL_D = 16
SCORES, APART = np.linspace(-2.0, 2.0, KEYS), 8.0  # of keys on axes of their own, at that distance
CHOICES = 10  # as many more draws of these


def tasks(level: str) -> suite.Tasks:
    """One task for each length, and number of samples."""
    means = [{"d": 4, "count": count, "draws": DRAWS[level]} for count in COUNTS]
    law = [{"d": d, "count": 0, "draws": DRAWS[level]} for d in SIZES]
    controls = [
        {"d": CONTROL_D, "count": 1, "draws": DRAWS[level], "control": name} for name in CONTROLS
    ]
    return [*means, *law, *controls, {"d": KEYS + 1, "count": -1, "draws": CHOICES * DRAWS[level]}]


def problem(d: int) -> tuple[Any, Any, Any]:
    """Make a query, keys in two groups, and the weights of three keys as values."""
    rng = np.random.default_rng(5)
    q, k = rng.standard_normal((1, d)) / math.sqrt(d), rng.standard_normal((KEYS, d))
    k[:2] += q
    return q, k * 1.5 / math.sqrt(d), np.eye(KEYS)[:, :3]


def choices(rng: np.random.Generator, draws: int) -> list[tuple[int, float]]:
    """How many draws are nearer to a key than to the origin, on its axis, and the share due."""
    q, k = np.eye(1, KEYS + 1, KEYS), np.column_stack([APART * np.eye(KEYS), SCORES])
    omega = sampling.draw_target(q, k, num_samples=draws, rng=rng, scale=1.0)[0]
    pi, far = special.softmax(SCORES), special.ndtr(APART / 2)
    near = np.sum(omega[:, :KEYS] > APART / 2, axis=0)
    return list(zip(near.tolist(), (pi * far + (1 - pi) * (1 - far)).tolist(), strict=True))


def run(
    rng: np.random.Generator, d: int, count: int, draws: int, control: str = ""
) -> dict[str, Any]:
    """Independent outputs, as those of a query repeated, or the normal form of draws."""
    if count < 0:
        return {"count": count, "draws": draws, "near": choices(rng, draws)}
    q, k, v = problem(d)
    exact = refattn.softmax_attention(q, k, v, scale=1.0)[0]
    if control:
        key = rng.choice(KEYS, size=draws, p=special.softmax(k @ q[0]))
        omega = q + k[key] + CONTROLS[control] * rng.standard_normal((draws, d))
        rows = np.broadcast_to(q, (draws, d))
        out = estimators.randomized_attention(rows, k, v, omega=omega[:, None], scale=1.0)
        return {"d": d, "count": 1, "control": control, "out": np.clip(out, 0, 1), "exact": exact}
    if count == 0:
        omega = sampling.draw_target(q, k, num_samples=draws, rng=rng, scale=1.0)[0]
        return {"d": d, "count": 0, "z": _rosenblatt(omega, q + k, special.softmax(k @ q[0]))}
    options: dict[str, Any] = {"num_samples": count, "rng": rng, "scale": 1.0}
    parts = [np.broadcast_to(q, (min(ROWS, draws - i), d)) for i in range(0, draws, ROWS)]
    out = np.concatenate([estimators.randomized_attention(x, k, v, **options) for x in parts])
    bound = theory.randomized_attention_law(q, k, v, num_samples=count, scale=1.0).variance[0]
    return {"d": d, "count": count, "out": np.clip(out, 0, 1), "exact": exact, "bound": bound}


def below(test: Callable[[Any, float], float], name: str, x: Any, mean: float) -> suite.Shown:
    """The mean of x is below: for tests whose p-value falls as the sample mean moves away."""
    p = test(x, mean)
    return suite.Shown(name, p, 1.0) if np.mean(x) < mean else suite.Shown(name, 1.0, p)


def judge(results: suite.Results) -> suite.Findings:
    """Bounds on means and variances, and exact tests of the law."""
    evidence: suite.Evidence = defaultdict(list)
    biases = dict.fromkeys(CONTROLS, 0.0)
    rows, given = [], []
    for r in results:
        for key, (near, p) in enumerate(r.get("near", ())):
            test, n = suite.detects(stats.binomial, r["draws"], p=p), r["draws"]
            one = (f"choices of key {key}", stats.binomial(near, n, p), test, 0.015, "of all")
            evidence["law"].append(suite.Tested(*one))
        if r["count"] < 0:
            continue
        if r["count"] == 0:
            evidence["law"] += normal(f"d = {r['d']}", r["z"])
            continue
        control = r.get("control")
        for j, (x, mean) in enumerate(zip(r["out"].T, r["exact"].tolist(), strict=True)):
            name = f"frequencies given, value {j}" if control else f"S = {r['count']}, value {j}"
            bets = suite.Tested(f"{name}, bets", stats.betting(x, mean))
            if control:
                p = stats.empirical_bernstein(x, mean)
                given.append((control, [bets, suite.Tested(name, p)]))
                biases[control] = max(biases[control], abs(float(np.mean(x)) - mean))
                continue
            bound, square = float(r["bound"][j]), (x - mean) ** 2
            whole = suite.empirical_bernstein(name, x, mean, bound, 0.05, "of the values")
            evidence["unbiased"] += [bets, whole]
            evidence["variance"].append(below(stats.empirical_bernstein, name, square, bound))
            row = {"count": r["count"], "value": j, "exact": mean, "mean": float(np.mean(x))}
            rows.append(row | {"variance": float(np.mean(square)), "bound": bound, "n": len(x)})
    for control, two in given:
        evidence[control] += two
    ratios = [row["variance"] / row["bound"] for row in rows]
    off = max(
        abs(row["mean"] - row["exact"]) / math.sqrt(row["variance"] / row["n"]) for row in rows
    )
    remark = (
        "RA is unbiased, as the text says, and its frequencies have the law p_n: the largest of "
        f"{len(rows)} differences from softmax attention is {off:.2g} standard errors. Its "
        f"variance is {min(ratios):.2g} to {max(ratios):.2g} of that of attending to one key drawn "
        f"from the attention weights, per sample. Means are off by up to {biases['no noise']:.2g} "
        f"if the noise is dropped and by {biases['small noise']:.2g} if its standard deviation is "
        "1 where queries and keys are not multiplied by $d^{-1/4}$."
    )
    return suite.Findings(evidence, {"rows": rows}, remark)


def normal(name: str, z: Any) -> list[suite.Tested]:
    """All that is asked of rows that should be N(0, I)."""
    flat, length, law = z.ravel(), np.sum(z * z, -1), laws.chi2(z.shape[1])
    share, sd = (0.08, "probability"), (0.15, "sd")
    sums = (z[:-1:2] + z[1::2]).ravel() / math.sqrt(2)  # of two draws, which are independent
    return [
        suite.evidence(f"{name}, scale of sums of two", stats.normal_scale, sums, target=sd),
        suite.evidence(f"{name}, coordinates", stats.ks, flat, special.ndtr, target=share),
        suite.evidence(f"{name}, mean", stats.normal_mean, flat, target=sd),
        suite.evidence(f"{name}, scale", stats.normal_scale, flat, target=sd),
        suite.evidence(f"{name}, lengths", stats.ks, length, law.cdf, target=share),
    ]


def plot(data: dict[str, Any]) -> Any:
    """Errors of the means, and variances beside their bounds."""
    figure, ((left, right),) = plotting.panels(1, 2, size=(7.2, 3.4))
    for j in range(3):
        rows = [r for r in data["rows"] if r["value"] == j]
        at = [r["count"] * 1.06 ** (j - 1) for r in rows]
        colour = plotting.COLOURS[j]
        mean, exact, variance, n = plotting.columns(rows, "mean", "exact", "variance", "n")
        style = {"color": colour, "label": f"weight of key {j}"}
        left.errorbar(at, mean - exact, np.sqrt(variance / n), fmt="o", capsize=3, **style)
        right.loglog(at, [r["variance"] for r in rows], "o", color=colour)
        label = "bound" if j == 0 else None
        right.loglog(at, [r["bound"] for r in rows], "--", color=colour, label=label)
    left.axhline(0.0, color=plotting.INK, linewidth=0.8)
    left.set(xscale="log", xlabel="samples S", ylabel="mean of RA - softmax attention")
    right.set(xlabel="samples S", ylabel="variance of RA")
    for axes in (left, right):
        axes.set_xticks(COUNTS, [str(c) for c in COUNTS])
        axes.minorticks_off()
        axes.legend()
    return figure
