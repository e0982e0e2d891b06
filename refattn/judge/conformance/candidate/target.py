"""Import a candidate by its name, in the process that judges it or in one of its own."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

from ....arrays.words import close, said


def import_target(target: str) -> Any:
    """Import the object MODULE:NAME or MODULE:NAME.NAME, from the current directory too."""
    module, colon, name = target.partition(":")
    if not (module and colon and name):
        raise ValueError(f"the target must be MODULE:CALLABLE, got {target!r}.")
    if "/" in module or module.startswith("."):
        file = module.removesuffix(".py").rpartition("/")[2].lstrip(".")
        raise ValueError(
            f"the target must name a module, not a path, got {target!r}: "
            f"run it in the folder of the file, as {file}:{name}."
        )
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        target_object = import_module(module)
        for part in name.split("."):
            target_object = getattr(target_object, part)
    except (ImportError, AttributeError) as error:
        file = module.removesuffix(".py")
        hint = f". Did you mean {file}:{name}?" if module.endswith(".py") else ""
        if isinstance(error, AttributeError) and error.name:
            hint = f".{close(error.name, dir(error.obj))}"
        raise ValueError(f"cannot import {target!r}: {said(error)}{hint}") from None
    except BaseException as error:  # also SystemExit and the like
        kind = type(error).__name__
        raise ValueError(f"importing {module!r} failed: {kind}: {said(error)}") from None
    if not callable(target_object):
        kind = type(target_object).__name__
        raise ValueError(f"the target must be callable, got {target!r} of type {kind}.")
    return target_object
