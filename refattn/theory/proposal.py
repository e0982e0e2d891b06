"""Second moments of importance-weighted estimates under a Gaussian proposal."""

from __future__ import annotations

import math
from copy import copy
from typing import Any

import numpy as np

from ..arrays import frequencies
from ..arrays.library import Doubles
from ..sampling import Gaussian


class SquaredWeights:
    """The squared-weight integral of a Gaussian proposal, along its eigenvectors.

    With t = z - mean, E_q[(w xi(x) xi(y))^2] / kappa^2 = exp(offset + quadratic(t)).
    """

    def __init__(self, proposal: Any, d: int) -> None:
        if proposal is not None and not isinstance(proposal, Gaussian):
            raise TypeError(
                "`proposal` must be a Gaussian or None: no formula is known for others, got "
                f"{type(proposal).__name__}."
            )
        if proposal is not None:
            frequencies.over("proposal", proposal, d)
        self.rotated = proposal is not None and proposal.cov is not None
        self.standard = proposal is None or not (
            np.any(proposal.mean) or (self.rotated and np.any(proposal.cov != np.eye(d)))
        )
        self.eigenvalues = np.ones(d)
        mean = np.zeros(d) if proposal is None else proposal.mean
        if proposal is not None and proposal.cov is not None:
            self.eigenvalues, self.vectors = proposal.eigen
        self.mean = self.rotate(mean)

    def at(self, index: Any) -> SquaredWeights:
        """Take one member of a batch, whose axes broadcast."""
        one = copy(self)
        one.mean = _batch_member(self.mean, index, 1)
        one.eigenvalues = _batch_member(self.eigenvalues, index, 1)
        if self.rotated:
            one.vectors = _batch_member(self.vectors, index, 2)
        return one

    def rotate(self, x: Doubles) -> Doubles:
        """Coordinates along the eigenvectors."""
        if not self.rotated:
            return x
        return np.asarray((x[..., None, :] @ self.vectors)[..., 0, :])

    @property
    def curvature(self) -> Doubles:
        """1 / (2 s - 1) for each eigenvalue s; 0 where the variance is infinite anyway."""
        return np.where(
            self.eigenvalues > 0.5,
            1 / np.where(self.eigenvalues > 0.5, 2 * self.eigenvalues - 1, 1.0),
            0.0,
        )

    @property
    def spread(self) -> Doubles:
        """Variance s / (2 s - 1) of frequencies under their squared weights."""
        return np.asarray(self.eigenvalues * self.curvature)

    @property
    def offset(self) -> Doubles:
        """Log of the squared weights' mean at t = 0; inf where it is infinite."""
        # log(s / sqrt(2 s - 1)), to rounding near s = 1 too
        logs = np.log1p((self.eigenvalues - 1) ** 2 * self.curvature)
        finite = np.all(self.eigenvalues > 0.5, axis=-1)
        return np.where(finite, np.sum(logs, axis=-1) / 2, math.inf)

    def quadratic(self, t: Doubles) -> Doubles:
        """Sum of t_i^2 / (2 s_i - 1), t along the eigenvectors."""
        return np.asarray(np.sum(t * t * self.curvature, axis=-1))


def _batch_member(x: Doubles, index: Any, core: int) -> Doubles:
    """Index the batch axes of x, the axes before the last `core`, as if they were broadcast."""
    lead = x.shape[: x.ndim - core]
    index = index[len(index) - len(lead) :]
    return np.asarray(x[tuple(0 if n == 1 else i for n, i in zip(lead, index, strict=True))])
