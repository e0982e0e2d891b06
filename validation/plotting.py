"""Figures of one style, drawn without a display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np

from refattn.cli.show import style as show_style
from refattn.cli.show.style import (
    COLOURS,
    GREY,
    INK,
    MARKERS,
    PALE,
    Label,
    beside,
    decades,
    few,
    mark,
    number,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# INK is replaced by the colour of the text where a figure is shown on a page.
__all__ = [
    "COLOURS",
    "GREY",
    "INK",
    "MARKERS",
    "PALE",
    "Label",
    "beside",
    "columns",
    "decades",
    "few",
    "key",
    "mark",
    "number",
    "outside",
    "panels",
    "small",
    "style",
    "tidy",
]


def style() -> AbstractContextManager[None]:
    """Settings in effect while a figure is made: those of the package, on no background."""
    return show_style.style(**dict.fromkeys(("figure.facecolor", "axes.facecolor"), "none"))


def panels(
    rows: int = 1, columns: int = 1, *, size: tuple[float, float] = (6.4, 3.8), **options: Any
) -> tuple[Figure, Any]:
    """Make a figure of panels, an array (rows, columns) of axes, in the style of the suite."""
    with style():
        return show_style.panels(rows, columns, size=size, **options)


def columns(rows: Sequence[Mapping[str, Any]], *keys: str) -> list[Any]:
    """Return the values of each key in all rows."""
    return [np.array([row[key] for row in rows]) for key in keys]


def tidy(figure: Figure) -> None:
    """Give each colour a marker of its own, logarithmic axes few ticks, and legends their place."""
    from matplotlib.lines import Line2D
    from matplotlib.ticker import LogLocator

    marks = dict(zip((*COLOURS, INK), MARKERS, strict=False))
    for line in figure.findobj(Line2D):
        if line.get_marker() in ("o", "."):
            line.set_marker(marks.get(str(line.get_color()), "o"))
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            if isinstance(axis.get_major_locator(), LogLocator) and axis.get_visible():
                low, high = sorted(axis.get_view_interval())
                ticks = decades(low, high)
                if len(ticks) > 1:
                    axis.set_ticks(ticks, labels=[number(x) for x in ticks])
                    axis.minorticks_off()
    outside(figure)


def outside(figure: Figure) -> None:
    """Move legends off the data: to the right of a single panel, below those of a row.

    Below, the figure grows by what they take.
    """
    from matplotlib.transforms import ScaledTranslation

    legends: dict[Any, Any] = {axes: axes.get_legend() for axes in figure.axes}
    legends = {axes: legend for axes, legend in legends.items() if legend is not None}
    for legend in legends.values():
        legend.set_in_layout(False)
    figure.draw_without_rendering()
    single = len(figure.axes) == 1
    grown = 0.0
    for axes, legend in legends.items():
        legend.set_in_layout(True)
        if single:
            legend.set_loc("center left")
            legend.set_bbox_to_anchor((1.0, 0.5), axes.transAxes)
            continue
        taken = axes.xaxis.get_tightbbox()
        bottom = axes.get_window_extent().y0
        depth = (bottom - (bottom if taken is None else taken.y0)) / figure.dpi
        below = ScaledTranslation(0, -depth, figure.dpi_scale_trans)
        legend.set_loc("upper center")
        legend.set_bbox_to_anchor((0.5, 0.0), axes.transAxes + below)
        grown = max(grown, legend.get_window_extent().height / figure.dpi)
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + grown)


def small() -> tuple[Figure, Any]:
    """Make a figure to stand beside a few lines of text, and its axes."""
    figure, ((axes,),) = panels(size=(2.9, 1.7))
    return figure, axes


def key(axes: Any, **options: Any) -> None:
    """Name the lines of a small figure within its axes."""
    legend = axes.legend(fontsize=8, handlelength=1.2, **options)
    legend.remove()  # and back as any other artist, which nothing moves out of the axes
    axes.add_artist(legend)
