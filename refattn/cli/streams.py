"""The standard streams, kept from what a candidate makes of them."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

INTERRUPTED = 128 + 2  # exit status, as of a program that Ctrl-C ends


def open_closed() -> None:
    """Open what the process began without: Python has no object for a closed standard error."""
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8")


@contextmanager
def unread() -> Iterator[None]:
    """Print for as long as somebody reads: what is found does not depend on it."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EPIPE:
            raise
        drop_unread()


def drop_unread() -> None:
    """Drop what nobody reads any more: the interpreter would complain of it a second time."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextmanager
def kept(to_error: bool) -> Iterator[None]:
    """Give back the standard streams and `sys.exit`, whatever a candidate makes of them.

    What it prints, from compiled code too, may go to standard error instead.
    """
    leave, streams = sys.exit, (sys.stdout, sys.stderr)
    files = [_copy_file(stream, fd) for fd, stream in enumerate(streams, 1)]
    if to_error:
        if None not in files:
            os.dup2(2, 1)
        sys.stdout = sys.stderr
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr, *streams):
            with suppress(Exception):  # it may be anything that a candidate has put there
                stream.flush()
        _flush_c()
        for fd, file in enumerate(files, 1):
            if file is not None:
                os.dup2(file, fd)
                os.close(file)
        sys.exit = leave
        sys.stdout, sys.stderr = (_reopen(stream, fd) for fd, stream in enumerate(streams, 1))


def _copy_file(stream: Any, fd: int) -> int | None:
    """Copy the file descriptor below a standard stream, if it has one."""
    with suppress(AttributeError, OSError, ValueError):
        stream.flush()
        _flush_c()
        return os.dup(fd) if stream.fileno() == fd else None
    return None


def _reopen(stream: Any, fd: int) -> Any:
    """Return the stream, or another on its file if it was closed or detached."""
    with suppress(AttributeError, ValueError):
        if not stream.closed:
            return stream
    with suppress(OSError):
        return open(fd, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
    return stream


def _flush_c() -> None:
    """Write out the buffers of C, while they still go to the right place."""
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).fflush(None)
