r"""Closed forms of the mean, variance and bias that random-feature estimates should have.

All are evaluated in kernel coordinates unless a function takes `scale`, on the host, in float64.
With z = x + y, D = x - y and kappa = exp(x . y), each formula is a power of kappa times a function
of z or D. It is evaluated as a logarithm: a variance may overflow, but its logarithm does not.

The formulas for one frequency and for pairs of frequencies in a block are exact for any number of
frequencies, and so is the formula for keys drawn from the softmax. Formulas for attention are of
first order in 1/S if their docstrings say so.
"""

from __future__ import annotations

from .attention import (
    ExactLaw,
    Law,
    attention_law,
    importance_sampling_law,
    num_features_for,
    randomized_attention_law,
    relative_error,
)
from .gradient import gradient_law
from .kernel import (
    kernel_mean,
    kernel_mse,
    kernel_variance,
    log_kernel_mean,
    log_kernel_mse,
    log_kernel_variance,
    log_norm_approximation_bias,
    log_second_moment,
    num_features_for_kernel,
)
from .kernel_law import COUPLINGS
from .sampled_keys import sampled_keys_law

__all__ = [
    "COUPLINGS",
    "ExactLaw",
    "Law",
    "attention_law",
    "gradient_law",
    "importance_sampling_law",
    "kernel_mean",
    "kernel_mse",
    "kernel_variance",
    "log_kernel_mean",
    "log_kernel_mse",
    "log_kernel_variance",
    "log_norm_approximation_bias",
    "log_second_moment",
    "num_features_for",
    "num_features_for_kernel",
    "randomized_attention_law",
    "relative_error",
    "sampled_keys_law",
]


def __dir__() -> list[str]:
    return __all__
