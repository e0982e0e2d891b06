"""A verdict, in words and as JSON."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from ..arrays.shown import held
from ..arrays.tables import Column, Table
from ..arrays.words import portable, to_json
from .findings import WITHOUT_POWER, Finding, Suspect, Z, place

_PROVEN = "  proven: the bound. If roundings are independent and symmetric: the rest."
_TESTS_OF_ALL = ("bound", "largest z", "mean square", "mean square of columns")
_TESTS_OF_PARTS = ("mean square of tiles", "mean square of heads")
_DEFECTS = {
    "scale": "a scale wrong by",
    "factor": "{} wrong by a factor 1 +",
    "delta": "sum d_out * out wrong by a factor 1 +",
    "epsilon": "an epsilon in the normaliser of",
}

_LARGER = "give larger q or k, or numbers in more digits"
_MUCH = 0.5  # share below which the best of the suspects is no diagnosis


@held("verdict", "profile", "dtype", "shape", "alpha")
class Verdict(NamedTuple):
    """Whether numbers can be those of a correct kernel.

    Attributes
    ----------
    verdict : str
        ``"PASS"``; ``"FAIL"``, no profile that was tried explains the numbers; or
        ``"UNDERPOWERED"``, an output that is 1 % too large would not have been rejected.
    profile : str or None
        The tightest profile that explains the numbers.
    z : Z
        Errors over their standard deviations, by that profile or, of those rejected, by the one
        with which a known defect explains all, or else by the nearest: root mean square, largest,
        and where that is.
    tests : list of Finding
        What was tried, by that profile.
    suspects : list of Suspect
        Known defects that the numbers show, those that explain most first.
    remarks : list of str
        What else is to be seen.
    dtype, out_dtype : str
        The storage type, and that of the output.
    shape : tuple of int
        Of the output.
    known : float
        Share of the elements whose error has a law; for others there is the bound.
    detectable : dict
        Sizes of defects that would have been rejected.
    alpha : float
        At most this is the probability that a correct kernel fails.
    trials : dict of str to float
        Smallest corrected p-value of each profile that was tried.
    seconds : float
        Time taken.
    by : str
        Name of the profile that `z` and `tests` are by.
    of : str
        What all of this is said of: `out` or, where gradients are judged, the first of `parts` that
        failed or, if none did, that lacks power.
    parts : dict of str to Verdict
        Where gradients are judged, the verdicts on `out`, `dq`, `dk` and `dv`, each at its share of
        alpha.
    looked_at : float
        Share of the rows that were looked at.
    blind : tuple of str
        Outputs that say nothing of a kernel and would have passed as well.
    element : float
        Standard deviations by which any element is off to be rejected.
    idle : int
        Rows of which the profile says nothing.
    place : str
        Where the wrong rows of a failed part are, in words.
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
    parts: Mapping[str, Verdict] = MappingProxyType({})
    looked_at: float = 1.0
    blind: tuple[str, ...] = ()
    element: float = 0.0
    idle: int = 0
    place: str = ""

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle `parts` as a dict: a read-only mapping cannot be pickled."""
        return Verdict, tuple(self._replace(parts=dict(self.parts)))

    def to_json(self) -> str:
        """Write the verdict as JSON."""
        return to_json(self, indent=1)

    def tables(self) -> tuple[Table]:
        """Give each suspect of each part as a row, or a part without any."""
        parts = [portable(x) for x in self.parts.values()] or [portable(self)]
        rows = [x | {"suspects": y} for x in parts for y in x["suspects"] or [None]]
        names = ["of", "verdict", "profile", "dtype", "out_dtype", "alpha", "known", "seconds"]
        names += [f"z.{x}" for x in Z._fields] + [f"suspects.{x}" for x in Suspect._fields]
        return (Table("verdict", rows, [Column(x, None) for x in names]),)

    def accept(self, stacklevel: int = 2) -> None:
        """Raise an AssertionError if it is FAIL, and warn if it is UNDERPOWERED.

        A wrong kernel would have passed then, too: a test that is silent of it means little.
        """
        __tracebackhide__ = True  # pytest shows the line that calls
        if self.verdict == "FAIL":
            raise AssertionError(str(self))
        if self.verdict == "UNDERPOWERED":
            text = f"such numbers say little of a kernel: {self}"
            warnings.warn(text, UserWarning, stacklevel=stacklevel)

    def __str__(self) -> str:
        """Put the verdict into words."""
        if not self.parts:
            return "\n".join(_write_lines(self))
        words = [f"{name} {x.verdict}" for name, x in self.parts.items()]
        lines = [f"{self.verdict}: {', '.join(words)}"]
        for name, part in self.parts.items():
            first, *rest, _ = _write_lines(part)
            lines += [f"{name}: {first}", *rest]
        return "\n".join([*lines, _PROVEN])


def _write_lines(verdict: Verdict) -> Iterator[str]:
    """Say what a verdict is, and what it rests on, line by line."""
    one = "an output" if verdict.of == "out" else verdict.of
    types = (
        verdict.dtype
        if verdict.out_dtype == verdict.dtype
        else f"{verdict.dtype} to {verdict.out_dtype}"
    )
    words = {
        "PASS": f"a correct kernel in {types} gives such numbers (profile {verdict.profile})",
        "FAIL": f"no correct kernel in {types} gives such numbers (profiles tried: "
        f"{', '.join(verdict.trials)})",
        "UNDERPOWERED": _say_what_is_missing(verdict, one),
    }
    yield f"{verdict.verdict}: {words[verdict.verdict]}"
    rows = math.prod(verdict.shape[:-1])
    yield (
        f"  {rows} rows of {verdict.shape[-1]}, {verdict.known:.1%} of the elements have a law; "
        f"alpha {verdict.alpha:g}, {len(verdict.tests)} tests, {verdict.seconds:.1f} s"
    )
    there = f" at {place(verdict.z.where)}" if verdict.z.where else ""
    yield (
        f"  z = error / standard deviation: rms {verdict.z.rms:.3f}, "
        f"largest {verdict.z.largest:.3g}{there}"
    )
    if verdict.looked_at < 1:
        share, files = verdict.looked_at, round(1 / verdict.looked_at)
        yield (
            f"  looked at {share:.1%} of the rows, drawn with a fixed seed: a defect of one tile "
            f"of them is seen in one of {files} files; --all looks at all"
        )
    yield from (f"  {x}" for x in verdict.remarks)
    if verdict.blind:
        yield f"  on these inputs {_list_words(verdict.blind)} would pass as well: {_LARGER}"
    rejecting = [
        x for x in verdict.tests if x.adjusted <= verdict.alpha and x.name in _TESTS_OF_ALL
    ]
    tiles = [
        x
        for x in verdict.tests
        if x.adjusted <= verdict.alpha and x.name.startswith(_TESTS_OF_PARTS)
    ]
    for x in (*rejecting, *tiles[:1]):  # of tiles and heads where it is surest
        yield f"  {x.name}: {x.statistic:.3g}, p {_write_p(x.adjusted)}, {x.where}"
    if verdict.verdict == "FAIL":
        yield "  suspects, and the share of the mean square that each explains:"
        for suspect in verdict.suspects[:5]:
            yield f"    {suspect.explained:6.1%}  {suspect.text}"
        if not verdict.suspects:
            yield "    none of the known defects"
        elif max(x.explained for x in verdict.suspects) < _MUCH:
            yield "    none of them explains much"
    rejected = [x for x, p in verdict.trials.items() if p <= verdict.alpha]
    if verdict.verdict != "FAIL" and rejected:
        yield f"  it is not what kernels of these profiles give: {', '.join(rejected)}"
    if verdict.verdict != "FAIL" and verdict.known:
        sizes = [
            f"{_DEFECTS[x].format(one)} {size:.2g}"
            for x, size in verdict.detectable.items()
            if x in _DEFECTS
        ]
        sizes.append(f"an element that is off by {verdict.element:.3g} standard deviations")
        yield f"  would have been rejected: {', '.join(sizes)}"
    yield _PROVEN


def _say_what_is_missing(verdict: Verdict, one: str) -> str:
    """Say why numbers that were not rejected say little."""
    trivial = [x for x in verdict.blind if x in WITHOUT_POWER]
    if trivial:
        return f"{_list_words(trivial)} would not have been rejected"
    if verdict.idle:
        return "nothing is known of some rows, and the others do not fit this profile best"
    return f"{one} that is 1 % too large would not have been rejected"


def _list_words(names: Sequence[str]) -> str:
    """Join names by commas and `and`."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _write_p(p: float) -> str:
    return f"{p:.1g}" if p > 1e-300 else "0"
