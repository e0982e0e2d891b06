"""Arrays that are read, or were written, with the strides of another layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from ...rounding.problems import Index, Problem
from ..causes.sampled import Alternative, answer_places

PADDED_TO = (16, 32, 64, 128)  # to which rows may be padded
_WORD_BITS = (8, 16, 32, 64)  # bits of a mask that are one number
_EARLIER = (8, 16, 32, 64, 128, 256)  # numbers of a mask
_STACKED = 2**22  # numbers of an array, at most, that is read with other strides
_SPLIT_WRONGLY = 2**20  # the same of queries and keys, if each row is of another head


def list_strides(problem: Problem) -> Iterator[Alternative]:
    """List arrays that are read with the strides of another layout."""
    heads = problem.lead[-1] if problem.lead else 1
    arrays = {"v": "values", "k": "keys", "q": "queries", "kv": "keys and values"}
    for names, called in arrays.items():
        rows, width = problem.first[names[-1]].shape
        text = f"{called} are read with the strides of"
        # One array alone may have its rows and columns exchanged.
        if names != "kv":
            turned = problem.replaced(names, lambda _, x: x.reshape(x.shape[::-1]).T)
            yield Alternative(f"{text} ({width}, {rows}), not ({rows}, {width})", turned)
        # Query heads that share a key head read one array.
        shared = heads // problem.key_heads if problem.key_heads and names != "q" else 1
        count = heads // shared
        if count > 1 and heads * rows * width <= _STACKED:
            for words, take in TURNED.items():
                turned = problem
                for x in names:
                    turned = turned.replaced(x, partial(_read_other, problem, x, shared, take))
                yield Alternative(f"{text} {words}", turned)
    of_head = sum(problem.shape[:2]) * problem.first["q"].shape[1]
    if heads > 1 and problem.packed is None and heads * of_head <= _SPLIT_WRONGLY:
        yield from _list_split(problem, heads)
    yield from _list_row_strides(problem)
    yield from _list_head_strides(problem)
    yield from _list_broadcast(problem)
    yield from _list_mask_strides(problem)
    yield from _list_member_strides(problem)


def _list_row_strides(problem: Problem) -> Iterator[Alternative]:
    """List rows of q, k or v that begin as far apart as those of another array, or as if padded."""
    widths = {x: problem.first[x].shape[1] for x in "qkv"}
    for name, width in widths.items() if problem.packed is None else ():
        padded = (width + -width % x for x in (8, *PADDED_TO))
        for apart in sorted({*widths.values(), *padded} - {width}):
            if apart < 2 * width:
                strided = problem.replaced(name, partial(_read_rows_apart, apart))
                text = f"rows of {name} begin {apart} numbers apart, not {width}"
                yield Alternative(text, strided)


def _read_rows_apart(apart: int, _: Index, x: Any) -> Any:
    at = apart * np.arange(len(x))[:, None] + np.arange(x.shape[1])
    return np.take(x.ravel(), at, mode="clip")


def _list_split(problem: Problem, heads: int) -> Iterator[Alternative]:
    """List kernels that read queries, keys and values, and write the output, with other strides."""
    n, shared = problem.shape[0], heads // (problem.key_heads or heads)
    # Where a row is computed: places of heads and queries are those of the output.
    back = (lambda h, i: divmod(i * heads + h, n)), lambda h, i: divmod(h * n + i, heads)[::-1]
    for (words, take), rule in zip(TURNED.items(), back, strict=True):
        turned = problem
        for x in "qkv":
            of_each = 1 if x == "q" else shared
            turned = turned.replaced(x, partial(_read_other, problem, x, of_each, take))
        answer = partial(answer_places, turned, partial(_find_computed, rule, heads, n))
        text = f"queries, keys, values and the output have the strides of {words}"
        yield Alternative(text, turned, answer=answer)


def _find_computed(
    rule: Callable[[int, int], tuple[int, int]], heads: int, n: int, place: int
) -> tuple[int, int]:
    """Find the head, of all, and the query that are at a place of the output."""
    head, i = divmod(place, n)
    other, row = rule(head % heads, i)
    return head - head % heads + other, row


def _list_head_strides(problem: Problem) -> Iterator[Alternative]:
    """List heads of keys and values of which each begins too few, or too many, rows after another.

    The rows may be counted by the keys that are seen, or by multiples of a block.
    """
    (n, m, _), heads = problem.shape, math.prod(problem.lead)
    if heads == 1 or heads * m * problem.first["k"].shape[1] > _STACKED or problem.packed:
        return
    counts = {n, *((m // x + c) * x for x, c in product(PADDED_TO, (-1, 0, 1, 2)))}
    if "mask" in problem.first:
        counts |= {int(np.sum(np.any(problem.first["mask"], 0)))}
    for names, rows in product(("kv", "k", "v"), sorted(counts - {0, m})):
        moved = problem
        for name in names:
            moved = moved.replaced(name, partial(_read_from_start, problem, name, rows))
        called = " and ".join({"k": "keys", "v": "values"}[x] for x in names)
        yield Alternative(f"heads of {called} begin {rows} rows apart, not {m}", moved)


def _read_from_start(problem: Problem, name: str, rows: int, index: Index, x: Any) -> Any:
    shared = problem.lead[-1] // problem.key_heads if problem.key_heads else 1
    heads = [problem.index_of(y) for y in range(0, math.prod(problem.lead), shared)]
    flat = np.concatenate([problem.read(y)[name] for y in heads])
    start = problem.number(index) // shared * rows
    return np.take(flat, start + np.arange(len(x)), 0, mode="clip")


def _list_broadcast(problem: Problem) -> Iterator[Alternative]:
    """List masks and biases that have one number for all keys, or queries, read with stride 1."""
    n, m, _ = problem.shape
    if problem.packed is not None or math.prod(problem.lead) * n * m > _STACKED:
        return
    for name in (x for x in ("mask", "bias") if x in problem.first):
        every = np.stack([problem.read(x)[name] for x in np.ndindex(problem.lead)])
        every = every.reshape(*problem.lead, n, m)
        ways = (-1, "query", "keys", np.arange(m)), (-2, "key", "queries", np.arange(n)[:, None])
        for axis, one, other, steps in ways:
            stored = every.take([0], axis)
            if np.any(every != stored) or every.shape[axis] == 1:
                continue
            for lead in range(len(problem.lead)):  # nor are other axes stored along which it is so
                first = stored.take([0], lead)
                stored = first if np.all(stored == first) else stored
            places = np.arange(stored.size).reshape(stored.shape) + steps
            read = np.broadcast_to(stored.ravel()[places % stored.size], every.shape)
            text = (
                f"the {name}, one number for each {one}, is read with stride 1 for {other}, not 0"
            )
            text += ": query i and key j have the number i + j"
            yield Alternative(text, problem.replaced(name, partial(_take_index, read)))


def _take_index(every: Any, at: Index, _: Any) -> Any:
    return every[at]


def list_overlapping(problem: Problem) -> Iterator[Alternative]:
    """List scores that sum channels of the next row, too, as if head sizes were padded."""
    lead, d = problem.lead, problem.first["q"].shape[1]
    if math.prod(lead) * sum(problem.shape[:2]) * d > _STACKED or problem.packed is not None:
        return
    for size, order in product(PADDED_TO, ("token", "head") if lead else ("token",)):
        if not 0 < (more := -d % size) < min(size, d):
            continue
        padded = problem
        for name in "qk":
            shared = lead[-1] // problem.key_heads if problem.key_heads and name == "k" else 1
            wider = partial(_read_past_row, problem, (name, shared, more), order == "head")
            padded = padded.replaced(name, wider)
        text = f"q . k also sums the first {more} channels of the next {order}, as if rows had "
        yield Alternative(f"{text}{d + more} channels, not {d}", padded)


def _read_past_row(
    problem: Problem, what: tuple[str, int, int], by_token: bool, index: Index, x: Any
) -> Any:
    """Read each row with some channels of the next, as rows lie head by head or token by token."""
    name, shared, more = what
    lead = problem.lead
    every = np.stack([problem.read(y)[name] for y in np.ndindex(lead)])
    every = every.reshape(*lead, *x.shape)[..., ::shared, :, :] if lead else every[0]
    every = np.swapaxes(every, -3, -2) if by_token else every
    later = np.roll(every.reshape(-1, x.shape[1]), -1, 0)
    later[-1] = 0.0
    later = later.reshape(every.shape)
    later = np.swapaxes(later, -3, -2) if by_token else later
    own = later[(*index[:-1], index[-1] // shared)] if lead else later
    return np.concatenate([x, own[:, :more]], -1)


def _list_mask_strides(problem: Problem) -> Iterator[Alternative]:
    """List masks and biases that are read with rows, or tiles of keys, of another length.

    All of them, or the part of the last n keys, as that of a tree of tokens, in words of bits.
    """
    n, m, _ = problem.shape
    if n * m > _STACKED or problem.packed is not None:
        return
    parts = {"": (0, m)} | ({f" of the last {n} keys": (m - n, n)} if 1 < n < m else {})
    for name, part in product((x for x in ("mask", "bias") if x in problem.first), parts):
        start, width = parts[part]
        lengths = {
            n,
            *(width + -width % x for x in (8, *PADDED_TO)),
            *(width - width % x for x in PADDED_TO),
        }
        lengths |= {x for x in _WORD_BITS if part and x < width}
        strides = {
            f"rows of {x} numbers, not {width}": (x, m) for x in sorted(lengths - {0, width})
        }
        # Tile t is then read from the place of tile 2 t.
        tiles = [x for x in PADDED_TO if x < width]
        strides |= {f"steps of two tiles of {x} keys, not one": (width, x) for x in tiles}
        for words, (row, tile) in strides.items():
            read = partial(_read_strided, start=start, row=row, tile=tile)
            text = f"the {name}{part} is read with {words}"
            yield Alternative(text, problem.replaced(name, read))
        for by in (x * sign for x in _EARLIER for sign in (1, -1)) if not part else ():
            text = f"the {name} is read {abs(by)} numbers too {'early' if by > 0 else 'late'}"
            yield Alternative(text, problem.replaced(name, partial(_read_moved, by)))
        for padded in sorted({m + -m % x for x in (8, *PADDED_TO)} - {m}) if not part else ():
            read = partial(_read_strided, start=0, row=m, tile=m, padded=padded)
            text = f"the {name} is read with rows of {m} numbers, where they are padded to {padded}"
            yield Alternative(text, problem.replaced(name, read))


def _list_member_strides(problem: Problem) -> Iterator[Alternative]:
    """List masks of keys of batch members of which those that any sees lie one after another."""
    (n, m, _), members = problem.shape, problem.lead[0] if problem.lead else 1
    few = members > 1 and math.prod(problem.lead) * n * m <= _STACKED
    if "mask" not in problem.first or not few or problem.packed is not None:
        return
    every = np.stack([problem.read(x)["mask"] for x in np.ndindex(problem.lead)])
    every = every.reshape(members, -1, m)
    rows: Any = every[:, 0]
    length = m - int(np.argmax(np.any(rows, 0)[::-1]))
    if length == m or (every != rows[:, None]).any():
        return
    written = np.zeros(rows.size, bool)
    written[: members * length] = rows[:, :length].ravel()
    read = rows.ravel()[np.arange(members)[:, None] * length + np.arange(m)]
    for words, mask in (("written", written.reshape(rows.shape)), ("read", read)):
        text = f"the masks of batch members are {words} with rows of {length} keys, not {m}"
        yield Alternative(text, problem.replaced("mask", partial(_take_member, mask)))


def _take_member(masks: Any, at: Index, mask: Any) -> Any:
    return np.broadcast_to(masks[at[0]], mask.shape)


def _read_strided(
    _: Index, x: Any, start: int, row: int, tile: int, padded: int | None = None
) -> Any:
    """Read rows of another length, and tiles of keys at twice their place; not beyond the end."""
    last = x[:, start:]
    keys = np.arange(last.shape[1])
    last = last if padded is None else np.pad(last, ((0, 0), (0, padded - len(keys))))
    # Where the wrong strides lead in an array that lies row by row.
    at = np.arange(len(x))[:, None] * row + keys + keys // tile * tile
    read = last.reshape(-1)[np.minimum(at, last.size - 1)]
    return np.concatenate([x[:, :start], read], -1)


def _read_moved(by: int, _: Index, x: Any) -> Any:
    return np.roll(x.ravel(), by).reshape(x.shape)


def _by_heads(x: Any) -> Any:
    return np.swapaxes(x, 0, 1).reshape(x.shape)


def _by_rows(x: Any) -> Any:
    return np.swapaxes(x.reshape(x.shape[1], x.shape[0], *x.shape[2:]), 0, 1)


# Heads, rows and columns of an array that is written as the other says.
TURNED: Mapping[str, Callable[[Any], Any]] = {
    "(heads, rows), not (rows, heads)": _by_heads,
    "(rows, heads), not (heads, rows)": _by_rows,
}


def _read_other(
    problem: Problem, name: str, shared: int, take: Callable[[Any], Any], index: Index, _: Any
) -> Any:
    heads = range(0, problem.lead[-1], shared)
    stack = np.stack([problem.read((*index[:-1], h))[name] for h in heads])
    return take(stack)[index[-1] // shared]
