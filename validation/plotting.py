"""Figures of one style, drawn without a display."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["COLOURS", "INK", "panels"]

INK = "#0b0c0d"  # replaced by the colour of the text where a figure is shown on a page
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # Okabe and Ito


def panels(
    rows: int = 1, columns: int = 1, *, size: tuple[float, float] = (6.4, 3.8), **options: Any
) -> tuple[Figure, Any]:
    """Make a figure of panels, an array (rows, columns) of axes, in the style of the suite."""
    import matplotlib
    from cycler import cycler
    from matplotlib.figure import Figure

    style: Any = {
        **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor"), INK),
        **dict.fromkeys(("xtick.color", "ytick.color", "legend.labelcolor"), INK),
        **dict.fromkeys(("figure.facecolor", "axes.facecolor"), "none"),
        **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
        "axes.prop_cycle": cycler(color=COLOURS),
        "font.size": 9,
        "axes.titlesize": 9,
        "legend.frameon": False,
        "grid.alpha": 0.25,
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=size, layout="constrained")
        return figure, figure.subplots(rows, columns, squeeze=False, **options)
