"""What `refattn profile` finds, moments and advice: on a page, in rows, and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ...arrays.library import Floats
from ...arrays.words import head_number
from ...profile import Advice, Candidate, Choice, Search, advice
from .cells import (
    count,
    digits,
    digits_or_dash,
    dump,
    head_cell,
    heading,
    name_of,
    origin,
    uncertainty,
)
from .page import Page, Table

# Moments that a narrow page leaves out, the first of them first.
_DROPPED = (("5%", "95%"), ("rank q", "rank k"), ("cond q", "cond k"), "SDERF", "OPRF")


LABELS = {**dict(zip(advice.LAWS, advice.LAWS, strict=True)), "ra": "ra (bound)"}


def print_profile(
    path: Path, arrays: dict[str, Floats], profile: Advice, searched: Search | None, page: Page
) -> None:
    """Print the answers as tables."""
    page.say(heading(path, arrays))
    page.say(
        f"scale {profile.scale:.6g}, covariances {'' if profile.shrink else 'not '}shrunk, "
        f"not causal; {_worth(profile)}"
    )
    page.say(
        "\nMoments in kernel coordinates, sqrt(scale) q and sqrt(scale) k: norm of the mean; "
        "trace, condition and effective rank of the covariance; quantiles of |q_i + k_j|^2"
    )
    labels = {f"{part}_{x}": label.format(x) for part, label in advice.PARTS.items() for x in "qk"}
    labels |= {name: f"{p:.0%}" for name, p in advice.QUANTILES.items()}
    page.table(_per_head(profile, {labels[name]: x for name, x in profile.table.items()}))
    if max(profile.rows) > advice.QUANTILE_ROWS:
        page.say(f"quantiles: over at most {advice.QUANTILE_ROWS} evenly spaced queries and keys")
    page.say("\nExpected log excess of the variance of a kernel estimate, by proposal (best: 0)")
    page.table(_per_head(profile, profile.excess))
    if not profile.error:
        page.say("\nFILE has no v: predicted errors and the recommendation are left out.")
        return
    _print_laws(profile, page)
    if searched is not None:
        _print_search(searched, profile, page)
    _print_recommendation(profile, searched, page)


def _print_laws(profile: Advice, page: Page) -> None:
    page.say("\nPredicted relative error, mean over heads (ra: an upper bound)")
    table = Table("S", *LABELS.values(), drop=("rfa-adapted", "is"))
    some = profile.queries < profile.rows[0]
    outside = False
    for i, samples in enumerate(profile.sizes):
        cells = []
        for name in advice.LAWS:
            value, share = profile.predictions(name)[i], float(np.mean(profile.inside[name][i]))
            outside = outside or share < 1
            error = f" ± {profile.standard_errors(name)[i]:.1g}" if some else ""
            cells.append(digits(value) + error if share == 1 else f"- ({math.floor(100 * share)}%)")
        table.add_row(str(samples), *cells)
    page.table(table)
    if outside:
        page.say(
            "-: outside the regime of the law (effective sample size below 10) for some queries; "
            "in brackets the share of queries inside"
        )
    page.say(
        f"\nS by the law for relative error {profile.target:g}; from: the S from which that law "
        "holds for all queries (1 where not shown); fewer may do: --measure tries them"
    )
    columns, starts = {}, []
    for name in profile.by_law:
        columns[LABELS[name]] = profile.by_law[name]
        if np.any(profile.holds_from[name] > 1):
            starts.append(f"{name} from")
            columns[starts[-1]] = profile.holds_from[name]
    table = Table("head", *columns, drop=(("is", "is from"), *starts))
    for head in profile.heads:
        table.add_row(head_number(head), *(count(float(x[head])) for x in columns.values()))
    page.table(table)
    if some:
        spreads = [f"{100 * float(np.median(x)):.2g}% ({y})" for y, x in profile.spread.items()]
        page.say(f"laws: of {profile.queries} evenly spaced queries of each head, and all keys;")
        page.say("±: one standard error from this choice; that of S by the law, median over heads:")
        page.say(", ".join(spreads))


def _worth(profile: Advice) -> str:
    """Compare the numbers of rows with d^2."""
    n, m = profile.rows
    counts = f"n = {n}, m = {m}"
    rough = sorted({x for x in (n, m) if x <= profile.advised})
    if not rough:
        return f"{counts}; N > d^2 = {profile.advised}, as reference 002 advises"
    listed = " and ".join(map(str, rough))
    sign = "<" if rough[-1] < profile.advised else "<="
    return f"{counts}\nN = {listed} {sign} d^2 = {profile.advised}: covariances are rough"


def _per_head(profile: Advice, columns: dict[str, Floats]) -> Table:
    """Make a table of one row a head, the median and the worst."""
    table = Table("head", *columns, drop=_DROPPED)
    for head in profile.heads:
        table.add_row(head_number(head), *(digits_or_dash(x[head]) for x in columns.values()))
    for label, pick in (("median", np.median), ("worst", np.max)):
        cells = []
        for name, x in columns.items():
            known = x[~np.isnan(x)]
            least = label == "worst" and name.startswith("rank")
            cells.append(
                digits_or_dash((np.min if least else pick)(known) if known.size else math.nan)
            )
        table.add_row(label, *cells)
    return table


def _print_search(searched: Search, profile: Advice, page: Page) -> None:
    plan, rows, heads = searched.plan, profile.rows[0], len(profile.heads)
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
            samples if candidate.reached or not samples else _missed(candidate),
            digits(np.mean(row.errors)),
            uncertainty(searched.standard_error(row)),
            digits(np.max(row.per_head)),
            f"{row.seconds:.2g}",
            digits(choice.cost_ratio),
        )
    page.table(table)
    some = len(plan.heads) < heads
    error = "standard error over draws" + (", and of the choice of heads" if some else "")
    page.say(
        f"mean of {plan.draws} draws and {len(plan.heads)} heads, ±: {error}; "
        "time: of one evaluation in NumPy, relative to exact attention on the same queries"
    )
    if some:
        page.say(f"heads, evenly spaced: {' '.join(map(head_number, plan.heads))}")
    part = [x for x, problem in plan.problems.items() if problem.q.shape[-2] == plan.queries]
    if part and plan.queries < rows:
        page.say(f"{', '.join(part)}: on {plan.queries} evenly spaced queries of each head")
    for candidate in refused:
        page.say(f"not tried further: {candidate.estimator}: {candidate.reason}")


def _missed(candidate: Candidate) -> str:
    """Write that S must be larger than all that were tried, or that no window does."""
    tried = [row.samples or 0 for row in candidate.steps]
    return f"> {tried[-1]}" if tried[-1] == max(tried) else "none"


def _print_recommendation(profile: Advice, searched: Search | None, page: Page) -> None:
    heads, target = len(profile.heads), f"recommended for relative error {profile.target:g}"
    page.say()
    if searched is not None:
        page.say(f"{target}, as measured on {len(searched.plan.heads)} of {heads} heads:")
        for start, choice in zip(("", "then "), searched.ranking, strict=False):
            page.say(f"{start}{_priced(choice, 'time')}")
        return
    page.say(
        "cost: multiply-adds, S (n + m) (d + d_v) for rfa and rfa-adapted, n S m (d + d_v) for ra "
        "and is (at least those of exact attention, which they need: n m (d + d_v))"
    )
    page.say(f"{target}, by the laws where they hold (--measure tries it):")
    chosen: dict[str, list[Choice]] = {}
    for head in profile.heads:
        choice = profile.recommended(head)
        chosen.setdefault(choice.estimator, []).append(choice)
    for choices in chosen.values():
        middle = sorted(choices, key=lambda choice: choice.cost_ratio)[len(choices) // 2]
        median = " (median)" if len(choices) > 1 and middle.num_features is not None else ""
        page.say(f"{_priced(middle, 'cost')}{median}, for {len(choices)} of {heads} heads")


def _priced(choice: Choice, price: str) -> str:
    """Name an estimator with its S, and its price relative to exact attention."""
    name, samples, ratio = choice
    if name == advice.EXACT:
        return name
    size = "" if samples is None else f" with S = {count(samples)}"
    return f"{name}{size}, {digits(ratio)} of the {price} of {advice.EXACT}"


def profile_to_json(
    path: Path, arrays: dict[str, Floats], profile: Advice, searched: Search | None = None
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
    n, m = profile.rows
    heads = []
    for head in profile.heads:
        entry: dict[str, Any] = {
            "head": list(head),
            "moments": {name: float(x[head]) for name, x in profile.table.items()},
            "eigenvalues": {name: x[head].tolist() for name, x in profile.eigenvalues.items()},
            "log_excess": {name: float(x[head]) for name, x in profile.excess.items()},
        }
        if profile.error:
            entry |= {
                key: {name: float(x[head]) for name, x in of_laws.items()}
                for key, of_laws in (
                    ("num_features_by_law", profile.by_law),
                    ("law_holds_from", profile.holds_from),
                    ("relative_standard_error", profile.spread),
                )
            }
            entry["recommended"] = profile.recommended(head)._asdict()
        heads.append(entry)
    return dump(
        {
            **origin(path, arrays),
            "scale": profile.scale,
            "shrink": profile.shrink,
            "target": profile.target,
            "count": {"q": n, "k": m},
            "advised_count": profile.advised,
            "enough": {"q": n > profile.advised, "k": m > profile.advised},
            "law_queries": profile.queries,
            "heads": heads,
            "measured": None if searched is None else _search_to_dict(searched),
            "predictions": [
                {
                    "estimator": name,
                    "samples": samples,
                    "error_mean": profile.predictions(name)[i],
                    "error_per_head": error[i].tolist(),
                    "share_in_regime_per_head": profile.inside[name][i].tolist(),
                }
                for name, error in profile.error.items()
                for i, samples in enumerate(profile.sizes)
            ],
        }
    )


def _search_to_dict(search: Search) -> dict[str, Any]:
    plan = search.plan
    return {
        "heads": [list(head) for head in plan.heads],
        "draws": plan.draws,
        "seed": plan.seed,
        "most": plan.most,
        "estimated_seconds": plan.seconds,
        "recommended": search.ranking[0]._asdict(),
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
                        "standard_error": search.standard_error(row),
                        "error_per_head": row.per_head.tolist(),
                        "seconds": row.seconds,
                    }
                    for row in candidate.steps
                ],
                "cost_ratio": candidate.choice.cost_ratio if candidate.steps else None,
            }
            for candidate in search.candidates
        ],
    }


PROFILE_COLUMNS = (
    *("table", "head", "estimator", "samples", "quantity", "value", "standard_error"),
    *("share_in_regime", "seconds", "cost_ratio"),
)


def profile_rows(profile: Advice, searched: Search | None) -> Iterator[dict[str, Any]]:
    """Yield a row for each number: moments, log excess, laws and predictions, what was measured."""
    for head in profile.heads:
        at = {"head": head_cell(head)}
        for table, values in (("moments", profile.table), ("log_excess", profile.excess)):
            for name, x in values.items():
                yield {"table": table, **at, "quantity": name, "value": float(x[head])}
        for name, x in profile.by_law.items():
            law = {"table": "law", **at, "estimator": name}
            error = float(profile.spread[name][head] * x[head])
            value = float(x[head])
            yield {**law, "quantity": "num_features", "value": value, "standard_error": error}
            value = float(profile.holds_from[name][head])
            yield {**law, "quantity": "holds_from", "value": value}
        if profile.error:
            best = profile.recommended(head)
            yield {
                "table": "recommended",
                **at,
                "estimator": best.estimator,
                "samples": best.num_features,
                "cost_ratio": best.cost_ratio,
            }
    for name, errors in profile.error.items():
        for i, samples in enumerate(profile.sizes):
            yield {
                "table": "prediction",
                "estimator": name,
                "samples": samples,
                "quantity": "error",
                "value": float(np.mean(errors[i])),
                "standard_error": profile.standard_errors(name)[i],
                "share_in_regime": float(np.mean(profile.inside[name][i])),
            }
    if searched is not None:
        yield from _search_rows(searched)


def _search_rows(search: Search) -> Iterator[dict[str, Any]]:
    for candidate in search.candidates:
        for row in candidate.steps:
            yield {
                "table": "measured",
                **name_of(row),
                "quantity": "error",
                "value": float(np.mean(row.errors)),
                "standard_error": search.standard_error(row),
                "seconds": row.seconds,
                "cost_ratio": candidate.choice.cost_ratio if row is candidate.steps[-1] else None,
            }
