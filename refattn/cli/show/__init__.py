"""What the commands print, draw and write."""

__all__ = []
__dir__ = __all__.copy
