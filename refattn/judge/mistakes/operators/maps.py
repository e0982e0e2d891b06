"""Maps of places: where a kernel may look instead, as rules with a size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Places = npt.NDArray[np.int64]
_POWERS = (2, 4, 8, 16, 32, 64, 128, 256)
_GROUPS = (2, 3, 4, 5, 6, 7, 8, 10, 12, 16)  # query heads that may share a key head


class Map(NamedTuple):
    """A rule of places, written with @ for a place."""

    text: str
    of: Callable[[Places], Places]

    def named(self, x: str) -> str:
        """Write the rule for a place of this name."""
        return self.text.replace("@", x)


_PLACE_RULES: Mapping[str, tuple[tuple[int, ...], Callable[[Places, int], Places]]] = {
    "-@": ((1,), lambda x, s: -x),
    "@ + @ % {s}": (_POWERS, lambda x, s: x + x % s),
    "{s} (@ // {s})": (_POWERS, lambda x, s: x // s * s),
    "@ xor {s}": ((1, *_POWERS), lambda x, s: x ^ s),
    "@ xor {t}": (_POWERS[1:], lambda x, s: x ^ (s - 1)),
    "@ % {s}": (_POWERS, lambda x, s: x % s),
    "@ - {s} (@ // {s} % 2)": (_POWERS, lambda x, s: x - s * (x // s % 2)),
    "@ + {s} - {s} (@ // {s} % 2)": (_POWERS, lambda x, s: x + s - s * (x // s % 2)),
    "@ // {s}": (_GROUPS, lambda x, s: x // s),
    "{s} @": (_GROUPS, lambda x, s: s * x),
}


def list_maps(most: int) -> Iterator[Map]:
    """List maps of fewer than so many places, the plainest first."""
    for text, (sizes, rule) in _PLACE_RULES.items():
        for size in (x for x in sizes if x < most):
            yield Map(text.format(s=size, t=size - 1), partial(_apply, rule, size))
    for block in (x for x in _POWERS if 8 <= x < most):
        for rows in (x for x in _POWERS if x * x <= block * 8 and 2 * x < block):
            # As if the places of a block were written by columns, and read by rows.
            order = np.arange(block).reshape(rows, -1).T.ravel()
            place = f"(@ % {rows}) * {block // rows} + @ % {block} // {rows}"
            name = f"@ // {block} * {block} + {place}"
            yield Map(name, partial(_permute, order))


def _apply(rule: Callable[[Places, int], Places], size: int, x: Places) -> Places:
    return rule(x, size)


def _permute(order: Places, x: Places) -> Places:
    return np.asarray(x - x % len(order) + order[x % len(order)])


def write_shift(words: str, by: int) -> str:
    """Write a place that is so much later."""
    return f"{words} {'-+'[by > 0]} {abs(by)}" if by else words
