"""`Same`, the result of `same`: its record and its words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ...arrays.shown import held
from ...arrays.words import name_element, to_json
from ..verification.findings import Worst, as_cause
from ..verification.verdict import Verdict


@held("verdict", "equal", "compared", "differing", "alpha")
class Same(NamedTuple):
    """The verdict on two outputs for one input: are they two runs of one right kernel?

    Attributes
    ----------
    verdict : str
        ``"PASS"`` if no bit differs, or if both outputs pass `verify` and no difference is larger
        than roundings explain; ``"FAIL"`` if one does not pass, or a difference is larger; or
        ``"UNDERPOWERED"`` if a wrong output would also pass. If `bitwise`, ``"FAIL"`` if any bit of
        a row differs that has equal inputs.
    equal : bool
        Whether all rows with equal inputs are bitwise equal.
    rows : tuple of (tuple of int, float)
        Rows of A that are larger apart than two right kernels can be, at level `alpha` by Holm's
        correction, with their p-values, the smallest first.
    compared, differing : int
        Number of rows with equal inputs, and how many of them differ.
    places : str
        The places of the rows that differ, in words.
    added : str
        The places of rows that only one of the outputs has, in words.
    wrong : str
        Which output fails by itself: "A", "B", "A and B", or an empty string.
    worst : Worst or None
        The element that is farthest apart: its index in A, the numbers of A (`got`) and of B
        (`exact`), and the largest difference allowed.
    p_value : float
        Largest probability that two right kernels are so far apart.
    a, b : Verdict or None
        Verdicts on each; None if all rows are bitwise equal.
    bitwise : bool
        Whether no bit may differ.
    alpha : float
        Largest probability that two outputs of one right kernel fail.
    """

    verdict: str
    equal: bool
    rows: tuple[tuple[tuple[int, ...], float], ...]
    compared: int
    differing: int
    places: str
    added: str
    wrong: str = ""
    worst: Worst | None = None
    p_value: float = 1.0
    a: Verdict | None = None
    b: Verdict | None = None
    bitwise: bool = False
    alpha: float = 1e-6

    def to_json(self) -> str:
        """Write the verdict as JSON."""
        return to_json(self, indent=1)

    def __str__(self) -> str:
        """Put the verdict into words."""
        return "\n".join(self._list_lines())

    def _list_lines(self) -> Iterator[str]:
        if self.equal:
            yield f"PASS: bitwise equal in all {self.compared} rows with equal inputs"
            yield from [f"  not compared: {self.added}"] * bool(self.added)
            yield "  next: `refattn verify` says whether they are right"
            return
        alone = {x: y for x, y in (("A", self.a), ("B", self.b)) if y is not None}
        yield f"{self.verdict}: {self._say_verdict()}"
        where = f": {self.places}" if self.differing < self.compared else ""
        yield f"  differ: {self.differing} of {self.compared} rows with equal inputs{where}"
        if self.added:
            yield f"  only in one file, so not compared: {self.added}"
        if self.rows:
            yield f"  more than roundings explain: {len(self.rows)} of these rows"
        if self.worst is not None:
            _, at, a, b, allowed = self.worst
            yield (
                f"  worst: {name_element(at)} is {a:.6g} in A and {b:.6g} in B, "
                f"allowed ± {allowed:.3g}"
            )
        for name, x in alone.items():
            cause = f": {as_cause(x.suspects[0].text)}" if x.suspects else ""
            fits = f" (profile {x.profile})" if x.profile else ""
            place_of = f", {x.place}" if x.place else ""
            yield f"  {name} alone: {x.verdict}{fits}{cause}{place_of}"

    def _say_verdict(self) -> str:
        if self.wrong:
            return f"no correct kernel gives {self.wrong}"
        if self.rows or self.p_value <= self.alpha:
            return "each passes alone, but no two runs of one correct kernel are so far apart"
        if self.bitwise:
            return "roundings explain all differences, but --bitwise allows none"
        if self.verdict == "UNDERPOWERED":
            return "roundings explain all differences, but a wrong output would also pass"
        return "two runs of one correct kernel may differ so"


Same.__module__ = "refattn.judge.runs"  # where users find it, and so do pickles
