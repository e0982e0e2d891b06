r"""Kernels as products of features: reference 001, from the kernel trick to the softmax kernel.

The post writes K_gauss = exp(-gamma |x - y|^2) beside omega ~ N(0, I), which needs gamma = 1/2. The
maps of eqs. (8), (9) and (15) of reference 002 lack a factor 1 / sqrt(R), for its eq. (6).
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import numpy as np

import refattn
from refattn import features, kernels, sampling
from validation import plotting, suite

from ._performer import mean_cosine
from .cost import textbook_features

D, LENGTHS = 8, (0.5, 1.0, 2.0)  # |x - y|
GAMMA = 1.0  # other than 1/2
DRAWS = {"tiny": 200, "quick": 100_000, "full": 1_000_000}
PAIRS = {"tiny": 100, "quick": 10_000, "full": 100_000}
FEATURES = 8  # R
MEANS = {"1/2": (0.5, 1.0), "printed": (GAMMA, 1.0), "scaled": (GAMMA, math.sqrt(2 * GAMMA))}


def tasks(level: str) -> suite.Tasks:
    """The identities, and one task for each distance."""
    random = [{"length": length, "count": DRAWS[level]} for length in LENGTHS]
    return [{"count": PAIRS[level]}, *random]


def run(rng: np.random.Generator, count: int, length: float = 0.0) -> dict[str, Any]:
    """Products of Fourier features, frequency by frequency, or errors of the identities."""
    if not length:
        return identities(rng, count)
    x, y = np.random.default_rng(1).standard_normal((2, D))
    y = x + length * (y - x) / np.linalg.norm(y - x)
    omega = sampling.draw(count, D, rng=rng).omega[:, None, :]
    product = {
        name: np.sum(fourier(x[None], scale * omega) * fourier(y[None], scale * omega), axis=-1)
        for name, (_, scale) in MEANS.items()
    }
    return {"length": length, "cosine": {k: np.clip(c[:, 0], -1, 1) for k, c in product.items()}}


def fourier(x: Any, omega: Any) -> Any:
    """Random Fourier features [cos, sin] of unit scale."""
    return features.random_features(x, omega, (np.cos, np.sin)).values


def circles() -> tuple[Any, Any]:
    """Points of a circle within another."""
    angles = np.linspace(0, 2 * math.pi, 36, endpoint=False)
    points = np.stack([np.cos(angles), np.sin(angles)], -1)
    return points, 2 * points


def lifted(x: Any) -> Any:
    """Distance from a plane through 0, after the map: x_1^2 + x_2^2."""
    return features.polynomial_features(x, degree=2) @ [1.0, 0.0, 1.0]


def identities(rng: np.random.Generator, count: int) -> dict[str, Any]:
    """Largest errors of the two identities, in eps times what rounding may reach."""
    eps = float(np.finfo(float).eps)
    x, y = rng.standard_normal((2, count, 2))
    product = np.sum(
        features.polynomial_features(x, degree=2) * features.polynomial_features(y, degree=2),
        axis=-1,
    )
    size = np.sum(np.abs(x * y), axis=-1) ** 2
    by_hand = np.stack([x[:, 0] ** 2, x[:, 1] ** 2, math.sqrt(2) * x[:, 0] * x[:, 1]], axis=-1)
    order = features.polynomial_features(x, degree=2)[:, [0, 2, 1]]
    error = np.abs(product - kernels.polynomial_kernel(x, y, degree=2)) / size
    shape = np.abs(by_hand - order) / np.max(np.abs(by_hand), axis=-1, keepdims=True)
    inner, outer = circles()
    x, y = rng.standard_normal((2, count, D))
    squares = (np.sum(x * x, axis=-1) + np.sum(y * y, axis=-1)) / 2
    log = np.log(kernels.gaussian_kernel(x, y)) + squares
    softmax = np.abs(log - np.log(kernels.softmax_kernel(x, y))) / (1 + 4 * squares)
    q, k, v = rng.standard_normal((3, 2 * D, D)) / math.sqrt(D)
    omega = sampling.draw(FEATURES, D, rng=rng).omega
    by_formula = textbook_features(q, k, v, omega)
    attention = refattn.random_feature_attention(q, k, v, omega=omega, scale=1.0)
    length = np.max(np.sum(omega * omega, -1))
    off = np.abs(by_formula - attention) / (1 + length) / np.max(np.abs(v))
    return {
        "polynomial": float(np.max(error)) / eps,
        "map": float(np.max(shape)) / eps,
        "line": float(np.max(np.max(inner @ outer.T, 0) / np.max(outer @ outer.T, 0))),
        "plane": float(np.max(lifted(inner)) - np.min(lifted(outer))),
        "softmax": float(np.max(softmax)) / eps,
        "attention": float(np.max(off)) / eps,
    }


def judge(results: suite.Results) -> suite.Findings:
    """Identities by rounding, means by a bound."""
    found, unit = results[0], "eps (1 + exponents)"
    evidence: suite.Evidence = defaultdict(list)
    evidence |= {
        "polynomial": [
            suite.Compared(
                "product of features", found["polynomial"], 8.0, "eps of the absolute terms"
            ),
            suite.Compared("features by hand", found["map"], 4.0, "eps of the largest"),
        ],
        "circles": [
            suite.Compared("no line: extent of the inner over the outer", found["line"], 1.0),
            suite.Compared("plane: most of the inner less least of the outer", found["plane"], 0.0),
        ],
        "softmax": [
            suite.Compared("softmax from Gaussian kernel", found["softmax"], float(D), unit)
        ],
        "attention": [
            suite.Compared("attention by eqs. (9) and (10)", found["attention"], 8.0, unit)
        ],
    }
    rows = []
    for r in results[1:]:
        name, x, row = f"|x - y| = {r['length']:g}", r["cosine"]["1/2"], {"length": r["length"]}
        blocks = x[: len(x) // FEATURES * FEATURES].reshape(-1, FEATURES).mean(-1)  # z . z / R
        for of, factor in (("eq. (6)", 1 / FEATURES), ("eq. (6), scaled", 1.0)):
            label = f"{name}, R = {FEATURES}"
            row_of = mean_cosine(label, blocks, r["length"] ** 2, FEATURES, factor)
            evidence[of].append(row_of)
        for (kind, (gamma, scale)), of in zip(
            MEANS.items(), ("fourier", "any gamma", "any gamma, scaled"), strict=True
        ):
            x = r["cosine"][kind]
            evidence[of].append(mean_cosine(name, x, 2 * gamma * r["length"] ** 2))
            row[kind] = float(np.mean(x))
            row[f"{kind}, error"] = float(np.std(x)) / math.sqrt(len(x))
            row[f"{kind}, scale"] = scale
        rows.append(row)
    remark = (
        f"Both identities hold to rounding ({found['polynomial']:.1f} and {found['softmax']:.1f} "
        f"units). Fourier features with omega ~ N(0, I) give {rows[1]['printed']:.3f} at |x - y| = "
        f"{rows[1]['length']:g}, which is $e^{{-|x - y|^2/2}}$ = "
        f"{math.exp(-(rows[1]['length'] ** 2) / 2):.3f}, whatever gamma: the law named beside "
        "gamma needs gamma = 1/2, as the appendix has. Eq. (6) of Ye 2023 estimates R times "
        "the kernel with the maps as printed; attention does not see it."
    )
    return suite.Findings(evidence, {"means": rows}, remark)


def plot(data: dict[str, Any]) -> Any:
    """Means of products of Fourier features beside Gaussian kernels."""
    figure, ((axes,),) = plotting.panels()
    t = np.linspace(0, 2.5, 100)
    for i, (gamma, name, law) in enumerate(
        ((0.5, "1/2", "N(0, I)"), (GAMMA, "scaled", "N(0, 2 gamma I)"))
    ):
        colour = plotting.COLOURS[i]
        axes.plot(t, np.exp(-gamma * t * t), color=colour, label=f"kernel, gamma = {gamma:g}")
        length, mean, error = plotting.columns(data["means"], "length", name, f"{name}, error")
        label = f"features, omega ~ {law}"
        axes.errorbar(length, mean, 5 * error, fmt="o", capsize=3, color=colour, label=label)
    axes.set(xlabel="|x - y|", ylabel="mean product of features (5 standard errors)")
    axes.legend()
    return figure
