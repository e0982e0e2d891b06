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
from typing import Any

import numpy as np
from scipy import special

from .... import kernels, sampling, theory
from ....arrays.library import Floats
from ... import stats
from ..candidate.failures import Failure
from ..candidate.limits import Arrays, Keywords, head_size, nearest_head_size
from ..truth.allowed import allowed_error, black_box, reference
from .recovery import (
    axes_and_sums,
    check_normal,
    draw_results,
    estimate_kernels,
    frequency_moments,
    keep_p,
    match_pair,
    note_moments,
    p_of_scale,
    positive,
    precise,
    recover_alone,
    recover_frequency,
    recovery_error,
    separation,
    sign_of_norm,
    told,
)
from .trials import CheckRun, add_check


@add_check
def frequency_law(t: CheckRun) -> None:
    """Recover frequencies at S = 1 and d = 8; with fewer seeds also at d = 1, 5 and 64.

    If they are iid, also at d = 256: half a million numbers at level quick, for the tails.

    Hyperbolic and trigonometric features determine frequencies up to sign; a random sign is used.
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
            return recover_alone(t, d, c, seed)

        z = draw_results(t, one, share)
        error = recovery_error(t, d, c)
        if not positive(t.adapter):
            # A random sign makes the law symmetric, as the one that is tested is.
            z = z * t.rng.choice([-1.0, 1.0], (len(z), 1))
            error = math.sqrt(error)  # near 0 the inverse has no slope
        t.omega = z if t.omega is None else t.omega
        note_moments(t, f"d = {d}, ", frequency_moments(z))
        check_normal(t, z, error, f"d = {d}, ")
    if positive(t.adapter) and not t.adapter.has("pairs") and t.adapter.lead(2, 3):
        _law_of_last_head(t, nearest_head_size(t.adapter, 4), c)


def _law_of_last_head(t: CheckRun, d: int, c: float) -> None:
    """Test the law of frequencies of the last query of the last head."""
    lead, keys = t.adapter.lead(2, 3), np.concatenate([np.zeros((1, d)), c * np.eye(d)])
    arrays = tuple(
        np.broadcast_to(x, (*lead, *x.shape))
        for x in (np.zeros((3, d)), keys / t.adapter.root(d), np.eye(d + 1))
    )

    def one(seed: int) -> Floats:
        out = t.call(*arrays, **t.adapter.record.sized(1), seed=seed)
        return recover_frequency(out[(-1,) * (out.ndim - 1)], keys)

    z = draw_results(t, one, 0.5)
    note_moments(t, "last head, ", frequency_moments(z))
    check_normal(t, z, recovery_error(t, d, c), "last head, ")


@add_check
def one_function(t: CheckRun) -> None:
    r"""Compare estimates for pairs x, y with the same sum, near the origin and far from it.

    Multiplied by e^{|k|^2/2}, the weights of keys k = z - x at a query x have the same ratios for
    every x.
    """
    far = t.adapter["features"] != "trigonometric" and told(t.adapter)
    for samples, length in ((4, 0.3), (33, 0.3), *(((4, 2.0), (33, 4.0), (129, 6.0)) * far)):
        for lead in [()] if t.adapter.has("pairs") else dict.fromkeys([(), t.adapter.lead(2, 3)]):
            _one_function(t, samples, length, lead)


def _one_function(t: CheckRun, samples: int, length: float, lead: tuple[int, ...]) -> None:
    d, sign = 4, sign_of_norm(t)
    root, last = t.adapter.root(d), (-1,) * (len(lead) + 1)
    z = t.rng.standard_normal((5, d))
    z *= length / np.linalg.norm(z, axis=-1, keepdims=True)
    z[0] /= 2
    options = t.options(samples)

    def sums(x: Floats) -> tuple[Any, Any]:
        """Return sums over the frequencies at each z, but for a factor, and log errors."""
        x = root * t.adapter.exact(x / root)
        y = root * t.adapter.exact((z - x if sign < 0 else x - z) / root)
        half = (np.sum(x * x) + np.sum(y * y, -1)) / 2
        if t.adapter.has("pairs"):
            results = t.call(np.broadcast_to(x, y.shape), y, **options)
        else:
            arrays = (np.stack([0 * x, x]) / root, y / root, np.eye(len(y)))
            results = t.call(*(np.broadcast_to(z, (*lead, *z.shape)) for z in arrays), **options)
            results = results[last]
        longest = np.linalg.norm(x) + np.linalg.norm(y, axis=-1)
        return results * np.exp(-sign * half), recovery_error(t, d, 1.0) * (1 + longest)

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


@add_check
def long_vectors(t: CheckRun) -> None:
    """Try x + y of lengths 2, 4 and 6, where the variance is too large to test a mean.

    This detects clipped exponents, clamped norms and added constants.
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
            return np.asarray(spread @ (np.log(estimate_kernels(t, x, y, 1, seed)) + square))

    error = recovery_error(t, d, 1.0) * (1 + float(np.max(lengths)))
    omega = draw_results(t, one)
    note_moments(t, "", frequency_moments(omega))
    check_normal(t, omega, error)


@add_check
def given_moments_law(t: CheckRun) -> None:
    """Recover frequencies at S = 1, and whiten them by the moments that were passed."""
    d, c = 4, 1.0
    mean = t.normal(d, size=0.5)
    skew = np.eye(d) + t.normal(d, d, size=0.3)
    # Well away from the identity, and well conditioned.
    factor = np.linalg.cholesky(skew @ skew.T + np.eye(d))
    cov, root = factor @ factor.T, t.adapter.root(d)
    keys = np.concatenate([np.zeros((1, d)), c * np.eye(d)])

    def one(seed: int) -> Floats:
        out = t.call(
            *(np.zeros((1, d)), keys / root, np.eye(d + 1)),
            **t.adapter.record.sized(1),
            seed=seed,
            mean=mean,
            cov=cov,
        )[0]
        return np.linalg.solve(factor, recover_frequency(out, keys) - mean)

    check_normal(t, draw_results(t, one), recovery_error(t, d, c))


@add_check
def frequency_pairs(t: CheckRun) -> None:
    """Recover both frequencies at S = 2, and test whether they are coupled as declared."""
    from scipy import stats as laws

    d, c, coupling = nearest_head_size(t.adapter, 4), 0.5, t.adapter["coupling"]
    together = axes_and_sums(d, c)
    square = np.exp(np.sum(together * together, -1) / 2)

    def one(seed: int) -> Floats:
        return match_pair(estimate_kernels(t, np.zeros(d), together, 2, seed) * square, d, c)

    pairs = draw_results(t, one, share=0.05 if coupling != "iid" else 1.0)
    if not np.all(np.isfinite(pairs)):
        raise Failure("two frequencies that explain the results at S = 2", "none for some seeds")
    # Two numbers that are nearly equal are recovered to the root of the precision only.
    error = math.sqrt(recovery_error(t, d, c))
    square, inner = np.sum(pairs * pairs, (1, 2)) / 2, np.sum(pairs[:, 0] * pairs[:, 1], -1)
    moments = [("mean |omega|^2", square, d, 2 * d)]
    note_moments(t, "", moments + [("mean omega_1 . omega_2", inner, 0, d)] * (coupling == "iid"))
    if coupling == "antithetic":
        _fail_above(t, np.sum(pairs, 1), "omega_1 + omega_2 = 0", error)
    elif coupling == "orthogonal":
        _fail_above(t, inner, "omega_1 . omega_2 = 0", 4 * d * error)
    else:
        total = np.sum(pairs, 1) / math.sqrt(2)
        gap = (pairs[:, 0] - pairs[:, 1]) / math.sqrt(2)
        n, delta = total.size, error / math.sqrt(2 * math.pi)
        p = stats.ks(total.ravel(), special.ndtr, error=delta)
        keep_p(t, "sums", p, n, stats.ks)
        p = stats.ks(np.abs(gap).ravel(), laws.halfnorm.cdf, error=2 * delta)
        keep_p(t, "differences", p, n, stats.ks)
        for name, x in (("scale of sums", total), ("scale of differences", gap)):
            keep_p(t, name, p_of_scale(x, 1.5 * recovery_error(t, d, c)), n, stats.normal_scale)
    if coupling != "antithetic":
        _lengths_and_angles(t, pairs, 4 * d * error)


def _lengths_and_angles(t: CheckRun, pairs: Floats, error: float) -> None:
    r"""Test the laws of the lengths of two frequencies and, if they are iid, of their angle.

    Independent of the directions, :math:`|\omega_1|^2 / (|\omega_1|^2 + |\omega_2|^2)` is
    Beta(d/2, d/2), and :math:`(1 + \cos) / 2` is Beta((d - 1)/2, (d - 1)/2). `error` is how far
    off either number may be.
    """
    from scipy import stats as laws

    d, squares = pairs.shape[-1], np.sum(pairs * pairs, -1)
    shares = squares[:, 0] / np.sum(squares, 1)
    cosines = np.prod(pairs / np.sqrt(squares)[..., None], 1).sum(-1)
    tests = [("lengths", shares, d / 2)]
    tests += [("angles", (1 + cosines) / 2, (d - 1) / 2)] * (t.adapter["coupling"] == "iid")
    alike = bool(np.all(np.abs(shares - 0.5) <= error))
    t.effects |= {"lengths": "|omega_1| = |omega_2| for every seed"} if alike else {}
    for name, x, parameter in tests if d > 1 else ():
        law = laws.beta(parameter, parameter)
        # The density is largest in the middle or, with a parameter below 1, at the ends.
        delta = max(error * float(law.pdf(0.5)), float(law.cdf(error)))
        if delta < 0.05:  # else rounding may hide what the test would see
            keep_p(t, name, stats.ks(x, law.cdf, error=delta), len(x), stats.ks, hidden=2 * delta)


def _fail_above(t: CheckRun, x: Floats, rule: str, allowed: float) -> None:
    worst = float(np.max(np.abs(x)))
    t.error = worst / allowed
    if not worst <= allowed:
        raise Failure(f"{rule}, to within {allowed:.2g}", f"{worst:.3g} for some seed")


@add_check
def feature_sums(t: CheckRun) -> None:
    """Find means of omega_i and of omega_i^2 over 15 to 2,049 features from small differences.

    The mean of e^{omega . y} at y = +-c e_i and +-2 c e_i determines both up to terms in c^4;
    features that are the same for omega and -omega determine only the squares. If frequencies are
    iid, the means are exactly normal and chi-squared; otherwise they are compared with means over
    refattn's draws.
    """
    coupling = t.adapter["coupling"]
    sizes = [(15, 4, 1.0), (64, 16, 0.25), (257, 1, 0.25), (513, 4, 0.1), (2049, 4, 0.1)]
    if coupling != "iid":  # own draws take time
        few = 15 if coupling == "orthogonal" else 16
        sizes = [(few, 4, 1.0), (64, 16, 0.1), (2048, 4, 0.02)]
    for samples, d, share in sizes:
        _feature_sums(t, samples, d, share)


def _feature_sums(t: CheckRun, samples: int, d: int, share: float) -> None:
    from scipy import stats as laws

    coupling, label = t.adapter["coupling"], f"S = {samples}, "
    c = 0.01 if t.adapter["dtype"] == "float64" else 0.02
    steps = c * np.array([1.0, -1.0, 2.0, -2.0])
    y = t.adapter.exact((steps[:, None, None] * np.eye(d)).reshape(-1, d))
    square = np.exp(-sign_of_norm(t) * np.sum(y * y, -1) / 2)
    c = float(np.max(y[:d]))  # as it is in the candidate's dtype

    def one(seed: int) -> Floats:
        mean = (estimate_kernels(t, np.zeros(d), y, samples, seed) * square).reshape(4, d)
        odd, even = mean[::2] - mean[1::2], mean[::2] + mean[1::2] - 2
        # Difference quotients of the fourth order at 0.
        first = (8 * odd[0] - odd[1]) / (12 * c)
        second = (16 * even[0] - even[1]) / (12 * c * c)
        return np.stack([math.sqrt(samples) * first, -sign_of_norm(t) * samples * second])

    theirs = draw_results(t, one, share)
    words = f"mean of the sum of omega[0]^2 over {samples} features"
    note_moments(t, label, [(words, theirs[:, 1, 0], samples, 2 * samples)])
    # Of terms in c^4 with |omega| below 9, which all are but for one draw in 1e18, and of rounding.
    rounding = recovery_error(t, d, c) * c
    first = math.sqrt(samples) * (c**4 * 9.0**5 / 30 + 2 * rounding / c)
    second = samples * (c**4 * 9.0**6 / 90 + 4 * rounding / c**2)
    signed = positive(t.adapter)
    if coupling == "iid":
        if signed:
            check_normal(t, theirs[:, 0], first, label)
        law = laws.chi2(samples)
        delta = second * float(law.pdf(max(samples - 2, 0.1)))  # the density is at most this steep
        if delta < 0.05:
            x = theirs[:, 1].ravel()
            p = stats.ks(x, law.cdf, error=delta)
            keep_p(t, f"{label}squares", p, x.size, stats.ks, hidden=2 * delta)
            if second < 0.01:
                p = stats.chi2(np.maximum(x, 0.0), samples)
                keep_p(t, f"{label}scale", p, x.size, stats.chi2, df=samples)
        return
    ours = _draw_own(t, samples, d, max(int(share * t.size), 2))
    sums = np.stack([math.sqrt(samples) * np.mean(ours, 1), np.sum(ours * ours, 1)], 1)
    for j, name in enumerate(("sums", "squares")):
        if name == "sums" and (coupling == "antithetic" or not signed):
            continue  # they are 0 and rounding, which `frequency_pairs` sees to, or unknown
        for i in {0, d - 1}:
            error = (first, second)[j]
            hidden = 2 * error / (1 if j == 0 else 2 * math.sqrt(samples))  # by the steepest law
            # Then rounding may hide most of what the test would see.
            if hidden > 0.1:
                continue
            p = stats.dkwm_two_sample(theirs[:, j, i], sums[:, j, i], error=error)
            test, known = stats.dkwm_two_sample, {"reference": len(sums)}
            keep_p(t, f"{label}{name}, axis {i}", p, len(theirs), test, hidden=hidden, **known)


@add_check
def recovered_values(t: CheckRun) -> None:
    """Recover two frequencies from outputs along the axes; predict outputs at other points.

    Outputs are those for one query and for three, for few keys and many, and in a batch of heads;
    the frequencies are recovered each time, from inputs of the same shapes. Points far from the
    origin detect clipped exponents and added constants.
    """
    d, c = 3, 0.5
    y = axes_and_sums(d, c)
    cases = [((), 1, len(y) + 1), ((), 3, 20), ((), 2, 257), (t.adapter.lead(2, 3), 3, 20)]
    for lead, n, m in cases[:1] if t.adapter.has("pairs") else cases:
        _recovered_values(t, d, c, y, lead, n, m)


def _recovered_values(
    t: CheckRun, d: int, c: float, y: Floats, lead: tuple[int, ...], n: int, m: int
) -> None:
    sized, root = t.adapter.record.sized(2), t.adapter.root(d)
    square = np.exp(np.sum(y * y, -1) / 2)
    keys = np.broadcast_to(np.concatenate([np.zeros((1, d)), y])[:m], (*lead, len(y) + 1, d))
    keys = np.concatenate([keys, np.zeros((*lead, m - len(y) - 1, d))], -2) / root
    values = np.broadcast_to(np.eye(m), (*lead, m, m))

    def means(seed: int) -> Floats:
        """Return means of e^{omega . y} over both frequencies, for each head."""
        if t.adapter.has("pairs"):
            return np.asarray(estimate_kernels(t, np.zeros(d), y, 2, seed) * square)
        options: Keywords = {**sized, "seed": seed}
        out = t.call(np.zeros((*lead, n, d)), keys, values, **options)[..., 0, :]
        ratios: Floats = np.asarray(out[..., 1 : len(y) + 1] / out[..., :1] * square, float)
        return ratios

    start = t.new_seed()
    # Two frequencies that are far apart are recovered to most digits.
    best = max(range(start, start + 8), key=lambda seed: separation(means(seed), d))
    mean = means(best)

    def predict(mean: Floats, arrays: Arrays) -> tuple[Any, Any]:
        omega = np.empty((*lead, 2, d))
        for index in np.ndindex(*lead):
            omega[index] = match_pair(mean[index], d, c)
        return reference(t.adapter, arrays, {"omega": omega})

    for long in (1.0, 3.0, 6.0):
        if t.adapter.has("pairs"):
            sizes = (0.7 * long, 0.9)  # an estimate is e^(x . y)
            arrays: Arrays = tuple(t.normal(m, d, size=size) for size in sizes)
        else:
            sizes = (0.7 * long, 0.9 * long)
            q, k = (
                t.normal(*lead, i, d, size=s / root) for i, s in zip((n, m), sizes, strict=True)
            )
            arrays = (q, k, t.normal(*lead, m, d))
        options: Keywords = {**sized, "seed": best}
        got = t.call(*arrays, **options)
        want, allowed = predict(mean, arrays)
        # The error of each mean moves the prediction: to first order, by the sum of the moves.
        unit = recovery_error(t, d, c) * c
        for i in range(len(y)):
            moved = mean.copy()
            moved[..., i] *= 1 + 2 * unit
            allowed = allowed + float(np.max(np.abs(predict(moved, arrays)[0] - want)))
        t.equal(got, want, float(allowed))


@add_check
def feature_average(t: CheckRun) -> None:
    """Try 15 or 16 features, at x + y along an axis in both directions, and along the diagonal.

    The distribution of the estimate is compared with that of refattn's own draws, and its mean
    with the kernel (Catoni's bound, with the variance from the closed form).
    """
    d, features, coupling = 4, t.adapter["features"], t.adapter["coupling"]
    samples = 15 if coupling in ("iid", "orthogonal") else 16  # odd where blocks need not be whole
    x = t.normal(d, size=0.3)
    any_way = t.rng.standard_normal(d)
    any_way /= np.linalg.norm(any_way)
    axes = np.stack([np.eye(d)[0], -np.eye(d)[0], np.full(d, d**-0.5), any_way])
    y = t.adapter.exact(axes - x)
    estimates = draw_results(t, lambda seed: estimate_kernels(t, x, y, samples, seed))
    # The law has no formula: as many draws of the package stand for it.
    omega = _draw_own(t, samples, d, t.size)
    ours = np.stack([kernels.estimate(x, z, omega, features=features) for z in y], -1)
    n, many = len(estimates), len(ours)
    error = recovery_error(t, d, 1.0)
    for i, name in enumerate(("axis 0", "axis 0 reversed", "diagonal", "a random direction")):
        # In the halves rounding moves estimates, by as much as their logarithms' recovery allows.
        if precise(t.adapter):
            p = stats.dkwm_two_sample(estimates[:, i], ours[:, i])
        elif features == "trigonometric":
            continue
        else:
            logs = (np.log(np.maximum(z[:, i], 1e-300)) for z in (estimates, ours))
            p = stats.dkwm_two_sample(*logs, error=error)
        keep_p(t, f"law, {name}", p, n, stats.dkwm_two_sample, reference=many)
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
            note_moments(
                t, "", [(f"mean estimate at {name}", estimates[:, i], kernel, cap * kernel**2)]
            )
            p = stats.catoni(estimates[:, i] / kernel, 1.0, cap)
            keep_p(t, f"mean, {name}", p, n, stats.catoni, variance=cap)


# Own draws for each of the candidate's: as many as do not dominate the time.
_OWN = {"iid": 25, "sobol": 2, "halton": 2}


def _draw_own(t: CheckRun, samples: int, d: int, size: int) -> Floats:
    """Return many sets of frequencies of the package's own, of which d coordinates show."""
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


@add_check
def own_law(t: CheckRun) -> None:
    """Compare the distribution of results at S = 1 and 4 with that of refattn's own function.

    There are 6 keys, or 40 if the result with 6 keys does not depend on the seed.
    """
    size = t.near if t.adapter.can("omega") else 1.0  # without, problems are of that size
    for samples in (1, 4):
        sized = t.adapter.record.sized(samples)
        for m in (6, 40):
            arrays = t.problem(5, m, 4, size=size)[0]
            if _depends_on_seed(t, arrays, sized):
                _own_law(t, arrays, sized)
                break


def _depends_on_seed(t: CheckRun, arrays: Arrays, sized: Keywords) -> bool:
    """Return whether what the registered function gives depends on the seed."""
    first, *others = (_ends(black_box(t.adapter, arrays, sized | {"seed": s})) for s in range(8))
    allowed = allowed_error(t.adapter, arrays, sized | {"seed": 0}, first)
    return bool(np.max(np.abs(np.stack(others) - first)) > allowed)


def _own_law(t: CheckRun, arrays: Arrays, sized: Keywords) -> None:
    entries = draw_results(t, lambda seed: _ends(t.call(*arrays, **sized, seed=seed)))
    ours = np.stack([_ends(black_box(t.adapter, arrays, sized | {"seed": t.rng})) for _ in entries])
    error = 2 * allowed_error(t.adapter, arrays, sized | {"seed": t.new_seed()}, entries)
    label = ", ".join(f"{name} = {value}" for name, value in sized.items()) or "any size"
    for j, name in enumerate(("first", "last")):
        test = stats.dkwm_two_sample
        p = test(entries[:, j], ours[:, j], error=error)
        hidden = float(error > 1e-3 * np.std(ours[:, j]))  # all of it, where rounding may matter
        known = {"reference": len(ours)}
        keep_p(t, f"{label}, {name} entry", p, len(entries), test, hidden=hidden, **known)


def _ends(out: Any) -> Floats:
    return np.asarray(out, float).reshape(-1)[[0, -1]]


@add_check
def unseen_law(t: CheckRun) -> None:
    """Test nothing, and report UNDERPOWERED.

    To test the distribution, use float32 or float64 arrays and an epsilon of 0.
    """
    t.power["law of frequencies"] = (lambda alpha: math.inf, 1.0)
