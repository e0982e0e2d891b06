r"""Bound how the errors of the columns of a row of softmax attention depend on each other.

Roundings of weights move all columns of a row, by the values. Their covariance is a sum over keys,

.. math:: \Sigma_i = \sum_j p_{ij}^2 \sigma_{ij}^2 (v_j - \mathrm{out}_i)(v_j - \mathrm{out}_i)^T
    + \sum_j \operatorname{Var}\eta_{ij}\, v_j v_j^T + D ,

and D holds the rounding of the result, which is independent in each column. What is left of the
variance may depend in any way: a covariance of d columns is at most d times its diagonal.
"""

from __future__ import annotations

import numpy as np

from ...arrays.library import Doubles
from .head import SoftmaxHead, scan_tiles
from .roundings import WORST, Roundings, RowErrors
from .weight_errors import relative_variance


def bound_covariance(head: SoftmaxHead, roundings: Roundings, i: slice, rows: RowErrors) -> Doubles:
    """Bound the covariances of the queries i, (rows, d_v, d_v), at the least favourable digits."""
    known = np.zeros((*rows.out.shape, rows.out.shape[-1]))
    first = np.zeros((len(rows.out), rows.out.shape[-1] + 1))  # of noise times v, and 1
    lse = np.where(np.isfinite(rows.lse), rows.lse, 0.0)[:, None]
    top = np.where(np.isfinite(rows.top), rows.top, 0.0)[:, None]
    # Scores that are rounded have known spacings, and their roundings are most of the noise. Else
    # the noise is of sums whose digits nobody knows, and is taken at the least favourable ones.
    to, digits = roundings.weights, 1.0 if roundings.scores is not None else WORST**2
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
                # Over any maximum: 2 u p, as if digits were 1.0. The largest weight is 1: no error.
                step = np.maximum(step, 2 * to.unit * p * (gap < 0))
            weights = noise + np.where(p > 0, step * step / 12, 0.0)
        known += (v.T * weights[:, None, :]) @ v
    cross = first[:, :-1, None] * rows.out[:, None, :]
    about = rows.out[:, :, None] * rows.out[:, None, :]
    # Errors of scores move the normaliser, too: about v - out, where rounded weights are about v.
    known += first[:, -1:, None] * about - cross - np.swapaxes(cross, -1, -2)
    own = np.square(rows.spacing) / 12
    at = np.arange(rows.out.shape[-1])
    # What the variance of a column has beside these: it may depend on other columns in any way.
    rest = np.maximum(np.square(rows.worst) - own - known[:, at, at], 0.0)
    known[:, at, at] += own + len(at) * rest
    return known
