"""A candidate in a process of its own, so that the end of that process is a failure like others."""

from __future__ import annotations

import inspect
import io
import multiprocessing
import os
import pickle
import pkgutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from functools import partial, update_wrapper
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

from ....arrays.words import ending, said
from .adapter import Adapter, name_of
from .failures import Failure, Refusal, SeveralResults
from .programs import GRACE, Subprocess

_LARGEST_ANSWER = 1 << 32  # bytes of an answer
# What an answer is made of: the candidate's process may send anything else, too.
_ANSWERS: dict[tuple[str, str], Any] = {
    (x.__module__, x.__name__): x for x in (Failure, Refusal, SeveralResults, ModuleNotFoundError)
}
_ARRAYS = {
    *(("numpy", "ndarray"), ("numpy", "dtype")),
    *(
        (f"numpy.{core}.multiarray", name)
        for core in ("core", "_core")
        for name in ("scalar", "_reconstruct")
    ),
    *((f"numpy.{core}.numeric", "_frombuffer") for core in ("core", "_core")),
}


class Crash(Refusal):
    """A candidate whose process has ended."""


class Elsewhere:
    """A callable that another process imports: none of its code runs in this one.

    `find` is pickled, and imports it there in at most `timeout` seconds. What `find` raises, or
    that it did not end, is raised as a ValueError here, in its words.
    """

    def __init__(self, find: Callable[[], Any], timeout: float | None = None) -> None:
        self.start = time.monotonic()
        self.worker = _Worker(find)
        most = None if timeout is None else timeout + _TO_START
        try:
            self.worker.start()
            problem, self.__qualname__, parameters = self.worker.ask(None, most)
        except Crash as crash:
            problem = crash.got
        except BaseException:  # an interrupt: Python would wait for the process before it ends
            self.close()
            raise
        if problem:
            self.close()
            raise ValueError(problem)
        if parameters is not None:
            kinds = list(_WAYS_TO_PASS.__members__.values())
            self.__signature__ = inspect.Signature(
                [
                    inspect.Parameter(name, kinds[kind], default=_Shown(x) if x else _NO_DEFAULT)
                    for name, kind, x in parameters
                ]
            )

    def __call__(self, *arrays: Any, **options: Any) -> Any:
        raise TypeError("another process calls it")

    def close(self) -> None:
        """End its process."""
        self.worker.end()


_WAYS_TO_PASS: Any = type(inspect.Parameter.KEYWORD_ONLY)
_NO_DEFAULT = inspect.Parameter.empty


@dataclass(frozen=True)
class _Shown:
    """A default value of which only the words are known."""

    words: str

    def __repr__(self) -> str:
        return self.words


class InvertedMasks:
    """A callable called with masks of the other polarity."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        update_wrapper(self, fn, updated=())
        self.fn = fn

    def __call__(self, *arrays: Any, **options: Any) -> Any:
        if "mask" in options:
            options["mask"] = ~options["mask"]
        return self.fn(*arrays, **options)


@contextmanager
def isolated(adapter: Adapter) -> Iterator[Adapter]:
    """Call the same candidate in another process, which ends with the context."""
    if isinstance(adapter.fn, Subprocess):
        raise ValueError("`isolate` must be left out for a program: it has a process of its own.")
    fn = adapter.fn if isinstance(adapter.fn, Elsewhere) else _send_elsewhere(adapter)
    try:
        attributes = {field.name: getattr(adapter, field.name) for field in fields(adapter)}
        yield _Isolated(**attributes, worker=fn.worker)
    finally:
        fn.close()


def _send_elsewhere(adapter: Adapter) -> Elsewhere:
    """Have a candidate imported by another process, by its name if it has one."""
    try:
        pickled = pickle.dumps(adapter.source or adapter.fn)
        return Elsewhere(partial(_unpickle, pickled))
    except Exception as error:  # of what a candidate does when it is pickled
        words = (
            said(error)
            if isinstance(error, ValueError)
            else f"{type(error).__name__}: {said(error)}"
        )
        raise ValueError(
            "`isolate` must be left out for a callable that another process cannot import, "
            f"got {adapter.name}: {words}."
        ) from None


def _unpickle(pickled: bytes) -> Any:
    try:
        fn = pickle.loads(pickled)
        return pkgutil.resolve_name(fn) if isinstance(fn, str) else fn
    except BaseException as error:  # importing may end in any way
        raise ValueError(f"{type(error).__name__}: {said(error)}") from None


@dataclass(frozen=True)
class _Isolated(Adapter):
    """An adapter whose calls a worker makes."""

    worker: Any = None

    def _call(self, *arrays: Any, **options: Any) -> Any:
        """Return the candidate's result; like the adapter, it may raise `Failure`."""
        inverted = isinstance(self.fn, InvertedMasks)
        conventions = (self.estimator, self.capabilities, self.tags)
        kind, content = self.worker.ask((inverted, conventions, arrays, options))
        if kind is not None:
            raise kind(*content)
        return content


_TO_START = 20.0  # seconds more for an interpreter and the libraries of a candidate


class _Worker:
    """A process that makes calls of a candidate."""

    def __init__(self, find: Callable[[], Any]) -> None:
        # A forked process would lack the threads of libraries, which then wait for them.
        context = multiprocessing.get_context("spawn")
        self._connection, self._other = context.Pipe()
        self._process = context.Process(target=_serve, args=(self._other, find))
        self._asked = False

    def start(self) -> None:
        """Start the process, which hears no Ctrl-C: this one decides what ends."""
        if os.name == "posix":
            resource_tracker.ensure_running()  # its own start would let the signal through
            before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            self._process.start()
        finally:
            self._other.close()
            if os.name == "posix":
                signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def ask(self, question: Any, timeout: float | None = None) -> Any:
        """Send a question and wait for the answer, which only holds arrays, text and numbers."""
        self._asked = True
        try:
            self._connection.send(question)
            # Processes that the candidate has started may hold the other end open.
            ready = wait([self._connection, self._process.sentinel], timeout)
            if not ready:
                return f"importing it did not end within {timeout:g} s", "", None
            if self._connection in ready:
                answer = _Answer(io.BytesIO(self._connection.recv_bytes(_LARGEST_ANSWER))).load()
                self._asked = False
                return answer
        except (EOFError, OSError):
            pass
        except Exception as error:  # of bytes that are no answer
            raise Crash("a result", f"an answer that holds {said(error)}") from None
        self._process.join()
        raise Crash("a result", f"none: the process ended {ending(self._process.exitcode or 0)}")

    def end(self) -> None:
        """End the process, whatever it does, and those that it has started."""
        if self._process.pid is None:  # it has not started
            return
        if not self._asked:  # else it has no time to hear of it
            with suppress(OSError):
                self._connection.send(_END)
            self._process.join(GRACE)
        if os.name == "posix":
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()


_END = "end"


class _Answer(pickle.Unpickler):
    """Read an answer, but call nothing on its behalf except what makes an array."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ANSWERS:
            return _ANSWERS[module, name]
        if (module, name) in _ARRAYS:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"a {module}.{name}")


def _serve(connection: Connection, find: Callable[[], Any]) -> None:
    """Make the calls that are asked for."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if os.name == "posix":
        os.setsid()  # the processes that it starts end with it
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    threading.Thread(target=_end_with_parent, daemon=True).start()
    own = os.getpid()
    adapters: dict[str, Adapter] = {}
    connection.recv()
    try:
        fn = find()
    except BaseException as error:  # importing may end in any way
        _send(own, connection, (said(error) or type(error).__name__, "", None))
        return
    _send(own, connection, ("", name_of(fn), _list_parameters(fn)))
    while (question := connection.recv()) != _END:
        inverted, conventions, arrays, options = question
        key = repr((inverted, conventions))
        if key not in adapters:
            adapters[key] = Adapter(InvertedMasks(fn) if inverted else fn, *conventions)
        _send(own, connection, _answer_call(adapters[key], arrays, options))


def _send(own: int, connection: Connection, answer: Any) -> None:
    """Send an answer, unless this is a process that the candidate has forked: that ends."""
    if os.getpid() != own:
        os._exit(1)
    connection.send(answer)


def _list_parameters(fn: Any) -> list[tuple[str, int, str]] | None:
    """List the parameters of a function: name, kind, and the words of the default value, if any."""
    try:
        parameters = inspect.signature(fn).parameters.values()
        return [
            (x.name, int(x.kind), "" if x.default is x.empty else repr(x.default))
            for x in parameters
        ]
    except Exception:  # no signature, or one that fails
        return None


def _end_with_parent() -> None:
    """End with the process that asks."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    if os.name == "posix":
        os.killpg(0, signal.SIGKILL)
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
