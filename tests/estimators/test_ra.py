"""Randomized attention: unbiased, by quadrature and by a one-dimensional identity."""

import numpy as np
import pytest
from scipy.special import roots_hermitenorm
from scipy.stats import multivariate_normal

import refattn
from refattn import mean_of_ratios_attention, randomized_attention
from tests.problems import draw


def ra_single(q, k, v, omega):
    """f_i(omega) for many omega (N, d) of one query: shape (N, d_v)."""
    queries = np.broadcast_to(q, (len(omega), q.shape[-1]))
    return randomized_attention(queries, k, v, omega=omega[:, None, :], scale=1.0)


@pytest.mark.parametrize(
    ("d", "nodes", "size", "tolerance_"),
    [(1, 80, 1.0, 1e-13), (2, 50, 0.7, 1e-12), (3, 36, 0.35, 1e-11)],
)
def test_ra_expectation_is_softmax_attention(d, nodes, size, tolerance_):
    # E under p of f, each Gaussian component by a tensor Gauss-Hermite rule. The control: under
    # N(0, I), as in eq. (12) of reference 002, the expectation is far off.
    rng = np.random.default_rng(d)
    q, k, v = draw(rng, 1, d, size=size), draw(rng, 4, d, size=size), draw(rng, 4, 2)
    x, w = roots_hermitenorm(nodes)
    w = w / w.sum()
    grid = np.stack(np.meshgrid(*[x] * d, indexing="ij"), -1).reshape(-1, d)
    weight = np.prod(np.stack(np.meshgrid(*[w] * d, indexing="ij"), -1), -1).ravel()
    pi = np.exp(k @ q[0])
    pi /= pi.sum()
    mean = sum(
        p * (weight @ ra_single(q, k, v, grid + q + k_j)) for p, k_j in zip(pi, k, strict=True)
    )
    want = refattn.softmax_attention(q, k, v, scale=1.0)[0]
    np.testing.assert_allclose(mean, want, rtol=0, atol=tolerance_)
    biased = weight @ ra_single(q, k, v, grid)
    assert np.max(np.abs(biased - want)) > 1e-3


@pytest.mark.parametrize("d", [1, 4, 64])
def test_f_is_the_posterior_of_the_mixture(d):
    # With v = I, f_i(omega) is the probability of each component of p_i given omega.
    rng = np.random.default_rng(d)
    n, m = 3, 5
    q, k, omega = (draw(rng, *s, size=d**-0.25) for s in ((n, d), (m, d), (n, 1, d)))
    got = randomized_attention(q, k, np.eye(m), omega=omega, scale=1.0)
    for i in range(n):
        log_joint = k @ q[i] + [multivariate_normal(q[i] + k_j).logpdf(omega[i, 0]) for k_j in k]
        joint = np.exp(log_joint - log_joint.max())
        np.testing.assert_allclose(got[i], joint / joint.sum(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
def test_at_means_keys_lose_half_their_squared_distance_from_the_mean_key(causal):
    """Exact attention with a bias; and RA at frequencies that are computed outside."""
    rng = np.random.default_rng(2)
    q, k, v = draw(rng, 2, 4, 6, 3), draw(rng, 2, 1, 8, 3), draw(rng, 2, 1, 8, 2)
    mask = rng.random((6, 8)) < 0.8
    options = {"mask": mask, "causal": causal, "scale": 0.7}
    mean = refattn.softmax_attention(q, k, k, **options)
    got = randomized_attention(q, k, v, omega="mean", **options)
    square = np.sum((k[..., None, :, :] - mean[..., None, :]) ** 2, -1)
    want = refattn.softmax_attention(q, k, v, bias=-0.35 * square, **options)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-13)
    omega = 0.7**0.5 * (q + mean)[..., None, :]
    want = randomized_attention(q, k, v, omega=omega, **options)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-13)


@pytest.mark.parametrize("num_samples", [3, 11, 20, 49, 100])
def test_means_of_the_largest_values_are_finite(num_samples, dtype):
    largest = np.finfo(dtype).max
    q, k, v = np.zeros((2, 1), dtype), np.zeros((50, 1), dtype), np.full((50, 1), largest, dtype)
    for function in (randomized_attention, mean_of_ratios_attention):
        got = function(q, k, v, num_samples=num_samples, rng=0)
        np.testing.assert_allclose(got / largest, 1, rtol=1e-6)
