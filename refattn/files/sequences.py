"""Read packed and paged sequences: of different lengths one after another, or keys in pages.

They are those of `refattn.packed`. Causal attention and windows are those of each sequence: its
last query sees its last key.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..arrays import checks
from ..arrays.library import Floats
from ..arrays.stored import SCALES, expand_scale
from . import safetensors

_Integers = npt.NDArray[np.int64]

OFFSETS = ("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k")  # of sequences one after another
PAGES_HEADS_FIRST = "hnd"  # the layout (blocks, heads, block size, size)
_BLOCK_ORDERS = (  # of blocks: axes, and the layout with what it means
    ("heads, block size", f"{PAGES_HEADS_FIRST}: heads before block size"),
    ("block size, heads", "bhnd: block size before heads"),
)
LAYOUTS = ("bhnd", "bnhd", PAGES_HEADS_FIRST)
LENGTHS = ("cache_seqlens", "seqlens")  # of sequences with keys in blocks
TABLE = "block_table"
_FAR_LARGER = 4.0  # times the largest number of keys that are seen
SEQUENCE_ARRAYS = (*OFFSETS, TABLE, *LENGTHS)


class Sequences(NamedTuple):
    """Sequences of their own length.

    The last key is the number of the key that is level with each query, for causal attention and
    windows, among all keys: shape (tokens,), or (batch, n) with blocks. Offsets are where each
    begins among queries and among keys, and their ends: shapes (sequences + 1,), or (batch, 2) with
    blocks. Of keys in blocks there is the table, and all blocks of keys, values and their scales.
    """

    last_key: _Integers
    offsets: tuple[_Integers, _Integers]
    table: _Integers | None = None
    blocks: Mapping[str, Any] = MappingProxyType({})


def take_sequences(
    arrays: dict[str, Floats], stored: Mapping[str, Floats | safetensors.Tensor], layout: str
) -> Sequences | None:
    """Add a mask to the arrays, and lay keys that come in blocks one after another.

    Return the sequences, or None if the arrays are one sequence.

    Axes are those of layout bnhd, but for blocks with heads first.
    """
    given = {name: _read_integers(name, stored[name]) for name in SEQUENCE_ARRAYS if name in stored}
    if layout == PAGES_HEADS_FIRST and TABLE not in given:
        raise ValueError(f"`layout` {layout} must come with `{TABLE}`, got none.")
    if not given:
        return None
    if "mask" in arrays:
        raise ValueError(f"`mask` must not come with `{next(iter(given))}`.")
    if TABLE in given:
        return _take_blocks(arrays, given, layout)
    return _take_offsets(arrays, given)


def _read_integers(name: str, x: Floats | safetensors.Tensor) -> _Integers:
    numbers = x.numbers(name) if isinstance(x, safetensors.Tensor) else x
    ndim, rule = (2, "(batch, blocks)") if name == TABLE else (1, "(sequences + 1,)")
    integers: _Integers = checks.host_integers(
        name, numbers, "(batch,)" if name in LENGTHS else rule, ndim
    )
    return integers


def _take_offsets(arrays: dict[str, Floats], given: Mapping[str, _Integers]) -> Sequences:
    """Let tokens see their own sequence, of arrays (tokens, heads, size)."""
    if not {*OFFSETS} & {*given}:
        raise ValueError(f"`{next(iter(given))}` must come with `{TABLE}`, got none.")
    both = [next(given[x] for x in (name, *OFFSETS) if x in given) for name in OFFSETS[1:]]
    for name, offsets in zip("qkv", (both[0], both[1], both[1]), strict=True):
        shape = arrays[name].shape
        if len(shape) != 3:
            raise ValueError(
                f"`{name}` must have shape (tokens, heads, size) beside `cu_seqlens`, "
                f"got shape {shape}."
            )
        rises = offsets.size > 1 and offsets[0] == 0 and bool(np.all(np.diff(offsets) >= 0))
        if not rises or offsets[-1] != shape[0]:
            raise ValueError(
                f"`cu_seqlens` must rise from 0 to the number of tokens of `{name}` (tokens, "
                f"heads, size), got {offsets.tolist()} for shape {shape}."
            )
    if len(both[0]) != len(both[1]):
        raise ValueError(
            "`cu_seqlens_k` must have as many entries as `cu_seqlens_q`, "
            f"got {len(both[1])} and {len(both[0])}."
        )
    of_query, of_key = (np.repeat(np.arange(len(x) - 1), np.diff(x)) for x in both)
    arrays["mask"] = np.asarray(of_query[:, None] == of_key)
    shift: _Integers = (both[1] - both[0])[1:][of_query]  # the last query sees the last key
    return Sequences(np.arange(len(of_query)) + shift, (both[0], both[1]))


def _take_blocks(
    arrays: dict[str, Floats], given: Mapping[str, _Integers], layout: str
) -> Sequences:
    """Put keys and values (blocks, block size, heads, size) in order, (batch, m, heads, size).

    Numbers after the end of a sequence stay, if they are like the others: wrong kernels read them.
    Scales of blocks, (blocks, heads) or with all axes, are put in order with them.
    """
    called = next((x for x in LENGTHS if x in given), None)
    if called is None:
        raise ValueError(f"`{TABLE}` must come with `{LENGTHS[0]}`, got none.")
    table, lengths, q = given[TABLE], given[called], arrays["q"]
    for name in "qkv":
        rule = "(batch, n, heads, size)" if name == "q" else "(blocks, block size, heads, size)"
        if arrays[name].ndim != 4:
            raise ValueError(
                f"`{name}` must have axes {rule} with `{TABLE}`, got shape {arrays[name].shape}."
            )
    _put_tokens_first(arrays, table.shape[1], lengths, layout)
    count, size = arrays["k"].shape[:2]
    if arrays["v"].shape[:2] != (count, size):
        shapes = f"{arrays['k'].shape} and {arrays['v'].shape}"
        raise ValueError(f"`k` and `v` must have as many blocks of one size, got shapes {shapes}.")
    if not len(table) == len(lengths) == len(q):
        raise ValueError(
            f"`{TABLE}` and `{called}` must have as many rows as `q` has sequences, {len(q)}, got "
            f"shapes {table.shape} and {lengths.shape}."
        )
    if np.any((lengths < 0) | (lengths > table.shape[1] * size)):
        raise ValueError(
            f"`{called}` must be from 0 to {table.shape[1]} blocks of {size}, "
            f"got {lengths.tolist()}."
        )
    read = np.arange(table.shape[1]) * size < lengths[:, None]  # the others may be anything
    wrong = read & ((table < 0) | (table >= count))
    if np.any(wrong):
        member = int(np.flatnonzero(wrong.any(1))[0])
        raise ValueError(
            f"`{TABLE}` must hold blocks of 0 to {count - 1}, got "
            f"{table[member][read[member]].tolist()} for batch member {member}."
        )
    # Wrong kernels may read blocks beyond the longest sequence.
    used = int(np.max(lengths, initial=0)) // size + 1
    most = min(used + used // 2, table.shape[1]) * size
    cache = {name: arrays[name] for name in "kv"}
    seen = np.arange(most) < lengths[:, None]
    there = np.where((table >= 0) & (table < count), table, 0)

    def put_in_order(pages: Any) -> Any:
        found = pages[there] if count else np.zeros((*table.shape, 0))
        return found.reshape(len(q), table.shape[1] * size, *pages.shape[2:])[:, :most].copy()

    for name in "kv":
        scale: Any = arrays.get(SCALES[name])
        if np.ndim(scale) > 1 and scale.shape[0] == count:  # of blocks, not of sequences
            if count == len(q) and (scale.ndim < 4 or scale.shape[1] != size):
                raise ValueError(
                    f"`{SCALES[name]}` of shape {scale.shape} may be of {count} blocks or of as "
                    "many sequences: repeat it to (blocks, block size, heads, 1)."
                )
            by_head = scale.shape == (count, cache[name].shape[2])
            scale = scale[:, None, :, None] if by_head else scale
            scale = expand_scale(name, scale.astype(np.float64), cache[name].shape, "bnhd")
            cache[SCALES[name]] = np.broadcast_to(scale, (count, size, *scale.shape[2:]))
            arrays[SCALES[name]] = put_in_order(cache[SCALES[name]])
        arrays[name] = keys = put_in_order(cache[name])
        keys[~seen] = _keep_alike(keys[~seen], keys[seen])
    arrays["mask"] = seen[:, None, None]
    n = q.shape[1]
    last_key: _Integers = lengths[:, None] - n + np.arange(n)
    of_q, of_k = (np.stack([0 * x, x], -1) for x in (0 * lengths + n, lengths))
    return Sequences(last_key, (of_q, of_k), table, cache)


def _put_tokens_first(
    arrays: dict[str, Floats], blocks: int, lengths: _Integers, layout: str
) -> None:
    """Put tokens before heads in blocks, and in their scales; refuse blocks that ask for it."""
    count, *axes, _ = arrays["k"].shape
    heads, most = arrays["q"].shape[2], np.max(lengths, initial=0)
    fits = [y and heads % y == 0 and blocks * x >= most for x, y in (axes, axes[::-1])]
    heads_first = layout == PAGES_HEADS_FIRST
    if fits[not heads_first] and not fits[heads_first]:
        (rule, _), (_, other) = _BLOCK_ORDERS if heads_first else _BLOCK_ORDERS[::-1]
        raise ValueError(
            f"`k` must have axes (blocks, {rule}, size) with `{TABLE}`, got shape "
            f"{arrays['k'].shape}, which fits layout {other}."
        )
    if heads_first:
        of_blocks = [SCALES[x] for x in "kv" if np.shape(arrays.get(SCALES[x], 0))[:1] == (count,)]
        for name in ("k", "v", *(x for x in of_blocks if arrays[x].ndim > 2)):
            arrays[name] = np.swapaxes(arrays[name], 1, 2)


def _keep_alike(x: Any, others: Any) -> Any:
    """Set numbers to 0 that are far larger than all others, or have more digits."""

    def last_digits(x: Any) -> Any:
        bits = x.view(f"uint{8 * x.itemsize}")
        return np.where(bits == 0, np.iinfo(bits.dtype).max, bits & -bits)

    # The largest of a few numbers of one kind may be above that of many others.
    most = _FAR_LARGER * float(np.max(np.abs(others), initial=0))
    fewest = np.min(last_digits(others), initial=np.iinfo(f"uint{8 * x.itemsize}").max)
    with np.errstate(invalid="ignore"):
        alike = (np.abs(x) <= most) & (last_digits(x) >= fewest)
    return np.where(alike, x, 0).astype(x.dtype)
