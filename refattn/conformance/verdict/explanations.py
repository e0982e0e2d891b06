"""Explain the names in reports: checks, known bugs, estimators, options and severities."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from functools import cache
from importlib import resources
from typing import Any

from ...arrays.words import close
from ...registry import ESTIMATORS, TRAITS
from ...rounding.profiles import PROFILES, Profile
from ..candidate.failures import SEVERITIES
from ..candidate.tags import CAPABILITIES, TAGS
from ..checks.trials import CHECKS, Check
from ..defects import MUTANTS

_LAYERS = {
    "identity": "an identity, which holds for every input up to the rounding error of the dtype",
    "law": "a distribution of random draws, tested by exact p-values",
    "bound": "a property of random draws, tested by p-values from bounds for every sample size",
}
_OF_DRAWS = "how the function draws: the distribution, the coupling, and what a seed changes"
_OF_NUMBERS = "the element and the sizes in the report (--reproducers prints a script)"
_OF_VERIFY = {  # tests and verdicts
    "bound": "a test of verify: no error exceeds its proven bound, whatever the roundings are",
    "largest z": "a test of verify: the largest error divided by its standard deviation",
    "mean square": "a test of verify: the mean square of errors divided by standard deviations",
    "mean square of tiles": "the same for the rows of a tile, of 16 or more queries",
    "mean square of heads": "the same for the rows of a head",
    "likelihood": "a test of verify: another profile is much likelier than this one",
    "PASS": "a verdict: no test failed, and a wrong implementation would have been noticed",
    "FAIL": "a verdict: a correct implementation gives such results with probability 1e-6 at most",
    "UNDERPOWERED": "a verdict: no test failed, but a wrong implementation might also have passed",
}
_PROFILES = {  # by the first word of their names
    "math": "everything but the result is in float32 (or float64)",
    "serial": "as math, and sums add one term after the other",
    "recomputed": "as math, but weights are computed from log normalisers",
    "flash": "a fused kernel: weights relative to the largest are rounded, sums are not",
    "upcast": "scores and softmax are in float32, then probabilities are rounded",
    "eager": "step by step: scores and probabilities are rounded to the storage type",
    "tf32": "matrix units round their inputs to TF32",
    "fp8": "weights, or all inputs of products, are rounded to 8 bits",
    "half": "sums of products are kept in float16",
}
_FEW = 4  # known bugs that are listed for a check


@cache
def kills() -> dict[str, dict[str, list[str]]]:
    """Load which checks fail for which defect, as measured; see `defects`."""
    text = resources.files(__package__).joinpath("kills.json").read_text(encoding="utf-8")
    content: dict[str, Any] = json.loads(text)
    return content


def names() -> list[str]:
    """Return all names that can be explained."""
    bugs = (x.name for x in MUTANTS)
    found = [*CHECKS, *bugs, *ESTIMATORS, *CAPABILITIES, *TAGS, *SEVERITIES]
    return list(dict.fromkeys([*found, *_OF_VERIFY, *PROFILES]))


def groups() -> dict[str, list[str]]:
    """Return all names by what they name, each once; known bugs by their estimators."""
    named = {"Checks": list(CHECKS)}
    for bug in MUTANTS:
        named.setdefault(f"Known bugs of {bug.estimator}", []).append(bug.name)
    named["Estimators"] = [x for x, record in ESTIMATORS.items() if record.name == x]
    named["Capabilities and tags"] = [*CAPABILITIES, *TAGS]
    named["Severities"] = [*SEVERITIES]
    first = {name: title for title, some in reversed(named.items()) for name in some}
    return {
        x: [name for name in dict.fromkeys(some) if first[name] == x] for x, some in named.items()
    }


def explain(name: str) -> list[str]:
    """Explain a name, in lines; a name of several things is explained as each.

    Examples
    --------
    >>> explain("order_of_keys")[0]
    'check order_of_keys: the order of keys does not matter.'
    """
    lines = [*_explain_bugs(name)]
    if name in CHECKS:
        lines = [*_explain_check(CHECKS[name]), *lines]
    if name in ESTIMATORS:
        lines += _explain_estimator(name)
    for kind, words, value in (("capability", CAPABILITIES, ""), ("tag", TAGS, "=VALUE")):
        if name in words:
            lines.append(f"{kind} {name}: {words[name]}.")
            lines.append(f"  declare it: refattn check MODULE:CALLABLE --{kind} {name}{value}")
    if name in SEVERITIES:
        lines.append(f"severity {name}, of a failure: {SEVERITIES[name]}.")
    if name in PROFILES:
        lines.append(f"profile {name}, of refattn verify: {_describe_profile(name)}.")
    if name in _OF_VERIFY:
        lines.append(f"{name}: {_OF_VERIFY[name]}.")
    if not lines:
        hint = close(name, names())
        known = "reports name known bugs, and refattn check --list prints all other names"
        raise ValueError(f"nothing is named {name!r} ({known}).{hint}")
    return lines


def _explain_check(check: Check) -> Iterator[str]:
    """Yield what a check tests, its kind, how it is computed, and examples."""
    yield f"check {check.name}: {check.claim}."
    yield f"  kind: {_LAYERS[check.layer]}"
    if check.traits:
        yield "  for estimators with the traits:"
        yield from (f"    {x}: {TRAITS[x]}" for x in sorted(check.traits))
    if how := inspect.getdoc(check.run):
        yield "  how:"
        yield from (f"    {line}".rstrip() for line in how.splitlines())
    effects = {x.name: x.effect for x in MUTANTS}
    known = [
        bug for bugs in kills().values() for bug, failed in bugs.items() if check.name in failed
    ]
    if known:
        yield f"  known bugs that it detects: {len(known)}, such as"
        unlike = {
            effects.get(bug, ""): bug for bug in sorted(known, key=_count_failed, reverse=True)
        }
        yield from (f"    {bug}: {effect}" for effect, bug in [*unlike.items()][: -_FEW - 1 : -1])
    yield f"  look first at: {_OF_NUMBERS if check.layer == 'identity' else _OF_DRAWS}"
    yield f"  run it alone: refattn check MODULE:CALLABLE --check {check.name}"


def _count_failed(bug: str) -> int:
    """Count the checks that a known bug fails: the fewer, the better an example it is of each."""
    return min(len(bugs[bug]) for bugs in kills().values() if bug in bugs)


def _explain_bugs(name: str) -> Iterator[str]:
    """Yield what a known bug does, what it changes, and which checks detect it."""
    for bug in (x for x in MUTANTS if x.name == name):
        yield f"known bug {name}, of {bug.estimator}: {bug.effect}"
        if bug.seen:
            yield f"  seen in: {bug.seen}"
        if change := bug.fn.shown(most=20):
            yield from (f"  {line}" for line in change.splitlines())
        how = "write what is marked -" if change else "compare yours with `python -m refattn.naive`"
        yield f"  what to do: {how}"
        failed = dict.fromkeys(c for bugs in kills().values() for c in bugs.get(name, ()))
        if failed:
            yield f"  detected by: {', '.join(failed)}"


def _explain_estimator(name: str) -> Iterator[str]:
    """Yield the formula of an estimator in words, and its other names."""
    record = ESTIMATORS[name]
    formula = getattr(record.naive, "func", record.naive)
    summary = (inspect.getdoc(formula) or record.name).splitlines()[0]
    yield f"estimator {', '.join((record.name, *record.aliases))}: {summary}"
    yield from (f"  {trait}: {TRAITS[trait]}" for trait in record.traits)
    drawn = [f"{record.size}="] * (record.size is not None) + ["seed="] * record.has("random")
    drawn += [f"{gate}=" for gate in record.gates]
    yield f"  it is called as: fn({', '.join([*record.arrays, *drawn])})"
    yield f"  test yours: refattn check MODULE:CALLABLE --estimator {name}"


def _describe_profile(name: str) -> str:
    """Say what a kernel of a profile rounds, with the fields of `rounding.Profile`."""
    profile = PROFILES[name]
    changed = (x for x in profile._fields if getattr(profile, x) != getattr(Profile(), x))
    fields = ", ".join(f"{x}={getattr(profile, x)}" for x in changed)
    kind = name.partition("-")[0].removesuffix("64")
    return _PROFILES[kind] + f" ({fields})" * bool(fields)
