"""Check arguments in one part or two, bring them to pairs of float64, and group heads."""

from __future__ import annotations

import decimal
from fractions import Fraction
from numbers import Rational
from typing import Any

from ..arrays import checks, qkv
from ..arrays.heads import Alibi, group_heads
from ..arrays.library import Array, array_namespace, constant, is_numpy_array
from ..engine.scores import Scores
from .assumptions import require
from .forward import Arguments
from .pairs import Pair, as_pair, two_sum


def prepare_pairs(
    q: Array | Pair,
    k: Array | Pair,
    v: Array | Pair,
    scores: Scores,
) -> tuple[Arguments, Any]:
    """Check arguments, and group heads; return also the function that undoes the groups.

    The scale is a pair already.
    """
    scale, bias, mask, causal, window, softcap, sinks, *_ = scores
    slopes = bias.slopes if isinstance(bias, Alibi) else None
    bias = None if isinstance(bias, Alibi) else bias
    for name, x in (("q", q), ("k", k), ("v", v), ("bias", bias)):
        if isinstance(x, tuple):
            check_parts(name, x)
    q1, k1, v1, bias1 = (first_part(x) for x in (q, k, v, bias))
    xp, _ = qkv.check(q1, k1, v1, bias=bias1, mask=mask, causal=causal)
    check_double(q1)
    softcap = qkv.softcap(softcap, q1)
    sinks, slopes = (
        None if x is None else qkv.of_heads(name, x, q1, k1, v1)
        for name, x in (("sinks", sinks), ("slopes", slopes))
    )
    require(q1, xp)
    sinks, slopes = (None if x is None else widen(x, xp).hi for x in (sinks, slopes))
    bias = None if bias is None else Pair(*(_as_matrix(x, xp) for x in widen(bias, xp)))
    mask = None if mask is None else _as_matrix(mask, xp)
    wide = [*widen(q, xp), *widen(k, xp), *widen(v, xp), *(bias or (None, None))]
    (_, _, _, *grouped), ungroup = group_heads(q1, k1, v1, *wide, mask, sinks, slopes)
    q1, q2, k1, k2, v1, v2, bias1, bias2, mask, sinks, slopes = grouped
    scale = None if scale is None else as_arrays(scale, q1)
    bias, window = None if bias is None else Pair(bias1, bias2), qkv.window(window)
    checked = Scores(scale, bias, mask, causal, window, softcap, sinks, slopes=slopes)
    return Arguments(Pair(q1, q2), Pair(k1, k2), Pair(v1, v2), xp, checked), ungroup


def first_part(x: Any) -> Any:
    """Return an array as it is, and of a pair the larger parts."""
    return x[0] if isinstance(x, tuple) else x


def _as_matrix(x: Array, xp: Any) -> Array:
    """Give an array axes of queries and keys."""
    return xp.reshape(x, (1,) * (2 - x.ndim) + tuple(x.shape)) if x.ndim < 2 else x


def widen(x: Array | Pair, xp: Any) -> Pair:
    """Bring an array or a pair of any two parts to a pair of float64."""
    if isinstance(x, tuple):
        hi, lo = two_sum(*x)  # of any parts: their sum is what counts
        return Pair(hi, xp.where(xp.isfinite(hi), lo, 0.0))
    return as_pair(xp.astype(x, xp.float64), xp)


def number_in_pairs(scale: Any) -> Pair | None:
    """Split a real number into a pair, with the digits of longdouble and of fractions."""
    if scale is None:
        return None
    high = float(scale)
    rest = Fraction(scale) - Fraction(high) if isinstance(scale, Rational) else scale - high
    return Pair(high, float(rest))


def power_in_pairs(x: Any, exponent: str) -> Pair:
    """Raise a real number to some power, in a pair."""
    high, low = number_in_pairs(x) or (0.0, 0.0)
    with decimal.localcontext(prec=60):
        exact = (decimal.Decimal(high) + decimal.Decimal(low)) ** decimal.Decimal(exponent)
        high = float(exact)
        return Pair(high, float(exact - decimal.Decimal(high)))


def as_arrays(scale: Pair, like: Array) -> Pair:
    """Make arrays without axes of the parts of a number."""
    return Pair(*(constant(x, like) for x in scale))


def check_parts(name: str, x: Any) -> None:
    """Check a pair of arrays that stands for their sum."""
    if len(x) != 2:
        raise TypeError(f"`{name}` must be an array or a pair (hi, lo), got {checks.describe(x)}.")
    for part, y in zip(("hi", "lo"), x, strict=True):
        checks.is_array(f"{name}.{part}", y)
        if y.dtype != array_namespace(y).float64:
            raise TypeError(f"`{name}.{part}` must have dtype float64, got {y.dtype}.")
    checks.same_home(f"{name}.lo", x[1], f"{name}.hi", x[0])
    if tuple(x[0].shape) != tuple(x[1].shape):
        raise ValueError(
            f"`{name}.lo` must have the shape of `{name}.hi`, "
            f"got shapes {tuple(x[1].shape)} and {tuple(x[0].shape)}."
        )


def check_double(x: Array, name: str = "q") -> None:
    """Check that numbers fit into float64."""
    if is_numpy_array(x) and x.dtype.itemsize > 8:
        raise TypeError(f"`{name}` must have dtype float32 or float64, got {x.dtype}.")
