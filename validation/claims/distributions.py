r"""The experiment of reference 002, section V: five laws of queries and keys, figures 1 to 5.

Rows q ~ N(q_0, A A^T), k ~ N(k_0, B B^T), as they are (no division by sqrt(D)). The reference shows
attention maps; here maps are compared by the total variation between their rows and those of
softmax attention, of keys in `BINS` groups. Var / kappa^2 = (e^{|q + k|^2} - 1) / R for positive
features (reference 000, Proposition 2), so that R must be of order e^{|q + k|^2}. The means alone
make |q + k|^2 = 360 in figure 3, and the covariances make it large in every figure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import refattn
from refattn import adapt, moments, sampling, theory
from validation import plotting, suite

D, TOKENS, BINS = 10, 1000, 25
HIGHER = (15, 20, 30)  # D of a study that the reference leaves to the future
FIGURES = (1, 2, 3, 4, 5)
COUNTS = (1, 10, 100, 1_000, 10_000)  # R
DRAWS = {"tiny": 1, "quick": 42, "full": 64}  # independent experiments a figure
ROWS = {"tiny": (20, 50), "quick": (25, 150), "full": (50, 1000)}  # queries and keys of a draw
PIECES = {"tiny": 1, "quick": 2, "full": 8}  # tasks a figure
# More experiments of eq. (15) at the largest R: in some figures not nearly all of them are close.
MORE = {
    "tiny": {},
    "quick": {1: 72, 2: 216, 3: 72, 4: 36, 5: 36},
    "full": {1: 216, 2: 216, 3: 216, 4: 36, 5: 36},
}
MORE_OF_TASK = 36
METHODS = ("eq. (9)", "eq. (15)", "adapted")
CLOSE = 0.5  # more than half of the attention at the right keys
FAMILIES = (adapt.oprf, adapt.sderf, adapt.optimal_gaussian, adapt.fit)
NEARER = 0.1  # gain in total variation that counts
VANISHES = -20  # log10 of an estimate over the kernel


def tokens(rng: np.random.Generator, figure: int, d: int = D) -> tuple[Any, Any]:
    """Queries and keys of one figure, of a law drawn anew where it is random."""

    def draw() -> Any:
        fixed = figure in (2, 3)
        mean = np.full(d, 1.0 if figure == 2 else 3.0) if fixed else rng.random(d)
        fixed = figure in (4, 5)
        root = np.full((d, d), 1.0 if figure == 4 else 3.0) if fixed else rng.random((d, d))
        return mean + rng.standard_normal((TOKENS, d)) @ root.T

    return draw(), draw()


def tasks(level: str) -> suite.Tasks:
    """Maps of all tokens for each figure, draws in pieces, and draws of one method alone."""
    size = DRAWS[level] // PIECES[level]
    counts, rows = COUNTS if level != "tiny" else COUNTS[:3], ROWS[level]
    found: list[dict[str, Any]] = [{"figure": f, "kind": "maps", "counts": counts} for f in FIGURES]
    for f in FIGURES:
        found += [{"figure": f, "kind": "draws", "draws": size, "rows": rows}] * PIECES[level]
    for f, more in MORE[level].items():
        one = {"figure": f, "kind": "more", "draws": MORE_OF_TASK, "rows": rows}
        found += [one] * (more // MORE_OF_TASK)
    return [*found, *({"figure": f, "kind": "higher"} for f in FIGURES)]


def run(rng: np.random.Generator, figure: int, kind: str, **task: Any) -> dict[str, Any]:
    """Maps of one experiment, or distances from softmax attention of several."""
    if kind == "maps":
        return {"figure": figure, "maps": maps(rng, *tokens(rng, figure), task["counts"])}
    if kind == "higher":
        return {"figure": figure, kind: [needed(*tokens(rng, figure, d))[0] for d in (D, *HIGHER)]}
    each = {"more": last_distance, "draws": distances}[kind]
    found = [each(rng, *tokens(rng, figure), *task["rows"]) for _ in range(task["draws"])]
    return {"figure": figure, kind: found}


def groups(keys: int) -> Any:
    """Values that add the attention to keys in groups of neighbours."""
    return np.eye(BINS)[np.arange(keys) * BINS // keys]


def estimate(
    rng: np.random.Generator, method: str, q: Any, k: Any, v: Any, count: int, of: Any
) -> Any:
    """One attention map; `of` has the moments of all queries and of all keys."""
    options: dict[str, Any] = {"num_features": count, "rng": rng, "scale": 1.0}
    if method == "eq. (15)":
        options["square_norms"] = tuple(float(moments.mean_only(m)) for m in of)
    if method == "adapted":
        options["proposal"] = adapt.fit(*of, scale=1.0)
    return refattn.random_feature_attention(q, k, v, **options)


def variation(a: Any, b: Any) -> float:
    """Mean total variation between rows."""
    return float(np.mean(np.sum(np.abs(a - b), axis=-1)) / 2)


def distances(rng: np.random.Generator, q: Any, k: Any, queries: int, keys: int) -> Any:
    """Distance of each method and R, the attention being that of the first tokens."""
    of = moments.estimate(q), moments.estimate(k)
    q, k, v = q[:queries], k[:keys], groups(keys)
    exact = refattn.softmax_attention(q, k, v, scale=1.0)
    half = np.sum(k * k, axis=-1) / 2
    limit = refattn.softmax_attention(q, k, v, bias=half, scale=1.0)
    found = {
        method: [variation(estimate(rng, method, q, k, v, r, of), exact) for r in COUNTS]
        for method in METHODS
    }
    found["limit"] = [variation(limit, exact)]
    fitted = [best(*of, scale=1.0) for best in FAMILIES]
    beside = [
        sampling.Gaussian(p.mean, x * np.asarray(p.cov)) for p in fitted[:3] for x in (0.9, 1.1)
    ]
    found["excess"], found["beside"] = (
        [float(adapt.expected_log_excess(*of, p, scale=1.0)) for p in some]
        for some in ([None, *fitted], beside)
    )
    return {**found, "needed": needed(q, k), "size": size(rng, q, k, of)}


def last_distance(rng: np.random.Generator, q: Any, k: Any, queries: int, keys: int) -> float:
    """Distance of eq. (15) at the largest R."""
    of = moments.estimate(q), moments.estimate(k)
    q, k, v = q[:queries], k[:keys], groups(keys)
    out = estimate(rng, "eq. (15)", q, k, v, COUNTS[-1], of)
    return variation(out, refattn.softmax_attention(q, k, v, scale=1.0))


def needed(q: Any, k: Any) -> list[float]:
    """Log10 of the R that estimates an entry of the kernel with an error of its own size.

    Medians of all pairs, and of pairs of a query and the key that it attends to most.
    """
    most = k[np.argmax(q @ k.T, axis=-1)]
    found = []
    for x, y in ((q[:, None], k[None, :100]), (q, most)):
        log_ratio = theory.log_kernel_variance(x, y) - 2 * theory.log_kernel_mean(x, y)
        found.append(float(np.median(log_ratio)) / math.log(10))
    return found


def size(rng: np.random.Generator, q: Any, k: Any, of: Any) -> list[float]:
    """Log10 of the estimates of eqs. (9) and (15) over the kernel, medians of pairs."""
    count = COUNTS[-1]
    z = q + k[: len(q)]
    omega = sampling.draw(count, D, rng=rng).omega
    # log mean_s exp(omega_s . (q + k)), before anything is said of the norms
    log_mean = refattn.attend(z, omega, np.ones((count, 1))).lse - math.log(count)
    exact = np.sum(q * k[: len(q)], axis=-1)
    norms = np.sum(q * q, axis=-1) + np.sum(k[: len(q)] ** 2, axis=-1)
    constant = sum(float(moments.mean_only(m)) for m in of)
    logs = (log_mean - norms / 2 - exact, log_mean - constant / 2 - exact)
    return [float(np.median(a)) / math.log(10) for a in logs]


def maps(rng: np.random.Generator, q: Any, k: Any, counts: Sequence[int]) -> dict[str, Any]:
    """Attention from groups of queries to groups of keys, in percent."""
    of = moments.estimate(q), moments.estimate(k)
    v, rows = groups(len(k)), groups(len(q)).T * (BINS / len(q))

    def small(a: Any) -> Any:
        return np.rint(100 * rows @ a).astype(int).tolist()

    found = {"softmax": small(refattn.softmax_attention(q, k, v, scale=1.0))}
    last = [(method, counts[-1]) for method in ("eq. (9)", "adapted")]
    for method, r in [*(("eq. (15)", r) for r in counts), *last]:
        found[f"{method}, R = {r}"] = small(estimate(rng, method, q, k, v, r, of))
    return found


def judge(results: suite.Results) -> suite.Findings:
    """Sign tests over independent experiments, and the number of frequencies by the law."""
    draws: dict[int, list[Any]] = {f: [] for f in FIGURES}
    more: dict[int, list[float]] = {f: [] for f in FIGURES}
    for r in results[len(FIGURES) :]:
        draws[r["figure"]] += r.get("draws", [])
        more[r["figure"]] += r.get("more", [])
    found = {f: {m: np.array([one[m] for one in draws[f]]) for m in draws[f][0]} for f in FIGURES}
    first, last = ({m: {f: found[f][m][:, i] for f in FIGURES} for m in METHODS} for i in (0, -1))
    size = {f: found[f]["size"][:, 1] for f in FIGURES}
    needs = {f: np.median(found[f]["needed"], axis=0) for f in FIGURES}
    exact, constant, adapted = METHODS
    all_last = {f: np.append(last[constant][f], more[f]) for f in FIGURES}
    gain = {m: average(first[m]) - average(last[m]) for m in (exact, constant)}
    others = [f for f in FIGURES if f != 3]
    evidence: suite.Evidence = {
        "increase": [suite.more_often("mean of the figures", gain[constant] > NEARER)],
        "increase, eq. (9)": [suite.more_often("mean of the figures", gain[exact] > NEARER)],
        "others": [suite.more_often(f"figure {f}", all_last[f] < CLOSE) for f in others],
        "others, eq. (9)": [
            suite.more_often(f"figure {f}", last[exact][f] < CLOSE) for f in others
        ],
        "figure 3": [suite.more_often("figure 3", all_last[3] > CLOSE)],
        "figure 3, eq. (9)": [suite.more_often("figure 3", last[exact][3] > CLOSE)],
        "law": [
            suite.Compared(f"figure {f}, log10 of R", math.log10(COUNTS[-1]), float(needs[f][0]))
            for f in FIGURES
        ],
        "size": [
            suite.more_often("figure 3, below", size[3] < VANISHES),
            *(suite.more_often(f"figure {f}, above", size[f] > VANISHES) for f in (1, 2, 4)),
        ],
        "normalised": [
            suite.more_often(f"figure {f}", last[constant][f] < last[exact][f]) for f in FIGURES
        ],
        "adapted": [
            suite.more_often(f"figure {f}, {m}", last[adapted][f] < last[m][f])
            for m in (exact, constant)
            for f in FIGURES
        ],
        "higher D": [
            suite.Compared(
                f"figure {r['figure']}, largest step of -log10 R over D",
                float(np.max(-np.diff(r["higher"]))),
                0.0,
            )
            for r in results
            if "higher" in r
        ],
        "families": [
            suite.Compared(f"figure {f}, {name}", float(np.max(less)), 1e-6)
            for f in FIGURES
            for name, less in (
                ("largest step", np.diff(found[f]["excess"])),
                (
                    "best less others",
                    np.repeat(found[f]["excess"][:, 1:4], 2, 1) - found[f]["beside"],
                ),
            )
        ],
    }
    curves = {
        str(f): {m: np.mean(found[f][m], axis=0).round(5).tolist() for m in found[f]}
        for f in FIGURES
    }
    gained = {m: float(np.median(g)) for m, g in gain.items()}
    share = {f: float(np.mean(all_last[f] < CLOSE)) for f in FIGURES}
    maps = {str(r["figure"]): r["maps"] for r in results[: len(FIGURES)]}
    shares = {str(f): share[f] for f in FIGURES}
    data = {"maps": maps, "curves": curves, "gained": gained, "share": shares}
    return suite.Findings(evidence, data, remark(curves, needs, gained, share))


def average(x: Mapping[int, Any]) -> Any:
    """Mean of the figures, one experiment of each."""
    return np.mean(list(x.values()), axis=0)


def remark(curves: Any, needs: Any, gained: Any, share: Mapping[int, float]) -> str:
    """How each figure agrees with the reference, and why."""
    exact, constant, _ = METHODS
    said = [
        "Distances are mean total variations from softmax attention at R = 10000, with the "
        "constants of eq. (15), the norms of eq. (9), and an adapted proposal."
    ]
    for f in FIGURES:
        c = curves[str(f)]
        far, near, best = (c[m][-1] for m in METHODS)
        # The reference sees failure in figure 3 only.
        fails = (share[f] < 0.5, far > CLOSE)
        agrees = ["agrees" if x == (f == 3) else "disagrees" for x in fails]
        said.append(
            f"Figure {f} {agrees[0]} for eq. (15), {near:.2f} (limit {c['limit'][0]:.2f}; below "
            f"{CLOSE} in {share[f]:.0%} of experiments), and {agrees[1]} for eq. (9), {far:.2f}, "
            f"adapted {best:.3f}; eq. (15) without normalisation is 1e{c['size'][1]:+.0f} times "
            f"the kernel; by the law R = 1e{needs[f][0]:.0f} for a median pair, "
            f"1e{needs[f][1]:.0f} for the key attended to most."
        )
    said.append(
        "What sets figure 3 apart is the size of the kernel with q' = k' = 90: by eq. (6) alone "
        "the estimate vanishes, which would look as the reference says; normalisation cancels it. "
        "Eq. (15) tends to another attention, near this one where keys of large norm take nearly "
        "all of both. From R = 1 to R = 10000 the mean of the figures' distances falls by "
        f"{gained[constant]:.2f} with eq. (15), and with eq. (9) by {gained[exact]:.3f}, in the "
        "median experiment."
    )
    return " ".join(said)


def plot(data: dict[str, Any]) -> Any:
    """Maps for each figure of the reference and R, and the distances from softmax attention."""
    names = list(data["maps"]["1"])
    options: dict[str, Any] = {"gridspec_kw": {"width_ratios": [1.0] * len(names) + [1.7]}}
    shape = (len(FIGURES), len(names) + 1)
    figure, axes = plotting.panels(*shape, size=(15.5, 9.5), **options)
    for row, f in zip(axes, FIGURES, strict=True):
        for ax, name in zip(row[:-1], names, strict=True):
            ax.imshow(data["maps"][str(f)][name], vmin=0, vmax=50, cmap="viridis", aspect="equal")
            ax.set(xticks=[], yticks=[])
            if f == FIGURES[0]:
                ax.set_title(name.replace(", ", "\n"))
        row[0].set_ylabel(f"figure {f}\nqueries")
        curves, ax = data["curves"][str(f)], row[-1]
        for method in METHODS:
            ax.plot(COUNTS, curves[method], "o-", markersize=3, label=method)
        style = {"linestyle": "--", "linewidth": 1, "label": "limit of eq. (15)"}
        ax.axhline(curves["limit"][0], color=plotting.INK, **style)
        ax.set(xscale="log", ylim=(0, 1), ylabel="total variation")
    axes[-1][-1].set_xlabel("frequencies R")
    axes[0][-1].set_title("distance from softmax")
    axes[-1][-1].legend(fontsize=7, loc="upper right", bbox_to_anchor=(1.0, 0.92))
    for ax in axes[-1][:-1]:
        ax.set_xlabel("keys")
    return figure
