"""Predicted and measured error
============================

Relative error of random-feature attention on short vectors, as `refattn.theory.attention_law`
predicts it (line) and as measured in eight draws (points). The prediction is of first order in 1/S:
it is accurate if enough samples count.
"""

import numpy as np

import refattn
from refattn import theory
from validation.plotting import panels
from validation.site.drawing import ticks

q, k, v = np.random.default_rng(0).standard_normal((3, 64, 8)) * [[[0.5]], [[0.5]], [[1]]]
exact, sizes = refattn.softmax_attention(q, k, v), [2**i for i in range(4, 13)]
laws = [theory.attention_law(q, k, v, num_features=s) for s in sizes]
figure, ((axes,),) = panels()
axes.loglog(sizes, [theory.relative_error(law, exact) for law in laws], "-")
for seed in range(8):
    draws = (refattn.random_feature_attention(q, k, v, num_features=s, rng=seed) for s in sizes)
    errors = [np.linalg.norm(x - exact) / np.linalg.norm(exact) for x in draws]
    axes.loglog(sizes, errors, "o", color="#d55e00", alpha=0.5, ms=4)
axes.set(xlabel="features", ylabel="relative error")
ticks(axes, sizes, (0.02, 0.05, 0.1, 0.2, 0.5))
