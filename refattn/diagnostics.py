r"""Measure how reliable importance sampling with given frequencies is, for each query."""

from __future__ import annotations

import math
from importlib import import_module
from typing import Any

import numpy as np

from .arrays import checks, frequencies, qkv
from .arrays.arithmetic import finite, multiply
from .arrays.heads import group_heads
from .arrays.library import Array, array_namespace, as_written, is_numpy_array, root_scale
from .engine.attend import log_sum_exp, nonzero
from .engine.hops import Keys, Samples, sample

__all__ = ["effective_sample_size", "log_weights", "pareto_k"]
__dir__ = __all__.copy


_LEAST_EXCESS = math.log(1e-292)  # smallest normal number / eps: below it the fit loses digits


@as_written
def log_weights(
    q: Array,
    k: Array,
    *,
    omega: Array,
    log_weight: Array | None = None,
    scale: float | None = None,
    mask: Array | None = None,
) -> Array:
    r"""Compute the normalised importance weights of each query, as logarithms.

    .. math:: W_{is} \propto w_s \, \xi(q_i, \omega_s) \sum_j \xi(k_j, \omega_s),
              \qquad \sum_s W_{is} = 1

    with xi(x, omega) = exp(omega . x - |x|^2/2). These are the weights that
    `random_feature_attention` gives the samples: the ratios p_n / q of SNIS in Zheng 2022 (see
    `refattn.naive`).

    Parameters
    ----------
    q, k : array, shape (..., n, d) and (..., m, d), float32 or float64
        Queries and keys; see `attend` for broadcasting and grouped heads.
    omega, log_weight, scale
        As in `importance_sampled_attention`: shapes (..., S, d) and (..., S).
    mask : array of bool, broadcasting to (..., 1, m), optional
        True where queries attend to the key.

    Returns
    -------
    array, shape (..., n, S)
        log W, with the namespace, dtype and device of `q`; -inf where the query sees no key.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import diagnostics
    >>> omega = np.array([[0.0], [0.0]])
    >>> np.exp(diagnostics.log_weights(np.ones((1, 1)), np.ones((3, 1)), omega=omega))
    array([[0.5, 0.5]])
    """
    xp, lead = qkv.check(q, k, k, mask=mask)
    scale = checks.real("scale", scale, positive=True, optional=True, like=q)
    omega, log_weight = frequencies.shared(omega, log_weight, q, lead)
    if mask is not None:
        checks.broadcasts("mask", mask, (*lead, 1, k.shape[-2]), "(..., 1, m)")
    (q, k, _, omega, log_weight, mask), ungroup = group_heads(
        q, k, k, omega, log_weight[..., None, :], mask
    )
    samples, root = Samples(omega, log_weight), root_scale(scale, q)
    return ungroup(_normalised_scores(q, k, samples, root, mask, xp))


@as_written
def _normalised_scores(
    q: Array, k: Array, samples: Samples, root: Array, mask: Array | None, xp: Any
) -> Array:
    """Return scores of samples, less their log-sum-exp."""
    omega, log_weight = samples
    log_z = sample(root * omega, Keys(k, k[..., :1], mask, root * root / 2)).lse[..., None, :]
    scores = multiply(q * root, xp.matrix_transpose(omega)) + log_z + log_weight
    return scores - finite(log_sum_exp(scores, xp), xp)[..., None]


@as_written
def effective_sample_size(log_weights: Array) -> Array:
    r"""Compute the effective sample size of importance weights.

    .. math:: \mathrm{ESS} = \Big(\sum_s W_s\Big)^2 \Big/ \sum_s W_s^2

    Between 1 and S, to a few eps: the number of equally weighted samples with the same variance; 0
    where all weights are 0. Kong, 1992. Weights are divided by the largest, so a common factor,
    however large, makes no difference.

    Parameters
    ----------
    log_weights : array, shape (..., S), float32 or float64
        Logarithms of the weights, up to a constant; see `log_weights`.

    Returns
    -------
    array, shape (...)
        Namespace, dtype and device of the argument.

    Raises
    ------
    TypeError, ValueError
        If the argument is not a floating array with at least one axis.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import diagnostics
    >>> weights = np.array([[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 2.0, 0.5]])
    >>> np.round(diagnostics.effective_sample_size(np.log(weights)), 2)
    array([4.  , 3.24])
    """
    checks.arrays(1, log_weights=log_weights)
    xp = array_namespace(log_weights)
    if log_weights.shape[-1] == 0:
        raise ValueError("`log_weights` must hold at least one weight a row, got none.")
    peak = finite(xp.max(log_weights, axis=-1, keepdims=True), xp)
    weights = xp.exp(log_weights - peak)
    total, squares = (xp.sum(x, axis=-1) for x in (weights, weights * weights))
    return total * (total / nonzero(squares, xp))


def pareto_k(log_weights: Array) -> Any:
    r"""Estimate the shape k of the generalised Pareto tail of importance weights.

    Below 0.5 the weights have finite variance; above 0.7 do not trust estimates made with these
    weights, whatever their apparent precision. Vehtari et al., Pareto smoothed importance sampling,
    arXiv:1507.02646. The distribution is fitted to the tail: by how much the min(S / 5, 3 sqrt(S))
    largest weights exceed the next one. The package arviz-stats fits it (the extra
    ``diagnostics``).

    Parameters
    ----------
    log_weights : numpy.ndarray, shape (..., S)
        Logarithms of the weights, up to a constant; see `log_weights`. At least 25 a row.

    Returns
    -------
    numpy.ndarray, shape (...), float64
        The shape k of each row, or

        * inf where the tail cannot be fitted: a quarter of it is 0, or below 1e-292 of its largest
          member. This happens where a single weight dominates, and where all weights are 0;
        * -inf where the weights of the tail are equal, and none is larger: they are bounded;
        * nan where a weight is nan or the largest infinite.

    Raises
    ------
    ImportError
        If arviz-stats is not installed.
    TypeError
        If the argument is not a floating NumPy array: move it to the host first.
    ValueError
        If there are fewer than 25 weights a row.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import diagnostics
    >>> u = np.random.default_rng(0).random((2, 1000))
    >>> bool(np.all(diagnostics.pareto_k(-2.0 * np.log(u)) > 1))  # weights u^-2: k = 2
    True
    """
    checks.arrays(1, log_weights=log_weights)
    if not is_numpy_array(log_weights):
        raise TypeError(
            f"`log_weights` must be a NumPy array, got {type(log_weights).__name__}: move it to "
            "the host first."
        )
    if log_weights.shape[-1] < 25:
        raise ValueError(
            f"`log_weights` must hold at least 25 weights a row, got {log_weights.shape[-1]}."
        )
    try:
        array_stats: Any = import_module("arviz_stats.base").array_stats
    except ImportError:
        raise ImportError(
            "Pareto-k needs the package arviz-stats: pip install 'refattn[diagnostics]'."
        ) from None
    size = log_weights.shape[-1]
    length = size // 5 if size <= 225 else math.isqrt(9 * size)
    wide = np.result_type(log_weights, np.float64)
    largest = np.sort(log_weights.astype(wide).reshape(-1, size), axis=-1)[:, -length - 1 :]
    top, tail = largest[:, -1], _log_excess(largest)
    equal = (largest[:, 1] == top) & (top > -math.inf)
    k = np.where(equal, -math.inf, math.inf)
    k[np.isnan(top) | (top == math.inf)] = math.nan
    # The fit divides by the first quartile.
    fits = (k == math.inf) & (tail[:, int(length / 4 + 0.5) - 1] > _LEAST_EXCESS)
    if np.any(fits):
        rows = np.full((np.count_nonzero(fits), size), -math.inf)
        rows[:, -length:] = tail[fits]
        # Its argument is a log likelihood, whose negative is the log weight.
        with np.errstate(all="ignore"):
            k[fits] = array_stats.psislw(-rows)[1]
    return k.reshape(log_weights.shape[:-1])


@as_written
def _log_excess(logs: Array) -> Array:
    """Log of weights less the smallest, relative to the largest of these; logs (R, M + 1) ascend.

    The law fitted does not depend on the unit of the weights, but their ratios may underflow.
    """
    least, rest = logs[:, :1], logs[:, 1:]
    gap = np.where(rest == least, 0.0, least - rest)  # both may be -inf
    excess = rest + np.log(-np.expm1(gap))
    return excess - excess[:, -1:]
