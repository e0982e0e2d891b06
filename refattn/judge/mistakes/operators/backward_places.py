"""Backward passes that are wrong in some places: other limits of what is seen, or of some tiles."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain

import numpy as np
import numpy.typing as npt

from ....arrays.library import Doubles
from ...rounding.problems import Index, Problem
from ..causes.backward import Backward, Candidate, list_candidates
from ..causes.sampled import Alternative
from ..causes.slips import TILE_SIZES
from ..causes.wrong_rows import Sampled, differ, divide, row_sizes, thin
from .limits import list_own_limits, list_reaches
from .tiles import choose_columns, describe_keys

_PAIRS = 2**21  # of queries and keys of a head, at most
_ROWS, _HEADS, _MOST_TILES = 8, 3, 32  # by which tiles are chosen
Tiles = npt.NDArray[np.bool_]


def list_limited(back: Backward) -> Iterator[Candidate]:
    """List backward passes whose queries see keys up to others, or from others on: by dq."""
    forward, wrong = back.first.forward, back.list_wrong("dq") if "dq" in back.failed else []
    if not wrong or np.prod(forward.shape[:2]) > _PAIRS:
        return
    rate = partial(_rate_limits, back)
    few = wrong[0].take(thin(np.arange(len(wrong[0].got)), _ROWS))
    for one in chain(list_reaches(forward, few, rate), list_own_limits(forward, wrong, rate)):
        back.forward.append(one)
        text = f"in the backward pass {one.text} (lse and out are right)"
        yield Candidate(text, len(back.forward) - 1)


def _rate_limits(back: Backward, free: Problem, x: Sampled, turn: int) -> Doubles:
    """Rate each key as the last of the sums of some rows of dq, or with `turn` -1 as the first."""
    back.forward.append(Alternative("", free))
    one = Candidate("", len(back.forward) - 1)
    terms = [
        weights[..., None] * rows
        for weights, rows in back.list_factors(one, "dq", x.rows.at, x.rows.queries)
    ]
    sums = np.cumsum(sum(terms)[:, ::turn], 1)[:, ::turn]
    size = back.samples["dq"].unit * row_sizes(x.got)
    return np.asarray(np.sum(np.square(divide(differ(x.got[:, None], sums), size[:, None])), -1))


def list_scoped(back: Backward) -> Iterator[Candidate]:
    """List backward passes that are others for some tiles of keys, or of queries, alone.

    Which tiles is told by dq, which sums over keys, or by dk and dv.
    """
    n, m, _ = back.first.forward.shape
    for of in back.failed:
        called, count = ("keys", m) if of == "dq" else ("queries", n)
        size = next((x for x in TILE_SIZES if count <= x * _MOST_TILES), count)
        some = [x.take(thin(np.arange(len(x.got)), _ROWS)) for x in back.list_wrong(of)[:_HEADS]]
        for one in list_candidates(back.first, False) if size < count else ():
            fitted = [_split(back, one, of, x, size) for x in some if not one.of]
            if not fitted or any(x is None for x in fitted):
                continue
            columns, rest = (np.concatenate(x, -1) for x in zip(*fitted, strict=True))
            if (chosen := choose_columns(columns, rest)) is not None:
                here = np.isin(np.arange(count) // size, chosen)
                where = describe_keys(here, called)
                answer = partial(_mix, back, one, called, here)
                yield Candidate(f"{one.text}, but only for {where}", answer=answer)


def _split(
    back: Backward, one: Candidate, of: str, x: Sampled, size: int
) -> tuple[Doubles, Doubles] | None:
    """Return what a candidate adds to some rows in each tile, and what is to be added."""
    sums = []
    for way in (one, Candidate("")):
        every = [*back.list_factors(way, of, x.rows.at, x.rows.queries)]
        starts = np.arange(0, every[0][0].shape[1], size) if every else [0]
        terms = (
            [weights[:, j : j + size] @ rows[j : j + size] for j in starts]
            for weights, rows in every
        )
        sums.append(sum(map(np.stack, terms)))
    if np.shape(sums[0]) != np.shape(sums[1]):
        return None
    unit = back.samples[of].unit * row_sizes(x.got)
    other, right = (y / unit for y in sums)
    return (other - right).reshape(len(right), -1), (x.got / unit - np.sum(right, 0)).ravel()


def _mix(
    back: Backward,
    one: Candidate,
    called: str,
    here: Tiles,
    of: str,
    index: Index,
    heads: object,
) -> Doubles:
    """Compute a gradient by a candidate for some keys, or queries, and rightly for the others."""
    rows = np.arange(back.parts[of].problem.shape[0])
    if called == back.parts[of].problem.rows:  # each row is of one of them
        other, right = (back.predict(x, of, index, rows) for x in (one, Candidate("")))
        return np.where(here[:, None], other, right)
    total = 0.0
    for way, kept in ((one, here), (Candidate(""), ~here)):
        for weights, values in back.list_factors(way, of, index, rows):
            total = total + (weights * kept) @ values
    return np.asarray(total)
