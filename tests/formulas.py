"""A call or two of every formula of `naive`: options beside queries, keys and values."""

import numpy as np

Q, K, V = np.random.default_rng(0).standard_normal((3, 4, 3))
OMEGA, BIAS = np.random.default_rng(1).standard_normal((2, 4, 3))
MASK = np.array([[True, False, True, True]] * 3 + [[False] * 4])
FEW = {"indices": np.array([0, 2])}
CALLS = {
    "coreset_attention": [FEW | {"mask": MASK[0]}],
    "eva_attention": [{"window": 3, "causal": True}, {"window": 2, "omega": OMEGA[:2]}],
    "importance_sampled_attention": [{"omega": OMEGA, "mask": MASK}],
    "linear_attention": [{"mask": MASK}],
    "linear_randomized_attention": [
        {"omega": OMEGA, "num_proposals": 2, "weighting": "query", "beta": 0.5},
        {"omega": OMEGA, "num_proposals": 2, "causal": True},
        {"omega": "mean", "num_proposals": 2},
    ],
    "local_random_feature_attention": [{"window": (1, 0), "omega": OMEGA}],
    "mean_of_ratios_attention": [{"omega": OMEGA, "causal": True}],
    "random_feature_attention": [
        {"omega": OMEGA, "features": x, "log_weight": OMEGA[:, 0], "mask": MASK}
        for x in ("positive", "hyperbolic", "trigonometric")
    ],
    "randomized_attention": [{"omega": Q[:, None] + OMEGA}, {"omega": "mean", "mask": MASK}],
    "relu_feature_attention": [{"omega": OMEGA, "kernel_epsilon": 0.1, "mask": MASK}],
    "sampled_key_attention": [FEW | {"log_probability": BIAS[0, :2], "mask": MASK}],
    "second_order_attention": [{"window": 2}],
    "softmax_attention": [
        {"mask": MASK, "softcap": 1.5, "sinks": np.array(0.3), "dropout": 2.0 * MASK},
        {"bias": BIAS @ BIAS.T, "scale": 0.3, "window": (2, None)},
    ],
}
RATE, LOG, LOGS = (
    {"beta": OMEGA[:, 0] ** 2},
    {"log_decay": -(BIAS[:, 0] ** 2)},
    {"log_decay": -(BIAS**2)},
)
PAIR = {"removal": (OMEGA, BIAS)}
CALLS |= {
    "delta_rule": [RATE],
    "gated_delta_rule": [RATE | LOG],
    "gated_linear_attention": [LOGS | {"initial_state": OMEGA[:3]}],
    "kimi_delta_attention": [RATE | LOGS],
    "recurrent_attention": [LOG | PAIR | {"read": "before"}],
    "retention": [{"decay": 0.7}],
    "rwkv7": [LOGS | PAIR],
    "state_space_duality": [LOG | {"write": OMEGA[:, 1]}],
}
