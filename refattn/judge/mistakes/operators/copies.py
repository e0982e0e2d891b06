"""Results that hold numbers of others, in rows, columns or blocks, or numbers of a grid."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ....arrays.library import Doubles
from ....arrays.words import place
from ...rounding.formats import FORMATS
from ...rounding.problems import Index, Problem
from ...rounding.profiles import Profile
from ...rounding.roundings import Roundings
from ...verification.findings import Numbers, Suspect, describe_span, name_first, name_span
from ..causes.places import as_suspect
from ..causes.wrong_rows import FAR, Sample, differ, divide, row_sizes, thin

_POOL, _HEADS = 2**24, 4  # pairs of rows that are compared, and wrong heads, at most
_SURELY_HELD, _NO_FACTOR = 1e-9, 0.01  # chance of blocks that hold others; factor that is none
_MATCHED, _PART = 0.9, 0.3  # shares of wrong rows that hold others: of all, and of a part
_ALL_BLOCKS = 0.999  # of wrong blocks
_FIRST_BLOCKS = 32  # wrong ones that are tried before all are
_AS_HELD, _OF_CANCELLED = 0.25, 0.1  # of the length of a block, at most, that its errors are
_OF_ERRORS = 0.25  # of the errors of a block, at most, that is left by what it holds
_WIDTHS = (128, 64, 32, 16, 8, 4)  # of blocks
_DISTANCES = 4  # that are told apart, at most

_STEP_COUNTS = (127, 128, 127.5, 7, 8, 7.5, 31, 15)  # steps up to the largest number
_SCALED_TYPES = ("float8_e4m3fn", "float8_e5m2")
_NO_CHANCE = -40.0  # log of the probability, at most, that other numbers lie on a grid
_MOST, _GROUPS = 2**18, (16, 32, 64, 128)  # numbers that are tried; columns that share a step
_SLACK = 2.0  # times the unit of the type by which numbers are off

BlockPlaces = npt.NDArray[np.int64]  # (blocks, 3): head, row and column
Marks = npt.NDArray[np.bool_]
Task = tuple[tuple[int, int], Marks, float]  # shape of blocks, what is wrong, and unit of errors


class Pool(NamedTuple):
    """Exact results of heads, whose blocks may be held elsewhere."""

    problem: Problem
    roundings: Roundings
    called: str
    indices: Sequence[Index]
    exact: Doubles  # (heads, n, d)


class Copies(NamedTuple):
    """Blocks of a head that hold others, times a number."""

    pool: Pool
    shape: tuple[int, int]  # of a block
    to: BlockPlaces
    of: BlockPlaces
    empty: int  # blocks that are 0
    factor: float
    wrong: int  # blocks
    added: bool  # to what they should be

    @property
    def share(self) -> float:
        """Share of the wrong blocks that is known; 0 if all of them are 0."""
        return (len(self.to) + self.empty) / self.wrong if len(self.to) else 0.0


def name_copies(
    problem: Problem, numbers: Numbers, sample: Sample, profile: Profile, dtype: str
) -> list[Suspect]:
    """Name rows of the result, columns or blocks, that hold what belongs to others."""
    wrong, roundings = np.flatnonzero(sample.wrong.any(1)), profile.roundings(dtype)
    pools = [_fill_pool(problem, roundings, "head", wrong[:_HEADS])]
    if problem.gradient is not None and problem.shares_keys:  # before these are added
        heads = {x: [x] for x in np.ndindex(problem.gradient.forward.lead)}
        each = problem.gradient._replace(heads=heads).problem(problem.gradient.forward.lead)
        # Rows may hold what belongs to one query head of several that are summed.
        pools.append(_fill_pool(each, roundings, "query head", ()))
    found = []
    for at in wrong[:_HEADS].tolist():
        index = problem.index_of(at)
        known = _search(pools, index, numbers.out(index), sample, sample.wrong[at])
        best = max(known, key=lambda x: x.share, default=None)
        if (
            best is not None
            and best.share >= _PART
            and _by_chance(best, sample.unit) < _SURELY_HELD
        ):
            found.append((best.share, _describe_held(index, best, problem.rows)))
    if not found:
        return []
    share, text = found[0]
    looked = min(len(wrong), _HEADS)
    others = f" (and likewise in {len(found) - 1} more of the {looked} heads searched)"
    start = "agrees if" if share >= _MATCHED else "agrees in part if"
    name = "convention" if share >= _MATCHED else "seen"
    return [as_suspect(f"{start} {text}{others * (len(found) > 1)}", share, name)]


def _by_chance(x: Copies, unit: float) -> float:
    """Bound the probability that numbers are as near to those of any block by chance."""
    near = math.prod(x.shape) * math.log(min(2 * FAR * unit, 1.0))
    blocks = x.pool.exact.size / math.prod(x.shape)
    return math.exp(min(len(x.to) * (near + math.log(blocks)), 0.0))


def _fill_pool(problem: Problem, roundings: Roundings, called: str, few: Iterable[int]) -> Pool:
    """Compute the exact results of all heads; of few, or none, where they are large."""
    n, m, d = problem.shape
    for heads in ([*range(math.prod(problem.lead))], [*few], []):
        if len(heads) * n * max(n, m) <= _POOL:
            break
    indices = [problem.index_of(x) for x in heads]
    exact = [problem.exact(x, roundings, slice(0, n)) for x in indices]
    return Pool(problem, roundings, called, indices, np.reshape(exact, (len(heads), n, d)))


def _search(
    pools: Sequence[Pool], index: Index, got: Doubles, sample: Sample, rows: Marks
) -> Iterator[Copies]:
    """Search whole rows and columns, and then blocks: the largest that hold others throughout."""
    (n, d), most = got.shape, 0.0
    whole, unit = rows[:, None] | np.zeros(d, bool), sample.unit
    held: list[tuple[Pool, Task]] = [(x, ((1, d), whole, unit)) for x in pools]
    own, right = pools[0], None
    if index in own.indices:
        at = own.indices.index(index)
        right = own.exact[at]
        alone = own._replace(indices=[index], exact=own.exact[at : at + 1])
        held.append((alone, ((n, 1), np.zeros((n, 1), bool) | sample.columns, unit)))
    for one in (match_blocks(index, got, *x, right) for x in held):
        most = max(most, one.share)
        yield one
    if most >= _ALL_BLOCKS or right is None:
        return
    for x in held[: len(pools)]:
        yield match_blocks(index, got, *x, right, added=True)
    off = divide(differ(got, right), unit * row_sizes(right))
    wrong = (np.abs(off) > FAR) & rows[:, None]
    for shape in [*((1, x) for x in _WIDTHS), *((x, 1) for x in _WIDTHS)]:
        if n % shape[0] == 0 == d % shape[1] and max(shape) < (n if shape[1] == 1 else d):
            one = match_blocks(index, got, own, (shape, wrong, unit), right)
            if one.share >= _ALL_BLOCKS:
                yield one
                return


def match_blocks(
    index: Index,
    got: Doubles,
    pool: Pool,
    task: Task,
    right: Doubles | None = None,
    added: bool = False,
) -> Copies:
    """Find the blocks that are held by those with wrong numbers: of the nearest direction.

    They are far nearer than what is right, if that is known, or are `added` to it.
    """
    shape, wrong, unit = task
    errors = _cut_blocks((got if right is None else got - right)[None], shape)
    held = errors if added else _cut_blocks(got[None], shape)
    theirs, marked = _cut_blocks(pool.exact, shape), _cut_blocks(wrong[None], shape).any(-1)
    sizes = _cut_blocks(row_sizes(got)[None], shape)
    empty, some = (np.flatnonzero(marked & (np.any(held, -1) == x)) for x in (False, True))
    none, count = np.zeros((0, 3), int), len(some) + len(empty)
    found = Copies(pool, shape, none, none, len(empty), 1.0, count, added)
    if not len(theirs) or not len(some) or not np.all(np.isfinite(held[some])):
        return found
    lengths = np.maximum(np.linalg.norm(theirs, axis=-1), 1e-300)
    whole = shape[0] == len(got) or shape[1] == got.shape[1]
    for i in (some,) if whole else (thin(some, _FIRST_BLOCKS), some):
        nearest = np.argmax(held[i] @ (theirs / lengths[:, None]).T, -1)
        factors = np.sum(held[i] * theirs[nearest], -1) / np.square(lengths[nearest])
        factor = float(np.median(factors))
        z = divide(held[i] - factor * theirs[nearest], unit * sizes[i])
        of = _locate(nearest, pool.exact.shape, shape)
        left = np.linalg.norm(held[i] - factor * theirs[nearest], axis=-1)
        rest = left / (abs(factor) * lengths[nearest])
        near = (np.max(np.abs(z), -1) < FAR) & (rest < _AS_HELD)
        if np.mean(near) > _MATCHED:  # in a few, large terms may cancel
            near |= rest < _OF_CANCELLED
        if not whole and np.mean(near) < _ALL_BLOCKS:
            return found
    to = _locate(i, (1, *got.shape), shape)
    own = pool.indices.index(index) if pool.called == "head" and index in pool.indices else -1
    to[:, 0] = own
    moved = near & np.any(to != of, -1)
    right_columns = sum(near & ~moved) if shape[0] == len(got) else 0
    moved &= left <= _OF_ERRORS * np.linalg.norm(errors[i], axis=-1)
    return found._replace(to=to[moved], of=of[moved], factor=factor, wrong=count - right_columns)


def _cut_blocks(x: Any, shape: tuple[int, int]) -> Any:
    """Cut heads, (heads, n, d), into blocks, (blocks, numbers)."""
    (heads, n, d), (r, c) = x.shape, shape
    return x.reshape(heads, n // r, r, d // c, c).swapaxes(2, 3).reshape(-1, r * c)


def _locate(blocks: Any, lengths: tuple[int, ...], shape: tuple[int, int]) -> BlockPlaces:
    heads, n, d = lengths
    at = np.unravel_index(blocks, (heads, n // shape[0], d // shape[1]))
    return np.asarray(np.stack(at, -1) * [1, *shape])


def _describe_held(index: Index, x: Copies, rows: str) -> str:
    """Say what blocks hold: by distances or, of many, by heads."""
    by_head = np.arange(3) == 0
    by = np.where(by_head, x.of, x.of - x.to)
    if len(np.unique(by, axis=0)) > _DISTANCES:
        by = by * by_head
    _, which, counts = np.unique(by, axis=0, return_inverse=True, return_counts=True)
    words = []
    for at in np.argsort(-counts, kind="stable"):
        to, of = (y[which.ravel() == at] for y in (x.to, x.of))
        own = x.pool.called == "head" and x.pool.indices[of[0, 0]] == index
        whose = "" if own else f" of {x.pool.called} {place(x.pool.indices[of[0, 0]])}"
        here, there = _name_held(x, to, rows), _name_held(x, of, rows)
        if len(np.unique(to - of, axis=0)) > 1 and {*map(tuple, to)} == {*map(tuple, of)}:
            one, other = (" of ".join(_name_held(x, y[:1], rows)) for y in (to, of))
            there += [f"{there.pop()} in another order ({one} holds those of {other})"]
        source = " of ".join([y for y in there if y not in here] or there)
        numbers, to_these = f"the numbers of {source}{whose}", " of ".join(here)
        single = len(to) == 1 in x.shape and _call_blocks(x, rows) != "blocks"
        holds = f"hold{'s' * single}"
        added = f"{numbers} are added to {to_these}"
        words.append(added if x.added else f"{to_these} {holds} {numbers}")
    times = "" if abs(x.factor - 1) < _NO_FACTOR else f", times {x.factor:.3g}"
    zero = f", and {x.empty} {_call_blocks(x, rows)} are 0" * bool(x.empty)
    return f"in head {place(index)}, {name_first(words, 4)}{times}{zero}"


def _call_blocks(x: Copies, rows: str) -> str:
    whole = [size == length for size, length in zip(x.shape, x.pool.exact.shape[1:], strict=True)]
    return {(False, True): rows, (True, False): "columns"}.get(tuple(whole), "blocks")


def _name_held(x: Copies, blocks: BlockPlaces, rows: str) -> list[str]:
    """Name the columns and rows of blocks, each if they are not all."""
    words: list[str] = []
    for axis, kind in ((1, "columns"), (0, rows)):
        places = np.unique(blocks[:, 1 + axis, None] + np.arange(x.shape[axis]))
        if len(places) < x.pool.exact.shape[1 + axis] or not (words or axis):
            edges = np.flatnonzero(np.diff(places) > 1) + 1
            first, *rest = np.split(places, edges) if len(edges) == 1 else [places]
            words.append(" and ".join([name_span(kind, first), *map(describe_span, rest)]))
    return words


def _list_grids(x: Doubles, axes: tuple[int, ...]) -> Iterator[tuple[str, Doubles, Doubles]]:
    """List grids by the largest number along axes: in words, nearest points, and gaps of these."""
    most, spread = np.max(np.abs(x), axes, keepdims=True), np.ptp(x, axes, keepdims=True)
    steps = {f"{2 * count:g} of them": most / count for count in _STEP_COUNTS}
    steps["255 from the least to the largest"] = spread / 255
    for words, step in steps.items():
        step = np.where(step > 0, step, 1.0)
        text = f"is a whole number of steps ({words}), the first of {step.flat[0]:.4g}"
        yield text, np.rint(x / step) * step, step
    for name in _SCALED_TYPES:
        to = FORMATS[name]
        scale = np.where(most > 0, most / to.largest, 1.0)
        for words, by in (("", np.ones_like(scale)), (" times a scale", scale)):
            yield f"is a number of {name}{words}", to.round(x / by) * by, by * to.spacing(x / by)


def find_grid(problem: Problem, numbers: Numbers) -> tuple[str, float]:
    """Say on which grid all numbers of a result lie, if they could not by chance, and its gap.

    The largest number, or the largest of each row, lies on the grid that it makes.
    """
    heads = [*np.ndindex(problem.lead)]
    n, _, columns = problem.shape
    few = heads[: max(1, _MOST // max(n * columns, 1))]
    x = np.stack([numbers.out(index) for index in few])
    unit = _SLACK * FORMATS[numbers.out_dtype].unit
    if not x.size or not np.all(np.isfinite(x)) or not np.any(x):
        return "", 0.0
    kinds: dict[str, tuple[Doubles, tuple[int, ...]]] = {}
    if len(few) == len(heads):
        kinds[""] = x, (0, 1, 2)
    kinds |= {" in each head": (x, (1, 2)), " in each row": (x, (2,))}
    for size in (y for y in _GROUPS if y < columns and columns % y == 0):
        kinds[f" in each row and {size} columns"] = x.reshape(*x.shape[:2], -1, size), (3,)
    for where, (grouped, axes) in kinds.items():
        for words, points, gap in _list_grids(grouped, axes):
            slack = unit * np.abs(points)
            if np.any(np.abs(grouped - points) > slack):
                continue
            # Any other number is as near to a point with this probability; 0 may have a cause.
            sizes = np.abs(grouped)
            free = (sizes == 0) | (sizes == np.max(sizes, axes, keepdims=True))
            chance = np.where(free, 1.0, np.minimum(2 * (slack + unit * gap) / gap, 1.0))
            if np.sum(np.log(chance)) < _NO_CHANCE:
                return f"each number of the output {words}{where}", float(np.max(gap))
    return "", 0.0
