"""What a run of the checks says."""

from __future__ import annotations

__all__ = []
__dir__ = __all__.copy
