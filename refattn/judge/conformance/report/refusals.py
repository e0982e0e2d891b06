"""Say how a candidate was called whose call raised an exception, and how it may be called."""

from __future__ import annotations

import inspect
import re
import shlex
from contextlib import suppress
from dataclasses import replace

import numpy as np

from ....arrays.words import ELSEWHERE, keyword_names
from ..candidate.adapter import Adapter
from ..candidate.failures import Failure
from ..candidate.programs import Subprocess
from ..candidate.tags import LAYOUTS
from ..checks.trials import CheckRun
from ..truth.allowed import reference

_UNEXPECTED = re.compile(r"unexpected keyword argument '(\w+)'")


def describe_call(trial: CheckRun) -> str:
    """Describe how the candidate was called, and how it is defined."""
    adapter = trial.adapter
    names = list(adapter.record.arrays)
    if trial.case is not None:
        names += [
            f"{k}={'array' if isinstance(x, np.ndarray) else repr(x)}"
            for k, x in trial.case.options.items()
        ]
    if isinstance(adapter.fn, Subprocess):
        command = shlex.join(adapter.fn.command)
        return f"the command was {command}, with {', '.join(names)} in the file"
    called = f"called as fn({', '.join(names)})"
    if len(adapter.record.arrays) == 3:
        axes = ", ".join(adapter["layout"] or "nd")
        kind = f"{adapter['dtype']} and {adapter['library']}"
        called += f" with arrays ({axes}) of {kind} (see --tag layout, --tag dtype, --tag library)"
    try:
        return f"{called}, defined as fn{inspect.signature(adapter.fn)}"
    except Exception:  # no signature, or one that fails
        return called


def name_layout(trial: CheckRun) -> str:
    """Try all other layouts where a call raises an exception, and name those that work.

    If any of them gives the right result, only these are named.
    """
    adapter, case = trial.adapter, trial.case
    if case is None or len(adapter.record.arrays) != 3:
        return ""
    works, right = [], []
    for layout in (x for x in LAYOUTS if x != adapter["layout"]):
        other = replace(adapter, tags={**(adapter.tags or {}), "layout": layout})
        with suppress(Failure, TypeError, ValueError):
            got = other(*case.arrays, strict=True, **case.options)
            works.append(f"--tag layout={layout}")
            want, allowed = reference(other, case.arrays, case.options)
            right += works[-1:] if np.all(np.abs(got - want) <= 2 * allowed) else []
    return f"; the call works with {' or '.join(right or works)}" if works else ""


def name_keyword(adapter: Adapter, words: str) -> str:
    """Name the keyword of a function for one that it does not take, by what its exception says."""
    match, known = _UNEXPECTED.search(words), None
    with suppress(Exception):  # no signature, or one that fails
        known = keyword_names(adapter.fn)
    if match and match[1] == "d_out":
        return (
            "; with --capability vjp it is called as fn(q, k, v, d_out=...) and returns (out, dq, "
            "dk, dv): wrap it, as with refattn.vjp, or leave the capability out"
        )
    if match is None or known is None:
        return ""
    like = " or ".join(f"{x}=" for x in known if ELSEWHERE.get(x.lower()) == match[1])
    return f"; called with {match[1]}=, the function takes {like}: wrap it" if like else ""
