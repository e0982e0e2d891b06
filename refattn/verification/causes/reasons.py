"""The reasons of a failure: what is named, in which order, and where the wrong rows are."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ...rounding.problems import Problem
from ...rounding.profiles import PROFILES, Profile
from ..choice import ProfileChoice, choose_profiles, usual_profiles
from ..findings import Finding, Numbers, Part, Suspect, place
from ..verdict import Verdict
from ..worst import find_worst
from ..z_scores import mean_square
from .alternatives import list_alternatives
from .backward import explain_backward
from .output import as_suspect, explain_output, share_of_offset
from .wrong_rows import Sample

_MOST = 0.9  # of the error, at least, that is explained by a defect of a fitted size
_AS_GOOD = 0.03  # of the error, by which a fit may explain less than the best
_SMALL_REST = 1.5  # mean square of z up to which a fit to the derivatives leaves roundings only
_TRUNCATED = 2.0  # spacings beyond which nothing is truncated


def explain(
    problem: Problem, numbers: Numbers, verdict: Verdict, profile: ProfileChoice = None
) -> Verdict:
    """Give the verdict on a failed output its suspects, and the place of the wrong rows."""
    if problem.gradient is not None or 0 in (*problem.lead, *problem.shape):
        return verdict
    profiles = list_profiles(verdict, numbers, profile)
    by = profiles.get(verdict.by, next(iter(profiles.values())))
    verdict = verdict._replace(worst=find_worst(problem, numbers, verdict, by))
    if verdict.verdict != "FAIL":
        return verdict
    failed = failed_part(verdict.tests, verdict.alpha)
    fits = tidy_fits(verdict, failed)
    if problem.kind != "scores":
        found = list(_explain_features(problem, numbers, profiles, verdict))
        return verdict._replace(suspects=[*found, *fits])
    where = verdict.worst.where if verdict.worst else ()
    where = (*where, 0) if where and failed == "lse" else where  # of a row, any column
    rest = verdict.dtype, failed, where
    found, sample = explain_output(problem, numbers, profiles, *rest)
    if failed == "lse" and (found or share_of_offset(problem, sample) < _MOST):
        fits = []
    suspects = order_suspects(found, fits)
    remarks = [*verdict.remarks, *_remark_zeros(problem, numbers, sample)]
    return verdict._replace(
        suspects=suspects, place=describe_place(problem, sample), remarks=remarks
    )


def _remark_zeros(problem: Problem, numbers: Numbers, sample: Sample) -> Iterator[str]:
    """Say that wrong rows are 0, if some are and others are not."""
    zeros = np.zeros_like(sample.wrong)
    for at in np.flatnonzero(sample.wrong.any(1)):
        got = numbers.out(tuple(map(int, np.unravel_index(at, problem.lead))))
        zeros[at] = sample.wrong[at] & ~np.any(got, -1)
    if zeros.any() and not zeros.all():
        *head, row = (int(x) for x in np.argwhere(zeros)[0])
        index = np.unravel_index(head[0], problem.lead) if problem.lead else ()
        first = place((*map(int, index), row))
        yield f"{zeros.sum()} of the wrong rows are exactly 0, the first is {first}"


def explain_gradients(
    parts: Mapping[str, Part],
    verdicts: Mapping[str, Verdict],
    profile: ProfileChoice,
    forward: str,
) -> dict[str, Verdict]:
    """Give the verdicts on failed gradients their suspects; that on the output is `forward`."""
    failed = [name for name, x in verdicts.items() if x.verdict == "FAIL"]
    if not failed:
        return dict(verdicts)
    first = verdicts[failed[0]]
    profiles = list_profiles(first, parts[failed[0]].numbers, profile)
    by = profiles.get(first.by, next(iter(profiles.values())))
    own = forward != "PASS"
    places = {x: verdicts[x].z.where for x in failed}
    named, samples = explain_backward(parts, places, by, first.dtype, own)
    explained = dict(verdicts)
    for name in failed:
        verdict, problem = verdicts[name], parts[name].problem
        suspects = order_suspects(named.get(name, []), tidy_fits(verdict, "out"))
        where = describe_place(problem, samples[name])
        worst = find_worst(problem, parts[name].numbers, verdict._replace(of=name), by)
        explained[name] = verdict._replace(suspects=suspects, place=where, worst=worst)
    return explained


def failed_part(tests: Sequence[Finding], alpha: float) -> str:
    """Say whether tests of the output failed, tests of log normalisers, or both."""
    of_lse = {"lse" in x.name.split() for x in tests if x.adjusted <= alpha}
    return "both" if len(of_lse) == 2 else "lse" if True in of_lse else "out"


def list_profiles(verdict: Verdict, numbers: Numbers, profile: ProfileChoice) -> dict[str, Profile]:
    """List the profiles that were tried, the tightest first."""
    if isinstance(profile, str | Profile):
        return choose_profiles(verdict.dtype, numbers.out_dtype, profile)
    order = [*usual_profiles(verdict.dtype), *PROFILES]
    names = sorted(verdict.trials, key=lambda x: order.index(x) if x in order else len(order))
    usual = [x for x in usual_profiles(verdict.dtype) if x != "math"]
    first = [x for x in usual[:1] if x in names]
    return choose_profiles(
        verdict.dtype, numbers.out_dtype, [*first, *(x for x in names if x not in first)]
    )


def tidy_fits(verdict: Verdict, failed: str) -> list[Suspect]:
    """Keep the fits that explain nearly all of the error beyond roundings, of the part that failed.

    An error is given to those alone that leave nothing but roundings: the derivative of a large
    defect is not the defect.
    """
    square = verdict.z.rms**2
    sized = [x for x in verdict.suspects if x.error < math.inf]
    kept = [x for x in sized if (failed == "lse") == x.name.startswith("lse")]
    kept = [x for x in kept if not x.name.startswith("truncated") or 0.3 < x.estimate <= _TRUNCATED]
    most = max((x.explained for x in kept), default=0.0) * square
    noise = 4 * math.sqrt(2 / max(math.prod(verdict.shape), 1))
    over = max(square - 1.0 - noise, most, 1e-300)
    fits = []
    for x in kept:
        if failed == "lse":
            fits.append(x._replace(explained=min(x.explained, 1.0)))
            continue
        share = min(max(x.explained * square / over, 0.0), 1.0)
        text = x.text
        if square * (1 - min(x.explained, 1.0)) > _SMALL_REST:
            text = re.sub(r" ± \S*\d", "", text)
        if share >= _MOST:
            fits.append(x._replace(explained=share, text=text))
    best = max((x.explained for x in fits), default=0.0)
    return sorted((x for x in fits if x.explained > best - _AS_GOOD), key=lambda x: -x.explained)


def order_suspects(found: Sequence[Suspect], fits: Sequence[Suspect]) -> list[Suspect]:
    """Put what holds first, then the fits that do, then what explains a part."""
    holding = [x for x in found if x.name == "convention"]
    if any(x.name.startswith("scale") and "±" in x.text for x in fits):  # of all rows: the surer
        holding = [x for x in holding if "times what was said" not in x.text]
    rest = [] if holding or fits else [x for x in found if x.name != "convention"][:1]
    return [*holding, *fits, *rest]


def describe_place(problem: Problem, sample: Sample) -> str:
    """Say where wrong rows are: heads, rows and columns."""
    wrong = sample.wrong
    if not wrong.any():
        return ""
    heads, rows = np.flatnonzero(wrong.any(1)), np.flatnonzero(wrong.any(0))
    looked = " that were looked at" if sample.looked < wrong.size else ""
    parts = [f"{int(wrong.sum()):,} of {sample.looked:,} rows{looked}"]
    if wrong.sum() == sample.looked:
        parts = [f"all {sample.looked:,} rows{looked}"]
    if problem.lead and len(heads) < len(wrong):
        names = [place(tuple(map(int, np.unravel_index(x, problem.lead)))) for x in heads[:4]]
        more = f" and {len(heads) - 4} more" if len(heads) > 4 else ""
        parts.append(f"head{'s' * (len(heads) > 1)} {', '.join(names)}{more}")
    if len(rows) < wrong.shape[1]:
        parts.append(f"{problem.rows} {describe_span(rows)}")
    columns = np.flatnonzero(sample.columns)
    if 0 < len(columns) < len(sample.columns):
        parts.append(f"columns {describe_span(columns)}")
    return ", ".join(parts)


def describe_span(numbers: npt.NDArray[Any]) -> str:
    """Write numbers as a range, or a few of them."""
    first, last = int(numbers[0]), int(numbers[-1])
    if len(numbers) == 1:
        return str(first)
    if last - first + 1 == len(numbers):
        return f"{first} to {last}"
    steps = np.unique(np.diff(numbers))
    if len(steps) == 1:
        return f"{first} to {last} in steps of {int(steps[0])}"
    return f"among {first} to {last}"


def _explain_features(
    problem: Problem, numbers: Numbers, profiles: Mapping[str, Profile], verdict: Verdict
) -> Iterator[Suspect]:
    """List problems of random features, or of linear attention, that explain nearly all."""
    kernel = next(iter(profiles.values())).kernel(verdict.dtype)
    for alternative in list_alternatives(problem):
        square = mean_square(alternative.problem, numbers, kernel)
        if square < min(4.0, verdict.z.rms**2 / 4):
            yield as_suspect(f"agrees if {alternative.text}")
