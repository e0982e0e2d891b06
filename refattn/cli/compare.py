"""`refattn compare` and `refattn profile`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .options import (
    COMMON,
    Answer,
    causal_option,
    dtype_option,
    estimators_option,
    examples,
    features_option,
    file_argument,
    format_option,
    json_option,
    layout_option,
    many_heads,
    one_line,
    plot_option,
    publish,
    scale_option,
    seed,
)
from .progress import Work, notice

if TYPE_CHECKING:
    from ..arrays.library import Floats


def _read_qkv(
    path: Path, dtype: str | None, layout: str, *, required: str = "qkv"
) -> dict[str, Floats]:
    """Read q, k and v, heads before tokens."""
    from ..files.arrays import load_qkv

    arrays, stored = load_qkv(path, dtype, required=required, layout=layout)
    q, k = arrays["q"], arrays["k"]
    if dtype is None and stored != q.dtype.name:
        notice(f"read as {q.dtype}: the file has {stored}")
    if q.ndim > 2:
        many_heads(q.shape[-3], max(q.shape[-2], k.shape[-2]), layout)
    return arrays


@click.command(
    epilog=examples(
        "refattn compare",
        "refattn compare qkv.npz --features 8,32 --estimators performer,lara-balance",
        "refattn compare qkv.npz --layout bnhd --causal --draws 2 --format csv",
    )
)
@file_argument
@features_option
@estimators_option(
    None,
    f"all, or some of {', '.join(COMMON)}, ... (see refattn check --list).  "
    "[default: rfa-iid,rfa-orthogonal,rfa-adapted,lara-own,lara-balance,ra,eva]",
)
@click.option(
    "--draws",
    default=3,
    show_default=True,
    type=click.IntRange(1, 10**6),
    help="Independent draws to average over.",
)
@dtype_option("float32 for float16 and bfloat16, else as they are")
@click.option("--seed", default=0, show_default=True, type=int, callback=seed, help="Random seed.")
@scale_option
@causal_option
@layout_option
@click.option(
    "--all-queries",
    is_flag=True,
    help="Measure slow estimators (time n m S) on all queries, however long it takes.",
)
@format_option
@json_option("Write the errors of every head and draw.")
@plot_option("Plot error against S.")
@click.option("--per-head", is_flag=True, help="Also print the error of every head.")
def compare(
    file: Path | None,
    features: list[int],
    estimators: list[str],
    draws: int,
    dtype: str | None,
    seed: int,
    scale: float | None,
    causal: bool,
    layout: str,
    all_queries: bool,
    kind: str,
    json_path: Path | None,
    plot_path: Path | None,
    per_head: bool,
) -> None:
    """Compare estimators with exact softmax attention: error and time.

    FILE (.npz or .safetensors) holds arrays q, k, v of shape (..., n, d); the default is a
    sample from a sentence encoder that comes with the package. The error of a head is
    |estimate - exact| / |exact| in the Frobenius norm, averaged over the draws; exact attention
    is evaluated in float64. Seconds are the median for one evaluation of all heads. The last
    column is the mean error at which a sentence encoder still works with this estimator.
    """
    from ..arrays import checks
    from ..compare import few_queries, measure
    from ..files.arrays import find_sample
    from .show import comparisons, plots

    with one_line(plot_path is not None):
        checks.real("scale", scale, positive=True, optional=True)
        path = file or find_sample()
        arrays = _read_qkv(path, dtype, layout)
        with Work("Comparing") as work:
            comparison = measure(
                **arrays,
                estimators=estimators,
                sizes=features,
                draws=draws,
                seed=seed,
                scale=scale,
                causal=causal,
                queries=None if all_queries else few_queries(arrays["q"], arrays["k"]),
                announce=work.estimated,
                track=work.track,
            )
    for line in comparisons.comparison_notices(comparison):
        notice(line)
    publish(
        Answer(
            partial(comparisons.print_comparison, path, arrays, comparison, per_head),
            lambda: comparison.tables()[: 1 + per_head],
            partial(comparisons.comparison_to_json, path, arrays, comparison),
        ),
        kind,
        json_path,
        plot_path,
        partial(plots.plot_comparison, comparison.rows),
    )


@click.command(
    "profile",
    epilog=examples(
        "refattn profile",
        "refattn profile qkv.npz --target 0.2 --format markdown",
        "refattn profile qkv.npz --measure --target 0.3 --estimators performer,ra",
    ),
)
@file_argument
@features_option
@click.option(
    "--target",
    default=0.1,
    show_default=True,
    type=float,
    help="Relative error that the recommended estimator must reach.",
)
@click.option(
    "--measure",
    "measured",
    is_flag=True,
    help="Measure how many features or samples each estimator needs, S = 1, 2, 4, ...",
)
@estimators_option("all", "Estimators to measure with --measure.  [default: all]")
@click.option(
    "--most", type=click.IntRange(1), help="With --measure, the largest S.  [default: 4 max(n, m)]"
)
@click.option(
    "--draws",
    default=4,
    show_default=True,
    type=click.IntRange(2, 10**6),
    help="Independent draws to average over with --measure.",
)
@click.option("--seed", default=0, show_default=True, type=int, callback=seed, help="Random seed.")
@click.option(
    "--shrink/--no-shrink",
    default=False,
    show_default=True,
    help="Shrink the covariances; use it if there are fewer rows than d^2.",
)
@dtype_option("float32 for float16 and bfloat16, else as they are; predictions are in float64")
@scale_option
@layout_option
@format_option
@json_option("Write all numbers, of every head.")
@plot_option("Plot the spectra of the covariances, and predicted error against S.")
def profile(
    file: Path | None,
    features: list[int],
    target: float,
    measured: bool,
    shrink: bool,
    dtype: str | None,
    scale: float | None,
    layout: str,
    kind: str,
    json_path: Path | None,
    plot_path: Path | None,
    **options: Any,
) -> None:
    """Recommend an estimator from the moments of queries and keys.

    FILE (.npz or .safetensors) holds q and k of shape (..., n, d), and v unless you only want the
    moments; the default is a sample from a sentence encoder that comes with the package. If there
    are many queries or heads, errors are predicted for some of the queries and measured on some
    of the heads; the output names them. Without --measure no random numbers are used.
    """
    from ..arrays import checks
    from ..files.arrays import find_sample
    from ..profile import plan, search, study
    from ..profile.advice import foreseen
    from .show import plots, profiles

    with one_line(plot_path is not None):
        checks.real("scale", scale, positive=True, optional=True)
        checks.real("target", target, positive=True)
        path = file or find_sample()
        arrays = _read_qkv(path, dtype, layout, required="qkv" if measured else "qk")
        searched, planned = None, None
        with Work("Studying") as work:
            if measured:
                planned = plan(*arrays.values(), target=target, scale=scale, **options)
            least = foreseen(**arrays, scale=scale)
            work.estimated(least + (planned.seconds if planned else 0.0))
            studied = study(
                **arrays,
                sizes=features,
                target=target,
                scale=scale,
                shrink=shrink,
                track=work.track,
            )
            if planned is not None:
                searched = search(planned, track=work.track)
    publish(
        Answer(
            partial(profiles.print_profile, path, arrays, studied, searched),
            lambda: [*studied.tables(), *(() if searched is None else searched.tables())],
            partial(profiles.profile_to_json, path, arrays, studied, searched),
        ),
        kind,
        json_path,
        plot_path,
        partial(plots.plot_profile, studied),
    )
