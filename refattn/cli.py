"""The command line: `refattn compare` measures every estimator against exact attention."""

from __future__ import annotations

import json
import math
import os
import sys
import time
import zipfile
from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from . import __version__, _validate
from .attention import softmax_attention
from .estimators import DEFAULT_ESTIMATORS, ESTIMATORS

if TYPE_CHECKING:
    import click

__all__ = ["main"]

_Array = npt.NDArray[Any]

_SAMPLE = "minilm_zen128_slice.npz"
_INSTALL = "needs `pip install 'refattn[cli]'`"


class Inputs(NamedTuple):
    """What is compared, and how."""

    path: Path
    q: _Array
    k: _Array
    v: _Array
    scale: float
    causal: bool
    seed: int
    draws: int


class Row(NamedTuple):
    """Errors of one method, relative to exact attention in float64."""

    estimator: str
    samples: int | None  # S
    errors: _Array  # (draws, ...), one for each draw and head
    seconds: float | None  # for one evaluation of all heads

    @property
    def per_head(self) -> _Array:
        """Mean over the draws, shape (...)."""
        return np.asarray(np.mean(self.errors, axis=0))

    @property
    def worst_head(self) -> tuple[int, ...]:
        """Index of the head of largest error; () if there are no leading axes."""
        return tuple(map(int, np.unravel_index(np.argmax(self.per_head), self.per_head.shape)))


class Skipped(NamedTuple):
    """An estimator that does not take this S, or these options."""

    estimator: str
    samples: int
    reason: str


def main() -> None:
    """Run the command line (the console script `refattn`)."""
    try:
        for name in ("click", "rich"):
            import_module(name)
    except ModuleNotFoundError:
        sys.stderr.write(f"refattn: error: the command line {_INSTALL}\n")
        sys.exit(2)
    commands()(prog_name="refattn")


def commands() -> click.Group:
    """Build the command group; click must be installed."""
    import click

    class Unusable(click.ClickException):
        exit_code = 2

    @click.group("refattn", context_settings={"help_option_names": ["-h", "--help"]})
    @click.version_option(__version__, prog_name="refattn")
    def group() -> None:
        """Reference implementation of random-feature attention."""

    @group.command()
    @click.argument(
        "file",
        required=False,
        type=click.Path(exists=True, dir_okay=False, readable=True, path_type=Path),
    )
    @click.option(
        "--features",
        default="8,32,128,512",
        show_default=True,
        metavar="S,S,...",
        callback=_numbers,
        help="Numbers of features or samples.",
    )
    @click.option(
        "--estimators",
        metavar="NAME,NAME,...",
        callback=_names,
        help=f"all, or some of {', '.join(ESTIMATORS)}.  [default: {','.join(DEFAULT_ESTIMATORS)}]",
    )
    @click.option(
        "--draws",
        default=3,
        show_default=True,
        type=click.IntRange(min=1),
        help="Independent draws to average over.",
    )
    @click.option(
        "--dtype",
        type=click.Choice(["float32", "float64"]),
        help="Cast the arrays first.  [default: evaluate in the dtype of the file]",
    )
    @click.option("--seed", default=0, show_default=True, type=click.IntRange(min=0))
    @click.option("--scale", type=float, help="Factor on q . k.  [default: 1/sqrt(d)]")
    @click.option("--causal", is_flag=True, help="Query i sees key j only if j <= i + m - n.")
    @click.option(
        "--json",
        "json_path",
        metavar="OUT.json",
        callback=_output(".json"),
        help="Write the errors of every head and draw.",
    )
    @click.option(
        "--plot",
        "plot_path",
        metavar="OUT.png",
        callback=_output(".png"),
        help="Plot error against S.",
    )
    @click.option("--per-head", is_flag=True, help="Print the error of every head too.")
    def compare(
        file: Path | None,
        features: list[int],
        estimators: list[str],
        draws: int,
        dtype: str | None,
        seed: int,
        scale: float | None,
        causal: bool,
        json_path: Path | None,
        plot_path: Path | None,
        per_head: bool,
    ) -> None:
        """Compare estimators with exact softmax attention: error and time.

        FILE (.npz or .safetensors) holds arrays q, k, v of shape (..., n, d); the default is a
        sample from a sentence encoder that comes with the package. The error of a head is
        |estimate - exact| / |exact| in the Frobenius norm, averaged over the draws, where exact
        attention is evaluated in float64. Seconds are the median for one evaluation of all heads.
        """
        if plot_path is not None:
            try:
                import_module("matplotlib.figure")
            except ModuleNotFoundError:
                raise Unusable(f"--plot {_INSTALL}") from None
        try:
            _validate.real("scale", scale, positive=True, optional=True)
            path = file or _sample()
            q, k, v = load(path, dtype)
            if scale is None:
                scale = q.shape[-1] ** -0.5
            inputs = Inputs(path, q, k, v, scale, causal, seed, draws)
            with np.errstate(all="ignore"):
                rows, skipped = measure(inputs, estimators, features)
        except (TypeError, ValueError, MemoryError, OverflowError) as error:
            raise Unusable(" ".join(str(error).split())) from None
        try:
            show(inputs, rows, skipped, per_head)
            if json_path is not None:
                json_path.write_text(to_json(inputs, rows, skipped), encoding="utf-8")
            if plot_path is not None:
                plot(rows, plot_path)
        except OSError as error:
            raise Unusable(f"cannot write the results: {error}") from None

    return group


def _numbers(ctx: click.Context, param: click.Parameter, value: str) -> list[int]:
    """Parse positive integers separated by commas."""
    import click

    try:
        numbers = [int(item) for item in value.split(",")]
        if min(numbers) < 1:
            raise ValueError
    except ValueError:
        raise click.BadParameter(
            f"must be positive integers separated by commas, got {value!r}."
        ) from None
    return sorted(set(numbers))


def _names(ctx: click.Context, param: click.Parameter, value: str | None) -> list[str]:
    """Parse names of estimators separated by commas."""
    import click

    if value == "all":
        return list(ESTIMATORS)
    names = list(DEFAULT_ESTIMATORS) if value is None else [x.strip() for x in value.split(",")]
    for name in names:
        if name not in ESTIMATORS:
            raise click.BadParameter(f"must be all or of {', '.join(ESTIMATORS)}, got {name!r}.")
    return list(dict.fromkeys(names))


def _output(suffix: str) -> Callable[[Any, Any, str | None], Path | None]:
    """Make a check that a file with this suffix can be written; it is not opened yet."""
    import click

    def check(ctx: click.Context, param: click.Parameter, value: str | None) -> Path | None:
        if value is None:
            return None
        if not value.lower().endswith(suffix):  # an input given by mistake is not overwritten
            raise click.BadParameter(f"must end in {suffix}, got {value!r}.")
        folder = os.path.dirname(value) or "."
        target = value if os.path.exists(value) else folder
        if not os.path.isdir(folder) or os.path.isdir(value) or not os.access(target, os.W_OK):
            raise click.BadParameter(f"cannot write to {value!r}.")
        return Path(value)

    return check


def _sample() -> Path:
    """Find the data that come with the package, installed or in a checkout."""
    here = Path(__file__).resolve().parent
    for folder in (here / "data", here.parent / "validation" / "data"):
        if (folder / _SAMPLE).is_file():
            return folder / _SAMPLE
    raise ValueError(f"FILE must be given: the sample {_SAMPLE} is not installed.")


def load(path: Path, dtype: str | None = None) -> tuple[_Array, _Array, _Array]:
    """Read and check q, k and v.

    Parameters
    ----------
    path : Path
        File of type .npz (not pickled) or .safetensors.
    dtype : {"float32", "float64"}, optional
        Cast floating-point arrays to this.

    Returns
    -------
    q, k, v : array
        All float32 or all float64, finite, with shapes that match.

    Raises
    ------
    TypeError, ValueError
        If the file cannot be used.
    """
    readers = {".npz": _read_npz, ".safetensors": _read_safetensors}
    if path.suffix.lower() not in readers:
        raise ValueError(f"FILE must end in .npz or .safetensors, got {str(path)!r}.")
    try:
        arrays = readers[path.suffix.lower()](path)
    except ModuleNotFoundError:
        raise ValueError(f"reading .safetensors {_INSTALL}") from None
    except Exception as error:  # parsers of foreign bytes raise all kinds
        raise ValueError(f"cannot read {str(path)!r}: {error}") from None
    missing = [name for name in "qkv" if name not in arrays]
    if missing:
        raise ValueError(
            f"FILE must hold arrays q, k and v: {str(path)!r} has no {' and no '.join(missing)}."
        )
    if dtype is not None:
        with np.errstate(over="ignore"):
            arrays = {n: x.astype(dtype) if x.dtype.kind == "f" else x for n, x in arrays.items()}
    q, k, v = (arrays[name] for name in "qkv")
    try:
        _validate.attention(q, k, v)
        if q.dtype.itemsize > 8:
            raise TypeError(f"`q` must have dtype float32 or float64, got {q.dtype}.")
    except TypeError as error:
        raise TypeError(f"{error} (--dtype casts floating-point arrays.)") from None
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not np.all(np.isfinite(x)):
            raise ValueError(f"`{name}` must be finite in {x.dtype}, got NaN or infinity.")
    return q, k, v


def _read_npz(path: Path) -> dict[str, _Array]:
    if not zipfile.is_zipfile(path):  # np.load would take it for a pickle
        raise ValueError("not a complete .npz archive")
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in "qkv" if name in file}


def _read_safetensors(path: Path) -> dict[str, _Array]:
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        names = [name for name in file.keys() if name in ("q", "k", "v")]  # noqa: SIM118
        for name in names:
            if file.get_slice(name).get_dtype() == "BF16":  # NumPy has no such dtype
                raise TypeError(f"`{name}` must have dtype float32 or float64, got bfloat16")
        return {name: file.get_tensor(name) for name in names}


def measure(
    inputs: Inputs, estimators: Iterable[str], features: Iterable[int]
) -> tuple[list[Row], list[Skipped]]:
    """Measure exact attention, the mean of the values, and each estimator at each S it takes."""
    from rich.console import Console
    from rich.progress import track

    q, k, v = inputs.q, inputs.k, inputs.v
    settings: dict[str, Any] = {"scale": inputs.scale, "causal": inputs.causal}
    wide = [x.astype(np.float64) for x in (q, k, v)]
    exact = softmax_attention(*wide, **settings)
    size = np.linalg.norm(exact, axis=(-2, -1))
    if not (size.size and np.all(np.isfinite(size) & (size > 0))):
        raise ValueError(
            "exact attention must be finite and not all zero in each head, for errors relative "
            f"to it to exist, got norms {size.tolist()}."
        )

    warm: set[str] = set()
    skipped = []

    def error(estimate: _Array) -> _Array:
        return np.asarray(np.linalg.norm(estimate - exact, axis=(-2, -1)) / size)

    def timed(name: str, samples: int | None, evaluate: Callable[[int], _Array]) -> Row:
        if name not in warm:
            evaluate(0)
            warm.add(name)
        errors, seconds = [], []
        for i in range(inputs.draws):
            start = time.perf_counter()
            estimate = evaluate(i)
            seconds.append(time.perf_counter() - start)
            errors.append(error(estimate))
        return Row(name, samples, np.stack(errors), float(np.median(seconds)))

    uniform = softmax_attention(np.zeros_like(wide[0]), *wide[1:], **settings)
    rows = [
        timed("exact", None, lambda i: softmax_attention(q, k, v, **settings)),
        Row("mean of v", None, error(uniform)[None], None),
    ]
    for name, samples in track(
        [(name, samples) for name in estimators for samples in features],
        console=Console(stderr=True),
        description="Comparing",
        transient=True,
        disable=not sys.stderr.isatty(),
    ):
        try:
            rows.append(timed(name, samples, partial(_evaluate, inputs, name, samples)))
        except (ValueError, MemoryError, OverflowError) as problem:
            skipped.append(Skipped(name, samples, str(problem)))
    if len(rows) == 2 and skipped:
        name, samples, reason = skipped[0]
        raise ValueError(f"{name} with S = {samples}: {reason}")
    return rows, skipped


def _evaluate(inputs: Inputs, estimator: str, samples: int, draw: int) -> _Array:
    """Evaluate an entry of the registry; the seed depends on S and the draw, not on the entry."""
    rng = np.random.default_rng(np.random.SeedSequence(inputs.seed, spawn_key=(samples, draw)))
    estimate: _Array = ESTIMATORS[estimator](
        *(inputs.q, inputs.k, inputs.v),
        num_samples=samples,
        rng=rng,
        scale=inputs.scale,
        causal=inputs.causal,
    )
    return estimate


def show(inputs: Inputs, rows: list[Row], skipped: list[Skipped], per_head: bool) -> None:
    """Print the results as tables."""
    import click
    from rich.console import Console

    console = Console(width=1000, highlight=False, markup=False)  # tables are never squeezed
    shapes = ", ".join(f"{name} {getattr(inputs, name).shape}" for name in "qkv")
    click.echo(
        f"{click.format_filename(inputs.path.name)}: {shapes}, {inputs.q.dtype}\n"
        f"scale {inputs.scale:.6g}, {'causal' if inputs.causal else 'not causal'}, "
        f"seed {inputs.seed}, draws {inputs.draws}; errors relative to exact attention in float64"
    )
    reference = rows[0].seconds
    table = _table("estimator", "S", "mean error", "worst head", "which", "seconds", "ratio")
    for row in rows:
        table.add_row(
            row.estimator,
            "" if row.samples is None else str(row.samples),
            _digits(np.mean(row.per_head)),
            _digits(np.max(row.per_head)),
            _index(row.worst_head),
            *_times(row.seconds, reference),
        )
    console.print(table)
    for name, samples, reason in skipped:
        click.echo(f"skipped: {name} with S = {samples}: {reason}")
    if per_head:
        click.echo()
        columns = [r.estimator + ("" if r.samples is None else f"@{r.samples}") for r in rows]
        table = _table("head", *columns)
        for head in np.ndindex(rows[0].per_head.shape):
            table.add_row(_index(head), *(_digits(row.per_head[head]) for row in rows))
        console.print(table)


def _table(first: str, *rest: str) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column(first)
    for name in rest:
        table.add_column(name, justify="right")
    return table


def _index(head: tuple[int, ...]) -> str:
    return ",".join(map(str, head)) or "-"


def _times(seconds: float | None, reference: float | None) -> tuple[str, str]:
    if seconds is None or reference is None:
        return "", ""
    return f"{seconds:.2g}", _digits(seconds / reference)


def _digits(value: Any) -> str:
    return f"{value:#.3g}".rstrip(".")


def to_json(inputs: Inputs, rows: list[Row], skipped: list[Skipped]) -> str:
    """Format the results as JSON; what is not finite becomes null."""
    reference = rows[0].seconds
    report = {
        "refattn": __version__,
        "numpy": np.__version__,
        "file": inputs.path.name,
        "shapes": {name: list(getattr(inputs, name).shape) for name in "qkv"},
        "dtype": str(inputs.q.dtype),
        "scale": inputs.scale,
        "causal": inputs.causal,
        "seed": inputs.seed,
        "draws": inputs.draws,
        "results": [
            {
                "estimator": row.estimator,
                "samples": row.samples,
                "error_mean": float(np.mean(row.per_head)),
                "error_worst": float(np.max(row.per_head)),
                "worst_head": list(row.worst_head),
                "seconds": row.seconds,
                "ratio": row.seconds and reference and row.seconds / reference,
                "error_per_head": row.per_head.tolist(),
                "error_per_draw": row.errors.tolist(),
            }
            for row in rows
        ],
        "skipped": [entry._asdict() for entry in skipped],
    }
    return json.dumps(_finite(report), indent=2, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    """Replace NaN and infinities, which JSON does not have, by None."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def plot(rows: list[Row], path: Path) -> None:
    """Draw error, mean over heads, against S."""
    from matplotlib.figure import Figure

    curves: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if row.samples is not None:
            point = (row.samples, float(np.mean(row.per_head)))
            curves.setdefault(row.estimator, []).append(point)
    figure = Figure(figsize=(6, 4.5), layout="constrained")
    axes = figure.subplots()
    for i, (name, points) in enumerate(curves.items()):
        axes.plot(*zip(*points, strict=True), marker="osD^v"[i // 10 % 5], label=name)
    points = next(iter(curves.values()))
    guide = [(s, points[0][1] * math.sqrt(points[0][0] / s)) for s, _ in points]
    axes.plot(*zip(*guide, strict=True), color="0.5", linestyle="--", label="1/sqrt(S)")
    axes.axhline(float(np.mean(rows[1].per_head)), color="0.5", linestyle=":", label="mean of v")
    axes.set_xscale("log")
    if any(error > 0 for points in curves.values() for _, error in points):
        axes.set_yscale("log")
    axes.set_xlabel("number of features or samples S")
    axes.set_ylabel("relative error, mean over heads")
    axes.set_xticks([s for s, _ in points], labels=[str(s) for s, _ in points])
    axes.xaxis.minorticks_off()
    axes.legend()
    figure.savefig(path, format="png", dpi=150)


if __name__ == "__main__":
    main()
