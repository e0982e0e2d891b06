r"""The first figure of reference 001: orthogonal against iid frequencies.

L = 1024, d = 16, trigonometric features, mean squared error of attention against the number R of
frequencies, 15 draws. The text gives every frequency the law N(0, I). In the published code
orthogonal ones have the length sqrt(d / R), so that with the spurious factor 2 pi the estimate
tends to attention with the kernel

.. math:: \exp\left((1 - s) (|x|^2 + |y|^2) / 2 + s \, x \cdot y\right), \qquad s = 4 \pi^2 / R,

whose features no longer vary as R grows, and iid ones have a length near sqrt(d).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from refattn import random_feature_attention, sampling, softmax_attention, theory
from refattn.typing import Coupling
from validation import plotting, suite

from ._performer import MEAN, curve, kernel_errors, published_frequencies, published_inputs, small

L, D, SHOWN = 1024, 16, 15
LARGEST = 192  # frequencies at the right end of the figure
SIZES = {"tiny": (16,), "quick": (16, 48, 96), "full": (*range(16, LARGEST, 16), 1024)}
DRAWS = {"tiny": (1, 1), "quick": (60, 60), "full": (160, 160)}  # of all variants, of the pairs
CLOSE, DISTANCES = 0.6, np.linspace(0.1, 5, 50)  # |x - y|
KERNEL_DRAWS = {"tiny": 20, "quick": 400, "full": 4000}
PAIR = ("iid, 2 pi", "orthogonal, 2 pi")
VARIANTS = ("published", "iid of the published length", "iid", "orthogonal")
OFTEN = 0.9


def tasks(level: str) -> suite.Tasks:
    """The figure, more draws at its right end, of pairs too, and the kernel itself."""
    every, pair = (n // 4 or 1 for n in DRAWS[level])
    shown = min(SHOWN, DRAWS[level][0])
    found: list[Mapping[str, Any]] = [
        {"size": size, "draws": shown, "variants": PAIR + VARIANTS} for size in SIZES[level]
    ]
    found += 4 * [{"size": LARGEST, "draws": every, "variants": PAIR + VARIANTS}]
    found += 4 * [{"size": LARGEST, "draws": pair, "variants": (*PAIR, "iid", "orthogonal")}]
    return [*found, {"size": D, "draws": KERNEL_DRAWS[level], "variants": ()}]


def frequencies(variant: str, size: int, rng: np.random.Generator) -> Any:
    """Frequencies of one variant, times 2 pi where its features have that factor."""
    if variant == "published":
        return 2 * np.pi * published_frequencies(size, D, rng)
    coupling: Coupling = "orthogonal" if variant.startswith("orthogonal") else "iid"
    omega = sampling.draw(size, D, coupling=coupling, rng=rng).omega
    if "published" in variant:
        omega = omega / math.sqrt(size)
    return omega if variant in VARIANTS[2:] else 2 * np.pi * omega


def run(rng: np.random.Generator, size: int, draws: int, variants: Sequence[str]) -> dict[str, Any]:
    """Errors of each variant, or without any the errors of the kernel of a close pair."""
    if not variants:
        x = CLOSE / 2 * np.eye(1, D)
        kinds: tuple[Coupling, ...] = ("iid", "orthogonal")
        of = {c: kernel_errors(rng, draws, D, x, -x, c, "trigonometric")[:, 0] for c in kinds}
        return {"size": size, "kernel": of}
    errors: dict[str, list[float]] = {name: [] for name in (*variants, MEAN)}
    for _ in range(draws):
        q, k, v = published_inputs(rng, L, D, 1.0)
        exact = softmax_attention(q, k, v)
        errors[MEAN].append(float(np.mean((v.mean(0) - exact) ** 2)))
        for name in variants:
            omega = frequencies(name, size, rng)
            out = random_feature_attention(q, k, v, omega=omega, features="trigonometric")
            errors[name].append(float(np.mean((out - exact) ** 2)))
    return {"size": size, "errors": errors}


def judge(results: suite.Results) -> suite.Findings:
    """Sign tests over independent draws."""
    sizes = sorted({r["size"] for r in results if "errors" in r})
    errors: dict[int, dict[str, Any]] = {size: {} for size in sizes}
    for r in (r for r in results if "errors" in r):
        for name, values in r["errors"].items():  # draws of all variants come before others
            errors[r["size"]][name] = np.append(errors[r["size"]].get(name, []), values)
    last = errors[LARGEST]
    n = len(last["published"])
    iid, orthogonal = (last[name] for name in PAIR)
    kernel = next(r["kernel"] for r in results if "kernel" in r)
    at = f"R = {LARGEST}"
    gains = {"2 pi": orthogonal < iid, "no 2 pi": last["orthogonal"] < last["iid"]}
    evidence: suite.Evidence = {
        "figure": [suite.more_often(f"published code, {at}", last["published"] < iid[:n])],
        "small gain": [
            suite.more_often(f"{label}, {at}, does not win nine of ten", ~wins, 1 - OFTEN)
            for label, wins in gains.items()
        ],
        "length": [suite.more_often(f"iid, {at}", last[VARIANTS[1]] < iid[:n])],
        "quite good": [
            suite.more_often(f"{label}, {at}", last[name] < last[MEAN][: len(last[name])])
            for label, name in (("2 pi", PAIR[1]), ("no 2 pi", "orthogonal"))
        ],
        "kernel": [suite.more_often(f"|x - y| = {CLOSE}", kernel["orthogonal"] < kernel["iid"])],
    }
    ratios = law_ratio(DISTANCES)
    middle = {name: float(np.median(values)) for name, values in last.items()}
    gain = float(law_ratio(np.array([math.sqrt(D / 2)]))[0])
    remark = (
        f"The figure comes back from the published code at {at}: median squared error "
        f"{middle['published']:.2g} against {middle[PAIR[0]]:.2g} for iid frequencies; but there "
        r"orthogonal ones are shorter by $\sqrt{R}$, and iid ones of that length have "
        f"{middle[VARIANTS[1]]:.2g}. With the law N(0, I), as in the text, orthogonal frequencies "
        f"win {np.mean(gains['2 pi']):.0%} of the draws with the factor 2 pi and "
        f"{np.mean(gains['no 2 pi']):.0%} without it, where their median error is "
        f"{middle['orthogonal']:.2g} (iid {middle['iid']:.2g}), above the {middle[MEAN]:.2g} of "
        "the mean of the values. At the distance of a typical pair here, $|x - y|^2 = d/2$, "
        f"orthogonality leaves {gain:.3f} of the variance."
    )
    shown = {
        str(size): {
            name: [float(np.mean(v[:SHOWN])), float(np.std(v[:SHOWN])), float(np.median(v))]
            for name, v in by.items()
        }
        for size, by in errors.items()
    }
    measured = float(np.mean(kernel["orthogonal"]) / np.mean(kernel["iid"]))
    lines = {"distances": DISTANCES.tolist(), "ratios": ratios.tolist(), "measured": measured}
    return suite.Findings(evidence, {"sizes": sizes, "errors": shown, **lines}, remark)


def law_ratio(distances: Any) -> Any:
    """Variance with D orthogonal frequencies over that with D iid ones."""
    x = np.zeros((len(distances), D))
    x[:, 0] = distances / 2
    options: dict[str, Any] = {"features": "trigonometric", "num_features": D}
    orthogonal, iid = (
        theory.log_kernel_variance(x, -x, coupling=coupling, **options)
        for coupling in ("orthogonal", "iid")
    )
    return np.exp(orthogonal - iid)


def plot(data: dict[str, Any]) -> Any:
    """The figure of the post, the same with the stated law, and the law of the kernel."""
    figure, ((left, middle, right),) = plotting.panels(1, 3, size=(10.4, 3.6))
    sizes = data["sizes"]
    for axes, title, names in (
        (left, "2 pi, as in the code", ("iid, 2 pi", "orthogonal, 2 pi", *VARIANTS[:2])),
        (middle, "without 2 pi", VARIANTS[2:]),
    ):
        for name in (*names, MEAN):
            curve(axes, name, sizes, np.array([data["errors"][str(n)][name] for n in sizes]).T)
        axes.set(yscale="log", xlabel="frequencies R", title=f"attention, {title}")
        axes.legend(fontsize=7)
        if max(sizes) > 2 * LARGEST:
            axes.set_xscale("log")
    left.set_ylabel(f"mean squared error, {SHOWN} draws")
    right.plot(data["distances"], data["ratios"], label="law, d = R = 16")
    right.plot([CLOSE], [data["measured"]], "o", label="measured")
    right.axvline(math.sqrt(D / 2), linestyle=":", color=plotting.INK, label="typical pair")
    right.axhline(1, color=plotting.INK, linewidth=0.8)
    right.set(xlabel="|x - y|", ylabel="variance, orthogonal / iid", title="kernel", ylim=(0, 1.1))
    right.legend(fontsize=7)
    return figure


def plot_figure(data: dict[str, Any]) -> Any:
    """Attention, with the factor 2 pi of the code."""
    names = {"published": "code", "orthogonal, 2 pi": "text", MEAN: "mean"}
    sizes = [size for size in data["sizes"] if size <= LARGEST]
    of_name = {label: [data["errors"][str(n)][x][0] for n in sizes] for x, label in names.items()}
    return small(sizes, of_name)
