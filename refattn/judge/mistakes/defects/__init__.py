"""A catalogue of wrong attention implementations, and of correct ones, to test a test kit with.

Each is an edit of the formulas that `python -m refattn.naive` prints (`edits`), written as a row of
a file in `rows` (`catalogue`). `MUTANTS` must all be rejected by the kit, `VARIANTS` all accepted.
"""

from __future__ import annotations

from .catalogue import Mutant, right, wrong

__all__ = ["MUTANTS", "VARIANTS", "Mutant"]
__dir__ = __all__.copy


MUTANTS: tuple[Mutant, ...] = wrong()
VARIANTS: tuple[Mutant, ...] = right()
