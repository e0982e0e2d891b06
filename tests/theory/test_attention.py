"""Laws of attention estimates: by quadrature and simulation, of any shape and size."""

import math

import numpy as np
import pytest
from scipy import special

from refattn import attend, theory
from refattn.sampling import Gaussian
from tests.theory import formulas
from tests.theory.formulas import PROPOSALS, SEED, bounded_p_value, densities, plane, reject


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


def test_attention_law_in_its_regime():
    """Bounded: outputs in [0, 1]; the slack is the terms of order 1/S^2 by quadrature.

    With N = sum (v - mu) w_j and B = sum w_j averaged over S draws, out - mu = N / B and
    E N/B = -E N(B-1) + E N(B-1)^2 - E N(B-1)^3 + ...,
    E N^2/B^2 = E N^2 - 2 E N^2(B-1) + 3 E N^2(B-1)^2 - ...
    Twice the terms of order 1/S^2 allows for the rest of series in 1/ess.
    """
    count, runs = 50, 100_000
    q, k = np.array([[0.5]]), np.array([[-0.6], [0.2], [0.6]])
    v = np.array([[0.0], [0.4], [1.0]])
    share = np.exp(q @ k.T)[0] / np.sum(np.exp(q @ k.T))
    mean = float(share @ v[:, 0])

    def weights(omega):
        xi = np.exp(omega * (q[0] + k.T) - (q[0] ** 2 + k.T**2) / 2)
        return xi / np.sum(np.exp(q @ k.T))

    omega, cell = plane(1)
    p, w = cell * np.exp(formulas.log_normal(omega, np.zeros(1), np.eye(1))), weights(omega)
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
    p = bounded_p_value(out, mean + law.bias[0, 0], 0.0, 1.0, bias_slack)
    reject(p, "bias")
    p = bounded_p_value((out - mean) ** 2, second, 0.0, max(mean, 1 - mean) ** 2, slack)
    reject(p, "variance")


@pytest.mark.long("no bias")
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda law: law._replace(bias=0 * law.bias), id="no bias"),
        pytest.param(lambda law: law._replace(variance=2 * law.variance), id="2 V for V"),
    ],
)
def test_wrong_attention_laws_are_seen(change, monkeypatch):
    law = theory.attention_law
    monkeypatch.setattr(theory, "attention_law", lambda *a, **options: change(law(*a, **options)))
    with pytest.raises(AssertionError):
        test_attention_law_in_its_regime()


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
    cov = np.stack([formulas.gaussian_with([0.8, 1.5], seed).eigen[1] for seed in range(4)])
    batch = Gaussian(rng.standard_normal((4, 2)), cov * [0.8, 1.5] @ np.swapaxes(cov, -1, -2))
    law = theory.attention_law(q, k, v, num_features=3, proposal=batch)
    x = rng.standard_normal((2, 4, 2))
    kernel = theory.log_kernel_variance(x, x / 2, proposal=batch)
    for b, h in np.ndindex(2, 4):
        member = Gaussian(batch.mean[h], batch.cov[h])
        given = (x[b, y] for x, y in ((q, h), (k, h // 2), (v, h // 2)))
        one = theory.attention_law(*given, num_features=3, proposal=member)
        np.testing.assert_allclose(law.variance[b, h], one.variance, rtol=1e-11)
        want = theory.log_kernel_variance(x[b, h], x[b, h] / 2, proposal=member)
        np.testing.assert_allclose(kernel[b, h], want, rtol=1e-12)


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


def test_the_regime_is_everywhere_for_equal_weights_only():
    q, k, v = 3 * np.random.default_rng(18).standard_normal((3, 4, 2))
    assert not theory.attention_law(q, k, v, num_features=1).in_regime.any()
    assert not theory.importance_sampling_law(q, k, v, num_features=1).in_regime.any()
    law = theory.randomized_attention_law(q, k, v, num_samples=1)
    assert law.in_regime.all()
    assert isinstance(law, theory.VarianceBound)  # the variance is not exact
    assert not isinstance(law, theory.ExactLaw)


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
