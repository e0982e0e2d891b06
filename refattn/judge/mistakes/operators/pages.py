"""Blocks of a cache that sequences read in place of those in their block table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ....arrays.library import Doubles
from ...rounding.problems import Index, Problem
from ...verification.findings import name_first
from ..causes.sampled import Alternative, Place, Seen, attend, show_band, take_rows
from ..causes.slips import weigh_keys
from ..causes.wrong_rows import Sampled, row_sizes
from .strides import TURNED

BlockTable = npt.NDArray[np.int64]
_MOST_PAGES, _LEFT_BY_BLOCKS = 512, 16.0  # that are fitted; mean square that is left
_ANCHOR = 1e3  # weight of how many blocks are read, over that of the numbers
_SIZES_OF_BLOCKS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # of which a cache may be made
_TABLE_OF = {"kv": "", "v": ", for values only", "k": ", for keys only"}


def _take_first(x: BlockTable, count: int) -> BlockTable:
    at = np.arange(x.shape[1])
    return np.asarray(x[:, at // count * count] + at % count)


def _repeat(x: BlockTable, count: int) -> BlockTable:
    return np.asarray(x[:, np.arange(x.shape[1]) // count])


_TABLE_RULES: Mapping[str, Callable[[BlockTable], BlockTable]] = {
    "each entry of the block table is one too large": lambda x: x + 1,
    "each entry of the block table is one too small": lambda x: x - 1,
    "the next entry of the block table is read for each": lambda x: np.roll(x, -1, 1),
    "the entry before is read for each of the block table": lambda x: np.roll(x, 1, 1),
    "the block table is that of the next batch member": lambda x: np.roll(x, -1, 0),
    "the block table is that of the batch member before": lambda x: np.roll(x, 1, 0),
    "the block table is that of the first batch member": lambda x: 0 * x + x[:1],
    "the block table is read by columns": lambda x: x.ravel().reshape(x.shape[::-1]).T,
    **{
        f"of each {g} entries of the block table the first alone is used, and blocks after it are "
        "read for the others": partial(_take_first, count=g)
        for g in (2, 4, 8)
    },
    **{
        f"each entry of the block table is read {g} times": partial(_repeat, count=g)
        for g in (2, 4)
    },
    **{
        f"numbers of blocks are taken modulo {g}": lambda x, g=g: x % g  # type: ignore[misc]
        for g in (2**x for x in range(2, 17))
    },
}


def list_blocks_of_cache(
    problem: Problem, wrong: Sequence[Sampled], unit: float
) -> Iterator[Alternative]:
    """List kernels that read other blocks of the cache than the table says: by rules, or a fit."""
    packed = problem.packed
    if packed is None or packed.table is None or packed.blocks is None:
        return
    table, count = packed.table, len(packed.blocks((0,) * len(problem.lead))[0])
    for text, rule in _TABLE_RULES.items():
        other = rule(table)
        for names, called in _TABLE_OF.items() if np.any(other != table) else ():
            yield _read_table(problem, text + called, other, names=names)
    size = packed.blocks((0,) * len(problem.lead))[0].shape[1]
    for other_size in (x for x in _SIZES_OF_BLOCKS if x != size):
        for stride in (size, other_size):
            text = f"blocks of {size} keys are read as blocks of {other_size}: key j is key "
            text += f"j % {other_size} of entry j // {other_size} of the block table"
            text += f", and blocks begin {stride} keys apart" * (stride != size)
            other_read = _read_table(problem, text, table, other_size, stride)
            yield other_read
            if other_size < size:
                some = partial(_show_entries, problem, packed.keys, (size, other_size))
                yield other_read._replace(text=f"{text}: of as many entries as before", seen=some)
    for text, turn in TURNED.items() if problem.lead[-1] > 1 else ():
        turned = problem
        for name in "kv":
            turned = turned.replaced(name, partial(_turn_blocks, problem, turn, name))
        text = f"each block of the cache is read with the strides of {text}"
        yield Alternative(text, turned)
    yield from _list_read_in_order(problem, wrong, unit)
    if count > _MOST_PAGES or "bias" in problem.first:
        return
    read = table.copy()
    for member in sorted({x.rows.at[0] for x in wrong}):
        found = _fit_pages(problem, [x for x in wrong if x.rows.at[0] == member], unit)
        if found is None:
            return
        read[member, : len(found)] = found
    if np.any(read != table):
        yield _read_table(problem, _name_blocks(table, read), read)


def _show_entries(problem: Problem, keys: BlockTable, sizes: tuple[int, int], x: Place) -> Seen:
    """Show as many keys as there are in smaller blocks, one for each of the own."""
    count = -(-int(keys[x.at[0], 1]) // sizes[0]) * sizes[1]
    return np.asarray(show_band(problem)(x) & (x.j < count))


def _list_read_in_order(
    problem: Problem, wrong: Sequence[Sampled], unit: float
) -> Iterator[Alternative]:
    """List the kernel that reads keys one after another in the cache, from any slot on."""
    packed, starts = problem.packed, dict[int, int]()
    assert packed is not None
    assert packed.blocks is not None
    for x in ({y.rows.at[0]: y for y in wrong}).values():
        x = x.take(slice(-1, None))  # the last row sees most
        head, (k, v) = take_rows(problem, x.rows), map(_lay_slots, packed.blocks(x.rows.at))
        count = head.keys if head.mask is None else int(np.sum(head.mask))
        if head.sink is not None or head.bias is not None or not 0 < count <= len(k):
            return
        w = weigh_keys(head._replace(k=k, v=v, mask=None))[0][:, None]
        sums = np.pad(np.cumsum(w * np.insert(v, 0, 1.0, 1), 0), ((1, 0), (0, 0)))
        of_run = sums[count:] - sums[:-count]
        z = (of_run[:, 1:] / of_run[:, :1] - x.got) / (unit * row_sizes(x.got))
        off = np.mean(np.square(z), -1)
        starts[x.rows.at[0]] = int(np.argmin(off))
        if not np.min(off) < _LEFT_BY_BLOCKS:
            return
    where = [f"from slot {slot} in batch member {c}" for c, slot in starts.items()]
    text = "the block table is ignored: keys are read one after another in the cache, "
    text += name_first(where)
    for name in "kv":
        problem = problem.replaced(name, partial(_read_run, problem, starts, name))
    yield Alternative(text, problem)


def _lay_slots(x: Doubles) -> Doubles:
    return np.nan_to_num(x.reshape(-1, x.shape[-1]))


def _read_run(
    problem: Problem, starts: Mapping[int, int], name: str, index: Index, x: Doubles
) -> Doubles:
    packed = problem.packed
    if packed is None or packed.blocks is None or index[0] not in starts:
        return x
    slots = _lay_slots(packed.blocks(index)["kv".index(name)])
    return np.take(slots, starts[index[0]] + np.arange(len(x)), 0, mode="clip")


def _fit_pages(problem: Problem, wrong: Sequence[Sampled], unit: float) -> list[int] | None:
    """Find the blocks that a sequence reads: sums of weights and values are linear in them."""
    packed = problem.packed
    assert packed is not None
    assert packed.table is not None
    assert packed.blocks is not None
    member = wrong[0].rows.at[0]
    length = int(packed.keys[member, 1])
    # Blocks that hold NaN were not read: results are finite.
    finite = [np.isfinite(y).all((1, 2)) for x in wrong for y in packed.blocks(x.rows.at)]
    usable = np.flatnonzero(np.all(finite, 0))
    columns: list[Doubles] = []
    rest: list[Doubles] = []
    for x in wrong:
        k, v = (y[usable] for y in packed.blocks(x.rows.at))
        size = k.shape[1]
        slots = -(-length // size)
        head = take_rows(problem, x.rows)
        every = head._replace(k=k.reshape(-1, k.shape[-1]), v=v.reshape(-1, v.shape[-1]), mask=None)
        w = weigh_keys(every._replace(sink=None), attend(head).lse)
        w = w.reshape(len(w), *k.shape[:2])
        mask = np.ones((len(w), head.keys), bool) if head.mask is None else head.mask
        seen = np.pad(mask, ((0, 0), (0, -head.keys % size)))[:, : slots * size]
        seen = seen.reshape(len(w), slots, size)
        whole = np.atleast_1d(seen.all((0, 2)))
        scale = unit * row_sizes(x.got)
        # Blocks that all rows see whole count alike in any order; of the others the place matters.
        of_place = [np.ones(seen[:, 0].shape), *(seen[:, t] for t in np.flatnonzero(~whole))]
        sums = [
            np.einsum("rps,rs,psd->prd", w, y, v) - np.einsum("rps,rs->pr", w, y)[..., None] * x.got
            for y in of_place
        ]
        columns.append((np.concatenate(sums) / scale).reshape(len(of_place) * len(k), -1))
        sink = 0.0 if head.sink is None else np.exp(head.sink - attend(head).lse)[:, None]
        rest.append((sink * x.got / scale).ravel())
    if not len(usable) or len({len(x) for x in columns}) > 1:
        return None
    a, b = np.concatenate(columns, -1), np.concatenate(rest)
    anchors = np.kron(np.eye(len(of_place)), np.ones(len(k)))
    many = np.array([np.sum(whole), *np.ones(len(of_place) - 1)])
    if len(a) > a.shape[1] or not (np.all(np.isfinite(a)) and np.all(np.isfinite(b))):
        return None
    weight = _ANCHOR * float(np.sqrt(np.mean(np.sum(a * a, -1))))
    system = np.concatenate([a.T, weight * anchors]), np.concatenate([b, weight * many])
    share = np.linalg.lstsq(*system, rcond=1e-12)[0]
    counts = np.rint(share)
    left = b - counts @ a
    if (
        np.any(counts < 0)
        or np.any(anchors @ counts != many)
        or np.mean(left * left) > _LEFT_BY_BLOCKS
    ):
        return None
    own = packed.table[member, :slots].tolist()
    by_place = np.zeros((len(of_place), np.max(usable) + 1), int)
    by_place[:, usable] = counts.reshape(len(of_place), -1)
    found, spare = [-1] * slots, by_place[0].copy()
    for t in np.flatnonzero(whole).tolist():  # what is read at its place stays there
        if own[t] < len(spare) and spare[own[t]]:
            found[t], spare[own[t]] = own[t], spare[own[t]] - 1
    more = iter(np.repeat(np.arange(len(spare)), spare).tolist())
    partial_slots = iter(by_place[1:])
    return [
        x if x >= 0 else next(more) if whole[t] else int(np.argmax(next(partial_slots)))
        for t, x in enumerate(found)
    ]


def _read_table(
    problem: Problem,
    text: str,
    table: BlockTable,
    size: int = 0,
    stride: int = 0,
    names: str = "kv",
) -> Alternative:
    """Read the blocks of a table, of the own size or another, so many keys apart in the cache."""
    for name in names:
        follow = partial(_follow_table, problem, table, (size, stride), name)
        problem = problem.replaced(name, follow)
    return Alternative(text, problem)


def _follow_table(
    problem: Problem,
    table: BlockTable,
    sizes: tuple[int, int],
    name: str,
    index: Index,
    x: Any,
) -> Any:
    packed, j = problem.packed, np.arange(len(x))
    assert packed is not None
    assert packed.blocks is not None
    blocks = packed.blocks(index)["kv".index(name)]
    size, stride = (y or blocks.shape[1] for y in sizes)
    places = np.take(table[index[0]], j // size, mode="clip") * stride + j % size
    # Entries beyond the keys may be anything.
    return np.take(blocks.reshape(-1, blocks.shape[-1]), places, 0, mode="clip")


def _turn_blocks(
    problem: Problem, turn: Callable[[Any], Any], name: str, index: Index, x: Any
) -> Any:
    """Read the keys of each block where they are if it lies in memory another way."""
    packed, j, heads = problem.packed, np.arange(len(x)), problem.lead[-1]
    assert packed is not None
    assert packed.blocks is not None
    assert packed.table is not None
    shared = heads // (problem.key_heads or heads)
    own = ((*index[:-1], h) for h in range(0, heads, shared))
    every = np.stack([packed.blocks(y)["kv".index(name)][packed.table[index[0]]] for y in own])
    blocks = np.swapaxes(turn(np.swapaxes(every, 1, 2))[index[-1] // shared], 0, 1)
    return np.take(blocks.reshape(-1, x.shape[1]), j, 0, mode="clip")


def _name_blocks(table: BlockTable, read: BlockTable) -> str:
    words = [
        f"block {read[c, t]} in place of {table[c, t]} (entry {t} of batch member {c})"
        for c, t in np.argwhere(table != read).tolist()
    ]
    first = name_first(words, more=" and {} more")
    return f"other blocks are read than those of the block table: {first}"
