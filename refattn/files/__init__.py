"""Files that hold queries, keys and values."""

from __future__ import annotations

__all__ = []
__dir__ = __all__.copy
