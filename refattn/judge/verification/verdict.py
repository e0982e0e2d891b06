"""`Verdict`, the result of `verify`: its record, its words and its JSON."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from ...arrays.shown import held
from ...arrays.tables import Column, Table
from ...arrays.words import name_element, name_row, portable, to_json
from ..rounding.problems import Index
from .directions import SENTENCES
from .findings import (
    ALL_BUT,
    BEYOND,
    NOT_EXPLAINED,
    SAME_KEYS,
    SAME_VALUES,
    Finding,
    Suspect,
    Worst,
    Z,
    as_cause,
    weaken,
)
from .joint import list_few

_PROVEN = "  The bound is proven. The other tests assume independent, symmetric roundings."
_DEFECTS = {
    "scale": "a scale wrong by a factor 1 +",
    "factor": "{} wrong by a factor 1 +",
    "delta": "D = d_out . out wrong by a factor 1 +",
    "epsilon": "an epsilon in the normaliser of",
    "head": "one head wrong by a factor 1 +",
    "tile": "16 rows wrong by a factor 1 +",
    "row": "one row wrong by a factor 1 +",
    "lse": "all log normalisers off by",
    "lse of a row": "one of them off by",
}

_STRICTER = " (--strict allows sums in float32 only)"
_NUMBER = re.compile(r"-?\d[\d.]*(e[-+]?\d+)?( ± \S+)?")
_ONE_KEY = re.compile(r"key \d+ ")
_NEARLY_ALL = 0.99  # of the error
_ABSURD = 2.0**53  # standard deviations: more than an error as large as the numbers, in float64
_INTERRUPTED = "interrupted"
_CAUSES, _REMARKS = 2, 3  # that are written without `verbose`
_OF_SIZES = ("bound", "largest z", "mean square", "likelihood")
_OF_ROW = ("where", "p")
_OF_PLACES = ("mean square of tiles", "mean square of heads")


@held("verdict", "profile", "dtype", "shape", "alpha")
class Verdict(NamedTuple):
    """The verdict on the numbers of a kernel: can a correct kernel have produced them?

    Attributes
    ----------
    verdict : str
        ``"PASS"``; ``"FAIL"`` if no profile that was tried explains the numbers; or
        ``"UNDERPOWERED"`` if an output that is 1 % too large would also pass.
    profile : str or None
        The likeliest profile that explains the numbers.
    z : Z
        Errors divided by their standard deviations: root mean square, largest, and its place. The
        standard deviations are those of `profile` or, if all profiles are rejected, of a profile
        with which a known bug explains the errors, or else of the nearest profile.
    tests : list of Finding
        The tests, for the same profile.
    suspects : list of Suspect
        Causes that explain the errors, the one that explains most first.
    remarks : list of str
        Other observations.
    dtype, out_dtype : str
        The storage type, and the type of the output.
    shape : tuple of int
        Shape of the output.
    known : float
        Share of the elements whose error has a predicted distribution; all others have only a
        bound.
    detectable : dict
        Sizes of known bugs from which profile `by` rejects, to within a factor of about 4; also
        of a factor 1 + size on one `row`, on a `tile` of 16 rows and on one `head`, unless the
        verdict is FAIL, and of what is added to all log normalisers (`lse`) or to one of them
        (`lse of a row`). Another profile may accept larger ones.
    alpha : float
        Largest probability that a correct kernel fails.
    trials : dict of str to float
        Smallest corrected p-value of each profile that was tried.
    seconds : float
        Time taken.
    by : str
        Name of the profile of `z` and `tests`.
    of : str
        Array that the other attributes describe: `out` or, if there are `parts`, the first of them
        that failed, or else the first that lacks power, or else the first.
    hardware : str or None
        The hardware whose matrix units explain the numbers, if rounded sums do not.
    parts : dict of str to Verdict
        If gradients or a state are judged, the verdicts on those of `out`, `state`, `dq`, `dk` and
        `dv` that were passed, each at its share of alpha; also of `part 0`, ... and `merge`, of
        parts of the keys, and of `indices`, of which nothing but proven bounds are tested.
    looked_at : float
        Share of the rows that were tested.
    blind : tuple of str
        Trivial outputs that would also have passed.
    element : float
        An element that is off by this many standard deviations is rejected.
    idle : int
        Number of rows for which the profile predicts nothing.
    place : str
        The place of the wrong rows, in words.
    rows : tuple of (tuple of int, float)
        The rows that are wrong at level `alpha`, by Holm's correction for all rows, with their
        p-values, the smallest first. An index has heads before tokens, whatever the layout.
    more_rows : bool
        Whether there may be more wrong rows: the search for them has a limit of time.
    strict : bool
        Whether sums had to be in float32 or wider.
    narrow_sums : bool
        Whether running sums in the storage type, rounded after 64 tokens, pass in a block of rows.
    worst : Worst or None
        The element with the largest error: its array and place, the kernel's number, the exact
        number, and the largest error allowed.
    """

    verdict: str
    profile: str | None
    z: Z
    tests: list[Finding]
    suspects: list[Suspect]
    remarks: list[str]
    dtype: str
    out_dtype: str
    shape: tuple[int, ...]
    known: float
    detectable: dict[str, float]
    alpha: float
    trials: dict[str, float]
    seconds: float
    by: str = ""
    of: str = "out"
    hardware: str | None = None
    parts: Mapping[str, Verdict] = MappingProxyType({})
    looked_at: float = 1.0
    blind: tuple[str, ...] = ()
    element: float = 0.0
    idle: int = 0
    place: str = ""
    worst: Worst | None = None
    rows: tuple[tuple[tuple[int, ...], float], ...] = ()
    more_rows: bool = False
    strict: bool = False
    narrow_sums: bool = False

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle `parts` as a dict: a read-only mapping cannot be pickled."""
        return Verdict, tuple(self._replace(parts=dict(self.parts)))

    def to_json(self) -> str:
        """Write the verdict as JSON."""
        return to_json(self, indent=1)

    def tables(self) -> tuple[Table]:
        """Return a row for each suspect of each part, or one for a part without, and wrong rows."""
        rows: list[dict[str, Any]] = []
        for x in [portable(x) for x in self.parts.values()] or [portable(self)]:
            rows += [x | {"suspects": y} for y in x["suspects"] or [None]]
            rows += [
                x | {"suspects": None, "row": dict(zip(_OF_ROW, y, strict=True))} for y in x["rows"]
            ]
        names = ["of", "verdict", "profile", "dtype", "out_dtype", "alpha", "known", "seconds"]
        names += [f"z.{x}" for x in Z._fields] + [f"suspects.{x}" for x in Suspect._fields]
        names += [f"row.{x}" for x in _OF_ROW]
        return (Table("verdict", rows, [Column(x, None) for x in names]),)

    def accept(self, stacklevel: int = 2) -> None:
        """Raise an AssertionError if it is FAIL, and warn if it is UNDERPOWERED.

        UNDERPOWERED means that a wrong kernel would also have passed.
        """
        __tracebackhide__ = True  # pytest shows the line that calls
        if self.verdict == "FAIL":
            raise AssertionError(str(self))
        if self.verdict == "UNDERPOWERED":
            text = f"these numbers are not enough to judge the kernel: {self}"
            warnings.warn(text, UserWarning, stacklevel=stacklevel)

    def with_remark(self, text: str) -> Verdict:
        """Put a remark first, also in the remarks of the part that `of` names."""
        # With parts, a verdict has the attributes of the part `of`: both get the remark.
        parts = {x: y.with_remark(text) if x == self.of else y for x, y in self.parts.items()}
        return self._replace(remarks=[text, *self.remarks], parts=parts)

    def renamed(self, name: str, to: str) -> Verdict:
        """Rename an array in the texts of causes."""
        return self._replace(
            suspects=[x._replace(text=x.text.replace(name, to)) for x in self.suspects]
        )

    def leave_causes(self) -> Verdict:
        """Say of wrong numbers that their causes, beside a factor, were not searched for."""
        if self.verdict != "FAIL":
            return self
        found = [x for x in self.suspects if x.name == "factor" and x.explained > ALL_BUT]
        return self._replace(suspects=found).with_remark("other " * bool(found) + NOT_EXPLAINED)

    def blame_sums(self, other: Verdict) -> Verdict:
        """Name narrow sums as the cause, as the verdict on any sums is another that passed."""
        parts = {x: y.blame_sums(other.parts[x]) for x, y in self.parts.items()}
        if self.verdict != "FAIL":
            return self._replace(parts=parts)
        text = f"some sums are narrower than float32: if they may be, this is a {other.verdict}"
        cause = Suspect("narrow sums", math.nan, math.nan, math.nan, math.nan, text)
        remarks = [x for x in self.remarks if not x.endswith(NOT_EXPLAINED)]
        return self._replace(suspects=[cause], remarks=remarks, parts=parts)

    def note_sums(self, passed: Sequence[str]) -> Verdict:
        """Note that narrow sums would pass, in the parts of these names."""
        parts = {x: y.note_sums([x] if x in passed else []) for x, y in self.parts.items()}
        of = bool(passed) if not parts else self.of in passed
        return self._replace(parts=parts, narrow_sums=of)

    def cut_short(self, left: Sequence[str]) -> Verdict:
        """Say which parts were not judged: without them nothing passes."""
        verdict = "UNDERPOWERED" if self.verdict == "PASS" and left else self.verdict
        text = _INTERRUPTED + f": {', '.join(left)} not judged" * bool(left)
        return self._replace(verdict=verdict).with_remark(text)

    def in_layout(self, option: str, transposed: Verdict) -> Verdict:
        """Name the layout as the cause if the transposed arrays pass, or are nearly right."""
        share = 1.0
        # The share of the mean square of z that is gone in the other layout.
        if transposed.verdict == "FAIL":
            share -= (transposed.z.rms / self.z.rms) ** 2 if self.z.rms > 0 else 1.0
        if self.verdict != "FAIL" or not share > _NEARLY_ALL:
            return self
        text = f"the arrays look transposed: pass {option}"
        cause = Suspect("layout", math.nan, math.nan, math.nan, share, text)
        rest = [] if transposed.verdict == "PASS" else self.suspects
        parts = {x: y.in_layout(option, transposed.parts[x]) for x, y in self.parts.items()}
        return self._replace(suspects=[cause, *rest], parts=parts)

    def __str__(self) -> str:
        """Put the verdict into words."""
        return self.write()

    def write(self, verbose: bool = False) -> str:
        """Write the verdict in a few lines, or with all details."""
        if not self.parts:
            return "\n".join(_write_lines(self, verbose))
        words = [f"{name} {x.verdict}" for name, x in self.parts.items()]
        lines = [f"{self.verdict}: {', '.join(words)}"]
        for name, part in self.parts.items():
            first, *rest = _write_lines(part, verbose)
            if name != self.of and not verbose:
                first, rest = _write_short(part), []
            lines += [f"{name}: {first}", *rest]
        return "\n".join(lines)


def list_few_rows(verdict: Verdict) -> tuple[Index, ...]:
    """List the wrong rows, if all of them are named, and few of those that were looked at."""
    looked = round(verdict.looked_at * math.prod(verdict.shape[:-1]))
    return list_few(verdict.rows, verdict.more_rows, looked)


def join_verdicts(verdicts: dict[str, Verdict], alpha: float, parts: int) -> Verdict:
    """Make one verdict of those on so many parts, or on some of them."""
    if [*verdicts] == ["out"] and parts == 1:
        return verdicts["out"]
    verdicts = {x: y._replace(of=x) for x, y in verdicts.items()}
    order = "FAIL", "UNDERPOWERED", "PASS"
    # Of those that fail, one with a cause tells most.
    first = min(verdicts.values(), key=lambda x: (order.index(x.verdict), not x.suspects))
    seconds = sum(x.seconds for x in verdicts.values())
    return first._replace(alpha=alpha, seconds=seconds, parts=verdicts)


def _write_lines(verdict: Verdict, verbose: bool) -> Iterator[str]:
    """Write what a verdict is, and what it rests on, line by line."""
    one = {"out": "an output", "state": "a state"}.get(verdict.of, verdict.of)
    types = (
        verdict.dtype
        if verdict.out_dtype == verdict.dtype
        else f"{verdict.dtype} with {one} in {verdict.out_dtype}"
    )
    types += " with sums in float32" * verdict.strict
    words = {
        "PASS": f"a correct kernel in {types} gives such numbers (profile {verdict.by})",
        "FAIL": f"no correct kernel in {types} gives such numbers",
        "UNDERPOWERED": _say_what_is_missing(verdict, one),
    }
    yield f"{verdict.verdict}: {words[verdict.verdict]}"
    failed = verdict.verdict == "FAIL"
    # A question is whether something was declared wrongly: it comes before causes.
    questions = [x for x in verdict.remarks if x.endswith("?")] if failed else []
    yield from (f"  {x}" for x in questions)
    if failed:
        yield from _write_causes(verdict, verbose)
        if verdict.place:
            yield f"  where: {verdict.place}"
    if verdict.worst is not None:
        yield f"  worst: {_write_worst(verdict)}"
    there = f" at {name_element(verdict.z.where)}" if verdict.z.where else ""
    if not failed or verdict.z.largest:  # no number is finite, else
        of_out = f" of {verdict.of}" * (verdict.worst is not None and verdict.worst[0] == "lse")
        if verdict.worst is not None and not math.isfinite(verdict.worst[2]):
            of_out += " of finite numbers"
        ratio = "error / standard deviation"
        if verdict.of == "indices":
            ratio = "difference of scores / what rounding allows"
        yield f"  {ratio}{of_out}: {_write_rms(verdict.z)}, {_write_largest(verdict.z)}{there}"
    if failed:
        yield from _write_tests(verdict, verbose)
    # Remarks that repeat a cause, or what it implies, are left out.
    said = "\n".join([*questions, *(x.text for x in verdict.suspects)])
    texts = tuple(x.text for x in verdict.suspects)
    others = [x for x in verdict.remarks if x not in said and not x.startswith(texts)]
    if not verbose and any(x.explained > _NEARLY_ALL for x in verdict.suspects[:1]):
        others = [x for x in others if "precision is lost" not in x]  # the cause is another
    yield from (f"  {x}" for x in others[: None if verbose else _REMARKS])
    if not failed:
        yield from _write_power(verdict, one)
        if verdict.narrow_sums:
            yield f"  sums in {verdict.dtype} may also pass{_STRICTER * (not verdict.strict)}"
    rejected = [x for x, p in verdict.trials.items() if p <= verdict.alpha]
    if rejected and (not failed or verbose):
        yield f"  profiles ruled out: {', '.join(rejected)}"
    if verbose:
        rows = math.prod(verdict.shape[:-1])
        yield (
            f"  {rows} rows of {verdict.shape[-1]} elements, of which {verdict.known:.1%} have a "
            f"known standard deviation; alpha {verdict.alpha:g}, {len(verdict.tests)} tests, "
            f"{verdict.seconds:.1f} s"
        )
        yield _PROVEN
    yield f"  next: {_say_what_next(verdict, verbose)}"


def _write_rms(z: Z) -> str:
    """Write the root mean square of errors, or say that it says nothing."""
    if not z.rms < _ABSURD:
        return "numbers are far beyond those of attention, or not finite"
    return f"rms {z.rms:.3g}"


def _write_largest(z: Z) -> str:
    return f"largest {z.largest:.3g}" if z.largest < _ABSURD else "the largest"


def _write_short(verdict: Verdict) -> str:
    """Write a verdict on one of several parts in a line."""
    rms = _write_rms(verdict.z)
    if verdict.verdict != "FAIL":
        profile = f"profile {verdict.profile}, " if verdict.profile else ""
        sums = f"; sums in {verdict.dtype} may also pass" * verdict.narrow_sums
        return f"{verdict.verdict} ({profile}{rms}{sums})"
    cause = NOT_EXPLAINED if NOT_EXPLAINED in verdict.remarks else "unknown cause"
    cause = as_cause(verdict.suspects[0].text) if verdict.suspects else cause
    return f"FAIL ({rms}): {cause}"


def _write_causes(verdict: Verdict, verbose: bool) -> Iterator[str]:
    """Write what explains a failure, with the share of the error that it explains."""
    if not verdict.suspects and NOT_EXPLAINED not in verdict.remarks:
        yield "  unknown cause: nothing that was tried explains most of the error"
    shown = verdict.suspects
    if not verbose:
        shown = [x for i, x in enumerate(shown) if i == 0 or not _repeats(x, shown[0])][:_CAUSES]
    for number, x in enumerate(shown):
        start = "cause" if number == 0 else "or"
        explained = min(x.explained, 0.999) if "in part" in x.text else x.explained
        share = f" (explains {_write_share(explained)} of the error)"
        yield f"  {start}: {as_cause(x.text)}{'' if math.isnan(explained) else share}"


def _repeats(one: Suspect, first: Suspect) -> bool:
    """Tell whether a cause is the first with a number, or with another, or is of the same key."""
    words = first.text.removeprefix("agrees if ")
    same = one.name != "convention" and _NUMBER.sub("", one.text) == _NUMBER.sub("", words)
    key = _ONE_KEY.match(words)
    return same or one.text.startswith((f"{words}:", *([key[0]] if key else [])))


def _write_share(share: float) -> str:
    return "100 %" if share > 0.9995 else f"{min(100 * share, 99.9):.1f} %"


def _write_worst(verdict: Verdict) -> str:
    assert verdict.worst is not None
    name, where, got, exact, allowed = verdict.worst
    most = f"± {allowed:.3g}" if math.isfinite(allowed) else "anything"
    at = name_row(where) if name == "lse" else name_element(where)
    same = (x for x in range(6, 17) if f"{got:.{x}g}" != f"{exact:.{x}g}")
    digits = next(same, 17)  # so many that the two numbers differ
    return f"{name} at {at} is {got:.{digits}g}, exact {exact:.{digits}g}, allowed {most}"


def _write_tests(verdict: Verdict, verbose: bool) -> Iterator[str]:
    """Write the tests that failed: at least one, and where there is one, a test of a place."""
    # Tests of sizes first, as they say how large errors are.
    order = sorted(verdict.tests, key=lambda x: (not x.name.startswith(_OF_SIZES), x.adjusted))
    failed = [x for x in order if x.adjusted <= verdict.alpha] or order[:1]
    of_place = [x for x in failed if x.name.startswith(_OF_PLACES)]
    # The place with the largest mean square tells where to look.
    local = sorted(of_place, key=lambda x: -x.statistic)[:1]
    shown = failed if verbose else [*[x for x in failed if x not in local][:1], *local]
    for x in shown:
        fit = "best fit: " if x.name.partition(" of a ")[0] in {*SENTENCES, "key"} else ""
        where = f", {fit}{x.where}" if x.where else ""
        yield f"  failed: {x.name} = {x.statistic:.3g}, p {_write_p(x.adjusted)}{where}"
    if len(shown) < len(failed):
        yield f"  and {len(failed) - len(shown)} more of {len(verdict.tests)} tests failed"
    if verdict.looked_at < 1:
        share = verdict.looked_at
        yield f"  tested {share:.1%} of the rows, drawn with a fixed seed; --all tests all rows"


def _write_power(verdict: Verdict, one: str) -> Iterator[str]:
    """Write what would not have been noticed."""
    if verdict.looked_at < 1:
        # Rows were drawn, so a small place is missed unless it is among them.
        share, files = verdict.looked_at, round(1 / verdict.looked_at)
        yield (
            f"  tested {share:.1%} of the rows, drawn with a fixed seed: a bug in one tile of rows "
            f"is seen in one of {files} files; --all tests all rows"
        )
    if verdict.blind:
        advice = f"use {_name_stronger(verdict)}"
        yield f"  on these inputs {_list_words(verdict.blind)} would also pass: {advice}"
    if verdict.known:
        sizes = [
            f"{_DEFECTS[x].format(one)} {size:.2g}"
            for x in _DEFECTS
            if (size := verdict.detectable.get(x)) is not None
        ]
        sizes.append(f"an element that is off by {verdict.element:.3g} standard deviations")
        yield f"  about the smallest errors that profile {verdict.by} rejects: {', '.join(sizes)}"


def _say_what_next(verdict: Verdict, verbose: bool) -> str:
    """Say what to do."""
    if any(x.startswith(_INTERRUPTED) for x in verdict.remarks):
        return "run it again, to its end"
    if verdict.verdict == "PASS":
        return "test other sizes and options with other files"
    if verdict.verdict == "UNDERPOWERED" and verdict.of == "state":
        return "use more sequences: each has a last state for each head"
    if verdict.verdict == "UNDERPOWERED":
        if BEYOND in verdict.remarks:
            return "multiply v and out by a power of 2 that brings them near 1"
        more = "" if SAME_VALUES in verdict.remarks else "more rows, or "
        return f"use {more}{_name_stronger(verdict)}"
    if not verdict.suspects:
        failed = [x for x in verdict.tests if x.adjusted <= verdict.alpha]
        of_lse = failed and all("lse" in x.name for x in failed)  # which is not drawn
        plot = "" if of_lse else "; --plot draws the worst head"
        return "compare the wrong rows with the exact result" + plot
    if verdict.suspects[0].name == "layout":
        return "pass that option"
    if verdict.suspects[0].name == "convention":
        return "find this cause in the kernel; if it is intended, make options and inputs match it"
    return "find this cause in the kernel" + "; --verbose lists all failed tests" * (not verbose)


def _name_stronger(verdict: Verdict) -> str:
    """Name inputs on which fewer wrong outputs would pass."""
    if SAME_VALUES in verdict.remarks:
        return "values that differ from key to key"
    if any(x.endswith(SAME_KEYS) for x in verdict.blind):
        return "keys that differ"
    return "q and k with scores between 1 and 10, or numbers with more digits"


def _say_what_is_missing(verdict: Verdict, one: str) -> str:
    """Say why numbers that were not rejected say little."""
    trivial = weaken(verdict.blind)
    if trivial:
        return f"{_list_words(trivial)} would also pass"
    if verdict.idle:
        return "0 or the mean of v would also pass in some rows: the verdict does not cover them"
    if BEYOND in verdict.remarks:
        return "errors below the bound of an element would also pass"
    return f"{one} that is 1 % too large would also pass"


def _list_words(names: Sequence[str]) -> str:
    """Join names by commas and `and`."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _write_p(p: float) -> str:
    return f"{p:.1g}" if p > 1e-300 else "0"
