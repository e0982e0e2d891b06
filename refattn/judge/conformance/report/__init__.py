"""Run the checks of a candidate, and report what failed, what it resembles and what to do."""

__all__ = []
__dir__ = __all__.copy
