"""Causes of failures: alternatives that are tested as verdicts are, and how they are named."""

__all__: list[str] = []


def __dir__() -> list[str]:
    return __all__
