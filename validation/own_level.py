"""False alarms of the statistical checks on the package's own estimators, counted.

Run as ``python validation/own_level.py``. Each run makes all statistical checks of a kernel
estimate, RFA, RA and LARA with few seeds, and corrects their p-values together by Holm's method,
as one run of the kit does. The share of runs with an alarm is compared with the level by the
exact binomial law; intervals are those of Clopper and Pearson. A level of 1e-6 cannot be measured
so: it follows from the same theorems as the larger ones.
"""

from __future__ import annotations

import argparse
import json
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import refattn
from refattn import conformance, kernels, sampling, stats
from refattn.conformance.checks import Trial

LEVELS = (0.05, 0.01, 0.001)


def kernel(x: Any, y: Any, *, num_features: int, seed: int) -> Any:
    """The package's estimate of the kernel at its own draws."""
    return kernels.estimate(x, y, sampling.draw(num_features, x.shape[-1], rng=seed).omega)


def rfa(q: Any, k: Any, v: Any, *, mean: Any = None, cov: Any = None, **options: Any) -> Any:
    """RFA that takes the moments of its frequencies."""
    proposal = None if mean is None else sampling.Gaussian(mean, cov)
    options["rng"] = options.pop("seed")
    return refattn.random_feature_attention(q, k, v, proposal=proposal, **options)


CANDIDATES = (
    conformance.Adapter(kernel, "kernel"),
    conformance.Adapter(rfa, "rfa", ["moments"]),
    conformance.Adapter(refattn.randomized_attention, "ra", ["mask"]),
    conformance.Adapter(refattn.linear_randomized_attention, "lara", (), {"centres": "chunks"}),
)


def run(job: tuple[int, int]) -> dict[str, float]:
    """All p-values of one run."""
    seed, size = job
    found: dict[str, float] = {}
    for adapter in CANDIDATES:
        for check in conformance.checks_of(adapter):
            if check.layer != "identity":
                trial = Trial(adapter, check.name, seed, size)
                check.run(trial)
                found |= {f"{adapter.estimator} {check.name} {k}": p for k, p in trial.p.items()}
    return found


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description="Measure the level of the conformance checks.")
    parser.add_argument("--runs", type=int, default=4000)
    parser.add_argument("--seeds", type=int, default=40, help="for each sample of a check")
    parser.add_argument("--first", type=int, default=0, help="seed of the first run")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write all counts")
    options = parser.parse_args()
    jobs = [(options.first + i, options.seeds) for i in range(options.runs)]
    start = time.perf_counter()
    with ProcessPoolExecutor(options.workers) as pool:
        runs = list(pool.map(run, jobs, chunksize=20))
    names = list(runs[0])
    p = np.array([[one[name] for name in names] for one in runs])
    smallest = np.array([stats.holm(row).min() for row in p])
    print(
        f"{len(runs)} runs of {len(names)} p-values, {options.seeds} seeds each, seeds from "
        f"{options.first}; {time.perf_counter() - start:.0f} s"
    )
    print("level   alarms   share    99 % interval      P(as many or more | level)")
    table = {}
    for level in LEVELS:
        count = int(np.sum(smallest <= level))
        low, high = stats.clopper_pearson(count, len(runs))
        tail = _at_least(count, len(runs), level)
        table[level] = count
        print(
            f"{level:<7g} {count:6d}   {count / len(runs):.4f}   "
            f"{low:.4f} to {high:.4f}   {tail:.3g}"
        )
    print("\neach p-value alone, the three with the most alarms at .01 for their number:")
    counts = np.sum(p <= 0.01, 0)
    for i in np.argsort(-counts)[:3]:
        tail = _at_least(int(counts[i]), len(runs), 0.01)
        print(f"{names[i]:48} {counts[i]:5d} of {len(runs)}   {tail:.3g} (of {len(names)})")
    if options.json:
        each = {n: [int(np.sum(p[:, i] <= a)) for a in LEVELS] for i, n in enumerate(names)}
        content = {"runs": len(runs), "levels": LEVELS, "suite": table, "each": each}
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _at_least(count: int, n: int, p: float) -> float:
    from scipy.stats import binom

    return float(binom.sf(count - 1, n, p))


if __name__ == "__main__":
    main()
