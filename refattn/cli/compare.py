"""`refattn compare`: a table of all estimators, or the one to use."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .options import (
    COMMON,
    Answer,
    causal_option,
    estimators_option,
    examples,
    features_option,
    file_argument,
    file_option,
    format_option,
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
        "refattn compare qkv.npz --features 8,32 --estimators performer,lara-balance",
        "refattn compare --target 0.1",
        "refattn compare qkv.npz --target 0.3 --measure --estimators performer,ra",
    )
)
@file_argument
@features_option
@estimators_option(
    f"all, or some of {', '.join(COMMON)}, ... (see refattn check --list).  "
    "[default: rfa-iid,rfa-orthogonal,rfa-adapted,lara-balance,lara-mean,ra,ra-mean,eva; "
    "all with --measure]"
)
@click.option(
    "--draws",
    type=click.IntRange(1, 10**6),
    help="Independent draws to average over.  [default: 3, or 4 with --measure]",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "float64"]),
    help="Cast the arrays first.  [default: float32 for float16 and bfloat16, else as they are]",
)
@click.option("--seed", default=0, show_default=True, type=int, callback=seed, help="Random seed.")
@scale_option
@causal_option
@layout_option
@click.option(
    "--all-queries",
    is_flag=True,
    help="Measure slow estimators (time n m S) on all queries, however long it takes.",
)
@click.option("--per-head", is_flag=True, help="Also print the error of every head.")
@click.option(
    "--target",
    type=float,
    metavar="ERROR",
    help="Recommend an estimator that reaches this relative error.",
)
@click.option(
    "--measure",
    "measured",
    is_flag=True,
    help="With --target, measure the S that each estimator needs, S = 1, 2, 4, ...",
)
@click.option(
    "--most", type=click.IntRange(1), help="With --measure, the largest S.  [default: 4 max(n, m)]"
)
@click.option(
    "--shrink/--no-shrink",
    default=False,
    help="With --target, shrink the covariances; use it if there are fewer rows than d^2.",
)
@format_option
@file_option("json", "Write all numbers, of every head and draw.")
@plot_option("Plot error against S; with --target, the spectra of the covariances too.")
def compare(
    file: Path | None,
    target: float | None,
    layout: str,
    dtype: str | None,
    kind: str,
    json_path: Path | None,
    plot_path: Path | None,
    **options: Any,
) -> None:
    """Compare estimators with exact softmax attention: error and time.

    FILE (.npz or .safetensors) holds arrays q, k, v of shape (..., n, d); the default is a
    sample from a sentence encoder that comes with the package. The error of a head is
    |estimate - exact| / |exact| in the Frobenius norm, averaged over the draws; exact attention
    is evaluated in float64. Seconds are the median for one evaluation of all heads. The last
    column is the mean error at which a sentence encoder still works with this estimator. Estimators
    whose time grows as n m S are left out at S above 100 unless --estimators names them. Control-C
    prints what was measured so far.

    With --target the command recommends an estimator instead. It predicts errors from the moments
    of q and k, without random numbers; --measure measures them. Without v it predicts no
    errors. With many queries or heads, an evenly spaced sample is used; the output names it.
    """
    from ..arrays import checks
    from ..files.arrays import find_sample

    _refuse_idle(target is None, options)
    with one_line(plot_path is not None):
        checks.real("scale", options["scale"], positive=True, optional=True)
        checks.real("target", target, positive=True, optional=True)
        path = file or find_sample()
        required = "qk" if target is not None and not options["measured"] else "qkv"
        arrays = _read_qkv(path, dtype, layout, required=required)
        interruption = None
        if target is None:
            answer, plot, interruption = _compare(path, arrays, options)
        else:
            answer, plot = _recommend(path, arrays, target, options)
    publish(answer, kind, json_path, plot_path, plot)
    if interruption is not None:
        raise interruption


def _refuse_idle(table: bool, options: dict[str, Any]) -> None:
    """Refuse options that change nothing."""
    rule = "needs --target" if table else "does not go with --target"
    for name, word in (_OF_TARGET if table else _OF_TABLE).items():
        if options[name]:
            raise click.UsageError(f"{word} {rule}.")
    for name, word in () if table or options["measured"] else _OF_SEARCH.items():
        if options[name]:
            raise click.UsageError(f"{word} with --target needs --measure.")


_OF_TARGET = {"measured": "--measure", "most": "--most", "shrink": "--shrink"}
_OF_SEARCH = {"most": "--most", "draws": "--draws", "estimators": "--estimators"}
_OF_TABLE = {"causal": "--causal", "all_queries": "--all-queries", "per_head": "--per-head"}
_Published = tuple[Answer, Callable[[Path], None]]


def _compare(
    path: Path, arrays: dict[str, Floats], options: dict[str, Any]
) -> tuple[*_Published, BaseException | None]:
    """Measure every estimator at every S, or those until an interruption, which it returns."""
    from ..arrays.threads import Interrupted
    from ..compare.measured import SLOW, few_queries, measure
    from ..files.arrays import find_sample
    from ..registry import DEFAULT
    from .show import comparisons, plots

    draws, per_head = options["draws"] or 3, options["per_head"]
    bundled, interruption = path == find_sample(), None
    with Work("Comparing") as work:
        try:
            comparison = measure(
                **arrays,
                estimators=options["estimators"] or DEFAULT,
                sizes=options["features"],
                draws=draws,
                seed=options["seed"],
                scale=options["scale"],
                causal=options["causal"],
                queries=None if options["all_queries"] else few_queries(arrays["q"], arrays["k"]),
                slowest=None if options["estimators"] else SLOW,
                track=work.track,
            )
        except Interrupted as error:
            comparison, interruption = error.found, error
    for line in comparisons.comparison_notices(comparison):
        notice(line)
    answer = Answer(
        partial(comparisons.print_comparison, path, arrays, comparison, per_head, bundled),
        lambda: comparison.tables()[: 1 + per_head],
        partial(comparisons.comparison_to_json, path, arrays, comparison),
    )
    return answer, partial(plots.plot_comparison, comparison.rows), interruption


def _recommend(
    path: Path, arrays: dict[str, Floats], target: float, options: dict[str, Any]
) -> _Published:
    """Predict errors from moments, and measure the S that each estimator needs if asked."""
    from ..compare import plan, search, study
    from ..compare.measured import names
    from .show import advice, plots

    scale, searched, planned = options["scale"], None, None
    with Work("Studying") as work:
        if options["measured"]:
            planned = plan(
                *arrays.values(),
                target=target,
                estimators=options["estimators"] or names(),
                draws=4 if options["draws"] is None else options["draws"],
                scale=scale,
                seed=options["seed"],
                most=options["most"],
            )
        studied = study(
            **arrays,
            sizes=options["features"],
            target=target,
            scale=scale,
            shrink=options["shrink"],
            track=work.track,
        )
        if planned is not None:
            searched = search(planned, track=work.track)
    answer = Answer(
        partial(advice.print_advice, path, arrays, studied, searched),
        lambda: [*studied.tables(), *(() if searched is None else searched.tables())],
        partial(advice.advice_to_json, path, arrays, studied, searched),
    )
    return answer, partial(plots.plot_advice, studied)
