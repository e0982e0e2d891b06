"""What the inputs of cases are drawn from."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ...arrays.library import Floats
from .cases import DTYPE_FACTS, Convention

Edit = Callable[[dict[str, Floats]], dict[str, Any]]


class Recipe(NamedTuple):
    """A case without its outputs."""

    id: str
    estimator: str
    comment: str
    flags: tuple[str, ...]
    arguments: dict[str, Any]
    dtype: str
    inputs: dict[str, Floats]
    file: str
    group: str
    convention: Convention | None = None


@dataclass(frozen=True)
class Drawn:
    """What is drawn: how many of what, in numbers of which dtype and how large."""

    n: int = 4
    m: int = 6
    d: int = 4
    d_v: int = 3
    count: int = 5  # frequencies
    heads: tuple[int, ...] = ()
    key_heads: tuple[int, ...] = ()
    omega_heads: tuple[int, ...] = ()
    cotangents: tuple[str, ...] = ()
    dtype: str = "float32"
    size: float | None = None  # of queries and keys, or of the vectors of a kernel

    def shapes(self, *names: str) -> dict[str, tuple[int, ...]]:
        """Return shapes of queries, keys, values or cotangents."""
        sizes = {
            "q": (*self.heads, self.n, self.d),
            "k": (*self.key_heads, self.m, self.d),
            "v": (*self.key_heads, self.m, self.d_v),
            "d_out": (*self.heads, self.n, self.d_v),
            "d_lse": (*self.heads, self.n),
        }
        return {name: sizes[name] for name in names}

    @property
    def plain(self) -> float:
        """The size of all else."""
        return 1.0 if self.dtype.endswith("16") else 2.0


def draw_stream(name: str, shape: tuple[int, ...], dtype: str, size: float) -> Floats:
    """Draw from a grid of [-size, size) with as many bits as the dtype has; size is 2^p."""
    bits = DTYPE_FACTS[dtype][0]
    raw = np.random.PCG64(zlib.crc32(name.encode())).random_raw(math.prod(shape))
    steps = (raw >> np.uint64(64 - bits)).astype(np.int64) - 2 ** (bits - 1)
    return np.asarray(steps.reshape(shape) * (size * 2.0 ** (1 - bits)))


def draw_inputs(
    label: str, drawn: Drawn, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Floats]:
    """Draw the inputs of a case."""
    return {name: draw_input(label, drawn, name, shape) for name, shape in shapes.items()}


def draw_input(label: str, drawn: Drawn, name: str, shape: tuple[int, ...]) -> Floats:
    """Draw an input of a case: queries and keys have the size that is asked for."""
    size = drawn.size if name in "qk" and drawn.size is not None else drawn.plain
    return draw_stream(f"{label}/{name}", shape, drawn.dtype, size)


def round_to_single(x: Floats, dtype: str) -> Floats:
    """Round to float32 what is drawn for a narrower dtype than float64."""
    return x if x.dtype == bool or dtype == "float64" else x.astype(np.float32).astype(np.float64)


def hide_some(*shape: int) -> Floats:
    """Hide every third and every fifth key, others from each query."""
    index = np.arange(math.prod(shape)).reshape(shape)
    return np.asarray((index % 3 != 1) & (index % 5 != 3))


def unchanged(x: dict[str, Floats]) -> dict[str, Any]:
    """Replace nothing."""
    return {}
