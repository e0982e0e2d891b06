"""Mean and covariance of rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from ....arrays.library import Floats
from .digits import numbers


def mean_of_rows(x: Any, *, dps: int = 50) -> Floats:
    """Average the rows: reference 002, eq. (1).

    Examples
    --------
    >>> mean_of_rows(np.array([[1.0], [2.0]]))
    array([mpf('1.5')], dtype=object)
    """
    return np.asarray(numbers(x, dps=dps).sum(0) / len(x))


def covariance_of_rows(x: Any, ddof: int = 1, *, dps: int = 50) -> Floats:
    """Return the covariance of the rows, with divisor N - ddof: reference 002, eq. (2).

    Examples
    --------
    >>> covariance_of_rows(np.array([[1.0], [2.0]]))
    array([[mpf('0.5')]], dtype=object)
    """
    rows = numbers(x, dps=dps) - mean_of_rows(x, dps=dps)
    return np.asarray(rows.T @ rows / (len(x) - ddof))
