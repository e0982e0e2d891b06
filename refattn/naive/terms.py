r"""Terms of the formulas: kernels, sums over the keys that a query sees, and their logarithms."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from ..arrays import checks, qkv
from ..arrays.heads import broadcast_lead
from ..arrays.library import Array, array_namespace, as_written, constant, device

_P = ParamSpec("_P")
_T = TypeVar("_T")

_running: ContextVar[Any] = ContextVar("running", default=None)


class _Library:
    """The functions of the array library of the formula that runs."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_running.get(), name)


xp: Any = _Library()


def of_library(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorate a function of arrays to run with the library of the first as `xp`."""

    name = next(iter(inspect.signature(function).parameters))

    @as_written
    @wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        first: Any = args[0] if args else kwargs.get(name)
        checks.is_array(name, first)
        before = _running.set(array_namespace(first))
        try:
            return function(*args, **kwargs)
        finally:
            _running.reset(before)

    return run


@of_library
def visible(
    q: Array,
    k: Array,
    *,
    mask: Array | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
) -> Array:
    r"""Return which keys each query sees.

    .. math:: i + m - n - \mathrm{left} \le j \le i + m - n + \mathrm{right}

    in a window, whose right end is 0 if `causal`. The last query is aligned with the last key.

    Parameters
    ----------
    q, k, mask, causal, window
        As in `softmax_attention`.

    Returns
    -------
    array of bool, shape (..., n, m)
        True where the query sees the key.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import naive
    >>> naive.visible(np.zeros((2, 1)), np.zeros((3, 1)), causal=True)
    array([[ True,  True, False],
           [ True,  True,  True]])
    """
    ahead = offsets(q, k)
    far = sum(ahead.shape)  # beyond all keys
    left, right = (None if x is None or x > far else x for x in qkv.window(window))
    seen = xp.ones(ahead.shape, dtype=xp.bool, device=device(q))
    if mask is not None:
        seen = seen & mask
    if causal:
        seen = seen & (ahead <= 0)
    if left is not None:
        seen = seen & (ahead >= -left)
    if right is not None:
        seen = seen & (ahead <= right)
    return seen


def average(scores: Array, v: Array, seen: Array) -> Array:
    """Mean of the values of the keys seen, with weights e^score; 0 if there are none."""
    return weighted_sum(softmax(hide(scores, seen)), v, seen)


def offsets(q: Array, k: Array) -> Array:
    """How far keys are ahead of queries, j - (i + m - n), shape (n, m)."""
    n, m = q.shape[-2], k.shape[-2]
    return integers(0, m, q) - integers(m - n, m, q)[:, None]


def weighted_sum(weights: Array, v: Array, seen: Array) -> Array:
    """Sum of w_ij v_j over the keys j that query i sees, whatever the others hold."""
    terms = weights[..., None, :] * xp.matrix_transpose(v)[..., None, :, :]
    return xp.sum(xp.where(seen[..., None, :], terms, 0.0), axis=-1)


def softmax(scores: Array, sink: Array | None = None) -> Array:
    """e^score over the sum of these along the last axis, that of a sink included; 0 of nothing."""
    log_total = log_sum_exp(scores)
    if sink is not None:
        log_total = xp.logaddexp(log_total, sink)
    return xp.exp(scores - finite(log_total))


def log_sum_exp(x: Array) -> Array:
    """Log of the sum of e^x along the last axis, which is kept; -inf of nothing."""
    nothing = xp.full((*x.shape[:-1], 1), -math.inf, dtype=x.dtype, device=device(x))
    top = finite(xp.max(xp.concat([x, nothing], axis=-1), axis=-1, keepdims=True))
    return top + log(xp.sum(xp.exp(x - top), axis=-1, keepdims=True))


def log(x: Array) -> Array:
    """Logarithm, of 0 too."""
    zero = x == 0
    return xp.where(zero, -math.inf, xp.log(xp.where(zero, 1.0, x)))


def hide(scores: Array, seen: Array) -> Array:
    """Scores of the keys seen, -inf of the others."""
    return xp.where(seen, scores, -math.inf)


def finite(x: Array) -> Array:
    """0 in place of -inf, so that it may be subtracted from -inf."""
    return xp.where(x == -math.inf, 0.0, x)


def log_kernel(q: Array, k: Array, omega: Array, log_weight: Array) -> Array:
    """Log of sum_s w_is xi(q_i, omega_s) xi(k_j, omega_s), without the factor e^{-|q_i|^2/2}.

    `log_weight` has shape (..., n or 1, S).
    """
    log_q = products(q, omega) + log_weight
    terms = log_q[..., :, None, :] + products(k, omega)[..., None, :, :]
    return log_sum_exp(terms)[..., 0] - half_square_norm(k)


def chunk_sizes(member: Array, like: Array) -> Array:
    """Number of rows in each chunk, (..., 1, C)."""
    return xp.sum(xp.astype(member, like.dtype), axis=-1)[..., None, :]


def chunk_means(x: Array, member: Array) -> Array:
    """Means of the rows in each chunk, (..., C, d), of members (..., C, n); 0 of none."""
    size = xp.matrix_transpose(chunk_sizes(member, x))
    return weighted_sum(xp.astype(member, x.dtype) / xp.where(size == 0, 1.0, size), x, member)


def kernel_coordinates(x: Array, scale: float | None) -> Array:
    """Queries or keys times the root of the scale, 1 / sqrt(d) by default."""
    root = constant(x.shape[-1], x) ** -0.25 if scale is None else constant(scale, x) ** 0.5
    return root * x


def products(x: Array, y: Array) -> Array:
    """x_i . y_j, shape (..., n, m)."""
    return x @ xp.matrix_transpose(y)


def half_square_norm(x: Array) -> Array:
    """|x_j|^2 / 2 as a row, (..., 1, m); nan where it overflows, as -inf would hide a key."""
    half = xp.sum(x * x, axis=-1)[..., None, :] / 2
    return half + 0.0 * half


def integers(start: int, stop: int, like: Array) -> Array:
    return xp.arange(start, stop, dtype=xp.int32, device=device(like))


def ratio(kernel: Array, log_scale: Array, v: Array, seen: Array) -> Array:
    """Mean of the values of the keys seen, with weights kernel e^log_scale of either sign."""
    weights = kernel * softmax(hide(log_scale, seen))
    total = xp.sum(xp.where(seen, weights, 0.0), axis=-1, keepdims=True)
    some = xp.any(seen, axis=-1, keepdims=True)
    return weighted_sum(weights, v, seen) / xp.where(some, total, 1.0)


def distances(q: Array, k: Array) -> Array:
    """|i + m - n - j|, in the dtype of the queries."""
    return xp.astype(xp.abs(offsets(q, k)), q.dtype)


def by_lag(bias: Array, q: Array, k: Array) -> Array:
    """bias_(n - 1 + j - i) of a bias (..., 1, n + m - 1), shape (..., n, m)."""
    n, m = q.shape[-2], k.shape[-2]
    lags = integers(0, m, q) + (n - 1 - integers(0, n, q))[:, None]
    pairs = xp.take(bias, xp.reshape(lags, (-1,)), axis=-1)
    return xp.reshape(pairs, (*bias.shape[:-2], n, m))


def present(k: Array, mask: Array | None) -> Array:
    """Keys that all queries see, (..., 1, m)."""
    seen = xp.ones((1, k.shape[-2]), dtype=xp.bool, device=device(k))
    return seen if mask is None else seen & mask


def one_hot(indices: Array, k: Array) -> Array:
    """Whether key j is the one of an index, (..., 1) to (..., m)."""
    return indices == integers(0, k.shape[-2], k)


def beside(a: Array, b: Array) -> Array:
    """Join along the last axis what has other leading axes."""
    lead = broadcast_lead(a, b)
    return xp.concat([xp.broadcast_to(x, (*lead, *x.shape[-2:])) for x in (a, b)], axis=-1)
