"""Explain the names in reports: checks, known bugs, estimators, options and severities."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from functools import cache
from importlib import resources
from typing import Any

from ....arrays.words import close
from ....registry import ESTIMATORS, TRAITS, Estimator
from ...mistakes.defects import MUTANTS
from ...rounding.hardware import UNITS
from ...rounding.profiles import EVERY_PROFILE, Profile
from ...verification.directions import SENTENCES
from ..candidate.failures import SEVERITIES
from ..candidate.tags import CAPABILITIES, TAGS, write_tag
from ..checks.trials import CHECKS, Check
from ..conventions import SPECS

_TEST_OF_DRAWS = "a test of random draws: a correct function fails with probability at most alpha"
_LAYERS = {
    "identity": "a correct function always passes, whatever the input and the seed",
    "law": _TEST_OF_DRAWS,
    "bound": f"{_TEST_OF_DRAWS}, by inequalities that hold for any number of seeds",
}
_OTHER_KINDS = {  # of checks that are unlike the others of their layer
    "rounding_errors": "a test of rounding errors: a correct function fails with probability below "
    "1e-8",
    "unseen_law": "no test",
    "unseen_weights": "no test",
}
_OF_DRAWS = "how the function draws (distribution, coupling, use of the seed)"
_OF_NUMBERS = "the element and the sizes in the report (--reproducers prints a script)"
_FITTED = "a test of verify: the errors look like a known bug: "
_EXAMPLES = dict.fromkeys(("size", "amount", "factor", "rest", "more"), "x")
_EXAMPLES |= {"result": "the output", "side": "large or small", "way": "rise or fall"}
_SQUARES = "a test of verify: the mean square of error / standard deviation"
_OF_REPORTS = {  # tests of verify, verdicts, and columns of tables
    "bound": "a test of verify: no error exceeds its proven bound; the number is error / bound",
    "bound of lse": "a test of verify: no error of lse exceeds its proven bound; the number is "
    "error / bound",
    "largest z": "a test of verify: the largest error divided by its standard deviation",
    "mean square": _SQUARES,
    "mean square of lse": f"{_SQUARES}, of lse",
    "mean square of tiles": f"{_SQUARES}, of a tile of 16 or more queries of a head",
    "mean square of heads": f"{_SQUARES}, of a head",
    "mean square of columns": f"{_SQUARES}, of a column of the output",
    "sum of squares of a tile": "a test of verify: the sum of (error / standard "
    "deviation)^2 over a tile, given as the mean; also valid if columns are correlated",
    "likelihood": "a test of verify: whether another profile is much likelier than this one",
    "some rows": "a test of verify: all its other tests, of a few rows only",
    "key": f"{_FITTED}a key is missing, or counts several times",
    "factor of a tile": f"{_FITTED}a tile of queries of a head is x times what it should be",
    "factor of few rows": f"{_FITTED}a few rows of a head are x times what they should be",
    "row": "a test of verify: of each row all columns together, and its log normaliser; the number "
    "is the mean of (error / standard deviation)^2 in the least likely row",
    "bound of scores": "a test of verify: roundings allow each choice of keys; the number is how "
    "far a score is below those of other keys, over the bound",
    "digits of the state": "a test of verify: a last state has more digits than a narrower type",
    **{name: _FITTED + text.format_map(_EXAMPLES) for name, text in SENTENCES.items()},
    "rms": "root mean square of the errors divided by their standard deviations: about 1 if right",
    "profiles ruled out": "profiles (which steps of a kernel round) that a test of verify rejects",
    "unknown cause": "no known bug that verify tries explains most of the error",
    "changed-step": "no known bug: the formula with one step changed gives the same numbers",
    "PASS": "a verdict: no test failed, and errors larger than those that the report names would "
    "have been detected",
    "FAIL": "a verdict: a correct implementation gives such results with probability at most alpha",
    "UNDERPOWERED": "a verdict: no test failed, but a wrong implementation might also have passed",
    "p": "a correct implementation gives a result as extreme as this one with at most this "
    "probability",
    "adjusted": "a p-value corrected for the number of tests (Holm's method)",
    "error_mean": "a column of compare: |out - exact| / |exact|, the mean over heads",
    "error_worst": "a column of compare: the same error in the worst head",
    "standard_error": "a column of compare: the standard error of error_mean over seeds",
    "ratio": "a column of compare: seconds divided by those of exact attention",
    "error_tolerated": "a column of compare: the largest error in all layers with which a sentence "
    "encoder still works, as measured on all-MiniLM-L6-v2",
}
_PROFILES = {  # by the first word of their names
    "math": "everything but the result is in float32 (or float64)",
    "serial": "as math, and sums add one term after the other",
    "recomputed": "as math, but weights are e^(score - lse)",
    "flash": "a fused kernel: weights, divided by the largest, are rounded; sums are not",
    "upcast": "scores and softmax are in float32, then probabilities are rounded",
    "eager": "step by step: scores and probabilities are rounded to the storage type",
    "tf32": "matrix units round their inputs to TF32",
    "fp8": "inputs of products are rounded to 8 bits",
    "half": "sums of products are kept in float16",
    "chunk": "a recurrence that is computed in chunks of `run` tokens",
    "linear": "linear attention step by step: features, sums and quotients are rounded",
}
_VARIANTS = {  # by the other words of their names
    "weights": "queries, keys and values are not",
    "fast": "exponentials are less accurate",
    **{
        x: f"sums of gradients are rounded after each {x} queries or 512 keys"
        for x in ("256", "64", "32")
    },
    "scaled": "the scale is applied before rounding, not after",
    "again": "as flash-scaled, and weights are rounded before they multiply their derivatives",
    "unrounded": "D = d_out . out uses the output before it was rounded",
    "eager": "weights are divided by their sum before they are rounded",
    "narrow": "every step of the softmax is rounded too",
    "upcast": "a backward pass has probabilities before they were rounded",
    "roots": "queries and keys are multiplied by the square root of the scale first",
    "truncated": "further bits are dropped, not rounded",
    "cast": "arrays in 8 bits are rounded to the storage type first",
    "head": "gradients of shared keys and values are rounded for each query head",
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
    found = [*CHECKS, *bugs, *ESTIMATORS, *CAPABILITIES, *TAGS, *SPECS, *SEVERITIES]
    return list(dict.fromkeys([*found, *TRAITS, *_OF_REPORTS, *EVERY_PROFILE, *UNITS]))


def groups() -> dict[str, list[str]]:
    """Return all names by what they name, each once; known bugs by their estimators."""
    named = {"Checks": list(CHECKS)}
    for bug in MUTANTS:
        named.setdefault(f"Known bugs of {bug.estimator}", []).append(bug.name)
    # Aliases share a record, whose name is that of one of them.
    named["Estimators"] = [x for x, record in ESTIMATORS.items() if record.name == x]
    named["Capabilities and tags"] = [*CAPABILITIES, *TAGS]
    named["Specs"] = [*SPECS]
    named["Severities"] = [*SEVERITIES]
    # Later entries of a dict win: reversed, a name stays where it is first.
    first = {name: title for title, some in reversed(named.items()) for name in some}
    return {
        x: [name for name in dict.fromkeys(some) if first[name] == x] for x, some in named.items()
    }


def explain(name: str) -> list[str]:
    """Explain a name, in lines; a name of several things is explained as each.

    Upper and lower case make no difference.

    Examples
    --------
    >>> explain("order_of_keys")[0]
    'check order_of_keys: the order of keys does not matter.'
    """
    name = re.sub(r"( of tiles) of \d+$| of a head$", r"\1", name)  # tests of verify
    # `explain` takes names as people type them.
    name = {x.lower(): x for x in names()}.get(name.lower(), name)
    lines = [*_explain_bugs(name)]
    if name in CHECKS:
        lines = [*_explain_check(CHECKS[name]), *lines]
    if name in ESTIMATORS:
        lines += _explain_estimator(name)
    for kind, words, value in (("capability", CAPABILITIES, ""), ("tag", TAGS, "=VALUE")):
        if name in words:
            lines.append(f"{kind} {name}: {words[name]}.")
            lines.append(f"  declare it: refattn check MODULE:CALLABLE --{kind} {name}{value}")
    if name in SPECS:
        tags = " ".join(f"{tag}={write_tag(value)}" for tag, value in SPECS[name].items())
        lines.append(f"spec {name}, conventions of a well-known function: {tags}")
        lines.append(f"  declare it: refattn check MODULE:CALLABLE --spec {name}")
    if name in SEVERITIES:
        lines.append(f"severity {name}: {SEVERITIES[name]}.")
    if name in EVERY_PROFILE:
        lines.append(f"profile {name}, of refattn verify: {_describe_profile(name)}.")
    if name in UNITS:
        lines.append(f"hardware {name}, of refattn verify: its matrix units truncate sums.")
    if name in TRAITS:
        lines.append(f"trait {name}, of estimators: {TRAITS[name]}.")
        having = dict.fromkeys(x.name for x in ESTIMATORS.values() if x.has(name))
        lines.append(f"  {', '.join(having)}")
    if name in _OF_REPORTS:
        lines.append(f"{name}: {_OF_REPORTS[name]}.")
    if not lines:
        hint = close(name, names())
        known = "reports print names; refattn check --list prints the names of checks and options"
        raise ValueError(f"nothing is named {name!r} ({known}).{hint}")
    return lines


def _explain_check(check: Check) -> Iterator[str]:
    """Yield what a check tests, its kind, how it is computed, and examples."""
    yield f"check {check.name}: {check.claim}."
    yield f"  kind: {_OTHER_KINDS.get(check.name, _LAYERS[check.layer])}"
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
        unlike = {
            effects.get(bug, ""): bug for bug in sorted(known, key=_count_failed, reverse=True)
        }
        some = [*unlike.items()][: -_FEW - 1 : -1]
        yield f"  known bugs that it detects: {len(known)}" + ", such as" * (len(some) < len(known))
        yield from (f"    {bug}: {effect}" for effect, bug in some)
    if _OTHER_KINDS.get(check.name) != "no test":
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
        right = bug.fn.right() if bug.fn.over else {}  # of the draw, or a backward pass
        if right:
            yield "  correct code:"
        for line in "\n\n".join(right.values()).splitlines():
            yield f"    {line}".rstrip()
        how = f"compare yours with {'the lines above' if right else '`python -m refattn.naive`'}"
        if change:
            lines = [line.strip() for line in change.splitlines()]
            removed = any(line.startswith("- ") for line in lines)
            how = "use the lines marked -" if removed else "leave out the lines marked +"
        yield f"  what to do: {how}"
        failed = dict.fromkeys(c for bugs in kills().values() for c in bugs.get(name, ()))
        if failed:
            yield f"  detected by: {', '.join(failed)}"


def summarise(record: Estimator) -> str:
    """Describe an estimator: the first line of its formula, and the options that it fixes."""
    formula = getattr(record.naive, "func", record.naive)
    fixed = getattr(record.naive, "keywords", {}) | getattr(record.fn, "keywords", {})
    summary = (inspect.getdoc(formula) or record.name).splitlines()[0]
    words = [
        f"proposal=adapt.{value}(q, k)" if name == "fitted_by" else f"{name}={value!r}"
        for name, value in fixed.items()
    ]
    return f"{summary.removesuffix('.')}, with {' and '.join(words)}." if words else summary


def _explain_estimator(name: str) -> Iterator[str]:
    """Yield the formula of an estimator in words, and its other names."""
    record = ESTIMATORS[name]
    yield f"estimator {', '.join((record.name, *record.aliases))}: {summarise(record)}"
    yield from (f"  {trait}: {TRAITS[trait]}" for trait in record.traits)
    drawn = [f"{record.size}="] * (record.size is not None) + ["seed="] * record.has("random")
    drawn += [f"{gate}=" for gate in record.gates]
    yield f"  it is called as: fn({', '.join([*record.arrays, *drawn])})"
    yield f"  test yours: refattn check MODULE:CALLABLE --estimator {name}"


def _describe_profile(name: str) -> str:
    """Say what a kernel of a profile rounds, with the fields of `rounding.Profile`."""
    profile = EVERY_PROFILE[name]
    changed = (x for x in profile._fields if getattr(profile, x) != getattr(Profile(), x))
    fields = ", ".join(f"{x}={getattr(profile, x)!r}" for x in changed)
    kind, *others = name.split("-")
    words = [_PROFILES[kind.removesuffix("64")]]
    words += [_VARIANTS[x] for x in others if x in _VARIANTS and kind not in ("chunk", "linear")]
    return "; ".join(words) + f" (Profile({fields}))" * bool(fields)
