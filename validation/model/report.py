"""Tables, JSON and figure of what `validation.model.measure` found.

``results.json`` is an object with ``"version"`` (1; a change that breaks readers adds 1),
``"settings"``, ``"environment"``, ``"rows"`` (those of `measure.Row`), ``"skipped"`` and
``"tolerated"``, which is ``tolerated.json`` too: the relative error of attention, in all layers, at
which the mean cosine is at the threshold, by estimator.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from refattn.registry import DEFAULT

from .. import plotting, svg
from .measure import EXACT, LONG

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["figure", "overview", "table", "write"]

VERSION = 1
MARKERS = "osD^vP*X<>hd"
TITLE = "What is lost of the embeddings, against S and against cost"

Results = Mapping[str, Any]
Row = Mapping[str, Any]


def write(results: Results, out: Path) -> list[Path]:
    """Write results.json, results.md, tolerated.json and model.svg."""
    contents = {
        "results.json": json.dumps({"version": VERSION, **results}, indent=1) + "\n",
        "results.md": f"{overview(results)}\n{table(results)}",
        "tolerated.json": json.dumps(results["tolerated"], indent=1) + "\n",
        "model.svg": svg.for_file(svg.draw(figure(results), "model"), TITLE),
    }
    out.mkdir(parents=True, exist_ok=True)
    for name, text in contents.items():
        (out / name).write_text(text, encoding="utf-8")
    return [out / name for name in contents]


def overview(results: Results) -> str:
    """One line for each estimator: the cosine at each S, all else at the largest.

    Of what was replaced first, all layers by default.
    """
    sizes, where = results["settings"]["sizes"], results["settings"]["layers"][0]
    cells = [
        [
            "estimator",
            *(f"cosine, S = {s}" for s in sizes),
            "lowest 5 %",
            "rank correlation",
            "same neighbour",
            "error",
            "tolerated",
            "multiply-adds",
            "seconds",
        ]
    ]
    own: dict[str, dict[int | None, Row]] = {}
    for row in results["rows"]:
        if row["layers"] == where:
            own.setdefault(row["estimator"], {})[row["samples"]] = row
    for name, rows in own.items():
        last = list(rows.values())[-1]
        found = [rows.get(s, rows.get(None)) for s in sizes]
        cells.append(
            [
                name,
                *("" if row is None else _pair(row, "cosine") for row in found),
                *(_pair(last, metric) for metric in ("low", "ranks", "neighbours")),
                f"{last['attention']:.3g}",
                _optional(results["tolerated"]["errors"].get(name)),
                *_costs(last, results),
            ]
        )
    return _markdown(cells)


def table(results: Results) -> str:
    """Every row that was measured."""
    names = {
        "cosine": "cosine",
        "low": "lowest 5 %",
        "long": f"cosine, {LONG} tokens and more",
        "ranks": "rank correlation",
        "neighbours": "same neighbour",
    }
    head = ["layers", "estimator", "S", *names.values(), "error", "multiply-adds", "seconds"]
    cells = [head]
    for row in results["rows"]:
        size = "" if row["samples"] is None else str(row["samples"])
        metrics = [_pair(row, metric) for metric in names]
        error = f"{row['attention']:.3g}"
        cells.append(
            [row["layers"], row["estimator"], size, *metrics, error, *_costs(row, results)]
        )
    return _markdown(cells)


def _pair(row: Row, metric: str) -> str:
    """A value and its standard error."""
    if metric not in row["values"]:
        return ""
    value, spread = row["values"][metric], row["errors"][metric]
    return f"{value:.4f} ± {spread:.4f}" if spread < 0.001 else f"{value:.3f} ± {spread:.3f}"


def _costs(row: Row, results: Results) -> tuple[str, str]:
    """Multiply-adds and seconds, as multiples of exact attention in the same layers."""
    return _optional(_cost(row, results, "multiply_adds")), _optional(
        _cost(row, results, "seconds")
    )


def _cost(row: Row, results: Results, unit: str) -> float | None:
    exact = next(
        x for x in results["rows"] if (x["estimator"], x["layers"]) == (EXACT, row["layers"])
    )
    return None if row[unit] is None or not exact[unit] else row[unit] / exact[unit]


def _optional(x: float | None) -> str:
    return "" if x is None else f"{x:.2g}" if x < 100 else f"{x:.0f}"


def _markdown(cells: Sequence[Sequence[str]]) -> str:
    head, *rest = cells
    rule = ["---"] + ["--:"] * (len(head) - 1)
    return "".join(f"| {' | '.join(line)} |\n" for line in [head, rule, *rest])


_NOTHING = 1e-4  # the loss at which estimators that are exact there are drawn


def figure(results: Results) -> Figure:
    """Draw 1 - cosine against S and against multiply-adds, or seconds where none were counted.

    Losses of less than 1e-4, as where all keys are kept, are drawn there.
    """
    where = results["settings"]["layers"][0]
    rows = [x for x in results["rows"] if x["layers"] == where and x["estimator"] != EXACT]
    unit = "multiply_adds" if all(x["multiply_adds"] is not None for x in rows) else "seconds"
    drawn = _drawn(rows)
    drawing, ((left, right),) = plotting.panels(1, 2, size=(9.6, 4.2), sharey=True)
    ends = []
    for i, (name, own) in enumerate(drawn.items()):
        style: dict[str, Any] = {
            "color": plotting.COLOURS[i % 6],
            "marker": MARKERS[i % len(MARKERS)],
        }
        style |= {"linestyle": ("-", "--")[i // 6 % 2], "markersize": 5}
        lost = [max(1 - row["values"]["cosine"], _NOTHING) for row in own]
        left.plot([row["samples"] for row in own], lost, **style)
        right.plot([_cost(row, results, unit) for row in own], lost, **style)
        ends.append((lost[-1], name, style["color"]))
    threshold = results["tolerated"]["threshold"]
    for axes in (left, right):
        axes.set(xscale="log", yscale="log")
        axes.axhline(1 - threshold, color=plotting.INK, linewidth=0.8, linestyle=":")
        axes.grid(True)
    right.axvline(1, color=plotting.INK, linewidth=0.8, linestyle=":")
    left.set(xlabel="S", ylabel="1 - mean cosine to the exact embedding")
    cost = "multiply-adds" if unit == "multiply_adds" else "seconds"
    right.set_xlabel(f"{cost} of attention / those of exact attention")
    sizes = sorted({row["samples"] for own in drawn.values() for row in own})
    left.set_xticks(sizes, [str(s) for s in sizes])
    left.minorticks_off()
    heights = _apart([height for height, _, _ in ends], *left.get_ylim())
    for axes in (left, right):
        axes.text(
            0.01,
            1 - threshold,
            f"cosine {threshold:g}",
            transform=_beside(axes),
            fontsize=7,
            va="bottom",
        )
        for (height, name, colour), at in zip(ends, heights, strict=True):
            axes.annotate(
                name,
                xy=(1, height),
                xytext=(1.05, at),
                xycoords=_beside(axes),
                textcoords=_beside(axes),
                va="center",
                fontsize=8,
                arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.6, "shrinkB": 0},
                annotation_clip=False,
            )
    return drawing


def _drawn(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """What `refattn compare` shows by itself, and what loses least at some S."""
    curves: dict[str, list[Row]] = {}
    for row in rows:
        if row["samples"] is not None:
            curves.setdefault(row["estimator"], []).append(row)
    sizes = {row["samples"] for own in curves.values() for row in own}
    best = set(DEFAULT)
    for size in sizes:
        at = {name: row for name, own in curves.items() for row in own if row["samples"] == size}
        ranked = sorted(at, key=lambda name: -at[name]["values"]["cosine"])
        best |= set(ranked[:3])
    return {name: own for name, own in curves.items() if name in best}


def _beside(axes: Any) -> Any:
    """Coordinates with the height of the data and the width of the panel."""
    return axes.get_yaxis_transform()


def _apart(heights: Sequence[float], low: float, high: float, gap: float = 0.045) -> list[float]:
    """Heights of labels on a logarithmic axis, in the same order and not on top of each other."""
    order = np.argsort(heights)
    at = np.log(np.asarray(heights)[order] / low) / np.log(high / low)
    for i in range(1, len(at)):
        at[i] = max(at[i], at[i - 1] + gap)
    for i in reversed(range(len(at))):
        at[i] = min(at[i], 1.0 if i == len(at) - 1 else at[i + 1] - gap)
    out = np.empty(len(at))
    out[order] = low * (high / low) ** at
    return [float(x) for x in out]
