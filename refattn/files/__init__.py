"""Files that hold queries, keys and values."""

__all__ = []
__dir__ = __all__.copy
