"""Short reprs of results, which show the shapes of arrays and not their contents."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from html import escape
from typing import Any, TypeVar

import numpy as np

from .words import printable

_Class = TypeVar("_Class")

_FEW_NUMBERS = 12  # numbers of an array that is shown as it is
_ITEMS = 6  # of a list or dictionary
_LETTERS = 100


def held(*names: str) -> Callable[[type[_Class]], type[_Class]]:
    """Decorate a class of results, a named tuple or dataclass, to show what is in them in short.

    Its `repr` has the fields named, or all; notebooks show a table of all. Arrays are there with
    dtype, shape and range, and as they are where they have few numbers.
    """

    def decorate(cls: type[_Class]) -> type[_Class]:
        def __repr__(self: Any) -> str:
            every = _field_names(self)
            shown = [f"{x}={short(getattr(self, x))}" for x in names or every]
            more = [] if len(shown) == len(every) else ["..."]
            return f"{type(self).__name__}({', '.join(shown + more)})"

        def _repr_html_(self: Any) -> str:
            rows = "".join(
                f'<tr><th scope="row" style="text-align:left">{_safe(x)}</th>'
                f'<td style="text-align:left">{_safe(short(getattr(self, x)))}</td></tr>'
                for x in _field_names(self)
            )
            caption = f'<caption style="text-align:left">{_safe(type(self).__name__)}</caption>'
            return f"<table>{caption}<tbody>{rows}</tbody></table>"

        for method in (__repr__, _repr_html_):
            method.__qualname__ = f"{cls.__qualname__}.{method.__name__}"
            setattr(cls, method.__name__, method)
        return cls

    return decorate


def short(x: Any) -> str:
    """Show a value in short.

    >>> short(np.zeros((2, 128, 64), np.float32)), short(np.ones(2)), short(list(range(100)))
    ('<float32 (2, 128, 64), 0 to 0>', 'array([1., 1.])', '<list of 100 int>')
    """
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return _short_array(x)
    if isinstance(x, str):
        return repr(x if len(x) <= _LETTERS else f"{x[:_LETTERS]}...")
    if isinstance(x, Mapping):
        if len(x) <= _ITEMS:
            return (
                "{" + ", ".join(f"{short(key)}: {short(value)}" for key, value in x.items()) + "}"
            )
        return f"<{type(x).__name__} of {len(x)}: {', '.join(map(short, list(x)[:3]))}, ...>"
    if type(x) in (list, tuple):
        if len(x) <= _ITEMS and all(isinstance(item, str | int | float | None) for item in x):
            inside = ", ".join(map(short, x))
            return f"[{inside}]" if type(x) is list else f"({inside}{',' * (len(x) == 1)})"
        kinds = sorted({type(item).__name__ for item in x})
        return f"<{type(x).__name__} of {len(x)} {' and '.join(kinds)}>"
    return repr(x)


def _short_array(x: Any) -> str:
    """Show dtype and shape of an array, and of NumPy the range; or few numbers as they are."""
    shape = tuple(x.shape)
    if all(isinstance(n, int) for n in shape) and math.prod(shape) <= _FEW_NUMBERS:
        return repr(x)
    words = f"{str(x.dtype).rpartition('.')[2]} {shape}"
    if isinstance(x, np.ndarray) and x.dtype.kind in "fiu":
        numbers = x[~np.isnan(x)] if x.dtype.kind == "f" else x
        nans = x.size - numbers.size
        words += f", {numbers.min():.4g} to {numbers.max():.4g}" if numbers.size else ""
        words += f", {nans} nan" if nans else ""
    return f"<{words}>"


def _field_names(x: Any) -> list[str]:
    return [f.name for f in fields(x)] if is_dataclass(x) else list(x._fields)


def _safe(text: str) -> str:
    return escape(printable(text))
