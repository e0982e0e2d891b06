"""What the command line shows: tables, JSON, plots."""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
import numpy.typing as npt

from . import profile as study
from . import verification
from ._problems import CALLED, Problem
from ._tables import COLOURS, Page, Table
from ._tensors import Tensors
from ._text import portable, printable
from ._version import __version__
from .compare import Comparison, Row, listed, tolerated
from .profile import Choice, Profile, Search
from .registry import ESTIMATORS
from .tolerance import LEVEL, Tolerance

__all__ = [
    "Verified",
    "checked",
    "comparison",
    "comparison_to_json",
    "notices",
    "plot_comparison",
    "plot_profile",
    "plot_verified",
    "profile",
    "profile_to_json",
    "tolerances",
    "tolerances_to_json",
    "verified",
    "verified_to_json",
]

_Array = npt.NDArray[Any]

# Moments that a narrow page leaves out, the first of them first.
_LEAST = (("5%", "95%"), ("rank q", "rank k"), ("cond q", "cond k"), "SDERF", "OPRF")

_LABELS = {**dict(zip(study.LAWS, study.LAWS, strict=True)), "ra": "ra (bound)"}


_STATUS = re.compile(rf"^(  )?({'|'.join(filter(str.isupper, COLOURS))})\b", re.MULTILINE)


def _coloured(report: str) -> str:
    """A report of checks, its verdict and statuses in colour."""
    return _STATUS.sub(lambda found: click.style(found[0], COLOURS[found[2]]), report)


def checked(report: Any, reproducers: bool, page: Page) -> None:
    """Print a report of checks, and scripts that show its failures."""
    if page.markdown:
        _checks(report, page)
    else:
        page.block(_coloured(str(report)))
    for result in report.results if reproducers else ():
        if result.reproducer:
            page.block(printable(f"\n# {result.check}\n{result.reproducer}").removesuffix("\n"))


def _checks(report: Any, page: Page) -> None:
    """Print a report of checks as a table."""
    page.say(str(report).splitlines()[0])
    for line in (report.conclusion, *report.diagnosis):
        page.say(printable(line))
    table = Table("check", "status", "finding", left=("status", "finding"))
    for x in report.results:
        likeness = f" (like: {'; '.join(x.likeness)})" if x.likeness and x.status == "FAIL" else ""
        finding = "; ".join([f"{x.summary}{likeness}", *x.shortfalls])
        table.add_row(x.check, x.status, printable(finding))
    for name, why in report.not_tried.items():
        table.add_row(name, "not tried", printable(why))
    page.table(table)
    for name, text in report.limits.items():
        page.say(printable(f"limit of the verdict: {name}: {text}"))
    page.say(report.guarantee)


class Verified(NamedTuple):
    """A file, and what is said of it."""

    tensors: Tensors
    problem: Problem
    parts: Mapping[str, verification.Part]
    verdict: verification.Verdict

    def unread(self) -> Iterator[str]:
        """What the file holds that was not judged or not used, a line each."""
        shapes = self.tensors.shapes
        if "d_out" in shapes and not {"dq", "dk", "dv"} & {*shapes}:
            yield "d_out is not used: there is no dq, dk or dv"
        if "omega" in shapes and self.problem.kind != "frequencies":
            yield "omega is not used: it is for --estimator rfa"
        if "lse" in shapes and ("out" not in shapes or self.parts["out"].numbers.lse is None):
            yield f"lse is not judged for {CALLED[self.problem.kind]}"
        if self.tensors.others:
            yield f"not read: {', '.join(self.tensors.others)}"


def verified(found: Verified, after: bool, page: Page) -> None:
    """Print the verdict on a file, after another or not."""
    if after:
        page.say()
    page.say(_introduction(found.tensors, found.problem, found.tensors.dtype))
    for line in found.unread():
        page.say(printable(line))
    text = printable(str(found.verdict))
    page.block(text if page.markdown else _coloured(text))


def _introduction(tensors: Tensors, problem: Problem, dtype: str) -> str:
    """Name of the file, shapes, dtype, and the conventions, in two lines."""
    shapes = ", ".join(f"{name} {x}" for name, x in tensors.shapes.items())
    rounded = f" rounded to {dtype}" if tensors.dtype != dtype else ""
    said = [
        CALLED[problem.kind],
        f"scale {problem.scale:.6g}",
        "causal" if problem.causal else "not causal",
    ]
    if problem.window != (None, None):
        said.append(f"window {','.join('' if x is None else str(x) for x in problem.window)}")
    if problem.softcap is not None:
        said.append(f"softcap {problem.softcap:g}")
    said += [f"with {x}" for x in ("mask", "bias", "sinks") if x in tensors.shapes]
    name = click.format_filename(tensors.path.name)
    return printable(f"{name}: {shapes}, {tensors.dtype}{rounded}\n{', '.join(said)}")


def _source(tensors: Tensors, problem: Problem) -> dict[str, Any]:
    """Versions, what was read, and what it was compared with."""
    conventions = ("scale", "causal", "window", "softcap")
    return {
        "refattn": __version__,
        "numpy": np.__version__,
        "file": tensors.path.name,
        "shapes": {name: list(shape) for name, shape in tensors.shapes.items()},
        "dtypes": tensors.dtypes,
        "estimator": CALLED[problem.kind],
        **{name: getattr(problem, name) for name in conventions},
    }


def verified_to_json(found: Sequence[Verified]) -> str:
    """Format verdicts as JSON: one object, or a list if there are several files.

    Beside what `Verdict.to_json` holds: versions, name of the `file`, `shapes` and `dtypes` of its
    arrays, and the conventions that the numbers were compared with.
    """
    reports = [_source(x.tensors, x.problem) | json.loads(x.verdict.to_json()) for x in found]
    return _dump(reports if len(reports) > 1 else reports[0])


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


def tolerances(tensors: Tensors, problem: Problem, found: Tolerance, page: Page) -> None:
    """Print what a correct kernel needs, and what becomes of defects, as tables."""
    page.say(_introduction(tensors, problem, found.dtype))
    page.say("\nWhat a correct kernel needs for |got - exact| <= atol + rtol |exact|, by profile:")
    page.say(f"with probability {1 - LEVEL:.6f} if roundings are independent, and for certain")
    names = ("profile", "atol", "certain", "or rtol", "and atol", "or rtol", "certain")
    table = Table(*names)
    whole = [x for x in found.needs if x.head is None]
    for x in whole:
        pairs = (x.pair.rtol, x.pair.atol, x.proven_pair.rtol, x.proven_pair.atol)
        table.add_row(x.profile, *map(_digits, (x.atol, x.proven, *pairs)))
    page.table(table)
    heads = list(dict.fromkeys(x.head for x in found.needs if x.head is not None))
    if heads:
        page.say("\natol of each head (rtol 0), by profile")
        table = Table("head", *(x.profile for x in whole))
        for head in heads:
            needs = [_digits(x.atol) for x in found.needs if x.head == head]
            table.add_row(_index(head), *needs)
        page.table(table, split=True)
    of = math.prod(found.lead) * found.rows
    page.say(
        f"\nWhat lets a defect pass: largest error over what is allowed, for kernels of profile "
        f"{found.profile} (rounded to nearest), of {of} of "
        f"{math.prod(problem.lead) * problem.shape[0]} queries"
    )
    _power(found, page)
    for name, pair in (("yours", found.given), ("needed", found.ours)):
        page.say(f"{name}: atol {_digits(pair.atol)}, rtol {_digits(pair.rtol)}")
    if found.power[0].given > 1:
        page.say("yours is too little for a correct kernel")


def _power(found: Tolerance, page: Page) -> None:
    """Print what becomes of each defect."""
    last = "which takes it for"
    names = ("defect", "yours", "", "needed", " ", "verify", last)
    table = Table(*names, drop=(last, "yours", "needed"), left=(last,))
    for row in found.power:
        cells = []
        for ratio in (row.given, row.ours):
            cells += [_digits(ratio), "passes" if ratio <= 1 else "fails"]
        table.add_row(f"{row.defect} {row.size}".strip(), *cells, row.verdict, row.suspect)
    page.table(table)


def tolerances_to_json(tensors: Tensors, problem: Problem, found: Tolerance) -> str:
    """Format what `tolerance.study` returns as JSON; what is not finite becomes null."""
    report = found._asdict() | {
        "needs": [
            x._asdict() | {y: getattr(x, y)._asdict() for y in ("pair", "proven_pair")}
            for x in found.needs
        ],
        "power": [x._asdict() for x in found.power],
        "given": found.given._asdict(),
        "ours": found.ours._asdict(),
    }
    return _dump(_source(tensors, problem) | report)


def comparison(
    path: Path, arrays: dict[str, _Array], found: Comparison, per_head: bool, page: Page
) -> None:
    """Print the results as tables."""
    rows = found.rows
    page.say(
        f"{_heading(path, arrays)}\n"
        f"scale {found.scale:.6g}, {'causal' if found.causal else 'not causal'}, "
        f"seed {found.seed}, draws {found.draws}; errors relative to exact attention in float64"
    )
    reference, limits = rows[0].seconds, tolerated()
    heads = ("S", "mean error", "±", "worst head", "which", "seconds", "ratio", "tolerated")
    table = Table("estimator", *heads, drop=("which", "worst head", "seconds", "tolerated"))
    for row in rows:
        table.add_row(
            row.estimator,
            "" if row.samples is None else str(row.samples),
            _digits(np.mean(row.per_head)),
            _uncertainty(row.standard_error) if _draws(row) else "",
            _digits(np.max(row.per_head)),
            _index(row.worst_head),
            *_times(row.seconds, reference),
            _digits(limits.errors[row.estimator]) if row.estimator in limits.errors else "",
        )
    page.table(table)
    page.say(
        f"±: standard error over draws; tolerated: mean error in all layers of {limits.model} "
        f"that takes the {limits.measure} to {limits.threshold:g}"
    )
    if per_head:
        page.say()
        columns = [r.estimator + ("" if r.samples is None else f"@{r.samples}") for r in rows]
        table = Table("head", *columns)
        for head in np.ndindex(rows[0].per_head.shape):
            table.add_row(_index(head), *(_digits(row.per_head[head]) for row in rows))
        page.table(table, split=True)


def _draws(row: Row) -> bool:
    """Whether its numbers depend on the draw."""
    return row.estimator in ESTIMATORS and ESTIMATORS[row.estimator].has("random")


def notices(found: Comparison) -> Iterator[str]:
    """What was left out of a comparison, a line each."""
    if found.skipped:
        yield f"skipped: {listed(found.skipped)}"
    part = {row.queries: list[str]() for row in found.rows if row.queries is not None}
    for row in found.rows:
        if row.queries is not None and row.estimator not in part[row.queries]:
            part[row.queries].append(row.estimator)
    for queries, names in part.items():
        yield (
            f"{', '.join(names)}: on {queries} evenly spaced queries of each head, seconds in "
            "proportion (--all-queries takes all)"
        )


def _heading(path: Path, arrays: dict[str, _Array]) -> str:
    """Name of the file, shapes and dtype."""
    shapes = ", ".join(f"{name} {x.shape}" for name, x in arrays.items())
    return f"{click.format_filename(path.name)}: {shapes}, {arrays['q'].dtype}"


def _index(head: tuple[int, ...]) -> str:
    return ",".join(map(str, head)) or "-"


def _times(seconds: float | None, reference: float | None) -> tuple[str, str]:
    if seconds is None or reference is None:
        return "", ""
    return f"{seconds:.2g}", _digits(seconds / reference)


def _digits(value: Any) -> str:
    return f"{value:#.3g}".rstrip(".")


def comparison_to_json(path: Path, arrays: dict[str, _Array], found: Comparison) -> str:
    """Format the results as JSON; what is not finite becomes null."""
    reference, limits = found.rows[0].seconds, tolerated()
    report = {
        **_origin(path, arrays),
        "scale": found.scale,
        "causal": found.causal,
        "seed": found.seed,
        "draws": found.draws,
        "results": [
            {
                "estimator": row.estimator,
                "samples": row.samples,
                "error_mean": float(np.mean(row.per_head)),
                "standard_error": row.standard_error if _draws(row) else 0.0,
                "error_worst": float(np.max(row.per_head)),
                "worst_head": list(row.worst_head),
                "queries": row.queries,
                "seconds": row.seconds,
                "ratio": row.seconds and reference and row.seconds / reference,
                "error_tolerated": limits.errors.get(row.estimator),
                "error_per_head": row.per_head.tolist(),
                "error_per_draw": row.errors.tolist(),
            }
            for row in found.rows
        ],
        "skipped": [entry._asdict() for entry in found.skipped],
        "tolerated": {x: y for x, y in limits._asdict().items() if x != "errors"},
    }
    return _dump(report)


def _origin(path: Path, arrays: dict[str, _Array]) -> dict[str, Any]:
    """Versions, and what was read."""
    return {
        "refattn": __version__,
        "numpy": np.__version__,
        "file": path.name,
        "shapes": {name: list(x.shape) for name, x in arrays.items()},
        "dtype": str(arrays["q"].dtype),
    }


def _dump(report: Any) -> str:
    return json.dumps(portable(report), indent=2, allow_nan=False) + "\n"


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


def profile(
    path: Path, arrays: dict[str, _Array], found: Profile, searched: Search | None, page: Page
) -> None:
    """Print the answers as tables."""
    page.say(_heading(path, arrays))
    page.say(
        f"scale {found.scale:.6g}, covariances {'' if found.shrink else 'not '}shrunk, "
        f"not causal; {_worth(found)}"
    )
    page.say(
        "\nMoments in kernel coordinates, sqrt(scale) q and sqrt(scale) k: norm of the mean; "
        "trace, condition and effective rank of the covariance; quantiles of |q_i + k_j|^2"
    )
    labels = {f"{part}_{x}": label.format(x) for part, label in study.PARTS.items() for x in "qk"}
    labels |= {name: f"{p:.0%}" for name, p in study.QUANTILES.items()}
    page.table(_per_head(found, {labels[name]: x for name, x in found.table.items()}))
    if max(found.rows) > study.QUANTILE_ROWS:
        page.say(f"quantiles: over at most {study.QUANTILE_ROWS} evenly spaced queries and keys")
    page.say("\nExpected log excess of the variance of a kernel estimate, by proposal (best: 0)")
    page.table(_per_head(found, found.excess))
    if not found.error:
        page.say("\nFILE has no v: predicted errors and the recommendation are left out.")
        return
    _show_laws(found, page)
    if searched is not None:
        _show_search(searched, found, page)
    _show_recommendation(found, searched, page)


def _show_laws(found: Profile, page: Page) -> None:
    page.say("\nPredicted relative error, mean over heads (ra: an upper bound)")
    table = Table("S", *_LABELS.values(), drop=("rfa-adapted", "is"))
    some = found.queries < found.rows[0]
    outside = False
    for i, samples in enumerate(found.sizes):
        cells = []
        for name in study.LAWS:
            value, share = found.predictions(name)[i], float(np.mean(found.inside[name][i]))
            outside = outside or share < 1
            error = f" ± {found.standard_errors(name)[i]:.1g}" if some else ""
            cells.append(
                _digits(value) + error if share == 1 else f"- ({math.floor(100 * share)}%)"
            )
        table.add_row(str(samples), *cells)
    page.table(table)
    if outside:
        page.say(
            "-: outside the regime of the law (effective sample size below 10) for some queries; "
            "in brackets the share of queries inside"
        )
    page.say(
        f"\nS by the law for relative error {found.target:g}, and the S from which that law holds "
        "for all queries (1 where not shown); fewer may do: --measure tries them"
    )
    columns = []
    for name in found.by_law:
        columns.append((_LABELS[name], found.by_law[name]))
        if np.any(found.holds_from[name] > 1):
            columns.append(("holds from", found.holds_from[name]))
    table = Table("head", *(label for label, _ in columns), drop=("holds from",))
    for head in found.heads:
        table.add_row(_index(head), *(_count(float(x[head])) for _, x in columns))
    page.table(table)
    if some:
        spreads = [f"{100 * float(np.median(x)):.2g}% ({y})" for y, x in found.spread.items()]
        page.say(f"laws: of {found.queries} evenly spaced queries of each head, and all keys;")
        page.say("±: one standard error from this choice; that of S by the law, median over heads:")
        page.say(", ".join(spreads))


def _worth(found: Profile) -> str:
    """Compare the numbers of rows with d^2."""
    n, m = found.rows
    counts = f"n = {n}, m = {m}"
    rough = sorted({x for x in (n, m) if x <= found.advised})
    if not rough:
        return f"{counts}; N > d^2 = {found.advised}, as reference 002 advises"
    listed = " and ".join(map(str, rough))
    sign = "<" if rough[-1] < found.advised else "<="
    return f"{counts}\nN = {listed} {sign} d^2 = {found.advised}: covariances are rough"


def _per_head(found: Profile, columns: dict[str, _Array]) -> Table:
    """Make a table of one row a head, the median and the worst."""
    table = Table("head", *columns, drop=_LEAST)
    for head in found.heads:
        table.add_row(_index(head), *(_cell(x[head]) for x in columns.values()))
    for label, pick in (("median", np.median), ("worst", np.max)):
        cells = []
        for name, x in columns.items():
            known = x[~np.isnan(x)]
            least = label == "worst" and name.startswith("rank")
            cells.append(_cell((np.min if least else pick)(known) if known.size else math.nan))
        table.add_row(label, *cells)
    return table


def _cell(value: Any) -> str:
    return "-" if math.isnan(value) else _digits(value)


def _show_search(searched: Search, found: Profile, page: Page) -> None:
    plan, rows, heads = searched.plan, found.rows[0], len(found.heads)
    page.say(
        f"\nmeasured {len(plan.problems)} estimators, S = 1, 2, 4, ... up to {plan.most}, "
        f"{plan.draws} draws, on {len(plan.heads)} heads"
    )
    page.say(f"Measured: the smallest power of 2 that reaches relative error {plan.target:g}")
    names = ("estimator", "S", "mean error", "±", "worst head", "seconds", "time/exact")
    table = Table(*names, drop=("worst head", "seconds"))
    refused = []
    for candidate in searched.candidates:
        if candidate.reason:
            refused.append(candidate)
        if not candidate.steps:
            continue
        row, choice = candidate.steps[-1], candidate.choice
        samples = "" if row.samples is None else str(row.samples)
        table.add_row(
            candidate.estimator,
            samples if candidate.reached or not samples else f"> {samples}",
            _digits(np.mean(row.errors)),
            _uncertainty(searched.standard_error(row)),
            _digits(np.max(row.per_head)),
            f"{row.seconds:.2g}",
            _digits(choice.cost_ratio),
        )
    page.table(table)
    some = len(plan.heads) < heads
    error = "standard error over draws" + (", and of the choice of heads" if some else "")
    page.say(f"mean of {plan.draws} draws and {len(plan.heads)} heads, ±: {error};")
    page.say("time: of one evaluation in NumPy, relative to exact attention on the same queries")
    if some:
        page.say(f"heads, evenly spaced: {' '.join(map(_index, plan.heads))}")
    part = [x for x, problem in plan.problems.items() if problem.q.shape[-2] == plan.queries]
    if part and plan.queries < rows:
        page.say(f"{', '.join(part)}: on {plan.queries} evenly spaced queries of each head")
    for candidate in refused:
        page.say(f"not tried further: {candidate.estimator}: {candidate.reason}")


def _uncertainty(value: float) -> str:
    """A standard error; nothing where there is no chance, - where it is not known."""
    return "-" if math.isnan(value) else f"{value:.2g}" if value else ""


def _show_recommendation(found: Profile, searched: Search | None, page: Page) -> None:
    heads, target = len(found.heads), f"recommended for relative error {found.target:g}"
    page.say()
    if searched is not None:
        page.say(f"{target}, as measured on {len(searched.plan.heads)} of {heads} heads:")
        for start, choice in zip(("", "then "), searched.ranking, strict=False):
            page.say(f"{start}{_priced(choice, 'time')}")
        return
    page.say("cost: multiply-adds, S (n + m) (d + d_v) for rfa and rfa-adapted, n S m (d + d_v)")
    page.say("for ra and is (at least those of exact attention, which they need: n m (d + d_v))")
    page.say(f"{target}, by the laws where they hold (--measure tries it):")
    chosen: dict[str, list[Choice]] = {}
    for head in found.heads:
        choice = found.recommended(head)
        chosen.setdefault(choice.estimator, []).append(choice)
    for choices in chosen.values():
        middle = sorted(choices, key=lambda choice: choice.cost_ratio)[len(choices) // 2]
        median = " (median)" if len(choices) > 1 and middle.num_features is not None else ""
        page.say(f"{_priced(middle, 'cost')}{median}, for {len(choices)} of {heads} heads")


def _priced(choice: Choice, price: str) -> str:
    """Name an estimator with its S, and its price relative to exact attention."""
    name, samples, ratio = choice
    if name == study.EXACT:
        return name
    size = "" if samples is None else f" with S = {_count(samples)}"
    return f"{name}{size}, {_digits(ratio)} of the {price} of {study.EXACT}"


def _count(value: float) -> str:
    if not math.isfinite(value):
        return "-"
    return f"{value:g}" if value < 1e6 else f"{value:.2e}"


def profile_to_json(
    path: Path, arrays: dict[str, _Array], found: Profile, searched: Search | None = None
) -> str:
    """Format the answers as JSON; what is not finite becomes null.

    heads: one object a head, with its index `head`, `moments` in kernel coordinates
    (what `moments.Summary` holds, and quantiles of |q_i + k_j|^2 in percent), the `eigenvalues` of
    the covariances of q and k, largest first, `log_excess` by proposal, by estimator
    `num_features_by_law` for the target, the S from which its `law_holds_from`, and the
    `relative_standard_error` of the former from the choice of queries, and what is `recommended`
    by the laws. predictions: one object for each estimator and S, with `error_mean` over heads
    (null outside the regime of the law), `error_per_head` (what the law says there too) and
    `share_in_regime_per_head` of the queries. measured: null, or what was measured on which heads,
    for each estimator every S that was tried, and what is `recommended`.
    """
    n, m = found.rows
    heads = []
    for head in found.heads:
        entry: dict[str, Any] = {
            "head": list(head),
            "moments": {name: float(x[head]) for name, x in found.table.items()},
            "eigenvalues": {name: x[head].tolist() for name, x in found.eigenvalues.items()},
            "log_excess": {name: float(x[head]) for name, x in found.excess.items()},
        }
        if found.error:
            entry |= {
                key: {name: float(x[head]) for name, x in of_laws.items()}
                for key, of_laws in (
                    ("num_features_by_law", found.by_law),
                    ("law_holds_from", found.holds_from),
                    ("relative_standard_error", found.spread),
                )
            }
            entry["recommended"] = found.recommended(head)._asdict()
        heads.append(entry)
    return _dump(
        {
            **_origin(path, arrays),
            "scale": found.scale,
            "shrink": found.shrink,
            "target": found.target,
            "count": {"q": n, "k": m},
            "advised_count": found.advised,
            "enough": {"q": n > found.advised, "k": m > found.advised},
            "law_queries": found.queries,
            "heads": heads,
            "measured": None if searched is None else _search_to_dict(searched),
            "predictions": [
                {
                    "estimator": name,
                    "samples": samples,
                    "error_mean": found.predictions(name)[i],
                    "error_per_head": error[i].tolist(),
                    "share_in_regime_per_head": found.inside[name][i].tolist(),
                }
                for name, error in found.error.items()
                for i, samples in enumerate(found.sizes)
            ],
        }
    )


def _search_to_dict(found: Search) -> dict[str, Any]:
    plan = found.plan
    return {
        "heads": [list(head) for head in plan.heads],
        "draws": plan.draws,
        "seed": plan.seed,
        "most": plan.most,
        "estimated_seconds": plan.seconds,
        "recommended": found.ranking[0]._asdict(),
        "estimators": [
            {
                "estimator": candidate.estimator,
                "queries": plan.problems[candidate.estimator].q.shape[-2],
                "reached": candidate.reached,
                "refused": candidate.reason or None,
                "steps": [
                    {
                        "samples": row.samples,
                        "error_mean": float(np.mean(row.errors)),
                        "standard_error": found.standard_error(row),
                        "error_per_head": row.per_head.tolist(),
                        "seconds": row.seconds,
                    }
                    for row in candidate.steps
                ],
                "cost_ratio": candidate.choice.cost_ratio if candidate.steps else None,
            }
            for candidate in found.candidates
        ],
    }


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
