"""The report of a run, with a result for each check: as text, tables, JSON and HTML."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from itertools import zip_longest
from typing import Any

from ...._version import __version__
from ....arrays.tables import Column, Table
from ....arrays.words import portable, printable, to_json
from ....files.arrays import INSTALL
from ..candidate.failures import SEVERITIES, Refusal, SeveralResults, Unrepeatable
from ..candidate.tags import DEFAULTS

PASS, FAIL, UNDERPOWERED = "PASS", "FAIL", "UNDERPOWERED"
STOPS = (
    *(Refusal.stops, SeveralResults.stops, Unrepeatable.stops),
    *("the candidate hangs", "the candidate crashed", "time is over"),
)
LEFT_OUT = "not requested"  # of a check that applies
# Severities, with causes before their consequences.
_CAUSES_FIRST = ("contract", "formula", "range", "masked", "law", "")
EXPECTED, STALE = "EXPECTED FAILURE", "STALE"


@dataclass
class Result:
    """The outcome of one check.

    Attributes
    ----------
    check : str
        Its name.
    claim : str
        What it asserts.
    layer : {"identity", "law", "bound"}
        Identities hold for every number up to rounding. The others test random draws, and a correct
        function fails with probability at most alpha. Of these, "bound" uses only inequalities that
        hold for any number of draws.
    status : str
        ``"PASS"``, ``"FAIL"``, ``"UNDERPOWERED"`` (no deviation was found, but the check might have
        missed one of the size it must detect, or time ran out, or nothing could be compared),
        ``"EXPECTED FAILURE"``, or
        ``"STALE"`` (passed although a failure was expected, which is an error).
    severity : str
        Of a failure: ``"formula"``, wrong at ordinary inputs; ``"law"``, random draws have the
        wrong distribution; ``"contract"``, wrong shape or dtype, an exception, or not reproducible;
        ``"range"``, wrong at inputs with large exponents only; ``"masked"``, wrong where what is
        masked is NaN, infinite or huge.
    expected, got : str
        For a failure, or when time ran out, what was expected and what was received.
    error : float or None
        For an identity, the largest error in units of the allowed error.
    p, adjusted : float or None
        Smallest p-value of a distribution or bound, and the same after Holm's correction over the
        whole run.
    samples : int
        Calls with different seeds.
    detectable, target : dict
        For each statistic, the discrepancy that this run detects with probability 1 - 1e-6, and
        the one it must detect.
    suspects : list of str
        Known bugs that produce the same wrong numbers, or that fail the same distribution checks.
    changes : list of str
        For each suspect, the function of `refattn.naive` that it changes and the lines that differ:
        ``-`` is correct and ``+`` behaves like the candidate. Empty if that takes more than one
        function or three lines, or is not part of a formula.
    reason : str
        Why the failure was expected.
    compared : bool
        Whether a failed result was compared with the results of known bugs.
    reproducer : str
        A script that shows the failure.
    seconds : float
        Time taken.

    Examples
    --------
    >>> from refattn.judge.conformance import Result
    >>> Result("causal", "later keys count for nothing", "identity", error=0.25)
    <Result PASS: causal, max error 0.25 x allowed error>
    """

    check: str
    claim: str
    layer: str
    status: str = PASS
    severity: str = ""
    expected: str = ""
    got: str = ""
    error: float | None = None
    p: float | None = None
    adjusted: float | None = None
    statistic: str = ""
    samples: int = 0
    detectable: dict[str, float] = field(default_factory=dict)
    target: dict[str, float] = field(default_factory=dict)
    suspects: list[str] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)
    compared: bool = False
    reason: str = ""
    reproducer: str = ""
    seconds: float = 0.0

    @property
    def summary(self) -> str:
        """The evidence in a few words."""
        if self.status == STALE:
            return f"passed, though a failure was expected: {self.reason}"
        if self.expected:
            return f"expected {self.expected}; got {self.got}"
        if self.adjusted is not None:
            return f"p = {self.p:.2g}, adjusted {self.adjusted:.2g}, {self.samples} seeds"
        if self.error is not None:
            return f"max error {self.error:.2g} x allowed error"
        return ""

    @property
    def gravity(self) -> str:
        """The severity of a failure in words."""
        return SEVERITIES.get(self.severity, "")

    def failure(self) -> Iterator[str]:
        """Write what is wrong, how grave that is, and known bugs like it."""
        yield self.summary
        if self.severity:
            yield f"{self.severity}: {self.gravity}"
        for name, change in zip(self.suspects, self.changes, strict=True):
            yield from (f"like: {name}", *change.splitlines())

    @property
    def likeness(self) -> list[str]:
        """The known bugs that a failure is like, or a sentence that it is like none."""
        return self.suspects or ["none of the known bugs"][: self.compared]

    @property
    def finding(self) -> str:
        """The evidence, the bugs it is like, and what would have been missed, in a line."""
        alike = (
            f" (like: {'; '.join(self.likeness)})" if self.likeness and self.status == FAIL else ""
        )
        return "; ".join([f"{self.summary}{alike}", *self.shortfalls])

    @property
    def alike(self) -> list[tuple[str, str]]:
        """The known bugs, each with what it changes in the formula, if that is short."""
        return list(zip_longest(self.likeness, self.changes, fillvalue=""))

    @property
    def shortfalls(self) -> list[str]:
        """What a check without power would detect, if that is above its target; worst first."""
        missed = [x for x, target in self.target.items() if self.detectable[x] > target]
        missed.sort(key=lambda x: -self.detectable[x] / self.target[x])
        return [f"{x}: {_say_what_is_missed(self.detectable[x], self.target[x])}" for x in missed]

    def __repr__(self) -> str:
        words = f", {self.summary}" if self.summary else ""
        return printable(f"<Result {self.status}: {self.check}{textwrap.shorten(words, 100)}>")


@dataclass
class Report:
    """The outcome of a run of the checks.

    Attributes
    ----------
    name, estimator, capabilities, tags
        The candidate.
    level, alpha, seed
        Effort, the bound on the probability that a correct candidate fails, and the seed.
    results : list of Result
        One for each check.
    not_tried : dict
        Checks of this kind of estimator that were not run, with what each needs.
    limits : dict
        The declared limits of the candidate, each with what was not tested because of it.
    diagnosis : list of str
        Conventions under which a candidate that fails would be right, such as "matches spec
        torch-sdpa except that causal is bottom-right", or the cause that `verify` finds in another
        call, such as "cause: a query does not see its last key".
    advice : str
        If some checks lack power, the one thing to do about it.

    Examples
    --------
    >>> from refattn.judge.conformance import Report, Result
    >>> results = [Result("contract", "", "identity"), Result("causal", "", "identity", "FAIL")]
    >>> Report("mine", "softmax", ("causal",), {}, "quick", 1e-6, 0, results)
    <Report FAIL: 'mine' as softmax, 1 PASS, 1 FAIL>
    """

    name: str
    estimator: str
    capabilities: tuple[str, ...]
    tags: dict[str, Any]
    level: str
    alpha: float
    seed: int
    results: list[Result]
    not_tried: dict[str, str] = field(default_factory=dict)
    limits: dict[str, str] = field(default_factory=dict)
    diagnosis: list[str] = field(default_factory=list)
    version: str = __version__
    advice: str = ""

    @property
    def verdict(self) -> str:
        """``"FAIL"`` if a check failed or an expected failure is stale, else the weakest status.

        With no check run it is ``"UNDERPOWERED"``.
        """
        statuses = {result.status for result in self.results}
        if statuses & {FAIL, STALE}:
            return FAIL
        return UNDERPOWERED if UNDERPOWERED in statuses or not statuses else PASS

    @property
    def counts(self) -> Counter[str]:
        """How many checks ended with each status."""
        return Counter(result.status for result in self.results)

    @property
    def severities(self) -> dict[str, int]:
        """How many failures there are of each severity."""
        counts = Counter(result.severity for result in self.results if result.status == FAIL)
        return {name: counts[name] for name in SEVERITIES if name in counts}

    @property
    def conclusion(self) -> str:
        """The verdict in words: how many failures there are of each severity."""
        if self.verdict == FAIL:
            return "; ".join(self._failures())
        if not self.results:
            return "nothing was checked"
        expected = self.counts[EXPECTED]
        deviation = "no deviation was found" + f" other than {expected} expected" * bool(expected)
        return deviation if self.verdict == PASS else f"{deviation}, but some checks lack power"

    @property
    def guarantee(self) -> str:
        """The error probability of the verdict, and by which theorem."""
        return (
            f"A correct implementation fails with probability at most {self.alpha:g}. P-values "
            "come from exact distributions or proven bounds, corrected by Holm's method, which "
            "needs no independence. Two results that must be equal may differ by the rounding "
            "error of a correct evaluation."
        )

    def to_json(self) -> str:
        """Write the report as JSON: NaN and infinity become null, odd characters are escaped."""
        said = ("verdict", "conclusion", "severities", "guarantee")
        content = {name: getattr(self, name) for name in said} | portable(self)
        return to_json(content | {"results": self.tables()[0].rows[: len(self.results)]})

    def tables(self) -> tuple[Table]:
        """Return the checks as rows, those that were not run last."""
        rows = [portable(x) | {"finding": printable(x.finding)} for x in self.results]
        for name, why in self.not_tried.items():
            rows.append({"check": name, "status": "NOT TRIED", "finding": why, "reason": why})
        names = ("severity", "layer", "claim", "expected", "got", "error", "p", "adjusted")
        columns = [Column(x) for x in ("check", "status", "finding")]
        columns += [Column(x, None) for x in (*names, "samples", "suspects", "reason", "seconds")]
        return (Table("results", rows, columns),)

    def to_html(self) -> str:
        """Return the report as a page that needs no other file.

        Raises
        ------
        ModuleNotFoundError
            If jinja2 is not installed.
        """
        return self._rendered("page.html")

    def _repr_html_(self) -> str | None:
        """Return the report as a part of a page, for notebooks; without jinja2, nothing."""
        try:
            return self._rendered("part.html")
        # A notebook shows the text then.
        except ModuleNotFoundError:
            return None

    def _rendered(self, template: str, **values: Any) -> str:
        from .explanations import explain, names  # which imports this

        known = {*names()}
        bugs = [x.split()[0].rstrip(":") for r in self.results for x in r.suspects]
        named = [x for x in dict.fromkeys([*(r.check for r in self.results), *bugs]) if x in known]
        values |= {"explained": {x: "\n".join(explain(x)) for x in named}}
        page = load_templates().get_template(template)
        return printable(
            page.render(report=self, severities=SEVERITIES, defaults=DEFAULTS, **values)
        )

    def __repr__(self) -> str:
        counts = "".join(f", {count} {status}" for status, count in self.counts.items())
        return f"<Report {self.verdict}: {self.name!r} as {self.estimator}{counts}>"

    def text(self, width: int = 100, *, verbose: bool = False) -> str:
        """Return the report in words, with lines no longer than `width` where they may break.

        Checks that passed, and checks that were not run, are only counted unless `verbose`.
        """
        able = f" with {', '.join(self.capabilities)}" if self.capabilities else ""
        lines = [
            f"{self.verdict}: {self.name} as {self.estimator}{able} "
            f"(level {self.level}, alpha {self.alpha:g}, seed {self.seed})"
        ]
        if self.verdict != PASS:
            words = (self.conclusion, *self.diagnosis, self.advice * (self.verdict != FAIL))
            lines += [f"  {x}" for x in words if x]
        listed = [r for r in self.results if verbose or r.status != PASS]
        # Failures first, causes before their consequences.
        listed.sort(key=lambda r: (r.status != FAIL, _CAUSES_FIRST.index(r.severity)))
        folded: list[str] = []  # failures that have no cause of their own
        told: set[tuple[str, str]] = set()
        longest = max((len(r.check) for r in listed), default=0)
        known: set[tuple[str, str]] = set()
        for r in listed:
            # After a cause is told, a failure that it explains needs no lines of its own.
            explained = known and (self.diagnosis or (r.suspects and {*r.alike} <= known))
            if r.status == FAIL and (explained or (r.expected, r.got) in told) and not verbose:
                folded.append(r.check)
                continue
            # The same words twice are most likely of the same cause.
            told.update([(r.expected, r.got)] if r.got else [])
            lines.append(f"  {r.status:<{len(UNDERPOWERED)}}  {r.check:<{longest}}  {r.summary}")
            if r.status == FAIL:
                # What was expected may say the claim already.
                why = f": {r.gravity}" if r.claim in r.expected else f"; required: {r.claim}"
                lines.append(f"      {r.severity}{why}")
                for s, change in r.alike:
                    again = (s, change) in known and not verbose
                    text = f"{s.partition(':')[0]}, as above" if again else s
                    lines.append(f"      like: {text}")
                    lines += [f"            {x}" for x in change.splitlines() if not again]
                known.update(r.alike or [("", "")])
            if r.status == UNDERPOWERED:
                lines += [f"      {text}" for text in r.shortfalls[: None if verbose else 1]]
        if folded:
            text = f"{len(folded)} more, which may have the same cause: {', '.join(folded)}"
            lines += textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="    ")
        if self.limits:
            longest = max(map(len, self.limits))
            lines += ["limits of the verdict:"]
            lines += [f"  {name:<{longest}}  {text}" for name, text in self.limits.items()]
        if verbose:
            lines += ["not run:", *self._left_out(width)] if self.not_tried else []
            lines += textwrap.wrap(self.guarantee, width)
        else:
            lines += textwrap.wrap(self._counted(), width)
        if failed := [r.check for r in listed if r.status == FAIL]:
            lines.append(f"explain any name above: refattn explain {failed[0]}")
        return printable("\n".join(lines))

    def _counted(self) -> str:
        """Count the checks that passed and that were not run, for reasons that stop a run by it."""
        passed = self.counts[PASS]
        words = [f"{passed} check{'s' * (passed != 1)} passed"] if passed else []
        count = len({*self.not_tried} - {r.check for r in self.results})  # sizes may be left out
        for why in STOPS:
            if names := self.untried.get(why):
                words.append(f"{len(names)} not run: {why}")
                count -= len(names)
        if count:
            words.append(f"{count} not run: not declared, or not requested")
        # Reasons begin with the option to add: the one that adds most checks is named.
        more = {x[6:]: len(y) for x, y in self.untried.items() if x.startswith("needs --")}
        most = max(more, key=lambda x: more[x], default="")
        hint = f"; {most} adds {more[most]}" if most else ""
        return f"{'; '.join(words)} (--verbose lists them{hint})" if words else ""

    def __str__(self) -> str:
        return self.text()

    @property
    def untried(self) -> dict[str, list[str]]:
        """The checks that were not tried, by the reason."""
        reasons: dict[str, list[str]] = {}
        for name, why in self.not_tried.items():
            reasons.setdefault(why, []).append(name)
        return reasons

    def _left_out(self, width: int) -> Iterator[str]:
        """Yield a line for each check that was not run, or for all after the run stopped."""
        longest = max(map(len, self.not_tried))
        for why, names in self.untried.items():
            if why in STOPS:
                text = f"{why}: {', '.join(names)}"
                yield from textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="    ")
            else:
                yield from (f"  {name:<{longest}}  {why}" for name in names)

    def _failures(self) -> Iterator[str]:
        """Yield how many failures there are of each severity, and their meaning."""
        for name, count in self.severities.items():
            yield f"{count} {name} failure{'s' * (count > 1)}: {SEVERITIES[name]}"
        failed = {r.severity for r in self.results if r.status in (FAIL, EXPECTED)}
        if failed and failed <= {"range", "masked"} and self.counts[PASS]:
            yield "right at all ordinary inputs that were tried"
        if stale := self.counts[STALE]:
            yield f"{stale} passed, though a failure was expected"


def _say_what_is_missed(size: float, target: float) -> str:
    """Compare the error that is detected with a smaller target, in digits that differ."""
    if not math.isfinite(size):
        return "no error would be detected, however large"
    # Two digits may be the same for both, and would say nothing.
    digits = next(n for n in range(2, 18) if f"{size:.{n}g}" != f"{target:.{n}g}")
    return f"would only detect an error of {size:.{digits}g} or more (target {target:.{digits}g})"


def load_templates() -> Any:
    """Return what renders pages from the templates of this folder."""
    try:
        jinja2 = import_module("jinja2")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"the report as HTML {INSTALL}", name=error.name) from None
    return jinja2.Environment(
        loader=jinja2.PackageLoader(__package__),
        autoescape=True,
        # A name that is misspelt in a template is an error, not an empty text.
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
