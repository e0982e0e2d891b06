"""Run a test again and again with a kernel replaced: of pytest, a script, or a function."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from operator import attrgetter
from typing import Any

from ..arrays.words import said
from .kernels import Substitute, Unclear
from .outputs import Trial
from .study import Audit, audit, conclude

TestRun = Callable[[], str]  # says why it fails


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
    with _importing(test):
        function = None if ".py" in test else _find(test, "TEST")
        if kernel is None:
            given = None if function is None else function[1]()
            if not (isinstance(given, tuple) and len(given) == 2 and callable(given[1])):
                raise ValueError(
                    "--kernel MODULE:FUNCTION must say what TEST calls, unless TEST is a function "
                    "that returns (inputs, compare)"
                )
            return audit(given[1], track=track, **given[0])
        owner, original = _find(kernel, "--kernel")
        substitute = Substitute(original, declared)
        with _replaced(owner, kernel.rpartition(":")[2].rpartition(".")[2], substitute):
            if "::" in test or os.path.basename(test).startswith("test_"):
                return _run_pytest(test, substitute, track)
            script = partial(runpy.run_path, test, run_name="__main__")
            call = script if function is None else function[1]
            return _study([lambda: _fails(call)], substitute, track)


@contextlib.contextmanager
def _importing(test: str) -> Iterator[None]:
    """Import from here, and from the folder of the test."""
    before, file = [*sys.path], test.partition("::")[0]
    folder = [os.path.dirname(os.path.abspath(file))] if ".py" in file else []
    sys.path[:0] = [os.getcwd(), *folder]
    try:
        yield
    finally:
        sys.path[:] = before


def _find(name: str, argument: str) -> tuple[Any, Callable[..., Any]]:
    """Find MODULE:FUNCTION, and what holds it."""
    module, colon, path = name.partition(":")
    try:
        owner: Any = import_module(module.removesuffix(".py").replace(os.sep, "."))
        for part in path.split(".")[:-1]:
            owner = getattr(owner, part)
        function = attrgetter(path.rpartition(".")[2])(owner)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{argument} must be MODULE:FUNCTION, got {name!r}: {error}") from None
    if not colon or not callable(function):
        raise ValueError(f"{argument} must be MODULE:FUNCTION, got {name!r}")
    return owner, function


@contextlib.contextmanager
def _replaced(owner: Any, name: str, substitute: Substitute) -> Iterator[None]:
    """Put something in the place of a kernel, also in modules that have imported it."""
    original = substitute.kernel
    places = [(owner, name)]
    for module in list(sys.modules.values()):
        names = vars(module) if hasattr(module, "__dict__") else {}
        places += [(module, x) for x, y in list(names.items()) if y is original]
    for place, x in places:
        setattr(place, x, substitute)
    try:
        yield
    finally:
        for place, x in places:
            setattr(place, x, original)


def _fails(call: Callable[[], Any]) -> str:
    """Return why a function or script does not end well, or nothing."""
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return "it returned False" if call() is False else ""
    except Unclear:
        raise
    except SystemExit as end:
        return f"exit status {end.code}" if end.code else ""
    except Exception as error:
        return f"{type(error).__name__}: {said(error)}"


def _study(
    runs: Sequence[TestRun], substitute: Substitute, track: Callable[[Sequence[Any]], Iterable[Any]]
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
    return lines[0][1:].removeprefix("RROR:").strip() if lines else "nothing was collected"


def _run_pytest(
    test: str, substitute: Substitute, track: Callable[[Sequence[Any]], Iterable[Any]]
) -> Audit:
    """Collect tests of pytest, and run their protocol again and again."""
    try:
        import pytest
        from _pytest.runner import runtestprotocol
    except ModuleNotFoundError:
        raise ValueError("tests of pytest need `pip install pytest`") from None
    left: Any = None  # what stays set up between two runs
    found: list[Audit] = []
    failed: list[Exception] = []

    def run(item: Any) -> str:
        if hasattr(item, "_initrequest"):
            item._initrequest()  # as before its first run
        reports = runtestprotocol(item, log=False, nextitem=left)
        raised = [str(x.longrepr) for x in reports if x.failed]
        if any("Unclear: " in x for x in raised):
            failed.append(Unclear(raised[0].rpartition("Unclear: ")[2].splitlines()[0]))
        return next((_first_error(x) for x in raised), "")

    class Plugin:
        @staticmethod
        def pytest_runtestloop(session: Any) -> bool:
            nonlocal left
            parents = {x.parent for x in session.items}
            left = parents.pop() if len(parents) == 1 else session
            try:
                runs = [lambda item=item: run(item) for item in session.items]
                found.append(_study(runs, substitute, track))
            except ValueError as error:
                failed.append(error)
            return True

    with contextlib.redirect_stdout(io.StringIO()) as printed:
        pytest.main([test, "-q", "-p", "no:cacheprovider", "-p", "no:xdist"], plugins=[Plugin()])
    if failed:
        raise failed[0]
    if not found:
        reason = _first_error(printed.getvalue())
        raise ValueError(f"TEST must be a test of pytest, got {test!r}: {reason}")
    return found[0]
