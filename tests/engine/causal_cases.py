"""Causal attention functions, each with its options."""

from functools import partial

import numpy as np

from refattn import linear_attention, linear_randomized_attention, random_feature_attention
from refattn.features import elu_features, relu_features, taylor_features

OMEGA = np.random.default_rng(5).standard_normal((7, 3))
RFA = partial(random_feature_attention, causal=True, omega=OMEGA)
LARA = partial(linear_randomized_attention, causal=True, rng=1)
LINEAR = partial(linear_attention, causal=True)
CAUSAL = {
    "rfa": RFA,
    "rfa hyperbolic": partial(RFA, features="hyperbolic"),
    "rfa trigonometric": partial(RFA, features="trigonometric"),
    "rfa weighted": partial(RFA, log_weight=np.array([-np.inf, 0.0, 40.0, -3.0, 0.0, -90.0, 1.0])),
    "rfa norms": partial(RFA, square_norms=(0.0, 1.0)),
    "lara": partial(LARA, num_proposals=5),
    "lara own": partial(LARA, num_proposals=5, weighting="own"),
    "lara antithetic": partial(LARA, num_proposals=5, antithetic=True),
    "lara given": partial(LARA, num_proposals=7, omega=OMEGA, rng=None),
    "linear": LINEAR,
    "linear relu": partial(LINEAR, feature_map=relu_features),
    "linear alpha": partial(LINEAR, feature_map=partial(elu_features, alpha=0.1)),
    "linear signed": partial(LINEAR, feature_map=lambda x: x),
    "linear taylor": partial(LINEAR, feature_map=partial(taylor_features, degree=2)),
}
