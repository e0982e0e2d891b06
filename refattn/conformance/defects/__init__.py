"""A catalogue of wrong attention implementations, and of correct ones, to test a test kit with.

Everything here is dense, textbook NumPy, O(n m S) in time and memory, and independent of the
estimators of the package; the map elu + 1 is that of `naive`. Each class evaluates one estimator
step by step; each mutant overrides one step, is the defect that its docstring names, and has its
entry in the catalogue standing on it. Defects of the same step are shared between estimators by
composition. `MUTANTS` must all be rejected by the kit, `VARIANTS` all accepted.

Shapes: q (..., n, d), k (..., m, d), v (..., m, d_v), omega (..., S, d) in kernel coordinates,
which are d^(-1/4) times the arguments. Scores and weights have shape (..., n, m), log features
(..., n, S) and (..., m, S).
"""

from __future__ import annotations

from . import backward, chunks, combined, few_keys, given, kernel, local, moments, options
from .catalogue import Mutant

__all__ = ["MUTANTS", "VARIANTS", "Mutant"]


def __dir__() -> list[str]:
    return __all__


_CATALOGUES = (
    kernel.CATALOGUE,
    *combined.CATALOGUES.values(),
    *chunks.CATALOGUES.values(),
    local.CATALOGUE,
    *few_keys.CATALOGUES.values(),
    *given.CATALOGUES.values(),
    *backward.CATALOGUES.values(),
    options.CATALOGUE,
    options.DROPOUT,
    moments.CATALOGUE,
)

MUTANTS: tuple[Mutant, ...] = tuple(m for c in _CATALOGUES for m in c.mutants)
VARIANTS: tuple[Mutant, ...] = tuple(m for c in _CATALOGUES for m in c.variants)
