"""What kernels do wrong: `causes` explains wrong numbers, `defects` are known bugs as edits."""

__all__ = []
__dir__ = __all__.copy
