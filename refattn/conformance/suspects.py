"""Which catalogued defects explain a failure."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from importlib import resources
from typing import Any

import numpy as np

from .adapter import Adapter
from .checks import Trial
from .report import EXPECTED, FAIL, Result

__all__ = ["name"]

_MOST = 3  # suspects named for a failure
_ENOUGH = 4  # failed checks, at least, for a pattern: fewer are common to many defects
_ALIKE = 0.6  # least share of failed checks in common for a pattern to be named


def name(results: list[Result], trials: list[Trial]) -> None:
    """Name, for each failure, defects with the same numbers, then those with the same pattern."""
    failed = {r.check for r in results if r.status in (FAIL, EXPECTED)}
    if not failed:
        return
    ran = {r.check for r in results}
    adapter = trials[0].adapter
    pattern = list(_same_pattern(adapter, failed, ran)) if len(failed) >= _ENOUGH else []
    for result, trial in zip(results, trials, strict=True):
        if result.check in failed:
            compared = trial.case is not None and trial.case.want is not None
            exact = list(_same_numbers(trial)) if compared and result.p is None else []
            known = compared or result.p is not None  # p may be 0
            result.suspects = (exact or (pattern if known else []))[:_MOST]


def _same_numbers(trial: Trial) -> Iterable[str]:
    """Defects that give what the candidate gave, within the tolerance, at the failing case."""
    from .mutants import MUTANTS

    adapter, case = trial.adapter, trial.case
    if case is None or case.want is None or trial.got is None or isinstance(trial.got, tuple):
        return
    if adapter["scale"] is not None or "seed" in case.options:
        return
    needed = {"omega", "mask", "causal"} & set(case.options)
    for mutant in MUTANTS:
        if mutant.estimator != adapter.estimator or not needed <= set(mutant.capabilities):
            continue
        try:
            got = Adapter(mutant.fn, mutant.estimator)(*case.arrays, **case.options)
        except Exception:  # a defect may be that it fails
            continue
        finite = np.all(np.isfinite(got))
        if finite and np.max(np.abs(got - trial.got), initial=0.0) <= 4 * case.allowed:
            yield f"{mutant.name} (the same numbers): {mutant.effect}"


def _same_pattern(adapter: Adapter, failed: set[str], ran: set[str]) -> Iterable[str]:
    """Defects that fail much the same checks, of those that ran, most alike first."""
    from .mutants import MUTANTS

    effects = {mutant.name: mutant.effect for mutant in MUTANTS}
    found = []
    for mutant, checks in _kills().get(adapter.estimator, {}).items():
        theirs = set(checks) & ran
        alike = len(theirs & failed) / max(len(theirs | failed), 1)
        if alike >= _ALIKE and mutant in effects:
            found.append((-alike, mutant))
    for alike, mutant in sorted(found):
        yield f"{mutant} (fails {-alike:.0%} the same checks): {effects[mutant]}"


@cache
def _kills() -> dict[str, dict[str, list[str]]]:
    """Which checks fail for which defect, as measured; see `mutants`."""
    text = resources.files(__package__).joinpath("kills.json").read_text(encoding="utf-8")
    content: dict[str, Any] = json.loads(text)
    return content
