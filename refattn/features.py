r"""Feature maps, and linear attention with them.

A map takes vectors (..., n, d) to features (..., n, F), of any sign. Maps with factors such as
exp(|x|^2/2) return `Features`: values and the logarithm of a scale for each row. For positive
features use `refattn.random_feature_attention`, which stores their logarithms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain, combinations_with_replacement
from typing import Any, NamedTuple

import numpy as np

from .arrays import checks, frequencies, qkv
from .arrays.arithmetic import Workspace, add, clip, exp, multiply, square_norm
from .arrays.library import (
    Array,
    array_namespace,
    as_written,
    constant,
    device,
    fused,
    host_dtype,
    is_numpy_array,
)
from .arrays.shown import held
from .numbers.primitives import primitive
from .numbers.tape import fixed

__all__ = [
    "Features",
    "elu_features",
    "hyperbolic_features",
    "polynomial_features",
    "positive_features",
    "random_features",
    "relu_features",
    "taylor_features",
    "trigonometric_features",
]
__dir__ = __all__.copy


_LARGEST_MAP = 1_000_000  # features that a deterministic map may have
_FACTORS = 10_000_000  # that these may have in all
_HIGHEST = 10_000  # degree


@held()
class Features(NamedTuple):
    """Features with a scale for each row: phi(x) = exp(log_scale) * values.

    Attributes
    ----------
    values : array, shape (..., n, F)
        Features up to the scale.
    log_scale : array, shape (..., n)
        Logarithm of the scale of each row.
    """

    values: Array
    log_scale: Array


@as_written
def random_features(
    x: Array,
    omega: Array,
    functions: Sequence[Callable[[Array], Array]],
    *,
    log_h: Callable[[Array], Array] | None = None,
) -> Features:
    r"""Map vectors to random features of the general form.

    .. math::
        \xi(x) = \frac{h(x)}{\sqrt{S}} \left[f_1(\omega_1 \cdot x), \ldots, f_1(\omega_S \cdot x),
        \ldots, f_l(\omega_1 \cdot x), \ldots, f_l(\omega_S \cdot x)\right]

    Random features post (see `refattn.naive`), Theorem 1 (general, not restricted to stationary
    kernels: exp(x . y) is not stationary).

    Parameters
    ----------
    x : array, shape (..., n, d), float32 or float64
        Vectors, in kernel coordinates if the features are for the softmax kernel.
    omega : array, shape (..., S, d)
        Frequencies; a NumPy array or one of the library of `x`.
    functions : sequence of functions of an array
        The elementwise functions f_1, ..., f_l.
    log_h : function, optional
        Maps x (..., n, d) to log h(x) (..., n); h = 1 by default.

    Returns
    -------
    Features
        `values` of shape (..., n, l S) and `log_scale` = log h(x), of shape (..., n).

    Raises
    ------
    TypeError, ValueError
        If `x` or `omega` is not a floating array, shapes do not match or there is no function.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import features
    >>> values, log_scale = features.random_features(np.ones((1, 2)), np.zeros((4, 2)), [np.cos])
    >>> values, log_scale
    (array([[0.5, 0.5, 0.5, 0.5]]), array([0.]))
    """
    product, xp = _project_rows(x, omega)
    if not isinstance(functions, Sequence) or not all(callable(f) for f in functions):
        raise TypeError("`functions` must be a sequence of functions of an array.")
    if log_h is not None:
        checks.function("log_h", log_h)
    if not functions:
        raise ValueError("`functions` must hold at least one function, got none.")
    values = xp.concat([f(product) for f in functions], axis=-1) / _root_of_length(product)
    return Features(values, xp.zeros_like(x[..., 0]) if log_h is None else log_h(x))


@as_written
def positive_features(x: Array, omega: Array, *, square_norm: Any = None) -> Features:
    r"""Map vectors to positive random features of the softmax kernel.

    .. math:: \phi(x) = S^{-1/2} \exp(\omega_s \cdot x - |x|^2 / 2)

    Sources (see `refattn.naive`): Random features post, xi_SM; Performers post, z_positive; Ye
    2023, eq. (9); Zheng 2022, xi.

    Parameters
    ----------
    x : array, shape (..., n, d), float32 or float64
        Vectors, in kernel coordinates.
    omega : array, shape (..., S, d)
        Frequencies; a NumPy array or one of the library of `x`.
    square_norm : float or array, shape (...), optional
        Replaces |x|^2 by one number for all rows: `moments.mean_plus_trace` gives that of Ye 2023
        (see `refattn.naive`), eq. (13), and `moments.mean_only` that of eqs. (14) and (15).

    Returns
    -------
    Features
        `values` of shape (..., n, S), at most S^{-1/2}, and `log_scale` of shape (..., n).

    Raises
    ------
    TypeError, ValueError
        If `x` or `omega` is not a floating array or shapes do not match.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import features
    >>> values, log_scale = features.positive_features(np.ones((1, 2)), np.eye(2))
    >>> np.exp(log_scale) * values
    array([[0.70710678, 0.70710678]])
    """
    exponent, xp = _project_rows(x, omega)
    return _exponential_features(exponent, _square_norm(x, square_norm, xp), xp)


@as_written
def hyperbolic_features(x: Array, omega: Array, *, square_norm: Any = None) -> Features:
    r"""Map vectors to hyperbolic random features: positive features of omega and -omega.

    .. math:: \phi(x) = (2 S)^{-1/2} e^{-|x|^2/2} [e^{\omega_s \cdot x}, e^{-\omega_s \cdot x}]

    Choromanski et al., arXiv:2009.14794, section 3.

    Parameters
    ----------
    x, omega, square_norm
        As in `positive_features`.

    Returns
    -------
    Features
        `values` of shape (..., n, 2 S) and `log_scale` of shape (..., n).

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import features
    >>> features.hyperbolic_features(np.zeros((1, 2)), np.ones((1, 2))).values
    array([[0.70710678, 0.70710678]])
    """
    product, xp = _project_rows(x, omega)
    exponent = xp.concat([product, -product], axis=-1)
    return _exponential_features(exponent, _square_norm(x, square_norm, xp), xp)


@as_written
def trigonometric_features(x: Array, omega: Array, *, square_norm: Any = None) -> Features:
    r"""Map vectors to trigonometric random features of the softmax kernel.

    .. math:: \phi(x) = S^{-1/2} e^{|x|^2/2} [\cos \omega_s \cdot x, \sin \omega_s \cdot x]

    Sources (see `refattn.naive`): Performers post, z_sin/cos (whose code has a spurious 2 pi); Ye
    2023, eq. (8).

    Parameters
    ----------
    x, omega, square_norm
        As in `positive_features`.

    Returns
    -------
    Features
        `values` of shape (..., n, 2 S) and `log_scale` = |x|^2/2, of shape (..., n).

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import features
    >>> features.trigonometric_features(np.full((1, 1), 60.0), np.zeros((1, 1)))
    Features(values=array([[1., 0.]]), log_scale=array([1800.]))
    """
    product, xp = _project_rows(x, omega)
    return Features(_waves(product, xp), _square_norm(x, square_norm, xp) / 2)


def trusted_waves(x: Array, omega: Array, norms: bool) -> Features:
    """Compute `trigonometric_features` of trusted arrays, or with |x|^2 taken as 0."""
    xp = array_namespace(x)
    square = square_norm(x) if norms else xp.zeros(x.shape[:-1], dtype=x.dtype, device=device(x))
    return Features(_waves(multiply(x, xp.matrix_transpose(omega)), xp), square / 2)


@primitive
def _waves(product: Array, xp: Any) -> Array:
    """Join cosines and sines, over the root of the number of frequencies."""
    return xp.concat([xp.cos(product), xp.sin(product)], axis=-1) / _root_of_length(product)


@_waves.pullback
def _pull_waves(values: Array, g: Array, product: Array, xp: Any) -> dict[str, Array]:
    """Pull waves back by each other: they are their own derivatives."""
    half = product.shape[-1]
    return {"product": g[..., half:] * values[..., :half] - g[..., :half] * values[..., half:]}


@as_written
def elu_features(x: Array, alpha: float = 1.0) -> Array:
    r"""Map vectors to elu(x) + 1, elementwise.

    .. math:: \phi(x) = x + 1 \;(x > 0), \qquad \alpha e^x + (1 - \alpha) \;(x \le 0)

    Katharopoulos et al., arXiv:2006.16236, with alpha = 1; Linear attention post (see
    `refattn.naive`), phi, with 0.1. Written without the cancellation of alpha (e^x - 1) + 1, and
    finite for every finite x.

    Parameters
    ----------
    x : array, shape (...), float32 or float64
        Values.
    alpha : float, default 1.0
        Slope of elu at 0 from below, in (0, 1]: features are non-negative. A float counts
        exactly: in longdouble, 0.3 is not 3/10 but the double next to it.

    Returns
    -------
    array, shape of `x`
        Namespace, dtype and device of `x`.

    Raises
    ------
    TypeError
        If `x` is not a floating array or `alpha` not a real number.
    ValueError
        If `alpha` is outside (0, 1].

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import features
    >>> features.elu_features(np.array([-50.0, 0.0, 2.0, 1e300]))
    array([1.92874985e-022, 1.00000000e+000, 3.00000000e+000, 1.00000000e+300])
    """
    xp = checks.arrays(0, x=x)
    alpha = checks.real("alpha", alpha, positive=True, like=x)
    if alpha > 1:
        raise ValueError(f"`alpha` must be in (0, 1], got {alpha}.")
    return elu(x, xp, alpha)


@primitive
def elu(x: Array, xp: Any, alpha: float = 1.0, memory: Workspace | None = None) -> Array:
    """Compute `elu_features` of trusted vectors, in a workspace if there is one."""
    if not is_numpy_array(x):
        return _elu(x, alpha, xp)
    below, above = _rooms(memory, x)
    below = exp(clip(x, -math.inf, 0.0, xp, below), xp)  # without a branch for each number
    if alpha != 1:
        below = alpha * below + (1 - alpha)
    return add(below, clip(x, 0.0, math.inf, xp, above))


@fused
def _elu(x: Array, alpha: float, xp: Any) -> Array:
    return alpha * xp.exp(xp.minimum(x, 0.0)) + (1 - alpha) + xp.maximum(x, 0.0)


@elu.pullback
def _pull_elu(
    values: Array, g: Array, x: Array, xp: Any, alpha: float = 1.0, memory: Any = None
) -> dict[str, Array]:
    """Multiply by the slope: 1 above 0, alpha e^x below."""
    one = xp.ones((), dtype=x.dtype, device=device(x))
    slope = xp.minimum(values, one)  # of alpha 1, below 0 the slope is the value
    if alpha != 1:
        slope = xp.where(x > 0, 1.0, alpha * xp.exp(clip(x, -math.inf, 0.0, xp)))
    return {"x": g * slope}


def _rooms(memory: Workspace | None, x: Array) -> tuple[Array | None, Array | None]:
    """Room for the features of `x`, and for what these are made of."""
    if memory is None:
        return None, None
    return memory.room("features", x.shape, x.dtype), memory.room("parts", x.shape, x.dtype)


@as_written
def relu_features(x: Array) -> Array:
    r"""Map vectors to their positive parts, elementwise: phi(x) = max(x, 0).

    Choromanski et al., arXiv:2009.14794, generalised attention. A query without positive entries
    has normaliser 0, and its row of attention is nan.

    Parameters
    ----------
    x : array, shape (...), float32 or float64
        Values.

    Returns
    -------
    array, shape of `x`
        Namespace, dtype and device of `x`.

    Raises
    ------
    TypeError
        If `x` is not a floating array.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import features
    >>> features.relu_features(np.array([-1.0, 2.0]))
    array([0., 2.])
    """
    return relu(x, checks.arrays(0, x=x))


def relu(x: Array, xp: Any, memory: Workspace | None = None) -> Array:
    """Compute `relu_features` of trusted vectors, in a workspace if there is one."""
    return clip(x, 0.0, math.inf, xp, _rooms(memory, x)[0])


@as_written
def taylor_features(x: Array, *, degree: int) -> Features:
    r"""Map vectors to the features of the truncated Taylor series of the softmax kernel.

    .. math::
        \phi(x) = \left[x^\alpha / \sqrt{\alpha!}\right]_{|\alpha| \le p}, \qquad
        \phi(x) \cdot \phi(y) = \sum_{n=0}^{p} (x \cdot y)^n / n!

    Exact, in the basis of monomials: (d + p)!/(d! p!) features. Random features post (see
    `refattn.naive`), phi_SM, where the powers x^n of a vector are symmetric tensor powers. The
    truncated kernel is positive for even degrees, and may be negative for odd ones.

    Parameters
    ----------
    x : array, shape (..., n, d), float32 or float64
        Vectors, in kernel coordinates.
    degree : int
        Degree p of the last term, at least 0.

    Returns
    -------
    Features
        `values` of shape (..., n, F), of rows no longer than d^{p/2} sqrt(p + 1), and `log_scale`
        of shape (..., n).

    Raises
    ------
    TypeError
        If `x` is not a floating array or `degree` not an integer.
    ValueError
        If `degree` is negative or above 10,000, or the map would have more than a million features,
        or ten million factors in them.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import features
    >>> x, y = np.array([[1.0, 2.0]]), np.array([[0.5, 0.25]])
    >>> (a, log_a), (b, log_b) = (features.taylor_features(t, degree=2) for t in (x, y))
    >>> np.exp(log_a + log_b) * (a @ b.T)  # 1 + 1 + 1/2
    array([[2.5]])
    """
    xp, d = _check_degree(x, degree), x.shape[-1]
    _check_size(d + degree, d, degree)
    unit, _, logs, peak = taylor_scales(x, degree, xp)
    terms = [xp.exp(log - peak) * _monomials(unit, p, xp) for p, log in enumerate(logs)]
    return Features(xp.concat(terms, axis=-1), peak[..., 0])


@as_written
def taylor_scales(x: Array, degree: int, xp: Any) -> tuple[Array, Array, list[Array], Array]:
    """Return rows over their largest entry, its log, the log factor of each degree, the largest."""
    size = xp.max(xp.abs(fixed(x)), axis=-1, keepdims=True)  # any scale cancels
    size = xp.where(size == 0, 1.0, size)
    unit, log_size = x / size, xp.log(size)
    # size^p / sqrt(p!) over the degrees p, with the largest divided out.
    log_roots = np.log(np.arange(1, degree + 1, dtype=host_dtype(x))) / 2
    logs = [p * log_size - constant(np.sum(log_roots[:p]), x) for p in range(degree + 1)]
    peak = logs[0]
    for term in logs[1:]:
        peak = xp.maximum(peak, term)
    return unit, log_size, logs, peak


@as_written
def polynomial_features(x: Array, *, degree: int) -> Array:
    r"""Map vectors to the features of the homogeneous polynomial kernel.

    .. math::
        \phi(x) = \left[\sqrt{p!/\alpha!} \; x^\alpha\right]_{|\alpha| = p}, \qquad
        \phi(x) \cdot \phi(y) = (x \cdot y)^p

    Performers post (see `refattn.naive`), The Kernel Trick, where d = p = 2: (x_1^2, sqrt(2) x_1
    x_2, x_2^2).

    Parameters
    ----------
    x : array, shape (..., n, d), float32 or float64
        Vectors.
    degree : int
        Degree p, at least 0.

    Returns
    -------
    array, shape (..., n, F)
        F = (d + p - 1)!/((d - 1)! p!) features; namespace, dtype and device of `x`.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import features
    >>> features.polynomial_features(np.array([[1.0, 2.0]]), degree=2)
    array([[1.        , 2.82842712, 4.        ]])
    """
    xp, d = _check_degree(x, degree), x.shape[-1]
    _check_size(d + degree - 1, d, degree)
    return _monomials(x, degree, xp)


@as_written
def _project_rows(x: Array, omega: Array) -> tuple[Array, Any]:
    """Check vectors and frequencies; return omega_s . x_i, (..., n, S), and the namespace."""
    xp = checks.arrays(2, x=x)
    omega, _ = frequencies.shared(omega, None, x)
    checks.leading("x", x, "omega", omega)
    return multiply(x, xp.matrix_transpose(omega)), xp


def _square_norm(x: Array, instead: Any, xp: Any) -> Array:
    """Return |x|^2 of the rows (..., n, d), or a number in its place, shape (..., n)."""
    if instead is None:
        return square_norm(x)
    instead = qkv.per_head("square_norm", instead, x)
    return xp.broadcast_to(instead[..., None], x.shape[:-1])


@as_written
def _exponential_features(exponent: Array, square_norm: Array, xp: Any) -> Features:
    """Compute exp(exponent - square_norm / 2) over the root of the number of features."""
    peak = xp.max(fixed(exponent), axis=-1, keepdims=True)  # any scale cancels
    values = xp.exp(exponent - peak) / _root_of_length(exponent)
    return Features(values, peak[..., 0] - square_norm / 2)


def _root_of_length(x: Array) -> Array:
    """Square root of the length of the last axis, in the dtype of `x`."""
    return constant(x.shape[-1], x) ** 0.5


@primitive
@as_written
def _monomials(x: Array, degree: int, xp: Any) -> Array:
    r"""Multiply the monomials of a degree p by the roots of their multinomial coefficients.

    One factor after another: :math:`p! / \alpha! = \prod_j j / r_j` if factor j is the r_j-th that
    equals it. The first j factors are then a feature of degree j, and as each index is spread
    evenly, it is between 1 and the result, up to a few factors: nothing overflows on the way.
    """
    index, rank = _factors_of_monomials(x.shape[-1], degree)
    result = xp.ones_like(x[..., :1])
    for j in range(degree):
        root = np.sqrt((j + 1) / rank[:, j].astype(host_dtype(x)))
        factor = xp.take(x, xp.asarray(index[:, j], device=device(x)), axis=-1)
        result = result * (constant(root, x) * factor)
    return result


@_monomials.pullback
def _pull_monomials(values: Array, g: Array, x: Array, degree: int, xp: Any) -> dict[str, Array]:
    r"""Pull the normalised monomials of a degree back.

    .. math:: \frac{\partial}{\partial x_c} \sqrt{\tfrac{p!}{\alpha!}} \, x^\alpha
        = \sqrt{p \, \alpha_c} \; \sqrt{\tfrac{(p - 1)!}{\beta!}} \, x^\beta,
        \qquad \beta = \alpha - e_c
    """
    if degree == 0:
        return {}
    lower = _monomials(x, degree - 1, xp)
    above, root = _raised(x.shape[-1], degree)
    taken = xp.take(g, xp.asarray(above.ravel(), device=device(x)), axis=-1)
    taken = xp.reshape(taken, (*g.shape[:-1], *above.shape))
    root = constant(np.sqrt(root.astype(host_dtype(x))), x)
    return {"x": xp.sum(lower[..., None] * (root * taken), axis=-2)}


@cache
def _raised(d: int, degree: int) -> tuple[Any, Any]:
    """Find which monomial x_c times one of degree - 1 is, (F, d), and degree times its power."""
    place = {x: i for i, x in enumerate(combinations_with_replacement(range(d), degree))}
    lower = list(combinations_with_replacement(range(d), degree - 1))
    above = [[place[tuple(sorted((*x, c)))] for c in range(d)] for x in lower]
    power = [[x.count(c) + 1 for c in range(d)] for x in lower]
    return np.asarray(above), degree * np.asarray(power)


def _factors_of_monomials(d: int, degree: int) -> tuple[Any, Any]:
    """Return indices (F, p) of the factors of monomials, and how many have been equal so far."""
    count, place = math.comb(d + degree - 1, degree), np.arange(degree)
    rows = chain.from_iterable(combinations_with_replacement(range(d), degree))
    index = np.fromiter(rows, np.int64, count * degree).reshape(count, degree)
    change, edge = index[:, 1:] != index[:, :-1], np.ones((count, 1), bool)
    start, stop = np.hstack([edge, change]), np.hstack([change, edge])
    first = np.maximum.accumulate(np.where(start, place, 0), axis=1)
    last = np.minimum.accumulate(np.where(stop, place, degree)[:, ::-1], axis=1)[:, ::-1]
    rank = place - first + 1
    order = np.argsort((rank - 0.5) / (last - first + 1), axis=1, kind="stable")
    return np.take_along_axis(index, order, axis=1), np.take_along_axis(rank, order, axis=1)


def _check_degree(x: Array, degree: int) -> Any:
    """Check vectors and a degree; return the namespace of the vectors."""
    xp = checks.arrays(2, x=x)
    checks.compatible("x", x, "x", x)
    checks.non_negative_integer("degree", degree)
    return xp


def _check_size(pool: int, d: int, degree: int) -> None:
    """Check how many features there are, choices of `degree` from the pool, and their factors."""
    checks.at_most("degree", degree, _HIGHEST, "the highest of these features")
    count = math.comb(pool, degree)
    if count > _LARGEST_MAP:
        raise ValueError(
            f"`degree` must give at most {_LARGEST_MAP:,} features, got degree {degree} for "
            f"vectors of length {d}: {checks.show(count, ',')} features."
        )
    if count * degree > _FACTORS:
        raise ValueError(
            f"`degree` must give features of at most {_FACTORS:,} factors in all, got degree "
            f"{degree} for vectors of length {d}: {checks.show(count, ',')} features."
        )
