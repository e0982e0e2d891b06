"""Audits of tests: which known bugs would a comparison, or a whole test, let through?

The kernel in a test is replaced by each known bug of the catalogue, with the roundings of a correct
kernel, and the test is run again. The test does not notice the bugs that still pass.
"""

from .study import Audit, Survivor, audit

__all__ = ["Audit", "Survivor", "audit"]
__dir__ = __all__.copy
