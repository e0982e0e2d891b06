"""Gradients of feature maps, from features back to the vectors that they are made of.

Maps of other packages have theirs in an attribute `vjp`: ``vjp(x)`` returns what the map does and
a function of its cotangent, or of those of `values` and `log_scale` where the map gives `Features`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from functools import cache, partial
from itertools import combinations_with_replacement
from typing import Any

import numpy as np

from ..arrays import checks
from ..arrays.arithmetic import multiply
from ..arrays.blocks import WHOLE, part
from ..arrays.library import Array, as_written, constant, device, host_dtype
from ..engine.signed import Signed
from ..engine.signed_back import SignedBack
from ..estimators.linear import check_features
from ..estimators.rfa import RfaInputs, wave_weights
from ..features import (
    Features,
    elu_features,
    hyperbolic_features,
    polynomial_features,
    positive_features,
    relu_features,
    taylor_features,
    taylor_scales,
    trigonometric_features,
    trusted_waves,
)


def map_with_pullback(feature_map: Callable[[Array], Any], features: Signed, xp: Any) -> SignedBack:
    """Make the features of a map, with their pullback."""

    def phi(x: Array, head: tuple[slice, ...]) -> tuple[Features, Any]:
        mapped, pull = _vjp(feature_map, x, xp)
        values, log_scale = check_features(mapped, x, xp)

        def pull_features(d_values: Array, d_log: Array | None) -> tuple[Array, list[Any]]:
            if isinstance(mapped, Features):
                return _check_shape(pull(d_values, d_log), x), []
            # In halves: the scale of a row may be so small that there is no inverse of it.
            half = xp.exp(-log_scale / 2)[..., None]
            if _pullback_of(feature_map) is None:  # other rows may come of this one
                return _check_shape(pull(d_values * half * half), x), []
            return half * pull(half * d_values), []

        return Features(values, log_scale), pull_features

    return SignedBack(phi, phi, features.width, splits=features.splits)


def waves_with_pullback(inputs: RfaInputs, norms: bool) -> SignedBack:
    """Make trigonometric features, with the weights of the samples on the side of the queries."""
    (omega, log_weight), root, xp = inputs.samples, inputs.root, inputs.xp
    weight, whole = wave_weights(log_weight, xp), (WHOLE, WHOLE)

    def phi(x: Array, head: tuple[slice, ...], *, of_query: bool) -> tuple[Features, Any]:
        omega_h, x = part(omega, (*head, *whole)), x * root
        values, log_scale = trusted_waves(x, omega_h, norms, xp)
        scale = part(weight, (*head, *whole)) if of_query else 1.0

        def pull(d_values: Array, d_log: Array | None) -> tuple[Array, list[Any]]:
            half = omega_h.shape[-2]
            d_log = d_log if norms else None
            d_x, turned = _pull_waves(x, omega_h, values, d_values * scale, d_log)
            more = [(0, whole[0], multiply(xp.matrix_transpose(turned), x))]
            if of_query:
                moved = xp.sum(d_values * values * scale, axis=-2, keepdims=True)
                more.append((1, whole[0], moved[..., :half] + moved[..., half:]))
            return d_x * root, more

        return Features(values * scale, log_scale), pull

    phi_q, phi_k = partial(phi, of_query=True), partial(phi, of_query=False)
    return SignedBack(phi_q, phi_k, 2 * omega.shape[-2], (omega, log_weight))


def _vjp(feature_map: Any, x: Array, xp: Any) -> tuple[Any, Callable[..., Array]]:
    """Evaluate a feature map, and return its pullback too."""
    vjp = getattr(feature_map, "vjp", None)
    if vjp is not None:
        mapped, pull = vjp(x)
        return mapped, pull
    options, phi = getattr(feature_map, "keywords", {}), feature_map(x)
    return phi, partial(_pullback_of(feature_map), x, phi, xp=xp, **options)


def _pullback_of(feature_map: Any) -> Any:
    """Return the pullback of a map of `refattn.features`, perhaps with options; None of another."""
    if isinstance(feature_map, partial):
        return None if feature_map.args else _pullback_of(feature_map.func)
    return _PULLBACKS.get(feature_map) if isinstance(feature_map, Hashable) else None


def check_pullback(feature_map: Any) -> None:
    """Check that a map has a pullback."""
    if _pullback_of(feature_map) is None and not callable(getattr(feature_map, "vjp", None)):
        raise TypeError(
            "`feature_map` must have a pullback, in an attribute `vjp`, or be a map of "
            f"`refattn.features`, got {getattr(feature_map, '__name__', feature_map)!r}."
        )


def _check_shape(d_x: Any, x: Array) -> Array:
    """Check that the result of a user's pullback has the shape of x."""
    checks.is_array("feature_map.vjp", d_x)
    if d_x.shape[-2:] != x.shape[-2:]:  # of as many heads as the output has
        raise ValueError(
            "`feature_map.vjp` must give cotangents of the shape of x, (..., "
            f"{x.shape[-2]}, {x.shape[-1]}), got {tuple(d_x.shape)}."
        )
    return d_x


def _pull_elu(x: Array, phi: Array, cotangent: Array, *, xp: Any, alpha: float = 1.0) -> Array:
    """Multiply by the slope: 1 above 0, alpha e^x below."""
    return cotangent * xp.where(x > 0, 1.0, alpha * xp.exp(xp.minimum(x, xp.zeros_like(x))))


def _pull_relu(x: Array, phi: Array, cotangent: Array, *, xp: Any) -> Array:
    """Multiply by the slope: 1 above 0, 0 below."""
    return xp.where(x > 0, cotangent, 0.0)


@as_written
def _pull_polynomial(x: Array, phi: Any, cotangent: Array, *, xp: Any, degree: int) -> Array:
    r"""Pull the normalised monomials of a degree back.

    .. math:: \frac{\partial}{\partial x_c} \sqrt{\tfrac{p!}{\alpha!}} \, x^\alpha
        = \sqrt{p \, \alpha_c} \; \sqrt{\tfrac{(p - 1)!}{\beta!}} \, x^\beta,
        \qquad \beta = \alpha - e_c
    """
    d = x.shape[-1]
    if degree == 0:
        return xp.zeros_like(x)
    lower = polynomial_features(x, degree=degree - 1)
    above, root = _raised(d, degree)
    index = xp.asarray(above.ravel(), device=device(x))
    taken = xp.take(cotangent, index, axis=-1)
    taken = xp.reshape(taken, (*cotangent.shape[:-1], *above.shape))
    root = constant(np.sqrt(root.astype(host_dtype(x))), x)
    return xp.sum(lower[..., None] * (root * taken), axis=-2)


@cache
def _raised(d: int, degree: int) -> tuple[Any, Any]:
    """Find which monomial x_c times one of degree - 1 is, (F, d), and degree times its power."""
    place = {x: i for i, x in enumerate(combinations_with_replacement(range(d), degree))}
    lower = list(combinations_with_replacement(range(d), degree - 1))
    above = [[place[tuple(sorted((*x, c)))] for c in range(d)] for x in lower]
    power = [[x.count(c) + 1 for c in range(d)] for x in lower]
    return np.asarray(above), degree * np.asarray(power)


@as_written
def _pull_taylor(
    x: Array, phi: Features, d_values: Array, d_log_scale: Array | None, *, xp: Any, degree: int
) -> Array:
    """Pull each degree p as `_pull_polynomial`, over root p!, without the scale of the row."""
    d, first = x.shape[-1], 0
    unit, log_size, logs, peak = taylor_scales(x, degree, xp)
    total = xp.zeros_like(x)
    for p, log in enumerate(logs):
        count = math.comb(d + p - 1, p)
        d_unit = _pull_polynomial(unit, None, d_values[..., first : first + count], xp=xp, degree=p)
        total = total + xp.exp(log - peak - log_size) * d_unit if p else total
        first += count
    return total


@as_written
def _pull_exponential(
    x: Array,
    phi: Features,
    d_values: Array,
    d_log_scale: Array | None,
    *,
    omega: Array,
    square_norm: Any = None,
    both: bool = False,
    **_: Any,
) -> Array:
    """Pull features e^(omega . x - |x|^2 / 2) back: each by its exponent, all by the norm."""
    omega, moved = constant(omega, x), d_values * phi.values
    if both:
        half = omega.shape[-2]
        moved = moved[..., :half] - moved[..., half:]
    d_x = multiply(moved, omega)
    if d_log_scale is None or square_norm is not None:
        return d_x
    return d_x - d_log_scale[..., None] * x


def _pull_trigonometric(
    x: Array,
    phi: Features,
    d_values: Array,
    d_log_scale: Array | None,
    *,
    omega: Array,
    square_norm: Any = None,
    **_: Any,
) -> Array:
    """Pull features e^(|x|^2 / 2) [cos, sin](omega . x) back."""
    d_log_scale = None if square_norm is not None else d_log_scale
    return _pull_waves(x, constant(omega, x), phi.values, d_values, d_log_scale)[0]


@as_written
def _pull_waves(
    x: Array, omega: Array, values: Array, d_values: Array, d_log_scale: Array | None
) -> tuple[Array, Array]:
    """Return cotangents of vectors and of omega . x for trigonometric features."""
    half = omega.shape[-2]
    turned = d_values[..., half:] * values[..., :half] - d_values[..., :half] * values[..., half:]
    d_x = multiply(turned, omega)
    return (d_x if d_log_scale is None else d_x + d_log_scale[..., None] * x), turned


# Of a map: the vectors, what it made of them, and cotangents to those of the vectors.
_PULLBACKS: dict[Any, Callable[..., Array]] = {
    elu_features: _pull_elu,
    relu_features: _pull_relu,
    polynomial_features: _pull_polynomial,
    taylor_features: _pull_taylor,
    positive_features: _pull_exponential,
    hyperbolic_features: partial(_pull_exponential, both=True),
    trigonometric_features: _pull_trigonometric,
}
