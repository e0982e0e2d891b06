r"""Reference 003, RFA as self-normalised importance sampling (SNIS), for every draw.

.. math::
    \mathrm{RFA}(q_n, K, V) = \frac{\sum_s w_s f_n(\omega_s)}{\sum_s w_s}, \qquad
    w_s = \frac{p_n(\omega_s)}{q(\omega_s)}, \qquad \omega_s \sim q = N(0, I)

Here p_n is summed from the densities of its components and q is a Gaussian density; RFA knows
neither. With another Gaussian q the identity holds once features are weighted by N(0, I) / q.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import stats

from refattn import estimators, sampling
from refattn.typing import Coupling
from validation import plotting, suite
from validation.claims.lara_cases import BOUND, EPS, REPEATS, UNIT, lara, log_target

PROPOSALS = ("standard", "orthogonal", "shifted", "wide")
SIZES = ((1, 1), (4, 8), (16, 64), (64, 256))  # d and the number of frequencies


def tasks(level: str) -> suite.Tasks:
    """One task for each proposal and dimension."""
    return [
        {"proposal": proposal, "d": d, "count": count, "repeats": REPEATS[level]}
        for proposal in PROPOSALS
        for d, count in SIZES
    ]


def run(
    rng: np.random.Generator, proposal: str, d: int, count: int, repeats: int
) -> dict[str, Any]:
    """Largest difference, of outputs or of log weights, and the exponents of each problem."""
    points = []
    for _ in range(repeats):
        length = rng.uniform(0.2, 3.0) / np.sqrt(d)
        q, k = length * rng.standard_normal((3, d)), length * rng.standard_normal((7, d))
        v = rng.standard_normal((7, 2))
        mean, variance, law = np.zeros(d), np.ones(d), None
        if proposal == "shifted":
            mean = q.mean(0) + k.mean(0)
            law = sampling.Gaussian(mean)
        elif proposal == "wide":
            mean, variance = q.mean(0), rng.uniform(0.8, 2.0, d)
            law = sampling.Gaussian(mean, np.diag(variance))
        coupling: Coupling = "orthogonal" if proposal == "orthogonal" else "iid"
        omega, log_weight = sampling.draw(count, d, proposal=law, coupling=coupling, rng=rng)
        log_proposal = stats.norm.logpdf(omega, mean, np.sqrt(variance)).sum(-1)
        off = np.max(np.abs(stats.norm.logpdf(omega).sum(-1) - log_proposal - log_weight))
        want = lara(q, k, v, omega, np.zeros(count), log_proposal, log_target(q, k, omega))
        got = estimators.random_feature_attention(
            q, k, v, omega=omega, log_weight=log_weight, scale=1.0
        )
        # Squares of omega and of omega - q - k enter the densities.
        far = sum(float(np.max(np.linalg.norm(x, axis=-1))) for x in (omega, q, k, mean[None]))
        error = np.max(np.abs(got - want)) / np.max(np.abs(v))
        points.append([1 + far**2, float(max(error, off))])
    return {"proposal": proposal, "d": d, "points": points}


def judge(results: suite.Results) -> suite.Findings:
    """Largest differences in units of rounding."""
    found: dict[str, list[suite.Compared]] = {"standard": [], "other": []}
    for r in results:
        name = "standard" if r["proposal"] in ("standard", "orthogonal") else "other"
        worst = max(error / exponents for exponents, error in r["points"]) / EPS
        found[name].append(suite.Compared(f"{r['proposal']}, d = {r['d']}", worst, BOUND, UNIT))
    worst = max(e.value for e in found["standard"])
    remark = (
        "RFA is the SNIS estimate, as the text derives, for every draw and not on average: the "
        f"two differ by at most {worst:.2g} {UNIT}."
    )
    points = [{**r, "points": r["points"][:40]} for r in results]
    return suite.Findings(found, {"results": points}, remark)


def plot(data: dict[str, Any]) -> Any:
    """Differences against the exponents that are rounded."""
    figure, ((axes,),) = plotting.panels()
    most = 1.0
    for name in PROPOSALS:
        rows = np.array([p for r in data["results"] if r["proposal"] == name for p in r["points"]])
        most = max(most, float(rows[:, 0].max()))
        axes.loglog(rows[:, 0], np.maximum(rows[:, 1], 1e-18), ".", alpha=0.7, label=name)
    x = np.array([1.0, most])
    axes.loglog(x, BOUND * EPS * x, color=plotting.INK, linewidth=0.8, label="bound")
    axes.set(xlabel="1 + exponents", ylabel="largest difference / largest value")
    axes.legend()
    return figure
