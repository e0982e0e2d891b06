"""Print the results of `refattn compare`, on a page or as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ...arrays.library import Floats
from ...arrays.tables import digits
from ...arrays.words import to_json
from ...compare.measured import Comparison, listed
from ...files.tolerated import tolerated
from .page import Page
from .source import heading, origin


def print_comparison(
    path: Path,
    arrays: dict[str, Floats],
    comparison: Comparison,
    per_head: bool,
    bundled: bool,
    page: Page,
) -> None:
    """Print the results as tables; of the bundled tensors also what to do with others."""
    page.say(
        f"{heading(path, arrays)}\n"
        f"scale {comparison.scale:.6g}, {'causal' if comparison.causal else 'not causal'}, "
        f"seed {comparison.seed}, draws {comparison.draws}; "
        "errors relative to exact attention in float64"
    )
    results, of_heads = comparison.tables()
    page.table(results)
    if per_head:
        page.say("\nerror_per_head")
        across = ("estimator", "samples")
        page.table(of_heads.pivot("head", across, lambda x: digits(x["error_mean"])), split=True)
    page.say(comparison.conclusion)
    if bundled:
        page.say("next: refattn verify FILE judges the output of a kernel")


def comparison_notices(comparison: Comparison) -> Iterator[str]:
    """Yield what a comparison left out, a line each."""
    slow = [x for x in comparison.skipped if x.limit.startswith("over ")]
    rest = [x for x in comparison.skipped if x not in slow]
    if slow:
        yield f"skipped: {listed(slow)}; --estimators all has them"
    if rest:
        yield f"skipped: {listed(rest)}"
    part = {row.queries: list[str]() for row in comparison.rows if row.queries is not None}
    for row in comparison.rows:
        if row.queries is not None and row.estimator not in part[row.queries]:
            part[row.queries].append(row.estimator)
    for queries, names in part.items():
        yield (
            f"{', '.join(names)}: on {queries} evenly spaced queries of each head, seconds in "
            "proportion (--all-queries takes all)"
        )


def comparison_to_json(path: Path, arrays: dict[str, Floats], comparison: Comparison) -> str:
    """Format the results as JSON; what is not finite becomes null."""
    settings = {x: getattr(comparison, x) for x in ("scale", "causal", "seed", "draws")}
    limits = {x: y for x, y in tolerated()._asdict().items() if x != "errors"}
    rest = {"skipped": comparison.skipped, "tolerated": limits}
    results = {"conclusion": comparison.conclusion, "results": comparison.tables()[0].rows}
    return to_json(origin(path, arrays) | settings | results | rest)
