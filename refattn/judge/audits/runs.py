"""Run a test again and again with a kernel replaced: of pytest, a script, or a function."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from functools import partial
from inspect import getattr_static
from io import StringIO
from pkgutil import resolve_name
from typing import Any
from unittest.mock import patch

from ...arrays.words import said
from .kernels import Substitute, Unclear
from .outputs import Trial
from .study import Audit, audit, conclude

TestRun = Callable[[], str]  # says why it fails
Study = Callable[[Sequence[TestRun]], Audit]


def audit_test(
    test: str,
    kernel: str | None,
    declared: Mapping[str, Any],
    track: Callable[[Sequence[Any]], Iterable[Any]] = iter,
) -> Audit:
    """Audit a test: FILE.py::TEST of pytest, a script FILE.py, or MODULE:FUNCTION.

    The kernel is MODULE:FUNCTION, and called by the test. A function may also return what `audit`
    takes, ({"q": q, ...}, compare): then there is no kernel.
    """
    file = test.partition("::")[0]
    folder = [os.path.dirname(os.path.abspath(file))] if ".py" in file else []
    with ExitStack() as stack:
        stack.enter_context(patch.object(sys, "path", [os.getcwd(), *folder, *sys.path]))
        function = None if ".py" in test else _find(test, "TEST")[0]
        if kernel is None:
            given = None if function is None else function()
            if not (isinstance(given, tuple) and len(given) == 2 and callable(given[1])):
                raise ValueError(
                    "--kernel MODULE:FUNCTION must name the kernel, unless TEST is a function "
                    "that returns (inputs, compare)"
                )
            return audit(given[1], track=track, **given[0])
        original, place = _find(kernel, "--kernel")
        substitute = Substitute(original, declared)
        for holder, name in [place, *_find_imports(original)]:
            free = isinstance(getattr_static(holder, name, None), staticmethod | classmethod)
            stands = staticmethod(substitute) if free else substitute
            stack.enter_context(patch.object(holder, name, stands))
        study = partial(_study, substitute, track)
        if "::" in test or os.path.basename(test).startswith("test_"):
            return _study_pytest(test, study)
        return study([partial(_fails, function or partial(runpy.run_path, test, None, "__main__"))])


def _find(name: str, argument: str) -> tuple[Callable[..., Any], tuple[Any, str]]:
    """Find MODULE:FUNCTION, and where it is: what holds it, and its name there."""
    module, _, path = name.partition(":")
    owner, _, last = path.rpartition(".")
    try:
        holder = resolve_name(f"{module.removesuffix('.py').replace(os.sep, '.')}:{owner}")
        function = getattr(holder, last)
        if not callable(function):
            raise ValueError(f"it is a {type(function).__name__}")
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{argument} must be MODULE:FUNCTION, got {name!r}: {error}") from None
    return function, (holder, last)


def _find_imports(function: Callable[..., Any]) -> Iterator[tuple[Any, str]]:
    """List modules that have imported a function, with its name there."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        yield from ((module, name) for name, x in list(names.items()) if x is function)


def _fails(call: Callable[[], Any]) -> str:
    """Return why a function or script does not end well, or nothing."""
    try:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            return "it returned False" if call() is False else ""
    except Unclear:
        raise
    except SystemExit as end:
        return f"exit status {end.code}" if end.code else ""
    except Exception as error:
        return f"{type(error).__name__}: {said(error)}"


def _study(
    substitute: Substitute, track: Callable[[Sequence[Any]], Iterable[Any]], runs: Sequence[TestRun]
) -> Audit:
    """Run tests as they are, and then with each trial; it passes if all do."""

    def passes(trial: Trial | None) -> bool:
        substitute.trial = trial
        return not any(run() for run in runs)

    reasons = [reason for run in runs if (reason := run())]
    if reasons:
        raise ValueError(f"TEST must pass as it is; it fails: {reasons[0]}")
    if not substitute.cases:
        raise ValueError("TEST must call the kernel; it does not, or was skipped")
    return conclude(list(substitute.cases.values()), passes, track=track)


def _first_error(text: str) -> str:
    """Return the first line of pytest that says what was wrong."""
    lines = [x for x in text.splitlines() if x.startswith(("E  ", "ERROR"))]
    words = [y for x in lines if (y := x[1:].removeprefix("RROR:").strip())]
    more = bool(words) and words[0].endswith(":")  # its message begins with a line break
    return " ".join(words[: 1 + more]) or "nothing was collected"


def _study_pytest(test: str, study: Study) -> Audit:
    """Collect tests of pytest, and run their protocol again and again."""
    try:
        import pytest
        from _pytest.runner import runtestprotocol
    except ModuleNotFoundError:
        raise ValueError("tests of pytest need `pip install pytest`") from None
    ends: list[Audit | ValueError | KeyboardInterrupt] = []
    failures: list[str] = []  # also of subtests

    def run(item: Any, left: Any) -> str:
        """Run a test; `left` stays set up."""
        failures.clear()
        for report in runtestprotocol(item, log=False, nextitem=left):
            Plugin.pytest_runtest_logreport(report)
        unclear = [x.rpartition("Unclear: ")[2] for x in failures if "Unclear: " in x]
        if unclear:
            raise Unclear(unclear[0].splitlines()[0])
        return _first_error(failures[0]) if failures else ""

    class Plugin:
        @staticmethod
        def pytest_runtest_logreport(report: Any) -> None:
            failures.extend([str(report.longrepr)] if report.failed else [])

        @staticmethod
        def pytest_runtestloop(session: Any) -> bool:
            parents = {x.parent for x in session.items}
            left = parents.pop() if len(parents) == 1 else session
            try:
                ends.append(study([partial(run, item, left) for item in session.items]))
            except (ValueError, KeyboardInterrupt) as error:
                ends.append(error)
            return True

        @staticmethod
        def pytest_keyboard_interrupt(excinfo: Any) -> None:
            if excinfo.type is KeyboardInterrupt:  # before the loop; others are pytest's own
                ends.append(excinfo.value)

    with redirect_stdout(StringIO()) as printed:
        pytest.main([test, "-q", "-p", "no:cacheprovider", "-p", "no:xdist"], plugins=[Plugin()])
    if not ends:
        reason = _first_error(printed.getvalue())
        raise ValueError(f"TEST must be a test of pytest, got {test!r}: {reason}")
    if isinstance(ends[0], BaseException):
        raise ends[0]
    return ends[0]
