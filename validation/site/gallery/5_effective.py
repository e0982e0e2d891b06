"""How many of 256 samples count
=============================

Effective sample sizes of the queries of one head, sorted. With frequencies from N(0, I) (standard),
a few samples have nearly all the weight. The best Gaussian for the moments of queries and keys is
better. Best is a Gaussian for queries and keys in fitted coordinates (`refattn.adapt.fit`).
"""

import numpy as np

import refattn
from refattn import adapt, diagnostics, sampling
from validation.plotting import panels
from validation.site.drawing import label, ticks

q, k, _ = (x[1, 2].astype(np.float64) for x in refattn.load_sample())
fitted = adapt.fit(q, k)
best = adapt.optimal_gaussian(q, k)
gauge = np.asarray(fitted.gauge)
turned = q @ gauge.T, k @ np.linalg.inv(gauge)
cases = {"standard": (None, (q, k), "o-"), "best Gaussian": (best, (q, k), "s--")}
in_gauge = sampling.Gaussian(fitted.mean, fitted.cov)
cases["best Gaussian and gauge"] = (in_gauge, turned, "^-.")
figure, ((axes,),) = panels()
for name, (law, (a, b), mark) in cases.items():
    omega, log_weight = sampling.draw(256, 32, proposal=law, rng=0)
    weights = diagnostics.log_weights(a, b, omega=omega, log_weight=log_weight)
    ess = np.sort(diagnostics.effective_sample_size(weights))
    (line,) = axes.semilogy(ess, mark, markevery=16)
    label(axes, name, line, (127, ess[-4]))
axes.set(xlabel="queries, sorted", ylabel="effective sample size", xlim=(-4, 180), ylim=(1, 256))
ticks(axes, (0, 32, 64, 96, 128), (1, 4, 16, 64, 256))
