"""The laws of the drawn frequencies.

Every statistical test here has an exact null distribution and a total false-alarm probability of
at most ALPHA by the union bound. The seed is fixed, so that a run is repeatable.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy import stats
from scipy.linalg import qr

from refattn import sampling

ALPHA = 1e-6
SEED = 20240607


def probes(d: int) -> np.ndarray:
    """Unit vectors e_i, -e_i and (1, ..., 1), -(1, ..., 1) over sqrt(d): shape (2 d + 2, d)."""
    axes = np.concatenate([np.eye(d), np.full((1, d), d**-0.5)])
    return np.concatenate([axes, -axes])


def gaussian_p_value(z: np.ndarray) -> float:
    """P-value of the hypothesis that z (one column a probe) has iid N(0, 1) entries a column.

    For each column the mean is exactly normal, the sum of squares exactly chi-square and the
    Kolmogorov-Smirnov distance has the law of `kstwo`; Bonferroni over all of them.
    """
    n, columns = z.shape
    p = []
    for x in z.T:
        p.append(2 * stats.norm.sf(abs(x.sum()) / np.sqrt(n)))
        chi2 = stats.chi2(n)
        p.append(2 * min(chi2.cdf((x**2).sum()), chi2.sf((x**2).sum())))
        p.append(stats.kstest(x, "norm").pvalue)
    return min(1.0, 3 * columns * min(p))


def unsigned(num_samples: int, d: int, rng: np.random.Generator) -> np.ndarray:
    """The defect: Q of a bare QR decomposition, without the signs of diag R."""
    q = qr(rng.standard_normal((d, d)))[0]
    return q[:num_samples] * np.sqrt(rng.chisquare(d, (num_samples, 1)))


def projections(
    sampler: Callable[..., np.ndarray], d: int, draws: int, seed: int = SEED
) -> list[np.ndarray]:
    """For each row of a block: its products with the probes over independent blocks."""
    rng = np.random.default_rng(seed)
    omega = np.stack([sampler(d, d, rng) for _ in range(draws)])  # (draws, d, d)
    return [omega[:, i] @ probes(d).T for i in range(d)]


@pytest.mark.parametrize("d", [2, 3, 4, 16])
@pytest.mark.parametrize("coupling", sampling.COUPLINGS)
def test_each_frequency_is_standard_normal(coupling: str, d: int) -> None:
    # Rows of one block depend on each other; Bonferroni over rows needs no independence.
    def sampler(s: int, d: int, rng: Any) -> np.ndarray:
        return sampling.draw(s, d, coupling=coupling, rng=rng).omega

    p = min(gaussian_p_value(z) for z in projections(sampler, d, 4000)) * d
    assert p > ALPHA


@pytest.mark.parametrize("d", [2, 3, 4, 16])
def test_missing_signs_are_seen_in_single_frequencies(d: int) -> None:
    p = min(gaussian_p_value(z) for z in projections(unsigned, d, 4000)) * d
    assert p < ALPHA


def haar_p_value(sampler: Callable[..., np.ndarray], d: int, draws: int) -> float:
    """P-value of the hypothesis that the directions of a block are a Haar matrix Q.

    For fixed unit u and v, (1 + u.Qv) / 2 is Beta((d - 1)/2, (d - 1)/2), and the sign of det Q is
    a fair coin; Bonferroni over pairs of probes.
    """
    rng = np.random.default_rng(SEED)
    matrices = np.stack([sampler(d, d, rng) for _ in range(draws)])
    matrices /= np.linalg.norm(matrices, axis=-1, keepdims=True)
    beta = stats.beta((d - 1) / 2, (d - 1) / 2)
    p = [
        stats.kstest((1 + np.einsum("i,nij,j->n", u, matrices, v)) / 2, beta.cdf).pvalue
        for u in probes(d)
        for v in probes(d)
    ]
    p.append(stats.binomtest(int(np.sum(np.linalg.det(matrices) < 0)), draws).pvalue)
    return float(min(1.0, len(p) * min(p)))


@pytest.mark.parametrize("d", [2, 3, 4])
def test_directions_of_a_block_are_haar(d: int) -> None:
    def sampler(s: int, d: int, rng: Any) -> np.ndarray:
        return sampling.draw(s, d, coupling="orthogonal", rng=rng).omega

    assert haar_p_value(sampler, d, 4000) > ALPHA


@pytest.mark.parametrize("d", [2, 3, 4])
def test_missing_signs_are_seen_in_a_block(d: int) -> None:
    assert haar_p_value(unsigned, d, 4000) < ALPHA


@pytest.mark.parametrize(("num_samples", "d"), [(4, 4), (11, 4), (3, 4), (5, 1), (1, 7)])
def test_orthogonal_blocks(num_samples: int, d: int) -> None:
    omega, log_weight = sampling.draw(num_samples, d, coupling="orthogonal", rng=SEED)
    assert omega.shape == (num_samples, d)
    np.testing.assert_array_equal(log_weight, np.zeros(num_samples))
    unit = omega / np.linalg.norm(omega, axis=-1, keepdims=True)
    for start in range(0, num_samples, d):
        block = unit[start : start + d]
        np.testing.assert_allclose(block @ block.T, np.eye(len(block)), atol=1e-14)


def test_norms_are_independent_chi() -> None:
    # In one block: squared norms are iid chi-square, so their sum is too, and the difference of
    # the first two, mapped through its exact law, is uniform. Shared or fixed norms fail both.
    d, draws = 3, 4000
    rng = np.random.default_rng(SEED)
    omega = np.stack(
        [sampling.draw(d, d, coupling="orthogonal", rng=rng).omega for _ in range(draws)]
    )
    squares = np.sum(omega**2, -1)
    share = squares[:, 0] / (squares[:, 0] + squares[:, 1])  # Beta(d/2, d/2) when independent
    p = [
        stats.kstest(squares[:, 0], stats.chi2(d).cdf).pvalue,
        stats.kstest(squares.sum(-1), stats.chi2(d * d).cdf).pvalue,
        stats.kstest(share, stats.beta(d / 2, d / 2).cdf).pvalue,
    ]
    assert min(p) * len(p) > ALPHA


def test_blocks_are_independent() -> None:
    # omega_1 . omega_{d+1} / |omega_1| is N(0, 1) when the blocks are independent.
    d, draws = 3, 4000
    rng = np.random.default_rng(SEED)
    omega = np.stack(
        [sampling.draw(d + 1, d, coupling="orthogonal", rng=rng).omega for _ in range(draws)]
    )
    z = np.sum(omega[:, 0] * omega[:, d], -1) / np.linalg.norm(omega[:, 0], axis=-1)
    assert gaussian_p_value(z[:, None]) > ALPHA


@pytest.mark.parametrize("coupling", sampling.COUPLINGS)
def test_repeatable(coupling: str) -> None:
    a, b = (sampling.draw(9, 4, coupling=coupling, rng=1).omega for _ in range(2))
    np.testing.assert_array_equal(a, b)
    assert a.dtype == np.float64
    generator = np.random.default_rng(1)
    np.testing.assert_array_equal(a, sampling.draw(9, 4, coupling=coupling, rng=generator).omega)
    assert np.any(a != sampling.draw(9, 4, coupling=coupling, rng=generator).omega)


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "message"),
    [
        ((0, 4), {}, ValueError, "`num_samples` must be a positive integer, got 0"),
        ((-3, 4), {}, ValueError, "`num_samples` must be a positive integer, got -3"),
        (
            (2.5, 4),
            {},
            TypeError,
            "`num_samples` must be a positive integer, got 2.5 of type float",
        ),
        (("8", 4), {}, TypeError, "`num_samples` must be a positive integer, got '8' of type str"),
        ((2, 0), {}, ValueError, "`d` must be a positive integer, got 0"),
        ((2, 4), {"coupling": "qr"}, ValueError, "`coupling` must be one of .*, got 'qr'"),
    ],
)
def test_bad_input(args: Any, kwargs: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        sampling.draw(*args, **kwargs)
