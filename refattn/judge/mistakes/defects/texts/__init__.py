"""Texts that are joined to the printed formulas: calls, draws, and other ways to compute them."""

from __future__ import annotations

__all__: list[str] = []
__dir__ = __all__.copy
