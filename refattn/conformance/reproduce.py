"""Scripts that show a failure."""

from __future__ import annotations

import base64
from functools import partial
from typing import Any

import numpy as np

from .adapter import Adapter, Subprocess
from .checks import Trial
from .report import Result

__all__ = ["reproducer"]

_LITERAL = 400  # numbers up to which an array is written out


def reproducer(trial: Trial, result: Result) -> str:
    """A script that makes the failing call again, or the failing statistical check."""
    adapter, case = trial.adapter, trial.case
    lines = ["import numpy as np", "", "from refattn import conformance", ""]
    lines += [*_imported(adapter.fn), ""]
    named = ", ".join(repr(c) for c in sorted(adapter.capabilities))
    default = Adapter(adapter.fn, adapter.estimator).tags or {}
    tags = {k: v for k, v in (adapter.tags or {}).items() if default.get(k) != v}
    lines.append(f"candidate = conformance.Adapter(fn, {adapter.estimator!r}, [{named}], {tags!r})")
    if result.p is not None or case is None:
        lines += [
            f"report = conformance.check(candidate, checks=[{result.check!r}], rng={trial.seed})",
            "print(report)",
        ]
        return "\n".join(lines) + "\n"
    names = list(adapter.signature.arrays[: len(case.arrays)])
    for name, x in zip(names, case.arrays, strict=True):
        lines.append(f"{name} = {_array(x)}")
    for name, x in case.options.items():
        if isinstance(x, np.ndarray):
            lines.append(f"{name} = {_array(x)}")
    words = names + [
        f"{k}={k}" if isinstance(x, np.ndarray) else f"{k}={x!r}" for k, x in case.options.items()
    ]
    lines.append(f"got = candidate({', '.join(words)})")
    if case.want is None:
        lines.append("print(got)")
    elif adapter.estimator == "moments":
        part = 0 if case.want.ndim < case.arrays[0].ndim else 1
        lines += [
            f"want = {_array(case.want)}",
            f"got = got[{part}]",
            _VERDICT.format(case.allowed),
        ]
    else:
        lines += [f"want = {_array(case.want)}", _VERDICT.format(case.allowed)]
    return "\n".join(lines) + "\n"


_VERDICT = 'print("largest error", np.max(np.abs(got - want)), "allowed", {:.3g})'


def _imported(fn: Any) -> list[str]:
    """Lines that define `fn`, if it can be imported."""
    if isinstance(fn, Subprocess):
        return [
            f"fn = conformance.Subprocess({fn.command!r}, format={fn.format!r}, names={fn.names!r})"
        ]
    module, name = getattr(fn, "__module__", None), getattr(fn, "__qualname__", "<none>")
    if module is None or "<" in name or isinstance(fn, partial) or not hasattr(fn, "__qualname__"):
        return ["fn = ...  # the callable under test"]
    first, _, rest = name.partition(".")
    return [f"from {module} import {first}", "", f"fn = {first}{'.' + rest if rest else ''}"]


def _array(x: Any) -> str:
    x = np.asarray(x)
    if x.size == 0:
        return f"np.empty({x.shape})"
    if x.size <= _LITERAL:
        return f"np.array({x.tolist()!r})"
    data = base64.b64encode(np.ascontiguousarray(x).tobytes()).decode()
    return (
        f'np.frombuffer(__import__("base64").b64decode("{data}"), "{x.dtype.str}")'
        f".reshape({x.shape})"
    )
