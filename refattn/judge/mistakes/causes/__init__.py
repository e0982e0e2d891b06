"""Causes of failures: alternatives that are tested as verdicts are, and how they are named."""

__all__: list[str] = []
__dir__ = __all__.copy
