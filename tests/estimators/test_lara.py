"""LARA: its special cases, its proposals, and the causal form."""

import numpy as np
import pytest

from refattn import linear_randomized_attention, naive, random_feature_attention, sampling
from refattn.estimators import lara
from tests.problems import draw

WEIGHTINGS = lara.WEIGHTINGS


def test_lara_takes_the_means_of_chunks():
    rng = np.random.default_rng(0)
    q, k, v = draw(rng, 2, 11, 3), draw(rng, 2, 14, 3), draw(rng, 2, 14, 2)
    root, count = 3.0**-0.25, 4
    q_mean, k_mean = (
        np.stack([x[:, np.arange(n) * count // n == c].mean(1) for c in range(count)], axis=1)
        for x, n in ((q, 11), (k, 14))
    )
    centres, omega = root * (q_mean + k_mean), draw(rng, 2, count, 3)
    for weighting in WEIGHTINGS:
        options = {"omega": omega, "weighting": weighting}
        got = linear_randomized_attention(q, k, v, num_proposals=count, **options)
        want = linear_randomized_attention(q, k, v, centres=centres, **options)
        np.testing.assert_allclose(got, want, atol=1e-13)
    z = np.random.default_rng(3).standard_normal((2, count, 3))
    pairs = np.stack([centres + z, centres - z], axis=2).reshape(2, 2 * count, 3)
    gaussians = [sampling.Gaussian(centres[:, c]) for c in range(count)]
    for options, omega in (
        ({"num_proposals": count}, centres + z),
        ({"num_proposals": count, "antithetic": True}, pairs),
        ({"centres": gaussians, "antithetic": True}, pairs),
    ):
        drawn = linear_randomized_attention(q, k, v, rng=3, **options)
        want = linear_randomized_attention(q, k, v, centres=centres, omega=omega)
        np.testing.assert_allclose(drawn, want, atol=1e-13)


def test_lara_with_general_gaussians():
    # Balance weights are the density of the equal mixture: LARA is then RFA with a mixture.
    rng = np.random.default_rng(0)
    q, k, v, omega = draw(rng, 4, 3), draw(rng, 6, 3), draw(rng, 6, 2), draw(rng, 5, 3)
    covs = [np.eye(3) + a[:, None] * a for a in draw(rng, 5, 3)]
    proposals = [sampling.Gaussian(m, c) for m, c in zip(draw(rng, 5, 3), covs, strict=True)]
    own = [p.log_ratio(omega[c : c + 1])[0] for c, p in enumerate(proposals)]
    mixture = sampling.Mixture(proposals).log_ratio(omega)
    for weighting, log_weight in (("balance", mixture), ("own", np.array(own))):
        options = {"omega": omega, "centres": proposals, "weighting": weighting}
        got = linear_randomized_attention(q, k, v, **options)
        want = random_feature_attention(q, k, v, omega=omega, log_weight=log_weight)
        np.testing.assert_allclose(got, want, atol=1e-13)


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_lara_at_means_has_its_centres_as_frequencies(weighting):
    """Arrays, and Gaussians that differ by their covariances too."""
    rng = np.random.default_rng(4)
    q, k, v, mu = draw(rng, 2, 6, 3), draw(rng, 2, 7, 3), draw(rng, 2, 7, 2), draw(rng, 2, 3)
    gaussians = [sampling.Gaussian(x, s * np.eye(3)) for x, s in zip(mu, (0.7, 1.6), strict=True)]
    for centres in (mu, gaussians):
        options = {"centres": centres, "weighting": weighting}
        want = linear_randomized_attention(q, k, v, omega=mu, **options)
        got = linear_randomized_attention(q, k, v, omega="mean", **options)
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-14)


def test_weights_of_zero_are_dropped():
    """At q = 0 the second proposal has alpha 0, and density 0 at its sample."""
    q, k, v = np.zeros((2, 1)), np.array([[0.0], [1.0]]), np.array([[0.0], [3.0]])
    options = {"omega": np.array([[30.0], [-40.0]]), "centres": np.array([[0.0], [60.0]])}
    got = linear_randomized_attention(q, k, v, weighting="query", scale=1.0, **options)
    np.testing.assert_allclose(got, 3.0, rtol=1e-12)


@pytest.mark.long("260")
@pytest.mark.parametrize(
    ("n", "m", "count"),
    [
        *((20, 20, 5), (40, 43, 3), (23, 17, 4), (9, 9, 9), (7, 7, 1)),
        *((300, 300, 7), (260, 300, 100), (300, 140, 37)),  # several steps
    ],
)
@pytest.mark.parametrize("weighting", ["own", "balance"])
@pytest.mark.parametrize("masked", [False, True])
def test_causal_lara(n, m, count, weighting, masked):
    rng = np.random.default_rng(n)
    q, k, v = draw(rng, n, 3), draw(rng, m, 3), draw(rng, m, 2)
    mask = rng.random(m) < 0.7 if masked else np.ones(m, bool)
    options = {"num_proposals": count, "weighting": weighting, "causal": True}
    options |= {"mask": mask} if masked else {}
    got = linear_randomized_attention(q, k, v, rng=8, **options)
    noise = np.random.default_rng(8).standard_normal((count, 3))
    scaled = (3**-0.25 * x for x in (q, k))
    centres = naive.terms.of_library(naive.lara.means_of_proposals)(
        *scaled, None, count, mask[None], True
    )[1]
    want = naive.linear_randomized_attention(q, k, v, omega=centres + noise, **options)
    np.testing.assert_allclose(got, want, atol=1e-12)


@pytest.mark.parametrize("weighting", ["own", "balance"])
@pytest.mark.parametrize("given_omega", [False, True])
def test_any_argument_of_causal_lara_may_have_the_heads(weighting, given_omega):
    rng = np.random.default_rng(0)
    full = {"q": draw(rng, 2, 6, 3), "k": draw(rng, 2, 7, 3), "v": draw(rng, 2, 7, 2)}
    full["mask"] = rng.random((2, 1, 7)) < 0.7
    if given_omega:
        full["omega"] = draw(rng, 2, 3, 3)
    for name in full:  # the one that has them
        some = {key: x if key in (name, "v") else x[0] for key, x in full.items()}
        options = {"num_proposals": 3, "rng": 1, "weighting": weighting, "causal": True}
        q, k, v = (some.pop(key) for key in "qkv")
        got = linear_randomized_attention(q, k, v, **some, **options)
        wide = {key: x if key in (name, "v") else np.stack([x, x]) for key, x in some.items()}
        q, k = (x if x.ndim > 2 else np.stack([x, x]) for x in (q, k))
        want = linear_randomized_attention(q, k, v, **wide, **options)
        np.testing.assert_allclose(got, want, atol=1e-13, err_msg=name)


@pytest.mark.long
def test_masked_chunks_without_wide_integers():
    jax = pytest.importorskip("jax")
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((9, 3)).astype(np.float32) for _ in range(3))
    mask = rng.random((1, 9)) < 0.7
    with jax.enable_x64(False):  # a warning of truncated integers would be an error
        arrays = (jax.numpy.asarray(x) for x in (q, k, v))
        seen = jax.numpy.asarray(mask)
        got = linear_randomized_attention(*arrays, num_proposals=3, rng=0, mask=seen)
    want = linear_randomized_attention(q, k, v, num_proposals=3, rng=0, mask=mask)
    np.testing.assert_allclose(np.asarray(got), want, atol=1e-5)
