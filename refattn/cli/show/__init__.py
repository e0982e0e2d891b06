"""What the commands print, draw and write."""

from __future__ import annotations

__all__ = []


def __dir__() -> list[str]:
    return __all__
