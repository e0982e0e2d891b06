"""What the command line shows: tables, JSON, plots."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np

from ..._version import __version__
from ...arrays.library import Floats
from ...arrays.words import head_number, portable, printable
from ...compare import Comparison, Row, listed, tolerated
from ...files.tensors import Tensors
from ...profile import Advice, Candidate, Choice, Search, advice
from ...registry import ESTIMATORS
from ...rounding.problems import CALLED, Problem
from ...verification.findings import Part
from ...verification.tolerance import LEVEL, Tolerance
from ...verification.verdict import Verdict
from .page import Page, Table, limit

__all__ = [
    "LABELS",
    "Verified",
    "checked",
    "comparison",
    "comparison_to_json",
    "notices",
    "profile",
    "profile_to_json",
    "tolerances",
    "tolerances_to_json",
    "verified",
    "verified_to_json",
]


# Moments that a narrow page leaves out, the first of them first.
_LEAST = (("5%", "95%"), ("rank q", "rank k"), ("cond q", "cond k"), "SDERF", "OPRF")

LABELS = {**dict(zip(advice.LAWS, advice.LAWS, strict=True)), "ra": "ra (bound)"}


def checked(report: Any, reproducers: bool, page: Page) -> None:
    """Print a report of checks, and scripts that show its failures."""
    if page.markdown:
        _checks(report, page)
    else:
        page.report(report.text(min(limit() or 100, 100)))
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
    parts: Mapping[str, Part]
    verdict: Verdict

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
    page.report(printable(str(found.verdict)))


def _introduction(tensors: Tensors, problem: Problem, dtype: str) -> str:
    """Name of the file, shapes, dtype, and the conventions, in two lines."""
    own = {name: f" {x}" * (x != tensors.dtype) for name, x in tensors.dtypes.items()}
    shapes = ", ".join(f"{name} {x}{own.get(name, '')}" for name, x in tensors.shapes.items())
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
            table.add_row(head_number(head), *needs)
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
    path: Path, arrays: dict[str, Floats], found: Comparison, per_head: bool, page: Page
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
    least = ("which", "worst head", "seconds", "tolerated")
    table = Table("estimator", *heads, drop=least, keys=2)
    for row in rows:
        table.add_row(
            row.estimator,
            "" if row.samples is None else str(row.samples),
            _digits(np.mean(row.per_head)),
            _uncertainty(row.standard_error) if _draws(row) else "",
            _digits(np.max(row.per_head)),
            head_number(row.worst_head),
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
            table.add_row(head_number(head), *(_digits(row.per_head[head]) for row in rows))
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


def _heading(path: Path, arrays: dict[str, Floats]) -> str:
    """Name of the file, shapes and dtype."""
    shapes = ", ".join(f"{name} {x.shape}" for name, x in arrays.items())
    return f"{click.format_filename(path.name)}: {shapes}, {arrays['q'].dtype}"


def _times(seconds: float | None, reference: float | None) -> tuple[str, str]:
    if seconds is None or reference is None:
        return "", ""
    return f"{seconds:.2g}", _digits(seconds / reference)


def _digits(value: Any) -> str:
    return f"{value:#.3g}".rstrip(".")


def comparison_to_json(path: Path, arrays: dict[str, Floats], found: Comparison) -> str:
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


def _origin(path: Path, arrays: dict[str, Floats]) -> dict[str, Any]:
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


def profile(
    path: Path, arrays: dict[str, Floats], found: Advice, searched: Search | None, page: Page
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
    labels = {f"{part}_{x}": label.format(x) for part, label in advice.PARTS.items() for x in "qk"}
    labels |= {name: f"{p:.0%}" for name, p in advice.QUANTILES.items()}
    page.table(_per_head(found, {labels[name]: x for name, x in found.table.items()}))
    if max(found.rows) > advice.QUANTILE_ROWS:
        page.say(f"quantiles: over at most {advice.QUANTILE_ROWS} evenly spaced queries and keys")
    page.say("\nExpected log excess of the variance of a kernel estimate, by proposal (best: 0)")
    page.table(_per_head(found, found.excess))
    if not found.error:
        page.say("\nFILE has no v: predicted errors and the recommendation are left out.")
        return
    _show_laws(found, page)
    if searched is not None:
        _show_search(searched, found, page)
    _show_recommendation(found, searched, page)


def _show_laws(found: Advice, page: Page) -> None:
    page.say("\nPredicted relative error, mean over heads (ra: an upper bound)")
    table = Table("S", *LABELS.values(), drop=("rfa-adapted", "is"))
    some = found.queries < found.rows[0]
    outside = False
    for i, samples in enumerate(found.sizes):
        cells = []
        for name in advice.LAWS:
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
        f"\nS by the law for relative error {found.target:g}; from: the S from which that law "
        "holds for all queries (1 where not shown); fewer may do: --measure tries them"
    )
    columns, starts = {}, []
    for name in found.by_law:
        columns[LABELS[name]] = found.by_law[name]
        if np.any(found.holds_from[name] > 1):
            starts.append(f"{name} from")
            columns[starts[-1]] = found.holds_from[name]
    table = Table("head", *columns, drop=(("is", "is from"), *starts))
    for head in found.heads:
        table.add_row(head_number(head), *(_count(float(x[head])) for x in columns.values()))
    page.table(table)
    if some:
        spreads = [f"{100 * float(np.median(x)):.2g}% ({y})" for y, x in found.spread.items()]
        page.say(f"laws: of {found.queries} evenly spaced queries of each head, and all keys;")
        page.say("±: one standard error from this choice; that of S by the law, median over heads:")
        page.say(", ".join(spreads))


def _worth(found: Advice) -> str:
    """Compare the numbers of rows with d^2."""
    n, m = found.rows
    counts = f"n = {n}, m = {m}"
    rough = sorted({x for x in (n, m) if x <= found.advised})
    if not rough:
        return f"{counts}; N > d^2 = {found.advised}, as reference 002 advises"
    listed = " and ".join(map(str, rough))
    sign = "<" if rough[-1] < found.advised else "<="
    return f"{counts}\nN = {listed} {sign} d^2 = {found.advised}: covariances are rough"


def _per_head(found: Advice, columns: dict[str, Floats]) -> Table:
    """Make a table of one row a head, the median and the worst."""
    table = Table("head", *columns, drop=_LEAST)
    for head in found.heads:
        table.add_row(head_number(head), *(_cell(x[head]) for x in columns.values()))
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


def _show_search(searched: Search, found: Advice, page: Page) -> None:
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
            samples if candidate.reached or not samples else _missed(candidate),
            _digits(np.mean(row.errors)),
            _uncertainty(searched.standard_error(row)),
            _digits(np.max(row.per_head)),
            f"{row.seconds:.2g}",
            _digits(choice.cost_ratio),
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
    """More than the largest S tried; of windows, from the root of m on both ways, none."""
    tried = [row.samples or 0 for row in candidate.steps]
    return f"> {tried[-1]}" if tried[-1] == max(tried) else "none"


def _uncertainty(value: float) -> str:
    """A standard error; nothing where there is no chance, - where it is not known."""
    return "-" if math.isnan(value) else f"{value:.2g}" if value else ""


def _show_recommendation(found: Advice, searched: Search | None, page: Page) -> None:
    heads, target = len(found.heads), f"recommended for relative error {found.target:g}"
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
    if name == advice.EXACT:
        return name
    size = "" if samples is None else f" with S = {_count(samples)}"
    return f"{name}{size}, {_digits(ratio)} of the {price} of {advice.EXACT}"


def _count(value: float) -> str:
    if not math.isfinite(value):
        return "-"
    return f"{value:g}" if value < 1e6 else f"{value:.2e}"


def profile_to_json(
    path: Path, arrays: dict[str, Floats], found: Advice, searched: Search | None = None
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
