"""A sample of wrong rows and right ones, on which alternatives are tried and judged."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from ....arrays.library import Doubles
from ...rounding.problems import Index, Problem
from ...rounding.profiles import Profile
from ...rounding.roundings import RowErrors
from ...rounding.softmax import analyse_softmax
from ...verification.empty_rows import fit_convention
from ...verification.findings import Numbers, name_number
from ..defects.catalogue import Mutant
from ..operators import (
    arrays,
    classes,
    exponentials,
    factors,
    intervals,
    limits,
    pages,
    patterns,
    seen_keys,
    strides,
    sums,
)
from .alternatives import list_added, list_alternatives, list_families, list_halves
from .changed_inputs import list_mixed_columns, list_normalised, list_rotated, list_smoothed
from .edited import known_rows, list_edited
from .fitted import STARTS, list_filled, list_fills, rate_fill
from .heads import describe_numbers, list_exchanged, list_of_heads, list_other_places
from .normalisers import follow_normalisers
from .sampled import Alternative, Place, Result, Rows, Seen, attend
from .sequences import list_hidden, list_padded
from .slips import list_slips
from .wrong_rows import (
    FEWEST_NUMBERS,
    POWER,
    Sample,
    Sampled,
    are_systematic,
    are_zero,
    compare_outputs,
    differ,
    divide,
    find_tiles,
    finite,
    fit_number,
    list_wrong,
    row_sizes,
    thin,
)

# What a search may meet: `StopIteration` in a generator is a RuntimeError.
ERRORS: tuple[type[Exception], ...] = (
    ArithmeticError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
_LOG = logging.getLogger(__name__)
_Some = TypeVar("_Some")
_HELD_SQUARE, _LARGEST = 1.1, 15.0  # at most: mean of z^2, less 4 standard deviations; |z|
_ROUNDED_SQUARE = 4.0  # mean square of z, at most, where numbers are rounded otherwise
_TOLD_FROM_NONE = 8.0  # times its error, at least, that a number is
EXPLAINED_BY_WRONG = 0.7  # of the error, at least, that is explained by what does not hold
_MOST_PART = 0.9  # the same where what does not hold is named
_LIKE = 0.8  # of what an alternative changes, at least, that is in the error
_MUCH_FARTHER = 16.0  # the mean square of z, where both are small, of what is not as near
_JOINED = 3  # alternatives, at most, named together
_FIRST_ROWS, _NEARER = 8, 0.9  # wrong rows by which alternatives are left out; of their squares
_EMPTY = 0.125  # of wrong rows, at most, that see no key by an alternative
_TOO_SMALL = 0.04  # mean square of z of a profile that does not say what is rounded
_FAR_FROM_RIGHT = 0.5  # of the size of a row: errors that rounding may make of few rows
_TOO_SMALL_ALONE = 0.25  # likewise in few rows, which may be wrong in any other way
_ROWS_OF_POWER = 6  # that are wrong alone: fewer have a power that is near to any mistake
_SCATTERED = 0.8  # ends of runs of wrong rows, at least, over their number
_FITTED_FILLS = 3  # ways to hide keys by a number, at most, of which this is fitted
_OF_TYPE = re.compile(r"(.* are rounded to )(\S+)( .*)")  # a cause of which a type is a part
_PLAIN_LISTS: tuple[Callable[[Problem], Iterator[Alternative]], ...] = (
    list_hidden,
    list_alternatives,
    list_halves,
    list_slips,
    list_filled,
    list_added,
    list_padded,
    list_rotated,
    list_normalised,
    list_mixed_columns,
    exponentials.list_weights,
    intervals.list_lost_parts,
    arrays.list_sinks,
)
_OF_WRONG_ROWS = (
    *(factors.list_channel_factors, arrays.list_column_factors, arrays.list_columns),
    classes.list_partial_sums,
)
_OF_FEW_ROWS = sums.list_stale_weights, sums.list_crossed_parts
_OF_ALL_ROWS = (
    *(factors.list_factored_keys, seen_keys.list_few_keys, seen_keys.list_other_values),
    *(patterns.list_cuts, patterns.list_patterns),
)
_ROW_BY_ROW = patterns.list_row_scales, seen_keys.list_seen_keys, classes.list_reweighed
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

    @property
    def explains_part(self) -> bool:
        """Whether it is worth a word if it does not hold: the best of many explains some."""
        sure = self.share > _MOST_PART and self.likeness > _LIKE
        return self.everywhere and sure and self.alternative.plain and not self.alternative.fitted

    @property
    def is_sure(self) -> bool:
        """Whether it is no other mask, and no numbers of heads, in some rows alone."""
        one = self.alternative
        return self.everywhere or (one.plain and not (one.named and one.fitted))


class Trials:
    """A sample, with the errors of the problem as it was given."""

    def __init__(
        self,
        problem: Problem,
        sample: Sample,
        numbers: Numbers,
        profile: Profile,
        mistakes: Sequence[Mutant] = (),
        posed: Problem | None = None,
    ) -> None:
        # Features have no scores; and texts of random ones draw others.
        self.posed, self.of_features = posed or problem, posed is not None
        self.mistakes = mistakes if self.posed.kind in ("scores", "map") else ()
        self.problem, self.sample, self.about = problem, sample, (problem, numbers, profile)
        self.zero = are_zero(sample)
        given = Alternative("", problem)
        self.given = [given.result(x.rows) for x in sample.heads]
        self.sizes = [sample.unit * row_sizes(x.out) for x in self.given]
        self.errors = [
            divide(differ(x.got, y.out), size)
            for x, y, size in zip(sample.heads, self.given, self.sizes, strict=True)
        ]
        self.rate = partial(limits.rate_limits, sample.unit)
        # Right rows between wrong ones contradict no cause of numbers: it may act in some alone.
        edges = np.sum(sample.wrong[:, 1:] != sample.wrong[:, :-1])
        several = edges > max(_SCATTERED * np.sum(sample.wrong), _FIRST_ROWS) and not sample.told
        self.scattered = several and all(np.all(np.isfinite(x.got)) for x in sample.heads)
        wrong = [np.flatnonzero(x.wrong) for x in sample.heads]
        # A few rows of the head with most wrong ones, by which most alternatives are left out.
        at = max(range(len(wrong)), key=lambda x: len(wrong[x]), default=0)
        some: Any = wrong[at][:: -(-len(wrong[at]) // _FIRST_ROWS) or 1] if wrong else []
        self.first = [x.take(some) for x in sample.heads[at : at + 1]]
        self.given_first = [x.out[some] for x in self.given[at : at + 1]]

    def find_better(self, outs: Iterable[Doubles]) -> list[int]:
        """Find the results for some wrong rows of a head that are nearer, or may be, to them."""
        (x,), (own,), found = self.first, self.given_first, np.stack([*outs])
        size = self.sample.unit * np.maximum(row_sizes(own), row_sizes(found))
        errors = differ(x.got, own), differ(x.got, found), differ(found, own)
        before, after, moved = (np.sum(np.square(divide(y, size)), (-2, -1)) for y in errors)
        # One that changes these rows too little to be told by them may still explain others.
        return np.flatnonzero((moved < POWER) | ~(after > _NEARER * before)).tolist()

    def explain_all(self, alternatives: Iterable[Alternative]) -> Iterator[Explained]:
        """Say what each of the alternatives explains that may explain something."""
        every = [*self.guard(alternatives)]
        if self.of_features:
            every = [x for x in every if say_of_weights(x.text)]
        some = [*range(len(every))]
        if self.first and every:
            results = (self.try_out(x) for x in every)
            some = self.find_better(results)
        for x in some:
            yield from self.guard(map(self.explain, every[x : x + 1]))

    def try_out(self, alternative: Alternative) -> Doubles:
        """Compute the first rows of an alternative: NaN, which is near to none, if that fails."""
        (x,), (own,) = self.first, self.given_first
        return next(self.guard(y.result(x.rows).out for y in [alternative]), np.nan * own)

    def take_nearest(self, alternatives: Iterable[Alternative]) -> Iterator[Alternative]:
        """Take the alternative that comes nearest to the first wrong rows."""
        every = [*alternatives]
        for x, own in zip(self.first, self.given_first, strict=True):
            size = self.sample.unit * row_sizes(own)
            z = [divide(differ(x.got, self.try_out(y)), size) for y in every]
            yield from [every[int(np.argmin(np.sum(np.square(z), (1, 2))))]] if z else ()

    def guard(self, found: Iterable[_Some]) -> Iterator[_Some]:
        """List what is found up to an error: one of a cause never ends a verdict."""
        try:
            yield from found
        except ERRORS as error:
            _LOG.debug("a cause could not be tried: %r", error)

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
            one = Explained(alternative, *compare_outputs(sample, outs, given, empty)[:5], False)
            if one.share <= EXPLAINED_BY_WRONG and one.likeness < _LIKE:
                break  # whatever else it says of right rows
        return one

    def _find_empty(
        self, alternative: Alternative, results: Mapping[int, Result]
    ) -> list[npt.NDArray[np.bool_]]:
        """Find wrong rows that an alternative leaves without keys, as in `leave_without_keys`."""
        hides = alternative.compute is attend and alternative.answer is None
        heads = ((self.sample.heads[x], y, self.given[x]) for x, y in sorted(results.items()))
        return [hides & x[0].wrong & leave_without_keys(self.problem, *x, self.zero) for x in heads]

    def list_explained(self) -> Iterator[Explained]:
        """List what explains enough, of all alternatives."""
        alternatives = [*list_edited(self.posed, self.mistakes, of_user=True)]
        alternatives += chain(*(self.guard(x(self.problem)) for x in _PLAIN_LISTS))
        for words, swapped in strides.list_swaps(self.problem):
            text = f"heads and queries of the output are swapped, with the strides of {words}"
            alternatives.append(Alternative(text, self.problem, answer=swapped))
        yield from self.explain_all(alternatives)
        families = [*list_families(self.problem)]
        if not self.sample.told or np.sum(self.sample.wrong) >= _ROWS_OF_POWER:
            families += exponentials.list_powers(self.problem)
        for text, family, starts in families:
            yield from self.fit(text, family, starts)
        for text, fill in self._find_fills():
            yield from self.fit(text, fill, STARTS)
        yield from self.explain_heads()
        # Which keys are cut off is fitted to a few rows: there are too many cuts to try each. Few
        # numbers fit some cut by chance, and zeros any.
        enough = np.sum(self.sample.wrong) * self.problem.shape[2] >= FEWEST_NUMBERS
        enough &= not are_zero(self.sample)
        for x, own in zip(self.first, self.given_first, strict=True) if enough else ():
            some = self.problem, x, self.sample.unit * row_sizes(own)
            reaches = limits.list_reaches(self.problem, x, self.rate)
            yield from self.explain_all(
                chain(intervals.list_intervals(*some), limits.list_windows(*some), reaches)
            )

    def _find_fills(self) -> Iterator[tuple[str, Callable[[float], Alternative]]]:
        """Find the ways to hide keys by a number that come nearest to rows, or their lse."""
        fills = [*list_fills(self.problem)] if self.first else []
        far: Any = np.zeros((0, 2))
        for x, own in zip(self.first, self.given_first, strict=True):
            size = self.sample.unit * row_sizes(own)
            far = np.array([rate_fill(x, size, fill, *self.about) for _, fill in fills])
        # The nearest by outputs and the nearest by log normalisers.
        yield from (fills[x] for x in np.unique(np.argsort(far, 0)[:_FITTED_FILLS]))

    def list_fitted(self) -> list[Iterator[Alternative]]:
        """Return lists of what is fitted to wrong rows: places that are read, tiles of keys."""
        problem, unit, wrong = self.problem, self.sample.unit, self.sample.wrong
        every = list_wrong(problem, self.about[1], wrong)
        heads = (x for x in self.sample.heads if x.wrong.any())
        few = [x.take(thin(np.flatnonzero(x.wrong), _FIRST_ROWS)) for x in heads]
        lists: list[Iterator[Alternative]] = []
        of_first = zip(self.first, self.given_first, strict=True)
        first = [(problem, x, unit * row_sizes(y)) for x, y in of_first]
        if self.sample.told or self.scattered:
            lists.append(seen_keys.list_own_keys(problem, every, unit))
        lists.append(pages.list_blocks_of_cache(problem, few, unit))
        lists.append(limits.list_mask_ends(problem, every, unit))
        lists += [arrays.list_reads(*x) for x in first]
        lists += map(self.take_nearest, (arrays.list_linear(problem), arrays.list_rings(problem)))
        lists.append(list_other_places(problem, self.sample))
        lists.append(strides.list_addresses(problem, every, unit))
        lists.append(arrays.list_widths(problem))
        reach = partial(limits.list_reaches, rate=self.rate, wrong=self.mark_wrong)
        lists += [reach(problem, x) for x in self.first if find_tiles(wrong)]
        lists.append(limits.list_own_limits(problem, every, self.rate))
        lists += [x(problem, every, unit) for x in _OF_WRONG_ROWS]
        lists += [x(problem, few, unit) for x in _OF_FEW_ROWS]
        lists += [sums.list_moved_tiles(problem, every, unit)]
        lists += [intervals.list_spans(problem, every, unit), list_smoothed(problem)]
        lists.append(self.take_nearest(exponentials.list_rounded_by_tiles(problem)))
        if not any(np.any(finite(x.got[x.wrong])) for x in self.sample.heads):
            return lists  # any may hold
        lists.append(sums.list_scoped(problem, list_alternatives(problem), few, unit))
        rows = known_rows(self.posed) if self.posed.kind in ("scores", "map") else ()
        lists.append(filter(self.changes, list_edited(self.posed, rows)))
        lists += [x(problem, every, unit) for x in _OF_ALL_ROWS]
        lists += [x(problem, every, unit, self.about[1]) for x in _ROW_BY_ROW]
        return [*lists, classes.list_merged_more(problem, every, self.about[1])]

    def mean_square(self, of_factor: bool = False) -> float:
        """Return the mean square of z in wrong rows, or what a factor of the output leaves."""
        parts = zip(self.errors, self.given, self.sizes, self.sample.heads, strict=True)
        wrong = [(z[y.wrong].ravel(), (x.out / size)[y.wrong].ravel()) for z, x, size, y in parts]
        z, own = (np.concatenate([np.zeros(0), *x]) for x in zip(*wrong, strict=True))
        if of_factor:
            z = z - float(z @ own) / max(float(own @ own), 1e-300) * own
        return float(np.mean(np.square(z))) if z.size else 0.0

    def mark_wrong(self, x: Place) -> Seen:
        """Tell which queries are wrong."""
        return np.asarray(self.sample.wrong[self.problem.number(x.at), x.i])

    def changes(self, one: Alternative) -> bool:
        """Tell whether an alternative changes the first wrong rows by more than roundings."""
        moved = (
            divide(differ(self.try_out(one), x), self.sample.unit * row_sizes(x))
            for x in self.given_first
        )
        return any(np.sum(np.square(x)) > POWER for x in moved)

    def take_sums(self) -> Alternative:
        """Take log normalisers as they are given: the sums of the weights may be wrong in both."""
        numbers = self.about[1]
        off = [
            x.lse[x.wrong] - y.lse[x.wrong]
            for x, y in zip(self.sample.heads, self.given, strict=True)
            if x.lse is not None
        ]
        factors = " to ".join(
            dict.fromkeys(f"{math.exp(f(np.concatenate(off))):.4g}" for f in (np.min, np.max))
        )

        def answer(rows: Rows) -> Result:
            result, lse = Alternative("", self.problem).result(rows), numbers.lse
            assert lse is not None
            given = lse(rows.at)[rows.queries]
            out = result.out * np.exp(result.lse - given)[:, None]
            return result._replace(out=out, lse=given)

        text = f"sums of weights are {factors} times what they should be, in out and in lse"
        return Alternative(text, self.problem, answer=answer)

    def explain_heads(self) -> Iterator[Explained]:
        """List what explains the heads by others, or by a number for each."""
        if not math.prod(self.problem.lead) > 1:
            return
        yield from self.explain_all(list_exchanged(self.problem, self.sample, self.sizes))
        of_head: Any = lambda family, at, c: family({at: c})  # noqa: E731
        for text, family, starts in list_of_heads(self.problem):
            found: dict[Index, float] = {}
            for number, x in enumerate(self.sample.heads):
                at = x.rows.at
                if x.wrong.any():
                    fitted = self.fit_number(partial(of_head, family, at), starts, [number])
                    if fitted is not None:
                        found[at] = fitted[0]
            words = describe_numbers(text, found)
            one = family(found)._replace(text=words, named=True, fitted=True)
            yield from self.explain_all([one])

    def fit(
        self, text: str, family: Callable[[float], Alternative], starts: Sequence[float]
    ) -> Iterator[Explained]:
        """Fit the number of a family."""
        fitted = self.fit_number(family, starts)
        if fitted is not None and _TOLD_FROM_NONE * fitted[1] < abs(fitted[0]):
            c, error = fitted
            digits = min(max(0, -math.floor(math.log10(max(error, 1e-12)))), 9)
            known = name_number(c, error)
            words = text.format(f"{c:.{digits}f} ± {error:.1g}" + f" ({known})" * bool(known))
            yield from self.explain_all([family(c)._replace(text=words, fitted=True)])

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

        def outs(c: float) -> list[Doubles]:
            return [family(c).result(x.rows).out if len(x.got) else x.got for x in heads]

        fitted = fit_number(outs, [x.got for x in heads], given, self.sample.unit, starts)
        if fitted is None:
            return None
        of_lse = [x for x in heads if x.lse is not None and len(x.got)]
        return follow_normalisers(family, of_lse, fitted, *self.about)

    def judge(self, one: Explained, profiles: Mapping[str, Profile], dtype: str) -> Explained:
        """Tell whether what an alternative leaves is by the roundings of one of the profiles."""
        if one.likeness < _LIKE or not (one.everywhere or one.near or self.scattered):
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
            square = np.mean(z * z) - 4 * math.sqrt(2 / z.size) if z.size else math.inf
            if square < _HELD_SQUARE and np.max(np.abs(z)) < _LARGEST:
                some = [x for x in (self.sample.heads if one.everywhere else left) if len(x.got)]
                rest = [self._divide(x, one.alternative, profile, dtype) for x in some]
                outs = [one.alternative.result(x.rows).out for x in some]
                return one._replace(holds=not are_systematic(rest, outs))
        return one

    def keep_apart(self, holding: Sequence[Explained]) -> list[Explained]:
        """Keep what is as near as the nearest, and of what cannot be told apart the first.

        What leaves right rows right everywhere comes first.
        """
        least = min((x.square for x in holding), default=0.0)
        most = 1.5 * max(least, min(0.5, _MUCH_FARTHER * least))
        kept: list[Explained] = []
        for one in sorted(holding, key=lambda x: not x.everywhere):
            if (
                not (one.alternative.fitted and kept)
                and one.square <= most
                and all(self._are_apart(one, x) for x in kept)
            ):
                kept.append(one)
        return self._join_lost(self._join_narrow(kept, holding), holding)

    def _join_narrow(self, kept: list[Explained], holding: Sequence[Explained]) -> list[Explained]:
        """Name all types that numbers may be rounded to, of those that agree here."""
        joined = []
        for one in kept:
            own = _OF_TYPE.match(one.alternative.text)
            types = [own.group(2)] if own else []
            for other in (x for x in holding if x is not one and own):
                same = _OF_TYPE.match(other.alternative.text)
                if own and same and same.group(1, 3) == own.group(1, 3):
                    types += [] if self._are_apart(one, other) else [same.group(2)]
            if own and len(types) > 1:
                text = f"{own.group(1)}{' or '.join(types)}{own.group(3)}"
                one = one._replace(alternative=one.alternative._replace(text=text))
            joined.append(one)
        return joined

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
            if other == profile:
                continue
            given = Alternative("", self.problem.read_by(other))
            first = [x.take(slice(_FIRST_ROWS)) for x in self.sample.heads[:1]]
            squares = [np.square(self._divide(x, given, other, dtype)) for x in first]
            many = 16 if "scores" in changes else 1  # that of their sums may be rounded
            if squares and not _TOO_SMALL / 4 < np.mean(squares[0]) < 4 * many * _ROUNDED_SQUARE:
                continue  # by far
            z = [self._divide(x, given, other, dtype) for x in self.sample.heads]
            every = np.concatenate([np.mean(x * x, -1) for x in z])  # right rows, too
            wrong = np.concatenate([x.wrong for x in self.sample.heads])
            usual = [x[y.wrong] for x, y in zip(self.errors, self.sample.heads, strict=True)]
            before = float(np.mean(np.square(np.concatenate(usual)))) if usual else 0.0
            least = _TOO_SMALL_ALONE if self.sample.told else _TOO_SMALL
            alone = self.sample.told and self._are_near(given)
            for rows in (every, *[every[wrong]] * alone):
                square = float(np.mean(rows)) if len(rows) else 0.0
                spread = float(np.std(np.log(np.maximum(rows, 1e-9))))
                far = spread >= (1.2 if many > 1 else 1.0)  # not all rows are as far
                if far or not least < square < many * _ROUNDED_SQUARE or before < 9 * square:
                    continue
                if square > _ROUNDED_SQUARE:
                    text += (
                        f" (errors are {math.sqrt(square):.2g} times as large: "
                        "perhaps sums of q . k are rounded too)"
                    )
                found.append(Explained(given._replace(text=text), square))
                break
        found.sort(key=lambda x: abs(math.log(x.square)))
        if not found or are_systematic(self.errors, [x.out for x in self.given]):
            return []
        words = " or ".join(x.alternative.text for x in found[:3])
        text = f"precision is lost: {words}, or other numbers are rounded as coarsely"
        return [found[0]._replace(alternative=found[0].alternative._replace(text=text))]

    def _are_near(self, given: Alternative) -> bool:
        """Tell whether most wrong rows are near enough for a coarse rounding to say anything."""
        taken = [x.take(x.wrong) for x in self.sample.heads if x.wrong.any()]
        exact = [given.result(x.rows).out for x in taken]
        off = [
            row_sizes(differ(x.got, y)) / row_sizes(y) for x, y in zip(taken, exact, strict=True)
        ]
        return bool(np.median(np.concatenate(off)) < _FAR_FROM_RIGHT)

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


def say_of_weights(text: str) -> str:
    """Say what is known of scores in words of weights; "" if that is not possible."""
    text = text.replace("e^score", "the weights").replace("key with score 0", "key of weight 1")
    return "" if re.search("score|scale|bias|cap|in part", text) else text


def analyse(alternative: Alternative, rows: Rows, profile: Profile, dtype: str) -> RowErrors:
    """Say what roundings do to the exact result of an alternative."""
    head = alternative.head(rows)
    with np.errstate(all="ignore"):
        return analyse_softmax(head, profile.roundings(dtype), slice(0, len(head.q)))


def leave_without_keys(
    problem: Problem, x: Sampled, result: Result, given: Result, zero: bool = False
) -> npt.NDArray[np.bool_]:
    """Find rows that see keys as given, none by a result: NaN, the mean of v or, if all are, 0."""
    empty = np.isneginf(result.lse) & np.isfinite(given.lse)
    mean = np.mean(problem.read(x.rows.at)["v"], 0) if empty.any() else 0.0
    fits = fit_convention(x.got, "nan", mean) | fit_convention(x.got, "mean", mean)
    return np.asarray(empty & (fits | (zero & ~np.any(x.got, -1))))
