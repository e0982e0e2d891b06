"""Checks of queries, keys and values, and of what goes with them."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any

import numpy as np

from . import checks
from .checks import shape_of
from .heads import grouped_lead
from .library import Array, array_namespace, is_numpy_array, untraced


def check(
    q: Array,
    k: Array,
    v: Array,
    *,
    bias: Array | None = None,
    mask: Array | None = None,
    causal: bool = False,
    dropout: Array | None = None,
) -> tuple[Any, tuple[int, ...]]:
    """Check what attention functions take; return the namespace and the leading axes of all."""
    xp = checks.arrays(2, q=q, k=k, v=v)
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(
            "`q` and `k` must have last axes of one length, the head size d, "
            f"got shapes {shape_of(q)} and {shape_of(k)}."
        )
    if q.shape[-1] == 0:
        raise ValueError(f"`q` must have a head size d of at least 1, got shape {shape_of(q)}.")
    if k.shape[-2] != v.shape[-2]:
        raise ValueError(
            "`k` and `v` must have next-to-last axes of one length, the number of keys m, "
            f"got shapes {shape_of(k)} and {shape_of(v)}."
        )
    outer = grouped_lead(q, k, v)
    scores = (*outer, q.shape[-2], k.shape[-2])
    for name, x in (("bias", bias), ("dropout", dropout)):
        if x is not None:
            checks.arrays(0, q=q, **{name: x})
            checks.broadcasts(name, x, scores, "(..., n, m)")
    if mask is not None:
        checks.boolean("mask", mask, "q", q)
        checks.broadcasts("mask", mask, scores, "(..., n, m)")
    checks.flag("causal", causal)
    return xp, outer


def bias_by_lag(bias: Array, q: Array, k: Array, v: Array, mask: Array | None = None) -> Array:
    """Check a bias by lag, (..., n + m - 1), and view it as (..., 1, n + m - 1)."""
    checks.arrays(1, q=q, bias=bias)
    outer, (n, m) = grouped_lead(q, k, v), (q.shape[-2], k.shape[-2])
    lags, shape = max(0, n + m - 1), shape_of(bias)
    if shape[-1] != lags:
        dense = f": one for each pair takes {n * m:,} weights a head" * (shape[-2:] == (n, m))
        raise ValueError(
            "`bias` must be by lag, of shape (..., n + m - 1), with entry n - 1 + j - i for query "
            f"i and key j, here (..., {lags}), got {shape}{dense}. `softmax_attention` takes one "
            "for each pair."
        )
    checks.broadcasts("bias", bias, (*outer, lags), "(..., n + m - 1)")
    if mask is not None and mask.shape[-2:-1] not in ((), (1,)):
        raise ValueError(
            "`mask` must be the same for all queries with `bias`, of shape (..., 1, m) or (m,), "
            f"got {shape_of(mask)}: one for each pair takes {n * m:,} weights a head."
        )
    return bias[..., None, :]


def keys_and_values(k: Array, v: Array) -> None:
    """Check keys and values that come without queries."""
    checks.arrays(2, k=k, v=v)
    if k.shape[-1] == 0:
        raise ValueError(f"`k` must have a head size d of at least 1, got shape {shape_of(k)}.")
    check(k, k, v)


def window(value: Any) -> tuple[int | None, int | None]:
    """Check how far a query sees to the left and to the right; None is no limit."""
    if value is None:
        return None, None
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise ValueError(f"`window` must be a pair (left, right) or None, got {value!r}.")
    for i, side in enumerate(value):
        if side is not None:
            checks.non_negative_integer(f"window[{i}]", side)
    left, right = (None if side is None else int(side) for side in value)
    return left, right


def cut_evenly(name: str, size: Any, q: Array, k: Array) -> tuple[int, int]:
    """Find how many keys a chunk has, at most all tokens, and how many chunks there are."""
    checks.positive_integer(name, size)
    n, m = q.shape[-2], k.shape[-2]
    length = min(int(size), max(n, m, 1))
    return length, -(-m // length)


def of_heads(name: str, x: Array, q: Array, k: Array, v: Array) -> Array:
    """Check a number for each head, (..., heads), and give it axes of queries and keys."""
    checks.arrays(0, q=q, **{name: x})
    checks.broadcasts(name, x, grouped_lead(q, k, v), "(..., heads)")
    return x[..., None, None]


def softcap(value: Any, like: Array) -> Any:
    """Check a cap, and bring it to where it and its inverse are normal in the dtype of an array.

    Larger ones cap no score of less than its inverse precision, and smaller ones leave no score.
    """
    cap = checks.real("softcap", value, positive=True, optional=True, like=like)
    if cap is None:
        return None
    info = array_namespace(like).finfo(like.dtype)
    least, most = 4 * float(info.smallest_normal), float(info.eps / info.smallest_normal)
    return cap if least <= cap <= most else min(max(float(cap), least), most)


def key_rows(mask: Array | None, k: Array) -> Array | None:
    """View a mask, already checked, as (..., n or 1, m)."""
    if mask is None:
        return None
    outer = (1,) if mask.ndim < 2 else shape_of(mask)[:-1]
    return array_namespace(mask).broadcast_to(mask, (*outer, k.shape[-2]))


def one_row(mask: Array | None, k: Array) -> Array | None:
    """View a mask, already checked, as (..., 1, m): the same for all queries."""
    mask = key_rows(mask, k)
    if mask is not None and mask.shape[-2] != 1:
        raise ValueError(
            "`mask` must be the same for all queries, of shape (..., 1, m) or (m,), "
            f"got {shape_of(mask)}."
        )
    return mask


def attended(a: Any, b: Any) -> None:
    """Check two results of `attend` that are to be merged."""
    for name, pair in (("a", a), ("b", b)):
        if not (isinstance(pair, tuple) and len(pair) == 2):
            raise TypeError(f"`{name}` must be a pair (out, lse), got {checks.describe(pair)}.")
        out, lse = pair
        checks.arrays(1, **{f"{name}.out": out, f"{name}.lse": lse})
        if shape_of(out)[:-1] != shape_of(lse):
            raise ValueError(
                f"`{name}.lse` must have the shape of `{name}.out` without its last axis, "
                f"got shapes {shape_of(lse)} and {shape_of(out)}."
            )
    checks.arrays(1, **{"a.out": a[0], "b.out": b[0]})
    try:
        np.broadcast_shapes(shape_of(a[1]), shape_of(b[1]))
        matches = a[0].shape[-1] == b[0].shape[-1]
    except ValueError:
        matches = False
    if not matches:
        raise ValueError(
            "`a` and `b` must hold means of one length d_v for queries that broadcast, "
            f"got `out` of shapes {shape_of(a[0])} and {shape_of(b[0])}."
        )


def per_head(name: str, x: Any, like: Array) -> Array:
    """Bring a number, or numbers (...) for rows (..., n, d), to the library of `like`."""
    if isinstance(x, Real) and not isinstance(x, bool):
        x = np.asarray(checks.real(name, x, like=like))
    values = checks.floats(name, x, like)
    checks.broadcasts(name, x, shape_of(like)[:-2], "(...)")
    if is_numpy_array(untraced(x)) and not np.all(np.isfinite(untraced(x))):
        raise ValueError(f"`{name}` must be finite, got nan or inf.")
    return values


def two_per_head(name: str, values: Any, likes: tuple[Array, Array]) -> list[Array]:
    """Bring two of what `per_head` takes to the library of two arrays."""
    if not isinstance(values, Sequence) or len(values) != 2:
        raise TypeError(f"`{name}` must be a pair, for q and for k, got {checks.describe(values)}.")
    return [per_head(name, x, like) for x, like in zip(values, likes, strict=True)]


def scale_or_default(scale: Any, d: int, *, positive: bool = False) -> float:
    """Check the scale of the scores and return it, 1 / sqrt(d) by default."""
    number = checks.real("scale", scale, positive=positive, optional=True)
    return float(d**-0.5 if number is None else number)
