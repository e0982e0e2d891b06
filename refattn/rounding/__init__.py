r"""What a correct kernel in another precision may differ by: a bound, and a law.

Kernels take queries, keys and values in a narrow type, the storage type, and round some of what
they compute in between: a `Profile` says what. Their errors are many roundings to nearest, of which
each is known to half a unit in the last place and all but independent of the others. So the error
of a *correct* kernel has a standard deviation that can be written down, with no number to tune, and
a bound that it never exceeds. To first order, for weights :math:`p_{ij}`, relative errors
:math:`\delta_{ij}` of them before and absolute errors :math:`\eta_{ij}` by their rounding,

.. math:: \delta \mathrm{out}_{ic} = \sum_j p_{ij} \delta_{ij} (v_{jc} - \mathrm{out}_{ic})
    + \sum_j \eta_{ij} v_{jc} + \text{sums} + \text{the rounding of the result}.

The law assumes that roundings are independent of each other. They are not where weights are equal
to each other or nearer than a rounding, where a weight is exactly 1, or where nothing is rounded:
there `Prediction.std` is infinite, and the bound is what is left. It takes sums in the order of the
keys and coordinates. `verify` has the same for gradients; dropout is not here.
"""

from __future__ import annotations

from .prediction import Prediction, predict
from .profiles import PROFILES, Profile

__all__ = ["PROFILES", "Prediction", "Profile", "predict"]


def __dir__() -> list[str]:
    return __all__
