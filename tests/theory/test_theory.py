"""The closed-form laws: against multiprecision, quadrature, simulation and each other.

Accuracy: a logarithm is within CONTRACT * eps * b * (1 + its size + the squared norms) of the
printed formula in 120 digits, b the size of a block: Var = V + (b - 1) C may be V / b.

Simulation: every test has an exact null distribution or a non-asymptotic bound, and all of them
together a false-alarm probability of at most ALPHA, each p-value being held to ALPHA / TESTS.
"""

import inspect
import math
from functools import lru_cache

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize, special, stats

from refattn import attend, kernels, random_feature_attention, softmax_attention, theory, vjp
from refattn.sampling import Gaussian, draw
from tests.reference import CONTRACT

ALPHA = 1e-6
TESTS = 300  # more than the p-values that are compared with ALPHA / TESTS
SEED = 20250219
EPS = float(np.finfo(float).eps)

FEATURES = ("positive", "hyperbolic", "trigonometric")
COUPLINGS = theory.COUPLINGS

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


# 1. The printed formulas in 120 digits


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
        2**k * mp.rf(d, k) * sum(mp.binomial(k, e) * mixed[e] for e in range(k + 1))
        for k in range(order)
    ]


def simplex_mean(d, z, sign):
    """E 0F1(; d/2; |w_i + sign w_j|^2 z), as the sum of theory.md."""
    moments = simplex_moments(d, sign, 90)
    half = mp.mpf(d) / 2
    return sum(z**k * m / (mp.factorial(k) * mp.rf(half, k)) for k, m in enumerate(moments))


def test_simplex_moments_by_expansion():
    d, k = 5, 4  # (r^2 + s^2 - r s / 2)^4 with E r^p = 2^{p/2} Gamma((d + p)/2) / Gamma(d/2)

    def chi(p):
        return mp.mpf(2) ** (mp.mpf(p) / 2) * mp.gamma(mp.mpf(d + p) / 2) / mp.gamma(mp.mpf(d) / 2)

    total = mp.mpf(0)
    for a in range(k + 1):
        for b in range(k + 1 - a):
            c = k - a - b
            count = math.factorial(k) // (math.factorial(a) * math.factorial(b) * math.factorial(c))
            total += count * mp.mpf(-1) ** c / 2**c * chi(2 * a + c) * chi(2 * b + c)
    assert abs(simplex_moments(d, 1, k + 1)[k] / total - 1) < mp.mpf(10) ** -100


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


DIMENSIONS = (1, 2, 3, 4, 5, 16, 64, 256)


@pytest.mark.long("orthogonal", "simplex", "regularised")
@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize("features", FEATURES)
def test_laws_against_mpmath(features, coupling, record_accuracy):
    sizes = [1e-8, 1e-4, 0.05, 0.9, 1.1, 3.0, 10.0, 40.0]
    if coupling == "simplex":
        sizes = sizes[:5]  # where 90 terms of its sum give 50 digits
    dimensions = (2, 3, 4, 16, 256) if coupling == "simplex" else DIMENSIONS
    for d in (*dimensions, 512) if coupling in ("orthogonal", "regularised") else dimensions:
        for size in sizes:
            worst = accuracy(features, coupling, d, size)
            record_accuracy(f"theory, {features}, {coupling}, over b", "float64", worst)
            assert worst <= CONTRACT, (d, size)


@pytest.mark.long("hyperbolic", "64")
@pytest.mark.parametrize(
    ("features", "d"), [(f, d) for f in FEATURES for d in (2, 3)] + [("positive", 64)]
)
def test_simplex_far_apart_against_mpmath(features, d):
    # |z| = 3 and 10 by mpmath quadrature over the angle between the norms, in place of the sum.
    with mp.workdps(30):
        norm = mp.beta(mp.mpf(d) / 2, mp.mpf(1) / 2)
        for size in (3.0, 10.0):
            x, y = pair(d, size, features)
            ex, ey = exact(x), exact(y)
            sign = -1 if features == "trigonometric" else 1
            t = ((ex + sign * ey) ** 2).sum()
            paired = mp.mpf(0)
            signs = (1,) if features == "positive" else (1, -1)
            for s in signs:
                c = -mp.mpf(s) / (d - 1)

                def term(phi, c=c, t=t, sign=sign):
                    z = sign * t * (1 + c * mp.sin(phi)) / 2
                    return mp.sin(phi) ** (d - 1) * mp.hyp1f1(d, mp.mpf(d) / 2, z)

                paired += 2 * mp.quad(term, [0, 1, mp.pi / 2]) / norm / len(signs)
            _, one, _ = printed(features, "orthogonal", d, t)
            variance = (one + (d - 1) * (mp.exp(-sign * t) * paired - 1)) / d
            want = mp.log(variance) + 2 * (ex * ey).sum()
            names = {"features": features, "coupling": "simplex", "num_features": d}
            got = theory.log_kernel_variance(x, y, **names)
            assert units(got, want, x, y, d) <= CONTRACT


def rotation(d, seed):
    return np.linalg.qr(np.random.default_rng(seed).standard_normal((d, d)))[0]


def gaussian_with(eigenvalues, seed=0, turned=True):
    s = np.asarray(eigenvalues, float)
    u = rotation(len(s), seed) if turned else np.eye(len(s))
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


def proposal_units(x, y, proposal):
    second, first = log_weighted_second_moment(x, y, proposal), 2 * (exact(x) * exact(y)).sum()
    want = first + mp.log(mp.expm1(second - first))
    got = theory.log_kernel_variance(x, y, proposal=proposal)
    s = proposal.eigen[0]
    # Eigenvalues are known to eps times the largest, what they give to that over 2 s - 1.
    return units(got, want, x, y, 1) / float(np.max(s) / np.min(np.abs(2 * s - 1)))


@pytest.mark.long("16")
@pytest.mark.parametrize("d", [1, 2, 3, 5, 16])
def test_proposals_against_mpmath(d):
    rng = np.random.default_rng(d)
    for seed in range(4):
        x, y = rng.standard_normal((2, d)) / math.sqrt(d)
        for low, high in ((0.51, 0.7), (0.6, 3.0), (1.0, 1.0)):
            proposal = gaussian_with(rng.uniform(low, high, d), seed)
            assert proposal_units(x, y, proposal) <= CONTRACT * d
        spread = gaussian_with(np.geomspace(1, 1e9, d), seed, turned=False)
        assert proposal_units(x, y, spread) <= CONTRACT
        turned = gaussian_with(np.geomspace(1, 1e9, d), seed)
        assert proposal_units(x, y, turned) <= CONTRACT * d


@pytest.mark.parametrize("d", [1, 2, 3, 16])
@pytest.mark.parametrize("scale", [0.6, 1.0, 4.0])
@pytest.mark.parametrize("coupling", ["orthogonal", "simplex", "antithetic"])
def test_isotropic_proposals_in_blocks(coupling, scale, d):
    # V by the printed integral; C depends on z - mu alone, as derived in `log_kernel_variance`,
    # but for antithetic pairs, where the norms are shared: E w w' xi xi' = e^{offset - |z - mu|^2}.
    x, y = pair(d, 1.3, "positive")
    proposal = Gaussian(np.full(d, 0.3), scale * np.eye(d))
    first, b = 2 * (exact(x) * exact(y)).sum(), block_size(coupling, d)
    one = mp.expm1(log_weighted_second_moment(x, y, proposal) - first)
    t = ((exact(x) + exact(y) - exact(proposal.mean)) ** 2).sum()
    if coupling == "antithetic":
        offset = mp.mpf(d) / 2 * mp.log(mp.mpf(scale) ** 2 / (2 * mp.mpf(scale) - 1))
        paired = mp.exp(offset - t) - 1
    else:
        paired = printed("positive", coupling, d, t)[2] or mp.mpf(0)
    want = mp.log((one + (b - 1) * paired) / b) + first
    got = theory.log_kernel_variance(x, y, coupling=coupling, num_features=b, proposal=proposal)
    assert units(got, want, x, y, b * d) <= CONTRACT


def test_infinite_and_zero_variance_of_proposals():
    x, y = np.array([0.5, -0.2]), np.array([0.1, 0.4])
    for eigenvalues in ([0.5, 1.0], [0.3, 2.0], [0.1, 0.1]):
        proposal = gaussian_with(eigenvalues, turned=False)
        for features in FEATURES:
            got = theory.log_kernel_variance(x, y, features=features, proposal=proposal)
            assert got == math.inf
        assert theory.num_features_for_kernel(0.1, x, y, proposal=proposal) == math.inf
    for proposal in (Gaussian(x + y), Gaussian(x + y, np.eye(2))):
        for coupling in COUPLINGS:
            got = theory.log_kernel_variance(x, y, coupling=coupling, proposal=proposal)
            assert got == -math.inf
            assert theory.num_features_for_kernel(
                0.1, x, y, coupling=coupling, proposal=proposal
            ) == block_size(coupling, 2)


@pytest.mark.parametrize("coupling", ["iid", "antithetic", "orthogonal", "simplex"])
def test_infinite_variance_in_blocks(coupling):
    proposal = Gaussian([0.0, 0.1], 0.4 * np.eye(2))
    x, y = np.array([[0.0, 0.1], [0.5, 0.1], [20.0, 0.0]]), np.zeros(2)
    names = {"coupling": coupling, "proposal": proposal}
    for count in (1, 2, 3, 4):
        got = theory.log_kernel_variance(x, y, num_features=count, **names)
        assert got.tolist() == [math.inf] * 3
    assert theory.num_features_for_kernel(0.1, x, y, **names).tolist() == [math.inf] * 3


# 2. Quadrature: the trapezoidal rule on the whole plane, accurate to rounding


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


@pytest.mark.parametrize("name", PROPOSALS)
@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("d", [1, 2])
def test_variance_of_one_by_quadrature(features, name, d):
    x, y = np.array([0.7, -0.3])[:d], np.array([0.4, 0.5])[:d]
    proposal = PROPOSALS[name](d)
    omega, cell = plane(d)
    p, p_over = densities(omega, proposal)
    estimate = one_estimate(omega, x, y, features)
    mean = cell * np.sum(p * estimate)
    variance = cell * np.sum(p_over * estimate**2) - mean**2
    np.testing.assert_allclose(mean, theory.kernel_mean(x, y, features=features), rtol=1e-12)
    names = {"features": features, "coupling": "iid", "num_features": 1, "proposal": proposal}
    np.testing.assert_allclose(theory.kernel_variance(x, y, **names), variance, rtol=1e-11)


def test_any_target_and_any_number_of_features():
    # Whatever the square of the target is: 1e300 is reached by what makes the law hold.
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 4, 2))
    law = theory.attention_law(q, k, v, num_features=1)
    enough = np.ceil(10 * np.mean(1 / law.ess))
    for target in (1e10, 1e154, 1e300, 1.7e308):
        assert theory.num_features_for(target, q, k, v) == enough
    few, many = (theory.num_features_for(target, q, k, v) for target in (1e-10, 1e-140))
    np.testing.assert_allclose(many / 1e260, few, rtol=1e-9)
    assert theory.num_features_for(1e-170, q, k, v) == math.inf
    for coupling in theory.COUPLINGS:
        some = theory.log_kernel_variance(q, k, coupling=coupling, num_features=10**8)
        more = theory.log_kernel_variance(q, k, coupling=coupling, num_features=10**300)
        np.testing.assert_allclose(more + 292 * math.log(10), some, rtol=1e-12)


@pytest.mark.parametrize("law", ["mean", "variance", "mse"])
def test_a_law_and_its_log_have_the_same_defaults(law):
    plain, log = (getattr(theory, prefix + law) for prefix in ("kernel_", "log_kernel_"))
    assert inspect.signature(plain) == inspect.signature(log)
    x, y = [0.3, 0.4], [0.5, -0.1]
    np.testing.assert_allclose(plain(x, y), np.exp(log(x, y)), rtol=1e-14)


@pytest.mark.parametrize("coupling", ["orthogonal", "simplex", "antithetic", "regularised"])
@pytest.mark.parametrize("features", FEATURES)
def test_pairs_by_quadrature(features, coupling):
    # d = 2: both frequencies at a turn of the plane, norms integrated out one by one.
    x, y = np.array([0.7, -0.3]), np.array([0.4, 0.5])
    nodes, weight = np.polynomial.legendre.leggauss(80)
    r = 6.5 * (nodes + 1)
    weight = 6.5 * weight * r * np.exp(-(r**2) / 2)
    if coupling == "regularised":
        r, weight = np.array([math.sqrt(2)]), np.ones(1)
    turn = np.arange(64) * 2 * math.pi / 64
    apart = math.pi / 2 if coupling in ("orthogonal", "regularised") else math.pi

    def at(angle):
        unit = np.stack([np.cos(angle), np.sin(angle)], -1)
        return one_estimate(r[:, None] * unit[:, None], x, y, features)  # (turns, radii)

    one, two = at(turn), at(turn + apart)
    mean = np.mean(one @ weight)
    if coupling == "antithetic":
        product = np.mean((one * two) @ weight)
    else:
        product = np.mean((one @ weight) * (two @ weight))
    variance = np.mean(one**2 @ weight) - mean**2
    names = {"features": features, "coupling": coupling}
    np.testing.assert_allclose(theory.kernel_mean(x, y, **names), mean, rtol=1e-12)
    for count, pairs in ((1, 0), (2, 2), (3, 2), (4, 4)):
        want = variance / count + pairs / count**2 * (product - mean**2)
        got = theory.kernel_variance(x, y, num_features=count, **names)
        np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-14)


def attention_by_quadrature(q, k, v, proposal, visible):
    """V, B, E w^2 of self-normalised attention and the variance of IS, for one head, S = 1."""
    omega, cell = plane(q.shape[-1])
    p, p_over = densities(omega, proposal)
    scores = np.where(visible, q @ k.T, -np.inf)
    share = np.exp(scores) / np.sum(np.exp(scores), -1, keepdims=True)
    mean = share @ v
    keys = np.exp(omega @ k.T - np.sum(k * k, -1) / 2)
    rows = []
    for i in range(len(q)):
        xi = np.exp(omega @ q[i] - q[i] @ q[i] / 2)[:, None] * keys * visible[i]
        xi = xi / np.sum(np.exp(scores[i]))  # sums to w(omega), of mean 1 under p
        w = np.sum(xi, -1)
        n = xi @ v - w[:, None] * mean[i]
        np.testing.assert_allclose(cell * np.sum(p * w), 1, rtol=1e-10)
        rows.append(
            (
                cell * p_over @ n**2,
                -cell * p_over @ (n * w[:, None]),
                cell * p_over @ w**2,
                cell * p_over @ (xi @ v) ** 2 - mean[i] ** 2,
            )
        )
    return [np.array(column) for column in zip(*rows, strict=True)]


@pytest.mark.parametrize("name", PROPOSALS)
@pytest.mark.parametrize("d", [1, 2])
@pytest.mark.parametrize("masking", ["none", "mask", "causal"])
def test_attention_laws_by_quadrature(masking, d, name):
    rng = np.random.default_rng(5)
    q, k, v = (rng.standard_normal((3, c)) * 0.8 for c in (d, d, 2))
    mask = np.array([[1, 1, 0], [0, 1, 1], [1, 1, 1]], bool)
    seen = {"none": np.ones((3, 3), bool), "mask": mask, "causal": np.tri(3, dtype=bool)}
    options = {"mask": {"mask": mask}, "causal": {"causal": True}}.get(masking, {})
    proposal, root = PROPOSALS[name](d), d**-0.25
    square, bias, weight, sampled = attention_by_quadrature(
        q * root, k * root, v, proposal, seen[masking]
    )
    law = theory.attention_law(q, k, v, num_features=7, proposal=proposal, **options)
    np.testing.assert_allclose(law.variance, square / 7, rtol=1e-9, atol=1e-13)
    np.testing.assert_allclose(law.bias, bias / 7, rtol=1e-9, atol=1e-13)
    np.testing.assert_allclose(law.ess, 7 / weight, rtol=1e-10)
    law = theory.importance_sampling_law(q, k, v, num_features=7, proposal=proposal, **options)
    np.testing.assert_allclose(law.variance, sampled / 7, rtol=1e-9, atol=1e-13)
    np.testing.assert_array_equal(law.bias, np.zeros((3, 2)))


@pytest.mark.long("causal")
@pytest.mark.parametrize("name", PROPOSALS)
@pytest.mark.parametrize("d", [1, 2])
@pytest.mark.parametrize("masking", ["none", "mask", "causal"])
def test_gradient_law_by_quadrature(masking, d, name):
    """Covariances of frequencies and values under weights of mean 1, expanded to second order."""
    rng = np.random.default_rng(5)
    q, k, v = (rng.standard_normal((3, c)) * 0.8 for c in (d, d, 2))
    d_out = rng.standard_normal((3, 2))
    mask = np.array([[1, 1, 0], [0, 1, 1], [1, 1, 1]], bool)
    seen = {"none": np.ones((3, 3), bool), "mask": mask, "causal": np.tri(3, dtype=bool)}[masking]
    options = {"mask": {"mask": mask}, "causal": {"causal": True}}.get(masking, {})
    proposal, root = PROPOSALS[name](d), d**-0.25
    law = theory.gradient_law(q, k, v, d_out, num_features=7, proposal=proposal, **options)
    exact = vjp(softmax_attention, q, k, v, **options)[1](d_out).q
    omega, cell = plane(d)
    p, p_over = densities(omega, proposal)
    q, k = root * q, root * k
    keys = np.exp(omega @ k.T - np.sum(k * k, -1) / 2)
    for i in range(3):
        xi = np.exp(omega @ q[i] - q[i] @ q[i] / 2)[:, None] * keys * seen[i]
        xi = xi / np.sum(np.exp(q[i] @ k.T) * seen[i])
        a, f = np.sum(xi, -1), xi @ (v @ d_out[i])  # weights, and these times values
        mean_f = cell * p @ f
        for c in range(d):
            mean_w = cell * p @ (a * omega[:, c])
            y = (omega[:, c] - mean_w) * (f - a * mean_f)  # the product of deviations, weighted
            gradient = cell * p @ y
            np.testing.assert_allclose(root * gradient, exact[i, c], rtol=1e-9, atol=1e-12)
            variance = cell * p_over @ (y - a * gradient) ** 2
            bias = cell * (gradient * (p_over @ a**2) - 2 * (p_over @ (a * y)))
            variance = root**2 * variance / 7
            np.testing.assert_allclose(law.variance[i, c], variance, rtol=1e-8, atol=1e-20)
            np.testing.assert_allclose(law.bias[i, c], root * bias / 7, rtol=1e-8, atol=1e-11)
        np.testing.assert_allclose(law.ess[i], 7 / (cell * p_over @ a**2), rtol=1e-9)


@pytest.mark.soak
@pytest.mark.long
def test_gradient_law_of_pullbacks():
    """Monte Carlo of `vjp` at many features, with a gauge and grouped heads.

    Means of 8,000 gradients are normal, nearly, and so is the logarithm of their variance; both are
    compared at 6 standard errors, beyond which one of 16 falls with probability 4e-8. A factor of
    1.15 in a variance is seen. At 600 effective samples the next terms are 4 % of these.
    """
    rng = np.random.default_rng(SEED)
    q, k, v, d_out = (
        0.2 * rng.standard_normal(shape) for shape in ((2, 2, 2), (1, 4, 2), (1, 4, 2), (2, 2, 2))
    )
    proposal = Gaussian(
        0.2 * np.ones(2),
        np.array([[1.2, 0.3], [0.3, 1.1]]),
        gauge=np.array([[1.0, 0.4], [0.0, 0.9]]),
    )
    runs, count = 8000, 1000
    law = theory.gradient_law(q, k, v, d_out, num_features=count, proposal=proposal, scale=1.0)
    assert np.min(law.ess) > 600
    exact = vjp(softmax_attention, q, k, v, scale=1.0)[1](d_out).q
    found = np.empty((runs, *q.shape))
    for run in range(runs):
        pullback = vjp(
            random_feature_attention,
            *(q, k, v),
            num_features=count,
            proposal=proposal,
            rng=rng,
            scale=1.0,
        )[1]
        found[run] = pullback(d_out).q
    scores = (np.mean(found, 0) - exact - law.bias) / np.sqrt(law.variance / runs)
    assert np.max(np.abs(scores)) < 6
    spread = np.var(found, 0, ddof=1)
    kurtosis = np.mean((found - np.mean(found, 0)) ** 4, 0) / spread**2
    scores = np.log(spread / law.variance) / np.sqrt((kurtosis - 1) / runs)
    assert np.max(np.abs(scores)) < 6


def test_gradient_law_has_no_more_than_it_is_given():
    q, k, v = np.ones((2, 1)), np.ones((3, 1)), np.arange(3.0)[:, None]
    law = theory.gradient_law(q, k, v, np.ones((2, 1)), num_features=4, mask=np.zeros((2, 3), bool))
    for x in (law.bias, law.variance):
        np.testing.assert_array_equal(x, np.zeros((2, 1)))
    one = theory.gradient_law(q, k[:1], v[:1], np.ones((2, 1)), num_features=4)
    np.testing.assert_array_equal(one.variance, np.zeros((2, 1)))  # every estimate is 0
    narrow = Gaussian(np.zeros(1), np.array([[0.5]]))
    infinite = theory.gradient_law(q, k + v, v, np.ones((2, 1)), num_features=4, proposal=narrow)
    assert np.isinf(infinite.variance).all()
    with pytest.raises(ValueError, match="`d_out` must have the shape of the output"):
        theory.gradient_law(q, k, v, np.ones((2, 2)), num_features=4)
    with pytest.raises(TypeError, match="`proposal` must be a Gaussian"):
        theory.gradient_law(q, k, v, np.ones((2, 1)), num_features=4, proposal=3)


def test_leading_axes_grouped_heads_and_batches_of_proposals():
    rng = np.random.default_rng(6)
    q, k, v = (rng.standard_normal(s) for s in ((2, 4, 3, 2), (2, 2, 5, 2), (2, 2, 5, 3)))
    for law_of in (theory.attention_law, theory.importance_sampling_law):
        law = law_of(q, k, v, num_features=3)
        assert (law.variance.shape, law.ess.shape) == ((2, 4, 3, 3), (2, 4, 3))
        for b, h in np.ndindex(2, 4):
            one = law_of(q[b, h], k[b, h // 2], v[b, h // 2], num_features=3)
            for whole, part in zip(law, one, strict=True):
                np.testing.assert_allclose(whole[b, h], part, rtol=1e-12)
    counts = theory.num_features_for(0.1, q, k, v)
    assert counts.shape == (2, 4)
    assert counts[1, 3] == theory.num_features_for(0.1, q[1, 3], k[1, 1], v[1, 1])
    bound = theory.randomized_attention_law(q, k, v, num_samples=3)
    one = theory.randomized_attention_law(q[1, 2], k[1, 1], v[1, 1], num_samples=3)
    np.testing.assert_allclose(bound.variance[1, 2], one.variance, rtol=1e-13)
    k, v = np.repeat(k, 2, 1), np.repeat(v, 2, 1)
    cov = np.stack([gaussian_with([0.8, 1.5], seed).eigen[1] for seed in range(4)])
    batch = Gaussian(rng.standard_normal((4, 2)), cov * [0.8, 1.5] @ np.swapaxes(cov, -1, -2))
    law = theory.attention_law(q, k, v, num_features=3, proposal=batch)
    x = rng.standard_normal((2, 4, 2))
    kernel = theory.log_kernel_variance(x, x / 2, proposal=batch)
    for b, h in np.ndindex(2, 4):
        member = Gaussian(batch.mean[h], batch.cov[h])
        one = theory.attention_law(q[b, h], k[b, h], v[b, h], num_features=3, proposal=member)
        np.testing.assert_allclose(law.variance[b, h], one.variance, rtol=1e-11)
        want = theory.log_kernel_variance(x[b, h], x[b, h] / 2, proposal=member)
        np.testing.assert_allclose(kernel[b, h], want, rtol=1e-12)


def test_randomized_attention_bound():
    omega, cell = plane(1, 60.0, 12001)
    for spread, near in ((0.5, False), (2.0, False), (30.0, True)):
        q, v = np.zeros((1, 1)), np.array([[0.0], [1.0], [3.0]])
        k = np.array([[-1.0], [0.0], [1.0]]) * spread
        q = np.array([[0.3 / spread]])
        share = np.exp(q @ k.T)[0] / np.sum(np.exp(q @ k.T))
        log_keys = omega * k.T - k.T**2 / 2
        part = special.softmax(log_keys, axis=-1)
        density = np.exp(-((omega - q[0] - k.T) ** 2) / 2) @ share / math.sqrt(2 * math.pi)
        f = part @ v[:, 0]
        mean = cell * np.sum(density * f)
        variance = cell * np.sum(density * (f - mean) ** 2)
        law = theory.randomized_attention_law(q, k, v, num_samples=5, scale=1.0)
        np.testing.assert_allclose(mean, share @ v[:, 0], rtol=1e-12)
        assert variance / 5 <= law.variance[0, 0] * (1 + 1e-12)
        assert (variance / 5 > law.variance[0, 0] * (1 - 1e-12)) == near
        np.testing.assert_array_equal(law.ess, [5.0])
        np.testing.assert_array_equal(law.bias, [[0.0]])


# 3. Simulation


def reject(p, label):
    assert p > ALPHA / TESTS, f"{label}: p = {p:.3g} with seed {SEED}"


def normal_p_value(u):
    """Exact p-value of iid N(0, 1): Kolmogorov-Smirnov, mean and sum of squares, Bonferroni."""
    n = len(u)
    chi2 = stats.chi2(n - 1)
    spread = float(np.sum((u - np.mean(u)) ** 2))
    p = (
        ks_p_value(special.ndtr(u)),
        2 * stats.norm.sf(abs(u.sum()) / math.sqrt(n)),
        2 * min(chi2.cdf(spread), chi2.sf(spread)),
    )
    return float(min(1.0, len(p) * min(p)))


def ks_p_value(u):
    """Exact p-value of iid uniform numbers."""
    n, u = len(u), np.sort(u)
    rank = np.arange(n)
    return float(stats.kstwo.sf(max(np.max((rank + 1) / n - u), np.max(u - rank / n)), n))


def bounded_p_value(values, width, mean, slack=0.0):
    """P-value of |E values - mean| <= slack for iid values in an interval of a width.

    Maurer and Pontil's empirical Bernstein bound, inverted: |average - E| exceeds
    sqrt(2 v l / n) + 7 width l / (3 (n - 1)) with probability at most 4 e^-l.
    """
    n, t = len(values), abs(float(np.mean(values)) - mean) - slack
    a, b = 7 * width / (3 * (n - 1)), math.sqrt(2 * float(np.var(values, ddof=1)) / n)
    root = (math.sqrt(b * b + 4 * a * max(t, 0.0)) - b) / (2 * a)
    return min(1.0, 4 * math.exp(-(root**2)))


def catoni_p_value(values, mean, variance):
    """P-value of iid values of this mean and at most this variance, however heavy their tails."""
    n = len(values)
    rate = math.sqrt(2 * math.log(2 * TESTS / ALPHA) / (n * variance))
    t = rate * (values - mean)
    total = float(np.sum(np.sign(t) * np.log1p(np.abs(t) + t * t / 2)))
    return min(1.0, 2 * math.exp(-(abs(total) - n * rate**2 * variance / 2)))


@pytest.mark.parametrize("shift", [0.0, 0.4])
@pytest.mark.parametrize("d", [1, 2, 16, 64])
def test_one_positive_estimate_is_lognormal(d, shift):
    """Exact: mean and variance of the law determine the lognormal of one weighted feature pair."""
    lognormal_check(d, shift)


def lognormal_check(d, shift):
    x, y = pair(d, 1.0, "positive")
    proposal = Gaussian(np.full(d, shift / math.sqrt(d))) if shift else None
    omega, log_weight = draw(20_000, d, proposal=proposal, rng=SEED)
    logs = omega @ (x + y) - (x @ x + y @ y) / 2 + log_weight
    log_mean = theory.log_kernel_mean(x, y, proposal=proposal)
    ratio = theory.log_kernel_variance(x, y, proposal=proposal) - 2 * log_mean
    variance = np.log1p(np.exp(ratio))
    u = (logs - (log_mean - variance / 2)) / np.sqrt(variance)
    reject(normal_p_value(u), ("lognormal", d, shift))


BLOCKS = {2: 20_000, 4: 20_000, 16: 3000, 64: 300}


@lru_cache
def blocks_of(coupling, d, size=None):
    """Independent blocks (n, b, d), full or cut to a size, as `draw` makes them."""
    b, n = block_size(coupling, d), BLOCKS[d]
    if coupling == "antithetic":  # its halves pair the first with the first of the second half
        omega = draw(2 * n, d, coupling=coupling, rng=SEED).omega
        return np.stack([omega[:n], omega[n:]], 1)
    omega = draw(n * b, d, coupling=coupling, rng=SEED).omega.reshape(n, b, d)
    return omega[:, :size]


@pytest.mark.long("4", "2", "simplex", "regularised", "orthogonal")
@pytest.mark.parametrize("d", BLOCKS)
@pytest.mark.parametrize("coupling", COUPLINGS)
def test_trigonometric_estimates(coupling, d):
    """Bounded: without e^{a/2} the mean of cosines is in [-1, 1], and so is its mean's law."""
    cosine_check(coupling, d)


def cosine_check(coupling, d):
    for size in (1.0, 1.7):
        x, y = pair(d, size, "trigonometric")
        for count in {block_size(coupling, d), max(1, block_size(coupling, d) // 2)}:
            names = {"features": "trigonometric", "coupling": coupling}
            scale = math.exp(-(x @ x + y @ y) / 2)
            mean = float(theory.kernel_mean(x, y, **names)) * scale
            variance = float(theory.kernel_variance(x, y, num_features=count, **names)) * scale**2
            average = np.mean(np.cos(blocks_of(coupling, d, count) @ (x - y)), -1)
            label = (coupling, d, size, count)
            reject(bounded_p_value(average, 2.0, mean), ("mean", *label))
            square = (average - mean) ** 2
            width = (1 + abs(mean)) ** 2
            if coupling != "antithetic" or count == 2:
                reject(bounded_p_value(square, width, variance), ("variance", *label))


@pytest.mark.long("4", "simplex", "regularised", "orthogonal")
@pytest.mark.parametrize("d", [2, 4, 16])
@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize("features", ["positive", "hyperbolic"])
def test_means_of_positive_and_hyperbolic_estimates(features, coupling, d):
    """Catoni with the law's own variance: valid for heavy tails."""
    x, y = pair(d, 1.0, features)
    b = block_size(coupling, d)
    names = {"features": features, "coupling": coupling}
    mean = float(theory.kernel_mean(x, y, **names))
    variance = float(theory.kernel_variance(x, y, num_features=b, **names))
    average = np.mean(one_estimate(blocks_of(coupling, d), x, y, features), -1)
    reject(catoni_p_value(average, mean, variance), (features, coupling, d))


def law_of_two(coupling, d):
    """|w_i + w_j|^2 and |w_i - w_j|^2 for two frequencies of a block, and their probabilities."""
    if coupling == "regularised":
        return np.full(1, 2.0 * d), np.full(1, 2.0 * d), np.ones(1)
    if coupling == "antithetic":
        g, weight = special.roots_genlaguerre(60, d / 2 - 1)
        return 0 * g, 8 * g, weight / weight.sum()
    g, weight = special.roots_genlaguerre(60, d - 1)  # |w_i|^2 + |w_j|^2 = 2 g
    nodes, beta = special.roots_legendre(100)  # |w_i|^2 is the share (1 + cos phi) / 2 of it
    sine = np.sin(math.pi * (nodes + 1) / 2)
    beta = beta * sine ** (d - 1)
    cross = 0 * sine if coupling == "orthogonal" else -sine / (d - 1)
    both = weight[:, None] * beta
    plus, minus = 2 * g[:, None] * (1 + cross), 2 * g[:, None] * (1 - cross)
    return plus, minus, both / both.sum()


@pytest.mark.parametrize("d", [2, 4, 16])
@pytest.mark.parametrize("coupling", ["orthogonal", "simplex", "antithetic", "regularised"])
@pytest.mark.parametrize("features", FEATURES)
def test_pairs_from_the_law_of_their_sum(features, coupling, d):
    # Deterministic: C from the law of |w_i + w_j|, which the next test finds in the draws.
    pair_check(features, coupling, d)


def pair_check(features, coupling, d):
    x, y = pair(d, 1.2, features)
    sign = -1 if features == "trigonometric" else 1
    t = np.sum((x + sign * y) ** 2)
    plus, minus, weight = law_of_two(coupling, d)
    both = (plus,) if features == "positive" else (plus, minus)
    log_scale = -sign * (x @ x + y @ y)
    mean = float(theory.kernel_mean(x, y, features=features, coupling=coupling))

    def transform(square):
        z = square * t / 4
        if sign > 0:
            return special.hyp0f1(d / 2, z)
        nu, u = d / 2 - 1, 2 * np.sqrt(np.maximum(z, 1e-20))
        return special.gamma(d / 2) * (u / 2) ** -nu * special.jv(nu, u)

    product = np.mean([np.sum(weight * transform(square)) for square in both]) * np.exp(log_scale)
    b = block_size(coupling, d)
    names = {"features": features, "coupling": coupling}
    one = float(theory.kernel_variance(x, y, num_features=1, **names))
    for count in (b, b + 1, 3 * b + 1):
        pairs = sum(n * (n - 1) for n in sizes_of_blocks(coupling, d, count))
        want = one / count + pairs / count**2 * (product - mean**2)
        got = float(theory.kernel_variance(x, y, num_features=count, **names))
        assert abs(got - want) < 1e-7 * one, (features, coupling, d, count)


@pytest.mark.long("4")
@pytest.mark.parametrize("d", [2, 4, 16])
@pytest.mark.parametrize("coupling", ["orthogonal", "simplex", "antithetic", "regularised"])
def test_law_of_the_sum_of_two(coupling, d):
    """Exact: norms, angle and the direction of w_i + w_j, for the first and last of a block."""
    omega = blocks_of(coupling, d)
    one, two = omega[:, 0], omega[:, -1]
    a, b = np.sum(one**2, -1), np.sum(two**2, -1)
    total = one + two
    if coupling == "antithetic":
        np.testing.assert_array_equal(total, 0 * total)
        reject(ks_p_value(stats.chi2(d).cdf(a)), ("norm", coupling, d))
        return
    cosine = np.sum(one * two, -1) / np.sqrt(a * b)
    np.testing.assert_allclose(cosine, -1 / (d - 1) if coupling == "simplex" else 0, atol=1e-12)
    direction = total[:, 0] / np.linalg.norm(total, axis=-1)
    uniform = stats.beta((d - 1) / 2, (d - 1) / 2).cdf(np.clip((1 + direction) / 2, 0, 1))
    if coupling == "regularised":
        np.testing.assert_allclose(np.stack([a, b]), d, rtol=1e-12)
    else:
        size, share = stats.chi2(2 * d).cdf(a + b), stats.beta(d / 2, d / 2).cdf(a / (a + b))
        # Independent uniforms add up to a uniform modulo 1.
        laws = {"norms": size, "share": share, "both": size + share, "direction": size + uniform}
        for name, u in laws.items():
            reject(ks_p_value(u % 1), (name, coupling, d))
    reject(ks_p_value(uniform), ("direction", coupling, d))


def test_attention_law_in_its_regime():
    """Bounded: outputs in [0, 1]; the slack is the terms of order 1/S^2 by quadrature.

    With N = sum (v - mu) w_j and B = sum w_j averaged over S draws, out - mu = N / B and
    E N/B = -E N(B-1) + E N(B-1)^2 - E N(B-1)^3 + ...,
    E N^2/B^2 = E N^2 - 2 E N^2(B-1) + 3 E N^2(B-1)^2 - ...
    Twice the terms of order 1/S^2 allows for the rest of series in 1/ess.
    """
    attention_check()


def attention_check():
    count, runs = 50, 100_000
    q, k = np.array([[0.5]]), np.array([[-0.6], [0.2], [0.6]])
    v = np.array([[0.0], [0.4], [1.0]])
    share = np.exp(q @ k.T)[0] / np.sum(np.exp(q @ k.T))
    mean = float(share @ v[:, 0])

    def weights(omega):
        xi = np.exp(omega * (q[0] + k.T) - (q[0] ** 2 + k.T**2) / 2)
        return xi / np.sum(np.exp(q @ k.T))

    omega, cell = plane(1)
    p, w = cell * np.exp(log_normal(omega, np.zeros(1), np.eye(1))), weights(omega)
    n, b = w @ (v[:, 0] - mean), np.sum(w, -1) - 1
    law = theory.attention_law(q, k, v, num_features=count, scale=1.0)
    assert law.in_regime.all()
    second_bias = (p @ (n * b * b) - 3 * (p @ (n * b)) * (p @ (b * b))) / count**2
    crossed = -2 * p @ (n * n * b) + 3 * (p @ (n * n) * (p @ (b * b)) + 2 * (p @ (n * b)) ** 2)
    bias_slack = 2 * abs(second_bias)
    second = float(law.variance[0, 0] + law.bias[0, 0] ** 2)
    slack = 2 * abs(crossed) / count**2

    rng = np.random.default_rng(SEED)
    out = np.empty(runs)
    for rows in np.array_split(np.arange(runs), 20):
        w = weights(rng.standard_normal((len(rows), count, 1))).sum(1)
        out[rows] = w @ v[:, 0] / np.sum(w, -1)
    assert bias_slack < abs(law.bias[0, 0]) / 3
    assert slack < law.variance[0, 0] / 3
    reject(bounded_p_value(out, 1.0, mean + law.bias[0, 0], bias_slack), "bias")
    reject(bounded_p_value((out - mean) ** 2, max(mean, 1 - mean) ** 2, second, slack), "variance")


@pytest.mark.long
def test_bounds_hold_their_level():
    # The p-values are super-uniform: of 1000 more than 100 are below 5% with probability < 1e-10.
    rng = np.random.default_rng(SEED)
    normal = rng.standard_normal((1000, 200))
    uniform = special.ndtr(normal)
    lognormal = np.exp(normal - 0.5)
    for p in (
        [normal_p_value(u) for u in normal],
        [ks_p_value(u) for u in uniform],
        [bounded_p_value(u, 1.0, 0.5) for u in uniform],
        [catoni_p_value(u, 1.0, math.e - 1) for u in lognormal],
    ):
        assert np.sum(np.array(p) < 0.05) <= 100


# 4. Limits and relations


def log_variance(x, y, features, coupling, count, **names):
    return theory.log_kernel_variance(
        x, y, features=features, coupling=coupling, num_features=count, **names
    )


@pytest.mark.parametrize("features", FEATURES)
def test_many_frequencies_and_one_axis(features):
    x, y = pair(3, 1.0, features)
    one = log_variance(x, y, features, "iid", 1)
    for count in (2, 7, 10**6, 10**12):
        np.testing.assert_allclose(
            log_variance(x, y, features, "iid", count), one - math.log(count), rtol=1e-14
        )
    for coupling in COUPLINGS:
        b = block_size(coupling, 3)
        whole = log_variance(x, y, features, coupling, b) + math.log(b)
        many = log_variance(x, y, features, coupling, 10**9 + 1) + math.log(10**9 + 1)
        np.testing.assert_allclose(many, whole, rtol=0, atol=1e-6)
        assert np.isfinite(log_variance(x, y, features, coupling, 10**30))
    x, y = pair(1, 1.0, features)
    for coupling in ("orthogonal", "simplex"):  # blocks of one frequency
        for count in (1, 2, 5):
            assert log_variance(x, y, features, coupling, count) == log_variance(
                x, y, features, "iid", count
            )


@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize("features", FEATURES)
def test_zero_variance(features, coupling):
    x = np.array([[0.5, -0.3, 0.2]])
    y = x if features == "trigonometric" else -x
    names = {"features": features, "coupling": coupling}
    for count in (1, 2, 3, 4):
        for law in (theory.log_kernel_variance, theory.log_kernel_mse):
            np.testing.assert_array_equal(law(x, y, num_features=count, **names), [-math.inf])
        np.testing.assert_array_equal(theory.kernel_mse(x, y, num_features=count, **names), [0.0])
    np.testing.assert_allclose(theory.log_kernel_mean(x, y, **names), np.sum(x * y, -1))
    np.testing.assert_array_equal(
        theory.num_features_for_kernel(0.1, x, y, **names), [block_size(coupling, 3)]
    )
    # Between 0 and the smallest number that counts there is no nan, either.
    tiny = np.array([1e-200, 0.0, 0.0])
    got = log_variance(x + tiny, np.sign(y) * np.abs(y), features, coupling, 3)
    assert not np.isnan(got).any()


@pytest.mark.parametrize("coupling", COUPLINGS)
def test_identity_proposals_and_shifts(coupling):
    x, y = pair(4, 1.2, "positive")
    for count in (1, 3, 9):
        plain = log_variance(x, y, "positive", coupling, count)
        for proposal in (Gaussian(np.zeros(4)), Gaussian(np.zeros(4), np.eye(4))):
            got = log_variance(x, y, "positive", coupling, count, proposal=proposal)
            np.testing.assert_allclose(got, plain, rtol=1e-13)
        # Only z - mu matters but for kappa.
        mean = np.array([0.3, -0.2, 0.1, 0.5])
        got = log_variance(x, y, "positive", coupling, count, proposal=Gaussian(mean))
        want = log_variance(x - mean, y, "positive", coupling, count) + 2 * mean @ y
        np.testing.assert_allclose(got, want, rtol=1e-12)


@given(st.integers(2, 40), st.floats(0.01, 8.0), st.integers(1, 90))
def test_orthogonal_and_simplex_help_positive_features(d, size, count):
    x, y = pair(d, size, "positive")
    iid, orthogonal, simplex = (
        float(log_variance(x, y, "positive", c, count)) for c in ("iid", "orthogonal", "simplex")
    )
    slack = 1e-9
    assert orthogonal <= iid + slack
    assert simplex <= orthogonal + slack
    for features in ("positive", "hyperbolic"):
        names = {"features": features, "coupling": "regularised"}
        assert theory.log_kernel_mean(x, y, **names) <= x @ y
        assert theory.log_kernel_mse(x, y, num_features=count, **names) >= log_variance(
            x, y, features, "regularised", count
        )


def test_reference_values():
    # d = S = 6: one |z| brings iid .1552, orthogonal .1351 and, third of two unknowns, simplex.
    def scaled(t, coupling):
        x = np.zeros(6)
        x[0] = math.sqrt(t)
        return float(np.exp(log_variance(x, 0 * x, "positive", coupling, 6)))

    t = optimize.brentq(
        lambda t: scaled(t, "orthogonal") / scaled(t, "iid") - 0.1351 / 0.1552, 0.1, 1.0
    )
    assert abs(0.1552 * scaled(t, "simplex") / scaled(t, "iid") - 0.0495) < 4e-4


def test_second_moment_and_corrected_proposition():
    x, y = np.array([1.0, 0.0]), np.array([-9.0, 0.0])
    assert theory.log_second_moment(x, y) == 46.0
    assert abs(math.exp(x @ y) - 1.234e-4) < 1e-7
    mse = theory.kernel_mse(x, y, features="positive", coupling="iid", num_features=1)
    np.testing.assert_allclose(mse, math.exp(46) * -math.expm1(-64.0), rtol=1e-12)
    np.testing.assert_allclose(mse, 9.5e19, rtol=0.01)
    # |x| = |y| = r: the error grows or vanishes with r as the cosine is above or below -1/2.
    for cosine, grows in ((-0.45, True), (-0.55, False), (-0.99, False)):
        unit = np.array([cosine, math.sqrt(1 - cosine**2)])
        logs = [
            float(theory.log_kernel_mse(r * np.array([1.0, 0.0]), r * unit)) for r in (5, 10, 20)
        ]
        assert (logs[0] < logs[1] < logs[2]) == grows
        assert (logs[0] > logs[1] > logs[2]) == (not grows)


@pytest.mark.parametrize("lead", [(), (2,)])
def test_grouped_heads_have_their_own_proposals(lead):
    rng = np.random.default_rng(19)
    q = rng.standard_normal((*lead, 6, 5, 3)) / 2
    k, v = rng.standard_normal((2, *lead, 3, 7, 3)) / 2
    proposal = Gaussian(rng.standard_normal((*lead, 6, 3)) / 2, 2 * np.eye(3))
    options = {"num_features": 9, "proposal": proposal}
    wide = (np.repeat(x, 2, axis=-3) for x in (k, v))
    got, want = theory.attention_law(q, k, v, **options), theory.attention_law(q, *wide, **options)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12)
    with pytest.raises(ValueError, match="`proposal` must broadcast to the leading axes"):
        theory.attention_law(q[..., 0, :, :], k[..., 0, :, :], v[..., 0, :, :], **options)


def test_values_that_are_zero_are_estimated_exactly():
    q, k = np.random.default_rng(20).standard_normal((2, 4, 2)) / 10
    v = np.zeros((4, 1))
    law = theory.attention_law(q, k, v, num_features=3)
    assert theory.relative_error(law, v) == 0
    assert np.isfinite(theory.num_features_for(0.1, q, k, v))
    assert theory.relative_error(law._replace(variance=v + 1), v) == math.inf


@pytest.mark.parametrize("size", [1e200, 2.0**1020, 1e-200, 1e-310])
@pytest.mark.parametrize("heads", [1, 2])
def test_size_of_the_values(size, heads):
    """Biases are of the size of the values, variances overflow, and no square does so too early."""
    rng = np.random.default_rng(22)
    q, k, v = (rng.standard_normal((h, 4, 2)) / 2 for h in (2, heads, heads))
    v[0] *= 0.1
    mask = np.tri(4, 4, -1, dtype=bool)
    for law_of, names in (
        (theory.attention_law, {"num_features": 20, "proposal": Gaussian(np.ones(2) / 5)}),
        (theory.importance_sampling_law, {"num_features": 20}),
        (theory.randomized_attention_law, {"num_samples": 20}),
    ):
        want, got = (law_of(q, k, x, mask=mask, **names) for x in (v, v * size))
        tiny = 1e-320 + np.abs(size * want.bias) * 1e-9
        assert np.all(np.abs(got.bias - size * want.bias) <= tiny)
        seen = want.variance > 1e-20  # the second query sees one key only
        assert np.all(got.variance[seen] == (math.inf if size > 1 else 0.0))
        assert np.all(got.variance[:, 0] == 0)
        np.testing.assert_array_equal(got.ess, want.ess)
        error = theory.relative_error(got, attend(q, k, v * size, mask=mask).out)
        assert np.all(error == math.inf) if size > 1 else np.all(np.isfinite(error))
    want, got = (theory.num_features_for(0.1, q, k, x, mask=mask) for x in (v, v * size))
    np.testing.assert_allclose(got, want, rtol=1e-9 if size > 1e-300 else 1e-3)


def test_relative_error_at_every_size():
    law = theory.Law(np.zeros((1, 1)), np.full((1, 1), 4e300), np.ones(1))
    assert theory.relative_error(law, [[1e155]]) == pytest.approx(2e-5)
    law = theory.Law(np.full((1, 1), 1e200), np.zeros((1, 1)), np.ones(1))
    assert theory.relative_error(law, [[2e200]]) == 0.5


def test_scores_that_overflow_are_not_hidden_keys():
    one = np.ones((1, 1))
    with pytest.raises(ValueError, match=r"`q` must have squared norms .* kernel coordinates"):
        theory.attention_law(1e80 * one, -1e80 * one, one, num_features=1, scale=1e300)


def test_squared_norms_must_be_representable():
    with pytest.raises(ValueError, match=r"`x` must have squared norms .* of size 1e\+200"):
        theory.log_kernel_variance([1e200], [1.0])
    one = np.ones((1, 1))
    with pytest.raises(ValueError, match="`k` must have squared norms"):
        theory.attention_law(one, 1e200 * one, one, num_features=1)


def test_the_regime_is_everywhere_for_equal_weights_only():
    q, k, v = 3 * np.random.default_rng(18).standard_normal((3, 4, 2))
    assert not theory.attention_law(q, k, v, num_features=1).in_regime.any()
    assert not theory.importance_sampling_law(q, k, v, num_features=1).in_regime.any()
    assert theory.randomized_attention_law(q, k, v, num_samples=1).in_regime.all()


def test_norm_approximation_bias():
    rng = np.random.default_rng(8)
    x, y, omega = rng.standard_normal(3), rng.standard_normal(3), rng.standard_normal((50, 3))
    replaced = np.mean(np.exp(omega @ (x + y) - (1.7 + 0.4) / 2))
    got = theory.log_norm_approximation_bias(x, y, 1.7, 0.4)
    np.testing.assert_allclose(np.log(replaced / kernels.estimate(x, y, omega)), got, rtol=1e-12)
    replaced = np.mean(np.exp((1.7 + 0.4) / 2) * np.cos(omega @ (x - y)))
    got = theory.log_norm_approximation_bias(x, y, 1.7, 0.4, features="trigonometric")
    ratio = replaced / kernels.estimate(x, y, omega, features="trigonometric")
    np.testing.assert_allclose(np.log(ratio), got, rtol=1e-11)
    got = theory.log_norm_approximation_bias(np.ones((2, 1, 3)), np.ones((4, 3)), 3.0, 3.0)
    np.testing.assert_array_equal(got, np.zeros((2, 4)))
    got = theory.log_norm_approximation_bias(np.ones(3), np.ones(3), np.ones((4, 1)), np.ones(2))
    assert got.shape == (4, 2)


# 5. How many frequencies


@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize("features", FEATURES)
def test_num_features_for_kernel_is_the_inverse(features, coupling):
    for d, size, target in ((2, 1.0, 0.5), (5, 0.6, 0.2), (16, 1.5, 0.3)):
        x, y = pair(d, size, features)
        names, b = {"features": features, "coupling": coupling}, block_size(coupling, d)
        count = float(theory.num_features_for_kernel(target, x, y, **names))
        limit = 2 * (math.log(target) + x @ y)
        if count == math.inf:
            error = theory.log_kernel_mse(x, y, num_features=10**15, **names)
            assert coupling == "regularised"
            assert error >= limit
            continue
        assert count % b == 0
        assert theory.log_kernel_mse(x, y, num_features=int(count), **names) <= limit + 1e-12
        if count > b:
            assert theory.log_kernel_mse(x, y, num_features=int(count) - b, **names) > limit


def test_num_features_for_kernel_below_the_bias():
    x, y = pair(4, 2.0, "positive")
    bias = 1 - math.exp(theory.log_kernel_mean(x, y, coupling="regularised") - x @ y)
    for target, finite in ((bias * 0.999, False), (bias * 1.001, True)):
        got = theory.num_features_for_kernel(target, x, y, coupling="regularised")
        assert np.isfinite(got) == finite


@pytest.mark.parametrize("target", [0.01, 0.1, 0.5])
def test_num_features_for_is_the_inverse(target):
    rng = np.random.default_rng(9)
    q, k, v = (rng.standard_normal((2, 4, 3)) * 0.7 for _ in range(3))
    exact_out = special.softmax(q @ np.swapaxes(k, -1, -2) / math.sqrt(3), -1) @ v
    counts = theory.num_features_for(target, q, k, v)
    for h, count in enumerate(counts):

        def error(s, h=h):
            law = theory.attention_law(q[h], k[h], v[h], num_features=int(s))
            return theory.relative_error(law, exact_out[h])

        assert error(count) <= target * (1 + 1e-9)
        weight = np.mean(1 / theory.attention_law(q[h], k[h], v[h], num_features=1).ess)
        if count > math.ceil(10 * weight):
            assert error(count - 1) > target
        else:
            assert target == 0.5
    assert theory.num_features_for(
        0.1, q, k, v, proposal=Gaussian(np.zeros(3), np.eye(3) / 2)
    ).tolist() == [math.inf, math.inf]


# 6. Shapes, extremes and errors


def test_shapes():
    rng = np.random.default_rng(10)
    x, y = rng.standard_normal((5, 1, 2)), rng.standard_normal((3, 2))
    batch = Gaussian(rng.standard_normal((4, 1, 1, 2)), 1.3 * np.eye(2))
    for coupling in COUPLINGS:
        for features in FEATURES:
            names = {"features": features, "coupling": coupling}
            got = theory.log_kernel_mse(x, y, num_features=3, **names)
            want = theory.log_kernel_mse(x[4, 0], y[2], num_features=3, **names)
            assert got.shape == theory.log_kernel_mean(x, y, **names).shape == (5, 3)
            np.testing.assert_allclose(got[4, 2], want, rtol=1e-12)
            known = coupling == "iid" or (features == "positive" and coupling != "regularised")
            if known:
                got = log_variance(x, y, features, coupling, 3, proposal=batch)
                assert got.shape == (4, 5, 3)
                member = Gaussian(batch.mean[2, 0, 0], batch.cov)
                want = log_variance(x[1, 0], y[0], features, coupling, 3, proposal=member)
                np.testing.assert_allclose(got[2, 1, 0], want, rtol=1e-12)


@pytest.mark.parametrize("mean", [np.zeros(2), np.ones((3, 2))])
def test_batches_of_gauges(mean):
    gauge = np.eye(2) + np.arange(12.0).reshape(3, 2, 2) / 10
    proposal = Gaussian(mean, 2 * np.eye(2), gauge=gauge)
    x, y = np.random.default_rng(23).standard_normal((2, 2))
    got = theory.log_kernel_variance(x, y, proposal=proposal)
    assert got.shape == theory.log_kernel_mean(x, y, proposal=proposal).shape == (3,)
    for h in range(3):
        member = Gaussian(mean[..., 0] * np.ones(2) if mean.ndim == 1 else mean[h], 2 * np.eye(2))
        u, w = gauge[h] @ x, np.linalg.inv(gauge[h]).T @ y
        want = theory.log_kernel_variance(u, w, proposal=member)
        np.testing.assert_allclose(got[h], want, rtol=1e-11)
    several = theory.log_kernel_variance(np.stack([x, x])[:, None], y, proposal=proposal)
    np.testing.assert_allclose(several, [got, got], rtol=1e-12)


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("coupling", ["orthogonal", "simplex", "antithetic", "regularised"])
def test_an_explicit_standard_normal_is_the_default(coupling, features):
    x, y = np.random.default_rng(24).standard_normal((2, 3)) / 2
    want = log_variance(x, y, features, coupling, 5)
    for proposal in (Gaussian(np.zeros(3)), Gaussian(np.zeros((1, 3)), np.eye(3))):
        got = log_variance(x, y, features, coupling, 5, proposal=proposal)
        np.testing.assert_allclose(got, np.broadcast_to(want, got.shape), rtol=1e-12)
    turned = Gaussian(np.zeros(3), gauge=np.diag([1.0, 2.0, 3.0]))
    got = log_variance(x, y, features, coupling, 5, proposal=turned)
    want = log_variance(x * [1, 2, 3], y / [1, 2, 3], features, coupling, 5)
    np.testing.assert_allclose(got, want, rtol=1e-12)


@pytest.mark.parametrize("coupling", ["iid", "orthogonal", "simplex", "antithetic"])
@pytest.mark.parametrize("features", FEATURES)
def test_overflow_is_inf(features, coupling):
    for size in (1e2, 1e3, 1e10, 1e150):
        x, y = np.array([1.0, 2.0, 0.0]) * size, np.array([-1.0, 0.7, 0.0]) * size
        names = {"features": features, "coupling": coupling, "num_features": 4}
        assert np.isfinite(theory.log_kernel_variance(x, y, **names))
        assert theory.kernel_variance(x, y, **names) == theory.kernel_mse(x, y, **names) == math.inf
        assert theory.kernel_mean(x, y, features=features, coupling=coupling) == math.inf
        names.pop("num_features")
        assert theory.num_features_for_kernel(0.1, x, y, **names) == math.inf


@pytest.mark.parametrize("size", [10.0, 100.0, 1e3, 1e4])
def test_large_logits(size):
    rng = np.random.default_rng(11)
    q, k, v = (rng.standard_normal(s) for s in ((4, 3), (5, 3), (5, 2)))
    for proposal in (
        None,
        Gaussian(np.ones(3), 2 * np.eye(3)),
        Gaussian(np.ones(3), np.eye(3) / 3),
    ):
        for law_of in (theory.attention_law, theory.importance_sampling_law):
            law = law_of(q * size, k * size, v, num_features=10, proposal=proposal)
            assert not any(np.isnan(a).any() for a in law)
            assert np.all(law.variance >= 0)
            assert (law.ess < 10).all()
        assert theory.num_features_for(0.1, q * size, k * size, v, proposal=proposal) > 1e6


def test_one_dominant_key_does_not_hide_the_others():
    # pi = (1, e^-800): the variance is e^{2 k - 2 q k ...} of the second key, 0 for the first.
    q, k, v = np.array([[40.0]]), np.array([[0.0], [-20.0]]), np.array([[0.0], [1.0]])
    law = theory.attention_law(q, k, v, num_features=1, scale=1.0)
    want = 40.0**2 - 4 * 800 + 400  # log E_22 / Z^2
    assert law.variance[0, 0] == math.exp(want)
    q, k = np.array([[10.0]]), np.array([[0.0], [-60.0]])
    law = theory.attention_law(q, k, v, num_features=1, scale=1.0)
    assert law.variance[0, 0] == math.inf
    assert law.ess[0] < 1e-40


def test_query_without_keys():
    rng = np.random.default_rng(12)
    q, k, v = (rng.standard_normal((3, 2)) for _ in range(3))
    mask = np.array([[1, 1, 1], [0, 0, 0], [1, 0, 1]], bool)
    for law in (
        theory.attention_law(q, k, v, num_features=6, mask=mask),
        theory.importance_sampling_law(q, k, v, num_features=6, mask=mask),
        theory.randomized_attention_law(q, k, v, num_samples=6, mask=mask),
        theory.attention_law(
            q, k, v, num_features=6, mask=mask, proposal=Gaussian(np.ones(2), np.eye(2) * 0.4)
        ),
    ):
        np.testing.assert_array_equal(law.bias[1], [0.0, 0.0])
        np.testing.assert_array_equal(law.variance[1], [0.0, 0.0])
        assert law.ess[1] == 6


ONE, TWO = np.ones(1), np.ones(2)
TURNED = Gaussian(np.zeros(2), np.diag([1.0, 2.0]))
ATTENTION = (np.ones((3, 2)), np.ones((4, 2)), np.ones((4, 1)))


# 7. Wrong laws are seen


def mutate_ratio(change):
    """Change (V + (b - 1) C) / V."""

    def apply(patch):
        original = theory.kernel.Pair.block_ratio
        patch.setattr(
            theory.kernel.Pair, "block_ratio", lambda self, one: change(self, original(self, one))
        )

    return apply


def mutate_attribute(owner, name, wrap):
    return lambda patch: patch.setattr(owner, name, wrap(getattr(owner, name)))


def forget_partial_block(original):
    def law(self, count):
        whole = count // self.block * self.block or count
        return original(self, whole) + math.log(whole / count)

    return law


def forget_mean(original):
    def init(self, proposal, d):
        original(self, proposal, d)
        self.mean = 0 * self.mean

    return init


def standard_angles(original):
    return lambda d, cosines, order: original(d // 2, cosines, order)


def printed_check(coupling):
    assert accuracy("positive", coupling, 4, 0.9) <= CONTRACT


MUTANTS = {
    "C has the wrong sign": (
        mutate_ratio(lambda self, ratio: 2 - ratio),
        [
            lambda: printed_check("orthogonal"),
            lambda: pair_check("positive", "orthogonal", 4),
            lambda: cosine_check("orthogonal", 4),
        ],
    ),
    "b for b (b - 1)": (
        mutate_ratio(lambda self, ratio: 1 + (ratio - 1) / (self.block - 1)),
        [
            lambda: printed_check("simplex"),
            lambda: pair_check("hyperbolic", "orthogonal", 4),
            lambda: cosine_check("orthogonal", 4),
        ],
    ),
    "e^{|z|^2} for 1F1": (
        mutate_ratio(lambda self, ratio: 0 * ratio + 1),
        [
            lambda: printed_check("orthogonal"),
            lambda: pair_check("positive", "simplex", 4),
            lambda: cosine_check("orthogonal", 4),
        ],
    ),
    "d/2 for d": (
        mutate_attribute(theory.series, "missing_angles", standard_angles),
        [lambda: printed_check("orthogonal"), lambda: pair_check("positive", "orthogonal", 4)],
    ),
    "no partial block": (
        mutate_attribute(theory.kernel.Pair, "log_variance", forget_partial_block),
        [lambda: printed_check("orthogonal"), lambda: pair_check("positive", "orthogonal", 4)],
    ),
    "z for z - mu": (
        mutate_attribute(theory.proposal.SquaredWeights, "__init__", forget_mean),
        [lambda: lognormal_check(16, 0.4), lambda: test_proposals_against_mpmath(2)],
    ),
    "no bias in the attention law": (
        mutate_attribute(
            theory,
            "attention_law",
            lambda f: lambda *a, **b: f(*a, **b)._replace(bias=np.zeros((1, 1))),
        ),
        [attention_check],
    ),
    "2 V for V in the attention law": (
        mutate_attribute(
            theory,
            "attention_law",
            lambda f: lambda *a, **b: f(*a, **b)._replace(variance=2 * f(*a, **b).variance),
        ),
        [attention_check],
    ),
}


@pytest.mark.long(
    "no bias in the attention law", "C has the wrong sign", "2 V for V in the attention law"
)
@pytest.mark.parametrize("name", MUTANTS)
def test_wrong_laws_are_seen(name, monkeypatch):
    mutate, checks = MUTANTS[name]
    for check in checks:
        check()
        with monkeypatch.context() as patch:
            mutate(patch)
            with pytest.raises(AssertionError):
                check()
