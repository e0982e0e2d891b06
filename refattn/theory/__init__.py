r"""Closed forms of the mean, variance and bias that random-feature estimates should have.

All are evaluated in kernel coordinates unless a function takes `scale`, on the host, in float64.
With z = x + y, D = x - y and kappa = exp(x . y), each formula is a power of kappa times a function
of z or D. It is evaluated as a logarithm: a variance may overflow, but its logarithm does not.

The formulas for one frequency and for pairs of frequencies in a block are exact for any number of
frequencies, and so is the formula for keys drawn from the softmax. Formulas for attention are of
first order in 1/S if their docstrings say so.
"""

from .at_means import proposal_means_law as proposal_means_law
from .at_means import target_mean_law as target_mean_law
from .attention import ExactLaw as ExactLaw
from .attention import Law as Law
from .attention import VarianceBound as VarianceBound
from .attention import attention_law as attention_law
from .attention import importance_sampling_law as importance_sampling_law
from .attention import num_features_for as num_features_for
from .attention import randomized_attention_law as randomized_attention_law
from .attention import relative_error as relative_error
from .gradient import gradient_law as gradient_law
from .kernel import kernel_mean as kernel_mean
from .kernel import kernel_mse as kernel_mse
from .kernel import kernel_variance as kernel_variance
from .kernel import log_kernel_mean as log_kernel_mean
from .kernel import log_kernel_mse as log_kernel_mse
from .kernel import log_kernel_variance as log_kernel_variance
from .kernel import log_norm_approximation_bias as log_norm_approximation_bias
from .kernel import log_second_moment as log_second_moment
from .kernel_law import COUPLINGS as COUPLINGS
from .sampled_keys import sampled_keys_law as sampled_keys_law

__all__ = sorted(x for x, y in globals().items() if callable(y) or x == "COUPLINGS")
__dir__ = __all__.copy
