"""Reading safetensors files into NumPy arrays."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Any

import numpy.typing as npt

__all__ = ["read"]

_NUMPY = re.compile("BOOL|[UI](8|16|32|64)|F(16|32|64)|C64")


def read(
    path: str | os.PathLike[str], names: Iterable[str] | None = None
) -> tuple[dict[str, npt.NDArray[Any]], dict[str, str]]:
    """Read the tensors of a file, or those of the names that it has, and its metadata.

    Raises
    ------
    ModuleNotFoundError
        If safetensors is not installed.
    TypeError
        If a tensor is of a dtype that NumPy does not have.
    ValueError
        If the file is damaged.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            there = list(file.keys())
            chosen = [name for name in names or sorted(there) if name in there]
            for name in chosen:
                dtype = file.get_slice(name).get_dtype()
                if not _NUMPY.fullmatch(dtype):
                    raise TypeError(
                        f"`{name}` must have a dtype that NumPy has, float32 or float64, got "
                        f"{dtype}: cast it before it is written."
                    )
            return {name: file.get_tensor(name) for name in chosen}, file.metadata() or {}
    except SafetensorError as error:
        raise ValueError(str(error)) from None
