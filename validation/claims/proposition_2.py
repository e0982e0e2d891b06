r"""Proposition 2 of reference 000: the mean squared error of the positive estimate, and its limits.

.. math::
    m \, \mathrm{MSE} = \kappa^2 (e^{|x + y|^2} - 1) = e^E (1 - e^{-|x + y|^2}), \qquad
    E = |x|^2 + |y|^2 + 4 x \cdot y

If the kernel vanishes, the error does if and only if E tends to -infinity, for if E does not,
|x + y|^2 = E - 2 x . y grows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal, localcontext
from itertools import product
from typing import Any

import numpy as np
from scipy import special

from refattn import features, kernels, sampling, theory
from validation import plotting, suite
from validation.claims import _normal, proposition_1
from validation.claims.proposition_1 import EPS, IDENTITIES, UNIT, D, pair

DRAWS = {"tiny": 200, "quick": 20_000, "full": 400_000}
COUNTS = (1, 2, 16)  # frequencies m
SET = 16  # frequencies that should be independent
# Of one frequency the square of the estimate over the kernel is e^(2 s z - s^2), of two the product
# e^(s (z + z') - s^2): with |x + y| = s they are as one estimate with 2 s, and with s times root 2.
LAWS = {"": 3.0, "sums of two, ": 3 / math.sqrt(2), "sums of all, ": math.sqrt(2)}
FEW, MORE = 16, 256  # frequencies compared
KEYS = (6.0, 9.0, 18.0, 36.0)  # x = (1, 0), y = (-r, 0): the kernel is exp(-r)
SIDES = {  # directions in which the kernel vanishes, and whether the error does
    "|x| = |y|, cosine -0.55": (1.0, -0.55, True),
    "|x| = |y|, cosine -0.45": (1.0, -0.45, False),
    "y = -0.28 x": (0.28, -1.0, True),
    "y = -0.26 x": (0.26, -1.0, False),
    "y = -3.7 x": (3.7, -1.0, True),
    "y = -3.8 x": (3.8, -1.0, False),
}
PATHS = {"y = -0.8 x": (0.8, -1.0), "|x| = |y|, cosine -0.2": (1.0, -0.2)}  # of the figure
MEASURED = ((0.5, 1.0, 2.0, 3.0), (0.3, 0.5, 0.7, 0.9))  # |x| on them, |x + y| being at most 1.1


def towards(radius: Any, ratio: float, cosine: float) -> tuple[Any, Any]:
    """Vectors (n, 2) of lengths r and ratio r at an angle, one for each radius."""
    unit = np.array([cosine, math.sqrt(1 - cosine**2)])
    r = np.asarray(radius, float)[..., None]
    return r * np.array([1.0, 0.0]), ratio * r * unit


def log_features(x: Any, omega: Any) -> Any:
    """log xi(x, omega) of each frequency (n, d), however large."""
    values, log_scale = features.positive_features(x[None], omega[:, None])
    return (np.log(values[..., 0]) + log_scale)[..., 0]


def tasks(level: str) -> suite.Tasks:
    """The law at each number of frequencies and length; more frequencies; limits; the figure."""
    draws = DRAWS[level]
    law = [{"part": "law", "count": count, "draws": draws // 4} for count in COUNTS]
    paths = [{"part": "path", "path": path, "draws": draws} for path in PATHS]
    more = {"part": "more", "draws": max(draws // 50, 20)}
    sets = {"part": "sets", "draws": proposition_1.FREQUENCIES[level] // proposition_1.PARTS // SET}
    return [*law, *[sets] * proposition_1.PARTS, more, {"part": "moment", "draws": 1000}, *paths]


def run(rng: np.random.Generator, part: str, **task: Any) -> dict[str, Any]:
    """One part of the claim."""
    parts: dict[str, Any] = {
        "law": _law,
        "sets": _sets,
        "more": _more,
        "moment": _moment,
        "path": _path,
    }
    return {"part": part, **task, **parts[part](rng, **task)}


def _law(rng: np.random.Generator, count: int, draws: int) -> dict[str, Any]:
    """Errors of what tells estimates from frequencies."""
    found = proposition_1.estimates(sampling.draw(draws * count, D, rng=rng).omega, 1.0, count)
    return {x: found[x] for x in IDENTITIES}


def _sets(rng: np.random.Generator, draws: int) -> dict[str, Any]:
    """Counts of frequencies, of sums of any two of a set, and of sums of a set, all N(0, I)."""
    omega = sampling.draw(draws * SET, D, rng=rng).omega.reshape(draws, SET, D)
    order = rng.permuted(np.tile(np.arange(SET), (draws, 1)), axis=1)
    omega = np.take_along_axis(omega, order[..., None], axis=1)
    twos = (omega[:, ::2] + omega[:, 1::2]) / math.sqrt(2)
    sums = (omega, twos, np.sum(omega, axis=1) / math.sqrt(SET))
    return {"sums": dict(zip(LAWS, map(_normal.in_frames, sums), strict=True))}


def _more(rng: np.random.Generator, draws: int) -> dict[str, Any]:
    """How often more frequencies bring a smaller error."""
    x, y = pair(1.0)
    kernel = kernels.softmax_kernel(x, y)
    error = []
    for m in (FEW, MORE):
        omega = sampling.draw(draws * m, D, rng=rng).omega.reshape(draws, m, D)
        error.append(np.abs(kernels.estimate(x, y, omega) - kernel))
    return {"wins": error[1] < error[0]}


def _moment(rng: np.random.Generator, draws: int) -> dict[str, Any]:
    """Log second moments along the counter-example, by sampling with the weight that fits."""
    found = []
    for r in KEYS:
        x, y = np.array([1.0, 0.0]), np.array([-r, 0.0])
        omega = 2 * (x + y) + rng.standard_normal((draws, 2))
        log_ratio = (np.sum((omega - 2 * (x + y)) ** 2, -1) - np.sum(omega**2, -1)) / 2
        logs = 2 * (log_features(x, omega) + log_features(y, omega)) + log_ratio
        found.append(float(special.logsumexp(logs) - math.log(draws)))
    return {"logs": found}


def _path(rng: np.random.Generator, path: str, draws: int) -> dict[str, Any]:
    """Measured errors of one frequency along a direction of the figure."""
    rows = []
    radius = MEASURED[list(PATHS).index(path)]
    for x, y in zip(*towards(radius, *PATHS[path]), strict=True):
        omega = sampling.draw(draws, 2, rng=rng).omega[:, None]
        kernel = float(kernels.softmax_kernel(x, y))
        square = (kernels.estimate(x, y, omega) - kernel) ** 2
        error = float(np.std(square)) / math.sqrt(draws)
        rows.append({"kernel": kernel, "mse": float(np.mean(square)), "error": error})
    return {"rows": rows}


def judge(results: suite.Results) -> suite.Findings:
    """Exact laws of frequencies and of sums of them, and arithmetic for the limits."""
    *laws, more, moment = (r for r in results if r["part"] not in ("path", "sets"))
    growth, wins = _growth(moment["logs"]), more["wins"]
    sums = [r["sums"] for r in results if r["part"] == "sets"]
    sets = [e for x, s in LAWS.items() for e in _normal.laws([y[x] for y in sums], s, x)]
    evidence: suite.Evidence = {
        "error": [
            *sets,
            *(
                suite.Compared(f"m = {r['count']}, {IDENTITIES[x]}", r[x], 4, UNIT)
                for r in laws
                for x in IDENTITIES
            ),
            _closed_form(),
        ],
        "small kernel": [
            suite.Compared(f"growth of log MSE as the kernel falls, {way}", value, 0.0)
            for way, value in growth.items()
        ],
        "condition": list(_condition()),
        "consistent": [suite.more_often(f"error at m = {MORE} below that at m = {FEW}", wins)],
    }
    remark = (
        "The mean squared error is as printed, but does not vanish with the kernel: from y = "
        f"(-{KEYS[0]:g}, 0) to (-{KEYS[-1]:g}, 0), at x = (1, 0), the kernel falls from "
        f"{math.exp(-KEYS[0]):.1e} to {math.exp(-KEYS[-1]):.1e}, and the logarithm of the error "
        rf"rises by {growth['closed form']:.0f}. It vanishes where $|x|^2 + |y|^2 + 4 \, x \cdot y "
        rf"\to -\infty$. Consistency is in m: {MORE} frequencies beat {FEW} in {wins.sum()} of "
        f"{len(wins)} draws."
    )
    return suite.Findings(evidence, _figure(results), remark)


def _closed_form() -> suite.Compared:
    """The formula against `theory`, in logarithms that 50 digits give."""
    worst = 0.0
    for r, m in product(KEYS, COUNTS):
        log = float(theory.log_kernel_mse([1.0, 0.0], [-r, 0.0], num_features=m))
        worst = max(worst, abs(log + math.log(m) - _log_error(r)) / (1 + abs(log)) / EPS)
    return suite.Compared("closed form at 50 digits", worst, 16, "eps (1 + size)")


def _log_error(r: float) -> float:
    """log MSE at x = (1, 0), y = (-r, 0) and m = 1, by 50 digits."""
    with localcontext() as context:
        context.prec = 50
        square = Decimal(1 - r) ** 2
        return float((Decimal(-2 * r).exp() * (square.exp() - 1)).ln())


def _growth(moments: Sequence[float]) -> dict[str, float]:
    """Growth of log MSE from the first key to the last, in three ways."""
    ways = {
        "closed form": [float(theory.log_kernel_mse([1.0, 0.0], [-r, 0.0])) for r in KEYS],
        "50 digits": [_log_error(r) for r in KEYS],
        # E Z^2 - kappa^2 in logarithms, E Z^2 the same for every draw of the weighted sample
        "weighted sample": [
            log + math.log(-math.expm1(-2 * r - log)) for log, r in zip(moments, KEYS, strict=True)
        ],
    }
    return {way: logs[-1] - logs[0] for way, logs in ways.items()}


def _condition() -> Any:
    """Log errors by their exponent at many pairs, and monotone on both sides of the condition."""
    radius = np.linspace(2.0, 40.0, 39)
    for name, (ratio, cosine, vanishes) in SIDES.items():
        x, y = towards(radius, ratio, cosine)
        logs, kernel = theory.log_kernel_mse(x, y), np.sum(x * y, -1)
        exponent, square = theory.log_second_moment(x, y), np.sum((x + y) ** 2, -1)
        size = 1 + np.sum(x * x + y * y, -1)
        error = np.abs(logs - exponent - np.log(-np.expm1(-square))) / size / EPS
        yield suite.Compared(f"{name}, log error by its exponent", float(error.max()), 16, UNIT)
        # For vanishing errors the steps go down, for others up, while the kernel vanishes.
        for label, rows in (("kernel", kernel), ("error", logs)):
            steps = np.diff(rows) if label == "kernel" or vanishes else -np.diff(rows)
            way = "falls" if label == "kernel" or vanishes else "rises"
            yield suite.Compared(f"{name}, {label} {way} at every step", float(steps.max()), 0.0)


def _figure(results: suite.Results) -> dict[str, Any]:
    """Laws along two directions, measured errors, and the counter-example."""
    radius = np.linspace(0.05, 8.0, 80)
    lines = {}
    for path, direction in PATHS.items():
        x, y = towards(radius, *direction)
        log_mse = theory.log_kernel_mse(x, y)
        lines[path] = {"log_kernel": np.sum(x * y, -1).tolist(), "log_mse": log_mse.tolist()}
    points = {r["path"]: r["rows"] for r in results if r["part"] == "path"}
    return {"lines": lines, "points": points, "counter_example": [-KEYS[1], _log_error(KEYS[1])]}


def plot(data: dict[str, Any]) -> Any:
    """The error against the kernel along two directions: lines are the law."""
    figure, ((axes,),) = plotting.panels()
    for colour, (path, line) in zip(plotting.COLOURS, data["lines"].items(), strict=False):
        axes.plot(np.exp(line["log_kernel"]), np.exp(line["log_mse"]), color=colour, label=path)
        at = plotting.columns(data["points"][path], "kernel", "mse", "error")
        axes.errorbar(*at, fmt="o", color=colour, capsize=2, markersize=4)
    kernel, mse = np.exp(data["counter_example"])
    label = f"x = (1, 0), y = (-{KEYS[1]:g}, 0)"
    axes.plot(kernel, mse, "*", color=plotting.COLOURS[2], markersize=12, label=label)
    axes.set(xscale="log", yscale="log", xlabel="kernel exp(x . y)", ylabel="m MSE")
    axes.set(xlim=(1e-5, 2), ylim=(1e-9, 1e25))
    axes.legend()
    return figure


def plot_error(data: dict[str, Any]) -> Any:
    """Two directions; star: the pair named."""
    figure, axes = plotting.small()
    for path, line in data["lines"].items():
        axes.plot(np.exp(line["log_kernel"]), np.exp(line["log_mse"]), label=path)
    kernel, mse = np.exp(data["counter_example"])
    axes.plot(kernel, mse, "*", color=plotting.COLOURS[2], markersize=9)
    axes.set(xscale="log", yscale="log", xlabel="kernel", ylabel="m MSE")
    axes.set(xlim=(1e-5, 2), ylim=(1e-6, 1e25))
    plotting.key(axes)
    return figure
