"""Claims of reference 001: each changes its verdict when what it is about is made wrong."""

import math

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

pytest.importorskip("matplotlib")

import refattn
from refattn import features, kernels, sampling
from tests.validation.claims import verdicts
from validation import suite
from validation.claims import orthogonal_against_iid, positive_against_trigonometric

DRAW = sampling.draw


def as_expected(name):
    return {key: s.expected for key, s in suite.claims()[name].statements.items()}


def of_scale(scale):
    def draw(*args, **options):
        omega, log_weight = DRAW(*args, **options)
        return sampling.Samples(scale * omega, log_weight)

    return draw


def iid_draw(num_samples, d, **options):
    return DRAW(num_samples, d, **{**options, "coupling": "iid"})


def test_two_pi():
    assert verdicts("two_pi", "quick") == as_expected("two_pi")


def test_two_pi_goes_with_frequencies_that_are_shorter(monkeypatch):
    monkeypatch.setattr(sampling, "draw", of_scale(1 / (2 * math.pi)))
    found = verdicts("two_pi", "quick")
    assert found["kernel"] == "HOLDS"
    assert found["kernel with its law"] == "REFUTED"
    assert found["attention"] == "HOLDS"


def test_two_pi_in_the_features(monkeypatch):
    original = features.trigonometric_features
    monkeypatch.setattr(
        features, "trigonometric_features", lambda x, omega: original(x, 2 * np.pi * omega)
    )
    assert verdicts("two_pi", "quick")["attention without it"] != "HOLDS"


def test_kernel_trick():
    assert verdicts("kernel_trick", "quick") == as_expected("kernel_trick")


def test_kernel_trick_needs_the_root_of_two(monkeypatch):
    original = features.polynomial_features
    monkeypatch.setattr(
        features,
        "polynomial_features",
        lambda x, degree: original(x, degree=degree) / [1, math.sqrt(2), 1],
    )
    assert verdicts("kernel_trick")["polynomial"] == "REFUTED"


def test_kernel_trick_needs_the_half(monkeypatch):
    original = kernels.gaussian_kernel
    monkeypatch.setattr(kernels, "gaussian_kernel", lambda x, y: original(x, y) ** 2)
    assert verdicts("kernel_trick")["softmax"] == "REFUTED"


def test_kernel_trick_needs_the_law_of_the_frequencies(monkeypatch):
    monkeypatch.setattr(sampling, "draw", of_scale(1.1))
    found = verdicts("kernel_trick", "quick")
    assert found["fourier"] == found["any gamma, scaled"] == "REFUTED"
    assert found["eq. (6), scaled"] == "REFUTED"


def test_kernel_trick_needs_the_keys_of_attention(monkeypatch):
    original = refattn.random_feature_attention
    monkeypatch.setattr(
        refattn,
        "random_feature_attention",
        lambda q, k, v, **options: original(q, 1.01 * k, v, **options),
    )
    assert verdicts("kernel_trick")["attention"] == "REFUTED"


def test_positive_estimates_that_are_negative(monkeypatch):
    original = kernels.estimate
    monkeypatch.setattr(
        kernels, "estimate", lambda *args, **options: original(*args, **options) - 1
    )
    monkeypatch.setattr(positive_against_trigonometric, "L", 32)
    assert verdicts("positive_against_trigonometric")["negative"] == "REFUTED"


@pytest.fixture
def small_figures(monkeypatch):
    """The figures with shorter sequences and fewer draws: the verdicts are those of L = 1024."""
    for module in (orthogonal_against_iid, positive_against_trigonometric):
        monkeypatch.setattr(module, "L", 64)
        monkeypatch.setitem(module.SIZES, "quick", (16,))
    monkeypatch.setitem(orthogonal_against_iid.DRAWS, "quick", (40, 80))
    with threadpool_limits(1):
        yield


@pytest.mark.usefixtures("small_figures")
def test_orthogonal_against_iid():
    assert verdicts("orthogonal_against_iid", "quick") == as_expected("orthogonal_against_iid")


def test_orthogonal_frequencies_that_are_iid(monkeypatch):
    monkeypatch.setattr(sampling, "draw", iid_draw)
    monkeypatch.setitem(orthogonal_against_iid.KERNEL_DRAWS, "tiny", 400)
    monkeypatch.setattr(orthogonal_against_iid, "L", 32)
    assert verdicts("orthogonal_against_iid")["kernel"] == "UNDERPOWERED"


@pytest.mark.usefixtures("small_figures")
def test_published_frequencies_of_the_stated_law(monkeypatch):
    def stated(count, d, rng):
        return DRAW(count, d, coupling="orthogonal", rng=rng).omega

    for module in (orthogonal_against_iid, positive_against_trigonometric):
        monkeypatch.setattr(module, "published_frequencies", stated)
    monkeypatch.setitem(orthogonal_against_iid.DRAWS, "quick", (40, 4))
    assert verdicts("orthogonal_against_iid", "quick")["figure"] != "HOLDS"
    assert verdicts("positive_against_trigonometric", "quick")["blind"] != "HOLDS"


@pytest.mark.usefixtures("small_figures")
def test_gain_of_orthogonality_that_is_large(monkeypatch):
    original = orthogonal_against_iid.frequencies

    def shorter(variant, *args):
        return original("published" if variant.startswith("orthogonal") else variant, *args)

    monkeypatch.setattr(orthogonal_against_iid, "frequencies", shorter)
    assert verdicts("orthogonal_against_iid", "quick")["small gain"] != "HOLDS"


@pytest.mark.usefixtures("small_figures")
def test_positive_against_trigonometric():
    found = verdicts("positive_against_trigonometric", "quick")
    assert found == as_expected("positive_against_trigonometric")


@pytest.mark.usefixtures("small_figures")
def test_trigonometric_features_that_are_hyperbolic(monkeypatch):
    def estimate(x, y, omega, *, features):
        name = "hyperbolic" if features == "trigonometric" else features
        return original(x, y, omega, features=name)

    original = kernels.estimate
    monkeypatch.setattr(kernels, "estimate", estimate)
    monkeypatch.setattr(features, "trigonometric_features", features.hyperbolic_features)
    found = verdicts("positive_against_trigonometric", "quick")
    assert found["order"] != "HOLDS"
    assert found["kernel"] != "HOLDS"
