r"""Means and covariances of queries and keys, reference 002, eqs. (1) and (2).

.. math::
    \hat\mu = \frac1N \sum_i x_i, \qquad
    \hat\Sigma = \frac1{N-1} \sum_i (x_i - \hat\mu)(x_i - \hat\mu)^\top

For Gaussian rows their laws are exact (Bartlett; Hotelling), and few rows and many replicates
tell a wrong divisor best. The advice of N > d^2 rows is judged by the mean squared error in
coordinates where the covariance is I, with n = N - 1:

.. math::
    E \frac{|\hat\Sigma - I|_F^2}{d} = \frac{d + 1}{n}, \qquad
    \mathrm{Var} \, \mathrm{tr} W^2 = 4nd(2n^2 + 2d^2 + 5nd + 5n + 5d + 5), \quad
    W = n \hat\Sigma \sim W_d(n, I)

(the traces W and W^2 of a Wishart matrix have covariance 4 nd(n + d + 1), as the first is
sufficient for its scale.)
"""

from __future__ import annotations

import math
from functools import reduce
from typing import Any

import numpy as np

from refattn import moments
from refattn.judge import stats
from validation import plotting, suite

D, N = 10, 12  # few rows: a divisor N in place of N - 1 changes the covariance by a twelfth
REPLICATES = {"tiny": 40, "quick": 6_000, "full": 100_000}
ERRORS = {"tiny": 20, "quick": 2_000, "full": 20_000}
SIZES = ((10, 34), (10, 101), (21, 201), (43, 401))  # (d, N); d^2 + 1 rows only for the second
EPS = float(np.finfo(float).eps)


def law() -> tuple[Any, Any]:
    """Mean and root of the covariance of the experiment: U(0, 1) and A A^T, A of U(0, 1)."""
    rng = np.random.default_rng(2)
    return rng.random(D), rng.random((D, D))


def tasks(level: str) -> suite.Tasks:
    """The laws, the identities, and the error for each number of rows."""
    return [
        {"kind": "laws", "count": REPLICATES[level]},
        {"kind": "pieces", "count": 100},
        *({"kind": "errors", "count": ERRORS[level], "d": d, "size": n} for d, n in SIZES),
    ]


def run(rng: np.random.Generator, kind: str, count: int, d: int = D, size: int = N) -> Any:
    """Estimates, the largest difference between pieces and the whole, or squared errors."""
    mean, root = law()
    if kind == "laws":
        rows = moments.draw(moments.Moments(N, mean, root @ root.T), count * N, rng=rng)
        found = moments.estimate(rows.reshape(count, N, D))
        return found.mean, found.cov
    if kind == "pieces":
        return max(pieces(mean + rng.standard_normal((57, D)) @ root.T) for _ in range(count))
    cov = moments.estimate(rng.standard_normal((count, size, d))).cov
    return np.sum((cov - np.eye(d)) ** 2, axis=(-2, -1)) / d


def pieces(x: Any) -> float:
    """Largest error of merged moments, in units of that of one feature."""
    whole = moments.estimate(x)
    merged = reduce(moments.merge, [moments.estimate(p) for p in np.split(x, [1, 8, 9, 40])])
    streamed = moments.estimate_chunks(np.split(x, [1, 8, 9, 40]))
    sd = np.sqrt(np.diag(whole.cov))
    far = np.max((np.abs(whole.mean) + np.abs(x[0] - whole.mean)) / sd)
    errors = []
    for other in (merged, streamed):
        errors.append(np.max(np.abs(other.cov - whole.cov) / np.outer(sd, sd)))
        errors.append(np.max(np.abs(other.mean - whole.mean) / sd))
    return float(max(errors) / (1 + far) / EPS)


def expected_error(d: int, rows: int) -> tuple[float, float]:
    """Mean and variance of |cov - I|^2 / d for Gaussian rows of covariance I."""
    n = rows - 1
    squares = 4 * n * d * (2 * n**2 + 2 * d**2 + 5 * n * d + 5 * n + 5 * d + 5)
    variance = squares / n**4 - 16 * d * (n + d + 1) / n**2 + 8 * d / n
    return (d + 1) / n, variance / d**2


def judge(results: suite.Results) -> suite.Findings:
    """Exact laws of the estimates, identities of pieces, and means of squared errors."""
    (means, covs), error, *squared = results
    mean, root = law()
    r = len(means)
    p = stats.gaussian_estimates(means, covs, count=N, mean=mean, cov=root @ root.T)
    log, share = "of log", "of probability"
    spread, trace = (suite.detects(stats.chi2, r, df=n) for n in (D, D * (N - 1)))
    uniforms = suite.detects(stats.ks, r * (D + D * (D + 1) // 2))
    null, to = (stats.hotelling, means, mean), (0.2, "sd of a mean")
    evidence: suite.Evidence = {
        "laws": [
            suite.Tested("mean of means", p.location),
            suite.evidence("mean, of unknown spread", *null, target=to, dimension=D),
            suite.Tested("spread of means", p.dispersion, spread, 0.08, log),
            suite.Tested("trace", p.trace, trace, 0.04, log),
            suite.Tested("all factors", p.pooled, uniforms, 0.02, share),
            suite.Tested("each factor", p.each, suite.detects(stats.ks, r), 0.15, share),
        ],
        "pieces": [suite.Compared("merged and streamed", error, 16.0, "eps (1 + distance in sd)")],
        "advice": [],
    }
    rows = []
    for (d, n), x in zip(SIZES, squared, strict=True):
        expected, variance = expected_error(d, n)
        of_one = (x / expected, 1.0, variance / expected**2, 0.1, "of the squared error")
        evidence["advice"].append(suite.catoni(f"d = {d}, N = {n}", *of_one))
        measured, expected = math.sqrt(np.mean(x)), math.sqrt(expected)
        rows.append({"d": d, "rows": n, "measured": measured, "expected": expected})
    advised = next(row for row in rows if row["rows"] == row["d"] ** 2 + 1)
    fewer = rows[-1]
    remark = (
        f"Eqs. (1) and (2) are the unbiased estimates. With $N = d^2 + 1$ = {advised['rows']} rows "
        f"the relative error of the covariance is {advised['measured']:.2f} (law "
        f"{advised['expected']:.2f}); it depends on (d + 1) / (N - 1) alone, and d = {fewer['d']} "
        f"has the same error, {fewer['measured']:.2f}, with N = {fewer['rows']} rows, far fewer "
        f"than $d^2$ = {fewer['d'] ** 2}: N in proportion to d is enough, and $N > d^2$ makes the "
        r"error fall as $1 / \sqrt{d}$."
    )
    return suite.Findings(evidence, {"errors": rows}, remark)


def plot(data: dict[str, Any]) -> Any:
    """Relative error of the covariance against the number of rows."""
    figure, ((axes,),) = plotting.panels()
    for i, d in enumerate(sorted({row["d"] for row in data["errors"]})):
        colour = plotting.COLOURS[i]
        n = np.geomspace(d + 1, 2000, 50)
        axes.plot(n, np.sqrt((d + 1) / (n - 1)), color=colour, linewidth=1)
        for row in (row for row in data["errors"] if row["d"] == d):
            axes.plot(row["rows"], row["measured"], "o", color=colour)
        axes.plot([], [], "o-", color=colour, label=f"d = {d}")
        axes.plot(d * d + 1, math.sqrt((d + 1) / d**2), "|", color=colour, markersize=16)
    axes.plot([], [], "|", color=plotting.INK, markersize=10, linestyle="", label="N = d² + 1")
    axes.set(xscale="log", yscale="log", xlabel="rows N", ylabel="relative error of the covariance")
    axes.legend(title="line: law, dots: measured")
    return figure


METHOD = (
    f"Gaussian rows, d = {D}. Many estimates of {N} rows each against their exact laws (Bartlett's "
    "factors, chi-square, Hotelling); merging as arithmetic; squared errors by Catoni's bound, "
    r"with the variance of $\operatorname{tr} W^2$ of a Wishart matrix $W$."
)
