"""What several figures of the gallery share: labels beside their lines, and plain ticks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def label(axes: Any, text: str, line: Any, at: tuple[float, float], side: int = 1) -> None:
    """Write the name of a line beside one of its points, to the right or (-1) to the left of it."""
    align = "left" if side > 0 else "right"
    shift: Any = {"textcoords": "offset points", "xytext": (9 * side, -3), "ha": align}
    axes.annotate(text, at, **shift, color=line.get_color())


def ticks(axes: Any, x: Iterable[float], y: Iterable[float]) -> None:
    """Put ticks at these numbers, written as they are, and none between."""
    axes.set(xticks=[*x], xticklabels=[*x], yticks=[*y], yticklabels=[*y])
    axes.minorticks_off()
