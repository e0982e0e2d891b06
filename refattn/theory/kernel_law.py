"""Relative variance of an estimate of the kernel for each coupling of frequencies."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, get_args

import numpy as np

from ..arrays import checks, matrices
from ..arrays.library import Doubles
from ..kernels import FEATURES
from ..typing import Features, KnownCoupling
from . import series
from .elementary import (
    inner_product,
    log_cosh,
    log_expm1,
    log_mean_exp,
    quiet_log,
    quotient,
    quotient_of_exp,
)
from .proposal import SquaredWeights

COUPLINGS: tuple[KnownCoupling, ...] = get_args(KnownCoupling)


class KernelLaw:
    """The laws of one pair of vectors, relative to the kernel, for a coupling of frequencies."""

    def __init__(
        self, x: Any, y: Any, features: Features, coupling: KnownCoupling, proposal: Any
    ) -> None:
        x, y = check_vectors(x, y)
        checks.choice("features", features, FEATURES)
        checks.choice("coupling", coupling, COUPLINGS)
        self.features, self.coupling, self.d = features, coupling, x.shape[-1]
        self.law = SquaredWeights(proposal, self.d)
        _check_known(features, coupling, self.law)
        checks.compatible("proposal", self.law.mean, "x + y", x + y)
        if proposal is not None and proposal.gauge is not None:
            gauge = proposal.gauge[..., 0]
            checks.compatible("proposal", gauge, "x + y", x + y)
            shape = np.broadcast_shapes(x.shape, y.shape, gauge.shape)
            x, y = (np.broadcast_to(u, shape)[..., None, :] for u in (x, y))
            x, y = (u[..., 0, :] for u in proposal.change_gauge(x, y))
        shape = np.broadcast_shapes((x + y).shape, self.law.mean.shape)[:-1]
        self.log_kappa = np.broadcast_to(inner_product(x, y), shape)
        self.sum, self.difference = self.law.rotate(x + y), self.law.rotate(x - y)
        # What estimates with several frequencies depend on: |x + y - mean|^2, or |x - y|^2.
        t = self.difference if features == "trigonometric" else self.sum - self.law.mean
        self.square = inner_product(t, t)

    @property
    def block(self) -> int:
        """How many frequencies depend on each other."""
        sizes = {"iid": 1, "antithetic": 2}
        return sizes.get(self.coupling, int(self.d))

    def mean(self) -> tuple[Doubles, Doubles]:
        """Sign and log of E estimate / kappa."""
        if self.coupling != "regularised":
            return np.ones_like(self.log_kappa), np.zeros_like(self.log_kappa)
        if self.features == "trigonometric":
            value = series.mean_cosine(self.d, self.square)
            return np.sign(value), self.square / 2 + quiet_log(np.abs(value))
        log_mean = series.log_series(self.d, self.square / 4, series.unit) - self.square / 2
        return np.ones_like(self.square), np.minimum(log_mean, 0.0)

    def log_bias(self) -> Doubles:
        """Log of |E estimate - kappa| / kappa."""
        if self.coupling != "regularised":
            return np.full_like(self.log_kappa, -math.inf)
        if self.features != "trigonometric":
            return quiet_log(
                series.missing(self.d, self.square / 2, partial(series.missing_norms, self.d))
            )
        bias = series.mean_cosine(self.d, self.square, centred=True)
        return self.square / 2 + quiet_log(np.abs(bias))

    def log_variance(self, count: int) -> Doubles:
        """Log of Var / kappa^2 for a number of frequencies."""
        one = self.log_variance_of_one()
        full, rest = divmod(count, self.block)
        pairs = full * self.block * (self.block - 1) + rest * (rest - 1)
        if pairs == 0:
            return one - math.log(count)
        # V/S + pairs C / S^2 as a sum of terms >= 0: V + (b - 1) C may be far below V.
        most = count * (self.block - 1)
        ratio = np.where(one == math.inf, 1.0, self.block_ratio(one))  # infinite for any number
        return one + quiet_log((most - pairs) / most + pairs / most * ratio) - math.log(count)

    def log_variance_of_one(self) -> Doubles:
        """Log of V / kappa^2."""
        law, square = self.law, self.square
        if self.coupling == "regularised":
            if self.features == "trigonometric":
                return square + quiet_log(series.fixed_norm_variance(self.d, square))
            terms = (
                series.second_less_square
                if self.features == "positive"
                else series.even_less_square
            )
            return series.log_series(self.d, square, terms) - square
        if self.features == "positive":
            return log_expm1(law.offset + law.quadratic(self.sum - law.mean))
        base = law.offset + law.quadratic(law.mean)
        if self.features == "hyperbolic":
            tilt = log_cosh(2 * inner_product(self.sum * law.curvature, law.mean))
            return log_expm1(
                base
                + log_mean_exp(law.quadratic(self.sum) + tilt, -inner_product(self.sum, self.sum))
            )
        angle = inner_product(self.difference * law.curvature, law.mean)
        quadratic = law.quadratic(self.difference)
        most = log_expm1(base + log_mean_exp(square, -quadratic))
        finite = np.where(np.isfinite(base), base, 0.0)
        less = finite - quadratic + 2 * quiet_log(np.abs(np.sin(angle)))
        return most + quiet_log(np.maximum(1 - quotient_of_exp(less, most), 0.0))

    def block_ratio(self, one: Doubles) -> Doubles:
        """(V + (b - 1) C) / V in a block of b; any number where V, whose log is `one`, is 0."""
        square, d = self.square, self.d
        if self.coupling == "antithetic":
            if self.features != "positive":
                return np.full_like(square, 2.0)  # features of omega and -omega are the same
            log_pair = math.log(2) + log_expm1(
                self.law.offset
                + log_mean_exp(self.law.quadratic(self.sum - self.law.mean), -square)
            )
            return quotient_of_exp(log_pair, one)
        if self.coupling == "regularised":
            if self.features == "trigonometric":
                block = series.fixed_norm_block(d, square)
                return quotient(block, series.fixed_norm_variance(d, square))
            terms = series.block if self.features == "positive" else series.even_block
            return quotient_of_exp(series.log_series(d, square, terms) - square, one)
        cosines = [0.0] if self.coupling == "orthogonal" else [-1 / (d - 1), 1 / (d - 1)]
        if self.features == "trigonometric":
            covariance = series.cosine_covariance(d, square, cosines)
            ratio = 2 * quotient(covariance, np.expm1(-square) ** 2)
        else:
            cosines = cosines[:1] if self.features == "positive" else cosines
            missing = series.missing(d, square, partial(series.missing_angles, d, cosines))
            ratio = -np.sign(missing) * quotient_of_exp(quiet_log(np.abs(missing)), one)
        return np.asarray(np.maximum(1 + (d - 1) * ratio, 0.0))


def check_vectors(x: Any, y: Any) -> tuple[Doubles, Doubles]:
    x, y = (checks.host(name, value, "(..., d)", 1) for name, value in (("x", x), ("y", y)))
    checks.compatible("x", x, "y", y)
    matrices.squares("x", x)
    matrices.squares("y", y)
    return x, y


def _check_known(features: Features, coupling: KnownCoupling, law: SquaredWeights) -> None:
    """Refuse what has no law in closed form."""
    if law.standard or coupling == "iid" or (features, coupling) == ("positive", "antithetic"):
        return
    s = law.eigenvalues
    isotropic = bool(np.all(np.abs(s - s[..., :1]) <= 1e-12 * s[..., :1]))
    fits = isotropic if coupling != "regularised" else bool(np.all(s == 1))
    if features != "positive" or not fits:
        raise ValueError(
            "`proposal` must be None, or for positive features have an isotropic covariance "
            f"(that of N(mean, I) if regularised): no closed form is known for {features} "
            f"features, coupling {coupling!r} and this proposal."
        )
