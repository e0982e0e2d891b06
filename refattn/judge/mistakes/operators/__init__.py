"""Operators: where a mistake is and which map it follows is inferred from wrong rows, then said."""

__all__: list[str] = []
__dir__ = __all__.copy
