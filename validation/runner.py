"""Claims run through any `concurrent.futures.Executor`, their results kept as they come.

A line of JSON is added to the file of results when a claim ends, in one write; so a run that is
killed loses the claims that were running, and can be resumed.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import platform
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import scipy
from threadpoolctl import threadpool_limits

import refattn

from . import suite


def settings(level: str, seed: int) -> dict[str, Any]:
    """What determines the results of a run, and must be the same for it to be resumed."""
    return {
        "level": level,
        "seed": seed,
        "alpha": suite.ALPHA,
        "beta": suite.BETA,
        "statements": sum(len(c.statements) for c in suite.claims().values()),
        "refattn": refattn.__version__,
        "numpy": np.__version__,
        "scipy": scipy.__version__,
        "python": platform.python_version(),
        "code": _code(),
    }


def run(
    names: Iterable[str],
    executor: Executor,
    *,
    level: str,
    seed: int,
    results: Path,
    resume: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> list[dict[str, Any]]:
    """Run claims and return their records, in the order of the names.

    All of the executor is needed for claims that are timed. The file of results has a line of JSON
    for the settings and one for each claim; to `resume` is to keep the claims that it has.
    `progress` is called with the name of a claim, how many of its tasks have ended, and how many
    there are. A ValueError says that a name is unknown, that the file is that of a run with other
    settings or no file of results, or that another run writes to it.
    """
    chosen = list(names)
    for name in chosen:
        if name not in suite.claims():
            raise ValueError(f"Unknown claim {name!r}; there are {', '.join(suite.claims())}.")
    header = settings(level, seed)
    results.parent.mkdir(parents=True, exist_ok=True)
    with _locked(results):
        done = _kept(results, header) if resume else {}
        _rewrite(results, [header, *done.values()])
        for name in chosen:
            if name in done and progress is not None:
                progress(name, 1, 1)
        wanted = [name for name in chosen if name not in done]
        together = [name for name in wanted if not suite.claims()[name].alone]
        apart = [[name] for name in wanted if suite.claims()[name].alone]
        for batch in ([together] if together else []) + apart:
            for one in _run_batch(batch, executor, level, seed, progress):
                done[one["claim"]] = one
                _append(results, one)
    return [done[name] for name in chosen]


def unexpected(records: Iterable[dict[str, Any]]) -> list[str]:
    """Claims that could not be tried, and statements whose verdict is not the expected one.

    Timed statements are left out: `timed_otherwise` lists them.
    """
    found = []
    for one in records:
        if "error" in one:
            found.append(f"{one['claim']}: {one['error'].strip().splitlines()[-1]}")
        found += _otherwise(one, timed=False)
    return found


def timed_otherwise(records: Iterable[dict[str, Any]]) -> list[str]:
    """Timed statements whose verdict on this machine is not the expected one."""
    return [line for one in records for line in _otherwise(one, timed=True)]


def _otherwise(one: dict[str, Any], timed: bool) -> list[str]:
    return [
        f"{one['claim']}, {s['name']}: {s['verdict']}, expected {s['expected']} ({s['number']})"
        for s in one["statements"]
        if s["verdict"] != s["expected"] and s["timed"] == timed
    ]


def end_with_parent() -> None:
    """Initialise a worker process to end when the run is killed; it would wait for ever."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def read(results: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Settings and records of a file of results; a line that was cut short is left out."""
    lines: list[Any] = []
    for line in results.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    needed: list[set[str]] = [{"level", "seed"}, *[{"claim", "title", "statements"}] * len(lines)]
    if not lines or not all(
        isinstance(line, dict) and keys <= set(line)
        for line, keys in zip(lines, needed, strict=False)
    ):
        raise ValueError(f"{results} is not a file of results.")
    return lines[0], lines[1:]


def _kept(results: Path, header: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Claims that a file has, without those that ended in an error."""
    if not results.exists() or not results.read_bytes().strip():
        return {}
    before, records = read(results)
    other = [f"{k} {before.get(k)!r}, not {v!r}" for k, v in header.items() if before.get(k) != v]
    if other:
        raise ValueError(f"{results} cannot be resumed: it was made with {'; '.join(other)}.")
    return {one["claim"]: one for one in records if "error" not in one}


def _rewrite(results: Path, lines: list[dict[str, Any]]) -> None:
    """Replace the file at once: a reader sees the old one or the new one."""
    new = results.with_suffix(".new")
    new.write_text("".join(_line(one) for one in lines), encoding="utf-8")
    new.replace(results)


def _append(results: Path, one: dict[str, Any]) -> None:
    """Add one line, on the disk before anything else is begun."""
    with results.open("ab") as file:
        file.write(_line(one).encode())
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _locked(results: Path) -> Iterator[None]:
    """Keep other runs from the file, where the system can; the lock ends with the process."""
    try:
        import fcntl
    except ModuleNotFoundError:
        yield
        return
    with results.with_suffix(".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another run writes to {results}.") from None
        yield


def _code() -> str:
    """A short hash of the code and the texts of the suite, and of the package."""
    found = hashlib.sha256()
    for module in (suite, refattn):
        folder = Path(str(module.__file__)).parent
        for path in sorted(x for x in folder.rglob("*") if x.suffix in (".py", ".toml")):
            found.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return found.hexdigest()[:12]


def _line(one: dict[str, Any]) -> str:
    return json.dumps(one, allow_nan=False) + "\n"


def _run_batch(
    names: list[str],
    executor: Executor,
    level: str,
    seed: int,
    progress: Callable[[str, int, int], None] | None,
) -> Iterator[dict[str, Any]]:
    """Records of claims, each as soon as its last task has ended."""
    plans = {name: list(suite.claims()[name].tasks(level)) for name in names}
    found: dict[str, dict[int, Any]] = {name: {} for name in names}
    waiting: dict[Future[Any], tuple[str, int]] = {}
    todo = [(name, i) for name in names for i in range(len(plans[name]))]
    todo.reverse()
    alone = any(suite.claims()[name].alone for name in names)
    try:
        while todo or waiting:
            while todo and not (alone and waiting):
                name, i = todo.pop()
                future = executor.submit(_task, name, i, seed, dict(plans[name][i]))
                waiting[future] = (name, i)
            for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                name, i = waiting.pop(future)
                found[name][i] = _outcome(future)
                if progress is not None:
                    progress(name, len(found[name]), len(plans[name]))
                if len(found[name]) == len(plans[name]):
                    yield _judged(name, [found[name].pop(j) for j in sorted(found[name])])
    finally:
        for future in waiting:
            future.cancel()


def _outcome(future: Future[Any]) -> Any:
    """What came of a task; what kept it from coming back is an error of the task."""
    try:
        return future.result()
    except (BrokenExecutor, KeyboardInterrupt):
        raise
    except BaseException as error:
        return {"error": "".join(traceback.format_exception(error)), "seconds": 0.0}


def _task(name: str, index: int, seed: int, task: dict[str, Any]) -> dict[str, Any]:
    """One task, on one thread: its result or its error, and its time."""
    start = time.perf_counter()
    try:
        with threadpool_limits(1):
            result = suite.claims()[name].run(suite.generator(seed, name, index), **task)
        return {"result": result, "seconds": time.perf_counter() - start}
    except Exception:
        return {"error": traceback.format_exc(), "seconds": time.perf_counter() - start}


def _judged(name: str, tasks: list[dict[str, Any]]) -> dict[str, Any]:
    """The record of a claim; an error in it is a record too."""
    claim = suite.claims()[name]
    seconds = sum(task["seconds"] for task in tasks)
    error = next((task["error"] for task in tasks if "error" in task), None)
    if error is None:
        try:
            findings = claim.judge([task["result"] for task in tasks])
            one = suite.record(claim, findings, suite.alpha())
            _line(one)
            return {**one, "seconds": seconds}
        except Exception:
            error = traceback.format_exc()
    about = {"claim": name, "title": claim.title, "source": claim.source, "method": claim.method}
    return {**about, "statements": [], "error": error, "seconds": seconds}
