"""Checks of gradients: pullbacks of queries, keys and values, by cotangents of the output.

What comes is compared with the package's own pullback in extended precision, where the candidate
can be compared number by number, and with difference quotients of its own results where it draws.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .adapter import Adapter
from .checks import Trial, attends, check, evaluated, stabilised
from .combined import case_of, cases_of
from .failures import Failure, Refusal
from .reference import pulled
from .uses import indices

__all__: list[str] = []

Floats = npt.NDArray[Any]

NAMES = ("out", "dq", "dk", "dv")
_SECONDS = {"quick": 6.0, "full": 40.0, "soak": 160.0}


def _differentiated(adapter: Adapter) -> bool:
    return attends(adapter) and adapter.can("vjp")


def _compared(adapter: Adapter) -> bool:
    return _differentiated(adapter) and evaluated(adapter)


def _cotangent(t: Trial, arrays: tuple[Floats, ...]) -> Floats:
    """A cotangent of the output."""
    q, k, v = arrays
    lead = np.broadcast_shapes(q.shape[:-2], *(x.shape[:-2] for x in (k, v) if x.ndim == q.ndim and x.shape[:-2] == q.shape[:-2]))
    return t.normal(*lead, q.shape[-2], v.shape[-1])
