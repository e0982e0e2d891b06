"""Arithmetics that formulas may run on: array types with the array API, for any estimator."""

__all__ = []
__dir__ = __all__.copy
