"""Judge whether a correct kernel can have produced given numbers: `verify`.

The way of a verdict, in the order of the calls; `door`, `reading`, `judging`, `trial`, `evidence`
and `verdict` tell how `verify` decides, and the others are opened for a detail:

1. `door` checks arguments (`inputs` finds the type of each array) and poses the problem;
   `reading` pairs it with the numbers to be judged, and does the same for a file.
2. `judging` takes the profiles (`choice`) and rows (`looks`) to try, the likeliest profile first
   (`likelihood`), until one surely passes. Else `units` adds hardware that truncates sums.
3. `trial` tests one profile: `head_sums` adds up errors over rows, along the known bugs of
   `directions`, and `evidence` bounds how likely such sums are. Holm corrects for all tests.
4. `judging` writes the `verdict`, with the trivial outputs that would also pass (`blind`), and
   `judge.mistakes` adds causes and the `worst` element.
"""

from ...arrays.lazy import load_lazily

__all__, __getattr__, __dir__ = load_lazily(__name__, __file__)
