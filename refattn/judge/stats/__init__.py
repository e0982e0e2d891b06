"""Statistical tests with a proven level and a proven power.

`exact` and `gaussian` compute p-values from exact distributions, and `bounds` from bounds that hold
at every sample size. `power` computes what a test detects, and `multiple` corrects for many tests.
Nothing here depends on attention.

Every p-value satisfies P(p <= a) <= a for every a under its null hypothesis, by a theorem. Samples
are arrays of finite numbers, never empty, and p-values are floats. An argument of the wrong
type raises TypeError. NaN, a wrong shape and a number out of range raise ValueError.
"""

from .bounds import bernstein as bernstein
from .bounds import betting as betting
from .bounds import catoni as catoni
from .bounds import dkwm_two_sample as dkwm_two_sample
from .bounds import empirical_bernstein as empirical_bernstein
from .bounds import hoeffding as hoeffding
from .exact import binomial as binomial
from .exact import chi2 as chi2
from .exact import ks as ks
from .exact import normal_mean as normal_mean
from .exact import normal_scale as normal_scale
from .gaussian import GaussianEstimates as GaussianEstimates
from .gaussian import bartlett as bartlett
from .gaussian import gaussian_estimates as gaussian_estimates
from .gaussian import hotelling as hotelling
from .multiple import clopper_pearson as clopper_pearson
from .multiple import holm as holm
from .multiple import suite_p as suite_p
from .power import min_discrepancy as min_discrepancy
from .power import min_samples as min_samples

__all__ = sorted(x for x, value in globals().items() if callable(value))
__dir__ = __all__.copy
