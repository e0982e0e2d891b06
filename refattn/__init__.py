"""Reference implementation of random-feature attention for every array library.

Submodules load when first used: ``import refattn`` is enough for ``refattn.sampling``.
"""

from ._version import __version__ as __version__
from .arrays.lazy import load_lazily

__all__, __getattr__, __dir__ = load_lazily(__name__, __file__)
