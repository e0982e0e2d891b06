"""Reference implementation of random-feature attention for every array library.

Submodules load when first used: ``import refattn`` is enough for ``refattn.sampling``.
"""

from importlib import import_module

from ._version import __version__ as __version__

# The stub for type checkers has each name once: `from HOME import NAME as NAME`.
with open(f"{__file__.removesuffix('c').removesuffix('py')}pyi", encoding="utf-8") as _stub:
    _HOMES = {x[3]: x[1] for x in map(str.split, _stub) if x[:1] == ["from"]}
_HOMES.pop("__version__")
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES[name]
    if home == ".":
        return import_module(f".{name}", __name__)
    return getattr(import_module(home, __name__), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
