r"""Mean and variance of a ratio of two sums over independent draws, for any number of draws.

With weights w > 0 and values f, A = sum w f and B = sum w,

.. math:: E \frac AB = \int_0^\infty E\, A e^{-tB} \, dt, \qquad
          E \frac{A^2}{B^2} = \int_0^\infty t \, E\, A^2 e^{-tB} \, dt,

and what is under the integrals factorises over the draws. Integrals over frequencies of length 1,
and over log t, are sums over equidistant points, whose error falls exponentially for analytic
functions that vanish at both ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import special

REACH = 10.0  # standard deviations from the nearest centre at which the integrals end


class Group(NamedTuple):
    """Draws of one law: probabilities of points, and the weight and value at each."""

    p: Any
    weight: Any
    value: Any


class Problem(NamedTuple):
    """One query and keys of length 1, scale 1, with values of length 1 in [0, 1]."""

    q: float
    k: Any
    v: Any

    @property
    def exact(self) -> float:
        """Softmax attention."""
        return float(special.softmax(self.q * self.k) @ self.v)

    def log_weight(self, omega: Any) -> Any:
        """Evaluate log p_n(omega) / N(omega; 0, 1), the importance weight of N(0, 1)."""
        log_xi = omega * self.q - self.q**2 / 2 + special.logsumexp(self._keys(omega), 1)
        return log_xi - special.logsumexp(self.q * self.k)

    def value(self, omega: Any) -> Any:
        """Evaluate f_n(omega)."""
        return special.softmax(self._keys(omega), 1) @ self.v

    def _keys(self, omega: Any) -> Any:
        return omega[:, None] * self.k - self.k**2 / 2


def points(centres: Any, step: float) -> Any:
    """Equidistant frequencies around all centres."""
    low, high = np.min(centres) - REACH, np.max(centres) + REACH
    return np.arange(low, high + step, step)


def density(omega: Any, centre: float) -> Any:
    """Density of N(centre, 1)."""
    return np.exp(-((omega - centre) ** 2) / 2) / np.sqrt(2 * np.pi)


def moments(
    groups: Sequence[Group], counts: Sequence[int], step: float = 0.1
) -> list[tuple[float, float]]:
    """Mean and variance of the ratio for each number of draws of every group."""
    u = np.arange(-60.0, 60.0, step)
    log_mass, first, second = (np.zeros((len(groups), len(u))) for _ in range(3))
    for i, g in enumerate(groups):
        exponent = -np.exp(u)[:, None] * g.weight
        decay = np.exp(exponent) * g.p
        mass = np.maximum(np.sum(decay, -1), 1e-300)
        # Near mass 1 its logarithm, times a large count, needs the digits of 1 - mass.
        near = np.maximum(np.expm1(exponent) @ g.p, -0.6)
        log_mass[i] = np.where(mass < 0.5, np.log(mass), np.log1p(near))
        first[i] = decay @ (g.weight * g.value) / mass
        second[i] = decay @ (g.weight * g.value) ** 2 / mass
    found = []
    for n in counts:
        every = np.exp(n * log_mass.sum(0) + u)
        share = n * first.sum(0)
        square = n * (second - first**2).sum(0) + share**2
        mean = float(step * np.sum(every * share))
        found.append((mean, float(step * np.sum(every * np.exp(u) * square)) - mean**2))
    return found
