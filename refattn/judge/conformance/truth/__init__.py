"""The results that candidates are compared with, and the errors that rounding is allowed."""

__all__ = []
__dir__ = __all__.copy
