r"""Feature maps, and attention linear in them.

A map takes vectors (..., n, d) to features (..., n, F). Maps whose values span many orders of
magnitude return `Features`: values and the logarithm of a scale for each row, so that a factor
like exp(|x|^2/2) never overflows. Maps may be signed; the positive family is better served by
`refattn.random_feature_attention`, which keeps every feature in the log domain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain, combinations_with_replacement
from typing import Any, NamedTuple

import numpy as np

from . import _validate
from ._array import (
    Array,
    array_namespace,
    as_written,
    block_shape,
    blocks,
    broadcast_lead,
    constant,
    device,
    group_heads,
    host_dtype,
    multiply,
    put,
    square_norm,
    sum_of_products,
)
from .attention import _finite, _past, _sum_of_visible

__all__ = [
    "Features",
    "elu_features",
    "hyperbolic_features",
    "linear_attention",
    "polynomial_features",
    "positive_features",
    "random_features",
    "relu_features",
    "taylor_features",
    "trigonometric_features",
]

_CHUNK = 128  # tokens a step of the causal form
_LARGEST = 1_000_000  # features that a deterministic map may have
_FACTORS = 10_000_000  # that these may have in all
_HIGHEST = 10_000  # degree


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


class _State(NamedTuple):
    """Sums over keys, e^base * total = sum_j phi(k_j) [v_j, 1]; base -inf before the first key."""

    total: Array  # (..., F, d_v + 1) over keys, or (..., n, d_v + 1) once a query has read it
    base: Array  # (..., 1 or n, 1)


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

    Reference 000, Theorem 1 (general, and not restricted to stationary kernels: exp(x . y) is
    none).

    Parameters
    ----------
    x : array, shape (..., n, d), float32 or float64
        Vectors, in kernel coordinates where the softmax kernel is meant.
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
    product = _products(x, omega)
    xp = array_namespace(x)
    if callable(functions) or not all(callable(f) for f in functions):
        raise TypeError("`functions` must be a sequence of functions of an array.")
    if not functions:
        raise ValueError("`functions` must hold at least one function, got none.")
    values = xp.concat([f(product) for f in functions], axis=-1) / _root(product)
    return Features(values, xp.zeros_like(x[..., 0]) if log_h is None else log_h(x))


def positive_features(x: Array, omega: Array, *, square_norm: Any = None) -> Features:
    r"""Map vectors to positive random features of the softmax kernel.

    .. math:: \phi(x) = S^{-1/2} \exp(\omega_s \cdot x - |x|^2 / 2)

    Reference 000, xi_SM; reference 001, z_positive; reference 002, eq. (9); reference 003, xi.

    Parameters
    ----------
    x : array, shape (..., n, d), float32 or float64
        Vectors, in kernel coordinates.
    omega : array, shape (..., S, d)
        Frequencies; a NumPy array or one of the library of `x`.
    square_norm : float or array, shape (...), optional
        What takes the place of |x|^2, the same for all rows: reference 002, eqs. (14) and (15),
        has `moments.mean_only` here and eq. (13) `moments.mean_plus_trace`.

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
    return _exponential_features(_products(x, omega), _square_norm(x, square_norm))


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

    Raises
    ------
    TypeError, ValueError
        As in `positive_features`.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import features
    >>> features.hyperbolic_features(np.zeros((1, 2)), np.ones((1, 2))).values
    array([[0.70710678, 0.70710678]])
    """
    product = _products(x, omega)
    xp = array_namespace(x)
    exponent = xp.concat([product, -product], axis=-1)
    return _exponential_features(exponent, _square_norm(x, square_norm))


def trigonometric_features(x: Array, omega: Array, *, square_norm: Any = None) -> Features:
    r"""Map vectors to trigonometric random features of the softmax kernel.

    .. math:: \phi(x) = S^{-1/2} e^{|x|^2/2} [\cos \omega_s \cdot x, \sin \omega_s \cdot x]

    Reference 001, z_sin/cos (whose code has a spurious 2 pi); reference 002, eq. (8).

    Parameters
    ----------
    x, omega, square_norm
        As in `positive_features`.

    Returns
    -------
    Features
        `values` of shape (..., n, 2 S) and `log_scale` = |x|^2/2, of shape (..., n).

    Raises
    ------
    TypeError, ValueError
        As in `positive_features`.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import features
    >>> features.trigonometric_features(np.full((1, 1), 60.0), np.zeros((1, 1)))
    Features(values=array([[1., 0.]]), log_scale=array([1800.]))
    """
    xp = array_namespace(x)

    def log_h(x: Array) -> Array:
        return _square_norm(x, square_norm) / 2

    return random_features(x, omega, (xp.cos, xp.sin), log_h=log_h)


def elu_features(x: Array, alpha: float = 1.0) -> Array:
    r"""Map vectors to elu(x) + 1, elementwise.

    .. math:: \phi(x) = x + 1 \;(x > 0), \qquad \alpha e^x + (1 - \alpha) \;(x \le 0)

    Reference 004, phi (with alpha = 0.1 there; 1 in Katharopoulos et al., arXiv:2006.16236).
    Written without the cancellation of alpha (e^x - 1) + 1, and finite for every finite x.

    Parameters
    ----------
    x : array, shape (...), float32 or float64
        Values.
    alpha : float, default 1.0
        Slope of elu at 0 from below, in (0, 1]: features are non-negative. A float is the number
        that it is: 0.3 in longdouble is not 3/10 but the double next to it.

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
    _validate.arrays(0, x=x)
    alpha = _validate.real("alpha", alpha, positive=True, like=x)
    if alpha > 1:
        raise ValueError(f"`alpha` must be in (0, 1], got {alpha}.")
    xp = array_namespace(x)
    return xp.where(x > 0, x + 1, alpha * xp.exp(xp.where(x > 0, 0.0, x)) + (1 - alpha))


def relu_features(x: Array) -> Array:
    r"""Map vectors to their positive parts, elementwise: phi(x) = max(x, 0).

    Choromanski et al., arXiv:2009.14794, generalised attention. A query without a positive part
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
    _validate.arrays(0, x=x)
    return array_namespace(x).where(x < 0, 0.0, x)


def taylor_features(x: Array, *, degree: int) -> Features:
    r"""Map vectors to the features of the truncated Taylor series of the softmax kernel.

    .. math::
        \phi(x) = \left[x^\alpha / \sqrt{\alpha!}\right]_{|\alpha| \le p}, \qquad
        \phi(x) \cdot \phi(y) = \sum_{n=0}^{p} (x \cdot y)^n / n!

    Exact, in the basis of monomials: (d + p)!/(d! p!) features. Reference 000, phi_SM, where the
    powers x^n of a vector are symmetric tensor powers. The truncated kernel is positive for even
    degrees, and may be negative for odd ones.

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
    _validate.arrays(2, x=x)
    _validate.compatible("x", x, "x", x)
    _validate.non_negative_integer("degree", degree)
    xp, d = array_namespace(x), x.shape[-1]
    _check_size(d + degree, d, degree)
    size = xp.max(xp.abs(x), axis=-1, keepdims=True)
    size = xp.where(size == 0, 1.0, size)
    unit, log_size = x / size, xp.log(size)
    # size^p / sqrt(p!) over the degrees p, with the largest divided out.
    log_roots = np.log(np.arange(1, degree + 1, dtype=host_dtype(x))) / 2
    logs = [p * log_size - constant(np.sum(log_roots[:p]), x) for p in range(degree + 1)]
    peak = logs[0]
    for term in logs[1:]:
        peak = xp.maximum(peak, term)
    terms = [xp.exp(log - peak) * _monomials(unit, p) for p, log in enumerate(logs)]
    return Features(xp.concat(terms, axis=-1), peak[..., 0])


def polynomial_features(x: Array, *, degree: int) -> Array:
    r"""Map vectors to the features of the homogeneous polynomial kernel.

    .. math::
        \phi(x) = \left[\sqrt{p!/\alpha!} \; x^\alpha\right]_{|\alpha| = p}, \qquad
        \phi(x) \cdot \phi(y) = (x \cdot y)^p

    Reference 001, The Kernel Trick, where d = p = 2: (x_1^2, sqrt(2) x_1 x_2, x_2^2).

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

    Raises
    ------
    TypeError, ValueError
        As in `taylor_features`.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import features
    >>> features.polynomial_features(np.array([[1.0, 2.0]]), degree=2)
    array([[1.        , 2.82842712, 4.        ]])
    """
    _validate.arrays(2, x=x)
    _validate.compatible("x", x, "x", x)
    _validate.non_negative_integer("degree", degree)
    d = x.shape[-1]
    _check_size(d + degree - 1, d, degree)
    return _monomials(x, degree)


def linear_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    feature_map: Callable[[Array], Array | Features] = elu_features,
    mask: Array | None = None,
    causal: bool = False,
) -> Array:
    r"""Compute attention whose kernel is the product of features.

    .. math::
        \mathrm{out}_i = \frac{\phi(q_i) \cdot \sum_j \phi(k_j) \, v_j}
                              {\phi(q_i) \cdot \sum_j \phi(k_j)}

    Reference 004, kernel_attn; reference 000, KernelizedAttention. Linear in n and m.

    Parameters
    ----------
    q, k, v
        Queries (..., n, d), keys (..., m, d) and values (..., m, d_v), float32 or float64; see
        `attend` for broadcasting and grouped heads. No scale is applied: scale `q` and `k` first
        where the map calls for it.
    feature_map : function, default elu_features
        Maps vectors (..., n, d) to features (..., n, F), or to `Features`. With grouped heads it
        is given arrays with one more axis, (..., key heads, queries per key head or 1, n, d).
    mask : array of bool, broadcasting to (..., n, m), optional
        True where the query attends to the key. A mask that is the same for all queries keeps
        the cost linear; any other costs O(n m F).
    causal : bool, default False
        Query i sees key j only if j <= i + m - n. The cost stays linear.

    Returns
    -------
    array, shape (..., n, d_v)
        Same namespace, dtype and device as `q`. Rows that see no key are 0. Nothing is added to
        the normaliser: where it vanishes the row is nan or infinite. Sums of values times
        features must be representable; with features of both signs, an infinite value makes its
        column of the rows that see it infinite or nan.

    Raises
    ------
    TypeError
        As in `attend`, and if `feature_map` does not return an array or `Features` of the dtype
        of its argument.
    ValueError
        As in `attend`, and if the features have the wrong shape.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import linear_attention
    >>> q, k, v = np.zeros((1, 2)), np.array([[0.0, 0.0], [2.0, 2.0]]), np.array([[0.0], [4.0]])
    >>> linear_attention(q, k, v)  # kernels 2 and 6
    array([[3.]])
    """
    _validate.attention(q, k, v, mask=mask, causal=causal)
    if not callable(feature_map):
        raise TypeError(
            f"`feature_map` must be a function of an array, got {type(feature_map).__name__}."
        )
    (q, k, v, mask), ungroup = group_heads(q, k, v, _validate.key_rows(mask, k))
    phi = partial(_evaluate, feature_map)
    return ungroup(_linear_attention(q, k, v, phi, phi, mask, causal))


@as_written
def _sum(k: Array, v: Array, feature_map: Callable[[Array], Array | Features]) -> _State:
    """The state of linear attention over some keys."""
    phi = partial(_evaluate, feature_map)
    size, state = _sizes(k, k, v, phi)
    return _fold(state, phi, k, v, None, blocks(0, k.shape[-2], size))


def _fold(
    state: _State,
    phi: Callable[[Array], Features],
    k: Array,
    v: Array,
    mask: Array | None,
    keys: Iterable[slice],
) -> _State:
    """Add blocks of keys to the state, `mask` being (..., 1, m)."""
    xp = array_namespace(k)
    for j in keys:
        seen = None if mask is None else mask[..., j]
        state = _combine(state, _accumulate(phi(k[..., j, :]), v[..., j, :], seen), xp)
    return state


@as_written
def _read(q: Array, state: _State, feature_map: Callable[[Array], Array | Features]) -> Array:
    """Linear attention from the state of the keys."""
    _validate.arrays(2, q=q, state=state.total)
    xp, shape = array_namespace(q), (*_validate.lead(q, state.total, state.total), q.shape[-2])
    if 0 in shape:  # Dask finds no maximum of no rows
        return xp.zeros((*shape, state.total.shape[-1] - 1), dtype=q.dtype, device=device(q))
    (q, base, total), ungroup = group_heads(q, state.base, state.total)
    return ungroup(_ratio(_State(multiply(_evaluate(feature_map, q).values, total), base), xp))


@as_written
def _linear_attention(
    q: Array,
    k: Array,
    v: Array,
    phi_q: Callable[[Array], Features],
    phi_k: Callable[[Array], Features],
    mask: Array | None,
    causal: bool,
) -> Array:
    """Linear attention with a map for queries and one for keys, all heads at once."""
    xp, n, m = array_namespace(q, k, v), q.shape[-2], k.shape[-2]
    lead = broadcast_lead(q, k, v, mask)
    out = xp.empty((*lead, n, v.shape[-1]), dtype=q.dtype, device=device(q))
    size, state = _sizes(q, k, v, phi_k)
    general = mask is not None and mask.shape[-2] != 1
    whole = tuple(slice(0, length) for length in lead)
    shift = m - n

    def visible(i: slice, j: slice) -> Array | None:
        seen = None
        if mask is not None:
            seen = mask[..., i, j] if general else mask[..., j]
        if causal:
            past = _past(i, j, shift, device(q), xp)
            seen = past if seen is None else seen & past
        return seen

    if not general:
        passed = blocks(0, max(0, shift) if causal else m, size)
        state = _fold(state, phi_k, k, v, mask, passed)
    for i in blocks(0, n, min(size, _CHUNK) if causal else size):
        phi_i = phi_q(q[..., i, :])
        if phi_i.values.shape[-1] != state.total.shape[-2]:
            raise ValueError(
                "`feature_map` must give queries and keys equally many features, got "
                f"{phi_i.values.shape[-1]} and {state.total.shape[-2]}."
            )
        done = _State(multiply(phi_i.values, state.total), state.base)
        # Keys read pair by pair: all that the queries may see, or those of their own chunk.
        stop = max(0, i.stop + shift) if causal else m
        start = 0 if general else max(0, i.start + shift) if causal else m
        for j in blocks(start, stop, size):
            phi_j, v_j = phi_k(k[..., j, :]), v[..., j, :]
            done = _combine(done, _attend_block(phi_i, phi_j, v_j, visible(i, j)), xp)
            if not general:
                seen = None if mask is None else mask[..., j]
                state = _combine(state, _accumulate(phi_j, v_j, seen), xp)
        out = put(out, (*whole, i, slice(0, v.shape[-1])), _ratio(done, xp))
    return out


def _sizes(q: Array, k: Array, v: Array, phi: Callable[[Array], Features]) -> tuple[int, _State]:
    """Tokens in a block, and the state before the first key."""
    xp = array_namespace(q)
    some = k if k.shape[-2] else q
    width = phi(some[..., : min(1, some.shape[-2]), :]).values.shape[-1]
    heads, lead = math.prod(broadcast_lead(q, k, v)), broadcast_lead(k, v)
    state = _State(
        xp.zeros((*lead, width, v.shape[-1] + 1), dtype=q.dtype, device=device(q)),
        xp.full((*lead, 1, 1), -math.inf, dtype=q.dtype, device=device(q)),
    )
    budget = math.prod(block_shape(q)) // max(1, heads * width)
    return max(16, min(budget, *block_shape(q))), state


def _accumulate(phi: Features, v: Array, seen: Array | None) -> _State:
    """Sum phi(k_j) [v_j, 1] over the keys of a block that are seen, (..., 1 or n = 1, m)."""
    xp = array_namespace(v)
    values, log_scale = phi
    v = _with_ones(v)
    if seen is not None:
        seen = xp.matrix_transpose(seen)  # (..., m, 1)
        values, v = xp.where(seen, values, 0.0), xp.where(seen, v, 0.0)
        log_scale = xp.where(seen[..., 0], log_scale, -math.inf)
    base = xp.max(log_scale, axis=-1, keepdims=True)
    weight = xp.exp(log_scale - _finite(base, xp))
    values = xp.matrix_transpose(values * weight[..., None])
    return _State(sum_of_products(values, v), base[..., None])


def _with_ones(v: Array) -> Array:
    """Values [v_j, 1], whose sums hold the normaliser."""
    xp = array_namespace(v)
    like = v[..., :1] if v.shape[-1] else xp.sum(v, axis=-1, keepdims=True)
    return xp.concat([v, xp.ones_like(like)], axis=-1)


def _attend_block(phi_q: Features, phi_k: Features, v: Array, visible: Array | None) -> _State:
    """Read a block of keys pair by pair, so that each query may see other keys."""
    xp = array_namespace(v)
    products = multiply(phi_q.values, xp.matrix_transpose(phi_k.values))
    log_scale = phi_k.log_scale[..., None, :]
    if visible is not None:
        products = xp.where(visible, products, 0.0)
        log_scale = xp.where(visible, log_scale, -math.inf)
    base = xp.max(log_scale, axis=-1, keepdims=True)
    v = _with_ones(v)
    weights = products * xp.exp(log_scale - _finite(base, xp))
    if visible is None:
        return _State(sum_of_products(weights, v), base)
    return _State(_sum_of_visible(weights, v, visible, signed=True), base)


def _combine(a: _State, b: _State, xp: Any) -> _State:
    base = xp.maximum(a.base, b.base)
    scale_a, scale_b = (xp.exp(x.base - _finite(base, xp)) for x in (a, b))
    return _State(scale_a * a.total + scale_b * b.total, base)


def _ratio(state: _State, xp: Any) -> Array:
    """Divide by the normaliser; 0 where no key was seen."""
    normaliser = xp.where(state.base == -math.inf, 1.0, state.total[..., -1:])
    return state.total[..., :-1] / normaliser


@as_written
def _products(x: Array, omega: Array) -> Array:
    """Products omega_s . x_i, shape (..., n, S)."""
    _validate.arrays(2, x=x)
    omega, _ = _validate.frequencies(omega, None, x)
    _validate.leading("x", x, "omega", omega)
    return multiply(x, array_namespace(x).matrix_transpose(omega))


def _square_norm(x: Array, given: Any) -> Array:
    """|x|^2 of the rows (..., n, d), or what is given in its place, shape (..., n)."""
    if given is None:
        return square_norm(x)
    given = _validate.per_head("square_norm", given, x)
    return array_namespace(x).broadcast_to(given[..., None], x.shape[:-1])


@as_written
def _exponential_features(exponent: Array, square_norm: Array) -> Features:
    """Features exp(exponent - square_norm / 2) over the root of their number."""
    xp = array_namespace(exponent)
    peak = xp.max(exponent, axis=-1, keepdims=True)
    values = xp.exp(exponent - peak) / _root(exponent)
    return Features(values, peak[..., 0] - square_norm / 2)


def _root(x: Array) -> Array:
    """Square root of the length of the last axis, in the dtype of `x`."""
    return constant(x.shape[-1], x) ** 0.5


@as_written
def _monomials(x: Array, degree: int) -> Array:
    r"""The monomials of a degree p, each times the root of its multinomial coefficient.

    One factor after another: :math:`p! / \alpha! = \prod_j j / r_j` if factor j is the r_j-th that
    equals it. The first j factors are then a feature of degree j, and as each index is spread
    evenly, it is between 1 and the result, up to a few factors: nothing overflows on the way.
    """
    xp, size = array_namespace(x), x.shape[-1]
    index, rank = _factors(size, degree)
    result = xp.ones_like(x[..., :1])
    for j in range(degree):
        root = np.sqrt((j + 1) / rank[:, j].astype(host_dtype(x)))
        factor = xp.take(x, xp.asarray(index[:, j], device=device(x)), axis=-1)
        result = result * (constant(root, x) * factor)
    return result


def _factors(d: int, degree: int) -> tuple[Any, Any]:
    """Indices (F, p) of the factors of each monomial, and how many have been equal so far."""
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


def _check_size(pool: int, d: int, degree: int) -> None:
    """Check how many features there are, choices of `degree` from the pool, and their factors."""
    _validate.at_most("degree", degree, _HIGHEST, "the highest of these features")
    count = math.comb(pool, degree)
    if count > _LARGEST:
        raise ValueError(
            f"`degree` must give at most {_LARGEST:,} features, got degree {degree} for vectors "
            f"of length {d}: {_validate.number(count, ',')} features."
        )
    if count * degree > _FACTORS:
        raise ValueError(
            f"`degree` must give features of at most {_FACTORS:,} factors in all, got degree "
            f"{degree} for vectors of length {d}: {_validate.number(count, ',')} features."
        )


def _evaluate(feature_map: Callable[[Array], Array | Features], x: Array) -> Features:
    """Features of `x`, checked."""
    xp, phi = array_namespace(x), feature_map(x)
    values: Any = phi[0] if isinstance(phi, Features) else phi
    log_scale: Any = phi[1] if isinstance(phi, Features) else x[..., 0]
    for name, y, ndim, rule in (
        ("feature_map(x)", values, x.ndim, "(..., n, F) with F >= 1"),
        ("feature_map(x).log_scale", log_scale, x.ndim - 1, "(..., n)"),
    ):
        _validate.is_array(name, y)
        _validate.same_home(name, y, "x", x)
        if y.dtype != x.dtype:
            raise TypeError(f"`{name}` must have the dtype of x, {x.dtype}, got {y.dtype}.")
        got, outer = tuple(y.shape), tuple(x.shape[:-1])
        if len(got) != ndim or got[: len(outer)] != outer or got[len(outer) :] == (0,):
            raise ValueError(
                f"`{name}` must have shape {rule} for x of shape {tuple(x.shape)}, got {got}."
            )
    if isinstance(phi, Features):
        return phi
    # Scaled by its largest feature, a row's products neither overflow nor underflow.
    peak = xp.max(xp.abs(values), axis=-1)
    peak = xp.where(peak == 0, 1.0, peak)
    return Features(values / peak[..., None], xp.log(peak))
