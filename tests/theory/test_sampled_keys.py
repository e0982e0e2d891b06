"""The law of attention to a sample of keys, against the law of all samples there are."""

import itertools
import math

import numpy as np
import pytest
from scipy import special

from refattn import sampled_key_attention, softmax_attention, theory
from refattn.estimators import key_sampling
from refattn.typing import KEY_LAWS
from tests.theory.formulas import bounded_p_value, reject

RNG = np.random.default_rng(5)
Q, K, V = (RNG.standard_normal(shape) for shape in ((2, 2), (3, 2), (3, 2)))
SHARES = special.softmax(Q @ K.T / math.sqrt(2), axis=-1)


def rates(draws, v=V):
    """Probability of each key in a draw, (n, m)."""
    norms = np.sum(v**2, -1)
    found = {
        "softmax": SHARES,
        "uniform": np.full(SHARES.shape, 1 / len(v)),
        "norms": np.broadcast_to((norms / norms.sum() + 1 / len(v)) / 2, SHARES.shape),
    }
    return found[draws]


def by_tuples(draws, count):
    """Bias and covariance by the estimator itself, over all tuples of keys."""
    tuples = np.array(list(itertools.product(range(len(K)), repeat=count)))
    mean = softmax_attention(Q, K, V)
    bias, cov = np.zeros((2, 2)), np.zeros((2, 2, 2))
    for i, rate in enumerate(rates(draws)):
        p = np.prod(rate[tuples], axis=-1)
        out = np.concatenate([
            sampled_key_attention(Q[i : i + 1], K, V, indices=at[None],
                                  log_probability=np.log(rate[at] * count)[None])
            for at in tuples
        ])  # fmt: skip
        bias[i] = p @ out - mean[i]
        off = out - p @ out
        cov[i] = (p[:, None] * off).T @ off
    return bias, cov


def by_counts(draws, count):
    """Bias and mean squared deviation, over how often each of three keys comes in `count` draws."""
    a, b = (x.ravel() for x in np.mgrid[: count + 1, : count + 1])
    times = np.stack([a, b, count - a - b], -1)[a + b <= count]
    log_ways = special.gammaln(count + 1) - special.gammaln(times + 1).sum(-1)
    mean = softmax_attention(Q, K, V)
    bias, variance = np.zeros((2, 2)), np.zeros((2, 2))
    for i, rate in enumerate(rates(draws)):
        p = np.exp(log_ways + times @ np.log(rate))
        weights = times * SHARES[i] / rate
        out = weights @ V / weights.sum(-1, keepdims=True)
        np.testing.assert_allclose(p.sum(), 1.0, rtol=1e-10)
        bias[i], off = p @ (out - mean[i]), out - p @ out
        variance[i] = p @ off**2
    return bias, variance


@pytest.mark.parametrize("count", [1, 2, 4])
def test_keys_of_the_softmax_have_an_exact_law(count):
    """Over all tuples: no bias, and the covariance of the values under the softmax, over S."""
    bias, cov = by_tuples("softmax", count)
    law = theory.sampled_keys_law(Q, K, V, num_samples=count)
    assert isinstance(law, theory.ExactLaw)
    np.testing.assert_allclose(bias, 0, atol=1e-14)
    np.testing.assert_array_equal(law.bias, 0)
    np.testing.assert_allclose(law.variance, np.einsum("icc->ic", cov), rtol=1e-12)
    np.testing.assert_array_equal(law.ess, float(count))
    for share, found in zip(SHARES, cov, strict=True):
        off = V - share @ V
        np.testing.assert_allclose(found, (share[:, None] * off).T @ off / count, rtol=1e-12)


@pytest.mark.parametrize("draws", ["uniform", "norms"])
def test_counts_are_the_same_as_tuples(draws):
    bias, cov = by_tuples(draws, 4)
    other_bias, variance = by_counts(draws, 4)
    np.testing.assert_allclose(bias, other_bias, rtol=1e-11, atol=1e-15)
    np.testing.assert_allclose(np.einsum("icc->ic", cov), variance, rtol=1e-11)


@pytest.mark.parametrize("draws", ["uniform", "norms"])
def test_other_keys_have_a_law_of_first_order(draws):
    """What is left falls as 1/S^2: the law is all of the order 1/S."""
    left = []
    for count in (60, 120, 240):
        law = theory.sampled_keys_law(Q, K, V, num_samples=count, draws=draws)
        assert type(law) is theory.Law
        assert law.in_regime.all()
        bias, variance = by_counts(draws, count)
        left.append(count**2 * np.stack([bias - law.bias, variance - law.variance]))
        sizes = count * np.stack([abs(law.bias), law.variance])
        assert np.all(abs(left[-1]) / count < 0.2 * sizes.max())
    for few, many in itertools.pairwise(left):
        np.testing.assert_allclose(few, many, rtol=0.2, atol=0.02 * np.abs(few).max())


def test_keys_that_are_drawn_are_unbiased():
    """Bounded: outputs in [0, 1], so that p-values are those of an inequality."""
    count, runs = 3, 20_000
    v = special.expit(V)
    law = theory.sampled_keys_law(Q, K, v, num_samples=count)
    q = np.broadcast_to(Q, (runs, *Q.shape))
    drawn = key_sampling.draw_keys(q, K, v, num_keys=count, law="softmax", rng=3)
    out = sampled_key_attention(q, K, v, **drawn._asdict())
    mean = softmax_attention(Q, K, v)
    for i, c in np.ndindex(2, 2):
        reject(bounded_p_value(out[:, i, c], mean[i, c], 0.0, 1.0), ("mean", i, c))
        square = (out[:, i, c] - mean[i, c]) ** 2
        reject(bounded_p_value(square, law.variance[i, c], 0.0, 1.0), ("variance", i, c))


@pytest.mark.parametrize("draws", KEY_LAWS)
def test_heads_masks_and_units(draws):
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal(shape) for shape in ((2, 4, 3, 2), (2, 2, 5, 2), (2, 2, 5, 3)))
    mask = np.array([True, False, True, True, False])
    options = {"num_samples": 7, "draws": draws}
    law = theory.sampled_keys_law(q, k, v, mask=mask, **options)
    one = theory.sampled_keys_law(q[1, 2], k[1, 1][mask], v[1, 1][mask], **options)
    big = theory.sampled_keys_law(q, k, 1e200 * v, mask=mask, **options)
    for name in ("bias", "variance", "ess"):
        np.testing.assert_allclose(getattr(law, name)[1, 2], getattr(one, name), rtol=1e-12)
    np.testing.assert_allclose(big.bias, 1e200 * law.bias, rtol=1e-12)
    np.testing.assert_allclose(big.ess, law.ess, rtol=1e-12)
    none = theory.sampled_keys_law(q, k, v, mask=np.zeros(5, bool), **options)
    np.testing.assert_array_equal(none.ess, 7.0)
    np.testing.assert_array_equal(none.variance, 0.0)
    zero = theory.sampled_keys_law(q, k, 0 * v, mask=mask, **options)
    np.testing.assert_array_equal(zero.variance, 0.0)
    assert np.all(zero.ess <= 7.0 + 1e-12)


def test_masks_of_queries_go_with_the_softmax_only():
    mask = np.array([[True, False, True], [True, True, True]])
    law = theory.sampled_keys_law(Q, K, V, num_samples=2, mask=mask)
    one = theory.sampled_keys_law(Q[:1], K[[0, 2]], V[[0, 2]], num_samples=2)
    np.testing.assert_allclose(law.variance[:1], one.variance, rtol=1e-12)
