"""Ask a check that is late to stop."""

from __future__ import annotations

import ctypes
import sys
import threading


def interrupt(thread: threading.Thread) -> None:
    """Ask a thread to stop: a loop in Python does, one in compiled code goes on unseen.

    An import is not interrupted: its module would stay half made, and locked for every thread.
    """
    if thread.ident is not None and not _imports(thread.ident):
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit)
        )


def _imports(ident: int) -> bool:
    """Return whether a thread is within an import."""
    frame = sys._current_frames().get(ident)
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None
