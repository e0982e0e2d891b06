"""Frequencies recovered from a black box: how many, how well, and tests of their law."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import combinations
from typing import Any

import numpy as np
from scipy import special

from ....arrays.library import Floats
from ....estimators.inputs import open_partials
from ... import stats
from ..candidate.adapter import Adapter
from ..candidate.failures import Failure, WrongRecord
from ..candidate.limits import Keywords
from ..truth.allowed import CONTRACT, reference
from .trials import CheckRun, add_condition


def refuse_other_formulas(adapter: Adapter) -> None:
    """Refuse a record whose formula is not the one by which frequencies are recovered."""
    record = adapter.record
    plain = Adapter(adapter.fn, "kernel" if adapter.has("pairs") else "rfa", (), adapter.tags)
    formulas = {open_partials(x.naive)[0] for x in (record, plain.record)}
    if len(formulas) == 1 or not (adapter.has("random-features") and record.takes("omega")):
        return
    arrays = tuple(np.random.default_rng(0).standard_normal((4, 3, 3)))
    asked = arrays[: len(record.arrays)], {"omega": arrays[3]}
    (ours, allowed), (own, more) = (reference(x, *asked) for x in (plain, adapter))
    if not np.max(np.abs(own - ours)) <= allowed + more:
        raise WrongRecord(
            f"`traits` of the record of {record.name} must leave out 'random-features': its "
            f"formula differs from that of {plain.estimator} at the same frequencies, which the "
            "checks of this trait recover by it. Without the trait, the formula and the "
            "distribution of results are tested as the record has them."
        )


_MISS = 1e-6  # probability of missing a discrepancy of the size called detectable


_MARGIN = 1.25  # a check is underpowered if it detects no less than this times its design


@add_condition
def lawful(adapter: Adapter) -> bool:
    """Return whether an epsilon added to features leaves frequencies recoverable.

    In what is asked of a black box features are above e^-12 of the largest.
    """
    hidden = float(adapter["epsilon"]) * math.exp(12.0)
    return hidden < 1e-3


@add_condition
def precise(adapter: Adapter) -> bool:
    """Return whether frequencies can be recovered to more digits than their law has."""
    return lawful(adapter) and bool(adapter["dtype"] in ("float32", "float64"))


@add_condition
def told(adapter: Adapter) -> bool:
    """Return whether far frequencies and vectors are recovered too: nothing is added."""
    return precise(adapter) and not adapter["epsilon"]


def positive(adapter: Adapter) -> bool:
    return bool(adapter["features"] == "positive")


_FEWEST_DRAWS = 6  # draws, whatever the time
_TAILS = (2.0, 3.0, 3.5, 4.0)  # bounds beyond which normal numbers are counted,
_FEWEST_BEYOND = 10  # where so many are expected
FAR_OFF = 6.0  # standard errors from which a moment is named as the one that is wrong

Moment = tuple[str, Floats, float, float]  # words, numbers, and their mean and variance


def draw_results(t: CheckRun, one: Callable[[int], Floats], share: float = 1.0) -> Floats:
    """Return results at consecutive seeds, as many as the level has or the time allows.

    How many is settled by the clock alone, whatever the results are.
    """
    planned = max(int(share * t.size), _FEWEST_DRAWS)
    start, end = t.new_seed(), math.inf
    results: list[Floats] = []
    while len(results) < planned and time.perf_counter() < end:
        results.append(one(start + len(results)))
        if len(results) == _FEWEST_DRAWS:  # of which the first may take longer
            end = time.perf_counter() + share * t.budget
    t.reached = len(results) / planned
    t.samples = max(t.samples, len(results))
    t.case = None
    return np.stack(results)


def recover_frequency(out: Floats, keys: Floats) -> Floats:
    """Recover the frequency at which keys weigh xi(k, omega) from their weights."""
    with np.errstate(invalid="ignore", divide="ignore"):
        log_ratio = np.log(out[..., 1:] / out[..., :1])
    square = np.sum(keys * keys, -1)
    right = log_ratio + (square[1:] - square[0]) / 2
    return np.linalg.solve(keys[1:] - keys[0], right[..., None])[..., 0]


def keep_p(
    t: CheckRun,
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
    # What the level is designed to detect is reckoned with all its seeds, whatever time allowed.
    planned = max(round(n / t.reached), 2)

    def detectable(alpha: float, n: int = n) -> float:
        return stats.min_discrepancy(test, n, alpha=alpha / tries, beta=_MISS, **parameters)

    t.power[name] = (
        lambda alpha: detectable(alpha) + hidden,
        _MARGIN * detectable(1e-6 / 40, planned) + (0.1 if hidden else 0.0),
    )


def check_normal(t: CheckRun, z: Floats, error: float, label: str = "") -> None:
    """Test all that is known of rows that are iid N(0, I), each row from one seed.

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
    keep_p(t, f"{label}coordinates", p, n * d, stats.ks, hidden=2 * delta)
    if d > 1:
        # Smallest of d p-values, by the union bound.
        p = d * min(stats.ks(z[:, i], special.ndtr, error=delta) for i in range(d))
        keep_p(t, f"{label}each coordinate", min(1, p), n, stats.ks, tries=d, hidden=2 * delta)
    if not precise(t.adapter):
        return  # what follows has no room for rounding
    keep_p(t, f"{label}ties", _p_of_ties(z.ravel(), error), n * d, None)
    for bound in _TAILS:
        share = 2 * float(special.ndtr(-bound))
        if share * n * d >= _FEWEST_BEYOND:
            p = _p_of_tails(z, bound, share, error)
            keep_p(t, f"{label}beyond {bound:g}", p, n * d, stats.binomial, p=share)
    length = np.sum(z * z, -1)
    p = stats.ks(length, laws.chi2(d).cdf, error=min(1.0, 2 * delta * d))
    keep_p(t, f"{label}lengths", p, n, stats.ks)
    p = d * min(stats.normal_mean(x - np.clip(np.mean(x), -error, error)) for x in z.T)
    keep_p(t, f"{label}means", min(1.0, p), n, stats.normal_mean, tries=d)
    keep_p(t, f"{label}scale", p_of_scale(z, error), n * d, stats.normal_scale)
    pairs = list(combinations(range(d), 2))
    # Many pairs cost time, and each takes its part of the level.
    if len(pairs) > 64:
        pairs = [pairs[i] for i in t.rng.choice(len(pairs), 64, replace=False)]
    if pairs:
        sums = [(z[:, i] + sign * z[:, j]) / math.sqrt(2) for i, j in pairs for sign in (1, -1)]
        p = min(1.0, len(sums) * min(p_of_scale(x, 1.5 * error) for x in sums))
        keep_p(t, f"{label}pairs of coordinates", p, n, stats.normal_scale, tries=len(sums))
    lags = [lag for lag in (1, 2, 3, 4, 8, n // 2) if 2 * lag <= n]
    apart = []
    for lag in dict.fromkeys(lags):
        rows = z[: n // (2 * lag) * 2 * lag].reshape(-1, 2, lag, d)
        apart.append(p_of_scale((rows[:, 0] + rows[:, 1]) / math.sqrt(2), 1.5 * error))
    p = min(1.0, len(apart) * min(apart))
    keep_p(t, f"{label}pairs of seeds", p, n * d // 4, stats.normal_scale, tries=len(apart))


def note_moments(t: CheckRun, label: str, moments: Iterable[Moment]) -> None:
    """Note the first moment that is far off: how large an error is says more than a p-value."""
    for words, x, want, variance in moments:
        mean = float(np.mean(x))
        if abs(mean - want) > FAR_OFF * math.sqrt(variance / len(x)):
            t.effects.setdefault(label, f"{words} = {round(mean, 9):.3g}, should be {want:.3g}")
            return


def frequency_moments(omega: Floats) -> Iterator[Moment]:
    """Yield moments of frequencies that are N(0, I), the plainest first."""
    (n, d), square = omega.shape, np.sum(omega * omega, -1)
    yield "mean |omega|^2", square, d, 2 * d
    yield "variance of |omega|^2", (square - d) ** 2, 2 * d, 8 * d * d + 48 * d
    for power, want, variance in ((1, 0, 1), (2, 1, 2), (4, 3, 96)):
        for i in range(d):
            words = f"mean omega[{i}]{f'^{power}' * (power > 1)}"
            yield words, omega[:, i] ** power, want, variance
    for i, j in combinations(range(min(d, 8)), 2):
        yield f"mean omega[{i}] omega[{j}]", omega[:, i] * omega[:, j], 0, 1
    if n > 1:
        both = np.sum(omega[:-1] * omega[1:], -1)
        yield "mean omega . omega' of consecutive seeds", both, 0, d


def _p_of_tails(z: Floats, bound: float, share: float, error: float) -> float:
    """Return the p-value of the count of normal numbers, off by `error`, beyond a bound."""
    size = np.abs(z)
    low, high = (int(np.sum(size > bound + e)) for e in (error, -error))
    if low <= share * z.size <= high:
        return 1.0
    return max(stats.binomial(count, z.size, share) for count in (low, high))


def p_of_scale(z: Floats, error: float) -> float:
    """Return the p-value of the scale about 0 of normal numbers that are off by `error`."""
    size = np.abs(z).ravel()
    low, high = np.maximum(size - error, 0.0), size + error
    if np.sum(low * low) <= size.size <= np.sum(high * high):
        return 1.0
    return max(stats.normal_scale(low), stats.normal_scale(high))


def _p_of_ties(z: Floats, error: float) -> float:
    """Return a p-value for neighbours closer than their rounding, by Markov's inequality.

    Two independent normal numbers are within h with probability at most h / sqrt(pi).
    """
    close = int(np.sum(np.diff(np.sort(z)) <= 2 * error))
    pairs = z.size * (z.size - 1) / 2
    return min(1.0, pairs * 4 * error / math.sqrt(math.pi) / close) if close else 1.0


def recovery_error(t: CheckRun, d: int, c: float) -> float:
    """Return the error of a recovered coordinate: that of a log ratio of outputs, over c."""
    # Each output of honest evaluations in the halves is off by half an eps for each operation.
    unit = t.adapter.eps * (4 * CONTRACT[t.adapter["dtype"]] if t.adapter.eps < 1e-4 else 1.0)
    hidden = float(t.adapter["epsilon"]) * math.exp(12.0)
    return (unit * (1 + (math.sqrt(d) + 5) * c + c * c / 2) + hidden) / c


def estimate_kernels(t: CheckRun, x: Floats, y: Floats, samples: int, seed: int) -> Floats:
    """Return kernel estimates of x with each row of y at one seed."""
    options: Keywords = {**t.adapter.record.sized(samples), "seed": seed}
    # A kernel estimate is asked for directly; attention tells it by the ratio of two weights.
    if t.adapter.has("pairs"):
        x = np.broadcast_to(x, y.shape)
        return np.asarray(t.call(t.adapter.exact(x), y, **options), float)
    root = t.adapter.root(len(x))
    anchor = x if t.adapter["features"] == "trigonometric" else -x
    keys = np.concatenate([anchor[None], y]) / root
    out = t.call(x[None] / root, keys, np.eye(len(keys)), **options)[0]
    if not (out[0] > 0 or (t.adapter["features"] == "trigonometric" and out[0] != 0)):
        raise Failure("a positive weight of the key -q, where all terms are positive", f"{out[0]}")
    return np.asarray(out[1:] / out[0] * math.exp(sign_of_norm(t) * np.sum(x * x)), float)


def recover_alone(t: CheckRun, d: int, c: float, seed: int) -> Floats:
    """Recover the frequency at S = 1, with a positive first coordinate if it has no sign."""
    zero, axes = np.zeros(d), c * np.eye(d)
    if positive(t.adapter):
        with np.errstate(invalid="ignore", divide="ignore"):
            return (np.log(estimate_kernels(t, zero, axes, 1, seed)) + c * c / 2) / c
    # cosh and cos lose the sign of each coordinate; sums with the first tell which agree with it.
    y = np.concatenate([axes, axes[:1] + axes[1:]])
    even = estimate_kernels(t, zero, y, 1, seed) * np.exp(-np.sum(y * y, -1) / 2 * sign_of_norm(t))
    inverse = np.arccosh if t.adapter["features"] == "hyperbolic" else np.arccos
    with np.errstate(invalid="ignore"):
        size = inverse(np.clip(even[:d], *((1, np.inf) if sign_of_norm(t) < 0 else (-1, 1)))) / c
    forward = np.cosh if sign_of_norm(t) < 0 else np.cos
    same = np.abs(forward(c * (size[0] + size[1:])) - even[d:])
    other = np.abs(forward(c * (size[0] - size[1:])) - even[d:])
    return np.concatenate([size[:1], np.where(same <= other, 1, -1) * size[1:]])


def sign_of_norm(t: CheckRun) -> int:
    """Return the sign of |y|^2/2 in an estimate at x = 0; trigonometric features have +."""
    return 1 if t.adapter["features"] == "trigonometric" else -1


def axes_and_sums(d: int, c: float) -> Floats:
    """Return points c e_i, 2 c e_i, and c (e_0 + e_i), which tell what belongs together."""
    axes = np.eye(d)
    return c * np.concatenate([axes, 2 * axes, axes[:1] + axes[1:]])


def _solve_power_sums(first: Floats, second: Floats) -> tuple[Floats, Floats]:
    """Return two numbers from their sum and the sum of their squares, the larger one first."""
    gap = np.sqrt(np.maximum(2 * second - first * first, 0.0))
    larger = (first + gap) / 2
    return larger, (first * first - second) / (2 * larger)  # their product, without cancellation


def separation(mean: Floats, d: int) -> float:
    """Return how far apart the two recovered numbers are, at least."""
    a, b = _solve_power_sums(2 * mean[..., :d], 2 * mean[..., d : 2 * d])
    return float(np.min(np.abs(a - b) / (a + np.abs(b)))) if np.all(b > 0) else -1.0


def match_pair(mean: Floats, d: int, c: float) -> Floats:
    """Return two frequencies from the means at c e_i, 2 c e_i and c (e_0 + e_i)."""
    a, b = _solve_power_sums(2 * mean[:d], 2 * mean[d : 2 * d])
    a, b = a.copy(), b.copy()
    for i in range(1, d):
        straight = (a[0] * a[i] + b[0] * b[i]) / 2
        crossed = (a[0] * b[i] + b[0] * a[i]) / 2
        measured = mean[2 * d + i - 1]
        if abs(crossed - measured) < abs(straight - measured):
            a[i], b[i] = b[i], a[i]
    if not (np.all(a > 0) and np.all(b > 0)):
        raise Failure("two frequencies that explain the results at S = 2", "none that do")
    omega: Floats = np.log(np.stack([a, b])) / c
    return omega
