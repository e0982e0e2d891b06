"""Table and figure of what `validation.model.measure` found.

Results are an object with ``"settings"``, ``"environment"``, ``"rows"`` (those of `measure.Row`),
``"skipped"`` and ``"tolerated"``: the relative error of attention, in all layers, at which the mean
cosine is at the threshold, by estimator.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from refattn.registry import DEFAULT

from .. import plotting
from ..results import Section
from .measure import EXACT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLE = "What is lost of the embeddings, against S and against cost"

Results = Mapping[str, Any]
Row = Mapping[str, Any]


def overview(results: Results) -> Section:
    """One row for each estimator: the cosine at each S, all else at the largest.

    Of what was replaced first, all layers by default.
    """
    sizes, where = results["settings"]["sizes"], results["settings"]["layers"][0]
    columns = ["estimator", *(f"cosine, S = {s}" for s in sizes), "lowest 5 %", "rank correlation"]
    columns += ["same neighbour", "error", "tolerated", "multiply-adds", "seconds"]
    own: dict[str, dict[int | None, Row]] = {}
    for row in results["rows"]:
        if row["layers"] == where:
            own.setdefault(row["estimator"], {})[row["samples"]] = row
    cells = []
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
    return Section("all layers" if where == "all" else f"layer {where}", columns, cells)


def _pair(row: Row, metric: str) -> str:
    """A value and its standard error."""
    if metric not in row["values"]:
        return ""
    value, spread = row["values"][metric], row["errors"][metric]
    return f"{value:.4f} ± {spread:.4f}" if spread < 0.001 else f"{value:.3f} ± {spread:.3f}"


def _costs(row: Row, results: Results) -> list[str]:
    """Multiply-adds and seconds, as multiples of exact attention in the same layers."""
    return [_optional(_cost(row, results, unit)) for unit in ("multiply_adds", "seconds")]


def _cost(row: Row, results: Results, unit: str) -> float | None:
    exact = next(
        x for x in results["rows"] if (x["estimator"], x["layers"]) == (EXACT, row["layers"])
    )
    return None if row[unit] is None or not exact[unit] else row[unit] / exact[unit]


def _optional(x: float | None) -> str:
    return "" if x is None else f"{x:.2g}" if x < 100 else f"{x:.0f}"


_NOTHING = 1e-4  # the loss at which estimators that are exact there are drawn


def figure(results: Results) -> Figure:
    """Draw 1 - cosine against multiply-adds, or seconds where none were counted, and against S.

    Losses of less than 1e-4, as where all keys are kept, are drawn there. Bars are standard errors.
    """
    where = results["settings"]["layers"][0]
    rows = [x for x in results["rows"] if x["layers"] == where and x["estimator"] != EXACT]
    unit = "multiply_adds" if all(x["multiply_adds"] is not None for x in rows) else "seconds"
    drawn = _drawn(rows)
    with plotting.style():
        drawing, ((left, right),) = plotting.panels(1, 2, size=(7.2, 3.6), sharey=True)
        sizes = sorted({row["samples"] for own in drawn.values() for row in own})
        least = min(_cost(row, results, unit) or 1.0 for own in drawn.values() for row in own)
        most = max(_cost(row, results, unit) or 1.0 for own in drawn.values() for row in own)
        _set_axis(left.xaxis, min(least, 1.0) / 1.5, max(most, 1.0) * 1.5)
        _set_axis(right.xaxis, sizes[0] / 1.3, sizes[-1] * 1.3, sizes)
        _set_axis(left.yaxis, _NOTHING / 1.3, 1.3)
        ticks = [_NOTHING, *(10.0**p for p in range(-3, 1))]
        left.set_yticks(ticks, [f"≤{_NOTHING:g}", *map(plotting.number, ticks[1:])])
        reference = {"color": plotting.INK, "linewidth": 0.8, "linestyle": (0, (1, 1))}
        threshold = results["tolerated"]["threshold"]
        labels = [plotting.Label(f"cosine {threshold:g}", (sizes[-1], 1 - threshold), reference)]
        for axes in (left, right):
            axes.grid(True)
            axes.axhline(1 - threshold, **reference)
        left.axvline(1, **reference)
        for i, (name, own) in enumerate(drawn.items()):
            marked = plotting.mark(i)
            lost = [max(1 - row["values"]["cosine"], _NOTHING) for row in own]
            reach = [
                row["errors"]["cosine"] * (x > _NOTHING) for row, x in zip(own, lost, strict=True)
            ]
            below = [min(s, x - _NOTHING) for s, x in zip(reach, lost, strict=True)]
            costs = [_cost(row, results, unit) for row in own]
            left.errorbar(costs, lost, (below, reach), **marked)
            right.errorbar([row["samples"] for row in own], lost, (below, reach), **marked)
            labels.append(plotting.Label(name, (own[-1]["samples"], lost[-1]), marked))
        cost = "multiply-adds" if unit == "multiply_adds" else "seconds"
        left.set(
            xlabel=f"{cost} of attention\n/ those of exact attention",
            ylabel="1 - mean cosine to the exact embedding",
        )
        right.set_xlabel("number S of features,\nsamples, keys, ...")
        plotting.beside({right: labels})
    return drawing


def _set_axis(axis: Any, low: float, high: float, ticks: Sequence[float] | None = None) -> None:
    """Make an axis logarithmic, with few ticks."""
    name = axis.axis_name
    axis.axes.set(**{f"{name}scale": "log", f"{name}lim": (low, high)})
    ticks = plotting.decades(low, high) if ticks is None else ticks
    axis.set_ticks(ticks, labels=[plotting.number(x) for x in ticks])
    axis.minorticks_off()


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
