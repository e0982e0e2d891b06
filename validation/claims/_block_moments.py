r"""Moments up to the fourth of kernel estimates from coupled frequencies, by quadrature.

Given the lengths r_i of frequencies with directions at a fixed angle, of cosine c, and turned by
one Haar rotation,

.. math:: E \exp\Big(\sum_i n_i \omega_i \cdot z\Big)
          = {}_0F_1\Big(; \frac d2; \frac{|z|^2}{4} \Big(\sum_i n_i^2 r_i^2
            + 2 c \sum_{i<j} n_i n_j r_i r_j\Big)\Big)

as the sum has a uniform direction. What is left is an integral over at most four independent
chi_d lengths. The second moments are those of `refattn.theory`, found here in another way; the
fourth ones are the variances that Catoni's bound needs to test variances.
"""

from __future__ import annotations

import math
from collections import Counter
from functools import cache
from itertools import product
from typing import Any

import numpy as np
from scipy import special

NODES = {1: 80, 2: 60, 3: 40, 4: 24}  # for each of that many lengths
# Ways to write a product of p estimates as powers of distinct ones, and how many there are.
POWERS: dict[int, dict[tuple[int, ...], int]] = {
    1: {(1,): 1},
    2: {(2,): 1, (1, 1): 1},
    3: {(3,): 1, (2, 1): 3, (1, 1, 1): 1},
    4: {(4,): 1, (3, 1): 4, (2, 2): 3, (2, 1, 1): 6, (1, 1, 1, 1): 1},
}


def moments(features: str, coupling: str, d: int, t: float, count: int) -> tuple[float, ...]:
    """Mean, variance and fourth central moment of an estimate over the kernel.

    `t` is |x + y|^2, or |x - y|^2 for trigonometric features.
    """
    block = {"iid": 1, "antithetic": 2}.get(coupling, d)
    blocks = [block] * (count // block) + [count % block] * (count % block > 0)
    second = fourth = 0.0
    for size in blocks:  # fourth moments of independent terms: sum of their own, 6 v v' for pairs
        mean, v, f = _block(features, coupling, d, t, size)
        second, fourth = second + v, fourth + f + 6 * second * v
    return mean, second / count**2, fourth / count**4


@cache
def _block(features: str, coupling: str, d: int, t: float, size: int) -> tuple[float, ...]:
    """Mean of one estimate, and central moments of the sum of those of a block."""
    raw = [1.0]
    for powers in POWERS.values():
        raw.append(
            sum(
                ways * math.perm(size, len(n)) * _product(features, coupling, d, t, n)
                for n, ways in powers.items()
                if len(n) <= size
            )
        )
    m = raw[1]
    return m / size, raw[2] - m**2, raw[4] - 4 * m * raw[3] + 6 * m**2 * raw[2] - 3 * m**4


@cache
def _product(features: str, coupling: str, d: int, t: float, n: tuple[int, ...]) -> float:
    """Mean of a product of powers of estimates at distinct frequencies of a block."""
    sign = -1 if features == "trigonometric" else 1
    if features == "positive":
        exponents = Counter([n])
    else:  # cosines are means over both signs, of each factor
        owners = [i for i, power in enumerate(n) for _ in range(power)]
        exponents = Counter()
        for signs in product((-1, 1), repeat=len(owners)):
            total = [0] * len(n)
            for i, s in zip(owners, signs, strict=True):
                total[i] += s
            one, other = sorted(total), sorted(-k for k in total)
            exponents[tuple(max(one, other))] += 1
    found = sum(k * _exponential(coupling, d, sign * t / 4, e) for e, k in exponents.items())
    return math.exp(-sign * t * sum(n) / 2) * found / exponents.total()


@cache
def _exponential(coupling: str, d: int, z: float, n: tuple[int, ...]) -> float:
    """Mean of exp(sum_i n_i omega_i . u) at |u|^2 / 4 = z, of the cosine where z is negative."""
    if coupling == "regularised":
        return float(special.hyp0f1(d / 2, z * d * sum(k * k for k in n)))
    if coupling == "antithetic":  # the second is minus the first
        n = (n[0] - sum(n[1:]),)
    cosine = -1 / (d - 1) if coupling == "simplex" else 0.0
    axes = np.meshgrid(*[_lengths(d, z, len(n))[0]] * len(n), indexing="ij", sparse=True)
    weight: Any = 1.0
    for w in np.meshgrid(*[_lengths(d, z, len(n))[1]] * len(n), indexing="ij", sparse=True):
        weight = weight * w
    terms = [k * r for k, r in zip(n, axes, strict=True)]
    squares = sum(u * u for u in terms)
    both = sum(terms)
    square = (1 - cosine) * squares + cosine * both * both
    return float(np.sum(weight * special.hyp0f1(d / 2, z * square)))


@cache
def _lengths(d: int, z: float, count: int) -> tuple[Any, Any]:
    """Nodes and weights of chi_d, where exp(4 r |u|) times its density is not negligible."""
    low, high = max(0.0, math.sqrt(d) - 7), math.sqrt(d) + 7 + 8 * math.sqrt(max(z, 0.0)) / count
    nodes, weights = special.roots_legendre(NODES[count])
    r = low + (high - low) * (nodes + 1) / 2
    log_density = (d - 1) * np.log(r) - r * r / 2 - special.gammaln(d / 2)
    return r, weights * (high - low) / 2 * np.exp(log_density + (1 - d / 2) * math.log(2))
