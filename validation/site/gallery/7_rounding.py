"""Rounding errors have a known distribution
=========================================

Density of the errors of attention in float32, divided by the standard deviations that
`refattn.rounding.predict` computes, for a correct kernel and for a kernel whose scale is wrong by
1e-6. The grey curve is the normal distribution. No tolerance is chosen.
"""

import numpy as np

import refattn
from validation.plotting import panels
from validation.site.drawing import label

q, k, v = refattn.load_sample()
law = refattn.rounding.predict(q, k, v, dtype="float32", profile="math")
z = np.linspace(-15, 15, 121)
figure, ((axes,),) = panels()
axes.semilogy(z, np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi), color="gray", lw=5, alpha=0.4)
lines = (("right", 1, "o-", (46, 1)), ("scale off by 1e-6", 1 + 1e-6, "s--", (32, 1.8)))
for name, factor, mark, (at, up) in lines:
    out = refattn.softmax_attention(q, k, v, scale=32**-0.5 * factor)
    share, _ = np.histogram((out - law.out) / law.std, bins=z, density=True)
    (line,) = axes.semilogy(z[:-1] + 0.125, np.where(share, share, np.nan), mark, ms=4, markevery=4)
    label(axes, name, line, (z[at], share[at] * up), -1)
axes.set(xlabel="error / its standard deviation", ylabel="density", ylim=(1e-4, 1))
