"""Read queries, keys and values from .npz and .safetensors files."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ..arrays import checks, qkv
from ..arrays.library import Floats
from ..arrays.words import name_some, one_word, said
from . import contents, safetensors
from . import sample as files_sample

_Read = TypeVar("_Read")

_SIXTEEN_BITS = ("float16", "bfloat16")  # float32 has all their numbers
_CASTS = "(--dtype casts floating-point arrays.)"

INSTALL = "needs `pip install 'refattn[cli]'`"


def find_sample() -> Path:
    """Find the data that come with the package."""
    try:
        return files_sample.path()
    except FileNotFoundError as error:
        raise ValueError(f"FILE must be given: {error}.") from None


def load_qkv(
    path: Path, dtype: str | None = None, *, required: str = "qkv", layout: str = "bhnd"
) -> tuple[dict[str, Floats], str]:
    """Read and check q, k and, if the file has it, v; return them, and the dtype of q in the file.

    The file is an .npz (not pickled) or .safetensors; it must have the arrays that are `required`.
    Arrays are all float32 or all float64, finite, of shapes that match, with heads before tokens:
    in layout "bnhd" the file has them after. Floating-point ones are cast to
    `dtype`; without it float16 and bfloat16 become float32.
    """
    arrays, stored = read_file(path, {".npz": _read_npz_qkv, ".safetensors": _read_tensor_qkv})
    must_hold(path, arrays, required)
    arrays = {name: arrays[name] for name in "qkv" if name in arrays}  # in this order
    if dtype is None and {*stored.values()} & {*_SIXTEEN_BITS}:
        for name, narrow in stored.items():
            if narrow != stored["q"]:
                rule = f"must have the dtype of `q`, {stored['q']}"
                raise TypeError(f"`{name}` {rule}, got {narrow}. {_CASTS}")
        dtype = "float32"
    if dtype is not None:
        with np.errstate(over="ignore"):
            arrays = {n: x.astype(dtype) if x.dtype.kind == "f" else x for n, x in arrays.items()}
    if layout == "bnhd":
        arrays = {x: np.ascontiguousarray(put_heads_first(x, y)) for x, y in arrays.items()}
    q, k = arrays["q"], arrays["k"]
    try:
        qkv.check(q, k, arrays.get("v", k))
        if q.dtype.itemsize > 8:
            raise TypeError(f"`q` must have dtype float32 or float64, got {q.dtype}.")
    except TypeError as error:
        raise TypeError(f"{error} {_CASTS}") from None
    for name, x in arrays.items():
        if not np.all(np.isfinite(x)):
            raise ValueError(f"`{name}` must be finite in {x.dtype}, got NaN or infinity.")
    return arrays, stored["q"]


def _read_npz_qkv(path: Path) -> tuple[dict[str, Floats], dict[str, str]]:
    arrays, _ = read_npz(path, "qkv")
    return arrays, {name: x.dtype.name for name, x in arrays.items()}


def _read_tensor_qkv(path: Path) -> tuple[dict[str, Floats], dict[str, str]]:
    tensors, _ = safetensors.map_tensors(path)
    there = {name: tensors[name] for name in "qkv" if name in tensors}
    arrays = {name: tensor.numbers(name) for name, tensor in there.items()}
    return arrays, {name: tensor.type_name() for name, tensor in there.items()}


def put_heads_first(name: str, x: Any, core: int = 2) -> Any:
    """View an array of layout (..., tokens, heads, size) with heads before tokens."""
    checks.is_array(name, x)
    axes = ("n, h", "n, h, d")[core - 1]
    if x.ndim <= core:
        raise ValueError(f"`{name}` must have axes (..., {axes}) in bnhd, got shape {x.shape}.")
    return np.swapaxes(x, -core, -core - 1)


def read_file(path: Path, readers: Mapping[str, Callable[[Path], _Read]]) -> _Read:
    """Read a file by the reader of its suffix, .npz or .safetensors."""
    if path.suffix.lower() not in readers:
        raise ValueError(f"FILE must end in .npz or .safetensors, got {str(path)!r}.")
    contents.must_be_a_file(path)
    try:
        return readers[path.suffix.lower()](path)
    except ModuleNotFoundError:
        raise ValueError(f"reading .safetensors {INSTALL}") from None
    except Exception as error:  # parsers of foreign bytes raise all kinds
        words = said(error) or type(error).__name__
        raise ValueError(f"cannot read {str(path)!r}: {words}") from None


def read_npz(path: Path, names: Iterable[str]) -> tuple[dict[str, Floats], list[str]]:
    """Read the arrays of these names, as far as the file has them, and list all names in it.

    Nothing is read before the headers say what it would take.
    """
    with path.open("rb") as stream:  # of its own, NumPy leaves damaged files open
        if not zipfile.is_zipfile(stream):  # np.load would take it for a pickle
            raise ValueError("not a complete .npz archive")
        with zipfile.ZipFile(stream) as archive:
            members = contents.list_members(archive)
            wanted = {name: members[name] for name in names if name in members}
            sizes = {name: contents.read_size(archive, name, x) for name, x in wanted.items()}
            contents.must_fit(sizes, path.stat().st_size)
            arrays = {name: _read_member(archive, name, x) for name, x in wanted.items()}
        return arrays, [one_word(name) for name in members]


def _read_member(archive: zipfile.ZipFile, name: str, member: zipfile.ZipInfo) -> Floats:
    with archive.open(member) as stream:
        try:
            x: Floats = np.lib.format.read_array(stream, allow_pickle=False)
        except ValueError as error:
            raise ValueError(f"`{name}`: {said(error)}") from None
    return x


def must_hold(path: Path, there: Collection[str], required: str) -> None:
    """Check that a file has the arrays of some names of one letter."""
    missing = [name for name in required if name not in there]
    if missing:
        names = f"{', '.join(required[:-1])} and {required[-1]}"
        has = f"no {' and no '.join(missing)}" + (f", but {name_some(there)}" * bool(there))
        raise ValueError(f"FILE must hold arrays {names}: {str(path)!r} has {has}.")
