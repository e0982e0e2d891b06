"""Turn arrays into those of a library and back: layouts in memory, and gradients by torch."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np

from ....arrays.library import Floats


def lay_out(x: Any, layout: str | None) -> Any:
    """Lay out an array of NumPy or torch otherwise in memory."""
    if layout is None or x.ndim < 2:
        return x
    if layout == "read-only":
        if isinstance(x, np.ndarray):
            x.flags.writeable = False
        return x
    xp = import_module(type(x).__module__.partition(".")[0])
    if layout == "expanded":  # where all numbers are one
        return xp.broadcast_to(x[(slice(0, 1),) * x.ndim], x.shape)
    if layout == "reversed":
        return np.flip(np.flip(x, -2).copy(), -2)
    if layout in ("transposed", "heads inside"):
        i, j = (-2, -1) if layout == "transposed" else (max(-3, -x.ndim), -2)
        shape = list(x.shape)
        shape[i], shape[j] = shape[j], shape[i]
        # Written in one order of axes and read in another: the strides differ, not the numbers.
        room = xp.swapaxes(xp.zeros(tuple(shape), dtype=x.dtype), i, j)
        room[...] = x
        return room
    room = xp.zeros((*x.shape[:-1], 2 * x.shape[-1]), dtype=x.dtype)
    # Every other number: a view that is not contiguous along its last axis.
    room[..., ::2] = x
    return room[..., ::2]


def receive(x: Any) -> Floats:
    """Turn a result into a NumPy array, halves in float32."""
    # A tensor that is on a tape, or on a device, is no array of NumPy.
    if hasattr(x, "detach"):
        x = x.detach().cpu()
    if str(getattr(x, "dtype", "")).endswith(("bfloat16", "float16")):
        x = x.float() if hasattr(x, "float") else x.astype(np.float32)
    if type(x).__module__.startswith("cupy"):
        x = x.get()
    return np.asarray(x)


def pull_by_torch(call: Callable[..., Any], sent: list[Any], d_out: Any, way: Any) -> Any:
    """Return the output and cotangents by torch.

    Each input "alone", "again" through one graph, or with "crossed" calls.
    """
    torch = import_module("torch")

    def forth(wanted: range) -> tuple[Any, list[Any]]:
        inputs = [x.detach() for x in sent]
        inputs = [x.requires_grad_() if i in wanted else x for i, x in enumerate(inputs)]
        return call(*inputs), [inputs[i] for i in wanted]

    def back(out: Any, inputs: list[Any]) -> list[Any]:
        # The graph is kept, as "again" goes through it twice.
        grads = torch.autograd.grad(out, inputs, d_out, allow_unused=True, retain_graph=True)
        pairs = zip(grads, inputs, strict=True)
        # An input that the result does not depend on has no gradient in torch, which is 0.
        return [torch.zeros_like(x) if g is None else g for g, x in pairs]

    out, leaves = forth(range(len(sent)))
    if way == "alone":
        return (out, *(back(*forth(range(i, i + 1)))[0] for i in range(len(sent))))
    if way == "again":
        back(out, leaves)
    if way == "crossed":
        call(*(2 * x.detach() for x in sent))
    return (out, *back(out, leaves))
