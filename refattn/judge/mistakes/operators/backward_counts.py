"""Backward passes whose sums count wrongly: columns of values, or chunks of keys; told by dq."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations, product

import numpy as np
import numpy.typing as npt

from ....arrays.library import Doubles
from ...rounding.problems import Index
from ...rounding.saved import BackwardHead
from ...verification.findings import name_span
from ..causes.backward import Backward, Candidate, HeadPass, Kept, Lookup
from ..causes.sampled import Alternative, Place, Seen
from ..causes.slips import PARTS, TILE_SIZES
from ..causes.wrong_rows import Sampled, row_sizes, thin
from .backward_places import GROUPED_PAIRS
from .sums import Terms, describe_keys, fit_counts, stack_terms

_ROWS_COUNTED, _HEADS_COUNTED = 16, 4  # by which counts are known
_MOST_GROUPS = 8  # of columns
_LEFT_BY_COUNTS = 9.0  # mean square of z, at most
_FEWEST_KEYS, _CHUNKS_NAMED = 4, 2  # of a chunk; chunks of queries that are named
_NO_WEIGHT = 1e-9  # times what it should be
COUNTS = {0: "are left out", 2: "count twice", 3: "count 3 times", 4: "count 4 times"}
HowOften = npt.NDArray[np.int64]


def _take_few(back: Backward, of: str) -> list[Sampled]:
    wrong = thin(back.list_wrong(of), _HEADS_COUNTED)
    return [x.take(thin(np.arange(len(x.got)), _ROWS_COUNTED)) for x in wrong]


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
            some = [x.take(thin(np.arange(len(x.got)), _ROWS_COUNTED)) for x in here if len(x.got)]
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


def _sum_chunks(back: Backward, free: Candidate, parts: int, size: int, x: Sampled) -> Terms:
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
    more = f" and so on ({len(words) - _CHUNKS_NAMED} more)" * (len(words) > _CHUNKS_NAMED)
    return f"chunks of {size} see others: {'; '.join(words[:_CHUNKS_NAMED])}{more}"


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
            if off < min(_LEFT_BY_COUNTS * sum(x.got.size for x in wrong), before / 16):
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
