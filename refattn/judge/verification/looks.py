"""Choose the rows that are tested, and those that are tested along all known defects.

Small problems are looked at as a whole. Of large ones every head gives blocks of rows: its first,
its last, and one at random of each of some equal tiles. The draw has a fixed seed, `SEED`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from ...arrays.blocks import blocks
from ...arrays.library import Doubles
from ..rounding.head import ExactRows
from ..rounding.problems import Index, Problem
from .head_sums import HeadSums

Blocks = tuple[tuple[Index, slice], ...]

SEED = 0
MOST_PAIRS = 2**27  # of queries and keys that are looked at
MOST_PAIRS_OF_GRADIENTS = 2**24  # of each of three parts, beside what is saved
ALL_DIRECTIONS = 2**22  # pairs that are looked at along all known defects
_LOUD_PAIRS = 2**21  # of blocks with the largest errors, by which defects are measured
_RANDOM_ROWS = 64  # of a block at random
_COMPARED_ROWS, _COMPARED_BLOCKS = 64, 4  # by which profiles are compared
_COMPARED_KEYS = 2**17  # of all blocks of a few rows
_SCREENED_PAIRS, _BLOCK_ROWS = 2**21, 256  # of rows by which a profile may be ruled out
_COMPARED_HEADS, _GLANCED_ROWS = 1, 512  # of gradients
_DERIVED_ROWS, _DERIVED_SUMS = 4, 2**27  # of a block whose laws are derived; products in all


class Look(NamedTuple):
    """Rows that are looked at."""

    weights: Doubles  # (heads, n), 1 / g for g rows with one query or result
    full: Blocks | None = None  # that are tried along all known defects; None for all
    rest: Blocks = ()  # that are tried along a few
    exact: ExactRows = MappingProxyType({})  # what is exact of blocks, where that is known
    enough: float = -math.inf  # log of a p-value from which on no tile or row is tried again
    sums: HeadSums | None = None  # of errors, if these were added up before


def choose_blocks(problem: Problem, everything: bool = False) -> Blocks:
    """Choose the heads and rows that are looked at."""
    every = tuple(problem._replace(blocks=None).items())
    (n, m, _), heads = problem.shape, math.prod(problem.lead)
    most = MOST_PAIRS if problem.gradient is None else MOST_PAIRS_OF_GRADIENTS
    if problem.derived is not None:  # each column of a row costs as much as its text
        return _choose_derived(problem, everything)
    if everything or heads * n * m <= most or n <= 3 * _RANDOM_ROWS:
        return every
    of_each = max(3, most // (heads * m * _RANDOM_ROWS))
    return tuple(
        (index, i)
        for index in np.ndindex(problem.lead)
        for i in _strata(n, of_each, problem.number(index))
    )


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
    if count_rows(found) <= _COMPARED_ROWS * _COMPARED_BLOCKS:  # of a few rows, keys cost most
        most = max(_COMPARED_BLOCKS, _COMPARED_KEYS // max(problem.shape[1], 1))
        return problem.looked_at([found[x] for x in _one_of_each(len(found), most)])
    most = _COMPARED_BLOCKS if problem.gradient is None else _COMPARED_HEADS
    places = _one_of_each(len(found), most)
    rows = _COMPARED_ROWS * _COMPARED_BLOCKS // len(places)
    rows = _BLOCK_ROWS if problem.kind == "recurrent" else rows  # of several chunks
    cut = (found[x] for x in places)
    return problem.looked_at(
        [(index, slice(i.start, min(i.stop, i.start + rows))) for index, i in cut]
    )


def choose_block(problem: Problem) -> Problem:
    """Take one block of rows, by which it is told what else would pass."""
    found = tuple(choose_compared(problem).items())  # of which more is known
    index, i = found[len(found) // 2] if found else ((), slice(0))
    return problem.looked_at([(index, slice(i.start, min(i.stop, i.start + _RANDOM_ROWS)))])


def choose_glanced(problem: Problem) -> Blocks:
    """Take the rows by which a profile is surely ruled out, or not yet; none where all are few."""
    if problem.gradient is None:
        return choose_screened(problem)[:1]
    every = tuple(problem.items())  # of gradients, in the head that is known
    head = next((index for index, _ in choose_compared(problem).items()), ())
    of_head = [x for x in every if x[0] == head]
    found = of_head[: max(1, _GLANCED_ROWS * len(of_head) // max(count_rows(of_head), 1))]
    return tuple(found) if 4 * count_rows(found) <= count_rows(every) else ()


def choose_screened(problem: Problem) -> Blocks:
    """Take some more rows, by which a profile may be ruled out; none where that would be a half."""
    found = tuple(problem.items())
    most = max(1, _SCREENED_PAIRS // (_BLOCK_ROWS * max(problem.shape[1], 1)))
    if problem.gradient is not None or 2 * most >= len(found):
        return ()
    return tuple(found[x] for x in _one_of_each(len(found), most))


def choose_loud(found: Blocks, squares: Doubles, problem: Problem) -> Blocks:
    """Take the blocks with the largest mean squares, from the largest; none if those are all.

    There are none either where squares are summed over all rows of a head.
    """
    most = max(1, _LOUD_PAIRS // (_BLOCK_ROWS * max(problem.shape[1], 1)))
    if most >= len(found) or squares.shape[-1] < problem.shape[0]:
        return ()
    means = [-float(np.mean(squares[problem.number(x), i])) for x, i in found]
    return tuple(found[x] for x in np.argsort(means, kind="stable")[:most].tolist())


def holds_row(block: tuple[Index, slice], at: Index) -> bool:
    """Tell whether a row is one of a block."""
    head, i = block
    return at[:-1] == head and i.start <= at[-1] < i.stop


def count_rows(found: Iterable[tuple[Index, slice]]) -> int:
    """Count the rows of blocks."""
    return sum(i.stop - i.start for _, i in found)


def _choose_derived(problem: Problem, everything: bool) -> Blocks:
    """Choose rows whose laws are derived, of each head as many."""
    (n, _, d_v), heads = problem.shape, math.prod(problem.lead)
    if 0 in (n, heads):
        return ()
    size = sum(np.size(x) for x in problem.first.values())
    found = list(blocks(0, n, _DERIVED_ROWS))
    most = max(2, _DERIVED_SUMS // (heads * _DERIVED_ROWS * d_v * size))
    taken = range(len(found)) if everything else _one_of_each(len(found), most)
    return tuple((index, found[x]) for index in np.ndindex(problem.lead) for x in taken)


def _strata(n: int, of_each: int, seed: int) -> list[slice]:
    """Take the first and the last rows, and some at random of each of some tiles between."""
    first, *inner, last = blocks(0, n, _RANDOM_ROWS)
    return [first, *(inner[x] for x in _one_of_each(len(inner), of_each - 2, seed)), last]


def _one_of_each(count: int, parts: int, seed: int = 0) -> list[int]:
    """Draw one place of each of so many equal parts."""
    parts = max(min(parts, count), 0)
    cuts = [x * count // parts for x in range(parts + 1)] if parts else [0]
    draws = np.random.default_rng([SEED, seed]).random(parts).tolist()
    return [a + int((b - a) * x) for (a, b), x in zip(pairwise(cuts), draws, strict=True)]
