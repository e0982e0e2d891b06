"""Kernels that hide keys by a finite score, everywhere or in the tiles that they compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from ....arrays.library import Doubles
from ...rounding.problems import Problem
from .normalisers import Normalisers
from .sampled import Alternative, Result, Rows, Seen, show_distances, take_rows
from .sequences import show_sequence
from .slips import attend_by, score_all
from .wrong_rows import Sampled, differ, divide

_USUAL_TILES = (64, 128, 32, 16, 256)  # of queries and of keys, the most usual first
STARTS = (-1.0, -2.5, -5.0, -10.0, -20.0)  # where fits of the scores of hidden keys begin


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
