"""Run the command line as a process: streams, exit status, and candidates that end the process.

The commands themselves are in `cli.group`, which needs the packages of the extra ``cli``; this
module says so where they are missing.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from contextlib import suppress
from importlib import import_module
from io import TextIOWrapper
from typing import TYPE_CHECKING

from ..arrays.words import ending
from .streams import INTERRUPTED, drop_unread, open_closed

if TYPE_CHECKING:
    import click


_MISTAKE = 70  # EX_SOFTWARE of sysexits.h
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def main() -> None:
    """Run the command line (the console script `refattn`)."""
    open_closed()
    try:
        for name in ("click", "rich"):
            import_module(name)
    except ModuleNotFoundError:
        from ..files.arrays import INSTALL

        sys.stderr.write(f"refattn: error: the command line {INSTALL}\n")
        sys.exit(2)
    if sys.argv[1:2] == ["check"]:
        sys.exit(_check_in_a_process(sys.argv[1:]))
    _run_commands()


def _run_commands() -> None:
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # characters that it does not have
    try:
        for number in _STOP_SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, _interrupt)
        if os.name == "posix":
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)
        commands()(prog_name="refattn")
    except KeyboardInterrupt:  # before a command has begun
        sys.stderr.write("Aborted!\n")
        sys.exit(INTERRUPTED)
    except Exception:  # Python's own status for these is 1, that of FAIL
        traceback.print_exc()
        sys.stderr.write(
            "Error: this is a mistake of refattn, not of what it was given, and no verdict. Please "
            "report it where you have refattn from: the lines above, the command, and the output "
            "of refattn --version\n"
        )
        sys.exit(_MISTAKE)
    finally:
        drop_unread()


def _interrupt(number: int, frame: object) -> None:
    """Interrupt a command, which prints what it has found."""
    # A terminal and `timeout` signal all processes, and the first of them hands that on: the same
    # signal comes twice.
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _check_in_a_process(words: list[str]) -> int:
    """Run a check in a new process, and take the status that it sends.

    A candidate may end its process at any time, in compiled code too, and with status 0.
    """
    ours, theirs = socket.socketpair()
    proof = secrets.token_hex(16).encode()  # told before there is a candidate
    with ours, theirs:
        ours.sendall(proof)
        code = (
            f"import sys; sys.path[:] = {sys.path!r}\n"
            "from refattn.cli.process import leave_status\n"
            f"leave_status({theirs.fileno()}, {os.getpid()})"
        )
        command = [sys.executable, "-c", code, *words]
        ended = _wait_for(command, theirs.fileno())
        ours.setblocking(False)
        with suppress(OSError):  # of nothing to read
            given, _, status = ours.recv(len(proof) + 4).partition(b" ")
            if given == proof:
                return int(status)
    if -ended in _STOP_SIGNALS:
        return 128 - ended
    _report_lost(ended)
    return 2


def _wait_for(command: list[str], number: int) -> int:
    """Run a command that gets a file descriptor, and hand on the signals that would end it."""
    # Neither process is interrupted before it knows what to do then.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    with subprocess.Popen(command, pass_fds=[number]) as running:
        for each in _STOP_SIGNALS:
            if signal.getsignal(each) != signal.SIG_IGN:
                signal.signal(each, lambda number, _: running.send_signal(number))
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return running.wait()


def _report_lost(status: int) -> None:
    """Print how the process ended; it may have left the cursor hidden, in a line that it wrote."""
    from rich.console import Console

    console = Console(stderr=True)
    console.show_cursor()
    start = "\n" if console.is_terminal else ""
    end = f"the process ended {ending(status)} before the report was printed"
    sys.stderr.write(f"{start}Error: {end}; without --in-process, its checks end otherwise\n")


def leave_status(number: int, parent: int) -> None:
    """Run the command line, and send its exit status after the proof that came with the socket."""
    open_closed()
    answers = socket.socket(fileno=number)
    answers.set_inheritable(False)
    proof = answers.recv(64)
    threading.Thread(target=_end_when_orphaned, args=(parent,), daemon=True).start()
    try:
        _run_commands()
    except SystemExit as ending:
        answers.sendall(proof + f" {ending.code or 0}".encode())
        _end_at_once(ending)
        raise


def _end_when_orphaned(parent: int) -> None:
    """End when the process that waits for the answer is no more."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(2)


def _end_at_once(ending: SystemExit) -> None:
    """End at once if a candidate hangs in compiled code, or its threads still run.

    The interpreter's own shutdown would unwind the first, and abort when the code is C++, and wait
    for the others.
    """
    others = [t for t in threading.enumerate() if t is not threading.main_thread()]
    if any(t.name.startswith("check ") or not t.daemon for t in others):
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os._exit(int(ending.code or 0))


def commands() -> click.Group:
    """Return the command group; click and rich must be installed."""
    from .group import group

    return group
