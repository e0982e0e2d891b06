"""Check the arguments of recurrences: decays, removals, write factors and initial states."""

from __future__ import annotations

from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from . import checks, qkv
from .checks import shape_of
from .heads import grouped_lead
from .library import Array, array_namespace, constant, device, untraced


class RecurrenceOptions(NamedTuple):
    """What a recurrence takes beside queries, keys and values, as in `recurrent_attention`."""

    log_decay: Array | None = None  # (..., n) or (..., n, d)
    removal: Any = None  # a pair, (..., n, d) each
    write: Array | None = None  # (..., n)
    initial_state: Array | None = None  # (..., d, d_v)
    scale: float | None = None
    read: str = "after"


class Gates(NamedTuple):
    """What tokens do beside keys and values, with axes of tokens and coordinates."""

    log_decay: Array  # (..., n, d or 1)
    a: Array | None  # (..., n, d)
    b: Array | None
    write: Array | None  # (..., n, 1)
    state: Array  # (..., d, d_v), with all leading axes of what writes to it


def check(
    q: Array, k: Array, v: Array, given: RecurrenceOptions
) -> tuple[Array, Array, Gates, Any, Any]:
    """Check arguments of a recurrence; return queries, keys, gates, the scale and the namespace.

    Keys and the state get the leading axes of all but the queries.
    """
    (q, k, xp), whole = _shared(q, k, v), (q, k, v)
    (n, d), d_v = k.shape[-2:], v.shape[-1]
    if q.shape[-2] != n:
        raise ValueError(
            "`q` and `k` must have next-to-last axes of one length, the number of tokens n, "
            f"got shapes {shape_of(whole[0])} and {shape_of(whole[1])}."
        )
    g, pair, write, state, scale, read = given
    checks.choice("read", read, ("after", "before"))
    scale = checks.real("scale", scale, optional=True, like=q)
    if pair is not None and (not isinstance(pair, tuple | list) or len(pair) != 2):
        raise TypeError(f"`removal` must be a pair (a, b) of arrays, got {checks.describe(pair)}.")
    a, b = (None, None) if pair is None else pair
    home = {"dtype": k.dtype, "device": device(k)}
    g = xp.zeros((n, 1), **home) if g is None else of_tokens("log_decay", g, whole, True)
    write = None if write is None else of_tokens("write", write, whole)
    cores = [(f"removal[{i}]", x, "(..., n, d)", (n, d)) for i, x in enumerate(pair or ())]
    if state is not None:
        cores.append(("initial_state", state, "(..., d, d_v)", (d, d_v)))
    for name, x, rule, core in cores:
        checks.arrays(2, k=k, **{name: x})
        if shape_of(x)[-2:] != core:
            raise ValueError(
                f"`{name}` must have shape {rule} = (..., {core[0]}, {core[1]}), got {shape_of(x)}."
            )
    try:
        parts = (x for x in (k, v, g, a, b, write, state) if x is not None)
        lead = np.broadcast_shapes(*(shape_of(x)[:-2] for x in parts))
    except ValueError:
        gates = zip(given._fields[:4], given, strict=False)
        named = {"k": whole[1], "v": v, **{x: y for x, y in gates if y is not None}}
        shapes = ", ".join(f"{name} {_shape(x)}" for name, x in named.items())
        raise ValueError(
            f"`k` and these arrays must have leading axes that broadcast, got {shapes}"
            f"{_sharing(whole[1], v)}."
        ) from None
    state = xp.zeros((1, 1), **home) if state is None else state
    k, state = xp.broadcast_to(k, (*lead, n, d)), xp.broadcast_to(state, (*lead, d, d_v))
    b = None if b is None else xp.broadcast_to(b, (*lead, n, d))
    grouped_lead(q, k, v)
    scale = constant(d, q) ** -0.5 if scale is None else scale
    return q, k, Gates(g, a, b, write, state), scale, xp


def _shared(q: Array, k: Array, v: Array) -> tuple[Array, Array, Any]:
    """Check queries, keys and values; return queries and keys as `share_heads` does, and xp."""
    queries, keys = share_heads(q, k, v)
    try:
        xp, _ = qkv.check(queries, keys, v)
    except ValueError:
        qkv.check(q, k, v)  # raises first, with the shapes that were given
        raise
    return queries, keys, xp


def share_heads(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    """Repeat heads of keys, and of as many queries, that consecutive heads of values share."""
    each = _sharers(k, v)
    if each == 1:
        return q, k
    groups = k.shape[-3]

    def repeat(x: Array) -> Array:
        if getattr(x, "ndim", 0) < 3 or x.shape[-3] != groups:
            return x
        xp, (*lead, _, n, d) = array_namespace(x), x.shape
        copies = xp.broadcast_to(x[..., None, :, :], (*lead, groups, each, n, d))
        return xp.reshape(copies, (*lead, groups * each, n, d))

    return repeat(q), repeat(k)


def _sharers(k: Array, v: Array) -> int:
    """Return how many heads of values share a head of keys."""
    groups, heads = (x.shape[-3] if getattr(x, "ndim", 0) > 2 else 1 for x in (k, v))
    return 1 if not 1 < groups < heads or heads % groups else heads // groups


def _sharing(k: Array, v: Array) -> str:
    each = _sharers(k, v)
    return f", where {each} heads of `v` share one of `k`" if each > 1 else ""


def one_of_each(states: Array, axes: int) -> tuple[Any, ...]:
    """Say where the states of key heads are among those of queries, of which some share one."""
    return *[0] * (axes - states.ndim), *(slice(0, length) for length in states.shape)


def _shape(x: Any) -> Any:
    return tuple(map(shape_of, x)) if isinstance(x, tuple | list) else shape_of(x)


def of_tokens(
    name: str, x: Array, qkv: tuple[Array, Array, Array], coordinates: bool = False
) -> Array:
    """Bring a number for each token, (..., n), to (..., n, 1), and for each coordinate too.

    The number of axes tells which it is: as many as queries, keys and values have, or one less.
    """
    checks.arrays(1, k=qkv[1], **{name: x})
    (n, d), axes = qkv[1].shape[-2:], max(y.ndim for y in qkv)
    wide = coordinates and x.ndim == axes
    got = shape_of(x)[-2:] if wide else shape_of(x)[-1:]
    if x.ndim != axes - (not wide) or got[0] not in (1, n) or got[1:] not in ((), (1,), (d,)):
        rule = f"(..., n), with n = {n}"
        if coordinates:
            rule = f"(..., n) or (..., n, d), with n = {n}, d = {d}"
        raise ValueError(
            f"`{name}` must have shape {rule}, and as many leading axes as `q`, `k` and `v`, "
            f"{axes - 2}, got {shape_of(x)}."
        )
    k, v = qkv[1:]
    lead = shape_of(k)[:-2] if _sharers(k, v) == 1 else (*shape_of(k)[:-3], v.shape[-3])
    try:
        np.broadcast_shapes(shape_of(x)[: axes - 2], lead, shape_of(v)[:-2])
    except ValueError:
        shapes = ", ".join(map(str, map(shape_of, (x, k, v))))
        raise ValueError(
            f"`{name}`, `k` and `v` must have leading axes that broadcast, got shapes {shapes}"
            f"{_sharing(k, v)}."
        ) from None
    x = x if wide else x[..., None]
    return array_namespace(x).broadcast_to(x, (*x.shape[:-2], n, x.shape[-1]))


def log_decay_of_heads(q: Array, k: Array, v: Array, decay: Any) -> Array:
    """Take the log of a number for each head of keys, with an axis of tokens."""
    q, k, xp = _shared(q, k, v)
    lead = grouped_lead(k, k, v)
    gamma = qkv.per_head("decay", decay, xp.broadcast_to(k, (*lead, *k.shape[-2:])))
    values = untraced(decay)
    host = isinstance(values, Real | np.ndarray)
    if host and np.any(values < 0):
        raise ValueError(f"`decay` must not be negative, got {np.min(values)}.")
    missing = max(0, q.ndim - 2 - len(lead))
    return xp.broadcast_to(xp.log(gamma), (*(1,) * missing, *lead))[..., None]


def delta_gates(
    q: Array, k: Array, v: Array, beta: Array, log_decay: Array | None = None
) -> dict[str, Any]:
    """Make the gates of a delta rule, which takes its error after the decay."""
    (q, k, xp), whole = _shared(q, k, v), (q, k, v)
    rate, later = of_tokens("beta", beta, whole), k
    if log_decay is not None:
        g = of_tokens("log_decay", log_decay, whole, coordinates=True)
        later = xp.exp(g) * k
    return {"removal": (-rate * k, later), "write": beta, "log_decay": log_decay}
