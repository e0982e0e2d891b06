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
from validation import suite
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
    """Largest difference of outputs or of log weights, in units of rounding."""
    worst = 0.0
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
        error = max(off, np.max(np.abs(got - want)) / np.max(np.abs(v)))
        worst = max(worst, float(error) / (1 + far**2) / EPS)
    return {"proposal": proposal, "d": d, "worst": worst}


def judge(results: suite.Results) -> suite.Findings:
    """Largest differences in units of rounding."""
    found: dict[str, list[suite.Compared]] = {"standard": [], "other": []}
    for r in results:
        name = "standard" if r["proposal"] in ("standard", "orthogonal") else "other"
        row = (f"{r['proposal']}, d = {r['d']}", r["worst"], BOUND, UNIT)
        found[name].append(suite.Compared(*row))
    worst = max(e.value for e in found["standard"])
    remark = (
        "RFA is the SNIS estimate, as the text derives, for every draw and not on average: the "
        f"two differ by at most {worst:.2g} {UNIT}."
    )
    return suite.Findings(found, {}, remark)
