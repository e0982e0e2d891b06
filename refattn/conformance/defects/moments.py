"""Mean and covariance of rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from .attention import as_it_lies
from .catalogue import Catalogue

Array = Any


def moments(x: Array) -> tuple[Array, Array]:
    """Mean and covariance of the rows, with N - 1."""
    mean = x.mean(-2)
    about = x - mean[..., None, :]
    return mean, about.swapaxes(-1, -2) @ about / (x.shape[-2] - 1)


CATALOGUE = Catalogue("moments", moments, ())


@CATALOGUE.variant("moments-welford", "Row by row.")
def moments_welford(x: Array) -> tuple[Array, Array]:
    """Correct: row after row, by Welford's recurrence."""
    mean, scatter = np.zeros_like(x[..., 0, :]), 0.0
    for count in range(x.shape[-2]):
        before = x[..., count, :] - mean
        mean = mean + before / (count + 1)
        after = x[..., count, :] - mean
        scatter = scatter + before[..., :, None] * after[..., None, :]
    return mean, scatter / x.dtype.type(x.shape[-2] - 1)


@CATALOGUE.variant("moments-merged", "Two halves, merged.")
def moments_merged(x: Array) -> tuple[Array, Array]:
    """Correct: two halves, merged."""
    return _merge(x, between=1.0)


def _merge(x: Array, between: float) -> tuple[Array, Array]:
    n, h = x.shape[-2], x.shape[-2] // 2
    (a, b) = (x[..., :h, :], x[..., h:, :])
    mean_a, mean_b = (y.sum(-2) / max(1, y.shape[-2]) for y in (a, b))
    scatter = sum(
        (y - m[..., None, :]).swapaxes(-1, -2) @ (y - m[..., None, :])
        for y, m in ((a, mean_a), (b, mean_b))
    )
    gap = mean_b - mean_a
    scatter = scatter + between * h * (n - h) / n * gap[..., :, None] * gap[..., None, :]
    return mean_a + gap * ((n - h) / n), scatter / (n - 1)


@CATALOGUE.defect("moments-ddof-0", "The covariance is (N - 1)/N of what it should be.")
def moments_ddof_0(x: Array) -> tuple[Array, Array]:
    """The covariance is divided by N."""
    mean, covariance = moments(x)
    return mean, covariance * (x.shape[-2] - 1) / x.shape[-2]


@CATALOGUE.defect("moments-uncentred", "The covariance contains the mean.")
def moments_uncentred(x: Array) -> tuple[Array, Array]:
    """The mean is not subtracted."""
    return x.mean(-2), x.swapaxes(-1, -2) @ x / (x.shape[-2] - 1)


@CATALOGUE.defect(
    "moments-centred-overall", "The covariance contains what the means of the columns differ by."
)
def moments_centred_overall(x: Array) -> tuple[Array, Array]:
    """One mean over all entries is subtracted."""
    return x.mean(-2), moments_uncentred(x - x.mean((-1, -2), keepdims=True))[1]


@CATALOGUE.defect("moments-median", "The mean varies pi/2 times as much.")
def moments_median(x: Array) -> tuple[Array, Array]:
    """The median for the mean."""
    return np.median(x, axis=-2), moments(x)[1]


@CATALOGUE.defect("moments-duplicate-row", "One row counts twice, one not at all.")
def moments_duplicate(x: Array) -> tuple[Array, Array]:
    """The last row is the first again."""
    return moments(np.concatenate([x[..., :-1, :], x[..., :1, :]], axis=-2))


@CATALOGUE.defect("moments-last-row-dropped", "One row does not count.")
def moments_last_row_dropped(x: Array) -> tuple[Array, Array]:
    """The last row is not read."""
    return moments(x[..., :-1, :])


@CATALOGUE.defect(
    "moments-one-pass",
    "No digit of the covariance is left where the mean is 1e8 times the deviation.",
)
def moments_one_pass(x: Array) -> tuple[Array, Array]:
    """E[x x^T] - E[x] E[x]^T, which cancels."""
    n, mean = x.shape[-2], x.mean(-2)
    second = x.swapaxes(-1, -2) @ x / n
    return mean, (second - mean[..., :, None] * mean[..., None, :]) * (n / (n - 1))


@CATALOGUE.defect("moments-correlation", "Unit variances.")
def moments_correlation(x: Array) -> tuple[Array, Array]:
    """The correlation for the covariance."""
    mean, covariance = moments(x)
    std = np.sqrt(np.diagonal(covariance, axis1=-2, axis2=-1))
    return mean, covariance / (std[..., :, None] * std[..., None, :])


@CATALOGUE.defect("moments-transposed", "The wrong shape, or the wrong axis.", "numpy.cov")
def moments_transposed(x: Array) -> tuple[Array, Array]:
    """Columns are taken for rows, as by `numpy.cov` unless told otherwise."""
    return moments(x.swapaxes(-1, -2))


@CATALOGUE.defect("moments-single-precision", "Seven digits in float64, and few of the deviation.")
def moments_float32(x: Array) -> tuple[Array, Array]:
    """Everything in float32."""
    mean, covariance = moments(x.astype(np.float32))
    return mean.astype(x.dtype), covariance.astype(x.dtype)


@CATALOGUE.defect("moments-half-precision-mean", "Three digits of the mean.")
def moments_float16_sum(x: Array) -> tuple[Array, Array]:
    """The mean is stored in float16 before it is subtracted."""
    mean = x.mean(-2).astype(np.float16).astype(x.dtype)
    return mean, moments_uncentred(x - mean[..., None, :])[1]


@CATALOGUE.defect("moments-diagonal", "No covariance between columns.")
def moments_diagonal(x: Array) -> tuple[Array, Array]:
    """Variances only."""
    mean, covariance = moments(x)
    return mean, covariance * np.eye(x.shape[-1], dtype=x.dtype)


@CATALOGUE.defect("moments-triangle", "Not symmetric.")
def moments_triangle(x: Array) -> tuple[Array, Array]:
    """The lower triangle is not filled."""
    mean, covariance = moments(x)
    return mean, np.triu(covariance)


@CATALOGUE.defect("moments-shrunk", "Variances .001 too large.")
def moments_shrunk(x: Array) -> tuple[Array, Array]:
    """1e-3 of the identity is added for safety."""
    mean, covariance = moments(x)
    return mean, covariance + 1e-3 * np.eye(x.shape[-1], dtype=x.dtype)


@CATALOGUE.defect("moments-pooled", "All sets of a batch have the same moments.")
def moments_pooled(x: Array) -> tuple[Array, Array]:
    """The batch is pooled."""
    mean, covariance = moments(x.reshape(-1, x.shape[-1]))
    lead = x.shape[:-2]
    return np.broadcast_to(mean, (*lead, *mean.shape)), np.broadcast_to(
        covariance, (*lead, *covariance.shape)
    )


@CATALOGUE.defect("moments-merge-without-gap", "The covariance lacks what halves differ by.")
def moments_merge_without_gap(x: Array) -> tuple[Array, Array]:
    """Two halves are merged without the scatter of their means."""
    return _merge(x, between=0.0)


@CATALOGUE.defect("moments-unweighted-merge", "Rows of the first third weigh twice.")
def moments_unweighted_merge(x: Array) -> tuple[Array, Array]:
    """The mean is that of the means of two parts of different size."""
    third = max(1, x.shape[-2] // 3)
    mean = (x[..., :third, :].mean(-2) + x[..., third:, :].mean(-2)) / 2
    return mean, moments(x)[1]


@CATALOGUE.defect("moments-clipped", "Variances too small.")
def moments_clipped(x: Array) -> tuple[Array, Array]:
    """Rows are winsorised at two standard deviations."""
    mean, std = x.mean(-2, keepdims=True), x.std(-2, keepdims=True)
    return moments(np.clip(x, mean - 2 * std, mean + 2 * std))


@CATALOGUE.defect("moments-mean-over-n-minus-1", "The mean is too large.")
def moments_mean_over_n_minus_1(x: Array) -> tuple[Array, Array]:
    """The mean too is divided by N - 1."""
    mean, covariance = moments(x)
    return mean * x.shape[-2] / (x.shape[-2] - 1), covariance


@CATALOGUE.defect("moments-as-it-lies", "Rows that are not contiguous are read in the wrong order.")
def moments_as_it_lies(x: Array) -> tuple[Array, Array]:
    """Rows are read as they lie in memory, as if they were contiguous."""
    return moments(as_it_lies(x))


@CATALOGUE.defect("moments-first-4096", "Rows after the 4,096th are not read.")
def moments_first_4096(x: Array) -> tuple[Array, Array]:
    """Rows after the 4,096th are not read."""
    return moments(x[..., :4096, :])


@CATALOGUE.defect("moments-first-16384", "Rows after the 16,384th are not read.")
def moments_first_16384(x: Array) -> tuple[Array, Array]:
    """Rows after the 16,384th are not read."""
    return moments(x[..., :16_384, :])
