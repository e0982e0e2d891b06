"""The figures that the command line draws."""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from . import profile as study
from . import verification
from ._text import printable
from .compare import Row
from .profile import Profile

if TYPE_CHECKING:
    from ._show import Verified

__all__ = ["plot_comparison", "plot_profile", "plot_verified"]

_Array = npt.NDArray[Any]

_LABELS = {**dict(zip(study.LAWS, study.LAWS, strict=True)), "ra": "ra (bound)"}


def plot_verified(found: Verified, path: Path) -> None:
    """Draw z of the worst head over queries and columns, its histogram, and rms z by tile."""
    from matplotlib.figure import Figure

    part = found.parts[found.verdict.of]
    judged = (part.problem, part.numbers, found.tensors.dtype, found.verdict.by)
    squares, counts = verification.z_by_row(*judged)
    if not squares.size:
        raise ValueError("there is nothing to draw: the output is empty.")
    means = np.sum(squares, -1) / np.maximum(np.sum(counts, -1), 1)
    worst = tuple(map(int, np.unravel_index(int(np.argmax(means)), part.problem.lead)))
    z = verification.z_of_head(*judged, worst)
    figure = Figure(figsize=(11, 7), layout="constrained")
    panels = figure.subplot_mosaic(
        [["map", "map"], ["histogram", "tiles"]], gridspec_kw={"width_ratios": [2, 3]}
    )
    _plot_map(figure, panels["map"], z, worst)
    _plot_histogram(panels["histogram"], z)
    _plot_tiles(figure, panels["tiles"], squares, counts, part.problem.lead)
    figure.suptitle(_title(found), fontsize=10)
    figure.savefig(path, format="png", dpi=130)


_LINE = 120  # characters of a title


def _title(found: Verified) -> str:
    """File, verdict and first suspect, or where the deviation is surest, in short lines."""
    verdict = found.verdict
    first = str(verdict).splitlines()[0].partition(" (")[0]
    first += f"; {verdict.of}" if verdict.parts else ""
    said = [f"{found.tensors.path.name}: {first} (z by profile {verdict.by})"]
    if verdict.suspects and verdict.verdict == "FAIL":
        said.append(verdict.suspects[0].text)
    elif verdict.verdict == "FAIL" and verdict.tests:
        tiles = [x for x in verdict.tests if x.where not in ("", "all")]
        said.append(f"{tiles[0].name}: {tiles[0].where}")
    return "\n".join(y for x in said for y in textwrap.wrap(printable(x), _LINE))


_Z = 6.0  # colours end there
_WIDTH = 512  # queries, or groups of them, of a map


def _plot_map(figure: Any, axes: Any, z: _Array, worst: tuple[int, ...]) -> None:
    n, columns = z.shape
    group = -(-n // _WIDTH)
    shown = z
    if group > 1:  # the largest of neighbours, with its sign
        padded = np.concatenate([z, np.full((-n % group, columns), np.nan)])
        parts = padded.reshape(-1, group, columns)
        at = np.argmax(np.nan_to_num(np.abs(parts), nan=-1.0), axis=1, keepdims=True)
        shown = np.take_along_axis(parts, at, 1)[:, 0]
    axes.set_facecolor("0.6")
    image = axes.imshow(
        shown.T,
        aspect="auto",
        cmap="RdBu_r",
        vmin=-_Z,
        vmax=_Z,
        interpolation="nearest",
        extent=(-0.5, n - 0.5, columns - 0.5, -0.5),
    )
    figure.colorbar(image, ax=axes, extend="both", label="z", fraction=0.03, pad=0.01)
    several = f", the largest of {group}" if group > 1 else ""
    axes.set_xlabel(f"query{several}")
    axes.set_ylabel("column")
    largest = float(np.nanmax(np.abs(z), initial=0.0))
    unknown = float(np.mean(np.isnan(z)))
    grey = f"; grey, {unknown:.0%}: no law, or not finite" if unknown else ""
    head = f" of head {_index(worst)}" if worst else ""
    axes.set_title(
        f"z = error / standard deviation{head}: largest |z| {largest:.3g}{grey}", fontsize=10
    )


def _plot_histogram(axes: Any, z: _Array) -> None:
    known = z[~np.isnan(z)]
    end = min(max(5.0, math.ceil(float(np.max(np.abs(known), initial=0.0)))), 12.0)
    edges = np.linspace(-end, end, 61)
    at = (edges[1:] + edges[:-1]) / 2
    normal = np.exp(-at * at / 2) / math.sqrt(2 * math.pi) * (known.size * (edges[1] - edges[0]))
    axes.hist(np.clip(known, -end, end), bins=edges, color="C0", label="z")
    axes.plot(at, normal, color="C1", label="normal")
    if known.size:
        axes.set_yscale("log")
        axes.set_ylim(bottom=0.5)
    axes.set_xlabel("z" + (f", beyond {end:g} at the ends" if np.any(np.abs(known) > end) else ""))
    axes.set_ylabel("elements")
    rms = math.sqrt(float(np.mean(known * known))) if known.size else math.nan
    axes.set_title(f"the same head: rms z {rms:.3g}", fontsize=10)
    axes.legend()


def _plot_tiles(
    figure: Any, axes: Any, squares: _Array, counts: _Array, lead: tuple[int, ...]
) -> None:
    heads, n = squares.shape
    size = 16
    while n / size > 64:
        size *= 2
    cut = np.arange(0, n, size)
    total, number = (np.add.reduceat(x, cut, axis=1) for x in (squares, counts))
    rms = np.sqrt(np.where(number > 0, total / np.maximum(number, 1), np.nan))
    end = min(max(2, math.ceil(math.log2(np.nanmax(rms, initial=1.0)))), 12)
    axes.set_facecolor("0.6")
    image = axes.imshow(
        np.log2(np.maximum(rms, 2.0**-12)),
        aspect="auto",
        cmap="PuOr_r",
        vmin=-end,
        vmax=end,
        interpolation="nearest",
        extent=(0, len(cut) * size, heads - 0.5, -0.5),
    )
    ticks = [x for x in range(-12, 13) if abs(x) <= end and (end < 5 or x % 2 == 0)]
    bar = figure.colorbar(image, ax=axes, extend="both", ticks=ticks)
    bar.ax.set_yticklabels([f"{2.0**x:.4g}" for x in ticks])
    labels = [_index(tuple(map(int, x))) for x in np.ndindex(lead)]
    step = -(-heads // 16)
    axes.set_yticks(range(0, heads, step), labels=labels[::step])
    axes.set_xlim(0, n)
    axes.set_xlabel(f"query, in tiles of {size}")
    axes.set_ylabel("head")
    axes.set_title("rms z by tile", fontsize=10)


def _index(head: tuple[int, ...]) -> str:
    return ",".join(map(str, head)) or "-"


def plot_comparison(rows: list[Row], path: Path) -> None:
    """Draw error, mean over heads, against S."""
    from matplotlib.figure import Figure

    curves: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if row.samples is not None:
            point = (row.samples, float(np.mean(row.per_head)))
            curves.setdefault(row.estimator, []).append(point)
    figure = Figure(figsize=(6, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.axhline(float(np.mean(rows[1].per_head)), color="0.5", linestyle=":", label="mean of v")
    for i, row in enumerate(row for row in rows[2:] if row.samples is None):  # has no size
        axes.axhline(float(np.mean(row.per_head)), color=f"C{9 - i % 10}", label=row.estimator)
    if curves:
        _plot_curves(axes, curves, guide=next(iter(curves.values())))
    axes.set_ylabel("relative error, mean over heads")
    axes.legend()
    figure.savefig(path, format="png", dpi=150)


def _plot_curves(
    axes: Any, curves: dict[str, list[tuple[int, float]]], guide: list[tuple[int, float]]
) -> None:
    """Draw error against S, with 1/sqrt(S) through the first point of the guide."""
    for i, (name, points) in enumerate(curves.items()):
        axes.plot(*zip(*points, strict=True), marker="osD^v"[i // 10 % 5], label=name)
    slope = [(s, guide[0][1] * math.sqrt(guide[0][0] / s)) for s, _ in guide]
    axes.plot(*zip(*slope, strict=True), color="0.5", linestyle="--", label="1/sqrt(S)")
    axes.set_xscale("log")
    if any(error > 0 for points in curves.values() for _, error in points):
        axes.set_yscale("log")
    axes.set_xlabel("number of features or samples S")
    axes.set_xticks([s for s, _ in guide], labels=[str(s) for s, _ in guide])
    axes.xaxis.minorticks_off()


def plot_profile(found: Profile, path: Path) -> None:
    """Draw the spectra of q and k and, if there are predictions, error against S."""
    from matplotlib.figure import Figure

    names = list(found.eigenvalues)
    panels = len(names) + bool(found.error)
    figure = Figure(figsize=(4.5 * panels, 4), layout="constrained")
    axes = figure.subplots(1, panels)
    for ax, name in zip(axes, names, strict=False):
        values = found.eigenvalues[name].reshape(-1, found.eigenvalues[name].shape[-1])
        positive = np.where(values > 0, values, math.nan)
        ax.plot(np.arange(1, values.shape[-1] + 1), positive.T, linewidth=0.7)
        if np.any(values > 0):
            ax.set_yscale("log")
        ax.set_xlabel(f"eigenvalue of the covariance of {name}, one line a head")
    axes[0].set_ylabel("size in kernel coordinates")
    if found.error:
        curves = {}
        for name in study.LAWS:
            pairs = zip(found.sizes, found.predictions(name), strict=True)
            points = [(samples, error) for samples, error in pairs if math.isfinite(error)]
            if points:
                curves[_LABELS[name]] = points
        _plot_curves(axes[-1], curves, guide=curves[_LABELS["ra"]])
        axes[-1].legend()
        axes[-1].set_ylabel("predicted relative error, mean over heads")
    figure.savefig(path, format="png", dpi=150)
