"""Independent tasks on the threads that BLAS may use: the only module that controls threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ContextDecorator
from contextvars import copy_context
from functools import cache
from signal import SIGINT, Signals, getsignal, signal
from threading import Lock, current_thread, local, main_thread
from types import FrameType
from typing import Any

_lock = Lock()
# By which what runs may be ended: Ctrl-C, a limit of time, a request.
_SIGNALS = [SIGINT, *(x for x in Signals if x.name in ("SIGALRM", "SIGTERM"))]


class Interrupted(KeyboardInterrupt):
    """An interruption, with what was `found` until then."""

    def __init__(self, found: Any) -> None:
        super().__init__()
        self.found = found


def for_each(
    worker: Callable[[], Callable[[Any], None]], items: Iterable[Any], *, most: int
) -> None:
    """Call a function for each item, in any order, on at most `most` threads.

    Each thread gets a function of its own from `worker`, with memory of its own. Products of the
    size of a block gain little from a BLAS with several threads, and all else nothing; and those
    threads spin for a while after each product, on cores that are needed. So threads take whole
    items, and BLAS has one thread meanwhile, from whatever thread this is called, unless `most` is
    0. There are as many as BLAS had: threadpoolctl and variables such as OMP_NUM_THREADS set both.
    The limits belong to the process (with OpenMP, to each thread): those that another thread sets
    meanwhile hold at once, also here, and are undone at the end of the last call that overlaps,
    which restores what was found at the start of the first.
    """
    remaining, turn = iter(items), Lock()

    def stop() -> None:
        nonlocal remaining
        with turn:
            remaining = iter(())

    def work() -> None:
        try:
            function = worker()
            while True:
                with turn:
                    item = next(remaining, None)
                if item is None:
                    return
                function(item)
        finally:
            stop()  # an error in one thread ends the others

    if most == 0:
        return work()
    with one_blas_thread(take=True) as held:
        count = min(held.count, most)
        if count == 1:
            return work()
        # Threads hold the limit, too: with OpenMP it is their own.
        alone, pool = one_blas_thread(take=True)(work), ThreadPoolExecutor(count)

        def end() -> None:
            stop()  # so does an interrupt
            pool.shutdown()

        held.end, started = end, []

        def start() -> None:
            for _ in range(count):
                # Each in a copy of the context, which holds numpy.errstate.
                started.append(pool.submit(copy_context().run, alone))

        try:
            held.put_off(start)
        except RuntimeError:  # no more threads, as when the interpreter shuts down
            work()
        for done in started:
            done.result()


def available() -> int:
    """Say how many threads the next `for_each` may have; 1 within one."""
    control = _find_control()
    if control.calls and not control.taken:
        return max(control.before, default=1)
    return max((library.num_threads or 1 for library in _blas().lib_controllers), default=1)


def architecture() -> str:
    """Name the processor for which BLAS has its kernels, "" where it does not say."""
    libraries = (library.info() for library in _blas().lib_controllers)
    return next((x["architecture"] for x in libraries if x.get("architecture")), "")


class Sequencer:
    """Call the functions of places 0, 1, ... in that order, whichever threads bring them."""

    def __init__(self) -> None:
        self._next, self._lock = 0, Lock()
        self._waiting: dict[int, Callable[[], None]] = {}

    def add(self, place: int, function: Callable[[], None]) -> None:
        """Call it, and those that waited for it, or leave it to the one before; nobody waits."""
        with self._lock:
            self._waiting[place] = function
            while (ready := self._waiting.pop(self._next, None)) is not None:
                ready()
                self._next += 1


class _Control:
    """How many calls hold BLAS to one thread, and what its libraries had before the first."""

    calls = 0
    before: Sequence[int] = ()
    taken = False  # whether a `for_each` has the threads


class _ControlOfThread(local, _Control):
    """The same where each thread has limits of its own, as with OpenMP."""


_of_process, _of_thread = _Control(), _ControlOfThread()


def _after_fork() -> None:
    """End, in a process forked from it, the calls of threads that it does not have."""
    global _lock
    _lock = Lock()
    for control in (_of_process, _of_thread):
        control.taken = False
        if control.calls:
            control.calls = 0
            _set_blas_threads(control.before)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _find_control() -> _Control:
    """Return the control of the process or, with OpenMP, of this thread."""
    layers = (getattr(library, "threading_layer", "") for library in _blas().lib_controllers)
    return _of_thread if "openmp" in layers else _of_process


class one_blas_thread(ContextDecorator):
    """Keep BLAS to one thread, for many small products; each `for_each` has the others.

    A signal that comes while threads are set, end or are restored is handled after that.
    """

    def __init__(self, *, take: bool = False) -> None:
        self._take = take  # the other threads, unless another call has them
        self.count = 1  # that were taken
        self._held, self._takes = False, False
        self.end: Callable[[], None] = lambda: None  # what is to end before threads are restored
        self._handlers: dict[int, Any] = {}  # that signals had
        self._interrupt: tuple[int, Any] | None = None

    def _recreate_cm(self) -> one_blas_thread:  # for each call of what it decorates
        return one_blas_thread(take=self._take)

    def __enter__(self) -> one_blas_thread:
        self._control = control = _find_control()
        try:
            if current_thread() is main_thread():
                for number in _SIGNALS:
                    if callable(handler := getsignal(number)):
                        self._handlers[number] = handler
                        signal(number, self._on_interrupt)
            with _lock:
                control.calls, self._held = control.calls + 1, True
                if control.calls == 1:
                    libraries = _blas().lib_controllers
                    control.before = [library.num_threads or 1 for library in libraries]
                    if max(control.before, default=1) > 1:
                        _set_blas_threads([1] * len(libraries))
                if self._take and not control.taken:
                    control.taken = self._takes = True
                    self.count = max(control.before, default=1)
        except BaseException:
            self.__exit__()
            raise
        if self._interrupt is not None:
            self.__exit__()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        control = self._control
        with _lock:
            if self._takes:
                control.taken = False
            if self._held:
                control.calls = max(control.calls - 1, 0)  # 0 already in a process forked meanwhile
                if control.calls == 0 and max(control.before, default=1) > 1:
                    _set_blas_threads(control.before)
        for number, handler in self._handlers.items():
            if getsignal(number) == self._on_interrupt:
                signal(number, handler)
        self._deliver()

    def put_off(self, function: Callable[[], None]) -> None:
        """Call a function, and let an interrupt that comes meanwhile wait."""
        function()
        self._deliver()

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        within, cls = frame, type(self)
        codes = [x.__code__ for x in (cls.__enter__, cls.__exit__, cls.put_off)]
        while within is not None and within.f_code not in codes:
            within = within.f_back
        if within is None:
            self._handlers[number](number, frame)
        else:
            self._interrupt = number, frame

    def _deliver(self) -> None:
        interrupt, self._interrupt = self._interrupt, None
        if interrupt is not None:
            self._handlers[interrupt[0]](*interrupt)


def _set_blas_threads(numbers: Sequence[int]) -> None:
    """Set the threads of each library; threadpoolctl may ignore all threads but one otherwise."""
    for library, number in zip(_blas().lib_controllers, numbers, strict=True):
        release = getattr(library, "clear_controlling_thread", lambda force: None)  # from 3.7 on
        release(force=True)
        library.set_num_threads(number)
        release(force=True)


@cache
def _blas() -> Any:
    """Find the BLAS libraries that are loaded."""
    from threadpoolctl import ThreadpoolController  # here, so that importing the package is fast

    return ThreadpoolController().select(user_api="blas")
