r"""Parts of the keys, each with an output and log normalisers, and what they are merged to.

Part p has the keys from :math:`b_p` to :math:`b_{p+1}`, and is attention to these alone. The merge
is attention once more, of each query to the parts: scores are their log normalisers :math:`l_p` and
values their outputs :math:`o_p`,

.. math:: o = \frac{\sum_p e^{l_p} o_p}{\sum_p e^{l_p}} , \qquad l = \log \sum_p e^{l_p} .

A part without keys has the output 0 and the log normaliser :math:`-\infty`, and no weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import nan
from typing import Any

import numpy as np

from ...arrays import checks
from ...arrays.library import Doubles
from ..rounding.formats import dtype_of, widen
from ..rounding.problems import Index, Problem
from ..verification.choice import is_narrow
from ..verification.findings import Numbers, Part, Suspect
from ..verification.inputs import narrowest
from ..verification.verdict import Verdict

PART_ARRAYS = ("part_out", "part_lse", "part_keys")  # arrays
MERGE = "merge"
_MERGED_ROWS = 256  # of a head


def pose_parts(posed: Mapping[str, Part], given: Mapping[str, Any]) -> dict[str, Part]:
    """Add what is judged of parts: each of them by its number, and the merge to the output.

    The output is that of the merge alone if parts are stored in 16 bits, which it is not exact to.
    """
    problem, numbers = posed["out"]
    missing = [x for x in PART_ARRAYS if given.get(x) is None]
    if problem.kind != "scores" or missing:
        what = (
            f"{', '.join(PART_ARRAYS)} together" if missing else "parts for softmax attention only"
        )
        raise ValueError(f"`{PART_ARRAYS[0]}` must be given with {what}, got {problem.called}.")
    (n, m, d_v), lead = problem.shape, problem.lead
    keys = checks.host_integers("part_keys", given["part_keys"], "(parts + 1,)", 1)
    if keys.size < 2 or keys[0] != 0 or keys[-1] != m or np.any(np.diff(keys) < 0):
        raise ValueError(
            f"`part_keys` must rise from 0 to the number of keys, {m}, got {keys.tolist()}."
        )
    out, lse = (widen(x, given[x]) for x in PART_ARRAYS[:2])
    shapes = {"part_out": (keys.size - 1, *lead, n, d_v), "part_lse": (keys.size - 1, *lead, n)}
    for name, x in {"part_out": out, "part_lse": lse}.items():
        if x.shape != shapes[name]:
            raise ValueError(f"`{name}` must have shape {shapes[name]}, got {x.shape}.")
    dtype, of_lse = (
        narrowest(x, problem.storage, dtype_of(given[name], name))
        for name, x in {"part_out": out, "part_lse": lse}.items()
    )
    alone, found = problem.without("sinks"), {}
    for at in range(keys.size - 1):
        seen = (np.arange(m) >= keys[at]) & (np.arange(m) < keys[at + 1])
        of_part = Numbers(out[at].__getitem__, dtype, lse[at].__getitem__, of_lse)
        found[f"part {at}"] = Part(alone.masked(np.broadcast_to(seen, (n, m))), of_part)
    narrow = is_narrow(dtype) or is_narrow(of_lse)
    rest = {x: y for x, y in posed.items() if x != "out" or not narrow}
    return rest | found | {MERGE: _pose_merge(problem, numbers, (out, lse), np.diff(keys))}


def settle_part(name: str, part: Part, verdict: Verdict) -> Verdict:
    """Say what the bias or the mask of a part is, and that nothing else passes without keys."""
    if name in ("out", "state"):
        chosen = "indices" in part.problem.first
        return verdict.renamed("the mask", "the choice of keys") if chosen else verdict
    if name == MERGE:
        blind = tuple(x for x in verdict.blind if "scale" not in x)  # products are all 0
        verdict = verdict.renamed("the bias", "lse of the parts")._replace(blind=blind)
    if verdict.verdict != "UNDERPOWERED":
        return verdict
    masks = (part.problem.read(index)["mask"] for index in np.ndindex(part.problem.lead))
    most = max((int(np.max(np.sum(x, -1), initial=0)) for x in masks), default=0)
    words = "no query sees more than one key" if most else "the part has no key"
    # Any mean of one value is right.
    passed = verdict._replace(verdict="PASS", blind=(), remarks=[words])
    return passed if most < 2 else verdict


def blame_parts(
    verdicts: Mapping[str, Verdict], suspects: Mapping[str, list[Suspect]]
) -> Mapping[str, list[Suspect]]:
    """Name wrong parts as what is wrong in an output that is their merge."""
    wrong = [x for x, y in verdicts.items() if x.startswith("part ") and y.verdict == "FAIL"]
    state = [verdicts[x].verdict for x in ("out", MERGE) if x in verdicts]
    why = next(
        (f": {y[0].text.removeprefix('agrees if ')}" for x in wrong if (y := suspects[x])), ""
    )
    # What is wrong in all scores is named for the output as well.
    if not wrong or state != ["FAIL", "PASS"] or (suspects["out"] and "lse is" not in why):
        return suspects
    text = f"agrees if parts are merged as they are given, and {', '.join(wrong)}"
    text += f" {'are' if wrong[1:] else 'is'} wrong{why}"
    return {**suspects, "out": [Suspect("convention", nan, nan, nan, 1.0, text)]}


def _pose_merge(
    problem: Problem, numbers: Numbers, given: tuple[Doubles, Doubles], sizes: Doubles
) -> Part:
    """Pose the merge of some queries of each head: row i sees the parts of its own query alone."""
    n, _, d_v = problem.shape
    rows = np.unique(np.linspace(0, n - 1, min(n, _MERGED_ROWS)).astype(int))
    count, parts = len(rows), len(sizes)
    own = np.repeat(np.eye(count, dtype=bool), parts, 1)  # (rows, rows x parts)

    def read(index: Index) -> Mapping[str, Any]:
        at: Any = (slice(None), *index)
        values, scores = (np.moveaxis(x[at][:, rows], 0, 1) for x in given)
        # Queries that differ are rows apart; their products with keys of 0 are 0.
        found = {"q": 1.0 + np.arange(count)[:, None], "k": np.zeros((count * parts, 1))}
        found |= {"v": np.nan_to_num(values.reshape(-1, d_v)), "mask": own, "part_sizes": sizes}
        found["bias"] = np.broadcast_to(scores.reshape(1, -1), own.shape)
        return found | ({"sinks": problem.read(index)["sinks"]} if problem.has_sinks else {})

    merge = problem._replace(
        shape=(count, count * parts, d_v),
        read=read,
        scale=1.0,
        causal=False,
        window=(None, None),
        softcap=None,
        key_heads=None,
        packed=None,
    )
    some = f"{count} of {n} queries of each head are tested" if count < n else ""
    of_rows = numbers._replace(out=lambda index: numbers.out(index)[rows], remark=some)
    if (of_lse := numbers.lse) is not None:
        of_rows = of_rows._replace(lse=lambda index: of_lse(index)[rows])
    return Part(merge, of_rows)
