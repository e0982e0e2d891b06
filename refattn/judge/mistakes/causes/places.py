"""Describe where wrong rows are and what they hold, for failures whose cause is not known."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ....arrays.blocks import blocks
from ....arrays.library import Doubles
from ....arrays.stored import NARROW
from ....arrays.words import name_row, place
from ...rounding.formats import FORMATS
from ...rounding.head import attend_rows
from ...rounding.problems import Index, Problem
from ...rounding.profiles import Profile
from ...verification.findings import (
    Numbers,
    Suspect,
    describe_span,
    name_factor,
    name_heads,
    name_span,
)
from ...verification.verdict import Verdict
from .sampled import Rows, attend, take_rows
from .slips import weigh_keys
from .wrong_rows import (
    FAR,
    POWER,
    Sample,
    are_systematic,
    differ,
    divide,
    find_tiles,
    number_sequences,
    row_sizes,
)

_ROWS_NAMED = 4  # rows that are named one by one, at most
_ALL = 0.95  # of the rows, at most, that are a part of them
_STALE, _FEWEST_STREWN = "never written (stale), or computed from something else", 8  # rows
_UNLIKE = 0.3  # correlation, at most, of numbers that have nothing to do with the exact ones
_NO_RELATION = 4.0  # standard deviations of such a correlation, at most
_UNLIKE_AS_IF = "numbers are unlike the exact ones, as if "
_UNRELATED = "numbers have nothing to do with the exact ones: "
_NUMBERS = 256  # at least, by which that is said
_NEAR_ONE = 0.01  # that a factor differs from 1, at least
_COLUMNS, _ROWS = 4, 0.05  # columns of a row, and share that factors of rows leave, at most
_MOST_ADDED = 4.0  # mean square of what is added, over 4 times that of the exact numbers, at most
_EVEN = 0.1  # of the numbers, at most, that errors of roundings are
_COARSE = {  # what errors are at most, over numbers, for it to be named
    "float32 or TF32": 2.0**-13,
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
    "8 bits": 2.0**-4,
}
_TILES, _LEFT = (16, 32, 64, 128), 0.01  # of keys, and share of errors that others leave, at most
_MOST_ROWS, _PAIRS = 256, 2**21  # queries, and pairs with keys, of a head that is looked at
_FACTOR_ALONE = 1e-4  # of the mean square of a gradient, at most, that a factor leaves
_LEFT_BY_FACTOR, _LEFT_OF_ERRORS = 2e-3, 0.25  # of mean squares, at most, that a factor leaves
_MOST, _AS_ROUNDED = 0.9, 1.5  # of the error, and of z, that a common factor explains and leaves
_COARSER, _COARSEST = 2.0, 16.0  # times the errors that are expected
_ROWS_ALIKE = 0.7  # standard deviation of logs of squares of errors by row, at most


def describe_place(problem: Problem, sample: Sample, verdict: Verdict) -> str:
    """Say where wrong rows are: how many, heads, rows and columns.

    The rejected rows are named. If no row was rejected alone, those of the sample are.
    """
    more = ""
    if verdict.rows:
        rejected = mark_rows(problem, dict(verdict.rows))
        if np.any(rejected != sample.wrong):  # columns are those of other rows
            sample = sample._replace(columns=np.zeros_like(sample.columns))
        sample = sample._replace(wrong=rejected, looked=round(verdict.looked_at * rejected.size))
        more = "at least " * verdict.more_rows
    wrong = sample.wrong
    if not wrong.any():
        return ""
    count = _count_rows(wrong, sample.looked, more)
    lengths = {problem.rows: wrong.shape[1], "columns": len(sample.columns)}
    everywhere = {f"{name} between 0 and {n - 1}" for name, n in lengths.items()}
    return ", ".join([count, *(x for x in list_places(problem, sample) if x not in everywhere)])


def say_rows(problem: Problem, rows: Collection[Index], looked: int) -> str:
    """Say how many rows of those that were looked at these are, and which."""
    marked = mark_rows(problem, rows)
    words = [_count_rows(marked, looked), *list_rows(problem, marked)]
    return ", ".join(words) if rows else ""


def _count_rows(wrong: npt.NDArray[np.bool_], looked: int, more: str = "") -> str:
    count, where = int(wrong.sum()), " that were tested" if looked < wrong.size else ""
    if count == looked:
        return f"all {looked:,} rows{where}" if looked > 1 else "the only row"
    return f"{more}{count:,} of {looked:,} rows{where}"


def mark_rows(problem: Problem, rows: Iterable[Index]) -> npt.NDArray[np.bool_]:
    """Mark some rows, (heads, n)."""
    marked = np.zeros((math.prod(problem.lead), problem.shape[0]), bool)
    for *head, row in rows:
        marked[problem.number(tuple(head)), row] = True
    return marked


def list_places(problem: Problem, sample: Sample) -> Iterator[str]:
    """Say in which heads, rows and columns wrong numbers are, if not in all."""
    yield from list_rows(problem, sample.wrong)
    columns = np.flatnonzero(sample.columns)
    if 0 < len(columns) < len(sample.columns):
        yield name_span("columns", columns)


def list_rows(problem: Problem, wrong: npt.NDArray[np.bool_]) -> Iterator[str]:
    """Say in which heads some rows (heads, n) are, and which they are, if not in all."""
    heads, rows = np.flatnonzero(wrong.any(1)), np.flatnonzero(wrong.any(0))
    if problem.lead and np.sum(wrong) <= _ROWS_NAMED and np.sum(wrong) < len(heads) * len(rows):
        each = (name_span(problem.rows, np.flatnonzero(wrong[x])) for x in heads)
        names = (name_heads(problem, heads[at : at + 1]) for at in range(len(heads)))
        yield "; ".join(f"{x}, {y}" for x, y in zip(names, each, strict=True))
        return
    if problem.lead and 0 < len(heads) < len(wrong):
        yield name_heads(problem, heads)
    size = 0 if np.sum(wrong) == len(heads) * len(rows) else find_tiles(wrong)
    if size:
        head, row = (int(x) for x in np.argwhere(wrong)[0])
        count = len(np.unique(np.argwhere(wrong) // [1, size], axis=0))
        tile = row // size * size
        at = f"{row} to {tile + np.flatnonzero(wrong[head, tile : tile + size])[-1]}"
        if count == 1:
            yield f"{problem.rows} {at}"
        else:
            of = place(problem.index_of(head))
            yield f"{count} tiles of {size} {problem.rows}, the first: {at} of head {of}"
    elif 0 < len(rows) < wrong.shape[1]:
        yield name_span(problem.rows, rows) + _name_sequences(problem, rows)


def _name_sequences(problem: Problem, rows: npt.NDArray[np.int64]) -> str:
    """Say which sequences rows are of, if not of all."""
    of_row = number_sequences(problem, rows)
    if problem.packed is None or of_row is None:
        return ""
    found = np.unique(of_row)
    few = len(found) < len(problem.packed.queries) - 1
    return f" (sequence{'s' * (len(found) > 1)} {describe_span(found)})" if few else ""


def list_seen(problem: Problem, sample: Sample, exact: Sequence[Doubles]) -> Iterator[str]:
    """Say what the wrong numbers of a part are: 0, one number, a factor, or unlike the exact ones.

    They are a part if other rows, or other columns, are right.
    """
    kept = sample.columns
    if not sample.wrong.any() or not kept.any():
        return
    part = np.sum(sample.wrong) <= _ALL * sample.looked or np.mean(kept) <= _ALL
    heads = [(x.got[x.wrong], y[x.wrong]) for x, y in zip(sample.heads, exact, strict=True)]
    heads = [(x[:, kept], y[:, kept]) for x, y in heads]
    got, right = map(np.concatenate, zip(*heads, strict=True))
    where = ", ".join(list_places(problem, sample)) or "all wrong rows"
    if not np.all(np.isfinite(got)) or not np.any(right):
        return
    if strewn := _describe_strewn(problem, sample, exact):
        yield strewn
        return
    # Causes of whole gradients have a search of their own.
    if problem.gradient is not None and not part:
        return
    if not np.any(got) and (part or not sample.wrong.all()):
        yield f"{where}: all numbers are 0, as if they were never computed"
    elif not part:
        yield from _describe_rows("all rows", got, right)
    elif got.size == 1:
        return  # a number by itself is like any other
    elif np.all(got == got.flat[0]):
        yield f"{where}: all numbers are {got.flat[0]:.6g}, as if they were never computed"
    elif _correlate(got, right) < _UNLIKE < _correlate(*_take_means(heads)):
        like = "numbers are like the exact ones if each head's mean row is subtracted from both"
        yield f"{where}: {like}"
    else:
        rows = np.flatnonzero(sample.wrong.any(0))
        n = sample.wrong.shape[1]
        # Whole tiles, in every head: as a loop that stops or begins elsewhere leaves them.
        tiles = rows[0] % _TILES[0] == 0 and sample.wrong[:, rows[0] : rows[-1] + 1].all()
        tiles = tiles and (rows[-1] + 1 == n or (rows[-1] + 1) % _TILES[0] == 0) and len(rows) < n
        tail = f"the last tile was {_STALE}"
        what = tail if rows[-1] + 1 == n else f"these tiles were {_STALE}"
        # Columns beside right ones, or rows that are alike in all heads, and of no correlation.
        sharp = not kept.all() or (
            (sample.wrong == sample.wrong[:1]).all() and np.ptp(rows) < len(rows)
        )
        sharp = sharp and abs(_correlate(got, right)) < _NO_RELATION / math.sqrt(got.size)
        said = (_UNRELATED if sharp else _UNLIKE_AS_IF) + (what if tiles else _STALE)
        found = _describe_part(where, got, right, said)
        yield from (x for x in found if problem.gradient is None or "precision" not in x)


def list_added_numbers(problem: Problem, sample: Sample, exact: Sequence[Doubles]) -> Iterator[str]:
    """Say that numbers are exact ones and others: these are sums that have nothing to do with them.

    What replaces a part of a sum has the slope 1 - error^2 / 2, in sizes of the exact numbers.
    """
    heads = [(x.got[x.wrong], y[x.wrong]) for x, y in zip(sample.heads, exact, strict=True)]
    got, right = map(np.concatenate, zip(*heads, strict=True)) if heads else np.zeros((2, 0))
    size = float(np.sum(right * right))
    if got.size < _NUMBERS or not size or not np.all(np.isfinite(got)):
        return
    slope, square = np.sum(got * right) / size, np.sum(np.square(got - right)) / size
    std = math.sqrt(square / got.size)
    if abs(slope - 1) > 4 * std or not 4 * std < square / 4 < _MOST_ADDED:
        return
    where = ", ".join(list_places(problem, sample)) or "all wrong rows"
    others = f"others, {math.sqrt(square):.2g} times as large, that have nothing to do with them"
    yield f"{where}: numbers are the exact ones and {others}, as if sums were not set to 0 before"


def _describe_strewn(problem: Problem, sample: Sample, exact: Sequence[Doubles]) -> str:
    """Say by which rule of rows and columns numbers are wrong, if it is one of both."""
    heads = zip(sample.heads, exact, strict=True)
    found = [
        (x.rows.queries, x.got, y, divide(differ(x.got, y), sample.unit * row_sizes(y)))
        for x, y in heads
    ]
    i, got, right, z = map(np.concatenate, zip(*found, strict=True))
    wrong, c = np.abs(z) > FAR, np.arange(got.shape[1])
    if len(i) < _FEWEST_STREWN or not 0 < np.sum(wrong) < wrong.size / 2:
        return ""
    if wrong.any(0).sum() * wrong.any(1).sum() < 2 * np.sum(wrong):
        return ""  # whole rows, or columns
    for (of_row, row), (of_column, column) in product(_list_digits(i), _list_digits(c)):
        marked = row[:, None] == column
        if np.sum(wrong & marked) > _ALL * max(np.sum(wrong), np.sum(marked)):
            one = {"queries": "query", "keys": "key"}[problem.rows]
            text = f"numbers where {one} {of_row} = column {of_column}"
            if not np.any(got[marked]):
                return f"{text} are 0, as if they were never written"
            if abs(_correlate(got[marked], right[marked])) < _UNLIKE:
                return f"{text} are unlike the exact ones, as if they were never written"
    return ""


def _list_digits(x: Any) -> Iterator[tuple[str, Any]]:
    """List what kernels make of a place: over a number, and the remainder by another."""
    sizes = [2**y for y in range(8) if 2**y <= np.max(x)]
    for size, count in product(sizes, [*sizes[1:], 0]):
        words = (
            f"// {size}" * (size > 1) + " " * (size > 1 and count > 0) + f"% {count}" * (count > 0)
        )
        yield words, x // size % count if count else x // size


def _correlate(x: Doubles, y: Doubles) -> float:
    return float(np.sum(x * y) / max(math.sqrt(np.sum(x * x) * np.sum(y * y)), 1e-300))


def _take_means(heads: Sequence[tuple[Doubles, Doubles]]) -> Iterator[Doubles]:
    """Take the mean row of each head off, of the numbers and of the exact ones."""
    for arrays in zip(*heads, strict=True):
        yield np.concatenate([x - np.mean(x, 0) for x in arrays if len(x)])


def _describe_part(where: str, got: Doubles, right: Doubles, said: str) -> Iterator[str]:
    """Say by which factor numbers are too large; or, if they are unlike the exact ones, `said`."""
    product, size = np.sum(got * right), np.sum(right * right)
    left = np.sum(np.square(got - product / size * right))
    most = min(
        _LEFT_BY_FACTOR * np.sum(got * got), _LEFT_OF_ERRORS * np.sum(np.square(got - right))
    )
    by_rows = list(_describe_rows(where, got, right))
    if "each row" in "".join(by_rows) and np.std(by_row(got, right)) > _NEAR_ONE / 4:
        yield from by_rows
    elif abs(product / size - 1) > _NEAR_ONE and left < most:
        yield f"{where}: numbers are {product / size:.4g} times as large as they should be"
    elif got.size >= _NUMBERS and abs(_correlate(got, right)) < _UNLIKE:
        yield f"{where}: {said}"
    else:
        yield from by_rows


def find_factor(problem: Problem, sample: Sample, exact: Sequence[Doubles]) -> list[Suspect]:
    """Find the factor by which all wrong rows of a gradient are too large, if there is one."""
    if not sample.wrong.any():
        return []
    got = np.concatenate([x.got[x.wrong] for x in sample.heads])
    right = np.concatenate([y[x.wrong] for x, y in zip(sample.heads, exact, strict=True)])
    factor = float(np.sum(got * right) / max(np.sum(right * right), 1e-300))
    rest, error, size = (float(np.sum(x * x)) for x in (got - factor * right, got - right, got))
    if not rest < min(_FACTOR_ALONE * size, _LEFT * error):
        return []
    where = ", ".join(list_places(problem, sample))
    spread, share = math.sqrt(rest / size), 1 - rest / error
    text = f"the gradient{' of ' * bool(where)}{where} is {factor:.4g} times what it should be"
    text += name_factor(problem, factor, spread)
    return [Suspect("factor", factor - 1, spread, math.nan, share, text)]


def by_row(got: Doubles, right: Doubles) -> Doubles:
    """Return the factor of each row."""
    return np.asarray(np.sum(got * right, -1) / np.maximum(np.sum(right * right, -1), 1e-300))


def describe_factors(factors: Doubles) -> str:
    """Describe rows that are exact rows times one number, or times numbers in a range."""
    low, high = f"{np.min(factors):.4g}", f"{np.max(factors):.4g}"
    span = low if low == high else f"{low} to {high}"
    times = f"1 + {np.mean(factors) - 1:.2g}" if span == "1" else span
    return f"each row is the exact row times a number, {times}"


def _describe_rows(where: str, got: Doubles, right: Doubles) -> Iterator[str]:
    """Describe rows that are exact rows times numbers, or have small and even errors."""
    factors = by_row(got, right)
    before = np.sum(np.square(got - right))
    left = np.sum(np.square(got - factors[:, None] * right), -1)
    if (
        right.shape[-1] > _COLUMNS
        and np.min(factors) > 0
        and np.sum(left) < _ROWS * before
        and np.all(left <= _LEFT_BY_FACTOR * np.sum(got * got, -1))
    ):
        yield f"{where}: {describe_factors(factors)}: the sum of the weights is wrong"
        return
    sizes = np.mean(np.square(got - right), -1) / np.maximum(np.mean(right * right, -1), 1e-300)
    coarse = next((x for x, unit in _COARSE.items() if np.mean(sizes) < unit * unit), None)
    even = np.std(np.log(np.maximum(sizes, 1e-300))) < 1 and np.max(sizes) < _EVEN**2
    if coarse and even and not are_systematic([got - right], [right]):
        yield (
            f"{where}: relative errors are {np.sqrt(np.mean(sizes)):.1g} in every row: precision "
            f"is lost, as by {coarse} in inputs, scores, weights or sums, or an approximate exp"
        )


class Errors(NamedTuple):
    """Rows of a gradient by a profile: (rows, columns), in the order of the sample."""

    got: Doubles
    exact: Doubles
    std: Doubles


def analyse_sample(problem: Problem, sample: Sample, profile: Profile, dtype: str) -> Errors:
    """Say what roundings of a profile do to the rows of a gradient that were taken."""
    roundings, read = profile.roundings(dtype), problem.read_by(profile)
    at = [(x.rows.at, row) for x in sample.heads for row in x.rows.queries.tolist()]
    laws = [read.analyse(head, roundings, slice(row, row + 1)) for head, row in at]
    exact, std = (np.concatenate([getattr(x, name) for x in laws]) for name in ("out", "std"))
    return Errors(np.concatenate([x.got for x in sample.heads]), exact, std)


def find_common_factor(problem: Problem, x: Errors) -> list[Suspect]:
    """Find the factor of all rows of a gradient, wrong or not, if it leaves roundings alone."""
    if not np.all(np.isfinite(x.got)):
        return []
    slope, z = divide(x.exact, x.std), divide(x.got - x.exact, x.std)
    size = max(float(np.sum(slope * slope)), 1e-300)
    off, error = float(np.sum(slope * z)) / size, 1 / math.sqrt(size)
    before, gain = float(np.sum(z * z)), off * off * size
    over = max(before - z.size, gain)
    # The factor must be sure, explain nearly all, and leave no more than roundings do.
    if gain < POWER or gain < _MOST * over or before - gain > _AS_ROUNDED * z.size:
        return []
    # Rows were chosen because they are wrong, which biases the factor: three digits are right.
    text = f"the gradient is {1 + off:.3g} times what it should be"
    text += name_factor(problem, 1 + off, error)
    return [Suspect("factor", off, error, math.nan, gain / over, text)]


def find_coarse(x: Errors) -> list[Suspect]:
    """Say that errors of all rows of a gradient, wrong or not, are as many times those expected."""
    error = differ(x.got, x.exact)
    squares = np.mean(np.square(divide(error, x.std)), -1)
    times, spread = math.sqrt(np.mean(squares)), np.std(np.log(np.maximum(squares, 1e-300)))
    if (
        not _COARSER < times < _COARSEST
        or spread > _ROWS_ALIKE
        or np.sum(np.square(error)) > _COARSE["8 bits"] ** 2 * np.sum(np.square(x.exact))
    ):
        return []
    text = (
        f"precision is lost: errors are {times:.2g} times as large as expected in all "
        "rows, as if sums were kept in a narrower type"
    )
    return [Suspect("roundings", math.nan, math.nan, math.nan, math.nan, text)]


def remark_stale(problem: Problem, numbers: Numbers, sample: Sample) -> Iterator[str]:
    """Name the least tile of keys whose values, if they are others, explain a wrong head.

    What is off is then a sum of as many rows as the tile has keys, by the weights of these: at
    least twice as many rows must be wrong.
    """
    n, m, _ = problem.shape
    if not sample.wrong.any() or n * m > _PAIRS:
        return
    number = int(np.argmax(sample.wrong.sum(1)))
    index = problem.index_of(number)
    head = take_rows(problem, Rows(index, np.arange(min(n, _MOST_ROWS)), np.arange(m)))
    exact = attend(head)
    error = numbers.out(index)[: len(head.q)] - exact.out
    if not np.all(np.isfinite(error)) or not np.all(np.isfinite(exact.lse)):
        return
    w = weigh_keys(head, exact.lse)
    count = np.sum(sample.wrong[number, : len(w)])
    for size in (x for x in _TILES if 2 * x <= count and x < m):
        for j in blocks(0, m, size):
            basis = np.linalg.qr(w[:, j])[0]
            # What values of this tile cannot explain, whatever they are.
            left = error - basis @ (basis.T @ error)
            if np.sum(left * left) < _LEFT * np.sum(error * error):
                yield f"other values for keys {j.start} to {j.stop - 1} would explain the error"
                return


def remark_stray(problem: Problem, stray: npt.NDArray[np.bool_], dtype: str) -> str:
    """Say which rows (heads, n) hold numbers that a type does not have, where others hold none."""
    where = ", ".join(list_rows(problem, stray))
    return (
        f"{where}: numbers that {dtype} does not have; all other rows hold only {dtype} numbers, "
        f"so {problem.result} is judged as {dtype}"
    )


def remark_zeros(problem: Problem, numbers: Numbers, sample: Sample) -> Iterator[str]:
    """Say that wrong rows are 0, if some are and others are not."""
    zeros = np.zeros_like(sample.wrong)
    for at in np.flatnonzero(sample.wrong.any(1)):
        got = numbers.out(problem.index_of(at))
        zeros[at] = sample.wrong[at] & ~np.any(got, -1)
    if zeros.any() and np.any(zeros != sample.wrong):
        head, row = (int(x) for x in np.argwhere(zeros)[0])
        first = name_row((*problem.index_of(head), row))
        yield f"{zeros.sum()} of the wrong rows are exactly 0, the first is {first}"


def remark_normalisers(problem: Problem, numbers: Numbers) -> Iterator[str]:
    """Say which log normalisers are not finite and should be."""
    if numbers.lse is None:
        return
    heads: list[int] = []
    rows: list[int] = []
    found = np.zeros(0)
    for index, i in problem.items():
        got = numbers.lse(index)[i]
        if np.all(np.isfinite(got)):
            continue
        exact = attend_rows(problem.head(index), i, None).lse
        lost = np.flatnonzero(~np.isfinite(got) & np.isfinite(exact))
        rows, heads = [*rows, *(i.start + lost)], [*heads, *[problem.number(index)] * len(lost)]
        found = np.concatenate([found, got[lost]])
    if rows:
        what = "not finite" if len(np.unique(found)) > 1 else str(found[0])
        what = f"normaliser is {what}" if len(rows) == 1 else f"normalisers are {what}"
        where = f"of {name_span('queries', np.unique(rows))}"
        some = np.unique(heads)
        if len(some) < math.prod(problem.lead):
            where += f", {name_heads(problem, some)}"
        yield f"{len(rows)} log {what}, {where}"


def list_remarks(problem: Problem, read: Callable[[Index], Doubles]) -> Iterator[str]:
    """List what the numbers show without a law."""
    zero, nan, rows, first = True, 0, 0, ""
    held, columns = np.zeros(0, int), np.zeros(problem.shape[2], bool)
    for index in np.ndindex(problem.lead):
        got = read(index)
        zero = zero and not np.any(got)
        strange = np.flatnonzero(~np.all(np.isfinite(got), -1))
        first = first or (name_row((*index, int(strange[0]))) if strange.size else "")
        nan, rows, held = nan + strange.size, rows + got.shape[0], np.union1d(held, strange)
        columns |= ~np.all(np.isfinite(got), 0)
    if zero and rows:
        yield f"{problem.result} is 0 everywhere"
    if nan:
        parts = [name_span(problem.rows, held)] * (len(held) > 1)
        parts += [name_span("columns", np.flatnonzero(columns))] * (not columns.all())
        where = f" ({', '.join(parts)})" if parts else ""
        hold, there = ("holds", "at") if nan == 1 else ("hold", "the first is")
        yield f"{nan} of {rows} rows {hold} NaN or infinity, {there} {first}{where}"


def suspect_narrower(problem: Problem, dtype: str) -> Iterator[str]:
    """Say if queries, keys and values look like those of a narrower type."""
    for name in NARROW:
        to = FORMATS[name]
        heads = (problem.read(index) for index in np.ndindex(problem.lead))
        if to.digits < FORMATS[dtype].digits and all(
            np.all(to.holds(x[y])) for x in heads for y in "qkv"
        ):
            yield f"q, k and v hold only {name} numbers: is that the dtype of the kernel?"
            return


# --- suspects -------------------------------------------------------------------------------------


def as_suspect(text: str, share: float = 1.0, name: str = "convention") -> Suspect:
    """Write a suspect that has no size."""
    return Suspect(name, math.nan, math.nan, math.nan, share, text)


def say_what_is_left(suspect: Suspect, left: Sequence[Index], count: int) -> Suspect:
    """Say which of so many wrong rows a cause leaves wrong; one that leaves most is no cause."""
    if not left:
        return suspect
    rows = f"{len(left)} of {count} wrong rows, the first is {name_row(left[0])}"
    text = f"{suspect.text.replace('agrees if', 'agrees in part if')}; it does not explain {rows}"
    name = suspect.name if 2 * len(left) < count else "convention in part"
    share = min(suspect.explained, 1 - len(left) / count)
    return suspect._replace(name=name, text=text, explained=share)
