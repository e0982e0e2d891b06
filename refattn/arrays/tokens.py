"""Checks of what tokens do to a state: decays, removals, writes and the state itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, get_args

from ..typing import Read
from . import checks, qkv
from .checks import shape_of
from .heads import broadcast_lead
from .library import Array, array_namespace, constant, device


class Gates(NamedTuple):
    """What tokens do beside keys and values, with axes of tokens and coordinates."""

    log_decay: Array  # (..., n, d or 1)
    a: Array | None  # (..., n, d)
    b: Array | None
    write: Array | None  # (..., n, 1)
    state: Array  # (..., d, d_v), with all leading axes of what writes to it


def check(
    q: Array, k: Array, v: Array, options: Mapping[str, Any]
) -> tuple[Array, Gates, Any, Any]:
    """Check the arguments of a recurrence; return keys, gates, the scale and the namespace.

    Keys and the state get the leading axes of all but the queries.
    """
    xp, _ = qkv.check(q, k, v)
    (n, d), d_v = k.shape[-2:], v.shape[-1]
    if q.shape[-2] != n:
        raise ValueError(
            "`q` and `k` must have next-to-last axes of one length, the number of tokens n, "
            f"got shapes {shape_of(q)} and {shape_of(k)}."
        )
    checks.choice("read", options.get("read", "after"), get_args(Read))
    scale = checks.real("scale", options.get("scale"), optional=True, like=q)
    g, write, state = (options.get(x) for x in ("log_decay", "write", "initial_state"))
    a, b = _of_removal(options.get("removal"))
    if g is None:
        g = xp.zeros((n, 1), dtype=k.dtype, device=device(k))
    else:
        g = of_tokens("log_decay", g, (q, k, v), coordinates=True)
    if write is not None:
        write = of_tokens("write", write, (q, k, v))
    for name, x in (("removal[0]", a), ("removal[1]", b)):
        if x is None:
            continue
        checks.arrays(2, k=k, **{name: x})
        if shape_of(x)[-2:] != (n, d):
            raise ValueError(
                f"`{name}` must have shape (..., n, d) = (..., {n}, {d}), got {shape_of(x)}."
            )
    if state is not None:
        checks.arrays(2, k=k, initial_state=state)
        if shape_of(state)[-2:] != (d, d_v):
            raise ValueError(
                f"`initial_state` must have shape (..., d, d_v) = (..., {d}, {d_v}), "
                f"got {shape_of(state)}."
            )
    try:
        lead = broadcast_lead(k, v, g, a, b, write, state)
    except ValueError:
        named = {"k": k, "v": v, **{x: options[x] for x in _GATES if options.get(x) is not None}}
        shapes = ", ".join(f"{name} {_shape(x)}" for name, x in named.items())
        raise ValueError(f"`k` and what goes with it must broadcast, got {shapes}.") from None
    if state is None:
        state = xp.zeros((1, 1), dtype=k.dtype, device=device(k))
    state = xp.broadcast_to(state, (*lead, d, d_v))
    k = xp.broadcast_to(k, (*lead, n, d))
    qkv.lead(q, k, v)
    scale = constant(q.shape[-1], q) ** -0.5 if scale is None else scale
    return k, Gates(g, a, b, write, state), scale, xp


_GATES = ("log_decay", "removal", "write", "initial_state")


def _shape(x: Any) -> Any:
    return tuple(map(shape_of, x)) if isinstance(x, tuple | list) else shape_of(x)


def _of_removal(removal: Any) -> tuple[Any, Any]:
    """Check that a removal is a pair (a, b)."""
    if removal is None:
        return None, None
    if not isinstance(removal, tuple | list) or len(removal) != 2:
        raise TypeError(
            f"`removal` must be a pair (a, b) of arrays, got {checks.describe(removal)}."
        )
    return removal[0], removal[1]


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
        rule = "(..., n) or (..., n, d)" if coordinates else "(..., n)"
        raise ValueError(
            f"`{name}` must have shape {rule} with n, d = {n, d} and with {axes - 2} axes before "
            f"them, as many as `q`, `k` and `v` have at most, got {shape_of(x)}."
        )
    x = x if wide else x[..., None]
    return array_namespace(x).broadcast_to(x, (*x.shape[:-2], n, x.shape[-1]))
