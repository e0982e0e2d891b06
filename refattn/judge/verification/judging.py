r"""Decide whether numbers can be those of a correct kernel: try profiles, and write the verdict.

One file is one kernel: a profile must explain all rows. Which one is asked of some rows, by
`compare`, and if another profile is so much likelier than this one that a kernel of this one gives
such numbers with probability p at most, that p is one more of its tests. Then all rows are tried by
the likeliest profile, or by the next if that fails. So a kernel of any of the profiles fails with
probability alpha at most: all tests of a profile, and that of its likelihood, share alpha by Holm.

Gradients are judged in the same way: one profile for all of a backward pass.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np

from ...arrays.threads import Interrupted, one_blas_thread
from ..kinds.chosen import judge_choice
from ..kinds.parts import blame_parts, settle_part
from ..mistakes.causes.changed_inputs import list_rankings
from ..mistakes.causes.places import list_remarks, say_rows, suspect_narrower
from ..mistakes.causes.reasons import explain, explain_gradients
from ..mistakes.causes.states import find_coarse_state, keep_common
from ..rounding.hardware import IEEE
from ..rounding.problems import Index, Problem
from ..rounding.profiles import Profile
from .blind import (
    list_blind,
    list_ignored,
    mark_right_mean,
    remark_beyond,
    remark_same_values,
    sum_narrowly,
)
from .choice import Request, choose_for, has_wide_sums, is_narrow, may_be_one
from .empty_rows import describe_idle, remark_idle
from .findings import Finding, Numbers, Part, ProfileTrial, weaken
from .head_sums import ONE_PERCENT, HeadSums, RowWeights, sweep_pairs
from .joint import ONE_OF_ROWS, find_smallest, knows_columns, list_few, name_wrong, test_each
from .likelihood import ALIKE, UNCOMPARED, Fit, ProfileSample, compare
from .looks import (
    Blocks,
    Look,
    choose_block,
    choose_blocks,
    choose_compared,
    choose_glanced,
    choose_screened,
    count_rows,
    split_directions,
)
from .trial import attempt, begin_sums, choose_suspects
from .units import add_unit, describe_unit, list_units, on_hardware
from .verdict import Verdict, join_verdicts

_RMS_OF_LAGS, _TOO_WELL = 16.0, 0.75  # rms of z below which maxima may lag; numbers fit too well
_ASK_OF_LAGS = (
    "with profile flash-lazy this is a PASS: does the kernel keep a maximum until a score is "
    "larger by 8 log 2, as FlashAttention-4 does?"
)
_UNLIKELY = 10.0  # log of how much likelier others are on some rows of another part
_SURELY_REJECTED = -100.0  # log of a p-value that is surely enough to reject a profile by some rows
_SURE_P, _HARDLY_PASSES = 1e-40, 1e-3  # p-values by which some rows reject a profile, or doubt it
_ASKED_ROWS, _FELT = 8, 0.1  # the worst by the profile that failed first; z that float32 leaves
_TESTS = 64  # more than a trial has: what is sure beside so many needs no other


class _Case:
    """A part that is judged, and what was found of it by profile."""

    def __init__(self, part: Part, asked: Request) -> None:
        self.numbers, self.dtype, self.alpha = part.numbers, asked.dtype, asked.alpha
        self.strict, self.everything = asked.strict, asked.everything
        self.profiles = on_hardware(choose_for(part, asked), asked.hardware)
        self.tries_units, self.seconds, self.enough = asked.hardware is None, 0.0, _SURELY_REJECTED
        self.problem = part.problem.looked_at(choose_blocks(part.problem, asked.everything))
        self.weights = RowWeights(self.problem, asked.dtype)
        self.fits: dict[str, Fit] = {}
        self.looks: dict[Profile, ProfileSample] = {}
        self.screened: dict[str, float] = {}  # p-values of profiles on some rows
        self.glanced: dict[str, float] = {}  # likewise: tests of their own if they are sure
        self.sums: dict[str, HeadSums] = {}  # of errors, that are not tested yet
        self.tried: dict[str, ProfileTrial] = {}  # by all rows, and no other evidence
        self.trials: dict[str, ProfileTrial] = {}
        self.coarse = find_coarse_state(self.problem, self.numbers)

    def compare(self, names: Sequence[str]) -> None:
        """Compare some profiles."""
        start = time.perf_counter()
        chosen = {x: y for x, y in self.profiles.items() if x in names or self.is_rival(x)}
        some = choose_compared(self.problem)
        weights = self.weights.of_rows(some)
        self.fits = compare(some, self.numbers, self.dtype, chosen, weights, self.looks)
        self.seconds += time.perf_counter() - start

    def take_evidence(self, names: set[str]) -> None:
        """Let only some profiles be evidence against others, in what is tried from now on."""
        self.fits = {x: y.beside(names) for x, y in self.fits.items()}
        known = self.trials.items()
        self.trials = {x: y for x, y in known if "likelihood" not in {z.name for z in y.tests}}

    def is_rival(self, name: str) -> bool:
        """Tell whether a profile only speaks against others, as its sums are narrow."""
        return self.strict and not has_wide_sums(self.profiles[name], self.dtype)

    def is_out(self, name: str) -> bool:
        """Tell whether some rows are enough to reject a profile."""
        # Holm multiplies a p-value by the count of tests at most, so that these stay below alpha
        # whatever all rows say.
        fit, least = self.fits.get(name, UNCOMPARED), self.alpha / _TESTS
        some = self.screened.get(name, 1.0) <= least or self.glanced.get(name, 1.0) <= _SURE_P
        if some or self.is_rival(name):
            return True
        return not (fit.within and fit.log_p > math.log(least))

    def attempt(self, name: str, rows: Blocks | None = None, whole: bool = True) -> ProfileTrial:
        """Try a profile on all rows, or on some: these along all directions, or few."""
        start, chosen = time.perf_counter(), self.profiles[name]
        problem = self.problem if rows is None else self.problem.looked_at(rows)
        blocks = tuple(problem.items())
        # Some of all rows go along all directions, and all given rows; none for a quick look.
        every = rows is not None or self.everything or not problem.is_mean
        split = split_directions(blocks, problem.shape[1], every) if whole else ((), blocks)
        weights = self.weights if rows is None else self.weights.of_rows(problem)
        enough, sums = (-math.inf, self.sums) if rows is None else (self.enough, {})
        exact, summed = weights.exact[chosen.reading], sums.pop(name, None)
        look = Look(weights.of(chosen), *split, exact, enough, summed)
        trial = attempt(problem, self.dtype, chosen, name, self.numbers, self.alpha, look)
        self.seconds += time.perf_counter() - start
        return trial._replace(rows=count_rows(blocks))

    def glance(self, name: str) -> bool:
        """Tell whether a few rows are enough to reject a profile, so surely that no test counts."""
        # Only a p-value of 1e-40 counts: no share of alpha. What is likely is tried at once.
        some, fit = choose_glanced(self.problem), self.fits.get(name, UNCOMPARED)
        if some and not fit.within:
            return True
        if some and name not in {*self.glanced, *self.trials} and (self.trials or not fit.explains):
            self.glanced[name] = self._smallest(name, some)
        return self.glanced.get(name, 1.0) <= _SURE_P

    def screen(self, name: str) -> None:
        """Try a profile on some rows, if these are few beside all: that is one more test of it.

        Some are the worst rows of the profile that failed first, each by the law of all of its
        columns, and, if these do not rule it out, some at random.
        """
        some = choose_screened(self.problem)
        tried = self.trials or any(p <= _SURE_P for p in self.glanced.values())
        if name in {*self.screened, *self.trials} or not tried:
            return
        first = next(iter(self.trials.values()), None)
        asked = first is not None and knows_columns(self.problem)
        worst = first.find(-math.inf)[0][:_ASKED_ROWS] if first and asked else []
        if not worst and not some:
            return
        # The worst rows were chosen among all (times these, by Bonferroni), and either they or
        # others may rule a profile out: times two.
        chosen, p = self.profiles[name], 1.0
        if worst:
            read, roundings = self.problem.read_by(chosen), chosen.roundings(self.dtype)
            log_p = min(test_each(read, self.numbers, roundings, [x.at for x in worst]))
            p = math.exp(max(log_p, -700.0)) * count_rows(self.problem.items())
        if p > self.alpha / _TESTS / 2 and some:
            p = min(p, self._smallest(name, some))
        self.screened[name] = min(1.0, 2 * p)

    def _smallest(self, name: str, rows: Blocks) -> float:
        return min((x.adjusted for x in self.attempt(name, rows, whole=False).tests), default=1.0)

    def trial(self, name: str) -> ProfileTrial:
        """Return what was found by a profile, or try it."""
        if name in self.trials:
            return self.trials[name]
        # What some rows said is one more test each, so that all of them share alpha.
        trial = self.tried.get(name) or self._try_sample(name) or self.attempt(name)
        self.tried[name] = trial
        if (fit := self.fits.get(name, UNCOMPARED)).likelier:
            p, words = math.exp(max(fit.log_p, -700.0)), f"{fit.likelier} is likelier than {name}"
            trial = trial.with_test(Finding("likelihood", p, p, fit.against, words))
        if self.coarse is not None:
            trial = trial.with_test(self.coarse)
        if name in self.screened:
            p, words = self.screened[name], "all tests of some rows"
            trial = trial.with_test(Finding("some rows", p, p, math.nan, words))
        self.trials[name] = trial
        return trial

    def _try_sample(self, name: str) -> ProfileTrial | None:
        """Try a profile that is ruled out on as many rows as say how; None if they do not."""
        if self.everything or not self.problem.is_mean or not self.is_out(name):
            return None
        some, rest = split_directions(tuple(self.problem.items()), self.problem.shape[1])
        trial = self.attempt(name, some) if rest else None
        return trial if trial and trial.rejected(_SURE_P) else None

    def rejects(self, name: str, first: Callable[[], None] = lambda: None) -> bool:
        """Tell whether a profile does not explain the numbers; call something before all rows."""
        # The cheapest first: a glance at a few rows, then some rows, then all.
        if not self.is_out(name) and (self.trials or not self.glance(name)):
            self.screen(name)
        if self.is_out(name):
            return True
        first()
        return self.trial(name).rejected(self.alpha)

    def add_units(self) -> list[str]:
        """Add profiles with units whose shifts agree with the errors, and return their names."""
        names = list_units(self.problem, self.numbers, self.dtype, self.profiles)
        for name in names:
            add_unit(self.profiles, name)
        return names

    def compare_units(self, names: Sequence[str]) -> None:
        """Compare profiles with units, each with those that were compared before."""
        found = {**self.fits}
        for name in names:
            self.compare([*(x for x in found if x not in names), name])
            found[name] = self.fits[name]
        self.fits, self.tries_units = found, bool(names)

    def find(self, backward: str | None = None) -> tuple[str | None, list[str]]:
        """Find the likeliest profile beside that of gradients, and list those without units."""
        self.compare([*self.profiles])  # which sorts them, the likeliest first
        names = [x for x in self.fits if may_be_one(x, backward) and not self.is_rival(x)]
        found = next((x for x in names if not self.rejects(x)), None)
        if self.tries_units and (found is None or self.is_doubtful(found)):
            units = [x for x in self.add_units() if may_be_one(x, backward)]
            self.compare_units(units)
            found = next((x for x in units if not self.rejects(x)), found)
        return found, names

    def is_doubtful(self, name: str) -> bool:
        """Tell whether a profile says nothing, or hardly passes, or a tighter one is likelier."""
        trial, fit = self.trial(name), self.fits.get(name, UNCOMPARED)
        hardly = not trial.known or any(x.adjusted < _HARDLY_PASSES for x in trial.tests)
        return hardly or fit.against > ALIKE

    def is_rejected(self, name: str) -> bool:
        """Tell whether it is known that a profile does not explain the numbers."""
        return self.is_out(name) or (name in self.trials and self.trials[name].rejected(self.alpha))

    def rank(self, name: str) -> tuple[tuple[bool, ...], int, float]:
        """Rank a profile by how well it explains the numbers, and by how many rows it does not."""
        trial = self.trials[name]
        rank = trial.rank(self.alpha, self.profiles[name].inputs is not None)
        return rank[:3], len(name_wrong(trial.find, trial.rows, self.alpha)[0]), rank[3]

    def conclude(self, name: str) -> Verdict:
        """Write the verdict by a profile."""
        best, start = self.trial(name), time.perf_counter()
        problem, numbers, dtype = self.problem, self.numbers, self.dtype
        failed = best.rejected(self.alpha)
        plain, _, hardware = best.profile.partition("@")
        suspects, remarks = best.suspects, list(list_remarks(problem, numbers.out))
        remarks += [numbers.remark] * bool(numbers.remark)
        remarks += [] if best.known else remark_beyond(problem)
        blind: list[str] = []
        detectable, by = best.detectable, self.profiles[name]
        wrong, more = self._name_rows(best) if failed else ((), False)
        if failed:
            # A defect of a few rows is lost among all: it is measured on these, or on the worst.
            told = [x for x in list_few(wrong, more, best.rows) if numbers.are_finite(x)]
            few = tuple((at[:-1], slice(at[-1], at[-1] + 1)) for at in told)
            if problem.is_mean and (few or best.loud):
                some = self.attempt(name, few or best.loud)
                there = say_rows(problem, told, best.rows).partition(", ")[2]
                suspects = choose_suspects(best, some, there) if few else some.suspects
            remarks += suspect_narrower(problem, dtype)
            remarks += _suspect_float32(problem, numbers, dtype, self.alpha)
        else:
            level = math.log(self.alpha / max(len(best.tests), 1))
            read = problem.read_by(by)
            found = find_smallest(read, by.roundings(dtype), best.rows, level)
            detectable |= {x: min(y, detectable.get(x, y)) for x, y in found.items()}
            blind = mark_right_mean(problem, self._list_blind(by))
            # Numbers that fit far too well may be those of a tighter profile, without an option.
            if best.z.rms < _TOO_WELL:
                tighter = [y for x, y in self.profiles.items() if self.is_rejected(x)]
                blind += list_ignored(problem, numbers, dtype, tighter)
            remarks += [*remark_same_values(problem, blind), *remark_idle(best.idle)]
            remarks += describe_idle(problem, numbers, dtype, by, sorted(best.idle))
            if problem.kind == "recurrent" and by.states is not None:
                remarks.append(f"fits a kernel whose state is kept in {dtype} between chunks")
            if hardware:
                remarks += describe_unit(problem, numbers, dtype, best.profile)
        # A pass means little if a wrong output would have passed, too.
        powered = best.powered or detectable.get("row", 1.0) <= ONE_PERCENT
        weak = not powered or best.idle or weaken(blind)
        rows = math.prod(problem.lead) * problem.shape[0]
        return Verdict(
            "FAIL" if failed else "UNDERPOWERED" if weak else "PASS",
            None if failed else plain,
            best.z,
            best.tests,
            list(suspects),
            remarks,
            dtype,
            numbers.out_dtype,
            (*problem.lead, problem.shape[0], problem.shape[2]),
            best.known,
            detectable,
            self.alpha,
            self._list_smallest(),
            self.seconds + time.perf_counter() - start,
            best.profile,
            hardware=None if failed or hardware in ("", IEEE) else hardware,
            looked_at=best.rows / rows if rows else 1.0,
            blind=tuple(blind),
            element=best.element,
            idle=len(best.idle),
            place=say_rows(problem, [x for x, _ in wrong], best.rows),
            rows=wrong,
            more_rows=more,
            strict=self.strict,
        )

    def _name_rows(self, best: ProfileTrial) -> tuple[tuple[tuple[Index, float], ...], bool]:
        """Name wrong rows by this profile, or a likelier one that explains nearly all."""
        likely = [x for x, y in self.fits.items() if y.explains or x == best.profile]
        name = likely[0] if likely else best.profile
        trial = self.trials.get(name) or self.attempt(name, whole=False)
        (named, more), by_best = (name_wrong(x.find, x.rows, self.alpha) for x in (trial, best))
        few = 0 < len(named) <= max(trial.rows / ONE_OF_ROWS, len(by_best[0])) and not more
        return (named, more) if few else by_best

    def _list_blind(self, profile: Profile) -> list[str]:
        """Name what passes as well: of some rows first, and of those all."""
        some = choose_compared(self.problem)
        rest = self.dtype, profile, self.alpha
        blind = list_blind(some, self.numbers, *rest)
        if blind and count_rows(some.items()) < count_rows(self.problem.items()):
            blind = list_blind(self.problem, self.numbers, *rest, blind)
        return blind

    def _list_smallest(self) -> dict[str, float]:
        """List the smallest corrected p-values of the profiles that were tried, or need not be."""
        found = {}
        for name in (x for x in self.profiles if not self.is_rival(x)):
            if name in self.trials:
                found[name] = min((x.adjusted for x in self.trials[name].tests), default=1.0)
            elif self.is_out(name):
                fit = self.fits.get(name, UNCOMPARED)
                p = math.exp(max(fit.log_p, -700.0))
                p = min(p, self.screened.get(name, 1.0), self.glanced.get(name, 1.0))
                found[name] = _TESTS * p if fit.within else 0.0
        return found


@one_blas_thread()
@np.errstate(all="ignore")  # small weights underflow, and wrong numbers are of any size
def judge(problem: Problem, numbers: Numbers, *asked: Any, **named: Any) -> Verdict:
    """Judge whether a correct kernel can have produced these numbers for a problem."""
    return _judge_one(Part(problem, numbers), Request(*asked, **named))


def _judge_one(part: Part, asked: Request, backward: str | None = None) -> Verdict:
    """Judge an output by the likeliest profile, of those that the gradients' may have beside it."""
    case = _Case(part, asked)
    found, names = case.find(backward)
    if found is None:  # with inputs as they are, sizes of defects are right
        likely = [x for x in names if case.profiles[x].inputs is None] or names
        for name in [likely[0], *(x for x in likely[1:] if case.fits[x].against <= ALIKE)]:
            case.trial(name)
    verdict = case.conclude(found or min(case.trials, key=case.rank))
    if verdict.verdict == "FAIL" and verdict.z.rms < _RMS_OF_LAGS and "flash-fast" in case.profiles:
        other = _Case(part, asked._replace(profile="flash-lazy"))
        other.tries_units &= case.tries_units  # those of its kind of profile agree, or none does
        verdict = verdict.with_remark(_ASK_OF_LAGS) if other.find()[0] else verdict
    if not asked.explain:
        return verdict.leave_causes()
    try:
        return explain(case.problem, part.numbers, verdict, asked.profile, asked.mistakes)
    except KeyboardInterrupt:
        raise Interrupted(verdict.leave_causes()) from None


@one_blas_thread()
@np.errstate(all="ignore")  # small weights underflow, and wrong numbers are of any size
def judge_all(parts: Mapping[str, Part], *of: Any, **named: Any) -> Verdict:
    """Judge an output, gradients or both: together they fail with probability alpha at most."""
    asked = Request(*of, **named)
    found = _judge_parts(parts, asked._replace(explain=asked.explain and not asked.strict))
    if asked.strict and found.verdict == "FAIL":
        other = _judge_parts(parts, asked._replace(strict=False))
        found = other if other.verdict == "FAIL" else found.blame_sums(other)
    if found.verdict != "PASS" or not is_narrow(asked.dtype):
        return found
    try:
        return found.note_sums([x for x in parts if _accepts_narrow_sums(x, parts, asked, found)])
    except KeyboardInterrupt:
        raise Interrupted(found.cut_short([])) from None


def _accepts_narrow_sums(name: str, parts: Mapping[str, Part], asked: Request, by: Verdict) -> bool:
    """Tell whether tests of some rows would pass sums in the storage type, too."""
    part = parts[name]
    if part.problem.kind != "scores":
        return False
    case = _Case(part, asked if part.problem.is_mean else asked.of_gradients(parts))
    block = choose_block(case.problem)
    case.numbers = part.numbers._replace(out=sum_narrowly(block, asked.dtype), lse=None)
    of = by.profile if len(parts) > 1 else None  # of the other parts, and so of this
    names = [x for x in reversed(case.profiles) if may_be_one(x, of) and not case.is_rival(x)]
    names.sort(key=lambda x: case.profiles[x].parts is None)  # with narrow sums first, and loose
    case.enough = math.log(asked.alpha / _TESTS)
    unlike = {case.profiles[x]: x for x in names}.values()
    accepted = any(case._smallest(x, tuple(block.items())) > asked.alpha for x in unlike)
    if accepted and case.strict:  # profiles with narrow sums speak against others
        case.problem, case.weights = block, RowWeights(block, asked.dtype)
        case.compare([*case.profiles])
        accepted = not all(case.rejects(x) for x in names)
    return accepted


def _judge_parts(parts: Mapping[str, Part], whole: Request) -> Verdict:
    """Judge each part, and join the verdicts; those that are known if it is interrupted."""
    verdicts, of = dict[str, Verdict](), (whole.alpha, len(parts))
    try:
        _judge_each(parts, whole, verdicts)
    except KeyboardInterrupt as stop:
        left = [x for x in parts if x not in verdicts]
        if isinstance(stop, Interrupted):
            verdicts[left.pop(0)] = stop.found
        if not verdicts:
            raise
        raise Interrupted(join_verdicts(verdicts, *of).cut_short(left)) from None
    return join_verdicts(verdicts, *of)


def _judge_each(parts: Mapping[str, Part], whole: Request, verdicts: dict[str, Verdict]) -> None:
    """Judge each part, and let them be of one kernel."""
    # Bonferroni: a correct kernel may fail in any part.
    forward_asked = whole._replace(alpha=whole.alpha / len(parts))
    for name, part in parts.items():
        if part.problem.gradient is None:
            found = judge(*part, *forward_asked.of_merge(part))
            verdicts[name] = settle_part(name, part, found)
    gradients = {x: y for x, y in parts.items() if x not in verdicts}
    if "out" in parts and "index_q" in (problem := parts["out"].problem).first:
        verdicts["indices"] = judge_choice(problem, whole, list_rankings(problem))
    if gradients:
        asked = forward_asked.of_gradients(gradients)
        backward = _judge_gradients(gradients, asked)
        if "out" in verdicts:
            verdicts["out"], backward = _as_one_kernel(
                parts, (verdicts["out"], backward), (forward_asked, asked)
            )
        verdicts |= {x: y.leave_causes() for x, y in backward.items()}
        if whole.explain:
            out = verdicts.get("out")
            rest = whole.profile, out, whole.mistakes
            verdicts |= explain_gradients(gradients, backward, *rest)
    left = blame_parts(verdicts, keep_common({x: y.suspects for x, y in verdicts.items()}))
    verdicts |= {x: y._replace(suspects=left[x]) for x, y in verdicts.items()}


def _as_one_kernel(
    parts: Mapping[str, Part],
    found: tuple[Verdict, dict[str, Verdict]],
    asked: tuple[Request, Request],
) -> tuple[Verdict, dict[str, Verdict]]:
    """Judge again by profiles that may be of one kernel, if those of a forward and a backward pass.

    One of both is right about a right kernel, if it is one of two families: so either gradients
    are explained by that of the output, or the output by that of the gradients.
    """
    out, backward = found
    one, other = out.profile, next(x.profile for x in backward.values())
    if "FAIL" in {out.verdict, *(x.verdict for x in backward.values())} or may_be_one(one, other):
        return found
    gradients = {x: y for x, y in parts.items() if x != "out"}
    again = _judge_gradients(gradients, asked[1], one)
    if all(x.verdict != "FAIL" for x in again.values()):
        return out, again
    instead = _judge_one(parts["out"], asked[0], other)
    if instead.verdict != "FAIL":
        return instead, backward
    words = f"the output fits profile {one}, gradients fit {other}: no kernel has both"
    return out, {
        x: y._replace(remarks=[words, *y.remarks]) if y.verdict == "FAIL" else y
        for x, y in again.items()
    }


def _judge_gradients(
    parts: Mapping[str, Part], asked: Request, forward: str | None = None
) -> dict[str, Verdict]:
    """Judge the gradients of one backward pass by one profile: the likeliest that explains all.

    It is one that a kernel may have beside that of its forward pass. If there is none, it is that
    of the parts that are left when the worst are taken away.
    """
    cases = {x: _Case(y, asked) for x, y in parts.items()}
    names = [*next(iter(cases.values())).profiles]
    # One kernel, one profile: each part is compared only by profiles that the parts before left.
    left = names
    for case in cases.values():
        case.compare(left)
        likely = [x for x in left if case.fits[x].against <= _UNLIKELY]
        left = [x for x in likely if not case.is_out(x)] or left
    # The part that rules out most profiles is asked first: the others are spared their trials.
    every, names = names, [x for x in names if may_be_one(forward, x)]
    worst_first = sorted(cases.values(), key=lambda x: -sum(map(x.is_out, names)))
    likely = [x for x in names if all(x in y.fits for y in worst_first)]
    name = _agree(worst_first, likely)
    if not name and len(names) > 1 and not any(all(map(x.glance, names)) for x in worst_first):
        _share_evidence(worst_first, every)
        name = _agree(worst_first, names)
    # A part that no profile explains is wrong: the profile is then that of the parts without it.
    worst_first.sort(key=lambda x: -sum(map(x.is_rejected, names)))
    if not name and asked.hardware is None:
        units = [x for x in worst_first[0].add_units() if may_be_one(forward, x)]
        for case in worst_first[1:]:
            for name in units:
                add_unit(case.profiles, name)
        name = _agree(worst_first, units)
    name = name or _agree_without_some(worst_first, names)
    if not name:
        wrong = {x: sum(y.is_rejected(x) + y.is_rival(x) for y in worst_first) for x in names}
        name = min(names, key=lambda x: (wrong[x], *_rank(worst_first, x)))
    return {x: case.conclude(name) for x, case in cases.items()}


def _rank(cases: Sequence[_Case], name: str) -> tuple[int, int, float]:
    fits = [x.fits[name] for x in cases if name in x.fits]  # some were not compared
    return sum(x.is_out(name) for x in cases), -len(fits), sum(x.against for x in fits)


def _agree(cases: Sequence[_Case], names: Sequence[str]) -> str:
    """Find the likeliest profile that explains all parts; an empty name if there is none."""
    found = sorted(names, key=lambda x: _rank(cases, x))
    left = (x for x in found if not any(y.is_out(x) or y.glance(x) for y in cases))
    tried = ((x, partial(_sum_together, cases, x)) for x in left)
    return next((x for x, first in tried if not any(y.rejects(x, first) for y in cases)), "")


def _sum_together(cases: Sequence[_Case], name: str) -> None:
    """Add up the errors of all parts at once, if a profile is the first that is tried."""
    if len(cases) > 1 and not any(x.tried for x in cases):
        start, every = time.perf_counter(), [(x, x.profiles[name]) for x in cases]
        parts = [(x.problem, x.dtype, y, x.numbers, x.weights.of(y)) for x, y in every]
        sums = [begin_sums(*x) for x in parts]
        of_keys = next(y for x, y in every if x.problem.result != "dq")
        if sweep_pairs(sums, cases[0].dtype, of_keys):  # which knows what is rounded by head
            for case, of_part in zip(cases, sums, strict=True):
                case.sums[name] = of_part
        cases[0].seconds += time.perf_counter() - start


def _agree_without_some(cases: Sequence[_Case], names: Sequence[str]) -> str:
    """Find the profile that explains parts but as few as can be, and is likeliest for all parts.

    In a likelihood a wrong row costs little: rows that are right tell of which parts they are.
    """
    for left in range(len(cases) - 1, 0, -1):
        found = {_agree(some, names) for some in combinations(cases, left)} - {""}
        if found:
            for case in cases:
                if not found <= {*case.fits}:
                    case.compare(names)
            return min(found, key=lambda x: sum(case.fits[x].against for case in cases))
    return ""


def _share_evidence(cases: Sequence[_Case], names: Sequence[str]) -> None:
    """Let only profiles that explain all parts be evidence against others.

    A part that none explains is wrong, and has no say in this.
    """
    for case in cases:
        case.compare(names)
    of_each = ({x for x, y in case.fits.items() if y.explains} for case in cases)
    explained = set(names).intersection(*filter(None, of_each))
    for case in cases:
        case.take_evidence(explained)


def _suspect_float32(problem: Problem, numbers: Numbers, dtype: str, alpha: float) -> Iterator[str]:
    """Say if float64 numbers are those of sums or exponentials in float32."""
    if dtype == "float64" and problem.gradient is None:
        case = _Case(Part(problem, numbers), Request(dtype, "math", alpha, False))
        trial = case.trial("math")
        if trial.known and trial.z.largest > _FELT and not case.rejects("math"):
            yield "profile math accepts these numbers: some step of the kernel may be in float32"
