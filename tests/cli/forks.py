"""Import everything once and run each command in a fork, which saves half a second for each.

Reads lines of JSON: the words of a command, its folder, and a file or a name of `running.STREAMS`
for each standard stream. Writes the exit status of each command.
"""

import atexit
import gc
import json
import os
import signal
import sys
import threading
import traceback
from multiprocessing import process

from refattn import cli, compare, conformance, profile, verification  # noqa: F401
from refattn.cli import group  # noqa: F401
from tests.cli.running import STREAMS


def status(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def call(command):
    """`subprocess.call` of `python -c code`, which ends as the interpreter ends."""
    if child := os.fork():
        return status(child)
    code = 0
    atexit._clear()  # the folder of the answer is not this process's to remove
    try:
        sys.argv = ["-c", *command[3:]]
        exec(command[2], {"__name__": "__main__"})
    except SystemExit as ending:
        code = ending.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    end(code)


def end(code):
    """Exit as the interpreter does, without freeing memory."""
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            code = 120
    os._exit(code)


def serve():
    cli.subprocess.call = call
    gc.freeze()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    for line in sys.stdin:
        words, folder, *streams = json.loads(line)
        child = os.fork()
        if not child:
            signal.alarm(100)
            os.chdir(folder)
            process.ORIGINAL_DIR = folder  # of what --isolate spawns
            for number, what in enumerate(streams, 1):
                opened = STREAMS[what]() if what in STREAMS else os.open(what, os.O_WRONLY)
                os.dup2(opened, number)
                if what == "closed":
                    os.close(number)
                    setattr(sys, ["stdout", "stderr"][number - 1], None)
            sys.argv = ["refattn", *words]
            try:
                cli.main()
            except SystemExit as ending:
                end(ending.code or 0)
            end(1)
        answers.write(f"{status(child)}\n")
