"""`predict`: what a correct kernel gives in another precision, and how far it may be off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ...arrays import checks
from ...arrays.library import Doubles
from ...arrays.shown import held
from ...arrays.words import with_known_keywords
from ...typing import Features
from .formats import FORMATS
from .problems import Index, check_holds, pose_arrays, sweep
from .profiles import Profile, profile_of
from .roundings import RowErrors


@held()
class Prediction(NamedTuple):
    """The exact result, and how far a correct kernel may be off.

    Attributes
    ----------
    out : NumPy array, shape (..., n, d_v), float64
        The exact result for these queries, keys and values.
    lse : NumPy array, shape (..., n), float64
        The log of the exact normaliser; -inf for a query that sees no key.
    std : NumPy array, shape (..., n, d_v), float64
        Standard deviation of the error; infinite where its distribution is not known.
    bound : NumPy array, shape (..., n, d_v), float64
        Bound that no error exceeds; infinite where the profile overflows.
    """

    out: Doubles
    lse: Doubles
    std: Doubles
    bound: Doubles


Prediction.__module__ = "refattn.judge.rounding"  # where users find it, and so do pickles


@with_known_keywords
def predict(
    q: Any,
    k: Any,
    v: Any,
    *,
    dtype: str,
    profile: str | Profile = "flash",
    scale: float | None = None,
    bias: Any = None,
    mask: Any = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    omega: Any = None,
    log_weight: Any = None,
    features: Features = "positive",
    feature_map: Callable[[Any], Any] | None = None,
) -> Prediction:
    r"""Predict what a correct kernel gives in another precision, and how far it may be off.

    .. math:: \mathrm{out}_i = \sum_j p_{ij} v_j, \qquad
        \mathrm{Var}\,\delta\mathrm{out}_{ic} = \sum_j p_{ij}^2 \sigma_{ij}^2
        (v_{jc} - \mathrm{out}_{ic})^2 + \sum_j \tau_{ij}^2 v_{jc}^2 + \sigma_{\mathrm{sums}}^2
        + h_{ic}^2 / 12

    with the relative variance :math:`\sigma_{ij}^2` of a weight, from its score and exponential,
    the variance :math:`\tau_{ij}^2` of its rounding, and the spacing h of the numbers that the
    result is rounded to. The bound has the same terms, each at its largest, and includes higher
    orders.

    Parameters
    ----------
    q : array, shape (..., n, d)
        Queries, of the storage type or of a wider one, in any library. Leading axes broadcast, and
        heads may share keys in groups, as in `attend`.
    k : array, shape (..., m, d)
        Keys.
    v : array, shape (..., m, d_v)
        Values.
    dtype : str
        The storage type, which must represent all numbers of `q`, `k` and `v` exactly.
    profile : str or Profile, default "flash"
        What the kernel rounds; names are those of `PROFILES`.
    scale : float, optional
        Factor on q . k, 1 / sqrt(d) by default. For random features it is positive.
    bias : array, broadcasting to (..., n, m), optional
        Added to the scores; the kernel is assumed to have exactly these numbers.
    mask : array of bool, broadcasting to (..., n, m), optional
        True where the query attends to the key. With features it is the same for all queries,
        of shape (..., 1, m).
    causal : bool, default False
        Query i sees key j only if j <= i + m - n.
    window : pair of int or None, optional
        (left, right): query i sees key j only if i + m - n - left <= j <= i + m - n + right.
    softcap : float, optional
        Positive c: scores are c tanh(s / c) before the bias is added.
    sinks : array, broadcasting to (..., heads), optional
        Score of one more key for each head, that all its queries see and whose value is 0; the
        kernel is assumed to have exactly these numbers. The maximum may include it or not.
    omega : array, shape (..., S, d), optional
        Frequencies. If given, the kernel computes random-feature attention, not softmax attention.
    log_weight : array, shape (..., S), optional
        Log weights of the frequencies.
    features : {"positive", "hyperbolic"}
        Features of the frequencies.
    feature_map : callable, optional
        x -> features: linear attention, with a map like `refattn.features.elu_features`.

    Returns
    -------
    Prediction
        Exact `out` and `lse`, the standard deviation of errors and their bound, in float64. `lse`
        is 0 with features, where it is not defined.

    Raises
    ------
    TypeError
        If an argument is not an array or its dtype is not in `FORMATS`.
    ValueError
        If shapes do not match, if `q`, `k` or `v` hold numbers that `dtype` lacks, if queries, or
        keys and values that a query sees, are not finite (other keys and values may hold anything),
        or if an option is not one of the above.

    Notes
    -----
    Let U be the type of the weights in the second product. `std` is infinite in rows where many
    weights are equal or differ by less than a rounding in U: their roundings are not independent.
    Heads are processed one at a time, and queries in blocks: the memory besides arguments and
    results does not depend on n and m. With features the errors of rows are not independent of each
    other.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import rounding
    >>> q, k, v = (np.array(x) for x in ([[1.0]], [[0.5], [-1.0]], [[1.0], [3.0]]))
    >>> found = rounding.predict(q, k, v, dtype="bfloat16")
    >>> found.out
    array([[1.36485105]])
    >>> bool(np.all(found.std < found.bound))
    True
    """
    problem = pose_arrays(
        q,
        k,
        v,
        scale=scale,
        bias=bias,
        mask=mask,
        causal=causal,
        window=window,
        softcap=softcap,
        sinks=sinks,
        omega=omega,
        log_weight=log_weight,
        features=features,
        feature_map=feature_map,
    )
    chosen = profile_of(profile)
    checks.choice("dtype", dtype, FORMATS)
    check_holds(problem, dict.fromkeys("qkv", dtype))
    # Allocated once: heads are analysed in blocks, in any order, and write their own rows.
    n, _, d_v = problem.shape
    out, std, bound = (np.empty((*problem.lead, n, d_v)) for _ in range(3))
    lse = np.empty((*problem.lead, n))

    def write(index: Index, i: slice, rows: RowErrors) -> None:
        at: Any = (*index, i)
        out[at], lse[at], std[at], bound[at] = rows.out, rows.lse, rows.std, rows.bound

    sweep(problem, dtype, chosen, write)
    return Prediction(out, lse, std, bound)
