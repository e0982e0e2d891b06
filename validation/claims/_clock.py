"""Time and memory of functions, for claims whose tasks run alone."""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

__all__ = ["exponent", "medians", "peak"]


def medians(calls: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median seconds of each call; all run in turn, so that a busy machine slows them alike."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(repeats + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if i > 0:  # the first run warms up
                times[name].append(time.perf_counter() - start)
    return {name: float(np.median(seconds)) for name, seconds in times.items()}


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
