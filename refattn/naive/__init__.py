r"""Every estimator written as its formula: dense, a few lines each. Read this first.

The rest of the package computes the same numbers in blocks and on threads. Both use the same code
to check arguments, but no common step of the computation, so each tests the other. These formulas
take memory O(n m S) for S frequencies, or O(n m d_v): use them for hundreds of tokens.

Every sum over keys is over the keys that a query sees (`visible`). A hidden key has no effect, even
if it is NaN, and the result of a query that sees no key is 0.

Kernel coordinates are sqrt(scale) times queries and keys, in which omega ~ N(0, I). The positive
feature xi(x, omega) = exp(omega . x - |x|^2/2) appears in products only,

.. math:: \xi(q, \omega) \, \xi(k, \omega) = e^{\omega \cdot (q + k) - |q|^2/2 - |k|^2/2},

and the factor e^{-|q|^2/2} cancels wherever a query's weights are normalised.

Docstrings name the five documents that the package follows as

* Random features post: "Approximating self-attention with random features", on Choromanski et
  al., arXiv:2009.14794.
* Performers post: "Performers: The Kernel Trick, Random Fourier Features, and Attention", on the
  same paper.
* Ye 2023: Ye, "Adapting Linear Attention to Query/Key Distributions", Columbia University.
* Zheng 2022: Zheng, "Randomized Attention: a Generalized Random Feature Attention Algorithm", on
  Zheng, Wang and Kong, arXiv:2204.04667.
* Linear attention post: "Understanding linear attention in Transformers are RNNs", on
  Katharopoulos et al., arXiv:2006.16236.
"""

from .few_keys import coreset_attention as coreset_attention
from .few_keys import sampled_key_attention as sampled_key_attention
from .kernel import kernel_estimate as kernel_estimate
from .lara import linear_randomized_attention as linear_randomized_attention
from .linear import elu_plus_one as elu_plus_one
from .linear import linear_attention as linear_attention
from .linear import relu_feature_attention as relu_feature_attention
from .moments import mean_and_covariance as mean_and_covariance
from .near_and_far import eva_attention as eva_attention
from .near_and_far import local_random_feature_attention as local_random_feature_attention
from .near_and_far import second_order_attention as second_order_attention
from .ra import mean_of_ratios_attention as mean_of_ratios_attention
from .ra import randomized_attention as randomized_attention
from .recurrent import delta_rule as delta_rule
from .recurrent import gated_delta_rule as gated_delta_rule
from .recurrent import gated_linear_attention as gated_linear_attention
from .recurrent import kimi_delta_attention as kimi_delta_attention
from .recurrent import recurrent_attention as recurrent_attention
from .recurrent import retention as retention
from .recurrent import rwkv7 as rwkv7
from .recurrent import state_space_duality as state_space_duality
from .rfa import importance_sampled_attention as importance_sampled_attention
from .rfa import random_feature_attention as random_feature_attention
from .softmax import softmax_attention as softmax_attention
from .terms import visible as visible

__all__ = sorted(x for x, value in globals().items() if callable(value))
__dir__ = __all__.copy
