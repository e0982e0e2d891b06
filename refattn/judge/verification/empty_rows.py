"""Queries that see no key: what kernels give for them, and what `verify` accepts.

It also describes the rows about which a profile says nothing, by what the kernel gave for them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ...arrays.blocks import blocks
from ...arrays.library import Doubles
from ...arrays.words import name_row
from ..rounding.head import SoftmaxHead, Tile, exact_rows, score_tile
from ..rounding.problems import Index, Problem
from ..rounding.profiles import Profile
from .findings import Numbers, Part, describe_span

EMPTY_ROWS = ("zero", "nan", "mean", "any", "undefined")  # the last two are the same
_KEYS_AT_ONCE = 512
_HIDDEN = (-1e4, -3e4, -5e4, -65504.0, -1e9)  # finite scores that stand for hidden keys
_AVERAGED = (128, 64, 32, 16, 8, 4)  # keys of tiles whose values may be averaged
_LOOKED_AT = 64  # rows of which nothing is known
_NEAR = 2.0**-5  # of the distance to the exact result, within which a row is another result
_OFF_MEAN = 2.0**-6  # of the largest value, how far a mean of rounded values may be off


def settle(parts: Mapping[str, Part], convention: str) -> dict[str, Part]:
    """Put what a query without keys should have in place of what the convention allows."""
    if convention == "zero":
        return dict(parts)
    return {name: _settle_part(x, convention) for name, x in parts.items()}


def _settle_part(part: Part, convention: str) -> Part:
    problem, numbers = part
    gradient = problem.gradient
    if problem.kind != "scores" or problem.has_sinks:
        return part
    forward = problem if gradient is None else gradient.forward
    empty = lru_cache(maxsize=8)(lambda index: find_empty(forward, index))
    if gradient is not None:
        if gradient.of == "dq" and convention != "mean":
            numbers = numbers._replace(out=_clear(numbers.out, empty, 0.0))
        # D = d_out . out of such a row must be 0 too, not NaN.
        both = gradient.derivatives

        def derivatives(index: Index) -> tuple[Doubles, Doubles | None]:
            d_out, out = both(index)
            return d_out, out if out is None else np.where(empty(index)[:, None], 0.0, out)

        settled = gradient._replace(derivatives=derivatives).problem(problem.lead)
        return Part(settled, numbers)

    def read(index: Index) -> Doubles:
        got, rows = numbers.out(index), empty(index)
        fits = fit_convention(
            got, convention, np.mean(problem.read(index)["v"], 0) if rows.any() else 0.0
        )
        # What is allowed becomes the 0 that the exact result has, and anything else NaN: a FAIL.
        return np.where(rows[:, None], np.where(fits[:, None], 0.0, math.nan), got)

    lse = numbers.lse
    settled_lse = None if lse is None else _clear(lse, empty, -math.inf)
    return Part(problem, numbers._replace(out=read, lse=settled_lse))


def _clear(
    read: Callable[[Index], Doubles], empty: Callable[[Index], Any], value: float
) -> Callable[[Index], Doubles]:
    def cleared(index: Index) -> Doubles:
        got = read(index)
        rows = empty(index)
        return np.where(rows.reshape(rows.shape + (1,) * (got.ndim - 1)), value, got)

    return cleared


def fit_convention(got: Doubles, convention: str, mean: Any) -> npt.NDArray[np.bool_]:
    """Tell which rows are as a convention has them."""
    if convention == "nan":
        return np.asarray(np.all(np.isnan(got), -1))
    if convention == "mean":
        near = _OFF_MEAN * (np.max(np.abs(mean), initial=0.0) + 1e-300)
        return np.asarray(np.all(np.abs(got - mean) <= near, -1))
    if convention == "zero":
        return np.asarray(np.all(got == 0, -1))
    return np.ones(len(got), bool)


def find_empty(problem: Problem, index: Index) -> npt.NDArray[np.bool_]:
    """Find the queries of a head that see no key."""
    return ~np.concatenate(
        [np.zeros(0, bool), *(x.any(-1) for x in _show_blocks_of(problem, index))]
    )


def find_unseen(problem: Problem, index: Index) -> npt.NDArray[np.bool_]:
    """Find the keys of a head that no query sees."""
    keys = problem.head(index).keys
    unseen = np.ones(keys, bool)
    for visible in _show_blocks_of(problem, index):
        unseen &= ~visible.any(0)
    return unseen


def _show_blocks_of(problem: Problem, index: Index) -> Iterator[npt.NDArray[np.bool_]]:
    """List what queries of a head see, by blocks of them."""
    head = problem.head(index)
    for i in blocks(0, len(head.q), _KEYS_AT_ONCE):
        visible = head.visible(i, slice(0, head.keys))
        yield np.broadcast_to(True if visible is None else visible, (i.stop - i.start, head.keys))


def list_conventions(
    problem: Problem, numbers: Numbers, empty: npt.NDArray[np.bool_]
) -> Iterator[str]:
    """Say what a kernel gives for queries without keys, if it is not 0 and a lse of -inf."""
    outs, normalisers, means, hidden = [], [], [], ""
    for index in np.ndindex(problem.lead):
        rows = empty[problem.number(index)]
        if rows.any():
            outs.append(numbers.out(index)[rows])
            means.append(np.mean(problem.read(index)["v"], 0) + 0 * outs[-1])
            some = _find_averaged(problem.read(index)["v"], outs[-1])
            if len(some) and not hidden:
                first = np.flatnonzero(rows)[np.argmax(np.any(outs[-1], -1))]
                spans = np.split(some, np.flatnonzero(np.diff(some) > 1) + 1)
                keys = " and ".join(map(describe_span, spans))
                hidden = f"keys {keys} in {name_row((*index, int(first)))}"
            normalisers += [] if numbers.lse is None else [numbers.lse(index)[rows]]
    if not outs:
        return
    got, mean = np.concatenate(outs), np.concatenate(means)
    fits = {x: bool(np.all(fit_convention(got, x, mean))) for x in ("zero", "nan", "mean")}
    words = {"nan": "NaN", "mean": "the mean of v"}
    for name, called in words.items():
        if fits[name] and not fits["zero"]:
            yield f"rows that see no key are {called} {say_how_to_accept(name)}"
    if hidden and not any(fits.values()):
        yield f"rows that see no key are the mean of the values of some hidden keys: {hidden}"
    if normalisers:
        lse = np.concatenate(normalisers)
        for called, same in (
            ("inf", np.isposinf(lse)),
            ("NaN", np.isnan(lse)),
            ("0", lse == 0),
            ("finite", np.isfinite(lse)),
        ):
            if np.all(same):
                yield f"lse of rows that see no key is {called} {say_how_to_accept('any')}"
                return


def _find_averaged(v: Doubles, got: Doubles) -> npt.NDArray[np.int64]:
    """Find the keys, in whole tiles, of whose values the first of some rows is the mean.

    None are found if not all rows are means of values of tiles, as many for each column at most.
    """
    rows = got[np.any(got, -1)]
    for size in (x for x in _AVERAGED if len(rows) and 2 * -(-len(v) // x) <= v.shape[1]):
        starts = np.arange(0, len(v), size)
        lengths = np.diff([*starts, len(v)])
        sums = np.add.reduceat(v, starts, axis=0)
        share = np.linalg.lstsq(sums.T, rows.T, rcond=None)[0].T  # of each key of a tile
        counts = np.rint(share / np.maximum(np.max(share, -1, keepdims=True), 1e-9))
        whole = counts / np.maximum(np.sum(counts * lengths, -1, keepdims=True), 1)
        if np.all(counts >= 0) and fit_convention(rows, "mean", whole @ sums).all():
            return np.flatnonzero(np.repeat(whole[0] > 0, lengths))
    return np.zeros(0, np.int64)


def say_how_to_accept(convention: str) -> str:
    """Name the option, in Python and of the command, by which such rows pass."""
    return f"(to accept it: empty_rows={convention!r}, or --empty-rows {convention})"


def remark_idle(rows: Sequence[Index]) -> list[str]:
    """Name rows of which nothing is known."""
    if not rows:
        return []
    first = name_row(min(rows))
    return [
        f"0 or the mean of v would also pass in {len(rows)} rows by this profile, the first is "
        f"{first}: the verdict does not cover them"
    ]


def describe_idle(
    problem: Problem, numbers: Numbers, dtype: str, profile: Profile, idle: Sequence[Index]
) -> Iterator[str]:
    """Say what rows hold of which nothing is known by a profile, of some of them."""
    found, largest, roundings = Counter[str](), 0.0, profile.roundings(dtype)
    for *at, row in idle[:_LOOKED_AT]:
        index, i = tuple(at), slice(row, row + 1)
        head, got = problem.head(index), numbers.out(index)[i]
        keys = slice(0, head.keys)
        tile = score_tile(head, i, keys, head.visible(i, keys), head.q[i] @ head.k[keys].T)
        if not np.all(np.isfinite(got)):
            largest = max(largest, float(np.max(np.abs(tile.products), initial=0.0)))
            found["NaN or infinity"] += 1
            continue
        far = _NEAR * float(np.max(np.abs(got - exact_rows(head, i)), initial=0.0))
        # Near to another result, and far nearer than to the exact one.
        others = _list_others(head, tile)
        found.update(
            [next((x for x, y in others if np.max(np.abs(got - y), initial=0.0) < far), "")]
        )
    for words, count in found.items():
        more = ""
        if (
            roundings.scores is not None
            and words.startswith("NaN")
            and largest > roundings.scores.largest
        ):
            more = (
                f": q . k is up to {largest:.3g}, and {dtype} ends at {roundings.scores.largest:g}"
            )
        if words:
            yield f"{count} of these rows hold {words}{more}"


def _list_others(head: SoftmaxHead, tile: Tile) -> Iterator[tuple[str, Doubles]]:
    """List what a row may hold in place of the result."""
    v = head.v[tile.keys]
    yield "0", 0 * v[:1]
    yield "the mean of all values", np.mean(v, 0, keepdims=True)
    if tile.visible is None or head.sink is not None:
        return
    # Kernels hide keys by a large negative score, in place of theirs or added to them, which is not
    # enough where a row sees no other, or where scores are as large.
    for score in _HIDDEN:
        for words, more in ((f"the score {score:g}", 0), (f"{score:g} added to scores", 1)):
            s = np.where(tile.visible, tile.scores, score + more * tile.scores)
            p = np.exp(s - np.max(s, -1, keepdims=True))
            yield f"the output if hidden keys have {words}", p @ v / np.sum(p, -1, keepdims=True)
