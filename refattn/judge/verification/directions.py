"""Known defects with a size: the derivative of the output to it, and the sentence for it.

Some move all rows, by plain mistakes: their directions, `PLAIN_DIRECTIONS`, are known before errors
are looked at. Along a fixed direction u the error of a row is sub-Gaussian with the variance
:math:`u^T C u`, where C is the covariance of its columns, and rows are independent. What errors may
have in common adds up to a slack, for each direction another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ...arrays.library import Doubles
from ..rounding.covariance import common_along, covariance
from ..rounding.head import SoftmaxHead, Tile
from ..rounding.problems import Index, Problem, sweep
from ..rounding.profiles import Profile
from ..rounding.roundings import Roundings, RowErrors
from ..rounding.saved import multiply_slope
from .evidence import Known
from .findings import Numbers

NEARLY_ONE = 1 - 2.0**-20  # a share of a key beside which 1 less the share has lost its digits

# Defects that change scores: derivative of the score, and what a size means.
SCORE_CHANGES: Mapping[str, Callable[[SoftmaxHead, Tile, slice], Any]] = {
    "scale": lambda head, tile, i: multiply_slope(tile.logits, tile.slope),
    # c tanh(s / c) = s - s^3 / (3 c^2) + ...: the size is 1 / c^2, which is 0 without a cap.
    "softcap": lambda head, tile, i: tile.logits * np.square(tile.logits) / -3,
    "slope": lambda head, tile, i: head.ahead(i, tile.keys),
    "temperature": lambda head, tile, i: 0.0 if tile.is_sink else tile.scores,
    "bias": lambda head, tile, i: (
        0.0 if tile.is_sink or head.bias is None else head.bias[i, tile.keys]
    ),
}
PLAIN_DIRECTIONS = ("scale", "temperature", "bias", "factor")

SENTENCES: Mapping[str, str] = {
    "scale": "the scale is {factor} times the declared scale",
    "softcap": "1 / cap^2 of a soft cap on the scores is {size}",
    "temperature": "scores, with cap and bias, are {factor} times what they should be",
    "bias": "the bias counts {factor} times",
    "slope": "scores {way} by {amount} with each key, as with ALiBi",
    "lse": "lse is too {side} by {amount}",
    "factor": "{result} is {factor} times what it should be",
    "truncated": "{result} is truncated, not rounded ({size} times the expected shift)",
    "epsilon": "{size} is added to the sum of e^(score - largest score)",
    "sink": "{size} is added to the sum of e^score",
    "lost sink": "the sink counts {rest} times in the sum of the weights",
    "delta": "D = d_out . out is multiplied by {more}",
    "cap": "in the slope of the cap, 1 - tanh^2, tanh^2 is multiplied by {rest}",
    "edge+1": "a query also sees the next key: {size} of its weight counts",
    "edge-1": "a query does not see its last key: {size} of its weight is missing",
}


def list_changes(problem: Problem) -> dict[str, Callable[[SoftmaxHead, Tile, slice], Any]]:
    """List the changes of scores that are defects of a problem, and no other's."""
    capped, biased = problem.softcap is not None, "bias" in problem.first
    absent = {"softcap": capped, "temperature": not (capped or biased), "bias": not biased}
    return {x: f for x, f in SCORE_CHANGES.items() if not absent.get(x, False)}


def bound_along(
    problem: Problem, numbers: Numbers, dtype: str, profile: Profile, names: Sequence[str]
) -> dict[str, tuple[Doubles, Doubles]]:
    """Bound the variance and the slack of what `DirectionSums` hold of each row, (heads, n).

    Variances are those at the least favourable digits.
    """
    roundings, read = profile.roundings(dtype), problem.read_by(profile)
    shape = math.prod(problem.lead), problem.shape[0]
    found = {x: (np.zeros(shape), np.zeros(shape)) for x in names}

    def add(index: Index, i: slice, rows: RowErrors) -> None:
        known = np.isfinite(rows.std) & np.isfinite(rows.errors(numbers.out(index)[i]))
        steep = {**rows.tangents, "factor": rows.out}
        weights = np.where(known, 1 / np.square(rows.std), 0.0)
        along = np.stack([steep[x] * weights for x in names], -1)
        head, law = read.head(index), rows._replace(worst=np.where(known, rows.worst, 0.0))
        squares = np.add(*covariance(head, roundings, i, law, along))
        apart = np.where(known, rows.slack - rows.of_weights, 0.0)
        slack = np.einsum("icr,ic->ir", np.abs(along), apart)
        slack += common_along(head, roundings, i, rows, along)
        at = problem.number(index)
        for number, (of_variance, of_slack) in enumerate(found.values()):
            of_variance[at, i], of_slack[at, i] = squares[:, number, number], slack[:, number]

    changes = {x: SCORE_CHANGES[x] for x in names if x in SCORE_CHANGES}
    sweep(problem, dtype, profile, add, changes)
    return found


def sum_factor(
    problem: Problem,
    index: Index,
    i: slice,
    rows: RowErrors,
    numbers: Numbers,
    roundings: Roundings,
) -> Known:
    """Sum the errors of some rows of a head along a factor of the output, with their variance."""
    weights = rows.out / np.square(rows.std)
    squares = np.add(*covariance(problem.head(index), roundings, i, rows, weights[:, :, None]))
    errors, nearest = rows.errors(numbers.out(index)[i]), rows.errors(rows.nearest)
    t, u, g = (np.sum(weights * x) for x in (errors, nearest, rows.out))
    return Known(t, u, g, np.sum(np.abs(weights) * rows.slack), np.sum(squares))


def explain_size(problem: Problem, name: str) -> Callable[[float, float], str]:
    """Return what puts the size of a defect into words, for the output or a gradient."""
    return lambda x, e: SENTENCES[name].format(
        result=problem.result,
        size=give_error(x, e),
        amount=give_error(abs(x), e),
        side="small" if x < 0 else "large",
        way="fall" if x < 0 else "rise",
        rest=give_error(1 - x, e),
        more=give_error(1 + x, e),
        factor=_give_factor(x, e),
    )


def give_error(x: float, error: float) -> str:
    return f"{x:.4g} ± {error:.1g}"


def _give_factor(x: float, error: float) -> str:
    """Write a factor 1 + x with the digits that are known."""
    digits = min(max(2, 1 - math.floor(math.log10(error))), 15) if 0 < error < 1 else 6
    return f"{1 + x:.{digits}f} ± {error:.1g}"


def list_tangents(
    problem: Problem, index: Index, i: slice, rows: RowErrors
) -> Iterator[tuple[str, Doubles]]:
    """List the derivatives of the output to the sizes of defects."""
    yield from rows.tangents.items()
    yield "factor", rows.out
    # Truncation towards 0 loses half a spacing on average.
    yield "truncated", -np.sign(rows.out) * rows.spacing / 2
    if not problem.is_mean:
        return
    with np.errstate(all="ignore"):
        # out / (1 + epsilon / L), with the sum L of weights over the largest, or of e^score.
        yield "epsilon", np.nan_to_num(-rows.out * np.exp(rows.top - rows.lse)[:, None])
        yield "sink", np.nan_to_num(-rows.out * np.exp(-rows.lse)[:, None], posinf=0.0, neginf=0.0)
    if problem.causal and problem.shape[1]:
        head = problem.head(index)
        yield "edge+1", _tangent_of_edge(head, i, rows, 1)
        yield "edge-1", _tangent_of_edge(head, i, rows, 0)


def _tangent_of_edge(head: SoftmaxHead, i: slice, rows: RowErrors, ahead: int) -> Doubles:
    """Return the change of the output if queries see one key more, or lose the last."""
    n, m = head.q.shape[0], head.keys
    keys = np.arange(i.start, i.stop) + m - n + ahead
    there = (keys >= 0) & (keys < m)
    j = np.clip(keys, 0, m - 1)
    scores = head.scale * np.sum(head.q[i] * head.k[j], -1)
    if head.softcap is not None:
        scores = head.softcap * np.tanh(scores / head.softcap)
    if head.bias is not None:
        scores = scores + head.bias[np.arange(i.start, i.stop), j]
    if head.mask is not None:
        there &= head.mask[np.arange(i.start, i.stop), j]
    with np.errstate(all="ignore"):
        share = np.where(there, np.exp(scores - rows.lse), 0.0)
        # (out +- share v) / (1 +- share) - out, where the share is that of the weights without it.
        part = share / (1 + share) if ahead else -share / (1 - share)
    part = np.where(
        np.isfinite(part) & (np.abs(share) < (math.inf if ahead else NEARLY_ONE)), part, 0.0
    )
    tangent: Doubles = part[:, None] * (head.v[j] - rows.out)
    return tangent
