"""What is right, and to how many digits."""

__all__ = []
__dir__ = __all__.copy
