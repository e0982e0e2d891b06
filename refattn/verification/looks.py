"""Which rows are looked at, and which of them along all known defects.

Small problems are looked at as a whole. Of large ones every head gives blocks of rows: its first,
its last, and one at random of each of some equal tiles. Of gradients there are heads at random
instead, as what is saved of a head is of all of its queries. The draw has a fixed seed, `SEED`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from ..arrays.blocks import blocks
from ..arrays.library import Doubles
from ..rounding.problems import Index, Problem

Blocks = tuple[tuple[Index, slice], ...]

SEED = 0
MOST_PAIRS = 2**28  # of queries and keys that are looked at
MOST_PAIRS_OF_GRADIENTS = 2**25  # with what is saved, and in three parts
ALL_DIRECTIONS = 2**22  # pairs that are looked at along all known defects
_ROWS = 64  # of a block at random
_COMPARED_ROWS, _COMPARED_BLOCKS = 64, 4  # by which profiles are compared
_COMPARED_HEADS = 2  # of gradients


class Look(NamedTuple):
    """Rows that are looked at.

    Attributes
    ----------
    weights : array, (heads, n)
        1 / g for g rows with one query or result.
    full : tuple or None
        Heads and rows that are tried along all known defects; None for all of the problem.
    rest : tuple
        Those that are tried along a few.
    """

    weights: Doubles
    full: Blocks | None = None
    rest: Blocks = ()


def choose_blocks(problem: Problem, everything: bool = False) -> Blocks:
    """Choose the heads and rows that are looked at."""
    every = tuple(problem._replace(blocks=None).items())
    (n, m, _), heads = problem.shape, math.prod(problem.lead)
    most = MOST_PAIRS if problem.gradient is None else MOST_PAIRS_OF_GRADIENTS
    if everything or heads * n * m <= most:
        return every
    chosen = [*np.ndindex(problem.lead)]
    if problem.gradient is not None:
        chosen = [chosen[x] for x in _one_of_each(heads, max(1, most // (n * m)))]
    of_each = max(3, most // (len(chosen) * m * _ROWS))
    if of_each * _ROWS >= n:
        return tuple(x for x in every if x[0] in {*chosen})
    return tuple((x, i) for x in chosen for i in _strata(n, of_each, problem.number(x)))


def split_directions(found: Blocks, keys: int, everything: bool = False) -> tuple[Blocks, Blocks]:
    """Choose the blocks that are tried along all known defects, and leave the rest."""
    pairs = keys * count_rows(found)
    if everything or pairs <= ALL_DIRECTIONS:
        return found, ()
    full = {*_one_of_each(len(found), max(1, len(found) * ALL_DIRECTIONS // pairs))}
    return (
        tuple(x for at, x in enumerate(found) if at in full),
        tuple(x for at, x in enumerate(found) if at not in full),
    )


def choose_compared(problem: Problem) -> Problem:
    """Take some rows, of different heads where there are, by which profiles are compared."""
    found = tuple(problem.items())
    if count_rows(found) <= _COMPARED_ROWS * _COMPARED_BLOCKS:
        return problem.looked_at(found)
    most = _COMPARED_BLOCKS if problem.gradient is None else _COMPARED_HEADS
    places = _one_of_each(len(found), most)
    rows = _COMPARED_ROWS * _COMPARED_BLOCKS // len(places)
    cut = (found[x] for x in places)
    return problem.looked_at(
        [(index, slice(i.start, min(i.stop, i.start + rows))) for index, i in cut]
    )


def count_rows(found: Iterable[tuple[Index, slice]]) -> int:
    """Count the rows of blocks."""
    return sum(i.stop - i.start for _, i in found)


def _strata(n: int, of_each: int, seed: int) -> list[slice]:
    """Take the first and the last rows, and some at random of each of some tiles between."""
    inner = list(blocks(_ROWS, n - _ROWS, math.ceil((n - 2 * _ROWS) / (of_each - 2))))
    draws = np.random.default_rng([SEED, seed]).random(len(inner))
    starts = [0]
    for tile, draw in zip(inner, draws, strict=True):
        last = min(tile.stop, n - _ROWS) - _ROWS
        starts.append(max(starts[-1] + _ROWS, tile.start + int(draw * (last - tile.start + 1))))
    starts = [x for x in starts if x <= n - 2 * _ROWS] + [n - _ROWS]
    return [slice(x, x + _ROWS) for x in starts]


def _one_of_each(count: int, parts: int) -> list[int]:
    """Draw one place of each of so many equal parts."""
    cuts = np.linspace(0, count, min(parts, count) + 1)
    draws = np.random.default_rng(SEED).random(len(cuts) - 1)
    return [int(a + (b - a) * x) for a, b, x in zip(cuts, cuts[1:], draws, strict=False)]
