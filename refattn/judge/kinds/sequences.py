"""Pose sequences one after another, or with keys in pages, as one problem with a mask.

`refattn.files.sequences` reads them, from a file or from the arguments of a call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from ...arrays.library import Doubles
from ...arrays.stored import SCALES
from ...engine.scores import Band
from ...files.sequences import Sequences
from ..rounding.problems import Index, Packed, Problem


def limit_sequences(
    sequences: Sequences | None, shape: tuple[int, int], causal: bool, window: Any
) -> Callable[[Index], Any] | None:
    """Return what says which keys a head's queries see; None if sequences change no band.

    Causal attention and windows are those of each sequence. They become part of the mask unless the
    last query and the last key of all are level, as in one sequence.
    """
    n, m = shape
    if sequences is None or np.array_equal(last := sequences.last_key, np.arange(n) + m - n):
        return None
    return partial(_see_band, last, Band.of(0, causal, window), m)


def _see_band(last_key: Any, band: Band, keys: int, index: Index) -> Any:
    """Return which keys the queries of a head see by a band about the last key of each."""
    last = last_key if last_key.ndim == 1 else last_key[index[0]]
    ahead = np.arange(keys) - last[:, None]
    right = math.inf if band.right is None else band.right
    return (ahead >= -(math.inf if band.left is None else band.left)) & (ahead <= right)


def mask_whole(mask: Any, see: Callable[[Index], Any] | None) -> Any:
    """Join the mask of sequences, (n, m) or (batch, 1, 1, m), and what their queries see."""
    if see is None:
        return mask
    if mask.ndim == 2:
        return mask & see(())
    return mask & np.stack([see((x,)) for x in range(len(mask))])[:, None]


def keep_sequences(problem: Problem, sequences: Sequences, causal: bool, window: Any) -> Problem:
    """Keep the sequences, with their causal attention and windows, and all pages of keys."""
    packed = Packed(*sequences.offsets, causal, window)
    if sequences.table is not None:
        pages = partial(_read_pages, sequences.blocks, problem)
        packed = packed._replace(table=sequences.table, blocks=pages)
    return problem._replace(packed=packed)


def _read_pages(cache: Mapping[str, Any], problem: Problem, index: Index) -> list[Doubles]:
    """Read all pages of keys and of values that a query head may use, times their scales.

    Pages without scales of their own have that of the first key.
    """
    arrays, found = problem.read(index), []
    for name in "kv":  # (pages, page size, heads, size)
        head = index[-1] * cache[name].shape[2] // problem.lead[-1]
        numbers: Doubles = np.asarray(cache[name][:, :, head], np.float64)
        scales, scale = cache.get(SCALES[name]), arrays.get(SCALES[name])
        if scales is not None:
            numbers = numbers * scales[:, :, min(head, scales.shape[2] - 1)]
        elif scale is not None:
            numbers = numbers * scale[0]
        found.append(numbers)
    return found
