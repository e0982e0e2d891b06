"""Laws of kernel estimates: against 120 digits, quadrature, simulation and each other."""

import inspect
import math
from functools import lru_cache

import numpy as np
import pytest
from scipy import optimize, special
from scipy.stats import beta, chi2

from refattn import kernels, theory
from refattn.judge import stats
from refattn.sampling import Gaussian, draw
from refattn.theory import COUPLINGS
from refattn.theory.kernel_law import KernelLaw
from tests.reference import CONTRACT
from tests.theory import formulas
from tests.theory.formulas import FEATURES, SEED, block_size, exact, log_variance, mp, pair, reject

DIMENSIONS = [
    pytest.param(
        coupling, d, marks=pytest.mark.long if d > {"simplex": 2}.get(coupling, 16) else ()
    )
    for coupling in COUPLINGS
    for d in (1, 2, 3, 4, 5, 16, 64, 256, 512)
    if d not in {"simplex": (1, 5, 64, 512), "iid": (512,), "antithetic": (512,)}.get(coupling, ())
]


@pytest.mark.sweep(4)
@pytest.mark.long("simplex", "regularised+16", "regularised+5")
@pytest.mark.parametrize(("coupling", "d"), DIMENSIONS)
@pytest.mark.parametrize("features", FEATURES)
def test_laws_against_mpmath(features, coupling, d, record_accuracy):
    sizes = [1e-8, 1e-4, 0.05, 0.99, 1.01, 3.0, 10.0, 40.0]
    for size in sizes[:7] if coupling == "simplex" else sizes:  # where its sum has 50 digits
        worst = formulas.accuracy(features, coupling, d, size)
        record_accuracy(f"theory, {features}, {coupling}, over b", "float64", worst)
        assert worst <= CONTRACT, size


@pytest.mark.sweep(2)
@pytest.mark.parametrize("d", [1, 2, 3, 16])
@pytest.mark.parametrize("scale", [0.6, 1.0, 4.0])
@pytest.mark.parametrize("coupling", ["orthogonal", "simplex", "antithetic"])
def test_isotropic_proposals_in_blocks(coupling, scale, d):
    # V by the printed integral; C depends on z - mu alone, as derived in `log_kernel_variance`,
    # but for antithetic pairs, where the norms are shared: E w w' xi xi' = e^{offset - |z - mu|^2}.
    x, y = pair(d, 1.3, "positive")
    proposal = Gaussian(np.full(d, 0.3), scale * np.eye(d))
    first, b = 2 * (exact(x) * exact(y)).sum(), block_size(coupling, d)
    one = mp.expm1(formulas.log_weighted_second_moment(x, y, proposal) - first)
    t = ((exact(x) + exact(y) - exact(proposal.mean)) ** 2).sum()
    if coupling == "antithetic":
        offset = mp.mpf(d) / 2 * mp.log(mp.mpf(scale) ** 2 / (2 * mp.mpf(scale) - 1))
        paired = mp.exp(offset - t) - 1
    else:
        paired = formulas.printed("positive", coupling, d, t)[2] or mp.mpf(0)
    want = mp.log((one + (b - 1) * paired) / b) + first
    got = theory.log_kernel_variance(x, y, coupling=coupling, num_features=b, proposal=proposal)
    assert formulas.units(got, want, x, y, b * d) <= CONTRACT


@pytest.mark.parametrize("name", formulas.PROPOSALS)
@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("d", [1, 2])
def test_variance_of_one_by_quadrature(features, name, d):
    x, y = np.array([0.7, -0.3])[:d], np.array([0.4, 0.5])[:d]
    proposal = formulas.PROPOSALS[name](d)
    omega, cell = formulas.plane(d)
    p, p_over = formulas.densities(omega, proposal)
    estimate = formulas.one_estimate(omega, x, y, features)
    mean = cell * np.sum(p * estimate)
    variance = cell * np.sum(p_over * estimate**2) - mean**2
    np.testing.assert_allclose(mean, theory.kernel_mean(x, y, features=features), rtol=1e-12)
    names = {"features": features, "coupling": "iid", "num_features": 1, "proposal": proposal}
    np.testing.assert_allclose(theory.kernel_variance(x, y, **names), variance, rtol=1e-11)


@pytest.mark.parametrize("shift", [0.0, 0.4])
@pytest.mark.parametrize("d", [1, 2, 16, 64])
def test_one_positive_estimate_is_lognormal(d, shift):
    """Exact: mean and variance of the law determine the lognormal of one weighted feature pair."""
    x, y = pair(d, 1.0, "positive")
    proposal = Gaussian(np.full(d, shift / math.sqrt(d))) if shift else None
    omega, log_weight = draw(20_000, d, proposal=proposal, rng=SEED)
    logs = omega @ (x + y) - (x @ x + y @ y) / 2 + log_weight
    log_mean = theory.log_kernel_mean(x, y, proposal=proposal)
    ratio = theory.log_kernel_variance(x, y, proposal=proposal) - 2 * log_mean
    variance = np.log1p(np.exp(ratio))
    u = (logs - (log_mean - variance / 2)) / np.sqrt(variance)
    p = [stats.ks(u, special.ndtr), stats.normal_mean(u), stats.normal_scale(u)]
    reject(stats.suite_p(p), ("lognormal", d, shift))


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
    for size in (1.0, 1.7):
        x, y = pair(d, size, "trigonometric")
        for count in {block_size(coupling, d), max(1, block_size(coupling, d) // 2)}:
            names = {"features": "trigonometric", "coupling": coupling}
            scale = math.exp(-(x @ x + y @ y) / 2)
            mean = float(theory.kernel_mean(x, y, **names)) * scale
            variance = float(theory.kernel_variance(x, y, num_features=count, **names)) * scale**2
            average = np.mean(np.cos(blocks_of(coupling, d, count) @ (x - y)), -1)
            label = (coupling, d, size, count)
            reject(formulas.bounded_p_value(average, mean, -1.0, 1.0), ("mean", *label))
            square = (average - mean) ** 2
            if coupling != "antithetic" or count == 2:
                p = formulas.bounded_p_value(square, variance, 0.0, (1 + abs(mean)) ** 2)
                reject(p, ("variance", *label))


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
    average = np.mean(formulas.one_estimate(blocks_of(coupling, d), x, y, features), -1)
    p = stats.catoni(average, mean, variance, level=formulas.ALPHA / formulas.TESTS)
    reject(p, (features, coupling, d))


def law_of_two(coupling, d):
    """|w_i + w_j|^2 and |w_i - w_j|^2 for two frequencies of a block, and their probabilities."""
    if coupling == "regularised":
        return np.full(1, 2.0 * d), np.full(1, 2.0 * d), np.ones(1)
    if coupling == "antithetic":
        g, weight = special.roots_genlaguerre(60, d / 2 - 1)
        return 0 * g, 8 * g, weight / weight.sum()
    g, weight = special.roots_genlaguerre(60, d - 1)  # |w_i|^2 + |w_j|^2 = 2 g
    nodes, shares = special.roots_legendre(100)  # |w_i|^2 is the share (1 + cos phi) / 2 of it
    sine = np.sin(math.pi * (nodes + 1) / 2)
    shares = shares * sine ** (d - 1)
    cross = 0 * sine if coupling == "orthogonal" else -sine / (d - 1)
    both = weight[:, None] * shares
    plus, minus = 2 * g[:, None] * (1 + cross), 2 * g[:, None] * (1 - cross)
    return plus, minus, both / both.sum()


@pytest.mark.sweep(2)
@pytest.mark.parametrize("d", [2, 4, 16])
@pytest.mark.parametrize("coupling", ["orthogonal", "simplex", "antithetic", "regularised"])
@pytest.mark.parametrize("features", FEATURES)
def test_pairs_from_the_law_of_their_sum(features, coupling, d):
    # Deterministic: C from the law of |w_i + w_j|, which the next test finds in the draws.
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
        pairs = sum(n * (n - 1) for n in formulas.sizes_of_blocks(coupling, d, count))
        want = one / count + pairs / count**2 * (product - mean**2)
        got = float(theory.kernel_variance(x, y, num_features=count, **names))
        assert abs(got - want) < 1e-7 * one, (features, coupling, d, count)


@pytest.mark.long("2", "4")
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
        reject(stats.ks(a, chi2(d).cdf), ("norm", coupling, d))
        return
    cosine = np.sum(one * two, -1) / np.sqrt(a * b)
    np.testing.assert_allclose(cosine, -1 / (d - 1) if coupling == "simplex" else 0, atol=1e-12)
    direction = total[:, 0] / np.linalg.norm(total, axis=-1)
    uniform = beta((d - 1) / 2, (d - 1) / 2).cdf(np.clip((1 + direction) / 2, 0, 1))
    if coupling == "regularised":
        np.testing.assert_allclose(np.stack([a, b]), d, rtol=1e-12)
    else:
        size, share = chi2(2 * d).cdf(a + b), beta(d / 2, d / 2).cdf(a / (a + b))
        # Independent uniforms add up to a uniform modulo 1.
        laws = {"norms": size, "share": share, "both": size + share, "direction": size + uniform}
        for name, u in laws.items():
            reject(stats.ks(u % 1, np.asarray), (name, coupling, d))
    reject(stats.ks(uniform, np.asarray), ("direction", coupling, d))


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
    # Between 0 and the smallest number that counts there is no nan, either.
    tiny = np.array([1e-200, 0.0, 0.0])
    got = log_variance(x + tiny, np.sign(y) * np.abs(y), features, coupling, 3)
    assert not np.isnan(got).any()


@pytest.mark.parametrize("coupling", COUPLINGS)
def test_only_z_less_the_mean_of_a_proposal_matters_but_for_kappa(coupling):
    x, y = pair(4, 1.2, "positive")
    mean = np.array([0.3, -0.2, 0.1, 0.5])
    for count in (1, 3, 9):
        got = log_variance(x, y, "positive", coupling, count, proposal=Gaussian(mean))
        want = log_variance(x - mean, y, "positive", coupling, count) + 2 * mean @ y
        np.testing.assert_allclose(got, want, rtol=1e-12)


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


@pytest.mark.parametrize("law", ["mean", "variance", "mse"])
def test_a_law_and_its_log_have_the_same_defaults(law):
    plain, log = (getattr(theory, prefix + law) for prefix in ("kernel_", "log_kernel_"))
    assert inspect.signature(plain) == inspect.signature(log)
    x, y = [0.3, 0.4], [0.5, -0.1]
    np.testing.assert_allclose(plain(x, y), np.exp(log(x, y)), rtol=1e-14)


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


@pytest.mark.parametrize("coupling", ["iid", "orthogonal", "simplex", "antithetic"])
@pytest.mark.parametrize("features", FEATURES)
def test_overflow_is_inf(features, coupling):
    for size in (1e2, 1e3, 1e10, 1e150):
        x, y = np.array([1.0, 2.0, 0.0]) * size, np.array([-1.0, 0.7, 0.0]) * size
        names = {"features": features, "coupling": coupling, "num_features": 4}
        assert np.isfinite(theory.log_kernel_variance(x, y, **names))
        assert theory.kernel_variance(x, y, **names) == theory.kernel_mse(x, y, **names) == math.inf
        assert theory.kernel_mean(x, y, features=features, coupling=coupling) == math.inf


@pytest.mark.long
@pytest.mark.parametrize(
    "change",
    [lambda b, ratio: 2 - ratio, lambda b, ratio: 1 + (ratio - 1) / (b - 1), lambda b, ratio: 1.0],
    ids=["C has the wrong sign", "b for b (b 1)", "C is 0"],
)
def test_cosines_show_wrong_pairs(change, monkeypatch):
    """(V + (b - 1) C) / V is changed."""
    right = KernelLaw.block_ratio
    monkeypatch.setattr(
        KernelLaw, "block_ratio", lambda self, one: change(self.block, right(self, one))
    )
    with pytest.raises(AssertionError):
        test_trigonometric_estimates("orthogonal", 4)


def test_a_lognormal_shows_a_mean_that_is_forgotten(monkeypatch):
    right = theory.proposal.SquaredWeights.__init__

    def forget(self, proposal, d):
        right(self, proposal, d)
        self.mean = 0 * self.mean

    monkeypatch.setattr(theory.proposal.SquaredWeights, "__init__", forget)
    with pytest.raises(AssertionError):
        test_one_positive_estimate_is_lognormal(16, 0.4)
