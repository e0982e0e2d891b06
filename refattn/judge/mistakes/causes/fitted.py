"""Causes that are fitted to wrong rows: keys that count several times, dropout, hidden scores."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ....arrays.blocks import blocks
from ....arrays.library import Doubles
from ....arrays.words import place
from ...rounding.head import SoftmaxHead
from ...rounding.problems import Index, Problem
from ...verification.findings import Suspect, name_span
from .normalisers import Normalisers
from .sampled import Alternative, Place, Result, Rows, Seen, attend, show_distances, take_rows
from .sequences import show_sequence
from .slips import TILE_SIZES, attend_by, score_all, weigh_keys
from .wrong_rows import Sample, Sampled, differ, divide, finite, row_sizes, thin

_MOST_TILES, _SOME_ROWS = 64, 32  # of keys; and rows of a tile, at most, to which counts are fitted
_MOST_COUNT, _OFF_COUNT = 16, 0.2  # how often a tile may count, and how far a fit may be off
_SEEN, _LEFT = 3.0, 4.0  # root mean square of z that shows a tile, and that a fit may leave
_NO_REST = 1e-6  # the same of what is no tile, if there is no such
_HALF, _SURE, _LEAST_ERROR = 0.5, 0.2, 2e-3  # of a weight: lost or not; how sure, at most
_SUREST = 0.12  # the same, of the surest
_LEAST_FACTOR = 1.01  # of weights that are kept
_OF_NO_WEIGHTS = 2.0**60  # times the largest value: an error that no factor of weights makes
_MORE_LIKELY = 40.0  # twice the log of likelihoods, that two factors are than normal ones
_AS_NEAR, _APART = 0.8, 1.5  # of what one factor leaves, what one for each row does, at least
_FEWEST_WEIGHTS = 48  # that are known, at least, of those that may be lost
_TIMES = {0: "are left out", 2: "count twice"} | {
    x: f"count {x} times" for x in range(3, _MOST_COUNT + 1)
}

Columns = Callable[[Sampled, int], Doubles]  # rows and size of a tile: (rows, columns, tiles + 1)
_USUAL_TILES = (64, 128, 32, 16, 256)  # of queries and of keys, the most usual first
STARTS = (-1.0, -2.5, -5.0, -10.0, -20.0)  # where fits of the scores of hidden keys begin


class Tiles(NamedTuple):
    """How often tiles of keys count, by head and tile of rows: these are of some lengths.

    Or, of rows of keys, how often tiles of queries count.
    """

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

    def describe(self, problem: Problem) -> str:
        """Say which tiles are lost, and which count too often."""
        return _describe_counts(problem, self)


def count_tiles(
    problem: Problem, wrong: Sequence[Sampled], columns: Columns, longest: int
) -> Tiles | None:
    """Count tiles of keys that count 0, 2 or more times, by head, or by tile of rows.

    If `longest` is not 0, tiles of wrong rows are of that size.
    Sums over tiles of keys, and what is always in the sum, are 0 if each is counted so often.
    """
    n, m, _ = problem.shape
    sizes = [x for x in TILE_SIZES[::-1] if x < m <= _MOST_TILES * x]
    for length in [x for x in (n, *TILE_SIZES[::-1]) if x <= (longest or n)]:
        for size in sizes:
            if counts := _count_all(wrong, columns, length, size):
                return Tiles(counts, length, size)
    return None


def list_counted(
    problem: Problem, wrong: Sequence[Sampled], columns: Columns, longest: int
) -> Iterator[Alternative]:
    """List kernels in which tiles of keys count otherwise, as in `count_tiles`."""
    found = count_tiles(problem, wrong, columns, longest)
    if found is not None:
        yield Alternative(found.describe(problem), problem, bias=found.add)


def _count_all(
    wrong: Sequence[Sampled], columns: Columns, length: int, size: int
) -> dict[tuple[Index, int], npt.NDArray[np.int64]]:
    """Count tiles of keys for each tile of wrong rows; none if one has no counts."""
    counts = {}
    for x in wrong:
        tiles = x.rows.queries // length
        for at in np.unique(tiles).tolist():
            some = x.take(thin(np.flatnonzero(tiles == at), _SOME_ROWS))
            found = _count(columns(some, size))
            if found is None:
                return {}
            counts[x.rows.at, at] = found
    return counts


def _count(columns: Doubles) -> npt.NDArray[np.int64] | None:
    """Find the numbers of times by which columns add to 0: 1 is the least, or the commonest."""
    flat = columns.reshape(-1, columns.shape[-1])
    seen = np.sqrt(np.mean(np.square(flat), 0)) > _SEEN
    # The last column is what is always in the sum: it counts once.
    seen[-1] = False
    if not seen.any() or not np.all(np.isfinite(flat)):
        return None
    some, rest = flat[:, seen], np.sum(flat[:, ~seen], -1, keepdims=True)
    both = np.concatenate([some, rest], -1)
    of_zero = both if np.sqrt(np.mean(rest * rest)) > _NO_REST else some
    # Counts are a null vector of the columns: that of the least eigenvalue.
    every = np.linalg.eigh(of_zero.T @ of_zero)[1][:, 0]
    vector = every[: some.shape[-1]]
    # What is below is a count of 0: no tile counts more than `_MOST_COUNT` times.
    least = vector[np.abs(vector) > np.max(np.abs(vector)) / (_MOST_COUNT + 1)]
    for usual in (least[np.argmin(np.abs(least))], np.median(vector), every[-1]):
        fitted = vector / (usual or 1e-300)
        counts = np.rint(fitted)
        left = both @ np.append(counts, 1.0)
        strange = np.any((counts < 0) | (counts > _MOST_COUNT)) or np.all(counts == 1)
        if strange or np.max(np.abs(fitted - counts)) > _OFF_COUNT:
            continue
        if np.sqrt(np.mean(left * left)) < _LEFT:
            found = np.ones(columns.shape[-1] - 1, np.int64)
            found[seen[:-1]] = counts
            return found
    return None


def _describe_counts(problem: Problem, x: Tiles) -> str:
    rows, called = ("queries", "keys") if x.rows == "queries" else ("keys", "queries")
    (n, m), counts = problem.shape[:2] if rows == "queries" else problem.shape[1::-1], x.counts
    (index, at), first = next(iter(counts.items()))

    def spans(times: int) -> str:
        tiles = np.split(np.arange(len(first)), np.flatnonzero(np.diff(first)) + 1)
        some = (y * x.size for y in tiles if first[y[0]] == times)
        return " and ".join(f"{y[0]} to {min(y[-1] + x.size, m) - 1}" for y in some)

    words = [f"{called} {spans(y)} {z}" for y, z in _TIMES.items() if y in first]
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


def list_wrong_tiles(problem: Problem) -> Iterator[Alternative]:
    """List kernels in which sums are not rescaled before one tile of keys, the largest first."""
    m = problem.shape[1]
    for size in (x for x in TILE_SIZES[::-1] if x < m <= _MOST_TILES * x):
        for j, (words, of_sum) in product(blocks(0, m, size), _NOT_RESCALED.items()):
            text = f"keys {j.start} to {j.stop - 1} are added to {words} not rescaled"
            keep = partial(_keep_earlier, j=j, of_sum=of_sum)
            yield Alternative(f"{text} when the maximum grows", problem, compute=keep)


_NOT_RESCALED = {"an output that is": 0.0, "sums that are": 1.0}  # what is so of the weights


def _keep_earlier(head: SoftmaxHead, j: slice, of_sum: float) -> Result:
    """Leave what was summed before a tile as it was when this raises the maximum."""
    exact, s, before = attend(head), score_all(head), slice(0, j.start)
    top, new = (np.max(s[:, :x], -1, keepdims=True, initial=-math.inf) for x in (j.start, j.stop))
    # In sums of weights and values, of which the exact ones are 1 and the output.
    w = np.exp(s[:, before] - exact.lse[:, None]) * np.expm1(finite(new - top))
    total = 1.0 + of_sum * np.sum(w, -1, keepdims=True)
    return exact._replace(out=(exact.out + w @ head.v[before]) / total)


def sum_by_tiles(problem: Problem, unit: float, x: Sampled, size: int) -> Doubles:
    """Sum over tiles of keys what each adds to an output, less its weight in the result."""
    head = Alternative("", problem).head(x.rows)
    w = weigh_keys(head)
    sums = [w[:, j] @ head.v[j] for j in blocks(0, head.keys, size)]
    share = np.stack([np.sum(w[:, j], -1) for j in blocks(0, head.keys, size)], -1)
    tiles = np.stack(sums, -1) - share[:, None] * x.got[..., None]
    rest = (np.sum(share, -1) - 1)[:, None] * x.got  # of the sink
    both = np.concatenate([tiles, rest[..., None]], -1)
    return np.asarray(divide(both, (unit * row_sizes(x.got))[..., None]))


def name_dropout(problem: Problem, sample: Sample) -> list[Suspect]:
    """Say that weights are 0 or a number too large, at random, as those of dropout.

    It is one number, and no sum without those that are lost, by which each row would be divided.
    Some key is lost in one row and kept in another.
    """
    found = [
        _fit_weights(problem, x.take(x.wrong), sample.unit) for x in sample.heads if x.wrong.any()
    ]
    times, errors, divided, key = np.concatenate([np.zeros((4, 0)), *found], -1)
    kept = times > _HALF
    if len(times) < _FEWEST_WEIGHTS or not np.any(np.isin(key[~kept], key[kept])):
        return []
    factor, share = float(np.median(times[kept])), float(np.mean(kept))
    off = 4 * math.sqrt(share * (1 - share) / len(times))
    # Dropout divides by the share that is kept: the factor and the share must agree.
    if factor < _LEAST_FACTOR or abs(share - 1 / factor) > off:
        return []
    noise = np.square(np.hypot(errors, _LEAST_ERROR))
    two, of_row = (np.square(times - np.where(kept, x, 0.0)) / noise for x in (factor, divided))
    # The other explanation: weights that are wrong by many factors, not by two.
    wide = noise + factor - 1  # variance if factors were normal with the same mean and variance
    one = np.square(times - 1) / wide + np.log(wide / noise)
    one += 2 * np.log(np.where(kept, share, 1 - share))
    sharp = errors <= max(_SUREST, float(np.median(errors)))  # which tell one factor from many
    ratio = np.mean(of_row[sharp]) / np.mean(two[sharp])
    if np.mean(two) > _LEFT or ratio < _AS_NEAR or np.sum(one - two) < _MORE_LIKELY:
        return []
    words = f"about {1 - share:.0%} of the weights are 0, the others {factor:.3g}"
    or_hidden = " or keys are hidden at random" * bool(ratio < _APART)
    text = f"agrees if dropout is on{or_hidden}: {words} times as large"
    return [Suspect("convention", math.nan, math.nan, math.nan, math.nan, text)]


def _fit_weights(problem: Problem, x: Sampled, unit: float) -> Doubles:
    """Return by what weights are multiplied, where it is known; (4, weights).

    With it are its standard deviation, the number if the sum of the weights that are kept is 1,
    and that of the key. What is wrong in other weights is a random error, as are roundings.
    """
    head = Alternative("", problem).head(x.rows)
    exact, v = attend(head), head.v[: head.keys]
    every = weigh_keys(head, exact.lse)
    top = 2.0 ** (math.frexp(np.max(np.abs(v), initial=0.0))[1] - 1)  # squares overflow
    v, wrong = v / top, (x.got - exact.out) / top
    noise = np.square(unit * row_sizes(exact.out) / top)
    some = np.isfinite(exact.lse) & np.all(np.abs(wrong) < _OF_NO_WEIGHTS, -1)
    every, wrong, noise = every[some], wrong[some], noise[some]
    size = max(float(np.sum(np.square(every) @ np.square(v))), 1e-300)
    c = np.sum(wrong * wrong) / size  # variance of the factors
    keys = problem.number(x.rows.at) * head.keys + np.arange(head.keys)
    found = [np.zeros((4, 0))]
    for w, error, small in zip(every, wrong, noise, strict=True):
        columns = w[:, None] * v
        # The best linear estimate of the factors, if they have mean 1 and variance c.
        inverse = np.linalg.pinv(c * columns.T @ columns + np.diag(small), hermitian=True)
        known = np.maximum(c * np.sum(columns @ inverse * columns, -1), 1e-300)  # a share
        times = 1 + c * (columns @ inverse @ error) / known
        errors = np.sqrt(c * np.maximum(1 - known, 0.0) / known)
        sure = errors < _SURE * (1 + c)
        lost = np.sum(w[sure & (times < _HALF)]) + c / (1 + c) * np.sum(w[~sure])
        divided = np.full(len(w), 1 / max(1 - lost, 1e-3))
        found.append(np.stack([times, errors, divided, keys])[:, sure])
    return np.concatenate(found, -1)


# --- keys that are hidden by a finite score -------------------------------------------------------


def list_filled(problem: Problem) -> Iterator[Alternative]:
    """List kernels that hide keys by a score that is known: 0, or that of a cap."""
    for where, size in _list_computed(problem):
        zero = partial(_fill_hidden, problem, fill=0.0, size=size)
        yield Alternative(f"hidden keys{where} have the score 0", problem, answer=zero)
        if problem.softcap is not None:
            text = f"hidden keys{where} have the score -cap (the cap is applied after the mask)"
            low = partial(_fill_hidden, problem, fill=-problem.softcap, size=size)
            yield Alternative(text, problem, answer=low)


def list_fills(problem: Problem) -> Iterator[tuple[str, Callable[[float], Alternative]]]:
    """List kernels that hide keys by a number, which is fitted."""

    def hide_by(fill: float, size: int, added: bool) -> Alternative:
        answer = partial(_fill_hidden, problem, fill=fill, size=size, added=added)
        return Alternative("", problem, answer=answer)

    for where, size in _list_computed(problem):
        text = f"hidden keys{where} have the score {{}}, not -inf"
        yield text, partial(hide_by, size=size, added=False)
        text = f"{{}} is added to the scores of hidden keys{where}, not -inf"
        yield text, partial(hide_by, size=size, added=True)


def rate_fill(
    x: Sampled, size: Doubles, fill: Callable[[float], Alternative], *about: Any
) -> tuple[float, float]:
    """Return sums of squares of errors of rows, and of their log normalisers, by the best start."""
    of_out, of_lse = [], []
    for result in (fill(c).result(x.rows) for c in STARTS):
        of_out.append(np.sum(np.square(divide(differ(x.got, result.out), size))))
        if x.lse is not None:
            of_lse.append(np.sum(np.square(Normalisers("").far(x, result, *about))))
    return float(min(of_out)), float(min(of_lse, default=0.0))


def _list_computed(problem: Problem) -> Iterator[tuple[str, int]]:
    """List sizes of tiles outside of which nothing is computed; 0 if all of a sequence is."""
    banded = problem.causal or problem.window != (None, None)
    if banded or "mask" in problem.first:
        yield "", 0
    # Causal attention and windows tell which tiles to skip, a mask that is an array does not.
    for size in (x for x in _USUAL_TILES if banded and x < max(problem.shape[:2])):
        yield f" in tiles of {size} with a visible key", size


def _fill_hidden(
    problem: Problem, rows: Rows, fill: float, size: int, added: bool = False
) -> Result:
    """Give hidden keys a score, or add it to theirs."""
    head = take_rows(problem, rows)
    s, given = score_all(head._replace(mask=None)), score_all(head)
    filled = np.where(np.isfinite(given), s, s + fill if added else fill)
    if size or problem.packed is not None:
        # What is never computed stays at -inf: skipped tiles, and keys of other sequences.
        scored = _compute_tiles(problem, rows, size) if size else show_sequence(problem, rows)
        keys = slice(head.keys)
        filled[:, keys] = np.where(scored, filled[:, keys], given[:, keys])
    return attend_by(filled, head.v)


def _compute_tiles(problem: Problem, rows: Rows, size: int) -> Seen:
    """Tell which keys are in tiles of which causal attention and windows show some, by query."""
    (n, m, _), (left, right) = problem.shape, problem.window
    i, j = rows.queries[:, None] // size * size, rows.keys // size * size
    last, end = np.minimum(i + size, n) - 1, np.minimum(j + size, m) - 1
    # The tile is computed if some query of it sees some key: from the last query back to the first
    # key, and from the first query on to the last key.
    nearest, farthest = j - last - (m - n), end - i - (m - n)
    starts = show_distances(nearest, problem.causal, (None, right))
    return np.asarray(starts & show_distances(farthest, False, (left, None)))
