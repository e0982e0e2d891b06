"""The smallest shift that a test detects
======================================

Smallest shift of a mean that a test at level 1e-6 misses with probability at most 1e-6, for numbers
between 0 and 1 whose standard deviation is at most 0.1. Tests that use the standard deviation
detect smaller shifts; `hoeffding` does not use it.
"""

import numpy as np

from refattn.judge import stats
from validation.plotting import panels
from validation.site.drawing import label

sizes = 10 ** np.arange(2, 7)
known = {"variance": 0.01}
tests = {"hoeffding": ({}, "o-", 1), "empirical_bernstein": (known, "s--", 1.4)}
tests |= {"bernstein": (known, "^-.", 1), "catoni": (known, "D:", 0.67)}
figure, ((axes,),) = panels()
for name, (given, mark, up) in tests.items():
    least = [stats.min_discrepancy(getattr(stats, name), int(n), **given) for n in sizes]
    (line,) = axes.loglog(sizes, least, mark)
    label(axes, name, line, (sizes[-1], least[-1] * up))
axes.set(
    xlabel="samples", ylabel="smallest shift that is detected", xlim=(70, 2e7), ylim=(5e-4, 1.2)
)
