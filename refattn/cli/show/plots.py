"""The figures that the command line draws."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...arrays.library import Floats
from ...arrays.words import head_number, printable
from ...compare import Advice
from ...compare.advice import LAWS
from ...compare.measured import Row
from ...judge.verification.findings import as_cause
from ...judge.verification.z_scores import z_by_row, z_of_head
from ...registry import ESTIMATORS
from . import style

if TYPE_CHECKING:
    from .verdicts import Verified


def plot_verified(verified: Verified, path: Path) -> None:
    """Draw z of the worst head over queries and columns, its histogram, and rms z by tile."""
    from matplotlib.figure import Figure

    part = verified.parts[verified.verdict.of]
    judged = (part.problem, part.numbers, verified.tensors.dtype, verified.verdict.by)
    squares, counts = z_by_row(*judged)
    if not squares.size:
        raise ValueError("there is nothing to draw: the output is empty.")
    means = np.sum(squares, -1) / np.maximum(np.sum(counts, -1), 1)
    worst = part.problem.index_of(int(np.argmax(means)))
    z = z_of_head(*judged, worst)
    with style.style():
        figure = Figure(figsize=(style.PAGE, 5.2), layout="constrained")
        panels = figure.subplot_mosaic(
            [["map", "map"], ["histogram", "tiles"]], gridspec_kw={"width_ratios": [1, 1]}
        )
        _plot_map(figure, panels["map"], z, worst)
        _plot_tiles(figure, panels["tiles"], squares, counts, part.problem.lead)
        _plot_histogram(panels["histogram"], z)
        figure.suptitle(_title(verified))
        style.save(figure, path)


_LINE = 100  # characters of a title


def _title(verified: Verified) -> str:
    """Return file, verdict and first suspect, or the surest deviation, in short lines."""
    verdict = verified.verdict
    first = str(verdict).splitlines()[0].partition(" (")[0]
    first += f"; {verdict.of}" if verdict.parts else ""
    said = [f"{verified.tensors.path.name}: {first} (z by profile {verdict.by})"]
    if verdict.suspects and verdict.verdict == "FAIL":
        said.append(as_cause(verdict.suspects[0].text))
    elif verdict.verdict == "FAIL" and verdict.tests:
        tiles = [x for x in verdict.tests if x.where not in ("", "all")]
        said.append(f"{tiles[0].name}: {tiles[0].where}")
    return "\n".join(y for x in said for y in textwrap.wrap(printable(x), _LINE))


_Z = 6.0  # colours end there
_MAP_WIDTH = 512  # queries, or groups of them, of a map


def _plot_map(figure: Any, axes: Any, z: Floats, worst: tuple[int, ...]) -> None:
    n, columns = z.shape
    group = -(-n // _MAP_WIDTH)
    shown = z
    if group > 1:  # the largest of neighbours, with its sign
        padded = np.concatenate([z, np.full((-n % group, columns), np.nan)])
        parts = padded.reshape(-1, group, columns)
        at = np.argmax(np.nan_to_num(np.abs(parts), nan=-1.0), axis=1, keepdims=True)
        shown = np.take_along_axis(parts, at, 1)[:, 0]
    extent = (-0.5, n - 0.5, columns - 0.5, -0.5)
    image = _draw_map(axes, shown.T, extent, "RdBu_r", (-_Z, _Z))
    figure.colorbar(image, ax=axes, extend="both", label="z", fraction=0.03, pad=0.01, aspect=25)
    several = f", the largest of {group}" if group > 1 else ""
    axes.set_xlabel(f"query{several}")
    axes.set_ylabel("column")
    largest = float(np.nanmax(np.abs(z), initial=0.0))
    unknown = float(np.mean(np.isnan(z)))
    grey = f"; hatched, {unknown:.0%}: no prediction, or not finite" if unknown else ""
    head = f" of head {head_number(worst)}" if worst else ""
    axes.set_title(f"z = error / standard deviation{head}: largest |z| {largest:.3g}{grey}")


def _draw_map(
    axes: Any, x: Floats, extent: Sequence[float], colours: str, limits: tuple[float, float]
) -> Any:
    """Draw numbers as colours; what has none is marked in a way that is none of the map's."""
    axes.patch.set(facecolor="white", edgecolor=style.GREY, hatch="/////", linewidth=0)
    looks: Any = {"aspect": "auto", "interpolation": "nearest", "extent": extent}
    return axes.imshow(x, cmap=colours, vmin=limits[0], vmax=limits[1], **looks)


def _plot_histogram(axes: Any, z: Floats) -> None:
    known = z[~np.isnan(z)]
    end = min(max(5.0, math.ceil(float(np.max(np.abs(known), initial=0.0)))), 12.0)
    edges = np.linspace(-end, end, 61)
    at = (edges[1:] + edges[:-1]) / 2
    normal = np.exp(-at * at / 2) / math.sqrt(2 * math.pi) * (known.size * (edges[1] - edges[0]))
    counts, _ = np.histogram(np.clip(known, -end, end), bins=edges)
    axes.stairs(counts, edges, fill=True, color=style.COLOURS[-1])
    axes.plot(at, normal, color=style.INK, linestyle="--")
    if known.size:
        axes.set_yscale("log")
        ticks = style.decades(1, 2 * max(1, int(max(counts))), most=5)
        axes.set_ylim(0.5, 3 * max(1.0, float(max(counts)), float(max(normal))))
        axes.set_yticks(ticks, [f"{x:g}" for x in ticks])
        axes.minorticks_off()
    axes.set_xlabel("z" + (f", beyond {end:g} at the ends" if np.any(np.abs(known) > end) else ""))
    axes.set_ylabel("elements")
    rms = math.sqrt(float(np.mean(known * known))) if known.size else math.nan
    axes.set_title(f"the same head: rms z {rms:.3g}; dashed: normal")


_PALEST = -2  # log2 of the rms z at which colours begin


def _plot_tiles(
    figure: Any, axes: Any, squares: Floats, counts: Floats, lead: tuple[int, ...]
) -> None:
    heads, n = squares.shape
    size = 16
    while n / size > 64:
        size *= 2
    cut = np.arange(0, n, size)
    total, number = (np.add.reduceat(x, cut, axis=1) for x in (squares, counts))
    rms = np.sqrt(np.where(number > 0, total / np.maximum(number, 1), np.nan))
    end = min(max(4, math.ceil(math.log2(np.nanmax(rms, initial=1.0)))), 12)
    logs, extent = np.log2(np.maximum(rms, 2.0**-12)), (0, len(cut) * size, heads - 0.5, -0.5)
    image = _draw_map(axes, logs, extent, "YlOrBr", (_PALEST, end))  # dark is wrong, in grey too
    ticks = [x for x in range(_PALEST, end + 1) if end < 5 or x % 2 == 0]
    bar = figure.colorbar(image, ax=axes, extend="both", ticks=ticks, fraction=0.06, pad=0.02)
    bar.ax.set_yticklabels([f"{2.0**x:.4g}" for x in ticks])
    labels = [head_number(tuple(map(int, x))) for x in np.ndindex(lead)]
    step = -(-heads // 16)
    axes.set_yticks(range(0, heads, step) if lead else [], labels=labels[::step] if lead else [])
    axes.set_xlim(0, n)
    axes.set_xlabel(f"query, in tiles of {size}")
    axes.set_ylabel("head" if lead else "")
    axes.set_title("rms z by tile")


_CURVES = 8  # curves of a panel


_USELESS = 6  # times the error of the mean of v, beyond which errors are not told apart


class _ErrorScale(NamedTuple):
    """A logarithmic axis of errors; those of rounding, and useless ones, are drawn at its ends."""

    foot: float
    top: float
    rounding: float  # errors up to this are drawn at the foot
    said: float  # the largest of these
    cut: bool  # whether there are errors beyond the top

    def at(self, error: float) -> float:
        return self.foot if error <= self.rounding else min(error, self.top)


def plot_comparison(rows: list[Row], path: Path) -> None:
    """Draw error, mean over heads, against S, with its standard error over draws.

    More than eight estimators are drawn in a panel for each kind of S, over all others in grey.
    """
    curves: dict[str, list[Row]] = {}
    for row in rows[2:]:
        if np.all(np.isfinite(row.per_head)):
            curves.setdefault(row.estimator, []).append(row)
    if not curves and not any(math.isfinite(_mean_error(row)) for row in rows[:2]):
        raise ValueError("there is nothing to draw: no error is finite.")
    names = list(dict.fromkeys(row.estimator for row in rows[2:]))
    families = [("", names)] if len(names) <= _CURVES else _families(names)
    guide = [(x.samples, _mean_error(x)) for x in curves.get(names[0], ()) if x.samples is not None]
    columns = min(len(families), 2)
    lines = -(-len(families) // 2)
    size = (style.PAGE, 0.35 + 1.95 * lines) if columns == 2 else (style.COLUMN, 2.6)
    with style.style():
        figure, grid = style.panels(lines, columns, size=size, sharex=True, sharey=True)
        panels = [*grid.flat][: len(families)]
        for axes in grid.flat[len(families) :]:
            axes.remove()
        scale = _scale_of(rows)
        _set_axes(panels, curves, scale)
        for axes in panels[-columns:]:
            axes.tick_params(labelbottom=True)
        named = {}
        for axes, (title, family) in zip(panels, families, strict=True):
            axes.set_title(title)
            labels = _draw_references(axes, rows, scale)
            labels += _draw_family(axes, curves, family, scale)
            if len(families) == 1:
                labels += _draw_guide(axes, guide)
            named[axes] = labels
        error = "relative error, mean over heads"
        bars = "bars: standard error over draws"
        if len(families) == 1:
            things = ", ".join(sorted({_thing(name) for name in names} - {"no size"}))
            counted = "\n".join(textwrap.wrap(things or "features", 32))
            panels[0].set(xlabel=f"number S of {counted}", ylabel=f"{error}\n({bars})")
        else:
            figure.supxlabel("S: number of features, samples or tokens (see titles)", fontsize=8)
            figure.supylabel(f"{error} ({bars})", fontsize=8)
        style.beside(named)
        style.save(figure, path)


def _mean_error(row: Row) -> float:
    return float(np.mean(row.per_head))


def _thing(name: str) -> str:
    """Name the thing that the size of an estimator counts."""
    size = ESTIMATORS[name].size if name in ESTIMATORS else None
    return "no size" if size is None else size.removeprefix("num_").replace("_", " ")


def _families(names: Iterable[str]) -> list[tuple[str, list[str]]]:
    """Group estimators by the thing that S counts, at most eight in each."""
    by_thing: dict[str, list[str]] = {}
    for name in names:
        by_thing.setdefault(_thing(name), []).append(name)
    families = []
    for thing, family in by_thing.items():
        parts = [family[i : i + _CURVES] for i in range(0, len(family), _CURVES)]
        for i, part in enumerate(parts):
            which = f", {i + 1} of {len(parts)}" if len(parts) > 1 else ""
            families.append((thing + which, part))
    return families


def _scale_of(rows: Sequence[Row]) -> _ErrorScale:
    means = [_mean_error(row) for row in rows if np.all(np.isfinite(row.per_head))]
    rounding = 10 * _mean_error(rows[0])
    rounding = rounding if math.isfinite(rounding) else 0.0
    seen = [x for x in means[1:] if x > rounding] or [1.0]
    bars = [_mean_error(x) + x.standard_error for x in rows[2:] if math.isfinite(x.standard_error)]
    top = 1.1 * max([*seen, *(x for x in bars if math.isfinite(x))])
    most = _USELESS * _mean_error(rows[1])
    cut = rounding < most < max(seen)
    said = max(x for x in [*means, 0.0] if x <= rounding)
    return _ErrorScale(
        min(seen) / 2.5, min(top, most) if most > rounding else top, rounding, said, cut
    )


def _set_axes(
    panels: Sequence[Any], curves: Mapping[str, Sequence[Row]], scale: _ErrorScale
) -> None:
    """Set scales, limits and ticks, which all panels share."""
    axes = panels[0]
    sizes = sorted({row.samples for x in curves.values() for row in x if row.samples is not None})
    _set_sizes(axes, sizes or [1])
    axes.set_yscale("log")
    axes.set_ylim(scale.foot / 1.15, scale.top * 1.15)
    ticks = style.decades(1.6 * scale.foot, scale.top / (1.4 if scale.cut else 1))
    said = [style.number(x) for x in ticks]
    least = f"≤{scale.said:.0e}" if scale.said else "0"
    most = ([scale.top], [f"≥{scale.top:.2g}"]) if scale.cut else ([], [])
    axes.set_yticks([scale.foot, *ticks, *most[0]], [least, *said, *most[1]])
    axes.yaxis.minorticks_off()
    for axes in panels:
        axes.grid(True)


def _set_numbers(axes: Any, low: float, high: float, named: bool = True) -> None:
    """Make a logarithmic axis with a grid and round numbers."""
    ticks = style.decades(low, high)
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    axes.set_yticks(ticks, [style.number(x) if named else "" for x in ticks])
    axes.yaxis.minorticks_off()


def _set_sizes(axes: Any, sizes: Sequence[int]) -> None:
    """Make an axis of S, with ticks at those that were used."""
    axes.set_xscale("log")
    room = (sizes[-1] / sizes[0]) ** 0.06 if len(sizes) > 1 else 2.0
    axes.set_xlim(sizes[0] / room, sizes[-1] * room)
    ticks = style.few(sizes)
    axes.set_xticks(ticks, [str(s) for s in ticks])
    axes.xaxis.minorticks_off()


def _draw_family(
    axes: Any, curves: Mapping[str, Sequence[Row]], family: Sequence[str], scale: _ErrorScale
) -> list[style.Label]:
    """Draw some estimators over all others in grey, and name them."""
    labels = []
    for name, rows in curves.items():
        sized = [row for row in rows if row.samples is not None]
        if name not in family:
            axes.plot(
                [row.samples for row in sized],
                [scale.at(_mean_error(row)) for row in sized],
                color=style.PALE,
                linewidth=0.7,
                zorder=0.5,
            )
    for i, name in enumerate(family):
        rows = curves.get(name, ())
        drawn = style.mark(i)
        if not rows:
            labels.append(style.Label(f"{name}: not finite", None, {}))
            continue
        errors = [scale.at(_mean_error(row)) for row in rows]
        if rows[0].samples is None:  # has no size
            del drawn["marker"]
            axes.axhline(errors[0], **drawn)
            at = axes.get_xlim()[1]
        else:
            at = rows[-1].samples
            spread = [
                row.standard_error if scale.foot < y < scale.top and len(row.errors) > 1 else 0.0
                for row, y in zip(rows, errors, strict=True)
            ]
            reach = (
                [min(s, y - scale.foot) for s, y in zip(spread, errors, strict=True)],
                [min(s, scale.top - y) for s, y in zip(spread, errors, strict=True)],
            )
            bars = {"yerr": reach, "elinewidth": 0.8} if any(spread) else {}
            axes.errorbar([row.samples for row in rows], errors, **bars, **drawn)
        worst = max(map(_mean_error, rows))
        said = f"{name} (to {worst:.3g})" if worst > scale.top else name
        labels.append(style.Label(said, (at, errors[-1]), drawn))
    return labels


def _draw_references(axes: Any, rows: Sequence[Row], scale: _ErrorScale) -> list[style.Label]:
    labels: list[style.Label] = []
    for name, row, colour, dashes in (
        ("exact", rows[0], style.INK, "-"),
        ("mean of v", rows[1], style.GREY, (0, (1, 1))),
    ):
        if not math.isfinite(_mean_error(row)):
            labels.append(style.Label(f"{name}: not finite", None, {}))
            continue
        drawn = {"color": colour, "linestyle": dashes, "linewidth": 0.9}
        axes.axhline(scale.at(_mean_error(row)), zorder=0.8, **drawn)
        labels.append(style.Label(name, (axes.get_xlim()[1], scale.at(_mean_error(row))), drawn))
    return labels


def _draw_guide(axes: Any, points: Sequence[tuple[int, float]]) -> list[style.Label]:
    """Draw 1/sqrt(S) through the first of some points."""
    if len(points) < 2 or points[0][1] <= axes.get_ylim()[0]:
        return []
    first, error = points[0]
    line = [(s, error * math.sqrt(first / s)) for s, _ in points]
    drawn = {"color": style.GREY, "linestyle": (0, (6, 3)), "linewidth": 0.9}
    axes.plot(*zip(*line, strict=True), zorder=0.7, **drawn)
    return [style.Label("slope 1/√S", line[-1], drawn)]


def plot_advice(advice: Advice, path: Path) -> None:
    """Draw the spectra of q and k and, if there are predictions, error against S."""
    names = list(advice.eigenvalues)
    count = len(names) + bool(advice.error)
    with style.style():
        widths = [1.0] * len(names) + [1.25] * bool(advice.error)
        figure, (panels,) = style.panels(
            1,
            count,
            size=(style.PAGE if advice.error else 5.0, 2.5),
            gridspec_kw={"width_ratios": widths},
        )
        _plot_spectra(panels[: len(names)], advice)
        if advice.error:
            _plot_predictions(panels[-1], advice)
        style.save(figure, path)


_THINGS = {"q": "queries", "k": "keys"}


def _plot_spectra(panels: Sequence[Any], advice: Advice) -> None:
    """Plot eigenvalues of each head in grey, and their median, on one scale."""
    spectra = {name: x.reshape(-1, x.shape[-1]) for name, x in advice.eigenvalues.items()}
    known = np.concatenate([x[x > 0] for x in spectra.values()])
    for i, (axes, (name, values)) in enumerate(zip(panels, spectra.items(), strict=True)):
        rank = np.arange(1, values.shape[-1] + 1)
        positive = np.where(values > 0, values, math.nan)
        heads = len(values)
        if heads > 1:
            axes.plot(rank, positive.T, color=style.GREY, alpha=0.6, linewidth=0.5)
        middle = np.median(values, axis=0)
        axes.plot(rank, np.where(middle > 0, middle, math.nan), color=style.COLOURS[0])
        said = f"{heads} heads, their median" if heads > 1 else "1 head"
        axes.set_title(f"{_THINGS.get(name, name)}:\n{said}", fontsize=7)
        axes.set_xlabel("rank of the eigenvalue")
        if known.size:
            _set_numbers(axes, float(known.min()) / 1.3, 1.3 * float(known.max()), i == 0)
        axes.grid(True)
    panels[0].set_ylabel("eigenvalue of the covariance,\nin kernel coordinates")


_LABELS = {x: x for x in LAWS} | {"ra": "ra (bound)"}


def _plot_predictions(axes: Any, advice: Advice) -> None:
    """Plot errors by the formulas, with standard errors if some queries were left out."""
    curves: dict[str, list[tuple[int, float, float]]] = {}
    for name in LAWS:
        triples = zip(
            advice.sizes, advice.predictions(name), advice.standard_errors(name), strict=True
        )
        curves[name] = [x for x in triples if math.isfinite(x[1])]
    errors = [error for points in curves.values() for _, error, _ in points if error > 0]
    _set_sizes(axes, advice.sizes)
    _set_numbers(axes, min(errors, default=0.1) / 1.5, 1.5 * max(errors, default=1.0))
    axes.grid(True)
    axes.set_title("predicted errors", fontsize=7)
    axes.set(xlabel="number of features or samples S", ylabel="relative error, mean over heads")
    labels = []
    for i, (name, points) in enumerate(curves.items()):
        if not points:
            labels.append(style.Label(f"{_LABELS[name]}: outside regime", None, {}))
            continue
        sizes, values, spread = zip(*points, strict=True)
        bars = {"yerr": spread} if any(x > 0 for x in spread) else {}
        axes.errorbar(sizes, values, **bars, **style.mark(i))
        labels.append(style.Label(_LABELS[name], (sizes[-1], values[-1]), style.mark(i)))
    style.beside({axes: labels})
