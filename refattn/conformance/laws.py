r"""Checks of what is random: frequencies recovered from a black box, and tests of their laws.

A black box gives no frequencies, but its outputs determine them. With positive features the
kernel estimate is

.. math:: \hat\kappa(x, y) = \frac1S \sum_s e^{\omega_s \cdot (x + y) - (|x|^2 + |y|^2)/2},

and :math:`\hat\kappa(x, -x) = e^{-|x|^2}` whatever the frequencies. So if the keys of RFA are -x
and some y, and the values are the rows of the identity, the ratio of its outputs is the kernel
estimate itself. At x = 0, S = 1 and y = c e_i its logarithm is c omega_i - c^2/2; at S = 2 the
estimates at c e_i and 2 c e_i are the power sums of two numbers, which determine them. One sample
of randomized attention, and one proposal of LARA, give omega in the same way.

Recovered frequencies are tested by exact laws. Their rounding error widens the hypothesis, never
the level.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import special
from scipy import stats as laws

from .. import kernels, sampling, stats, theory
from ..estimators import linear_randomized_attention
from .adapter import Adapter, Failure
from .checks import Trial, check, reference, tolerance

__all__: list[str] = []

Floats = npt.NDArray[Any]

_MISS = 1e-6  # probability of missing a discrepancy of the size called detectable
_MARGIN = 1.25  # a check is underpowered if it detects no less than this times its design


def _black_box(adapter: Adapter) -> bool:
    return adapter["features"] == "positive" and not adapter["epsilon"]


def _precise(adapter: Adapter) -> bool:
    """Whether frequencies can be recovered to more digits than their law has."""
    return _black_box(adapter) and adapter["dtype"] in ("float32", "float64")


def _draws(t: Trial, one: Callable[[int], Floats], share: float = 1.0) -> Floats:
    """Results at consecutive seeds, as many as the level has or the time allows.

    How many is settled by the time of the first few, before any result is looked at.
    """
    count = max(int(share * t.size), 2)
    start = t.new_seed()
    began = time.perf_counter()
    found = [one(start), one(start + 1)]
    began, first = time.perf_counter(), time.perf_counter() - began
    found.append(one(start + 2))
    each = min(max(time.perf_counter() - began, 1e-9), first)
    count = max(3, min(count, int(share * t.budget / each)))
    found += [one(start + i) for i in range(3, count)]
    t.samples = max(t.samples, count)
    t.case = None
    return np.stack(found)


def _record(
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
    planned = max(round(n * t.size / max(t.samples, 1)), 2)

    def detectable(alpha: float, n: int = n) -> float:
        return stats.min_discrepancy(test, n, alpha=alpha / tries, beta=_MISS, **parameters)

    t.power[name] = (
        lambda alpha: detectable(alpha) + hidden,
        _MARGIN * detectable(1e-6 / 40, planned) + (0.05 if hidden else 0.0),
    )


def _normal(t: Trial, z: Floats, error: float) -> None:
    """All that is asked of rows that should be iid N(0, I), each row from one seed.

    Coordinates pooled and one by one, a diagonal direction, lengths, means, scale, and the
    scale of sums of rows from successive seeds.
    """
    n, d = z.shape
    if not np.all(np.isfinite(z)):
        raise Failure("frequencies that can be recovered from the results", "none for some seeds")
    delta = error / math.sqrt(2 * math.pi)  # the normal density is at most this steep
    p = stats.ks(z.ravel(), special.ndtr, error=delta)
    _record(t, "coordinates", p, n * d, stats.ks, hidden=2 * delta)
    p = d * min(stats.ks(z[:, i], special.ndtr, error=delta) for i in range(d))
    _record(t, "each coordinate", min(1.0, p), n, stats.ks, tries=d, hidden=2 * delta)
    if error > 1e-3:
        return  # what follows has no room for rounding of this size
    _record(t, "ties", _ties(z.ravel(), error), n * d, None)
    diagonal = np.sum(z, -1) / math.sqrt(d)
    p = stats.ks(diagonal, special.ndtr, error=min(1.0, math.sqrt(d) * delta))
    _record(t, "diagonal", p, n, stats.ks)
    length = np.sum(z * z, -1)
    p = stats.ks(length, laws.chi2(d).cdf, error=min(1.0, 2 * delta * d))
    _record(t, "lengths", p, n, stats.ks)
    p = d * min(stats.normal_mean(z[:, i]) for i in range(d))
    _record(t, "means", min(1.0, p), n, stats.normal_mean, tries=d)
    _record(t, "scale", stats.normal_scale(z.ravel()), n * d, stats.normal_scale)
    pairs = (z[: n // 2 * 2 : 2] + z[1::2][: n // 2]) / math.sqrt(2)
    p = stats.normal_scale(pairs.ravel())
    _record(t, "successive seeds", p, pairs.size, stats.normal_scale)


def _ties(z: Floats, error: float) -> float:
    """p-value of the number of neighbours closer than their rounding, by Markov's inequality.

    Two independent normal numbers are within h with probability at most h / sqrt(pi).
    """
    close = int(np.sum(np.diff(np.sort(z)) <= 2 * error))
    pairs = z.size * (z.size - 1) / 2
    return min(1.0, pairs * 2 * error / math.sqrt(math.pi) / close) if close else 1.0


def _estimates(t: Trial, x: Floats, y: Floats, samples: int, seed: int) -> Floats:
    """Kernel estimates of x with each row of y at one seed."""
    options: dict[str, Any] = {t.adapter.signature.samples or "": samples, "seed": seed}
    if t.adapter.estimator == "kernel":
        x = np.broadcast_to(x, y.shape)
        return np.asarray(t.call(t.adapter.exact(x), y, **options), float)
    root = t.adapter.root(len(x))
    anchor = x if t.adapter["features"] == "trigonometric" else -x
    keys = np.concatenate([anchor[None], y]) / root
    out = t.call(x[None] / root, keys, np.eye(len(keys)), **options)[0]
    if not out[0] > 0:
        raise Failure("a positive weight of the key -q, where all terms are positive", f"{out[0]}")
    sign = 1 if t.adapter["features"] == "trigonometric" else -1
    return np.asarray(out[1:] / out[0] * math.exp(sign * np.sum(x * x)), float)


def _recovery_error(t: Trial, d: int, c: float) -> float:
    """Rounding error of a recovered coordinate: that of a log ratio of two outputs, over c."""
    arrays: tuple[Floats, ...] = (
        np.zeros((1, d)),
        np.full((1, d), c / t.adapter.root(d) / math.sqrt(d)),
        np.ones((1, 1)),
    )
    if t.adapter.estimator == "kernel":
        arrays = arrays[:2]
    share = 1.0 if _precise(t.adapter) else 0.1  # as honest evaluations in halves err
    return share * 4 * tolerance(t.adapter, arrays, {}, 1.0) / c


@check(
    "kernel",
    "rfa",
    claim="frequencies are N(0, I), independent from seed to seed",
    layer="law",
    needs=_black_box,
)
def frequency_law(t: Trial) -> None:
    """Frequencies recovered at S = 1, d = 8."""
    d, c = 8, 1.0
    y = c * np.eye(d)

    def one(seed: int) -> Floats:
        with np.errstate(invalid="ignore", divide="ignore"):
            return (np.log(_estimates(t, np.zeros(d), y, 1, seed)) + c * c / 2) / c

    _normal(t, _draws(t, one), _recovery_error(t, d, c))


@check(
    "rfa",
    claim="frequencies given their mean and covariance have that law",
    layer="law",
    needs=lambda adapter: _precise(adapter) and adapter.can("moments"),
)
def given_moments_law(t: Trial) -> None:
    """Frequencies recovered at S = 1, whitened by the moments given."""
    d, c = 4, 1.0
    mean = t.normal(d, size=0.5)
    skew = np.eye(d) + t.normal(d, d, size=0.3)
    factor = np.linalg.cholesky(skew @ skew.T + np.eye(d))
    cov, root = factor @ factor.T, t.adapter.root(d)
    keys = np.concatenate([np.zeros((1, d)), c * np.eye(d)]) / root

    def one(seed: int) -> Floats:
        out = t.call(
            np.zeros((1, d)), keys, np.eye(d + 1), num_features=1, seed=seed, mean=mean, cov=cov
        )[0]
        with np.errstate(invalid="ignore", divide="ignore"):
            omega = (np.log(out[1:] / out[0]) + c * c / 2) / c
        return np.linalg.solve(factor, omega - mean)

    _normal(t, _draws(t, one), _recovery_error(t, d, c))


def _pairs(t: Trial, d: int, c: float, seed: int, extra: Floats | None = None) -> list[Floats]:
    """The two numbers e^{c omega_si} for each i, in either order, at S = 2; or complex ones.

    Their power sums are estimates at c e_i and 2 c e_i. With `extra` points y, also the means of
    e^{omega . y} there.
    """
    y = np.concatenate([c * np.eye(d), 2 * c * np.eye(d), *([] if extra is None else [extra])])
    mean = _estimates(t, np.zeros(d), y, 2, seed) * np.exp(np.sum(y * y, -1) / 2)
    first, second = 2 * mean[:d], 2 * mean[d : 2 * d]
    return [*_roots(first, second), mean[2 * d :], mean]


def _roots(first: Floats, second: Floats) -> tuple[Floats, Floats]:
    """Two numbers from their sum and the sum of their squares, the larger one first."""
    gap = np.sqrt(np.maximum(2 * second - first * first, 0.0))
    larger = (first + gap) / 2
    return larger, (first * first - second) / (2 * larger)  # their product, without cancellation


@check(
    "kernel",
    "rfa",
    claim="two frequencies of one set are coupled as declared",
    layer="law",
    needs=lambda adapter: (
        _precise(adapter) and adapter["coupling"] in ("iid", "orthogonal", "antithetic")
    ),
)
def frequency_pairs(t: Trial) -> None:
    """Both frequencies recovered at S = 2: independent, at right angles, or opposite."""
    d, c, coupling = 4, 0.5, t.adapter["coupling"]

    def one(seed: int) -> Floats:
        a, b, *_ = _pairs(t, d, c, seed)
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.stack([np.log(a), np.log(b)]) / c

    pairs = _draws(t, one, share=0.02 if coupling != "iid" else 1.0)
    # Two numbers that are nearly equal are recovered to the root of the precision only.
    error = math.sqrt(_recovery_error(t, d, c))
    if coupling == "antithetic":
        _together(t, np.sum(pairs, 1), "omega_1 + omega_2 = 0", error)
    elif coupling == "orthogonal":
        _together(t, np.sum(pairs[:, 0] * pairs[:, 1], -1), "omega_1 . omega_2 = 0", 4 * d * error)
    else:
        total = np.sum(pairs, 1) / math.sqrt(2)
        gap = (pairs[:, 0] - pairs[:, 1]) / math.sqrt(2)
        n, delta = total.size, error / math.sqrt(2 * math.pi)
        p = stats.ks(total.ravel(), special.ndtr, error=delta)
        _record(t, "sums", p, n, stats.ks)
        p = stats.ks(np.abs(gap).ravel(), laws.halfnorm.cdf, error=2 * delta)
        _record(t, "gaps", p, n, stats.ks)
        for name, x in (("scale of sums", total), ("scale of gaps", gap)):
            _record(t, name, stats.normal_scale(x.ravel()), n, stats.normal_scale)


def _together(t: Trial, x: Floats, rule: str, allowed: float) -> None:
    worst = float(np.max(np.abs(x)))
    t.error = worst / allowed
    if not worst <= allowed:
        raise Failure(f"{rule}, to within {allowed:.2g}", f"{worst:.3g} for some seed")


@check(
    "kernel",
    "rfa",
    claim="sums over many frequencies, and over their squares, have the laws of their coupling",
    layer="law",
    needs=_precise,
)
def feature_sums(t: Trial) -> None:
    """Means of omega_i and of omega_i^2 over fifteen or sixteen features, from small differences.

    The mean of e^{omega . y} at y = +-c e_i and +-2 c e_i gives both up to terms in c^4. If the
    features are iid they are exactly normal and chi-squared; else they are compared with those of
    the package's own draws (DKWM).
    """
    d, coupling = 4, t.adapter["coupling"]
    samples = 15 if coupling in ("iid", "orthogonal") else 16  # odd where blocks need not be whole
    c = 0.01 if t.adapter["dtype"] == "float64" else 0.04
    steps = c * np.array([1.0, -1.0, 2.0, -2.0])
    y = t.adapter.exact((steps[:, None, None] * np.eye(d)).reshape(-1, d))
    square = np.exp(np.sum(y * y, -1) / 2)
    c = float(np.max(y[:d]))  # as it is in the candidate's dtype

    def one(seed: int) -> Floats:
        mean = (_estimates(t, np.zeros(d), y, samples, seed) * square).reshape(4, d)
        odd, even = mean[::2] - mean[1::2], mean[::2] + mean[1::2] - 2
        first = (8 * odd[0] - odd[1]) / (12 * c)
        second = (16 * even[0] - even[1]) / (12 * c * c)
        return np.stack([math.sqrt(samples) * first, samples * second])

    found = _draws(t, one)
    # Of terms in c^4 with |omega| below 8, and of rounding in differences.
    rounding = _recovery_error(t, d, c) * c
    first = math.sqrt(samples) * (c**4 * 8.0**5 / 30 + 2 * rounding / c)
    second = samples * (c**4 * 8.0**6 / 90 + 4 * rounding / c**2)
    if coupling == "iid":
        _normal(t, found[:, 0], first)
        delta = second * 0.3 / math.sqrt(samples)  # the density of chi^2 is below that
        if delta < 0.01:
            p = stats.ks(found[:, 1].ravel(), laws.chi2(samples).cdf, error=delta)
            _record(t, "squares", p, found[:, 1].size, stats.ks, hidden=2 * delta)
        return
    own = _own_frequencies(samples, d, coupling, t.size, t.rng)
    sums = np.stack([math.sqrt(samples) * np.mean(own, 1), np.sum(own * own, 1)], 1)
    for j, name in enumerate(("sums", "squares")):
        if name == "sums" and coupling == "antithetic":
            continue  # they are 0 and rounding, which `frequency_pairs` sees to
        for i in (0, d - 1):
            p = stats.dkwm_two_sample(found[:, j, i], sums[:, j, i])
            test, many = stats.dkwm_two_sample, len(sums)
            _record(t, f"{name}, axis {i}", p, len(found), test, reference=many)


@check(
    "kernel",
    "rfa",
    claim="estimates at one seed follow from the frequencies recovered at it",
    needs=lambda adapter: _precise(adapter),
)
def recovered_values(t: Trial) -> None:
    """Two frequencies from outputs along the axes predict outputs at other points."""
    d, c = 3, 0.5
    extra = c * (np.eye(d)[:1] + np.eye(d)[1:])  # which number belongs with which
    start = t.new_seed()
    best = max(range(start, start + 8), key=lambda seed: _separation(_pairs(t, d, c, seed)))
    *_, mean = _pairs(t, d, c, best, extra)
    options: dict[str, Any] = {t.adapter.signature.samples or "": 2, "seed": best}
    count = len(mean) + 1
    if t.adapter.estimator == "kernel":
        arrays: tuple[Floats, ...] = tuple(t.normal(count, d, size=s) for s in (0.7, 0.9))
    else:
        root = t.adapter.root(d)
        q, k = (t.normal(m, d, size=s / root) for m, s in ((1, 0.7), (count, 0.9)))
        arrays = (q, k, t.normal(count, d))

    def predict(mean: Floats) -> tuple[Any, Any]:
        return reference(t.adapter, arrays, {"omega": _paired(mean, d, c)})

    got = t.call(*arrays, **options)
    want, allowed = predict(mean)
    # The error of each mean moves the prediction: to first order, by the sum of the moves.
    unit = _recovery_error(t, d, c) * c
    for i, size in enumerate(mean):
        moved = mean.copy()
        moved[i] += unit * size * 2
        allowed = allowed + float(np.max(np.abs(predict(moved)[0] - want)))
    t.equal(got, want, float(allowed))


def _separation(pair: list[Floats]) -> float:
    a, b = pair[0], pair[1]
    return float(np.min(np.abs(a - b) / (a + np.abs(b)))) if np.all(b > 0) else -1.0


def _paired(mean: Floats, d: int, c: float) -> Floats:
    """Two frequencies from the means at c e_i, 2 c e_i and c (e_0 + e_i)."""
    a, b = _roots(2 * mean[:d], 2 * mean[d : 2 * d])
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


@check(
    "kernel",
    "rfa",
    claim="the average over many features has the law of its coupling, and the right mean",
    layer="bound",
    needs=lambda adapter: adapter["dtype"] in ("float32", "float64") and not adapter["epsilon"],
)
def feature_average(t: Trial) -> None:
    """Fifteen or sixteen features at x + y along an axis, either way, and along the diagonal.

    The distribution of the estimate is compared with that of the package's own draws (DKWM), and
    its mean with the kernel (Catoni, with the variance of the theory).
    """
    d, features, coupling = 4, t.adapter["features"], t.adapter["coupling"]
    samples = 15 if coupling in ("iid", "orthogonal") else 16  # odd where blocks need not be whole
    x = t.normal(d, size=0.3)
    axes = np.stack([np.eye(d)[0], -np.eye(d)[0], np.eye(d)[-1], np.full(d, d**-0.5)])
    y = t.adapter.exact(axes - x)
    found = _draws(t, lambda seed: _estimates(t, x, y, samples, seed))
    omega = _own_frequencies(samples, d, coupling, t.size, t.rng)
    own = np.stack([kernels.estimate(x, z, omega, features=features) for z in y], -1)
    n, many = len(found), len(own)
    for i, name in enumerate(("axis 0", "axis 0 reversed", f"axis {d - 1}", "diagonal")):
        p = stats.dkwm_two_sample(found[:, i], own[:, i])
        _record(t, f"law, {name}", p, n, stats.dkwm_two_sample, reference=many)
        if coupling in theory.COUPLINGS:
            kernel = math.exp(float(x @ y[i]))
            variance = theory.kernel_variance(
                x, y[i], features=features, coupling=coupling, num_features=samples
            )
            cap = float(variance) / kernel**2
            p = stats.catoni(found[:, i] / kernel, 1.0, cap)
            _record(t, f"mean, {name}", p, n, stats.catoni, variance=cap)


# Own draws for each of the candidate's: as many as do not dominate the time.
_OWN = {"iid": 25, "sobol": 2, "halton": 2}


def _own_frequencies(
    samples: int, d: int, coupling: str, size: int, rng: np.random.Generator
) -> Floats:
    """Many sets of frequencies of the package's own, (sets, samples, d)."""
    sets = min(_OWN.get(coupling, 5) * size, 100_000)
    if coupling == "iid":
        return rng.standard_normal((sets, samples, d))
    return np.stack(
        [sampling.draw(samples, d, coupling=coupling, rng=rng).omega for _ in range(sets)]
    )


def _target(t: Trial, d: int) -> tuple[Floats, Floats, Floats]:
    """A query, keys in general position and their weights, in kernel coordinates."""
    q = t.normal(d)
    q[-1] = 0.0
    keys = np.concatenate([np.zeros((1, d)), np.eye(d)]) + t.normal(d, size=0.3)
    keys[:, -1] += 1.75 * (-1.0) ** np.arange(d + 1)  # two groups far apart, of similar weights
    root = t.adapter.root(d)
    q, keys = (root * t.adapter.exact(z / root) for z in (q, keys))
    return q, keys, special.softmax(keys @ q)


def _frequency(out: Floats, keys: Floats) -> Floats:
    """The frequency at which keys weigh xi(k, omega) = exp(omega . k - |k|^2/2), from weights."""
    with np.errstate(invalid="ignore", divide="ignore"):
        log_ratio = np.log(out[..., 1:] / out[..., :1])
    square = np.sum(keys * keys, -1)
    right = log_ratio + (square[1:] - square[0]) / 2
    return np.linalg.solve(keys[1:] - keys[0], right[..., None])[..., 0]


@check(
    "ra",
    claim="frequencies of a query are drawn from its target, one mixture of Gaussians",
    layer="law",
    needs=lambda adapter: _precise(adapter),
)
def target_law(t: Trial) -> None:
    """Frequencies recovered from single samples of the second of three queries."""
    _target_law(t, None)


@check(
    "ra",
    claim="frequencies are drawn from the target over the keys that are visible",
    layer="law",
    needs=lambda adapter: _precise(adapter) and adapter.can("mask"),
)
def masked_target_law(t: Trial) -> None:
    """The same with the key of the largest weight masked."""
    _target_law(t, 1)


def _target_law(t: Trial, hidden: int | None) -> None:
    d = 4
    q, keys, weight = _target(t, d)
    root = t.adapter.root(d)
    queries = np.stack([t.normal(d), q, t.normal(d)]) / root
    shown = keys
    options: dict[str, Any] = {}
    if hidden is not None:
        shown = np.concatenate([keys, (2 * q)[None]])
        options["mask"] = np.broadcast_to(np.arange(d + 2) <= d, (3, d + 2)).copy()
    queries[1] = q / root
    values = np.eye(len(shown))

    def one(seed: int) -> Floats:
        out = t.call(queries, shown / root, values, num_samples=1, seed=seed, **options)[1]
        return _frequency(out[: d + 1], keys)

    omega = _draws(t, one)
    size = float(np.max(np.abs(omega), initial=1.0)) if np.all(np.isfinite(omega)) else 1.0
    spread = float(np.linalg.norm(np.linalg.inv(keys[1:] - keys[0]), 2))
    error = 64 * t.adapter.eps * (1 + size * float(np.max(np.abs(keys))) * d) * spread
    _normal(t, _rosenblatt(omega, q + keys, weight), error)


def _rosenblatt(omega: Floats, centres: Floats, weight: Floats) -> Floats:
    """Turn draws from the mixture of N(centre_j, I) into iid N(0, I) rows.

    U_i is the distribution function of coordinate i given those before it (Rosenblatt, 1952).
    """
    log_r = np.broadcast_to(np.log(weight), (len(omega), len(weight)))
    found = []
    for i in range(omega.shape[-1]):
        z = omega[:, i, None] - centres[:, i]
        log_r = log_r - special.logsumexp(log_r, -1, keepdims=True)
        # Both tails in the log domain, or far coordinates are lost to rounding.
        low = special.logsumexp(log_r + special.log_ndtr(z), -1)
        high = special.logsumexp(log_r + special.log_ndtr(-z), -1)
        found.append(np.where(low < high, special.ndtri_exp(low), -special.ndtri_exp(high)))
        log_r = log_r - z * z / 2
    return np.stack(found, -1)


@check("ra", claim="each sample chooses its key anew, light ones too", layer="law")
def choices(t: Trial) -> None:
    """How many of 16 samples choose one of a thousand light keys: a binomial law.

    A heavy key comes before them, and one that is never chosen after, far from them all, so that
    the result is the fraction of samples that chose a light one.
    """
    d, samples, light, far = 2, 16, 1000, 14.0
    root = t.adapter.root(d)
    heavy = [math.log(0.9 / 0.1 * light), far]
    keys = np.concatenate([[heavy], np.tile([[0.0, -far]], (light, 1)), [[-30.0, 0.0]]])
    q, keys = (t.adapter.exact(x / root) for x in (np.array([[1.0, 0.0]]), keys))
    weight = special.softmax(root * root * (keys @ q[0]))
    values = np.ones((light + 2, 1))
    values[[0, -1]] = 0.0
    share = float(weight @ values[:, 0])

    def one(seed: int) -> Floats:
        return np.asarray(samples * t.call(q, keys, values, num_samples=samples, seed=seed)[0, 0])

    found = _draws(t, one)
    counts = np.round(found)
    if np.max(np.abs(found - counts)) > 0.01:
        raise Failure("whole numbers of samples", f"{found[np.argmax(np.abs(found - counts))]:.4g}")
    n = len(counts)
    law = laws.binom(samples, share)
    below, at = law.cdf(counts - 1), law.pmf(counts)
    uniform = np.clip(below + t.rng.random(n) * at, 0.0, 1.0)  # exactly so if counts are binomial
    _record(t, "counts", stats.ks(uniform, lambda u: u), n, stats.ks)
    p = stats.binomial(int(np.sum(counts)), n * samples, share)
    _record(t, "share", p, n * samples, stats.binomial, p=share)


@check("ra", claim="the mean over seeds is exact attention", layer="bound")
def unbiased(t: Trial) -> None:
    """Weights of three keys, bounded and of known mean, at S = 16 (betting)."""
    d, m, root = 4, 6, t.adapter.root(4)
    q, k = (t.normal(count, d, size=1 / root) for count in (3, m))
    k = t.adapter.exact(k + q[1] * (np.arange(m) < 2)[:, None])
    want = special.softmax((root * root) * (q @ k.T), -1)
    values = np.eye(m)
    found = _draws(t, lambda seed: t.call(q, k, values, num_samples=16, seed=seed)[1])
    n = len(found)
    allowed = 2 * tolerance(t.adapter, (q, k, values), {})
    if np.any((found < -allowed) | (found > 1 + allowed)):
        raise Failure("weights between 0 and 1", f"{np.min(found):.3g} to {np.max(found):.3g}")
    for j in range(3):
        x = np.clip(found[:, j], 0.0, 1.0)
        mean = float(want[1, j])
        _record(t, f"weight of key {j}, bets", stats.betting(x, mean), n, None)
        p = stats.empirical_bernstein(x, mean)
        test = stats.empirical_bernstein  # bets have no proven power
        _record(t, f"weight of key {j}", p, n, test, variance=mean * (1 - mean))


@check(
    "ra",
    claim="with two samples the result is the mean of two different results",
    needs=lambda adapter: _precise(adapter),
)
def mean_of_samples(t: Trial) -> None:
    r"""Both samples recovered from the weights of five keys j c e_0, at S = 2.

    Weights times e^{|k|^2/2} are A_1 a_1^j + A_2 a_2^j with a_s = e^{c omega_s}, and the mean of
    two ratios has A_s = 1 / (2 sum_j xi(k_j, omega_s)) (Prony's method).
    """
    d, c, root = 3, 1.0, t.adapter.root(3)
    line = np.zeros((5, d))
    line[:, 0] = c * np.arange(5)
    square = np.exp(line[:, 0] ** 2 / 2)
    q = np.zeros((2, d))
    start = t.new_seed()

    def shares(out: Floats) -> tuple[Floats, float]:
        """A_s times twice the normaliser, 1 each, and how far apart the frequencies are."""
        m = out * square
        total, product = np.linalg.solve([[m[1], -m[0]], [m[2], -m[1]]], m[2:4])
        gap = math.sqrt(max(total * total - 4 * product, 0.0))
        nodes = np.array([(total + gap) / 2, (total - gap) / 2])
        weight = np.linalg.solve(np.stack([np.ones(2), nodes]), m[:2])
        return 2 * weight * (nodes[:, None] ** np.arange(5) @ (1 / square)), gap / abs(total)

    best: tuple[float, int] = (-1.0, start)
    for seed in range(start, start + 16):
        out = t.call(q, line / root, np.eye(5), num_samples=2, seed=seed)[1]
        curved = math.log(max(out[0] * out[2] / out[1] ** 2, 1e-300)) + c * c
        if not abs(curved) > 1e3 * t.adapter.eps:
            raise Failure("the mean of two different samples", "the result of a single one")
        with np.errstate(all="ignore"):
            try:
                best = max(best, (shares(out)[1], seed))
            except np.linalg.LinAlgError:
                continue
    out = t.call(q, line / root, np.eye(5), num_samples=2, seed=best[1])[1]
    found = shares(out)[0]
    allowed = 0.0
    for j in range(5):  # to first order, by how much each output's rounding moves the shares
        moved = out.copy()
        moved[j] *= 1 + 64 * t.adapter.eps
        allowed += float(np.max(np.abs(shares(moved)[0] - found)))
    t.case = None
    t.equal(found, np.ones(2), allowed)


@check("ra", claim="queries and heads draw frequencies of their own")
def draws_apart(t: Trial) -> None:
    """Equal queries, and equal heads, get different results."""
    lead = t.adapter.lead(2)
    (q, k, v), _ = t.problem(1, 5, 3)
    q, k, v = (np.broadcast_to(x, (*lead, *x.shape)).copy() for x in (np.repeat(q, 2, 0), k, v))
    out = t.call(q, k, v, **t.options(1)).reshape(-1, 3)
    for first, second in combinations(out, 2):
        if np.array_equal(first, second):
            raise Failure("different draws for equal queries and heads", "the same")
    t.error = 0.0


@check(
    "lara",
    claim="with one proposal the frequency is Gaussian about a centre, with covariance I",
    layer="law",
    needs=lambda adapter: _precise(adapter),
)
def proposal_noise(t: Trial) -> None:
    """Differences of frequencies recovered at C = 1 from successive seeds; the centre is free."""
    d, root = 4, t.adapter.root(4)
    keys = np.concatenate([np.zeros((1, d)), np.eye(d)])
    q = t.normal(d + 1, d, size=0.5 / root)

    def one(seed: int) -> Floats:
        out = t.call(q, keys / root, np.eye(d + 1), num_proposals=1, seed=seed)[0]
        return _frequency(out, keys)

    omega = _draws(t, one)
    omega = omega[: len(omega) // 2 * 2]
    error = _recovery_error(t, d, 1.0)
    _normal(t, (omega[::2] - omega[1::2]) / math.sqrt(2), error)


@check(
    "lara",
    claim="weights of keys have the law they have with chunks of the sequence as proposals",
    layer="bound",
    needs=lambda adapter: _precise(adapter) and adapter["centres"] == "chunks",
)
def proposal_average(t: Trial) -> None:
    """Weights at C = 3 against the distribution of the package's own (DKWM)."""
    d, m, many, root = 4, 6, min(25 * t.size, 100_000), t.adapter.root(4)
    q, k = (t.normal(m, d, size=1 / root) for _ in range(2))
    found = _draws(t, lambda seed: t.call(q, k, np.eye(m), num_proposals=3, seed=seed)[1])
    own = linear_randomized_attention(
        np.broadcast_to(q, (many, m, d)),
        k,
        np.eye(m),
        num_proposals=3,
        weighting=t.adapter["weighting"],
        scale=root * root,
        rng=t.rng,
    )[:, 1]
    for j in range(3):
        p = stats.dkwm_two_sample(found[:, j], own[:, j])
        _record(t, f"weight of key {j}", p, len(found), stats.dkwm_two_sample, reference=many)
