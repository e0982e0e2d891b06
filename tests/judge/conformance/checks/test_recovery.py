"""Recovered frequencies are those that were drawn; laws are told from others, and have a level."""

from functools import partial

import numpy as np
import pytest

import refattn
from refattn import sampling
from refattn.judge import stats
from refattn.judge.conformance import check
from refattn.judge.conformance.candidate.failures import Failure
from refattn.judge.conformance.checks import laws, recovery, targets
from refattn.judge.conformance.checks.trials import CheckRun
from refattn.registry import ESTIMATORS
from tests.judge.conformance.candidates import BY_NAME, failures, kernel, of


def trial(fn, estimator, **tags):
    return CheckRun(of(fn, estimator, **tags), "test", 0, 50)


@pytest.mark.parametrize(
    ("fn", "estimator"), [(kernel, "kernel"), (refattn.random_feature_attention, "rfa")]
)
def test_frequencies_are_recovered(fn, estimator):
    t = trial(fn, estimator)
    d, c = 3, 0.5
    got = np.log(recovery.estimate_kernels(t, np.zeros(d), np.eye(d), 1, 7)) + 0.5
    np.testing.assert_allclose(got, sampling.draw(1, d, rng=7).omega[0], rtol=0, atol=1e-12)
    y = c * np.concatenate([np.eye(d), 2 * np.eye(d), np.eye(d)[:1] + np.eye(d)[1:]])
    mean = recovery.estimate_kernels(t, np.zeros(d), y, 2, 7) * np.exp(np.sum(y * y, -1) / 2)
    want = sampling.draw(2, d, rng=7).omega
    got = recovery.match_pair(mean, d, c)
    np.testing.assert_allclose(sorted(got.tolist()), sorted(want.tolist()), atol=1e-10)


def test_a_formula_of_other_features_is_refused(monkeypatch):
    """Of keys minus their mean, frequencies would be recovered wrong; another order is the same."""

    def centred(q, k, v, *, less=1.0, **options):
        k = k - less * np.mean(k, -2, keepdims=True)
        return refattn.naive.random_feature_attention(
            q, k[..., ::-1, :], v[..., ::-1, :], **options
        )

    record = ESTIMATORS["rfa"]._replace(name="centred", naive=centred)
    monkeypatch.setitem(ESTIMATORS._records, "centred", record)
    fn = refattn.random_feature_attention
    with pytest.raises(ValueError, match="must leave out 'random-features': its formula differs"):
        check(fn, estimator="centred", checks=["contract"])
    for change in ({"naive": partial(centred, less=0.0)}, {"traits": ("random", "normalised")}):
        monkeypatch.setitem(ESTIMATORS._records, "centred", record._replace(**change))
        assert check(fn, estimator="centred", checks=["contract"]).verdict == "PASS"


@pytest.mark.parametrize("features", ["hyperbolic", "trigonometric"])
def test_frequencies_are_recovered_up_to_sign(features):
    fn = partial(refattn.random_feature_attention, features=features)
    t = trial(fn, "rfa", features=features)
    for seed in range(20):
        got = recovery.recover_alone(t, 5, 0.3, seed)
        want = sampling.draw(1, 5, rng=seed).omega[0]
        np.testing.assert_allclose(got, want * np.sign(want[0]), rtol=0, atol=1e-6)


def test_rosenblatt_makes_draws_from_a_mixture_normal():
    rng = np.random.default_rng(0)
    centres, weight = 3 * rng.standard_normal((4, 2)), np.array([0.1, 0.2, 0.3, 0.4])
    index = rng.choice(4, 4000, p=weight)
    omega = centres[index] + rng.standard_normal((4000, 2))

    def p(weight):
        t = trial(kernel, "kernel")
        recovery.check_normal(t, targets._rosenblatt(omega, centres, weight), 0.0)
        return stats.suite_p(list(t.p.values()))

    assert p(weight) > 1e-6 > p(weight[::-1].copy())
    far = targets._rosenblatt(np.array([[1e4, -1e4]]), centres, weight)
    assert np.all(np.isfinite(far))


def with_norms(norms, seeds=60):
    """A trial of attention with orthogonal frequencies of these norms, which takes a seed."""

    def attention(q, k, v, *, num_features, seed):
        rng, d = np.random.default_rng(seed), q.shape[-1]
        rows = sampling.draw(num_features, d, coupling="regularised", rng=rng).omega / d**0.5
        omega = rows * norms(rng, num_features, d)
        return refattn.random_feature_attention(q, k, v, omega=omega)

    return lambda coupling: CheckRun(of(attention, "rfa", coupling=coupling), "test", 0, seeds)


def one_norm(rng, samples, d):
    return rng.chisquare(d) ** 0.5


def own_norms(rng, samples, d):
    return rng.chisquare(d, (samples, 1)) ** 0.5


@pytest.mark.parametrize("coupling", ["iid", "orthogonal"])
def test_one_norm_of_a_block_is_no_coupling(coupling):
    """It has the marginals of both, and passes neither for the other."""
    t = with_norms(one_norm)(coupling)
    t.size = {"iid": 60, "orthogonal": 1200}[coupling]  # of which one in 20 is drawn
    laws.frequency_pairs(t)
    assert t.p["lengths"] < 1e-9
    assert t.effects["lengths"] == "|omega_1| = |omega_2| for every seed"


def test_lengths_and_angles_of_the_right_coupling_and_of_another():
    right, wrong = (with_norms(own_norms)(x) for x in ("orthogonal", "iid"))
    right.size = 1200
    for t in (right, wrong):
        laws.frequency_pairs(t)
    assert min(right.p.values()) > 1e-4 < wrong.p["lengths"]
    assert wrong.p["angles"] < 1e-9
    assert not {"lengths"} & {*right.effects, *wrong.effects}


@pytest.mark.long
def test_level_of_lengths_and_angles():
    """Of two iid normal vectors, for several d: p-values are uniform."""
    rng, t = np.random.default_rng(0), trial(kernel, "kernel")
    for d in (2, 3, 16):
        p = []
        for _ in range(100):
            laws._lengths_and_angles(t, rng.standard_normal((30, 2, d)), 1e-9)
            p += [t.p["lengths"], t.p["angles"]]
        assert stats.ks(np.array(p), lambda x: x) > 1e-6


def test_numbers_beyond_a_bound():
    z = np.random.default_rng(0).standard_normal(10**6)
    share = 0.0026997960632601866
    assert recovery._p_of_tails(z, 3.0, share, 0.0) > 0.01
    for wrong in (np.clip(z, -3.0, 3.0), 1.05 * z):  # too few, and too many
        assert recovery._p_of_tails(wrong, 3.0, share, 0.0) < 1e-6
    assert recovery._p_of_tails(1.05 * z, 3.0, share, 0.2) == 1.0  # as far as is known


def test_two_exponentials_of_very_different_sizes():
    nodes, weights = np.array([32.0, 1 / 16]), np.array([[1.0, 1.0], [4.0, 1 / 8]])
    found = targets._two_exponentials(weights @ nodes[:, None] ** np.arange(5))  # exact numbers
    np.testing.assert_allclose(found[0], nodes, rtol=1e-14)
    np.testing.assert_allclose(found[1], weights, rtol=1e-14)


@pytest.mark.long
def test_level_of_the_law_of_dropout():
    """20 correct ones at 5 %: as many fail as may, by the binomial law at 1e-6."""
    adapter = of(BY_NAME["softmax-with-dropout"].fn, "softmax", "dropout")
    options = {"checks": ["law_of_dropout"], "alpha": 0.05, "time_limit": 4.0}
    failed = sum(bool(failures(check(adapter, rng=seed, **options))) for seed in range(20))
    assert stats.binomial(failed, 20, 0.05) > 1e-6 or failed < 2


def test_pairs_that_no_frequencies_explain_are_the_failure():
    """Norms of keys left out: sums of squares exceed the squares of sums."""

    def wrong(x, y, **options):
        return kernel(x, y, **options) * np.exp(np.sum(y * y, -1) / 2)

    with pytest.raises(Failure, match="two frequencies that explain"):
        laws.frequency_pairs(trial(wrong, "kernel"))
