"""Backward passes whose sums count wrongly: tiles, columns of values, or chunks of keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations, product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ....arrays.blocks import blocks
from ....arrays.library import Doubles
from ....arrays.words import place
from ...rounding.problems import Index, Problem
from ...rounding.saved import BackwardHead
from ...verification.findings import name_first, name_span
from ..causes.backward import Backward, Candidate, HeadPass, Kept, Lookup, compute_gradient
from ..causes.sampled import Alternative, Place, Rows, Seen
from ..causes.slips import PARTS, TILE_SIZES
from ..causes.wrong_rows import Sampled, find_tiles, row_sizes, thin
from .backward_places import GROUPED_PAIRS
from .sums import LEFT_BY_COUNTS, PartTerms, describe_keys, fit_counts, stack_terms

_ROWS_COUNTED, _HEADS_COUNTED = 16, 4  # by which counts are known
_MOST_GROUPS = 8  # of columns
_FEWEST_KEYS = 4  # of a chunk
_NO_WEIGHT = 1e-9  # times what it should be
_MOST_TILES, _ROWS_OF_TILE, _MOST_COUNT = 64, 32, 16  # by which counts are known; and how often
COUNTS = {0: "are left out", 2: "count twice"} | {x: f"count {x} times" for x in range(3, 17)}
HowOften = npt.NDArray[np.int64]


# --- tiles that count otherwise -------------------------------------------------------------------


class _Tiles(NamedTuple):
    """How often tiles of keys count, or of queries, by head and tile of rows of some lengths."""

    counts: Mapping[tuple[Index, int], npt.NDArray[np.int64]]
    length: int
    size: int
    rows: str = "queries"

    def add(self, x: Place, index: Index, bias: Doubles | None) -> Doubles:
        """Add the logarithm of counts to scores."""
        of_keys = self.rows == "keys"
        rows, places = (x.j, x.i[:, 0]) if of_keys else (x.i[:, 0], x.j)
        ones = np.ones(np.max(places, initial=0) // self.size + 1)
        times = [self.counts.get((index, at), ones) for at in (rows // self.length).tolist()]
        more = np.log(np.maximum(np.stack(times)[:, places // self.size], 1e-300))
        more = more.T if of_keys else more
        return np.asarray(more if bias is None else bias + more)

    def pair(self) -> dict[tuple[Index, int], Sequence[int]]:
        """Pair tiles that are lost with those that count too often: which is read for each tile."""
        read: dict[tuple[Index, int], Sequence[int]] = {}
        for at, count in self.counts.items():
            source = np.arange(len(count))
            more = np.repeat(source, np.maximum(count - 1, 0))
            if len(more) != np.sum(count == 0):
                return {}
            source[count == 0] = more
            read[at] = source.tolist()
        return read


def list_tiles_counted(back: Backward) -> Iterator[Candidate]:
    """List passes in which tiles of keys count otherwise in dq, or of queries in dk and dv."""
    for of in sorted(back.failed, key=lambda x: x != "dq"):
        found, forward = _count_tiles(back, of), back.gradients[of].forward
        if found is None or len({c for x in found.counts.values() for c in x.tolist()}) == 1:
            continue  # a factor is no count
        text = f"in the backward pass {_describe_counts(forward, found)}"
        if of == "dq" and forward.shape[1] % found.size == 0 and (read := found.pair()):
            yield Candidate(text, answer=partial(_read_tiles, back, read, found))
        heads = back.gradients[of].heads
        every = {(y, at): c for (x, at), c in found.counts.items() for y in heads[x]}
        bias = found._replace(counts=every).add
        back.forward.append(Alternative(text, forward, bias=bias))
        yield Candidate(text, len(back.forward) - 1)


def _count_tiles(back: Backward, of: str) -> _Tiles | None:
    """Fit how often tiles add to wrong rows: of each head, or of each tile of rows."""
    (n, m, _), wrong, unit = back.first.forward.shape, back.list_wrong(of), back.samples[of].unit
    # Beside a head without wrong rows, tiles that are wrong in every other are found, too.
    longest = find_tiles(np.pad(back.samples[of].wrong, ((0, 1), (0, 0))))
    rows, summed = (n, m) if of == "dq" else (m, n)
    lengths = [x for x in (rows, *TILE_SIZES[::-1]) if x <= (longest or rows)]
    sizes = [x for x in TILE_SIZES[::-1] if wrong and x < summed <= _MOST_TILES * x]
    for length, size in product(lengths, sizes):
        counts, usual = dict[tuple[Index, int], HowOften](), np.ones(-(-summed // size))
        places = ((x, y) for x in wrong for y in np.unique(x.rows.queries // length).tolist())
        add = partial(_add_tiles, back, of, size)
        for x, at in places:
            some = x.take(x.rows.queries // length == at).few(_ROWS_OF_TILE)
            if (found := fit_counts(*stack_terms([some], unit, add), usual, _MOST_COUNT)) is None:
                break
            counts[x.rows.at, at] = found.astype(int)
        else:
            return _Tiles(counts, length, size, back.parts[of].problem.rows)
    return None


def _add_tiles(back: Backward, of: str, size: int, x: Sampled) -> PartTerms:
    return back.sum_tiles(of, x, size), x.got


def _describe_counts(problem: Problem, x: _Tiles) -> str:
    rows, called = ("queries", "keys") if x.rows == "queries" else ("keys", "queries")
    (n, m), counts = problem.shape[:2] if rows == "queries" else problem.shape[1::-1], x.counts
    (index, at), first = next(iter(counts.items()))

    def spans(times: int) -> str:
        tiles = np.split(np.arange(len(first)), np.flatnonzero(np.diff(first)) + 1)
        some = (y * x.size for y in tiles if first[y[0]] == times)
        return " and ".join(f"{y[0]} to {min(y[-1] + x.size, m) - 1}" for y in some)

    words = [f"{called} {spans(y)} {z}" for y, z in COUNTS.items() if y in first]
    text = ", ".join(words)
    if 0 in first and np.sum(first) == len(first):
        # As many tiles are lost as others count too often.
        text += " (used instead)"
    alike = all(np.array_equal(y, first) for y in counts.values())
    if alike and x.length == n:
        return text
    where = name_span(rows, np.arange(n)[at * x.length :][: x.length])
    if alike and {*counts} == {(y, at) for y, _ in counts} and len(counts) > 1:
        return f"{text} for {where}"
    kind = "heads" if x.length == n else "tiles of rows"
    more = f" (and {called} in {len(counts) - 1} more {kind})" if len(counts) > 1 else ""
    least, most = (f({c for y in counts.values() for c in y.tolist()}) for f in (min, max))
    what = " or ".join(["are lost"] * (least == 0) + ["count more than once"] * (most > 1))
    rows = f"{where} of head {place(index)}"
    return f"tiles of {x.size} {called} {what}: for {rows}, {text}{more}"


def _read_tiles(
    back: Backward,
    read: Mapping[tuple[Index, int], Sequence[int]],
    tiles: _Tiles,
    of: str,
    index: Index,
    heads: Sequence[Index],
) -> Doubles:
    """Compute a gradient in which queries read tiles of keys in the place of others."""
    (n, m, _), plain = back.gradients[of].forward.shape, Alternative("", back.first.forward)
    rows = back.parts[of].problem.shape
    total = np.zeros((rows[0], rows[2]))
    for head, i in product(heads, blocks(0, n, tiles.length)):
        (held, kept), queries = back.keep(of, head), np.arange(i.start, i.stop)
        sources = read.get((head, i.start // tiles.length), range(m // tiles.size))
        for j, source in zip(blocks(0, m, tiles.size), sources, strict=True):
            keys = source * tiles.size + np.arange(tiles.size)
            again = BackwardHead(plain.head(Rows(head, queries, keys)), held.d_out[i], None)
            left = Kept(*(x[i] for x in kept))
            total[i if of == "dq" else j] += compute_gradient(again, left, of)
    return total


# --- columns and chunks that count otherwise ------------------------------------------------------


def _take_few(back: Backward, of: str) -> list[Sampled]:
    wrong = thin(back.list_wrong(of), _HEADS_COUNTED)
    return [x.few(_ROWS_COUNTED) for x in wrong]


def list_columns_counted(back: Backward) -> Iterator[Candidate]:
    """List passes in which columns count otherwise in d_out . v, or in D = d_out . out."""
    of, d_v = "dq" if "dq" in back.failed else "dk", back.first.forward.shape[2]
    some = _take_few(back, of) if of in back.failed else []
    if not some:
        return
    group = np.arange(d_v) // -(-d_v // _MOST_GROUPS)
    each, none = [1.0 * (group == x) for x in range(group[-1] + 1)], np.zeros(d_v)
    pairs = [(x, none) for x in each] + [(none, x) for x in each]
    ways = [Candidate("", change=partial(_weigh_columns, *x)) for x in pairs]
    counts = fit_counts(*back.stack_ways(ways, of, some), np.ones(len(ways)))
    both = [] if counts is None else np.split(counts, 2)
    if all(len({*x.tolist()}) == 1 for x in both):  # a factor is no count
        return
    words = []
    for count, name in zip(both, ("d_out . v", "D = d_out . out"), strict=True):
        for c in np.unique(count[count != 1]).tolist():
            often = COUNTS.get(c, f"count {c:g} times")
            some_of = name_span("columns", np.flatnonzero((count == c)[group]))
            words.append(f"{'all columns' if np.all(count == c) else some_of} {often} in {name}")
    change = partial(_weigh_columns, both[0][group], both[1][group])
    yield Candidate(f"in the backward pass {' and '.join(words)}", change=change)


def _weigh_columns(of_values: Doubles, of_delta: Doubles, x: BackwardHead, y: Kept) -> HeadPass:
    assert x.out is not None
    delta = np.sum(of_delta * x.d_out * x.out, -1)
    return x._replace(head=x.head._replace(v=of_values * x.head.v)), y._replace(delta=delta)


def list_chunks_seen(back: Backward) -> Iterator[Candidate]:
    """List passes in which chunks of queries see other chunks of keys, or a triangle of these.

    So it is where chunks go round a ring, and each pair is masked as if it were on the diagonal.
    """
    forward = back.first.forward
    n, m, _ = forward.shape
    wrong = back.list_wrong("dq") if "dq" in back.failed else []
    if not wrong or n * m > GROUPED_PAIRS or n != m or forward.packed is not None:
        return
    free = len(back.forward)
    back.forward.append(Alternative("", forward._replace(causal=False, window=(None, None))))
    for size in dict.fromkeys(-(-m // x) for x in PARTS if m // x >= _FEWEST_KEYS):
        parts = -(-m // size)
        shown = np.zeros((parts, 2 * parts), int)
        for r in range(parts):
            here = (x.take(x.rows.queries // size == r) for x in thin(wrong, _HEADS_COUNTED))
            some = [x.few(_ROWS_COUNTED) for x in here if len(x.got)]
            add = partial(_sum_chunks, back, Candidate("", free), parts, size)
            usual = np.append(np.arange(parts) <= r, np.arange(parts) < r) | (not forward.causal)
            terms = stack_terms(some, back.samples["dq"].unit, add) if some else None
            counts = usual if terms is None else fit_counts(*terms, usual, 1)
            if counts is None:
                break
            shown[r] = counts
        else:
            seen = partial(_show_chunks, shown, size)
            back.forward.append(Alternative("", forward, seen))
            text = f"in the backward pass {_describe_chunks(shown, size)} (lse and out are right)"
            yield Candidate(text, len(back.forward) - 1)
            return


def _sum_chunks(back: Backward, free: Candidate, parts: int, size: int, x: Sampled) -> PartTerms:
    """Sum what chunks of keys up to the own place of queries add to rows, and then later ones."""
    ((weights, rows),) = back.list_factors(free, "dq", x.rows.at, x.rows.queries)
    j = np.arange(len(rows))
    late = j % size > x.rows.queries[:, None] % size
    kinds = product((~late, late), range(parts))
    return np.stack([(weights * (y & (j // size == c))) @ rows for y, c in kinds]), x.got


def _show_chunks(shown: HowOften, size: int, x: Place) -> Seen:
    late = x.j % size > x.i % size
    return shown[x.i // size, x.j // size + late * len(shown)] > 0


def _describe_chunks(shown: HowOften, size: int) -> str:
    """Say which chunks of keys chunks of queries see, and up to their own place in which."""
    words = []
    for r, (early, late) in enumerate(shown.reshape(len(shown), 2, -1)):
        whole, half = (early & late).astype(bool), (early & ~late).astype(bool)
        if np.array_equal(whole, np.arange(len(whole)) < r) and list(np.flatnonzero(half)) == [r]:
            continue  # as it should be
        said = [
            describe_keys(np.repeat(x, size)) + more
            for x, more in ((whole, ""), (half, ", of each chunk up to their own place in it"))
            if x.any()
        ]
        queries = name_span("queries", np.arange(r * size, (r + 1) * size))
        words.append(f"{queries} see {' and '.join(said) or 'no keys'}")
    return f"chunks of {size} see others: {name_first(words, 2, between='; ')}"


def list_transposed(back: Backward) -> Iterator[Candidate]:
    """List gradients in whose sums each square tile of weights is transposed, or is not."""
    n, m, _ = back.first.forward.shape
    sizes = [x for x in TILE_SIZES if n % x == 0 == m % x and n * m <= GROUPED_PAIRS]
    for of, size in product(back.failed, sizes):
        called = "weights" if of == "dv" else "derivatives of scores"
        text = (
            f"in {of}, the {called} of each tile of {size} queries and {size} keys are transposed"
        )
        yield Candidate(text, to=of, answer=partial(_transpose_tiles, back, size))


def _transpose_tiles(
    back: Backward, size: int, of: str, index: Index, _: Sequence[Index]
) -> Doubles:
    rows, total = np.arange(back.parts[of].problem.shape[0]), np.zeros(())
    for weights, x in back.list_factors(Candidate(""), of, index, rows):
        tiles = weights.reshape(len(weights) // size, size, -1, size).transpose(0, 3, 2, 1)
        total = total + tiles.reshape(weights.shape) @ x
    return total


def list_other_normalisers(back: Backward) -> Iterator[Candidate]:
    """List the pass in which weights of keys one after another have another lse in wrong rows."""
    m, wrong = back.first.forward.shape[1], back.list_wrong("dq") if "dq" in back.failed else []
    if not wrong or back.first.forward.shape[0] * m > GROUPED_PAIRS:
        return
    best: list[tuple[float, int, slice, list[Doubles]]] = []
    for size in dict.fromkeys(-(-m // x) for x in PARTS if m // x >= _FEWEST_KEYS):
        sums = [back.sum_tiles("dq", x, size) for x in wrong]
        count = len(sums[0])
        for first, last in combinations(range(count + 1), 2):
            if last - first == count:  # of all keys the row has a factor
                continue
            off = before = 0.0
            factors = list[Doubles]()
            for x, y in zip(wrong, sums, strict=True):
                part, exact = np.sum(y[first:last], 0), np.sum(y, 0)
                scale, rest = back.samples["dq"].unit * row_sizes(x.got), x.got - exact + part
                f = np.sum(part * rest / scale**2, -1) / np.sum(part * part / scale**2, -1)
                factors.append(np.maximum(f, _NO_WEIGHT))
                off += float(np.sum(np.square((rest - factors[-1][:, None] * part) / scale)))
                before += float(np.sum(np.square((x.got - exact) / scale)))
            if off < min(LEFT_BY_COUNTS * sum(x.got.size for x in wrong), before / 16):
                keys = slice(first * size, min(last * size, m))
                best.append((off, keys.stop - keys.start, keys, factors))
    for _, _, keys, factors in sorted(best, key=lambda x: x[:2])[:1]:
        more = {
            x.rows.at: (x.rows.queries, -np.log(f)) for x, f in zip(wrong, factors, strict=True)
        }
        least, most = (g(np.concatenate([y for _, y in more.values()])) for g in (np.min, np.max))
        text = f"in the backward pass weights of {describe_keys(_mark(keys, m))} have another lse, "
        text += f"which is {least:.2g} to {most:.2g} larger in the wrong rows of dq"
        yield Candidate(text, read=partial(_read_other_lse, more, _mark(keys, m)))


def _mark(keys: slice, m: int) -> Seen:
    return np.asarray((np.arange(m) >= keys.start) & (np.arange(m) < keys.stop))


def _read_other_lse(
    more: Mapping[Index, tuple[HowOften, Doubles]], keys: Seen, look: Lookup, at: Index
) -> HeadPass:
    """Read an lse of some queries for some keys."""
    back, kept = look(at)
    rows, by = more.get(at, (np.zeros(0, int), np.zeros(0)))
    lse = np.repeat(kept.lse[:, None], len(keys), -1)
    lse[rows] += by[:, None] * keys
    return back, kept._replace(lse=lse)
