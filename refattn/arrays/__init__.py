"""Arrays of any library: the steps of the engine that know nothing of attention."""

__all__ = []
__dir__ = __all__.copy
