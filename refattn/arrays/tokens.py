"""Checks of what tokens do to a state: decays, removals, writes and the state itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from . import checks, qkv
from .checks import shape_of
from .heads import grouped_lead
from .library import Array, array_namespace, constant, device

_GATES = ("log_decay", "removal", "write", "initial_state")


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
    (n, d), d_v, given = k.shape[-2:], v.shape[-1], {x: options.get(x) for x in _GATES}
    if q.shape[-2] != n:
        raise ValueError(
            "`q` and `k` must have next-to-last axes of one length, the number of tokens n, "
            f"got shapes {shape_of(q)} and {shape_of(k)}."
        )
    checks.choice("read", options.get("read", "after"), ("after", "before"))
    scale = checks.real("scale", options.get("scale"), optional=True, like=q)
    g, pair, write, state = given.values()
    if pair is not None and (not isinstance(pair, tuple | list) or len(pair) != 2):
        raise TypeError(f"`removal` must be a pair (a, b) of arrays, got {checks.describe(pair)}.")
    a, b = (None, None) if pair is None else pair
    home = {"dtype": k.dtype, "device": device(k)}
    g = xp.zeros((n, 1), **home) if g is None else of_tokens("log_decay", g, (q, k, v), True)
    write = None if write is None else of_tokens("write", write, (q, k, v))
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
        named = {"k": k, "v": v, **{x: y for x, y in given.items() if y is not None}}
        shapes = ", ".join(f"{name} {_shape(x)}" for name, x in named.items())
        raise ValueError(f"`k` and what goes with it must broadcast, got {shapes}.") from None
    state = xp.zeros((1, 1), **home) if state is None else state
    k, state = xp.broadcast_to(k, (*lead, n, d)), xp.broadcast_to(state, (*lead, d, d_v))
    grouped_lead(q, k, v)
    return k, Gates(g, a, b, write, state), constant(d, q) ** -0.5 if scale is None else scale, xp


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
        rule = "(..., n) or (..., n, d)" if coordinates else "(..., n)"
        raise ValueError(
            f"`{name}` must have shape {rule} with n, d = {n, d} and with {axes - 2} axes before "
            f"them, as many as `q`, `k` and `v` have at most, got {shape_of(x)}."
        )
    try:
        np.broadcast_shapes(shape_of(x)[: axes - 2], *(shape_of(y)[:-2] for y in qkv[1:]))
    except ValueError:
        shapes = ", ".join(map(str, map(shape_of, (x, *qkv[1:]))))
        raise ValueError(
            f"`{name}`, `k` and `v` must have leading axes that broadcast, got shapes {shapes}."
        ) from None
    x = x if wide else x[..., None]
    return array_namespace(x).broadcast_to(x, (*x.shape[:-2], n, x.shape[-1]))
