"""Work with arrays of any library: arithmetic, blocks, threads and checks, without attention."""

__all__ = []
__dir__ = __all__.copy
