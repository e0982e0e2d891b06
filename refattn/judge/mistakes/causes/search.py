"""The driver of the search for causes of a wrong output, `search_causes`.

Wrong rows are found first, and some of them are taken with some right ones (`wrong_rows`). On these
the alternatives are tried in this order: the plain ones, whether of the problem (`alternatives`,
`sequences`) or of the computation (`slips`, `fills`); those with one number, which is fitted; those
of single heads; those that hide keys by place (`reach`) or lose a tile. Only if none of them holds,
what is fitted to the wrong rows is tried (`fitted`, `heads`), and then coarser roundings.

The few that come nearest are judged: an alternative holds if the roundings of a profile explain
what it leaves, and if it is so far from the problem as it was given that these could have told the
two apart. Of several that hold the nearest are named, and of those that are alike here the first.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ....arrays.library import Doubles
from ...rounding.problems import Index, Problem
from ...rounding.profiles import Profile
from ...rounding.roundings import RowErrors
from ...rounding.softmax import analyse_softmax
from ...verification.empty_rows import fit_convention
from ...verification.findings import Numbers, Suspect, name_number
from .alternatives import list_added, list_alternatives, list_families
from .changed_inputs import list_rotated
from .fills import STARTS, list_filled, list_fills, rate_fill
from .fitted import list_counted, list_mixed, list_wrong_tiles, sum_by_tiles
from .heads import describe_numbers, list_exchanged, list_of_heads, list_other_places
from .normalisers import Normalisers, follow_normalisers, list_exchanged_normalisers
from .places import list_places
from .reach import list_cuts, list_reaches, list_windows
from .sampled import Alternative, Result, Rows, attend
from .sequences import list_hidden, list_padded, list_skipped
from .slips import NORMALISERS, PARTS, fit_normalisers, list_lost_tiles, list_slips, sum_tiles
from .suspects import as_suspect, say_what_is_left
from .wrong_rows import (
    FAR,
    POWER,
    Sample,
    Sampled,
    compare_outputs,
    differ,
    divide,
    draw_sample,
    find_tiles,
    finite,
    list_wrong,
    rate_rows,
    row_sizes,
    stay_wrong,
)

_BEST = 6  # alternatives that are judged by rounding errors
_RMS, _LARGEST = 2.0, 15.0  # of z, at most, where an alternative holds
_EXPLAINED_BY_WRONG = 0.7  # of the error, at least, that is explained by what does not hold
_LIKE = 0.8  # of what an alternative changes, at least, that is in the error
_STEPS = 8  # of a fit
_JOINED = 3  # alternatives, at most, named together
_FIRST_ROWS = 8  # wrong rows by which alternatives are left out
_EMPTY = 0.125  # of wrong rows, at most, that see no key by an alternative
_TOO_SMALL = 0.04  # mean square of z of a profile that does not say what is rounded
_FITTED_FILLS = 3  # ways to hide keys by a number, at most, of which this is fitted
_OUTPUT_ALONE = "(only the output: lse does not agree)"
_OF_HEADS = re.compile(r"head \(?\d")  # a cause that is one of these heads only
_ROUNDED: Mapping[str, Mapping[str, Any]] = {
    "sums of products are kept in float16": {"accumulate": "float16"},
    "sums of products are kept in bfloat16": {"accumulate": "bfloat16"},
    "scores are rounded to float16": {"scores": "float16"},
    "scores are rounded to bfloat16": {"scores": "bfloat16"},
    "weights are rounded to float16": {"weights": "float16"},
    "weights are rounded to bfloat16": {"weights": "bfloat16"},
    "weights are rounded to float8_e4m3fn": {"weights": "float8_e4m3fn"},
}


class Explained(NamedTuple):
    """An alternative on the sample.

    What a kernel does wrong in a place alone is a reason there if it gives numbers.
    """

    alternative: Alternative
    square: float = 1.0  # mean square of z that it leaves in wrong rows
    share: float = 1.0  # of the error beyond roundings, what it explains
    likeness: float = 1.0  # of what it changes, over the error, the share that is in the error
    everywhere: bool = True  # whether all right rows stay right
    near: bool = True  # whether those in the place of the wrong ones do
    holds: bool = True  # whether roundings explain the rest


def _of_head(
    family: Callable[[Mapping[Index, float]], Alternative], at: Index, c: float
) -> Alternative:
    return family({at: c})


class Trials:
    """A sample, with the errors of the problem as it was given."""

    def __init__(
        self, problem: Problem, sample: Sample, numbers: Numbers, profile: Profile
    ) -> None:
        self.problem, self.sample, self.about = problem, sample, (problem, numbers, profile)
        given = Alternative("", problem)
        self.given = [given.result(x.rows) for x in sample.heads]
        self.sizes = [sample.unit * row_sizes(x.out) for x in self.given]
        self.errors = [
            divide(differ(x.got, y.out), size)
            for x, y, size in zip(sample.heads, self.given, self.sizes, strict=True)
        ]
        wrong = [np.flatnonzero(x.wrong) for x in sample.heads]
        # A few rows of the head with most wrong ones, by which most alternatives are left out.
        at = max(range(len(wrong)), key=lambda x: len(wrong[x]), default=0)
        some: Any = wrong[at][:: -(-len(wrong[at]) // _FIRST_ROWS) or 1] if wrong else []
        self.first = [x.take(some) for x in sample.heads[at : at + 1]]
        self.given_first = [x.out[some] for x in self.given[at : at + 1]]

    def find_better(self, outs: Iterable[Doubles]) -> list[int]:
        """Find the results for some wrong rows of a head that are not surely farther from them."""
        (x,), (own,), found = self.first, self.given_first, np.stack([*outs])
        size = self.sample.unit * np.maximum(row_sizes(own), row_sizes(found))
        errors = differ(x.got, own), differ(x.got, found), differ(found, own)
        before, after, moved = (np.sum(np.square(divide(y, size)), (-2, -1)) for y in errors)
        # One that changes these rows too little to be told by them may still explain others.
        return np.flatnonzero((moved < POWER) | ~(after > before)).tolist()

    def explain_all(self, alternatives: Iterable[Alternative]) -> Iterator[Explained]:
        """Say what each of the alternatives explains that may explain something."""
        every = [*alternatives]
        some = [*range(len(every))]
        if self.first and every:
            some = self.find_better(x.result(self.first[0].rows).out for x in every)
        yield from map(self.explain, (every[x] for x in some))

    def explain(self, alternative: Alternative) -> Explained:
        """Say what an alternative explains; in heads with wrong rows alone, if that is little."""
        every = tuple(range(len(self.given)))
        some = tuple(x for x in every if self.sample.heads[x].wrong.any())
        results: dict[int, Result] = {}
        one = Explained(alternative, share=0.0, likeness=0.0, holds=False)
        for at in dict.fromkeys((some, every)):
            heads = [self.sample.heads[x] for x in at]
            for x in (x for x in at if x not in results):
                results[x] = alternative.result(self.sample.heads[x].rows)
            empty = self._find_empty(alternative, results)
            lost = sum(
                int(np.sum(~np.isnan(x.got[y, 0]))) for x, y in zip(heads, empty, strict=True)
            )
            # Rows that hold numbers of their own contradict what hides all their keys; a few may be
            # the mean of v.
            if lost > _EMPTY * sum(int(np.sum(x.wrong)) for x in heads):
                return Explained(alternative, share=0.0, likeness=0.0, holds=False)
            sample, outs = self.sample._replace(heads=heads), [results[x].out for x in at]
            given = [self.given[x].out for x in at]
            one = Explained(alternative, *compare_outputs(sample, outs, given, empty)[:-1], False)
            if one.share <= _EXPLAINED_BY_WRONG and one.likeness < _LIKE:
                break  # whatever else it says of right rows
        return one

    def _find_empty(
        self, alternative: Alternative, results: Mapping[int, Result]
    ) -> list[npt.NDArray[np.bool_]]:
        """Find wrong rows that an alternative leaves without keys, as in `leave_without_keys`."""
        hides = alternative.compute is attend and alternative.answer is None
        heads = ((self.sample.heads[x], self.given[x], y) for x, y in sorted(results.items()))
        return [
            hides & x.wrong & leave_without_keys(self.problem, x, y, own) for x, own, y in heads
        ]

    def list_explained(self) -> Iterator[Explained]:
        """List what explains enough, of all alternatives."""
        plain = list_skipped, list_hidden, list_alternatives, list_slips, list_filled, list_added
        alternatives = [*chain(*(x(self.problem) for x in (*plain, list_padded, list_rotated)))]
        if len(self.problem.lead) and self.problem.lead[-1] > 1:
            text = "heads and queries of the output are swapped (transposed)"
            alternatives.append(Alternative(text, self.problem, answer=self._transposed))
        yield from self.explain_all(alternatives)
        for text, family, starts in list_families(self.problem):
            yield from self.fit(text, family, starts)
        for text, fill in self._find_fills():
            yield from self.fit(text, fill, STARTS)
        yield from self.explain_heads()
        # Which keys are cut off is fitted to a few rows: there are too many cuts to try each.
        for x, own in zip(self.first, self.given_first, strict=True):
            some = self.problem, x, self.sample.unit * row_sizes(own)
            yield from self.explain_all(
                chain(list_cuts(*some), list_reaches(*some), list_windows(*some))
            )
        lost = [*list_lost_tiles(self.problem)]
        for x in self.first if lost else ():
            tiles = sum_tiles(Alternative("", self.problem).head(x.rows))
            for number in self.find_better(y.out for y in tiles):
                yield self.explain(lost[number])

    def _find_fills(self) -> Iterator[tuple[str, Callable[[float], Alternative]]]:
        """Find the ways to hide keys by a number that come nearest to rows, or their lse."""
        fills = [*list_fills(self.problem)] if self.first else []
        far: Any = np.zeros((0, 2))
        for x, own in zip(self.first, self.given_first, strict=True):
            size = self.sample.unit * row_sizes(own)
            far = np.array([rate_fill(x, size, fill, *self.about) for _, fill in fills])
        # The nearest by outputs and the nearest by log normalisers.
        yield from (fills[x] for x in np.unique(np.argsort(far, 0)[:_FITTED_FILLS]))

    def list_fitted(self) -> Iterator[Alternative]:
        """List what is fitted to wrong rows: tiles of keys, and limits in tiles of rows alone."""
        wrong = self.sample.wrong
        columns, length = partial(sum_by_tiles, self.problem, self.sample.unit), find_tiles(wrong)
        every = list_wrong(self.problem, self.about[1], wrong)
        yield from list_counted(self.problem, every, columns, length)
        yield from list_mixed(self.problem, every, self.sample.unit)
        yield from list_other_places(self.problem, self.sample)
        for x, own in zip(self.first, self.given_first, strict=True):
            some = self.problem, x, self.sample.unit * row_sizes(own)
            yield from list_wrong_tiles(*some)
            if length:
                yield from list_reaches(*some, lambda y: wrong[self.problem.number(y.at), y.i])

    def list_moved(self) -> Iterator[tuple[str, Callable[[Rows], Result]]]:
        """List results that are written to other places."""
        if len(self.problem.lead) and self.problem.lead[-1] > 1:
            yield "transposed (heads and queries swapped)", self._transposed
        keys = self.problem.shape[1]
        for parts in (x for x in PARTS if x < keys):
            size = -(-keys // parts)
            for words, j in (("first", slice(size)), ("last", slice((parts - 1) * size, keys))):
                yield (
                    f"computed from the {words} of {parts} parts of the keys",
                    partial(self._of_keys, j),
                )
        smooth = self.problem.replaced("k", lambda _, k: k - np.mean(k, 0))
        text = "computed from keys minus their mean: scale q . mean(k) is missing"
        yield text, Alternative("", smooth).result
        for alternative in list_alternatives(self.problem):
            if alternative.move is not None:
                yield f"that of {alternative.text.split(' the output of ')[-1]}", alternative.result
            else:
                yield f"computed as if {alternative.text}", alternative.result

    def _of_keys(self, j: slice, rows: Rows) -> Result:
        return Alternative("", self.problem).result(rows._replace(keys=rows.keys[j]))

    def _transposed(self, rows: Rows) -> Result:
        """Compute the rows that are there if heads are written after queries."""
        heads, n = self.problem.lead[-1], self.problem.shape[0]
        given, results = Alternative("", self.problem), []
        for i in rows.queries:
            at, head = divmod(rows.at[-1] * n + int(i), heads)
            index = (*rows.at[:-1], head)
            results.append(given.result(Rows(index, np.array([at]), rows.keys)))
        return Result(*(np.concatenate(x) for x in zip(*results, strict=True)))

    def explain_heads(self) -> Iterator[Explained]:
        """List what explains the heads by others, or by a number for each."""
        if not math.prod(self.problem.lead) > 1:
            return
        yield from self.explain_all(list_exchanged(self.problem, self.sample, self.sizes))
        for text, family, starts in list_of_heads(self.problem):
            found: dict[Index, float] = {}
            for number, x in enumerate(self.sample.heads):
                at = x.rows.at
                if x.wrong.any():
                    fitted = self.fit_number(partial(_of_head, family, at), starts, [number])
                    if fitted is not None:
                        found[at] = fitted[0]
            text = describe_numbers(text, found)
            yield from self.explain_all([family(found)._replace(text=text)])

    def fit(
        self, text: str, family: Callable[[float], Alternative], starts: Sequence[float]
    ) -> Iterator[Explained]:
        """Fit the number of a family."""
        fitted = self.fit_number(family, starts)
        if fitted is not None and fitted[1] < abs(fitted[0]):  # that is not 0
            c, error = fitted
            digits = min(max(0, -math.floor(math.log10(max(error, 1e-12)))), 9)
            known = name_number(c, error)
            words = text.format(f"{c:.{digits}f} ± {error:.1g}" + f" ({known})" * bool(known))
            yield from self.explain_all([family(c)._replace(text=words)])

    def fit_number(
        self,
        family: Callable[[float], Alternative],
        starts: Sequence[float],
        among: Sequence[int] | None = None,
    ) -> tuple[float, float] | None:
        """Fit a number by Gauss and Newton, from the best of some starts, with its error.

        It is that of the wrong rows of all heads of the sample, or of some of them; log
        normalisers, which are more exact, tell its last digits.
        """
        every = range(len(self.given)) if among is None else among
        wrong = {x: self.sample.heads[x].wrong for x in every}
        heads = [self.sample.heads[x].take(i) for x, i in wrong.items()]
        given = [self.given[x].out[i] for x, i in wrong.items()]
        sizes = [self.sizes[x][i] for x, i in wrong.items()]
        sample = self.sample._replace(heads=heads)

        def outs(c: float) -> list[Doubles]:
            return [family(c).result(x.rows).out if len(x.got) else x.got for x in heads]

        c = min(starts, key=lambda c: compare_outputs(sample, outs(c), given).square)
        error = math.inf
        for _ in range(_STEPS):
            step = 1e-4 * abs(c)
            product = size = noise = 0.0
            for x, low, high, std in zip(heads, outs(c - step), outs(c + step), sizes, strict=True):
                # Not clipped as `divide` does: in float32 all of them may be out of its range.
                slope = finite((high - low) / (2 * step) / std)
                z = finite(differ(x.got, (high + low) / 2) / std)
                product += float(np.sum(slope * z))
                size += float(np.sum(slope * slope))
                noise += float(np.sum(np.square(np.sum(slope * z, -1))))
            if not size > 0:
                return None
            error = math.sqrt(max(noise, size)) / size
            c, last = c + float(np.clip(product / size, -abs(c) / 2, abs(c) / 2)), c
            if abs(c - last) < error / 10:
                break
        of_lse = [x for x in heads if x.lse is not None and len(x.got)]
        return follow_normalisers(family, of_lse, (c, error), *self.about)

    def judge(self, one: Explained, profiles: Mapping[str, Profile], dtype: str) -> Explained:
        """Tell whether what an alternative leaves is by the roundings of one of the profiles."""
        if one.likeness < _LIKE or not (one.everywhere or one.near):
            return one
        results = {x: one.alternative.result(y.rows) for x, y in enumerate(self.sample.heads)}
        empty = self._find_empty(one.alternative, results)
        left = [x.take(x.wrong & ~y) for x, y in zip(self.sample.heads, empty, strict=True)]
        for profile in profiles.values():
            z = np.concatenate(
                [
                    self._divide(x, one.alternative, profile, dtype).ravel()
                    for x in left
                    if len(x.got)
                ]
                or [np.zeros(0)]
            )
            rms = math.sqrt(np.mean(z * z)) if z.size else math.inf
            if rms < _RMS and np.max(np.abs(z)) < _LARGEST:
                return one._replace(holds=True)
        return one

    def keep_apart(self, holding: Sequence[Explained]) -> list[Explained]:
        """Keep what is as near as the nearest, and of what cannot be told apart the first.

        What leaves right rows right everywhere comes first.
        """
        least = min((x.square for x in holding), default=0.0)
        kept: list[Explained] = []
        for one in sorted(holding, key=lambda x: not x.everywhere):
            fitted = any(
                x in one.alternative.text for x in ("±", "(head")
            )  # a number that has a name is not written again
            if (
                not (fitted and kept)
                and one.square <= 1.5 * max(least, 0.5)
                and all(self._are_apart(one, x) for x in kept)
            ):
                kept.append(one)
        return self._join_lost(kept, holding)

    def _join_lost(self, kept: list[Explained], holding: Sequence[Explained]) -> list[Explained]:
        """Say all that holds where no number is left to tell it apart."""
        got = [x.got[x.wrong] for x in self.sample.heads]
        if not kept or np.any(np.isfinite(np.concatenate(got))):
            return kept
        texts: dict[str, str] = {}  # by what overflows, in whatever tiles or type
        for one in (*kept[:1], *holding):
            text = one.alternative.text
            text = text.split(" (tiles of ")[0]
            texts.setdefault(text.split(" overflows ")[0], text)
        if len(texts) == 1:
            return kept
        text = f"{', or '.join([*texts.values()][:_JOINED])} (NaN does not tell which)"
        return [kept[0]._replace(alternative=kept[0].alternative._replace(text=text))]

    def _are_apart(self, one: Explained, other: Explained) -> bool:
        changes = (
            divide(
                differ(one.alternative.result(x.rows).out, other.alternative.result(x.rows).out),
                size,
            )[x.wrong]
            for x, size in zip(self.sample.heads, self.sizes, strict=True)
        )
        return sum(float(np.sum(z * z)) for z in changes) > POWER

    def list_rounded(self, profile: Profile, dtype: str) -> list[Explained]:
        """List what may be rounded that the profile does not round, if that is what errors are."""
        found = []
        for text, changes in _ROUNDED.items():
            other = profile._replace(**changes)
            given = Alternative("", self.problem.read_by(other))
            first = [x.take(slice(_FIRST_ROWS)) for x in self.sample.heads[:1]]
            squares = [np.square(self._divide(x, given, other, dtype)) for x in first]
            many = 16 if "scores" in changes else 1  # that of their sums may be rounded
            if squares and not _TOO_SMALL / 4 < np.mean(squares[0]) < 4 * many * _RMS**2:
                continue  # by far
            z = [self._divide(x, given, other, dtype) for x in self.sample.heads]  # right rows, too
            rows = np.concatenate([np.mean(x * x, -1) for x in z])
            usual = [x[y.wrong] for x, y in zip(self.errors, self.sample.heads, strict=True)]
            before = float(np.mean(np.square(np.concatenate(usual)))) if usual else 0.0
            square = float(np.mean(rows)) if len(rows) else 0.0
            if not _TOO_SMALL < square < many * _RMS**2 or before < 9 * square:
                continue
            if square > _RMS**2:
                text += (
                    f" (errors are {math.sqrt(square):.2g} times as large: "
                    "perhaps sums of q . k are rounded too)"
                )
            spread = float(np.std(np.log(np.maximum(rows, 1e-9))))
            if spread < (1.2 if many > 1 else 1.0):  # all rows are as far
                found.append(Explained(given._replace(text=text), square))
        found.sort(key=lambda x: abs(math.log(x.square)))
        if not found:
            return []
        words = " or ".join(x.alternative.text for x in found[:3])
        text = f"precision is lost: {words}, or other numbers are rounded as coarsely"
        return [found[0]._replace(alternative=found[0].alternative._replace(text=text))]

    def _divide(
        self, x: Sampled, alternative: Alternative, profile: Profile, dtype: str
    ) -> Doubles:
        out = alternative.result(x.rows).out
        law = analyse(alternative, x.rows, profile, dtype)
        usual = self.sample.unit * row_sizes(out)
        std = np.where(np.isfinite(law.std), law.std, usual)
        if alternative.compute is not attend or alternative.answer is not None:  # other scores
            std = np.maximum(std, usual)
        return divide(
            differ(x.got, out), std * np.maximum(1.0, row_sizes(out) / row_sizes(law.out))
        )


def analyse(alternative: Alternative, rows: Rows, profile: Profile, dtype: str) -> RowErrors:
    """Say what roundings do to the exact result of an alternative."""
    head = alternative.head(rows)
    with np.errstate(all="ignore"):
        return analyse_softmax(head, profile.roundings(dtype), slice(0, len(head.q)))


def search_causes(
    problem: Problem,
    numbers: Numbers,
    profiles: Mapping[str, Profile],
    dtype: str,
    failed: str,
    where: Index,
    sized: bool = False,
    strange_alone: bool = False,
) -> tuple[list[Suspect], Sample]:
    """Return alternatives that explain an output and its log normalisers, and the sample.

    What `failed` is `out`, `lse` or `both`; `where` is the worst element. Coarse roundings are
    not tried on an error that is `sized`: explained by a defect of a fitted size. Rows with NaN
    or infinity may be the only ones that are looked at.
    """
    profile = next(iter(profiles.values()))
    problem = problem.read_by(profile)
    sample = draw_sample(problem, numbers, profile, dtype, where, strange_alone)
    if sample.remarks and not sample.wrong.any():
        words = " and ".join(sample.remarks)
        return [as_suspect(f"agrees if {words}")], sample
    trials = Trials(problem, sample, numbers, profile)
    found = [Explained(Alternative("", problem))]
    if failed != "lse":
        enough = [x for x in trials.list_explained() if x.share > _EXPLAINED_BY_WRONG]
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
        holding = [x for x in judged if x.holds]
        if len(holding) > 1:  # rows that were not taken may tell them apart
            holding.sort(key=lambda x: len(find_left(trials, x.alternative, None)[0]))
        if numbers.lse is not None and len(holding) > 1:  # or log normalisers may
            holding.sort(key=lambda x: explain_normalisers(trials, x, False) is None)
        found = trials.keep_apart(holding) or [x for x in judged[:1] if x.everywhere]
        # What is fitted has many numbers, and would explain what has a plainer cause as well.
        if not any(x.holds for x in found):
            explained = trials.explain_all(trials.list_fitted())
            fitted = [trials.judge(x, profiles, dtype) for x in explained]
            found = trials.keep_apart([x for x in fitted if x.holds]) or found
        if not (sized or any(x.holds for x in found)):
            found = [*trials.list_rounded(profile, dtype), *found]
    suspects = []
    for one in found:
        words, of_lse = one.alternative.text, None
        if numbers.lse is not None:
            of_lse = explain_normalisers(trials, one)
            if of_lse is None and failed != "out":  # what leaves outputs right may change them
                some = one._replace(everywhere=False)
                of_lse = explain_normalisers(trials, some, others=False)
                one = one if of_lse is None else some
            if of_lse is None and failed != "both":
                continue
            if of_lse is None:
                words = f"{words} {_OUTPUT_ALONE}" if words else ""
            elif of_lse.words:
                words = f"{words}, and {of_lse.words}" if words else of_lse.words
        if words:
            suspect = suspect_alternative(words, one, trials)
            if suspect.name == "convention":
                suspect = say_what_is_left(suspect, *find_left(trials, one.alternative, of_lse))
            suspects.append(suspect)
    whole = [x for x in suspects if "in part" not in x.text]  # which leave no row wrong
    return whole or suspects, sample


def suspect_alternative(words: str, one: Explained, trials: Trials) -> Suspect:
    """Name an alternative, and whether it holds in all rows that were taken."""
    alone = _OUTPUT_ALONE in words
    start = "agrees if" if one.holds and not alone else "agrees in part if"
    where = ", ".join(list_places(trials.problem, trials.sample)) or "some rows"
    there = "" if one.everywhere else f", but only in {where}"
    name = "convention" if one.holds else "convention in part"
    if words.startswith("precision is lost"):
        name = "roundings"
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
    moved = (Normalisers(f"lse is {words}", other) for words, other in trials.list_moved())
    right = Normalisers("lse is right", Alternative("", trials.problem).result)
    of_lse = [(x.lse, y.lse) for x, y in zip(heads, results, strict=True) if x.lse is not None]
    fitted = (Normalisers(f"lse is {x}", change=change) for x, change in fit_normalisers(of_lse))
    exchanged = (
        Normalisers(f"lse is {words}", other.result)
        for words, other in list_exchanged_normalisers(*about, trials.sample)
    )
    rest = chain([right], moved, fitted, exchanged) if others else ()
    for lse in chain([Normalisers("")], named, rest):
        if all(np.all(lse.far(x, y, *about) < FAR) for x, y in zip(heads, results, strict=True)):
            return lse
    return None


def leave_without_keys(
    problem: Problem, x: Sampled, result: Result, given: Result
) -> npt.NDArray[np.bool_]:
    """Find rows that see a key as given but none by a result, and are NaN or the mean of v."""
    empty = np.isneginf(result.lse) & np.isfinite(given.lse)
    mean = np.mean(problem.read(x.rows.at)["v"], 0) if empty.any() else 0.0
    return empty & (fit_convention(x.got, "nan", mean) | fit_convention(x.got, "mean", mean))


def find_left(
    trials: Trials, alternative: Alternative, of_lse: Normalisers | None
) -> tuple[list[Index], int]:
    """Find wrong rows, of so many, that an alternative leaves wrong; in heads that it names."""
    (problem, numbers, _), sample = trials.about, trials.sample
    names = _OF_HEADS.search(alternative.text) is not None
    heads = {x.rows.at for x in sample.heads if x.wrong.any()}
    taken = [x.take(x.wrong) for x in sample.heads if x.wrong.any()]
    rates = [rate_rows(x.got, alternative.result(x.rows).out, sample.unit) for x in taken]
    usual = max((float(np.max(x)) for x in rates), default=math.inf)
    left: list[Index] = []
    count = 0
    for x in list_wrong(problem, numbers, sample.wrong):
        if names and x.rows.at not in heads:
            continue
        result, given = alternative.result(x.rows), Alternative("", problem).result(x.rows)
        off = stay_wrong(x.got, result.out, given.out, sample.unit, usual)
        if alternative.answer is None:
            off &= ~leave_without_keys(problem, x, result, given)
        if of_lse is not None:
            off |= of_lse.far(x, result, *trials.about) > 2 * FAR
        left += [(*x.rows.at, int(i)) for i in x.rows.queries[off]]
        count += len(off)
    return left, count
