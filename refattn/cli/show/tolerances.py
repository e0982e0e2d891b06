"""What `refattn tolerance` finds: on a page, in rows, and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from ...arrays.words import head_number
from ...files.tensors import Tensors
from ...rounding.problems import Problem
from ...verification.tolerance import LEVEL, Tolerance
from .cells import digits, dump, head_cell
from .page import Page, Table
from .verdicts import introduction, source_of


def print_tolerance(tensors: Tensors, problem: Problem, tolerance: Tolerance, page: Page) -> None:
    """Print what a correct kernel needs, and what becomes of defects, as tables."""
    page.say(introduction(tensors, problem, tolerance.dtype))
    page.say("\nWhat a correct kernel needs for |got - exact| <= atol + rtol |exact|, by profile:")
    page.say(f"with probability {1 - LEVEL:.6f} if roundings are independent, and for certain")
    names = ("profile", "atol", "certain", "or rtol", "and atol", "or rtol", "certain")
    table = Table(*names)
    whole = [x for x in tolerance.needs if x.head is None]
    for x in whole:
        pairs = (x.pair.rtol, x.pair.atol, x.proven_pair.rtol, x.proven_pair.atol)
        table.add_row(x.profile, *map(digits, (x.atol, x.proven, *pairs)))
    page.table(table)
    heads = list(dict.fromkeys(x.head for x in tolerance.needs if x.head is not None))
    if heads:
        page.say("\natol of each head (rtol 0), by profile")
        table = Table("head", *(x.profile for x in whole))
        for head in heads:
            needs = [digits(x.atol) for x in tolerance.needs if x.head == head]
            table.add_row(head_number(head), *needs)
        page.table(table, split=True)
    of = math.prod(tolerance.lead) * tolerance.rows
    page.say(
        f"\nWhat lets a defect pass: largest error over what is allowed, for kernels of profile "
        f"{tolerance.profile} (rounded to nearest), of {of} of "
        f"{math.prod(problem.lead) * problem.shape[0]} queries"
    )
    _print_defects(tolerance, page)
    for name, pair in (("yours", tolerance.given), ("needed", tolerance.ours)):
        page.say(f"{name}: atol {digits(pair.atol)}, rtol {digits(pair.rtol)}")
    if tolerance.power[0].given > 1:
        page.say("yours is too little for a correct kernel")


def _print_defects(tolerance: Tolerance, page: Page) -> None:
    """Print what becomes of each defect."""
    last = "which takes it for"
    names = ("defect", "yours", "", "needed", " ", "verify", last)
    table = Table(*names, drop=(last, "yours", "needed"), left=(last,))
    for row in tolerance.power:
        cells = []
        for ratio in (row.given, row.ours):
            cells += [digits(ratio), "passes" if ratio <= 1 else "fails"]
        table.add_row(f"{row.defect} {row.size}".strip(), *cells, row.verdict, row.suspect)
    page.table(table)


def tolerance_to_json(tensors: Tensors, problem: Problem, tolerance: Tolerance) -> str:
    """Format what `tolerance.study` returns as JSON; what is not finite becomes null."""
    report = tolerance._asdict() | {
        "needs": [
            x._asdict() | {y: getattr(x, y)._asdict() for y in ("pair", "proven_pair")}
            for x in tolerance.needs
        ],
        "power": [x._asdict() for x in tolerance.power],
        "given": tolerance.given._asdict(),
        "ours": tolerance.ours._asdict(),
    }
    return dump(source_of(tensors, problem) | report)


TOLERANCE_COLUMNS = (
    *("table", "profile", "head", "atol", "certain", "pair_rtol", "pair_atol"),
    *("certain_pair_rtol", "certain_pair_atol", "defect", "size", "yours", "needed"),
    *("verdict", "suspect"),
)


def tolerance_rows(tolerance: Tolerance) -> Iterator[dict[str, Any]]:
    """Yield a row for each profile and head, and one for each defect."""
    for x in tolerance.needs:
        yield {
            "table": "need",
            "profile": x.profile,
            "head": head_cell(x.head),
            "atol": x.atol,
            "certain": x.proven,
            "pair_rtol": x.pair.rtol,
            "pair_atol": x.pair.atol,
            "certain_pair_rtol": x.proven_pair.rtol,
            "certain_pair_atol": x.proven_pair.atol,
        }
    for power in tolerance.power:
        yield {
            "table": "defect",
            "profile": tolerance.profile,
            "defect": power.defect,
            "size": power.size,
            "yours": power.given,
            "needed": power.ours,
            "verdict": power.verdict,
            "suspect": power.suspect,
        }
