"""Claims of reference 000: each is refuted when what it is about is made wrong."""

import math

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from refattn import features, kernels, sampling, theory
from tests.validation.claims import verdicts
from validation.claims import orthogonal_variance, variance_laws


def test_proposition_1_needs_normal_frequencies(monkeypatch):
    draw = sampling.draw

    def longer(num_samples, d, **options):
        samples = draw(num_samples, d, **options)
        return samples._replace(omega=1.1 * samples.omega)

    assert verdicts("proposition_1", "quick") == {"unbiased": "HOLDS"}
    monkeypatch.setattr(sampling, "draw", longer)
    assert verdicts("proposition_1", "quick") == {"unbiased": "REFUTED"}


# Theorem 1

POSITIVE = features.positive_features
THEOREM_1 = {
    "general form": "HOLDS",
    "other features": "HOLDS",
    "stationary": "REFUTED",
    "Bochner": "HOLDS",
    "elementwise powers": "REFUTED",
    "tensor powers": "HOLDS",
}


def test_theorem_1():
    assert verdicts("theorem_1", "quick") == THEOREM_1


def without_root(x):
    return 1.0


def of_the_square(x, omega, **options):
    return POSITIVE(x, 1.01 * omega, **options)


def with_two_pi(x, y, omega, log_weight):
    mean = np.mean(np.cos(2 * math.pi * omega @ (x - y)[..., None]), (-2, -1))
    return mean * np.exp(np.sum(x * x + y * y, -1) / 2)


def plain_monomials(x, degree):
    return x**degree


def of_the_sum(x, y):
    return np.exp(-np.sum((x + y) ** 2, -1) / 2)


@pytest.mark.parametrize(
    ("module", "name", "defect", "statement"),
    [
        (features, "positive_features", of_the_square, "general form"),
        (kernels, "_trigonometric", with_two_pi, "other features"),
        (kernels, "gaussian_kernel", of_the_sum, "Bochner"),
        (features, "_monomials", plain_monomials, "tensor powers"),
    ],
)
def test_theorem_1_with_a_defect(module, name, defect, statement, monkeypatch):
    monkeypatch.setattr(module, name, defect)
    assert verdicts("theorem_1") == {**THEOREM_1, statement: "REFUTED"}


def test_theorem_1_needs_the_root(monkeypatch):
    monkeypatch.setattr(features, "_root", without_root)
    found = verdicts("theorem_1")
    assert found["general form"] == found["other features"] == "REFUTED"


# Proposition 2

PROPOSITION_2 = {
    "error": "HOLDS",
    "small kernel": "REFUTED",
    "condition": "HOLDS",
    "consistent": "HOLDS",
}


def test_proposition_2():
    assert verdicts("proposition_2", "quick") == PROPOSITION_2


def test_proposition_2_needs_independent_frequencies(monkeypatch):
    def paired(num_samples, d, **options):
        half = np.random.default_rng(options["rng"]).standard_normal((-(-num_samples // 2), d))
        both = np.stack([half, -half], 1).reshape(-1, d)[:num_samples]
        return sampling.Samples(both, np.zeros(num_samples))

    monkeypatch.setattr(sampling, "draw", paired)
    assert verdicts("proposition_2", "quick")["error"] == "REFUTED"


def test_proposition_2_needs_all_frequencies(monkeypatch):
    whole = kernels.estimate

    def first(x, y, omega, **options):
        return whole(x, y, omega[..., :1, :], **options)

    monkeypatch.setattr(kernels, "estimate", first)
    found = verdicts("proposition_2", "quick")
    assert found["error"] == "REFUTED"
    assert found["consistent"] != "HOLDS"


def test_proposition_2_sees_an_epsilon(monkeypatch):
    whole = kernels.estimate
    monkeypatch.setattr(kernels, "estimate", lambda *args: whole(*args) + 1e-6)
    assert verdicts("proposition_2")["error"] == "REFUTED"


@pytest.mark.parametrize(
    ("name", "change", "statement"),
    [
        ("log_kernel_mse", lambda log, dot: log - 2 * dot, "error"),  # kernel^2 forgotten
        ("log_second_moment", lambda log, dot: log - 2 * dot, "condition"),  # 2 x . y for 4 x . y
    ],
)
def test_proposition_2_with_a_wrong_law(name, change, statement, monkeypatch):
    law = getattr(theory, name)

    def wrong(x, y, **options):
        return change(law(x, y, **options), np.sum(np.multiply(x, y), -1))

    monkeypatch.setattr(theory, name, wrong)
    assert verdicts("proposition_2")[statement] == "REFUTED"


# The laws of variance


def bare_factorisation(d, rng):
    return np.linalg.qr(rng.standard_normal((d, d)))[0]


def fixed_lengths(directions, rng):
    return directions * math.sqrt(directions.shape[-1])


def independent(num_samples, d, rng):
    return rng.standard_normal((num_samples, d))


def of_variance(coupling, monkeypatch):
    """Verdicts on one coupling at d = 4."""
    monkeypatch.setattr(variance_laws.theory, "COUPLINGS", (coupling,))
    monkeypatch.setitem(variance_laws.SETS, "tiny", {4: 6000})
    return verdicts("variance_laws")


@pytest.mark.long
@pytest.mark.parametrize("coupling", ["orthogonal", "regularised"])
def test_variance_laws(coupling, monkeypatch):
    assert set(of_variance(coupling, monkeypatch).values()) == {"HOLDS"}


@pytest.mark.parametrize(
    ("name", "defect", "refuted"),
    [
        ("_haar", bare_factorisation, {"mean", "frequencies"}),
        ("_chi", fixed_lengths, {"frequencies"}),
    ],
)
def test_variance_laws_of_wrong_draws(name, defect, refuted, monkeypatch):
    monkeypatch.setattr(sampling, name, defect)
    found = of_variance("orthogonal", monkeypatch)
    assert {s for s in refuted if found[s] == "REFUTED"} == refuted


@pytest.mark.parametrize(
    ("coupling", "name", "defect", "statement"),
    [
        ("orthogonal", "block_ratio", lambda pair, one: np.ones_like(one), "variance"),  # C = 0
        ("regularised", "mean", lambda pair: (np.ones(()), np.zeros(())), "mean"),
    ],
)
def test_variance_laws_that_are_wrong(coupling, name, defect, statement, monkeypatch):
    monkeypatch.setattr(theory.kernel.Pair, name, defect)
    assert of_variance(coupling, monkeypatch)[statement] == "REFUTED"


# Orthogonal frequencies


def of_orthogonality(monkeypatch, d=4, sets=100):
    monkeypatch.setitem(orthogonal_variance.BATCHES, "tiny", 60)
    monkeypatch.setattr(orthogonal_variance, "SETS", sets)
    monkeypatch.setattr(orthogonal_variance, "D", d)
    monkeypatch.setattr(orthogonal_variance, "DIMENSIONS", (2, 4))
    return verdicts("orthogonal_variance")


def test_orthogonal_variance_needs_haar_rotations(monkeypatch):
    found = of_orthogonality(monkeypatch)
    assert found["unbiased"] == found["unbiased simplex"] == found["simplex"] == "HOLDS"
    monkeypatch.setattr(sampling, "_haar", bare_factorisation)
    assert of_orthogonality(monkeypatch)["unbiased"] == "REFUTED"


def test_orthogonal_variance_needs_lengths_of_simplices(monkeypatch):
    original = sampling.COUPLINGS["simplex"]
    monkeypatch.setitem(sampling.COUPLINGS, "simplex", lambda *args: 1.3 * original(*args))
    assert of_orthogonality(monkeypatch)["unbiased simplex"] == "REFUTED"


def test_orthogonal_variance_needs_orthogonal_frequencies(monkeypatch):
    monkeypatch.setitem(sampling.COUPLINGS, "orthogonal", independent)
    found = of_orthogonality(monkeypatch, d=16, sets=200)
    assert found["positive"] != "HOLDS"
    assert found["simplex"] == "HOLDS"


def test_orthogonal_variance_needs_simplices(monkeypatch):
    monkeypatch.setitem(sampling.COUPLINGS, "simplex", sampling.COUPLINGS["orthogonal"])
    assert of_orthogonality(monkeypatch)["simplex"] != "HOLDS"


def test_orthogonal_variance_of_cosines_needs_its_sign(monkeypatch):
    law = theory.series.cosine_covariance
    monkeypatch.setattr(theory.series, "cosine_covariance", lambda *args: np.minimum(law(*args), 0))
    assert verdicts("orthogonal_variance")["every feature"] == "HOLDS"
