"""Laws under a Gaussian proposal: against 120 digits, infinite and zero variances, gauges."""

import math

import numpy as np
import pytest

from refattn import theory
from refattn.sampling import Gaussian
from refattn.theory import COUPLINGS
from tests.reference import CONTRACT
from tests.theory import formulas
from tests.theory.formulas import FEATURES, exact, gaussian_with, log_variance, mp


def proposal_units(x, y, proposal):
    second, first = (
        formulas.log_weighted_second_moment(x, y, proposal),
        2 * (exact(x) * exact(y)).sum(),
    )
    want = first + mp.log(mp.expm1(second - first))
    got = theory.log_kernel_variance(x, y, proposal=proposal)
    s = proposal.eigen[0]
    # Eigenvalues are known to eps times the largest, what they give to that over 2 s - 1.
    return formulas.units(got, want, x, y, 1) / float(np.max(s) / np.min(np.abs(2 * s - 1)))


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


@pytest.mark.parametrize("features", ["hyperbolic", "trigonometric"])
def test_even_features_have_the_law_of_the_opposite_mean(features):
    x, mean = np.full(2, 30.0), np.full(2, 20.0)
    one, other = (
        theory.log_kernel_variance(x, x, features=features, proposal=Gaussian(mu))
        for mu in (mean, -mean)
    )
    assert one == other < math.inf


def test_infinite_and_zero_variance_of_proposals():
    x, y = np.array([0.5, -0.2]), np.array([0.1, 0.4])
    for eigenvalues in ([0.5, 1.0], [0.3, 2.0], [0.1, 0.1]):
        proposal = gaussian_with(eigenvalues, turned=False)
        for features in FEATURES:
            got = theory.log_kernel_variance(x, y, features=features, proposal=proposal)
            assert got == math.inf
    for proposal in (Gaussian(x + y), Gaussian(x + y, np.eye(2))):
        for coupling in COUPLINGS:
            got = theory.log_kernel_variance(x, y, coupling=coupling, proposal=proposal)
            assert got == -math.inf


@pytest.mark.parametrize("coupling", ["iid", "antithetic", "orthogonal", "simplex"])
def test_infinite_variance_in_blocks(coupling):
    proposal = Gaussian([0.0, 0.1], 0.4 * np.eye(2))
    x, y = np.array([[0.0, 0.1], [0.5, 0.1], [20.0, 0.0]]), np.zeros(2)
    names = {"coupling": coupling, "proposal": proposal}
    for count in (1, 2, 3, 4):
        got = theory.log_kernel_variance(x, y, num_features=count, **names)
        assert got.tolist() == [math.inf] * 3


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
@pytest.mark.parametrize("coupling", COUPLINGS)
def test_an_explicit_standard_normal_is_the_default(coupling, features):
    x, y = np.random.default_rng(24).standard_normal((2, 3)) / 2
    for count in (1, 3, 5, 9):
        want = log_variance(x, y, features, coupling, count)
        for proposal in (Gaussian(np.zeros(3)), Gaussian(np.zeros((1, 3)), np.eye(3))):
            got = log_variance(x, y, features, coupling, count, proposal=proposal)
            np.testing.assert_allclose(got, np.broadcast_to(want, got.shape), rtol=1e-12)
    turned = Gaussian(np.zeros(3), gauge=np.diag([1.0, 2.0, 3.0]))
    got = log_variance(x, y, features, coupling, 5, proposal=turned)
    want = log_variance(x * [1, 2, 3], y / [1, 2, 3], features, coupling, 5)
    np.testing.assert_allclose(got, want, rtol=1e-12)
