r"""Bound how the errors of the columns of a row of softmax attention depend on each other.

Roundings of weights move all columns of a row, by the values. Their covariance is a sum over keys,

.. math:: \Sigma_i = \sum_j p_{ij}^2 \sigma_{ij}^2 (v_j - \mathrm{out}_i)(v_j - \mathrm{out}_i)^T
    + \sum_j \operatorname{Var}\eta_{ij}\, v_j v_j^T + D ,

and D is diagonal: the roundings of running sums and of the result differ from column to column.
Roundings of the normaliser, and of its logarithm, multiply a whole row: they add a multiple of
:math:`\mathrm{out}_i \mathrm{out}_i^T`. Two columns that differ by a power of two are rounded
alike, and count as one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ...arrays.library import Doubles
from .head import TILE_KEYS, SoftmaxHead, count_tile_keys, finite_logs, scan_tiles
from .roundings import BIAS, FINE, RMS, WORST, Roundings, RowErrors
from .shares import FLUSHED, TileShares, bound_flushed, sum_products
from .softmax import size_of_log
from .ties import find_ties
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

    Directions may differ by query, (rows, d_v, r). The covariances are those at the least
    favourable digits, or those of `RowErrors.std`. They come in two parts: that of weights, scores
    and normalisers, and that of roundings which differ from column to column.
    """
    (count, d_v), r = rows.out.shape, directions.shape[-1]
    found, alone = np.zeros((count, r, r)), np.zeros((count, d_v))
    first = np.zeros((count, d_v + 1))  # of noise times v, and 1
    top, lse = finite_logs(rows)
    share = np.exp(top - lse)
    lags = roundings.find_lagging(share)
    # Scores that are rounded have known spacings, and their roundings are most of the noise. Else
    # the noise is of sums whose digits nobody knows.
    to = roundings.weights
    digits = WORST**2 if worst and roundings.scores is None else 1.0
    ties = find_ties(head, i)
    for tile in scan_tiles(head, i, 2 * TILE_KEYS):
        of = TileShares.of(tile, top, lags).over(share)
        p = of.shares
        noise = p * p * digits * relative_variance(head, roundings, tile, i, of.gap)
        equal = 1.0 if ties is None else ties.weights[:, tile.keys]
        noise *= equal
        v, weights = head.v[tile.keys], noise
        first += noise @ np.concatenate([v, np.ones((len(v), 1))], -1)
        if to is not None:
            if roundings.normalised:
                step = to.spacing(p) * (p > 0)
            else:  # over the largest weight, that may be another meanwhile
                step = of.keep_rounded(to.spacing(of.weights) * share, 1 / WORST)
                if worst:  # over any maximum: 2 u p, as if digits were 1.0
                    step = np.maximum(step, of.keep_rounded(2 * to.unit * p))
            weights = noise + step * step / 12 * equal
        found += sum_products(weights, np.swapaxes(directions, -1, -2) @ v.T)
        alone += weights @ np.square(v)
    out, moved, noise = rows.out, first[:, :-1], first[:, -1:]
    if worst or roundings.scores_matter:  # else `std` has noise about v, too
        alone += noise * out * out - 2 * moved * out
    factor = _factor_variance(head, roundings, rows, worst)
    summed = (WORST**2 if worst else 1.0) * np.asarray(rows.normaliser)
    alone += (summed + (0.0 if worst else factor))[:, None] * out * out
    out, moved = ((x[:, None, :] @ directions)[:, 0, :] for x in (out, moved))
    # Errors of scores move the normaliser, too: about v - out, where rounded weights are about v.
    cross = moved[:, :, None] * out[:, None, :]
    found += (noise + (factor + summed)[:, None])[:, :, None] * (out[:, :, None] * out[:, None, :])
    found -= cross + np.swapaxes(cross, -1, -2)
    return found, rows.own_covariance(alone, directions, worst)


def bound_covariance(head: SoftmaxHead, roundings: Roundings, i: slice, rows: RowErrors) -> Doubles:
    """Bound the covariances of the queries i, (rows, d_v, d_v), at the least favourable digits."""
    return np.add(*covariance(head, roundings, i, rows, np.eye(rows.out.shape[-1])))


def _factor_variance(
    head: SoftmaxHead, roundings: Roundings, rows: RowErrors, worst: bool
) -> Doubles:
    """Return the variance of the factors by which rounding the normaliser moves whole rows.

    At the least favourable digits the division is one of them. There they count twice, for whole
    rows and for each column, so that it need not be known which of both they do.
    """
    units = roundings.softmax.unit**2 + worst * roundings.accumulate.unit**2
    factor = np.full(len(rows.out), units)
    if roundings.of_log:
        factor += np.square(roundings.accumulate.unit * size_of_log(rows.lse, len(head.k)))
    return (WORST**2 if worst else 1.0) * RMS**2 * factor


def spared_variance(
    head: SoftmaxHead, roundings: Roundings, i: slice, rows: RowErrors
) -> tuple[Doubles, Doubles]:
    r"""Return the variances that a kernel may not have, of weights and scores, and those of all.

    Both are arrays (b, d_v). A weight that is the largest when it is rounded is 1, and stays as it
    is: a running maximum spares it. In tiles of any size and order, and in parts that are merged,
    it is the largest of its 16 keys, too:

    .. math:: \sum_{j\ \text{largest of its 16 keys}} h_{ij}^2 v_{jc}^2 / 12

    with the distance :math:`h_{ij}` of the numbers near the weight, over the sum of the weights.
    Roundings of equal weights, those of equal keys or equal scores, are one: they may be as large
    as their law says, or none, as for two weights of 1/2.
    """
    (spared, whole), to = np.zeros((2, *rows.out.shape)), roundings.weights
    top, lse = finite_logs(rows)
    share = np.exp(top - lse)
    ties, few = find_ties(head, i), has_few_numbers(head.k)
    if ties is None and not few and (to is None or roundings.normalised):
        return spared, whole
    for tile in scan_tiles(head, i, len(head.k) if few else count_tile_keys(len(rows.out))):
        of = TileShares.of(tile, top, roundings.find_lagging(share)).over(share)
        squares, variance = np.square(head.v[tile.keys]), np.zeros_like(of.gap)
        free = np.zeros(of.gap.shape, bool)
        if to is not None and roundings.normalised:
            variance = np.square(to.spacing(of.shares)) / 12 * (of.shares > 0)
        elif to is not None:
            free = of.find_largest()
            variance = np.square(to.spacing(of.weights) * share) / 12
            variance = of.keep_rounded(variance, WORST**-2)
        if ties is not None or few:
            variance += of.shares**2 * relative_variance(head, roundings, tile, i, of.gap)
        if ties is not None:
            variance *= ties.weights[:, tile.keys]
            free |= ties.weights[:, tile.keys] > 1
        if few:
            free |= _find_equal(of.gap)
        whole += variance @ squares
        spared += (variance * free) @ squares
    return spared, whole


def has_few_numbers(k: Doubles) -> bool:
    """Tell whether keys are of so few numbers that scores of different keys may be equal."""
    some = k[:TILE_KEYS].ravel()
    return 4 * len(np.unique(some)) < len(some)


def _find_equal(x: Doubles) -> npt.NDArray[np.bool_]:
    """Find numbers that are equal to another of their row."""
    order = np.argsort(x, -1)
    same = np.diff(np.take_along_axis(x, order, -1), axis=-1) == 0
    edge = np.zeros((len(x), 1), bool)
    found = np.zeros(x.shape, bool)
    np.put_along_axis(found, order, np.hstack([edge, same]) | np.hstack([same, edge]), -1)
    return found


def common_along(
    head: SoftmaxHead, roundings: Roundings, i: slice, rows: RowErrors, along: Doubles
) -> Doubles:
    r"""Bound what errors of weights with one sign add to sums along directions (b, d_v, r): (b, r).

    Those of exponentials, that `CommonErrors` sums, move the normaliser, too: of
    :math:`\sum_c a_c \delta\mathrm{out}_{ic}` they are
    :math:`\sum_j p_{ij} \epsilon_{ij}\, a \cdot (v_j - \mathrm{out}_i)`, and the normaliser alone
    has that of e^0 if such weights are rounded to 1, or those of one more exponential.
    Weights of few spacings, that become 0 or one of the smallest numbers, may all be rounded the
    same way: they are :math:`\sum_j \eta_{ij} (a \cdot v_j)`, or with :math:`v_j - \mathrm{out}_i`
    if the normaliser is a sum of rounded weights.
    """
    to, few = roundings.weights, np.zeros((2, len(along), along.shape[-1]))
    found = np.zeros_like(few[0])
    top, lse = finite_logs(rows)
    share, unit = np.exp(top - lse), roundings.exp * roundings.accumulate.unit
    moved = np.swapaxes(rows.out[:, None, :] @ along, -1, -2)
    keeps_one = to is not None and not roundings.normalised and unit <= to.unit / 2
    for tile in scan_tiles(head, i, count_tile_keys(len(rows.out))):
        of = TileShares.of(tile, top).over(share)
        y = np.swapaxes(head.v[tile.keys] @ along, -1, -2)
        sizes = np.abs(y), np.abs(y - moved)
        largest = of.find_largest() if roundings.exp > FINE else of.gap == 0
        of_largest = np.abs(moved) if keeps_one else sizes[1]
        if keeps_one and roundings.lags:  # then none is 1
            of_largest = np.maximum(of_largest, sizes[1])
        of_each = np.where(largest[:, None, :], of_largest, BIAS * sizes[1])
        found += unit * np.einsum("ij,irj->ir", of.shares, of_each)
        if to is not None and not roundings.normalised and of.least < FLUSHED * to.spacing(0.0):
            most = of.keep_rounded(bound_flushed(of.weights, to.spacing(0.0)) * share)
            for sums, x in zip(few, sizes, strict=True):
                sums += np.einsum("ij,irj->ir", most, x)
    again = unit * np.abs(moved[:, :, 0]) if roundings.of_log else 0.0
    return np.asarray(found + again + np.max(few, 0))


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
