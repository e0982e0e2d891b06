r"""Squared norms replaced by constants, reference 002, eqs. (13) to (15).

In attention q', k' and |q|^2 cancel, and what is estimated is softmax_j(q . k_j + |k_j|^2 / 2), for
eq. (14) with a minus.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np

import refattn
from refattn import moments, sampling, theory
from refattn.kernels import FEATURES
from validation import plotting, suite
from validation.claims.moments import law

D, KEYS, NODES = 2, 12, 48
DRAWS = {"tiny": 320, "quick": 200_000, "full": 1_000_000}
PAIRS = 4  # of a query and a key
COUNTS = {"tiny": (8, 64), "quick": (10, 100, 1_000, 10_000), "full": (10, 100, 1_000, 10_000)}
CURVE = {"tiny": 2, "quick": 8, "full": 40}
EPS = float(np.finfo(float).eps)


def tokens() -> tuple[Any, Any, Any]:
    """Queries and keys whose norms differ, and values that tell every key apart."""
    rng = np.random.default_rng(3)
    q, k = rng.normal(0.3, 0.7, (2, KEYS, D))
    return q, k, np.eye(KEYS)


def quadrature() -> tuple[Any, Any]:
    """Frequencies and log weights for which averages are means over N(0, I), to rounding."""
    x, w = np.polynomial.hermite_e.hermegauss(NODES)
    omega = np.stack([a.ravel() for a in np.meshgrid(x, x)], axis=-1)
    log_weight = np.log(np.outer(w, w)).ravel()
    return omega, log_weight


def constants(q: Any, k: Any) -> dict[str, tuple[float, float]]:
    """The constants of eq. (13) and those of eqs. (14) and (15)."""
    of_q, of_k = moments.estimate(q), moments.estimate(k)
    return {
        "(13)": (float(moments.mean_plus_trace(of_q)), float(moments.mean_plus_trace(of_k))),
        "(15)": (float(moments.mean_only(of_q)), float(moments.mean_only(of_k))),
    }


def tasks(level: str) -> suite.Tasks:
    """Norms, means of kernel estimates, and attention."""
    return [
        {"kind": "norms", "count": DRAWS[level]},
        *({"kind": "kernel", "count": 50, "pair": i} for i in range(PAIRS)),
        {"kind": "attention", "count": 50},
        *({"kind": "curve", "count": CURVE[level], "features": s} for s in COUNTS[level]),
    ]


def run(
    rng: np.random.Generator, kind: str, count: int, pair: int = 0, features: int = 0
) -> dict[str, Any]:
    """What one kind of task finds."""
    q, k, v = tokens()
    if kind == "norms":
        mean, root = law()
        x = mean + rng.standard_normal((count, 10)) @ root.T
        squares = np.sum(x * x, axis=-1)
        average = float(np.mean(squares))
        of, centre = moments.estimate(x, ddof=0), np.mean(x, axis=0)
        given, alone = float(moments.mean_plus_trace(of)), float(moments.mean_only(of))
        found = {"identity": abs(given - average), "alone": abs(alone - centre @ centre)}
        return {"squares": squares, **{name: off / average for name, off in found.items()}}
    if kind == "kernel":
        omega = sampling.draw(count, D, rng=rng).omega[:, None]
        return {"pair": pair, "errors": kernel(omega, q[pair], k[pair], constants(q, k))}
    if kind == "attention":
        omega = sampling.draw(count * 7, D, rng=rng).omega.reshape(count, 7, D)
        return {"error": identity(omega, q, k, v), **limits(q, k, v)}
    omega = sampling.draw(count * features, D, rng=rng).omega.reshape(count, features, D)
    exact = refattn.softmax_attention(q, k, v, scale=1.0)
    v = np.broadcast_to(v, (count, KEYS, KEYS))  # as many problems as draws
    norms = constants(q, k)["(15)"]
    distance = {}
    for name, option in (("(9)", None), ("(15)", norms)):
        out = refattn.random_feature_attention(q, k, v, omega=omega, square_norms=option, scale=1.0)
        distance[name] = float(np.mean(np.sum(np.abs(out - exact), axis=-1) / 2))
    return {"features": features, "distance": distance}


def kernel(omega: Any, x: Any, y: Any, primes: Any) -> dict[str, float]:
    """Errors of the law of log factors by which constants change estimates, for any frequency."""
    errors = {}
    for features, (name, squares) in product(FEATURES, primes.items()):
        phi = getattr(refattn.features, f"{features}_features")
        factor = -theory.log_norm_approximation_bias(x, y, *squares, features=features)
        for row, square in zip((x, y), squares, strict=True):
            new, old = phi(row[None], omega, square_norm=square), phi(row[None], omega)
            change = new.log_scale - old.log_scale
            factor = factor + np.where(new.values == old.values, change, np.nan)
        errors[f"{features}, eq. {name}"] = float(np.max(np.abs(factor))) / EPS
    return errors


def identity(omega: Any, q: Any, k: Any, v: Any) -> float:
    """Largest difference, for frequencies as drawn, from two hops of attention without norms."""
    v = np.broadcast_to(v, (len(omega), KEYS, KEYS))
    f, log_z = refattn.attend(omega, k, v)
    expected = refattn.attend(q, omega, f, bias=log_z[..., None, :]).out
    size = float(np.max(np.linalg.norm(omega, axis=-1)))
    most = float(max(np.max(np.linalg.norm(a, axis=-1)) for a in (q, k)))
    errors = []
    for norms in constants(q, k).values():
        out = refattn.random_feature_attention(q, k, v, omega=omega, square_norms=norms, scale=1.0)
        errors.append(float(np.max(np.abs(out - expected))))
    return max(errors) / (EPS * (1 + 2 * size * most))


def limits(q: Any, k: Any, v: Any) -> dict[str, Any]:
    """Attention with constant norms as the number of frequencies tends to infinity."""
    omega, log_weight = quadrature()
    exact = refattn.softmax_attention(q, k, v, scale=1.0)
    half = np.sum(k * k, axis=-1) / 2
    found = {}
    norms = {"square_norms": constants(q, k)["(15)"], "log_weight": log_weight, "scale": 1.0}
    for name, features, sign in (("(15)", "positive", 1), ("(14)", "trigonometric", -1)):
        options: dict[str, Any] = {"features": features, **norms}
        out = refattn.random_feature_attention(q, k, v, omega=omega, **options)
        expected = refattn.softmax_attention(q, k, v, bias=sign * half, scale=1.0)
        found[name] = {
            "error": float(np.max(np.abs(out - expected))),
            "distance": float(np.max(np.sum(np.abs(out - exact), axis=-1) / 2)),
            "mean": float(np.mean(np.sum(np.abs(expected - exact), axis=-1) / 2)),
        }
    return {"limits": found}


def judge(results: suite.Results) -> suite.Findings:
    """Means of norms and of kernel estimates, the identity, and the limits."""
    norms, pairs = results[0], results[1 : 1 + PAIRS]
    attention, curve = results[1 + PAIRS], results[2 + PAIRS :]
    mean, root = law()
    cov = root @ root.T
    squares, truth = norms["squares"], float(mean @ mean + np.trace(cov))
    variance = float(2 * np.sum(cov * cov) + 4 * mean @ cov @ mean) / truth**2
    found, error = attention["limits"], attention["error"]
    of_square = ("mean of |x|^2", squares / truth)
    without = float(mean @ mean) / truth
    evidence: suite.Evidence = {
        "expected norm": [
            suite.catoni(*of_square, 1.0, variance, 0.1, "of the mean"),
            suite.Compared("average of |x|^2, ddof 0", norms["identity"] / EPS, 64.0, "eps"),
            suite.Compared("without the trace: |mean|^2", norms["alone"] / EPS, 64.0, "eps"),
        ],
        "mean only": [suite.catoni(*of_square, without, variance, 0.1, "of E|x|^2")],
        "kernel": [
            suite.Compared(f"pair {r['pair']}, {name}", error, 16.0, "eps")
            for r in pairs
            for name, error in r["errors"].items()
        ],
        "attention": [
            suite.Compared(f"limit of eq. {a}, from softmax", one["distance"], 1e-9)
            for a, one in found.items()
        ],
        "limit": [
            suite.Compared("identity for every frequency", error, 32.0, "eps (1 + exp.)"),
            *(suite.Compared(f"limit of eq. {a}", found[a]["error"], 1e-9) for a in found),
        ],
    }
    remark = (
        f"Eq. (13) is exact in the mean; its trace is {np.trace(cov) / truth:.0%} of $E|x|^2$ in "
        r"the experiment's own law, and eqs. (14) and (15) leave it out: $|\mu|^2$ is "
        f"{float(mean @ mean):.1f}, $E|x|^2$ is {truth:.1f}. In attention it makes no difference, "
        "since both constants cancel, but $|k_j|^2$ is then missing: as $R$ grows eq. (15) tends "
        r"to $\operatorname{softmax}_j(q \cdot k_j + \frac{1}{2} |k_j|^2)$, up to "
        f"{found['(15)']['distance']:.2f} in total variation from softmax attention "
        f"({found['(15)']['mean']:.2f} on average over queries), and eq. (14) up to "
        f"{found['(14)']['distance']:.2f} ({found['(14)']['mean']:.2f}). By the criterion for the "
        "figures of section V, a mean below 1/2, that is still an approximation of the attention, "
        "but one that more frequencies do not bring nearer."
    )
    data = {"curve": curve, "limit": found["(15)"]["mean"]}
    return suite.Findings(evidence, data, remark)


def plot(data: dict[str, Any]) -> Any:
    """Distance from softmax attention against the number of frequencies."""
    figure, ((axes,),) = plotting.panels()
    curves(axes, data, "norms of each token, eq. (9)", "constants, eq. (15)")
    label = "softmax(q·k + |k|²/2), the limit of eq. (15)"
    axes.axhline(data["limit"], color=plotting.INK, linestyle="--", label=label)
    axes.set(ylabel="total variation from softmax")
    axes.legend()
    return figure


def curves(axes: Any, data: dict[str, Any], *labels: str, **options: Any) -> None:
    """Distances with norms of each token, and with constants."""
    counts = [r["features"] for r in data["curve"]]
    for name, label in zip(("(9)", "(15)"), labels, strict=True):
        distance = [r["distance"][name] for r in data["curve"]]
        axes.plot(counts, distance, "o-", label=label, **options)
    axes.set(xscale="log", yscale="log", xlabel="frequencies R")


def plot_distance(data: dict[str, Any]) -> Any:
    """Total variation from softmax; dashed: limit."""
    figure, axes = plotting.small()
    curves(axes, data, "own norms", "constants", markersize=3)
    axes.axhline(data["limit"], color=plotting.INK, linestyle="--", linewidth=1)
    axes.set(ylabel="distance")
    plotting.key(axes, loc="lower left")
    return figure


METHOD = (
    "Means of squared norms by Catoni's bound, with their variance in closed form. Estimates of "
    "kernels and attention for each frequency drawn as arithmetic, and its limit with the nodes "
    f"of a Gauss-Hermite rule ({NODES} in each of {D} dimensions) for frequencies. That the matrix "
    "A is approximated 'by Equation 6' is read as convergence in R, which eqs. (8) and (9) have; "
    "how near attention comes at finite R is tried apart, for the laws of section V."
)
