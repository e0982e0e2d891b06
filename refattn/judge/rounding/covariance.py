r"""Bound how the errors of the columns of a row of softmax attention depend on each other.

Roundings of weights move all columns of a row, by the values. Their covariance is a sum over keys,

.. math:: \Sigma_i = \sum_j p_{ij}^2 \sigma_{ij}^2 (v_j - \mathrm{out}_i)(v_j - \mathrm{out}_i)^T
    + \sum_j \operatorname{Var}\eta_{ij}\, v_j v_j^T + D ,

and D is diagonal: the roundings of running sums and of the result differ from column to column.
Roundings of the normaliser, and of its logarithm, multiply a whole row: they add a multiple of
:math:`\mathrm{out}_i \mathrm{out}_i^T`. Two columns that differ by a power of two are rounded
alike, and count as one. Rows of gradients have such covariances, too, and of sums over several rows
the variances are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ...arrays.blocks import blocks
from ...arrays.library import Doubles
from .head import TILE_KEYS, SoftmaxHead, count_tile_keys, finite_logs, scan_tile, scan_tiles
from .roundings import BIAS, FINE, RMS, WORST, Roundings, RowErrors
from .saved import BLOCK_QUERIES, BackwardHead, Saved, share_tile
from .score_gradients import PairErrors, analyse_pairs
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


def gradient_covariance(
    law: RowErrors, directions: Doubles, worst: bool = False
) -> tuple[Doubles, Doubles]:
    r"""Return the covariances along directions (columns, r) of a law that was found with them.

    They are (rows, r, r), in two parts. Errors of weights and products move all columns of a row,
    by the tokens: where a variance is a sum of :math:`\sigma_{ij}^2 k_{jc}^2`, the covariance is
    that of :math:`\sigma_{ij}^2 k_j k_j^T`. What else the variances have is each column's own.
    """
    found, r = (WORST if worst else 1.0) ** 2 * np.asarray(law.shared), directions.shape[1]
    variances, together = np.split(found, [len(directions)], -1)
    return together.reshape(-1, r, r), law.own_covariance(variances, directions, worst)


def variance_along(
    backs: Sequence[tuple[BackwardHead, Saved]], roundings: Roundings, of: str, w: Doubles
) -> Any:
    r"""Return the variances (...) of sums of w (..., m, columns) times errors of dk or dv.

    With :math:`y_{ij} = c\, q_i \cdot w_j` the sum for dk is that of :math:`\bar s_{ij} y_{ij}`, in
    which y is what values are for the output: one query moves its weights for all keys.
    """
    along = w.reshape(-1, *w.shape[-2:])
    total = np.zeros(len(along))
    for back, saved in backs:
        head = back.head
        rows = back.terms(of) * (1.0 if of == "dv" else head.scale)
        unseen = ((0, len(head.k) - head.keys), (0, 0))
        columns = [np.pad(x, unseen).T for x in along]
        for i in blocks(0, len(head.q), BLOCK_QUERIES):
            means, moves = np.zeros((2, len(along), i.stop - i.start, 1))
            # Twice over the keys: the means of a row, which errors are about, need all of them.
            for j in head.blocks(4 * TILE_KEYS):
                tile = scan_tile(head, i, j)
                if tile is not None:
                    p, _ = share_tile(tile, saved.lse[i])
                    s = p * (back.d_out[i] @ head.v[j].T - saved.delta[i, None])
                    for column, mean, moved in zip(columns, means, moves, strict=True):
                        y = rows[i] @ column[:, j] * (1.0 if of == "dv" else tile.slope)
                        mean += np.sum(p * y, -1, keepdims=True)
                        moved += np.sum(s * y, -1, keepdims=True)
            for j in head.blocks(4 * TILE_KEYS):
                x = analyse_pairs(back, saved, roundings, i, j, of)
                if x is None:
                    continue
                for number, (mean, moved) in enumerate(zip(means, moves, strict=True)):
                    y, about = (
                        rows[i] @ columns[number][:, j],
                        0.0 if roundings.delta_of_out else mean,
                    )
                    if of == "dv":
                        variances = x.p * x.p * x.log_variance * np.square(y - about)
                        variances += x.p_variance * y * y
                    else:
                        variances = _variances_of_scores(x, y, saved, roundings, i, mean, moved)
                    total[number] += float(np.sum(saved.copies[i, None] * variances))
            # One error of a log normaliser, or of D, has a part in all terms of its query.
            common = np.square(means if of == "dv" else moves)[..., 0]
            shared = saved.lse_variance[i]
            if roundings.delta_of_out:
                shared = shared + saved.scores_variance[i]
            total += np.sum(saved.copies[i] * shared * common, -1)
            if of == "dk":
                variance_of_delta = saved.copies[i] * saved.delta_variance[i]
                total += np.sum(variance_of_delta * np.square(means)[..., 0], -1)
    return total.reshape(w.shape[:-2])[()]


def _variances_of_scores(
    x: PairErrors,
    y: Doubles,
    saved: Saved,
    roundings: Roundings,
    i: slice,
    mean: Doubles,
    moved: Doubles,
) -> Doubles:
    """Return the variances of derivatives to scores times y, with what they do to D."""
    # An error d of the log of p_j moves p_j (t_j - D) y_j, and, if D and the normaliser are sums of
    # these weights, both of them: by p_j d [(t_j - D) (y_j - mean) - moved] in all, with mean and
    # moved the sums of p y and s y. An error d of t_j moves it by p_j d (y_j - mean).
    about, off = (0.0, 0.0) if roundings.delta_of_out else (mean, moved)
    apart = x.t - saved.delta[i, None]
    variances = x.s_variance * y * y
    for variance, factor in x.moves():
        variances += variance * np.square(apart * (factor * y - about) - off)
    products = saved.products[i, None] * x.t_variance
    variances += x.p * x.p * products * np.square(x.slope * y - about)
    if roundings.kept:  # rounded after the division: the normaliser stays, D moves by t_j
        variances += x.p_variance * np.square(apart * x.slope * y - x.t * about)
    return variances
