"""What `refattn compare` measures: on a page, in rows, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ...arrays.library import Floats
from ...arrays.words import head_number
from ...compare import Comparison, listed, tolerated
from .cells import digits, dump, has_draws, head_cell, heading, name_of, origin, uncertainty
from .page import Page, Table


def print_comparison(
    path: Path, arrays: dict[str, Floats], comparison: Comparison, per_head: bool, page: Page
) -> None:
    """Print the results as tables."""
    rows = comparison.rows
    page.say(
        f"{heading(path, arrays)}\n"
        f"scale {comparison.scale:.6g}, {'causal' if comparison.causal else 'not causal'}, "
        f"seed {comparison.seed}, draws {comparison.draws}; "
        "errors relative to exact attention in float64"
    )
    reference, limits = rows[0].seconds, tolerated()
    heads = ("S", "mean error", "±", "worst head", "which", "seconds", "ratio", "tolerated")
    least = ("which", "worst head", "seconds", "tolerated")
    table = Table("estimator", *heads, drop=least, keys=2)
    for row in rows:
        table.add_row(
            row.estimator,
            "" if row.samples is None else str(row.samples),
            digits(np.mean(row.per_head)),
            uncertainty(row.standard_error) if has_draws(row) else "",
            digits(np.max(row.per_head)),
            head_number(row.worst_head),
            *_write_times(row.seconds, reference),
            digits(limits.errors[row.estimator]) if row.estimator in limits.errors else "",
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
            table.add_row(head_number(head), *(digits(row.per_head[head]) for row in rows))
        page.table(table, split=True)


def comparison_notices(comparison: Comparison) -> Iterator[str]:
    """Yield what a comparison left out, a line each."""
    if comparison.skipped:
        yield f"skipped: {listed(comparison.skipped)}"
    part = {row.queries: list[str]() for row in comparison.rows if row.queries is not None}
    for row in comparison.rows:
        if row.queries is not None and row.estimator not in part[row.queries]:
            part[row.queries].append(row.estimator)
    for queries, names in part.items():
        yield (
            f"{', '.join(names)}: on {queries} evenly spaced queries of each head, seconds in "
            "proportion (--all-queries takes all)"
        )


def _write_times(seconds: float | None, reference: float | None) -> tuple[str, str]:
    if seconds is None or reference is None:
        return "", ""
    return f"{seconds:.2g}", digits(seconds / reference)


def comparison_to_json(path: Path, arrays: dict[str, Floats], comparison: Comparison) -> str:
    """Format the results as JSON; what is not finite becomes null."""
    reference, limits = comparison.rows[0].seconds, tolerated()
    report = {
        **origin(path, arrays),
        "scale": comparison.scale,
        "causal": comparison.causal,
        "seed": comparison.seed,
        "draws": comparison.draws,
        "results": [
            {
                "estimator": row.estimator,
                "samples": row.samples,
                "error_mean": float(np.mean(row.per_head)),
                "standard_error": row.standard_error if has_draws(row) else 0.0,
                "error_worst": float(np.max(row.per_head)),
                "worst_head": list(row.worst_head),
                "queries": row.queries,
                "seconds": row.seconds,
                "ratio": row.seconds and reference and row.seconds / reference,
                "error_tolerated": limits.errors.get(row.estimator),
                "error_per_head": row.per_head.tolist(),
                "error_per_draw": row.errors.tolist(),
            }
            for row in comparison.rows
        ],
        "skipped": [entry._asdict() for entry in comparison.skipped],
        "tolerated": {x: y for x, y in limits._asdict().items() if x != "errors"},
    }
    return dump(report)


COMPARISON_COLUMNS = (
    *("estimator", "samples", "head", "error", "standard_error", "error_worst", "worst_head"),
    *("queries", "seconds", "ratio", "error_tolerated"),
)


def comparison_rows(comparison: Comparison, per_head: bool) -> Iterator[dict[str, Any]]:
    """Yield a row for each estimator and S, and of each head if `per_head` is set."""
    reference, limits = comparison.rows[0].seconds, tolerated().errors
    for row in comparison.rows:
        yield {
            **name_of(row),
            "error": float(np.mean(row.per_head)),
            "standard_error": row.standard_error if has_draws(row) else 0.0,
            "error_worst": float(np.max(row.per_head)),
            "worst_head": head_cell(row.worst_head),
            "queries": row.queries,
            "seconds": row.seconds,
            "ratio": row.seconds / reference if row.seconds and reference else None,
            "error_tolerated": limits.get(row.estimator),
        }
    for row in comparison.rows if per_head else ():
        for head, error in np.ndenumerate(row.per_head):
            yield {**name_of(row), "head": head_cell(head), "error": float(error)}
