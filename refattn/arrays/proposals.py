"""Checks of proposals: the laws that frequencies are drawn from."""

from __future__ import annotations

from typing import Any

import numpy as np


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
