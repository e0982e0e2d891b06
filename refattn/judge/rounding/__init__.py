r"""Rounding errors of a correct kernel in another precision: their bound and standard deviation.

Kernels take queries, keys and values in a narrow type, the storage type, and round some
intermediate numbers; a `Profile` lists which. Their errors are sums of many roundings to nearest.
Each rounding is at most half a unit in the last place, and almost independent of the others. So a
formula without free parameters gives the standard deviation of the error of a *correct* kernel, and
a bound that this error never exceeds. To first order, for weights :math:`p_{ij}`, their relative
errors :math:`\delta_{ij}` before rounding and absolute errors :math:`\eta_{ij}` from their
rounding,

.. math:: \delta \mathrm{out}_{ic} = \sum_j p_{ij} \delta_{ij} (v_{jc} - \mathrm{out}_{ic})
    + \sum_j \eta_{ij} v_{jc} + \text{sums} + \text{the rounding of the result}.

The standard deviation assumes that roundings are independent of each other. They are not if weights
are equal or closer to each other than a rounding, if a weight is exactly 1, or if nothing is
rounded. Then `Prediction.std` is infinite, and only the bound remains. The bound assumes sums in
the order of the keys and coordinates. `verify` does the same for gradients; dropout is not
modelled.
"""

from .prediction import Prediction, predict
from .profiles import PROFILES, Profile

__all__ = ["PROFILES", "Prediction", "Profile", "predict"]
__dir__ = __all__.copy
