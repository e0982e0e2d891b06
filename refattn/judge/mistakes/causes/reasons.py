"""Name the reasons of a failure: call every search, and put what they find in order."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from ....arrays.library import Doubles
from ....features import elu_features
from ...rounding.problems import Index, Problem
from ...rounding.profiles import PROFILES, Profile
from ...rounding.roundings import Roundings
from ...verification.choice import ProfileChoice, choose_profiles, usual_profiles
from ...verification.directions import SCORE_CHANGES, list_tangents
from ...verification.empty_rows import find_empty, find_unseen, say_how_to_accept
from ...verification.findings import (
    ONLY_IN,
    Finding,
    Numbers,
    Part,
    Suspect,
)
from ...verification.verdict import Verdict, list_few_rows
from ...verification.worst import find_worst
from ...verification.z_scores import mean_square
from ..defects.catalogue import Mutant
from ..operators.copies import find_grid, name_copies
from ..operators.exponentials import is_of_weights, rounds_weights, say_what_overflows
from . import places
from .alternatives import list_alternatives
from .edited import list_like
from .fitted import name_dropout
from .gradients import explain_backward
from .normalisers import name_offset, share_of_offset
from .sampled import Alternative
from .search import SearchTask, leave_roundings, search_causes, search_without_zeros
from .states import explain_states
from .trials import ERRORS, say_of_weights
from .wrong_rows import Sample, are_systematic, are_zero, divide, tell_causes

_LOG = logging.getLogger(__name__)
_MOST = 0.9  # of the error, at least, that is explained by a defect of a fitted size
_AS_GOOD = 0.03  # of the error, by which a fit may explain less than the best
_AS_WELL = 0.005  # the same of a fit beside a cause that holds
_MOST_REST = 16.0  # the same, up to which a factor is one
_LEAST_DERIVED = 0.99  # of the error, at least, where a derivative leaves more than roundings
_NEARLY_ALL = 1 - 1e-5  # of the error: what is left is what tests allow, as slack
_NO_ROUNDING = 0.999  # the same, of which roundings of float32 leave less to a fit
_SMALL_REST = 1.5  # mean square of z up to which a fit to the derivatives leaves roundings only
_LINEAR_NAMES = ("factor", "truncated", "lse", "delta")  # derivatives to these hold for any size
_FEATURE_MAPS: Mapping[str, Callable[[Any], Any]] = {  # that are mistaken for others
    "relu(x)": lambda x: np.maximum(x, 0.0),
    "elu(x) + 1": elu_features,
    "elu(x), without + 1": lambda x: elu_features(x) - 1,
    "softplus(x)": lambda x: np.logaddexp(x, 0.0),
    "exp(x)": np.exp,
    "x": lambda x: x,
}
_FACTS = re.compile(  # that say what numbers are
    r"all numbers are|times as large|exact row times a number|holds? NaN|see no key|log normaliser|"
    "the last tile was never|were never written|the exact ones and others|with the exact ones:"
)
_SURE_ERRORS = 4.0  # by which a size is surely not 0
_FITTED_ITEMS, _FITTED_ROWS = 4, 32  # by which the rest that a fit leaves is looked at
_FACTOR_ROWS = 24  # by which a factor of a gradient is sought
_MOST_PRODUCTS = 2**24  # of features of queries and keys of a head, that are kept
_NEAR_ORDERS = 30.0  # standard deviations that another order of steps may explain
_ORDERS = (
    "usual orders of the steps are allowed for (sums over keys or samples first, weights or their "
    "logarithms): if the kernel computes otherwise, rounding may explain such errors"
)
_NO_KERNEL = "no kernel has both"  # a remark on profiles: a cause says more
_CAUSE = "convention"  # name of a suspect that holds
_AS_CUT = 0.2  # of the shift that truncation makes, how far one may be off
_IN_FLOAT32 = (  # what is said of such numbers of float64, and their cause
    "profile math accepts these numbers",
    "the softmax, or all of it, is computed in float32",
)
_TRUNCATED = 2.0  # spacings beyond which nothing is truncated


def _keep_what_is_sure(error: Exception, verdict: Verdict) -> Verdict:
    """Return a verdict whose search met an error, with the fits that explain nearly all."""
    _LOG.warning("refattn's search for causes ended with %r", error)
    return verdict._replace(suspects=[x for x in verdict.suspects if x.explained >= _MOST])


def explain(problem: Problem, numbers: Numbers, verdict: Verdict, *options: Any) -> Verdict:
    """Give the verdict on a failed output its suspects, and the place of the wrong rows."""
    try:
        return _explain(problem, numbers, verdict, *options)
    except ERRORS as error:
        return _keep_what_is_sure(error, verdict)


def _explain(
    problem: Problem,
    numbers: Numbers,
    verdict: Verdict,
    profile: ProfileChoice = None,
    mistakes: Sequence[Mutant] = (),
) -> Verdict:
    if problem.gradient is not None or 0 in (*problem.lead, *problem.shape):
        return verdict
    profiles = list_profiles(verdict, numbers, profile)
    by = profiles.get(verdict.by, next(iter(profiles.values())))
    worst = find_worst(problem, numbers, verdict._replace(of=problem.of), by)
    verdict = verdict._replace(worst=worst)
    if verdict.verdict != "FAIL":
        return verdict
    fits = tidy_fits(verdict, failed_part(verdict.tests, verdict.alpha))
    fits = [] if _is_right_where_finite(numbers, verdict) else fits
    if problem.kind == "scores" and problem.derived is None:
        return _explain_scores(problem, numbers, verdict, profiles, fits, mistakes)
    if problem.kind == "recurrent":
        found = [*explain_states(problem, numbers, by.roundings(verdict.dtype))]
    elif problem.derived is not None:
        found = [places.as_suspect(f"agrees if {x}") for x in list_like(problem, numbers.out)]
        near = verdict.z.largest < _NEAR_ORDERS
        verdict = verdict._replace(remarks=[*verdict.remarks, *[_ORDERS] * near])
    else:
        # Features have no scores: where products are positive, their logarithms stand for these.
        found = list(_explain_features(problem, numbers, profiles, verdict))
        if scored := as_scores(problem, by.roundings(verdict.dtype)):
            more, sample = search_causes(
                SearchTask(
                    scored,
                    numbers,
                    profiles,
                    verdict.dtype,
                    "out",
                    worst.where if worst else (),
                    mistakes=mistakes,
                    posed=problem,
                )
            )
            more = [x._replace(text=say_of_weights(x.text)) for x in more]
            found = found or [x for x in more if x.text]
            verdict = verdict._replace(place=places.describe_place(scored, sample, verdict))
    return verdict._replace(suspects=[*found, *fits] or name_seen(verdict.remarks))


def _explain_scores(
    problem: Problem,
    numbers: Numbers,
    verdict: Verdict,
    profiles: Mapping[str, Profile],
    fits: Sequence[Suspect],
    mistakes: Sequence[Mutant],
) -> Verdict:
    """Put causes and fits in order; if there are none, say what the wrong numbers are."""
    by = profiles.get(verdict.by, next(iter(profiles.values())))
    of_out = failed_part(verdict.tests, verdict.alpha) != "lse"
    about = problem.read_by(by), numbers, by.roundings(verdict.dtype)
    fits = [x for x in fits if not math.isfinite(x.error) or _leaves_roundings(x, *about)]
    found, fits, sample = _search_scores(problem, numbers, verdict, profiles, fits, mistakes)
    exact = [Alternative("", problem).result(x.rows).out for x in sample.heads]
    few = list_few_rows(verdict) if of_out and not _is_right_where_finite(numbers, verdict) else ()
    if few and not tell_causes(sample, exact):
        found, fits = [], []
    fits = _drop_said_better(fits)
    if of_out and are_zero(sample):  # any number that is small or large enough fits rows of 0
        fits = []
    if fits and not sample.wrong.any():  # a coarse rounding would show in single rows
        found = [x for x in found if not rounds_weights(x.text)]
    # What is added to the sum was fitted exactly as well, as scales were.
    suspects = order_suspects(found, fits)
    suspects = [x for x in suspects if x.name != "sink" or math.isfinite(x.error)]
    cut = [x for x in fits if x.name.startswith("truncated") and abs(x.estimate - 1) < _AS_CUT]
    if cut and verdict.z.rms**2 * (1 - cut[0].explained) < _SMALL_REST:
        suspects = [*cut, *(x for x in suspects if x not in cut)]
    holds = any(x.name == _CAUSE for x in suspects)
    # All zeros, or NaN in every row, is said as it is: what explains them in part does not matter.
    suspects = suspects if holds else name_trivial(verdict) or suspects
    seen = list(places.list_seen(problem, sample, exact)) if of_out and not holds else []
    if suspects:  # numbers that these explain, if in part, were written
        seen = [x for x in seen if "as if" not in x]
    seen += list(places.remark_stale(problem, numbers, sample)) if of_out and not suspects else []
    strange = list(places.remark_normalisers(problem, numbers))
    remarks = [*seen, *verdict.remarks, *strange, *places.remark_zeros(problem, numbers, sample)]
    if of_out and not (holds or leave_roundings(fits)):
        copies = name_copies(problem, numbers, sample, by, verdict.dtype)
        if copies and (copies[0].name == _CAUSE or not suspects):
            suspects, remarks = copies, [x for x in remarks if x not in seen]
        suspects = suspects or name_dropout(problem, sample)
    if not suspects:
        suspects = name_seen([*sample.remarks, *strange, *verdict.remarks, *seen])
        more = say_what_overflows(problem, numbers) if suspects else ""
        suspects = [x._replace(text=x.text + more) for x in suspects]
    place = places.describe_place(problem, sample, verdict)
    return verdict._replace(suspects=suspects, place=place, remarks=remarks)


def _search_scores(
    problem: Problem,
    numbers: Numbers,
    verdict: Verdict,
    profiles: Mapping[str, Profile],
    fits: Sequence[Suspect],
    mistakes: Sequence[Mutant],
) -> tuple[list[Suspect], list[Suspect], Sample]:
    """Search causes of a failed output; return them, fits beside them, and the sample."""
    failed, worst = failed_part(verdict.tests, verdict.alpha), verdict.worst
    strange_alone = _is_right_where_finite(numbers, verdict)
    where = worst.where if worst else ()
    where = (*where, 0) if where and failed == "lse" else where  # of a row, any column
    whole = any(x.explained > _NO_ROUNDING for x in fits)
    known = _IN_FLOAT32[1] if _IN_FLOAT32[0] in " ".join(verdict.remarks) and not whole else ""
    if failed != "lse" and worst is not None and not known:
        grid, gap = find_grid(problem, numbers)
        known = grid if abs(worst.got - worst.exact) < gap else ""
    rows = () if failed == "lse" or strange_alone else list_few_rows(verdict)
    if rows:  # others are right by this profile
        by = profiles.get(verdict.by, next(iter(profiles.values())))
        profiles = {verdict.by: by, **profiles}
    about = problem, numbers, profiles, verdict.dtype, failed, where, fits
    task = SearchTask(*about, mistakes, rows, known, strange_alone)
    found, sample = search_causes(task)
    if sample.apart and not any(x.name == _CAUSE for x in found):
        # Numbers that are wrong were searched first; those that are NaN may have another cause.
        alone = search_causes(SearchTask(*about, strange_alone=True))
        found, sample = alone if alone[0] else ([], sample)
    if failed != "lse" and not any(x.name == _CAUSE for x in found):
        found = search_without_zeros(task, sample) or found
    if failed == "lse":
        share = 0.0 if found else share_of_offset(problem, sample)
        fits = [x._replace(explained=share) for x in fits if share >= _MOST]
        if not (found or fits):
            found = name_offset(problem, numbers, next(iter(profiles.values())), sample)
    return found, [] if known else [*fits], sample


def explain_gradients(
    parts: Mapping[str, Part], verdicts: Mapping[str, Verdict], *options: Any
) -> dict[str, Verdict]:
    """Give the verdicts on failed gradients their suspects; that on the output is an option.

    If the output has another scale, causes are those of a backward pass with that scale.
    """
    try:
        return _explain_gradients(parts, verdicts, *options)
    except ERRORS as error:
        return {x: _keep_what_is_sure(error, y) for x, y in verdicts.items()}


def _explain_gradients(
    parts: Mapping[str, Part],
    verdicts: Mapping[str, Verdict],
    profile: ProfileChoice,
    forward: Verdict | None,
    mistakes: Sequence[Mutant] = (),
) -> dict[str, Verdict]:
    failed = [name for name, x in verdicts.items() if x.verdict == "FAIL"]
    if not failed:
        return dict(verdicts)
    first = verdicts[failed[0]]
    profiles = list_profiles(first, parts[failed[0]].numbers, profile)
    by = profiles.get(first.by, next(iter(profiles.values())))
    own = forward is None or forward.verdict != "PASS"
    worst_at = {x: verdicts[x].z.where for x in failed}
    usual = next(iter(profiles.values()))  # by a tighter one, right rows seem wrong
    alone = [x for x in failed if _is_right_where_finite(parts[x].numbers, verdicts[x])]
    rest = first.dtype, own, alone, mistakes
    rows = {x: list_few_rows(verdicts[x]) for x in failed}
    told = rows if all(rows.values()) and not alone else {}  # others are right by this profile
    named, samples, exact = explain_backward(parts, worst_at, by if told else usual, *rest, told)
    fits = {x: tidy_fits(verdicts[x], "out") if x not in alone else [] for x in failed}
    settled = all(map(leave_roundings, fits.values()))
    if not (named or settled) and (told or by != usual):
        other = explain_backward(parts, worst_at, usual if told else by, *rest)
        named, samples, exact = other if other[0] else (named, samples, exact)
    rescaled: dict[str, list[Suspect]] = {}
    # Gradients of a kernel with another scale are those of another problem.
    if forward is not None and forward.suspects and forward.suspects[0].name in ("scale", _CAUSE):
        rescaled = _explain_rescaled(
            parts, worst_at, (usual, first.dtype), samples, forward.suspects[0]
        )
    explained = dict(verdicts)
    for name in failed:
        verdict, problem = verdicts[name], parts[name].problem
        suspects = (
            name_trivial(verdict)
            or rescaled.get(name)
            or order_suspects(named.get(name, []), fits[name])
            or places.find_factor(problem, samples[name], exact[name])
            or _find_common_factor(problem, samples[name], profiles, verdict)
        )
        where = places.describe_place(problem, samples[name], verdict)
        worst = find_worst(problem, parts[name].numbers, verdict._replace(of=name), by)
        explained[name] = verdict._replace(suspects=suspects, place=where, worst=worst)
        others = [(x, y) for x in failed if x != name for y in verdicts[x].remarks]
        nan = [f"{x}: {text}" for x, text in others if "NaN" in text]
        seen = [] if suspects else list(places.list_seen(problem, samples[name], exact[name]))
        if not suspects and any(verdicts[x].verdict == "PASS" for x in {"dq", "dk"} & {*verdicts}):
            seen = [*places.list_added_numbers(problem, samples[name], exact[name])] or seen
        remarks = [*nan, *seen, *(x for x in verdict.remarks if not (suspects and _NO_KERNEL in x))]
        if not suspects:
            about = problem, parts[name].numbers, samples[name]
            held = name_empty_rows(*about) or name_copies(*about, by, verdict.dtype)
            if not held and samples[name].wrong.any() and name not in alone:
                taken = problem, samples[name], usual, verdict.dtype
                held = places.find_coarse(places.analyse_sample(*taken))
            suspects = held or name_seen([*verdict.remarks, *seen])
            remarks = [x for x in remarks if x not in seen] if held else remarks
            explained[name] = explained[name]._replace(suspects=suspects)
        explained[name] = explained[name]._replace(remarks=remarks)
    return explained


def _find_common_factor(
    problem: Problem, sample: Sample, profiles: Mapping[str, Profile], verdict: Verdict
) -> list[Suspect]:
    """Find the factor of all rows of a gradient by the tightest profile that explains the rest."""
    if not sample.heads:
        return []
    step = max(1, -(-sum(len(x.got) for x in sample.heads) // _FACTOR_ROWS))
    some = sample._replace(heads=[x.take(slice(None, None, step)) for x in sample.heads])
    laws = (places.analyse_sample(problem, some, x, verdict.dtype) for x in profiles.values())
    return next(filter(None, (places.find_common_factor(problem, x) for x in laws)), [])


def _explain_rescaled(
    parts: Mapping[str, Part],
    worst_at: Mapping[str, Index],
    by: tuple[Profile, str],
    samples: Mapping[str, Sample],
    scale: Suspect,
) -> dict[str, list[Suspect]]:
    """Name causes of gradients of a kernel that has another scale, if its output says which."""
    if not math.isfinite(scale.estimate):
        return {}
    rescaled, found = {}, {}
    for name, (problem, numbers) in parts.items():
        gradient = problem.gradient
        assert gradient is not None
        forward = gradient.forward
        forward = forward._replace(scale=(1 + scale.estimate) * forward.scale)
        other = gradient._replace(forward=forward).problem(problem.lead)
        rescaled[name] = Part(other._replace(blocks=problem.blocks), numbers)
    named, left, exact = explain_backward(rescaled, worst_at, *by, False)
    words = scale.text.removeprefix("agrees if ").partition(", and ")[0]
    for name in worst_at:
        problem, wrong = rescaled[name].problem, np.argwhere(left[name].wrong)
        rows = [(*problem.index_of(head), int(row)) for head, row in wrong]
        count = max(int(np.sum(samples[name].wrong)), 1)
        alone = places.say_what_is_left(places.as_suspect(f"agrees if {words}"), rows, count)
        if alone.name == _CAUSE:
            found[name] = [alone]
            continue
        causes = named.get(name) or places.find_factor(problem, left[name], exact[name])
        found[name] = [x._replace(text=f"{x.text}, and {words}") for x in causes]
    return {x: y for x, y in found.items() if y}


def _is_right_where_finite(numbers: Numbers, verdict: Verdict) -> bool:
    """Tell whether all that failed is the bound, by NaN or infinity: other numbers are right."""
    failed = {x.name for x in verdict.tests if x.adjusted <= verdict.alpha}
    return failed == {"bound"} and not any(numbers.are_finite(at) for at, _ in verdict.rows)


def name_trivial(verdict: Verdict) -> list[Suspect]:
    """Name what is the cause if no other is known: results that are all 0, or NaN in every row."""
    found = (
        re.match(r".* is 0 everywhere|(\d+) of \1 rows holds? NaN.*", x) for x in verdict.remarks
    )
    return [places.as_suspect(x.group().partition(", ")[0], 1.0, "trivial") for x in found if x]


def name_empty_rows(problem: Problem, numbers: Numbers, sample: Sample) -> list[Suspect]:
    """Say what gradients in queries that see no key, or in keys that none sees, are.

    Only if these are all that are wrong.
    """
    if problem.gradient is None:
        return []
    of, forward = problem.gradient.of, problem.gradient.forward
    find = find_empty if of == "dq" else find_unseen
    heads = [problem.index_of(x) for x in np.flatnonzero(sample.wrong.any(1))]
    wrong = sample.wrong[sample.wrong.any(1)]
    for head, rows in zip(heads, wrong, strict=True):
        if np.any(rows & ~np.all([find(forward, x) for x in problem.gradient.heads[head]], 0)):
            return []
    if not heads:
        return []
    got = np.concatenate([numbers.out(x)[i] for x, i in zip(heads, wrong, strict=True)])
    what, option = ("NaN", "nan") if np.all(np.isnan(got)) else ("not 0", "any")
    text = f"{of} of keys that no query sees is {what}"
    if of == "dq":
        text = f"dq of queries that see no key is {what} {say_how_to_accept(option)}"
    return [places.as_suspect(f"agrees if {text}")]


def name_seen(remarks: Sequence[str]) -> list[Suspect]:
    """Name what wrong numbers were seen to be, where no cause is known."""
    facts = [x for x in remarks if _FACTS.search(x)]
    return [places.as_suspect(" and ".join(facts), math.nan, "seen")] if facts else []


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
    kept = [x for x in sized if (failed == "lse") == x.name.startswith("lse") and _may_be(x)]
    kept = [x for x in kept if not x.name.startswith("truncated") or 0.3 < x.estimate <= _TRUNCATED]
    most = max((x.explained for x in kept), default=0.0) * square
    # A mean of so many squares of z is off by this without any cause.
    noise = 4 * math.sqrt(2 / max(math.prod(verdict.shape), 1))
    over = max(square - 1.0 - noise, most, 1e-300)
    fits = []
    for x in kept:
        if failed == "lse":
            fits.append(x._replace(explained=min(x.explained, 1.0)))
            continue
        share = min(max(x.explained * square / over, 0.0), 1.0)
        text = x.text
        if square * (1 - min(x.explained, 1.0)) > _SMALL_REST or not _is_as_derived(x):
            # With more left than roundings, the standard error of the fit means nothing.
            text, x = re.sub(r" ± \S*\d", "", text), x._replace(error=math.nan)
        # A factor is the same for errors of any size: one that leaves more than roundings is none.
        # What is not linear leaves some by its second derivative; one that leaves more is another.
        rest = square * (1 - min(x.explained, 1.0)) / max(1.0, abs(1 + x.estimate)) ** 2
        nearly = _NEARLY_ALL if x.name == "factor" else _LEAST_DERIVED
        none = rest > _MOST_REST and x.explained < nearly
        if share >= _MOST and not none:
            fits.append(x._replace(explained=share, text=text))
    best = max((x.explained for x in fits), default=0.0)
    fits = [x for x in fits if x.explained > best - _AS_GOOD]
    # In one row a factor is like many others: it is the plainest.
    return sorted(fits, key=lambda x: (-round(x.explained, 3), not x.name.startswith("factor")))


def _leaves_roundings(
    fit: Suspect, problem: Problem, numbers: Numbers, roundings: Roundings
) -> bool:
    """Tell whether errors but for a fit are as roundings are, by some rows of each head.

    If it is fitted to few rows, errors of the others are.
    """
    size = 0.0 if ONLY_IN in fit.text else fit.estimate
    rest, exact = list[Doubles](), list[Doubles]()
    changes = {x: y for x, y in SCORE_CHANGES.items() if x == fit.name}
    for index, i in problem.few_items(_FITTED_ITEMS):
        part = slice(max(i.start, i.stop - _FITTED_ROWS), i.stop)
        rows = problem.analyse(index, roundings, part, changes)
        along = dict(list_tangents(problem, index, part, rows))
        if fit.name not in along:
            return True
        errors = rows.errors(numbers.out(index)[part]) - size * along[fit.name]
        rest.append(divide(errors, rows.std))
        exact.append(rows.out)
    return not are_systematic(rest, exact)


def _drop_said_better(fits: Sequence[Suspect]) -> list[Suspect]:
    """Drop all fits if one is a factor of 0, and scales whose derivative leaves too much.

    Numbers that are 0 have any size along other defects, too. Such a scale was fitted exactly as
    well, and is none if that does not hold.
    """
    factors = (x for x in fits if x.name == "factor")
    if any(abs(1 + x.estimate) < _SURE_ERRORS * x.error for x in factors):
        return []
    return [x for x in fits if not x.name.startswith("scale") or math.isfinite(x.error)]


def _may_be(x: Suspect) -> bool:
    """Tell whether a weight that counts in part is a share: neither none nor more than all."""
    sure = _SURE_ERRORS * x.error
    return not x.name.startswith("edge") or sure < x.estimate < 1 + sure


def _is_as_derived(x: Suspect) -> bool:
    """Tell whether the derivative to a defect gives its size: of small ones, to their errors."""
    of_key = x.name.startswith(("edge", "key"))  # for one that counts fully, or not, it is exact
    from_exact = min(abs(x.estimate), abs(x.estimate - of_key))
    return x.name.startswith(_LINEAR_NAMES) or from_exact**2 < x.error


def order_suspects(found: Sequence[Suspect], fits: Sequence[Suspect]) -> list[Suspect]:
    """Put what holds first, then fits, of scales those that explain as much, then parts.

    A scale or a factor comes before what explains less, as one of many causes may by chance.
    """
    scales = [x for x in fits if x.name.startswith("scale")]
    # Of a scale and of weights that are computed otherwise the one that explains more is true.
    most = max((x.explained for x in scales), default=0.0) - _AS_GOOD
    holding = [x for x in found if x.name == "convention"]
    holding = [x for x in holding if x.explained > most or not is_of_weights(x.text)]
    if any(is_of_weights(x.text) for x in holding):
        fits = [x for x in fits if x not in scales]
    elif leave_roundings(scales):  # of all rows: the surer
        holding = [x for x in holding if "times the declared scale" not in x.text]
    elif any(math.isfinite(x.estimate) for x in holding):  # of which this is the scale
        fits = [x for x in fits if x not in scales]
    # What is added to the sum of many weights is like a factor: the one that explains more is true.
    of_sum = max((x.explained for x in fits if x.name == "sink"), default=0.0)
    if leave_roundings([x for x in fits if x.name == "factor" and x.explained > of_sum]):
        holding = [x for x in holding if "is added to the sum" not in x.text]
    most = max((x.explained for x in holding), default=0.0) - _AS_WELL
    fits = [x for x in fits if x.explained > most]
    part = (x for x in found if x.name != "convention" and x.explained >= _MOST)
    rest = [] if holding or fits else [*part][:1]
    plainest = any(x.name.startswith(("scale", "factor")) for x in fits)
    return sorted([*holding, *fits, *rest], key=lambda x: plainest and x.explained < _MOST)


def as_scores(problem: Problem, roundings: Roundings) -> Problem | None:
    """Pose a problem of features as one of scores, the logarithms of products of features.

    None if products may be negative, or are too many to be kept.
    """
    (n, m, _), first = problem.shape, (0,) * len(problem.lead)
    if n * m > _MOST_PRODUCTS:
        return None

    @lru_cache(maxsize=2)
    def read(index: Index) -> Mapping[str, Any]:
        head = problem.without("mask").features(index, roundings)
        with np.errstate(divide="ignore", invalid="ignore"):
            bias = np.log(head.queries.value @ head.keys.value.T)
        arrays = {"q": np.zeros((n, 1)), "k": np.zeros((m, 1)), "v": head.v, "bias": bias}
        return arrays | {x: y for x, y in problem.read(index).items() if x == "mask"}

    # A negative product has no logarithm.
    if np.any(np.isnan(read(first)["bias"])):
        return None
    return problem._replace(read=read, kind="scores", scale=1.0, feature_map=None)


def _explain_features(
    problem: Problem, numbers: Numbers, profiles: Mapping[str, Profile], verdict: Verdict
) -> Iterator[Suspect]:
    """List problems of random features, or of linear attention, that explain nearly all."""
    roundings = next(iter(profiles.values())).roundings(verdict.dtype)
    maps = _FEATURE_MAPS.items() if problem.kind == "map" else ()
    others = (Alternative(f"features are {x}", problem._replace(feature_map=y)) for x, y in maps)
    for alternative in (*list_alternatives(problem), *others):
        square = mean_square(alternative.problem, numbers, roundings)
        if square < min(4.0, verdict.z.rms**2 / 4):
            yield places.as_suspect(f"agrees if {alternative.text}")
