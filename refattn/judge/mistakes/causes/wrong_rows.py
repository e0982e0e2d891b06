"""Find the wrong rows, sample them beside right ones, and measure how far numbers are apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ....arrays.library import Doubles
from ...rounding.formats import FORMATS
from ...rounding.head import attend_rows
from ...rounding.problems import Index, Problem
from ...rounding.profiles import Profile
from ...verification.empty_rows import list_conventions
from ...verification.findings import Numbers
from ...verification.looks import holds_row
from .sampled import Result, Rows

_WRONG_ROWS, _RIGHT_ROWS, _HEADS = 32, 16, 4  # that are taken
_CONFIRMED_PAIRS, _FEWEST_ROWS = 2**22, 16  # of all wrong rows, and rows of a head at least
_UNEXPLAINED = 0.25  # of the error of a row, beyond which what is left of it is not explained
FAR = 8.0  # standard deviations beyond which a row is wrong
_SEARCHED_PAIRS = 2**23  # of queries and keys, at most, among which wrong rows are looked for
POWER = 50.0  # sum of the squares of what an alternative changes, at least, over roundings
_MOST_STD = 1e6  # standard deviations
_TILES, _WHOLE = (128, 64, 32, 16), 0.75  # of rows, and share of one, at least, that is wrong
FEWEST_NUMBERS = 16  # of wrong rows: to fewer of them one of many alternatives is near by chance
_COUNT_OF_CAUSES = 1e4  # that are tried, about
_RIGHT_COLUMNS = 1.5  # mean square of z of those that are right in wrong rows, at most
_DOUBTFUL, _AGAIN = 1e4, 2**20  # how far a row may be to be looked at again; pairs, at most
_STEPS_OF_FIT = 8  # of a number
_SYSTEMATIC, _FEWEST_ALIKE = 10.0, 4  # standard deviations of what rows share, at least; rows
_OF_FUNCTION = 0.3  # of the squares of errors, at least
_ALL_ROWS = 0.03  # of the root mean square of all rows, where a row is exactly 0


class Sampled(NamedTuple):
    """Some rows of a head, what the kernel gave for them, and which of them are wrong."""

    rows: Rows
    got: Doubles
    lse: Doubles | None
    wrong: npt.NDArray[np.bool_]
    near: npt.NDArray[np.bool_]  # in the place of the wrong rows, if there are others

    def take(self, rows: Any) -> Sampled:
        """Take some of the rows."""
        of_rows = self.rows._replace(queries=self.rows.queries[rows])
        lse = None if self.lse is None else self.lse[rows]
        return Sampled(of_rows, self.got[rows], lse, self.wrong[rows], self.near[rows])

    def few(self, most: int) -> Sampled:
        """Take at most so many of the rows, evenly."""
        return self.take(thin(np.arange(len(self.got)), most))


class Sample(NamedTuple):
    """Rows of some heads, and what an error is measured by."""

    heads: list[Sampled]
    unit: float  # standard deviation of errors over `row_sizes`
    wrong: npt.NDArray[np.bool_]  # (heads, n): rows that are wrong, of those that were looked at
    columns: npt.NDArray[np.bool_]  # (d_v,): columns that are wrong
    looked: int  # rows that were looked at
    remarks: Sequence[str] = ()  # of a convention for rows without keys, which are not taken
    apart: bool = False  # whether rows with NaN or infinity are left out
    told: bool = False  # whether the wrong rows are known, so that others are right


def divide(error: Doubles, std: Doubles) -> Doubles:
    """Divide errors by standard deviations; NaN is as far as may be."""
    with np.errstate(all="ignore"):
        z = error / np.where(std > 0, std, 1e-300)
    z = np.where(error == 0, 0.0, np.where(np.isnan(z), _MOST_STD, z))
    return np.clip(z, -_MOST_STD, _MOST_STD)


def differ(x: Doubles, y: Doubles) -> Doubles:
    """Subtract; equal infinities are equal, and NaN is equal to what is not finite."""
    with np.errstate(invalid="ignore"):
        strange = ~np.isfinite(x) & ~np.isfinite(y) & (np.isnan(x) | np.isnan(y))
        return np.where(strange | (x == y), 0.0, x - y)


def finite(x: Doubles) -> Doubles:
    """Put 0 in place of what is not finite."""
    return np.where(np.isfinite(x), x, 0.0)


def are_systematic(errors: Sequence[Doubles], exact: Sequence[Doubles]) -> bool:
    """Tell whether errors z of rows are alike in a head, or a function of the exact numbers.

    Those of roundings are neither: the square of their sum over rows, none of which is another, is
    about the sum of their squares.
    """
    alike = squares = whole = of_function = 0.0
    for z, x in zip(errors, exact, strict=True):
        some = np.all(np.isfinite(z) & np.isfinite(x), -1) & np.any(z, -1) & np.any(x, -1)
        z, x = z[some], x[some]
        _, first = np.unique(x, axis=0, return_index=True)
        if len(first) < _FEWEST_ALIKE:
            continue
        z, x = z[first] / np.sqrt(np.mean(np.square(z[first]), -1, keepdims=True)), x[first]
        each = np.sum(z * z, 0)
        alike += float(np.sum(np.square(np.sum(z, 0)) - each))
        squares += float(np.sum(each * each))
        size = np.abs(x) / np.max(np.abs(x), -1, keepdims=True) + _ALL_ROWS
        terms = np.sign(x).ravel() * [size.ravel() ** 0, np.log(size).ravel(), size.ravel()]
        fitted = terms.T @ np.linalg.lstsq(terms.T, z.ravel(), rcond=None)[0]
        whole, of_function = whole + z.size, of_function + float(fitted @ fitted)
    return alike > _SYSTEMATIC * math.sqrt(2 * squares) or of_function > max(
        _SYSTEMATIC**2, _OF_FUNCTION * whole
    )


def row_sizes(x: Doubles) -> Doubles:
    """Return what errors go with: |x| and the root mean square of its row, and a part of all."""
    x = finite(x)
    mean = np.mean(np.square(x), -1, keepdims=True) if x.shape[-1] else x
    all_rows = np.sqrt(np.mean(mean, (-2, -1), keepdims=True)) if mean.size else 0.0
    return np.maximum(np.abs(x) + np.sqrt(mean) + _ALL_ROWS * all_rows, 1e-30)


def draw_sample(
    problem: Problem,
    numbers: Numbers,
    profile: Profile,
    dtype: str,
    where: Index,
    strange_alone: bool = False,
    compute: Callable[[Index, slice], Result] | None = None,
    rows: Sequence[Index] = (),
) -> Sample:
    """Find wrong rows, among them that of the worst element, and take some of them with others.

    Those with NaN or infinity are left out if others are wrong, or are the only ones. What is right
    is exact attention, or what `compute` gives for some rows of a head. If the wrong `rows` are
    known, others are right.
    """
    compute = compute or (lambda index, i: attend_rows(problem.head(index), i, None))
    n, m, d_v = problem.shape
    heads = math.prod(problem.lead)
    far, columns = np.full((heads, n), np.nan), np.zeros((2, d_v), bool)
    empty, strange, cleared = np.zeros((3, heads, n), bool)
    items = list(problem.items())
    unit = measure_unit(problem, profile, dtype)
    # Of a large problem some blocks are looked at, evenly, and that of the worst element.
    told = [np.zeros((0, d_v))]  # |z| of known rows
    pairs, blocks = 0, items[:: max(1, heads * n * m // _SEARCHED_PAIRS)]
    places = [*rows, *[where[:-1]] * bool(where)]
    covering = (x for x in items if any(holds_row(x, at) for at in places))
    blocks += [x for x in covering if x not in blocks]
    for index, i in blocks:
        with np.errstate(all="ignore"):
            exact = compute(index, i)
            error = differ(numbers.out(index)[i], exact.out)
            z = np.abs(divide(error, unit * row_sizes(exact.out)))
            doubtful = np.max(z, -1, initial=0.0)
            doubtful = np.flatnonzero((doubtful > FAR) & (doubtful < _DOUBTFUL))
            if len(doubtful) and pairs < _AGAIN:  # larger scores may have larger errors
                pairs += m * (i.stop - i.start)
                std = problem.analyse(index, profile.roundings(dtype), i).std
                z[doubtful] = np.minimum(z, np.abs(divide(error, std)))[doubtful]
            worst, lost = np.max(z, -1, initial=0.0), ~np.isfinite(np.sum(error, -1))
            if numbers.lse is not None:
                error = differ(numbers.lse(index)[i], exact.lse)
                worst = np.maximum(
                    worst, np.abs(divide(error, error_of_lse(exact, numbers, profile, m)))
                )
                # A row of 0 with a lse of -inf sees no key: wrong as others are.
                no_key = np.isneginf(numbers.lse(index)[i]) & ~np.any(numbers.out(index)[i], -1)
                lost |= ~np.isfinite(error) & ~no_key
        columns |= np.stack([np.any((z > FAR) & x[:, None], 0) for x in (~lost, lost)])
        if rows:
            told.append(z[[x[-1] - i.start for x in rows if holds_row((index, i), x)]])
        at = problem.number(index)
        far[at, i], strange[at, i], empty[at, i] = worst, lost, np.isneginf(exact.lse)
        cleared[at, i.start + doubtful] = worst[doubtful] <= FAR  # right, but not to be compared
    if rows:
        known = np.zeros_like(cleared)
        known[tuple(zip(*((problem.number(x[:-1]), x[-1]) for x in rows), strict=True))] = True
        far = np.where(known, np.fmax(far, 2 * FAR), np.minimum(far, FAR))
        cleared &= ~known
        columns[0] = add_columns(columns[0], np.concatenate(told))
    far[cleared] = np.nan
    conventions = list(list_conventions(problem, numbers, empty))
    if conventions:
        # A known convention explains rows without keys: they are not wrong.
        far[empty] = np.nan
    looked = int(np.sum(~np.isnan(far) | empty | strange | cleared))
    if strange_alone:
        far, columns[0] = np.where(strange | (far <= FAR), far, np.nan), False
    far, of_others = set_apart(far, strange, columns)
    wrong = far > FAR
    near = find_near(wrong, problem)
    among = wrong.any(1, keepdims=True) & (far <= FAR)
    # Wrong rows, right ones in their place, right ones of their heads, and those of other heads.
    chosen = [
        *_spread(np.argwhere(wrong), _WRONG_ROWS),
        *_spread(np.argwhere(near & (far <= FAR)), _RIGHT_ROWS),
        *_spread(np.argwhere(among), _RIGHT_ROWS),
        *_spread(
            np.argwhere(~among & (far <= FAR)), _RIGHT_ROWS if wrong.any() else 4 * _WRONG_ROWS
        ),
    ]
    by_head: dict[int, list[int]] = {}
    for at, row in chosen:
        by_head.setdefault(int(at), []).append(int(row))
    taken = []
    for at, queries in by_head.items():
        index = problem.index_of(at)
        order = np.array(sorted({*queries}))
        lse = None if numbers.lse is None else numbers.lse(index)[order]
        # Where no row is wrong by itself all of them are looked at.
        some = wrong[at, order] if wrong.any() else np.ones(len(order), bool)
        got, of_head = numbers.out(index)[order], Rows(index, order, np.arange(m))
        taken.append(Sampled(of_head, got, lse, some, near[at, order]))
    apart, enough = bool(np.any(strange & ~wrong)), len(rows) * d_v >= FEWEST_NUMBERS
    return Sample(taken, unit, wrong, of_others, looked, conventions, apart, enough)


def are_zero(sample: Sample) -> bool:
    """Tell whether all wrong rows are 0, as if they were never written."""
    wrong = [x.got[x.wrong] for x in sample.heads]
    return any(map(len, wrong)) and not any(map(np.any, wrong))


def tell_causes(sample: Sample, exact: Sequence[Doubles]) -> bool:
    """Tell whether wrong numbers say more than that one of many causes is near them by chance.

    A number that is so many times `FAR` off is as near to the result of another with one over this
    as its probability, and one number tells nothing, as one size of a cause may be fitted to it.
    """
    z = np.abs(
        [
            one
            for x, y in zip(sample.heads, exact, strict=True)
            for one in divide(differ(x.got, y), sample.unit * row_sizes(y))[x.wrong].ravel()
        ]
    )
    told = np.sort(np.log(np.maximum(z / FAR, 1.0)))[:-1]
    return z.size >= FEWEST_NUMBERS or float(np.sum(told)) > math.log(_COUNT_OF_CAUSES)


def add_columns(columns: npt.NDArray[np.bool_], z: Doubles) -> npt.NDArray[np.bool_]:
    """Add the columns that wrong rows tell by |z|: all of them, unless the others are right."""
    found = columns | (np.max(z, 0, initial=0.0) > FAR / 2)
    rest = np.square(z[:, ~found])
    return np.ones_like(found) if np.sum(rest) > _RIGHT_COLUMNS * rest.size else found


def set_apart(
    far: Doubles, strange: npt.NDArray[np.bool_], columns: npt.NDArray[np.bool_]
) -> tuple[Doubles, npt.NDArray[np.bool_]]:
    """Leave out rows with NaN or infinity if others are wrong as well: these have their own cause.

    Return how far the other rows are off, and the columns that are wrong in them.
    """
    # NaN and infinity may come from a second mistake: numbers come first.
    if np.any(far[~strange] > FAR):
        return np.where(strange, np.nan, far), columns[0]
    return far, np.any(columns, 0)


class Comparison(NamedTuple):
    """What is left of errors, and what is changed; as in `Explained`."""

    square: float
    share: float
    likeness: float
    everywhere: bool
    near: bool
    changed: bool
    times: float = 1.0  # how often what is changed is in the error
    error: float = 0.0  # standard error of that


def compare_outputs(
    sample: Sample,
    outs: Sequence[Doubles],
    given: Sequence[Doubles],
    empty: Sequence[npt.NDArray[np.bool_]] | None = None,
) -> Comparison:
    """Compare what is left of errors by an alternative with the errors themselves.

    Rows that are empty by the alternative are left out.
    """
    before = after = moved = right = close = 0.0
    elements = 0
    for number, (x, out, own) in enumerate(zip(sample.heads, outs, given, strict=True)):
        if empty is not None and empty[number].any():
            kept = ~empty[number]
            x = x._replace(got=x.got[kept], wrong=x.wrong[kept], near=x.near[kept])
            out, own = out[kept], own[kept]
        # By the larger result: else rows that an alternative makes small would seem far off.
        size = sample.unit * np.maximum(row_sizes(own), row_sizes(out))
        rest, change = divide(differ(x.got, out), size), divide(differ(out, own), size)
        error = divide(differ(x.got, own), size)
        after += float(np.sum(np.square(rest[x.wrong])))
        before += float(np.sum(np.square(error[x.wrong])))
        moved += float(np.sum(np.square(change[x.wrong])))
        elements += error[x.wrong].size
        right = max(right, float(np.max(np.abs(rest[~x.wrong]), initial=0.0)))
        close = max(close, float(np.max(np.abs(rest[~x.wrong & x.near]), initial=0.0)))
    gain, square = before - after, after / max(elements, 1)
    excess = max(before - elements, gain, 1e-300)
    here = sample.told or (close < 2 * FAR and any(x.near.any() for x in sample.heads))
    # All rows must be finite, and some wrong one not 0.
    here = here and all(np.all(np.isfinite(x.got)) for x in sample.heads)
    here = here and any(np.any(x.got[x.wrong]) for x in sample.heads)
    holds = right < 2 * FAR, here
    # It changes less than roundings may: these rows cannot tell it from the problem.
    if moved < POWER:
        return Comparison(square, 0.0, 0.0, *holds, False)
    likeness = (gain + 2 * math.sqrt(moved)) / moved  # to the error that roundings make in it
    times, of_times = (gain / moved + 1) / 2, math.sqrt(max(square, 1.0) / moved)
    return Comparison(square, max(gain / excess, 0.0), likeness, *holds, True, times, of_times)


def fit_number(
    outs: Callable[[float], Sequence[Doubles]],
    got: Sequence[Doubles],
    given: Sequence[Doubles],
    unit: float,
    starts: Sequence[float],
) -> tuple[float, float] | None:
    """Fit a number to rows by Gauss and Newton, from the best of some starts, with its error."""
    sizes = [unit * row_sizes(x) for x in given]

    def rate(c: float) -> float:
        # By the larger result: else rows that a number makes small would seem far off.
        # Nor clipped, as all starts are beyond the range of `divide` in float64.
        every = zip(got, outs(c), sizes, strict=True)
        z = (finite(differ(x, y) / np.maximum(unit * row_sizes(y), size)) for x, y, size in every)
        return sum(float(np.sum(np.square(x))) for x in z)

    c, error = min(starts, key=rate), math.inf
    for _ in range(_STEPS_OF_FIT):
        step = 1e-4 * abs(c)
        product = square = noise = 0.0
        # The mean of both sides would be off by what is curved, which float64 shows.
        for x, here, next_to, std in zip(got, outs(c), outs(c + step), sizes, strict=True):
            # Not clipped as `divide` does: in float32 all of them may be out of its range.
            slope, z = finite((next_to - here) / step / std), finite(differ(x, here) / std)
            product += float(np.sum(slope * z))
            square += float(np.sum(slope * slope))
            noise += float(np.sum(np.square(np.sum(slope * z, -1))))
        if not square > 0:
            return None
        error = math.sqrt(max(noise, square)) / square
        c, last = c + float(np.clip(product / square, -abs(c) / 2, abs(c) / 2)), c
        if abs(c - last) < error / 10:
            break
    return c, error


def list_wrong(problem: Problem, numbers: Numbers, wrong: npt.NDArray[np.bool_]) -> list[Sampled]:
    """List all wrong rows by head or, of many, some of them evenly."""
    n, m, _ = problem.shape
    heads = np.flatnonzero(wrong.any(1))
    most = max(_FEWEST_ROWS, _CONFIRMED_PAIRS // max(len(heads) * max(n, m), 1))
    found = []
    for at in heads:
        i = thin(np.flatnonzero(wrong[at]), most)
        index, every = problem.index_of(at), np.ones(len(i), bool)
        lse = None if numbers.lse is None else numbers.lse(index)[i]
        rows = Rows(index, i, np.arange(m))
        found.append(Sampled(rows, numbers.out(index)[i], lse, every, every))
    return found


def rate_rows(got: Doubles, x: Doubles, unit: float) -> Doubles:
    """Return how far each row is from a result, in units of `row_sizes`."""
    return np.asarray(np.max(np.abs(divide(differ(got, x), unit * row_sizes(x))), -1, initial=0.0))


def stay_wrong(
    got: Doubles, out: Doubles, given: Doubles, unit: float, usual: float = math.inf
) -> npt.NDArray[np.bool_]:
    """Tell which rows are nearly as far from a result as from the one that was given.

    Or far beyond what is usual in rows that the result explains.
    """
    rest, before = (rate_rows(got, x, unit) for x in (out, given))
    return np.asarray((rest > 2 * FAR) & (rest > np.minimum(_UNEXPLAINED * before, 4 * usual)))


def list_left(
    wrong: Iterable[Sampled], stays: Callable[[Sampled], npt.NDArray[np.bool_]]
) -> tuple[list[Index], int]:
    """List wrong rows that stay wrong, of so many."""
    left, count = list[Index](), 0
    for x in wrong:
        off = stays(x)
        left += [(*x.rows.at, int(row)) for row in x.rows.queries[off]]
        count += len(off)
    return left, count


def find_near(wrong: npt.NDArray[np.bool_], problem: Problem) -> npt.NDArray[np.bool_]:
    """Find the rows of some heads among which wrong rows are: none if these are everywhere.

    They are whole tiles, where such are wrong, or all from the first to the last.
    Of sequences one after another it is those that have some.
    """
    near = np.zeros_like(wrong)
    size = _size_tiles(wrong)
    tiles: Any = np.ones_like(wrong)
    if size:
        tiles = np.repeat(_share_by_tile(wrong, size) > 0, size, 1)[:, : wrong.shape[1]]
    if find_tiles(wrong):
        return np.asarray(tiles)
    if wrong.any():
        rows = np.flatnonzero(wrong.any(0))
        tile: Any = slice(int(rows[0]), int(rows[-1]) + 1)
        of_row = number_sequences(problem, np.arange(wrong.shape[1]))
        if of_row is not None:
            tile = np.isin(of_row, of_row[rows])
        near[np.ix_(wrong.any(1), np.arange(wrong.shape[1])[tile])] = True
        near &= tiles
    return np.zeros_like(wrong) if near.all() else near


def find_tiles(wrong: npt.NDArray[np.bool_]) -> int:
    """Find the size of tiles of rows of heads that are wrong as a whole, or right; 0 if none is.

    It is that of none if the same tiles are wrong in every head.
    """
    size = 0 if (wrong == wrong[:1]).all() else _size_tiles(wrong)
    share = _share_by_tile(wrong, size or 1)
    return size if np.any((share > 0).any(1) & (share == 0).any(1)) else 0


def _size_tiles(wrong: npt.NDArray[np.bool_]) -> int:
    """Find the largest size of tiles of rows that are all wrong, nearly, or all right."""
    for size in (x for x in _TILES if x < wrong.shape[1]):
        share = _share_by_tile(wrong, size)
        if np.all((share == 0) | (share >= _WHOLE)):
            return size
    return 0


def _share_by_tile(wrong: npt.NDArray[np.bool_], size: int) -> Doubles:
    starts = np.arange(0, wrong.shape[1], size)
    sums = np.add.reduceat(wrong.astype(float), starts, axis=1)
    return np.asarray(sums / np.minimum(size, wrong.shape[1] - starts))


def number_sequences(problem: Problem, rows: Any) -> Any:
    """Return which sequence each row is of; None if it is the only one of its head."""
    packed = problem.packed
    if packed is None or packed.queries.ndim > 1:
        return None
    offsets = packed.queries if problem.rows == "queries" else packed.keys
    return np.searchsorted(offsets, rows, "right") - 1


def error_of_lse(exact: Result, numbers: Numbers, profile: Profile, keys: int) -> Doubles:
    """Return about the standard deviation of log normalisers, and of what they are rounded to."""
    to, unit = FORMATS[numbers.lse_dtype], FORMATS[profile.accumulate].unit
    if profile.scores is not None:
        unit = max(unit, FORMATS["float32"].unit, to.unit)
    size = np.abs(finite(exact.lse)) + np.abs(finite(exact.top)) + 1
    return np.asarray(
        to.spacing(finite(exact.lse)) + 4 * unit * size * math.sqrt(1 + math.log(keys + 1))
    )


def measure_unit(problem: Problem, profile: Profile, dtype: str) -> float:
    """Return the usual standard deviation over `row_sizes`."""
    found: list[float] = []
    for index, i in problem.few_items(3):
        part = slice(max(i.start, i.stop - 16), i.stop)
        with np.errstate(all="ignore"):
            rows = problem.analyse(index, profile.roundings(dtype), part)
        ratio = rows.std / row_sizes(rows.out)
        found += ratio[np.isfinite(ratio) & (ratio > 0) & np.any(rows.out, -1)[:, None]].tolist()
    return float(np.median(found)) if found else FORMATS[dtype].unit


def _spread(places: npt.NDArray[np.int64], most: int) -> npt.NDArray[np.int64]:
    """Take so many of the places, of few heads, the first two among them, and evenly."""
    heads = np.unique(places[:, 0])
    # Evenly spaced heads alone may all be odd.
    heads = heads if len(heads) <= _HEADS else heads[[0, 1, len(heads) // 2, -1]]
    return np.asarray(thin(places[np.isin(places[:, 0], heads)], most))


def thin(x: Any, most: int) -> Any:
    """Take at most so many, evenly."""
    at = np.unique(np.linspace(0, len(x) - 1, min(most, len(x))).astype(int))
    return x[at] if isinstance(x, np.ndarray) else [x[i] for i in at.tolist()]
