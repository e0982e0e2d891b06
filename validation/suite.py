"""A claim of the references: what it states, how it is tried, and what came of it.

Each module of `validation.claims` is one `Claim`: its functions have the names of the fields. Its
texts are in the file of its name that ends in .toml, and those with numbers of the module are
constants there with these names in capitals. Its tasks run anywhere and in any order, with
random numbers that depend only on the seed, the claim and the place of the task; `judge` turns
their results into evidence for or against each statement, and the verdicts follow by the rules
here. The tests are those of `refattn.judge.stats`.
"""

from __future__ import annotations

import pkgutil
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from refattn.judge import stats

from . import texts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ALPHA = 1e-6  # probability that the p-values of a run give any wrong verdict
BETA = 1e-6  # probability of missing a discrepancy of the size called detectable
LEVELS = ("tiny", "quick", "full")  # tiny runs the code, and promises no power
HOLDS, REFUTED, UNDERPOWERED = "HOLDS", "REFUTED", "UNDERPOWERED"

Tasks: TypeAlias = Sequence[Mapping[str, Any]]
Results: TypeAlias = Sequence[Any]


class Statement(NamedTuple):
    """One sentence to be tried, with the verdict that its derivation leads to expect.

    Formulas between dollars are LaTeX, here and in the other texts of a claim but its title.
    `printed` says that the sentence is that of the reference. Others correct it or add to it, or,
    if they are expected to be refuted, show that a mistake would be seen.
    """

    text: str
    expected: str = HOLDS
    printed: bool = True


refuted = partial(Statement, expected=REFUTED)
derived = partial(Statement, printed=False)
control = partial(Statement, expected=REFUTED, printed=False)
_KINDS: Mapping[str, Callable[[str], Statement]] = {  # in the files of texts
    "printed": Statement,
    "refuted": refuted,
    "derived": derived,
    "control": control,
}


class Tested(NamedTuple):
    """A p-value under the hypothesis that the statement is true.

    `detectable` gives the discrepancy found at a level with probability 1 - BETA, in `unit`;
    one that exceeds `target` leaves the statement underpowered.
    """

    name: str
    p: float
    detectable: Callable[[float], float] | None = None
    target: float = float("inf")
    unit: str = ""


class Shown(NamedTuple):
    """A p-value under the hypothesis that the statement is false, and one that it is true.

    For statements of order ("more accurate than"), which hold only once the first is small, and
    are refuted if the second is.
    """

    name: str
    p: float
    opposite: float = 1.0


class Compared(NamedTuple):
    """A number from arithmetic that the statement bounds from above."""

    name: str
    value: float
    bound: float
    unit: str = ""


class Timed(NamedTuple):
    """A number from a clock that the statement bounds from above.

    Some round gave a number smaller by `spread`: what it does not contradict refutes nothing. A
    statement with such evidence has no other, and is timed: its verdict depends on the machine and
    on what else runs there, and so never decides an exit status.
    """

    name: str
    value: float
    bound: float
    unit: str = ""
    spread: float = 0.0


Piece: TypeAlias = Tested | Shown | Compared | Timed
Evidence: TypeAlias = dict[str, list[Piece]]  # by statement


class Findings(NamedTuple):
    """What the tasks of a claim found: evidence by statement, numbers for the figure, a remark."""

    evidence: Mapping[str, Sequence[Piece]]
    data: dict[str, Any]
    remark: str = ""


class Erratum(NamedTuple):
    """What a reference prints wrongly, what is right, and what happens to who believes it.

    It is shown by the refuted `statements` of its claim, from which all it says follows. `printed`
    is in quotation marks where the words are those of the reference. Errata come in the order of
    their `weight`, the largest first, and those with a small figure, drawn from the `data` of the
    findings, before the others. `source` is that of the claim, if it is not given.
    """

    title: str
    statements: tuple[str, ...]
    printed: str
    instead: str
    consequence: str
    weight: int = 0
    plot: Callable[[dict[str, Any]], Figure] | None = None
    source: str = ""


@dataclass(frozen=True)
class Claim:
    """A claim of one reference, and how it is tried.

    Parameters
    ----------
    title : str
        The claim in a few words.
    source : str
        Reference and equation, such as "000, Proposition 1".
    statements : mapping of str to Statement
        What is tried, by a short name.
    method : str
        How, and why its probabilities of error hold.
    tasks : callable
        From a level to the keyword arguments of each task.
    run : callable
        ``run(rng, **task)`` gives the result of one task; it must be found by its name.
    judge : callable
        From the results, in the order of the tasks, to `Findings`.
    plot : callable, optional
        From the `data` of the findings to a matplotlib figure.
    errata : sequence of Erratum
        What the reference prints wrongly: every refuted statement that is printed has its place in
        one.
    alone : bool
        Whether tasks read a clock, and so run one by one after all else.
    needs : tuple of str
        Modules that it needs beside those of the suite; without them it is left out, and that said.
    name : str
        That of the module, filled in by `claims`.
    """

    title: str
    source: str
    statements: Mapping[str, Statement]
    method: str
    tasks: Callable[[str], Tasks]
    run: Callable[..., Any]
    judge: Callable[[Results], Findings]
    plot: Callable[[dict[str, Any]], Figure] | None = None
    errata: Sequence[Erratum] = ()
    alone: bool = False
    needs: tuple[str, ...] = ()
    name: str = ""


@cache
def claims() -> Mapping[str, Claim]:
    """All claims by name, in the order of their sources."""
    package = import_module("validation.claims")
    names = [m.name for m in pkgutil.iter_modules(package.__path__) if m.name[0] != "_"]
    found = [_claim(name) for name in names]
    return {claim.name: claim for claim in sorted(found, key=lambda c: (c.source, c.name))}


def _claim(name: str) -> Claim:
    """Make the claim of a module from its functions, and its texts."""
    module = vars(import_module(f"validation.claims.{name}"))
    parts = {f.name: module.get(f.name.upper(), module.get(f.name)) for f in fields(Claim)}
    found = _texts(name, module) | {k: v for k, v in parts.items() if v is not None}
    return Claim(**found | {"name": name})


def _texts(name: str, module: Mapping[str, Any]) -> dict[str, Any]:
    """Read the texts of a claim."""
    found = texts.read(Path(module["__file__"]).with_name(f"{name}.toml"))
    kinds = {x: next(iter(of.items())) for x, of in found.get("statements", {}).items()}
    if kinds:
        found["statements"] = {x: _KINDS[kind](text) for x, (kind, text) in kinds.items()}
    errata = [Erratum(**e) for e in found.get("errata", ())]
    plots = (module[e.plot] if isinstance(e.plot, str) else None for e in errata)
    return found | {"errata": [e._replace(plot=x) for e, x in zip(errata, plots, strict=True)]}


def missing(needs: Sequence[str]) -> list[str]:
    """Modules of these that are not installed."""
    return [name for name in needs if find_spec(name) is None]


def generator(seed: int, name: str, index: int) -> np.random.Generator:
    """Random numbers of one task, whatever else runs, where and when."""
    return np.random.default_rng([seed, zlib.crc32(name.encode()), index])


def alpha() -> float:
    """Level of each statement: their sum over the suite is ALPHA."""
    return ALPHA / sum(len(claim.statements) for claim in claims().values())


def detects(test: Callable[..., float], n: int, **parameters: Any) -> Callable[[float], float]:
    """What a test of `refattn.judge.stats` detects in n draws, as a function of the level."""
    return lambda level: stats.min_discrepancy(test, n, alpha=level, beta=BETA, **parameters)


def evidence(
    name: str,
    test: Callable[..., float],
    x: Any,
    *null: Any,
    target: tuple[float, str] = (float("inf"), ""),
    **assumed: Any,
) -> Tested:
    """Evidence from a test of `judge.stats` on draws, and what it detects under assumptions.

    The target is the largest discrepancy that may go unseen, and its unit.
    """
    return Tested(name, test(x, *null), detects(test, len(x), **assumed), *target)


def catoni(
    name: str, x: Any, mean: float, variance: float, target: float = float("inf"), unit: str = ""
) -> Tested:
    """Evidence on the mean of draws whose variance is known, heavy tails allowed."""
    null, to = (stats.catoni, x, mean, variance), (target, unit)
    return evidence(name, *null, target=to, variance=variance)


def empirical_bernstein(
    name: str, x: Any, mean: float, variance: float, target: float, unit: str, low: float = 0.0
) -> Tested:
    """Evidence on the mean of draws in [low, 1]; the variance is for what is detected."""
    assumed: dict[str, Any] = {"variance": variance, "low": low, "high": 1.0}
    null = (stats.empirical_bernstein, x, mean, low, 1.0)
    return evidence(name, *null, target=(target, unit), **assumed)


def more_often(name: str, wins: Any, share: float = 0.5) -> Shown:
    """Evidence that independent trials succeed with a probability above `share`: a sign test.

    The two-sided p-value at `share` bounds the tail for every probability on the other side of it.
    """
    n, count = len(wins), int(np.sum(wins))
    p = stats.binomial(count, n, share)
    return Shown(f"{name}, {count} of {n}", *((p, 1.0) if count > n * share else (1.0, p)))


def record(claim: Claim, findings: Findings, level: float) -> dict[str, Any]:
    """All that is kept of a claim: verdicts, evidence and numbers, ready for JSON.

    Holm's method holds the p-values of a statement to the level given, however they depend on each
    other.
    """
    if set(findings.evidence) != set(claim.statements):
        raise ValueError(f"{claim.name} has evidence for {sorted(findings.evidence)}.")
    return {
        "claim": claim.name,
        "title": claim.title,
        "source": claim.source,
        "method": claim.method,
        "alpha": level,
        "statements": [
            {"name": name, **statement._asdict(), **_verdict(findings.evidence[name], level)}
            for name, statement in claim.statements.items()
        ],
        "errata": [
            {
                "title": e.title,
                "statements": list(e.statements),
                "source": e.source or claim.source,
                "printed": e.printed,
                "instead": e.instead,
                "consequence": e.consequence,
                "weight": e.weight,
            }
            for e in claim.errata
        ],
        "remark": findings.remark,
        "data": findings.data,
    }


def _verdict(evidence: Sequence[Piece], level: float) -> dict[str, Any]:
    """The verdict on one statement, the number that decided it, and every piece of evidence."""
    if not evidence:
        raise ValueError("A statement needs evidence.")
    timed = [isinstance(e, Timed) for e in evidence]
    if any(timed) and not all(timed):
        raise ValueError("Evidence from a clock needs a statement of its own.")
    against = [e.p if isinstance(e, Tested) else e.opposite for e in _random(evidence)]
    shown = [e for e in evidence if isinstance(e, Shown)]
    refuting = iter(stats.holm(against) if against else ())
    showing = iter(stats.holm([e.p for e in shown]) if shown else ())
    rows: list[dict[str, Any]] = []
    for e in evidence:
        row: dict[str, Any] = {"name": e.name, "kind": type(e).__name__.lower()}
        if isinstance(e, Compared | Timed):
            if np.isnan(e.value):
                raise ValueError(f"{e.name} is not a number: no evidence either way.")
            row |= {"value": float(e.value), "bound": float(e.bound), "unit": e.unit}
            least = e.value - e.spread if isinstance(e, Timed) else e.value
            beyond = REFUTED if least > e.bound else UNDERPOWERED
            row["verdict"] = HOLDS if e.value <= e.bound else beyond
            row["margin"] = _ratio(e.value, e.bound)
            row["number"] = f"{e.value:.2g}{_unit(e.unit)} (at most {e.bound:.2g})"
        elif isinstance(e, Shown):
            adjusted, opposite = float(next(showing)), float(next(refuting))
            row |= {"p": float(e.p), "adjusted": adjusted, "opposite": opposite}
            row["verdict"] = (
                REFUTED if opposite <= level else HOLDS if adjusted <= level else UNDERPOWERED
            )
            row["margin"] = _ratio(level, opposite) if opposite <= level else adjusted / level
            row["number"] = f"p = {min(adjusted, opposite):.2g} that chance showed it"
        else:
            adjusted = float(next(refuting))
            row |= {"p": float(e.p), "adjusted": adjusted, "unit": e.unit}
            row["number"] = f"p = {adjusted:.2g}"
            row["verdict"], row["margin"] = HOLDS, _ratio(level, adjusted)
            if e.detectable is not None:
                found = float(e.detectable(level / len(against)))
                row |= {"detectable": found, "target": float(e.target)}
                row["number"] += f", detects {found:.2g}{_unit(e.unit)}"
                if found > e.target:
                    row["verdict"], row["margin"] = UNDERPOWERED, found / e.target
            if adjusted <= level:
                row["verdict"], row["margin"] = REFUTED, _ratio(level, adjusted)
        rows.append(row)
    verdict = next(
        v for v in (REFUTED, UNDERPOWERED, HOLDS) if any(r["verdict"] == v for r in rows)
    )
    decisive = [r for r in rows if r["verdict"] == verdict]
    if verdict == HOLDS:  # identities say more about code than about chance: name them last
        decisive = [r for r in decisive if "p" in r] or decisive
    deciding = max(decisive, key=lambda r: r["margin"])
    return {
        "timed": all(timed),
        "verdict": verdict,
        "number": f"{deciding['name']}: {deciding['number']}",
        "evidence": [{k: _finite(v) for k, v in row.items()} for row in rows],
    }


def _random(evidence: Sequence[Piece]) -> list[Tested | Shown]:
    return [e for e in evidence if isinstance(e, Tested | Shown)]


def _ratio(a: float, b: float) -> float:
    """How near a is to exceeding b, or how far beyond it."""
    return a / b if b > 0 else (float("inf") if a > 0 else 0.0)


def _finite(x: Any) -> Any:
    """JSON has no infinity and no NaN: null stands for both."""
    return None if isinstance(x, float) and not np.isfinite(x) else x


def _unit(unit: str) -> str:
    return f" {unit}" if unit else ""
