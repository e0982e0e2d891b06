"""Law against simulation: the variance of kernel estimates, every kind of feature and coupling.

Run as ``python validation/laws.py``. Each row draws sets of S frequencies (a full block and a
partial one), estimates the kernel from each set, and compares the variance over the sets with
`refattn.theory.kernel_variance`. The z-score divides by the standard error of a sample variance,
(m4 - m2^2 (n - 3) / (n - 1)) / n with the fourth moment m4 measured; |x + y| and |x - y| are kept
near 1/2, where estimates have light enough tails for that. One row in 15,000 exceeds |z| = 4 when
laws and code agree.
"""

from __future__ import annotations

import argparse
import math

import numpy as np

from refattn import kernels, sampling, theory

SETS_AT_ONCE = 1000


def estimates(
    x: np.ndarray, y: np.ndarray, coupling: str, count: int, sets: int, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """Kernel estimates from many sets of frequencies, for every kind of feature."""
    found: dict[str, list[np.ndarray]] = {name: [] for name in kernels.FEATURES}
    for start in range(0, sets, SETS_AT_ONCE):
        size = min(SETS_AT_ONCE, sets - start)
        omega = np.stack(
            [sampling.draw(count, len(x), coupling=coupling, rng=rng).omega for _ in range(size)]
        )
        for name, values in found.items():
            values.append(kernels.estimate(x, y, omega, features=name))
    return {name: np.concatenate(values) for name, values in found.items()}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Compare laws with simulation.")
    parser.add_argument("--sets", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = np.random.default_rng(options.seed)
    print(f"{options.sets} sets of frequencies a row, seed {options.seed}")
    print("  d   S features      coupling       predicted   measured      z")
    worst = 0.0
    for d in (2, 4, 16, 64):
        x, y = rng.standard_normal((2, d))
        x, y = 0.4 * x / np.linalg.norm(x), 0.3 * y / np.linalg.norm(y)
        for coupling in theory.COUPLINGS:
            count = 3 if coupling == "antithetic" else d + d // 2
            for name, values in estimates(x, y, coupling, count, options.sets, rng).items():
                predicted = float(
                    theory.kernel_variance(
                        x, y, features=name, coupling=coupling, num_features=count
                    )
                )
                n, measured = len(values), float(np.var(values, ddof=1))
                fourth = float(np.mean((values - values.mean()) ** 4))
                error = math.sqrt((fourth - measured**2 * (n - 3) / (n - 1)) / n)
                z = (measured - predicted) / error
                worst = max(worst, abs(z))
                print(
                    f"{d:>3} {count:>3} {name:<14}{coupling:<13}{predicted:>11.3e}"
                    f"{measured:>11.3e}{z:>7.2f}"
                )
    print(f"largest |z| of 60: {worst:.2f}")


if __name__ == "__main__":
    main()
