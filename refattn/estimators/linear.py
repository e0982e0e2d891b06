"""Attention that is linear in features of queries and keys."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from ..arrays import checks, qkv
from ..arrays.arithmetic import Workspace, clip, multiply
from ..arrays.heads import group_heads
from ..arrays.library import Array, as_written, fused, is_numpy_array, own_copy, untraced
from ..engine import signed
from ..engine.attend_back import zeros_of
from ..engine.hops import Keys
from ..engine.lags import attend_by_lags
from ..features import Features, elu, elu_features, polynomial_features, relu, relu_features
from ..numbers.primitives import primitive
from ..numbers.tape import Traced, fixed, given, pull_to_steps
from ..typing import ArrayT, Coupling
from .inputs import Options, group_lags, open_partials
from .rfa import prepare_random_features

UserMap = Callable[[Array], Array | Features]

# Maps that may be given some of the heads, as they are for trusted arrays.
_OF_ROWS = (elu_features, relu_features, polynomial_features)
_ELEMENTWISE = ((elu_features, elu), (relu_features, relu))


@as_written
def linear_attention(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    *,
    feature_map: Callable[[Array], Array | Features] = elu_features,
    bias: Array | None = None,
    mask: Array | None = None,
    causal: bool = False,
) -> ArrayT:
    r"""Compute attention whose kernel is the dot product of features (linear attention).

    .. math::
        \mathrm{out}_i = \frac{\phi(q_i) \cdot \sum_j \phi(k_j) \, v_j}
                              {\phi(q_i) \cdot \sum_j \phi(k_j)}

    Katharopoulos et al., arXiv:2006.16236; Linear attention post, kernel_attn, and Random features
    post, KernelizedAttention (see `refattn.naive`). Linear in n and m.

    Parameters
    ----------
    q, k, v
        Queries (..., n, d), keys (..., m, d) and values (..., m, d_v), float32 or float64; see
        `attend` for broadcasting and grouped heads. No scale is applied: scale `q` and `k` first
        if the map needs it.
    feature_map : function, default elu_features
        Maps vectors (..., n, d) to features (..., n, F), or to `Features`. With grouped heads it
        is given arrays with one more axis, (..., key heads, queries per key head or 1, n, d).
    bias : array, shape (..., n + m - 1), dtype of `q`, optional
        Bias by lag, as in `random_feature_attention`: exp(bias[n - 1 + j - i]) multiplies the
        weight of query i and key j. A weight that is below the smallest number without its bias
        is 0 with it.
    mask : array of bool, broadcasting to (..., n, m), optional
        True where the query attends to the key. A mask that is the same for all queries keeps
        the cost linear; any other costs O(n m F), and is an error with `bias`.
    causal : bool, default False
        Query i sees key j only if j <= i + m - n. The cost stays linear.

    Returns
    -------
    array, shape (..., n, d_v)
        Same namespace, dtype and device as `q`. Rows that see no key are 0. Nothing is added to
        the normaliser: if it is 0, the row is nan or infinite. Sums of values times features must
        be representable; with features of both signs, an infinite value makes its column infinite
        or nan, in the rows that see it.

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
    arrays = (q, k, v)
    q, keys, xp, ungroup = prepare_linear(q, k, v, feature_map, mask, causal)
    features = map_features(feature_map, keys.k if keys.k.shape[-2] else q, xp)
    if bias is not None:
        lags = group_lags(bias, *arrays, mask)
        return ungroup(attend_by_lags(q, keys, lags, features, causal, xp))
    return ungroup(signed.linear_attention(q, keys, features, causal))


@as_written
def relu_feature_attention(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    *,
    omega: Array | None = None,
    num_features: int | None = None,
    kernel_epsilon: float = 1e-3,
    coupling: Coupling = "iid",
    rng: Any = None,
    scale: float | None = None,
    bias: Array | None = None,
    mask: Array | None = None,
    causal: bool = False,
) -> ArrayT:
    r"""Compute linear attention with ReLU features of a random projection (Performer-ReLU).

    .. math::
        \mathrm{out}_i = \frac{\phi(q_i) \cdot \sum_j \phi(k_j) \, v_j}
                              {\phi(q_i) \cdot \sum_j \phi(k_j)}, \qquad
        \phi_s(x) = \max(\omega_s \cdot x, 0) + \epsilon

    Choromanski et al., arXiv:2009.14794, where it is generalised attention with f = ReLU, and
    epsilon is 0; it is 0.001 in the authors' code and in performer-pytorch. This is no estimate of
    softmax attention: with many features its kernel is that of arc-cosines. Linear in n and m.

    Parameters
    ----------
    q, k, v, omega, num_features, rng, scale, bias, mask, causal
        As in `random_feature_attention`. Those packages divide `q` and `k` by d^{1/4}, as the
        default scale does, and draw with the coupling ``"orthogonal"``.
    kernel_epsilon : float, default 0.001
        What is added to each feature, at least 0. With 0 a row may be nan: that of a query which
        has no positive feature in common with its keys.
    coupling : str, default "iid"
        How drawn frequencies depend on each other; see `sampling.draw`.

    Returns
    -------
    array, shape (..., n, d_v)
        Same namespace, dtype and device as `q`. Rows that see no key are 0.

    Raises
    ------
    TypeError, ValueError
        As in `random_feature_attention`, and if `kernel_epsilon` is negative.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import relu_feature_attention
    >>> q, k, v = np.array([[1.0]]), np.array([[-1.0], [2.0]]), np.array([[0.0], [1.0]])
    >>> relu_feature_attention(q, k, v, omega=np.ones((1, 1)), kernel_epsilon=1.0)
    array([[0.75]])
    """
    epsilon = checks.at_least_zero("kernel_epsilon", kernel_epsilon, like=q)
    options = Options(
        scale, mask, causal, omega, num_features=num_features, coupling=coupling, rng=rng
    )
    inputs = prepare_random_features(q, k, v, options)
    projection, xp = inputs.samples.omega, inputs.xp

    def phi(x: Array, arrays: tuple[Array, ...], _: Workspace | None) -> Features:
        own = x.__array_namespace__() if isinstance(x, Traced) else untraced(xp)
        z = multiply(x, own.matrix_transpose(arrays[0]))
        return _scale_features(clip(z, 0.0, math.inf, own) + epsilon, own)

    features = signed.Signed(phi, phi, projection.shape[-2], xp=xp, arrays=(projection,))
    if bias is not None:
        lags = group_lags(bias, q, k, v, mask)
        return inputs.ungroup(attend_by_lags(inputs.q, inputs.keys, lags, features, causal, xp))
    return inputs.ungroup(signed.linear_attention(inputs.q, inputs.keys, features, causal))


def prepare_linear(
    q: Array, k: Array, v: Array, feature_map: UserMap, mask: Array | None, causal: bool
) -> tuple[Array, Keys, Any, Callable[..., Array]]:
    """Check arguments of `linear_attention`; return them in groups of heads, and the namespace."""
    xp, _ = qkv.check(q, k, v, mask=mask, causal=causal)
    checks.function("feature_map", feature_map)
    (q, k, v, mask), ungroup = group_heads(q, k, v, qkv.key_rows(mask, k))
    return q, Keys(k, v, mask), xp, ungroup


def map_features(feature_map: UserMap, like: Array, xp: Any) -> signed.Signed:
    """Make features of a map, of which a row like those of `like` shows how many there are."""

    row, plain = untraced(like[..., : min(1, like.shape[-2]), :]), untraced(xp)
    of_row = feature_map(row)
    width = check_features(of_row, row, plain).values.shape[-1]
    as_it_is = isinstance(of_row, Features) and not callable(getattr(feature_map, "vjp", None))
    trusted = next((fast for map, fast in _ELEMENTWISE if map is feature_map), None)

    def phi(x: Array, _: tuple[Array, ...], memory: Workspace | None) -> Features:
        if isinstance(x, Traced):
            found: Any = feature_map(x) if as_it_is else map_tokens(x, feature_map, plain)
            return Features(*found)
        if trusted is None:
            return check_features(feature_map(x), x, plain)
        return _scale_features(trusted(x, plain, memory=memory), plain)

    def phi_q(x: Array, _: tuple[Array, ...], memory: Workspace | None) -> Features:
        values, log_scale = phi(x, _, memory)
        # A map may write the features of keys where it has written these.
        return Features(values if trusted else 1.0 * values, log_scale)

    # Whether a map may be given some of the heads.
    splits = any(map is open_partials(feature_map)[0] for map, _ in _ELEMENTWISE)
    return signed.Signed(phi_q, phi, width, xp=xp, splits=splits)


@primitive
def map_tokens(x: Array, feature_map: UserMap, xp: Any) -> Features:
    """Map tokens by any map, in one step of a tape; the map may write to its memory again."""
    values, log_scale = check_features(feature_map(x), x, xp)
    trusted = open_partials(feature_map)[0] in _OF_ROWS
    return Features(values if trusted else own_copy(values, xp), log_scale)


@map_tokens.pullback
def _pull_map(
    features: Features, cotangents: Any, x: Array, feature_map: UserMap, xp: Any
) -> dict[str, Array]:
    """Pull features back by the pullback that the map has, or by a tape."""
    (d_values, d_log), traced = cotangents, given(x, light=True)
    pulled = getattr(feature_map, "vjp", None)
    mapped, pull = pulled(x) if callable(pulled) else (feature_map(traced), None)

    def pull_back(*g: Array | None) -> Array:
        if pull is None:
            found = pull_to_steps(mapped, g if isinstance(mapped, Features) else g[0], [traced])
            return found.get(traced.step, zeros_of(x))
        return _check_shape(pull(*g), x)

    if isinstance(mapped, Features):
        return {"x": pull_back(d_values, d_log)}
    # In halves: the scale of a row may be so small that there is no inverse of it.
    half = xp.exp(-features.log_scale / 2)[..., None]
    if open_partials(feature_map)[0] not in _OF_ROWS:  # other rows may come of this one
        return {"x": pull_back(d_values * half * half)}
    return {"x": half * pull_back(half * d_values)}


def _check_shape(d_x: Any, x: Array) -> Array:
    """Check that the result of a user's pullback has the shape of x."""
    checks.is_array("feature_map.vjp", d_x)
    if d_x.shape[-2:] != x.shape[-2:]:  # of as many heads as the output has
        raise ValueError(
            "`feature_map.vjp` must give cotangents of the shape of x, (..., "
            f"{x.shape[-2]}, {x.shape[-1]}), got {tuple(d_x.shape)}."
        )
    return d_x


@as_written
def check_features(phi: Any, x: Array, xp: Any) -> Features:
    """Check the result of a map of `x`, and scale its rows."""
    values: Any = phi[0] if isinstance(phi, Features) else phi
    log_scale: Any = phi[1] if isinstance(phi, Features) else x[..., 0]
    for name, y, ndim, rule in (
        ("feature_map(x)", values, x.ndim, "(..., n, F) with F >= 1"),
        ("feature_map(x).log_scale", log_scale, x.ndim - 1, "(..., n)"),
    ):
        checks.is_array(name, y)
        checks.same_home(name, y, "x", x)
        if y.dtype != x.dtype:
            raise TypeError(f"`{name}` must have the dtype of x, {x.dtype}, got {y.dtype}.")
        got, outer = tuple(y.shape), tuple(x.shape[:-1])
        if len(got) != ndim or got[: len(outer)] != outer or got[len(outer) :] == (0,):
            raise ValueError(
                f"`{name}` must have shape {rule} for x of shape {tuple(x.shape)}, got {got}."
            )
    if isinstance(phi, Features):
        return phi
    if _are_ordinary(values):
        return Features(values, np.zeros_like(values[..., 0]))  # no row need be looked at
    return _scale_rows(values, xp)


def _scale_features(values: Array, xp: Any) -> Features:
    """Scale rows of trusted features, or none where all are positive and of ordinary size."""
    return Features(values, None) if _are_ordinary(values) else _scale_rows(values, xp)


def _scale_rows(values: Array, xp: Any) -> Features:
    """Scale rows by their largest features: products neither overflow nor underflow.

    Rows of ordinary size are as they are, on NumPy.
    """
    peak = _largest(fixed(values), xp)  # any scale cancels
    if is_numpy_array(untraced(values)):
        most = _most_of_ordinary(values.dtype)
        peak = np.where((peak >= 1 / most) & (peak <= most), 1.0, peak)
    return Features(values / peak[..., None], xp.log(peak))


@fused
def _largest(values: Array, xp: Any) -> Array:
    """Find the largest size in each row, 1 where all are 0."""
    peak = xp.max(xp.abs(values), axis=-1)
    return xp.where(peak == 0, 1.0, peak)


def _are_ordinary(values: Array) -> bool:
    """Say whether all features are positive and of ordinary size, on NumPy."""
    values = untraced(values)
    if not is_numpy_array(values) or not values.size:
        return False
    most = _most_of_ordinary(values.dtype)
    return bool(values.min() >= 1 / most and values.max() <= most)


@cache
def _most_of_ordinary(dtype: Any) -> Any:
    return np.exp(np.log(np.finfo(dtype).max) / 8)
