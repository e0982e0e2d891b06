r"""Laws of rounding that no formula states: derived from the text of an estimator, step by step.

To first order the rounding of a step s moves the result through the derivative that a tape has,

.. math:: \delta\mathrm{out}_{ic} = \sum_s \frac{\partial\,\mathrm{out}_{ic}}{\partial s} \eta_s .

So the covariance of a row is a sum of products of derivatives times the variances of the roundings,
and the bound a sum of their sizes times the largest roundings.
"""

__all__: list[str] = []
__dir__ = __all__.copy
