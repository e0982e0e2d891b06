"""How coupled frequencies reduce the variance
===========================================

Variance of the kernel estimate for two equal vectors from 16 coupled frequencies in 16 dimensions,
divided by the variance with independent frequencies, from closed forms. Coupling does not
help for long vectors, whose variance is largest.
"""

import numpy as np

from refattn import theory
from refattn.typing import KnownCoupling
from validation.plotting import panels
from validation.site.drawing import label

norm = np.linspace(0.1, 4, 40)
x = norm[:, None] * np.ones(16) / 8  # x = y, so that |x + y| = norm
places: dict[KnownCoupling, tuple[str, int, int]] = {
    "orthogonal": ("o-", 3, 1),
    "simplex": ("s--", 13, 1),
    "antithetic": ("^-.", 7, -1),
}
figure, ((axes,),) = panels()
iid = theory.kernel_variance(x, x, num_features=16)
for coupling, (mark, at, side) in places.items():
    ratio = theory.kernel_variance(x, x, num_features=16, coupling=coupling) / iid
    (line,) = axes.plot(norm, ratio, mark, markevery=5)
    label(axes, coupling, line, (norm[at], ratio[at]), side)
axes.set(xlabel="|x + y|", ylabel="variance / variance of iid", ylim=(0, 1.1))
axes.axhline(1, color="gray", lw=0.8)
