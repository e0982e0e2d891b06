"""The look of figures: colours, marks, ticks, and names of curves beside the axes.

Figures are of the width of a column or a page of a paper. Curves differ in colour, marker and
dashes, so that they can be told apart in grey too. It imports matplotlib where it draws.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .page import FIGURE_FORMATS as FIGURE_FORMATS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # Okabe and Ito
INK = "#0b0c0d"
GREY = "#8c8c8c"
PALE = "#d9d9d9"
MARKERS = "osD^vP*X<>hd"
DASHES = ("-", "--", "-.", ":")

COLUMN, PAGE = 3.5, 7.2  # widths in inches


def mark(i: int) -> dict[str, Any]:
    """Return colour, marker and dashes of a curve by its number; 48 differ.

    >>> mark(1)
    {'color': '#d55e00', 'marker': 's', 'linestyle': '--'}
    """
    return {
        "color": COLOURS[i % len(COLOURS)],
        "marker": MARKERS[i % len(MARKERS)],
        "linestyle": DASHES[(i + i // len(MARKERS)) % len(DASHES)],
    }


def style(**changes: Any) -> AbstractContextManager[None]:
    """Settings in effect while a figure is made; legends need them as much as axes do."""
    import matplotlib
    from cycler import cycler

    options: Any = {
        **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor"), INK),
        **dict.fromkeys(("xtick.color", "ytick.color", "legend.labelcolor"), INK),
        **dict.fromkeys(("patch.edgecolor", "hatch.color"), INK),
        **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
        **dict.fromkeys(("axes.titlesize", "axes.labelsize", "legend.fontsize"), 8),
        **dict.fromkeys(("xtick.labelsize", "ytick.labelsize"), 7),
        "axes.titlelocation": "left",
        "font.size": 8,
        "figure.titlesize": 8,
        "lines.linewidth": 1.2,
        "lines.markersize": 4,
        "errorbar.capsize": 2,
        "legend.frameon": False,
        "grid.alpha": 0.25,
        "axes.prop_cycle": cycler(color=COLOURS),
        **changes,
    }
    return matplotlib.rc_context(options)


def panels(
    rows: int = 1, columns: int = 1, *, size: tuple[float, float], **options: Any
) -> tuple[Figure, Any]:
    """Make a figure of panels, an array (rows, columns) of axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def save(figure: Figure, path: Path) -> None:
    """Write a file of the format that its name ends in, the same in every run."""
    import matplotlib

    kind = path.suffix.lower().removeprefix(".")
    dates = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    with matplotlib.rc_context({"svg.hashsalt": "refattn"}):
        figure.savefig(path, format=kind, dpi=300, metadata=dates.get(kind))


# Ticks.


def number(x: float) -> str:
    r"""Write a number of an axis in few signs.

    >>> number(0.05), number(1000), number(1e-6)
    ('0.05', '1000', '$10^{-6}$')
    """
    if 1e-4 <= abs(x) < 1e5 or x == 0:
        return f"{x:g}"
    factor, power = f"{x:.1e}".split("e")
    times = "" if factor == "1.0" else f"{float(factor):g} \\cdot "
    return f"${times}10^{{{int(power)}}}$"


def few(values: Iterable[float], share: float = 0.13) -> list[float]:
    """Choose the numbers that a logarithmic axis has room for: the ends, and some between.

    >>> few([8, 9, 10, 32, 128])
    [8, 32, 128]
    """
    ordered = sorted(set(values))
    if len(ordered) < 2:
        return ordered
    gap = share * math.log(ordered[-1] / ordered[0])
    kept = [ordered[-1]]
    for x in reversed(ordered):
        if math.log(kept[-1] / x) >= gap:
            kept.append(x)
    return [ordered[0], *kept[-2::-1]] if len(kept) > 1 else [ordered[0], ordered[-1]]


def decades(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers of a logarithmic axis: powers of 10, and multiples of these if few.

    >>> decades(0.04, 3), decades(1e-3, 1e4, most=4)
    ([0.05, 0.1, 0.2, 0.5, 1.0, 2.0], [0.001, 0.1, 10.0, 1000.0])
    """
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1, 1.5, 2, 2.5, 3, 4, 5, 6, 8), (1, 2, 5), (1, 3), (1,)):
        ticks = [float(f"{s}e{p}") for p in powers for s in steps if low <= s * 10.0**p <= high]
        if len(ticks) <= most:
            break
    return ticks[:: -(-len(ticks) // most)]


# Names of curves.


class Label(NamedTuple):
    """The name of a curve, where the curve ends, and how it is drawn."""

    text: str
    end: tuple[float, float] | None  # None if there is no curve to point at
    style: dict[str, Any]


def apart(heights: Sequence[float], gap: float) -> list[float]:
    """Move heights in [0, 1] so that they are a gap apart, in the same order.

    >>> apart([0.5, 0.5, 0.0], 0.25)
    [0.5, 0.75, 0.0]
    """
    count = len(heights)
    order = np.argsort(heights, kind="stable")
    room = max(1.0, (count - 1) * gap)
    low = (1.0 - room) / 2
    at = np.asarray(heights, dtype=float)[order]
    for i in range(count):
        at[i] = max(at[i], at[i - 1] + gap if i else low)
    for i in reversed(range(count)):
        at[i] = min(at[i], at[i + 1] - gap if i + 1 < count else low + room)
    out = np.empty(count)
    out[order] = at
    return [float(x) for x in out]


def beside(panels: Mapping[Any, Sequence[Label]], size: float = 7) -> None:
    """Name the curves of each axes on their right, in the order of their ends, with lines to these.

    The limits of the axes must be final.
    """
    for axes in panels:
        axes.get_figure().draw_without_rendering()  # for the height of the axes
        break
    for axes, labels in panels.items():
        _write_label(axes, labels, size)


def _write_label(axes: Any, labels: Sequence[Label], size: float) -> None:
    from matplotlib.legend import Legend
    from matplotlib.lines import Line2D
    from matplotlib.transforms import ScaledTranslation

    figure = axes.get_figure()
    to_axes = axes.transData + axes.transAxes.inverted()
    ends = [(1.0, 0.0) if x.end is None else to_axes.transform(x.end) for x in labels]
    heights = [min(max(float(y), 0.0), 1.0) for _, y in ends]
    height = axes.get_window_extent().height * 72 / figure.dpi  # points
    away = axes.transAxes + ScaledTranslation(size / 72, 0, figure.dpi_scale_trans)
    for label, (x, _), y, at in zip(
        labels, ends, heights, apart(heights, 1.25 * size / height), strict=True
    ):
        if label.end is not None:
            axes.annotate(
                *("", (float(x), y), (1.0, at), "axes fraction", away),
                arrowprops={
                    "arrowstyle": "-",
                    "color": label.style["color"],
                    "linewidth": 0.5,
                    "shrinkA": 0,
                    "shrinkB": 2,
                },
                annotation_clip=False,
            )
        name = Legend(
            axes,
            [Line2D([], [], **({"linestyle": ""} | label.style if label.style else {}))],
            [label.text],
            loc="center left",
            bbox_to_anchor=(1.0, at),
            prop={"size": size},
            borderpad=0,
            borderaxespad=1.0,
            handlelength=2.4 if label.style else 0,
            handletextpad=0.5 if label.style else 0,
        )
        axes.add_artist(name)
        name.set_clip_on(False)  # or the layout leaves it out
