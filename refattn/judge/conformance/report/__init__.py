"""What a run of the checks says."""

__all__ = []
__dir__ = __all__.copy
