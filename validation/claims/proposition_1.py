r"""Proposition 1 of reference 000: the positive estimate of the softmax kernel is unbiased.

With one frequency the logarithm of the estimate of :math:`\kappa(x, y)`, plus
:math:`(|x|^2 + |y|^2) / 2` and over :math:`|x + y|`, is N(0, 1): an exact law, which is stronger
than the proposition and determines all moments. With m frequencies Catoni's bound needs no more
than the variance of Proposition 2, however heavy the tails.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy import special

from refattn import kernels, sampling
from refattn.judge import stats
from validation import plotting, suite

DRAWS = {"tiny": 200, "quick": 20_000, "full": 400_000}
LENGTHS = {1: (0.5, 1.0, 2.0, 3.0), 4: (0.5, 1.0), 64: (0.5, 1.0, 2.0)}  # |x + y|, by m
D = 8


def pair(length: float) -> tuple[Any, Any]:
    """Vectors with a sum of that length in no special direction, and a difference of length 1."""
    x, y = np.random.default_rng(1).standard_normal((2, D))
    total, apart = (x + y) / np.linalg.norm(x + y), (x - y) / np.linalg.norm(x - y)
    return (length * total + apart) / 2, (length * total - apart) / 2


def tasks(level: str) -> suite.Tasks:
    """One task for each number of frequencies and length."""
    return [
        {"length": length, "count": count, "draws": DRAWS[level] // (1 if count == 1 else 10)}
        for count, lengths in LENGTHS.items()
        for length in lengths
    ]


def run(rng: np.random.Generator, length: float, count: int, draws: int) -> dict[str, Any]:
    """Estimates over the kernel, and the largest error of the identity at these frequencies."""
    x, y = pair(length)
    omega = sampling.draw(draws * count, D, rng=rng).omega.reshape(draws, count, D)
    ratio = kernels.estimate(x, y, omega) / kernels.softmax_kernel(x, y)
    one = omega[:, 0]
    half = (x @ x + y @ y) / 2
    # log xi(x) + log xi(y) + log N(omega; 0, I) - log N(omega; x + y, I) = x . y for every omega
    log_estimate = np.log(kernels.estimate(x, y, one[:, None]))
    log_density = -np.sum(one * one, -1) / 2 + np.sum((one - x - y) ** 2, -1) / 2
    exponents = np.abs(one) @ np.abs(x + y) + half + np.sum(one * one, -1) + length**2
    error = np.abs(log_estimate + log_density - x @ y) / (1 + exponents)
    z = (log_estimate + half) / length if count == 1 else None
    return {"length": length, "count": count, "ratio": ratio, "z": z, "error": float(error.max())}


def judge(results: suite.Results) -> suite.Findings:
    """Exact tests at one frequency, bounded ones at more, and the identity."""
    found: list[suite.Tested | suite.Compared] = []
    means: list[dict[str, Any]] = []
    for r in results:
        name, n = f"|x + y| = {r['length']:g}, m = {r['count']}", len(r["ratio"])
        if r["count"] == 1:
            z, to = r["z"], (0.1, "sd")
            found += [
                suite.evidence(f"{name}, distribution", stats.ks, z, special.ndtr, target=to),
                suite.evidence(f"{name}, mean", stats.normal_mean, z, target=to),
                suite.evidence(f"{name}, scale", stats.normal_scale, z, target=to),
            ]
        else:
            variance = math.expm1(r["length"] ** 2) / r["count"]
            found.append(
                suite.catoni(f"{name}, mean", r["ratio"], 1.0, variance, 0.35, "of the kernel")
            )
        mean, sd = float(np.mean(r["ratio"])), float(np.std(r["ratio"]))
        means.append(
            {"length": r["length"], "count": r["count"], "mean": mean, "error": sd / math.sqrt(n)}
        )
    error = max(r["error"] for r in results) / np.finfo(float).eps
    found.append(suite.Compared("identity for every frequency", error, 4.0, "eps (1 + exponents)"))
    worst = max(means, key=lambda m: abs(m["mean"] - 1) / m["error"])
    remark = (
        "The estimate is unbiased, as the text proves. Of all means that farthest from the kernel "
        f"is {worst['mean']:.4f} of it, with standard error {worst['error']:.4f}."
    )
    return suite.Findings({"unbiased": found}, {"means": means}, remark)


def plot(data: dict[str, Any]) -> Any:
    """Means of the estimates over the kernel, with their standard errors."""
    figure, ((axes,),) = plotting.panels()
    for count in LENGTHS:
        rows = [m for m in data["means"] if m["count"] == count]
        length, mean, error = plotting.columns(rows, "length", "mean", "error")
        at = length * 1.02 ** (count > 1)
        axes.errorbar(at, mean, error, fmt="o-", capsize=3, label=f"m = {count}")
    axes.axhline(1.0, color=plotting.INK, linewidth=0.8)
    axes.set(xlabel="|x + y|", ylabel="mean estimate / kernel")
    axes.legend()
    return figure
