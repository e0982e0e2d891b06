r"""Reference 003, the limitations of LARA: "still a biased (but consistent) estimator".

With one sample of each proposal and no more proposals than tokens, LARA has no sample size that
grows. Here the proposals q_c = N(mu_c, 1) are fixed and K samples are drawn of each. With
alpha_c = q_c / sum_c' q_c' (balance) or 1 / C (own) the sums of LARA tend to softmax attention and
to 1. Weights that depend on the query, with negative ones dropped as they must be for the result to
be a mean of values, no longer sum to 1. See `_ratios` for the mean and the variance at any K.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import numpy as np
from scipy import special

from refattn import linear_randomized_attention
from refattn.judge import stats
from refattn.typing import Weighting
from validation import plotting, suite
from validation.claims import _ratios

DRAWS = {"tiny": 200, "quick": 20_000, "full": 200_000}
WEIGHTINGS: tuple[Weighting, ...] = ("own", "balance", "query")
COUNTS = (1, 4, 16, 64)  # simulated
EXACT = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384, 65536)
PROBLEM = _ratios.Problem(0.6, np.array([-1.0, 0.2, 1.0]), np.array([0.0, 0.2, 1.0]))
QUERIES = np.array([0.6, 0.0, -0.6])  # the first is that of the problem; one a proposal
CENTRES = np.array([0.8, 0.2, -0.3])
TARGET = 0.06  # of the largest value
BATCH = 5000


def tasks(level: str) -> suite.Tasks:
    """One task for each weighting and number of samples, and for each exact law."""
    simulated = [
        {"weighting": weighting, "count": count, "draws": DRAWS[level] // (1 + (count > 16))}
        for weighting in WEIGHTINGS
        for count in COUNTS
    ]
    exact = [{"weighting": weighting, "count": 0, "draws": 0} for weighting in WEIGHTINGS]
    return [*simulated, *exact]


def groups(weighting: str, step: float) -> list[_ratios.Group]:
    """Weights of the samples of each proposal, alpha_c p_n / q_c."""
    omega = _ratios.points(np.append(CENTRES, 3 * (PROBLEM.q + PROBLEM.k.max())), step)
    log_ratio = PROBLEM.log_weight(omega)  # over N(0, 1)
    log_own = omega[:, None] * CENTRES - CENTRES**2 / 2
    if weighting == "own":
        alpha = np.full_like(log_own, 1 / len(CENTRES))
    else:
        alpha = special.softmax(log_own, -1)
    if weighting == "query":
        share = special.softmax(PROBLEM.q * QUERIES)
        alpha = np.maximum(alpha + share - share.mean(), 0.0)
    weight = alpha * np.exp(log_ratio[:, None] - log_own)
    value = PROBLEM.value(omega)
    return [
        _ratios.Group(step * _ratios.density(omega, centre), weight[:, c], value)
        for c, centre in enumerate(CENTRES)
    ]


def limit(weighting: str, step: float) -> float:
    """What LARA tends to: a ratio of integrals."""
    each = groups(weighting, step)
    total = sum(float(g.p @ g.weight) for g in each)
    return sum(float(g.p @ (g.weight * g.value)) for g in each) / total


def run(rng: np.random.Generator, weighting: Weighting, count: int, draws: int) -> dict[str, Any]:
    """Outputs for the first query, or the exact law for many numbers of samples."""
    about: dict[str, Any] = {"weighting": weighting, "count": count}
    # Weights of queries have kinks where they are dropped: such integrals need smaller steps.
    step = 0.01 if weighting == "query" else 0.05
    if count == 0:
        each = groups(weighting, step)
        laws = _ratios.moments(each, EXACT)
        finer = _ratios.moments(groups(weighting, step / 2), (1, EXACT[-1]), 0.05)
        gap = float(np.max(np.abs(np.array(finer) - np.array([laws[0], laws[-1]]))))
        return {**about, "laws": laws, "limit": limit(weighting, step / 2), "gap": gap}
    q, k, v = QUERIES[:, None], PROBLEM.k[:, None], PROBLEM.v[:, None]
    centres = np.repeat(CENTRES, count)[:, None]
    options: dict[str, Any] = {"centres": CENTRES[:, None], "weighting": weighting, "scale": 1.0}
    out = []
    for i in range(0, draws, BATCH):
        size = min(BATCH, draws - i)
        omega = centres + rng.standard_normal((size, len(centres), 1))
        queries = np.broadcast_to(q, (size, *q.shape))
        out.append(linear_randomized_attention(queries, k, v, omega=omega, **options)[:, 0, 0])
    ((mean, variance),) = _ratios.moments(groups(weighting, step), [count])
    return {**about, "out": np.clip(np.concatenate(out), 0, 1), "mean": mean, "variance": variance}


def judge(results: suite.Results) -> suite.Findings:
    """Bets against unbiasedness; exponents of the exact laws, which simulation must confirm."""
    exact = PROBLEM.exact
    evidence: suite.Evidence = defaultdict(list)
    data: dict[str, Any] = {"counts": list(EXACT), "exact": {}, "simulated": []}
    for r in results:
        weighting, count = r["weighting"], r["count"]
        tends = evidence["query" if weighting == "query" else "consistent"]
        if count:
            x, name = r["out"], f"{weighting}, K = {count}"
            if count <= 4:
                evidence["biased"].append(suite.Shown(name, stats.betting(x, exact)))
            square = (x - exact) ** 2
            want = r["variance"] + (r["mean"] - exact) ** 2
            of_mean = (x, r["mean"], r["variance"], TARGET, "of the values")
            # A square in [0, 1] has at most its mean as variance.
            of_square = (square, want, want, TARGET, "of squared values")
            found = [
                suite.empirical_bernstein(f"mean, {name}", *of_mean),
                suite.empirical_bernstein(f"mean square, {name}", *of_square),
            ]
            evidence["law"] += found
            if weighting != "query":
                tends += found
            mse = float(np.mean(square))
            data["simulated"].append({"weighting": weighting, "count": count, "mse": mse})
            continue
        bias = [mean - exact for mean, _ in r["laws"]]
        errors = [variance + b * b for b, (_, variance) in zip(bias, r["laws"], strict=True)]
        data["exact"][weighting] = {"bias": bias, "mse": errors, "limit": r["limit"] - exact}
        gap, off = r["gap"], abs(r["limit"] - exact)
        evidence["law"].append(suite.Compared(f"integrals of two steps, {weighting}", gap, 1e-5))
        tends.append(suite.Compared(f"limit, {weighting}", off, 1e-4, "of the values"))
        if weighting != "query":
            grew = math.log(EXACT[-1] / EXACT[-3])
            for name, values in (("bias", bias), ("mean square", errors)):
                slope = math.log(abs(values[-1] / values[-3])) / grew
                label = f"exponent of K in the {name}, from -1, {weighting}"
                tends.append(suite.Compared(label, abs(slope + 1), 0.05))
    first = data["exact"]["balance"]
    remark = (
        "LARA is biased and consistent, as the text says, if what grows is the number of samples "
        f"of fixed proposals: with balance weights the bias is {first['bias'][0]:.2g} for one "
        f"sample of each and {first['bias'][-1]:.2g} for {EXACT[-1]}. It is not with "
        "query-dependent weights once negative ones are dropped: the limit is off by "
        f"{data['exact']['query']['limit']:.2g}. With one sample of each of at most N proposals, "
        "the form in the text, nothing tends to a limit."
    )
    return suite.Findings(evidence, data, remark)


def plot(data: dict[str, Any]) -> Any:
    """Mean squared error against the number of samples of each proposal."""
    figure, ((axes,),) = plotting.panels()
    counts = np.array(data["counts"])
    for i, weighting in enumerate(WEIGHTINGS):
        colour = plotting.COLOURS[i]
        axes.loglog(counts, data["exact"][weighting]["mse"], color=colour, label=weighting)
        rows = [r for r in data["simulated"] if r["weighting"] == weighting]
        axes.loglog(*plotting.columns(rows, "count", "mse"), "o", color=colour)
    off = data["exact"]["query"]["limit"] ** 2
    axes.axhline(off, color=plotting.INK, linestyle=":", linewidth=0.9, label="limit of query")
    line = data["exact"]["balance"]["mse"][-1] * counts[-1] / counts
    axes.loglog(counts, line, "--", color=plotting.INK, linewidth=0.8, label="1/K")
    axes.set(xlabel="samples of each proposal, K", ylabel="mean squared error")
    axes.legend(title="weights; points simulated")
    return figure
