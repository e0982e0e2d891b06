r"""Bound how the errors of the columns of a row of softmax attention depend on each other.

Roundings of weights move all columns of a row, by the values. Their covariance is a sum over keys,

.. math:: \Sigma_i = \sum_j p_{ij}^2 \sigma_{ij}^2 (v_j - \mathrm{out}_i)(v_j - \mathrm{out}_i)^T
    + \sum_j \operatorname{Var}\eta_{ij}\, v_j v_j^T + D ,

and D holds what each column has of its own: the roundings of its running sums, and of the result.
Roundings of the normaliser, and of its logarithm, move a row by a factor: they add a multiple of
:math:`\mathrm{out}_i \mathrm{out}_i^T`. Columns that differ by a power of two have the same
roundings of their own, and are one column.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ...arrays.library import Doubles
from .head import SoftmaxHead, scan_tiles
from .roundings import LEAST_OWN, RMS, WORST, Roundings, RowErrors
from .softmax import size_of_log
from .weight_errors import relative_variance


def covariance(
    head: SoftmaxHead,
    roundings: Roundings,
    i: slice,
    rows: RowErrors,
    directions: Doubles,
    worst: bool = True,
) -> tuple[Doubles, Doubles]:
    """Find the covariances of errors of the queries i along directions (d_v, r): (rows, r, r).

    Each query may have directions of its own, (rows, d_v, r).
    They are those at the least favourable digits, or those of `RowErrors.std`, in two parts: of
    weights, scores and normalisers, and of what each column has of its own.
    """
    (count, d_v), r = rows.out.shape, directions.shape[-1]
    transposed = np.swapaxes(directions, -1, -2)
    found, alone = np.zeros((count, r, r)), np.zeros((count, d_v))
    first = np.zeros((count, d_v + 1))  # of noise times v, and 1
    lse = np.where(np.isfinite(rows.lse), rows.lse, 0.0)[:, None]
    top = np.where(np.isfinite(rows.top), rows.top, 0.0)[:, None]
    # Scores that are rounded have known spacings, and their roundings are most of the noise. Else
    # the noise is of sums whose digits nobody knows.
    to = roundings.weights
    digits = WORST**2 if worst and roundings.scores is None else 1.0
    for tile in scan_tiles(head, i):
        gap = np.minimum(tile.scores - top, 0.0)
        seen = np.ones(gap.shape, bool) if tile.visible is None else tile.visible
        p = np.where(seen, np.exp(np.minimum(tile.scores - lse, 0.0)), 0.0)
        noise = (
            p * p * digits * relative_variance(head, roundings, tile, i, np.where(seen, gap, 0.0))
        )
        v, weights = head.v[tile.keys], noise
        first += noise @ np.concatenate([v, np.ones((len(v), 1))], -1)
        if to is not None:
            step = to.spacing(p)
            if not roundings.normalised:  # over the largest weight, that may be another meanwhile
                step = to.spacing(np.exp(gap)) * np.exp(top - lse) * (gap < 0)
                if worst:  # over any maximum: 2 u p, as if digits were 1.0
                    step = np.maximum(step, 2 * to.unit * p * (gap < 0))
            weights = noise + np.where(p > 0, step * step / 12, 0.0)
        y = v @ directions
        if y.ndim == 3 or count < r:
            found += (np.swapaxes(y, -1, -2) * weights[:, None, :]) @ y
        else:  # one product for all queries, with products of columns
            found += (weights @ (y[:, :, None] * y[:, None, :]).reshape(len(y), -1)).reshape(
                found.shape
            )
        alone += weights @ np.square(v)
    out, moved, noise = rows.out, first[:, :-1], first[:, -1:]
    alone += noise * out * out - 2 * moved * out
    factor = _factor_variance(head, roundings, rows, worst)
    alone += 0.0 if worst else factor[:, None] * out * out
    rest = np.maximum(np.square(rows.worst if worst else rows.std) - alone, LEAST_OWN * alone)
    out, moved = ((x[:, None, :] @ directions)[:, 0, :] for x in (out, moved))
    # Errors of scores move the normaliser, too: about v - out, where rounded weights are about v.
    cross = moved[:, :, None] * out[:, None, :]
    factor = factor + _sum_variance(head, roundings, worst)
    found += (noise + factor[:, None])[:, :, None] * (out[:, :, None] * out[:, None, :])
    found -= cross + np.swapaxes(cross, -1, -2)
    return found, (transposed * rest[:, None, :]) @ directions


def bound_covariance(head: SoftmaxHead, roundings: Roundings, i: slice, rows: RowErrors) -> Doubles:
    """Bound the covariances of the queries i, (rows, d_v, d_v), at the least favourable digits."""
    return np.add(*covariance(head, roundings, i, rows, np.eye(rows.out.shape[-1])))


def _factor_variance(
    head: SoftmaxHead, roundings: Roundings, rows: RowErrors, worst: bool
) -> Doubles:
    """Return the variance of the factors by which rounding the normaliser moves whole rows.

    At the worst the division is one of them, and all are parts of what each column has of its own,
    too: which of both they are need not be known.
    """
    units = roundings.softmax.unit**2 + worst * roundings.accumulate.unit**2
    factor = np.full(len(rows.out), units)
    if roundings.of_log:
        factor += np.square(roundings.accumulate.unit * size_of_log(rows.lse, len(head.k)))
    return (WORST**2 if worst else 1.0) * RMS**2 * factor


def _sum_variance(head: SoftmaxHead, roundings: Roundings, worst: bool) -> float:
    """Return the variance of a normaliser that is summed term by term, over its square.

    It moves all columns along the output, and is no part of `RowErrors.std`, where it is small
    beside one column.
    """
    m = len(head.k)
    run = min(roundings.run, m) or 1
    steps = run * run / (3 * max(m, 1)) + (m / (3 * run) if run < m else 0)
    return float((WORST**2 if worst else 1.0) * (RMS * roundings.accumulate.unit) ** 2 * steps)


def distinct_columns(v: Doubles) -> npt.NDArray[np.int64]:
    """Number columns of values, one of those that are powers of two, or -1, times each other."""
    if not v.size:
        return np.arange(v.shape[1])
    first = np.argmax(v != 0, axis=0)
    leading = np.take_along_axis(v, first[None], 0)[0]
    unit = np.ldexp(np.where(leading < 0, -1.0, 1.0), np.frexp(leading)[1])
    # Adding 0 turns -0 to 0, which has other bytes.
    columns = np.ascontiguousarray((v / unit + 0.0).T)
    first_of = {x.tobytes(): i for i, x in reversed([*enumerate(columns)])}
    return np.sort(np.fromiter(first_of.values(), np.int64))
