"""The implementation under test: how it is called."""

from __future__ import annotations

__all__ = []


def __dir__() -> list[str]:
    return __all__
