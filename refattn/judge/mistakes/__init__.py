"""What kernels do wrong: `causes` explains wrong numbers, `defects` are known bugs as edits.

Where a mistake is, and which map of places it follows, is inferred by `operators`: limits of what
is seen, intervals and tiles of keys, arrays and blocks of a cache that are read elsewhere, numbers
on a grid. A rule of places is one line of `maps`, and holds for all arrays and limits; a rule of a
block table is one line of `pages`, one of log normalisers a line of `offsets`.

To add a mistake that `verify` names, go to `causes` and yield one more `Alternative` (its fields
are explained in `sampled`): from `alternatives` if another problem is computed, from `slips` if the
right one is computed in a wrong way. A mistake of a backward pass is a `Candidate` in `backward`,
one of a recurrence a row of `_CAUSES` in `states`. Its text goes on after "agrees if".

To add a mistake that `check` must find, go to `defects` and write one more block of lines in a file
of `rows`, in the shape that `catalogue` describes. It changes lines that `python -m refattn.naive`
prints; what comes of it is a line of tests/judge/mistakes/defects/effects.txt.
"""

__all__ = []
__dir__ = __all__.copy
