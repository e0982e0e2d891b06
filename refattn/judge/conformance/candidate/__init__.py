"""The implementation under test: how it is called."""

__all__ = []
__dir__ = __all__.copy
