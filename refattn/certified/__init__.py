r"""Compute attention with a proven error bound, to more than 60 binary digits, by matrix products.

Results are pairs of float64, hi + lo, with a bound on their error. Each step adds the bound that
theory gives for it, and nothing is estimated. With :math:`u = 2^{-53}`,
:math:`\gamma_c = c u / (1 - c u)`, d the head size, m the number of keys, and
:math:`f(x)` the largest power of two that is at most the largest of :math:`|x|`:

1. **Scores.** Queries and keys are cut into slices of b bits, whose matrix products are exact, and
   a remainder. With L slices a score is wrong by at most
   :math:`(L + 2) d \max(2^{-b (L - 1)}, 2^{-51}) \gamma_{L d + 4} f(q) f(k)`. L is the smallest
   number for which this is below :math:`2^{-66}`, at most 4.
2. **Exponents.** The scaled scores, the bias and the shift below are added in pairs: the error is
   at most :math:`2^{-98} d f(q) f(k) + 2^{-100} (|\mathrm{bias}| + |\mathrm{shift}|)`. A cap c,
   computed from exponentials, adds :math:`2^{-66} c`.
3. **Weights.** :math:`w_{ij} = e^{s_{ij} - t_i}`, to :math:`2^{-69}` of each. The shift t is the
   log normaliser of `refattn.attend`, so that weights sum to about 1; the proof holds for any
   number t. With an error :math:`\epsilon` of exponents, the relative error of weights is at most
   :math:`\theta = e^{\epsilon} (1 + 2^{-69}) - 1`.
4. **Sums.** Weights and values are cut into three slices of b bits. Their sums over spans of 1024
   keys are exact, and spans are added in pairs. The error of :math:`N = \sum_j w_j v_j` is at most
   g, the sum of :math:`2^{-2b} \gamma_{3088} (Z + 1 + 6 m) f(v)` and of
   :math:`(m / 1024 + 5) 2^{-102}` times the sum of the absolute terms. The error of
   :math:`Z = \sum_j w_j` is at most h, the same for values of 1.
5. **Means.** The output is N / Z, in pairs. With :math:`A = \sum_j w_j |v_j|`, which is also
   computed,

   .. math::
       |\mathrm{error}| \le
       \frac{\theta A + g + (\theta Z + h) |\mathrm{out}|}{(1 - \theta) Z - h}
       + 2^{-98} |\mathrm{out}|.

6. **Logs.** :math:`\mathrm{lse} = t + \log(1 + \delta)` with :math:`\delta = Z - 1`, by five
   terms of the series.

Bounds are computed in float64, from numbers that are not negative, with fewer than 2^16 roundings,
and multiplied by 1 + 2^-30. If a step is not valid (an argument is not finite, exponents
overflow, the shift is wrong) the result is that of `attend`, and its bound is infinity.

No bound is valid if a compiler changes the order of sums: functions test this once on the device,
and raise a RuntimeError that names the failed test.

    Ozaki, Ogita, Oishi and Rump, Error-free transformations of matrix multiplication by using fast
    routines of matrix multiplication, Numerical Algorithms 59, 2012.
"""

from ..numbers.doubled import Pair as Pair
from .assumptions import self_test as self_test
from .attention import attend as attend
from .attention import random_feature_attention as random_feature_attention
from .attention import softmax_attention as softmax_attention
from .attention import softmax_gradients as softmax_gradients
from .blocks import evaluate as evaluate
from .recurrent import recurrent_attention as recurrent_attention
from .results import Bound as Bound
from .results import Certified as Certified
from .results import Gradients as Gradients
from .results import Rounded as Rounded

__all__ = sorted(x for x, value in globals().items() if callable(value))
__dir__ = __all__.copy
