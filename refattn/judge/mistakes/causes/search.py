"""The driver of the search for causes of a wrong output, `search_causes`.

Wrong rows are found first, and some of them are taken with some right ones (`wrong_rows`). On these
the alternatives are tried in this order: the plain ones, whether of the problem (`alternatives`,
`sequences`) or of the computation (`slips`, `fitted`); those with one number that is fitted; those
of single heads; those that hide keys by place (`reach`) or lose a tile. Only if none of them holds,
what is fitted to the wrong rows is tried (`fitted`, `heads`), and then coarser roundings.

The few that come nearest are judged: an alternative holds if the roundings of a profile explain
what it leaves, and if it is so far from the problem as it was given that these could have told the
two apart. Of several that hold the nearest are named, and of those that are alike here the first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from ....arrays.words import place
from ...rounding.head import SoftmaxHead
from ...rounding.problems import Index, Problem
from ...rounding.profiles import Profile
from ...verification.findings import ONLY_IN, Numbers, Suspect, name_span
from ..defects.catalogue import Mutant
from .normalisers import (
    Normalisers,
    list_exchanged_normalisers,
    list_moved_normalisers,
    list_offsets,
)
from .places import as_suspect, list_places, say_what_is_left
from .sampled import Alternative, Result, Rows, attend
from .slips import NORMALISERS, fit_normalisers
from .trials import EXPLAINED_BY_WRONG, Explained, Trials, leave_without_keys
from .wrong_rows import (
    FAR,
    FEWEST_NUMBERS,
    Sample,
    Sampled,
    draw_sample,
    error_of_lse,
    list_left,
    list_wrong,
    rate_rows,
    stay_wrong,
)

_LOG_OF_TRIED = math.log(1e8)  # of kernels that are fitted, with their places, over a chance
_LEFT_BY_FIRST, _FIRSTS = 0.8, 3  # of squared errors, by the first of two causes; that are tried
_ROWS_OF_SECOND = 6  # that it leaves wrong, at least
_BEST = 6  # alternatives that are judged by rounding errors
_OUTPUT_ALONE = "(only the output: lse does not agree)"
_FEWEST_LSE = 4  # log normalisers: fewer are near to those of some row by chance
_KEPT = 2**22  # numbers of heads that were read, and are kept


class SearchTask(NamedTuple):
    """What is searched: causes of a wrong output, of its log normalisers, or of both."""

    problem: Problem
    numbers: Numbers
    profiles: Mapping[str, Profile]
    dtype: str
    failed: str = "out"  # or `lse`, or `both`
    where: Index = ()  # of the worst element
    fits: Sequence[Suspect] = ()  # of defects: beside them coarse roundings are not tried
    mistakes: Sequence[Mutant] = ()  # of the user, which are tried first
    rows: Sequence[Index] = ()  # that are known to be wrong: those that the first profile rejects
    known: str = ""  # the cause, if it is known: only the sample is taken
    strange_alone: bool = False  # whether only rows with NaN or infinity are looked at
    posed: Problem | None = None  # which texts compute, if it was another one
    first: str = ""  # what is so already, if this is the search for a second cause


def search_causes(task: SearchTask) -> tuple[list[Suspect], Sample]:
    """Return alternatives that explain an output and its log normalisers, and the sample.

    Lists of what is fitted to rows are not tried if one of the fits leaves roundings alone.
    """
    problem, numbers, profiles, dtype, failed, where, fits, *_ = task
    profile = next(iter(profiles.values()))
    problem = problem.read_by(profile)
    heads = _KEPT // max(sum(problem.shape[:2]) * problem.first["q"].shape[-1], 1)
    problem = problem._replace(read=lru_cache(maxsize=min(max(heads, 4), 64))(problem.read))
    of_rows = task.strange_alone, None, task.rows
    sample = draw_sample(problem, numbers, profile, dtype, where, *of_rows)
    known = task.known or (not sample.wrong.any() and " and ".join(sample.remarks))
    if known:
        return [as_suspect(f"agrees if {known}")], sample
    trials = Trials(problem, sample, numbers, profile, task.mistakes, task.posed)
    found = [Explained(Alternative("", problem))]
    if failed != "lse":
        explained = [*trials.list_explained()]
        if task.first:
            multiply = partial(_multiply_output, problem)
            explained += trials.fit(
                "the output is {} times what it should be", multiply, (0.7, 1.4)
            )
        enough = [x for x in explained if x.share > EXPLAINED_BY_WRONG]
        # In steps of e^(1/4) in the mean square: of those that are about as near, the one that is
        # right everywhere and plain comes first.
        nearest = sorted(
            enough,
            key=lambda x: (
                round(4 * math.log(max(x.square, 1.0))),
                not x.everywhere,
                not x.alternative.plain,
            ),
        )
        judged = [trials.judge(x, profiles, dtype) for x in nearest[:_BEST]]
        holding = [x for x in judged if _may_stand(trials, x)]
        if len(holding) > 1:  # rows that were not taken may tell them apart
            holding.sort(key=lambda x: len(find_left(trials, x.alternative, None)[0]))
        if numbers.lse is not None and len(holding) > 1:  # or log normalisers may
            holding.sort(key=lambda x: explain_normalisers(trials, x, False) is None)
        found = trials.keep_apart(holding) or [x for x in judged[:1] if x.explains_part]
        # What is fitted has many numbers, and would explain what has a plainer cause as well.
        settled = any(x.holds and x.is_sure for x in found) or leave_roundings(fits)
        if not (settled or task.first):
            for listing in trials.list_fitted():
                explained += (tried := [*trials.explain_all(listing)])
                fitted = [trials.judge(x, profiles, dtype) for x in tried]
                holding = [x for x in fitted if _may_stand(trials, x) and _is_told(trials, x)]
                # What is fitted to some wrong rows must explain all of them.
                if holding := [x for x in holding if not find_left(trials, x.alternative, None)[0]]:
                    found = trials.keep_apart(holding)
                    break
        unknown = not (task.first or any(x.holds for x in found))
        if unknown and not settled and (two := _search_second(task, trials, explained)):
            return two, sample
        if unknown and not fits:
            found = [*trials.list_rounded(profile, dtype), *found]
    several = bool(np.sum(sample.wrong) >= _FEWEST_LSE)
    suspects, whole = [], []  # those are whole that leave no row wrong
    for one in found:
        words, of_lse = one.alternative.text, None
        if numbers.lse is not None:
            of_lse = explain_normalisers(trials, one)
            if of_lse is None and failed != "out":  # what leaves outputs right may change them
                some = one._replace(everywhere=False)
                of_lse = explain_normalisers(trials, some, others=failed == "lse" and several)
                one = one if of_lse is None else some
            if of_lse is None and failed != "both":
                continue
            if of_lse is None:
                words = f"{words} {_OUTPUT_ALONE}" if words else ""
            elif of_lse.words:
                words = f"{words}, and {of_lse.words}" if words else of_lse.words
        if words:
            alone = numbers.lse is not None and of_lse is None
            suspect = suspect_alternative(words, one, trials, alone)
            left: tuple[list[Index], int] = [], 0
            if suspect.name == "convention":
                left = find_left(trials, one.alternative, of_lse)
            suspects.append(say_what_is_left(suspect, *left))
            whole += suspects[-1:] if one.holds and not (alone or left[0]) else []
    if not whole and failed == "both" and sample.wrong.any():
        of_sums = trials.judge(trials.explain(trials.take_sums()), profiles, dtype)
        if of_sums.holds:
            whole = [suspect_alternative(of_sums.alternative.text, of_sums, trials)]
    return whole or suspects, sample


def _search_second(
    task: SearchTask, trials: Trials, explained: Sequence[Explained]
) -> list[Suspect]:
    """Search a cause beside one without a fitted number that explains a part of the error."""
    some = [x for x in explained if _is_problem(x.alternative) and not x.alternative.fitted]
    most = _LEFT_BY_FIRST * trials.mean_square(of_factor=True)
    by_square = {round(x.square, 6): x for x in reversed(some) if x.square < most}  # each once
    firsts = sorted(by_square.values(), key=lambda x: x.square)
    for one in (x.alternative for x in firsts[:_FIRSTS]):
        second = task._replace(
            problem=_pose_other(one), fits=(), rows=(), mistakes=(), posed=None, first=one.text
        )
        found, sample = search_causes(second)
        found = [x for x in found if x.name == "convention" and x.text.startswith("agrees if")]
        spoils = np.any(sample.wrong & ~trials.sample.wrong)
        if found and not spoils and np.sum(sample.wrong) >= _ROWS_OF_SECOND:
            start = f"agrees if {one.text}, and "
            return [x._replace(text=start + x.text.removeprefix("agrees if ")) for x in found]
    return []


def _multiply_output(problem: Problem, c: float) -> Alternative:
    def compute(head: SoftmaxHead) -> Result:
        exact = attend(head)
        return exact._replace(out=c * exact.out)

    return Alternative("", problem, compute=compute)


def _is_problem(one: Alternative) -> bool:
    """Tell whether an alternative is attention with other arrays, options or masks.

    Keys that are left out, of any edges, are second: else others might be seen again.
    """
    if "left out" in one.text or "not masked" in one.text:
        return False
    usual = one.compute is attend and one.answer is None and one.move is None and not one.dealt
    return usual and one.problem.packed is None and one.problem.kind == "scores"


def _pose_other(one: Alternative) -> Problem:
    """Pose an alternative as a problem: what is seen by its rules is in the mask."""
    problem, (n, m, _) = one.problem, one.problem.shape
    if one.seen is None and one.bias is None:
        return problem

    @lru_cache(maxsize=4)
    def read(index: Index) -> Mapping[str, Any]:
        head = one.head(Rows(index, np.arange(n), np.arange(m)))
        shown = np.ones((n, m), bool) if head.mask is None else head.mask
        changed = {"mask": shown} | ({} if head.bias is None else {"bias": head.bias})
        return {**problem.read(index), **changed}

    return problem._replace(read=read, causal=False, window=(None, None))


def _may_stand(trials: Trials, one: Explained) -> bool:
    """Tell whether an alternative holds in all rows, or else explains every wrong row.

    Wrong rows that are all 0 explain nothing of the latter kind: any overflow may give these.
    """
    if not one.holds or one.everywhere:
        return one.holds
    zeros = not any(np.any(x.got[x.wrong]) for x in trials.sample.heads)
    return not zeros and (one.near or not find_left(trials, one.alternative, None)[0])


def _is_told(trials: Trials, one: Explained) -> bool:
    """Tell whether so many numbers are so near that one of all that is fitted is not by chance."""
    size = sum(x[y.wrong].size for x, y in zip(trials.errors, trials.sample.heads, strict=True))
    gain = math.log(max(trials.mean_square(), 1.0) / max(one.square, 1.0))
    return size / 2 * gain > _LOG_OF_TRIED


def leave_roundings(fits: Sequence[Suspect]) -> bool:
    """Tell whether a defect of a fitted size, whose error is given, leaves roundings alone."""
    return any(math.isfinite(x.error) for x in fits)


def suspect_alternative(words: str, one: Explained, trials: Trials, alone: bool = False) -> Suspect:
    """Name an alternative, and whether it holds in all rows that were taken, and not in `out`."""
    start = "agrees if" if one.holds and not alone else "agrees in part if"
    places = list_places(trials.problem, trials.sample)  # columns of few rows say nothing
    where = ", ".join(x for x in places if not x.startswith("columns between")) or "some rows"
    there = "" if one.everywhere else f"{ONLY_IN}{where}"
    name = "convention" if one.holds else "convention in part"
    if words.startswith("precision is lost"):
        name = "roundings"
    wrong = (trials.sample.wrong.any(1), [x.wrong.any() for x in trials.sample.heads])
    more = int(np.sum(wrong[0])) - int(np.sum(wrong[1]))  # heads that were not taken
    if one.alternative.named and more > 0:
        words = f"{words} (and {more} more heads)"
    if trials.sample.remarks:
        words = f"{words}, and {' and '.join(trials.sample.remarks)}"
    suspect = as_suspect(f"{start} {words}{there}", one.share, name)
    scale, declared = one.alternative.problem.scale, trials.problem.scale
    if not (one.everywhere and declared) or scale == declared:
        return suspect
    return suspect._replace(estimate=scale / declared - 1)


def explain_normalisers(trials: Trials, one: Explained, others: bool = True) -> Normalisers | None:
    """Find a description of the log normalisers, in the rows that an alternative explains.

    Those of the alternative are tried first, in all forms of `NORMALISERS`, then those of others.
    """
    heads, about = trials.sample.heads, trials.about
    heads = heads if one.everywhere else [x.take(x.wrong) for x in heads if x.wrong.any()]
    results = [one.alternative.result(x.rows) for x in heads]
    named = (Normalisers(f"lse is {x}", change=change) for x, change in NORMALISERS.items())
    moved = (
        Normalisers(f"lse is {words}", other)
        for words, other in list_moved_normalisers(trials.problem)
    )
    right = Normalisers("lse is right", Alternative("", trials.problem).result)
    of_lse = [(x.lse, y.lse) for x, y in zip(heads, results, strict=True) if x.lse is not None]
    fitted = (Normalisers(f"lse is {x}", change=change) for x, change in fit_normalisers(of_lse))
    exchanged = (
        Normalisers(f"lse is {words}", other.result)
        for words, other in list_exchanged_normalisers(*about, trials.sample)
    )
    offsets = (Normalisers(f"lse is {x}", result) for x, result in _list_lse_offsets(trials, one))
    rest = chain([right], moved, fitted, exchanged, offsets) if others else ()
    for lse in chain([Normalisers("")], named, rest):
        if all(np.all(lse.far(x, y, *about) < FAR) for x, y in zip(heads, results, strict=True)):
            return lse
    return None


def _list_lse_offsets(
    trials: Trials, one: Explained
) -> Iterator[tuple[str, Callable[[Rows], Result]]]:
    problem, numbers, profile = trials.about
    wrong = list_wrong(problem, numbers, trials.sample.wrong)
    std = partial(error_of_lse, numbers=numbers, profile=profile, keys=problem.shape[1])
    return list_offsets(problem, wrong, one.alternative.result, std)


def find_left(
    trials: Trials, alternative: Alternative, of_lse: Normalisers | None
) -> tuple[list[Index], int]:
    """Find wrong rows, of so many, that an alternative leaves wrong; in heads that it names."""
    (problem, numbers, _), sample = trials.about, trials.sample
    heads = {x.rows.at for x in sample.heads if x.wrong.any()}
    taken = [x.take(x.wrong) for x in sample.heads if x.wrong.any()]
    rates = [rate_rows(x.got, alternative.result(x.rows).out, sample.unit) for x in taken]
    usual = max((float(np.max(x)) for x in rates), default=math.inf)

    def stays(x: Sampled) -> Any:
        result, given = alternative.result(x.rows), Alternative("", problem).result(x.rows)
        off = stay_wrong(x.got, result.out, given.out, sample.unit, usual)
        if alternative.answer is None:
            off &= ~leave_without_keys(problem, x, result, given)
        return off if of_lse is None else off | (of_lse.far(x, result, *trials.about) > 2 * FAR)

    wrong = list_wrong(problem, numbers, sample.wrong)
    return list_left((x for x in wrong if not alternative.named or x.rows.at in heads), stays)


def search_without_zeros(task: SearchTask, sample: Sample) -> list[Suspect]:
    """Search causes in wrong columns alone, or wrong rows, if some of these are 0."""
    for part, words in (*_leave_columns(task, sample), *_leave_rows(task, sample)):
        found, _ = search_causes(part._replace(mistakes=(), rows=(), known="", strange_alone=False))
        holding = [x._replace(text=x.text + words) for x in found if x.name == "convention"]
        if holding:
            return holding
    return []


def _leave_columns(task: SearchTask, sample: Sample) -> Iterator[tuple[SearchTask, str]]:
    """Take the wrong columns that are not 0."""
    problem, numbers, where = task.problem, task.numbers, task.where
    got = [x.got[x.wrong] for x in sample.heads]
    written = np.any(np.concatenate(got), 0) if got else sample.columns
    kept = sample.columns & written
    few = np.sum(sample.wrong) * np.sum(kept) < FEWEST_NUMBERS  # any cause is near these
    if kept.all() or not kept.any() or few:
        return
    alone = problem.replaced("v", lambda _, v: v[:, kept])
    if "v_scale" in problem.first:
        alone = alone.replaced(
            "v_scale", lambda _, x: np.broadcast_to(x, x.shape[:1] + kept.shape)[:, kept]
        )
    alone = alone._replace(shape=(*problem.shape[:2], int(np.sum(kept))))
    of_kept = numbers._replace(out=lambda at: numbers.out(at)[:, kept], lse=None)
    where = (*where[:-1], int(np.sum(kept[: where[-1]])) % alone.shape[2]) if where else where
    spans = [np.flatnonzero(x) for x in (sample.columns, sample.columns & ~written)]
    some, zero = (name_span("columns", x) if len(x) else "" for x in spans)
    there = f"{ONLY_IN}{some}" * (not sample.columns.all()) + f", and {zero} are 0" * bool(zero)
    yield task._replace(problem=alone, numbers=of_kept, where=where), there


def _leave_rows(task: SearchTask, sample: Sample) -> Iterator[tuple[SearchTask, str]]:
    """Take the wrong rows that are not 0: rows of NaN are left out if others are wrong."""
    problem, numbers = task.problem, task.numbers
    outs = (numbers.out(x) for x in np.ndindex(problem.lead))
    zero = sample.wrong & np.stack([~np.any(x, -1) for x in outs])
    if not zero.any() or np.array_equal(zero, sample.wrong):
        return
    written = numbers._replace(
        out=lambda at: np.where(zero[problem.number(at)][:, None], math.nan, numbers.out(at))
    )
    some = [problem.index_of(x) for x in np.flatnonzero(zero.any(1))]
    rows = [x for x in zero if x.any()]
    words = f", and {name_span('queries', np.flatnonzero(zero.any(0)))} are 0"
    if any(not np.array_equal(x, rows[0]) for x in rows):
        words = f", and {np.sum(zero)} other rows are 0"  # other queries in each head
    elif len(some) < len(zero):
        words += f" in head{'s' * (len(some) > 1)} {', '.join(map(place, sorted(some)))}"
    yield task._replace(numbers=written, where=()), words
