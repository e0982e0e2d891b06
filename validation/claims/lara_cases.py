r"""Reference 003, LARA and its special cases RFA and RA.

.. math::
    \mathrm{LARA}_n = \frac{\sum_c \alpha_{nc}(\omega_c) \frac{p_n(\omega_c)}{q_c(\omega_c)}
        f_n(\omega_c)}{\sum_c \alpha_{nc}(\omega_c) \frac{p_n(\omega_c)}{q_c(\omega_c)}},
    \qquad \omega_c \sim q_c, \qquad \sum_c \alpha_{nc}(\omega) = 1

It is RFA if all q_c = N(0, I) and alpha is constant, and RA if C = N, q_n = p_n and alpha_nc = 1
for c = n, else 0. The formula is written here from densities, and compared with the package.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy import special, stats

from refattn import estimators, linear_randomized_attention, sampling
from refattn.typing import Weighting
from validation import suite

EPS = float(np.finfo(float).eps)
UNIT = "eps (1 + exponents)"
BOUND = 4.0
REPEATS = {"tiny": 1, "quick": 20, "full": 400}
SIZES = ((2, 6), (16, 12), (64, 24))  # d, and the number of tokens
WEIGHTINGS: tuple[Weighting, ...] = ("own", "balance", "query")
KINDS = ("RFA, own", "RFA, balance", "RA", *WEIGHTINGS)


def tasks(level: str) -> suite.Tasks:
    """One task for each size."""
    return [{"d": d, "n": n, "repeats": REPEATS[level]} for d, n in SIZES]


def lara(
    q: Any, k: Any, v: Any, omega: Any, log_alpha: Any, log_proposal: Any, log_target: Any
) -> Any:
    """The formula of the reference; weights (n, C), and densities (C,) or (n, C)."""
    value = special.softmax(omega @ k.T - np.sum(k * k, -1) / 2, -1) @ v
    return special.softmax(log_alpha + log_target - log_proposal, -1) @ value


def log_target(q: Any, k: Any, omega: Any) -> Any:
    """Log of p_n at each frequency, (n, C)."""
    share = special.log_softmax(q @ k.T, -1)
    centres = q[:, None] + k
    each = stats.norm.logpdf(omega[:, None, None], centres).sum(-1)  # (C, n, m)
    return special.logsumexp(share + each, -1).T


def log_densities(omega: Any, centres: Any) -> Any:
    """Log of q_c' = N(mu_c', I) at each frequency, (S, C)."""
    return stats.norm.logpdf(omega[:, None], centres).sum(-1)


def alphas(weighting: str, q: Any, omega: Any, centres: Any, queries: Any) -> Any:
    """All weights at every frequency, (n, S, C), before any negative one is dropped."""
    count = len(centres)
    if weighting == "own":
        return np.full((len(q), len(omega), count), 1 / count)
    balance = special.softmax(log_densities(omega, centres), -1)
    if weighting == "balance":
        return np.broadcast_to(balance, (len(q), *balance.shape))
    of_query = special.softmax(q @ queries.T, -1)
    return balance + (of_query - of_query.mean(-1, keepdims=True))[:, None]


def run(rng: np.random.Generator, d: int, n: int, repeats: int) -> dict[str, Any]:
    """Largest error of each case, in units of rounding."""
    worst = dict.fromkeys(KINDS, 0.0)
    dropped = 0.0
    count = n // 3
    for _ in range(repeats):
        length = rng.uniform(0.2, 3.0) / math.sqrt(d)
        q, k = length * rng.standard_normal((2, n, d))
        v = rng.standard_normal((n, 2))

        def keep(kind: str, got: Any, omega: Any, *want: Any) -> None:
            # Squares of omega and of omega - q - k enter the densities.
            far = sum(np.max(np.linalg.norm(x, axis=-1)) for x in (omega, q, k))  # noqa: B023
            unit = EPS * (1 + far**2) * np.max(np.abs(v))  # noqa: B023
            for other in want:
                worst[kind] = max(worst[kind], float(np.max(np.abs(got - other)) / unit))

        # RFA: every q_c is N(0, I); equal proposals balance to a constant.
        omega = rng.standard_normal((count, d))
        rfa = estimators.random_feature_attention(q, k, v, omega=omega, scale=1.0)
        standard = stats.norm.logpdf(omega).sum(-1)
        formula = lara(q, k, v, omega, np.zeros((n, count)), standard, log_target(q, k, omega))
        for kind in ("own", "balance"):
            options: dict[str, Any] = {"centres": np.zeros((count, d)), "weighting": kind}
            got = linear_randomized_attention(q, k, v, omega=omega, scale=1.0, **options)
            keep(f"RFA, {kind}", got, omega, rfa, formula)
        # RA: C = n, and alpha picks for each query its own frequency.
        own = sampling.draw_target(q, k, num_samples=1, rng=rng, scale=1.0)
        ra = estimators.randomized_attention(q, k, v, omega=own, scale=1.0)
        target = log_target(q, k, own[:, 0])
        delta = np.where(np.eye(n) == 1, 0.0, -math.inf)
        formula = lara(q, k, v, own[:, 0], delta, np.diag(target), target)
        got = linear_randomized_attention(
            q[:, None], k, v, omega=own, centres=q[:, None], weighting="own", scale=1.0
        )
        keep("RA", got[:, 0], own, ra, formula)
        # Chunk means, and weights of each kind.
        queries, keys = (x.reshape(count, 3, d).mean(1) for x in (q, k))
        centres = queries + keys
        omega = centres + rng.standard_normal((count, d))
        target, proposals = log_target(q, k, omega), log_densities(omega, centres)
        for weighting in WEIGHTINGS:
            every = alphas(weighting, q, omega, centres, queries)
            alpha = np.diagonal(every, axis1=1, axis2=2)
            kept = np.where(alpha > 0, np.log(np.where(alpha > 0, alpha, 1.0)), -math.inf)
            formula = lara(q, k, v, omega, kept, np.diag(proposals), target)
            got = linear_randomized_attention(
                q, k, v, omega=omega, num_proposals=count, weighting=weighting, scale=1.0
            )
            # Weights of queries are differences, known to eps and not to eps times themselves.
            ratio = special.softmax(target - np.diag(proposals), -1)
            loss = 1 / np.sum(np.maximum(alpha, 0.0) * ratio, -1, keepdims=True)
            loss = np.maximum(loss, 1.0) if weighting == "query" else 1.0
            keep(weighting, got / loss, omega, formula / loss)
            if weighting == "query":
                sums = np.maximum(every, 0.0).sum(-1)
                dropped = max(dropped, float(np.max(sums)) - 1)
    return {"d": d, "worst": worst, "dropped": dropped}


def judge(results: suite.Results) -> suite.Findings:
    """All is arithmetic."""
    found: dict[str, list[suite.Compared]] = {"is RFA": [], "is RA": [], "formula": []}
    for r in results:
        for kind, error in r["worst"].items():
            name = {"RFA": "is RFA", "RA": "is RA"}.get(kind.split(",")[0], "formula")
            found[name].append(suite.Compared(f"{kind}, d = {r['d']}", error, BOUND, UNIT))
    most = max(r["dropped"] for r in results)
    worst = max(e.value for e in (*found["is RFA"], *found["is RA"]))
    remark = (
        f"LARA is RFA and RA in the cases that the text names, to {worst:.2g} {UNIT}. Weights that "
        "depend on the query sum to 1, as the text asks, only while some are negative: once these "
        f"are dropped, the sum is up to {1 + most:.2g}. The result is a ratio, and shows no "
        "constant factor of the weights."
    )
    return suite.Findings(found, {}, remark)
