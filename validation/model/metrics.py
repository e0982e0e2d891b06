"""How near embeddings are to the exact ones: each alone, and in relation to each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import stats

Array = npt.NDArray[Any]
Metric = Callable[[Array, Array], float]

LOW = 0.05  # share of texts below the low cosine


def cosines(found: Array, exact: Array) -> Array:
    """Cosine of each embedding, rows of norm 1, to the exact one; 0 where it is not finite."""
    return np.asarray(np.nan_to_num(np.sum(found * exact, axis=-1), posinf=0.0, neginf=0.0))


def cosine(found: Array, exact: Array) -> float:
    """Mean cosine."""
    return float(np.mean(cosines(found, exact)))


def low_cosine(found: Array, exact: Array) -> float:
    """Quantile of the cosines."""
    return float(np.quantile(cosines(found, exact), LOW))


def rank_correlation(found: Array, exact: Array) -> float:
    """Spearman's correlation of the similarities of all pairs of texts."""
    above = np.triu_indices(len(exact), 1)
    ranks = stats.spearmanr(_similarities(found)[above], _similarities(exact)[above])
    return float(ranks.statistic)


def neighbours(found: Array, exact: Array) -> float:
    """Share of texts whose nearest other text is that of the exact embeddings."""
    return float(np.mean(_nearest(found) == _nearest(exact)))


def standard_error(metric: Metric, found: Array, exact: Array, blocks: Array) -> float:
    r"""Standard error of the mean of a metric over draws, as draws and as texts vary.

    .. math:: \mathrm{se}^2 = s^2 / R + \frac{G - 1}{G} \sum_g (m_{-g} - \bar m)^2

    with the variance s^2 of R draws, 0 if there is one, and the jackknife over blocks of texts,
    where m_{-g} is the mean over draws without block g.

    Parameters
    ----------
    metric : callable
        Of embeddings (T, width) and exact ones.
    found, exact : NumPy arrays, shapes (R, T, width) and (T, width)
        Embeddings.
    blocks : NumPy array, shape (T,)
        Block of each text; texts on one topic belong to the same.
    """
    draws = [metric(one, exact) for one in found]
    of_draws = float(np.var(draws, ddof=1)) / len(draws) if len(draws) > 1 else 0.0
    left = [blocks != block for block in np.unique(blocks)]
    without = [np.mean([metric(one[kept], exact[kept]) for one in found]) for kept in left]
    return float(np.sqrt(of_draws + (len(left) - 1) * np.var(without)))


def _similarities(x: Array) -> Array:
    x = np.nan_to_num(x, posinf=0.0, neginf=0.0)
    return np.asarray(x @ x.T)


def _nearest(x: Array) -> Array:
    similar = _similarities(x)
    np.fill_diagonal(similar, -np.inf)
    return np.asarray(np.argmax(similar, axis=-1))
