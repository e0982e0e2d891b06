r"""The estimators in arbitrary precision: each function is one equation, written for reading.

Every argument is taken as the number it is, digit for digit, and every operation is carried out
with `dps` decimal digits by mpmath, whose exponents do not overflow. Nothing is stabilised, so
that nothing can be stabilised wrongly. Slow: for tens of queries and keys.

Arrays are NumPy arrays of one head, (n, d), (m, d), (m, d_v), and results are arrays of mpmath
numbers; `each_head` maps over heads. `visible` is a boolean array broadcasting to (n, m).
"""

from __future__ import annotations

from .digits import context, numbers, pull_back
from .features import (
    elu_plus_one,
    feature_map,
    kernel_estimate,
    linear_attention,
    linear_randomized_attention,
    log_kernel_estimate,
    random_feature_attention,
    randomized_attention,
)
from .few_keys import coreset, coreset_attention, sampled_key_attention
from .moments import covariance_of_rows, mean_of_rows
from .near_and_far import eva_attention, local_random_feature_attention, second_order_attention
from .softmax import (
    attend,
    cap_scores,
    causal_keys,
    each_head,
    heads_of,
    root,
    softmax_attention,
    softmax_mean,
)

__all__ = [
    "attend",
    "cap_scores",
    "causal_keys",
    "context",
    "coreset",
    "coreset_attention",
    "covariance_of_rows",
    "each_head",
    "elu_plus_one",
    "eva_attention",
    "feature_map",
    "heads_of",
    "kernel_estimate",
    "linear_attention",
    "linear_randomized_attention",
    "local_random_feature_attention",
    "log_kernel_estimate",
    "mean_of_rows",
    "numbers",
    "pull_back",
    "random_feature_attention",
    "randomized_attention",
    "root",
    "sampled_key_attention",
    "second_order_attention",
    "softmax_attention",
    "softmax_mean",
]


def __dir__() -> list[str]:
    return __all__
