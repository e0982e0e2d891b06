"""Independent tasks on the threads that BLAS may use: the only module that controls threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from functools import cache
from threading import Lock
from typing import Any

__all__ = ["for_each"]

_lock = Lock()


def for_each(
    worker: Callable[[], Callable[[Any], None]], items: Iterable[Any], *, most: int
) -> None:
    """Call a function for each item, in any order, on at most `most` threads.

    Each thread gets a function of its own from `worker`, with memory of its own. Products of the
    size of a block gain little from a BLAS with several threads, and all else nothing; and those
    threads spin for a while after each product, on cores that are needed. So threads take whole
    items, and BLAS has one thread meanwhile, unless `most` is 0. There are as many as BLAS had:
    threadpoolctl and variables such as OMP_NUM_THREADS set both. The limits belong to the process:
    those that another thread sets meanwhile hold at once, also here, and are undone at the end,
    which restores what was found at the start.
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
    with _blas_threads() as count:
        count = min(count, most)
        if count == 1:
            return work()
        with ThreadPoolExecutor(count) as pool:
            started = []
            try:
                try:
                    for _ in range(count):
                        # Each in a copy of the context, which holds numpy.errstate.
                        started.append(pool.submit(copy_context().run, work))
                except RuntimeError:  # no more threads, as when the interpreter shuts down
                    work()
                for done in started:
                    done.result()
            finally:
                stop()  # so does an interrupt


@contextmanager
def _blas_threads() -> Iterator[int]:
    """Take over the threads of BLAS: their number, or 1 while another call has them."""
    blas = _blas()
    with _lock:
        count = max((library.num_threads or 1 for library in blas.lib_controllers), default=1)
        limits = blas.limit(limits=1) if count > 1 else None
    try:
        yield count
    finally:
        if limits is not None:
            with _lock:
                limits.restore_original_limits()


@cache
def _blas() -> Any:
    """Find the BLAS libraries that are loaded."""
    from threadpoolctl import ThreadpoolController  # here, so that importing the package is fast

    return ThreadpoolController().select(user_api="blas")
