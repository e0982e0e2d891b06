"""Arrays that are read, or were written, with the strides of another layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from ....arrays.library import Doubles
from ....arrays.words import place
from ...rounding.head import SoftmaxHead
from ...rounding.problems import Index, Problem
from ...verification.findings import name_first
from ..causes.sampled import Alternative, Result, Rows, answer_places, attend, take_rows
from ..causes.slips import score_all, weigh_keys
from ..causes.wrong_rows import Sampled, number_sequences, row_sizes, thin

PADDED_TO = (16, 32, 64, 128)  # to which rows may be padded
_WORD_BITS = (8, 16, 32, 64)  # bits of a mask that are one number
_EARLIER = (8, 16, 32, 64, 128, 256)  # numbers of a mask
_STACKED = 2**22  # numbers of an array, at most, that is read with other strides
_SPLIT_WRONGLY = 2**20  # the same of queries and keys, if each row is of another head
_MOST_SUMMED, _LARGEST_EXPONENT = 2**24, 300.0  # terms, at most; of weights, which stay finite
_ROWS_BY_KEYS, _COUNTS_APART = 2**18, 16  # of rows and keys; keys, of which many are read
_MOST_UNITS, _ROWS_OF_UNIT, _COLUMNS = 32, 4, 6  # that are looked at, of heads by sequences
_NEAR, _MOST_READS, _LEFT = 25.0, 12, 9.0  # mean square of z, at most, of one row, and of all
PLURALS = {"q": "queries", "k": "keys", "v": "values"}
_PAST = {"": None, " (0 after the last)": 0, " (not 0 after the last)": 1}  # a mask of keys


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
    yield from _list_broadcast(problem)
    yield from _list_mask_strides(problem)
    yield from _list_member_strides(problem)


def _list_split(problem: Problem, heads: int) -> Iterator[Alternative]:
    """List kernels that read queries, keys and values, and write the output, with other strides."""
    shared = heads // (problem.key_heads or heads)
    for words, take in TURNED.items():
        turned = problem
        for x in "qkv":
            of_each = 1 if x == "q" else shared
            turned = turned.replaced(x, partial(_read_other, problem, x, of_each, take))
        text = f"queries, keys, values and the output have the strides of {words}"
        yield Alternative(text, turned, answer=dict(list_swaps(turned))[words])


def list_swaps(problem: Problem) -> Iterator[tuple[str, Callable[[Rows], Result]]]:
    """List results of which heads and rows are written in the order of the other."""
    n, heads = problem.shape[0], problem.lead[-1] if problem.lead else 1
    # The head and the query that are computed for a place of the result.
    back = (lambda h, i: divmod(i * heads + h, n)), lambda h, i: divmod(h * n + i, heads)[::-1]
    for words, rule in zip(TURNED, back, strict=True):
        if heads > 1:
            yield words, partial(answer_places, problem, partial(_find_computed, rule, heads, n))


def _find_computed(
    rule: Callable[[int, int], tuple[int, int]], heads: int, n: int, place: int
) -> tuple[int, int]:
    """Find the head, of all, and the query that are at a place of the output."""
    head, i = divmod(place, n)
    other, row = rule(head % heads, i)
    return head - head % heads + other, row


def _list_broadcast(problem: Problem) -> Iterator[Alternative]:
    """List masks and biases that have one number for all keys, or queries, read with stride 1."""
    n, m, _ = problem.shape
    if problem.packed is not None or math.prod(problem.lead) * n * m > _STACKED:
        return
    for name in (x for x in ("mask", "bias") if x in problem.first):
        every = np.stack([problem.read(x)[name] for x in np.ndindex(problem.lead)])
        every = every.reshape(*problem.lead, n, m)
        # Keys are one number apart; queries are, too, or a row of keys.
        ways = (-1, "query", "keys", 1), (-2, "key", "queries", 1), (-2, "key", "queries", m)
        for axis, one, other, apart in ways:
            stored = every.take([0], axis)
            if np.any(every != stored) or every.shape[axis] == 1:
                continue
            for lead in range(len(problem.lead)):  # nor are other axes stored along which it is so
                stored = first if np.all(stored == (first := stored.take([0], lead))) else stored
            places = np.arange(stored.size).reshape(stored.shape) + apart * np.indices((n, m))[axis]
            text = f"the {name}, one number for each {one}, is read with stride {apart} for {other}"
            text += f", not 0: query i and key j have the number {f'{apart} ' * (apart > 1)}i + j"
            inside, read = places < stored.size, stored.ravel()[places % stored.size]
            for words, rest in _PAST.items() if apart > 1 else [("", read)]:
                past = read if rest is None else np.where(inside, read, read.dtype.type(rest))
                moved = partial(_take_index, np.broadcast_to(past, every.shape))
                yield Alternative(text + words, problem.replaced(name, moved))


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
            read = partial(read_strided, start=start, row=row, tile=tile)
            text = f"the {name}{part} is read with {words}"
            yield Alternative(text, problem.replaced(name, read))
        for by in (x * sign for x in _EARLIER for sign in (1, -1)) if not part else ():
            text = f"the {name} is read {abs(by)} numbers too {'early' if by > 0 else 'late'}"
            yield Alternative(text, problem.replaced(name, partial(_read_moved, by)))
        for padded in sorted({m + -m % x for x in (8, *PADDED_TO)} - {m}) if not part else ():
            read = partial(read_strided, start=0, row=m, tile=m, padded=padded)
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
    for words, mask in (("written", written), ("read", read)):
        text = f"the masks of batch members are {words} with rows of {length} keys, not {m}"
        of_lead = mask.reshape(members, *(1,) * len(problem.lead), m)
        every = np.broadcast_to(of_lead, (*problem.lead, n, m))
        yield Alternative(text, problem.replaced("mask", partial(_take_index, every)))


def read_strided(
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


class Way(NamedTuple):
    """Which arrays are read at other rows, in which order rows lie, and how far apart keys are."""

    names: str  # "kv", "k", "v" or "qkv"
    by_token: bool  # whether the order is members, tokens, heads, and not members, heads, tokens
    step: int  # rows from one key to the next


ReaderName = tuple[Index, int]  # a head and a sequence


class Reader(NamedTuple):
    """Some rows of a head that see keys of one sequence."""

    rows: Rows
    sequence: int
    keys: slice

    @property
    def name(self) -> ReaderName:
        """The head and the sequence."""
        return self.rows.at, self.sequence


Stretch = tuple[int, int]  # the row of the first key, and how many keys


class Memory(NamedTuple):
    """Rows of q, k and v of all heads as they lie one after another; zeros are after the last."""

    problem: Problem
    heads: int  # of keys
    share: int  # query heads of each of them
    lay_out: Callable[[str, bool], Doubles]  # rows of an array, token by token or head by head

    @classmethod
    def of(cls, problem: Problem) -> Memory:
        """Return the memory of a problem with heads."""
        every, keys = problem.lead[-1], problem.key_heads or problem.lead[-1]

        @lru_cache(maxsize=5)
        def lay_out(name: str, by_token: bool) -> Doubles:
            share = 1 if name == "q" else every // keys
            heads = [x for x in np.ndindex(problem.lead) if x[-1] % share == 0]
            stack = np.stack([problem.read(x)[name] for x in heads])
            stack = stack.reshape(-1, every // share, *stack.shape[1:])
            stack = np.swapaxes(stack, 1, 2) if by_token else stack
            return np.asarray(stack.reshape(-1, stack.shape[-1]))

        return cls(problem, keys, every // keys, lay_out)

    def split(self, rows: Rows) -> Iterator[tuple[Any, Reader]]:
        """Split rows of a head by the sequences that they are of."""
        packed, numbers = self.problem.packed, number_sequences(self.problem, rows.queries)
        if packed is None or numbers is None:
            yield slice(None), Reader(rows, 0, slice(0, self.problem.shape[1]))
            return
        for s in np.unique(numbers).tolist():
            some, keys = numbers == s, slice(*packed.keys[s : s + 2].tolist())
            yield some, Reader(rows._replace(queries=rows.queries[some]), s, keys)

    def say_start(self, name: ReaderName, row: int, by_token: bool) -> str:
        """Say where a unit begins to read."""
        (member, head, token), (at, s) = self.locate(row, by_token), name
        sequence = f" of sequence {s}" if self.problem.packed is not None else ""
        of = f" of member {member}" if len(self.problem.lead) > 1 else ""
        return f"head {place(at)}{sequence} from token {token} of key head {head}{of} on"

    def locate(self, row: Any, by_token: bool) -> tuple[Any, Any, Any]:
        """Return the members, the key heads and the tokens of rows."""
        m = self.problem.shape[1]
        if by_token:
            return row // self.heads // m, row % self.heads, row // self.heads % m
        return row // m // self.heads, row // m % self.heads, row % m

    def take_queries(self, unit: Reader, way: Way, first: Any) -> Doubles:
        """Take the queries from where keys are read: (firsts, rows, columns)."""
        n, heads = self.problem.shape[0], self.problem.lead[-1]
        member, of_keys, token = self.locate(first, way.by_token)
        head = of_keys * self.share + unit.rows.at[-1] % self.share
        later = (token - unit.keys.start)[:, None] + unit.rows.queries
        if way.by_token:
            at = (member[:, None] * n + later) * heads + head[:, None]
        else:
            at = (member * heads + head)[:, None] * n + later
        return _take_inside(self.lay_out("q", way.by_token), at)

    def read(self, unit: Reader, way: Way | None = None, read: Stretch = (0, 0)) -> SoftmaxHead:
        """Take the queries of a unit with its own keys, or with those that are read."""
        head, j = take_rows(self.problem, unit.rows), unit.keys
        arrays: dict[str, Any] = {"q": head.q, "k": head.k[j], "v": head.v[j]}
        seen = np.ones((len(head.q), head.keys), bool) if head.mask is None else head.mask
        seen, bias = seen[:, j], None if head.bias is None else head.bias[:, j]
        if way is not None:
            (first, count), keys = read, seen.shape[1]
            more, at = ((0, 0), (0, max(count - keys, 0))), first + way.step * np.arange(count)
            seen = np.pad(seen, more, constant_values=True)[:, :count]
            bias = None if bias is None else np.pad(bias, more)[:, :count]
            for x in way.names.replace("q", ""):
                arrays[x] = _take_inside(self.lay_out(x, way.by_token), at)
            if "q" in way.names:
                arrays["q"] = self.take_queries(unit, way, np.array([first]))[0]
        sink, head = head.sink, head._replace(**arrays, mask=seen, bias=bias, sink=None)
        return head if sink is None else head.with_sink(sink)

    def find(self, unit: Reader, got: Doubles, std: float, way: Way) -> list[Stretch]:
        """Find where some rows may have read, and how many keys: what leaves only roundings."""
        sizes = std * row_sizes(got)
        # Keys are told best by the row that sees most of them.
        seen: Any = self.read(unit).mask
        row = [int(np.argmax(np.sum(seen, -1)))]
        one = unit._replace(rows=unit.rows._replace(queries=unit.rows.queries[row]))
        columns = thin(np.argsort(sizes[row[0]]), _COLUMNS)
        nearest: dict[Stretch, float] = {}
        for count, sums in self._sum(one, way, columns):
            with np.errstate(all="ignore"):
                z = (sums[:, 1:] / sums[:, :1] - got[row][:, columns]) / sizes[row][:, columns]
            far = np.mean(np.square(z), -1)
            first = int(np.argmin(np.where(np.isnan(far), math.inf, far)))
            nearest[first, count] = float(far[first])
        some = sorted((x for x, far in nearest.items() if far < _NEAR), key=nearest.__getitem__)
        every = {x: attend(self.read(unit, way, x)).out for x in some[:_MOST_READS]}
        return [x for x, y in every.items() if np.mean(np.square((y - got) / sizes)) < _LEFT]

    def _sum(self, unit: Reader, way: Way, columns: Any) -> Iterator[tuple[int, Doubles]]:
        """Sum weights, and weights times values, of a query from each row on: (rows, 1 + columns).

        If it sees all keys it may see fewer, or more.
        """
        own = self.read(unit)
        shown: Any = own.mask
        (lse,), keys, k = attend(own).lse, own.keys, self.lay_out("k", way.by_token)
        of_sink = 0.0 if own.sink is None else math.exp(own.sink - lse)
        seen = np.where(shown[0], 1.0 if own.bias is None else np.exp(own.bias[0]), 0.0)
        values, of_own = (
            np.insert(x[:, columns], 0, 1.0, 1)
            for x in (self.lay_out("v", way.by_token), own.v[:keys])
        )
        # The last of these rows is what lies past the end.
        values = np.append(values, np.eye(1, values.shape[1]), 0)
        bare = own._replace(k=np.append(k, 0 * k[:1], 0), bias=None, mask=None, sink=None)
        first = int(np.sum(np.cumprod(seen == 1)))
        in_turn = way.names == "kv" and not np.any(seen[first:])
        terms = len(k) * (1 if in_turn else keys) * (_COLUMNS if way.names != "qkv" else k.shape[1])
        if terms > _MOST_SUMMED:
            return
        slide = partial(_slide, count=keys, step=way.step)
        if way.names == "v":
            sums = slide(values) @ weigh_keys(own)[0][:, None]
        elif way.names == "qkv":
            q = self.take_queries(unit, way, np.arange(len(k)))
            scores = own.scale * (q @ slide(bare.k))[:, 0]
            scores = scores if own.softcap is None else own.softcap * np.tanh(scores / own.softcap)
            sums = slide(values) @ (_exponentiate(scores - lse) * seen)[..., None]
        else:
            e = _exponentiate(score_all(bare).T - lse)
            if way.names == "k":
                sums = slide(e) @ (seen[:, None] * of_own)
            elif not in_turn:
                sums = slide(e * values) @ seen[:, None]
            else:
                # With many rows only some numbers of keys are tried.
                by = 1 if len(k) * keys < _ROWS_BY_KEYS else _COUNTS_APART
                counts = {first, *range(max(by, 2), 2 * keys + 1, by)} if first == keys else {first}
                runs = _lay_apart(e * values, max(counts), way.step)
                runs = np.pad(np.cumsum(runs, 0), ((1, 0), (0, 0), (0, 0)))
                for count in counts:
                    sums = (runs[count:] - runs[:-count]).reshape(-1, values.shape[1])[: len(k)]
                    yield (
                        count if first == keys else keys,
                        sums + of_sink * np.eye(1, sums.shape[1]),
                    )
                return
        sums = sums.reshape(len(k), -1)
        yield keys, sums + of_sink * np.eye(1, sums.shape[1])


def _take_inside(rows: Doubles, at: Any) -> Doubles:
    """Take some rows; zeros where there are none."""
    inside = (at >= 0) & (at < len(rows))
    return np.where(inside[..., None], rows[np.where(inside, at, 0)], 0.0)


def _exponentiate(scores: Doubles) -> Doubles:
    return np.exp(np.minimum(scores, _LARGEST_EXPONENT))


def _lay_apart(rows: Doubles, more: int, step: int) -> Doubles:
    """Lay rows by their place in a step, (steps, places, columns); the last is repeated after."""
    many = -(-len(rows) // step) + more
    past = np.repeat(rows[-1:], many * step - len(rows), 0)
    return np.asarray(np.concatenate([rows, past]).reshape(many, step, -1))


def _slide(rows: Doubles, count: int, step: int) -> Doubles:
    """List so many rows, a step apart, from each on but the last: (rows, columns, count)."""
    apart = np.lib.stride_tricks.sliding_window_view(_lay_apart(rows, count, step), count, 0)
    return np.asarray(apart.reshape(-1, *apart.shape[2:])[: len(rows) - 1])


def list_addresses(problem: Problem, wrong: Sequence[Sampled], std: float) -> Iterator[Alternative]:
    """List kernels that read rows of other heads, tokens or members, or past the last key.

    From which row each head reads, and how many, is what leaves its outputs only roundings.
    """
    if not problem.lead or (problem.packed is not None and problem.packed.table is not None):
        return
    memory = Memory.of(problem)
    split = [(u, x.got[some]) for x in wrong for some, u in memory.split(x.rows)]
    if not split or not all(np.all(np.isfinite(y)) and np.any(y) for _, y in split):
        return
    taken = []
    for unit, got in (split[x] for x in thin(np.arange(len(split)), _MOST_UNITS)):
        some = thin(np.arange(len(got) // 2, len(got)), _ROWS_OF_UNIT)  # that see many keys
        rows = unit.rows._replace(queries=unit.rows.queries[some])
        taken.append((unit._replace(rows=rows), got[some]))
    orders = (False, True) if memory.heads > 1 else (False,)
    steps = dict.fromkeys((1, memory.heads, problem.lead[-1], 2))
    # Several orders of memory may fit some rows: one by a rule comes before heads one by one.
    fitting: list[Alternative] = []
    for way in (Way(*x) for x in product(("kv", "k", "v", "qkv"), orders, steps)):
        found: dict[ReaderName, list[Stretch]] = {}
        for unit, got in taken:
            found[unit.name] = memory.find(unit, got, std, way)
            if not found[unit.name]:
                break
        else:
            fitting += _name_reads(memory, way, [u.name for u, _ in split], found)
    yield from sorted(fitting, key=lambda x: x.named)


class Rule(NamedTuple):
    """The row of the first key as a sum of multiples of the places of members and heads."""

    factors: tuple[int, int, int]  # of 1, of the member or sequence, and of the head
    share: int  # query heads that are one head here
    relative: bool  # whether rows are counted from the first of the sequence

    def places(self, memory: Memory, unit: Reader) -> tuple[int, int, int]:
        """Return what the factors are multiplied with."""
        member, head = divmod(memory.problem.number(unit.rows.at), memory.problem.lead[-1])
        return 1, member + unit.sequence, head // self.share

    def start(self, memory: Memory, unit: Reader, by_token: bool) -> int:
        """Return the row that is 0."""
        return int(self.relative * unit.keys.start * (memory.heads if by_token else 1))

    def first(self, memory: Memory, unit: Reader, by_token: bool) -> int:
        """Return the row of the first key of a unit."""
        factors = zip(self.factors, self.places(memory, unit), strict=True)
        return int(self.start(memory, unit, by_token) + sum(x * y for x, y in factors))

    def write(self, step: int, members: bool = True) -> str:
        """Write the row of key j of a head."""
        heads = "h" if self.share == 1 else f"(h // {self.share})"
        of = "s" if self.relative else "b"
        terms = [(self.factors[1] * members, of), (self.factors[2], heads), (step, "j")]
        words = [x if c == 1 else f"{c} {x}" for c, x in terms if c]
        return " + ".join(words + [str(x) for x in self.factors[:1] if x]).replace("+ -", "- ")


def _find_rule(memory: Memory, by_token: bool, rows: Sequence[tuple[Reader, int]]) -> Rule | None:
    """Find the rule that some first rows follow, if there is one."""
    packed = memory.problem.packed is not None
    for share, relative in product(dict.fromkeys((memory.share, 1)), (packed, False)):
        rule = Rule((0, 0, 0), share, relative)
        x = np.array([rule.places(memory, u) for u, _ in rows])
        y = np.array([row - rule.start(memory, u, by_token) for u, row in rows])
        varies = np.array([True, *np.any(x != x[:1], 0)[1:]])
        factors = np.zeros(3, int)
        factors[varies] = np.rint(np.linalg.lstsq(x[:, varies], y)[0]).astype(int)
        if np.array_equal(x @ factors, y):
            return rule._replace(factors=tuple(factors.tolist()))
    return None


def _name_reads(
    memory: Memory, way: Way, wrong: Sequence[ReaderName], found: Mapping[ReaderName, list[Stretch]]
) -> Iterator[Alternative]:
    """Say from where units read: by a rule for all, or for the wrong ones, or of each."""
    (n, m, _), packed = memory.problem.shape, memory.problem.packed is not None
    heads = (Rows(x, np.arange(n), np.arange(m)) for x in np.ndindex(memory.problem.lead))
    units = {u.name: u for x in heads for _, u in memory.split(x)}
    lengths = {x: u.keys.stop - u.keys.start for x, u in units.items()}
    # As many keys more in all of them: of those that fit the roundest number.
    fits = [{count - lengths[x] for _, count in y} for x, y in found.items()]
    whole = max(lengths.values())
    fitting = sorted(set.intersection(*fits), key=lambda x: (x != 0, -math.gcd(whole + x, 64), x))
    if not fitting:
        return
    more = fitting[0]
    firsts = {x: next(y for y, z in reads if z - lengths[x] == more) for x, reads in found.items()}
    step, of_heads = (memory.heads, 1) if way.by_token else (1, m)
    given = Rule((0, 0 if packed else m * memory.heads, of_heads), memory.share, packed)
    own = {x: given.first(memory, u, way.by_token) for x, u in units.items()}
    # Right units read their own keys, if these may be told from what is read.
    right = set(units) - set(wrong) if not more and way.step == step else set()
    rules = [
        (_find_rule(memory, way.by_token, [(units[x], (own | firsts)[x]) for x in y]), z)
        for y, z in (([*firsts, *right], [*units]), ([*firsts], wrong))
    ]
    rule, names = next((x for x in rules if x[0] is not None), (None, wrong))
    if rule is not None:
        firsts = {x: rule.first(memory, units[x], way.by_token) for x in names}
    elif len(firsts) < len(wrong):
        return
    order = "tokens before heads" if way.by_token else "heads before tokens"
    called = " and ".join(PLURALS[x] for x in way.names).replace("s and k", "s, k")
    moved = [x for x in firsts if way.step != step or firsts[x] != own[x]]
    starts = [memory.say_start(x, firsts[x], way.by_token) for x in moved]
    text = f"{called} are read from other rows of memory with {order}: "
    if not moved and more > 0:
        end = firsts[wrong[0]] + step * lengths[wrong[0]]
        text = f"{more} keys past the end are also read: rows that follow in memory with {order} "
        text += f"({memory.say_start(wrong[0], end, way.by_token)}), 0 after the last"
    elif not moved:
        text = f"only the first {whole + more} keys are read"
    elif rule is not None:
        members = math.prod(memory.problem.lead[:-1]) > 1
        row = f"key j of query head h{' of member b' * members}"
        text += f"{row} is row {rule.write(way.step)}, not {given.write(step, members)}"
        text += f"{' of those from the first of the sequence on' * rule.relative} ({starts[0]})"
    else:
        text += f"every {way.step} rows, " * (way.step > 1) + name_first(
            starts, more=" and {} more"
        )
    if moved and more:
        text += f"; {whole + more} keys are read, not {whole}" if not packed else f"; {more:+} keys"
    reads = {x: (y, lengths[x] + more) for x, y in firsts.items()}
    answer = partial(_answer_reads, memory, way, reads)
    yield Alternative(text, memory.problem, answer=answer, named=rule is None)


def _answer_reads(
    memory: Memory, way: Way, reads: Mapping[ReaderName, Stretch], rows: Rows
) -> Result:
    """Compute some rows of a head from what its units read."""
    result = Result(*(x.copy() for x in Alternative("", memory.problem).result(rows)))
    for some, unit in memory.split(rows):
        if unit.name in reads:
            other = attend(memory.read(unit, way, reads[unit.name]))
            for x, y in zip(result, other, strict=True):
                x[some] = y
    return result
