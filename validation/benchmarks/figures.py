"""Figures of the times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from .. import plotting
from . import scaling
from .cases import Record, compare
from .timing import quartiles

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def figures(sections: dict[str, list[Record]]) -> Iterator[tuple[str, str, Figure]]:
    """Name, title and figure of what was measured."""
    for record in sections.get("scaling", ()):
        if record["case"] == scaling.LENGTH:
            yield "tokens", "Time per token against the number of tokens", _per_token(record)
        else:
            yield "samples", "Time against the number of samples", _against_samples(record)
    if sections.get("estimators"):
        yield "ratios", "Time of other forms over that of refattn", _ratios(sections["estimators"])


def _per_token(record: Record) -> Figure:
    labels = ("number of tokens", "time per token, microseconds")
    return _times(record, [[1e6 / n for n in form["at"]] for form in record["forms"]], *labels)


def _against_samples(record: Record) -> Figure:
    labels = ("number of features or proposals S", "time, seconds")
    return _times(record, [[1.0] * len(form["at"]) for form in record["forms"]], *labels)


def _times(record: Record, factors: Sequence[Sequence[float]], xlabel: str, ylabel: str) -> Figure:
    """Medians, with the interquartile range as bars."""
    with plotting.style():
        figure, ((axes,),) = plotting.panels(size=(4.6, 2.8))
        axes.set(xscale="log", yscale="log", xlabel=xlabel, ylabel=f"{ylabel}\n(bars: quartiles)")
        labels = []
        for i, (form, by) in enumerate(zip(record["forms"], factors, strict=True)):
            times = [quartiles(seconds) for seconds in form["seconds"]]
            median = [f * x.median for f, x in zip(by, times, strict=True)]
            below = [f * (x.median - x.lower) for f, x in zip(by, times, strict=True)]
            above = [f * (x.upper - x.median) for f, x in zip(by, times, strict=True)]
            axes.errorbar(form["at"], median, (below, above), **plotting.mark(i))
            labels.append(
                plotting.Label(form["name"], (form["at"][-1], median[-1]), plotting.mark(i))
            )
        ticks = plotting.few(n for form in record["forms"] for n in form["at"])
        axes.set_xticks(ticks, [str(n) for n in ticks])
        low, high = axes.get_ylim()
        axes.set_ylim(low, high)
        ticks = plotting.decades(low, high)
        axes.set_yticks(ticks, [plotting.number(x) for x in ticks])
        axes.minorticks_off()
        axes.grid(True)
        plotting.beside({axes: labels})
    return figure


def _ratios(records: Sequence[Record]) -> Figure:
    """Draw the median of each dtype, with the interquartile range, a line for each form."""
    dtypes = list(dict.fromkeys(record["dtype"] for record in records))
    found = {dtype: dict(_bars(records, dtype)) for dtype in dtypes}
    names = list(dict.fromkeys(name for rows in found.values() for name in rows))
    with plotting.style():
        figure, ((axes,),) = plotting.panels(size=(7.2, 1.0 + 0.17 * len(names)))
        for i, (dtype, rows) in enumerate(found.items()):
            shift = (i - (len(dtypes) - 1) / 2) * 0.3
            axes.errorbar(
                [x.median for x in rows.values()],
                [names.index(name) + shift for name in rows],
                xerr=(
                    [x.median - x.lower for x in rows.values()],
                    [x.upper - x.median for x in rows.values()],
                ),
                label=dtype,
                **plotting.mark(i) | {"linestyle": ""},
            )
        axes.set(xscale="log", xlabel="time / time of refattn (bars: quartiles)")
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.axvline(1, color=plotting.INK, linewidth=0.8)
        low, high = axes.get_xlim()
        axes.set_xlim(low, high)
        ticks = plotting.decades(low, high)
        axes.set_xticks(ticks, [plotting.number(x) for x in ticks])
        axes.minorticks_off()
        axes.grid(True)
        figure.legend(loc="outside upper right", ncols=len(dtypes))
    return figure


def _bars(records: Sequence[Record], dtype: str) -> Iterator[tuple[str, Any]]:
    for record in records:
        for form in record["forms"][1:]:
            ratio = compare(record, form["name"])
            if record["dtype"] == dtype and ratio is not None:
                yield f"{record['case']}: {form['name']}", ratio
