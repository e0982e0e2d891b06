"""Checks of arguments: shapes and dtypes, and values where there are any, to hold under tracing."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from numbers import Integral, Rational, Real
from typing import Any

import numpy as np

from .heads import broadcast_lead, head_counts
from .library import (
    Array,
    array_namespace,
    constant,
    device,
    is_array_api_obj,
    is_numpy_array,
    known,
    to_host,
)
from .words import close

__all__ = [
    "arrays",
    "at_most",
    "attended",
    "attention",
    "batch",
    "boolean",
    "broadcasts",
    "causal_proposals",
    "choice",
    "chunk_frequencies",
    "chunks",
    "compatible",
    "covariance",
    "ddof",
    "describe",
    "double",
    "few_axes",
    "flag",
    "frequencies",
    "generator",
    "host",
    "integers",
    "invertible",
    "is_array",
    "iterable",
    "key_indices",
    "key_rows",
    "lead",
    "leading",
    "length",
    "names",
    "non_negative_integer",
    "number",
    "of_heads",
    "one_row",
    "over",
    "pair",
    "parts",
    "per_head",
    "positive_integer",
    "query_frequencies",
    "real",
    "row_axes",
    "rows",
    "same_home",
    "sample_of_keys",
    "semidefinite",
    "softcap",
    "square",
    "squares",
    "states",
    "symmetric",
    "whole",
    "window",
]


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    bias: Array | None = None,
    mask: Array | None = None,
    causal: bool = False,
    dropout: Array | None = None,
) -> None:
    """Check what attention functions take."""
    arrays(2, q=q, k=k, v=v)
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(
            "`q` and `k` must have last axes of one length, the head size d, "
            f"got shapes {_shape(q)} and {_shape(k)}."
        )
    if q.shape[-1] == 0:
        raise ValueError(f"`q` must have a head size d of at least 1, got shape {_shape(q)}.")
    if k.shape[-2] != v.shape[-2]:
        raise ValueError(
            "`k` and `v` must have next-to-last axes of one length, the number of keys m, "
            f"got shapes {_shape(k)} and {_shape(v)}."
        )
    scores = (*lead(q, k, v), q.shape[-2], k.shape[-2])
    for name, x in (("bias", bias), ("dropout", dropout)):
        if x is not None:
            arrays(0, q=q, **{name: x})
            broadcasts(name, x, scores, "(..., n, m)")
    if mask is not None:
        boolean("mask", mask, "q", q)
        broadcasts("mask", mask, scores, "(..., n, m)")
    flag("causal", causal)


def window(value: Any) -> tuple[int | None, int | None]:
    """Check how far a query sees to the left and to the right; None is no limit."""
    if value is None:
        return None, None
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise ValueError(f"`window` must be a pair (left, right) or None, got {value!r}.")
    for side in value:
        if side is not None:
            non_negative_integer("window", side)
    left, right = (None if side is None else int(side) for side in value)
    return left, right


def of_heads(name: str, x: Array, q: Array, k: Array, v: Array) -> Array:
    """Check a number for each head, (..., heads), and give it axes of queries and keys."""
    arrays(0, q=q, **{name: x})
    broadcasts(name, x, lead(q, k, v), "(..., heads)")
    return x[..., None, None]


def attended(a: Any, b: Any) -> None:
    """Check two results of `attend` that are to be merged."""
    for name, pair in (("a", a), ("b", b)):
        if not (isinstance(pair, tuple) and len(pair) == 2):
            raise TypeError(f"`{name}` must be a pair (out, lse), got {describe(pair)}.")
        out, lse = pair
        is_array(f"{name}.lse", lse)
        arrays(1, **{f"{name}.out": out, f"{name}.lse": lse})
        if _shape(out)[:-1] != _shape(lse):
            raise ValueError(
                f"`{name}.lse` must have the shape of `{name}.out` without its last axis, "
                f"got shapes {_shape(lse)} and {_shape(out)}."
            )
    arrays(1, **{"a.out": a[0], "b.out": b[0]})
    try:
        np.broadcast_shapes(_shape(a[1]), _shape(b[1]))
        matches = a[0].shape[-1] == b[0].shape[-1]
    except ValueError:
        matches = False
    if not matches:
        raise ValueError(
            "`a` and `b` must hold means of one length d_v for queries that broadcast, "
            f"got `out` of shapes {_shape(a[0])} and {_shape(b[0])}."
        )


def arrays(min_ndim: int, **named: Array) -> None:
    """Check that arrays share one library, one supported dtype and one device."""
    for name, x in named.items():
        is_array(name, x)
        few_axes(name, x)
        if x.ndim < min_ndim:
            axes = "1 axis" if min_ndim == 1 else f"{min_ndim} axes"
            raise ValueError(f"`{name}` must have at least {axes}, got shape {_shape(x)}.")
    (first, head), *rest = named.items()
    xp = array_namespace(head)
    supported = [xp.float32, xp.float64]
    if is_numpy_array(head):
        supported.append(np.dtype(np.longdouble))
    if head.dtype not in supported:
        raise TypeError(
            f"`{first}` must have dtype float32 or float64, got {head.dtype}: cast it first, "
            f"for example with xp.astype({first}, xp.float32)."
        )
    for name, x in rest:
        same_home(name, x, first, head)
        if x.dtype != head.dtype:
            raise TypeError(
                f"`{name}` must have the dtype of `{first}`, {head.dtype}, got {x.dtype}: "
                "cast one of them first."
            )


def is_array(name: str, x: Any) -> None:
    """Check that `x` is an array of some library."""
    if not is_array_api_obj(x) or isinstance(x, np.ma.MaskedArray):
        raise TypeError(
            f"`{name}` must be an array of a library with the array API, got {describe(x)}."
        )


def few_axes(name: str, x: Any, most: int = 31) -> None:
    """Check the number of axes: NumPy broadcasts up to 32, and each query may have samples."""
    if x.ndim > most:
        raise ValueError(f"`{name}` must have at most {most} axes, got {x.ndim}.")


def same_home(name: str, x: Array, first: str, head: Array) -> None:
    """Check that two arrays live in one library and on one device."""
    try:
        array_namespace(head, x)
    except TypeError:
        raise TypeError(
            f"`{name}` must come from the same array library as `{first}`, "
            f"got {describe(x)} and {describe(head)}."
        ) from None
    homes = device(x), device(head)
    if None not in homes and homes[0] != homes[1]:  # JAX: an array being traced has no device
        raise ValueError(
            f"`{name}` must be on the device of `{first}`, {device(head)}, got {device(x)}."
        )


def over(name: str, proposal: Any, d: int) -> None:
    """Check that a proposal is for frequencies of length d."""
    if proposal.d != d:
        raise ValueError(f"`{name}` must be over vectors of length d = {d}, got {proposal.d}.")


def batch(name: str, shape: tuple[int, ...], outer: tuple[int, ...]) -> None:
    """Check that a batch of proposals broadcasts to the leading axes of q, k and v."""
    try:
        fits = np.broadcast_shapes(shape, outer) == outer
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            f"`{name}` must broadcast to the leading axes of `q`, `k` and `v`, {outer}, "
            f"got a batch of shape {shape}."
        )


def states(**pairs: tuple[Array, Array]) -> None:
    """Check arrays (..., m, c) of two states that are to be joined along the tokens."""
    for name, (x, y) in pairs.items():
        arrays(2, **{name: x, f"other {name}": y})
        if _shape(x)[:-2] != _shape(y)[:-2] or x.shape[-1] != y.shape[-1]:
            raise ValueError(
                f"`{name}` must have the leading axes and the last axis of the state, "
                f"got shapes {_shape(x)} and {_shape(y)}."
            )


def row_axes(name: str, x: Array, axis: Any) -> tuple[int, ...]:
    """Check the axes of the rows of `x`, an array (..., d), and return them in ascending order."""
    axes = axis if isinstance(axis, tuple) else (axis,)
    for i in axes:
        if isinstance(i, bool | np.bool_) or not isinstance(i, Integral):
            raise TypeError(f"`axis` must be an integer or a tuple of integers, got {describe(i)}.")
    found = sorted({int(i) + x.ndim if i < 0 else int(i) for i in axes})
    if not axes or len(found) < len(axes) or found[0] < 0 or found[-1] >= x.ndim - 1:
        raise ValueError(
            f"`axis` must name one or more axes of `{name}`, each once and never the last, "
            f"got {axis} for shape {_shape(x)}."
        )
    if x.shape[-1] == 0:
        raise ValueError(f"`{name}` must have rows of length d >= 1, got shape {_shape(x)}.")
    return tuple(found)


def rows(name: str, x: Array, pooled: int, first: str, head: Array) -> None:
    """Check that rows (..., *pooled, d) may join those of `head`, an array (..., 0, d)."""
    arrays(2, **{first: head, name: x})
    axes, found = ((*_shape(y)[: -1 - n], y.shape[-1]) for y, n in ((head, 1), (x, pooled)))
    if found != axes:
        raise ValueError(
            f"`{name}` must have the axes of `{first}` beside those in `axis`, {axes}, got {found}."
        )


def iterable(name: str, values: Any) -> None:
    """Check an iterable of arrays."""
    if not isinstance(values, Iterable):
        raise TypeError(f"`{name}` must be an iterable of arrays, got {describe(values)}.")


def ddof(name: str, value: Any) -> None:
    """Check what is subtracted from the count."""
    non_negative_integer(name, value)
    if value > 1:
        raise ValueError(f"`{name}` must be 0 or 1, got {value}.")


def boolean(name: str, x: Any, first: str, head: Array) -> None:
    """Check a boolean array that goes with `head`."""
    is_array(name, x)
    few_axes(name, x)
    same_home(name, x, first, head)
    if not array_namespace(x).isdtype(x.dtype, "bool"):
        raise TypeError(f"`{name}` must have dtype bool (True = attend), got {x.dtype}.")


def broadcasts(name: str, x: Array, shape: tuple[int, ...], rule: str) -> None:
    """Check that `x` broadcasts to `shape` without enlarging it."""
    try:
        fits = np.broadcast_shapes(_shape(x), shape) == shape
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(f"`{name}` must broadcast to {rule} = {shape}, got shape {_shape(x)}.")


def lead(q: Array, k: Array, v: Array) -> tuple[int, ...]:
    """Return the broadcast leading axes of q, k and v, grouped heads included."""
    heads, groups = head_counts(q, k, v)
    shared = heads != groups and 1 not in (heads, groups)
    for name, x in (("q", q), ("k", k), ("v", v)):
        few_axes(name, x, 30 if shared else 31)  # shared keys take an axis of their own
    try:
        if not shared:
            return broadcast_lead(q, k, v)
        if groups and heads % groups == 0:
            broadcast_lead(k, v)
            return (*broadcast_lead(q, k, v, core=3), heads)
    except ValueError:
        pass
    raise ValueError(
        "`q`, `k` and `v` must have leading axes that broadcast, or a head axis (the third from "
        "the end) whose length in `k` and `v` divides that in `q`, "
        f"got shapes {_shape(q)}, {_shape(k)} and {_shape(v)}."
    )


def key_rows(mask: Array | None, k: Array) -> Array | None:
    """View a mask, already checked, as (..., n or 1, m)."""
    if mask is None:
        return None
    outer = (1,) if mask.ndim < 2 else _shape(mask)[:-1]
    return array_namespace(mask).broadcast_to(mask, (*outer, k.shape[-2]))


def one_row(mask: Array | None, k: Array) -> Array | None:
    """View a mask, already checked, as (..., 1, m): the same for all queries."""
    mask = key_rows(mask, k)
    if mask is not None and mask.shape[-2] != 1:
        raise ValueError(
            "`mask` must be the same for all queries, of shape (..., 1, m) or (m,), "
            f"got {_shape(mask)}."
        )
    return mask


def chunks(name: str, size: Any, q: Array, k: Array) -> tuple[int, int]:
    """Keys of a chunk, no more than there are tokens, and number of chunks."""
    positive_integer(name, size)
    n, m = q.shape[-2], k.shape[-2]
    length = min(int(size), max(n, m, 1))
    return length, -(-m // length)


def chunk_frequencies(omega: Any, count: int, like: Array, outer: tuple[int, ...]) -> Array:
    """Check frequencies (..., C, d), one of each chunk, and bring them to `like`."""
    omega = _floats("omega", omega, like)
    shape, d = _shape(omega), like.shape[-1]
    if shape[-2:] != (count, d):
        raise ValueError(
            f"`omega` must have shape (..., C, d) = (..., {count}, {d}) with one frequency for "
            f"each chunk, got {shape}."
        )
    broadcasts("omega", omega, (*outer, count, d), "(..., C, d)")
    return omega


def key_indices(indices: Any, q: Array, k: Array, v: Array, *, of_queries: bool = False) -> Array:
    """Check indices of keys, and bring them to `k`.

    Of shape (..., S), of query heads or of key heads, or `of_queries`, which may have an axis of
    theirs: then (..., n or 1, S).
    """
    whole("indices", indices)
    xp, m, outer = array_namespace(k), k.shape[-2], lead(q, k, v)
    given = _as_array("indices", indices, "(..., S)")
    if not array_namespace(given).isdtype(given.dtype, "integral"):
        raise TypeError(f"`indices` must hold integers, got {describe(indices)} of {given.dtype}.")
    shape, rule = _shape(given), "(..., S)"
    if not shape or shape[-1] < 1:
        raise ValueError(f"`indices` must have shape (..., S) with S >= 1, got {shape}.")
    core: tuple[int, ...] = shape[-1:]
    if of_queries and len(shape) > len(outer) + 1:
        core, rule = (q.shape[-2], *core), "(..., n, S)"
    elif (groups := head_counts(q, k, v)[1]) > 1 and shape[-2:-1] == (groups,):
        outer = (*outer[:-1], groups)  # of each key head
    broadcasts("indices", given, (*outer, *core), rule)
    if not is_numpy_array(given):
        same_home("indices", given, "k", k)
    values = known(given)
    if values is not None and values.size and (values.min() < 0 or values.max() >= m):
        raise ValueError(
            f"`indices` must be of keys, from 0 to {m - 1}, got {values.min()} to {values.max()}."
        )
    if is_numpy_array(given):
        given = xp.asarray(given, dtype=xp.int32, device=device(k))
    else:
        given = xp.astype(given, xp.int32)  # shorter integers may not count all keys
    return given[..., None, :] if of_queries and len(core) == 1 else given


def sample_of_keys(
    indices: Any, log_probability: Any, q: Array, k: Array, v: Array
) -> tuple[Array, Array]:
    """Check the sample of each query, (..., n or 1, S), and the log of how often each is in one."""
    found = key_indices(indices, q, k, v, of_queries=True)
    given = np.zeros(1) if log_probability is None else log_probability
    log_p, shape = _floats("log_probability", given, q), _shape(found)
    if log_p.ndim > 1 and len(np.shape(indices)) < len(shape):
        log_p = log_p[..., None, :]
    broadcasts("log_probability", log_p, shape, "the shape of `indices`")
    return found, array_namespace(q).broadcast_to(log_p, shape)


def leading(name: str, x: Array, other: str, y: Array) -> None:
    """Check that the axes before the last two broadcast."""
    try:
        np.broadcast_shapes(_shape(x)[:-2], _shape(y)[:-2])
    except ValueError:
        raise ValueError(
            f"`{name}` and `{other}` must have leading axes that broadcast, "
            f"got shapes {_shape(x)} and {_shape(y)}."
        ) from None


def compatible(name: str, x: Array, other: str, y: Array) -> None:
    """Check that vectors (..., d) have one length and leading axes that broadcast."""
    try:
        np.broadcast_shapes(_shape(x), _shape(y))
        fits = x.shape[-1] == y.shape[-1] > 0
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            f"`{name}` and `{other}` must have last axes of one length d >= 1 and leading axes "
            f"that broadcast, got shapes {_shape(x)} and {_shape(y)}."
        )


def frequencies(
    omega: Any,
    log_weight: Any,
    like: Array,
    outer: tuple[int, ...] | None = None,
    name: str = "omega",
) -> tuple[Array, Array]:
    """Check frequencies (..., S, d) and log weights (..., S), and bring them to `like`.

    Both may be NumPy arrays, whatever `like`, an array (..., d), is. Leading axes broadcast to
    `outer` if that is given.
    """
    d = like.shape[-1]
    omega = _floats(name, omega, like)
    log_weight = _floats("log_weight", np.zeros(1) if log_weight is None else log_weight, like)
    if omega.ndim < 2 or omega.shape[-1] != d or omega.shape[-2] < 1:
        raise ValueError(
            f"`{name}` must have shape (..., S, {d}) with S >= 1, got {_shape(omega)}."
        )
    samples = omega.shape[-2]
    if outer is None:
        outer = _shape(omega)[:-2]
    broadcasts(name, omega, (*outer, samples, d), "(..., S, d)")
    broadcasts("log_weight", log_weight, (*outer, samples), "(..., S)")
    shape = (*_shape(log_weight)[:-1], samples)
    return omega, array_namespace(log_weight).broadcast_to(log_weight, shape)


def query_frequencies(omega: Any, q: Array, outer: tuple[int, ...]) -> Array:
    """Check frequencies (..., n, S, d) of each query, and bring them to `q`."""
    omega = _floats("omega", omega, q)
    n, d = q.shape[-2:]
    shape = _shape(omega)
    if omega.ndim < 3 or shape[-1] != d or shape[-2] < 1 or shape[-3] != n:
        raise ValueError(
            f"`omega` must have shape (..., n, S, d) = (..., {n}, S, {d}) with S >= 1, got {shape}."
        )
    broadcasts("omega", omega, (*outer, *shape[-3:]), "(..., n, S, d)")
    return omega


def causal_proposals(centres: Any, weighting: str, mask: Array | None) -> None:
    """Check what causal LARA cannot combine."""
    if centres is not None:
        raise ValueError("`centres` must be None with `causal`: proposals are made of past chunks.")
    if weighting not in ("balance", "own"):
        raise ValueError(
            f'`weighting` must be "balance" or "own" with `causal`, got {weighting!r}.'
        )
    if mask is not None and mask.shape[-2] > 1:
        raise ValueError(
            "`mask` must be the same for all queries, of shape (..., 1, m), with `causal`, "
            f"got shape {_shape(mask)}."
        )


def _floats(name: str, x: Any, like: Array) -> Array:
    """Check an array of real floats that is NumPy or of the library of `like`, and cast it."""
    is_array(name, x)
    few_axes(name, x, 32)
    if not is_numpy_array(x):
        same_home(name, x, "q", like)
    if not array_namespace(x).isdtype(x.dtype, "real floating"):
        raise TypeError(f"`{name}` must have a real floating dtype, got {x.dtype}.")
    return constant(x, like)


def per_head(name: str, x: Any, like: Array) -> Array:
    """Bring a number, or numbers (...) for rows (..., n, d), to the library of `like`."""
    if isinstance(x, Real) and not isinstance(x, bool):
        x = np.asarray(real(name, x, like=like))
    values = _floats(name, x, like)
    broadcasts(name, x, _shape(like)[:-2], "(...)")
    if is_numpy_array(x) and not np.all(np.isfinite(x)):
        raise ValueError(f"`{name}` must be finite, got nan or inf.")
    return values


def pair(name: str, values: Any, likes: tuple[Array, Array]) -> list[Array]:
    """Bring two of what `per_head` takes to the library of two arrays."""
    if not isinstance(values, Sequence) or len(values) != 2:
        raise TypeError(f"`{name}` must be a pair, for q and for k, got {describe(values)}.")
    return [per_head(name, x, like) for x, like in zip(values, likes, strict=True)]


def host(name: str, x: Any, rule: str, min_ndim: int, dtype: Any = np.float64) -> Any:
    """Turn host data into an array of finite numbers with at least `min_ndim` axes."""
    whole(name, x)
    values = to_host(x, None) if is_array_api_obj(x) else np.asarray(x)
    few_axes(name, values)
    if values.dtype.kind not in "fiu":
        raise TypeError(f"`{name}` must hold real numbers, got {describe(x)} of {values.dtype}.")
    values = values.astype(dtype)
    if values.ndim < min_ndim or 0 in values.shape[-min_ndim:]:
        raise ValueError(f"`{name}` must have shape {rule}, got {values.shape}.")
    if not np.all(np.isfinite(values)):
        raise ValueError(f"`{name}` must be finite, got nan or inf.")
    return values


def integers(name: str, x: Any, rule: str, ndim: int) -> Any:
    """Turn host data, or an array of any library, into integers with so many axes."""
    whole(name, x)
    x = _as_array(name, x, rule)
    values = x if is_numpy_array(x) else to_host(x, None)
    if values.size and values.dtype.kind not in "iu":
        raise TypeError(f"`{name}` must hold integers, got {describe(x)} of {values.dtype}.")
    if values.ndim != ndim:
        raise ValueError(f"`{name}` must have shape {rule}, got {values.shape}.")
    return values.astype(np.int64)


def _as_array(name: str, x: Any, rule: str) -> Array:
    """Turn lists of numbers into an array of NumPy."""
    try:
        return x if is_array_api_obj(x) else np.asarray(x)
    except ValueError:
        raise ValueError(
            f"`{name}` must have shape {rule}, got lists of several lengths."
        ) from None


def whole(name: str, x: Any) -> None:
    """Check that nothing is hidden in host data: a conversion would drop the mask of numpy.ma."""
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"`{name}` must have no hidden entries, got {describe(x)}.")


def squares(name: str, x: Any) -> None:
    """Check that the squared norms of host vectors (..., d) are representable."""
    with np.errstate(over="ignore"):
        largest = np.max(np.sum(x * x, axis=-1), initial=0.0)
    if not np.isfinite(largest):
        raise ValueError(
            f"`{name}` must have squared norms that float64 can hold, in kernel coordinates, got "
            f"an entry of size {np.max(np.abs(x)):.3g}."
        )


def symmetric(name: str, x: Any, d: int, tolerance: float = 1e-8) -> None:
    """Check symmetric matrices (..., d, d) on the host."""
    square(name, x, d)
    apart = np.abs(x - np.swapaxes(x, -1, -2))
    largest = np.max(np.abs(x), axis=(-2, -1), keepdims=True)
    if np.any(apart > tolerance * largest):
        raise ValueError(
            f"`{name}` must be symmetric, got a mirrored pair {np.max(apart):.3g} apart."
        )


def semidefinite(name: str, cov: Any, d: int) -> None:
    """Check covariances (..., d, d) of rows on the host, up to rounding in float32."""
    symmetric(name, cov, d, tolerance=1e-4)
    values = np.linalg.eigvalsh(cov)
    if np.any(values[..., 0] < -1e-4 * np.max(np.abs(values), axis=-1, initial=0.0)):
        raise ValueError(
            f"`{name}` must be positive semidefinite, got an eigenvalue {np.min(values):.3g}."
        )


def covariance(name: str, cov: Any, d: int) -> None:
    """Check symmetric positive definite matrices (..., d, d) on the host."""
    symmetric(name, cov, d)
    smallest = np.linalg.eigvalsh(cov)[..., 0]
    if np.any(smallest <= 0):
        head = np.unravel_index(np.argmin(smallest), smallest.shape)
        where = f"head {tuple(int(i) for i in head)} has " if head else ""
        raise ValueError(
            f"`{name}` must be positive definite, got a matrix that is not: {where}smallest "
            f"eigenvalue {np.min(smallest):.3g}."
        )


def square(name: str, x: Any, d: int | None = None) -> None:
    """Check the shape of square matrices (..., d, d)."""
    d = x.shape[-1] if d is None else d
    if x.shape[-2:] != (d, d):
        raise ValueError(f"`{name}` must have shape (..., {d}, {d}), got {x.shape}.")


def invertible(name: str, x: Any, d: int) -> None:
    """Check square matrices (..., d, d) that have an inverse, on the host."""
    square(name, x, d)
    try:
        np.linalg.inv(x)  # a singular value of 0 may be rounded, on some machines
    except np.linalg.LinAlgError:
        raise ValueError(f"`{name}` must be invertible, got a singular matrix.") from None


def real(
    name: str,
    value: Any,
    *,
    positive: bool = False,
    optional: bool = False,
    like: Array | None = None,
) -> Any:
    """Check a finite real number and return it as a float; None stays None if `optional`.

    A float means the number that it is, to the last bit. Where `like` is a longdouble array, the
    number stays one of that precision.
    """
    if value is None and optional:
        return None
    kind = "positive finite real number" if positive else "finite real number"
    kind += " or None" if optional else ""
    if isinstance(value, bool | np.bool_) or not isinstance(value, Real):
        raise TypeError(f"`{name}` must be a {kind}, got {describe(value)}.")
    wide = like is not None and is_numpy_array(like) and like.dtype == np.longdouble
    try:
        result: Any = _longdouble(value) if wide else float(value)
    except (OverflowError, ValueError):  # of integers with too many digits
        result = math.inf
    if not np.isfinite(result) or (positive and result <= 0):
        raise ValueError(f"`{name}` must be a {kind}, got {number(value)}.")
    return result


def parts(name: str, x: Any) -> None:
    """Check a pair of arrays that stands for their sum."""
    if len(x) != 2:
        raise TypeError(f"`{name}` must be an array or a pair (hi, lo), got {describe(x)}.")
    for part, y in zip(("hi", "lo"), x, strict=True):
        is_array(f"{name}.{part}", y)
        if y.dtype != array_namespace(y).float64:
            raise TypeError(f"`{name}.{part}` must have dtype float64, got {y.dtype}.")
    same_home(f"{name}.lo", x[1], f"{name}.hi", x[0])
    if _shape(x[0]) != _shape(x[1]):
        raise ValueError(
            f"`{name}.lo` must have the shape of `{name}.hi`, "
            f"got shapes {_shape(x[1])} and {_shape(x[0])}."
        )


def double(x: Array, name: str = "q") -> None:
    """Check that numbers fit into float64."""
    if is_numpy_array(x) and x.dtype.itemsize > 8:
        raise TypeError(f"`{name}` must have dtype float32 or float64, got {x.dtype}.")


def softcap(value: Any, like: Array) -> Any:
    """Check a cap, and bring it to where it and its inverse are normal in the dtype of an array.

    Larger ones cap no score of less than its inverse precision, and smaller ones leave no score.
    """
    cap = real("softcap", value, positive=True, optional=True, like=like)
    if cap is None:
        return None
    info = array_namespace(like).finfo(like.dtype)
    least, most = 4 * float(info.smallest_normal), float(info.eps / info.smallest_normal)
    return cap if least <= cap <= most else min(max(float(cap), least), most)


def _longdouble(value: Any) -> Any:
    """Convert a number to longdouble; NumPy takes fractions through float64."""
    if isinstance(value, Rational):
        return np.longdouble(value.numerator) / np.longdouble(value.denominator)
    return np.longdouble(value)


def generator(rng: Any) -> np.random.Generator:
    """Check a source of randomness and return its generator."""
    try:
        return np.random.default_rng(rng)
    except (TypeError, ValueError) as error:
        raise type(error)(
            "`rng` must be None, a non-negative integer, a Generator or what else "
            f"numpy.random.default_rng takes, got {describe(rng)}."
        ) from None


def positive_integer(name: str, value: Any) -> None:
    """Check an integer of at least 1."""
    _integer(name, value, 1, "positive integer")


def length(name: str, value: Any, size: int = 1) -> None:
    """Check how many rows, each of `size` floats, an array is to have."""
    positive_integer(name, value)
    at_most(name, value, sys.maxsize // (8 * max(size, 1)), "what memory has addresses for")


def at_most(name: str, value: Any, most: int, rule: str) -> None:
    """Check an upper limit, which `rule` explains."""
    if value > most:
        raise ValueError(f"`{name}` must be at most {number(most)}, {rule}, got {number(value)}.")


def non_negative_integer(name: str, value: Any) -> None:
    """Check an integer of at least 0."""
    _integer(name, value, 0, "non-negative integer")


def _integer(name: str, value: Any, least: int, kind: str) -> None:
    if isinstance(value, bool | np.bool_) or not isinstance(value, Integral):
        raise TypeError(f"`{name}` must be a {kind}, got {describe(value)}.")
    if value < least:
        raise ValueError(f"`{name}` must be a {kind}, got {number(value)}.")
    at_most(name, value, 10**308, "what float64 holds")


def flag(name: str, value: Any) -> None:
    """Check a Python bool: it chooses between computations, so it must not be an array."""
    if not isinstance(value, bool):
        raise TypeError(f"`{name}` must be True or False, got {describe(value)}.")


def names(argument: str, given: Any) -> list[str]:
    """Check an iterable of names, or one name."""
    if isinstance(given, str):
        return [given]
    if not isinstance(given, Iterable):
        raise TypeError(f"`{argument}` must be an iterable of names, got {type(given).__name__}.")
    found = list(given)
    for name in found:
        if not isinstance(name, str):
            raise TypeError(f"`{argument}` must hold names only, got {type(name).__name__}.")
    return found


def choice(name: str, value: Any, options: Iterable[str]) -> None:
    """Check a name against the names that exist."""
    options = sorted(options)
    if not isinstance(value, str):
        raise TypeError(f"`{name}` must be a string, got {describe(value)}.")
    if value not in options:
        listed = ", ".join(f'"{option}"' for option in options)
        hint = close(value, options)
        raise ValueError(f"`{name}` must be one of {listed}, got {value!r}.{hint}")


def _shape(x: Array) -> tuple[int, ...]:
    return tuple(x.shape)


def describe(x: Any) -> str:
    """Name the type of a value, with the value where it is short."""
    kind = type(x)
    if is_array_api_obj(x):
        return f"{kind.__module__}.{kind.__qualname__}"
    value = f"{number(x)} of type " if isinstance(x, str | int | float) else ""
    return value + kind.__qualname__


def number(x: Any, spec: str = "") -> str:
    """Show a value; of a long integer its size: Python refuses to print the longest."""
    whole = int(x.numerator) // int(x.denominator) if isinstance(x, Rational) else 0
    if abs(whole) < 10**20:
        return repr(x) if isinstance(x, str) else format(x, spec)
    return f"about {'-' if whole < 0 else ''}10**{math.log10(abs(whole)):.0f}"
