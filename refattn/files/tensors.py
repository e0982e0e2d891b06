"""Read attention problems and the results to be judged, head by head."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arrays import checks, frequencies, qkv, tokens
from ..arrays.library import Doubles, Floats
from ..arrays.stored import (
    INTEGER,
    NARROW,
    SCALES,
    expand_scale,
    holds_nearly_all,
    list_types,
    mask_of_members,
    storage_type,
)
from ..arrays.words import ELSEWHERE
from . import safetensors
from .arrays import INSTALL, must_hold, put_heads_first, read_file, read_npz
from .sequences import LAYOUTS, SEQUENCE_ARRAYS, Sequences, take_sequences

_Shape = tuple[int, ...]
_Stored = Mapping[str, Floats | safetensors.Tensor]
_Reader = Callable[[Path], tuple[_Stored, list[str]]]

ARRAYS = ("q", "k", "v", "out", "lse", "mask", "bias", "sinks", "omega", "d_out", "dq", "dk", "dv")
JUDGED = ("out", "lse", "dq", "dk", "dv")
DTYPES = ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2")

_CODES = {"BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
_CODES |= {"F16": "float16", "F32": "float32", "F64": "float64", "BOOL": "bool", "I8": INTEGER}
_MORE = ("index_q", "index_k", "part_out", "part_lse", "part_keys")
_FIRST = ("mask", "bias", "sinks", "omega", "log_weight", "centres", "indices", *_MORE)
# In these, and in the arrays above, heads come first in any layout.
_STATES_FIRST = ("decay", "initial_state", "state")
_FINITE = ("q", "k", "v", *SCALES.values(), "omega", "d_out")
_READ = (*ARRAYS, *SCALES.values())
_OPTIONS = ("causal", "scale", "window", "softcap")  # which no array of a file replaces
_INTEGERS = {"I32": "<i4", "I64": "<i8", "int32": "", "int64": ""}
_WIDE = ("float32", "float64")  # may hold numbers that were rounded
_BLOCK = 1 << 20  # numbers that are looked at together
_CANNOT = (
    "an .npz cannot hold bfloat16 or float8: write float32 numbers and pass `dtype`, "
    "or write a .safetensors"
)
_HINTS = {"void8": _CANNOT, "void16": _CANNOT}
_HINTS |= dict.fromkeys(
    ("uint16", "U16"), "if these are the bits of bfloat16 numbers, write a .safetensors of BF16"
)


class Tensors:
    """Arrays of one attention problem in a file.

    Those in .safetensors stay in the file, which must not change meanwhile: only the heads that
    are asked for are read. Those in .npz are in memory, all of them.
    """

    def __init__(
        self,
        path: Path,
        views: Mapping[str, Floats],
        dtypes: dict[str, str],
        lead: _Shape,
        others: Iterable[str],
        scales: Mapping[str, Doubles] = MappingProxyType({}),
        sequences: Sequences | None = None,
    ) -> None:
        self.path, self.sequences = path, sequences
        self.dtype = storage_type(dtypes)  # that of weights if it was given, or what q holds
        # What each array holds: the type in the file or, if that is float32 or float64 and all its
        # numbers are of it, the narrower one given; "bool" for the mask.
        self.dtypes = {name: x for name, x in dtypes.items() if name in views}
        self.stored = {name: x.dtype.name for name, x in views.items()}  # types in the file
        self.scales = scales  # of q, k and v, where the file has them, with all axes of the array
        self.shapes = {name: x.shape for name, x in views.items()}  # heads before tokens
        self.lead = lead  # axes of query heads, to which leading axes of q, k and v broadcast
        self.others = tuple(sorted(others))  # names of what else the file holds
        self._views = views
        self._cores = dict.fromkeys(views, 2) | {"lse": 1, "sinks": 0}
        self._cores |= {
            "log_weight": 0,
            "indices": 0,
            "beta": 1,
            "write": 1,
            "log_decay": 1,
            "decay": 0,
        }

    def heads(self) -> Iterator[_Shape]:
        """Yield indices of all query heads."""
        yield from np.ndindex(self.lead)

    def index(self, name: str, head: _Shape) -> _Shape:
        """Find where an array holds what a query head reads; shared heads have one place."""
        shape = self.shapes[name]
        own_axes = shape[: max(0, len(shape) - self._cores[name])]
        skipped = len(self.lead) - len(own_axes)
        axes = zip(head[skipped:], own_axes, self.lead[skipped:], strict=True)
        return tuple(i * size // full for i, size, full in axes)

    def read(self, name: str, head: _Shape) -> Floats:
        """Read what a query head uses of an array, in float64; of the mask in bool.

        The axes are (n, d) and the like, (n,) for `lse`, none for `sinks`, and (n, m) for `mask`
        and `bias`, with 1 for an axis along which all are the same.
        """
        return self.part(name, self.index(name, head))

    def part(self, name: str, index: _Shape) -> Floats:
        """Read what is at an index of an array's own leading axes, as `read` does."""
        x = self._views[name][index]
        dtype = bool if name == "mask" else np.float64
        with np.errstate(invalid="ignore"):  # of signalling NaNs
            numbers: Floats = np.array(x, dtype, ndmin=self._cores[name])
        return numbers * self.scales[name][index] if name in self.scales else numbers

    def read_whole(self, names: Iterable[str]) -> dict[str, Any]:
        """Return the arrays of these names that the file has, as it stores them."""
        return {name: np.asarray(self._views[name]) for name in names if name in self._views}


def open_tensors(
    path: str | os.PathLike[str],
    *,
    dtype: str | Mapping[str, str] | None = None,
    layout: str = "bhnd",
    required: Collection[str] = JUDGED,
    also: Collection[str] = (),
    inputs: str | os.PathLike[str] | None = None,
) -> Tensors:
    """Open a file of q, k, v and what was computed of them, and check all but the results.

    With `cu_seqlens`, or `cu_seqlens_q` and `cu_seqlens_k`, sequences lie one after another,
    (tokens, heads, size) and `lse` (heads, tokens), and each sees itself only. With `block_table`
    and `cache_seqlens`, (batch, blocks) and (batch,), `k` and `v` are (blocks, block size, heads,
    size), or (blocks, heads, block size, size) in layout hnd, and all else is of layout bnhd.

    Parameters
    ----------
    path : path-like
        File of type .npz (not pickled) or .safetensors, with arrays q, k, v and any other of
        `ARRAYS`. Query heads may share key heads; `mask` and `bias` (..., n, m) broadcast, and so
        do `sinks` (..., heads). q, k and v, also of int8, are multiplied by `q_scale`, `k_scale`
        and `v_scale`: one number, or one a head, a token or a block.
    dtype : str or dict of str, optional
        What float32 or float64 arrays were rounded to, one of `DTYPES`; or such types by array: q,
        k, v, out, and "weights".
    layout : {"bhnd", "bnhd", "hnd"}
        Whether heads come before tokens, (..., h, n, d), or after them, (..., n, h, d) and `lse`
        (..., n, h), or (..., h, n) where that alone fits. In `mask`, `bias`, `sinks` and `omega`
        they come first in any case. A mask (batch, m) is one of the keys of each member, and `lse`
        may have a last axis of 1.
    required : collection of str
        Names of which the file must have at least one; none, if it is empty.
    also : collection of str
        Names of other arrays that are read, of what tokens do to a state.
    inputs : path-like, optional
        File whose inputs are taken if this one has no `q`: it holds results for the same inputs.
    """
    types = list_types(dtype, DTYPES)
    checks.choice("layout", layout, LAYOUTS)
    path = Path(path)
    readers: dict[str, _Reader] = {
        ".npz": partial(_read_npz, also=also),
        ".safetensors": _read_safetensors,
    }
    stored, names = read_file(path, readers)
    if inputs is not None and "q" not in names:
        beside, _ = read_file(Path(inputs), readers)
        stored = {**{x: y for x, y in beside.items() if x not in JUDGED}, **stored}
        names = [*{*names, *stored}]
    _refuse_other_names(path, names)
    must_hold(path, names, "qkv")
    _check_results(path, stored, required)
    read = {name: _view_array(name, stored[name]) for name in (*_READ, *also) if name in stored}
    laid_out = dict(read)
    sequences = take_sequences(laid_out, stored, layout)
    arrays = {name: x for name, x in laid_out.items() if name not in SCALES.values()}
    if sequences is not None:
        layout = "bnhd"
    views = view_heads_first(arrays, layout)
    if "mask" in views:
        views["mask"] = mask_of_members(views["mask"], *(views[name] for name in "qkv"))
    has_state = "initial_state" in also
    shaped = {x: y for x, y in views.items() if x not in also or has_state}
    try:
        lead = _check_shapes(shaped, has_state)
    except ValueError as error:
        hint = " (Shapes with heads before tokens.)" if layout == "bnhd" else ""
        other = None if sequences is not None else fits_other_layout(arrays, layout, has_state)
        hint += f" These shapes fit --layout {other}." if other else ""
        raise ValueError(f"{error}{hint}") from None
    for name, x in (read | {x: arrays[x] for x in "qkv"}).items():  # no blocks that are not read
        if has_state or name not in "kv":  # in keys that no query sees, these may be anything
            _check_numbers(name, x)
    if isinstance(dtype, Mapping):
        dtypes = _types_by_array(arrays, types)
    else:
        dtypes = _dtypes(arrays, dtype) if dtype is not None else _assume_narrow(arrays)
    scales = _read_scales(laid_out, layout)
    others = set(names) - {*_READ, *also, *SEQUENCE_ARRAYS}
    return Tensors(path, views, dtypes, lead, others, scales, sequences)


def _read_scales(arrays: Mapping[str, Floats], layout: str) -> dict[str, Doubles]:
    """Expand scales to all axes of their arrays, heads before tokens."""
    scales: dict[str, Doubles] = {}
    for name, called in SCALES.items():
        if called in arrays:
            shape = arrays[name].shape
            scale = expand_scale(name, arrays[called].astype(np.float64), shape, layout)
            whole = np.broadcast_to(scale, shape)
            scales[name] = whole if layout == "bhnd" else put_heads_first(name, whole)
    return scales


def _read_npz(path: Path, also: Collection[str]) -> tuple[_Stored, list[str]]:
    try:
        return read_npz(path, (*_READ, *also, *SEQUENCE_ARRAYS))
    except ValueError as error:  # NumPy writes a name for float8_e5m2 that it does not read
        if "dtype descriptor" in str(error):
            raise ValueError(f"{error}: {_CANNOT}") from None
        raise


def _read_safetensors(path: Path) -> tuple[_Stored, list[str]]:
    tensors, _ = safetensors.map_tensors(path)
    return tensors, list(tensors)


def _refuse_other_names(path: Path, names: Collection[str]) -> None:
    """Refuse names by which other libraries call what is read here, or is an option."""
    if "qkv" in names and not {*"qkv"} <= {*names}:
        raise ValueError(f"`qkv` of {str(path)!r} must be split into `q`, `k` and `v`.")
    here = {x: x if x in _OPTIONS else ELSEWHERE.get(x.lower()) for x in sorted(names)}
    for name in (x for x, y in here.items() if y in _OPTIONS):
        raise ValueError(f"`{name}` of {str(path)!r} is not read: pass the option `{here[name]}`.")
    wrong = [f"`{x}` to `{y}`" for x, y in here.items() if y in ARRAYS and y not in names]
    if wrong:
        raise ValueError(f"arrays of {str(path)!r} have other names: rename {', '.join(wrong)}.")


def _check_results(path: Path, stored: _Stored, required: Collection[str]) -> None:
    """Check that there is something to judge, and what gradients are judged with."""
    if required and not any(name in stored for name in required):
        raise ValueError(
            f"FILE must hold one of the arrays {', '.join(required)}: {str(path)!r} has none."
        )
    for name in ("dq", "dk", "dv"):
        if name in stored and "d_out" not in stored:
            raise ValueError(f"`{name}` must come with `d_out`: {str(path)!r} has none.")


def _view_array(name: str, x: Floats | safetensors.Tensor) -> Floats:
    """Check the dtype of an array, and see its bytes as such numbers."""
    dtype = _CODES.get(x.dtype, x.dtype) if isinstance(x, safetensors.Tensor) else x.dtype.name
    if name == "mask" and dtype != "bool":
        read = re.sub(r"^I(?=\d)", "int", dtype)  # as safetensors call it
        raise TypeError(checks.say_not_boolean("mask", read))
    if name in ("indices", "part_keys") and dtype in _INTEGERS:
        return x.view(_INTEGERS[dtype]) if isinstance(x, safetensors.Tensor) else x
    if name in SCALES and dtype == INTEGER:
        return x.view(np.int8) if isinstance(x, safetensors.Tensor) else x
    if name != "mask" and dtype not in DTYPES:
        hint = f": {_HINTS[dtype]}" if dtype in _HINTS else ""
        raise TypeError(
            f"`{name}` must have dtype {', '.join(DTYPES[:-1])} or {DTYPES[-1]}, got {dtype}{hint}."
        )
    if not isinstance(x, safetensors.Tensor):
        return x
    return x.view(_number_type(dtype).newbyteorder("<"))


def _number_type(name: str) -> np.dtype[Any]:
    if name in ("bool", INTEGER, "float16", "float32", "float64"):
        return np.dtype(name)
    try:
        import ml_dtypes
    except ModuleNotFoundError:
        raise ValueError(f"{name} {INSTALL}") from None
    number_type: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    return number_type


def view_heads_first(arrays: Mapping[str, Any], layout: str) -> dict[str, Any]:
    """View arrays of a layout with heads before tokens, and `lse` (..., n, 1) without its 1."""
    shape = np.shape(arrays.get("lse", 0))
    if shape[-1:] == (1,) and len(shape) == np.ndim(arrays["q"]):
        arrays = {**arrays, "lse": arrays["lse"][..., 0]}
    if layout == "bhnd":
        return dict(arrays)
    axes = np.ndim(arrays["q"])
    views = {
        x: y
        if x in (*_FIRST, *_STATES_FIRST)
        else put_heads_first(x, y, 1 if np.ndim(y) < axes else 2)
        for x, y in arrays.items()
    }
    rows = views["q"].shape[-3:-1]
    if "lse" in views and views["lse"].shape[-2:] != rows == arrays["lse"].shape[-2:]:
        views["lse"] = arrays["lse"]  # as flash-attention writes it beside (b, n, h, d)
    return views


def _check_shapes(views: Mapping[str, Floats], has_state: bool) -> _Shape:
    """Check shapes, as attention functions or recurrences do, and return the axes of heads."""
    like = {  # one number stands for all
        name: np.broadcast_to(np.float32(0) if name != "mask" else np.False_, x.shape)
        for name, x in views.items()
    }
    q, k, v = (like[name] for name in "qkv")
    q_of, k_of = tokens.share_heads(q, k, v) if has_state else (q, k)
    _, lead = qkv.check(q_of, k_of, v, bias=like.get("bias"), mask=like.get("mask"))
    if "sinks" in like:
        qkv.of_heads("sinks", like["sinks"], q, k, v)
    if "omega" in like:
        frequencies.shared(like["omega"], None, q, lead)
    rows = (*lead, q.shape[-2])
    of_all = f"as for `q`, `k` and `v` of shapes {q.shape}, {k.shape} and {v.shape}"
    for name, shape, rule in (
        ("out", (*rows, v.shape[-1]), of_all),
        ("lse", rows, of_all),
        ("d_out", (*rows, v.shape[-1]), of_all),
        ("dq", q.shape, "that of `q`"),
        ("dk", k.shape, "that of `k`"),
        ("dv", v.shape, "that of `v`"),
    ):
        if name in like and like[name].shape != shape:
            raise ValueError(
                f"`{name}` must have shape {shape}, {rule}, got shape {like[name].shape}."
            )
    return lead


def fits_other_layout(
    arrays: Mapping[str, Any], layout: str, has_state: bool = False
) -> str | None:
    """Return the layout that is not this one, if the shapes of arrays fit it."""
    (other,) = {"bhnd", "bnhd"} - {layout}
    with suppress(ValueError):
        _check_shapes(view_heads_first(arrays, other), has_state)
        return other
    return None


def _check_numbers(name: str, x: Floats) -> None:
    """Check that what is given is finite; indices are those in the file."""
    if name == "mask":
        at = _find_first(x.view(np.uint8), lambda block: block > 1)
        if at is not None:
            raise ValueError(f"`mask` must hold bytes 0 and 1 only, got another at index {at}.")
    elif name in _FINITE:
        at = _find_first(x, lambda block: ~np.isfinite(block))
        if at is not None:
            raise ValueError(f"`{name}` must be finite, got {float(x[at])} at index {at}.")
    elif name in ("bias", "sinks"):
        at = _find_first(x, lambda block: np.isnan(block) | (block == np.inf))
        if at is not None:
            raise ValueError(f"`{name}` must be finite or -inf, got {float(x[at])} at index {at}.")


def _assume_narrow(arrays: Mapping[str, Floats]) -> dict[str, str]:
    """Return types of arrays; where q is wider than out but holds such numbers, that of out.

    Wide q, k, v and out may all hold numbers of a narrower type, except for a few rows of out. Then
    that is the type of all of them or, with such rows, of all but out.
    """
    dtypes = {name: x.dtype.name for name, x in arrays.items()}
    given = {name: arrays[name] for name in ("q", "k", "v", "out") if name in arrays}
    wide = dtypes.get("out", "float64") in _WIDE
    for name in NARROW if wide else (dtypes["out"],):
        with suppress(ValueError):  # ml_dtypes, which float32 does not need
            to = _number_type(name)
            held = {x: name for x, y in given.items() if _rounded_to(y, to)}
            few = {"out"} == {*given} - {*held} and _nearly_rounded_to(given["out"], to)
            enough = len(held) + few == 4 and all(x.size for x in given.values())
            if "q" in held and (enough or not wide):
                return dtypes | held
    return dtypes


def _rounded_to(x: Floats, number_type: np.dtype[Any]) -> bool:
    """Tell whether a wider array holds numbers of a type only."""
    wide = x.dtype.name in _WIDE and x.itemsize > number_type.itemsize
    return wide and _find_first(x, lambda block: ~_holds(number_type, block)) is None


def _nearly_rounded_to(x: Floats, number_type: np.dtype[Any]) -> bool:
    """Tell whether nearly all rows of a wider array hold numbers of a type only."""
    return x.itemsize > number_type.itemsize and holds_nearly_all(_holds(number_type, x))


def _types_by_array(arrays: Mapping[str, Floats], types: Mapping[str, str]) -> dict[str, str]:
    """Check that arrays hold numbers of the types that were given, and return those of all."""
    dtypes = {name: x.dtype.name for name, x in arrays.items()}
    for name, dtype in types.items():
        if name in arrays and dtype != dtypes[name]:
            _check_rounded(name, arrays[name], dtype)
    return dtypes | {name: x for name, x in types.items() if name in arrays or name == "weights"}


def _check_rounded(name: str, x: Floats, dtype: str) -> None:
    number_type = _number_type(dtype)
    at = _find_first(x, lambda block: ~_holds(number_type, block))
    if at is not None:
        raise ValueError(
            f"`{name}` must hold {dtype} numbers only, as `dtype` declares, "
            f"got {float(x[at])} at index {at}."
        )


def _dtypes(arrays: Mapping[str, Floats], dtype: str) -> dict[str, str]:
    """Return the dtype of each array's numbers, which `dtype` may narrow."""
    dtypes = {name: x.dtype.name for name, x in arrays.items()}
    number_type = _number_type(dtype)
    for name, x in arrays.items():
        if _rounded_to(x, number_type):
            dtypes[name] = dtype
        elif name in "qkv" and x.itemsize > number_type.itemsize and x.dtype.name in _WIDE:
            _check_rounded(name, x, dtype)
    if dtypes["q"] != dtype:
        raise ValueError(
            f"`dtype` must be that of `q`, {dtypes['q']}, or a narrower one if `q` is float32 or "
            f"float64, got {dtype!r}."
        )
    return dtypes


def _holds(number_type: np.dtype[Any], x: Floats) -> npt.NDArray[np.bool_]:
    """Return which numbers, in float64, are NaN or of a type."""
    with np.errstate(all="ignore"):
        same: npt.NDArray[np.bool_] = x.astype(number_type).astype(np.float64) == x
    return same | np.isnan(x)


def _find_first(x: Floats, bad: Callable[[Floats], npt.NDArray[np.bool_]]) -> _Shape | None:
    """Index of the first number, in the order of the file, of which something is true."""
    flat = x.reshape(-1)
    for start in range(0, flat.size, _BLOCK):
        with np.errstate(invalid="ignore"):  # of signalling NaNs
            places = np.flatnonzero(bad(flat[start : start + _BLOCK].astype(np.float64)))
        if places.size:
            return tuple(int(i) for i in np.unravel_index(start + places[0], x.shape))
    return None
