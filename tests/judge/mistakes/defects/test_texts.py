"""The texts that are joined to the formulas are right, as the modules that they are."""

import numpy as np
import pytest

import refattn
from refattn import naive, vjp
from refattn.judge.mistakes.defects.edits import Edited
from refattn.judge.mistakes.defects.texts import (
    contract,
    direct,
    draws,
    dropout,
    kernel,
    keys,
    stabilised,
)
from refattn.naive.terms import of_library
from tests.judge.mistakes.defects.probes import tokens

Q, K, V = tokens(4, 9, 6), tokens(2, 9, 6, seed=1), tokens(2, 9, 5, seed=2)
OMEGA, MASK = tokens(4, 8, 6, seed=3), tokens(9, 9, seed=4) > 0
MASK[2] = False
SEES = {"mask": MASK, "causal": True}


def close(got, want, tolerance=1e-12):
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


def test_means_of_most_code():
    text = Edited("", "softmax", "stabilised")
    close(text(Q, K, V, **SEES), naive.softmax_attention(Q, K, V, **SEES))


def test_ratios_of_most_code():
    x, one = np.abs(tokens(9, 9)), np.zeros(9)
    want = np.where(MASK, x, 0) @ V[0] / np.maximum(np.where(MASK, x, 0).sum(-1), 1e-9)[:, None]
    close(of_library(stabilised.ratio)(x, one, V[0], MASK), want)


def test_features_outside_the_log_domain():
    q, k = (x[0] * 6**-0.25 for x in (Q, K))
    kernels = of_library(direct.log_kernel)(q, k, OMEGA[0], np.zeros((1, 8)))
    want = naive.random_feature_attention(Q[0], K[0], V[0], omega=OMEGA[0], mask=MASK)
    close(of_library(direct.average)(kernels, V[0], MASK), want)


def test_frequencies_of_a_kernel_are_drawn_or_given():
    x, y = tokens(5, 1, 6), tokens(7, 6, seed=1)
    omega = np.random.default_rng(3).standard_normal((8, 6))
    np.testing.assert_array_equal(
        kernel.kernel(x, y, num_features=8, seed=3), kernel.kernel(x, y, omega=omega)
    )


def test_dropout():
    d_out, given = tokens(4, 9, 5, seed=7), {"estimator": "softmax", "dropout": 0.5, "seed": 3}
    factors = 2.0 * (np.random.default_rng(3).random((4, 9, 9)) >= 0.5)
    out, pullback = vjp(refattn.softmax_attention, Q, K, V, dropout=factors, **SEES)
    close(dropout.call(Q, K, V, **SEES, **given), out)
    found = dropout.call(Q, K, V, d_out=d_out, **SEES, **given)
    for got, want in zip(found, (out, *pullback(d_out)[:3]), strict=True):
        close(got, want, 1e-10)


DRAWN = {
    "rfa": lambda rng: {"omega": rng.standard_normal((5, 6))},
    "rfa-local": lambda rng: {"omega": rng.standard_normal((5, 6)), "window": (8, 8)},
}


@pytest.mark.parametrize("estimator", DRAWN)
def test_frequencies_are_drawn_or_given(estimator):
    given = DRAWN[estimator](np.random.default_rng(3))
    fn = {"rfa": refattn.random_feature_attention}.get(
        estimator, refattn.local_random_feature_attention
    )
    got = contract.call(Q, K, V, estimator=estimator, size=5, seed=3, **SEES)
    close(got, fn(Q, K, V, **given, **SEES))
    omega = contract.call(Q, K, V, estimator=estimator, omega=given["omega"], **SEES)
    np.testing.assert_array_equal(got, omega)


def test_targets_and_proposals():
    rng, k, count = np.random.default_rng(5), np.repeat(K, 2, axis=0), 20_000
    draw = of_library(draws.of_target)
    omega = draw(Q, k, np.ones((9, 9), bool), None, count, rng)
    q, k = Q * 6**-0.25, k * 6**-0.25
    p = np.exp(q @ k.mT)
    close(omega.mean(-2), q + p / p.sum(-1, keepdims=True) @ k, 0.06)
    found = [
        of_library(draws.of_proposals)(Q, k, None, None, 3, np.random.default_rng(s))
        for s in range(2000)
    ]
    centres = sum(x.reshape(4, 3, 3, 6).mean(-2) for x in (q, np.repeat(K, 2, 0) * 6**-0.25))
    assert np.shape(found[0]) == centres.shape


@pytest.mark.parametrize("law", keys.KEYS)
def test_samples_of_keys(law):
    @of_library
    def draw(q, k, v):
        return keys.of_heads(keys.KEYS[law], q, k, v, 3, np.random.default_rng(0))

    found = draw(Q, np.repeat(K, 2, 0), np.repeat(V, 2, 0))
    lead = (4, 9) if law == "sampled-softmax" else (4,)
    assert found["indices"].shape == (*lead, 3)
    if law == "coreset":
        assert all(len({*x}) == 3 for x in found["indices"])
    else:
        assert found["log_probability"].shape == (*lead, 3)
    got = contract.call(Q, K, V, estimator=law, size=3, seed=0)
    close(got, contract.call(Q, K, V, estimator=law, **found))


def test_keys_are_expected_as_often_as_is_said():
    v, rng = V[0], np.random.default_rng(1)
    share = 1 / 9 + np.sum(v * v, -1) / np.sum(v * v)
    counts = np.zeros(9)
    for _ in range(4000):
        found = keys.keys_by_norms(Q[0], K[0], v, 3, rng)
        counts[found["indices"]] += 1
    expected = np.minimum(share * 3 / share.sum(), 1)
    close(counts / 4000, expected, 0.05)


def test_strides_are_ignored():
    x = np.arange(6.0).reshape(2, 3)
    np.testing.assert_array_equal(contract.as_it_lies(x.T), x.reshape(3, 2))
    assert contract.as_it_lies(x) is x
