"""What is right, and to how many digits."""

from __future__ import annotations

__all__ = []


def __dir__() -> list[str]:
    return __all__
