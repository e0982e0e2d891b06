"""Figures of one style, drawn without a display."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["COLOURS", "INK", "key", "panels", "small", "style"]

INK = "#0b0c0d"  # replaced by the colour of the text where a figure is shown on a page
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # Okabe and Ito


def style() -> AbstractContextManager[None]:
    """Settings in effect while a figure is made; legends need them as much as axes do."""
    import matplotlib
    from cycler import cycler

    options: Any = {
        **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor"), INK),
        **dict.fromkeys(("xtick.color", "ytick.color", "legend.labelcolor"), INK),
        **dict.fromkeys(("patch.edgecolor", "hatch.color"), INK),
        **dict.fromkeys(("figure.facecolor", "axes.facecolor"), "none"),
        **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
        "axes.prop_cycle": cycler(color=COLOURS),
        "font.size": 9,
        "axes.titlesize": 9,
        "legend.frameon": False,
        "grid.alpha": 0.25,
    }
    return matplotlib.rc_context(options)


def panels(
    rows: int = 1, columns: int = 1, *, size: tuple[float, float] = (6.4, 3.8), **options: Any
) -> tuple[Figure, Any]:
    """Make a figure of panels, an array (rows, columns) of axes, in the style of the suite."""
    from matplotlib.figure import Figure

    with style():
        figure = Figure(figsize=size, layout="constrained")
        return figure, figure.subplots(rows, columns, squeeze=False, **options)


def small() -> tuple[Figure, Any]:
    """Make a figure to stand beside a few lines of text, and its axes."""
    figure, ((axes,),) = panels(size=(2.9, 1.7))
    return figure, axes


def key(axes: Any, **options: Any) -> None:
    """Name the lines of a small figure within its axes."""
    legend = axes.legend(fontsize=8, handlelength=1.2, **options)
    legend.remove()  # and back as any other artist, which nothing moves out of the axes
    axes.add_artist(legend)
