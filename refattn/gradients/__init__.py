"""Gradients of the estimators, by explicit formulas: `vjp`."""

from __future__ import annotations

from .rules import Gradients, vjp

__all__ = ["Gradients", "vjp"]


def __dir__() -> list[str]:
    return __all__
