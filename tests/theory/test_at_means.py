"""Biases at the means of distributions: of the estimators themselves, and their limits."""

import numpy as np
import pytest
from scipy import stats

from refattn import linear_randomized_attention, randomized_attention, softmax_attention, theory
from refattn.sampling import Gaussian

RNG = np.random.default_rng(0)
Q, K, V = RNG.standard_normal((2, 4, 5, 2)), *RNG.standard_normal((2, 2, 2, 7, 2))


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("causal", [False, True])
def test_the_bias_of_ra_is_that_of_its_result(scale, causal):
    options = {"scale": scale, "causal": causal, "mask": RNG.random((5, 7)) < 0.7}
    law = theory.target_mean_law(Q, K, V, **options)
    want = randomized_attention(Q, K, V, omega="mean", **options)
    want = want - softmax_attention(Q, K, V, **options)
    np.testing.assert_allclose(law.bias, want, rtol=0, atol=1e-14)
    assert np.max(np.abs(want)) > 0.02
    assert not law.variance.any()
    assert law.in_regime.all()


def test_to_first_order_the_bias_of_ra_is_a_covariance():
    """As keys come together: the rest is of second order in squared distances."""
    rest = []
    for size in (0.1, 0.05):
        k = size * K[0, 0]
        share = np.exp(Q[0, 0] @ k.T)
        share /= share.sum(-1, keepdims=True)
        distance = np.sum((k - (share @ k)[:, None]) ** 2, -1) / 2
        centred = distance - np.sum(share * distance, -1, keepdims=True)
        law = theory.target_mean_law(Q[0, 0], k, V[0, 0], scale=1.0)
        rest.append(np.max(np.abs(law.bias + (share * centred) @ V[0, 0])))
    assert rest[1] < rest[0] / 14  # of 16


@pytest.mark.parametrize("weighting", ["balance", "own"])
@pytest.mark.parametrize("gauge", [None, np.array([[0.8, 0.3], [-0.2, 1.1]])])
def test_lara_tends_to_the_limit(weighting, gauge):
    """Proposals at the quantiles of two coordinates, in place of draws."""
    turn = np.array([[0.8, -0.6], [0.6, 0.8]])
    mean, size = np.array([0.3, -0.2]), np.array([1.3, 0.5])
    means = Gaussian(mean, (turn * size**2) @ turn.T, gauge)
    law = theory.proposal_means_law(Q, K, V, means=means, weighting=weighting)
    assert np.max(np.abs(law.bias)) > 0.02
    off = []
    for count in (15, 60):
        at = stats.norm.ppf((np.arange(count) + 0.5) / count)
        grid = np.stack(np.meshgrid(at, at), -1).reshape(-1, 2)
        options = {"proposal": None if gauge is None else means, "weighting": weighting}
        got = linear_randomized_attention(
            Q, K, V, centres=mean + (size * grid) @ turn.T, omega="mean", **options
        )
        off.append(np.max(np.abs(got - softmax_attention(Q, K, V) - law.bias)))
    assert off[1] < 0.02
    assert off[1] < off[0] / 2


def test_means_that_are_equal_and_far_apart():
    one, k, v = Gaussian(np.ones(2), 1e-12 * np.eye(2)), K[0, 0], V[0, 0]
    law = theory.proposal_means_law(Q[0, 0], k, v, means=one)
    want = linear_randomized_attention(Q[0, 0], k, v, centres=np.ones((1, 2)), omega="mean")
    np.testing.assert_allclose(law.bias, want - softmax_attention(Q[0, 0], k, v), atol=1e-10)
    law = theory.proposal_means_law(Q, K, V, means=Gaussian(np.ones(2), 1e9 * np.eye(2)))
    np.testing.assert_allclose(law.bias, 0, atol=1e-12)


def test_a_batch_of_means_and_values_of_any_size():
    means = Gaussian(RNG.standard_normal((2, 4, 2)), 0.5 * np.eye(2))
    hidden = np.arange(7) < 0
    for size in (1.0, 1e300):
        whole = theory.proposal_means_law(Q, K, size * V, means=means)
        alone = theory.proposal_means_law(
            Q[1, 2], K[1, 1], size * V[1, 1], means=Gaussian(means.mean[1, 2], means.cov)
        )
        np.testing.assert_allclose(whole.bias[1, 2], alone.bias, rtol=1e-9, atol=1e-12 * size)
        for law in (theory.target_mean_law, theory.proposal_means_law):
            more = {} if law is theory.target_mean_law else {"means": means}
            np.testing.assert_array_equal(law(Q, K, size * V, mask=hidden, **more).bias, 0)
