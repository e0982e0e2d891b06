"""The estimators: functions of queries, keys and values."""

from . import key_sampling as key_sampling
from .few_keys import coreset_attention as coreset_attention
from .few_keys import sampled_key_attention as sampled_key_attention
from .lara import linear_randomized_attention as linear_randomized_attention
from .linear import linear_attention as linear_attention
from .linear import relu_feature_attention as relu_feature_attention
from .near_and_far import eva_attention as eva_attention
from .near_and_far import local_random_feature_attention as local_random_feature_attention
from .near_and_far import second_order_attention as second_order_attention
from .ra import mean_of_ratios_attention as mean_of_ratios_attention
from .ra import randomized_attention as randomized_attention
from .recurrent import recurrent_attention as recurrent_attention
from .rfa import importance_sampled_attention as importance_sampled_attention
from .rfa import random_feature_attention as random_feature_attention

__all__ = sorted(x for x, y in globals().items() if callable(y) or x == "key_sampling")
__dir__ = __all__.copy
