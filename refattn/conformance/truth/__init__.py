"""What is right, and to how many digits."""

from __future__ import annotations

__all__ = []
__dir__ = __all__.copy
