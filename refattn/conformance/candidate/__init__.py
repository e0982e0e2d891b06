"""The implementation under test: how it is called."""

from __future__ import annotations

__all__ = []
__dir__ = __all__.copy
