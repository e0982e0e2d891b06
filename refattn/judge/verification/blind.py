"""Find trivial outputs, such as zeros or the mean of v, that would also pass on these inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache

import numpy as np

from ...arrays.library import Doubles
from ..rounding.backward import exact_gradient
from ..rounding.formats import FORMATS
from ..rounding.head import SoftmaxHead, attend_rows, exact_rows, finite_logs, scan_tiles
from ..rounding.problems import Index, Problem, sweep
from ..rounding.profiles import Profile, profile_of
from ..rounding.roundings import RowErrors
from ..rounding.saved import share_tile
from .choice import fused_profile
from .findings import BEYOND, IGNORES, SAME_KEYS, SAME_VALUES, Numbers
from .head_sums import HeadSums, row_weights
from .trial import passes
from .z_scores import mean_square

_LOST_KEYS = 64  # keys, as many as a tile of a kernel has
_MEAN_OF_V, _HALF_SCALE = "mean of v", "half the scale"
_AS_ROUNDED = 0.5, 1.5  # mean squares of z where a profile explains errors
_DIRECTIONS = ["factor", "truncated", "epsilon", "sink"]


def _lose_tile(head: SoftmaxHead, i: slice) -> Doubles:
    """Hide the last keys."""
    n, m = len(head.q), head.k.shape[0]
    seen = np.arange(head.keys) < head.keys - min(_LOST_KEYS, (head.keys + 1) // 2)
    shown = np.broadcast_to(seen, (n, m if head.sink is None else m - 1))
    return exact_rows(head._replace(mask=shown if head.mask is None else shown & head.mask), i)


OUTPUTS: Mapping[str, Callable[[SoftmaxHead, slice], Doubles]] = {
    "zeros": lambda head, i: np.zeros((i.stop - i.start, head.v.shape[-1])),
    # Scores of 0: equal weights for all keys that a query sees.
    _MEAN_OF_V: lambda head, i: exact_rows(head._replace(q=0 * head.q, bias=None), i),
    _HALF_SCALE: lambda head, i: exact_rows(head._replace(scale=head.scale / 2), i),
    "the last keys lost": _lose_tile,
}


class _Rows:
    """Rows of an output, computed when they are read."""

    def __init__(self, compute: Callable[[slice], Doubles]) -> None:
        self.compute = compute

    def __getitem__(self, i: slice) -> Doubles:
        return self.compute(i)


def list_blind(
    problem: Problem,
    numbers: Numbers,
    dtype: str,
    profile: Profile,
    alpha: float,
    names: Sequence[str] = (*OUTPUTS,),
) -> list[str]:
    """Name the outputs that pass the same tests as the numbers, of the rows of a problem."""
    if not problem.is_mean or not math.prod((*problem.lead, *problem.shape)):
        return []
    heads = [*np.ndindex(problem.lead)]
    right = {x for x in names if all(_is_exact(x, problem, index) for index in heads)}
    if right.issuperset(names):  # the right result passes
        return [*names]
    roundings, read = profile.roundings(dtype), problem.read_by(profile)
    to = FORMATS[numbers.out_dtype]
    # The same rows, profile and tests as for the numbers; `add_few` leaves out those of keys.
    weights, edges = row_weights(read, roundings), ["edge+1", "edge-1"] * problem.causal

    def sums_of(compute: Callable[[SoftmaxHead, slice], Doubles]) -> HeadSums:
        def out(index: Index) -> _Rows:
            return _Rows(lambda i: to.round(compute(read.head(index), i)))

        others = Numbers(out, numbers.out_dtype)  # type: ignore[arg-type]
        return HeadSums(problem, _DIRECTIONS + edges, others, weights, True)

    tried = {name: sums_of(OUTPUTS[name]) for name in names if name not in right}

    def add(index: Index, i: slice, rows: RowErrors) -> Callable[[], None]:
        added = [x.add_few(index, i, rows) for x in tried.values()]

        def sums_of_all() -> None:
            for each in added:
                each()

        return sums_of_all

    sweep(problem, dtype, profile, add)
    with np.errstate(all="ignore"):
        return [x for x in names if x in right or passes(tried[x], alpha)]


def sum_narrowly(problem: Problem, dtype: str) -> Callable[[Index], Doubles]:
    """Compute some rows of a kernel that keeps its sums in the storage type; others are NaN.

    Weights and derivatives are rounded, and running sums after 64 tokens.
    """
    to, roundings = FORMATS[dtype].round, profile_of(fused_profile(dtype)).roundings(dtype)

    def sum_rows(index: Index, i: slice) -> Doubles:
        if problem.gradient is not None:
            saved = problem.gradient.saved(index, roundings, i)
            return to(exact_gradient(saved, problem.gradient.of, i, 1, to, _LOST_KEYS))
        head, out = problem.head(index), np.zeros((i.stop - i.start, problem.shape[2]))
        top, lse = finite_logs(attend_rows(head, i, None))
        for tile in scan_tiles(head, i, _LOST_KEYS):
            out = to(out + to(share_tile(tile, top[:, 0])[0]) @ head.v[tile.keys])
        return to(out * np.exp(top - lse))

    @cache
    def out(index: Index) -> Doubles:
        found = np.full((problem.shape[0], problem.shape[2]), math.nan)
        for head, i in problem.items():
            if head == index:
                found[i] = sum_rows(index, i)
        return found

    return out


def _is_exact(name: str, problem: Problem, index: Index) -> bool:
    """Tell from the arrays of a head alone that an output is the right one, for all its rows."""
    x = problem.read(index)
    if name == "zeros" or not np.any(x["v"]):
        return not np.any(x["v"])
    everything = not problem.causal and problem.window == (None, None) and "mask" not in x
    if everything and not problem.has_sinks and np.all(x["v"] == x["v"][:1]):
        return True  # any weights are
    # Whatever their scale is, scores are equal, or 0 where they are beside that of a sink.
    equal = not np.any(x["q"]) or not np.any(x["k"])
    equal |= not problem.has_sinks and bool(np.all(x["k"] == x["k"][:1]))
    return name in (_MEAN_OF_V, _HALF_SCALE) and equal and "bias" not in x


def mark_right_mean(problem: Problem, blind: Sequence[str]) -> list[str]:
    """Say that the mean of v is right, where scores are not 0 but the same for all keys."""
    if _MEAN_OF_V not in blind:
        return [*blind]
    heads = (problem.read(index) for index in np.ndindex(problem.lead))
    is_right = all(
        "bias" not in x and np.any(x["q"]) and np.any(x["k"]) and np.all(x["k"] == x["k"][:1])
        for x in heads
    )
    right = f"{_MEAN_OF_V} {SAME_KEYS}"
    return [right if is_right and x == _MEAN_OF_V else x for x in blind]


def remark_same_values(problem: Problem, blind: Sequence[str]) -> Iterator[str]:
    """Say that no weights can be judged, where the mean of v passes because v is constant."""
    heads = (problem.read(index)["v"] for index in np.ndindex(problem.lead))
    if _MEAN_OF_V in blind and problem.shape[1] > 1 and all(np.all(v == v[:1]) for v in heads):
        yield SAME_VALUES


def remark_beyond(problem: Problem) -> Iterator[str]:
    """Say that squares of all values overflow, or squares of their errors vanish."""
    heads = (np.max(np.abs(problem.read(x)["v"]), initial=0.0) for x in np.ndindex(problem.lead))
    top = max(map(float, heads), default=0.0)
    limits = np.finfo(np.float64)
    # A rounding in float64 moves values by eps of themselves, and variances need its square.
    if math.isinf(top * top) or (top and (top * limits.eps) ** 2 < limits.tiny):
        yield BEYOND


def list_ignored(
    problem: Problem, numbers: Numbers, dtype: str, profiles: Sequence[Profile]
) -> list[str]:
    """Name options without which one of some profiles explains the numbers."""
    if not problem.is_mean:
        return []
    # As it fits a loose profile far too well, the numbers may be those of a tight one, without an
    # option that this one has: then z of a tight profile is near 1 for the problem without it.
    least, most = _AS_ROUNDED
    return [
        f"{IGNORES} the {words}"
        for words, other in problem.leave_out()
        if any(least < mean_square(other, numbers, x.roundings(dtype)) < most for x in profiles)
    ]
