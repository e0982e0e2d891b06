"""`refattn.judge.testing` by the name that test files know."""

from .judge import testing
from .judge.testing import *  # noqa: F403

__all__ = testing.__all__
__dir__ = __all__.copy
del testing
