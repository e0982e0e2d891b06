"""Results as one flat table each, for `--format csv`: names of columns never change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ...arrays.words import head_number
from ...compare import Comparison, Row, tolerated
from ...profile import Advice, Search
from ...registry import ESTIMATORS
from ...verification.tolerance import Tolerance
from ...verification.verdict import Verdict

__all__ = [
    "CHECKED",
    "COMPARISON",
    "PROFILE",
    "TOLERANCES",
    "VERIFIED",
    "checked",
    "comparison",
    "profile",
    "tolerances",
    "verified",
]

_Record = dict[str, Any]

COMPARISON = (
    *("estimator", "samples", "head", "error", "standard_error", "error_worst", "worst_head"),
    *("queries", "seconds", "ratio", "error_tolerated"),
)
PROFILE = (
    *("table", "head", "estimator", "samples", "quantity", "value", "standard_error"),
    *("share_in_regime", "seconds", "cost_ratio"),
)
TOLERANCES = (
    *("table", "profile", "head", "atol", "certain", "pair_rtol", "pair_atol"),
    *("certain_pair_rtol", "certain_pair_atol", "defect", "size", "yours", "needed"),
    *("verdict", "suspect"),
)
VERIFIED = (
    *("file", "part", "verdict", "profile", "dtype", "out_dtype", "alpha", "rms_z", "largest_z"),
    *("where", "known", "suspect", "estimate", "standard_error", "explained", "text", "seconds"),
)
CHECKED = (
    *("check", "status", "severity", "layer", "claim", "expected", "got", "error", "p"),
    *("adjusted", "samples", "suspects", "reason", "seconds"),
)


def _head(index: Sequence[int] | None) -> str:
    return "" if index is None else head_number(index)


def comparison(found: Comparison, per_head: bool) -> Iterator[_Record]:
    """A row for each estimator and S, of all heads; then of each head, if they are asked for."""
    reference, limits = found.rows[0].seconds, tolerated().errors
    for row in found.rows:
        yield {
            **_named(row),
            "error": float(np.mean(row.per_head)),
            "standard_error": row.standard_error if _draws(row) else 0.0,
            "error_worst": float(np.max(row.per_head)),
            "worst_head": _head(row.worst_head),
            "queries": row.queries,
            "seconds": row.seconds,
            "ratio": row.seconds / reference if row.seconds and reference else None,
            "error_tolerated": limits.get(row.estimator),
        }
    for row in found.rows if per_head else ():
        for head, error in np.ndenumerate(row.per_head):
            yield {**_named(row), "head": _head(head), "error": float(error)}


def _named(row: Row) -> _Record:
    return {"estimator": row.estimator, "samples": row.samples}


def _draws(row: Row) -> bool:
    return row.estimator in ESTIMATORS and ESTIMATORS[row.estimator].has("random")


def profile(found: Advice, searched: Search | None) -> Iterator[_Record]:
    """A row for each number: moments, log excess, laws and predictions, what was measured."""
    for head in found.heads:
        at = {"head": _head(head)}
        for table, values in (("moments", found.table), ("log_excess", found.excess)):
            for name, x in values.items():
                yield {"table": table, **at, "quantity": name, "value": float(x[head])}
        for name, x in found.by_law.items():
            law = {"table": "law", **at, "estimator": name}
            error = float(found.spread[name][head] * x[head])
            value = float(x[head])
            yield {**law, "quantity": "num_features", "value": value, "standard_error": error}
            value = float(found.holds_from[name][head])
            yield {**law, "quantity": "holds_from", "value": value}
        if found.error:
            best = found.recommended(head)
            yield {
                "table": "recommended",
                **at,
                "estimator": best.estimator,
                "samples": best.num_features,
                "cost_ratio": best.cost_ratio,
            }
    for name, errors in found.error.items():
        for i, samples in enumerate(found.sizes):
            yield {
                "table": "prediction",
                "estimator": name,
                "samples": samples,
                "quantity": "error",
                "value": float(np.mean(errors[i])),
                "standard_error": found.standard_errors(name)[i],
                "share_in_regime": float(np.mean(found.inside[name][i])),
            }
    if searched is not None:
        yield from _searched(searched)


def _searched(found: Search) -> Iterator[_Record]:
    for candidate in found.candidates:
        for row in candidate.steps:
            yield {
                "table": "measured",
                **_named(row),
                "quantity": "error",
                "value": float(np.mean(row.errors)),
                "standard_error": found.standard_error(row),
                "seconds": row.seconds,
                "cost_ratio": candidate.choice.cost_ratio if row is candidate.steps[-1] else None,
            }


def tolerances(found: Tolerance) -> Iterator[_Record]:
    """A row for each profile and head, and one for each defect."""
    for x in found.needs:
        yield {
            "table": "need",
            "profile": x.profile,
            "head": _head(x.head),
            "atol": x.atol,
            "certain": x.proven,
            "pair_rtol": x.pair.rtol,
            "pair_atol": x.pair.atol,
            "certain_pair_rtol": x.proven_pair.rtol,
            "certain_pair_atol": x.proven_pair.atol,
        }
    for power in found.power:
        yield {
            "table": "defect",
            "profile": found.profile,
            "defect": power.defect,
            "size": power.size,
            "yours": power.given,
            "needed": power.ours,
            "verdict": power.verdict,
            "suspect": power.suspect,
        }


def verified(found: Sequence[tuple[str, Verdict]]) -> Iterator[_Record]:
    """A row for each suspect of each part of a file, or one for a part without any."""
    for file, whole in found:
        parts: Mapping[str, Verdict] = whole.parts or {whole.of: whole}
        for part, verdict in parts.items():
            said = {
                "file": file,
                "part": part,
                **{x: getattr(verdict, x) for x in ("verdict", "profile", "dtype", "out_dtype")},
                "alpha": verdict.alpha,
                "rms_z": verdict.z.rms,
                "largest_z": verdict.z.largest,
                "where": _head(verdict.z.where),
                "known": verdict.known,
                "seconds": verdict.seconds,
            }
            for suspect in verdict.suspects:
                yield said | {
                    "suspect": suspect.name,
                    "estimate": suspect.estimate,
                    "standard_error": suspect.error,
                    "explained": suspect.explained,
                    "text": suspect.text,
                }
            if not verdict.suspects:
                yield said


def checked(report: Any) -> Iterator[_Record]:
    """A row for each check, and one for each that was not tried."""
    for result in report.results:
        row = {name: getattr(result, name) for name in CHECKED}
        yield row | {"suspects": "; ".join(result.suspects)}
    for name, why in report.not_tried.items():
        yield {"check": name, "status": "NOT TRIED", "reason": why}
