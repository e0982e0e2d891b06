r"""Importance sampling, its self-normalised form, and reference 002, eqs. (10) to (12).

Eq. (12) averages ratios at single frequencies, in which xi(q, omega) cancels. Drawn from N(0, I)
its mean is that of RFA with one frequency, whatever S; drawn from p_i it is randomized attention.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

import refattn
from refattn import sampling, theory
from refattn.judge import stats
from validation import plotting, suite

D, KEYS, LENGTH = 4, 6, 0.7  # LENGTH of the query and the keys
COUNTS = (1, 4, 16, 64, 128)  # frequencies S
DRAWS = {"tiny": 20, "quick": 12_000, "full": 200_000}
EPS = float(np.finfo(float).eps)
WEIGHED = {"is": None, "weighted": sampling.Gaussian(np.full(D, 0.2), 1.2 * np.eye(D))}


def problem() -> tuple[Any, Any, Any]:
    """One query, and keys with values of 1 where they point its way and 0 where they do not."""
    rng = np.random.default_rng(2)
    q, k = rng.standard_normal((1, D)), rng.standard_normal((KEYS, D))
    q, k = (LENGTH * x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    return q, k, (k @ q.T > 0).astype(float)


def tasks(level: str) -> suite.Tasks:
    """One task for each number of frequencies, with more draws where they say less."""
    return [{"count": count, "draws": DRAWS[level] * max(1, 10 // count)} for count in COUNTS]


def run(rng: np.random.Generator, count: int, draws: int) -> dict[str, Any]:
    """Outputs of the four estimators, the first three at the same frequencies."""
    q, k, v = problem()
    v = np.broadcast_to(v, (draws, KEYS, 1))  # as many problems as draws
    omega = sampling.draw(draws * count, D, rng=rng).omega.reshape(draws, count, D)
    target = sampling.draw_target(q, k, num_samples=draws * count, rng=rng, scale=1.0)
    target = target.reshape(draws, 1, count, D)
    few = draws // 4
    drawn = sampling.draw(few * count, D, proposal=WEIGHED["weighted"], rng=rng)
    weighted: dict[str, Any] = {
        "omega": drawn.omega.reshape(few, count, D),
        "log_weight": drawn.log_weight.reshape(few, count),
    }
    out = {
        "weighted": refattn.importance_sampled_attention(q, k, v[:few], **weighted, scale=1.0),
        "is": refattn.importance_sampled_attention(q, k, v, omega=omega, scale=1.0),
        "rfa": refattn.random_feature_attention(q, k, v, omega=omega, scale=1.0),
        "ratios": refattn.mean_of_ratios_attention(q, k, v, omega=omega, scale=1.0),
        "ra": refattn.randomized_attention(q, k, v, omega=target, scale=1.0),
    }
    # All values may be 1: a mean of them is in [0, 1] but for rounding.
    flat = {name: x[:, 0, 0] for name, x in out.items()}
    bounded = {name: np.clip(x, 0, 1) for name, x in flat.items() if name not in WEIGHED}
    size = float(np.max(np.linalg.norm(omega, axis=-1)))
    return {"count": count, "size": size, **flat, **bounded}


def judge(results: suite.Results) -> suite.Findings:
    """Means against exact attention, and the biases of eqs. (10) and (12) against each other."""
    q, k, v = problem()
    exact = float(refattn.softmax_attention(q, k, v, scale=1.0)[0, 0])
    evidence: suite.Evidence = defaultdict(list)
    law, scores = theory.importance_sampling_law(q, k, v, num_features=1, scale=1.0), k @ q[0]
    moments = np.exp(q[0] @ q[0] + 2 * (scores + scores[:, None]) + k @ k.T)  # of pairs of keys
    direct = v[:, 0] @ moments @ v[:, 0] / np.sum(np.exp(scores)) ** 2 - exact**2
    off = abs(float(law.variance[0, 0] / direct) - 1) / EPS
    evidence["importance sampling"].append(suite.Compared("variance, as a sum", off, 64.0, "eps"))
    rows = []
    for r in results:
        count, n, name = r["count"], len(r["is"]), f"S = {r['count']}"
        for what, proposal in WEIGHED.items():
            one: dict[str, Any] = {"num_features": count, "proposal": proposal, "scale": 1.0}
            variance = float(theory.importance_sampling_law(q, k, v, **one).variance[0, 0])
            of_one = (r[what], exact, variance, 0.1)
            evidence["importance sampling"].append(suite.catoni(f"{what}, {name}", *of_one))
        law = theory.randomized_attention_law(q, k, v, num_samples=count, scale=1.0)
        cap = float(law.variance[0, 0])
        null, to = (stats.bernstein, r["ra"], exact, cap), (0.1, "")
        evidence["randomized"].append(suite.evidence(name, *null, target=to, variance=cap))
        evidence["unbiased"].append(suite.Tested(name, stats.betting(r["ratios"], exact)))
        if count <= 4:
            evidence["SNIS biased"].append(suite.Shown(name, stats.betting(r["rfa"], exact)))
        if count > 1:
            evidence["reduces"].append(reduction(name, r["ratios"], r["rfa"], exact))
        bias = {e: float(np.mean(r[e])) - exact for e in ("is", "rfa", "ratios", "ra")}
        error = {e: float(np.std(r[e])) / n**0.5 for e in bias}
        rows.append({"count": count, "bias": bias, "error": error})
    one = next(r for r in results if r["count"] == 1)
    gap = float(np.max(np.abs(one["rfa"] - one["ratios"]))) / (EPS * (1 + 2 * one["size"]))
    identity = suite.Compared("difference", gap, 16.0, "eps (1 + exponents)")
    evidence["one frequency"].append(identity)
    last = rows[-1]
    remark = (
        f"Exact attention is {exact:.3f}. At S = {last['count']} eq. (10) is off by "
        f"{last['bias']['rfa']:+.3f} and eq. (12) by {last['bias']['ratios']:+.3f}, as much as at "
        f"S = 1 ({rows[0]['bias']['ratios']:+.3f}): drawn from N(0, I), eq. (12) does not reduce "
        "the bias of eq. (10) but keeps that of one frequency, and is not RA. Drawn from p_i the "
        f"same average is off by {last['bias']['ra']:+.4f}, within chance of 0."
    )
    laws = [(s, theory.attention_law(q, k, v, num_features=s, scale=1.0)) for s in range(10, 201)]
    first_order = [(s, float(law.bias[0, 0])) for s, law in laws if law.in_regime[0]]
    return suite.Findings(evidence, {"exact": exact, "rows": rows, "law": first_order}, remark)


def reduction(name: str, ratios: Any, rfa: Any, exact: float) -> suite.Shown:
    """Evidence on |E ratios - exact| < |E rfa - exact|, whatever the signs of both biases.

    With biases a and b, |a| < |b| if and only if b - a and b + a have one sign and neither is 0.
    Otherwise one of the two is not positive, and one is not negative: that both seem to have one
    sign is chance in at least one of two one-sided tests, and the larger of both two-sided
    p-values bounds its probability. In the same way for |a| > |b| and opposite signs.
    """
    # In [0, 1]: halves of differences, and averages measured from the middle of their range.
    sides = []
    for x, middle in (((1 + rfa - ratios) / 2, 0.5), ((rfa + ratios) / 2, exact)):
        sides.append((stats.empirical_bernstein(x, middle), float(np.mean(x)) > middle))
    p = max(p for p, _ in sides)
    same = sides[0][1] == sides[1][1]
    return suite.Shown(name, p if same else 1.0, 1.0 if same else p)


def plot(data: dict[str, Any]) -> Any:
    """Bias against the number of frequencies."""
    figure, ((axes,),) = plotting.panels()
    names = {
        "rfa": "eq. (10), RFA",
        "ratios": "eq. (12) as printed, ω ~ N(0, I)",
        "ra": "corrected, ω ~ p, RA",
        "is": "eq. (11), exact normaliser",
    }
    for shift, (name, label) in enumerate(names.items()):
        counts = [r["count"] * 1.05**shift for r in data["rows"]]
        values = ([r[key][name] for r in data["rows"]] for key in ("bias", "error"))
        axes.errorbar(counts, *values, fmt="o-", capsize=3, label=label)
    if data["law"]:
        style = {"color": plotting.INK, "linewidth": 1, "label": "eq. (10), law of first order"}
        axes.plot(*zip(*data["law"], strict=True), "--", **style)
    axes.axhline(0.0, color=plotting.INK, linewidth=0.8)
    axes.set(xscale="log", xlabel="frequencies S", ylabel="mean output - exact attention")
    axes.legend()
    return figure


def plot_bias(data: dict[str, Any]) -> Any:
    """Mean output less exact attention."""
    figure, axes = plotting.small()
    names = {"rfa": "eq. (10)", "ratios": "eq. (12)", "ra": "RA"}
    for name, label in names.items():
        bias = [r["bias"][name] for r in data["rows"]]
        axes.plot([r["count"] for r in data["rows"]], bias, "o-", markersize=3, label=label)
    axes.axhline(0.0, color=plotting.INK, linewidth=0.8)
    axes.set(xscale="log", xlabel="frequencies S", ylabel="bias")
    plotting.key(axes)
    return figure
