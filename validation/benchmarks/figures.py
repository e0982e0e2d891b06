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

__all__ = ["figures"]


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
    figure, ((axes,),) = plotting.panels()
    for form in record["forms"]:
        _line(axes, form, [1e6 / n for n in form["at"]])
    axes.set(xlabel="tokens", ylabel="microseconds per token")
    return _finish(figure, axes)


def _against_samples(record: Record) -> Figure:
    figure, ((axes,),) = plotting.panels()
    for form in record["forms"]:
        _line(axes, form, [1.0] * len(form["at"]))
    axes.set(xlabel="samples", ylabel="seconds")
    return _finish(figure, axes)


def _line(axes: Any, form: Record, factors: Sequence[float]) -> None:
    """Medians, with the interquartile range as a band."""
    spread = [
        [factor * x for x in quartiles(seconds)]
        for factor, seconds in zip(factors, form["seconds"], strict=True)
    ]
    lower, median, upper = zip(*spread, strict=True)
    (line,) = axes.plot(form["at"], median, marker="o", markersize=3, label=form["name"])
    axes.fill_between(form["at"], lower, upper, color=line.get_color(), alpha=0.2, linewidth=0)


def _finish(figure: Figure, axes: Any) -> Figure:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.grid(True)
    with plotting.style():
        axes.legend()
    return figure


def _ratios(records: Sequence[Record]) -> Figure:
    """One panel for each dtype, bars with the interquartile range."""
    dtypes = list(dict.fromkeys(record["dtype"] for record in records))
    bars = {dtype: list(_bars(records, dtype)) for dtype in dtypes}
    height = 0.8 + 0.2 * max(len(x) for x in bars.values())
    figure, (panels,) = plotting.panels(
        1, len(dtypes), size=(4.6 * len(dtypes), height), sharex=True
    )
    for axes, dtype in zip(panels, dtypes, strict=True):
        names = [name for name, _ in bars[dtype]]
        median = [x.median for _, x in bars[dtype]]
        below = [x.median - x.lower for _, x in bars[dtype]]
        above = [x.upper - x.median for _, x in bars[dtype]]
        gain = [x - 1 for x in median]  # bars go from 1, as a logarithmic axis has no 0
        error = {"xerr": (below, above), "error_kw": {"elinewidth": 0.8}}
        axes.barh(range(len(names)), gain, left=1, **error)
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.axvline(1, color=plotting.INK, linewidth=0.8)
        axes.set(xscale="log", xlabel="time / time of refattn", title=dtype)
    return figure


def _bars(records: Sequence[Record], dtype: str) -> Iterator[tuple[str, Any]]:
    for record in records:
        for form in record["forms"][1:]:
            ratio = compare(record, form["name"])
            if record["dtype"] == dtype and ratio is not None:
                yield f"{record['case']}: {form['name']}", ratio
