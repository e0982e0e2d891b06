"""Time and memory of functions, for claims whose tasks run alone."""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np


def rounds(
    calls: Mapping[int, Mapping[str, Callable[[], Any]]], repeats: int
) -> dict[str, list[list[float]]]:
    """Seconds of each named call, by size, in each round; all run in turn in a round."""
    each = [(name, call) for forms in calls.values() for name, call in forms.items()]
    times = np.empty((repeats + 1, len(each)))
    for row in times:
        for i, (_, call) in enumerate(each):
            start = time.perf_counter()
            call()
            row[i] = time.perf_counter() - start
    found: dict[str, list[list[float]]] = {name: [] for name, _ in each}
    for (name, _), column in zip(each, times[1:].T, strict=True):
        found[name].append(column.tolist())  # without the first run, which warms up
    return {name: np.transpose(columns).tolist() for name, columns in found.items()}


def seconds(
    calls: Mapping[int, Mapping[str, Callable[[], Any]]], repeats: int
) -> dict[str, list[float]]:
    """Median seconds of each named call, by size, as a busy machine slows all of a round."""
    found = rounds(calls, repeats)
    return {name: np.median(times, axis=0).tolist() for name, times in found.items()}


def peak(call: Callable[[], Any]) -> float:
    """Most memory in MiB that NumPy holds during a call, above what it held before."""
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        result = call()
        most = tracemalloc.get_traced_memory()[1] - before
        del result
    finally:
        tracemalloc.stop()
    return most / 2**20


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Slope of log value over log size, by least squares."""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def linear_form(phi_q: Any, phi_k: Any, v: Any) -> Any:
    """Attention from features as it is written down, all in memory."""
    return (phi_q @ (phi_k.T @ v)) / (phi_q @ phi_k.sum(0)[:, None])
