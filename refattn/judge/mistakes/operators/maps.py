"""Maps of places and of heads: where a kernel may look instead, as rules with a size."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ....arrays.words import place
from ...rounding.problems import Index, Problem
from ...verification.findings import name_first

Places = npt.NDArray[np.int64]
HeadRule = Callable[[Index], Any]  # the index of a head that another reads; None for nothing
_POWERS = (2, 4, 8, 16, 32, 64, 128, 256)
_GROUPS = (2, 3, 4, 5, 6, 7, 8, 10, 12, 16)  # query heads that may share a key head
_BLOCKS_AS_ONE = (2, 3, 4, 8)  # neighbouring blocks, of which all may read the first


class Map(NamedTuple):
    """A rule of places, written with @ for a place."""

    text: str
    of: Callable[[Places], Places]

    def named(self, x: str) -> str:
        """Write the rule for a place of this name."""
        return self.text.replace("@", x)


_IN_BLOCKS = "{s} (@ // {s})"
_PLACE_RULES: Mapping[str, tuple[tuple[int, ...], Callable[[Places, int], Places]]] = {
    "-@": ((1,), lambda x, s: -x),
    "@ + @ % {s}": (_POWERS, lambda x, s: x + x % s),
    _IN_BLOCKS: (_POWERS, lambda x, s: x // s * s),
    "@ xor {s}": ((1, *_POWERS), lambda x, s: x ^ s),
    "@ xor {t}": (_POWERS[1:], lambda x, s: x ^ (s - 1)),
    "@ % {s}": (_POWERS, lambda x, s: x % s),
    "@ - {s} (@ // {s} % 2)": (_POWERS, lambda x, s: x - s * (x // s % 2)),
    "@ + {s} - {s} (@ // {s} % 2)": (_POWERS, lambda x, s: x + s - s * (x // s % 2)),
    "@ // {s}": (_GROUPS, lambda x, s: x // s),
    "{s} @": (_GROUPS, lambda x, s: s * x),
}


def list_maps(most: int, blocks: Collection[int] = ()) -> Iterator[Map]:
    """List maps of fewer than so many places, the plainest first; also in blocks of other sizes."""
    for text, (sizes, rule) in _PLACE_RULES.items():
        sizes = (*sizes, *blocks) if text == _IN_BLOCKS else sizes
        for size in (x for x in sizes if x < most):
            yield Map(text.format(s=size, t=size - 1), partial(_apply, rule, size))
    for block in (x for x in _POWERS if 4 <= x < most):
        for share in (x for x in _BLOCKS_AS_ONE if block * x < most):
            text = f"{block} (@ // {block * share}) + @ % {block}"
            yield Map(text, partial(_share_blocks, block, share))
        for rows in (x for x in _POWERS if x * x <= block * 8 and 2 * x <= block):
            # As if the places of a block were written by columns, and read by rows.
            order = np.arange(block).reshape(rows, -1).T.ravel()
            place = f"(@ % {rows}) * {block // rows} + @ % {block} // {rows}"
            name = f"@ // {block} * {block} + {place}"
            yield Map(name, partial(permute_blocks, order))


def list_paddings(most: int) -> Iterator[Map]:
    """List maps of places in pages, each of which is padded, or is read as if it were."""
    for size, more in product(_POWERS[2:], _POWERS[1:]):
        if size >= more and size < most:
            wide, over = size + more, partial(_number_pages, size, size + more)
            words = f"(@ // {wide}) + @ % {wide} where @ % {wide} < {size}"
            yield Map(f"{size} {words}", over)
            yield Map(f"{wide} (@ // {size}) + @ % {size}", partial(_number_pages, wide, size))


def _number_pages(to: int, size: int, x: Places) -> Places:
    """Number places of pages of a size as those of another; -1 is none."""
    return np.where(x % size < to, x // size * to + x % size, -1)


def _apply(rule: Callable[[Places, int], Places], size: int, x: Places) -> Places:
    return rule(x, size)


def _share_blocks(block: int, share: int, x: Places) -> Places:
    return np.asarray(x // (block * share) * block + x % block)


def permute_blocks(order: Places, x: Places) -> Places:
    """Permute places in blocks as long as an order is."""
    return np.asarray(x - x % len(order) + order[x % len(order)])


def write_shift(words: str, by: int) -> str:
    """Write a place that is so much later."""
    return f"{words} {'-+'[by > 0]} {abs(by)}" if by else words


def list_head_rules(problem: Problem) -> Iterator[tuple[str, Callable[[Index], Index]]]:
    """List the heads that a kernel may read by mistake: the first, the next, the one before."""
    for axis, length in enumerate(problem.lead):
        called = "head" if axis == len(problem.lead) - 1 else "batch member"
        moves = {"the first {}": lambda x, _: 0, "the next {}": lambda x, n: (x + 1) % n}
        moves |= {"the {} before": lambda x, n: (x - 1) % n} if length > 2 else {}
        for words, move in moves.items() if length > 1 else ():
            yield words.format(called), partial(_move_head, axis, length, move)


def list_group_rules(problem: Problem) -> Iterator[tuple[str, Callable[[Index], Index]]]:
    """List other key heads that query heads may share; the first deals query heads in turn."""
    if (keys := problem.key_heads) is not None:
        # Arrays are named by query heads: key head g is that of query head g * share.
        share = problem.lead[-1] // keys
        for words, deal in (
            (f"h % {keys}", lambda h, _: h % keys * share),
            (f"h // {keys}", lambda h, _: min(h // keys, keys - 1) * share),
        ):
            yield f"key head {words} for query head h", partial(_move_head, -1, 0, deal)


def _move_head(axis: int, length: int, move: Callable[[int, int], int], at: Index) -> Index:
    moved = [*at]
    moved[axis] = move(at[axis], length)
    return tuple(moved)


def list_heads_read(
    problem: Problem, far: Mapping[Index, Mapping[Index | None, float]]
) -> Iterator[tuple[str, HeadRule, bool]]:
    """Say which heads are read by some wrong heads: by rules, and then one by one.

    `far` says how far each of them is from others; heads that share an array are as far. The last
    tells whether this is known of these heads alone.
    """
    moved = {at: min(x, key=x.__getitem__) for at, x in far.items()}
    moved = {at: x for at, x in sorted(moved.items()) if x != at}
    # That each head is nearest to itself is no exchange.
    if not moved:
        return
    for words, rule in (*list_head_rules(problem), *list_group_rules(problem)):
        if all(x.get(rule(at), math.inf) <= min(x.values()) for at, x in far.items()):
            yield words, rule, False
    text = f"other heads: {_name_each(moved, problem.lead)}"
    yield text, lambda at: moved.get(at, at), True


def _name_each(moved: Mapping[Index, Index | None], lead: Index) -> str:
    """Say which head is from which other, once if it is so in each batch member."""
    last = {x[-1:]: y[-1:] for x, y in moved.items() if y is not None}
    members = np.ndindex(lead[:-1])
    every = {(*at, *x): (*at, *y) for at in members for x, y in last.items()}
    # Where it is the same in each batch member heads are named without it.
    named = last if every == moved else moved
    words = [
        f"head {place(x)} {'has none' if y is None else f'from head {place(y)}'}"
        for x, y in named.items()
    ]
    order = _find_order(last, lead[-1]) if named is last else ""
    return name_first(words, 4, " and {} more") + order


def _find_order(last: Mapping[Index, Index], heads: int) -> str:
    """Say that heads are written group by group in another order, if they are."""
    for a in (x for x in range(2, heads) if heads % x == 0):
        order = np.arange(heads).reshape(a, -1).T.ravel()
        if all(last.get((h,), (h,)) == (y,) for h, y in enumerate(order.tolist())):
            return f", as if heads in order ({a}, {heads // a}) were written as ({heads // a}, {a})"
    return ""
