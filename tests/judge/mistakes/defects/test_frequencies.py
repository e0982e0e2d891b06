"""Wrong frequencies have the law that their entry says, and the right ones theirs."""

import math

import numpy as np
import pytest

from refattn.judge.mistakes.defects import MUTANTS
from tests.judge.conformance.candidates import BY_NAME

DRAWS = {"normal", "orthogonal", "simplex", "norms", "directions", "corners"}
LAWS = {
    m.name.removeprefix("kernel-"): m.fn.space()["law"]
    for m in MUTANTS
    if m.estimator == "kernel" and {edit.function for edit in m.fn.edits} <= DRAWS
}
HAAR, SIMPLEX = (BY_NAME[f"kernel-{name}"].fn.space()["law"] for name in ("orthogonal", "simplex"))

# E[exp(omega . e_1 - 1/2)] for d = 4, which is 1 for N(0, I)
SPHERE = 2 * 1.5906368546 / 2 * math.exp(-0.5)  # 2 I_1(2) / 2
KERNEL_RATIO = {
    **dict.fromkeys(("fixed-norms", "normalised-rows", "simplex-fixed-norms"), SPHERE),
    "halved-norms": 2 * 0.5651591040 / 1 * math.exp(-0.5),  # 2 I_1(1) / 1
    "simplex-unscaled-corners": math.exp((3 / 4 - 1) / 2),
    "norms-of-another-length": 0.79,
    "rademacher": math.cosh(1) * math.exp(-0.5),
    "uniform": math.sinh(math.sqrt(3)) / math.sqrt(3) * math.exp(-0.5),
    "unit-uniform": (math.e - 1) * math.exp(-0.5),
    "laplace": 2 * math.exp(-0.5),
    "truncated": 0.88,
    "scale-1.05": math.exp((1.05**2 - 1) / 2),
    "scale-sqrt-2": math.exp(0.5),
    "shifted": math.exp(0.1),
    "first-entry-zero": math.exp(-0.5),
}

# Another frequency than the first of four, and the correlation between entries of the two
CORRELATION = {
    "shared": (1, 1.0),
    "one-duplicate": (3, 1.0),
    "repeated-halves": (2, 1.0),
    "antithetic": (2, -1.0),
    "correlated-.05": (1, 0.05),
    "correlated-.3": (1, 0.3),
}

# A number of many frequencies of size 4, what it is, and how near
NUMBERS = {
    "mixed-entries": (lambda x: np.cov(x.T)[0, 1], 0.3, 0.03),
    "positive-entries": (lambda x: x.min() >= 0, True, 0),
    "box-muller-half": (lambda x: [x[:, 1::2].min() >= 0, x[:, ::2].mean()], [True, 0], 0.03),
    "half-precision": (lambda x: len(np.unique(x)) < 400_000, True, 0),
    "twelve-uniforms": (lambda x: [np.mean(x**2), np.mean(x**4)], [1, 2.9], 0.025),
    "truncated-far": (lambda x: [np.mean(x**2), np.abs(x).max()], [1, 3.45], 0.05),
    "shrinking-norms": (lambda x: np.linalg.norm(x, axis=-1) ** 2 * len(x), 4, 1e-9),
    # of a row of R, of a row of the matrix that is decomposed, and of a whole block
    "qr-norms-of-r": (lambda x: squares(x).mean(0), [4, 3, 2, 1], 0.1),
    "qr-unsigned-fixed-norms": (lambda x: [x[::4, 0].max() <= 0, np.ptp(squares(x)) < 1e-9], 1, 0),
    "norms-of-the-rows": (lambda x: squares(x).mean(0), 4, 0.15),
    "norm-of-a-block": (lambda x: np.ptp(squares(x), -1), 0, 1e-9),
}


def drawn(name, count, d=4, seed=3):
    return LAWS[name](count, d, np.random.default_rng(seed))


def squares(omega):
    """Squared norms, a row for each block of four."""
    return np.sum(omega**2, axis=-1).reshape(-1, 4)


def test_every_law_has_a_test():
    assert set(LAWS) == {*KERNEL_RATIO, *CORRELATION, *NUMBERS, "qr-unsigned"}


@pytest.mark.sweep(3)
@pytest.mark.long("fixed")
@pytest.mark.parametrize("name", KERNEL_RATIO)
def test_kernel_ratio(name):
    ratio = np.exp(drawn(name, 40_000, seed=0)[:, 0] - 0.5).mean()
    assert ratio == pytest.approx(KERNEL_RATIO[name], rel=0.03)
    assert abs(KERNEL_RATIO[name] - 1) > 0.03


@pytest.mark.parametrize("name", CORRELATION)
def test_correlation_between_frequencies(name):
    rng = np.random.default_rng(0)
    omega = np.stack([LAWS[name](4, 4, rng) for _ in range(10_000)])
    other, rho = CORRELATION[name]
    assert np.mean(omega[:, 0] * omega[:, other]) == pytest.approx(rho, abs=0.03)
    assert np.mean(omega[:, 0] ** 2) == pytest.approx(1, abs=0.03)


@pytest.mark.long("uniforms")
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_other_laws(name):
    of, want, near = NUMBERS[name]
    count = 20_000 if "norm" in name else 200_000  # those with norms are of blocks, which take long
    np.testing.assert_allclose(of(drawn(name, count)), want, rtol=0, atol=near)


BIAS = ((2, "axis", 0.34), (4, "axis", 0.17), (4, "ones", 0.19), (16, "ones", 0.144),
        (64, "ones", 0.07))  # fmt: skip


@pytest.mark.long("2", "64", "4")
@pytest.mark.parametrize(("d", "direction", "bias"), BIAS)
def test_qr_without_sign_is_biased_and_haar_is_not(d, direction, bias):
    z = np.eye(d)[0] if direction == "axis" else np.full(d, d**-0.5)
    for law, want in ((LAWS["qr-unsigned"], bias), (HAAR, 0.0)):
        omega = law(30_000, d, np.random.default_rng(1))
        for sign in (1, -1):
            ratio = np.exp(sign * omega @ z - 0.5).mean()
            assert ratio - 1 == pytest.approx(-sign * want, abs=0.025)


@pytest.mark.parametrize("law", [HAAR, SIMPLEX], ids=["haar", "simplex"])
def test_couplings_have_their_angles_and_are_normal(law):
    omega = law(4, 4, np.random.default_rng(2))
    unit = omega / np.linalg.norm(omega, axis=-1, keepdims=True)
    angles = np.eye(4) if law is HAAR else np.eye(4) * 4 / 3 - 1 / 3
    np.testing.assert_allclose(unit @ unit.T, angles, atol=1e-12)
    many = law(30_000, 4, np.random.default_rng(2))
    assert np.exp(many[:, 0] - 0.5).mean() == pytest.approx(1, abs=0.025)
    assert np.sum(many**2, axis=-1).mean() == pytest.approx(4, abs=0.1)
    assert np.sum(many**2, axis=-1).var() == pytest.approx(8, abs=0.3)
