"""What the commands print, draw and write."""

from __future__ import annotations

__all__ = []
__dir__ = __all__.copy
