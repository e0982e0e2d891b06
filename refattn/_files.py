"""Queries, keys and values in files."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from . import _safetensors, _sample, _validate

__all__ = ["INSTALL", "load", "sample"]

_Array = npt.NDArray[Any]

INSTALL = "needs `pip install 'refattn[cli]'`"


def sample() -> Path:
    """Find the data that come with the package."""
    try:
        return _sample.path()
    except FileNotFoundError as error:
        raise ValueError(f"FILE must be given: {error}.") from None


def load(path: Path, dtype: str | None = None, *, required: str = "qkv") -> dict[str, _Array]:
    """Read and check q, k and v.

    Parameters
    ----------
    path : Path
        File of type .npz (not pickled) or .safetensors.
    dtype : {"float32", "float64"}, optional
        Cast floating-point arrays to this.
    required : {"qkv", "qk"}
        Names of the arrays that must be there.

    Returns
    -------
    dict of arrays
        q, k and, if the file has it, v. All float32 or all float64, finite, with shapes that match.

    Raises
    ------
    TypeError, ValueError
        If the file cannot be used.
    """
    readers = {".npz": _read_npz, ".safetensors": _read_safetensors}
    if path.suffix.lower() not in readers:
        raise ValueError(f"FILE must end in .npz or .safetensors, got {str(path)!r}.")
    try:
        arrays = readers[path.suffix.lower()](path)
    except ModuleNotFoundError:
        raise ValueError(f"reading .safetensors {INSTALL}") from None
    except Exception as error:  # parsers of foreign bytes raise all kinds
        raise ValueError(f"cannot read {str(path)!r}: {error}") from None
    missing = [name for name in required if name not in arrays]
    if missing:
        names = f"{', '.join(required[:-1])} and {required[-1]}"
        raise ValueError(
            f"FILE must hold arrays {names}: {str(path)!r} has no {' and no '.join(missing)}."
        )
    if dtype is not None:
        with np.errstate(over="ignore"):
            arrays = {n: x.astype(dtype) if x.dtype.kind == "f" else x for n, x in arrays.items()}
    arrays = {name: arrays[name] for name in "qkv" if name in arrays}  # in this order
    q, k = arrays["q"], arrays["k"]
    try:
        _validate.attention(q, k, arrays.get("v", k))
        if q.dtype.itemsize > 8:
            raise TypeError(f"`q` must have dtype float32 or float64, got {q.dtype}.")
    except TypeError as error:
        raise TypeError(f"{error} (--dtype casts floating-point arrays.)") from None
    for name, x in arrays.items():
        if not np.all(np.isfinite(x)):
            raise ValueError(f"`{name}` must be finite in {x.dtype}, got NaN or infinity.")
    return arrays


def _read_npz(path: Path) -> dict[str, _Array]:
    if not zipfile.is_zipfile(path):  # np.load would take it for a pickle
        raise ValueError("not a complete .npz archive")
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in "qkv" if name in file}


def _read_safetensors(path: Path) -> dict[str, _Array]:
    return _safetensors.read(path, "qkv")[0]
