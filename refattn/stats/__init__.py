"""Statistical tests with a proven level and a proven power.

`exact` and `gaussian` compute p-values from exact distributions, and `bounds` from bounds that hold
at every sample size. `power` computes what a test detects, and `multiple` corrects for many tests.
Nothing here depends on attention.

Every p-value satisfies P(p <= a) <= a for every a under its null hypothesis, by a theorem. Samples
are arrays of finite numbers, never empty, and p-values are floats. An argument of the wrong
type raises TypeError. NaN, a wrong shape and a number out of range raise ValueError.
"""

from __future__ import annotations

from .bounds import (
    bernstein,
    betting,
    catoni,
    chernoff,
    dkwm,
    dkwm_mean,
    dkwm_two_sample,
    empirical_bernstein,
    hoeffding,
)
from .exact import (
    binomial,
    chi2,
    ks,
    lognormal_pair,
    lognormal_sum_cdf,
    normal_mean,
    normal_scale,
    normal_variance,
)
from .gaussian import GaussianEstimates, bartlett, gaussian_estimates, hotelling
from .multiple import Sequential, clopper_pearson, gandy_scott, holm, suite_p
from .power import min_discrepancy, min_samples

__all__ = [
    "GaussianEstimates",
    "Sequential",
    "bartlett",
    "bernstein",
    "betting",
    "binomial",
    "catoni",
    "chernoff",
    "chi2",
    "clopper_pearson",
    "dkwm",
    "dkwm_mean",
    "dkwm_two_sample",
    "empirical_bernstein",
    "gandy_scott",
    "gaussian_estimates",
    "hoeffding",
    "holm",
    "hotelling",
    "ks",
    "lognormal_pair",
    "lognormal_sum_cdf",
    "min_discrepancy",
    "min_samples",
    "normal_mean",
    "normal_scale",
    "normal_variance",
    "suite_p",
]


def __dir__() -> list[str]:
    return __all__
