"""The printed formulas in 120 digits, quadrature over the plane, and problems to try them on.

Accuracy: a logarithm is within CONTRACT * eps * b * (1 + its size + the squared norms) of the
printed formula, b the size of a block: Var = V + (b - 1) C may be V / b.

Simulation: every test has an exact null distribution or a non-asymptotic bound, and all of them
together a false-alarm probability of at most ALPHA, each p-value being held to ALPHA / TESTS.
"""

import math
from functools import lru_cache

import mpmath
import numpy as np

from refattn import theory
from refattn.judge import stats
from refattn.sampling import Gaussian

ALPHA = 1e-6
TESTS = 300  # more than the p-values that are compared with ALPHA / TESTS
SEED = 20250219
EPS = float(np.finfo(float).eps)
FEATURES = ("positive", "hyperbolic", "trigonometric")

mp = mpmath.mp.clone()
mp.dps = 120


def exact(x):
    """Turn floats into multiprecision numbers with the same value."""
    x = np.asarray(x)
    return np.array([mp.mpf(float(e)) for e in x.ravel()], dtype=object).reshape(x.shape)


def pair(d, size, features, seed=0):
    """x, y with |x + y| (|x - y| for trigonometric features) of a size, the other 1."""
    rng = np.random.default_rng([seed, d])
    a, b = (u / np.linalg.norm(u) for u in rng.standard_normal((2, d)))
    x, y = (size * a + b) / 2, (size * a - b) / 2
    return (x, -y) if features == "trigonometric" else (x, y)


def block_size(coupling, d):
    return {"iid": 1, "antithetic": 2}.get(coupling, d)


def fixed_norm(d, z):
    """0F1(; d/2; z): mean of exp(omega . u) for |omega|^2 |u|^2 / 4 = z, of cos where z < 0."""
    return mp.hyp0f1(mp.mpf(d) / 2, z)


@lru_cache
def simplex_moments(d, sign, order):
    """E|w_i + sign w_j|^{2k} in gamma functions, |w_i|^2 + |w_j|^2 ~ chi2_{2d} and their ratio."""
    h, c = mp.mpf(d) / 2, mp.mpf(-2 * sign) / (d - 1)
    beta = [mp.beta(h + mp.mpf(e) / 2, h + mp.mpf(e) / 2) / mp.beta(h, h) for e in range(order)]
    mixed = [c**e * b for e, b in enumerate(beta)]
    return [
        2**k * mp.rf(d, k) * sum(math.comb(k, e) * mixed[e] for e in range(k + 1))
        for k in range(order)
    ]


def simplex_mean(d, z, sign):
    """E 0F1(; d/2; |w_i + sign w_j|^2 z), as the sum of theory.md."""
    moments = simplex_moments(d, sign, 90 if abs(z) < 1 else 400)
    half = mp.mpf(d) / 2
    return sum(z**k * m / (mp.factorial(k) * mp.rf(half, k)) for k, m in enumerate(moments))


def printed(features, coupling, d, t):
    """Mean / kappa, V / kappa^2 and C / kappa^2 for N(0, I), t = |x + y|^2 or |x - y|^2."""
    even = features != "positive"
    sign = -1 if features == "trigonometric" else 1
    front = mp.exp(-sign * t)  # e^{-a} / kappa^2, or e^{a} / kappa^2
    mean, half = mp.mpf(1), mp.mpf(d) / 2
    if coupling == "regularised":
        mean = mp.sqrt(front) * fixed_norm(d, sign * d * t / 4)
        second, paired = fixed_norm(d, sign * d * t), fixed_norm(d, sign * d * t / 2)
        if even:
            second = (1 + second) / 2
        if even and d == 1:  # on the line cosh and cos are the same for omega = 1 and -1
            return mean, mp.mpf(0), None
        return mean, front * second - mean**2, front * paired - mean**2 if d > 1 else None
    variance = {
        "positive": mp.expm1(t),
        "hyperbolic": (1 - mp.exp(-t)) * mp.expm1(t) / 2,
        "trigonometric": mp.exp(t) * (1 - mp.exp(-t)) ** 2 / 2,
    }[features]
    if coupling == "iid" or (coupling != "antithetic" and d == 1):
        return mean, variance, None
    if coupling == "antithetic":
        return mean, variance, variance if even else front - 1
    if coupling == "orthogonal":
        return mean, variance, front * mp.hyp1f1(d, half, sign * t / 2) - 1
    signs = (1, -1) if even else (1,)
    paired = sum(simplex_mean(d, sign * t / 4, s) for s in signs) / len(signs)
    return mean, variance, front * paired - 1


def sizes_of_blocks(coupling, d, count):
    b = block_size(coupling, d)
    return [b] * (count // b) + [count % b]


def printed_logs(features, coupling, x, y, counts):
    """Mean, and for each number of frequencies log variance and log mean squared error."""
    ex, ey, d = exact(x), exact(y), len(x)
    t = ((ex - ey) ** 2 if features == "trigonometric" else (ex + ey) ** 2).sum()
    mean, one, paired = printed(features, coupling, d, t)
    logs = []
    for count in counts:
        pairs = sum(b * (b - 1) for b in sizes_of_blocks(coupling, d, count))
        variance = one / count + (paired * pairs / mp.mpf(count) ** 2 if pairs else 0)
        values = (variance, variance + (mean - 1) ** 2)
        logs.append([2 * (ex * ey).sum() + mp.log(v) if v > 0 else -mp.inf for v in values])
    return mean * mp.exp((ex * ey).sum()), logs


def units(got, want, x, y, b):
    """Error in units of eps b (1 + |want| + |x|^2 + |y|^2)."""
    if mp.isinf(want) or not math.isfinite(got):
        return 0.0 if float(got) == float(want) else math.inf
    size = 1 + abs(want) + float(np.sum(x * x) + np.sum(y * y))
    return float(abs(mp.mpf(float(got)) - want) / (EPS * b * size))


def accuracy(features, coupling, d, size):
    """Largest error of log variance, log mean squared error and mean, in the units above."""
    x, y = pair(d, size, features)
    names, b = {"features": features, "coupling": coupling}, block_size(coupling, d)
    counts = sorted({1, 2, max(d - 1, 1), d, d + 1, 3 * d + 1})
    mean, logs = printed_logs(features, coupling, x, y, counts)
    worst = 0.0
    for count, (log_variance, log_mse) in zip(counts, logs, strict=True):
        got = theory.log_kernel_variance(x, y, num_features=count, **names)
        worst = max(worst, units(got, log_variance, x, y, b))
        got = theory.log_kernel_mse(x, y, num_features=count, **names)
        worst = max(worst, units(got, log_mse, x, y, b))
    got = theory.kernel_mean(x, y, **names)
    # Fixed norms and cosines: a mean far below e^{a/2} has no relative accuracy.
    scale = abs(mean) + (mp.exp((x @ x + y @ y) / 2) if features == "trigonometric" else 0)
    error = abs(mp.mpf(float(got)) - mean) / scale / (EPS * b * (1 + x @ x + y @ y))
    return max(worst, float(error))


def gaussian_with(eigenvalues, seed=0, turned=True):
    s = np.asarray(eigenvalues, float)
    rng = np.random.default_rng(seed)
    u = np.linalg.qr(rng.standard_normal((len(s), len(s))))[0] if turned else np.eye(len(s))
    cov = (u * s) @ u.T
    return Gaussian(np.random.default_rng(seed).standard_normal(len(s)) / 2, (cov + cov.T) / 2)


def log_weighted_second_moment(x, y, proposal):
    """Log of |S|^(1/2) |P|^(-1/2) exp(b'P^-1 b/2 + mu'S^-1 mu/2 - a), P = 2I - S^-1."""
    d = len(x)
    cov = mp.matrix((np.eye(d) if proposal.cov is None else proposal.cov).tolist())
    mu, z = mp.matrix(proposal.mean.tolist()), mp.matrix(x.tolist()) + mp.matrix(y.tolist())
    inverse = cov**-1
    p = 2 * mp.eye(d) - inverse
    b = 2 * z - inverse * mu
    quadratic = (b.T * mp.lu_solve(p, b))[0] + (mu.T * inverse * mu)[0]
    a = (exact(x) ** 2).sum() + (exact(y) ** 2).sum()
    return (mp.log(mp.det(cov)) - mp.log(mp.det(p)) + quadratic) / 2 - a


def plane(d, half_width=18.0, points=361):
    axis = np.linspace(-half_width, half_width, points)
    grid = np.stack(np.meshgrid(*[axis] * d, indexing="ij"), -1).reshape(-1, d)
    return grid, (axis[1] - axis[0]) ** d


def log_normal(omega, mean, cov):
    u = omega - mean
    size = np.linalg.slogdet(2 * math.pi * cov)[1]
    return -(np.sum(u * np.linalg.solve(cov, u.T).T, -1) + size) / 2


def one_estimate(omega, x, y, features):
    """The estimate for each frequency (..., d)."""
    a = (x @ x + y @ y) / 2
    if features == "trigonometric":
        return np.exp(a) * np.cos(omega @ (x - y))
    z = omega @ (x + y)
    return np.exp(z - a) if features == "positive" else np.exp(-a) * np.cosh(z)


PROPOSALS = {
    "standard": lambda d: None,
    "shifted": lambda d: Gaussian(np.linspace(0.5, -0.4, d)),
    "gaussian": lambda d: gaussian_with(np.linspace(0.75, 1.6, d), seed=3),
}


def densities(omega, proposal):
    """p and p^2 / q at the points."""
    d = omega.shape[-1]
    log_p = log_normal(omega, np.zeros(d), np.eye(d))
    if proposal is None:
        return np.exp(log_p), np.exp(log_p)
    cov = np.eye(d) if proposal.cov is None else proposal.cov
    return np.exp(log_p), np.exp(2 * log_p - log_normal(omega, proposal.mean, cov))


def log_variance(x, y, features, coupling, count, **names):
    return theory.log_kernel_variance(
        x, y, features=features, coupling=coupling, num_features=count, **names
    )


def reject(p, label):
    assert p > ALPHA / TESTS, f"{label}: p = {p:.3g} with seed {SEED}"


def bounded_p_value(values, mean, low, high, slack=0.0):
    """P-value of |E values - mean| <= slack for iid values from `low` to `high`."""
    values = np.clip(values, low, high)  # but for rounding they are
    nearest = np.clip(np.mean(values), mean - slack, mean + slack)
    return stats.empirical_bernstein(values, float(nearest), low, high)
