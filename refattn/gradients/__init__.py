"""Gradients of the estimators, by explicit formulas: `vjp`."""

from .rules import Gradients, vjp

__all__ = ["Gradients", "vjp"]
__dir__ = __all__.copy
