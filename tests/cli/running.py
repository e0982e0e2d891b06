"""Run commands in this process or in a new one, and read what they print."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from refattn import cli

pytest.importorskip("rich")
testing = pytest.importorskip("click.testing")

ENV = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": ""}


def run(*words, width=200):
    """Run a command in this process; at the default width tables have all columns."""
    env = {"COLUMNS": width and str(width)}
    return testing.CliRunner().invoke(cli.commands(), [str(x) for x in words], env=env)


def shown(*words, width=200):
    """What a command prints, with nothing unexpected beside it."""
    result = run(*words, width=width)
    assert result.exit_code == 0, result.output
    known = re.compile(
        r"(?:skipped|estimated time|read as float32): |\w+: (?:\d+ of \d+|not yet done) after "
    )
    assert all(map(known.match, result.stderr.splitlines()))
    return result.stdout


def loads(text):
    """What JSON says, if it is JSON: Python reads NaN too."""

    def refuse(token):
        raise AssertionError(f"{token} is not JSON")

    return json.loads(text, parse_constant=refuse)


def report(*words):
    return loads(shown(*words, "--format", "json"))


def _unread():
    """A pipe of which the other end is closed."""
    read, write = os.pipe()
    os.close(read)
    return write


STREAMS = {  # what may become of a standard stream that is not read here
    "closed": lambda: os.open(os.devnull, os.O_WRONLY),
    "unread": _unread,
    "full": lambda: os.open("/dev/full", os.O_WRONLY),
}


class Ended(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def process(*words, out="read", err="read", env=None, python=(), pass_fds=()):
    """Run a command in a new process; `out` and `err` are files or names of `STREAMS`."""
    shell = " ".join(f"{n}>&-" for n, what in ((1, out), (2, err)) if what == "closed")
    before = ["sh", "-c", f'exec "$@" {shell}', "sh"] if shell else []
    with contextlib.ExitStack() as stack:
        streams = {}
        for name, what in (("stdout", out), ("stderr", err)):
            streams[name] = what if isinstance(what, int) else subprocess.PIPE
            if isinstance(what, str) and what != "read":
                streams[name] = STREAMS[what]() if what in STREAMS else os.open(what, os.O_WRONLY)
                stack.callback(os.close, streams[name])
        command = [*before, sys.executable, *python, "-m", "refattn", *words]
        env = ENV | (env or {})
        done = subprocess.run(command, encoding="utf-8", env=env, timeout=120, **streams)
    return Ended(done.returncode, done.stdout or "", done.stderr or "")


class Forks:
    """Runs commands as `process` does, in forks of one process."""

    def __init__(self, folder):
        self.files = [str(folder / "stdout"), str(folder / "stderr")]
        command = [sys.executable, "-c", "from tests.cli import forks; forks.serve()"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        root, env = Path(__file__).parents[2], ENV | {"TERM": "xterm"}
        self.driver = subprocess.Popen(command, **pipes, text=True, bufsize=1, cwd=root, env=env)

    def __call__(self, *words, out="read", err="read"):
        for file in self.files:
            Path(file).write_bytes(b"")
        streams = [y if x == "read" else x for x, y in zip((out, err), self.files, strict=True)]
        self.driver.stdin.write(json.dumps([words, os.getcwd(), *streams]) + "\n")
        status = int(self.driver.stdout.readline())
        return Ended(status, *(Path(file).read_text("utf-8") for file in self.files))

    def close(self):
        self.driver.communicate()


def gone(process):
    """Whether a process ends within seconds; if not it is killed."""
    for _ in range(100):
        try:
            os.kill(process, 0)
            with open(f"/proc/{process}/stat") as file:
                if file.read().split()[2] == "Z":  # nobody waits for it here
                    return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.1)
    os.kill(process, signal.SIGKILL)
    return False


def cells(output, title):
    """Rows of the table below a line that begins so, as cells two spaces apart."""
    lines = output.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(title))
    start = next(i for i in range(start, len(lines)) if lines[i].startswith("─")) + 1
    stop = next(i for i in range(start, len(lines) + 1) if i == len(lines) or "   " not in lines[i])
    return [re.split(r" {2,}", line.strip()) for line in lines[start:stop]]


def headings(output):
    """Names of the columns of all tables, which have them in a line each."""
    lines = output.splitlines()
    rules = [i for i, line in enumerate(lines) if line.startswith("─")]
    return [name for i in rules for name in re.split(r" {2,}", lines[i - 1].strip())]
