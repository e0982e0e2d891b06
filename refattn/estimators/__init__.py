"""The estimators: what each asks for, and the kernel coordinates that the engine works in."""

from __future__ import annotations

from . import key_sampling
from .few_keys import coreset_attention, sampled_key_attention
from .lara import linear_randomized_attention
from .linear import linear_attention
from .near_and_far import eva_attention, local_random_feature_attention, second_order_attention
from .ra import mean_of_ratios_attention, randomized_attention
from .rfa import importance_sampled_attention, random_feature_attention

__all__ = [
    "coreset_attention",
    "eva_attention",
    "importance_sampled_attention",
    "key_sampling",
    "linear_attention",
    "linear_randomized_attention",
    "local_random_feature_attention",
    "mean_of_ratios_attention",
    "random_feature_attention",
    "randomized_attention",
    "sampled_key_attention",
    "second_order_attention",
]


def __dir__() -> list[str]:
    return __all__
