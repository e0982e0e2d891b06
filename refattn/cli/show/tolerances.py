"""Print the results of `refattn tolerance`, on a page or as JSON."""

from __future__ import annotations

import math

import numpy as np

from ...arrays.tables import digits
from ...arrays.words import portable, to_json
from ...files.tensors import Tensors
from ...judge.rounding.problems import Problem
from ...judge.verification.tolerances import LEVEL, USUAL, Allowance, Tolerance
from .page import Page
from .source import introduction, source_of


def print_tolerance(
    tensors: Tensors, problem: Problem, tolerance: Tolerance, verbose: bool, page: Page
) -> None:
    """Print the tolerance that a correct kernel needs, and if `verbose` how known bugs fare."""
    page.say(introduction(tensors, problem, tolerance.dtype))
    page.say(
        "\nneeds: the smallest tolerances, |got - exact| <= atol + rtol |exact|. A correct kernel "
        f"meets the atol with probability {1 - LEVEL:.6f} if its roundings are independent, and "
        "the column `proven` always (both with rtol 0). Use the rtol and atol of `pair` or of "
        "`proven_pair` together"
    )
    needs, power = tolerance.tables()
    whole = [x for x in needs.rows if x["head"] is None]
    columns = [x for x in needs.columns if x.name != "head"]
    page.table(needs._replace(rows=whole, columns=columns))
    if tolerance.hardware is not None:
        page.say(
            "drift: share of the result that is lost by truncated sums; all tolerances include it"
        )
    usual = tolerance.given == USUAL.get(tolerance.dtype)
    name = "torch's default" if usual else "the given tolerance"
    atol = next(x["atol"] for x in whole if x["profile"] == tolerance.profile)
    enough = (Allowance(atol, 0.0), tolerance.ours)
    does = f"may reject a correct kernel of profile {tolerance.profile}"
    if tolerance.power[0].given > 1:
        does = "would reject a correct kernel"
    elif any(np.all(np.greater_equal(tolerance.given, x)) for x in enough):
        does = f"accepts correct kernels of profile {tolerance.profile}"
    page.say(f"{name} ({_write_pair(tolerance.given)}) {does}")
    if {"dq", "dk", "dv"} & {*tensors.shapes}:
        page.say("gradients have no tolerance here; `refattn audit` finds that of each gradient")
    fused = " fused" * tolerance.profile.startswith("flash")
    use = f"for a{fused} kernel (profile {tolerance.profile}): {_write_pair(tolerance.ours)}"
    if not verbose:
        page.say(f"recommended {use}")
        page.say("--verbose: the atol of each head, and which known bugs the tolerance accepts")
        return
    if of_heads := [x for x in needs.rows if x["head"] is not None]:
        page.say("\natol of each head (rtol 0), by profile")
        by_head = needs._replace(rows=of_heads).pivot(
            "head", ["profile"], lambda row: digits(row["atol"])
        )
        page.table(by_head, split=True)
    of = math.prod(tolerance.lead) * tolerance.rows
    page.say(
        "\npower: largest error / tolerance of each known bug, in kernels of "
        f"profile {tolerance.profile} (rounded to nearest), on {of} of "
        f"{math.prod(problem.lead) * problem.shape[0]} queries; verdict and suspect: from verify"
    )
    page.table(power)
    default = " (torch's default)" * usual
    page.say(f"given{default}: {_write_pair(tolerance.given)}")
    page.say(f"ours, {use}")


def _write_pair(pair: Allowance) -> str:
    return f"atol {digits(pair.atol)}, rtol {digits(pair.rtol)}"


def tolerance_to_json(tensors: Tensors, problem: Problem, tolerance: Tolerance) -> str:
    """Format what `judge.tolerance` returns as JSON; what is not finite becomes null."""
    return to_json(source_of(tensors, problem) | portable(tolerance))
