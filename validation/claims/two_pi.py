r"""The code of reference 001 has sin(2 pi omega.x), cos(2 pi omega.x) with omega ~ N(0, I).

Its formula for z_sin/cos has no 2 pi: the convention of a Fourier transform with 2 pi in the
exponent goes with frequencies of variance 1 / (4 pi^2).
"""

from __future__ import annotations

import math
from collections import defaultdict
from functools import partial
from typing import Any

import numpy as np

from refattn import features, linear_attention, sampling, softmax_attention
from validation import plotting, suite

from ._performer import mean_cosine

D, LENGTHS = 4, (0.1, 0.2, 0.4)  # |x - y|
DRAWS = {"tiny": 200, "quick": 100_000, "full": 1_000_000}
NODES = 100
TOKENS, DEVIATION = 32, 0.08  # so that both kernels vary: 2 pi |q - k| is about 1.4
SIZES = {"tiny": (16, 64), "quick": (16, 64, 256, 1024), "full": (16, 64, 256, 1024, 4096, 16384)}
REPEATS = {"tiny": 2, "quick": 60, "full": 100}
TO_SOFTMAX, TO_OTHER, CORRECTED = "printed, to attention", "printed, to its limit", "without 2 pi"


def tasks(level: str) -> suite.Tasks:
    """One task for each distance, and one for each number of frequencies of attention."""
    kernel = [{"length": length, "count": DRAWS[level]} for length in LENGTHS]
    return [*kernel, *({"size": size, "count": REPEATS[level]} for size in SIZES[level])]


def printed_features(x: Any, omega: Any) -> features.Features:
    """The map of the post's code, z_sin_cos."""
    waves = [lambda product, f=f: f(2 * np.pi * product) for f in (np.sin, np.cos)]
    return features.random_features(x, omega, waves, log_h=lambda x: np.sum(x * x, axis=-1) / 2)


def run(rng: np.random.Generator, count: int, length: float = 0.0, size: int = 0) -> dict[str, Any]:
    """Estimates of the kernel frequency by frequency, or errors of attention."""
    if size:
        return {"size": size, "errors": attention_errors(rng, count, size)}
    x, y = pair(length)
    omega = sampling.draw(count, D, rng=rng).omega[:, None, :]
    (f, log_f), (g, log_g) = (printed_features(u[None], omega) for u in (x, y))
    # without the factor exp((|x|^2 + |y|^2) / 2): within [-1, 1], but for rounding
    cosine = np.sum(f * g, axis=-1)[:, 0]
    scale = float(log_f.ravel()[0] + log_g.ravel()[0] - (x @ x + y @ y) / 2)
    return {"length": length, "cosine": np.clip(cosine, -1, 1), "scale": scale}


def pair(length: float) -> tuple[Any, Any]:
    """Vectors at that distance, not at the origin."""
    x, direction = np.random.default_rng(2).standard_normal((2, D))
    return x, x + length * direction / np.linalg.norm(direction)


def attention_errors(rng: np.random.Generator, count: int, size: int) -> dict[str, list[float]]:
    """Largest errors of `attention_hat` as printed, and without the factor."""
    q, k, v = np.random.default_rng(3).standard_normal((3, TOKENS, D))
    q, k = DEVIATION * q, DEVIATION * k  # in kernel coordinates
    exact = softmax_attention(q, k, v, scale=1.0)
    # the other kernel: log of it is 4 pi^2 q.k + (1/2 - 2 pi^2) |k|^2, plus what cancels
    bias = (0.5 - 2 * np.pi**2) * np.sum(k * k, axis=-1)
    other = softmax_attention(q, k, v, scale=4 * np.pi**2, bias=bias)
    found: dict[str, list[float]] = {TO_SOFTMAX: [], TO_OTHER: [], CORRECTED: []}
    for _ in range(count):
        omega = sampling.draw(size, D, rng=rng).omega
        printed = linear_attention(q, k, v, feature_map=partial(printed_features, omega=omega))
        waves = partial(features.trigonometric_features, omega=omega)
        right = linear_attention(q, k, v, feature_map=waves)
        pairs = ((printed, exact), (printed, other), (right, exact))
        for errors, (a, b) in zip(found.values(), pairs, strict=True):
            errors.append(float(np.max(np.abs(a - b))))
    return found


def quadrature(length: float) -> float:
    """E cos(2 pi z), z ~ N(0, length^2), by Gauss and Hermite."""
    z, weight = np.polynomial.hermite_e.hermegauss(NODES)
    return float(np.cos(2 * np.pi * length * z) @ weight / math.sqrt(2 * math.pi))


def judge(results: suite.Results) -> suite.Findings:
    """Bounded tests of both means, a quadrature, and sign tests of attention."""
    evidence: suite.Evidence = defaultdict(list)
    corrected = evidence["kernel with its law"]
    rows = []
    eps = float(np.finfo(float).eps)
    for r in (r for r in results if "cosine" in r):
        name, x = f"|x - y| = {r['length']:g}", r["cosine"]
        evidence["kernel"].append(mean_cosine(name, x, r["length"] ** 2))
        corrected.append(mean_cosine(name, x, 4 * math.pi**2 * r["length"] ** 2))
        mean = math.exp(-2 * math.pi**2 * r["length"] ** 2)
        error = abs(quadrature(r["length"]) - mean) / eps
        corrected.append(suite.Compared(f"{name}, quadrature", error, NODES, "eps"))
        corrected.append(suite.Compared(f"{name}, scale", abs(r["scale"]) / eps, 4.0 * D, "eps"))
        deviation = float(np.std(x)) / math.sqrt(len(x))
        rows.append({"length": r["length"], "mean": float(np.mean(x)), "error": deviation})
    attention = {r["size"]: r["errors"] for r in results if "errors" in r}
    last = max(attention)
    e = {name: np.array(values) for name, values in attention[last].items()}
    name = f"R = {last}"
    evidence["attention"].append(suite.more_often(name, e[TO_SOFTMAX] < e[TO_OTHER]))
    evidence["attention without it"].append(suite.more_often(name, e[CORRECTED] < e[TO_SOFTMAX]))
    row = rows[-1]
    middle = {key: float(np.median(values)) for key, values in e.items()}
    remark = (
        f"At |x - y| = {row['length']:g} the code's features have the mean {row['mean']:.3f} "
        r"before scaling, where $e^{x \cdot y}$ calls for "
        f"{math.exp(-(row['length'] ** 2) / 2):.3f} and 2 pi for "
        f"{math.exp(-2 * math.pi**2 * row['length'] ** 2):.3f}. With R = {last} `attention_hat` is "
        f"{middle[TO_SOFTMAX]:.2g} from attention, {middle[TO_OTHER]:.2g} from that of the other "
        f"kernel; without the factor it is {middle[CORRECTED]:.2g} from it."
    )
    data = {
        "kernel": rows,
        "attention": [
            {"size": size, **{key: float(np.median(values)) for key, values in errors.items()}}
            for size, errors in attention.items()
        ],
    }
    return suite.Findings(evidence, data, remark)


def plot(data: dict[str, Any]) -> Any:
    """Means of the printed features beside both laws, and errors of attention."""
    figure, ((left, right),) = plotting.panels(1, 2, size=(8.4, 3.6))
    t = np.linspace(0, 0.6, 100)
    left.plot(t, np.exp(-t * t / 2), label="exp(-|x - y|^2 / 2), as stated")
    left.plot(t, np.exp(-2 * np.pi**2 * t * t), label="exp(-2 pi^2 |x - y|^2)")
    length, mean, error = plotting.columns(data["kernel"], "length", "mean", "error")
    style = {"fmt": "o", "capsize": 3, "color": plotting.COLOURS[2]}
    left.errorbar(length, mean, 5 * error, label="printed code, 5 standard errors", **style)
    left.set(xlabel="|x - y|", ylabel="kernel / exp((|x|^2 + |y|^2) / 2)")
    sizes = [r["size"] for r in data["attention"]]
    for key in (TO_SOFTMAX, TO_OTHER, CORRECTED):
        right.plot(sizes, [r[key] for r in data["attention"]], "o-", label=key)
    right.set(xscale="log", yscale="log", xlabel="frequencies R", ylabel="largest error, median")
    left.legend(fontsize=7)
    right.legend(fontsize=7)
    return figure


def plot_kernel(data: dict[str, Any]) -> Any:
    """Means of the code (marks) and both laws."""
    figure, axes = plotting.small()
    t = np.linspace(0, 0.6, 100)
    axes.plot(t, np.exp(-t * t / 2), label="as stated")
    axes.plot(t, np.exp(-2 * np.pi**2 * t * t), label="with 2 pi")
    means = plotting.columns(data["kernel"], "length", "mean")
    axes.plot(*means, "o", color=plotting.COLOURS[1], markersize=4)
    axes.set(xlabel="|x - y|", ylabel="kernel, scaled", ylim=(0, None))
    plotting.key(axes)
    return figure
