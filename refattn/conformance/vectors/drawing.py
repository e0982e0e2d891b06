"""What the inputs of cases are drawn from."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ...arrays.library import Floats
from .cases import DTYPES, Convention

__all__ = ["Drawn", "Recipe", "draw"]


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

    @property
    def plain(self) -> float:
        """The size of all else."""
        return 1.0 if self.dtype.endswith("16") else 2.0


def draw(name: str, shape: tuple[int, ...], dtype: str, size: float) -> Floats:
    """Uniform on a grid of [-size, size) with as many bits as the dtype has; size a power of 2."""
    bits = DTYPES[dtype][0]
    raw = np.random.PCG64(zlib.crc32(name.encode())).random_raw(math.prod(shape))
    steps = (raw >> np.uint64(64 - bits)).astype(np.int64) - 2 ** (bits - 1)
    return np.asarray(steps.reshape(shape) * (size * 2.0 ** (1 - bits)))
