"""What kernels do wrong: `causes` explains wrong numbers, `defects` are known bugs as edits.

Where a mistake is, and which map of places it follows, is inferred by `operators`: limits of what
is seen, intervals and tiles of keys, arrays and blocks of a cache that are read elsewhere, numbers
on a grid. A rule of places is one line of `maps`, and holds for all arrays and limits; a rule of
heads is one line of `list_head_rules` there, and holds for all arrays, recurrences and gradients. A
rule of a block table is one line of `pages`, one of log normalisers a line of `offsets`.

To add a mistake, go to `defects` and write one more block of lines in a file of `rows`, in the
shape that `catalogue` describes. It changes lines that `python -m refattn.naive` prints; what comes
of it is a line of tests/judge/mistakes/defects/effects.txt. `check` must find it, and `verify`
names it where no other cause holds, in small heads (`causes.edited`), as it does rows of a user's.

If heads are large, or a number is to be fitted, go to `causes` and yield one more `Alternative`
(its fields are explained in `sampled`): from `alternatives` if another problem is computed, from
`slips` if the right one is computed in a wrong way. A mistake of a backward pass is a `Candidate`
in `backward`, one of a recurrence a row of `_CAUSES` in `states`. Its text goes on after "agrees
if".
"""

__all__ = []
__dir__ = __all__.copy
