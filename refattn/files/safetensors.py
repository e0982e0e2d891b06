"""Read safetensors files into NumPy arrays, without the package of that name."""

from __future__ import annotations

import json
import os
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..arrays.words import one_word
from .contents import must_have_axes

_NUMPY_TYPES = {"BOOL": "?", "C64": "<c8"}
_NUMPY_TYPES |= {f"{kind}{8 * n}": f"<{kind.lower()}{n}" for kind in "IU" for n in (1, 2, 4, 8)}
_NUMPY_TYPES |= {f"F{8 * n}": f"<f{n}" for n in (2, 4, 8)}
_BFLOAT16 = "BF16"


class Tensor(NamedTuple):
    """A tensor in a file: its dtype as the format writes it, its shape, and its bytes."""

    dtype: str
    shape: tuple[int, ...]
    raw: npt.NDArray[np.uint8]

    def view(self, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """See the bytes as an array, without copying them."""
        return self.raw.view(dtype).reshape(self.shape)

    def type_name(self) -> str:
        """Name the dtype as NumPy does, and bfloat16; else as the format does."""
        if self.dtype == _BFLOAT16:
            return "bfloat16"
        return np.dtype(_NUMPY_TYPES[self.dtype]).name if self.dtype in _NUMPY_TYPES else self.dtype

    def numbers(self, name: str) -> npt.NDArray[Any]:
        """Copy the numbers; those in bfloat16 into float32, which has them all."""
        if self.dtype == _BFLOAT16:  # the upper half of a float32
            return (self.view("<u2").astype(np.uint32) << 16).view(np.float32)
        if self.dtype not in _NUMPY_TYPES:
            raise TypeError(
                f"`{name}` must have a dtype that NumPy has, or bfloat16, got {self.dtype}: "
                "cast it before it is written."
            )
        dtype = np.dtype(_NUMPY_TYPES[self.dtype])
        return self.view(dtype).astype(dtype.newbyteorder("="))


def map_tensors(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Map the tensors of a file into memory, and read its metadata.

    The safetensors package checks the file, but gives NumPy neither parts of tensors in 8 bits
    nor, without another package, any in bfloat16. A damaged file is a ValueError.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy"):
            raw = np.asarray(np.memmap(path, np.uint8, mode="r"))
    except SafetensorError as error:
        raise ValueError(f"not a complete .safetensors file ({error})") from None
    start = 8 + int.from_bytes(raw[:8].tobytes(), "little")
    header = json.loads(raw[8:start].tobytes(), object_pairs_hook=_without_twins)
    metadata = header.pop("__metadata__", None) or {}
    tensors = {}
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        must_have_axes(one_word(name), entry["shape"])
        part = raw[start + first : start + last]
        tensors[one_word(name)] = Tensor(entry["dtype"], tuple(entry["shape"]), part)
    return tensors, metadata


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object of JSON, if each name stands there once."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twin = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two entries of the name {one_word(twin)!r}")
    return found


def read_tensors(
    path: str | os.PathLike[str],
) -> tuple[dict[str, npt.NDArray[Any]], dict[str, str]]:
    """Read the tensors of a file, and its metadata.

    Tensors in bfloat16 come in float32.
    """
    tensors, metadata = map_tensors(path)
    return {name: tensors[name].numbers(name) for name in sorted(tensors)}, metadata
