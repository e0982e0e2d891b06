"""A candidate in a process of its own, so that the end of that process is a failure like others."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import pkgutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from multiprocessing.connection import Connection, wait
from typing import Any

from ....arrays.words import ending, said
from .adapter import Adapter
from .failures import Failure, Refusal
from .programs import GRACE, Subprocess


class Crash(Refusal):
    """A candidate whose process has ended."""


@contextmanager
def isolated(adapter: Adapter) -> Iterator[Adapter]:
    """Call the same candidate in another process, which ends with the context."""
    if isinstance(adapter.fn, Subprocess):
        raise ValueError("`isolate` must be left out for a program: it has a process of its own.")
    worker = _Worker()
    try:
        worker.take(adapter)
        attributes = {field.name: getattr(adapter, field.name) for field in fields(adapter)}
        yield _Isolated(**attributes, worker=worker)
    finally:
        worker.end()


@dataclass(frozen=True)
class _Isolated(Adapter):
    """An adapter whose calls a worker makes."""

    worker: Any = None

    def _call(self, *arrays: Any, **options: Any) -> Any:
        return self.worker.call(arrays, options)


class _Worker:
    """A process that makes calls of a candidate."""

    def __init__(self) -> None:
        # A forked process would lack the threads of libraries, which then wait for them.
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other,))
        self._process.start()
        other.close()

    def take(self, adapter: Adapter) -> None:
        """Give the process the candidate."""
        try:
            # By its name where there is one, as a callable may not be pickled.
            fn = pickle.dumps(adapter.source or adapter.fn)
            problem = self._ask((fn, adapter.estimator, adapter.capabilities, adapter.tags))
        except Crash as crash:
            problem = crash.got
        except Exception as error:  # of what a candidate does when it is pickled
            problem = f"{type(error).__name__}: {said(error)}"
        if problem:
            raise ValueError(
                "`isolate` must be left out for a callable that another process cannot import, "
                f"got {adapter.name}: {problem}."
            )

    def call(self, arrays: Any, options: Any) -> Any:
        """Return the candidate's result; like the adapter, it may raise `Failure`."""
        kind, content = self._ask((arrays, options))
        if kind is not None:
            raise kind(*content)
        return content

    def _ask(self, question: Any) -> Any:
        try:
            self._connection.send(question)
            # Processes that the candidate has started may hold the other end open.
            if self._connection in wait([self._connection, self._process.sentinel]):
                return self._connection.recv()
        except (EOFError, OSError):
            pass
        self._process.join()
        raise Crash("a result", f"none: the process ended {ending(self._process.exitcode or 0)}")

    def end(self) -> None:
        """End the process, whatever it does."""
        with suppress(OSError):
            self._connection.send(None)
        self._process.join(GRACE)
        self._process.kill()
        self._process.join()


def _serve(connection: Connection) -> None:
    """Make the calls that are asked for."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the other process decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    pickled, *rest = connection.recv()
    try:
        fn = pickle.loads(pickled)
        adapter = Adapter(pkgutil.resolve_name(fn) if isinstance(fn, str) else fn, *rest)
    except BaseException as error:  # importing may end in any way
        connection.send(f"{type(error).__name__}: {said(error)}")
        return
    connection.send("")
    while (question := connection.recv()) is not None:
        connection.send(_answer_call(adapter, *question))


def _end_with_parent() -> None:
    """End with the process that asks."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)


def _answer_call(adapter: Adapter, arrays: Any, options: Any) -> tuple[type | None, Any]:
    """Return the result of a call, or the type and the arguments of an exception."""
    try:
        return None, adapter._call(*arrays, **options)
    except Failure as failure:
        return type(failure), (failure.expected, failure.got)
    except ModuleNotFoundError as error:
        return ModuleNotFoundError, (said(error),)
    except BaseException as error:  # also SystemExit and the like, from the candidate
        return Refusal, ("a result", f"{type(error).__name__}: {said(error)}")
