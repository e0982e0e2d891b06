"""Claims of reference 002: each is refuted when what it is about is made wrong."""

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

pytest.importorskip("matplotlib")

import refattn
from refattn import adapt, moments, sampling, theory
from tests.validation.claims import verdicts
from validation import suite
from validation.claims import distributions, mean_of_ratios
from validation.claims import moments as of_moments


def expected(name):
    return {key: s.expected for key, s in suite.claims()[name].statements.items()}


@pytest.fixture(autouse=True)
def one_thread():
    """As in the runner: threads cost more than they gain on small arrays."""
    with threadpool_limits(1):
        yield


@pytest.fixture(autouse=True)
def fewer(monkeypatch):
    """Experiments small enough for a test, and all verdicts still as expected."""
    monkeypatch.setitem(of_moments.REPLICATES, "quick", 4000)
    monkeypatch.setitem(of_moments.ERRORS, "quick", 1000)
    monkeypatch.setitem(mean_of_ratios.DRAWS, "quick", 5000)
    monkeypatch.setattr(distributions, "COUNTS", (1, 1000))
    monkeypatch.setattr(distributions, "TOKENS", 200)
    monkeypatch.setitem(distributions.DRAWS, "quick", 42)
    monkeypatch.setitem(distributions.ROWS, "quick", (10, 50))


def without_norms(monkeypatch):
    """Random-feature attention that ignores the constants it is given."""
    estimate = refattn.random_feature_attention

    def defect(*args, square_norms=None, **options):
        return estimate(*args, **options)

    monkeypatch.setattr(refattn, "random_feature_attention", defect)


@pytest.mark.long
def test_moments_need_the_divisor(monkeypatch):
    assert verdicts("moments", "quick") == expected("moments")
    finish = moments._moments

    def population(p, ddof):
        return finish(p, 0)._replace(ddof=ddof)

    monkeypatch.setattr(moments, "_moments", population)
    assert verdicts("moments", "quick")["laws"] == "REFUTED"


def test_moments_merge_by_size(monkeypatch):
    def average(a, b):
        return merge(a, b)._replace(mean=(a.mean + b.mean) / 2)

    merge = moments.merge
    monkeypatch.setattr(moments, "merge", average)
    assert verdicts("moments")["pieces"] == "REFUTED"


def test_error_of_the_covariance(monkeypatch):
    estimate = moments.estimate
    monkeypatch.setattr(moments, "estimate", lambda x, **o: moments.shrink(estimate(x, **o)))
    assert verdicts("moments", "quick")["advice"] == "REFUTED"


def test_mean_of_ratios():
    assert verdicts("mean_of_ratios", "quick") == expected("mean_of_ratios")


def test_importance_sampling_needs_the_normaliser(monkeypatch):
    monkeypatch.setattr(refattn, "importance_sampled_attention", refattn.random_feature_attention)
    assert verdicts("mean_of_ratios", "quick")["importance sampling"] == "REFUTED"


def test_randomized_attention_needs_noise(monkeypatch):
    draw = sampling._draw_target

    def defect(q, k, u, z, *options):
        return draw(q, k, u, 0 * z, *options)

    monkeypatch.setattr(sampling, "_draw_target", defect)
    assert verdicts("mean_of_ratios", "quick")["randomized"] == "REFUTED"


def test_bias_needs_the_frequencies_of_the_reference(monkeypatch):
    """With the frequencies of p_i the refuted sentences would be true."""

    def target(q, k, v, *, omega, scale):
        shape = (len(v), 1, omega.shape[-2], omega.shape[-1])
        count = shape[0] * shape[2]
        drawn = sampling.draw_target(q, k, num_samples=count, rng=1, scale=scale).reshape(shape)
        return refattn.randomized_attention(q, k, v, omega=drawn, scale=scale)

    monkeypatch.setattr(refattn, "mean_of_ratios_attention", target)
    found = verdicts("mean_of_ratios", "quick")
    assert (found["unbiased"], found["one frequency"]) == ("HOLDS", "REFUTED")
    assert found["reduces"] != "REFUTED"


def test_bias_of_self_normalised_sampling(monkeypatch):
    exact = refattn.softmax_attention
    monkeypatch.setattr(
        refattn, "random_feature_attention", lambda *args, omega, scale: exact(*args, scale=scale)
    )
    assert verdicts("mean_of_ratios", "quick")["SNIS biased"] == "UNDERPOWERED"


def test_norm_approximation():
    assert verdicts("norm_approximation", "quick") == expected("norm_approximation")


def test_expected_norm_needs_the_trace(monkeypatch):
    monkeypatch.setattr(moments, "mean_plus_trace", moments.mean_only)
    assert verdicts("norm_approximation")["expected norm"] == "REFUTED"


def test_attention_needs_the_norms_of_keys(monkeypatch):
    without_norms(monkeypatch)
    found = verdicts("norm_approximation")
    assert (found["attention"], found["limit"]) == ("HOLDS", "REFUTED")


def test_bias_of_constants_has_a_sign(monkeypatch):
    bias = theory.log_norm_approximation_bias
    monkeypatch.setattr(theory, "log_norm_approximation_bias", lambda *args: -bias(*args))
    assert verdicts("norm_approximation", "quick")["kernel"] == "REFUTED"


@pytest.mark.long
def test_distributions(monkeypatch):
    assert verdicts("distributions", "quick") == expected("distributions")
    without_norms(monkeypatch)
    monkeypatch.setattr(
        adapt, "fit", lambda q, k, **options: sampling.Gaussian(np.zeros(10), np.eye(10))
    )
    monkeypatch.setattr(theory, "log_kernel_variance", theory.log_kernel_mean)
    found = verdicts("distributions", "quick")
    for name in ("normalised", "adapted"):
        assert found[name] == "UNDERPOWERED"
    assert (found["increase"], found["others"], found["figure 3"]) == (
        "REFUTED",
        "REFUTED",
        "HOLDS",
    )
    assert found["law"] == "REFUTED"


@pytest.mark.long
def test_failures_need_random_features(monkeypatch):
    def exact(q, k, v, *, scale, **options):
        return refattn.softmax_attention(q, k, v, scale=scale)

    attend = refattn.attend
    monkeypatch.setattr(refattn, "random_feature_attention", exact)
    monkeypatch.setattr(
        refattn, "attend", lambda *args: attend(*args)._replace(lse=attend(*args).lse + 200)
    )
    found = verdicts("distributions", "quick")
    assert found["others"] == found["others, eq. (9)"] == "HOLDS"
    assert found["figure 3, eq. (9)"] == found["size"] == "REFUTED"
