r"""The second figure of reference 001: positive against trigonometric features.

L = 1024, d = 16, orthogonal frequencies; the published code draws queries, keys and values of
standard deviation 1.5. The variance of the estimate of the kernel is 0 at x = -y for positive
features and at x = y for trigonometric ones.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from refattn import kernels, random_feature_attention, sampling, softmax_attention, theory
from refattn.typing import Features
from validation import plotting, suite

from ._performer import MEAN, curve, kernel_errors, published_frequencies, published_inputs, small

L, D = 1024, 16
LARGEST = 192  # frequencies at the right end of the figure
TEMPERATURES = (0.35, 1.0, 1.5)  # standard deviations of the inputs; the figure has 1.5
SHORT = TEMPERATURES[0]
SIZES = {"tiny": (16, LARGEST), "quick": (16, 96, LARGEST), "full": (*range(16, 200, 16), 1024)}
DRAWS = {"tiny": 1, "quick": 40, "full": 60}
FIGURE_DRAWS = 15  # of what is only drawn
COSINES, LENGTH = np.linspace(-1, 1, 41), 0.7  # pairs x, y of that length
KERNEL_DRAWS = {"tiny": 20, "quick": 800, "full": 2000}
SIGN_LENGTH = 2.0  # of opposite vectors, whose kernel is near 0
NEAR = 0.9  # |cosine| of the pairs that are drawn
OWN: tuple[Features, ...] = ("trigonometric", "positive")
VARIANTS = (*OWN, "published trigonometric", "published positive")
BLIND = "published positive, to the blind mean"


def tasks(level: str) -> suite.Tasks:
    """Each number of frequencies and temperature, and the kernel itself."""
    draws = {n: DRAWS[level] if n <= LARGEST else FIGURE_DRAWS for n in {*SIZES[level], LARGEST}}
    found = [
        {"size": size, "temperature": temperature, "draws": draws[size]}
        for temperature in TEMPERATURES
        for size in sorted(draws)
    ]
    return [*found, {"size": D, "temperature": 0.0, "draws": KERNEL_DRAWS[level]}]


def run(rng: np.random.Generator, size: int, temperature: float, draws: int) -> dict[str, Any]:
    """Errors of each variant, or at temperature 0 the errors of the kernel of two pairs."""
    if not temperature:
        x, y = pairs(np.array([-NEAR, NEAR]))
        apart = SIGN_LENGTH / LENGTH * x[:1]
        of: dict[str, Any] = {}
        for kind in OWN:
            of[kind] = kernel_errors(rng, draws, D, x, y, "orthogonal", kind)
            omega = sampling.draw(draws * D, D, coupling="orthogonal", rng=rng).omega
            estimates = kernels.estimate(apart, -apart, omega.reshape(draws, D, D), features=kind)
            of[f"lowest {kind}"] = float(np.min(estimates))
        return {"kernel": of}
    errors: dict[str, list[float]] = {name: [] for name in (*VARIANTS, MEAN, BLIND)}
    for _ in range(draws):
        q, k, v = published_inputs(rng, L, D, temperature)
        exact = softmax_attention(q, k, v)
        # what positive features of frequencies 0 give, whatever the query
        blind = random_feature_attention(q, k, v, omega=np.zeros((1, D)))
        errors[MEAN].append(float(np.mean((v.mean(0) - exact) ** 2)))
        for name in VARIANTS:
            if name.startswith("published"):
                omega = published_frequencies(size, D, rng)
                omega = omega if name.endswith("positive") else 2 * np.pi * omega
            else:
                omega = sampling.draw(size, D, coupling="orthogonal", rng=rng).omega
            kind = OWN[name.endswith("positive")]
            out = random_feature_attention(q, k, v, omega=omega, features=kind)
            errors[name].append(float(np.mean((out - exact) ** 2)))
        errors[BLIND].append(float(np.mean((out - blind) ** 2)))
    return {"size": size, "temperature": temperature, "errors": errors}


def pairs(cosines: Any) -> tuple[Any, Any]:
    """Vectors of length LENGTH with those cosines between them."""
    x, y = np.zeros((2, len(cosines), D))
    x[:, 0] = LENGTH
    y[:, 0], y[:, 1] = LENGTH * cosines, LENGTH * np.sqrt(1 - cosines**2)
    return x, y


def judge(results: suite.Results) -> suite.Findings:
    """Sign tests over independent draws."""
    attention = [r for r in results if "errors" in r]
    kernel = next(r["kernel"] for r in results if "kernel" in r)
    evidence: suite.Evidence = defaultdict(list)
    for r in attention:
        name = f"R = {r['size']}, deviation {r['temperature']:g}"
        e = {key: np.array(values) for key, values in r["errors"].items()}
        last = r["size"] == LARGEST
        if r["temperature"] == SHORT:
            if last:
                evidence["short"] += [
                    suite.more_often(f"{name}, order", e["trigonometric"] < e["positive"]),
                    suite.more_often(f"{name}, against the mean", e["positive"] < e[MEAN]),
                ]
            continue
        if r["size"] <= LARGEST:
            evidence["order"].append(suite.more_often(name, e["positive"] < e["trigonometric"]))
        if last:
            evidence["strong"].append(suite.more_often(name, e["positive"] < e[MEAN]))
            evidence["blind"].append(suite.more_often(name, e[BLIND] < e["published positive"]))
    trigonometric, positive = (kernel[name].T for name in OWN)
    evidence["kernel"] = [
        suite.more_often(f"positive, cosine {-NEAR}", positive[0] < trigonometric[0]),
        suite.more_often(f"trigonometric, cosine {NEAR}", trigonometric[1] < positive[1]),
    ]
    evidence["negative"] = [
        suite.Compared("lowest estimate, trigonometric", kernel["lowest trigonometric"], -1e-6),
        suite.Compared("-lowest estimate, positive", -kernel["lowest positive"], 0.0),
    ]
    at_largest = {r["temperature"]: r["errors"] for r in attention if r["size"] == LARGEST}
    short, middle = (
        {name: float(np.median(values)) for name, values in at_largest[temperature].items()}
        for temperature in (SHORT, TEMPERATURES[-1])
    )
    remark = (
        f"As the figure shows, positive features err less: at R = {LARGEST} and deviation 1.5 the "
        f"median squared error is {middle['positive']:.2g} against {middle['trigonometric']:.2g}. "
        f"It is no strong estimation: the mean of the values has {middle[MEAN]:.2g}. The "
        f"{middle['published positive']:.2g} of the published code comes from frequencies that "
        f"shrink as R grows: its estimate is only {middle[BLIND]:.2g} from a mean that ignores the "
        f"query. For short vectors, of deviation {SHORT:g}, both maps beat the mean of the values, "
        f"and the order is the other one: {short['positive']:.2g} against "
        f"{short['trigonometric']:.2g}."
    )
    x, y = pairs(COSINES)
    law, block = {}, {"coupling": "orthogonal", "num_features": D}
    for name in OWN:
        options: dict[str, Any] = {"features": name, **block}
        log_variance = theory.log_kernel_variance(x, y, **options)
        law[name] = np.exp(np.maximum(log_variance / 2 - np.sum(x * y, -1), -20)).tolist()
    measured = {name: np.sqrt(kernel[name].mean(0)).tolist() for name in OWN}
    errors: list[dict[str, Any]] = []
    for r in attention:
        of_each = {key: [float(np.mean(e)), float(np.std(e))] for key, e in r["errors"].items()}
        errors.append({"size": r["size"], "temperature": r["temperature"], **of_each})
    data = {"errors": errors, "cosines": COSINES.tolist(), "law": law, "measured": measured}
    return suite.Findings(evidence, data, remark)


def plot(data: dict[str, Any]) -> Any:
    """The figure of the post with the stated law and with the code, and the law of the kernel."""
    figure, (axes_row,) = plotting.panels(1, len(TEMPERATURES) + 1, size=(13.2, 3.6))
    left, right = axes_row[0], axes_row[-1]
    for axes, temperature in zip(axes_row, TEMPERATURES, strict=False):
        rows = [r for r in data["errors"] if r["temperature"] == temperature]
        sizes = [r["size"] for r in rows]
        for name in (*VARIANTS, MEAN):
            dashes = ":" if "published" in name else "-"
            curve(axes, name, sizes, np.array([r[name] for r in rows]).T, dashes)
        title = f"attention, deviation {temperature:g}"
        axes.set(yscale="log", xlabel="frequencies R", title=title)
        if max(sizes) > 2 * LARGEST:
            axes.set_xscale("log")
    left.set_ylabel("mean squared error")
    left.legend(fontsize=7)
    for name, colour in zip(OWN, plotting.COLOURS, strict=False):
        right.plot(data["cosines"], data["law"][name], color=colour, label=f"law, {name}")
        right.plot([-NEAR, NEAR], data["measured"][name], "o", color=colour)
    right.set(
        yscale="log",
        ylim=(0.003, None),
        xlabel=f"cosine of x and y, |x| = |y| = {LENGTH:g}",
        ylabel="standard deviation / kernel",
        title=f"kernel, R = {D}; dots measured",
    )
    right.legend(fontsize=7)
    return figure


def plot_deviation(data: dict[str, Any]) -> Any:
    """Attention, inputs of deviation 1.5."""
    last = TEMPERATURES[-1]
    rows = [r for r in data["errors"] if r["temperature"] == last and r["size"] <= LARGEST]
    sizes = [r["size"] for r in rows]
    return small(sizes, {name: [r[name][0] for r in rows] for name in (*VARIANTS[:2], MEAN)})
