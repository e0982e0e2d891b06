"""Attention weights of four estimators
====================================

If the values are the identity matrix, the output of a query is its row of weights. Here are the
weights of the first 40 tokens of a head of the encoder: exact, from 256 random features, from 256
fitted features, and from randomized attention.
"""

import numpy as np

import refattn
from validation.plotting import panels

q, k, _ = (x[1, 0, :40].astype(np.float64) for x in refattn.load_sample())
fitted, one = refattn.adapt.fit(q, k), np.eye(40)
rfa, ra = refattn.random_feature_attention, refattn.randomized_attention
maps = {"exact": refattn.softmax_attention(q, k, one)}
maps["random features"] = rfa(q, k, one, num_features=256, rng=0)
maps["fitted features"] = rfa(q, k, one, num_features=256, proposal=fitted, rng=0)
maps["randomized attention"] = ra(q, k, one, num_samples=256, rng=0)
figure, axes = panels(1, 4, size=(7.6, 2.5), sharey=True)
for ax, (name, weights) in zip(axes[0], maps.items(), strict=True):
    ax.imshow(np.sqrt(weights), cmap="magma", vmin=0, vmax=1)
    ax.set(title=name, xlabel="key", xticks=(0, 39), yticks=(0, 39))
axes[0, 0].set(ylabel="query")
