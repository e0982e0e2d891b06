"""Masks of batch members that have lengths of their own, causal ones, and their blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ...rounding.problems import Index, Problem
from .heads import list_other_heads
from .sampled import Alternative, Numbers1D, Seen

_MOST_OF_MASKS = 2**24  # numbers of all masks, at most, that are read


class Diagonal(NamedTuple):
    """A causal mask: query i sees keys from its first one up to i + level, if it sees any."""

    first: Numbers1D  # (queries, 1)
    length: int
    level: int
    shown: Seen  # queries that see keys, or would by a larger level, (queries, 1)

    @classmethod
    def of(cls, mask: Seen) -> Diagonal | None:
        """Read a mask; None if it is another one."""
        (n, m), seen = mask.shape, mask.any(-1, keepdims=True)
        i, first = np.arange(n)[:, None], np.argmax(mask, -1)[:, None]
        last = np.where(seen, m - 1 - np.argmax(mask[:, ::-1], -1)[:, None], -1)
        length = int(np.max(last, initial=-1)) + 1
        # Rows that the length cuts off tell nothing of the level.
        levels = (last - i)[seen & (last < length - 1)]
        if not levels.size:
            return None
        level, begin = int(levels[0]), np.min(first[seen])
        found = cls(np.where(seen, first, begin), length, level, seen | (i + level < begin))
        # Any other mask is not shown again by these four numbers.
        return found if np.array_equal(found.show(m), mask) else None

    def show(self, keys: int) -> Seen:
        """Return the mask, (queries, keys)."""
        i, j = np.arange(len(self.first))[:, None], np.arange(keys)
        last = np.minimum(i + self.level, self.length - 1)
        return np.asarray(self.shown & (j >= self.first) & (j <= last))

    def is_same(self, other: Diagonal) -> bool:
        """Tell whether another one shows the same."""
        return self[1:3] == other[1:3] and np.array_equal(self.first, other.first)

    @property
    def block(self) -> int:
        """The size of blocks of keys by which first keys move on; 0 for none."""
        # First keys that move on with nearly every query are those of a window, not of blocks.
        starts = np.unique(self.first)
        return int(np.max(np.diff(starts))) if 1 < len(starts) <= len(self.first) / 2 else 0


def list_diagonals(problem: Problem) -> Iterator[Alternative]:
    """List kernels that mistake lengths, levels or blocks of masks of batch members."""
    n, m, _ = problem.shape
    if "mask" not in problem.first or math.prod(problem.lead) * n * m > _MOST_OF_MASKS:
        return
    masks = {at: Diagonal.of(problem.read(at)["mask"]) for at in np.ndindex(problem.lead)}
    own = {at: x for at, x in masks.items() if x is not None}
    if len(own) < len(masks):
        return
    for text, to in _list_mistakes(problem, own):
        moved = {at: to(at, x) for at, x in own.items()}
        # A mistake that changes no mask cannot be the cause.
        if any(not own[at].is_same(x) for at, x in moved.items()):
            yield Alternative(text, problem.replaced("mask", partial(_show_diagonal, moved)))


def _list_mistakes(
    problem: Problem, own: Mapping[Index, Diagonal]
) -> Iterator[tuple[str, Callable[[Index, Diagonal], Diagonal]]]:
    """List wrong alignments, lengths and blocks of the mask of each head."""
    longest = max((x.level for x in own.values()), default=0)
    text = "the causal mask is aligned by the longest lengths, not by those of each batch member"
    yield text, lambda _, x: x._replace(level=longest)
    for words, other in list_other_heads(problem):
        for name, field in (("length", "length"), ("alignment", "level")):
            yield (
                f"the {name} of the causal mask is that of {words}",
                partial(_take, own, other, field),
            )
    size = max((x.block for x in own.values()), default=0)
    if not size:
        return
    multiples, keys = f"multiples of {size}", "the first key of each batch member"
    for at_own, begin, other_begin in ((False, multiples, keys), (True, keys, multiples)):
        text = f"blocks of {size} keys in the mask begin at {begin}, not at {other_begin}"
        yield text, partial(_begin_blocks, at_own, size)


def _begin_blocks(at_own: bool, size: int, _: Index, x: Diagonal) -> Diagonal:
    """Let blocks begin at the first key, or at multiples of their size."""
    begin, level = np.min(x.first), np.arange(len(x.first))[:, None] + x.level
    origin = begin if at_own else 0
    return x._replace(first=np.maximum((level - origin) // size * size + origin, begin))


def _show_diagonal(masks: Mapping[Index, Diagonal], at: Index, mask: Any) -> Seen:
    return masks[at].show(mask.shape[-1])


def _take(
    own: Mapping[Index, Diagonal],
    other: Callable[[Index], Index],
    field: str,
    at: Index,
    x: Diagonal,
) -> Diagonal:
    return x._replace(**{field: getattr(own[other(at)], field)})


def _set_column(at: int, x: Any, _: int) -> Any:
    return np.where(np.arange(x.shape[1]) == at % x.shape[1], np.minimum(x, 0), x)


_TWICE = "a key that is chosen twice counts twice"
# What kernels may read in place of the keys that queries chose, (queries, S), of so many keys.
_CHOICES: Mapping[str, Callable[[Any, int], Any]] = {
    _TWICE: lambda x, _: x,
    "-1 in the indices is read as the last key": lambda x, m: np.where(x < 0, m - 1, x),
    "-1 in the indices is read as key 0": lambda x, _: np.where(x < 0, 0, x),
    "each query has the keys that the query before it chose": lambda x, _: np.roll(x, 1, 0),
    "each query has the keys that the next query chose": lambda x, _: np.roll(x, -1, 0),
    "all queries have the keys that the first query chose": lambda x, _: 0 * x + x[:1],
    "the last key of each choice is left out": lambda x, _: x[:, :-1],
    "the first key of each choice is left out": lambda x, _: x[:, 1:],
    "key 0 is read in place of the first key of each choice": partial(_set_column, 0),
    "key 0 is read in place of the last key of each choice": partial(_set_column, -1),
}


def list_choices(problem: Problem) -> Iterator[Alternative]:
    """List wrong readings of the keys that queries chose, which no other mask hides."""
    alone = problem._replace(causal=False, window=(None, None))
    every, m = [problem.read(x)["indices"] for x in np.ndindex(problem.lead)], problem.shape[1]
    changes: dict[str, Callable[[Index], Any]] = {
        text: partial(_change_choices, problem, change) for text, change in _CHOICES.items()
    }
    for words, at in list_other_heads(problem):
        text = f"each query uses as many of its choices as the same query of {words} has"
        changes[text] = partial(_cut_choices, problem, at)
    for text, change in changes.items():
        if text != _TWICE and all(
            np.array_equal(change(at), x)
            for at, x in zip(np.ndindex(problem.lead), every, strict=True)
        ):
            continue  # it would be the cause of what happens to keys that are chosen twice
        count = partial(_count_chosen, change, m)
        seen = alone.replaced("mask", partial(_show_counted, count))
        yield Alternative(text, seen.replaced("bias", partial(_add_counted, count)))


def _change_choices(problem: Problem, change: Callable[[Any, int], Any], index: Index) -> Any:
    return change(problem.read(index)["indices"], problem.shape[1])


def _cut_choices(problem: Problem, at: Callable[[Index], Index], index: Index) -> Any:
    """Leave out choices past as many as another head has."""
    own, other = (problem.read(x)["indices"] for x in (index, at(index)))
    count = np.sum(other >= 0, -1, keepdims=True)
    return np.where(np.arange(own.shape[1]) < count, own, -1)


def _count_chosen(change: Callable[[Index], Any], m: int, index: Index) -> Any:
    """Count how often each query reads each key, (queries, keys)."""
    return np.stack([np.bincount(x[x >= 0], minlength=m) for x in change(index)])


def _show_counted(count: Callable[[Index], Any], index: Index, _: Any) -> Seen:
    return np.asarray(count(index) > 0)


def _add_counted(count: Callable[[Index], Any], index: Index, bias: Any) -> Any:
    """Add logs of counts to the bias, as the weights of keys count so often."""
    return np.log(np.maximum(count(index), 1)) + (0.0 if bias is None else bias)
