r"""Compute attention with a proven error bound, to more than 60 binary digits, by matrix products.

Results are pairs of float64, hi + lo, with a bound on their error. The formulas of `refattn.naive`
run over `refattn.numbers.pairs`, an array type whose operations each have a bound with its proof;
nothing is estimated. `evaluate` does that with any formula, causal ones too. For long sequences
`attend` and what is made of it go block by block of queries; there

1. **scores** are products of slices of queries and of keys, exact except for a remainder;
   a cap c, computed from exponentials, adds about :math:`2^{-67} c`;
2. **weights** are :math:`e^{s - t}`, to :math:`2^{-69}` of each, for the largest score t;
3. **sums** over spans of 1024 keys are exact except for a remainder. Errors of scores and weights
   are summed with the terms that they are errors of, so that hidden keys have no part in a bound.

`recurrent_attention` bounds what tokens do to errors by norms. If a step is not valid (an argument
is not finite, exponents overflow) the result is that in float64, and its bound is infinity.

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
from .formulas import evaluate as evaluate
from .recurrent import recurrent_attention as recurrent_attention
from .results import Bound as Bound
from .results import Certified as Certified
from .results import Gradients as Gradients
from .results import Rounded as Rounded

__all__ = sorted(x for x, value in globals().items() if callable(value))
__dir__ = __all__.copy
