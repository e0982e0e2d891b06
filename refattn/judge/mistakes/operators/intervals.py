"""Keys one after another that count otherwise in some rows: which ones is found by running sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import numpy.typing as npt

from ....arrays.library import Doubles
from ...rounding.problems import Problem
from ..causes.sampled import Alternative, Place, Seen, attend, show_band, take_rows
from ..causes.slips import (
    LOSSES,
    TILE_SIZES,
    hide_tile,
    leave_without_tile,
    name_keys,
    weigh_with_hidden,
    weigh_with_zeros,
)
from ..causes.wrong_rows import Sampled

_EDGES = 128  # of intervals, at most, that are tried in pairs before they are made exact
_TURNS = 4  # in which an edge is made exact, and then the other
_ALIKE_EDGES = 12.0  # sum of squares of z, by which fits cannot be told apart
_LEAST_SUM = 1e-9  # of the weights, over what it was

Edges = npt.NDArray[np.int64]


def list_lost_parts(problem: Problem) -> Iterator[Alternative]:
    """List kernels that skip a part of each tile of keys: its first or last half, or the rest.

    Of each block of a cache they may skip what is no whole tile, or more than one.
    """
    m, band, packed = problem.shape[1], show_band(problem), problem.packed
    sizes = [2 * x for x in TILE_SIZES if 2 * x < m] if packed is None else []
    parts = [(x, *y) for x in sizes for y in ((x // 2, x), (0, x // 2), (x // 4, x))]
    if packed is not None and packed.blocks is not None:
        size = packed.blocks((0,) * len(problem.lead))[0].shape[1]
        kept = {y for x in TILE_SIZES for y in (x, size // x * x, size - 1) if 0 < y < size}
        parts = [(size, *y) for x in sorted(kept) for y in ((x, size), (0, size - x))]
    for size, start, stop in parts:
        seen = partial(_hide_part, band, size, start, stop)
        yield Alternative(f"keys {start} to {stop - 1} of each {size} are left out", problem, seen)


def _hide_part(band: Callable[[Place], Seen], size: int, start: int, stop: int, x: Place) -> Seen:
    at = x.j % size
    return np.asarray(band(x) & ((at < start) | (at >= stop)))


def list_intervals(problem: Problem, x: Sampled, sizes: Doubles) -> Iterator[Alternative]:
    """List kernels in which keys one after another are lost, or seen, or count otherwise.

    For each kind of mistake it is the interval by which some rows are nearest, in `sizes`.
    """
    m = problem.shape[1]
    head = take_rows(problem, x.rows)
    exact = attend(head)
    values = np.concatenate([np.ones((head.keys, 1)), head.v[: head.keys]], -1)
    w, zero, top = weigh_with_zeros(head)
    # Weights over the sum of all that are seen.
    share = np.exp(np.where(np.isfinite(top), top - exact.lse, 0.0))[:, None]
    w, zero = ((share * y)[:, : head.keys] for y in (w, zero))
    changes = {}
    for words, (of_sum, of_out, of_zero) in LOSSES.items():
        changes[words] = of_out * w[..., None] * values
        changes[words][..., 0] = of_sum * w + of_zero * zero
    if head.mask is not None:
        _, opened = weigh_with_hidden(head)
        changes[""] = np.where(head.mask, 0.0, opened)[..., None] * values
    right = np.concatenate([np.ones((len(w), 1)), exact.out], -1)
    shown = _list_sequences_seen(problem, head.mask)
    for words, change in changes.items():
        sums = np.pad(np.cumsum(change, 1), ((0, 0), (1, 0), (0, 0)))
        _, j = find_interval(right, sums, x.got, sizes)
        mine = shown[(shown >= j.start) & (shown < j.stop)]
        if words and len(mine):  # others do not count anyhow
            j = slice(int(mine[0]), int(mine[-1]) + 1)
        if head.mask is not None and not words:
            hidden = np.flatnonzero(~head.mask[:, j].all(0)) + j.start  # from some row
            if len(hidden):
                yield show_tile(problem, slice(int(hidden[0]), int(hidden[-1]) + 1))
        elif words == "are left out" and 0 < j.stop - j.start < m:
            yield hide_tile(problem, j)  # hiding keys loses no digits; sums less a tile may cancel
        elif 0 < j.stop - j.start < m:
            text = name_keys(j, words)
            lose = partial(leave_without_tile, j=j, loss=LOSSES[words])
            yield Alternative(text, problem, compute=lose)


def _list_sequences_seen(problem: Problem, mask: Seen | None) -> npt.NDArray[np.int64]:
    """List the keys of all sequences of which some rows see keys."""
    every, packed = np.arange(problem.shape[1]), problem.packed
    if mask is None or packed is None or packed.keys.ndim > 1:
        return every
    of = np.searchsorted(packed.keys, every, "right")
    return np.flatnonzero(np.isin(of, of[mask[:, : len(every)].any(0)]))


def find_interval(
    right: Doubles, sums: Doubles, got: Doubles, sizes: Doubles
) -> tuple[float, slice]:
    """Find the keys whose change brings some rows nearest to what they are, and how near."""
    m, mass = sums.shape[1] - 1, sums[..., 0]
    error = (right[:, 1:] - right[:, :1] * got) / sizes
    added = (sums[..., 1:] - mass[..., None] * got[:, None]) / sizes[:, None]
    size, along = np.sum(added * added, -1), (added @ error[..., None])[..., 0]
    later = size + 2 * along + np.sum(error * error, -1)[:, None]
    earlier = size - 2 * along

    def rate(starts: Edges, stops: Edges) -> Doubles:
        """Rate pairs of edges by products of what they add to errors: sums of squares of z."""
        with np.errstate(all="ignore"):
            squares = later[:, stops, None] + earlier[:, None, starts]
            squares -= 2 * added[:, stops] @ np.swapaxes(added[:, starts], 1, 2)
            total = right[:, :1, None] + mass[:, stops, None] - mass[:, None, starts]
            far = np.sum(np.where(total > _LEAST_SUM, squares / (total * total), math.inf), 0)
        return np.where(np.isnan(far) | (stops[:, None] <= starts), math.inf, far)

    # First pairs of multiples of a step.
    edges = np.unique(np.append(np.arange(0, m, -(-m // _EDGES)), m))
    far = rate(edges, edges)
    stop, start = (int(edges[x]) for x in np.unravel_index(np.argmin(far), far.shape))
    every = np.arange(m + 1)
    for _ in range(_TURNS):
        before = start, stop
        stop = _choose_round(rate(np.array([start]), every[start + 1 :])[:, 0], start + 1, m)
        start = _choose_round(rate(every[:stop], np.array([stop]))[0], 0, m)
        if (start, stop) == before:
            break
    off = error + added[:, stop] - added[:, start]
    total = right[:, :1] + (mass[:, stop] - mass[:, start])[:, None]
    known = np.all(total > _LEAST_SUM)
    return float(np.sum(np.square(off / total))) if known else math.inf, slice(start, stop)


def _choose_round(far: Doubles, first: int, last: int) -> int:
    """Choose an edge: of those that fit alike the roundest."""
    alike = np.flatnonzero(far <= np.min(far) + _ALIKE_EDGES) + first
    return int(max(alike, key=lambda x: math.inf if x == last else math.gcd(int(x), 2**20)))


def show_tile(problem: Problem, j: slice) -> Alternative:
    """Show a tile of keys to all queries."""
    band = show_band(problem)

    def seen(x: Place) -> Seen:
        usual = band(x) if x.mask is None else band(x) & x.mask
        return np.asarray(usual | ((x.j >= j.start) & (x.j < j.stop)))

    return Alternative(name_keys(j, "are not masked"), problem, seen, among=False)
