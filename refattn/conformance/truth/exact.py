r"""The estimators in arbitrary precision: each function is one equation, written for reading.

Every argument is taken as the number it is, digit for digit, and every operation is carried out
with `dps` decimal digits by mpmath, whose exponents do not overflow. Nothing is stabilised, so
that nothing can be stabilised wrongly. Slow: for tens of queries and keys.

Arrays are NumPy arrays of one head, (n, d), (m, d), (m, d_v), and results are arrays of mpmath
numbers; `each_head` maps over heads. `visible` is a boolean array broadcasting to (n, m).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from ...arrays.library import Floats

try:
    import mpmath
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "refattn.conformance.truth.exact needs `pip install 'refattn[vectors]'`", name=error.name
    ) from None

__all__ = [
    "attend",
    "cap",
    "causal",
    "context",
    "coreset",
    "coreset_attention",
    "covariance",
    "each_head",
    "elu_plus_one",
    "eva_attention",
    "feature_map",
    "gradients",
    "heads",
    "kernel_estimate",
    "linear_attention",
    "linear_randomized_attention",
    "local_random_feature_attention",
    "log_kernel_estimate",
    "log_positive",
    "mean",
    "numbers",
    "random_feature_attention",
    "randomized_attention",
    "root",
    "sampled_key_attention",
    "second_order_attention",
    "softmax_attention",
    "weighted_mean",
]


@cache
def context(dps: int = 50) -> Any:
    """Return the mpmath context of `dps` decimal digits; its numbers keep to it.

    Examples
    --------
    >>> from refattn.conformance.truth import exact
    >>> print(exact.context(30).exp(1))
    2.71828182845904523536028747135
    """
    mp = mpmath.mp.clone()
    mp.dps = dps
    slopes = {
        "exp": lambda x, y: y,
        "log": lambda x, y: 1 / x,
        "cos": lambda x, y: -mp.sin(x),
        "sin": lambda x, y: mp.cos(x),
        "tanh": lambda x, y: mp.cosh(x) ** -2,  # 1 - y^2 has no digits left where y is near 1
    }
    for name, slope in slopes.items():
        setattr(mp, name, _of_both(getattr(mp, name), slope))
    return mp


def _of_both(function: Callable[[Any], Any], slope: Callable[[Any, Any], Any]) -> Any:
    """A function of numbers, and of dual ones too."""

    def of_either(x: Any) -> Any:
        if not isinstance(x, _Dual):
            return function(x)
        value = function(x.value)
        return _Dual(value, _times(slope(x.value, value), x.slope))

    return of_either


class _Dual:
    """A number with its derivatives with respect to those that it depends on: rules of calculus."""

    def __init__(self, value: Any, slope: dict[int, Any]) -> None:
        self.value, self.slope = value, slope

    def __add__(self, other: Any) -> Any:
        if isinstance(other, np.ndarray):
            return NotImplemented  # which adds to each of its elements
        y, dy = _parts(other)
        return _Dual(self.value + y, _summed(self.slope, dy))

    def __mul__(self, other: Any) -> Any:
        if isinstance(other, np.ndarray):
            return NotImplemented
        y, dy = _parts(other)
        return _Dual(self.value * y, _summed(_times(y, self.slope), _times(self.value, dy)))

    def __truediv__(self, other: Any) -> Any:
        if isinstance(other, np.ndarray):
            return NotImplemented
        y, dy = _parts(other)
        ratio = self.value / y
        slope = _summed(self.slope, _times(-ratio, dy))
        return _Dual(ratio, {i: x / y for i, x in slope.items()})

    def __rtruediv__(self, other: Any) -> Any:
        ratio = other / self.value
        return _Dual(ratio, _times(-ratio / self.value, self.slope))

    def __neg__(self) -> _Dual:
        return _Dual(-self.value, _times(-1, self.slope))

    def __sub__(self, other: Any) -> Any:
        return NotImplemented if isinstance(other, np.ndarray) else self + -other

    def __rsub__(self, other: Any) -> Any:
        return -self + other

    def __gt__(self, other: Any) -> bool:
        return bool(self.value > _parts(other)[0])

    __radd__, __rmul__ = __add__, __mul__


def _parts(x: Any) -> tuple[Any, dict[int, Any]]:
    return (x.value, x.slope) if isinstance(x, _Dual) else (x, {})


def _times(factor: Any, slope: dict[int, Any]) -> dict[int, Any]:
    return {i: factor * x for i, x in slope.items()}


def _summed(x: dict[int, Any], y: dict[int, Any]) -> dict[int, Any]:
    return x | {i: x[i] + e if i in x else e for i, e in y.items()}


def gradients(
    function: Callable[..., Floats], cotangent: Any, *, dps: int = 50, **arrays: Any
) -> dict[str, Floats]:
    r"""Pull a cotangent back through a function of this module, in dual numbers.

    .. math:: \bar x = \sum_i \bar g_i \, \partial f_i / \partial x

    for each of the arrays, which the function is called with. Each number is followed by its
    derivatives with respect to all others of all arrays, forth, by the rules for sums, products,
    quotients and elementary functions: no formula of a pullback is used.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn.conformance.truth import exact
    >>> q, k, v = np.array([[1.0]]), np.array([[0.0], [0.0]]), np.array([[0.0], [4.0]])
    >>> found = exact.gradients(exact.softmax_attention, np.ones((1, 1)), q=q, k=k, v=v)
    >>> {name: [float(e) for e in x.ravel()] for name, x in found.items()}
    {'q': [0.0], 'k': [-1.0, 1.0], 'v': [0.5, 0.5]}
    """
    given, duals, first = {name: numbers(x, dps=dps) for name, x in arrays.items()}, {}, 0
    for name, x in given.items():
        own = np.empty(x.size, dtype=object)
        own[:] = [_Dual(e, {i: 1}) for i, e in enumerate(x.ravel(), first)]
        duals[name], first = own.reshape(x.shape), first + x.size
    pairs = zip(numbers(cotangent, dps=dps).ravel(), function(**duals).ravel(), strict=True)
    total: dict[int, Any] = {}
    zero = context(dps).mpf(0)
    for g, y in pairs:
        total = _summed(total, _times(g, _parts(y)[1]))
    return {
        name: _map(lambda e: total.get(next(iter(e.slope)), zero), x) for name, x in duals.items()
    }


def numbers(x: Any, *, dps: int = 50) -> Floats:
    """Turn floats, of longdouble too, into numbers of `dps` digits with the same value.

    Examples
    --------
    >>> from refattn.conformance.truth import exact
    >>> float(exact.numbers([0.1])[0])
    0.1
    """
    mp, x = context(dps), np.asarray(x)
    if x.dtype == np.longdouble and x.dtype != np.float64:  # they are one on some machines
        high = x.astype(np.float64)
        # Where the value is infinite there is no rest.
        rest = np.where(np.isfinite(high), x - np.where(np.isfinite(high), high, 0), 0)
        return numbers(high, dps=dps) + numbers(rest.astype(np.float64), dps=dps)
    values = x.ravel() if x.dtype == object else x.ravel().astype(np.float64)
    converted = np.empty(x.size, dtype=object)
    converted[:] = [
        e if isinstance(e, _Dual) else mp.mpf(e if x.dtype == object else float(e)) for e in values
    ]
    return converted.reshape(x.shape)


def _map(function: Callable[[Any], Any], x: Floats) -> Floats:
    out = np.empty(x.size, dtype=object)
    out[:] = [function(e) for e in x.ravel()]
    return out.reshape(x.shape)


def causal(n: int, m: int) -> Floats:
    """Query i sees key j where j <= i + m - n: the last query sees every key.

    Examples
    --------
    >>> from refattn.conformance.truth import exact
    >>> exact.causal(2, 3).astype(int)
    array([[1, 1, 0],
           [1, 1, 1]])
    """
    return np.tri(n, m, m - n, dtype=bool)


def heads(ndims: dict[str, int], **arrays: Any) -> list[dict[str, Any]]:
    """The arrays of each head, as `each_head` takes them.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn.conformance.truth import exact
    >>> [x["k"].tolist() for x in exact.heads({"q": 1, "k": 1}, q=np.ones((2, 1)), k=np.ones(1))]
    [[1.0], [1.0]]
    """
    batched = {name for name, x in arrays.items() if np.ndim(x) > ndims.get(name, np.inf)}
    count = max((len(arrays[name]) for name in batched), default=1)
    return [
        {name: x[h // (count // len(x))] if name in batched else x for name, x in arrays.items()}
        for h in range(count)
    ]


def each_head(function: Callable[..., Floats], ndims: dict[str, int], **arrays: Any) -> Floats:
    """Apply `function` to each head and stack: of H heads, h uses slice h // (H / G) of G.

    `ndims` says how many axes an array of one head has; an array may have one more, of length H
    or a divisor.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn.conformance.truth import exact
    >>> q, k = np.zeros((4, 1)), np.array([[5], [7]])
    >>> exact.each_head(lambda q, k: q + k, {"q": 1, "k": 1}, q=q, k=k)[:, 0]
    array([5., 5., 7., 7.])
    """
    found = [function(**arguments) for arguments in heads(ndims, **arrays)]
    stacked = any(np.ndim(x) > ndims.get(name, np.inf) for name, x in arrays.items())
    return np.stack(found) if stacked else found[0]


def weighted_mean(
    scores: Floats,
    v: Floats,
    visible: Any = True,
    sink: Any = None,
    dropout: Any = None,
    *,
    dps: int = 50,
) -> tuple[Floats, Floats]:
    """Mean of v_j with weights exp(scores_ij), and the log of their sum: reference 003, softmax.

    A sink is the score of one more value, 0. Factors of dropout are on the weights above, not on
    those in the sum below. A query that sees nothing has mean 0 and log -inf.
    """
    mp, (n, m) = context(dps), scores.shape
    visible = np.broadcast_to(visible, (n, m))
    factor = None if dropout is None else numbers(np.broadcast_to(dropout, (n, m)), dps=dps)
    out = np.full((n, v.shape[-1]), mp.mpf(0), dtype=object)
    lse = np.full(n, -mp.inf, dtype=object)
    for i in range(n):
        seen = [j for j in range(m) if visible[i, j]]
        weights = [mp.exp(scores[i, j]) for j in seen]
        total = sum(weights) + (0 if sink is None else mp.exp(sink))
        if factor is not None:
            weights = [w * factor[i, j] for w, j in zip(weights, seen, strict=True)]
        if seen or sink is not None:
            # Arrays first: a number would take the text of an array before it gives way to it.
            out[i] = out[i] + sum(v[j] * w for w, j in zip(weights, seen, strict=True)) / total
            lse[i] = mp.log(total)
    return out, lse


def attend(
    q: Any,
    k: Any,
    v: Any,
    bias: Any = 0.0,
    visible: Any = True,
    scale: Any = 1,
    *,
    softcap: float | None = None,
    sink: Any = None,
    dropout: Any = None,
    dps: int = 50,
) -> tuple[Floats, Floats]:
    """Softmax attention and its log normaliser: reference 003.

    With a bias, a cap, a sink and factors of dropout.
    """
    scores = (numbers(q, dps=dps) * scale) @ numbers(k, dps=dps).T
    scores = cap(scores, softcap, dps=dps) + numbers(bias, dps=dps)
    sink = None if sink is None else numbers(sink, dps=dps)[()]
    return weighted_mean(scores, numbers(v, dps=dps), visible, sink, dropout, dps=dps)


def cap(scores: Floats, softcap: float | None, *, dps: int = 50) -> Floats:
    """Evaluate c tanh(s / c), or s itself without a cap c.

    Examples
    --------
    >>> from refattn.conformance.truth import exact
    >>> [float(x) for x in exact.cap(exact.numbers([0.0, 1e9]), 2.0)]
    [0.0, 2.0]
    """
    if softcap is None:
        return scores
    mp, (most,) = context(dps), numbers(np.atleast_1d(softcap), dps=dps)
    if not most > 0:
        raise ValueError(f"`softcap` must be positive, got {softcap!r}.")
    return _map(lambda s: most * mp.tanh(s / most), scores)


def root(scale: float | None, d: int, *, dps: int = 50) -> Any:
    """Square root of the scale, 1/sqrt(d) by default: the factor of kernel coordinates."""
    mp = context(dps)
    return mp.sqrt(1 / mp.sqrt(d) if scale is None else mp.mpf(scale))


def softmax_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    bias: Any = 0.0,
    sink: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout: Any = None,
    visible: Any = True,
    dps: int = 50,
) -> Floats:
    """Softmax attention: reference 000, Attention; reference 003, softmax attention.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn.conformance.truth import exact
    >>> q, k, v = np.array([[1.0]]), np.array([[0.0], [1.0]]), np.array([[0.0], [1.0]])
    >>> float(exact.softmax_attention(q, k, v)[0, 0])  # e / (1 + e)
    0.7310585786300049
    """
    options = {"softcap": softcap, "sink": sink, "dropout": dropout, "dps": dps}
    factor = root(scale, q.shape[-1], dps=dps) ** 2
    return attend(q, k, v, bias, visible, factor, **options)[0]


def log_positive(x: Floats, omega: Floats) -> Floats:
    """Log of the positive feature xi(x_i, omega_s): reference 002, eq. (9), for exact numbers."""
    return np.asarray(x @ omega.T - (x * x).sum(-1)[:, None] / 2)


def log_kernel_estimate(
    q: Any, k: Any, omega: Any, log_weight: Any = 0.0, *, dps: int = 50
) -> Floats:
    """Log of sum_s w_s xi(q_i, omega_s) xi(k_j, omega_s), without the factor exp(-|q_i|^2/2)."""
    mp, weight = context(dps), numbers(np.broadcast_to(log_weight, omega.shape[:1]), dps=dps)
    q, k, omega = (numbers(x, dps=dps) for x in (q, k, omega))
    a, b = q @ omega.T + weight, log_positive(k, omega)
    return np.array(
        [[mp.log(sum(mp.exp(x) for x in a_i + b_j)) for b_j in b] for a_i in a], dtype=object
    )


def feature_map(x: Floats, omega: Floats, features: str, *, dps: int = 50) -> Floats:
    """Feature maps (n, F): reference 001, z_positive and z_sin/cos; reference 002, (8) and (9)."""
    mp, half = context(dps), (x * x).sum(-1)[:, None] / 2
    product = x @ omega.T
    if features == "positive":
        return _map(mp.exp, product - half)
    if features == "hyperbolic":
        both = np.concatenate([product, -product], axis=1)
        return np.asarray(_map(mp.exp, both - half) / mp.sqrt(2))
    if features == "trigonometric":
        waves = np.concatenate([_map(mp.cos, product), _map(mp.sin, product)], axis=1)
        return np.asarray(_map(mp.exp, half) * waves)
    raise ValueError(f"`features` must be positive, hyperbolic or trigonometric, got {features!r}.")


def _kernel_matrix(
    x: Any, y: Any, omega: Any, log_weight: Any, features: str, root: Any, dps: int
) -> Floats:
    """(1/S) sum_s w_s phi_s(x_i) . phi_s(y_j): reference 002, eq. (7)."""
    count, omega = len(omega), numbers(omega, dps=dps)
    weight = _map(context(dps).exp, numbers(np.broadcast_to(log_weight, (count,)), dps=dps))
    a, b = (feature_map(numbers(z, dps=dps) * root, omega, features, dps=dps) for z in (x, y))
    return np.asarray((a * np.tile(weight, a.shape[1] // count)) @ b.T / count)


def kernel_estimate(
    x: Any,
    y: Any,
    omega: Any,
    *,
    features: str = "positive",
    log_weight: Any = 0.0,
    dps: int = 50,
) -> Floats:
    """Estimate exp(x_i . y_i) from features, for each pair of rows: reference 002, eq. (7).

    Examples
    --------
    >>> import numpy as np
    >>> from refattn.conformance.truth import exact
    >>> one = np.ones((1, 1))
    >>> float(exact.kernel_estimate(one, one, one)[0])  # e
    2.718281828459045
    """
    pairs = (
        _kernel_matrix(x[i : i + 1], y[i : i + 1], omega, log_weight, features, 1, dps)[0]
        for i in range(len(x))
    )
    return np.concatenate(list(pairs))


def _ratio(kernel: Floats, v: Any, visible: Any, dps: int) -> Floats:
    """sum_j kernel_ij v_j / sum_j kernel_ij over visible keys: reference 000, KernelizedAttention.

    0 for a query that sees no key.
    """
    visible = np.broadcast_to(visible, kernel.shape)
    out = np.full((len(kernel), v.shape[-1]), context(dps).mpf(0), dtype=object)
    for i, seen in enumerate(visible):
        if seen.any():
            out[i] = kernel[i, seen] @ numbers(v[seen], dps=dps) / kernel[i, seen].sum()
    return out


def random_feature_attention(
    q: Any,
    k: Any,
    v: Any,
    omega: Any,
    log_weight: Any = 0.0,
    visible: Any = True,
    scale: float | None = None,
    *,
    features: str = "positive",
    dps: int = 50,
) -> Floats:
    """Attention with the estimated kernel (RFA): reference 002, eq. (10); reference 003, RFA.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn.conformance.truth import exact
    >>> q, k, v = np.array([[9.0]]), np.array([[0.0], [1.0]]), np.array([[0.0], [1.0]])
    >>> float(exact.random_feature_attention(q, k, v, np.array([[0.5]]))[0, 0])
    0.5
    """
    r = root(scale, q.shape[-1], dps=dps)
    kernel = _kernel_matrix(q, k, omega, log_weight, features, r, dps)
    return _ratio(kernel, v, visible, dps)


def randomized_attention(
    q: Any,
    k: Any,
    v: Any,
    omega: Any,
    visible: Any = True,
    scale: float | None = None,
    *,
    dps: int = 50,
) -> Floats:
    """Mean over s of f_i(omega_is) = sum_j xi(k_j) v_j / sum_j xi(k_j): reference 003, RA.

    omega has shape (n, S, d).

    Examples
    --------
    >>> import numpy as np
    >>> from refattn.conformance.truth import exact
    >>> q, k, v = np.array([[9.0]]), np.array([[-1.0], [1.0]]), np.array([[0.0], [1.0]])
    >>> float(exact.randomized_attention(q, k, v, np.array([[[0.5]]]))[0, 0])  # e / (1 + e)
    0.7310585786300049
    """
    keys = numbers(k, dps=dps) * root(scale, q.shape[-1], dps=dps)
    visible = np.broadcast_to(visible, (len(q), len(k)))
    rows = []
    for i in range(len(q)):
        scores = log_positive(keys, numbers(omega[i], dps=dps)).T
        f = weighted_mean(scores, numbers(v, dps=dps), visible[i], dps=dps)[0]
        rows.append(f.sum(0) / len(f))
    return np.stack(rows)


def linear_randomized_attention(
    q: Any,
    k: Any,
    v: Any,
    omega: Any,
    centres: Any,
    visible: Any = True,
    scale: float | None = None,
    *,
    dps: int = 50,
) -> Floats:
    """RFA with weights N(omega_s; 0, I) / sum_c N(omega_s; mu_c, I): reference 003, LARA, balance.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn.conformance.truth import exact
    >>> q, k, v = np.array([[9.0]]), np.array([[-1.0], [1.0]]), np.array([[0.0], [1.0]])
    >>> omega, centres = np.array([[0.5]]), np.array([[2.0]])
    >>> float(exact.linear_randomized_attention(q, k, v, omega, centres)[0, 0])
    0.7310585786300049
    """
    mp = context(dps)
    densities = log_positive(numbers(centres, dps=dps), numbers(omega, dps=dps)).T
    log_weight = np.array([-mp.log(sum(map(mp.exp, row))) for row in densities], dtype=object)
    return random_feature_attention(q, k, v, omega, log_weight, visible, scale, dps=dps)


def coreset(
    k: Any, indices: Any, visible: Any = True, scale: float | None = None, *, dps: int = 50
) -> tuple[Floats, Floats]:
    """Centred keys J, times the root of the scale, and W = h_JJ^-1 h_JK for the keys K seen.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn.conformance.truth import exact
    >>> chosen, weights = exact.coreset(np.array([[-1.0], [1.0]]), [1, 0])
    >>> np.abs(weights.astype(float)).round(6)
    array([[0., 1.],
           [1., 0.]])
    """
    mp, seen = context(dps), np.broadcast_to(visible, (len(k),))
    keys = numbers(k, dps=dps) * root(scale, k.shape[-1], dps=dps)
    keys = keys - keys[seen].sum(0) / int(seen.sum())
    chosen = keys[[j for j in indices if seen[j]]]
    to_keys, to_chosen = (_map(mp.exp, chosen @ x.T) for x in (keys[seen], chosen))
    weights = mp.inverse(mp.matrix(to_chosen.tolist())) * mp.matrix(to_keys.tolist())
    return chosen, np.array(weights.tolist(), dtype=object)


def coreset_attention(
    q: Any,
    k: Any,
    v: Any,
    indices: Any,
    visible: Any = True,
    scale: float | None = None,
    *,
    dps: int = 50,
) -> Floats:
    """Attention with the kernel h_qJ h_JJ^-1 h_JK of centred keys: arXiv:2602.10056.

    Keys J are distinct, and visible, (m,), is the same for all queries.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn.conformance.truth import exact
    >>> q, k, v = np.array([[0.0]]), np.array([[-1.0], [1.0]]), np.array([[0.0], [3.0]])
    >>> float(exact.coreset_attention(q, k, v, np.array([1, 0]))[0, 0])
    1.5
    """
    chosen, weights = coreset(k, indices, visible, scale, dps=dps)
    queries = numbers(q, dps=dps) * root(scale, q.shape[-1], dps=dps)
    kernel = _map(context(dps).exp, queries @ chosen.T) @ weights
    return _ratio(kernel, v[np.broadcast_to(visible, (len(k),))], True, dps)


def eva_attention(
    q: Any,
    k: Any,
    v: Any,
    visible: Any = True,
    *,
    window: int,
    omega: Any = None,
    log_size: bool = True,
    causal: bool = False,
    scale: float | None = None,
    dps: int = 50,
) -> Floats:
    """Attention to the keys of the own chunk and to one summary of each other: arXiv:2302.04542.

    visible, (m,), is the same for all queries.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn.conformance.truth import exact
    >>> q, k, v = np.zeros((3, 1)), np.zeros((3, 1)), np.array([[0.0], [1.0], [5.0]])
    >>> float(exact.eva_attention(q, k, v, window=2)[0, 0])
    2.0
    """
    mp, r = context(dps), root(scale, q.shape[-1], dps=dps)
    queries, keys, values = numbers(q, dps=dps) * r, numbers(k, dps=dps) * r, numbers(v, dps=dps)

    def summary(c: int, i: int, members: list[int]) -> tuple[Any, Floats]:
        some = keys[members]
        mean, rows = some.sum(0) / len(members), _of_chunk(q, k, window, c)
        centre = mean + (queries[rows].sum(0) / len(rows) if rows else 0)
        at = centre if omega is None else numbers(omega, dps=dps)[c]
        scores = log_positive(some, at[None]).T
        value = weighted_mean(scores, values[members], dps=dps)[0][0]
        size = mp.log(len(members)) if log_size else mp.mpf(0)
        return queries[i] @ mean + size, value

    return _near_and_far(queries, keys, values, visible, window, causal, summary)


def second_order_attention(
    q: Any,
    k: Any,
    v: Any,
    visible: Any = True,
    *,
    window: int,
    causal: bool = False,
    scale: float | None = None,
    dps: int = 50,
) -> Floats:
    """Attention to the keys of the own chunk and to the moments of each other.

    visible, (m,), is the same for all queries.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn.conformance.truth import exact
    >>> q, k, v = np.zeros((3, 1)), np.zeros((3, 1)), np.array([[0.0], [1.0], [5.0]])
    >>> float(exact.second_order_attention(q, k, v, window=2)[0, 0])
    2.0
    """
    mp, r = context(dps), root(scale, q.shape[-1], dps=dps)
    queries, keys, values = numbers(q, dps=dps) * r, numbers(k, dps=dps) * r, numbers(v, dps=dps)

    def summary(c: int, i: int, members: list[int]) -> tuple[Any, Floats]:
        along, some, size = keys[members] @ queries[i], values[members], len(members)
        mean, value = along.sum() / size, some.sum(0) / size
        apart = along - mean
        score = mean + apart @ apart / (2 * size) + mp.log(size)
        return score, value + apart @ (some - value) / size

    return _near_and_far(queries, keys, values, visible, window, causal, summary)


def _near_and_far(
    q: Floats,
    k: Floats,
    v: Floats,
    visible: Any,
    window: int,
    causal: bool,
    summary: Callable[[int, int, list[int]], tuple[Any, Floats]],
) -> Floats:
    """Mean of the values of the own chunk and of summaries of others, query by query."""
    (n, m), seen = (len(q), len(k)), np.broadcast_to(visible, (len(k),))
    rows = []
    for i in range(n):
        at = i + m - n
        own = at // window
        near = [j for j in range(m) if seen[j] and j // window == own and (j <= at or not causal)]
        pairs = [(q[i] @ k[j], v[j]) for j in near]
        for c in range(-(-m // window)):
            members = [j for j in range(m) if seen[j] and j // window == c]
            if members and (c < own or (c > own and not causal)):
                pairs.append(summary(c, i, members))
        if not pairs:
            rows.append(0 * v[:1].sum(0))
            continue
        scores, values = zip(*pairs, strict=True)
        rows.append(weighted_mean(np.array([scores], dtype=object), np.stack(values))[0][0])
    return np.stack(rows)


def _of_chunk(q: Any, k: Any, window: int, c: int) -> list[int]:
    """Queries of a chunk: the last query is level with the last key."""
    n, m = len(q), len(k)
    return [i for i in range(n) if (i + m - n) // window == c]


def local_random_feature_attention(
    q: Any,
    k: Any,
    v: Any,
    omega: Any,
    visible: Any = True,
    scale: float | None = None,
    *,
    window: tuple[int | None, int | None],
    dps: int = 50,
) -> Floats:
    """Attention with the exact kernel in a window and the estimated one outside.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn.conformance.truth import exact
    >>> q, k, v, omega = (np.array([[x]]) for x in (0.0, 0.0, 4.0, 1.0))
    >>> options = {"window": (None, None)}
    >>> float(exact.local_random_feature_attention(q, k, v, omega, **options)[0, 0])
    4.0
    """
    mp, r = context(dps), root(scale, q.shape[-1], dps=dps)
    n, m = len(q), len(k)
    ahead = np.arange(m) - np.arange(n)[:, None] - (m - n)
    left, right = (m + n if side is None else side for side in window)
    near = (-left <= ahead) & (ahead <= right)
    estimate = _kernel_matrix(q, k, omega, 0.0, "positive", r, dps)
    kernel = _map(mp.exp, (numbers(q, dps=dps) * r) @ (numbers(k, dps=dps) * r).T)
    return _ratio(np.where(near, kernel, estimate), v, visible, dps)


def sampled_key_attention(
    q: Any,
    k: Any,
    v: Any,
    indices: Any,
    log_probability: Any = 0.0,
    visible: Any = True,
    scale: float | None = None,
    *,
    dps: int = 50,
) -> Floats:
    """Attention to the keys of each query's sample, (n or 1, S), over their probabilities.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn.conformance.truth import exact
    >>> q, k, v = np.zeros((1, 1)), np.zeros((3, 1)), np.array([[0.0], [1.0], [5.0]])
    >>> float(exact.sampled_key_attention(q, k, v, np.array([[0, 2]]))[0, 0])
    2.5
    """
    n, m = len(q), len(k)
    scores = (numbers(q, dps=dps) @ numbers(k, dps=dps).T) * root(scale, q.shape[-1], dps=dps) ** 2
    indices = np.broadcast_to(indices, (n, np.shape(indices)[-1]))
    log_p = numbers(np.broadcast_to(log_probability, indices.shape), dps=dps)
    visible, values, rows = np.broadcast_to(visible, (n, m)), numbers(v, dps=dps), []
    for i, at in enumerate(indices):
        row = (scores[i, at] - log_p[i])[None]
        rows.append(weighted_mean(row, values[at], visible[i, at], dps=dps)[0][0])
    return np.stack(rows)


def elu_plus_one(x: Any, *, dps: int = 50) -> Floats:
    """Evaluate x + 1 for x > 0 and e^x otherwise: reference 004, phi, with alpha = 1.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn.conformance.truth import exact
    >>> exact.elu_plus_one(np.array([2.0, 0.0]))
    array([mpf('3.0'), mpf('1.0')], dtype=object)
    """
    mp = context(dps)
    return _map(lambda e: e + 1 if e > 0 else mp.exp(e), numbers(x, dps=dps))


def linear_attention(q: Any, k: Any, v: Any, visible: Any = True, *, dps: int = 50) -> Floats:
    """Attention with the kernel phi(q) . phi(k), phi = elu + 1: reference 004, kernel_attn.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn.conformance.truth import exact
    >>> q, k, v = np.zeros((1, 2)), np.array([[0.0, 0.0], [2.0, 2.0]]), np.array([[0.0], [4.0]])
    >>> exact.linear_attention(q, k, v)  # kernels 2 and 6
    array([[mpf('3.0')]], dtype=object)
    """
    return _ratio(elu_plus_one(q, dps=dps) @ elu_plus_one(k, dps=dps).T, v, visible, dps)


def mean(x: Any, *, dps: int = 50) -> Floats:
    """Mean of the rows: reference 002, eq. (1).

    Examples
    --------
    >>> import numpy as np
    >>> from refattn.conformance.truth import exact
    >>> exact.mean(np.array([[1.0], [2.0]]))
    array([mpf('1.5')], dtype=object)
    """
    return np.asarray(numbers(x, dps=dps).sum(0) / len(x))


def covariance(x: Any, ddof: int = 1, *, dps: int = 50) -> Floats:
    """Covariance of the rows with divisor N - ddof: reference 002, eq. (2).

    Examples
    --------
    >>> import numpy as np
    >>> from refattn.conformance.truth import exact
    >>> exact.covariance(np.array([[1.0], [2.0]]))
    array([[mpf('0.5')]], dtype=object)
    """
    rows = numbers(x, dps=dps) - mean(x, dps=dps)
    return np.asarray(rows.T @ rows / (len(x) - ddof))
