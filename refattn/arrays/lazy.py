"""Packages whose names load when they are first used, as listed in their stubs."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module


def load_lazily(
    package: str, file: str
) -> tuple[list[str], Callable[[str], object], Callable[[], list[str]]]:
    """Return `__all__`, `__getattr__` and `__dir__` of a package with a stub beside its file.

    The stub has each name once: `from HOME import NAME as NAME`, where HOME is a dot for a module
    of the package itself.
    """
    with open(f"{file.removesuffix('c').removesuffix('py')}pyi", encoding="utf-8") as stub:
        homes = {x[3]: x[1] for x in map(str.split, stub) if x[:1] == ["from"]}

    def load(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = homes[name]
        if home == ".":
            return import_module(f".{name}", package)
        return getattr(import_module(home, package), name)

    return sorted(x for x in homes if not x.startswith("_")), load, lambda: list(homes)
