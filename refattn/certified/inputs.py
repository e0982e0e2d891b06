"""Check arguments in one part or two, bring them to pairs of float64, and group heads."""

from __future__ import annotations

import decimal
from collections.abc import Callable
from fractions import Fraction
from numbers import Rational
from typing import Any

from ..arrays import checks, qkv
from ..arrays.heads import Alibi, group_heads
from ..arrays.library import Array, array_namespace, is_numpy_array
from ..engine.scores import Scores
from ..numbers.doubled import Pair
from ..numbers.pairs import to_pairs
from .assumptions import require
from .blocks import PairedAttention


def prepare_pairs(
    q: Array | Pair, k: Array | Pair, v: Array | Pair, scale: Pair | None, scores: Scores
) -> tuple[PairedAttention, Callable[..., Array]]:
    """Check arguments, and group heads; return also the function that undoes the groups."""
    bias: Any = scores.bias
    slopes = bias.slopes if isinstance(bias, Alibi) else None
    bias = None if isinstance(bias, Alibi) else bias
    for name, x in (("q", q), ("k", k), ("v", v), ("bias", bias)):
        if isinstance(x, tuple):
            check_parts(name, x)
    q1, k1, v1, bias1 = map(first_part, (q, k, v, bias))
    xp, _ = qkv.check(q1, k1, v1, bias=bias1, mask=scores.mask, causal=scores.causal)
    check_double(q1)
    softcap = qkv.softcap(scores.softcap, q1)
    sinks, slopes = (
        None if x is None else qkv.of_heads(name, x, q1, k1, v1)
        for name, x in (("sinks", scores.sinks), ("slopes", slopes))
    )
    require(q1, xp)
    q, k, v, bias, sinks, slopes = (
        None if x is None else _as_matrix(to_pairs(x)) for x in (q, k, v, bias, sinks, slopes)
    )
    mask = None if scores.mask is None else _as_matrix(scores.mask)
    (q, k, v, bias, sinks, slopes, mask), ungroup = group_heads(q, k, v, bias, sinks, slopes, mask)
    q = q if scale is None else q * as_number(scale, q)
    checked = Scores(
        None, bias, mask, scores.causal, qkv.window(scores.window), softcap, sinks, slopes=slopes
    )
    return PairedAttention(q, k, v, checked), ungroup


def _as_matrix(x: Any) -> Any:
    """Give an array axes of queries and keys."""
    return x[(None,) * (2 - x.ndim) + (...,)] if x.ndim < 2 else x


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


def as_number(scale: Pair, like: Array) -> Array:
    """Make an array without axes, in pairs as others, of a number rounded to 106 bits."""
    hi, lo = (like.xp.asarray(x, dtype=like.dtype, device=like.device) for x in scale)
    return to_pairs(Pair(hi, lo), abs(hi) * 2.0**-105)


def first_part(x: Any) -> Any:
    """Return an array as it is, and of a pair the larger parts."""
    return x[0] if isinstance(x, tuple) else x


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
