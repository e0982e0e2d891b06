"""How far work is: on standard error, on a terminal and elsewhere."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

from .streams import drop_unread

FIRST = 1.5  # seconds to the first line where there is no terminal,
_EVERY = 30.0  # and between the others
_SOON = 1.0  # seconds after which the limit of time is printed,
_LONG = 10.0  # if it is longer


def notice(text: str) -> None:
    """Print a line beside the results, which do not depend on whether anybody reads it."""
    try:
        click.echo(text, err=True)
    except OSError:
        drop_unread()


def spell(seconds: float) -> str:
    """Return a time to two digits.

    >>> spell(14.3), spell(200), spell(9000)
    ('14 s', '3.3 min', '2.5 h')
    """
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.2g} {unit}"
    return f"{seconds:.2g} s" if seconds < 99.5 else f"{seconds:.0f} s"


class Work:
    """A piece of work, named by a word, that says how far it is.

    On a terminal there is a bar with the time so far, and else a line soon and then now and then,
    whether parts end or not. No time is estimated: parts that are done do not tell how long others
    take. `tick` counts parts: `total`, if that is known, and more may follow.
    """

    def __init__(self, description: str, total: int = 0) -> None:
        self.description, self.total, self.done = description, total, 0
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            disable=sys.stderr is None or not sys.stderr.isatty(),
        )
        self._task = self._bar.add_task(description, total=total or None)
        self._start, self._ended = time.monotonic(), threading.Event()

    def __enter__(self) -> Work:
        self._start = time.monotonic()
        self._bar.start()
        if self._bar.disable:
            threading.Thread(target=self._tell, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._bar.stop()

    def _tell(self) -> None:
        """Print how far it is while it lasts, where there is no bar."""
        wait = FIRST
        while not self._ended.wait(wait):
            wait, passed = _EVERY, time.monotonic() - self._start
            counted = self.total and self.done <= self.total
            count = f"{self.done} of {self.total}" if counted else "not yet done"
            notice(f"{self.description}: {count} after {spell(passed)}")

    def expect(self, total: int) -> None:
        """Set the number of parts, once it is known."""
        self.total = total
        self._bar.update(self._task, total=total or None)

    def track(self, items: Sequence[Any]) -> Iterable[Any]:
        """Count items as they are done."""
        self.total, self.done = len(items), 0
        self._bar.reset(self._task, total=self.total)
        self._start = time.monotonic()
        for item in items:
            yield item
            self.tick()

    def tick(self) -> None:
        """Count one part as done."""
        self.done += 1
        self._bar.update(self._task, completed=min(self.done, self.total))


def checking(checks: Sequence[Any], most: float = 0.0) -> Iterator[Any]:
    """Name each check while it runs, with its number and the time so far, on a terminal.

    Elsewhere there is a line now and then. On both, the limit of time is printed when some is over.
    A candidate may close or replace the streams of Python.
    """
    announced = _announced(checks, most)
    if not os.isatty(2):
        said = time.monotonic()
        for number, check in enumerate(announced, 1):
            if time.monotonic() - said > _EVERY:
                said = time.monotonic()
                _write(f"check {number} of {len(checks)}: {check.name}\n")
            yield check
        return
    with open(os.dup(2), "w", encoding="utf-8") as terminal:
        line = Progress(
            SpinnerColumn(),
            "{task.description}",
            TimeElapsedColumn(),
            console=Console(file=terminal),
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        with line:
            task = line.add_task("", total=None)
            for number, check in enumerate(announced, 1):
                name = f"check {number} of {len(checks)}: {check.name}"
                line.update(task, description=name, refresh=True)
                yield check


def _announced(checks: Sequence[Any], most: float) -> Iterator[Any]:
    """Print the limit of time once, to the file itself."""
    start, silent = time.monotonic(), most > _LONG
    for check in checks:
        if silent and time.monotonic() - start > _SOON:
            silent = False
            _write(f"time limit: {spell(most)} (--time-limit sets it)\n")
        yield check


def _write(text: str) -> None:
    with suppress(OSError):
        os.write(2, text.encode())
