"""Causes that are fitted to wrong rows: keys that count several times, dropout, hidden scores."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from ....arrays.library import Doubles
from ...rounding.problems import Problem
from ...verification.findings import Suspect
from .normalisers import Normalisers
from .sampled import Alternative, Result, Rows, Seen, attend, show_distances, take_rows
from .sequences import show_sequence
from .slips import attend_by, score_all, weigh_keys
from .wrong_rows import Sample, Sampled, differ, divide, row_sizes

_LEFT_BY_DROPOUT = 4.0  # mean square of z that a fit may leave
_HALF, _SURE, _LEAST_ERROR = 0.5, 0.2, 2e-3  # of a weight: lost or not; how sure, at most
_SUREST = 0.12  # the same, of the surest
_LEAST_FACTOR = 1.01  # of weights that are kept
_OF_NO_WEIGHTS = 2.0**60  # times the largest value: an error that no factor of weights makes
_MORE_LIKELY = 40.0  # twice the log of likelihoods, that two factors are than normal ones
_AS_NEAR, _APART = 0.8, 1.5  # of what one factor leaves, what one for each row does, at least
_FEWEST_WEIGHTS = 48  # that are known, at least, of those that may be lost
_USUAL_TILES = (64, 128, 32, 16, 256)  # of queries and of keys, the most usual first
STARTS = (-1.0, -2.5, -5.0, -10.0, -20.0)  # where fits of the scores of hidden keys begin


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
    if np.mean(two) > _LEFT_BY_DROPOUT or ratio < _AS_NEAR or np.sum(one - two) < _MORE_LIKELY:
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
