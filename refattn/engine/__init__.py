"""How estimators are computed: in blocks, on threads, in linear time where it can be."""

from __future__ import annotations

__all__ = []


def __dir__() -> list[str]:
    return __all__
