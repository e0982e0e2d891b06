"""Frequencies recovered from a black box: how many, how well, and tests of their law."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from itertools import combinations
from typing import Any

import numpy as np
from scipy import special

from ... import stats
from ...arrays.library import Floats
from ..candidate.adapter import Adapter
from ..candidate.failures import Failure
from ..truth.reference import CONTRACT
from .identities import Trial

__all__ = [
    "draws",
    "frequency",
    "lawful",
    "normal",
    "positive",
    "precise",
    "record",
    "recovery_error",
    "scale",
    "told",
]


_MISS = 1e-6  # probability of missing a discrepancy of the size called detectable


_MARGIN = 1.25  # a check is underpowered if it detects no less than this times its design


def lawful(adapter: Adapter) -> bool:
    """Whether an epsilon added to features leaves frequencies recoverable.

    In what is asked of a black box features are above e^-12 of the largest.
    """
    hidden = float(adapter["epsilon"]) * math.exp(12.0)
    return hidden < 1e-3


def precise(adapter: Adapter) -> bool:
    """Whether frequencies can be recovered to more digits than their law has."""
    return lawful(adapter) and bool(adapter["dtype"] in ("float32", "float64"))


def told(adapter: Adapter) -> bool:
    """Whether they can be however far out they are, or vectors: nothing is added to features."""
    return precise(adapter) and not adapter["epsilon"]


def positive(adapter: Adapter) -> bool:
    return bool(adapter["features"] == "positive")


_LEAST = 6  # draws, whatever the time
_TAILS = (2.0, 3.0, 3.5, 4.0)  # bounds beyond which normal numbers are counted,
_FEWEST = 10  # where so many are expected


def draws(t: Trial, one: Callable[[int], Floats], share: float = 1.0) -> Floats:
    """Results at consecutive seeds, as many as the level has or the time allows.

    How many is settled by the clock alone, whatever the results are.
    """
    planned = max(int(share * t.size), _LEAST)
    start, end = t.new_seed(), math.inf
    found: list[Floats] = []
    while len(found) < planned and time.perf_counter() < end:
        found.append(one(start + len(found)))
        if len(found) == _LEAST:  # of which the first may take longer
            end = time.perf_counter() + share * t.budget
    t.reached = len(found) / planned
    t.samples = max(t.samples, len(found))
    t.case = None
    return np.stack(found)


def frequency(out: Floats, keys: Floats) -> Floats:
    """The frequency at which keys weigh xi(k, omega) = exp(omega . k - |k|^2/2), from weights."""
    with np.errstate(invalid="ignore", divide="ignore"):
        log_ratio = np.log(out[..., 1:] / out[..., :1])
    square = np.sum(keys * keys, -1)
    right = log_ratio + (square[1:] - square[0]) / 2
    return np.linalg.solve(keys[1:] - keys[0], right[..., None])[..., 0]


def record(
    t: Trial,
    name: str,
    p: float,
    n: int,
    test: Callable[..., float] | None,
    /,
    *,
    tries: int = 1,
    hidden: float = 0.0,
    **parameters: Any,
) -> None:
    """Keep a p-value with what it detects, against what the level is designed to detect.

    `tries` is the number of p-values of which this is the smallest, corrected, and `hidden` what
    rounding may hide besides.
    """
    t.p[name] = float(p)
    if test is None:
        return
    planned = max(round(n / t.reached), 2)

    def detectable(alpha: float, n: int = n) -> float:
        return stats.min_discrepancy(test, n, alpha=alpha / tries, beta=_MISS, **parameters)

    t.power[name] = (
        lambda alpha: detectable(alpha) + hidden,
        _MARGIN * detectable(1e-6 / 40, planned) + (0.1 if hidden else 0.0),
    )


def normal(t: Trial, z: Floats, error: float, label: str = "") -> None:
    """All that is asked of rows that should be iid N(0, I), each row from one seed.

    Coordinates pooled and one by one, their tails, sums and differences of two, lengths, means,
    scale, and sums of rows from seeds near each other and far apart. `error` is how far off an
    entry may be.
    """
    from scipy import stats as laws

    n, d = z.shape
    if not np.all(np.isfinite(z)):
        raise Failure("frequencies that can be recovered from the results", "none for some seeds")
    delta = min(1.0, error / math.sqrt(2 * math.pi))  # the normal density is at most this steep
    p = stats.ks(z.ravel(), special.ndtr, error=delta)
    record(t, f"{label}coordinates", p, n * d, stats.ks, hidden=2 * delta)
    if d > 1:
        p = d * min(stats.ks(z[:, i], special.ndtr, error=delta) for i in range(d))
        record(t, f"{label}each coordinate", min(1, p), n, stats.ks, tries=d, hidden=2 * delta)
    if not precise(t.adapter):
        return  # what follows has no room for rounding
    record(t, f"{label}ties", _ties(z.ravel(), error), n * d, None)
    for bound in _TAILS:
        share = 2 * float(special.ndtr(-bound))
        if share * n * d >= _FEWEST:
            p = _exceedances(z, bound, share, error)
            record(t, f"{label}beyond {bound:g}", p, n * d, stats.binomial, p=share)
    length = np.sum(z * z, -1)
    p = stats.ks(length, laws.chi2(d).cdf, error=min(1.0, 2 * delta * d))
    record(t, f"{label}lengths", p, n, stats.ks)
    p = d * min(_mean(z[:, i], error) for i in range(d))
    record(t, f"{label}means", min(1.0, p), n, stats.normal_mean, tries=d)
    record(t, f"{label}scale", scale(z, error), n * d, stats.normal_scale)
    pairs = list(combinations(range(d), 2))
    if len(pairs) > 64:
        pairs = [pairs[i] for i in t.rng.choice(len(pairs), 64, replace=False)]
    if pairs:
        sums = [(z[:, i] + sign * z[:, j]) / math.sqrt(2) for i, j in pairs for sign in (1, -1)]
        p = min(1.0, len(sums) * min(scale(x, 1.5 * error) for x in sums))
        record(t, f"{label}pairs of coordinates", p, n, stats.normal_scale, tries=len(sums))
    lags = [lag for lag in (1, 2, 3, 4, 8, n // 2) if 2 * lag <= n]
    apart = []
    for lag in dict.fromkeys(lags):
        rows = z[: n // (2 * lag) * 2 * lag].reshape(-1, 2, lag, d)
        apart.append(scale((rows[:, 0] + rows[:, 1]) / math.sqrt(2), 1.5 * error))
    p = min(1.0, len(apart) * min(apart))
    record(t, f"{label}seeds apart", p, n * d // 4, stats.normal_scale, tries=len(apart))


def _exceedances(z: Floats, bound: float, share: float, error: float) -> float:
    """p-value of how many of normal numbers, known to within `error`, are beyond a bound."""
    size = np.abs(z)
    low, high = (int(np.sum(size > bound + e)) for e in (error, -error))
    if low <= share * z.size <= high:
        return 1.0
    return max(stats.binomial(count, z.size, share) for count in (low, high))


def scale(z: Floats, error: float) -> float:
    """p-value of the scale about 0 of normal numbers that are known to within `error`."""
    size = np.abs(z).ravel()
    low, high = np.maximum(size - error, 0.0), size + error
    if np.sum(low * low) <= size.size <= np.sum(high * high):
        return 1.0
    return max(stats.normal_scale(low), stats.normal_scale(high))


def _mean(z: Floats, error: float) -> float:
    """p-value of the mean of normal numbers that are known to within `error`."""
    return stats.normal_mean(z - np.clip(np.mean(z), -error, error))


def _ties(z: Floats, error: float) -> float:
    """p-value of the number of neighbours closer than their rounding, by Markov's inequality.

    Two independent normal numbers are within h with probability at most h / sqrt(pi).
    """
    close = int(np.sum(np.diff(np.sort(z)) <= 2 * error))
    pairs = z.size * (z.size - 1) / 2
    return min(1.0, pairs * 4 * error / math.sqrt(math.pi) / close) if close else 1.0


def recovery_error(t: Trial, d: int, c: float) -> float:
    """Rounding error of a recovered coordinate: that of a log ratio of two outputs, over c."""
    # Each output of honest evaluations in the halves is off by half an eps for each operation.
    unit = t.adapter.eps * (4 * CONTRACT[t.adapter["dtype"]] if t.adapter.eps < 1e-4 else 1.0)
    hidden = float(t.adapter["epsilon"]) * math.exp(12.0)
    return (unit * (1 + (math.sqrt(d) + 5) * c + c * c / 2) + hidden) / c
