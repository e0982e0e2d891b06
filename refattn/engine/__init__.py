"""How estimators are computed: in blocks, on threads, in linear time where it can be."""

__all__ = []
__dir__ = __all__.copy
