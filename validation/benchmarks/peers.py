"""Random-feature attention against the textbook form in NumPy: time, ratio and agreement.

Run as ``python validation/benchmarks/textbook.py``. Both forms see the same arrays, in turn. After
a product OpenBLAS keeps its threads spinning for about 0.1 s, which would be charged to whoever
runs next: each run starts when they sleep.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import numpy as np

import refattn

HEADS, HEAD_SIZE, FEATURES, PAUSE_S = 8, 64, 256, 0.15


def textbook(q: np.ndarray, k: np.ndarray, v: np.ndarray, omega: np.ndarray) -> np.ndarray:
    """Positive features as they are written down, all in memory: overflows for large q, k."""
    root = np.asarray(q.shape[-1] ** -0.25, q.dtype)
    q, k = q * root, k * root
    phi_q = np.exp(q @ omega.T - (q * q).sum(-1, keepdims=True) / 2)
    phi_k = np.exp(k @ omega.T - (k * k).sum(-1, keepdims=True) / 2)
    normaliser = phi_q @ phi_k.sum(-2)[..., None]
    out: np.ndarray = phi_q @ (phi_k.swapaxes(-1, -2) @ v) / normaliser
    return out


FORMS = (refattn.random_feature_attention, textbook)


def seconds(function: Callable[[], np.ndarray]) -> float:
    """Time one call."""
    time.sleep(PAUSE_S)
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def main() -> None:
    """Print one line for each dtype."""
    parser = argparse.ArgumentParser(description="Time random-feature attention.")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    for dtype in (np.float32, np.float64):
        rng = np.random.default_rng(0)
        q, k, v = rng.standard_normal((3, HEADS, options.tokens, HEAD_SIZE)).astype(dtype)
        omega = rng.standard_normal((FEATURES, HEAD_SIZE)).astype(dtype)
        forms = [partial(form, q, k, v, omega=omega) for form in FORMS]
        difference = np.max(np.abs(forms[0]() - forms[1]()))
        times = np.array([[seconds(form) for form in forms] for _ in range(options.repeats)])
        ours, theirs = np.median(times, axis=0)
        print(
            f"{np.dtype(dtype).name}: refattn {ours:.3f} s, textbook {theirs:.3f} s, "
            f"ratio {ours / theirs:.2f}; largest difference {difference:.1e}"
        )


if __name__ == "__main__":
    main()
