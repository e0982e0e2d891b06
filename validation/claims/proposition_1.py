r"""Proposition 1 of reference 000: the positive estimate of the softmax kernel is unbiased.

With one frequency the logarithm of the estimate of :math:`\kappa(x, y)`, plus
:math:`(|x|^2 + |y|^2) / 2` and over :math:`|x + y|`, is N(0, 1): an exact law, which is stronger
than the proposition and determines all moments. With more frequencies the estimate is the mean of
such estimates, whatever the frequencies are.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy import special

from refattn import kernels, sampling
from refattn.judge import stats
from validation import plotting, suite
from validation.claims import _normal

DRAWS = {"tiny": 200, "quick": 20_000, "full": 400_000}
FREQUENCIES = {"tiny": 2_000, "quick": 1_250_000, "full": 12_500_000}  # of the law, in parts
PARTS = 10
LENGTHS = {1: (0.5, 1.0, 2.0, 3.0), 4: (0.5, 1.0), 64: (0.5, 1.0, 2.0)}  # |x + y|, by m
D = 8
EPS = float(np.finfo(float).eps)
IDENTITIES = {
    "error": "identity for every frequency",
    "mean_error": "mean of single estimates",
}
UNIT = "eps (1 + exponents)"


def pair(length: float) -> tuple[Any, Any]:
    """Vectors with a sum of that length in no special direction, and a difference of length 1."""
    x, y = np.random.default_rng(1).standard_normal((2, D))
    total, apart = (x + y) / np.linalg.norm(x + y), (x - y) / np.linalg.norm(x - y)
    return (length * total + apart) / 2, (length * total - apart) / 2


def tasks(level: str) -> suite.Tasks:
    """Parts of the law, and one task for each number of frequencies and length."""
    estimates = [
        {"length": length, "count": count, "draws": DRAWS[level] // (1 if count == 1 else 10)}
        for count, lengths in LENGTHS.items()
        for length in lengths
    ]
    law = {"length": 0.0, "count": 1, "draws": FREQUENCIES[level] // PARTS}
    return [*estimates, *[law] * PARTS]


def run(rng: np.random.Generator, length: float, count: int, draws: int) -> dict[str, Any]:
    """Counts of frequencies; or estimates over the kernel, and the errors of identities."""
    omega = sampling.draw(draws * count, D, rng=rng).omega
    if length == 0:
        return {"length": length, "law": _normal.in_frames(omega)}
    return {"count": count, **estimates(omega, length, count)}


def estimates(omega: Any, length: float, count: int) -> dict[str, Any]:
    """Estimates over the kernel, of so many frequencies each, and the errors of identities."""
    x, y = pair(length)
    omega = omega.reshape(-1, count, D)
    ratio = kernels.estimate(x, y, omega) / kernels.softmax_kernel(x, y)
    single = kernels.estimate(x, y, omega[:, :, None])
    square = np.sum(omega * omega, -1)
    # log xi(x) + log xi(y) + log N(omega; 0, I) - log N(omega; x + y, I) = x . y for every omega
    log_density = (np.sum((omega - x - y) ** 2, -1) - square) / 2
    size = 1 + np.abs(omega) @ np.abs(x + y) + (x @ x + y @ y) / 2 + square + length**2
    error = np.abs(np.log(single) + log_density - x @ y) / size
    mean = np.abs(np.mean(single, 1) / kernels.softmax_kernel(x, y) / ratio - 1)
    return {
        "length": length,
        "ratio": ratio,
        "z": (np.log(single[:, 0]) + (x @ x + y @ y) / 2) / length,
        "error": float(error.max()) / EPS,
        "mean_error": float(np.max(mean / (size.max(1) + count))) / EPS,
    }


def judge(results: suite.Results) -> suite.Findings:
    """Exact tests of the law, and identities."""
    found = list[suite.Piece]()
    estimates = [r for r in results if r["length"]]
    found += _normal.laws([r["law"] for r in results if not r["length"]], max(LENGTHS[1]))
    means: list[dict[str, Any]] = []
    for r in estimates:
        name, n = f"|x + y| = {r['length']:g}, m = {r['count']}", len(r["ratio"])
        if r["count"] == 1:
            to = (0.1, "of a probability")
            found.append(suite.evidence(name, stats.ks, r["z"], special.ndtr, target=to))
        found += [
            suite.Compared(f"{name}, {what}", r[x], 4.0, UNIT) for x, what in IDENTITIES.items()
        ]
        mean, sd = float(np.mean(r["ratio"])), float(np.std(r["ratio"]))
        about = {"length": r["length"], "count": r["count"]}
        means.append({**about, "mean": mean, "error": sd / math.sqrt(n)})
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
