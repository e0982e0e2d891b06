"""The command line.

`refattn compare` measures every estimator against exact attention, and recommends one; `refattn
check` checks an implementation, and `refattn verify` the numbers in a file; `refattn tolerance`
computes the tolerance that a correct kernel needs; `refattn vectors` writes golden vectors.
"""

from .process import commands, main

__all__ = ["commands", "main"]
__dir__ = __all__.copy
