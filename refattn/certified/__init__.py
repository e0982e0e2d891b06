r"""Attention with a proven error: more than 60 digits in base 2, at the speed of matrix products.

Results are pairs of float64, hi + lo, with a bound of their error that is computed with them. Each
step adds to it what theory says, and nothing is estimated. With :math:`u = 2^{-53}`,
:math:`\gamma_c = c u / (1 - c u)`, d the head size, m the number of keys, and
:math:`f(x)` the largest power of two that is at most the largest of :math:`|x|`:

1. **Scores.** Queries and keys are cut into slices of b bits, of which products of matrices are
   exact, and a rest. With L of them a score is wrong by at most
   :math:`(L + 2) d \max(2^{-b (L - 1)}, 2^{-51}) \gamma_{L d + 4} f(q) f(k)`. L is the least with
   which this is below :math:`2^{-66}`, or 4.
2. **Exponents.** Scale, bias and the shift below are added in pairs: at most
   :math:`2^{-98} d f(q) f(k) + 2^{-100} (|\mathrm{bias}| + |\mathrm{shift}|)`. A cap c, computed
   from exponentials, takes :math:`2^{-66} c`.
3. **Weights.** :math:`w_{ij} = e^{s_{ij} - t_i}`, to :math:`2^{-69}` of each. The shift t is the
   log normaliser of `refattn.attend`, so that weights sum to about 1. It may be any number: what
   follows from it is exact. With an error :math:`\epsilon` of exponents, weights are wrong by at
   most :math:`\theta = e^{\epsilon} (1 + 2^{-69}) - 1` times themselves.
4. **Sums.** Weights and values are cut into three slices of b bits, of which sums over spans of
   1024 keys are exact, and spans are added in pairs: at most
   :math:`g = 2^{-2b} \gamma (Z + 1 + 6 m) f(v)` and :math:`(m / 1024 + 5) 2^{-102}` of the sum of
   absolute terms.
5. **Means.** :math:`N = \sum_j w_j v_j` over :math:`Z = \sum_j w_j`, in pairs. With
   :math:`A = \sum_j w_j |v_j|`, which is computed too,

   .. math::
       |\mathrm{error}| \le \frac{\theta A + g + \theta Z |\mathrm{out}|}{(1 - \theta) Z}
       + 2^{-98} |\mathrm{out}|.

6. **Logs.** :math:`\mathrm{lse} = t + \log(1 + \delta)` with :math:`\delta = Z - 1`, of which five
   terms of the series are taken.

Bounds are computed in float64, from numbers that are not negative, with fewer than 2^16 roundings,
and multiplied by 1 + 2^-30. Where a step does not hold (an argument is not finite, exponents
overflow, the shift is off) the result is that of `attend`, and its bound is infinity.

Nothing here holds where a compiler changes the order of sums: functions try it on the device, once,
and raise RuntimeError with what failed.

    Ozaki, Ogita, Oishi and Rump, Error-free transformations of matrix multiplication by using fast
    routines of matrix multiplication, Numerical Algorithms 59, 2012.
"""

from __future__ import annotations

import decimal
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from numbers import Rational
from typing import Any, NamedTuple

from ..arrays import checks, frequencies, qkv
from ..arrays.heads import Alibi, group_heads
from ..arrays.library import Array, array_namespace, as_written, constant, device, has_float64
from ..arrays.shown import held
from ..engine.scores import Options
from . import backward, kernel
from . import pairs as certified_pairs
from .backward import Bound
from .pairs import Pair

__all__ = [
    "Bound",
    "Certified",
    "Gradients",
    "Pair",
    "Rounded",
    "attend",
    "random_feature_attention",
    "self_test",
    "softmax_attention",
    "softmax_gradients",
]


def __dir__() -> list[str]:
    return __all__


@held()
class Rounded(NamedTuple):
    """A result rounded to float64.

    Attributes
    ----------
    out : array, shape (..., n, d_v)
        The nearest float64 to each number that was computed.
    proven : array of bool, shape (..., n, d_v)
        Where it is the nearest to the exact number, too: no number within the bound of the error
        is rounded to another (Ziv's test).
    """

    out: Array
    proven: Array


@held()
@dataclass(frozen=True)
class Certified:
    """Attention in pairs, with a proven bound of its error. It unpacks to (out, lse, error).

    Attributes
    ----------
    out : Pair
        Of arrays of shape (..., n, d_v), float64.
    lse : Pair
        Log normalisers, of arrays of shape (..., n).
    error : array, shape (..., n, d_v)
        The exact number is no further than this from out.hi + out.lo; infinity where nothing was
        proven.
    lse_error : array, shape (..., n)
        So for `lse`.
    """

    out: Pair
    lse: Pair
    error: Array
    lse_error: Array

    def __iter__(self) -> Iterator[Any]:
        yield from (self.out, self.lse, self.error)

    @as_written
    def rounded(self) -> Rounded:
        """Round to float64, and say where that is proven to be the nearest to the exact number."""
        (hi, lo), error = self.out, self.error * (1 + 2.0**-50)
        up, down = ((lo + x) + abs(lo) * s for x, s in ((error, 2.0**-50), (-error, -(2.0**-50))))
        return Rounded(hi, (hi + up == hi) & (hi + down == hi))


@as_written
def attend(
    q: Array | Pair,
    k: Array | Pair,
    v: Array | Pair,
    *,
    bias: Array | Pair | Alibi | None = None,
    mask: Array | None = None,
    causal: bool = False,
    scale: float = 1.0,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
) -> Certified:
    r"""Compute softmax attention and its log normaliser in pairs, with a proven error.

    .. math::
        s_{ij} = \mathrm{cap}(\mathrm{scale}\; q_i \cdot k_j) + \mathrm{bias}_{ij}, \qquad
        \mathrm{lse}_i = \log \Bigl( e^{\mathrm{sink}} + \sum_j e^{s_{ij}} \Bigr), \qquad
        \mathrm{out}_i = \sum_j e^{s_{ij} - \mathrm{lse}_i} \, v_j

    as `refattn.attend` does, of arguments that are taken as the numbers they are.

    Parameters
    ----------
    q, k, v : array or Pair, shapes (..., n, d), (..., m, d), (..., m, d_v), float32 or float64
        As in `refattn.attend`. A pair of float64 counts as the sum of both.
    bias : array or Pair, broadcasting to (..., n, m), or Alibi, optional
        As in `refattn.attend`.
    mask, causal, scale, window, softcap, sinks
        As in `refattn.attend`.

    Returns
    -------
    Certified
        Pairs of float64 whatever the dtype of `q`, in its library and on its device. The bound is
        below 2^-60 of the sum of \|p v\|, the absolute terms of an output, for logits up to 1e5, d
        up to 4096 and m up to 2^16, unless some values are 2^20 times others. A query that sees no
        key, and no sink, has out 0 and lse -inf, without error. Where the bound is infinity, the
        result is that of `refattn.attend`: in rows that infinities or nan reach, and of exponents
        beyond about 1e15. A cap c adds 2^-66 c to the errors of scores. Bounds are not below
        2^-1000 times m.

    Raises
    ------
    TypeError, ValueError
        As in `refattn.attend`; and TypeError of longdouble.
    RuntimeError
        If the library or the device does not keep what the proof needs (see `self_test`), has no
        float64, or if values are not known yet, as under `jax.jit`.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import certified
    >>> q, k, v = np.ones((1, 1)), np.array([[0.0], [1.0]]), np.array([[0.0], [1.0]])
    >>> out, lse, error = certified.attend(q, k, v)
    >>> out.hi, bool(error[0, 0] < 2**-66)  # e / (1 + e) = 0.73105857863000487925...
    (array([[0.73105858]]), True)
    >>> int((int(out.hi[0, 0] * 2**60) + int(out.lo[0, 0] * 2**60)) * 10**18 >> 60)
    731058578630004879
    """
    checks.real("scale", scale, like=_first(q))
    factor = None if scale == 1 else scale
    given, ungroup = _prepare(
        q, k, v, _number(factor),
        bias=bias, mask=mask, causal=causal, window=window, softcap=softcap, sinks=sinks,
    )  # fmt: skip
    return _ungrouped(kernel.attend(given), ungroup)


@as_written
def softmax_attention(
    q: Array | Pair,
    k: Array | Pair,
    v: Array | Pair,
    *,
    scale: float | None = None,
    bias: Array | Pair | Alibi | None = None,
    mask: Array | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
) -> Certified:
    r"""Compute exact softmax attention in pairs, with a proven error.

    .. math:: \mathrm{out}_i = \sum_j \mathrm{softmax}_j(\mathrm{scale}\; q_i \cdot k_j) \, v_j

    Reference 000, Attention(Q, K, V); reference 002, eq. (3); reference 003, SoftmaxAttn.

    Parameters
    ----------
    q, k, v, bias, mask, causal, window, softcap, sinks
        As in `attend`.
    scale : float, optional
        Factor on q . k, 1 / sqrt(d) by default: the root in pairs, not in float64.

    Returns
    -------
    Certified
        As of `attend`.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As in `attend`.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import certified
    >>> q = k = np.array([[0.0], [1.0]])
    >>> found = certified.softmax_attention(q, k, np.array([[0.0], [4.0]]))
    >>> found.rounded()
    Rounded(out=array([[2.        ],
           [2.92423431]]), proven=array([[ True],
           [ True]]))
    """
    factor = _usual(scale, q)
    given, ungroup = _prepare(
        q, k, v, factor,
        bias=bias, mask=mask, causal=causal, window=window, softcap=softcap, sinks=sinks,
    )  # fmt: skip
    return _ungrouped(kernel.attend(given), ungroup)


@held()
class Gradients(NamedTuple):
    """Gradients in pairs, with proven bounds of their errors.

    Attributes
    ----------
    q, k, v : Bound
        `value`, a pair of arrays of the shape of the argument, and `error`: the exact number is no
        further than this from value.hi + value.lo, infinity where nothing was proven.
    """

    q: Bound
    k: Bound
    v: Bound


@as_written
def softmax_gradients(
    q: Array | Pair,
    k: Array | Pair,
    v: Array | Pair,
    d_out: Array | Pair,
    *,
    scale: float | None = None,
    bias: Array | Pair | Alibi | None = None,
    mask: Array | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    sinks: Array | None = None,
) -> Gradients:
    r"""Compute gradients of exact softmax attention in pairs, with proven errors.

    .. math::
        \bar v_j = \sum_i p_{ij} g_i, \qquad
        \bar s_{ij} = p_{ij} (g_i \cdot v_j - g_i \cdot \mathrm{out}_i), \qquad
        \bar q_i = \mathrm{scale} \sum_j \bar s_{ij} k_j, \quad
        \bar k_j = \mathrm{scale} \sum_i \bar s_{ij} q_i

    for the cotangent g of the output. The errors of the weights p, of the products with g and of
    the sums add up, as in the proof above: weights are those of step 3 with the shift lse in
    place of t, whose error is added to that of the exponents. Each bound is summed with the terms
    that it is of.

    Parameters
    ----------
    q, k, v, scale, bias, mask, causal, window, sinks
        As in `softmax_attention`.
    d_out : array or Pair, shape (..., n, d_v), float32 or float64
        Cotangent of the output.

    Returns
    -------
    Gradients
        Of `q`, `k` and `v`, summed over heads that share them.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As in `attend`.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import certified
    >>> q, k, v = np.array([[1.0]]), np.array([[0.0], [0.0]]), np.array([[0.0], [4.0]])
    >>> found = certified.softmax_gradients(q, k, v, np.ones((1, 1)))
    >>> found.k.value.hi, bool(found.k.error.max() < 2.0**-60)
    (array([[-1.],
           [ 1.]]), True)
    """
    factor = _usual(scale, q)
    given, _ = _prepare(
        q, k, v, factor,
        bias=bias, mask=mask, causal=causal, window=window, softcap=None, sinks=sinks,
    )  # fmt: skip
    if isinstance(d_out, tuple):
        certified_pairs.check_parts("d_out", d_out)
    firsts = [_first(x) for x in (q, k, v)]
    checks.is_array("d_out", _first(d_out))
    checks.same_home("d_out", _first(d_out), "q", firsts[0])
    checks.arrays(2, d_out=_first(d_out))
    certified_pairs.check_double(_first(d_out), "d_out")
    shape = (*qkv.lead(*firsts), firsts[0].shape[-2], firsts[2].shape[-1])
    if tuple(_first(d_out).shape) != shape:
        raise ValueError(
            f"`d_out` must have the shape of the output, {shape}, got {tuple(_first(d_out).shape)}."
        )
    wide = _wide(d_out)
    (_, _, _, *parts), _ = group_heads(*firsts, *wide)
    found = backward.gradients(given, Pair(*parts))
    pairs = zip(found, given[:3], (q, k, v), strict=True)
    return Gradients(
        *(backward.sum_to(x, tuple(y.hi.shape), tuple(_first(z).shape)) for x, y, z in pairs)
    )


@as_written
def random_feature_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    omega: Array,
    log_weight: Array | None = None,
    features: str = "positive",
    scale: float | None = None,
    mask: Array | None = None,
) -> Certified:
    r"""Compute random-feature attention with positive features in pairs, with a proven error.

    .. math::
        \mathrm{out}_i = \frac{\sum_s w_s \xi(q_i, \omega_s) \sum_j \xi(k_j, \omega_s) \, v_j}
                              {\sum_s w_s \xi(q_i, \omega_s) \sum_j \xi(k_j, \omega_s)}, \qquad
        \xi(x, \omega) = e^{\omega \cdot x - |x|^2 / 2}

    of x times the root of the scale. Two hops of `attend`: samples attend to keys with the bias
    -|k|^2 / 2, queries to samples with the log normalisers of those. The pairs of the first are
    arguments of the second, and its errors are added there. Reference 002, eq. (9); reference 003,
    RFA.

    Parameters
    ----------
    q, k, v, omega, log_weight, scale
        As in `refattn.random_feature_attention`, float32 or float64. The dtype of all is that of
        `q`; frequencies and weights are taken as the numbers they are.
    features : str, default "positive"
        ``"positive"`` or ``"hyperbolic"``, which is positive with frequencies of both signs.
        Trigonometric features have signs, and sums of them no bound of this kind.
    mask : array of bool, shape (..., 1, m) or (m,), optional
        True where queries attend to the key.

    Returns
    -------
    Certified
        As of `attend`; `lse` is the log normaliser of samples seen by queries, without
        :math:`-|q|^2/2` and without :math:`-\log S`.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As in `attend` and in `refattn.random_feature_attention`.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import certified, random_feature_attention, sampling
    >>> q, k, v = np.zeros((1, 2)), np.eye(2), np.array([[1.0], [3.0]])
    >>> omega, _ = sampling.draw(8, 2, rng=0)
    >>> found = certified.random_feature_attention(q, k, v, omega=omega)
    >>> out = random_feature_attention(q, k, v, omega=omega)
    >>> bool(abs(out - found.out.hi) < 1e-15), bool(found.error < 1e-19)
    (True, True)
    """
    qkv.check(q, k, v, mask=mask)
    checks.choice("features", features, ("hyperbolic", "positive"))
    checks.real("scale", scale, positive=True, optional=True, like=q)
    mask = qkv.one_row(mask, k)
    checks.is_array("omega", omega)
    omega, log_weight = frequencies.shared(omega, log_weight, q, qkv.lead(q, k, v))
    _require(q)
    xp = array_namespace(q)
    if features == "hyperbolic":
        omega = xp.concat([omega, -omega], axis=-2)
        log_weight = xp.concat([log_weight, log_weight], axis=-1)
    (q, k, v, omega, log_weight, mask), ungroup = group_heads(
        q, k, v, omega, log_weight[..., None, :], mask
    )
    q, k, v, omega, log_weight = (_wide(x) for x in (q, k, v, omega, log_weight))
    root = _power(q.hi.shape[-1], "-0.25") if scale is None else _power(scale, "0.5")
    return _ungrouped(_two_hops(q, k, v, omega, log_weight, mask, _like(root, q.hi)), ungroup)


@as_written
def _two_hops(
    q: Pair, k: Pair, v: Pair, omega: Pair, log_weight: Pair, mask: Array | None, root: Pair
) -> kernel.Bounded:
    xp, d = array_namespace(q.hi), q.hi.shape[-1]
    if mask is not None:  # what no query sees has no part in the bounds
        shown = xp.matrix_transpose(mask)
        k, v = (Pair(*(xp.where(shown, x, 0.0) for x in y)) for y in (k, v))
    q, k = certified_pairs.multiply(q, root), certified_pairs.multiply(k, root)
    square = certified_pairs.dot(k, k)
    bias = Pair(*(-0.5 * x[..., None, :] for x in square))
    # Roundings of k, of its squares and of their sum.
    far = (d + 16) * 2.0**-102 * kernel.largest(bias.hi, (-2, -1))
    first = kernel.attend(kernel.Given(omega, k, v, bias=bias, mask=mask, bias_error=far))
    lse = Pair(*(x[..., None, :] for x in first.lse))
    seen = xp.isfinite(lse.hi) & xp.isfinite(log_weight.hi)
    parts = (Pair(*(xp.where(seen, x, 0.0) for x in y)) for y in (lse, log_weight))
    total = certified_pairs.add(*parts)
    bias = Pair(xp.where(seen, total.hi, lse.hi + log_weight.hi), total.lo)
    # A sample that sees no key has no error; one whose terms overflow has an infinite one.
    far = kernel.largest(first.lse_error[..., None, :], (-2, -1))
    far = far + 2.0**-102 * kernel.largest_finite(bias.hi)
    return kernel.attend(
        kernel.Given(q, omega, first.out, bias=bias, v_error=first.error, bias_error=far)
    )


def self_test(like: Array | None = None, *, compiled: Any = None) -> list[str]:
    r"""Try whether the array library and the device keep what the proof needs.

    Sums and products in pairs, slices, products of matrices of slices, and e^x are computed there
    and compared with integers and with 60 digits, bit for bit where there is no error.

    Parameters
    ----------
    like : array, optional
        An array of the library, on the device: NumPy by default.
    compiled : function, optional
        Compiles a function, as `jax.jit` and `torch.compile` do: whether what it gives keeps all
        this, too.

    Returns
    -------
    list of str
        What failed; empty if nothing did.

    Examples
    --------
    >>> from refattn import certified
    >>> certified.self_test()
    []
    """
    return certified_pairs.failures(like, compiled)


_CHECKED: dict[tuple[str, str], list[str]] = {}


def _require(like: Array) -> None:
    """Raise where the proof does not hold."""
    xp = array_namespace(like)
    where = xp.__name__, str(device(like))
    if not has_float64(like, xp):
        raise RuntimeError(f"certified attention must have float64, which {where[0]} has not here.")
    if where not in _CHECKED:
        try:
            _CHECKED[where] = certified_pairs.failures(like, None)
        except Exception as error:
            raise RuntimeError(
                f"certified attention must know the values of arrays of float64, which "
                f"{where[0]} on {where[1]} does not give here: {error}"
            ) from error
    if _CHECKED[where]:
        raise RuntimeError(
            f"certified attention must have sums and products as they are written, which "
            f"{where[0]} on {where[1]} changes: {'; '.join(_CHECKED[where])}."
        )


class _Inputs(NamedTuple):
    """Arguments in pairs and in groups of heads, and what undoes the groups."""

    given: kernel.Given
    ungroup: Any


def _prepare(
    q: Array | Pair,
    k: Array | Pair,
    v: Array | Pair,
    scale: Pair | None,
    *,
    bias: Array | Pair | Alibi | None,
    sinks: Array | None,
    **options: Any,
) -> _Inputs:
    """Check arguments, and group heads."""
    mask, causal = options["mask"], options["causal"]
    slopes = bias.slopes if isinstance(bias, Alibi) else None
    bias = None if isinstance(bias, Alibi) else bias
    for name, x in (("q", q), ("k", k), ("v", v), ("bias", bias)):
        if isinstance(x, tuple):
            certified_pairs.check_parts(name, x)
    q1, k1, v1, bias1 = (_first(x) for x in (q, k, v, bias))
    qkv.check(q1, k1, v1, bias=bias1, mask=mask, causal=causal)
    certified_pairs.check_double(q1)
    softcap = qkv.softcap(options["softcap"], q1)
    sinks, slopes = (
        None if x is None else qkv.of_heads(name, x, q1, k1, v1)
        for name, x in (("sinks", sinks), ("slopes", slopes))
    )
    _require(q1)
    sinks, slopes = (None if x is None else _wide(x).hi for x in (sinks, slopes))
    bias = None if bias is None else Pair(*(_rows(x) for x in _wide(bias)))
    mask = None if mask is None else _rows(mask)
    wide = [*_wide(q), *_wide(k), *_wide(v), *(bias or (None, None))]
    (_, _, _, *grouped), ungroup = group_heads(q1, k1, v1, *wide, mask, sinks, slopes)
    q1, q2, k1, k2, v1, v2, bias1, bias2, mask, sinks, slopes = grouped
    given = kernel.Given(
        Pair(q1, q2),
        Pair(k1, k2),
        Pair(v1, v2),
        None if bias is None else Pair(bias1, bias2),
        mask,
        causal,
        Options(qkv.window(options["window"]), None, softcap, sinks, slopes),
        None if scale is None else _like(scale, q1),
    )
    return _Inputs(given, ungroup)


def _ungrouped(found: kernel.Bounded, ungroup: Any) -> Certified:
    """Undo the groups of heads."""
    out, lse = (
        Pair(*(ungroup(x, core=core) for x in of)) for of, core in ((found.out, 2), (found.lse, 1))
    )
    return Certified(out, lse, ungroup(found.error), ungroup(found.lse_error, core=1))


def _usual(scale: Any, q: Array | Pair) -> Pair | None:
    """The scale, 1 / sqrt(d) by default, in pairs."""
    checks.real("scale", scale, optional=True, like=_first(q))
    checks.is_array("q", _first(q))
    return _power(_first(q).shape[-1], "-0.5") if scale is None else _number(scale)


def _first(x: Any) -> Any:
    """The array, or that of the larger parts of a pair."""
    return x[0] if isinstance(x, tuple) else x


def _rows(x: Array) -> Array:
    """Give it axes of queries and keys."""
    xp = array_namespace(x)
    return xp.reshape(x, (1,) * (2 - x.ndim) + tuple(x.shape)) if x.ndim < 2 else x


def _wide(x: Array | Pair) -> Pair:
    """A pair of float64."""
    if isinstance(x, tuple):
        hi, lo = certified_pairs.two_sum(*x)  # of any parts: their sum is what counts
        return Pair(hi, array_namespace(hi).where(array_namespace(hi).isfinite(hi), lo, 0.0))
    xp = array_namespace(x)
    return certified_pairs.pair(xp.astype(x, xp.float64))


def _number(scale: Any) -> Pair | None:
    """A real number in pairs, with the digits of longdouble and of fractions."""
    if scale is None:
        return None
    high = float(scale)
    rest = Fraction(scale) - Fraction(high) if isinstance(scale, Rational) else scale - high
    return Pair(high, float(rest))


def _power(x: Any, exponent: str) -> Pair:
    """x to some power in pairs."""
    high, low = _number(x) or (0.0, 0.0)
    with decimal.localcontext(prec=60):
        exact = (decimal.Decimal(high) + decimal.Decimal(low)) ** decimal.Decimal(exponent)
        high = float(exact)
        return Pair(high, float(exact - decimal.Decimal(high)))


def _like(scale: Pair, like: Array) -> Pair:
    """A number in pairs as arrays without axes."""
    return Pair(*(constant(x, like) for x in scale))
