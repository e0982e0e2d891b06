"""Arrays of any library: the steps of the engine that know nothing of attention."""

from __future__ import annotations

__all__ = []


def __dir__() -> list[str]:
    return __all__
