"""Scripts that show a failure."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from types import MethodType
from typing import Any

import numpy as np

from ..candidate.adapter import Adapter
from ..candidate.programs import Subprocess
from ..checks.trials import Call, CheckRun
from .report import Result

_LITERAL = 400  # numbers, up to which arrays are written out: others come of the seed


def reproducer(trial: CheckRun, result: Result, again: Mapping[str, Any]) -> str:
    """Write a script that makes the failing call again, or runs the check again.

    Its exit status is 1 while the failure is there.

    `again` has the arguments of `check` that make the same run.
    """
    adapter, case = trial.adapter, trial.case
    lines = ["import numpy as np", "", "from refattn import conformance", ""]
    lines += [*_import_lines(adapter), ""]
    named = ", ".join(repr(c) for c in sorted(adapter.capabilities))
    arguments = f"fn, {adapter.estimator!r}, [{named}], {adapter.declared!r}"
    lines.append(f"candidate = conformance.Adapter({arguments})")
    # A law, a comparison of several calls, or many numbers: the check draws them again.
    if case is None or result.p is not None or not _shows(trial, case):
        arguments = ", ".join(f"{k}={x!r}" for k, x in again.items())
        lines += [
            'if __name__ == "__main__":',
            f"    report = conformance.check(candidate, checks=[{result.check!r}], {arguments})",
            "    print(report)",
            '    raise SystemExit(report.verdict == "FAIL")',
        ]
        return "\n".join(lines) + "\n"
    names = list(adapter.record.arrays[: len(case.arrays)])
    given = {k: x for k, x in case.options.items() if isinstance(x, np.ndarray)}
    held = dict(zip(names, case.arrays, strict=True)) | given
    lines += [f"{name} = {_write_array(x)}" for name, x in held.items()]
    words = names + [f"{k}={k if k in given else repr(x)}" for k, x in case.options.items()]
    if getattr(case, "strict", False):
        words.append("strict=True")
    lines.append(f"got = candidate({', '.join(words)})")
    if isinstance(trial.got, tuple):
        lines.append(f"got = got[{trial.part}]")
    if case.want is not None:
        lines += [f"want = {_write_array(case.want)}", _COMPARISON.format(case.allowed)]
        return "\n".join(lines) + "\n"
    lines.append("print(got)")
    if trial.part is not None:
        of_lse = adapter.returns(case.options)[trial.part] == "lse"  # which may be -inf
        wrong = "bool(np.any(np.isnan(got)))" if of_lse else "not np.all(np.isfinite(got))"
        lines.append(f"raise SystemExit({wrong})")
    return "\n".join(lines) + "\n"


_COMPARISON = """error = np.max(np.abs(got - want)[np.isfinite(want)])
print("largest error", error, "allowed", {0!r})
raise SystemExit(not error <= {0!r})"""


def _shows(trial: CheckRun, case: Call) -> bool:
    """Return whether the last call alone, of few numbers, shows the failure."""
    held = [*case.arrays, *case.options.values(), case.want]
    few = all(x.size <= _LITERAL for x in held if isinstance(x, np.ndarray))
    return few and (trial.got is None or trial.part is not None)


def _import_lines(adapter: Adapter) -> list[str]:
    """Return lines that define `fn`, if it can be imported."""
    fn = adapter.fn
    if isinstance(fn, Subprocess):
        return [
            f"fn = conformance.Subprocess({fn.command!r}, format={fn.format!r}, "
            f"names={fn.names!r}, timeout={fn.timeout!r})"
        ]
    if adapter.source is not None:
        module, _, name = adapter.source.partition(":")
    else:
        module, name = getattr(fn, "__module__", None) or "", getattr(fn, "__qualname__", "")
        # What another script cannot import has to be put there by hand.
        if module in ("", "__main__") or not _is_there(fn, module, name):
            return ["fn = ...  # the callable under test"]
    first, _, rest = name.partition(".")
    return [f"from {module} import {first}", "", f"fn = {first}{'.' + rest if rest else ''}"]


def _is_there(fn: Any, module: str, name: str) -> bool:
    """Return whether the name leads to the callable: that of a bound method, say, need not."""
    named: Any = sys.modules.get(module)
    for part in name.split("."):
        named = getattr(named, part, None)
    if isinstance(fn, MethodType) and isinstance(named, MethodType):
        return named == fn  # each look-up makes another object
    return named is fn


def _write_array(x: Any) -> str:
    x = np.asarray(x)
    if x.size == 0:
        return f"np.empty({x.shape})"
    # As they are spelled in a script.
    numbers = re.sub("nan|inf", r"np.\g<0>", repr(x.tolist()))
    return f"np.array({numbers})"
