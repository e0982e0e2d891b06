"""The implementation under test: what it is declared to take, and how it is called."""

__all__ = []
__dir__ = __all__.copy
