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
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import special
from scipy import stats as laws

from .. import kernels, sampling, stats, theory
from .checks import Trial, check
from .failures import Failure
from .limits import head_size, nearest_head_size
from .recovery import draws, lawful, normal, positive, precise, record, recovery_error, scale
from .reference import black_box, reference, tolerance

__all__: list[str] = []

Floats = npt.NDArray[Any]


def _estimates(t: Trial, x: Floats, y: Floats, samples: int, seed: int) -> Floats:
    """Kernel estimates of x with each row of y at one seed."""
    options: dict[str, Any] = {**t.adapter.record.sized(samples), "seed": seed}
    if t.adapter.has("pairs"):
        x = np.broadcast_to(x, y.shape)
        return np.asarray(t.call(t.adapter.exact(x), y, **options), float)
    root = t.adapter.root(len(x))
    anchor = x if t.adapter["features"] == "trigonometric" else -x
    keys = np.concatenate([anchor[None], y]) / root
    out = t.call(x[None] / root, keys, np.eye(len(keys)), **options)[0]
    if not (out[0] > 0 or (t.adapter["features"] == "trigonometric" and out[0] != 0)):
        raise Failure("a positive weight of the key -q, where all terms are positive", f"{out[0]}")
    sign = 1 if t.adapter["features"] == "trigonometric" else -1
    return np.asarray(out[1:] / out[0] * math.exp(sign * np.sum(x * x)), float)


@check(
    "random-features",
    claim="frequencies are N(0, I), independent from seed to seed",
    layer="law",
    needs=lawful,
)
def frequency_law(t: Trial) -> None:
    """Frequencies recovered at S = 1, d = 8, and with fewer seeds d = 1, 5 and 64.

    If they are iid, also at d = 256: half a million numbers at level quick, for the tails.

    Hyperbolic and trigonometric features determine them up to sign, which is then drawn anew.
    """
    c = {"positive": 1.0, "hyperbolic": 0.7, "trigonometric": 0.3}[t.adapter["features"]]
    shares: dict[int, float] = {}
    sizes = [(8, 1.0), (1, 0.25), (5, 0.25), (64, 0.25)]
    sizes += [(256, 1.0)] * (t.adapter["coupling"] == "iid")  # else a draw takes long
    for d, share in sizes:
        shares.setdefault(nearest_head_size(t.adapter, d), share)
    for i, (d, share) in enumerate(shares.items()):
        if i > 0 and not precise(t.adapter):
            continue

        def one(seed: int, d: int = d) -> Floats:
            return _recovered(t, d, c, seed)

        z = draws(t, one, share)
        error = recovery_error(t, d, c)
        if not positive(t.adapter):
            z = z * t.rng.choice([-1.0, 1.0], (len(z), 1))
            error = math.sqrt(error)  # near 0 the inverse has no slope
        normal(t, z, error, f"d = {d}, ")


def _recovered(t: Trial, d: int, c: float, seed: int) -> Floats:
    """The frequency at S = 1, by its coordinate 0 being positive if its sign does not show."""
    zero, axes = np.zeros(d), c * np.eye(d)
    if positive(t.adapter):
        with np.errstate(invalid="ignore", divide="ignore"):
            return (np.log(_estimates(t, zero, axes, 1, seed)) + c * c / 2) / c
    y = np.concatenate([axes, axes[:1] + axes[1:]])
    even = _estimates(t, zero, y, 1, seed) * np.exp(-np.sum(y * y, -1) / 2 * _sign(t))
    inverse = np.arccosh if t.adapter["features"] == "hyperbolic" else np.arccos
    with np.errstate(invalid="ignore"):
        size = inverse(np.clip(even[:d], *((1, np.inf) if _sign(t) < 0 else (-1, 1)))) / c
    forward = np.cosh if _sign(t) < 0 else np.cos
    same = np.abs(forward(c * (size[0] + size[1:])) - even[d:])
    other = np.abs(forward(c * (size[0] - size[1:])) - even[d:])
    return np.concatenate([size[:1], np.where(same <= other, 1, -1) * size[1:]])


def _sign(t: Trial) -> int:
    """Of |y|^2/2 in an estimate at x = 0: trigonometric features multiply by its exponential."""
    return 1 if t.adapter["features"] == "trigonometric" else -1


@check(
    "random-features",
    claim="the estimate is a function of x + y, or of x - y where trigonometric, but for norms",
    needs=lambda adapter: precise(adapter) and "omega_only" not in adapter.capabilities,
)
def one_function(t: Trial) -> None:
    r"""The same sums x + y of other parts, whatever the frequencies, near the origin and far.

    Weights of keys :math:`z_j - x` at a query x, times :math:`e^{|z_j - x|^2/2}`, have the ratios
    that they have at x = 0.
    """
    far = positive(t.adapter) or t.adapter["features"] == "hyperbolic"
    for samples, length in ((4, 0.3), (33, 0.3), *(((4, 2.0), (33, 4.0), (129, 6.0)) * far)):
        _one_function(t, samples, length)


def _one_function(t: Trial, samples: int, length: float) -> None:
    d, sign = 4, _sign(t)
    root = t.adapter.root(d)
    z = t.rng.standard_normal((5, d))
    z *= length / np.linalg.norm(z, axis=-1, keepdims=True)
    z[0] /= 2
    options = t.options(samples)

    def sums(x: Floats) -> tuple[Any, Any]:
        """Sums over the frequencies at each z, but for a factor, and how far off their logs are."""
        x = root * t.adapter.exact(x / root)
        y = root * t.adapter.exact((z - x if sign < 0 else x - z) / root)
        half = (np.sum(x * x) + np.sum(y * y, -1)) / 2
        if t.adapter.has("pairs"):
            found = t.call(np.broadcast_to(x, y.shape), y, **options)
        else:
            found = t.call(x[None] / root, y / root, np.eye(len(y)), **options)[0]
        longest = np.linalg.norm(x) + np.linalg.norm(y, axis=-1)
        return found * np.exp(-sign * half), recovery_error(t, d, 1.0) * (1 + longest)

    x = t.rng.standard_normal((2, d))
    x *= length / 2 / np.linalg.norm(x, axis=-1, keepdims=True)
    base, unsure = sums(np.zeros(d))
    for other in x:
        moved, error = sums(other)
        if not np.all(base * moved > 0):
            raise Failure("weights that are not 0, of the same sign", f"{base} and {moved}")
        ratio = moved / base
        t.case = None
        t.equal(ratio / ratio[0], np.ones(len(z)), 4 * float(np.max(error + unsure)))


@check(
    "random-features",
    claim="at one frequency the logarithm of the estimate is Gaussian, of variance |x + y|^2",
    layer="law",
    needs=lambda adapter: precise(adapter) and positive(adapter),
)
def long_vectors(t: Trial) -> None:
    """At x + y of lengths 2, 4 and 6, where a mean over seeds has too large a variance to tell.

    Exponents that are clipped, norms that are clamped and constants that are added show.
    """
    lengths = np.array([2.0, 4.0, 6.0])
    d = len(lengths)
    x = t.normal(d)
    x *= 2 / np.linalg.norm(x)
    z = lengths[:, None] * np.linalg.qr(t.rng.standard_normal((d, d)))[0]
    x, y = t.adapter.exact(x), t.adapter.exact(z - x)
    square = (np.sum(x * x) + np.sum(y * y, -1)) / 2
    spread = np.linalg.inv(x + y)  # their directions are not quite at right angles

    def one(seed: int) -> Floats:
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(spread @ (np.log(_estimates(t, x, y, 1, seed)) + square))

    error = recovery_error(t, d, 1.0) * (1 + float(np.max(lengths)))
    normal(t, draws(t, one), error)


@check(
    "random-features",
    claim="frequencies given their mean and covariance have that law",
    layer="law",
    needs=lambda adapter: precise(adapter) and positive(adapter) and adapter.can("moments"),
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
            *(np.zeros((1, d)), keys, np.eye(d + 1)),
            **t.adapter.record.sized(1),
            seed=seed,
            mean=mean,
            cov=cov,
        )[0]
        with np.errstate(invalid="ignore", divide="ignore"):
            omega = (np.log(out[1:] / out[0]) + c * c / 2) / c
        return np.linalg.solve(factor, omega - mean)

    normal(t, draws(t, one), recovery_error(t, d, c))


def _pairs(t: Trial, d: int, c: float, seed: int) -> tuple[Floats, Floats]:
    """The two numbers e^{c omega_si} for each i at S = 2, the larger first.

    Their power sums are estimates at c e_i and 2 c e_i.
    """
    y = np.concatenate([c * np.eye(d), 2 * c * np.eye(d)])
    mean = _estimates(t, np.zeros(d), y, 2, seed) * np.exp(np.sum(y * y, -1) / 2)
    return _roots(2 * mean[:d], 2 * mean[d:])


def _roots(first: Floats, second: Floats) -> tuple[Floats, Floats]:
    """Two numbers from their sum and the sum of their squares, the larger one first."""
    gap = np.sqrt(np.maximum(2 * second - first * first, 0.0))
    larger = (first + gap) / 2
    return larger, (first * first - second) / (2 * larger)  # their product, without cancellation


@check(
    "random-features",
    claim="two frequencies of one set are coupled as declared",
    layer="law",
    needs=lambda adapter: (
        precise(adapter)
        and positive(adapter)
        and adapter["coupling"] in ("iid", "orthogonal", "antithetic")
    ),
)
def frequency_pairs(t: Trial) -> None:
    """Both frequencies recovered at S = 2: independent, at right angles, or opposite."""
    d, c, coupling = nearest_head_size(t.adapter, 4), 0.5, t.adapter["coupling"]

    def one(seed: int) -> Floats:
        a, b = _pairs(t, d, c, seed)
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.stack([np.log(a), np.log(b)]) / c

    pairs = draws(t, one, share=0.02 if coupling != "iid" else 1.0)
    # Two numbers that are nearly equal are recovered to the root of the precision only.
    error = math.sqrt(recovery_error(t, d, c))
    if coupling == "antithetic":
        _together(t, np.sum(pairs, 1), "omega_1 + omega_2 = 0", error)
    elif coupling == "orthogonal":
        _together(t, np.sum(pairs[:, 0] * pairs[:, 1], -1), "omega_1 . omega_2 = 0", 4 * d * error)
    else:
        total = np.sum(pairs, 1) / math.sqrt(2)
        gap = (pairs[:, 0] - pairs[:, 1]) / math.sqrt(2)
        n, delta = total.size, error / math.sqrt(2 * math.pi)
        p = stats.ks(total.ravel(), special.ndtr, error=delta)
        record(t, "sums", p, n, stats.ks)
        p = stats.ks(np.abs(gap).ravel(), laws.halfnorm.cdf, error=2 * delta)
        record(t, "gaps", p, n, stats.ks)
        for name, x in (("scale of sums", total), ("scale of gaps", gap)):
            record(t, name, scale(x, 1.5 * recovery_error(t, d, c)), n, stats.normal_scale)


def _together(t: Trial, x: Floats, rule: str, allowed: float) -> None:
    worst = float(np.max(np.abs(x)))
    t.error = worst / allowed
    if not worst <= allowed:
        raise Failure(f"{rule}, to within {allowed:.2g}", f"{worst:.3g} for some seed")


@check(
    "random-features",
    claim="sums over many frequencies, and over their squares, have the laws of their coupling",
    layer="law",
    needs=precise,
)
def feature_sums(t: Trial) -> None:
    """Means of omega_i and of omega_i^2 over 15, 64 and 257 features, from small differences.

    The mean of e^{omega . y} at y = +-c e_i and +-2 c e_i gives both up to terms in c^4; of
    features without sign the squares only. If the features are iid they are exactly normal and
    chi-squared; else they are compared with those of the package's own draws (DKWM).
    """
    coupling = t.adapter["coupling"]
    sizes = [(15, 4, 1.0), (64, 16, 0.25), (257, 1, 0.25)]
    if coupling != "iid":  # own draws take time
        sizes = [(15 if coupling == "orthogonal" else 16, 4, 1.0), (64, 16, 0.1)]
    for samples, d, share in sizes:
        _feature_sums(t, samples, d, share)


def _feature_sums(t: Trial, samples: int, d: int, share: float) -> None:
    coupling, label = t.adapter["coupling"], f"S = {samples}, "
    c = 0.01 if t.adapter["dtype"] == "float64" else 0.02
    steps = c * np.array([1.0, -1.0, 2.0, -2.0])
    y = t.adapter.exact((steps[:, None, None] * np.eye(d)).reshape(-1, d))
    square = np.exp(-_sign(t) * np.sum(y * y, -1) / 2)
    c = float(np.max(y[:d]))  # as it is in the candidate's dtype

    def one(seed: int) -> Floats:
        mean = (_estimates(t, np.zeros(d), y, samples, seed) * square).reshape(4, d)
        odd, even = mean[::2] - mean[1::2], mean[::2] + mean[1::2] - 2
        first = (8 * odd[0] - odd[1]) / (12 * c)
        second = (16 * even[0] - even[1]) / (12 * c * c)
        return np.stack([math.sqrt(samples) * first, -_sign(t) * samples * second])

    found = draws(t, one, share)
    # Of terms in c^4 with |omega| below 9, which all are but for one draw in 1e18, and of rounding.
    rounding = recovery_error(t, d, c) * c
    first = math.sqrt(samples) * (c**4 * 9.0**5 / 30 + 2 * rounding / c)
    second = samples * (c**4 * 9.0**6 / 90 + 4 * rounding / c**2)
    signed = positive(t.adapter)
    if coupling == "iid":
        if signed:
            normal(t, found[:, 0], first, label)
        law = laws.chi2(samples)
        delta = second * float(law.pdf(max(samples - 2, 0.1)))  # the density is at most this steep
        if delta < 0.05:
            x = found[:, 1].ravel()
            p = stats.ks(x, law.cdf, error=delta)
            record(t, f"{label}squares", p, x.size, stats.ks, hidden=2 * delta)
            if second < 0.01:
                p = stats.chi2(np.maximum(x, 0.0), samples)
                record(t, f"{label}scale", p, x.size, stats.chi2, df=samples)
        return
    own = _own_frequencies(t, samples, d, max(int(share * t.size), 2))
    sums = np.stack([math.sqrt(samples) * np.mean(own, 1), np.sum(own * own, 1)], 1)
    for j, name in enumerate(("sums", "squares")):
        if name == "sums" and (coupling == "antithetic" or not signed):
            continue  # they are 0 and rounding, which `frequency_pairs` sees to, or unknown
        for i in {0, d - 1}:
            error = (first, second)[j]
            hidden = 2 * error / (1 if j == 0 else 2 * math.sqrt(samples))  # by the steepest law
            if hidden > 0.1:
                continue
            p = stats.dkwm_two_sample(found[:, j, i], sums[:, j, i], error=error)
            test, known = stats.dkwm_two_sample, {"reference": len(sums)}
            record(t, f"{label}{name}, axis {i}", p, len(found), test, hidden=hidden, **known)


@check(
    "random-features",
    claim="results at one seed follow from the frequencies recovered at it",
    draws=True,
    needs=lambda adapter: precise(adapter) and positive(adapter),
)
def recovered_values(t: Trial) -> None:
    """Two frequencies from outputs along the axes predict outputs at other points.

    Of attention for one query and for three, for few keys and many, in a batch of heads too: each
    time the frequencies are recovered from inputs of the same shapes. Some points are long, where
    exponents that are clipped and constants that are added show.
    """
    d, c = 3, 0.5
    # The sums e_0 + e_i tell which number belongs with which.
    y = c * np.concatenate([np.eye(d), 2 * np.eye(d), np.eye(d)[:1] + np.eye(d)[1:]])
    cases = [((), 1, len(y) + 1), ((), 3, 20), ((), 2, 257), (t.adapter.lead(2, 3), 3, 20)]
    for lead, n, m in cases[:1] if t.adapter.has("pairs") else cases:
        _recovered_values(t, d, c, y, lead, n, m)


def _recovered_values(
    t: Trial, d: int, c: float, y: Floats, lead: tuple[int, ...], n: int, m: int
) -> None:
    sized, root = t.adapter.record.sized(2), t.adapter.root(d)
    square = np.exp(np.sum(y * y, -1) / 2)
    keys = np.broadcast_to(np.concatenate([np.zeros((1, d)), y])[:m], (*lead, len(y) + 1, d))
    keys = np.concatenate([keys, np.zeros((*lead, m - len(y) - 1, d))], -2) / root
    values = np.broadcast_to(np.eye(m), (*lead, m, m))

    def means(seed: int) -> Floats:
        """Means of e^{omega . y} over both frequencies, for each head."""
        if t.adapter.has("pairs"):
            return np.asarray(_estimates(t, np.zeros(d), y, 2, seed) * square)
        options: dict[str, Any] = {**sized, "seed": seed}
        out = t.call(np.zeros((*lead, n, d)), keys, values, **options)[..., 0, :]
        found: Floats = np.asarray(out[..., 1 : len(y) + 1] / out[..., :1] * square, float)
        return found

    start = t.new_seed()
    best = max(range(start, start + 8), key=lambda seed: _separation(means(seed), d))
    mean = means(best)

    def predict(mean: Floats, arrays: tuple[Floats, ...]) -> tuple[Any, Any]:
        omega = np.empty((*lead, 2, d))
        for index in np.ndindex(*lead):
            omega[index] = _paired(mean[index], d, c)
        return reference(t.adapter, arrays, {"omega": omega})

    for long in (1.0, 3.0, 6.0):
        if t.adapter.has("pairs"):
            sizes = (0.7 * long, 0.9)  # an estimate is e^(x . y)
            arrays: tuple[Floats, ...] = tuple(t.normal(m, d, size=size) for size in sizes)
        else:
            sizes = (0.7 * long, 0.9 * long)
            q, k = (
                t.normal(*lead, i, d, size=s / root) for i, s in zip((n, m), sizes, strict=True)
            )
            arrays = (q, k, t.normal(*lead, m, d))
        options: dict[str, Any] = {**sized, "seed": best}
        got = t.call(*arrays, **options)
        want, allowed = predict(mean, arrays)
        # The error of each mean moves the prediction: to first order, by the sum of the moves.
        unit = recovery_error(t, d, c) * c
        for i in range(len(y)):
            moved = mean.copy()
            moved[..., i] *= 1 + 2 * unit
            allowed = allowed + float(np.max(np.abs(predict(moved, arrays)[0] - want)))
        t.equal(got, want, float(allowed))


def _separation(mean: Floats, d: int) -> float:
    """How far apart the two numbers are that are recovered from their power sums, at least."""
    a, b = _roots(2 * mean[..., :d], 2 * mean[..., d : 2 * d])
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
    "random-features",
    claim="the average over many features has the law of its coupling, and the right mean",
    layer="bound",
    needs=lawful,
)
def feature_average(t: Trial) -> None:
    """Fifteen or sixteen features at x + y along an axis, either way, and along the diagonal.

    The distribution of the estimate is compared with that of the package's own draws (DKWM), and
    its mean with the kernel (Catoni, with the variance of the theory).
    """
    d, features, coupling = 4, t.adapter["features"], t.adapter["coupling"]
    samples = 15 if coupling in ("iid", "orthogonal") else 16  # odd where blocks need not be whole
    x = t.normal(d, size=0.3)
    any_way = t.rng.standard_normal(d)
    any_way /= np.linalg.norm(any_way)
    axes = np.stack([np.eye(d)[0], -np.eye(d)[0], np.full(d, d**-0.5), any_way])
    y = t.adapter.exact(axes - x)
    found = draws(t, lambda seed: _estimates(t, x, y, samples, seed))
    omega = _own_frequencies(t, samples, d, t.size)
    own = np.stack([kernels.estimate(x, z, omega, features=features) for z in y], -1)
    n, many = len(found), len(own)
    error = recovery_error(t, d, 1.0)
    for i, name in enumerate(("axis 0", "axis 0 reversed", "diagonal", "a random direction")):
        # In the halves rounding moves estimates, by as much as their logarithms' recovery allows.
        if precise(t.adapter):
            p = stats.dkwm_two_sample(found[:, i], own[:, i])
        elif features == "trigonometric":
            continue
        else:
            logs = (np.log(np.maximum(z[:, i], 1e-300)) for z in (found, own))
            p = stats.dkwm_two_sample(*logs, error=error)
        record(t, f"law, {name}", p, n, stats.dkwm_two_sample, reference=many)
        if coupling in theory.COUPLINGS and precise(t.adapter):
            kernel = math.exp(float(x @ y[i]))
            room = (0, head_size(t.adapter, d) - d)  # other coordinates are 0
            variance = theory.kernel_variance(
                *(np.pad(z, room) for z in (x, y[i])),
                features=features,
                coupling=coupling,
                num_features=samples,
            )
            cap = float(variance) / kernel**2
            p = stats.catoni(found[:, i] / kernel, 1.0, cap)
            record(t, f"mean, {name}", p, n, stats.catoni, variance=cap)


# Own draws for each of the candidate's: as many as do not dominate the time.
_OWN = {"iid": 25, "sobol": 2, "halton": 2}


def _own_frequencies(t: Trial, samples: int, d: int, size: int) -> Floats:
    """Many sets of frequencies of the package's own, of which d coordinates show."""
    coupling = t.adapter["coupling"]
    sets = min(_OWN.get(coupling, 5) * size, 100_000)
    if coupling == "iid":
        return t.rng.standard_normal((sets, samples, d))
    whole = head_size(t.adapter, d)
    return np.stack(
        [
            sampling.draw(samples, whole, coupling=coupling, rng=t.rng).omega[:, :d]
            for _ in range(sets)
        ]
    )


def _target(t: Trial, d: int) -> tuple[Floats, Floats, Floats]:
    """A query, keys in general position and their weights, in kernel coordinates."""
    q = t.normal(d)
    q[-1] = 0.0
    keys = np.concatenate([np.zeros((1, d)), 2 * np.eye(d)]) + t.normal(d, size=0.3)
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
    "target",
    claim="frequencies of a query are drawn from its target, one mixture of Gaussians",
    layer="law",
    needs=precise,
)
def target_law(t: Trial) -> None:
    """Frequencies recovered from single samples of the second of three queries, d = 4.

    With fewer seeds of the last of six queries of the last head, d = 8.
    """
    _target_law(t, 4, (), 3, 1, 1.0)
    _target_law(t, 8, t.adapter.lead(2, 2), 6, 5, 0.5)


@check(
    "target",
    claim="frequencies are drawn from the target over the keys that a mask leaves",
    layer="law",
    needs=lambda adapter: precise(adapter) and adapter.can("mask"),
)
def masked_target_law(t: Trial) -> None:
    """The same with a key of large weight masked."""
    _target_law(t, 4, (), 3, 1, 0.5, hide="mask")


@check(
    "target",
    claim="frequencies are drawn from the target over the keys that are not in the future",
    layer="law",
    needs=lambda adapter: precise(adapter) and adapter.can("causal"),
)
def causal_target_law(t: Trial) -> None:
    """The same for the last query but one, causal, the last key having a large weight."""
    _target_law(t, 4, (), 6, 4, 0.5, hide="causal")


def _target_law(
    t: Trial,
    d: int,
    lead: tuple[int, ...],
    n: int,
    query: int,
    share: float,
    hide: str | None = None,
) -> None:
    q, keys, weight = _target(t, d)
    root = t.adapter.root(d)
    queries, shown = t.normal(*lead, n, d), t.normal(*lead, d + 1, d)
    last = (-1,) * len(lead)
    queries[(*last, query)], shown[last] = q, keys
    options: dict[str, Any] = {}
    if hide is not None:
        shown = np.concatenate([shown, (2 * q)[None]])
        seen = np.broadcast_to(np.arange(d + 2) <= d, (n, d + 2)).copy()
        options = {"mask": seen} if hide == "mask" else {"causal": True}
    values = np.broadcast_to(np.eye(shown.shape[-2]), (*lead, *[shown.shape[-2]] * 2))

    def one(seed: int) -> Floats:
        given = {**t.adapter.record.sized(1), "seed": seed, **options}
        out = t.call(queries / root, shown / root, values, **given)
        return _frequency(out[(*last, query)][: d + 1], keys)

    omega = draws(t, one, share)
    # One coordinate's map to a normal number has slope at most 1 (Jensen, since the normal density
    # is a concave function of the distribution function); the weights of the others add to it.
    size = math.sqrt(d) + 6 + float(np.max(np.linalg.norm(q + keys, axis=-1)))
    spread = float(np.linalg.norm(np.linalg.inv(keys[1:] - keys[0]), 2))
    far = float(np.max(np.abs(keys[:, None] - keys)))
    error = 64 * t.adapter.eps * (1 + size * float(np.max(np.abs(keys))) * d) * spread * (1 + far)
    normal(t, _rosenblatt(omega, q + keys, weight), error, f"d = {d}, ")


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


@check(
    "target",
    claim="each sample chooses its key anew, light ones too",
    layer="law",
    needs=precise,
)
def choices(t: Trial) -> None:
    """How many of 16 samples choose one of a thousand light keys: a binomial law.

    A heavy key comes before them, and one that is never chosen after, far from them all, so that
    the result is the fraction of samples that chose a light one.
    """
    d, samples, light, far = 2, 16, 1000, 14.0
    sized = t.adapter.record.sized(samples)
    root = t.adapter.root(d)
    heavy = [math.log(0.9 / 0.1 * light), far]
    keys = np.concatenate([[heavy], np.tile([[0.0, -far]], (light, 1)), [[-30.0, 0.0]]])
    q, keys = (t.adapter.exact(x / root) for x in (np.array([[1.0, 0.0]]), keys))
    weight = special.softmax(root * root * (keys @ q[0]))
    values = np.ones((light + 2, 1))
    values[[0, -1]] = 0.0
    share = float(weight @ values[:, 0])

    def one(seed: int) -> Floats:
        return np.asarray(samples * t.call(q, keys, values, **sized, seed=seed)[0, 0])

    found = draws(t, one)
    counts = np.round(found)
    if np.max(np.abs(found - counts)) > 0.01:
        raise Failure("whole numbers of samples", f"{found[np.argmax(np.abs(found - counts))]:.4g}")
    n = len(counts)
    law = laws.binom(samples, share)
    below, at = law.cdf(counts - 1), law.pmf(counts)
    uniform = np.clip(below + t.rng.random(n) * at, 0.0, 1.0)  # exactly so if counts are binomial
    record(t, "counts", stats.ks(uniform, lambda u: u), n, stats.ks)
    p = stats.binomial(int(np.sum(counts)), n * samples, share)
    record(t, "share", p, n * samples, stats.binomial, p=share)


@check("target", claim="the mean over seeds is exact attention", layer="bound", needs=precise)
def unbiased(t: Trial) -> None:
    """Weights of three keys, bounded and of known mean, at S = 16 (betting)."""
    d, m, root = 4, 6, t.adapter.root(4)
    q, k = (t.normal(count, d, size=1 / root) for count in (3, m))
    k = t.adapter.exact(k + q[1] * (np.arange(m) < 2)[:, None])
    want = special.softmax((root * root) * (q @ k.T), -1)
    values, sized = np.eye(m), t.adapter.record.sized(16)
    found = draws(t, lambda seed: t.call(q, k, values, **sized, seed=seed)[1])
    n = len(found)
    allowed = 2 * tolerance(t.adapter, (q, k, values), {})
    if np.any((found < -allowed) | (found > 1 + allowed)):
        raise Failure("weights between 0 and 1", f"{np.min(found):.3g} to {np.max(found):.3g}")
    for j in range(3):
        x = np.clip(found[:, j], 0.0, 1.0)
        mean = float(want[1, j])
        record(t, f"weight of key {j}, bets", stats.betting(x, mean), n, None)
        p = stats.empirical_bernstein(x, mean)
        test = stats.empirical_bernstein  # bets have no proven power
        record(t, f"weight of key {j}", p, n, test, variance=mean * (1 - mean))


@check(
    "target",
    claim="with two samples the result is the mean of two different results",
    draws=True,
    needs=lambda adapter: precise(adapter),
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
    q, sized = np.zeros((2, d)), t.adapter.record.sized(2)
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
    bend = 0.0
    for seed in range(start, start + 16):
        out = t.call(q, line / root, np.eye(5), **sized, seed=seed)[1]
        curved = math.log(max(out[0] * out[2] / out[1] ** 2, 1e-300)) + c * c
        bend = max(bend, abs(curved))
        with np.errstate(all="ignore"):
            try:
                best = max(best, (shares(out)[1], seed))
            except np.linalg.LinAlgError:
                continue
    if not bend > 1e3 * t.adapter.eps:  # by chance only if 16 pairs all lie within 1e-2
        raise Failure("the mean of two different samples", "the result of a single one")
    out = t.call(q, line / root, np.eye(5), **sized, seed=best[1])[1]
    found = shares(out)[0]
    allowed = 0.0
    for j in range(5):  # to first order, by how much each output's rounding moves the shares
        moved = out.copy()
        moved[j] *= 1 + 64 * t.adapter.eps
        allowed += float(np.max(np.abs(shares(moved)[0] - found)))
    t.case = None
    t.equal(found, np.ones(2), allowed)


@check(
    "target",
    claim="the result has the law of a mean of independent samples",
    layer="bound",
    needs=precise,
)
def sample_average(t: Trial) -> None:
    """Weights of two of twelve keys at S = 16 and 64 against the package's own (DKWM)."""
    d, m, many, root = 4, 12, min(10 * t.size, 20_000), t.adapter.root(4)
    q, k = (t.normal(count, d, size=1 / root) for count in (2, m))
    k[-1] = 1.2 * q[-1]  # the last key matters
    k, values = t.adapter.exact(k), np.eye(m)[:, [0, -1]]
    for samples in (16, 64):
        sized = t.adapter.record.sized(samples)

        def one(seed: int, sized: dict[str, Any] = sized) -> Floats:
            return np.asarray(t.call(q, k, values, **sized, seed=seed)[-1])

        found = draws(t, one, 0.5)
        queries = np.broadcast_to(q[-1:], (many, 1, d))
        own = t.adapter.record.fn(queries, k, values, **sized, scale=root * root, rng=t.rng)[:, 0]
        for j, key in enumerate(("first", "last")):
            p = stats.dkwm_two_sample(found[:, j], own[:, j])
            name, test = f"S = {samples}, weight of the {key} key", stats.dkwm_two_sample
            record(t, name, p, len(found), test, reference=many)


@check(
    "target",
    claim="queries and heads draw frequencies of their own",
    draws=True,
    needs=lambda adapter: not adapter["causal_only"],  # of which queries are asked one by one
)
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
    "proposals",
    claim="with one proposal the frequency is Gaussian about a centre, with covariance I",
    layer="law",
    needs=lambda adapter: precise(adapter),
)
def proposal_noise(t: Trial) -> None:
    """Differences of frequencies recovered at C = 1 from successive seeds.

    Queries are equal and keys almost, so that a centre made of them, be it of a random one, is
    the same to within the distance of keys.
    """
    d, root = 4, t.adapter.root(4)
    c = 1e-3 if t.adapter["dtype"] == "float64" else 0.03
    keys = np.concatenate([np.zeros((1, d)), c * np.eye(d)])
    q = np.broadcast_to(t.normal(1, d, size=0.5 / root), (d + 1, d))

    def one(seed: int) -> Floats:
        out = t.call(q, keys / root, np.eye(d + 1), **t.adapter.record.sized(1), seed=seed)[0]
        return _frequency(out, keys)

    omega = draws(t, one)
    omega = omega[: len(omega) // 2 * 2]
    error = 2 * c + 2 * recovery_error(t, d, c)
    normal(t, (omega[::2] - omega[1::2]) / math.sqrt(2), error)


@check(
    "proposals",
    claim="two proposals are weighed by their features of the query",
    draws=True,
    needs=lambda adapter: precise(adapter) and adapter["weighting"] in ("balance", "own"),
)
def two_proposals(t: Trial) -> None:
    """Both frequencies along an axis recovered at C = 2 from the weights of five keys on it.

    Two queries that differ by b e_0 weigh the proposals differently by e^{b (omega_1 - omega_2)}
    along the axis, whatever the centres are and whether weights are balanced or own.
    """
    d, c, b, root = 3, 1.0, 0.5, t.adapter.root(3)
    line = np.zeros((5, d))
    line[:, 0] = c * (np.arange(5) - 2)
    square = np.exp(line[:, 0] ** 2 / 2)
    q = np.zeros((5, d))
    q[1, 0] = b

    def mixture(out: Floats) -> tuple[Floats, Floats]:
        """Nodes e^{c omega} and log ratios of the weights at both queries (Prony's method)."""
        m = out[:2] * square
        left, right = np.stack([m[:, 1:4], -m[:, :3]], -1), m[:, 2:]
        both = np.linalg.lstsq(left.reshape(-1, 2), right.reshape(-1), rcond=None)[0]
        gap = math.sqrt(max(both[0] ** 2 - 4 * both[1], 0.0))
        nodes = np.array([(both[0] + gap) / 2, (both[0] - gap) / 2])
        weight = np.linalg.solve(np.stack([np.ones(2), nodes]), m[:, :2].T)
        return nodes, np.log(weight[0] / weight[1])

    def excess(out: Floats) -> float:
        nodes, ratio = mixture(out)
        return float(ratio[1] - ratio[0] - b * math.log(nodes[0] / nodes[1]) / c)

    def gap(out: Floats) -> float:
        with np.errstate(all="ignore"):
            try:
                nodes, ratio = mixture(out)
                known = bool(np.all(nodes > 0) and np.all(np.isfinite(ratio)))
                return float((nodes[0] - nodes[1]) / nodes[0]) if known else -1.0
            except np.linalg.LinAlgError:
                return -1.0

    start, sized = t.new_seed(), t.adapter.record.sized(2)
    outs = [
        t.call(q / root, line / root, np.eye(5), **sized, seed=seed)
        for seed in range(start, start + 16)
    ]
    out = max(outs, key=gap)
    if gap(out) < 1e-2:
        raise Failure("the results of two proposals", "those of a single one")
    allowed = 0.0
    for i in np.ndindex(2, 5):  # to first order, by how much each output's rounding moves it
        moved = out.copy()
        moved[i] *= 1 + 64 * t.adapter.eps
        allowed += abs(excess(moved) - excess(out))
    t.case = None
    t.equal(np.array(excess(out)), np.zeros(()), allowed)


@check(
    "proposals",
    claim="weights of keys have the law they have with chunks of the sequence as proposals",
    layer="bound",
    needs=lambda adapter: (
        precise(adapter) and adapter["centres"] == "chunks" and adapter["multiple_of"] == 1
    ),
)
def proposal_average(t: Trial) -> None:
    """Weights at C = 3 against the distribution of the package's own (DKWM)."""
    d, m, many, root = 4, 6, min(25 * t.size, 100_000), t.adapter.root(4)
    q, k = (t.normal(m, d, size=1 / root) for _ in range(2))
    sized = t.adapter.record.sized(3)
    found = draws(t, lambda seed: t.call(q, k, np.eye(m), **sized, seed=seed)[1])
    own = t.adapter.record.fn(
        *(np.broadcast_to(q, (many, m, d)), k, np.eye(m)),
        **sized,
        weighting=t.adapter["weighting"],
        scale=root * root,
        rng=t.rng,
    )[:, 1]
    for j in range(3):
        p = stats.dkwm_two_sample(found[:, j], own[:, j])
        record(t, f"weight of key {j}", p, len(found), stats.dkwm_two_sample, reference=many)


@check(
    "random",
    claim="results at many seeds have the law of the estimator's own",
    layer="bound",
    needs=lambda adapter: (
        precise(adapter)
        and not any(map(adapter.has, ("random-features", "target", "proposals")))  # known laws
    ),
)
def own_law(t: Trial) -> None:
    """First and last entry of a result at S = 1 and 4 against the registered function's (DKWM)."""
    for samples in (1, 4):
        _own_law(t, t.problem(5, 6, 4)[0], t.adapter.record.sized(samples))


def _own_law(t: Trial, arrays: tuple[Floats, ...], sized: dict[str, Any]) -> None:
    found = draws(t, lambda seed: _ends(t.call(*arrays, **sized, seed=seed)))
    own = np.stack([_ends(black_box(t.adapter, arrays, sized | {"seed": t.rng})) for _ in found])
    error = 2 * tolerance(t.adapter, arrays, sized | {"seed": t.new_seed()}, found)
    label = ", ".join(f"{name} = {value}" for name, value in sized.items()) or "any size"
    for j, name in enumerate(("first", "last")):
        test = stats.dkwm_two_sample
        p = test(found[:, j], own[:, j], error=error)
        hidden = float(error > 1e-3 * np.std(own[:, j]))  # all of it, where rounding may matter
        known = {"reference": len(own)}
        record(t, f"{label}, {name} entry", p, len(found), test, hidden=hidden, **known)


def _ends(out: Any) -> Floats:
    return np.asarray(out, float).reshape(-1)[[0, -1]]


@check(
    "random",
    claim="how frequencies are distributed shows in the results",
    layer="law",
    needs=lambda adapter: (
        not (precise(adapter) or (lawful(adapter) and adapter.has("random-features")))
    ),
)
def unseen_law(t: Trial) -> None:
    """Nothing is tested: rounding or a declared epsilon hides the law, and this says so."""
    t.power["law of frequencies"] = (lambda alpha: math.inf, 1.0)
