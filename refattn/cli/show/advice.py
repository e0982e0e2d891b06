"""Print the results of `refattn compare --target`, moments and advice, on a page or as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...arrays.library import Floats
from ...arrays.tables import Table, count, digits
from ...arrays.words import head_number, portable, to_json
from ...compare import Advice, Choice, Search
from ...compare.advice import EXACT, QUANTILE_ROWS
from .page import Page
from .source import heading, origin


def print_advice(
    path: Path, arrays: dict[str, Floats], advice: Advice, searched: Search | None, page: Page
) -> None:
    """Print the answers as tables."""
    page.say(heading(path, arrays))
    page.say(
        f"scale {advice.scale:.6g}, covariances {'' if advice.shrink else 'not '}shrunk, "
        f"not causal; {_worth(advice)}"
    )
    heads, predicted = advice.tables()
    page.say(
        "\nmoments: in kernel coordinates, sqrt(scale) q and sqrt(scale) k: norm of the mean; "
        "trace, condition and effective rank of the covariance; quantiles of |q_i + k_j|^2 "
        "(quantile_50 is the median)"
    )
    page.table(_summarised(heads.part("moments")))
    if max(advice.rows) > QUANTILE_ROWS:
        page.say(f"quantiles: over at most {QUANTILE_ROWS} evenly spaced queries and keys")
    page.say(
        "\nlog_excess: expected log of the second moment of a kernel estimate over the squared "
        "kernel, by proposal; 0 is best"
    )
    page.table(_summarised(heads.part("log_excess")))
    if not advice.error:
        page.say("\nFILE has no v: predicted errors and the recommendation are left out.")
        return
    _print_laws(advice, heads, predicted, page)
    if searched is not None:
        _print_search(searched, advice, page)
    _print_recommendation(advice, searched, page)


def _print_laws(advice: Advice, heads: Table, predicted: Table, page: Page) -> None:
    some = advice.queries < advice.rows[0]

    def write(row: Mapping[str, Any]) -> str:
        if row["share_in_regime"] < 1:
            return f"- ({math.floor(100 * row['share_in_regime'])}%)"
        error = f" ± {row['standard_error']:.1g}" if some else ""
        return digits(row["error_mean"]) + error

    page.say("\npredictions: relative error, mean over heads (ra: an upper bound)")
    page.table(predicted.pivot("samples", ["estimator"], write))
    if any(row["share_in_regime"] < 1 for row in predicted.rows):
        page.say(
            "-: the formula is not valid there (effective sample size below 10) for some queries; "
            "in brackets, the share of queries for which it is valid"
        )
    page.say(
        f"\nnum_features_by_law: S that the formula gives for relative error {advice.target:g} "
        "(ra: an upper bound)"
    )
    page.table(heads.part("num_features_by_law"))
    page.say(
        "\nlaw_holds_from: the S from which that formula is valid for all queries; fewer may be "
        "enough (--measure tries them)"
    )
    page.table(heads.part("law_holds_from"))
    if some:
        spreads = [f"{100 * float(np.median(x)):.2g}% ({y})" for y, x in advice.spread.items()]
        page.say(
            f"predicted for {advice.queries} evenly spaced queries of each head, and all keys;"
        )
        page.say(
            "±: one standard error, because only these queries are used; that of the predicted S, "
            "median of heads:"
        )
        page.say(", ".join(spreads))


def _worth(advice: Advice) -> str:
    """Compare the numbers of rows with d^2."""
    n, m = advice.rows
    counts = f"n = {n}, m = {m}"
    rough = sorted({x for x in (n, m) if x <= advice.advised})
    if not rough:
        return f"{counts}; N > d^2 = {advice.advised}, as Ye 2023 advises"
    listed = " and ".join(map(str, rough))
    sign = "<" if rough[-1] < advice.advised else "<="
    return f"{counts}\nN = {listed} rows {sign} d^2 = {advice.advised}: covariances are rough"


def _summarised(table: Table) -> Table:
    """Add the median of the heads, and the worst."""
    rows = list(table.rows)
    for label, pick in (("median", np.median), ("worst", np.max)):
        row: dict[str, Any] = {"head": label}
        for column in table.columns[1:]:
            known = [x for x in map(column.value, table.rows) if not math.isnan(x)]
            least = label == "worst" and "rank" in column.name
            row[column.name] = float((np.min if least else pick)(known)) if known else math.nan
        rows.append(row)
    return table._replace(rows=rows)


def _print_search(searched: Search, advice: Advice, page: Page) -> None:
    plan, rows, heads = searched.plan, advice.rows[0], len(advice.heads)
    page.say(
        f"\nmeasured {len(plan.problems)} estimators, S = 1, 2, 4, ... up to {plan.most}, "
        f"{plan.draws} draws, on {len(plan.heads)} heads: the smallest power of 2 that reaches "
        f"relative error {plan.target:g}"
    )
    (measured,) = searched.tables()
    last = {row["estimator"]: row for row in measured.rows}
    for candidate in searched.candidates:
        row = last.get(candidate.estimator)
        if row and row["samples"] is not None and not candidate.reached:
            tried = [x.samples or 0 for x in candidate.steps]
            none = f"> {tried[-1]}" if tried[-1] == max(tried) else "none"  # no window does
            last[candidate.estimator] = {**row, "samples": none}
    page.table(measured._replace(rows=list(last.values())))
    page.say(f"mean of {plan.draws} draws and {len(plan.heads)} heads")
    if len(plan.heads) < heads:
        page.say(f"heads, evenly spaced: {' '.join(map(head_number, plan.heads))}")
    part = [x for x, problem in plan.problems.items() if problem.q.shape[-2] == plan.queries]
    if part and plan.queries < rows:
        page.say(f"{', '.join(part)}: on {plan.queries} evenly spaced queries of each head")
    for candidate in searched.candidates:
        if candidate.reason:
            page.say(f"not tried further: {candidate.estimator}: {candidate.reason}")


def _print_recommendation(advice: Advice, searched: Search | None, page: Page) -> None:
    heads, target = len(advice.heads), f"recommended for relative error {advice.target:g}"
    page.say()
    if (error := float(np.max(advice.error_of_mean))) <= advice.target:
        page.say(f"{target}: the mean of v, whose error is at most {digits(error)}")
        page.say("at this error these tensors do not need attention")
        return
    if searched is not None:
        page.say(f"{target}, as measured on {len(searched.plan.heads)} of {heads} heads:")
        for start, choice in zip(("", "then "), searched.ranking, strict=False):
            page.say(f"{start}{_priced(choice, 'time')}")
        return
    page.say(
        "cost: multiply-adds, S (n + m) (d + d_v) for rfa and rfa-adapted, n S m (d + d_v) for "
        "`ra` and `is`, n m (d + d_v) for exact attention"
    )
    page.say(f"{target}, by the formulas where they are valid (--measure tries it):")
    chosen: dict[str, list[Choice]] = {}
    for head in advice.heads:
        choice = advice.recommended(head)
        chosen.setdefault(choice.estimator, []).append(choice)
    for choices in chosen.values():
        middle = sorted(choices, key=lambda choice: choice.cost_ratio)[len(choices) // 2]
        median = " (median)" if len(choices) > 1 and middle.num_features is not None else ""
        page.say(f"{_priced(middle, 'cost')}{median}, for {len(choices)} of {heads} heads")


def _priced(choice: Choice, price: str) -> str:
    """Name an estimator with its S, and its price relative to exact attention."""
    name, samples, ratio = choice
    if name == EXACT:
        return name
    size = "" if samples is None else f" with S = {count(samples)}"
    return f"{name}{size}, {digits(ratio)} times the {price} of {EXACT}"


def advice_to_json(
    path: Path, arrays: dict[str, Floats], advice: Advice, searched: Search | None = None
) -> str:
    """Format the answers as JSON; what is not finite becomes null."""
    counts = dict(zip("qk", advice.rows, strict=True))
    heads, predicted = advice.tables()
    return to_json(
        origin(path, arrays)
        | {x: getattr(advice, x) for x in ("scale", "shrink", "target")}
        | {"count": counts, "advised_count": advice.advised}
        | {"enough": {x: n > advice.advised for x, n in counts.items()}}
        | {"law_queries": advice.queries, "heads": heads.rows}
        | {"error_of_mean": portable(advice.error_of_mean)}
        | {"measured": None if searched is None else searched.content()}
        | {"predictions": predicted.rows}
    )
