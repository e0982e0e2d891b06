r"""Judge kernels that divide queries and keys by the norms of their rows themselves.

Three norms are in use: :math:`\max(|x|, \epsilon)`, :math:`\sqrt{|x|^2 + \epsilon}` and, without a
weight, the root mean square :math:`\sqrt{|x|^2 / d + \epsilon}`. A FAIL is a FAIL by each of these,
so that a correct kernel with one of them fails with probability alpha at most. What is divided may
be rounded to the storage type before it is multiplied: profiles `...-cast`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ...arrays import checks
from ..rounding.formats import FORMATS
from ..rounding.norms import NORMALISED, NORMALISED_TYPES, Norm, divide_rows, list_norms
from ..rounding.problems import Problem
from ..verification.findings import ALL_BUT, Part
from ..verification.verdict import list_few_rows

_SAME_NORM = 1 / 16  # of a unit roundoff, by which two norms may differ and are one


def check_norms(
    normalise: Any, epsilon: Any, about: Mapping[str, Any], kind: str, storage: str
) -> None:
    """Check that what a call is about can be judged if inputs are normalised inside."""
    if normalise is None:
        if epsilon is not None:
            raise ValueError("`norm_eps` must come with `normalise`.")
        return
    checks.choice("normalise", normalise, NORMALISED)
    if epsilon is not None:
        checks.real("norm_eps", epsilon, positive=True)
    for name in (*(f"d{x}" for x in normalise), "part_out"):
        if about.get(name) is not None:
            raise ValueError(f"`{name}` must not be given with `normalise`: it is not judged then.")
    if kind != "scores":
        raise ValueError(f"`normalise` must be left out: it is for softmax attention, got {kind}.")
    if storage not in NORMALISED_TYPES:
        kinds = " or ".join(NORMALISED_TYPES)
        raise ValueError(f"`normalise` must come with a kernel in {kinds}, got {storage}.")


def judge_norms(
    parts: Mapping[str, Part],
    asked: tuple[str | None, float | None],
    judge: Callable[[Mapping[str, Part]], Any],
) -> Any:
    """Judge by each form of the norm until one does not fail, and say which form it was.

    Without names there is none.
    """
    names, epsilon = asked
    if names is None:
        return judge(parts)
    called = " and ".join({"q": "queries", "k": "keys"}[x] for x in names)
    tried: list[tuple[Norm, Any]] = []
    problem = next(iter(parts.values())).problem
    for norm in list_norms(epsilon):
        if not all(_are_apart(problem, names, norm, x) for x, _ in tried):
            continue
        divided = {
            x: y._replace(problem=divide_rows(y.problem, names, norm)) for x, y in parts.items()
        }
        tried.append((norm, judge(divided)))
        if tried[-1][1].verdict != "FAIL":
            break
    norm, found = min(tried, key=lambda x: _prefer(x[1]))
    return found.with_remark(f"{called} x are divided by {norm.words}")


def _prefer(found: Any) -> tuple[bool, bool, bool, float]:
    """Put what does not fail first, then few wrong rows, what has a cause, and what is nearest."""
    failed, explained = found.verdict == "FAIL", any(x.explained > ALL_BUT for x in found.suspects)
    return failed, not list_few_rows(found), not explained, float(found.z.rms)


def _are_apart(problem: Problem, names: Sequence[str], one: Norm, other: Norm) -> bool:
    """Tell whether two forms give numbers that roundings do not hide."""
    least = _SAME_NORM * FORMATS[problem.storage].unit
    rows = (problem.read(x)[name] for x in np.ndindex(problem.lead) for name in names)
    with np.errstate(all="ignore"):
        return any(np.any(np.abs(one.of(x) / other.of(x) - 1) > least) for x in rows)
